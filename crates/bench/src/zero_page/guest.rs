//! Guests whose zero pages make a difference, or none.
//!
//! Law: what a guest writes depends on nothing but the round, so every migration of it moves the same. It writes at the
//! end of a round, right before its dirty log is read: the time that takes is the guest's, and is taken out of the
//! migration's.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Result;
use limosa_memory::dirty::{DirtyLog, DirtyLogs, DirtyPages, LogError, SoftwareDirtyBitmap, SoftwareDirtyLog, Writers};
use limosa_memory::{BlockOptions, GuestMemory, MemoryError};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageNumber, PageRange};
use serde::{Deserialize, Serialize};

use crate::content::fill_random;
use crate::measure::{nanoseconds, thread_cpu};
use crate::stream::ZeroPages;

/// Rounds at whose end a guest writes.
const ROUNDS: u64 = 3;
/// One page of this number has contents in a zero-heavy guest: 128 MiB of 4 GiB, about what Linux takes for itself.
const HEAVY: u64 = 32;

/// A guest, by what it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Guest {
    /// Most of its memory was touched once and is zero; it is paused.
    ZeroHeavy,
    /// All of its memory has contents. At the end of each of three rounds it frees a quarter of it, and zeroes what it
    /// frees, as Windows does; and it writes contents into an eighth of that.
    Zeroing,
    /// The same, but freed memory is written again at once: nothing ever becomes zero.
    Writing,
}

impl Guest {
    pub(crate) const ALL: [Self; 3] = [Self::ZeroHeavy, Self::Zeroing, Self::Writing];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::ZeroHeavy => "zero-heavy guest",
            Self::Zeroing => "guest that zeroes what it frees",
            Self::Writing => "guest that writes contents",
        }
    }

    /// Bytes of its memory, if the options set them.
    pub(crate) fn memory(self, cold: Option<u64>) -> u64 {
        match (self, cold) {
            (Self::ZeroHeavy, None) => 4 << 30,
            (Self::ZeroHeavy, Some(cold)) => 2 * cold,
            (Self::Zeroing | Self::Writing, None) => 1 << 30,
            (Self::Zeroing | Self::Writing, Some(cold)) => cold / 2,
        }
        .next_multiple_of(2 << 20)
    }

    /// The bytes of memory of this size that the receiver will take up.
    pub(super) fn takes(self, memory: u64, zeros: ZeroPages) -> u64 {
        match (self, zeros) {
            (Self::ZeroHeavy, ZeroPages::Always | ZeroPages::Plainly | ZeroPages::Bulk) => memory / HEAVY,
            _ => memory,
        }
    }

    /// So much memory, populated, the logs that see what it writes, and what that costs it.
    pub(crate) fn start(self, name: &str, memory: u64) -> Result<(Arc<GuestMemory>, DirtyLogs, Arc<Spent>)> {
        let memory = Arc::new(GuestMemory::new(vec![BlockOptions::anonymous(name, memory).map()?])?);
        let pages = memory.block(0)?.pages();
        let pen = Pen::new(Arc::clone(&memory));
        match self {
            Self::ZeroHeavy => {
                pen.write(pages, Written::Zeros)?;
                for first in (0..pages.len()).step_by(usize::try_from(HEAVY)?) {
                    pen.write(PageRange::starting_at(PageNumber(first), 1), Written::Contents)?;
                }
            }
            Self::Zeroing | Self::Writing => pen.write(pages, Written::Contents)?,
        }
        let log = SoftwareDirtyLog::new(&memory, Writers::VCPUS);
        let spent = Arc::new(Spent::default());
        let marker = log.bitmap();
        let log = Scripted { guest: self, pen, marker, log, round: 0, spent: Arc::clone(&spent) };
        let logs = DirtyLogs::new(Writers::VCPUS, vec![Box::new(log)])?;
        Ok((memory, logs, spent))
    }

    /// Writes what the guest writes at the end of a round.
    fn writes(self, round: u64, pages: u64) -> Vec<(PageRange, Written)> {
        let quarter = pages / 4;
        let freed = PageRange::starting_at(PageNumber(round * quarter), quarter);
        let used = PageRange::starting_at(PageNumber(ROUNDS * quarter), quarter / 8);
        match self {
            Self::Zeroing if round < ROUNDS => vec![(freed, Written::Zeros), (used, Written::Contents)],
            Self::Writing if round < ROUNDS => vec![(freed, Written::Contents), (used, Written::Contents)],
            Self::ZeroHeavy | Self::Zeroing | Self::Writing => Vec::new(),
        }
    }
}

/// The time that a guest has spent on writing, in nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct Spent {
    wall: AtomicU64,
    cpu: AtomicU64,
}

impl Spent {
    /// Of the clock, and of CPU time.
    pub(crate) fn so_far(&self) -> (u64, u64) {
        (self.wall.load(Ordering::Relaxed), self.cpu.load(Ordering::Relaxed))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Written {
    Zeros,
    Contents,
}

/// The writer of a guest.
#[derive(Debug)]
struct Pen {
    memory: Arc<GuestMemory>,
    page: Vec<u8>,
}

impl Pen {
    fn new(memory: Arc<GuestMemory>) -> Self {
        let mut page = vec![0; PAGE_LEN];
        fill_random(&mut page);
        Self { memory, page }
    }

    fn write(&self, pages: PageRange, what: Written) -> Result<(), MemoryError> {
        let block = self.memory.block(0)?;
        if what == Written::Zeros {
            return block.fill_zero(pages.bytes().start, pages.len().saturating_mul(PAGE_SIZE));
        }
        for page in pages.iter() {
            block.write(page.offset(), &self.page)?;
        }
        Ok(())
    }
}

/// The guest's dirty log, which has it write.
#[derive(Debug)]
struct Scripted {
    guest: Guest,
    pen: Pen,
    marker: SoftwareDirtyBitmap,
    log: SoftwareDirtyLog,
    round: u64,
    spent: Arc<Spent>,
}

impl DirtyLog for Scripted {
    fn name(&self) -> &'static str {
        "the dirty log of a bench's guest"
    }

    fn writers(&self) -> Writers {
        self.log.writers()
    }

    fn start(&mut self) -> Result<(), LogError> {
        self.round = 0;
        self.log.start()
    }

    fn fetch(&mut self, into: &mut DirtyPages) -> Result<(), LogError> {
        let (begun, cpu) = (Instant::now(), thread_cpu());
        let pages = self.pen.memory.blocks().iter().map(|block| block.pages().len()).sum();
        for (pages, what) in self.guest.writes(self.round, pages) {
            self.pen.write(pages, what).map_err(|error| LogError::Failed {
                log: self.name(),
                operation: "what the guest writes",
                source: io::Error::other(error),
            })?;
            self.marker.mark(0, pages);
        }
        self.round += 1;
        self.spent.wall.fetch_add(nanoseconds(begun.elapsed()), Ordering::Relaxed);
        self.spent.cpu.fetch_add(nanoseconds(thread_cpu().saturating_sub(cpu)), Ordering::Relaxed);
        self.log.fetch(into)
    }

    fn stop(&mut self) -> Result<(), LogError> {
        self.log.stop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_writes_lies_in_its_memory_and_ends_after_some_rounds() {
        for guest in Guest::ALL {
            let pages = guest.memory(Some(8 << 20)) / PAGE_SIZE;
            for round in 0..ROUNDS {
                let writes = guest.writes(round, pages);
                assert!(writes.iter().all(|(run, _)| run.end.0 <= pages && !run.is_empty()), "{guest:?}: {writes:?}");
                let zeroes = writes.iter().any(|(_, what)| *what == Written::Zeros);
                assert_eq!(zeroes, guest == Guest::Zeroing);
            }
            assert!(guest.writes(ROUNDS, pages).is_empty());
        }
    }

    #[test]
    fn both_guests_that_write_write_the_same_pages() {
        let pages =
            |guest: Guest, round| guest.writes(round, 1 << 18).into_iter().map(|(run, _)| run).collect::<Vec<_>>();
        assert!((0..ROUNDS).all(|round| pages(Guest::Zeroing, round) == pages(Guest::Writing, round)));
    }
}
