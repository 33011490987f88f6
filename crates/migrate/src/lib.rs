//! Migration engines for VMMs: sources and destinations that speak QEMU's migration stream.
//!
//! An engine moves pages between a [`Channel`](limosa_channel::Channel) and a [`PageSource`] or a [`PageSink`]: a
//! stored file or the memory of a guest. Engines block in vectored system calls, a thread for each channel.
//! [`Progress`] shows what an engine has done; [`Control`] stops it or changes its rate. An engine keeps clones of
//! both.
//!
//! | engine | role | when the guest starts at the destination |
//! |---|---|---|
//! | [`Destination`] | destination, precopy | when all has arrived and is acknowledged |
//! | [`PrecopySource`] | source, precopy | when all has been sent |
//! | [`PostcopySource`] | source, postcopy | at once; pages follow, requested ones first |
//! | [`LiveSource`] | source of a running VM | in either of these ways, once it is stopped here |
//! | [`LiveDestination`] | destination of a VM in this process | when the source has given its permission |
//!
//! A VMM implements [`LiveVm`] at the source and [`IncomingVm`] at the destination.
//!
//! # Example
//!
//! A guest whose memory is one page of `0x5a` and one of zeros travels from a source to a destination, here in one
//! process. (The device sections come from a VMM; here they are made by hand, with one device.)
//!
//! ```
//! use std::io::IoSlice;
//! use std::thread;
//!
//! use limosa_channel::Channel;
//! use limosa_migrate::*;
//! use limosa_page::{PageBitmap, PageNumber, PageRange};
//! use limosa_stream::{Configuration, RamBlock};
//!
//! struct Guest(StreamSetup, PageBitmap);
//!
//! impl PageSource for Guest {
//!     fn start(&self) -> &StreamSetup { &self.0 }
//!     fn stored(&self, _block: usize) -> &PageBitmap { &self.1 }
//!     fn read(&self, _block: usize, _pages: PageRange, into: &mut [u8]) -> Result<(), PageError> {
//!         into.fill(0x5a);
//!         Ok(())
//!     }
//!     fn device_sections(&self) -> &[u8] { b"\x04\0\0\0\x03\x05timer\0\0\0\0\0\0\0\x0112345678\x7e\0\0\0\x03" }
//!     fn description(&self) -> &[u8] {
//!         br#"{"devices":[{"name":"timer","instance_id":0,"fields":[{"name":"t","type":"b","size":8}]}]}"#
//!     }
//! }
//!
//! #[derive(Default)]
//! struct Memory(Vec<(u64, usize)>);
//!
//! impl PageSink for Memory {
//!     fn begin(&mut self, _start: &StreamSetup) -> Result<(), PageError> { Ok(()) }
//!     fn put_pages(&mut self, _block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError> {
//!         self.0.push((first.0, pages.len()));
//!         Ok(())
//!     }
//!     fn put_zero(&mut self, _block: usize, _pages: PageRange) -> Result<(), PageError> { Ok(()) }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut stored = PageBitmap::new(2);
//! stored.set(PageNumber(1));
//! let blocks = vec![RamBlock::new("pc.ram", 2 * 4096)];
//! let guest = Guest(StreamSetup { configuration: Configuration::new("pc-q35-10.0"), section_id: 2, blocks }, stored);
//!
//! let (near, far) = Channel::pair()?;
//! let far = Channel::from_fd(far)?;
//! let (control, progress) = (Control::new(), Progress::new());
//! let memory = thread::scope(|scope| {
//!     let receiving = scope.spawn(|| {
//!         let mut memory = Memory::default();
//!         let role = Destination::new(far, &control, &progress, DestinationOptions::default());
//!         let incoming = role.receive(&mut memory)?;
//!         assert_eq!(incoming.devices.sections[0].name, "timer");
//!         incoming.acknowledge()?; // From here on the VM is this side's.
//!         Ok::<_, MigrateError>(memory)
//!     });
//!     let sent = PrecopySource::new(&guest, near, &control, &Progress::new(), PrecopyOptions::default()).run()?;
//!     assert_eq!((sent.normal_pages, sent.zero_pages), (1, 1));
//!     receiving.join().expect("no panic")
//! })?;
//! assert_eq!(memory.0, [(1, 1)]);
//! # Ok(()) }
//! ```

mod control;
mod control_socket;
mod destination;
mod error;
mod live;
mod pages;
mod progress;
mod source;

pub use control::{Control, DeferredStop, Stop};
pub use control_socket::{Commands, ControlSocket, Job};
pub use destination::{
    Destination, DestinationOptions, DestinationStats, Incoming, MultifdAccept, MultifdAcceptOptions, MultifdChannels,
    MultifdOptions,
};
pub use error::MigrateError;
pub use live::destination::{
    AcceptPreempt, IncomingOutcome, IncomingStats, LayoutDifference, LiveDestination, LiveDestinationOptions,
    PostcopyIncomingStats, PostcopyPaused, UndecidedIncoming,
};
pub use live::source::{
    HintStats, LiveOutcome, LiveSource, LiveStats, Postcopy, PostcopyPausedSource, RoundKind, RoundReport, Undecided,
};
pub use live::{
    IncomingVm, LiveVm, MigrationParams, RecordWrite, SharedMemory, TimeoutStrategy, UnknownName, VmError, ZeroCheck,
};
pub use pages::{PageError, PageMemory, PageSink, PageSource, StreamSetup};
pub use progress::{Moved, Phase, Progress, ProgressReading};
pub use source::multifd::{CHANNELS_MAX, MultifdSourceOptions};
pub use source::postcopy::{Milestone, OpenPreempt, PostcopyOptions, PostcopySource, PostcopyStats};
pub use source::precopy::{InPlace, PrecopyOptions, PrecopySource, PrecopyStats};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
