//! The step of a page allocates nothing, in any stream: it runs millions of times.

// Counting needs an allocator of our own; it only counts and hands on to the system's.
#![allow(unsafe_code)]

use limosa_stream::{Configuration, Decoder, Event, RamBlock, RecordEncoder, RecordKind, Step, ram, section};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        LARGEST.with(|largest| largest.set(largest.get().max(layout.size())));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`, and `pointer` came from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

#[test]
fn page_records_and_empty_sections_are_decoded_without_allocating() {
    let blocks = [RamBlock::new("pc.ram", 1 << 30), RamBlock::new("vga.vram", 1 << 24)];
    let mut stream = Vec::new();
    Configuration::new("pc").encode(&mut stream).unwrap();
    ram::encode_ram_start(2, &blocks, &mut stream).unwrap();
    let mut records = RecordEncoder::new(&blocks).unwrap();
    for page in 0..3000 {
        section::encode_part(2, &mut stream);
        records.append(RecordKind::Page, 0, page * 4096, &mut stream).unwrap();
        records.append(RecordKind::Zero, 0, page * 4096, &mut stream).unwrap();
        records.append(RecordKind::Zero, 1, page * 4096, &mut stream).unwrap();
        ram::encode_eos(2, &mut stream);
    }
    section::encode_eof(&mut stream);
    let mut decoder = Decoder::new();
    let (mut at, mut pages, mut before) = (0, 0, None);
    loop {
        let Step::Event { consumed, event } = decoder.step(&stream[at..]).unwrap() else { panic!("incomplete") };
        at += consumed;
        match event {
            Event::RamStart(_) => before = Some(allocations()),
            Event::Page { .. } | Event::Zero { .. } => pages += 1,
            Event::EndOfStream => break,
            _ => {}
        }
    }
    assert_eq!(pages, 9000);
    assert_eq!(Some(allocations()), before);
}

#[test]
fn records_are_encoded_without_allocating() {
    let blocks = [RamBlock::new("pc.ram", 1 << 30), RamBlock::new("vga.vram", 1 << 24)];
    let mut records = RecordEncoder::new(&blocks).unwrap();
    let mut out = [0; ram::RECORD_LIMIT];
    let before = allocations();
    let mut bytes = 0;
    for page in 0..1000 {
        bytes += records.encode(RecordKind::Page, 0, page * 4096, &mut out).unwrap();
        bytes += records.encode(RecordKind::Zero, 1, page * 4096, &mut out).unwrap();
    }
    assert_eq!(bytes, 1000 * (8 + 7 + 8 + 9 + 1));
    assert_eq!(allocations(), before);
}

#[test]
fn a_length_from_outside_is_not_allocated_before_its_bytes_are_there() {
    LARGEST.with(|largest| largest.set(0));
    let mut decoder = limosa_stream::ReturnDecoder::new(1 << 40);
    decoder.push(b"\0\x05\0\x02\x01a\0\0\0\x01\0\0\0\0");
    assert_eq!(decoder.next_message().unwrap(), None, "a bitmap of 4 GiB is announced");
    assert_eq!(Configuration::decode(b"QEVM\0\0\0\x03\x07\0\0\0\xff").unwrap(), None);
    let mark = b"\x04\x7e\0\0\0\0\0\x06\x03\xff\xff\xff{\"devices\":[";
    let mut tail = limosa_stream::DeviceTailFinder::new(0, 1 << 30);
    assert_eq!(tail.find(mark).unwrap(), None, "a description of 64 MiB is announced");
    assert!(LARGEST.with(Cell::get) < 1024);
}
