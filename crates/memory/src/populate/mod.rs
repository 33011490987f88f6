//! Populating memory before pages arrive, to avoid page faults while they are received.

mod memcg_headroom;
mod piece;
mod prefault_ahead;

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use limosa_page::{PAGE_SIZE, PageRange};
use parking_lot::{Condvar, Mutex};

use crate::error::MemoryError;
use crate::{GuestMemory, MemoryBlock};

pub use memcg_headroom::MemcgHeadroom;
pub use prefault_ahead::PrefaultAhead;

/// Pages that one call populates; a stop waits for one call.
const PIECE: u64 = 512;
/// Maximum length of the queue. Further ranges are skipped.
const QUEUE: usize = 1024;
/// Bytes between two checks of the available memory.
const ALLOWANCE: u64 = 64 << 20;

/// Statistics of populating.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PopulateStats {
    /// Pages that were populated, or were present before.
    pub populated: u64,
    /// Pages that were skipped because memory was short or the queue was full.
    pub left_out: u64,
}

/// Populates memory, on threads of the caller.
///
/// ```
/// use limosa_memory::{BlockOptions, GuestMemory, Populator};
/// use limosa_page::{PageNumber, PageRange};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let memory = GuestMemory::new(vec![BlockOptions::memfd("pc.ram", 16 << 20).map()?])?;
/// let populator = Populator::new(&memory);
/// std::thread::scope(|scope| {
///     let workers = [(); 2].map(|()| scope.spawn(|| populator.run()));
///     populator.add(0, PageRange::whole_block(2048));
///     // ... while pages arrive:
///     populator.note_arrived(0, PageRange::starting_at(PageNumber(0), 128));
///     populator.finish(); // Or `stop`, which leaves out what waits.
///     workers.into_iter().try_for_each(|worker| worker.join().unwrap_or(Ok(())))
/// })?;
/// assert_eq!(populator.stats().populated, 2048);
/// # Ok(()) }
/// ```
///
/// Receiving a page into untouched memory costs a page fault inside the receiving call. Populating takes these faults
/// for many pages at once, on other cores, a little ahead. It is an optimization and behaves like one:
///
/// - **It allocates almost no memory in vain:** [`PrefaultAhead`] plans at most a 32nd of the arrived pages, less those
///   populated in vain before.
/// - **It never causes an OOM kill:** it stops before memory gets short, of the machine or of a control group
///   ([`MemcgHeadroom`]).
/// - It can be stopped between any two pieces of 2 MiB.
///
/// Populating changes no contents. Memory that is registered with a fault handler must not be populated: it would wait
/// for pages that nobody requested.
#[derive(Debug)]
pub struct Populator<'a> {
    memory: OnceLock<&'a GuestMemory>,
    headroom: MemcgHeadroom,
    state: Mutex<State>,
    changed: Condvar,
    stopped: AtomicBool,
    /// Bytes that may be allocated before the next check of the headroom.
    allowance: AtomicU64,
    populated: AtomicU64,
    left_out: AtomicU64,
}

#[derive(Debug)]
struct State {
    queue: VecDeque<(usize, PageRange)>,
    ahead: PrefaultAhead,
    /// No more ranges are added.
    finished: bool,
}

impl<'a> Populator<'a> {
    /// Creates a populator for `memory`, with the limits of this process.
    pub fn new(memory: &'a GuestMemory) -> Self {
        Self::with_headroom(memory, MemcgHeadroom::of_this_process())
    }

    /// Creates a populator for `memory`, with these limits.
    pub fn with_headroom(memory: &'a GuestMemory, headroom: MemcgHeadroom) -> Self {
        let new = Self::unbound(headroom);
        new.bind(memory);
        new
    }

    /// Creates a populator for memory that is not known yet: until it is bound, threads wait and ranges are ignored.
    pub fn unbound(headroom: MemcgHeadroom) -> Self {
        let state = State { queue: VecDeque::new(), ahead: PrefaultAhead::new([]), finished: false };
        Self {
            memory: OnceLock::new(),
            headroom,
            state: Mutex::new(state),
            changed: Condvar::new(),
            stopped: AtomicBool::new(false),
            allowance: AtomicU64::new(0),
            populated: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        }
    }

    /// Sets the memory. Only the first call counts.
    pub fn bind(&self, memory: &'a GuestMemory) {
        let blocks = memory.blocks().iter().map(|block| (block.pages(), (block.page_size() / PAGE_SIZE).max(1)));
        let mut state = self.state.lock();
        if self.memory.set(memory).is_ok() {
            state.ahead = PrefaultAhead::new(blocks);
        }
    }

    /// Queues pages that are known to arrive. Pages outside the block are ignored.
    pub fn add(&self, block: usize, pages: PageRange) {
        self.add_to(&mut self.state.lock(), block, pages);
    }

    /// Notes that pages have arrived, and queues the pages likely to arrive next.
    pub fn note_arrived(&self, block: usize, pages: PageRange) {
        let mut state = self.state.lock();
        if let Some(next) = state.ahead.note_arrived(block, pages) {
            self.add_to(&mut state, block, next);
        }
    }

    fn add_to(&self, state: &mut State, block: usize, pages: PageRange) {
        let Some(known) = self.blocks().get(block) else { return };
        let pages = pages.intersect(known.pages());
        if pages.is_empty() {
            return;
        }
        if state.queue.len() >= QUEUE || state.finished {
            self.left_out.fetch_add(pages.len(), Ordering::Relaxed);
            return;
        }
        state.queue.push_back((block, pages));
        self.changed.notify_one();
    }

    /// Populates on this thread; returns when the populator is stopped, or finished and the queue is empty.
    ///
    /// # Errors
    /// An error of the kernel other than a lack of memory; other threads continue.
    pub fn run(&self) -> Result<(), MemoryError> {
        while let Some((index, pages)) = self.next() {
            let Some(block) = self.blocks().get(index) else { continue };
            // A pool of huge pages is reserved: using it takes no memory from others.
            let counted = block.page_size() == PAGE_SIZE;
            if (counted && !self.allows(pages.len() * PAGE_SIZE)) || !block.populate(pages)? {
                self.left_out.fetch_add(pages.len(), Ordering::Relaxed);
            } else {
                self.populated.fetch_add(pages.len(), Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Waits for the next piece; `None` at the end.
    fn next(&self) -> Option<(usize, PageRange)> {
        let mut state = self.state.lock();
        loop {
            if self.stopped.load(Ordering::SeqCst) {
                return None;
            }
            if let Some((block, pages)) = state.queue.pop_front() {
                let host = self.blocks().get(block).map_or(1, |block| (block.page_size() / PAGE_SIZE).max(1));
                let (piece, rest) = pages.split_at(pages.start.saturating_add(PIECE.max(host)));
                if !rest.is_empty() {
                    state.queue.push_front((block, rest));
                    self.changed.notify_one();
                }
                return Some((block, piece));
            }
            if state.finished {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }

    fn allows(&self, bytes: u64) -> bool {
        let take = |left: u64| left.checked_sub(bytes);
        if self.allowance.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok() {
            return true;
        }
        // Half of the rest, so that threads that check at the same time do not take it twice.
        let new = self.headroom.left().map_or(ALLOWANCE, |left| (left / 2).min(ALLOWANCE));
        self.allowance.store(new.saturating_sub(bytes), Ordering::SeqCst);
        new >= bytes
    }

    /// Ends the queue: threads return when all is populated.
    pub fn finish(&self) {
        self.state.lock().finished = true;
        self.changed.notify_all();
    }

    /// Stops: queued ranges are skipped, and threads return after their current piece.
    pub fn stop(&self) {
        let mut state = self.state.lock();
        self.stopped.store(true, Ordering::SeqCst);
        let waiting: u64 = state.queue.drain(..).map(|(_, pages)| pages.len()).sum();
        self.left_out.fetch_add(waiting, Ordering::Relaxed);
        state.finished = true;
        self.changed.notify_all();
    }

    /// Returns the statistics so far.
    pub fn stats(&self) -> PopulateStats {
        PopulateStats {
            populated: self.populated.load(Ordering::Relaxed),
            left_out: self.left_out.load(Ordering::Relaxed),
        }
    }

    fn blocks(&self) -> &'a [MemoryBlock] {
        self.memory.get().map(|memory| memory.blocks()).unwrap_or_default()
    }
}
