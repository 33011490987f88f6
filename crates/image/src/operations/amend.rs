//! Changes options of an image that is given by name.
//!
//! Law: all changes are checked before the first one is made. Each is durable before the next one begins, and a cut
//! within one leaves the image as before or after it; except for the length: what is behind a new end may be gone while
//! the length is the old one, and bitmaps may be lost.

use std::sync::Arc;

use super::resize::{NewSize, ResizeError, ResizeOptions, resize};
use crate::chain::{self, ImageFile, OpenOptions};
use crate::error::ImageError;
use crate::luks::{self, KeySlotChange};
use crate::probe::Format;
use crate::qcow2::{self, CheckOptions, Encryption};
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

/// Changes options of an image, in this order: a newer version, refcounts, the length, an older version, key slots.
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
    if *version == Some(2) {
        qcow2::check_downgrade(storage, check).await?;
    }
    if let Some(change) = key_slots {
        let area = luks_area(&file, check).await?;
        let passphrase = chain::passphrase(&*file.storage, &file.reference, &open.secrets)?;
        luks::check_key_slot_change(storage, area, passphrase, change, *force).await?;
    }
    if *version == Some(3) {
        qcow2::change_version(storage, 3, check).await?;
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
    let file = ImageFile::open(reference, &open).await?;
    if *version == Some(2) {
        qcow2::change_version(&*file.storage, 2, check).await?;
    }
    // Last: what came before may have been opened with a passphrase that they take away.
    if let Some(change) = key_slots {
        let passphrase = chain::passphrase(&*file.storage, &file.reference, &open.secrets)?;
        match luks_area(&file, check).await? {
            None => luks::change_key_slots(&*file.storage, passphrase, change, *force).await?,
            Some(area) => luks::change_key_slots_at(&*file.storage, area, passphrase, change, *force).await?,
        }
    }
    Ok(())
}

/// Where a qcow2 image that is in order has its LUKS header; `None`: the file begins with it.
async fn luks_area(file: &ImageFile, check: CheckOptions) -> Result<Option<(u64, u64)>, ImageError> {
    if file.format == Format::Luks {
        return Ok(None);
    }
    let header = qcow2::sound(&*file.storage, check).await?;
    let area = header.extensions.encryption.filter(|_| header.encryption == Encryption::Luks);
    let is_aligned = |at: u64| at.is_multiple_of(header.geometry().cluster_size());
    let area = area.filter(|(at, _)| is_aligned(at.0));
    let image = Arc::clone(file.storage.name());
    let what = "it is not encrypted with LUKS".to_owned();
    area.map(|(at, length)| Some((at.0, length))).ok_or(ImageError::Unsupported { image, what })
}
