//! TLS 1.3 over a socket, as QEMU uses it for each channel of a migration: x509 certificates, of one end or of both.
//!
//! The laws of this module. **All cryptography is rustls's**: its state machine runs the handshake, its ciphers encrypt
//! and decrypt each record. This module finds where records begin and end in a socket, and numbers them. **The two
//! directions share nothing but the secret from which new keys are derived**: a thread that reads holds nothing that a
//! thread that writes needs, and vice versa. **An end that the peer did not announce is no end**: a cut connection is
//! distinguished from a closed one. **An unauthenticated peer gets a bounded time and a bounded buffer**, and no
//! thread: an accepted channel continues its handshake when it is polled, without waiting.
//!
//! | file | subject |
//! |---|---|
//! | `credentials` | certificates and keys from a folder, as QEMU's `tls-creds-x509` has them |
//! | `handshake` | the handshake: from a connected socket to keys |
//! | `record` | encrypting bytes into records, and decrypting records |
//! | `session` | both directions of one connection |
//! | `kernel` | directions whose keys the kernel has |
//! | `plaintext` | between records and memory that is no slice |
//! | `failure` | errors |

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
