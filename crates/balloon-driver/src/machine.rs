//! The connection of driver and device: kicks, interrupts, and a thread that processes the queues.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use limosa_balloon::{Balloon, Features, MoreWork, Transport, VirtioQueueRing};
use parking_lot::{Condvar, Mutex, MutexGuard};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::GuestMemory;

use crate::queue::STRIDE;

type DeviceRing<M> = VirtioQueueRing<Arc<M>, Box<dyn Fn() + Send + Sync>>;

/// A device outside of the machine, as the driver uses it.
pub trait RemoteDevice: Send + Sync + std::fmt::Debug {
    /// The features that it offers.
    fn features(&self) -> Features;

    /// Resets the device and accepts these features. From now on `notifier` is notified of interrupts and changes of
    /// the configuration.
    fn begin(&self, features: Features, notifier: DriverNotifier);

    /// Reads a field of its configuration.
    fn read_config(&self, offset: u32) -> u32;

    /// Writes a field of its configuration.
    fn write_config(&self, offset: u32, value: u32);

    /// Starts a queue.
    fn start(&self, number: usize, queue: &Queue);

    /// Notifies it of buffers in a queue.
    fn kick(&self, number: usize);

    /// Stops all queues.
    fn stop(&self);

    /// Whether it is still connected. Buffers of a device that is gone are never given back.
    fn is_connected(&self) -> bool {
        true
    }
}

/// Notifies the driver of a [`RemoteDevice`] of interrupts and changes of the configuration.
#[derive(Clone)]
pub struct DriverNotifier(Arc<Bus>);

impl DriverNotifier {
    /// There is an interrupt or a change.
    pub fn notify(&self) {
        self.0.interrupt();
    }
}

impl std::fmt::Debug for DriverNotifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DriverNotifier")
    }
}

#[derive(Debug)]
enum Device {
    Local(Arc<Balloon>),
    Remote(Arc<dyn RemoteDevice>),
}

/// A device, and the rings over which its driver reaches it.
pub struct Machine<M> {
    device: Device,
    memory: Arc<M>,
    rings_at: u64,
    rings: Mutex<BTreeMap<usize, Arc<DeviceRing<M>>>>,
    bus: Arc<Bus>,
}

impl<M> std::fmt::Debug for Machine<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machine").field("device", &self.device).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Bus {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Bits of queues that wait to be processed.
    kicked: u64,
    /// Bits of queues that are held: not processed.
    held: u64,
    /// Counts interrupts and changes of the configuration.
    events: u64,
    /// Number of threads that process the queues.
    workers: usize,
    over: bool,
}

fn bit(queue: usize) -> u64 {
    1u64.checked_shl(u32::try_from(queue).unwrap_or(u32::MAX)).unwrap_or(0)
}

impl State {
    fn take_kicked(&mut self) -> u64 {
        let kicked = self.kicked & !self.held;
        self.kicked &= self.held;
        kicked
    }
}

impl Bus {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn interrupt(&self) {
        self.lock().events += 1;
        self.changed.notify_all();
    }
}

impl Transport for Bus {
    fn config_changed(&self) {
        self.interrupt();
    }

    fn kick(&self, queue: usize) {
        self.lock().kicked |= bit(queue);
        self.changed.notify_all();
    }
}

impl<M: GuestMemory + Send + Sync + 'static> Machine<M> {
    /// A machine with this device, whose rings are in `memory` from guest-physical `rings_at` on
    /// ([`RINGS`](crate::RINGS) bytes).
    pub fn new(balloon: Arc<Balloon>, memory: Arc<M>, rings_at: u64) -> Arc<Self> {
        Arc::new(Self {
            device: Device::Local(balloon),
            memory,
            rings_at,
            rings: Mutex::default(),
            bus: Arc::default(),
        })
    }

    /// A machine with a remote device, which processes its queues itself.
    pub fn over(remote: Arc<dyn RemoteDevice>, memory: Arc<M>, rings_at: u64) -> Arc<Self> {
        let bus = Arc::<Bus>::default();
        bus.lock().workers = 1;
        Arc::new(Self { device: Device::Remote(remote), memory, rings_at, rings: Mutex::default(), bus })
    }

    /// Starts a thread that processes the queues until the returned handle is dropped.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn worker(self: &Arc<Self>) -> std::io::Result<Worker<M>> {
        let machine = Arc::clone(self);
        self.bus.lock().workers += 1;
        let thread = thread::Builder::new().name("balloon".into()).spawn(move || {
            let mut state = machine.bus.lock();
            while !state.over {
                if state.kicked & !state.held == 0 {
                    machine.bus.changed.wait(&mut state);
                    continue;
                }
                drop(state);
                machine.process_queue();
                state = machine.bus.lock();
            }
        });
        if thread.is_err() {
            self.bus.lock().workers -= 1;
        }
        Ok(Worker { machine: Arc::clone(self), thread: Some(thread?) })
    }

    /// Processes the queues that were kicked, unless a [worker](Self::worker) does.
    pub fn work_if_no_worker(&self) {
        if self.bus.lock().workers == 0 {
            self.process_queue();
        }
    }

    /// Holds a queue of a local device, or stops holding it: a held queue is not processed, as if the device were
    /// behind, and threads that wait for it continue to wait.
    pub fn hold(&self, queue: usize, held: bool) {
        let mut state = self.bus.lock();
        if held {
            state.held |= bit(queue);
        } else {
            state.held &= !bit(queue);
        }
        drop(state);
        self.bus.changed.notify_all();
    }

    pub(crate) fn memory(&self) -> &Arc<M> {
        &self.memory
    }

    pub(crate) fn ring_address(&self, number: usize) -> u64 {
        self.rings_at + STRIDE * number as u64
    }

    pub(crate) fn features(&self) -> Features {
        match &self.device {
            Device::Local(balloon) => balloon.features(),
            Device::Remote(remote) => remote.features(),
        }
    }

    /// A driver attaches to the device; then it starts the queues.
    pub(crate) fn begin(&self, features: Features) {
        match &self.device {
            Device::Local(balloon) => {
                self.stop();
                balloon.reset();
                balloon.attach(Arc::clone(&self.bus) as _);
                balloon.ack_features(features);
            }
            Device::Remote(remote) => remote.begin(features, DriverNotifier(Arc::clone(&self.bus))),
        }
    }

    pub(crate) fn read_config(&self, offset: u32) -> u32 {
        match &self.device {
            Device::Local(balloon) => {
                let mut bytes = [0; 4];
                balloon.read_config(offset, &mut bytes);
                u32::from_le_bytes(bytes)
            }
            Device::Remote(remote) => remote.read_config(offset),
        }
    }

    pub(crate) fn write_config(&self, offset: u32, value: u32) {
        match &self.device {
            Device::Local(balloon) => balloon.write_config(offset, &value.to_le_bytes()),
            Device::Remote(remote) => remote.write_config(offset, value),
        }
    }

    pub(crate) fn start(&self, number: usize, queue: Queue) {
        if let Device::Remote(remote) = &self.device {
            return remote.start(number, &queue);
        }
        let bus = Arc::clone(&self.bus);
        let interrupt: Box<dyn Fn() + Send + Sync> = Box::new(move || bus.interrupt());
        let ring = VirtioQueueRing::new(queue, Arc::clone(&self.memory), interrupt);
        self.rings().insert(number, Arc::new(ring));
    }

    /// The driver is gone; its rings are not used any more.
    pub(crate) fn end(&self) {
        self.stop();
        match &self.device {
            Device::Local(balloon) => balloon.reset(),
            Device::Remote(remote) => remote.stop(),
        }
    }

    pub(crate) fn kick(&self, number: usize) {
        match &self.device {
            Device::Local(_) => self.bus.kick(number),
            Device::Remote(remote) => remote.kick(number),
        }
    }

    pub(crate) fn has_device(&self) -> bool {
        match &self.device {
            Device::Local(_) => true,
            Device::Remote(remote) => remote.is_connected(),
        }
    }

    /// Counts interrupts and changes of the configuration.
    pub(crate) fn events(&self) -> u64 {
        self.bus.lock().events
    }

    /// Waits for more events than `seen`, for at most `time`. Without a worker, processes the queues instead.
    pub(crate) fn wait(&self, seen: u64, time: Duration) {
        let mut state = self.bus.lock();
        if state.workers == 0 {
            drop(state);
            return self.process_queue();
        }
        let waits = |state: &mut State| state.events == seen && !state.over;
        self.bus.changed.wait_while_for(&mut state, waits, time);
    }

    /// No more buffers are taken out of the rings, by any thread.
    fn stop(&self) {
        let rings = std::mem::take(&mut *self.rings());
        rings.into_values().for_each(|ring| ring.queue().set_ready(false));
    }

    fn rings(&self) -> MutexGuard<'_, BTreeMap<usize, Arc<DeviceRing<M>>>> {
        self.rings.lock()
    }

    /// Processes every queue that was kicked until it has no more work.
    fn process_queue(&self) {
        let Device::Local(balloon) = &self.device else { return };
        loop {
            let kicked = self.bus.lock().take_kicked();
            if kicked == 0 {
                return;
            }
            for number in (0..u64::BITS).filter(|bit| kicked & (1 << bit) != 0) {
                let ring = self.rings().get(&(number as usize)).cloned();
                // An invalid ring is not processed until the driver sets it up again.
                if ring.is_some_and(|ring| matches!(balloon.process_queue(number as usize, &*ring), Ok(MoreWork::Yes)))
                {
                    self.kick(number as usize);
                }
            }
        }
    }
}

/// A thread that processes a machine's queues. Dropping it ends the thread.
pub struct Worker<M> {
    machine: Arc<Machine<M>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl<M> std::fmt::Debug for Worker<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

impl<M> Drop for Worker<M> {
    fn drop(&mut self) {
        self.machine.bus.lock().over = true;
        self.machine.bus.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let mut state = self.machine.bus.lock();
        state.workers -= 1;
        state.over = false;
    }
}
