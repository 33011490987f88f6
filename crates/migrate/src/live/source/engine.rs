//! The rounds, the switchover and the hand-over.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::Channel;
use limosa_memory::dirty::DirtyPages;
use limosa_memory::{BlockRole, MemoryBlock};
use limosa_page::{PAGE_SIZE, PageBitmap};
use limosa_stream::{Command, DeviceSections, PageSizes, postcopy, ram, section};

use super::Observer;
use super::convergence::{Convergence, Reason, RoundFigures, Verdict};
use super::guard::VmGuard;
use super::guest::GuestSource;
use super::postcopy::{Postcopy, SwitchTo, Track, listed};
use super::stats::{LiveStats, RoundKind, RoundReport};
use crate::control::Control;
use crate::error::MigrateError;
use crate::live::{GiveUp, LiveVm, MigrationParams, ZeroCheck};
use crate::pages::PageSource;
use crate::progress::{Moved, Phase, Progress};
use crate::source::inbox::Inbox;
use crate::source::multifd::{Multifd, RoundPlan, RoundSent};
use crate::source::records::{GuestPages, RecordWriter, Sent, ZERO_RECORD, Zeros};
use crate::source::windows::Windows;

/// How long the list of free pages is waited for before it is looked at what else ends that.
const HINT_TICK: Duration = Duration::from_millis(10);

/// The longest sleep for a limited rate: what else ends a round is looked at in between.
pub(super) const RATE_TICK: Duration = Duration::from_millis(20);

/// One attempt to move a VM.
pub(super) struct Engine<'e, 'v, V: LiveVm + ?Sized> {
    pub(super) vm: &'v V,
    pub(super) source: &'e GuestSource<'v>,
    pub(super) channel: &'e Arc<Channel>,
    pub(super) control: &'e Control,
    pub(super) progress: &'e Progress,
    pub(super) params: MigrationParams,
    pub(super) inbox: &'e Inbox,
    /// The multifd channels.
    pub(super) multifd: Option<&'e Multifd<'e, GuestSource<'v>>>,
    /// What hands the pages of a round out, to whichever thread sends them.
    pub(super) windows: &'e Windows,
    pub(super) fresh: bool,
    pub(super) observer: &'e Observer<'e>,
    pub(super) begun: Instant,
    pub(super) guard: &'e mut VmGuard<'v, V>,
    pub(super) stats: &'e mut LiveStats,
    pub(super) postcopy: Postcopy,
    pub(super) switch: SwitchTo<'e>,
    /// What was sent, if postcopy may follow.
    pub(super) track: Option<Track>,
    /// The memory that postcopy sends.
    pub(super) guest: &'e mut Option<GuestSource<'v>>,
    /// Of the device sections, once they are known.
    pub(super) description: Vec<u8>,
    /// Rounds that were reported.
    pub(super) reported: u32,
}

/// How the rounds end, and what is left to be sent.
enum End {
    /// The VM is stopped for it, and for what is left to be sent of holes.
    Stop { rest: Vec<PageBitmap>, untold: Vec<PageBitmap> },
    /// The VM runs at the destination first.
    Postcopy(Vec<PageBitmap>),
}

/// Why a round was broken off.
pub(super) enum BrokenOff {
    Time(Reason),
    Postcopy,
}

/// A round to be sent.
pub(super) struct Round {
    pub(super) kind: RoundKind,
    /// Pages that are looked at, by block: until the windows hand them out.
    pub(super) pages: Vec<PageBitmap>,
    /// Pages that are zero without being looked at, by block: in the first round, and in the last if that was broken off.
    pub(super) holes: Vec<PageBitmap>,
}

/// What came of it.
#[derive(Default)]
pub(super) struct RoundResult {
    pub(super) sent: Sent,
    pub(super) holes: u64,
    /// What it did not get to, if it was broken off: pages,
    rest: Vec<PageBitmap>,
    /// and holes that are to be sent.
    pub(super) untold: Vec<PageBitmap>,
    pub(super) broken_off: Option<BrokenOff>,
    pub(super) busy: Duration,
}

impl<V: LiveVm + ?Sized> Engine<'_, '_, V> {
    /// Everything before the first page.
    pub(super) fn open(&self) -> Result<(), MigrateError> {
        let start = self.source.start();
        let total = start.blocks.iter().map(ram::RamBlock::pages).sum();
        self.progress.expect_pages(total);
        let mut bytes = Vec::new();
        start.configuration.clone().without_mapped_ram().encode(&mut bytes)?;
        Command::OpenReturnPath.encode(&mut bytes)?;
        Command::Ping(postcopy::PING_OPENED).encode(&mut bytes)?;
        let mut blocks = start.blocks.clone();
        if self.postcopy != Postcopy::Off {
            blocks = listed(&blocks, self.switch.page_sizes)?;
            let summary = blocks.iter().fold(0, |summary, block| summary | block.page_size.unwrap_or(PAGE_SIZE));
            Command::PostcopyAdvise(Some(PageSizes { summary, target: PAGE_SIZE })).encode(&mut bytes)?;
        }
        ram::encode_ram_layout(start.section_id, &blocks, &mut bytes)?;
        self.end_section(&mut bytes);
        let passed = self.source.to_pass()?;
        if passed.is_empty() {
            return Ok(self.channel.put(&bytes)?);
        }
        let passed: Vec<_> = passed.iter().map(AsFd::as_fd).collect();
        Ok(self.channel.put_with(&bytes, &passed)?)
    }

    /// From the first page to the destination's confirmation. The destination has answered before a page is looked at: it is
    /// there, and it can answer.
    pub(super) fn run(&mut self) -> Result<(), MigrateError> {
        self.inbox.wait_pong(postcopy::PING_OPENED, self.params.patience)?;
        if self.postcopy != Postcopy::Off {
            let track = self.track.insert(Track::new(self.source));
            if self.guard.has_hints() {
                self.windows.remember_free(track.sent.clone());
            }
        }
        if self.postcopy == Postcopy::AtOnce {
            return self.switch_at_once();
        }
        self.guard.start_logs()?;
        self.progress.enter(Phase::Active);
        let mut convergence = Convergence::new(self.params);
        let records = RecordWriter::new(self.channel, &self.source.start().blocks)?;
        let mut records = records.looking_by(self.params.zero_method).with_put(self.params.put);
        match self.rounds(&mut convergence, &mut records)? {
            End::Stop { rest, untold } => {
                self.switch_over(rest, untold, &mut convergence, &mut records)?;
                self.hand_over()
            }
            End::Postcopy(mut rest) => {
                self.check()?;
                self.stop(&mut rest)?;
                self.switch_to_postcopy(&rest)
            }
        }
    }

    /// The VM stops, and nothing was sent before. A guest that can be asked runs until it has told its free pages, or has not in
    /// time.
    fn switch_at_once(&mut self) -> Result<(), MigrateError> {
        if self.guard.has_hints() {
            return self.switch_when_told();
        }
        self.guard.pause()?;
        self.progress.enter(Phase::Device);
        let round = self.bulk(false)?;
        if let Some(track) = &mut self.track {
            track.zero = round.holes;
        }
        self.switch_to_postcopy(&round.pages)
    }

    fn switch_when_told(&mut self) -> Result<(), MigrateError> {
        self.guard.start_logs()?;
        self.progress.enter(Phase::Active);
        let mut round = self.bulk(true)?;
        let (begun, about) = (self.begun.elapsed(), round.count());
        self.begin(&mut round, about, &Convergence::new(self.params))?;
        let (mut rest, hinted) = (self.windows.take_rest()?, self.windows.taken());
        if let Some(track) = &mut self.track {
            track.zero = round.holes;
        }
        let left = rest.iter().map(PageBitmap::count).sum();
        let duration = self.begun.elapsed().saturating_sub(begun);
        let kind = RoundKind::Bulk;
        let report = RoundReport { kind, begun, duration, pages: about, hinted, rest: left, ..RoundReport::empty() };
        self.report(&RoundResult::default(), report);
        self.check()?;
        self.stop(&mut rest)?;
        self.switch_to_postcopy(&rest)
    }

    /// Stops the VM, and adds what it has written last.
    fn stop(&mut self, rest: &mut [PageBitmap]) -> Result<u64, MigrateError> {
        self.guard.pause()?;
        self.progress.enter(Phase::Device);
        let mut last = DirtyPages::new(self.vm.memory());
        self.guard.fetch(&mut last)?;
        // It has seen the last write. Another attempt begins it anew.
        self.guard.stop_logs();
        // Before the devices tell their state: the balloon's says that the guest has its pages back.
        self.guard.give_pages_back();
        rest.iter_mut().zip(last.blocks()).for_each(|(rest, last)| rest.union_with(last));
        Ok(last.count())
    }

    /// The state of the devices of the VM, which is stopped.
    pub(super) fn device_sections(&self) -> Result<DeviceSections, MigrateError> {
        self.vm.device_sections().map_err(|source| MigrateError::Vm { what: "tell the state of its devices", source })
    }

    /// Rounds until the VM is to be stopped: what is left to be sent then.
    fn rounds(&mut self, convergence: &mut Convergence, records: &mut RecordWriter<'_>) -> Result<End, MigrateError> {
        let mut round = self.bulk(self.guard.has_hints())?;
        loop {
            let (begun, kind, about) = (self.begun.elapsed(), round.kind, round.count());
            let bytes = self.bytes_out();
            let throttle = convergence.throttle();
            self.begin(&mut round, about, convergence)?;
            let result = self.send(&round, convergence, records)?;
            let mut next = DirtyPages::new(self.vm.memory());
            self.guard.fetch(&mut next)?;
            let (duration, hinted) = (self.begun.elapsed().saturating_sub(begun), self.windows.taken());
            let dirty = next.count();
            let mut rest = next.blocks().to_vec();
            rest.iter_mut().zip(&result.rest).for_each(|(rest, left)| rest.union_with(left));
            let left = rest.iter().map(PageBitmap::count).sum();
            let bytes = self.bytes_out() - bytes;
            let figures = RoundFigures { bytes, busy: result.busy, sent_pages: result.sent.normal, rest_pages: left };
            let verdict = match &result.broken_off {
                Some(BrokenOff::Time(reason)) => Verdict::GiveUp(self.params.give_up, *reason),
                Some(BrokenOff::Postcopy) | None => {
                    convergence.after_round(figures, self.begun.elapsed(), self.downtime_limit())
                }
            };
            self.report(
                &result,
                RoundReport {
                    kind,
                    begun,
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
            if self.switches() {
                return Ok(End::Postcopy(rest));
            }
            match verdict {
                Verdict::SwitchOver | Verdict::GiveUp(GiveUp::Pause, _) => {
                    return Ok(End::Stop { rest, untold: result.untold });
                }
                Verdict::GiveUp(GiveUp::Postcopy, _) => return Ok(End::Postcopy(rest)),
                Verdict::Continue { throttle } => {
                    if let Some(percent) = throttle {
                        self.guard.throttle(percent);
                    }
                }
                Verdict::GiveUp(GiveUp::Cancel, reason) => return Err(MigrateError::NoConvergence(reason.to_string())),
            }
            round = Round { kind: RoundKind::Dirty, pages: rest, holes: Vec::new() };
        }
    }

    /// Stops the VM, sends the rest of its memory and the state of its devices, and waits until the destination has all.
    fn switch_over(
        &mut self,
        mut rest: Vec<PageBitmap>,
        mut untold: Vec<PageBitmap>,
        convergence: &mut Convergence,
        records: &mut RecordWriter<'_>,
    ) -> Result<(), MigrateError> {
        self.control.check()?;
        self.inbox.still_open()?;
        let expected = rest.iter().map(PageBitmap::count).sum();
        self.stats.expected_downtime = convergence.expected_downtime(expected);
        let dirty = self.stop(&mut rest)?;
        let (begun, bytes) = (self.begun.elapsed(), self.bytes_out());
        // What was written is no hole any more.
        untold.iter_mut().zip(&rest).for_each(|(untold, rest)| untold.subtract(rest));
        let mut round = Round { kind: RoundKind::Last, pages: rest, holes: untold };
        let about = round.count();
        self.windows.start(std::mem::take(&mut round.pages));
        let result = self.send(&round, convergence, records)?;
        self.report(
            &result,
            RoundReport {
                kind: RoundKind::Last,
                begun,
                duration: self.begun.elapsed().saturating_sub(begun),
                pages: about,
                bytes: self.bytes_out() - bytes,
                dirty,
                bandwidth: convergence.bandwidth(),
                expected_downtime: Some(Duration::ZERO),
                ..RoundReport::empty()
            },
        );
        let sections = self.device_sections()?;
        let mut bytes = sections.bytes().to_vec();
        Command::Ping(postcopy::PING_READY).encode(&mut bytes)?;
        self.channel.put(&bytes)?;
        self.description = sections.description();
        self.inbox.wait_pong(postcopy::PING_READY, self.params.patience)?;
        self.multifd.map_or(Ok(()), Multifd::check_taken)
    }

    /// Gives the VM away.
    fn hand_over(&mut self) -> Result<(), MigrateError> {
        let mut bytes = Vec::new();
        Command::Ping(postcopy::PING_GO).encode(&mut bytes)?;
        section::encode_eof(&mut bytes);
        let decisive = bytes.len() as u64;
        let length = u32::try_from(self.description.len())
            .map_err(|_| MigrateError::Protocol("the devices' description is longer than 4 GiB".into()))?;
        bytes.push(section::DESCRIPTION);
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(&self.description);
        // A last word before the go is no word about the VM.
        self.inbox.still_open()?;
        // From here on a stop has to wait for what the destination says: half a hand-over is worse than none.
        self.control.hold();
        if let Some(stop) = self.control.stopped() {
            return Err(stop.into());
        }
        let before = self.channel.counters().bytes_out;
        self.progress.enter(Phase::Completing);
        let put = self.channel.put(&bytes);
        if self.channel.counters().bytes_out - before >= decisive {
            self.guard.give_away();
        }
        put?;
        self.inbox.wait_shut(self.params.patience)
    }

    /// Has the windows hand out the pages of a round, and asks the guest which of them are free, if the answer can come before
    /// they are sent. The list of the first round may be waited for.
    fn begin(&mut self, round: &mut Round, about: u64, convergence: &Convergence) -> Result<(), MigrateError> {
        self.windows.start(std::mem::take(&mut round.pages));
        let first = round.kind == RoundKind::Bulk;
        let least = if first { 1 } else { self.params.hint_pages };
        if about < least || !self.guard.ask_for_free_pages() {
            return Ok(());
        }
        // A time that cannot be told is without end.
        let until = Instant::now().checked_add(self.params.hint_wait);
        while first && self.guard.wait_for_free_pages(until, HINT_TICK) && self.breaks_off(convergence).is_none() {
            self.check()?;
        }
        if first { self.find_holes(round) } else { Ok(()) }
    }

    /// Sends the round that the windows hand out, in its own section.
    fn send(
        &mut self,
        round: &Round,
        convergence: &Convergence,
        records: &mut RecordWriter<'_>,
    ) -> Result<RoundResult, MigrateError> {
        let start = self.source.start();
        let last = round.kind == RoundKind::Last;
        let mut bytes = Vec::new();
        match last {
            true => section::encode_end(start.section_id, &mut bytes),
            false => section::encode_part(start.section_id, &mut bytes),
        }
        self.channel.put(&bytes)?;
        records.take_busy();
        let result = match self.multifd {
            Some(multifd) => self.send_packets(multifd, round, convergence, records)?,
            None => self.send_records(round, convergence, records)?,
        };
        bytes.clear();
        self.end_section(&mut bytes);
        self.channel.put(&bytes)?;
        if let Some(multifd) = self.multifd.filter(|_| last) {
            // From here on the destination may close them.
            multifd.is_over();
        }
        Ok(result)
    }

    /// Sends a round as records of the main channel.
    fn send_records(
        &mut self,
        round: &Round,
        convergence: &Convergence,
        records: &mut RecordWriter<'_>,
    ) -> Result<RoundResult, MigrateError> {
        let mut result = RoundResult::default();
        let last = round.kind == RoundKind::Last;
        self.tell_holes(round, convergence, records, &mut result)?;
        if result.broken_off.is_some() {
            result.rest = self.windows.take_rest()?;
            result.busy += records.take_busy();
            return Ok(result);
        }
        let windows = self.windows;
        let mut runs = Vec::new();
        let mut waited = Duration::ZERO;
        // The block of what is placed and not put.
        let mut placed: Option<&MemoryBlock> = None;
        loop {
            self.check()?;
            if !last && let Some(why) = self.breaks_off(convergence) {
                (result.rest, result.broken_off) = (windows.take_rest()?, Some(why));
                break;
            }
            if records.room() == 0
                && let Some(memory) = placed.take()
            {
                records.put_placed(memory)?;
            }
            let pause = if last { Duration::ZERO } else { self.control.rate().delay() };
            if !pause.is_zero() {
                let began = Instant::now();
                thread::sleep(pause.min(RATE_TICK));
                waited += began.elapsed();
                continue;
            }
            let Some(block) = windows.claim_pages(&mut runs, records.room() as u64) else { break };
            let memory = self.vm.memory().block(block).map_err(|error| MigrateError::Source(error.into()))?;
            if let Some(other) = placed.replace(memory).filter(|other| !std::ptr::eq(*other, memory)) {
                records.put_placed(other)?;
            }
            let (zeros, track) = (self.zeros(block, round.kind), &mut self.track);
            if let Some(track) = track {
                track.sent(block, &runs);
            }
            let sent = records.place(GuestPages { block, memory, runs: &runs, zeros }, |run| {
                if let Some(track) = track {
                    track.left_out(block, run);
                }
            })?;
            if !last {
                // What is not sent costs nothing: or zero pages would hold up those with contents that wait for the next call.
                let told = sent.zero.saturating_mul(ZERO_RECORD);
                self.control.rate().spend(sent.normal.saturating_mul(PAGE_SIZE).saturating_add(told));
            }
            self.progress.moved(Moved { normal: sent.normal, zero: sent.zero, resent: 0 });
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
        convergence: &Convergence,
        records: &mut RecordWriter<'_>,
    ) -> Result<RoundResult, MigrateError> {
        let mut result = RoundResult::default();
        let last = round.kind == RoundKind::Last;
        let zeros = (0..self.source.start().blocks.len()).map(|block| self.zeros(block, round.kind)).collect();
        // One for the section that the round is.
        let plan = RoundPlan { zeros, method: self.params.zero_method, syncs: 1, limited: !last };
        let timeout = self.params.timeout.filter(|_| !last);
        let deadline = timeout.and_then(|timeout| self.begun.checked_add(timeout));
        let tell = |records: &mut RecordWriter<'_>| self.tell_holes(round, convergence, records, &mut result);
        let RoundSent { sent, busy, rest } = multifd.send_round(plan, records, tell, deadline)?;
        result.sent.add(sent);
        result.busy = result.busy.max(busy);
        if let (Some(rest), Some(timeout)) = (rest, timeout) {
            (result.rest, result.broken_off) = (rest, Some(BrokenOff::Time(Reason::Time(timeout))));
        }
        Ok(result)
    }

    /// Ends a section; with multifd channels, has the destination wait for them there.
    fn end_section(&self, bytes: &mut Vec<u8>) {
        if self.multifd.is_some_and(Multifd::joins_by_word) {
            ram::encode_multifd_flush(bytes);
        }
        ram::encode_eos(self.source.start().section_id, bytes);
    }

    /// What becomes of zero pages of a block in such a round.
    fn zeros(&self, block: usize, kind: RoundKind) -> Zeros {
        match (self.params.zero_check, kind) {
            (ZeroCheck::Off, _) | (ZeroCheck::Bulk, RoundKind::Dirty | RoundKind::Last) => Zeros::Unknown,
            (_, RoundKind::Bulk) if self.leaves_out(block) => Zeros::LeftOut,
            _ => Zeros::Told,
        }
    }

    /// Whether a page of the block that was never sent is zero at the destination.
    pub(super) fn leaves_out(&self, block: usize) -> bool {
        self.fresh && self.vm.memory().block(block).is_ok_and(|block| block.role() == BlockRole::Ram)
    }

    /// Whether a round is to be broken off now.
    pub(super) fn breaks_off(&self, convergence: &Convergence) -> Option<BrokenOff> {
        if self.switches() {
            return Some(BrokenOff::Postcopy);
        }
        match convergence.overdue(self.begun.elapsed())? {
            Verdict::GiveUp(_, reason) => Some(BrokenOff::Time(reason)),
            Verdict::Continue { .. } | Verdict::SwitchOver => None,
        }
    }

    /// Whether it goes on in postcopy now.
    fn switches(&self) -> bool {
        self.postcopy != Postcopy::Off && self.control.postcopy_wanted()
    }

    fn downtime_limit(&self) -> Duration {
        self.control.downtime_limit().unwrap_or(self.params.downtime_limit)
    }

    /// Fails if the job was stopped, or the destination has gone.
    pub(super) fn check(&self) -> Result<(), MigrateError> {
        self.control.check()?;
        self.inbox.still_open()
    }

    /// Bytes that the kernel has taken on all channels.
    fn bytes_out(&self) -> u64 {
        let multifd = self.multifd.map_or(0, Multifd::bytes_out);
        self.channel.counters().bytes_out.wrapping_add(multifd)
    }

    fn report(&mut self, result: &RoundResult, report: RoundReport) {
        let Sent { normal, zero, left_out } = result.sent;
        let number = self.reported;
        self.reported = number.saturating_add(1);
        let report = RoundReport { number, normal, zero, left_out, holes: result.holes, ..report };
        (self.observer)(&report);
        self.stats.push(report);
    }
}

impl Round {
    fn count(&self) -> u64 {
        self.pages.iter().chain(&self.holes).map(PageBitmap::count).sum()
    }
}
