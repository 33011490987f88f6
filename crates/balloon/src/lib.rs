//! virtio-balloon: a guest gives memory back, and sends lists of its free pages.
//!
//! A [`Balloon`] is the device, with any transport to its driver. A VMM passes on what the driver does (features
//! accepted, configuration read and written, queues kicked: [`Balloon::process_queue`]), gives it the guest's memory as
//! a [`Reclaim`], and is called through a [`Transport`] to interrupt the driver. Queues are [`Ring`]s: an
//! [`VirtioQueueRing`] over `virtio-queue`, or a vhost-user server's. Users and programs request another size
//! ([`Balloon::set_target`]), statistics, and lists of free pages
//! ([`FreePageHinting`](limosa_memory::FreePageHinting)).
//!
//! # Hints are only hints
//!
//! A hinted page was free at some time after the request. The guest holds it until DONE, but under memory pressure
//! takes it back *without notification* and writes it. So a hint is useful only with a log of writes that began before
//! the request, as a migration has. Memory is given back for pages in the balloon and for reported ones, never for
//! hinted ones.
//!
//! # Bad guests
//!
//! Page numbers outside of memory, arrays of odd length, blocks outside of memory, buffers of the wrong kind, unknown
//! ids, floods: refused or left out, counted ([`Counters`]), logged once, never a panic. One call of
//! [`Balloon::process_queue`] takes a bounded number of buffers and gives back a bounded number of runs. Wrong
//! information about free pages costs a guest its own data only.
//!
//! # Example
//!
//! A VMM with its own transport. Queue 0 was set up by the driver; it holds an array of three page numbers.
//!
//! ```
//! use std::sync::Arc;
//! use limosa_balloon::{Balloon, Features, GuestRam, MoreWork, Options, VirtioQueueRing, Strategy, Transport};
//! use limosa_memory::{BlockOptions, GuestMemory, rust_vmm};
//! use virtio_queue::{Queue, QueueT};
//! use vm_memory::{Bytes, GuestAddress};
//!
//! struct Bus;
//! impl Transport for Bus {
//!     fn config_changed(&self) { /* a configuration interrupt */ }
//!     fn kick(&self, _queue: usize) { /* wakes the thread that works on queues */ }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = Arc::new(GuestMemory::new(vec![BlockOptions::memfd("pc.ram", 16 << 20).map()?])?);
//! let guest = rust_vmm::export(&memory)?;
//! # // The driver's half.
//! # guest.write_slice(&[7; 3 * 4096], GuestAddress(8 << 20))?;
//! # for (at, number) in [2050u32, 2048, 2049].into_iter().enumerate() {
//! #     guest.write_obj(number.to_le(), GuestAddress(0x4000 + 4 * at as u64))?;
//! # }
//! # guest.write_obj(0x4000u64.to_le(), GuestAddress(0x1000))?;
//! # guest.write_obj(12u32.to_le(), GuestAddress(0x1008))?;
//! # guest.write_obj(1u16.to_le(), GuestAddress(0x2002))?;
//! let balloon = Balloon::new(Options::default());
//! balloon.set_memory(Arc::new(GuestRam::new(memory.clone(), Strategy::Auto)));
//! balloon.attach(Arc::new(Bus));
//! balloon.ack_features(Features::STATS_VQ | Features::FREE_PAGE_HINT);
//!
//! let mut queue = Queue::new(256)?;
//! queue.set_desc_table_address(Some(0x1000), None);
//! queue.set_avail_ring_address(Some(0x2000), None);
//! queue.set_used_ring_address(Some(0x3000), None);
//! queue.set_ready(true);
//! let ring = VirtioQueueRing::new(queue, &guest, || { /* an interrupt */ });
//!
//! balloon.set_target(8 << 20)?; // The host needs half of the memory back; the driver is notified.
//! while balloon.process_queue(0, &ring)? == MoreWork::Yes {}
//! assert_eq!(balloon.counters().inflated_pages, 3);
//! assert_eq!(balloon.counters().discards, 1, "three pages, one run");
//! assert_eq!(guest.read_obj::<u8>(GuestAddress(8 << 20))?, 0);
//! # Ok(()) }
//! ```

#![cfg_attr(test, allow(clippy::single_range_in_vec_init, reason = "ranges of memory are compared as lists of them"))]

mod config;
mod counters;
mod device;
mod hint;
mod layout;
mod numbers;
mod reclaim;
mod ring;
mod statistics;
#[cfg(feature = "vhost-user")]
mod vhost_user;

pub use counters::Counters;
pub use device::{Balloon, HintList, MemorySize, MoreWork, Options, TargetTooSmall, Transport};
pub use hint::HintState;
pub use layout::{Features, QueueNumbering, QueueRole};
pub use reclaim::{GuestRam, Reclaim, Strategy};
pub use ring::{Ring, VirtioQueueRing};
pub use statistics::{Statistics, StatisticsError};
#[cfg(feature = "vhost-user")]
pub use vhost_user::VhostUserBalloon;

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
