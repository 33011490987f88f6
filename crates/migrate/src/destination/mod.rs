//! The destination role in precopy: pages from the channel to a [`PageSink`], then the device state.
//!
//! The stream is read in large pieces into receive buffers and decoded in place. A page is not taken out of them: the
//! sink gets slices of a buffer, gathered over as many consecutive pages as have arrived, and hands them to the kernel
//! in one vectored call, while the next buffer fills (`writer`). What user space moves is the tail of a record that the
//! end of a buffer cut in two, at most one page a buffer.
//!
//! The role ends with the VM stopped at the source and the source waiting for the destination's word. That word is
//! given by [`Incoming::acknowledge`], not here: until then the source can resume its VM, and it is the caller who
//! knows whether what was received has to be durable first.
//!
//! A source that says where its device sections end (PING 6) is answered when every page and every section is in its
//! place; its stream is whole when its word that the VM may run (PING 7) has come, and the description behind it.
//!
//! With [multifd channels](Destination::channels) most pages come on these, each read by a thread of its own, and
//! meet at synchronization points. [`MultifdAccept`] finds out which connection is which channel.

mod buffer;
mod hooks;
mod incoming;
mod multifd;
mod multifd_accept;
mod page_writer;
mod scatter;
mod sync;
mod unpack;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Counters, Shutdown};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageNumber, broken, to_u64};
use limosa_stream::devices::{self, TAIL_LIMIT};
use limosa_stream::postcopy::PING_READY;
use limosa_stream::{
    Command, Decoder, DeviceState, DeviceTail, ErrorKind, Event, Feature, FramedSections, PageSizes, RamBlock,
    ReturnMessage, Step, StreamError, TailStep,
};
use rustix::net::sockopt;

use buffer::Buffer;
use multifd::{PageChannel, ReaderContext};
use page_writer::{PageCounts, PageWriter, PageWrites, WriterHandle};
use sync::MultifdSync;

pub(crate) use hooks::Hooks;
pub use incoming::Incoming;
pub(crate) use incoming::{Broken, PostcopySwitchover, Received, SourceNow};
pub use multifd::MultifdOptions;
pub use multifd_accept::{MultifdAccept, MultifdAcceptOptions, MultifdChannels};

use crate::control::{Control, Handle, Phase, Progress};
use crate::error::MigrateError;
use crate::pages::{PageSink, StreamSetup};

/// Size of the receive buffer. It should stay in a core's second-level cache between the read that fills it and the
/// write that empties it.
const BUFFER_LEN: usize = 1 << 20;

/// Longest silence inside the device sections. QEMU writes them from memory, and the VM is stopped meanwhile.
const TAIL_TIMEOUT: Duration = Duration::from_secs(10);

/// How a stream is to be received.
#[derive(Debug, Clone)]
pub struct DestinationOptions {
    /// Most bytes of device state to accept.
    pub max_device_state: u64,
    /// Longest silence of the source, which always has something to say while a migration runs; and how long it may
    /// leave an answer unread.
    pub answer_timeout: Option<Duration>,
    /// How long nothing may come behind the end of the device sections before it is taken for the end. QEMU writes the
    /// whole tail at once, so the next piece of it is microseconds away; the VM is stopped meanwhile. What is taken for
    /// the end is certain only after [`Incoming::confirm_end`].
    pub end_of_stream_timeout: Duration,
    /// Whether the stream was recorded, so that no source listens. A wish for answers is passed over then, and the
    /// stream ends where the bytes end, however long they take.
    pub recorded: bool,
    /// The first bytes of the stream, if they were read before to see what it is. At most 1 MiB, the size of the
    /// receive buffer: a longer one is refused.
    pub head: Vec<u8>,
}

impl Default for DestinationOptions {
    fn default() -> Self {
        Self {
            max_device_state: TAIL_LIMIT,
            answer_timeout: Some(Duration::from_secs(60)),
            end_of_stream_timeout: Duration::from_millis(1),
            recorded: false,
            head: Vec::new(),
        }
    }
}

/// What a stream held, by kind.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct DestinationStats {
    /// Pages with contents.
    pub normal_pages: u64,
    /// Pages that came as zero.
    pub zero_pages: u64,
    /// Of both, those for a page that had come before.
    pub resent_pages: u64,
    /// Bytes of device sections and their description.
    pub device_bytes: u64,
    /// From the first byte to the last.
    pub elapsed: Duration,
    /// From the first device section to the last byte: part of the VM's downtime.
    pub device_elapsed: Duration,
    /// Of all channels together.
    pub channel: Counters,
}

/// The destination role.
pub struct Destination<'a, S: PageSink + Send + ?Sized> {
    sink: &'a mut S,
    role: Role<'a>,
}

/// All of a destination but its sink.
struct Role<'a> {
    channel: Arc<Channel>,
    pages: Vec<Arc<Channel>>,
    multifd: MultifdOptions,
    control: Control,
    progress: Progress,
    options: DestinationOptions,
    hooks: Option<&'a dyn Hooks>,
}

impl<S: PageSink + Send + ?Sized> std::fmt::Debug for Destination<'_, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Role { channel, options, .. } = &self.role;
        f.debug_struct("Destination").field("channel", channel).field("options", options).finish_non_exhaustive()
    }
}

impl<'a, S: PageSink + Send + ?Sized> Destination<'a, S> {
    /// A destination that reads from `channel` and hands pages to `sink`. It keeps a clone of the handle.
    pub fn new(sink: &'a mut S, channel: Channel, handle: &Handle) -> Self {
        let Handle { control, progress } = handle.clone();
        let role = Role {
            channel: Arc::new(channel),
            pages: Vec::new(),
            multifd: MultifdOptions::default(),
            control,
            progress,
            options: DestinationOptions::default(),
            hooks: None,
        };
        Self { sink, role }
    }

    /// Sets the options.
    #[must_use]
    pub fn options(mut self, options: DestinationOptions) -> Self {
        self.role.options = options;
        self
    }

    /// With multifd channels, in the order of their numbers, their initial packets read: those of a
    /// [`MultifdChannels`].
    #[must_use]
    pub fn channels(mut self, pages: Vec<Channel>, options: MultifdOptions) -> Self {
        self.role.pages = pages.into_iter().map(Arc::new).collect();
        self.role.multifd = options;
        self
    }

    /// For a VM that waits here for its state.
    pub(crate) fn hooks(mut self, hooks: &'a dyn Hooks) -> Self {
        self.role.hooks = Some(hooks);
        self
    }

    /// Receives a whole stream.
    ///
    /// On `Err` the channel is closed, so that a source with a return path resumes its VM.
    pub fn run(self) -> Result<Incoming, MigrateError> {
        match self.arrive() {
            Ok(Received::Whole(incoming)) => Ok(*incoming),
            // Refused where it began, unless there are hooks.
            Ok(Received::PostcopySwitchover(switched)) => {
                Err(MigrateError::SwitchedToPostcopy { offset: switched.decoder.offset() })
            }
            Err(broken) => Err(broken.error),
        }
    }

    /// Receives a stream up to its end, or to the package of a postcopy.
    pub(crate) fn arrive(self) -> Result<Received, Broken> {
        self.role.arrive(self.sink)
    }
}

impl Role<'_> {
    fn arrive<S: PageSink + Send + ?Sized>(self, sink: &mut S) -> Result<Received, Broken> {
        self.channels().for_each(|channel| self.control.watch(channel));
        let mut receiver = Receiver::new(&self);
        let result = receiver.run(sink);
        let (answered, return_path) = (receiver.answered, receiver.return_path);
        let (decoder, stats) = (receiver.decoder, receiver.stats);
        match result {
            Ok((start, AfterPages::Devices(tail, devices))) => {
                self.control.unwatch();
                let (channel, pages) = (self.channel, self.pages);
                let incoming =
                    Incoming { start, tail, devices, stats, channel, _pages: pages, return_path, loaded: answered };
                Ok(Received::Whole(Box::new(incoming)))
            }
            Ok((start, AfterPages::Package { length, arrived })) => {
                let (channel, pages) = (self.channel, self.pages);
                let switched = PostcopySwitchover { start, decoder, arrived, length, stats, channel, _pages: pages };
                Ok(Received::PostcopySwitchover(Box::new(switched)))
            }
            Err(error) => {
                self.control.unwatch();
                for channel in self.channels() {
                    let _ = channel.shutdown(Shutdown::Both);
                    // What had come may all have been read, and then nothing tells a source over TCP that waits for
                    // room here that reading has ended: its kernel would probe for a minute or two. A reset tells it.
                    let _ = sockopt::set_socket_linger(channel.as_ref(), Some(Duration::ZERO));
                }
                Err(Broken { error: self.control.explain(error), answered })
            }
        }
    }

    fn channels(&self) -> impl Iterator<Item = &Arc<Channel>> {
        std::iter::once(&self.channel).chain(&self.pages)
    }
}

struct Receiver<'a> {
    role: &'a Role<'a>,
    buffer: Buffer,
    orders: PageWrites,
    decoder: Decoder,
    stats: DestinationStats,
    return_path: bool,
    /// The page sizes that the source announced: postcopy may follow.
    advised: Option<PageSizes>,
    /// The source was told that everything is in its place: it may have given its word since.
    answered: bool,
    /// Bytes that had come on the multifd channels when this one was last found silent.
    heard: u64,
}

/// What follows the pages.
enum AfterPages {
    Devices(Vec<u8>, DeviceState),
    /// A package of `length` bytes, of which `arrived` have come, and perhaps more behind it.
    Package {
        length: u32,
        arrived: Vec<u8>,
    },
}

impl<'a> Receiver<'a> {
    fn new(role: &'a Role<'a>) -> Self {
        Self {
            role,
            buffer: Buffer::new(&role.options.head),
            orders: PageWrites::default(),
            decoder: Decoder::new(),
            stats: DestinationStats::default(),
            return_path: false,
            advised: None,
            answered: false,
            heard: 0,
        }
    }

    fn run<S: PageSink + Send + ?Sized>(&mut self, sink: &mut S) -> Result<(StreamSetup, AfterPages), MigrateError> {
        let begun = Instant::now();
        for channel in self.role.channels() {
            channel.set_timeouts(self.role.options.answer_timeout, self.role.options.answer_timeout)?;
        }
        if self.role.options.head.len() > BUFFER_LEN {
            let length = self.role.options.head.len();
            return Err(MigrateError::Protocol(format!("a head of {length} bytes, of at most {BUFFER_LEN}")));
        }
        let start = self.take_layout()?;
        if let Some(hooks) = self.role.hooks {
            hooks.begin(&start, self.advised)?;
        }
        sink.begin(&start).map_err(MigrateError::Sink)?;
        self.role.progress.expect_pages(start.blocks.iter().map(RamBlock::pages).sum());
        self.role.progress.enter(Phase::Active);
        let package = self.take_memory(&start, sink)?;
        self.role.progress.enter(Phase::Device);
        let devices_begun = Instant::now();
        let behind = match package {
            Some(length) => AfterPages::Package { length, arrived: self.buffer.arrived()?.to_vec() },
            None => {
                let (tail, devices) = self.take_devices(self.decoder.offset())?;
                self.stats.device_bytes = to_u64(tail.len());
                self.role.progress.enter(Phase::Completing);
                AfterPages::Devices(tail, devices)
            }
        };
        self.stats.device_elapsed = devices_begun.elapsed();
        self.stats.elapsed = begun.elapsed();
        self.stats.channel = self.role.channels().map(|channel| channel.counters()).sum();
        Ok((start, behind))
    }

    /// Everything behind the layout and before the device sections, on all channels. The length of the package, if
    /// there is one in their place.
    fn take_memory<S: PageSink + Send + ?Sized>(
        &mut self,
        start: &StreamSetup,
        sink: &mut S,
    ) -> Result<Option<u32>, MigrateError> {
        let role = self.role;
        let counts = PageCounts::new(&role.progress);
        let context = ReaderContext {
            blocks: multifd::by_name(&start.blocks),
            join: MultifdSync::new(role.pages.len()),
            options: role.multifd,
            answer_timeout: role.options.answer_timeout,
            main: &role.channel,
            channels: &role.pages,
        };
        let package = thread::scope(|scope| {
            let writer = PageWriter::start(scope, sink, start, &counts)?;
            let threads = (0..).zip(&role.pages).map(|(id, channel)| {
                let reader = PageChannel::new(&context, id, channel, writer.handle(multifd::BUFFER_LEN))?;
                let thread = thread::Builder::new().name(format!("multifd {id}"));
                let thread = thread.spawn_scoped(scope, move || reader.run());
                thread.map_err(|error| MigrateError::Protocol(format!("cannot start a thread: {error}")))
            });
            let (threads, begun) = gathered(threads);
            let taken = begun.and_then(|()| self.take_pages(&mut writer.handle(BUFFER_LEN), &context.join));
            context.end();
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
            let package = taken.map_err(|error| match error {
                // A source with more channels than these finds the others closed, and gives up.
                MigrateError::Stream(error)
                    if !role.pages.is_empty() && matches!(error.kind(), ErrorKind::Truncated { .. }) =>
                {
                    MigrateError::MainEnded { channels: role.pages.len(), source: error }
                }
                error => error,
            })?;
            match loose {
                None => Ok(package),
                Some(id) => {
                    let what = "it carries pages after the last synchronization point, so it may be incomplete";
                    Err(MigrateError::Multifd { id, source: Box::new(MigrateError::Protocol(what.into())) })
                }
            }
        })?;
        let moved = counts.total();
        self.stats.normal_pages = moved.normal;
        self.stats.zero_pages = moved.zero;
        self.stats.resent_pages = moved.resent;
        Ok(package)
    }

    /// Everything up to the end of the RAM layout.
    fn take_layout(&mut self) -> Result<StreamSetup, MigrateError> {
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

    /// Everything up to the first device section, which is left in the buffer; or up to a package: its length.
    fn take_pages(&mut self, handle: &mut WriterHandle<'_>, join: &MultifdSync) -> Result<Option<u32>, MigrateError> {
        let several = !self.role.pages.is_empty();
        // A source that joins once a round says so before the end of the first section. One that does not joins at the
        // end of every section, that one included (QEMU's machine types up to 8.0).
        let (mut by_round, mut first) = (false, true);
        loop {
            let (consumed, event) = match self.decoder.step(self.buffer.arrived()?)? {
                Step::Need(total) => {
                    self.refill(total, handle)?;
                    continue;
                }
                Step::Event { consumed, event } => (consumed, event),
            };
            self.buffer.consume(consumed);
            match event {
                Event::Page { block, offset } => {
                    self.refill(PAGE_LEN, handle)?;
                    self.orders.page(block, PageNumber(offset / PAGE_SIZE), self.buffer.start);
                    self.buffer.consume(PAGE_LEN);
                }
                Event::Zero { block, offset } => self.orders.zero(block, PageNumber(offset / PAGE_SIZE)),
                Event::Xbzrle { block, offset, length } => {
                    let length = usize::from(length);
                    self.refill(length, handle)?;
                    let (begin, stream) = (self.buffer.start, self.decoder.offset().saturating_sub(length as u64));
                    self.orders.delta(block, PageNumber(offset / PAGE_SIZE), begin..begin + length, stream);
                    self.buffer.consume(length);
                }
                Event::MultifdFlush if several && (first || by_round) => {
                    by_round = true;
                    self.join(handle, join)?;
                }
                Event::EndOfSection => {
                    first = false;
                    if several && !by_round {
                        self.join(handle, join)?;
                    }
                }
                Event::EarlyDevice(section) => self.orders.early_section(section),
                Event::Command(Command::RamDiscard { block, ranges }) => {
                    let Some(hooks) = self.postcopy_hooks() else {
                        return Err(MigrateError::SwitchedToPostcopy { offset: self.decoder.offset() });
                    };
                    // What came before it is discarded with the rest.
                    self.exchange(handle)?;
                    let index = self.decoder.blocks().iter().position(|known| known.name == block);
                    let index =
                        index.ok_or_else(|| broken("the decoder lets only discards of known blocks through"))?;
                    hooks.discard(index, &ranges)?;
                }
                Event::Command(command) => self.obey(&command, self.decoder.offset())?,
                Event::DeviceTail => {
                    self.exchange(handle)?;
                    return Ok(None);
                }
                Event::Package { length } if self.postcopy_hooks().is_some() => {
                    self.exchange(handle)?;
                    return Ok(Some(length));
                }
                Event::SectionPart { .. } | Event::SectionEnd { .. } | Event::SectionFooter { .. } => {}
                Event::Package { .. } => {
                    return Err(MigrateError::SwitchedToPostcopy { offset: self.decoder.offset() });
                }
                other => return Err(self.unsupported(&other)),
            }
        }
    }

    /// The hooks of a VM that may run here before all its pages have come.
    fn postcopy_hooks(&self) -> Option<&'a dyn Hooks> {
        self.role.hooks.filter(|hooks| self.return_path && hooks.postcopy())
    }

    /// Waits until every channel has come to the synchronization point, with everything handed over that was read
    /// before.
    fn join(&mut self, handle: &mut WriterHandle<'_>, join: &MultifdSync) -> Result<(), MigrateError> {
        if !self.orders.is_empty() {
            self.exchange(handle)?;
        }
        join.pass()
    }

    fn unsupported(&self, event: &Event) -> MigrateError {
        let offset = self.decoder.offset();
        if *event == Event::MultifdFlush && self.role.pages.is_empty() {
            return StreamError::new(offset, "section \"ram\"", ErrorKind::Unsupported(Feature::Multifd)).into();
        }
        let what = match event {
            Event::MappedRamBlock(_) => "mapped-ram, whose pages have places of their own in a file".to_owned(),
            other => format!("{other:?}"),
        };
        MigrateError::Unsupported { what, offset, role: "the precopy destination" }
    }

    fn obey(&mut self, command: &Command, offset: u64) -> Result<(), MigrateError> {
        match command {
            Command::OpenReturnPath | Command::Ping(_) if self.role.options.recorded => {}
            Command::OpenReturnPath if !self.role.channel.carries(Shutdown::Write) => {
                return Err(MigrateError::OneWay { peer: self.role.channel.peer().to_owned() });
            }
            Command::OpenReturnPath => self.return_path = true,
            // That postcopy may follow binds neither end; a source that finishes before it is asked to switch is
            // received.
            Command::PostcopyAdvise(sizes) => self.advised = *sizes,
            Command::RamDiscard { .. } | Command::PostcopyListen | Command::PostcopyRun => {
                return Err(MigrateError::SwitchedToPostcopy { offset });
            }
            Command::Ping(token) if self.return_path => {
                let mut bytes = Vec::new();
                ReturnMessage::Pong(*token).encode(&mut bytes)?;
                self.role.channel.write_all(&bytes)?;
            }
            Command::SwitchoverStart => self.role.progress.enter(Phase::Device),
            other => {
                return Err(MigrateError::Unsupported {
                    what: format!("{other:?}"),
                    offset,
                    role: "the precopy destination",
                });
            }
        }
        Ok(())
    }

    /// Makes sure that `total` bytes have arrived behind the last decoded one, in another buffer if they do not fit.
    fn refill(&mut self, total: usize, handle: &mut WriterHandle<'_>) -> Result<(), MigrateError> {
        if self.buffer.len() < total && self.buffer.is_short_of(total) {
            self.exchange(handle)?;
        }
        self.fill(total)
    }

    /// Reads until `total` bytes have arrived behind the last decoded one, or fails at the end of the stream.
    fn fill(&mut self, total: usize) -> Result<(), MigrateError> {
        while self.buffer.len() < total {
            if self.buffer.is_short_of(total) {
                let offset = self.decoder.offset();
                return Err(MigrateError::Protocol(format!("a record of {total} bytes at stream offset {offset}")));
            }
            match self.buffer.fill(&self.role.channel) {
                Ok(0) => return Err(MigrateError::Stream(self.decoder.truncated(self.buffer.len(), total))),
                Ok(_) => {}
                // While pages come on the other channels there may be nothing to say on this one.
                Err(MigrateError::Channel(error)) if error.is_timeout() && self.others_moved() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether something has come on the other channels since this was last asked.
    fn others_moved(&mut self) -> bool {
        let heard = self.role.pages.iter().map(|channel| channel.counters().bytes_in).sum();
        std::mem::replace(&mut self.heard, heard) != heard
    }

    /// Gives the buffer away with what is to become of it, and goes on in an empty one.
    fn exchange(&mut self, handle: &mut WriterHandle<'_>) -> Result<(), MigrateError> {
        let rest = self.buffer.arrived()?.to_vec();
        let full = std::mem::take(&mut self.buffer.bytes);
        let (empty, orders) = handle.exchange((full, std::mem::take(&mut self.orders)))?;
        self.orders = orders;
        Ok(self.buffer.begin_with(empty, &rest)?)
    }

    /// Has the device sections loaded, with every page in its place, and says so to the source.
    fn ready(&mut self, sections: &[u8]) -> Result<(), MigrateError> {
        if let Some(hooks) = self.role.hooks {
            hooks.load(sections)?;
        }
        let before = self.role.channel.counters().bytes_out;
        let said = self.obey(&Command::Ping(PING_READY), self.decoder.offset());
        // From the first byte of the answer on the source may have given its word.
        self.answered = said.is_ok() || self.role.channel.counters().bytes_out != before;
        said?;
        Ok(self.role.channel.set_timeouts(self.role.options.answer_timeout, self.role.options.answer_timeout)?)
    }

    /// Reads what comes next, over what has been looked at. Nothing, if the connection has ended.
    ///
    /// Over TLS stock QEMU does not announce the end of its main channel, and where it has no return path its
    /// description alone proves that all has come. With one it waits for an answer, and does not go before: a
    /// connection that ends then was cut, perhaps by an attacker who knows that the guest has put what looks like an
    /// end just there.
    fn more(&mut self) -> Result<usize, MigrateError> {
        (self.buffer.start, self.buffer.end) = (0, 0);
        match self.buffer.fill(&self.role.channel) {
            Err(MigrateError::Channel(error)) if error.is_cut() && !self.return_path => Ok(0),
            read => read,
        }
    }

    /// Collects the device sections up to the end that their own description proves.
    fn take_devices(&mut self, offset: u64) -> Result<(Vec<u8>, DeviceState), MigrateError> {
        let channel = &self.role.channel;
        let answer_timeout =
            if self.role.options.recorded { self.role.options.answer_timeout } else { Some(TAIL_TIMEOUT) };
        let mut search = DeviceTail::new(offset, self.role.options.max_device_state);
        let mut told = Some(FramedSections::new(offset, self.role.options.max_device_state));
        let mut tail = self.buffer.arrived()?.to_vec();
        loop {
            match told.as_mut().map(|told| told.look(&tail)).transpose()? {
                Some(TailStep::Ready { sections }) => {
                    let sections = tail.get(..sections);
                    self.ready(sections.ok_or_else(|| broken("device sections are among the bytes that have come"))?)?;
                    continue;
                }
                Some(TailStep::Whole { state, pings, length }) => {
                    if tail.len() > length {
                        let rest = tail.len() - length;
                        return Err(MigrateError::Protocol(format!("{rest} bytes behind the description")));
                    }
                    tail.drain(pings);
                    return Ok((tail, state));
                }
                Some(TailStep::Foreign) => told = None,
                Some(TailStep::More) if self.answered => {
                    if self.more()? == 0 {
                        let what = "the source ended its stream before it allowed the VM to run".into();
                        return Err(MigrateError::Protocol(what));
                    }
                    tail.extend_from_slice(self.buffer.arrived()?);
                    continue;
                }
                Some(TailStep::More) | None => {}
            }
            let found = search.find(&tail)?;
            if found.is_some() && self.return_path {
                // The guest can put what looks like an end into a device's memory, so an end counts only if nothing
                // comes behind it. The source has nothing more to say until it is answered.
                channel
                    .set_timeouts(Some(self.role.options.end_of_stream_timeout), self.role.options.answer_timeout)?;
            } else {
                channel.set_timeouts(answer_timeout, self.role.options.answer_timeout)?;
            }
            let more = self.more();
            match (more, found) {
                (Err(MigrateError::Channel(error)), Some(devices)) if error.is_timeout() => return Ok((tail, devices)),
                (Ok(0), Some(devices)) => return Ok((tail, devices)),
                (Err(MigrateError::Channel(error)), None) if error.is_timeout() => {
                    // What is wrong with what came says more than that nothing more does: a stream without a
                    // description, for one, has no end that can be found.
                    devices::locate(&tail, offset, self.role.options.max_device_state)?;
                    return Err(error.into());
                }
                (Ok(0), None) => {
                    // With nothing to come, the search's own error says what is wrong with what came.
                    let devices = devices::locate(&tail, offset, self.role.options.max_device_state)?;
                    return Err(MigrateError::Protocol(format!(
                        "{} bytes behind the description",
                        tail.len() - devices.end
                    )));
                }
                (Err(error), _) => return Err(error),
                (Ok(_), _) => {}
            }
            tail.extend_from_slice(self.buffer.arrived()?);
        }
    }
}

/// What was begun, and whether all of it was.
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
