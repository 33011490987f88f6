//! The device, driven by the model of Linux's driver.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::machine::{Guest, MIB, RAM, ReceivedList, USED, poll_until_idle};
use limosa_balloon::{Features, GuestRam, HintState, Options, QueueNumbering, StatisticsError, Strategy};
use limosa_balloon_driver::{Driver, Pages as _};
use limosa_memory::{FreePageHinting as _, FreePageSink, FreePagesError};
use parking_lot::Mutex;

#[test]
fn a_balloon_takes_memory_and_gives_it_back() {
    let guest = Guest::new();
    let mut driver = guest.probe();
    guest.balloon.set_target(40 * MIB).unwrap();
    poll_until_idle(&mut driver);
    assert_eq!(guest.balloon.size().actual, 40 * MIB);
    assert!(guest.is_gone(40 * MIB..RAM), "the model inflates from the top");
    assert!(guest.is_intact(0..40 * MIB));
    let counters = guest.balloon.counters();
    assert_eq!((counters.arrays, counters.inflated_pages, counters.discarded_bytes), (24, 6144, 24 * MIB));
    assert_eq!(counters.discards, 24, "one call for a run");

    guest.balloon.set_target(1 << 40).unwrap();
    poll_until_idle(&mut driver);
    assert_eq!((guest.balloon.size().actual, guest.balloon.counters().deflated_pages), (RAM, 6144));
    assert_eq!(guest.free_ranges(), [USED..RAM]);
    assert!(guest.balloon.set_target(0).is_err());
}

#[test]
fn arrays_may_have_any_length() {
    for numbers in [1, 255, 257, 16_384] {
        let guest = Guest::new();
        let mut driver = guest.probe().with_arrays_of(numbers);
        let pages = 500;
        guest.balloon.set_target(RAM - pages * 4096).unwrap();
        poll_until_idle(&mut driver);
        assert_eq!(driver.balloon_pages(), 500);
        assert!(guest.is_gone(RAM - pages * 4096..RAM) && guest.is_intact(0..RAM - pages * 4096));
        assert_eq!(guest.balloon.counters().arrays, 500u64.div_ceil(numbers as u64));
    }
}

#[test]
fn a_target_that_was_set_before_the_guest_connected_applies_to_it() {
    let guest = Guest::with(Options::default(), |memory| Arc::new(GuestRam::new(memory, Strategy::Nothing)));
    guest.balloon.set_target(60 * MIB).unwrap();
    let mut driver = guest.probe();
    poll_until_idle(&mut driver);
    assert_eq!(guest.balloon.size().actual, 60 * MIB);
    assert!(guest.is_intact(0..RAM), "nothing is given back by strategy none");
}

#[test]
fn statistics_arrive_on_request() {
    let guest = Guest::new();
    assert_eq!(guest.balloon.request_statistics(), Err(StatisticsError::NoDriver));
    let mut driver = guest.probe();
    poll_until_idle(&mut driver);
    let first = guest.balloon.statistics().expect("the driver sends statistics when it is loaded");
    assert_eq!((first.free_memory(), first.sequence), (Some(RAM - USED), 1));
    guest.free.lock().allocate(4 * MIB);
    assert_eq!(guest.balloon.statistics().unwrap().sequence, 1);
    guest.balloon.request_statistics().unwrap();
    poll_until_idle(&mut driver);
    let second = guest.balloon.statistics().unwrap();
    assert_eq!((second.free_memory(), second.sequence), (Some(RAM - USED - 4 * MIB), 2));

    // They are removed with their driver, and the sequence continues, so that a waiting caller recognizes new ones.
    driver.unload().unwrap();
    assert_eq!(guest.balloon.statistics(), None);
    poll_until_idle(&mut guest.probe());
    assert_eq!(guest.balloon.statistics().unwrap().sequence, 3);

    let guest = Guest::new();
    let _driver = guest.probe_with(Features::FREE_PAGE_HINT);
    assert_eq!(guest.balloon.request_statistics(), Err(StatisticsError::NotAccepted));
}

#[test]
fn a_list_of_free_pages_is_complete_and_can_be_requested_again() {
    let guest = Guest::new();
    let mut driver = guest.probe();
    for round in 1..=3 {
        let received = Arc::new(ReceivedList::default());
        guest.balloon.request_list(received.clone()).unwrap();
        poll_until_idle(&mut driver);
        assert!(received.is_complete());
        assert_eq!(received.joined(), [USED..RAM]);
        assert_eq!(driver.shrinker().held(), 12, "the guest holds them until DONE");
        guest.balloon.return_pages();
        guest.balloon.return_pages();
        poll_until_idle(&mut driver);
        assert_eq!((driver.shrinker().held(), guest.free_ranges()), (0, vec![USED..RAM]));
        let list = guest.balloon.hint_list();
        assert!(list.complete && list.state == HintState::Done);
        assert_eq!((list.blocks, list.bytes, guest.balloon.counters().hint_lists), (12, RAM - USED, round));
    }
    assert!(guest.is_intact(0..RAM), "hinted pages are not given back");
}

#[test]
fn a_list_that_is_stopped_half_way_has_no_further_blocks_and_the_next_one_is_complete() {
    let guest = Guest::new();
    let mut driver = guest.probe();
    /// Stops the list at its third block, from within the sink, under the sink's lock.
    struct Stopper(Mutex<u32>, Arc<limosa_balloon::Balloon>);
    impl FreePageSink for Stopper {
        fn add_range(&self, _: Range<u64>) {
            let mut seen = self.0.lock();
            *seen += 1;
            if *seen == 3 {
                self.1.stop_list();
            }
        }
        fn complete(&self) {
            panic!("it was stopped");
        }
    }
    let stopper = Arc::new(Stopper(Mutex::new(0), guest.balloon.clone()));
    guest.balloon.request_list(stopper.clone()).unwrap();
    poll_until_idle(&mut driver);
    assert_eq!(*stopper.0.lock(), 3);
    let counters = guest.balloon.counters();
    assert_eq!((counters.hinted_blocks, counters.stale_hints, counters.hint_lists), (3, 9, 0));
    assert_eq!(guest.balloon.hint_list().state, HintState::Stopped);

    // Blocks of the first list are still held, so the second one is empty until DONE gives them back.
    let received = Arc::new(ReceivedList::default());
    guest.balloon.return_pages();
    poll_until_idle(&mut driver);
    guest.balloon.request_list(received.clone()).unwrap();
    poll_until_idle(&mut driver);
    assert_eq!(received.joined(), [USED..RAM]);
}

/// As Linux does, which has one field for the ids of all lists; a device that is behind must not take one list for
/// another.
#[test]
fn a_driver_sends_a_list_without_waiting() {
    const LISTS: usize = 3;
    let guest = Guest::new();
    let mut driver = guest.probe();
    let (first, second) = (Arc::new(ReceivedList::default()), Arc::new(ReceivedList::default()));
    guest.balloon.request_list(first.clone()).unwrap();
    guest.machine.work_if_no_worker();
    guest.machine.hold(LISTS, true);
    poll_until_idle(&mut driver);
    assert_eq!((driver.shrinker().held(), first.joined()), (12, vec![]), "all of it is on the ring, and not processed");
    guest.balloon.return_pages();
    poll_until_idle(&mut driver);
    let taken = guest.free.lock().allocate(4 * MIB).unwrap();
    guest.balloon.request_list(second.clone()).unwrap();
    poll_until_idle(&mut driver);
    assert_eq!(second.joined(), []);
    guest.machine.hold(LISTS, false);
    poll_until_idle(&mut driver);
    assert_eq!(
        (first.joined(), second.joined()),
        (vec![], vec![USED..taken]),
        "blocks of the second list only, and those that are free now"
    );
    assert!(second.is_complete() && guest.balloon.counters().stale_hints == 12);
}

#[test]
fn a_new_request_ends_the_previous_one() {
    let guest = Guest::new();
    let mut driver = guest.probe();
    let (first, second) = (Arc::new(ReceivedList::default()), Arc::new(ReceivedList::default()));
    guest.balloon.request_list(first.clone()).unwrap();
    guest.balloon.request_list(second.clone()).unwrap();
    poll_until_idle(&mut driver);
    assert_eq!(first.joined(), []);
    assert!(!first.is_complete() && second.is_complete());
}

#[test]
fn the_shrinker_takes_blocks_back_without_notifying_the_device() {
    let guest = Guest::new();
    let mut driver = guest.probe();
    let received = Arc::new(ReceivedList::default());
    guest.balloon.request_list(received).unwrap();
    poll_until_idle(&mut driver);
    let before = guest.balloon.counters();
    let back = driver.shrinker().take_back(2);
    assert_eq!(back.len(), 2);
    poll_until_idle(&mut driver);
    assert_eq!(guest.balloon.counters(), before, "the device cannot know");
    guest.balloon.return_pages();
    poll_until_idle(&mut driver);
    assert_eq!(guest.free.lock().free_bytes(), RAM - USED - 8 * MIB);
}

#[test]
fn a_request_for_free_pages_that_is_impossible_fails_with_the_reason() {
    let guest = Guest::new();
    let why = |guest: &Guest| match guest.balloon.request_list(Arc::new(ReceivedList::default())) {
        Err(FreePagesError::NotOffered { why }) => why,
        other => panic!("{other:?}"),
    };
    assert!(why(&guest).contains("load virtio_balloon"));
    let driver = guest.probe_with(Features::STATS_VQ);
    assert!(why(&guest).contains("free-page-hint"));
    drop(driver);
    let _driver = guest.probe();
    guest.balloon.write_config(12, &0xaau32.to_le_bytes());
    assert!(why(&guest).contains("page_poison"));
}

#[test]
fn reported_pages_are_given_back_before_the_acknowledgement() {
    let guest = Guest::new();
    let mut driver = guest.probe();
    assert_eq!(driver.report(2 * MIB).unwrap(), 24);
    assert!(guest.is_gone(USED..RAM) && guest.is_intact(0..USED));
    let counters = guest.balloon.counters();
    assert_eq!((counters.reported_blocks, counters.reported_bytes), (24, RAM - USED));
}

#[test]
fn reports_are_only_acknowledged_while_reporting_is_off_or_free_pages_are_poisoned() {
    let guest = Guest::with(Options { reporting_off: true, ..Options::default() }, |memory| {
        Arc::new(GuestRam::new(memory, Strategy::Auto))
    });
    let mut driver = guest.probe();
    driver.report(2 * MIB).unwrap();
    assert_eq!(guest.balloon.counters().ignored_reports, 24);
    guest.balloon.set_reporting(true);
    guest.balloon.write_config(12, &0xaau32.to_le_bytes());
    driver.report(2 * MIB).unwrap();
    assert!(guest.is_intact(0..RAM));
    assert_eq!(guest.balloon.counters().discards, 0);
    guest.balloon.write_config(12, &[0; 4]);
    driver.report(2 * MIB).unwrap();
    assert!(guest.is_gone(USED..RAM));
}

#[test]
fn queues_are_numbered_as_linux_numbers_them() {
    for features in [
        Features::NONE,
        Features::FREE_PAGE_HINT | Features::REPORTING,
        Features::STATS_VQ | Features::REPORTING,
        Features::REPORTING,
    ] {
        let guest = Guest::new();
        let mut driver = guest.probe_with(features);
        guest.balloon.set_target(60 * MIB).unwrap();
        poll_until_idle(&mut driver);
        assert_eq!(guest.balloon.size().actual, 60 * MIB, "{features:?}");
        if features.has(Features::REPORTING) {
            assert!(driver.report(MIB).unwrap() > 0);
            assert!(guest.balloon.counters().reported_blocks > 0, "{features:?}");
        }
        assert_eq!(QueueNumbering::Compact.role(features, 0), Some(limosa_balloon::QueueRole::Inflate));
    }
}

#[test]
fn a_driver_that_is_unloaded_and_loaded_again_finds_an_empty_balloon() {
    let guest = Guest::new();
    let mut driver = guest.probe();
    guest.balloon.set_target(40 * MIB).unwrap();
    poll_until_idle(&mut driver);
    let received = Arc::new(ReceivedList::default());
    guest.balloon.request_list(received).unwrap();
    poll_until_idle(&mut driver);
    driver.unload().unwrap();
    assert_eq!(guest.balloon.size().actual, RAM);
    assert_eq!(guest.balloon.hint_list().state, HintState::Done);
    assert_eq!(guest.free_ranges(), [USED..RAM]);

    let mut driver = guest.probe();
    poll_until_idle(&mut driver);
    assert_eq!(guest.balloon.size().actual, 40 * MIB, "the target applies to the next driver");
    let received = Arc::new(ReceivedList::default());
    guest.balloon.request_list(received.clone()).unwrap();
    poll_until_idle(&mut driver);
    assert_eq!(received.joined(), [USED..40 * MIB]);
}

/// A driver holds hinted blocks until it reads DONE, possibly from the device after the one that requested them.
#[test]
fn a_new_device_shows_that_guests_may_use_their_pages() {
    const DONE: u32 = 1;
    let command = |guest: &Guest| {
        let mut bytes = [0; 4];
        guest.balloon.read_config(8, &mut bytes);
        u32::from_le_bytes(bytes)
    };
    let guest = Guest::new();
    assert_eq!(command(&guest), DONE, "before there is a driver");
    let mut driver = guest.probe();
    assert_eq!(command(&guest), DONE, "and when there is one");
    guest.balloon.request_list(Arc::new(ReceivedList::default())).unwrap();
    assert_eq!(command(&guest), DONE, "and until its queue was processed");
    poll_until_idle(&mut driver);
    assert!(command(&guest) != DONE && driver.shrinker().held() == 12);
    guest.balloon.reset();
    assert_eq!(command(&guest), DONE);
    poll_until_idle(&mut driver);
    assert_eq!((driver.shrinker().held(), guest.free_ranges()), (0, vec![USED..RAM]));
}

#[test]
fn a_driver_that_disappears_during_a_list_leaves_no_state() {
    let guest = Guest::new();
    let mut driver = guest.probe();
    let received = Arc::new(ReceivedList::default());
    guest.balloon.request_list(received.clone()).unwrap();
    // The first poll gives the id and some blocks, and the guest is reset before the end of the list.
    driver.poll().unwrap();
    guest.balloon.reset();
    drop(driver);
    assert_eq!(Arc::strong_count(&received), 1, "the sink of the list was dropped");
    assert_eq!(guest.balloon.hint_list().state, HintState::Done);
}

#[test]
fn changes_of_the_size_are_counted() {
    let guest = Guest::new();
    let mut driver = guest.probe();
    guest.balloon.set_target(62 * MIB).unwrap();
    poll_until_idle(&mut driver);
    assert_eq!(
        (guest.balloon.actual_change_count(), guest.balloon.size().actual),
        (2, 62 * MIB),
        "one array after the other"
    );
    guest.balloon.write_config(4, &512u32.to_le_bytes());
    assert_eq!(guest.balloon.actual_change_count(), 2, "writing the same value is no change");
    guest.balloon.reset();
    guest.balloon.reset();
    assert_eq!(
        (guest.balloon.actual_change_count(), guest.balloon.size().actual),
        (3, RAM),
        "a balloon is emptied with its driver"
    );
}

#[test]
fn threads_make_no_difference() {
    let guest = Guest::new();
    let _worker = guest.machine.worker().unwrap();
    let mut driver: Driver<_, _> = guest.probe();
    let received = Arc::new(ReceivedList::default());
    guest.balloon.request_list(received.clone()).unwrap();
    guest.balloon.set_target(32 * MIB).unwrap();
    while !(received.is_complete() && guest.balloon.size().actual <= 48 * MIB) {
        driver.poll().unwrap();
        if received.is_complete() {
            guest.balloon.return_pages();
        }
        driver.wait(Duration::from_millis(1));
    }
    guest.balloon.return_pages();
    while guest.balloon.size().actual != 32 * MIB {
        driver.poll().unwrap();
        driver.wait(Duration::from_millis(1));
    }
    assert!(guest.is_intact(0..USED) && guest.is_gone(32 * MIB..RAM));
}
