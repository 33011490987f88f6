//! The requests of a connection, from the end of its handshake on.
//!
//! Laws: one thread does everything, and waits for its client, its disk and the end of the server in one place. It
//! never waits for the client alone while requests are in flight: others may wait for what they have begun. No request
//! is dropped: a connection whose client is gone waits for its requests, and drops their replies. A request begins only
//! while its export lets it ([`Client::enter`]).

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use limosa_channel::{Channel, ChannelError};
use limosa_storage::{Pollable, Ready, submit_gathered};

use super::admission::{Disconnect, Facts};
use super::budget::{Account, Load};
use super::buffers::Buffers;
use super::connection::Connection;
use super::execute::{Body, Finished, execute, kind, subject};
use super::input::{Incoming, Input, InputError, Next};
use super::limits::Counting;
use super::negotiation::Agreement;
use super::output::Output;
use crate::clients::{Access, Client};
use crate::counters::{Outcome, RequestKind};
use crate::gathered::Gathered;
use limosa_nbd::protocol::error::ErrorCode;

/// How a connection ended.
#[derive(Debug)]
pub(super) enum Ending {
    /// The client has disconnected, or closed the connection between two requests.
    Orderly,
    /// The server is stopped.
    Stopped,
    /// The server has cut the connection.
    Cut,
    /// The client broke the protocol.
    Protocol(String),
    /// The channel failed, or was closed in the middle of a message.
    Channel(ChannelError),
    /// The kernel has no room to wait for the client.
    Wait(std::io::Error),
}

/// Rounds of receiving and sending after which requests that were begun are handed to the kernel, although the client
/// sends more: other clients may wait for them.
const ROUNDS_MAX: u32 = 8;

/// A request in flight: what was asked, and how it ended.
type InFlight = Pin<Box<dyn Future<Output = Done> + Send>>;

struct Done {
    finished: Finished,
    kind: RequestKind,
    length: u64,
    begun: Instant,
}

/// The readiness of one direction of the channel.
struct Readiness {
    pollable: Pollable,
    wait: Option<Ready>,
    /// A call is worth trying.
    ready: bool,
}

impl Readiness {
    fn new(pollable: &Pollable, ready: bool) -> Self {
        Self { pollable: pollable.clone(), wait: None, ready }
    }

    /// Waits, unless it is ready.
    fn poll(&mut self, context: &mut Context<'_>, begin: fn(&Pollable) -> Ready) -> Poll<std::io::Result<()>> {
        while !self.ready {
            let wait = self.wait.get_or_insert_with(|| begin(&self.pollable));
            let ended = ready!(Pin::new(wait).poll(context));
            self.wait = None;
            ended?;
            self.ready = true;
        }
        Poll::Ready(Ok(()))
    }
}

/// The requests of a connection.
pub(super) struct Transmission<'a> {
    channel: &'a Channel,
    connection: &'a Connection,
    agreement: Arc<Agreement>,
    facts: Facts,
    buffers: Buffers,
    input: Input,
    output: Output,
    requests: FuturesUnordered<InFlight>,
    gathered: Gathered,
    /// Dropped after the requests.
    client: Client,
    /// Requests, and their bytes, whose replies were not handed over.
    account: Account,
    /// Requests that are done, to be counted.
    done: Vec<Outcome>,
    /// The time, read once for all requests that begin or end at once.
    clock: Option<Instant>,
    readable: Readiness,
    writable: Readiness,
    /// Nothing more is taken from the client.
    ending: Option<Ending>,
    /// Requests wait for room.
    full: bool,
}

impl<'a> Transmission<'a> {
    /// Begins with the first request.
    pub(super) fn new(channel: &'a Channel, connection: &'a Connection, agreement: Agreement) -> Self {
        let Agreement { export, medium, headers, contexts } = &agreement;
        let facts = Facts {
            headers: *headers,
            size: medium.size(),
            read_only: export.is_read_only(),
            has_contexts: !contexts.is_empty(),
        };
        let budget = connection.budget();
        let (buffers, client) = (Buffers::new(Arc::clone(budget)), export.join(Arc::clone(connection.peer())));
        Self {
            channel,
            connection,
            facts,
            agreement: Arc::new(agreement),
            input: Input::new(buffers.clone()),
            output: Output::new(buffers.clone()),
            buffers,
            requests: FuturesUnordered::new(),
            gathered: Gathered::default(),
            client,
            account: Account::new(Arc::clone(budget)),
            done: Vec::new(),
            clock: None,
            // An encrypted channel may have decrypted what came with the end of its handshake. Of any other one nothing
            // has been received, and an idle client needs no buffer.
            readable: Readiness::new(&connection.input, channel.is_encrypted()),
            writable: Readiness::new(&connection.output, true),
            ending: None,
            full: false,
        }
    }

    /// Serves requests until the client or the server ends.
    pub(super) async fn run(mut self) -> Ending {
        poll_fn(|context| self.poll(context)).await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Ending> {
        self.connection.register(context.waker());
        self.client.register(context.waker());
        if (self.connection.is_cut() || self.client.access() == Access::Cut) && !self.is_deaf() {
            self.fail(Ending::Cut);
        }
        let mut moved = false;
        for round in 1.. {
            let mut progress = self.collect(context);
            progress |= self.send(context);
            progress |= self.receive(context);
            if self.gathered.is_enough() {
                // Only now are they polled for the first time.
                progress |= self.collect(context);
                submit_gathered();
            }
            self.gathered = Gathered::default();
            moved |= progress;
            if !progress {
                break;
            }
            if round == ROUNDS_MAX {
                context.waker().wake_by_ref();
                break;
            }
        }
        self.client.count(&mut self.done);
        if self.requests.is_empty() {
            self.client.leave();
            // An idle client is woken when requests may begin again.
            self.look_for_medium();
        }
        if self.requests.is_empty()
            && self.output.is_empty()
            && let Some(ending) = self.ending.take()
        {
            return Poll::Ready(ending);
        }
        if self.connection.note_activity(moved) && self.requests.is_empty() && self.output.is_empty() {
            self.buffers.clear();
            self.input.trim();
        }
        let waits_for_client = !self.output.is_empty() || (self.input.is_amid() && !self.full);
        self.connection.note_progress(waits_for_client, moved);
        Poll::Pending
    }

    /// Takes requests that are done.
    fn collect(&mut self, context: &mut Context<'_>) -> bool {
        let mut progress = false;
        self.clock = None;
        while let Poll::Ready(Some(Done { finished, kind, length, begun })) = self.requests.poll_next_unpin(context) {
            progress = true;
            let failed = matches!(finished.body, Body::Failed(_));
            let time = self.now().saturating_duration_since(begun);
            self.done.push(Outcome { kind, length, failed, time });
            self.reply(finished);
        }
        progress
    }

    fn now(&mut self) -> Instant {
        *self.clock.get_or_insert_with(Instant::now)
    }

    fn reply(&mut self, finished: Finished) {
        if self.is_deaf() {
            // Its client is gone.
            self.account.release(Load { requests: 1, bytes: finished.held });
        } else {
            self.output.push(finished);
        }
    }

    /// Whether the client receives nothing any more.
    fn is_deaf(&self) -> bool {
        matches!(self.ending, Some(Ending::Channel(_) | Ending::Wait(_) | Ending::Cut))
    }

    fn fail(&mut self, ending: Ending) {
        self.ending = Some(ending);
        self.output.clear();
    }

    fn send(&mut self, context: &mut Context<'_>) -> bool {
        if self.output.is_empty() {
            return false;
        }
        match self.writable.poll(context, Pollable::writable) {
            Poll::Pending => return false,
            Poll::Ready(Err(error)) => {
                self.fail(Ending::Wait(error));
                return true;
            }
            Poll::Ready(Ok(())) => {}
        }
        let mut released = Load::default();
        Counting::add(&self.connection.counting().calls.own().sends, 1);
        match self.output.send(self.channel, &mut released) {
            Ok(moved) => {
                self.account.release(released);
                self.writable.ready = self.output.is_empty();
                // If it is not ready, the next round begins to wait.
                moved || !self.writable.ready
            }
            Err(error) => {
                self.fail(Ending::Channel(error));
                true
            }
        }
    }

    /// Takes requests from the client, as many as there is room for.
    fn receive(&mut self, context: &mut Context<'_>) -> bool {
        let mut progress = false;
        while self.ending.is_none() {
            let access = self.access();
            if access == Access::Quiesced {
                // Its client waits for the export, and not the other way round. What it sends meanwhile is found then.
                (self.full, self.readable.ready) = (true, true);
                break;
            }
            let (account, limits) = (&mut self.account, self.connection.limits());
            let has_room = |bytes| account.admit(bytes, limits, context.waker());
            match self.input.next(&self.facts, has_room) {
                Ok(Next::Request(request)) => {
                    self.full = false;
                    self.gathered.add(request.held());
                    self.begin(request, access);
                    progress = true;
                    if self.gathered.is_enough() {
                        break;
                    }
                    continue;
                }
                Ok(Next::NoRoom) => {
                    self.full = true;
                    break;
                }
                Ok(Next::Incomplete) => self.full = false,
                Err(InputError::Disconnect(Disconnect::Orderly)) => {
                    self.ending = Some(Ending::Orderly);
                    return true;
                }
                Err(error) => {
                    self.ending = Some(Ending::Protocol(error.to_string()));
                    return true;
                }
            }
            let is_last = match self.readable.poll(context, Pollable::readable) {
                Poll::Ready(Ok(())) => false,
                Poll::Pending if access == Access::Open => break,
                // What has come already may not have been reported yet.
                Poll::Pending => true,
                Poll::Ready(Err(error)) => {
                    self.fail(Ending::Wait(error));
                    return true;
                }
            };
            self.clock = None;
            Counting::add(&self.connection.counting().calls.own().receives, 1);
            match self.input.receive(self.channel) {
                Ok(Some((0, _))) => {
                    self.ending = Some(if self.connection.is_cut() {
                        Ending::Cut
                    } else if self.input.is_amid() {
                        Ending::Protocol("the connection was closed in the middle of a request".to_owned())
                    } else {
                        Ending::Orderly
                    });
                    return true;
                }
                // An encrypted channel may have more although it filled a part of the room only.
                Ok(Some((_, filled))) => self.readable.ready = filled || self.channel.is_encrypted(),
                Ok(None) if is_last => {
                    self.ending = Some(Ending::Stopped);
                    return true;
                }
                Ok(None) => self.readable.ready = false,
                Err(error) => self.fail(Ending::Channel(error)),
            }
            progress = true;
        }
        progress
    }

    /// Whether requests may begin now. If they may, the export counts this client's as in flight.
    fn access(&mut self) -> Access {
        if self.connection.is_stopping() {
            return Access::Ended;
        }
        let access = self.client.enter();
        if access == Access::Open {
            self.look_for_medium();
        }
        access
    }

    /// Lets go of a disk in whose place the export has another one.
    fn look_for_medium(&mut self) {
        if let Some(medium) = self.agreement.export.newer_medium(&self.agreement.medium) {
            self.facts.size = medium.size();
            self.agreement = Arc::new(Agreement { medium, ..(*self.agreement).clone() });
        }
    }

    fn begin(&mut self, request: Incoming, access: Access) {
        if access != Access::Open {
            let subject = subject(self.facts.headers, &request);
            let finished = Finished { subject, body: Body::Failed(ErrorCode::Shutdown), held: request.held() };
            return self.reply(finished);
        }
        let (kind, length, begun) = (kind(request.action.as_ref().ok()), request.header.length, self.now());
        let request = execute(Arc::clone(&self.agreement), self.buffers.clone(), request, self.connection.cut_flag());
        self.requests.push(Box::pin(async move { Done { finished: request.await, kind, length, begun } }));
    }
}
