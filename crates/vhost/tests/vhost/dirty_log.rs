//! The dirty log while a VM migrates.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::Ordering;

use limosa_vhost::message::Request;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::peer::{Guest, Peer, Served, longs};

const LOG_ALL: u64 = 1 << 26;

/// A log of 4 KiB: of the guest's addresses up to 128 MiB.
fn log() -> File {
    let memfd = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memfd, 4096).unwrap();
    File::from(memfd)
}

/// Takes the pages that are marked.
fn take(log: &File) -> Vec<u64> {
    let mut bytes = [0; 4096];
    log.read_exact_at(&mut bytes, 0).unwrap();
    log.write_all_at(&[0; 4096], 0).unwrap();
    (0..4096 * 8).filter(|page| bytes[page / 8] & 1 << (page % 8) != 0).map(|page| page as u64).collect()
}

fn page(offset: u64) -> u64 {
    Guest::at(offset).0 / 4096
}

#[test]
fn pages_that_are_written_while_a_vm_migrates_are_marked_and_the_ring_runs_on() {
    let served = Served::new();
    let peer = Peer::connect(&served.path);
    peer.negotiate(LOG_ALL);
    let features = peer.ask_number(Request::GetFeatures);
    assert_ne!(features & LOG_ALL, 0, "it is offered");
    let mut guest = Guest::new(1);
    assert!(peer.share(&guest));
    peer.start(&guest, 0, true);
    guest.round_trip(0);
    let resets = served.device.resets.load(Ordering::SeqCst);

    // The migration begins, as QEMU does it: the log, the features, the addresses.
    let log = log();
    peer.tell(Request::SetLogBase, &longs(&[4096, 0]), &[log.as_fd()]);
    assert!(peer.answer(Request::SetLogBase).is_some());
    assert!(peer.done(Request::SetFeatures, &features.to_le_bytes(), &[]));
    assert!(peer.done(Request::SetVringAddr, &guest.logged_address(), &[]));
    take(&log);
    guest.round_trip(1);
    peer.ask_number(Request::GetQueueNum);
    // The used ring, and the buffer.
    assert_eq!(take(&log), [page(0x3000), page(0x8000)]);
    guest.round_trip(2);
    peer.ask_number(Request::GetQueueNum);
    assert_eq!(take(&log), [page(0x3000), page(0x8000)]);

    // Its end.
    assert!(peer.done(Request::SetFeatures, &(features & !LOG_ALL).to_le_bytes(), &[]));
    assert!(peer.done(Request::SetVringAddr, &guest.address(), &[]));
    guest.round_trip(3);
    peer.base(&guest);
    assert!(take(&log).is_empty());
    assert_eq!(served.device.resets.load(Ordering::SeqCst), resets, "the driver is the same all the time");
}

#[test]
fn a_log_that_does_not_fit_its_file_is_refused_and_a_short_one_marks_what_it_has() {
    for (body, has_descriptor) in [
        (longs(&[8192, 0]), true),
        (longs(&[4096, 4096]), true),
        (longs(&[0, 0]), true),
        (longs(&[u64::MAX, 4096]), true),
        (longs(&[4096, 1]), true),
        (longs(&[4096, 0]), false),
        (longs(&[4096]), true),
    ] {
        let served = Served::new();
        let peer = Peer::connect(&served.path);
        peer.negotiate(0);
        let log = log();
        let descriptors = if has_descriptor { vec![log.as_fd()] } else { vec![] };
        peer.tell(Request::SetLogBase, &body, &descriptors);
        assert!(peer.answer(Request::SetLogBase).is_none(), "{body:?}: there is no answer that could report it");
    }
    // The guest's memory begins at page 256, which is bit 0 of byte 32.
    let served = Served::new();
    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    let log = log();
    peer.tell(Request::SetLogBase, &longs(&[33, 0]), &[log.as_fd()]);
    assert!(peer.answer(Request::SetLogBase).is_some());
    let mut guest = Guest::new(1);
    assert!(peer.share(&guest));
    peer.start(&guest, 0, true);
    assert!(peer.done(Request::SetVringAddr, &guest.logged_address(), &[]));
    guest.round_trip(0);
    peer.base(&guest);
    assert_eq!(take(&log), [page(0x3000)], "the buffer's page is behind the end of the log");
}
