//! Options of an open image.

use crate::compression::Compress;
use crate::setters::setters;

/// Whether contents of a new cluster are cloned, where the filesystem can, in place of being copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReflinkMode {
    /// They are copied.
    Off,
    /// They are shared if a write would copy at least this many bytes.
    AtLeast(u64),
}

impl ReflinkMode {
    /// From where on a clone was measured to be the less of the two, on XFS (docs/benchmarks/2026-11-22-reflinks.md):
    /// clusters of 256 KiB that a small write begins are faster cloned, those of 64 KiB are faster copied, and between
    /// them the time gained is lost in CPU. A clone changes the filesystem's own tables, which takes the same time for
    /// any length; and bytes that are then written over it need space again.
    pub const AUTO: Self = Self::AtLeast(128 << 10);
}

impl Default for ReflinkMode {
    fn default() -> Self {
        Self::AUTO
    }
}

/// Options of an open image.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Qcow2Options {
    /// The most memory for L2 slices, in bytes; refcount blocks get a quarter of it on top. Threads may keep slices
    /// that had to go for a while: up to 2 MiB.
    pub cache_size: u64,
    /// Whether new clusters are filled by cloning.
    pub reflink_mode: ReflinkMode,
    /// Whether nothing is written, the header included.
    pub read_only: bool,
    /// Whether refcounts are written late; `None`: what the image says.
    pub lazy_refcounts: Option<bool>,
    /// Bytes of clusters that are allocated at once for later writes; the file grows by them. Unused ones are given
    /// back when the image is closed. More than the default of 4 MiB gained nothing when measured.
    pub allocate_ahead: u64,
    /// Whether freed clusters are discarded in the storage.
    pub discard: bool,
    /// Whether whole clusters that a write covers are stored compressed, as
    /// [`write_compressed`](crate::Disk::write_compressed) does. An image that cannot have compressed contents
    /// ([`compressor`](crate::Disk::compressor) says so) stores them as they are, and a level that its method does not
    /// have becomes the nearest one.
    pub compress: Option<Compress>,
}

setters!(Qcow2Options {
    cache_size: u64,
    reflink_mode: ReflinkMode,
    read_only: bool,
    lazy_refcounts: Option<bool>,
    allocate_ahead: u64,
    discard: bool,
    compress: Option<Compress>,
});

impl Default for Qcow2Options {
    fn default() -> Self {
        Self {
            cache_size: 32 << 20,
            reflink_mode: ReflinkMode::default(),
            read_only: false,
            lazy_refcounts: None,
            allocate_ahead: 4 << 20,
            discard: true,
            compress: None,
        }
    }
}
