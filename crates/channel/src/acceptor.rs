//! Who connects, and is let in.
//!
//! A channel of a migration that says nothing at first, as the one for requested pages in postcopy, cannot be
//! recognized by its bytes. Over TLS it can: who comes through the handshake is trusted, and who does not is a
//! stranger.
//!
//! The law: ***a connecting peer never delays another one.** Connections whose handshake is not done wait in a queue;
//! when it is full, the one that has waited longest is closed. Without TLS nothing distinguishes them, and the first
//! connection is taken.

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

/// Connections that may wait until they have shaken hands.
const PENDING_MAX: usize = 64;
/// Connections that are accepted before it is looked whether the time is over.
const AT_ONCE: usize = 256;
/// The most lines that are logged.
const REFUSALS_MAX: usize = 16;

/// Lines that are reported once each, and a few of them only: a peer that connects again and again, and is refused for
/// one reason or for many, does not fill a log.
#[derive(Debug, Default)]
pub struct RefusalLog(Vec<String>);

impl RefusalLog {
    /// Whether this one is to be reported.
    pub fn is_new(&mut self, line: &str) -> bool {
        let new = self.0.len() < REFUSALS_MAX && self.0.iter().all(|told| told != line);
        if new {
            self.0.push(line.to_owned());
        }
        new
    }
}

/// Hears in a line why a connection was turned away.
type Report<'a> = Box<dyn FnMut(&str) + Send + 'a>;

/// Waits on a listener for a peer that is trusted.
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
    /// One without connections.
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

    /// Waits for so long at most; the channel, once a peer has completed the handshake, or, without TLS, has connected.
    /// Connections in the queue stay there until the next call.
    ///
    /// # Errors
    /// As [`Listener::accept`], but for its time-out; what is wrong with a stranger is none.
    pub fn step(&mut self, wait: Duration) -> Result<Option<Channel>, ChannelError> {
        let begun = Instant::now();
        loop {
            if let Some(channel) = self.accept()? {
                return Ok(Some(channel));
            }
            if let Some(channel) = self.look() {
                return Ok(Some(channel));
            }
            let rest = wait.saturating_sub(begun.elapsed());
            if rest.is_zero() {
                return Ok(None);
            }
            self.wait(rest)?;
        }
    }

    /// As [`step`](Self::step), for who has nothing else to do meanwhile.
    ///
    /// # Errors
    /// As `step`; [`ChannelError::TimedOut`] if no peer completes it in time.
    pub fn within(mut self, after: Duration) -> Result<Channel, ChannelError> {
        let peer = Arc::from(self.listener.local_uri().to_string());
        let timed_out = ChannelError::TimedOut { operation: Operation::Accept, peer, offset: None, after };
        self.step(after)?.ok_or(timed_out)
    }

    /// Takes new connections into the row; one that needs no handshake comes out of it at once.
    fn accept(&mut self) -> Result<Option<Channel>, ChannelError> {
        if self.listener.socket().is_none() {
            // It is connected already, to whom it was given for.
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
                // It may have come through since it was last looked at.
                if let Some(channel) = self.look() {
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

    /// Looks at those in the row: one that has come through.
    fn look(&mut self) -> Option<Channel> {
        for _ in 0..self.pending.len() {
            let channel = self.pending.pop_front()?;
            match is_in(&channel) {
                Ok(true) => return Some(channel),
                Ok(false) => self.pending.push_back(channel),
                Err(error) => self.refuse(&error),
            }
        }
        None
    }

    fn refuse(&mut self, error: &ChannelError) {
        // Who goes without a word in the handshake has not meant anything.
        if error.tls_failure().is_none_or(|failure| *failure == TlsFailure::Ended) {
            return;
        }
        let why = error.to_string();
        if let Some(report) = self.report.as_mut().filter(|_| self.refusals.is_new(&why)) {
            report(&why);
        }
    }

    /// Waits for a connection, or for bytes on one of the queue.
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

/// Whether it has come through the handshake, and is still there: a peer that does not trust this end may go without a
/// word behind it, as stock QEMU does.
fn is_in(channel: &Channel) -> Result<bool, ChannelError> {
    if !channel.try_establish()? {
        return Ok(false);
    }
    if channel.peek(&mut [0])? == Some(0) {
        channel.get(&mut [0])?;
    }
    Ok(true)
}
