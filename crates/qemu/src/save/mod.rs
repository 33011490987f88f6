//! Saving a VM: from a running QEMU to a published file, with the VM going on.
//!
//! The law: **whatever happens, the VM is left as it was found.** Everything that the job changes in QEMU is written
//! down in QEMU first (the job's marker), so that this code, the guard, or `limosa resume` can undo it; and the file
//! has no name until it is whole, so a failed save leaves none.
//!
//! Order, when the VM continues: the last byte arrives, QEMU is answered, the VM is continued, *then* the file is made
//! durable and published. The VM's downtime holds no disk. With [`SaveOptions::stop`] the file is durable and published
//! before QEMU is answered, because from then on it may be all that is left of the VM.
//!
//! With [`SaveOptions::background`] the VM stands still at the beginning only, for its devices, and QEMU asks for
//! nothing at the end, which cannot be undone. The snapshot is of the moment at which the save began.

mod background;
mod by_file;
mod by_socket;
mod connection;
mod hints;
mod job;
mod options;
mod overlay;
mod preflight;
mod rounds;
mod route;
mod watcher;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use limosa_snapshot::UnnamedFile;

use crate::guard::{Guard, Held};
use crate::job::{JobError, Watch};
use crate::marker::{JobKind, JobMarker, MarkerError, VmAfter};
use crate::monitor::{Monitor, SettingChange};
use crate::takeover::{Actor, abandoned, take_over_holding};
pub(crate) use by_file::file_channels;
use job::SaveJob;
pub use job::SaveReport;
pub use options::{DiskPolicy, OnTimeout, Route, SaveOptions};
use preflight::Preflight;
use route::{route, settings};

/// How long undoing a failed save may take: a migration has to end first.
const UNDO_WITHIN: Duration = Duration::from_secs(60);

/// Saves the VM behind `monitor` into `target`.
///
/// `guarded` starts the guard of the job, and may decline.
///
/// # Errors
/// On `Err` there is no file, or the one that was there before, and the VM is as it was found. If even that could not
/// be achieved (QEMU does not answer), the marker stays in QEMU and `limosa resume` finishes.
pub fn save(
    monitor: &Monitor,
    target: &Path,
    options: &SaveOptions,
    watch: Watch<'_>,
    guarded: impl FnOnce() -> Result<Option<Guard>, JobError> + Send,
) -> Result<SaveReport, JobError> {
    let begun = Instant::now();
    // The guard takes some milliseconds to come up; the VM is looked at meanwhile. It stands before there is a record
    // of the job, because a record without a guard would outlive a kill; and without a record it does nothing.
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

/// After a save: puts the settings back and takes the record of the job away. False if QEMU does not let go of the
/// migration, so that its settings must stay.
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
) -> Result<(Preflight, Route, UnnamedFile, SettingChange), JobError> {
    JobMarker::expect_none(monitor)?;
    options.check()?;
    let before = Preflight::check(monitor, options)?;
    let route = route(monitor, options)?;
    let pending = UnnamedFile::create(target, options.replace)?;
    let current = monitor.settings()?;
    if options.background {
        background::check(monitor, &current)?;
    }
    let channels = match route {
        Route::File => by_file::channels(monitor, &pending, options.channels, watch.notice)?,
        _ => options.channels.map(usize::from),
    };
    let bandwidth = watch.control.max_bandwidth();
    let bandwidth = if before.waits_for_hints(options) { hints::slow(bandwidth) } else { bandwidth };
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
