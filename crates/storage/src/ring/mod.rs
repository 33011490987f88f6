//! A thread's own `io_uring`.
//!
//! **Law: requests share system calls.** Requests are gathered until the thread has nothing else to do; one call
//! submits all of them and waits for the first completion. Requests in flight are owned by slots of the ring, not by
//! futures, so dropping a future is safe; slots and their vectors are reused. Only the ring's thread submits requests
//! and reaps completions. Other threads may access a slot, so a lock protects the slots; it is rarely contended.
//!
//! Files that are read often are registered with the ring ([`files`]), and memory of the arena ([`memory`]). The
//! figures are in `docs/benchmarks/2026-11-22-storage.md`.
//!
//! A single direct write or flush, with nothing else in flight, is a blocking call: the ring would complete it through
//! another kernel thread, which takes longer. So is each small buffered write, because most filesystems write nothing
//! without waiting, although they have to wait rarely. Where one had to wait, the ring takes the next ones.
#![allow(unsafe_code, reason = "the kernel is passed addresses of memory that slots keep alive")]

mod files;
mod handle;
mod memory;

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, opcode, squeue};
use limosa_page::to_usize;
use parking_lot::Mutex;

use crate::drive::ThreadWaker;
use crate::error::StorageError;
use crate::file::transfer::Direction;
use crate::request::Work;
pub(crate) use crate::ring::files::Registrations;
pub(crate) use crate::ring::handle::Handle;
use crate::watch::RingPoll;

/// Entries of the submission queue.
const SUBMISSIONS: u32 = 256;
/// Entries of the completion queue; the kernel buffers completions beyond them.
const COMPLETIONS: u32 = 1024;
/// Most bytes of a small write: copying them takes about as long as waking the kernel thread that would do it.
const SMALL_WRITE: usize = 64 << 10;
/// A small write that took longer had to wait: for room in the page cache, for a journal, or for a page that it writes
/// in part.
const WAITED: Duration = Duration::from_millis(10);
/// Small writes that go through the ring after one that had to wait.
const CAUTIOUS: u32 = 1000;
/// User data of the poll for wake-ups.
const WAKE_UP: u64 = u64::MAX;
/// User data of a request to end a poll.
const END_POLL: u64 = u64::MAX - 1;
/// User data of the poll of a descriptor: this bit, and the number of its entry.
const POLL: u64 = 1 << 62;

/// State of a slot.
enum Stage {
    /// Free; index of the next free slot.
    Free(Option<usize>),
    /// In flight; the task to wake.
    InFlight(Option<Waker>),
    /// In flight; its future was dropped.
    Abandoned,
    /// Complete; its future was not polled since.
    Complete(Result<(), StorageError>),
}

struct Slot {
    stage: Stage,
    work: Option<Work>,
    /// The vector passed to the kernel; its allocation is reused.
    pieces: Vec<libc::iovec>,
}

// SAFETY: the addresses in `pieces` are only passed to the kernel; `work` keeps their memory alive.
unsafe impl Send for Slot {}

impl Slot {
    /// Whether its request is faster as a blocking call than in the ring.
    fn is_faster_blocking(&self) -> bool {
        match &self.work {
            Some(Work::Transfer(transfer)) => transfer.direction == Direction::Write && transfer.file.cache.is_direct(),
            Some(Work::Flush(_)) => true,
            None => false,
        }
    }

    /// Whether its request only copies a few pages into the page cache, in most cases.
    fn is_small_write(&self) -> bool {
        matches!(&self.work, Some(Work::Transfer(transfer))
            if transfer.direction == Direction::Write
                && transfer.bytes() <= SMALL_WRITE
                && !transfer.file.cache.is_direct()
                && !transfer.file.cache.is_synchronous())
    }
}

/// Slots, and the first free one.
struct Slots {
    slots: Vec<Slot>,
    free: Option<usize>,
}

impl Slots {
    /// Puts a request into a free slot. Returns its index.
    fn put(&mut self, work: Work, waker: &Waker) -> usize {
        let stage = Stage::InFlight(Some(waker.clone()));
        let free = self.free.and_then(|index| Some((index, self.slots.get_mut(index)?)));
        let Some((index, slot)) = free else {
            self.slots.push(Slot { stage, work: Some(work), pieces: Vec::new() });
            return self.slots.len() - 1;
        };
        if let Stage::Free(next) = mem::replace(&mut slot.stage, stage) {
            self.free = next;
        }
        slot.work = Some(work);
        index
    }

    /// Stores the outcome of a request, if its future still exists.
    fn complete(&mut self, index: usize, outcome: Result<(), StorageError>, done: &mut Completed) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        match mem::replace(&mut slot.stage, Stage::Complete(outcome)) {
            Stage::InFlight(waker) => done.wakers.extend(waker),
            _ => self.release(index),
        }
    }

    fn release(&mut self, index: usize) {
        if let Some(slot) = self.slots.get_mut(index) {
            slot.stage = Stage::Free(self.free.replace(index));
        }
    }
}

/// A future's handle of a request in a slot.
pub(crate) struct InFlight {
    slots: Arc<Mutex<Slots>>,
    index: usize,
    is_over: bool,
}

impl InFlight {
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StorageError>> {
        let mut slots = self.slots.lock();
        let Some(slot) = slots.slots.get_mut(self.index).filter(|_| !self.is_over) else { return Poll::Pending };
        match &mut slot.stage {
            Stage::InFlight(Some(waker)) if waker.will_wake(context.waker()) => {}
            Stage::InFlight(waker) => {
                let old = waker.replace(context.waker().clone());
                // Dropping a waker runs foreign code: not under the lock.
                drop(slots);
                drop(old);
            }
            Stage::Complete(result) => {
                let result = mem::replace(result, Ok(()));
                slots.release(self.index);
                self.is_over = true;
                return Poll::Ready(result);
            }
            Stage::Free(_) | Stage::Abandoned => {}
        }
        Poll::Pending
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let mut slots = self.slots.lock();
        let Some(slot) = slots.slots.get_mut(self.index) else { return };
        let stage = match &slot.stage {
            Stage::Complete(_) => {
                slots.release(self.index);
                return;
            }
            _ => mem::replace(&mut slot.stage, Stage::Abandoned),
        };
        drop(slots);
        drop(stage);
    }
}

/// Completions of one call. Tasks are woken, and requests dropped, when the ring is no longer borrowed.
#[derive(Default)]
pub(crate) struct Completed {
    /// Entries of descriptors that the ring polls no more.
    pub(crate) polled: Vec<usize>,
    wakers: Vec<Waker>,
    works: Vec<Work>,
}

impl Completed {
    pub(crate) fn wake_all(&mut self) {
        self.works.clear();
        self.wakers.drain(..).for_each(Waker::wake);
    }
}

/// A thread's ring.
pub(crate) struct Ring {
    handle: Arc<Handle>,
    slots: Arc<Mutex<Slots>>,
    /// Number of requests that are not complete.
    in_flight: usize,
    /// Slots whose requests are not submitted yet.
    gathered: Vec<usize>,
    /// Entries that did not fit into the submission queue.
    waiting: Vec<squeue::Entry>,
    /// Small writes that the ring takes, because one had to wait.
    cautious: u32,
    /// Readable after a wake-up; owned by `_waker`.
    event: RawFd,
    /// Whether a poll of `event` is in flight.
    polls_event: bool,
    _waker: Arc<ThreadWaker>,
    done: Completed,
}

/// Creates a ring, with the cheapest setup that the kernel supports.
fn build() -> io::Result<IoUring> {
    // COOP_TASKRUN: completions do not interrupt the thread (Linux 5.19). DEFER_TASKRUN costs a third more CPU time in
    // the kernel with 16 concurrent rewrites, and a tenth of their rate.
    let mut best = IoUring::builder();
    best.setup_cqsize(COMPLETIONS).setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
    let uring = best.build(SUBMISSIONS).or_else(|_| IoUring::builder().setup_cqsize(COMPLETIONS).build(SUBMISSIONS))?;
    let features = uring.params();
    // Vectors need not outlive the submitting call, and no completion is dropped: Linux 5.5.
    if features.is_feature_nodrop() && features.is_feature_submit_stable() && features.is_feature_rw_cur_pos() {
        return Ok(uring);
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring is too old"))
}

/// Checks that `io_uring` is available and permitted.
pub(crate) fn probe() -> io::Result<()> {
    build().map(drop)
}

impl Ring {
    /// A ring for this thread. A wake-up ends its sleep in the ring.
    pub(crate) fn new(waker: &Arc<ThreadWaker>) -> io::Result<Self> {
        let uring = build()?;
        let event = waker.event()?.as_raw_fd();
        let slots = Arc::new(Mutex::new(Slots { slots: Vec::new(), free: None }));
        Ok(Self {
            handle: Arc::new(Handle::new(uring)),
            slots,
            in_flight: 0,
            gathered: Vec::new(),
            waiting: Vec::new(),
            cautious: 0,
            event,
            polls_event: false,
            _waker: Arc::clone(waker),
            done: Completed::default(),
        })
    }

    /// Whether requests are in flight.
    pub(crate) fn has_requests(&self) -> bool {
        self.in_flight > 0
    }

    /// Accepts a request. The next call of [`Self::submit_and_reap`] submits it at the latest.
    pub(crate) fn begin(&mut self, work: Work, waker: &Waker) -> InFlight {
        let index = self.slots.lock().put(work, waker);
        self.in_flight += 1;
        self.gathered.push(index);
        InFlight { slots: Arc::clone(&self.slots), index, is_over: false }
    }

    /// Whether requests are gathered that are not submitted yet.
    pub(crate) fn has_gathered(&self) -> bool {
        !self.gathered.is_empty()
    }

    /// Whether there is only one request, and it is faster as a blocking call. A thread that is `watching` descriptors
    /// gets more requests through them: it does not block for a flush, which may take long.
    pub(crate) fn should_block(&self, watching: bool) -> bool {
        let [index] = *self.gathered.as_slice() else { return false };
        let blocks =
            |slot: &Slot| slot.is_faster_blocking() && !(watching && matches!(slot.work, Some(Work::Flush(_))));
        self.in_flight == 1 && self.slots.lock().slots.get(index).is_some_and(blocks)
    }

    /// Begins or ends the poll of a descriptor with the next call.
    pub(crate) fn poll(&mut self, poll: RingPoll) {
        let entry = match poll {
            RingPoll::Begin { entry, fd, events } => {
                opcode::PollAdd::new(Fd(fd), events).build().user_data(POLL | entry as u64)
            }
            RingPoll::End { entry } => opcode::PollRemove::new(POLL | entry as u64).build().user_data(END_POLL),
        };
        self.push(entry);
    }

    /// Executes that request by a blocking call.
    pub(crate) fn block(&mut self) -> Completed {
        let mut done = mem::take(&mut self.done);
        if let Some(index) = self.gathered.pop() {
            self.block_for(index, &mut done);
        }
        done
    }

    fn block_for(&mut self, index: usize, done: &mut Completed) {
        let work = self.slots.lock().slots.get_mut(index).and_then(|slot| slot.work.take());
        let Some(work) = work else { return };
        let outcome = work.block();
        self.in_flight -= 1;
        self.slots.lock().complete(index, outcome, done);
    }

    /// Executes the small writes among the gathered requests by blocking calls, unless one had to wait lately.
    pub(crate) fn write_small(&mut self) -> Completed {
        let mut done = mem::take(&mut self.done);
        let mut gathered = mem::take(&mut self.gathered);
        gathered.retain(|&index| {
            if !self.slots.lock().slots.get(index).is_some_and(Slot::is_small_write) {
                return true;
            }
            if self.cautious > 0 {
                self.cautious -= 1;
                return true;
            }
            let begun = Instant::now();
            self.block_for(index, &mut done);
            if begun.elapsed() > WAITED {
                self.cautious = CAUTIOUS;
            }
            false
        });
        self.gathered = gathered;
        done
    }

    fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: the slot in the entry's user data keeps its memory and file alive until its completion is reaped. The
        // kernel keeps a descriptor that it polls.
        // Only this thread accesses the queues of its ring.
        if unsafe { self.handle.uring.submission_shared().push(&entry) }.is_err() {
            // Full: submit the queue. If the kernel has no room either, the next call submits.
            _ = self.handle.uring.submit();
            // SAFETY: as above.
            if unsafe { self.handle.uring.submission_shared().push(&entry) }.is_err() {
                self.waiting.push(entry);
            }
        }
    }

    /// Submits gathered requests, waits for a completion or a wake-up if `wait` is set, and reaps completions.
    pub(crate) fn submit_and_reap(&mut self, wait: bool) -> Completed {
        let mut gathered = mem::take(&mut self.gathered);
        for index in gathered.drain(..) {
            let entry = self.slots.lock().slots.get_mut(index).and_then(|slot| entry(&self.handle, slot, index));
            entry.into_iter().for_each(|entry| self.push(entry));
        }
        self.gathered = gathered;
        if wait && !self.polls_event {
            self.polls_event = true;
            let poll = opcode::PollAdd::new(Fd(self.event), libc::POLLIN as u32);
            self.push(poll.build().user_data(WAKE_UP));
        }
        // On an error (interrupted, out of memory or room) completions are still reaped, and the next call submits
        // again.
        _ = self.handle.uring.submit_and_wait(usize::from(wait));
        let mut done = mem::take(&mut self.done);
        let mut again = mem::take(&mut self.waiting);
        let mut slots = self.slots.lock();
        // SAFETY: only this thread accesses the queues of its ring.
        for answer in unsafe { self.handle.uring.completion_shared() } {
            if answer.user_data() == WAKE_UP {
                self.polls_event = false;
                let mut count = [0; 8];
                // SAFETY: the descriptor is open as long as `_waker`.
                let event = unsafe { std::os::fd::BorrowedFd::borrow_raw(self.event) };
                _ = rustix::io::read(event, &mut count);
                continue;
            }
            if answer.user_data() & POLL != 0 {
                if answer.user_data() != END_POLL {
                    done.polled.push(to_usize(answer.user_data() & !POLL));
                }
                continue;
            }
            let index = to_usize(answer.user_data());
            let Some(slot) = slots.slots.get_mut(index) else { continue };
            let result = answer.result();
            let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            // EAGAIN: the kernel would have to block. IOSQE_ASYNC makes it use its worker threads.
            let is_busy = result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
            let outcome = if is_busy { None } else { slot.work.as_mut().and_then(|work| work.advance(result)) };
            let Some(outcome) = outcome else {
                let flags = if is_busy { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
                again.extend(entry(&self.handle, slot, index).map(|entry| entry.flags(flags)));
                continue;
            };
            self.in_flight -= 1;
            done.works.extend(slot.work.take());
            slots.complete(index, outcome, &mut done);
        }
        drop(slots);
        again.drain(..).for_each(|entry| self.push(entry));
        if self.waiting.is_empty() {
            self.waiting = again;
        }
        done
    }

    /// Takes the allocations back for reuse.
    pub(crate) fn reuse(&mut self, done: Completed) {
        self.done = done;
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // It fails if no files are registered.
        _ = self.handle.unregister_files();
    }
}

/// The submission entry for the rest of a slot's request.
fn entry(ring: &Arc<Handle>, slot: &mut Slot, index: usize) -> Option<squeue::Entry> {
    let entry = match slot.work.as_ref()? {
        Work::Flush(file) => opcode::Fsync::new(Fd(file.fd.as_raw_fd())).flags(FsyncFlags::DATASYNC).build(),
        Work::Transfer(transfer) => {
            let registered = if transfer.direction == Direction::Read { transfer.file.slot(ring) } else { None };
            let fixed = registered.and_then(|slot| RawFd::try_from(slot).ok());
            let fd = Fd(fixed.unwrap_or_else(|| transfer.file.fd.as_raw_fd()));
            let (at, flags) = (transfer.at(), transfer.flags());
            let entry = match (transfer.piece(), transfer.direction) {
                (Some((start, len)), direction) => {
                    let is_registered = memory::is_registered(ring, start, len as usize);
                    match (direction, is_registered) {
                        (Direction::Read, false) => opcode::Read::new(fd, start, len).offset(at).build(),
                        (Direction::Read, true) => {
                            opcode::ReadFixed::new(fd, start, len, memory::INDEX).offset(at).build()
                        }
                        (Direction::Write, false) => {
                            opcode::Write::new(fd, start, len).offset(at).rw_flags(flags).build()
                        }
                        (Direction::Write, true) => {
                            opcode::WriteFixed::new(fd, start, len, memory::INDEX).offset(at).rw_flags(flags).build()
                        }
                    }
                }
                (None, direction) => {
                    transfer.pieces(&mut slot.pieces);
                    let (pieces, count) = (slot.pieces.as_ptr(), u32::try_from(slot.pieces.len()).ok()?);
                    match direction {
                        Direction::Read => opcode::Readv::new(fd, pieces, count).offset(at).build(),
                        Direction::Write => opcode::Writev::new(fd, pieces, count).offset(at).rw_flags(flags).build(),
                    }
                }
            };
            // The index of a registered file, in place of a descriptor.
            if fixed.is_some() { entry.flags(squeue::Flags::FIXED_FILE) } else { entry }
        }
    };
    Some(entry.user_data(index as u64))
}
