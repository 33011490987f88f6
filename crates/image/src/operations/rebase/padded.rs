//! The old backing file of an overlay, as long as the overlay.
//!
//! Law: under an overlay there is a byte everywhere. Past the end of its backing file, and without one, an overlay
//! reads as zeros with no entry that says so; over a longer backing file it would read that file's bytes. Over this
//! disk a request for zeros always changes an entry.

use std::sync::Arc;

use limosa_page::to_usize;
use limosa_storage::{IoVector, Storage};

use crate::disk::{BlockStatus, Disk, MapEntry, Pending};
use crate::error::ImageError;
use crate::offset::GuestOffset;

/// A disk that is only read, with zeros up to its length.
#[derive(Debug)]
pub(super) struct Padded {
    name: Arc<str>,
    disk: Option<Arc<dyn Disk>>,
    length: u64,
}

impl Padded {
    /// `name`: what errors call it if there is no disk.
    pub(super) fn new(disk: Option<Arc<dyn Disk>>, name: &Arc<str>, length: u64) -> Self {
        let name = Arc::clone(disk.as_ref().map_or(name, |disk| disk.name()));
        Self { name, disk, length }
    }

    /// The disk, and how many of `length` bytes it has from `at` on, if it has any.
    fn inside(&self, at: GuestOffset, length: u64) -> Option<(&dyn Disk, u64)> {
        let disk = self.disk.as_deref().filter(|disk| at.0 < disk.len())?;
        Some((disk, length.min(disk.len() - at.0)))
    }

    fn refuse(&self) -> Pending<'_> {
        Box::pin(std::future::ready(Err(ImageError::ReadOnly { image: Arc::clone(&self.name) })))
    }
}

impl Disk for Padded {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn format(&self) -> &'static str {
        self.disk.as_ref().map_or("raw", |disk| disk.format())
    }

    fn len(&self) -> u64 {
        self.length
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn read(&self, at: GuestOffset, into: IoVector) -> Pending<'_> {
        let inside = self.inside(at, into.len() as u64);
        let has = to_usize(inside.map_or(0, |(_, has)| has));
        into.slice(has..into.len()).clear();
        match inside {
            Some((disk, _)) => disk.read(at, into.slice(0..has)),
            None => Box::pin(std::future::ready(Ok(()))),
        }
    }

    fn write(&self, _at: GuestOffset, _from: IoVector) -> Pending<'_> {
        self.refuse()
    }

    fn write_zeroes(&self, _at: GuestOffset, _length: u64, _unmap: bool) -> Pending<'_> {
        self.refuse()
    }

    fn discard(&self, _at: GuestOffset, _length: u64) -> Pending<'_> {
        self.refuse()
    }

    fn flush(&self) -> Pending<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn map(&self, at: GuestOffset, length: u64) -> Pending<'_, MapEntry> {
        match self.inside(at, length.max(1)) {
            Some((disk, has)) => disk.map(at, has),
            None => Box::pin(std::future::ready(Ok(MapEntry::new(length.max(1), BlockStatus::Unallocated)))),
        }
    }

    fn storage(&self, depth: u32) -> Option<Arc<dyn Storage>> {
        self.disk.as_ref()?.storage(depth)
    }

    fn close(&self) -> Pending<'_> {
        Box::pin(std::future::ready(Ok(())))
    }
}
