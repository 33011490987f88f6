//! A server that is killed while it has buffers: the next one processes them again, in order, and none twice.

#![allow(clippy::cast_possible_truncation, reason = "small numbers of the tests")]

use crate::peer;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::peer::{Guest, Incrementer, Peer, SIZE, until};
use limosa_testkit::Process;
use limosa_vhost::Server;
use limosa_vhost::message::Request;

const SOCKET: &str = "LIMOSA_VHOST_SOCKET";
const HOLDS: &str = "LIMOSA_VHOST_HOLDS";

/// A child process that runs the test of this file that is a server.
fn server(path: &Path, holds: bool) -> Process {
    let mut command = limosa_testkit::own_test!(serves_if_its_environment_says_so);
    command.env(SOCKET, path);
    if holds {
        command.env(HOLDS, "1");
    }
    let process = Process::spawn("server", command).unwrap();
    until("the server listens", || std::os::unix::net::UnixStream::connect(path).is_ok());
    process
}

#[test]
fn serves_if_its_environment_says_so() {
    let Some(path) = std::env::var_os(SOCKET).map(PathBuf::from) else { return };
    let device = Arc::new(Incrementer::default());
    device.holds.store(std::env::var_os(HOLDS).is_some(), Ordering::SeqCst);
    Server::bind(&path, device).unwrap().serve().unwrap();
}

/// An area as the front end keeps it: its description and its memory.
type Area = (Vec<u8>, OwnedFd);

/// Connects with that area, or requests one with room for this number of descriptors per ring.
fn connect(path: &Path, guest: &Guest, area: Result<&Area, u16>) -> (Peer, Area) {
    let peer = Peer::connect(path);
    peer.negotiate(0);
    let area = match area {
        Ok((body, memfd)) => (body.clone(), memfd.try_clone().unwrap()),
        Err(room) => {
            // As QEMU requests it: two queues, and four bytes of padding at the end.
            let mut body = vec![0; 24];
            body[16] = 2;
            body[18] = room as u8;
            peer.tell(Request::GetInflightFd, &body, &[]);
            let (body, mut descriptors) = peer.answer(Request::GetInflightFd).unwrap();
            assert_eq!((body.len(), descriptors.len()), (24, 1));
            (body, descriptors.remove(0))
        }
    };
    assert!(peer.done(Request::SetInflightFd, &area.0, &[area.1.as_fd()]));
    assert!(peer.share(guest));
    (peer, area)
}

#[test]
fn buffers_of_a_killed_server_are_processed_again() {
    killed_with_buffers(SIZE);
}

/// As when a driver chooses a smaller ring than the device would have.
#[test]
fn an_area_for_a_larger_ring_is_used_as_well() {
    killed_with_buffers(4 * SIZE);
}

#[test]
fn a_ring_that_is_larger_than_its_area_is_refused() {
    let served = peer::Served::new();
    let guest = Guest::new(1);
    let (peer, (mut about, memory)) = connect(&served.path, &guest, Err(SIZE / 2));
    let number = peer::longs(&[1]);
    let kick = |peer: &Peer| {
        assert!(peer.done(Request::SetVringNum, &peer::words(&[1, u32::from(SIZE)]), &[]));
        assert!(peer.done(Request::SetVringAddr, &guest.address(), &[]));
        peer.done(Request::SetVringKick, &number, &[guest.kick.as_fd()])
    };
    assert!(!kick(&peer), "it is larger than what the area is for");
    // An area for the first queue only: the second one is not tracked.
    about[16] = 1;
    assert!(peer.done(Request::SetInflightFd, &about, &[memory.as_fd()]));
    assert!(kick(&peer));
}

fn killed_with_buffers(room: u16) {
    let folder = limosa_testkit::scratch().unwrap();
    let path = folder.path().join("device.sock");
    let mut guest = Guest::new(1);

    let first = server(&path, true);
    let (peer, area) = connect(&path, &guest, Err(room));
    peer.start(&guest, 0, true);
    for head in [5, 2, 6] {
        guest.offer(head, [head as u8; 4]);
    }
    guest.kick();
    // All three are marked: the byte at the beginning of each descriptor's 16.
    let marked = |head: u64| {
        let mut byte = [0];
        let ring = (16 + u64::from(room) * 16).next_multiple_of(64);
        rustix::io::pread(&area.1, &mut byte, ring + 16 + head * 16).unwrap();
        byte[0] == 1
    };
    until("the server has all three", || [5, 2, 6].into_iter().all(marked));
    first.kill();
    assert_eq!(guest.used(), 0);
    assert!(peer.answer(Request::GetFeatures).is_none());

    // One more is offered while there is no server.
    guest.offer(0, [7; 4]);
    let second = server(&path, false);
    guest.calls();
    let (peer, area) = connect(&path, &guest, Ok(&area));
    // QEMU takes the index of the used ring, since it has received no other.
    peer.start(&guest, guest.used(), true);
    until("all four have come back", || guest.used() == 4);
    let order: Vec<u32> =
        (0..4).map(|place| vm_memory::Bytes::read_obj(&guest.memory, Guest::at(0x3004 + place * 8)).unwrap()).collect();
    assert_eq!(order, [5, 2, 6, 0], "in the order in which they were taken");
    assert_eq!((guest.buffer(5), guest.buffer(0)), ([6; 4], [8; 4]), "once each");
    until("the driver is called", || guest.calls() > 0);
    guest.round_trip(3);
    second.kill();

    // No buffer was in flight this time.
    let _third = server(&path, false);
    let (peer, _area) = connect(&path, &guest, Ok(&area));
    peer.start(&guest, guest.used(), true);
    guest.round_trip(1);
    assert_eq!(guest.used(), 6);
}
