//! Restoring a VM: from a snapshot into a QEMU that was started with `-incoming defer`.
//!
//! Mapped, the snapshot is the guest's memory already and only its devices are loaded. Lazily, limosa is a postcopy
//! source whose guest does not run: the guest starts at the destination as soon as the device state is loaded, and its
//! pages follow, requested ones first. Eagerly, QEMU reads the file itself, or, where it cannot, limosa sends a precopy
//! stream.
//!
//! The law: **a guest never sees a page that was not stored.** A failure while pages are missing closes the channel:
//! the guest stalls on what it has not got and waits for [`recover`]. Which snapshot it stands on is written down
//! inside its QEMU (the job's record), so that no other can be mistaken for it.

mod disks;
mod eager;
pub(crate) mod incoming;
mod job;
mod lazy;
mod options;
mod preflight;
mod recover;
mod serve;
pub(crate) mod unfinished;

use std::time::Instant;

pub use job::{LazyReport, RestoreObserver, RestoreReport, RestoreRequest, StartWatchdog};
pub use options::{RestoreChannels, RestoreMode, RestoreOptions, RunChoice};
pub use recover::recover;

use crate::job::JobError;
use job::RestoreJob;
use lazy::Tried;
use preflight::PlannedMode;

/// Restores a snapshot. A lazy restore starts the guest long before its memory is there.
///
/// # Errors
/// Before the guest runs: the QEMU has to be thrown away, and a fresh one can be tried with; the snapshot is untouched.
/// After: the guest stalls on missing pages, and [`recover`] continues.
pub fn restore(restore: RestoreRequest<'_>) -> Result<RestoreReport, JobError> {
    let RestoreRequest { monitor, snapshot, path, options, watch, observer, start_watchdog } = restore;
    let begun = Instant::now();
    let plan = preflight::check(monitor, snapshot, options, watch)?;
    let preflight::Plan { runs, page_sizes, mode, qemu } = plan;
    let job = RestoreJob { monitor, snapshot, path, options, watch, observer, start_watchdog, begun, runs, page_sizes };
    let then = if runs { "run" } else { "stay paused" };
    tracing::info!("restoring {mode}; the guest is to {then}");
    if let (PlannedMode::Lazy, Some(set)) = (&mode, &options.working_set) {
        snapshot.fetch_ahead(set);
    }
    match mode {
        PlannedMode::Eager => eager::run(&job, &qemu, &[]),
        PlannedMode::Mapped(blocks) => eager::run(&job, &qemu, &blocks),
        PlannedMode::Lazy => match lazy::run(&job, &qemu)? {
            Tried::Restored(report) => Ok(*report),
            Tried::Refused(reason) => {
                reason.give_way(options.mode, watch)?;
                eager::run(&job, &qemu, &[])
            }
        },
    }
}
