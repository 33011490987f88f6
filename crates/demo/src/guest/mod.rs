//! The guests that limosa brings along: each runs, writes its memory at a set rate, pauses on request, and can check
//! whether any of its memory was lost.
//!
//! **Law: a guest's memory follows from its state.** What every page holds is computed from the page's number and from
//! how often it was written, and that from the counters of the guest's writers, which are device state. So after a
//! migration [`Guest::verify`] finds every write that was lost, every page that is stale or at another's place, and
//! every copy that is torn, without having seen the source. A guest that is moved is made with [`receive`], and takes
//! its state by [`Guest::load`].
//!
//! ```
//! use std::sync::Arc;
//! use limosa_demo::guest::{self, GuestKind, GuestOptions, Rate};
//! use limosa_memory::{BlockOptions, GuestMemory};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = || Ok::<_, limosa_memory::MemoryError>(Arc::new(GuestMemory::new(vec![BlockOptions::memfd("pc.ram", 4
//! << 20).map()?])?)); let options = GuestOptions { rate: Rate::Max, ..GuestOptions::default() }; let guest =
//! guest::boot(GuestKind::Threads, memory()?, &options)?; guest.run()?; guest.pause()?; let sound = guest.verify()?;
//! assert_eq!(sound.pages, 1024);
//!
//! // A guest that takes the state without the memory notices.
//! let other = guest::receive(GuestKind::Threads, memory()?, guest::LogKind::Best)?;
//! other.load(&guest.save()?)?;
//! assert!(other.verify().is_err());
//! # Ok(()) }
//! ```

mod built_in;
mod error;
mod gate;
pub mod heap;
mod kvm;
mod options;
mod pattern;
mod ram;
mod state;
mod threads;

use std::sync::Arc;

use limosa_memory::GuestMemory;

pub use built_in::{Guest, Verified};
pub use error::GuestError;
pub use heap::{FreeHeap, Heap};
pub use options::{GuestKind, GuestOptions, LogKind, Rate};
pub use ram::HEAP;
pub use state::STATE_VERSION;

/// A new guest in `memory`, which is zero.
///
/// # Errors
/// Options that do not fit the memory, or a machine that cannot run it.
pub fn boot(kind: GuestKind, memory: Arc<GuestMemory>, options: &GuestOptions) -> Result<Box<dyn Guest>, GuestError> {
    match kind {
        GuestKind::Threads => Ok(Box::new(threads::Threads::boot(memory, options)?)),
        GuestKind::Kvm => Ok(Box::new(kvm::KvmGuest::boot(memory, options)?)),
    }
}

/// A guest that waits for its state, and whose memory comes from elsewhere.
///
/// # Errors
/// A machine that cannot run it.
pub fn receive(kind: GuestKind, memory: Arc<GuestMemory>, log: LogKind) -> Result<Box<dyn Guest>, GuestError> {
    match kind {
        GuestKind::Threads => Ok(Box::new(threads::Threads::receive(memory, log)?)),
        GuestKind::Kvm => Ok(Box::new(kvm::KvmGuest::receive(memory, log)?)),
    }
}
