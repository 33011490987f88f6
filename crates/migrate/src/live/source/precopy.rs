//! The phases in which the VM runs here: setup, the rounds, and the free pages of a postcopy at once.

use std::time::{Duration, Instant};

use limosa_memory::dirty::DirtyPages;
use limosa_page::PageBitmap;
use limosa_stream::postcopy;

use super::attempt::Attempt;
use super::convergence::{RoundFigures, Verdict};
use super::link::PostcopyMode;
use super::phase::{LastRound, Left, Phase, Unmoved};
use super::round::{BrokenOff, Round, RoundResult, Rounds};
use super::sent_bitmap::SentBitmap;
use super::stats::{RoundKind, RoundReport};
use crate::control;
use crate::error::MigrateError;
use crate::live::{LiveVm, TimeoutStrategy};

/// How long the list of free pages is waited for before it is looked at what else ends that.
const HINT_TICK: Duration = Duration::from_millis(10);

impl<'e, 'v, V: LiveVm + ?Sized> Attempt<'_, 'e, 'v, V> {
    /// Waits for the destination's first answer: it is there, and it can answer. No page is looked at before.
    pub(super) fn setup(&mut self) -> Result<Phase<'e, 'v>, MigrateError> {
        let (link, terms) = (self.link, self.terms);
        link.return_path.wait_pong(postcopy::PING_RETURN_PATH, terms.params.answer_timeout)?;
        let sent = (terms.postcopy != PostcopyMode::Off).then(|| SentBitmap::new(link.source));
        if let Some(sent) = sent.as_ref().filter(|_| self.vm.has_hints()) {
            link.queue.remember_free(sent.sent.clone());
        }
        if terms.postcopy == PostcopyMode::AtOnce && !self.vm.has_hints() {
            // Of a VM that is stopped when its first page is read no write is missed, so nothing is logged.
            return Ok(Phase::Pause(Left::All));
        }
        self.vm.start_logs()?;
        link.progress.set_phase(control::Phase::Active);
        let rounds = Rounds::new(link, terms, sent)?;
        Ok(match terms.postcopy {
            PostcopyMode::AtOnce => Phase::Hints(Box::new(rounds)),
            PostcopyMode::Off | PostcopyMode::Allowed => Phase::Precopy(Box::new(rounds)),
        })
    }

    /// Waits for the free pages of the guest, which runs meanwhile, within their time limit. Nothing is sent before
    /// postcopy.
    pub(super) fn ask_for_hints(&mut self, mut rounds: Rounds<'e, 'v>) -> Result<Phase<'e, 'v>, MigrateError> {
        let (link, terms) = (self.link, self.terms);
        let mut round = link.bulk(true)?;
        let (begun, about) = (terms.begun.elapsed(), round.count());
        self.begin(&mut round, about, &rounds)?;
        let (rest, hinted) = (link.queue.take_rest()?, link.queue.taken());
        let left = rest.iter().map(PageBitmap::count).sum();
        let duration = terms.begun.elapsed().saturating_sub(begun);
        let kind = RoundKind::Bulk;
        let report =
            RoundReport { kind, start_time: begun, duration, pages: about, hinted, rest: left, ..RoundReport::empty() };
        self.reports.add(&RoundResult::default(), report);
        if let Some(sent) = &mut rounds.course.sent {
            sent.zero = round.holes;
        }
        Ok(Phase::Pause(left_to_postcopy(rest, rounds)?))
    }

    /// Sends rounds until the VM has to stop.
    pub(super) fn precopy(&mut self, mut rounds: Rounds<'e, 'v>) -> Result<Phase<'e, 'v>, MigrateError> {
        let (link, terms) = (self.link, self.terms);
        let mut round = link.bulk(self.vm.has_hints())?;
        loop {
            let (begun, kind, about) = (terms.begun.elapsed(), round.kind, round.count());
            let bytes = link.bytes_out();
            let throttle = rounds.course.convergence.throttle();
            self.begin(&mut round, about, &rounds)?;
            let result = rounds.send(&round)?;
            let mut next = DirtyPages::new(link.memory);
            self.vm.fetch(&mut next)?;
            let (duration, hinted) = (terms.begun.elapsed().saturating_sub(begun), link.queue.taken());
            let dirty = next.count();
            let mut rest = next.blocks().to_vec();
            rest.iter_mut().zip(&result.rest).for_each(|(rest, left)| rest.union_with(left));
            let left = rest.iter().map(PageBitmap::count).sum();
            let bytes = link.bytes_out() - bytes;
            let convergence = &mut rounds.course.convergence;
            let figures = RoundFigures { bytes, busy: result.busy, sent_pages: result.sent.normal, rest_pages: left };
            let verdict = match &result.broken_off {
                Some(BrokenOff::Time(reason)) => Verdict::NoConvergence(terms.params.timeout_strategy, *reason),
                Some(BrokenOff::Postcopy) | None => {
                    convergence.after_round(figures, terms.begun.elapsed(), link.downtime_limit(terms))
                }
            };
            self.reports.add(
                &result,
                RoundReport {
                    kind,
                    start_time: begun,
                    duration,
                    pages: about,
                    hinted,
                    bytes,
                    dirty,
                    rest: left,
                    bandwidth: convergence.bandwidth(),
                    expected_downtime: convergence.expected_downtime(left),
                    throttle,
                    ..RoundReport::empty()
                },
            );
            match verdict {
                _ if link.switches(terms) => return Ok(Phase::Pause(left_to_postcopy(rest, rounds)?)),
                Verdict::NoConvergence(TimeoutStrategy::Postcopy, _) => {
                    return Ok(Phase::Pause(left_to_postcopy(rest, rounds)?));
                }
                Verdict::SwitchOver | Verdict::NoConvergence(TimeoutStrategy::Pause, _) => {
                    let last = LastRound::new(rounds, rest, result.unsent_holes);
                    return Ok(Phase::Pause(Left::LastRound(Box::new(last))));
                }
                Verdict::Continue { throttle } => {
                    if let Some(percent) = throttle {
                        self.vm.throttle(percent);
                    }
                }
                Verdict::NoConvergence(TimeoutStrategy::Cancel, reason) => {
                    return Err(MigrateError::NoConvergence(reason.to_string()));
                }
            }
            round = Round { kind: RoundKind::Dirty, pages: rest, holes: Vec::new() };
        }
    }

    /// Has the queue hands out the pages of a round, and asks the guest which of them are free, if the answer can come
    /// before they are sent. The list of the first round may be waited for.
    fn begin(&mut self, round: &mut Round, about: u64, rounds: &Rounds<'_, '_>) -> Result<(), MigrateError> {
        let (link, terms) = (self.link, self.terms);
        link.queue.start(std::mem::take(&mut round.pages));
        let first = round.kind == RoundKind::Bulk;
        let least = if first { 1 } else { terms.params.hint_pages };
        if about < least || !self.vm.ask_for_free_pages()? {
            return Ok(());
        }
        // A time that does not fit has no end.
        let until = Instant::now().checked_add(terms.params.hint_wait);
        while first && self.vm.wait_for_free_pages(until, HINT_TICK) && rounds.course.breaks_off().is_none() {
            link.check()?;
        }
        if first { link.find_holes(round) } else { Ok(()) }
    }
}

/// Returns the memory that postcopy has to send after these rounds.
fn left_to_postcopy<'e, 'v>(dirty: Vec<PageBitmap>, rounds: Rounds<'e, 'v>) -> Result<Left<'e, 'v>, MigrateError> {
    let unannounced = || MigrateError::Protocol("postcopy was not announced to the destination".into());
    let sent = rounds.course.sent.ok_or_else(unannounced)?;
    Ok(Left::Postcopy(Unmoved { dirty, sent }))
}
