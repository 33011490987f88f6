//! The clones of a directory: which there are, ending and removing them.
//!
//! The law: **exactly what was made is removed.** Other files in a clone's directory stay, and so does the directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use limosa_qemu::monitor::{Monitor, RunState};
use limosa_qemu::qmp::{MonitorAddress, Options, Qmp};
use limosa_qemu::{Liveness, ProcessIdentity};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde_json::Value;

use crate::error::CloneError;
use crate::record::{RECORD, Record};

/// How long the monitor of a clone that is starting may take to greet.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);

/// The state of a clone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It has its VM.
    Running,
    /// Its QEMU lives and waits for its VM; it ends by itself if the limosa that started it was killed.
    Starting,
    /// Its QEMU has ended.
    Ended,
    /// It never had its VM: the limosa that made it was killed.
    Unfinished,
}

/// A clone in a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Listed {
    /// Its directory.
    pub folder: PathBuf,
    /// Its state.
    pub state: State,
    /// Its record.
    #[serde(flatten)]
    pub record: Record,
}

/// Options of [`stop`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StopOptions {
    /// Time that the guest has to shut down before its QEMU is ended; `None` does not ask the guest.
    pub power_down: Option<Duration>,
    /// Time that QEMU has to end.
    pub end_within: Duration,
}

impl Default for StopOptions {
    fn default() -> Self {
        Self { power_down: None, end_within: Duration::from_secs(5) }
    }
}

/// The outcome of removing a clone.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[non_exhaustive]
pub struct Removed {
    /// Its name.
    pub name: String,
    /// Files in its directory that limosa did not make; the directory stays with them.
    pub kept: Vec<PathBuf>,
}

/// The clones of a directory, by number.
///
/// # Errors
/// The directory or a record cannot be read.
pub fn list(folder: &Path) -> Result<Vec<Listed>, CloneError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(CloneError::path("read", folder))? {
        let path = entry.map_err(CloneError::path("read", folder))?.path();
        if let Some(record) = Record::read(&path)? {
            found.push(Listed { state: state(&record), folder: path, record });
        }
    }
    found.sort_by_key(|listed| listed.record.number);
    Ok(found)
}

/// The clone of that name.
fn find(folder: &Path, name: &str) -> Result<Listed, CloneError> {
    let path = folder.join(name);
    let unknown = || CloneError::Unknown { path: path.clone() };
    // A name is one part of a path, and no way out of the directory.
    if Path::new(name).components().count() != 1 || Path::new(name).file_name().is_none() {
        return Err(unknown());
    }
    let record = Record::read(&path)?.ok_or_else(unknown)?;
    Ok(Listed { state: state(&record), folder: path, record })
}

fn state(record: &Record) -> State {
    let lives = record.process.as_ref().is_some_and(|process| match process.liveness() {
        Liveness::Alive => true,
        Liveness::Dead => false,
        // Under another boot its socket is dead; in another container or on another host it may answer, or not be seen.
        Liveness::Elsewhere => std::os::unix::net::UnixStream::connect(&record.monitor).is_ok(),
    });
    match (lives, record.loaded) {
        (true, true) => State::Running,
        // A limosa that is killed may have sent the last byte, and not have written so down.
        (true, false) if has_vm(record) => State::Running,
        (true, false) => State::Starting,
        (false, true) => State::Ended,
        (false, false) => State::Unfinished,
    }
}

/// Whether a QEMU reports that it has its VM. One that does not answer has none: it opens its monitor before it takes
/// it.
fn has_vm(record: &Record) -> bool {
    let options = Options { greeting: ANSWERED_WITHIN, ..Options::default() };
    let Ok(qmp) = Qmp::connect(&MonitorAddress::Unix(record.monitor.clone()), &options) else { return false };
    Monitor::new(qmp).status().is_ok_and(|status| status.state != RunState::Inmigrate)
}

/// Ends a clone's VM; nothing if it has ended. Returns whether it ran.
///
/// # Errors
/// There is no such clone, or it does not end.
pub fn stop(folder: &Path, name: &str, options: StopOptions) -> Result<bool, CloneError> {
    let listed = find(folder, name)?;
    let alive = matches!(listed.state, State::Running | State::Starting);
    let Some(process) = listed.record.process.as_ref().filter(|_| alive) else { return Ok(false) };
    let connect = || Qmp::connect(&MonitorAddress::Unix(listed.record.monitor.clone()), &Options::default()).ok();
    if let Some(timeout) = options.power_down
        && let Some(qmp) = connect()
        && qmp.execute("system_powerdown", Value::Null).is_ok()
    {
        drop(qmp);
        if ended_within(process, timeout) {
            return Ok(true);
        }
    }
    if let Some(qmp) = connect() {
        let _ = qmp.execute_within("quit", Value::Null, options.end_within);
    }
    let mut signals = [Signal::TERM, Signal::KILL].into_iter();
    while !ended_within(process, options.end_within) {
        let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
        match (signals.next(), pid) {
            // Still the very process: its start time is looked at right before.
            (Some(signal), Some(pid)) if process.liveness() == Liveness::Alive => {
                let _ = kill_process(pid, signal);
            }
            (Some(_), _) => {}
            (None, _) => return Err(CloneError::Running { path: listed.folder, pid: process.pid }),
        }
    }
    Ok(true)
}

fn ended_within(process: &ProcessIdentity, timeout: Duration) -> bool {
    let end = Instant::now() + timeout;
    while process.liveness() == Liveness::Alive {
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}

/// Removes an ended clone: its overlays, socket, log and record, and its directory if nothing else is in it.
///
/// # Errors
/// There is no such clone, it runs, or something cannot be removed.
pub fn remove(folder: &Path, name: &str) -> Result<Removed, CloneError> {
    let Listed { folder: path, state, record } = find(folder, name)?;
    if let (State::Running | State::Starting, Some(process)) = (state, &record.process) {
        return Err(CloneError::Running { path, pid: process.pid });
    }
    let own = [record.monitor.clone(), record.log.clone(), path.join(format!(".{RECORD}"))];
    let overlays = record.overlays.iter().map(|overlay| overlay.path.clone());
    // The record goes last: until then the rest can be found again.
    for file in own.into_iter().chain(overlays).chain([path.join(RECORD)]) {
        // Only files in the clone's own directory were made with it.
        if file.parent().and_then(|parent| fs::canonicalize(parent).ok()) != fs::canonicalize(&path).ok() {
            continue;
        }
        match fs::remove_file(&file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(CloneError::path("remove", file)(error));
            }
            _ => {}
        }
    }
    let kept = match fs::remove_dir(&path) {
        Ok(()) => Vec::new(),
        Err(_) => fs::read_dir(&path)
            .map_err(CloneError::path("read", &path))?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect(),
    };
    Ok(Removed { name: record.name, kept })
}
