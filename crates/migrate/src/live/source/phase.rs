//! The phases of a live migration, each with what it needs of those before it.

use std::fmt;

use limosa_page::{BrokenInvariant, PageBitmap, invariant};

use super::guest::GuestSource;
use super::round::Rounds;
use super::sent_bitmap::SentBitmap;

/// A phase that is next.
///
/// ```text
///          ┌─────────► precopy ──────────┐
///          │              ▲ (rounds)     │
/// setup ───┼─────────► hints ────────────┤
///          │                             ▼
///          └──────────────────────────► pause ──► last round ──► device state ──► commit
///                                        │
///                                        └──────► postcopy
/// ```
///
/// Up to `pause` the VM runs here; until `commit` or `postcopy` has handed it over it continues here on every failure.
pub(super) enum Phase<'e, 'v> {
    /// The stream is open; the destination has not answered yet.
    Setup,
    /// Rounds over what the VM writes.
    Precopy(Box<Rounds<'e, 'v>>),
    /// Postcopy at once, of a guest that is asked for its free pages before.
    Hints(Box<Rounds<'e, 'v>>),
    /// The VM is stopped next.
    Pause(Left<'e, 'v>),
    /// The rest is sent next, while the VM stands still.
    LastRound(Box<LastRound<'e, 'v>>),
    /// The state of the devices is sent and loaded next.
    DeviceState,
    /// The destination has everything, and waits for the commit.
    Commit(Commit),
    /// The VM runs at the destination next, before its memory is there.
    Postcopy(Switch<'v>),
}

/// The pages left when the VM is about to be stopped.
pub(super) enum Left<'e, 'v> {
    /// All of it, in postcopy.
    All,
    /// Pages, in postcopy.
    Postcopy(Unmoved),
    /// Pages, in a last round.
    LastRound(Box<LastRound<'e, 'v>>),
}

/// The pages of the last round.
pub(super) struct LastRound<'e, 'v> {
    pub(super) rounds: Rounds<'e, 'v>,
    pub(super) pages: Vec<PageBitmap>,
    /// Holes that were not sent.
    pub(super) holes: Vec<PageBitmap>,
    /// Pages that were written between the last reading of the logs and the pause.
    pub(super) dirty: u64,
}

/// A VM that is at the destination as a whole, where it waits for the commit.
pub(super) struct Commit {
    /// Description of the device sections.
    pub(super) description: Vec<u8>,
}

/// Memory that the destination of a postcopy does not have.
pub(super) struct Unmoved {
    /// Pages that were written and not sent.
    pub(super) dirty: Vec<PageBitmap>,
    pub(super) sent: SentBitmap,
}

/// A VM that stands still here, ready to run there without its memory.
pub(super) struct Switch<'v> {
    /// The memory that follows, and the devices.
    pub(super) guest: GuestSource<'v>,
    /// Pages that the destination has, by block.
    pub(super) already: Vec<PageBitmap>,
    /// The commands that discard all others.
    pub(super) discards: Vec<u8>,
}

impl<'e, 'v> LastRound<'e, 'v> {
    /// A last round of pages that were written and not sent, and of holes that were not sent.
    pub(super) fn new(rounds: Rounds<'e, 'v>, pages: Vec<PageBitmap>, holes: Vec<PageBitmap>) -> Self {
        Self { rounds, pages, holes, dirty: 0 }
    }
}

/// The name of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Setup,
    Precopy,
    Hints,
    Pause,
    LastRound,
    DeviceState,
    Commit,
    Postcopy,
}

impl Phase<'_, '_> {
    /// The phase's name.
    pub(super) fn step(&self) -> Step {
        match self {
            Self::Setup => Step::Setup,
            Self::Precopy(_) => Step::Precopy,
            Self::Hints(_) => Step::Hints,
            Self::Pause(_) => Step::Pause,
            Self::LastRound(_) => Step::LastRound,
            Self::DeviceState => Step::DeviceState,
            Self::Commit(_) => Step::Commit,
            Self::Postcopy(_) => Step::Postcopy,
        }
    }
}

impl Step {
    /// Whether the phase may come next to another one.
    pub(super) fn can_follow(self, before: Self) -> bool {
        match self {
            Self::Setup => false,
            Self::Precopy | Self::Hints => before == Self::Setup,
            Self::Pause => matches!(before, Self::Setup | Self::Precopy | Self::Hints),
            Self::LastRound | Self::Postcopy => before == Self::Pause,
            Self::DeviceState => before == Self::LastRound,
            Self::Commit => before == Self::DeviceState,
        }
    }

    /// Makes sure that the phase may come next to another one.
    pub(super) fn check_follows(self, before: Self) -> Result<(), BrokenInvariant> {
        invariant(self.can_follow(before), "the phases of a live migration follow each other as they are drawn")
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Setup => "setup",
            Self::Precopy => "precopy",
            Self::Hints => "hints",
            Self::Pause => "pause",
            Self::LastRound => "last round",
            Self::DeviceState => "device state",
            Self::Commit => "commit",
            Self::Postcopy => "postcopy",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::is_noticed;

    const ALL: [Step; 8] = [
        Step::Setup,
        Step::Precopy,
        Step::Hints,
        Step::Pause,
        Step::LastRound,
        Step::DeviceState,
        Step::Commit,
        Step::Postcopy,
    ];

    #[test]
    fn every_phase_is_reached_and_none_comes_twice() {
        for step in ALL.into_iter().filter(|step| *step != Step::Setup) {
            assert!(ALL.iter().any(|before| step.can_follow(*before)), "{step} is never reached");
            assert!(!step.can_follow(step), "{step} comes twice");
        }
        // Every transition leads on, so none leads back.
        for (index, step) in ALL.into_iter().enumerate() {
            assert!(ALL[index..].iter().all(|before| !step.can_follow(*before)), "{step}");
        }
    }

    #[test]
    fn a_vm_is_not_handed_over_before_it_stands_still_and_all_of_it_is_sent() {
        for before in [Step::Setup, Step::Precopy, Step::Hints, Step::Pause, Step::LastRound] {
            assert!(is_noticed(|| Step::Commit.check_follows(before)), "{before}");
        }
        for before in [Step::Setup, Step::Precopy, Step::Hints] {
            assert!(is_noticed(|| Step::Postcopy.check_follows(before)), "{before}");
        }
        Step::Commit.check_follows(Step::DeviceState).unwrap();
        Step::Postcopy.check_follows(Step::Pause).unwrap();
    }
}
