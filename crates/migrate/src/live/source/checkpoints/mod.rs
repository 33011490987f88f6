//! Checkpoints of a VM that runs here, for a keeper elsewhere: the primary of QEMU's COLO.
//!
//! The base is a precopy to its end, but the VM is not given away: it continues here, and its dirty logs stay on. Then
//! one checkpoint follows the other, each with what was written since the one before. The stream is that of stock QEMU,
//! so [`Checkpoints`](crate::checkpoints::Checkpoints) receives both.
//!
//! The law: **output leaves when the checkpoint that knows of it counts.** The keeper's reply to the next request is
//! the acknowledgement of the checkpoint before: it has stored that by then. So a request is made as soon as the VM
//! runs again, and not when the next checkpoint is due.
//!
//! The VM stays [`Owned`] from the beginning to the end: each end of a series lets it continue here.

mod dialogue;
mod gates;
mod options;
mod series;
mod staged;

use std::thread;

pub use options::{CheckpointReport, CheckpointSourceOptions, CheckpointsEnded};

use self::series::Series;
use super::link::{Link, Terms};
use super::owned::Owned;
use super::reports::Reports;
use super::{Begun, CutOnDrop, LiveSource, read_return_path};
use crate::control::Phase;
use crate::error::MigrateError;
use crate::live::LiveVm;

impl<V: LiveVm + ?Sized> LiveSource<'_, '_, V> {
    /// Makes checkpoints of the VM, which stays here, until the series is [closed](crate::output::OutputSignal::close),
    /// the job is stopped or something fails. The destination is a keeper of checkpoints.
    ///
    /// Neither with postcopy nor with multifd channels, nor with shared memory that is left out.
    ///
    /// A panic in the VMM's code passes through, and the VM continues.
    pub fn make_checkpoints(self, options: &CheckpointSourceOptions<'_>) -> CheckpointsEnded {
        self.drive(true, |Begun { link, terms, vm, set, .. }, reports| {
            let (vm, result, counters) = match set {
                Ok(()) => attempt(link, terms, vm, reports, options),
                Err(error) => (vm, Err(error), series::Counters::default()),
            };
            let result = result.map_err(|error| link.control.explain(error));
            if result.is_ok() {
                link.progress.set_phase(Phase::Completed);
            }
            let taken_back = vm.take_back();
            CheckpointsEnded {
                result,
                resumed: taken_back.resumed,
                acknowledged: counters.acknowledged,
                made: counters.made,
                base: std::mem::take(&mut reports.stats),
                logs: taken_back.logs,
            }
        })
    }
}

/// Opens the stream, and keeps the return path read until it ends with the base.
fn attempt<'e, 'v, V: LiveVm + ?Sized>(
    link: &'e Link<'e, 'v>,
    terms: &'e Terms<'e>,
    mut vm: Owned<'v, V>,
    reports: &mut Reports<'e>,
    options: &CheckpointSourceOptions<'_>,
) -> (Owned<'v, V>, Result<(), MigrateError>, series::Counters) {
    let mut series = Series::new(link, terms, options);
    let result = thread::scope(|scope| {
        let reader = scope.spawn(|| read_return_path(link, terms));
        // A panic in the VMM's code must not leave a thread or the keeper waiting.
        let cut = CutOnDrop(link.channel);
        let result = link.open(terms).and_then(|()| series.run(&mut vm, reports));
        drop(cut);
        let _ = reader.join();
        result
    });
    (vm, result, series.counters())
}
