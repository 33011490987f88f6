//! Recording the working set of a VM whose memory is a mapped snapshot.
//!
//! The kernel says which pages it has mapped for the VM. It is asked again and again, so that pages are recorded about
//! in the order of their first touch, and a VM that ends early has its working set recorded all the same.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use limosa_migrate::stored::BlockRange;
use limosa_snapshot::{RecordedMode, Snapshot, WorkingSet, WorkingSetRecorder};

use super::vm::MappedVm;

/// The interval between the first two looks. It grows by half, up to [`LOOK_AT_LEAST_EVERY`].
const LOOK_FIRST_AFTER: Duration = Duration::from_millis(20);
/// The longest such interval.
const LOOK_AT_LEAST_EVERY: Duration = Duration::from_secs(1);

/// A recording in progress, on a thread of its own.
#[derive(Debug)]
pub struct MappedRecording {
    thread: JoinHandle<WorkingSet>,
    /// Ends the recording when it is dropped.
    stop: mpsc::Sender<()>,
}

impl MappedRecording {
    /// Begins to record what `vm`, a VM of `snapshot`, touches within `length`.
    ///
    /// # Errors
    /// The pages that it has touched so far cannot be seen, or no thread can be started.
    pub fn begin(vm: MappedVm, snapshot: &Snapshot, length: Duration) -> io::Result<Self> {
        let mut recorder = WorkingSetRecorder::new(snapshot, RecordedMode::Mapped);
        look(&vm, &mut recorder)?;
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new().name("working-set".into());
        let thread = thread.spawn(move || record(&vm, recorder, length, &stopped))?;
        Ok(Self { thread, stop })
    }

    /// Whether it has ended: its time is over, or the VM has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends it now, and returns what was touched until then.
    #[must_use]
    pub fn stop(self) -> Option<WorkingSet> {
        drop(self.stop);
        self.thread.join().ok()
    }
}

fn record(
    vm: &MappedVm,
    mut recorder: WorkingSetRecorder,
    length: Duration,
    stopped: &mpsc::Receiver<()>,
) -> WorkingSet {
    let begun = Instant::now();
    let (mut interval, mut is_over) = (LOOK_FIRST_AFTER, false);
    while !is_over {
        let left = length.saturating_sub(begun.elapsed());
        let waited = stopped.recv_timeout(interval.min(left));
        is_over = left <= interval || matches!(waited, Err(RecvTimeoutError::Disconnected) | Ok(()));
        interval = (interval * 3 / 2).min(LOOK_AT_LEAST_EVERY);
        // It is the end of the process: what was seen before counts.
        is_over |= look(vm, &mut recorder).is_err();
    }
    recorder.finish()
}

/// Notes the pages that the kernel has mapped for a VM by now.
fn look(vm: &MappedVm, recorder: &mut WorkingSetRecorder) -> io::Result<()> {
    for block in vm.present()? {
        block.pages.runs().for_each(|pages| recorder.note(BlockRange { block: block.index, pages }));
    }
    Ok(())
}
