//! The write that gives the VM away: wherever it ends, and also if it panics, at most one side runs the VM; and only an
//! answer to it counts as the destination's.

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::model::live::TestVm;
use crate::model::live_postcopy::{Cut, Landed, receive};
use crate::model::vm::Vm;
use crate::model::{pair, say};
use limosa_channel::Shutdown;
use limosa_memory::BlockOptions;
use limosa_migrate::live::{LiveDestinationOptions, PostcopyMode};
use limosa_migrate::{
    Handle, IncomingOutcome, LiveDestination, LiveOutcome, LiveSource, LiveVm, MigrateError, MigrationParams,
};
use limosa_stream::postcopy::{PING_COMMIT, PING_LOADED, PING_RETURN_PATH};
use limosa_stream::{Command, ReturnMessage, postcopy, section};

fn blocks() -> Vec<BlockOptions> {
    vec![BlockOptions::memfd("ram", 40 * 4096)]
}

/// The result of a migration whose source's write panics at an offset.
struct Panicked {
    /// Offsets at which the source wrote while its VM stood still.
    writes: Vec<u64>,
    /// Whether the source's code panicked.
    panicked: bool,
    runs_here: bool,
    runs_there: bool,
}

/// Moves a VM over a channel whose write panics at byte `at`.
fn migrate(postcopy: PostcopyMode, at: u64) -> Panicked {
    let (vm, there) = (Arc::new(TestVm::of(blocks())), Vm::of(blocks()));
    vm.fill(0, |page| page % 3 == 0);
    let (logs, _marker) = vm.logs();
    let (near, far) = pair();
    let writes = Arc::new(Mutex::new(Vec::new()));
    let (noted, paused) = (Arc::clone(&writes), Arc::clone(&vm));
    let write = move |offset: u64| {
        if !paused.runs() {
            noted.lock().unwrap().push(offset);
        }
        match at.checked_sub(offset) {
            Some(left @ 1..) => Ok(usize::try_from(left).unwrap()),
            Some(0) => panic!("the channel is broken at byte {at}"),
            None => Ok(usize::MAX),
        }
    };
    near.set_transfer_hooks(Box::new(|_| Ok(usize::MAX)), Box::new(write));
    let (panicked, arrived) = thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let handle = Handle::new();
            let options = LiveDestinationOptions {
                answer_timeout: Some(Duration::from_secs(10)),
                ..LiveDestinationOptions::default()
            };
            let outcome = LiveDestination::new(&there, far, &handle).options(options).run();
            if let IncomingOutcome::PostcopyPaused(paused) = outcome {
                paused.discard();
            }
        });
        let handle = Handle::new();
        let source = LiveSource::new(&*vm, logs, near, &handle).destination_zeroed(true).postcopy(postcopy);
        let sent = panic::catch_unwind(AssertUnwindSafe(|| matches!(source.run(), LiveOutcome::Completed(_))));
        receiving.join().unwrap();
        (sent.is_err(), sent.is_ok_and(|completed| completed))
    });
    let writes = std::mem::take(&mut *writes.lock().unwrap());
    assert!(panicked || arrived, "{postcopy:?}, byte {at}");
    Panicked { writes, panicked, runs_here: vm.runs(), runs_there: there.started() > 0 }
}

fn check_every_byte(postcopy: PostcopyMode, begin: u64, decisive: usize) {
    let last = u64::try_from(decisive).unwrap();
    for n in [0, 1, last / 2, last - 1, last, last + 1] {
        let ended = migrate(postcopy, begin + n);
        assert!(ended.panicked, "{postcopy:?}, {n} bytes");
        assert_eq!(ended.runs_here, n < last, "{postcopy:?}, {n} of {last} deciding bytes");
        assert!(!(ended.runs_here && ended.runs_there), "{postcopy:?}, {n} bytes: two run");
    }
}

#[test]
fn a_panic_in_the_commit_resumes_the_vm_only_before_the_deciding_bytes_have_left() {
    let whole = migrate(PostcopyMode::Off, u64::MAX);
    assert!(!whole.panicked && !whole.runs_here && whole.runs_there);
    let mut commit = Vec::new();
    Command::Ping(PING_COMMIT).encode(&mut commit).unwrap();
    section::encode_eof(&mut commit);
    check_every_byte(PostcopyMode::Off, *whole.writes.last().unwrap(), commit.len());
}

#[test]
fn a_panic_in_the_package_of_a_postcopy_resumes_the_vm_only_before_the_deciding_bytes_have_left() {
    let whole = migrate(PostcopyMode::AtOnce, u64::MAX);
    assert!(!whole.panicked && !whole.runs_here && whole.runs_there);
    let sections = TestVm::of(blocks()).device_sections().unwrap();
    let package = postcopy::postcopy_package(sections.bytes(), Some(PING_LOADED)).unwrap();
    let mut body = Vec::new();
    postcopy::encode_packaged(&package, &mut body).unwrap();
    // The discards are in front of it.
    check_every_byte(PostcopyMode::AtOnce, whole.writes[1], body.len());
}

#[test]
fn an_answer_that_comes_before_the_package_leaves_the_vm_in_doubt() {
    let vm = TestVm::of(blocks());
    vm.fill(0, |page| page % 3 == 0);
    let (logs, _marker) = vm.logs();
    let ((near, far), (near_urgent, _far_urgent)) = (pair(), pair());
    let handle = Handle::new();
    let landed = Mutex::default();
    let far = &far;
    let outcome = thread::scope(|scope| {
        // It reads the package, and says nothing to it.
        scope.spawn(|| receive(far, &landed, false, Some(Cut::Package), 1));
        LiveSource::new(&vm, logs, near, &handle)
            .postcopy(PostcopyMode::AtOnce)
            .preempt(Box::new(move || {
                say(far, &ReturnMessage::Pong(PING_LOADED));
                // Time enough to be read.
                thread::sleep(Duration::from_millis(100));
                Ok(near_urgent)
            }))
            .run()
    });
    assert!(!vm.runs() && !Mutex::<Landed>::into_inner(landed).unwrap().runs);
    let LiveOutcome::Undecided(undecided) = outcome else { panic!("{outcome:?}") };
    undecided.resume().unwrap();
}

#[test]
fn a_destination_that_answers_everything_in_advance_still_owes_the_answer_to_the_package() {
    let vm = TestVm::of(blocks());
    let (logs, _marker) = vm.logs();
    let (near, far) = pair();
    let handle = Handle::new();
    let outcome = thread::scope(|scope| {
        scope.spawn(|| {
            say(&far, &ReturnMessage::Pong(PING_RETURN_PATH));
            say(&far, &ReturnMessage::Pong(PING_LOADED));
            while let Ok(1..) = far.read(&mut [0; 4096]) {}
            let _ = far.shutdown(Shutdown::Both);
        });
        let params = MigrationParams::default().answer_timeout(Duration::from_millis(500));
        LiveSource::new(&vm, logs, near, &handle).options(params).postcopy(PostcopyMode::AtOnce).run()
    });
    let LiveOutcome::Undecided(undecided) = outcome else { panic!("{outcome:?}") };
    assert!(matches!(undecided.why(), MigrateError::AnswerTimedOut { .. }), "{}", undecided.why());
    assert!(!vm.runs());
    undecided.resume().unwrap();
}
