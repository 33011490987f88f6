//! Descriptions of images, for people and programs.
//!
//! Law: asking opens no other file. Names of other files are returned as the image has them; only a request for the
//! chain opens the backing files, if the policy allows it.
//!
//! Source of the names and their meaning: `ImageInfo` in QEMU's qapi/block-core.json; serialized it is what
//! `qemu-img info --output json` prints.

use std::ffi::OsStr;

use limosa_storage::{FileStorage, Storage, StorageError};
use serde::Serialize;

use crate::chain::{self, ImageFile, OpenOptions};
use crate::error::ImageError;
use crate::holes::taken;
use crate::luks;
use crate::probe::Format;
use crate::qcow2::{Encryption, Header, Snapshot, read_bitmaps, read_snapshots};
use crate::reference::{Location, Reference};

/// Disks are whole sectors long, in bytes.
const SECTOR: u64 = 512;

/// The description of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct ImageInfo {
    /// Its files.
    pub children: Vec<Child>,
    /// Its internal snapshots.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotInfo>,
    /// The format of its backing file, as the image has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename_format: Option<String>,
    /// Bytes of the guest's disk.
    pub virtual_size: u64,
    /// Its name: a path, or `json:{...}` if a path is not enough.
    pub filename: String,
    /// Bytes of a cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_size: Option<u64>,
    /// `raw`, `qcow2`.
    pub format: &'static str,
    /// Bytes that its file occupies, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actual_size: Option<u64>,
    /// Properties of its format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format_specific: Option<FormatSpecific>,
    /// Path at which its backing file is opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_backing_filename: Option<String>,
    /// Its backing file, as the image has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename: Option<String>,
    /// Whether its contents are encrypted; absent if they are not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
    /// Whether its refcounts have to be rebuilt before it is written; not of a raw image that is in no file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_flag: Option<bool>,
}

/// A file of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Child {
    /// Its role: `file`, `header`.
    pub name: &'static str,
    /// Its description.
    pub info: FileInfo,
}

/// The description of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct FileInfo {
    /// Empty: a file has no files below it.
    pub children: [(); 0],
    /// Its length in bytes, rounded up to a sector.
    pub virtual_size: u64,
    /// Its path or address.
    pub filename: String,
    /// `file`, `host_device`, `nbd`, `null-co`.
    pub format: &'static str,
    /// Bytes that it occupies, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actual_size: Option<u64>,
    /// Properties of regular files: always empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format_specific: Option<FileSpecific>,
    /// False for files; nothing else has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_flag: Option<bool>,
}

/// The empty properties of regular files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FileSpecific {
    #[serde(rename = "type")]
    kind: FileKind,
    data: Empty,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum FileKind {
    #[default]
    File,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct Empty {}

/// An internal snapshot of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct SnapshotInfo {
    /// Instructions the guest had executed, if they were counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub icount: Option<u64>,
    /// Running time of the guest: nanoseconds beyond the seconds.
    pub vm_clock_nsec: u64,
    /// Its name.
    pub name: String,
    /// Time of the snapshot: seconds since 1970.
    pub date_sec: u32,
    /// Nanoseconds beyond those.
    pub date_nsec: u32,
    /// Running time of the guest, in seconds.
    pub vm_clock_sec: u64,
    /// Its id.
    pub id: String,
    /// Bytes of the VM's state.
    pub vm_state_size: u64,
}

impl From<Snapshot> for SnapshotInfo {
    fn from(snapshot: Snapshot) -> Self {
        const SECOND: u64 = 1_000_000_000;
        Self {
            icount: snapshot.icount,
            vm_clock_nsec: snapshot.vm_clock % SECOND,
            name: snapshot.name,
            date_sec: snapshot.taken.0,
            date_nsec: snapshot.taken.1,
            vm_clock_sec: snapshot.vm_clock / SECOND,
            id: snapshot.id,
            vm_state_size: snapshot.vm_state_size,
        }
    }
}

/// Properties of images of one format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", content = "data", rename_all = "lowercase")]
pub enum FormatSpecific {
    /// qcow2.
    Qcow2(Qcow2Info),
    /// LUKS.
    Luks(LuksInfo),
}

/// Properties of qcow2 images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct Qcow2Info {
    /// `0.10` (version 2), `1.1` (version 3).
    pub compat: &'static str,
    /// Method of compression.
    pub compression_type: &'static str,
    /// Whether its refcounts are lazy; in version 3.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lazy_refcounts: Option<bool>,
    /// Its persistent bitmaps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<BitmapInfo>,
    /// Bits of a refcount.
    pub refcount_bits: u32,
    /// Its external data file, as the image has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_file: Option<String>,
    /// Whether that file is a raw image, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_file_raw: Option<bool>,
    /// Encryption of its contents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encrypt: Option<EncryptInfo>,
    /// Whether it is marked as corrupt; in version 3.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub corrupt: Option<bool>,
    /// Whether its clusters have subclusters; in version 3.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extended_l2: Option<bool>,
}

/// A persistent bitmap of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BitmapInfo {
    /// `in-use`, `auto`.
    pub flags: Vec<&'static str>,
    /// Its name.
    pub name: String,
    /// Bytes of the disk for each bit.
    pub granularity: u64,
}

/// Encryption of contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum EncryptInfo {
    /// AES-CBC, as QEMU once had it.
    Aes {
        /// `aes`.
        format: &'static str,
    },
    /// LUKS.
    Luks(Box<LuksInfo>),
}

/// Encryption with LUKS.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct LuksInfo {
    /// Generator of initialization vectors.
    pub ivgen_alg: &'static str,
    /// Whether the header is in a file of its own.
    pub detached_header: bool,
    /// Hash of the passphrases.
    pub hash_alg: String,
    /// The cipher, with the bits of its key.
    pub cipher_alg: String,
    /// UUID of the header.
    pub uuid: String,
    /// Hash of the generator, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ivgen_hash_alg: Option<String>,
    /// `luks`; only of a qcow2 image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<&'static str>,
    /// Mode of the cipher.
    pub cipher_mode: String,
    /// The key slots.
    pub slots: Vec<KeySlotInfo>,
    /// Offset of the disk in bytes.
    pub payload_offset: u64,
    /// Iterations of the volume key's digest.
    pub master_key_iters: u32,
}

/// A key slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct KeySlotInfo {
    /// Whether it has a passphrase.
    pub active: bool,
    /// Iterations of the passphrase; only of an active slot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iters: Option<u32>,
    /// Offset of its key material in bytes.
    pub key_offset: u64,
    /// Stripes of its key material; only of an active slot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stripes: Option<u32>,
}

impl From<&luks::Header> for LuksInfo {
    fn from(header: &luks::Header) -> Self {
        let slots = header.slots.iter().map(|slot| KeySlotInfo {
            active: slot.active,
            iters: slot.active.then_some(slot.iterations),
            key_offset: header.key_material(slot).start,
            stripes: slot.active.then_some(slot.stripes),
        });
        Self {
            ivgen_alg: header.generator.name(),
            detached_header: false,
            hash_alg: header.hash.to_string(),
            cipher_alg: header.cipher.to_string(),
            uuid: header.uuid.clone(),
            ivgen_hash_alg: header.generator.hash().map(|hash| hash.to_string()),
            format: None,
            cipher_mode: header.mode.to_string(),
            slots: slots.collect(),
            payload_offset: header.payload_offset(),
            master_key_iters: header.key_iterations,
        }
    }
}

impl ImageInfo {
    /// Of an image whose file is open. Nothing else is opened; its tables may lie anywhere.
    ///
    /// # Errors
    /// Its header, its snapshot table or its bitmap directory cannot be; what the storage says.
    pub async fn of(file: &ImageFile) -> Result<Self, ImageError> {
        let child = file_info(&*file.storage, file.file_storage(), &file.reference.location)?;
        let mut actual_size = child.actual_size;
        let dirty_flag = child.dirty_flag;
        let mut children = vec![Child { name: "file", info: child }];
        if let (Some(header), Some(path)) = (&file.header, &file.reference.header) {
            let info = file_info(&**header, Some(header), &Location::File(path.clone()))?;
            actual_size = actual_size.zip(info.actual_size).map(|(file, header)| file + header);
            children.insert(0, Child { name: "header", info });
        }
        let mut info = Self {
            snapshots: Vec::new(),
            backing_filename_format: None,
            virtual_size: match (file.format, file.reference.size) {
                (Format::Raw, Some(size)) => size,
                _ => sectors(file.storage.length()?.saturating_sub(file.reference.offset)),
            },
            filename: name(&file.reference, file.format),
            cluster_size: None,
            format: file.format.name(),
            actual_size,
            format_specific: None,
            full_backing_filename: None,
            backing_filename: None,
            encrypted: None,
            dirty_flag,
            children,
        };
        if file.format == Format::Qcow2 {
            let header = Header::read_to_examine(&*file.storage).await?;
            info.describe(file, &header).await?;
        }
        if file.format == Format::Luks {
            let header = match &file.header {
                Some(detached) => luks::read_detached_header(&**detached).await?,
                None => luks::read_header(&*file.storage).await?,
            };
            info.virtual_size = sectors(file.storage.length()?.saturating_sub(header.payload_offset()));
            info.encrypted = Some(true);
            let detached_header = file.header.is_some();
            info.format_specific = Some(FormatSpecific::Luks(LuksInfo { detached_header, ..(&header).into() }));
        }
        Ok(info)
    }

    async fn describe(&mut self, file: &ImageFile, header: &Header) -> Result<(), ImageError> {
        let storage = &*file.storage;
        self.snapshots = read_snapshots(storage, header).await?.into_iter().map(SnapshotInfo::from).collect();
        self.virtual_size = header.size;
        self.cluster_size = Some(header.geometry().cluster_size());
        self.dirty_flag = Some(header.features.dirty());
        self.encrypted = (header.encryption != Encryption::None).then_some(true);
        if let Some(backing) = &header.backing {
            self.backing_filename = Some(text(&backing.name));
            self.backing_filename_format = header.extensions.backing_format.clone();
            // One that cannot be opened is listed all the same.
            let full = Reference::from_image(&backing.name, &file.reference.location);
            let is_plain = |reference: &Reference| *reference == Reference::at(reference.location.clone());
            let plain = full.ok().filter(is_plain).filter(|_| !has_protocol(&backing.name));
            self.full_backing_filename =
                Some(plain.map_or_else(|| text(&backing.name), |reference| reference.to_string()));
        }
        let new = header.version > 2;
        let bitmaps = read_bitmaps(storage, header).await?.into_iter().map(|bitmap| BitmapInfo {
            flags: [(bitmap.in_use, "in-use"), (bitmap.auto, "auto")]
                .into_iter()
                .filter_map(|(set, flag)| set.then_some(flag))
                .collect(),
            name: bitmap.name,
            granularity: 1 << bitmap.granularity_bits,
        });
        self.format_specific = Some(FormatSpecific::Qcow2(Qcow2Info {
            compat: if new { "1.1" } else { "0.10" },
            compression_type: header.compression.name(),
            lazy_refcounts: new.then(|| header.features.lazy_refcounts()),
            bitmaps: bitmaps.collect(),
            refcount_bits: header.geometry().refcount_bits(),
            data_file: header
                .extensions
                .data_file
                .as_ref()
                .filter(|_| header.features.data_file())
                .map(|name| text(name)),
            data_file_raw: header.features.data_file().then(|| header.features.raw_data_file()),
            encrypt: match (header.encryption, header.extensions.encryption) {
                (Encryption::Aes, _) => Some(EncryptInfo::Aes { format: "aes" }),
                (Encryption::Luks, Some((at, length))) => {
                    let header = luks::read_header_at(storage, at.0, length).await?;
                    let described = LuksInfo { format: Some("luks"), ..LuksInfo::from(&header) };
                    Some(EncryptInfo::Luks(Box::new(described)))
                }
                (Encryption::Luks, None) | (Encryption::None, _) => None,
            },
            corrupt: new.then(|| header.features.corrupt()),
            extended_l2: new.then(|| header.features.extended_l2()),
        }));
        Ok(())
    }

    /// Of an image and of all below it, one after the other. Data files are not opened.
    ///
    /// # Errors
    /// As [`ImageInfo::of`], of any of them; [`ImageError::Refused`]: a file may not be opened, or is in the chain
    /// already.
    pub async fn of_chain(reference: &Reference, options: &OpenOptions) -> Result<Vec<Self>, ImageError> {
        let mut found = Vec::new();
        for file in chain::files(reference, options).await? {
            found.push(Self::of(&file).await?);
        }
        Ok(found)
    }
}

/// Describes the file of an image, or what it has in place of one.
fn file_info(storage: &dyn Storage, file: Option<&FileStorage>, location: &Location) -> Result<FileInfo, StorageError> {
    let is_device = file.is_some_and(FileStorage::is_block_device);
    let protocol = location.protocol();
    Ok(FileInfo {
        children: [],
        virtual_size: sectors(storage.length()?),
        filename: storage.name().to_string(),
        format: protocol.unwrap_or(if is_device { "host_device" } else { "file" }),
        actual_size: match (location, file) {
            (Location::Nbd { .. } | Location::Object(_), _) => None,
            (_, Some(file)) => Some(taken(file).unwrap_or(0)),
            (_, None) => Some(0),
        },
        format_specific: file.filter(|_| !is_device).map(|_| FileSpecific::default()),
        dirty_flag: protocol.is_none().then_some(false),
    })
}

fn sectors(length: u64) -> u64 {
    length.checked_next_multiple_of(SECTOR).unwrap_or(length)
}

fn text(name: &OsStr) -> String {
    name.to_string_lossy().into_owned()
}

fn has_protocol(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name.split('/').next().is_some_and(|first| first.contains(':'))
}

/// A path or an address, if it says all that decides what is seen.
fn name(reference: &Reference, format: Format) -> String {
    let secret = reference.key_secret.as_deref();
    if reference.offset == 0
        && reference.size.is_none()
        && secret.is_none()
        && reference.header.is_none()
        && let Some(plain) = reference.location.plain_name()
    {
        return plain;
    }
    let mut node = serde_json::json!({ "driver": format.name() });
    if format == Format::Raw {
        node["offset"] = reference.offset.into();
    }
    if let Some(size) = reference.size {
        node["size"] = size.into();
    }
    if let Some(secret) = secret {
        node[if format == Format::Qcow2 { "encrypt.key-secret" } else { "key-secret" }] = secret.into();
    }
    if let Some(header) = &reference.header {
        node["header"] = Location::File(header.clone()).node();
    }
    node["file"] = reference.location.node();
    format!("json:{node}")
}
