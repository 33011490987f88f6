//! Holes: pages that were never populated, which a destination that is not fresh has to be told of.
//!
//! There may be far more of them than of all others, so they wait for the limit, and for nothing when time is up: what has not
//! been told by then is told when the VM stands still, or discarded there.

use std::cmp::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use limosa_page::{PageNumber, PageRange};

use super::convergence::Convergence;
use super::engine::{BrokenOff, Engine, RATE_TICK, Round, RoundResult};
use super::stats::RoundKind;
use crate::error::MigrateError;
use crate::live::LiveVm;
use crate::progress::Moved;
use crate::source::records::{RecordWriter, ZERO_RECORD};

/// Zero pages that are told between two looks at whether that is still wanted.
const HOLES_A_CHECK: u64 = 1 << 14;

impl<V: LiveVm + ?Sized> Engine<'_, '_, V> {
    /// Says of pages that were never populated that they are zero, where that is not known; until the round is broken off.
    pub(super) fn tell_holes(
        &mut self,
        round: &Round,
        convergence: &Convergence,
        records: &mut RecordWriter<'_>,
        result: &mut RoundResult,
    ) -> Result<(), MigrateError> {
        let last = round.kind == RoundKind::Last;
        for (block, holes) in round.holes.iter().enumerate() {
            if self.leaves_out(block) {
                let count = holes.count();
                result.holes += count;
                result.sent.left_out += count;
                if let Some(track) = &mut self.track {
                    holes.runs().for_each(|run| track.left_out(block, run));
                }
                continue;
            }
            for run in holes.runs().flat_map(|run| run.chunks(HOLES_A_CHECK)) {
                result.broken_off = self.wait_to_tell(last, convergence, &mut result.busy)?;
                if result.broken_off.is_some() {
                    self.leave_untold(round, block, run.start, result);
                    return Ok(());
                }
                records.send_zero(block, run)?;
                if !last {
                    self.control.rate().spend(run.len().saturating_mul(ZERO_RECORD));
                }
                self.progress.moved(Moved { zero: run.len(), ..Moved::default() });
                result.holes += run.len();
                result.sent.zero += run.len();
                if let Some(track) = &mut self.track {
                    track.sent(block, &[run]);
                }
            }
        }
        Ok(())
    }

    /// Waits until the limit lets more holes be told; why they are not to be, if the round is to be broken off.
    fn wait_to_tell(
        &self,
        last: bool,
        convergence: &Convergence,
        waited: &mut Duration,
    ) -> Result<Option<BrokenOff>, MigrateError> {
        loop {
            self.check()?;
            if last {
                return Ok(None);
            }
            let broken_off = self.breaks_off(convergence);
            let pause = self.control.rate().delay();
            if broken_off.is_some() || pause.is_zero() {
                return Ok(broken_off);
            }
            let began = Instant::now();
            thread::sleep(pause.min(RATE_TICK));
            *waited += began.elapsed();
        }
    }

    /// Remembers the holes from a page of a block on, and those of the blocks behind it.
    fn leave_untold(&mut self, round: &Round, block: usize, from: PageNumber, result: &mut RoundResult) {
        result.untold = round.holes.clone();
        for (index, untold) in result.untold.iter_mut().enumerate() {
            match index.cmp(&block) {
                Ordering::Less => untold.clear_range(PageRange::first(untold.len())),
                Ordering::Equal => untold.clear_range(PageRange::first(from.0)),
                Ordering::Greater => {}
            }
            // Postcopy discards them there.
            if let Some(track) = &mut self.track {
                untold.runs().for_each(|run| track.left_out(index, run));
            }
        }
    }
}
