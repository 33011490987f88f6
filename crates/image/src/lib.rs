//! Disk images in the formats raw and qcow2.
//!
//! A [`Disk`] has guest offsets; it is kept in one or more [`limosa_storage::Storage`]s, at host offsets.
//!
//! An image is opened by a [`Reference`](reference::Reference), with its backing files ([`chain`]), if the caller's
//! [`Policy`] allows them: an image is data from outside, and the files that it names are not opened unless the caller
//! agrees.
//!
//! ```
//! use limosa_image::chain::{OpenOptions, open};
//! use limosa_image::qcow2::{CreateOptions, create};
//! use limosa_image::reference::Reference;
//! use limosa_image::GuestOffset;
//! use limosa_storage::{Buffer, Create, FileOptions, FileStorage, block_on};
//!
//! # fn main() -> Result<(), limosa_image::ImageError> {
//! # let folder = tempfile::tempdir().expect("a folder for it");
//! # let path = folder.path().join("disk.qcow2");
//! let file = FileStorage::open(&path, &FileOptions { create: Create::New, ..FileOptions::default() })?;
//! block_on(create(&*file, None, &CreateOptions::default().size(1 << 30)))?;
//! drop(file);
//!
//! let options = OpenOptions::default().read_only(true);
//! let disk = block_on(open(&Reference::file(&path), &options))?;
//! let found = Buffer::zeroed(4096);
//! block_on(disk.read(GuestOffset(1 << 20), found.clone().into()))?;
//! assert!(disk.len() == 1 << 30 && found.is_zero());
//! # Ok(())
//! # }
//! ```
//!
//! Source of the facts about qcow2: QEMU's specification, docs/interop/qcow2.

mod bitmap;
pub mod chain;
mod compression;
mod disk;
pub mod epochs;
mod error;
mod gate;
mod holes;
mod location;
pub mod luks;
mod new_image;
mod offset;
mod operations;
mod preallocation;
mod probe;
pub mod qcow2;
mod qemu_json;
pub mod raw;
pub mod reference;
mod requests;
mod setters;
mod shown_name;
#[cfg(test)]
mod test_disk;
mod truncation;

pub use bitmap::{BitmapAction, BitmapBits, DirtyBitmap};
pub use compression::{Compress, CompressedClusters, Compressor};
pub use disk::{BlockStatus, Disk, MapEntry, Pending};
pub use error::ImageError;
pub use gate::{FilePurpose, Policy};
pub use new_image::{CreatedFiles, NewBacking, NewImage, NewImageFormat, RemovalGuard, UnfinishedFiles};
pub use offset::{GuestOffset, HostOffset};
pub use operations::{
    DiskOperation, OperationError, Progress, ProgressObserver, amend, bench, commit, compare, convert, dd, info,
    measure, rebase, resize,
};
pub use preallocation::{Preallocation, UnknownPreallocation};
pub use probe::{Format, Guess, UnknownFormat, guess, probe};
pub use qcow2::{Qcow2, Qcow2Options};
