//! Many clients that do nothing.

use std::fs;
use std::time::Duration;

use limosa_testkit::{NbdClient, wait_for};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::bed::{Bed, Serving};
use crate::needs_qemu;

const CLIENTS: u64 = 1000;
const MIB: u64 = 1 << 20;

/// The memory of a server in bytes.
fn resident(serving: &Serving) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", serving.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

fn served() -> (Bed, Serving) {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
    let serving = bed.serve("nbd", &["--max-connections", "1100", "disk"]);
    // What one client needs is not counted: the image's tables, the program's own pages.
    let mut client = serving.client();
    for number in 0..4 {
        assert_eq!(client.write(0, number * MIB, &[1; 1 << 20]).unwrap(), 0);
        assert_eq!(client.read(number * MIB, 1 << 20).unwrap(), [1; 1 << 20]);
    }
    client.disconnect().unwrap();
    (bed, serving)
}

#[test]
fn a_thousand_idle_connections_take_at_most_twenty_mebibytes() {
    needs_qemu!();
    let (_bed, serving) = served();
    let before = resident(&serving);
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| serving.client()).collect();
    let more = resident(&serving).saturating_sub(before);
    println!("{CLIENTS} idle connections: {} KiB", more / 1024);
    assert!(more <= 20 * MIB, "{CLIENTS} idle connections take {} KiB", more / 1024);
    assert_eq!(clients[500].read(0, 4096).unwrap(), [1; 4096]);
    drop(clients);
    serving.stop();
}

#[test]
fn connections_that_become_idle_give_their_memory_back() {
    needs_qemu!();
    let (_bed, serving) = served();
    let before = resident(&serving);
    let mut clients: Vec<NbdClient> = (0..100).map(|_| serving.client()).collect();
    // No reply is read yet: more than a socket takes stays in the server's buffers. All of them fit into the server's
    // memory, or a client would wait for others to read theirs.
    for client in &mut clients {
        for number in 0..2 {
            client.send(limosa_testkit::NbdCommand::Read, 0, number * MIB, MIB).unwrap();
        }
    }
    wait_for("buffers of busy connections", || (resident(&serving).saturating_sub(before) > 40 * MIB).then_some(()));
    for client in &mut clients {
        for _ in 0..2 {
            assert_eq!(client.receive().unwrap().error, 0);
        }
    }
    let most = wait_for("memory that is given back", || {
        let more = resident(&serving).saturating_sub(before);
        std::thread::sleep(Duration::from_millis(100));
        (more <= 20 * MIB).then_some(more)
    });
    println!("100 connections that have become idle: {} KiB", most / 1024);
    drop(clients);
    serving.stop();
}
