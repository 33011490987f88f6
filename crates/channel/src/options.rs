//! How a channel is to be set up.

use std::time::Duration;

use crate::rate::RateLimit;
use crate::tls::{self, Tls};
use crate::zero_copy::ZeroCopy;

/// Options for making channels; the default is no time-outs, the kernel's buffers, no rate limit, no zero-copy, no encryption.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// How long to try to connect, over all addresses of a host. Looking up the name is not bounded by it. A TLS handshake
    /// gets as long again, 30 s if nothing is said.
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
    /// How memory that is [lent](crate::Channel::lend) leaves; by default it is copied. A method that is named and cannot be
    /// had is refused when the channel is made. `MSG_ZEROCOPY` puts a socket into blocking mode.
    pub zero_copy: ZeroCopy,
    /// Encrypts what is put and got; only stream sockets can be.
    pub tls: Option<Tls>,
}

/// Why zero-copy cannot be had with TLS.
pub(crate) const COPIED_BY_TLS: &str = "zero-copy and TLS exclude each other";

impl Options {
    /// What does not go together: told before anybody is reached.
    pub(crate) fn contradiction(&self) -> Option<&'static str> {
        let tls = self.tls.as_ref()?;
        if matches!(self.zero_copy, ZeroCopy::Msg | ZeroCopy::Splice) {
            return Some(COPIED_BY_TLS);
        }
        tls.misses_the_kernels().then_some(tls::NO_KERNEL_TLS)
    }
}
