//! The guest's heap: memory that its programs allocate, write and free, and a balloon whose driver hints what is free.
//!
//! The heap is a separate RAM block, [`HEAP`], in pieces that a program has as a whole. Allocator, driver and device
//! are [`limosa_balloon_driver::Heap`]: the driver **holds** what it has hinted until the device sends DONE; if memory
//! is short, its shrinker gives pieces to programs before that **without notifying the device**, and they are written
//! at once. Hints are passed on late and in any order, also after they were stopped.
//!
//! **Law: what a program has holds what the program wrote.** That follows from the heap's state, as with all of the
//! guest; a free piece may hold anything.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use limosa_balloon_driver::{Heap as Pieces, Owner};
use limosa_console::error_line;
use limosa_memory::dirty::{DirtyLog, SoftwareDirtyBitmap, SoftwareDirtyLog, Writers};
use limosa_memory::{FreePageHinting, GuestMemory};
use limosa_page::to_usize;
use parking_lot::{Condvar, Mutex};

use super::built_in::Verified;
use super::error::GuestError;
use super::gate::{Gate, Pace};
use super::options::{GuestKind, Rate};
use super::pattern::Contents;
use super::ram::{HEAP, Ram};

/// Pages of a piece: 256 KiB.
const PIECE: u64 = 64;

/// Version of the format of a heap's state.
pub const HEAP_VERSION: u8 = 2;

/// Of ten steps of a program, the number that write a piece again, and that free one.
const REWRITE: u64 = 4;
const FREE: u64 = 4;

/// Delay of a hint that the device passes on later.
const DEVICE_TICK: Duration = Duration::from_micros(200);

/// Time limit of one wait: the heap may have ended.
const LOOK: Duration = Duration::from_millis(5);

struct State {
    /// How often programs have written each piece.
    generations: Vec<u32>,
    /// Whether the guest runs, and with it the driver.
    running: bool,
    ended: bool,
    /// The reason if the driver has failed.
    failed: Option<String>,
}

/// The part of a heap that its threads share.
struct HeapInner {
    ram: Ram,
    pieces: Pieces,
    /// First page of the block as [`Ram`] counts.
    first: u64,
    seed: u32,
    /// For logs that do not see what this process writes.
    marker: Option<SoftwareDirtyBitmap>,
    programs: Gate,
    /// The driver works under this lock, so that it does not while the guest is paused.
    state: Mutex<State>,
    /// Notified when the guest runs or ends.
    changed: Condvar,
}

/// The heap of a guest. It is paused when it is made; dropping it ends it.
pub struct Heap {
    shared: Arc<HeapInner>,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Heap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Heap").field("pieces", &self.shared.pieces).finish_non_exhaustive()
    }
}

impl Heap {
    /// Makes the heap of a new guest: programs have a third of it, and have written and freed the rest. `marked`:
    /// whether the dirty log is one that does not see what this process writes.
    ///
    /// # Errors
    /// The memory has no such block, or the system has no thread.
    pub fn boot(memory: &Arc<GuestMemory>, rate: Rate, seed: u32, marked: bool) -> Result<Self, GuestError> {
        let heap = Self::receive(memory, rate, seed, marked)?;
        let shared = &heap.shared;
        for index in 0..shared.pieces.pieces() {
            shared.state.lock().generations[index] = 1;
            shared.write(index, 1);
            if index % 3 == 0 {
                shared.pieces.take(index, false);
            }
        }
        Ok(heap)
    }

    /// Makes a heap that waits for its state.
    ///
    /// # Errors
    /// As [`boot`](Self::boot).
    pub fn receive(memory: &Arc<GuestMemory>, rate: Rate, seed: u32, marked: bool) -> Result<Self, GuestError> {
        let block = memory.index_of(HEAP).ok_or_else(|| options(format!("its memory has no block {HEAP}")))?;
        let pages = memory.block(block).map_or(0, |block| block.pages().len());
        if pages < PIECE {
            return Err(options(format!("its heap has {pages} pages, of at least {PIECE}")));
        }
        let pieces = Pieces::new(memory, block, PIECE).map_err(|error| options(error_line(&error)))?;
        let marker = marked.then(|| SoftwareDirtyLog::new(memory, Writers::DEVICES).bitmap());
        let state = State { generations: vec![0; pieces.pieces()], running: false, ended: false, failed: None };
        let shared = Arc::new(HeapInner {
            ram: Ram::whole(Arc::clone(memory)),
            first: memory.blocks().iter().take(block).map(|block| block.pages().len()).sum(),
            pieces,
            seed,
            marker,
            programs: Gate::new(rate),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let mut heap = Self { shared, threads: Vec::new() };
        heap.spawn("balloon driver", HeapInner::drive)?;
        heap.spawn("balloon device", HeapInner::pass_on)?;
        heap.shared.programs.enter();
        let programs = heap.spawn("heap", |shared| {
            let ended = catch_unwind(AssertUnwindSafe(|| shared.run_programs()));
            shared.programs.leave(ended.err().map(|_| "it panicked".to_owned()));
        });
        programs.inspect_err(|_| heap.shared.programs.leave(None))?;
        heap.shared.programs.pause();
        Ok(heap)
    }

    fn spawn(&mut self, name: &str, does: fn(&HeapInner)) -> Result<(), GuestError> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || does(&shared));
        let failed = |source| GuestError::Kernel { kind: GuestKind::Threads, operation: "a thread", source };
        self.threads.push(thread.map_err(failed)?);
        Ok(())
    }

    /// Lets programs and the driver run, or continue.
    pub fn run(&self) {
        self.shared.state.lock().running = true;
        self.shared.changed.notify_all();
        self.shared.programs.run();
    }

    /// Stops programs and the driver. When it returns nothing of the heap is written any more.
    pub fn pause(&self) {
        self.shared.programs.pause();
        self.shared.state.lock().running = false;
    }

    /// Takes `percent` of their time from programs.
    pub fn throttle(&self, percent: u8) {
        self.shared.programs.throttle(percent);
    }

    /// A dirty log of the heap, if the guest's own log does not see it.
    pub fn log(&self) -> Option<Box<dyn DirtyLog>> {
        self.shared.marker.as_ref().map(|marker| Box::new(marker.new_log(Writers::DEVICES)) as _)
    }

    /// The source of lists of free pages.
    pub fn free_pages(&self) -> Arc<dyn FreePageHinting> {
        self.shared.pieces.free_pages()
    }

    /// Its state beside memory: version, seed, and for each piece its owner and how often it was written. All numbers
    /// big-endian.
    pub fn save(&self) -> Vec<u8> {
        let state = self.shared.state.lock();
        let mut bytes = vec![HEAP_VERSION];
        bytes.extend_from_slice(&self.shared.seed.to_be_bytes());
        for (owner, generation) in self.shared.pieces.owners().into_iter().zip(&state.generations) {
            bytes.push(owner as u8);
            bytes.extend_from_slice(&generation.to_be_bytes());
        }
        bytes
    }

    /// Loads the state of a heap of the same size. It is paused. What the driver held it gives back when the guest
    /// runs, because the device here requests no hints.
    ///
    /// # Errors
    /// The bytes are not such a state.
    pub fn load(&self, bytes: &[u8]) -> Result<(), GuestError> {
        let wrong = |offset, why: &str| GuestError::State { kind: GuestKind::Threads, offset, why: why.into() };
        let Some(([version, seed @ ..], pieces)) = bytes.split_first_chunk::<5>() else {
            return Err(wrong(bytes.len(), "it is truncated"));
        };
        if *version != HEAP_VERSION || u32::from_be_bytes(*seed) != self.shared.seed {
            return Err(wrong(0, "it is that of another heap"));
        }
        let (pieces, rest) = pieces.as_chunks::<5>();
        let mut state = self.shared.state.lock();
        if !rest.is_empty() || pieces.len() != state.generations.len() {
            return Err(wrong(5, "it is that of a heap of another size"));
        }
        let piece = |(index, [owner, generation @ ..]): (usize, &[u8; 5])| {
            let owner = match owner {
                0 => Owner::Free,
                1 => Owner::Program,
                2 => Owner::Driver,
                _ => return Err(wrong(5 + 5 * index, "unknown owner of a piece")),
            };
            Ok((owner, u32::from_be_bytes(*generation)))
        };
        let pieces = pieces.iter().enumerate().map(piece).collect::<Result<Vec<_>, _>>()?;
        let owners;
        (owners, state.generations) = pieces.into_iter().unzip();
        self.shared.pieces.set_owners(owners);
        Ok(())
    }

    /// Checks what programs have, and adds it to what was found elsewhere. Also counts free pages, and those that the
    /// driver holds.
    ///
    /// # Errors
    /// It is not paused, its driver has failed, or a page does not hold what was written.
    pub fn verify(&self, verified: &mut Verified) -> Result<FreeHeap, GuestError> {
        if !self.shared.programs.is_paused() {
            return Err(GuestError::NotPaused("looking at the heap"));
        }
        self.shared.programs.all_live(GuestKind::Threads)?;
        let generations = {
            let state = self.shared.state.lock();
            if let Some(why) = &state.failed {
                return Err(GuestError::Failed { kind: GuestKind::Threads, why: why.clone() });
            }
            state.generations.clone()
        };
        let mut free = FreeHeap::default();
        for (index, (owner, generation)) in self.shared.pieces.owners().into_iter().zip(generations).enumerate() {
            match owner {
                Owner::Free => free.free_pages += PIECE,
                Owner::Driver => free.held_pages += PIECE,
                Owner::Program => {
                    let first = self.shared.first + self.shared.pieces.pages(index).start.0;
                    let expected = |page| self.shared.contents(page, generation);
                    self.shared.ram.verify_pages(first..first + PIECE, generation.into(), expected, verified)?;
                }
            }
        }
        Ok(free)
    }
}

/// Pages of a heap that no program has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FreeHeap {
    /// Free in the allocator.
    pub free_pages: u64,
    /// Held by the balloon's driver.
    pub held_pages: u64,
}

impl HeapInner {
    /// The contents of a page after `generation` writes of its piece.
    fn contents(&self, page: u64, generation: u32) -> Contents {
        Contents::of(self.seed ^ 0x4eab, page, generation.into(), 1)
    }

    /// Writes all of a piece. Only the thread of the programs does, once the guest runs.
    fn write(&self, piece: usize, generation: u32) {
        let pages = self.pieces.pages(piece);
        for page in pages.iter().map(|page| self.first + page.0) {
            self.ram.store(page, self.contents(page, generation));
        }
        if let Some(marker) = &self.marker {
            marker.mark(self.pieces.block(), pages);
        }
    }

    /// The loop of the programs: each of their steps counts as the pages of a piece.
    fn run_programs(&self) {
        let (mut pace, mut credit) = (Pace::default(), 0);
        let mut random = Random(u64::from(self.seed) << 20 | 0x5eed);
        while let Some(pages) = self.programs.admit(&mut pace) {
            credit += pages;
            while credit >= PIECE {
                credit -= PIECE;
                self.act(random.next());
            }
        }
    }

    /// A program takes a piece, writes one that it has, or frees one.
    fn act(&self, random: u64) {
        let index = to_usize(random >> 24) % self.pieces.pieces();
        let step = random % 10;
        if (REWRITE..REWRITE + FREE).contains(&step) && self.pieces.free(index) {
            return;
        }
        // The pieces that the driver holds are taken only when memory is short.
        if self.pieces.take(index, step <= 2).is_none() {
            return;
        }
        let generation = {
            let mut state = self.state.lock();
            let Some(generation) = state.generations.get_mut(index) else { return };
            *generation = generation.wrapping_add(1);
            *generation
        };
        self.write(index, generation);
    }

    /// The loop of the driver.
    fn drive(&self) {
        loop {
            let mut state = self.state.lock();
            self.changed.wait_while(&mut state, |state| !state.running && !state.ended);
            if state.ended {
                return;
            }
            let busy = match self.pieces.poll() {
                Ok(busy) => busy,
                Err(error) => {
                    state.failed = Some(error_line(&error));
                    return;
                }
            };
            drop(state);
            if busy {
                // Programs come between two blocks.
                std::thread::yield_now();
            } else {
                self.pieces.wait(LOOK);
            }
        }
    }

    /// The loop of the device: passes hints on.
    fn pass_on(&self) {
        let hints = self.pieces.hints();
        let mut random = Random(u64::from(self.seed) << 20 | 0xde51ce);
        while !self.state.lock().ended {
            if !hints.wait(LOOK) {
                continue;
            }
            let random = random.next();
            if random.is_multiple_of(16) {
                std::thread::sleep(DEVICE_TICK);
            } else {
                hints.pass_on(random >> 33);
            }
        }
    }
}

/// A generator of random numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        self.shared.programs.end();
        self.shared.state.lock().ended = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of it was its own message.
            let _ = thread.join();
        }
    }
}

fn options(why: String) -> GuestError {
    GuestError::Options { kind: GuestKind::Threads, why }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::time::Instant;

    use limosa_memory::{BlockOptions, FreePageSink, GuestRegion};
    use limosa_page::{PAGE_LEN, PAGE_SIZE};

    use super::*;

    const PIECES: u64 = 9;

    fn memory() -> Arc<GuestMemory> {
        let blocks = [("pc.ram", 16), (HEAP, PIECES * PIECE)];
        let blocks = blocks.map(|(name, pages)| BlockOptions::memfd(name, pages * PAGE_SIZE).map().unwrap());
        let region = |block: usize, guest_address| GuestRegion { guest_address, block, pages: blocks[block].pages() };
        let regions = vec![region(0, 0), region(1, 1 << 32)];
        Arc::new(GuestMemory::with_regions(blocks.into(), regions).unwrap())
    }

    fn heap() -> (Arc<GuestMemory>, Heap) {
        let memory = memory();
        let heap = Heap::boot(&memory, Rate::BytesPerSecond(0), 3, false).unwrap();
        (memory, heap)
    }

    fn verified(heap: &Heap) -> Result<(Verified, FreeHeap), GuestError> {
        let mut verified = Verified::default();
        let free = heap.verify(&mut verified)?;
        Ok((verified, free))
    }

    /// Waits until what the heap says of its free pages is so.
    fn wait_for(heap: &Heap, is_so: impl Fn(FreeHeap) -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            heap.pause();
            let (_, free) = verified(heap).unwrap();
            heap.run();
            if is_so(free) {
                return heap.pause();
            }
            assert!(Instant::now() < until, "{free:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

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

    #[test]
    fn what_programs_have_follows_from_the_state_and_damage_to_it_is_found() {
        let (from, heap) = heap();
        let (found, free) = verified(&heap).unwrap();
        assert_eq!((found.pages, free), (3 * PIECE, FreeHeap { free_pages: 6 * PIECE, held_pages: 0 }));
        let (to, other) = {
            let memory = memory();
            let heap = Heap::receive(&memory, Rate::BytesPerSecond(0), 3, false).unwrap();
            (memory, heap)
        };
        other.load(&heap.save()).unwrap();
        assert!(verified(&other).is_err(), "the state came without the memory");
        let mut bytes = vec![0; usize::try_from(from.block(1).unwrap().len()).unwrap()];
        from.block(1).unwrap().read(0, &mut bytes).unwrap();
        to.block(1).unwrap().write(0, &bytes).unwrap();
        assert_eq!(verified(&other).unwrap().0, found);
        // Pieces 0, 3 and 6 are programs'.
        to.block(1).unwrap().write(PIECE * PAGE_SIZE, &[1; PAGE_LEN]).unwrap();
        verified(&other).unwrap();
        to.block(1).unwrap().write(3 * PIECE * PAGE_SIZE + 8, &[0xee]).unwrap();
        let damaged = verified(&other).unwrap_err().to_string();
        assert!(damaged.contains(&format!("RAM block heap, page {}", 3 * PIECE)), "{damaged}");
    }

    #[test]
    fn a_state_that_is_none_is_refused() {
        let (_memory, heap) = heap();
        let state = heap.save();
        for length in 0..state.len() {
            assert!(heap.load(&state[..length]).is_err(), "{length} bytes");
        }
        for (at, value) in [(0, 1), (1, 9), (5, 3)] {
            let mut wrong = state.clone();
            wrong[at] = value;
            assert!(heap.load(&wrong).is_err(), "byte {at}");
        }
        heap.load(&state).unwrap();
    }

    #[test]
    fn the_driver_holds_back_what_it_reported_until_the_device_is_done_even_elsewhere() {
        let (_memory, heap) = heap();
        let (balloon, list) = (heap.free_pages(), Arc::new(List::default()));
        balloon.request_list(Arc::clone(&list) as _).unwrap();
        heap.run();
        let until = Instant::now() + Duration::from_secs(60);
        while !list.0.lock().1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut hinted = std::mem::take(&mut list.0.lock().0);
        hinted.sort_by_key(|range| range.start);
        let pieces = [1, 2, 4, 5, 7, 8].map(|piece| {
            let at = (1 << 32) + piece * PIECE * PAGE_SIZE;
            at..at + PIECE * PAGE_SIZE
        });
        assert_eq!(hinted, pieces);
        balloon.stop_list();
        heap.pause();
        let held = |heap: &Heap| verified(heap).unwrap().1.held_pages;
        assert_eq!(held(&heap), 6 * PIECE);
        // The driver is paused too: it gives the pieces back here when it continues, and elsewhere when it is moved.
        balloon.return_pages();
        let memory = memory();
        let other = Heap::receive(&memory, Rate::BytesPerSecond(0), 3, false).unwrap();
        let mut state = heap.save();
        other.load(&state).unwrap();
        assert_eq!(other.save(), state);
        other.run();
        let until = Instant::now() + Duration::from_secs(60);
        while other.shared.pieces.held() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        other.pause();
        for piece in state[5..].chunks_exact_mut(5) {
            piece[0] = u8::from(piece[0] == 1);
        }
        assert_eq!(other.save(), state);
        wait_for(&heap, |free| free.held_pages == 0);
    }
}
