//! Memory that comes by postcopy: a device waits for a page that is missing until the front end has brought it.
#![allow(unsafe_code, reason = "an ioctl of userfaultfd")]

use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};

use limosa_vhost::message::Request;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::ioctl::{Setter, ioctl, opcode};
use vm_memory::Bytes as _;

use crate::peer::{Guest, Peer, Served, longs, table, until};

const PAGE_FAULT: u64 = 1 << 8;
/// Where the first buffer is in the guest's memory.
const BUFFER: u64 = 0x8000;

#[repr(C)]
struct Range {
    start: u64,
    length: u64,
}

/// Wakes who waits in a page.
fn wake(faults: &OwnedFd, page: u64) {
    const WAKE: rustix::ioctl::Opcode = opcode::read::<Range>(0xaa, 2);
    // SAFETY: the kernel reads a range, and wakes threads.
    unsafe { ioctl(faults, Setter::<WAKE, Range>::new(Range { start: page, length: 4096 })) }.unwrap();
}

/// Takes the page of the next fault.
fn next_fault(faults: &OwnedFd) -> u64 {
    let mut file = File::from(faults.try_clone().unwrap());
    let mut message = [0; 32];
    until("a fault", || file.read_exact(&mut message).is_ok());
    assert_eq!(message[0], 0x12, "a page fault");
    u64::from_ne_bytes(message[16..24].try_into().unwrap()) & !4095
}

/// Connects, and begins postcopy; returns where faults are reported.
fn begin(served: &Served) -> (Peer, OwnedFd) {
    let peer = Peer::connect(&served.path);
    assert_ne!(peer.ask_number(Request::GetProtocolFeatures) & PAGE_FAULT, 0, "postcopy is offered");
    peer.negotiate(0);
    peer.tell(Request::PostcopyAdvise, &[], &[]);
    let (body, mut descriptors) = peer.answer(Request::PostcopyAdvise).unwrap();
    assert!(body.is_empty());
    assert!(peer.done(Request::PostcopyListen, &[], &[]));
    (peer, descriptors.pop().expect("a descriptor of faults"))
}

/// The guest's memory, without the end of its last page: the kernel registers pages.
fn region(guest: &Guest) -> [u64; 4] {
    let [at, length, user, offset] = guest.region();
    [at, length - 512, user, offset]
}

/// Shares the guest's memory; returns where the server has mapped it.
fn share(peer: &Peer, guest: &Guest) -> u64 {
    let region = region(guest);
    peer.tell(Request::SetMemTable, &table(&[region]), &[guest.file.as_fd()]);
    let (body, _) = peer.answer(Request::SetMemTable).unwrap();
    let fields: Vec<_> = body[8..].chunks_exact(8).map(|field| u64::from_le_bytes(field.try_into().unwrap())).collect();
    assert_eq!([fields[0], fields[1], fields[3]], [region[0], region[1], region[3]]);
    // The front end knows it now.
    peer.tell(Request::SetMemTable, &longs(&[0]), &[]);
    fields[2]
}

/// Offers a buffer whose page is missing.
fn offer_missing(guest: &mut Guest, head: u16) {
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&guest.file, punch, BUFFER, 4096).unwrap();
    // A ring that was started just now is looked at without a kick.
    guest.offer_as_it_is(head);
    guest.kick();
}

#[test]
fn a_device_waits_for_a_page_that_has_not_come() {
    let served = Served::new();
    let (peer, faults) = begin(&served);
    let mut guest = Guest::new(1);
    guest.clear();
    let mapped = share(&peer, &guest);
    peer.start(&guest, 0, true);
    offer_missing(&mut guest, 0);
    assert_eq!(next_fault(&faults), mapped + BUFFER);
    assert_eq!(guest.used(), 0);
    guest.memory.write_slice(&[1, 2, 3, 4], Guest::at(BUFFER)).unwrap();
    wake(&faults, mapped + BUFFER);
    until("the buffer is given back", || guest.used() == 1);
    assert_eq!(guest.buffer(0), [2, 3, 4, 5]);
    // Regions one by one, as QEMU adds them.
    assert!(peer.done(Request::RemMemReg, &[longs(&[0]), longs(&region(&guest))].concat(), &[]));
    let mut body = [longs(&[0]), longs(&region(&guest))].concat();
    peer.tell(Request::AddMemReg, &body, &[guest.file.as_fd()]);
    let (answer, _) = peer.answer(Request::AddMemReg).unwrap();
    let again = u64::from_le_bytes(answer[24..32].try_into().unwrap());
    body[24..32].copy_from_slice(&again.to_le_bytes());
    assert_eq!(answer, body);
    peer.tell(Request::AddMemReg, &longs(&[0]), &[]);
    peer.start(&guest, 1, true);
    offer_missing(&mut guest, 1);
    assert_eq!(next_fault(&faults), again + BUFFER);
    // All has come: what is missing now is zeros.
    assert!(peer.done(Request::PostcopyEnd, &[], &[]));
    until("the buffer is given back", || guest.used() == 2);
    assert_eq!(guest.buffer(1), [1; 4]);
    guest.round_trip(2);
}

#[test]
fn a_front_end_that_goes_before_the_memory_has_come_blocks_nobody() {
    let mut served = Served::new();
    let (peer, faults) = begin(&served);
    let mut guest = Guest::new(1);
    guest.clear();
    share(&peer, &guest);
    peer.start(&guest, 0, true);
    offer_missing(&mut guest, 0);
    next_fault(&faults);
    // The descriptor is still open here, and nobody answers.
    drop(peer);
    until("the buffer is given up", || guest.used() == 1);
    let (peer, _) = begin(&served);
    offer_missing(&mut guest, 1);
    drop(peer);
    served.stop().unwrap();
}

#[test]
fn postcopy_in_the_wrong_order_is_refused() {
    let served = Served::new();
    let peer = Peer::connect(&served.path);
    peer.negotiate(0);
    assert!(!peer.done(Request::PostcopyListen, &[], &[]), "it was not announced");
    let mut guest = Guest::new(1);
    assert!(peer.share(&guest));
    assert!(peer.done(Request::PostcopyEnd, &[], &[]));
    peer.start(&guest, 0, true);
    guest.round_trip(0);
}
