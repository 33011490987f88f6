//! The clones of a directory: listing, ending and removing them.
//!
//! The law: **one clone does not stop the others.** A damaged record, a clone that does not end or a file that cannot
//! be removed is an outcome of its own, and the rest is done.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use limosa_qemu::monitor::{Monitor, RunState};
use limosa_qemu::qmp::{MonitorAddress, Options, Qmp};
use limosa_qemu::{Liveness, ProcessIdentity};
use rustix::process::Signal;
use serde::Serialize;
use serde_json::Value;
use uuid::Uuid;

use crate::copies::remove_copies_but;
use crate::error::CloneError;
use crate::home::{Home, clear_left_over};
use crate::phase::Phase;
use crate::record::{LOG, MONITOR, Record, signal};

/// How long the monitor of a clone may take to greet when its state is asked.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);

/// The state of a clone now: its phase, and what its process says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Its files are made. A limosa is about to start it, or was killed before it did.
    Prepared,
    /// Its QEMU waits for the VM. Unless it waits in a pool, it ends by itself if the limosa that started it is killed.
    Waiting,
    /// Its QEMU has the VM, paused; limosa has not started it.
    Loaded,
    /// It runs, or was paused after it ran.
    Running,
    /// Its QEMU has ended.
    Ended,
    /// Its QEMU was started under another boot, on another host or in another container, and cannot be reached.
    Unknown,
    /// Its record cannot be read.
    Damaged,
}

/// A clone in a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ListedClone {
    /// Its name, which is that of its directory.
    pub name: String,
    /// Its directory.
    #[serde(rename = "dir")]
    pub folder: PathBuf,
    /// Its state.
    pub state: State,
    /// Whether a limosa is starting or removing it now.
    pub busy: bool,
    /// The socket of its monitor (QMP).
    pub monitor: PathBuf,
    /// The file with QEMU's output.
    pub log: PathBuf,
    /// Its record, unless it is damaged.
    #[serde(flatten)]
    pub record: Option<Record>,
    /// The reason why the record cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Options of [`stop`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StopOptions {
    /// Time that the guest has to shut down before its QEMU is ended; `None` does not ask the guest.
    pub power_down_timeout: Option<Duration>,
    /// Time that QEMU has to end.
    pub end_timeout: Duration,
}

impl Default for StopOptions {
    fn default() -> Self {
        Self { power_down_timeout: None, end_timeout: Duration::from_secs(5) }
    }
}

/// Options of [`remove`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct RemoveOptions {
    /// End a clone that runs, and remove one whose process cannot be reached.
    pub force: bool,
}

/// The outcome of removing a clone.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[non_exhaustive]
pub struct RemoveReport {
    /// Files in its directory that do not belong to it; the directory stays with them.
    pub kept: Vec<PathBuf>,
    /// Disks of the clone that something stands on; they stay as well.
    pub needed: Vec<DiskInUse>,
}

impl RemoveReport {
    /// Everything that stays.
    pub(crate) fn into_paths(self) -> Vec<PathBuf> {
        self.needed.into_iter().map(|needed| needed.disk).chain(self.kept).collect()
    }
}

/// A disk of a clone that something stands on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DiskInUse {
    /// The disk's file.
    pub disk: PathBuf,
    /// The snapshots that were saved with it, or the image above it.
    #[serde(rename = "by")]
    pub needed_by: Vec<PathBuf>,
}

/// The outcome of [`stop`] or [`remove`] for one clone.
#[derive(Debug)]
#[non_exhaustive]
pub struct CloneOutcome<T> {
    /// The clone's name.
    pub name: String,
    /// The outcome.
    pub result: Result<T, CloneError>,
}

/// Lists the clones of a directory, by number. One whose record is damaged is listed as [`State::Damaged`].
///
/// # Errors
/// The directory cannot be read.
pub fn list(folder: &Path) -> Result<Vec<ListedClone>, CloneError> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(CloneError::path("read", folder))? {
        paths.push(entry.map_err(CloneError::path("read", folder))?.path());
    }
    let hidden = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    paths.retain(|path| !hidden(path));
    let mut found: Vec<_> = paths.iter().filter_map(|path| listed(path)).collect();
    found.sort_by_key(|listed| (listed.record.as_ref().map(|record| record.number), listed.name.clone()));
    Ok(found)
}

/// Ends the VMs of these clones, side by side. The result is false for one that had ended before.
///
/// Each fails on its own: there is no such clone, its record is damaged, its process cannot be reached, or it does not
/// end.
#[must_use]
pub fn stop(folder: &Path, names: &[String], options: StopOptions) -> Vec<CloneOutcome<bool>> {
    side_by_side(names, &|name| stop_one(folder, name, options))
}

/// Removes these clones, side by side: what was made for them, what their command line put into their directories, and
/// the directories if nothing else is in them. A copy of a packed snapshot ([`copy_path`](crate::copy_path)) goes with
/// the last clone that has it as its memory.
///
/// Each fails on its own: there is no such clone, it runs, or something cannot be removed.
#[must_use]
pub fn remove(folder: &Path, names: &[String], options: RemoveOptions) -> Vec<CloneOutcome<RemoveReport>> {
    clear_left_over(folder);
    let done = side_by_side(names, &|name| remove_one(folder, name, options));
    if let Some(needed) = snapshots_of(folder) {
        remove_copies_but(&needed, folder);
    }
    done
}

/// The snapshots of the clones that are there; `None` as long as a record cannot be read.
fn snapshots_of(folder: &Path) -> Option<Vec<Uuid>> {
    let clones = list(folder).ok()?;
    let records = clones.iter().map(|clone| clone.record.as_ref()).collect::<Option<Vec<_>>>()?;
    Some(records.iter().filter_map(|record| record.snapshot.id).collect())
}

/// Calls `work` for each name, up to eight at a time, and returns the outcomes in the order of the names.
fn side_by_side<T: Send>(
    names: &[String],
    work: &(dyn Fn(&str) -> Result<T, CloneError> + Sync),
) -> Vec<CloneOutcome<T>> {
    /// Ending a VM is mostly waiting, for the guest or for the kernel to free its memory.
    const AT_A_TIME: usize = 8;
    let done = |name: &String| CloneOutcome { name: name.clone(), result: work(name) };
    let per_thread = names.len().div_ceil(AT_A_TIME).max(1);
    thread::scope(|scope| {
        let part = |names| scope.spawn(move || <[String]>::iter(names).map(done).collect::<Vec<_>>());
        let threads: Vec<_> = names.chunks(per_thread).map(part).collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// The clone in this directory; `None` if it is not one.
fn listed(path: &Path) -> Option<ListedClone> {
    let name = path.file_name()?.to_string_lossy().into_owned();
    let (monitor, log) = (path.join(MONITOR), path.join(LOG));
    let busy = matches!(Home::lock(path), Ok(None));
    let (state, record, error) = match Record::read(path) {
        Ok(None) => return None,
        Ok(Some(record)) => (state(&record, &monitor, busy), Some(record), None),
        Err(error) => (State::Damaged, None, Some(with_reason(&error))),
    };
    Some(ListedClone { name, folder: path.to_path_buf(), state, busy, monitor, log, record, error })
}

fn with_reason(error: &CloneError) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), |reason| format!("{error}: {reason}"))
}

/// The clone of that name, and its record.
fn find(folder: &Path, name: &str) -> Result<(ListedClone, Record), CloneError> {
    let path = folder.join(name);
    let unknown = || CloneError::NotFound { path: path.clone() };
    // A name is one part of a path, and no way out of the directory.
    if Path::new(name).components().count() != 1 || Path::new(name).file_name().is_none() {
        return Err(unknown());
    }
    let found = listed(&path).ok_or_else(unknown)?;
    match Record::read(&path)? {
        Some(record) => Ok((found, record)),
        None => Err(unknown()),
    }
}

fn state(record: &Record, monitor: &Path, busy: bool) -> State {
    let liveness = record.process.as_ref().map(ProcessIdentity::liveness);
    match (record.phase, liveness) {
        (Phase::Prepared, _) | (Phase::Waiting, None | Some(Liveness::Dead)) => State::Prepared,
        (Phase::Ended, _) | (Phase::Loaded | Phase::Running, None | Some(Liveness::Dead)) => State::Ended,
        // In another container its socket may answer all the same.
        (_, Some(Liveness::Elsewhere)) if std::os::unix::net::UnixStream::connect(monitor).is_err() => State::Unknown,
        // A record is at most one phase behind. The limosa that is at work has the monitor for itself.
        (Phase::Waiting, _) if busy => State::Waiting,
        (Phase::Waiting | Phase::Loaded, _) => match run_state(monitor) {
            Some(RunState::Inmigrate) | None if record.phase == Phase::Waiting => State::Waiting,
            None | Some(RunState::Prelaunch | RunState::Inmigrate | RunState::Paused) => State::Loaded,
            Some(_) => State::Running,
        },
        (Phase::Running, _) => State::Running,
    }
}

/// The run state of a QEMU; `None` if its monitor does not answer.
fn run_state(monitor: &Path) -> Option<RunState> {
    let options = Options { greeting_timeout: ANSWERED_WITHIN, ..Options::default() };
    let qmp = Qmp::connect(&MonitorAddress::Unix(monitor.to_path_buf()), &options).ok()?;
    Some(Monitor::new(qmp).status().ok()?.state)
}

fn stop_one(folder: &Path, name: &str, options: StopOptions) -> Result<bool, CloneError> {
    let (listed, record) = find(folder, name)?;
    let process = match (listed.state, record.process) {
        (State::Prepared | State::Ended, _) | (_, None) => return Ok(false),
        (State::Unknown, Some(process)) => {
            return Err(CloneError::Unreachable { path: listed.folder, pid: process.pid });
        }
        (_, Some(process)) => process,
    };
    let has_ended = |within| ended_within(&process, &listed.monitor, within);
    let connect = || Qmp::connect(&MonitorAddress::Unix(listed.monitor.clone()), &Options::default()).ok();
    if let Some(timeout) = options.power_down_timeout
        && let Some(qmp) = connect()
        && qmp.execute("system_powerdown", Value::Null).is_ok()
    {
        drop(qmp);
        if has_ended(timeout) {
            return Ok(end(&listed.folder));
        }
    }
    if let Some(qmp) = connect() {
        let _ = qmp.execute_within("quit", Value::Null, options.end_timeout);
    }
    let mut signals = [Signal::TERM, Signal::KILL].into_iter();
    while !has_ended(options.end_timeout) {
        match signals.next() {
            Some(next) => signal(&process, next),
            None => return Err(CloneError::Running { path: listed.folder, pid: process.pid }),
        }
    }
    Ok(end(&listed.folder))
}

/// Writes down that a clone has ended, if no other limosa has its record. Without that its process tells.
fn end(folder: &Path) -> bool {
    if let Ok(Some(home)) = Home::lock_soon(folder)
        && let Ok(Some(mut record)) = Record::read(folder)
        && record.phase != Phase::Ended
    {
        let _ = record.enter(Phase::Ended, home.path());
    }
    true
}

/// Waits until a process has ended. One of another container has ended when its monitor does not answer.
fn ended_within(process: &ProcessIdentity, monitor: &Path, timeout: Duration) -> bool {
    let end = Instant::now() + timeout;
    let lives = || match process.liveness() {
        Liveness::Alive => true,
        Liveness::Dead => false,
        Liveness::Elsewhere => std::os::unix::net::UnixStream::connect(monitor).is_ok(),
    };
    while lives() {
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}

fn remove_one(folder: &Path, name: &str, options: RemoveOptions) -> Result<RemoveReport, CloneError> {
    let (listed, record) = find(folder, name)?;
    let pid = record.process.as_ref().map_or(0, |process| process.pid);
    match listed.state {
        State::Waiting | State::Loaded | State::Running if options.force => {
            stop_one(folder, name, StopOptions::default())?;
        }
        State::Waiting | State::Loaded | State::Running => {
            return Err(CloneError::Running { path: listed.folder, pid });
        }
        State::Unknown if !options.force => return Err(CloneError::Unreachable { path: listed.folder, pid }),
        State::Unknown | State::Prepared | State::Ended | State::Damaged => {}
    }
    let busy = || CloneError::Busy { path: listed.folder.clone() };
    // A limosa that was starting it finds its QEMU ended, and cleans up in moments.
    let home = match Home::lock_soon(&listed.folder)? {
        Some(home) => home,
        None if listed.folder.exists() => return Err(busy()),
        None => return Ok(RemoveReport::default()),
    };
    // What was read before the lock may be of the moment before.
    let record = Record::read(home.path())?.unwrap_or(record);
    if record.is_alive() {
        return Err(CloneError::Running { path: listed.folder, pid });
    }
    home.remove(&record)
}
