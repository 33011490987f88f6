//! Requests that a device has in flight, and queues of several threads.

use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering;
use std::time::Duration;

use limosa_vhost::message::Request;

use crate::peer::{self, Guest, Peer, SIZE, Served, until, words};

/// A device with these buffers of the guest's queue in flight.
fn with_requests(heads: &[u16]) -> (Served, Peer, Guest) {
    let served = Served::new();
    served.device.is_asynchronous.store(true, Ordering::SeqCst);
    served.device.holds.store(true, Ordering::SeqCst);
    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    let mut guest = Guest::new(1);
    assert!(peer.share(&guest));
    peer.start(&guest, 0, true);
    for &head in heads {
        guest.offer(head, [0; 4]);
    }
    guest.kick();
    until("the requests are in flight", || served.device.held.lock().len() == heads.len());
    (served, peer, guest)
}

/// Whether the server answers within a moment.
fn answers(peer: &Peer) -> bool {
    let mut fds = [rustix::event::PollFd::new(&peer.0, rustix::event::PollFlags::IN)];
    let moment = rustix::fs::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    rustix::event::poll(&mut fds, Some(&moment)) == Ok(1)
}

fn complete(served: &Served) {
    served.device.holds.store(false, Ordering::SeqCst);
    served.device.front_end().kick(1);
}

#[test]
fn a_ring_that_stops_waits_for_requests_in_flight_and_takes_no_more() {
    let (served, peer, mut guest) = with_requests(&[3, 1]);
    peer.tell(Request::GetVringBase, &words(&[1, 0]), &[]);
    assert!(!answers(&peer));
    guest.offer(5, [0; 4]);
    guest.kick();
    complete(&served);
    let (body, _) = peer.answer(Request::GetVringBase).unwrap();
    assert_eq!(body[4..6], [2, 0], "the two are done, the third was not taken");
    assert_eq!((guest.used(), served.device.seen.lock().len()), (2, 2));
    peer.start(&guest, 2, true);
    until("the third is given back", || guest.used() == 3);
}

#[test]
fn disabling_a_ring_changing_memory_and_resetting_wait_too() {
    for (request, body) in [
        (Request::SetVringEnable, words(&[1, 0])),
        (Request::ResetDevice, Vec::new()),
        (Request::SetMemTable, peer::table(&[Guest::new(1).region()])),
    ] {
        let (served, peer, guest) = with_requests(&[0]);
        let file = guest.file.as_fd();
        let descriptors = if request == Request::SetMemTable { vec![file] } else { vec![] };
        peer.send_raw(request.number(), 1 | 8, &body, &descriptors);
        assert!(!answers(&peer), "{request}");
        assert_eq!(guest.used(), 0, "{request}");
        complete(&served);
        assert_eq!(peer.answer(request).unwrap().0, [0; 8], "{request}");
        assert_eq!(guest.used(), 1, "{request}");
    }
}

#[test]
fn a_front_end_that_leaves_is_followed_by_the_next_when_its_requests_are_done() {
    let (served, peer, guest) = with_requests(&[0, 1]);
    drop(peer);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(guest.used(), 0);
    complete(&served);
    until("they are given back", || guest.used() == 2);
    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    let mut guest = Guest::new(1);
    assert!(peer.share(&guest));
    peer.start(&guest, 0, true);
    guest.round_trip(usize::from(SIZE - 1).try_into().unwrap());
}

#[test]
fn a_queue_of_one_thread_does_not_wait_for_that_of_another() {
    let served = Served::new();
    served.device.threads.store(8, Ordering::SeqCst);
    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    let mut one = Guest::new(1);
    let mut other = Guest::new(0).beside(&one);
    assert!(peer.share(&one));
    peer.start(&one, 0, true);
    peer.start(&other, 0, true);
    served.device.stuck.store(true, Ordering::SeqCst);
    one.offer(2, [0; 4]);
    one.kick();
    until("the device works", || served.device.working.load(Ordering::SeqCst));
    for head in 0..SIZE {
        other.round_trip(head);
    }
    assert_eq!((peer.base(&other), one.used()), (SIZE, 0));
    served.device.stuck.store(false, Ordering::SeqCst);
    until("the buffer is given back", || one.used() == 1);
}
