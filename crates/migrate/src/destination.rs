//! The destination role in precopy: pages from the channel to a [`PageSink`], then the device state.
//!
//! The stream is read in large pieces into one receive buffer and decoded in place. A page is not taken out of it: the
//! sink gets slices of the buffer, gathered over as many consecutive pages as have arrived, and hands them to the kernel
//! in one vectored call. What user space moves is the tail of a record that a read cut in two, at most one page a buffer.
//!
//! The role ends with the VM stopped at the source and the source waiting for the destination's word. That word is given
//! by [`Incoming::acknowledge`], not here: until then the source can resume its VM, and it is the caller who knows
//! whether what was received has to be durable first.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Counters};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageBitmap, PageNumber, PageRange};
use limosa_stream::Command;
use limosa_stream::decoder::{Decoder, Event, Step};
use limosa_stream::devices::{self, DeviceState, DeviceTail, TAIL_LIMIT};
use limosa_stream::return_path::ReturnMessage;

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
}

impl Default for DestinationOptions {
    fn default() -> Self {
        Self {
            max_device_state: TAIL_LIMIT,
            patience: Some(Duration::from_secs(60)),
            after_the_end: Duration::from_millis(1),
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
    pub fn receive<S: PageSink + ?Sized>(self, sink: &mut S) -> Result<Incoming, MigrateError> {
        self.control.watch(&self.channel);
        let result = Receiver::new(&self, sink).run();
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
/// until [`compact`](Self::compact), so that slices of it can still go to the sink.
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

    /// Whether `count` more bytes behind `start` would not fit without [`compact`](Self::compact).
    fn is_short_of(&self, count: usize) -> bool {
        self.bytes.len() - self.start < count
    }

    fn compact(&mut self) {
        self.bytes.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
    }

    fn fill(&mut self, channel: &Channel) -> Result<usize, MigrateError> {
        let room = self.bytes.get_mut(self.end..).unwrap_or_default();
        let got = channel.get_some(room)?;
        self.end += got;
        Ok(got)
    }
}

/// Consecutive pages of one block that lie in the buffer and have not gone to the sink.
#[derive(Default)]
struct Batch {
    block: usize,
    first: u64,
    /// Where in the buffer each page begins.
    places: Vec<usize>,
}

struct Receiver<'a, S: ?Sized> {
    role: &'a Destination<'a>,
    sink: &'a mut S,
    buffer: Buffer,
    batch: Batch,
    /// Consecutive zero pages of one block that have not gone to the sink.
    zeros: Option<(usize, PageRange)>,
    seen: Vec<PageBitmap>,
    stats: DestinationStats,
    uncounted: Moved,
    return_path: bool,
}

type Received = (StreamStart, Vec<u8>, DeviceState, DestinationStats, bool);

impl<'a, S: PageSink + ?Sized> Receiver<'a, S> {
    fn new(role: &'a Destination<'a>, sink: &'a mut S) -> Self {
        Self {
            role,
            sink,
            buffer: Buffer::new(),
            batch: Batch::default(),
            zeros: None,
            seen: Vec::new(),
            stats: DestinationStats::default(),
            uncounted: Moved::default(),
            return_path: false,
        }
    }

    fn run(mut self) -> Result<Received, MigrateError> {
        let begun = Instant::now();
        self.role.channel.set_timeouts(self.role.options.patience, None)?;
        let mut decoder = Decoder::new();
        let mut configuration = None;
        let mut ram_section = None;
        let mut start: Option<StreamStart> = None;
        let (start, devices_begun) = loop {
            let (consumed, event) = match decoder.step(self.buffer.arrived())? {
                Step::Need(total) => {
                    self.refill(total, &decoder)?;
                    continue;
                }
                Step::Event { consumed, event } => (consumed, event),
            };
            match event {
                Event::Page { block, offset } => {
                    self.buffer.consume(consumed);
                    while self.buffer.arrived().len() < PAGE_LEN {
                        self.refill(PAGE_LEN, &decoder)?;
                    }
                    self.take_page(block, PageNumber(offset / PAGE_SIZE))?;
                    continue;
                }
                Event::Zero { block, offset } => {
                    self.buffer.consume(consumed);
                    self.take_zero(block, PageNumber(offset / PAGE_SIZE))?;
                    continue;
                }
                Event::Configuration(found) => configuration = Some(found),
                Event::SectionStart(header) => ram_section = Some(header.id),
                Event::RamStart(blocks) => {
                    let (Some(configuration), Some(section_id)) = (configuration.take(), ram_section) else {
                        return Err(MigrateError::Protocol("the RAM layout came before its section began".into()));
                    };
                    let layout = StreamStart { configuration, section_id, blocks };
                    self.begin(&layout)?;
                    start = Some(layout);
                }
                Event::Command(command) => self.obey(&command, decoder.offset())?,
                Event::DeviceTail => {
                    self.buffer.consume(consumed);
                    let start = start
                        .ok_or_else(|| MigrateError::Protocol("device sections came before the RAM layout".into()))?;
                    break (start, Instant::now());
                }
                Event::RamBlock { .. }
                | Event::SectionPart { .. }
                | Event::SectionEnd { .. }
                | Event::SectionFooter { .. }
                | Event::EndOfSection => {}
                other => {
                    return Err(MigrateError::Unsupported {
                        what: format!("{other:?}"),
                        offset: decoder.offset(),
                        role: "the precopy destination",
                    });
                }
            }
            self.buffer.consume(consumed);
        };
        self.flush()?;
        self.role.progress.enter(Phase::Device);
        let (tail, devices) = self.take_devices(decoder.offset())?;
        self.stats.device_bytes = u64::try_from(tail.len()).unwrap_or(u64::MAX);
        self.stats.device_elapsed = devices_begun.elapsed();
        self.stats.elapsed = begun.elapsed();
        self.stats.channel = self.role.channel.counters();
        self.role.progress.enter(Phase::Completing);
        Ok((start, tail, devices, self.stats, self.return_path))
    }

    fn begin(&mut self, start: &StreamStart) -> Result<(), MigrateError> {
        self.sink.begin(start).map_err(MigrateError::Sink)?;
        let pages = || start.blocks.iter().map(|block| block.used_length / PAGE_SIZE);
        self.seen = pages().map(PageBitmap::new).collect();
        self.role.progress.expect_pages(pages().sum());
        self.role.progress.enter(Phase::Active);
        Ok(())
    }

    fn obey(&mut self, command: &Command, offset: u64) -> Result<(), MigrateError> {
        match command {
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

    /// Reads on until `total` bytes have arrived behind the last decoded one, or fails at the end of the stream.
    fn refill(&mut self, total: usize, decoder: &Decoder) -> Result<(), MigrateError> {
        if total > BUFFER_LEN {
            return Err(MigrateError::Protocol(format!("a record of {total} bytes at offset {}", decoder.offset())));
        }
        if self.buffer.is_short_of(total.max(PAGE_LEN)) || self.buffer.end == self.buffer.bytes.len() {
            self.flush()?;
            self.buffer.compact();
        }
        while self.buffer.arrived().len() < total {
            if self.buffer.fill(&self.role.channel)? == 0 {
                return Err(MigrateError::Stream(decoder.truncated(self.buffer.arrived().len(), total)));
            }
        }
        Ok(())
    }

    fn take_page(&mut self, block: usize, page: PageNumber) -> Result<(), MigrateError> {
        self.flush_zeros()?;
        let follows = self.batch.block == block
            && !self.batch.places.is_empty()
            && self.batch.first + u64::try_from(self.batch.places.len()).unwrap_or(u64::MAX) == page.0;
        if !follows {
            self.flush_pages()?;
            self.batch.block = block;
            self.batch.first = page.0;
        }
        self.batch.places.push(self.buffer.start);
        self.buffer.consume(PAGE_LEN);
        self.uncounted.normal += 1;
        self.see(block, page);
        Ok(())
    }

    fn take_zero(&mut self, block: usize, page: PageNumber) -> Result<(), MigrateError> {
        self.flush_pages()?;
        match &mut self.zeros {
            Some((same, run)) if *same == block && run.end == page => run.end = PageNumber(page.0 + 1),
            _ => {
                self.flush_zeros()?;
                self.zeros = Some((block, PageRange::new(page, PageNumber(page.0 + 1))));
            }
        }
        self.uncounted.zero += 1;
        self.see(block, page);
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

    /// Hands to the sink what has been gathered. At most one of the two batches holds anything, so the order in which a
    /// page came as contents and as zero is kept.
    fn flush(&mut self) -> Result<(), MigrateError> {
        self.flush_zeros()?;
        self.flush_pages()
    }

    fn flush_zeros(&mut self) -> Result<(), MigrateError> {
        match self.zeros.take() {
            None => Ok(()),
            Some((block, run)) => self.sink.put_zero(block, run).map_err(MigrateError::Sink),
        }
    }

    fn flush_pages(&mut self) -> Result<(), MigrateError> {
        if self.batch.places.is_empty() {
            return Ok(());
        }
        let bytes = &self.buffer.bytes;
        let slices: Vec<_> = self
            .batch
            .places
            .iter()
            .map(|&place| IoSlice::new(bytes.get(place..place + PAGE_LEN).unwrap_or_default()))
            .collect();
        self.sink.put_pages(self.batch.block, PageNumber(self.batch.first), &slices).map_err(MigrateError::Sink)?;
        self.batch.places.clear();
        Ok(())
    }

    /// Collects the device sections up to the end that their own description proves.
    fn take_devices(&mut self, offset: u64) -> Result<(Vec<u8>, DeviceState), MigrateError> {
        self.count();
        let channel = &self.role.channel;
        let mut search = DeviceTail::new(offset, self.role.options.max_device_state);
        let mut tail = self.buffer.arrived().to_vec();
        loop {
            let found = search.find(&tail)?;
            if found.is_some() && self.return_path {
                // The guest can put what looks like an end into a device's memory, so an end counts only if nothing comes
                // behind it. The source has nothing more to say until it is answered.
                channel.set_timeouts(Some(self.role.options.after_the_end), None)?;
            } else {
                channel.set_timeouts(Some(TAIL_PATIENCE), None)?;
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
