//! How a conversion is carried out.

use std::ops::Range;

use crate::compression::Compress;
use crate::setters::setters;

/// How to convert.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConvertOptions {
    /// Pieces in flight at the same time.
    pub max_in_flight: usize,
    /// Bytes of a piece; its contents are read and written at once.
    pub chunk_size: u64,
    /// The shortest run of zeros between contents, in bytes, that is left out; 0: everything is written, and the target
    /// is fully allocated.
    pub sparse: u64,
    /// Whether pieces are written in any order; otherwise in the order of the disk, one after the other.
    pub out_of_order: bool,
    /// Whether the target is known to read as zeros: it is new, or the caller says so.
    pub target_is_zero: bool,
    /// Length in bytes of the target's backing image, which has the contents of the source's: only contents of the
    /// source itself are copied.
    pub backing_length: Option<u64>,
    /// With `backing_length`: whether the target may have contents of its own, which hide those of its backing image.
    /// They are replaced by the source's.
    pub target_has_contents: bool,
    /// With `backing_length`: the number of files at the top of the source's chain whose contents are copied; 1 is the
    /// source itself.
    pub layers: u32,
    /// The part of each source that is copied, in bytes; `None`: all of it.
    pub window: Option<Range<u64>>,
    /// Whether sectors that the source reports as unreadable become zeros. A source that is gone is an error.
    pub salvage: bool,
    /// The kernel copies what it can from file to file ([`Disk::copy_from`](crate::Disk::copy_from)); zeros in contents
    /// are not looked for then.
    pub copy_range: bool,
    /// Bytes from the beginning that the target has already: whole pieces, or all.
    pub start: u64,
    /// Whether contents are compressed, in whole clusters of the target, by the worker that read them. `copy_range` has
    /// no effect then.
    pub compress: Option<Compress>,
}

setters!(ConvertOptions {
    max_in_flight: usize,
    chunk_size: u64,
    sparse: u64,
    out_of_order: bool,
    target_is_zero: bool,
    backing_length: Option<u64>,
    target_has_contents: bool,
    layers: u32,
    window: Option<Range<u64>>,
    salvage: bool,
    copy_range: bool,
    start: u64,
    compress: Option<Compress>,
});

impl ConvertOptions {
    /// The default of `sparse`, in bytes.
    pub const SPARSE: u64 = 4096;
    /// Bytes of a piece that measured well: it stays in the processor's cache between being read and written.
    pub const PIECE: u64 = 1 << 20;
    /// Bytes of a piece that is written to a server, whose answer takes longer than a copy: QEMU's.
    pub const EXPORT_PIECE: u64 = 2 << 20;
}

impl Default for ConvertOptions {
    fn default() -> Self {
        Self {
            max_in_flight: 8,
            chunk_size: Self::PIECE,
            sparse: Self::SPARSE,
            out_of_order: false,
            target_is_zero: false,
            backing_length: None,
            target_has_contents: false,
            layers: 1,
            window: None,
            salvage: false,
            copy_range: false,
            start: 0,
            compress: None,
        }
    }
}
