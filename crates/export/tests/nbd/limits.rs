//! Limits on clients, and the end of the server.

use std::time::Duration;

use limosa_export::nbd::{Limits, ServerOptions};
use limosa_export::{Export, Exports};
use limosa_image::GuestOffset;
use limosa_storage::{Buffer, block_on};
use limosa_testkit::{NbdClient, NbdCommand, scratch, wait_for};

use crate::bed::{Bed, assert_clean, open_image, pattern, qcow2, raw};

const SOON: Duration = Duration::from_millis(300);

fn bed(limits: Limits) -> Bed {
    let exports = Exports::new();
    exports.add(Export::new("", raw(vec![7; 64 << 20])).unwrap()).unwrap();
    Bed::with(exports, ServerOptions::default().limits(limits))
}

#[test]
fn a_handshake_that_stops_midway_is_cut_off() {
    let bed = bed(Limits::default().handshake(SOON));
    let whole = [&b"IHAVEOPT"[..], &[0, 0, 0, 7, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0]].concat();
    let mut clients: Vec<_> = [0, 1, 15, 16, 20]
        .into_iter()
        .map(|length| {
            let mut client = NbdClient::unix(&bed.socket()).unwrap();
            client.raw(&whole[..length]).unwrap();
            client
        })
        .collect();
    // One that never sends its flags.
    let mut silent = std::os::unix::net::UnixStream::connect(bed.socket()).unwrap();
    let mut idle = bed.client();
    for client in &mut clients {
        client.wait_closed().unwrap();
    }
    std::io::Read::read_to_end(&mut silent, &mut Vec::new()).unwrap();
    // A client that has agreed on an export may be silent for as long as it wants.
    assert_eq!(idle.read(0, 1).unwrap(), [7]);
    drop(idle);
    assert_eq!(bed.stop().handshake_timeouts, 6);
}

#[test]
fn a_payload_that_never_comes_ends_its_connection_alone() {
    let bed = bed(Limits::default().stall(SOON));
    let mut other = bed.client();
    let mut client = bed.client();
    client.send(NbdCommand::Write, 1 << 5, 0, 32 << 20).unwrap();
    client.raw(&[1; 100]).unwrap();
    client.wait_closed().unwrap();
    assert_eq!(other.read(0, 512).unwrap(), vec![7; 512]);
    drop(other);
    assert_eq!(bed.stop().stalled, 1);
}

#[test]
fn a_client_that_never_reads_is_held_to_its_room_and_cut_off() {
    let bed = bed(Limits::default().stall(SOON).bytes(4 << 20));
    let mut other = bed.client();
    let mut client = bed.client();
    for _ in 0..200 {
        client.send(NbdCommand::Read, 0, 0, 1 << 20).unwrap();
    }
    let mut others = 0;
    while bed.server.counters().stalled == 0 {
        assert_eq!(other.read(0, 4096).unwrap(), vec![7; 4096]);
        others += 1;
    }
    let export = bed.exports.find("").unwrap();
    // Those that had room, and what a socket's buffer holds.
    let reads = export.counters().reads - others;
    assert!(reads < 20, "{reads} reads were carried out");
    drop((client, other));
}

#[test]
fn connections_above_the_limit_are_closed_at_once() {
    let bed = bed(Limits::default().connections(2));
    let (one, mut two) = (bed.client(), bed.client());
    assert!(NbdClient::unix(&bed.socket()).is_err());
    assert_eq!(two.read(0, 1).unwrap(), [7]);
    one.disconnect().unwrap();
    wait_for("room for a connection", || NbdClient::open(&bed.socket(), "", &[]).ok());
    drop(two);
    assert!(bed.stop().refused >= 1);
}

#[test]
fn a_request_that_exceeds_the_room_is_served_alone() {
    let bed = bed(Limits::default().bytes(4096).requests(3));
    let mut client = bed.client();
    let data = pattern(1, 1 << 20);
    for number in 0..20 {
        client.send_write(0, number << 20, &data).unwrap();
    }
    for _ in 0..20 {
        assert_eq!(client.receive().unwrap().error, 0);
    }
    assert!(client.read(19 << 20, 1 << 20).unwrap() == data);
}

#[test]
fn a_server_that_is_stopped_answers_what_it_has_begun_and_closes_its_images() {
    let folder = scratch().unwrap();
    let bed = Bed::new(qcow2(&folder, 64 << 20));
    let mut clients: Vec<_> = (0..4).map(|_| bed.client()).collect();
    let _in_handshake = NbdClient::unix(&bed.socket()).unwrap();
    let data = pattern(9, 64 << 10);
    for (number, client) in (0..).zip(&mut clients) {
        for request in 0..32 {
            client.send_write(0, ((request * 4 + number) << 10) * 64, &data).unwrap();
        }
    }
    // Each has begun to be served.
    let replies: Vec<_> = clients.iter_mut().map(|client| client.receive().unwrap()).collect();
    assert!(replies.iter().all(|reply| reply.error == 0));
    let socket = bed.socket();
    bed.stop();
    assert!(!socket.exists());
    let mut written = 0;
    for client in &mut clients {
        let mut answered = 1;
        while let Ok(reply) = client.receive() {
            assert!([0, 108].contains(&reply.error), "{reply:?}");
            answered += u64::from(reply.error == 0);
        }
        written += answered;
    }
    let path = folder.path().join("disk.qcow2");
    assert_clean(&path);
    let disk = open_image(&path, limosa_image::Format::Qcow2, true);
    let found = Buffer::zeroed(64 << 10);
    let there = (0..128).filter(|number| {
        block_on(disk.read(GuestOffset(number * (64 << 10)), found.clone().into())).unwrap();
        found.to_vec() == data
    });
    assert!(there.count() as u64 >= written);
}
