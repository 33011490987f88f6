//! Saving a VM: from a running QEMU to a published file, while the VM continues.
//!
//! The law: **in every case the VM is left as it was found.** Everything that the job changes in QEMU is written
//! down in QEMU first (the job's record), so that this code, the watchdog, or `limosa resume` can undo it; and the file
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
pub(crate) mod overlay;
mod preflight;
mod rounds;
mod served;
mod transport;
mod unseen_writes;
mod watcher;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use limosa_snapshot::{Transport, UnnamedFile};

use crate::job::{JobContext, JobError};
use crate::job_record::{JobKind, JobRecord, JobRecordError, VmAfterJob};
use crate::monitor::{Monitor, SettingChange, Settings};
use crate::takeover::{Actor, abandoned, take_over_holding};
use crate::watchdog::{HeldConnections, Watchdog};
pub use background::{explain as explain_background_refusal, why_not as why_no_background_snapshot};
pub(crate) use by_file::file_channels;
use job::SaveJob;
pub use job::SaveReport;
pub use options::{DiskPolicy, OnTimeout, SaveOptions, SaveTimeout, TransportChoice};
use preflight::Preflight;
use transport::{choose_transport, settings};

/// How long undoing a failed save may take: a migration has to end first.
const UNDO_WITHIN: Duration = Duration::from_secs(60);

/// Saves the VM behind `monitor` into `target`.
///
/// `start_watchdog` starts the watchdog of the job, and may decline.
///
/// # Errors
/// On `Err` there is no file, or the one that was there before, and the VM is as it was found. If even that could not
/// be achieved (QEMU does not answer), the record stays in QEMU and `limosa resume` finishes.
pub fn save(
    monitor: &Monitor,
    target: &Path,
    options: &SaveOptions,
    watch: JobContext<'_>,
    start_watchdog: impl FnOnce() -> Result<Option<Watchdog>, JobError> + Send,
) -> Result<SaveReport, JobError> {
    let begun = Instant::now();
    // The watchdog takes some milliseconds to come up; the VM is looked at meanwhile. It stands before there is a
    // record of the job, because a record without a watchdog would outlive a kill; and without a record it does
    // nothing.
    let (prepared, watchdog) = thread::scope(|scope| {
        let watchdog = scope.spawn(start_watchdog);
        let prepared = prepare(monitor, target, options, watch);
        (prepared, watchdog.join().unwrap_or(Ok(None)))
    });
    let mut watchdog = watchdog?;
    let (before, transport, pending, change) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            if let Some(watchdog) = watchdog {
                let _ = watchdog.finish();
            }
            return Err(error);
        }
    };
    tracing::info!(
        "saving by {}; QEMU's settings that change: {}",
        if transport == Transport::File { "file" } else { "socket" },
        change.set
    );
    let mut record = JobRecord::new(JobKind::Save, before.manifest.id, target, before.was_running, change.undo.clone())
        .with_overlays(overlay::records(&before.overlays), served::records(&before.served));
    if options.stop {
        record.vm_after = VmAfterJob::Stopped;
    }
    record.descriptors.push(connection::DESCRIPTOR.to_owned());
    if let Err(error) = record.create(monitor) {
        if let Some(watchdog) = watchdog {
            let _ = watchdog.finish();
        }
        return Err(error.into());
    }
    for server in &options.disk_servers {
        if let Some(watchdog) = &mut watchdog {
            let _ = watchdog.add_disk_server(server);
        }
    }
    if let (Some(watchdog), Some(path)) = (&mut watchdog, pending.temporary_path()) {
        // A watchdog that died already is noticed at the end; until then the save is worth going on with.
        let _ = watchdog.set_temporary_file(Some(&path));
    }
    let job = SaveJob { monitor, options, watch, before, begun };
    let held = HeldConnections::default();
    let mut hold = |end: BorrowedFd<'_>| {
        held.hold_duplicate(end);
        if let Some(watchdog) = &mut watchdog {
            // One that has died holds nothing; as above.
            let _ = watchdog.hold(end);
        }
    };
    let done = monitor
        .apply_settings(&change.set)
        .map_err(|error| job.setup_error(error))
        .and_then(|()| overlay::prepare(monitor, &job.before.overlays))
        .and_then(|()| served::prepare(&job.before.served))
        .and_then(|()| match transport {
            Transport::File => by_file::run(&job, pending, &mut record),
            _ => by_socket::run(&job, pending, &mut record, &mut hold),
        });
    if let (Some(watchdog), Err(error)) = (&mut watchdog, &done)
        && !error.is_unanswered()
    {
        // As long as this process sees to it, it is the one to hold them.
        let _ = watchdog.release();
    }
    let tidied = match &done {
        Ok(_) => put_back(monitor, &record).unwrap_or(false),
        Err(error) if error.is_unanswered() => false,
        Err(_) => {
            match take_over_holding(&held, monitor, &record, Actor::Watchdog, (&options.disk_servers, UNDO_WITHIN)) {
                Ok(undone) => {
                    undone.remarks.iter().for_each(|remark| tracing::info!("{remark}"));
                    undone.notices.iter().for_each(|notice| (watch.notice)(notice));
                    undone.outcome.ends_job()
                }
                // All changes went with QEMU.
                Err(JobRecordError::Qmp(gone)) if gone.is_gone() => {
                    abandoned(&record, &options.disk_servers).iter().for_each(|notice| (watch.notice)(notice));
                    true
                }
                Err(_) => false,
            }
        }
    };
    match watchdog {
        Some(watchdog) if tidied => watchdog.dismiss(watch.notice),
        Some(watchdog) => {
            (watch.notice)(&format!(
                "QEMU could not be set right yet; process {} keeps trying, and so does a resume of this VM",
                watchdog.pid()
            ));
            watchdog.hand_over();
        }
        None => {}
    }
    done
}

/// Returns the settings with which a migration to a socket is a background snapshot.
#[must_use]
pub fn background_settings() -> Settings {
    let options = SaveOptions { background: true, ..SaveOptions::default() };
    settings(&Transport::Socket, &options, None, false, None)
}

/// Puts the settings back after a save and removes the record of the job. Returns false if QEMU still holds the
/// migration, so that its settings must stay.
fn put_back(monitor: &Monitor, record: &JobRecord) -> Result<bool, JobRecordError> {
    if !monitor.wait_migration_released(UNDO_WITHIN)? {
        return Ok(false);
    }
    monitor.restore_settings(&record.undo)?;
    JobRecord::remove(monitor)?;
    Ok(true)
}

/// Checks, without any change, whether and how the VM can be saved and into which file, and plans the changes for it.
fn prepare(
    monitor: &Monitor,
    target: &Path,
    options: &SaveOptions,
    watch: JobContext<'_>,
) -> Result<(Preflight, Transport, UnnamedFile, SettingChange), JobError> {
    JobRecord::expect_none(monitor)?;
    options.check()?;
    let before = Preflight::check(monitor, options)?;
    if options.hint_wait.is_some() && !before.waits_for_hints {
        let why = match (before.was_running, before.stands_still) {
            (true, false) => "no balloon of it has free-page-hint=on",
            (true, true) => "it stands still while it is saved",
            (false, _) => "the VM is stopped",
        };
        (watch.notice)(&format!("the save does not wait for the guest's free pages: {why}"));
    }
    let transport = choose_transport(monitor, options)?;
    let pending = UnnamedFile::create(target, options.replace)?;
    let current = monitor.settings()?;
    if options.background {
        background::check(monitor, &current)?;
    }
    let channels = match transport {
        Transport::File => by_file::channels(monitor, &pending, options.channels, watch.notice)?,
        _ => options.channels.map(usize::from),
    };
    let bandwidth = watch.handle.control.max_bandwidth();
    let bandwidth = if before.waits_for_hints { hints::slow(bandwidth) } else { bandwidth };
    let mut wish = settings(&transport, options, channels, before.has_overlays(), bandwidth);
    if transport == Transport::Socket
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
    Ok((before, transport, pending, current.change_to(&wish)))
}
