//! TLS 1.3 around a socket, as QEMU has it around each channel of a migration: x509, and both ends may have to show
//! who they are.
//!
//! The laws of this module. **All cryptography is rustls's**: its state machine shakes hands, its ciphers seal and open
//! each record; what is ours is where records begin and end in a socket, and which record is the next. **The two
//! directions share nothing but the secret that new keys come from**: a thread that gets holds nothing that a
//! thread that puts needs, and the other way round. **An end that the peer did not announce is no end**: a connection
//! that was cut is distinguished from one that is over. **A peer that has not shown who it is gets a bounded time and a
//! bounded buffer**, and nothing of this end's thread: a channel that was accepted shakes hands when it is looked at,
//! without waiting.
//!
//! | file | subject |
//! |---|---|
//! | `credentials` | certificates and keys from a folder, as QEMU's `tls-creds-x509` has them |
//! | `handshake` | from a connected socket to keys |
//! | `record` | bytes sealed into records, and records opened |
//! | `session` | both directions of one connection |
//! | `kernel` | directions whose keys the kernel has |
//! | `plaintext` | between records and memory that is no slice |
//! | `failure` | what went wrong |

mod credentials;
mod failure;
mod handshake;
mod kernel;
mod plaintext;
mod record;
mod session;

pub use credentials::Tls;
pub use failure::{KernelTlsFailure, TlsFailure, TlsRefusal};
pub(crate) use kernel::ByKernel;
pub use kernel::{KernelTls, UnknownKernelTls};
pub(crate) use session::Session;
