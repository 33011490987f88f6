//! A QMP client and what drives a QEMU process through save and restore.
//!
//! | what | where |
//! |---|---|
//! | the monitor protocol: greeting, commands, events, descriptors | [`qmp`] |
//! | what is asked of QEMU, as typed calls | [`monitor`] |
//! | saving a VM | [`save`](fn@save), [`SaveOptions`], [`SaveReport`] |
//! | restoring it; finishing an interrupted restore | [`RestoreRequest`], [`restore`](fn@restore), [`recover`] |
//! | the record of a running job, kept inside the QEMU process | [`JobRecord`] |
//! | what to do with a VM whose job was killed: a pure plan, and its execution | [`takeover`] |
//! | the child process that does it at once | [`Watchdog`], [`run_watchdog`] |
//! | the same on request | [`resume`](fn@resume) |
//! | starting a QEMU that waits for a VM; loading one, for a caller that has its own | [`launch`](fn@launch), [`Loader`] |
//! | setting the guest's clock through its agent | [`GuestClock`] |
//! | the processes that map a snapshot; what a mapped VM has changed or touched | [`Mappers`], [`MappedVm`], [`MappedRecording`] |
//! | whether a stored VM would load on a QEMU, asked without changing it | [`examine_destination`] |
//!
//! An error says what is wrong. Where other options or another command help, it carries a typed [`Conflict`].
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
mod conflict;
mod destination;
mod detached;
mod disk_image;
mod disk_server;
mod file_identity;
mod guest_agent;
mod job;
mod job_record;
mod launch;
mod load;
mod mapping;
pub mod monitor;
mod overlays;
mod process;
mod program;
pub mod qmp;
mod restore;
mod resume;
mod save;
mod socket_directory;
pub mod takeover;
mod threads;
mod watchdog;

pub use conflict::{Conflict, DiskConflict, JobOption, MissingPermission, RendezvousConflict, StateConflict};
pub use destination::{QemuSections, VmstateDump, VmstateDumpError, examine as examine_destination};
pub use detached::launch_detached;
pub use disk_server::{
    DroppedDisk, EpochDisks, check_droppable as check_droppable_disks, drop_after as drop_disks_after,
    find_unfenced_disks, refuse_changed as refuse_changed_disks,
};
pub use file_identity::{FileId, is_same_file};
pub use guest_agent::{AgentAnswers, ClockSet, GuestAgentError, GuestClock, TooManyBytes};
pub use job::{JobContext, JobError, NotConverging};
pub use job_record::{
    JobKind, JobPhase, JobRecord, JobRecordError, Overlay, OverlayChain, ServedEpochs, ServedOverlay, VmAfterJob,
};
pub use launch::{
    CommandLineProperties, IncomingFrom, Launched, check as check_command_line, check_program, launch,
    missing_memory_option,
};
pub use load::Loader;
pub use mapping::{
    BlockPages, BlockPlace, MappedCommandLine, MappedRecording, MappedVm, MappedVmError, Mapper, Mappers,
    MemoryConflict, NotMapping, check_snapshot_not_shared, name_memory_backend, prove_mapping, rewrite_for_mapping,
};
pub use overlays::{EpochOverlays, bring_overlays, check_bringable_overlays, find_overlay_ledger, merge_overlays};
pub use process::{Liveness, ProcessIdentity};
pub use restore::{
    LazyReport, RestoreChannels, RestoreMode, RestoreObserver, RestoreOptions, RestoreReport, RestoreRequest,
    RunChoice, StartWatchdog, recover, restore,
};
pub use resume::{ResumeError, ResumeOptions, Resumed, explain as explain_pause, resume};
pub use save::{
    DiskPolicy, OnTimeout, SaveOptions, SaveReport, SaveTimeout, TransportChoice, background_settings,
    explain_background_refusal, save, why_no_background_snapshot,
};
pub use socket_directory::{SOCKET_PATH_MAX, SocketDirectory};
pub use watchdog::{Advice as WatchdogAdvice, Heartbeat, Watchdog, WatchdogEnd, WatchdogError, run as run_watchdog};

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
