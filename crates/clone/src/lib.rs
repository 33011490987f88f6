//! Many VMs of one snapshot: memory mapped from the file, an overlay on each disk, a directory for each.
//!
//! | what | where |
//! |---|---|
//! | `{n}`, `{name}`, `{dir}` in a command line; its disks behind overlays | [`CommandTemplate`] |
//! | starting clones, several at a time; QEMUs that wait for the next ones | [`Fleet`] |
//! | listing, ending and removing clones | [`list`], [`stop`], [`remove`] |
//! | the record of a clone, and its phase | [`Record`], [`Phase`] |
//! | the copy of a packed snapshot that clones share | [`copy_path`] |
//! | disks of clones that a snapshot is saved with | [`SavedDisks`] |
//!
//! The law: **a VM is either there and listed, or does not exist**, also after a kill at any moment. A clone's record
//! names its process before it gets the first byte of its VM; a QEMU whose stream ends too early ends itself. What a
//! pool has waits without a VM, and is listed too.

mod command_line;
mod copies;
mod directory;
mod error;
mod fleet;
mod home;
mod making;
mod overlay;
mod phase;
mod pool;
mod proof;
mod record;
mod saved_disks;
mod start;
mod starting;

pub use command_line::CommandTemplate;
pub use copies::copy_path;
pub use directory::{
    CloneOutcome, DiskInUse, ListedClone, RemoveOptions, RemoveReport, State, StopOptions, list, remove, stop,
};
pub use error::CloneError;
pub use fleet::{CloneMemory, FailedClone, Fleet, FleetOptions, FleetReport, PooledClone, StartedClone};
pub use overlay::Backing;
pub use phase::Phase;
pub use record::{OverlayRecord, PoolPurpose, Record, SnapshotIdentity};
pub use saved_disks::SavedDisks;

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
