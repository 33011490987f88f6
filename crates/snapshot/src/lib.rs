//! A stored VM: QEMU's mapped-ram file with limosa's trailer, as a page sink while saving and a page source while
//! restoring.
//!
//! The file is QEMU's own format; stock QEMU loads it with `-incoming file:` and the capability `mapped-ram`. What
//! limosa adds is behind the end of QEMU's stream, where QEMU does not read, so that one rename publishes both and
//! the file is whole or not there.
//!
//! - [`UnnamedFile`]: a file without a name, and how it gets one.
//! - [`SnapshotWriter`]: fills it from a migration stream (a [`PageSink`](limosa_migrate::stored::PageSink)).
//! - [`CheckpointPair`]: two files for continuous checkpoints, one of them always whole.
//! - [`publish_qemu_file`]: takes over one that QEMU filled itself.
//! - [`Snapshot`]: reads it (a [`PageSource`](limosa_migrate::stored::PageSource)), also out of images that another
//!   crate unpacks or fetches ([`SnapshotBytes`]).
//! - [`compare`]: would it load on another QEMU; [`compare_snapshots`], [`compare_memory`]: how do two files differ.
//! - [`Foreign`]: other programs' files, to make snapshots of; [`Snapshot::export`] goes the other way.
//! - [`WorkingSet`]: the pages that a guest touched after its start, recorded beside the file and read ahead.
//! - [`Manifest`]: what limosa knows about the VM; [`check_disks`] finds disks that have changed.
//!
//! # Example
//!
//! A VM with two pages of memory, one of them zero, is stored and read again. (The device tail comes from the stream;
//! here it is made by hand, with one device.)
//!
//! ```
//! use std::io::IoSlice;
//! use limosa_migrate::stored::{PageSink, PageSource, StreamSetup};
//! use limosa_page::{PageNumber, PageRange};
//! use limosa_snapshot::{Manifest, UnnamedFile, Snapshot, SnapshotWriter, WriteOptions};
//! use limosa_stream::{Configuration, RamBlock};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! # let directory = tempfile::tempdir()?;
//! # let target = directory.path().join("vm.limosa");
//! let start = StreamSetup {
//!     configuration: Configuration::new("pc-q35-10.0"),
//!     section_id: 2,
//!     blocks: vec![RamBlock::new("pc.ram", 2 * 4096)],
//! };
//! let mut tail = b"\x04\0\0\0\x03\x05timer\0\0\0\0\0\0\0\x01".to_vec();
//! tail.extend_from_slice(b"12345678\x7e\0\0\0\x03\0\x06\0\0\0");
//! let json = br#"{"devices":[{"name":"timer","instance_id":0,"fields":[{"name":"t","type":"b","size":8}]}]}"#;
//! tail.push(u8::try_from(json.len())?);
//! tail.extend_from_slice(json);
//!
//! let mut writer = SnapshotWriter::new(UnnamedFile::create(&target, false)?, WriteOptions::default())?;
//! writer.begin(&start)?;
//! writer.put_pages(0, PageNumber(1), &[IoSlice::new(&[0x5a; 4096])])?;
//! writer.put_zero(0, PageRange::whole_block(1))?;
//! let published = writer.finish(&tail, Manifest::new())?;
//!
//! let snapshot = Snapshot::open(&target)?;
//! snapshot.lock_serving()?;
//! assert_eq!(snapshot.manifest().map(|manifest| manifest.id), Some(published.manifest.id));
//! let mut page = [0; 4096];
//! snapshot.read(0, PageRange::starting_at(PageNumber(1), 1), &mut page)?;
//! assert_eq!(page, [0x5a; 4096]);
//! # Ok(()) }
//! ```

mod adopt;
mod attributes;
mod bytes;
mod checkpoints;
mod checksum;
mod comparison;
mod disks;
mod error;
mod export;
mod fence_scope;
mod foreign;
mod fuzz;
mod held;
mod layout;
mod lock;
mod manifest;
mod mappable;
mod pci;
mod reader;
mod received;
mod recording;
mod seal;
mod sidecar;
mod store;
mod summary;
mod trailer;
mod unnamed_file;
mod working_set;
mod write_behind;
mod writer;

pub use adopt::publish_qemu_file;
pub use bytes::{Origin, PackedImage, PackedSummary, SnapshotBytes};
pub use checkpoints::{
    CHECKPOINT_NAME, Checkpoint, CheckpointBase, CheckpointDirectory, CheckpointOptions, CheckpointPages,
    CheckpointPair,
};
pub use comparison::{
    Comparison, Confidence, Finding, LoadTarget, LoadTargetBlock, MemoryComparison, Presence, Sections, Severity,
    StoredSections, compare, compare_memory, compare_snapshots, find_damage, load_target_of,
};
pub use disks::{BackingFile, Disk, DiskChange, DiskDifference, OverlaidDisk, ProtectedDisk, check_disks};
pub use error::{InvalidWorkingSet, SnapshotError};
pub use fence_scope::FenceScope;
pub use foreign::{
    ByteOrder, Decompressor, Foreign, ForeignError, Imported, InvalidSaveImage, SAVE_IMAGE_HEADER_LENGTH,
    SAVE_IMAGE_XML_LIMIT, SaveHeader, SaveImage, SaveImageFormat,
};
pub use fuzz::fuzz_open;
pub use held::HeldSnapshot;
pub use manifest::{Manifest, PageStatistics, Published, Transport};
pub use mappable::{Sealed, seal_snapshot};
pub use pci::PciIdentity;
pub use reader::Snapshot;
pub use recording::summarize_file;
pub use summary::{BlockSummary, DeviceSummary, SaveImageSummary, Summary};
pub use unnamed_file::{Durability, UnnamedFile, is_temporary_name};
pub use working_set::{ReadAhead, ReadAheadReport, RecordedMode, WorkingSet, WorkingSetFile, WorkingSetRecorder};
pub use write_behind::WriteBehind;
pub use writer::{SnapshotWriter, WriteOptions};

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
