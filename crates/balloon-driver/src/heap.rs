//! A heap in pieces of equal length, and the driver that hints the free ones.
//!
//! The heap has no threads of its own: its user calls [`Heap::poll`] and [`LateHints::pass_on`], and lets programs take
//! and free pieces.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use limosa_balloon::{Balloon, Features, GuestRam, Options, Strategy};
use limosa_memory::{FreePageHinting, GuestMemory};
use limosa_page::{PAGE_SIZE, PageNumber, PageRange, to_usize};
use parking_lot::Mutex;
use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::driver::Driver;
use crate::late::LateHints;
use crate::machine::{Machine, Worker};
use crate::pages::Pages;
use crate::queue::{RINGS, RingError};
use crate::shrinker::Shrinker;

/// Guest-physical address of the rings, which are not in the memory that moves.
const RINGS_AT: u64 = 1 << 40;

/// The owner of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The allocator.
    Free = 0,
    /// A program.
    Program = 1,
    /// The balloon's driver, which has hinted it.
    Driver = 2,
}

/// Why a heap cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeapError {
    /// The guest does not see a block of this index, or the block is smaller than a piece.
    #[error("guest memory has no block {0} that holds a piece of a heap")]
    NoBlock(usize),
    /// The rings cannot be mapped.
    #[error("memory for the rings of the balloon's driver")]
    Rings(#[source] io::Error),
    /// The driver cannot be attached to its device.
    #[error("the balloon's driver")]
    Driver(#[from] RingError),
    /// The device's thread cannot be started.
    #[error("a thread for the balloon's device")]
    Thread(#[source] io::Error),
}

/// A heap in one RAM block, the balloon's device and its driver.
#[derive(Debug)]
pub struct Heap {
    pieces: Arc<Mutex<Pieces>>,
    shrinker: Shrinker,
    driver: Mutex<Driver<GuestMemoryMmap<()>, Pieces>>,
    late: LateHints,
    _worker: Worker<GuestMemoryMmap<()>>,
    block: usize,
    /// Pages of a piece.
    each: u64,
}

impl Heap {
    /// Makes a heap of `block`, in free pieces of `each` pages.
    ///
    /// # Errors
    /// The guest does not see that block, or rings or thread cannot be made.
    pub fn new(memory: &Arc<GuestMemory>, block: usize, each: u64) -> Result<Self, HeapError> {
        let region = memory.regions().iter().find(|region| region.block == block && region.pages.len() >= each.max(1));
        let region = region.filter(|_| each > 0).ok_or(HeapError::NoBlock(block))?;
        let balloon = Arc::new(Balloon::new(Options::default()));
        balloon.set_memory(Arc::new(GuestRam::new(Arc::clone(memory), Strategy::Nothing)));
        let rings = GuestMemoryMmap::from_ranges(&[(GuestAddress(RINGS_AT), RINGS)]);
        let rings = rings.map_err(|error| HeapError::Rings(io::Error::other(error)))?;
        let machine = Machine::new(Arc::clone(&balloon), Arc::new(rings), RINGS_AT);
        let worker = machine.worker().map_err(HeapError::Thread)?;
        let pieces = Arc::new(Mutex::new(Pieces {
            owners: vec![Owner::Free; to_usize(region.pages.len() / each)],
            address: region.guest_address,
            bytes: each * PAGE_SIZE,
        }));
        let driver = Driver::probe(machine, Arc::clone(&pieces), Features::FREE_PAGE_HINT)?;
        let driver = driver.with_blocks_of(each * PAGE_SIZE);
        let (shrinker, late) = (driver.shrinker(), LateHints::new(balloon));
        Ok(Self { pieces, shrinker, driver: Mutex::new(driver), late, _worker: worker, block, each })
    }

    /// The RAM block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Number of pieces.
    pub fn pieces(&self) -> usize {
        self.pieces.lock().owners.len()
    }

    /// The pages of a piece, in the block.
    pub fn pages(&self, piece: usize) -> PageRange {
        PageRange::starting_at(PageNumber((piece as u64).saturating_mul(self.each)), self.each)
    }

    /// The owner of each piece.
    pub fn owners(&self) -> Vec<Owner> {
        self.pieces.lock().owners.clone()
    }

    /// Replaces the owners, after the guest was moved here. The driver gives back what it holds, because the device
    /// here requests no hints.
    ///
    /// # Panics
    /// There are more or fewer pieces.
    pub fn set_owners(&self, owners: Vec<Owner>) {
        let mut pieces = self.pieces.lock();
        assert_eq!(pieces.owners.len(), owners.len(), "a heap of another size");
        self.shrinker.take_back(usize::MAX);
        for (index, _) in owners.iter().enumerate().filter(|(_, owner)| **owner == Owner::Driver) {
            self.shrinker.hold(pieces.range(index));
        }
        pieces.owners = owners;
    }

    /// Number of pieces that the driver holds.
    pub fn held(&self) -> usize {
        self.shrinker.held()
    }

    /// Gives a piece to a program. Returns the owner before; `None` if the driver keeps it. When memory is short the
    /// shrinker takes pieces of the driver, without notifying the device.
    pub fn take(&self, piece: usize, memory_is_short: bool) -> Option<Owner> {
        let mut pieces = self.pieces.lock();
        let address = pieces.range(piece).start;
        let owner = pieces.owners.get_mut(piece)?;
        let before = *owner;
        if before == Owner::Driver && !(memory_is_short && self.shrinker.take_back_at(address)) {
            return None;
        }
        *owner = Owner::Program;
        Some(before)
    }

    /// Gives a program's piece back to the allocator. Returns whether it was a program's.
    pub fn free(&self, piece: usize) -> bool {
        let mut pieces = self.pieces.lock();
        let owner = pieces.owners.get_mut(piece).filter(|owner| **owner == Owner::Program);
        owner.map(|owner| *owner = Owner::Free).is_some()
    }

    /// Lets the driver work ([`Driver::poll`]). It never works while the guest is paused.
    ///
    /// # Errors
    /// As [`Driver::poll`].
    pub fn poll(&self) -> Result<bool, RingError> {
        self.driver.lock().poll()
    }

    /// Waits until the driver may have work, for at most `time`.
    pub fn wait(&self, time: Duration) {
        self.driver.lock().wait(time);
    }

    /// The balloon's device, whose hints come late.
    pub fn hints(&self) -> &LateHints {
        &self.late
    }

    /// The same, for a migration engine.
    pub fn free_pages(&self) -> Arc<dyn FreePageHinting> {
        Arc::new(self.late.clone())
    }
}

/// The allocator: the lowest free piece first.
#[derive(Debug)]
struct Pieces {
    owners: Vec<Owner>,
    /// Guest-physical address of the first piece.
    address: u64,
    /// Bytes of a piece.
    bytes: u64,
}

impl Pieces {
    fn range(&self, piece: usize) -> Range<u64> {
        let start = self.address + piece as u64 * self.bytes;
        start..start + self.bytes
    }
}

impl Pages for Pieces {
    fn allocate(&mut self, length: u64) -> Option<u64> {
        // The driver asks for whole pieces only: `with_blocks_of`.
        let piece = self.owners.iter().position(|owner| *owner == Owner::Free).filter(|_| length == self.bytes)?;
        *self.owners.get_mut(piece)? = Owner::Driver;
        Some(self.range(piece).start)
    }

    fn free(&mut self, block: Range<u64>) {
        let piece = to_usize(block.start.saturating_sub(self.address) / self.bytes);
        if let Some(owner) = self.owners.get_mut(piece) {
            *owner = Owner::Free;
        }
    }
}

#[cfg(test)]
mod tests {
    use limosa_memory::{BlockOptions, FreePageSink};

    use super::*;

    #[derive(Default)]
    struct List(Mutex<(Vec<Range<u64>>, bool)>);

    impl FreePageSink for List {
        fn add_range(&self, range: Range<u64>) {
            let mut list = self.0.lock();
            assert!(!list.1, "the end of a list comes behind all of it");
            list.0.push(range);
        }
        fn complete(&self) {
            self.0.lock().1 = true;
        }
    }

    fn heap() -> Heap {
        let block = BlockOptions::memfd("heap", 9 * 3 * PAGE_SIZE).map().unwrap();
        let heap = Heap::new(&Arc::new(GuestMemory::new(vec![block]).unwrap()), 0, 3).unwrap();
        (0..9).step_by(3).for_each(|piece| assert_eq!(heap.take(piece, false), Some(Owner::Free)));
        heap
    }

    fn hinted(heap: &Heap) -> Vec<u64> {
        let list = Arc::new(List::default());
        heap.free_pages().request_list(Arc::clone(&list) as _).unwrap();
        while !list.0.lock().1 {
            heap.poll().unwrap();
            heap.hints().pass_on(17);
        }
        let mut found: Vec<_> = list.0.lock().0.iter().map(|range| range.start / (3 * PAGE_SIZE)).collect();
        found.sort_unstable();
        found
    }

    #[test]
    fn free_pieces_are_hinted_held_taken_back_when_memory_is_short_and_given_back_when_the_device_is_done() {
        let heap = heap();
        assert_eq!(hinted(&heap), [1, 2, 4, 5, 7, 8]);
        assert_eq!((heap.held(), heap.take(4, false), heap.take(4, true)), (6, None, Some(Owner::Driver)));
        assert!(heap.free(4) && !heap.free(4), "it is free already");
        assert_eq!(heap.held(), 5);
        heap.free_pages().return_pages();
        while heap.held() > 0 {
            heap.poll().unwrap();
        }
        assert_eq!(heap.owners().iter().filter(|owner| **owner == Owner::Free).count(), 6);
        assert_eq!(hinted(&heap).len(), 6);
    }

    #[test]
    fn a_driver_that_was_moved_gives_back_what_it_held() {
        let (here, there) = (heap(), heap());
        hinted(&here);
        there.set_owners(here.owners());
        assert_eq!(there.held(), 6);
        there.poll().unwrap();
        assert_eq!((there.held(), there.take(1, false)), (0, Some(Owner::Free)));
    }
}
