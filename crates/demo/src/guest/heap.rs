//! The guest's heap: memory that its programs allocate, write and give back, and the driver of its balloon, which tells
//! what of it is free.
//!
//! The heap is a separate RAM block, [`HEAP`], in pieces that a program has as a whole. A model, after Linux's: its
//! page allocator for the heap, and its balloon's driver for what is asked of it. The driver **holds back** what it has
//! told until the device says that this is over; if memory is short, its shrinker gives pieces to programs before that
//! **without telling the device**, and they are written at once. What it tells goes through a device that passes it on
//! some time later, in any order, and goes on doing so after it was told to stop.
//!
//! **Law: what a program has holds what the program wrote.** That follows from the heap's state, as with all of the
//! guest; a free piece may hold anything.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use limosa_memory::dirty::{DirtyLog, SoftwareDirtyBitmap, SoftwareDirtyLog, Writers};
use limosa_memory::{FreePageSink, FreePages, FreePagesError, GuestMemory};
use limosa_page::{PAGE_SIZE, PageNumber, PageRange, to_usize};

use super::gate::{Gate, Pace};
use super::pattern::Contents;
use super::ram::Ram;
use super::{GuestError, GuestKind, HEAP, Rate, Verified};

/// Pages of a piece: 256 KiB.
const PIECE: u64 = 64;

/// Version of the format of a heap's state.
pub const HEAP_VERSION: u8 = 1;

/// Of the ten things that a program may do next, how many are what.
const REWRITE: u64 = 4;
const GIVE_BACK: u64 = 4;

/// Pieces that the driver may go on telling after it was stopped.
const LATE: u32 = 4;

/// How long the device sometimes takes.
const DEVICE_TICK: Duration = Duration::from_micros(200);

/// Who has a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// The allocator.
    Free = 0,
    /// A program.
    Program = 1,
    /// The balloon's driver, which has told it.
    Driver = 2,
}

/// A piece, and how often programs have written it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    owner: Owner,
    generation: u32,
}

/// What the driver has told the device.
enum QueuedHint {
    Free(Arc<dyn FreePageSink>, Range<u64>),
    All(Arc<dyn FreePageSink>),
}

/// What is asked of the driver.
struct HintRequest {
    to: Arc<dyn FreePageSink>,
    /// The piece that it looks at next.
    next: usize,
    /// If it was stopped: pieces until it notices.
    stopping: Option<u32>,
}

struct State {
    pieces: Vec<Piece>,
    random: u64,
    request: Option<HintRequest>,
    /// The device's word that the driver has to give everything back: in its configuration, and so in its state.
    done: bool,
    under_way: VecDeque<QueuedHint>,
    /// Whether the guest runs, and with it the driver.
    running: bool,
    ended: bool,
}

/// What the threads share.
struct HeapInner {
    ram: Ram,
    /// Its block, where the guest sees that, and its first page as [`Ram`] counts.
    block: usize,
    address: u64,
    first: u64,
    seed: u32,
    /// For logs that do not see what this process writes.
    marker: Option<SoftwareDirtyBitmap>,
    programs: Gate,
    state: Mutex<State>,
    /// Notified of everything that concerns the driver or the device.
    changed: Condvar,
}

/// The heap of a guest. It is paused when it is made; dropping it ends it.
pub struct Heap {
    shared: Arc<HeapInner>,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Heap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Heap").field("block", &self.shared.block).finish_non_exhaustive()
    }
}

impl Heap {
    /// The heap of a new guest: programs have a third of it, and have written and given back the rest. `marked`:
    /// whether the dirty log is one that does not see what this process writes.
    ///
    /// # Errors
    /// The memory has no such block, or the system has no thread.
    pub fn boot(memory: &Arc<GuestMemory>, rate: Rate, seed: u32, marked: bool) -> Result<Self, GuestError> {
        let heap = Self::receive(memory, rate, seed, marked)?;
        let shared = &heap.shared;
        let count = shared.lock().pieces.len();
        for index in 0..count {
            shared.lock().pieces[index] =
                Piece { owner: if index % 3 == 0 { Owner::Program } else { Owner::Free }, generation: 1 };
            shared.write(index, 1);
        }
        Ok(heap)
    }

    /// A heap that waits for its state.
    ///
    /// # Errors
    /// As [`boot`](Self::boot).
    pub fn receive(memory: &Arc<GuestMemory>, rate: Rate, seed: u32, marked: bool) -> Result<Self, GuestError> {
        let found = memory.index_of(HEAP).and_then(|block| {
            let region = memory.regions().iter().find(|region| region.block == block)?;
            Some((block, region.guest_address, memory.block(block).ok()?.pages().len()))
        });
        let Some((block, address, pages)) = found else {
            return Err(options(format!("its memory has no block {HEAP}")));
        };
        if pages < PIECE {
            return Err(options(format!("its heap has {pages} pages, of at least {PIECE}")));
        }
        let pieces = vec![Piece { owner: Owner::Free, generation: 0 }; to_usize(pages / PIECE)];
        let marker = marked.then(|| SoftwareDirtyLog::new(memory, Writers::DEVICES).bitmap());
        let state = State {
            pieces,
            random: u64::from(seed) << 20 | 0x5eed,
            request: None,
            done: false,
            under_way: VecDeque::new(),
            running: false,
            ended: false,
        };
        let shared = Arc::new(HeapInner {
            ram: Ram::whole(Arc::clone(memory)),
            block,
            address,
            first: memory.blocks().iter().take(block).map(|block| block.pages().len()).sum(),
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

    /// Lets programs and the driver run, or go on.
    pub fn run(&self) {
        self.shared.lock().running = true;
        self.shared.changed.notify_all();
        self.shared.programs.run();
    }

    /// Stops them. When it returns nothing of the heap is written any more.
    pub fn pause(&self) {
        self.shared.programs.pause();
        self.shared.lock().running = false;
    }

    /// Takes `percent` of their time from programs.
    pub fn throttle(&self, percent: u8) {
        self.shared.programs.throttle(percent);
    }

    /// What has to be beside the guest's own log, if that does not see the heap.
    pub fn log(&self) -> Option<Box<dyn DirtyLog>> {
        self.shared.marker.as_ref().map(|marker| Box::new(marker.log(Writers::DEVICES)) as _)
    }

    /// Who can be asked for what is free.
    pub fn balloon(&self) -> Arc<dyn FreePages> {
        Arc::new(Balloon(Arc::clone(&self.shared)))
    }

    /// Its state beside memory: version, seed, whether the device says that all is to be given back, and for each piece
    /// who has it and how often it was written. All numbers big-endian.
    pub fn save(&self) -> Vec<u8> {
        let state = self.shared.lock();
        let mut bytes = vec![HEAP_VERSION];
        bytes.extend_from_slice(&self.shared.seed.to_be_bytes());
        bytes.push(state.done.into());
        for piece in &state.pieces {
            bytes.push(piece.owner as u8);
            bytes.extend_from_slice(&piece.generation.to_be_bytes());
        }
        bytes
    }

    /// Takes the state of a heap of the same size. It is paused.
    ///
    /// # Errors
    /// It is not one.
    pub fn load(&self, bytes: &[u8]) -> Result<(), GuestError> {
        let wrong = |offset, why: &str| GuestError::State { kind: GuestKind::Threads, offset, why: why.into() };
        let Some(([version, seed @ .., done], pieces)) = bytes.split_first_chunk::<6>() else {
            return Err(wrong(bytes.len(), "it is truncated"));
        };
        if *version != HEAP_VERSION || u32::from_be_bytes(*seed) != self.shared.seed || *done > 1 {
            return Err(wrong(0, "it is that of another heap"));
        }
        let (pieces, rest) = pieces.as_chunks::<5>();
        let mut state = self.shared.lock();
        if !rest.is_empty() || pieces.len() != state.pieces.len() {
            return Err(wrong(6, "it is that of a heap of another size"));
        }
        let piece = |(index, [owner, generation @ ..]): (usize, &[u8; 5])| {
            let owner = match owner {
                0 => Owner::Free,
                1 => Owner::Program,
                2 => Owner::Driver,
                _ => return Err(wrong(6 + 5 * index, "unknown owner of a piece")),
            };
            Ok(Piece { owner, generation: u32::from_be_bytes(*generation) })
        };
        state.pieces = pieces.iter().enumerate().map(piece).collect::<Result<_, _>>()?;
        state.done = *done == 1;
        Ok(())
    }

    /// Checks what programs have, and adds it to what was found elsewhere. Also counts free pages, and those that the
    /// driver holds back.
    ///
    /// # Errors
    /// It is not paused, or a page does not hold what was written.
    pub fn verify(&self, verified: &mut Verified) -> Result<FreeHeap, GuestError> {
        if !self.shared.programs.is_paused() {
            return Err(GuestError::NotPaused("looking at the heap"));
        }
        self.shared.programs.all_live(GuestKind::Threads)?;
        let pieces = self.shared.lock().pieces.clone();
        let mut free = FreeHeap::default();
        for (index, piece) in pieces.iter().enumerate() {
            match piece.owner {
                Owner::Free => free.free_pages += PIECE,
                Owner::Driver => free.held_pages += PIECE,
                Owner::Program => {
                    let first = self.shared.first + self.shared.pages(index).start.0;
                    let expected = |page| self.shared.contents(page, piece.generation);
                    self.shared.ram.verify_pages(first..first + PIECE, piece.generation.into(), expected, verified)?;
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
    /// The balloon's driver holds them back.
    pub held_pages: u64,
}

impl HeapInner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pages of a piece, in the block.
    fn pages(&self, piece: usize) -> PageRange {
        PageRange::starting_at(PageNumber((piece as u64).saturating_mul(PIECE)), PIECE)
    }

    /// What a page holds after so many writes of its piece.
    fn contents(&self, page: u64, generation: u32) -> Contents {
        Contents::of(self.seed ^ 0x4eab, page, generation.into(), 1)
    }

    /// Writes all of a piece. Only the thread of the programs does, once the guest runs.
    fn write(&self, piece: usize, generation: u32) {
        let pages = self.pages(piece);
        for page in pages.iter().map(|page| self.first + page.0) {
            self.ram.store(page, self.contents(page, generation));
        }
        if let Some(marker) = &self.marker {
            marker.mark(self.block, pages);
        }
    }

    /// The loop of the programs: each of their steps counts as the pages of a piece.
    fn run_programs(&self) {
        let (mut pace, mut credit) = (Pace::default(), 0);
        while let Some(pages) = self.programs.admit(&mut pace) {
            credit += pages;
            while credit >= PIECE {
                credit -= PIECE;
                self.act();
            }
        }
    }

    /// A program takes a piece, writes one that it has, or gives one back.
    fn act(&self) {
        let mut state = self.lock();
        let random = state.next();
        let index = to_usize(random >> 24) % state.pieces.len();
        let Some(piece) = state.pieces.get_mut(index) else { return };
        let what = random % 10;
        if piece.owner == Owner::Program && (REWRITE..REWRITE + GIVE_BACK).contains(&what) {
            piece.owner = Owner::Free;
            return;
        }
        // What the driver holds is taken only when memory is short.
        if piece.owner == Owner::Driver && what > 2 {
            return;
        }
        piece.owner = Owner::Program;
        piece.generation = piece.generation.wrapping_add(1);
        let generation = piece.generation;
        drop(state);
        self.write(index, generation);
    }

    /// The loop of the driver.
    fn drive(&self) {
        let mut state = self.lock();
        while !state.ended {
            if !state.running || !(state.done || state.request.is_some()) {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if std::mem::take(&mut state.done) {
                let held = state.pieces.iter_mut().filter(|piece| piece.owner == Owner::Driver);
                held.for_each(|piece| piece.owner = Owner::Free);
            }
            self.tell_one(&mut state);
            // Others come between two pieces.
            drop(state);
            std::thread::yield_now();
            state = self.lock();
        }
    }

    /// Takes the next free piece and reports it, if a report was requested.
    fn tell_one(&self, state: &mut State) {
        let Some(mut request) = state.request.take() else { return };
        match &mut request.stopping {
            Some(0) => return,
            Some(left) => *left -= 1,
            None => {}
        }
        let free = state.pieces.iter().enumerate().skip(request.next).find(|(_, piece)| piece.owner == Owner::Free);
        match free.map(|(index, _)| index) {
            Some(index) => {
                if let Some(piece) = state.pieces.get_mut(index) {
                    piece.owner = Owner::Driver;
                }
                let begin = self.address + self.pages(index).start.offset();
                state.under_way.push_back(QueuedHint::Free(Arc::clone(&request.to), begin..begin + PIECE * PAGE_SIZE));
                request.next = index + 1;
                state.request = Some(request);
            }
            None => state.under_way.push_back(QueuedHint::All(request.to)),
        }
        self.changed.notify_all();
    }

    /// What the device does: passes on what the driver has told, the end of a list behind all of it.
    fn pass_on(&self) {
        let mut state = self.lock();
        while !state.ended {
            let random = state.next();
            if state.under_way.is_empty() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            // Sometimes later, and mostly not in order.
            if random.is_multiple_of(16) {
                drop(state);
                std::thread::sleep(DEVICE_TICK);
                state = self.lock();
                continue;
            }
            let free = state.under_way.iter().filter(|told| matches!(told, QueuedHint::Free(..))).count();
            let at = to_usize(random >> 33) % free.max(1);
            let mut found = 0;
            let index = state.under_way.iter().position(|told| {
                found += usize::from(matches!(told, QueuedHint::Free(..)));
                free == 0 || found == at + 1
            });
            let told = index.and_then(|index| state.under_way.remove(index));
            drop(state);
            match told {
                Some(QueuedHint::Free(to, range)) => to.free(range),
                Some(QueuedHint::All(to)) => to.complete(),
                None => {}
            }
            state = self.lock();
        }
    }
}

impl State {
    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

/// The balloon's device, as the engine sees it.
struct Balloon(Arc<HeapInner>);

impl FreePages for Balloon {
    fn request(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
        let mut state = self.0.lock();
        state.request = Some(HintRequest { to, next: 0, stopping: None });
        state.done = false;
        self.0.changed.notify_all();
        Ok(())
    }

    fn stop(&self) {
        let mut state = self.0.lock();
        if let Some(request) = &mut state.request {
            request.stopping.get_or_insert(LATE);
        }
    }

    fn done(&self) {
        let mut state = self.0.lock();
        state.request = None;
        // The driver does it when it runs: here, or at the destination, whose device says the same.
        state.done = true;
        self.0.changed.notify_all();
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        self.shared.programs.end();
        self.shared.lock().ended = true;
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
    use std::time::Instant;

    use limosa_memory::{BlockOptions, GuestRegion};
    use limosa_page::PAGE_LEN;

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
        fn free(&self, range: Range<u64>) {
            let mut list = self.0.lock().unwrap();
            assert!(!list.1, "the end of a list comes behind all of it");
            list.0.push(range);
        }
        fn complete(&self) {
            self.0.lock().unwrap().1 = true;
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
        for (at, value) in [(0, 2), (1, 9), (5, 2), (6, 3)] {
            let mut wrong = state.clone();
            wrong[at] = value;
            assert!(heap.load(&wrong).is_err(), "byte {at}");
        }
        heap.load(&state).unwrap();
    }

    #[test]
    fn the_driver_holds_back_what_it_reported_until_the_device_is_done_even_elsewhere() {
        let (_memory, heap) = heap();
        let (balloon, list) = (heap.balloon(), Arc::new(List::default()));
        balloon.request(Arc::clone(&list) as _).unwrap();
        heap.run();
        let until = Instant::now() + Duration::from_secs(60);
        while !list.0.lock().unwrap().1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut told = std::mem::take(&mut list.0.lock().unwrap().0);
        told.sort_by_key(|range| range.start);
        let pieces = [1, 2, 4, 5, 7, 8].map(|piece| {
            let at = (1 << 32) + piece * PIECE * PAGE_SIZE;
            at..at + PIECE * PAGE_SIZE
        });
        assert_eq!(told, pieces);
        balloon.stop();
        heap.pause();
        let held = |heap: &Heap| verified(heap).unwrap().1.held_pages;
        assert_eq!(held(&heap), 6 * PIECE);
        // It is paused: the device at the destination will notify it.
        balloon.done();
        let memory = memory();
        let other = Heap::receive(&memory, Rate::BytesPerSecond(0), 3, false).unwrap();
        let mut state = heap.save();
        other.load(&state).unwrap();
        other.run();
        let until = Instant::now() + Duration::from_secs(60);
        while other.save()[5] == 1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        other.pause();
        state[5] = 0;
        for piece in state[6..].chunks_exact_mut(5) {
            piece[0] = u8::from(piece[0] == 1);
        }
        assert_eq!(other.save(), state);
        wait_for(&heap, |free| free.held_pages == 0);
    }
}
