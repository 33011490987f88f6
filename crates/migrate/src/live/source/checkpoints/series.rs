//! The series: the base, and then the turns of each checkpoint.

use std::time::{Duration, Instant};

use limosa_memory::dirty::DirtyPages;
use limosa_page::{PAGE_SIZE, PageBitmap, to_u64};
use limosa_stream::colo::ColoMessage;
use limosa_stream::section;

use super::dialogue::Dialogue;
use super::gates::Gates;
use super::options::{CheckpointReport, CheckpointSourceOptions};
use super::staged;
use crate::control;
use crate::error::MigrateError;
use crate::live::LiveVm;
use crate::live::source::attempt::Attempt;
use crate::live::source::link::{Link, Terms};
use crate::live::source::owned::Owned;
use crate::live::source::phase::{Phase, Step};
use crate::live::source::reports::Reports;
use crate::live::source::round::{Round, Rounds};
use crate::live::source::stats::RoundKind;
use crate::output::{CheckpointCause, OutputGates};
use crate::pages::PageSource as _;
use crate::source::return_path::ReturnPath;

/// How long output is waited for before it is looked at what else ends the series.
const TICK: Duration = Duration::from_millis(50);

/// How far a series has come.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counters {
    /// The newest checkpoint that counts.
    pub(super) acknowledged: Option<u64>,
    /// Checkpoints that were received, without the base.
    pub(super) made: u64,
}

/// A series under way.
pub(super) struct Series<'e, 'v, 'o> {
    link: &'e Link<'e, 'v>,
    terms: &'e Terms<'e>,
    options: &'o CheckpointSourceOptions<'o>,
    counters: Counters,
    /// Bytes that were copied aside: the memory of one checkpoint serves the next.
    aside: Vec<u8>,
}

/// A checkpoint that was received, and does not count yet.
struct Received {
    report: CheckpointReport,
    /// When the VM stopped for it, and when it continued.
    stopped: Instant,
    continued: Instant,
}

impl<'e, 'v, 'o> Series<'e, 'v, 'o> {
    pub(super) fn new(link: &'e Link<'e, 'v>, terms: &'e Terms<'e>, options: &'o CheckpointSourceOptions<'o>) -> Self {
        Self { link, terms, options, counters: Counters::default(), aside: Vec::new() }
    }

    pub(super) fn counters(&self) -> Counters {
        self.counters
    }

    /// Makes checkpoints over a stream that is open.
    pub(super) fn run<V: LiveVm + ?Sized>(
        &mut self,
        vm: &mut Owned<'v, V>,
        reports: &mut Reports<'e>,
    ) -> Result<(), MigrateError> {
        let (link, terms, options) = (self.link, self.terms, self.options);
        let mut gates = Gates::watch(OutputGates::new(options.gates, &options.signal))?;
        let begun = Instant::now();
        let bytes = link.bytes_out();
        (Attempt { link, terms, vm, reports }).send_base()?;
        let stopped = vm.paused_since().unwrap_or(begun);
        gates.seal()?;
        let timeout = terms.params.answer_timeout;
        let arrived = link.return_path.wait_end(timeout)?;
        let mut keeper = Dialogue::new(link.channel, link.control, arrived, timeout)?;
        keeper.expect(ColoMessage::CheckpointReady, "it has the base", timeout)?;
        vm.continue_here()?;
        let continued = Instant::now();
        let report = CheckpointReport {
            pause: continued - stopped,
            bytes: link.bytes_out() - bytes,
            pages: link.source.setup().blocks.iter().map(limosa_stream::RamBlock::pages).sum(),
            ..CheckpointReport::default()
        };
        link.progress.set_phase(control::Phase::Active);
        let mut last = Received { report, stopped, continued };
        // Of the return path that has ended nothing more is expected.
        let return_path = ReturnPath::default();
        let link = Link { return_path: &return_path, ..*link };
        loop {
            keeper.say(ColoMessage::CheckpointRequest)?;
            keeper.expect(ColoMessage::CheckpointReply, "it has stored the checkpoint", timeout)?;
            self.count(&mut gates, &last)?;
            // A time that does not fit has no end.
            if !self.wait(last.stopped.checked_add(options.every))? {
                return Ok(());
            }
            let number = last.report.number.saturating_add(1);
            last = self.checkpoint(&link, vm, (&mut gates, &mut keeper), number)?;
            self.counters.made = number;
        }
    }

    /// Lets the output of a checkpoint out, and reports it: it counts.
    fn count(&mut self, gates: &mut Gates<'_>, last: &Received) -> Result<(), MigrateError> {
        let report = CheckpointReport { until_it_counts: last.continued.elapsed(), ..last.report };
        gates.commit(report.number)?;
        self.counters.acknowledged = Some(report.number);
        (self.options.counts)(&report);
        Ok(())
    }

    /// Waits until the next checkpoint is due; false if the series is over.
    fn wait(&self, due: Option<Instant>) -> Result<bool, MigrateError> {
        loop {
            self.link.control.check()?;
            let tick = Instant::now() + TICK;
            match self.options.signal.wait(Some(due.map_or(tick, |due| due.min(tick))), self.options.by_output) {
                CheckpointCause::Closed => return Ok(false),
                CheckpointCause::Time if due.is_none_or(|due| Instant::now() < due) => {}
                CheckpointCause::Time | CheckpointCause::Output | CheckpointCause::Full => return Ok(true),
            }
        }
    }

    /// Makes one checkpoint, whose reply has come.
    fn checkpoint<V: LiveVm + ?Sized>(
        &mut self,
        link: &Link<'_, 'v>,
        vm: &mut Owned<'v, V>,
        (gates, keeper): (&mut Gates<'_>, &mut Dialogue<'_>),
        number: u64,
    ) -> Result<Received, MigrateError> {
        let before = link.bytes_out();
        let mut dirty = DirtyPages::new(link.memory);
        let stopped = Instant::now();
        vm.pause()?;
        vm.fetch(&mut dirty)?;
        gates.seal()?;
        let pages = dirty.count();
        let devices = vm.device_sections()?;
        let mut tail = Vec::new();
        ColoMessage::VmstateSize(to_u64(devices.bytes().len() + 1)).encode(&mut tail);
        tail.extend_from_slice(devices.bytes());
        section::encode_eof(&mut tail);
        let copied_aside = pages.saturating_mul(PAGE_SIZE) <= self.options.copy_aside;
        let continued = if copied_aside {
            self.copy_aside(link, dirty.blocks())?;
            vm.continue_here()?;
            let continued = Instant::now();
            self.aside.extend_from_slice(&tail);
            link.channel.write_all(&self.aside)?;
            self.wait_loaded(keeper)?;
            continued
        } else {
            self.send(link, dirty.blocks().to_vec())?;
            link.channel.write_all(&tail)?;
            self.wait_loaded(keeper)?;
            vm.continue_here()?;
            Instant::now()
        };
        let bytes = link.bytes_out() - before;
        let pause = continued - stopped;
        let report = CheckpointReport { number, pause, pages, copied_aside, bytes, ..CheckpointReport::default() };
        Ok(Received { report, stopped, continued })
    }

    /// Copies all that comes before the devices.
    fn copy_aside(&mut self, link: &Link<'_, '_>, pages: &[PageBitmap]) -> Result<(), MigrateError> {
        let (setup, bytes) = (link.source.setup(), &mut self.aside);
        bytes.clear();
        ColoMessage::VmstateSend.encode(bytes);
        section::encode_end(setup.section_id, bytes);
        staged::copy(link.memory, &setup.blocks, pages, bytes)?;
        link.end_section(bytes);
        section::encode_eof(bytes);
        Ok(())
    }

    /// Sends all that comes before the devices, pages from where they are.
    fn send(&self, link: &Link<'_, '_>, pages: Vec<PageBitmap>) -> Result<(), MigrateError> {
        let mut bytes = Vec::new();
        ColoMessage::VmstateSend.encode(&mut bytes);
        link.channel.write_all(&bytes)?;
        let mut rounds = Rounds::new(link, self.terms, None)?;
        let round = Round { kind: RoundKind::Last, pages: Vec::new(), holes: Vec::new() };
        link.queue.start(pages);
        rounds.send(&round)?;
        bytes.clear();
        section::encode_eof(&mut bytes);
        Ok(link.channel.write_all(&bytes)?)
    }

    fn wait_loaded(&self, keeper: &mut Dialogue<'_>) -> Result<(), MigrateError> {
        let timeout = self.terms.params.answer_timeout;
        keeper.expect(ColoMessage::VmstateReceived, "it has received the checkpoint", timeout)?;
        keeper.expect(ColoMessage::VmstateLoaded, "it has received the checkpoint", timeout)
    }
}

impl<'e, 'v, V: LiveVm + ?Sized> Attempt<'_, 'e, 'v, V> {
    /// Sends all of the VM, which stands still at the end.
    fn send_base(&mut self) -> Result<(), MigrateError> {
        let mut phase = Phase::Setup;
        while phase.step() != Step::DeviceState {
            phase = self.next(phase)?;
        }
        let devices = self.vm.device_sections()?;
        let mut bytes = devices.bytes().to_vec();
        section::encode_eof(&mut bytes);
        section::encode_description(&devices.description(), &mut bytes)?;
        Ok(self.link.channel.write_all(&bytes)?)
    }
}
