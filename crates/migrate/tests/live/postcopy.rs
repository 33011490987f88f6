//! A VM that runs before its memory has come: what its guest sees, over connections that break.

use crate::model;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::thread;
use std::time::Duration;

use crate::model::InOneLine;
use crate::model::encrypted::Meeting;
use crate::model::relay::Relay;
use crate::model::vm::Vm;
use crate::model::{Memory, here, pair};
use limosa_channel::Channel;
use limosa_memory::dirty::Writers;
use limosa_memory::{BlockOptions, GuestMemory};
use limosa_migrate::control::Phase;
use limosa_migrate::live::LiveDestinationOptions;
use limosa_migrate::stats::IncomingStats;
use limosa_migrate::stored::{PostcopyOptions, PostcopySource, PrecopySource};
use limosa_migrate::{Handle, IncomingOutcome, LiveDestination, MigrateError};
use limosa_page::PAGE_LEN;
use limosa_stream::{
    Command, Configuration, DeviceSections, PageSizes, RamBlock, RecordEncoder, RecordKind, postcopy, ram, section,
};
use limosa_testkit::HugePages;

fn options() -> LiveDestinationOptions {
    LiveDestinationOptions { answer_timeout: Some(Duration::from_secs(10)), ..LiveDestinationOptions::default() }
}

/// Two thirds of the pages of the first block have contents, and all of the second.
fn source(pages: u64) -> Memory {
    let mut devices = DeviceSections::new();
    devices.push("timer", 0, 1, b"tick").unwrap();
    Memory::new(&[pages, 16], |block, page| block == 1 || page % 3 != 1).with_devices(&devices)
}

fn destination(pages: u64) -> Vm {
    Vm::new(&[("block0", pages), ("block1", 16)])
}

/// A small generator, so that a failure can be had again.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn assert_page(memory: &GuestMemory, source: &Memory, block: usize, page: u64) {
    let mut bytes = [0; PAGE_LEN];
    memory.block(block).unwrap().read(page * 4096, &mut bytes).unwrap();
    assert!(bytes == source.page(block, page), "page {page} of block {block} is not the source's");
}

/// A guest: looks at pages in some order until it has seen this number, and writes some that it alone owns.
fn guest(vm: &Vm, source: &Memory, seed: u64, looks: u64) {
    if !vm.runs() {
        return;
    }
    let pages = vm.memory.block(0).unwrap().pages().len();
    let mut state = seed | 1;
    for _ in 0..looks {
        let page = next(&mut state) % pages;
        assert_page(&vm.memory, source, 0, page);
    }
}

fn assert_all(vm: &Vm, source: &Memory) {
    for (block, here) in vm.memory.blocks().iter().enumerate() {
        (0..here.pages().len()).for_each(|page| assert_page(&vm.memory, source, block, page));
    }
}

fn run_source(memory: &Memory, channel: Channel, sizes: &BTreeMap<String, u64>) -> Result<u64, MigrateError> {
    let handle = Handle::new();
    let options = PostcopyOptions { page_sizes: sizes.clone(), ..PostcopyOptions::default() };
    let source = PostcopySource::new(memory, channel, &handle).options(options);
    source.run().map(|stats| stats.normal_pages)
}

fn finished(outcome: IncomingOutcome<'_, Vm>) -> IncomingStats {
    let IncomingOutcome::Running(stats) = outcome else { panic!("{outcome:?}") };
    stats
}

#[test]
fn a_guest_sees_its_memory_while_it_comes_and_all_of_it_has_come_at_the_end() {
    let source = source(2000);
    let vm = Vm { looks_at: vec![1500, 1501, 1502], ..destination(2000) };
    let (near, far) = pair();
    let stats = thread::scope(|scope| {
        let sending = scope.spawn(|| run_source(&source, near, &BTreeMap::new()));
        for seed in 1..4 {
            let (vm, source) = (&vm, &source);
            scope.spawn(move || guest(vm, source, seed, 500));
        }
        let outcome = LiveDestination::new(&vm, far, &Handle::new()).options(options()).run();
        vm.give_up();
        sending.join().unwrap().unwrap();
        finished(outcome)
    });
    let postcopy = stats.postcopy.unwrap();
    assert_eq!((vm.started(), stats.acknowledge_error.is_none(), postcopy.repeated_pages), (1, true, 0));
    assert_eq!(postcopy.normal_pages, 1333 + 16);
    assert!(postcopy.faults > 0 && postcopy.fault_latency.len() <= postcopy.requests);
    assert_eq!(*vm.loaded.lock().unwrap(), [("timer".to_owned(), 0, b"tick".to_vec())]);
    let first = |page| source.page(0, page)[0];
    assert_eq!(*vm.seen.lock().unwrap(), [first(1500), first(1501), first(1502)]);
    assert_all(&vm, &source);
}

#[test]
fn requested_pages_come_on_a_channel_of_their_own() {
    let source = source(3000);
    let vm = destination(3000);
    let ((near, far), (near_preempt, far_preempt)) = (pair(), pair());
    let stats = thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let handle = Handle::new();
            handle.control.set_max_bandwidth(std::num::NonZeroU64::new(8 << 20));
            let source = PostcopySource::new(&source, near, &handle);
            source.preempt(Box::new(move || Ok(near_preempt))).run()
        });
        for seed in 1..3 {
            let (vm, source) = (&vm, &source);
            scope.spawn(move || guest(vm, source, seed, 400));
        }
        let destination = LiveDestination::new(&vm, far, &Handle::new()).options(options());
        let outcome = destination.preempt(here(far_preempt)).run();
        vm.give_up();
        sending.join().unwrap().unwrap();
        finished(outcome)
    });
    assert!(stats.postcopy.unwrap().requests > 0);
    assert_all(&vm, &source);
}

#[test]
fn a_stranger_does_not_take_the_place_of_the_channel_for_requests_over_tls_nor_when_it_is_recovered() {
    let source = &source(3000);
    let vm = &destination(3000);
    let meeting = &Meeting::new();
    let mut paused = None;
    let stats = thread::scope(|scope| {
        for seed in 1..3 {
            scope.spawn(move || guest(vm, source, seed, 400));
        }
        for cut in [true, false] {
            let (near, far) = meeting.pair();
            let wire = far.as_fd().try_clone_to_owned().unwrap();
            // Both are there before the channel for requests is.
            let (_silent, mut noisy) = (meeting.stranger(), meeting.stranger());
            noisy.write_all(&[22, 3, 1, 0, 200, 1, 0, 0]).unwrap();
            let recovering = paused.is_some();
            let outcome = thread::scope(|inner| {
                let sending = inner.spawn(move || {
                    let handle = Handle::new();
                    handle.control.set_max_bandwidth(std::num::NonZeroU64::new(4 << 20));
                    let role = PostcopySource::new(source, near, &handle);
                    let role = role.preempt(Box::new(|| meeting.connect()));
                    if recovering { role.recover() } else { role.run() }
                });
                if cut {
                    inner.spawn(move || {
                        if vm.runs() {
                            thread::sleep(Duration::from_millis(200));
                            rustix::net::shutdown(wire, rustix::net::Shutdown::Both).unwrap();
                        }
                    });
                }
                let open = meeting.doorkeeper();
                let outcome = match paused.take() {
                    None => LiveDestination::new(vm, far, &Handle::new()).options(options()).preempt(open).run(),
                    Some(paused) => {
                        let handle = Handle::new();
                        let outcome = limosa_migrate::live::PostcopyPaused::recover(paused, far, Some(open), &handle);
                        // The guest ran here all the while, also for a handle that is new.
                        assert!(handle.progress.read().phase >= Phase::PostcopyActive);
                        assert!(handle.progress.read().total_pages > 0);
                        outcome
                    }
                };
                assert_eq!(sending.join().unwrap().is_err(), cut);
                outcome
            });
            match outcome {
                IncomingOutcome::PostcopyPaused(broken) if cut => paused = Some(broken),
                outcome => {
                    vm.give_up();
                    return finished(outcome);
                }
            }
        }
        unreachable!()
    });
    let postcopy = stats.postcopy.unwrap();
    assert!(postcopy.requests > 0 && postcopy.recoveries == 1);
    assert_all(vm, source);
}

#[test]
fn huge_pages_come_whole_private_ones_and_shared_ones() {
    const HUGE: u64 = 2 << 20;
    let _pages = HugePages::reserve(2 * 4 * HUGE).unwrap();
    let sizes = BTreeMap::from([("block0".to_owned(), HUGE)]);
    for huge in [BlockOptions::anonymous("block0", 4 * HUGE), BlockOptions::memfd("block0", 4 * HUGE)] {
        let source = source(4 * 512);
        let vm = Vm::of(vec![huge.huge_pages(HUGE), BlockOptions::anonymous("block1", 16 * 4096)]);
        let (near, far) = pair();
        let stats = thread::scope(|scope| {
            let sending = scope.spawn(|| run_source(&source, near, &sizes));
            let (vm, source) = (&vm, &source);
            scope.spawn(move || guest(vm, source, 5, 100));
            let outcome = LiveDestination::new(vm, far, &Handle::new()).options(options()).run();
            vm.give_up();
            sending.join().unwrap().unwrap();
            finished(outcome)
        });
        assert_eq!(stats.postcopy.unwrap().normal_pages, 4 * 512 + 16);
        assert_all(&vm, &source);
    }
}

#[test]
fn host_pages_that_differ_are_refused_before_the_vm_is_given_away() {
    let source = source(512);
    let vm = destination(512);
    let (near, far) = pair();
    thread::scope(|scope| {
        let sizes = BTreeMap::from([("block0".to_owned(), 2 << 20)]);
        let source = &source;
        let sending = scope.spawn(move || run_source(source, near, &sizes));
        let outcome = LiveDestination::new(&vm, far, &Handle::new()).options(options()).run();
        assert!(matches!(outcome, IncomingOutcome::Failed(MigrateError::Layout(_))), "{outcome:?}");
        assert!(sending.join().unwrap().is_err());
    });
    assert_eq!(vm.started(), 0);
}

#[test]
fn sections_of_stock_qemu_go_to_the_vmm_as_a_whole() {
    let source = Memory::new(&[64], |_, page| page % 2 == 0);
    let vm = Vm::new(&[("block0", 64)]);
    let (near, far) = pair();
    thread::scope(|scope| {
        let sending = scope.spawn(|| run_source(&source, near, &BTreeMap::new()));
        finished(LiveDestination::new(&vm, far, &Handle::new()).options(options()).run());
        sending.join().unwrap().unwrap();
    });
    let (sections, _) = model::device_tail();
    assert_eq!(*vm.loaded.lock().unwrap(), [("package".to_owned(), 0, sections)]);
    assert_all(&vm, &source);
}

#[test]
fn a_vm_that_cannot_load_its_devices_never_runs_and_the_source_is_reported() {
    let source = Memory::new(&[64], |_, _| true);
    let vm = Vm { refuses: Some("timer"), ..Vm::new(&[("block0", 64)]) };
    let (near, far) = pair();
    thread::scope(|scope| {
        let sending = scope.spawn(|| run_source(&source, near, &BTreeMap::new()));
        let outcome = LiveDestination::new(&vm, far, &Handle::new()).options(options()).run();
        let IncomingOutcome::Failed(error) = outcome else { panic!("{outcome:?}") };
        assert!(error.in_one_line().contains("device timer does not take it"), "{error}");
        assert!(sending.join().unwrap().is_err());
    });
    assert_eq!(vm.started(), 0);
}

/// The stream of a source that continues as a test likes, up to the first page: of block `ram`, 64 pages, which
/// discards these.
fn opening(discards: std::ops::Range<u64>) -> (Vec<u8>, RecordEncoder) {
    let blocks = [RamBlock::new("ram", 64 * 4096)];
    let mut out = Vec::new();
    Configuration::new("demo").encode(&mut out).unwrap();
    Command::OpenReturnPath.encode(&mut out).unwrap();
    Command::PostcopyAdvise(Some(PageSizes { summary: 4096, target: 4096 })).encode(&mut out).unwrap();
    ram::encode_ram_layout(2, &blocks, &mut out).unwrap();
    ram::encode_eos(2, &mut out);
    let ranges = std::iter::once(discards.start * 4096..discards.end * 4096).collect();
    Command::RamDiscard { block: "ram".into(), ranges }.encode(&mut out).unwrap();
    let mut devices = DeviceSections::new();
    devices.push("timer", 0, 1, b"tick").unwrap();
    postcopy::encode_packaged(&postcopy::postcopy_package(devices.bytes(), Some(3)).unwrap(), &mut out).unwrap();
    section::encode_part(2, &mut out);
    (out, RecordEncoder::new(&blocks).unwrap())
}

fn append(records: &mut RecordEncoder, page: u64, fill: u8, out: &mut Vec<u8>) {
    let kind = if fill == 0 { RecordKind::Zero } else { RecordKind::Page };
    records.append(kind, 0, page * 4096, out).unwrap();
    out.resize(out.len() + if fill == 0 { 0 } else { PAGE_LEN }, fill);
}

fn end(out: &mut Vec<u8>) {
    ram::encode_eos(2, out);
    section::encode_end(2, out);
    ram::encode_eos(2, out);
    section::encode_eof(out);
}

#[test]
fn a_page_that_comes_again_leaves_what_the_guest_has_written() {
    let vm = Vm::new(&[("ram", 64)]);
    let (near, far) = pair();
    let (mut first, mut records) = opening(0..64);
    append(&mut records, 3, 1, &mut first);
    let mut again = Vec::new();
    append(&mut records, 3, 2, &mut again);
    append(&mut records, 3, 0, &mut again);
    append(&mut records, 4, 4, &mut again);
    end(&mut again);
    let stats = thread::scope(|scope| {
        let (vm, near) = (&vm, &near);
        scope.spawn(move || {
            near.write_all(&first).unwrap();
            assert!(vm.runs());
            assert_eq!(vm.fill_of(0, 3), 1);
            vm.memory.block(0).unwrap().write(3 * 4096, &[9; PAGE_LEN]).unwrap();
            near.write_all(&again).unwrap();
        });
        let outcome = LiveDestination::new(vm, far, &Handle::new()).options(options()).run();
        vm.give_up();
        finished(outcome)
    });
    let postcopy = stats.postcopy.unwrap();
    assert_eq!((postcopy.normal_pages, postcopy.zero_pages, postcopy.repeated_pages), (2, 0, 2));
    assert_eq!([2, 3, 4, 5].map(|page| vm.fill_of(0, page)), [0, 9, 4, 0]);
}

#[test]
fn a_page_that_another_mapping_has_touched_is_not_taken_for_one_that_has_come() {
    let vm = Vm::of(vec![BlockOptions::memfd("ram", 64 * 4096)]);
    let file = vm.memory.block(0).unwrap().file().unwrap().0.try_clone_to_owned().unwrap();
    let back_end = BlockOptions::file("ram", 64 * 4096, file, 0).map().unwrap();
    let (near, far) = pair();
    let (first, mut records) = opening(0..64);
    let mut pages = Vec::new();
    append(&mut records, 4, 4, &mut pages);
    append(&mut records, 5, 5, &mut pages);
    end(&mut pages);
    let outcome = thread::scope(|scope| {
        let (vm, near, back_end) = (&vm, &near, &back_end);
        scope.spawn(move || {
            near.write_all(&first).unwrap();
            assert!(vm.runs());
            let mut bytes = [1; PAGE_LEN];
            back_end.read(5 * 4096, &mut bytes).unwrap();
            assert_eq!(bytes, [0; PAGE_LEN], "it does not wait");
            near.write_all(&pages).unwrap();
        });
        let outcome = LiveDestination::new(vm, far, &Handle::new()).options(options()).run();
        vm.give_up();
        outcome
    });
    let IncomingOutcome::PostcopyPaused(paused) = outcome else { panic!("{outcome:?}") };
    assert!(
        paused.why().in_one_line().contains("page 5 of RAM block ram is present but was never received"),
        "{paused:?}"
    );
    assert_eq!((paused.missing_pages(), vm.fill_of(0, 4)), (63, 4));
    paused.discard();
}

#[test]
fn pages_that_were_allocated_and_never_touched_are_waited_for_too() {
    use rustix::fs::{FallocateFlags, fallocate};
    let vm = Vm::of(vec![BlockOptions::memfd("ram", 64 * 4096)]);
    let (file, offset) = vm.memory.block(0).unwrap().file().unwrap();
    fallocate(file, FallocateFlags::KEEP_SIZE, offset, 64 * 4096).unwrap();
    let (near, far) = pair();
    // Of the others the source has said nothing.
    let (first, mut records) = opening(0..1);
    let mut pages = Vec::new();
    append(&mut records, 5, 5, &mut pages);
    end(&mut pages);
    let stats = thread::scope(|scope| {
        let (vm, near) = (&vm, &near);
        scope.spawn(move || {
            near.write_all(&first).unwrap();
            assert!(vm.runs());
            let reading = scope.spawn(move || vm.fill_of(0, 5));
            near.set_timeouts(Some(Duration::from_secs(20)), None).unwrap();
            // What says PONG and what asks for the page: 12 bytes at least.
            near.read_exact(&mut [0; 8 + 12]).unwrap();
            near.write_all(&pages).unwrap();
            assert_eq!(reading.join().unwrap(), 5);
        });
        let outcome = LiveDestination::new(vm, far, &Handle::new()).options(options()).run();
        vm.give_up();
        finished(outcome)
    });
    assert_eq!(stats.postcopy.unwrap().normal_pages, 1);
    assert_eq!([0, 5, 6].map(|page| vm.fill_of(0, page)), [0, 5, 0]);
}

#[test]
fn a_vm_whose_memory_others_map_is_refused_as_soon_as_postcopy_is_announced() {
    let source = source(64);
    let vm = Vm { users: Writers::VCPUS | Writers::VHOST, ..destination(64) };
    let (near, far) = pair();
    thread::scope(|scope| {
        let source = &source;
        let sending = scope.spawn(move || run_source(source, near, &BTreeMap::new()));
        let outcome = LiveDestination::new(&vm, far, &Handle::new()).options(options()).run();
        let IncomingOutcome::Failed(error) = outcome else { panic!("{outcome:?}") };
        assert!(error.in_one_line().contains("vhost back ends map its memory"), "{error}");
        assert!(sending.join().unwrap().is_err());
    });
    assert_eq!((vm.started(), vm.loaded.lock().unwrap().len()), (0, 0));
    // Precopy has nothing to do with it.
    let (near, far) = pair();
    thread::scope(|scope| {
        let source = &source;
        let sending = scope.spawn(move || {
            let handle = Handle::new();
            PrecopySource::new(source, near, &handle).run()
        });
        finished_precopy(&LiveDestination::new(&vm, far, &Handle::new()).options(options()).run());
        sending.join().unwrap().unwrap();
    });
    assert_all(&vm, &source);
}

fn finished_precopy(outcome: &IncomingOutcome<'_, Vm>) {
    assert!(matches!(outcome, IncomingOutcome::Running(_)), "{outcome:?}");
}

#[test]
fn a_vmm_that_panics_leaves_no_thread_waiting() {
    let vm = Vm { refuses: Some("timer"), panics: true, ..Vm::new(&[("ram", 64)]) };
    let (near, far) = pair();
    let (first, _) = opening(0..64);
    let panicked = thread::scope(|scope| {
        let vm = &vm;
        let receiving = scope.spawn(move || {
            let options = LiveDestinationOptions { answer_timeout: None, ..options() };
            drop(LiveDestination::new(vm, far, &Handle::new()).options(options).run());
        });
        near.write_all(&first).unwrap();
        // The source is told that it is over, and is not told that the VM runs.
        assert!(matches!(near.read(&mut [0; 64]), Ok(0) | Err(_)));
        receiving.join().is_err()
    });
    assert_eq!((panicked, vm.started()), (true, 0));
}

/// Cuts a postcopy again and again, at random points. How often it was recovered, and whether the VM ran at all.
fn cut_at_random(seed: u64, preempt: bool) -> Option<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let source = &source(600);
    let vm = &Vm { looks_at: vec![300, 500], ..destination(600) };
    let mut recoveries = 0;
    let ran = thread::scope(|scope| {
        for guests in 0..2 {
            scope.spawn(move || guest(vm, source, seed + guests, 300));
        }
        let mut paused = None;
        loop {
            // About 1.7 MB go over it.
            let limit = if recoveries > 6 { u64::MAX } else { next(&mut state) % 1_900_000 };
            let (near, far, relay) = Relay::new();
            let (near_preempt, far_preempt, relay_preempt) = Relay::new();
            let outcome = thread::scope(|inner| {
                let relays = [&relay, &relay_preempt];
                inner.spawn(move || {
                    relays[0].run(limit);
                    relays[1].cut();
                });
                inner.spawn(move || {
                    relays[1].run(limit / 3);
                    if preempt && limit != u64::MAX {
                        relays[0].cut();
                    }
                });
                let recovering = paused.is_some();
                let sending = inner.spawn(move || {
                    let handle = Handle::new();
                    let source = PostcopySource::new(source, near, &handle);
                    let source = if preempt { source.preempt(Box::new(move || Ok(near_preempt))) } else { source };
                    if recovering { source.recover() } else { source.run() }
                });
                let open = preempt.then(|| here(far_preempt));
                let outcome = match paused.take() {
                    None => {
                        let role = LiveDestination::new(vm, far, &Handle::new()).options(options());
                        match open {
                            Some(open) => role.preempt(open).run(),
                            None => role.run(),
                        }
                    }
                    Some(paused) => limosa_migrate::live::PostcopyPaused::recover(paused, far, open, &Handle::new()),
                };
                relay_preempt.cut();
                let _ = sending.join().unwrap();
                relay.cut();
                outcome
            });
            match outcome {
                IncomingOutcome::Running(_) => return true,
                IncomingOutcome::PostcopyPaused(broken) => paused = Some(broken),
                IncomingOutcome::Failed(_) => {
                    vm.give_up();
                    return false;
                }
                IncomingOutcome::Undecided(arrived) => panic!("{arrived:?}"),
            }
            recoveries += 1;
        }
    });
    assert_eq!(vm.started(), u32::from(ran));
    if ran {
        assert_all(vm, source);
    }
    ran.then_some(recoveries)
}

#[test]
fn a_connection_that_is_cut_anywhere_is_recovered_and_nothing_is_lost() {
    let mut recoveries = 0;
    for seed in 1..160 {
        recoveries += cut_at_random(seed, false).unwrap_or(0);
    }
    assert!(recoveries > 20, "{recoveries}");
}

#[test]
fn two_channels_that_are_cut_anywhere_are_recovered_and_nothing_is_lost() {
    let mut recoveries = 0;
    for seed in 300..460 {
        recoveries += cut_at_random(seed, true).unwrap_or(0);
    }
    assert!(recoveries > 20, "{recoveries}");
}
