//! Clusters that may be handed out.

use std::collections::{BTreeMap, VecDeque};

use crate::offset::{ClusterCount, HostCluster};

/// The most runs of given-back clusters that are remembered; the rest is found again by looking through the refcounts.
const REMEMBERED: usize = 1 << 16;

/// Clusters next to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: HostCluster,
    pub(super) count: ClusterCount,
    /// The storage proves that they read as zeros.
    pub(super) zeroed: bool,
}

#[derive(Debug, Default)]
pub(super) struct Pool {
    /// Taken ahead: their refcounts are 1.
    ahead: VecDeque<Run>,
    /// Below `cursor`, and free: first ones and how many.
    free: BTreeMap<HostCluster, ClusterCount>,
    /// The cluster where the search for free clusters continues.
    cursor: HostCluster,
}

impl Pool {
    /// Takes up to `want` clusters out of what was taken ahead.
    pub(super) fn take(&mut self, want: ClusterCount) -> Option<Run> {
        let front = self.ahead.front_mut()?;
        let run = Run { count: front.count.min(want), ..*front };
        front.first += run.count;
        front.count -= run.count;
        if front.count == ClusterCount::NONE {
            self.ahead.pop_front();
        }
        Some(run)
    }

    pub(super) fn has_ahead(&self) -> bool {
        !self.ahead.is_empty()
    }

    /// These were taken ahead.
    pub(super) fn add_ahead(&mut self, runs: Vec<Run>) {
        self.ahead.extend(runs);
    }

    /// Clusters that were handed out, and to which nothing refers: they are handed out next.
    pub(super) fn put_back(&mut self, runs: Vec<Run>) {
        for run in runs.into_iter().rev() {
            self.ahead.push_front(Run { zeroed: false, ..run });
        }
    }

    /// All that was taken ahead.
    pub(super) fn take_ahead(&mut self) -> Vec<Run> {
        std::mem::take(&mut self.ahead).into()
    }

    /// Takes up to `want` free clusters that were given back: a run that is long enough, or any.
    pub(super) fn reuse(&mut self, want: ClusterCount) -> Option<(HostCluster, ClusterCount)> {
        let fits = self.free.iter().take(64).find(|(_, count)| **count >= want);
        let (first, count) = fits.or_else(|| self.free.first_key_value()).map(|(first, count)| (*first, *count))?;
        self.free.remove(&first);
        let taken = count.min(want);
        if taken < count {
            self.free.insert(first + taken, count - taken);
        }
        Some((first, taken))
    }

    /// The cluster where the search for free clusters continues.
    pub(super) const fn cursor(&self) -> HostCluster {
        self.cursor
    }

    /// Everything before `cursor` was looked at.
    pub(super) const fn searched_to(&mut self, cursor: HostCluster) {
        self.cursor = cursor;
    }

    /// Searches again from cluster `first` on, by the refcounts.
    pub(super) fn forget_free(&mut self, first: HostCluster) {
        self.free.split_off(&first);
        if let Some((before, count)) = self.free.iter_mut().next_back() {
            *count = (*count).min(first - *before);
        }
        self.cursor = self.cursor.min(first);
    }

    /// The free ones that lie behind all others.
    pub(super) fn last_free(&self) -> Option<(HostCluster, ClusterCount)> {
        self.free.last_key_value().map(|(first, count)| (*first, *count))
    }

    /// These are free now.
    pub(super) fn give_back(&mut self, first: HostCluster, count: ClusterCount) {
        if first >= self.cursor {
            return;
        }
        if self.free.len() >= REMEMBERED {
            self.forget_free(HostCluster(0));
            return;
        }
        let (mut first, mut count) = (first, count);
        if let Some((before, length)) = self.free.range(..first).next_back().map(|(a, b)| (*a, *b))
            && before + length == first
        {
            self.free.remove(&before);
            (first, count) = (before, length + count);
        }
        if let Some(length) = self.free.remove(&(first + count)) {
            count += length;
        }
        self.free.insert(first, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_back_clusters_grow_together_and_are_used_by_what_fits() {
        let mut pool = Pool { cursor: HostCluster(100), ..Pool::default() };
        for (first, count) in [(10, 2), (14, 1), (12, 2), (50, 8), (120, 3)] {
            pool.give_back(HostCluster(first), ClusterCount(count));
        }
        assert_eq!(pool.free, BTreeMap::from([(HostCluster(10), ClusterCount(5)), (HostCluster(50), ClusterCount(8))]));
        assert_eq!(pool.reuse(ClusterCount(6)), Some((HostCluster(50), ClusterCount(6))));
        assert_eq!(pool.reuse(ClusterCount(6)), Some((HostCluster(10), ClusterCount(5))));
        assert_eq!(pool.reuse(ClusterCount(1)), Some((HostCluster(56), ClusterCount(1))));
        assert_eq!(pool.reuse(ClusterCount(2)), Some((HostCluster(57), ClusterCount(1))));
        assert_eq!(pool.reuse(ClusterCount(1)), None);
    }

    #[test]
    fn what_was_taken_ahead_is_handed_out_in_order() {
        let mut pool = Pool::default();
        let run = |first, count| Run { first: HostCluster(first), count: ClusterCount(count), zeroed: true };
        pool.add_ahead(vec![run(5, 3)]);
        assert_eq!(pool.take(ClusterCount(2)), Some(run(5, 2)));
        assert_eq!(pool.take(ClusterCount(2)), Some(run(7, 1)));
        assert_eq!(pool.take(ClusterCount(2)), None);
    }
}
