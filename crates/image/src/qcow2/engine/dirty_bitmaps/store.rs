//! Bitmaps that are stored when the image is closed.

use limosa_page::PageBitmap;

use super::change::resized;
use super::{DirtyBitmaps, ImageError, Tracked};
use crate::qcow2::format::bitmap_directory::{Bitmap, Entry, entries};
use crate::qcow2::format::header::Header;
use crate::qcow2::offline::bitmaps::rewrite::rewrite;
use crate::qcow2::offline::bitmaps::save::{Kept, save};

/// The bitmaps of an image that is closed.
#[derive(Default)]
struct Work {
    /// All bitmaps that the image will have, those that changed with their bits.
    kept: Vec<Kept>,
    /// Bitmaps as they are stored now, of those that were removed or changed.
    gone: Vec<Bitmap>,
    /// Whether entries of the directory change by more than flags.
    has_new_entries: bool,
}

impl DirtyBitmaps {
    /// Stores what is marked as in use, and takes the marks away, durably. Nothing else uses the image any more.
    ///
    /// # Errors
    /// [`ImageError::Corrupt`]: the table of one that changed cannot be; what the storage says. The first one is
    /// returned; bitmaps that are not stored stay marked.
    pub(in super::super) async fn store(&self) -> Result<(), ImageError> {
        let (file, mut header) = (&**self.context.file(), self.header.now());
        let bitmaps = std::mem::take(&mut *self.bitmaps.write());
        let work = Work::new(entries(file, &header).await?, bitmaps, &header);
        if work.has_new_entries {
            return save(file, &mut header, work.kept, &work.gone).await;
        }
        let mut stored = Ok(());
        for Kept { entry, bits } in work.kept {
            if let Some(bits) = bits {
                // One that cannot be stored costs no other.
                stored = stored.and(rewrite(file, &mut header, entry, &bits).await);
            }
        }
        stored
    }
}

impl Work {
    /// Compares what is in the file with what is in memory.
    fn new(stored: Vec<Entry>, mut bitmaps: Vec<Tracked>, header: &Header) -> Self {
        let mut work = Self::default();
        for entry in stored {
            let found = bitmaps.iter().position(|bitmap| bitmap.entry.has_name_of(&entry));
            match found.map(|number| bitmaps.remove(number)) {
                None => {
                    work.has_new_entries = true;
                    work.gone.push(entry.bitmap);
                }
                Some(Tracked { bits: Some(bits), entry: now, .. }) if entry.bitmap.in_use => {
                    work.again(&entry, now, &bits.to_bitmap(), header);
                }
                Some(_) => work.kept.push(Kept { entry, bits: None }),
            }
        }
        for Tracked { entry, bits, .. } in bitmaps {
            work.has_new_entries = true;
            let bits = bits.map(|bits| resized(&bits.to_bitmap(), entry.bitmap.bits(header.size)));
            work.kept.push(Kept { entry, bits });
        }
        work
    }

    /// One that is stored, and changed since.
    fn again(&mut self, stored: &Entry, mut now: Entry, bits: &PageBitmap, header: &Header) {
        let entries = now.bitmap.table_entries(header.size, &header.geometry());
        // One that was removed and added again has another entry.
        self.has_new_entries |= u64::from(stored.bitmap.table.1) != entries || now.at != stored.at;
        now.bitmap.table = stored.bitmap.table;
        let bits = Some(resized(bits, now.bitmap.bits(header.size)));
        self.kept.push(Kept { entry: now, bits });
        self.gone.push(stored.bitmap.clone());
    }
}
