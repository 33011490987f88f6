//! Rings that are as full as possible: one call reads a bounded part of a queue.

use limosa_balloon::MoreWork;
use vm_memory::{Bytes as _, GuestAddress};

use crate::bare::{Bare, WRITABLE};
use crate::machine::MIB;

const NEXT: u16 = 1;
const INDIRECT: u16 = 4;
const TABLE: u64 = MIB;
/// The maximum number of descriptors of a table.
const DESCRIPTORS: u16 = u16::MAX;

/// A table of tiny descriptors, one after the other.
fn table(bare: &Bare, flags: u16) {
    let mut bytes = Vec::new();
    for next in 1..=DESCRIPTORS {
        bytes.extend((8 * MIB).to_le_bytes());
        bytes.extend(4_u32.to_le_bytes());
        bytes.extend((NEXT | flags).to_le_bytes());
        bytes.extend(next.to_le_bytes());
    }
    bare.guest.write_slice(&bytes, GuestAddress(TABLE)).unwrap();
}

/// Processes the queue until it has all 16 buffers. Every call ends after a few of them.
fn all_in_bounded_looks(bare: &Bare, queue: usize) {
    let ring = bare.ring();
    let held = u16::from(queue == 2);
    let mut looks = 0;
    loop {
        let before = bare.used();
        let more = bare.balloon.process_queue(queue, &ring).unwrap();
        looks += 1;
        let taken = bare.used() - before;
        assert!(taken <= 2, "queue {queue}: {taken} buffers at once");
        if more == MoreWork::No {
            break;
        }
    }
    assert_eq!(bare.used(), 16 - held, "queue {queue}");
    assert!(looks >= 8);
}

#[test]
fn chains_of_very_many_descriptors_are_taken_a_few_at_a_time() {
    for queue in 0..5 {
        let bare = Bare::new();
        table(&bare, if queue > 2 { WRITABLE } else { 0 });
        for number in 0..16 {
            bare.offer(number, TABLE, u32::from(DESCRIPTORS) * 16, INDIRECT);
        }
        all_in_bounded_looks(&bare, queue);
    }
}

#[test]
fn arrays_of_very_many_numbers_are_taken_a_few_at_a_time() {
    let bare = Bare::new();
    for number in 0..16 {
        bare.offer(number, 4 * MIB, 4 << 20, 0);
    }
    all_in_bounded_looks(&bare, 1);
    assert_eq!(bare.balloon.counters().arrays, 16);
}
