//! How the arrival of a VM can end.

use super::postcopy::{PostcopyIncomingStats, PostcopyPaused};
use crate::destination::DestinationStats;
use crate::error::MigrateError;
use crate::live::{IncomingVm, VmError};

/// The outcome at the destination. The VM runs here in [`Running`](Self::Running) and
/// [`PostcopyPaused`](Self::PostcopyPaused).
#[must_use = "a VM may be waiting for a decision"]
pub enum IncomingOutcome<'a, V: IncomingVm + ?Sized> {
    /// The VM runs here.
    Running(IncomingStats),
    /// It does not, and never will: the source keeps it.
    Failed(MigrateError),
    /// All of it is here, but the source's commit is not.
    Undecided(UndecidedIncoming<'a, V>),
    /// The VM runs here, on a part of its memory; the connection that brought the rest is gone.
    PostcopyPaused(PostcopyPaused<'a, V>),
}

impl<V: IncomingVm + ?Sized> std::fmt::Debug for IncomingOutcome<'_, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Running(stats) => f.debug_tuple("Running").field(stats).finish(),
            Self::Failed(error) => f.debug_tuple("Failed").field(error).finish(),
            Self::Undecided(arrived) => f.debug_tuple("Undecided").field(arrived).finish(),
            Self::PostcopyPaused(paused) => f.debug_tuple("PostcopyPaused").field(paused).finish(),
        }
    }
}

/// Counters of a destination.
#[derive(Debug)]
#[non_exhaustive]
pub struct IncomingStats {
    /// Pages and bytes.
    pub received: DestinationStats,
    /// Counters of the postcopy, if the VM was started before its memory had come.
    pub postcopy: Option<Box<PostcopyIncomingStats>>,
    /// Why the source may not know that its VM runs here, if so: it is undecided then, and has to discard
    /// its copy.
    pub acknowledge_error: Option<MigrateError>,
}

/// A VM that is here completely and may run at the source: [`start`](Self::start) it only when it is certain that it
/// does not run there; otherwise [`discard`](Self::discard) it.
pub struct UndecidedIncoming<'a, V: IncomingVm + ?Sized> {
    vm: &'a V,
    why: MigrateError,
}

impl<V: IncomingVm + ?Sized> std::fmt::Debug for UndecidedIncoming<'_, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UndecidedIncoming").field("why", &self.why).finish()
    }
}

impl<'a, V: IncomingVm + ?Sized> UndecidedIncoming<'a, V> {
    pub(super) fn new(vm: &'a V, why: MigrateError) -> Self {
        Self { vm, why }
    }

    /// Returns the reason why the source's commit is missing.
    pub fn why(&self) -> &MigrateError {
        &self.why
    }

    /// Runs the VM. The caller knows that it does not run at the source and never will.
    ///
    /// # Errors
    /// It cannot run.
    pub fn start(self) -> Result<(), VmError> {
        self.vm.start()
    }

    /// Gives it up: it continues at the source. The VMM may be ended.
    pub fn discard(self) {}
}
