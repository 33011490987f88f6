//! The series: a base, and one checkpoint after the other into the store.
//!
//! The order of each turn: the store catches up while the VM runs, the VM is let stop, its checkpoint is received into
//! memory, its disks and its output are sealed, the VM is let continue, the checkpoint is stored, the disks are
//! prepared for it, it is committed, its output is let out and the disks keep it. So the pause holds nothing but
//! receiving and the seal, as long as there is room for the pages. A checkpoint that came whole is committed also if
//! QEMU has died meanwhile: it is the newest state that there is.
//!
//! QEMU's own period is used if nothing is gated. Otherwise QEMU wants to make a checkpoint at once, and its request is
//! answered when one is due: the VM runs until then, and output or a gate that is nearly full is not waited for.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::Channel;
use limosa_migrate::checkpoints::{Checkpoints, NextCheckpoint};
use limosa_migrate::output::{CheckpointCause, OutputGates};
use limosa_migrate::stored::{Destination, DestinationOptions};
use limosa_migrate::{Handle, MigrateError};
use limosa_qemu::EpochDisks;
use limosa_qemu::monitor::{Monitor, RunState};
use limosa_snapshot::{CheckpointBase, CheckpointPair, Durability, Manifest};

use crate::aside::{Aside, Waiting};
use crate::error::ProtectError;
use crate::guard::Pulse;
use crate::options::ProtectOptions;
use crate::report::{KeptBase, KeptCheckpoint, Tally};

/// Pages that the store copies before it looks for a stop.
pub(crate) const CATCH_UP_PAGES: u64 = 8192;
/// How often a VM that was stopped by someone else is looked at.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Everything that a series needs.
#[derive(Clone, Copy)]
pub(crate) struct Series<'a> {
    pub(crate) monitor: &'a Monitor,
    pub(crate) options: &'a ProtectOptions,
    pub(crate) handle: &'a Handle,
    pub(crate) notice: &'a (dyn Fn(&str) + Sync),
    pub(crate) began: &'a (dyn Fn(&KeptBase) + Sync),
    pub(crate) kept: &'a (dyn Fn(&KeptCheckpoint) + Sync),
    pub(crate) pulse: &'a Pulse,
    pub(crate) outputs: OutputGates<'a>,
    /// The disks that belong to the checkpoints.
    pub(crate) disks: &'a EpochDisks,
}

/// A series that has ended.
pub(crate) struct Kept {
    pub(crate) tally: Tally,
    /// The newest whole checkpoint; `None` if not even the base counts.
    pub(crate) newest: Option<PathBuf>,
    /// `Ok`: the primary has closed the channel between two checkpoints.
    pub(crate) end: Result<(), ProtectError>,
}

impl Series<'_> {
    /// Keeps what comes on `channel` until it ends.
    pub(crate) fn keep(self, channel: Channel, base: CheckpointBase, manifest: Manifest) -> Kept {
        self.conclude(|kept| self.run(channel, base, manifest, kept))
    }

    /// Runs a series, and ends that of its output.
    pub(crate) fn conclude(self, run: impl FnOnce(&mut Kept) -> Result<(), ProtectError>) -> Kept {
        let mut kept = Kept { tally: Tally::new(), newest: None, end: Ok(()) };
        kept.end = run(&mut kept);
        let aborted = self.outputs.abort(kept.tally.checkpoints + 1).map_err(ProtectError::Gate);
        kept.tally.output = self.outputs.counters();
        if kept.end.is_ok() {
            kept.end = aborted;
        } else if let Err(error) = aborted {
            tracing::info!("{error}");
        }
        kept
    }

    fn run(
        self,
        channel: Channel,
        mut base: CheckpointBase,
        mut manifest: Manifest,
        kept: &mut Kept,
    ) -> Result<(), ProtectError> {
        let begun = Instant::now();
        let options = DestinationOptions { colo: true, ..DestinationOptions::default() };
        let received = Destination::new(&mut base, channel, self.handle).options(options).run()?;
        let mut checkpoints = received.into_checkpoints()?;
        // The VM stands still since the end of the base, which its disks are as of now.
        manifest.protected_disks = self.disks.begin()?;
        self.outputs.seal(0).map_err(ProtectError::Gate)?;
        self.check_held()?;
        checkpoints.begin()?;
        self.pulse.set_pausing(false);
        // Before it the base is not certain, and must not take the place of an older checkpoint.
        if checkpoints.wait_request(None)? == NextCheckpoint::Ended {
            let reason = "before the first one".into();
            return Err(ProtectError::Ended { reason });
        }
        manifest.pages.resent = checkpoints.base().stats.resent_pages;
        let mut pair = base.finish(&checkpoints.base().tail, manifest)?;
        kept.newest = Some(pair.newest().path.clone());
        self.outputs.commit(0).map_err(ProtectError::Gate)?;
        let bytes = self.handle.progress.read().bytes;
        (self.began)(&KeptBase { path: pair.newest().path.clone(), bytes, elapsed: begun.elapsed() });
        let mut before = None;
        let mut waiting = Waiting::new(self.options.buffer);
        loop {
            let (one, after) = self.checkpoint(&mut checkpoints, (&mut pair, &mut waiting), &mut before)?;
            kept.tally.add(&one);
            (self.kept)(&one);
            after?;
            if checkpoints.wait_request(None)? == NextCheckpoint::Ended {
                return Ok(());
            }
        }
    }

    /// Takes one turn, whose request has come. Returns a checkpoint that counts, and the failure after which there can
    /// be no other: QEMU has not heard of it, or its output cannot be let out.
    fn checkpoint(
        self,
        checkpoints: &mut Checkpoints,
        (pair, waiting): (&mut CheckpointPair, &mut Waiting),
        before: &mut Option<Instant>,
    ) -> Result<(KeptCheckpoint, Result<(), ProtectError>), ProtectError> {
        let begun = Instant::now();
        while pair.catch_up(CATCH_UP_PAGES)? > 0 {
            self.check_stop()?;
        }
        let catch_up = begun.elapsed();
        self.wait_due(*before)?;
        self.wait_running()?;
        self.pulse.set_pausing(true);
        let stopping = Instant::now();
        checkpoints.reply()?;
        let mut aside = Aside::new(pair, waiting);
        let received = checkpoints.receive(&mut aside, Some(self.options.stall_timeout)).map_err(ProtectError::from);
        let sealed = received.and_then(|checkpoint| {
            self.disks.seal(checkpoint.number)?;
            let output = self.outputs.seal(checkpoint.number);
            self.check_held()?;
            Ok((checkpoint, output))
        });
        let (checkpoint, sealed) = match sealed {
            Ok(sealed) => sealed,
            Err(error) => {
                waiting.forget();
                pair.abort();
                return Err(error);
            }
        };
        // The checkpoint is whole from here on, even if QEMU or a gate ends now.
        let loaded = checkpoints.loaded();
        self.pulse.set_pausing(false);
        let continued = Instant::now();
        waiting.store(pair).map_err(MigrateError::Sink)?;
        self.disks.prepare(checkpoint.number, self.options.store.durability == Durability::Synced)?;
        let stored = pair.commit(&checkpoint.sections)?;
        let commit = continued.elapsed();
        let released = sealed.and_then(|()| self.outputs.commit(checkpoint.number)).map_err(ProtectError::Gate);
        let released = released.and(self.disks.keep(checkpoint.number).map_err(ProtectError::from));
        let pause = loaded.as_ref().map_or_else(|_| stopping.elapsed(), |pause| *pause);
        let period = before.replace(stopping).map(|before| stopping.saturating_duration_since(before));
        let (number, bytes, output) = (stored.number, checkpoint.stats.bytes, self.outputs.counters());
        let kept = KeptCheckpoint { number, pause, commit, catch_up, period, bytes, stored, output };
        Ok((kept, released.and_then(|()| Ok(loaded.map(drop)?))))
    }

    /// Waits until the next checkpoint is due, if that is not up to QEMU.
    fn wait_due(self, before: Option<Instant>) -> Result<(), ProtectError> {
        if self.options.paces(self.outputs) {
            // A time that does not fit has no end.
            let until = before.unwrap_or_else(Instant::now).checked_add(self.options.every.longest());
            let cause = self.outputs.signal().wait(until, self.options.every.is_by_output());
            tracing::debug!("a checkpoint is due: {cause:?}");
            if cause == CheckpointCause::Closed {
                self.check_stop()?;
            }
        }
        Ok(())
    }

    /// Waits until the VM runs: a checkpoint would start one that was stopped. QEMU waits for its reply meanwhile, and
    /// nothing else does.
    pub(crate) fn wait_running(self) -> Result<(), ProtectError> {
        let mut noticed = false;
        loop {
            let state = self.monitor.status()?.state;
            if matches!(state, RunState::Running | RunState::Suspended) {
                return Ok(());
            }
            if !noticed {
                noticed = true;
                (self.notice)(&format!("the VM is stopped ({state}); the next checkpoint waits until it continues"));
            }
            self.check_stop()?;
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Checks that the VM has stood still until now: otherwise what was sealed may have writes and output that the
    /// checkpoint does not know.
    fn check_held(self) -> Result<(), ProtectError> {
        if self.pulse.is_let_go() { Err(MigrateError::Cancelled.into()) } else { Ok(()) }
    }

    /// Fails if the job was told to stop.
    pub(crate) fn check_stop(self) -> Result<(), ProtectError> {
        // A stop is deferred as long as the channel is needed to let the VM go, which it is not between turns.
        match self.handle.control.stop_requested() {
            Some(stop) => Err(MigrateError::from(stop).into()),
            None => Ok(()),
        }
    }
}
