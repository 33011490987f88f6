//! The device: its queues, threads and cache mode.
//!
//! Law: a driver that chose write-through loses no acknowledged write. Whether it did is unknown when it was attached
//! to another server before: then writes go through, until the driver flushes, which a driver that relies on
//! write-through has no reason to do.

use std::future::{Future as _, poll_fn};
use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::thread::available_parallelism;

use limosa_storage::{Pollable, Ready, block_on};
use limosa_vhost::{Device, FrontEnd, MAX_QUEUES, MoreWork, QueueError, QueueThread, Ram, Requests, Turn, Vring};

use parking_lot::Mutex;

use super::config::{Configuration, SECTOR, WRITE_BACK_OFFSET, feature};
use super::execute::Target;
use super::polling::Polling;
use super::queue::{Mode, Queue};
use super::request::ID_LENGTH;
use crate::export::Export;
use crate::exports::Exports;
use crate::peer::Peer;

/// Least number of queues, if none is asked for. A front end that wants more than a device has fails; one that is
/// configured for four must work on a host with fewer cores.
const QUEUES_MIN: usize = 4;
/// Turns after which kicks are looked for although a queue has more work.
const TURNS_MAX: u32 = 16;

/// Options of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VhostUserBlkOptions {
    /// Number of queues, at most [`MAX_QUEUES`]; 0: one for each core, and at least four.
    pub queues: usize,
    /// Number of threads; 0: one for each queue, at most one for each core.
    pub threads: usize,
    /// The name that the driver can read: its first 20 bytes. Empty: the export's, or that of the image's file.
    pub serial: String,
}

impl VhostUserBlkOptions {
    /// Sets the number of queues.
    #[must_use]
    pub fn queues(mut self, queues: usize) -> Self {
        self.queues = queues;
        self
    }

    /// Sets the number of threads.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Sets the name that the driver can read.
    #[must_use]
    pub fn serial(mut self, serial: impl Into<String>) -> Self {
        self.serial = serial.into();
        self
    }
}

/// A virtio-blk device: an export, for the guest of a front end.
#[derive(Debug)]
pub struct VhostUserBlk {
    export: Arc<Export>,
    /// The set of the export, which knows who is refused.
    exports: Option<Exports>,
    queues: Vec<Queue>,
    threads: usize,
    acked: AtomicU64,
    /// Writes may be acknowledged before they are durable, if the driver lets the device know.
    write_back: AtomicBool,
    /// It is unknown which cache mode the driver chose.
    is_mode_unknown: AtomicBool,
    /// The last one that has connected.
    front_end: Mutex<Option<FrontEnd>>,
}

impl VhostUserBlk {
    /// Creates a device.
    #[must_use]
    pub fn new(export: Arc<Export>, options: &VhostUserBlkOptions) -> Self {
        let cores = available_parallelism().map_or(1, NonZeroUsize::get);
        let queues = if options.queues == 0 { cores.max(QUEUES_MIN) } else { options.queues }.min(MAX_QUEUES);
        let threads = if options.threads == 0 { cores } else { options.threads }.min(queues);
        let id = id(&options.serial, &export);
        let target = Target { medium: export.medium(), export: Arc::clone(&export), id, was_logged: Arc::default() };
        Self {
            // A copy of the export's handle for each queue: see `Target`.
            queues: (0..queues).map(|_| Queue::new(target.clone())).collect(),
            export,
            exports: None,
            threads,
            acked: AtomicU64::new(0),
            write_back: AtomicBool::new(true),
            is_mode_unknown: AtomicBool::new(false),
            front_end: Mutex::new(None),
        }
    }

    /// Refuses front ends whose VM was [dropped](Exports::drop_after) from the export of this name.
    #[must_use]
    pub fn of(mut self, exports: Exports) -> Self {
        self.exports = Some(exports);
        self
    }

    /// Returns its export.
    #[must_use]
    pub fn export(&self) -> &Arc<Export> {
        &self.export
    }

    /// Has all queues use the disk that the export has now. Idle ones would keep the last one's files open.
    pub fn notify_replaced(&self) {
        self.queues.iter().for_each(Queue::look_for_medium);
    }

    /// Tells the driver that its export has another length. Returns whether there is a front end that passes it on.
    pub fn notify_resized(&self) -> bool {
        let front_end = self.front_end.lock().clone();
        front_end.is_some_and(|front_end| front_end.config_changed())
    }

    fn configuration(&self) -> Configuration {
        let medium = self.export.medium();
        Configuration {
            sectors: medium.size() / SECTOR,
            allocation_unit: medium.disk().allocation_unit(),
            // At most `MAX_QUEUES`.
            queues: u16::try_from(self.queues.len()).unwrap_or(u16::MAX),
            // Some front ends read it once, before the driver has acknowledged features.
            write_back: self.write_back.load(Ordering::SeqCst),
        }
    }

    fn has_acked(&self, feature: u64) -> bool {
        self.acked.load(Ordering::SeqCst) & feature != 0
    }

    /// Whether writes may be acknowledged before they are durable (virtio 1.2, section 5.2.6.2).
    fn has_write_back(&self) -> bool {
        if self.has_acked(feature::CONFIG_WCE) {
            self.write_back.load(Ordering::SeqCst)
        } else {
            self.has_acked(feature::FLUSH)
        }
    }

    fn mode(&self) -> Mode {
        Mode {
            discards: self.has_acked(feature::DISCARD),
            zeroes: self.has_acked(feature::WRITE_ZEROES),
            write_through: !self.has_write_back() || self.is_mode_unknown.load(Ordering::SeqCst),
        }
    }
}

/// The name that a driver can read: zeros after it if it is shorter.
fn id(serial: &str, export: &Export) -> [u8; ID_LENGTH] {
    let disk = export.disk();
    let file = disk.name();
    let file = file.rsplit('/').next().unwrap_or(file);
    let name = [serial, export.name(), file].into_iter().find(|name| !name.is_empty()).unwrap_or_default();
    let mut id = [0; ID_LENGTH];
    id.iter_mut().zip(name.bytes()).for_each(|(place, byte)| *place = byte);
    id
}

impl Device for VhostUserBlk {
    fn features(&self) -> u64 {
        self.configuration().features(self.export.is_read_only())
    }

    fn num_queues(&self) -> usize {
        self.queues.len()
    }

    fn num_threads(&self) -> usize {
        self.threads
    }

    fn waits_for_memory(&self) -> bool {
        true
    }

    fn marks_written_memory(&self) -> bool {
        true
    }

    fn run_queues(&self, thread: &mut QueueThread<'_>) {
        // The kicks of the thread's queues and the completions of the disk are waited for in one place.
        let kicks = Pollable::from(thread.descriptor());
        let mut wait = kicks.readable();
        let mut polling = Polling::default();
        block_on(poll_fn(|context| poll_thread(thread, (&kicks, &mut wait), &mut polling, context)));
    }

    fn ack_features(&self, features: u64) {
        self.acked.store(features, Ordering::SeqCst);
        // Without `VIRTIO_BLK_F_FLUSH` there would be no way to make writes durable.
        self.write_back.store(features & feature::FLUSH != 0, Ordering::SeqCst);
    }

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        self.configuration().read(offset, into);
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) {
        let place = WRITE_BACK_OFFSET.checked_sub(offset).and_then(|place| usize::try_from(place).ok());
        if let Some(mode) = place.and_then(|place| bytes.get(place))
            && self.has_acked(feature::CONFIG_WCE)
        {
            self.write_back.store(*mode != 0, Ordering::SeqCst);
            self.is_mode_unknown.store(false, Ordering::SeqCst);
        }
    }

    fn set_memory(&self, _memory: Arc<Ram>) {}

    fn accepts(&self, front_end: BorrowedFd<'_>) -> bool {
        let peer = Arc::new(Peer::of(front_end));
        let is_refused = self.exports.as_ref().is_some_and(|exports| exports.refuses(self.export.name(), &peer));
        if !is_refused {
            self.export.clients().set_front_end(peer);
        }
        !is_refused
    }

    fn front_end_connected(&self, front_end: FrontEnd) {
        *self.front_end.lock() = Some(front_end);
    }

    fn process_queue(&self, queue: usize, vring: &Vring) -> Result<MoreWork, QueueError> {
        let Some(queue) = self.queues.get(queue) else { return Ok(MoreWork::No) };
        queue.take(vring, &self.mode())
    }

    fn poll_requests(&self, queue: usize, vring: &Vring, context: &mut Context<'_>) -> Requests {
        let Some(queue) = self.queues.get(queue) else { return Requests::NONE };
        let requests = queue.poll(vring, context);
        if self.is_mode_unknown.load(Ordering::Relaxed) && queue.take_has_flushed() {
            self.is_mode_unknown.store(false, Ordering::SeqCst);
        }
        requests
    }

    fn driver_resumed(&self) {
        self.is_mode_unknown.store(self.has_acked(feature::CONFIG_WCE), Ordering::SeqCst);
    }

    fn queue_stopped(&self, queue: usize) {
        if let Some(queue) = self.queues.get(queue) {
            queue.clear();
        }
    }

    fn reset(&self) {
        self.queues.iter().for_each(Queue::clear);
        self.acked.store(0, Ordering::SeqCst);
        self.write_back.store(true, Ordering::SeqCst);
        self.is_mode_unknown.store(false, Ordering::SeqCst);
    }
}

/// Processes what can be processed now, and waits for kicks and requests.
fn poll_thread(
    thread: &mut QueueThread<'_>,
    (kicks, wait): (&Pollable, &mut Ready),
    polling: &mut Polling,
    context: &mut Context<'_>,
) -> Poll<()> {
    polling.wake();
    for _ in 0..TURNS_MAX {
        while let Poll::Ready(Ok(())) = Pin::new(&mut *wait).poll(context) {
            thread.take_kicks();
            *wait = kicks.readable();
        }
        match thread.turn(context) {
            Turn::Again => {}
            // What is in flight completes where this thread sleeps.
            Turn::Wait if !thread.has_requests() && polling.find(|| thread.find_work()) => {}
            Turn::Wait => return Poll::Pending,
            Turn::Ended => return Poll::Ready(()),
        }
    }
    // A driver that keeps a queue full does not keep the others of its thread from being kicked.
    thread.take_kicks();
    context.waker().wake_by_ref();
    Poll::Pending
}
