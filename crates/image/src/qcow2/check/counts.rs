//! How many references there are to each cluster.
//!
//! Law: memory is bounded. Only a window of the file's clusters is counted at a time; what lies outside is left to another turn.

use std::ops::Range;

/// Counts of the clusters of a window.
#[derive(Debug)]
pub(super) struct Counts {
    first: u64,
    cells: Vec<u32>,
    most: u32,
    bits: u32,
}

impl Counts {
    /// Bytes of memory that a cluster of the window takes, rounded up: its count, and two bits of [`Flags`].
    pub(super) const BYTES: usize = 5;

    /// Counts of a window of clusters; none goes above `most`, the largest refcount that the image can keep.
    pub(super) fn new(window: &Range<u64>, most: u64, bits: u32) -> Self {
        let clusters = usize::try_from(window.end.saturating_sub(window.start)).unwrap_or(0);
        // A cluster that is referred to 2^32 times is not in use, whatever its refcount could say.
        Self { first: window.start, cells: vec![0; clusters], most: u32::try_from(most).unwrap_or(u32::MAX), bits }
    }

    /// Adds `times` references to each cluster of a run of bytes. How many of them were too many, altogether.
    pub(super) fn add(&mut self, at: u64, bytes: u64, times: u64) -> u64 {
        let Some(last) = bytes.checked_sub(1).and_then(|bytes| at.checked_add(bytes)) else { return 0 };
        let begin = (at >> self.bits).max(self.first) - self.first;
        let end = ((last >> self.bits) + 1).saturating_sub(self.first);
        let range = usize::try_from(begin).unwrap_or(usize::MAX)..usize::try_from(end).unwrap_or(usize::MAX);
        let range = range.start.min(self.cells.len())..range.end.min(self.cells.len());
        let most = u64::from(self.most);
        let mut lost = 0_u64;
        for cell in self.cells.get_mut(range).unwrap_or_default() {
            let sum = u64::from(*cell).saturating_add(times);
            lost = lost.saturating_add(sum.saturating_sub(most));
            *cell = u32::try_from(sum.min(most)).unwrap_or(u32::MAX);
        }
        lost
    }

    /// The count of a cluster; `None` outside the window.
    pub(super) fn get(&self, cluster: u64) -> Option<u64> {
        let index = usize::try_from(cluster.checked_sub(self.first)?).ok()?;
        self.cells.get(index).map(|count| u64::from(*count))
    }
}

/// What is known about the stored refcounts of a window's clusters.
#[derive(Debug)]
pub(super) struct Flags {
    first: u64,
    clusters: u64,
    one: Vec<u64>,
    unknown: Vec<u64>,
}

impl Flags {
    /// None is one, all are known.
    pub(super) fn new(window: &Range<u64>) -> Self {
        let clusters = window.end.saturating_sub(window.start);
        let words = usize::try_from(clusters.div_ceil(64)).unwrap_or(0);
        Self { first: window.start, clusters, one: vec![0; words], unknown: vec![0; words] }
    }

    /// Notes the stored refcount of a cluster; `None` if it cannot be read.
    pub(super) fn note(&mut self, cluster: u64, refcount: Option<u64>) {
        let Some((word, bit)) = self.place(cluster) else { return };
        let words = if refcount.is_none() { &mut self.unknown } else { &mut self.one };
        if refcount.is_none_or(|refcount| refcount == 1)
            && let Some(word) = words.get_mut(word)
        {
            *word |= bit;
        }
    }

    /// Whether the refcount of a cluster is one; `None` if it cannot be read.
    pub(super) fn is_one(&self, cluster: u64) -> Option<bool> {
        let (word, bit) = self.place(cluster)?;
        let is = |words: &[u64]| words.get(word).is_some_and(|word| word & bit != 0);
        (!is(&self.unknown)).then(|| is(&self.one))
    }

    fn place(&self, cluster: u64) -> Option<(usize, u64)> {
        let index = cluster.checked_sub(self.first).filter(|index| *index < self.clusters)?;
        Some((usize::try_from(index / 64).ok()?, 1 << (index % 64)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_clusters_of_the_window_are_counted() {
        let mut counts = Counts::new(&(10..20), 3, 9);
        assert_eq!(counts.add(9 * 512 + 511, 2, 1), 0);
        assert_eq!(counts.add(19 * 512, 4 * 512, 2), 0);
        assert_eq!(counts.add(12 * 512, 0, 7), 0);
        assert_eq!(counts.add(0, 1, 9), 0);
        assert_eq!(counts.add(u64::MAX, 2, 1), 0);
        let found: Vec<_> = (9..21).map(|cluster| counts.get(cluster)).collect();
        let some = [Some(1), Some(0), Some(0), Some(0), Some(0), Some(0), Some(0), Some(0), Some(0), Some(2)];
        assert_eq!((found[0], &found[1..11], found[11]), (None, &some[..], None));
    }

    #[test]
    fn what_a_refcount_cannot_hold_is_told() {
        let mut counts = Counts::new(&(0..2), 3, 9);
        assert_eq!((counts.add(0, 1024, 2), counts.add(0, 512, 4), counts.add(0, 1024, u64::MAX)), (0, 3, u64::MAX));
        assert_eq!((counts.get(0), counts.get(1)), (Some(3), Some(3)));
    }

    #[test]
    fn flags_remember_what_was_noted() {
        let mut flags = Flags::new(&(64..264));
        for (cluster, refcount) in [(64, Some(1)), (65, Some(2)), (66, None), (263, Some(1)), (264, Some(1))] {
            flags.note(cluster, refcount);
        }
        assert_eq!(
            (64..=67).map(|cluster| flags.is_one(cluster)).collect::<Vec<_>>(),
            [Some(true), Some(false), None, Some(false)]
        );
        assert_eq!((flags.is_one(263), flags.is_one(264), flags.is_one(63)), (Some(true), None, None));
    }
}
