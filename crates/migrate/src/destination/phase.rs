//! The phases of a stream that arrives, each with what it needs of those before it.

use std::fmt;

use limosa_page::{BrokenInvariant, invariant};
use limosa_stream::CompleteTail;

use crate::pages::StreamSetup;

/// A phase that is next.
///
/// ```text
/// layout ──► memory ──► device state ──► whole
///              │
///              └──────► package
/// ```
///
/// Up to `whole` the source keeps the VM on every failure; with `package` it gives the VM away before its memory has
/// come.
pub(super) enum Phase {
    /// The stream begins: header and RAM layout.
    Layout,
    /// The layout is accepted; pages come, on all channels.
    Memory(StreamSetup),
    /// Every page is in its place; the device sections come.
    DeviceState(StreamSetup),
    /// The stream has come to its end.
    Whole(Whole),
    /// The stream continues with the package of a postcopy.
    Package(Package),
}

/// The end of a stream.
pub(super) struct Whole {
    pub(super) start: StreamSetup,
    /// Device sections and their description.
    pub(super) tail: Vec<u8>,
    pub(super) devices: CompleteTail,
}

/// A package that follows.
pub(super) struct Package {
    pub(super) start: StreamSetup,
    /// Bytes of the package.
    pub(super) length: u32,
}

/// The name of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Layout,
    Memory,
    DeviceState,
    Whole,
    Package,
}

impl Phase {
    /// The phase's name.
    pub(super) fn step(&self) -> Step {
        match self {
            Self::Layout => Step::Layout,
            Self::Memory(_) => Step::Memory,
            Self::DeviceState(_) => Step::DeviceState,
            Self::Whole(_) => Step::Whole,
            Self::Package(_) => Step::Package,
        }
    }
}

impl Step {
    /// Whether the phase may come next to another one.
    pub(super) fn can_follow(self, before: Self) -> bool {
        match self {
            Self::Layout => false,
            Self::Memory => before == Self::Layout,
            Self::DeviceState | Self::Package => before == Self::Memory,
            Self::Whole => before == Self::DeviceState,
        }
    }

    /// Makes sure that the phase may come next to another one.
    pub(super) fn check_follows(self, before: Self) -> Result<(), BrokenInvariant> {
        invariant(self.can_follow(before), "the phases of an incoming migration follow each other as they are drawn")
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Layout => "layout",
            Self::Memory => "memory",
            Self::DeviceState => "device state",
            Self::Whole => "whole",
            Self::Package => "package",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::is_noticed;

    const ALL: [Step; 5] = [Step::Layout, Step::Memory, Step::DeviceState, Step::Whole, Step::Package];

    #[test]
    fn every_phase_is_reached_and_none_comes_twice() {
        for step in ALL.into_iter().filter(|step| *step != Step::Layout) {
            assert!(ALL.iter().any(|before| step.can_follow(*before)), "{step} is never reached");
            assert!(!step.can_follow(step), "{step} comes twice");
        }
    }

    #[test]
    fn a_stream_that_ends_before_its_memory_and_its_devices_have_come_is_noticed() {
        for before in [Step::Layout, Step::Memory, Step::Package] {
            assert!(is_noticed(|| Step::Whole.check_follows(before)), "{before}");
        }
        for before in [Step::Layout, Step::DeviceState] {
            assert!(is_noticed(|| Step::Package.check_follows(before)), "{before}");
        }
        Step::Whole.check_follows(Step::DeviceState).unwrap();
    }
}
