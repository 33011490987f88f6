//! Persistent bitmaps of an image that is not open: added, removed, cleared, switched on and off, merged.
//!
//! Law: at any moment the image has the old bitmaps or the new ones ([`save`]). Bitmaps that are not changed keep their
//! bits, their tables and the extra data of their entries.

pub(in crate::qcow2) mod bits;
pub(in crate::qcow2) mod merge;
pub(in crate::qcow2) mod new_entry;
pub(in crate::qcow2) mod rewrite;
pub(in crate::qcow2) mod save;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use limosa_page::PageBitmap;
use limosa_storage::Storage;

use super::check::{CheckOptions, Repair, repair};
use crate::bitmap::BitmapAction;
use crate::error::ImageError;
use crate::qcow2::format::bitmap_directory::{Bitmap, Entry, entries};
use crate::qcow2::format::header::Header;
use bits::load;
use merge::merge;
use new_entry::new_entry;
use save::{Kept, save};

/// Changes the bitmap called `name` of an image, durably: one action after the other. `source`: the image that has the
/// bitmaps that are merged, if it is another one. Neither is used by anything else meanwhile, nor open as a disk. If an
/// action fails, those before it took effect, as they do with QEMU. An image that was not closed is repaired first.
///
/// # Errors
/// [`ImageError::Unsupported`]: an action that cannot be, such as of a bitmap that does not exist, or was not stored by
/// who used it; [`ImageError::NeedsRepair`]: the image is damaged; [`ImageError::Corrupt`]: a bitmap's table cannot be;
/// what the storage says.
pub async fn change_bitmap(
    storage: &dyn Storage,
    name: &str,
    actions: &[BitmapAction],
    source: Option<&dyn Storage>,
    options: CheckOptions,
) -> Result<(), ImageError> {
    let mut header = Header::read(storage).await?;
    if header.features.dirty() && !header.features.corrupt() {
        repair(storage, Repair::Refcounts, options).await?;
        header = Header::read(storage).await?;
    }
    if header.features.dirty() || header.features.corrupt() {
        let what = "it is damaged: check and repair it before its bitmaps change".to_owned();
        return Err(ImageError::NeedsRepair { image: Arc::clone(storage.name()), what });
    }
    let kept = entries(storage, &header).await?.into_iter().map(|entry| Kept { entry, bits: None }).collect();
    let mut work = Work { storage, header, kept, gone: Vec::new(), changed: false };
    let mut done = Ok(());
    for action in actions {
        done = work.act(name, action, source).await;
        if done.is_err() {
            break;
        }
    }
    if work.changed {
        work.store(options).await?;
    }
    done
}

/// An image whose bitmaps change.
struct Work<'a> {
    storage: &'a dyn Storage,
    header: Header,
    kept: Vec<Kept>,
    /// Stored bitmaps whose bits are not used any more.
    gone: Vec<Bitmap>,
    changed: bool,
}

impl Work<'_> {
    async fn act(&mut self, name: &str, action: &BitmapAction, source: Option<&dyn Storage>) -> Result<(), ImageError> {
        match action {
            BitmapAction::Add { granularity } => self.add(name, *granularity)?,
            BitmapAction::Remove => {
                let number = self.find(name)?;
                self.forget_stored(number);
                self.kept.remove(number);
            }
            BitmapAction::Clear => {
                let number = self.find_usable(name)?;
                let bits = self.kept.get(number).map_or(0, |kept| kept.entry.bitmap.bits(self.header.size));
                self.set_bits(number, PageBitmap::new(bits));
            }
            BitmapAction::Enable | BitmapAction::Disable => {
                let number = self.find_usable(name)?;
                if let Some(kept) = self.kept.get_mut(number) {
                    kept.entry.bitmap.auto = *action == BitmapAction::Enable;
                }
            }
            BitmapAction::Merge { source: other } => self.merge(name, other, source).await?,
            BitmapAction::Set(set) => {
                let number = self.find_usable(name)?;
                let (mut bits, granularity) = self.bits_of(number).await?;
                merge((&mut bits, granularity), (&set.bits, set.granularity_bits));
                self.set_bits(number, bits);
            }
        }
        self.changed = true;
        Ok(())
    }

    fn add(&mut self, name: &str, granularity: Option<u64>) -> Result<(), ImageError> {
        let entries = self.kept.iter().map(|kept| &kept.entry);
        let entry = new_entry(self.storage.name(), &self.header, entries, (name, granularity))?;
        let bits = entry.bitmap.bits(self.header.size);
        self.kept.push(Kept { entry, bits: Some(PageBitmap::new(bits)) });
        Ok(())
    }

    async fn merge(&mut self, name: &str, other: &str, source: Option<&dyn Storage>) -> Result<(), ImageError> {
        let number = self.find_usable(name)?;
        let (from, from_granularity) = match source {
            Some(source) => self.load_other(source, other).await?,
            None => {
                let other = self.find_usable(other)?;
                self.bits_of(other).await?
            }
        };
        let (mut bits, granularity) = self.bits_of(number).await?;
        merge((&mut bits, granularity), (&from, from_granularity));
        self.set_bits(number, bits);
        Ok(())
    }

    /// The bits of a bitmap of another image, and the logarithm of what each is about.
    async fn load_other(&self, source: &dyn Storage, name: &str) -> Result<(PageBitmap, u8), ImageError> {
        let header = Header::read(source).await?;
        let bitmap = find_stored(source, &header, name).await?;
        if header.size != self.header.size {
            let (image, size) = (source.name(), header.size);
            let what =
                format!("bitmap {name:?} of {image} is of a disk of {size} bytes, this one of {}", self.header.size);
            return Err(self.unsupported(what));
        }
        Ok((load(source, &header, &bitmap).await?, bitmap.granularity_bits))
    }

    async fn bits_of(&self, number: usize) -> Result<(PageBitmap, u8), ImageError> {
        let Some(Kept { entry, bits }) = self.kept.get(number) else { return Ok((PageBitmap::new(0), 0)) };
        let loaded = match bits {
            Some(bits) => bits.clone(),
            None => load(self.storage, &self.header, &entry.bitmap).await?,
        };
        Ok((loaded, entry.bitmap.granularity_bits))
    }

    fn set_bits(&mut self, number: usize, bits: PageBitmap) {
        self.forget_stored(number);
        if let Some(kept) = self.kept.get_mut(number) {
            kept.bits = Some(bits);
        }
    }

    /// Notes that what is stored of a bitmap is not used any more.
    fn forget_stored(&mut self, number: usize) {
        let stored = self.kept.get(number).filter(|kept| kept.bits.is_none());
        self.gone.extend(stored.map(|kept| kept.entry.bitmap.clone()));
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.kept.iter().position(|kept| kept.entry.is_named(name))
    }

    fn find(&self, name: &str) -> Result<usize, ImageError> {
        self.position(name).ok_or_else(|| no_bitmap(self.storage.name(), name))
    }

    /// A bitmap whose bits can be relied on.
    fn find_usable(&self, name: &str) -> Result<usize, ImageError> {
        let number = self.find(name)?;
        self.kept.get(number).map_or(Ok(()), |kept| usable(self.storage.name(), &kept.entry))?;
        Ok(number)
    }

    async fn store(mut self, options: CheckOptions) -> Result<(), ImageError> {
        self.header.prepare_autoclear(self.storage, true).await?;
        let saved = save(self.storage, &mut self.header, self.kept, &self.gone).await;
        if saved.is_err() {
            // What was taken for it is given back; the first failure is returned.
            let _ = repair(self.storage, Repair::Leaks, options).await;
        }
        saved
    }

    fn unsupported(&self, what: String) -> ImageError {
        ImageError::Unsupported { image: Arc::clone(self.storage.name()), what }
    }
}

/// No bitmap has this name.
pub(in crate::qcow2) fn no_bitmap(image: &Arc<str>, name: &str) -> ImageError {
    ImageError::Unsupported { image: Arc::clone(image), what: format!("it has no bitmap {name:?}") }
}

/// Refuses a bitmap whose bits cannot be relied on.
pub(in crate::qcow2) fn usable(image: &Arc<str>, entry: &Entry) -> Result<(), ImageError> {
    let name = &entry.bitmap.name;
    let what = if entry.bitmap.in_use {
        format!("bitmap {name:?} was not stored by who used it: it can only be removed")
    } else if !entry.is_understood() {
        format!("bitmap {name:?} has extra data that must be understood: it can only be removed")
    } else {
        return Ok(());
    };
    Err(ImageError::Unsupported { image: Arc::clone(image), what })
}

/// The stored bitmap of this name, whose bits can be relied on.
///
/// # Errors
/// [`ImageError::Unsupported`]: no bitmap has this name; what is wrong with the directory; what the storage says.
async fn find_stored(storage: &dyn Storage, header: &Header, name: &str) -> Result<Bitmap, ImageError> {
    let found = entries(storage, header).await?.into_iter().find(|entry| entry.is_named(name));
    let entry = found.ok_or_else(|| no_bitmap(storage.name(), name))?;
    usable(storage.name(), &entry)?;
    Ok(entry.bitmap)
}
