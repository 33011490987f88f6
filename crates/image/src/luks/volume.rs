//! Encrypted volumes in storages: opened and made.

use std::sync::Arc;

use limosa_page::to_usize;
use limosa_storage::{Buffer, Storage};

use super::cipher::{SECTOR, SectorCipher};
use super::header::{HEADER_LENGTH, Header, Layout, Limits};
use super::key_slot::NewHeader;
use super::secret::Passphrase;
use super::storage::EncryptedStorage;
use super::unlock::Unlocked;
use super::{LuksError, VolumeKey};
use crate::error::ImageError;
use crate::preallocation::Preallocation;
use crate::raw::reserve;

/// The options of a new image in the format `luks`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CreateOptions {
    /// Virtual size in bytes; it is rounded up to a sector.
    pub size: u64,
    /// The cipher, and the work for the key.
    pub header: NewHeader,
    /// The passphrase of key slot 0.
    pub passphrase: Passphrase,
    /// The space that is allocated at once; there are no metadata but the header.
    pub preallocation: Preallocation,
    /// Whether the header is alone in its file, and the disk in another one, as long as the disk. `size` is 0 then.
    pub detached: bool,
}

impl CreateOptions {
    /// An image of no bytes with this passphrase.
    #[must_use]
    pub fn new(passphrase: Passphrase) -> Self {
        Self { size: 0, header: NewHeader::default(), passphrase, preallocation: Preallocation::Off, detached: false }
    }

    /// Returns the length of its file; `None`: no file is that long.
    #[must_use]
    pub fn length(&self) -> Option<u64> {
        let size = self.size.checked_next_multiple_of(SECTOR as u64)?;
        size.checked_add(self.header.length()).filter(|length| i64::try_from(*length).is_ok())
    }
}

crate::setters::setters!(CreateOptions { size: u64, header: NewHeader, preallocation: Preallocation, detached: bool });

fn fault(storage: &dyn Storage) -> impl Fn(LuksError) -> ImageError + '_ {
    |source| ImageError::Encryption { image: Arc::clone(storage.name()), source }
}

/// Reads the header at the beginning of a storage.
///
/// # Errors
/// [`ImageError::Encryption`]: it is not valid; errors of the storage.
pub async fn read_header(storage: &dyn Storage) -> Result<Header, ImageError> {
    let start = Buffer::zeroed(HEADER_LENGTH);
    storage.read(0, start.clone().into()).await?;
    let layout = Layout::File(storage.length()?);
    Header::parse(&start.to_vec(), layout, Limits::default()).map_err(fault(storage))
}

/// Reads the key material of a header that is at `base` of a storage, and finds the volume key.
///
/// # Errors
/// [`ImageError::Encryption`]: the passphrase is wrong; errors of the storage.
pub(crate) async fn unlock(
    storage: &dyn Storage,
    base: u64,
    header: &Header,
    passphrase: &Passphrase,
) -> Result<Unlocked, ImageError> {
    let mut material = Vec::new();
    for slot in &header.slots {
        // The header was checked: it is of this file, and within the limits.
        let place = header.key_material(slot);
        let length = if slot.active { to_usize(place.end - place.start) } else { 0 };
        let buffer = Buffer::zeroed(length);
        if length > 0 {
            storage.read(base + place.start, buffer.clone().into()).await?;
        }
        material.push(buffer.to_vec());
    }
    header.unlock(&material, passphrase.bytes()).map_err(fault(storage))
}

/// Opens the disk of an image in the format `luks`.
///
/// # Errors
/// As [`read_header`]; the passphrase is wrong.
pub async fn open(file: Arc<dyn Storage>, passphrase: &Passphrase) -> Result<EncryptedStorage, ImageError> {
    let header = read_header(&*file).await?;
    let cipher = unlocked_cipher(&*file, 0, &header, passphrase).await?;
    Ok(EncryptedStorage::new(file, cipher, header.payload_offset()))
}

/// Opens the disk in `file` whose header is alone in another one, which stays open as long as the disk.
///
/// # Errors
/// As [`open`].
pub async fn open_detached(
    file: Arc<dyn Storage>,
    header_file: Arc<dyn Storage>,
    passphrase: &Passphrase,
) -> Result<EncryptedStorage, ImageError> {
    let header = read_detached_header(&*header_file).await?;
    let cipher = unlocked_cipher(&*header_file, 0, &header, passphrase).await?;
    Ok(EncryptedStorage::with_header(file, cipher, header.payload_offset(), header_file))
}

/// The cipher of the disk whose header is at `base` of a storage.
async fn unlocked_cipher(
    storage: &dyn Storage,
    base: u64,
    header: &Header,
    passphrase: &Passphrase,
) -> Result<SectorCipher, ImageError> {
    let unlocked = unlock(storage, base, header, passphrase).await?;
    header.sector_cipher(&unlocked.key).map_err(fault(storage))
}

/// Reads the header that a file has alone: the disk is in another one.
///
/// # Errors
/// As [`read_header`].
pub async fn read_detached_header(storage: &dyn Storage) -> Result<Header, ImageError> {
    read_header_at(storage, 0, storage.length()?).await
}

/// Reads the header that a qcow2 image has in this area of its file.
///
/// # Errors
/// As [`read_header`]; the area is not in the file.
pub(crate) async fn read_header_at(storage: &dyn Storage, at: u64, length: u64) -> Result<Header, ImageError> {
    let end = at.checked_add(length).filter(|end| *end <= storage.length().unwrap_or(0));
    if end.is_none() || length < HEADER_LENGTH as u64 {
        let what = format!("its {length} bytes at {at:#x} are not in the file, or too few");
        return Err(fault(storage)(LuksError::Header(what)));
    }
    let start = Buffer::zeroed(HEADER_LENGTH);
    storage.read(at, start.clone().into()).await?;
    Header::parse(&start.to_vec(), Layout::Detached(length), Limits::default()).map_err(fault(storage))
}

/// Returns the cipher of a qcow2 image that has its header in this area of its file.
///
/// # Errors
/// As [`read_header_at`]; the passphrase is wrong.
pub(crate) async fn cipher_at(
    storage: &dyn Storage,
    (at, length): (u64, u64),
    passphrase: &Passphrase,
) -> Result<Arc<SectorCipher>, ImageError> {
    let header = read_header_at(storage, at, length).await?;
    unlocked_cipher(storage, at, &header, passphrase).await.map(Arc::new)
}

/// Makes a header whose key slot 0 has a passphrase, with its key material.
pub(crate) fn new_header(
    options: &NewHeader,
    passphrase: &Passphrase,
) -> Result<(Header, VolumeKey, Vec<u8>), LuksError> {
    let (mut header, key) = options.make()?;
    let material = header.set_slot(0, &key, passphrase.bytes(), options.iter_time)?;
    Ok((header, key, material))
}

/// Creates an image in the format `luks` in `file`, whose contents are lost. The contents of the new disk are
/// undefined, as with stock tools. The header is written last.
///
/// # Errors
/// [`ImageError::Encryption`]: the options exclude each other; [`ImageError::Unsupported`]: no file is that long, or a
/// device is too small; errors of the storage.
pub async fn create(file: &dyn Storage, options: &CreateOptions) -> Result<(), ImageError> {
    let unsupported = |what: String| ImageError::Unsupported { image: Arc::clone(file.name()), what };
    let length = options.length().ok_or_else(|| unsupported(format!("a disk of {} bytes", options.size)))?;
    if options.detached && (options.size > 0 || options.preallocation != Preallocation::Off) {
        return Err(unsupported(
            "the image is the header alone: omit the size, the disk is in a file of its own".into(),
        ));
    }
    let (mut header, _, material) = new_header(&options.header, &options.passphrase).map_err(fault(file))?;
    let disk = header.payload_offset()..length;
    if options.detached {
        header.payload_sector = 0;
    }
    match file.set_len(0).await {
        Ok(()) => {
            file.set_len(length).await?;
            reserve(file, disk, options.preallocation).await?;
        }
        // A device keeps its length; its old header must not be found with the new key material.
        Err(_) if file.length()? >= length => {
            file.write(0, Buffer::zeroed(HEADER_LENGTH).into()).await?;
            file.flush().await?;
        }
        Err(error) => return Err(error.into()),
    }
    let place = header.key_material(&header.slots[0]);
    file.write(place.start, Buffer::from_slice(&material).into()).await?;
    // The header's first sector has the signature: it is written last, as a whole or not at all.
    let bytes = header.to_bytes();
    let (first, rest) = bytes.split_at(SECTOR);
    file.write(SECTOR as u64, Buffer::from_slice(rest).into()).await?;
    file.flush().await?;
    file.write(0, Buffer::from_slice(first).into()).await?;
    Ok(file.flush().await?)
}
