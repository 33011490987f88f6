//! The device behind a vhost-user server (feature `vhost-user`).
//!
//! The front end's memory is what limosa-memory [imports](limosa_memory::rust_vmm::import), so it is given back by the
//! same code as a VMM's own, which punches holes into the files that the front end has passed: for every process that
//! maps them.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use limosa_memory::{MemoryError, rust_vmm};
use limosa_page::{PAGE_SIZE, error_with_causes};
use limosa_vhost::{Chain, Device, FrontEnd, QueueError, Ram, Vring};
use parking_lot::Mutex;
use vm_memory::GuestMemoryMmap;

use crate::device::{Balloon, MoreWork, Transport};
use crate::layout::Features;
use crate::reclaim::{GuestRam, Reclaim, Strategy};
use crate::ring::Ring;

/// Creates the [`Reclaim`] for the memory that a front end shares.
type Reclaiming = dyn Fn(&Ram) -> Result<Arc<dyn Reclaim>, MemoryError> + Send + Sync;

/// A balloon for a vhost-user server.
pub struct VhostUserBalloon {
    balloon: Arc<Balloon>,
    reclaiming: Box<Reclaiming>,
    ram: Mutex<Option<Arc<Ram>>>,
    /// That no memory is given back was logged.
    was_logged: AtomicBool,
}

impl fmt::Debug for VhostUserBalloon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostUserBalloon").field("balloon", &self.balloon).finish_non_exhaustive()
    }
}

impl VhostUserBalloon {
    /// The device `balloon`; the front end's memory is given back by `strategy`.
    pub fn new(balloon: Arc<Balloon>, strategy: Strategy) -> Self {
        Self::with_reclaim(balloon, move |ram| Ok(Arc::new(GuestRam::from_front_end(ram, strategy)?)))
    }

    /// The device `balloon`; the front end's memory is given back by the [`Reclaim`] that `reclaiming` creates for it,
    /// each time the front end shares other memory. If it fails, no memory is given back, and that is logged the first
    /// time.
    pub fn with_reclaim(
        balloon: Arc<Balloon>,
        reclaiming: impl Fn(&Ram) -> Result<Arc<dyn Reclaim>, MemoryError> + Send + Sync + 'static,
    ) -> Self {
        Self { balloon, reclaiming: Box::new(reclaiming), ram: Mutex::new(None), was_logged: AtomicBool::new(false) }
    }

    /// The device.
    pub fn balloon(&self) -> &Arc<Balloon> {
        &self.balloon
    }

    /// The memory that the front end shares at present; `None` if there is no front end, or it shares none.
    pub fn ram(&self) -> Option<Arc<Ram>> {
        self.ram.lock().clone()
    }
}

impl GuestRam {
    /// All that a front end shares.
    ///
    /// # Errors
    /// It shares none, or memory in pages that are larger than its regions allow.
    pub fn from_front_end(ram: &Ram, strategy: Strategy) -> Result<Self, MemoryError> {
        let memory = rust_vmm::import(ram.memory(), |address| format!("ram@{:#x}", address.0))?;
        Ok(Self::new(Arc::new(memory), strategy))
    }
}

impl Device for VhostUserBalloon {
    fn features(&self) -> u64 {
        self.balloon.features().bits()
    }

    fn num_queues(&self) -> usize {
        self.balloon.num_queues()
    }

    fn ack_features(&self, features: u64) {
        self.balloon.ack_features(Features::from_bits(features));
    }

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        self.balloon.read_config(offset, into);
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) {
        self.balloon.write_config(offset, bytes);
    }

    fn set_memory(&self, memory: Arc<Ram>) {
        // A front end may announce that it has none at present.
        let shared = (!memory.regions().is_empty()).then(|| memory.clone());
        let reclaim = shared.as_ref().and_then(|shared| match (self.reclaiming)(shared) {
            Ok(reclaim) => Some(reclaim),
            Err(error) => {
                // A front end may send another table at any time.
                if !self.was_logged.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "no memory of the guest will be given back: {} (logged once)",
                        error_with_causes(&error)
                    );
                }
                None
            }
        });
        let before = {
            let mut ram = self.ram.lock();
            std::mem::replace(&mut *ram, shared)
        };
        self.balloon.set_memory(reclaim.unwrap_or_else(|| Arc::new(NoReclaim::of(&memory))));
        drop(before);
    }

    fn front_end_connected(&self, front_end: FrontEnd) {
        self.balloon.attach(Arc::new(front_end));
    }

    fn process_queue(&self, queue: usize, vring: &Vring) -> Result<limosa_vhost::MoreWork, QueueError> {
        Ok(match self.balloon.process_queue(queue, vring)? {
            MoreWork::Yes => limosa_vhost::MoreWork::Yes,
            MoreWork::No => limosa_vhost::MoreWork::No,
        })
    }

    fn driver_resumed(&self) {
        self.balloon.driver_resumed();
    }

    fn queue_stopped(&self, queue: usize) {
        self.balloon.queue_stopped(queue);
    }

    fn reset(&self) {
        self.balloon.reset();
    }
}

impl Ring for Vring {
    type Memory = GuestMemoryMmap;
    type Handle = Arc<GuestMemoryMmap>;
    type Error = QueueError;

    fn pop(&self) -> Result<Option<Chain>, QueueError> {
        Self::pop(self)
    }

    fn add_used(&self, head: u16, length: u32) -> Result<(), QueueError> {
        match Self::add_used(self, head, length) {
            // The ring was stopped and set up again meanwhile: the buffer is the driver's.
            Err(QueueError::NotTaken { .. }) => Ok(()),
            used => used,
        }
    }

    fn notify(&self) -> Result<(), QueueError> {
        Self::notify(self).map(|_called| ())
    }

    fn is_stopped_error(error: &QueueError) -> bool {
        matches!(error, QueueError::Stopped)
    }
}

impl Transport for FrontEnd {
    fn config_changed(&self) {
        Self::config_changed(self);
    }

    fn kick(&self, queue: usize) {
        Self::kick(self, queue);
    }

    fn is_connected(&self) -> bool {
        Self::is_connected(self)
    }

    fn is_queue_stopped(&self, queue: usize) -> bool {
        Self::is_queue_stopped(self, queue)
    }
}

/// Memory that cannot be given back.
#[derive(Debug)]
struct NoReclaim(Vec<Range<u64>>);

impl NoReclaim {
    fn of(memory: &Ram) -> Self {
        let range = |region: &limosa_vhost::RamRegion| region.guest_address..region.guest_address + region.length;
        Self(memory.regions().iter().map(range).collect())
    }
}

impl Reclaim for NoReclaim {
    fn ram(&self) -> &[Range<u64>] {
        &self.0
    }

    fn host_page_size(&self, _index: usize) -> u64 {
        PAGE_SIZE
    }

    fn discard(&self, _run: &Range<u64>) -> Result<u64, MemoryError> {
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use limosa_memory::{BlockOptions, FreePageHinting as _, FreePageSink};
    use limosa_vhost::RamRegion;
    use tracing::{Event, Metadata, Subscriber, span};
    use virtio_queue::{Queue, QueueT as _};
    use vm_memory::{Bytes as _, GuestAddress};

    use super::*;
    use crate::device::Options;

    #[test]
    fn a_front_ends_memory_is_given_back_in_its_file() {
        let ram = BlockOptions::memfd("ram", 4 << 20).map().unwrap();
        ram.write(0, &vec![7; 4 << 20]).unwrap();
        let file = ram.file().unwrap().0.try_clone_to_owned().unwrap();
        // The guest sees the file's second half at 1 GiB.
        let region = RamRegion::map(1 << 30, 2 << 20, 1 << 40, file, 2 << 20).unwrap();
        let memory = Arc::new(Ram::new(vec![region]).unwrap());
        let device = VhostUserBalloon::new(Arc::new(Balloon::new(Options::default())), Strategy::Auto);
        device.ack_features(device.features());
        assert!(device.ram().is_none());
        device.set_memory(memory.clone());
        assert_eq!(device.balloon().size().ram, 2 << 20);
        assert!(device.ram().is_some_and(|ram| Arc::ptr_eq(&ram, &memory)));

        let guest = memory.memory();
        let at = |offset: u64| GuestAddress((1 << 30) + offset);
        // One descriptor at the beginning of the region: two page numbers, the second of no memory.
        guest.write_obj(at(0x4000).0, at(0)).unwrap();
        guest.write_obj([8u32, 0], at(8)).unwrap();
        guest.write_obj([(1u32 << 18) + 16, 0], at(0x4000)).unwrap();
        guest.write_obj([0u16, 1, 0], at(0x1000)).unwrap();
        let mut queue = Queue::new(256).unwrap();
        queue.try_set_desc_table_address(at(0)).unwrap();
        queue.try_set_avail_ring_address(at(0x1000)).unwrap();
        queue.try_set_used_ring_address(at(0x2000)).unwrap();
        queue.set_next_avail(0);
        queue.set_ready(true);
        let vring = Vring::new_running(queue, memory.clone(), None);
        assert_eq!(device.process_queue(0, &vring).unwrap(), limosa_vhost::MoreWork::No);
        let counters = device.balloon().counters();
        assert_eq!((counters.inflated_pages, counters.pages_outside, counters.discarded_bytes), (1, 1, 4096));
        let mut bytes = vec![1; 4 << 20];
        ram.read(0, &mut bytes).unwrap();
        let hole = (2 << 20) + (16 << 12);
        assert!(bytes[hole..hole + 4096].iter().all(|byte| *byte == 0));
        assert!(bytes[hole - 1] == 7 && bytes[hole + 4096] == 7 && bytes[16 << 12] == 7);
    }

    #[test]
    fn a_ring_that_is_broken_is_not_one_that_has_stopped() {
        assert!(<Vring as Ring>::is_stopped_error(&QueueError::Stopped));
        let broken = QueueError::from(virtio_queue::Error::InvalidDescriptorIndex);
        assert!(!<Vring as Ring>::is_stopped_error(&broken));
    }

    fn ram() -> Arc<Ram> {
        let block = BlockOptions::memfd("ram", 2 << 20).map().unwrap();
        let file = block.file().unwrap().0.try_clone_to_owned().unwrap();
        Arc::new(Ram::new(vec![RamRegion::map(0, 2 << 20, 1 << 40, file, 0).unwrap()]).unwrap())
    }

    #[test]
    fn memory_is_given_back_by_the_callers_reclaim() {
        let device = VhostUserBalloon::with_reclaim(Arc::new(Balloon::new(Options::default())), |ram| {
            assert_eq!(ram.regions().len(), 1, "it is not called for no memory");
            Ok(Arc::new(NoReclaim(vec![0..4096])))
        });
        device.set_memory(ram());
        assert_eq!(device.balloon().size().ram, 4096);
        device.set_memory(Arc::new(Ram::new(Vec::new()).unwrap()));
        assert!(device.ram().is_none(), "no memory of a front end that has disconnected is kept");
    }

    /// Counts messages of the log.
    struct Listener(Arc<AtomicU64>);

    impl Subscriber for Listener {
        fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }

        fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

        fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

        fn event(&self, _event: &Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn enter(&self, _span: &span::Id) {}

        fn exit(&self, _span: &span::Id) {}
    }

    #[test]
    fn that_no_memory_is_given_back_is_logged_once() {
        let device = VhostUserBalloon::with_reclaim(Arc::new(Balloon::new(Options::default())), |_| {
            Err(MemoryError::Layout { block: "ram".into(), why: "of no use".into() })
        });
        let said = Arc::new(AtomicU64::new(0));
        tracing::subscriber::with_default(Listener(said.clone()), || {
            for _ in 0..5 {
                device.set_memory(ram());
            }
        });
        assert_eq!((said.load(Ordering::Relaxed), device.balloon().size().ram), (1, 2 << 20));
    }

    #[test]
    fn a_driver_that_another_server_had_gets_no_request_for_pages_that_must_keep_their_contents() {
        let device = VhostUserBalloon::new(Arc::new(Balloon::new(Options::default())), Strategy::Auto);
        device.front_end_connected(FrontEnd::new().unwrap());
        device.ack_features(device.features());
        device.driver_resumed();
        struct IgnoringSink;
        impl FreePageSink for IgnoringSink {
            fn add_range(&self, _range: Range<u64>) {}
            fn complete(&self) {}
        }
        assert!(device.balloon().request_list(Arc::new(IgnoringSink)).is_err());
    }

    #[test]
    fn a_front_end_without_memory_is_a_guest_without_memory() {
        let device = VhostUserBalloon::new(Arc::new(Balloon::new(Options::default())), Strategy::Auto);
        device.set_memory(Arc::new(Ram::new(Vec::new()).unwrap()));
        assert_eq!(device.balloon().size().ram, 0);
        assert_eq!(device.num_queues(), 5);
    }
}
