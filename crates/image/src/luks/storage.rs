//! A storage whose contents are encrypted in another one.
//!
//! Law: plain contents never reach the storage below. They are encrypted in a buffer of our own: a guest's memory is
//! only read. What is read is decrypted piece by piece in memory of our own, too, because a guest may write to its
//! memory meanwhile.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use limosa_page::to_usize;
use limosa_storage::{
    Alignment, Buffer, Extent, ExtentKind, IoVector, Operation, Request, Storage, StorageError, UnitLocks, ZeroOptions,
};

use super::cipher::{SECTOR, SectorCipher};

/// Bytes of a sector, as a number of offsets.
const BYTES: u64 = SECTOR as u64;
/// Bytes that are decrypted at once.
const PIECE: usize = 4096;
/// Bytes of zeros that are encrypted and written at once.
const ZEROS: u64 = 1 << 20;

/// The plain contents of a storage from an offset on.
#[derive(Clone)]
pub struct EncryptedStorage {
    inner: Arc<Inner>,
    /// Held weakly by the requests in it.
    locks: Arc<UnitLocks>,
}

struct Inner {
    below: Arc<dyn Storage>,
    cipher: Arc<SectorCipher>,
    /// Offset of the contents in the storage below.
    base: u64,
    /// The number of the sector at `base`.
    first: u64,
    /// The file that has the header, if it is another one: it is not changed while the contents are in use.
    header: Option<Arc<dyn Storage>>,
}

impl fmt::Debug for EncryptedStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EncryptedStorage({})", self.inner.below.name())
    }
}

impl EncryptedStorage {
    /// The contents of `below` from `base` on, whole sectors. The sector at `base` has the number 0.
    #[must_use]
    pub fn new(below: Arc<dyn Storage>, cipher: impl Into<Arc<SectorCipher>>, base: u64) -> Self {
        Self::numbered(below, cipher, base, 0)
    }

    /// As [`new`](Self::new), with another number for the sector at `base`. The number after the last one is 0.
    pub(crate) fn numbered(
        below: Arc<dyn Storage>,
        cipher: impl Into<Arc<SectorCipher>>,
        base: u64,
        first: u64,
    ) -> Self {
        Self::of(Inner { below, cipher: cipher.into(), base, first, header: None })
    }

    /// As [`new`](Self::new), with the file of the header, which stays open as long as this.
    pub(crate) fn with_header(
        below: Arc<dyn Storage>,
        cipher: impl Into<Arc<SectorCipher>>,
        base: u64,
        header: Arc<dyn Storage>,
    ) -> Self {
        Self::of(Inner { below, cipher: cipher.into(), base, first: 0, header: Some(header) })
    }

    fn of(inner: Inner) -> Self {
        Self { inner: Arc::new(inner), locks: Arc::default() }
    }

    async fn read_range(self, offset: u64, into: IoVector) -> Result<(), StorageError> {
        let range = self.inner.range(Operation::Read, offset, into.len() as u64)?;
        if range.is_empty() {
            return Ok(());
        }
        let _reading = self.locks.read(sectors(&range)).await;
        self.inner.read_sectors(&range, into).await
    }

    async fn write_range(self, offset: u64, from: IoVector) -> Result<(), StorageError> {
        let Self { inner, locks } = self;
        let range = inner.range(Operation::Write, offset, from.len() as u64)?;
        let touched = sectors(&range);
        if range.is_empty() {
            return Ok(());
        }
        let is_partial = !(range.start.is_multiple_of(BYTES) && range.end.is_multiple_of(BYTES));
        let write = Box::pin(async move { inner.write_sectors(&range, from, is_partial).await });
        locks.write(touched, is_partial, write).await
    }

    /// Writes zeros, in pieces.
    async fn zero(self, range: Range<u64>) -> Result<(), StorageError> {
        let zeros = Buffer::zeroed(to_usize(range.end.saturating_sub(range.start).min(ZEROS)));
        let mut at = range.start;
        while at < range.end {
            // Up to whole sectors, so that only the ends of the range are parts of some.
            let until = (at / BYTES * BYTES).saturating_add(ZEROS).min(range.end);
            self.clone().write_range(at, zeros.slice(0..to_usize(until - at)).into()).await?;
            at = until;
        }
        Ok(())
    }
}

/// The sectors that a range touches.
fn sectors(range: &Range<u64>) -> Range<u64> {
    range.start / BYTES..range.end.div_ceil(BYTES)
}

impl Inner {
    fn past_end(&self, operation: Operation, offset: u64, length: u64) -> StorageError {
        StorageError::for_request(operation, self.below.name(), offset, length, io::ErrorKind::InvalidInput)
    }

    /// The range of a request.
    fn range(&self, operation: Operation, offset: u64, length: u64) -> Result<Range<u64>, StorageError> {
        let end = offset
            .checked_add(length)
            .filter(|end| end.checked_next_multiple_of(BYTES).and_then(|end| end.checked_add(self.base)).is_some());
        end.map(|end| offset..end).ok_or_else(|| self.past_end(operation, offset, length))
    }

    /// Reads a range, with the rest of its first and its last sector.
    async fn read_sectors(&self, range: &Range<u64>, into: IoVector) -> Result<(), StorageError> {
        let touched = sectors(range);
        let mut all = IoVector::new();
        all.push(Buffer::zeroed(to_usize(range.start - touched.start * BYTES)));
        all.append(into);
        all.push(Buffer::zeroed(to_usize(touched.end * BYTES - range.end)));
        self.below.read(self.base + touched.start * BYTES, all.clone()).await?;
        // Sectors past the end are zeros below, and here. No encrypted sector is all zeros.
        let mut whole = all.len();
        if all.slice(whole.saturating_sub(SECTOR)..whole).is_zero() {
            let there = self.below.length()?.saturating_sub(self.base).div_ceil(BYTES);
            whole = whole.min(to_usize(there.saturating_sub(touched.start)).saturating_mul(SECTOR));
            all.slice(whole..all.len()).clear();
        }
        self.each_piece(touched.start, &all.slice(0..whole), &all, |sector, bytes| self.cipher.decrypt(sector, bytes));
        Ok(())
    }

    /// Passes the bytes of `from` through `change`, piece by piece, to the same places of `into`. They begin `sector`
    /// sectors after `base`; `change` gets the numbers that the cipher has for them.
    fn each_piece(&self, sector: u64, from: &IoVector, into: &IoVector, change: impl Fn(u64, &mut [u8])) {
        let mut piece = [0; PIECE];
        let (mut source, mut target) = (Cursor::new(from), Cursor::new(into));
        let (mut sector, mut left) = (self.first.wrapping_add(sector), from.len());
        while left > 0 {
            let length = left.min(PIECE);
            let Some(bytes) = piece.get_mut(..length) else { return };
            source.each(length, |buffer, at, done, length| {
                if let Some(bytes) = bytes.get_mut(done..done + length) {
                    buffer.copy_to(at, bytes);
                }
            });
            change(sector, bytes);
            target.each(length, |buffer, at, done, length| {
                if let Some(bytes) = bytes.get(done..done + length) {
                    buffer.copy_from(at, bytes);
                }
            });
            sector = sector.wrapping_add((length / SECTOR) as u64);
            left -= length;
        }
    }

    async fn write_sectors(&self, range: &Range<u64>, from: IoVector, is_partial: bool) -> Result<(), StorageError> {
        let first = sectors(range).start;
        let all = if is_partial { self.filled_up(range, from).await? } else { from };
        let encrypted = IoVector::from(Buffer::zeroed(all.len()));
        self.each_piece(first, &all, &encrypted, |sector, bytes| self.cipher.encrypt(sector, bytes));
        self.below.write(self.base + first * BYTES, encrypted).await
    }

    /// The bytes of a write with the rest of its first and its last sector.
    async fn filled_up(&self, range: &Range<u64>, from: IoVector) -> Result<IoVector, StorageError> {
        let touched = sectors(range);
        let (start, end) = (touched.start * BYTES, touched.end * BYTES);
        let [head, tail] = [(start, range.start), (range.end, end)]
            .map(|(start, end)| (start..end, Buffer::zeroed(to_usize(end - start))));
        for (part, buffer) in [&head, &tail] {
            if !part.is_empty() {
                self.read_sectors(part, buffer.clone().into()).await?;
            }
        }
        let mut all = IoVector::from(head.1);
        all.append(from);
        all.push(tail.1);
        Ok(all)
    }

    fn length(&self) -> Result<u64, StorageError> {
        Ok(self.below.length()?.saturating_sub(self.base))
    }
}

/// A place in a list of buffers.
struct Cursor<'a> {
    buffers: &'a [Buffer],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn new(vector: &'a IoVector) -> Self {
        Self { buffers: vector.buffers(), at: 0 }
    }

    /// Calls `visit` with the parts of buffers that the next `length` bytes are in: buffer, offset in it, bytes before
    /// this part, bytes of this part.
    fn each(&mut self, length: usize, mut visit: impl FnMut(&Buffer, usize, usize, usize)) {
        let mut done = 0;
        while done < length {
            let Some((first, rest)) = self.buffers.split_first() else { return };
            let part = (first.len() - self.at).min(length - done);
            visit(first, self.at, done, part);
            done += part;
            self.at += part;
            if self.at == first.len() {
                (self.buffers, self.at) = (rest, 0);
            }
        }
    }
}

impl Storage for EncryptedStorage {
    fn name(&self) -> &Arc<str> {
        self.inner.below.name()
    }

    fn length(&self) -> Result<u64, StorageError> {
        self.inner.length()
    }

    fn is_read_only(&self) -> bool {
        self.inner.below.is_read_only()
    }

    fn alignment(&self) -> Alignment {
        let below = self.inner.below.alignment();
        Alignment::new(below.offset.max(512), below.memory)
    }

    fn read(&self, offset: u64, into: IoVector) -> Request {
        Box::pin(self.clone().read_range(offset, into))
    }

    fn write(&self, offset: u64, from: IoVector) -> Request {
        Box::pin(self.clone().write_range(offset, from))
    }

    fn write_zeroes(&self, range: Range<u64>, how: ZeroOptions) -> Request {
        let this = self.clone();
        Box::pin(async move {
            if how.only_fast {
                let length = range.end.saturating_sub(range.start);
                let (operation, kind) = (Operation::WriteZeroes, io::ErrorKind::Unsupported);
                return Err(StorageError::for_request(operation, this.inner.below.name(), range.start, length, kind));
            }
            this.zero(range).await
        })
    }

    /// Changes nothing: what is discarded below would not read as zeros.
    fn discard(&self, _range: Range<u64>) -> Request {
        Box::pin(std::future::ready(Ok(())))
    }

    fn flush(&self) -> Request {
        let this = self.clone();
        Box::pin(async move {
            this.locks.finish().await;
            this.inner.below.flush().await
        })
    }

    fn set_len(&self, len: u64) -> Request {
        let this = self.clone();
        Box::pin(async move {
            let before = this.inner.length()?;
            let range = this.inner.range(Operation::SetLength, 0, len)?;
            this.inner.below.set_len(this.inner.base + range.end).await?;
            this.zero(before.min(len)..len).await
        })
    }

    fn allocate(&self, range: Range<u64>) -> Request {
        let this = self.clone();
        Box::pin(async move {
            let before = this.inner.length()?;
            let length = range.end.saturating_sub(range.start);
            let range = this.inner.range(Operation::Allocate, range.start, length)?;
            this.inner.below.allocate(this.inner.base + range.start..this.inner.base + range.end).await?;
            this.zero(before.min(range.end)..range.end).await
        })
    }

    fn prefetch(&self, ranges: &[Range<u64>]) {
        let base = self.inner.base;
        let below = |range: &Range<u64>| range.start.saturating_add(base)..range.end.saturating_add(base);
        self.inner.below.prefetch(&ranges.iter().map(below).collect::<Vec<_>>());
    }

    fn is_near(&self, range: &Range<u64>) -> bool {
        let base = self.inner.base;
        self.inner.below.is_near(&(range.start.saturating_add(base)..range.end.saturating_add(base)))
    }

    /// One volume has one key, which a header elsewhere may replace.
    fn content_id(&self) -> Option<String> {
        if self.inner.header.is_some() { None } else { self.inner.below.content_id() }
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError> {
        let end = self.inner.length()?;
        let all =
            [(range.start..range.end.min(end), ExtentKind::Data), (end.max(range.start)..range.end, ExtentKind::Hole)];
        let there = all.into_iter().filter(|(part, _)| part.start < part.end);
        Ok(there.map(|(part, kind)| Extent::new(part, kind)).collect())
    }

    fn clone_range(&self, _offset: u64, _from: &Arc<dyn Storage>, _from_offset: u64, _length: u64) -> Request<bool> {
        Box::pin(std::future::ready(Ok(false)))
    }

    fn unlock(&self) {
        self.inner.below.unlock();
        if let Some(header) = &self.inner.header {
            header.unlock();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;
    use limosa_storage::testing::{Failing, Fault};
    use limosa_storage::{MemoryStorage, block_on};
    use proptest::prelude::*;

    use super::super::{CipherAlgorithm, CipherMode, IvGenerator};
    use super::*;

    fn encrypted(below: Arc<dyn Storage>, base: u64) -> EncryptedStorage {
        let (cipher, mode, generator) = (CipherAlgorithm::Aes128, CipherMode::Xts, IvGenerator::Plain64);
        EncryptedStorage::new(below, SectorCipher::new(cipher, mode, generator, &[7; 32]).unwrap(), base)
    }

    fn found(storage: &EncryptedStorage, at: u64, length: usize) -> Vec<u8> {
        let found = Buffer::zeroed(length);
        block_on(storage.read(at, found.clone().into())).unwrap();
        found.to_vec()
    }

    proptest! {
        #[test]
        fn any_writes_read_back_and_nothing_plain_is_stored(
            writes in prop::collection::vec((0_u64..20_000, 1_usize..9000, any::<bool>()), 1..12),
            cut in 1_usize..4000,
        ) {
            let below = MemoryStorage::with_contents(vec![1; 4096], 1 << 20);
            let storage = encrypted(Arc::new(below.clone()), 4096);
            let mut model = Vec::new();
            for (value, (at, length, zero)) in (1_u8..).zip(writes) {
                let end = usize::try_from(at).unwrap() + length;
                model.resize(model.len().max(end.next_multiple_of(SECTOR)), 0);
                let bytes = if zero { vec![0; length] } else { vec![value; length] };
                model[end - length..end].copy_from_slice(&bytes);
                // What is between the end and the write is zeros, as of every storage.
                block_on(storage.set_len(model.len() as u64)).unwrap();
                let vector: IoVector = bytes.chunks(cut).map(Buffer::from_slice).collect();
                if zero {
                    block_on(storage.write_zeroes(at..end as u64, ZeroOptions::default())).unwrap();
                } else {
                    block_on(storage.write(at, vector)).unwrap();
                }
            }
            prop_assert_eq!(found(&storage, 0, model.len()), model.clone());
            for at in [1, 511, 512, 700] {
                prop_assert_eq!(&found(&storage, at as u64, 1500.min(model.len() - at.min(model.len())))[..], &model[at.min(model.len())..model.len().min(at + 1500)]);
            }
            prop_assert_eq!(found(&storage, model.len() as u64, 700), vec![0; 700]);
            let stored = below.contents();
            prop_assert_eq!(&stored[..4096], &[1; 4096][..]);
            prop_assert!(!stored[4096..].windows(64).any(|part| part.iter().all(|byte| *byte == part[0])));
        }
    }

    #[test]
    fn writes_to_parts_of_one_sector_at_the_same_time_lose_nothing() {
        for _ in 0..50 {
            let storage = encrypted(Arc::new(MemoryStorage::with_contents(vec![0; 2048], 1 << 20)), 0);
            std::thread::scope(|scope| {
                for part in 0..4_u8 {
                    let storage = &storage;
                    scope.spawn(move || {
                        let writes = (0..16_u64).map(|number| {
                            let at = number * 64 + u64::from(part) * 16;
                            storage.write(at, Buffer::from_slice(&[part + 1; 16]).into())
                        });
                        block_on(join_all(writes)).into_iter().for_each(Result::unwrap);
                    });
                }
            });
            let expected: Vec<u8> = (0..16).flat_map(|_| (1..5).flat_map(|part| [part; 16])).collect();
            assert_eq!(found(&storage, 0, 1024), expected);
        }
    }

    #[test]
    fn a_write_that_failed_is_in_nobodys_way() {
        let failing = Failing::only(&[Operation::Write]);
        let below = failing.wrap(Arc::new(MemoryStorage::with_contents(vec![0; 2048], 1 << 20)));
        let storage = encrypted(below, 0);
        failing.fail(0, 1, Fault::NoSpace);
        assert!(block_on(storage.write(3, Buffer::from_slice(b"abc").into())).is_err());
        block_on(storage.write(5, Buffer::from_slice(b"def").into())).unwrap();
        drop(storage.write(5, Buffer::from_slice(b"not begun").into()));
        block_on(storage.write(0, Buffer::from_slice(b"x").into())).unwrap();
        block_on(storage.flush()).unwrap();
        assert_eq!(found(&storage, 5, 3), b"def");
        assert!(block_on(storage.write(u64::MAX - 3, Buffer::from_slice(b"x").into())).is_err());
    }
}
