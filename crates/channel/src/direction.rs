//! One direction of a channel: repeats system calls until the bytes have moved, or there is a reason to stop.
//!
//! The laws of this module: a transfer ends only by completion, by the end of the data, by an error of the kernel, by
//! the time-out, or by a shutdown on this side; a signal, a partial transfer or an unready descriptor does not end it.
//! The time-out counts from the last byte moved. A waiting thread can be woken: in the kernel's socket by
//! `shutdown(2)`, in `poll` by an event descriptor, in the rate limit by its condition variable.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
#[cfg(feature = "testing")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use limosa_page::{BrokenInvariant, invariant, to_nanos, to_usize};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::io::Errno;

use crate::counters::DirectionCounters;
use crate::rate::RateLimit;
use crate::transport::Transport;
use crate::vector::{BYTES_MAX, Batch, Cursor, In, Out};

/// The reason why a transfer stopped, without the peer and the offset that [`ChannelError`](crate::ChannelError) adds.
#[derive(Debug)]
pub(crate) enum Stop {
    /// Nothing moved for this time.
    TimedOut(Duration),
    /// This side shut the direction down.
    ShutDown,
    /// The data ended after `got` of `wanted` bytes.
    Ended { got: u64, wanted: u64 },
    /// The kernel's answer.
    Failed(io::Error),
    /// A bug of limosa.
    Internal(BrokenInvariant),
}

impl From<BrokenInvariant> for Stop {
    fn from(broken: BrokenInvariant) -> Self {
        Self::Internal(broken)
    }
}

type Result<T> = std::result::Result<T, Stop>;

/// Returns how many bytes may move next, at least 1, at an offset in bytes from the direction's first one. An error
/// ends the transfer as one of the kernel does. Called before every call to the kernel.
#[cfg(feature = "testing")]
pub type TransferHook = Box<dyn Fn(u64) -> io::Result<usize> + Send + Sync>;

/// The state of one direction, shared by all handles of a channel.
pub(crate) struct Direction {
    pub(crate) counters: DirectionCounters,
    readiness: PollFlags,
    /// Nanoseconds without progress after which a transfer gives up; 0 is never.
    timeout: AtomicU64,
    shut: AtomicBool,
    /// Writes in progress, and writes that failed halfway: those stay counted.
    under_way: AtomicUsize,
    /// Becomes readable at shutdown, for descriptors that the kernel cannot shut down.
    wake: Option<OwnedFd>,
    #[cfg(feature = "testing")]
    pub(crate) hook: OnceLock<TransferHook>,
}

impl std::fmt::Debug for Direction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { counters, timeout, shut, .. } = self;
        let mut direction = f.debug_struct("Direction");
        direction.field("counters", counters).field("timeout", timeout).field("shut", shut).finish_non_exhaustive()
    }
}

impl Direction {
    pub(crate) fn new(readiness: PollFlags, wake: Option<OwnedFd>) -> Self {
        let (timeout, shut, under_way) = (AtomicU64::new(0), AtomicBool::new(false), AtomicUsize::new(0));
        Self {
            counters: DirectionCounters::default(),
            readiness,
            timeout,
            shut,
            under_way,
            wake,
            #[cfg(feature = "testing")]
            hook: OnceLock::new(),
        }
    }

    /// Bytes of the next call, at most `limit`, of a transfer with `left` bytes to move.
    #[cfg(feature = "testing")]
    fn allow(&self, limit: usize, left: impl FnOnce() -> u64) -> Result<usize> {
        match self.hook.get() {
            Some(hook) if left() != 0 => {
                hook(self.counters.bytes()).map(|bytes| limit.min(bytes)).map_err(Stop::Failed)
            }
            _ => Ok(limit),
        }
    }

    #[cfg(not(feature = "testing"))]
    fn allow(&self, limit: usize, _left: impl FnOnce() -> u64) -> Result<usize> {
        Ok(limit)
    }

    pub(crate) fn set_timeout(&self, time: Option<Duration>) {
        let nanoseconds = time.map_or(0, to_nanos);
        self.timeout.store(nanoseconds, Ordering::Relaxed);
    }

    /// Marks the direction as shut down and wakes threads that wait in `poll`.
    pub(crate) fn shut(&self) -> io::Result<()> {
        self.shut.store(true, Ordering::SeqCst);
        if let Some(wake) = &self.wake {
            rustix::io::write(wake, &1_u64.to_ne_bytes())?;
        }
        Ok(())
    }

    pub(crate) fn is_shut(&self) -> bool {
        self.shut.load(Ordering::SeqCst)
    }

    /// Whether a write is in progress or failed halfway. Asked after [`shut`](Self::shut), it covers every write that
    /// may still move a byte or that the shutdown interrupted: one that begins later moves none.
    pub(crate) fn is_amid(&self) -> bool {
        self.under_way.load(Ordering::SeqCst) != 0
    }

    /// Starts the clock of a transfer.
    pub(crate) fn idle_timer(&self) -> IdleTimer {
        let nanoseconds = self.timeout.load(Ordering::Relaxed);
        let limit = (nanoseconds != 0).then(|| Duration::from_nanos(nanoseconds));
        IdleTimer { limit, since: limit.map(|_| Instant::now()) }
    }

    /// Waits until the descriptor is ready, the direction is shut down, or the time is over.
    fn wait(&self, transport: &Transport, time: Option<Duration>) -> std::result::Result<(), Errno> {
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        let own = PollFd::from_borrowed_fd(
            if self.readiness.contains(PollFlags::OUT) { transport.output() } else { transport.input() },
            self.readiness,
        );
        match &self.wake {
            Some(wake) => poll(&mut [own, PollFd::new(wake, PollFlags::IN)], time.as_ref())?,
            None => poll(&mut [own], time.as_ref())?,
        };
        Ok(())
    }
}

/// The parts of a transfer in one direction: the direction's state, the descriptor, and the rate limit.
#[derive(Clone, Copy)]
pub(crate) struct Transfer<'a> {
    pub(crate) direction: &'a Direction,
    pub(crate) transport: &'a Transport,
    pub(crate) rate: &'a RateLimit,
}

impl Transfer<'_> {
    /// Waits until the rate limit lets `owed` bytes out, and returns `owed`.
    pub(crate) fn pay(&self, owed: usize, idle: &mut IdleTimer) -> Result<usize> {
        if owed != 0 {
            let waited = self.rate.take_unless(owed as u64, &self.direction.shut).ok_or(Stop::ShutDown)?;
            if !waited.is_zero() {
                self.direction.counters.throttled(waited);
                // A pause by the rate limit must not count towards the time-out: the peer was not silent.
                idle.progress();
            }
        }
        Ok(owed)
    }

    /// Writes the whole list as fast as the rate limit allows, `descriptors` with the first byte.
    pub(crate) fn write_all(&self, gather: &mut Cursor<'_, Out>, mut descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        self.write_all_by(gather, |batch| match descriptors {
            [] => self.transport.write(batch),
            _ => {
                let moved = self.transport.write_with_descriptors(batch, descriptors)?;
                descriptors = &[];
                Ok(moved)
            }
        })
    }

    /// As [`write_all`](Self::write_all), writing each batch by `call`, which returns how many bytes of it moved.
    pub(crate) fn write_all_by(
        &self,
        gather: &mut Cursor<'_, Out>,
        mut call: impl FnMut(&Batch<'_, Out>) -> io::Result<usize>,
    ) -> Result<()> {
        self.direction.under_way.fetch_add(1, Ordering::SeqCst);
        self.write_batches(gather, &mut call).inspect(|()| {
            self.direction.under_way.fetch_sub(1, Ordering::SeqCst);
        })
    }

    fn write_batches(
        &self,
        gather: &mut Cursor<'_, Out>,
        call: &mut dyn FnMut(&Batch<'_, Out>) -> io::Result<usize>,
    ) -> Result<()> {
        let mut idle = self.direction.idle_timer();
        let (mut paid, mut left) = (0, gather.left());
        while let Some(batch) = gather.batch(self.direction.allow(self.rate.batch(), || left)?) {
            if self.direction.is_shut() {
                return Err(Stop::ShutDown);
            }
            // After a partial transfer, the bytes that did not go out are already paid for.
            paid += self.pay(batch.bytes().saturating_sub(paid), &mut idle)?;
            self.drain(&mut idle)?;
            let moved = self.attempt(&mut idle, batch.bytes(), || call(&batch))?;
            if moved == 0 {
                return Err(Stop::Failed(io::ErrorKind::WriteZero.into()));
            }
            paid = paid.saturating_sub(moved);
            gather.advance(moved);
            left = left.saturating_sub(moved as u64);
        }
        check_all_moved(left)?;
        self.drain(&mut idle)
    }

    /// Flushes the bytes that the transport buffers.
    fn drain(&self, idle: &mut IdleTimer) -> Result<()> {
        while self.transport.is_buffering() {
            self.attempt(idle, 0, || self.transport.flush())?;
        }
        Ok(())
    }

    /// Sends `length` bytes of a file from `offset` on, as fast as the rate limit allows, by sendfile.
    pub(crate) fn send_file(&self, file: BorrowedFd<'_>, mut offset: u64, length: u64) -> Result<()> {
        let mut idle = self.direction.idle_timer();
        let mut paid = 0;
        let mut left = length;
        while left != 0 {
            let now = to_usize(left).min(self.direction.allow(self.rate.chunk(), || left)?).min(BYTES_MAX);
            paid += self.pay(now.saturating_sub(paid), &mut idle)?;
            let moved = self.attempt(&mut idle, now, || self.transport.send_file(file, offset, now))?;
            if moved == 0 {
                let why = format!("the file that is sent ends at byte {offset}, {left} bytes too early");
                return Err(Stop::Failed(io::Error::new(io::ErrorKind::UnexpectedEof, why)));
            }
            self.direction.counters.spliced(moved);
            paid = paid.saturating_sub(moved);
            offset = offset.saturating_add(moved as u64);
            left = left.saturating_sub(moved as u64);
        }
        Ok(())
    }

    /// Fills the whole list.
    pub(crate) fn read_exact(&self, scatter: &mut Cursor<'_, In>) -> Result<()> {
        let mut idle = self.direction.idle_timer();
        let mut got = 0_u64;
        while let Some(moved) = self.read_part(scatter, true, &mut idle)? {
            if moved == 0 {
                return Err(Stop::Ended { got, wanted: got.saturating_add(scatter.left()) });
            }
            got = got.saturating_add(moved as u64);
        }
        Ok(())
    }

    /// Reads the bytes that are there; 0 is the end of the data, or an empty list.
    pub(crate) fn read(&self, scatter: &mut Cursor<'_, In>) -> Result<usize> {
        let mut idle = self.direction.idle_timer();
        Ok(self.read_part(scatter, false, &mut idle)?.unwrap_or(0))
    }

    /// Reads once. Returns `None` if the list is full, `Some(0)` at the end of the data.
    fn read_part(&self, scatter: &mut Cursor<'_, In>, whole: bool, idle: &mut IdleTimer) -> Result<Option<usize>> {
        let limit = self.direction.allow(self.rate.chunk(), || scatter.left())?;
        let Some(batch) = scatter.batch(limit) else { return Ok(None) };
        let moved = self.attempt(idle, batch.bytes(), || self.transport.read(&batch, whole))?;
        // A socket's shutdown on this side looks like an end of the data. Bytes that arrived before it were still read.
        if moved == 0 && self.direction.is_shut() {
            return Err(Stop::ShutDown);
        }
        scatter.advance(moved);
        // Paid for afterwards, because the number of bytes is known only then.
        let waited = match self.rate.take_unless(moved as u64, &self.direction.shut) {
            Some(waited) => waited,
            None if whole => return Err(Stop::ShutDown),
            // The bytes that were read must not be lost.
            None => Duration::ZERO,
        };
        if !waited.is_zero() {
            self.direction.counters.throttled(waited);
            idle.progress();
        }
        Ok(Some(moved))
    }

    /// Waits until there is something to read, which of an encrypted channel its session knows; or until `woken` is
    /// readable, and the channel is not: false.
    pub(crate) fn wait_to_read(&self, woken: BorrowedFd<'_>) -> Result<bool> {
        let session = if let Transport::Tls(session) = self.transport { Some(session) } else { None };
        let idle = self.direction.idle_timer();
        loop {
            // The read reports what fails here.
            let is_decrypted = session.is_some_and(|session| !matches!(session.peek(&mut [0]), Ok(None)));
            if is_decrypted || self.direction.is_shut() {
                return Ok(true);
            }
            let time = idle.remaining()?.and_then(|rest| Timespec::try_from(rest).ok());
            let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            // A descriptor that the kernel cannot shut down has one that wakes.
            let wake = self.direction.wake.as_ref().map_or(woken, OwnedFd::as_fd);
            let mut polled = [readable(self.transport.input()), readable(woken), readable(wake)];
            let began = Instant::now();
            let ready = poll(&mut polled, time.as_ref());
            self.direction.counters.waited(began.elapsed());
            let [own, woken, _] = polled.map(|polled| !polled.revents().is_empty());
            match ready {
                Err(Errno::INTR) => self.direction.counters.interrupted(),
                Err(errno) => return Err(Stop::Failed(errno.into())),
                // The bytes may be of a record that is incomplete or empty: the session consumes them.
                Ok(_) if own && session.is_some() => {}
                Ok(_) if own => return Ok(true),
                Ok(_) if woken => return Ok(false),
                Ok(_) => {}
            }
        }
    }

    /// Writes some of the next batch without waiting; `None` if nothing can be written now. Bytes that the transport
    /// buffers go out first.
    pub(crate) fn try_write(&self, gather: &mut Cursor<'_, Out>) -> Result<Option<usize>> {
        if self.direction.is_shut() {
            return Err(Stop::ShutDown);
        }
        if !self.try_drain()? {
            return Ok(None);
        }
        let limit = self.direction.allow(self.rate.batch(), || gather.left())?;
        let Some(batch) = gather.batch(limit) else { return Ok(Some(0)) };
        self.try_once(batch.bytes(), || self.transport.write(&batch))
    }

    /// Writes buffered bytes without waiting. Returns whether none is left.
    pub(crate) fn try_drain(&self) -> Result<bool> {
        while self.transport.is_buffering() {
            if self.try_once(0, || self.transport.flush())?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads the bytes that are there, without waiting; `None` if there are none yet, 0 at the end of the data.
    pub(crate) fn try_read(&self, scatter: &mut Cursor<'_, In>) -> Result<Option<usize>> {
        let limit = self.direction.allow(self.rate.chunk(), || scatter.left())?;
        let Some(batch) = scatter.batch(limit) else { return Ok(Some(0)) };
        match self.try_once(batch.bytes(), || self.transport.read(&batch, false))? {
            Some(0) if self.direction.is_shut() => Err(Stop::ShutDown),
            moved => Ok(moved),
        }
    }

    /// Calls `call` until it is not interrupted; `None` if it would wait.
    fn try_once(&self, offered: usize, mut call: impl FnMut() -> io::Result<usize>) -> Result<Option<usize>> {
        loop {
            self.direction.counters.called();
            match call() {
                Ok(moved) => {
                    self.direction.counters.moved(moved, offered);
                    invariant(moved <= offered, "no more bytes are moved than were offered")?;
                    return Ok(Some(moved));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => self.direction.counters.interrupted(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(_) if self.direction.is_shut() => return Err(Stop::ShutDown),
                Err(error) => return Err(Stop::Failed(error)),
            }
        }
    }

    /// Repeats `call` until bytes move, the data ends, or there is a reason to stop.
    pub(crate) fn attempt(
        &self,
        idle: &mut IdleTimer,
        offered: usize,
        mut call: impl FnMut() -> io::Result<usize>,
    ) -> Result<usize> {
        loop {
            if self.direction.wake.is_some() && self.direction.is_shut() {
                return Err(Stop::ShutDown);
            }
            self.direction.counters.called();
            match call() {
                Ok(moved) => {
                    // Counted before it is checked: a caller that decides by the counter whether a VM was handed over
                    // must not believe that these bytes never left.
                    self.direction.counters.moved(moved, offered);
                    // Otherwise the kernel has read or written past the end of the list.
                    invariant(moved <= offered, "no more bytes are moved than were offered")?;
                    idle.progress();
                    return Ok(moved);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    self.direction.counters.interrupted();
                    idle.remaining()?;
                }
                // Either the socket's own time-out expired, or the descriptor does not block.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let remaining = idle.remaining()?;
                    let began = Instant::now();
                    let ready = self.direction.wait(self.transport, remaining);
                    self.direction.counters.waited(began.elapsed());
                    match ready {
                        Err(Errno::INTR) => self.direction.counters.interrupted(),
                        Err(errno) => return Err(Stop::Failed(errno.into())),
                        Ok(()) => {}
                    }
                }
                Err(_) if self.direction.is_shut() => return Err(Stop::ShutDown),
                Err(error) => return Err(Stop::Failed(error)),
            }
        }
    }
}

/// Asserts that a transfer left nothing of its list behind.
fn check_all_moved(left: u64) -> std::result::Result<(), BrokenInvariant> {
    invariant(left == 0, "all bytes of a list are moved")
}

/// Time since the last progress; reads the clock only if there is a time-out.
pub(crate) struct IdleTimer {
    limit: Option<Duration>,
    since: Option<Instant>,
}

impl IdleTimer {
    pub(crate) fn progress(&mut self) {
        self.since = self.limit.map(|_| Instant::now());
    }

    /// Returns the rest of the limit (`None`: no limit), or fails with `Stop::TimedOut`.
    pub(crate) fn remaining(&self) -> Result<Option<Duration>> {
        let (Some(limit), Some(since)) = (self.limit, self.since) else { return Ok(None) };
        match limit.checked_sub(since.elapsed()) {
            Some(rest) if !rest.is_zero() => Ok(Some(rest)),
            _ => Err(Stop::TimedOut(limit)),
        }
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::*;

    #[test]
    #[should_panic(expected = "no more bytes are moved than were offered")]
    fn a_call_that_moves_more_than_it_was_offered_is_a_broken_invariant() {
        let transport = Transport::Socket(UnixStream::pair().unwrap().0.into(), Arc::default());
        let (direction, rate) = (Direction::new(PollFlags::OUT, None), RateLimit::default());
        let transfer = Transfer { direction: &direction, transport: &transport, rate: &rate };
        let _ = transfer.attempt(&mut direction.idle_timer(), 1, || Ok(2));
    }

    #[test]
    #[should_panic(expected = "all bytes of a list are moved")]
    fn bytes_that_a_transfer_leaves_behind_are_a_broken_invariant() {
        assert_eq!(check_all_moved(0), Ok(()));
        let _ = check_all_moved(1);
    }
}
