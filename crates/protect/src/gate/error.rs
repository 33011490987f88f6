//! The failures of a gate and of its keeper's end.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a gate cannot be opened, or does not do what its keeper needs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GateError {
    /// It cannot listen.
    #[error("cannot listen at {}", path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },

    /// A system call failed that its work depends on.
    #[error("cannot {what}")]
    System {
        /// The work.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },

    /// No gate is there.
    #[error("cannot connect to the gate at {}", path.display())]
    Connect {
        /// Its socket.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },

    /// Another keeper has it.
    #[error("the gate at {} belongs to another protection", path.display())]
    Busy {
        /// Its socket.
        path: PathBuf,
    },

    /// It refuses the keeper: the VM that is connected to it is not the keeper's.
    #[error("the gate at {} is that of another VM: process {process} is connected to it", path.display())]
    OtherVm {
        /// Its socket.
        path: PathBuf,
        /// The process of that VM.
        process: u32,
    },

    /// It refuses the keeper: its VM was failed over.
    #[error("the gate at {} refuses this VM, which was failed over", path.display())]
    FailedOver {
        /// Its socket.
        path: PathBuf,
    },

    /// It does not answer.
    #[error("the gate at {} has not answered for {} s", path.display(), after.as_secs_f64())]
    Timeout {
        /// Its socket.
        path: PathBuf,
        /// The limit.
        after: Duration,
    },

    /// It speaks another protocol or version.
    #[error("the socket {} is not that of a gate: {found}", path.display())]
    Protocol {
        /// The socket.
        path: PathBuf,
        /// The answer.
        found: String,
    },

    /// It has ended.
    #[error("the gate at {} has ended", path.display())]
    Ended {
        /// Its socket.
        path: PathBuf,
    },
}
