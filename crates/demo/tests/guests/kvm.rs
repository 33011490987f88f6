//! The guest whose processors are vCPUs: it keeps its memory right, and KVM's logs of its writes miss none.
//!
//! Needs /dev/kvm; `LIMOSA_SKIP_KVM=1` skips these tests.
#![allow(missing_docs, reason = "a test")]

use std::sync::Arc;

use crate::acts::{copy, let_it_write};
use limosa_demo::guest::{self, Guest, GuestError, GuestKind, GuestOptions, LogKind, Rate};
use limosa_memory::dirty::DirtyPages;
use limosa_memory::{BlockOptions, GuestMemory};
use limosa_page::PAGE_LEN;

/// True if the user asked for these tests to be skipped; else the tests fail where KVM does not work.
fn skipped() -> bool {
    limosa_testkit::skipped("LIMOSA_SKIP_KVM")
}

fn memory() -> Arc<GuestMemory> {
    let blocks = [("pc.ram", 2 << 20), ("vga.vram", 64 << 10)].map(|(name, length)| BlockOptions::memfd(name, length));
    Arc::new(GuestMemory::new(blocks.map(|options| options.map().unwrap()).into()).unwrap())
}

fn busy(log: LogKind) -> GuestOptions {
    GuestOptions { rate: Rate::Max, writers: 2, log, ..GuestOptions::default() }
}

fn boot(options: &GuestOptions) -> Box<dyn Guest> {
    guest::boot(GuestKind::Kvm, memory(), options)
        .unwrap_or_else(|error| panic!("{error} (LIMOSA_SKIP_KVM=1 skips the tests that need KVM)"))
}

#[test]
fn the_code_has_written_what_the_pattern_says_at_every_pause() {
    if skipped() {
        return;
    }
    let guest = boot(&busy(LogKind::Best));
    assert_eq!(guest.verify().unwrap().writes, 0);
    for round in 0..50 {
        let_it_write(&*guest, 100);
        let verified = guest.verify().unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert_eq!(guest.verify().unwrap(), verified, "nothing writes while it is paused");
    }
}

#[test]
fn a_guest_goes_on_in_copied_memory_and_a_changed_page_is_noticed() {
    if skipped() {
        return;
    }
    let source = boot(&busy(LogKind::Best));
    let_it_write(&*source, 500);
    let state = source.save().unwrap();
    let target = guest::receive(GuestKind::Kvm, memory(), LogKind::KvmRing).unwrap();
    assert!(matches!(target.save(), Err(GuestError::NoState)));
    copy(source.memory(), target.memory(), &DirtyPages::full(source.memory()));
    target.load(&state).unwrap();
    assert_eq!(target.verify().unwrap(), source.verify().unwrap());
    let_it_write(&*target, 500);
    assert!(target.verify().unwrap().writes >= source.writes() + 500);
    for page in [0, 7, 511] {
        let block = target.memory().block(0).unwrap();
        let mut before = [0; 4];
        block.read(page * 4096 + 512, &mut before).unwrap();
        block.write(page * 4096 + 512, &[0xee; 4]).unwrap();
        assert!(matches!(target.verify(), Err(GuestError::Damaged { page: found, .. }) if found == page));
        block.write(page * 4096 + 512, &before).unwrap();
    }
    target.verify().unwrap();
}

#[test]
fn a_state_that_is_not_this_guests_is_refused() {
    if skipped() {
        return;
    }
    let guest = boot(&busy(LogKind::Best));
    let state = guest.save().unwrap();
    let mut wrong = state.clone();
    // The last register but one of the last vCPU, its instruction pointer.
    let at = wrong.len() - 9;
    wrong[at] = 0x55;
    let threads = guest::boot(GuestKind::Threads, memory(), &GuestOptions::default()).unwrap().save().unwrap();
    for state in [&wrong, &threads, &state[..state.len() - 8].to_vec()] {
        assert!(matches!(guest.load(state), Err(GuestError::State { .. })));
    }
    guest.load(&state).unwrap();
    let_it_write(&*guest, 100);
    guest.verify().unwrap();
}

fn shadow_of(log: LogKind, rounds: u64) {
    if skipped() {
        return;
    }
    let guest = boot(&busy(log));
    let mut logs = guest.dirty_logs().unwrap();
    logs.start().unwrap();
    let copied = memory();
    copy(guest.memory(), &copied, &DirtyPages::full(guest.memory()));
    for round in 0..rounds {
        guest.run().unwrap();
        // One fetch while it writes, one while it does not. In between it writes a part of its memory only: a write
        // that was lost must not be made up for by the next one.
        let before = guest.writes();
        while guest.writes() == before {
            std::thread::yield_now();
        }
        let mut dirty = DirtyPages::new(guest.memory());
        logs.fetch(&mut dirty).unwrap();
        copy(guest.memory(), &copied, &dirty);
        guest.pause().unwrap();
        let mut dirty = DirtyPages::new(guest.memory());
        logs.fetch(&mut dirty).unwrap();
        copy(guest.memory(), &copied, &dirty);
        for (mine, its) in guest.memory().blocks().iter().zip(copied.blocks()) {
            for page in mine.pages().iter() {
                let mut pages = [[0; PAGE_LEN]; 2];
                mine.read(page.offset(), &mut pages[0]).unwrap();
                its.read(page.offset(), &mut pages[1]).unwrap();
                assert!(
                    pages[0] == pages[1],
                    "{log:?}, round {round}: {} page {page} was written and not named",
                    mine.name()
                );
            }
        }
    }
    logs.stop().unwrap();
    guest.verify().unwrap();
}

#[test]
fn a_shadow_kept_by_kvms_dirty_log_is_equal_at_every_pause_of_the_guest() {
    shadow_of(LogKind::KvmLog, 1000);
}

#[test]
fn a_shadow_kept_by_kvms_dirty_log_in_one_step_is_equal_at_every_pause_of_the_guest() {
    shadow_of(LogKind::KvmLogInOneStep, 1000);
}

#[test]
fn a_shadow_kept_by_kvms_dirty_ring_is_equal_at_every_pause_of_the_guest() {
    shadow_of(LogKind::KvmRing, 1000);
}

#[test]
fn a_shadow_kept_by_write_protection_of_a_vms_memory_is_equal_at_every_pause_of_the_guest() {
    shadow_of(LogKind::WpAsync, 250);
    shadow_of(LogKind::WpThread, 250);
}

#[test]
fn a_ring_that_runs_full_stops_no_vcpu_for_good_and_loses_nothing() {
    if skipped() {
        return;
    }
    let blocks = vec![BlockOptions::memfd("pc.ram", 64 << 20).map().unwrap()];
    let memory = Arc::new(GuestMemory::new(blocks).unwrap());
    // Each vCPU writes more pages in one lap than its ring has room for.
    let options = GuestOptions { filled: Some(0), ..busy(LogKind::KvmRing) };
    let guest = guest::boot(GuestKind::Kvm, memory, &options)
        .unwrap_or_else(|error| panic!("{error} (LIMOSA_SKIP_KVM=1 skips the tests that need KVM)"));
    let mut logs = guest.dirty_logs().unwrap();
    logs.start().unwrap();
    let_it_write(&*guest, 20_000);
    let mut dirty = DirtyPages::new(guest.memory());
    logs.fetch(&mut dirty).unwrap();
    guest.verify().unwrap();
    // All pages that are not zero were written.
    let mut page = [0; PAGE_LEN];
    let block = guest.memory().block(0).unwrap();
    for number in block.pages().iter().skip(1) {
        block.read(number.offset(), &mut page).unwrap();
        assert!(page == [0; PAGE_LEN] || dirty.block(0).unwrap().get(number), "page {number} was not named");
    }
    // One of the two has done half of the writes at least, which is all of its pages.
    assert!(dirty.count() > 4096, "{}: no ring was ever full", dirty.count());
}
