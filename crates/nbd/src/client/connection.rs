//! Requests in flight over one connection.
//!
//! Laws:
//!
//! * A request is in the table before its first byte is sent, and leaves it when its reply is complete or the
//!   connection has failed. So every request ends.
//! * Only one thread receives, and it receives only while a request is in flight: an idle connection has no time limit.
//!   Nor has one whose server flushes, discards or writes zeros; a reply that has begun has one. It is started by the
//!   first request, also after it was retired.
//! * A connection that failed stays failed, with the first reason.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::ops::{Deref, Range};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::thread::{self, JoinHandle};

use limosa_channel::{Channel, Shutdown};
use limosa_storage::IoVector;
use parking_lot::{Condvar, Mutex};

use super::error::NbdError;
use super::handshake::Agreement;
use super::reply::{Answer, Expected, Payload, Reply};
use super::transfer;
use crate::protocol::Headers;
use crate::protocol::reply::{REPLY_START_LEN, ReplyStart, chunk_rest_len};
use crate::protocol::request::{Command, RequestHeader, flag};
use crate::protocol::split_u64;

/// All connections, for [`retire_threads`].
static CONNECTIONS: Mutex<Vec<Weak<Connection>>> = Mutex::new(Vec::new());

/// Ends the threads that receive for clients, and waits until they have ended. They are started again when they are
/// needed.
///
/// For a process that confines itself: rules that hold for a thread hold for the threads that it starts afterwards.
/// Requests in flight are waited for.
pub fn retire_threads() {
    let connections: Vec<_> = CONNECTIONS.lock().iter().filter_map(Weak::upgrade).collect();
    for connection in connections {
        connection.end_receiver(|state| state.retiring = true);
        connection.state.lock().retiring = false;
    }
}

/// A connection that is closed when it is dropped.
#[derive(Debug)]
pub(super) struct OpenConnection(pub(super) Arc<Connection>);

impl Deref for OpenConnection {
    type Target = Arc<Connection>;

    fn deref(&self) -> &Arc<Connection> {
        &self.0
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// A connection after its handshake.
#[derive(Debug)]
pub(super) struct Connection {
    channel: Channel,
    pub(super) agreed: Agreement,
    /// The last cookie. Held while a request is sent, so that requests do not mix.
    sending: Mutex<u64>,
    state: Mutex<State>,
    /// A request is in flight, or none will be any more.
    changed: Condvar,
    receiver: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct State {
    in_flight: HashMap<u64, InFlight>,
    /// No more requests are sent.
    closing: bool,
    /// The thread that receives ends as soon as no request is in flight.
    retiring: bool,
    /// There is a thread that receives.
    receiving: bool,
    failed: Option<Arc<NbdError>>,
}

#[derive(Debug)]
struct InFlight {
    reply: Reply,
    may_take_long: bool,
    outcome: Arc<Outcome>,
}

/// The outcome of a request, and who waits for it.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    result: Mutex<Pending>,
    there: Condvar,
}

#[derive(Debug, Default)]
struct Pending {
    result: Option<Result<Answer, Arc<NbdError>>>,
    waker: Option<Waker>,
}

impl Outcome {
    fn set(&self, result: Result<Answer, Arc<NbdError>>) {
        let waker = {
            let mut pending = self.result.lock();
            pending.result = Some(result);
            pending.waker.take()
        };
        self.there.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits on this thread.
    pub(super) fn wait(&self) -> Result<Answer, Arc<NbdError>> {
        let mut pending = self.result.lock();
        loop {
            if let Some(result) = pending.result.take() {
                return result;
            }
            self.there.wait(&mut pending);
        }
    }
}

/// The outcome of a request, as a future.
#[derive(Debug)]
pub(super) struct Waiting(pub(super) Arc<Outcome>);

impl Future for Waiting {
    type Output = Result<Answer, Arc<NbdError>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut pending = self.0.result.lock();
        match pending.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                pending.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// A request, before it has a cookie.
#[derive(Debug)]
pub(super) struct NewRequest {
    pub(super) command: Command,
    pub(super) flags: u16,
    pub(super) offset: u64,
    pub(super) length: u64,
    /// The bytes of a write.
    pub(super) payload: IoVector,
    pub(super) expected: Expected,
}

impl NewRequest {
    /// A request without a payload, which is answered by success or failure.
    pub(super) fn plain(command: Command, flags: u16, range: &Range<u64>) -> Self {
        let (offset, length) = (range.start, range.end.saturating_sub(range.start));
        Self { command, flags, offset, length, payload: IoVector::new(), expected: Expected::Outcome }
    }

    /// Whether the server may work for any time before it answers.
    fn may_take_long(&self) -> bool {
        matches!(self.command, Command::Flush | Command::Trim | Command::WriteZeroes) || self.flags & flag::FUA != 0
    }
}

impl Connection {
    pub(super) fn new(channel: Channel, agreed: Agreement) -> Arc<Self> {
        let (sending, state, changed, receiver) =
            (Mutex::new(0), Mutex::new(State::default()), Condvar::new(), Mutex::new(None));
        let connection = Arc::new(Self { channel, agreed, sending, state, changed, receiver });
        let mut all = CONNECTIONS.lock();
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&connection));
        connection
    }

    /// Sends a request. It waits while the server takes nothing.
    pub(super) fn send(self: &Arc<Self>, request: NewRequest) -> Arc<Outcome> {
        let may_take_long = request.may_take_long();
        let NewRequest { command, flags, offset, length, payload, expected } = request;
        let outcome = Arc::new(Outcome::default());
        let mut last = self.sending.lock();
        *last += 1;
        let cookie = *last;
        let is_received = {
            let mut state = self.state.lock();
            if let Some(error) = &state.failed {
                outcome.set(Err(Arc::clone(error)));
                return outcome;
            }
            let in_flight = InFlight { reply: Reply::new(expected), may_take_long, outcome: Arc::clone(&outcome) };
            state.in_flight.insert(cookie, in_flight);
            std::mem::replace(&mut state.receiving, true)
        };
        if is_received {
            self.changed.notify_one();
        } else if let Err(error) = self.start_receiver() {
            self.state.lock().receiving = false;
            self.fail(NbdError::Thread(error));
            return outcome;
        }
        let headers = self.agreed.headers;
        let has_payload = headers == Headers::Extended && command == Command::Write;
        let flags = if has_payload { flags | flag::PAYLOAD_LEN } else { flags };
        let header = RequestHeader { flags, command: command as u16, cookie, offset, length }.encode(headers);
        if let Err(error) = transfer::send(&self.channel, &header, &payload) {
            self.fail(error.into());
        }
        outcome
    }

    fn start_receiver(self: &Arc<Self>) -> io::Result<()> {
        let theirs = Arc::clone(self);
        let receiver = thread::Builder::new().name("limosa-nbd".into()).spawn(move || theirs.receive())?;
        *self.receiver.lock() = Some(receiver);
        Ok(())
    }

    /// Has the thread that receives end when no request is in flight, and waits until it has ended.
    fn end_receiver(&self, why: impl FnOnce(&mut State)) {
        why(&mut self.state.lock());
        self.changed.notify_one();
        let receiver = self.receiver.lock().take();
        // A request that it completes may have been the last one that needed the connection.
        if let Some(receiver) = receiver
            && receiver.thread().id() != thread::current().id()
        {
            // It does not panic, and there is nobody to tell.
            let _ = receiver.join();
        }
    }

    /// Receives replies, until the connection is closed or fails, or its thread is not wanted any more.
    fn receive(&self) {
        while self.wait_for_request() {
            if let Err(error) = self.receive_one() {
                self.fail(error);
            }
        }
    }

    /// Ends the connection when no request is in flight any more.
    pub(super) fn close(&self) {
        self.end_receiver(|state| state.closing = true);
        if self.state.lock().failed.is_none() {
            let (command, headers) = (Command::Disconnect as u16, self.agreed.headers);
            let header = RequestHeader { flags: 0, command, cookie: 0, offset: 0, length: 0 }.encode(headers);
            // A server that is gone needs no farewell.
            let _ = self.channel.write_all(&header);
        }
        let _ = self.channel.shutdown(Shutdown::Both);
    }

    /// Waits until a request is in flight. Returns false if the thread has to end.
    fn wait_for_request(&self) -> bool {
        let mut state = self.state.lock();
        loop {
            if state.failed.is_none() && !state.in_flight.is_empty() {
                return true;
            }
            if state.failed.is_some() || state.closing || state.retiring {
                state.receiving = false;
                return false;
            }
            self.changed.wait(&mut state);
        }
    }

    /// Receives a simple reply or a chunk.
    fn receive_one(&self) -> Result<(), NbdError> {
        let headers = self.agreed.headers;
        let start = ReplyStart::decode(headers, self.read_start()?);
        let start = start.ok_or_else(|| NbdError::protocol("a reply does not begin as one"))?;
        let (ReplyStart::Simple { cookie, .. } | ReplyStart::Chunk { cookie, .. }) = start;
        let mut request = self
            .state
            .lock()
            .in_flight
            .remove(&cookie)
            .ok_or_else(|| NbdError::protocol("a reply is for no request in flight"))?;
        let received = match start {
            ReplyStart::Simple { error, .. } => self.receive_simple(&mut request.reply, error).map(|()| true),
            ReplyStart::Chunk { last, kind, .. } => self.receive_chunk(&mut request.reply, kind, last).map(|()| last),
        };
        if matches!(received, Ok(true)) {
            let answer = request.reply.complete().map_err(NbdError::protocol);
            match answer {
                Ok(answer) => request.outcome.set(Ok(answer)),
                Err(error) => {
                    let error = self.fail(error);
                    request.outcome.set(Err(error));
                }
            }
            return Ok(());
        }
        // Back, to be continued, or to fail with all others; a sender may have found the failure meanwhile.
        let mut state = self.state.lock();
        match state.failed.as_ref().map(Arc::clone) {
            Some(error) => {
                drop(state);
                request.outcome.set(Err(error));
            }
            None => {
                state.in_flight.insert(cookie, request);
            }
        }
        received.map(drop)
    }

    fn receive_simple(&self, reply: &mut Reply, error: u32) -> Result<(), NbdError> {
        let has_chunks = self.agreed.headers.has_chunks();
        match reply.simple(error, has_chunks).map_err(NbdError::protocol)? {
            Some(into) => Ok(transfer::receive(&self.channel, &into)?),
            None => Ok(()),
        }
    }

    fn receive_chunk(&self, reply: &mut Reply, kind: u16, is_last: bool) -> Result<(), NbdError> {
        let mut rest = vec![0; chunk_rest_len(self.agreed.headers)];
        self.channel.read_exact(&mut rest)?;
        // The length comes last.
        let length =
            rest.iter().skip(rest.len().saturating_sub(8)).fold(0, |length, byte| length << 8 | u64::from(*byte));
        match reply.chunk(kind, length, is_last).map_err(NbdError::protocol)? {
            Payload::List(length) => {
                let mut payload = vec![0; length];
                self.channel.read_exact(&mut payload)?;
                reply.take(kind, &payload).map_err(NbdError::protocol)
            }
            Payload::Data(length) => {
                let offset: [u8; 8] = self.read()?;
                let offset = split_u64(&mut offset.as_slice()).unwrap_or(u64::MAX);
                let into = reply.place(offset, length).map_err(NbdError::protocol)?;
                Ok(transfer::receive(&self.channel, &into)?)
            }
        }
    }

    /// Receives the beginning of a reply. The time limit does not hold before its first byte if a request in flight may
    /// take long.
    fn read_start(&self) -> Result<[u8; REPLY_START_LEN], NbdError> {
        let mut start = [0; REPLY_START_LEN];
        loop {
            match self.channel.read(&mut start) {
                Ok(read) => {
                    // Nothing: it says how the connection has ended.
                    self.channel.read_exact(start.get_mut(read..).unwrap_or_default())?;
                    return Ok(start);
                }
                Err(error) if error.is_timeout() && self.may_take_long() => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn may_take_long(&self) -> bool {
        self.state.lock().in_flight.values().any(|request| request.may_take_long)
    }

    fn read<const N: usize>(&self) -> Result<[u8; N], NbdError> {
        let mut bytes = [0; N];
        self.channel.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Ends the connection, and all requests in flight. Returns the first reason.
    fn fail(&self, error: NbdError) -> Arc<NbdError> {
        let (error, lost) = {
            let mut state = self.state.lock();
            let error = Arc::clone(state.failed.get_or_insert_with(|| Arc::new(error)));
            (error, std::mem::take(&mut state.in_flight))
        };
        let _ = self.channel.shutdown(Shutdown::Both);
        self.changed.notify_one();
        for request in lost.into_values() {
            request.outcome.set(Err(Arc::clone(&error)));
        }
        error
    }
}
