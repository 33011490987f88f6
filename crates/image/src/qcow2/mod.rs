//! qcow2: open images ([`Qcow2`]), new ones ([`create()`]), and operations on an image that is not open ([`check()`],
//! [`repair`], [`resize()`]). [`empty`] and [`change_backing`] take part in committing and rebasing overlays,
//! [`change_snapshots`] works on internal snapshots, [`change_bitmap`] on persistent bitmaps.
//!
//! An image is opened with its [`ImageParts`]; [`chain`](crate::chain) determines them by itself.

mod encryption;
mod engine;
mod format;
mod offline;

pub use crate::compression::Compression;
pub use crate::error::CreateOptionsError;
pub use encryption::{NewEncryption, cipher};
pub use engine::counters::{Counts, OperationCount};
pub use engine::image::{ImageParts, Qcow2};
pub use engine::journal::{Journal, JournalFolder};
pub use engine::options::{Qcow2Options, ReflinkMode};
pub use format::bitmap_directory::{Bitmap, read as read_bitmaps};
pub use format::extension::{BitmapsExtension, Extensions};
pub use format::feature::{FeatureKind, FeatureName, Features};
pub use format::geometry::Geometry;
pub(crate) use format::header::MAGIC;
pub use format::header::{Backing, Encryption, Header};
pub use format::snapshot_choice::SnapshotChoice;
pub use format::snapshot_table::{Snapshot, read as read_snapshots};
pub use offline::amend::{change_lazy_refcounts, change_refcount_bits, change_version};
pub(crate) use offline::amend::{check_downgrade, sound};
pub use offline::backing::change_backing;
pub use offline::bitmaps::change_bitmap;
pub(crate) use offline::check::repair_with;
pub use offline::check::{CheckOptions, CheckReport, Finding, FindingKind, Repair, check, repair, repair_encrypted};
pub use offline::create::{CreateOptions, create};
pub(crate) use offline::data_file::check_data_file_change;
pub use offline::data_file::{DataFileChange, change_data_file};
pub use offline::empty::empty;
pub use offline::resize::{ResizeOptions, resize};
pub use offline::snapshots::{SnapshotChange, change_snapshots};
pub(crate) use offline::streamed::{StreamedImage, WantedClusters, last_table};
pub use offline::table_digest::{prefetch_tables, table_digest};
pub use offline::vm_state::VmStateWriter;
