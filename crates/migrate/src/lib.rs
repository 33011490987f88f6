//! Migration engines for VMMs: sources and destinations that speak QEMU's migration stream.
//!
//! An engine moves pages between a [`Channel`](limosa_channel::Channel) and the memory of a guest ([`live`]) or a
//! stored file ([`stored`]). Engines block in vectored system calls, a thread for each channel ([`multifd`]). All are
//! made and run in one way: `X::new(what, channel, &handle).options(options).run()`. The [`Handle`] stops an engine,
//! changes its rate and shows its progress ([`control`]); [`stats`] are what it counted.
//!
//! # Example
//!
//! A VM with a page of memory and one device moves between two threads.
//!
//! ```
//! use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
//! use std::thread;
//!
//! use limosa_channel::Channel;
//! use limosa_memory::dirty::{DirtyLogs, SoftwareDirtyLog, Writers};
//! use limosa_memory::{BlockOptions, GuestMemory};
//! use limosa_migrate::*;
//! use limosa_stream::{Configuration, DeviceSections, OpaqueSection};
//!
//! struct Vm { memory: GuestMemory, running: AtomicBool, timer: AtomicU64 }
//!
//! impl LiveVm for Vm {
//!     fn configuration(&self) -> Configuration { Configuration::new("toy-1") }
//!     fn memory(&self) -> &GuestMemory { &self.memory }
//!     fn writers(&self) -> Writers { Writers::VCPUS }
//!     fn pause(&self) -> Result<(), VmError> { Ok(self.running.store(false, SeqCst)) }
//!     fn resume(&self) -> Result<(), VmError> { Ok(self.running.store(true, SeqCst)) }
//!     fn device_sections(&self) -> Result<DeviceSections, VmError> {
//!         let mut sections = DeviceSections::new();
//!         sections.push("timer", 0, 1, &self.timer.load(SeqCst).to_le_bytes())?;
//!         Ok(sections)
//!     }
//! }
//!
//! impl IncomingVm for Vm {
//!     fn memory(&self) -> &GuestMemory { &self.memory }
//!     fn load_device(&self, section: OpaqueSection<'_>) -> Result<(), VmError> {
//!         Ok(self.timer.store(u64::from_le_bytes(section.state.try_into()?), SeqCst))
//!     }
//!     fn start(&self) -> Result<(), VmError> { Ok(self.running.store(true, SeqCst)) }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vm = |running, timer| -> Result<Vm, limosa_memory::MemoryError> {
//!     let memory = GuestMemory::new(vec![BlockOptions::anonymous("ram", 4096).map()?])?;
//!     Ok(Vm { memory, running: AtomicBool::new(running), timer: AtomicU64::new(timer) })
//! };
//! let (here, there) = (vm(true, 7)?, vm(false, 0)?);
//! here.memory.block(0)?.write(0, b"a page")?;
//! // Sees every write of the guest. KVM's log is another one.
//! let log = SoftwareDirtyLog::new(&here.memory, Writers::VCPUS);
//! let logs = DirtyLogs::new(Writers::VCPUS, vec![Box::new(log)])?;
//!
//! let (near, far) = Channel::pair()?;
//! let far = Channel::from_fd(far)?;
//! thread::scope(|scope| {
//!     scope.spawn(|| LiveDestination::new(&there, far, &Handle::new()).run());
//!     match LiveSource::new(&here, logs, near, &Handle::new()).run() {
//!         LiveOutcome::Completed(stats) => println!("{:?} of downtime", stats.downtime),
//!         LiveOutcome::Resumed { error, .. } => println!("{error}; the VM continues here"),
//!         other => println!("{other:?}"),
//!     }
//! });
//! assert!(there.running.load(SeqCst) && !here.running.load(SeqCst));
//! assert_eq!(there.timer.load(SeqCst), 7);
//! # Ok(()) }
//! ```

pub mod control;
mod destination;
mod error;
pub mod live;
pub mod output;
mod pages;
mod source;
pub mod stored;

pub use control::Handle;
pub use error::MigrateError;
pub use live::{
    IncomingOutcome, IncomingVm, LiveDestination, LiveOutcome, LiveSource, LiveVm, MigrationParams, VmError,
};

/// Checkpoints of a VM that runs elsewhere, as QEMU's capability `x-colo` makes them.
///
/// A [`Destination`](stored::Destination) with the option [`colo`](stored::DestinationOptions::colo) receives the base,
/// the whole VM. The [`Checkpoints`](checkpoints::Checkpoints) behind it bring what has changed since, in turns.
///
/// ```no_run
/// use std::time::Duration;
///
/// use limosa_channel::Channel;
/// use limosa_migrate::checkpoints::NextCheckpoint;
/// use limosa_migrate::stored::{Destination, DestinationOptions, PageSink};
/// use limosa_migrate::{Handle, MigrateError};
///
/// /// Keeps the VM's last checkpoint until its primary ends the series.
/// fn keep(sink: &mut (dyn PageSink + Send), channel: Channel) -> Result<u64, MigrateError> {
///     let options = DestinationOptions { colo: true, ..DestinationOptions::default() };
///     let base = Destination::new(sink, channel, &Handle::new()).options(options).run()?;
///     let mut checkpoints = base.into_checkpoints()?;
///     checkpoints.begin()?;
///     while checkpoints.wait_request(None)? == NextCheckpoint::Requested {
///         checkpoints.reply()?; // The VM stops,
///         let checkpoint = checkpoints.receive(sink, Some(Duration::from_secs(1)))?;
///         checkpoints.loaded()?; // and continues.
///         println!("checkpoint {}: {} pages", checkpoint.number, checkpoint.stats.normal_pages);
///     }
///     Ok(checkpoints.received())
/// }
/// ```
///
/// Checkpoints of a VM that runs here are made by [`LiveSource::make_checkpoints`], in the same stream.
pub mod checkpoints {
    pub use crate::destination::{Aside, Checkpoint, CheckpointStats, Checkpoints, NextCheckpoint, NextState};
    pub use crate::live::source::{CheckpointReport, CheckpointSourceOptions, CheckpointsEnded};
}

/// Several channels of one migration, as QEMU's capability `multifd` has them.
///
/// A source is given its channels with [`LiveSource::channels`] or
/// [`PrecopySource::channels`](stored::PrecopySource::channels). At the destination
/// [`MultifdAccept`](multifd::MultifdAccept) finds out which connection is which channel.
pub mod multifd {
    pub use crate::destination::{MultifdAccept, MultifdAcceptOptions, MultifdChannels, MultifdOptions};
    pub use crate::source::multifd::{CHANNELS_MAX, MultifdSourceOptions};
}

/// Counters of engines that have ended.
pub mod stats {
    pub use crate::destination::DestinationStats;
    pub use crate::live::destination::{IncomingStats, PostcopyIncomingStats};
    pub use crate::live::source::{HintStats, LiveStats, RoundKind, RoundReport};
    pub use crate::source::postcopy::PostcopyStats;
    pub use crate::source::precopy::PrecopyStats;
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
