//! Options of channels.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{ChannelError, Operation};
use crate::rate::RateLimit;
use crate::tls::Tls;
use crate::zero_copy::ZeroCopy;

/// Options for creating channels; the default is no time-outs, the kernel's buffers, no rate limit, no zero-copy, no
/// encryption.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Time limit for connecting, over all addresses of a host. It does not bound the name lookup. A TLS handshake may
    /// take the same time again (default: 30 s).
    pub connect_timeout: Option<Duration>,
    /// How long a read may last without a byte moving.
    pub read_timeout: Option<Duration>,
    /// How long a write may last without a byte moving.
    pub write_timeout: Option<Duration>,
    /// Size of the send buffer in bytes (default: the kernel's).
    pub send_buffer: Option<usize>,
    /// Size of the receive buffer in bytes (default: the kernel's).
    pub receive_buffer: Option<usize>,
    /// Shared rate limit of writes (default: the channel's own, unlimited until changed).
    pub rate_limit: Option<RateLimit>,
    /// Shared rate limit of reads: the peer sees a slow reader (default: none).
    pub read_rate_limit: Option<RateLimit>,
    /// How [`ZeroCopyWriter`](crate::ZeroCopyWriter) sends memory (default: copied). Creating the channel fails if a
    /// named method is unavailable. `MSG_ZEROCOPY` switches the socket to blocking mode.
    pub zero_copy: ZeroCopy,
    /// Encrypts the channel; only stream sockets support it.
    pub tls: Option<Tls>,
}

/// The reason why zero-copy is unavailable with TLS.
pub(crate) const COPIED_BY_TLS: &str = "zero-copy and TLS exclude each other";

impl Options {
    /// Checks for options that exclude each other, before a connection is made.
    ///
    /// # Errors
    /// [`ChannelError::Unsupported`].
    pub(crate) fn check(&self, operation: Operation, peer: &Arc<str>) -> Result<(), ChannelError> {
        if self.tls.is_some() && matches!(self.zero_copy, ZeroCopy::Msg | ZeroCopy::Splice) {
            return Err(ChannelError::Unsupported { operation, peer: Arc::clone(peer), why: COPIED_BY_TLS });
        }
        Ok(())
    }
}
