//! Requests of honest clients.

use std::collections::HashMap;

use limosa_export::nbd::ServerOptions;
use limosa_export::{Export, Exports};
use limosa_image::qcow2::CreateOptions;
use limosa_image::{Format, GuestOffset};
use limosa_storage::{Buffer, block_on};
use limosa_testkit::{NbdChunk, NbdClient, NbdCommand, scratch};

use crate::bed::{Bed, CONTEXTS, assert_clean, make_qcow2, open_image, pattern, qcow2, raw};

const FUA: u16 = 1 << 0;
const NO_HOLE: u16 = 1 << 1;
const DF: u16 = 1 << 2;
const REQ_ONE: u16 = 1 << 3;
const FAST_ZERO: u16 = 1 << 4;
const PAYLOAD_LEN: u16 = 1 << 5;
const INVALID: u32 = 22;
const NO_SPACE: u32 = 28;
const NOT_SUPPORTED: u32 = 95;
const NOT_PERMITTED: u32 = 1;

#[test]
fn what_is_written_is_read_with_headers_of_every_form() {
    let folder = scratch().unwrap();
    let bed = Bed::new(qcow2(&folder, 64 << 20));
    for (number, mut client) in (1..).zip(bed.clients()) {
        assert_eq!(client.size, 64 << 20);
        let base = number * (8 << 20);
        for (at, length) in [(0, 4096), (5, 1), (100_000, 70_001), (1 << 20, 3 << 20), (5 << 20, 512)] {
            let data = pattern(base + at, length);
            assert_eq!(client.write(if at == 5 { FUA } else { 0 }, base + at, &data).unwrap(), 0);
            assert!(client.read(base + at, length).unwrap() == data);
        }
        assert_eq!(client.simple(NbdCommand::Flush, 0, 0, 0).unwrap(), 0);
        assert_eq!(client.read(base + 5, 1).unwrap(), pattern(base + 5, 1));
        // Nothing was written there.
        assert_eq!(client.read(base + (6 << 20), 100_000).unwrap(), vec![0; 100_000]);
        assert!(client.read(base, 0).unwrap().is_empty());
        assert_eq!(client.write(0, base, b"").unwrap(), 0);
        client.disconnect().unwrap();
    }
    let counters = bed.exports.find("").unwrap().counters();
    assert_eq!((counters.writes, counters.reads, counters.flushes, counters.failures), (18, 24, 3, 0));
    bed.stop();
    assert_clean(&folder.path().join("disk.qcow2"));
}

#[test]
fn holes_are_sent_as_holes_unless_one_piece_is_wanted() {
    let folder = scratch().unwrap();
    let bed = Bed::new(qcow2(&folder, 16 << 20));
    let mut client = bed.client();
    let data = pattern(1, 64 << 10);
    client.write(0, 1 << 20, &data).unwrap();
    let reply = client.request(NbdCommand::Read, 0, 0, 4 << 20).unwrap();
    let expected = [
        NbdChunk::Hole(0, 1 << 20),
        NbdChunk::Data(1 << 20, data.clone()),
        NbdChunk::Hole((1 << 20) + (64 << 10), (3 << 20) - (64 << 10)),
    ];
    assert!(reply.chunks == expected);
    let whole = client.request(NbdCommand::Read, DF, 0, 4 << 20).unwrap();
    assert_eq!(whole.chunks.len(), 1);
    assert!(whole.bytes(0, 4 << 20).unwrap() == reply.bytes(0, 4 << 20).unwrap());
    // A short read of zeros, wherever they come from.
    client.write(0, 2 << 20, &[0; 4096]).unwrap();
    let zeros = client.request(NbdCommand::Read, 0, 2 << 20, 4096).unwrap();
    assert_eq!(zeros.chunks, [NbdChunk::Hole(2 << 20, 4096)]);
    let [_, mut structured, _] = bed.clients();
    assert_eq!(structured.request(NbdCommand::Read, 0, 0, 2 << 20).unwrap().chunks[..2], expected[..2]);
}

#[test]
fn many_requests_are_in_flight_and_answered_in_any_order() {
    let folder = scratch().unwrap();
    let bed = Bed::new(qcow2(&folder, 64 << 20));
    for mut client in bed.clients() {
        // More than there is room for, so that some wait; not more than a client may send that reads nothing meanwhile:
        // replies that wait for it fill its socket, and then the room.
        let data = |number: u64| pattern(number, 4096);
        let mut asked: HashMap<_, _> =
            (0..400).map(|number| (client.send_write(0, number * 8192, &data(number)).unwrap(), number)).collect();
        while !asked.is_empty() {
            let reply = client.receive().unwrap();
            assert_eq!(reply.error, 0);
            asked.remove(&reply.cookie).unwrap();
        }
        let read = |client: &mut NbdClient, number| client.send(NbdCommand::Read, 0, number * 8192, 4096).unwrap();
        let mut asked: HashMap<_, _> = (0..400).map(|number| (read(&mut client, number), number)).collect();
        while !asked.is_empty() {
            let reply = client.receive().unwrap();
            let number = asked.remove(&reply.cookie).unwrap();
            // A simple reply has no offset.
            let simple = matches!(reply.chunks[0], NbdChunk::Data(0, _));
            assert!(reply.bytes(if simple { 0 } else { number * 8192 }, 4096).unwrap() == data(number));
        }
    }
}

#[test]
fn zeros_and_trims_give_space_back_or_keep_it() {
    let folder = scratch().unwrap();
    let bed = Bed::new(qcow2(&folder, 16 << 20));
    let mut client = bed.client();
    let status = |client: &mut NbdClient, at: u64| {
        let reply = client.request(NbdCommand::BlockStatus, REQ_ONE, at, 64 << 10).unwrap();
        let NbdChunk::Status(1, extents) = &reply.chunks[0] else { panic!("{reply:?}") };
        extents[0].1
    };
    let data = pattern(3, 1 << 20);
    client.write(0, 0, &data).unwrap();
    assert_eq!(status(&mut client, 0), 0);
    assert_eq!(client.simple(NbdCommand::WriteZeroes, NO_HOLE, 0, 64 << 10).unwrap(), 0);
    assert_eq!(client.simple(NbdCommand::WriteZeroes, FUA, 64 << 10, 64 << 10).unwrap(), 0);
    assert_eq!(client.simple(NbdCommand::Trim, FUA, 128 << 10, 64 << 10).unwrap(), 0);
    assert_eq!([0, 64 << 10, 128 << 10].map(|at| status(&mut client, at)), [3, 3, 3]);
    let mut expected = vec![0; 192 << 10];
    expected.extend_from_slice(&data[192 << 10..]);
    assert!(client.read(0, 1 << 20).unwrap() == expected);
    // Whole clusters are zeroed fast, parts of them are not.
    assert_eq!(client.simple(NbdCommand::WriteZeroes, FAST_ZERO, 256 << 10, 128 << 10).unwrap(), 0);
    assert_eq!(client.simple(NbdCommand::WriteZeroes, FAST_ZERO, (512 << 10) + 512, 64 << 10).unwrap(), NOT_SUPPORTED);
    expected[256 << 10..384 << 10].fill(0);
    assert!(client.read(0, 1 << 20).unwrap() == expected);
    assert_eq!(client.simple(NbdCommand::WriteZeroes, 0, 700_001, 3).unwrap(), 0);
    expected[700_001..700_004].fill(0);
    assert!(client.read(0, 1 << 20).unwrap() == expected);
    assert_eq!(client.simple(NbdCommand::Cache, 0, 0, 16 << 20).unwrap(), 0);
    // All of the disk at once.
    assert_eq!(client.simple(NbdCommand::WriteZeroes, 0, 0, 16 << 20).unwrap(), 0);
    assert!(client.read(0, 1 << 20).unwrap() == vec![0; 1 << 20]);
    client.disconnect().unwrap();
    bed.stop();
    assert_clean(&folder.path().join("disk.qcow2"));
}

#[test]
fn block_status_tells_holes_and_the_depth_of_a_chain() {
    let folder = scratch().unwrap();
    let (base, overlay) = (folder.path().join("base.qcow2"), folder.path().join("overlay.qcow2"));
    make_qcow2(&base, &CreateOptions::default().size(8 << 20));
    let disk = open_image(&base, Format::Qcow2, false);
    let write = |disk: &dyn limosa_image::Disk, at: u64| {
        block_on(disk.write(GuestOffset(at), Buffer::from_slice(&pattern(at, 64 << 10)).into())).unwrap();
    };
    write(&*disk, 1 << 20);
    write(&*disk, 2 << 20);
    block_on(disk.close()).unwrap();
    drop(disk);
    let options = CreateOptions::default().size(8 << 20).backing_file(Some("base.qcow2".into()));
    make_qcow2(&overlay, &options.backing_format(Some("qcow2".into())));
    let disk = open_image(&overlay, Format::Qcow2, false);
    write(&*disk, 2 << 20);
    let bed = Bed::new(disk);
    const CLUSTER: u64 = 64 << 10;
    const MIB: u64 = 1 << 20;
    let allocation = vec![(MIB, 3), (CLUSTER, 0), (MIB - CLUSTER, 3), (CLUSTER, 0), (6 * MIB - CLUSTER, 3)];
    let depth = vec![(MIB, 0), (CLUSTER, 2), (MIB - CLUSTER, 0), (CLUSTER, 1), (6 * MIB - CLUSTER, 0)];
    let [_, structured, extended] = bed.clients();
    for mut client in [structured, extended] {
        let reply = client.request(NbdCommand::BlockStatus, 0, 0, 8 * MIB).unwrap();
        assert_eq!(reply.chunks, [NbdChunk::Status(1, allocation.clone()), NbdChunk::Status(2, depth.clone())]);
        let one = client.request(NbdCommand::BlockStatus, REQ_ONE, MIB + 512, MIB).unwrap();
        let first = CLUSTER - 512;
        assert_eq!(one.chunks, [NbdChunk::Status(1, vec![(first, 0)]), NbdChunk::Status(2, vec![(first, 2)])]);
        assert_eq!(client.simple(NbdCommand::BlockStatus, 0, 0, 0).unwrap(), INVALID);
        assert_eq!(client.simple(NbdCommand::BlockStatus, 0, 0, 8 * MIB + 1).unwrap(), INVALID);
    }
}

#[test]
fn a_payload_chooses_the_contexts_of_a_block_status() {
    let bed = Bed::new(raw(pattern(1, 1 << 20)));
    let mut client = bed.client();
    assert_ne!(client.flags & 1 << 12, 0);
    let mut ask = |payload: &[u8]| {
        let cookie = client.send(NbdCommand::BlockStatus, PAYLOAD_LEN, 0, payload.len() as u64).unwrap();
        client.raw(payload).unwrap();
        let reply = client.receive().unwrap();
        assert_eq!(reply.cookie, cookie);
        (reply.error, reply.chunks)
    };
    let payload = |length: u64, ids: &[u32]| {
        let mut bytes = length.to_be_bytes().to_vec();
        ids.iter().for_each(|id| bytes.extend_from_slice(&id.to_be_bytes()));
        bytes
    };
    assert_eq!(ask(&payload(1 << 20, &[2])), (0, vec![NbdChunk::Status(2, vec![(1 << 20, 1)])]));
    for wrong in [
        payload(1 << 20, &[]),
        payload(1 << 20, &[3]),
        payload(1 << 20, &[1, 1]),
        payload(0, &[1]),
        payload(u64::MAX, &[1]),
        payload(1, &[1; 1000]),
        vec![0; 7],
    ] {
        assert_eq!(ask(&wrong), (INVALID, Vec::new()), "{wrong:?}");
    }
}

#[test]
fn requests_past_the_end_fail_and_the_connection_continues() {
    let bed = Bed::new(raw(vec![7; 1 << 20]));
    const END: u64 = 1 << 20;
    for mut client in bed.clients() {
        for (at, length) in [(END, 512), (END - 511, 512), (u64::MAX - 511, 512), (u64::MAX, 1)] {
            let data = vec![1; usize::try_from(length).unwrap()];
            assert_eq!(client.write(0, at, &data).unwrap(), NO_SPACE);
            assert_eq!(client.simple(NbdCommand::WriteZeroes, 0, at, length).unwrap(), NO_SPACE);
            for command in [NbdCommand::Read, NbdCommand::Trim, NbdCommand::Cache] {
                assert_eq!(client.simple(command, 0, at, length).unwrap(), INVALID, "{command:?}");
            }
        }
        assert_eq!(client.read(END - 512, 512).unwrap(), vec![7; 512]);
        client.disconnect().unwrap();
    }
    assert_eq!(bed.stop().protocol_errors, 0);
}

#[test]
fn a_read_only_export_refuses_changes_and_consumes_their_payload() {
    let exports = Exports::new();
    exports.add(Export::new("", raw(vec![7; 1 << 20])).unwrap().read_only(true)).unwrap();
    let bed = Bed::with(exports, ServerOptions::default());
    for mut client in bed.clients() {
        assert_eq!(client.flags & 0b1110_0010, if client.flags & 1 << 7 != 0 { 0b1000_0010 } else { 0b0000_0010 });
        assert_eq!(client.write(0, 0, &vec![1; 100_000]).unwrap(), NOT_PERMITTED);
        assert_eq!(client.simple(NbdCommand::Trim, 0, 0, 4096).unwrap(), NOT_PERMITTED);
        assert_eq!(client.simple(NbdCommand::WriteZeroes, 0, 0, 4096).unwrap(), NOT_PERMITTED);
        assert_eq!(client.simple(NbdCommand::Flush, 0, 0, 0).unwrap(), 0);
        assert_eq!(client.read(0, 4096).unwrap(), vec![7; 4096]);
    }
}

#[test]
fn a_part_of_a_disk_is_an_export_of_its_own() {
    let exports = Exports::new();
    let disk = raw((0..=255).flat_map(|number| [number; 4096]).collect());
    for (name, offset, size) in [("first", 0, Some(4096)), ("second", 4096, Some(8192)), ("rest", 12288, None)] {
        let export = Export::new(name, disk.clone()).unwrap().part(offset, size).unwrap();
        exports.add(export).unwrap();
    }
    let bed = Bed::with(exports, ServerOptions::default());
    let mut listed = NbdClient::unix(&bed.socket()).unwrap();
    assert_eq!(listed.option(3, b"").unwrap().len(), 4);
    let open = |name| NbdClient::open(&bed.socket(), name, &CONTEXTS).unwrap();
    let mut second = open("second");
    assert_eq!((second.size, second.read(0, 4096).unwrap()), (8192, vec![1; 4096]));
    assert_eq!(second.write(0, 8000, &[9; 192]).unwrap(), 0);
    assert_eq!(second.write(0, 8000, &[9; 193]).unwrap(), NO_SPACE);
    let mut rest = open("rest");
    assert_eq!((rest.size, rest.read(0, 2).unwrap()), ((256 - 3) * 4096, vec![3; 2]));
    assert_eq!(second.read(7999, 193).unwrap()[..2], [2, 9]);
    let status = rest.request(NbdCommand::BlockStatus, 0, 0, rest.size).unwrap();
    assert_eq!(status.chunks[0], NbdChunk::Status(1, vec![(rest.size, 0)]));
}

#[test]
fn what_a_connection_has_written_another_one_flushes() {
    let folder = scratch().unwrap();
    let bed = Bed::new(qcow2(&folder, 16 << 20));
    let [mut one, mut other] = [bed.client(), bed.client()];
    assert_ne!(one.flags & 1 << 8, 0, "several connections are allowed");
    let data = pattern(5, 4096);
    assert_eq!(one.write(0, 1 << 20, &data).unwrap(), 0);
    assert_eq!(other.simple(NbdCommand::Flush, 0, 0, 0).unwrap(), 0);
    // The file as it is on the disk now, without the server.
    let copy = folder.path().join("copy.qcow2");
    std::fs::copy(folder.path().join("disk.qcow2"), &copy).unwrap();
    let disk = open_image(&copy, Format::Qcow2, true);
    let found = Buffer::zeroed(4096);
    block_on(disk.read(GuestOffset(1 << 20), found.clone().into())).unwrap();
    assert!(found.to_vec() == data);
}
