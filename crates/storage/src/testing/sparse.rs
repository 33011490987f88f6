//! A file or a block device in memory.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use limosa_page::to_usize;
use parking_lot::Mutex;

use super::chance::SeededRandom;
use super::{Call, memory_under};
use crate::buffer::IoVector;
use crate::error::StorageError;
use crate::storage::{Alignment, Extent, ExtentKind, Request, Storage, ZeroOptions};

/// Block size in bytes for allocating and freeing space, as in most filesystems.
const BLOCK: usize = 4096;

/// Bytes in memory that behave as a file does, with holes and unwritten extents, or as a block device, full of what was
/// there before. Requests are carried out by the call.
#[derive(Debug, Clone)]
pub struct SparseMemory {
    name: Arc<str>,
    state: Arc<Mutex<State>>,
    most: u64,
    device: bool,
    clones: bool,
    alignment: Alignment,
}

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    /// Kind of each block up to the end of `bytes`. Every block that is not data is zero.
    blocks: Vec<ExtentKind>,
}

impl SparseMemory {
    /// Creates an empty file that cannot grow beyond `most` bytes.
    #[must_use]
    pub fn file(name: &str, most: u64) -> Self {
        let alignment = Alignment { offset: 1, memory: 1 };
        Self { name: name.into(), state: Arc::default(), most, device: false, clones: false, alignment }
    }

    /// Creates a file with these contents; blocks of zeros are holes.
    #[must_use]
    pub fn file_with(name: &str, bytes: Vec<u8>, most: u64) -> Self {
        let kind = |block: &[u8]| if block.iter().all(|&byte| byte == 0) { ExtentKind::Hole } else { ExtentKind::Data };
        let blocks = bytes.chunks(BLOCK).map(kind).collect();
        Self { state: Arc::new(Mutex::new(State { bytes, blocks })), ..Self::file(name, most) }
    }

    /// Creates a block device of `len` bytes, full of garbage, without holes: discarded bytes stay unchanged.
    #[must_use]
    pub fn device(name: &str, len: usize, seed: u64) -> Self {
        Self::device_with(name, Vec::new(), len, seed)
    }

    /// Such a device with these contents at its beginning; it is `len` bytes long.
    #[must_use]
    pub fn device_with(name: &str, mut bytes: Vec<u8>, len: usize, seed: u64) -> Self {
        bytes.truncate(len);
        let garbage = SeededRandom::new(seed).bytes(len - bytes.len());
        bytes.extend(garbage);
        let device = Self { device: true, ..Self::file_with(name, bytes, len as u64) };
        device.state.lock().blocks.fill(ExtentKind::Data);
        device
    }

    /// The same bytes, with another alignment.
    #[must_use]
    pub fn with_alignment(self, alignment: Alignment) -> Self {
        Self { alignment, ..self }
    }

    /// The same bytes, which can be cloned from any other memory here, in whole blocks of 4 KiB, as on a filesystem
    /// that shares extents.
    #[must_use]
    pub fn with_cloning(self) -> Self {
        Self { clones: !self.device, ..self }
    }

    /// A copy of all its bytes.
    #[must_use]
    pub fn contents(&self) -> Vec<u8> {
        self.state.lock().bytes.clone()
    }

    fn carry_out(&self, call: &Call) -> Result<(), StorageError> {
        let state = &mut *self.state.lock();
        let failed = |error: io::Error| call.failed(&self.name, error);
        if let Call::Read { offset, into } = call {
            let start = to_usize(*offset);
            let got = state.bytes.get(start..).map_or(0, |rest| into.copy_from(0, rest));
            into.slice(got..into.len()).clear();
            return Ok(());
        }
        let mut range = call.range();
        if let Call::Discard { .. } = call {
            range.end = range.end.min(state.bytes.len() as u64);
        }
        if range.is_empty() && !matches!(call, Call::SetLength { .. }) {
            return Ok(());
        }
        if range.end > self.most || (self.device && matches!(call, Call::SetLength { .. })) {
            let kind = if self.device { io::ErrorKind::InvalidInput } else { io::ErrorKind::StorageFull };
            return Err(failed(kind.into()));
        }
        let index = |at: u64| usize::try_from(at).map_err(|error| failed(io::Error::other(error)));
        let range = index(range.start)?..index(range.end)?;
        match call {
            Call::Write { from, .. } => state.write(range, &from.to_vec()),
            Call::WriteZeroes { how, .. } => {
                let kind = if how.unmap { ExtentKind::Hole } else { ExtentKind::Unwritten };
                state.zero(range, if self.device { ExtentKind::Data } else { kind });
            }
            Call::Discard { .. } if self.device => {}
            Call::Discard { .. } => state.zero(range, ExtentKind::Hole),
            Call::SetLength { .. } => state.set_len(range.end),
            Call::Allocate { .. } => {
                state.lengthen(range.end);
                for block in &mut state.blocks[range.start / BLOCK..range.end.div_ceil(BLOCK)] {
                    if *block == ExtentKind::Hole {
                        *block = ExtentKind::Unwritten;
                    }
                }
            }
            Call::Read { .. } | Call::Flush | Call::Clone(_) => {}
        }
        Ok(())
    }

    /// As the kernel has it: whole blocks within the other one's length, and not from where it goes to.
    fn clone_now(&self, from: &Self, from_offset: u64, to: Range<u64>) -> Result<bool, io::Error> {
        let whole = |at: u64| at.is_multiple_of(BLOCK as u64);
        let source = from_offset..from_offset.saturating_add(to.end - to.start);
        let itself = Arc::ptr_eq(&self.state, &from.state);
        if !(self.clones && !from.device && whole(source.start) && whole(source.end) && whole(to.start))
            || source.end > from.length().unwrap_or(0)
            || (itself && source.start < to.end && to.start < source.end)
        {
            return Ok(false);
        }
        if to.end > self.most {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let index = |at: u64| usize::try_from(at).map_err(io::Error::other);
        let (source, to) = (index(source.start)?..index(source.end)?, index(to.start)?..index(to.end)?);
        let (bytes, blocks) = {
            let from = from.state.lock();
            (from.bytes[source.clone()].to_vec(), from.blocks[source.start / BLOCK..source.end / BLOCK].to_vec())
        };
        let mut state = self.state.lock();
        state.lengthen(to.end);
        state.bytes[to.clone()].copy_from_slice(&bytes);
        state.blocks[to.start / BLOCK..to.end / BLOCK].copy_from_slice(&blocks);
        Ok(true)
    }

    fn request(&self, call: &Call) -> Request {
        Box::pin(std::future::ready(self.carry_out(call)))
    }
}

impl State {
    fn lengthen(&mut self, len: usize) {
        if self.bytes.len() < len {
            self.set_len(len);
        }
    }

    fn set_len(&mut self, len: usize) {
        self.bytes.resize(len, 0);
        self.blocks.resize(len.div_ceil(BLOCK), ExtentKind::Hole);
    }

    fn write(&mut self, range: Range<usize>, from: &[u8]) {
        self.lengthen(range.end);
        self.blocks[range.start / BLOCK..range.end.div_ceil(BLOCK)].fill(ExtentKind::Data);
        self.bytes[range].copy_from_slice(from);
    }

    fn zero(&mut self, range: Range<usize>, kind: ExtentKind) {
        self.lengthen(range.end);
        self.bytes[range.clone()].fill(0);
        // The last block of a file is whole, even if the file ends inside it.
        let end = if range.end == self.bytes.len() { range.end.div_ceil(BLOCK) } else { range.end / BLOCK };
        if let Some(whole) = self.blocks.get_mut(range.start.div_ceil(BLOCK)..end) {
            whole.fill(kind);
        }
    }
}

impl Storage for SparseMemory {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn length(&self) -> Result<u64, StorageError> {
        Ok(self.state.lock().bytes.len() as u64)
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn alignment(&self) -> Alignment {
        self.alignment
    }

    fn read(&self, offset: u64, into: IoVector) -> Request {
        self.request(&Call::Read { offset, into })
    }

    fn write(&self, offset: u64, from: IoVector) -> Request {
        self.request(&Call::Write { offset, from })
    }

    fn write_zeroes(&self, range: Range<u64>, how: ZeroOptions) -> Request {
        self.request(&Call::WriteZeroes { range, how })
    }

    fn discard(&self, range: Range<u64>) -> Request {
        self.request(&Call::Discard { range })
    }

    fn flush(&self) -> Request {
        self.request(&Call::Flush)
    }

    fn set_len(&self, len: u64) -> Request {
        self.request(&Call::SetLength { len })
    }

    fn allocate(&self, range: Range<u64>) -> Request {
        self.request(&Call::Allocate { range })
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError> {
        let state = self.state.lock();
        let known = state.bytes.len() as u64;
        let mut extents = Vec::<Extent>::new();
        let mut at = range.start;
        while at < range.end {
            let block = to_usize(at / BLOCK as u64);
            let (end, kind) = match state.blocks.get(block) {
                // A file may end inside its last block, and what is behind it is a hole.
                Some(kind) if at < known => (((at / BLOCK as u64 + 1) * BLOCK as u64).min(known), *kind),
                _ => (range.end, ExtentKind::Hole),
            };
            let end = end.min(range.end);
            match extents.last_mut() {
                Some(last) if last.kind == kind => last.range.end = end,
                _ => extents.push(Extent { range: at..end, kind }),
            }
            at = end;
        }
        Ok(extents)
    }

    fn clone_range(&self, offset: u64, from: &Arc<dyn Storage>, from_offset: u64, length: u64) -> Request<bool> {
        let to = offset..offset.saturating_add(length);
        let cloned = match memory_under(&**from) {
            Some(from) => self.clone_now(from, from_offset, to),
            None => Ok(false),
        };
        let failed = |error| StorageError::for_request(crate::Operation::Clone, &self.name, offset, length, error);
        Box::pin(std::future::ready(cloned.map_err(failed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buffer, block_on};

    fn kinds(storage: &SparseMemory, range: Range<u64>) -> Vec<(u64, ExtentKind)> {
        storage.extents(range).unwrap().into_iter().map(|extent| (extent.range.end, extent.kind)).collect()
    }

    #[test]
    fn a_file_knows_its_holes_and_unwritten_extents() {
        use ExtentKind::{Data, Hole, Unwritten};
        let file = SparseMemory::file("disk", 1 << 20);
        block_on(file.write(0x5001, Buffer::from_slice(b"abc").into())).unwrap();
        assert_eq!(kinds(&file, 0..0x8000), [(0x5000, Hole), (0x5004, Data), (0x8000, Hole)]);
        block_on(file.allocate(0x2000..0x8800)).unwrap();
        let allocated = [(0x2000, Hole), (0x5000, Unwritten), (0x6000, Data), (0x8800, Unwritten), (0x9000, Hole)];
        assert_eq!(kinds(&file, 0..0x9000), allocated);
        block_on(file.write_zeroes(0x5002..0x8000, ZeroOptions::default())).unwrap();
        assert_eq!(kinds(&file, 0x4800..0x8000), [(0x5000, Unwritten), (0x6000, Data), (0x8000, Unwritten)]);
        assert_eq!(&file.contents()[0x5000..0x5004], b"\0a\0\0");
        block_on(file.discard(0x3800..1 << 30)).unwrap();
        assert_eq!(kinds(&file, 0x2000..0x9000), [(0x4000, Unwritten), (0x9000, Hole)]);
        assert_eq!(file.length().unwrap(), 0x8800);
        block_on(file.set_len(0x2800)).unwrap();
        assert_eq!(kinds(&file, 0..0x4000), [(0x2000, Hole), (0x2800, Unwritten), (0x4000, Hole)]);
        assert!(block_on(file.set_len(2 << 20)).is_err());
    }

    #[test]
    fn blocks_are_cloned_with_their_holes_and_parts_of_blocks_are_not() {
        let file = SparseMemory::file("disk", 1 << 20).with_cloning();
        let other: Arc<dyn Storage> = Arc::new(SparseMemory::file("other", 1 << 20));
        block_on(other.write(0x1000, Buffer::from_slice(&[7; 0x2000]).into())).unwrap();
        let clone = |at, from: &Arc<dyn Storage>, from_offset, length| {
            block_on(Storage::clone_range(&file, at, from, from_offset, length)).unwrap()
        };
        assert!(clone(0x4000, &other, 0, 0x3000));
        assert_eq!(file.contents()[0x4fff..0x7000], [&[0; 1][..], &[7; 0x2000]].concat());
        assert_eq!(kinds(&file, 0..0x7000), [(0x5000, ExtentKind::Hole), (0x7000, ExtentKind::Data)]);
        assert!(!clone(0, &other, 512, 0x1000) && !clone(512, &other, 0, 0x1000) && !clone(0, &other, 0, 512));
        assert!(!clone(0, &other, 0x2000, 0x2000), "it is shorter");
        let itself: Arc<dyn Storage> = Arc::new(file.clone());
        assert!(clone(0, &itself, 0x5000, 0x1000) && !clone(0x5000, &itself, 0x4000, 0x2000));
        assert_eq!(file.contents()[..0x1001], [&[7; 0x1000][..], &[0; 1]].concat());
        assert!(!block_on((*other).clone_range(0, &itself, 0, 0x1000)).unwrap(), "it does not clone");
    }

    #[test]
    fn a_device_is_full_of_garbage_and_keeps_what_is_discarded() {
        let device = SparseMemory::device("disk", 0x4000, 7);
        let before = device.contents();
        block_on(device.discard(0..0x2000)).unwrap();
        assert_eq!(device.contents(), before);
        assert_eq!(kinds(&device, 0..0x4000), [(0x4000, ExtentKind::Data)]);
        block_on(device.write_zeroes(0x1000..0x2000, ZeroOptions { unmap: true, only_fast: false })).unwrap();
        assert!(device.contents()[0x1000..0x2000].iter().all(|&byte| byte == 0));
        assert_eq!(kinds(&device, 0..0x4000), [(0x4000, ExtentKind::Data)]);
        assert!(block_on(device.set_len(0x4000)).is_err());
        assert!(block_on(device.write(0x3fff, Buffer::from_slice(b"ab").into())).is_err());
    }
}
