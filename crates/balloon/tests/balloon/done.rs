//! After every kind of end of a list, the guest is notified that it may use its pages again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use limosa_balloon::{Balloon, Features, HintState, Options, Ring, Strategy, Transport, VhostUserBalloon};
use limosa_balloon_driver::{Blocks, Driver, FrontEnd, Machine};
use limosa_memory::rust_vmm::{DirtyMarks, export};
use limosa_memory::{BlockOptions, FreePageHinting as _, GuestMemory};
use limosa_vhost::Server;
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use crate::bare::{Bare, BareRing, Memory, POISON, WRITABLE};
use crate::machine::{MIB, ReceivedList};

const HINT: usize = 3;
const DONE: u32 = 1;

/// Counts notifications of the driver.
#[derive(Default)]
struct NotificationCount(AtomicU64);

impl Transport for NotificationCount {
    fn config_changed(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn kick(&self, _queue: usize) {}
}

/// A ring whose memory was removed.
struct Broken<'m>(BareRing<'m>);

impl<'m> Ring for Broken<'m> {
    type Memory = Memory;
    type Handle = &'m Memory;
    type Error = virtio_queue::Error;

    fn pop(&self) -> Result<Option<DescriptorChain<&'m Memory>>, Self::Error> {
        Err(virtio_queue::Error::QueueNotReady)
    }

    fn add_used(&self, head: u16, length: u32) -> Result<(), Self::Error> {
        self.0.add_used(head, length)
    }

    fn notify(&self) -> Result<(), Self::Error> {
        self.0.notify()
    }
}

#[test]
fn a_ring_that_becomes_invalid_during_a_list_ends_it() {
    let (bare, report, received) =
        (Bare::new(), Arc::new(NotificationCount::default()), Arc::new(ReceivedList::default()));
    bare.balloon.attach(report.clone());
    bare.balloon.ack_features(Features::ALL);
    bare.balloon.write_config(POISON, &[0; 4]);
    bare.balloon.request_list(received.clone()).unwrap();
    let ring = bare.ring();
    bare.balloon.process_queue(HINT, &ring).unwrap();
    bare.guest.write_obj(bare.command().to_le(), GuestAddress(0x4000)).unwrap();
    bare.offer(0, 0x4000, 4, 0);
    bare.offer(1, 8 * MIB, 4 << 20, WRITABLE);
    bare.balloon.process_queue(HINT, &ring).unwrap();
    assert_eq!((received.joined(), bare.balloon.hint_list().state), (vec![8 * MIB..12 * MIB], HintState::Started));
    let before = report.0.load(Ordering::Relaxed);
    assert!(bare.balloon.process_queue(HINT, &Broken(ring)).is_err());
    assert_eq!((bare.command(), report.0.load(Ordering::Relaxed)), (DONE, before + 1));
    assert_eq!((bare.balloon.hint_list().state, Arc::strong_count(&received)), (HintState::Done, 1));
    assert!(!received.is_complete());
}

#[test]
fn a_front_end_that_disconnects_during_a_list_ends_it() {
    const RAM: u64 = 512 * MIB;
    let folder = limosa_testkit::scratch().unwrap();
    let path = folder.path().join("balloon.sock");
    let balloon = Arc::new(Balloon::new(Options::default()));
    let device = VhostUserBalloon::new(Arc::clone(&balloon), Strategy::Auto);
    let server = Arc::new(Server::bind(&path, Arc::new(device)).unwrap());
    let (stopper, serving) = (server.stopper(), Arc::clone(&server));
    let thread = std::thread::spawn(move || serving.serve());

    let memory = Arc::new(GuestMemory::new(vec![BlockOptions::memfd("pc.ram", RAM).map().unwrap()]).unwrap());
    let guest: GuestMemoryMmap<DirtyMarks> = export(&memory).unwrap();
    let front_end = Arc::new(FrontEnd::connect(&path, memory).unwrap());
    let machine = Machine::over(front_end, Arc::new(guest), MIB);
    let free = Arc::new(parking_lot::Mutex::new(Blocks::new(16 * MIB..RAM)));
    let mut driver = Driver::probe(machine, free, Features::ALL).unwrap();
    let received = Arc::new(ReceivedList::default());
    balloon.request_list(received.clone()).unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    // A part of it: there is no driver to send the rest.
    while balloon.hint_list().blocks == 0 {
        assert!(Instant::now() < end, "no list begins");
        if driver.shrinker().held() == 0 {
            driver.poll().unwrap();
        }
    }
    assert_eq!(balloon.hint_list().state, HintState::Started);
    drop(driver);
    while Arc::strong_count(&received) > 1 || balloon.hint_list().state != HintState::Done {
        assert!(Instant::now() < end, "timeout; the list: {:?}", balloon.hint_list());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!received.is_complete() && !balloon.has_driver());
    stopper.stop();
    thread.join().unwrap().unwrap();
}
