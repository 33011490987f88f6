//! A lazily restored guest whose limosa was killed: its watchdog continues.
//!
//! The law: **a killed pager stalls the guest, and the stall ends.** A client that connects to QEMU afterwards may get
//! no answer: the monitor answers from QEMU's main loop, and that waits for a page as soon as a device touches one that
//! is missing. Out of band QEMU still obeys, but only over a connection that was negotiated before. So the watchdog
//! keeps limosa's, and with it everything that [`recover`](super::recover()) would ask QEMU for.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use limosa_channel::Uri;
use limosa_image::reference::is_object;
use limosa_migrate::Handle;
use limosa_pack::{Access, open_snapshot};
use limosa_snapshot::{Snapshot, WorkingSet};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::incoming::{Channels, Rendezvous};
use super::job::{RestoreJob, RestoreObserver};
use super::options::{RestoreMode, RestoreOptions};
use super::serve::{complete, serve_rest};
use crate::job::{JobContext, JobError};
use crate::job_record::{JobRecord, absolute_name};
use crate::monitor::{MigrationInfo, MigrationStatus, Monitor};
use crate::process::ProcessIdentity;
use crate::qmp::{Negotiated, Options, Qmp, QmpError};

/// How long QEMU may take to notice that its channel is gone before it gets `migrate-pause`.
const NOTICE_WITHIN: Duration = Duration::from_secs(5);
/// How long QEMU may not be ready to continue. It notices the end of its channel at once where it can be continued.
const LOST_AFTER: Duration = Duration::from_secs(15);
/// How often QEMU is asked whether it is ready to continue.
const ASK_EVERY: Duration = Duration::from_millis(5);

/// State that the watchdog of a lazy restore needs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct UnfinishedRestore {
    record: JobRecord,
    /// The snapshot's absolute path or its URL, as bytes: not every path is text.
    path: Vec<u8>,
    preempt: bool,
    listen: Option<String>,
    max_bandwidth: Option<NonZeroU64>,
    /// Of the destination's memory. QEMU reports them in its main loop, which may wait for the very page that limosa
    /// is about to send.
    page_sizes: BTreeMap<String, u64>,
    negotiated: Negotiated,
    /// Whether the pages of a working set are sent first.
    #[serde(default)]
    working_set: bool,
}

/// The snapshot that the guest of a dead limosa stands on, opened and locked while limosa still lived.
pub(crate) struct KeptSnapshot {
    unfinished: UnfinishedRestore,
    snapshot: Snapshot,
}

/// The outcome of an unfinished restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recovery {
    /// All its memory is there.
    Whole,
    /// The guest had not been started: nothing is lost but this QEMU.
    NeverRan,
    /// QEMU answers, and believes in a transfer that it cannot be made to take up again.
    Unended,
    /// QEMU is gone.
    Gone,
}

impl UnfinishedRestore {
    pub(super) fn new(job: &RestoreJob<'_>, record: &JobRecord, preempt: bool) -> Self {
        Self {
            record: record.clone(),
            path: absolute_name(job.path).into_os_string().into_vec(),
            preempt,
            listen: job.options.listen.as_ref().map(from_anywhere),
            max_bandwidth: job.watch.handle.control.max_bandwidth(),
            page_sizes: job.page_sizes.clone(),
            negotiated: job.monitor.qmp().negotiated(),
            working_set: job.options.working_set.is_some(),
        }
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(OsString::from_vec(self.path.clone()))
    }

    /// Whether the snapshot is an object of a store, where nothing can be locked.
    pub(crate) fn is_far(&self) -> bool {
        is_object(&self.path())
    }

    /// Opens the snapshot and locks it, so that nothing replaces it while the guest needs it.
    pub(crate) fn keep(self, access: &Access) -> Result<KeptSnapshot, JobError> {
        let snapshot = open_snapshot(&self.path(), access)?;
        if snapshot.id() != self.record.snapshot {
            return Err(JobError::refused("another snapshot has its name now; recover from the one that was restored"));
        }
        snapshot.lock_serving()?;
        Ok(KeptSnapshot { unfinished: self, snapshot })
    }
}

/// The watchdog works in another directory.
fn from_anywhere(uri: &Uri) -> String {
    match uri {
        Uri::Unix(path) => Uri::Unix(std::path::absolute(path).unwrap_or_else(|_| path.clone())).to_string(),
        other => other.to_string(),
    }
}

impl KeptSnapshot {
    /// The snapshot's path, for messages.
    pub(crate) fn path(&self) -> &Path {
        self.snapshot.path()
    }

    /// Continues where limosa was killed, over its connection to the monitor.
    pub(crate) fn resume(&self, socket: OwnedFd, monitor: &str, options: &Options) -> Result<Recovery, JobError> {
        match self.serve(socket, monitor, options) {
            Err(JobError::Qmp(error)) if error.is_gone() => Ok(Recovery::Gone),
            done => done,
        }
    }

    fn serve(&self, socket: OwnedFd, monitor: &str, options: &Options) -> Result<Recovery, JobError> {
        let begun = Instant::now();
        let monitor = Monitor::new(Qmp::adopt_unresponsive(socket, monitor, options, &self.unfinished.negotiated)?);
        let mut record = self.unfinished.record.clone();
        record.process = ProcessIdentity::own();
        let handle = Handle::new();
        handle.control.set_max_bandwidth(self.unfinished.max_bandwidth);
        let watch = JobContext::new(&handle, &|_| {});
        let restore = RestoreOptions {
            listen: self.unfinished.listen.as_deref().and_then(|uri| uri.parse::<Uri>().ok()),
            // A hint, which may be gone by now.
            working_set: self.unfinished.working_set.then(|| WorkingSet::of(&self.snapshot).ok().flatten()).flatten(),
            ..RestoreOptions::default()
        };
        // Never by a descriptor: QEMU takes one in its main loop alone, so waiting for that could wait for ever.
        let rendezvous = Rendezvous::new(&monitor, restore.listen.as_ref(), Channels::Several)?;
        match expect_again(&monitor, &rendezvous)? {
            Found::Expects => {}
            Found::Complete => {
                complete(&monitor, &record)?;
                return Ok(Recovery::Whole);
            }
            Found::NeverRan => return Ok(Recovery::NeverRan),
            Found::Unended => return Ok(Recovery::Unended),
        }
        record.update_later(&monitor)?;
        let job = RestoreJob {
            monitor: &monitor,
            snapshot: &self.snapshot,
            path: self.path(),
            options: &restore,
            watch,
            observer: &NoObserver,
            start_watchdog: &|| Ok(None),
            begun,
            runs: record.was_running,
            page_sizes: self.unfinished.page_sizes.clone(),
        };
        serve_rest(&job, &record, self.unfinished.preempt, rendezvous).map(|_| Recovery::Whole)
    }
}

/// The watchdog does not report when the guest runs.
struct NoObserver;

impl RestoreObserver for NoObserver {
    fn guest_ready(&self, _after: Duration, _mode: RestoreMode) {}
}

enum Found {
    /// QEMU listens for a source that continues.
    Expects,
    Complete,
    NeverRan,
    Unended,
}

/// Tells QEMU, out of band, to listen for a source that continues, as soon as it has noticed that it is not served.
fn expect_again(monitor: &Monitor, rendezvous: &Rendezvous<'_>) -> Result<Found, JobError> {
    let qmp = monitor.qmp();
    let begun = Instant::now();
    let (mut pause_sent, mut answers) = (false, false);
    // One question at a time: QEMU stops listening, even out of band, when too many wait for its main loop.
    let mut asked = qmp.send_command("query-migrate", Value::Null)?;
    loop {
        match monitor.migrate_recover(&rendezvous.uri()) {
            Ok(()) => return Ok(Found::Expects),
            Err(QmpError::Command { .. }) => {}
            Err(other) => return Err(other.into()),
        }
        if let Some(answer) = qmp.wait(&asked, ASK_EVERY)? {
            answers = true;
            match MigrationInfo::of(answer).status {
                MigrationStatus::Completed => return Ok(Found::Complete),
                MigrationStatus::None | MigrationStatus::Setup | MigrationStatus::Failed => return Ok(Found::NeverRan),
                _ => asked = qmp.send_command("query-migrate", Value::Null)?,
            }
        }
        // A channel whose other end is gone without a word (a dead host) looks alive to QEMU.
        if !pause_sent && begun.elapsed() > NOTICE_WITHIN {
            pause_sent = true;
            match monitor.migrate_pause() {
                Ok(()) | Err(QmpError::Command { .. }) => {}
                Err(other) => return Err(other.into()),
            }
        }
        if begun.elapsed() > LOST_AFTER {
            // One that answers nothing waits for memory that it needs to load the devices.
            return Ok(if answers { Found::Unended } else { Found::NeverRan });
        }
    }
}
