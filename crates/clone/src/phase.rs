//! The life of a clone.

use serde::{Deserialize, Serialize};

/// A phase in the life of a clone, as its record has it.
///
/// ```text
/// Prepared ─▶ Waiting ─▶ Loaded ─▶ Running
///     │          │          │         │
///     └──────────┴──────────┴─────────┴──▶ Ended
/// ```
///
/// A phase is written down after it was reached, so a process that is killed leaves a record that is at most one phase
/// behind. Only [`Waiting`](Self::Waiting) is written before the clone can go further: the process that limosa ends, or
/// that ends by itself, must be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Its files are made. There is no process.
    Prepared,
    /// Its QEMU runs and waits for the VM.
    Waiting,
    /// Its QEMU has the VM, paused.
    Loaded,
    /// The VM was started.
    Running,
    /// Its QEMU was ended.
    Ended,
}

impl Phase {
    /// Whether a clone in this phase may enter `next`.
    #[must_use]
    pub fn can_follow(self, next: Self) -> bool {
        matches!(
            (self, next),
            (Self::Prepared, Self::Waiting)
                | (Self::Waiting, Self::Loaded)
                | (Self::Loaded, Self::Running)
                | (Self::Prepared | Self::Waiting | Self::Loaded | Self::Running, Self::Ended)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_life_has_one_direction() {
        let all = [Phase::Prepared, Phase::Waiting, Phase::Loaded, Phase::Running, Phase::Ended];
        for (place, phase) in all.iter().enumerate() {
            for (other, next) in all.iter().enumerate() {
                let follows = other == place + 1 || (*next == Phase::Ended && place < other);
                assert_eq!(phase.can_follow(*next), follows, "{phase:?} to {next:?}");
            }
        }
    }
}
