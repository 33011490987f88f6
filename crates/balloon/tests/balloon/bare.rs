//! A device whose driver is the test itself: it writes every descriptor.

use std::sync::Arc;

use limosa_balloon::{Balloon, Features, GuestRam, Options, Reclaim, Strategy, Transport, VirtioQueueRing};
use limosa_memory::rust_vmm::DirtyMarks;
use limosa_memory::{BlockOptions, GuestMemory, rust_vmm};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use crate::machine::MIB;

pub(crate) type Memory = GuestMemoryMmap<DirtyMarks>;
pub(crate) type BareRing<'m> = VirtioQueueRing<&'m Memory, fn()>;

pub(crate) struct Bus;

impl Transport for Bus {
    fn config_changed(&self) {}
    fn kick(&self, _queue: usize) {}
}

/// A device whose driver is this test: one queue at the beginning of memory, buffers from 0x4000 on.
pub(crate) struct Bare {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) guest: Memory,
    pub(crate) balloon: Arc<Balloon>,
}

const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
pub(crate) const WRITABLE: u16 = 2;
/// The field in which the driver writes the poison value, once, before it gives any pages.
pub(crate) const POISON: u32 = 12;

impl Bare {
    pub(crate) fn new() -> Self {
        Self::with(|memory| Arc::new(GuestRam::new(memory, Strategy::Auto)))
    }

    pub(crate) fn with(reclaim: impl FnOnce(Arc<GuestMemory>) -> Arc<dyn Reclaim>) -> Self {
        let memory = Arc::new(GuestMemory::new(vec![BlockOptions::memfd("pc.ram", 16 * MIB).map().unwrap()]).unwrap());
        let guest = rust_vmm::export(&memory).unwrap();
        let balloon = Arc::new(Balloon::new(Options::default()));
        balloon.set_memory(reclaim(Arc::clone(&memory)));
        balloon.attach(Arc::new(Bus));
        balloon.ack_features(Features::ALL);
        balloon.write_config(POISON, &[0; 4]);
        Self { memory, guest, balloon }
    }

    pub(crate) fn ring(&self) -> BareRing<'_> {
        let mut queue = Queue::new(16).unwrap();
        queue.set_desc_table_address(Some(u32::try_from(DESCRIPTORS).unwrap()), None);
        queue.set_avail_ring_address(Some(u32::try_from(AVAILABLE).unwrap()), None);
        queue.set_used_ring_address(Some(u32::try_from(USED).unwrap()), None);
        queue.set_ready(true);
        VirtioQueueRing::new(queue, &self.guest, || {})
    }

    /// Makes a buffer available, the `number`th.
    pub(crate) fn offer(&self, number: u16, address: u64, length: u32, flags: u16) {
        let place = number % 16;
        let at = GuestAddress(DESCRIPTORS + 16 * u64::from(place));
        self.guest.write_obj(address.to_le(), at).unwrap();
        self.guest.write_obj(length.to_le(), GuestAddress(at.0 + 8)).unwrap();
        self.guest.write_obj([flags.to_le(), 0], GuestAddress(at.0 + 12)).unwrap();
        self.guest.write_obj(place.to_le(), GuestAddress(AVAILABLE + 4 + 2 * u64::from(place))).unwrap();
        self.guest.write_obj((number + 1).to_le(), GuestAddress(AVAILABLE + 2)).unwrap();
    }

    pub(crate) fn used(&self) -> u16 {
        u16::from_le(self.guest.read_obj(GuestAddress(USED + 2)).unwrap())
    }

    pub(crate) fn command(&self) -> u32 {
        let mut bytes = [0; 4];
        self.balloon.read_config(8, &mut bytes);
        u32::from_le_bytes(bytes)
    }
}
