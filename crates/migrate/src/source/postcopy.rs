//! The source role in postcopy with immediate resume: the guest runs at the destination before all of its pages are
//! there.
//!
//! The order on the wire: header, return path, advice, RAM layout, one discard for each block (a destination that goes
//! from the advice straight to listening waits for ever on its own memory, so at least one is mandatory), the package
//! of LISTEN, device sections and RUN; then pages, each exactly once, requested ones first. The stream ends only when
//! every stored page has been sent, because a destination completes with the pages that it has and takes the rest for
//! zero.
//!
//! Where the destination's memory is made of huge pages, a page is such a host page everywhere above: it is claimed,
//! sent, recovered and asked for as a whole, and its 4 KiB pages follow each other on one channel with nothing between
//! them.
//!
//! Threads: the caller's sends on the main channel; one reads the return path; with a preempt channel one more answers
//! requests there. Only *requested* pages may go on the preempt channel: the destination waits for those before it
//! completes, but an unasked page on that channel could still be under way when the main channel ends, and would be
//! lost.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use limosa_channel::{Channel, ChannelError, Counters};
use limosa_page::{PAGE_SIZE, PageBitmap, PageNumber, to_u64};
use limosa_stream::{Command, RamBlock, ReturnMessage, postcopy, ram, section};
use parking_lot::Mutex;

use super::host_pages::with_page_sizes;
use super::return_path::ReturnPath;
use super::sender::{SendState, Sender, answer_requests, new_histogram};
use super::touched::{FirstPages, RequestRecorder};
use super::unsent::{CLAIM_PAGES, Cursor, UnsentPages};
use crate::control::{Control, Handle, Phase, Progress};
use crate::error::MigrateError;
use crate::pages::{BlockRange, PageSource};

/// How often the end of the stream is tried for.
const END_TICK: Duration = Duration::from_micros(200);
/// How often it is asked whether pages are near.
const NEAR_TICK: Duration = Duration::from_micros(500);
/// How long pages are waited for with requests answered meanwhile. Then they are read, which says what is wrong.
const NEAR_WITHIN: Duration = Duration::from_secs(1);
/// How often a recording asks whether it is over.
const RECORDING_TICK: Duration = Duration::from_millis(10);
/// Longer than any real wait, and short enough to be added to a clock.
const UNTIL_IT_ENDS: Duration = Duration::from_secs(10 * 365 * 86_400);

/// The settings of a postcopy.
#[derive(Debug, Clone)]
pub struct PostcopyOptions {
    /// Longest wait for a handshake message.
    pub answer_timeout: Duration,
    /// Pages of one write of the background push while requests keep coming. Smaller answers requests sooner.
    pub batch_pages: u64,
    /// Bytes of the pages that the *destination's* memory is made of, by RAM block; 4096 for a block that is not named
    /// here. Powers of two (2 MiB: `2 << 20`) that divide the block's length.
    ///
    /// They must be the destination's own (QEMU's `info ramblock` tells them), both to start and to recover: a
    /// destination refuses other ones before it runs. Where the pages come from has no say: what was saved from 4 KiB
    /// pages goes into huge ones and the other way round. A host page is sent whole and at once, so it is also the
    /// least that a limited rate and [`batch_pages`](Self::batch_pages) apply to, and what a requested page waits for
    /// at most.
    pub page_sizes: BTreeMap<String, u64>,
    /// Pages that are sent before all others that are not requested, in this order.
    pub first: Vec<BlockRange>,
    /// Record the guest's requests for this long after its start. Meanwhile no other page is sent, so that every page
    /// that the guest touches is one that it requests.
    pub record_for: Option<Duration>,
}

impl Default for PostcopyOptions {
    fn default() -> Self {
        Self {
            answer_timeout: Duration::from_secs(30),
            batch_pages: 64,
            page_sizes: BTreeMap::new(),
            first: Vec::new(),
            record_for: None,
        }
    }
}

/// A point of a postcopy that is reported when it is passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Milestone {
    /// The destination has loaded the device state; the guest starts now.
    DevicesLoaded,
    /// Every stored page has been placed by the destination; the stream is about to end. Only from here on can the
    /// destination complete.
    AllPlaced,
}

/// Counters of a postcopy.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PostcopyStats {
    /// Pages sent with contents.
    pub normal_pages: u64,
    /// Pages sent as zero.
    pub zero_pages: u64,
    /// Requests that were answered by sending, by kind of answer.
    pub requests: u64,
    /// From the arrival of a request on the return path to the moment its page was in the kernel's hands, nanoseconds.
    pub request_latency: Histogram<u64>,
    /// The pages with contents that were requested while [`record_for`](PostcopyOptions::record_for) said so, in the
    /// order of the answers.
    pub recorded: Vec<BlockRange>,
    /// How long they were recorded.
    pub recorded_for: Duration,
    /// From the first byte to the destination's acknowledgement.
    pub elapsed: Duration,
    /// Of the main channel, both directions.
    pub main: Counters,
    /// Of the preempt channel.
    pub preempt: Option<Counters>,
}

/// A package that may be sent: everything before it is.
pub(crate) struct Package {
    /// The package, and the start of the section that the pages behind it are in.
    pub(crate) bytes: Vec<u8>,
    /// Bytes of them that let the guest run at the destination: all of the package.
    pub(crate) decisive: u64,
    /// The preempt channel, if there is one.
    pub(crate) preempt: Option<Arc<Channel>>,
}

/// The pages to send, and the blocks of the destination.
pub(crate) struct Prepared<'a> {
    begun: Instant,
    blocks: Vec<RamBlock>,
    unsent: UnsentPages<'a>,
}

/// How the role begins.
enum Opening<'b> {
    /// With the header of a stream.
    Start,
    /// With a destination that waits for recovery.
    Recovery,
    /// In the middle of a stream, behind the package. The return path is read by another reader, which notices the
    /// answer to [`PING_LOADED`](postcopy::PING_LOADED).
    Package { return_path: &'b ReturnPath, preempt: Option<Arc<Channel>> },
}

/// Opens the preempt channel when the destination is ready for it.
pub type OpenPreempt<'a> = Box<dyn FnOnce() -> Result<Channel, ChannelError> + Send + Sync + 'a>;

/// The source role in postcopy, over any [`PageSource`].
pub struct PostcopySource<'a, S: PageSource + ?Sized> {
    source: &'a S,
    channel: Arc<Channel>,
    open_preempt: Option<OpenPreempt<'a>>,
    control: Control,
    progress: Progress,
    options: PostcopyOptions,
    recovering: bool,
    /// Since when the answer to the package's PING is owed, and for how long it may be.
    owed: Option<(Instant, Duration)>,
    may_end: Box<dyn Fn() -> bool + Send + Sync + 'a>,
    observer: Box<dyn Fn(Milestone) + Send + Sync + 'a>,
}

impl<S: PageSource + ?Sized> std::fmt::Debug for PostcopySource<'_, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostcopySource").field("channel", &self.channel).field("options", &self.options).finish()
    }
}

impl<'a, S: PageSource + ?Sized> PostcopySource<'a, S> {
    /// A source that sends `source` over `channel`. It keeps a clone of the handle.
    pub fn new(source: &'a S, channel: Channel, handle: &Handle) -> Self {
        Self::over(source, Arc::new(channel), &handle.control, &handle.progress)
    }

    /// As [`new`](Self::new), over a channel that others know too.
    pub(crate) fn over(source: &'a S, channel: Arc<Channel>, control: &Control, progress: &Progress) -> Self {
        Self {
            source,
            channel,
            open_preempt: None,
            control: control.clone(),
            progress: progress.clone(),
            options: PostcopyOptions::default(),
            recovering: false,
            owed: None,
            may_end: Box::new(|| true),
            observer: Box::new(|_| {}),
        }
    }

    /// Answers requests on a second channel, which `open` connects. The destination must expect it.
    #[must_use]
    pub fn preempt(mut self, open: OpenPreempt<'a>) -> Self {
        self.open_preempt = Some(open);
        self
    }

    /// Sets the options.
    #[must_use]
    pub fn options(mut self, options: PostcopyOptions) -> Self {
        self.options = options;
        self
    }

    /// Calls `observer` as milestones are passed, on the engine's threads: it must not block.
    #[must_use]
    pub fn on_milestone(mut self, observer: impl Fn(Milestone) + Send + Sync + 'a) -> Self {
        self.observer = Box::new(observer);
        self
    }

    /// Asks `may_end` again and again between [`Milestone::AllPlaced`] and the end of the stream, which waits until it
    /// says yes. Requests are answered meanwhile.
    #[must_use]
    pub fn end_condition(mut self, may_end: impl Fn() -> bool + Send + Sync + 'a) -> Self {
        self.may_end = Box::new(may_end);
        self
    }

    /// Starts the guest at a fresh destination and sends every page.
    ///
    /// On `Err` before [`Milestone::DevicesLoaded`] the destination's VM has not run and must be thrown away. On `Err`
    /// after it the destination stalls on the pages it has not got, and [`recover`](Self::recover) continues from
    /// there.
    pub fn run(self) -> Result<PostcopyStats, MigrateError> {
        self.run_from(Opening::Start)
    }

    /// Continues with a destination whose postcopy was broken off and that waits for recovery on a new channel.
    pub fn recover(self) -> Result<PostcopyStats, MigrateError> {
        self.run_from(Opening::Recovery)
    }

    /// Prepares the pages for a destination that has `already`, whole host pages, by block.
    pub(crate) fn prepare(&self, already: &[PageBitmap]) -> Result<Prepared<'a>, MigrateError> {
        let begun = Instant::now();
        let blocks = with_page_sizes(&self.source.setup().blocks, &self.options.page_sizes)?;
        let unsent = UnsentPages::new(self.source, &blocks);
        for (block, already) in already.iter().enumerate() {
            unsent.received(block, already)?;
        }
        Ok(Prepared { begun, blocks, unsent })
    }

    /// Sends what a destination lacks that runs the guest since it has the package.
    pub(crate) fn follow(
        self,
        prepared: Prepared<'a>,
        return_path: &ReturnPath,
        preempt: Option<Arc<Channel>>,
    ) -> Result<PostcopyStats, MigrateError> {
        self.run_prepared(prepared, Opening::Package { return_path, preempt })
    }

    fn run_from(self, opening: Opening<'_>) -> Result<PostcopyStats, MigrateError> {
        let prepared = self.prepare(&[])?;
        self.run_prepared(prepared, opening)
    }

    fn run_prepared(mut self, prepared: Prepared<'_>, opening: Opening<'_>) -> Result<PostcopyStats, MigrateError> {
        let Prepared { begun, blocks, unsent } = prepared;
        let recovery = matches!(opening, Opening::Recovery);
        self.recovering = recovery;
        let reads = !matches!(opening, Opening::Package { .. });
        self.owed = (!reads).then(|| (Instant::now(), self.options.answer_timeout));
        let open_preempt = self.open_preempt.take();
        let own = ReturnPath::default();
        let return_path = match &opening {
            Opening::Package { return_path, .. } => *return_path,
            Opening::Start | Opening::Recovery => &own,
        };
        let state = SendState {
            source: self.source,
            blocks: &blocks,
            unsent,
            return_path,
            progress: &self.progress,
            normal: AtomicU64::new(0),
            zero: AtomicU64::new(0),
            unanswered: AtomicU64::new(0),
            near: Mutex::new(None),
            recorder: RequestRecorder::new(self.options.record_for),
            ending: AtomicBool::new(false),
        };
        self.progress.expect_pages(state.unsent.left());
        self.control.watch(&self.channel);
        let result = thread::scope(|scope| {
            let read = || {
                state.return_path.read_from(&self.channel, &blocks, recovery, |message| {
                    if *message == ReturnMessage::Pong(postcopy::PING_LOADED) {
                        self.progress.set_phase(Phase::PostcopyActive);
                        state.recorder.begin();
                        (self.observer)(Milestone::DevicesLoaded);
                        self.control.release();
                    }
                });
            };
            let reader = reads.then(|| scope.spawn(read));
            let opened = match opening {
                Opening::Start => self.send_prologue(&state, open_preempt),
                Opening::Recovery => self.negotiate_recovery(&state, open_preempt),
                Opening::Package { preempt, .. } => Ok(preempt),
            };
            let sent = opened.and_then(|preempt| self.drive(scope, &state, preempt));
            // With any outcome the reader must end before its borrows do.
            state.return_path.finish();
            if sent.is_err() {
                let _ = self.channel.shutdown(limosa_channel::Shutdown::Both);
            }
            if let Some(reader) = reader {
                let _ = reader.join();
            }
            sent
        });
        self.control.unwatch();
        self.control.release();
        let (latency, preempt) = result.map_err(|error| self.control.explain(error))?;
        self.progress.set_phase(Phase::Completed);
        let (recorded, recorded_for) = state.recorder.finish();
        Ok(PostcopyStats {
            normal_pages: state.normal.load(Relaxed),
            zero_pages: state.zero.load(Relaxed),
            requests: latency.len(),
            request_latency: latency,
            recorded,
            recorded_for,
            elapsed: begun.elapsed(),
            main: self.channel.counters(),
            preempt,
        })
    }

    fn drive<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        state: &'scope SendState<'_, S>,
        preempt: Option<Arc<Channel>>,
    ) -> Result<(Histogram<u64>, Option<Counters>), MigrateError> {
        state.unsent.begin();
        let answering = preempt.clone().map(|channel| {
            scope.spawn(move || {
                // Its peer may wait for that before it takes it.
                let known = channel.complete_handshake().map_err(MigrateError::from);
                let answered = known.and_then(|()| answer_requests(state, &channel));
                if answered.is_err() {
                    // The destination pauses, and the main sender finds its channel closed instead of waiting for SHUT.
                    let _ = self.channel.shutdown(limosa_channel::Shutdown::Both);
                }
                answered
            })
        });
        let pushed = self.push(state, answering.is_some());
        let finished = pushed.and_then(|latency| {
            // Not limited: the destination has everything, and could not tell a pager that has gone away.
            state.return_path.wait_shut(UNTIL_IT_ENDS)?;
            Ok(latency)
        });
        state.return_path.finish();
        let answered = match answering {
            None => Ok(new_histogram()),
            Some(thread) => {
                if finished.is_err()
                    && let Some(channel) = &preempt
                {
                    let _ = channel.shutdown(limosa_channel::Shutdown::Both);
                }
                thread.join().unwrap_or_else(|_| Err(MigrateError::Protocol("a sending thread panicked".into())))
            }
        };
        let latency = match (finished, answered) {
            (Ok(latency), Ok(answered)) => {
                let mut latency = latency;
                // Same bounds by construction, so the addition cannot fail.
                let _ = latency.add(answered);
                latency
            }
            // A failure of the page source is the cause; a closed channel is what it led to.
            (Err(_), Err(error @ MigrateError::Source(_))) | (Err(error), _) | (Ok(_), Err(error)) => {
                return Err(error);
            }
        };
        Ok((latency, preempt.map(|channel| channel.counters())))
    }

    /// Everything up to and including the package.
    fn send_prologue(
        &self,
        state: &SendState<'_, S>,
        open_preempt: Option<OpenPreempt<'_>>,
    ) -> Result<Option<Arc<Channel>>, MigrateError> {
        let start = self.source.setup();
        let mut prologue = Vec::new();
        let early = self.source.early_sections();
        postcopy::encode_postcopy_prologue(&start.configuration, start.section_id, state.blocks, early, &mut prologue)?;
        let (body, _) = self.package()?;
        let Some(open) = open_preempt else {
            self.commit()?;
            self.channel.write_all_vectored(&[IoSlice::new(&prologue), IoSlice::new(&body)])?;
            return Ok(None);
        };
        // The destination takes the second connection for the preempt channel, so the main one must have been accepted:
        // the answer to the prologue's PING proves it.
        self.channel.write_all(&prologue)?;
        state.return_path.wait_pong(postcopy::PING_RETURN_PATH, self.options.answer_timeout)?;
        let preempt = self.connect_preempt(open)?;
        self.commit()?;
        self.channel.write_all(&body)?;
        Ok(Some(preempt))
    }

    /// The package, and the PART section that every later page of this channel is in; how many bytes the package is.
    fn package(&self) -> Result<(Vec<u8>, usize), MigrateError> {
        let package = postcopy::postcopy_package(self.source.device_sections(), Some(postcopy::PING_LOADED))?;
        let mut body = Vec::with_capacity(package.len() + 32);
        postcopy::encode_packaged(&package, &mut body)?;
        let length = body.len();
        section::encode_part(self.source.setup().section_id, &mut body);
        Ok((body, length))
    }

    /// Sends the commands that discard what the destination does not have, one at least, in a stream whose destination
    /// has answered. On success a stop waits until the package is answered.
    pub(crate) fn ready_package(
        &mut self,
        return_path: &ReturnPath,
        discards: &[u8],
        prepared: &Prepared<'_>,
    ) -> Result<Package, MigrateError> {
        let (bytes, decisive) = self.package()?;
        let preempt = self.open_preempt.take().map(|open| self.connect_preempt(open)).transpose()?;
        self.channel.write_all(discards)?;
        self.progress.expect_pages(prepared.unsent.left());
        return_path.still_open()?;
        self.commit()?;
        Ok(Package { bytes, decisive: to_u64(decisive), preempt })
    }

    /// The last moment to turn back. A destination that is left while it loads the package can neither go on nor give
    /// up: its main loop waits for pages that only this side has. So from here to the answer of the package's PING a
    /// stop has to wait.
    fn commit(&self) -> Result<(), MigrateError> {
        self.control.hold();
        match self.control.stop_requested() {
            None => Ok(()),
            Some(stop) => {
                self.control.release();
                Err(stop.into())
            }
        }
    }

    fn connect_preempt(&self, open: OpenPreempt<'_>) -> Result<Arc<Channel>, MigrateError> {
        let channel = Arc::new(open()?);
        self.control.watch(&channel);
        Ok(channel)
    }

    /// Asks which pages the destination has, and agrees with it to go on.
    fn negotiate_recovery(
        &self,
        state: &SendState<'_, S>,
        open_preempt: Option<OpenPreempt<'_>>,
    ) -> Result<Option<Arc<Channel>>, MigrateError> {
        let start = self.source.setup();
        for (index, block) in start.blocks.iter().enumerate() {
            let mut bytes = Vec::new();
            Command::ReceiveBitmap { block: block.name.clone() }.encode(&mut bytes)?;
            self.channel.write_all(&bytes)?;
            let (name, bitmap) = state.return_path.wait_bitmap(self.options.answer_timeout)?;
            if name != block.name {
                return Err(MigrateError::Protocol(format!(
                    "asked for the received pages of RAM block {}, the destination reports those of {name:?}",
                    block.name
                )));
            }
            let pages = block.used_length / PAGE_SIZE;
            let received = PageBitmap::from_le_bytes(pages, &bitmap).map_err(|error| {
                MigrateError::Protocol(format!("the bitmap of received pages of RAM block {}: {error}", block.name))
            })?;
            state.unsent.received(index, &received)?;
        }
        self.progress.expect_pages(state.unsent.left());
        let preempt = open_preempt.map(|open| self.connect_preempt(open)).transpose()?;
        let mut bytes = Vec::new();
        Command::PostcopyResume.encode(&mut bytes)?;
        self.channel.write_all(&bytes)?;
        if let Some(preempt) = &preempt {
            // Over TLS the destination may take the channel only after its handshake, and answers when it has it.
            preempt.complete_handshake()?;
        }
        state.return_path.wait_resume_ack(self.options.answer_timeout)?;
        // Its guest has run before.
        state.recorder.begin();
        self.progress.set_phase(Phase::PostcopyActive);
        (self.observer)(Milestone::DevicesLoaded);
        bytes.clear();
        section::encode_part(start.section_id, &mut bytes);
        self.channel.write_all(&bytes)?;
        Ok(preempt)
    }

    /// Fails if a destination that was switched has not said for too long that it has loaded its devices.
    fn check_loaded(&self, state: &SendState<'_, S>) -> Result<(), MigrateError> {
        match self.owed {
            Some((since, answer_timeout))
                if since.elapsed() >= answer_timeout && !state.return_path.has_pong(postcopy::PING_LOADED) =>
            {
                Err(MigrateError::AnswerTimedOut { what: "the package of device state", waited: answer_timeout })
            }
            _ => Ok(()),
        }
    }

    /// The main channel's sender: requests first (unless the preempt channel has them), then the pages that are wanted
    /// first, then everything else, then the end.
    fn push(&self, state: &SendState<'_, S>, preempted: bool) -> Result<Histogram<u64>, MigrateError> {
        let mut sender = Sender::new(state, &self.channel)?;
        let mut cursor = Cursor { block: 0, page: PageNumber(0) };
        let batch = self.options.batch_pages.clamp(1, CLAIM_PAGES);
        let mut first = FirstPages::new(&self.options.first);
        loop {
            self.control.check()?;
            self.check_loaded(state)?;
            if !preempted {
                while let Some(request) = state.return_path.try_request() {
                    cursor = Cursor { block: request.block, page: request.pages.end };
                    sender.answer(request)?;
                }
            }
            if state.return_path.has_ended() {
                return Err(state.return_path.outcome());
            }
            if state.recorder.is_recording(&self.control) {
                if preempted {
                    thread::sleep(RECORDING_TICK);
                } else if let Some(request) = state.return_path.wait_request(RECORDING_TICK) {
                    sender.answer(request)?;
                }
                continue;
            }
            // A limited rate is waited for where a request can cut the wait short.
            let pause = self.control.rate_limit().delay();
            if !pause.is_zero() {
                if preempted {
                    thread::sleep(pause.min(Duration::from_millis(10)));
                } else if let Some(request) = state.return_path.wait_request(pause.min(Duration::from_millis(100))) {
                    cursor = Cursor { block: request.block, page: request.pages.end };
                    sender.answer(request)?;
                }
                continue;
            }
            let claimed = first.claim(&state.unsent, batch).or_else(|| {
                if let Some(near) = state.near.lock().take() {
                    cursor = near;
                }
                state.unsent.claim_run(&mut cursor, batch)
            });
            let Some((block, pages)) = claimed else { break };
            if !preempted {
                self.await_near(state, &mut sender, BlockRange { block, pages })?;
            }
            let contents = sender.send(block, pages)?;
            self.control.rate_limit().spend(contents.saturating_mul(PAGE_SIZE));
        }
        self.end(state, &mut sender, preempted)?;
        Ok(sender.latency)
    }

    /// Answers requests while pages that nobody has requested are still far away.
    fn await_near(
        &self,
        state: &SendState<'_, S>,
        sender: &mut Sender<'_, S>,
        BlockRange { block, pages }: BlockRange,
    ) -> Result<(), MigrateError> {
        let until = Instant::now() + NEAR_WITHIN;
        while !state.source.is_near(block, pages) && Instant::now() < until {
            self.control.check()?;
            if state.return_path.has_ended() {
                return Err(state.return_path.outcome());
            }
            if let Some(request) = state.return_path.wait_request(NEAR_TICK) {
                sender.answer(request)?;
            }
        }
        Ok(())
    }

    /// Ends the stream, once the destination has placed every page and has no more need of answers.
    ///
    /// A destination that is told the end completes with what it has. So first it is asked, by a PING behind the last
    /// page, whether it has come so far; and until it has loaded its devices it may still wait for pages that were
    /// never stored, which are answered meanwhile.
    fn end(&self, state: &SendState<'_, S>, sender: &mut Sender<'_, S>, preempted: bool) -> Result<(), MigrateError> {
        let start = self.source.setup();
        let mut bytes = Vec::new();
        let (mut asked, mut placed) = (false, false);
        loop {
            self.control.check()?;
            self.check_loaded(state)?;
            if state.return_path.has_ended() {
                return Err(state.return_path.outcome());
            }
            // Not earlier: a destination that has failed to load its devices trips over a command (found with QEMU
            // 10.0.2).
            if !asked && (self.recovering || state.return_path.has_pong(postcopy::PING_LOADED)) {
                asked = true;
                ram::encode_eos(start.section_id, &mut bytes);
                Command::Ping(postcopy::PING_PACKAGED).encode(&mut bytes)?;
                section::encode_part(start.section_id, &mut bytes);
                self.channel.write_all(&bytes)?;
            }
            // In this order: when nothing is left to claim, what the preempt channel's thread has claimed is counted.
            // It is not sent yet, and reading it may still fail.
            let all = state.return_path.has_pong(postcopy::PING_PACKAGED)
                && state.unsent.left() == 0
                && state.unanswered.load(Ordering::Acquire) == 0;
            if all && !placed {
                placed = true;
                (self.observer)(Milestone::AllPlaced);
            }
            if all && (self.may_end)() {
                break;
            }
            if preempted {
                thread::sleep(END_TICK);
            } else if let Some(request) = state.return_path.wait_request(END_TICK) {
                sender.answer(request)?;
            }
        }
        while !preempted && let Some(request) = state.return_path.try_request() {
            sender.answer(request)?;
        }
        state.unsent.check_claimed()?;
        bytes.clear();
        ram::encode_eos(start.section_id, &mut bytes);
        section::encode_end(start.section_id, &mut bytes);
        ram::encode_eos(start.section_id, &mut bytes);
        section::encode_eof(&mut bytes);
        state.ending.store(true, Ordering::Release);
        self.progress.set_phase(Phase::Completing);
        Ok(self.channel.write_all(&bytes)?)
    }
}
