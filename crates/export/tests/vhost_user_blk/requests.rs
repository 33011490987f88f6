//! Each kind of request, and the configuration.

use std::sync::Arc;

use limosa_export::Export;
use limosa_storage::testing::{Failing, Fault, RequestRecorder};
use limosa_storage::{MemoryStorage, Operation};
use limosa_testkit::{BlkCommand, BlkReply, scratch};

use crate::images::{pattern, qcow2, raw};
use crate::served::Served;

const FLUSH: u64 = 1 << 9;
const CONFIG_WCE: u64 = 1 << 11;
const DISCARD: u64 = 1 << 13;
const EVENT_INDEX: u64 = 1 << 29;

fn status(reply: anyhow::Result<BlkReply>) -> u8 {
    reply.unwrap().status
}

#[test]
fn what_was_written_is_read_by_another_queue_however_requests_are_cut() {
    for without in [0, EVENT_INDEX] {
        let served = Served::new(raw(vec![0; 4 << 20]));
        let mut client = served.client_without(without);
        for (number, (length, cut, indirect)) in
            (0_u64..).zip([(512, 0, false), (4096, 1, true), (65536, 512, false), (128 << 10, 4097, true)])
        {
            let (sector, data) = (number * 512 + 1, pattern(number, length));
            let slot = client.submit(0, &BlkCommand::Write(sector, data.clone()), cut, indirect).unwrap();
            client.kick(0).unwrap();
            let reply = client.reply(0).unwrap();
            assert_eq!(reply, BlkReply { slot, status: 0, written: 1, data: vec![] });
            client.submit(1, &BlkCommand::Read(sector, length), cut, !indirect).unwrap();
            client.kick(1).unwrap();
            let reply = client.reply(1).unwrap();
            let written = u32::try_from(length).unwrap() + 1;
            assert_eq!((reply.status, reply.written), (0, written));
            assert!(reply.data == data, "{length} {cut} {indirect}");
        }
        let counters = served.export.counters();
        assert_eq!((counters.reads, counters.writes, counters.failures), (4, 4, 0));
        assert_eq!(counters.written_bytes, 512 + 4096 + 65536 + (128 << 10));
    }
}

#[test]
fn the_disk_has_a_name_of_twenty_bytes_and_its_length() {
    let export = Export::new("a disk with a name of many bytes", raw(vec![0; 2 << 20])).unwrap();
    let served = Served::with(export.part(0, Some((1 << 20) + 100)).unwrap(), 2, 2);
    let mut client = served.client();
    let reply = client.run(0, &BlkCommand::GetId).unwrap();
    assert_eq!((reply.status, reply.written, reply.data.as_slice()), (0, 21, b"a disk with a name o".as_slice()));
    // Bytes behind the last whole sector are not seen.
    assert_eq!(client.config(0, 8).unwrap(), 2048_u64.to_le_bytes());
    assert_eq!(client.config(34, 2).unwrap(), 2_u16.to_le_bytes());
    assert_eq!(status(client.run(0, &BlkCommand::Read(2047, 512))), 0);
    assert_eq!(status(client.run(0, &BlkCommand::Read(2047, 1024))), 1);
    assert_eq!(status(client.run(0, &BlkCommand::Read(2048, 512))), 1);
}

#[test]
fn ranges_are_discarded_and_zeroed() {
    let folder = scratch().unwrap();
    let served = Served::new(qcow2(&folder, 4 << 20));
    let mut client = served.client();
    let data = pattern(1, 128 << 10);
    for sector in (0..2048).step_by(256) {
        assert_eq!(status(client.run(0, &BlkCommand::Write(sector, data.clone()))), 0);
    }
    // Two ranges: a part of a cluster, and two clusters.
    assert_eq!(status(client.run(0, &BlkCommand::WriteZeroes(vec![(1, 2, 0), (256, 256, 1)]))), 0);
    assert_eq!(status(client.run(0, &BlkCommand::Discard(vec![(512, 256, 0), (1024, 128, 0)]))), 0);
    let mut read = |sector, length| client.run(1, &BlkCommand::Read(sector, length)).unwrap().data;
    let first = read(0, 4096);
    assert!(first[..512] == data[..512] && first[512..1536] == [0; 1024] && first[1536..] == data[1536..4096]);
    assert!(read(256, 128 << 10) == vec![0; 128 << 10] && read(512, 128 << 10) == vec![0; 128 << 10]);
    let partly = read(1024, 128 << 10);
    assert!(partly[..64 << 10] == vec![0; 64 << 10] && partly[64 << 10..] == data[64 << 10..]);
    assert!(read(768, 128 << 10) == data);
    // One that is wrong, and nothing of the request is done.
    assert_eq!(status(client.run(0, &BlkCommand::WriteZeroes(vec![(768, 8, 0), (8191, 2, 0)]))), 1);
    assert_eq!(status(client.run(0, &BlkCommand::Discard(vec![(768, 128, 1)]))), 2);
    assert!(client.run(1, &BlkCommand::Read(768, 128 << 10)).unwrap().data == data);
    assert_eq!(status(client.run(0, &BlkCommand::Flush)), 0);
    drop(client);
    served.stop();
}

#[test]
fn what_the_driver_did_not_agree_to_is_unsupported() {
    let served = Served::new(raw(vec![0; 1 << 20]));
    let mut client = served.client_without(DISCARD);
    assert_eq!(status(client.run(0, &BlkCommand::Discard(vec![(0, 8, 0)]))), 2);
    assert_eq!(status(client.run(0, &BlkCommand::WriteZeroes(vec![(0, 8, 0)]))), 0);
}

#[test]
fn a_read_only_disk_refuses_changes() {
    let export = Export::new("", raw(pattern(7, 1 << 20))).unwrap().read_only(true);
    let served = Served::with(export, 2, 1);
    let mut client = served.client();
    assert_eq!(client.features() & (1 << 5 | DISCARD), 1 << 5);
    assert_eq!(status(client.run(0, &BlkCommand::Write(0, vec![0; 512]))), 1);
    assert!(client.run(0, &BlkCommand::Read(0, 4096)).unwrap().data == pattern(7, 4096));
    assert_eq!(status(client.run(0, &BlkCommand::Flush)), 0);
}

#[test]
fn a_part_of_a_disk_is_a_disk() {
    let bytes = pattern(3, 1 << 20);
    let served = Served::with(Export::new("", raw(bytes.clone())).unwrap().part(4096, Some(8192)).unwrap(), 2, 2);
    let mut client = served.client();
    assert!(client.run(0, &BlkCommand::Read(0, 8192)).unwrap().data == bytes[4096..12288]);
    assert_eq!(status(client.run(0, &BlkCommand::Write(15, vec![9; 512]))), 0);
    assert_eq!(status(client.run(0, &BlkCommand::Write(16, vec![9; 512]))), 1);
}

/// Number of flushes that the storage has got after a write with the driver's settings.
fn flushes_of_a_write(without: u64, write_back: Option<u8>) -> usize {
    let recorder = RequestRecorder::new();
    let memory = MemoryStorage::with_contents(vec![0; 1 << 20], 1 << 20);
    let served = Served::storage(recorder.wrap(Arc::new(memory)));
    let mut client = served.client_without(without);
    if let Some(mode) = write_back {
        client.set_config(32, &[mode]).unwrap();
        assert_eq!(client.config(32, 1).unwrap(), [mode]);
    }
    assert_eq!(status(client.run(0, &BlkCommand::Write(0, vec![1; 512]))), 0);
    recorder.take().into_iter().filter(|seen| seen.operation == Operation::Flush).count()
}

#[test]
fn writes_go_through_if_the_driver_wants_that_or_cannot_flush() {
    assert_eq!(flushes_of_a_write(0, None), 0);
    assert_eq!(flushes_of_a_write(0, Some(1)), 0);
    assert_eq!(flushes_of_a_write(0, Some(0)), 1);
    assert_eq!(flushes_of_a_write(CONFIG_WCE, None), 0);
    assert_eq!(flushes_of_a_write(FLUSH | CONFIG_WCE, None), 1);
    assert_eq!(flushes_of_a_write(FLUSH, None), 1);
}

#[test]
fn storage_that_fails_is_an_error_of_the_request_and_of_no_other() {
    let failing = Failing::only(&[Operation::Read, Operation::Write, Operation::Flush]);
    let served = Served::storage(failing.wrap(Arc::new(MemoryStorage::with_contents(vec![0; 1 << 20], 1 << 20))));
    let mut client = served.client();
    for command in [BlkCommand::Read(0, 512), BlkCommand::Write(0, vec![1; 512]), BlkCommand::Flush] {
        for fault in [Fault::Broken, Fault::NoSpace] {
            failing.fail(0, 1, fault);
            let reply = client.run(0, &command).unwrap();
            assert_eq!((reply.status, reply.written), (1, 1), "{command:?} {fault:?}");
            failing.mend();
            assert_eq!(status(client.run(0, &command)), 0, "{command:?} {fault:?}");
        }
    }
    assert_eq!((served.export.counters().failures, served.broken_rings()), (6, 0));
}
