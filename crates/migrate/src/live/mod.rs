//! Migrating a VM while it runs.
//!
//! A VMM implements [`LiveVm`] at the source and [`IncomingVm`] at the destination; the contracts are on these traits.
//! [`LiveSource`] and [`LiveDestination`] move the VM, and their outcomes say which side has it. The example `vmm` is a
//! small VMM that has both.

pub(crate) mod destination;
mod params;
pub(crate) mod shared_memory;
pub(crate) mod source;
mod vm;

pub use crate::source::postcopy::OpenPreempt;
pub use destination::{
    AcceptPreempt, IncomingOutcome, LayoutDifference, LiveDestination, LiveDestinationOptions, PostcopyPaused,
    UndecidedIncoming,
};
pub use params::{MigrationParams, RecordWriteMode, TimeoutStrategy, UnknownSettingName, ZeroCheck};
pub use shared_memory::SharedMemoryMode;
pub use source::{LiveOutcome, LiveSource, PostcopyMode, PostcopyPausedSource, Undecided};
pub use vm::{IncomingVm, LiveVm, VmError};
