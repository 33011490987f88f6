//! A thread's own `io_uring`.
//!
//! **Law: a request costs its share of one call.** Requests are gathered until the thread has nothing else to do; one call hands all of
//! them to the kernel and waits for the first that is done. What is under way lies in slots of the ring, not in futures, so a dropped
//! future takes nothing away; the slots, and their room for vectors, are used again. Only the ring's thread submits and takes
//! answers; others may look into a slot, so there is a lock around them, which nobody else wants as a rule.
//!
//! Files that are read often are registered with the ring ([`files`]), and memory of the arena ([`memory`]). The figures are in
//! `docs/benchmarks/2026-11-22-storage.md`.
//!
//! A direct write, or a flush, that the thread would wait for and for nothing else is a plain call: the kernel finishes one that is
//! under way on its own by yet another thread, and it takes longer.
#![allow(unsafe_code, reason = "the kernel is given addresses of memory that slots keep")]

mod files;
mod handle;
mod memory;

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, opcode, squeue};
use rustix::event::{EventfdFlags, eventfd};

use crate::drive::Bell;
use crate::error::StorageError;
use crate::file::transfer::Direction;
use crate::request::Work;
pub(crate) use crate::ring::files::Places;
use crate::ring::handle::Handle;

/// Requests that are handed over by one call.
const GATHERED: u32 = 256;
/// Answers that have room before the kernel keeps them for later.
const ANSWERS: u32 = 1024;
/// What the bell's answer is known by.
const BELL: u64 = u64::MAX;

/// What may become of a slot.
enum Stage {
    /// Nobody's: the next free one.
    Free(Option<usize>),
    /// Under way; who is told.
    Under(Option<Waker>),
    /// Under way, and nobody waits for it.
    Left,
    /// Done; nobody has taken note yet.
    Done(Result<(), StorageError>),
}

struct Slot {
    stage: Stage,
    work: Option<Work>,
    /// The vector that the kernel was given. Kept from request to request.
    pieces: Vec<libc::iovec>,
}

// SAFETY: the addresses in `pieces` are only handed to the kernel; the memory they name is kept by `work`.
unsafe impl Send for Slot {}

impl Slot {
    /// Whether its request is one that takes the kernel longer if nobody waits in it.
    fn blocks_well(&self) -> bool {
        match &self.work {
            Some(Work::Transfer(transfer)) => transfer.direction == Direction::Write && transfer.file.cache.is_direct(),
            Some(Work::Flush(_)) => true,
            None => false,
        }
    }
}

/// Slots, and the first free one.
struct Slots {
    slots: Vec<Slot>,
    free: Option<usize>,
}

impl Slots {
    /// A slot for a request.
    fn put(&mut self, work: Work, waker: &Waker) -> usize {
        let stage = Stage::Under(Some(waker.clone()));
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

    /// Takes note of an outcome, if anybody waits for it.
    fn settle(&mut self, index: usize, outcome: Result<(), StorageError>, done: &mut Done) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        match mem::replace(&mut slot.stage, Stage::Done(outcome)) {
            Stage::Under(waker) => done.wakers.extend(waker),
            _ => self.release(index),
        }
    }

    fn release(&mut self, index: usize) {
        if let Some(slot) = self.slots.get_mut(index) {
            slot.stage = Stage::Free(self.free.replace(index));
        }
    }
}

fn lock(slots: &Mutex<Slots>) -> MutexGuard<'_, Slots> {
    slots.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A request in a slot, for the future that waits for it.
pub(crate) struct Begun {
    slots: Arc<Mutex<Slots>>,
    index: usize,
    is_over: bool,
}

impl Begun {
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StorageError>> {
        let mut slots = lock(&self.slots);
        let Some(slot) = slots.slots.get_mut(self.index).filter(|_| !self.is_over) else { return Poll::Pending };
        match &mut slot.stage {
            Stage::Under(Some(waker)) if waker.will_wake(context.waker()) => {}
            Stage::Under(waker) => {
                let old = waker.replace(context.waker().clone());
                // A waker is somebody else's: it is dropped without our lock.
                drop(slots);
                drop(old);
            }
            Stage::Done(result) => {
                let result = mem::replace(result, Ok(()));
                slots.release(self.index);
                self.is_over = true;
                return Poll::Ready(result);
            }
            Stage::Free(_) | Stage::Left => {}
        }
        Poll::Pending
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let mut slots = lock(&self.slots);
        let Some(slot) = slots.slots.get_mut(self.index) else { return };
        let stage = match &slot.stage {
            Stage::Done(_) => {
                slots.release(self.index);
                return;
            }
            _ => mem::replace(&mut slot.stage, Stage::Left),
        };
        drop(slots);
        drop(stage);
    }
}

/// What a turn brought: to be told, and dropped, when the ring is free for others.
#[derive(Default)]
pub(crate) struct Done {
    wakers: Vec<Waker>,
    works: Vec<Work>,
}

impl Done {
    pub(crate) fn announce(&mut self) {
        self.works.clear();
        self.wakers.drain(..).for_each(Waker::wake);
    }
}

/// A thread's ring.
pub(crate) struct Ring {
    handle: Arc<Handle>,
    slots: Arc<Mutex<Slots>>,
    /// Requests that are not done.
    under: usize,
    /// Slots whose requests the kernel was not asked for yet.
    gathered: Vec<usize>,
    /// Entries that found no room in the queue of submissions.
    waiting: Vec<squeue::Entry>,
    bell: RawFd,
    bell_is_set: bool,
    _bell: Arc<Bell>,
    done: Done,
}

/// Asks the kernel for a ring, with what it has of what makes one cheap.
fn build() -> io::Result<IoUring> {
    // A thread that is not interrupted for answers: Linux 5.19. (To have it take them only when it asks for them, DEFER_TASKRUN, costs a
    // third more CPU time of the kernel's with 16 rewrites at once, and a tenth of their rate.)
    let mut best = IoUring::builder();
    best.setup_cqsize(ANSWERS).setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
    let uring = best.build(GATHERED).or_else(|_| IoUring::builder().setup_cqsize(ANSWERS).build(GATHERED))?;
    let features = uring.params();
    // Vectors need not outlive the call that hands them over, and no answer is dropped: Linux 5.5.
    if features.is_feature_nodrop() && features.is_feature_submit_stable() && features.is_feature_rw_cur_pos() {
        return Ok(uring);
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring is too old"))
}

/// Whether the kernel has `io_uring`, and lets us.
pub(crate) fn probe() -> io::Result<()> {
    build().map(drop)
}

impl Ring {
    /// A ring for this thread, whose sleep the bell ends.
    pub(crate) fn new(bell: &Arc<Bell>) -> io::Result<Self> {
        let uring = build()?;
        let event = bell.event(|| Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))?.as_raw_fd();
        let slots = Arc::new(Mutex::new(Slots { slots: Vec::new(), free: None }));
        Ok(Self {
            handle: Arc::new(Handle::new(uring)),
            slots,
            under: 0,
            gathered: Vec::new(),
            waiting: Vec::new(),
            bell: event,
            bell_is_set: false,
            _bell: Arc::clone(bell),
            done: Done::default(),
        })
    }

    /// Whether requests are not done.
    pub(crate) fn has_requests(&self) -> bool {
        self.under > 0
    }

    /// Takes a request: it is begun by the next turn, at the latest.
    pub(crate) fn begin(&mut self, work: Work, waker: &Waker) -> Begun {
        let index = lock(&self.slots).put(work, waker);
        self.under += 1;
        self.gathered.push(index);
        Begun { slots: Arc::clone(&self.slots), index, is_over: false }
    }

    /// Whether there is one request and no other, which is done sooner by a call that blocks.
    pub(crate) fn is_alone(&self) -> bool {
        let [index] = *self.gathered.as_slice() else { return false };
        self.under == 1 && lock(&self.slots).slots.get(index).is_some_and(Slot::blocks_well)
    }

    /// Carries that request out.
    pub(crate) fn block(&mut self) -> Done {
        let mut done = mem::take(&mut self.done);
        let Some(index) = self.gathered.pop() else { return done };
        let work = lock(&self.slots).slots.get_mut(index).and_then(|slot| slot.work.take());
        let Some(work) = work else { return done };
        let outcome = work.block();
        self.under -= 1;
        lock(&self.slots).settle(index, outcome, &mut done);
        done
    }

    fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: what the entry names is kept by the slot that it is known by, until its answer has come. Only this thread takes the
        // queues of its ring.
        if unsafe { self.handle.uring.submission_shared().push(&entry) }.is_err() {
            // Full: hand over what is there. If the kernel has no room either, the next turn does.
            _ = self.handle.uring.submit();
            // SAFETY: as above.
            if unsafe { self.handle.uring.submission_shared().push(&entry) }.is_err() {
                self.waiting.push(entry);
            }
        }
    }

    /// Hands over what was gathered, waits for an answer or the bell if so asked, and takes the answers there are.
    pub(crate) fn turn(&mut self, wait: bool) -> Done {
        let mut gathered = mem::take(&mut self.gathered);
        for index in gathered.drain(..) {
            let entry = lock(&self.slots).slots.get_mut(index).and_then(|slot| entry(&self.handle, slot, index));
            entry.into_iter().for_each(|entry| self.push(entry));
        }
        self.gathered = gathered;
        if wait && !self.bell_is_set {
            self.bell_is_set = true;
            let poll = opcode::PollAdd::new(Fd(self.bell), libc::POLLIN as u32);
            self.push(poll.build().user_data(BELL));
        }
        // Interrupted, or short of memory or room: what is there is taken, and the next turn tries again.
        _ = self.handle.uring.submit_and_wait(usize::from(wait));
        let mut done = mem::take(&mut self.done);
        let mut again = mem::take(&mut self.waiting);
        let mut slots = lock(&self.slots);
        // SAFETY: only this thread takes the queues of its ring.
        for answer in unsafe { self.handle.uring.completion_shared() } {
            if answer.user_data() == BELL {
                self.bell_is_set = false;
                let mut count = [0; 8];
                // SAFETY: the descriptor lives as long as the bell.
                let bell = unsafe { std::os::fd::BorrowedFd::borrow_raw(self.bell) };
                _ = rustix::io::read(bell, &mut count);
                continue;
            }
            let index = usize::try_from(answer.user_data()).unwrap_or(usize::MAX);
            let Some(slot) = slots.slots.get_mut(index) else { continue };
            let result = answer.result();
            let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            // The kernel would have to wait, and does not want to do it for us: threads of its own do.
            let is_busy = result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
            let outcome = if is_busy { None } else { slot.work.as_mut().and_then(|work| work.settle(result)) };
            let Some(outcome) = outcome else {
                let flags = if is_busy { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
                again.extend(entry(&self.handle, slot, index).map(|entry| entry.flags(flags)));
                continue;
            };
            self.under -= 1;
            done.works.extend(slot.work.take());
            slots.settle(index, outcome, &mut done);
        }
        drop(slots);
        again.drain(..).for_each(|entry| self.push(entry));
        if self.waiting.is_empty() {
            self.waiting = again;
        }
        done
    }

    /// Takes the room of what was told back.
    pub(crate) fn reuse(&mut self, done: Done) {
        self.done = done;
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // It fails if there are none.
        _ = self.handle.forget_files();
    }
}

/// What the kernel is asked for in a slot's name: what is left of its request.
fn entry(ring: &Arc<Handle>, slot: &mut Slot, index: usize) -> Option<squeue::Entry> {
    let entry = match slot.work.as_ref()? {
        Work::Flush(file) => opcode::Fsync::new(Fd(file.fd.as_raw_fd())).flags(FsyncFlags::DATASYNC).build(),
        Work::Transfer(transfer) => {
            let known = if transfer.direction == Direction::Read { files::slot(ring, &transfer.file) } else { None };
            let fixed = known.and_then(|slot| RawFd::try_from(slot).ok());
            let fd = Fd(fixed.unwrap_or_else(|| transfer.file.fd.as_raw_fd()));
            let (at, flags) = (transfer.at(), transfer.flags());
            let entry = match (transfer.piece(), transfer.direction) {
                (Some((start, len)), direction) => {
                    let is_known = memory::knows(ring, start, len as usize);
                    match (direction, is_known) {
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
            // A slot is named in place of a descriptor.
            if fixed.is_some() { entry.flags(squeue::Flags::FIXED_FILE) } else { entry }
        }
    };
    Some(entry.user_data(index as u64))
}
