//! The eager restore: the guest runs when all pages are there.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::thread;
use std::time::Duration;

use limosa_migrate::{PageSource, Phase, PrecopyOptions, PrecopySource, PrecopyStats};
use limosa_page::{PageNumber, PageRange};

use super::incoming::Rendezvous;
use super::{Mode, RestoreJob, RestoreReport, Route, identity, lazy};
use crate::job::JobError;
use crate::monitor::{MigrationStatus, Settings};
use crate::qmp::Version;

/// How often QEMU is asked whether it is done; its events end the wait at once.
const ASK_EVERY: Duration = Duration::from_millis(20);

pub(super) fn run(job: &RestoreJob<'_>) -> Result<RestoreReport, JobError> {
    job.snapshot.lock_serving()?;
    let by_file = by_file(job)?;
    let mut wish =
        Settings::new().capability("events", true).capability("mapped-ram", by_file).capability("multifd", by_file);
    for other in ["postcopy-ram", "postcopy-preempt", "x-ignore-shared", "x-colo", "switchover-ack"] {
        wish = wish.capability(other, false);
    }
    if by_file {
        let channels = thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 4));
        wish = wish
            .parameter("multifd-channels", channels)
            .parameter("multifd-compression", "none")
            .parameter("direct-io", false);
    }
    let change = job.monitor.plan_settings(&wish)?;
    let marker = job.marker(change.undo);
    marker.place(job.monitor)?;
    let stats = fill(job, &change.set, by_file).map_err(|error| job.give_up(&marker, error))?;
    job.settle_run_state()?;
    let to_guest = job.begun.elapsed();
    job.observer.guest_ready(to_guest, Mode::Eager);
    lazy::settle(job.monitor, &marker)?;
    job.watch.progress.enter(Phase::Completed);
    Ok(RestoreReport {
        mode: Mode::Eager,
        to_guest,
        to_resident: to_guest,
        normal_pages: stats.map(|stats| stats.normal_pages),
        zero_pages: stats.map(|stats| stats.zero_pages),
        lazy: None,
        channel: stats.map(|stats| stats.channel),
        vm_state: job.vm_state(),
    })
}

/// Brings the memory in; what limosa sent, if it was limosa.
fn fill(job: &RestoreJob<'_>, settings: &Settings, by_file: bool) -> Result<Option<PrecopyStats>, JobError> {
    job.monitor.set(settings)?;
    job.choose_autostart()?;
    if by_file { load(job).map(|()| None) } else { send(job).map(Some) }
}

/// Whether QEMU is to read the file itself.
fn by_file(job: &RestoreJob<'_>) -> Result<bool, JobError> {
    let unable = if job.monitor.version() < Version::new(9, 0, 0) {
        Some("this QEMU cannot read mapped-ram files; 9.0 and newer can")
    } else if !job.monitor.qmp().passes_descriptors() {
        Some("a monitor over tcp cannot be passed descriptors")
    } else {
        None
    };
    match (job.options.route, unable) {
        (Route::File, Some(why)) => Err(JobError::refused(why, "use --via socket")),
        (Route::File, None) => {
            verify(job)?;
            Ok(true)
        }
        (Route::Socket, _) => Ok(false),
        // Checksums are verified as chunks are served, so limosa has to serve them.
        (Route::Auto, unable) => Ok(unable.is_none() && !job.snapshot.has_checksums() && job.options.listen.is_none()),
    }
}

/// Verifies every chunk before QEMU reads them behind limosa's back.
fn verify(job: &RestoreJob<'_>) -> Result<(), JobError> {
    if !job.snapshot.has_checksums() {
        return Ok(());
    }
    for (block, layout) in job.snapshot.start().blocks.iter().enumerate() {
        job.snapshot.verify(block, PageRange::new(PageNumber(0), PageNumber(layout.pages())))?;
    }
    Ok(())
}

/// QEMU reads the file through a descriptor.
fn load(job: &RestoreJob<'_>) -> Result<(), JobError> {
    let place = |source| JobError::Place { what: "open", path: job.path.to_owned(), source };
    // A description of its own, at offset 0; through /proc, so that it is the file that was checked, whatever has its name.
    let file = File::open(format!("/proc/self/fd/{}", job.snapshot.file().as_raw_fd())).map_err(place)?;
    let set = job.monitor.add_fd(file.as_fd(), None, &format!("limosa restore {}", identity(job.snapshot)))?;
    drop(file);
    job.watch.progress.enter(Phase::Active);
    let loaded = job
        .monitor
        .migrate_incoming(&format!("file:{}", set.path()))
        .map_err(JobError::from)
        .and_then(|()| wait_loaded(job));
    let removed = job.monitor.remove_fd(set.set);
    loaded?;
    Ok(removed?)
}

fn wait_loaded(job: &RestoreJob<'_>) -> Result<(), JobError> {
    loop {
        // A load by QEMU cannot be called back; the user's word ends the wait, and the destination is to be thrown away.
        job.watch.control.check()?;
        let _ = job.monitor.qmp().wait_event(&["MIGRATION", "RESUME"], ASK_EVERY)?;
        let info = job.monitor.migration()?;
        match info.status {
            MigrationStatus::Completed => return Ok(()),
            MigrationStatus::Failed => {
                let reason = info.error.unwrap_or_else(|| "it does not say why; its own log does".into());
                return Err(JobError::Failed { reason });
            }
            _ => {}
        }
    }
}

/// limosa sends a precopy stream.
fn send(job: &RestoreJob<'_>) -> Result<PrecopyStats, JobError> {
    let rendezvous = Rendezvous::new(job.monitor, job.options.listen.as_ref())?;
    job.monitor.migrate_incoming(&rendezvous.uri())?;
    let channel = rendezvous.connect()?;
    drop(rendezvous);
    let source =
        PrecopySource::new(job.snapshot, channel, job.watch.control, job.watch.progress, PrecopyOptions::default());
    let stats = source.run()?;
    wait_loaded(job)?;
    Ok(stats)
}
