//! What a channel does with memory that is lent to it.
//!
//! The law of this module: a put under any method has the same outcome as a plain one, errors, time-outs, rate limit
//! and shutdown included. If the kernel has no room to remember another loan (`ENOBUFS`: `RLIMIT_MEMLOCK`,
//! `net.core.optmem_max`), it is asked for what it has finished, then offered less at a time, and in the end, with
//! nothing of this channel under way that could make room, the rest is copied, and so is more and more of what follows
//! before it is tried again. Memory that the kernel can copy but not lend (`EFAULT`: secret memory, devices') is copied
//! too. That is slower, and right.

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

/// Calls under way after which the kernel is asked which of them it has finished.
const REAP: u64 = 32;

/// The longest single wait for a completion: whether the channel was shut down meanwhile is looked at in between.
const SLICE: Duration = Duration::from_millis(100);

/// The least that is offered at a time before bytes are copied instead.
const LEAST: usize = 4096;

/// How often a connection is shut down again.
const ABORTS: u32 = 100;

/// How long a peer may acknowledge nothing of a connection that is to end, in milliseconds.
const UNHEARD_MS: u32 = 1000;

/// How long what is queued may go on leaving on a connection that was to be cut.
const SLOWLY: Duration = Duration::from_secs(3);

/// Most puts that are copied before lending is tried again.
const SKIPPED_MAX: u32 = 256;

/// Why a channel does not get the method that was named.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// It cannot have it.
    Unsupported(&'static str),
    /// So few bytes may be pinned, and so many have to be.
    MemoryLock { limit: u64, least: u64 },
    /// The kernel's answer.
    Failed(io::Error),
}

/// The way in which a channel sends what is lent, and the loans in progress.
#[derive(Debug)]
pub(crate) struct ZeroCopySender {
    /// What was wanted. Where that is [`ZeroCopy::Auto`] a way that turns out to copy gives way to another.
    setting: ZeroCopy,
    /// The name of the method, for who does not want to wait until a put is through.
    method: AtomicU8,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    method: Method,
    completions: Completions,
    pace: Pace,
}

/// How much is lent, by what the kernel had room for.
#[derive(Debug)]
struct Pace {
    /// Bytes that are offered at a time, at most.
    most: usize,
    /// Puts that are to be copied before lending is tried again, and how many that were last time.
    skip: u32,
    skipped: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self { most: usize::MAX, skip: 0, skipped: 0 }
    }
}

impl Pace {
    /// Nothing could be lent.
    fn give_up(&mut self) {
        self.skipped = self.skipped.saturating_mul(2).clamp(1, SKIPPED_MAX);
        self.skip = self.skipped;
    }

    /// Whether this put is to be copied.
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

/// The ways by numbers.
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
    /// What `setting` comes to on this transport.
    pub(crate) fn new(setting: ZeroCopy, transport: &Transport) -> Result<Self, Refusal> {
        let chosen = match setting {
            ZeroCopy::Off => Method::Copy,
            ZeroCopy::Msg => lend_by_message(transport)?,
            ZeroCopy::Splice => {
                socket(transport)?;
                Method::Splice(Pipe::new().map_err(Refusal::Failed)?)
            }
            ZeroCopy::Auto => match socket(transport) {
                Err(_) => Method::Copy,
                Ok(fd) if is_local(fd) => Pipe::new().map_or(Method::Copy, Method::Splice),
                Ok(_) => lend_by_message(transport).unwrap_or(Method::Copy),
            },
        };
        let method = AtomicU8::new(chosen.number());
        let state = State { method: chosen, completions: Completions::default(), pace: Pace::default() };
        Ok(Self { setting, method, state: Mutex::new(state) })
    }

    /// What was wanted of it.
    pub(crate) fn setting(&self) -> ZeroCopy {
        self.setting
    }

    /// What it does with pages now: never [`ZeroCopy::Auto`].
    pub(crate) fn method(&self) -> ZeroCopy {
        match self.method.load(Ordering::Relaxed) {
            MSG => ZeroCopy::Msg,
            SPLICE => ZeroCopy::Splice,
            _ => ZeroCopy::Off,
        }
    }

    /// Puts bytes that are copied, and behind them what is lent. `reused` memory has to be back after a flush, so that
    /// it is not spliced.
    pub(crate) fn put(
        &self,
        out: Transfer<'_>,
        [copied, lent, all]: [&mut Cursor<'_, Out>; 3],
        reused: bool,
    ) -> Result<(), Stop> {
        let mut state = self.lock();
        let State { method, completions, pace } = &mut *state;
        // A header that says that more follows is held back until it does.
        let nothing_lent = lent.left() == 0;
        match method {
            Method::Msg if !nothing_lent && !pace.skips() => {
                out.put_by(copied, |batch| out.transport.put_more(batch))?;
                let queue = SocketQueue(out.transport.output());
                let send = |batch: &Batch<'_, Out>, lent| match lent {
                    true => out.transport.put_lent(batch),
                    false => out.transport.put(batch),
                };
                let put = lend_all((completions, pace), out, lent, &queue, send);
                let hopeless = pace.skip > 0;
                self.look_for_copies(&mut state, hopeless);
                put
            }
            Method::Splice(pipe) if !nothing_lent && !reused => {
                out.put_by(copied, |batch| out.transport.put_more(batch))?;
                let spliced = splice_all(pipe, out, lent);
                if spliced.is_err() {
                    // What is left in the pipe must not go out in front of anything.
                    self.turn(method, Method::Copy);
                }
                spliced
            }
            _ => out.put(all, &[]),
        }
    }

    /// Waits until everything that was lent is back, unless the channel is `given_up`. What was put before this side
    /// ended its direction alone still leaves, and is waited for.
    pub(crate) fn flush(&self, out: Transfer<'_>, given_up: impl Fn() -> bool) -> Result<(), Stop> {
        let mut state = self.lock();
        let flushed = take_back(&mut state.completions, out.direction, &SocketQueue(out.transport.output()), given_up);
        self.look_for_copies(&mut state, false);
        flushed?;
        // Who has flushed writes to its pages again, which the kernel must not send then.
        state.completions.settled()?;
        Ok(())
    }

    /// If anything that was lent is not back, ends the connection at once and throws away what is queued.
    pub(crate) fn abort(&self, transport: &Transport) {
        let mut state = self.lock();
        if state.completions.outstanding() == 0 {
            return;
        }
        // A shutdown or a close would still send it (tcp(7), connect(2) on AF_UNSPEC). Some kernels refuse while
        // another thread waits in the socket, which a shutdown wakes.
        for _ in 0..ABORTS {
            match connect_unspec(transport.output()) {
                Ok(()) | Err(Errno::NOTCONN) => return state.completions.forget(),
                Err(_) => {
                    let _ = shutdown(transport.output(), Shutdown::Both);
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
        // The kernel ends a connection by itself of which the peer acknowledges nothing.
        let _ = sockopt::set_tcp_user_timeout(transport.output(), UNHEARD_MS);
        end_slowly(&mut state.completions, &SocketQueue(transport.output()), SLOWLY);
    }

    fn look_for_copies(&self, state: &mut State, hopeless: bool) {
        let copies = hopeless || state.completions.only_copies();
        if self.setting == ZeroCopy::Auto && matches!(state.method, Method::Msg) && copies {
            self.turn(&mut state.method, Pipe::new().map_or(Method::Copy, Method::Splice));
        }
    }

    fn turn(&self, method: &mut Method, to: Method) {
        self.method.store(to.number(), Ordering::Relaxed);
        *method = to;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until the kernel has sent what it was lent, where a connection may not be cut (a filter of system calls), for
/// so long at most: a peer that takes it drop by drop must not hold up a guest that waits to go on.
fn end_slowly(completions: &mut Completions, queue: &impl ErrorQueue, within: Duration) {
    let begun = Instant::now();
    while completions.outstanding() != 0 && begun.elapsed() < within {
        let waited = queue.wait(SLICE);
        while let Ok(Some(completion)) = queue.next() {
            if completions.take(completion).is_err() {
                return completions.forget();
            }
        }
        if waited.is_err() {
            // It is over, and what was queued with it.
            break;
        }
    }
    completions.forget();
}

/// The socket of a transport that is one.
fn socket(transport: &Transport) -> Result<BorrowedFd<'_>, Refusal> {
    match transport {
        Transport::Socket(..) => Ok(transport.output()),
        Transport::Tls(_) => Err(Refusal::Unsupported(options::COPIED_BY_TLS)),
        Transport::Pipe(_) | Transport::Pair { .. } => {
            Err(Refusal::Unsupported("zero-copy needs a socket of its own: tcp, or unix for splice"))
        }
    }
}

fn lend_by_message(transport: &Transport) -> Result<Method, Refusal> {
    let fd = socket(transport)?;
    let family = sockopt::socket_domain(fd).map_err(|errno| Refusal::Failed(errno.into()))?;
    if !matches!(family, AddressFamily::INET | AddressFamily::INET6) {
        return Err(Refusal::Unsupported("MSG_ZEROCOPY is for TCP; on a unix socket splice saves the copy"));
    }
    memlock::allowed().map_err(|limit| Refusal::MemoryLock { limit, least: memlock::LEAST })?;
    transport.allow_lending().map_err(Refusal::Failed)?;
    // A completion that was not read is an error that poll reports at once: waiting there for room would not wait.
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

/// Moves all of `lent` through the pipe.
fn splice_all(pipe: &Pipe, out: Transfer<'_>, lent: &mut Cursor<'_, Out>) -> Result<(), Stop> {
    let mut idle = out.direction.idle_timer();
    let mut paid = 0;
    let mut left = lent.left();
    while let Some(batch) = lent.batch(out.rate.batch().min(pipe.size())) {
        paid += out.pay(batch.bytes().saturating_sub(paid), &mut idle)?;
        out.direction.counters.called();
        let filled = match pipe.fill(&batch) {
            // The pipe is empty, so nothing is before what follows.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::FAULT) => {
                return out.put_by(lent, |batch| out.transport.put(batch));
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
        lent.advance(filled);
    }
    Ok(())
}

/// Lends all of `lent`; `send` sends a batch, lent or copied.
fn lend_all(
    (completions, pace): (&mut Completions, &mut Pace),
    out: Transfer<'_>,
    lent: &mut Cursor<'_, Out>,
    queue: &impl ErrorQueue,
    send: impl Fn(&Batch<'_, Out>, bool) -> io::Result<usize>,
) -> Result<(), Stop> {
    let mut idle = out.direction.idle_timer();
    let mut paid = 0;
    while let Some(batch) = lent.batch(out.rate.batch().min(pace.most)) {
        paid += out.pay(batch.bytes().saturating_sub(paid), &mut idle)?;
        let offered = batch.bytes();
        match out.attempt(&mut idle, offered, || send(&batch, true)) {
            Ok(0) => return Err(Stop::Failed(io::ErrorKind::WriteZero.into())),
            Ok(moved) => {
                completions.sent();
                out.direction.counters.lent();
                paid = paid.saturating_sub(moved);
                lent.advance(moved);
                (pace.most, pace.skipped) = (pace.most.saturating_mul(2), 0);
                if completions.outstanding() >= REAP {
                    reap(completions, out.direction, queue)?;
                }
            }
            Err(Stop::Failed(error))
                if let Some(why @ (Errno::NOBUFS | Errno::FAULT)) = Errno::from_io_error(&error) =>
            {
                out.direction.counters.starved();
                // What it has finished takes room until it is reported.
                if why == Errno::NOBUFS
                    && (reap(completions, out.direction, queue)? != 0 || completions.outstanding() != 0)
                {
                    if completions.outstanding() != 0
                        && wait(completions, out.direction, queue, &idle, || out.direction.is_shut())?
                    {
                        idle.progress();
                    }
                } else if why == Errno::NOBUFS && offered > LEAST {
                    // Others have what there is: the less is wanted, the sooner there is room.
                    pace.most = (offered / 2).max(LEAST);
                } else {
                    pace.give_up();
                    return out.put_by(lent, |batch| send(batch, false));
                }
            }
            Err(stop) => return Err(stop),
        }
    }
    Ok(())
}

/// Takes the completions that are there: of how many calls.
fn reap(completions: &mut Completions, direction: &Direction, queue: &impl ErrorQueue) -> Result<u64, Stop> {
    let before = completions.totals();
    while let Some(completion) = queue.next().map_err(Stop::Failed)? {
        completions.take(completion).map_err(|Unexpected| {
            let why = format!("the kernel reports completion of sends that were not made: {completion:?}");
            Stop::Failed(io::Error::new(io::ErrorKind::InvalidData, why))
        })?;
    }
    let after = completions.totals();
    direction.counters.completed(after.0 - before.0, after.1 - before.1);
    Ok(after.0 - before.0)
}

/// Waits for all of them.
fn take_back(
    completions: &mut Completions,
    direction: &Direction,
    queue: &impl ErrorQueue,
    given_up: impl Fn() -> bool,
) -> Result<(), Stop> {
    let mut idle = direction.idle_timer();
    // Only a socket that was lent something has a queue for it.
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

/// Waits for a while; whether any has come.
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
    // An end of the connection does not take away what was reported before.
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
        under_way: RefCell<Vec<Completion>>,
        told: RefCell<VecDeque<Completion>>,
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
                under_way: RefCell::default(),
                told: RefCell::default(),
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
            if lent && (self.under_way.borrow().len() >= self.room || batch.bytes() > self.most) {
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
                self.under_way.borrow_mut().push(Completion { first: number, last: number, copied: self.any(2) == 0 });
            }
            Ok(moved)
        }
    }

    impl ErrorQueue for Kernel {
        fn next(&self) -> io::Result<Option<Completion>> {
            Ok(self.told.borrow_mut().pop_front())
        }

        /// Gives some of it back, the latest first as likely as not.
        fn wait(&self, _time: Duration) -> io::Result<()> {
            self.waits.set(self.waits.get() + 1);
            let mut under_way = self.under_way.borrow_mut();
            for _ in 0..1 + self.any(4) {
                if !under_way.is_empty() {
                    let index = self.any(under_way.len());
                    self.told.borrow_mut().push_back(under_way.swap_remove(index));
                }
            }
            Ok(())
        }
    }

    fn lend(kernel: &Kernel, data: &[u8], lengths: &[usize]) -> (Completions, crate::Counters) {
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
        lend_all((&mut completions, &mut pace), out, &mut cursor, kernel, send).unwrap();
        take_back(&mut completions, &direction, kernel, || false).unwrap();
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
            kernel.under_way.borrow_mut().push(Completion { first: number, last: number, copied: false });
        }
        end_slowly(&mut completions, &kernel, Duration::from_secs(60));
        assert_eq!((completions.outstanding(), kernel.under_way.borrow().len()), (0, 0));
        completions.sent();
        end_slowly(&mut completions, &Silent, Duration::from_millis(20));
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
            let (completions, counters) = lend(&kernel, &data, &lengths);
            prop_assert!(*kernel.got.borrow() == data, "the bytes differ");
            prop_assert_eq!(completions.outstanding(), 0);
            prop_assert!(kernel.under_way.borrow().is_empty() && kernel.told.borrow().is_empty());
            prop_assert_eq!((counters.lent, counters.lent_completed), (u64::from(kernel.calls.get()), counters.lent));
            if room == 0 || most == 0 {
                // Halved until it is a page, and then no more.
                prop_assert!(counters.lent == 0 && (1..=8).contains(&counters.starved), "{:?}", counters);
            }
        }
    }

    #[test]
    fn a_kernel_without_room_is_waited_for_as_long_as_it_has_loans_to_give_back() {
        let kernel = Kernel::new(1, usize::MAX, 7);
        let (_, counters) = lend(&kernel, &[1; 50_000], &[100; 300]);
        // Every call but the first found the room taken by the one before.
        assert_eq!(counters.starved, counters.lent - 1);
        assert!(u64::from(kernel.waits.get()) >= counters.starved);
    }

    #[test]
    fn a_kernel_that_gives_back_what_it_was_not_lent_is_not_believed() {
        let kernel = Kernel::new(9, usize::MAX, 7);
        kernel.told.borrow_mut().push_back(Completion { first: 5, last: 5, copied: false });
        let (direction, mut completions) = (Direction::new(PollFlags::OUT, None), Completions::default());
        completions.sent();
        let stop = take_back(&mut completions, &direction, &kernel, || false).unwrap_err();
        assert!(matches!(stop, Stop::Failed(error) if error.kind() == io::ErrorKind::InvalidData));
    }
}
