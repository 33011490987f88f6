//! A QMP client and what drives a QEMU process through save and restore.
//!
//! | what | where |
//! |---|---|
//! | the monitor protocol: greeting, commands, events, descriptors | [`qmp`] |
//! | what is asked of QEMU, as typed calls | [`monitor`] |
//! | saving a VM | [`save`](fn@save), [`SaveOptions`], [`SaveReport`] |
//! | restoring it, lazily or eagerly; finishing an interrupted restore | [`Restore`], [`restore`](fn@restore), [`recover`] |
//! | the record of a running job, kept inside the QEMU process | [`JobMarker`] |
//! | what to do with a VM whose job was killed: a pure plan, and its execution | [`takeover`] |
//! | the child process that does it at once | [`Guard`], [`run_guard`] |
//! | the same on request | [`resume`](fn@resume) |
//! | starting a QEMU that waits for a VM | [`launch`](fn@launch) |
//! | whether a stored VM would load on a QEMU, asked without changing it | [`examine_destination`] |
//!
//! An error says what is wrong. What can be done about it, where that depends on the options of this crate, is a
//! [`Remedy`].
//!
//! A worked example: ask a VM how it is.
//!
//! ```no_run
//! use limosa_qemu::monitor::Monitor;
//! use limosa_qemu::qmp::{Options, Qmp};
//!
//! let qmp = Qmp::connect(&"unix:/run/vm/qmp.sock".parse()?, &Options::default())?;
//! let monitor = Monitor::new(qmp);
//! println!("QEMU {}: {}", monitor.version(), monitor.status()?.state);
//! for reason in monitor.migration()?.blocked_reasons {
//!     println!("cannot be saved: {reason}");
//! }
//! # Ok::<(), limosa_qemu::qmp::QmpError>(())
//! ```

pub mod command_line;
mod destination;
mod guard;
mod image;
mod job;
mod launch;
mod mapping;
mod marker;
pub mod monitor;
mod process;
mod program;
pub mod qmp;
mod remedy;
mod restore;
mod resume;
mod save;
mod socket_directory;
pub mod takeover;

pub use destination::{Catalogue, CatalogueError, QemuSections, examine as examine_destination};
pub use guard::{Guard, GuardEnd, GuardError, run as run_guard};
pub use job::{JobError, NotConverging, Watch};
pub use launch::{CommandLine, Launched, check as check_command_line, launch, launch_from, missing_memory_option};
pub use mapping::{
    BlockPlace, MappedCommandLine, MemoryConflict, check_not_shared, map_memory, name_memory, prove_mapping,
    refuse_shared_snapshot,
};
pub use marker::{JobKind, JobMarker, JobPhase, MarkerError, Overlay, VmAfter};
pub use process::{Liveness, ProcessIdentity};
pub use remedy::Remedy;
pub use restore::{
    LazyReport, Mode, Restore, RestoreChannels, RestoreObserver, RestoreOptions, RestoreReport, RunChoice, StartGuard,
    recover, restore,
};
pub use resume::{ResumeError, ResumeOptions, Resumed, explain as explain_pause, resume};
pub use save::{DiskPolicy, OnTimeout, Route, SaveOptions, SaveReport, save};
pub use socket_directory::SocketDirectory;

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
