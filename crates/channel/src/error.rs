//! What can go wrong on a channel: a person reads which peer, which byte and what was expected, and a
//! program knows whether to retry, to give up, or that it asked for the end itself.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use limosa_page::BrokenInvariant;
use thiserror::Error;

use crate::tls::TlsFailure;
use crate::uri::UriError;

/// The operation. Its `Display` is the beginning of a sentence that the peer's name completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Connecting to a peer.
    Connect,
    /// Making a listener.
    Listen,
    /// Waiting for a peer to connect.
    Accept,
    /// Opening a file.
    Open,
    /// Writing.
    Put,
    /// Reading.
    Get,
    /// Shutting down one or both directions.
    Shutdown,
    /// Setting time-outs, buffers or other properties.
    Configure,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connect => "connecting to",
            Self::Listen => "listening on",
            Self::Accept => "waiting for a connection on",
            Self::Open => "opening",
            Self::Put => "writing to",
            Self::Get => "reading from",
            Self::Shutdown => "shutting down",
            Self::Configure => "setting up",
        })
    }
}

/// A failed operation on a channel, a listener or a file channel.
///
/// `peer` is what a person would call the other end: its URI, or a description of the descriptor. `offset` counts bytes
/// in the direction of the operation since the channel was made; in a file it is the absolute file offset.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The URI itself is wrong.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// No process listens there (yet).
    #[error("{operation} {peer}: connection refused")]
    Refused {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The data ended inside what was expected: an end of file, or a peer that closed its end in an orderly way.
    #[error("{operation} {peer}: it ended at byte {offset}, after {got} of {wanted} expected bytes")]
    Closed {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// Where the data ended.
        offset: u64,
        /// Bytes of this request that did arrive.
        got: u64,
        /// Bytes that this request asked for.
        wanted: u64,
    },
    /// The peer is gone: it closed or reset the connection while bytes were still under way.
    #[error("{operation} {peer}: the peer is gone at byte {offset}")]
    Broken {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// Bytes handed over before.
        offset: u64,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Not a byte moved, or no peer connected, for as long as the time-out allows.
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
    /// This side called `shutdown` on the channel; it is no failure of the peer.
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
    Command {
        /// The command's URI.
        peer: Arc<str>,
        /// How it ended.
        status: ExitStatus,
    },
    /// The command at the other end had nothing more to do, and did not end. It has been ended.
    #[error("{peer}: the command did not end within {after:?}, and was ended")]
    Lingering {
        /// The command's URI.
        peer: Arc<str>,
        /// How long it was waited for.
        after: Duration,
    },
    /// The end point exists but cannot do what was asked of it.
    #[error("{operation} {peer}: {why}")]
    Unsupported {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// The reason.
        why: &'static str,
    },
    /// This process may not pin as much memory as `MSG_ZEROCOPY` needs: the limit is `RLIMIT_MEMLOCK`, which does not
    /// hold for a process with `CAP_IPC_LOCK`.
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
        /// Bytes that a channel pins at least.
        least: u64,
    },
    /// The two ends have no secret, or lost it.
    #[error("{operation} {peer}{}: TLS: {failure}", at(*offset))]
    Tls {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// Bytes moved before, if the channel was up.
        offset: Option<u64>,
        /// Why.
        failure: Box<TlsFailure>,
    },
    /// This end's certificates or keys for TLS are of no use.
    #[error("{}: {why}", path.display())]
    Credentials {
        /// The file, or the folder.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// Any other answer of the kernel.
    #[error("{operation} {peer}{}: {source}", at(*offset))]
    Io {
        /// The operation.
        operation: Operation,
        /// The other end.
        peer: Arc<str>,
        /// Where, if data was being moved.
        offset: Option<u64>,
        /// The kernel's answer.
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
    /// An answer of the kernel outside a transfer.
    pub(crate) fn setup(operation: Operation, peer: impl Into<Arc<str>>, source: impl Into<io::Error>) -> Self {
        Self::Io { operation, peer: peer.into(), offset: None, source: source.into() }
    }

    /// Nothing moved for the length of the time-out.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::TimedOut { .. })
    }

    /// The other end is gone, in an orderly way or not.
    pub fn is_closed(&self) -> bool {
        match self {
            Self::Closed { .. } | Self::Broken { .. } => true,
            Self::Tls { failure, .. } => {
                matches!(**failure, TlsFailure::Ended | TlsFailure::Truncated { .. } | TlsFailure::Reset { .. })
            }
            _ => false,
        }
    }

    /// The connection has ended, and an encrypted peer had not said that this was the end: it may have been cut. Who
    /// knows by other means that all has come may take it for the end; stock QEMU ends its main channel so. A
    /// connection that was reset is none of these.
    pub fn is_cut(&self) -> bool {
        matches!(self, Self::Tls { failure, .. } if matches!(**failure, TlsFailure::Truncated { .. }))
    }

    /// The TLS failure, if that is the cause.
    pub fn tls_failure(&self) -> Option<&TlsFailure> {
        if let Self::Tls { failure, .. } = self { Some(failure) } else { None }
    }

    /// This side asked for the end.
    pub fn is_shut_down(&self) -> bool {
        matches!(self, Self::ShutDown { .. })
    }

    /// The operating system's error kind, if the kernel gave one: distinguishes a full disk from a missing permission.
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::Refused { source, .. } | Self::Broken { source, .. } | Self::Io { source, .. } => Some(source.kind()),
            Self::MemoryLock { .. } => Some(io::ErrorKind::PermissionDenied),
            _ => None,
        }
    }
}
