//! The settings of a demonstration, and the words of its processes.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::guest::LogKind;

/// How long either process may take for what is expected of it next.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// The word of a keeper that can be connected to.
pub(super) const READY: &str = "ready";
/// The word before the number of the last line that the survivor knows.
pub(super) const KNOWN: &str = "known";
/// The settings of a demonstration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtectSettings {
    /// Bytes of the guest's memory.
    pub memory: u64,
    /// Bytes that it writes in a second.
    pub dirty_rate: u64,
    /// Time from one checkpoint to the next.
    pub every: Duration,
    /// Whether a line that wants to leave asks for a checkpoint.
    pub by_output: bool,
    /// Whether lines wait for their checkpoint; if not, the law is broken.
    pub held: bool,
    /// Time between two lines.
    pub line_every: Duration,
    /// The dirty log.
    pub log: LogKind,
}
