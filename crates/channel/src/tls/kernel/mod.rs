//! TLS in the kernel (kernel docs: networking/tls): who has shaken hands gives it the keys, and it seals and opens.
//!
//! The laws of this module. **A key is in one place**: a direction is the kernel's or this process's, and changes hands
//! between two records. **It is off by default, and `auto` uses it only where it can renew keys**
//! (Linux 6.14): a kernel that cannot ends a channel at its cipher's limit, and when the peer renews its own, so who
//! wants that one has to say so.
//! **Nothing gets to its place that was not verified**: the kernel is not asked to open records right where they are to
//! go (`TLS_RX_EXPECT_NO_PAD`), which would leave there what turns out to be forged. **A word of the peer's is never
//! read from the caller's memory**, which may be a guest's: it is left in the kernel until there is a buffer for it.
//!
//! | file | subject |
//! |---|---|
//! | `key` | a key in the kernel's form |
//! | `option` | the socket options: what the kernel has, and handing it a key |
//! | `record_type` | records that are no data, sent and received |
//! | `output` | what the kernel seals |
//! | `input` | what the kernel opens |

mod input;
mod key;
mod option;
mod output;
mod record_type;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use thiserror::Error;

pub(super) use input::{Input, Received};
pub(super) use key::Key;
pub(super) use output::{Output, yield_to_kernel};

use super::failure::{KernelTlsFailure, TlsFailure};
use option::Support;

/// Who seals and opens the records of an encrypted channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KernelTls {
    /// This process.
    #[default]
    Off,
    /// The kernel, over TCP, if it has TLS and can renew keys (Linux 6.14); else this process.
    Auto,
    /// The kernel; a channel for which it cannot is refused. Where it cannot renew keys the channel fails when that is
    /// due: after 16 million records of AES-GCM, and when the peer does so.
    On,
}

impl KernelTls {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Off, Self::Auto, Self::On];

    /// The name, as [`FromStr`] reads it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Auto => "auto",
            Self::On => "on",
        }
    }
}

impl fmt::Display for KernelTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no setting has.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("the kernel's TLS {name:?}: expected off, auto or on")]
pub struct UnknownKernelTls {
    /// The name.
    pub name: String,
}

impl FromStr for KernelTls {
    type Err = UnknownKernelTls;

    fn from_str(name: &str) -> Result<Self, UnknownKernelTls> {
        let found = Self::ALL.into_iter().find(|setting| setting.name() == name);
        found.ok_or_else(|| UnknownKernelTls { name: name.to_owned() })
    }
}

/// Whether it is known that this kernel has no TLS.
pub(crate) fn is_missing() -> bool {
    option::support() == Support::None
}

/// A socket that is ready to be given keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    /// Whether a failure is an error ([`KernelTls::On`]).
    demanded: bool,
}

impl Kernel {
    /// Prepares a connected socket, if that is wanted, and it can be.
    ///
    /// # Errors
    /// It was demanded, and cannot be.
    pub(super) fn prepare(socket: BorrowedFd<'_>, wanted: KernelTls) -> Result<Option<Self>, TlsFailure> {
        let demanded = match wanted {
            KernelTls::Off => return Ok(None),
            KernelTls::Auto if option::support() != Support::Renews => return Ok(None),
            KernelTls::Auto => false,
            KernelTls::On => true,
        };
        let refused = |why| if demanded { Err(TlsFailure::Kernel(why)) } else { Ok(None) };
        // What the kernel has sealed and could not send it would throw away when the socket is closed.
        if fcntl_getfl(socket).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK)) {
            return refused(KernelTlsFailure::NonBlocking);
        }
        match option::attach(socket) {
            Ok(()) => Ok(Some(Self { demanded })),
            // The peer has closed the connection: there will be no handshake.
            Err(Errno::NOTCONN) => Ok(None),
            Err(Errno::NOENT) => refused(KernelTlsFailure::Missing),
            Err(Errno::OPNOTSUPP | Errno::NOPROTOOPT) => refused(KernelTlsFailure::NotTcp),
            Err(errno) => refused(KernelTlsFailure::Setup(errno)),
        }
    }

    /// What comes of a refusal: this process goes on by itself, unless the kernel was demanded.
    pub(super) fn or_without<T>(self, handed_over: Result<T, Errno>) -> Result<Option<T>, TlsFailure> {
        match handed_over {
            Ok(over) => Ok(Some(over)),
            Err(errno) if self.demanded => Err(TlsFailure::Kernel(KernelTlsFailure::Key(errno))),
            Err(_) => Ok(None),
        }
    }
}

/// What the kernel does for a channel. Written next to system calls, read by any thread.
#[derive(Debug, Default)]
pub(crate) struct ByKernel {
    seals: AtomicBool,
    opens: AtomicBool,
    out: AtomicU64,
    inward: AtomicU64,
}

impl ByKernel {
    /// It seals from now on.
    pub(super) fn seals(&self) {
        self.seals.store(true, Relaxed);
    }

    /// It opens from now on.
    pub(super) fn opens(&self) {
        self.opens.store(true, Relaxed);
    }

    /// It has sealed so many bytes.
    pub(super) fn sealed(&self, bytes: usize) {
        self.out.fetch_add(bytes as u64, Relaxed);
    }

    /// It has opened so many bytes.
    pub(super) fn opened(&self, bytes: usize) {
        self.inward.fetch_add(bytes as u64, Relaxed);
    }

    /// Whether it seals, and whether it opens.
    pub(crate) fn directions(&self) -> (bool, bool) {
        (self.seals.load(Relaxed), self.opens.load(Relaxed))
    }

    /// How many bytes it has sealed and opened.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.out.load(Relaxed), self.inward.load(Relaxed))
    }
}

/// What the kernel says of a record, as a failure.
fn of_record(errno: Errno) -> Option<TlsFailure> {
    match errno {
        Errno::BADMSG => Some(TlsFailure::BadRecord),
        Errno::MSGSIZE => Some(TlsFailure::Protocol("a record that is too long".into())),
        Errno::INVAL => Some(TlsFailure::Protocol("a record of another version".into())),
        // Once it has seen the beginning of the word that a new key follows, it opens nothing before it has that (Linux
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
            let line = of_record(errno).unwrap().to_string();
            assert!(!line.contains('\n') && !line.contains("  "), "{line}");
        }
        assert_eq!(of_record(Errno::CONNRESET), None);
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
