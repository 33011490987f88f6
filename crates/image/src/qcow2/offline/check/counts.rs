//! How many references there are to each cluster.
//!
//! Law: memory is bounded. Only a window of the file's clusters is counted at a time; what lies outside is left to
//! another pass.

use std::ops::Range;

use limosa_page::{BrokenInvariant, broken_invariant, to_usize};

/// How large a count can become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    /// 255: enough for most images, and a quarter of the memory. If it is too small, counting begins again.
    Narrow,
    /// 2^32 - 1. A cluster with more references is not in use, even if its refcount could be larger.
    Wide,
}

impl Width {
    /// The number of clusters that can be counted in these bytes: a count each, and two bits of [`Flags`].
    pub(super) const fn clusters(self, bytes: usize) -> usize {
        match self {
            Self::Narrow => bytes / 5 * 4,
            Self::Wide => bytes / 5,
        }
    }
}

#[derive(Debug)]
enum Cells {
    Narrow(Vec<u8>),
    Wide(Vec<u32>),
}

/// A count in memory.
trait Cell: Copy + Into<u64> + TryFrom<u64> {
    const MOST: Self;
}

impl Cell for u8 {
    const MOST: Self = Self::MAX;
}

impl Cell for u32 {
    const MOST: Self = Self::MAX;
}

/// Counts of the clusters of a window.
#[derive(Debug)]
pub(super) struct Counts {
    first: u64,
    cells: Cells,
    most: u64,
    bits: u32,
    too_narrow: bool,
}

impl Counts {
    /// Counts of a window of clusters; none goes above `most`, the largest refcount that the image can keep.
    pub(super) fn new(window: &Range<u64>, most: u64, bits: u32, width: Width) -> Self {
        let clusters = to_usize(window.end.saturating_sub(window.start));
        let cells = match width {
            Width::Narrow => Cells::Narrow(vec![0; clusters]),
            Width::Wide => Cells::Wide(vec![0; clusters]),
        };
        Self { first: window.start, cells, most: most.min(u32::MAX.into()), bits, too_narrow: false }
    }

    /// Whether a count overflowed: none of them is right.
    pub(super) const fn is_too_narrow(&self) -> bool {
        self.too_narrow
    }

    /// Adds `times` references to each cluster of a run of bytes. How many of them were too many, altogether.
    pub(super) fn add(&mut self, at: u64, bytes: u64, times: u64) -> u64 {
        let Some(last) = bytes.checked_sub(1).and_then(|bytes| at.checked_add(bytes)) else { return 0 };
        let begin = (at >> self.bits).max(self.first) - self.first;
        let end = ((last >> self.bits) + 1).saturating_sub(self.first);
        let range = to_usize(begin)..to_usize(end);
        let (lost, fits) = match &mut self.cells {
            Cells::Narrow(cells) => add(cells, range, times, self.most),
            Cells::Wide(cells) => add(cells, range, times, self.most),
        };
        self.too_narrow |= !fits;
        lost
    }

    /// Returns the count of a cluster of the window.
    pub(super) fn of(&self, cluster: u64) -> Result<u64, BrokenInvariant> {
        self.get(cluster).ok_or_else(|| broken_invariant("clusters are compared in the window that was counted"))
    }

    /// The count of a cluster; `None` outside the window.
    pub(super) fn get(&self, cluster: u64) -> Option<u64> {
        let index = usize::try_from(cluster.checked_sub(self.first)?).ok()?;
        match &self.cells {
            Cells::Narrow(cells) => cells.get(index).map(|count| u64::from(*count)),
            Cells::Wide(cells) => cells.get(index).map(|count| u64::from(*count)),
        }
    }
}

/// Adds `times` to cells, up to `most`: by how much that was too much, and whether the cells could hold it.
fn add<C: Cell>(cells: &mut [C], range: Range<usize>, times: u64, most: u64) -> (u64, bool) {
    let (mut lost, mut fits) = (0_u64, true);
    for cell in cells.iter_mut().take(range.end).skip(range.start) {
        let sum = (*cell).into().saturating_add(times);
        lost = lost.saturating_add(sum.saturating_sub(most));
        *cell = C::try_from(sum.min(most)).unwrap_or_else(|_| {
            fits = false;
            C::MOST
        });
    }
    (lost, fits)
}

/// Flags of the stored refcounts of a window's clusters.
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
        let words = to_usize(clusters.div_ceil(64));
        Self { first: window.start, clusters, one: vec![0; words], unknown: vec![0; words] }
    }

    /// The clusters that they are about.
    pub(super) const fn window(&self) -> Range<u64> {
        self.first..self.first + self.clusters
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
        let mut counts = Counts::new(&(10..20), 3, 9, Width::Narrow);
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
    fn a_refcount_that_is_too_large_is_reported() {
        for width in [Width::Narrow, Width::Wide] {
            let mut counts = Counts::new(&(0..2), 3, 9, width);
            let lost = (counts.add(0, 1024, 2), counts.add(0, 512, 4), counts.add(0, 1024, u64::MAX));
            assert_eq!((lost, counts.is_too_narrow()), ((0, 3, u64::MAX), false));
            assert_eq!((counts.get(0), counts.get(1)), (Some(3), Some(3)));
        }
    }

    #[test]
    fn narrow_counts_say_when_they_are_too_narrow() {
        let too_narrow = |width, most, times: &[u64]| {
            let mut counts = Counts::new(&(0..2), most, 9, width);
            let lost: u64 = times.iter().map(|times| counts.add(512, 512, *times)).sum();
            (counts.is_too_narrow(), lost, counts.get(1))
        };
        assert_eq!(too_narrow(Width::Narrow, 65535, &[255]), (false, 0, Some(255)));
        assert!(too_narrow(Width::Narrow, 65535, &[255, 1]).0);
        // What the image cannot keep is lost, however wide.
        assert_eq!(too_narrow(Width::Narrow, 255, &[255, 2]), (false, 2, Some(255)));
        assert_eq!(too_narrow(Width::Wide, 65535, &[255, 1]), (false, 0, Some(256)));
        assert_eq!(too_narrow(Width::Wide, u64::MAX, &[1 << 32]), (false, 1, Some(u32::MAX.into())));
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
