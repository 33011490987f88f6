//! Packets of multifd channels: what can be written reads back, and what cannot be true is refused.

use limosa_stream::multifd::{
    Compression, INITIAL_LEN, InitialPacket, MAGIC, PACKET_LEN, PACKET_PAGES, PAYLOAD_LIMIT, PREFIX_LEN, Packet,
};
use limosa_stream::{Configuration, ErrorKind, MultifdRules, StreamError, UnsupportedFeature};
use proptest::collection::vec;
use proptest::prelude::*;

fn compression() -> impl Strategy<Value = Compression> {
    prop_oneof![Just(Compression::None), Just(Compression::Zlib), Just(Compression::Zstd)]
}

fn offsets() -> impl Strategy<Value = Vec<u64>> {
    vec((0..u64::MAX >> 12).prop_map(|page| page << 12), 0..=PACKET_PAGES)
}

fn decode(bytes: &[u8], offsets: &mut [u64; PACKET_PAGES]) -> Result<Option<(u32, usize)>, StreamError> {
    Ok(Packet::decode(bytes, 0, offsets)?.map(|packet| (packet.payload_len, packet.normal.len())))
}

fn refused(bytes: &[u8]) -> StreamError {
    decode(bytes, &mut [0; PACKET_PAGES]).expect_err("the packet is wrong")
}

/// A packet of two normal pages and a zero page.
fn sample() -> [u8; PACKET_LEN] {
    let mut out = [0; PACKET_LEN];
    let packet =
        Packet { block: "pc.ram", normal: &[0xff000, 0xfe000], zero: &[0x1000], payload_len: 8192, ..Packet::sync(7) };
    Packet { sync: false, ..packet }.encode(&mut out).unwrap();
    out
}

fn patched(at: usize, bytes: &[u8]) -> StreamError {
    let mut packet = sample();
    packet[at..at + bytes.len()].copy_from_slice(bytes);
    refused(&packet)
}

proptest! {
    #[test]
    fn a_packet_that_was_written_reads_back_the_same(
        sync in any::<bool>(),
        compression in compression(),
        packet_num in any::<u64>(),
        block in "[!-~]{1,255}",
        offsets in offsets(),
        split in any::<prop::sample::Index>(),
        compressed in 1..=PAYLOAD_LIMIT,
    ) {
        let (normal, zero) = offsets.split_at(split.index(offsets.len() + 1));
        let payload_len = match (compression, normal.len()) {
            (_, 0) => 0,
            (Compression::None, pages) => u32::try_from(pages).unwrap() * 4096,
            _ => compressed,
        };
        let block = if offsets.is_empty() { "" } else { block.as_str() };
        let packet = Packet { sync, compression, packet_num, block, normal, zero, payload_len };
        let (mut bytes, mut again, mut room) = ([0xaa; PACKET_LEN], [0x55; PACKET_LEN], [0; PACKET_PAGES]);
        packet.encode(&mut bytes).unwrap();
        let read = Packet::decode(&bytes, 5, &mut room).unwrap().expect("it is whole");
        prop_assert_eq!(read, packet);
        read.encode(&mut again).unwrap();
        prop_assert_eq!(bytes, again);
    }

    #[test]
    fn what_is_read_keeps_its_own_counts(
        flags in 0..0x80u32, counts in vec(prop_oneof![0..200u32, any::<u32>()], 3), length in any::<u32>(),
    ) {
        let mut bytes = sample();
        bytes[8..12].copy_from_slice(&flags.to_be_bytes());
        for (at, count) in [12, 16, 32].into_iter().zip(counts) {
            bytes[at..at + 4].copy_from_slice(&count.to_be_bytes());
        }
        bytes[20..24].copy_from_slice(&length.to_be_bytes());
        if let Ok(Some(packet)) = Packet::decode(&bytes, 0, &mut [0; PACKET_PAGES]) {
            prop_assert!(packet.normal.len() + packet.zero.len() <= PACKET_PAGES);
            prop_assert_eq!(packet.normal.is_empty(), packet.payload_len == 0);
            prop_assert!(packet.payload_len <= PAYLOAD_LIMIT);
        }
    }

    #[test]
    fn an_initial_packet_that_was_written_reads_back_the_same(uuid in any::<[u8; 16]>(), id in any::<u8>()) {
        let packet = InitialPacket { uuid, id };
        prop_assert_eq!(InitialPacket::decode(&packet.encode()).unwrap(), packet);
    }
}

#[test]
fn the_bytes_are_those_that_qemu_sends() {
    let initial = InitialPacket { uuid: [0; 16], id: 1 }.encode();
    assert_eq!(initial[..8], [0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]);
    assert_eq!((initial[24], initial.len()), (1, INITIAL_LEN));
    let mut sync = [1; PACKET_LEN];
    Packet::sync(0).encode(&mut sync).unwrap();
    assert_eq!(sync[..12], [0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1, 0, 0, 0, 1]);
    assert!(sync[12..].iter().all(|byte| *byte == 0));
    let data = sample();
    assert_eq!(data[12..24], [0, 0, 0, 128, 0, 0, 0, 2, 0, 0, 0x20, 0]);
    assert_eq!(data[24..36], [0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 1]);
    assert_eq!(data[64..71], *b"pc.ram\0");
    assert_eq!(data[320..328], [0, 0, 0, 0, 0, 0x0f, 0xf0, 0]);
}

#[test]
fn a_packet_is_awaited_whole_but_its_beginning_is_judged_at_once() {
    let mut packet = sample();
    for length in 0..PACKET_LEN {
        assert_eq!(decode(&packet[..length], &mut [0; PACKET_PAGES]).unwrap(), None);
    }
    packet[11] |= 0x40;
    assert_eq!(*refused(&packet[..PREFIX_LEN]).kind(), ErrorKind::Unsupported(UnsupportedFeature::MultifdDeviceState));
}

#[test]
fn what_a_packet_says_wrongly_is_named_with_its_offset() {
    assert_eq!(patched(0, b"QEVM").offset(), 0);
    assert!(patched(7, &[2]).to_string().contains("multifd version 1"));
    assert!(patched(8, &0x80u32.to_be_bytes()).to_string().contains("flags of a packet"));
    assert!(patched(8, &0x08u32.to_be_bytes()).to_string().contains("compressed by qpl"));
    assert!(patched(8, &0x06u32.to_be_bytes()).to_string().contains("at most one compression method"));
    assert!(patched(12, &129u32.to_be_bytes()).to_string().contains("room for pages in a packet is 129"));
    assert!(patched(16, &129u32.to_be_bytes()).to_string().contains("number of normal pages in a packet is 129"));
    assert!(patched(32, &127u32.to_be_bytes()).to_string().contains("number of zero pages in a packet is 127"));
    assert_eq!(patched(20, &8191u32.to_be_bytes()).offset(), 20);
    assert!(patched(64, &[0]).to_string().contains("a RAM block name"));
    assert!(patched(64, &[0xff]).to_string().contains("a RAM block name"));
    assert!(patched(64, &[b'a'; 256]).to_string().contains("with a NUL behind it"));
    assert_eq!(patched(320 + 8 + 7, &[1]).offset(), 328);
    let mut initial = InitialPacket { uuid: [0; 16], id: 0 }.encode();
    initial[..4].copy_from_slice(b"GET ");
    assert!(InitialPacket::decode(&initial).unwrap_err().to_string().contains("11 22 33 44"));
}

#[test]
fn a_compressed_payload_has_a_length_between_one_byte_and_the_limit() {
    let of = |length: u32| {
        let mut packet = sample();
        packet[11] = 0x02;
        packet[20..24].copy_from_slice(&length.to_be_bytes());
        decode(&packet, &mut [0; PACKET_PAGES])
    };
    assert_eq!(of(1).unwrap(), Some((1, 2)));
    assert_eq!(of(PAYLOAD_LIMIT).unwrap(), Some((PAYLOAD_LIMIT, 2)));
    assert!(of(0).unwrap_err().to_string().contains("one of 0 bytes"));
    assert!(of(PAYLOAD_LIMIT + 1).unwrap_err().to_string().contains("more than the limit"));
}

#[test]
fn without_pages_neither_name_nor_length_mean_anything() {
    let mut packet = sample();
    packet[11] = 1;
    for count in [16, 32] {
        packet[count..count + 4].fill(0);
    }
    packet[64..320].fill(0xff);
    let mut room = [0; PACKET_PAGES];
    let read = Packet::decode(&packet, 0, &mut room).unwrap().unwrap();
    assert_eq!(read, Packet::sync(7));
    assert_eq!(packet[..4], MAGIC);
}

#[test]
fn a_packet_that_cannot_be_true_is_not_written() {
    let mut out = [0; PACKET_LEN];
    let packet = Packet { block: "a", zero: &[0], ..Packet::sync(0) };
    assert!(packet.encode(&mut out).is_ok());
    assert!(Packet { block: "", ..packet }.encode(&mut out).is_err());
    assert!(Packet { block: &"a".repeat(256), ..packet }.encode(&mut out).is_err());
    assert!(Packet { block: "a\0b", ..packet }.encode(&mut out).is_err());
    assert!(Packet { zero: &[1], ..packet }.encode(&mut out).is_err());
    assert!(Packet { zero: &[0; PACKET_PAGES + 1], ..packet }.encode(&mut out).is_err());
    assert!(Packet { payload_len: 4096, ..packet }.encode(&mut out).is_err());
    assert!(Packet { normal: &[0x1000], ..packet }.encode(&mut out).is_err(), "a page without its 4096 bytes");
}

#[test]
fn the_machine_type_determines_how_its_qemu_uses_multifd() {
    let rules = |machine: &str| {
        let rules = Configuration::new(machine).multifd_rules();
        (rules.sync_at_every_section, rules.zero_pages_on_main)
    };
    for machine in [
        "pc-i440fx-7.2",
        "pc-q35-8.0",
        "pc-q35-6.2",
        "virt-7.0",
        "s390-ccw-virtio-8.0",
        "pc-q35-jammy",
        "pc-i440fx-focal-hpb",
        "pc-q35-rhel9.2.0",
        "pc-i440fx-rhel7.6.0",
    ] {
        assert_eq!(rules(machine), (true, true), "{machine}");
    }
    for machine in ["pc-q35-8.1", "pc-i440fx-8.2", "pc-q35-noble", "pc-i440fx-noble-v2", "pc-q35-rhel9.4.0"] {
        assert_eq!(rules(machine), (false, true), "{machine}");
    }
    for machine in
        ["pc-q35-9.0", "pc-i440fx-10.0", "pc-i440fx-11.1", "microvm", "pc", "", "pc-q35-rhel9.6.0", "pc-q35-plucky"]
    {
        assert_eq!(rules(machine), (false, false), "{machine}");
    }
}

#[test]
fn an_old_qemu_has_the_old_rules_for_all_types() {
    let rules =
        |major, minor| Configuration::new("microvm").multifd_rules().or_older(MultifdRules::of_version(major, minor));
    let both = |rules: MultifdRules| (rules.sync_at_every_section, rules.zero_pages_on_main);
    let found = [(7, 2), (8, 0), (8, 1), (8, 2), (9, 0), (10, 0)].map(|(major, minor)| both(rules(major, minor)));
    assert_eq!(found, [(true, true), (true, true), (false, true), (false, true), (false, false), (false, false)]);
    assert_eq!(
        both(Configuration::new("pc-q35-7.2").multifd_rules().or_older(MultifdRules::of_version(10, 0))),
        (true, true)
    );
}
