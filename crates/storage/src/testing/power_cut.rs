//! Storages whose power is cut.
//!
//! Law: writes that a completed flush covers are kept; all others may be kept, or lost, or kept in part, in whole
//! sectors. A flush covers the requests on its own storage that had completed when it was begun, and it counts once it
//! has completed itself. A request completes when its future returns.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use limosa_page::to_usize;
use parking_lot::Mutex;

use super::chance::SeededRandom;
use super::sparse::SparseMemory;
use super::{Behaviour, Call, Through};
use crate::buffer::Buffer;
use crate::drive::block_on;
use crate::storage::{Request, Storage};

/// Sectors are written whole or not at all.
const SECTOR: u64 = 512;

/// The loss of requests that no flush covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// All are kept, as after a kill.
    None,
    /// All are lost.
    All,
    /// Some are lost, and parts of some, at random.
    Some(u64),
}

/// A change of bytes, or a flush.
#[derive(Debug)]
struct Event {
    file: usize,
    call: Call,
    /// Number of events at the time when its future returned.
    completed: Option<usize>,
}

#[derive(Debug, Default)]
struct Record {
    /// Names and first contents.
    files: Vec<(Arc<str>, Vec<u8>)>,
    events: Vec<Event>,
}

/// Records what is asked of its storages, and tells what they may contain if the power is cut at any moment.
#[derive(Debug, Clone, Default)]
pub struct PowerCut(Arc<Mutex<Record>>);

/// The behaviour of one of the storages.
#[derive(Debug)]
struct Recording {
    record: Arc<Mutex<Record>>,
    file: usize,
}

impl PowerCut {
    /// Nothing is under power yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A file with these contents, all of them durable, which cannot grow behind `most` bytes. A clone into it is lost,
    /// in whole or in part, as a write is.
    #[must_use]
    pub fn add_storage(&self, name: &str, bytes: Vec<u8>, most: u64) -> Arc<dyn Storage> {
        let memory = Arc::new(SparseMemory::file_with(name, bytes.clone(), most).with_cloning());
        let mut record = self.0.lock();
        record.files.push((name.into(), bytes));
        let file = record.files.len() - 1;
        Through::wrap(memory, &Arc::new(Recording { record: Arc::clone(&self.0), file }))
    }

    /// How many moments there were: a cut can be at any of `0..=moments()`. What is noted together with this number is
    /// older than every cut at it or later.
    #[must_use]
    pub fn moments(&self) -> usize {
        self.0.lock().events.len()
    }

    /// The contents of all storages, in the order in which they were made, if the power is cut at `moment`.
    #[must_use]
    pub fn cut(&self, moment: usize, loss: Loss) -> Vec<Vec<u8>> {
        let record = self.0.lock();
        let events = record.events.get(..moment).unwrap_or(&record.events);
        let mut chance = SeededRandom::new(if let Loss::Some(seed) = loss { seed } else { 0 });
        let mut contents: Vec<_> = record.files.iter().map(|(_, bytes)| bytes.clone()).collect();
        // Per storage: the moment at which the last flush began that has completed.
        let mut flushed = vec![0; contents.len()];
        for (begun, event) in events.iter().enumerate() {
            if matches!(event.call, Call::Flush) && event.completed.is_some_and(|completed| completed <= moment) {
                flushed[event.file] = begun;
            }
        }
        for event in events {
            let covered = event.completed.is_some_and(|completed| completed <= flushed[event.file]);
            let bytes = &mut contents[event.file];
            match loss {
                _ if covered => apply(&event.call, bytes, |_| true),
                Loss::None => apply(&event.call, bytes, |_| true),
                Loss::All => {}
                Loss::Some(_) => match chance.below(8) {
                    0..=2 => apply(&event.call, bytes, |_| true),
                    3..=5 => {}
                    // Sectors here and there, or the first ones only.
                    6 => apply(&event.call, bytes, |_| chance.one_in(2)),
                    _ => {
                        let range = event.call.range();
                        let sectors = range.end.div_ceil(SECTOR).saturating_sub(range.start / SECTOR);
                        let last = range.start / SECTOR + chance.below(sectors + 1);
                        apply(&event.call, bytes, |sector| sector < last);
                    }
                },
            }
        }
        contents
    }
}

/// Applies to `bytes` those sectors of a change that `kept` wants; asks in ascending order.
fn apply(call: &Call, bytes: &mut Vec<u8>, mut kept: impl FnMut(u64) -> bool) {
    let index = |at: u64| to_usize(at);
    let mut range = call.range();
    match call {
        Call::Flush | Call::Read { .. } | Call::Clone(_) => return,
        Call::SetLength { len } => {
            if kept(len / SECTOR) {
                bytes.resize(index(*len), 0);
            }
            return;
        }
        Call::Allocate { .. } => {
            if kept(range.start / SECTOR) && index(range.end) > bytes.len() {
                bytes.resize(index(range.end), 0);
            }
            return;
        }
        Call::Discard { .. } => range.end = range.end.min(bytes.len() as u64),
        Call::Write { .. } | Call::WriteZeroes { .. } => {}
    }
    let from = if let Call::Write { from, .. } = call { from.to_vec() } else { Vec::new() };
    for sector in parts(&range) {
        if !kept(sector.start / SECTOR) {
            continue;
        }
        let place = index(sector.start)..index(sector.end);
        if bytes.len() < place.end {
            bytes.resize(place.end, 0);
        }
        match call {
            Call::Write { .. } => {
                let source = index(sector.start - range.start)..index(sector.end - range.start);
                bytes[place].copy_from_slice(&from[source]);
            }
            _ => bytes[place].fill(0),
        }
    }
}

/// The parts of a range that lie in one sector each.
fn parts(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let Range { start, end } = *range;
    let sectors = start / SECTOR..end.div_ceil(SECTOR).max(start / SECTOR);
    sectors.map(move |sector| (sector * SECTOR).max(start)..((sector + 1) * SECTOR).min(end))
}

impl Behaviour for Recording {
    fn request(self: Arc<Self>, storage: &Arc<dyn Storage>, call: Call) -> Request {
        // A copy, because the buffers may change as soon as the request is over.
        let call = match call {
            Call::Read { .. } => return call.begin(&**storage),
            Call::Write { offset, from } => Call::Write { offset, from: Buffer::from_slice(&from.to_vec()).into() },
            other => other,
        };
        let (clone, mut call) = match call {
            Call::Clone(clone) => (Some(clone.clone()), Call::Clone(clone)),
            call => (None, call),
        };
        let mut record = self.record.lock();
        // Carried out under the lock: the order of the record is the order of the bytes.
        let outcome = block_on(call.clone().begin(&**storage));
        if outcome.is_err() {
            return Box::pin(std::future::ready(outcome));
        }
        if let Some(clone) = clone {
            if !clone.cloned.load(Ordering::Acquire) {
                return Box::pin(std::future::ready(outcome));
            }
            // From then on it is as good, and as bad, as a write.
            let length = to_usize(clone.range.end - clone.range.start);
            let bytes = Buffer::zeroed(length);
            let read = storage.read(clone.range.start, bytes.clone().into());
            if let Err(error) = block_on(read) {
                return Box::pin(std::future::ready(Err(error)));
            }
            call = Call::Write { offset: clone.range.start, from: bytes.into() };
        }
        let number = record.events.len();
        record.events.push(Event { file: self.file, call, completed: None });
        drop(record);
        let record = Arc::clone(&self.record);
        Box::pin(async move {
            let mut record = record.lock();
            let moments = record.events.len();
            if let Some(event) = record.events.get_mut(number) {
                event.completed = Some(moments);
            }
            outcome
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(storage: &Arc<dyn Storage>, offset: u64, bytes: &[u8]) -> Request {
        storage.write(offset, Buffer::from_slice(bytes).into())
    }

    #[test]
    fn what_was_flushed_stays_and_the_rest_may_go() {
        let power = PowerCut::new();
        let storage = power.add_storage("disk", b"..........".to_vec(), 1 << 20);
        block_on(write(&storage, 0, b"ab")).unwrap();
        block_on(storage.flush()).unwrap();
        block_on(write(&storage, 2, b"cd")).unwrap();
        assert_eq!(power.moments(), 3);
        assert_eq!(power.cut(3, Loss::None), [b"abcd......"]);
        assert_eq!(power.cut(3, Loss::All), [b"ab........"]);
        assert_eq!(power.cut(1, Loss::All), [b".........."], "the flush comes later");
        let mut seen: Vec<_> = (0..200).flat_map(|seed| power.cut(3, Loss::Some(seed))).collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen, [b"ab........", b"abcd......"]);
    }

    #[test]
    fn a_flush_covers_only_what_had_completed_on_its_own_storage_when_it_began() {
        let power = PowerCut::new();
        let [one, other] = ["one", "other"].map(|name| power.add_storage(name, Vec::new(), 1 << 20));
        let under_way = write(&one, 0, b"a");
        block_on(write(&other, 0, b"b")).unwrap();
        let flush = one.flush();
        block_on(under_way).unwrap();
        block_on(flush).unwrap();
        assert_eq!(power.cut(power.moments(), Loss::All), [b"", b""]);
        let flush = one.flush();
        assert_eq!(power.cut(power.moments(), Loss::All), [b"", b""], "it has not completed");
        block_on(flush).unwrap();
        assert_eq!(power.cut(power.moments(), Loss::All), [b"a".to_vec(), Vec::new()]);
    }

    #[test]
    fn a_clone_is_lost_as_a_write_is_and_one_that_was_refused_never_was() {
        let power = PowerCut::new();
        let storage = power.add_storage("disk", vec![b'.'; 4096], 1 << 20);
        let from: Arc<dyn Storage> = Arc::new(SparseMemory::file_with("from", vec![b'a'; 4096], 1 << 20));
        assert!(!block_on((*storage).clone_range(512, &from, 0, 512)).unwrap());
        assert_eq!(power.moments(), 0);
        assert!(block_on((*storage).clone_range(0, &from, 0, 4096)).unwrap());
        let cut = |loss| power.cut(1, loss).remove(0);
        assert_eq!((cut(Loss::None), cut(Loss::All)), (vec![b'a'; 4096], vec![b'.'; 4096]));
        let torn = |bytes: Vec<u8>| bytes.contains(&b'a') && bytes.contains(&b'.');
        assert!((0..100).any(|seed| torn(cut(Loss::Some(seed)))));
        block_on(storage.flush()).unwrap();
        assert_eq!(power.cut(2, Loss::All), [vec![b'a'; 4096]]);
    }

    #[test]
    fn writes_are_torn_between_sectors_and_overtaken_by_later_ones() {
        let power = PowerCut::new();
        let storage = power.add_storage("disk", vec![b'.'; 1536], 1 << 20);
        block_on(write(&storage, 0, &[b'a'; 1536])).unwrap();
        block_on(write(&storage, 512, &[b'b'; 512])).unwrap();
        block_on(storage.set_len(1024)).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..2000 {
            let bytes = power.cut(3, Loss::Some(seed)).remove(0);
            assert!(bytes.chunks(512).all(|sector| sector.iter().all(|byte| *byte == sector[0])));
            seen.insert(bytes.chunks(512).map(|sector| sector[0]).collect::<Vec<_>>());
        }
        let all: Vec<_> = seen.iter().map(|bytes| std::str::from_utf8(bytes).unwrap()).collect();
        for wanted in ["...", "aaa", "a..", ".a.", "aba", ".b", "aa", ".."] {
            assert!(all.contains(&wanted), "{wanted} of {all:?}");
        }
    }
}
