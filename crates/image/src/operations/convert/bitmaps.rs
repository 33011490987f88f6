//! Dirty bitmaps of a source, copied into the target of a conversion.
//!
//! Law: a bitmap that cannot be relied on is not copied, and either refused before anything is written, or named.

use std::sync::Arc;

use limosa_storage::block_on;

use crate::bitmap::{BitmapAction, DirtyBitmap};
use crate::disk::Disk;
use crate::error::ImageError;

/// The bitmaps of a source that are copied.
#[derive(Debug, Default)]
pub(super) struct Bitmaps {
    usable: Vec<DirtyBitmap>,
    /// Names of those that cannot be relied on.
    pub(super) skipped: Vec<String>,
}

impl Bitmaps {
    /// The bitmaps of this source. `skip_broken`: those that cannot be relied on are left out.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: the source's format has no bitmaps; [`ImageError::InconsistentBitmap`]: one cannot
    /// be relied on.
    pub(super) async fn of(source: &dyn Disk, skip_broken: bool) -> Result<Self, ImageError> {
        if source.format() != "qcow2" {
            let what = format!("format {} has no bitmaps to copy", source.format());
            return Err(ImageError::Unsupported { image: Arc::clone(source.name()), what });
        }
        let (usable, broken): (Vec<_>, Vec<_>) =
            source.bitmaps().await?.into_iter().partition(|bitmap| bitmap.set.is_some());
        let skipped: Vec<_> = broken.into_iter().map(|bitmap| bitmap.name).collect();
        if let Some(name) = skipped.first().filter(|_| !skip_broken) {
            return Err(ImageError::InconsistentBitmap { image: Arc::clone(source.name()), bitmap: name.clone() });
        }
        Ok(Self { usable, skipped })
    }

    /// Adds them to the target, where the contents are already.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: the target cannot have them; what its storage says.
    pub(super) fn copy(self, source: &dyn Disk, target: &dyn Disk) -> Result<(), ImageError> {
        for DirtyBitmap { name, granularity, enabled, .. } in self.usable {
            let set = BitmapAction::Set(source.bitmap_bits(&name)?);
            let mut changes = vec![BitmapAction::Add { granularity: Some(granularity) }, set];
            if !enabled {
                changes.push(BitmapAction::Disable);
            }
            let changes: Vec<_> = changes.into_iter().map(|change| (name.clone(), change)).collect();
            block_on(target.change_bitmaps(&changes))?;
        }
        Ok(())
    }
}
