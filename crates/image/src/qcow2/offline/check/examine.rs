//! The faults of one entry of a table, the clusters that it refers to all the same, and its repaired form.
//!
//! Law: nothing is read and nothing is refused here. Other than
//! [`L2Entry::decode`](crate::qcow2::format::entry::L2Entry::decode), which refuses an entry as a whole, this takes
//! apart any bits, because a broken entry still refers to something. A repaired entry has no fault.

use crate::qcow2::format::entry::{COMPRESSED, COPIED, OFFSET, ZERO};
use crate::qcow2::format::geometry::Geometry;

/// Bits of an entry of the refcount table that are no offset.
const REFCOUNT_TABLE_RESERVED: u64 = 0x1ff;
/// Bits of an L1 entry that are neither offset nor flag.
const L1_RESERVED: u64 = !(COPIED | OFFSET);
/// Bits of an L2 entry of a cluster in its own place that are neither offset nor flag.
const L2_RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET | ZERO);
/// Examines an entry of a bitmap's table.
const BITMAP_RESERVED: u64 = !(OFFSET | BITMAP_ONES);
/// A bitmap's cluster that does not exist is all ones.
const BITMAP_ONES: u64 = 1;

/// The table of an entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// The image's sizes.
    pub(super) geometry: Geometry,
    /// The image's version.
    pub(super) version: u32,
    /// Contents lie in a file of their own.
    pub(super) data_file: bool,
    /// The file's length in bytes.
    pub(super) file: u64,
}

impl Bounds {
    /// Whether bytes are behind the file's end: the last cluster of a file need not be whole, so it is the end of
    /// theirs that decides, by a cluster or more.
    pub(super) const fn outside(&self, at: u64, bytes: u64) -> bool {
        match at.checked_add(bytes) {
            Some(end) => end > self.file && end - self.file >= self.geometry.cluster_size(),
            None => true,
        }
    }

    const fn unaligned(&self, at: u64) -> bool {
        at & (self.geometry.cluster_size() - 1) != 0
    }
}

/// A thing that is wrong with an entry; each counts as one corruption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Reserved,
    Unaligned,
    Outside,
    CompressedCopied,
    CompressedInDataFile,
    CompressedSubclusters,
    Subclusters,
    SubclustersOfNothing,
}

impl Fault {
    /// For people.
    pub(super) const fn why(self) -> &'static str {
        match self {
            Self::Reserved => "reserved bits are set",
            Self::Unaligned => "it does not point to the beginning of a cluster",
            Self::Outside => "it points behind the end of the file",
            Self::CompressedCopied => "a compressed cluster is marked as one that may be written in place",
            Self::CompressedInDataFile => "a compressed cluster in an image whose contents lie in a file of their own",
            Self::CompressedSubclusters => "a compressed cluster has subclusters",
            Self::Subclusters => "subclusters are both allocated and zero",
            Self::SubclustersOfNothing => "subclusters are allocated in a cluster that is not",
        }
    }
}

/// The reference of an L2 entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing, or zeros without space.
    Nothing,
    /// A cluster in its own place, at this offset.
    Cluster(u64),
    /// Compressed bytes.
    Compressed,
}

/// The result of examining an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Examined {
    /// Its reference.
    pub(super) kind: Kind,
    /// The bytes of the image's file that it refers to: offset and length.
    pub(super) refers: Option<(u64, u64)>,
    /// Its faults.
    pub(super) faults: [Option<Fault>; 3],
    /// Its repaired form.
    pub(super) repaired: (u64, u64),
}

impl Examined {
    const NOTHING: Self = Self { kind: Kind::Nothing, refers: None, faults: [None; 3], repaired: (0, 0) };

    fn fault(&mut self, fault: Fault) {
        if let Some(free) = self.faults.iter_mut().find(|slot| slot.is_none()) {
            *free = Some(fault);
        }
    }

    pub(super) fn faults(&self) -> impl Iterator<Item = Fault> + use<> {
        self.faults.into_iter().flatten()
    }
}

/// Examines an entry of an L1 table.
pub(super) fn l1(bits: u64, bounds: &Bounds) -> Examined {
    let at = bits & OFFSET;
    let mut examined = Examined { repaired: (bits & !L1_RESERVED, 0), ..Examined::NOTHING };
    if bits & L1_RESERVED != 0 {
        examined.fault(Fault::Reserved);
    }
    if bits == 0 {
        return examined;
    }
    // With flags alone it points to the header, which the stock tool takes for an L2 table.
    table(&mut examined, at, bounds);
    if at == 0 {
        examined.repaired = (0, 0);
    }
    examined
}

/// Examines an entry of the refcount table.
pub(super) fn refcount_table(bits: u64, bounds: &Bounds) -> Examined {
    let at = bits & !REFCOUNT_TABLE_RESERVED;
    let mut examined = Examined { repaired: (at, 0), ..Examined::NOTHING };
    if bits & REFCOUNT_TABLE_RESERVED != 0 {
        examined.fault(Fault::Reserved);
        return examined;
    }
    if at == 0 {
        return examined;
    }
    if bounds.unaligned(at) {
        examined.fault(Fault::Unaligned);
    } else if at >> bounds.geometry.cluster_bits >= bounds.geometry.clusters(bounds.file) {
        examined.fault(Fault::Outside);
    } else {
        examined.kind = Kind::Cluster(at);
        examined.refers = Some((at, bounds.geometry.cluster_size()));
    }
    examined
}

/// Examines an entry of a bitmap's table. One that is wrong is not repaired: the bitmaps are given up as a whole.
pub(super) fn bitmap(bits: u64, bounds: &Bounds) -> Examined {
    let at = bits & OFFSET;
    let mut examined = Examined { repaired: (bits, 0), ..Examined::NOTHING };
    if bits & BITMAP_RESERVED != 0 || (at != 0 && bits & BITMAP_ONES != 0) {
        examined.fault(Fault::Reserved);
    } else if bounds.unaligned(at) {
        examined.fault(Fault::Unaligned);
    } else if at != 0 {
        table(&mut examined, at, bounds);
    }
    examined
}

/// A reference to a cluster at `at`, gone if it cannot be.
fn table(examined: &mut Examined, at: u64, bounds: &Bounds) {
    let bytes = bounds.geometry.cluster_size();
    examined.kind = Kind::Cluster(at);
    examined.refers = Some((at, bytes));
    if bounds.outside(at, bytes) {
        examined.fault(Fault::Outside);
        examined.repaired = (0, 0);
    }
    if bounds.unaligned(at) {
        examined.fault(Fault::Unaligned);
        examined.repaired = (0, 0);
    }
}

/// Examines an entry of an L2 table.
pub(super) fn l2(bits: u64, bitmap: u64, bounds: &Bounds) -> Examined {
    if bits & COMPRESSED != 0 { compressed(bits, bitmap, bounds) } else { standard(bits, bitmap, bounds) }
}

fn compressed(bits: u64, bitmap: u64, bounds: &Bounds) -> Examined {
    let extended = bounds.geometry.extended_l2;
    let mut examined = Examined { kind: Kind::Compressed, repaired: (bits & !COPIED, 0), ..Examined::NOTHING };
    if bits & COPIED != 0 {
        examined.fault(Fault::CompressedCopied);
    }
    if bounds.data_file {
        examined.fault(Fault::CompressedInDataFile);
        examined.repaired = nothing(bounds);
        return examined;
    }
    if extended && bitmap != 0 {
        examined.fault(Fault::CompressedSubclusters);
        // What it was is not known: nothing of the reference is counted.
        return examined;
    }
    let shift = 62 - (bounds.geometry.cluster_bits - 8);
    let at = bits & ((1 << shift) - 1);
    let sectors = (bits & !(COMPRESSED | COPIED)) >> shift;
    let bytes = (sectors + 1) * 512 - (at & 511);
    examined.refers = Some((at, bytes));
    if bounds.outside(at, bytes) {
        examined.fault(Fault::Outside);
        examined.repaired = nothing(bounds);
    }
    examined
}

fn standard(bits: u64, bitmap: u64, bounds: &Bounds) -> Examined {
    let extended = bounds.geometry.extended_l2;
    let at = bits & OFFSET;
    let flag = if extended || bits & ZERO == 0 { 0 } else { ZERO };
    let (allocated, zero) = (bitmap & 0xffff_ffff, bitmap >> 32);
    let mut examined = Examined { repaired: (bits & (COPIED | OFFSET) | flag, bitmap), ..Examined::NOTHING };
    if !extended {
        examined.repaired.1 = 0;
    }
    if bits & L2_RESERVED != 0 {
        examined.fault(Fault::Reserved);
    }
    // The first cluster of a data file is told from none by its flag.
    if at == 0 && (flag != 0 || !(bounds.data_file && bits & COPIED != 0)) {
        examined.repaired.0 = flag;
        if extended && allocated != 0 {
            examined.fault(Fault::SubclustersOfNothing);
            examined.repaired.1 = (zero & !allocated) << 32;
        }
        return examined;
    }
    examined.kind = Kind::Cluster(at);
    if extended && allocated & zero != 0 {
        examined.fault(Fault::Subclusters);
        examined.repaired.1 = (zero & !allocated) << 32 | allocated;
    }
    if bounds.unaligned(at) {
        examined.fault(Fault::Unaligned);
        examined.repaired = nothing(bounds);
    }
    if !bounds.data_file {
        examined.refers = Some((at, bounds.geometry.cluster_size()));
        if bounds.outside(at, bounds.geometry.cluster_size()) {
            examined.fault(Fault::Outside);
            examined.repaired = nothing(bounds);
        }
    }
    examined
}

/// An entry without a cluster in place of one whose contents are lost. It reads as zeros, as what is behind the end of
/// a file does; in version 2, which has no zero clusters, as what is below.
fn nothing(bounds: &Bounds) -> (u64, u64) {
    match (bounds.geometry.extended_l2, bounds.version) {
        (true, _) => (0, 0xffff_ffff << 32),
        (false, 2) => (0, 0),
        (false, _) => (ZERO, 0),
    }
}
