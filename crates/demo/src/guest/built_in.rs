//! A guest as the demonstration uses it.

use std::sync::Arc;

use limosa_memory::GuestMemory;
use limosa_memory::dirty::{DirtyLogs, Writers};

use super::error::GuestError;
use super::options::{GuestKind, Rate};

/// The result of a check that found no damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verified {
    /// Pages that it has: every one holds what it must.
    pub pages: u64,
    /// Of them, pages that have to be zero.
    pub zero_pages: u64,
    /// Pages that it has written since it was booted, wherever that was.
    pub writes: u64,
    /// Of all its memory: equal on both ends while it is paused.
    pub checksum: u64,
}

/// A built-in guest. It is paused when it is made. Dropping it ends it.
pub trait Guest: Send + Sync {
    /// Returns its kind.
    fn kind(&self) -> GuestKind;

    /// Its memory.
    fn memory(&self) -> &Arc<GuestMemory>;

    /// Who writes it.
    fn writers(&self) -> Writers;

    /// The dirty logs that see all of these, not started. Asked for once a migration.
    ///
    /// # Errors
    /// The kernel lacks what the chosen log needs.
    fn dirty_logs(&self) -> Result<DirtyLogs, GuestError>;

    /// Lets it run, or continue.
    ///
    /// # Errors
    /// It has no state, or a writer has failed.
    fn run(&self) -> Result<(), GuestError>;

    /// Stops it. On success nothing writes its memory any more, and what was written is in the dirty logs.
    ///
    /// A writer that waits for a page (in postcopy) is waited for.
    ///
    /// # Errors
    /// A writer has failed; the others are paused.
    fn pause(&self) -> Result<(), GuestError>;

    /// Changes how fast it writes.
    fn set_rate(&self, rate: Rate);

    /// Takes `percent` (0 to 99) of their time from its writers; 0 gives it back.
    fn throttle(&self, percent: u8);

    /// Pages that it has written since it was booted, wherever that was.
    fn writes(&self) -> u64;

    /// Returns its state beside memory, a few hundred bytes. The format has the version
    /// [`STATE_VERSION`](super::STATE_VERSION).
    ///
    /// # Errors
    /// It is not paused, or has no state yet.
    fn save(&self) -> Result<Vec<u8>, GuestError>;

    /// Takes the state of another one of its kind, with memory of the same size.
    ///
    /// # Errors
    /// It is not paused, or the state is not one.
    fn load(&self, state: &[u8]) -> Result<(), GuestError>;

    /// Looks at all of its memory.
    ///
    /// # Errors
    /// It is not paused, has no state yet, or [`GuestError::Damaged`].
    fn verify(&self) -> Result<Verified, GuestError>;
}
