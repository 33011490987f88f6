//! Packed snapshots: a stored VM inside a qcow2 image, compressed, encrypted, on a base.
//!
//! A packed snapshot is a qcow2 image whose contents are the mapped-ram file of [`limosa_snapshot`], so stock tools
//! undo it: `qemu-img convert -O raw`. Its clusters are compressed with zstd; LUKS is below the image, because qcow2
//! has no clusters that are both compressed and encrypted; a backing file makes it an increment.
//!
//! - [`open_snapshot`]: a [`Snapshot`](limosa_snapshot::Snapshot), packed or not, in a file or an object store, for
//!   everything that reads one.
//! - [`pack()`] and [`unpack()`]: make one of the other; [`pack_object`]: one that becomes an object of a store.
//! - [`Base`]: the packed snapshot that an increment stands on.
//! - [`SnapshotDirectory`]: which snapshots stand on which, and how one is taken out; [`SnapshotFolder`]: the same in
//!   an object store, where nothing is packed again; [`plan_prune`]: which ones go.
//!
//! Why a crate of its own: limosa-snapshot knows no image format, so VMMs that store and load snapshots are built
//! without ciphers and compressors, and limosa-image knows no VM. This crate is where they meet, and nothing else.
//!
//! ```no_run
//! use std::path::Path;
//!
//! use limosa_migrate::Handle;
//! use limosa_pack::{Access, PackOptions, open_snapshot, pack};
//! use limosa_snapshot::UnnamedFile;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! let snapshot = open_snapshot(Path::new("/srv/vm.limosa"), &Access::default())?;
//! let pending = UnnamedFile::create(Path::new("/srv/vm.qcow2"), false)?;
//! let packed = pack(&snapshot, pending, None, &PackOptions::default(), &Handle::new())?;
//! println!("{} bytes of pages in a file of {}", packed.page_bytes, packed.length);
//! # Ok(()) }
//! ```

mod base;
mod bytes;
mod chain;
mod contents;
mod directory;
mod entry;
mod equality;
mod error;
mod folder;
mod head;
mod image;
mod open;
mod pack;
mod pieces;
mod record;
mod remote;
mod retention;
mod touched;
mod unpack;
mod unpacked_disk;

pub use base::Base;
pub use directory::SnapshotDirectory;
pub use entry::{SnapshotEntry, SnapshotFile};
pub use error::PackError;
pub use folder::SnapshotFolder;
pub use image::DEPTH_LIMIT;
pub use open::{Access, fuzz_open, is_packed, open_snapshot};
pub use pack::{
    CLUSTER_SIZE, DEFAULT_ITER_TIME, DEFAULT_LEVEL, INCREMENT_CLUSTER_SIZE, ObjectFile, PackEncryption, PackOptions,
    Packed, pack, pack_object, packed_length_most,
};
pub use retention::{PrunePlan, PruneStep, Retention, StayingSnapshot, plan_prune};
pub use unpack::{UnpackedFile, unpack};
pub use unpacked_disk::CACHE;

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
