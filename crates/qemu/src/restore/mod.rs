//! Restoring a VM: from a snapshot into a QEMU that was started with `-incoming defer`.
//!
//! Mapped, the snapshot is the guest's memory already and only its devices are loaded. Lazily, limosa is a postcopy
//! source whose guest does not run: the guest starts at the destination as soon as the device state is loaded, and its
//! pages follow, requested ones first. Eagerly, QEMU reads the file itself, or, where it cannot, limosa sends a precopy
//! stream.
//!
//! The law: **a guest never sees a page that was not stored.** A failure while pages are missing closes the channel:
//! the guest stalls on what it has not got and waits for [`recover`]. Which snapshot it stands on is written down
//! inside its QEMU (the job's record), so that no other can be mistaken for it.

mod disks;
mod eager;
mod incoming;
mod lazy;
mod preflight;
mod recover;
pub(crate) mod unfinished;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use limosa_channel::{Counters, Uri, ZeroCopy};
use limosa_migrate::control::Phase;
use limosa_migrate::stored::{InPlace, PostcopyOptions};
use limosa_snapshot::Snapshot;
use limosa_stream::multifd::Compression;
use serde_json::Value;
use uuid::Uuid;

use crate::job::{JobError, Watch};
use crate::job_record::{JobKind, JobRecord};
use crate::monitor::{Monitor, RunState, Settings};
use crate::qmp::QmpError;
use crate::takeover::{Actor, Outcome, take_over};
use crate::watchdog::Watchdog;
pub use recover::recover;

use crate::save::{DiskPolicy, TransportChoice};

/// How the guest gets its memory, and so when it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RestoreMode {
    /// Mapped where the destination maps the snapshot, lazily where it can, else eagerly, with a notice why.
    #[default]
    Auto,
    /// At once: its memory is the snapshot file, mapped by the destination's memory backends. No page is sent, and
    /// nothing is left to do afterwards.
    Mapped,
    /// At once; its pages follow.
    Lazy,
    /// When all pages are there.
    Eager,
}

impl RestoreMode {
    /// Its name in options and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Mapped => "mapped",
            Self::Lazy => "lazy",
            Self::Eager => "eager",
        }
    }
}

/// The run state that the VM comes back in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RunChoice {
    /// The one it was saved in.
    #[default]
    AsSaved,
    /// Running.
    Run,
    /// Paused.
    Paused,
}

/// How a VM is to be restored.
#[derive(Debug, Clone, Default)]
pub struct RestoreOptions {
    /// When the guest runs.
    pub mode: RestoreMode,
    /// Who reads the pages in an eager restore.
    pub transport: TransportChoice,
    /// Where QEMU listens; `None`: a socket in a private directory.
    pub listen: Option<Uri>,
    /// Move the memory of an eager restore on channels beside the main one.
    pub channels: Option<RestoreChannels>,
    /// Answer requested pages on a channel of their own.
    pub preempt: bool,
    /// The run state.
    pub run: RunChoice,
    /// About disks that changed since the VM was saved.
    pub disks: DiskPolicy,
}

/// The channels that the memory of an eager restore comes on: QEMU's multifd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestoreChannels {
    /// How many, 1 to 16.
    pub count: u8,
    /// How pages are compressed; only limosa compresses, not a file.
    pub compression: Compression,
    /// Whether limosa looks if stored pages are zero.
    pub detect_zero: bool,
    /// How stored pages leave the file, where limosa sends them.
    pub zero_copy: ZeroCopy,
}

/// Observes a restore while it runs.
pub trait RestoreObserver: Sync {
    /// The guest runs (or is ready to, if it is to stay paused) this long after [`restore`] was called.
    fn guest_ready(&self, after: Duration, mode: RestoreMode);
}

/// Starts the process that continues with a lazy restore if this one is killed ([`Watchdog::start`]), or declines.
pub type StartWatchdog<'a> = dyn Fn() -> Result<Option<Watchdog>, JobError> + Sync + 'a;

/// Counters of a lazy restore.
#[derive(Debug, Clone)]
pub struct LazyReport {
    /// From the arrival of a page request to its answer, nanoseconds.
    pub request_latency: Histogram<u64>,
    /// Of the main channel.
    pub main: Counters,
    /// Of the preempt channel.
    pub preempt: Option<Counters>,
}

/// The result of a restore.
#[derive(Debug)]
#[non_exhaustive]
pub struct RestoreReport {
    /// Mapped, lazy or eager.
    pub mode: RestoreMode,
    /// RAM blocks that the destination maps from the snapshot.
    pub mapped_blocks: Vec<String>,
    /// From the call to the guest running, or being ready to.
    pub to_guest: Duration,
    /// From the call to every page being there.
    pub to_resident: Duration,
    /// Pages sent with contents; `None` where QEMU read them itself.
    pub normal_pages: Option<u64>,
    /// Pages sent as zero.
    pub zero_pages: Option<u64>,
    /// Of a lazy restore.
    pub lazy: Option<LazyReport>,
    /// Of the channel of an eager restore through the socket.
    pub channel: Option<Counters>,
    /// The state that the VM is in now.
    pub vm_state: String,
}

/// The arguments of [`restore`].
#[derive(Clone, Copy)]
pub struct Restore<'a> {
    /// The QEMU that takes the VM.
    pub monitor: &'a Monitor,
    /// The VM.
    pub snapshot: &'a Snapshot,
    /// Where the snapshot was opened.
    pub path: &'a Path,
    /// How the VM is to be restored.
    pub options: &'a RestoreOptions,
    /// Steers and observes the transfer.
    pub watch: Watch<'a>,
    /// Is told when the guest runs.
    pub observer: &'a dyn RestoreObserver,
    /// Starts the process that brings the rest of a lazy restore if this one is killed.
    pub start_watchdog: &'a StartWatchdog<'a>,
}

impl std::fmt::Debug for Restore<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Restore").field("path", &self.path).field("options", &self.options).finish_non_exhaustive()
    }
}

/// Restores a snapshot. A lazy restore starts the guest long before its memory is there.
///
/// # Errors
/// Before the guest runs: the QEMU has to be thrown away, and a fresh one can be tried with; the snapshot is untouched.
/// After: the guest stalls on missing pages, and [`recover`] continues.
pub fn restore(restore: Restore<'_>) -> Result<RestoreReport, JobError> {
    let Restore { monitor, snapshot, path, options, watch, observer, start_watchdog } = restore;
    let begun = Instant::now();
    let plan = preflight::check(monitor, snapshot, options, watch)?;
    let preflight::Plan { runs, page_sizes, mode } = plan;
    let job = RestoreJob { monitor, snapshot, path, options, watch, observer, start_watchdog, begun, runs, page_sizes };
    let then = if runs { "run" } else { "stay paused" };
    tracing::info!("restoring {mode}; the guest is to {then}");
    match mode {
        PlannedMode::Eager => eager::run(&job, &[]),
        PlannedMode::Mapped(blocks) => eager::run(&job, &blocks),
        PlannedMode::Lazy => lazy::run(&job),
    }
}

/// How it is done: the decision for a [`RestoreMode`].
#[derive(Debug, Clone, PartialEq, Eq)]
enum PlannedMode {
    /// The guest runs when all pages are there.
    Eager,
    /// The same, but that these RAM blocks are there already.
    Mapped(Vec<InPlace>),
    /// The guest runs at once; its pages follow.
    Lazy,
}

impl std::fmt::Display for PlannedMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Eager => f.write_str("eagerly"),
            Self::Mapped(blocks) => {
                let names: Vec<_> = blocks.iter().map(|block| block.block.as_str()).collect();
                write!(f, "mapped ({})", names.join(", "))
            }
            Self::Lazy => f.write_str("lazily"),
        }
    }
}

/// Returns the identity of a snapshot: its id, or one made from its device state if another program wrote it.
fn identity(snapshot: &Snapshot) -> Uuid {
    snapshot
        .manifest()
        .map_or_else(|| Uuid::new_v5(&Uuid::NAMESPACE_OID, snapshot.device_tail()), |manifest| manifest.id)
}

/// How long QEMU may take to come to the end of a load that failed.
const FAIL_WITHIN: Duration = Duration::from_secs(5);

/// State shared by all ways of restoring.
struct RestoreJob<'a> {
    monitor: &'a Monitor,
    snapshot: &'a Snapshot,
    path: &'a Path,
    options: &'a RestoreOptions,
    watch: Watch<'a>,
    observer: &'a dyn RestoreObserver,
    start_watchdog: &'a StartWatchdog<'a>,
    begun: Instant,
    /// Whether the guest is to run.
    runs: bool,
    /// Bytes of a page of the destination's memory, by RAM block, where they are more than 4096.
    page_sizes: BTreeMap<String, u64>,
}

impl RestoreJob<'_> {
    /// Before the incoming migration: makes QEMU start, or not start, the guest by itself. In a QEMU that waits for an
    /// incoming VM, `cont` and `stop` set just that.
    fn choose_autostart(&self) -> Result<(), JobError> {
        Ok(if self.runs { self.monitor.cont() } else { self.monitor.stop() }?)
    }

    /// How the engine is to send lazily.
    fn postcopy_options(&self) -> PostcopyOptions {
        PostcopyOptions { page_sizes: self.page_sizes.clone(), ..PostcopyOptions::default() }
    }

    /// The record of this job for QEMU.
    fn record(&self, undo: Settings) -> JobRecord {
        JobRecord::new(JobKind::Restore, identity(self.snapshot), self.path, self.runs, undo)
    }

    /// After a failure before the guest ran: puts QEMU's settings back and finds the best reason, QEMU's own if it has
    /// one.
    fn give_up(&self, record: &JobRecord, error: JobError) -> JobError {
        // A QEMU that lost its source while it loaded the devices, with a channel for requests, waits for ever for the
        // page that it has asked for there, and answers nothing (found with QEMU 10.0.2).
        let answer = self.monitor.qmp().execute_within("query-migrate", Value::Null, FAIL_WITHIN);
        if let Err(QmpError::NoReply { .. }) = answer {
            let reason = format!("{error}; this QEMU waits for memory that will not come and answers nothing: kill it");
            return JobError::Failed { reason };
        }
        // The QEMU is to be thrown away anyway; what it refuses now changes nothing.
        let left = take_over(self.monitor, record, Actor::Watchdog, FAIL_WITHIN);
        if left.is_ok_and(|left| left.outcome == Outcome::NeedsRecovery) {
            // The answer to the package was lost, not the package: the guest runs, on the pages that it has.
            self.watch.handle.progress.enter(Phase::PostcopyActive);
        }
        // Asked when QEMU has come to the end of its failure: before that it may not know yet.
        match self.monitor.migration().ok().and_then(|info| info.error) {
            Some(reason) => {
                JobError::Failed { reason: format!("{reason} (its own log may say more); limosa saw: {error}") }
            }
            None => error,
        }
    }

    /// Whether QEMU says that it still waits for its VM.
    fn is_unloaded(&self) -> bool {
        self.monitor.status().is_ok_and(|status| status.state == RunState::Inmigrate)
    }

    /// After everything has been handed over: QEMU takes the VM's disks then, and may fail to without a word on the
    /// stream.
    fn check_loaded(&self) -> Result<(), JobError> {
        if self.runs && self.is_unloaded() {
            return Err(JobError::refused(
                "not restored: QEMU has the VM's memory but could not start it, most likely because another process has its disks \
                 open (QEMU's log says); end this QEMU, free the disks and start a new one",
            ));
        }
        Ok(())
    }

    /// The VM's state, as people and programs are told.
    fn vm_state(&self) -> String {
        self.monitor.status().map_or_else(|_| "unknown".into(), |status| status.state.to_string())
    }

    /// Makes sure that the guest runs if it is to: an eager load goes by the state that was saved.
    fn settle_run_state(&self) -> Result<(), JobError> {
        let status = self.monitor.status()?;
        if self.runs && !status.running && status.state != RunState::Shutdown {
            self.monitor.cont()?;
        }
        Ok(())
    }
}
