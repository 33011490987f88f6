//! Migrating a VM while it runs: what an engine wants of a VMM, and what it may be told.
//!
//! The source's side of a VMM is a [`LiveVm`], the destination's an [`IncomingVm`]. Contracts stand on the traits. The
//! example `vmm` is a VMM in miniature that has both.

pub(crate) mod destination;
pub(crate) mod shared_memory;
pub(crate) mod source;

use std::error::Error;
use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use limosa_memory::dirty::Writers;
use limosa_memory::{GuestMemory, PassedBlock};
use limosa_page::ZeroMethod;
use limosa_stream::{Configuration, DeviceSections, OpaqueSection};
use thiserror::Error as ThisError;

pub use shared_memory::SharedMemory;

/// What a VMM failed with; it names its own object.
pub type VmError = Box<dyn Error + Send + Sync>;

/// A running VM, as the source's VMM offers it to the engine.
pub trait LiveVm: Sync {
    /// The machine, and the capabilities both ends must agree on.
    fn configuration(&self) -> Configuration;

    /// Its memory: the same blocks, by name and length, as at the destination.
    fn memory(&self) -> &GuestMemory;

    /// Who writes its memory while it runs. The engine refuses a VM with a writer that no dirty log covers.
    fn writers(&self) -> Writers;

    /// Stops vCPUs and devices. On success nothing writes guest memory any more, and everything that was written before
    /// is in the dirty logs: rings are drained, requests in flight are completed.
    ///
    /// # Errors
    /// The VM cannot be stopped; it runs on as before.
    fn pause(&self) -> Result<(), VmError>;

    /// Lets the VM go on where [`pause`](Self::pause) stopped it. Also called when `pause` has failed half-way.
    ///
    /// # Errors
    /// The VM cannot go on.
    fn resume(&self) -> Result<(), VmError>;

    /// The state of its devices and vCPUs. Only asked for while it is paused.
    ///
    /// # Errors
    /// The state is unavailable: the VM is resumed.
    fn device_sections(&self) -> Result<DeviceSections, VmError>;

    /// Slows the vCPUs down: for `percent` (0 to 99) of the time they do not run. 0 lifts it.
    ///
    /// # Errors
    /// The VM cannot be slowed down: the migration goes on without.
    fn throttle(&self, percent: u8) -> Result<(), VmError> {
        let _ = percent;
        Err("this VMM cannot slow its vCPUs down".into())
    }
}

/// A VM that waits for its state, as the destination's VMM offers it to the engine.
pub trait IncomingVm: Sync {
    /// Its memory. Nothing runs in it before [`start`](Self::start). Where memory is to be
    /// [passed](SharedMemory::Passed) it is asked for only after [`adopt`](Self::adopt).
    fn memory(&self) -> &GuestMemory;

    /// Who reads or writes its memory once it runs, or before. Postcopy is refused, as soon as the source announces it,
    /// if [vhost](Writers::VHOST) is among them: memory that has not come is missing in this process alone, and another
    /// process that maps it finds zeros there.
    ///
    /// By default only the vCPUs and this process's own devices.
    fn users(&self) -> Writers {
        Writers::VCPUS | Writers::DEVICES
    }

    /// Takes memory that the source passes: these blocks are to be mapped as [they say](PassedBlock::into_options), and
    /// be among [`memory`](Self::memory) from now on. Until the VM is started here, the source's VM runs in them:
    /// nothing may write them, [`load_device`](Self::load_device) included.
    ///
    /// # Errors
    /// By default: that this VM has its own memory.
    fn adopt(&self, blocks: Vec<PassedBlock>) -> Result<(), VmError> {
        Err(format!("this VM has its own memory and takes none ({} blocks were passed)", blocks.len()).into())
    }

    /// Takes the state of one device, by name. In postcopy guest memory that is touched here is fetched on demand.
    ///
    /// # Errors
    /// There is no such device, or it does not take the state: the source's VM goes on.
    fn load_device(&self, section: OpaqueSection<'_>) -> Result<(), VmError>;

    /// Takes all device sections at once, as stock QEMU packs them for postcopy: they say nothing about their lengths,
    /// so only a VMM that knows the devices can tell them apart. As [`load_device`](Self::load_device) otherwise.
    ///
    /// # Errors
    /// By default: that this VM does not know stock QEMU's devices.
    fn load_package(&self, sections: &[u8]) -> Result<(), VmError> {
        let _ = sections;
        Err("the source's device sections do not say where they end, and this VMM does not know them".into())
    }

    /// Runs the VM. Called once, when every device section was loaded and the source has given the VM away. It lets
    /// vCPUs and devices go on and does not touch guest memory itself: in postcopy there may be no source to bring it.
    ///
    /// # Errors
    /// The VM cannot run, and nothing of it does. A source that waits for the VM's own word stays undecided then, and
    /// this may be called once more; a stock QEMU source is told, and its VM goes on.
    fn start(&self) -> Result<(), VmError>;
}

/// When to look if a page is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ZeroCheck {
    /// Every page, in every round.
    #[default]
    Always,
    /// In the first round only: a page that was written is rarely zero.
    Bulk,
    /// Never.
    Off,
}

impl ZeroCheck {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Always, Self::Bulk, Self::Off];

    /// The name, as [`FromStr`] reads it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Bulk => "bulk",
            Self::Off => "off",
        }
    }
}

/// How records of pages get from guest memory into the main channel. The bytes are the same; multifd channels always
/// gather.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RecordWrite {
    /// From where they live: one call sends hundreds of pages, each behind its header.
    #[default]
    Vectored,
    /// Copied into a buffer of 16 KiB, which is written whenever it is full: for comparison.
    Buffered,
}

/// What to do with a migration that does not converge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TimeoutStrategy {
    /// Cancel: the VM runs on at the source.
    #[default]
    Cancel,
    /// Switch over however long the pause gets.
    Pause,
    /// Switch to postcopy.
    Postcopy,
}

impl TimeoutStrategy {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Cancel, Self::Pause, Self::Postcopy];

    /// The name, as [`FromStr`] reads it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Pause => "pause",
            Self::Postcopy => "postcopy",
        }
    }
}

/// A name that no value of a setting has.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
#[error("{name:?}: expected {expected}")]
pub struct UnknownName {
    /// The name.
    pub name: String,
    /// The names that there are.
    pub expected: &'static str,
}

impl fmt::Display for ZeroCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ZeroCheck {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let found = Self::ALL.into_iter().find(|value| value.name() == name);
        found.ok_or_else(|| UnknownName { name: name.to_owned(), expected: "always, bulk or off" })
    }
}

impl fmt::Display for TimeoutStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TimeoutStrategy {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let found = Self::ALL.into_iter().find(|value| value.name() == name);
        found.ok_or_else(|| UnknownName { name: name.to_owned(), expected: "cancel, pause or postcopy" })
    }
}

/// The parameters of a migration, by QEMU's names where QEMU has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationParams {
    /// `downtime-limit`: how long the VM may be stopped for the rest of its memory.
    pub downtime_limit: Duration,
    /// `max-bandwidth`: bytes per second while it runs; `None`: no limit.
    pub max_bandwidth: Option<NonZeroU64>,
    /// `avail-switchover-bandwidth`: bytes per second to reckon with at the switchover; `None`: what was measured.
    pub avail_switchover_bandwidth: Option<NonZeroU64>,
    /// `max-postcopy-bandwidth`: bytes per second of pages that were not requested; `None`: no limit.
    pub max_postcopy_bandwidth: Option<NonZeroU64>,
    /// `auto-converge` (a capability): slow the vCPUs down if rounds do not get shorter.
    pub auto_converge: bool,
    /// `cpu-throttle-initial`, percent.
    pub cpu_throttle_initial: u8,
    /// `cpu-throttle-increment`, percent.
    pub cpu_throttle_increment: u8,
    /// `max-cpu-throttle`, percent.
    pub max_cpu_throttle: u8,
    /// `throttle-trigger-threshold`: percent of what was sent in a round that has to get dirty meanwhile, twice.
    pub throttle_trigger_threshold: u8,
    /// When pages are looked at.
    pub zero_check: ZeroCheck,
    /// How they are looked at: the fastest way that the processor has, if twins are not to be compared.
    pub zero_method: ZeroMethod,
    /// How page records are written until the switchover, and in the pause.
    pub record_write: RecordWrite,
    /// How long it may take until the switchover; `None`: as long as it takes.
    pub timeout: Option<Duration>,
    /// Rounds that may follow each other without the rest getting smaller; `None`: any number.
    pub stalled_rounds: Option<u32>,
    /// What happens after that time or those rounds.
    pub timeout_strategy: TimeoutStrategy,
    /// How long the first round may wait for the guest's list of [free pages](crate::LiveSource::with_free_pages);
    /// zero, and the list takes pages out while the round is sent; [`Duration::MAX`], as long as the list takes.
    pub hint_wait: Duration,
    /// Pages of a later round from which on the guest is asked again. A list takes a guest of 8 GiB 20 ms (measured),
    /// which is what 16,384 pages take at 3 GB a second: a shorter round would be over before its list.
    pub hint_pages: u64,
    /// How long the destination may be silent when it owes an answer.
    pub answer_timeout: Duration,
}

impl Default for MigrationParams {
    /// QEMU's defaults, without a bandwidth limit.
    fn default() -> Self {
        Self {
            downtime_limit: Duration::from_millis(300),
            max_bandwidth: None,
            avail_switchover_bandwidth: None,
            max_postcopy_bandwidth: None,
            auto_converge: false,
            cpu_throttle_initial: 20,
            cpu_throttle_increment: 10,
            max_cpu_throttle: 99,
            throttle_trigger_threshold: 50,
            zero_check: ZeroCheck::Always,
            zero_method: ZeroMethod::best(),
            record_write: RecordWrite::Vectored,
            timeout: None,
            stalled_rounds: None,
            timeout_strategy: TimeoutStrategy::Cancel,
            hint_wait: Duration::ZERO,
            hint_pages: 16_384,
            answer_timeout: Duration::from_secs(30),
        }
    }
}
