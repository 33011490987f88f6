//! Changes options of an image that is given by name.
//!
//! Law: each change is durable before the next one begins, and a cut within one leaves the image as before or after it.

use std::sync::Arc;

use limosa_storage::Storage as _;

use super::resize::{NewSize, ResizeError, ResizeOptions, resize};
use crate::chain::{self, ImageFile, OpenOptions};
use crate::error::ImageError;
use crate::luks::{self, KeySlotChange};
use crate::probe::Format;
use crate::qcow2::{self, CheckOptions, Encryption, Header};
use crate::reference::Reference;
use crate::setters::setters;

/// The options that change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AmendOptions {
    /// Key slots of an encrypted image.
    pub key_slots: Option<KeySlotChange>,
    /// The version of a qcow2 image: 2 or 3.
    pub version: Option<u32>,
    /// Whether refcounts of a qcow2 image are written late.
    pub lazy_refcounts: Option<bool>,
    /// The length of a qcow2 image's disk in bytes. What is behind a new end is lost.
    pub size: Option<u64>,
    /// Whether a change of key slots may make all data unreadable.
    pub force: bool,
}

setters!(AmendOptions {
    key_slots: Option<KeySlotChange>,
    version: Option<u32>,
    lazy_refcounts: Option<bool>,
    size: Option<u64>,
    force: bool,
});

/// Changes options of an image, in this order: a newer version, key slots, refcounts, the length, an older version.
/// Nothing else uses the image.
///
/// # Errors
/// [`ImageError::Unsupported`]: the format does not have such an option, or the image cannot have the new value;
/// [`ImageError::Encryption`]; the image cannot be opened or changed.
pub async fn amend(reference: &Reference, open: &OpenOptions, options: &AmendOptions) -> Result<(), ImageError> {
    let open = OpenOptions { read_only: false, ..open.clone() };
    let file = ImageFile::open(reference, &open).await?;
    let image = Arc::clone(file.storage.name());
    let unsupported = |what: String| ImageError::Unsupported { image: Arc::clone(&image), what };
    let AmendOptions { key_slots, version, lazy_refcounts, size, force } = options;
    let of_qcow2 = version.is_some() || lazy_refcounts.is_some() || size.is_some();
    match file.format {
        Format::Luks if !of_qcow2 => {}
        Format::Qcow2 => {}
        format => return Err(unsupported(format!("format {format} does not have these options"))),
    }
    if *version == Some(2) && *lazy_refcounts == Some(true) {
        return Err(unsupported("lazy_refcounts needs compat=1.1".into()));
    }
    let (storage, check) = (&*file.storage, CheckOptions::default());
    if *version == Some(3) {
        qcow2::change_version(storage, 3, check).await?;
    }
    if let Some(change) = key_slots {
        if file.format == Format::Luks {
            let passphrase = chain::passphrase(&file.storage, &file.reference, &open.secrets)?;
            luks::change_key_slots(storage, passphrase, change, *force).await?;
        } else {
            let header = Header::read(storage).await?;
            let area = header.extensions.encryption.filter(|_| header.encryption == Encryption::Luks);
            let (at, length) = area.ok_or_else(|| unsupported("it is not encrypted with LUKS".into()))?;
            let passphrase = chain::passphrase(&file.storage, &file.reference, &open.secrets)?;
            luks::change_key_slots_at(storage, (at.0, length), passphrase, change, *force).await?;
        }
    }
    if let Some(lazy) = lazy_refcounts {
        qcow2::change_lazy_refcounts(storage, *lazy, check).await?;
    }
    // Its locks would be in the way of the same file's, opened with all that it refers to.
    drop(file);
    if let Some(size) = size {
        let how = ResizeOptions { shrink: true, ..ResizeOptions::new(NewSize::Exactly(*size)) };
        match resize(reference, &open, &how, || {}).await {
            Ok(_) => {}
            Err(ResizeError::Image(error)) => return Err(error),
            Err(ResizeError::Size { fault, .. }) => return Err(unsupported(fault.to_string())),
        }
    }
    if *version == Some(2) {
        let file = ImageFile::open(reference, &open).await?;
        qcow2::change_version(&*file.storage, 2, check).await?;
    }
    Ok(())
}
