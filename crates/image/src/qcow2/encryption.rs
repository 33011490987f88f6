//! The encryption of an image's contents.
//!
//! An extension of the header names an area of the file that has a LUKS header with its key material. Contents are
//! encrypted by sectors, which are numbered by their offsets in the file; tables are not encrypted.
//!
//! The old encryption has no header: the passphrase itself is the key of AES-128 in CBC mode, cut off or filled up with
//! zeros to 16 bytes, and sectors are numbered by their offsets in the disk. Any passphrase opens such an image; with a
//! wrong one it has other contents. Images that have it are only read.
//!
//! Source of the facts: QEMU's docs/interop/qcow2, "Full disk encryption header pointer" and "Data encryption".

use std::sync::Arc;

use limosa_storage::{Buffer, Storage};
use zeroize::Zeroizing;

use super::format::header::{Encryption, Header};
use crate::error::ImageError;
use crate::luks::{
    self, CipherAlgorithm, CipherMode, IvGenerator, LuksError, NewHeader, Passphrase, SectorCipher, cipher_at,
    new_header,
};
use crate::offset::HostOffset;
use crate::setters::setters;

/// Returns the cipher of an image that is encrypted.
///
/// # Errors
/// [`ImageError::Unsupported`]: it is not encrypted; [`ImageError::Corrupt`]: the place of its LUKS header is
/// missing; [`ImageError::Encryption`]: the LUKS header is not valid, or the passphrase is wrong; errors of the
/// storage.
pub async fn cipher(
    file: &dyn Storage,
    header: &Header,
    passphrase: &Passphrase,
) -> Result<Arc<SectorCipher>, ImageError> {
    match header.encryption {
        Encryption::Luks => {}
        Encryption::Aes => {
            tracing::warn!(image = &**file.name(), "the old encryption with AES is weak: convert it to LUKS");
            let fault = |source| ImageError::Encryption { image: Arc::clone(file.name()), source };
            return old_cipher(passphrase).map(Arc::new).map_err(fault);
        }
        Encryption::None => {
            let what = "it is not encrypted".to_owned();
            return Err(ImageError::Unsupported { image: Arc::clone(file.name()), what });
        }
    }
    let (at, length) = header.extensions.encryption.ok_or_else(|| ImageError::Corrupt {
        image: Arc::clone(file.name()),
        table: "header extensions".into(),
        why: "the place of the encryption header is missing".into(),
    })?;
    cipher_at(file, (at.0, length), passphrase).await
}

/// The cipher of an image with the old encryption.
fn old_cipher(passphrase: &Passphrase) -> Result<SectorCipher, LuksError> {
    let mut key = Zeroizing::new([0; 16]);
    for (byte, from) in key.iter_mut().zip(passphrase.bytes()) {
        *byte = *from;
    }
    SectorCipher::new(CipherAlgorithm::Aes128, CipherMode::Cbc, IvGenerator::Plain64, &*key)
}

/// The encryption of a new image.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewEncryption {
    /// The cipher, and the work for the key.
    pub header: NewHeader,
    /// The passphrase of key slot 0.
    pub passphrase: Passphrase,
}

impl NewEncryption {
    /// LUKS with the usual cipher and this passphrase.
    #[must_use]
    pub fn new(passphrase: Passphrase) -> Self {
        Self { header: NewHeader::default(), passphrase }
    }
}

setters!(NewEncryption { header: NewHeader });

/// A new LUKS header that is not written yet.
pub(super) struct UnwrittenHeader {
    header: luks::Header,
    material: Vec<u8>,
    /// The cipher of contents.
    cipher: SectorCipher,
}

impl UnwrittenHeader {
    /// Makes a header with a new volume key.
    pub(super) fn new(image: &Arc<str>, new: &NewEncryption) -> Result<Self, ImageError> {
        let fault = |source| ImageError::Encryption { image: Arc::clone(image), source };
        let (header, key, material) = new_header(&new.header, &new.passphrase).map_err(fault)?;
        let cipher = header.sector_cipher(&key).map_err(fault)?;
        Ok(Self { header, material, cipher })
    }

    /// Writes it with its key material to its place, and returns the cipher.
    pub(super) async fn write(self, file: &dyn Storage, at: HostOffset) -> Result<SectorCipher, ImageError> {
        let place = self.header.key_material(&self.header.slots[0]);
        file.write(at.0 + place.start, Buffer::from_slice(&self.material).into()).await?;
        file.write(at.0, Buffer::from_slice(&self.header.to_bytes()).into()).await?;
        Ok(self.cipher)
    }
}
