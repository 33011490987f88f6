//! The device with a real Linux kernel's driver: user-mode Linux over vhost-user.

mod guest;
mod lists;

use std::collections::BTreeSet;
use std::sync::Arc;

use guest::{Guest, List, MIB, REPORTING_MEMORY, bytes, until};
use limosa_balloon::{Features, HintState, Options};
use limosa_memory::FreePageHinting as _;
use limosa_testkit::{on_uml, pattern};

#[test]
fn holds_a_pattern_when_asked() {
    pattern::hold_when_asked();
}

fn without(features: Features) -> Options {
    Options { features: Features::ALL.without(features), ..Options::default() }
}

#[test]
fn inflating_gives_memory_back_and_deflating_provides_it_again() {
    on_uml(|| {
        let guest = Guest::start(256, without(Features::REPORTING));
        let ram = guest.balloon.size().ram;
        guest.hold(40);
        guest.touch(120);
        let before = guest.resident();
        assert!(before > 160 * MIB);
        guest.resize(ram - 140 * MIB);
        let counters = guest.balloon.counters();
        assert_eq!(counters.inflated_pages - counters.deflated_pages, 140 * MIB / 4096);
        assert!(guest.resident() < before - 80 * MIB, "{} of {before} bytes are still there", guest.resident());
        assert!(counters.discards < counters.inflated_pages, "runs are given back, not pages");
        assert_eq!(guest.verify(), "0 of 10240 pages lost");

        guest.resize(ram);
        assert_eq!(guest.balloon.counters().deflated_pages, guest.balloon.counters().inflated_pages);
        guest.touch(120);
        assert_eq!(guest.verify(), "0 of 10240 pages lost");
        guest.no_faults();
    });
}

#[test]
fn statistics_match_those_in_the_guest() {
    on_uml(|| {
        let guest = Guest::start(128, Options::default());
        for sequence in 1..4 {
            guest.balloon.request_statistics().unwrap();
            until("statistics come", || guest.balloon.statistics().is_some_and(|said| said.sequence >= sequence));
        }
        let said = guest.balloon.statistics().unwrap();
        assert_eq!(said.total_memory(), Some(guest.uml.meminfo("MemTotal").unwrap() * 1024));
        let free = guest.uml.meminfo("MemFree").unwrap() * 1024;
        assert!(said.free_memory().is_some_and(|report| report.abs_diff(free) < 16 * MIB));
        assert!(said.available_memory().is_some() && said.get("major-faults").is_some());
        assert_eq!(guest.balloon.counters().unknown_statistics, 0);
        guest.no_faults();
    });
}

#[test]
fn a_guest_that_runs_out_of_memory_takes_it_from_the_balloon() {
    on_uml(|| {
        let guest = Guest::start(256, without(Features::REPORTING));
        let ram = guest.balloon.size().ram;
        guest.resize(ram - 160 * MIB);
        // More than it has left.
        guest.hold(120);
        assert!(guest.balloon.counters().deflated_pages > 0);
        assert_eq!(guest.verify(), "0 of 30720 pages lost");
        assert_eq!(guest.uml.shell("dmesg | grep -c 'Killed process' || true").unwrap(), ["0"]);
        guest.no_faults();
    });
}

/// Every known page is outside of the hinted ones, and the guest does not miss those.
fn nothing_is_lost_without_hinted_pages(guest: &Guest, held: u64) {
    let pages = held * MIB / 4096;
    let free_before = guest.free_memory();
    let hinted = guest.free_pages();
    let free = guest.uml.meminfo("MemTotal").unwrap() * 1024;
    assert!(bytes(&hinted) < free && bytes(&hinted) > (free - held * MIB) / 2, "{} of {free}", bytes(&hinted));
    guest.uml.pause(true);
    // A copy of everything except the hinted pages.
    let copied: BTreeSet<u64> = guest
        .known_pages()
        .into_iter()
        .filter(|(_, address)| !hinted.iter().any(|range| range.contains(address)))
        .map(|(number, _)| number)
        .collect();
    assert_eq!(copied.len() as u64, pages, "all that the program holds is in the copy");
    let before = guest.resident();
    guest.discard(&hinted);
    assert!(guest.resident() <= before);
    guest.uml.pause(false);
    guest.done(free_before);
    if held > 0 {
        assert_eq!(guest.verify(), format!("0 of {pages} pages lost"));
    }
    // Discarded memory can be used like any other.
    guest.touch(60);
    if held > 0 {
        assert_eq!(guest.verify(), format!("0 of {pages} pages lost"));
    }
    guest.no_faults();
}

#[test]
fn an_idle_guest_does_not_miss_the_pages_that_it_hinted() {
    on_uml(|| {
        let guest = Guest::start(256, without(Features::REPORTING));
        nothing_is_lost_without_hinted_pages(&guest, 0);
        nothing_is_lost_without_hinted_pages(&guest, 0);
    });
}

#[test]
fn a_half_full_guest_does_not_miss_the_pages_that_it_hinted() {
    on_uml(|| {
        let guest = Guest::start(256, without(Features::REPORTING));
        guest.touch(100);
        guest.hold(110);
        nothing_is_lost_without_hinted_pages(&guest, 110);
    });
}

#[test]
fn lists_can_be_requested_repeatedly_and_stopped() {
    on_uml(|| {
        let guest = Guest::start(256, Options::default());
        let free = guest.free_memory();
        for _ in 0..5 {
            let hinted = bytes(&guest.free_pages());
            assert!(hinted > free / 2, "{hinted} of {free}");
            assert_eq!(guest.balloon.hint_list().state, HintState::Stopped);
            guest.done(free);
        }
        for _ in 0..5 {
            // Stopped at some time; the blocks sent before are free nevertheless, and the next list is complete.
            let list = Arc::new(List::default());
            guest.balloon.request_list(list.clone()).unwrap();
            until("it begins", || !list.ranges().is_empty());
            guest.balloon.stop_list();
            bytes(&list.ranges());
            guest.done(free);
        }
        let first = guest.free_pages();
        assert!(bytes(&first) > free / 2);
        assert!(bytes(&guest.free_pages()) < free / 4, "blocks that it holds for a list are not sent again");
        // Three without waiting, each ending the previous one.
        for _ in 0..3 {
            guest.balloon.request_list(Arc::new(List::default())).unwrap();
        }
        guest.done(free);
        guest.no_faults();
    });
}

#[test]
fn a_guest_short_of_memory_takes_hinted_pages_back_without_notification() {
    on_uml(|| {
        let guest = Guest::start(256, without(Features::REPORTING));
        let free = guest.free_memory();
        let hinted = guest.free_pages();
        // The guest holds nearly all of its free memory for the list; now it needs it.
        guest.hold(120);
        guest.uml.pause(true);
        let known = guest.known_pages();
        let inside = known.iter().filter(|(_, address)| hinted.iter().any(|range| range.contains(address))).count();
        guest.uml.pause(false);
        assert!(inside > 10_000, "{inside} pages: why hints are only hints");
        assert_eq!(guest.verify(), "0 of 30720 pages lost", "the device discards nothing for a hint");
        guest.done(free - 120 * MIB);
        guest.touch(20);
        assert_eq!(guest.verify(), "0 of 30720 pages lost");
        guest.no_faults();
    });
}

#[test]
fn reported_pages_are_given_back_without_a_request() {
    on_uml(|| {
        let guest = Guest::start(REPORTING_MEMORY, Options::default());
        guest.hold(40);
        guest.touch(140);
        guest.wait_until_free_blocks_are_given_back();
        assert!(guest.resident() < REPORTING_MEMORY * MIB - 300 * MIB, "{} bytes are resident", guest.resident());
        let counters = guest.balloon.counters();
        assert!(counters.reported_bytes > 100 * MIB && counters.discards > 0);
        assert_eq!(guest.verify(), "0 of 10240 pages lost");
        guest.no_faults();
    });
}

#[test]
fn a_driver_that_is_unloaded_and_loaded_again_gets_its_pages_back_and_starts_again() {
    on_uml(|| {
        let guest = Guest::start(256, Options::default());
        let ram = guest.balloon.size().ram;
        let free = guest.free_memory();
        guest.hold(40);
        for round in 0..3 {
            guest.resize(ram - (50 + round) * MIB);
            if round > 0 {
                // In the middle of a list, and with pages held for one.
                guest.balloon.request_list(Arc::new(List::default())).unwrap();
            }
            guest.uml.shell("rmmod virtio_balloon").unwrap();
            let left = guest.free_memory();
            assert!(left > free - 80 * MIB, "the guest has its pages back: {left} of {free}");
            guest.uml.shell("insmod /modules/virtio_balloon.ko").unwrap();
            until("the balloon has the requested size", || guest.balloon.size().actual == ram - (50 + round) * MIB);
            guest.balloon.request_statistics().unwrap();
            guest.free_pages();
            guest.balloon.return_pages();
        }
        assert_eq!(guest.verify(), "0 of 10240 pages lost");
        guest.no_faults();
    });
}

#[test]
fn a_guest_outlives_its_balloons_server() {
    on_uml(|| {
        // Idle, with pages held for a list; and during inflating.
        for inflating in [false, true] {
            let mut guest = Guest::start(256, Options::default());
            guest.hold(60);
            guest.free_pages();
            if inflating {
                guest.balloon.set_target(64 * MIB).unwrap();
                until("it inflates", || guest.balloon.counters().inflated_pages > 0);
            }
            guest.end_server();
            assert_eq!(guest.verify(), "0 of 15360 pages lost");
            assert!(!guest.balloon.has_driver());
            assert!(guest.balloon.request_list(Arc::new(List::default())).is_err());
            guest.uml.check_alive().unwrap();
        }
    });
}

/// Linux 6.1 also notifies the device of pages that it takes out of a balloon whose device is gone, and waits forever.
#[test]
fn a_guest_whose_server_ends_gets_hinted_pages_back_and_the_balloons_only_if_it_was_emptied() {
    on_uml(|| {
        for emptied in [false, true] {
            let mut guest = Guest::start(256, without(Features::REPORTING));
            let (ram, before) = (guest.balloon.size().ram, guest.uml.meminfo("MemFree").unwrap() * 1024);
            guest.resize(ram - 120 * MIB);
            if emptied {
                guest.resize(ram);
                assert!(bytes(&guest.free_pages()) > 120 * MIB);
                assert!(
                    guest.uml.meminfo("MemFree").unwrap() * 1024 < before - 100 * MIB,
                    "it holds the pages that it hinted"
                );
            }
            guest.end_server();
            guest.uml.shell("sleep 2").unwrap();
            let lost = before.saturating_sub(guest.uml.meminfo("MemFree").unwrap() * 1024);
            let expected = if emptied { 0..24 * MIB } else { 96 * MIB..144 * MIB };
            assert!(expected.contains(&lost), "{lost} bytes, emptied: {emptied}");
            guest.uml.check_alive().unwrap();
        }
    });
}
