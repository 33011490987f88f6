//! One clone is started.
//!
//! The order makes the crate's law true: the record and the overlays in a hidden directory, which then gets its name;
//! QEMU, whose process goes into the record; the proof of its memory and disks; then its VM, through a socket pair. If
//! limosa is killed in between, QEMU finds the end of its stream and ends.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::Channel;
use limosa_migrate::Handle;
use limosa_migrate::stored::PrecopyOptions;
use limosa_page::to_usize;
use limosa_qemu::monitor::Monitor;
use limosa_qemu::qmp::{MonitorAddress, Options, Qmp};
use limosa_qemu::{GuestClock, IncomingFrom, JobContext, JobError, Loader, ProcessIdentity, launch_detached};

use crate::error::CloneError;
use crate::fleet::{FailedClone, Fleet, StartedClone};
use crate::making::Making;
use crate::phase::Phase;
use crate::proof;
use crate::record::{LOG, MONITOR, name_of};

/// Time that QEMU has to open its monitor.
const GREETED_WITHIN: Duration = Duration::from_secs(60);
/// Interval between attempts to connect to it.
const CONNECT_EVERY: Duration = Duration::from_micros(500);
/// Bytes of QEMU's log in an error.
const LOG_SHOWN: u64 = 600;

/// Starts the clone of this number.
///
/// # Errors
/// A step failed. What belongs to the clone is removed, and its QEMU is ended.
pub(crate) fn start(fleet: &Fleet<'_>, number: u64) -> Result<StartedClone, FailedClone> {
    let begun = Instant::now();
    let mut making =
        Making::prepare(fleet, number, &name_of(number)).map_err(|error| FailedClone::new(number, error))?;
    let given = launch(fleet, &mut making).and_then(|qemu| give_vm(fleet, &mut making, qemu, begun));
    finish(fleet, making, given)
}

/// Keeps the clone that has its VM, or undoes it.
pub(crate) fn finish(
    fleet: &Fleet<'_>,
    making: Making,
    given: Result<Given, CloneError>,
) -> Result<StartedClone, FailedClone> {
    let number = making.record.number;
    match given {
        Ok(Given { loaded, running, state, sent_pages, clock }) => {
            let (folder, record, child) = making.keep();
            let name = name_of(number);
            let mapped_blocks = fleet.mapped.clone();
            Ok(StartedClone {
                name,
                folder,
                record,
                mapped_blocks,
                time_to_loaded: loaded,
                time_to_running: running,
                state,
                sent_pages,
                child,
                clock,
            })
        }
        Err(error) => Err(making.fail(error)),
    }
}

/// Times and counters of a clone that has its VM.
pub(crate) struct Given {
    loaded: Duration,
    running: Duration,
    state: String,
    sent_pages: u64,
    clock: Option<GuestClock>,
}

/// A QEMU that waits for its VM.
pub(crate) struct WaitingQemu {
    pub(crate) monitor: Monitor,
    /// Its output.
    pub(crate) log: File,
    /// The channel that it takes its VM from, unless it has to be passed one.
    pub(crate) channel: Option<Channel>,
}

/// Starts a QEMU that takes its VM from one channel, and ends with it.
fn launch(fleet: &Fleet<'_>, making: &mut Making) -> Result<WaitingQemu, CloneError> {
    let (near, peer) = Channel::pair().map_err(JobError::from)?;
    let qemu = launch_with(fleet, making, IncomingFrom::Stream(peer.as_fd()))?;
    Ok(WaitingQemu { channel: Some(near), ..qemu })
}

/// Starts a clone's QEMU and waits for its monitor. Its process is written down before that.
pub(crate) fn launch_with(
    fleet: &Fleet<'_>,
    making: &mut Making,
    incoming: IncomingFrom<'_>,
) -> Result<WaitingQemu, CloneError> {
    let folder = making.path().to_path_buf();
    let number = making.record.number;
    let args = fleet.template.fill(number, &name_of(number), &folder);
    let log = new_log(&folder)?;
    let child = launch_detached(&args, incoming, &fleet.inherited_fds(), &log, |pid| {
        making.record.process = ProcessIdentity::of(pid);
        making.enter(Phase::Waiting)
    })?;
    // Written down before it began, its process still had limosa's name.
    making.record.process = ProcessIdentity::of(child.id());
    making.child = Some(child);
    let monitor = connect(&folder.join(MONITOR), making.child.as_mut(), &log)?;
    Ok(WaitingQemu { monitor, log, channel: None })
}

/// Makes the file for QEMU's output.
fn new_log(folder: &Path) -> Result<File, CloneError> {
    let path = folder.join(LOG);
    File::options().read(true).append(true).create_new(true).open(&path).map_err(CloneError::path("create", &path))
}

/// Proves the memory and the disks of a QEMU that waits, gives it the VM, and starts it.
pub(crate) fn give_vm(
    fleet: &Fleet<'_>,
    making: &mut Making,
    qemu: WaitingQemu,
    begun: Instant,
) -> Result<Given, CloneError> {
    let WaitingQemu { monitor, log, channel } = qemu;
    let folder = making.path().to_path_buf();
    let handle = Handle::new();
    let vm = Loader::new(&monitor, JobContext::new(&handle, &|_| {}))?;
    // What it waits for has not come: it answers, and its memory and disks are as they will be.
    let in_place = proof::prove(fleet, &monitor, &folder)?;
    let channel = channel.map_or_else(|| vm.connect(), Ok)?;
    let options = PrecopyOptions { in_place, ..PrecopyOptions::default() };
    let stats = vm.send(fleet.snapshot, channel, None, options).map_err(|source| not_taken(source, &log))?;
    let loaded = begun.elapsed();
    making.enter(Phase::Loaded)?;
    let runs = fleet.options.run.runs(fleet.snapshot);
    let status = vm.start(runs).map_err(|source| CloneError::NotStarted { source, log: said(&log) })?;
    if runs {
        making.enter(Phase::Running)?;
    }
    let (state, running, sent_pages) = (status.state.to_string(), begun.elapsed(), stats.normal_pages);
    // After the clone has its phase: an agent that fails undoes nothing.
    let clock = (fleet.options.set_clock && status.running).then(|| GuestClock::begin(&monitor));
    Ok(Given { loaded, running, state, sent_pages, clock })
}

/// Connects to the monitor of a QEMU that was started just now.
pub(crate) fn connect(path: &Path, child: Option<&mut Child>, log: &File) -> Result<Monitor, CloneError> {
    let end = Instant::now() + GREETED_WITHIN;
    let address = MonitorAddress::Unix(path.to_path_buf());
    let mut child = child;
    loop {
        match Qmp::connect(&address, &Options { greeting_timeout: GREETED_WITHIN, ..Options::default() }) {
            Ok(qmp) => return Ok(Monitor::new(qmp)),
            Err(error) => {
                let has_ended = child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(Some(_))));
                if has_ended || Instant::now() >= end {
                    return Err(CloneError::NoMonitor { error: error.into(), log: said(log) });
                }
                thread::sleep(CONNECT_EVERY);
            }
        }
    }
}

fn not_taken(source: JobError, log: &File) -> CloneError {
    // QEMU says why right before it ends.
    thread::sleep(Duration::from_millis(50));
    CloneError::LoadFailed { error: source, log: said(log) }
}

/// Returns the end of QEMU's log, in one line.
fn said(log: &File) -> String {
    let length = log.metadata().map_or(0, |found| found.len());
    let start = length.saturating_sub(LOG_SHOWN);
    let mut bytes = vec![0; to_usize(length - start)];
    let got = log.read_at(&mut bytes, start).unwrap_or(0);
    bytes.truncate(got);
    String::from_utf8_lossy(&bytes).trim().replace('\n', " | ")
}
