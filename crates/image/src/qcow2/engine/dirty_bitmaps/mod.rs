//! The persistent bitmaps of an image in use, which follow what is written.
//!
//! Law: a bit is set when a request that may have changed its bytes is over, failed or dropped, and before its caller
//! learns of it. So whoever reads bits and then contents misses nothing: what changes later sets its bit later. What a
//! dropped request may still change after that has its bits set again by every change of bitmaps.
//!
//! A bitmap whose bits may differ from what is stored of it is marked as in use, durably, before they do; when the
//! image is closed it is stored, and then the mark is taken away. What a kill or a power cut leaves is marked, and not
//! relied on.

mod change;
mod store;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use limosa_page::{AtomicPageBitmap, PageBitmap, PageNumber, PageRange};

use super::allocator::Allocator;
use super::context::Context;
use super::header_owner::HeaderOwner;
use super::locks::{Rank, RankedRwLock};
use crate::bitmap::{BitmapBits, DirtyBitmap};
use crate::error::ImageError;
use crate::offset::GuestOffset;
use crate::qcow2::format::bitmap_directory::{BITS_MOST, BYTES_MOST, Bitmap, Entry, entries};
use crate::qcow2::format::header::Header;
use crate::qcow2::offline::bitmaps::bits::{has_its_length, load, space};
use crate::qcow2::offline::bitmaps::{no_bitmap, usable};
use crate::qcow2::offline::check::extend::are_counted_once;

/// The most bytes of all bitmaps of an image in memory: those of the largest one that there can be. Bitmaps that need
/// more are left alone, and stay in use if they had to follow the disk.
const MEMORY_MOST: u64 = BYTES_MOST;

pub(super) struct DirtyBitmaps {
    context: Arc<Context>,
    header: Arc<HeaderOwner>,
    allocator: Arc<Allocator>,
    /// Whether one of them is enabled: if none is, requests take no lock.
    any_enabled: AtomicBool,
    bitmaps: RankedRwLock<Vec<Tracked>>,
}

/// A bitmap, and the entry that it gets in the directory.
#[derive(Clone)]
struct Tracked {
    entry: Entry,
    /// `None`: they cannot be relied on, and are left alone.
    bits: Option<Arc<AtomicPageBitmap>>,
    /// Its mark as in use is durable, of what is stored under its name if anything is.
    is_marked: bool,
}

/// A request that changes bytes: its bits are set when it is over, or dropped.
#[must_use]
pub(super) struct Marking<'a> {
    bitmaps: &'a DirtyBitmaps,
    at: GuestOffset,
    length: u64,
}

impl DirtyBitmaps {
    /// Of an image that is opened. None are loaded yet.
    pub(super) fn new(context: Arc<Context>, header: Arc<HeaderOwner>, allocator: Arc<Allocator>) -> Self {
        let (any_enabled, bitmaps) = (AtomicBool::new(false), Rank::DirtyBitmaps.rw_lock(Vec::new()));
        Self { context, header, allocator, any_enabled, bitmaps }
    }

    /// Reads what is stored of them. Of an image that can be written, nothing else gets their clusters from now on.
    ///
    /// # Errors
    /// [`ImageError::Corrupt`]: their directory cannot be; what the storage says.
    pub(super) async fn load(&self) -> Result<(), ImageError> {
        let (file, header) = (&**self.context.file(), self.header.now());
        let mut room = MEMORY_MOST;
        let (mut found, mut damaged) = (Vec::new(), Vec::new());
        for entry in entries(file, &header).await? {
            let bytes = PageBitmap::byte_len(entry.bitmap.bits(header.size));
            let mut bits = None;
            if usable(file.name(), &entry).is_ok() && bytes <= room {
                // A damaged one takes it as well, so that a hostile image has no more read than the bits of `MEMORY_MOST`.
                room -= bytes;
                match self.load_one(&header, &entry.bitmap).await {
                    Ok(loaded) => bits = Some(Arc::new(loaded.into())),
                    Err(error @ ImageError::Corrupt { .. }) => damaged.push(error),
                    Err(error) => return Err(error),
                }
            }
            found.push(Tracked { entry, bits, is_marked: false });
        }
        if let Some(first) = damaged.first() {
            let (image, bitmaps) = (&**file.name(), damaged.len());
            tracing::warn!(image, bitmaps, %first, "damaged bitmaps are left alone: they can only be removed");
        }
        self.replace(&mut self.bitmaps.write(), found);
        Ok(())
    }

    async fn load_one(&self, header: &Header, bitmap: &Bitmap) -> Result<PageBitmap, ImageError> {
        let file = &**self.context.file();
        if !self.context.is_read_only() {
            has_its_length(file, header, bitmap)?;
            let runs = space(file, header, bitmap).await?;
            if !are_counted_once(file, header, &runs).await? || !self.allocator.take_for_bitmap(&runs) {
                let table = format!("bitmap {:?}, whose table is at {}", bitmap.name, bitmap.table.0);
                return Err(self.context.corrupt(table, "something else may have its clusters, too"));
            }
        }
        // Last, since it reads the most.
        load(file, header, bitmap).await
    }

    /// Replaces all of them.
    fn replace(&self, bitmaps: &mut Vec<Tracked>, by: Vec<Tracked>) {
        let any = by.iter().any(|bitmap| bitmap.enabled().is_some());
        *bitmaps = by;
        self.any_enabled.store(any, Ordering::Release);
    }

    /// Whether there are any that were loaded.
    pub(super) fn are_loaded(&self) -> bool {
        !self.bitmaps.read().is_empty()
    }

    /// Has the bits of a range set when what is returned is dropped.
    pub(super) const fn marking(&self, at: GuestOffset, length: u64) -> Marking<'_> {
        Marking { bitmaps: self, at, length }
    }

    fn mark(&self, at: GuestOffset, length: u64) {
        if length == 0 || !self.any_enabled.load(Ordering::Acquire) {
            return;
        }
        for bitmap in self.bitmaps.read().iter() {
            if let Some(bits) = bitmap.enabled() {
                bits.set_range(bitmap.entry.bitmap.range(at.0, length));
            }
        }
    }

    /// All of them.
    pub(super) fn all(&self) -> Vec<DirtyBitmap> {
        let bitmaps = self.bitmaps.read();
        let public = |Tracked { entry, bits, .. }: &Tracked| DirtyBitmap {
            name: entry.bitmap.name.clone(),
            granularity: 1 << entry.bitmap.granularity_bits,
            enabled: entry.bitmap.auto,
            set: bits.as_ref().map(|bits| bits.count()),
        };
        bitmaps.iter().map(public).collect()
    }

    /// Whether the bytes from `at` on are dirty, and how many of `length` bytes, at least one, are so as well.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: there is no such bitmap, or it cannot be relied on.
    pub(super) fn run(&self, name: &str, at: GuestOffset, length: u64) -> Result<(bool, u64), ImageError> {
        let bitmaps = self.bitmaps.read();
        let (bitmap, bits) = self.usable_one(&bitmaps, name)?;
        let range = bitmap.range(at.0, length.max(1));
        // Looked at once: a bit that is set meanwhile would be neither clear nor the end of what is clear.
        let set = bits.next_set_in(range);
        let dirty = set == Some(range.start);
        let next = if dirty { bits.next_clear_in(range) } else { set };
        let end = next.map_or(u64::MAX, |next| next.0 << bitmap.granularity_bits);
        Ok((dirty, end.saturating_sub(at.0).clamp(1, length.max(1))))
    }

    /// The bits of a bitmap.
    ///
    /// # Errors
    /// As of [`run`](Self::run).
    pub(super) fn bits(&self, name: &str) -> Result<BitmapBits, ImageError> {
        self.bits_of(&self.bitmaps.read(), name)
    }

    /// A copy of the bits of one of these bitmaps.
    fn bits_of(&self, bitmaps: &[Tracked], name: &str) -> Result<BitmapBits, ImageError> {
        let (bitmap, bits) = self.usable_one(bitmaps, name)?;
        Ok(BitmapBits { granularity_bits: bitmap.granularity_bits, bits: bits.to_bitmap() })
    }

    /// The one of this name, and its bits.
    fn usable_one<'b>(
        &self,
        bitmaps: &'b [Tracked],
        name: &str,
    ) -> Result<(&'b Bitmap, &'b AtomicPageBitmap), ImageError> {
        let found = bitmaps.iter().find(|bitmap| bitmap.entry.is_named(name));
        let Tracked { entry, bits, .. } = found.ok_or_else(|| no_bitmap(self.context.name(), name))?;
        Ok((&entry.bitmap, bits.as_deref().ok_or_else(|| self.unusable(entry))?))
    }

    /// Why a bitmap cannot be used whose bits are not there.
    fn unusable(&self, entry: &Entry) -> ImageError {
        let image = self.context.name();
        usable(image, entry).err().unwrap_or_else(|| {
            let what = format!("bitmap {:?} cannot be read, or is too large to be kept in memory", entry.bitmap.name);
            ImageError::Unsupported { image: Arc::clone(image), what }
        })
    }
}

impl Tracked {
    /// The bits, of one that follows the disk.
    fn enabled(&self) -> Option<&AtomicPageBitmap> {
        self.bits.as_deref().filter(|_| self.entry.bitmap.auto)
    }
}

impl Bitmap {
    /// The bits about a range of bytes.
    const fn range(&self, at: u64, length: u64) -> PageRange {
        let bits = self.granularity_bits;
        PageRange::new(PageNumber(at >> bits), PageNumber(at.saturating_add(length).div_ceil(1 << bits)))
    }
}

impl Drop for Marking<'_> {
    fn drop(&mut self) {
        self.bitmaps.mark(self.at, self.length);
    }
}
