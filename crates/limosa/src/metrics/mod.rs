//! `--metrics`: counters for Prometheus, over HTTP.
//!
//! Law: one thread serves all who ask, and waits for none of them: it polls, and each conversation has an end. No
//! client of it, even a hostile one, holds up the work that is counted.

mod http;
pub(crate) mod text;

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use limosa_channel::{Channel, Listener, Options, Uri};
use limosa_socket::SocketAccess;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use http::{Decision, HEAD_MAX};

/// Conversations at the same time; further ones wait in the listener's queue.
const CLIENTS: usize = 16;
/// Time for a conversation.
const TIME: Duration = Duration::from_secs(5);
/// Time after which clients are accepted again when the kernel had no room for one.
const PAUSE: Duration = Duration::from_millis(50);

/// Listens for those who ask, who may connect as `access` says.
///
/// # Errors
/// Nothing can listen at `uri`.
pub(crate) fn bind(uri: &Uri, access: SocketAccess) -> anyhow::Result<Listener> {
    let listener = Listener::bind_with(uri, access, &Options::default()).context("--metrics")?;
    anyhow::ensure!(listener.socket().is_some(), "--metrics {uri}: it must be a listening socket");
    Ok(listener)
}

/// The thread that answers. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Metrics {
    stop: Arc<OwnedFd>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Metrics {
    /// Serves `page`, which is written for each who asks.
    ///
    /// # Errors
    /// The kernel has no room for a thread or a descriptor.
    pub(crate) fn serve(listener: Listener, page: impl Fn() -> String + Send + 'static) -> anyhow::Result<Self> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("--metrics")?;
        let stop = Arc::new(stop);
        let stopped = Arc::clone(&stop);
        let serve = move || serve(&listener, &stopped, &page);
        let thread = thread::Builder::new().name("metrics".into()).spawn(serve).context("--metrics")?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        // It cannot be full: that takes more writes than are possible.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Serves all who ask until `stop` is readable.
fn serve(listener: &Listener, stop: &OwnedFd, page: &impl Fn() -> String) {
    let mut conversations: Vec<Conversation> = Vec::new();
    let mut paused = false;
    while let Some(socket) = listener.socket() {
        let accepts = !paused && conversations.len() < CLIENTS;
        let interest = if accepts { PollFlags::IN } else { PollFlags::empty() };
        let mut fds =
            vec![PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN), PollFd::from_borrowed_fd(socket, interest)];
        fds.extend(conversations.iter().map(|one| PollFd::from_borrowed_fd(one.channel.as_fd(), one.interest())));
        let now = Instant::now();
        let late = conversations.iter().map(|one| one.until.saturating_duration_since(now)).min();
        let time = if paused { Some(late.map_or(PAUSE, |late| late.min(PAUSE))) } else { late };
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        match poll(&mut fds, time.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            // The kernel has no memory: those who ask ask again.
            Err(_) => {
                thread::sleep(PAUSE);
                continue;
            }
        }
        let ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        if ready.first() == Some(&true) {
            return;
        }
        let now = Instant::now();
        let mut ready_of = ready.iter().skip(2);
        conversations.retain_mut(|one| {
            let is_ready = ready_of.next() == Some(&true);
            now < one.until && (!is_ready || one.advance(page))
        });
        paused = false;
        if accepts && ready.get(1) == Some(&true) {
            match listener.accept(Some(Duration::ZERO)) {
                Ok(channel) => conversations.push(Conversation::new(channel)),
                Err(error) => paused = !error.is_timeout(),
            }
        }
    }
}

/// The stage of a conversation: the request arrives, then the answer leaves, then the peer closes. A socket that is
/// closed with unread bytes in it is reset, and its peer loses the answer.
#[derive(Debug)]
enum Stage {
    Reading(Vec<u8>),
    Writing { answer: Vec<u8>, sent: usize },
    Closing,
}

/// One who asks.
#[derive(Debug)]
struct Conversation {
    channel: Channel,
    until: Instant,
    stage: Stage,
}

impl Conversation {
    fn new(channel: Channel) -> Self {
        Self { channel, until: Instant::now() + TIME, stage: Stage::Reading(Vec::new()) }
    }

    /// The events that it waits for.
    fn interest(&self) -> PollFlags {
        match self.stage {
            Stage::Reading(_) | Stage::Closing => PollFlags::IN,
            Stage::Writing { .. } => PollFlags::OUT,
        }
    }

    /// Does what can be done without waiting. Returns false if the conversation is over.
    fn advance(&mut self, page: &impl Fn() -> String) -> bool {
        let mut room = [0; HEAD_MAX];
        match &mut self.stage {
            Stage::Reading(bytes) => {
                let free = HEAD_MAX.saturating_sub(bytes.len());
                let room = room.get_mut(..free).unwrap_or_default();
                let got = match recv(&self.channel, &mut *room, RecvFlags::DONTWAIT) {
                    Ok((_, 0)) => return false,
                    Ok((_, got)) => got.min(room.len()),
                    Err(errno) => return is_passing(errno),
                };
                bytes.extend_from_slice(room.get(..got).unwrap_or_default());
                let answer = match http::decide(bytes) {
                    Decision::Incomplete => return true,
                    Decision::Metrics { body } => http::metrics(&page(), body),
                    Decision::Refused(status) => http::refusal(status),
                };
                self.stage = Stage::Writing { answer, sent: 0 };
                true
            }
            Stage::Writing { answer, sent } => {
                let rest = answer.get(*sent..).unwrap_or_default();
                match send(&self.channel, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                    Ok(more) => *sent += more,
                    Err(errno) => return is_passing(errno),
                }
                if *sent < answer.len() {
                    return true;
                }
                self.stage = Stage::Closing;
                shutdown(&self.channel, Shutdown::Write).is_ok()
            }
            Stage::Closing => match recv(&self.channel, &mut room, RecvFlags::DONTWAIT) {
                Ok((_, got)) => got > 0,
                Err(errno) => is_passing(errno),
            },
        }
    }
}

/// Whether a call failed because it would have had to wait.
fn is_passing(errno: Errno) -> bool {
    matches!(errno, Errno::AGAIN | Errno::INTR)
}
