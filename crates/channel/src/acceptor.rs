//! Accepting a peer that completes the TLS handshake.
//!
//! A migration channel on which the peer sends nothing at first, such as the postcopy channel for requested pages,
//! cannot be recognized by its bytes. Over TLS it can: a peer that completes the handshake is trusted.
//!
//! **Law: a connecting peer never delays another one.** Connections with an incomplete handshake wait in a queue; when
//! it is full, the oldest is closed. Without TLS nothing distinguishes peers, and the first connection is taken.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::channel::Channel;
use crate::error::{ChannelError, Operation};
use crate::listener::Listener;
use crate::tls::TlsFailure;

/// Maximum number of connections with an incomplete handshake.
const PENDING_MAX: usize = 64;
/// Connections accepted before the time limit is checked again.
const AT_ONCE: usize = 256;
/// Maximum number of reported lines.
const REFUSALS_MAX: usize = 16;

/// Deduplicates reasons for refused connections and bounds their number, so that a peer that keeps connecting does not
/// fill a log.
#[derive(Debug, Default)]
pub struct RefusalLog(Vec<String>);

impl RefusalLog {
    /// Whether `line` should be reported: it is new, and there are not too many yet.
    pub fn is_new(&mut self, line: &str) -> bool {
        let new = self.0.len() < REFUSALS_MAX && self.0.iter().all(|reported| reported != line);
        if new {
            self.0.push(line.to_owned());
        }
        new
    }
}

/// Callback that receives one line for each reason to refuse connections.
type Report<'a> = Box<dyn FnMut(&str) + Send + 'a>;

/// Accepts a trusted peer from a listener.
pub struct Acceptor<'a> {
    listener: &'a Listener,
    pending: VecDeque<Channel>,
    refusals: RefusalLog,
    report: Option<Report<'a>>,
}

impl fmt::Debug for Acceptor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor")
            .field("listener", &self.listener)
            .field("pending", &self.pending)
            .finish_non_exhaustive()
    }
}

impl<'a> Acceptor<'a> {
    /// Creates an acceptor without pending connections.
    pub fn new(listener: &'a Listener) -> Self {
        Self { listener, pending: VecDeque::new(), refusals: RefusalLog::default(), report: None }
    }

    /// Calls `report` with the reason why a connection was rejected in the TLS handshake. The same reason is reported
    /// once.
    #[must_use]
    pub fn on_refusal(mut self, report: impl FnMut(&str) + Send + 'a) -> Self {
        self.report = Some(Box::new(report));
        self
    }

    /// Waits at most `wait` for a peer that completes the handshake or, without TLS, connects. Connections in the queue
    /// stay there until the next call.
    ///
    /// # Errors
    /// As [`Listener::accept`], except its time-out. A failed handshake of a peer is no error.
    pub fn poll(&mut self, wait: Duration) -> Result<Option<Channel>, ChannelError> {
        let begun = Instant::now();
        loop {
            if let Some(channel) = self.accept()? {
                return Ok(Some(channel));
            }
            if let Some(channel) = self.take_established() {
                return Ok(Some(channel));
            }
            let rest = wait.saturating_sub(begun.elapsed());
            if rest.is_zero() {
                return Ok(None);
            }
            self.wait(rest)?;
        }
    }

    /// Waits as [`poll`](Self::poll), and fails if no peer is accepted in time.
    ///
    /// # Errors
    /// As `poll`; [`ChannelError::TimedOut`] if no peer completes it in time.
    pub fn accept_within(mut self, after: Duration) -> Result<Channel, ChannelError> {
        let peer = Arc::from(self.listener.local_uri().to_string());
        let timed_out = ChannelError::TimedOut { operation: Operation::Accept, peer, offset: None, after };
        self.poll(after)?.ok_or(timed_out)
    }

    /// Accepts new connections into the queue. Returns one that needs no handshake at once.
    fn accept(&mut self) -> Result<Option<Channel>, ChannelError> {
        if self.listener.socket().is_none() {
            // An inherited connection: it is connected already.
            return self.listener.accept(None).map(Some);
        }
        for _ in 0..AT_ONCE {
            let channel = match self.listener.accept(Some(Duration::ZERO)) {
                Err(error) if error.is_timeout() => break,
                accepted => accepted?,
            };
            if !channel.is_encrypted() {
                return Ok(Some(channel));
            }
            if self.pending.len() >= PENDING_MAX {
                // A handshake in the queue may be complete by now.
                if let Some(channel) = self.take_established() {
                    return Ok(Some(channel));
                }
                if self.pending.len() >= PENDING_MAX {
                    self.pending.pop_front();
                }
            }
            self.pending.push_back(channel);
        }
        Ok(None)
    }

    /// Returns a queued connection whose handshake is complete.
    fn take_established(&mut self) -> Option<Channel> {
        for _ in 0..self.pending.len() {
            let channel = self.pending.pop_front()?;
            match is_established(&channel) {
                Ok(true) => return Some(channel),
                Ok(false) => self.pending.push_back(channel),
                Err(error) => self.refuse(&error),
            }
        }
        None
    }

    fn refuse(&mut self, error: &ChannelError) {
        // A peer that closes the connection without an alert, such as a port scanner, is not worth a report.
        if error.tls_failure().is_none_or(|failure| *failure == TlsFailure::HandshakeClosed) {
            return;
        }
        let why = error.to_string();
        if let Some(report) = self.report.as_mut().filter(|_| self.refusals.is_new(&why)) {
            report(&why);
        }
    }

    /// Waits for a connection, or for bytes on a queued one.
    fn wait(&self, rest: Duration) -> Result<(), ChannelError> {
        let fds = self.listener.socket().into_iter().chain(self.pending.iter().map(Channel::as_fd));
        let mut polled: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut polled, Timespec::try_from(rest).ok().as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => {
                let (operation, peer) = (Operation::Accept, self.listener.local_uri().to_string());
                Err(ChannelError::setup(operation, peer, io::Error::from(errno)))
            }
        }
    }
}

/// Whether the handshake is complete and the connection still open: a peer that does not trust this end may close right
/// after the handshake without an alert, as stock QEMU does.
fn is_established(channel: &Channel) -> Result<bool, ChannelError> {
    if !channel.try_complete_handshake()? {
        return Ok(false);
    }
    if channel.peek(&mut [0])? == Some(0) {
        channel.read_exact(&mut [0])?;
    }
    Ok(true)
}
