//! A storage in memory.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use limosa_page::{broken_invariant, to_usize};
use parking_lot::Mutex;

use crate::buffer::IoVector;
use crate::error::{Operation, StorageError};
use crate::storage::{Alignment, Extent, ExtentKind, Request, Storage, ZeroOptions};

/// Bytes in memory. Writes make it longer, up to a limit; beyond it they fail with [`io::ErrorKind::StorageFull`].
#[derive(Debug, Clone)]
pub struct MemoryStorage {
    name: Arc<str>,
    bytes: Arc<Mutex<Vec<u8>>>,
    limit: u64,
}

/// Why a write cannot find it too short.
const ROOM: &str = "memory is as long as a write to it";

impl MemoryStorage {
    /// An empty storage, which can grow to `limit` bytes.
    #[must_use]
    pub fn growing_to(limit: u64) -> Self {
        Self { name: "memory".into(), bytes: Arc::default(), limit }
    }

    /// A storage with these contents, which can grow to `limit` bytes.
    #[must_use]
    pub fn with_contents(bytes: Vec<u8>, limit: u64) -> Self {
        Self { bytes: Arc::new(Mutex::new(bytes)), ..Self::growing_to(limit) }
    }

    /// A copy of all its bytes.
    #[must_use]
    pub fn contents(&self) -> Vec<u8> {
        self.bytes.lock().clone()
    }

    /// A range as indices. Lengthens `bytes` to its end; fails behind the limit.
    fn room(&self, bytes: &mut Vec<u8>, range: &Range<u64>) -> io::Result<Range<usize>> {
        if range.is_empty() {
            return Ok(0..0);
        }
        if range.end > self.limit {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let index = |at: u64| usize::try_from(at).map_err(io::Error::other);
        let range = index(range.start)?..index(range.end)?;
        if bytes.len() < range.end {
            bytes.resize(range.end, 0);
        }
        Ok(range)
    }

    fn write_now(&self, offset: u64, from: &IoVector) -> Result<(), StorageError> {
        let len = from.len() as u64;
        let failed = |error| StorageError::for_request(Operation::Write, &self.name, offset, len, error);
        let mut bytes = self.bytes.lock();
        let range = offset..offset.checked_add(len).ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        let room = self.room(&mut bytes, &range).map_err(failed)?;
        let mut place = bytes.as_mut_slice();
        split_off(&mut place, room.start).map_err(failed)?;
        for buffer in from.buffers() {
            buffer.copy_to(0, split_off(&mut place, buffer.len()).map_err(failed)?);
        }
        Ok(())
    }

    fn read_now(&self, offset: u64, into: &IoVector) {
        let bytes = self.bytes.lock();
        let start = to_usize(offset);
        // Behind the end are zeros.
        let got = bytes.get(start..).map_or(0, |rest| into.copy_from(0, rest));
        into.slice(got..into.len()).clear();
    }
}

/// Takes bytes that must be there off the front of `place`.
fn split_off<'b>(place: &mut &'b mut [u8], length: usize) -> io::Result<&'b mut [u8]> {
    place.split_off_mut(..length).ok_or_else(|| io::Error::other(broken_invariant(ROOM)))
}

fn ready<T: Send + 'static>(result: Result<T, StorageError>) -> Request<T> {
    Box::pin(std::future::ready(result))
}

impl Storage for MemoryStorage {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn length(&self) -> Result<u64, StorageError> {
        Ok(self.bytes.lock().len() as u64)
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn alignment(&self) -> Alignment {
        Alignment { offset: 1, memory: 1 }
    }

    fn read(&self, offset: u64, into: IoVector) -> Request {
        self.read_now(offset, &into);
        ready(Ok(()))
    }

    fn write(&self, offset: u64, from: IoVector) -> Request {
        ready(self.write_now(offset, &from))
    }

    fn write_zeroes(&self, range: Range<u64>, _how: ZeroOptions) -> Request {
        let length = range.end.saturating_sub(range.start);
        let mut bytes = self.bytes.lock();
        let room = self.room(&mut bytes, &range).map(|room| {
            if let Some(place) = bytes.get_mut(room) {
                place.fill(0);
            }
        });
        let failed = |error| StorageError::for_request(Operation::WriteZeroes, &self.name, range.start, length, error);
        ready(room.map_err(failed))
    }

    fn discard(&self, range: Range<u64>) -> Request {
        let range = range.start..range.end.min(self.bytes.lock().len() as u64);
        if range.is_empty() { ready(Ok(())) } else { self.write_zeroes(range, ZeroOptions::default()) }
    }

    fn flush(&self) -> Request {
        ready(Ok(()))
    }

    fn set_len(&self, len: u64) -> Request {
        let mut bytes = self.bytes.lock();
        let room = self.room(&mut bytes, &(0..len)).map(|room| bytes.truncate(room.end));
        ready(room.map_err(|error| StorageError::for_storage(Operation::SetLength, &self.name, error)))
    }

    fn allocate(&self, range: Range<u64>) -> Request {
        let room = self.room(&mut self.bytes.lock(), &range).map(drop);
        ready(room.map_err(|error| StorageError::for_storage(Operation::Allocate, &self.name, error)))
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError> {
        let end = (self.bytes.lock().len() as u64).clamp(range.start, range.end.max(range.start));
        let parts = [(range.start..end, ExtentKind::Data), (end..range.end, ExtentKind::Hole)];
        Ok(parts
            .into_iter()
            .filter(|(range, _)| !range.is_empty())
            .map(|(range, kind)| Extent { range, kind })
            .collect())
    }

    fn clone_range(&self, _offset: u64, _from: &Arc<dyn Storage>, _from_offset: u64, _length: u64) -> Request<bool> {
        ready(Ok(false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buffer, block_on};

    #[test]
    fn what_is_written_is_read_and_the_rest_is_zeros() {
        let storage = MemoryStorage::growing_to(1 << 20);
        block_on(storage.write(10, Buffer::from_slice(b"abc").into())).unwrap();
        let found = Buffer::from_slice(&[1; 8]);
        block_on(storage.read(8, found.clone().into())).unwrap();
        assert_eq!(found.to_vec(), b"\0\0abc\0\0\0");
        assert_eq!(storage.length().unwrap(), 13);
        let kinds: Vec<_> =
            storage.extents(0..20).unwrap().into_iter().map(|extent| (extent.range, extent.kind)).collect();
        assert_eq!(kinds, [(0..13, ExtentKind::Data), (13..20, ExtentKind::Hole)]);
    }

    #[test]
    fn there_is_no_space_behind_the_limit() {
        let storage = MemoryStorage::growing_to(16);
        let error = block_on(storage.write(14, Buffer::from_slice(b"abc").into())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(error.to_string(), "cannot write memory at 0xe (3 bytes)");
        assert!(block_on(storage.write(u64::MAX, Buffer::from_slice(b"abc").into())).is_err());
        assert!(block_on(storage.set_len(17)).is_err());
        assert_eq!(storage.length().unwrap(), 0);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "memory is as long as a write to it")]
    fn bytes_without_room_are_a_broken_invariant() {
        let mut place = &mut [0; 4][..];
        split_off(&mut place, 4).unwrap();
        let _ = split_off(&mut place, 1);
    }
}
