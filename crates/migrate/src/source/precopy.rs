//! The source role in precopy of a guest that does not run: every page once, then the device sections.
//!
//! The destination's guest starts when all has arrived. Every page is sent, zero pages as zero: memory that looks fresh
//! may be a file with old contents. Only a caller that knows better says so, block by block
//! ([`PrecopyOptions::zeroed_blocks`]). Of memory that is at the destination already no page is sent
//! ([`PrecopyOptions::in_place`]).
//!
//! Pages go out as records on the one channel, or in packets on multifd channels ([`PrecopySource::channels`]).

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Counters, ZeroCopy};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageBitmap, PageNumber, PageRange, broken_invariant, to_usize};
use limosa_stream::multifd::Compression;
use limosa_stream::{Command, RamBlock, postcopy, ram, section};

use super::multifd::{self, Multifd, MultifdSourceOptions, Parts};
use super::records::RecordWriter;
use super::return_path::ReturnPath;
use super::unsent::CLAIM_PAGES;
use crate::control::{Control, Handle, MovedPages, Phase, Progress};
use crate::error::MigrateError;
use crate::pages::PageSource;

/// The settings of a precopy.
#[derive(Debug, Clone)]
pub struct PrecopyOptions {
    /// Whether to ask the destination for an acknowledgement. Needs a channel that carries both directions.
    pub return_path: bool,
    /// How long the destination may take to answer a PING before the first page is sent; `None` sends at once. Without
    /// an answer no confirmation can come either, and that is better known before the pages are sent. Multifd channels
    /// begin meanwhile, because QEMU answers nothing before it has been greeted on all of them.
    pub ping_timeout: Option<Duration>,
    /// Longest wait for the acknowledgement: the destination loads the device state in that time. On multifd channels
    /// also the longest time in which the destination takes nothing.
    pub answer_timeout: Duration,
    /// RAM blocks whose memory is zero at the destination, by name: their zero pages are left out.
    pub zeroed_blocks: Vec<String>,
    /// RAM blocks whose memory is at the destination already, because it maps the very file that the pages would come
    /// from.
    pub in_place: Vec<PresentBlock>,
}

/// A RAM block whose memory is at the destination already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresentBlock {
    /// Its name.
    pub block: String,
    /// Pages that the destination has written to since it mapped the file, ascending. They are sent, as zero where they
    /// are not stored; no other page of the block is sent.
    pub changed: Vec<PageRange>,
}

impl PresentBlock {
    /// Returns a block all of whose pages are at the destination.
    #[must_use]
    pub fn unchanged(block: impl Into<String>) -> Self {
        Self { block: block.into(), changed: Vec::new() }
    }
}

impl Default for PrecopyOptions {
    fn default() -> Self {
        Self {
            return_path: true,
            ping_timeout: None,
            answer_timeout: Duration::from_secs(60),
            zeroed_blocks: Vec::new(),
            in_place: Vec::new(),
        }
    }
}

/// Counters of a precopy.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct PrecopyStats {
    /// Pages sent with contents.
    pub normal_pages: u64,
    /// Pages sent as zero.
    pub zero_pages: u64,
    /// From the first byte to the destination's acknowledgement.
    pub elapsed: Duration,
    /// Of the channel; of all together if there are several.
    pub channel: Counters,
}

/// The PING whose answer says that the destination has taken all pages.
const TAKEN: u32 = 5;

/// The source role in precopy, over any [`PageSource`].
#[derive(Debug)]
pub struct PrecopySource<'a, S: PageSource + ?Sized> {
    source: &'a S,
    channel: Arc<Channel>,
    control: Control,
    progress: Progress,
    options: PrecopyOptions,
    multifd_channels: Vec<Arc<Channel>>,
    multifd: MultifdSourceOptions,
}

impl<'a, S: PageSource + ?Sized> PrecopySource<'a, S> {
    /// A source that sends `source` over `channel`. It keeps a clone of the handle.
    pub fn new(source: &'a S, channel: Channel, handle: &Handle) -> Self {
        let Handle { control, progress } = handle.clone();
        Self {
            source,
            channel: Arc::new(channel),
            control,
            progress,
            options: PrecopyOptions::default(),
            multifd_channels: Vec::new(),
            multifd: MultifdSourceOptions::default(),
        }
    }

    /// Sets the options.
    #[must_use]
    pub fn options(mut self, options: PrecopyOptions) -> Self {
        self.options = options;
        self
    }

    /// Sends the pages on these multifd channels, a thread each, to a destination that expects exactly as many. They
    /// were connected after the main one; their order is that of their numbers.
    ///
    /// # Errors
    /// More than 16 channels, packets of no page or of more than 128.
    pub fn channels(mut self, channels: Vec<Channel>, options: MultifdSourceOptions) -> Result<Self, MigrateError> {
        self.multifd_channels = multifd::checked(channels, &options)?;
        self.multifd = options;
        Ok(self)
    }

    /// Refuses pages that cannot leave as the multifd channels are to send them.
    fn check_channels(&self) -> Result<(), MigrateError> {
        self.multifd.check_zero_copy(self.source, self.options.return_path)?;
        // One that finds its pages copied by the kernel turns to splicing.
        let may_splice = |channel: &Arc<Channel>| match channel.zero_copy() {
            ZeroCopy::Off => false,
            ZeroCopy::Msg => channel.zero_copy_setting() == ZeroCopy::Auto,
            ZeroCopy::Splice | ZeroCopy::Auto => true,
        };
        let is_lent = |block| self.source.memory(block).is_some_and(|memory| memory.page_size() == PAGE_SIZE);
        if !self.options.return_path
            && self.multifd.compression == Compression::None
            && self.multifd_channels.iter().any(may_splice)
            && (0..self.source.setup().blocks.len()).any(is_lent)
        {
            let why = "splicing needs a destination that answers: its answer says that no page is in flight any more";
            return Err(MigrateError::ZeroCopy(why));
        }
        multifd::set_write_timeout(&self.multifd_channels, self.options.answer_timeout)
    }

    /// Sends everything and waits for the destination's confirmation, if there is a return path.
    ///
    /// # Errors
    /// Before a byte is sent: a channel whose time-out cannot be set; a named way of sending that is not possible;
    /// memory that would be spliced without a return path, which alone says when it may be used for something else.
    pub fn run(self) -> Result<PrecopyStats, MigrateError> {
        let begun = Instant::now();
        if !self.multifd_channels.is_empty() {
            self.check_channels()?;
        }
        self.control.watch(&self.channel);
        for channel in &self.multifd_channels {
            self.control.watch(channel);
        }
        let return_path = ReturnPath::default();
        let multifd = (!self.multifd_channels.is_empty()).then(|| self.multifd());
        let result = thread::scope(|scope| {
            let read = || {
                return_path.read_from(&self.channel, &self.source.setup().blocks, false, |_| {});
                if let Some(multifd) = &multifd {
                    // The channels' threads do not look at the return path, and it is over.
                    multifd.fail_for(|| return_path.outcome());
                }
            };
            let reader = self.options.return_path.then(|| scope.spawn(read));
            let sent = self.send(&return_path, multifd.as_ref()).and_then(|moved| {
                if self.options.return_path {
                    return_path.wait_shut(self.options.answer_timeout)?;
                }
                Ok(moved)
            });
            if sent.is_err() {
                for channel in self.all_channels() {
                    let _ = channel.shutdown(limosa_channel::Shutdown::Both);
                }
            }
            if let Some(reader) = reader {
                let _ = reader.join();
            }
            sent
        });
        self.control.unwatch();
        let moved = result.map_err(|error| self.control.explain(error))?;
        self.progress.set_phase(Phase::Completed);
        Ok(PrecopyStats {
            normal_pages: moved.normal,
            zero_pages: moved.zero,
            elapsed: begun.elapsed(),
            channel: self.all_channels().map(|channel| channel.counters()).sum(),
        })
    }

    /// The main channel and the multifd channels.
    fn all_channels(&self) -> impl Iterator<Item = &Arc<Channel>> {
        std::iter::once(&self.channel).chain(&self.multifd_channels)
    }

    fn send(&self, return_path: &ReturnPath, multifd: Option<&Multifd<'_, S>>) -> Result<MovedPages, MigrateError> {
        let start = self.source.setup();
        let travelling = (0..start.blocks.len()).filter(|block| !self.is_in_place(*block));
        let changed = self.changed().into_iter().filter(|(_, _, stored)| *stored);
        let changed = changed.map(|(_, run, _)| run.len()).sum::<u64>();
        self.progress
            .expect_pages(travelling.map(|block| self.source.stored_bitmap(block).count()).sum::<u64>() + changed);
        let mut bytes = Vec::new();
        start.configuration.clone().without_mapped_ram().encode(&mut bytes)?;
        if self.options.return_path {
            Command::OpenReturnPath.encode(&mut bytes)?;
            if let Some(answer_timeout) = self.options.ping_timeout {
                Command::Ping(postcopy::PING_RETURN_PATH).encode(&mut bytes)?;
                if multifd.is_none() {
                    self.channel.write_all(&bytes)?;
                    bytes.clear();
                    return_path.wait_pong(postcopy::PING_RETURN_PATH, answer_timeout)?;
                }
            }
        }
        let joins = multifd.is_some_and(Multifd::joins_by_word);
        ram::encode_ram_layout(start.section_id, &start.blocks, &mut bytes)?;
        if joins {
            ram::encode_multifd_flush(&mut bytes);
        }
        ram::encode_eos(start.section_id, &mut bytes);
        bytes.extend_from_slice(self.source.early_sections());
        section::encode_part(start.section_id, &mut bytes);
        self.channel.write_all(&bytes)?;
        self.progress.set_phase(Phase::Active);
        let changed = self.send_changed()?;
        let mut moved = match multifd {
            Some(multifd) => {
                let stored = (0..start.blocks.len()).map(|block| match self.is_in_place(block) {
                    true => PageBitmap::new(self.source.stored_bitmap(block).len()),
                    false => self.source.stored_bitmap(block).clone(),
                });
                multifd.send_pages(stored.collect(), || match self.options.ping_timeout {
                    Some(answer_timeout) if self.options.return_path => {
                        return_path.wait_pong(postcopy::PING_RETURN_PATH, answer_timeout)
                    }
                    _ => Ok(()),
                })?
            }
            None => self.send_pages()?,
        };
        moved.normal += changed.normal;
        moved.zero += changed.zero;
        bytes.clear();
        ram::encode_eos(start.section_id, &mut bytes);
        section::encode_end(start.section_id, &mut bytes);
        if joins {
            ram::encode_multifd_flush(&mut bytes);
        }
        ram::encode_eos(start.section_id, &mut bytes);
        if let Some(multifd) = multifd.filter(|_| self.options.return_path) {
            // Until the destination has read what was passed on unread, a write to the file changes it.
            Command::Ping(TAKEN).encode(&mut bytes)?;
            self.channel.write_all(&bytes)?;
            bytes.clear();
            return_path.wait_pong(TAKEN, self.options.answer_timeout)?;
            multifd.check_taken()?;
        }
        bytes.extend_from_slice(self.source.device_sections());
        section::encode_eof(&mut bytes);
        if let description @ [_, ..] = self.source.description() {
            section::encode_description(description, &mut bytes)?;
        }
        self.progress.set_phase(Phase::Device);
        self.channel.write_all(&bytes)?;
        self.progress.set_phase(Phase::Completing);
        Ok(moved)
    }

    /// Whether a block's memory is at the destination already.
    fn is_in_place(&self, block: usize) -> bool {
        self.in_place(block).is_some()
    }

    fn in_place(&self, block: usize) -> Option<&PresentBlock> {
        let name = &self.source.setup().blocks.get(block)?.name;
        self.options.in_place.iter().find(|in_place| in_place.block == *name)
    }

    /// The pages of blocks in place that are sent all the same: block, range, whether they are stored.
    fn changed(&self) -> Vec<(usize, PageRange, bool)> {
        let mut found: Vec<(usize, PageRange, bool)> = Vec::new();
        for block in 0..self.source.setup().blocks.len() {
            let Some(in_place) = self.in_place(block) else { continue };
            let stored = self.source.stored_bitmap(block);
            for page in in_place.changed.iter().flat_map(PageRange::iter).filter(|page| page.0 < stored.len()) {
                let is_stored = stored.get(page);
                match found.last_mut() {
                    Some((last, run, kind)) if (*last, run.end, *kind) == (block, page, is_stored) => run.end.0 += 1,
                    _ => found.push((block, PageRange::starting_at(page, 1), is_stored)),
                }
            }
        }
        found
    }

    /// Whether the zero pages of a block need not be sent.
    fn has_zeros(&self, block: usize) -> bool {
        let fresh = |block: &RamBlock| self.options.zeroed_blocks.contains(&block.name);
        self.is_in_place(block) || self.source.setup().blocks.get(block).is_some_and(fresh)
    }

    fn multifd(&self) -> Multifd<'_, S> {
        Multifd::new(Parts {
            source: self.source,
            control: &self.control,
            progress: &self.progress,
            options: &self.multifd,
            main: &self.channel,
            channels: &self.multifd_channels,
            zeroed: (0..self.source.setup().blocks.len()).map(|block| self.has_zeros(block)).collect(),
            queue: Arc::default(),
            return_path: self.options.return_path,
        })
    }

    /// Sends what the destination has changed of blocks in place, as records of the main channel.
    fn send_changed(&self) -> Result<MovedPages, MigrateError> {
        let mut moved = MovedPages::default();
        let changed = self.changed();
        if changed.is_empty() {
            return Ok(moved);
        }
        let mut records = RecordWriter::new(&self.channel, &self.source.setup().blocks)?;
        let mut buffer = vec![0; to_usize(CLAIM_PAGES * PAGE_SIZE)];
        for (block, run, is_stored) in changed {
            if is_stored {
                let sent = self.send_run(&mut records, block, run, &mut buffer)?;
                moved.normal += sent.normal;
                moved.zero += sent.zero;
            } else {
                self.source.confirm_zero(block, run).map_err(MigrateError::Source)?;
                records.send_zero(block, run)?;
                self.count(&mut moved, 0, run.len());
            }
        }
        Ok(moved)
    }

    /// Sends all pages as records of the one channel.
    fn send_pages(&self) -> Result<MovedPages, MigrateError> {
        let start = self.source.setup();
        let mut moved = MovedPages::default();
        let mut records = RecordWriter::new(&self.channel, &start.blocks)?;
        let mut buffer = vec![0; to_usize(CLAIM_PAGES * PAGE_SIZE)];
        for block in (0..start.blocks.len()).filter(|block| !self.is_in_place(*block)) {
            let stored = self.source.stored_bitmap(block);
            for run in stored.runs() {
                let sent = self.send_run(&mut records, block, run, &mut buffer)?;
                moved.normal += sent.normal;
                moved.zero += sent.zero;
            }
            if !self.has_zeros(block) {
                for run in stored.gaps() {
                    self.source.confirm_zero(block, run).map_err(MigrateError::Source)?;
                    records.send_zero(block, run)?;
                    self.count(&mut moved, 0, run.len());
                }
            }
        }
        Ok(moved)
    }

    fn send_run(
        &self,
        records: &mut RecordWriter<'_>,
        block: usize,
        mut run: PageRange,
        buffer: &mut [u8],
    ) -> Result<MovedPages, MigrateError> {
        let mut moved = MovedPages::default();
        while !run.is_empty() {
            self.control.check()?;
            let piece = PageRange::new(run.start, PageNumber(run.end.0.min(run.start.0 + CLAIM_PAGES)));
            run.start = piece.end;
            let contents = buffer.get_mut(..to_usize(piece.len()).saturating_mul(PAGE_LEN));
            let contents = contents.ok_or_else(|| broken_invariant("a piece of a run fits into the buffer"))?;
            wait_for_rate(&self.control, || self.control.check())?;
            self.control.rate_limit().spend(piece.len().saturating_mul(PAGE_SIZE));
            self.source.read(block, piece, contents).map_err(MigrateError::Source)?;
            let (normal, zero) = records.send(block, piece, self.source.stored_bitmap(block), contents)?;
            self.count(&mut moved, normal, zero);
        }
        Ok(moved)
    }

    fn count(&self, moved: &mut MovedPages, normal: u64, zero: u64) {
        moved.normal += normal;
        moved.zero += zero;
        self.progress.add_moved(MovedPages { normal, zero, resent: 0 });
    }
}

/// Waits until the rate allows more, or `check` fails.
fn wait_for_rate(control: &Control, check: impl Fn() -> Result<(), MigrateError>) -> Result<(), MigrateError> {
    loop {
        check()?;
        let pause = control.rate_limit().delay();
        if pause.is_zero() {
            return Ok(());
        }
        thread::sleep(pause.min(Duration::from_millis(50)));
    }
}
