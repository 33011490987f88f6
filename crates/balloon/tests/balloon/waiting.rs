//! Waiting threads: an access to the configuration never waits, a reset waits for the threads that process a queue.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use limosa_balloon::{Balloon, GuestRam, MoreWork, Options, Reclaim, Strategy};
use limosa_memory::{BlockOptions, FreePageHinting as _, GuestMemory, MemoryError};
use parking_lot::Mutex;
use vm_memory::{Bytes as _, GuestAddress};

use crate::bare::{Bare, WRITABLE};
use crate::machine::{Guest, MIB, RAM, ReceivedList};

/// A strategy whose first discard waits until the test lets it continue.
#[derive(Debug)]
struct Gate {
    inner: GuestRam,
    entered: mpsc::SyncSender<()>,
    open: Mutex<mpsc::Receiver<()>>,
    passed: AtomicBool,
}

impl Reclaim for Gate {
    fn ram(&self) -> &[Range<u64>] {
        self.inner.ram()
    }

    fn host_page_size(&self, index: usize) -> u64 {
        self.inner.host_page_size(index)
    }

    fn discard(&self, run: &Range<u64>) -> Result<u64, MemoryError> {
        if !self.passed.swap(true, Ordering::AcqRel) {
            self.entered.send(()).unwrap();
            self.open.lock().recv().unwrap();
        }
        self.inner.discard(run)
    }
}

/// The signal of a thread that is in a gate, and the one that lets it continue.
struct GateControl {
    inside: mpsc::Receiver<()>,
    open: mpsc::Sender<()>,
}

/// A gate for the memory.
fn gate() -> (impl FnOnce(Arc<GuestMemory>) -> Arc<dyn Reclaim>, GateControl) {
    let (entered, inside) = mpsc::sync_channel(1);
    let (open, gate) = mpsc::channel();
    let reclaim = |memory: Arc<GuestMemory>| -> Arc<dyn Reclaim> {
        let inner = GuestRam::new(memory, Strategy::Auto);
        Arc::new(Gate { inner, entered, open: Mutex::new(gate), passed: AtomicBool::new(false) })
    };
    (reclaim, GateControl { inside, open })
}

#[test]
fn a_guest_that_reads_the_configuration_never_waits_for_the_queues() {
    let (gate, GateControl { inside, open }) = gate();
    let guest = Guest::with(Options::default(), gate);
    let worker = guest.machine.worker().unwrap();
    let mut driver = guest.probe();
    guest.balloon.set_target(60 * MIB).unwrap();
    let inflating = thread::spawn(move || {
        driver.poll().unwrap();
        driver
    });
    inside.recv().unwrap();
    // The worker is inside a discard, with all its locks. Every call that serves a guest or a user continues.
    let mut config = [0; 16];
    guest.balloon.read_config(0, &mut config);
    assert_eq!(config[..4], 1024u32.to_le_bytes());
    guest.balloon.write_config(4, &3u32.to_le_bytes());
    assert_eq!(guest.balloon.size().actual, RAM - 3 * 4096);
    guest.balloon.set_target(50 * MIB).unwrap();
    guest.balloon.request_statistics().unwrap();
    guest.balloon.request_list(Arc::new(ReceivedList::default())).unwrap();
    guest.balloon.stop_list();
    guest.balloon.return_pages();
    let _ = (guest.balloon.statistics(), guest.balloon.counters(), guest.balloon.hint_list());
    open.send(()).unwrap();
    drop(inflating.join().unwrap());
    drop(worker);
}

#[test]
fn no_pages_of_a_driver_are_given_back_after_the_reset() {
    for queue in [0, 4] {
        let (gate, GateControl { inside, open }) = gate();
        let bare = Bare::with(gate);
        bare.memory.block(0).unwrap().write(8 * MIB, &vec![7; 8 << 20]).unwrap();
        let ring = bare.ring();
        // Three runs, and a buffer that was not processed.
        for number in 0..2u64 {
            let numbers = [2048, 2050, 2052].map(|page| 6 * number + page);
            if queue == 0 {
                let at = 0x4000 + 16 * number;
                numbers.map(|page| u32::try_from(page).unwrap().to_le()).iter().zip(0..).for_each(|(page, index)| {
                    bare.guest.write_obj(*page, GuestAddress(at + 4 * index)).unwrap();
                });
                bare.offer(u16::try_from(number).unwrap(), at, 12, 0);
            } else {
                bare.offer(u16::try_from(number).unwrap(), numbers[0] * 4096, 4096, WRITABLE);
            }
        }
        let was_reset = AtomicBool::new(false);
        thread::scope(|scope| {
            let worker = scope.spawn(|| bare.balloon.process_queue(queue, &ring).unwrap());
            inside.recv().unwrap();
            let resetting = scope.spawn(|| {
                bare.balloon.reset();
                was_reset.store(true, Ordering::Release);
                bare.balloon.counters()
            });
            // An access to the configuration waits for neither of them.
            while bare.balloon.size().actual == 16 * MIB {
                bare.balloon.write_config(4, &3u32.to_le_bytes());
                bare.balloon.read_config(0, &mut [0; 16]);
            }
            thread::sleep(Duration::from_millis(50));
            let early = was_reset.load(Ordering::Acquire);
            open.send(()).unwrap();
            assert!(!early, "pages of the driver were still being given back");
            assert_eq!(resetting.join().unwrap().discards, 1, "the one that had already begun");
            assert_eq!(worker.join().unwrap(), MoreWork::No);
        });
        assert_eq!((bare.balloon.counters().discards, bare.used()), (1, 0), "and the rings are not changed");
        let mut pages = vec![0; 12 << 12];
        bare.memory.block(0).unwrap().read(2048 << 12, &mut pages).unwrap();
        assert!(pages[4096..].iter().all(|byte| *byte == 7));
        // The next driver's buffers, at the same addresses.
        bare.guest.write_obj(0u16, GuestAddress(0x2002)).unwrap();
        bare.offer(0, 0x4000, 4, 0);
        bare.guest.write_obj(4095u32.to_le(), GuestAddress(0x4000)).unwrap();
        assert_eq!(bare.balloon.process_queue(0, &bare.ring()).unwrap(), MoreWork::No);
        assert_eq!((bare.balloon.counters().discards, bare.used()), (2, 1));
    }
}

/// As when the front end's memory changes: the old mapping is unmapped, which takes time.
#[test]
fn no_thread_waits_for_memory_that_is_dropped() {
    #[derive(Debug)]
    struct SlowlyDropped(mpsc::SyncSender<()>, Mutex<mpsc::Receiver<()>>);
    impl Reclaim for SlowlyDropped {
        fn ram(&self) -> &[Range<u64>] {
            &[]
        }
        fn host_page_size(&self, _index: usize) -> u64 {
            4096
        }
        fn discard(&self, _run: &Range<u64>) -> Result<u64, MemoryError> {
            Ok(0)
        }
    }
    impl Drop for SlowlyDropped {
        fn drop(&mut self) {
            self.0.send(()).unwrap();
            let went_on = self.1.lock().recv_timeout(Duration::from_secs(20));
            assert!(went_on.is_ok() || thread::panicking(), "a thread waited for it");
        }
    }
    let balloon = Arc::new(Balloon::new(Options::default()));
    let (going, goes) = mpsc::sync_channel(1);
    let (gone, go) = mpsc::channel();
    balloon.set_memory(Arc::new(SlowlyDropped(going, Mutex::new(go))));
    balloon.set_target(MIB).unwrap();
    let memory = GuestMemory::new(vec![BlockOptions::memfd("pc.ram", 2 * MIB).map().unwrap()]).unwrap();
    thread::scope(|scope| {
        let changing = scope.spawn(|| balloon.set_memory(Arc::new(GuestRam::new(Arc::new(memory), Strategy::Auto))));
        goes.recv().unwrap();
        balloon.write_config(4, &3u32.to_le_bytes());
        assert_eq!((balloon.size().actual, balloon.size().target), (2 * MIB - 3 * 4096, MIB));
        balloon.set_target(2 * MIB).unwrap();
        assert!(!balloon.has_driver());
        gone.send(()).unwrap();
        changing.join().unwrap();
    });
}
