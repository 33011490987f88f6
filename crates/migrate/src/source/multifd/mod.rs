//! Sending pages on the multifd channels, a thread each.
//!
//! The laws of this module: **every page of a round goes out once, on whichever channel is free next**, and **the main
//! channel passes a synchronization point only when the pages before it are on their way**: each channel begins with a
//! SYNC packet, paired with the synchronization point in START, and ends each round with one for each synchronization
//! point behind its last page. The threads last over all rounds. The first channel that fails ends all of them.
//!
//! A zero page in a packet is believed by QEMU without looking: it takes memory that no page has come for yet for
//! fresh. So only pages of blocks that are known to be zeroed go out that way; every other zero page is a record on the
//! main channel, which is looked at and cleared if need be.

mod compressor;
mod sender;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Shutdown, ZeroCopy};
use limosa_page::{BrokenInvariant, PageBitmap, PageRange, ZeroMethod};
use limosa_stream::MultifdRules;
use limosa_stream::multifd::{Compression, PACKET_PAGES};

use super::dirty_page_queue::DirtyPageQueue;
use super::records::{RecordWriter, Sent, ZERO_RECORD, Zeros};
use crate::control::Control;
use crate::control::{MovedPages, Progress};
use crate::error::MigrateError;
use crate::pages::PageSource;
use parking_lot::{Condvar, Mutex, MutexGuard};
use sender::ChannelSender;

/// Most multifd channels: more only wait for each other.
pub const CHANNELS_MAX: usize = 16;

/// The multifd channels, in the order of their numbers.
///
/// # Errors
/// More than [`CHANNELS_MAX`], or packets of no page or of more than QEMU takes.
pub(crate) fn checked(
    channels: Vec<Channel>,
    options: &MultifdSourceOptions,
) -> Result<Vec<Arc<Channel>>, MigrateError> {
    if channels.len() > CHANNELS_MAX {
        return Err(MigrateError::Protocol(format!("{} channels, of at most {CHANNELS_MAX}", channels.len())));
    }
    if !(1..=PACKET_PAGES).contains(&options.packet_pages) {
        let why = format!("packets of {} pages, of 1 to {PACKET_PAGES}", options.packet_pages);
        return Err(MigrateError::Protocol(why));
    }
    Ok(channels.into_iter().map(Arc::new).collect())
}

/// The destination may take nothing for `answer_timeout` on any of these channels.
pub(crate) fn set_write_timeout<'a>(
    channels: impl IntoIterator<Item = &'a Arc<Channel>>,
    answer_timeout: Duration,
) -> Result<(), MigrateError> {
    for channel in channels {
        channel.set_timeouts(None, Some(answer_timeout))?;
    }
    Ok(())
}

/// How pages go out on the multifd channels.
#[derive(Debug, Clone)]
pub struct MultifdSourceOptions {
    /// How their contents are compressed; the destination has to expect the same.
    pub compression: Compression,
    /// How hard it is tried: 0 to 9 for zlib, 1 to 20 for zstd. QEMU's default, for either, is 1.
    pub level: u8,
    /// The destination VM's UUID, which each channel states and the destination compares. `None`: the one that the
    /// stream's configuration has, or zeros.
    pub uuid: Option<[u8; 16]>,
    /// Pages of a packet, 1 to 128: QEMU takes no more behind one header, which has places for 128 however many there
    /// are.
    pub packet_pages: usize,
    /// Whether to look if stored pages are zero. Then every page is read and looked at; otherwise stored pages of a
    /// source that knows their [location](PageSource::file_location) are passed on without that.
    pub detect_zero: bool,
    /// How stored pages leave that need not be looked at: spliced out of their file (sendfile) where that can be, by
    /// default; read and copied ([`ZeroCopy::Off`]); or spliced or not at all ([`ZeroCopy::Splice`]). Guest memory
    /// leaves as its channels [say](limosa_channel::Options::zero_copy).
    pub zero_copy: ZeroCopy,
    /// How the destination uses multifd, if more is known of it than the machine type's name.
    pub rules: Option<MultifdRules>,
}

impl Default for MultifdSourceOptions {
    fn default() -> Self {
        let (compression, zero_copy) = (Compression::None, ZeroCopy::Auto);
        let rules = None;
        Self { compression, level: 1, uuid: None, packet_pages: PACKET_PAGES, detect_zero: true, zero_copy, rules }
    }
}

impl MultifdSourceOptions {
    /// Why stored pages have to be read.
    fn why_read<S: PageSource + ?Sized>(&self, source: &S, return_path: bool) -> Option<&'static str> {
        let stored = (0..source.setup().blocks.len())
            .find_map(|block| Some((block, source.stored_bitmap(block).runs().next()?)));
        if !return_path {
            Some("there is no answer that would confirm arrival before the file changes, so pages are read and copied")
        } else if self.detect_zero {
            Some("pages are looked at if they are zero, so they are read")
        } else if self.compression != Compression::None {
            Some("pages are compressed, so they are read")
        } else if stored.is_some_and(|(block, run)| source.file_location(block, run.start).is_none()) {
            Some("the snapshot's checksums are verified, so its pages are read")
        } else {
            None
        }
    }

    /// Refuses a named way of sending stored pages that is not possible. Can be called before anything is connected.
    /// `return_path`: whether the destination answers.
    ///
    /// # Errors
    /// [`MigrateError::ZeroCopy`].
    pub fn check_zero_copy<S: PageSource + ?Sized>(&self, source: &S, return_path: bool) -> Result<(), MigrateError> {
        match self.zero_copy {
            ZeroCopy::Off | ZeroCopy::Auto => Ok(()),
            ZeroCopy::Splice => {
                self.why_read(source, return_path).map_or(Ok(()), |why| Err(MigrateError::ZeroCopy(why)))
            }
            ZeroCopy::Msg => {
                Err(MigrateError::ZeroCopy("MSG_ZEROCOPY lends memory, and the pages are in a file: splice"))
            }
        }
    }
}

/// The state that the channels share.
#[derive(Debug)]
pub(crate) struct Multifd<'a, S: PageSource + ?Sized> {
    pub(super) source: &'a S,
    pub(super) control: &'a Control,
    pub(super) progress: &'a Progress,
    pub(super) options: &'a MultifdSourceOptions,
    /// The main channel and the multifd channels: what a failure shuts down.
    pub(super) main: &'a Arc<Channel>,
    pub(super) channels: &'a [Arc<Channel>],
    /// For each block whether its memory is zero at the destination.
    pub(super) zeroed: Vec<bool>,
    /// Whether contents may go out of their file, unread: their receipt will be confirmed.
    pub(super) in_place: bool,
    rules: MultifdRules,
    queue: Arc<DirtyPageQueue>,
    packets: AtomicU64,
    normal: AtomicU64,
    zero: AtomicU64,
    left_out: AtomicU64,
    /// Of the channel that was busy longest in this round, nanoseconds.
    busy: AtomicU64,
    failing: AtomicBool,
    /// Time is up: what was begun is not held back any more.
    hurried: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Rounds that were begun.
    rounds: u64,
    plan: Arc<RoundPlan>,
    /// Channels that still have pages of this round to send.
    busy: usize,
    /// Zero pages that the main channel is to tell of.
    zeros: Vec<(usize, PageRange)>,
    failed: Option<MigrateError>,
    /// All pages are sent: what fails now is no affair of the channels.
    over: bool,
}

/// The way in which the pages of a round are sent.
#[derive(Debug, Default)]
pub(crate) struct RoundPlan {
    /// The treatment of zero pages, by block.
    pub(crate) zeros: Vec<Zeros>,
    /// How guest memory is looked at.
    pub(crate) method: ZeroMethod,
    /// SYNC packets that each channel owes behind its last page: the synchronization points of the main channel from
    /// there to the next round.
    pub(crate) syncs: usize,
    /// Whether the rate limit holds for it.
    pub(crate) limited: bool,
}

/// The result of a round.
#[derive(Debug, Default)]
pub(crate) struct RoundSent {
    pub(crate) sent: Sent,
    /// Time in calls, and held back by the limit, of the channel that was busy longest.
    pub(crate) busy: Duration,
    /// Pages that were not sent, by block, because time was up.
    pub(crate) rest: Option<Vec<PageBitmap>>,
}

/// The parts of a [`Multifd`].
pub(crate) struct Parts<'a, S: PageSource + ?Sized> {
    pub(crate) source: &'a S,
    pub(crate) control: &'a Control,
    pub(crate) progress: &'a Progress,
    pub(crate) options: &'a MultifdSourceOptions,
    pub(crate) main: &'a Arc<Channel>,
    pub(crate) channels: &'a [Arc<Channel>],
    /// For each block whether its memory is zero at the destination.
    pub(crate) zeroed: Vec<bool>,
    /// The queue of a round's pages.
    pub(crate) queue: Arc<DirtyPageQueue>,
    pub(crate) return_path: bool,
}

impl<'a, S: PageSource + ?Sized> Multifd<'a, S> {
    pub(crate) fn new(parts: Parts<'a, S>) -> Self {
        let Parts { source, control, progress, options, main, channels, zeroed, queue, return_path } = parts;
        Self {
            source,
            control,
            progress,
            options,
            main,
            channels,
            zeroed,
            in_place: options.zero_copy != ZeroCopy::Off && options.why_read(source, return_path).is_none(),
            rules: options.rules.unwrap_or_else(|| source.setup().configuration.multifd_rules()),
            queue,
            packets: AtomicU64::new(0),
            normal: AtomicU64::new(0),
            zero: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
            busy: AtomicU64::new(0),
            failing: AtomicBool::new(false),
            hurried: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Sends all pages in one round: those with contents on the channels, zero pages that have to be sent as records on
    /// the main channel, in the PART section that is open there. When it returns, every channel has sent its last
    /// SYNCs.
    ///
    /// `stored` are the pages with contents, by block. `answered` waits until the destination has answered, which is
    /// not before every channel has begun.
    pub(super) fn send_pages(
        &self,
        stored: Vec<PageBitmap>,
        answered: impl FnOnce() -> Result<(), MigrateError>,
    ) -> Result<MovedPages, MigrateError> {
        let blocks = &self.source.setup().blocks;
        let sent = thread::scope(|scope| {
            let _ending = self.spawn(scope);
            answered().map_err(|error| self.fail_with(error))?;
            let zeros = if self.options.detect_zero { Zeros::Told } else { Zeros::Unknown };
            // With the old rule PART and END have one each, else there is the one in END.
            let syncs = if self.rules.sync_at_every_section { 2 } else { 1 };
            let plan = RoundPlan { zeros: vec![zeros; blocks.len()], method: ZeroMethod::best(), syncs, limited: true };
            let mut records = RecordWriter::new(self.main, blocks)?;
            let report = |records: &mut RecordWriter<'_>| self.tell_gaps(records);
            self.queue.start(stored);
            let sent = self.send_round(plan, &mut records, report, None)?;
            self.queue.check_spent()?;
            Ok::<_, MigrateError>(sent)
        });
        let Sent { normal, zero, .. } = sent?.sent;
        Ok(MovedPages { normal, zero, resent: 0 })
    }

    /// Starts a thread for each channel, which send rounds until what is returned is dropped.
    #[must_use]
    pub(crate) fn spawn<'scope>(&'scope self, scope: &'scope thread::Scope<'scope, '_>) -> Ending<'scope, 'a, S> {
        for (id, channel) in (0_u8..).zip(self.channels) {
            let started = thread::Builder::new().name(format!("multifd {id}")).spawn_scoped(scope, move || {
                let working = Working(self);
                if let Err(error) = ChannelSender::new(self, channel, id).and_then(ChannelSender::run) {
                    working.0.fail(error);
                }
            });
            if let Err(error) = started {
                self.fail(MigrateError::Thread(error));
            }
        }
        Ending(self)
    }

    /// Sends the pages that the queue hands out, `tell` meanwhile saying on the main channel what is known to be zero.
    /// When it returns, every channel has sent its SYNCs behind them. From `deadline` on no further pages are begun.
    pub(crate) fn send_round(
        &self,
        plan: RoundPlan,
        records: &mut RecordWriter<'_>,
        tell: impl FnOnce(&mut RecordWriter<'_>) -> Result<(), MigrateError>,
        deadline: Option<Instant>,
    ) -> Result<RoundSent, MigrateError> {
        for counter in [&self.normal, &self.zero, &self.left_out, &self.busy] {
            counter.store(0, Relaxed);
        }
        self.hurried.store(false, Relaxed);
        let limited = plan.limited;
        let mut state = self.lock();
        (state.busy, state.plan) = (self.channels.len(), Arc::new(plan));
        state.rounds += 1;
        drop(state);
        self.changed.notify_all();
        let mut rest = None;
        let report = tell(records).and_then(|()| {
            while let Some(found) = self.next_zeros(deadline, &mut rest) {
                for (block, run) in found {
                    records.send_zero(block, run)?;
                    if limited {
                        self.control.rate_limit().spend(run.len().saturating_mul(ZERO_RECORD));
                    }
                    self.count(Sent { zero: run.len(), ..Sent::default() });
                }
            }
            self.check()
        });
        // What failed first is the cause, whichever thread noticed.
        report.map_err(|error| self.fail_with(error))?;
        let [normal, zero, left_out] = [&self.normal, &self.zero, &self.left_out].map(|counter| counter.load(Relaxed));
        let busy = Duration::from_nanos(self.busy.load(Relaxed)).max(records.take_busy());
        Ok(RoundSent { sent: Sent { normal, zero, left_out }, busy, rest: rest.transpose()? })
    }

    /// The channels have done their part: what fails from now on is no affair of theirs.
    pub(crate) fn is_over(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }

    /// Makes sure, once the destination has said that it has taken all pages, that it has taken those of every channel,
    /// and that they were those of the file. A destination that expects fewer channels turns the others away, together
    /// with what their sockets still hold, and means to have everything.
    pub(crate) fn check_taken(&self) -> Result<(), MigrateError> {
        for (id, channel) in (0_u8..).zip(self.channels) {
            if !matches!(channel.peek(&mut [0]), Ok(None)) {
                let why = format!("the destination has closed it; it expects fewer than {}", self.channels.len());
                return Err(MigrateError::Multifd { id, source: Box::new(MigrateError::Protocol(why)) });
            }
        }
        if self.in_place { self.source.check_unchanged().map_err(MigrateError::Source) } else { Ok(()) }
    }

    /// Bytes that the kernel has taken on these channels.
    pub(crate) fn bytes_out(&self) -> u64 {
        self.channels.iter().map(|channel| channel.counters().bytes_out).sum()
    }

    /// Whether the main channel says where its synchronization points are.
    pub(crate) fn joins_by_word(&self) -> bool {
        !self.rules.sync_at_every_section
    }

    /// Whether zero pages of the block go into packets. Elsewhere QEMU would believe it, and must not: see above.
    fn tells_in_packet(&self, block: usize) -> bool {
        !self.rules.zero_pages_on_main && self.zeroed.get(block) == Some(&true)
    }

    /// Says on the main channel of all pages that are not stored that they are zero, where the destination's memory is
    /// not.
    fn tell_gaps(&self, records: &mut RecordWriter<'_>) -> Result<(), MigrateError> {
        for (block, zeroed) in self.zeroed.iter().enumerate() {
            if *zeroed {
                continue;
            }
            for run in self.source.stored_bitmap(block).gaps() {
                self.check()?;
                self.source.confirm_zero(block, run).map_err(MigrateError::Source)?;
                records.send_zero(block, run)?;
                self.count(Sent { zero: run.len(), ..Sent::default() });
            }
        }
        Ok(())
    }

    /// Zero pages that channels have found; waits for some. `None` when no more will be found in this round.
    fn next_zeros(
        &self,
        mut deadline: Option<Instant>,
        rest: &mut Option<Result<Vec<PageBitmap>, BrokenInvariant>>,
    ) -> Option<Vec<(usize, PageRange)>> {
        let mut state = self.lock();
        loop {
            if self.failing.load(Ordering::Acquire) {
                return None;
            }
            if !state.zeros.is_empty() {
                return Some(std::mem::take(&mut state.zeros));
            }
            if state.busy == 0 {
                return None;
            }
            let Some(wait) = deadline.filter(|_| rest.is_none()).map(|at| at.saturating_duration_since(Instant::now()))
            else {
                self.changed.wait(&mut state);
                continue;
            };
            if wait.is_zero() {
                *rest = Some(self.queue.take_rest());
                self.hurried.store(true, Relaxed);
                deadline = None;
            } else {
                self.changed.wait_for(&mut state, wait);
            }
        }
    }

    /// The next round for a channel that has sent `rounds`; waits for it. `None` when there will be none.
    fn next_round(&self, rounds: &mut u64) -> Option<Arc<RoundPlan>> {
        let mut state = self.lock();
        loop {
            if self.failing.load(Ordering::Acquire) || state.over {
                return None;
            }
            if state.rounds > *rounds {
                *rounds = state.rounds;
                return Some(Arc::clone(&state.plan));
            }
            self.changed.wait(&mut state);
        }
    }

    /// A channel has sent its part of the round, and was busy so long.
    fn done(&self, busy: Duration) {
        self.busy.fetch_max(u64::try_from(busy.as_nanos()).unwrap_or(u64::MAX), Relaxed);
        self.lock().busy -= 1;
        self.changed.notify_all();
    }

    /// Leaves it to the main channel to tell of these zero pages.
    fn leave_zero(&self, block: usize, found: &[PageRange]) {
        if found.is_empty() {
            return;
        }
        self.lock().zeros.extend(found.iter().map(|run| (block, *run)));
        self.changed.notify_all();
    }

    /// The first failure counts; it ends all that is under way on any channel.
    fn fail(&self, error: MigrateError) {
        self.fail_for(|| error);
    }

    /// As [`fail`](Self::fail); what failed first.
    pub(crate) fn fail_with(&self, error: MigrateError) -> MigrateError {
        let mut mine = Some(error);
        self.fail_for(|| mine.take().unwrap_or_else(another));
        let first = self.lock().failed.take();
        first.or(mine).unwrap_or_else(another)
    }

    /// As [`fail`](Self::fail), for a reason that is fetched only if it is one.
    pub(crate) fn fail_for(&self, reason: impl FnOnce() -> MigrateError) {
        let mut state = self.lock();
        if state.over {
            return;
        }
        if !self.failing.swap(true, Ordering::AcqRel) {
            state.failed = Some(reason());
        }
        drop(state);
        self.changed.notify_all();
        for channel in self.channels.iter().chain([self.main]) {
            // It may be closed already, which is what we want of it.
            let _ = channel.shutdown(Shutdown::Both);
        }
    }

    /// Fails if the job was stopped, or another channel has failed.
    fn check(&self) -> Result<(), MigrateError> {
        self.control.check()?;
        if self.failing.load(Ordering::Acquire) {
            return Err(another());
        }
        Ok(())
    }

    fn is_hurried(&self) -> bool {
        self.hurried.load(Relaxed)
    }

    /// The next packet's number: they are counted over all channels.
    fn next_packet(&self) -> u64 {
        self.packets.fetch_add(1, Relaxed)
    }

    fn count(&self, sent: Sent) {
        self.normal.fetch_add(sent.normal, Relaxed);
        self.zero.fetch_add(sent.zero, Relaxed);
        self.left_out.fetch_add(sent.left_out, Relaxed);
        self.progress.add_moved(MovedPages { normal: sent.normal, zero: sent.zero, resent: 0 });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

fn another() -> MigrateError {
    MigrateError::Protocol("another channel has failed".into())
}

/// A channel's thread at work: if it panics, the round fails instead of waiting for it.
struct Working<'m, 'a, S: PageSource + ?Sized>(&'m Multifd<'a, S>);

impl<S: PageSource + ?Sized> Drop for Working<'_, '_, S> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.fail(MigrateError::Protocol("a sending thread panicked".into()));
        }
    }
}

/// The threads of the channels: they end when it is dropped.
pub(crate) struct Ending<'m, 'a, S: PageSource + ?Sized>(&'m Multifd<'a, S>);

impl<S: PageSource + ?Sized> Drop for Ending<'_, '_, S> {
    fn drop(&mut self) {
        self.0.is_over();
    }
}
