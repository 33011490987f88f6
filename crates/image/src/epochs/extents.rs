//! Ranges of a disk and what was written to each: a later write replaces an earlier one.

use std::collections::BTreeMap;
use std::ops::Range;

/// A value of a range that can be cut into values of its parts.
pub(super) trait Value: Clone {
    /// Returns the value of the part that begins `bytes` further on.
    fn skip(&self, bytes: u64) -> Self;

    /// Whether `next` continues this value, which has `length` bytes, so that both are one range.
    fn continues(&self, length: u64, next: &Self) -> bool;
}

/// Ranges that do not overlap, by their starts.
#[derive(Debug, Clone)]
pub(super) struct Extents<V>(BTreeMap<u64, (u64, V)>);

impl<V> Default for Extents<V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<V: Value> Extents<V> {
    /// Returns the number of ranges.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns all ranges with their values, in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Range<u64>, &V)> {
        self.0.iter().map(|(start, (end, value))| (*start..*end, value))
    }

    /// Gives a range a value, in place of what is there.
    pub(super) fn insert(&mut self, range: Range<u64>, value: V) {
        if range.is_empty() {
            return;
        }
        self.cut(&range);
        if let Some((start, (end, before))) = self.0.range_mut(..range.start).next_back()
            && *end == range.start
            && before.continues(range.start - start, &value)
        {
            *end = range.end;
            return;
        }
        self.0.insert(range.start, (range.end, value));
    }

    /// Removes what is in a range: ranges that reach out of it keep their other parts.
    fn cut(&mut self, range: &Range<u64>) {
        let before = self.0.range(..range.start).next_back().map(|(start, (end, _))| (*start, *end));
        if let Some((start, end)) = before.filter(|(_, end)| *end > range.start)
            && let Some((kept, value)) = self.0.get_mut(&start)
        {
            *kept = range.start;
            let rest = (end > range.end).then(|| value.skip(range.end - start));
            if let Some(rest) = rest {
                self.0.insert(range.end, (end, rest));
            }
        }
        while let Some((start, end)) = self.0.range(range.clone()).next().map(|(start, (end, _))| (*start, *end)) {
            if let Some((_, value)) = self.0.remove(&start)
                && end > range.end
            {
                self.0.insert(range.end, (end, value.skip(range.end - start)));
            }
        }
    }

    /// Returns the parts of a range in ascending order, with their values; `None`: nothing was written there.
    pub(super) fn parts(&self, range: Range<u64>) -> Vec<(Range<u64>, Option<V>)> {
        let before = self.0.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
        let (mut parts, mut at) = (Vec::new(), range.start);
        for (start, (end, value)) in self.0.range(before..range.end) {
            let part = (*start).max(at)..(*end).min(range.end);
            if part.is_empty() {
                continue;
            }
            if at < part.start {
                parts.push((at..part.start, None));
            }
            at = part.end;
            parts.push((part.clone(), Some(value.skip(part.start - start))));
        }
        if at < range.end {
            parts.push((at..range.end, None));
        }
        parts
    }

    /// Returns the beginning of a range: the bytes up to the next change of value, and the value there.
    pub(super) fn first(&self, range: &Range<u64>) -> (u64, Option<V>) {
        if let Some((start, (end, value))) = self.0.range(..=range.start).next_back()
            && *end > range.start
        {
            return ((*end).min(range.end) - range.start, Some(value.skip(range.start - start)));
        }
        let next = self.0.range(range.clone()).next().map_or(range.end, |(start, _)| *start);
        (next - range.start, None)
    }

    /// Removes the ranges whose values are not wanted any more.
    pub(super) fn retain(&mut self, mut wanted: impl FnMut(&V) -> bool) {
        self.0.retain(|_, (_, value)| wanted(value));
    }
}

#[cfg(test)]
mod tests {
    use limosa_storage::testing::SeededRandom;

    use super::*;

    /// Bytes that are numbered from here on.
    #[derive(Debug, Clone, PartialEq, Eq)]
    struct From(u64);

    impl Value for From {
        fn skip(&self, bytes: u64) -> Self {
            Self(self.0 + bytes)
        }

        fn continues(&self, length: u64, next: &Self) -> bool {
            self.0 + length == next.0
        }
    }

    #[test]
    fn every_byte_has_the_value_that_it_was_given_last() {
        let mut chance = SeededRandom::new(7);
        for _ in 0..200 {
            let (mut extents, mut model) = (Extents::default(), [None; 64]);
            for write in 0..30_u64 {
                let start = chance.below(64);
                let end = start + chance.below(65 - start);
                let number = write * 1000 + if chance.one_in(3) { start } else { 0 };
                extents.insert(start..end, From(number));
                (start..end).for_each(|at| model[usize::try_from(at).unwrap()] = Some(number + at - start));
                let from = chance.below(64);
                let range = from..from + chance.below(65 - from);
                let parts = extents.parts(range.clone());
                let mut at = range.start;
                for (part, value) in &parts {
                    assert_eq!(part.start, at);
                    at = part.end;
                    for byte in part.clone() {
                        let found = value.as_ref().map(|value| value.skip(byte - part.start).0);
                        assert_eq!(found, model[usize::try_from(byte).unwrap()]);
                    }
                }
                assert_eq!(at, range.end.max(range.start));
                if !range.is_empty() {
                    let (length, value) = extents.first(&range);
                    assert_eq!(Some((range.start..range.start + length, value)), parts.first().cloned());
                }
            }
            assert!(extents.iter().zip(extents.iter().skip(1)).all(|((one, _), (other, _))| one.end <= other.start));
        }
    }

    #[test]
    fn writes_one_after_the_other_are_one_range() {
        let mut extents = Extents::default();
        (0..100_u64).for_each(|number| extents.insert(number * 8..number * 8 + 8, From(50 + number * 8)));
        assert_eq!(extents.iter().collect::<Vec<_>>(), [(0..800, &From(50))]);
        extents.retain(|_| false);
        assert_eq!(extents.len(), 0);
    }
}
