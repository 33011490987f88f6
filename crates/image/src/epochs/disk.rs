//! The disk that a VM has while it is protected.
//!
//! Law: a write is in the index, and so in the open epoch, before it is answered; and its bytes are in the log before.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::future::{join_all, try_join_all};
use limosa_page::{to_u64, to_usize};
use limosa_storage::IoVector;
use parking_lot::MutexGuard;

use super::format::{Contents, Stage};
use super::log::Stored;
use super::protection::{EXTENTS_MAX, Protection, State};
use super::space::{Allocation, Segment};
use crate::bitmap::{BitmapAction, BitmapBits, DirtyBitmap};
use crate::disk::{BlockStatus, Disk, MapEntry, Pending};
use crate::error::ImageError;
use crate::offset::GuestOffset;
use crate::requests::Inside;

/// An image whose writes belong to epochs: see the [module](super).
#[derive(Debug)]
pub struct EpochDisk(pub(super) Protection);

/// A write in flight.
struct Write<'a> {
    protection: &'a Protection,
    segments: Vec<Arc<Segment>>,
}

impl Drop for Write<'_> {
    fn drop(&mut self) {
        if !self.segments.is_empty() {
            // It was given up, and the storage may still write there.
            self.protection.state.lock().lost.append(&mut self.segments);
        }
        self.protection.writing.fetch_sub(1, Ordering::SeqCst);
    }
}

impl EpochDisk {
    fn unsupported<T>(&self, what: &str) -> Result<T, ImageError> {
        Err(ImageError::Unsupported { image: Arc::clone(self.name()), what: what.to_owned() })
    }

    fn admit(&self, at: GuestOffset, wanted: u64) -> Result<(Inside<'_>, Range<u64>), ImageError> {
        let Some(inside) = self.0.requests.enter() else { return self.unsupported("it has been closed") };
        let length = self.len();
        match at.0.checked_add(wanted) {
            Some(end) if end <= length => Ok((inside, at.0..end)),
            _ => Err(ImageError::PastEnd { image: Arc::clone(self.name()), length, at, wanted }),
        }
    }

    /// The state, if the VM is served.
    fn state(&self) -> Result<MutexGuard<'_, State>, ImageError> {
        let state = self.0.state.lock();
        match state.stage {
            Stage::Open => Ok(state),
            Stage::Dropped => self.unsupported("what the VM wrote was dropped, and it is not served any more"),
            Stage::Ended => self.unsupported("its protection has ended"),
        }
    }

    /// The state, if it has room for `more` ranges.
    fn state_with_room(&self, range: &Range<u64>, more: usize) -> Result<MutexGuard<'_, State>, ImageError> {
        let state = self.state()?;
        if state.extents().saturating_add(more) > EXTENTS_MAX {
            return Err(self.0.no_room(range.end - range.start));
        }
        Ok(state)
    }

    async fn write_now(&self, range: Range<u64>, from: IoVector) -> Result<(), ImageError> {
        let length = range.end - range.start;
        drop(self.state_with_room(&range, 1)?);
        self.0.writing.fetch_add(1, Ordering::SeqCst);
        let mut write = Write { protection: &self.0, segments: Vec::new() };
        let places = self.0.space.allocate(length).ok_or_else(|| self.0.no_room(length))?;
        write.segments = places.iter().map(|place| Arc::clone(&place.segment)).collect();
        let mut begin = 0;
        let parts = places.iter().map(|place| {
            let part = from.slice(begin..begin + to_usize(place.length));
            begin += to_usize(place.length);
            self.0.log.storage.write(place.at, part)
        });
        // All of them, so that none is in flight when one has failed.
        let written = join_all(parts).await;
        write.segments.clear();
        written.into_iter().collect::<Result<(), _>>()?;
        let mut state = self.state_with_room(&range, places.len())?;
        let (epoch, mut start) = (state.open, range.start);
        for Allocation { at, length, segment } in places {
            let stored = Stored { contents: Contents::Written(at), epoch, segment: Some(segment) };
            state.put(start..start + length, stored);
            start += length;
        }
        // Before the lock is: who seals sees a write that is in flight, or its bytes.
        drop(write);
        drop(state);
        Ok(())
    }

    fn zero_now(&self, range: Range<u64>, unmap: bool) -> Result<(), ImageError> {
        let mut state = self.state_with_room(&range, 1)?;
        let epoch = state.open;
        state.put(range, Stored { contents: Contents::Zero { unmap }, epoch, segment: None });
        Ok(())
    }

    async fn read_now(&self, range: Range<u64>, into: IoVector) -> Result<(), ImageError> {
        // Their segments stay until they are read.
        let parts = self.state()?.current.parts(range.clone());
        let reads = parts.iter().map(|(part, stored)| {
            let into = into.slice(to_usize(part.start - range.start)..to_usize(part.end - range.start));
            async move {
                match stored.as_ref().map(|stored| stored.contents) {
                    None => self.0.image.read(GuestOffset(part.start), into).await,
                    Some(Contents::Zero { .. }) => {
                        into.clear();
                        Ok(())
                    }
                    Some(Contents::Written(at)) => Ok(self.0.log.storage.read(at, into).await?),
                }
            }
        });
        try_join_all(reads).await.map(drop)
    }

    async fn map_now(&self, range: Range<u64>) -> Result<MapEntry, ImageError> {
        let (length, stored) = self.state()?.current.first(&range);
        Ok(match stored.map(|stored| stored.contents) {
            Some(Contents::Written(_)) => MapEntry::new(length, BlockStatus::Data),
            Some(Contents::Zero { .. }) => MapEntry::new(length, BlockStatus::Zero),
            // Without its place: it may be written there before that is read.
            None => self.0.image.map(GuestOffset(range.start), length).await?.host(None),
        })
    }
}

impl State {
    fn put(&mut self, range: Range<u64>, stored: Stored) {
        self.writes.insert(range.clone(), stored.clone());
        self.current.insert(range, stored);
    }
}

impl Disk for EpochDisk {
    fn name(&self) -> &Arc<str> {
        self.0.image.name()
    }

    fn format(&self) -> &'static str {
        self.0.image.format()
    }

    fn len(&self) -> u64 {
        self.0.image.len()
    }

    fn is_read_only(&self) -> bool {
        self.0.image.is_read_only()
    }

    fn allocation_unit(&self) -> u64 {
        self.0.image.allocation_unit()
    }

    fn read(&self, at: GuestOffset, into: IoVector) -> Pending<'_> {
        Box::pin(async move {
            let (_inside, range) = self.admit(at, to_u64(into.len()))?;
            self.read_now(range, into).await
        })
    }

    fn write(&self, at: GuestOffset, from: IoVector) -> Pending<'_> {
        Box::pin(async move {
            let (_inside, range) = self.admit(at, to_u64(from.len()))?;
            self.write_now(range, from).await
        })
    }

    fn write_zeroes(&self, at: GuestOffset, length: u64, unmap: bool) -> Pending<'_> {
        Box::pin(async move {
            let (_inside, range) = self.admit(at, length)?;
            self.zero_now(range, unmap)
        })
    }

    fn write_zeroes_fast(&self, at: GuestOffset, length: u64, unmap: bool) -> Pending<'_, bool> {
        Box::pin(async move { self.write_zeroes(at, length, unmap).await.map(|()| true) })
    }

    fn discard(&self, at: GuestOffset, length: u64) -> Pending<'_> {
        Box::pin(async move {
            let (_inside, range) = self.admit(at, length)?;
            let unit = self.allocation_unit().max(1);
            let end = if range.end == self.len() { range.end } else { range.end - range.end % unit };
            let whole = range.start.next_multiple_of(unit)..end;
            if whole.is_empty() { Ok(()) } else { self.zero_now(whole, true) }
        })
    }

    /// Succeeds at once: after a failure of the host the VM is as of a checkpoint, too, and its disk as of the same.
    fn flush(&self) -> Pending<'_> {
        Box::pin(async move { self.state().map(drop) })
    }

    fn map(&self, at: GuestOffset, length: u64) -> Pending<'_, MapEntry> {
        Box::pin(async move {
            let (_inside, range) = self.admit(at, length.max(1).min(self.len().saturating_sub(at.0).max(1)))?;
            self.map_now(range).await
        })
    }

    fn grow(&self, _size: u64) -> Pending<'_> {
        Box::pin(async { self.unsupported("its length is fixed while it is protected") })
    }

    fn bitmaps(&self) -> Pending<'_, Vec<DirtyBitmap>> {
        self.0.image.bitmaps()
    }

    fn dirty_run(&self, bitmap: &str, at: GuestOffset, length: u64) -> Result<(bool, u64), ImageError> {
        self.0.image.dirty_run(bitmap, at, length)
    }

    fn bitmap_bits(&self, bitmap: &str) -> Result<BitmapBits, ImageError> {
        self.0.image.bitmap_bits(bitmap)
    }

    fn change_bitmaps(&self, _changes: &[(String, BitmapAction)]) -> Pending<'_> {
        Box::pin(async { self.unsupported("its bitmaps do not change while it is protected") })
    }

    /// Brings kept epochs to the image and closes that. The open epoch and sealed ones are not kept.
    fn close(&self) -> Pending<'_> {
        Box::pin(async move {
            self.0.requests.close();
            self.0.requests.over().await;
            let merged = self.merge().await;
            let closed = self.0.image.close().await;
            merged.map_err(|error| match error {
                super::EpochError::Image(error) => error,
                error => ImageError::Unsupported { image: Arc::clone(self.name()), what: error.to_string() },
            })?;
            closed
        })
    }

    fn unlock(&self) {
        self.0.image.unlock();
        self.0.log.storage.unlock();
    }
}
