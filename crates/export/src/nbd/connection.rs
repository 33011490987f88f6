//! One client, from its first byte to its last.
//!
//! The law: no client can make a thread of a connection wait without end: the server cuts the connection of a
//! handshake that takes too long and of a client that makes no progress, and wakes a thread that serves requests.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

use futures_util::task::AtomicWaker;
use limosa_channel::{Channel, ChannelError, Tls};
use limosa_page::to_millis;
use limosa_storage::{Pollable, block_on};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl, socket_type};
use rustix::net::{Shutdown, shutdown};

use super::budget::Budget;
use super::handshake::{Established, HandshakeError, shake_hands};
use super::limits::{Counting, Limits};
use super::negotiation::Encryption;
use super::transmission::{Ending, Transmission};
use crate::exports::Exports;
use crate::failure_log::FailureLog;
use crate::peer::Peer;

/// The stage of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Handshake,
    Requests,
}

/// The activity of a connection. One that is `Active` becomes `Quiet`, then `Idle`, whenever it ages, and
/// `Trimmed` when it has freed its memory. Bytes that move make it `Active`.
mod activity {
    pub(super) const ACTIVE: u8 = 0;
    pub(super) const QUIET: u8 = 1;
    pub(super) const IDLE: u8 = 2;
    pub(super) const TRIMMED: u8 = 3;
}

/// The kind of a connection, by which it is cut.
#[derive(Debug)]
enum Way {
    Socket,
    /// A clone of the channel: to shut it down wakes its waits.
    Pipes(Channel),
}

/// Time for a client to receive the last replies and close the connection.
const LINGER: Duration = Duration::from_secs(1);

/// The part of a server that all connections share.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) exports: Exports,
    pub(super) limits: Limits,
    pub(super) tls: Option<(Tls, Encryption)>,
    pub(super) counting: Counting,
    pub(super) budget: Arc<Budget>,
    /// The zero of all deadlines.
    pub(super) begun: Instant,
    /// Decides which clients are logged that TLS refuses.
    pub(super) refusals: FailureLog,
}

/// The part of a connection that its thread and the server share.
#[derive(Debug)]
pub(super) struct Connection {
    common: Arc<Common>,
    /// The descriptor that is read, and the one that is written: the same of a socket.
    pub(super) input: Pollable,
    pub(super) output: Pollable,
    way: Way,
    peer: Arc<Peer>,
    in_handshake: AtomicBool,
    activity: AtomicU8,
    /// Milliseconds since the server's beginning at which the connection is cut; 0: never.
    deadline: AtomicU64,
    cut: Arc<AtomicBool>,
    stopping: AtomicBool,
    waker: AtomicWaker,
}

impl Connection {
    /// Begins one, with its handshake.
    ///
    /// # Errors
    /// The kernel has no descriptors left.
    pub(super) fn new(common: &Arc<Common>, channel: &Channel) -> std::io::Result<Self> {
        let (read, written) = (channel.as_fd(), channel.output_fd());
        let input = Pollable::new(read.try_clone_to_owned()?);
        let shared = read.as_raw_fd() == written.as_raw_fd();
        let output = if shared { input.clone() } else { Pollable::new(written.try_clone_to_owned()?) };
        let way = match socket_type(read) {
            Ok(_) => Way::Socket,
            Err(_) => Way::Pipes(channel.try_clone().map_err(std::io::Error::other)?),
        };
        keep_alive(read);
        let connection = Self {
            common: Arc::clone(common),
            input,
            output,
            way,
            peer: Arc::new(Peer::of(read)),
            in_handshake: AtomicBool::new(true),
            activity: AtomicU8::new(activity::TRIMMED),
            deadline: AtomicU64::new(0),
            cut: Arc::new(AtomicBool::new(false)),
            stopping: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        };
        connection.expect_within(common.limits.handshake);
        Ok(connection)
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.common.limits
    }

    /// The other end.
    pub(super) const fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    pub(super) fn counting(&self) -> &Counting {
        &self.common.counting
    }

    pub(super) fn budget(&self) -> &Arc<Budget> {
        &self.common.budget
    }

    /// Notes whether requests moved. Returns whether the connection has been idle for so long that it should free its
    /// memory.
    pub(super) fn note_activity(&self, moved: bool) -> bool {
        let before = self.activity.load(Ordering::Relaxed);
        if moved {
            if before != activity::ACTIVE {
                self.activity.store(activity::ACTIVE, Ordering::Relaxed);
            }
            return false;
        }
        let is_idle = before == activity::IDLE;
        if is_idle {
            self.activity.store(activity::TRIMMED, Ordering::Relaxed);
        }
        is_idle
    }

    /// Lets time pass: has the connection free its memory if nothing moved since the last time.
    pub(super) fn age(&self) {
        let next = |from, to| self.activity.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if next(activity::QUIET, activity::IDLE) {
            self.waker.wake();
        } else {
            next(activity::ACTIVE, activity::QUIET);
        }
    }

    /// Has `waker` woken when the server stops.
    pub(super) fn register(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    fn stage(&self) -> Stage {
        if self.in_handshake.load(Ordering::Acquire) { Stage::Handshake } else { Stage::Requests }
    }

    fn expect_within(&self, time: Duration) {
        let at = to_millis(self.common.begun.elapsed().saturating_add(time)).max(1);
        self.deadline.store(at, Ordering::Release);
    }

    /// Notes whether the client has to do something, and whether it has.
    pub(super) fn note_progress(&self, waits_for_client: bool, moved: bool) {
        let watched = self.deadline.load(Ordering::Relaxed) != 0;
        if !waits_for_client {
            if watched {
                self.deadline.store(0, Ordering::Release);
            }
        } else if moved || !watched {
            self.expect_within(self.common.limits.stall);
        }
    }

    /// Cuts the connection if its time is over.
    pub(super) fn cut_if_late(&self) {
        let deadline = self.deadline.load(Ordering::Acquire);
        if deadline == 0 || to_millis(self.common.begun.elapsed()) < deadline || self.cut.swap(true, Ordering::AcqRel) {
            return;
        }
        let counting = &self.common.counting;
        let counter = match self.stage() {
            Stage::Handshake => &counting.handshake_timeouts,
            Stage::Requests => &counting.stalled,
        };
        Counting::add(counter, 1);
        self.cut();
    }

    /// Cuts the connection.
    pub(super) fn cut(&self) {
        self.cut.store(true, Ordering::Release);
        // The client may be gone.
        let _ = match &self.way {
            Way::Socket => shutdown(&self.input, Shutdown::Both).map_err(drop),
            Way::Pipes(channel) => channel.shutdown(limosa_channel::Shutdown::Both).map_err(drop),
        };
        self.waker.wake();
    }

    /// Returns what is true once it is cut.
    pub(super) fn cut_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.cut)
    }

    pub(super) fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }

    /// Lets the client receive its last replies. A socket that is closed with unread bytes in it is reset, and its peer
    /// loses what it has not received yet (RFC 1122, 4.2.2.13). Its buffer is not on the stack of an idle connection.
    #[inline(never)]
    fn linger(&self, channel: &Channel) {
        if !matches!(self.way, Way::Socket) || channel.shutdown(limosa_channel::Shutdown::Write).is_err() {
            return;
        }
        let until = Instant::now() + LINGER;
        let mut scratch = [0; 4096];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let left = Timespec::try_from(left).unwrap_or_default();
            let mut fds = [PollFd::new(&self.input, PollFlags::IN)];
            // Nothing arrives in time, or the client has closed it.
            if !poll(&mut fds, Some(&left)).is_ok_and(|ready| ready > 0)
                || !rustix::io::read(&self.input, &mut scratch).is_ok_and(|count| count > 0)
            {
                return;
            }
        }
    }

    /// Has the connection end: requests in flight are carried out, further ones refused.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        if self.stage() == Stage::Handshake {
            self.cut();
        }
        self.waker.wake();
    }

    /// Serves the client until it or the server ends.
    pub(super) fn serve(&self, channel: Channel) {
        let common = &*self.common;
        let tls = common.tls.as_ref().map(|(tls, encryption)| (tls, *encryption));
        let Established { channel, agreement } = match shake_hands(channel, &common.exports, tls, self) {
            Ok(established) => established,
            Err(error) => return self.report_handshake(&error),
        };
        self.deadline.store(0, Ordering::Release);
        self.in_handshake.store(false, Ordering::Release);
        // Only its name: only clients keep an export that is removed.
        let export = agreement.export.name().to_owned();
        let begun = channel.set_nonblocking().map_err(Ending::Channel);
        let ending = match begun {
            Ok(()) => block_on(Transmission::new(&channel, self, agreement).run()),
            Err(ending) => ending,
        };
        if matches!(ending, Ending::Stopped | Ending::Protocol(_)) {
            self.linger(&channel);
        }
        match ending {
            Ending::Orderly | Ending::Stopped | Ending::Cut => {}
            Ending::Protocol(why) => {
                Counting::add(&common.counting.protocol_errors, 1);
                tracing::info!(export, why, "a client broke the protocol");
            }
            Ending::Channel(error) => {
                if !self.is_cut() && !error.is_closed() {
                    Counting::add(&common.counting.protocol_errors, 1);
                }
                tracing::info!(export, %error, "a connection ended");
            }
            Ending::Wait(error) => tracing::warn!(export, %error, "a connection cannot be waited for"),
        }
    }

    fn report_handshake(&self, error: &HandshakeError) {
        match error {
            HandshakeError::Aborted => {}
            // A client that closes between two options has seen enough: nbdinfo does so.
            HandshakeError::Channel(ChannelError::Closed { got: 0, .. } | ChannelError::Broken { .. }) => {}
            HandshakeError::Channel(_) if self.is_cut() || self.is_stopping() => {}
            HandshakeError::Channel(ChannelError::Tls { peer, failure, .. }) => {
                Counting::add(&self.common.counting.protocol_errors, 1);
                // Anybody who reaches the port can make it fail.
                if let Some(silent) = self.common.refusals.note(Instant::now()) {
                    tracing::warn!(%peer, %failure, earlier_unlogged = silent, "a client was refused by TLS");
                }
            }
            error => {
                Counting::add(&self.common.counting.protocol_errors, 1);
                tracing::info!(%error, "a handshake failed");
            }
        }
    }
}

/// Has the kernel end the connection of a host that has gone without a word, two minutes later. Only TCP needs that.
fn keep_alive(socket: BorrowedFd<'_>) {
    let _ = set_socket_keepalive(socket, true)
        .and_then(|()| set_tcp_keepidle(socket, Duration::from_secs(60)))
        .and_then(|()| set_tcp_keepintvl(socket, Duration::from_secs(10)))
        .and_then(|()| set_tcp_keepcnt(socket, 6));
}
