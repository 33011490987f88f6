//! vhost-user server plumbing shared by devices.
//!
//! A [`Device`] states what it is and what it does with a queue. It sees the guest's memory as [`Ram`], a queue as a
//! [`Vring`], and the VMM as a [`FrontEnd`]. [`message`] is the protocol on the wire. A device may complete buffers at
//! once, or have many requests in flight, on several threads ([`QueueThread`]); a ring that stops is drained first.
//!
//! A [`Server`] listens, and serves one front end after the other.
//!
//! Rings come from rust-vmm's `virtio-queue`, over `vm-memory`; the rest of the protocol is here, so that front ends
//! work that other servers refuse: user-mode Linux sends a memory table longer than needed, and requires notifications
//! of configuration changes.
//!
//! # Example
//!
//! A device that gives every buffer back unread, and whose configuration is one byte.
//!
//! ```
//! use std::sync::Arc;
//! use limosa_vhost::{Device, FrontEnd, MoreWork, QueueError, Ram, Server, Vring};
//!
//! struct Sink;
//!
//! impl Device for Sink {
//!     fn features(&self) -> u64 { 0 }
//!     fn num_queues(&self) -> usize { 1 }
//!     fn ack_features(&self, _features: u64) {}
//!     fn read_config(&self, offset: u32, into: &mut [u8]) {
//!         into.fill(0);
//!         if let (0, Some(first)) = (offset, into.first_mut()) {
//!             *first = 42;
//!         }
//!     }
//!     fn write_config(&self, _offset: u32, _bytes: &[u8]) {}
//!     fn set_memory(&self, _memory: Arc<Ram>) {}
//!     fn front_end_connected(&self, _front_end: FrontEnd) {}
//!     fn process_queue(&self, _queue: usize, vring: &Vring) -> Result<MoreWork, QueueError> {
//!         // One buffer a call, so that other queues are processed and the ring can be stopped in between.
//!         let Some(chain) = vring.pop()? else { return Ok(MoreWork::No) };
//!         vring.add_used(chain.head_index(), 0)?;
//!         vring.notify()?;
//!         Ok(MoreWork::Yes)
//!     }
//!     fn queue_stopped(&self, _queue: usize) {}
//!     fn reset(&self) {}
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let server = Server::bind(&folder.path().join("sink.sock"), Arc::new(Sink))?;
//! let stopper = server.stopper();
//! std::thread::scope(|scope| {
//!     let serving = scope.spawn(|| server.serve());
//!     // A VMM connects here, and disconnects; others may follow.
//!     stopper.stop();
//!     serving.join().expect("it does not panic")
//! })?;
//! # Ok(()) }
//! ```

mod connection;
mod device;
mod dirty_log;
mod error;
mod fault;
mod front_end;
#[doc(hidden)]
pub mod fuzzing;
mod inflight;
pub mod message;
mod notifier;
mod postcopy;
mod ram;
mod server;
mod session;
mod vring;
mod worker;

pub use device::{Device, MoreWork, Requests};
pub use error::{QueueError, RamError};
pub use fault::FaultKind;
pub use front_end::FrontEnd;
pub use ram::{MAX_REGIONS, Ram, RamRegion};
pub use server::{Server, ServerError, Stopper};
pub use vring::{Chain, Vring};
pub use worker::{QueueThread, Turn};

/// Maximum number of queues of a device.
pub const MAX_QUEUES: usize = 64;

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
