//! TLS in the kernel (kernel docs: networking/tls): after the handshake the kernel gets the keys, and encrypts and
//! decrypts.
//!
//! The laws of this module. **A key is in one place**: either the kernel or this process handles a direction, and it
//! changes hands between two records. **It is off by default, and `auto` uses it only where it can renew keys** (Linux
//! 6.14): a kernel that cannot fails a channel at its cipher's limit, and when the peer updates its key, so it must be
//! requested explicitly. **Unverified bytes never reach the caller's memory**: the kernel is not asked to decrypt
//! records in place (`TLS_RX_EXPECT_NO_PAD`), which would leave forged bytes there. **Control records are never read
//! from the caller's memory**, which may be the guest's: they stay in the kernel until there is a buffer for them.
//!
//! | file | subject |
//! |---|---|
//! | `key` | a key in the kernel's form |
//! | `option` | the socket options: support of the kernel, and setting a key |
//! | `record_type` | control records, sent and received |
//! | `output` | the direction that the kernel encrypts |
//! | `input` | the direction that the kernel decrypts |

mod input;
mod key;
mod option;
mod output;
mod record_type;

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use strum::{Display, EnumString, IntoStaticStr};
use thiserror::Error;

pub(super) use input::{Input, Received};
pub(super) use key::Key;
pub(super) use output::{Output, yield_to_kernel};

use super::failure::{KernelTlsFailure, TlsFailure};
use option::Support;

/// Whether the kernel or this process encrypts and decrypts the records of a channel.
#[derive(Clone, Copy, Debug, Default, Display, EnumString, IntoStaticStr, PartialEq, Eq, Hash)]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownKernelTls, parse_err_fn = UnknownKernelTls::new)]
pub enum KernelTls {
    /// This process.
    #[default]
    Off,
    /// The kernel, over TCP, if it has TLS and can renew keys (Linux 6.14); otherwise this process.
    Auto,
    /// The kernel; setting up the channel fails if it cannot. If it cannot renew keys, the channel fails when a key
    /// update is due: after 16 million records of AES-GCM, and when the peer updates its key.
    On,
}

impl KernelTls {
    /// All settings.
    pub const ALL: [Self; 3] = [Self::Off, Self::Auto, Self::On];
}

/// A name that no setting has.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("the kernel's TLS {name:?}: expected off, auto or on")]
pub struct UnknownKernelTls {
    /// The name.
    pub name: String,
}

impl UnknownKernelTls {
    fn new(name: &str) -> Self {
        Self { name: name.to_owned() }
    }
}

/// Whether this kernel is known to have no TLS.
pub(crate) fn is_missing() -> bool {
    option::support() == Support::None
}

/// A socket that is ready for keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    /// Whether a failure is an error ([`KernelTls::On`]).
    required: bool,
}

impl Kernel {
    /// Prepares a connected socket for the kernel's TLS, if that is wanted and possible.
    ///
    /// # Errors
    /// It is required and not possible.
    pub(super) fn prepare(socket: BorrowedFd<'_>, wanted: KernelTls) -> Result<Option<Self>, TlsFailure> {
        let required = match wanted {
            KernelTls::Off => return Ok(None),
            KernelTls::Auto if option::support() != Support::Renews => return Ok(None),
            KernelTls::Auto => false,
            KernelTls::On => true,
        };
        let refused = |why| if required { Err(TlsFailure::Kernel(why)) } else { Ok(None) };
        // On close of a non-blocking socket the kernel would discard encrypted data that it could not send yet.
        if fcntl_getfl(socket).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK)) {
            return refused(KernelTlsFailure::NonBlocking);
        }
        match option::attach(socket) {
            Ok(()) => Ok(Some(Self { required })),
            // The peer closed the connection: there will be no handshake.
            Err(Errno::NOTCONN) => Ok(None),
            Err(Errno::NOENT) => refused(KernelTlsFailure::Missing),
            Err(Errno::OPNOTSUPP | Errno::NOPROTOOPT) => refused(KernelTlsFailure::NotTcp),
            Err(errno) => refused(KernelTlsFailure::Setup(errno)),
        }
    }

    /// Handles a rejected key: this process takes over, unless the kernel is required.
    pub(super) fn or_userspace<T>(self, handed_over: Result<T, Errno>) -> Result<Option<T>, TlsFailure> {
        match handed_over {
            Ok(over) => Ok(Some(over)),
            Err(errno) if self.required => Err(TlsFailure::Kernel(KernelTlsFailure::Key(errno))),
            Err(_) => Ok(None),
        }
    }
}

/// Directions and bytes that the kernel handles. Written next to system calls, read by any thread.
#[derive(Debug, Default)]
pub(crate) struct ByKernel {
    encrypts: AtomicBool,
    decrypts: AtomicBool,
    out: AtomicU64,
    inward: AtomicU64,
}

impl ByKernel {
    /// Notes that the kernel encrypts from now on.
    pub(super) fn set_encrypts(&self) {
        self.encrypts.store(true, Relaxed);
    }

    /// Notes that the kernel decrypts from now on.
    pub(super) fn set_decrypts(&self) {
        self.decrypts.store(true, Relaxed);
    }

    /// Counts bytes that the kernel encrypted.
    pub(super) fn encrypted(&self, bytes: usize) {
        self.out.fetch_add(bytes as u64, Relaxed);
    }

    /// Counts bytes that the kernel decrypted.
    pub(super) fn decrypted(&self, bytes: usize) {
        self.inward.fetch_add(bytes as u64, Relaxed);
    }

    /// Returns whether the kernel encrypts, and whether it decrypts.
    pub(crate) fn directions(&self) -> (bool, bool) {
        (self.encrypts.load(Relaxed), self.decrypts.load(Relaxed))
    }

    /// Returns the bytes that the kernel encrypted and decrypted.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.out.load(Relaxed), self.inward.load(Relaxed))
    }
}

/// Converts the kernel's error about a record.
fn record_failure(errno: Errno) -> Option<TlsFailure> {
    match errno {
        Errno::BADMSG => Some(TlsFailure::BadRecord),
        Errno::MSGSIZE => Some(TlsFailure::Protocol("record too long".into())),
        Errno::INVAL => Some(TlsFailure::Protocol("record of another version".into())),
        // Once the kernel has seen the beginning of a KeyUpdate it decrypts nothing before it has the new key (Linux
        // 6.14).
        Errno::KEYEXPIRED => Some(TlsFailure::Kernel(KernelTlsFailure::SplitKeyUpdate)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_read_as_it_is_written() {
        assert_eq!(KernelTls::default(), KernelTls::Off);
        for setting in KernelTls::ALL {
            assert_eq!(setting.to_string().parse(), Ok(setting));
        }
        assert!("yes".parse::<KernelTls>().unwrap_err().to_string().contains("expected off, auto or on"));
    }

    #[test]
    fn what_the_kernel_says_of_a_record_is_one_line() {
        for errno in [Errno::BADMSG, Errno::MSGSIZE, Errno::INVAL, Errno::KEYEXPIRED] {
            let line = record_failure(errno).unwrap().to_string();
            assert!(!line.contains('\n') && !line.contains("  "), "{line}");
        }
        assert_eq!(record_failure(Errno::CONNRESET), None);
    }

    #[test]
    fn what_is_no_tcp_connection_is_refused_only_if_it_was_demanded() {
        use std::os::fd::AsFd as _;
        let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
        for wanted in [KernelTls::Off, KernelTls::Auto] {
            assert!(Kernel::prepare(near.as_fd(), wanted).unwrap().is_none());
        }
        let line = Kernel::prepare(near.as_fd(), KernelTls::On).unwrap_err().to_string();
        assert!(line.contains("not a TCP connection") && !line.contains('\n'), "{line}");
        near.set_nonblocking(true).unwrap();
        let line = Kernel::prepare(near.as_fd(), KernelTls::On).unwrap_err().to_string();
        assert!(line.contains("non-blocking"), "{line}");
    }
}
