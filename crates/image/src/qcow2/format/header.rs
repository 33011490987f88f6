//! The header: what an image is, and where its tables lie.
//!
//! Law: every field is checked before anything rests on it, against the format's limits and against the file. A header
//! that was read is one that can be used; only check and info look at one whose tables may lie anywhere
//! ([`Header::read_to_examine`]).

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

use limosa_page::{broken_invariant, to_u64, to_usize};
use limosa_storage::{Buffer, Storage};

use super::entry::EntryRules;
use super::extension::{BitmapsExtension, Extensions, until_zero};
use super::feature::{Features, Named};
use super::field::Fields;
use super::geometry::Geometry;
use crate::compression::Compression;
use crate::error::ImageError;
use crate::offset::HostOffset;

/// The first bytes of an image.
pub(crate) const MAGIC: [u8; 4] = *b"QFI\xfb";

/// Bytes of the header of version 2.
const LENGTH_2: usize = 72;
/// Bytes of the least header of version 3.
const LENGTH_3: usize = 104;
/// Logarithm of the smallest cluster that has subclusters.
const EXTENDED_L2_BITS: u32 = 14;
/// The longest name of a backing file, in bytes.
pub(in crate::qcow2) const BACKING_MOST: usize = 1023;
/// The largest L1 table, in entries: QEMU's limit, 32 MiB.
pub(in crate::qcow2) const L1_MOST: u32 = 4 << 20;
/// The largest refcount table, in bytes: QEMU's limit.
pub(in crate::qcow2) const REFCOUNT_TABLE_MOST: u64 = 8 << 20;
/// The most snapshots: QEMU's limit.
pub(in crate::qcow2) const SNAPSHOTS_MOST: u32 = 65536;
/// The most bitmaps: QEMU's limit.
pub(in crate::qcow2) const BITMAPS_MOST: u32 = 65535;
/// The longest directory of bitmaps, in bytes: QEMU's limit.
pub(in crate::qcow2) const BITMAP_DIRECTORY_MOST: u64 = BITMAPS_MOST as u64 * 1024;

/// Why an image with the old encryption is not written.
pub(in crate::qcow2) const AES_IS_READ_ONLY: &str =
    "it is encrypted with the old AES, and can only be read: convert it";

/// Encryption of contents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Encryption {
    /// Not at all.
    #[default]
    None,
    /// AES-CBC with the passphrase itself as its key, as QEMU once had it: such images are only read.
    Aes,
    /// LUKS.
    Luks,
}

/// The header of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// The logarithm of a cluster's bytes.
    pub cluster_bits: u32,
    /// The logarithm of a refcount's bits.
    pub refcount_order: u32,
    /// Bytes of the guest's disk.
    pub size: u64,
    /// How contents are encrypted.
    pub encryption: Encryption,
    /// Offset of the active L1 table, and the number of its entries.
    pub l1: (HostOffset, u32),
    /// Offset of the refcount table, and the number of its clusters.
    pub refcount_table: (HostOffset, u32),
    /// Offset of the snapshot table, and the number of snapshots.
    pub snapshots: (HostOffset, u32),
    /// The feature bits.
    pub features: Features,
    /// How compressed clusters are compressed.
    pub compression: Compression,
    /// The backing file.
    pub backing: Option<Backing>,
    /// The header extensions.
    pub extensions: Extensions,
    /// Fields that limosa does not know, from byte 105 on: kept as they are.
    pub unknown_fields: Vec<u8>,
}

/// The backing file, as it was written down. Its format: [`Extensions::backing_format`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Backing {
    /// Its name.
    pub name: OsString,
    /// Offset of the name in the first cluster; [`Header::encode`] determines it.
    pub name_offset: u64,
}

impl Backing {
    /// Of a header that has yet to be encoded.
    #[must_use]
    pub const fn new(name: OsString) -> Self {
        Self { name, name_offset: 0 }
    }
}

/// Why bytes are no header.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Fault {
    Corrupt(String, String),
    Unsupported(String),
}

impl Fault {
    fn at(byte: usize, why: impl Into<String>) -> Self {
        Self::Corrupt(format!("header, byte {byte}"), why.into())
    }

    fn of(self, image: &Arc<str>) -> ImageError {
        let image = Arc::clone(image);
        match self {
            Self::Corrupt(table, why) => ImageError::Corrupt { image, table, why },
            Self::Unsupported(what) => ImageError::Unsupported { image, what },
        }
    }
}

impl Header {
    /// Reads the header of an image that is opened: its tables are in the file. Its contents may be encrypted with
    /// LUKS.
    ///
    /// # Errors
    /// [`ImageError::Corrupt`]: a field cannot be; [`ImageError::Unsupported`]: another version, an unknown
    /// incompatible feature, the old encryption with AES; what the storage says.
    pub async fn read(storage: &dyn Storage) -> Result<Self, ImageError> {
        let header = Self::read_for_reading(storage).await?;
        if header.encryption == Encryption::Aes {
            return Err(Fault::Unsupported(AES_IS_READ_ONLY.into()).of(storage.name()));
        }
        Ok(header)
    }

    /// Reads the header of an image that is opened to be read only: its contents may be encrypted with the old AES.
    ///
    /// # Errors
    /// As [`Header::read`] otherwise.
    pub async fn read_for_reading(storage: &dyn Storage) -> Result<Self, ImageError> {
        let header = Self::read_to_examine(storage).await?;
        let length = storage.length()?;
        header.check_places(length).map_err(|fault| fault.of(storage.name()))?;
        Ok(header)
    }

    /// Reads the header of an image that is only looked at: tables may lie behind the file's end, the refcount table
    /// may be missing, and contents may be encrypted.
    ///
    /// # Errors
    /// As [`Header::read`] otherwise.
    pub async fn read_to_examine(storage: &dyn Storage) -> Result<Self, ImageError> {
        let named = |fault: Fault| fault.of(storage.name());
        let start = Buffer::zeroed(LENGTH_3);
        storage.read(0, start.clone().into()).await?;
        let bits = cluster_bits(&start.to_vec()).map_err(named)?;
        let cluster = Buffer::zeroed(1 << bits);
        storage.read(0, cluster.clone().into()).await?;
        Self::decode(&cluster.to_vec()).map_err(named)
    }

    fn decode(cluster: &[u8]) -> Result<Self, Fault> {
        let fields = Fields(cluster);
        let cluster_bits = cluster_bits(cluster)?;
        let cluster = cluster.get(..1 << cluster_bits).ok_or_else(|| Fault::at(0, "the file ends within it"))?;
        let version = fields.u32(4);
        let (length, features, refcount_order) = if version == 2 {
            (LENGTH_2, Features::default(), 4)
        } else {
            let features =
                Features { incompatible: fields.u64(72), compatible: fields.u64(80), autoclear: fields.u64(88) };
            let length = to_usize(u64::from(fields.u32(100)));
            if length < LENGTH_3 || !length.is_multiple_of(8) || length > cluster.len() {
                return Err(Fault::at(100, format!("a header of {length} bytes")));
            }
            (length, features, fields.u32(96))
        };
        let (backing_at, end) = match fields.u64(8) {
            0 => (0, cluster.len()),
            at => match usize::try_from(at) {
                Ok(at) if (length..=cluster.len()).contains(&at) => (at, at),
                _ => {
                    return Err(Fault::at(
                        8,
                        format!("a backing file's name at {at:#x}, outside the header's cluster"),
                    ));
                }
            },
        };
        let area =
            cluster.get(length..end).ok_or_else(|| Fault::at(8, "the backing file's name is within the header"))?;
        // Names of features are wanted for the very image whose extensions are not: as many as can be read.
        let extensions = Extensions::decode(area, length);
        let unknown = features.unknown_incompatible();
        if unknown != 0 {
            let names = extensions.as_ref().map(|known| &known.feature_names[..]).unwrap_or_default();
            let named = Named { bits: unknown, names };
            return Err(Fault::Unsupported(format!("it needs features that limosa does not have: {named}")));
        }
        let header = Self {
            version,
            cluster_bits,
            refcount_order,
            size: fields.u64(24),
            encryption: match fields.u32(32) {
                0 => Encryption::None,
                1 => Encryption::Aes,
                2 => Encryption::Luks,
                other => return Err(Fault::Unsupported(format!("encryption of the unknown kind {other}"))),
            },
            l1: (HostOffset(fields.u64(40)), fields.u32(36)),
            refcount_table: (HostOffset(fields.u64(48)), fields.u32(56)),
            snapshots: (HostOffset(fields.u64(64)), fields.u32(60)),
            features,
            compression: compression(&features, if length > LENGTH_3 { fields.u8(LENGTH_3) } else { 0 })?,
            backing: backing(cluster, backing_at, fields.u32(16))?,
            extensions: extensions.map_err(|(table, why)| Fault::Corrupt(table, why))?,
            // Version 2 has none, and version 3 none if its header ends where they would begin.
            unknown_fields: cluster.get(LENGTH_3 + 1..length).map(<[u8]>::to_vec).unwrap_or_default(),
        };
        header.check_limits()?;
        Ok(header)
    }

    /// The sizes that it was made with.
    #[must_use]
    pub const fn geometry(&self) -> Geometry {
        Geometry {
            cluster_bits: self.cluster_bits,
            refcount_order: self.refcount_order,
            extended_l2: self.features.extended_l2(),
        }
    }

    /// Returns the properties that determine the meaning of its entries.
    #[must_use]
    pub(in crate::qcow2) const fn rules(&self) -> EntryRules {
        EntryRules { version: self.version, data_file: self.features.data_file() }
    }

    /// The bitmaps, if they are as their directory says: a writer that does not keep them up clears
    /// [`Features::BITMAPS`].
    #[must_use]
    pub const fn bitmaps(&self) -> Option<BitmapsExtension> {
        if self.features.bitmaps() { self.extensions.bitmaps } else { None }
    }

    /// Limits of the format and of QEMU; alignment.
    fn check_limits(&self) -> Result<(), Fault> {
        let geometry = self.geometry();
        if self.refcount_order > 6 {
            return Err(Fault::at(96, format!("refcounts of 2^{} bits", self.refcount_order)));
        }
        if geometry.extended_l2 && self.cluster_bits < EXTENDED_L2_BITS {
            let size = geometry.cluster_size();
            return Err(Fault::at(20, format!("clusters of {size} bytes, too small for subclusters")));
        }
        let (l1_at, entries) = self.l1;
        if entries > L1_MOST {
            return Err(Fault::at(36, format!("an L1 table of {entries} entries; {L1_MOST} is the most")));
        }
        let needed = geometry.l1_entries(self.size);
        if needed > u64::from(entries) {
            let size = self.size;
            return Err(Fault::at(
                36,
                format!("an L1 table of {entries} entries; a disk of {size} bytes needs {needed}"),
            ));
        }
        self.check_table(40, l1_at, u64::from(entries) * 8)?;
        let (refcounts_at, _) = self.refcount_table;
        let refcounts = self.refcount_table_bytes();
        if refcounts > REFCOUNT_TABLE_MOST {
            return Err(Fault::at(
                56,
                format!("a refcount table of {refcounts} bytes; {REFCOUNT_TABLE_MOST} is the most"),
            ));
        }
        self.check_table(48, refcounts_at, refcounts)?;
        let (snapshots_at, snapshots) = self.snapshots;
        if snapshots > SNAPSHOTS_MOST {
            return Err(Fault::at(60, format!("{snapshots} snapshots; {SNAPSHOTS_MOST} is the most")));
        }
        self.check_table(64, snapshots_at, u64::from(snapshots))?;
        match (self.features.bitmaps(), self.extensions.bitmaps) {
            (true, Some(bitmaps)) => self.check_bitmaps(bitmaps),
            (true, None) => Err(Fault::at(88, "bitmaps are said to be in order, and no extension says where")),
            (false, _) => Ok(()),
        }
    }

    fn check_bitmaps(&self, bitmaps: BitmapsExtension) -> Result<(), Fault> {
        let fault = |why: String| Err(Fault::Corrupt("bitmaps extension".into(), why));
        let BitmapsExtension { count, directory, size } = bitmaps;
        if count == 0 || count > BITMAPS_MOST || size > BITMAP_DIRECTORY_MOST {
            return fault(format!("{count} bitmaps in a directory of {size} bytes"));
        }
        if directory.0 & (self.geometry().cluster_size() - 1) != 0 || self.table_end(directory, size).is_none() {
            return fault(format!("a directory at {directory}, where no table can lie"));
        }
        Ok(())
    }

    /// A table that the header's field at `byte` points to.
    fn check_table(&self, byte: usize, at: HostOffset, bytes: u64) -> Result<(), Fault> {
        if at.0 & (self.geometry().cluster_size() - 1) != 0 {
            return Err(Fault::at(byte, format!("a table at {at}, which is not the beginning of a cluster")));
        }
        if self.table_end(at, bytes).is_none() {
            return Err(Fault::at(byte, format!("a table of {bytes} bytes at {at}, behind every possible file's end")));
        }
        Ok(())
    }

    /// The end of a table: offsets in files are below 2^63.
    fn table_end(&self, at: HostOffset, bytes: u64) -> Option<u64> {
        let end = at.0.checked_add(bytes)?.checked_next_multiple_of(self.geometry().cluster_size())?;
        (i64::try_from(end).is_ok()).then_some(end)
    }

    /// Checks the further limits of an image that is opened: tables are in the file of `length` bytes.
    fn check_places(&self, length: u64) -> Result<(), Fault> {
        if self.refcount_table.1 == 0 {
            return Err(Fault::at(56, "no refcount table; repair the image"));
        }
        let bitmaps = self.bitmaps().map(|bitmaps| (bitmaps.directory, bitmaps.size));
        let tables = [
            ("L1 table", Some((self.l1.0, u64::from(self.l1.1) * 8))),
            ("refcount table", Some((self.refcount_table.0, self.refcount_table_bytes()))),
            // How long it is, is known when it is read.
            ("snapshot table", Some((self.snapshots.0, u64::from(self.snapshots.1)))),
            ("bitmap directory", bitmaps),
        ];
        for (name, table) in tables {
            let Some((at, bytes)) = table.filter(|(_, bytes)| *bytes != 0) else { continue };
            let place = || format!("{name} at {at}");
            if at.0 == 0 {
                return Err(Fault::Corrupt(place(), "that is where the header lies".into()));
            }
            // Nothing fills up the last cluster of a file.
            if at.0 >= length || at.0 + bytes > length.next_multiple_of(self.geometry().cluster_size()) {
                return Err(Fault::Corrupt(
                    place(),
                    format!("its {bytes} bytes are not in the file of {length} bytes"),
                ));
            }
        }
        Ok(())
    }

    /// Bytes of the refcount table.
    #[must_use]
    pub const fn refcount_table_bytes(&self) -> u64 {
        (self.refcount_table.1 as u64) << self.cluster_bits
    }

    /// The fields whose places are fixed: 72 bytes in version 2, 104 in version 3, all of them in the first sector, so
    /// one write of them is done or not done.
    ///
    /// # Errors
    /// [`ImageError::Internal`]: a length that has more than 32 bits.
    pub fn encode_fields(&self) -> Result<Vec<u8>, ImageError> {
        let narrow =
            |length: usize| u32::try_from(length).map_err(|_| broken_invariant("lengths in a header have 32 bits"));
        let (backing_at, backing) =
            self.backing.as_ref().map_or((0, 0), |backing| (backing.name_offset, backing.name.len()));
        let mut fields = MAGIC.to_vec();
        let mut put = |bytes: &[u8]| fields.extend_from_slice(bytes);
        put(&self.version.to_be_bytes());
        put(&backing_at.to_be_bytes());
        put(&narrow(backing)?.to_be_bytes());
        put(&self.cluster_bits.to_be_bytes());
        put(&self.size.to_be_bytes());
        let encryption = match self.encryption {
            Encryption::None => 0_u32,
            Encryption::Aes => 1,
            Encryption::Luks => 2,
        };
        put(&encryption.to_be_bytes());
        put(&self.l1.1.to_be_bytes());
        put(&self.l1.0.0.to_be_bytes());
        put(&self.refcount_table.0.0.to_be_bytes());
        put(&self.refcount_table.1.to_be_bytes());
        put(&self.snapshots.1.to_be_bytes());
        put(&self.snapshots.0.0.to_be_bytes());
        if self.version > 2 {
            put(&self.features.incompatible.to_be_bytes());
            put(&self.features.compatible.to_be_bytes());
            put(&self.features.autoclear.to_be_bytes());
            put(&self.refcount_order.to_be_bytes());
            put(&narrow(self.length())?.to_be_bytes());
        }
        Ok(fields)
    }

    /// The whole of it, as it is at the beginning of the image: fields, extensions, and right behind them the backing
    /// file's name, whose place is noted.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`] if it does not fit into the first cluster of `image`.
    pub fn encode(&mut self, image: &Arc<str>) -> Result<Vec<u8>, ImageError> {
        let room = self.geometry().cluster_size();
        let too_long = |length: usize| ImageError::Unsupported {
            image: Arc::clone(image),
            what: format!("its header of {length} bytes does not fit into a cluster of {room}"),
        };
        let name = self.backing.as_ref().map_or(0, |backing| backing.name.len());
        // Before anything is said of their lengths, which has room for 32 bits.
        let least = self.length().saturating_add(self.extensions.len()).saturating_add(name);
        if to_u64(least) > room {
            return Err(too_long(least));
        }
        let extensions = self.extensions.encode()?;
        let length = self.length();
        if let Some(backing) = &mut self.backing {
            backing.name_offset = (length + extensions.len()) as u64;
        }
        let mut bytes = self.encode_fields()?;
        if self.version > 2 {
            bytes.push(match self.compression {
                Compression::Zlib => 0,
                Compression::Zstd => 1,
            });
            bytes.extend_from_slice(&self.unknown_fields);
            bytes.resize(length, 0);
        }
        bytes.extend_from_slice(&extensions);
        if let Some(backing) = &self.backing {
            bytes.extend_from_slice(backing.name.as_bytes());
        }
        Ok(bytes)
    }

    /// Writes the fixed fields in place, with one write: for what changes while an image is in use (feature bits, size,
    /// where the tables lie). What it points to has to be durable before; a caller that has to rely on it flushes
    /// behind it.
    ///
    /// # Errors
    /// What the storage says.
    pub async fn write_fields(&self, storage: &dyn Storage) -> Result<(), ImageError> {
        Ok(storage.write(0, Buffer::from_slice(&self.encode_fields()?).into()).await?)
    }

    /// Bytes of the header without its extensions.
    fn length(&self) -> usize {
        if self.version == 2 {
            return LENGTH_2;
        }
        if self.compression == Compression::Zlib && self.unknown_fields.is_empty() {
            return LENGTH_3;
        }
        (LENGTH_3 + 1 + self.unknown_fields.len()).next_multiple_of(8)
    }
}

/// The size of the header's cluster, after a look at whether this is qcow2 at all.
fn cluster_bits(start: &[u8]) -> Result<u32, Fault> {
    let fields = Fields(start);
    if fields.array(0) != MAGIC {
        return Err(Fault::Unsupported("it is not a qcow2 image".into()));
    }
    let version = fields.u32(4);
    if !(2..=3).contains(&version) {
        return Err(Fault::Unsupported(format!("qcow2 of version {version}; limosa knows versions 2 and 3")));
    }
    let bits = fields.u32(20);
    if Geometry::CLUSTER_BITS.contains(&bits) {
        Ok(bits)
    } else {
        Err(Fault::Unsupported(format!("clusters of 2^{bits} bytes; limosa knows those of 512 bytes to 2 MiB")))
    }
}

fn compression(features: &Features, kind: u8) -> Result<Compression, Fault> {
    match (features.incompatible & Features::COMPRESSION != 0, kind) {
        (false, 0) => Ok(Compression::Zlib),
        (true, 1) => Ok(Compression::Zstd),
        (true, 2..) => Err(Fault::Unsupported(format!("compression of the unknown kind {kind}"))),
        (said, _) => {
            let not = if said { "" } else { "no " };
            Err(Fault::at(LENGTH_3, format!("compression {kind}, and {not}feature bit for it")))
        }
    }
}

fn backing(cluster: &[u8], at: usize, length: u32) -> Result<Option<Backing>, Fault> {
    if at == 0 {
        return Ok(None);
    }
    let length = to_usize(u64::from(length));
    let name = cluster.get(at..).and_then(|rest| rest.get(..length)).filter(|name| name.len() <= BACKING_MOST);
    let name = name.ok_or_else(|| Fault::at(16, format!("the backing file's name has {length} bytes")))?;
    let name = OsString::from_vec(until_zero(name).to_vec());
    if name.is_empty() {
        return Err(Fault::at(16, "the backing file's name is empty"));
    }
    Ok(Some(Backing { name, name_offset: at as u64 }))
}

#[cfg(test)]
mod tests {
    use limosa_storage::{MemoryStorage, block_on};
    use proptest::prelude::*;

    use super::*;

    /// Of an empty disk of 1 GiB, as QEMU lays it out.
    fn usual() -> Header {
        Header {
            version: 3,
            cluster_bits: 16,
            refcount_order: 4,
            size: 1 << 30,
            encryption: Encryption::None,
            l1: (HostOffset(0x3_0000), 2),
            refcount_table: (HostOffset(0x1_0000), 1),
            snapshots: (HostOffset(0), 0),
            features: Features::default(),
            compression: Compression::Zlib,
            backing: None,
            extensions: Extensions {
                feature_names: super::super::feature::FeatureName::all_known(),
                ..Extensions::default()
            },
            unknown_fields: vec![0; 7],
        }
    }

    fn stored(header: &Header) -> MemoryStorage {
        let mut bytes = header.clone().encode(&"image".into()).unwrap();
        bytes.resize(0x3_0200, 0);
        MemoryStorage::with_contents(bytes, 1 << 20)
    }

    /// With these bytes at this place: what is said about it.
    fn broken(at: usize, bytes: &[u8]) -> String {
        let mut image = stored(&usual()).contents();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        block_on(Header::read(&MemoryStorage::with_contents(image, 1 << 20))).unwrap_err().to_string()
    }

    #[test]
    fn a_header_survives_a_round_trip() {
        let header = usual();
        assert_eq!(block_on(Header::read(&stored(&header))).unwrap(), header);
        let mut backed = Header { backing: Some(Backing::new("../base.raw".into())), ..header };
        backed.extensions.backing_format = Some("raw".into());
        backed.extensions.unknown.push((7, b"kept".to_vec()));
        backed.features.incompatible |= Features::COMPRESSION;
        backed.compression = Compression::Zstd;
        let bytes = backed.encode(&"image".into()).unwrap();
        assert!(bytes.ends_with(b"../base.raw"));
        assert_eq!(block_on(Header::read(&stored(&backed))).unwrap(), backed);
        let old = Header { version: 2, unknown_fields: Vec::new(), ..usual() };
        assert_eq!(block_on(Header::read(&stored(&old))).unwrap(), old);
    }

    #[test]
    fn a_name_that_others_put_elsewhere_stays_where_it_is() {
        let mut bytes = stored(&Header { backing: Some(Backing::new("base".into())), ..usual() }).contents();
        bytes[8..16].copy_from_slice(&0x800_u64.to_be_bytes());
        bytes[0x800..0x804].copy_from_slice(b"away");
        let storage = MemoryStorage::with_contents(bytes.clone(), 1 << 20);
        let header = block_on(Header::read(&storage)).unwrap();
        assert_eq!(header.backing, Some(Backing { name: "away".into(), name_offset: 0x800 }));
        block_on(header.write_fields(&storage)).unwrap();
        assert_eq!(storage.contents(), bytes);
    }

    #[test]
    fn every_field_is_checked() {
        let cases: [(usize, &[u8], &str); 19] = [
            (0, b"QFI\0", "memory: it is not a qcow2 image"),
            (7, &[4], "memory: qcow2 of version 4; limosa knows versions 2 and 3"),
            (
                8,
                &[1],
                "memory: header, byte 8: a backing file's name at 0x100000000000000, outside the header's cluster",
            ),
            (14, &[8, 0], "memory: header, byte 16: the backing file's name is empty"),
            (20, &[0, 0, 0, 8], "memory: clusters of 2^8 bytes; limosa knows those of 512 bytes to 2 MiB"),
            (
                24,
                &[0, 0, 4],
                "memory: header, byte 36: an L1 table of 2 entries; a disk of 4399120252928 bytes needs 8194",
            ),
            (32, &[0, 0, 0, 1], "memory: it is encrypted with the old AES, and can only be read: convert it"),
            (36, &[1], "memory: header, byte 36: an L1 table of 16777218 entries; 4194304 is the most"),
            (44, &[0, 3, 2], "memory: header, byte 40: a table at 0x30200, which is not the beginning of a cluster"),
            (40, &[0, 1], "memory: L1 table at 0x1000000030000: its 16 bytes are not in the file of 197120 bytes"),
            (44, &[0, 0], "memory: L1 table at 0x0: that is where the header lies"),
            (
                48,
                &[0xff],
                "memory: header, byte 48: a table of 65536 bytes at 0xff00000000010000, behind every possible file's end",
            ),
            (56, &[1], "memory: header, byte 56: a refcount table of 1099511693312 bytes; 8388608 is the most"),
            (56, &[0; 4], "memory: header, byte 56: no refcount table; repair the image"),
            (60, &[1], "memory: header, byte 60: 16777216 snapshots; 65536 is the most"),
            (79, &[0x60], "memory: it needs features that limosa does not have: bit 5, bit 6"),
            (95, &[1], "memory: header, byte 88: bitmaps are said to be in order, and no extension says where"),
            (99, &[7], "memory: header, byte 96: refcounts of 2^7 bits"),
            (100, &[0, 0, 0, 96], "memory: header, byte 100: a header of 96 bytes"),
        ];
        for (at, bytes, said) in cases {
            assert_eq!(broken(at, bytes), said);
        }
    }

    #[test]
    fn an_image_that_is_only_examined_may_have_its_tables_anywhere() {
        let far = Header { l1: (HostOffset(1 << 40), 2), refcount_table: (HostOffset(0), 0), ..usual() };
        assert!(block_on(Header::read(&stored(&far))).is_err());
        assert_eq!(block_on(Header::read_to_examine(&stored(&far))).unwrap(), far);
    }

    #[test]
    fn unknown_autoclear_bits_are_cleared_before_the_first_write() {
        let mut header = usual();
        header.features.autoclear = 1 << 9 | Features::RAW_DATA_FILE;
        let storage = stored(&header);
        block_on(header.prepare_autoclear(&storage, false)).unwrap();
        assert_eq!(block_on(Header::read(&storage)).unwrap(), usual());
    }

    #[test]
    fn a_header_that_does_not_fit_into_its_cluster_is_refused() {
        let mut header = Header { cluster_bits: 9, l1: (HostOffset(0x600), 32768), ..usual() };
        header.backing = Some(Backing::new("b".repeat(100).into()));
        let said = header.encode(&"image".into()).unwrap_err().to_string();
        assert_eq!(said, "image: its header of 612 bytes does not fit into a cluster of 512");
    }

    proptest! {
        #[test]
        fn a_mutated_header_is_refused_or_survives_a_round_trip(
            changes in prop::collection::vec((0_usize..600, any::<u8>()), 1..6),
        ) {
            let mut bytes = stored(&Header { backing: Some(Backing::new("base".into())), ..usual() }).contents();
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            if let Ok(header) = Header::decode(&bytes) {
                let mut again = header;
                if let Ok(mut bytes) = again.encode(&"image".into()) {
                    bytes.resize(2 << 20, 0);
                    prop_assert_eq!(Header::decode(&bytes), Ok(again));
                }
            }
        }
    }
}
