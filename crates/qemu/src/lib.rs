//! A QMP client and what drives a QEMU process through save and restore.
//!
//! From the bottom up:
//!
//! | module | job |
//! |---|---|
//! | [`qmp`] | the monitor protocol: greeting, commands, events, descriptors |
//! | [`monitor`] | what limosa asks QEMU, as typed calls |
//! | [`process`] | which process a job is, and whether it lives |
//! | [`marker`] | the record of a running job, kept inside the QEMU process |
//! | [`launch`] | starting a QEMU that waits for a VM, with a monitor of its own |
//! | [`meeting`] | a private place where QEMU and limosa meet when a descriptor cannot be passed |
//! | [`takeover`] | what to do with a VM whose job died: a pure plan, and its execution |
//! | [`guard`] | the child process that takes over when limosa is killed |
//! | [`destination`] | whether a stored VM would load on a QEMU, asked without changing it |
//! | [`resume`] | `limosa resume`: the same, on request, with an explanation |
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

pub mod destination;
pub mod guard;
mod image;
pub mod job;
pub mod launch;
pub mod marker;
pub mod meeting;
pub mod monitor;
pub mod process;
mod program;
pub mod qmp;
pub mod restore;
pub mod resume;
pub mod save;
pub mod takeover;
