//! The phases in which the VM stands still: the pause, the last round, the state of the devices, the commit.

use std::time::Duration;

use limosa_memory::dirty::DirtyPages;
use limosa_page::{BrokenInvariant, PageBitmap, invariant, to_u64};
use limosa_stream::{Command, postcopy, section};

use super::attempt::Attempt;
use super::link::{Link, Terms};
use super::outcome::Ended;
use super::owned::{Deciding, Owned, Settled};
use super::phase::{Commit, LastRound, Left, Phase, Unmoved};
use super::round::{Round, RoundResult};
use super::sent_bitmap::SentBitmap;
use super::stats::{RoundKind, RoundReport};
use crate::control;
use crate::error::MigrateError;
use crate::live::LiveVm;
use crate::source::multifd::Multifd;

impl<'e, 'v, V: LiveVm + ?Sized> Attempt<'_, 'e, 'v, V> {
    /// Stops the VM.
    pub(super) fn pause(&mut self, left: Left<'e, 'v>) -> Result<Phase<'e, 'v>, MigrateError> {
        match left {
            Left::All => {
                self.vm.pause()?;
                self.link.progress.set_phase(control::Phase::Device);
                let round = self.link.bulk(false)?;
                let mut sent = SentBitmap::new(self.link.source);
                sent.zero = round.holes;
                self.switch(Unmoved { dirty: round.pages, sent })
            }
            Left::Postcopy(mut unmoved) => {
                self.link.check()?;
                self.stop(&mut unmoved.dirty)?;
                self.switch(unmoved)
            }
            Left::LastRound(mut last) => {
                self.link.check()?;
                let expected = last.pages.iter().map(PageBitmap::count).sum();
                self.reports.expect_downtime(last.rounds.course.convergence.expected_downtime(expected));
                last.dirty = self.stop(&mut last.pages)?;
                // What was written is no hole any more.
                last.holes.iter_mut().zip(&last.pages).for_each(|(holes, pages)| holes.subtract(pages));
                Ok(Phase::LastRound(last))
            }
        }
    }

    /// Stops the VM, and adds what it has written last.
    fn stop(&mut self, rest: &mut [PageBitmap]) -> Result<u64, MigrateError> {
        self.vm.pause()?;
        self.link.progress.set_phase(control::Phase::Device);
        let mut last = DirtyPages::new(self.link.memory);
        self.vm.fetch(&mut last)?;
        if !self.terms.goes_on_here {
            // It has seen the last write. Another attempt starts it again.
            self.vm.stop_logs();
        }
        // Before the devices tell their state: the balloon's says that the guest has its pages back.
        self.vm.give_pages_back();
        rest.iter_mut().zip(last.blocks()).for_each(|(rest, last)| rest.union_with(last));
        Ok(last.count())
    }

    /// Sends the rest of the memory.
    pub(super) fn last_round(&mut self, last: LastRound<'e, 'v>) -> Result<Phase<'e, 'v>, MigrateError> {
        let LastRound { mut rounds, pages, holes, dirty } = last;
        let (link, terms) = (self.link, self.terms);
        let (begun, bytes) = (terms.begun.elapsed(), link.bytes_out());
        let mut round = Round { kind: RoundKind::Last, pages, holes };
        let about = round.count();
        link.queue.start(std::mem::take(&mut round.pages));
        let result = rounds.send(&round)?;
        check_nothing_left(&result, about)?;
        self.reports.add(
            &result,
            RoundReport {
                kind: RoundKind::Last,
                start_time: begun,
                duration: terms.begun.elapsed().saturating_sub(begun),
                pages: about,
                bytes: link.bytes_out() - bytes,
                dirty,
                bandwidth: rounds.course.convergence.bandwidth(),
                expected_downtime: Some(Duration::ZERO),
                ..RoundReport::empty()
            },
        );
        Ok(Phase::DeviceState)
    }

    /// Sends the state of the devices, and waits until the destination has everything in its place.
    pub(super) fn device_state(&mut self) -> Result<Phase<'e, 'v>, MigrateError> {
        let link = self.link;
        let sections = self.vm.device_sections()?;
        let mut bytes = sections.bytes().to_vec();
        Command::Ping(postcopy::PING_READY).encode(&mut bytes)?;
        link.channel.write_all(&bytes)?;
        let description = sections.description();
        link.return_path.wait_pong(postcopy::PING_READY, self.terms.params.answer_timeout)?;
        link.multifd.map_or(Ok(()), Multifd::check_taken)?;
        Ok(Phase::Commit(Commit { description }))
    }
}

/// Makes sure that the last round has left no page behind: what the VM had written when it stopped is at the
/// destination.
fn check_nothing_left(result: &RoundResult, about: u64) -> Result<(), BrokenInvariant> {
    let none = |bitmaps: &[PageBitmap]| bitmaps.iter().all(|bitmap| bitmap.count() == 0);
    invariant(result.broken_off.is_none(), "the last round is not broken off")?;
    invariant(none(&result.rest) && none(&result.unsent_holes), "nothing is left unsent by the last round")?;
    invariant(result.sent.total() == about, "every page that was dirty when the VM stopped is sent in the last round")
}

impl Commit {
    /// Gives the VM away, and waits for the destination's acknowledgement.
    pub(super) fn hand_over<'v, V: LiveVm + ?Sized>(
        self,
        link: &Link<'_, 'v>,
        terms: &Terms<'_>,
        vm: Owned<'v, V>,
    ) -> Ended<'v, V> {
        let (bytes, decisive) = match self.prepare(link, &vm) {
            Ok(ready) => ready,
            Err(error) => return Ended::Kept { vm, error },
        };
        link.progress.set_phase(control::Phase::Completing);
        // Once the kernel has taken the end of the stream, the destination may run the VM.
        let deciding = Deciding::new(vm, link.channel, decisive);
        let written = link.channel.write_all(&bytes);
        match deciding.settle(written) {
            Settled::Kept(vm, error) => Ended::Kept { vm, error: error.into() },
            Settled::HandedOver(vm, written) => {
                let acknowledged = || link.return_path.wait_shut(terms.params.answer_timeout);
                let result = written.map_err(MigrateError::from).and_then(|()| acknowledged());
                Ended::HandedOver { vm, guest: None, result: result.map(|()| None) }
            }
        }
    }

    /// Returns the bytes of the last write, and how many of them let the VM run. From here on a stop waits for the
    /// destination's answer: half a hand-over is worse than none.
    fn prepare<V: LiveVm + ?Sized>(
        self,
        link: &Link<'_, '_>,
        vm: &Owned<'_, V>,
    ) -> Result<(Vec<u8>, u64), MigrateError> {
        let mut bytes = Vec::new();
        Command::Ping(postcopy::PING_COMMIT).encode(&mut bytes)?;
        section::encode_eof(&mut bytes);
        let decisive = to_u64(bytes.len());
        section::encode_description(&self.description, &mut bytes)?;
        vm.check_ready()?;
        // An acknowledgement before the commit says nothing about the VM.
        link.return_path.still_open()?;
        link.control.hold();
        match link.control.stop_requested() {
            Some(stop) => Err(stop.into()),
            None => Ok((bytes, decisive)),
        }
    }
}

#[cfg(test)]
mod tests {
    use limosa_page::PageNumber;

    use super::*;
    use crate::error::is_noticed;
    use crate::live::source::convergence::Reason;
    use crate::live::source::round::BrokenOff;
    use crate::source::records::Sent;

    #[test]
    fn a_dirty_page_that_is_left_behind_is_noticed_before_the_vm_is_handed_over() {
        let sent = Sent { normal: 3, zero: 2, left_out: 1 };
        let whole = || RoundResult { sent, ..RoundResult::default() };
        check_nothing_left(&whole(), 6).unwrap();
        assert!(is_noticed(|| check_nothing_left(&whole(), 7)), "one was not sent");
        assert!(is_noticed(|| check_nothing_left(&whole(), 5)), "one was sent twice");
        let mut rest = PageBitmap::new(8);
        rest.set(PageNumber(3));
        assert!(is_noticed(|| check_nothing_left(&RoundResult { rest: vec![rest.clone()], ..whole() }, 6)));
        assert!(is_noticed(|| check_nothing_left(&RoundResult { unsent_holes: vec![rest], ..whole() }, 6)));
        let broken_off = Some(BrokenOff::Time(Reason::Stalled(1)));
        assert!(is_noticed(|| check_nothing_left(&RoundResult { broken_off, ..whole() }, 6)));
    }
}
