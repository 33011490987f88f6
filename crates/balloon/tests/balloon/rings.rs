//! Rings that stop while the device has a buffer, and lists that are asked for while others are on the queue.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use limosa_balloon::{Features, HintState, More, Ring, Transport};
use limosa_memory::free::{FreePageSink, FreePages as _};
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes as _, GuestAddress};

use crate::bare::{Bare, BareRing, Bus, Memory, POISON, WRITABLE};
use crate::machine::MIB;

/// A ring that stops in front of the next buffer that is given back, and one where something happens at its end.
struct Stopping<'m> {
    ring: BareRing<'m>,
    stopped: Cell<bool>,
    /// What happens when the device has just found no more buffers.
    at_end: Cell<Option<Box<dyn FnOnce() + 'm>>>,
}

impl<'m> Stopping<'m> {
    fn over(bare: &'m Bare) -> Self {
        Self { ring: bare.ring(), stopped: Cell::new(false), at_end: Cell::default() }
    }
}

impl<'m> Ring for Stopping<'m> {
    type Memory = Memory;
    type Handle = &'m Memory;
    type Error = virtio_queue::Error;

    fn pop(&self) -> Result<Option<DescriptorChain<&'m Memory>>, Self::Error> {
        let chain = self.ring.pop()?;
        if chain.is_none()
            && let Some(happens) = self.at_end.take()
        {
            happens();
        }
        Ok(chain)
    }

    fn add_used(&self, head: u16, length: u32) -> Result<(), Self::Error> {
        if self.stopped.get() { Err(virtio_queue::Error::QueueNotReady) } else { self.ring.add_used(head, length) }
    }

    fn notify(&self) -> Result<(), Self::Error> {
        self.ring.notify()
    }

    fn is_stopped(error: &Self::Error) -> bool {
        matches!(error, virtio_queue::Error::QueueNotReady)
    }
}

#[test]
fn a_buffer_whose_ring_was_stopped_comes_back_when_it_goes_on() {
    for queue in [0, 3, 4] {
        let bare = Bare::new();
        let ring = Stopping::over(&bare);
        let flags = if queue == 4 { WRITABLE } else { 0 };
        bare.guest.write_obj(4095u32.to_le(), GuestAddress(0x4000)).unwrap();
        let (address, length) = if queue == 4 { (8 * MIB, 4096) } else { (0x4000, 4) };
        bare.offer(0, address, length, flags);
        ring.stopped.set(true);
        assert!(bare.balloon.work(queue, &ring).is_err());
        assert_eq!(bare.used(), 0);
        ring.stopped.set(false);
        assert_eq!(bare.balloon.work(queue, &ring).unwrap(), More::No);
        assert_eq!(bare.used(), 1, "queue {queue}: the driver waits for it");
    }
    let bare = Bare::new();
    let ring = Stopping::over(&bare);
    bare.offer(0, 0x4000, 10, 0);
    bare.balloon.work(2, &ring).unwrap();
    bare.balloon.request_statistics().unwrap();
    ring.stopped.set(true);
    assert!(bare.balloon.work(2, &ring).is_err());
    ring.stopped.set(false);
    bare.balloon.work(2, &ring).unwrap();
    assert_eq!(bare.used(), 1, "and so do statistics");
    assert_eq!(bare.memory.total_pages(), 4096);
}

/// As a VM is stopped for a while: the ring begins anew where the buffers are that were not given back.
#[test]
fn a_queue_that_stops_and_goes_on_has_the_same_driver() {
    let bare = Bare::new();
    let poison = 0xaaaa_aaaa_u32.to_le_bytes();
    bare.balloon.write_config(POISON, &poison);
    bare.balloon.write_config(4, &77_u32.to_le_bytes());
    bare.offer(0, 0x4000, 10, 0);
    bare.balloon.work(2, &bare.ring()).unwrap();
    let before = bare.balloon.statistics().unwrap().sequence;
    for queue in 0..6 {
        bare.balloon.stopped(queue);
    }
    assert_eq!(bare.balloon.size().actual, 16 * MIB - 77 * 4096, "what is in the balloon stays there");
    let refused = bare.balloon.request(Arc::new(Told::default())).unwrap_err();
    assert!(refused.to_string().contains("page_poison"), "free pages are filled as they were: {refused}");
    // The buffer for statistics is one that the device has not got, so it comes alone; and it holds what was told before.
    bare.balloon.work(2, &bare.ring()).unwrap();
    assert_eq!(bare.balloon.statistics().unwrap().sequence, before);
    assert_eq!((bare.balloon.counters().unexpected_buffers, bare.used()), (0, 1));

    bare.balloon.reset();
    assert_eq!(bare.balloon.size().actual, 16 * MIB);
    bare.balloon.accepted(Features::default().without(Features::PAGE_POISON));
    assert!(bare.balloon.request(Arc::new(Told::default())).is_ok(), "the next driver has no such value");
}

/// A buffer that was filled before the VM stood still, or for another process, does not say how it is now.
#[test]
fn statistics_of_an_unknown_time_are_asked_for_again() {
    for inherited in [false, true] {
        let bare = Bare::new();
        let free = |bytes: u64| bare.guest.write_obj(bytes.to_le(), GuestAddress(0x4002)).unwrap();
        let told = || bare.balloon.statistics().map(|told| (told.sequence, told.free_memory().unwrap()));
        bare.guest.write_obj(4u16.to_le(), GuestAddress(0x4000)).unwrap();
        let ring = Stopping::over(&bare);
        if inherited {
            bare.balloon.reset();
            bare.balloon.accepted(Features::default());
            bare.balloon.inherited();
        } else {
            // The device holds it when the VM stops.
            bare.offer(0, 0x4000, 10, 0);
            bare.balloon.work(2, &bare.ring()).unwrap();
            bare.balloon.stopped(2);
        }
        let before = told();
        free(1 << 20);
        bare.offer(0, 0x4000, 10, 0);
        bare.balloon.request_statistics().unwrap();
        ring.stopped.set(true);
        assert!(bare.balloon.work(2, &ring).is_err());
        assert_eq!((told(), bare.used()), (before, 0));
        ring.stopped.set(false);
        bare.balloon.work(2, &ring).unwrap();
        assert_eq!(
            (told(), bare.used()),
            (before, 1),
            "it is given back unread, also over a ring that stopped for a moment"
        );

        free(2 << 20);
        bare.offer(1, 0x4000, 10, 0);
        bare.balloon.work(2, &ring).unwrap();
        let sequence = before.map_or(0, |(sequence, _)| sequence) + 1;
        assert_eq!((told(), bare.used()), (Some((sequence, 2 << 20)), 1), "that is the answer, and it is held");
    }
}

/// A front end may stop one ring alone, or move memory away from under it, and the driver use its pages again.
#[test]
fn a_queue_that_stops_amid_a_buffer_gives_nothing_of_it_back_any_more() {
    let bare = Bare::new();
    bare.memory.block(0).unwrap().write(8 * MIB, &vec![7; 8 << 20]).unwrap();
    // More runs than one look gives back.
    for index in 0..200u32 {
        bare.guest.write_obj((2048 + 2 * index).to_le(), GuestAddress(0x4000 + 4 * u64::from(index))).unwrap();
    }
    bare.offer(0, 0x4000, 800, 0);
    let ring = bare.ring();
    assert_eq!(bare.balloon.work(0, &ring).unwrap(), More::Yes);
    let before = bare.balloon.counters().discards;
    assert!((1..200).contains(&before));
    bare.balloon.stopped(0);
    assert_eq!(bare.balloon.work(0, &ring).unwrap(), More::No);
    assert_eq!((bare.balloon.counters().discards, bare.used()), (before, 0));
    let mut last = [0; 4096];
    bare.memory.block(0).unwrap().read((2048 + 2 * 199) << 12, &mut last).unwrap();
    assert_eq!(last, [7; 4096]);
}

/// QEMU tells a back end what was accepted when the driver is ready, and what the driver has written before at once.
#[test]
fn what_fills_free_pages_may_be_said_before_the_feature_is_accepted() {
    let bare = Bare::new();
    bare.balloon.reset();
    bare.balloon.accepted(Features::FREE_PAGE_HINT);
    bare.balloon.write_config(POISON, &[0xaa; 4]);
    assert!(bare.balloon.request(Arc::new(Told::default())).is_ok());
    bare.balloon.accepted(Features::default());
    assert!(bare.balloon.request(Arc::new(Told::default())).is_err());
    // A driver that begins anew over the same connection says it anew; what was said holds until then.
    bare.balloon.reset();
    bare.balloon.accepted(Features::default());
    assert!(bare.balloon.request(Arc::new(Told::default())).is_err());
    bare.balloon.write_config(POISON, &[0; 4]);
    assert!(bare.balloon.request(Arc::new(Told::default())).is_ok());
}

/// Whose rings have given nothing back yet, a driver that another server had looks like one that begins.
#[test]
fn a_driver_that_has_not_said_here_what_fills_its_free_pages_keeps_them() {
    let bare = Bare::new();
    bare.memory.block(0).unwrap().write(8 * MIB, &vec![7; 4096]).unwrap();
    bare.balloon.attached(Arc::new(Bus));
    bare.balloon.accepted(Features::default());
    let refused = bare.balloon.request(Arc::new(Told::default())).unwrap_err();
    assert!(refused.to_string().contains("page_poison"), "{refused}");
    bare.offer(0, 8 * MIB, 4096, WRITABLE);
    bare.balloon.work(4, &bare.ring()).unwrap();
    assert_eq!((bare.balloon.counters().ignored_reports, bare.used()), (1, 1));
    let mut page = [0; 4096];
    bare.memory.block(0).unwrap().read(8 * MIB, &mut page).unwrap();
    assert_eq!(page, [7; 4096]);

    bare.balloon.write_config(POISON, &[0; 4]);
    for queue in 0..5 {
        bare.balloon.stopped(queue);
    }
    assert!(bare.balloon.request(Arc::new(Told::default())).is_ok(), "what was said holds over a stop");
    // One that has not accepted the feature has nothing to say.
    bare.balloon.attached(Arc::new(Bus));
    bare.balloon.accepted(Features::FREE_PAGE_HINT);
    assert!(bare.balloon.request(Arc::new(Told::default())).is_ok());
}

#[test]
fn a_driver_that_another_process_had_is_told_what_the_configuration_is() {
    #[derive(Default)]
    struct Line(AtomicU32);
    impl Transport for Line {
        fn config_changed(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
        fn kick(&self, _queue: usize) {}
    }
    let bare = Bare::new();
    let line = Arc::new(Line::default());
    bare.balloon.attached(line.clone());
    bare.balloon.accepted(Features::default());
    bare.balloon.inherited();
    assert_eq!(line.0.load(Ordering::SeqCst), 1, "it may hold blocks, and have a balloon that nobody wants");
}

#[test]
fn nothing_is_asked_of_a_driver_that_is_gone_or_whose_queue_does_not_run() {
    #[derive(Default)]
    struct Idle(AtomicU32);
    impl Transport for Idle {
        fn config_changed(&self) {}
        fn kick(&self, _queue: usize) {}
        fn is_idle(&self, queue: usize) -> bool {
            self.0.load(Ordering::SeqCst) & (1 << queue) != 0
        }
    }
    let bare = Bare::new();
    let idle = Arc::new(Idle::default());
    let why = || bare.balloon.request(Arc::new(Told::default())).unwrap_err().to_string();
    bare.balloon.attached(idle.clone());
    bare.balloon.accepted(Features::default());
    bare.balloon.write_config(POISON, &[0; 4]);
    idle.0.store(1 << 3, Ordering::SeqCst);
    assert!(why().contains("does not run"), "{}", why());
    assert!(bare.balloon.request_statistics().is_ok());
    idle.0.store(1 << 2, Ordering::SeqCst);
    assert!(bare.balloon.request(Arc::new(Told::default())).is_ok());
    assert!(bare.balloon.request_statistics().unwrap_err().contains("does not run"));

    idle.0.store(0, Ordering::SeqCst);
    bare.balloon.reset();
    assert!(!bare.balloon.has_driver() && why().contains("load virtio_balloon"));
    assert!(bare.balloon.request_statistics().unwrap_err().contains("load virtio_balloon"));
    bare.balloon.accepted(Features::default());
    assert!(bare.balloon.has_driver() && bare.balloon.request_statistics().is_ok());
}

#[derive(Default)]
struct Told(Mutex<Vec<u64>>);

impl FreePageSink for Told {
    fn free(&self, range: std::ops::Range<u64>) {
        self.0.lock().unwrap().push(range.start);
    }

    fn complete(&self) {}
}

/// The VM is stopped while somebody looks at the queue: he hears of it at his next step, in the middle of a list.
#[test]
fn a_list_whose_ring_stops_goes_on_with_it() {
    let bare = Bare::new();
    let ring = Stopping::over(&bare);
    let told = Arc::new(Told::default());
    bare.balloon.request(told.clone()).unwrap();
    bare.balloon.work(3, &ring).unwrap();
    let id = bare.command();
    bare.guest.write_obj(id.to_le(), GuestAddress(0x4000)).unwrap();
    bare.guest.write_obj(0u32, GuestAddress(0x4008)).unwrap();
    bare.offer(0, 0x4000, 4, 0);
    bare.balloon.work(3, &ring).unwrap();
    bare.offer(1, 8 * MIB, 4096, WRITABLE);
    ring.stopped.set(true);
    assert!(bare.balloon.work(3, &ring).is_err());
    assert_eq!((bare.command(), bare.balloon.hint_list().state), (id, HintState::Started));
    // Behind a stop that the device does not know of yet.
    assert!(bare.balloon.work(3, &ring).is_err());

    ring.stopped.set(false);
    bare.offer(2, 12 * MIB, 4096, WRITABLE);
    bare.offer(3, 0x4008, 4, 0);
    bare.balloon.work(3, &ring).unwrap();
    assert_eq!(*told.0.lock().unwrap(), [8 * MIB, 12 * MIB]);
    assert!(bare.balloon.hint_list().complete && bare.used() == 4);
}

#[test]
fn what_was_on_the_queue_when_a_list_was_asked_for_is_not_of_that_list() {
    let bare = Bare::new();
    let ring = Stopping::over(&bare);
    let ask = || {
        let told = Arc::new(Told::default());
        bare.balloon.request(told.clone()).unwrap();
        told
    };
    let first = ask();
    bare.balloon.work(3, &ring).unwrap();
    let id = bare.command();
    // Linux has one field for the id, which its buffers point to.
    let field = |id: u32| bare.guest.write_obj(id.to_le(), GuestAddress(0x4000)).unwrap();
    field(id);
    bare.offer(0, 0x4000, 4, 0);
    bare.offer(1, 8 * MIB, 4096, WRITABLE);
    // Nobody has looked at the queue when the list is given up, and another one asked for.
    bare.balloon.stop();
    let second = ask();
    assert!(bare.command() < 0x8000_0000, "the driver cannot know of it yet");
    field(id + 1);
    bare.balloon.work(3, &ring).unwrap();
    assert_eq!(bare.command(), id + 1);
    assert!(first.0.lock().unwrap().is_empty() && second.0.lock().unwrap().is_empty());
    // What comes now was free behind the question.
    bare.offer(2, 0x4000, 4, 0);
    bare.offer(3, 12 * MIB, 4096, WRITABLE);
    bare.balloon.work(3, &ring).unwrap();
    assert_eq!(*second.0.lock().unwrap(), [12 * MIB]);
}

/// A list that is asked for when the look at the queue is over, and the device does not know that yet: what the driver has
/// added between is of the list before, and Linux's buffers read as the new id once that is shown.
#[test]
fn a_list_that_is_asked_for_behind_the_last_look_is_shown_at_the_next_one() {
    let bare = &Bare::new();
    let ring = Stopping::over(bare);
    bare.balloon.request(Arc::new(Told::default())).unwrap();
    bare.balloon.work(3, &ring).unwrap();
    let first = bare.command();
    let field = move |id: u32| bare.guest.write_obj(id.to_le(), GuestAddress(0x4000)).unwrap();
    let second = Arc::new(Told::default());
    let (balloon, told) = (&bare.balloon, second.clone());
    let meanwhile = move || {
        field(first);
        bare.offer(0, 0x4000, 4, 0);
        bare.offer(1, 8 * MIB, 4096, WRITABLE);
        // Here the guest takes the block back and writes it, and the engine fetches the dirty log.
        balloon.stop();
        balloon.request(told).unwrap();
    };
    ring.at_end.set(Some(Box::new(meanwhile)));
    balloon.work(3, &ring).unwrap();
    assert!(bare.command() < 0x8000_0000, "there are buffers in front of it");
    field(first.checked_add(1).unwrap_or(0x8000_0000));
    // The look that the request has kicked for.
    balloon.work(3, &ring).unwrap();
    assert_eq!(*second.0.lock().unwrap(), [0; 0], "that was free before the question");
    bare.offer(2, 0x4000, 4, 0);
    bare.offer(3, 12 * MIB, 4096, WRITABLE);
    balloon.work(3, &ring).unwrap();
    assert_eq!(*second.0.lock().unwrap(), [12 * MIB]);
}
