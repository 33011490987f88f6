//! Recording changes.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use limosa_page::{BrokenInvariant, broken_invariant};
use limosa_storage::{Operation, SharedWords, StorageError};
use rustix::fs::unlink;

use super::super::locks::{Rank, RankedMutex};
use crate::error::ImageError;
use crate::qcow2::format::journal::{EPOCHS, EntryChange, HEADER, RECORD, RECORDS, Subject, WORDS, record_at};

/// Space is found for this number of records of a half at once: the entries of a slice.
const CHUNK: usize = 512;

/// A journal to which changes are added.
#[derive(Debug)]
pub(in super::super) struct Recorder {
    path: PathBuf,
    words: SharedWords,
    /// The half in which changes are recorded now.
    current: AtomicUsize,
    /// Records of each half.
    counts: [AtomicUsize; 2],
    /// The last epoch. No two halves of this file have had the same.
    epoch: AtomicU64,
    /// The half that is not current has records.
    pending: AtomicBool,
    growing: RankedMutex<()>,
}

/// Room for records.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Room {
    half: usize,
    first: usize,
}

impl Recorder {
    pub(super) fn begin(path: PathBuf, file: File, subject: &Subject) -> io::Result<Self> {
        // No record is left that an epoch of this process would make valid.
        file.set_len(0)?;
        let recorder = Self {
            path,
            words: SharedWords::map(file, WORDS)?,
            current: AtomicUsize::new(0),
            counts: [const { AtomicUsize::new(0) }; 2],
            epoch: AtomicU64::new(0),
            pending: AtomicBool::new(false),
            growing: Rank::Journal.mutex(()),
        };
        recorder.words.allocate(HEADER)?;
        let begun = subject.encode().into_iter().enumerate().try_for_each(|(at, word)| recorder.store(at, word));
        begun.and_then(|()| recorder.begin_half(0)).map_err(io::Error::other)?;
        Ok(recorder)
    }

    fn store(&self, at: usize, word: u64) -> Result<(), BrokenInvariant> {
        let place = self.words.get(at).ok_or_else(|| broken_invariant("a word of the journal has space"))?;
        // Another process sees the words in the order of the stores: they are of one process, and it is dead by then.
        place.store(word, Ordering::Release);
        Ok(())
    }

    fn begin_half(&self, half: usize) -> Result<(), BrokenInvariant> {
        let epoch = self.epoch.fetch_add(1, Ordering::AcqRel) + 1;
        self.count(half)?.store(0, Ordering::Release);
        let at = EPOCHS.get(half).ok_or_else(|| broken_invariant("a journal has two halves"))?;
        self.store(*at, epoch)?;
        self.current.store(half, Ordering::Release);
        Ok(())
    }

    fn count(&self, half: usize) -> Result<&AtomicUsize, BrokenInvariant> {
        self.counts.get(half).ok_or_else(|| broken_invariant("a journal has two halves"))
    }

    /// Finds room for records, before the first of the changes is made; `None`: the journal is full until a flush.
    /// Under the lock of the slice whose entries are changed.
    pub(in super::super) fn reserve(&self, records: usize) -> Result<Option<Room>, ImageError> {
        let half = self.current.load(Ordering::Acquire);
        let count = self.count(half)?;
        let mut first = count.load(Ordering::Acquire);
        loop {
            let end = first + records;
            if end > RECORDS {
                return Ok(None);
            }
            match self.find_space(end) {
                // A flush makes room, but not for more than there was before.
                Err(_) if first > 0 => return Ok(None),
                Err(error) => {
                    let name = self.path.to_string_lossy().into();
                    return Err(StorageError::for_storage(Operation::Write, &name, error).into());
                }
                Ok(()) => {}
            }
            match count.compare_exchange_weak(first, end, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(Some(Room { half, first })),
                Err(now) => first = now,
            }
        }
    }

    /// Finds space for this number of records of each half.
    fn find_space(&self, records: usize) -> io::Result<()> {
        if self.words.room() >= record_at(0, records) {
            return Ok(());
        }
        let _alone = self.growing.lock();
        self.words.allocate(record_at(0, records.next_multiple_of(CHUNK).min(RECORDS)))
    }

    /// Records a change, before it is made in memory. Each `number` below that of the reserved records, once.
    pub(in super::super) fn record(
        &self,
        room: Room,
        number: usize,
        change: &EntryChange,
    ) -> Result<(), BrokenInvariant> {
        let (begin, epoch) = (record_at(room.half, room.first + number), self.epoch_of(room.half)?);
        let [tag, rest @ ..] = change.encode(epoch);
        for (at, word) in (begin + 1..begin + RECORD).zip(rest) {
            self.store(at, word)?;
        }
        self.store(begin, tag)
    }

    fn epoch_of(&self, half: usize) -> Result<u64, BrokenInvariant> {
        let word = EPOCHS.get(half).and_then(|at| self.words.get(*at));
        Ok(word.ok_or_else(|| broken_invariant("a half of a journal has an epoch"))?.load(Ordering::Acquire))
    }

    /// A flush is about to capture what differs: what was recorded up to now goes with it. One at a time.
    pub(in super::super) fn flush_begins(&self) -> Result<(), BrokenInvariant> {
        if self.pending.swap(true, Ordering::AcqRel) {
            // The last flush failed: its half stays, and this flush is of it.
            return Ok(());
        }
        self.begin_half(1 - self.current.load(Ordering::Acquire))
    }

    /// The flush has brought to the file what it captured.
    pub(in super::super) fn flushed(&self) -> Result<(), BrokenInvariant> {
        self.end_half(1 - self.current.load(Ordering::Acquire))?;
        self.pending.store(false, Ordering::Release);
        Ok(())
    }

    fn end_half(&self, half: usize) -> Result<(), BrokenInvariant> {
        let at = EPOCHS.get(half).ok_or_else(|| broken_invariant("a journal has two halves"))?;
        self.store(*at, 0)
    }

    /// The image is closed, and has everything: removes the journal.
    pub(in super::super) fn end(&self) -> Result<(), BrokenInvariant> {
        for half in 0..EPOCHS.len() {
            self.end_half(half)?;
        }
        // One that stays says nothing.
        let _ = unlink(&self.path);
        Ok(())
    }
}
