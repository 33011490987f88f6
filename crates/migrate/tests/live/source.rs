//! The source of a VM that runs: the VM's memory at the stop arrives, and at any time at most one side runs it.

use std::num::NonZeroU64;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::model::live::{Arrived, At, Destination, Does, TestVm};
use crate::model::pair;
use limosa_memory::dirty::{DirtyLogs, LogError, Writers};
use limosa_migrate::control::Stop;
use limosa_migrate::live::{RecordWriteMode, TimeoutStrategy, ZeroCheck};
use limosa_migrate::stats::{RoundKind, RoundReport};
use limosa_migrate::{Handle, LiveOutcome, LiveSource, LiveVm as _, MigrateError, MigrationParams};
use limosa_page::ZeroMethod;

fn params() -> MigrationParams {
    MigrationParams::default().answer_timeout(Duration::from_secs(20))
}

/// Everything about one attempt that differs from test to test.
struct Attempt {
    params: MigrationParams,
    fresh: bool,
    trouble: Option<(At, Does)>,
    /// The destination's memory before.
    dirt: u8,
    handle: Handle,
    /// Bytes that the destination reads and says before it closes the channel.
    reads: usize,
    says: usize,
}

impl Default for Attempt {
    fn default() -> Self {
        Self {
            params: params(),
            fresh: false,
            trouble: None,
            dirt: 0xdd,
            handle: Handle::new(),
            reads: usize::MAX,
            says: usize::MAX,
        }
    }
}

impl Attempt {
    fn run<'v>(&self, vm: &'v TestVm) -> (LiveOutcome<'v, TestVm>, Arrived) {
        let (logs, _) = vm.logs();
        self.run_with(vm, logs)
    }

    fn run_with<'v>(&self, vm: &'v TestVm, logs: DirtyLogs) -> (LiveOutcome<'v, TestVm>, Arrived) {
        let (near, far) = pair();
        thread::scope(|scope| {
            let mut destination = Destination::new(far, self.trouble);
            (destination.dirt, destination.reads) = (self.dirt, self.reads);
            destination.says.set(self.says);
            let destination = scope.spawn(move || destination.run());
            let source =
                LiveSource::new(vm, logs, near, &self.handle).options(self.params).destination_zeroed(self.fresh);
            let outcome = source.run();
            (outcome, destination.join().unwrap())
        })
    }
}

/// At most one side runs the VM, and the side that runs it has all of it.
fn obeys_the_law(vm: &TestVm, outcome: &LiveOutcome<'_, TestVm>, arrived: &Arrived) {
    match outcome {
        LiveOutcome::Completed(_) => assert!(!vm.runs() && arrived.runs, "{outcome:?}"),
        LiveOutcome::Resumed { .. } => assert!(vm.runs() && !arrived.runs, "{outcome:?}"),
        LiveOutcome::ResumeFailed { .. } => assert!(!vm.runs() && !arrived.runs, "{outcome:?}"),
        LiveOutcome::PostcopyPaused(_) => panic!("{outcome:?}"),
        LiveOutcome::Undecided(_) => assert!(!vm.runs() && arrived.ready, "{outcome:?}"),
    }
    if arrived.ready {
        // Nothing writes a VM that has been stopped, or has been given away: the memory is still that of the moment.
        let same = (0..vm.memory.blocks().len()).all(|block| vm.contents(block) == arrived.memory[block]);
        assert!(same || vm.runs());
        assert_eq!(arrived.devices.len(), 2);
    }
    assert_eq!(vm.throttled.load(Ordering::SeqCst), 0);
}

#[test]
fn a_vm_that_writes_all_the_time_arrives_as_it_was_when_it_stopped() {
    for seed in 1..6 {
        let vm = TestVm::new(&[700, 300, 20]);
        vm.fill(0, |page| page % 3 == 0);
        vm.fill(2, |_| true);
        let (logs, marker) = vm.logs();
        let attempt =
            Attempt { fresh: seed % 2 == 0, dirt: if seed % 2 == 0 { 0 } else { 0xdd }, ..Attempt::default() };
        let (outcome, arrived) = thread::scope(|scope| {
            vm.write_on(scope, marker.clone(), seed, Duration::from_micros(30));
            vm.write_on(scope, marker, seed << 32, Duration::ZERO);
            let ended = attempt.run_with(&vm, logs);
            vm.over.store(true, Ordering::Relaxed);
            ended
        });
        obeys_the_law(&vm, &outcome, &arrived);
        let LiveOutcome::Completed(stats) = outcome else { panic!("{outcome:?}") };
        assert_eq!(stats.sum(|round| round.normal), arrived.normal);
        assert_eq!(stats.sum(|round| round.zero), arrived.zero);
        assert_eq!(arrived.described, 2);
        assert!(stats.rounds.len() >= 2 && stats.rounds.last().unwrap().kind == RoundKind::Last);
        assert!(stats.sum(|round| round.bytes) < stats.main.bytes_out);
        assert!(serde_json::to_value(&stats).unwrap()["rounds"][0]["expected_downtime"].is_number());
    }
}

#[test]
fn zero_pages_are_left_out_only_of_fresh_ram_and_only_in_the_first_round() {
    // 64 pages of RAM: 10 have contents and 5 are populated zeros; 8 of firmware, none populated.
    for (fresh, dirt) in [(true, 0), (false, 0xdd)] {
        let vm = TestVm::new(&[64, 8]);
        vm.fill(0, |page| page < 10);
        vm.memory.block(0).unwrap().fill_zero(20 * 4096, 5 * 4096).unwrap();
        let attempt = Attempt { fresh, dirt, ..Attempt::default() };
        let (outcome, mut arrived) = attempt.run(&vm);
        if fresh {
            // Firmware is not fresh, although the destination says so: it was sent.
            assert_eq!(arrived.memory[1], vec![0; 8 * 4096]);
        }
        obeys_the_law(&vm, &outcome, &arrived);
        let LiveOutcome::Completed(stats) = outcome else { panic!("{outcome:?}") };
        let bulk = &stats.rounds[0];
        assert_eq!((bulk.normal, bulk.holes), (10, 49 + 8));
        assert_eq!((bulk.zero, bulk.left_out), if fresh { (8, 54) } else { (62, 0) });
        arrived.memory.clear();
    }
}

#[test]
fn memory_goes_out_in_whole_batches_with_and_without_a_limit() {
    let vm = TestVm::new(&[2048]);
    vm.fill(0, |_| true);
    let calls = |put, max_bandwidth| {
        let attempt = Attempt { params: params().record_write(put).max_bandwidth(max_bandwidth), ..Attempt::default() };
        let (outcome, arrived) = attempt.run(&vm);
        obeys_the_law(&vm, &outcome, &arrived);
        let LiveOutcome::Completed(stats) = outcome else { panic!("{outcome:?}") };
        vm.resume().unwrap();
        stats.main.calls_out
    };
    // 512 pages a batch: one call, or 129 buffers of 16 KiB.
    let free = calls(RecordWriteMode::Vectored, None);
    assert_eq!(calls(RecordWriteMode::Vectored, NonZeroU64::new(40 << 20)), free);
    assert_eq!(calls(RecordWriteMode::Buffered, None) - free, 4 * 128);
    assert_eq!(calls(RecordWriteMode::Buffered, NonZeroU64::new(40 << 20)) - free, 4 * 128);
}

#[test]
fn zero_pages_do_not_make_batches_smaller() {
    let calls = |zero: fn(u64) -> bool| {
        let vm = TestVm::new(&[4096, 100]);
        for (number, block) in vm.memory.blocks().iter().enumerate() {
            vm.fill(number, |_| true);
            let zeros = block.pages().iter().filter(|page| zero(page.0));
            zeros.for_each(|page| block.write(page.offset(), &[0; 4096]).unwrap());
        }
        let (outcome, arrived) = Attempt { params: params(), ..Attempt::default() }.run(&vm);
        obeys_the_law(&vm, &outcome, &arrived);
        let LiveOutcome::Completed(stats) = outcome else { panic!("{outcome:?}") };
        stats.main.calls_out
    };
    // 8 batches of 512 pages, or 5 of 496, and one of the other block.
    assert_eq!(calls(|_| false) - calls(|page| page % 2 == 1), 8 - 5);
    // Headers alone: 4,096 of them are enough for a call.
    assert_eq!(calls(|_| false) - calls(|_| true), 8 - 1);
}

#[test]
fn a_page_that_becomes_zero_after_it_was_sent_is_sent_as_zero() {
    let vm = TestVm::new(&[32]);
    vm.fill(0, |_| true);
    let (logs, marker) = vm.logs();
    let attempt = Attempt { fresh: true, dirt: 0, ..Attempt::default() };
    let (near, far) = pair();
    let (outcome, arrived) = thread::scope(|scope| {
        let destination = scope.spawn(|| Destination::new(far, None).run());
        let source = LiveSource::new(&vm, logs, near, &attempt.handle).options(attempt.params).destination_zeroed(true);
        // Behind the first round, whose dirty pages were fetched already: seen by the last one.
        let wrote = Mutex::new(false);
        let outcome = source
            .on_round(|round| {
                if !std::mem::replace(&mut wrote.lock().unwrap(), true) {
                    assert_eq!((round.kind, round.normal), (RoundKind::Bulk, 32));
                    assert!(vm.write(&marker, 0, 7, 0));
                }
            })
            .run();
        // `wrote` is borrowed by the source.
        (matches!(outcome, LiveOutcome::Completed(_)), destination.join().unwrap())
    });
    assert!(outcome);
    assert_eq!(arrived.zero, 1);
    assert_eq!(arrived.memory[0], vm.contents(0));
}

#[test]
fn pages_are_looked_at_when_it_was_said() {
    for (zero_check, normal) in [(ZeroCheck::Always, 4), (ZeroCheck::Bulk, 4), (ZeroCheck::Off, 8)] {
        let vm = TestVm::new(&[16]);
        vm.fill(0, |page| page < 4);
        vm.memory.block(0).unwrap().fill_zero(4 * 4096, 4 * 4096).unwrap();
        let attempt = Attempt { params: params().zero_check(zero_check), ..Attempt::default() };
        let (outcome, arrived) = attempt.run(&vm);
        obeys_the_law(&vm, &outcome, &arrived);
        assert_eq!((arrived.normal, arrived.zero), (normal, 16 - normal), "{zero_check:?}: holes are zero in any case");
    }
}

#[test]
fn whatever_pages_are_looked_at_with_the_same_ones_are_zero() {
    for zero_method in ZeroMethod::ALL {
        let vm = TestVm::new(&[300]);
        vm.fill(0, |page| page % 3 == 0);
        vm.memory.block(0).unwrap().fill_zero(0, 100 * 4096).unwrap();
        let attempt = Attempt { params: params().zero_method(zero_method), ..Attempt::default() };
        let (outcome, arrived) = attempt.run(&vm);
        obeys_the_law(&vm, &outcome, &arrived);
        assert_eq!((arrived.normal, arrived.zero), (66, 234), "{zero_method}");
    }
}

#[test]
fn trouble_at_any_step_leaves_the_vm_where_the_law_says() {
    let ats = [At::Greeting, At::Layout, At::Pages(0), At::Pages(100), At::End, At::Devices, At::Go];
    let does = [Does::Close, Does::Shut(1), Does::Shut(0), Does::Lie, Does::Garbage, Does::Silence, Does::Deaf];
    thread::scope(|scope| {
        for at in ats {
            scope.spawn(move || {
                for does in does {
                    let vm = TestVm::new(&[400]);
                    vm.fill(0, |page| page % 4 != 1);
                    let answer_timeout = Duration::from_secs(2);
                    let params = params().answer_timeout(answer_timeout);
                    let attempt = Attempt { params, trouble: Some((at, does)), ..Attempt::default() };
                    let (outcome, arrived) = attempt.run(&vm);
                    obeys_the_law(&vm, &outcome, &arrived);
                    match (at, does) {
                        // Said behind the end, it is the last word.
                        (At::Go, Does::Shut(0) | Does::Lie) => {
                            assert!(matches!(outcome, LiveOutcome::Completed(_)), "{at:?} {does:?} {outcome:?}");
                        }
                        (At::Go, _) => {
                            let LiveOutcome::Undecided(undecided) = outcome else { panic!("{does:?} {outcome:?}") };
                            if does == Does::Shut(1) {
                                assert!(matches!(undecided.why(), MigrateError::Refused { status: 1 }));
                            }
                            assert!(!vm.runs() && vm.resumes.load(Ordering::SeqCst) == 0);
                            undecided.resume().unwrap();
                            assert!(vm.runs());
                        }
                        _ => {
                            let LiveOutcome::Resumed { logs, .. } = outcome else {
                                panic!("{at:?} {does:?} {outcome:?}")
                            };
                            // And the next attempt gets there, with the same logs.
                            let again = Attempt::default();
                            let (outcome, arrived) = again.run_with(&vm, logs.unwrap());
                            obeys_the_law(&vm, &outcome, &arrived);
                            assert!(matches!(outcome, LiveOutcome::Completed(_)), "{at:?} {does:?} {outcome:?}");
                        }
                    }
                }
            });
        }
    });
}

#[test]
fn a_vmm_that_fails_keeps_its_vm() {
    for fail in ["pause", "devices"] {
        let vm = TestVm { fail: Some(fail), ..TestVm::new(&[40]) };
        let attempt = Attempt::default();
        let (outcome, arrived) = attempt.run(&vm);
        obeys_the_law(&vm, &outcome, &arrived);
        assert!(matches!(outcome, LiveOutcome::Resumed { error: MigrateError::Vm { .. }, .. }), "{outcome:?}");
    }
    let vm = TestVm { fail: Some("resume"), ..TestVm::new(&[40]) };
    let attempt = Attempt { trouble: Some((At::Devices, Does::Close)), ..Attempt::default() };
    let (outcome, arrived) = attempt.run(&vm);
    obeys_the_law(&vm, &outcome, &arrived);
    assert!(matches!(outcome, LiveOutcome::ResumeFailed { .. }), "{outcome:?}");
}

#[test]
fn a_vm_that_writes_too_fast_is_given_up_slowed_down_or_stopped_as_was_said() {
    let fast = params().downtime_limit(Duration::ZERO).stalled_rounds(Some(5));
    for (timeout_strategy, auto_converge) in
        [(TimeoutStrategy::Cancel, false), (TimeoutStrategy::Cancel, true), (TimeoutStrategy::Pause, false)]
    {
        let vm = TestVm::new(&[600]);
        vm.fill(0, |_| true);
        let (logs, _) = vm.restless_logs(600);
        let params = fast.timeout_strategy(timeout_strategy).auto_converge(auto_converge);
        let (outcome, arrived) = Attempt { params, ..Attempt::default() }.run_with(&vm, logs);
        obeys_the_law(&vm, &outcome, &arrived);
        let stats = match outcome {
            LiveOutcome::Completed(stats) if timeout_strategy == TimeoutStrategy::Pause => stats,
            LiveOutcome::Resumed { error: MigrateError::NoConvergence(_), stats, .. } => stats,
            other => panic!("{other:?}"),
        };
        let throttles: Vec<_> = stats.rounds.iter().map(|round| round.throttle).collect();
        let expected = if auto_converge { [0, 0, 20, 20, 30, 30] } else { [0; 6] };
        assert_eq!(throttles[..6], expected);
    }
}

#[test]
fn a_vm_with_a_writer_that_no_log_sees_is_refused_before_anything_is_sent() {
    let vm = TestVm::new(&[8]);
    let logs = DirtyLogs::new(Writers::NONE, Vec::new()).unwrap();
    let (outcome, arrived) = Attempt::default().run_with(&vm, logs);
    obeys_the_law(&vm, &outcome, &arrived);
    let LiveOutcome::Resumed { error: MigrateError::DirtyLog(LogError::Uncovered(writers)), stats, .. } = outcome
    else {
        panic!("{outcome:?}")
    };
    assert_eq!((writers, stats.main.bytes_out), (Writers::VCPUS, 0));
    assert_eq!(vm.pauses.load(Ordering::SeqCst), 0);
}

#[test]
fn a_vm_that_must_stay_stays() {
    for late in [false, true] {
        let vm = TestVm::new(&[3000]);
        vm.fill(0, |_| true);
        let (logs, _) = vm.logs();
        let attempt = Attempt::default();
        let (near, far) = pair();
        thread::scope(|scope| {
            let destination = scope.spawn(|| Destination::new(far, None).run());
            let source = LiveSource::new(&vm, logs, near, &attempt.handle).options(attempt.params);
            let control = attempt.handle.control.clone();
            let stop = move |round: &RoundReport| {
                if late == (round.kind == RoundKind::Last) {
                    control.stop(Stop::Cancel);
                }
            };
            let outcome = source.on_round(stop).run();
            let cancelled = matches!(outcome, LiveOutcome::Resumed { error: MigrateError::Cancelled, .. });
            assert!(cancelled, "{outcome:?}");
            let arrived = destination.join().unwrap();
            obeys_the_law(&vm, &outcome, &arrived);
        });
    }
}

#[test]
fn a_channel_that_breaks_at_any_byte_leaves_the_vm_on_one_side() {
    let vm = || {
        let vm = TestVm::new(&[12, 3]);
        vm.fill(0, |page| page % 3 != 1);
        vm
    };
    let whole = vm();
    let (outcome, _) = Attempt::default().run(&whole);
    let LiveOutcome::Completed(stats) = outcome else { panic!("{outcome:?}") };
    let (length, answers) = (stats.main.bytes_out, stats.main.bytes_in);
    let (length, answers) = (usize::try_from(length).unwrap(), usize::try_from(answers).unwrap());
    // Every byte of the beginning, of the end and of the way back; of the pages, each at another place.
    let cuts = (0..700).chain((700..length - 1500).step_by(331)).chain(length - 1500..=length);
    let cuts = cuts.map(|reads| (reads, usize::MAX)).chain((0..=answers).map(|says| (usize::MAX, says)));
    let (mut resumed, mut undecided, mut completed) = (0, 0, 0);
    for (reads, says) in cuts {
        let vm = vm();
        let params = params().answer_timeout(Duration::from_secs(10));
        let (outcome, arrived) = Attempt { reads, says, params, ..Attempt::default() }.run(&vm);
        obeys_the_law(&vm, &outcome, &arrived);
        match outcome {
            LiveOutcome::Completed(_) => completed += 1,
            LiveOutcome::Undecided(_) => {
                // The go was in the kernel's hands, and there is one complete copy here, wherever the other one is.
                undecided += 1;
                assert!(arrived.ready);
            }
            _ => {
                resumed += 1;
                // A source that lets the VM go on has not given the go.
                assert!(!arrived.runs, "{reads} {says}");
            }
        }
    }
    assert_eq!(completed, 2, "the ones that were not cut");
    // The go, the end and the description of what was read; the last word of what was said.
    assert!(undecided > 100 && resumed > 1500, "{undecided} {resumed}");
}

#[test]
fn a_destination_that_stops_reading_in_the_middle_of_the_hand_over_has_been_given_the_vm() {
    // A description that no socket buffer holds: the kernel takes the go and the end, and not all of what is behind.
    let vm = TestVm { devices: 15_000, ..TestVm::new(&[4]) };
    let params = params().answer_timeout(Duration::from_millis(1500));
    let attempt = Attempt { params, trouble: Some((At::Gone, Does::Deaf)), ..Attempt::default() };
    let (outcome, arrived) = attempt.run(&vm);
    assert!(arrived.ready && !vm.runs());
    let LiveOutcome::Undecided(undecided) = outcome else { panic!("{outcome:?}") };
    assert!(matches!(undecided.why(), MigrateError::Channel(error) if error.is_timeout()), "{undecided:?}");
    undecided.resume().unwrap();
    assert!(vm.runs());
}

#[test]
fn a_limit_that_is_changed_while_the_vm_moves_decides() {
    // Far more than a tenth of a second's worth, which may go at once where nothing went for that long, as on a busy
    // machine.
    let vm = TestVm::new(&[4000]);
    vm.fill(0, |_| true);
    let (logs, _) = vm.restless_logs(100);
    let attempt = Attempt::default();
    attempt.handle.control.set_downtime_limit(Duration::ZERO);
    let (near, far) = pair();
    let rounds = thread::scope(|scope| {
        let destination = scope.spawn(|| Destination::new(far, None).run());
        let params = params().max_bandwidth(NonZeroU64::new(20 << 20));
        let source = LiveSource::new(&vm, logs, near, &attempt.handle).options(params);
        let change = |round: &RoundReport| {
            // What came through is what is reckoned with, not what the socket's buffer took at a time.
            assert!(round.bandwidth.unwrap() < 40 << 20, "{round:?}");
            if round.number == 3 {
                attempt.handle.control.set_max_bandwidth(None);
                attempt.handle.control.set_downtime_limit(Duration::from_secs(60));
            }
        };
        let outcome = source.on_round(change).run();
        let LiveOutcome::Completed(stats) = outcome else { panic!("{outcome:?}") };
        destination.join().unwrap();
        stats.rounds
    });
    let kinds: Vec<_> = rounds.iter().map(|round| round.kind).collect();
    let dirty = RoundKind::Dirty;
    // The limit counts from the end of the next round on.
    assert_eq!(kinds, [RoundKind::Bulk, dirty, dirty, dirty, dirty, RoundKind::Last]);
}
