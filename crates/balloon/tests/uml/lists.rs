//! Contents of lists of free pages: everything in the guest's largest free blocks, and nothing after a stop.

use std::ops::Range;
use std::sync::Arc;

use limosa_balloon::{Balloon, Features, HintState, Options};
use limosa_memory::{FreePageHinting as _, FreePageSink};
use limosa_testkit::on_uml;

use crate::guest::{BLOCK, Guest, List, MIB, REPORTING_MEMORY, bytes, until};
use crate::without;

#[test]
fn a_list_is_all_that_the_guest_has_in_its_largest_blocks() {
    on_uml(|| {
        let guest = Guest::start(256, without(Features::REPORTING));
        for _ in 0..3 {
            let free = guest.in_largest_blocks();
            assert!(free > 100 * MIB, "{free}");
            let report = bytes(&guest.free_pages());
            // The shell itself allocates and frees a block or two.
            assert!(report.abs_diff(free) <= 2 * BLOCK, "{report} of {free} bytes");
            guest.balloon.return_pages();
            until("the guest has taken its pages back", || guest.in_largest_blocks() + 2 * BLOCK >= free);
        }
        guest.no_faults();
    });
}

/// A list that its sink stops at the third block.
struct Short {
    list: List,
    balloon: Arc<Balloon>,
}

impl FreePageSink for Short {
    fn add_range(&self, range: Range<u64>) {
        self.list.add_range(range);
        if self.list.ranges().len() == 3 {
            self.balloon.stop_list();
        }
    }

    fn complete(&self) {
        self.list.complete();
    }
}

#[test]
fn a_list_that_is_stopped_halfway_ends_there_and_the_next_one_is_complete() {
    on_uml(|| {
        let guest = Guest::start(256, without(Features::REPORTING));
        let free = guest.in_largest_blocks();
        // On a busy host the guest may come to its end before it is notified, again and again.
        let (mut halfway, mut round) = (0, 0);
        while round < 5 || (halfway == 0 && round < 100) {
            round += 1;
            let short = Arc::new(Short { list: List::default(), balloon: guest.balloon.clone() });
            guest.balloon.request_list(short.clone()).unwrap();
            until("it is stopped", || guest.balloon.hint_list().state == HintState::Stopped);
            // The guest does not know yet, and continues for a moment, or to its end.
            guest.touch(1);
            halfway += u32::from(guest.in_largest_blocks() > 2 * BLOCK);
            assert_eq!((short.list.ranges().len(), short.list.is_complete()), (3, false), "round {round}");
            guest.balloon.return_pages();
            until("the guest has taken its pages back", || guest.in_largest_blocks() + 2 * BLOCK >= free);
            assert_eq!(short.list.ranges().len(), 3);
        }
        assert!(halfway > 0, "the guest is never notified in time");
        let report = bytes(&guest.free_pages());
        assert!(report.abs_diff(free) <= 2 * BLOCK, "{report} of {free} bytes");
        guest.no_faults();
    });
}

#[test]
fn pages_given_back_are_zero_for_a_guest_that_zeroes_freed_pages() {
    on_uml(|| {
        let offered = Options { features: Features::ALL | Features::PAGE_POISON, ..Options::default() };
        let guest = Guest::booted(REPORTING_MEMORY, offered, "init_on_alloc=0 init_on_free=1");
        assert!(guest.balloon.acked_features().has(Features::PAGE_POISON));
        guest.hold(60);
        guest.touch(100);
        // Zeroed and reported, so that the host may take them: they are zero at their next use.
        guest.wait_until_free_blocks_are_given_back();
        crate::nothing_is_lost_without_hinted_pages(&guest, 60);
    });
}
