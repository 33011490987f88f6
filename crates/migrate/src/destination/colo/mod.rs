//! Checkpoints behind a stream: the secondary of COLO, which keeps them instead of running them.
//!
//! The law: **a checkpoint counts when it is whole here**, and the VM stands still for no longer than it takes to
//! receive it. Whether it is stored before or after [`Checkpoints::loaded`] is up to the caller; nothing that the VM
//! does after that belongs to it.
//!
//! The pages take the way of the base's pages, through the same receiver and to a [`PageSink`], at once or from
//! [`Aside`]: the last contents of a page win, within a checkpoint and from one to the next. With multifd channels they
//! come on these: a checkpoint is whole when each of them has come to the last synchronization point of the main one.
//! Nothing is read behind that until the next checkpoint, whose threads expect its first packet.

mod turn;

use std::sync::Arc;
use std::time::{Duration, Instant};

use limosa_page::{to_u64, to_usize};
use limosa_stream::colo::ColoMessage;
use limosa_stream::{ErrorKind, ReturnMessage, StreamError};

use super::aside::{Aside, Keeping};
use super::incoming::ReceivedStream;
use super::memory::{PagesEnd, Part};
use super::page_writer::Target;
use super::receiver::Receiver;
use crate::error::MigrateError;
use crate::pages::PageSink;
use turn::Turn;

/// Bytes of the message that announces the pages of a checkpoint.
const ANNOUNCEMENT: u64 = 4;

/// The checkpoints that follow a stream, in their turns.
///
/// Each method takes one turn; the order is [`begin`](Self::begin) once, then for each checkpoint
/// [`wait_request`](Self::wait_request), [`reply`](Self::reply), [`receive`](Self::receive) and
/// [`loaded`](Self::loaded). A primary may wait between the reply and the checkpoint, or have something to say:
/// [`wait_sent`](Self::wait_sent), [`wait_note`](Self::wait_note). On `Err` the channel is closed and the series is
/// over; the VM stands still if it was between `reply` and `loaded`, and QEMU needs the command `x-colo-lost-heartbeat`
/// to continue it.
#[derive(Debug)]
pub struct Checkpoints {
    base: ReceivedStream,
    receiver: Receiver<'static>,
    turn: Turn,
    /// Bytes of the stream behind what the decoder has seen.
    passed: u64,
    /// When the primary was allowed to stop the VM.
    replied: Option<Instant>,
    received: u64,
}

/// The next turn of the primary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NextCheckpoint {
    /// A checkpoint is due; the VM runs until the reply.
    Requested,
    /// A limosa has something to say before it: see [`ColoMessage::Note`].
    Note {
        /// The kind of number.
        kind: u8,
        /// The number.
        value: u64,
    },
    /// The primary has closed the channel between two checkpoints: the last one counts, and the VM runs there, or
    /// nowhere if its host has failed.
    Ended,
}

/// The answer of a primary that was allowed to stop its VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NextState {
    /// The VM is stopped, and its pages come.
    Sent,
    /// A limosa has something to say before it: see [`ColoMessage::Note`]. The VM runs.
    Note {
        /// The kind of number.
        kind: u8,
        /// The number.
        value: u64,
    },
    /// The primary has closed the channel instead: the checkpoint before counts.
    Ended,
}

/// A checkpoint whose pages have gone to the sink.
#[derive(Debug)]
#[non_exhaustive]
pub struct Checkpoint {
    /// Its number; the first one behind the base is 1.
    pub number: u64,
    /// The device sections as they came, with the byte that ends them and without a description: that of the base tells
    /// their sizes, unless a device has more or less state than then.
    pub sections: Vec<u8>,
    /// Its counters.
    pub stats: CheckpointStats,
}

/// The contents of a checkpoint, by kind.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct CheckpointStats {
    /// Pages with contents.
    pub normal_pages: u64,
    /// Pages that came as zero.
    pub zero_pages: u64,
    /// Of both, those for a page that had come before in this checkpoint.
    pub resent_pages: u64,
    /// Bytes of device sections.
    pub device_bytes: u64,
    /// Bytes of all of it on all channels.
    pub bytes: u64,
    /// From the reply to the last byte. The VM stands still for most of it.
    pub elapsed: Duration,
}

/// The end of a wait for a message.
enum Awaited {
    Came,
    Note { kind: u8, value: u64 },
    Ended,
}

impl Checkpoints {
    pub(super) fn new(base: ReceivedStream, receiver: Receiver<'static>) -> Self {
        let passed = to_u64(base.tail.len());
        Self { base, receiver, turn: Turn::Base, passed, replied: None, received: 0 }
    }

    /// The base, which has arrived. Its end is certain only when the first checkpoint is
    /// [requested](NextCheckpoint::Requested): until then it may be a forgery inside a device's memory.
    pub fn base(&self) -> &ReceivedStream {
        &self.base
    }

    /// Number of checkpoints received.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Tells the primary that the base is here: its VM continues. To be called as soon as possible, for the VM stands
    /// still since the end of the base.
    ///
    /// # Errors
    /// The channel failed.
    pub fn begin(&mut self) -> Result<(), MigrateError> {
        self.take_turn(Turn::Idle, |this| {
            let role = &this.receiver.role;
            role.channels().for_each(|channel| role.control.watch(channel));
            let mut bytes = Vec::new();
            // A source with a return path reads its messages until this one, and those of COLO behind it.
            if this.receiver.return_path {
                ReturnMessage::Shut(0).encode(&mut bytes)?;
            }
            ColoMessage::CheckpointReady.encode(&mut bytes);
            this.write(&bytes)
        })
    }

    /// Waits until the primary wants to make a checkpoint, or has something else to say; for at most `timeout`, `None`
    /// waits without end. Call it again after a note.
    ///
    /// # Errors
    /// Nothing came in time; something else came; the job was cancelled.
    pub fn wait_request(&mut self, timeout: Option<Duration>) -> Result<NextCheckpoint, MigrateError> {
        // It may have come before a note.
        if self.turn == Turn::Requested {
            return Ok(NextCheckpoint::Requested);
        }
        let wanted = (Turn::Requested, ColoMessage::CheckpointRequest, "a request for a checkpoint");
        Ok(match self.await_message(wanted, timeout)? {
            Awaited::Came => NextCheckpoint::Requested,
            Awaited::Note { kind, value } => NextCheckpoint::Note { kind, value },
            Awaited::Ended => NextCheckpoint::Ended,
        })
    }

    /// Waits until a limosa has something to say about the checkpoint that was loaded; its next request may come before
    /// that, and counts. For at most `timeout`, `None` waits without end. Returns the kind and the value of the
    /// [note](NextCheckpoint::Note); `None`: the primary has closed the channel.
    ///
    /// # Errors
    /// Nothing came in time; something else came; the job was cancelled.
    pub fn wait_note(&mut self, timeout: Option<Duration>) -> Result<Option<(u8, u64)>, MigrateError> {
        if self.turn != Turn::Requested {
            match self.wait_request(timeout)? {
                NextCheckpoint::Note { kind, value } => return Ok(Some((kind, value))),
                NextCheckpoint::Ended => return Ok(None),
                NextCheckpoint::Requested => {}
            }
        }
        let awaited = self.guarded(|this| {
            this.set_timeout(timeout)?;
            match this.next_message()? {
                Some(ColoMessage::Note { kind, value }) => Ok(Some((kind, value))),
                Some(other) => Err(this.out_of_turn("a word about the checkpoint", other)),
                None => Ok(None),
            }
        })?;
        if awaited.is_none() {
            self.turn = Turn::Over;
        }
        Ok(awaited)
    }

    /// Lets the primary stop the VM and send the checkpoint.
    ///
    /// # Errors
    /// The channel failed.
    pub fn reply(&mut self) -> Result<(), MigrateError> {
        self.take_turn(Turn::Stopped, |this| {
            let mut bytes = Vec::new();
            ColoMessage::CheckpointReply.encode(&mut bytes);
            this.replied = Some(Instant::now());
            this.write(&bytes)
        })
    }

    /// Waits until the primary has stopped the VM, or has something else to say; for at most `timeout`, `None` waits
    /// without end. Call it again after a note.
    ///
    /// # Errors
    /// Nothing came in time; something else came; the job was cancelled.
    pub fn wait_sent(&mut self, timeout: Option<Duration>) -> Result<NextState, MigrateError> {
        let wanted = (Turn::Sent, ColoMessage::VmstateSend, "the pages of a checkpoint");
        Ok(match self.await_message(wanted, timeout)? {
            Awaited::Came => NextState::Sent,
            Awaited::Note { kind, value } => NextState::Note { kind, value },
            Awaited::Ended => NextState::Ended,
        })
    }

    /// Waits until the message of a turn has come, a note, or the end of the series.
    fn await_message(
        &mut self,
        (turn, wanted, what): (Turn, ColoMessage, &str),
        timeout: Option<Duration>,
    ) -> Result<Awaited, MigrateError> {
        let before = self.turn;
        let awaited = self.guarded(|this| {
            turn.check_follows(before)?;
            this.set_timeout(timeout)?;
            match this.next_message()? {
                Some(message) if message == wanted => Ok(Awaited::Came),
                Some(ColoMessage::Note { kind, value }) => Ok(Awaited::Note { kind, value }),
                Some(other) => Err(this.out_of_turn(what, other)),
                None => Ok(Awaited::Ended),
            }
        })?;
        match awaited {
            Awaited::Came => self.turn = turn,
            Awaited::Note { .. } => {}
            // The primary has closed the channel in its turn.
            Awaited::Ended => self.turn = Turn::Over,
        }
        Ok(awaited)
    }

    /// Receives the checkpoint: its pages into `sink`, which knows the layout of the base
    /// ([`begin`](PageSink::begin) is not called again), and its device sections. The source may be silent for at most
    /// `timeout` in the middle of it.
    ///
    /// # Errors
    /// The checkpoint is cut off or malformed, nothing came in time, the sink failed, or the job was cancelled;
    /// [`MigrateError::CheckpointAbandoned`]: a limosa gave it up. Some of its pages may have gone to the sink: they
    /// count for nothing.
    pub fn receive<S: PageSink + Send + ?Sized>(
        &mut self,
        sink: &mut S,
        timeout: Option<Duration>,
    ) -> Result<Checkpoint, MigrateError> {
        self.receive_to(Target::Sink(sink), timeout)
    }

    /// Receives the checkpoint as [`receive`](Self::receive) does, and keeps its pages `aside`, which takes less time.
    /// The sink gets them by [`Aside::store`]; now only if there is no room for them.
    ///
    /// # Errors
    /// As [`receive`](Self::receive). The caller [forgets](Aside::forget) what is `aside` then.
    pub fn receive_aside<S: PageSink + Send + ?Sized>(
        &mut self,
        aside: &mut Aside,
        sink: &mut S,
        timeout: Option<Duration>,
    ) -> Result<Checkpoint, MigrateError> {
        let target = Target::Aside(Keeping::new(aside, sink, &self.base.setup));
        self.receive_to(target, timeout)
    }

    fn receive_to<S: PageSink + Send + ?Sized>(
        &mut self,
        target: Target<'_, S>,
        timeout: Option<Duration>,
    ) -> Result<Checkpoint, MigrateError> {
        let announced = self.turn == Turn::Sent;
        self.take_turn(Turn::Received, |this| {
            this.set_timeout(timeout)?;
            for channel in &this.receiver.role.pages {
                channel.set_timeouts(timeout, None)?;
            }
            let (mut before, before_pages) = (this.offset(), this.page_bytes());
            if announced {
                before = before.saturating_sub(ANNOUNCEMENT);
            } else {
                match this.message("the pages of a checkpoint")? {
                    ColoMessage::VmstateSend => {}
                    other => return Err(this.out_of_turn("the pages of a checkpoint", other)),
                }
            }
            this.receiver.decoder.next_checkpoint(std::mem::take(&mut this.passed))?;
            let (end, moved) = this.receiver.pages(&this.base.setup, target, Part::Checkpoint)?;
            if end != PagesEnd::EndOfSections {
                return Err(MigrateError::Protocol(format!("the pages of a checkpoint end with {end:?}")));
            }
            let sections = match this.message("the size of its device sections")? {
                ColoMessage::VmstateSize(size) => this.device_sections(size)?,
                ColoMessage::Note { kind, value } => return Err(MigrateError::CheckpointAbandoned { kind, value }),
                other => return Err(this.out_of_turn("the size of its device sections", other)),
            };
            this.received = this.received.saturating_add(1);
            let stats = CheckpointStats {
                normal_pages: moved.normal,
                zero_pages: moved.zero,
                resent_pages: moved.resent,
                device_bytes: to_u64(sections.len()),
                bytes: this.offset().saturating_sub(before) + this.page_bytes().saturating_sub(before_pages),
                elapsed: this.replied.map_or(Duration::ZERO, |replied| replied.elapsed()),
            };
            Ok(Checkpoint { number: this.received, sections, stats })
        })
    }

    /// Lets the VM continue. Returns the time since the [reply](Self::reply), which its pause is a part of.
    ///
    /// # Errors
    /// The channel failed.
    pub fn loaded(&mut self) -> Result<Duration, MigrateError> {
        self.take_turn(Turn::Idle, |this| {
            let mut bytes = Vec::new();
            ColoMessage::VmstateReceived.encode(&mut bytes);
            ColoMessage::VmstateLoaded.encode(&mut bytes);
            this.write(&bytes)?;
            Ok(this.replied.take().map_or(Duration::ZERO, |replied| replied.elapsed()))
        })
    }

    /// Does the work of a turn, and passes on to the next one.
    fn take_turn<T>(
        &mut self,
        next: Turn,
        work: impl FnOnce(&mut Self) -> Result<T, MigrateError>,
    ) -> Result<T, MigrateError> {
        let before = self.turn;
        let done = self.guarded(|this| {
            next.check_follows(before)?;
            work(this)
        })?;
        self.turn = next;
        Ok(done)
    }

    /// Closes the channel if `work` fails, or says that the job was cancelled.
    fn guarded<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, MigrateError>) -> Result<T, MigrateError> {
        work(self).map_err(|error| {
            self.turn = Turn::Broken;
            self.receiver.role.close();
            self.receiver.role.control.explain(error)
        })
    }

    fn set_timeout(&self, timeout: Option<Duration>) -> Result<(), MigrateError> {
        let role = &self.receiver.role;
        Ok(role.channel.set_timeouts(timeout, role.options.answer_timeout)?)
    }

    fn write(&self, bytes: &[u8]) -> Result<(), MigrateError> {
        let role = &self.receiver.role;
        // A write into a channel that was shut down would be said to have failed, and not why.
        role.control.check()?;
        Ok(role.channel.write_all(bytes)?)
    }

    /// Bytes from the beginning of the stream to the next one.
    fn offset(&self) -> u64 {
        self.receiver.decoder.offset().saturating_add(self.passed)
    }

    /// Bytes that have come on the multifd channels.
    fn page_bytes(&self) -> u64 {
        self.receiver.role.pages.iter().map(|channel| channel.counters().bytes_in).sum()
    }

    fn out_of_turn(&self, expected: &str, found: ColoMessage) -> MigrateError {
        let offset = self.offset();
        MigrateError::Protocol(format!("expected {expected} before stream offset {offset:#x}, found {found:?}"))
    }

    /// Reads the next message, `what`.
    fn message(&mut self, what: &'static str) -> Result<ColoMessage, MigrateError> {
        self.next_message()?.ok_or_else(|| self.truncated(what, 4, 0))
    }

    /// Reads the next message; `None` if the channel ends before it.
    fn next_message(&mut self) -> Result<Option<ColoMessage>, MigrateError> {
        let role = Arc::clone(&self.receiver.role);
        loop {
            let offset = self.offset();
            let limit = role.options.max_device_state;
            let buffer = &mut self.receiver.buffer;
            if let Some((message, length)) = ColoMessage::decode(buffer.arrived()?, offset, limit)? {
                buffer.consume(length);
                self.passed = self.passed.saturating_add(to_u64(length));
                return Ok(Some(message));
            }
            buffer.move_to_front()?;
            let available = buffer.len();
            match buffer.fill(&role.channel) {
                Ok(0) if available > 0 => {
                    return Err(self.truncated("a COLO message", 4.max(available + 1), available));
                }
                Err(MigrateError::Channel(error)) if available == 0 && error.is_closed() => {
                    role.control.check()?;
                    return Ok(None);
                }
                Ok(0) => {
                    role.control.check()?;
                    return Ok(None);
                }
                Ok(_) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads the device sections of a checkpoint. Memory is taken for what has arrived, not for what is announced.
    fn device_sections(&mut self, size: u64) -> Result<Vec<u8>, MigrateError> {
        let role = Arc::clone(&self.receiver.role);
        let size = to_usize(size);
        let mut sections = Vec::new();
        loop {
            let buffer = &mut self.receiver.buffer;
            let missing = size.saturating_sub(sections.len());
            let arrived = buffer.arrived()?;
            let taken = arrived.get(..missing).unwrap_or(arrived);
            sections.extend_from_slice(taken);
            let count = taken.len();
            buffer.consume(count);
            self.passed = self.passed.saturating_add(to_u64(count));
            if count == missing {
                return Ok(sections);
            }
            buffer.move_to_front()?;
            if buffer.fill(&role.channel)? == 0 {
                return Err(self.truncated("the device sections of a checkpoint", size, sections.len()));
            }
        }
    }

    fn truncated(&self, what: &'static str, wanted: usize, available: usize) -> MigrateError {
        let fault = ErrorKind::Truncated { what: what.into(), wanted, available };
        StreamError::new(self.offset(), "checkpoint", fault).into()
    }
}

impl Drop for Checkpoints {
    /// Has the channel close with the series, however that ends.
    fn drop(&mut self) {
        self.receiver.role.control.unwatch();
    }
}
