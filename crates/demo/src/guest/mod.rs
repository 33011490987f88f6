//! The guests that limosa brings along: each runs, writes its memory at a set rate, pauses when told to, and can tell
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
//! let memory = || Ok::<_, limosa_memory::MemoryError>(Arc::new(GuestMemory::new(vec![BlockOptions::memfd("pc.ram", 4 << 20).map()?])?));
//! let options = GuestOptions { rate: Rate::Max, ..GuestOptions::default() };
//! let guest = guest::boot(GuestKind::Threads, memory()?, &options)?;
//! guest.run()?;
//! guest.pause()?;
//! let sound = guest.verify()?;
//! assert_eq!(sound.pages, 1024);
//!
//! // A guest that takes the state without the memory notices.
//! let other = guest::receive(GuestKind::Threads, memory()?, guest::LogKind::Best)?;
//! other.load(&guest.save()?)?;
//! assert!(other.verify().is_err());
//! # Ok(()) }
//! ```
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

mod gate;
pub mod heap;
mod kvm;
mod pattern;
mod ram;
mod state;
mod threads;

use std::fmt;
use std::io;
use std::sync::Arc;

use limosa_memory::dirty::{DirtyLogs, LogError, Writers};
use limosa_memory::{GuestMemory, MemoryError};
use limosa_page::PAGE_SIZE;

use pattern::{Layout, Plan};
use state::{MAX_WRITERS, State};

pub use heap::{FreeHeap, Heap};
pub use state::STATE_VERSION;

/// Name of the RAM block that is the guest's [heap], if it has one: the last one.
pub const HEAP: &str = "heap";

/// Which of the built-in guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum GuestKind {
    /// Threads of the demonstration's own process
    #[default]
    Threads,
    /// A flat guest under /dev/kvm
    Kvm,
}

impl fmt::Display for GuestKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Threads => "threads",
            Self::Kvm => "kvm",
        })
    }
}

/// The dirty log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogKind {
    /// The best one there is for the guest on this kernel
    #[default]
    #[value(skip)]
    Best,
    /// userfaultfd's asynchronous write protection, read by `PAGEMAP_SCAN` (Linux 6.7)
    WpAsync,
    /// userfaultfd's write protection with a thread that answers (Linux 5.19)
    WpThread,
    /// KVM's dirty log, cleared in slices
    KvmLog,
    /// KVM's dirty log, without protecting pages in slices
    #[value(skip)]
    KvmLogInOneStep,
    /// KVM's dirty ring
    KvmRing,
}

/// How fast a guest writes its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rate {
    /// Bytes of pages that get dirty in a second, all writers together; 0: it idles.
    BytesPerSecond(u64),
    /// As fast as it can.
    Max,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BytesPerSecond(0) => f.write_str("idle"),
            Self::BytesPerSecond(bytes) => write!(f, "{bytes} B/s"),
            Self::Max => f.write_str("max"),
        }
    }
}

/// What a new guest does. Pages are counted over all blocks, in their order; a kind may keep the first few for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestOptions {
    /// How fast it writes.
    pub rate: Rate,
    /// Bytes that it writes over and over, from the front of its memory; `None`: all.
    pub working_set: Option<u64>,
    /// Bytes that have contents when it begins, from the front of its memory; `None`: the working set. The rest is
    /// zero.
    pub filled: Option<u64>,
    /// Writers (threads or vCPUs), each with its own share of the working set: 1 to 64.
    pub writers: u16,
    /// Tells the contents of guests apart.
    pub seed: u32,
    /// The dirty log it is to have.
    pub log: LogKind,
}

impl Default for GuestOptions {
    fn default() -> Self {
        Self {
            rate: Rate::BytesPerSecond(64 << 20),
            working_set: None,
            filled: None,
            writers: 1,
            seed: 1,
            log: LogKind::Best,
        }
    }
}

/// What a guest found out about its memory when all is well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verified {
    /// Pages that it has: every one holds what it must.
    pub pages: u64,
    /// Of them, pages that have to be zero.
    pub zero_pages: u64,
    /// Pages that it has written since it was booted, wherever that was.
    pub writes: u64,
    /// Of all its memory: equal on both ends while it is paused.
    pub checksum: u64,
}

/// Why a guest does not do what it was told.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// It cannot be made like that.
    #[error("guest {kind}: {why}")]
    Options {
        /// Which.
        kind: GuestKind,
        /// The conflict.
        why: String,
    },

    /// This machine cannot run it.
    #[error("guest {kind} cannot run here: {why}")]
    Unavailable {
        /// Which.
        kind: GuestKind,
        /// What is missing, and what to do.
        why: String,
    },

    /// The state to be loaded is not one, or is that of another memory.
    #[error("the state of guest {kind} at byte {offset}: {why}")]
    State {
        /// Which.
        kind: GuestKind,
        /// Bytes into the state.
        offset: usize,
        /// What was expected.
        why: String,
    },

    /// It has no state yet: it waits for [`Guest::load`].
    #[error("the guest has not been given its state yet")]
    NoState,

    /// Only a paused guest can do that.
    #[error("{0} is only possible while the guest is paused")]
    NotPaused(&'static str),

    /// Its memory does not hold what it must: something was lost on the way.
    #[error(
        "RAM block {block}, page {page}: byte {offset} on should hold {expected:#010x} (written {generation} times) and holds \
         {found:#010x}: {found_in} of the guest's pages are wrong"
    )]
    Damaged {
        /// The block.
        block: String,
        /// Page in it.
        page: u64,
        /// Bytes into the page.
        offset: usize,
        /// How often the guest has written the page.
        generation: u64,
        /// What should be there.
        expected: u32,
        /// The item found.
        found: u32,
        /// Pages that are wrong.
        found_in: u64,
    },

    /// A writer of it has failed.
    #[error("a writer of guest {kind} failed: {why}")]
    Failed {
        /// Which.
        kind: GuestKind,
        /// The reason.
        why: String,
    },

    /// The kernel refused.
    #[error("guest {kind}: {operation}: {source}")]
    Kernel {
        /// Which.
        kind: GuestKind,
        /// The operation.
        operation: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },

    /// Its memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),

    /// Its dirty log.
    #[error(transparent)]
    Log(#[from] LogError),
}

/// A built-in guest. It is paused when it is made. Dropping it ends it.
pub trait Guest: Send + Sync {
    /// Which it is.
    fn kind(&self) -> GuestKind;

    /// Its memory.
    fn memory(&self) -> &Arc<GuestMemory>;

    /// Who writes it.
    fn writers(&self) -> Writers;

    /// The dirty logs that see all of these, not started. Asked for once a migration.
    ///
    /// # Errors
    /// The kernel lacks what the chosen log needs.
    fn dirty_logs(&self) -> Result<DirtyLogs, GuestError>;

    /// Lets it run, or go on.
    ///
    /// # Errors
    /// It has no state, or a writer has failed.
    fn run(&self) -> Result<(), GuestError>;

    /// Stops it. On success nothing writes its memory any more, and what was written is in the dirty logs.
    ///
    /// A writer that waits for a page (in postcopy) is waited for.
    ///
    /// # Errors
    /// A writer has failed; the others are paused.
    fn pause(&self) -> Result<(), GuestError>;

    /// Changes how fast it writes.
    fn set_rate(&self, rate: Rate);

    /// Takes `percent` (0 to 99) of their time from its writers; 0 gives it back.
    fn throttle(&self, percent: u8);

    /// Pages that it has written since it was booted, wherever that was.
    fn writes(&self) -> u64;

    /// Its state beside memory, a few hundred bytes: the version of the format is [`STATE_VERSION`].
    ///
    /// # Errors
    /// It is not paused, or has no state yet.
    fn save(&self) -> Result<Vec<u8>, GuestError>;

    /// Takes the state of another one of its kind, with memory of the same size.
    ///
    /// # Errors
    /// It is not paused, or the state is not one.
    fn load(&self, state: &[u8]) -> Result<(), GuestError>;

    /// Looks at all of its memory.
    ///
    /// # Errors
    /// It is not paused, has no state yet, or [`GuestError::Damaged`].
    fn verify(&self) -> Result<Verified, GuestError>;
}

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

/// The state of a new guest, checked against its memory.
fn new_state(
    kind: GuestKind,
    pages: u64,
    reserved: u64,
    spacing: usize,
    options: &GuestOptions,
) -> Result<State, GuestError> {
    let room = pages.saturating_sub(reserved);
    let working = options.working_set.map_or(room, |bytes| bytes.div_ceil(PAGE_SIZE));
    let filled = options.filled.map_or(working, |bytes| bytes.div_ceil(PAGE_SIZE));
    let wrong = |why| Err(GuestError::Options { kind, why });
    if working == 0 || working > room || filled > room {
        return wrong(format!(
            "a working set of {working} pages and {filled} filled ones, of {room} that can be written"
        ));
    }
    if options.writers == 0 || options.writers > MAX_WRITERS || u64::from(options.writers) > working {
        return wrong(format!("{} writers: 1 to {MAX_WRITERS}, with a page each", options.writers));
    }
    let plan = Plan::new(options.seed, Layout { reserved, filled, working }, spacing, options.writers);
    Ok(State { plan, rate: options.rate, writes: vec![0; options.writers.into()], extra: Vec::new() })
}
