//! Zero-copy sends: the kernel references memory and reads it when it sends.
//!
//! A write copies its bytes into the kernel's buffers, so the caller may reuse its memory at once. Two methods save
//! that copy, at a price:
//!
//! | method | transports | pages in flight | completion |
//! |---|---|---|---|
//! | [`Msg`](ZeroCopy::Msg): `MSG_ZEROCOPY` (Linux 4.14; kernel docs: `networking/msg_zerocopy`) | TCP | are pinned, and count against `RLIMIT_MEMLOCK` | reported |
//! | [`Splice`](ZeroCopy::Splice): `vmsplice(2)` into a pipe, `splice(2)` from there | TCP, unix sockets | are referenced | never reported |
//!
//! **Law: memory that the kernel references is reused, freed or discarded only after a flush.** The type
//! [`ZeroCopyWriter`] holds the borrow until then. Splice has no completion, so it is only for memory that may be read
//! at any later time: a guest's pages ([`ZeroCopyWriter::write_pages`]). Memory that is reused, headers above all, is
//! copied under every method.
//!
//! **A page of a running guest** may change while it is queued, and may be sent half old and half new. That is correct,
//! because the change is in the dirty log: the page is sent again, in a round that begins after the flush and the SYNC
//! packet of this one. The last round is sent while the guest is paused.
//!
//! If the two ends are on one machine, the kernel copies `MSG_ZEROCOPY` data before the receiver gets it, because the
//! receiver might keep it for ever, and reports that in the completion. Splice saves the copy there too, so
//! [`ZeroCopy::Auto`] selects it for a peer on this machine.

mod completions;
mod error_queue;
mod msg;
mod sender;
mod splice;
mod writer;

use strum::{Display, EnumString, IntoStaticStr};
use thiserror::Error;

pub(crate) use sender::{Parts, Refusal, ZeroCopySender};
pub use writer::ZeroCopyWriter;

/// Method of zero-copy sends. If a named method is unavailable, setting up the channel fails.
#[derive(Clone, Copy, Debug, Default, Display, EnumString, IntoStaticStr, PartialEq, Eq, Hash)]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownZeroCopy, parse_err_fn = UnknownZeroCopy::new)]
pub enum ZeroCopy {
    /// Copy, as any write.
    #[default]
    Off,
    /// The best method of the channel: splice to a peer on this machine, else `MSG_ZEROCOPY`, else copy. A channel on
    /// which the kernel copies `MSG_ZEROCOPY` data changes to another method.
    Auto,
    /// `MSG_ZEROCOPY`, over TCP.
    Msg,
    /// `vmsplice` and `splice`, over TCP and unix sockets. A peer that is gone is an error only if SIGPIPE is ignored,
    /// as in every Rust program.
    Splice,
}

impl ZeroCopy {
    /// All methods.
    pub const ALL: [Self; 4] = [Self::Off, Self::Auto, Self::Msg, Self::Splice];
}

/// A name that no method has.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("zero-copy {name:?}: expected off, auto, msg or splice")]
pub struct UnknownZeroCopy {
    /// The name.
    pub name: String,
}

impl UnknownZeroCopy {
    fn new(name: &str) -> Self {
        Self { name: name.to_owned() }
    }
}
