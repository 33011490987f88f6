//! Errors of a monitor connection.

use std::io;
use std::time::Duration;

/// An error on the QMP connection or from a command.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// The text is no monitor address.
    #[error("'{text}' is no monitor address: expected unix:PATH, tcp:HOST:PORT or the path of a socket")]
    Address {
        /// The address as given.
        text: String,
    },
    /// Nothing listens there, or it may not be reached.
    #[error("cannot connect to the monitor {monitor}")]
    Connect {
        /// The monitor's address.
        monitor: String,
        /// Why.
        source: io::Error,
    },
    /// The connection was accepted but QEMU did not greet: a monitor serves one client at a time.
    #[error(
        "no greeting from the monitor {monitor} within {} s: another client holds this monitor, or no QEMU serves it",
        waited.as_secs_f32().round()
    )]
    Busy {
        /// The monitor's address.
        monitor: String,
        /// How long the greeting was waited for.
        waited: Duration,
    },
    /// QEMU has greeted, and answers nothing.
    #[error(
        "QEMU greets on {monitor} but answers nothing within {} s: its main loop is held up, by a slow disk (then try again) or \
         for memory that an interrupted restore has not brought (then end this QEMU)",
        waited.as_secs_f32().round()
    )]
    Unresponsive {
        /// The monitor's address.
        monitor: String,
        /// How long the answer was waited for.
        waited: Duration,
    },
    /// Something answers, but it does not speak QMP.
    #[error("{monitor} is no QMP monitor: it greets with '{got}' (is it a human monitor? use -qmp or mode=control)")]
    NotQmp {
        /// The address.
        monitor: String,
        /// The beginning of what it said.
        got: String,
    },
    /// QEMU refused or failed a command. Class and description are QEMU's own.
    #[error("QEMU refuses {command}: {desc}")]
    Command {
        /// The command's name.
        command: String,
        /// QEMU's error class, for example `GenericError` or `CommandNotFound`.
        class: String,
        /// QEMU's description.
        desc: String,
    },
    /// A command was not answered in time. It may still be carried out.
    #[error("QEMU did not answer {command} on {monitor} within {} s", waited.as_secs_f32().round())]
    NoReply {
        /// The monitor's address.
        monitor: String,
        /// The command's name.
        command: String,
        /// How long the answer was waited for.
        waited: Duration,
    },
    /// QEMU closed the monitor: it has ended, or the monitor was taken down.
    #[error("QEMU closed the monitor {monitor}{}", while_doing(.during))]
    Closed {
        /// The monitor's address.
        monitor: String,
        /// The command that was under way.
        during: Option<String>,
    },
    /// QEMU was asked to end, and has confirmed it: no command is sent to it any more.
    #[error("the monitor {monitor}: QEMU is ending, so {command} is not sent")]
    Ending {
        /// The monitor's address.
        monitor: String,
        /// The command's name.
        command: String,
    },
    /// The kernel reported an error for the socket.
    #[error("the monitor {monitor} fails to {operation}")]
    Io {
        /// The monitor's address.
        monitor: String,
        /// The operation.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// A message is longer than this client is willing to hold.
    #[error("the monitor {monitor} sent a message longer than {limit} bytes")]
    TooLong {
        /// The monitor's address.
        monitor: String,
        /// The limit, in bytes.
        limit: usize,
    },
    /// The other side does not speak QMP.
    #[error("the monitor {monitor} sent something that is not QMP: '{got}'")]
    Garbage {
        /// The monitor's address.
        monitor: String,
        /// The beginning of it.
        got: String,
    },
    /// An answer does not have the shape that QEMU's schema gives it.
    #[error("QEMU's answer to {command} lacks {expected}: '{got}'")]
    Unexpected {
        /// The command's name.
        command: String,
        /// The expected value.
        expected: String,
        /// The beginning of the answer.
        got: String,
    },
    /// A file descriptor cannot be passed through this monitor.
    #[error(
        "{command} needs to pass a file descriptor, which {monitor} cannot carry: \
         use a unix socket monitor on the host of the VM"
    )]
    NoDescriptors {
        /// The monitor's address.
        monitor: String,
        /// The command's name.
        command: String,
    },
    /// This QEMU has no such migration setting.
    #[error("this QEMU ({version}) has no migration {kind} '{name}'")]
    NoSetting {
        /// QEMU's version.
        version: String,
        /// `capability` or `parameter`.
        kind: &'static str,
        /// Its name.
        name: String,
    },
}

impl QmpError {
    /// Whether QEMU answered the command with an error (as opposed to the connection having failed).
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Command { .. })
    }

    /// QEMU's own description, if QEMU answered with an error.
    #[must_use]
    pub fn desc(&self) -> Option<&str> {
        match self {
            Self::Command { desc, .. } => Some(desc),
            _ => None,
        }
    }

    /// Whether QEMU does not know the command at all.
    #[must_use]
    pub fn is_unknown_command(&self) -> bool {
        matches!(self, Self::Command { class, .. } if class == "CommandNotFound")
    }

    /// Whether QEMU is gone or going (or has closed the monitor), judged by this connection.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Closed { .. } | Self::Ending { .. } | Self::Io { .. })
    }

    /// An answer of the wrong shape.
    pub(crate) fn unexpected(command: &str, expected: impl Into<String>, got: &serde_json::Value) -> Self {
        Self::Unexpected {
            command: command.to_owned(),
            expected: expected.into(),
            got: excerpt(got.to_string().as_bytes()),
        }
    }
}

fn while_doing(command: &Option<String>) -> String {
    command.as_ref().map(|command| format!(" while {command} was under way")).unwrap_or_default()
}

/// The first characters of something from outside, on one line and printable.
pub(crate) fn excerpt(bytes: &[u8]) -> String {
    const SHOWN: usize = 120;
    let shown = bytes.get(..SHOWN).unwrap_or(bytes);
    let text: String =
        String::from_utf8_lossy(shown).trim().chars().map(|c| if c.is_control() { '.' } else { c }).collect();
    if bytes.len() > SHOWN { text + "..." } else { text }
}
