//! The heartbeat guest under plain QEMU: the proof that its check is green after a correct migration and red after a
//! wrong one.

use limosa_testkit::{
    Accelerator, HeartbeatError, HeartbeatGuest, Machine, MemoryBackend, note_skip, qemu_skipped, scratch,
};

fn guest() -> HeartbeatGuest {
    HeartbeatGuest::over(8 << 20)
}

#[test]
fn a_running_guest_beats_in_order_and_its_memory_is_consistent_at_any_moment() {
    if qemu_skipped() {
        return;
    }
    let vm = Machine::heartbeat(guest()).start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    for _ in 0..20 {
        vm.check_heartbeat().unwrap();
    }
    vm.wait_heartbeats(3).unwrap();
    let passes: Vec<u32> =
        vm.serial().lines().iter().map(|line| u32::from_str_radix(&line.text, 16).unwrap()).collect();
    assert!(passes.iter().zip(1..).all(|(&pass, wanted)| pass == wanted), "{passes:?}");
}

#[test]
fn the_check_catches_the_guest_in_the_middle_of_a_lap() {
    if qemu_skipped() {
        return;
    }
    let slow = HeartbeatGuest { delay: 20_000, rest: 0, ..guest() };
    let vm = Machine::heartbeat(slow).start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    // It may be between two passes, which is a short moment.
    let beats: Vec<_> = (0..20).map(|_| vm.check_heartbeat().unwrap()).collect();
    assert!(beats.iter().any(|beat| beat.pages_ahead < u64::from(slow.pages)), "{beats:?}");
}

#[test]
fn a_guest_migrated_by_qemu_beats_on_where_it_was() {
    if qemu_skipped() {
        return;
    }
    for backend in [MemoryBackend::Anonymous, MemoryBackend::Memfd, MemoryBackend::File] {
        let pair = Machine::heartbeat(guest()).backend(backend).pair().unwrap();
        pair.source.wait_heartbeats(3).unwrap();
        pair.source.migrate_to(&pair.destination).unwrap();
        assert_eq!(pair.source.run_state().unwrap(), "postmigrate");
        let last_there = pair.source.last_pass().unwrap();
        pair.destination.wait_heartbeats(1).unwrap();
        pair.destination.check_heartbeat().unwrap();
        pair.destination.wait_heartbeats(2).unwrap();
        let here: Vec<_> = pair.destination.serial().lines().into_iter().map(|line| line.text).collect();
        // A guest that was stopped while it said its number says the rest of it here: that is no full line.
        let rest = usize::from(here[0].len() < 8);
        let first = last_there + 1 + u32::try_from(rest).unwrap();
        assert_eq!(u32::from_str_radix(&here[rest], 16).unwrap(), first, "{backend:?}: {here:?}");
        pair.destination.check_heartbeat().unwrap();
    }
}

#[test]
fn a_guest_under_kvm_migrates_where_kvm_really_runs_guests() {
    if qemu_skipped() {
        return;
    }
    if !Accelerator::kvm_runs_guests() {
        return note_skip("KVM runs no guest here");
    }
    let pair = Machine::heartbeat(guest()).accelerator(Accelerator::Kvm).pair().unwrap();
    pair.source.wait_heartbeats(2).unwrap();
    pair.source.migrate_to(&pair.destination).unwrap();
    pair.destination.wait_heartbeats(2).unwrap();
    pair.destination.check_heartbeat().unwrap();
}

#[test]
fn a_guest_saved_to_a_mapped_ram_file_and_loaded_beats_on() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    for threads in [0, 2] {
        let file = folder.path().join(format!("saved{threads}"));
        let machine = Machine::heartbeat(guest());
        let source = machine.start().unwrap();
        source.wait_heartbeats(2).unwrap();
        source.save_file(&file, threads).unwrap();
        let at_save = source.check_heartbeat().unwrap();
        drop(source);
        let destination = machine.start_incoming_stopped().unwrap();
        destination.load_file(&file, threads).unwrap();
        assert_eq!(destination.check_heartbeat().unwrap(), at_save);
        destination.cont().unwrap();
        destination.wait_heartbeats(2).unwrap();
        destination.check_heartbeat().unwrap();
    }
}

#[test]
fn every_kind_of_tampering_with_migrated_memory_turns_the_check_red() {
    if qemu_skipped() {
        return;
    }
    let machine = Machine::heartbeat(guest()).backend(MemoryBackend::Memfd);
    let source = machine.start().unwrap();
    let destination = machine.start_incoming_stopped().unwrap();
    source.wait_heartbeats(2).unwrap();
    source.migrate_to(&destination).unwrap();
    let intact = destination.check_heartbeat().unwrap();
    let page = |index: u64| guest().span().start + index * 4096;
    let original = destination.read_memory(page(700)..page(701)).unwrap();

    let expect = |what: &str, bytes: &[u8], red: fn(&HeartbeatError) -> bool| {
        destination.tamper(page(700), bytes).unwrap();
        let error = destination.check_heartbeat().expect_err(what);
        assert!(error.downcast_ref().is_some_and(red), "{what}: {error:#}");
        destination.tamper(page(700), &original).unwrap();
        assert_eq!(destination.check_heartbeat().unwrap(), intact);
    };
    expect("a lost page", &[0; 4096], |error| matches!(error, HeartbeatError::Address { page: 700, .. }));
    expect("a stale page", &[original[0].wrapping_sub(2)], |error| matches!(error, HeartbeatError::Order { .. }));
    expect("a page from the future", &[original[0].wrapping_add(1)], |error| {
        matches!(error, HeartbeatError::Order { .. })
    });
    let neighbour = destination.read_memory(page(701)..page(702)).unwrap();
    expect("another page", &neighbour, |error| matches!(error, HeartbeatError::Address { .. }));
    let mut touched = original.clone();
    touched[4000] = 1;
    expect("a flipped bit", &touched, |error| matches!(error, HeartbeatError::Foreign { offset: 4000, .. }));

    // All of memory one pass ahead of the CPU: in order, and still wrong.
    for index in 0..u64::from(guest().pages) {
        let byte = destination.read_memory(page(index)..page(index) + 1).unwrap()[0];
        destination.tamper(page(index), &[byte.wrapping_add(2)]).unwrap();
    }
    let error = destination.check_heartbeat().expect_err("memory of another instant");
    assert!(matches!(error.downcast_ref(), Some(HeartbeatError::Pass { .. })), "{error:#}");
}
