//! Dirty bitmaps of a disk: which bytes were written since when.

use limosa_page::PageBitmap;

/// A change of a dirty bitmap.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BitmapAction {
    /// It is created, empty and enabled.
    Add {
        /// Bytes of the disk that a bit is about: a power of two from 512 bytes to 2 GiB. `None`: those of a cluster,
        /// and at least 4 KiB.
        granularity: Option<u64>,
    },
    /// It is removed.
    Remove,
    /// All of its bits are cleared.
    Clear,
    /// It follows the disk from now on.
    Enable,
    /// It follows the disk no more.
    Disable,
    /// The bits of another bitmap are set in it.
    Merge {
        /// Name of the other bitmap.
        source: String,
    },
    /// These bits are set in it.
    Set(BitmapBits),
}

/// The bits of a bitmap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BitmapBits {
    /// The logarithm of the bytes of the disk that a bit is about.
    pub granularity_bits: u8,
    /// A bit for each of these parts of the disk.
    pub bits: PageBitmap,
}

/// A dirty bitmap of a disk that is open.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirtyBitmap {
    /// Its name.
    pub name: String,
    /// Bytes of the disk that a bit is about.
    pub granularity: u64,
    /// Whether it follows the disk: writes set bits.
    pub enabled: bool,
    /// The bits that are set. `None`: they cannot be relied on, since who used it last did not store it, or they cannot
    /// be read.
    pub set: Option<u64>,
}
