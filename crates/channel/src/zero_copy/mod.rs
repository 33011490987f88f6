//! Sending without copying: memory is lent to the kernel, which reads it when it sends.
//!
//! A put copies what it sends into the kernel's buffers, so that the caller may do with its memory what it likes. Two
//! ways save that copy, and give something up for it:
//!
//! | method | transports | what is under way | known to have gone |
//! |---|---|---|---|
//! | [`Msg`](ZeroCopy::Msg): `MSG_ZEROCOPY` (Linux 4.14; kernel docs: `networking/msg_zerocopy`) | TCP | is pinned, and counts against `RLIMIT_MEMLOCK` | by completions |
//! | [`Splice`](ZeroCopy::Splice): `vmsplice(2)` into a pipe, `splice(2)` from there | TCP, unix sockets | is referenced | never |
//!
//! **Law: what the kernel has been lent is reused, freed or discarded only after a flush.** The type [`Lending`] holds
//! the borrow until then. Splice has no completion, so it is for memory alone whose owner can live with its being read
//! at any later time: a guest's pages ([`Lending::put_pages`]). Memory that is reused, headers above all, is copied
//! under every method.
//!
//! **What that means for a page of a guest that runs:** it may change while it is queued, and goes out as it is when it
//! is sent, half of it old and half new perhaps. That is right, because the change is in the dirty log: the page is
//! sent again, in a round that begins behind the flush and the SYNC packet of this one. The last round is sent when the
//! guest is paused.
//!
//! Where the two ends are on one machine the kernel copies what `MSG_ZEROCOPY` lends before the receiver gets it,
//! because the receiver might keep it for ever, and says so in the completion. Splice saves the copy there too, so
//! [`ZeroCopy::Auto`] takes it where the peer is known to be on this machine.

mod completions;
mod error_queue;
mod lending;
mod memlock;
mod pipe;
mod sender;

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

pub use lending::Lending;
pub(crate) use sender::{Refusal, ZeroCopySender};

/// How pages that are lent leave. A method that is named is used, or setting up the channel fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ZeroCopy {
    /// They are copied, like everything else.
    #[default]
    Off,
    /// The best that the channel has: splice to a peer on this machine, else `MSG_ZEROCOPY`, else they are copied. A
    /// channel that turns out to copy what is lent by `MSG_ZEROCOPY` goes on without it.
    Auto,
    /// By `MSG_ZEROCOPY`, over TCP.
    Msg,
    /// By `vmsplice` and `splice`, over TCP and unix sockets. A peer that is gone is an error only where SIGPIPE is
    /// ignored, as in every Rust program.
    Splice,
}

impl ZeroCopy {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Off, Self::Auto, Self::Msg, Self::Splice];

    /// The name, as [`FromStr`] reads it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Auto => "auto",
            Self::Msg => "msg",
            Self::Splice => "splice",
        }
    }
}

impl fmt::Display for ZeroCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no method has.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("zero-copy {name:?}: expected off, auto, msg or splice")]
pub struct UnknownZeroCopy {
    /// The name.
    pub name: String,
}

impl FromStr for ZeroCopy {
    type Err = UnknownZeroCopy;

    fn from_str(name: &str) -> Result<Self, UnknownZeroCopy> {
        let found = Self::ALL.into_iter().find(|method| method.name() == name);
        found.ok_or_else(|| UnknownZeroCopy { name: name.to_owned() })
    }
}
