//! The layout of a log of epochs.
//!
//! A log belongs to one image and to one time of protection. It begins with fixed sectors: the header, two marks that
//! are written in turn, a decision, and a ring of slots, one for each epoch that is prepared or kept. Everything else
//! is data, in segments: contents that were written, and lists of entries that say where they belong. All numbers are
//! little-endian, and each fixed sector and each list ends in a CRC-32C of what is before. A sector is written whole or
//! not at all.
//!
//! | offset | what |
//! |---|---|
//! | 0 | header: the log's id, the image, the boot |
//! | 4 KiB, 8 KiB | marks: what the image has, and whether the log is durable |
//! | 12 KiB | decision: the last epoch that is kept, of those that were prepared before |
//! | 16 KiB | slots: the number of an epoch, its first list of entries, and whether it is kept or prepared |
//! | 1 MiB | data |
//!
//! Law: nothing of a log is believed. What it says is checked against its length and that of the disk.

use uuid::Uuid;

/// Bytes of a fixed sector.
pub(super) const SECTOR: usize = 512;
/// Offsets of the marks.
pub(super) const MARKS: [u64; 2] = [4096, 8192];
/// Offset of the decision.
pub(super) const DECISION_AT: u64 = 12 << 10;
/// Offset of the slots.
const SLOTS_AT: u64 = 16 << 10;
/// Offset of the data.
pub(super) const DATA_AT: u64 = 1 << 20;
/// Slots of a log: the most epochs that are prepared or kept, and not in the image yet.
pub(super) const SLOTS: u64 = (DATA_AT - SLOTS_AT) / SECTOR as u64;
/// Bytes of a list before its entries.
const LIST_HEAD: usize = 48;
/// Bytes of an entry.
const ENTRY: usize = 32;
/// The most bytes of a list.
pub(super) const LIST: usize = 256 << 10;
/// The most entries of a list.
pub(super) const LIST_ENTRIES: usize = (LIST - LIST_HEAD - 4) / ENTRY;
/// Marks, slots and epochs have lower numbers.
pub(super) const NUMBERS: u64 = 1 << 62;
const VERSION: u64 = 1;

/// Identifies a log: what has another id is of an earlier one.
pub(super) type LogId = [u8; 16];

/// Returns the id of a new log.
pub(super) fn new_id() -> LogId {
    Uuid::new_v4().into_bytes()
}

/// The subject of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) id: LogId,
    /// Identifies the time since the machine was booted; 0 if that is unknown.
    pub(super) boot: [u64; 2],
    /// Identifies the image's file.
    pub(super) file: [u64; 2],
    /// Length of the disk in bytes.
    pub(super) disk: u64,
}

/// Whether the log's VM may still be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::FromRepr)]
#[repr(u64)]
pub(super) enum Stage {
    /// Writes go to an epoch.
    Open = 1,
    /// Writes after an epoch were dropped.
    Dropped = 2,
    /// Protection has ended: all writes are kept.
    Ended = 3,
}

/// The progress of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) id: LogId,
    /// Marks are numbered in their order.
    pub(super) number: u64,
    /// All slots up to this one are durable, with what they lead to.
    pub(super) durable: u64,
    /// The image has the epochs of all slots up to this one, durably.
    pub(super) merged: u64,
    /// The epoch of that slot.
    pub(super) epoch: u64,
    pub(super) stage: Stage,
}

/// The last epoch that is kept, of those that had been prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) id: LogId,
    pub(super) epoch: u64,
}

/// An epoch that is prepared or kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) id: LogId,
    /// Slots are numbered from 1 on.
    pub(super) number: u64,
    pub(super) epoch: u64,
    /// Whether this slot and all before it lead to what was durable before it was written.
    pub(super) durable: bool,
    /// Whether it was kept at once, with all before it; otherwise a decision says so later.
    pub(super) kept: bool,
    /// Offset of the first list; 0: the epoch has no entries.
    pub(super) list: u64,
}

/// The contents that a range of the disk was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Contents {
    /// It has the bytes at this offset of the log.
    Written(u64),
    /// It reads as zeros; `unmap`: its space may be given back.
    Zero { unmap: bool },
}

/// An entry of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) start: u64,
    pub(super) length: u64,
    pub(super) contents: Contents,
}

/// Some entries of an epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct List {
    /// Offset of the next list; 0: this is the last one.
    pub(super) next: u64,
    pub(super) entries: Vec<Entry>,
}

/// Returns the place of a slot.
pub(super) const fn slot_at(number: u64) -> u64 {
    SLOTS_AT + number % SLOTS * SECTOR as u64
}

/// Writes numbers one after the other.
struct Words(Vec<u8>);

impl Words {
    fn new(magic: &[u8; 8], id: &LogId) -> Self {
        let mut bytes = magic.to_vec();
        bytes.extend_from_slice(id);
        Self(bytes)
    }

    fn word(mut self, word: u64) -> Self {
        self.0.extend_from_slice(&word.to_le_bytes());
        self
    }

    /// Fills up to `length` bytes, the last four of them the checksum.
    fn sealed(mut self, length: usize) -> Vec<u8> {
        self.0.resize(length.saturating_sub(4), 0);
        let sum = crc32c::crc32c(&self.0);
        self.0.extend_from_slice(&sum.to_le_bytes());
        self.0
    }
}

/// Reads numbers one after the other.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// The words behind the id; `None`: the bytes are something else, or were not written whole.
    fn open(bytes: &'a [u8], magic: &[u8; 8]) -> Option<(LogId, Self)> {
        let (rest, sum) = bytes.split_last_chunk()?;
        if crc32c::crc32c(rest) != u32::from_le_bytes(*sum) {
            return None;
        }
        let (found, rest) = rest.split_first_chunk::<8>()?;
        let (id, rest) = rest.split_first_chunk::<16>()?;
        (found == magic).then_some((*id, Self(rest)))
    }

    fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }
}

impl Header {
    const MAGIC: &'static [u8; 8] = b"limosaep";

    pub(super) fn encode(&self) -> Vec<u8> {
        let ([boot, more], [file, further]) = (self.boot, self.file);
        let words = Words::new(Self::MAGIC, &self.id).word(VERSION).word(boot).word(more);
        words.word(file).word(further).word(self.disk).sealed(SECTOR)
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (id, mut words) = Reader::open(bytes, Self::MAGIC)?;
        if words.word()? != VERSION {
            return None;
        }
        let (boot, file) = ([words.word()?, words.word()?], [words.word()?, words.word()?]);
        Some(Self { id, boot, file, disk: words.word()? })
    }
}

impl Mark {
    const MAGIC: &'static [u8; 8] = b"limosamk";

    pub(super) fn encode(&self) -> Vec<u8> {
        let words = Words::new(Self::MAGIC, &self.id).word(self.number).word(self.durable).word(self.merged);
        words.word(self.epoch).word(self.stage as u64).sealed(SECTOR)
    }

    pub(super) fn decode(bytes: &[u8], log: &LogId) -> Option<Self> {
        let (id, mut words) = Reader::open(bytes, Self::MAGIC)?;
        let (number, durable, merged, epoch) = (words.word()?, words.word()?, words.word()?, words.word()?);
        let stage = Stage::from_repr(words.word()?)?;
        let numbers = [number, durable, merged, epoch];
        let is_it = id == *log && numbers.iter().all(|number| *number < NUMBERS);
        is_it.then_some(Self { id, number, durable, merged, epoch, stage })
    }
}

impl Decision {
    const MAGIC: &'static [u8; 8] = b"limosadn";

    pub(super) fn encode(&self) -> Vec<u8> {
        Words::new(Self::MAGIC, &self.id).word(self.epoch).sealed(SECTOR)
    }

    pub(super) fn decode(bytes: &[u8], log: &LogId) -> Option<Self> {
        let (id, mut words) = Reader::open(bytes, Self::MAGIC)?;
        let epoch = words.word()?;
        (id == *log && epoch < NUMBERS).then_some(Self { id, epoch })
    }
}

impl Slot {
    const MAGIC: &'static [u8; 8] = b"limosasl";

    pub(super) fn encode(&self) -> Vec<u8> {
        let words = Words::new(Self::MAGIC, &self.id).word(self.number).word(self.epoch);
        words.word(u64::from(self.durable)).word(u64::from(self.kept)).word(self.list).sealed(SECTOR)
    }

    pub(super) fn decode(bytes: &[u8], log: &LogId) -> Option<Self> {
        let (id, mut words) = Reader::open(bytes, Self::MAGIC)?;
        let (number, epoch) = (words.word()?, words.word()?);
        let (durable, kept, list) = (words.word()? == 1, words.word()? == 1, words.word()?);
        (id == *log && epoch < NUMBERS).then_some(Self { id, number, epoch, durable, kept, list })
    }
}

impl Entry {
    fn encode(&self) -> [u64; ENTRY / 8] {
        let (kind, at) = match self.contents {
            Contents::Written(at) => (1, at),
            Contents::Zero { unmap: false } => (2, 0),
            Contents::Zero { unmap: true } => (3, 0),
        };
        [self.start, self.length, kind, at]
    }

    fn decode(words: &mut Reader<'_>) -> Option<Self> {
        let (start, length, kind, at) = (words.word()?, words.word()?, words.word()?, words.word()?);
        let contents = match kind {
            1 => Contents::Written(at),
            2 => Contents::Zero { unmap: false },
            3 => Contents::Zero { unmap: true },
            _ => return None,
        };
        Some(Self { start, length, contents })
    }
}

impl List {
    const MAGIC: &'static [u8; 8] = b"limosaen";

    /// The bytes of a list of a slot.
    pub(super) fn encode(&self, id: &LogId, slot: u64) -> Vec<u8> {
        let head = Words::new(Self::MAGIC, id).word(slot).word(self.next).word(self.entries.len() as u64);
        let words = self.entries.iter().flat_map(Entry::encode).fold(head, Words::word);
        let length = (words.0.len() + 4).next_multiple_of(SECTOR);
        words.sealed(length)
    }

    /// Returns the bytes of a slot's list by its first sector; `None`: it is not a list of that slot.
    pub(super) fn length(first: &[u8], log: &LogId, slot: u64) -> Option<usize> {
        let (found, rest) = first.split_first_chunk::<8>()?;
        let (id, rest) = rest.split_first_chunk::<16>()?;
        let mut words = Reader(rest);
        let (number, _next, count) = (words.word()?, words.word()?, words.word()?);
        let count = usize::try_from(count).ok().filter(|count| *count <= LIST_ENTRIES)?;
        let is_it = found == Self::MAGIC && id == log && number == slot;
        is_it.then(|| (LIST_HEAD + count * ENTRY + 4).next_multiple_of(SECTOR))
    }

    /// The list in these bytes, all of it.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (_, mut words) = Reader::open(bytes, Self::MAGIC)?;
        let (_slot, next, count) = (words.word()?, words.word()?, words.word()?);
        let count = usize::try_from(count).ok().filter(|count| *count <= LIST_ENTRIES)?;
        let entries = (0..count).map(|_| Entry::decode(&mut words)).collect::<Option<_>>()?;
        Some(Self { next, entries })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let id = new_id();
        let header = Header { id, boot: [1, 2], file: [3, 4], disk: 5 };
        assert_eq!(Header::decode(&header.encode()), Some(header));
        let mark = Mark { id, number: 1, durable: 2, merged: 3, epoch: 4, stage: Stage::Dropped };
        assert_eq!(Mark::decode(&mark.encode(), &id), Some(mark));
        assert_eq!(Mark::decode(&mark.encode(), &new_id()), None);
        let slot = Slot { id, number: 1, epoch: 2, durable: true, kept: false, list: 3 };
        assert_eq!(Slot::decode(&slot.encode(), &id), Some(slot));
        let decision = Decision { id, epoch: 7 };
        assert_eq!(Decision::decode(&decision.encode(), &id), Some(decision));
        for count in [0, 1, 13, 14, LIST_ENTRIES] {
            let contents = [Contents::Written(7), Contents::Zero { unmap: false }, Contents::Zero { unmap: true }];
            let entry = |number: usize| Entry { start: number as u64, length: 9, contents: contents[number % 3] };
            let list = List { next: 8, entries: (0..count).map(entry).collect() };
            let bytes = list.encode(&id, 3);
            assert_eq!(List::length(&bytes[..SECTOR], &id, 3), Some(bytes.len()));
            assert!(bytes.len() <= LIST);
            assert_eq!(List::length(&bytes[..SECTOR], &id, 4), None);
            assert_eq!(List::decode(&bytes), Some(list));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_cause_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..1200), kind in 0..4_usize) {
            let magic = [Header::MAGIC, Mark::MAGIC, Slot::MAGIC, List::MAGIC][kind];
            let mut words = Words::new(magic, &[0; 16]);
            words.0.extend_from_slice(&bytes);
            let length = words.0.len() + 4;
            let sealed = words.sealed(length);
            let _ = Header::decode(&sealed);
            let _ = Mark::decode(&sealed, &[0; 16]);
            let _ = Slot::decode(&sealed, &[0; 16]);
            let _ = (List::length(&sealed, &[0; 16], 0), List::decode(&sealed));
        }

        #[test]
        fn a_sector_with_a_changed_bit_is_none(bit in 0..SECTOR * 8) {
            let id = [7; 16];
            let mut bytes = Slot { id, number: 1, epoch: 2, durable: true, kept: true, list: 3 }.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Slot::decode(&bytes, &id), None);
        }
    }
}
