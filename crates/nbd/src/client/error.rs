//! Errors of a connection to a server.

use std::io;
use std::time::Duration;

use limosa_channel::ChannelError;

/// Why a connection to a server cannot be made, or has ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NbdError {
    /// The connection failed.
    #[error(transparent)]
    Channel(ChannelError),
    /// The server closed the connection.
    #[error("the server closed the connection (after {received} bytes)")]
    Closed {
        /// Bytes that it had sent.
        received: u64,
    },
    /// The server accepts only encrypted connections: its answer, which begins with "requires TLS".
    #[error("the server {0}")]
    TlsRequired(String),
    /// The server refuses.
    #[error("the server {0}")]
    Refused(String),
    /// The server does not keep to the protocol.
    #[error("the server breaks the protocol: {0}")]
    Protocol(String),
    /// The handshake takes too long.
    #[error("the server's handshake takes longer than {0:?}")]
    HandshakeTime(Duration),
    /// There can be no thread that receives.
    #[error("a thread for replies cannot be started")]
    Thread(#[source] io::Error),
}

impl From<ChannelError> for NbdError {
    fn from(error: ChannelError) -> Self {
        match error {
            ChannelError::Closed { offset, .. } => Self::Closed { received: offset },
            error => Self::Channel(error),
        }
    }
}

impl NbdError {
    pub(super) fn protocol(why: impl Into<String>) -> Self {
        Self::Protocol(why.into())
    }
}
