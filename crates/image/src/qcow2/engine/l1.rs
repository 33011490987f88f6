//! The active L1 table: all of it, in memory.

use std::collections::BTreeSet;

use limosa_page::{BrokenInvariant, broken_invariant, to_usize};

use super::locks::{Rank, RankedRwLock};
use crate::offset::HostOffset;
use crate::qcow2::format::entry::{EntryFault, L1Entry};
use crate::qcow2::format::geometry::{Geometry, L1Index};

/// Bytes of the table that are written at once.
const BLOCK: u64 = 4096;
/// Entries in them.
const BLOCK_ENTRIES: usize = 512;

#[derive(Debug)]
pub(super) struct L1 {
    table: RankedRwLock<Table>,
    geometry: Geometry,
}

#[derive(Debug, Default)]
struct Table {
    /// Its offset.
    at: HostOffset,
    words: Vec<u64>,
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
        let words = bytes.as_chunks().0.iter().map(|word| u64::from_be_bytes(*word)).collect();
        Self { table: Rank::L1.rw_lock(Table { at, words, dirty: BTreeSet::new() }), geometry }
    }

    /// Returns its offset, and the number of its entries.
    pub(super) fn place(&self) -> (HostOffset, usize) {
        let table = self.table.read();
        (table.at, table.words.len())
    }

    pub(super) fn get(&self, index: L1Index) -> Result<L1Entry, L1Fault> {
        let table = self.table.read();
        let word = table.words.get(to_usize(index.0)).ok_or(L1Fault::Short)?;
        L1Entry::decode(*word, &self.geometry).map_err(L1Fault::Entry)
    }

    pub(super) fn set(&self, index: L1Index, entry: L1Entry) -> Result<(), BrokenInvariant> {
        let mut table = self.table.write();
        let word = table.words.get_mut(to_usize(index.0));
        *word.ok_or_else(|| broken_invariant("the L1 table has the entry that is changed"))? = entry.encode();
        table.dirty.insert(index.0 / (BLOCK / 8));
        Ok(())
    }

    /// Moves it to `at`, with an entry for every place there.
    pub(super) fn moved(&self, at: HostOffset, entries: usize) {
        let mut table = self.table.write();
        table.at = at;
        table.words.resize(entries, 0);
    }

    /// All L2 tables.
    pub(super) fn tables(&self) -> Vec<HostOffset> {
        let table = self.table.read();
        let entries = table.words.iter().filter_map(|word| L1Entry::decode(*word, &self.geometry).ok());
        entries.filter_map(|entry| entry.table).collect()
    }

    /// Returns whether any block differs from the file.
    pub(super) fn differs(&self) -> bool {
        !self.table.read().dirty.is_empty()
    }

    /// The blocks that differ from the file.
    pub(super) fn capture(&self) -> Result<Vec<CapturedBlock>, BrokenInvariant> {
        let mut table = self.table.write();
        let block = |block: &u64| {
            let begin = to_usize(block * (BLOCK / 8));
            let rest =
                table.words.get(begin..).ok_or_else(|| broken_invariant("a changed block is within the L1 table"))?;
            let words = rest.iter().take(BLOCK_ENTRIES);
            let bytes = words.flat_map(|word| word.to_be_bytes()).collect();
            Ok(CapturedBlock { number: *block, at: table.at + block * BLOCK, bytes })
        };
        let captured = table.dirty.iter().map(block).collect::<Result<_, _>>()?;
        table.dirty.clear();
        Ok(captured)
    }

    pub(super) fn not_written(&self, blocks: &[CapturedBlock]) {
        self.table.write().dirty.extend(blocks.iter().map(|block| block.number));
    }
}
