//! Creating an image.
//!
//! Law: the header is written last, after a flush of all the rest: a creation that is interrupted leaves no image, and
//! never an old one with new tables. Former contents of the storage are not visible through the new image.

use std::ffi::OsString;
use std::sync::Arc;

use limosa_page::{BrokenInvariant, broken_invariant, to_usize};
use limosa_storage::{Buffer, Storage, StorageError, ZeroOptions};

use super::layout::{Layout, TooLarge};
use crate::compression::Compression;
use crate::error::{CreateOptionsError, ImageError};
use crate::luks::SectorCipher;
use crate::offset::HostOffset;
use crate::preallocation::Preallocation;
use crate::qcow2::encryption::{NewEncryption, UnwrittenHeader};
use crate::qcow2::format::entry::{L1Entry, L2Entry, Subclusters};
use crate::qcow2::format::extension::Extensions;
use crate::qcow2::format::feature::{FeatureName, Features};
use crate::qcow2::format::geometry::Geometry;
use crate::qcow2::format::header::{BACKING_MOST, Backing, Encryption, Header};
use crate::qcow2::format::refcount_array;
use crate::setters::setters;

/// Bytes that are written at once.
const PIECE: u64 = 1 << 20;
/// Bytes of a sector: disks are whole sectors long.
const SECTOR: u64 = 512;

/// The options of a new image: those of `-o`, and the size.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CreateOptions {
    /// Bytes of the disk; it becomes whole sectors of 512 bytes.
    pub size: u64,
    /// 2 (`compat=0.10`) or 3 (`compat=1.1`).
    pub version: u32,
    /// Bytes of a cluster: a power of two from 512 to 2 MiB.
    pub cluster_size: u64,
    /// Bits of a refcount: a power of two from 1 to 64.
    pub refcount_bits: u32,
    /// Refcounts may be written late.
    pub lazy_refcounts: bool,
    /// L2 entries have subclusters.
    pub extended_l2: bool,
    /// How clusters are compressed, if ever.
    pub compression: Compression,
    /// The name of the external data file. The caller opens it.
    pub data_file: Option<OsString>,
    /// Whether that file is readable as a raw image.
    pub data_file_raw: bool,
    /// The name of the backing file. It is not opened.
    pub backing_file: Option<OsString>,
    /// Its format.
    pub backing_format: Option<String>,
    /// A line about its contents, by which a reader knows if they were replaced.
    pub backing_content: Option<String>,
    /// The space that is allocated at once.
    pub preallocation: Preallocation,
    /// The encryption of its contents.
    pub encryption: Option<NewEncryption>,
}

setters!(CreateOptions {
    size: u64,
    version: u32,
    cluster_size: u64,
    refcount_bits: u32,
    lazy_refcounts: bool,
    extended_l2: bool,
    compression: Compression,
    data_file: Option<OsString>,
    data_file_raw: bool,
    backing_file: Option<OsString>,
    backing_format: Option<String>,
    backing_content: Option<String>,
    preallocation: Preallocation,
    encryption: Option<NewEncryption>,
});

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            size: 0,
            version: 3,
            cluster_size: 64 << 10,
            refcount_bits: 16,
            lazy_refcounts: false,
            extended_l2: false,
            compression: Compression::Zlib,
            data_file: None,
            data_file_raw: false,
            backing_file: None,
            backing_format: None,
            backing_content: None,
            preallocation: Preallocation::Off,
            encryption: None,
        }
    }
}

impl CreateOptions {
    /// Checks that there can be such an image.
    ///
    /// # Errors
    /// The first option that contradicts another one or the limits of the format.
    pub fn check(&self) -> Result<(), CreateOptionsError> {
        use CreateOptionsError::{Missing, Name, Range, Version};
        if !self.cluster_size.is_power_of_two() || !Geometry::CLUSTER_BITS.contains(&self.cluster_size.trailing_zeros())
        {
            let allowed = "a power of two from 512 to 2M";
            return Err(Range { option: "cluster_size", value: self.cluster_size, allowed });
        }
        if !self.refcount_bits.is_power_of_two() || self.refcount_bits > 64 {
            let allowed = "a power of two from 1 to 64";
            return Err(Range { option: "refcount_bits", value: self.refcount_bits.into(), allowed });
        }
        if !(2..=3).contains(&self.version) {
            return Err(Version(self.version));
        }
        let needs_3 = [
            (self.refcount_bits != 16, "refcount_bits"),
            (self.lazy_refcounts, "lazy_refcounts"),
            (self.extended_l2, "extended_l2"),
            (self.compression != Compression::Zlib, "compression_type"),
            (self.data_file.is_some(), "data_file"),
        ];
        if let Some((_, option)) = needs_3.into_iter().find(|(set, _)| *set && self.version < 3) {
            return Err(Missing { option, needs: "compat=1.1" });
        }
        if self.extended_l2 && self.cluster_size < 16 << 10 {
            return Err(Missing { option: "extended_l2", needs: "cluster_size of at least 16K" });
        }
        if self.data_file_raw && self.data_file.is_none() {
            return Err(Missing { option: "data_file_raw", needs: "data_file" });
        }
        if self.data_file_raw && self.backing_file.is_some() {
            return Err(CreateOptionsError::RawWithBacking);
        }
        if self.preallocation != Preallocation::Off && self.backing_file.is_some() && !self.extended_l2 {
            return Err(Missing { option: "preallocation with backing_file", needs: "extended_l2" });
        }
        if let Some(name) = self.backing_file.as_ref().filter(|name| name.is_empty() || name.len() > BACKING_MOST) {
            return Err(Name { bytes: name.len(), most: BACKING_MOST });
        }
        if let Some(format) = self.backing_format.as_ref().filter(|format| format.len() > 15) {
            return Err(CreateOptionsError::BackingFormat(format.clone()));
        }
        Ok(())
    }

    pub(super) const fn geometry(&self) -> Geometry {
        Geometry {
            cluster_bits: self.cluster_size.trailing_zeros(),
            refcount_order: self.refcount_bits.trailing_zeros(),
            extended_l2: self.extended_l2,
        }
    }

    /// Returns the length in bytes of an image whose disk of `size` bytes is allocated as a whole. The options are
    /// checked, and contents are in the image itself.
    pub(crate) fn allocated_length(&self, size: u64) -> Result<u64, CreateOptionsError> {
        let layout = Layout::new(self.geometry(), size, true, true, 0);
        let length = layout.map_err(|_| CreateOptionsError::TooLarge(size))?.end().0;
        // As qemu-img counts it: without refcounts for the encryption header.
        Ok(length.saturating_add(self.encryption_length().next_multiple_of(self.cluster_size)))
    }

    /// Bytes of the encryption header with its key material.
    fn encryption_length(&self) -> u64 {
        self.encryption.as_ref().map_or(0, |encryption| encryption.header.length())
    }

    /// A raw data file must agree with the tables, and without tables they would say that there are zeros.
    const fn tables(&self) -> bool {
        self.data_file_raw || !matches!(self.preallocation, Preallocation::Off)
    }

    fn features(&self) -> Features {
        let bit = |set: bool, bit: u64| if set { bit } else { 0 };
        Features {
            incompatible: bit(self.data_file.is_some(), Features::DATA_FILE)
                | bit(self.compression != Compression::Zlib, Features::COMPRESSION)
                | bit(self.extended_l2, Features::EXTENDED_L2),
            compatible: bit(self.lazy_refcounts, Features::LAZY_REFCOUNTS),
            autoclear: bit(self.data_file_raw, Features::RAW_DATA_FILE),
        }
    }

    pub(super) fn header(&self, layout: &Layout) -> Result<Header, BrokenInvariant> {
        let narrow = |number: u64| {
            u32::try_from(number).map_err(|_| broken_invariant("a layout's tables are within the format's limits"))
        };
        Ok(Header {
            version: self.version,
            cluster_bits: layout.geometry.cluster_bits,
            refcount_order: layout.geometry.refcount_order,
            size: self.size.next_multiple_of(SECTOR),
            encryption: if self.encryption.is_some() { Encryption::Luks } else { Encryption::None },
            l1: (if layout.l1_entries == 0 { HostOffset(0) } else { layout.l1_at() }, narrow(layout.l1_entries)?),
            refcount_table: (layout.refcount_table_at(), narrow(layout.refcount_table)?),
            snapshots: (HostOffset(0), 0),
            features: self.features(),
            compression: self.compression,
            backing: self.backing_file.clone().map(Backing::new),
            extensions: Extensions {
                backing_format: self.backing_format.clone().filter(|_| self.backing_file.is_some()),
                backing_content: self.backing_content.clone().filter(|_| self.backing_file.is_some()),
                data_file: self.data_file.clone(),
                encryption: self.encryption.as_ref().map(|_| (layout.encryption_at(), self.encryption_length())),
                // QEMU's names take more than a cluster of 512 bytes has.
                feature_names: if self.version > 2 && self.cluster_size > 512 {
                    FeatureName::all_known()
                } else {
                    Vec::new()
                },
                ..Extensions::default()
            },
            // The byte of the compression is always there.
            unknown_fields: if self.version > 2 { vec![0; 7] } else { Vec::new() },
        })
    }
}

/// Creates an image in `storage`, whose contents are lost, and empties the external data file, if it has one. Both grow
/// as needed; devices, which cannot grow, have to be long enough. The image is durable in the end.
///
/// # Errors
/// [`ImageError::Unsupported`]: options that contradict each other ([`CreateOptions::check`]), or a storage that is too
/// short; what the storage says.
pub async fn create(
    storage: &dyn Storage,
    data_file: Option<&dyn Storage>,
    options: &CreateOptions,
) -> Result<Header, ImageError> {
    let image = storage.name();
    let unsupported = |what: String| ImageError::Unsupported { image: Arc::clone(image), what };
    options.check().map_err(|source| ImageError::options(Arc::clone(image), source))?;
    if data_file.is_some() != options.data_file.is_some() {
        return Err(unsupported("the data file has a name and is not open, or is open and has no name".into()));
    }
    let too_large = || unsupported(TooLarge::L1(options.size).to_string());
    let size = options.size.checked_next_multiple_of(SECTOR).ok_or_else(too_large)?;
    let (tables, header_length) = (options.tables(), options.encryption_length());
    let layout = Layout::new(options.geometry(), size, tables, tables && data_file.is_none(), header_length)
        .map_err(|error| unsupported(error.to_string()))?;
    let mut header = options.header(&layout)?;
    let start = header.encode(image)?;
    // What cannot be is found before anything is overwritten.
    let encryption = options.encryption.as_ref().map(|new| UnwrittenHeader::new(image, new)).transpose()?;

    let emptied = empty(storage, layout.end().0, layout.contents_at().0).await?;
    let mut old_contents = !emptied;
    if let Some(data_file) = data_file {
        old_contents = !empty(data_file, size, 0).await?;
        if old_contents && options.data_file_raw {
            data_file.write_zeroes(0..size, ZeroOptions { unmap: true, only_fast: false }).await?;
            old_contents = false;
        }
        reserve(data_file, 0..size, size, options.preallocation).await?;
        data_file.flush().await?;
    }
    let contents = if data_file.is_some() { layout.end() } else { layout.contents_at() };
    reserve(storage, contents.0..layout.end().0, layout.end().0, options.preallocation).await?;
    let cipher = match encryption {
        Some(header) => Some(header.write(storage, layout.encryption_at()).await?),
        None => None,
    };
    // Zeros are not what they are decrypted to.
    old_contents |= cipher.is_some();
    if let Some(cipher) = cipher.filter(|_| options.version == 2) {
        write_encrypted_zeros(storage, &cipher, contents.0..layout.end().0).await?;
        old_contents = false;
    } else if old_contents && options.version == 2 {
        // It has no clusters that are allocated and read as zeros.
        storage.write_zeroes(contents.0..layout.end().0, ZeroOptions::default()).await?;
        old_contents = false;
    }
    Tables { layout, options, old_contents }.write(storage).await?;
    storage.flush().await?;
    storage.write(0, Buffer::from_slice(&start).into()).await?;
    storage.flush().await?;
    Ok(header)
}

/// Makes a storage `length` bytes of zeros: true. One that cannot change its length has to have it; then only what is
/// below `tables` becomes zeros, and its beginning at once, so that it is no image any more: false.
async fn empty(storage: &dyn Storage, length: u64, tables: u64) -> Result<bool, ImageError> {
    match shorten(storage, length).await {
        Ok(()) => Ok(true),
        Err(_) if storage.length()? >= length => {
            storage.write_zeroes(0..tables.min(SECTOR), ZeroOptions::default()).await?;
            storage.flush().await?;
            storage.write_zeroes(0..tables, ZeroOptions::default()).await?;
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

async fn shorten(storage: &dyn Storage, length: u64) -> Result<(), StorageError> {
    storage.set_len(0).await?;
    storage.set_len(length).await
}

/// Allocates space up to `end`, and fills `contents` with zeros, if the preallocation asks for it.
async fn reserve(
    storage: &dyn Storage,
    contents: std::ops::Range<u64>,
    end: u64,
    how: Preallocation,
) -> Result<(), ImageError> {
    if matches!(how, Preallocation::Falloc | Preallocation::Full) && end > 0 {
        storage.allocate(0..end).await?;
    }
    if how == Preallocation::Full {
        let zeros = Buffer::zeroed(to_usize(PIECE));
        for (at, length) in pieces(contents) {
            storage.write(at, zeros.slice(0..length).into()).await?;
        }
    }
    Ok(())
}

/// Writes what is decrypted to zeros.
async fn write_encrypted_zeros(
    storage: &dyn Storage,
    cipher: &SectorCipher,
    range: std::ops::Range<u64>,
) -> Result<(), StorageError> {
    for (at, length) in pieces(range) {
        let mut zeros = vec![0; length];
        cipher.encrypt(at / SECTOR, &mut zeros);
        storage.write(at, Buffer::from_slice(&zeros).into()).await?;
    }
    Ok(())
}

/// A range in pieces: where each begins, and its length.
fn pieces(range: std::ops::Range<u64>) -> impl Iterator<Item = (u64, usize)> {
    let end = range.end;
    let mut next = range.start;
    std::iter::from_fn(move || {
        let at = next;
        let length = end.saturating_sub(at).min(PIECE);
        next += length;
        (length > 0).then(|| (at, to_usize(length)))
    })
}

/// The tables of a new image.
struct Tables<'a> {
    layout: Layout,
    options: &'a CreateOptions,
    /// Clusters of contents may hold what was there before, or zeros that are decrypted to something else.
    old_contents: bool,
}

impl Tables<'_> {
    async fn write(&self, storage: &dyn Storage) -> Result<(), StorageError> {
        let layout = &self.layout;
        let cluster = layout.geometry.cluster_size();
        let block = |entry: u64| layout.refcount_blocks_at().0 + entry * cluster;
        put(storage, layout.refcount_table_at(), layout.refcount_blocks, 8, |entry, bytes| {
            bytes.extend_from_slice(&block(entry).to_be_bytes());
        })
        .await?;
        put(storage, layout.refcount_blocks_at(), layout.refcount_blocks, cluster, |block, bytes| {
            bytes.extend_from_slice(&refcount_block(layout, block));
        })
        .await?;
        let l1 = if layout.l2_tables == 0 { 0 } else { layout.l1_entries };
        put(storage, layout.l1_at(), l1, 8, |entry, bytes| {
            let table = Some(HostOffset(layout.l2_at().0 + entry * cluster));
            bytes.extend_from_slice(&L1Entry { table, copied: true }.encode().to_be_bytes());
        })
        .await?;
        let entries = if layout.l2_tables == 0 { 0 } else { layout.geometry.clusters(self.options.size) };
        put(storage, layout.l2_at(), entries, layout.geometry.l2_entry_size(), |entry, bytes| {
            self.l2_entry(entry, bytes);
        })
        .await
    }

    fn l2_entry(&self, entry: u64, bytes: &mut Vec<u8>) {
        let geometry = &self.layout.geometry;
        let at = entry << geometry.cluster_bits;
        let data_file = self.options.data_file.is_some();
        let host = if data_file { at } else { self.layout.contents_at().0 + at };
        let what = if geometry.extended_l2 {
            // A backing file is seen through it, and old contents are not.
            Subclusters::NONE
        } else if self.old_contents
            && (self.options.preallocation != Preallocation::Full || self.options.encryption.is_some())
        {
            Subclusters::ZERO
        } else {
            Subclusters::ALLOCATED
        };
        let entry = L2Entry::Standard { host: Some(HostOffset(host)), copied: true, what };
        let (entry, bitmap) = entry.encode(geometry);
        bytes.extend_from_slice(&entry.to_be_bytes());
        if geometry.extended_l2 {
            bytes.extend_from_slice(&bitmap.to_be_bytes());
        }
    }
}

/// A refcount block of a new image: each cluster up to the end is used once.
pub(super) fn refcount_block(layout: &Layout, block: u64) -> Vec<u8> {
    let geometry = &layout.geometry;
    let each = geometry.refcounts_per_block();
    let counted = layout.clusters().saturating_sub(block * each).min(each);
    let mut counts = vec![0; to_usize(geometry.cluster_size())];
    for index in 0..to_usize(counted) {
        // All are in the block, and 1 fits into a bit.
        let _ = refcount_array::set(&mut counts, geometry.refcount_order, index, 1);
    }
    counts
}

/// Writes `count` entries of `size` bytes each from `at` on, in pieces.
async fn put(
    storage: &dyn Storage,
    at: HostOffset,
    count: u64,
    size: u64,
    entry: impl Fn(u64, &mut Vec<u8>),
) -> Result<(), StorageError> {
    let each = (PIECE / size).max(1);
    let mut next = 0;
    while next < count {
        let end = count.min(next + each);
        let mut bytes = Vec::new();
        (next..end).for_each(|number| entry(number, &mut bytes));
        storage.write(at.0 + next * size, Buffer::from_slice(&bytes).into()).await?;
        next = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use limosa_storage::{MemoryStorage, block_on};

    use super::*;

    fn made(options: &CreateOptions) -> (MemoryStorage, Header) {
        let storage = MemoryStorage::growing_to(64 << 20);
        let header = block_on(create(&storage, None, options)).unwrap();
        (storage, header)
    }

    #[test]
    fn what_was_made_is_read_back() {
        let backed = CreateOptions {
            size: 1 << 30,
            backing_file: Some("base.qcow2".into()),
            backing_format: Some("qcow2".into()),
            ..CreateOptions::default()
        };
        let old = CreateOptions { version: 2, size: 12345, ..CreateOptions::default() };
        for options in [CreateOptions::default(), backed, old] {
            let (storage, header) = made(&options);
            assert_eq!(block_on(Header::read(&storage)).unwrap(), header);
            assert_eq!(header.size, options.size.next_multiple_of(512));
        }
    }

    #[test]
    fn options_that_cannot_be_together_are_named() {
        let usual = CreateOptions::default;
        let data_file = Some(OsString::from("d"));
        let backing_file = Some(OsString::from("b"));
        let cases = [
            (
                CreateOptions { cluster_size: 3000, ..usual() },
                "cluster_size=3000: must be a power of two from 512 to 2M",
            ),
            (CreateOptions { cluster_size: 256, ..usual() }, "cluster_size=256: must be a power of two from 512 to 2M"),
            (CreateOptions { refcount_bits: 0, ..usual() }, "refcount_bits=0: must be a power of two from 1 to 64"),
            (CreateOptions { version: 2, extended_l2: true, ..usual() }, "extended_l2 needs compat=1.1"),
            (CreateOptions { version: 2, data_file: data_file.clone(), ..usual() }, "data_file needs compat=1.1"),
            (
                CreateOptions { extended_l2: true, cluster_size: 8192, ..usual() },
                "extended_l2 needs cluster_size of at least 16K",
            ),
            (CreateOptions { data_file_raw: true, ..usual() }, "data_file_raw needs data_file"),
            (
                CreateOptions { data_file_raw: true, data_file, backing_file: backing_file.clone(), ..usual() },
                "data_file_raw and backing_file exclude each other",
            ),
            (
                CreateOptions { preallocation: Preallocation::Falloc, backing_file, ..usual() },
                "preallocation with backing_file needs extended_l2",
            ),
        ];
        for (options, said) in cases {
            assert_eq!(options.check().unwrap_err().to_string(), said);
        }
    }

    #[test]
    fn a_storage_that_is_too_small_holds_no_image() {
        let storage = MemoryStorage::growing_to(100 << 10);
        let options = CreateOptions { size: 1 << 30, ..CreateOptions::default() };
        assert!(block_on(create(&storage, None, &options)).is_err());
        assert!(block_on(Header::read(&storage)).is_err());
    }
}
