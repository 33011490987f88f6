//! The journal of a conversion that can be continued: its progress, its source and its options.
//!
//! Law: a record is written when everything that it says is durable, and it is durable before the next one is written.
//! There are two slots, which are written in turn: a write that is cut off damages one, and the other one is valid.

use std::fmt::Write as _;

use limosa_page::to_u64;
use limosa_storage::{Buffer, Storage, StorageError};
use sha2::{Digest as _, Sha256};

/// Bytes of a slot.
const SLOT: usize = 4096;
/// The first line of a record.
const TITLE: &str = "limosa convert journal 1";
/// The longest text that a record has; a longer one is in it by its digest.
const TEXT_MOST: usize = 1500;

/// A record of a journal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Record {
    /// Number of the record.
    sequence: u64,
    /// Bytes of the disk that are copied, from its beginning.
    pub(super) position: u64,
    /// Bytes of the disk.
    pub(super) length: u64,
    /// Inode number of the target; 0: it is being created.
    pub(super) target: u64,
    /// The options of the copy: one line.
    pub(super) request: String,
    /// The state of the source: one line.
    pub(super) source: String,
}

impl Record {
    pub(super) fn new(length: u64, request: &str, source: &str) -> Self {
        Self { length, request: line(request), source: line(source), ..Self::default() }
    }

    fn encode(&self) -> Vec<u8> {
        let Self { sequence, position, length, target, request, source } = self;
        let mut text = format!(
            "{TITLE}\nsequence={sequence}\nposition={position}\nlength={length}\ntarget={target}\nrequest={request}\n\
             source={source}\n"
        );
        let sum = hex(text.as_bytes());
        text.push_str("sum=");
        text.push_str(&sum);
        text.push('\n');
        let mut bytes = text.into_bytes();
        bytes.resize(SLOT, 0);
        bytes
    }

    fn decode(slot: &[u8]) -> Option<Self> {
        let text = slot.split(|byte| *byte == 0).next()?;
        let text = std::str::from_utf8(text).ok()?;
        let (text, sum) = text.rsplit_once("sum=")?;
        if sum.strip_suffix('\n')? != hex(text.as_bytes()) {
            return None;
        }
        let mut lines = text.lines();
        if lines.next() != Some(TITLE) {
            return None;
        }
        let mut field = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
        Some(Self {
            sequence: field("sequence")?.parse().ok()?,
            position: field("position")?.parse().ok()?,
            length: field("length")?.parse().ok()?,
            target: field("target")?.parse().ok()?,
            request: field("request")?,
            source: field("source")?,
        })
    }
}

/// The contents of a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    /// The last record.
    Record(Record),
    /// No record was ever durable.
    Blank,
    /// Something else.
    Other,
}

/// Reads a journal.
///
/// # Errors
/// What the storage says.
pub(super) async fn read(storage: &dyn Storage) -> Result<Found, StorageError> {
    let bytes = Buffer::zeroed(2 * SLOT);
    storage.read(0, bytes.clone().into()).await?;
    let bytes = bytes.to_vec();
    if let Some(last) = bytes.chunks(SLOT).filter_map(Record::decode).max_by_key(|record| record.sequence) {
        return Ok(Found::Record(last));
    }
    // The first record may have been cut off: it is in one slot, from its beginning on or in whole blocks.
    let may_be = |slot: &[u8]| slot.iter().all(|byte| *byte == 0) || slot.starts_with(TITLE.as_bytes());
    let is_ours = storage.length()? <= to_u64(2 * SLOT) && bytes.chunks(SLOT).all(may_be);
    Ok(if is_ours { Found::Blank } else { Found::Other })
}

/// Makes a record durable as the last one.
///
/// # Errors
/// What the storage says.
pub(super) async fn write(storage: &dyn Storage, record: &mut Record) -> Result<(), StorageError> {
    record.sequence += 1;
    let at = record.sequence % 2 * to_u64(SLOT);
    storage.write(at, Buffer::from_slice(&record.encode()).into()).await?;
    storage.flush().await
}

/// A text as a record has it: one line, or a digest.
pub(super) fn line(text: &str) -> String {
    let text = text.replace(['\n', '\0'], " ");
    if text.len() > TEXT_MOST { format!("sha256:{}", hex(text.as_bytes())) } else { text }
}

/// The SHA-256 of some bytes.
pub(super) fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use limosa_storage::testing::{Loss, PowerCut};
    use limosa_storage::{MemoryStorage, block_on};

    use super::*;

    fn found(bytes: Vec<u8>) -> Option<Record> {
        match block_on(read(&MemoryStorage::with_contents(bytes, 1 << 20))).unwrap() {
            Found::Record(record) => Some(record),
            Found::Blank | Found::Other => None,
        }
    }

    #[test]
    fn after_any_cut_the_last_durable_record_or_the_next_one_is_found() {
        let power = PowerCut::new();
        let storage = power.add_storage("journal", Vec::new(), 1 << 20);
        let mut record = Record::new(1 << 30, "request", "source");
        let mut durable = vec![(power.moments(), None)];
        for position in [0, 4096, 8192, 1 << 20, 1 << 30] {
            record.position = position;
            block_on(write(&*storage, &mut record)).unwrap();
            durable.push((power.moments(), Some(position)));
        }
        for moment in 0..=power.moments() {
            let known = durable.iter().rev().find(|(since, _)| *since <= moment).and_then(|(_, position)| *position);
            for loss in [Loss::None, Loss::All].into_iter().chain((0..20).map(Loss::Some)) {
                let bytes = power.cut(moment, loss).remove(0);
                let position = found(bytes).map(|record| record.position);
                assert!(position >= known, "{moment} {loss:?}: {position:?} {known:?}");
            }
        }
    }

    #[test]
    fn a_record_that_was_changed_is_none() {
        let mut record = Record::new(1 << 30, &"a long\nrequest ".repeat(1000), "source");
        record.position = 4096;
        let bytes = record.encode();
        assert_eq!(bytes.len(), SLOT);
        assert_eq!(found(bytes.clone()), Some(record));
        let end = bytes.iter().position(|byte| *byte == 0).unwrap();
        for at in 0..end {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << bit;
                assert_eq!(found(changed), None, "byte {at}");
            }
            assert_eq!(found(bytes[..at].to_vec()), None, "cut off at {at}");
        }
        assert_eq!(found(Vec::new()), None);
        assert_eq!(found(vec![b'x'; 2 * SLOT]), None);
    }
}
