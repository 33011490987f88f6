//! The turns of checkpoints.

use std::fmt;

use limosa_page::{BrokenInvariant, invariant};

/// The side whose turn it is, and what for.
///
/// ```text
/// base ──► idle ──► requested ──► stopped ──► sent ──► received ─┐
///           ▲ │          │           │                           │
///           │ └──────► over ◄────────┘                           │
///           └────────────────────────────────────────────────────┘
/// ```
///
/// `sent` may be left out. Everything but `over` can become `broken`, and nothing follows that. The VM stands still in
/// `base`, `sent` and `received`, and soon in `stopped`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// The base is here, and its source waits.
    Base,
    /// The VM runs; no checkpoint is due.
    Idle,
    /// The VM runs; its primary waits for the reply.
    Requested,
    /// The VM may be stopped; a checkpoint comes.
    Stopped,
    /// The VM is stopped; its pages come.
    Sent,
    /// The checkpoint is here; its primary waits.
    Received,
    /// The primary has ended the series.
    Over,
    /// Something failed.
    Broken,
}

impl Turn {
    /// Whether this turn may come next to another one.
    pub(super) fn can_follow(self, before: Self) -> bool {
        match self {
            Self::Base => false,
            Self::Idle => matches!(before, Self::Base | Self::Received),
            Self::Requested => before == Self::Idle,
            Self::Over => matches!(before, Self::Idle | Self::Requested | Self::Stopped),
            Self::Stopped => before == Self::Requested,
            Self::Sent => before == Self::Stopped,
            Self::Received => matches!(before, Self::Stopped | Self::Sent),
            Self::Broken => !matches!(before, Self::Over | Self::Broken),
        }
    }

    /// Makes sure that this turn may come next to another one.
    pub(super) fn check_follows(self, before: Self) -> Result<(), BrokenInvariant> {
        invariant(self.can_follow(before), "the turns of checkpoints follow each other as they are drawn")
    }
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Base => "base",
            Self::Idle => "idle",
            Self::Requested => "requested",
            Self::Stopped => "stopped",
            Self::Sent => "sent",
            Self::Received => "received",
            Self::Over => "over",
            Self::Broken => "broken",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::is_noticed;

    const ALL: [Turn; 8] =
        [Turn::Base, Turn::Idle, Turn::Requested, Turn::Stopped, Turn::Sent, Turn::Received, Turn::Over, Turn::Broken];

    #[test]
    fn every_turn_is_reached_and_nothing_follows_an_end() {
        for turn in ALL.into_iter().filter(|turn| *turn != Turn::Base) {
            assert!(ALL.iter().any(|before| turn.can_follow(*before)), "{turn} is never reached");
            assert!(!turn.can_follow(turn), "{turn} comes twice");
        }
        for end in [Turn::Over, Turn::Broken] {
            assert!(ALL.iter().all(|turn| !turn.can_follow(end)), "{end}");
        }
    }

    #[test]
    fn a_vm_that_is_let_go_before_its_checkpoint_has_come_is_noticed() {
        assert!(is_noticed(|| Turn::Idle.check_follows(Turn::Stopped)));
        Turn::Idle.check_follows(Turn::Received).unwrap();
    }
}
