//! The source role in precopy of a guest that does not run: every page once, then the device sections.
//!
//! The destination's guest starts when all has arrived. Every page is sent, zero pages as zero: memory that looks fresh may
//! be a file with old contents. Only who knows better says so, block by block ([`PrecopyOptions::fresh`]).

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Counters};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageNumber, PageRange};
use limosa_stream::{Command, ram, section};

use super::inbox::Inbox;
use super::ledger::CLAIM_PAGES;
use super::records::RecordWriter;
use crate::control::Control;
use crate::error::MigrateError;
use crate::pages::PageSource;
use crate::progress::{Moved, Phase, Progress};

/// How a precopy is to be done.
#[derive(Debug, Clone)]
pub struct PrecopyOptions {
    /// Whether to ask the destination for a last word. Needs a channel that carries both directions.
    pub return_path: bool,
    /// Longest wait for that word: the destination loads the device state in that time.
    pub patience: Duration,
    /// RAM blocks whose memory is zero at the destination, by name: their zero pages are left out.
    pub fresh: Vec<String>,
}

impl Default for PrecopyOptions {
    fn default() -> Self {
        Self { return_path: true, patience: Duration::from_secs(60), fresh: Vec::new() }
    }
}

/// What a precopy came to.
#[derive(Debug, Clone, Copy)]
pub struct PrecopyStats {
    /// Pages sent with contents.
    pub normal_pages: u64,
    /// Pages sent as zero.
    pub zero_pages: u64,
    /// From the first byte to the last word of the destination.
    pub elapsed: Duration,
    /// Of the channel.
    pub channel: Counters,
}

/// The source role in precopy, over any [`PageSource`].
#[derive(Debug)]
pub struct PrecopySource<'a, S: PageSource + ?Sized> {
    source: &'a S,
    channel: Arc<Channel>,
    control: &'a Control,
    progress: &'a Progress,
    options: PrecopyOptions,
}

impl<'a, S: PageSource + ?Sized> PrecopySource<'a, S> {
    /// A source that sends `source` over `channel`.
    pub fn new(
        source: &'a S,
        channel: Channel,
        control: &'a Control,
        progress: &'a Progress,
        options: PrecopyOptions,
    ) -> Self {
        Self { source, channel: Arc::new(channel), control, progress, options }
    }

    /// Sends everything and waits for the destination's last word, if there is a return path.
    pub fn run(self) -> Result<PrecopyStats, MigrateError> {
        let begun = Instant::now();
        self.control.watch(&self.channel);
        let inbox = Inbox::default();
        let result = thread::scope(|scope| {
            let reader = self
                .options
                .return_path
                .then(|| scope.spawn(|| inbox.read_from(&self.channel, &self.source.start().blocks, |_| {})));
            let sent = self.send().and_then(|moved| {
                if self.options.return_path {
                    inbox.wait_shut(self.options.patience)?;
                }
                Ok(moved)
            });
            if sent.is_err() {
                let _ = self.channel.shutdown(limosa_channel::How::Both);
            }
            if let Some(reader) = reader {
                let _ = reader.join();
            }
            sent
        });
        self.control.unwatch();
        let moved = result.map_err(|error| self.control.explain(error))?;
        self.progress.enter(Phase::Completed);
        Ok(PrecopyStats {
            normal_pages: moved.normal,
            zero_pages: moved.zero,
            elapsed: begun.elapsed(),
            channel: self.channel.counters(),
        })
    }

    fn send(&self) -> Result<Moved, MigrateError> {
        let start = self.source.start();
        let pages = (0..start.blocks.len()).map(|block| self.source.stored(block).count()).sum();
        self.progress.expect_pages(pages);
        let mut bytes = Vec::new();
        start.configuration.clone().without_mapped_ram().encode(&mut bytes)?;
        if self.options.return_path {
            Command::OpenReturnPath.encode(&mut bytes)?;
        }
        ram::encode_ram_start(start.section_id, &start.blocks, &mut bytes)?;
        section::encode_part(start.section_id, &mut bytes);
        self.channel.put(&bytes)?;
        self.progress.enter(Phase::Active);
        let mut moved = Moved::default();
        let mut records = RecordWriter::new(&self.channel, &start.blocks)?;
        let mut buffer = vec![0; usize::try_from(CLAIM_PAGES * PAGE_SIZE).unwrap_or(PAGE_LEN)];
        for (block, layout) in start.blocks.iter().enumerate() {
            let stored = self.source.stored(block);
            for run in stored.runs() {
                self.send_run(&mut records, block, run, &mut buffer, &mut moved)?;
            }
            if !self.options.fresh.contains(&layout.name) {
                for run in stored.gaps() {
                    self.source.confirm_zero(block, run).map_err(MigrateError::Source)?;
                    records.send_zero(block, run)?;
                    self.count(&mut moved, 0, run.len());
                }
            }
        }
        bytes.clear();
        ram::encode_eos(start.section_id, &mut bytes);
        section::encode_end(start.section_id, &mut bytes);
        ram::encode_eos(start.section_id, &mut bytes);
        bytes.extend_from_slice(self.source.device_sections());
        section::encode_eof(&mut bytes);
        if let (description @ [_, ..], Ok(length)) =
            (self.source.description(), u32::try_from(self.source.description().len()))
        {
            bytes.push(section::DESCRIPTION);
            bytes.extend_from_slice(&length.to_be_bytes());
            bytes.extend_from_slice(description);
        }
        self.progress.enter(Phase::Device);
        self.channel.put(&bytes)?;
        self.progress.enter(Phase::Completing);
        Ok(moved)
    }

    fn send_run(
        &self,
        records: &mut RecordWriter<'_>,
        block: usize,
        mut run: PageRange,
        buffer: &mut [u8],
        moved: &mut Moved,
    ) -> Result<(), MigrateError> {
        while !run.is_empty() {
            self.control.check()?;
            let piece = PageRange::new(run.start, PageNumber(run.end.0.min(run.start.0 + CLAIM_PAGES)));
            run.start = piece.end;
            let length = usize::try_from(piece.len()).unwrap_or(usize::MAX).saturating_mul(PAGE_LEN);
            let contents = buffer.get_mut(..length).unwrap_or_default();
            self.wait_for_rate()?;
            self.control.rate().spend(piece.len().saturating_mul(PAGE_SIZE));
            self.source.read(block, piece, contents).map_err(MigrateError::Source)?;
            let (normal, zero) = records.send(block, piece, self.source.stored(block), contents)?;
            self.count(moved, normal, zero);
        }
        Ok(())
    }

    /// Waits until the rate allows more, or the job is stopped.
    fn wait_for_rate(&self) -> Result<(), MigrateError> {
        loop {
            self.control.check()?;
            let pause = self.control.rate().delay();
            if pause.is_zero() {
                return Ok(());
            }
            thread::sleep(pause.min(Duration::from_millis(50)));
        }
    }

    fn count(&self, moved: &mut Moved, normal: u64, zero: u64) {
        moved.normal += normal;
        moved.zero += zero;
        self.progress.moved(Moved { normal, zero, resent: 0 });
    }
}
