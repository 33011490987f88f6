//! Invariants of an image in use, checked where its owners meet.
//!
//! Each function is one invariant. A broken one is a bug of limosa and never something that an image can cause: see
//! [`limosa_page::invariant()`]. Debug builds panic; others return an error before anything is written.

use std::ops::Range;

use limosa_page::{BrokenInvariant, invariant, to_u64};

use crate::offset::{ClusterCount, GuestOffset, HostOffset};

type Checked = Result<(), BrokenInvariant>;

/// The first offset that a file cannot have: `off_t` has 63 bits.
const FILE_LIMIT: u64 = 1 << 63;

#[track_caller]
pub(super) fn claimed_once(is_claimed: bool) -> Checked {
    invariant(!is_claimed, "a cluster is claimed by one request at a time")
}

/// `unit`: bytes of a cluster or subcluster.
#[track_caller]
pub(super) fn claim_is_whole(range: &Range<GuestOffset>, unit: u64) -> Checked {
    let whole = range.start < range.end && range.start.within(unit) == 0 && range.end.within(unit) == 0;
    invariant(whole, "a claim is of whole clusters or subclusters")
}

#[track_caller]
pub(super) fn claim_is_of_one_region(is_of_one: bool) -> Checked {
    invariant(is_of_one, "the entries of a claim are in one slice")
}

#[track_caller]
pub(super) fn entry_after_contents(are_written: bool) -> Checked {
    invariant(are_written, "an L2 entry is changed after the contents of its cluster are written")
}

#[track_caller]
pub(super) fn allocated_all(wanted: ClusterCount, found: ClusterCount) -> Checked {
    invariant(wanted == found, "an allocation hands out as many clusters as were asked for")
}

#[track_caller]
pub(super) fn nothing_in_flight(jobs: usize, cancelled: usize) -> Checked {
    invariant(jobs == 0 && cancelled == 0, "nothing is in flight when an image is closed")
}

/// `inside`: requests that may be using clusters.
#[track_caller]
pub(super) fn no_request_inside(inside: u64) -> Checked {
    invariant(inside == 0, "no request uses a cluster that is given back at the end")
}

#[track_caller]
pub(super) fn nothing_dirty(differ: bool) -> Checked {
    invariant(!differ, "after the last flush memory and the file are the same")
}

/// `align`: a power of two.
#[track_caller]
pub(super) fn in_the_file(at: HostOffset, length: u64, align: u64) -> Checked {
    let end = at.0.checked_add(length).filter(|end| *end <= FILE_LIMIT);
    invariant(end.is_some(), "an offset that is written to is one that a file can have")?;
    invariant(at.within(align) == 0, "an offset that is written to is aligned")
}

/// `parts`: in order.
#[track_caller]
pub(super) fn parts_cover(parts: impl IntoIterator<Item = Range<GuestOffset>>, range: &Range<GuestOffset>) -> Checked {
    let mut reached = range.start;
    for part in parts {
        invariant(part.start == reached && part.start < part.end, "parts follow each other without a gap")?;
        reached = part.end;
    }
    invariant(reached == range.end, "parts cover exactly what was asked for")
}

/// `length`: bytes from `at` on that are alike.
#[track_caller]
pub(super) fn extent_is_inside(length: u64, at: GuestOffset, end: GuestOffset) -> Checked {
    invariant(length > 0 && length <= end - at, "an extent has bytes, and ends within what was asked for")
}

#[track_caller]
pub(super) fn table_is_whole(length: usize, cluster: u64) -> Checked {
    invariant(to_u64(length) == cluster, "a new table is written whole")
}

#[track_caller]
pub(super) fn disk_grows(old: u64, new: u64) -> Checked {
    invariant(old <= new, "a disk in use does not become shorter")
}

#[track_caller]
pub(super) fn l1_grows(old: usize, new: usize) -> Checked {
    invariant(old <= new, "an L1 table that is moved keeps all its entries")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Panics in debug builds, and is an error in others.
    fn fires(check: impl FnOnce() -> Checked + std::panic::UnwindSafe, says: &str) {
        let message = match std::panic::catch_unwind(check) {
            Ok(checked) if cfg!(debug_assertions) => panic!("{checked:?}: {says}"),
            Ok(checked) => checked.unwrap_err().to_string(),
            Err(panic) => panic.downcast_ref::<String>().cloned().unwrap_or_default(),
        };
        assert!(message.contains(says), "{message}");
    }

    fn range(range: Range<u64>) -> Range<GuestOffset> {
        GuestOffset(range.start)..GuestOffset(range.end)
    }

    #[test]
    fn what_holds_passes() {
        let holds = [
            claimed_once(false),
            claim_is_whole(&range(0..1024), 512),
            claim_is_of_one_region(true),
            entry_after_contents(true),
            allocated_all(ClusterCount(3), ClusterCount(3)),
            nothing_in_flight(0, 0),
            no_request_inside(0),
            nothing_dirty(false),
            in_the_file(HostOffset(FILE_LIMIT - 8), 8, 8),
            parts_cover([range(512..600), range(600..1024)], &range(512..1024)),
            extent_is_inside(512, GuestOffset(0), GuestOffset(512)),
            table_is_whole(512, 512),
            disk_grows(5, 5),
            l1_grows(5, 6),
        ];
        assert!(holds.iter().all(Result::is_ok), "{holds:?}");
    }

    #[test]
    fn claims_that_overlap_or_are_cut_are_found() {
        fires(|| claimed_once(true), "claimed by one");
        fires(|| claim_is_whole(&range(0..1000), 512), "whole clusters");
        fires(|| claim_is_whole(&range(512..512), 512), "whole clusters");
        fires(|| claim_is_of_one_region(false), "one slice");
    }

    #[test]
    fn an_entry_before_its_contents_and_an_allocation_that_is_short_are_found() {
        fires(|| entry_after_contents(false), "after the contents");
        fires(|| allocated_all(ClusterCount(3), ClusterCount(2)), "as many clusters");
    }

    #[test]
    fn a_close_that_leaves_something_behind_is_found() {
        fires(|| nothing_in_flight(1, 0), "in flight");
        fires(|| nothing_in_flight(0, 1), "in flight");
        fires(|| no_request_inside(1), "given back");
        fires(|| nothing_dirty(true), "last flush");
    }

    #[test]
    fn writes_outside_of_a_file_and_beside_their_places_are_found() {
        fires(|| in_the_file(HostOffset(FILE_LIMIT - 8), 16, 8), "can have");
        fires(|| in_the_file(HostOffset(u64::MAX), 16, 1), "can have");
        fires(|| in_the_file(HostOffset(12), 8, 8), "aligned");
    }

    #[test]
    fn parts_with_gaps_and_extents_without_bytes_are_found() {
        fires(|| parts_cover([range(0..8), range(9..16)], &range(0..16)), "gap");
        fires(|| parts_cover([range(0..8)], &range(0..16)), "exactly");
        fires(|| parts_cover([range(0..24)], &range(0..16)), "exactly");
        fires(|| extent_is_inside(0, GuestOffset(0), GuestOffset(8)), "an extent");
        fires(|| extent_is_inside(9, GuestOffset(0), GuestOffset(8)), "an extent");
    }

    #[test]
    fn tables_that_lose_a_part_are_found() {
        fires(|| table_is_whole(511, 512), "whole");
        fires(|| disk_grows(2, 1), "shorter");
        fires(|| l1_grows(2, 1), "entries");
    }
}
