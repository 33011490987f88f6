//! qcow2: images in use ([`Qcow2`]), new ones ([`create()`]), and what is done to an image that is not in use ([`check()`], [`repair`],
//! [`resize()`]).
//!
//! An image is opened with what it consists of ([`Parts`]); [`chain`](crate::chain) finds that out by itself.

mod allocator;
mod bitmap_directory;
mod check;
mod compressed;
mod contents;
mod context;
mod counters;
mod create;
mod detached;
mod entry;
mod epoch;
mod extension;
mod feature;
mod field;
mod flusher;
mod geometry;
mod grow;
mod header;
mod header_owner;
mod image;
#[cfg(test)]
mod imports;
mod l1;
mod layers;
mod layout;
mod lengths;
mod locks;
mod lookup;
mod metadata_map;
mod options;
mod pool;
mod preallocated;
mod reader;
mod refcount_array;
mod refcounts;
mod resize;
mod seams;
mod shared_future;
mod slices;
mod snapshot_choice;
mod snapshot_table;
mod tables;
mod writer;

pub use bitmap_directory::{Bitmap, read as read_bitmaps};
pub use check::{CheckOptions, CheckReport, Finding, FindingKind, Repair, check, repair};
pub use counters::{Counts, Operations};
pub use create::{CreateOptions, create};
pub use extension::{BitmapsExtension, Extensions};
pub use feature::{FeatureKind, FeatureName, Features};
pub use geometry::Geometry;
pub(crate) use header::MAGIC;
pub use header::{Backing, Compression, Encryption, Header};
pub use image::{Parts, Qcow2};
pub use options::{CloneMode, Qcow2Options};
pub use resize::{ResizeOptions, resize};
pub use snapshot_choice::SnapshotChoice;
pub use snapshot_table::{Snapshot, read as read_snapshots};
