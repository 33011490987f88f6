//! Many VMs of one snapshot: memory mapped from the file, an overlay on each disk, a directory for each.
//!
//! | what | where |
//! |---|---|
//! | `{n}`, `{name}`, `{dir}` in a command line; its disks behind overlays | [`CommandTemplate`] |
//! | starting clones, several at a time | [`Fleet`] |
//! | listing, ending and removing clones | [`list`], [`stop`], [`remove`] |
//! | the record of a clone, and its phase | [`Record`], [`Phase`] |
//!
//! The law: **a VM either runs and is listed, or does not exist**, also after a kill at any moment. A clone's record
//! names its process before it gets the first byte of its VM; a QEMU whose stream ends too early ends itself.

mod command_line;
mod directory;
mod error;
mod fleet;
mod home;
mod overlay;
mod phase;
mod proof;
mod record;
mod start;

pub use command_line::{CommandTemplate, FrozenDisk, OverlayPlan};
pub use directory::{Done, Listed, RemoveOptions, Removed, State, StopOptions, list, remove, stop};
pub use error::CloneError;
pub use fleet::{Failure, Fleet, FleetOptions, FleetReport, Started};
pub use overlay::Backing;
pub use phase::Phase;
pub use record::{OverlayRecord, Record, SnapshotIdentity};

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
