//! Copies disks to another disk, of the same or another format.
//!
//! Law: known zeros, and contents that the target's backing image has already, are neither read nor written; at most
//! [`ConvertOptions::max_in_flight`] buffers of [`ConvertOptions::chunk_size`] bytes are in use, and one more for each
//! with [`ConvertOptions::compress`]. `plan` computes the steps; this module carries them out, with one worker for each
//! request: it takes the next piece, reads it, compresses it if it should, and writes it when its turn has come.
//!
//! The target is not closed, and nothing is made durable: the caller that opened it does that, with
//! [`crate::Disk::close`].

mod bitmaps;
mod compressing;
mod counters;
mod offload;
mod options;
mod plan;
mod request;
mod resume;
mod source;
mod stream;
mod turn;

use std::ops::{ControlFlow, Range};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use async_lock::Mutex;
use futures_util::TryStreamExt;
use futures_util::future::try_join_all;
use futures_util::stream::FuturesUnordered;
use limosa_page::{broken_invariant, to_u64};
use limosa_storage::{Buffer, block_on};

use super::operation::{DiskOperation, OperationError, Progress, ProgressObserver};
use crate::disk::{BlockStatus, Disk};
use crate::error::ImageError;
use crate::offset::GuestOffset;
use compressing::{Compressing, Write};
pub use counters::ConvertCounters;
pub use options::ConvertOptions;
use plan::{Action, Content, Cutter, Rules, Span, Step};
pub use request::{ConvertRequest, ConvertTarget, CopyBitmaps, NewTarget, PreparedConversion};
use resume::Checkpoints;
pub use resume::ResumeOptions;
use source::Shared;
pub(crate) use source::{SECTOR, Source, index, is_salvageable};
pub(crate) use stream::wanted_clusters;
pub use stream::{InputStream, OutputStream, Streams};
use stream::{Piece, RawInput};
use turn::Turn;

/// The bytes that a conversion of these disks writes: the sum of their lengths, each in whole sectors.
///
/// # Errors
/// [`OperationError::TooLarge`].
pub fn length(sources: &[Arc<dyn Disk>]) -> Result<u64, OperationError> {
    Ok(Source::new(sources, None)?.len())
}

/// Copies the sources, one after the other, to the beginning of the target.
///
/// Of a conversion that is dropped or fails, the target has anything.
///
/// # Errors
/// [`OperationError`].
pub async fn convert(
    sources: &[Arc<dyn Disk>],
    target: &dyn Disk,
    options: &ConvertOptions,
    watch: ProgressObserver<'_>,
) -> Result<ConvertCounters, OperationError> {
    let conversion = Conversion::new(sources, target, options, watch)?;
    let workers: FuturesUnordered<_> = (0..options.max_in_flight.max(1)).map(|_| conversion.worker()).collect();
    let mut counters = ConvertCounters::default();
    workers
        .try_for_each(|part| {
            counters.add(part);
            std::future::ready(Ok(()))
        })
        .await?;
    Ok(counters)
}

/// Copies as [`convert`] does, with a thread for each request, this one included: several processors copy from the page
/// cache, and no request moves to another thread if storages let their caller wait
/// ([`limosa_storage::Io::CallerThread`]).
///
/// # Errors
/// [`OperationError`].
pub fn convert_on_threads(
    sources: &[Arc<dyn Disk>],
    target: &dyn Disk,
    options: &ConvertOptions,
    watch: ProgressObserver<'_>,
) -> Result<ConvertCounters, OperationError> {
    Conversion::new(sources, target, options, watch)?.on_threads()
}

/// Copies as [`convert_on_threads`] does, and records what is done. Pieces are written in order.
fn convert_recorded(
    sources: &[Arc<dyn Disk>],
    target: &dyn Disk,
    options: &ConvertOptions,
    checkpoints: &Checkpoints,
    watch: ProgressObserver<'_>,
) -> Result<ConvertCounters, OperationError> {
    let mut conversion = Conversion::new(sources, target, options, watch)?;
    conversion.checkpoints = Some(checkpoints);
    conversion.on_threads()
}

/// Copies a stream to the beginning of the target, as [`convert_on_threads`] does. `grows`: the target becomes as long
/// as the stream.
fn convert_stream(
    input: RawInput,
    target: &dyn Disk,
    options: &ConvertOptions,
    grows: bool,
    watch: ProgressObserver<'_>,
) -> Result<ConvertCounters, OperationError> {
    let conversion = Conversion::new(&[], target, options, watch)?.with_input(input, grows);
    let counters = conversion.on_threads()?;
    conversion.finish()?;
    Ok(counters)
}

impl Conversion<'_> {
    /// Reports the end of a stream.
    fn finish(&self) -> Result<(), OperationError> {
        let (done, moved) = (self.done.load(Ordering::Relaxed), self.written.load(Ordering::Relaxed));
        match (self.watch)(Progress { done, total: done, moved }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(OperationError::Stopped),
        }
    }

    fn on_threads(&self) -> Result<ConvertCounters, OperationError> {
        let work = || {
            let all_is_well = StopUnless { well: false, conversion: self };
            let outcome = block_on(self.worker());
            all_is_well.is(outcome.is_ok());
            outcome
        };
        let outcomes = thread::scope(|scope| {
            let named = || thread::Builder::new().name("convert".into());
            // Without the memory for as many, there are fewer.
            let threads: Vec<_> =
                (1..self.options.max_in_flight).map_while(|_| named().spawn_scoped(scope, work).ok()).collect();
            let mut outcomes = vec![work()];
            outcomes
                .extend(threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))));
            outcomes
        });
        let mut counters = ConvertCounters::default();
        for outcome in outcomes {
            counters.add(outcome?);
        }
        Ok(counters)
    }
}

/// Stops the others if this one fails, or panics.
struct StopUnless<'a> {
    well: bool,
    conversion: &'a Conversion<'a>,
}

impl StopUnless<'_> {
    fn is(mut self, well: bool) {
        self.well = well;
    }
}

impl Drop for StopUnless<'_> {
    fn drop(&mut self) {
        if !self.well {
            self.conversion.stop();
        }
    }
}

/// The total of a progress whose end is not known: a source that is a stream.
const UNKNOWN_TOTAL: u64 = u64::MAX;

struct Conversion<'a> {
    source: Source,
    target: &'a dyn Disk,
    options: &'a ConvertOptions,
    rules: Rules,
    piece: u64,
    /// Bytes that are converted, for those who watch.
    total: u64,
    feed: Mutex<Feed>,
    turn: Turn,
    done: AtomicU64,
    written: AtomicU64,
    /// The kernel has said that it does not copy.
    plainly: AtomicBool,
    /// A worker has failed.
    stopped: AtomicBool,
    /// Records of what is done; only if pieces are written in order.
    checkpoints: Option<&'a Checkpoints>,
    watch: ProgressObserver<'a>,
}

/// A part of the work.
enum Work {
    Step(Step),
    /// Bytes of a stream, which have been read.
    Read(Piece),
}

/// The work that is left.
struct Feed {
    cutter: Cutter,
    /// The source, if it is a stream, and whether the target grows with it.
    input: Option<(RawInput, bool)>,
    /// Up to where the map of the source is known.
    at: u64,
    /// The number of the next step that writes.
    number: u64,
}

/// Bytes that are zeroed at once: the conversion may be stopped between two such parts.
const ZERO_AT_ONCE: u64 = 256 << 20;

impl<'a> Conversion<'a> {
    fn new(
        sources: &[Arc<dyn Disk>],
        target: &'a dyn Disk,
        options: &'a ConvertOptions,
        watch: ProgressObserver<'a>,
    ) -> Result<Self, OperationError> {
        let source = Source::new(sources, options.window.as_ref())?;
        let total = source.len();
        if target.len() < total {
            return Err(OperationError::TargetTooSmall {
                target: target.name().to_string(),
                has: target.len(),
                needs: total,
            });
        }
        let compressor = options.compress.map(|compress| target.compressor(compress.level)).transpose()?;
        let unit = compressor.map_or(1, |compressor| to_u64(compressor.unit()));
        let granularity = target.allocation_unit().max(unit);
        let piece = options.chunk_size.max(granularity).max(SECTOR).next_multiple_of(granularity);
        let unit = options.sparse.checked_ilog2().map_or(SECTOR, |bits| 1 << bits).max(SECTOR);
        Ok(Conversion {
            feed: Mutex::new(Feed {
                cutter: Cutter::new(piece, total, options.sparse == 0),
                input: None,
                at: options.start,
                number: 0,
            }),
            rules: Rules { sparse: options.sparse, unit, granularity, target_is_zero: options.target_is_zero },
            source,
            target,
            options,
            piece,
            total,
            turn: Turn::default(),
            done: AtomicU64::new(options.start),
            written: AtomicU64::new(0),
            plainly: AtomicBool::new(options.compress.is_some()),
            stopped: AtomicBool::new(false),
            checkpoints: None,
            watch,
        })
    }

    /// Takes its contents from a stream; `grows`: the target becomes as long as they are.
    fn with_input(self, input: RawInput, grows: bool) -> Self {
        let Self { feed, .. } = self;
        let feed = Mutex::new(Feed { input: Some((input, grows)), ..feed.into_inner() });
        Self { feed, total: UNKNOWN_TOTAL, ..self }
    }

    /// Lets the workers start nothing more.
    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.turn.abandon();
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    async fn worker(&self) -> Result<ConvertCounters, OperationError> {
        let mut counters = ConvertCounters::default();
        let mut buffer = None;
        let mut compressing = Compressing::new(self.target, self.options.compress)?;
        while let Some((turn, work)) = self.next().await? {
            // Nothing else that it waits for needs it.
            if self.is_stopped() {
                break;
            }
            match work {
                Work::Step(Step::Leave(range)) => {
                    counters.bytes_in_backing += range.end - range.start;
                    self.advance(range.end - range.start)?;
                }
                Work::Read(piece) => {
                    let range = piece.range.clone();
                    let spans = [Span { range: range.clone(), content: Content::Data }];
                    counters.reads += 1;
                    counters.bytes_read += range.end - range.start;
                    let place = |part: &Range<u64>| {
                        piece.bytes.slice(index(part.start - range.start)..index(part.end - range.start))
                    };
                    let actions = plan::actions(&spans, |part| place(part).is_zero(), &self.rules);
                    let end = self.target.len();
                    let writes = actions.iter().map(|action| compressing.write(action, end, place)).collect();
                    if !self.wait(turn).await {
                        break;
                    }
                    self.carry_out(&actions, writes, &self.rules, &mut counters).await?;
                    self.advance(range.end - range.start)?;
                }
                Work::Step(Step::Zero(range)) => {
                    if !self.wait(turn).await {
                        break;
                    }
                    self.zero(&range, &mut counters, &self.rules, true).await?;
                    self.record(range.end).await?;
                }
                Work::Step(Step::Piece(range, spans)) => {
                    let mut rules = self.rules;
                    let spans = compressing.spans(&spans);
                    if let Some(runs) = self.runs(&spans).await? {
                        if !self.wait(turn).await {
                            break;
                        }
                        if self.offload(runs, &spans, &mut counters).await? {
                            counters.bytes_in_backing += bytes(&spans, Content::Below);
                            self.record(range.end).await?;
                            self.advance(range.end - range.start)?;
                            self.end_turn(turn);
                            continue;
                        }
                        // Some of it may have been copied.
                        rules.target_is_zero = false;
                    }
                    let buffer = buffer.get_or_insert_with(|| Buffer::zeroed(index(self.piece)));
                    self.read(&range, &spans, buffer, &mut counters).await?;
                    let place = |part: &Range<u64>| {
                        buffer.slice(index(part.start - range.start)..index(part.end - range.start))
                    };
                    let actions = plan::actions(&spans, |part| place(part).is_zero(), &rules);
                    let writes =
                        actions.iter().map(|action| compressing.write(action, self.target.len(), place)).collect();
                    if !self.wait(turn).await {
                        break;
                    }
                    self.carry_out(&actions, writes, &rules, &mut counters).await?;
                    self.record(range.end).await?;
                    counters.bytes_in_backing += bytes(&spans, Content::Below);
                    self.advance(range.end - range.start)?;
                }
            }
            self.end_turn(turn);
        }
        Ok(counters)
    }

    /// The next step, and the number of its turn; `None`: it writes nothing, and waits for no other one.
    async fn next(&self) -> Result<Option<(Option<u64>, Work)>, OperationError> {
        let mut feed = self.feed.lock().await;
        if let Some((input, grows)) = &mut feed.input {
            let grows = *grows;
            let Some(piece) = input.next(grows)? else { return Ok(None) };
            // All that was read ahead: a growth is made durable.
            let (needs, has) = (input.known_length(), self.target.len());
            if needs > has && grows {
                self.target.grow(needs).await?;
            } else if piece.range.end > has {
                let target = self.target.name().to_string();
                return Err(OperationError::TargetTooSmall { target, has, needs: piece.range.end });
            }
            let number = feed.number;
            feed.number += 1;
            return Ok(Some((Some(number), Work::Read(piece))));
        }
        loop {
            if let Some(step) = feed.cutter.step() {
                // A record of what is done has zeros in their order, too.
                let writes = match step {
                    Step::Leave(_) => false,
                    Step::Zero(_) => !self.rules.target_is_zero || self.checkpoints.is_some(),
                    Step::Piece(..) => true,
                };
                let turn = writes.then_some(feed.number);
                feed.number += u64::from(writes);
                return Ok(Some((turn, Work::Step(step))));
            }
            let at = feed.at;
            if at >= self.source.len() {
                return Ok(None);
            }
            let span = match self.source.map(at, self.shared()).await {
                Ok(span) => span,
                // Perhaps it can be read all the same.
                Err(error) if self.options.salvage && is_salvageable(&error) => {
                    let end = (at / SECTOR + 1).saturating_mul(SECTOR).min(self.source.len());
                    Span { range: at..end, content: Content::Data }
                }
                Err(error) => return Err(OperationError::at(DiskOperation::Mapping, at)(error)),
            };
            let span = if span.content == Content::Below && self.options.target_has_contents {
                self.uncovered(span).await.map_err(OperationError::at(DiskOperation::Mapping, at))?
            } else {
                span
            };
            feed.at = span.range.end;
            feed.cutter.push(span);
        }
    }

    /// The contents of the source that the target has already.
    fn shared(&self) -> Option<Shared> {
        let length = self.options.backing_length?;
        Some(Shared { layers: self.options.layers.max(1), length })
    }

    /// The beginning of a span that the target's backing image has: what the source has there, where the target has
    /// something of its own. No step before it changes that.
    async fn uncovered(&self, span: Span) -> Result<Span, ImageError> {
        let Range { start, end } = span.range;
        let mapped = self.target.map(GuestOffset(start), end - start).await?;
        let end = start + mapped.length.clamp(1, end - start);
        if mapped.depth > 0 || mapped.kind == BlockStatus::Unallocated {
            return Ok(Span { range: start..end, content: Content::Below });
        }
        let Span { range, content } = self.source.map(start, None).await?;
        Ok(Span { range: start..range.end.min(end), content })
    }

    /// Waits for the turn of a step, if it has one: false if all is over.
    async fn wait(&self, turn: Option<u64>) -> bool {
        if let Some(number) = turn.filter(|_| !self.options.out_of_order) {
            self.turn.wait(number).await;
        }
        !self.is_stopped()
    }

    /// Ends the turn of a step, if it has one.
    fn end_turn(&self, turn: Option<u64>) {
        if turn.is_some() {
            self.turn.done();
        }
    }

    /// Records that all steps up to this one are done, where it ends. Its turn has come, and is not over.
    async fn record(&self, end: u64) -> Result<(), OperationError> {
        match self.checkpoints {
            Some(checkpoints) => checkpoints.note(self.target, end).await,
            None => Ok(()),
        }
    }

    fn advance(&self, bytes: u64) -> Result<(), OperationError> {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let moved = self.written.load(Ordering::Relaxed);
        match (self.watch)(Progress { done, total: self.total, moved }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(OperationError::Stopped),
        }
    }

    /// Reads what a piece has of contents, each run by itself, and puts zeros where it is known to have some.
    async fn read(
        &self,
        range: &Range<u64>,
        spans: &[Span],
        buffer: &Buffer,
        counters: &mut ConvertCounters,
    ) -> Result<(), OperationError> {
        let salvage = self.options.salvage;
        let reads = spans.iter().map(|span| async move {
            let part = buffer.slice(index(span.range.start - range.start)..index(span.range.end - range.start));
            let mut lost = Vec::new();
            match span.content {
                Content::Data => self.source.read(&span.range, &part, salvage.then_some(&mut lost)).await?,
                Content::Zero => part.clear(),
                Content::Below => {}
            }
            Ok::<_, OperationError>(lost)
        });
        for lost in try_join_all(reads).await? {
            counters.lose(lost);
        }
        counters.reads += spans.iter().filter(|span| span.content == Content::Data).count() as u64;
        counters.bytes_read += bytes(spans, Content::Data);
        Ok(())
    }

    async fn carry_out(
        &self,
        actions: &[Action],
        writes: Vec<Option<Write>>,
        rules: &Rules,
        counters: &mut ConvertCounters,
    ) -> Result<(), OperationError> {
        let mut together = Vec::new();
        for (action, write) in actions.iter().zip(writes) {
            match (action, write) {
                (Action::Write(range), Some(write)) => {
                    counters.writes += 1;
                    counters.bytes_written += range.end - range.start;
                    counters.bytes_stored += write.stored_len();
                    self.written.fetch_add(range.end - range.start, Ordering::Relaxed);
                    let write = write.carry_out(self.target, range.start);
                    if self.options.out_of_order {
                        together.push(write);
                    } else {
                        write.await?;
                    }
                }
                (Action::Write(_), None) => return Err(ImageError::from(broken_invariant("a write has bytes")).into()),
                (Action::Zero(range), _) => self.zero(range, counters, rules, false).await?,
                (Action::Spare(range), _) => counters.bytes_already_zero += range.end - range.start,
            }
        }
        try_join_all(together).await?;
        Ok(())
    }

    /// Has a range of the target read as zeros, if it does not already. `advance`: it is a step of its own.
    async fn zero(
        &self,
        range: &Range<u64>,
        counters: &mut ConvertCounters,
        rules: &Rules,
        advance: bool,
    ) -> Result<(), OperationError> {
        let mut at = range.start;
        while at < range.end {
            let (end, spare) = self.zero_at(at..range.end, rules).await?;
            let length = end - at;
            if spare {
                counters.bytes_already_zero += length;
            } else {
                let zero = self.target.write_zeroes(GuestOffset(at), length, true).await;
                zero.map_err(OperationError::at(DiskOperation::Zeroing, at))?;
                counters.zeroes += 1;
                counters.bytes_zeroed += length;
            }
            if advance {
                self.advance(length)?;
            }
            at = end;
        }
        Ok(())
    }

    /// Up to where the beginning of a range of the target is alike, and whether it is zero already.
    async fn zero_at(&self, range: Range<u64>, rules: &Rules) -> Result<(u64, bool), OperationError> {
        if rules.target_is_zero {
            return Ok((range.end, true));
        }
        let at_once = range.end.min(range.start.saturating_add(ZERO_AT_ONCE));
        // On top of another disk, zeros are said, not supposed: that disk may be exchanged.
        if self.options.backing_length.is_some() {
            return Ok((at_once, false));
        }
        let left = range.end - range.start;
        let mapped = self.target.map(GuestOffset(range.start), left).await;
        let mapped =
            mapped.map_err(|error: ImageError| OperationError::at(DiskOperation::Mapping, range.start)(error))?;
        let end = range.start + mapped.length.clamp(1, left);
        // Space that was set aside stays: it is wanted.
        if mapped.kind.is_zero() { Ok((end, true)) } else { Ok((end.min(at_once), false)) }
    }
}

fn bytes(spans: &[Span], content: Content) -> u64 {
    spans.iter().filter(|span| span.content == content).map(|span| span.range.end - span.range.start).sum()
}

#[cfg(test)]
mod tests;
