//! The dirty bitmaps of a served disk, which go with it to an overlay and back.
//!
//! Bits are read from the image that was closed before an image changes that gets them: a bitmap that appears there has
//! them all.

use std::path::Path;

use limosa_image::qcow2::{CheckOptions, change_bitmap};
use limosa_image::{BitmapAction, BitmapBits, DirtyBitmap, Disk};
use limosa_storage::{FileOptions, FileStorage, block_on};

use crate::serve::wanted::Wanted;

/// Copies the bitmaps of an image that was closed to its overlay, and lets those that are `cleared` begin empty there.
/// Others that cannot be relied on are left out.
///
/// # Errors
/// One that is to begin empty cannot be relied on: it was not stored when the image was closed.
pub(super) fn copy(image: &Wanted, overlay: &Path, cleared: &[String]) -> anyhow::Result<()> {
    let file = FileStorage::open(overlay, &FileOptions::default())?;
    let bitmaps = read(image)?;
    if let Some(name) = cleared.iter().find(|name| !bitmaps.iter().any(|(bitmap, _)| bitmap.name == **name)) {
        anyhow::bail!("bitmap {name:?} could not be stored in {}", image.source.name);
    }
    for (bitmap, bits) in bitmaps {
        let mut actions = vec![BitmapAction::Add { granularity: Some(bitmap.granularity) }];
        if !cleared.contains(&bitmap.name) {
            actions.push(BitmapAction::Set(bits));
        }
        actions.push(follow(&bitmap));
        block_on(change_bitmap(&*file, &bitmap.name, &actions, None, CheckOptions::default()))?;
    }
    Ok(())
}

/// Gives the disk of the image below an overlay the overlay's bitmaps. Others that it has stay.
pub(super) fn bring(bitmaps: Vec<(DirtyBitmap, BitmapBits)>, below: &dyn Disk) -> anyhow::Result<()> {
    if bitmaps.is_empty() {
        return Ok(());
    }
    let present = block_on(below.bitmaps())?;
    let mut changes = Vec::new();
    for (bitmap, bits) in bitmaps {
        let mut change = |action| changes.push((bitmap.name.clone(), action));
        let other = present.iter().find(|other| other.name == bitmap.name);
        // What it has is of the time before the overlay.
        if other.is_some_and(|other| other.granularity == bitmap.granularity && other.set.is_some()) {
            change(BitmapAction::Clear);
        } else {
            if other.is_some() {
                change(BitmapAction::Remove);
            }
            change(BitmapAction::Add { granularity: Some(bitmap.granularity) });
        }
        change(BitmapAction::Set(bits));
        change(follow(&bitmap));
    }
    Ok(block_on(below.change_bitmaps(&changes))?)
}

/// Whether it follows the disk as it did.
fn follow(bitmap: &DirtyBitmap) -> BitmapAction {
    if bitmap.enabled { BitmapAction::Enable } else { BitmapAction::Disable }
}

/// The bitmaps of an image that was closed, with their bits, without those that cannot be relied on.
pub(super) fn read(image: &Wanted) -> anyhow::Result<Vec<(DirtyBitmap, BitmapBits)>> {
    let disk = image.open_to_read()?;
    let read = block_on(async {
        let mut found = Vec::new();
        for bitmap in disk.bitmaps().await? {
            if bitmap.set.is_some() {
                let bits = disk.bitmap_bits(&bitmap.name)?;
                found.push((bitmap, bits));
            } else {
                let image = &**disk.name();
                tracing::warn!(image, bitmap = bitmap.name, "it cannot be relied on, and is left behind");
            }
        }
        anyhow::Ok(found)
    });
    block_on(disk.close())?;
    disk.unlock();
    read
}
