//! The active L1 table: all of it, in memory.
//!
//! Law: it is changed under its lock, and looked at without it: threads reach the entries by references in stripes,
//! which are replaced under the lock, one after the other, when the table becomes longer.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use limosa_page::{BrokenInvariant, broken_invariant, to_usize};
use limosa_storage::Striped;
use parking_lot::RwLock;

use super::locks::{Rank, RankedMutex};
use crate::offset::HostOffset;
use crate::qcow2::format::entry::{EntryFault, L1Entry};
use crate::qcow2::format::geometry::{Geometry, L1Index};

/// Bytes of the table that are written at once.
const BLOCK: u64 = 4096;
/// Entries in them.
const BLOCK_ENTRIES: usize = 512;

#[derive(Debug)]
pub(super) struct L1 {
    table: RankedMutex<Table>,
    /// The entries, once more for each stripe. A lock of these is the last that a thread takes.
    words: Striped<RwLock<Words>>,
    geometry: Geometry,
}

type Words = Arc<[AtomicU64]>;

#[derive(Debug)]
struct Table {
    /// Its offset.
    at: HostOffset,
    words: Words,
    /// Blocks that differ from the file.
    dirty: BTreeSet<u64>,
}

/// Why there is no entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum L1Fault {
    /// The table ends before it.
    Short,
    /// It cannot be.
    Entry(EntryFault),
}

/// A part of the table to be written: where, and its bytes as they were.
pub(super) struct CapturedBlock {
    number: u64,
    pub(super) at: HostOffset,
    pub(super) bytes: Vec<u8>,
}

impl L1 {
    pub(super) fn new(at: HostOffset, bytes: &[u8], geometry: Geometry) -> Self {
        let words: Words = bytes.as_chunks().0.iter().map(|word| u64::from_be_bytes(*word).into()).collect();
        let stripes = Striped::new(|| RwLock::new(Arc::clone(&words)));
        Self { table: Rank::L1.mutex(Table { at, words, dirty: BTreeSet::new() }), words: stripes, geometry }
    }

    /// Returns its offset, and the number of its entries.
    pub(super) fn place(&self) -> (HostOffset, usize) {
        let table = self.table.lock();
        (table.at, table.words.len())
    }

    pub(super) fn get(&self, index: L1Index) -> Result<L1Entry, L1Fault> {
        let words = self.words.own().read();
        let word = words.get(to_usize(index.0)).ok_or(L1Fault::Short)?;
        L1Entry::decode(word.load(Ordering::Acquire), &self.geometry).map_err(L1Fault::Entry)
    }

    pub(super) fn set(&self, index: L1Index, entry: L1Entry) -> Result<(), BrokenInvariant> {
        let mut table = self.table.lock();
        let word = table.words.get(to_usize(index.0));
        let word = word.ok_or_else(|| broken_invariant("the L1 table has the entry that is changed"))?;
        word.store(entry.encode(), Ordering::Release);
        table.dirty.insert(index.0 / (BLOCK / 8));
        Ok(())
    }

    /// Moves it to `at`, with an entry for every place there.
    pub(super) fn moved(&self, at: HostOffset, entries: usize) {
        let mut table = self.table.lock();
        let old = table.words.iter().map(|word| word.load(Ordering::Relaxed));
        table.words = old.chain(std::iter::repeat(0)).take(entries).map(AtomicU64::new).collect();
        table.at = at;
        // No entry changes before all stripes have the new ones.
        for words in self.words.iter() {
            *words.write() = Arc::clone(&table.words);
        }
    }

    /// All L2 tables.
    pub(super) fn tables(&self) -> Vec<HostOffset> {
        let table = self.table.lock();
        let words = table.words.iter().map(|word| word.load(Ordering::Relaxed));
        words.filter_map(|word| L1Entry::decode(word, &self.geometry).ok()?.table).collect()
    }

    /// Returns whether any block differs from the file.
    pub(super) fn differs(&self) -> bool {
        !self.table.lock().dirty.is_empty()
    }

    /// The blocks that differ from the file.
    pub(super) fn capture(&self) -> Result<Vec<CapturedBlock>, BrokenInvariant> {
        let mut table = self.table.lock();
        let block = |block: &u64| {
            let begin = to_usize(block * (BLOCK / 8));
            let rest =
                table.words.get(begin..).ok_or_else(|| broken_invariant("a changed block is within the L1 table"))?;
            let words = rest.iter().take(BLOCK_ENTRIES).map(|word| word.load(Ordering::Relaxed));
            let bytes = words.flat_map(u64::to_be_bytes).collect();
            Ok(CapturedBlock { number: *block, at: table.at + block * BLOCK, bytes })
        };
        let captured = table.dirty.iter().map(block).collect::<Result<_, _>>()?;
        table.dirty.clear();
        Ok(captured)
    }

    pub(super) fn not_written(&self, blocks: &[CapturedBlock]) {
        self.table.lock().dirty.extend(blocks.iter().map(|block| block.number));
    }
}
