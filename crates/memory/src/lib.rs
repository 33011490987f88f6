//! Guest RAM: RAM blocks over mmap, and dirty logs of them.
//!
//! A [`GuestMemory`] is the list of a VM's RAM blocks in stream order, named as QEMU names them; a block's index in it
//! identifies the block everywhere above. Its pages are read through [`limosa_page::GuestPages`], and passed to the
//! kernel as raw memory: no reference to them is ever made. [`dirty`] logs report the pages that a running guest
//! writes, and [`FreePageHinting`] the pages that it does not use.
//!
//! A VMM built on rust-vmm's `vm-memory` converts its memory by `rust_vmm` (feature `vm-memory`).
//!
//! # Example
//!
//! A block of 16 MiB; a device model writes to it while a log is on.
//!
//! ```
//! use std::sync::Arc;
//! use limosa_memory::dirty::{DirtyLog, DirtyLogs, DirtyPages, SoftwareDirtyLog, Writers};
//! use limosa_memory::{BlockOptions, GuestMemory};
//! use limosa_page::PageNumber;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = Arc::new(GuestMemory::new(vec![BlockOptions::memfd("pc.ram", 16 << 20).map()?])?);
//! let log = SoftwareDirtyLog::new(&memory, Writers::VCPUS);
//! let marker = log.bitmap();
//! let mut logs = DirtyLogs::new(Writers::VCPUS, vec![Box::new(log)])?;
//!
//! logs.start()?;
//! memory.block(0)?.write(4096 * 5, b"contents")?; // A device writes, and says so.
//! marker.mark(0, limosa_page::PageRange::starting_at(PageNumber(5), 1));
//!
//! let mut dirty = DirtyPages::new(&memory);
//! logs.fetch(&mut dirty)?;
//! assert_eq!(dirty.count(), 1);
//! assert!(dirty.block(0).is_some_and(|pages| pages.get(PageNumber(5))));
//! # Ok(()) }
//! ```

mod block;
pub mod dirty;
mod discard;
mod discarding;
mod error;
mod faults;
mod forwarded_faults;
mod free;
mod layout;
mod mapping;
mod memory;
mod pagemap;
mod pin;
mod populate;
mod populated;
mod release;
#[cfg(feature = "vm-memory")]
pub mod rust_vmm;
mod share;
mod userfaultfd;

pub use block::{BlockOptions, BlockRole, MemoryBlock};
pub use discard::Discarded;
pub use error::MemoryError;
pub use faults::{
    Fault, FaultBlock, FaultError, FaultEvent, FaultHandler, FaultLayout, FaultMode, FaultOptions, FaultOrigin,
    FaultWaker, PlacedPages, RegistrationGuard,
};
pub use forwarded_faults::{ForwardedFaults, ForwardedFaultsSource};
pub use free::{FreePageHinting, FreePageSink, FreePagesError};
pub use layout::{GuestLayout, GuestRegion};
pub use memory::GuestMemory;
pub use pagemap::ProcessPagemap;
pub use pin::PinnedPages;
pub use populate::{MemcgHeadroom, PopulateStats, Populator, PrefaultAhead};
pub use populated::cached_pages;
pub use release::ReleaseMethod;
pub use share::PassedBlock;

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
