//! Checkpoints of a VM that writes all the time, and a keeper that has each of them as the VM was when it stood still.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::model::live::{TestVm, random};
use crate::model::{Kept, pair};
use limosa_channel::{Channel, Shutdown};
use limosa_migrate::checkpoints::{CheckpointSourceOptions, CheckpointsEnded, NextCheckpoint};
use limosa_migrate::control::Stop;
use limosa_migrate::live::PostcopyMode;
use limosa_migrate::output::{OutputCounters, OutputGate, OutputSignal};
use limosa_migrate::stored::{Destination, DestinationOptions};
use limosa_migrate::{Handle, LiveSource, MigrateError, MigrationParams, VmError};

const PAGES: [u64; 2] = [300, 20];
const LAST: u64 = 12;

/// All of a VM: its memory by block, and its device's number.
type Image = (Vec<Vec<u8>>, u64);

/// Output that is there all the time, and notes the VM whenever it is sealed.
struct Gate {
    vm: Arc<TestVm>,
    /// The checkpoints that the keeper has, as it says.
    kept: Arc<Mutex<BTreeMap<u64, Image>>>,
    sealed: Mutex<BTreeMap<u64, Image>>,
    committed: Mutex<Vec<u64>>,
    aborted: Mutex<Option<u64>>,
    signal: Mutex<Option<OutputSignal>>,
    fail: bool,
}

impl Gate {
    fn new(vm: &Arc<TestVm>, kept: &Arc<Mutex<BTreeMap<u64, Image>>>) -> Self {
        Self {
            vm: Arc::clone(vm),
            kept: Arc::clone(kept),
            sealed: Mutex::default(),
            committed: Mutex::default(),
            aborted: Mutex::default(),
            signal: Mutex::default(),
            fail: false,
        }
    }
}

impl OutputGate for Gate {
    fn watch(&self, signal: &OutputSignal) -> Result<(), VmError> {
        *self.signal.lock().unwrap() = Some(signal.clone());
        Ok(())
    }

    fn seal(&self, epoch: u64) -> Result<(), VmError> {
        if self.fail && epoch == 2 {
            return Err("the gate is broken".into());
        }
        assert!(!self.vm.runs(), "sealed while the VM stands still");
        let image = ((0..2).map(|block| self.vm.contents(block)).collect(), self.vm.writes.load(Ordering::SeqCst));
        assert!(self.sealed.lock().unwrap().insert(epoch, image).is_none(), "epoch {epoch} is sealed once");
        Ok(())
    }

    fn commit(&self, epoch: u64) -> Result<(), VmError> {
        assert!(self.kept.lock().unwrap().contains_key(&epoch), "output of {epoch} leaves when the keeper has it");
        self.committed.lock().unwrap().push(epoch);
        if epoch == LAST {
            self.signal.lock().unwrap().as_ref().unwrap().close();
        }
        Ok(())
    }

    fn abort(&self, epoch: u64) -> Result<(), VmError> {
        *self.aborted.lock().unwrap() = Some(epoch);
        Ok(())
    }

    fn counters(&self) -> OutputCounters {
        OutputCounters::default()
    }
}

/// The end of a keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Never,
    BeforeReady,
    BeforeReply(u64),
    BeforeLoaded(u64),
    AfterLoaded(u64),
    /// It says nothing before this reply.
    Hangs(u64),
}

fn image(kept: &Kept, sections: &[u8]) -> Image {
    let pages = |block: &Vec<Option<Vec<u8>>>| {
        block.iter().flat_map(|page| page.clone().unwrap_or_else(|| vec![0; 4096])).collect::<Vec<u8>>()
    };
    // The device's number follows the header of its section (type, id, name, instance, version) and its length.
    let number = sections.get(1 + 4 + 4 + 4 + 4 + 4..).and_then(|rest| rest.first_chunk::<8>()).unwrap();
    (kept.pages.iter().map(pages).collect(), u64::from_le_bytes(*number))
}

/// Keeps what comes, up to its end.
fn keep(channel: Channel, kept: &Mutex<BTreeMap<u64, Image>>, end: End) -> Result<(), MigrateError> {
    let mut sink = Kept::default();
    let handle = Handle::new();
    let options = DestinationOptions { colo: true, ..DestinationOptions::default() };
    let base = Destination::new(&mut sink, channel, &handle).options(options).run()?;
    let mut newest = Some((0, image(&sink, &base.tail)));
    let mut checkpoints = base.into_checkpoints()?;
    if end == End::BeforeReady {
        return Ok(());
    }
    checkpoints.begin()?;
    let mut number = 0;
    while checkpoints.wait_request(None)? == NextCheckpoint::Requested {
        let (stored, whole) = newest.take().unwrap();
        kept.lock().unwrap().insert(stored, whole);
        number += 1;
        match end {
            End::BeforeReply(last) if number == last => return Ok(()),
            End::Hangs(last) if number == last => {
                thread::sleep(Duration::from_millis(600));
                return Ok(());
            }
            _ => {}
        }
        checkpoints.reply()?;
        let checkpoint = match checkpoints.receive(&mut sink, Some(Duration::from_secs(20))) {
            // The source is done.
            Err(MigrateError::Channel(error)) if error.is_closed() => return Ok(()),
            received => received?,
        };
        assert_eq!(checkpoint.number, number);
        newest = Some((number, image(&sink, &checkpoint.sections)));
        if end == End::BeforeLoaded(number) {
            return Ok(());
        }
        checkpoints.loaded()?;
        if end == End::AfterLoaded(number) {
            return Ok(());
        }
    }
    Ok(())
}

struct Run {
    ended: CheckpointsEnded,
    gate: Arc<Gate>,
    kept: BTreeMap<u64, Image>,
    vm: Arc<TestVm>,
}

fn run(end: End, vm: TestVm, set: impl FnOnce(&mut CheckpointSourceOptions<'_>, &mut Gate)) -> Run {
    let vm = Arc::new(vm);
    vm.fill(0, |page| random(page).is_multiple_of(3));
    let (logs, marker) = vm.logs();
    let kept = Arc::default();
    let mut gate = Gate::new(&vm, &kept);
    let mut options = CheckpointSourceOptions::default();
    options.every = Duration::from_millis(5);
    set(&mut options, &mut gate);
    let gate = Arc::new(gate);
    let gates: [&dyn OutputGate; 1] = [&*gate];
    options.gates = &gates;
    let (near, far) = pair();
    let ended = thread::scope(|scope| {
        vm.write_on(scope, marker, 7, Duration::from_micros(50));
        let keeper = scope.spawn(|| keep(far, &kept, end));
        let mut params = MigrationParams::default();
        params.answer_timeout = Duration::from_millis(if matches!(end, End::Hangs(_)) { 300 } else { 20_000 });
        let ended = LiveSource::new(&*vm, logs, near, &Handle::new()).options(params).make_checkpoints(&options);
        let runs = vm.runs();
        vm.over.store(true, Ordering::Relaxed);
        keeper.join().unwrap().ok();
        assert!(runs, "{ended:?}: the VM continues here");
        ended
    });
    assert_eq!(vm.pauses.load(Ordering::SeqCst), vm.resumes.load(Ordering::SeqCst));
    let kept = kept.lock().unwrap().clone();
    Run { ended, gate, kept, vm }
}

impl Run {
    /// Every checkpoint of the keeper is the VM as it was when its output was sealed.
    fn check(&self) {
        let sealed = self.gate.sealed.lock().unwrap();
        for (number, image) in &self.kept {
            let expected = &sealed[number];
            assert_eq!(image.1, expected.1, "the device of checkpoint {number}");
            for (block, (kept, was)) in image.0.iter().zip(&expected.0).enumerate() {
                let differs = kept.chunks(4096).zip(was.chunks(4096)).position(|(kept, was)| kept != was);
                assert_eq!(differs, None, "the first other page of checkpoint {number}, block {block}");
            }
        }
        let committed = self.gate.committed.lock().unwrap();
        assert!(committed.iter().copied().eq(0..committed.len() as u64), "{committed:?}");
        assert_eq!(self.ended.acknowledged, committed.last().copied());
        // What did not count is dropped.
        assert_eq!(*self.gate.aborted.lock().unwrap(), Some(committed.len() as u64));
        assert!(self.ended.resumed.is_ok() && self.ended.logs.is_some());
    }
}

#[test]
fn each_checkpoint_is_the_vm_as_it_stood_still_wherever_its_pages_come_from() {
    for copy_aside in [0, 200 << 10, 64 << 20] {
        let run = run(End::Never, TestVm::new(&PAGES), |options, _| options.copy_aside = copy_aside);
        run.ended.result.as_ref().unwrap();
        run.check();
        assert_eq!((run.ended.acknowledged, run.ended.made), (Some(LAST), LAST));
        assert_eq!(run.kept.len() as u64, LAST + 1);
    }
}

#[test]
fn output_that_wants_to_leave_ends_the_wait() {
    let run = run(End::Never, TestVm::new(&PAGES), |options, _| {
        (options.every, options.by_output) = (Duration::from_secs(3600), true);
        let signal = options.signal.clone();
        thread::spawn(move || {
            // A VM that prints all the while.
            for _ in 0..2000 {
                signal.before_output();
                thread::sleep(Duration::from_millis(2));
            }
        });
    });
    run.ended.result.as_ref().unwrap();
    run.check();
    assert_eq!(run.ended.acknowledged, Some(LAST));
}

#[test]
fn a_vm_whose_keeper_dies_or_hangs_continues_and_what_did_not_count_never_leaves() {
    let ends = (1..4).flat_map(|number| {
        [End::BeforeReply(number), End::BeforeLoaded(number), End::AfterLoaded(number), End::Hangs(number)]
    });
    for end in ends.chain([End::BeforeReady]) {
        for copy_aside in [0, 64 << 20] {
            let run = run(end, TestVm::new(&PAGES), |options, _| options.copy_aside = copy_aside);
            assert!(run.ended.result.is_err(), "{end:?}");
            run.check();
            let counts = match end {
                End::BeforeReady | End::BeforeReply(1) | End::Hangs(1) => None,
                End::BeforeReply(number) | End::Hangs(number) => Some(number - 2),
                End::BeforeLoaded(number) | End::AfterLoaded(number) => Some(number - 1),
                End::Never => unreachable!(),
            };
            assert_eq!(run.ended.acknowledged, counts, "{end:?}");
        }
    }
}

#[test]
fn a_gate_or_a_device_that_fails_ends_the_series_and_the_vm_continues() {
    let run_of = |vm, fail| run(End::Never, vm, |_, gate| gate.fail = fail);
    let run = run_of(TestVm::new(&PAGES), true);
    assert!(matches!(&run.ended.result, Err(MigrateError::Vm { what: "hold its output back", .. })), "{:?}", run.ended);
    run.check();
    let run = run_of(TestVm { fail: Some("devices"), ..TestVm::new(&PAGES) }, false);
    assert!(matches!(&run.ended.result, Err(MigrateError::Vm { .. })), "{:?}", run.ended);
    assert_eq!(run.ended.acknowledged, None);
    assert!(run.vm.runs());
}

#[test]
fn a_stop_ends_the_series_at_any_moment() {
    for after in [0, 3, 10, 40] {
        let vm = TestVm::new(&PAGES);
        let (logs, marker) = vm.logs();
        let (near, far) = pair();
        let handle = Handle::new();
        let kept = Mutex::default();
        thread::scope(|scope| {
            vm.write_on(scope, marker, 9, Duration::from_micros(50));
            let keeper = scope.spawn(|| keep(far, &kept, End::Never));
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(after));
                handle.control.stop(Stop::Cancel);
            });
            let options = CheckpointSourceOptions::default();
            let ended = LiveSource::new(&vm, logs, near, &handle).make_checkpoints(&options);
            assert!(matches!(ended.result, Err(MigrateError::Cancelled)), "{ended:?}");
            assert!(vm.runs());
            vm.over.store(true, Ordering::Relaxed);
            keeper.join().unwrap().ok();
        });
    }
}

#[test]
fn what_carries_no_checkpoints_is_refused_and_the_vm_never_stops() {
    let vm = TestVm::new(&PAGES);
    let (logs, _marker) = vm.logs();
    let (near, far) = pair();
    let source = LiveSource::new(&vm, logs, near, &Handle::new()).postcopy(PostcopyMode::Allowed);
    let ended = source.make_checkpoints(&CheckpointSourceOptions::default());
    assert!(matches!(&ended.result, Err(MigrateError::Channels(_))), "{ended:?}");
    assert_eq!(vm.pauses.load(Ordering::SeqCst), 0);
    far.shutdown(Shutdown::Both).ok();
}
