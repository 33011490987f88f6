//! One round: the pages that the queue hands out, in a section of their own.

use std::thread;
use std::time::{Duration, Instant};

use limosa_memory::MemoryBlock;
use limosa_page::{PAGE_SIZE, PageBitmap};
use limosa_stream::section;

use super::convergence::{Convergence, Reason, Verdict};
use super::guest::GuestSource;
use super::link::{Link, Terms};
use super::sent_bitmap::SentBitmap;
use super::stats::RoundKind;
use crate::control::MovedPages;
use crate::error::MigrateError;
use crate::live::ZeroCheck;
use crate::pages::PageSource;
use crate::source::multifd::{Multifd, RoundPlan, RoundSent};
use crate::source::records::{GuestPages, RecordWriter, Sent, ZERO_RECORD, Zeros};

/// The longest sleep for a limited rate: what else ends a round is looked at in between.
pub(super) const RATE_TICK: Duration = Duration::from_millis(20);

/// Sends rounds, from the first page to the last.
pub(super) struct Rounds<'e, 'v> {
    pub(super) course: Course<'e, 'v>,
    pub(super) records: RecordWriter<'e>,
}

/// How the rounds go.
pub(super) struct Course<'e, 'v> {
    pub(super) link: &'e Link<'e, 'v>,
    pub(super) terms: &'e Terms<'e>,
    pub(super) convergence: Convergence,
    /// The pages that were sent, if postcopy may follow.
    pub(super) sent: Option<SentBitmap>,
}

/// Why a round was broken off.
pub(super) enum BrokenOff {
    Time(Reason),
    Postcopy,
}

/// A round to be sent.
pub(super) struct Round {
    pub(super) kind: RoundKind,
    /// Pages that are looked at, by block: until the queue hands them out.
    pub(super) pages: Vec<PageBitmap>,
    /// Pages that are zero without being looked at, by block: in the first round, and in the last if that was broken
    /// off.
    pub(super) holes: Vec<PageBitmap>,
}

/// The result of a round.
#[derive(Default)]
pub(super) struct RoundResult {
    pub(super) sent: Sent,
    pub(super) holes: u64,
    /// The rest, if it was broken off: pages,
    pub(super) rest: Vec<PageBitmap>,
    /// and holes.
    pub(super) unsent_holes: Vec<PageBitmap>,
    pub(super) broken_off: Option<BrokenOff>,
    pub(super) busy: Duration,
}

impl Round {
    /// Pages that it is about.
    pub(super) fn count(&self) -> u64 {
        self.pages.iter().chain(&self.holes).map(PageBitmap::count).sum()
    }
}

impl<'e, 'v> Rounds<'e, 'v> {
    /// Before the first round.
    pub(super) fn new(
        link: &'e Link<'e, 'v>,
        terms: &'e Terms<'e>,
        sent: Option<SentBitmap>,
    ) -> Result<Self, MigrateError> {
        let records = RecordWriter::new(link.channel, &link.source.setup().blocks)?;
        let records = records.looking_by(terms.params.zero_method).writing_by(terms.params.record_write);
        Ok(Self { course: Course { link, terms, convergence: Convergence::new(terms.params), sent }, records })
    }

    /// Sends the round that the queue hands out. One that was not broken off has sent all of it.
    pub(super) fn send(&mut self, round: &Round) -> Result<RoundResult, MigrateError> {
        let link = self.course.link;
        let start = link.source.setup();
        let last = round.kind == RoundKind::Last;
        let mut bytes = Vec::new();
        match last {
            true => section::encode_end(start.section_id, &mut bytes),
            false => section::encode_part(start.section_id, &mut bytes),
        }
        link.channel.write_all(&bytes)?;
        self.records.take_busy();
        let result = match link.multifd {
            Some(multifd) => self.send_packets(multifd, round)?,
            None => self.send_records(round)?,
        };
        if result.broken_off.is_none() {
            link.queue.check_spent()?;
        }
        bytes.clear();
        link.end_section(&mut bytes);
        link.channel.write_all(&bytes)?;
        if let Some(multifd) = link.multifd.filter(|_| last) {
            // From here on the destination may close them.
            multifd.is_over();
        }
        Ok(result)
    }

    /// Sends a round as records of the main channel.
    fn send_records(&mut self, round: &Round) -> Result<RoundResult, MigrateError> {
        let Self { course, records } = self;
        let link = course.link;
        let mut result = RoundResult::default();
        let last = round.kind == RoundKind::Last;
        course.tell_holes(round, records, &mut result)?;
        if result.broken_off.is_some() {
            result.rest = link.queue.take_rest()?;
            result.busy += records.take_busy();
            return Ok(result);
        }
        let mut runs = Vec::new();
        let mut waited = Duration::ZERO;
        // The block of what is placed and not put.
        let mut placed: Option<&MemoryBlock> = None;
        loop {
            link.check()?;
            if !last && let Some(why) = course.breaks_off() {
                (result.rest, result.broken_off) = (link.queue.take_rest()?, Some(why));
                break;
            }
            if records.room() == 0
                && let Some(memory) = placed.take()
            {
                records.put_placed(memory)?;
            }
            let pause = if last { Duration::ZERO } else { link.control.rate_limit().delay() };
            if !pause.is_zero() {
                let began = Instant::now();
                thread::sleep(pause.min(RATE_TICK));
                waited += began.elapsed();
                continue;
            }
            let Some(block) = link.queue.claim_pages(&mut runs, records.room() as u64) else { break };
            let memory = link.memory.block(block).map_err(|error| MigrateError::Source(error.into()))?;
            if let Some(other) = placed.replace(memory).filter(|other| !std::ptr::eq(*other, memory)) {
                records.put_placed(other)?;
            }
            let zeros = course.zeros(block, round.kind);
            if let Some(bitmap) = &mut course.sent {
                bitmap.sent(block, &runs)?;
            }
            let mut noted = Ok(());
            let sent = records.place(GuestPages { block, memory, runs: &runs, zeros }, |run| {
                if let Some(bitmap) = &mut course.sent
                    && noted.is_ok()
                {
                    noted = bitmap.left_out(block, run);
                }
            })?;
            noted?;
            if !last {
                // What is not sent costs nothing: or zero pages would hold up those with contents that wait for the
                // next call.
                let report = sent.zero.saturating_mul(ZERO_RECORD);
                link.control.rate_limit().spend(sent.normal.saturating_mul(PAGE_SIZE).saturating_add(report));
            }
            link.progress.add_moved(MovedPages { normal: sent.normal, zero: sent.zero, resent: 0 });
            result.sent.add(sent);
        }
        if let Some(memory) = placed {
            records.put_placed(memory)?;
        }
        result.busy += records.take_busy() + waited;
        Ok(result)
    }

    /// Sends a round on the multifd channels.
    fn send_packets(
        &mut self,
        multifd: &Multifd<'_, GuestSource<'_>>,
        round: &Round,
    ) -> Result<RoundResult, MigrateError> {
        let Self { course, records } = self;
        let (link, terms) = (course.link, course.terms);
        let mut result = RoundResult::default();
        let last = round.kind == RoundKind::Last;
        let zeros = (0..link.source.setup().blocks.len()).map(|block| course.zeros(block, round.kind)).collect();
        // One for the section that the round is.
        let plan = RoundPlan { zeros, method: terms.params.zero_method, syncs: 1, limited: !last };
        let timeout = terms.params.timeout.filter(|_| !last);
        let deadline = timeout.and_then(|timeout| terms.begun.checked_add(timeout));
        let tell = |records: &mut RecordWriter<'_>| course.tell_holes(round, records, &mut result);
        let RoundSent { sent, busy, rest } = multifd.send_round(plan, records, tell, deadline)?;
        result.sent.add(sent);
        result.busy = result.busy.max(busy);
        if let (Some(rest), Some(timeout)) = (rest, timeout) {
            (result.rest, result.broken_off) = (rest, Some(BrokenOff::Time(Reason::Time(timeout))));
        }
        Ok(result)
    }
}

impl Course<'_, '_> {
    /// Returns the treatment of zero pages of a block in such a round.
    fn zeros(&self, block: usize, kind: RoundKind) -> Zeros {
        match (self.terms.params.zero_check, kind) {
            (ZeroCheck::Off, _) | (ZeroCheck::Bulk, RoundKind::Dirty | RoundKind::Last) => Zeros::Unknown,
            (_, RoundKind::Bulk) if self.link.leaves_out(self.terms, block) => Zeros::LeftOut,
            _ => Zeros::Told,
        }
    }

    /// Whether a round has to be broken off now.
    pub(super) fn breaks_off(&self) -> Option<BrokenOff> {
        if self.link.switches(self.terms) {
            return Some(BrokenOff::Postcopy);
        }
        match self.convergence.overdue(self.terms.begun.elapsed())? {
            Verdict::NoConvergence(_, reason) => Some(BrokenOff::Time(reason)),
            Verdict::Continue { .. } | Verdict::SwitchOver => None,
        }
    }
}
