//! Working sets on the command line: the one beside a snapshot is shown, read ahead, and recorded.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use limosa_console::{quantity, say};
use limosa_page::{PAGE_SIZE, error_with_causes};
use limosa_qemu::{MappedRecording, MappedVm};
use limosa_snapshot::{ReadAhead, ReadAheadReport, RecordedMode, Snapshot, SnapshotError, WorkingSet, WorkingSetFile};
use serde::Serialize;
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::args::{ReadAheadArg, WorkingSetArgs};
use crate::report;
use crate::usage::misused;

/// How often a recording or a read-ahead is asked whether it is over.
const TICK: Duration = Duration::from_millis(20);

/// The part that working sets have in a command, decided before a VM is touched.
pub(crate) struct WorkingSetUse {
    /// The recorded set that is read first.
    pub(crate) set: Option<WorkingSet>,
    /// Whether it is also read ahead for mapped memory: on fast disks that costs more than it gains
    /// (docs/benchmarks/2026-11-26-working-sets.md).
    pub(crate) reads_ahead: bool,
    /// The file and the length of a new recording.
    record: Option<(WorkingSetFile, Duration)>,
}

impl WorkingSetUse {
    /// Nothing is read ahead or recorded.
    pub(crate) fn none() -> Self {
        Self { set: None, reads_ahead: false, record: None }
    }

    /// Reads the working set beside a snapshot, or prepares the file for a new one.
    pub(crate) fn prepare(args: &WorkingSetArgs, snapshot: &Snapshot, notice: &dyn Fn(&str)) -> anyhow::Result<Self> {
        let (on, off) = (args.read_ahead == ReadAheadArg::On, args.read_ahead == ReadAheadArg::Off);
        if let Some(length) = args.record_working_set {
            if on {
                misused(
                    "--read-ahead on cannot be used with --record-working-set: pages that were read count as touched",
                );
            }
            let file = WorkingSetFile::create(snapshot).context("the working set cannot be recorded")?;
            return Ok(Self { record: Some((file, length)), ..Self::none() });
        }
        let found = if off { Ok(None) } else { WorkingSet::of(snapshot) };
        let set = match found {
            Ok(None) if on => {
                bail!("{}: has no working set; record one with --record-working-set", snapshot.path().display());
            }
            Err(error) if on => return Err(anyhow::Error::from(error).context("the working set cannot be read ahead")),
            Err(error) => {
                notice(&format!("nothing is read ahead: {}", error_with_causes(&error)));
                None
            }
            Ok(set) => set,
        };
        if set.is_none() && !off {
            snapshot.fetch_changes_ahead();
        }
        Ok(Self { set, reads_ahead: on, record: None })
    }

    /// How long the requests of a lazy guest are recorded.
    pub(crate) fn record_for(&self) -> Option<Duration> {
        self.record.as_ref().map(|(_, length)| *length)
    }

    /// Begins to record a guest that runs, if that was asked for. `requested` was recorded of a lazy guest; `vm` finds
    /// a mapped one.
    pub(crate) fn begin(
        self,
        snapshot: &Snapshot,
        requested: Option<WorkingSet>,
        vm: impl FnOnce() -> anyhow::Result<MappedVm>,
    ) -> anyhow::Result<Option<Recording>> {
        let Some((file, length)) = self.record else { return Ok(None) };
        let source = match requested {
            Some(set) => Source::Requested(set),
            None => Source::Mapped(MappedRecording::begin(vm()?, snapshot, length)?),
        };
        Ok(Some(Recording { file, source }))
    }
}

/// A working set that is being recorded.
pub(crate) struct Recording {
    file: WorkingSetFile,
    source: Source,
}

enum Source {
    Requested(WorkingSet),
    Mapped(MappedRecording),
}

impl Recording {
    /// Waits until the time is over, the VM has ended, or `is_stopped` is set; then publishes the file.
    pub(crate) fn finish(self, is_stopped: &AtomicBool) -> anyhow::Result<Recorded> {
        let set = match self.source {
            Source::Requested(set) => set,
            Source::Mapped(recording) => {
                wait(|| recording.is_finished(), is_stopped);
                recording.stop().context("the thread that recorded it has panicked")?
            }
        };
        if set.ranges.is_empty() {
            bail!("the guest has touched no page of the snapshot");
        }
        let path = self.file.publish(&set)?;
        Ok(Recorded { path, pages: set.pages(), duration: set.duration })
    }

    /// As [`finish`](Self::finish), until one of the signals arrives.
    pub(crate) fn finish_or_signal(self, signals: &StopSignals) -> anyhow::Result<Recorded> {
        self.finish(&signals.0)
    }
}

/// SIGINT and SIGTERM, which end a recording and a read-ahead, and not this program.
pub(crate) struct StopSignals(Arc<AtomicBool>);

impl StopSignals {
    /// Handles them from now on, if working sets have a part in the command.
    pub(crate) fn register(working_set: &WorkingSetUse) -> anyhow::Result<Self> {
        let is_stopped = Arc::new(AtomicBool::new(false));
        if working_set.record.is_some() || working_set.reads_ahead {
            for signal in [SIGINT, SIGTERM] {
                flag::register(signal, Arc::clone(&is_stopped)).context("cannot handle signals")?;
            }
        }
        Ok(Self(is_stopped))
    }

    /// Waits until all is read ahead, or one of the signals arrives.
    pub(crate) fn finish(&self, read_ahead: ReadAhead) -> ReadAheadReport {
        wait(|| read_ahead.is_finished(), &self.0);
        read_ahead.stop()
    }
}

/// Waits until `is_finished`, or `is_stopped` is set.
fn wait(is_finished: impl Fn() -> bool, is_stopped: &AtomicBool) {
    while !is_finished() && !is_stopped.load(Ordering::Relaxed) {
        thread::sleep(TICK);
    }
}

/// A working set that was recorded.
pub(crate) struct Recorded {
    path: PathBuf,
    pages: u64,
    duration: Duration,
}

impl Recorded {
    pub(crate) fn tell(&self) {
        say!(
            "  working set: {} pages ({}) touched within {}, recorded in {}",
            quantity::count(self.pages),
            quantity::bytes(self.pages.saturating_mul(PAGE_SIZE)),
            quantity::time(self.duration),
            self.path.display()
        );
    }

    pub(crate) fn object(&self) -> Value {
        json!({ "path": self.path, "pages": self.pages, "recorded_ms": quantity::millis(self.duration) })
    }
}

/// Tells what was read ahead; nothing if all of it was in the page cache.
pub(crate) fn tell_read_ahead(report: &ReadAheadReport) {
    if report.bytes > 0 {
        say!("  working set: {} read ahead within {}", quantity::bytes(report.bytes), quantity::time(report.elapsed));
    }
}

/// The same, for programs.
pub(crate) fn read_ahead_object(report: &ReadAheadReport) -> Value {
    json!({
        "bytes": report.bytes,
        "requests": report.requests,
        "cached_bytes": report.cached_bytes,
        "elapsed_ms": quantity::millis(report.elapsed),
    })
}

/// The working set beside a snapshot, for people and programs.
pub(crate) struct ShownWorkingSet(Result<WorkingSet, SnapshotError>);

impl ShownWorkingSet {
    /// Looks beside a snapshot.
    pub(crate) fn of(snapshot: &Snapshot) -> Option<Self> {
        WorkingSet::of(snapshot).transpose().map(Self)
    }
}

impl fmt::Display for ShownWorkingSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Ok(set) if set.mode == RecordedMode::Image => write!(
                f,
                "{} pages ({}), in the image",
                quantity::count(set.pages()),
                quantity::bytes(set.pages().saturating_mul(PAGE_SIZE))
            ),
            Ok(set) => write!(
                f,
                "{} pages ({}), recorded {} from a {} guest within {}",
                quantity::count(set.pages()),
                quantity::bytes(set.pages().saturating_mul(PAGE_SIZE)),
                report::date(set.begun),
                <&str>::from(set.mode),
                quantity::time(set.duration)
            ),
            Err(error) => write!(f, "none: {}", error_with_causes(error)),
        }
    }
}

impl Serialize for ShownWorkingSet {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let value = match &self.0 {
            Ok(set) => json!({
                "pages": set.pages(),
                "ranges": set.ranges.len(),
                "mode": <&str>::from(set.mode),
                "recorded": (set.begun > 0).then_some(set.begun),
                "recorded_ms": (!set.duration.is_zero()).then(|| quantity::millis(set.duration)),
            }),
            Err(error) => json!({ "error": error_with_causes(error) }),
        };
        value.serialize(serializer)
    }
}
