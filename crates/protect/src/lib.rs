//! Continuous protection of a QEMU VM: its checkpoints are kept all the while.
//!
//! The law: **a checkpoint counts when it is whole in the directory, and the VM never stands still for a keeper that
//! has failed.** QEMU's COLO has no time-out of its own: a VM that has been stopped for a checkpoint waits for ever. So
//! the keeper ends COLO when a checkpoint makes no progress, and its [`Watchdog`](limosa_qemu::Watchdog) when it dies.
//!
//! | what | where |
//! |---|---|
//! | the checks before anything is changed | `preflight` |
//! | the settings, QEMU's connection, the guard, the end | `keeper`, `guard` |
//! | the pause at the end of a base that the guest outruns | `convergence` |
//! | the turns of checkpoints and the store, on a thread of their own | `series` |
//! | the VM of a series, on this host or elsewhere | `primary` |
//! | a keeper on another host, and this end's relay to it | `remote` |
//! | the gate that holds the VM's frames back until their checkpoint counts | [`gate`] |
//! | a QEMU on the keeper's host that has the VM's memory already | `standby` |
//! | checkpoints without COLO | `background` |
//! | filters in QEMU, for a VM without gates | `filters` |
//! | overlays of disks that QEMU opens itself | `overlays` |
//! | what is noticed of disks that change | `writable` |
//! | what refuses a VM that was failed over and may still run | `fence` |
//! | what is counted | [`ProtectReport`], [`KeptBase`], [`KeptCheckpoint`] |
//!
//! Facts found with QEMU 11.1 that it rests on: the VM stands still from the end of the base until its answer, and from
//! REPLY to LOADED; the command `x-colo-lost-heartbeat` ends both; a cancel does not.
//!
//! # Example
//!
//! Protect a VM, and print each checkpoint.
//!
//! ```no_run
//! use limosa_migrate::Handle;
//! use limosa_protect::{CheckpointTarget, KeptCheckpoint, ProtectOptions, ProtectRequest, protect};
//! use limosa_qemu::JobContext;
//! use limosa_qemu::monitor::Monitor;
//! use limosa_qemu::qmp::{Options, Qmp};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let monitor = Monitor::new(Qmp::connect(&"unix:/run/vm.qmp".parse()?, &Options::default())?);
//! let (handle, notice) = (Handle::new(), |line: &str| eprintln!("{line}"));
//! let kept = |checkpoint: &KeptCheckpoint| println!("{}: {:?}", checkpoint.number, checkpoint.pause);
//! let report = protect(ProtectRequest {
//!     monitor: &monitor,
//!     to: CheckpointTarget::Directory("/srv/vm".as_ref()),
//!     options: &ProtectOptions::default(),
//!     watch: JobContext::new(&handle, &notice),
//!     gates: &[],
//!     began: &|_| {},
//!     kept: &kept,
//!     start_watchdog: &|| Ok(None),
//! })?;
//! println!("{} checkpoints", report.checkpoints);
//! # Ok(()) }
//! ```

mod background;
mod convergence;
mod error;
mod fence;
mod filters;
pub mod gate;
mod guard;
mod keeper;
#[cfg(test)]
mod model;
mod options;
mod overlays;
mod preflight;
mod primary;
mod remote;
mod report;
mod series;
mod standby;
mod times;
mod writable;

pub use error::ProtectError;
pub use fence::{Uncovered, find_uncovered};
pub use keeper::{CheckpointTarget, ProtectRequest, protect};
pub use options::{CheckpointMethod, CheckpointTiming, OnLoss, ProtectDisks, ProtectOptions};
pub use remote::{
    Farewell, KeepEvent, KeepOptions, KeepReport, KeepRequest, KeeperAddress, StandbyOptions, Survivor, give_back,
    has_survivor, keep, take_over,
};
pub use report::{KeptBase, KeptCheckpoint, ProtectEnd, ProtectReport};
pub use standby::Continued;
pub use times::Percentiles;

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
