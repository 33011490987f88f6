//! Errors of channels: the message names the peer, the byte and what was expected; the variants let a program decide
//! whether to retry or to give up.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use limosa_page::BrokenInvariant;
use thiserror::Error;

use crate::tls::TlsFailure;
use crate::uri::UriError;

/// An operation on a channel. Its `Display` says that it failed, and needs the peer's name after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display)]
#[non_exhaustive]
pub enum Operation {
    /// Connecting to a peer.
    #[strum(to_string = "cannot connect to")]
    Connect,
    /// Making a listener.
    #[strum(to_string = "cannot listen on")]
    Listen,
    /// Waiting for a peer to connect.
    #[strum(to_string = "cannot accept a connection on")]
    Accept,
    /// Opening a file.
    #[strum(to_string = "cannot open")]
    Open,
    /// Writing.
    #[strum(to_string = "cannot write to")]
    Write,
    /// Reading.
    #[strum(to_string = "cannot read from")]
    Read,
    /// Shutting down one or both directions.
    #[strum(to_string = "cannot shut down")]
    Shutdown,
    /// Setting time-outs, buffers or other properties.
    #[strum(to_string = "cannot set up")]
    Configure,
}

/// A failed operation on a channel, a listener or a file channel.
///
/// `peer` names the other end: its URI, or a description of the descriptor. `offset` counts bytes in the direction of
/// the operation since the channel was made; in a file it is the absolute file offset.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The URI itself is wrong.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// No process listens there (yet).
    #[error("{operation} {peer}")]
    Refused {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// The kernel's error.
        source: io::Error,
    },
    /// The data ended before the expected length: an end of file, or a peer that closed its end in an orderly way.
    #[error("{operation} {peer}: the data ended at byte {offset}, after {got} of {wanted} expected bytes")]
    Closed {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// Where the data ended.
        offset: u64,
        /// Bytes of this request that arrived.
        got: u64,
        /// Bytes that this request asked for.
        wanted: u64,
    },
    /// The peer is gone: it closed or reset the connection while bytes were in flight.
    #[error("{operation} {peer}: the peer is gone at byte {offset}")]
    Broken {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// Bytes handed over before.
        offset: u64,
        /// The kernel's error.
        source: io::Error,
    },
    /// No byte moved, or no peer connected, for the length of the time-out.
    #[error("{operation} {peer}: nothing moved for {after:?}{}", at(*offset))]
    TimedOut {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// Bytes moved before, if the channel was up.
        offset: Option<u64>,
        /// The time-out.
        after: Duration,
    },
    /// This side called `shutdown` on the channel; the peer did not fail.
    #[error("{operation} {peer}: the channel was shut down on this side at byte {offset}")]
    ShutDown {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// Bytes moved before.
        offset: u64,
    },
    /// The command at the other end failed, or was ended by a signal.
    #[error("{peer}: the command failed ({status})")]
    CommandFailed {
        /// The command's URI.
        peer: Arc<str>,
        /// How it ended.
        status: ExitStatus,
    },
    /// The command at the other end did not end in time and was terminated.
    #[error("{peer}: the command did not end within {after:?} and was terminated")]
    CommandTimedOut {
        /// The command's URI.
        peer: Arc<str>,
        /// The time limit.
        after: Duration,
    },
    /// The end point exists but does not support the operation.
    #[error("{operation} {peer}: {why}")]
    Unsupported {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// The reason.
        why: &'static str,
    },
    /// This process may not pin as much memory as `MSG_ZEROCOPY` needs. The limit is `RLIMIT_MEMLOCK`; it does not
    /// apply to a process with `CAP_IPC_LOCK`.
    #[error(
        "{operation} {peer}: RLIMIT_MEMLOCK is {} KiB, and MSG_ZEROCOPY pins at least {} KiB on a channel",
        limit >> 10,
        least.div_ceil(1024)
    )]
    MemoryLock {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// The limit in bytes.
        limit: u64,
        /// Minimum number of bytes that a channel pins.
        least: u64,
    },
    /// TLS failed, in the handshake or later.
    #[error("{operation} {peer}{}: TLS: {failure}", at(*offset))]
    Tls {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// Bytes moved before, if the channel was up.
        offset: Option<u64>,
        /// The failure.
        failure: Box<TlsFailure>,
    },
    /// This end's certificates or keys for TLS cannot be used.
    #[error("{}: {why}", path.display())]
    Credentials {
        /// The file, or the folder.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// Any other error of the kernel.
    #[error("{operation} {peer}{}", at(*offset))]
    Io {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// Bytes moved before, if data was being moved.
        offset: Option<u64>,
        /// The kernel's error.
        source: io::Error,
    },
    /// A bug of limosa.
    #[error("{operation} {peer}{}: {broken}", at(*offset))]
    Internal {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// Bytes moved before.
        offset: Option<u64>,
        /// The invariant that does not hold.
        broken: BrokenInvariant,
    },
}

fn at(offset: Option<u64>) -> String {
    offset.map(|offset| format!(" at byte {offset}")).unwrap_or_default()
}

impl ChannelError {
    /// Creates an error of the kernel outside a transfer.
    pub(crate) fn setup(operation: Operation, peer: impl Into<Arc<str>>, source: impl Into<io::Error>) -> Self {
        Self::Io { operation, peer: peer.into(), offset: None, source: source.into() }
    }

    /// Whether nothing moved for the length of the time-out.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::TimedOut { .. })
    }

    /// Whether the other end is gone, in an orderly way or not.
    pub fn is_closed(&self) -> bool {
        match self {
            Self::Closed { .. } | Self::Broken { .. } => true,
            Self::Tls { failure, .. } => {
                matches!(
                    **failure,
                    TlsFailure::HandshakeClosed | TlsFailure::Truncated { .. } | TlsFailure::Reset { .. }
                )
            }
            _ => false,
        }
    }

    /// Whether an encrypted connection ended without a close notification: it may have been cut. A caller that knows by
    /// other means that everything has arrived may take it as the end; stock QEMU ends its main channel so. False for a
    /// connection that was reset.
    pub fn lacks_close_notify(&self) -> bool {
        matches!(self, Self::Tls { failure, .. } if matches!(**failure, TlsFailure::Truncated { .. }))
    }

    /// Returns the TLS failure, if that is the cause.
    pub fn tls_failure(&self) -> Option<&TlsFailure> {
        if let Self::Tls { failure, .. } = self { Some(failure) } else { None }
    }

    /// Whether this side shut the channel down.
    pub fn is_shut_down(&self) -> bool {
        matches!(self, Self::ShutDown { .. })
    }

    /// Returns the kind of the kernel's error, if there is one: distinguishes a full disk from a missing permission.
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::Refused { source, .. } | Self::Broken { source, .. } | Self::Io { source, .. } => Some(source.kind()),
            Self::MemoryLock { .. } => Some(io::ErrorKind::PermissionDenied),
            _ => None,
        }
    }
}
