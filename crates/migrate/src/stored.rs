//! Migration from and to storage: a stored VM as a source, storage as a destination.
//!
//! | engine | role | when the guest starts at the destination |
//! |---|---|---|
//! | [`Destination`] | destination, precopy | when all has arrived and is acknowledged |
//! | [`PrecopySource`] | source, precopy | when all has been sent |
//! | [`PostcopySource`] | source, postcopy | at once; pages follow, requested ones first |
//!
//! Pages come from a [`PageSource`] and go to a [`PageSink`].
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
//! use limosa_migrate::stored::*;
//! use limosa_migrate::{Handle, MigrateError};
//! use limosa_page::{PageBitmap, PageNumber, PageRange};
//! use limosa_stream::{Configuration, RamBlock};
//!
//! struct Guest(StreamSetup, PageBitmap);
//!
//! impl PageSource for Guest {
//!     fn setup(&self) -> &StreamSetup { &self.0 }
//!     fn stored_bitmap(&self, _block: usize) -> &PageBitmap { &self.1 }
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
//! let memory = thread::scope(|scope| {
//!     let receiving = scope.spawn(|| {
//!         let mut memory = Memory::default();
//!         let incoming = Destination::new(&mut memory, far, &Handle::new()).run()?;
//!         assert_eq!(incoming.devices.sections[0].name, "timer");
//!         incoming.acknowledge()?; // From here on the VM is this side's.
//!         Ok::<_, MigrateError>(memory)
//!     });
//!     let sent = PrecopySource::new(&guest, near, &Handle::new()).run()?;
//!     assert_eq!((sent.normal_pages, sent.zero_pages), (1, 1));
//!     receiving.join().expect("no panic")
//! })?;
//! assert_eq!(memory.0, [(1, 1)]);
//! # Ok(()) }
//! ```

pub use crate::destination::{Destination, DestinationOptions, ReceivedStream};
pub use crate::pages::{BlockRange, PageError, PageMemory, PageSink, PageSource, StreamSetup};
pub use crate::source::postcopy::{Milestone, PostcopyOptions, PostcopySource};
pub use crate::source::precopy::{PrecopyOptions, PrecopySource, PresentBlock};
