//! Live migrations that go on in postcopy: what has been sent and what has not adds up, wherever it breaks off.

use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::model::live::{TestVm, random};
use crate::model::live_postcopy::{Cut, Landed, receive, receive_urgent};
use crate::model::pair;
use limosa_memory::BlockOptions;
use limosa_migrate::live::{PostcopyMode, TimeoutStrategy};
use limosa_migrate::stats::RoundReport;
use limosa_migrate::{Handle, LiveOutcome, LiveSource, MigrateError, MigrationParams};

/// When the switch comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    AtOnce,
    /// In the middle of the first round.
    Bulk,
    /// After this number of rounds.
    Rounds(u32),
    /// When precopy is given up.
    GivenUp,
}

#[derive(Debug)]
struct Case {
    seed: u64,
    when: When,
    fresh: bool,
    preempt: bool,
    cut: Option<Cut>,
}

fn assert_same(vm: &TestVm, landed: &Landed, case: &Case) {
    assert_eq!(landed.wrong, Vec::<String>::new(), "{case:?}");
    assert_eq!((landed.unanswered(), landed.devices), (0, 2), "{case:?}");
    for (block, there) in landed.memory.iter().enumerate() {
        let here = vm.contents(block);
        let differs = here.chunks(4096).zip(there.chunks(4096)).position(|(here, there)| here != there);
        assert_eq!(differs, None, "page of block {block}, {case:?}");
    }
}

fn run(case: &Case) {
    let vm = TestVm::of(vec![
        BlockOptions::memfd("ram", (900 + case.seed % 300) * 4096),
        BlockOptions::anonymous("rom", 70 * 4096).role(limosa_memory::BlockRole::Rom),
    ]);
    vm.fill(0, |page| random(page ^ case.seed).is_multiple_of(3));
    vm.fill(1, |page| page % 2 == 0);
    let (logs, marker) = vm.restless_logs(3);
    let ((near, far), (near_urgent, far_urgent)) = (pair(), pair());
    let handle = Handle::new();
    let mut params = MigrationParams::default().downtime_limit(Duration::ZERO).answer_timeout(Duration::from_secs(20));
    let postcopy = match case.when {
        When::AtOnce => PostcopyMode::AtOnce,
        When::Bulk => {
            handle.control.start_postcopy();
            PostcopyMode::Allowed
        }
        When::Rounds(_) => PostcopyMode::Allowed,
        When::GivenUp => {
            (params.stalled_rounds, params.timeout_strategy) = (Some(2), TimeoutStrategy::Postcopy);
            PostcopyMode::Off
        }
    };
    let landed = Mutex::new(Landed::default());
    let (far, far_urgent) = (&far, &far_urgent);
    let outcome = thread::scope(|scope| {
        scope.spawn(|| receive(far, &landed, false, case.cut, case.seed));
        vm.write_on(scope, marker, case.seed | 1, Duration::from_micros(case.seed % 30));
        let mut source = LiveSource::new(&vm, logs, near, &handle)
            .options(params)
            .destination_zeroed(case.fresh)
            .postcopy(postcopy)
            .on_round(|round: &RoundReport| {
                if case.when == When::Rounds(round.number) {
                    handle.control.start_postcopy();
                }
            });
        if case.preempt {
            let landed = &landed;
            source = source.preempt(Box::new(move || {
                scope.spawn(move || receive_urgent(far_urgent, landed, case.cut));
                Ok(near_urgent)
            }));
        }
        let outcome = source.run();
        vm.over.store(true, Ordering::Relaxed);
        let _ = far_urgent.shutdown(limosa_channel::Shutdown::Both);
        outcome
    });
    let runs_there = landed.lock().unwrap().runs;
    match outcome {
        LiveOutcome::Completed(stats) => {
            let landed = landed.into_inner().unwrap();
            assert!(!vm.runs() && landed.ended, "{case:?}");
            assert_same(&vm, &landed, case);
            let postcopy = stats.postcopy.as_ref().unwrap();
            assert_eq!(postcopy.normal_pages + postcopy.zero_pages, landed.after, "{case:?}");
            assert!(serde_json::to_value(&stats).unwrap()["postcopy"]["request_latency_ns"]["p99"].is_u64());
        }
        LiveOutcome::Resumed { error, .. } => {
            assert_eq!((case.cut, runs_there), (Some(Cut::Discard), false), "{case:?} {error}");
            assert!(vm.runs(), "{case:?}");
        }
        LiveOutcome::Undecided(undecided) => {
            // The package was in the kernel's hands, read or not.
            let cut = matches!(case.cut, Some(Cut::Discard | Cut::Package));
            assert!(!vm.runs() && !runs_there && cut, "{case:?}");
            undecided.resume().unwrap();
            assert!(vm.runs(), "{case:?}");
        }
        LiveOutcome::PostcopyPaused(broken) => {
            assert!(!vm.runs() && runs_there && matches!(case.cut, Some(Cut::Pages(_))), "{case:?} {broken:?}");
            // Twice, the second time to the end.
            let again = case.cut.map(|_| Cut::Pages(landed.lock().unwrap().after + 20));
            let outcome = recover(*broken, &landed, again, case);
            let outcome = match outcome {
                LiveOutcome::PostcopyPaused(broken) => recover(*broken, &landed, None, case),
                outcome => outcome,
            };
            let LiveOutcome::Completed(_) = outcome else { panic!("{case:?} {outcome:?}") };
            assert!(!vm.runs(), "{case:?}");
            assert_same(&vm, &landed.into_inner().unwrap(), case);
        }
        LiveOutcome::ResumeFailed { error, .. } => panic!("{case:?} {error}"),
    }
}

fn recover<'v>(
    broken: limosa_migrate::live::PostcopyPausedSource<'v, TestVm>,
    landed: &Mutex<Landed>,
    cut: Option<Cut>,
    case: &Case,
) -> LiveOutcome<'v, TestVm> {
    let ((near, far), (near_urgent, far_urgent)) = (pair(), pair());
    let handle = Handle::new();
    let (far, far_urgent) = (&far, &far_urgent);
    thread::scope(|scope| {
        scope.spawn(move || receive(far, landed, true, cut, case.seed));
        let open: Option<limosa_migrate::live::OpenPreempt<'_>> = match case.preempt {
            true => Some(Box::new(move || {
                scope.spawn(move || receive_urgent(far_urgent, landed, cut));
                Ok(near_urgent)
            })),
            false => None,
        };
        let outcome = broken.recover(near, open, &handle);
        let _ = far_urgent.shutdown(limosa_channel::Shutdown::Both);
        outcome
    })
}

#[test]
fn every_page_comes_once_whenever_the_switch_comes() {
    for seed in 0..120 {
        let when = [When::AtOnce, When::Bulk, When::Rounds(0), When::Rounds(2), When::GivenUp];
        let when = when[usize::try_from(seed % 5).unwrap()];
        run(&Case { seed, when, fresh: seed / 5 % 2 == 0, preempt: seed / 10 % 2 == 0, cut: None });
    }
}

#[test]
fn wherever_it_breaks_off_the_vm_is_on_one_side_and_gets_its_memory() {
    for seed in 0..150 {
        let when = [When::AtOnce, When::Bulk, When::Rounds(0), When::Rounds(1), When::GivenUp];
        let when = when[usize::try_from(seed % 5).unwrap()];
        let cut = match seed / 5 % 6 {
            0 => Cut::Discard,
            1 => Cut::Package,
            pages => Cut::Pages(pages * pages % 7 * 5),
        };
        run(&Case { seed, when, fresh: seed / 5 % 2 == 0, preempt: seed / 10 % 2 == 0, cut: Some(cut) });
    }
}

#[test]
fn postcopy_with_multifd_channels_is_refused_before_anything_is_sent() {
    let vm = TestVm::new(&[8]);
    let (logs, _) = vm.logs();
    let ((near, _far), (page_channel, _)) = (pair(), pair());
    let handle = Handle::new();
    let outcome = LiveSource::new(&vm, logs, near, &handle)
        .postcopy(PostcopyMode::Allowed)
        .channels(vec![page_channel], limosa_migrate::multifd::MultifdSourceOptions::default())
        .unwrap()
        .run();
    assert!(vm.runs());
    let LiveOutcome::Resumed { error: MigrateError::Channels(_), stats, .. } = outcome else { panic!("{outcome:?}") };
    assert_eq!(stats.main.bytes_out, 0);
}
