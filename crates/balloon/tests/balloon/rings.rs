//! Rings that stop while the device has a buffer, and lists that are requested while others are on the queue.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use limosa_balloon::{Features, HintState, MoreWork, Ring, StatisticsError, Transport};
use limosa_memory::{FreePageHinting as _, FreePageSink};
use parking_lot::Mutex;
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes as _, GuestAddress};

use crate::bare::{Bare, BareRing, Bus, Memory, POISON, WRITABLE};
use crate::machine::MIB;

/// A ring that stops before the next buffer is given back, and one with an action at its end.
struct Stopping<'m> {
    ring: BareRing<'m>,
    stopped: Cell<bool>,
    /// An action at the time when the device has just found no more buffers.
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

    fn is_stopped_error(error: &Self::Error) -> bool {
        matches!(error, virtio_queue::Error::QueueNotReady)
    }
}

#[test]
fn a_buffer_whose_ring_was_stopped_is_given_back_when_it_continues() {
    for queue in [0, 3, 4] {
        let bare = Bare::new();
        let ring = Stopping::over(&bare);
        let flags = if queue == 4 { WRITABLE } else { 0 };
        bare.guest.write_obj(4095u32.to_le(), GuestAddress(0x4000)).unwrap();
        let (address, length) = if queue == 4 { (8 * MIB, 4096) } else { (0x4000, 4) };
        bare.offer(0, address, length, flags);
        ring.stopped.set(true);
        assert!(bare.balloon.process_queue(queue, &ring).is_err());
        assert_eq!(bare.used(), 0);
        ring.stopped.set(false);
        assert_eq!(bare.balloon.process_queue(queue, &ring).unwrap(), MoreWork::No);
        assert_eq!(bare.used(), 1, "queue {queue}: the driver waits for it");
    }
    let bare = Bare::new();
    let ring = Stopping::over(&bare);
    bare.offer(0, 0x4000, 10, 0);
    bare.balloon.process_queue(2, &ring).unwrap();
    bare.balloon.request_statistics().unwrap();
    ring.stopped.set(true);
    assert!(bare.balloon.process_queue(2, &ring).is_err());
    ring.stopped.set(false);
    bare.balloon.process_queue(2, &ring).unwrap();
    assert_eq!(bare.used(), 1, "and so do statistics");
    assert_eq!(bare.memory.total_pages(), 4096);
}

/// As when a VM is paused: the ring starts again at the first buffer that was not given back.
#[test]
fn a_queue_that_stops_and_continues_has_the_same_driver() {
    let bare = Bare::new();
    let poison = 0xaaaa_aaaa_u32.to_le_bytes();
    bare.balloon.write_config(POISON, &poison);
    bare.balloon.write_config(4, &77_u32.to_le_bytes());
    bare.offer(0, 0x4000, 10, 0);
    bare.balloon.process_queue(2, &bare.ring()).unwrap();
    let before = bare.balloon.statistics().unwrap().sequence;
    for queue in 0..6 {
        bare.balloon.queue_stopped(queue);
    }
    assert_eq!(bare.balloon.size().actual, 16 * MIB - 77 * 4096, "the balloon keeps its pages");
    let refused = bare.balloon.request_list(Arc::new(ReceivedBlocks::default())).unwrap_err();
    assert!(refused.to_string().contains("page_poison"), "the poison value is kept: {refused}");
    // The device does not have the buffer for statistics any more, so it is not a second one; and it holds old values.
    bare.balloon.process_queue(2, &bare.ring()).unwrap();
    assert_eq!(bare.balloon.statistics().unwrap().sequence, before);
    assert_eq!((bare.balloon.counters().unexpected_buffers, bare.used()), (0, 1));

    bare.balloon.reset();
    assert_eq!(bare.balloon.size().actual, 16 * MIB);
    bare.balloon.ack_features(Features::ALL.without(Features::PAGE_POISON));
    assert!(
        bare.balloon.request_list(Arc::new(ReceivedBlocks::default())).is_ok(),
        "the next driver has no poison value"
    );
}

/// A buffer that was filled before the VM was paused, or for another process, does not show the current state.
#[test]
fn statistics_of_an_unknown_time_are_requested_again() {
    for inherited in [false, true] {
        let bare = Bare::new();
        let free = |bytes: u64| bare.guest.write_obj(bytes.to_le(), GuestAddress(0x4002)).unwrap();
        let report = || bare.balloon.statistics().map(|report| (report.sequence, report.free_memory().unwrap()));
        bare.guest.write_obj(4u16.to_le(), GuestAddress(0x4000)).unwrap();
        let ring = Stopping::over(&bare);
        if inherited {
            bare.balloon.reset();
            bare.balloon.ack_features(Features::ALL);
            bare.balloon.driver_resumed();
        } else {
            // The device holds it when the VM stops.
            bare.offer(0, 0x4000, 10, 0);
            bare.balloon.process_queue(2, &bare.ring()).unwrap();
            bare.balloon.queue_stopped(2);
        }
        let before = report();
        free(1 << 20);
        bare.offer(0, 0x4000, 10, 0);
        bare.balloon.request_statistics().unwrap();
        ring.stopped.set(true);
        assert!(bare.balloon.process_queue(2, &ring).is_err());
        assert_eq!((report(), bare.used()), (before, 0));
        ring.stopped.set(false);
        bare.balloon.process_queue(2, &ring).unwrap();
        assert_eq!(
            (report(), bare.used()),
            (before, 1),
            "it is given back unread, also over a ring that stopped briefly"
        );

        free(2 << 20);
        bare.offer(1, 0x4000, 10, 0);
        bare.balloon.process_queue(2, &ring).unwrap();
        let sequence = before.map_or(0, |(sequence, _)| sequence) + 1;
        assert_eq!(
            (report(), bare.used()),
            (Some((sequence, 2 << 20)), 1),
            "that is the reply, and the device keeps the buffer"
        );
    }
}

/// A front end may stop one ring only, or remove its memory, and the driver may then use its pages again.
#[test]
fn a_queue_that_stops_during_a_buffer_gives_no_more_of_its_pages_back() {
    let bare = Bare::new();
    bare.memory.block(0).unwrap().write(8 * MIB, &vec![7; 8 << 20]).unwrap();
    // More runs than one call gives back.
    for index in 0..200u32 {
        bare.guest.write_obj((2048 + 2 * index).to_le(), GuestAddress(0x4000 + 4 * u64::from(index))).unwrap();
    }
    bare.offer(0, 0x4000, 800, 0);
    let ring = bare.ring();
    assert_eq!(bare.balloon.process_queue(0, &ring).unwrap(), MoreWork::Yes);
    let before = bare.balloon.counters().discards;
    assert!((1..200).contains(&before));
    bare.balloon.queue_stopped(0);
    assert_eq!(bare.balloon.process_queue(0, &ring).unwrap(), MoreWork::No);
    assert_eq!((bare.balloon.counters().discards, bare.used()), (before, 0));
    let mut last = [0; 4096];
    bare.memory.block(0).unwrap().read((2048 + 2 * 199) << 12, &mut last).unwrap();
    assert_eq!(last, [7; 4096]);
}

/// QEMU passes the accepted features to a back end when the driver is ready, but the driver's writes to the
/// configuration at once.
#[test]
fn the_poison_value_may_be_written_before_the_feature_is_accepted() {
    let bare = Bare::new();
    bare.balloon.reset();
    bare.balloon.ack_features(Features::FREE_PAGE_HINT);
    bare.balloon.write_config(POISON, &[0xaa; 4]);
    assert!(bare.balloon.request_list(Arc::new(ReceivedBlocks::default())).is_ok());
    bare.balloon.ack_features(Features::ALL);
    assert!(bare.balloon.request_list(Arc::new(ReceivedBlocks::default())).is_err());
    // A driver that starts again over the same connection writes it again; the old value is valid until then.
    bare.balloon.reset();
    bare.balloon.ack_features(Features::ALL);
    assert!(bare.balloon.request_list(Arc::new(ReceivedBlocks::default())).is_err());
    bare.balloon.write_config(POISON, &[0; 4]);
    assert!(bare.balloon.request_list(Arc::new(ReceivedBlocks::default())).is_ok());
}

/// A driver of another server whose rings have given no buffer back yet looks like a new one.
#[test]
fn a_driver_that_has_not_written_its_poison_value_here_keeps_its_free_pages() {
    let bare = Bare::new();
    bare.memory.block(0).unwrap().write(8 * MIB, &vec![7; 4096]).unwrap();
    bare.balloon.attach(Arc::new(Bus));
    bare.balloon.ack_features(Features::ALL);
    let refused = bare.balloon.request_list(Arc::new(ReceivedBlocks::default())).unwrap_err();
    assert!(refused.to_string().contains("page_poison"), "{refused}");
    bare.offer(0, 8 * MIB, 4096, WRITABLE);
    bare.balloon.process_queue(4, &bare.ring()).unwrap();
    assert_eq!((bare.balloon.counters().ignored_reports, bare.used()), (1, 1));
    let mut page = [0; 4096];
    bare.memory.block(0).unwrap().read(8 * MIB, &mut page).unwrap();
    assert_eq!(page, [7; 4096]);

    bare.balloon.write_config(POISON, &[0; 4]);
    for queue in 0..5 {
        bare.balloon.queue_stopped(queue);
    }
    assert!(
        bare.balloon.request_list(Arc::new(ReceivedBlocks::default())).is_ok(),
        "the value remains valid over a stop"
    );
    // A driver that has not accepted the feature writes no value.
    bare.balloon.attach(Arc::new(Bus));
    bare.balloon.ack_features(Features::FREE_PAGE_HINT);
    assert!(bare.balloon.request_list(Arc::new(ReceivedBlocks::default())).is_ok());
}

#[test]
fn a_driver_that_another_process_had_is_notified_of_the_configuration() {
    #[derive(Default)]
    struct ChangeCount(AtomicU32);
    impl Transport for ChangeCount {
        fn config_changed(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
        fn kick(&self, _queue: usize) {}
    }
    let bare = Bare::new();
    let line = Arc::new(ChangeCount::default());
    bare.balloon.attach(line.clone());
    bare.balloon.ack_features(Features::ALL);
    bare.balloon.driver_resumed();
    assert_eq!(line.0.load(Ordering::SeqCst), 1, "it may hold blocks, and have a balloon that is not requested here");
}

#[test]
fn a_driver_that_is_gone_or_whose_queue_does_not_run_gets_no_requests() {
    #[derive(Default)]
    struct Idle(AtomicU32);
    impl Transport for Idle {
        fn config_changed(&self) {}
        fn kick(&self, _queue: usize) {}
        fn is_queue_stopped(&self, queue: usize) -> bool {
            self.0.load(Ordering::SeqCst) & (1 << queue) != 0
        }
    }
    let bare = Bare::new();
    let idle = Arc::new(Idle::default());
    let why = || bare.balloon.request_list(Arc::new(ReceivedBlocks::default())).unwrap_err().to_string();
    bare.balloon.attach(idle.clone());
    bare.balloon.ack_features(Features::ALL);
    bare.balloon.write_config(POISON, &[0; 4]);
    idle.0.store(1 << 3, Ordering::SeqCst);
    assert!(why().contains("does not run"), "{}", why());
    assert!(bare.balloon.request_statistics().is_ok());
    idle.0.store(1 << 2, Ordering::SeqCst);
    assert!(bare.balloon.request_list(Arc::new(ReceivedBlocks::default())).is_ok());
    assert_eq!(bare.balloon.request_statistics(), Err(StatisticsError::QueueStopped));

    idle.0.store(0, Ordering::SeqCst);
    bare.balloon.reset();
    assert!(!bare.balloon.has_driver() && why().contains("load virtio_balloon"));
    assert_eq!(bare.balloon.request_statistics(), Err(StatisticsError::NoDriver));
    bare.balloon.ack_features(Features::ALL);
    assert!(bare.balloon.has_driver() && bare.balloon.request_statistics().is_ok());
}

#[derive(Default)]
struct ReceivedBlocks(Mutex<Vec<u64>>);

impl FreePageSink for ReceivedBlocks {
    fn add_range(&self, range: std::ops::Range<u64>) {
        self.0.lock().push(range.start);
    }

    fn complete(&self) {}
}

/// The VM is paused while a thread processes the queue: the thread finds out at its next step, in the middle of a list.
#[test]
fn a_list_whose_ring_stops_continues_with_it() {
    let bare = Bare::new();
    let ring = Stopping::over(&bare);
    let report = Arc::new(ReceivedBlocks::default());
    bare.balloon.request_list(report.clone()).unwrap();
    bare.balloon.process_queue(3, &ring).unwrap();
    let id = bare.command();
    bare.guest.write_obj(id.to_le(), GuestAddress(0x4000)).unwrap();
    bare.guest.write_obj(0u32, GuestAddress(0x4008)).unwrap();
    bare.offer(0, 0x4000, 4, 0);
    bare.balloon.process_queue(3, &ring).unwrap();
    bare.offer(1, 8 * MIB, 4096, WRITABLE);
    ring.stopped.set(true);
    assert!(bare.balloon.process_queue(3, &ring).is_err());
    assert_eq!((bare.command(), bare.balloon.hint_list().state), (id, HintState::Started));
    // After a stop that the device does not know of yet.
    assert!(bare.balloon.process_queue(3, &ring).is_err());

    ring.stopped.set(false);
    bare.offer(2, 12 * MIB, 4096, WRITABLE);
    bare.offer(3, 0x4008, 4, 0);
    bare.balloon.process_queue(3, &ring).unwrap();
    assert_eq!(*report.0.lock(), [8 * MIB, 12 * MIB]);
    assert!(bare.balloon.hint_list().complete && bare.used() == 4);
}

#[test]
fn buffers_on_the_queue_when_a_list_was_requested_do_not_belong_to_that_list() {
    let bare = Bare::new();
    let ring = Stopping::over(&bare);
    let ask = || {
        let report = Arc::new(ReceivedBlocks::default());
        bare.balloon.request_list(report.clone()).unwrap();
        report
    };
    let first = ask();
    bare.balloon.process_queue(3, &ring).unwrap();
    let id = bare.command();
    // Linux has one field for the id, which its buffers point to.
    let field = |id: u32| bare.guest.write_obj(id.to_le(), GuestAddress(0x4000)).unwrap();
    field(id);
    bare.offer(0, 0x4000, 4, 0);
    bare.offer(1, 8 * MIB, 4096, WRITABLE);
    // The queue has not been processed when the list is stopped, and another one requested.
    bare.balloon.stop_list();
    let second = ask();
    assert!(bare.command() < 0x8000_0000, "the driver cannot know of it yet");
    field(id + 1);
    bare.balloon.process_queue(3, &ring).unwrap();
    assert_eq!(bare.command(), id + 1);
    assert!(first.0.lock().is_empty() && second.0.lock().is_empty());
    // A block that comes now was free after the request.
    bare.offer(2, 0x4000, 4, 0);
    bare.offer(3, 12 * MIB, 4096, WRITABLE);
    bare.balloon.process_queue(3, &ring).unwrap();
    assert_eq!(*second.0.lock(), [12 * MIB]);
}

/// A list that is requested when the last buffer was taken, and the device has not returned yet: the driver's buffers
/// added in between belong to the previous list, and Linux's buffers read as the new id once that is shown.
#[test]
fn a_list_that_is_requested_after_the_last_buffer_is_announced_by_the_next_call() {
    let bare = &Bare::new();
    let ring = Stopping::over(bare);
    bare.balloon.request_list(Arc::new(ReceivedBlocks::default())).unwrap();
    bare.balloon.process_queue(3, &ring).unwrap();
    let first = bare.command();
    let field = move |id: u32| bare.guest.write_obj(id.to_le(), GuestAddress(0x4000)).unwrap();
    let second = Arc::new(ReceivedBlocks::default());
    let (balloon, report) = (&bare.balloon, second.clone());
    let meanwhile = move || {
        field(first);
        bare.offer(0, 0x4000, 4, 0);
        bare.offer(1, 8 * MIB, 4096, WRITABLE);
        // Here the guest takes the block back and writes it, and the engine fetches the dirty log.
        balloon.stop_list();
        balloon.request_list(report).unwrap();
    };
    ring.at_end.set(Some(Box::new(meanwhile)));
    balloon.process_queue(3, &ring).unwrap();
    assert!(bare.command() < 0x8000_0000, "there are buffers before it");
    field(first.checked_add(1).unwrap_or(0x8000_0000));
    // The call that the request has scheduled by its kick.
    balloon.process_queue(3, &ring).unwrap();
    assert_eq!(*second.0.lock(), [0; 0], "that was free before the request");
    bare.offer(2, 0x4000, 4, 0);
    bare.offer(3, 12 * MIB, 4096, WRITABLE);
    balloon.process_queue(3, &ring).unwrap();
    assert_eq!(*second.0.lock(), [12 * MIB]);
}
