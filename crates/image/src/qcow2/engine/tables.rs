//! The L1 table and the L2 tables of an image in use: where everything lies.
//!
//! Law: what is in memory is the truth. The L1 table is there as a whole, of the L2 tables a bounded number of slices;
//! a change is made in memory, and the flusher brings it to the file. An entry is changed when what it leads to has
//! been written, never before, and only by the job that claimed its cluster. A table that something else refers to,
//! too, is copied before it is changed.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use futures_util::FutureExt;
use limosa_page::{BrokenInvariant, broken_invariant, to_u64, to_usize};
use limosa_storage::Buffer;

use super::allocator::Allocator;
use super::context::Context;
use super::counters::OperationKind;
use super::l1::{CapturedBlock, L1, L1Fault};
use super::locks::{Rank, RankedMutex};
use super::lookup::{Entries, Extent, Lookup, extent};
use super::pool::Run;
use super::seams;
use super::shared_future::SharedFuture;
use super::slice::SharedWord;
use super::slices::{CapturedSlice, Full, Slices};
use crate::error::ImageError;
use crate::offset::{ClusterCount, GuestOffset, HostOffset};
use crate::qcow2::format::entry::{L1Entry, L2Entry, OFFSET};
use crate::qcow2::format::geometry::L1Index;
use crate::qcow2::format::journal::EntryChange;

/// Words of a slice that are copied for a look without a lock, at most: those of a request of 1 MiB if
/// clusters have 16 KiB or more.
const COPIED: usize = 64;

/// Has changed slices written, so that there is room for others.
pub(super) trait MakeRoom: Send + Sync {
    fn make_room(self: Arc<Self>) -> SharedFuture;
}

pub(super) struct Tables {
    context: Arc<Context>,
    allocator: Arc<Allocator>,
    l1: L1,
    slices: Slices,
    /// L2 tables that are being made, by their L1 entries.
    making: RankedMutex<HashMap<L1Index, SharedFuture>>,
    /// L2 tables whose contents in the file mean nothing yet.
    new: RankedMutex<HashSet<HostOffset>>,
    /// How often clusters were zeroed that stay where they are: a read that was under way may have read what was
    /// written there since.
    zeroings: AtomicU64,
    room: Weak<dyn MakeRoom>,
}

/// The differences from the file, captured at one moment.
pub(super) struct CapturedTables {
    pub(super) l1: Vec<CapturedBlock>,
    pub(super) slices: Vec<CapturedSlice>,
    /// Tables that the file does not have yet.
    pub(super) new: Vec<HostOffset>,
}

/// The place of the L2 entry of an offset: in the slice at `slice`, from word `word` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EntryAddress {
    table: HostOffset,
    slice: HostOffset,
    word: usize,
    /// The entry's number in its table.
    number: u32,
}

impl Tables {
    pub(super) fn new(context: Arc<Context>, allocator: Arc<Allocator>, l1: L1, room: Weak<dyn MakeRoom>) -> Self {
        let slices = Slices::new(context.options().cache_size, context.slice_bits());
        Self {
            context,
            allocator,
            l1,
            slices,
            making: Rank::Making.mutex(HashMap::new()),
            new: Rank::New.mutex(HashSet::new()),
            zeroings: AtomicU64::new(0),
            room,
        }
    }

    /// Cancels all reads in flight.
    pub(super) fn clear(&self) {
        self.slices.clear();
        drop(self.making.take());
    }

    /// Returns the offset of the L1 table, and the number of its entries.
    pub(super) fn l1_place(&self) -> (HostOffset, usize) {
        self.l1.place()
    }

    /// Moves the L1 table to `at`, with room for `entries`.
    pub(super) fn l1_moved(&self, at: HostOffset, entries: u64) -> Result<(), BrokenInvariant> {
        let (_, old) = self.l1.place();
        seams::l1_grows(old, to_usize(entries))?;
        self.l1.moved(at, to_usize(entries));
        Ok(())
    }

    /// Returns whether anything has to be written.
    pub(super) fn differ(&self) -> bool {
        self.l1.differs() || self.slices.differ() || !self.new.lock().is_empty()
    }

    /// How often clusters were zeroed that stay where they are.
    pub(super) fn zeroings(&self) -> u64 {
        self.zeroings.load(Ordering::Acquire)
    }

    /// Notes that clusters were zeroed in place, before anything is written there again.
    pub(super) fn zeroed_in_place(&self) {
        self.zeroings.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether enough slices are dirty for a flush.
    pub(super) fn needs_flush(&self) -> bool {
        self.slices.needs_flush()
    }

    fn l1_entry(&self, index: L1Index) -> Result<L1Entry, ImageError> {
        self.l1.get(index).map_err(|fault| {
            let (at, entries) = self.l1.place();
            let why = match fault {
                L1Fault::Short => format!("it has {entries} entries, and the disk needs more"),
                L1Fault::Entry(fault) => fault.to_string(),
            };
            self.context.corrupt(format!("L1 table at {at}, entry {index}"), why)
        })
    }

    fn l1_index(&self, at: GuestOffset) -> L1Index {
        self.context.geometry().index(at).l1
    }

    /// Returns the place of an offset's L2 entry in its L2 table.
    fn address(&self, at: GuestOffset, table: HostOffset) -> EntryAddress {
        let geometry = self.context.geometry();
        let number = geometry.index(at).l2;
        let byte = u64::from(number) * geometry.l2_entry_size();
        let slice = table + byte / self.slices.slice_size() * self.slices.slice_size();
        let word = to_usize((table + byte - slice) / 8);
        EntryAddress { table, slice, word, number }
    }

    fn next(&self, address: EntryAddress) -> EntryAddress {
        EntryAddress { word: address.word + self.context.words_of_entry(), number: address.number + 1, ..address }
    }

    /// The entry at an address, of a slice's words.
    fn entry<W: Word>(&self, words: &[W], address: EntryAddress) -> Result<L2Entry, ImageError> {
        let geometry = self.context.geometry();
        let word =
            |at: usize| words.get(at).map(W::get).ok_or_else(|| broken_invariant("an L2 entry is within its slice"));
        let bitmap = if geometry.extended_l2 { word(address.word + 1)? } else { 0 };
        L2Entry::decode(word(address.word)?, bitmap, geometry, self.context.rules()).map_err(|fault| {
            self.context.corrupt(format!("L2 table at {}, entry {}", address.table, address.number), fault.to_string())
        })
    }

    const fn entries<'a, W: Word>(&'a self, words: &'a [W], address: EntryAddress) -> SliceEntries<'a, W> {
        SliceEntries { tables: self, words, address }
    }
}

/// Entries of a slice's words.
struct SliceEntries<'a, W> {
    tables: &'a Tables,
    words: &'a [W],
    /// The next one.
    address: EntryAddress,
}

impl<W: Word> Iterator for SliceEntries<'_, W> {
    type Item = Result<L2Entry, ImageError>;

    fn next(&mut self) -> Option<Self::Item> {
        let entry = (self.address.word < self.words.len()).then(|| self.tables.entry(self.words, self.address))?;
        self.address = self.tables.next(self.address);
        Some(entry)
    }
}

impl<W: Word> Entries for SliceEntries<'_, W> {
    fn skip_continued(&mut self, most: u64) -> u64 {
        let context = &self.tables.context;
        let each = context.words_of_entry();
        let Some((before, following)) = self.words.split_at_checked(self.address.word) else { return 0 };
        let value = |entry: &[W], at: usize| entry.get(at).map(W::get);
        let last = before.rchunks_exact(each).next();
        let Some((last, first)) = last.and_then(|last| Some((last, value(last, 0)?))) else { return 0 };
        let further = if first & OFFSET == 0 { 0 } else { context.geometry().cluster_size() };
        let mut expected = first;
        let continued = following.chunks_exact(each).take(to_usize(most)).take_while(|entry| {
            expected = expected.wrapping_add(further);
            let is_next = value(entry, 0) == Some(expected) && value(entry, 1) == value(last, 1);
            // A sum that reaches the flags is another entry.
            is_next && (expected ^ first) & !OFFSET == 0
        });
        let count = continued.count();
        self.address.word += count * each;
        // A slice has few.
        self.address.number = self.address.number.saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
        to_u64(count)
    }
}

/// A word of a slice, or of a copy.
trait Word {
    fn get(&self) -> u64;
}

impl Word for SharedWord {
    /// Of a slice that nobody else changes.
    fn get(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }
}

impl Word for u64 {
    fn get(&self) -> u64 {
        *self
    }
}

/// Looking up.
impl Tables {
    /// Returns the extent that begins at `at`, up to `end`, by the entries of one slice.
    pub(super) fn look(&self, at: GuestOffset, end: GuestOffset) -> Result<Lookup<Extent>, ImageError> {
        let covers = self.context.geometry().l2_covers();
        let Some(table) = self.l1_entry(self.l1_index(at))?.table else {
            let until = end.0.min((at.0 / covers + 1).saturating_mul(covers));
            return Ok(Lookup::Found(Extent::nothing(until - at.0)));
        };
        let address = self.address(at, table);
        let Some(found) = self.extent_in_slice(address, at, end) else { return Ok(Lookup::Load(address.slice)) };
        let none = || self.context.corrupt(format!("L2 table at {table}"), "it has no such entry");
        let found = found?.ok_or_else(none)?;
        seams::extent_is_inside(found.length, at, end)?;
        Ok(Lookup::Found(found))
    }

    /// The extent by the entries of a slice, if it is here; `None` in it without entries.
    fn extent_in_slice(
        &self,
        address: EntryAddress,
        at: GuestOffset,
        end: GuestOffset,
    ) -> Option<Result<Option<Extent>, ImageError>> {
        let geometry = self.context.geometry();
        let clusters = end.0.div_ceil(geometry.cluster_size()) - (at.0 >> geometry.cluster_bits);
        let mut copy = [0; COPIED];
        match copy.get_mut(..to_usize(clusters).saturating_mul(self.context.words_of_entry())) {
            Some(wanted) => {
                let count = self.slices.copy(address.slice, address.word, wanted)?;
                let words = wanted.get(..count).unwrap_or_default();
                Some(extent(geometry, at, end, self.entries(words, EntryAddress { word: 0, ..address })))
            }
            None => self.slices.get(address.slice, |words| extent(geometry, at, end, self.entries(words, address))),
        }
    }

    /// Returns the extent that begins at `at`, up to `end`; reads tables if necessary.
    pub(super) async fn extent(self: &Arc<Self>, at: GuestOffset, end: GuestOffset) -> Result<Extent, ImageError> {
        loop {
            match self.look(at, end)? {
                Lookup::Found(extent) => return Ok(extent),
                Lookup::Load(slice) => self.load(slice).await?,
            }
        }
    }

    /// Passes the entries of the clusters from `at` to `end`, those that one slice has, to `visit`. Each is decoded
    /// when it is asked for.
    pub(super) fn visit<R>(
        &self,
        at: GuestOffset,
        end: GuestOffset,
        visit: impl FnOnce(&mut dyn Iterator<Item = Result<L2Entry, ImageError>>) -> Result<R, ImageError>,
    ) -> Result<Lookup<R>, ImageError> {
        let cluster = self.context.geometry().cluster_size();
        let table = self.l1_entry(self.l1_index(at))?.table;
        // Where in a slice its entry is, or would be if there was a table.
        let address = self.address(at, table.unwrap_or(HostOffset(0)));
        let in_slice = to_usize(self.slices.slice_size() / 8).saturating_sub(address.word);
        let wanted = to_usize((end.0.div_ceil(cluster)).saturating_sub(at.0 / cluster));
        let count = wanted.min(in_slice / self.context.words_of_entry());
        if table.is_none() {
            return visit(&mut std::iter::repeat_n(L2Entry::NONE, count).map(Ok)).map(Lookup::Found);
        }
        let visited = self.slices.get(address.slice, |words| visit(&mut self.entries(words, address).take(count)));
        visited.map_or(Ok(Lookup::Load(address.slice)), |visited| visited.map(Lookup::Found))
    }

    /// Reads a slice. All that want it wait for one reading.
    pub(super) fn load(self: &Arc<Self>, slice: HostOffset) -> SharedFuture {
        let begin = || {
            let tables = Arc::clone(self);
            let load = async move {
                let loaded = tables.load_now(slice).await;
                tables.slices.loaded(slice);
                loaded
            };
            load.boxed().shared()
        };
        self.slices.loading(slice, begin)
    }

    async fn load_now(&self, slice: HostOffset) -> Result<(), ImageError> {
        if self.slices.has(slice) {
            return Ok(());
        }
        let size = self.slices.slice_size();
        let table = slice.align_down(self.context.geometry().cluster_size());
        let is_new = self.new.lock().contains(&table);
        let mut words: Box<[u64]> = if is_new {
            vec![0; to_usize(size / 8)].into()
        } else {
            let part = slice..slice.saturating_add(size);
            let bytes = self.context.read_table(OperationKind::L2Read, "L2 table", table, part).await?;
            bytes.as_chunks().0.iter().map(|word| u64::from_be_bytes(*word)).collect()
        };
        while let Err(Full(back)) = self.slices.insert(slice, words) {
            self.make_room().await?;
            words = back;
        }
        Ok(())
    }
}

/// Changing.
impl Tables {
    /// There is an L2 table for this offset that nothing else refers to; it is made if need be.
    pub(super) async fn prepare(self: &Arc<Self>, at: GuestOffset) -> Result<(), ImageError> {
        self.table_for(self.l1_index(at)).await.map(drop)
    }

    /// The L2 table of an L1 entry, which nothing else refers to; made if need be.
    async fn table_for(self: &Arc<Self>, index: L1Index) -> Result<HostOffset, ImageError> {
        loop {
            let entry = self.l1_entry(index)?;
            if let Some(table) = entry.table.filter(|_| entry.copied) {
                return Ok(table);
            }
            self.make_table(index).await?;
        }
    }

    fn make_table(self: &Arc<Self>, index: L1Index) -> SharedFuture {
        let begin = || {
            let tables = Arc::clone(self);
            let make = async move {
                let made = tables.make_table_now(index).await;
                let future = tables.making.lock().remove(&index);
                drop(future);
                made
            };
            make.boxed().shared()
        };
        self.making.lock().entry(index).or_insert_with(begin).clone()
    }

    async fn make_table_now(&self, index: L1Index) -> Result<(), ImageError> {
        let entry = self.l1_entry(index)?;
        if entry.table.is_some() && entry.copied {
            return Ok(());
        }
        let runs = self.allocator.allocate(ClusterCount::ONE).await?;
        let geometry = self.context.geometry();
        let run = runs.first().ok_or_else(|| broken_invariant("an allocation hands out what was asked for"))?;
        let at = run.first.begin(geometry.cluster_bits);
        let length = geometry.cluster_size();
        // The cluster may have been a table before, whose reading may have been begun.
        for loading in self.slices.loading_within(at, length) {
            let _ = loading.await;
        }
        self.slices.forget(at, length);
        if let Some(old) = entry.table {
            self.copy_table(old, at, runs).await?;
        } else {
            // What is there on disk means nothing: the first flush writes all of it.
            self.new.lock().insert(at);
        }
        self.allocator.has_l2_table(at);
        self.l1.set(index, L1Entry { table: Some(at), copied: true })?;
        // Only now: a flush that takes the drop takes the new entry, too.
        if let Some(old) = entry.table {
            self.allocator.drop_table(old);
        }
        Ok(())
    }

    /// Copies a table to a new cluster, which is put back if that fails.
    async fn copy_table(&self, from: HostOffset, to: HostOffset, runs: Vec<Run>) -> Result<(), ImageError> {
        let length = self.context.geometry().cluster_size();
        let copy = async {
            let whole = from..from.saturating_add(length);
            let bytes = self.context.read_table(OperationKind::L2Read, "L2 table", from, whole).await?;
            self.context.write_table(OperationKind::L2Write, to, Buffer::from_slice(&bytes).into()).await
        };
        let copied = copy.await;
        if copied.is_err() {
            self.allocator.put_back(runs);
        }
        copied
    }

    /// Changes the entries of `count` clusters from that of `at` on, which one slice has: all of them, or, if it fails,
    /// none. `change` is called once for each, with its number.
    pub(super) async fn change(
        self: &Arc<Self>,
        at: GuestOffset,
        count: usize,
        mut change: impl FnMut(usize, L2Entry) -> L2Entry + Send,
    ) -> Result<(), ImageError> {
        let table = self.table_for(self.l1_index(at)).await?;
        let start = self.address(at, table);
        let (geometry, first) = (self.context.geometry(), at.0 >> self.context.geometry().cluster_bits);
        loop {
            let changed = self.slices.change(start.slice, |words| {
                // All of them can be read and recorded, or none is changed.
                self.entries(words, start).take(count).try_for_each(|entry| entry.map(drop))?;
                let journal = self.context.journal();
                let record = match journal.map(|journal| journal.reserve(count)).transpose()? {
                    Some(None) => return Ok::<_, ImageError>(false),
                    room => journal.zip(room.flatten()),
                };
                let mut address = start;
                for index in 0..count {
                    let old = self.entry(words, address)?;
                    let (entry, bitmap) = change(index, old).encode(geometry);
                    if let Some((journal, room)) = record {
                        let cluster = first + index as u64;
                        let (old, new) = (old.encode(geometry), (entry, bitmap));
                        journal.record(room, index, &EntryChange { cluster, old, new })?;
                    }
                    let both = [entry, bitmap];
                    let places = words.iter().skip(address.word).take(self.context.words_of_entry());
                    places.zip(both).for_each(|(word, new)| word.store(new, Ordering::Relaxed));
                    address = self.next(address);
                }
                Ok(true)
            });
            match changed.transpose()? {
                Some(true) => return Ok(()),
                Some(false) => self.make_room().await?,
                None => self.load(start.slice).await?,
            }
        }
    }

    /// Has everything that differs written, which makes room in memory and in the journal.
    async fn make_room(&self) -> Result<(), ImageError> {
        let room = self.room.upgrade().ok_or_else(|| self.context.unsupported("it has been closed"))?;
        room.make_room().await
    }
}

/// For a flush.
impl Tables {
    /// Copies of all that differs from the file, which is being written from now on, until [`Tables::written`].
    pub(super) fn capture(&self) -> Result<CapturedTables, BrokenInvariant> {
        let l1 = self.l1.capture()?;
        let slices = self.slices.capture();
        // After the slices: the table of a captured slice must be among them, or it would be written as zeros the next
        // time.
        let new = self.new.lock().iter().copied().collect();
        Ok(CapturedTables { l1, slices, new })
    }

    /// The file has these new tables.
    pub(super) fn are_there(&self, tables: &[HostOffset]) {
        let mut new = self.new.lock();
        for table in tables {
            new.remove(table);
        }
    }

    /// Takes note of whether captured slices were written.
    pub(super) fn written(&self, captured: &CapturedTables, fine: bool) {
        self.slices.written(captured.slices.iter().map(|slice| slice.at), fine);
        if !fine {
            self.l1.not_written(&captured.l1);
        }
    }
}
