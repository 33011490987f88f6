//! The encryption of an image's contents.
//!
//! An extension of the header names an area of the file that has a LUKS header with its key material. Contents are
//! encrypted by sectors, which are numbered by their offsets in the file; tables are not encrypted.
//!
//! Source of the facts: QEMU's docs/interop/qcow2, "Full disk encryption header pointer" and "Data encryption".

use std::sync::Arc;

use limosa_storage::Storage;

use super::format::header::{Encryption, Header};
use crate::error::ImageError;
use crate::luks::{Passphrase, SectorCipher, cipher_at};

/// Returns the cipher of an image that is encrypted with LUKS.
///
/// # Errors
/// [`ImageError::Unsupported`]: it is not encrypted with LUKS; [`ImageError::Corrupt`]: the place of its LUKS header is
/// missing; [`ImageError::Encryption`]: the LUKS header is not valid, or the passphrase is wrong; errors of the
/// storage.
pub async fn cipher(
    file: &dyn Storage,
    header: &Header,
    passphrase: &Passphrase,
) -> Result<Arc<SectorCipher>, ImageError> {
    if header.encryption != Encryption::Luks {
        let what = "it is not encrypted with LUKS".to_owned();
        return Err(ImageError::Unsupported { image: Arc::clone(file.name()), what });
    }
    let (at, length) = header.extensions.encryption.ok_or_else(|| ImageError::Corrupt {
        image: Arc::clone(file.name()),
        table: "header extensions".into(),
        why: "the place of the encryption header is missing".into(),
    })?;
    cipher_at(file, (at.0, length), passphrase).await
}
