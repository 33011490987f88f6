//! Reasons why a guest agent did not do what it was asked for.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::qmp::QmpError;

/// A guest agent that cannot be reached, does not answer, or refuses.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestAgentError {
    /// The VM has no port for an agent.
    #[error("the VM has no port for a guest agent (a virtserialport with the name org.qemu.guest_agent.0)")]
    NoPort,
    /// The monitor may be on another host, and its QEMU's sockets with it.
    #[error("the monitor is no unix socket, and only of a QEMU on this host can the guest agent be reached")]
    Remote,
    /// No agent runs in the guest.
    #[error("no guest agent runs in the guest")]
    NotRunning,
    /// Another program talks to the agent.
    #[error("another program is connected to the guest agent's chardev {chardev}")]
    InUse {
        /// The id of the chardev.
        chardev: String,
    },
    /// The port leads to no socket that limosa can connect to.
    #[error("the guest agent's chardev {chardev} is no unix socket at which QEMU listens: '{found}'")]
    NotASocket {
        /// The id of the chardev.
        chardev: String,
        /// QEMU's description of it.
        found: String,
    },
    /// Another process listens at the socket: QEMU has another root directory, for one.
    #[error("{}: the process that listens there is not this QEMU", path.display())]
    OtherProcess {
        /// The socket.
        path: PathBuf,
    },
    /// The socket cannot be connected to.
    #[error("cannot connect to the guest agent's socket {}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The monitor failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The agent did not answer in time. It may still execute the command.
    #[error("the guest agent did not answer {command} within {} s", limit.as_secs_f32())]
    NoAnswer {
        /// The command.
        command: &'static str,
        /// The time limit of the whole conversation.
        limit: Duration,
    },
    /// QEMU closed the connection.
    #[error("QEMU closed the guest agent's socket before the answer to {command}")]
    Closed {
        /// The command.
        command: &'static str,
    },
    /// The agent sent more than limosa reads.
    #[error("the guest agent sent more than {limit} bytes")]
    TooManyBytes {
        /// The limit.
        limit: usize,
    },
    /// The answer is not one of the agent's protocol.
    #[error("the guest agent answered {command} with '{got}'")]
    Unexpected {
        /// The command.
        command: &'static str,
        /// The beginning of the answer.
        got: String,
    },
    /// The agent refused or failed a command.
    #[error("the guest agent refuses {command}: {reason}")]
    Refused {
        /// The command.
        command: &'static str,
        /// The beginning of the agent's own words.
        reason: String,
    },
    /// The kernel reported an error.
    #[error("cannot {what}")]
    Io {
        /// The operation.
        what: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
}

impl GuestAgentError {
    /// Whether there is no agent to talk to, as opposed to one that fails.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        matches!(
            self,
            Self::NoPort
                | Self::Remote
                | Self::NotRunning
                | Self::InUse { .. }
                | Self::NotASocket { .. }
                | Self::OtherProcess { .. }
        )
    }
}
