//! How a live migration ended, as its source knows it.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use limosa_channel::Channel;
use limosa_memory::dirty::DirtyLogs;

use super::guest::GuestSource;
use super::link::{Link, Terms};
use super::owned::{HandedOver, Owned};
use super::stats::LiveStats;
use crate::control::{Handle, Phase};
use crate::error::MigrateError;
use crate::live::{LiveVm, VmError};
use crate::source::postcopy::{OpenPreempt, PostcopyStats};

/// The end of a live migration, and the side that has the VM.
#[must_use = "it says who has the VM"]
pub enum LiveOutcome<'a, V: LiveVm + ?Sized> {
    /// The VM runs at the destination. Here it stays stopped.
    Completed(LiveStats),
    /// The VM runs here, as before: it never left.
    Resumed {
        /// The failure that ended the migration.
        error: MigrateError,
        /// Counters until then.
        stats: LiveStats,
        /// The logs, for another attempt. They are off, and what they held is forgotten: an attempt begins with all
        /// pages.
        logs: Option<DirtyLogs>,
    },
    /// The VM is not at the destination, and the VMM did not resume it here: it is stopped, and complete.
    ResumeFailed {
        /// The failure that ended the migration.
        error: MigrateError,
        /// The VMM's reason.
        resume: VmError,
        /// Counters until then.
        stats: LiveStats,
    },
    /// The VM was given away, and the destination has not said that it has it. It is stopped here, and complete.
    Undecided(Undecided<'a, V>),
    /// The VM runs at the destination, and waits there for pages that only this side has.
    PostcopyPaused(Box<PostcopyPausedSource<'a, V>>),
}

/// The end of the phases of a migration: the side that has the VM.
pub(super) enum Ended<'a, V: LiveVm + ?Sized> {
    /// This side, as before.
    Kept { vm: Owned<'a, V>, error: MigrateError },
    /// The destination, or it may.
    HandedOver {
        vm: HandedOver<'a, V>,
        /// The memory that postcopy sends.
        guest: Option<GuestSource<'a>>,
        result: Result<Option<Box<PostcopyStats>>, MigrateError>,
    },
}

impl Link<'_, '_> {
    /// Takes the VM back, or leaves it to the destination, as the phases have ended. Adds to the counters what is known
    /// only now.
    pub(super) fn outcome<'a, V: LiveVm + ?Sized>(
        &self,
        terms: &Terms<'_>,
        multifd_channels: &[Arc<Channel>],
        mut stats: LiveStats,
        ended: Ended<'a, V>,
    ) -> LiveOutcome<'a, V> {
        let finish = |stats: &mut LiveStats| {
            stats.total_time = terms.begun.elapsed();
            stats.main = self.channel.counters();
            stats.channels = multifd_channels.iter().map(|channel| channel.counters()).collect();
        };
        let (vm, guest, result) = match ended {
            Ended::Kept { vm, error } => {
                let error = self.control.explain(error);
                let taken_back = vm.take_back();
                (stats.downtime, stats.hints) = (taken_back.downtime, taken_back.hints);
                finish(&mut stats);
                return match taken_back.resumed {
                    Ok(()) => LiveOutcome::Resumed { error, stats, logs: taken_back.logs },
                    Err(resume) => LiveOutcome::ResumeFailed { error, resume, stats },
                };
            }
            // Once it was handed over, a stop is not what decides, and may not be what failed.
            Ended::HandedOver { vm, guest, result } => (vm, guest, result),
        };
        stats.downtime = vm.downtime(terms.loaded.at().unwrap_or_else(Instant::now));
        stats.hints = vm.hint_stats();
        finish(&mut stats);
        let (vm, logs) = vm.into_parts();
        let error = match result {
            Ok(postcopy) => {
                stats.postcopy = postcopy.map(|postcopy| *postcopy);
                self.progress.set_phase(Phase::Completed);
                return LiveOutcome::Completed(stats);
            }
            Err(error) => error,
        };
        let Some(guest) = guest else {
            return LiveOutcome::Undecided(Undecided { vm, logs, error, stats, recoverable: None });
        };
        let (answer_timeout, max_bandwidth) = (terms.params.answer_timeout, terms.params.max_postcopy_bandwidth);
        let page_sizes = terms.page_sizes.clone();
        let waits = PostcopyPausedSource { vm, guest, page_sizes, answer_timeout, max_bandwidth, error, stats };
        match terms.loaded.at() {
            Some(_) => LiveOutcome::PostcopyPaused(Box::new(waits)),
            None => LiveOutcome::Undecided(waits.unheard(logs)),
        }
    }
}

impl<V: LiveVm + ?Sized> Ended<'_, V> {
    /// Puts another error in the place of this one's, if it ended with one.
    pub(super) fn map_err(mut self, other: impl FnOnce(MigrateError) -> MigrateError) -> Self {
        if let Self::Kept { error, .. } | Self::HandedOver { result: Err(error), .. } = &mut self {
            *error = other(std::mem::replace(error, MigrateError::Cancelled));
        }
        self
    }

    /// Whether the VM was moved.
    pub(super) fn is_ok(&self) -> bool {
        matches!(self, Self::HandedOver { result: Ok(_), .. })
    }
}

/// A VM that was given away without an answer.
///
/// It may run at the destination, so it continues here only by decision of a person who has looked there:
/// [`resume`](Self::resume) if it does not run there and never will, [`discard`](Self::discard) if it does.
#[must_use = "the VM stays stopped until a decision is made"]
pub struct Undecided<'a, V: LiveVm + ?Sized> {
    pub(super) vm: &'a V,
    pub(super) logs: Option<DirtyLogs>,
    pub(super) error: MigrateError,
    pub(super) stats: LiveStats,
    pub(super) recoverable: Option<Box<PostcopyPausedSource<'a, V>>>,
}

/// The source of a VM that runs at the destination without all of its memory.
///
/// The VM waits there wherever it touches a page that has not come. The memory here is complete and must stay as it is
/// until the destination has all of it.
#[must_use = "the VM at the destination waits"]
pub struct PostcopyPausedSource<'a, V: LiveVm + ?Sized> {
    pub(super) vm: &'a V,
    pub(super) guest: GuestSource<'a>,
    pub(super) page_sizes: BTreeMap<String, u64>,
    pub(super) answer_timeout: Duration,
    pub(super) max_bandwidth: Option<NonZeroU64>,
    pub(super) error: MigrateError,
    pub(super) stats: LiveStats,
}

impl<'a, V: LiveVm + ?Sized> PostcopyPausedSource<'a, V> {
    /// The failure that broke it off.
    pub fn why(&self) -> &MigrateError {
        &self.error
    }

    /// Counters until then.
    pub fn stats(&self) -> &LiveStats {
        &self.stats
    }

    /// The VM here, which is stopped.
    pub fn vm(&self) -> &'a V {
        self.vm
    }

    /// The destination has not said that it has loaded the devices.
    pub(super) fn unheard(mut self, logs: Option<DirtyLogs>) -> Undecided<'a, V> {
        let error = std::mem::replace(&mut self.error, MigrateError::Paused);
        let stats = std::mem::take(&mut self.stats);
        Undecided { vm: self.vm, logs, error, stats, recoverable: Some(Box::new(self)) }
    }

    /// For a destination that is gone: whether its VM had begun to run is not known here. (QEMU 10.0 answers that it
    /// has loaded its devices just before it lets the VM run, and ends if it loses its source in between.)
    pub fn into_undecided(self) -> Undecided<'a, V> {
        let Self { vm, error, stats, .. } = self;
        Undecided { vm, logs: None, error, stats, recoverable: None }
    }

    /// Continues over a new channel, to a destination that waits for recovery there, and with a preempt channel if
    /// there was one before. The control of `handle` must be a new one if the one before was used to stop.
    pub fn recover(
        mut self,
        channel: Channel,
        open_preempt: Option<OpenPreempt<'_>>,
        handle: &Handle,
    ) -> LiveOutcome<'a, V> {
        match self.send_rest(channel, open_preempt, handle) {
            Ok(done) => {
                self.stats.total_time += done.elapsed;
                self.stats.postcopy = Some(done);
                LiveOutcome::Completed(self.stats)
            }
            Err(error) => LiveOutcome::PostcopyPaused(Box::new(Self { error, ..self })),
        }
    }
}

impl<V: LiveVm + ?Sized> std::fmt::Debug for PostcopyPausedSource<'_, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostcopyPausedSource").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<V: LiveVm + ?Sized> std::fmt::Debug for LiveOutcome<'_, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Completed(stats) => f.debug_tuple("Completed").field(stats).finish(),
            Self::Resumed { error, .. } => f.debug_struct("Resumed").field("error", error).finish_non_exhaustive(),
            Self::ResumeFailed { error, resume, .. } => {
                f.debug_struct("Stuck").field("error", error).field("resume", resume).finish_non_exhaustive()
            }
            Self::Undecided(undecided) => undecided.fmt(f),
            Self::PostcopyPaused(recoverable) => recoverable.fmt(f),
        }
    }
}

impl<V: LiveVm + ?Sized> std::fmt::Debug for Undecided<'_, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Undecided").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<'a, V: LiveVm + ?Sized> Undecided<'a, V> {
    /// The failure that ended the migration.
    pub fn why(&self) -> &MigrateError {
        &self.error
    }

    /// Counters until then.
    pub fn stats(&self) -> &LiveStats {
        &self.stats
    }

    /// Resumes the VM here. **Only if it does not run at the destination, and cannot begin to.** The logs are off,
    /// as after every failure.
    ///
    /// # Errors
    /// The VMM does not resume it; it is still stopped.
    pub fn resume(self) -> Result<Option<DirtyLogs>, VmError> {
        self.vm.resume()?;
        Ok(self.logs)
    }

    /// Whether it was in postcopy, so that [`into_postcopy_paused`](Self::into_postcopy_paused) returns a source.
    pub fn is_postcopy_paused(&self) -> bool {
        self.recoverable.is_some()
    }

    /// The VM waits at the destination for its memory (QEMU calls that `postcopy-paused`): returns its source.
    /// `None` if the migration was not in postcopy: then it has its memory, or does not run.
    pub fn into_postcopy_paused(self) -> Option<PostcopyPausedSource<'a, V>> {
        let Self { error, stats, recoverable, .. } = self;
        recoverable.map(|recoverable| PostcopyPausedSource { error, stats, ..*recoverable })
    }

    /// The VM runs at the destination, or is given up: it never continues here.
    pub fn discard(self) -> LiveStats {
        self.stats
    }
}
