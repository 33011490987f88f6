//! The device.
//!
//! **Laws of its locks.**
//! 1. The configuration has none ([`crate::config`]), and neither has how much memory there is ([`Balloon::size`]): a guest that
//!    waits for a configuration read or write waits for nobody.
//! 2. Work on a queue takes that queue's own lock for one look at it, which may last as long as a discard does. Besides only whoever
//!    ends what the queue has takes it ([`Balloon::reset`], [`Balloon::stopped`], [`Balloon::inherited`], [`Balloon::memory`]), to know that nobody is at it any more; so nobody
//!    who works may wait for a guest. Whoever works on deflating takes the lock of inflating besides his own, in that order.
//! 3. Every other lock is held for a few assignments, never two at once, and never while anybody else is called: a [`Transport`],
//!    a sink of free pages or a [`Reclaim`] may call the device from where it is called, and from where it is dropped.

mod array;
mod ballooned;
mod free_pages;
mod hinting;
mod pending;
mod report;
mod statistics;
mod work_budget;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use limosa_page::PAGE_SIZE;

use ballooned::Ballooned;

use crate::config::Config;
use crate::counters::{AtomicCounters, Counters};
use crate::layout::{Features, Numbering, Role};
use crate::reclaim::Reclaim;
use crate::ring::Ring;
pub use hinting::HintList;
use hinting::Hinting;
use pending::Pending;

/// Whether a queue has more to do than was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum More {
    /// The queue wants to be looked at again, after others had their turn.
    Yes,
    /// The queue is looked at again when the driver or [`Transport::kick`] says so.
    No,
}

/// Whoever connects the device with its driver: a vhost-user server, a VMM's PCI or MMIO transport.
pub trait Transport: Send + Sync {
    /// Tells the driver that the configuration has changed. Must not wait for it.
    fn config_changed(&self);

    /// Has somebody [work](Balloon::work) on a queue soon. Must not work on it itself.
    fn kick(&self, queue: usize);

    /// Whether there is still a driver's end.
    fn is_connected(&self) -> bool {
        true
    }

    /// Whether the driver's queue ran and does not now: the VM stands still, the driver was unloaded without a word, or the ring
    /// makes no sense. Nobody need wait for what comes over it.
    fn is_idle(&self, _queue: usize) -> bool {
        false
    }
}

/// What a device is to be.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// What is offered to the driver.
    pub features: Features,
    /// How the driver numbers its queues.
    pub numbering: Numbering,
    /// Whether reports of free pages are acknowledged without giving the pages back, until
    /// [`Balloon::set_reporting`] says otherwise.
    pub reporting_off: bool,
}

/// How much memory the guest has, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Size {
    /// Without a balloon.
    pub ram: u64,
    /// With the balloon that is wanted.
    pub target: u64,
    /// With the balloon that there is.
    pub actual: u64,
}

/// What the device keeps of whom it is connected with.
#[derive(Default)]
struct Guest {
    memory: Option<Arc<dyn Reclaim>>,
    transport: Option<Arc<dyn Transport>>,
    /// Bytes that the guest is to have; `None`: all.
    target: Option<u64>,
}

/// What work on a queue leaves for the next time.
#[derive(Default)]
struct Queue {
    /// The driver that it is of.
    epoch: u64,
    /// Pages of a buffer that is not done.
    pending: Option<Pending>,
    /// The buffer for statistics, which the device holds.
    held: Option<u16>,
    /// The next buffer for statistics was filled at nobody knows what time.
    outdated: bool,
    /// What is in the balloon, as the queue for inflating knows it.
    ballooned: Ballooned,
}

/// The device. Shared by whoever answers the driver, works on the queues, and asks something of the guest.
pub struct Balloon {
    offered: Features,
    numbering: Numbering,
    config: Config,
    /// Bytes of the guest's memory.
    ram: AtomicU64,
    /// Counts sizes of the guest.
    changes: AtomicU64,
    accepted: AtomicU64,
    /// A driver has accepted something, be it nothing, since the device was connected.
    has_accepted: AtomicBool,
    /// Counts drivers. What was taken from the queues of an earlier one is nobody's.
    epoch: AtomicU64,
    reporting: AtomicBool,
    statistics_wanted: AtomicBool,
    statistics: Mutex<statistics::LatestStatistics>,
    guest: Mutex<Guest>,
    hinting: Mutex<Hinting>,
    queues: [Mutex<Queue>; Role::ALL.len()],
    counters: AtomicCounters,
}

impl std::fmt::Debug for Balloon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Balloon")
            .field("accepted", &self.accepted_features())
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
            accepted: AtomicU64::new(0),
            has_accepted: AtomicBool::new(false),
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

    /// What it offers to the driver.
    pub fn features(&self) -> Features {
        self.offered
    }

    /// How many queues it has if all of that is accepted.
    pub fn queues(&self) -> usize {
        Role::ALL.iter().filter(|role| self.offered.has(role.feature())).count().max(match self.numbering {
            Numbering::Compact => 0,
            Numbering::Fixed => Role::ALL.len(),
        })
    }

    /// The driver has accepted these; others than were offered are left out.
    pub fn accepted(&self, features: Features) {
        self.accepted.store(features.and(self.offered).bits(), Ordering::Release);
        self.has_accepted.store(true, Ordering::Release);
    }

    /// What the driver has accepted.
    pub fn accepted_features(&self) -> Features {
        Features::from_bits(self.accepted.load(Ordering::Acquire))
    }

    /// Copies bytes of the configuration; zeros behind its end. Takes no lock and never waits.
    pub fn read_config(&self, offset: u32, into: &mut [u8]) {
        self.config.read(self.offered, offset, into);
    }

    /// The driver writes its configuration. Takes no lock and never waits. What is not its own to write is ignored and counted.
    pub fn write_config(&self, offset: u32, bytes: &[u8]) {
        let written = self.config.write(self.offered, offset, bytes);
        self.counters
            .refused_config_writes
            .refuse(written.refused.into(), "it writes configuration that is not its own");
        self.changes.fetch_add(written.actual_changed.into(), Ordering::AcqRel);
    }

    /// How often the guest's size has become another one ([`Size::actual`]). Who wants to know looks here from time to time: nobody
    /// is called, because the guest's processor stands still until its word is taken.
    pub fn actual_changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// The guest's memory, or another one. What was in the balloon of memory that is not there any more is forgotten, so this waits
    /// for whoever works on the queue for inflating, as [`reset`](Self::reset) does.
    pub fn memory(&self, memory: Arc<dyn Reclaim>) {
        let ranges = memory.ram().to_vec();
        let ram = ranges.iter().map(|range| range.end - range.start).sum();
        let (before, news) = {
            let mut guest = self.lock(&self.guest);
            self.ram.store(ram, Ordering::Release);
            (guest.memory.replace(memory), self.show_target(&guest))
        };
        // Unmapping may take a while, and whoever drops memory may do anything.
        drop(before);
        self.lock(self.inflating()).ballooned.keep(&ranges);
        // A balloon that was wanted before the guest's size was known.
        if news {
            self.config_changed();
        }
    }

    /// Connects it. There is a driver once it has [accepted](Self::accepted) what it wants. If that is also to say what it fills free
    /// pages with, nothing that it reports is given back, and it is asked for no list, until it has said that: a driver that another
    /// process had before has said it there, and may look like one that begins.
    pub fn attached(&self, transport: Arc<dyn Transport>) {
        self.has_accepted.store(false, Ordering::Release);
        self.config.forget_poison();
        let before = self.lock(&self.guest).transport.replace(transport);
        drop(before);
    }

    /// The driver goes on that another process had, as when a server takes the place of one that was killed. It knows what that one
    /// has told it, so it is told that the configuration has changed: it has its hinted pages back, and makes its balloon as large
    /// as is wanted here. What it has in the balloon is known when that has changed.
    pub fn inherited(&self) {
        self.config.inherit();
        if let Some(mut state) = self.state(Role::Statistics) {
            state.outdated = true;
        }
        self.config_changed();
    }

    /// A queue has stopped, as when the VM is stopped for a while: its buffers that are not given back are the driver's again, and
    /// come anew when it goes on. All that the driver has said holds, and so does a list of free pages that was asked for;
    /// statistics that come anew are not told again, but asked for once more.
    /// Nobody may [work](Self::work) on that queue meanwhile.
    pub fn stopped(&self, queue: usize) {
        let role = self.numbering.role(self.accepted_features(), queue);
        if let Some(mut state) = role.and_then(|role| self.state(role)) {
            let ballooned = std::mem::take(&mut state.ballooned);
            *state = Queue { epoch: state.epoch, ballooned, outdated: true, ..Queue::default() };
        }
    }

    /// The driver is gone, or begins anew: there is none until it has [`accepted`](Self::accepted) what it wants, the balloon is
    /// empty, no buffer of the queues is held any more, no list of free pages comes, there are no statistics. What was accepted holds
    /// until then, and what fills free pages until the next driver that has accepted that feature says it, which it does before
    /// it gives any.
    ///
    /// When it returns nothing of what the driver gave is given back or passed on any more, and its rings are left as they are:
    /// it waits for whoever is at a queue, who leaves after the call that he is in (one discard, say). So not from within
    /// [`work`](Self::work). A guest that reads or writes the configuration meanwhile does not wait. Whoever keeps the rings has
    /// stopped them before: what is taken out of a ring later is taken for the next driver's.
    pub fn reset(&self) {
        self.has_accepted.store(false, Ordering::Release);
        self.epoch.fetch_add(1, Ordering::AcqRel);
        let had_balloon = self.config.forget_driver();
        self.end_hinting();
        for queue in &self.queues {
            *self.lock(queue) = Queue::default();
        }
        self.lock(&self.statistics).forget();
        self.changes.fetch_add(had_balloon.into(), Ordering::AcqRel);
    }

    /// Bytes that the guest is to have: its driver makes the balloon as large as what is beyond. More than it has is all of it.
    ///
    /// # Errors
    /// Nothing: no guest lives without memory.
    pub fn set_target(&self, bytes: u64) -> Result<(), ZeroTarget> {
        if bytes < PAGE_SIZE {
            return Err(ZeroTarget);
        }
        self.want(Some(bytes));
        Ok(())
    }

    /// What was [asked for](Self::set_target); `None`: nothing, so the guest is to have all of its memory, however much that
    /// becomes.
    pub fn target(&self) -> Option<u64> {
        self.lock(&self.guest).target
    }

    /// The guest is to have all of its memory again, also what is plugged into it later.
    pub fn clear_target(&self) {
        self.want(None);
    }

    fn want(&self, target: Option<u64>) {
        {
            let mut guest = self.lock(&self.guest);
            guest.target = target;
            self.show_target(&guest);
        }
        self.config_changed();
    }

    /// How much memory the guest has. Takes no lock.
    pub fn size(&self) -> Size {
        let ram = self.ram.load(Ordering::Acquire);
        let without = |pages: u32| ram.saturating_sub(u64::from(pages) * PAGE_SIZE);
        Size { ram, target: without(self.config.num_pages()), actual: without(self.config.actual()) }
    }

    /// Whether a driver is there that has accepted what was offered.
    pub fn has_driver(&self) -> bool {
        let connected = self.transport().is_some_and(|transport| transport.is_connected());
        connected && self.has_accepted.load(Ordering::Acquire)
    }

    /// Whether its driver, if there is one, knows what it is told: it has read the target and the command for free pages since they
    /// became what they are. Who is about to take the device away waits for that: a driver that has not read DONE keeps the
    /// pages that it hinted.
    pub fn is_told(&self) -> bool {
        self.config.is_known() || !self.has_driver()
    }

    /// What was done and refused.
    pub fn counters(&self) -> Counters {
        self.counters.read()
    }

    /// Works on a queue for a bounded time.
    ///
    /// # Errors
    /// The ring cannot be worked on. A list of free pages that came over it has ended, and the guest is told that it may have its
    /// pages back; unless the ring has only [stopped](Ring::is_stopped), and the list goes on with it.
    pub fn work<R: Ring>(&self, queue: usize, ring: &R) -> Result<More, R::Error> {
        let Some(role) = self.numbering.role(self.accepted_features(), queue) else { return Ok(More::No) };
        let Some(mut state) = self.state(role) else { return Ok(More::No) };
        match role {
            Role::Inflate | Role::Deflate => self.work_on_arrays(role, &mut state, ring),
            Role::Statistics => self.work_on_statistics(&mut state, ring),
            Role::Hint => self.work_on_hints(&mut state, ring).inspect_err(|error| {
                if !R::is_stopped(error) {
                    self.end_hinting();
                }
            }),
            Role::Reporting => self.work_on_reports(&mut state, ring),
        }
    }

    /// What was left of a queue of the driver that there is.
    fn state(&self, role: Role) -> Option<MutexGuard<'_, Queue>> {
        let mut state = self.lock(self.queues.get(role.index())?);
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

    /// Whether a reset waits for who works with this state: nothing of it is anybody's any more.
    fn is_reset(&self, epoch: u64) -> bool {
        self.epoch.load(Ordering::Acquire) != epoch
    }

    /// The end of a look at a queue.
    fn leave<R: Ring>(&self, state: &Queue, ring: &R, more: More) -> Result<More, R::Error> {
        if self.is_reset(state.epoch) {
            return Ok(More::No);
        }
        ring.notify()?;
        Ok(more)
    }

    /// Whether free pages may lose their contents.
    fn keeps_free_pages(&self) -> bool {
        self.accepted_features().has(Features::PAGE_POISON) && self.config.poison() != Some(0)
    }

    /// Shows the size of the balloon that leaves the guest what it is to have. Whether that is news.
    fn show_target(&self, guest: &Guest) -> bool {
        let ram = self.ram.load(Ordering::Acquire);
        let pages = ram.saturating_sub(guest.target.unwrap_or(ram)) / PAGE_SIZE;
        self.config.set_num_pages(u32::try_from(pages).unwrap_or(u32::MAX))
    }

    fn guest_memory(&self) -> Option<Arc<dyn Reclaim>> {
        self.lock(&self.guest).memory.clone()
    }

    fn transport(&self) -> Option<Arc<dyn Transport>> {
        self.lock(&self.guest).transport.clone()
    }

    fn config_changed(&self) {
        if let Some(transport) = self.transport() {
            transport.config_changed();
        }
    }

    /// Whether the driver has a queue for that which does not run any more.
    fn is_idle(&self, role: Role) -> bool {
        let number = self.numbering.number(self.accepted_features(), role);
        number.zip(self.transport()).is_some_and(|(number, transport)| transport.is_idle(number))
    }

    /// Has somebody work on a queue, if there is such a queue.
    fn kick(&self, role: Role) {
        let number = self.numbering.number(self.accepted_features(), role);
        if let (Some(number), Some(transport)) = (number, self.transport()) {
            transport.kick(number);
        }
    }

    fn discard(&self, memory: &dyn Reclaim, run: &Range<u64>) {
        self.counters.discards.add(1);
        match memory.discard(run) {
            Ok(bytes) => self.counters.discarded_bytes.add(bytes),
            Err(error) => {
                let what = format!("its pages cannot be given back: {error}");
                self.counters.failed_discards.refuse(1, &what);
            }
        }
    }

    fn lock<'l, T>(&self, lock: &'l Mutex<T>) -> MutexGuard<'l, T> {
        // What a panic could leave half done is one driver's, and gone with its reset.
        lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Balloon {
    fn drop(&mut self) {
        self.end_hinting();
    }
}

/// A guest was to have no memory at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a guest needs memory: the target is at least 4096 bytes, and in practice hundreds of MiB")]
pub struct ZeroTarget;
