//! The device.
//!
//! **Laws of its locks.**
//! 1. The configuration has none ([`crate::config`]), nor has the size of the memory ([`Balloon::size`]): a guest's
//!    read or write of the configuration waits for no other thread.
//! 2. Work on a queue takes that queue's lock for one call, which may last as long as a discard. Otherwise only calls
//!    that end the queue's state take it ([`Balloon::reset`], [`Balloon::queue_stopped`], [`Balloon::driver_resumed`],
//!    [`Balloon::memory`]), to know that no thread works on it any more; so work must not wait for a guest. Work on
//!    deflating takes its own lock and then that of inflating, in this order.
//! 3. Every other lock is held for a few assignments, never two at once, and never during a call of foreign code: a
//!    [`Transport`], a sink of free pages or a [`Reclaim`] may call the device while it is called, and while it is
//!    dropped.

mod array;
mod ballooned;
mod free_pages;
mod give_back;
mod hint_list;
mod hinting;
mod queue;
mod statistics;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use limosa_page::{PAGE_SIZE, error_with_causes};
use parking_lot::{Mutex, MutexGuard};

use crate::config::Config;
use crate::counters::{AtomicCounters, Counters};
use crate::layout::{Features, QueueNumbering, QueueRole};
use crate::numbers;
use crate::reclaim::Reclaim;
use crate::ring::Ring;
use crate::statistics::LatestStatistics;
pub use hint_list::HintList;
use hint_list::Hinting;
pub use queue::MoreWork;
use queue::Queue;

/// Connects the device with its driver: a vhost-user server, a VMM's PCI or MMIO transport.
pub trait Transport: Send + Sync {
    /// Notifies the driver that the configuration has changed. It must not wait for the driver.
    fn config_changed(&self);

    /// Schedules [processing](Balloon::process_queue) on a queue. It must not process the queue itself.
    fn kick(&self, queue: usize);

    /// Whether the driver's end is still connected.
    fn is_connected(&self) -> bool {
        true
    }

    /// Whether the driver's queue has run and does not run now: the VM is paused, the driver was unloaded without
    /// notification, or the ring is invalid. There is no use in waiting for buffers on it.
    fn is_queue_stopped(&self, _queue: usize) -> bool {
        false
    }
}

/// Options of a device.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// The features that are offered to the driver; by default all.
    pub features: Features,
    /// How the driver numbers its queues.
    pub numbering: QueueNumbering,
    /// Whether reports of free pages are acknowledged without giving the pages back, until [`Balloon::set_reporting`]
    /// changes that.
    pub reporting_off: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { features: Features::ALL, numbering: QueueNumbering::default(), reporting_off: false }
    }
}

/// How much memory the guest has, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MemorySize {
    /// Without a balloon.
    pub ram: u64,
    /// With the requested balloon.
    pub target: u64,
    /// With the current balloon.
    pub actual: u64,
}

/// The guest to which the device is connected.
#[derive(Default)]
struct Guest {
    memory: Option<Arc<dyn Reclaim>>,
    transport: Option<Arc<dyn Transport>>,
    /// Bytes of memory that the guest should keep; `None`: all.
    target: Option<u64>,
}

/// The device. It is shared by the threads that serve the driver, process the queues, and send requests to the guest.
pub struct Balloon {
    offered: Features,
    numbering: QueueNumbering,
    config: Config,
    /// Bytes of the guest's memory.
    ram: AtomicU64,
    /// Counts sizes of the guest.
    changes: AtomicU64,
    acked: AtomicU64,
    /// A driver has accepted features, possibly none, since the device was connected.
    has_acked: AtomicBool,
    /// Counts drivers. Buffers taken from the queues of an earlier one are void.
    epoch: AtomicU64,
    reporting: AtomicBool,
    statistics_wanted: AtomicBool,
    statistics: Mutex<LatestStatistics>,
    guest: Mutex<Guest>,
    hinting: Mutex<Hinting>,
    queues: [Mutex<Queue>; QueueRole::ALL.len()],
    counters: AtomicCounters,
}

impl std::fmt::Debug for Balloon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Balloon")
            .field("acked", &self.acked_features())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}

impl Balloon {
    /// A device that has neither memory nor driver yet.
    pub fn new(options: Options) -> Self {
        let Options { features, numbering, reporting_off } = options;
        Self {
            offered: features,
            numbering,
            config: Config::default(),
            ram: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            acked: AtomicU64::new(0),
            has_acked: AtomicBool::new(false),
            epoch: AtomicU64::new(0),
            reporting: AtomicBool::new(!reporting_off),
            statistics_wanted: AtomicBool::new(false),
            statistics: Mutex::default(),
            guest: Mutex::default(),
            hinting: Mutex::default(),
            queues: Default::default(),
            counters: AtomicCounters::default(),
        }
    }

    /// The features that it offers to the driver.
    pub fn features(&self) -> Features {
        self.offered
    }

    /// Number of queues that it has if all of them are accepted.
    pub fn num_queues(&self) -> usize {
        QueueRole::ALL.iter().filter(|role| self.offered.has(role.feature())).count().max(match self.numbering {
            QueueNumbering::Compact => 0,
            QueueNumbering::Fixed => QueueRole::ALL.len(),
        })
    }

    /// The driver has accepted these features; those that were not offered are left out.
    pub fn ack_features(&self, features: Features) {
        self.acked.store(features.intersection(self.offered).bits(), Ordering::Release);
        self.has_acked.store(true, Ordering::Release);
    }

    /// The features that the driver has accepted.
    pub fn acked_features(&self) -> Features {
        Features::from_bits(self.acked.load(Ordering::Acquire))
    }

    /// Copies bytes of the configuration; zeros beyond its end. Takes no lock and never waits.
    pub fn read_config(&self, offset: u32, into: &mut [u8]) {
        self.config.read(self.offered, offset, into);
    }

    /// The driver writes its configuration. Takes no lock and never waits. Bytes that it may not write are ignored and
    /// counted.
    pub fn write_config(&self, offset: u32, bytes: &[u8]) {
        let written = self.config.write(self.offered, offset, bytes);
        self.counters.refused_config_writes.refuse(written.refused.into(), "it writes to read-only configuration");
        self.changes.fetch_add(written.actual_changed.into(), Ordering::AcqRel);
    }

    /// How often the guest's size ([`MemorySize::actual`]) has changed. Callers poll this: there is no callback,
    /// because the guest's virtual CPU waits until its write is accepted.
    pub fn actual_change_count(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Sets the guest's memory, initially or after a change. Pages in the balloon of memory that was removed are
    /// forgotten, so this waits for the thread that processes the queue for inflating, as [`reset`](Self::reset) does.
    pub fn set_memory(&self, memory: Arc<dyn Reclaim>) {
        let ranges = memory.ram().to_vec();
        let ram = ranges.iter().map(|range| range.end - range.start).sum();
        let (before, news) = {
            let mut guest = self.guest.lock();
            self.ram.store(ram, Ordering::Release);
            (guest.memory.replace(memory), self.show_target(&guest))
        };
        // Unmapping may take a while, and dropping memory may run any code.
        drop(before);
        self.inflating().lock().ballooned.keep(&ranges);
        // A balloon that was requested before the guest's size was known.
        if news {
            self.config_changed();
        }
    }

    /// Connects the device. There is a driver once it has [acknowledged](Self::ack_features) features. If these include
    /// page poison, no reported page is given back and no list is requested until the driver has written the value: a
    /// driver that another process had before has written it there, and may look like a new one.
    pub fn attach(&self, transport: Arc<dyn Transport>) {
        self.has_acked.store(false, Ordering::Release);
        self.config.forget_poison();
        let before = self.guest.lock().transport.replace(transport);
        drop(before);
    }

    /// The driver of another process continues here, as when a server replaces one that was killed. It knows that
    /// server's configuration, so it is notified that the configuration has changed: it takes its hinted pages back,
    /// and resizes its balloon as requested here. The size of its balloon is known after the next change.
    pub fn driver_resumed(&self) {
        self.config.driver_resumed();
        if let Some(mut state) = self.state(QueueRole::Statistics) {
            state.outdated = true;
        }
        self.config_changed();
    }

    /// A queue has stopped, as when the VM is paused: its buffers that are not given back belong to the driver again,
    /// which offers them again when it continues. The driver's state remains valid, and so does a list of free pages
    /// that was requested; statistics that are offered again are not reported, but requested once more. No thread may
    /// [process](Self::process_queue) that queue meanwhile.
    pub fn queue_stopped(&self, queue: usize) {
        let role = self.numbering.role(self.acked_features(), queue);
        if let Some(mut state) = role.and_then(|role| self.state(role)) {
            let ballooned = std::mem::take(&mut state.ballooned);
            *state = Queue { epoch: state.epoch, ballooned, outdated: true, ..Queue::default() };
        }
    }

    /// The driver is gone, or starts again. Until it has [acknowledged](Self::ack_features) features there is no
    /// driver, the balloon is empty, no buffer of the queues is held, no list of free pages is received, there are no
    /// statistics. The accepted features remain set until then, and the poison value until the next driver that has
    /// accepted that feature writes it, which it does before it gives any page.
    ///
    /// After it returns, no page or block of the driver is given back or passed on, and its rings are not changed: it
    /// waits for threads that process a queue, which return after their current call (one discard, for example). So it
    /// must not be called from within [`process_queue`](Self::process_queue). A guest that reads or writes the
    /// configuration meanwhile does not wait. The caller must have stopped the rings before: buffers that are taken out
    /// of a ring later count as the next driver's.
    pub fn reset(&self) {
        self.has_acked.store(false, Ordering::Release);
        self.epoch.fetch_add(1, Ordering::AcqRel);
        let had_balloon = self.config.forget_driver();
        self.end_hinting();
        for queue in &self.queues {
            *queue.lock() = Queue::default();
        }
        self.statistics.lock().forget();
        self.changes.fetch_add(had_balloon.into(), Ordering::AcqRel);
    }

    /// Sets the number of bytes that the guest should keep: its driver puts the rest into the balloon. More than its
    /// memory means all of it.
    ///
    /// # Errors
    /// Less than one page: no guest runs without memory.
    pub fn set_target(&self, bytes: u64) -> Result<(), TargetTooSmall> {
        if bytes < PAGE_SIZE {
            return Err(TargetTooSmall);
        }
        self.want(Some(bytes));
        Ok(())
    }

    /// The [target](Self::set_target); `None`: the guest keeps all of its memory, also after it grows.
    pub fn target(&self) -> Option<u64> {
        self.guest.lock().target
    }

    /// Lets the guest have all of its memory again, including memory that is plugged later.
    pub fn clear_target(&self) {
        self.want(None);
    }

    fn want(&self, target: Option<u64>) {
        {
            let mut guest = self.guest.lock();
            guest.target = target;
            self.show_target(&guest);
        }
        self.config_changed();
    }

    /// How much memory the guest has. Takes no lock.
    pub fn size(&self) -> MemorySize {
        let ram = self.ram.load(Ordering::Acquire);
        let without = |pages: u32| ram.saturating_sub(u64::from(pages) * PAGE_SIZE);
        MemorySize { ram, target: without(self.config.num_pages()), actual: without(self.config.actual()) }
    }

    /// Whether a driver is connected that has accepted features.
    pub fn has_driver(&self) -> bool {
        let connected = self.transport().is_some_and(|transport| transport.is_connected());
        connected && self.has_acked.load(Ordering::Acquire)
    }

    /// Whether its driver, if there is one, has read the target and the command for free pages since their last change.
    /// Before the device is removed, wait for that: a driver that has not read DONE keeps the pages that it hinted.
    pub fn is_driver_up_to_date(&self) -> bool {
        self.config.is_known() || !self.has_driver()
    }

    /// Counters of work done and of refused input.
    pub fn counters(&self) -> Counters {
        self.counters.read()
    }

    /// Works on a queue for a bounded time.
    ///
    /// # Errors
    /// The ring cannot be processed. A list of free pages that was received over it has ended, and the guest is
    /// notified that it may use its pages again; unless the ring has only [stopped](Ring::is_stopped_error): then the
    /// list continues with it.
    pub fn process_queue<R: Ring>(&self, queue: usize, ring: &R) -> Result<MoreWork, R::Error> {
        let Some(role) = self.numbering.role(self.acked_features(), queue) else { return Ok(MoreWork::No) };
        let Some(mut state) = self.state(role) else { return Ok(MoreWork::No) };
        match role {
            QueueRole::Inflate | QueueRole::Deflate => self.process_arrays(role, &mut state, ring),
            QueueRole::Statistics => self.process_statistics(&mut state, ring),
            QueueRole::Hint => self.process_hints(&mut state, ring).inspect_err(|error| {
                if !R::is_stopped_error(error) {
                    self.end_hinting();
                }
            }),
            QueueRole::Reporting => self.process_reports(&mut state, ring),
        }
    }

    /// Whether blocks that the guest reports are given back. If not, reports are only acknowledged; the guest cannot be
    /// asked to stop reporting.
    pub fn set_reporting(&self, on: bool) {
        self.reporting.store(on, Ordering::Release);
    }

    /// The last value of [`set_reporting`](Self::set_reporting).
    pub fn reporting(&self) -> bool {
        self.reporting.load(Ordering::Acquire)
    }

    /// Law: a block is given back before its buffer is acknowledged, and never after: with the acknowledgement the
    /// guest may use it again.
    fn process_reports<R: Ring>(&self, state: &mut Queue, ring: &R) -> Result<MoreWork, R::Error> {
        self.give_back(state, ring, |_, chain| {
            let memory = self.guest_memory();
            let ram = memory.as_ref().map_or(&[][..], |memory| memory.ram());
            let wanted = self.reporting() && !self.keeps_free_pages();
            let (mut runs, mut bytes, mut outside, mut ignored, mut unexpected) = (Vec::new(), 0, 0, 0, 0);
            for buffer in chain {
                if !buffer.is_write_only() {
                    unexpected += 1;
                    continue;
                }
                match numbers::inside(buffer.addr().0, buffer.len().into(), ram) {
                    Some(_) if !wanted => ignored += 1,
                    Some(run) => {
                        bytes += run.end - run.start;
                        runs.push(run);
                    }
                    None => outside += 1,
                }
            }
            self.counters.reported_blocks.add(runs.len() as u64);
            self.counters.reported_bytes.add(bytes);
            self.counters.ignored_reports.add(ignored);
            self.counters.unexpected_buffers.refuse(unexpected, "reports of free pages that cannot be written");
            self.counters.blocks_outside.refuse(outside, "free blocks that are not pages of its memory");
            runs
        })
    }

    /// The state of a queue of the current driver.
    fn state(&self, role: QueueRole) -> Option<MutexGuard<'_, Queue>> {
        let mut state = self.queues.get(role.index())?.lock();
        let epoch = self.epoch.load(Ordering::Acquire);
        if state.epoch != epoch {
            *state = Queue { epoch, ..Queue::default() };
        }
        Some(state)
    }

    /// The queue for inflating.
    fn inflating(&self) -> &Mutex<Queue> {
        let [inflating, ..] = &self.queues;
        inflating
    }

    /// Whether a reset waits for the thread that uses this state: it is void.
    fn is_reset(&self, epoch: u64) -> bool {
        self.epoch.load(Ordering::Acquire) != epoch
    }

    /// Ends the work on a queue.
    fn leave<R: Ring>(&self, state: &Queue, ring: &R, more: MoreWork) -> Result<MoreWork, R::Error> {
        if self.is_reset(state.epoch) {
            return Ok(MoreWork::No);
        }
        ring.notify()?;
        Ok(more)
    }

    /// Whether free pages may lose their contents.
    fn keeps_free_pages(&self) -> bool {
        self.acked_features().has(Features::PAGE_POISON) && self.config.poison() != Some(0)
    }

    /// Shows the size of the balloon that leaves the guest its target. Returns whether it changed.
    fn show_target(&self, guest: &Guest) -> bool {
        let ram = self.ram.load(Ordering::Acquire);
        let pages = ram.saturating_sub(guest.target.unwrap_or(ram)) / PAGE_SIZE;
        self.config.set_num_pages(u32::try_from(pages).unwrap_or(u32::MAX))
    }

    fn guest_memory(&self) -> Option<Arc<dyn Reclaim>> {
        self.guest.lock().memory.clone()
    }

    fn transport(&self) -> Option<Arc<dyn Transport>> {
        self.guest.lock().transport.clone()
    }

    fn config_changed(&self) {
        if let Some(transport) = self.transport() {
            transport.config_changed();
        }
    }

    /// Whether the driver has a queue for this role that does not run any more.
    fn is_idle(&self, role: QueueRole) -> bool {
        let number = self.numbering.number(self.acked_features(), role);
        number.zip(self.transport()).is_some_and(|(number, transport)| transport.is_queue_stopped(number))
    }

    /// Schedules work on a queue, if there is such a queue.
    fn kick(&self, role: QueueRole) {
        let number = self.numbering.number(self.acked_features(), role);
        if let (Some(number), Some(transport)) = (number, self.transport()) {
            transport.kick(number);
        }
    }

    fn discard(&self, memory: &dyn Reclaim, run: &Range<u64>) {
        self.counters.discards.add(1);
        match memory.discard(run) {
            Ok(bytes) => self.counters.discarded_bytes.add(bytes),
            Err(error) => {
                let what = format!("its pages could not be given back: {}", error_with_causes(&error));
                self.counters.failed_discards.refuse(1, &what);
            }
        }
    }
}

impl Drop for Balloon {
    fn drop(&mut self) {
        self.end_hinting();
    }
}

/// The target is less than one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a guest needs memory: the target must be at least 4096 bytes, in practice hundreds of MiB")]
pub struct TargetTooSmall;
