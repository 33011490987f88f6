//! One clone is started.
//!
//! The order makes the crate's law true: the record and the overlays in a hidden directory, which then gets its name;
//! QEMU, whose process goes into the record; the proof of its memory and disks; then its VM, through a socket pair. If
//! limosa is killed in between, QEMU finds the end of its stream and ends.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::Channel;
use limosa_migrate::stored::{PrecopyOptions, PrecopySource};
use limosa_migrate::{Handle, MigrateError};
use limosa_qemu::monitor::{Monitor, RunState};
use limosa_qemu::qmp::{MonitorAddress, Options, Qmp};
use limosa_qemu::{JobError, ProcessIdentity, launch_from};

use crate::command_line::OverlayPlan;
use crate::error::CloneError;
use crate::fleet::{Failure, Fleet, Started};
use crate::home::Home;
use crate::overlay;
use crate::phase::Phase;
use crate::proof;
use crate::record::{LOG, MONITOR, OverlayRecord, Record};

/// Time that QEMU has to open its monitor, and then to load the devices.
const LOADED_WITHIN: Duration = Duration::from_secs(60);
/// Interval between questions to QEMU whether it runs.
const ASK_EVERY: Duration = Duration::from_micros(500);
/// Bytes of QEMU's log in an error.
const LOG_SHOWN: u64 = 600;
/// A unix socket's path has at most this many bytes (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// A clone that is being made. Dropping it ends its QEMU and removes what belongs to it.
struct Making {
    /// `None` once the clone is kept or removed.
    home: Option<Home>,
    record: Record,
    child: Option<Child>,
}

impl Making {
    fn path(&self) -> &Path {
        self.home.as_ref().map_or(Path::new(""), Home::path)
    }

    fn enter(&mut self, phase: Phase) -> Result<(), CloneError> {
        let folder = self.path().to_path_buf();
        self.record.enter(phase, &folder)
    }

    /// Keeps the clone.
    fn keep(mut self) -> (PathBuf, Record, Option<Child>) {
        let folder = self.path().to_path_buf();
        self.home = None;
        (folder, self.record.clone(), self.child.take())
    }

    /// Ends its QEMU and removes what belongs to the clone. Returns the files that stay.
    fn undo(&mut self) -> Vec<PathBuf> {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let Some(home) = self.home.take() else { return Vec::new() };
        let folder = home.path().to_path_buf();
        home.remove(&self.record).unwrap_or_else(|_| vec![folder])
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        self.undo();
    }
}

/// Starts the clone of this number.
///
/// # Errors
/// A step failed. What belongs to the clone is removed, and its QEMU is ended.
pub(crate) fn start(fleet: &Fleet<'_>, number: u64) -> Result<Started, Failure> {
    let begun = Instant::now();
    let name = format!("{number:03}");
    let failed = |error, left| Failure { number, error: Box::new(error), left };
    let mut making = prepare(fleet, number, &name).map_err(|error| failed(error, Vec::new()))?;
    match load(fleet, &mut making, &name, begun) {
        Ok(loaded) => {
            let (folder, record, child) = making.keep();
            let Loaded { loaded, running, state, sent_pages } = loaded;
            let mapped_blocks = fleet.mapped.clone();
            Ok(Started { name, folder, record, mapped_blocks, loaded, running, state, sent_pages, child })
        }
        Err(error) => Err(failed(error, making.undo())),
    }
}

/// Makes a clone's files: its record, then its overlays, all under a hidden name; then its own name.
fn prepare(fleet: &Fleet<'_>, number: u64, name: &str) -> Result<Making, CloneError> {
    let folder = fleet.folder.join(name);
    let monitor = folder.join(MONITOR);
    if monitor.as_os_str().len() > SOCKET_PATH_MAX {
        let why = std::io::Error::other(format!("a unix socket's path has at most {SOCKET_PATH_MAX} bytes"));
        return Err(CloneError::path("listen at", monitor)(why));
    }
    let home = Home::new(&fleet.folder, name)?;
    let overlay = |plan: &OverlayPlan| OverlayRecord { name: (&plan.name).into(), backing: plan.disk.path.clone() };
    let overlays = fleet.overlays.iter().map(overlay).collect();
    let outputs = fleet.template.outputs(number, name);
    let record = Record::prepared(number, fleet.identity.clone(), overlays, outputs);
    let mut making = Making { home: Some(home), record, child: None };
    // Written down before they are made, so that what a kill leaves can be removed.
    making.record.write(making.path())?;
    for plan in &fleet.overlays {
        overlay::make(&making.path().join(&plan.name), &plan.disk, fleet.options.backing)?;
    }
    if let Some(home) = &mut making.home {
        home.publish(name)?;
    }
    Ok(making)
}

/// Times and counters of a clone that runs.
struct Loaded {
    loaded: Duration,
    running: Duration,
    state: String,
    sent_pages: u64,
}

/// Starts QEMU, proves its memory and its disks, and gives it the VM.
fn load(fleet: &Fleet<'_>, making: &mut Making, name: &str, begun: Instant) -> Result<Loaded, CloneError> {
    let folder = making.path().to_path_buf();
    let args = fleet.template.fill(making.record.number, name, &folder);
    let log_path = folder.join(LOG);
    let log = File::create_new(&log_path).map_err(CloneError::path("create", &log_path))?;
    let (near, peer) = Channel::pair().map_err(JobError::from)?;
    let inherited_fds: &[_] = if fleet.is_mapped() { &[fleet.mapping.as_fd()] } else { &[] };
    let child = launch_from(&args, peer.as_fd(), inherited_fds, &log)?;
    drop(peer);
    making.record.process = ProcessIdentity::of(child.id());
    making.child = Some(child);
    making.enter(Phase::Waiting)?;
    let monitor = connect(&folder.join(MONITOR), making.child.as_mut(), &log)?;
    // What it waits for has not come: it answers, and its memory and disks are as they will be.
    let in_place = proof::prove(fleet, &monitor, &folder)?;
    let options = PrecopyOptions { in_place, answer_timeout: LOADED_WITHIN, ..PrecopyOptions::default() };
    let stats = PrecopySource::new(fleet.snapshot, near, &Handle::new())
        .options(options)
        .run()
        .map_err(|source| not_taken(source, &log))?;
    let loaded = begun.elapsed();
    making.enter(Phase::Loaded)?;
    let state = wait_started(&monitor, &log)?;
    making.enter(Phase::Running)?;
    Ok(Loaded { loaded, running: begun.elapsed(), state, sent_pages: stats.normal_pages })
}

/// Connects to the monitor of a QEMU that was started just now.
fn connect(path: &Path, child: Option<&mut Child>, log: &File) -> Result<Monitor, CloneError> {
    let end = Instant::now() + LOADED_WITHIN;
    let address = MonitorAddress::Unix(path.to_path_buf());
    let mut child = child;
    loop {
        match Qmp::connect(&address, &Options { greeting: LOADED_WITHIN, ..Options::default() }) {
            Ok(qmp) => return Ok(Monitor::new(qmp)),
            Err(error) => {
                let has_ended = child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(Some(_))));
                if has_ended || Instant::now() >= end {
                    return Err(CloneError::NoMonitor { source: error.into(), log: said(log) });
                }
                thread::sleep(ASK_EVERY);
            }
        }
    }
}

/// Waits until the VM leaves the state of an incoming migration.
fn wait_started(monitor: &Monitor, log: &File) -> Result<String, CloneError> {
    let end = Instant::now() + LOADED_WITHIN;
    loop {
        let status = monitor.status().map_err(JobError::from)?;
        match status.state {
            RunState::Inmigrate if Instant::now() < end => thread::sleep(ASK_EVERY),
            // It has the memory and could not take its disks.
            RunState::Inmigrate => {
                return Err(CloneError::NotRunning { state: status.state.to_string(), log: said(log) });
            }
            state => return Ok(state.to_string()),
        }
    }
}

fn not_taken(source: MigrateError, log: &File) -> CloneError {
    // QEMU says why right before it ends.
    thread::sleep(Duration::from_millis(50));
    CloneError::NotTaken { source, log: said(log) }
}

/// Returns the end of QEMU's log, in one line.
fn said(log: &File) -> String {
    let length = log.metadata().map_or(0, |found| found.len());
    let start = length.saturating_sub(LOG_SHOWN);
    let mut bytes = vec![0; usize::try_from(length - start).unwrap_or(0)];
    let got = log.read_at(&mut bytes, start).unwrap_or(0);
    bytes.truncate(got);
    String::from_utf8_lossy(&bytes).trim().replace('\n', " | ")
}
