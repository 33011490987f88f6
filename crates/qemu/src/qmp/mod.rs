//! The QEMU monitor protocol, client side.
//!
//! Law: **what QEMU says is never lost and never reordered.** Events are kept, in the order in which they came and with
//! QEMU's own time stamps, until they are taken; replies are matched by id, so a late answer to a command that was
//! given up cannot be mistaken for another's.
//!
//! There is no background thread. The caller that waits for something reads the socket on behalf of all: every method
//! takes `&self`, so one thread may sit in [`Qmp::wait_event`] while another executes commands.
//!
//! Source of the facts: QEMU docs, "QEMU Machine Protocol Specification" (greeting, capabilities negotiation, ids,
//! events, out-of-band execution).

mod address;
mod client;
mod error;
mod framer;
mod inbox;
mod message;
mod peer;
mod socket;

pub use address::MonitorAddress;
pub use client::{Negotiated, Options, Pending, Qmp};
pub use error::QmpError;
pub use message::{Event, Greeting, Version};
pub(crate) use peer::Peer;
pub(crate) use socket::{Received, connect_unix, receive, send};

pub(crate) use error::excerpt;
