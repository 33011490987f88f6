//! The contents that may be read if requests overlap or the power was cut.
//!
//! The disk is looked at in units; every unit is a separate register. A write takes effect in one instant between its
//! beginning and its end; so does a read. A value is therefore possible unless it was overwritten before the look
//! began, or its write had not begun when the look was over.

use std::ops::Range;

use crate::Verdict;
use crate::drive::Stamp;
use crate::guest::is_content;

/// The bytes that were put there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value {
    /// The first contents.
    First,
    Zeros,
    /// Of the write of this number.
    Written(u64),
}

#[derive(Debug, Clone)]
struct Entry {
    value: Value,
    /// The request that put it there.
    request: u64,
    began: Stamp,
    ended: Option<Stamp>,
    /// When it was seen at the latest, or told to be done.
    effect: u64,
}

pub(crate) struct History {
    unit: u64,
    first: Vec<u8>,
    units: Vec<Vec<Entry>>,
    requests: u64,
    /// Flushes that have completed: from when to when.
    flushes: Vec<(Stamp, Stamp)>,
}

impl History {
    pub(crate) fn new(first: Vec<u8>, unit: u64) -> Self {
        let start = Stamp { clock: 0, moment: 0 };
        let entry = Entry { value: Value::First, request: 0, began: start, ended: Some(start), effect: 0 };
        let units = vec![vec![entry]; first.len() / usize::try_from(unit).unwrap()];
        Self { unit, first, units, requests: 0, flushes: Vec::new() }
    }

    fn numbers(&self, range: &Range<u64>) -> Range<usize> {
        assert!(range.start.is_multiple_of(self.unit) && range.end.is_multiple_of(self.unit), "{range:x?}");
        usize::try_from(range.start / self.unit).unwrap()..usize::try_from(range.end / self.unit).unwrap()
    }

    /// A write begins; its number among those of the history.
    pub(crate) fn begins(&mut self, range: &Range<u64>, value: Value, began: Stamp) -> u64 {
        self.requests += 1;
        let entry = Entry { value, request: self.requests, began, ended: None, effect: u64::MAX };
        for number in self.numbers(range) {
            self.units[number].push(entry.clone());
        }
        self.requests
    }

    /// A write has ended, and was told to be done.
    pub(crate) fn ends(&mut self, range: &Range<u64>, request: u64, ended: Stamp) {
        for number in self.numbers(range) {
            for entry in self.units[number].iter_mut().filter(|entry| entry.request == request) {
                entry.ended = Some(ended);
                entry.effect = entry.effect.min(ended.clock);
            }
        }
    }

    /// A flush has completed.
    pub(crate) fn flushed(&mut self, began: Stamp, ended: Stamp) {
        self.flushes.push((began, ended));
    }

    fn is(&self, entry: &Entry, number: usize, found: &[u8]) -> bool {
        let start = number as u64 * self.unit;
        let range = start..start + self.unit;
        match entry.value {
            Value::First => {
                self.first.get(usize::try_from(start).unwrap()..usize::try_from(range.end).unwrap()) == Some(found)
            }
            Value::Zeros => found.iter().all(|&byte| byte == 0),
            Value::Written(written) => is_content(written, start, found),
        }
    }

    /// Whether what a read found may be there.
    pub(crate) fn saw(&mut self, range: &Range<u64>, found: &[u8], began: Stamp, ended: Stamp) -> Verdict {
        for (number, found) in self.numbers(range).zip(found.chunks(usize::try_from(self.unit).unwrap())) {
            let entries = &self.units[number];
            let may = |entry: &&Entry| {
                entry.began.clock < ended.clock
                    && !entries.iter().any(|later| entry.effect < later.began.clock && later.effect < began.clock)
            };
            let seen: Vec<u64> = entries
                .iter()
                .filter(may)
                .filter(|entry| self.is(entry, number, found))
                .map(|entry| entry.request)
                .collect();
            if seen.is_empty() {
                return Err(self.wrong(number, found, entries.iter().filter(may)));
            }
            if let [request] = seen[..] {
                for entry in self.units[number].iter_mut().filter(|entry| entry.request == request) {
                    entry.effect = entry.effect.min(ended.clock);
                }
            }
        }
        Ok(())
    }

    /// Whether what is found after the power was cut at `moment` may be there.
    pub(crate) fn survived(&self, found: &[u8], moment: usize) -> Verdict {
        let flushed =
            self.flushes.iter().filter(|(_, ended)| ended.moment <= moment).map(|(began, _)| began.clock).max();
        let flushed = flushed.unwrap_or(0);
        for (number, found) in found.chunks_exact(usize::try_from(self.unit).unwrap()).enumerate() {
            let entries = &self.units[number];
            let ended = |entry: &Entry| entry.ended.map_or(u64::MAX, |ended| ended.clock);
            let may = |entry: &&Entry| {
                (entry.began.moment < moment || entry.request == 0)
                    && !entries.iter().any(|later| ended(entry) < later.began.clock && ended(later) < flushed)
            };
            if !entries.iter().filter(may).any(|entry| self.is(entry, number, found)) {
                return Err(self.wrong(number, found, entries.iter().filter(may)));
            }
        }
        Ok(())
    }

    fn wrong<'a>(&self, number: usize, found: &[u8], may: impl Iterator<Item = &'a Entry>) -> String {
        let may: Vec<_> = may.map(|entry| (entry.value, entry.began, entry.ended)).collect();
        let is: Vec<_> =
            self.units[number].iter().filter(|entry| self.is(entry, number, found)).map(|entry| entry.value).collect();
        let start = &found[..found.len().min(16)];
        format!(
            "at {:#x}: found {start:02x?}.., which is {is:?} of what was ever written there; it may be {may:?}",
            number as u64 * self.unit
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::content;

    fn at(clock: u64) -> Stamp {
        Stamp { clock, moment: usize::try_from(clock).unwrap() }
    }

    #[test]
    fn what_was_overwritten_may_not_be_read() {
        let mut history = History::new(vec![7; 1024], 512);
        let unit = 512..1024;
        let (two, three) = (content(2, &unit), content(3, &unit));
        let first = history.begins(&unit, Value::Written(2), at(1));
        history.saw(&unit, &[7; 512], at(2), at(3)).unwrap();
        history.saw(&unit, &two, at(4), at(5)).unwrap();
        history.saw(&unit, &[7; 512], at(6), at(7)).expect_err("the new value was seen before");
        history.ends(&unit, first, at(8));
        let second = history.begins(&unit, Value::Written(3), at(9));
        history.saw(&unit, &two, at(10), at(11)).unwrap();
        history.ends(&unit, second, at(12));
        history.saw(&unit, &two, at(13), at(14)).expect_err("it was overwritten");
        history.saw(&unit, &three, at(15), at(16)).unwrap();
        let mixed: Vec<u8> = three[..256].iter().chain(&two[256..]).copied().collect();
        history.saw(&unit, &mixed, at(17), at(18)).expect_err("half and half");
    }

    #[test]
    fn what_a_flush_covers_has_to_survive() {
        let mut history = History::new(vec![0; 512], 512);
        let unit = 0..512;
        let first = history.begins(&unit, Value::Written(2), at(1));
        history.ends(&unit, first, at(2));
        history.survived(&[0; 512], 2).unwrap();
        history.flushed(at(3), at(5));
        history.survived(&[0; 512], 4).unwrap();
        history.survived(&[0; 512], 5).expect_err("it was flushed");
        history.survived(&content(2, &unit), 5).unwrap();
        let _ = history.begins(&unit, Value::Zeros, at(6));
        history.survived(&[0; 512], 6).expect_err("it had not begun");
        history.survived(&[0; 512], 7).unwrap();
    }
}
