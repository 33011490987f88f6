//! One clone is started.
//!
//! The order makes the crate's law true: the directory, the record, the overlays; QEMU, whose process goes into the
//! record; the proof of its memory and disks; then its VM, through a socket pair. If limosa is killed in between, QEMU
//! finds the end of its stream and ends.

use std::fs::{self, DirBuilder, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use limosa_channel::Channel;
use limosa_migrate::stored::{PrecopyOptions, PrecopySource};
use limosa_migrate::{Handle, MigrateError};
use limosa_qemu::monitor::{Monitor, RunState};
use limosa_qemu::qmp::{MonitorAddress, Options, Qmp};
use limosa_qemu::{JobError, ProcessIdentity, launch_from};

use crate::error::CloneError;
use crate::fleet::{Fleet, Started};
use crate::overlay;
use crate::proof;
use crate::record::{OverlayRecord, RECORD, Record};

/// Time that QEMU has to open its monitor, and then to load the devices.
const LOADED_WITHIN: Duration = Duration::from_secs(60);
/// Interval between questions to QEMU whether it runs.
const ASK_EVERY: Duration = Duration::from_micros(500);
/// Bytes of QEMU's log in an error.
const LOG_SHOWN: u64 = 600;
/// A unix socket's path has at most this many bytes (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// Files and the process made for a clone; removed on drop, unless kept.
struct Made {
    folder: PathBuf,
    files: Vec<PathBuf>,
    child: Option<Child>,
}

impl Made {
    fn new(folder: &Path) -> Result<Self, CloneError> {
        match DirBuilder::new().mode(0o700).create(folder) {
            Ok(()) => Ok(Self { folder: folder.to_path_buf(), files: Vec::new(), child: None }),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                Err(CloneError::Exists { path: folder.to_path_buf() })
            }
            Err(error) => Err(CloneError::path("make", folder)(error)),
        }
    }

    /// Returns the path of a file in the directory, which is removed if the clone is not kept.
    fn file(&mut self, name: &str) -> PathBuf {
        let path = self.folder.join(name);
        self.files.push(path.clone());
        path
    }

    /// The clone is there.
    fn keep(mut self) -> Option<Child> {
        self.files.clear();
        self.folder = PathBuf::new();
        self.child.take()
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
        for file in &self.files {
            let _ = fs::remove_file(file);
        }
        if !self.folder.as_os_str().is_empty() {
            let _ = fs::remove_dir(&self.folder);
        }
    }
}

/// Starts the clone of this number.
pub(crate) fn start(fleet: &Fleet<'_>, number: u64) -> Result<Started, CloneError> {
    let begun = Instant::now();
    let name = format!("{number:03}");
    let folder = fleet.folder.join(&name);
    let mut made = Made::new(&folder)?;
    made.files.extend([folder.join(RECORD), folder.join(format!(".{RECORD}"))]);
    let monitor = made.file("qmp");
    let log_path = made.file("log");
    if monitor.as_os_str().len() > SOCKET_PATH_MAX {
        let why = std::io::Error::other(format!("a unix socket's path has at most {SOCKET_PATH_MAX} bytes"));
        return Err(CloneError::path("listen at", monitor)(why));
    }
    let mut record = Record {
        name: name.clone(),
        number,
        snapshot: fleet.snapshot_path.clone(),
        snapshot_id: fleet.snapshot.manifest().map(|manifest| manifest.id),
        process: None,
        monitor: monitor.clone(),
        log: log_path.clone(),
        // Written down before they are made, so that what a kill leaves can be removed.
        overlays: fleet
            .overlays
            .iter()
            .map(|plan| OverlayRecord { path: folder.join(&plan.name), backing: plan.disk.path.clone() })
            .collect(),
        loaded: false,
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs()),
    };
    record.write(&folder)?;
    for plan in &fleet.overlays {
        let path = made.file(&plan.name);
        overlay::make(&path, &plan.disk, fleet.options.backing)?;
    }
    let args = fleet.template.fill(number, &name, &folder);
    let log = File::create_new(&log_path).map_err(CloneError::path("create", &log_path))?;
    let (near, peer) = Channel::pair().map_err(JobError::from)?;
    let inherited_fds: &[_] = if fleet.is_mapped() { &[fleet.mapping.as_fd()] } else { &[] };
    let child = launch_from(&args, peer.as_fd(), inherited_fds, &log)?;
    drop(peer);
    record.process = ProcessIdentity::of(child.id());
    made.child = Some(child);
    record.write(&folder)?;
    let monitor = connect(&monitor, made.child.as_mut(), &log)?;
    // What it waits for has not come: it answers, and its memory and disks are as they will be.
    let in_place = proof::prove(fleet, &monitor, &folder)?;
    let options = PrecopyOptions { in_place, answer_timeout: LOADED_WITHIN, ..PrecopyOptions::default() };
    let stats = PrecopySource::new(fleet.snapshot, near, &Handle::new())
        .options(options)
        .run()
        .map_err(|source| not_taken(source, &log))?;
    let loaded = begun.elapsed();
    let state = wait_started(&monitor, &log)?;
    record.loaded = true;
    record.write(&folder)?;
    let child = made.keep();
    Ok(Started {
        record,
        mapped_blocks: fleet.mapped.clone(),
        loaded,
        running: begun.elapsed(),
        state,
        sent_pages: stats.normal_pages,
        child,
    })
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
