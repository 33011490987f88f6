//! Saving a VM: from a running QEMU to a published file, with the VM going on.
//!
//! The law: **whatever happens, the VM is left as it was found.** Everything that the job changes in QEMU is written down
//! in QEMU first (the job's marker), so that this code, the guard, or `limosa resume` can undo it; and the file has no
//! name until it is whole, so a failed save leaves none.
//!
//! Order, when the VM goes on: the last byte arrives, QEMU is answered, the VM is continued, *then* the file is made
//! durable and published. The VM's downtime holds no disk. With [`SaveOptions::stop`] the file is durable and published
//! before QEMU is answered, because from then on it may be all that is left of the VM.
//!
//! With [`SaveOptions::background`] the VM stands still at the beginning only, for its devices, and QEMU asks for nothing at
//! the end, which cannot be undone. The snapshot is of the moment at which the save began.

mod background;
mod by_file;
mod by_socket;
mod connection;
mod hints;
mod overlay;
mod preflight;
mod rounds;
mod watcher;

use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Counters, Uri};
use limosa_snapshot::{Durability, Manifest, PendingFile, Published, Via, WriteOptions};
use limosa_stream::multifd::Compression;

use crate::guard::{Guard, Held};
use crate::job::{JobError, Watch};
use crate::marker::{JobKind, JobMarker, JobPhase, MarkerError, VmAfter};
use crate::monitor::{Monitor, RunState, SettingChange, Settings};
use crate::qmp::QmpError;
use crate::remedy::Remedy;
use crate::takeover::{Actor, abandoned, take_over_holding};
pub(crate) use by_file::file_channels;
use preflight::Preflight;

/// How long undoing a failed save may take: a migration has to end first.
const UNDO_WITHIN: Duration = Duration::from_secs(60);

/// How long QEMU may take to leave the VM as it is to be after the save: for one that hangs, not a measure.
const SETTLES_WITHIN: Duration = Duration::from_secs(10);

/// Who writes the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Route {
    /// QEMU itself where it can (9.0 or newer, monitor on this host), else limosa.
    #[default]
    Auto,
    /// QEMU writes the file through a descriptor that it is passed.
    File,
    /// QEMU sends its migration stream and limosa writes the file.
    Socket,
}

/// What to do about a VM that changes its memory faster than it is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnTimeout {
    /// Stop the VM until it is saved; the rest of its memory goes at full speed.
    Pause,
    /// Give up; the VM goes on.
    Cancel,
}

/// What to do about writable disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DiskPolicy {
    /// Refuse where memory and disks could be of different instants.
    #[default]
    Check,
    /// The caller keeps them consistent.
    Ignore,
    /// A save freezes them at its instant and has the VM go on with overlays over them. A restore checks as with `Check`.
    Overlay,
}

/// How a VM is to be saved.
#[derive(Debug, Clone)]
pub struct SaveOptions {
    /// Who writes the pages.
    pub route: Route,
    /// Where QEMU connects when limosa writes; `None`: a socket pair passed through the monitor.
    pub listen: Option<Uri>,
    /// Channels beside the main one (QEMU's `multifd-channels`): to write the file with, or to send on. `None`: as many as
    /// suit a file; everything on one channel.
    pub channels: Option<u8>,
    /// How pages are compressed on these channels (QEMU's `multifd-compression`).
    pub compression: Compression,
    /// Leave the VM stopped.
    pub stop: bool,
    /// Have QEMU protect the memory against writing and save it while the VM goes on.
    pub background: bool,
    /// Replace the file if it is there.
    pub replace: bool,
    /// Record checksums.
    pub checksum: bool,
    /// QEMU's `downtime-limit`; `None` leaves it as it is.
    pub downtime: Option<Duration>,
    /// How long the VM may run on while it is saved, and what happens then.
    pub timeout: Option<(Duration, OnTimeout)>,
    /// About writable disks.
    pub disks: DiskPolicy,
    /// Where overlays go; `None`: each beside its disk.
    pub overlay_dir: Option<PathBuf>,
    /// Whether to wait until a power cut cannot lose the file.
    pub durability: Durability,
    /// How long memory goes out slowly at the beginning until QEMU has heard which pages the guest's balloon hints as free; `None`:
    /// it goes as fast as it may from the beginning, and what has left before the list has come is stored.
    pub hint_wait: Option<Duration>,
}

impl SaveOptions {
    /// Refuses what contradicts itself.
    fn check(&self) -> Result<(), JobError> {
        let refused = |why: &str, remedy: Remedy| Err(JobError::refused(why, remedy));
        if self.background && self.stop {
            return refused("a VM that is saved in the background goes on", Remedy::BackgroundOrStop);
        }
        if self.background && self.hint_wait.is_some() {
            return refused("QEMU asks no balloon for free pages in the background", Remedy::BackgroundOrHintWait);
        }
        if self.channels.is_none() && self.compression != Compression::None {
            return refused("only pages on channels of their own are compressed", Remedy::Channels);
        }
        if self.background && self.channels.is_some() {
            return refused("QEMU saves on one channel in the background", Remedy::BackgroundOrChannels);
        }
        if self.overlay_dir.is_some() && self.disks != DiskPolicy::Overlay {
            return refused("a folder for overlays has no meaning without overlays", Remedy::Overlays);
        }
        if self.disks == DiskPolicy::Overlay && self.stop {
            return refused(
                "a VM that stays stopped changes its disks no more, and needs no overlays over them",
                Remedy::OverlaysOrStop,
            );
        }
        if self.disks == DiskPolicy::Overlay && self.background {
            return refused(
                "in the background memory is saved as it was at the beginning, and QEMU cannot freeze the disks there",
                Remedy::OverlaysOrBackground,
            );
        }
        if self.background && matches!(self.timeout, Some((_, OnTimeout::Pause))) {
            return refused(
                "a background save is not late because the VM changes its memory: stopping it would not help",
                Remedy::CancelOnTimeout,
            );
        }
        Ok(())
    }

    /// Whether the same save is possible in the background.
    fn allows_background(&self) -> bool {
        let here = !self.background && !self.stop && self.disks != DiskPolicy::Overlay;
        here && self.channels.is_none() && self.route != Route::File
    }

    /// Whether memory goes out slowly at first. QEMU does not ask the balloon of a stopped VM.
    fn waits_for_hints(&self, before: &Preflight) -> bool {
        self.hint_wait.is_some() && before.was_running
    }
}

/// What a save came to.
#[derive(Debug)]
#[non_exhaustive]
pub struct SaveReport {
    /// The file that now has its name.
    pub published: Published,
    /// Who wrote it.
    pub via: Via,
    /// How long the VM stood still; `None` if it was not running, or was left stopped.
    pub downtime: Option<Duration>,
    /// The state that the VM is in now.
    pub vm_state: String,
    /// From the first command to the VM going on.
    pub to_vm_running: Duration,
    /// From the first command to the published file.
    pub elapsed: Duration,
    /// Of the channel, when limosa wrote.
    pub channel: Option<Counters>,
    /// Of the file, when limosa wrote.
    pub file: Option<Counters>,
    /// How often QEMU went over its dirty log; `None` if it did not say.
    pub rounds: Option<u64>,
}

/// A saved VM before its file is published.
struct Saved {
    manifest: Manifest,
    downtime: Option<Duration>,
    rounds: Option<u64>,
    to_vm_running: Duration,
}

/// Saves the VM behind `monitor` into `target`.
///
/// `guarded` starts the guard of the job, and may decline.
///
/// # Errors
/// On `Err` there is no file, or the one that was there before, and the VM is as it was found. If even that could not be
/// achieved (QEMU does not answer), the marker stays in QEMU and `limosa resume` finishes.
pub fn save(
    monitor: &Monitor,
    target: &Path,
    options: &SaveOptions,
    watch: Watch<'_>,
    guarded: impl FnOnce() -> Result<Option<Guard>, JobError> + Send,
) -> Result<SaveReport, JobError> {
    let begun = Instant::now();
    // The guard takes some milliseconds to come up; the VM is looked at meanwhile. It stands before there is a record of the
    // job, because a record without a guard would outlive a kill; and without a record it does nothing.
    let (prepared, guard) = thread::scope(|scope| {
        let guard = scope.spawn(guarded);
        let prepared = prepare(monitor, target, options, watch);
        (prepared, guard.join().unwrap_or(Ok(None)))
    });
    let mut guard = guard?;
    let (before, route, pending, change) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            if let Some(guard) = guard {
                let _ = guard.finish();
            }
            return Err(error);
        }
    };
    tracing::info!(
        "saving by {}; QEMU's settings that change: {:?}",
        if route == Route::File { "file" } else { "socket" },
        change.set
    );
    let mut marker = JobMarker::new(JobKind::Save, before.manifest.id, target, before.was_running, change.undo.clone())
        .with_overlays(overlay::records(&before.overlays));
    if options.stop {
        marker.vm_after = VmAfter::Stopped;
    }
    marker.descriptors.push(connection::DESCRIPTOR.to_owned());
    if let Err(error) = marker.place(monitor) {
        if let Some(guard) = guard {
            let _ = guard.finish();
        }
        return Err(error.into());
    }
    if let (Some(guard), Some(path)) = (&mut guard, pending.temporary_path()) {
        // A guard that died already is noticed at the end; until then the save is worth going on with.
        let _ = guard.temporary(Some(&path));
    }
    let job = SaveJob { monitor, options, watch, before, begun };
    let held = Held::default();
    let mut hold = |end: BorrowedFd<'_>| {
        held.hold_too(end);
        if let Some(guard) = &mut guard {
            // One that has died holds nothing; as above.
            let _ = guard.hold(end);
        }
    };
    let done = monitor
        .set(&change.set)
        .map_err(|error| job.setup_error(error))
        .and_then(|()| overlay::prepare(monitor, &job.before.overlays))
        .and_then(|()| match route {
            Route::File => by_file::run(&job, pending, &mut marker),
            _ => by_socket::run(&job, pending, &mut marker, &mut hold),
        });
    if let (Some(guard), Err(error)) = (&mut guard, &done)
        && !error.is_unanswered()
    {
        // As long as this process sees to it, it is the one to hold them.
        let _ = guard.let_go();
    }
    let tidied = match &done {
        Ok(_) => put_back(monitor, &marker).unwrap_or(false),
        Err(error) if error.is_unanswered() => false,
        Err(_) => match take_over_holding(&held, monitor, &marker, Actor::Guard, UNDO_WITHIN) {
            Ok(undone) => {
                undone.remarks.iter().for_each(|remark| tracing::info!("{remark}"));
                undone.notices.iter().for_each(|notice| (watch.notice)(notice));
                undone.outcome.ends_job()
            }
            // Whatever was changed in it went with QEMU.
            Err(MarkerError::Qmp(gone)) if gone.is_gone() => {
                abandoned(&marker).iter().for_each(|notice| (watch.notice)(notice));
                true
            }
            Err(_) => false,
        },
    };
    match guard {
        Some(guard) if tidied => guard.dismiss(watch.notice),
        Some(guard) => {
            (watch.notice)(&format!(
                "QEMU could not be set right yet; process {} goes on trying, and so does a resume of this VM",
                guard.pid()
            ));
            guard.hand_over();
        }
        None => {}
    }
    done
}

/// After a save: puts the settings back and takes the record of the job away. False if QEMU does not let go of the migration,
/// so that its settings must stay.
fn put_back(monitor: &Monitor, marker: &JobMarker) -> Result<bool, MarkerError> {
    if !monitor.wait_released(UNDO_WITHIN)? {
        return Ok(false);
    }
    monitor.put_back(&marker.undo)?;
    JobMarker::remove(monitor)?;
    Ok(true)
}

/// Everything that only looks: whether the VM can be saved, how, into what, and what has to be changed for it.
fn prepare(
    monitor: &Monitor,
    target: &Path,
    options: &SaveOptions,
    watch: Watch<'_>,
) -> Result<(Preflight, Route, PendingFile, SettingChange), JobError> {
    JobMarker::expect_none(monitor)?;
    options.check()?;
    let before = Preflight::check(monitor, options)?;
    let route = route(monitor, options)?;
    let pending = PendingFile::create(target, options.replace)?;
    let current = monitor.settings()?;
    if options.background {
        background::check(monitor, &current)?;
    }
    let channels = match route {
        Route::File => by_file::channels(monitor, &pending, options.channels, watch.notice)?,
        _ => options.channels.map(usize::from),
    };
    let bandwidth = watch.control.max_bandwidth();
    let bandwidth = if options.waits_for_hints(&before) { hints::slow(bandwidth) } else { bandwidth };
    let mut wish = settings(route, options, channels, !before.overlays.is_empty(), bandwidth);
    if route == Route::Socket
        && options.channels.is_some()
        && let Some(how) = current.parameters.get("zero-page-detection").filter(|how| **how != "none")
    {
        // On channels or beside them, both is understood: it stays as the machine type or the user has it.
        wish = wish.parameter("zero-page-detection", how.clone());
    }
    if options.downtime.is_none()
        && let Some(limit) = current.parameters.get("downtime-limit")
    {
        // Not changed yet, but a time-out may: this has it put back.
        wish = wish.parameter("downtime-limit", limit.clone());
    }
    Ok((before, route, pending, current.change_to(&wish)))
}

/// What both routes work with.
struct SaveJob<'a> {
    monitor: &'a Monitor,
    options: &'a SaveOptions,
    watch: Watch<'a>,
    before: Preflight,
    begun: Instant,
}

impl SaveJob<'_> {
    /// Whether the VM is to run when it has been saved.
    fn goes_on(&self) -> bool {
        self.before.was_running && !self.options.stop
    }

    /// What QEMU says against the migration before it begins, as a person should read it.
    fn setup_error(&self, error: QmpError) -> JobError {
        if self.options.background { background::explain(error) } else { error.into() }
    }

    fn write_options(&self) -> WriteOptions {
        WriteOptions { durability: self.options.durability, checksum: self.options.checksum, write_behind: true }
    }

    /// Writes down that the file is about to get its name, if it then matters whether it has.
    fn publishing(&self, marker: &mut JobMarker) -> Result<(), JobError> {
        if marker.overlays.is_empty() {
            return Ok(());
        }
        marker.phase = JobPhase::Publishing;
        Ok(marker.update(self.monitor)?)
    }

    /// Writes down that the file is there, for a process that might have to take over.
    fn published(&self, marker: &mut JobMarker, file: &Published) -> Result<(), JobError> {
        marker.phase = JobPhase::Published;
        marker.update(self.monitor).map_err(|error| afterwards(file, error.into()))
    }

    /// Decides whether the VM is to run again: not if it stopped for a reason of its own while it was saved. `state` is the
    /// one that it was in when it stopped for the save.
    fn runs_again(&self, state: &RunState, marker: &mut JobMarker) -> Result<bool, JobError> {
        if self.before.was_running && !is_live(state) {
            (self.watch.notice)(&format!("the VM has stopped by itself meanwhile ({state}) and is left so"));
            marker.was_running = false;
            marker.update(self.monitor)?;
        }
        Ok(self.goes_on() && marker.was_running)
    }

    /// The VM's state when QEMU is done with the migration: it says `completed` a moment before it leaves `finish-migrate`,
    /// and until then refuses every further job of the VM.
    fn settled_state(&self) -> String {
        let limit = Instant::now() + SETTLES_WITHIN;
        loop {
            match self.monitor.status() {
                Ok(status) if status.state == RunState::FinishMigrate && Instant::now() < limit => {
                    thread::sleep(Duration::from_millis(1));
                }
                Ok(status) => return status.state.to_string(),
                Err(_) => return "unknown".into(),
            }
        }
    }

    fn report(&self, published: Published, via: Via, saved: Saved) -> SaveReport {
        SaveReport {
            published,
            via,
            downtime: saved.downtime,
            vm_state: self.settled_state(),
            to_vm_running: saved.to_vm_running,
            elapsed: self.begun.elapsed(),
            channel: None,
            file: None,
            rounds: saved.rounds,
        }
    }
}

/// Whether a VM in this state goes on by itself once its CPUs may run.
fn is_live(state: &RunState) -> bool {
    matches!(state, RunState::Running | RunState::Suspended)
}

fn afterwards(file: &Published, error: JobError) -> JobError {
    JobError::Afterwards { path: file.path.clone(), source: Box::new(error) }
}

fn route(monitor: &Monitor, options: &SaveOptions) -> Result<Route, JobError> {
    let unable = || {
        if monitor.version() < crate::qmp::Version::new(9, 0, 0) {
            Some(format!("QEMU {} cannot write mapped-ram files; 9.0 and newer can", monitor.version()))
        } else if !monitor.qmp().passes_descriptors() {
            Some("a monitor over tcp cannot be passed descriptors".into())
        } else {
            None
        }
    };
    match options.route {
        Route::File if options.background => Err(JobError::refused(
            "QEMU cannot write a file of a VM that goes on meanwhile: it would come out empty",
            Remedy::BackgroundBySocket,
        )),
        Route::File if options.compression != Compression::None => {
            Err(JobError::refused("QEMU compresses nothing in a file that it writes", Remedy::CompressionBySocket))
        }
        Route::Auto if options.compression != Compression::None => Ok(Route::Socket),
        Route::Auto if options.background || options.listen.is_some() || unable().is_some() => Ok(Route::Socket),
        Route::Auto => Ok(Route::File),
        Route::File => match unable() {
            Some(why) => Err(JobError::refused(why, Remedy::Socket)),
            None if options.listen.is_some() => {
                Err(JobError::refused("an address has no meaning when QEMU writes the file", Remedy::FileOrListen))
            }
            None => Ok(Route::File),
        },
        Route::Socket => Ok(Route::Socket),
    }
    .and_then(|route| {
        if route == Route::Socket && options.listen.is_none() && !monitor.qmp().passes_descriptors() {
            return Err(JobError::refused("a monitor over tcp cannot be passed a socket", Remedy::ConnectTcp));
        }
        Ok(route)
    })
}

/// How QEMU must be set for the route: what it needs is on, and whatever would give the stream another form is off.
fn settings(
    route: Route,
    options: &SaveOptions,
    channels: Option<usize>,
    freezes: bool,
    bandwidth: Option<NonZeroU64>,
) -> Settings {
    let by_file = route == Route::File;
    let mut wish = if options.background { background::settings() } else { Settings::new() };
    wish = wish
        .capability("events", true)
        .capability("return-path", !by_file && !options.background)
        .capability("mapped-ram", by_file)
        .capability("multifd", channels.is_some())
        .capability("background-snapshot", options.background)
        .capability("pause-before-switchover", freezes)
        .parameter("max-bandwidth", bandwidth.map_or(0, NonZeroU64::get))
        .parameter("mode", "normal")
        // Whatever the user has chosen for other migrations: zero pages take no room in a snapshot.
        .parameter("zero-page-detection", if channels.is_some() { "multifd" } else { "legacy" })
        // Neither a file nor a socket to this process has a TLS server at its other end.
        .parameter("tls-creds", "");
    for other in [
        "xbzrle",
        "rdma-pin-all",
        // With it on, QEMU does not ask a balloon which pages are free, and all of them are stored.
        "postcopy-ram",
        "postcopy-preempt",
        "x-colo",
        "release-ram",
        "compress",
        "dirty-bitmaps",
        "x-ignore-shared",
        "zero-copy-send",
        "switchover-ack",
        "block",
    ] {
        wish = wish.capability(other, false);
    }
    if let Some(channels) = channels {
        wish =
            wish.parameter("multifd-channels", channels).parameter("multifd-compression", options.compression.name());
    }
    if by_file {
        wish = wish.parameter("direct-io", false);
    }
    if let Some(downtime) = options.downtime {
        wish = wish.parameter("downtime-limit", u64::try_from(downtime.as_millis()).unwrap_or(u64::MAX));
    }
    wish
}
