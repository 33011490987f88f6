//! A storage without contents.

use std::ops::Range;
use std::sync::Arc;

use crate::buffer::{Buffer, IoVector};
use crate::error::{Operation, StorageError};
use crate::storage::{Alignment, Extent, ExtentKind, Request, Storage, ZeroOptions};

/// A length, and nothing behind it: writes are lost, reads return zeros. For measuring what is above a storage.
#[derive(Debug, Clone)]
pub struct NullStorage {
    name: Arc<str>,
    length: u64,
    zeroes: bool,
}

impl NullStorage {
    /// A storage of `length` bytes. Unless it `zeroes`, it does not say that it reads as zeros, so all of it is read.
    #[must_use]
    pub fn new(name: impl Into<Arc<str>>, length: u64, zeroes: bool) -> Self {
        Self { name: name.into(), length, zeroes }
    }

    fn change(&self, operation: Operation, range: &Range<u64>) -> Request {
        let length = range.end.saturating_sub(range.start);
        let full = || {
            let full = std::io::ErrorKind::StorageFull;
            StorageError::for_request(operation, &self.name, range.start, length, full)
        };
        ready(if range.end <= self.length { Ok(()) } else { Err(full()) })
    }
}

fn ready<T: Send + 'static>(result: Result<T, StorageError>) -> Request<T> {
    Box::pin(std::future::ready(result))
}

impl Storage for NullStorage {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn length(&self) -> Result<u64, StorageError> {
        Ok(self.length)
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    fn read(&self, _offset: u64, into: IoVector) -> Request {
        into.buffers().iter().for_each(Buffer::clear);
        ready(Ok(()))
    }

    fn write(&self, offset: u64, from: IoVector) -> Request {
        self.change(Operation::Write, &(offset..offset.saturating_add(from.len() as u64)))
    }

    fn write_zeroes(&self, range: Range<u64>, _how: ZeroOptions) -> Request {
        self.change(Operation::WriteZeroes, &range)
    }

    fn discard(&self, _range: Range<u64>) -> Request {
        ready(Ok(()))
    }

    fn flush(&self) -> Request {
        ready(Ok(()))
    }

    fn set_len(&self, len: u64) -> Request {
        self.change(Operation::SetLength, &(0..len))
    }

    fn allocate(&self, range: Range<u64>) -> Request {
        self.change(Operation::Allocate, &range)
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError> {
        let end = self.length.clamp(range.start, range.end.max(range.start));
        let kind = if self.zeroes { ExtentKind::Hole } else { ExtentKind::Data };
        let mut found = vec![Extent::new(range.start..end, kind), Extent::new(end..range.end, ExtentKind::Hole)];
        if self.zeroes {
            found = vec![Extent::new(range, ExtentKind::Hole)];
        }
        found.retain(|extent| !extent.range.is_empty());
        Ok(found)
    }

    fn clone_range(&self, _offset: u64, _from: &Arc<dyn Storage>, _from_offset: u64, _length: u64) -> Request<bool> {
        ready(Ok(false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_on;

    #[test]
    fn writes_are_lost_and_its_length_is_fixed() {
        let storage = NullStorage::new("null", 8192, false);
        block_on(storage.write(0, Buffer::from_slice(&[1; 8192]).into())).unwrap();
        let found = Buffer::from_slice(&[2; 16]);
        block_on(storage.read(8190, found.clone().into())).unwrap();
        assert!(found.is_zero());
        assert!(block_on(storage.write(8191, Buffer::zeroed(2).into())).is_err());
        assert!(block_on(storage.set_len(8193)).is_err());
        let kinds = |storage: &NullStorage| {
            let extents = storage.extents(4096..12288).unwrap();
            extents.into_iter().map(|extent| (extent.range, extent.kind)).collect::<Vec<_>>()
        };
        assert_eq!(kinds(&storage), [(4096..8192, ExtentKind::Data), (8192..12288, ExtentKind::Hole)]);
        assert_eq!(kinds(&NullStorage::new("null", 8192, true)), [(4096..12288, ExtentKind::Hole)]);
    }
}
