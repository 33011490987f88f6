//! The bitmap directory: which bitmaps an image has.
//!
//! Law: bitmaps outlive us. Before the disk is written for the first time, those that have to follow it are marked as
//! in use: what is stored of them cannot be relied on until they are stored again. The others stay as they are.

use limosa_page::{BrokenInvariant, broken_invariant, to_usize};
use limosa_storage::{Buffer, Storage};

use super::feature::Features;
use super::field::Fields;
use super::geometry::Geometry;
use super::header::Header;
use crate::error::ImageError;
use crate::offset::HostOffset;

/// Bytes of an entry whose places are fixed.
const FIXED: u64 = 24;
/// Offset of the flags in an entry.
const FLAGS: u64 = 12;
/// The longest name in bytes: QEMU's limit.
pub(in crate::qcow2) const NAME_MOST: u64 = 1023;
/// The logarithms of what a bit may be about, in bytes: QEMU's limits.
pub(in crate::qcow2) const GRANULARITY: std::ops::RangeInclusive<u8> = 9..=31;
/// The most bytes of a bitmap, with what fills its last cluster up: QEMU's limit.
pub(in crate::qcow2) const BYTES_MOST: u64 = 512 << 20;
/// The most bits of a bitmap.
pub(in crate::qcow2) const BITS_MOST: u64 = BYTES_MOST * 8;
/// The kind of bitmap that there is: of what was written.
const DIRTY_TRACKING: u8 = 1;

const IN_USE: u32 = 1;
const AUTO: u32 = 2;
const EXTRA_COMPATIBLE: u32 = 4;

/// A persistent bitmap of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bitmap {
    /// Its name.
    pub name: String,
    /// Offset of its table, and the number of its entries.
    pub table: (HostOffset, u32),
    /// It was not stored properly: it need not be what the disk is.
    pub in_use: bool,
    /// It follows what is written to the disk.
    pub auto: bool,
    /// The logarithm of the bytes that a bit is about.
    pub granularity_bits: u8,
}

impl Bitmap {
    /// Returns the number of its bits for a disk of `size` bytes.
    #[must_use]
    pub const fn bits(&self, size: u64) -> u64 {
        size.div_ceil(1 << self.granularity_bits)
    }

    /// The number of entries that its table has for a disk of `size` bytes.
    pub(in crate::qcow2) const fn table_entries(&self, size: u64, geometry: &Geometry) -> u64 {
        geometry.clusters(self.bits(size).div_ceil(8))
    }
}

/// An entry, and where it is.
#[derive(Debug, Clone)]
pub(in crate::qcow2) struct Entry {
    pub(in crate::qcow2) at: u64,
    /// Its name, which need not be text.
    name: Vec<u8>,
    /// Data of other programs.
    extra: Vec<u8>,
    /// Its extra data, if there is any, may be ignored.
    extra_compatible: bool,
    pub(in crate::qcow2) bitmap: Bitmap,
}

impl Entry {
    /// An entry for a bitmap that is new.
    pub(in crate::qcow2) fn new(bitmap: Bitmap) -> Self {
        Self { at: 0, name: bitmap.name.clone().into_bytes(), extra: Vec::new(), extra_compatible: false, bitmap }
    }

    /// Whether it has this name.
    pub(in crate::qcow2) fn is_named(&self, name: &str) -> bool {
        self.name == name.as_bytes()
    }

    /// Whether it has the name of another one.
    pub(in crate::qcow2) fn has_name_of(&self, other: &Self) -> bool {
        self.name == other.name
    }

    /// Whether its contents mean what they mean without its extra data.
    pub(in crate::qcow2) const fn is_understood(&self) -> bool {
        self.extra.is_empty() || self.extra_compatible
    }

    fn flags(&self) -> u32 {
        let flags = [(self.bitmap.in_use, IN_USE), (self.bitmap.auto, AUTO), (self.extra_compatible, EXTRA_COMPATIBLE)];
        flags.into_iter().filter(|(set, _)| *set).fold(0, |all, (_, flag)| all | flag)
    }

    /// Writes its flags where it is.
    ///
    /// # Errors
    /// What the storage says.
    pub(in crate::qcow2) async fn write_flags(&self, storage: &dyn Storage) -> Result<(), ImageError> {
        // Four bytes in one sector: they are written or not.
        let flags = self.flags().to_be_bytes();
        Ok(storage.write(self.at + FLAGS, Buffer::from_slice(&flags).into()).await?)
    }

    /// Its bytes in a directory.
    ///
    /// # Errors
    /// [`BrokenInvariant`] if its name is longer than [`NAME_MOST`].
    pub(in crate::qcow2) fn encode(&self) -> Result<Vec<u8>, BrokenInvariant> {
        let too_long = |_| broken_invariant("the lengths of a bitmap's entry fit into their fields");
        let (table, entries) = self.bitmap.table;
        let mut bytes = table.0.to_be_bytes().to_vec();
        bytes.extend([entries.to_be_bytes(), self.flags().to_be_bytes()].concat());
        bytes.extend([DIRTY_TRACKING, self.bitmap.granularity_bits]);
        bytes.extend(u16::try_from(self.name.len()).map_err(too_long)?.to_be_bytes());
        bytes.extend(u32::try_from(self.extra.len()).map_err(too_long)?.to_be_bytes());
        bytes.extend(self.extra.iter().chain(&self.name));
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        Ok(bytes)
    }
}

/// Reads the bitmaps of an image: none, if they are not to be relied on ([`Header::bitmaps`]).
///
/// # Errors
/// [`ImageError::Corrupt`] names the entry; what the storage says.
pub async fn read(storage: &dyn Storage, header: &Header) -> Result<Vec<Bitmap>, ImageError> {
    Ok(entries(storage, header).await?.into_iter().map(|entry| entry.bitmap).collect())
}

impl Header {
    /// Before the first write into an image: clears the autoclear bits that limosa does not know, durably.
    /// `keep_bitmaps`: what they follow does not change, or they are changed themselves. Otherwise those that follow
    /// the disk are marked as in use; if their directory is unreadable, their bit is cleared, too.
    ///
    /// # Errors
    /// What the storage says.
    pub async fn prepare_autoclear(&mut self, storage: &dyn Storage, keep_bitmaps: bool) -> Result<(), ImageError> {
        let mut clear = self.features.unknown_autoclear();
        if !keep_bitmaps {
            match mark_in_use(storage, self, |entry| entry.bitmap.auto).await {
                Ok(()) => {}
                Err(ImageError::Corrupt { .. }) => clear |= Features::BITMAPS,
                Err(error) => return Err(error),
            }
        }
        if self.features.autoclear & clear != 0 {
            self.features.autoclear &= !clear;
            self.write_fields(storage).await?;
            storage.flush().await?;
        }
        Ok(())
    }
}

/// Marks these bitmaps as in use, durably.
///
/// # Errors
/// As [`read`].
pub(in crate::qcow2) async fn mark_in_use(
    storage: &dyn Storage,
    header: &Header,
    which: impl Fn(&Entry) -> bool,
) -> Result<(), ImageError> {
    let mut any = false;
    for mut entry in entries(storage, header).await?.into_iter().filter(which) {
        // Also one that is marked: it may be so in memory only, since the flush that followed failed or never came.
        entry.bitmap.in_use = true;
        entry.write_flags(storage).await?;
        any = true;
    }
    if any {
        storage.flush().await?;
    }
    Ok(())
}

/// The entries of the directory.
///
/// # Errors
/// As [`read`].
pub(in crate::qcow2) async fn entries(storage: &dyn Storage, header: &Header) -> Result<Vec<Entry>, ImageError> {
    let Some(extension) = header.bitmaps() else { return Ok(Vec::new()) };
    let corrupt = |entry: Option<usize>, why: String| {
        let entry = entry.map(|number| format!(", entry {number}")).unwrap_or_default();
        let table = format!("bitmap directory at {}{entry}", extension.directory);
        ImageError::Corrupt { image: storage.name().clone(), table, why }
    };
    let end = extension.directory.0.saturating_add(extension.size);
    if end > storage.length()? {
        return Err(corrupt(None, format!("its {} bytes are not in the file", extension.size)));
    }
    // No longer than the header's limit for it.
    let directory = Buffer::zeroed(to_usize(extension.size));
    storage.read(extension.directory.0, directory.clone().into()).await?;
    let directory = directory.to_vec();
    let mut rest = &directory[..];
    let mut found = Vec::new();
    while !rest.is_empty() {
        let number = found.len();
        if number as u64 == u64::from(extension.count) {
            return Err(corrupt(None, format!("more bitmaps than the {number} that the header says there are")));
        }
        let at = end - rest.len() as u64;
        let (entry, length) = decode(rest, at, header).map_err(|why| corrupt(Some(number), why))?;
        found.push(entry);
        rest = rest.get(length..).ok_or_else(|| broken_invariant("an entry is within the bitmap directory"))?;
    }
    if found.len() as u64 != u64::from(extension.count) {
        return Err(corrupt(None, format!("{} bitmaps; the header says {}", found.len(), extension.count)));
    }
    Ok(found)
}

/// The entry that bytes begin with, and its length in bytes.
fn decode(bytes: &[u8], at: u64, header: &Header) -> Result<(Entry, usize), String> {
    let fields = Fields(bytes);
    let (name, extra) = (u64::from(fields.u16(18)), u64::from(fields.u32(20)));
    let length = to_usize((FIXED + extra + name).next_multiple_of(8));
    if length > bytes.len() {
        return Err(format!("its {length} bytes do not end within the directory"));
    }
    let flags = fields.u32(12);
    if flags & !(IN_USE | AUTO | EXTRA_COMPATIBLE) != 0 || fields.u8(16) != DIRTY_TRACKING {
        return Err(format!("it is of the unknown kind {}, with flags {flags:#x}", fields.u8(16)));
    }
    let granularity_bits = fields.u8(17);
    if name == 0 || name > NAME_MOST || !GRANULARITY.contains(&granularity_bits) {
        return Err(format!("a name of {name} bytes, a bit for 2^{granularity_bits} bytes"));
    }
    let table = (HostOffset(fields.u64(0)), fields.u32(8));
    if table.0.0 == 0 || table.0.0 & (header.geometry().cluster_size() - 1) != 0 {
        return Err(format!("a table at {}", table.0));
    }
    let part = |from: u64, length: u64| bytes.get(to_usize(from)..).and_then(|rest| rest.get(..to_usize(length)));
    let short = || "its name does not end within the directory";
    let name = part(FIXED + extra, name).ok_or_else(short)?.to_vec();
    let extra = part(FIXED, extra).ok_or_else(short)?.to_vec();
    let bitmap = Bitmap {
        name: String::from_utf8_lossy(&name).into_owned(),
        table,
        in_use: flags & IN_USE != 0,
        auto: flags & AUTO != 0,
        granularity_bits,
    };
    Ok((Entry { at, name, extra, extra_compatible: flags & EXTRA_COMPATIBLE != 0, bitmap }, length))
}

#[cfg(test)]
mod tests {
    use limosa_storage::testing::{Loss, PowerCut};
    use limosa_storage::{MemoryStorage, block_on};
    use proptest::prelude::*;

    use super::*;
    use crate::qcow2::format::extension::BitmapsExtension;
    use crate::qcow2::format::feature::Features;
    use crate::qcow2::offline::create::{CreateOptions, create};

    fn image(directory: &[u8], count: u32) -> (MemoryStorage, Header) {
        let storage = MemoryStorage::growing_to(1 << 20);
        let options = CreateOptions { size: 1 << 20, ..CreateOptions::default() };
        let mut header = block_on(create(&storage, None, &options)).unwrap();
        let size = directory.len() as u64;
        header.extensions.bitmaps = Some(BitmapsExtension { count, directory: HostOffset(0x4_0000), size });
        header.features.autoclear |= Features::BITMAPS;
        block_on(storage.write(0x4_0000, Buffer::from_slice(directory).into())).unwrap();
        (storage, header)
    }

    fn entry(flags: u32, name: &str) -> Vec<u8> {
        let mut bytes = 0x5_0000_u64.to_be_bytes().to_vec();
        bytes.extend([3_u32.to_be_bytes(), flags.to_be_bytes()].concat());
        bytes.extend([1, 16]);
        bytes.extend(u16::try_from(name.len()).unwrap().to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend(name.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    #[test]
    fn bitmaps_that_follow_the_disk_are_marked_before_it_is_written_and_others_are_not() {
        let (storage, mut header) = image(&[entry(AUTO, "follows"), entry(0, "stands still")].concat(), 2);
        let before = block_on(read(&storage, &header)).unwrap();
        let names: Vec<_> = before.iter().map(|bitmap| (&*bitmap.name, bitmap.auto, bitmap.in_use)).collect();
        assert_eq!(names, [("follows", true, false), ("stands still", false, false)]);
        block_on(header.prepare_autoclear(&storage, false)).unwrap();
        let after = block_on(read(&storage, &header)).unwrap();
        assert_eq!(after, [Bitmap { in_use: true, ..before[0].clone() }, before[1].clone()]);
    }

    #[test]
    fn a_mark_that_was_never_flushed_is_made_durable_before_the_disk_is_written() {
        let (storage, mut header) = image(&entry(AUTO, "follows"), 1);
        let power = PowerCut::new();
        let storage = power.add_storage("image", storage.contents(), 1 << 20);
        // As by a process that is killed before its flush, or whose flush fails.
        let mut marked = block_on(entries(&*storage, &header)).unwrap().remove(0);
        marked.bitmap.in_use = true;
        block_on(marked.write_flags(&*storage)).unwrap();
        block_on(header.prepare_autoclear(&*storage, false)).unwrap();
        let cut = MemoryStorage::with_contents(power.cut(power.moments(), Loss::All).remove(0), 1 << 20);
        assert!(block_on(read(&cut, &header)).unwrap()[0].in_use);
    }

    #[test]
    fn a_directory_that_cannot_be_gone_through_is_not_relied_on_after_a_write() {
        let (storage, mut header) = image(&entry(AUTO, "follows"), 2);
        let said = block_on(read(&storage, &header)).unwrap_err().to_string();
        assert_eq!(said, "memory: bitmap directory at 0x40000: 1 bitmaps; the header says 2");
        block_on(header.prepare_autoclear(&storage, false)).unwrap();
        assert_eq!(header.bitmaps(), None);
        let (storage, header) = image(&entry(8, "strange"), 1);
        let said = block_on(read(&storage, &header)).unwrap_err().to_string();
        assert_eq!(said, "memory: bitmap directory at 0x40000, entry 0: it is of the unknown kind 1, with flags 0x8");
    }

    proptest! {
        #[test]
        fn any_directory_is_taken_or_refused(directory in prop::collection::vec(any::<u8>(), 0..200), count in 0_u32..5) {
            let (storage, header) = image(&directory, count);
            if let Ok(found) = block_on(entries(&storage, &header)) {
                // What was read is written as it was, but for what fills an entry up.
                let again: Vec<u8> = found.iter().flat_map(|entry| entry.encode().unwrap()).collect();
                prop_assert_eq!(again.len(), directory.len());
                let (storage, header) = image(&again, count);
                let same: Vec<_> = block_on(entries(&storage, &header)).unwrap().iter().map(|e| e.bitmap.clone()).collect();
                prop_assert_eq!(same, found.iter().map(|entry| entry.bitmap.clone()).collect::<Vec<_>>());
            }
        }
    }
}
