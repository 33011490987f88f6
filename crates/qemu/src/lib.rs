//! A QMP client and what drives a QEMU process through save and restore.
//!
//! From the bottom up:
//!
//! | module | job |
//! |---|---|
//! | [`qmp`] | the monitor protocol: greeting, commands, events, descriptors |
//! | [`monitor`] | what limosa asks QEMU, as typed calls |
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

pub mod monitor;
pub mod qmp;
