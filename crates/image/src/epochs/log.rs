//! Writing and reading a log.

use std::ops::Range;
use std::sync::Arc;

use limosa_storage::{Buffer, Storage, StorageError};

use super::EpochError;
use super::extents::{Extents, Value};
use super::format::{
    Contents, DATA_AT, DECISION_AT, Decision, Entry, Header, LIST_ENTRIES, List, LogId, MARKS, Mark, SECTOR, SLOTS,
    Slot, slot_at,
};
use super::space::Segment;

/// The contents of a range of the disk, and their epoch.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) contents: Contents,
    pub(super) epoch: u64,
    /// Keeps the bytes in the log.
    pub(super) segment: Option<Arc<Segment>>,
}

impl Value for Stored {
    fn skip(&self, bytes: u64) -> Self {
        let contents = match self.contents {
            Contents::Written(at) => Contents::Written(at.saturating_add(bytes)),
            zero @ Contents::Zero { .. } => zero,
        };
        Self { contents, ..self.clone() }
    }

    fn continues(&self, length: u64, next: &Self) -> bool {
        let is_same_segment = match (&self.segment, &next.segment) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (None, None) => true,
            _ => false,
        };
        self.epoch == next.epoch && is_same_segment && self.skip(length).contents == next.contents
    }
}

/// Returns the entries of an epoch in ascending order.
pub(super) fn entries(extents: &Extents<Stored>) -> Vec<Entry> {
    let entry = |(range, stored): (Range<u64>, &Stored)| {
        let (start, length) = (range.start, range.end - range.start);
        Entry { start, length, contents: stored.contents }
    };
    extents.iter().map(entry).collect()
}

/// A log, open.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) id: LogId,
}

/// A fault of a log.
pub(super) fn fault(storage: &dyn Storage, why: impl Into<String>) -> EpochError {
    EpochError::Log { log: Arc::clone(storage.name()), why: why.into() }
}

impl Log {
    pub(super) async fn write(&self, at: u64, bytes: &[u8]) -> Result<(), StorageError> {
        self.storage.write(at, Buffer::from_slice(bytes).into()).await
    }

    pub(super) async fn flush(&self) -> Result<(), StorageError> {
        self.storage.flush().await
    }

    /// Writes a mark in place of the one before the last.
    pub(super) async fn write_mark(&self, mark: &Mark) -> Result<(), StorageError> {
        let [even, odd] = MARKS;
        self.write(if mark.number.is_multiple_of(2) { even } else { odd }, &mark.encode()).await
    }

    pub(super) async fn write_slot(&self, slot: &Slot) -> Result<(), StorageError> {
        self.write(slot_at(slot.number), &slot.encode()).await
    }

    /// Says that an epoch is kept that was prepared, and those before it.
    pub(super) async fn write_decision(&self, epoch: u64) -> Result<(), StorageError> {
        self.write(DECISION_AT, &Decision { id: self.id, epoch }.encode()).await
    }

    /// Reads the header; `None`: protection did not begin, and nothing was written.
    pub(super) async fn read_header(storage: &dyn Storage) -> Result<Option<Header>, EpochError> {
        let bytes = read(storage, 0, SECTOR).await?;
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let header = Header::decode(&bytes);
        header.map(Some).ok_or_else(|| fault(storage, "it is damaged, or no log of epochs that this version knows"))
    }

    /// Reads the newer mark.
    pub(super) async fn read_mark(&self) -> Result<Mark, EpochError> {
        let mut newest: Option<Mark> = None;
        for at in MARKS {
            let mark = Mark::decode(&read(&*self.storage, at, SECTOR).await?, &self.id);
            newest = [newest, mark].into_iter().flatten().max_by_key(|mark| mark.number);
        }
        newest.ok_or_else(|| fault(&*self.storage, "it is damaged: it has no mark"))
    }

    /// Reads the last epoch that was kept after it had been prepared; 0: no decision was written.
    pub(super) async fn read_decision(&self) -> Result<u64, EpochError> {
        let decision = Decision::decode(&read(&*self.storage, DECISION_AT, SECTOR).await?, &self.id);
        Ok(decision.map_or(0, |decision| decision.epoch))
    }

    /// Reads the slots from `first` on, up to the first one that is missing.
    pub(super) async fn read_slots(&self, first: u64) -> Result<Vec<Slot>, EpochError> {
        let mut slots = Vec::new();
        for number in (first..).take(usize::try_from(SLOTS).unwrap_or(usize::MAX)) {
            let found = Slot::decode(&read(&*self.storage, slot_at(number), SECTOR).await?, &self.id);
            let Some(slot) = found.filter(|slot| slot.number == number) else { break };
            slots.push(slot);
        }
        Ok(slots)
    }

    /// Returns the lists of an epoch for a slot, without their places: the last one first.
    pub(super) fn lists(extents: &Extents<Stored>) -> Vec<Vec<Entry>> {
        let entries = entries(extents);
        entries.chunks(LIST_ENTRIES).rev().map(<[_]>::to_vec).collect()
    }

    /// Reads the entries of a slot, of a disk of `disk` bytes, at most `most`.
    pub(super) async fn read_entries(&self, slot: &Slot, disk: u64, most: usize) -> Result<Vec<Entry>, EpochError> {
        let damaged = |at| fault(&*self.storage, format!("it is damaged: epoch {}, list at {at:#x}", slot.epoch));
        let end = self.storage.length().map_err(crate::ImageError::from)?;
        let (mut entries, mut at) = (Vec::new(), slot.list);
        while at != 0 {
            let first = read(&*self.storage, at, SECTOR).await?;
            let length = List::length(&first, &self.id, slot.number).ok_or_else(|| damaged(at))?;
            let list = List::decode(&read(&*self.storage, at, length).await?).ok_or_else(|| damaged(at))?;
            // A list without entries leads nowhere; so the number of lists is bounded as well.
            let is_valid = |entry: &Entry| {
                let is_inside = |start: u64, end| start.checked_add(entry.length).is_some_and(|last| last <= end);
                let is_stored = match entry.contents {
                    Contents::Written(at) => at >= DATA_AT && is_inside(at, end),
                    Contents::Zero { .. } => true,
                };
                entry.length > 0 && is_inside(entry.start, disk) && is_stored
            };
            if list.entries.is_empty() || !list.entries.iter().all(is_valid) || entries.len() > most {
                return Err(damaged(at));
            }
            entries.extend(list.entries);
            at = list.next;
        }
        Ok(entries)
    }
}

async fn read(storage: &dyn Storage, at: u64, length: usize) -> Result<Vec<u8>, EpochError> {
    let buffer = Buffer::zeroed(length);
    storage.read(at, buffer.clone().into()).await.map_err(crate::ImageError::from)?;
    Ok(buffer.to_vec())
}
