//! The contents of images, unpacked as they are asked for.
//!
//! Law: **a fault waits for one block**, or for those of 1 MiB where checksums are verified. A block is the largest
//! cluster of the chain. What was unpacked is kept in a cache of [`CACHE`] bytes; a read of several blocks, and one
//! that continues where the last one ended, has further blocks unpacked by threads meanwhile. A block that cannot be
//! unpacked is an error of each read that needs it, and never zeros. **A read waits for one attempt**: who waits for a
//! block that another thread unpacks gets the error of that attempt, since a store that is gone is waited for in each.
//! The error is not kept: a later read makes an attempt of its own, and the store may be back.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};

use limosa_image::{Disk, GuestOffset, ImageError};
use limosa_page::{to_u64, to_usize};
use limosa_storage::{Buffer, block_on};
use parking_lot::{Condvar, Mutex, MutexGuard};

/// Bytes of unpacked blocks that are kept.
pub const CACHE: u64 = 32 << 20;
/// The smallest block: one of less costs more to look up than to unpack.
const BLOCK_LEAST: u64 = 16 << 10;
/// Bytes that are unpacked ahead of a sequential reader.
const AHEAD: u64 = 4 << 20;

/// Buffers of dropped blocks that are kept for new ones: without them the allocator maps and unmaps memory for each.
const SPARE: usize = 32;

/// The contents of images, unpacked.
pub(crate) struct UnpackedDisk {
    shared: Arc<Shared>,
    /// The most threads that unpack ahead.
    most_threads: usize,
    /// Threads that unpack ahead, from the first time that several blocks are wanted.
    threads: OnceLock<Vec<JoinHandle<()>>>,
    /// Where the last read ended.
    last_end: AtomicU64,
    /// Whether a thread may wait for a store for minutes: nobody waits for the threads then.
    is_far: bool,
}

struct Shared {
    disk: Arc<dyn Disk>,
    block: u64,
    length: u64,
    blocks: Mutex<Blocks>,
    /// A block has been unpacked, or could not be.
    done: Condvar,
    /// There is something to unpack ahead, or nothing ever again.
    wanted: Condvar,
    is_closing: AtomicBool,
}

#[derive(Default)]
struct Blocks {
    known: HashMap<u64, Block>,
    /// Those that are unpacked, the oldest first.
    order: VecDeque<u64>,
    /// Those that wait to be unpacked ahead.
    ahead: VecDeque<u64>,
    /// Buffers of dropped whole blocks, with their old contents.
    spare: Vec<Buffer>,
}

/// The error of an attempt to unpack a block, set when it fails.
type Failure = Arc<OnceLock<ImageError>>;

enum Block {
    /// Waits for a thread.
    Queued,
    /// A thread unpacks it; its error, for those that wait for the block meanwhile.
    Pending(Failure),
    /// Here it is; whether it was used since it was last looked at for eviction.
    Here(Buffer, bool),
}

impl UnpackedDisk {
    /// `unit`: the largest cluster of the images; reading less would unpack some twice. A thread waits for one block at
    /// a time, so images that are far away want more threads than there are cores.
    pub(crate) fn new(disk: Arc<dyn Disk>, unit: u64, most_threads: usize) -> Self {
        let block = unit.max(BLOCK_LEAST);
        let shared = Shared {
            length: disk.len(),
            disk,
            block,
            blocks: Mutex::default(),
            done: Condvar::new(),
            wanted: Condvar::new(),
            is_closing: AtomicBool::new(false),
        };
        let last_end = AtomicU64::new(u64::MAX);
        Self { shared: Arc::new(shared), most_threads, threads: OnceLock::new(), last_end, is_far: false }
    }

    /// As [`new`](Self::new), of images in a store.
    pub(crate) fn far(disk: Arc<dyn Disk>, unit: u64, most_threads: usize) -> Self {
        let mut far = Self::new(disk, unit, most_threads);
        far.is_far = true;
        far
    }

    /// Its length in bytes.
    pub(crate) fn length(&self) -> u64 {
        self.shared.length
    }

    /// Reads all of `into` from `offset` on.
    pub(crate) fn read_exact_at(&self, into: &mut [u8], offset: u64) -> Result<(), Box<dyn Error + Send + Sync>> {
        let shared = &self.shared;
        let end = offset.checked_add(to_u64(into.len())).filter(|end| *end <= shared.length);
        let end = end.ok_or_else(|| format!("it ends at {:#x}", shared.length))?;
        let indexes = shared.blocks_of(&(offset..end));
        let continues = self.last_end.swap(end, Ordering::Relaxed) == offset;
        let until = if continues { end.saturating_add(AHEAD).min(shared.length) } else { end };
        let is_one = indexes.end - indexes.start < 2 && !continues;
        let mut asked = offset;
        let mut rest = into;
        for index in indexes {
            let start = index * shared.block;
            // In time, and not so much that one reader would drop it before it is read.
            if !is_one && asked < until && start.saturating_add(AHEAD / 2) >= asked {
                let next = start.max(offset).saturating_add(AHEAD).min(until);
                self.ask(&(asked..next.max(asked)));
                asked = next.max(asked);
            }
            let inside = offset.saturating_sub(start);
            let count = (end - start).min(shared.block) - inside;
            let (part, later) = rest.split_at_mut(to_usize(count));
            rest = later;
            let block = shared.get(index)?;
            if block.copy_to(to_usize(inside), part) != part.len() {
                return Err("a block is shorter than its bytes; this is a bug in limosa".into());
            }
        }
        Ok(())
    }

    /// Whether all of a range is unpacked. If not, threads unpack it from now on.
    pub(crate) fn is_near(&self, range: &Range<u64>) -> bool {
        let mut indexes = self.shared.blocks_of(range);
        let is_near = {
            let blocks = self.shared.blocks.lock();
            indexes.all(|index| matches!(blocks.known.get(&index), Some(Block::Here(..))))
        };
        if !is_near {
            self.ask(range);
        }
        is_near
    }

    /// Has blocks unpacked that will be wanted soon.
    fn ask(&self, range: &Range<u64>) {
        self.threads.get_or_init(|| {
            let start = |_| {
                let shared = Arc::clone(&self.shared);
                // Without it the readers unpack for themselves.
                thread::Builder::new().name("unpack".into()).spawn(move || shared.work()).ok()
            };
            (0..self.most_threads).filter_map(start).collect()
        });
        self.shared.ask(range);
    }
}

impl Shared {
    /// The blocks that a range of bytes is in.
    fn blocks_of(&self, range: &Range<u64>) -> Range<u64> {
        range.start / self.block..range.end.div_ceil(self.block)
    }

    fn ask(&self, range: &Range<u64>) {
        let mut blocks = self.blocks.lock();
        let mut is_new = false;
        for index in self.blocks_of(range) {
            if to_u64(blocks.ahead.len()).saturating_mul(self.block) >= CACHE / 2 {
                break;
            }
            if let Entry::Vacant(vacant) = blocks.known.entry(index) {
                vacant.insert(Block::Queued);
                blocks.ahead.push_back(index);
                is_new = true;
            }
        }
        drop(blocks);
        if is_new {
            self.wanted.notify_all();
        }
    }

    /// Unpacks what is asked for, until the end.
    fn work(&self) {
        let mut blocks = self.blocks.lock();
        while !self.is_closing.load(Ordering::Relaxed) {
            let Some(index) = blocks.ahead.pop_front() else {
                self.wanted.wait(&mut blocks);
                continue;
            };
            // Its reader may have come first.
            if !matches!(blocks.known.get(&index), Some(Block::Queued)) {
                continue;
            }
            drop(self.unpack(blocks, index));
            blocks = self.blocks.lock();
        }
    }

    /// Returns a block.
    fn get(&self, index: u64) -> Result<Buffer, ImageError> {
        let mut blocks = self.blocks.lock();
        loop {
            match blocks.known.get_mut(&index) {
                Some(Block::Here(buffer, is_used)) => {
                    *is_used = true;
                    return Ok(buffer.clone());
                }
                Some(Block::Pending(failure)) => {
                    let failure = Arc::clone(failure);
                    self.done.wait(&mut blocks);
                    if let Some(error) = failure.get() {
                        return Err(error.clone());
                    }
                }
                Some(Block::Queued) | None => return self.unpack(blocks, index),
            }
        }
    }

    /// Unpacks a block that no thread unpacks, and keeps it.
    fn unpack(&self, mut blocks: MutexGuard<'_, Blocks>, index: u64) -> Result<Buffer, ImageError> {
        let failure = Failure::default();
        blocks.known.insert(index, Block::Pending(Arc::clone(&failure)));
        let start = index.saturating_mul(self.block);
        let length = self.block.min(self.length.saturating_sub(start));
        let spare = if length == self.block { blocks.spare.pop() } else { None };
        drop(blocks);
        let unwinding = Unwinding { shared: self, index };
        // A read fills all of it, or fails.
        let buffer = spare.unwrap_or_else(|| Buffer::zeroed(to_usize(length)));
        let read = block_on(self.disk.read(GuestOffset(start), buffer.clone().into()));
        std::mem::forget(unwinding);
        let mut blocks = self.blocks.lock();
        match &read {
            Ok(()) => {
                blocks.known.insert(index, Block::Here(buffer.clone(), false));
                blocks.order.push_back(index);
                blocks.evict(CACHE / self.block, self.block);
            }
            Err(error) => {
                blocks.known.remove(&index);
                failure.get_or_init(|| error.clone());
            }
        }
        drop(blocks);
        self.done.notify_all();
        read.map(|()| buffer)
    }
}

/// A block that is being unpacked. If that panics, its readers must not wait for ever.
struct Unwinding<'a> {
    shared: &'a Shared,
    index: u64,
}

impl Drop for Unwinding<'_> {
    fn drop(&mut self) {
        self.shared.blocks.lock().known.remove(&self.index);
        self.shared.done.notify_all();
    }
}

impl Blocks {
    /// Drops blocks until `limit` are left: the oldest that were not used since they were last looked at. `whole`:
    /// bytes of those whose buffers fit others.
    fn evict(&mut self, limit: u64, whole: u64) {
        while to_u64(self.order.len()) > limit.max(1) {
            let Some(oldest) = self.order.pop_front() else { return };
            match self.known.get_mut(&oldest) {
                Some(Block::Here(_, is_used)) if *is_used => {
                    *is_used = false;
                    self.order.push_back(oldest);
                }
                _ => {
                    if let Some(Block::Here(mut buffer, _)) = self.known.remove(&oldest)
                        && self.spare.len() < SPARE
                        && to_u64(buffer.len()) == whole
                        && !buffer.is_shared()
                    {
                        self.spare.push(buffer);
                    }
                }
            }
        }
    }
}

impl fmt::Debug for UnpackedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnpackedDisk").field("disk", &self.shared.disk).finish_non_exhaustive()
    }
}

impl Drop for UnpackedDisk {
    fn drop(&mut self) {
        let blocks = self.shared.blocks.lock();
        self.shared.is_closing.store(true, Ordering::Relaxed);
        drop(blocks);
        self.shared.wanted.notify_all();
        let threads = self.threads.take().into_iter().flatten();
        for thread in threads.filter(|_| !self.is_far) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use limosa_image::raw::{Raw, RawOptions};
    use limosa_storage::testing::{Failing, Fault, RequestHolder, SparseMemory};
    use limosa_storage::{Operation, Storage};

    use super::*;

    #[test]
    fn readers_that_wait_for_a_block_share_its_attempt_and_its_error_and_a_later_one_tries_again() {
        let (holder, failing) = (RequestHolder::only(&[Operation::Read]), Failing::only(&[Operation::Read]));
        let memory = Arc::new(SparseMemory::file("disk", 1 << 16));
        block_on(memory.write(0, Buffer::from_slice(&[7; 4096]).into())).unwrap();
        let disk = Raw::open(holder.wrap(failing.wrap(memory)), &RawOptions::default()).unwrap();
        let unpacked = UnpackedDisk::far(disk, BLOCK_LEAST, 1);
        let read = || {
            let mut page = [0; 4096];
            unpacked.read_exact_at(&mut page, 0).map(|()| page).map_err(|error| error.to_string())
        };
        let until = |is_so: &dyn Fn() -> bool| {
            while !is_so() {
                thread::sleep(std::time::Duration::from_millis(1));
            }
        };
        failing.fail(0, 1, Fault::Broken);
        assert!(!unpacked.is_near(&(0..4096)));
        until(&|| holder.waiting().len() == 1);
        thread::scope(|scope| {
            let readers = [scope.spawn(read), scope.spawn(read)];
            // The map, the thread that unpacks, and both readers.
            until(&|| match unpacked.shared.blocks.lock().known.get(&0) {
                Some(Block::Pending(failure)) => Arc::strong_count(failure) == 4,
                _ => false,
            });
            assert!(holder.release(holder.waiting()[0].number));
            for reader in readers {
                assert!(reader.join().unwrap().unwrap_err().contains("disk"));
            }
        });
        assert_eq!((failing.seen(), holder.waiting().len()), ((1, 1), 0));
        holder.release_all();
        assert_eq!(read(), Ok([7; 4096]));
        assert!(unpacked.is_near(&(0..4096)));
    }

    #[test]
    fn blocks_take_the_memory_of_dropped_ones_and_never_that_which_somebody_reads() {
        let (block, count) = (1 << 20, 3 * CACHE / (1 << 20));
        let memory = Arc::new(SparseMemory::file("disk", block * count));
        let number = |index: u64| Buffer::from_slice(&[u8::try_from(index).unwrap(); 4096]);
        for index in 0..count {
            block_on(memory.write(index * block, number(index).into())).unwrap();
        }
        block_on(memory.write(block * count - 4096, number(0).into())).unwrap();
        let disk = Raw::open(memory, &RawOptions::default()).unwrap();
        let unpacked = UnpackedDisk::new(disk, block, 1);
        let held = unpacked.shared.get(1).unwrap();
        let mut addresses = HashSet::new();
        for index in (0..count).filter(|index| *index != 1) {
            let found = unpacked.shared.get(index).unwrap();
            assert_eq!(found.to_vec()[..4097], [&[u8::try_from(index).unwrap(); 4096][..], &[0]].concat());
            addresses.insert(found.address());
        }
        assert!(!unpacked.is_near(&(block..2 * block)), "the block that is held was not dropped");
        assert_eq!(held.slice(0..4096).to_vec(), [1; 4096]);
        assert!(to_u64(addresses.len()) < count / 2, "{} buffers for {count} blocks", addresses.len());
    }
}
