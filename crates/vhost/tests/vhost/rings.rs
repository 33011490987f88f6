//! Rings as front ends start, stop and move them.

use crate::peer;
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering;

use crate::peer::{Guest, Peer, Served, until, words};
use limosa_vhost::FaultKind;
use limosa_vhost::message::Request;

const PROTOCOL_FEATURES: u64 = 1 << 30;
const EVENT_INDEX: u64 = 1 << 29;

fn ready(served: &Served, without: u64) -> (Peer, Guest) {
    let peer = Peer::connect(&served.path);
    peer.negotiate(without);
    let guest = Guest::new(1);
    assert!(peer.share(&guest));
    (peer, guest)
}

#[test]
fn a_buffer_goes_through_the_device_and_its_driver_is_called() {
    let served = Served::new();
    let (peer, mut guest) = ready(&served, EVENT_INDEX);
    peer.start(&guest, 0, true);
    for head in [3, 0, 7] {
        guest.round_trip(head);
    }
    until("the driver is called", || guest.calls() > 0);
    // VRING_AVAIL_F_NO_INTERRUPT
    vm_memory::Bytes::write_obj(&guest.memory, 1_u16, Guest::at(0x2000)).unwrap();
    guest.round_trip(1);
    // The call comes after the buffer; once the ring has stopped it would have come.
    peer.base(&guest);
    assert_eq!(guest.calls(), 0);
}

/// As libblkio shares its rings.
#[test]
fn memory_may_end_within_a_page() {
    let served = Served::new();
    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    let mut guest = Guest::new(1);
    let [at, length, user, offset] = guest.region();
    let region = peer::longs(&[0, at, length - 512, user, offset]);
    assert!(peer.done(Request::AddMemReg, &region, &[guest.file.as_fd()]));
    peer.start(&guest, 0, true);
    guest.round_trip(0);
    assert!(!served.device.memories.lock().last().unwrap().visit_host_ranges(at + length - 512, 1, |_, _| {}));
    assert!(peer.done(Request::RemMemReg, &region, &[]));
}

/// As a guest moves an interrupt: masked, written, unmasked; the front end sets another descriptor for each.
#[test]
fn a_driver_whose_call_descriptor_changes_misses_no_call() {
    let served = Served::new();
    let (peer, mut guest) = ready(&served, EVENT_INDEX);
    peer.start(&guest, 0, true);
    guest.round_trip(0);
    until("the driver is called", || guest.calls() > 0);
    let number = peer::longs(&[u64::from(guest.queue)]);
    let nowhere = peer::longs(&[u64::from(guest.queue) | 1 << 8]);
    assert!(peer.done(Request::SetVringCall, &nowhere, &[]));
    guest.round_trip(1);
    assert_eq!(guest.calls(), 0);
    assert!(peer.done(Request::SetVringCall, &number, &[guest.call.as_fd()]));
    assert!(guest.calls() > 0, "buffers given back meanwhile cause a call");

    // A ring that does not run causes no calls.
    peer.base(&guest);
    guest.calls();
    assert!(peer.done(Request::SetVringCall, &number, &[guest.call.as_fd()]));
    assert_eq!(guest.calls(), 0);
}

#[test]
fn a_ring_that_is_not_enabled_keeps_its_buffers() {
    let served = Served::new();
    let (peer, mut guest) = ready(&served, 0);
    peer.start(&guest, 0, false);
    guest.offer(0, [1, 2, 3, 4]);
    guest.kick();
    assert_eq!(peer.ask_number(Request::GetQueueNum), 2);
    assert_eq!(guest.used(), 0);
    assert!(peer.enable(&guest, true));
    until("the buffer offered before is given back", || guest.used() == 1);
    assert!(peer.enable(&guest, false));
    guest.offer(1, [1, 2, 3, 4]);
    guest.kick();
    assert_eq!(peer.ask_number(Request::GetQueueNum), 2);
    assert_eq!(guest.used(), 1);
    assert!(peer.enable(&guest, true));
    until("and the one offered meanwhile", || guest.used() == 2);
}

#[test]
fn without_the_protocols_own_feature_a_ring_is_enabled_by_its_start() {
    let served = Served::new();
    let (peer, mut guest) = ready(&served, PROTOCOL_FEATURES);
    peer.start(&guest, 0, false);
    guest.round_trip(0);
}

/// As user-mode Linux unloads and loads a driver: rings disabled, never stopped, then features and rings again.
#[test]
fn a_driver_that_was_unloaded_and_loaded_starts_from_the_beginning() {
    let served = Served::new();
    let (peer, mut guest) = ready(&served, 0);
    served.device.holds.store(true, Ordering::SeqCst);
    peer.start(&guest, 0, true);
    guest.offer(0, [1, 2, 3, 4]);
    guest.kick();
    until("the device holds it", || served.device.held.lock().len() == 1);
    assert!(peer.enable(&guest, false));
    let before = served.device.resets.load(Ordering::SeqCst);

    guest.clear();
    let features = peer.ask_number(Request::GetFeatures);
    // The second time without the protocol's own feature, and then no message enables rings.
    for features in [features, features & !PROTOCOL_FEATURES] {
        assert!(peer.done(Request::SetFeatures, &features.to_le_bytes(), &[]));
    }
    assert!(served.device.resets.load(Ordering::SeqCst) > before);
    assert!(served.device.held.lock().is_empty());
    served.device.holds.store(false, Ordering::SeqCst);
    assert!(peer.share(&guest));
    peer.start(&guest, 0, false);
    guest.round_trip(5);

    // Unloaded again, the only message is a request for the features.
    peer.ask_number(Request::GetFeatures);
    guest.clear();
    served.device.front_end().kick(1);
    guest.offer(0, [1, 2, 3, 4]);
    guest.kick();
    assert_eq!(peer.ask_number(Request::GetQueueNum), 2);
    assert_eq!(guest.used(), 0, "the memory may have been reused");
}

#[test]
fn a_ring_that_stops_returns_the_index_of_the_first_buffer_that_was_not_given_back() {
    let served = Served::new();
    let (peer, mut guest) = ready(&served, 0);
    peer.start(&guest, 0, true);
    guest.round_trip(0);
    served.device.holds.store(true, Ordering::SeqCst);
    for head in 1..4 {
        guest.offer(head, [9; 4]);
    }
    guest.kick();
    until("the device holds three", || served.device.held.lock().len() == 3);
    assert_eq!(peer.base(&guest), 1);
    assert_eq!(*served.device.stops.lock(), [1], "the buffers that it held are the driver's again");
    served.device.holds.store(false, Ordering::SeqCst);

    peer.start(&guest, 1, true);
    until("they are given back after all", || guest.used() == 4);
    assert_eq!((guest.buffer(1), guest.buffer(3)), ([10; 4], [10; 4]));
    assert_eq!(peer.base(&guest), 4);
    assert_eq!(peer.base(&guest), 4, "also if it does not run");
}

#[test]
fn stopping_a_ring_waits_until_the_device_has_left_it() {
    let served = Served::new();
    let (peer, mut guest) = ready(&served, 0);
    peer.start(&guest, 0, true);
    served.device.stuck.store(true, Ordering::SeqCst);
    guest.offer(0, [1, 2, 3, 4]);
    guest.kick();
    until("the device works", || served.device.working.load(Ordering::SeqCst));
    // Configuration requests are answered meanwhile.
    assert_eq!(peer.ask(Request::GetConfig, &[words(&[0, 2, 0]), vec![0; 2]].concat())[12..], [0, 1]);
    peer.tell(Request::GetVringBase, &words(&[1, 0]), &[]);
    peer.0.set_read_timeout(Some(std::time::Duration::from_millis(50))).unwrap();
    assert!(peer.answer(Request::GetVringBase).is_none(), "not yet");
    served.device.stuck.store(false, Ordering::SeqCst);
    peer.0.set_read_timeout(Some(peer::LIMIT)).unwrap();
    assert!(peer.answer(Request::GetVringBase).is_some());
    let used = guest.used();
    guest.offer(1, [0; 4]);
    guest.kick();
    assert_eq!(peer.ask_number(Request::GetQueueNum), 2);
    assert_eq!(guest.used(), used);
}

#[test]
fn memory_may_change_under_a_ring_that_runs() {
    let served = Served::new();
    let (peer, mut guest) = ready(&served, 0);
    peer.start(&guest, 0, true);
    guest.round_trip(0);
    let more = Guest::new(0);
    let other = [1 << 30, 1 << 20, peer::USER + (1 << 40), 0];
    let added = [peer::longs(&[0]), peer::longs(&other)].concat();
    assert!(peer.done(Request::AddMemReg, &added, &[more.file.as_fd()]));
    guest.round_trip(1);
    assert_eq!(served.device.memories.lock().last().unwrap().regions().len(), 2);
    assert!(!peer.done(Request::AddMemReg, &added, &[more.file.as_fd()]), "it overlaps another region");
    assert!(peer.done(Request::RemMemReg, &added, &[]));
    assert!(!peer.done(Request::RemMemReg, &added, &[]));
    guest.round_trip(2);
    assert_eq!(served.device.resets.load(Ordering::SeqCst), 0);
    assert_eq!(peer.ask_number(Request::GetMaxMemSlots), 64);

    // The ring's own memory is removed: the ring stops, the server does not.
    let own = [peer::longs(&[0]), peer::longs(&guest.region())].concat();
    assert!(peer.done(Request::RemMemReg, &own, &[]));
    guest.offer(3, [1, 2, 3, 4]);
    guest.kick();
    assert_eq!(peer.ask_number(Request::GetQueueNum), 2);
    assert_eq!((guest.used(), served.server.fault_count(FaultKind::Ring)), (3, 1));
    assert_eq!(*served.device.stops.lock(), [1], "the device is notified");
}

#[test]
fn an_invalid_ring_is_not_processed_and_the_other_continues() {
    let served = Served::new();
    let (peer, mut broken) = ready(&served, 0);
    peer.start(&broken, 0, true);
    let error = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    assert!(peer.done(Request::SetVringErr, &peer::longs(&[1]), &[error.as_fd()]));
    // More buffers than there are descriptors.
    vm_memory::Bytes::write_obj(&broken.memory, 100_u16, Guest::at(0x2002)).unwrap();
    broken.kick();
    until("it is noticed", || served.server.fault_count(FaultKind::Ring) == 1);
    until("the front end is notified", || rustix::io::read(&error, &mut [0; 8]).is_ok());
    broken.kick();
    broken.kick();
    assert_eq!(peer.ask_number(Request::GetQueueNum), 2);
    assert_eq!(served.server.fault_count(FaultKind::Ring), 1);
    assert_eq!(peer.base(&broken), 0);
    broken.clear();
    peer.start(&broken, 0, true);
    broken.round_trip(0);
}

/// Negotiates as QEMU does when it starts a device that it has stopped.
fn negotiate_again(peer: &Peer, guest: &Guest, features: u64) {
    assert!(peer.done(Request::SetFeatures, &features.to_le_bytes(), &[]));
    assert!(peer.share(guest));
}

#[test]
fn a_vm_that_is_paused_has_the_same_driver_when_it_continues() {
    let served = Served::new();
    let (peer, mut guest) = ready(&served, 0);
    let features = peer.ask_number(Request::GetFeatures);
    peer.start(&guest, 0, true);
    for round in 0..3 {
        guest.round_trip(round);
        let base = peer.base(&guest);
        assert_eq!(base, round + 1);
        negotiate_again(&peer, &guest, features);
        peer.start(&guest, base, true);
    }
    guest.round_trip(7);
    assert_eq!(served.device.resets.load(Ordering::SeqCst), 0);
    assert_eq!(*served.device.stops.lock(), [1, 1, 1]);
    // A ring that stops while another one runs gives no evidence of another driver, wherever it continues.
    peer.start(&Guest::new(0).beside(&guest), 0, true);
    peer.base(&guest);
    guest.clear();
    peer.start(&guest, 0, true);
    guest.round_trip(2);
    assert_eq!(served.device.resets.load(Ordering::SeqCst), 0);

    for reset in [Request::ResetDevice, Request::ResetOwner] {
        let before = served.device.resets.load(Ordering::SeqCst);
        peer.base(&guest);
        assert!(peer.done(reset, &[], &[]));
        assert_eq!(served.device.resets.load(Ordering::SeqCst), before + 1, "{reset}");
        guest.clear();
        negotiate_again(&peer, &guest, features);
        peer.start(&guest, 0, true);
        guest.round_trip(1);
    }
}

#[test]
fn a_ring_that_has_run_and_does_not_run_is_idle() {
    let served = Served::new();
    let (peer, mut guest) = ready(&served, 0);
    let front_end = served.device.front_end();
    let is_idle = || front_end.is_queue_stopped(1);
    peer.start(&guest, 0, false);
    assert!(!is_idle(), "it is about to run");
    for enable in [true, false, true] {
        assert!(peer.enable(&guest, enable));
        assert_eq!(is_idle(), !enable);
    }
    assert!(peer.share(&guest));
    assert!(!is_idle(), "it continues in the new memory");
    peer.base(&guest);
    assert!(is_idle() && !front_end.is_queue_stopped(0) && !front_end.is_queue_stopped(64));
    peer.start(&guest, 0, true);
    assert!(!is_idle());
    // More buffers than there are descriptors.
    vm_memory::Bytes::write_obj(&guest.memory, 100_u16, Guest::at(0x2002)).unwrap();
    guest.kick();
    until("it is noticed", is_idle);
    assert!(peer.share(&guest));
    assert!(is_idle(), "and stays so");
    peer.base(&guest);
    guest.clear();
    peer.start(&guest, 0, true);
    assert!(!is_idle());
    peer.base(&guest);
    assert!(peer.done(Request::ResetDevice, &[], &[]));
    assert!(!is_idle(), "another driver is about to start");
}

#[test]
fn the_device_gets_the_acked_features_after_every_reset() {
    let served = Served::new();
    let (peer, mut guest) = ready(&served, 0);
    let accepted = || served.device.accepted.swap(99, Ordering::SeqCst);
    assert_eq!(accepted(), 0b10);
    peer.start(&guest, 0, true);
    guest.round_trip(0);
    assert_eq!(accepted(), 99, "once per driver");
    // Another driver, without an announcement.
    assert_eq!(peer.base(&guest), 1);
    guest.clear();
    peer.start(&guest, 0, true);
    assert_eq!((served.device.resets.load(Ordering::SeqCst), accepted()), (1, 0b10));
    // A front end that resets the device and does not negotiate again.
    peer.base(&guest);
    assert!(peer.done(Request::ResetDevice, &[], &[]));
    assert_eq!(accepted(), 99);
    guest.clear();
    peer.start(&guest, 0, true);
    assert_eq!(accepted(), 0b10);
}

/// As when a server was killed, or its VM was moved to this one.
#[test]
fn the_device_is_notified_of_a_driver_that_another_server_had() {
    let served = Served::new();
    let inherited = || served.device.inherited.load(Ordering::SeqCst);
    let (peer, mut guest) = ready(&served, 0);
    let features = peer.ask_number(Request::GetFeatures);
    peer.start(&guest, 0, true);
    guest.round_trip(0);
    let base = peer.base(&guest);
    negotiate_again(&peer, &guest, features);
    peer.start(&guest, base, true);
    guest.round_trip(1);
    assert_eq!(inherited(), 0, "it started here, and the VM was paused");
    drop(peer);

    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    assert!(peer.share(&guest));
    let mut first = Guest::new(0).beside(&guest);
    peer.start(&first, 0, true);
    assert_eq!(inherited(), 0);
    peer.start(&guest, guest.used(), true);
    assert_eq!(inherited(), 1);
    first.round_trip(0);
    peer.base(&first);
    peer.start(&first, first.used(), true);
    assert_eq!(inherited(), 1, "once");

    // The VM is loaded in an earlier state.
    let (at, _) = (peer.base(&guest), peer.base(&first));
    negotiate_again(&peer, &guest, features);
    peer.start(&guest, at.wrapping_sub(1), true);
    assert_eq!((inherited(), served.device.resets.load(Ordering::SeqCst)), (2, 2));
}

#[test]
fn a_driver_whose_rings_begin_at_the_beginning_is_another_one() {
    let served = Served::new();
    let (peer, mut guest) = ready(&served, 0);
    let features = peer.ask_number(Request::GetFeatures);
    peer.start(&guest, 0, true);
    guest.round_trip(0);
    assert_eq!(peer.base(&guest), 1);
    assert_eq!(served.device.resets.load(Ordering::SeqCst), 0);
    guest.clear();
    negotiate_again(&peer, &guest, features);
    assert_eq!(served.device.resets.load(Ordering::SeqCst), 0, "it may still be the same");
    peer.start(&guest, 0, true);
    assert_eq!(served.device.resets.load(Ordering::SeqCst), 1);
    guest.round_trip(3);

    // A driver with other features is another one, wherever its rings begin.
    let base = peer.base(&guest);
    negotiate_again(&peer, &guest, features & !0b10);
    assert_eq!(served.device.resets.load(Ordering::SeqCst), 2);
    peer.start(&guest, base, true);
    guest.round_trip(4);
}

#[test]
fn a_ring_that_ran_when_another_driver_was_detected_loses_nothing() {
    let served = Served::new();
    let (peer, mut guest) = ready(&served, 0);
    let features = peer.ask_number(Request::GetFeatures);
    // The first queue, at another address in the same memory.
    let mut first = Guest::new(0).beside(&guest);
    peer.start(&first, 0, true);
    peer.start(&guest, 0, true);
    guest.round_trip(0);
    assert_eq!((peer.base(&first), peer.base(&guest)), (0, 1));
    first.clear();
    guest.clear();
    negotiate_again(&peer, &guest, features);
    // The index at which the first one begins is no evidence, so it runs, and the device takes a buffer out of it.
    served.device.holds.store(true, Ordering::SeqCst);
    peer.start(&first, 0, true);
    first.offer(0, [5; 4]);
    first.kick();
    until("the device holds it", || served.device.held.lock().len() == 1);
    peer.start(&guest, 0, true);
    assert_eq!(served.device.resets.load(Ordering::SeqCst), 1);
    until("it comes back", || first.used() == 1);
    first.round_trip(1);
    guest.round_trip(1);
    assert_eq!(first.buffer(0), [6; 4]);
}
