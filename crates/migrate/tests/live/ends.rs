//! Both ends of a migration that was cut: at most one of them runs the VM, and a look at both tells the next step.

use std::sync::OnceLock;

use crate::model::live::TestVm;
use crate::model::vm::Vm;
use limosa_memory::BlockOptions;
use limosa_memory::dirty::DirtyLogs;
use limosa_migrate::live::{PostcopyPaused, PostcopyPausedSource};
use limosa_migrate::{IncomingOutcome, LiveOutcome};

const PAGES: u64 = 500;

/// The memory of both VMs.
pub(crate) fn blocks() -> Vec<BlockOptions> {
    vec![BlockOptions::memfd("ram", PAGES * 4096), BlockOptions::anonymous("rom", 20 * 4096)]
}

/// The VMs of an attempt.
#[derive(Clone, Copy)]
pub(crate) struct Vms<'v> {
    pub(crate) source: &'v TestVm,
    /// The destination's, for an attempt that begins with a new VM.
    pub(crate) fresh: &'v OnceLock<Vm>,
}

/// The two ends before an attempt.
pub(crate) enum Ends<'v> {
    Whole(DirtyLogs),
    Broken(Box<PostcopyPausedSource<'v, TestVm>>, PostcopyPaused<'v, Vm>, &'v Vm),
}

/// How often each thing happened.
#[derive(Debug, Default)]
pub(crate) struct Endings {
    pub(crate) retried: u32,
    pub(crate) undecided: u32,
    pub(crate) recovered: u32,
    pub(crate) completed: u32,
}

/// The outcomes of both ends.
pub(crate) struct Pair<'v> {
    pub(crate) outcome: LiveOutcome<'v, TestVm>,
    pub(crate) arrival: IncomingOutcome<'v, Vm>,
}

/// Returns the VM that runs at the destination with all of its memory, or both ends before the next attempt. `coin`
/// decides where both ends may run the VM.
pub(crate) fn after<'v>(
    source: &'v TestVm,
    vm: &'v Vm,
    Pair { outcome, arrival }: Pair<'v>,
    coin: bool,
    endings: &mut Endings,
) -> Result<&'v Vm, Ends<'v>> {
    assert!(!(source.runs() && vm.started() > 0), "two run: {outcome:?}, {arrival:?}");
    match (outcome, arrival) {
        (LiveOutcome::Completed(_), IncomingOutcome::Running(_)) => Ok(vm),
        // It is done, and the last word about that got lost.
        (LiveOutcome::Undecided(_) | LiveOutcome::PostcopyPaused(_), IncomingOutcome::Running(_)) => {
            endings.undecided += 1;
            Ok(vm)
        }
        // It never left. What may be at the destination is thrown away.
        (LiveOutcome::Resumed { logs, .. }, IncomingOutcome::Failed(_) | IncomingOutcome::Undecided(_)) => {
            assert!(source.runs() && vm.started() == 0);
            endings.retried += 1;
            Err(Ends::Whole(logs.expect("the logs come back")))
        }
        // Neither has it, and both could: here the test decides.
        (LiveOutcome::Undecided(undecided), IncomingOutcome::Undecided(arrived)) => {
            endings.undecided += 1;
            if coin {
                undecided.discard();
                arrived.start().unwrap();
                return Ok(vm);
            }
            arrived.discard();
            let logs = undecided.resume().unwrap().expect("the logs come back");
            Err(Ends::Whole(logs))
        }
        (LiveOutcome::Undecided(undecided), IncomingOutcome::Failed(_)) => {
            endings.undecided += 1;
            assert_eq!(vm.started(), 0);
            let logs = undecided.resume().unwrap().expect("the logs come back");
            Err(Ends::Whole(logs))
        }
        (LiveOutcome::Undecided(undecided), IncomingOutcome::PostcopyPaused(paused)) => {
            endings.recovered += 1;
            let recoverable = undecided.into_postcopy_paused().expect("it was in postcopy");
            Err(Ends::Broken(Box::new(recoverable), paused, vm))
        }
        (LiveOutcome::PostcopyPaused(recoverable), IncomingOutcome::PostcopyPaused(paused)) => {
            endings.recovered += 1;
            Err(Ends::Broken(recoverable, paused, vm))
        }
        (outcome, arrival) => panic!("{outcome:?}, {arrival:?}"),
    }
}

/// Checks that the memory of both VMs is the same.
pub(crate) fn assert_same(source: &TestVm, arrived: &Vm, seed: u64) {
    for block in 0..2 {
        let mut there = vec![0; source.contents(block).len()];
        arrived.memory.block(block).unwrap().read(0, &mut there).unwrap();
        let here = source.contents(block);
        let differs = here.chunks(4096).zip(there.chunks(4096)).position(|(here, there)| here != there);
        assert_eq!(differs, None, "page of block {block}, seed {seed}");
    }
}
