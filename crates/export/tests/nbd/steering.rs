//! Exports that are added, removed and quiesced while clients use them.

use std::thread;
use std::time::Duration;

use limosa_export::nbd::{Limits, ServerOptions};
use limosa_export::{Export, ExportError, Exports};
use limosa_image::GuestOffset;
use limosa_storage::{Buffer, block_on};
use limosa_testkit::{NbdClient, NbdCommand, scratch, wait_for};

use crate::bed::{Bed, CONTEXTS, assert_clean, make_qcow2, open_image, pattern, raw, report};

/// For what takes moments.
const LONG: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_millis(300);
/// Long enough that a busy machine does not let a client of these tests be late.
const STALL: Duration = Duration::from_secs(2);

fn bed(names: &[&str]) -> Bed {
    let exports = Exports::new();
    for name in names {
        exports.add(Export::new(*name, raw(vec![7; 64 << 20])).unwrap()).unwrap();
    }
    Bed::with(exports, ServerOptions::default().limits(Limits::default().stall(STALL)))
}

fn open(bed: &Bed, name: &str) -> NbdClient {
    NbdClient::open(&bed.socket(), name, &CONTEXTS).unwrap()
}

#[test]
fn an_export_that_is_added_is_found_and_one_that_is_removed_is_not() {
    let bed = bed(&["a"]);
    assert!(NbdClient::open(&bed.socket(), "b", &[]).is_err());
    bed.exports.add(Export::new("b", raw(vec![8; 4096])).unwrap()).unwrap();
    let mut b = open(&bed, "b");
    assert_eq!(b.read(0, 1).unwrap(), [8]);
    assert_eq!(bed.exports.remove("a", LONG).unwrap().reads, 0);
    assert!(NbdClient::open(&bed.socket(), "a", &[]).is_err());
    assert!(matches!(bed.exports.remove("a", LONG), Err(ExportError::NotFound(name)) if name == "a"));
    bed.exports.add(Export::new("a", raw(vec![9; 4096])).unwrap()).unwrap();
    assert_eq!((open(&bed, "a").read(0, 1).unwrap(), b.read(1, 1).unwrap()), (vec![9], vec![8]));
}

#[test]
fn clients_of_an_export_that_is_removed_end_after_their_requests_and_others_do_not_notice() {
    let folder = scratch().unwrap();
    let path = folder.path().join("disk.qcow2");
    make_qcow2(&path, &limosa_image::qcow2::CreateOptions::default().size(64 << 20));
    let bed = bed(&["other"]);
    let disk = open_image(&path, limosa_image::Format::Qcow2, false);
    bed.exports.add(Export::new("gone", disk).unwrap()).unwrap();
    let (mut idle, mut other) = (open(&bed, "gone"), open(&bed, "other"));
    let mut clients: Vec<_> = (0..3).map(|_| open(&bed, "gone")).collect();
    let data = pattern(3, 64 << 10);
    for (number, client) in (0..).zip(&mut clients) {
        for request in 0..32 {
            client.send_write(0, ((request * 3 + number) << 10) * 64, &data).unwrap();
        }
        assert_eq!(client.receive().unwrap().error, 0);
    }
    let counters = bed.exports.remove("gone", LONG).unwrap();
    assert_eq!(other.read(0, 4096).unwrap(), vec![7; 4096]);
    idle.wait_closed().unwrap();
    let mut written = 0;
    for client in &mut clients {
        written += 1;
        while let Ok(reply) = client.receive() {
            assert!([0, 108].contains(&reply.error), "{reply:?}");
            written += u64::from(reply.error == 0);
        }
    }
    assert_eq!(counters.writes, written, "what is counted was answered");
    // Closed: what is acknowledged is there, and another process may open it.
    assert_clean(&path);
    let disk = open_image(&path, limosa_image::Format::Qcow2, false);
    let found = Buffer::zeroed(64 << 10);
    let there = (0..96).filter(|number| {
        block_on(disk.read(GuestOffset(number * (64 << 10)), found.clone().into())).unwrap();
        found.to_vec() == data
    });
    assert!(there.count() as u64 >= written);
}

#[test]
fn a_client_that_takes_no_replies_does_not_hold_up_a_removal() {
    let exports = Exports::new();
    exports.add(Export::new("", raw(vec![7; 64 << 20])).unwrap()).unwrap();
    // Not cut off by the limit for stalled clients.
    let bed = Bed::with(exports, ServerOptions::default().limits(Limits::default().stall(LONG)));
    let mut client = bed.client();
    for _ in 0..8 {
        client.send(NbdCommand::Read, 0, 0, 4 << 20).unwrap();
    }
    wait_for("reads", || (bed.exports.find("")?.counters().reads > 0).then_some(()));
    bed.exports.remove("", SOON).unwrap();
    client.wait_closed().unwrap();
}

#[test]
fn requests_to_a_quiesced_export_wait_and_their_clients_are_not_cut_off() {
    let bed = bed(&["a", "b"]);
    let a = bed.exports.find("a").unwrap();
    let (mut client, mut halfway, mut other) = (open(&bed, "a"), open(&bed, "a"), open(&bed, "b"));
    let mut idle = open(&bed, "a");
    assert_eq!(client.write(0, 0, &[1; 512]).unwrap(), 0);
    // It has sent a part of its payload.
    halfway.send(NbdCommand::Write, 1 << 5, 4096, 1 << 20).unwrap();
    halfway.raw(&[5; 100]).unwrap();
    a.quiesce(LONG).unwrap();
    assert!(a.is_quiesced());
    let before = a.counters();
    client.send_write(0, 0, &[2; 512]).unwrap();
    client.send(NbdCommand::Read, 0, 0, 512).unwrap();
    // A client that connects now waits as well.
    let mut late = open(&bed, "a");
    late.send(NbdCommand::Flush, 0, 0, 0).unwrap();
    thread::sleep(STALL + SOON * 3);
    assert_eq!(a.counters(), before);
    let found = Buffer::zeroed(512);
    block_on(a.disk().read(GuestOffset(0), found.clone().into())).unwrap();
    assert_eq!(found.to_vec(), [1; 512]);
    assert_eq!(other.read(0, 512).unwrap(), [7; 512], "another export is served");
    a.resume().unwrap();
    assert_eq!(client.receive().unwrap().error, 0);
    assert_eq!(client.receive().unwrap().error, 0);
    assert_eq!(late.receive().unwrap().error, 0);
    halfway.raw(&vec![5; (1 << 20) - 100]).unwrap();
    assert_eq!(halfway.receive().unwrap().error, 0);
    assert_eq!(idle.read(4096, 1 << 20).unwrap(), vec![5; 1 << 20]);
    assert_eq!(idle.read(0, 512).unwrap(), [2; 512]);
    drop((client, halfway, other, late, idle));
    assert_eq!(bed.stop().stalled, 0);
}

#[test]
fn a_quiesced_export_can_be_removed_and_its_server_stopped() {
    let bed = bed(&["a", "b"]);
    let (mut a, mut b) = (open(&bed, "a"), open(&bed, "b"));
    // A connection is cut that the server still takes for one in its handshake when it is stopped.
    wait_for("clients", || bed.exports.all().iter().all(|export| export.client_count() == 1).then_some(()));
    bed.exports.all().iter().for_each(|export| export.quiesce(LONG).unwrap());
    a.send(NbdCommand::Read, 0, 0, 512).unwrap();
    b.send(NbdCommand::Read, 0, 0, 512).unwrap();
    let removed = bed.exports.find("a").unwrap();
    bed.exports.remove("a", LONG).unwrap();
    assert_eq!(a.receive().unwrap().error, 108);
    assert!(matches!(removed.resume(), Err(ExportError::Removed(_))));
    assert!(matches!(removed.quiesce(LONG), Err(ExportError::Removed(_))));
    bed.stop();
    assert_eq!(b.receive().unwrap().error, 108);
}

#[test]
fn writes_that_were_acknowledged_before_a_quiesce_are_in_the_file_and_no_later_ones() {
    let folder = scratch().unwrap();
    let path = folder.path().join("disk.qcow2");
    make_qcow2(&path, &limosa_image::qcow2::CreateOptions::default().size(64 << 20));
    let bed = Bed::new(open_image(&path, limosa_image::Format::Qcow2, false));
    let socket = bed.socket();
    let over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let writers: Vec<_> = (0..2_u64)
        .map(|number| {
            let (socket, over) = (socket.clone(), std::sync::Arc::clone(&over));
            thread::spawn(move || {
                let mut client = NbdClient::open(&socket, "", &[]).unwrap();
                let mut at = 0;
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    let data = pattern(at, 4096);
                    assert_eq!(client.write(0, ((at * 2 + number) % 1024) * (64 << 10), &data).unwrap(), 0);
                    at += 1;
                }
            })
        })
        .collect();
    let export = bed.exports.find("").unwrap();
    for round in 0..20 {
        export.quiesce(LONG).unwrap();
        let before = std::fs::read(&path).unwrap();
        // A copy of the file is a whole image: nothing is in memory alone. Clusters that were allocated ahead are leaks.
        let copy = folder.path().join("copy.qcow2");
        std::fs::write(&copy, &before).unwrap();
        let report = report(&copy);
        assert_eq!((report.corruptions, report.check_errors), (0, 0), "{report:?}");
        assert!(std::fs::read(&path).unwrap() == before, "round {round}: nothing is written");
        let writes = export.counters().writes;
        export.resume().unwrap();
        wait_for("more writes", || (export.counters().writes > writes).then_some(()));
    }
    over.store(true, std::sync::atomic::Ordering::Relaxed);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    // The file is locked as long as somebody has the export.
    drop(export);
    bed.stop();
    assert_clean(&path);
}
