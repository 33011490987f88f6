//! The watchdog: a child process that takes over when limosa is killed.
//!
//! Law: **no signal to limosa leaves a VM stopped.** SIGKILL cannot be caught, so another process has to notice it: a
//! child that holds a duplicate of the monitor's descriptor (QEMU accepts no other client while it is open) and one end
//! of a socket pair whose other end dies with limosa. Until then it reads nothing from the monitor and sends nothing.
//!
//! The watchdog is the same executable, started again with hidden arguments: stdin is the control channel, stdout the
//! monitor. It lives in a session of its own, so the terminal's signals do not reach it. What it does about the VM is
//! [`crate::takeover`].
//!
//! A limosa that is stopped (SIGSTOP) does not die, and could wake up at any moment. Where that would leave a VM
//! standing still it sends a [`Heartbeat`], without which the watchdog ends it before it takes over.
//!
//! If the watchdog dies too, the job's record inside QEMU remains, and `limosa resume` does the same later.
//!
//! Facts found with QEMU 10.0.2: the byte 0xff makes the monitor's parser drop an unfinished command, wherever it was
//! cut; QEMU answers it with an error that has no id. Commands that were complete are carried out before what follows,
//! so a state that is read after the flush is the state after limosa's last command.

mod child;
mod held_connections;
mod parent;
#[allow(unsafe_code, reason = "std and rustix offer no safe call to ignore a signal")]
mod signals;

/// The argument in place of the id of QEMU's process, if it is not known.
const UNKNOWN_PROCESS: &str = "-";

pub use child::{Advice, run};
pub(crate) use held_connections::{HOLD, HeldConnections};
pub use parent::{Heartbeat, Watchdog, WatchdogEnd, WatchdogError};
