//! Bitmaps that are added, removed, cleared, switched and merged while the image is in use.

use std::sync::{Arc, Weak};

use limosa_page::{AtomicPageBitmap, PageBitmap, PageNumber, PageRange};

use super::{BITS_MOST, DirtyBitmaps, ImageError, MEMORY_MOST, Tracked};
use crate::bitmap::BitmapAction;
use crate::qcow2::format::bitmap_directory::{Bitmap, Entry, mark_in_use};
use crate::qcow2::format::header::Header;
use crate::qcow2::offline::bitmaps::merge::merge;
use crate::qcow2::offline::bitmaps::new_entry::new_entry;
use crate::qcow2::offline::bitmaps::no_bitmap;
use crate::qcow2::offline::bitmaps::save::admit;

impl DirtyBitmaps {
    /// Carries out changes of bitmaps, all of them or none, at one moment for all requests; none if nobody has `asked`
    /// for them any more: writes that were acknowledged since would lose their bits. Only within
    /// [`HeaderOwner::exclusively`](super::HeaderOwner::exclusively), after the image has begun to be written.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: a change that cannot be; what the storage says of the marks.
    pub(in super::super) async fn change(
        &self,
        changes: &[(String, BitmapAction)],
        asked: &Weak<()>,
    ) -> Result<(), ImageError> {
        let header = self.header.now();
        let is_changed = |entry: &Entry| changes.iter().any(|(name, _)| entry.is_named(name));
        let bitmaps = self.bitmaps.read().clone();
        let after = self.changed(&header, changes, bitmaps.clone())?;
        let has_new_entries =
            |(_, action): &(_, BitmapAction)| matches!(action, BitmapAction::Add { .. } | BitmapAction::Remove);
        if changes.iter().any(has_new_entries) {
            admit(self.context.name(), &header, !after.is_empty())?;
        }
        drop(after);
        // What is stored of them is not what they are any more.
        let is_marked = |entry: &Entry| bitmaps.iter().any(|it| it.is_marked && it.entry.has_name_of(entry));
        mark_in_use(&**self.context.file(), &header, |entry| is_changed(entry) && !is_marked(entry)).await?;
        // Bits that requests set meanwhile are in it: what is cloned shares them.
        let mut bitmaps = self.bitmaps.write();
        if asked.strong_count() == 0 {
            return Ok(());
        }
        let mut changed = self.changed(&header, changes, bitmaps.clone())?;
        changed.iter_mut().filter(|bitmap| is_changed(&bitmap.entry)).for_each(|bitmap| bitmap.is_marked = true);
        self.replace(&mut bitmaps, changed);
        Ok(())
    }

    /// Applies changes to a copy of the bitmaps.
    fn changed(
        &self,
        header: &Header,
        changes: &[(String, BitmapAction)],
        mut bitmaps: Vec<Tracked>,
    ) -> Result<Vec<Tracked>, ImageError> {
        for (name, action) in changes {
            self.act(header, name, action, &mut bitmaps)?;
        }
        Ok(bitmaps)
    }

    /// Refuses bitmaps that would take too much memory together, before they do: those of a disk of `size` bytes, and
    /// `more`.
    fn admit(&self, bitmaps: &[Tracked], size: u64, more: Option<&Bitmap>) -> Result<(), ImageError> {
        let kept = bitmaps.iter().filter(|bitmap| bitmap.bits.is_some()).map(|bitmap| &bitmap.entry.bitmap);
        let bytes = kept.chain(more).map(|bitmap| PageBitmap::byte_len(bitmap.bits(size)));
        if bytes.fold(0, u64::saturating_add) > MEMORY_MOST {
            let what =
                format!("its bitmaps would take more than {MEMORY_MOST} bytes of memory: take larger granularities");
            return Err(self.context.unsupported(what));
        }
        Ok(())
    }

    fn act(
        &self,
        header: &Header,
        name: &str,
        action: &BitmapAction,
        bitmaps: &mut Vec<Tracked>,
    ) -> Result<(), ImageError> {
        let missing = || no_bitmap(self.context.name(), name);
        if let BitmapAction::Add { granularity } = action {
            let entries = bitmaps.iter().map(|bitmap| &bitmap.entry);
            let entry = new_entry(self.context.name(), header, entries, (name, *granularity))?;
            self.admit(bitmaps, header.size, Some(&entry.bitmap))?;
            let bits = AtomicPageBitmap::new(entry.bitmap.bits(header.size));
            bitmaps.push(Tracked { entry, bits: Some(Arc::new(bits)), is_marked: false });
            return Ok(());
        }
        let number = bitmaps.iter().position(|bitmap| bitmap.entry.is_named(name)).ok_or_else(missing)?;
        if *action == BitmapAction::Remove {
            bitmaps.remove(number);
            return Ok(());
        }
        let set = match action {
            BitmapAction::Merge { source } => Some(self.bits_of(bitmaps, source)?),
            BitmapAction::Set(bits) => Some(bits.clone()),
            _ => None,
        };
        let (Bitmap { granularity_bits, .. }, own) = self.usable_one(bitmaps, name)?;
        // Copied only if they change: requests wait meanwhile.
        let bits = match (set, action) {
            (Some(set), _) => {
                let mut own = own.to_bitmap();
                merge((&mut own, *granularity_bits), (&set.bits, set.granularity_bits));
                Some(own.into())
            }
            (None, BitmapAction::Clear) => Some(AtomicPageBitmap::new(own.len())),
            (None, _) => None,
        };
        let Some(bitmap) = bitmaps.get_mut(number) else { return Err(missing()) };
        match bits {
            Some(bits) => bitmap.bits = Some(Arc::new(bits)),
            None => bitmap.entry.bitmap.auto = *action == BitmapAction::Enable,
        }
        Ok(())
    }

    /// Gives all of them the bits that a disk of `size` bytes needs, which is longer than before. Only within
    /// [`HeaderOwner::exclusively`](super::HeaderOwner::exclusively), before the disk has that length.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: one of them would be too large; what the storage says of the marks.
    pub(in super::super) async fn grow(&self, size: u64) -> Result<(), ImageError> {
        let longer = |bitmap: &Tracked| {
            let Some(bits) = &bitmap.bits else { return Ok(bitmap.clone()) };
            let (now, wanted) = (bits.to_bitmap(), bitmap.entry.bitmap.bits(size));
            if wanted > BITS_MOST {
                let what = format!("its bitmap {:?} would have more than {BITS_MOST} bits", bitmap.entry.bitmap.name);
                return Err(self.context.unsupported(what));
            }
            Ok(Tracked { bits: Some(Arc::new(resized(&now, wanted).into())), ..bitmap.clone() })
        };
        let bitmaps = self.bitmaps.read().clone();
        self.admit(&bitmaps, size, None)?;
        bitmaps.iter().map(longer).collect::<Result<Vec<_>, _>>()?;
        drop(bitmaps);
        // What is stored has the bits of the old length.
        mark_in_use(&**self.context.file(), &self.header.now(), |_| true).await?;
        let mut bitmaps = self.bitmaps.write();
        let grown = bitmaps.iter().map(longer).collect::<Result<_, _>>()?;
        self.replace(&mut bitmaps, grown);
        Ok(())
    }
}

/// The bits of a disk that has another length.
pub(super) fn resized(bits: &PageBitmap, wanted: u64) -> PageBitmap {
    let mut resized = PageBitmap::new(wanted);
    for run in bits.runs_in(PageRange::new(PageNumber(0), PageNumber(wanted))) {
        resized.set_range(run);
    }
    resized
}
