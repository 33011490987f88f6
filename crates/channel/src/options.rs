//! How a channel is to be set up.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{ChannelError, Operation};
use crate::rate::RateLimit;
use crate::tls::{KernelTlsFailure, Tls, TlsFailure};
use crate::zero_copy::ZeroCopy;

/// Options for making channels; the default is no time-outs, the kernel's buffers, no rate limit, no zero-copy, no
/// encryption.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// How long to try to connect, over all addresses of a host. Looking up the name is not bounded by it. A TLS
    /// handshake gets as long again, 30 s if nothing is said.
    pub connect_timeout: Option<Duration>,
    /// How long a get may last without a byte moving.
    pub read_timeout: Option<Duration>,
    /// How long a put may last without a byte moving.
    pub write_timeout: Option<Duration>,
    /// Bytes of send buffer to ask for; the kernel's own if nothing is said.
    pub send_buffer: Option<usize>,
    /// Bytes of receive buffer to ask for; as above.
    pub receive_buffer: Option<usize>,
    /// The limit that puts share; a channel without one gets its own, which is unlimited until changed.
    pub rate: Option<RateLimit>,
    /// The limit that gets share, which the peer feels as a slow reader; by default there is none.
    pub get_rate: Option<RateLimit>,
    /// How memory that is [lent](crate::Channel::lend) leaves; by default it is copied. A method that is named and
    /// cannot be had is refused when the channel is made. `MSG_ZEROCOPY` puts a socket into blocking mode.
    pub zero_copy: ZeroCopy,
    /// Encrypts what is put and got; only stream sockets can be.
    pub tls: Option<Tls>,
}

/// Why zero-copy cannot be had with TLS.
pub(crate) const COPIED_BY_TLS: &str = "zero-copy and TLS exclude each other";

impl Options {
    /// What does not go together: reported before a connection is made.
    ///
    /// # Errors
    /// [`ChannelError::Unsupported`], and [`ChannelError::Tls`] if the kernel's TLS is demanded and missing.
    pub(crate) fn check(&self, operation: Operation, peer: &Arc<str>) -> Result<(), ChannelError> {
        let Some(tls) = &self.tls else { return Ok(()) };
        let peer = || Arc::clone(peer);
        if matches!(self.zero_copy, ZeroCopy::Msg | ZeroCopy::Splice) {
            return Err(ChannelError::Unsupported { operation, peer: peer(), why: COPIED_BY_TLS });
        }
        if tls.misses_the_kernels() {
            let failure = Box::new(TlsFailure::Kernel(KernelTlsFailure::Missing));
            return Err(ChannelError::Tls { operation, peer: peer(), offset: None, failure });
        }
        Ok(())
    }
}
