//! Sends by `MSG_ZEROCOPY`, and the wait for their completions.
//!
//! If the kernel has no room to track another send (`ENOBUFS`: `RLIMIT_MEMLOCK`, `net.core.optmem_max`), completions
//! are read first; then less is offered at a time. If nothing of this channel is in flight that could make room, the
//! rest is copied, and so are more and more writes before the next attempt. Memory that the kernel can copy but not pin
//! (`EFAULT`: secret memory, device memory) is copied too. That is slower, and correct.
//!
//! The kernel counts pinned pages against `RLIMIT_MEMLOCK`, for all processes of a user together, unless the process
//! has `CAP_IPC_LOCK` (net/core/skbuff.c, `mm_account_pinned_pages`). If the limit turns out too small later, less is
//! sent at a time, so [`check_memlock`] checks only a sensible minimum.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use super::completions::{Completions, Unexpected};
use super::error_queue::ErrorQueue;
use crate::direction::{Direction, IdleTimer, Stop, Transfer};
use crate::vector::{Batch, Cursor, Out};

/// Calls in flight after which completions are read.
const REAP: u64 = 32;

/// The longest single wait for a completion, between checks for a shutdown.
const SLICE: Duration = Duration::from_millis(100);

/// Minimum number of bytes offered at a time before bytes are copied instead.
const OFFERED_MIN: usize = 4096;

/// Maximum number of writes that are copied before zero-copy is tried again.
const SKIPPED_MAX: u32 = 256;

/// Minimum number of bytes that a channel must be able to pin: two packets of 128 pages, and two more pages of the
/// kernel for each.
pub(super) const PINNED_MIN: u64 = 2 * (128 + 2) * 4096;

/// Checks that [`PINNED_MIN`] bytes may be pinned; otherwise fails with the limit in bytes.
pub(super) fn check_memlock() -> Result<(), u64> {
    enough(getrlimit(Resource::Memlock).current, is_privileged())
}

/// Whether this process is exempt from the limit: the capability counts in the initial user namespace alone.
fn is_privileged() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK))
        && fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| is_own_namespace(&map))
}

/// Whether this is the identity map of the initial user namespace (`user_namespaces(7)`).
fn is_own_namespace(map: &str) -> bool {
    map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

fn enough(limit: Option<u64>, privileged: bool) -> Result<(), u64> {
    match limit {
        Some(limit) if !privileged && limit < PINNED_MIN => Err(limit),
        _ => Ok(()),
    }
}

/// The `MSG_ZEROCOPY` sends of a channel.
#[derive(Debug, Default)]
pub(super) struct Sends {
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

impl Sends {
    /// Sends all of `pages` without a copy; `send` sends a batch, with or without `MSG_ZEROCOPY`.
    pub(super) fn send_all(
        &mut self,
        out: Transfer<'_>,
        pages: &mut Cursor<'_, Out>,
        queue: &impl ErrorQueue,
        send: impl Fn(&Batch<'_, Out>, bool) -> io::Result<usize>,
    ) -> Result<(), Stop> {
        let mut idle = out.direction.idle_timer();
        let mut paid = 0;
        while let Some(batch) = pages.batch(out.rate.batch().min(self.pace.most)) {
            paid += out.pay(batch.bytes().saturating_sub(paid), &mut idle)?;
            let offered = batch.bytes();
            match out.attempt(&mut idle, offered, || send(&batch, true)) {
                Ok(0) => return Err(Stop::Failed(io::ErrorKind::WriteZero.into())),
                Ok(moved) => {
                    self.completions.sent();
                    out.direction.counters.zero_copy_call();
                    paid = paid.saturating_sub(moved);
                    pages.advance(moved);
                    (self.pace.most, self.pace.skipped) = (self.pace.most.saturating_mul(2), 0);
                    if self.completions.outstanding() >= REAP {
                        self.reap(out.direction, queue)?;
                    }
                }
                Err(Stop::Failed(error))
                    if let Some(why @ (Errno::NOBUFS | Errno::FAULT)) = Errno::from_io_error(&error) =>
                {
                    out.direction.counters.zero_copy_refused();
                    // A completed send takes room until its completion is read.
                    if why == Errno::NOBUFS
                        && (self.reap(out.direction, queue)? != 0 || self.completions.outstanding() != 0)
                    {
                        if self.completions.outstanding() != 0
                            && self.wait(out.direction, queue, &idle, || out.direction.is_shut())?
                        {
                            idle.progress();
                        }
                    } else if why == Errno::NOBUFS && offered > OFFERED_MIN {
                        // Other channels use the room: a smaller send fits sooner.
                        self.pace.most = (offered / 2).max(OFFERED_MIN);
                    } else {
                        self.pace.give_up();
                        return out.write_all_by(pages, |batch| send(batch, false));
                    }
                }
                Err(stop) => return Err(stop),
            }
        }
        Ok(())
    }

    /// Waits for all completions.
    pub(super) fn wait_all(
        &mut self,
        direction: &Direction,
        queue: &impl ErrorQueue,
        given_up: impl Fn() -> bool,
    ) -> Result<(), Stop> {
        let mut idle = direction.idle_timer();
        // Only a socket with MSG_ZEROCOPY sends has completions in its queue.
        if self.completions.outstanding() != 0 {
            self.reap(direction, queue)?;
        }
        while self.completions.outstanding() != 0 {
            if self.wait(direction, queue, &idle, &given_up)? {
                idle.progress();
            }
        }
        // After a flush the caller reuses its memory, which the kernel must not send then.
        self.completions.settled()?;
        Ok(())
    }

    /// Waits at most `within` until all sends are complete, if a filter of system calls forbids cutting the connection.
    /// A peer that reads slowly must not delay a guest that waits to resume.
    pub(super) fn drain_within(&mut self, queue: &impl ErrorQueue, within: Duration) {
        let begun = Instant::now();
        while self.completions.outstanding() != 0 && begun.elapsed() < within {
            let waited = queue.wait(SLICE);
            while let Ok(Some(completion)) = queue.next() {
                if self.completions.take(completion).is_err() {
                    return self.completions.forget();
                }
            }
            if waited.is_err() {
                // The connection has ended, and its queue with it.
                break;
            }
        }
        self.completions.forget();
    }

    /// Forgets all incomplete sends: the connection is gone.
    pub(super) fn forget(&mut self) {
        self.completions.forget();
    }

    /// Whether some sends are incomplete.
    pub(super) fn is_incomplete(&self) -> bool {
        self.completions.outstanding() != 0
    }

    /// Whether the kernel copies everything on this path.
    pub(super) fn only_copies(&self) -> bool {
        self.completions.only_copies()
    }

    /// Whether to copy this write; counts it.
    pub(super) fn skips(&mut self) -> bool {
        self.pace.skips()
    }

    /// Whether the kernel refused the last send, so that the next writes are copied.
    pub(super) fn is_refused(&self) -> bool {
        self.pace.skip > 0
    }

    /// Reads the available completions; returns the number of completed calls.
    fn reap(&mut self, direction: &Direction, queue: &impl ErrorQueue) -> Result<u64, Stop> {
        let before = self.completions.totals();
        while let Some(completion) = queue.next().map_err(Stop::Failed)? {
            self.completions.take(completion).map_err(|Unexpected| {
                let why = format!("the kernel reports completion of sends that were not made: {completion:?}");
                Stop::Failed(io::Error::new(io::ErrorKind::InvalidData, why))
            })?;
        }
        let after = self.completions.totals();
        direction.counters.zero_copy_completed(after.0 - before.0, after.1 - before.1);
        Ok(after.0 - before.0)
    }

    /// Waits for a while; returns whether a completion arrived.
    fn wait(
        &mut self,
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
        let any = self.reap(direction, queue)? != 0;
        match waited {
            Err(_) if !any && given_up() => Err(Stop::ShutDown),
            Err(error) if !any => Err(Stop::Failed(error)),
            _ => Ok(any),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::VecDeque;
    use std::io::IoSlice;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::thread;

    use proptest::prelude::*;
    use rustix::event::PollFlags;

    use super::*;
    use crate::rate::RateLimit;
    use crate::transport::Transport;
    use crate::zero_copy::completions::Completion;

    /// A kernel that accepts a number of calls and bytes at a time, and completes them in an order of its own.
    struct Kernel {
        /// Maximum number of incomplete calls, and of bytes of each.
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

        #[allow(unsafe_code, reason = "reads memory as a kernel does")]
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

        /// Completes some sends in random order.
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

    fn send(kernel: &Kernel, data: &[u8], lengths: &[usize]) -> (Sends, crate::Counters) {
        let transport = Transport::Socket(UnixStream::pair().unwrap().0.into(), Arc::default());
        let direction = Direction::new(PollFlags::OUT, None);
        let mut rest = data;
        let mut list: Vec<_> = lengths.iter().map_while(|&n| rest.split_off(..n)).map(IoSlice::new).collect();
        list.push(IoSlice::new(rest));
        let mut sends = Sends::default();
        let mut cursor = Cursor::gather(&list);
        let (rate, send) = (RateLimit::default(), |batch: &Batch<'_, Out>, lent| kernel.send(batch, lent));
        let out = Transfer { direction: &direction, transport: &transport, rate: &rate };
        sends.send_all(out, &mut cursor, kernel, send).unwrap();
        sends.wait_all(&direction, kernel, || false).unwrap();
        (sends, crate::Counters::of(&direction.counters, &direction.counters))
    }

    /// A kernel that completes nothing.
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
    fn a_connection_that_cannot_be_cut_is_drained_for_a_bounded_time() {
        let kernel = Kernel::new(usize::MAX, usize::MAX, 7);
        let mut sends = Sends::default();
        for number in 0..20 {
            sends.completions.sent();
            kernel.in_flight.borrow_mut().push(Completion { first: number, last: number, copied: false });
        }
        sends.drain_within(&kernel, Duration::from_secs(60));
        assert_eq!((sends.completions.outstanding(), kernel.in_flight.borrow().len()), (0, 0));
        sends.completions.sent();
        sends.drain_within(&Silent, Duration::from_millis(20));
        assert_eq!(sends.completions.outstanding(), 0);
    }

    proptest! {
        #[test]
        fn everything_is_sent_once_and_completes_with_any_room_in_the_kernel(
            data in prop::collection::vec(any::<u8>(), 1..60_000),
            lengths in prop::collection::vec(0..9000_usize, 0..20),
            room in prop_oneof![Just(0_usize), Just(1), 2..40_usize, Just(usize::MAX)],
            most in prop_oneof![Just(0_usize), 1..9000_usize, Just(usize::MAX)],
            seed in any::<u64>(),
        ) {
            let kernel = Kernel::new(room, most, seed);
            let (sends, counters) = send(&kernel, &data, &lengths);
            prop_assert!(*kernel.got.borrow() == data, "the bytes differ");
            prop_assert_eq!(sends.completions.outstanding(), 0);
            prop_assert!(kernel.in_flight.borrow().is_empty() && kernel.reported.borrow().is_empty());
            prop_assert_eq!((counters.zero_copy_calls, counters.zero_copy_completed), (u64::from(kernel.calls.get()), counters.zero_copy_calls));
            if room == 0 || most == 0 {
                // Halved until it is a page, and then no more.
                prop_assert!(counters.zero_copy_calls == 0 && (1..=8).contains(&counters.zero_copy_refused), "{:?}", counters);
            }
        }
    }

    #[test]
    fn a_kernel_without_room_is_waited_for_while_sends_are_incomplete() {
        let kernel = Kernel::new(1, usize::MAX, 7);
        let (_, counters) = send(&kernel, &[1; 50_000], &[100; 300]);
        // Every call but the first found the room taken by the one before.
        assert_eq!(counters.zero_copy_refused, counters.zero_copy_calls - 1);
        assert!(u64::from(kernel.waits.get()) >= counters.zero_copy_refused);
    }

    #[test]
    fn completions_of_sends_that_were_not_made_are_an_error() {
        let kernel = Kernel::new(9, usize::MAX, 7);
        kernel.reported.borrow_mut().push_back(Completion { first: 5, last: 5, copied: false });
        let (direction, mut sends) = (Direction::new(PollFlags::OUT, None), Sends::default());
        sends.completions.sent();
        let stop = sends.wait_all(&direction, &kernel, || false).unwrap_err();
        assert!(matches!(stop, Stop::Failed(error) if error.kind() == io::ErrorKind::InvalidData));
    }

    #[test]
    fn a_limit_below_two_packets_is_too_small_unless_one_may_lock_memory() {
        assert_eq!(enough(Some(65_536), false), Err(65_536));
        assert_eq!(enough(Some(PINNED_MIN), false), Ok(()));
        assert_eq!(enough(None, false), Ok(()));
        assert_eq!(enough(Some(0), true), Ok(()));
    }

    #[test]
    fn a_privilege_in_a_container_of_other_users_is_none_here() {
        assert!(is_own_namespace("         0          0 4294967295\n"));
        for other in ["", "0 1000 1", "0 100000 65536", "0 0 1", "0 0 4294967295\n0 0 1"] {
            assert!(!is_own_namespace(other), "{other}");
        }
    }
}
