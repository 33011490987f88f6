//! The blocks of an object: in memory, on the way, or still to be fetched.
//!
//! **Law: a block is on the way at most once.** Reads of one that is wait for it. A block that came, or that could not
//! be fetched, wakes all of them, also if the task that fetched it has panicked.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use bytes::Bytes;
use limosa_page::to_usize;
use limosa_storage::IoVector;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::hedging::Hedging;
use super::kept::Kept;
use super::pace::Pace;
use super::pin::{Pin, Pinned};
use super::queue::{Limits, Piece, Queue};
use super::read_ahead::ReadAhead;
use super::waiting::{Part, PendingRead, ReadEnd};
use super::{RemoteOptions, fetch};
use crate::cache::CachedObject;
use crate::counters::{RemoteFigures, Tally};
use crate::error::RemoteError;
use crate::runtime;
use crate::store::Store;

/// The longest piece that is fetched for reads, in bytes.
const DEMANDED_PIECE: u64 = 1 << 20;

/// The longest piece that is prefetched, in bytes.
const PREFETCHED_PIECE: u64 = 4 << 20;

/// The blocks of an object.
pub(super) struct Blocks {
    pub(super) store: Store,
    pub(super) pinned: Pinned,
    /// Whether requests name the version: a store may allow only the current one to be read.
    pub(super) by_version: AtomicBool,
    pub(super) options: RemoteOptions,
    pub(super) tally: Arc<Tally>,
    pub(super) hedging: Mutex<Hedging>,
    pub(super) cached: Option<Arc<CachedObject>>,
    handle: Handle,
    limits: Limits,
    state: Mutex<State>,
}

struct State {
    kept: Kept,
    queue: Queue,
    read_ahead: ReadAhead,
    /// Blocks that wait or are on the way.
    pending: HashMap<u64, Pending>,
    in_flight: usize,
    /// The number of the last flight.
    flights: u64,
    /// Blocks on their way that were prefetched.
    prefetching: u64,
    pace: Pace,
    /// Whether a task that begins pieces is on its way to the runtime: reads that come until then are seen together.
    is_dispatching: bool,
}

/// A block that waits or is on the way.
#[derive(Default)]
struct Pending {
    /// The flight that brings it; 0: it waits. A flight may fail when a block that it has brought is gone from memory,
    /// and already on the way again by another one.
    flight: u64,
    /// The parts of reads that wait for it.
    parts: Vec<Part>,
}

impl Blocks {
    /// Opens an object: asks for its first block, and learns from the answer what it is.
    pub(super) async fn open(store: Store, options: RemoteOptions) -> Result<Arc<Self>, RemoteError> {
        let tally = Arc::<Tally>::default();
        let (meta, first) = fetch::first_block(&store, &options, &tally).await?;
        let pinned = Pinned::new(meta);
        let block_size = u64::from(options.block_size);
        let cached = match (&options.cache, store.identity(), pinned.identity()) {
            (Some(cache), Some(identity), Some(version)) => {
                let (cache, identity) = (Arc::clone(cache), format!("{identity}\n{version}"));
                let length = pinned.length();
                let files = cache.files().clone();
                files.read(move || cache.object(&identity, length, block_size)).await.flatten()
            }
            _ => None,
        };
        let limits = Limits {
            concurrency: options.concurrency.clamp(1, 256),
            demanded: (DEMANDED_PIECE / block_size).max(1),
            prefetched: (PREFETCHED_PIECE / block_size).max(1),
        };
        let mut kept = Kept::new(options.memory);
        if let Some(first) = &first {
            kept.insert(0, first.clone(), false);
        }
        let state = State {
            kept,
            queue: Queue::default(),
            // Two readers must not drop each other's.
            read_ahead: ReadAhead::new(options.read_ahead.min(options.memory / 4) / block_size),
            pending: HashMap::new(),
            in_flight: 0,
            flights: 0,
            prefetching: 0,
            pace: Pace::new(),
            is_dispatching: false,
        };
        let handle = runtime::handle().map_err(|error| RemoteError::Local(error.to_string()))?;
        let by_version = AtomicBool::new(pinned.has_version());
        let hedging = Mutex::default();
        let blocks = Arc::new(Self {
            store,
            pinned,
            by_version,
            options,
            tally,
            hedging,
            cached,
            handle,
            limits,
            state: Mutex::new(state),
        });
        if let Some(first) = first {
            blocks.cache(0, first);
        }
        Ok(blocks)
    }

    pub(super) fn length(&self) -> u64 {
        self.pinned.length()
    }

    pub(super) fn pin(&self) -> Pin {
        self.pinned.pin()
    }

    pub(super) fn content_id(&self) -> Option<String> {
        self.pinned.identity()
    }

    pub(super) fn figures(&self) -> RemoteFigures {
        RemoteFigures(Arc::clone(&self.tally))
    }

    pub(super) fn block_size(&self) -> u64 {
        self.options.block_size.into()
    }

    /// The bytes of blocks.
    pub(super) fn bytes_of(&self, blocks: &Range<u64>) -> Range<u64> {
        let end = blocks.end.saturating_mul(self.block_size()).min(self.length());
        blocks.start * self.block_size()..end
    }

    /// Reads bytes inside of the object.
    pub(super) fn read(self: &Arc<Self>, offset: u64, into: &IoVector) -> (Arc<PendingRead>, ReadEnd) {
        let (size, end) = (self.block_size(), offset + into.len() as u64);
        let blocks = offset / size..end.div_ceil(size);
        let (read, done) = PendingRead::new(to_usize(blocks.end - blocks.start));
        let (mut found, mut is_missing) = (Vec::new(), false);
        let mut state = self.state.lock();
        let ahead = state.read_ahead.note(&blocks);
        state.queue.read_ahead(ahead.start..ahead.end.min(self.length().div_ceil(size)));
        for block in blocks {
            let start = offset.max(block * size);
            let within = to_usize(start - offset)..to_usize(end.min((block + 1) * size) - offset);
            let part = Part { into: into.slice(within), offset: start - block * size, read: Arc::clone(&read) };
            if let Some(bytes) = state.kept.read(block) {
                found.push((part, bytes));
            } else if let Some(waiting) = state.pending.get_mut(&block) {
                waiting.parts.push(part);
            } else {
                state.pending.insert(block, Pending { flight: 0, parts: vec![part] });
                state.queue.demand(block);
                is_missing = true;
            }
        }
        // What was read makes room for what is prefetched.
        if is_missing || state.queue.has_prefetch() {
            self.begin(&mut state);
        }
        drop(state);
        self.tally.memory_hits.add(found.len() as u64);
        found.iter().for_each(|(part, bytes)| part.fill(bytes));
        (read, done)
    }

    pub(super) fn prefetch(self: &Arc<Self>, ranges: &[Range<u64>]) {
        let size = self.block_size();
        let mut state = self.state.lock();
        for range in ranges {
            let end = range.end.min(self.length());
            state.queue.prefetch(range.start / size..end.div_ceil(size));
        }
        self.begin(&mut state);
    }

    /// Whether all blocks of a range are in memory. Those that are not are demanded, as by a read, and not
    /// waited for.
    pub(super) fn is_near(self: &Arc<Self>, range: &Range<u64>) -> bool {
        let size = self.block_size();
        let (mut is_near, mut is_missing) = (true, false);
        let mut state = self.state.lock();
        for block in range.start / size..range.end.min(self.length()).div_ceil(size) {
            if state.kept.contains(block) {
                continue;
            }
            is_near = false;
            if let Entry::Vacant(vacant) = state.pending.entry(block) {
                vacant.insert(Pending::default());
                state.queue.demand(block);
                is_missing = true;
            }
        }
        if is_missing {
            self.begin(&mut state);
        }
        is_near
    }

    pub(super) fn stop_prefetching(&self) {
        self.state.lock().queue.clear_prefetch();
    }

    /// Has the runtime begin what can be begun.
    fn begin(self: &Arc<Self>, state: &mut State) {
        if !std::mem::replace(&mut state.is_dispatching, true) {
            let blocks = Arc::clone(self);
            self.handle.spawn(async move { blocks.dispatch() });
        }
    }

    fn dispatch(self: &Arc<Self>) {
        let mut state = self.state.lock();
        state.is_dispatching = false;
        loop {
            let State { kept, queue, pending, in_flight, flights, prefetching, pace, .. } = &mut *state;
            let on_their_way = *prefetching * self.block_size();
            let window = pace.window(self.options.memory / 2);
            let has_room = self.cached.is_some() || kept.has_room(on_their_way);
            let may_prefetch = has_room && on_their_way < window;
            // Several, so that one that ends makes room in time.
            let longest = (window / 4 / self.block_size()).clamp(1, self.limits.prefetched);
            let limits = Limits { prefetched: longest, ..self.limits };
            let is_wanted = |block: u64| !kept.contains(block) && !pending.contains_key(&block);
            let Some(piece) = queue.next(&limits, *in_flight, may_prefetch, is_wanted) else { break };
            *in_flight += 1;
            *flights += 1;
            *prefetching += piece.prefetched();
            for block in piece.blocks.clone() {
                pending.entry(block).or_default().flight = *flights;
            }
            let flight = Flight { blocks: Arc::clone(self), piece, number: *flights, is_over: false };
            self.handle.spawn(flight.run());
        }
    }

    /// A block came: `bytes` is all of it. Returns false, and does nothing, if it came already.
    pub(super) fn deliver(&self, block: u64, bytes: &Bytes) -> bool {
        let waiting = {
            let mut state = self.state.lock();
            let Some(waiting) = state.pending.remove(&block) else { return false };
            state.kept.insert(block, bytes.clone(), waiting.parts.is_empty());
            waiting
        };
        waiting.parts.iter().for_each(|part| part.fill(bytes));
        true
    }

    /// Whether a block is still waited for.
    pub(super) fn is_pending(&self, block: u64) -> bool {
        self.state.lock().pending.contains_key(&block)
    }

    /// Blocks of a flight cannot be fetched. Those that came already are not concerned.
    fn fail(&self, blocks: Range<u64>, flight: u64, error: &RemoteError) {
        let mut waiting = Vec::new();
        {
            let mut state = self.state.lock();
            for block in blocks {
                if state.pending.get(&block).is_some_and(|pending| pending.flight == flight) {
                    waiting.extend(state.pending.remove(&block));
                }
            }
        }
        waiting.iter().flat_map(|pending| &pending.parts).for_each(|part| part.fail(error));
    }

    /// Writes a block into the cache, beside other work.
    pub(super) fn cache(&self, block: u64, bytes: Bytes) {
        if let Some(cached) = &self.cached
            && let Some(room) = cached.room_for_write()
        {
            let written = Arc::clone(cached);
            cached.files().write(move || {
                written.write(block, &bytes);
                drop(room);
            });
        }
    }

    /// The blocks of a piece that the cache does not have; it delivers those that it has. A block that nobody waits for
    /// stays on disk.
    async fn read_cached(&self, piece: &Piece) -> Vec<Range<u64>> {
        let Some(cached) = &self.cached else { return vec![piece.blocks.clone()] };
        let (mut missing, mut wanted) = (Vec::new(), piece.blocks.clone().collect::<Vec<_>>());
        if !piece.is_demanded {
            let (looked, blocks) = (Arc::clone(cached), piece.blocks.clone());
            let has = cached.files().read(move || blocks.filter(|block| looked.has(*block)).collect::<Vec<_>>());
            let has = has.await.unwrap_or_default();
            missing = piece.blocks.clone().filter(|block| !has.contains(block)).collect();
            wanted = has.into_iter().filter(|block| !self.give_up(*block)).collect();
        }
        if !wanted.is_empty() {
            let (read, blocks) = (Arc::clone(cached), wanted.clone());
            let read = move || blocks.into_iter().map(|block| (block, read.read(block))).collect::<Vec<_>>();
            let none = || wanted.iter().map(|block| (*block, None)).collect();
            for (block, bytes) in cached.files().read(read).await.unwrap_or_else(none) {
                match bytes {
                    Some(bytes) => {
                        self.tally.cache_hits.add(1);
                        self.deliver(block, &bytes);
                    }
                    None => missing.push(block),
                }
            }
        }
        missing.sort_unstable();
        runs(&missing)
    }

    /// Lets go of a block that is on its way, unless a read waits for it. Returns whether nobody does.
    fn give_up(&self, block: u64) -> bool {
        let mut state = self.state.lock();
        let is_unwanted = state.pending.get(&block).is_some_and(|pending| pending.parts.is_empty());
        if is_unwanted {
            state.pending.remove(&block);
        }
        is_unwanted
    }
}

/// The runs of neighbours among blocks in order.
fn runs(blocks: &[u64]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for &block in blocks {
        match runs.last_mut() {
            Some(last) if last.end == block => last.end = block + 1,
            _ => runs.push(block..block + 1),
        }
    }
    runs
}

/// A piece on its way.
struct Flight {
    blocks: Arc<Blocks>,
    piece: Piece,
    number: u64,
    /// Whether each of its blocks came or failed. Then they may be on the way again already, by another piece.
    is_over: bool,
}

impl Flight {
    async fn run(mut self) {
        let missing = self.blocks.read_cached(&self.piece).await;
        let fetches = missing.into_iter().map(|run| {
            let blocks = &self.blocks;
            let is_demanded = self.piece.is_demanded;
            async move {
                let began = Instant::now();
                let departure = blocks.state.lock().pace.depart(began);
                match fetch::run(blocks, run.clone(), is_demanded).await {
                    Ok(()) => {
                        let bytes = blocks.bytes_of(&run);
                        blocks.state.lock().pace.arrive(departure, bytes.end - bytes.start, Instant::now());
                        if is_demanded {
                            blocks.hedging.lock().record(began.elapsed());
                        }
                        let tally = if is_demanded { &blocks.tally.demanded } else { &blocks.tally.prefetched };
                        tally.add(run.end - run.start);
                    }
                    Err(error) => blocks.fail(run, self.number, &error),
                }
            }
        });
        futures_util::future::join_all(fetches).await;
        self.is_over = true;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if !self.is_over {
            let lost = RemoteError::Local("the task that fetched it has failed".to_owned());
            self.blocks.fail(self.piece.blocks.clone(), self.number, &lost);
        }
        let mut state = self.blocks.state.lock();
        state.in_flight -= 1;
        state.prefetching -= self.piece.prefetched();
        self.blocks.begin(&mut state);
    }
}
