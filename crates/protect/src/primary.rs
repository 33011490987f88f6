//! The end at which the VM is, as a series sees it: behind a monitor here, or behind a connection.

use std::thread;
use std::time::{Duration, Instant};

use limosa_migrate::output::{CheckpointCause, OutputCounters, OutputGates};
use limosa_migrate::stored::StreamSetup;
use limosa_migrate::{Handle, MigrateError};
use limosa_qemu::monitor::{Monitor, RunState};
use limosa_qemu::{EpochDisks, EpochOverlays};
use limosa_snapshot::{CheckpointPair, Durability, ProtectedDisk};

use crate::convergence::BasePause;
use crate::error::ProtectError;
use crate::guard::Pulse;
use crate::options::ProtectOptions;
use crate::report::KeptCheckpoint;
use crate::writable::WritableDisks;

/// How often a VM that was stopped by someone else is looked at.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How often a keeper elsewhere is told that the VM is there.
pub(crate) const TELL_EVERY: Duration = Duration::from_millis(250);

/// The end at which the VM is. Its methods are called in the turns of checkpoints, in the order in which they are here.
pub(crate) trait Primary: Sync {
    /// The store is at work for the next checkpoint, which may take long. Called again and again.
    fn working(&self) -> Result<(), ProtectError>;

    /// The base has arrived, with this layout.
    fn arrived(&self, setup: &StreamSetup);

    /// Waits until the VM may be stopped for a checkpoint; the one before stopped it at `before`. From then on the VM
    /// may stand still.
    fn wait_due(&self, before: Option<Instant>) -> Result<(), ProtectError>;

    /// Begins the epochs of the disks that belong to the checkpoints: they are as of the base. The VM stands still.
    fn begin_disks(&self, _planned: &[ProtectedDisk]) -> Result<(), ProtectError> {
        Ok(())
    }

    /// Seals the disks for a checkpoint that has come. The VM stands still. If it fails the checkpoint does not count.
    fn seal_disks(&self, _epoch: u64) -> Result<(), ProtectError> {
        Ok(())
    }

    /// Ends the epoch of output of a checkpoint that is whole. The VM stands still.
    fn seal(&self, epoch: u64) -> Result<(), ProtectError>;

    /// Checks that the VM has stood still until now: otherwise what was sealed may have writes and output that the
    /// checkpoint does not know.
    fn check_held(&self) -> Result<(), ProtectError> {
        Ok(())
    }

    /// The VM was let continue, or is about to fail.
    fn continued(&self);

    /// Prepares the disks for a checkpoint that is about to count. False: the primary has not said yet that it has, and
    /// has to be [heard](Self::hear) first. Until they are prepared the checkpoint does not count.
    fn prepare_disks(&self, epoch: u64) -> Result<bool, ProtectError>;

    /// A checkpoint counts, the newest of `pair`: its output may leave. The base has no `kept`.
    fn commit(&self, pair: &CheckpointPair, kept: Option<&KeptCheckpoint>) -> Result<(), ProtectError>;

    /// Hears a note, if the primary is a limosa elsewhere. Whether it has ended the series by it.
    fn hear(&self, kind: u8, value: u64) -> bool;

    /// Counters of the output that is held back; `None` if output is free, or not known here.
    fn counters(&self) -> Option<OutputCounters>;
}

/// A VM on this host.
#[derive(Clone, Copy)]
pub(crate) struct LocalVm<'a> {
    pub(crate) monitor: &'a Monitor,
    pub(crate) options: &'a ProtectOptions,
    pub(crate) handle: &'a Handle,
    pub(crate) notice: &'a (dyn Fn(&str) + Sync),
    pub(crate) pulse: &'a Pulse,
    pub(crate) outputs: OutputGates<'a>,
    /// The disks that belong to the checkpoints.
    pub(crate) disks: &'a EpochDisks,
    /// Those that belong to them by overlays.
    pub(crate) overlays: &'a EpochOverlays,
    /// The disks that it had when its protection began.
    pub(crate) writable: &'a WritableDisks,
    /// The pause that the end of a base may take; `None` if QEMU has no limit for it.
    pub(crate) base_pause: Option<BasePause>,
}

/// Tells a keeper elsewhere whether the VM runs.
pub(crate) type Tell<'t> = &'t dyn Fn(bool) -> Result<(), ProtectError>;

/// Tells a keeper elsewhere now and then, if there is one.
pub(crate) struct Teller<'t> {
    tell: Option<Tell<'t>>,
    told: Option<Instant>,
}

impl<'t> Teller<'t> {
    pub(crate) const fn new(tell: Option<Tell<'t>>) -> Self {
        Self { tell, told: None }
    }

    /// Tells it, if it is time, whether the VM runs.
    pub(crate) fn tell(&mut self, runs: impl FnOnce() -> Result<bool, ProtectError>) -> Result<(), ProtectError> {
        let Some(tell) = self.tell.filter(|_| self.told.is_none_or(|told| told.elapsed() >= TELL_EVERY)) else {
            return Ok(());
        };
        self.told = Some(Instant::now());
        tell(runs()?)
    }
}

impl Primary for LocalVm<'_> {
    fn arrived(&self, _setup: &StreamSetup) {}

    fn working(&self) -> Result<(), ProtectError> {
        Ok(())
    }

    fn wait_due(&self, before: Option<Instant>) -> Result<(), ProtectError> {
        if self.options.paces(self.outputs) {
            self.wait_time(before, None)?;
        }
        self.wait_merged()?;
        self.wait_running(None)?;
        self.pulse.set_pausing(true);
        Ok(())
    }

    fn begin_disks(&self, planned: &[ProtectedDisk]) -> Result<(), ProtectError> {
        self.overlays.begin(self.monitor)?;
        Ok(self.disks.begin(planned)?)
    }

    fn seal_disks(&self, epoch: u64) -> Result<(), ProtectError> {
        self.overlays.seal(self.monitor, epoch)?;
        Ok(self.disks.seal(epoch)?)
    }

    fn seal(&self, epoch: u64) -> Result<(), ProtectError> {
        self.outputs.seal(epoch).map_err(ProtectError::Gate)
    }

    fn continued(&self) {
        self.pulse.set_pausing(false);
    }

    fn check_held(&self) -> Result<(), ProtectError> {
        if self.pulse.is_let_go() { Err(MigrateError::Cancelled.into()) } else { Ok(()) }
    }

    fn prepare_disks(&self, epoch: u64) -> Result<bool, ProtectError> {
        self.disks.prepare(epoch, self.options.store.durability == Durability::Synced)?;
        Ok(true)
    }

    fn commit(&self, pair: &CheckpointPair, _kept: Option<&KeptCheckpoint>) -> Result<(), ProtectError> {
        self.counts(pair.number())
    }

    fn hear(&self, _kind: u8, _value: u64) -> bool {
        false
    }

    fn counters(&self) -> Option<OutputCounters> {
        self.outputs.counters()
    }
}

impl LocalVm<'_> {
    /// As [`wait_due`](Primary::wait_due), for a keeper elsewhere, who is told all the while that the VM is there.
    pub(crate) fn wait_due_telling(&self, before: Option<Instant>, tell: Tell<'_>) -> Result<(), ProtectError> {
        self.wait_time(before, Some(tell))?;
        self.wait_running(Some(tell))?;
        self.pulse.set_pausing(true);
        Ok(())
    }

    /// Lets the output of a checkpoint that counts out, and has its disks keep it.
    pub(crate) fn counts(&self, epoch: u64) -> Result<(), ProtectError> {
        let released = self.outputs.commit(epoch).map_err(ProtectError::Gate);
        let merging = self.overlays.count(self.monitor, epoch).map_err(ProtectError::from);
        // The base is what the images have.
        if epoch == 0 {
            released.and(merging)
        } else {
            released.and(self.disks.keep(epoch).map_err(ProtectError::from)).and(merging)
        }
    }

    /// Waits until the time has come, or output asks for a checkpoint.
    fn wait_time(&self, before: Option<Instant>, tell: Option<Tell<'_>>) -> Result<(), ProtectError> {
        // A time that does not fit has no end.
        let due = before.unwrap_or_else(Instant::now).checked_add(self.options.every.longest());
        loop {
            let tick = tell.map(|_| Instant::now() + TELL_EVERY);
            let until = match (due, tick) {
                (Some(due), Some(tick)) => Some(due.min(tick)),
                (due, tick) => due.or(tick),
            };
            let cause = self.outputs.signal().wait(until, self.options.every.is_by_output());
            if let (CheckpointCause::Time, Some(tell)) = (cause, tell)
                && due.is_none_or(|due| Instant::now() < due)
            {
                tell(is_running(&self.monitor.status()?.state))?;
                continue;
            }
            tracing::debug!("a checkpoint is due: {cause:?}");
            return if cause == CheckpointCause::Closed { self.check_stop() } else { Ok(()) };
        }
    }

    /// Waits until the VM runs, and looks whether it has the same disks: a checkpoint would start one that was stopped.
    /// QEMU waits for its reply meanwhile, and nothing else does.
    pub(crate) fn wait_running(&self, tell: Option<Tell<'_>>) -> Result<(), ProtectError> {
        let (mut noticed, mut teller) = (false, Teller::new(tell));
        loop {
            let state = self.monitor.status()?.state;
            if is_running(&state) {
                return self.writable.check(self.monitor);
            }
            // After a checkpoint QEMU needs a moment to continue it.
            if !noticed && state != RunState::Colo {
                noticed = true;
                (self.notice)(&format!("the VM is stopped ({state}); the next checkpoint waits until it continues"));
            }
            self.check_stop()?;
            teller.tell(|| Ok(false))?;
            thread::sleep(LOOK_EVERY);
        }
    }

    pub(crate) fn check_stop(&self) -> Result<(), ProtectError> {
        check_stop(self.handle)
    }
}

/// Fails if the job was told to stop.
pub(crate) fn check_stop(handle: &Handle) -> Result<(), ProtectError> {
    // A stop is deferred as long as the channel is needed to let the VM go, which it is not between turns.
    match handle.control.stop_requested() {
        Some(stop) => Err(MigrateError::from(stop).into()),
        None => Ok(()),
    }
}

pub(crate) fn is_running(state: &RunState) -> bool {
    matches!(state, RunState::Running | RunState::Suspended)
}
