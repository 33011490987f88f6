//! Copy-on-write in parts: the plain twin of the merged one.
//!
//! Law: a first write to a part of a cluster is five operations, one after the other: the guest's bytes are written,
//! what is before them in the cluster is read from the backing image and written, and then what is behind them.
//! Everything else is the image's own work and the same for both twins: allocation, tables, flushes, the files and how
//! they are read and written. For that the image is opened without its backing image, so that to it a new cluster, on
//! space that proves zeros, is one write of the guest's bytes; the data below is read here. A second request to a
//! cluster waits for the first one.
//!
//! It takes what the loads ask for: writes and flushes, of an image that begins empty.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::lock::Mutex as Turn;
use limosa_image::qcow2::Qcow2;
use limosa_image::{Disk, GuestOffset, ImageError, MapEntry, Pending};
use limosa_page::to_usize;
use limosa_storage::{Buffer, IoVector};
use parking_lot::Mutex;

/// An image whose new clusters are filled in parts.
#[derive(Debug)]
pub(super) struct Split {
    image: Arc<Qcow2>,
    /// The data below clusters that the image does not have.
    backing: Option<Arc<dyn Disk>>,
    /// The clusters, or subclusters, that were written, by their numbers: whether they are filled. Held while they are
    /// being filled.
    units: Mutex<HashMap<u64, Arc<Turn<bool>>>>,
}

impl Split {
    /// Over a fresh image that was opened without its backing image.
    pub(super) fn new(image: Arc<Qcow2>, backing: Option<Arc<dyn Disk>>) -> Self {
        Self { image, backing, units: Mutex::default() }
    }

    fn unit(&self, number: u64) -> Arc<Turn<bool>> {
        let mut units = self.units.lock();
        Arc::clone(units.entry(number).or_default())
    }

    async fn write_parts(&self, at: u64, bytes: IoVector) -> Result<(), ImageError> {
        let (unit, end) = (self.image.allocation_unit(), at + bytes.len() as u64);
        let (first, last) = (at / unit, (end - 1) / unit);
        let units: Vec<_> = (first..=last).map(|number| self.unit(number)).collect();
        // In their order, so that two requests do not wait for each other.
        let mut held = Vec::with_capacity(units.len());
        for unit in &units {
            held.push(unit.lock().await);
        }
        let is_new = |filled: Option<&bool>| filled.is_some_and(|filled| !filled);
        let head = is_new(held.first().map(|held| &**held)).then_some(first * unit..at);
        let tail = is_new(held.last().map(|held| &**held)).then_some(end..(last + 1) * unit);
        self.image.write(GuestOffset(at), bytes).await?;
        for side in [head, tail].into_iter().flatten() {
            self.copy(side.start, side.end.min(self.image.len())).await?;
        }
        held.iter_mut().for_each(|held| **held = true);
        Ok(())
    }

    /// Writes what the backing image has there.
    async fn copy(&self, at: u64, end: u64) -> Result<(), ImageError> {
        let Some(backing) = self.backing.as_ref().filter(|_| at < end) else { return Ok(()) };
        let buffer = Buffer::zeroed(to_usize(end - at));
        let holds = backing.len().saturating_sub(at).min(end - at);
        let there = buffer.slice(0..to_usize(holds));
        backing.read(GuestOffset(at), there.into()).await?;
        self.image.write(GuestOffset(at), buffer.into()).await
    }

    fn refused<T: Send + 'static>(&self) -> Pending<'_, T> {
        let what = "split copy-on-write takes writes and flushes".to_owned();
        let error = ImageError::Unsupported { image: Arc::clone(self.image.name()), what };
        Box::pin(std::future::ready(Err(error)))
    }
}

impl Disk for Split {
    fn name(&self) -> &Arc<str> {
        self.image.name()
    }

    fn format(&self) -> &'static str {
        self.image.format()
    }

    fn len(&self) -> u64 {
        self.image.len()
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn allocation_unit(&self) -> u64 {
        self.image.allocation_unit()
    }

    fn read(&self, _: GuestOffset, _: IoVector) -> Pending<'_> {
        self.refused()
    }

    fn write(&self, at: GuestOffset, from: IoVector) -> Pending<'_> {
        Box::pin(async move { if from.is_empty() { Ok(()) } else { self.write_parts(at.0, from).await } })
    }

    fn write_zeroes(&self, _: GuestOffset, _: u64, _: bool) -> Pending<'_> {
        self.refused()
    }

    fn discard(&self, _: GuestOffset, _: u64) -> Pending<'_> {
        self.refused()
    }

    fn flush(&self) -> Pending<'_> {
        self.image.flush()
    }

    fn map(&self, _: GuestOffset, _: u64) -> Pending<'_, MapEntry> {
        self.refused()
    }

    fn close(&self) -> Pending<'_> {
        self.image.close()
    }
}

#[cfg(test)]
mod tests {
    use limosa_image::qcow2::{CreateOptions, Header, ImageParts, Qcow2Options, create};
    use limosa_image::raw::{Raw, RawOptions};
    use limosa_storage::testing::{RequestRecorder, SparseMemory};
    use limosa_storage::{Operation, Storage, block_on};

    use super::*;

    const K: u64 = 1 << 10;
    const SIZE: usize = 1 << 20;

    /// An image, opened over `below` or over nothing.
    fn opened(file: &Arc<dyn Storage>, backing: Option<Arc<dyn Disk>>) -> Arc<Qcow2> {
        let file = Arc::clone(file);
        let disk = block_on(async {
            let header = Header::read(&*file).await?;
            Qcow2::open(ImageParts::new(file, header).backing(backing), Qcow2Options::default()).await
        });
        disk.unwrap()
    }

    #[test]
    fn a_first_write_is_five_operations_and_leaves_what_the_merged_one_leaves() {
        let counting = RequestRecorder::new();
        let bytes: Vec<u8> = (0..SIZE).map(|at| (at / 7 % 251).to_le_bytes()[0]).collect();
        let below = counting.wrap(Arc::new(SparseMemory::file_with("below", bytes.clone(), 2 << 20)));
        let options = RawOptions::default().read_only(true);
        let below: Arc<dyn Disk> = Raw::open(below, &options).unwrap();
        let file = counting.wrap(Arc::new(SparseMemory::file("image", 16 << 20)));
        block_on(create(&*file, None, &CreateOptions::default().size(SIZE as u64))).unwrap();
        let disk = Split::new(opened(&file, None), Some(Arc::clone(&below)));
        let write = |at: u64, length: usize| {
            block_on(disk.write(GuestOffset(at), Buffer::from_slice(&vec![0xee; length]).into())).unwrap();
        };
        // The tables are there afterwards.
        write(960 * K, 64 << 10);
        counting.take();
        write(12 * K, 4 << 10);
        let seen = counting.take();
        let what = |number: usize| (&*seen[number].storage, seen[number].operation, seen[number].range.clone());
        let cluster = seen[0].range.start - 12 * K;
        let image =
            |range: std::ops::Range<u64>| ("image", Operation::Write, cluster + range.start..cluster + range.end);
        let expected = [
            image(12 * K..16 * K),
            ("below", Operation::Read, 0..12 * K),
            image(0..12 * K),
            ("below", Operation::Read, 16 * K..64 * K),
            image(16 * K..64 * K),
        ];
        assert_eq!((0..seen.len()).map(what).collect::<Vec<_>>(), expected);
        // A second one to the same cluster is one, and one over the end of a cluster fills both sides.
        write(20 * K, 4 << 10);
        assert_eq!(counting.take().len(), 1);
        write(126 * K, 4 << 10);
        block_on(disk.close()).unwrap();
        let mut expected = bytes;
        for (at, length) in [(960, 64), (12, 4), (20, 4), (126, 4)] {
            expected[at << 10..(at + length) << 10].fill(0xee);
        }
        let found = Buffer::zeroed(SIZE);
        block_on(opened(&file, Some(below)).read(GuestOffset(0), found.clone().into())).unwrap();
        assert!(found.to_vec() == expected);
    }
}
