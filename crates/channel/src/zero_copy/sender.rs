//! Zero-copy sends of a channel.
//!
//! The law of this module: a write under any method has the same outcome as a plain one, including errors, time-outs,
//! rate limit and shutdown. If the kernel has no room to track another send (`ENOBUFS`: `RLIMIT_MEMLOCK`,
//! `net.core.optmem_max`), completions are read first; then less is offered at a time. If nothing of this channel is in
//! flight that could make room, the rest is copied, and so are more and more writes before the next attempt. Memory
//! that the kernel can copy but not pin (`EFAULT`: secret memory, device memory) is copied too. That is slower, and
//! correct.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrAny, connect_unspec, getpeername, getsockname, shutdown, sockopt,
};

use super::completions::{Completions, Unexpected};
use super::error_queue::{ErrorQueue, SocketQueue};
use super::pipe::Pipe;
use super::{ZeroCopy, memlock};
use crate::direction::{Direction, IdleTimer, Stop, Transfer};
use crate::options;
use crate::transport::Transport;
use crate::vector::{Batch, Cursor, Out};

/// Calls in flight after which completions are read.
const REAP: u64 = 32;

/// The longest single wait for a completion, between checks for a shutdown.
const SLICE: Duration = Duration::from_millis(100);

/// Minimum number of bytes offered at a time before bytes are copied instead.
const LEAST: usize = 4096;

/// Attempts to cut a connection.
const ABORTS: u32 = 100;

/// User time-out of a connection that could not be cut, in milliseconds.
const USER_TIMEOUT_MS: u32 = 1000;

/// How long queued data may still be sent on a connection that could not be cut.
const DRAIN_WITHIN: Duration = Duration::from_secs(3);

/// Maximum number of writes that are copied before zero-copy is tried again.
const SKIPPED_MAX: u32 = 256;

/// The reason why a named method is unavailable.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The transport does not support it.
    Unsupported(&'static str),
    /// The process may pin `limit` bytes, and the method needs `least`.
    MemoryLock { limit: u64, least: u64 },
    /// The kernel's answer.
    Failed(io::Error),
}

/// The zero-copy method of a channel, and its sends in flight.
#[derive(Debug)]
pub(crate) struct ZeroCopySender {
    /// The requested method. Under [`ZeroCopy::Auto`] a method that turns out to copy is replaced by another.
    setting: ZeroCopy,
    /// Number of the method, readable while a write holds the lock.
    method: AtomicU8,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    method: Method,
    completions: Completions,
    pace: Pace,
}

/// Adapts the size of sends to the room that the kernel had.
#[derive(Debug)]
struct Pace {
    /// Maximum number of bytes offered at a time.
    most: usize,
    /// Number of writes to copy before zero-copy is tried again, and the number of the last time.
    skip: u32,
    skipped: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self { most: usize::MAX, skip: 0, skipped: 0 }
    }
}

impl Pace {
    /// Notes that no zero-copy send was possible.
    fn give_up(&mut self) {
        self.skipped = self.skipped.saturating_mul(2).clamp(1, SKIPPED_MAX);
        self.skip = self.skipped;
    }

    /// Whether to copy this write; counts it.
    fn skips(&mut self) -> bool {
        let skips = self.skip > 0;
        self.skip = self.skip.saturating_sub(1);
        skips
    }
}

#[derive(Debug)]
enum Method {
    Copy,
    Msg,
    Splice(Pipe),
}

/// Numbers of the methods.
const COPY: u8 = 0;
const MSG: u8 = 1;
const SPLICE: u8 = 2;

impl Method {
    fn number(&self) -> u8 {
        match self {
            Self::Copy => COPY,
            Self::Msg => MSG,
            Self::Splice(_) => SPLICE,
        }
    }
}

impl ZeroCopySender {
    /// Selects the method for `setting` on this transport.
    pub(crate) fn new(setting: ZeroCopy, transport: &Transport) -> Result<Self, Refusal> {
        let chosen = match setting {
            ZeroCopy::Off => Method::Copy,
            ZeroCopy::Msg => msg_zerocopy(transport)?,
            ZeroCopy::Splice => {
                socket(transport)?;
                Method::Splice(Pipe::new().map_err(Refusal::Failed)?)
            }
            ZeroCopy::Auto => match socket(transport) {
                Err(_) => Method::Copy,
                Ok(fd) if is_local(fd) => Pipe::new().map_or(Method::Copy, Method::Splice),
                Ok(_) => msg_zerocopy(transport).unwrap_or(Method::Copy),
            },
        };
        let method = AtomicU8::new(chosen.number());
        let state = State { method: chosen, completions: Completions::default(), pace: Pace::default() };
        Ok(Self { setting, method, state: Mutex::new(state) })
    }

    /// Returns the requested method.
    pub(crate) fn setting(&self) -> ZeroCopy {
        self.setting
    }

    /// Returns the method in use: never [`ZeroCopy::Auto`].
    pub(crate) fn method(&self) -> ZeroCopy {
        match self.method.load(Ordering::Relaxed) {
            MSG => ZeroCopy::Msg,
            SPLICE => ZeroCopy::Splice,
            _ => ZeroCopy::Off,
        }
    }

    /// Writes a copied part, and then a part without a copy. `reused` memory must be free after a flush, so it is not
    /// spliced.
    pub(crate) fn write_all(
        &self,
        out: Transfer<'_>,
        [copied, pages, all]: [&mut Cursor<'_, Out>; 3],
        reused: bool,
    ) -> Result<(), Stop> {
        let mut state = self.lock();
        let State { method, completions, pace } = &mut *state;
        // With nothing to follow, MSG_MORE would hold the header back.
        let no_pages = pages.left() == 0;
        match method {
            Method::Msg if !no_pages && !pace.skips() => {
                out.write_all_by(copied, |batch| out.transport.write_more(batch))?;
                let queue = SocketQueue(out.transport.output());
                let send = |batch: &Batch<'_, Out>, zero_copy| match zero_copy {
                    true => out.transport.write_zero_copy(batch),
                    false => out.transport.write(batch),
                };
                let written = send_all((completions, pace), out, pages, &queue, send);
                let hopeless = pace.skip > 0;
                self.check_for_copies(&mut state, hopeless);
                written
            }
            Method::Splice(pipe) if !no_pages && !reused => {
                out.write_all_by(copied, |batch| out.transport.write_more(batch))?;
                let spliced = splice_all(pipe, out, pages);
                if spliced.is_err() {
                    // The rest in the pipe must not go out before later data.
                    self.change_method(method, Method::Copy);
                }
                spliced
            }
            _ => out.write_all(all, &[]),
        }
    }

    /// Waits until all sends are complete, unless the channel is `given_up`. Data written before a shutdown of this
    /// direction alone is still sent, and waited for.
    pub(crate) fn flush(&self, out: Transfer<'_>, given_up: impl Fn() -> bool) -> Result<(), Stop> {
        let mut state = self.lock();
        let flushed = wait_all(&mut state.completions, out.direction, &SocketQueue(out.transport.output()), given_up);
        self.check_for_copies(&mut state, false);
        flushed?;
        // After a flush the caller reuses its memory, which the kernel must not send then.
        state.completions.settled()?;
        Ok(())
    }

    /// If sends are incomplete, cuts the connection at once and discards queued data.
    pub(crate) fn abort(&self, transport: &Transport) {
        let mut state = self.lock();
        if state.completions.outstanding() == 0 {
            return;
        }
        // A shutdown or a close would still send it (tcp(7), connect(2) on AF_UNSPEC). Some kernels refuse while
        // another thread waits in the socket; a shutdown wakes it.
        for _ in 0..ABORTS {
            match connect_unspec(transport.output()) {
                Ok(()) | Err(Errno::NOTCONN) => return state.completions.forget(),
                Err(_) => {
                    let _ = shutdown(transport.output(), Shutdown::Both);
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
        // The kernel cuts a connection by itself if the peer acknowledges nothing.
        let _ = sockopt::set_tcp_user_timeout(transport.output(), USER_TIMEOUT_MS);
        drain_within(&mut state.completions, &SocketQueue(transport.output()), DRAIN_WITHIN);
    }

    fn check_for_copies(&self, state: &mut State, hopeless: bool) {
        let copies = hopeless || state.completions.only_copies();
        if self.setting == ZeroCopy::Auto && matches!(state.method, Method::Msg) && copies {
            self.change_method(&mut state.method, Pipe::new().map_or(Method::Copy, Method::Splice));
        }
    }

    fn change_method(&self, method: &mut Method, to: Method) {
        self.method.store(to.number(), Ordering::Relaxed);
        *method = to;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits at most `within` until all sends are complete, if a filter of system calls forbids cutting the connection. A
/// peer that reads slowly must not delay a guest that waits to resume.
fn drain_within(completions: &mut Completions, queue: &impl ErrorQueue, within: Duration) {
    let begun = Instant::now();
    while completions.outstanding() != 0 && begun.elapsed() < within {
        let waited = queue.wait(SLICE);
        while let Ok(Some(completion)) = queue.next() {
            if completions.take(completion).is_err() {
                return completions.forget();
            }
        }
        if waited.is_err() {
            // The connection has ended, and its queue with it.
            break;
        }
    }
    completions.forget();
}

/// Returns the socket of a transport with exactly one.
fn socket(transport: &Transport) -> Result<BorrowedFd<'_>, Refusal> {
    match transport {
        Transport::Socket(..) => Ok(transport.output()),
        Transport::Tls(_) => Err(Refusal::Unsupported(options::COPIED_BY_TLS)),
        Transport::Pipe(_) | Transport::Pair { .. } => {
            Err(Refusal::Unsupported("zero-copy needs a socket of its own: tcp, or unix for splice"))
        }
    }
}

fn msg_zerocopy(transport: &Transport) -> Result<Method, Refusal> {
    let fd = socket(transport)?;
    let family = sockopt::socket_domain(fd).map_err(|errno| Refusal::Failed(errno.into()))?;
    if !matches!(family, AddressFamily::INET | AddressFamily::INET6) {
        return Err(Refusal::Unsupported("MSG_ZEROCOPY is for TCP; on a unix socket splice saves the copy"));
    }
    memlock::allowed().map_err(|limit| Refusal::MemoryLock { limit, least: memlock::LEAST })?;
    transport.enable_zero_copy().map_err(Refusal::Failed)?;
    // An unread completion is an error that poll reports at once, so poll could not wait for room: the socket must
    // block.
    let blocking = || fcntl_setfl(fd, fcntl_getfl(fd)? - OFlags::NONBLOCK);
    blocking().map_err(|errno: Errno| Refusal::Failed(errno.into()))?;
    Ok(Method::Msg)
}

/// Whether the peer is known to be on this machine.
fn is_local(fd: BorrowedFd<'_>) -> bool {
    let inet =
        |address: SocketAddrAny| std::net::SocketAddr::try_from(address).ok().map(|inet| inet.ip().to_canonical());
    match sockopt::socket_domain(fd) {
        Ok(AddressFamily::UNIX) => true,
        Ok(AddressFamily::INET | AddressFamily::INET6) => {
            let peer = getpeername(fd).ok().flatten().and_then(inet);
            let own = getsockname(fd).ok().and_then(inet);
            peer.is_some_and(|peer| peer.is_loopback() || Some(peer) == own)
        }
        _ => false,
    }
}

/// Moves all of `pages` through the pipe.
fn splice_all(pipe: &Pipe, out: Transfer<'_>, pages: &mut Cursor<'_, Out>) -> Result<(), Stop> {
    let mut idle = out.direction.idle_timer();
    let mut paid = 0;
    let mut left = pages.left();
    while let Some(batch) = pages.batch(out.rate.batch().min(pipe.size())) {
        paid += out.pay(batch.bytes().saturating_sub(paid), &mut idle)?;
        out.direction.counters.called();
        let filled = match pipe.fill(&batch) {
            // The pipe is empty, so the order is kept.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::FAULT) => {
                return out.write_all_by(pages, |batch| out.transport.write(batch));
            }
            filled => filled.map_err(Stop::Failed)?,
        };
        if filled == 0 {
            return Err(Stop::Failed(io::ErrorKind::WriteZero.into()));
        }
        left = left.saturating_sub(filled as u64);
        let mut inside = filled;
        while inside != 0 {
            let drain = || pipe.drain(out.transport.output(), inside, left != 0);
            let moved = out.attempt(&mut idle, inside, drain)?;
            if moved == 0 {
                return Err(Stop::Failed(io::ErrorKind::WriteZero.into()));
            }
            inside = inside.saturating_sub(moved);
        }
        out.direction.counters.spliced(filled);
        paid = paid.saturating_sub(filled);
        pages.advance(filled);
    }
    Ok(())
}

/// Sends all of `pages` without a copy; `send` sends a batch, with or without `MSG_ZEROCOPY`.
fn send_all(
    (completions, pace): (&mut Completions, &mut Pace),
    out: Transfer<'_>,
    pages: &mut Cursor<'_, Out>,
    queue: &impl ErrorQueue,
    send: impl Fn(&Batch<'_, Out>, bool) -> io::Result<usize>,
) -> Result<(), Stop> {
    let mut idle = out.direction.idle_timer();
    let mut paid = 0;
    while let Some(batch) = pages.batch(out.rate.batch().min(pace.most)) {
        paid += out.pay(batch.bytes().saturating_sub(paid), &mut idle)?;
        let offered = batch.bytes();
        match out.attempt(&mut idle, offered, || send(&batch, true)) {
            Ok(0) => return Err(Stop::Failed(io::ErrorKind::WriteZero.into())),
            Ok(moved) => {
                completions.sent();
                out.direction.counters.zero_copy_call();
                paid = paid.saturating_sub(moved);
                pages.advance(moved);
                (pace.most, pace.skipped) = (pace.most.saturating_mul(2), 0);
                if completions.outstanding() >= REAP {
                    reap(completions, out.direction, queue)?;
                }
            }
            Err(Stop::Failed(error))
                if let Some(why @ (Errno::NOBUFS | Errno::FAULT)) = Errno::from_io_error(&error) =>
            {
                out.direction.counters.zero_copy_refused();
                // A completed send takes room until its completion is read.
                if why == Errno::NOBUFS
                    && (reap(completions, out.direction, queue)? != 0 || completions.outstanding() != 0)
                {
                    if completions.outstanding() != 0
                        && wait(completions, out.direction, queue, &idle, || out.direction.is_shut())?
                    {
                        idle.progress();
                    }
                } else if why == Errno::NOBUFS && offered > LEAST {
                    // Other channels use the room: a smaller send fits sooner.
                    pace.most = (offered / 2).max(LEAST);
                } else {
                    pace.give_up();
                    return out.write_all_by(pages, |batch| send(batch, false));
                }
            }
            Err(stop) => return Err(stop),
        }
    }
    Ok(())
}

/// Reads the available completions; returns the number of completed calls.
fn reap(completions: &mut Completions, direction: &Direction, queue: &impl ErrorQueue) -> Result<u64, Stop> {
    let before = completions.totals();
    while let Some(completion) = queue.next().map_err(Stop::Failed)? {
        completions.take(completion).map_err(|Unexpected| {
            let why = format!("the kernel reports completion of sends that were not made: {completion:?}");
            Stop::Failed(io::Error::new(io::ErrorKind::InvalidData, why))
        })?;
    }
    let after = completions.totals();
    direction.counters.zero_copy_completed(after.0 - before.0, after.1 - before.1);
    Ok(after.0 - before.0)
}

/// Waits for all completions.
fn wait_all(
    completions: &mut Completions,
    direction: &Direction,
    queue: &impl ErrorQueue,
    given_up: impl Fn() -> bool,
) -> Result<(), Stop> {
    let mut idle = direction.idle_timer();
    // Only a socket with MSG_ZEROCOPY sends has completions in its queue.
    if completions.outstanding() != 0 {
        reap(completions, direction, queue)?;
    }
    while completions.outstanding() != 0 {
        if wait(completions, direction, queue, &idle, &given_up)? {
            idle.progress();
        }
    }
    Ok(())
}

/// Waits for a while; returns whether a completion arrived.
fn wait(
    completions: &mut Completions,
    direction: &Direction,
    queue: &impl ErrorQueue,
    idle: &IdleTimer,
    given_up: impl Fn() -> bool,
) -> Result<bool, Stop> {
    if given_up() {
        return Err(Stop::ShutDown);
    }
    let rest = idle.remaining()?.unwrap_or(SLICE).min(SLICE);
    let waited = queue.wait(rest);
    // An end of the connection does not invalidate earlier reports.
    let any = reap(completions, direction, queue)? != 0;
    match waited {
        Err(_) if !any && given_up() => Err(Stop::ShutDown),
        Err(error) if !any => Err(Stop::Failed(error)),
        _ => Ok(any),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::VecDeque;
    use std::io::IoSlice;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use proptest::prelude::*;
    use rustix::event::PollFlags;

    use super::*;
    use crate::rate::RateLimit;
    use crate::zero_copy::completions::Completion;

    /// A kernel that takes what it is lent, up to a number of calls and bytes at a time, and gives it back in an order
    /// of its own.
    struct Kernel {
        /// Calls that it remembers at most, and bytes of each.
        room: usize,
        most: usize,
        got: RefCell<Vec<u8>>,
        calls: Cell<u32>,
        in_flight: RefCell<Vec<Completion>>,
        reported: RefCell<VecDeque<Completion>>,
        seed: Cell<u64>,
        waits: Cell<u32>,
    }

    impl Kernel {
        fn new(room: usize, most: usize, seed: u64) -> Self {
            Self {
                room,
                most,
                got: RefCell::default(),
                calls: Cell::default(),
                in_flight: RefCell::default(),
                reported: RefCell::default(),
                seed: Cell::new(seed),
                waits: Cell::default(),
            }
        }

        fn any(&self, below: usize) -> usize {
            self.seed
                .set(self.seed.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
            usize::try_from(self.seed.get() >> 33).unwrap() % below.max(1)
        }

        #[allow(unsafe_code, reason = "what a kernel reads")]
        fn send(&self, batch: &Batch<'_, Out>, lent: bool) -> io::Result<usize> {
            if lent && (self.in_flight.borrow().len() >= self.room || batch.bytes() > self.most) {
                return Err(Errno::NOBUFS.into());
            }
            let moved = 1 + self.any(batch.bytes());
            let mut left = moved;
            for entry in batch.entries() {
                let now = left.min(entry.iov_len);
                // SAFETY: the batch's entries are valid for reads.
                let bytes = unsafe { std::slice::from_raw_parts(entry.iov_base.cast::<u8>(), now) };
                self.got.borrow_mut().extend_from_slice(bytes);
                left -= now;
            }
            if lent {
                let number = self.calls.get();
                self.calls.set(number + 1);
                self.in_flight.borrow_mut().push(Completion { first: number, last: number, copied: self.any(2) == 0 });
            }
            Ok(moved)
        }
    }

    impl ErrorQueue for Kernel {
        fn next(&self) -> io::Result<Option<Completion>> {
            Ok(self.reported.borrow_mut().pop_front())
        }

        /// Gives some of it back, the latest first as likely as not.
        fn wait(&self, _time: Duration) -> io::Result<()> {
            self.waits.set(self.waits.get() + 1);
            let mut in_flight = self.in_flight.borrow_mut();
            for _ in 0..1 + self.any(4) {
                if !in_flight.is_empty() {
                    let index = self.any(in_flight.len());
                    self.reported.borrow_mut().push_back(in_flight.swap_remove(index));
                }
            }
            Ok(())
        }
    }

    fn send(kernel: &Kernel, data: &[u8], lengths: &[usize]) -> (Completions, crate::Counters) {
        let transport = Transport::Socket(UnixStream::pair().unwrap().0.into(), Arc::default());
        let direction = Direction::new(PollFlags::OUT, None);
        let mut rest = data;
        let mut list: Vec<_> = lengths.iter().map_while(|&n| rest.split_off(..n)).map(IoSlice::new).collect();
        list.push(IoSlice::new(rest));
        let mut completions = Completions::default();
        let mut cursor = Cursor::gather(&list);
        let (rate, send) = (RateLimit::default(), |batch: &Batch<'_, Out>, lent| kernel.send(batch, lent));
        let mut pace = Pace::default();
        let out = Transfer { direction: &direction, transport: &transport, rate: &rate };
        send_all((&mut completions, &mut pace), out, &mut cursor, kernel, send).unwrap();
        wait_all(&mut completions, &direction, kernel, || false).unwrap();
        (completions, crate::Counters::of(&direction.counters, &direction.counters))
    }

    /// A kernel that gives nothing back, and takes its time to say so.
    struct Silent;

    impl ErrorQueue for Silent {
        fn next(&self) -> io::Result<Option<Completion>> {
            Ok(None)
        }

        fn wait(&self, _time: Duration) -> io::Result<()> {
            thread::sleep(Duration::from_millis(1));
            Ok(())
        }
    }

    #[test]
    fn a_connection_that_may_not_be_cut_is_waited_for_and_not_for_ever() {
        let kernel = Kernel::new(usize::MAX, usize::MAX, 7);
        let mut completions = Completions::default();
        for number in 0..20 {
            completions.sent();
            kernel.in_flight.borrow_mut().push(Completion { first: number, last: number, copied: false });
        }
        drain_within(&mut completions, &kernel, Duration::from_secs(60));
        assert_eq!((completions.outstanding(), kernel.in_flight.borrow().len()), (0, 0));
        completions.sent();
        drain_within(&mut completions, &Silent, Duration::from_millis(20));
        assert_eq!(completions.outstanding(), 0);
    }

    proptest! {
        #[test]
        fn whatever_room_the_kernel_has_all_of_it_leaves_once_and_all_loans_come_back(
            data in prop::collection::vec(any::<u8>(), 1..60_000),
            lengths in prop::collection::vec(0..9000_usize, 0..20),
            room in prop_oneof![Just(0_usize), Just(1), 2..40_usize, Just(usize::MAX)],
            most in prop_oneof![Just(0_usize), 1..9000_usize, Just(usize::MAX)],
            seed in any::<u64>(),
        ) {
            let kernel = Kernel::new(room, most, seed);
            let (completions, counters) = send(&kernel, &data, &lengths);
            prop_assert!(*kernel.got.borrow() == data, "the bytes differ");
            prop_assert_eq!(completions.outstanding(), 0);
            prop_assert!(kernel.in_flight.borrow().is_empty() && kernel.reported.borrow().is_empty());
            prop_assert_eq!((counters.zero_copy_calls, counters.zero_copy_completed), (u64::from(kernel.calls.get()), counters.zero_copy_calls));
            if room == 0 || most == 0 {
                // Halved until it is a page, and then no more.
                prop_assert!(counters.zero_copy_calls == 0 && (1..=8).contains(&counters.zero_copy_refused), "{:?}", counters);
            }
        }
    }

    #[test]
    fn a_kernel_without_room_is_waited_for_as_long_as_it_has_loans_to_give_back() {
        let kernel = Kernel::new(1, usize::MAX, 7);
        let (_, counters) = send(&kernel, &[1; 50_000], &[100; 300]);
        // Every call but the first found the room taken by the one before.
        assert_eq!(counters.zero_copy_refused, counters.zero_copy_calls - 1);
        assert!(u64::from(kernel.waits.get()) >= counters.zero_copy_refused);
    }

    #[test]
    fn a_kernel_that_gives_back_what_it_was_not_lent_is_not_believed() {
        let kernel = Kernel::new(9, usize::MAX, 7);
        kernel.reported.borrow_mut().push_back(Completion { first: 5, last: 5, copied: false });
        let (direction, mut completions) = (Direction::new(PollFlags::OUT, None), Completions::default());
        completions.sent();
        let stop = wait_all(&mut completions, &direction, &kernel, || false).unwrap_err();
        assert!(matches!(stop, Stop::Failed(error) if error.kind() == io::ErrorKind::InvalidData));
    }
}
