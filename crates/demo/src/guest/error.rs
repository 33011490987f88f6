//! Errors of guests.

use std::io;

use limosa_memory::MemoryError;
use limosa_memory::dirty::LogError;

use super::options::GuestKind;

/// Errors of guests.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// It cannot be made like that.
    #[error("guest {kind}: {why}")]
    Options {
        /// Its kind.
        kind: GuestKind,
        /// The conflict.
        why: String,
    },

    /// This machine cannot run it.
    #[error("guest {kind} cannot run here: {why}")]
    Unavailable {
        /// Its kind.
        kind: GuestKind,
        /// The missing part, and what to do.
        why: String,
    },

    /// The state to be loaded is not one, or is that of another memory.
    #[error("the state of guest {kind} at byte {offset}: {why}")]
    State {
        /// Its kind.
        kind: GuestKind,
        /// Bytes into the state.
        offset: usize,
        /// The expectation.
        why: String,
    },

    /// It has no state yet: it waits for [`Guest::load`](super::Guest::load).
    #[error("the guest has not been given its state yet")]
    NoState,

    /// Only a paused guest can do that.
    #[error("{0} is only possible while the guest is paused")]
    NotPaused(&'static str),

    /// Its memory does not hold what it must: something was lost on the way.
    #[error(
        "RAM block {block}, page {page}: byte {offset} on should hold {expected:#010x} (written {generation} times) and holds \
         {found:#010x}: {found_in} of the guest's pages are wrong"
    )]
    Damaged {
        /// The block.
        block: String,
        /// Page in it.
        page: u64,
        /// Bytes into the page.
        offset: usize,
        /// How often the guest has written the page.
        generation: u64,
        /// The expected word.
        expected: u32,
        /// The word found.
        found: u32,
        /// Pages that are wrong.
        found_in: u64,
    },

    /// A writer of it has failed.
    #[error("a writer of guest {kind} failed: {why}")]
    Failed {
        /// Its kind.
        kind: GuestKind,
        /// The reason.
        why: String,
    },

    /// The kernel refused.
    #[error("guest {kind}: {operation}")]
    Kernel {
        /// Its kind.
        kind: GuestKind,
        /// The operation.
        operation: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },

    /// Its memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),

    /// Its dirty log.
    #[error(transparent)]
    Log(#[from] LogError),
}
