//! The sending threads of a postcopy: each a channel, a buffer, and what it counts.
//!
//! All of them claim pages from one list of what is unsent and take requests from the return path; the rest of what
//! they share is in [`SendState`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, Ordering::Relaxed};
use std::time::Duration;

use hdrhistogram::Histogram;
use limosa_channel::Channel;
use limosa_page::{PAGE_LEN, PageRange, broken_invariant, to_usize};
use limosa_stream::RamBlock;
use parking_lot::Mutex;

use super::records::{GuestPages, RecordWriter, Zeros};
use super::return_path::{Request, ReturnPath, Wake};
use super::touched::RequestRecorder;
use super::unsent::{CLAIM_PAGES, Claim, Cursor, UnsentPages};
use crate::control::{MovedPages, Progress};
use crate::error::MigrateError;
use crate::pages::{BlockRange, PageSource};

/// The state that the sending threads share.
pub(crate) struct SendState<'a, S: PageSource + ?Sized> {
    pub(crate) source: &'a S,
    /// The RAM blocks, with the page sizes of the destination.
    pub(crate) blocks: &'a [RamBlock],
    pub(crate) unsent: UnsentPages<'a>,
    pub(crate) return_path: &'a ReturnPath,
    pub(crate) progress: &'a Progress,
    pub(crate) normal: AtomicU64,
    pub(crate) zero: AtomicU64,
    /// Requests that the preempt channel's thread has taken and not yet answered.
    pub(crate) unanswered: AtomicU64,
    /// Where the last request was, for the background to go on near it.
    pub(crate) near: Mutex<Option<Cursor>>,
    /// Requests that are recorded.
    pub(crate) recorder: RequestRecorder,
    /// The stream's end is on its way: the destination may close the preempt channel at any moment.
    pub(crate) ending: AtomicBool,
}

/// The preempt channel's thread: answers requests until the migration is over.
pub(crate) fn answer_requests<S: PageSource + ?Sized>(
    state: &SendState<'_, S>,
    channel: &Channel,
) -> Result<Histogram<u64>, MigrateError> {
    // Over TLS the destination may have waited for the package before it looked at this channel.
    channel.complete_handshake()?;
    let mut sender = Sender::new(state, channel)?;
    loop {
        match state.return_path.next_request(Duration::from_secs(1), &state.unanswered) {
            Wake::Request(request) => {
                let near = Cursor { block: request.block, page: request.pages.end };
                *state.near.lock() = Some(near);
                let answered = sender.answer(request);
                if answered.is_ok() {
                    // One that failed stays counted for ever, so that the stream can never end over it.
                    state.unanswered.fetch_sub(1, Ordering::Release);
                }
                match answered {
                    // The destination has everything and has closed this channel: its last requests need no answer.
                    Err(MigrateError::Channel(_)) if state.ending.load(Ordering::Acquire) => return Ok(sender.latency),
                    answered => answered?,
                }
            }
            Wake::Idle => {}
            Wake::Ended => return Ok(sender.latency),
        }
    }
}

/// One sending thread: a channel, a buffer, and what it counted.
pub(crate) struct Sender<'a, S: PageSource + ?Sized> {
    state: &'a SendState<'a, S>,
    records: RecordWriter<'a>,
    buffer: Vec<u8>,
    /// From the arrival of a request to its answer, nanoseconds.
    pub(crate) latency: Histogram<u64>,
}

impl<'a, S: PageSource + ?Sized> Sender<'a, S> {
    /// A sender whose first record will name its block.
    pub(crate) fn new(state: &'a SendState<'a, S>, channel: &'a Channel) -> Result<Self, MigrateError> {
        Ok(Self {
            state,
            records: RecordWriter::new(channel, &state.source.setup().blocks)?,
            buffer: Vec::new(),
            latency: new_histogram(),
        })
    }

    /// Answers a request: every host page of it is sent, unless it has been.
    pub(crate) fn answer(&mut self, request: Request) -> Result<(), MigrateError> {
        for host_page in self.state.unsent.host_pages(request.block, request.pages)? {
            match self.state.unsent.claim(request.block, host_page.start)? {
                Claim::Contents => {
                    self.state.recorder.note(BlockRange { block: request.block, pages: host_page });
                    self.send(request.block, host_page)?;
                }
                Claim::Zero => {
                    self.state.source.confirm_zero(request.block, host_page).map_err(MigrateError::Source)?;
                    self.records.send_zero(request.block, host_page)?;
                    self.count(0, host_page.len());
                }
                Claim::Taken => continue,
            }
            let nanos = u64::try_from(request.arrived.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.latency.saturating_record(nanos);
        }
        self.state.progress.add_requested(request.pages.len());
        Ok(())
    }

    /// Sends a claimed run of pages, and returns how many of them had contents. Of a huge page all pages go, in order
    /// and with nothing between them, as the destination demands; holes of it are not read. Guest memory is gathered
    /// from where it lies.
    pub(crate) fn send(&mut self, block: usize, pages: PageRange) -> Result<u64, MigrateError> {
        let too_long = || broken_invariant("a piece of a claim fits into the buffer");
        let length = |pages: PageRange| to_usize(pages.len()).saturating_mul(PAGE_LEN);
        let (source, stored) = (self.state.source, self.state.source.stored_bitmap(block));
        let mut contents = 0;
        for piece in pages.chunks(CLAIM_PAGES) {
            if let Some(memory) = source.memory(block) {
                let sent =
                    self.records.send_memory(GuestPages { block, memory, runs: &[piece], zeros: Zeros::Told })?;
                self.count(sent.normal, sent.zero);
                contents += sent.normal;
                continue;
            }
            self.buffer.resize(length(PageRange::whole_block(CLAIM_PAGES)), 0);
            let buffer = self.buffer.get_mut(..length(piece)).ok_or_else(too_long)?;
            let mut read = 0;
            for run in stored.runs_in(piece) {
                let begin = length(PageRange::new(piece.start, run.start));
                let part = buffer.get_mut(begin..begin + length(run)).ok_or_else(too_long)?;
                source.read(block, run, part).map_err(MigrateError::Source)?;
                read += run.len();
            }
            if read < piece.len() {
                source.confirm_zero(block, piece).map_err(MigrateError::Source)?;
            }
            let (normal, zero) = self.records.send(block, piece, stored, buffer)?;
            self.count(normal, zero);
            contents += normal;
        }
        Ok(contents)
    }

    fn count(&self, normal: u64, zero: u64) {
        self.state.normal.fetch_add(normal, Relaxed);
        self.state.zero.fetch_add(zero, Relaxed);
        self.state.progress.add_moved(MovedPages { normal, zero, resent: 0 });
    }
}

/// Latencies from 1 ns to 1000 s, three digits.
pub(crate) fn new_histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 1_000_000_000_000, 3).unwrap_or_else(|_| unreachable!("the bounds are constants"))
}
