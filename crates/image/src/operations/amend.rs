//! Changes options of an image that is given by name.
//!
//! Law: all changes are checked before the first one is made. Each is durable before the next one begins, and a cut
//! within one leaves the image as before or after it; except for the length: what is behind a new end may be gone while
//! the length is the old one, and bitmaps may be lost.

use std::sync::Arc;

use limosa_storage::Storage;

use super::resize::{NewSize, ResizeError, ResizeOptions, resize};
use crate::chain::{self, ImageFile, OpenOptions};
use crate::error::ImageError;
use crate::luks::{self, KeySlotChange};
use crate::probe::Format;
use crate::qcow2::{self, CheckOptions, DataFileChange, Encryption};
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
    /// The width of refcounts in bits: 1 to 64, a power of two. Of qcow2 images of version 3.
    pub refcount_bits: Option<u32>,
    /// The external data file of a qcow2 image that has one.
    pub data_file: DataFileChange,
    /// Whether a change of key slots may make all data unreadable.
    pub force: bool,
}

setters!(AmendOptions {
    key_slots: Option<KeySlotChange>,
    version: Option<u32>,
    lazy_refcounts: Option<bool>,
    refcount_bits: Option<u32>,
    size: Option<u64>,
    data_file: DataFileChange,
    force: bool,
});

/// Changes options of an image, in this order: a newer version, the width of refcounts, when they are written, the
/// length, the name of the data file, an older version, key slots.
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
    let AmendOptions { key_slots, version, lazy_refcounts, refcount_bits, size, data_file, force } = options;
    let of_qcow2 = version.is_some()
        || lazy_refcounts.is_some()
        || refcount_bits.is_some()
        || size.is_some()
        || *data_file != DataFileChange::default();
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
        qcow2::check_downgrade(storage, *refcount_bits, *size, check).await?;
    }
    qcow2::check_data_file_change(storage, data_file, check).await?;
    // It is checked once more when it is done: only for what comes before.
    if let Some(change) = key_slots.as_ref().filter(|_| of_qcow2) {
        let (place, area) = luks_area(&file, check).await?;
        let passphrase = chain::passphrase(&*file.storage, &file.reference, &open.secrets)?;
        luks::check_key_slot_change(place, area, passphrase, change, *force).await?;
    }
    if *version == Some(3) {
        qcow2::change_version(storage, 3, check).await?;
    }
    if let Some(bits) = refcount_bits {
        qcow2::change_refcount_bits(storage, *bits, check).await?;
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
    qcow2::change_data_file(&*file.storage, data_file, check).await?;
    if *version == Some(2) {
        qcow2::change_version(&*file.storage, 2, check).await?;
    }
    // Last: what came before may have been opened with a passphrase that they take away.
    if let Some(change) = key_slots {
        let area = luks_area(&file, check).await?;
        let passphrase = chain::passphrase(&*file.storage, &file.reference, &open.secrets)?;
        match area {
            (place, None) => luks::change_key_slots(place, passphrase, change, *force).await?,
            (place, Some(area)) => {
                if file.format == Format::Qcow2 && file.header.is_none() {
                    qcow2::Header::read(place).await?.prepare_autoclear(place, true).await?;
                }
                luks::change_key_slots_at(place, area, passphrase, change, *force).await?;
            }
        }
    }
    Ok(())
}

/// The storage that has the LUKS header of an image that is in order, and the header's area in it; `None`: the storage
/// begins with the header, and the disk is behind it.
async fn luks_area(file: &ImageFile, check: CheckOptions) -> Result<(&dyn Storage, Option<(u64, u64)>), ImageError> {
    if let Some(header) = &file.header {
        return Ok((&**header, Some((0, header.length()?))));
    }
    if file.format == Format::Luks {
        return Ok((&*file.storage, None));
    }
    let header = qcow2::sound(&*file.storage, check).await?;
    let area = header.extensions.encryption.filter(|_| header.encryption == Encryption::Luks);
    let is_aligned = |at: u64| at.is_multiple_of(header.geometry().cluster_size());
    let area = area.filter(|(at, _)| is_aligned(at.0));
    let image = Arc::clone(file.storage.name());
    let what = "it is not encrypted with LUKS".to_owned();
    let area = area.map(|(at, length)| (&*file.storage, Some((at.0, length))));
    area.ok_or(ImageError::Unsupported { image, what })
}
