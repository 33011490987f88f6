//! Holes: pages that were never populated. They are never read, and a destination that is not zeroed has to know
//! which they are.
//!
//! There may be far more of them than of all others, so they wait for the limit, and for nothing when time is up: what
//! has not been told by then is told when the VM is stopped, or discarded there.
//!
//! Of memory that is full and has a few holes it takes long to find them: of a guest that tells its free pages they are
//! looked for when it has been asked, and only among what it has not called free by then.

use std::cmp::Ordering;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use limosa_memory::MemoryBlock;
use limosa_page::{PageBitmap, PageNumber, PageRange};

use super::link::Link;
use super::round::{BrokenOff, Course, RATE_TICK, Round, RoundResult};
use super::stats::RoundKind;
use crate::control::MovedPages;
use crate::error::MigrateError;
use crate::source::records::{RecordWriter, ZERO_RECORD};

/// Zero pages that are told between two looks at whether that is still wanted.
const HOLES_A_CHECK: u64 = 1 << 14;

/// Pages whose population is read at a time, while the list of free pages comes: 256 MiB.
const PAGES_A_LOOK: u64 = 1 << 16;

impl Link<'_, '_> {
    /// The first round: all memory, but memory that was never populated is not read. If holes have to be
    /// [found later](Self::find_holes), it has none.
    pub(super) fn bulk(&self, find_later: bool) -> Result<Round, MigrateError> {
        let (mut pages, mut holes) = (Vec::new(), Vec::new());
        for block in self.memory.blocks() {
            let none = || PageBitmap::new(block.pages().len());
            let (found, empty) = match self.source.leaves_out(block) {
                true => (none(), none()),
                false if find_later => (PageBitmap::full(block.pages().len()), none()),
                false => {
                    let found = block.populated(block.pages()).map_err(|error| not_found(block, &error))?;
                    let mut empty = found.clone();
                    empty.invert();
                    (found, empty)
                }
            };
            pages.push(found);
            holes.push(empty);
        }
        Ok(Round { kind: RoundKind::Bulk, pages, holes })
    }

    /// Takes what was never populated out of the first round, of what the guest has not called free by now.
    ///
    /// In pieces, where that is possible: of memory that is full a page costs a tenth of what it costs to send it, and
    /// while the list comes less is left to be asked of each piece.
    pub(super) fn find_holes(&self, round: &mut Round) -> Result<(), MigrateError> {
        for (index, (block, holes)) in self.memory.blocks().iter().zip(&mut round.holes).enumerate() {
            let most = if block.can_query_ranges() { PAGES_A_LOOK } else { block.pages().len().max(1) };
            for piece in block.pages().chunks(most) {
                self.check()?;
                let left = self.queue.left(index, piece);
                left.iter().for_each(|run| holes.set_range(*run));
                let looked = block.for_each_populated(left.iter().copied(), |run| holes.clear_range(run));
                looked.map_err(|error| not_found(block, &error))?;
            }
            self.queue.drop_pages(index, holes);
        }
        Ok(())
    }
}

impl Course<'_, '_> {
    /// Says of pages that were never populated that they are zero, where that is not known; until the round is broken
    /// off.
    pub(super) fn tell_holes(
        &mut self,
        round: &Round,
        records: &mut RecordWriter<'_>,
        result: &mut RoundResult,
    ) -> Result<(), MigrateError> {
        let last = round.kind == RoundKind::Last;
        for (block, holes) in round.holes.iter().enumerate() {
            if self.link.leaves_out(self.terms, block) {
                let count = holes.count();
                result.holes += count;
                result.sent.left_out += count;
                if let Some(bitmap) = &mut self.sent {
                    holes.runs().try_for_each(|run| bitmap.left_out(block, run))?;
                }
                continue;
            }
            for run in holes.runs().flat_map(|run| run.chunks(HOLES_A_CHECK)) {
                result.broken_off = self.wait_to_tell(last, &mut result.busy)?;
                if result.broken_off.is_some() {
                    return self.leave_unsent(round, block, run.start, result);
                }
                records.send_zero(block, run)?;
                if !last {
                    self.link.control.rate_limit().spend(run.len().saturating_mul(ZERO_RECORD));
                }
                self.link.progress.add_moved(MovedPages { zero: run.len(), ..MovedPages::default() });
                result.holes += run.len();
                result.sent.zero += run.len();
                if let Some(bitmap) = &mut self.sent {
                    bitmap.sent(block, &[run])?;
                }
            }
        }
        Ok(())
    }

    /// Waits until the limit lets more holes out. Returns the reason if the round has to be broken off.
    fn wait_to_tell(&self, last: bool, waited: &mut Duration) -> Result<Option<BrokenOff>, MigrateError> {
        loop {
            self.link.check()?;
            if last {
                return Ok(None);
            }
            let broken_off = self.breaks_off();
            let pause = self.link.control.rate_limit().delay();
            if broken_off.is_some() || pause.is_zero() {
                return Ok(broken_off);
            }
            let began = Instant::now();
            thread::sleep(pause.min(RATE_TICK));
            *waited += began.elapsed();
        }
    }

    /// Remembers the holes from a page of a block on, and those of the blocks behind it.
    fn leave_unsent(
        &mut self,
        round: &Round,
        block: usize,
        from: PageNumber,
        result: &mut RoundResult,
    ) -> Result<(), MigrateError> {
        result.unsent_holes = round.holes.clone();
        for (index, unsent_holes) in result.unsent_holes.iter_mut().enumerate() {
            match index.cmp(&block) {
                Ordering::Less => unsent_holes.clear_range(PageRange::whole_block(unsent_holes.len())),
                Ordering::Equal => unsent_holes.clear_range(PageRange::whole_block(from.0)),
                Ordering::Greater => {}
            }
            // Postcopy discards them there.
            if let Some(bitmap) = &mut self.sent {
                unsent_holes.runs().try_for_each(|run| bitmap.left_out(index, run))?;
            }
        }
        Ok(())
    }
}

fn not_found(block: &MemoryBlock, error: &io::Error) -> MigrateError {
    MigrateError::Source(format!("RAM block {}: its holes cannot be found: {error}", block.name()).into())
}
