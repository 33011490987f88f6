//! The series: a base, and one checkpoint after the other into the store.
//!
//! The order of each turn: the store catches up while the VM runs, the VM is let stop, its checkpoint is received into
//! memory, its disks and its output are sealed, the VM is let continue, the checkpoint is stored, the disks are
//! prepared for it, it is committed, its output is let out and the disks keep it. So the pause holds nothing but
//! receiving and the seal, as long as there is room for the pages. A checkpoint that came whole is committed also if
//! QEMU has died meanwhile: it is the newest state that there is.
//!
//! The store is here. The VM is behind a [`Primary`]: on this host, or at the other end of the channel.
//!
//! QEMU's own period is used if nothing is gated. Otherwise QEMU wants to make a checkpoint at once, and its request is
//! answered when one is due: the VM runs until then, and output or a gate that is nearly full is not waited for.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use limosa_channel::Channel;
use limosa_migrate::checkpoints::{Aside, Checkpoints, NextCheckpoint, NextState};
use limosa_migrate::multifd::MultifdOptions;
use limosa_migrate::stored::{Destination, DestinationOptions};
use limosa_migrate::{Handle, MigrateError};
use limosa_snapshot::{CheckpointBase, CheckpointPair, Manifest};

use crate::error::ProtectError;
use crate::primary::{Primary, check_stop};
use crate::report::{KeptBase, KeptCheckpoint, Tally};

/// Pages that the store copies before it looks for a stop.
pub(crate) const CATCH_UP_PAGES: u64 = 8192;

/// Everything that a series needs.
#[derive(Clone, Copy)]
pub(crate) struct Series<'a> {
    pub(crate) primary: &'a dyn Primary,
    pub(crate) handle: &'a Handle,
    pub(crate) began: &'a (dyn Fn(&KeptBase) + Sync),
    pub(crate) kept: &'a (dyn Fn(&KeptCheckpoint) + Sync),
    /// Bytes of pages that wait in memory.
    pub(crate) buffer: u64,
    /// Longest silence inside a checkpoint.
    pub(crate) stall_timeout: Duration,
    /// Longest silences of the primary while its VM runs.
    pub(crate) silence: Silence,
}

/// How long a primary may be silent while its VM runs; `None` for ever.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Silence {
    /// Before it requests a checkpoint.
    pub(crate) request: Option<Duration>,
    /// Between the reply and the checkpoint.
    pub(crate) reply: Option<Duration>,
    /// It may let the VM run in that time.
    pub(crate) runs_after_reply: bool,
}

/// The stream of a primary, and the record of its checkpoints.
pub(crate) struct Incoming {
    pub(crate) channel: Channel,
    /// Its multifd channels, by their numbers.
    pub(crate) multifd: Vec<Channel>,
    /// Bytes of the stream that were read already.
    pub(crate) first_bytes: Vec<u8>,
    pub(crate) manifest: Manifest,
}

/// A series that has ended.
pub(crate) struct Kept {
    pub(crate) tally: Tally,
    /// The newest whole checkpoint; `None` if not even the base counts.
    pub(crate) newest: Option<PathBuf>,
    /// `Ok`: the primary has ended it between two checkpoints.
    pub(crate) end: Result<(), ProtectError>,
}

impl Kept {
    pub(crate) fn nothing() -> Self {
        Self { tally: Tally::new(), newest: None, end: Ok(()) }
    }
}

/// A turn that was taken.
enum Turned {
    /// A checkpoint counts. The failure is one after which there can be no other: QEMU has not heard of it, or its
    /// output cannot be let out.
    Kept(Box<KeptCheckpoint>, Result<(), ProtectError>),
    /// The primary has ended the series.
    Over,
}

impl Series<'_> {
    /// Keeps what comes until it ends.
    pub(crate) fn keep(self, incoming: Incoming, base: CheckpointBase) -> Kept {
        let mut kept = Kept::nothing();
        kept.end = self.run(incoming, base, &mut kept);
        kept
    }

    fn run(self, incoming: Incoming, mut base: CheckpointBase, kept: &mut Kept) -> Result<(), ProtectError> {
        let begun = Instant::now();
        let Incoming { channel, multifd, first_bytes, mut manifest } = incoming;
        let options = DestinationOptions { colo: true, first_bytes, ..DestinationOptions::default() };
        let destination = Destination::new(&mut base, channel, self.handle).options(options);
        let received = destination.channels(multifd, MultifdOptions::default()).run()?;
        let mut checkpoints = received.into_checkpoints()?;
        self.primary.arrived(&checkpoints.base().setup);
        // The VM stands still since the end of the base, which its disks are as of now.
        self.primary.begin_disks(&manifest.protected_disks)?;
        self.primary.seal(0)?;
        self.primary.check_held()?;
        checkpoints.begin()?;
        self.primary.continued();
        // Before it the base is not certain, and must not take the place of an older checkpoint.
        if !self.is_requested(&mut checkpoints)? {
            let reason = "before the first one".into();
            return Err(ProtectError::Ended { reason });
        }
        manifest.pages.resent = checkpoints.base().stats.resent_pages;
        let mut pair = base.finish(&checkpoints.base().tail, manifest)?;
        kept.newest = Some(pair.newest().path.clone());
        self.primary.commit(&pair, None)?;
        let bytes = self.handle.progress.read().bytes;
        (self.began)(&KeptBase { path: pair.newest().path.clone(), bytes, elapsed: begun.elapsed() });
        let (mut before, mut aside) = (None, Aside::new(self.buffer));
        loop {
            match self.checkpoint(&mut checkpoints, (&mut pair, &mut aside), &mut before)? {
                Turned::Kept(one, after) => {
                    kept.tally.add(&one);
                    (self.kept)(&one);
                    after?;
                }
                Turned::Over => return Ok(()),
            }
            if !self.is_requested(&mut checkpoints)? {
                return Ok(());
            }
        }
    }

    /// Waits for the next request; false if the primary has ended the series.
    fn is_requested(self, checkpoints: &mut Checkpoints) -> Result<bool, ProtectError> {
        loop {
            match checkpoints.wait_request(self.silence.request)? {
                NextCheckpoint::Requested => return Ok(true),
                NextCheckpoint::Note { kind, value } if !self.primary.hear(kind, value) => {}
                _ => return Ok(false),
            }
        }
    }

    /// Waits until the VM was stopped; false if the primary has ended the series.
    fn is_sent(self, checkpoints: &mut Checkpoints) -> Result<bool, ProtectError> {
        loop {
            match checkpoints.wait_sent(self.silence.reply)? {
                NextState::Sent => return Ok(true),
                NextState::Note { kind, value } if !self.primary.hear(kind, value) => {}
                _ => return Ok(false),
            }
        }
    }

    /// Waits until the disks are prepared for a checkpoint; false if the primary has ended the series before.
    fn is_prepared(self, checkpoints: &mut Checkpoints, epoch: u64) -> Result<bool, ProtectError> {
        while !self.primary.prepare_disks(epoch)? {
            match checkpoints.wait_note(self.silence.request)? {
                Some((kind, value)) if !self.primary.hear(kind, value) => {}
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Takes one turn, whose request has come.
    fn checkpoint(
        self,
        checkpoints: &mut Checkpoints,
        (pair, aside): (&mut CheckpointPair, &mut Aside),
        before: &mut Option<Instant>,
    ) -> Result<Turned, ProtectError> {
        let begun = Instant::now();
        while pair.catch_up(CATCH_UP_PAGES)? > 0 {
            check_stop(self.handle)?;
            self.primary.working()?;
        }
        let catch_up = begun.elapsed();
        self.primary.wait_due(*before)?;
        let allowed = Instant::now();
        checkpoints.reply()?;
        if !self.is_sent(checkpoints)? {
            return Ok(Turned::Over);
        }
        let stopping = if self.silence.runs_after_reply { Instant::now() } else { allowed };
        let received = checkpoints.receive_aside(aside, pair, Some(self.stall_timeout)).map_err(ProtectError::from);
        let sealed = received.and_then(|checkpoint| {
            self.primary.seal_disks(checkpoint.number)?;
            let output = self.primary.seal(checkpoint.number);
            self.primary.check_held()?;
            Ok((checkpoint, output))
        });
        let (checkpoint, sealed) = match sealed {
            Ok(sealed) => sealed,
            Err(error) => {
                aside.forget();
                pair.abort();
                return match error {
                    ProtectError::Migrate(MigrateError::CheckpointAbandoned { kind, value })
                        if self.primary.hear(kind, value) =>
                    {
                        Ok(Turned::Over)
                    }
                    error => Err(error),
                };
            }
        };
        // The checkpoint is whole from here on, even if QEMU or a gate ends now.
        let loaded = checkpoints.loaded();
        self.primary.continued();
        let continued = Instant::now();
        let pause = continued.saturating_duration_since(stopping);
        aside.store(pair)?;
        if !self.is_prepared(checkpoints, checkpoint.number)? {
            pair.abort();
            return Ok(Turned::Over);
        }
        let stored = pair.commit(&checkpoint.sections)?;
        let commit = continued.elapsed();
        let period = before.replace(stopping).map(|before| stopping.saturating_duration_since(before));
        let (number, bytes) = (stored.number, checkpoint.stats.bytes);
        let mut kept = KeptCheckpoint { number, pause, commit, catch_up, period, bytes, stored, output: None };
        let released = sealed.and_then(|()| self.primary.commit(pair, Some(&kept)));
        kept.output = self.primary.counters();
        Ok(Turned::Kept(Box::new(kept), released.and_then(|()| Ok(loaded.map(drop)?))))
    }
}
