//! A real driver at the other end: Linux's balloon, in user-mode Linux.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::peer::until;
use limosa_testkit::{Uml, UmlGuest, on_uml};
use limosa_vhost::{Device, FrontEnd, MoreWork, QueueError, Ram, Server, ServerError, Stopper, Vring};
use vm_memory::Bytes as _;

/// A minimal balloon: it counts the pages that it gets, and does not give them back to the host.
#[derive(Default)]
struct Balloon {
    target: AtomicU32,
    /// The size that the driver reports.
    actual: AtomicU32,
    inflated: AtomicU64,
    deflated: AtomicU64,
    outside: AtomicU64,
    resets: AtomicU64,
    ram: Mutex<Option<Arc<Ram>>>,
    front_end: Mutex<Option<FrontEnd>>,
}

impl Balloon {
    fn set_target(&self, pages: u32) {
        self.target.store(pages, Ordering::SeqCst);
        assert!(self.front_end.lock().as_ref().unwrap().config_changed());
    }
}

impl Device for Balloon {
    fn features(&self) -> u64 {
        0
    }

    fn num_queues(&self) -> usize {
        2
    }

    fn ack_features(&self, _features: u64) {}

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        let config = [&self.target, &self.actual].map(|field| field.load(Ordering::SeqCst).to_le_bytes()).concat();
        for (byte, at) in into.iter_mut().zip(offset as usize..) {
            *byte = config.get(at).copied().unwrap_or(0);
        }
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) {
        if let (4, Ok(bytes)) = (offset, bytes.try_into()) {
            self.actual.store(u32::from_le_bytes(bytes), Ordering::SeqCst);
        }
    }

    fn set_memory(&self, memory: Arc<Ram>) {
        *self.ram.lock() = Some(memory);
    }

    fn front_end_connected(&self, front_end: FrontEnd) {
        *self.front_end.lock() = Some(front_end);
    }

    fn process_queue(&self, queue: usize, vring: &Vring) -> Result<MoreWork, QueueError> {
        let Some(chain) = vring.pop()? else { return Ok(MoreWork::No) };
        let head = chain.head_index();
        let memory = chain.memory().clone();
        for descriptor in chain.readable() {
            let mut bytes = vec![0; descriptor.len() as usize];
            memory.read_slice(&mut bytes, descriptor.addr()).unwrap();
            for number in bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())) {
                let count = if queue == 0 { &self.inflated } else { &self.deflated };
                count.fetch_add(1, Ordering::SeqCst);
                let page = vm_memory::GuestAddress(u64::from(number) << 12);
                if !vm_memory::GuestMemory::check_range(&memory, page, 4096, vm_memory::Permissions::Write) {
                    self.outside.fetch_add(1, Ordering::SeqCst);
                }
            }
        }
        vring.add_used(head, 0)?;
        vring.notify()?;
        Ok(MoreWork::Yes)
    }

    fn queue_stopped(&self, _queue: usize) {}

    fn reset(&self) {
        self.resets.fetch_add(1, Ordering::SeqCst);
    }
}

struct Guest {
    balloon: Arc<Balloon>,
    uml: Uml,
    stopper: Stopper,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
    _folder: tempfile::TempDir,
}

impl Guest {
    fn start() -> Self {
        let folder = limosa_testkit::scratch().unwrap();
        let path = folder.path().join("balloon.sock");
        let balloon = Arc::new(Balloon::default());
        let server = Server::bind(&path, balloon.clone()).unwrap();
        let stopper = server.stopper();
        let thread = Some(std::thread::spawn(move || server.serve()));
        let guest =
            UmlGuest { devices: vec![(path, 5)], modules: vec!["virtio_balloon".into()], ..UmlGuest::default() };
        Self { balloon, uml: guest.start().unwrap(), stopper, thread, _folder: folder }
    }

    fn inflate_to(&self, pages: u32) {
        self.balloon.set_target(pages);
        until("the driver has followed", || self.balloon.actual.load(Ordering::SeqCst) == pages);
    }

    fn stop(&mut self) {
        self.stopper.stop();
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap()).unwrap();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stopper.stop();
    }
}

#[test]
fn the_driver_follows_changes_and_comes_back_after_it_was_unloaded() {
    on_uml(|| {
        let mut guest = Guest::start();
        let balloon = guest.balloon.clone();
        let ram = balloon.ram.lock().clone().expect("the guest has shared its memory");
        assert!(ram.regions().iter().all(|region| region.guest_address == region.file_offset));
        let free = guest.uml.meminfo("MemFree").unwrap();
        guest.inflate_to(8192);
        assert!(guest.uml.meminfo("MemFree").unwrap() < free - 30_000, "32 MiB are gone");
        guest.inflate_to(1000);
        assert_eq!(balloon.inflated.load(Ordering::SeqCst) - balloon.deflated.load(Ordering::SeqCst), 1000);

        for round in 1..4 {
            guest.uml.shell("rmmod virtio_balloon").unwrap();
            balloon.actual.store(0, Ordering::SeqCst);
            // There is no driver to notify, and the rings' memory is the guest's again.
            balloon.front_end.lock().as_ref().unwrap().kick(0);
            guest.uml.shell("insmod /modules/virtio_balloon.ko").unwrap();
            until("the driver has started again", || balloon.actual.load(Ordering::SeqCst) == 999 + round);
            guest.inflate_to(1000 + round);
            assert!(balloon.resets.load(Ordering::SeqCst) >= u64::from(round));
        }
        assert_eq!(balloon.outside.load(Ordering::SeqCst), 0);

        guest.stop();
        assert!(!balloon.front_end.lock().as_ref().unwrap().is_connected());
        guest.uml.shell("echo alive").unwrap();
        guest.uml.check_alive().unwrap();
    });
}
