//! The requests of a queue.
//!
//! Laws: a buffer that was taken out is given back exactly once, or its ring is broken. Requests in flight are bounded,
//! in number and in segments; what is beyond the bound stays in the ring until there is room. The buffers of all
//! requests that are done are given back together, with one notification.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use limosa_storage::submit_gathered;
use limosa_vhost::{Chain, MoreWork, QueueError, Requests, Vring};
use parking_lot::Mutex;

use super::chain::{Link, Parts, Piece};
use super::config::SECTOR;
use super::execute::{Done, Request, Target, execute};
use super::memory::GuestMemory;
use super::request::{Action, Facts, Status, parse};
use crate::clients::{Access, Client};
use crate::counters::{Outcome, RequestKind};
use crate::gathered::Gathered;

/// Most requests in flight: the largest ring that QEMU has.
const REQUESTS_MAX: usize = 1024;
/// Most segments of requests in flight.
const SEGMENTS_MAX: usize = 16 << 10;

/// A request in flight.
type InFlight = Pin<Box<dyn Future<Output = Done> + Send>>;

/// How requests are carried out at the moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mode {
    /// The driver has acknowledged that ranges can be discarded, and zeroed.
    pub(super) discards: bool,
    pub(super) zeroes: bool,
    pub(super) write_through: bool,
}

/// A queue of the device. One thread uses it. Aligned, so that no two queues share a cache line.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Queue(Mutex<State>);

#[derive(Debug)]
struct State {
    target: Arc<Target>,
    in_flight: FuturesUnordered<InFlight>,
    gathered: Gathered,
    /// Dropped after the requests.
    client: Client,
    segments: usize,
    /// Buffers were left in the ring because there was no room.
    has_left: bool,
    /// Buffers were left in the ring because the export is quiesced.
    is_held: bool,
    /// Buffers to be given back: first descriptor, and bytes written.
    finished: Vec<(u16, u32)>,
    /// Requests that are done, to be counted.
    done: Vec<Outcome>,
    has_flushed: bool,
}

impl Queue {
    /// An empty queue of requests to a disk.
    pub(super) fn new(target: Target) -> Self {
        Self(Mutex::new(State {
            client: target.export.join_queue(),
            target: Arc::new(target),
            in_flight: FuturesUnordered::new(),
            gathered: Gathered::default(),
            segments: 0,
            has_left: false,
            is_held: false,
            finished: Vec::new(),
            done: Vec::new(),
            has_flushed: false,
        }))
    }

    /// Takes requests out of the ring, to be begun by [`Queue::poll`].
    ///
    /// # Errors
    /// The ring has stopped, or is broken: by the driver too, if a buffer is no request.
    pub(super) fn take(&self, vring: &Vring, mode: &Mode) -> Result<MoreWork, QueueError> {
        let mut state = self.0.lock();
        let memory = GuestMemory::new(vring.memory()?);
        if state.client.enter() != Access::Open {
            state.is_held = true;
            return Ok(MoreWork::No);
        }
        state.look_for_medium();
        let begun = Instant::now();
        while !state.gathered.is_enough() {
            if state.in_flight.len() >= REQUESTS_MAX || state.segments >= SEGMENTS_MAX {
                state.has_left = true;
                return Ok(MoreWork::No);
            }
            let Some(chain) = vring.pop()? else { return Ok(MoreWork::No) };
            state.begin(chain, (&memory, vring), mode, begun)?;
        }
        Ok(MoreWork::Yes)
    }

    /// Polls the requests in flight, and gives back the buffers of those that are done.
    pub(super) fn poll(&self, vring: &Vring, context: &mut Context<'_>) -> Requests {
        let mut state = self.0.lock();
        let mut ring = state.collect(vring, context);
        if std::mem::take(&mut state.gathered).is_some() && ring.is_ok() {
            // They have been polled for the first time. The driver gets what is done at once before more are taken.
            submit_gathered();
            let again = state.collect(vring, context);
            ring = if matches!(again, Ok(MoreWork::No)) { ring } else { again };
        }
        Requests { in_flight: !state.in_flight.is_empty(), waits: state.is_held, ring }
    }

    /// Takes the disk that the export has now.
    pub(super) fn look_for_medium(&self) {
        self.0.lock().look_for_medium();
    }

    /// Returns whether a flush has succeeded since the last call.
    pub(super) fn take_has_flushed(&self) -> bool {
        std::mem::take(&mut self.0.lock().has_flushed)
    }

    /// Forgets what belongs to a driver that has gone: buffers that could not be given back.
    pub(super) fn clear(&self) {
        let mut state = self.0.lock();
        state.finished.clear();
        (state.has_left, state.is_held) = (false, false);
    }
}

impl State {
    /// Takes the disk that the export has now. Requests in flight have theirs.
    fn look_for_medium(&mut self) {
        if let Some(medium) = self.target.export.newer_medium(&self.target.medium) {
            self.target = Arc::new(Target { medium, ..(*self.target).clone() });
        }
    }

    /// Returns the facts that requests are checked against.
    fn facts(&self, mode: &Mode) -> Facts {
        let Target { export, medium, .. } = &*self.target;
        let (discards, zeroes) = (mode.discards, mode.zeroes);
        Facts { sectors: medium.size() / SECTOR, read_only: export.is_read_only(), discards, zeroes }
    }

    /// Begins the request of a buffer, or finishes it at once.
    fn begin(
        &mut self,
        chain: Chain,
        (memory, vring): (&GuestMemory, &Vring),
        mode: &Mode,
        begun: Instant,
    ) -> Result<(), QueueError> {
        let head = chain.head_index();
        let invalid = |why| QueueError::Buffer { head, why };
        let links = chain.map(|descriptor| Link {
            piece: Piece { address: descriptor.addr().0, length: descriptor.len() },
            is_writable: descriptor.is_write_only(),
            has_next: descriptor.has_next(),
        });
        let parts = Parts::of(links, |address, into| memory.read(address, into)).map_err(invalid)?;
        if !memory.holds(parts.status) {
            return Err(invalid("its status byte is not in memory"));
        }
        let facts = self.facts(mode);
        let request = parse(&parts, &facts, |address, into| memory.read(address, into)).and_then(|action| {
            let pieces = match action {
                Action::Read { .. } | Action::GetId => parts.writable.as_slice(),
                Action::Write { .. } => &parts.readable,
                Action::Flush | Action::Discard(_) | Action::WriteZeroes(_) => &[],
            };
            let data = memory.vector(pieces).ok_or(Status::IoError)?;
            let segments = data.buffers().len();
            let (status, write_through) = (parts.status, mode.write_through);
            Ok(Request { head, segments, status, action, data, writable: Vec::new(), write_through, begun })
        });
        match request {
            Ok(mut request) => {
                request.writable = parts.writable;
                self.segments += request.segments;
                self.gathered.add(request.data.len());
                self.in_flight.push(Box::pin(execute(Arc::clone(&self.target), request)));
            }
            Err(status) => self.finish((memory, vring), &Done::refused(head, parts.status, status, begun), begun),
        }
        Ok(())
    }

    fn finish(&mut self, (memory, vring): (&GuestMemory, &Vring), done: &Done, now: Instant) {
        self.segments -= done.segments;
        let outcome = done.outcome(now);
        self.has_flushed |= outcome.kind == RequestKind::Flush && !outcome.failed;
        self.done.push(outcome);
        // It was memory when the request was taken, and memory does not change while the ring runs.
        let _ = memory.write_byte(done.status_address, done.status as u8);
        let written = done.writable.iter().map(|piece| (piece.address, u64::from(piece.length)));
        vring.mark_written(written.chain([(done.status_address, 1)]));
        // A read has at most `BYTES_MAX` bytes.
        self.finished.push((done.head, u32::try_from(done.written).unwrap_or(u32::MAX).saturating_add(1)));
    }

    fn collect(&mut self, vring: &Vring, context: &mut Context<'_>) -> Result<MoreWork, QueueError> {
        let memory = vring.memory().map(GuestMemory::new);
        let (before, now) = (self.in_flight.len(), Instant::now());
        while let Poll::Ready(Some(done)) = self.in_flight.poll_next_unpin(context) {
            match &memory {
                Ok(memory) => self.finish((memory, vring), &done, now),
                // Its ring was never stopped without being drained.
                Err(_) => self.segments -= done.segments,
            }
        }
        // Before the driver sees that they are done.
        self.client.count(&mut self.done);
        if !self.finished.is_empty() {
            let finished = std::mem::take(&mut self.finished);
            vring.add_used_all(&finished)?;
            vring.notify()?;
            self.finished = finished;
            self.finished.clear();
        }
        if self.in_flight.is_empty() {
            self.client.leave();
        }
        if self.is_held {
            self.client.register(context.waker());
            // It may have been resumed before this waker was there.
            self.is_held = self.client.access() != Access::Open;
            return Ok(if self.is_held { MoreWork::No } else { MoreWork::Yes });
        }
        let has_room = self.in_flight.len() < before && std::mem::take(&mut self.has_left);
        Ok(if has_room { MoreWork::Yes } else { MoreWork::No })
    }
}

impl Done {
    /// A request that is not carried out.
    const fn refused(head: u16, status_address: u64, status: Status, begun: Instant) -> Self {
        let (segments, written, length) = (0, 0, 0);
        let kind = RequestKind::Other;
        Self { head, segments, status_address, status, written, writable: Vec::new(), kind, length, begun }
    }
}
