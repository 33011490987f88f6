//! Waiting for the pages that a guest's balloon hints as free.
//!
//! QEMU asks the guest when a migration begins, and the list comes while memory is on its way: pages that left by then
//! are stored. QEMU does not report that the list is complete, but it shows: pages that are left out make less remain
//! of the first round than was sent of it. So memory goes out slowly until pages have been left out and no more follow,
//! and then as fast as it may.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use crate::monitor::RamProgress;

/// Bytes a second until then: QEMU counts in tenths of a second, and keeps less than this only roughly.
const SLOW: NonZeroU64 = NonZeroU64::new(4 << 20).unwrap();

/// How often QEMU is asked meanwhile.
pub(super) const ASK_EVERY: Duration = Duration::from_millis(10);

/// The list counts as complete when no further page was left out for this long.
const SETTLED: Duration = Duration::from_millis(60);

/// The rate to begin with, of a save that may go at this one.
pub(super) fn slow(most: Option<NonZeroU64>) -> Option<NonZeroU64> {
    Some(most.map_or(SLOW, |most| most.min(SLOW)))
}

/// A wait for the list.
#[derive(Debug)]
pub(super) struct HintWait {
    until: Option<Instant>,
    left_out: u64,
    grew: Instant,
}

impl HintWait {
    pub(super) fn begin(now: Instant, longest: Duration) -> Self {
        Self { until: now.checked_add(longest), left_out: 0, grew: now }
    }

    /// Whether the wait continues, after these numbers of QEMU's.
    pub(super) fn goes_on(&mut self, now: Instant, ram: Option<&RamProgress>) -> bool {
        if self.until.is_some_and(|until| now >= until) {
            return false;
        }
        let Some(ram) = ram.filter(|ram| ram.total > 0) else { return true };
        // A second round begins with what was written: what remains says nothing of hints any more.
        if ram.dirty_sync_count > 1 {
            return false;
        }
        let sent = ram.normal.saturating_add(ram.duplicate).saturating_mul(ram.page_size);
        let left_out = ram.total.saturating_sub(ram.remaining).saturating_sub(sent);
        // Counters that are not read in one moment differ by some pages.
        if left_out > self.left_out.saturating_add(ram.page_size.saturating_mul(64)) {
            (self.left_out, self.grew) = (left_out, now);
        }
        self.left_out == 0 || now.saturating_duration_since(self.grew) < SETTLED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ram(remaining: u64, normal: u64) -> RamProgress {
        RamProgress {
            transferred: 0,
            remaining: remaining << 12,
            total: 100_000 << 12,
            duplicate: 0,
            normal,
            dirty_pages_rate: 0,
            dirty_sync_count: 1,
            page_size: 4096,
            mbps: 0.0,
        }
    }

    #[test]
    fn it_ends_when_pages_were_left_out_and_no_more_follow() {
        let begun = Instant::now();
        let at = |millis| begun + Duration::from_millis(millis);
        let mut wait = HintWait::begin(begun, Duration::from_secs(5));
        assert!(wait.goes_on(at(10), None));
        // What was sent does not remain, and is not left out.
        assert!(wait.goes_on(at(300), Some(&ram(99_000, 1000))));
        assert!(wait.goes_on(at(400), Some(&ram(70_000, 2000))));
        assert!(wait.goes_on(at(450), Some(&ram(40_000, 2000))));
        assert!(wait.goes_on(at(509), Some(&ram(39_000, 3000))));
        assert!(!wait.goes_on(at(511), Some(&ram(39_000, 3000))));
    }

    #[test]
    fn it_ends_with_the_time_or_the_round() {
        let begun = Instant::now();
        let mut wait = HintWait::begin(begun, Duration::from_millis(100));
        assert!(wait.goes_on(begun, Some(&ram(100_000, 0))));
        assert!(!wait.goes_on(begun + Duration::from_millis(100), Some(&ram(99_000, 1000))));
        let mut wait = HintWait::begin(begun, Duration::MAX);
        assert!(wait.goes_on(begun, Some(&ram(100_000, 0))));
        assert!(!wait.goes_on(begun, Some(&RamProgress { dirty_sync_count: 2, ..ram(10, 0) })));
    }
}
