//! TLS 1.3 over a socket, as QEMU uses it for each channel of a migration: x509 certificates, of one end or of both.
//!
//! The laws of this module. **All cryptography is rustls's**: its state machine runs the handshake, its ciphers encrypt
//! and decrypt each record. This module finds where records begin and end in a socket, and numbers them. **The two
//! directions share nothing but the secret from which new keys are derived**: a thread that reads holds nothing that a
//! thread that writes needs, and vice versa. **An end that the peer did not announce is no end**: a cut connection is
//! distinguished from a closed one. **An unauthenticated peer gets a bounded time and a bounded buffer**, and no
//! thread: an accepted channel continues its handshake when it is polled, without waiting.
//!
//! # rustls' unbuffered connections (looked at on 2026-11-25, rustls 0.23)
//!
//! The handshake uses them, because they accept one record at a time and give up their keys. `record` and `session`
//! stay:
//! - One connection object encrypts and decrypts by `&mut self`. The two threads of a channel would share one lock,
//!   which is held while 16 KiB are encrypted, and a thread that writes would wait for one that reads.
//! - It would replace numbering, `KeyUpdate` and alerts: about 250 of 2,300 lines. Buffers, partial writes, time-outs,
//!   the end of the data and gathering from guest memory are the caller's in either case.
//! - Early data and session tickets, the other things it has, are not for a migration: each channel connects once.
//!
//! | file | subject |
//! |---|---|
//! | `credentials` | certificates and keys from a folder, as QEMU's `tls-creds-x509` has them |
//! | `allowed` | clients that are allowed by name |
//! | `handshake` | the handshake: from a connected socket to keys |
//! | `record` | encrypting bytes into records, and decrypting records |
//! | `session` | both directions of one connection |
//! | `plaintext` | between records and memory that is no slice |
//! | `failure` | errors |

mod allowed;
mod credentials;
mod failure;
mod handshake;
mod plaintext;
mod record;
mod session;

pub use credentials::Tls;
pub use failure::{TlsAlert, TlsFailure};
pub(crate) use session::Session;
