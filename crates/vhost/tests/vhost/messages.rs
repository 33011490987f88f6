//! Replies of a server to valid and invalid messages.

#![allow(clippy::cast_possible_truncation, reason = "small numbers of the tests")]

use crate::peer;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::peer::{Guest, Incrementer, Peer, Served, longs, table, until, words};
use limosa_vhost::message::Request;
use limosa_vhost::{FaultKind, Server};

#[test]
fn a_piece_of_configuration_has_the_requested_length() {
    let served = Served::new();
    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    for (offset, size) in [(0, 4), (0, 16), (12, 8), (200, 56), (4_000_000_000, 1), (0, 256)] {
        let body = peer.ask(Request::GetConfig, &[words(&[offset, size, 0]), vec![9; size as usize]].concat());
        let expected: Vec<u8> = (0..size).map(|at| offset + at).map(|at| if at < 16 { at as u8 } else { 0 }).collect();
        assert_eq!(body, [words(&[offset, size, 0]), expected].concat());
    }
    assert_eq!(peer.ask(Request::GetConfig, &words(&[0, 300, 0])), [] as [u8; 0], "there is no such piece");
    assert!(peer.done(Request::SetConfig, &[words(&[4, 4, 0]), vec![1, 2, 3, 4]].concat(), &[]));
    assert_eq!(*served.device.written.lock(), [(4, vec![1, 2, 3, 4])]);
}

#[test]
fn a_configuration_change_is_sent_without_waiting_for_a_front_end_that_does_not_read() {
    let served = Served::new();
    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    assert!(!served.device.front_end().config_changed(), "there is no channel yet");
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    assert!(peer.done(Request::SetBackendReqFd, &[], &[theirs.as_fd()]));
    drop(theirs);
    let front_end = served.device.front_end();
    assert!(front_end.config_changed());
    let mut message = [0; 12];
    ours.read_exact(&mut message).unwrap();
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    for _ in 0..100_000 {
        assert!(front_end.config_changed(), "the unread message covers it");
    }
    drop(peer);
    until("the front end has disconnected", || !front_end.is_connected());
    assert!(!front_end.config_changed());
}

#[test]
fn memory_that_does_not_match_its_description_is_refused() {
    let served = Served::new();
    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    let (guest, other) = (Guest::new(0), Guest::new(0));
    let good = guest.region();
    let [at, length, user, _] = good;
    let file = guest.file.as_fd();
    let event = guest.kick.as_fd();
    for (why, regions, descriptors) in [
        ("longer than its file", vec![[at, length + 4096, user, 0]], vec![file]),
        ("beyond the end of its file", vec![[at, length, user, 4096]], vec![file]),
        ("beyond the end of the address space", vec![[u64::MAX - 4095, length, user, 0]], vec![file]),
        ("beyond the end of file offsets", vec![[at, length, user, u64::MAX - 4095]], vec![file]),
        ("beyond the end of user addresses", vec![[at, length, u64::MAX - 4095, 0]], vec![file]),
        ("nothing", vec![[at, 0, user, 0]], vec![file]),
        ("within a page of the guest", vec![[at + 512, 4096, user, 0]], vec![file]),
        ("within a page of its file", vec![[at, 4096, user, 512]], vec![file]),
        ("no file", vec![good], vec![event]),
        ("without a descriptor", vec![good], vec![]),
        ("with too many descriptors", vec![good], vec![file, file]),
        ("twice in the guest", vec![good, [at + 4096, length, user + (1 << 30), 0]], vec![file, other.file.as_fd()]),
        ("twice in the front end", vec![good, [1 << 40, length, user + 4096, 0]], vec![file, other.file.as_fd()]),
    ] {
        assert!(!peer.done(Request::SetMemTable, &table(&regions), &descriptors), "{why}");
    }
    assert!(peer.share(&guest));
    assert_eq!(served.device.memories.lock().len(), 1);
    assert!(served.server.fault_count(FaultKind::Refused) >= 12);
}

#[test]
fn invalid_rings_are_refused() {
    let served = Served::new();
    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    let guest = Guest::new(1);
    assert!(peer.share(&guest));
    assert!(!peer.done(Request::SetVringKick, &longs(&[1]), &[guest.kick.as_fd()]), "it has no address yet");
    for size in [0, 3, 65536] {
        assert!(!peer.done(Request::SetVringNum, &words(&[1, size]), &[]));
    }
    assert!(peer.done(Request::SetVringNum, &words(&[1, 32768]), &[]));
    assert!(!peer.done(Request::SetVringNum, &words(&[2, 8]), &[]), "there are two");
    assert!(!peer.done(Request::SetVringBase, &words(&[1, 70_000]), &[]));
    let bad = [words(&[1, 0]), longs(&[peer::USER + (1 << 20) - 16, peer::USER, peer::USER, 0])].concat();
    assert!(peer.done(Request::SetVringAddr, &bad, &[]));
    assert!(!peer.done(Request::SetVringKick, &longs(&[1]), &[guest.kick.as_fd()]), "it ends outside");
    assert!(!peer.done(Request::SetVringKick, &longs(&[1 | 1 << 8]), &[]), "rings are not polled");
    assert!(!peer.done(Request::SetVringKick, &longs(&[1]), &[guest.file.as_fd()]), "a file carries no notifications");
    peer.start(&guest, 0, true);
}

#[test]
fn a_front_end_with_invalid_messages_is_disconnected_and_the_next_one_is_served() {
    let served = Served::new();
    let guest = Guest::new(0);
    let many = [guest.file.as_fd(); 9];
    type Wrong<'a> = (&'a str, Box<dyn Fn(&Peer) + 'a>);
    let wrongs: [Wrong<'_>; 6] = [
        ("a wrong version", Box::new(|peer| peer.send_raw(1, 2, &[], &[]))),
        ("an answer", Box::new(|peer| peer.send_raw(1, 1 | 4, &[], &[]))),
        ("a body without end", Box::new(|peer| (&peer.0).write_all(&words(&[5, 1, u32::MAX])).unwrap())),
        ("too many descriptors", Box::new(|peer| peer.send_raw(5, 1, &table(&[]), &many))),
        ("an unknown request", Box::new(|peer| peer.send_raw(4711, 1, &[], &[]))),
        ("features that were not offered", Box::new(|peer| peer.send_raw(2, 1, &u64::MAX.to_le_bytes(), &[]))),
    ];
    for (what, say) in wrongs {
        let peer = Peer::connect(&served.path);
        say(&peer);
        assert!(peer.answer(Request::GetFeatures).is_none(), "{what}");
    }
    assert_eq!((served.server.fault_count(FaultKind::Message), served.server.fault_count(FaultKind::Unknown)), (4, 1));
    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    peer.send_raw(4711, 1 | 8, &[], &[]);
    assert_ne!(peer.answer_to(4711), [0; 8], "a front end that gets acknowledgements stays connected");
    assert_eq!(served.device.accepted.load(Ordering::SeqCst), 0b10);
    assert_eq!(served.server.connection_count(), 7);
}

#[test]
fn a_server_stops_in_the_middle_of_a_message_and_takes_its_socket_with_it() {
    let mut served = Served::new();
    assert_eq!(std::fs::metadata(&served.path).unwrap().permissions().mode() & 0o777, 0o600);
    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    (&peer.0).write_all(&[1, 0, 0]).unwrap();
    served.stop().unwrap();
    assert!(peer.answer(Request::GetFeatures).is_none());
    assert!(served.device.resets.load(Ordering::SeqCst) > 0);
    let path = served.path.clone();
    let folder = path.parent().unwrap().to_owned();
    drop(served);
    assert!(!folder.exists());
}

#[test]
fn a_socket_in_use_is_kept_and_a_stale_one_is_replaced() {
    let served = Served::new();
    let device = || Arc::new(Incrementer::default());
    assert!(Server::bind(&served.path, device()).is_err());
    let folder = limosa_testkit::scratch().unwrap();
    let path = folder.path().join("left");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let server = Server::bind(&path, device()).unwrap();
    drop(server);
    assert!(!path.exists());
    std::fs::write(&path, "no socket").unwrap();
    assert!(Server::bind(&path, device()).is_err());
}

/// Stops the server in a thread; returns its result and how long that took.
fn stop_anyway(mut served: Served) -> (Result<(), limosa_vhost::ServerError>, Duration) {
    let began = Instant::now();
    let (says, said) = std::sync::mpsc::channel();
    let stopping = std::thread::spawn(move || {
        let ended = served.stop();
        says.send((ended, began.elapsed())).unwrap();
    });
    let said = said.recv_timeout(Duration::from_secs(30)).expect("it stops regardless of the front end");
    stopping.join().unwrap();
    said
}

#[test]
fn a_call_descriptor_that_blocks_does_not_keep_a_server_from_stopping() {
    let served = Served::new();
    let peer = Peer::connect(&served.path);
    peer.negotiate(1 << 29);
    let mut guest = Guest::new(1);
    assert!(peer.share(&guest));
    peer.start(&guest, 0, true);
    guest.round_trip(0);
    until("the driver is called", || guest.calls() > 0);
    // The front end shares the open file description: it makes it blocking again, and full.
    rustix::io::ioctl_fionbio(&guest.call, false).unwrap();
    rustix::io::write(&guest.call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    guest.offer(1, [1, 2, 3, 4]);
    guest.kick();
    until("the buffer is given back, and the call is next", || guest.used() == 2);
    let device = served.device.clone();
    let (ended, took) = stop_anyway(served);
    if let Err(error) = ended {
        assert!(matches!(error, limosa_vhost::ServerError::StopBlocked { .. }), "{error}");
        assert!(took >= Duration::from_secs(5));
    }
    // The blocked threads continue and end when the front end unblocks them.
    assert!(guest.calls() > 0);
    until("the device is reset", || device.resets.load(Ordering::SeqCst) > 0);
    until("its threads have ended", || Arc::strong_count(&device) == 1);
}

/// As with a page of the guest's memory that never arrives.
#[test]
fn work_that_does_not_end_does_not_keep_a_server_from_stopping() {
    let served = Served::new();
    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    let mut guest = Guest::new(1);
    assert!(peer.share(&guest));
    peer.start(&guest, 0, true);
    served.device.stuck.store(true, Ordering::SeqCst);
    guest.offer(0, [1, 2, 3, 4]);
    guest.kick();
    until("the device works", || served.device.working.load(Ordering::SeqCst));
    let (device, path) = (served.device.clone(), served.path.clone());
    let (ended, _) = stop_anyway(served);
    let error = ended.unwrap_err();
    assert!(matches!(error, limosa_vhost::ServerError::StopBlocked { .. }), "{error}");
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    assert!(!path.exists(), "no front end can connect any more");
    assert_eq!(device.resets.load(Ordering::SeqCst), 0, "not while it works");
    device.stuck.store(false, Ordering::SeqCst);
    until("its threads have ended", || Arc::strong_count(&device) == 1);
    assert!(device.resets.load(Ordering::SeqCst) > 0);
}
