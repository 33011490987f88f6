//! The destination role in precopy: pages from the channel to a [`PageSink`], then the device state.
//!
//! The stream is read in large pieces into receive buffers and decoded in place. A page is not taken out of them: the
//! sink gets slices of a buffer, gathered over as many consecutive pages as have arrived, and hands them to the kernel
//! in one vectored call, while the next buffer fills (`landing`). What user space moves is the tail of a record that the
//! end of a buffer cut in two, at most one page a buffer.
//!
//! The role ends with the VM stopped at the source and the source waiting for the destination's word. That word is given
//! by [`Incoming::acknowledge`], not here: until then the source can resume its VM, and it is the caller who knows
//! whether what was received has to be durable first.

mod landing;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Counters};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageBitmap, PageNumber};
use limosa_stream::decoder::{Decoder, Event, Step};
use limosa_stream::devices::{self, DeviceState, DeviceTail, TAIL_LIMIT};
use limosa_stream::return_path::ReturnMessage;
use limosa_stream::{Command, Fault, Feature, StreamError};

use landing::{Landing, Orders};

use crate::control::Control;
use crate::error::MigrateError;
use crate::pages::{PageSink, StreamStart};
use crate::progress::{Moved, Phase, Progress};

/// Size of the receive buffer. It should stay in a core's second-level cache between the read that fills it and the write
/// that empties it.
const BUFFER_LEN: usize = 1 << 20;

/// Longest silence inside the device sections. QEMU writes them from memory, and the VM stands still meanwhile.
const TAIL_PATIENCE: Duration = Duration::from_secs(10);

/// How a stream is to be received.
#[derive(Debug, Clone)]
pub struct DestinationOptions {
    /// Most bytes of device state to accept.
    pub max_device_state: u64,
    /// Longest silence of the source; a running migration always has something to say.
    pub patience: Option<Duration>,
    /// How long nothing may come behind the end of the device sections before it is taken for the end. QEMU writes the whole
    /// tail at once, so the next piece of it is microseconds away; the VM stands still meanwhile. What is taken for the end is
    /// certain only after [`Incoming::confirm_end`].
    pub after_the_end: Duration,
    /// Whether the stream was recorded: nobody listens at its other end. A wish for answers is passed over then, and the
    /// stream ends where the bytes end, however long they take.
    pub recorded: bool,
}

impl Default for DestinationOptions {
    fn default() -> Self {
        Self {
            max_device_state: TAIL_LIMIT,
            patience: Some(Duration::from_secs(60)),
            after_the_end: Duration::from_millis(1),
            recorded: false,
        }
    }
}

/// What a stream held, by kind.
#[derive(Debug, Clone, Copy, Default)]
pub struct DestinationStats {
    /// PAGE records.
    pub normal_pages: u64,
    /// ZERO records.
    pub zero_pages: u64,
    /// Of both, those for a page that had come before.
    pub resent_pages: u64,
    /// Bytes of device sections and their description.
    pub device_bytes: u64,
    /// From the first byte to the last.
    pub elapsed: Duration,
    /// From the first device section to the last byte: part of the VM's downtime.
    pub device_elapsed: Duration,
    /// Of the channel.
    pub channel: Counters,
}

/// A stream that has arrived whole, and a source that waits for the word that it has.
#[derive(Debug)]
pub struct Incoming {
    /// The layout.
    pub start: StreamStart,
    /// The end of the stream as it came: device sections and their description.
    pub tail: Vec<u8>,
    /// Where in `tail` each device section lies.
    pub devices: DeviceState,
    /// What was counted.
    pub stats: DestinationStats,
    channel: Arc<Channel>,
    return_path: bool,
}

impl Incoming {
    /// Whether the source waits for [`acknowledge`](Self::acknowledge). One that opened no return path does not: it took
    /// its last write for success, and nothing can call it back.
    pub fn has_return_path(&self) -> bool {
        self.return_path
    }

    /// Tells the source that all is well: its VM is now this side's.
    pub fn acknowledge(&self) -> Result<(), MigrateError> {
        self.shut(0)
    }

    /// Makes sure, after [`acknowledge`](Self::acknowledge), that the stream ended where it seemed to: the source closes the
    /// channel then, and not a byte comes before that.
    ///
    /// A guest can put what looks like an end into a device's memory. If that was believed because the source was held up
    /// just there, the rest of the stream comes now, and what was received is worth nothing.
    pub fn confirm_end(&self) -> Result<(), MigrateError> {
        self.channel.set_timeouts(Some(TAIL_PATIENCE), None)?;
        match self.channel.get_some(&mut [0; 64])? {
            0 => Ok(()),
            _ => Err(MigrateError::Protocol(
                "the stream goes on behind what looked like its end: what was received is not whole; try again".into(),
            )),
        }
    }

    /// Tells the source that this side failed: its VM resumes.
    pub fn refuse(&self) -> Result<(), MigrateError> {
        self.shut(1)
    }

    fn shut(&self, status: u32) -> Result<(), MigrateError> {
        if !self.return_path {
            return Ok(());
        }
        let mut bytes = Vec::new();
        ReturnMessage::Shut(status).encode(&mut bytes)?;
        Ok(self.channel.put(&bytes)?)
    }
}

/// The destination role.
#[derive(Debug)]
pub struct Destination<'a> {
    channel: Arc<Channel>,
    control: &'a Control,
    progress: &'a Progress,
    options: DestinationOptions,
}

impl<'a> Destination<'a> {
    /// A destination that reads from `channel`.
    pub fn new(channel: Channel, control: &'a Control, progress: &'a Progress, options: DestinationOptions) -> Self {
        Self { channel: Arc::new(channel), control, progress, options }
    }

    /// Receives a whole stream.
    ///
    /// On `Err` the channel is closed, so that a source with a return path resumes its VM.
    pub fn receive<S: PageSink + Send + ?Sized>(self, sink: &mut S) -> Result<Incoming, MigrateError> {
        self.control.watch(&self.channel);
        let result = Receiver::new(&self).run(sink);
        self.control.unwatch();
        let channel = Arc::clone(&self.channel);
        match result {
            Ok((start, tail, devices, stats, return_path)) => {
                Ok(Incoming { start, tail, devices, stats, channel, return_path })
            }
            Err(error) => {
                let _ = channel.shutdown(limosa_channel::How::Both);
                Err(self.control.explain(error))
            }
        }
    }
}

/// The receive buffer: `bytes[start..end]` has arrived and is not decoded yet. What lies before `start` stays in place
/// until the buffer is given away, so that slices of it can go to the sink.
struct Buffer {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Buffer {
    fn new() -> Self {
        Self { bytes: vec![0; BUFFER_LEN].into_boxed_slice(), start: 0, end: 0 }
    }

    fn arrived(&self) -> &[u8] {
        self.bytes.get(self.start..self.end).unwrap_or_default()
    }

    fn consume(&mut self, count: usize) {
        self.start = self.end.min(self.start + count);
    }

    /// Whether `count` more bytes behind `start` would not fit into this buffer.
    fn is_short_of(&self, count: usize) -> bool {
        self.bytes.len() - self.start < count
    }

    /// Goes on in another buffer, whose first bytes are those that have arrived and are not decoded.
    fn begin_with(&mut self, bytes: Box<[u8]>, rest: &[u8]) {
        self.bytes = bytes;
        if let Some(begin) = self.bytes.get_mut(..rest.len()) {
            begin.copy_from_slice(rest);
        }
        (self.start, self.end) = (0, rest.len());
    }

    fn fill(&mut self, channel: &Channel) -> Result<usize, MigrateError> {
        let room = self.bytes.get_mut(self.end..).unwrap_or_default();
        let got = channel.get_some(room)?;
        self.end += got;
        Ok(got)
    }
}

struct Receiver<'a> {
    role: &'a Destination<'a>,
    buffer: Buffer,
    orders: Orders,
    decoder: Decoder,
    seen: Vec<PageBitmap>,
    stats: DestinationStats,
    uncounted: Moved,
    return_path: bool,
}

type Received = (StreamStart, Vec<u8>, DeviceState, DestinationStats, bool);

impl<'a> Receiver<'a> {
    fn new(role: &'a Destination<'a>) -> Self {
        Self {
            role,
            buffer: Buffer::new(),
            orders: Orders::default(),
            decoder: Decoder::new(),
            seen: Vec::new(),
            stats: DestinationStats::default(),
            uncounted: Moved::default(),
            return_path: false,
        }
    }

    fn run<S: PageSink + Send + ?Sized>(mut self, sink: &mut S) -> Result<Received, MigrateError> {
        let begun = Instant::now();
        self.role.channel.set_timeouts(self.role.options.patience, None)?;
        let start = self.take_layout()?;
        sink.begin(&start).map_err(MigrateError::Sink)?;
        self.begin(&start);
        thread::scope(|scope| {
            let landing = Landing::start(scope, sink, BUFFER_LEN)?;
            let taken = self.take_pages(&landing);
            // A sink that failed is the cause; that no buffer came back is what it led to.
            landing.finish().and(taken)
        })?;
        self.role.progress.enter(Phase::Device);
        let devices_begun = Instant::now();
        let (tail, devices) = self.take_devices(self.decoder.offset())?;
        self.stats.device_bytes = u64::try_from(tail.len()).unwrap_or(u64::MAX);
        self.stats.device_elapsed = devices_begun.elapsed();
        self.stats.elapsed = begun.elapsed();
        self.stats.channel = self.role.channel.counters();
        self.role.progress.enter(Phase::Completing);
        Ok((start, tail, devices, self.stats, self.return_path))
    }

    /// Everything up to the end of the RAM layout.
    fn take_layout(&mut self) -> Result<StreamStart, MigrateError> {
        let (mut configuration, mut ram_section) = (None, None);
        loop {
            let (consumed, event) = match self.decoder.step(self.buffer.arrived())? {
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
                    return Ok(StreamStart { configuration, section_id, blocks });
                }
                Event::Command(command) => self.obey(&command, self.decoder.offset())?,
                other => return Err(self.unsupported(&other)),
            }
        }
    }

    /// Everything up to the first device section, which is left in the buffer.
    fn take_pages(&mut self, landing: &Landing<'_>) -> Result<(), MigrateError> {
        loop {
            let (consumed, event) = match self.decoder.step(self.buffer.arrived())? {
                Step::Need(total) => {
                    self.refill(total, landing)?;
                    continue;
                }
                Step::Event { consumed, event } => (consumed, event),
            };
            self.buffer.consume(consumed);
            match event {
                Event::Page { block, offset } => {
                    self.refill(PAGE_LEN, landing)?;
                    let page = PageNumber(offset / PAGE_SIZE);
                    self.orders.page(block, page, self.buffer.start);
                    self.buffer.consume(PAGE_LEN);
                    self.uncounted.normal += 1;
                    self.see(block, page);
                }
                Event::Zero { block, offset } => {
                    let page = PageNumber(offset / PAGE_SIZE);
                    self.orders.zero(block, page);
                    self.uncounted.zero += 1;
                    self.see(block, page);
                }
                Event::Command(command) => self.obey(&command, self.decoder.offset())?,
                Event::DeviceTail => return self.exchange(landing),
                Event::SectionPart { .. }
                | Event::SectionEnd { .. }
                | Event::SectionFooter { .. }
                | Event::EndOfSection => {}
                other => return Err(self.unsupported(&other)),
            }
        }
    }

    fn unsupported(&self, event: &Event) -> MigrateError {
        let feature = match event {
            Event::MultifdFlush => Some(Feature::Multifd),
            Event::Xbzrle { .. } => Some(Feature::Xbzrle),
            _ => None,
        };
        if let Some(feature) = feature {
            let fault = Fault::Unsupported(feature);
            return MigrateError::Stream(StreamError::new(self.decoder.offset(), "section \"ram\"", fault));
        }
        MigrateError::Unsupported {
            what: format!("{event:?}"),
            offset: self.decoder.offset(),
            role: "the precopy destination",
        }
    }

    fn begin(&mut self, start: &StreamStart) {
        let pages = || start.blocks.iter().map(|block| block.used_length / PAGE_SIZE);
        self.seen = pages().map(PageBitmap::new).collect();
        self.role.progress.expect_pages(pages().sum());
        self.role.progress.enter(Phase::Active);
    }

    fn obey(&mut self, command: &Command, offset: u64) -> Result<(), MigrateError> {
        match command {
            Command::OpenReturnPath | Command::Ping(_) if self.role.options.recorded => {}
            Command::OpenReturnPath => self.return_path = true,
            Command::Ping(token) if self.return_path => {
                let mut bytes = Vec::new();
                ReturnMessage::Pong(*token).encode(&mut bytes)?;
                self.role.channel.put(&bytes)?;
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
    fn refill(&mut self, total: usize, landing: &Landing<'_>) -> Result<(), MigrateError> {
        if self.buffer.arrived().len() < total && self.buffer.is_short_of(total) {
            self.exchange(landing)?;
        }
        self.fill(total)
    }

    /// Reads until `total` bytes have arrived behind the last decoded one, or fails at the end of the stream.
    fn fill(&mut self, total: usize) -> Result<(), MigrateError> {
        while self.buffer.arrived().len() < total {
            if self.buffer.is_short_of(total) {
                let offset = self.decoder.offset();
                return Err(MigrateError::Protocol(format!("a record of {total} bytes at stream offset {offset}")));
            }
            if self.buffer.fill(&self.role.channel)? == 0 {
                return Err(MigrateError::Stream(self.decoder.truncated(self.buffer.arrived().len(), total)));
            }
        }
        Ok(())
    }

    /// Gives the buffer away with what is to become of it, and goes on in an empty one.
    fn exchange(&mut self, landing: &Landing<'_>) -> Result<(), MigrateError> {
        let full = std::mem::take(&mut self.buffer.bytes);
        let rest = full.get(self.buffer.start..self.buffer.end).unwrap_or_default().to_vec();
        let (empty, orders) = landing
            .exchange((full, std::mem::take(&mut self.orders)))
            .ok_or_else(|| MigrateError::Protocol("pages cannot be stored any more".into()))?;
        self.orders = orders;
        self.buffer.begin_with(empty, &rest);
        Ok(())
    }

    fn see(&mut self, block: usize, page: PageNumber) {
        if self.seen.get_mut(block).is_some_and(|seen| seen.set(page)) {
            self.uncounted.resent += 1;
        }
        if self.uncounted.normal + self.uncounted.zero >= 1024 {
            self.count();
        }
    }

    fn count(&mut self) {
        let batch = std::mem::take(&mut self.uncounted);
        self.stats.normal_pages += batch.normal;
        self.stats.zero_pages += batch.zero;
        self.stats.resent_pages += batch.resent;
        self.role.progress.moved(batch);
    }

    /// Collects the device sections up to the end that their own description proves.
    fn take_devices(&mut self, offset: u64) -> Result<(Vec<u8>, DeviceState), MigrateError> {
        self.count();
        let channel = &self.role.channel;
        let patience = if self.role.options.recorded { self.role.options.patience } else { Some(TAIL_PATIENCE) };
        let mut search = DeviceTail::new(offset, self.role.options.max_device_state);
        let mut tail = self.buffer.arrived().to_vec();
        loop {
            let found = search.find(&tail)?;
            if found.is_some() && self.return_path {
                // The guest can put what looks like an end into a device's memory, so an end counts only if nothing comes
                // behind it. The source has nothing more to say until it is answered.
                channel.set_timeouts(Some(self.role.options.after_the_end), None)?;
            } else {
                channel.set_timeouts(patience, None)?;
            }
            self.buffer.start = 0;
            self.buffer.end = 0;
            let more = self.buffer.fill(channel);
            match (more, found) {
                (Err(MigrateError::Channel(error)), Some(devices)) if error.is_timeout() => return Ok((tail, devices)),
                (Ok(0), Some(devices)) => return Ok((tail, devices)),
                (Err(MigrateError::Channel(error)), None) if error.is_timeout() => {
                    // What is wrong with what came says more than that nothing more does: a stream without a description,
                    // for one, has no end that can be found.
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
            tail.extend_from_slice(self.buffer.arrived());
        }
    }
}
