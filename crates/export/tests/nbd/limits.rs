//! Limits on clients, and the end of the server.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use limosa_channel::{Listener, Options};
use limosa_export::nbd::{Limits, Server, ServerOptions};
use limosa_export::{Export, Exports};
use limosa_image::GuestOffset;
use limosa_storage::{Buffer, block_on};
use limosa_testkit::{NbdClient, NbdCommand, scratch, wait_for};

use crate::bed::{Bed, assert_clean, open_image, pattern, qcow2, raw};

/// Time that a client gets: enough for one that is not late, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(1);

fn bed(limits: Limits) -> Bed {
    let exports = Exports::new();
    exports.add(Export::new("", raw(vec![7; 64 << 20])).unwrap()).unwrap();
    Bed::with(exports, ServerOptions::default().limits(limits))
}

#[test]
fn a_handshake_that_stops_midway_is_cut_off() {
    let bed = bed(Limits::default().handshake(PATIENCE));
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
    let bed = bed(Limits::default().stall(PATIENCE));
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
    let bed = bed(Limits::default().stall(PATIENCE).bytes(4 << 20));
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
fn memory_is_bounded_over_all_connections_and_none_starves_others() {
    const MIB: usize = 1 << 20;
    // A share of 1 MiB, and a pool of 64 MiB.
    let limits = Limits::default().connections(64).total_bytes(128 * MIB).bytes(1024 * MIB);
    let bed = bed(limits.stall(Duration::from_secs(60)));
    let export = bed.exports.find("").unwrap();
    let greedy: Vec<_> = (0..3)
        .map(|_| {
            let before = export.counters().reads;
            let mut client = bed.client();
            for _ in 0..200 {
                client.send(NbdCommand::Read, 0, 0, 1 << 20).unwrap();
            }
            let mut last = before;
            let reads = wait_for("reads that stop", || {
                thread::sleep(Duration::from_millis(300));
                let now = export.counters().reads;
                let stopped = (now == last && now > before).then_some(now - before);
                last = now;
                stopped
            });
            (client, reads)
        })
        .collect();
    // Half of what is free each, its share, and what a socket's buffer holds.
    let reads: Vec<_> = greedy.iter().map(|(_, reads)| *reads).collect();
    for (reads, most) in reads.iter().zip([32, 16, 8]) {
        assert!((most..=most + 4).contains(reads), "{reads} reads, and not about {most}");
    }
    let mut other = bed.client();
    for _ in 0..10 {
        assert!(other.read(0, MIB).unwrap() == vec![7; MIB]);
    }
    drop((greedy, other));
    bed.stop();
}

#[test]
fn a_long_request_waits_until_others_give_memory_back() {
    const MIB: usize = 1 << 20;
    let bed = bed(Limits::default().connections(64).total_bytes(128 * MIB).bytes(1024 * MIB).stall(PATIENCE));
    let export = bed.exports.find("").unwrap();
    let greedy: Vec<_> = (0..2)
        .map(|_| {
            let mut client = bed.client();
            for _ in 0..200 {
                client.send(NbdCommand::Read, 0, 0, 1 << 20).unwrap();
            }
            client
        })
        .collect();
    wait_for("memory in use", || (export.counters().reads > 40).then_some(()));
    let mut client = bed.client();
    assert!(client.read(0, 32 * MIB).unwrap() == vec![7; 32 * MIB]);
    // The request had room as soon as one of them was cut off; the other may have sent a little later.
    wait_for("clients that are cut off", || (bed.server.counters().stalled >= 2).then_some(()));
    drop((greedy, client));
    assert_eq!(bed.stop().stalled, 2, "the clients that do not read, and not the one that waits");
}

#[test]
fn the_limit_of_connections_holds_for_several_listeners() {
    let exports = Exports::new();
    exports.add(Export::new("", raw(vec![7; 4096])).unwrap()).unwrap();
    let server = Server::new(exports, ServerOptions::default().limits(Limits::default().connections(8))).unwrap();
    let folder = scratch().unwrap();
    let paths = ["one", "two"].map(|name| folder.path().join(name));
    let listener = |path: &PathBuf| {
        Listener::bind(&format!("unix:{}", path.display()).parse().unwrap(), &Options::default()).unwrap()
    };
    let listeners = paths.each_ref().map(listener);
    thread::scope(|scope| {
        let server = &server;
        listeners.iter().for_each(|listener| _ = scope.spawn(move || server.serve(listener).unwrap()));
        for _ in 0..20 {
            let connect = |path: &PathBuf| (0..12).filter_map(|_| NbdClient::unix(path).ok()).collect::<Vec<_>>();
            let clients: Vec<_> = paths.iter().map(|path| scope.spawn(move || connect(path))).collect();
            let clients: Vec<_> = clients.into_iter().flat_map(|clients| clients.join().unwrap()).collect();
            assert_eq!(clients.len(), 8);
            drop(clients);
            wait_for("no connection", || (server.counters().active == 0).then_some(()));
        }
        server.stopper().stop();
    });
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
