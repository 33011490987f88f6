//! A model of Linux's balloon driver, for limosa's demonstration, benchmarks and tests.
//!
//! It acts on the device as the real driver does, over real rings: arrays of 256 page numbers, one buffer for
//! statistics, free blocks that it holds until the device sends DONE and that its shrinker takes back *without
//! notifying the device*, reports of up to 32 blocks. It sends lists without waiting: ids and blocks go onto the ring
//! as long as there is room, and the id of each list overwrites that of the previous one. [`Pages`] provides the
//! guest's free pages.
//!
//! A [`Machine`] connects driver and device, as a bus does in a VMM; its device may be behind a vhost-user server
//! ([`FrontEnd`]). Its queues are processed either by a separate thread ([`Machine::worker`]), or by the driver when it
//! waits ([`Machine::work_if_no_worker`]), so that a test controls every step.
//!
//! A [`Heap`] is a guest that needs no more of a balloon than free-page hints: what a migration engine asks for.
//!
//! ```
//! use std::sync::Arc;
//! use limosa_balloon::{Balloon, Features, GuestRam, Options, Strategy};
//! use limosa_balloon_driver::{Blocks, Driver, Machine, Mutex, RINGS};
//! use limosa_memory::{BlockOptions, GuestMemory};
//! use vm_memory::{GuestAddress, GuestMemoryMmap};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = Arc::new(GuestMemory::new(vec![BlockOptions::memfd("pc.ram", 64 << 20).map()?])?);
//! let balloon = Arc::new(Balloon::new(Options::default()));
//! balloon.set_memory(Arc::new(GuestRam::new(memory, Strategy::Auto)));
//!
//! // The rings may be anywhere, here outside of what moves.
//! let rings = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(1 << 40), RINGS)])?;
//! let machine = Machine::new(balloon.clone(), Arc::new(rings), 1 << 40);
//! let free = Arc::new(Mutex::new(Blocks::new(16 << 20..64 << 20)));
//! let mut driver = Driver::probe(machine, free, Features::ALL)?;
//!
//! balloon.set_target(48 << 20)?;
//! while driver.poll()? {}
//! assert_eq!(balloon.size().actual, 48 << 20);
//! assert_eq!(balloon.counters().discarded_bytes, 16 << 20);
//! # Ok(()) }
//! ```

mod driver;
mod front_end;
mod heap;
mod late;
mod machine;
mod pages;
mod queue;
mod shrinker;

pub use driver::{BLOCK, Driver};
pub use front_end::{FrontEnd, FrontEndError};
pub use heap::{Heap, HeapError, Owner};
pub use late::LateHints;
pub use machine::{DriverNotifier, Machine, RemoteDevice, Worker};
pub use pages::{Blocks, Pages};
/// The lock of the [`Pages`] that driver and guest share.
pub use parking_lot::{Mutex, MutexGuard};
pub use queue::{QUEUE, RINGS, RingError};
pub use shrinker::Shrinker;
