//! A list of free pages that was requested.

use std::sync::Arc;
use std::time::Instant;

use limosa_memory::FreePageSink;

use crate::hint::{Handshake, HintState};

/// The handshake, and the destination of the list.
#[derive(Default)]
pub(super) struct Hinting {
    pub(super) handshake: Handshake,
    pub(super) sink: Option<Arc<dyn FreePageSink>>,
    pub(super) list: HintList,
}

/// The progress of a list of free pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HintList {
    /// The state of the handshake.
    pub state: HintState,
    /// The id of the command; 0 if there was none.
    pub id: u32,
    /// Whether the list is complete.
    pub complete: bool,
    /// Free blocks received.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// When it was requested.
    pub requested_at: Option<Instant>,
    /// When its last buffer was received.
    pub last_buffer_at: Option<Instant>,
}
