//! The phases before the device sections: the layout, and the pages on all channels.

use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use limosa_page::{PAGE_LEN, PAGE_SIZE, PageNumber, broken_invariant};
use limosa_stream::{Command, ErrorKind, Event, RamBlock, Step};
use rustix::event::{EventfdFlags, eventfd};

use super::buffer::BUFFER_LEN;
use super::multifd::{self, PageChannel, ReaderContext};
use super::page_writer::{PageCounts, PageWriter, Target, WriterHandle};
use super::phase::{Package, Phase};
use super::receiver::Receiver;
use super::sync::MultifdSync;
use crate::control::{self, MovedPages};
use crate::error::MigrateError;
use crate::pages::{PageSink, StreamSetup};

/// How long a thread may take to see that no more is expected of its channel.
const ENDED_WITHIN: Duration = Duration::from_millis(500);
/// How often that is looked at: the source's VM is stopped meanwhile.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// The moments at which the main channel waits for the multifd channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Joins {
    /// There are no such channels.
    Never,
    /// The first section has not ended. A source that joins once a round has said so by then.
    Unknown,
    /// Where the source says so, once a round.
    ByRound,
    /// At the end of every section (QEMU's machine types up to 8.0).
    BySection,
}

/// The part of a stream that pages belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// The stream up to its device sections.
    Stream,
    /// A checkpoint behind it.
    Checkpoint,
}

/// The place where pages end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PagesEnd {
    /// At the first device section.
    Devices,
    /// At a package of this number of bytes.
    Package(u32),
    /// At the byte that ends the sections of a checkpoint.
    EndOfSections,
}

impl Receiver<'_> {
    /// Reads the layout, and has the VM and the sink accept it.
    pub(super) fn layout<S: PageSink + Send + ?Sized>(&mut self, sink: &mut S) -> Result<Phase, MigrateError> {
        let start = self.read_layout()?;
        if let Some(hooks) = self.hooks {
            hooks.begin(&start, self.advised)?;
        }
        sink.begin(&start).map_err(MigrateError::Sink)?;
        self.role.progress.expect_pages(start.blocks.iter().map(RamBlock::pages).sum());
        self.role.progress.set_phase(control::Phase::Active);
        Ok(Phase::Memory(start))
    }

    /// Reads everything up to the end of the RAM layout.
    fn read_layout(&mut self) -> Result<StreamSetup, MigrateError> {
        let (mut configuration, mut ram_section) = (None, None);
        loop {
            let (consumed, event) = match self.decoder.step(self.buffer.arrived()?)? {
                Step::Need(total) => {
                    self.fill(total)?;
                    continue;
                }
                Step::Event { consumed, event } => (consumed, event),
            };
            self.buffer.consume(consumed);
            match event {
                Event::Configuration(found) => configuration = Some(found),
                Event::SectionStart(header) => ram_section = Some(header.id),
                Event::RamBlock { .. } => {}
                Event::RamStart(blocks) => {
                    let (Some(configuration), Some(section_id)) = (configuration, ram_section) else {
                        return Err(MigrateError::Protocol("the RAM layout came before its section began".into()));
                    };
                    return Ok(StreamSetup { configuration, section_id, blocks });
                }
                Event::Command(command) => self.obey(&command, self.decoder.offset())?,
                other => return Err(self.unsupported(&other)),
            }
        }
    }

    /// Reads everything behind the layout and before the device sections, on all channels.
    pub(super) fn memory<S: PageSink + Send + ?Sized>(
        &mut self,
        start: StreamSetup,
        sink: &mut S,
    ) -> Result<Phase, MigrateError> {
        let (end, moved) = self.pages(&start, Target::Sink(sink), Part::Stream)?;
        self.stats.normal_pages = moved.normal;
        self.stats.zero_pages = moved.zero;
        self.stats.resent_pages = moved.resent;
        self.role.progress.set_phase(control::Phase::Device);
        match end {
            PagesEnd::Devices => Ok(Phase::DeviceState(start)),
            PagesEnd::Package(length) => Ok(Phase::Package(Package { start, length })),
            PagesEnd::EndOfSections => Err(broken_invariant("only a checkpoint's pages end without devices").into()),
        }
    }

    /// Reads the pages of a stream or of a checkpoint, on all channels.
    pub(super) fn pages<S: PageSink + Send + ?Sized>(
        &mut self,
        start: &StreamSetup,
        mut target: Target<'_, S>,
        part: Part,
    ) -> Result<(PagesEnd, MovedPages), MigrateError> {
        let role = Arc::clone(&self.role);
        let counts = PageCounts::new(&role.progress);
        let context = ReaderContext {
            blocks: multifd::by_name(&start.blocks),
            join: MultifdSync::new(role.pages.len()),
            over: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
                MigrateError::Protocol(format!("cannot make a descriptor that wakes threads: {errno}"))
            })?,
            options: role.multifd,
            answer_timeout: role.options.answer_timeout,
            main: &role.channel,
            channels: &role.pages,
            control: &role.control,
        };
        let end = thread::scope(|scope| {
            let writer = PageWriter::start(scope, &mut target, start, &counts)?;
            let threads = (0..).zip(&role.pages).map(|(id, channel)| {
                let reader = PageChannel::new(&context, id, channel, writer.handle(multifd::BUFFER_LEN))?;
                let thread = thread::Builder::new().name(format!("multifd {id}"));
                let thread = thread.spawn_scoped(scope, move || reader.run());
                thread.map_err(|error| MigrateError::Protocol(format!("cannot start a thread: {error}")))
            });
            let (threads, begun) = gathered(threads);
            let taken = begun.and_then(|()| self.take_pages(&mut writer.handle(BUFFER_LEN), &context.join, part));
            if taken.is_err() {
                context.give_up();
            }
            context.end();
            // A source that is amid pages behind its last SYNC packet has broken the order: they are not waited for.
            let begun = Instant::now();
            while begun.elapsed() < ENDED_WITHIN && !threads.iter().all(ScopedJoinHandle::is_finished) {
                thread::sleep(LOOK_EVERY);
            }
            if !threads.iter().all(ScopedJoinHandle::is_finished) {
                context.stop_reading();
            }
            let mut loose = None;
            for (id, thread) in (0..).zip(threads) {
                match thread.join() {
                    Ok(true) => loose = loose.or(Some(id)),
                    Ok(false) => {}
                    Err(_) => {
                        return Err(MigrateError::Protocol(format!("the reader of multifd channel {id} panicked")));
                    }
                }
            }
            // A sink that failed is the cause; that no buffer came back is what it led to. So is a channel that failed,
            // and that the main one was shut down.
            writer.finish()?;
            if let Some(failure) = context.join.failure() {
                return Err(failure);
            }
            let end = taken.map_err(|error| match error {
                // A source with more channels than these finds the others closed, and gives up.
                MigrateError::Stream(error)
                    if !role.pages.is_empty() && matches!(error.kind(), ErrorKind::Truncated { .. }) =>
                {
                    MigrateError::MainEnded { channels: role.pages.len(), source: error }
                }
                error => error,
            })?;
            match loose {
                None => Ok(end),
                Some(id) => {
                    let what = "it carries pages after the last synchronization point, so it may be incomplete";
                    Err(MigrateError::Multifd { id, source: Box::new(MigrateError::Protocol(what.into())) })
                }
            }
        })?;
        Ok((end, counts.total()))
    }

    /// Reads the main channel up to the first device section, which is left in the buffer; or up to a package; or up to
    /// the end of a checkpoint's pages.
    fn take_pages(
        &mut self,
        handle: &mut WriterHandle<'_>,
        join: &MultifdSync,
        part: Part,
    ) -> Result<PagesEnd, MigrateError> {
        let mut joins = if self.role.pages.is_empty() { Joins::Never } else { Joins::Unknown };
        loop {
            let (consumed, event) = match self.decoder.step(self.buffer.arrived()?)? {
                Step::Need(total) => {
                    self.refill(total, handle)?;
                    continue;
                }
                Step::Event { consumed, event } => (consumed, event),
            };
            self.buffer.consume(consumed);
            match (joins, event) {
                (_, Event::Page { block, offset }) => {
                    self.refill(PAGE_LEN, handle)?;
                    self.orders.page(block, PageNumber(offset / PAGE_SIZE), self.buffer.start);
                    self.buffer.consume(PAGE_LEN);
                }
                (_, Event::Zero { block, offset }) => self.orders.zero(block, PageNumber(offset / PAGE_SIZE)),
                (_, Event::Xbzrle { block, offset, length }) => {
                    let length = usize::from(length);
                    self.refill(length, handle)?;
                    let (begin, stream) = (self.buffer.start, self.decoder.offset().saturating_sub(length as u64));
                    self.orders.delta(block, PageNumber(offset / PAGE_SIZE), begin..begin + length, stream);
                    self.buffer.consume(length);
                }
                (Joins::Unknown | Joins::ByRound, Event::MultifdFlush) => {
                    joins = Joins::ByRound;
                    self.join(handle, join)?;
                }
                (Joins::Unknown | Joins::BySection, Event::RamEos) => {
                    joins = Joins::BySection;
                    self.join(handle, join)?;
                }
                (Joins::Never | Joins::ByRound, Event::RamEos) => {}
                (_, Event::EarlyDevice(section)) => self.orders.early_section(section),
                (_, Event::Command(Command::RamDiscard { block, ranges })) if part == Part::Stream => {
                    let Some(hooks) = self.postcopy_hooks() else {
                        return Err(MigrateError::SwitchedToPostcopy { offset: self.decoder.offset() });
                    };
                    // What came before it is discarded with the rest.
                    self.exchange(handle)?;
                    let index = self.decoder.blocks().iter().position(|known| known.name == block);
                    let index = index
                        .ok_or_else(|| broken_invariant("the decoder lets only discards of known blocks through"))?;
                    hooks.discard(index, &ranges)?;
                }
                // Between checkpoints the primary reads nothing but their messages: no other command can be answered.
                (_, Event::Command(Command::SwitchoverStart)) if part == Part::Checkpoint => {}
                (_, other @ Event::Command(_)) if part == Part::Checkpoint => return Err(self.unsupported(&other)),
                (_, Event::Command(command)) => self.obey(&command, self.decoder.offset())?,
                (_, Event::DeviceTail) => {
                    self.exchange(handle)?;
                    return Ok(PagesEnd::Devices);
                }
                (_, Event::EndOfStream) if part == Part::Checkpoint => {
                    if !self.orders.is_empty() {
                        self.exchange(handle)?;
                    }
                    return Ok(PagesEnd::EndOfSections);
                }
                (_, Event::Package { length }) if self.postcopy_hooks().is_some() => {
                    self.exchange(handle)?;
                    return Ok(PagesEnd::Package(length));
                }
                (_, Event::SectionPart { .. } | Event::SectionEnd { .. } | Event::SectionFooter { .. }) => {}
                (_, Event::Package { .. }) => {
                    return Err(MigrateError::SwitchedToPostcopy { offset: self.decoder.offset() });
                }
                (_, other) => return Err(self.unsupported(&other)),
            }
        }
    }

    /// Waits until every channel has come to the synchronization point, with everything handed over that was read
    /// before.
    fn join(&mut self, handle: &mut WriterHandle<'_>, join: &MultifdSync) -> Result<(), MigrateError> {
        if !self.orders.is_empty() {
            self.exchange(handle)?;
        }
        join.pass()
    }
}

/// The items made before the first failure, and that failure.
fn gathered<T>(items: impl Iterator<Item = Result<T, MigrateError>>) -> (Vec<T>, Result<(), MigrateError>) {
    let mut begun = Vec::new();
    for item in items {
        match item {
            Ok(item) => begun.push(item),
            Err(error) => return (begun, Err(error)),
        }
    }
    (begun, Ok(()))
}
