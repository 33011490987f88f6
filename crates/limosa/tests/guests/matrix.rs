//! Every machine type that is in use, over every transport and number of channels, however its pages are compressed:
//! saved and restored, with the guest's memory proven in every cell.
//!
//! The table: {pc, q35} x {7.2, 8.0, 9.0, 10.0} x {one channel; multifd with 1, 2, 4, 8 channels x none, zlib, zstd} x
//! {unix, tcp} x {save, eager restore}; and each machine is restored lazily too. A test is one machine type.

use std::path::Path;

use crate::needs_qemu;
use crate::stage::channels::Transport;
use crate::stage::*;
use limosa_testkit::{HeartbeatGuest, Machine, Vm};

/// Channels and compression of a column; none: everything on the one channel.
const COLUMNS: [Option<(&str, &str)>; 13] = [
    None,
    Some(("1", "none")),
    Some(("2", "none")),
    Some(("4", "none")),
    Some(("8", "none")),
    Some(("1", "zlib")),
    Some(("2", "zlib")),
    Some(("4", "zlib")),
    Some(("8", "zlib")),
    Some(("1", "zstd")),
    Some(("2", "zstd")),
    Some(("4", "zstd")),
    Some(("8", "zstd")),
];

/// The words of a column.
fn words(column: Option<(&'static str, &'static str)>) -> Vec<&'static str> {
    let mut words = vec!["--via", "socket"];
    if let Some((channels, compression)) = column {
        words.extend(["--channels", channels, "--compression", compression]);
    }
    words
}

/// Restores by `how` into a fresh destination, and expects the guest whole.
fn restore(machine: &Machine, snapshot: &Path, how: &[&str]) {
    let destination: Vm = machine.start_incoming().unwrap();
    let (socket, file) = (destination.qmp_socket(), snapshot.to_str().unwrap());
    let words = [&["restore", file, "--qmp", socket.to_str().unwrap()], how].concat();
    limosa(words).success();
    destination.check_heartbeat().unwrap();
    assert_beats(&destination);
}

/// Saves and restores in every cell of a machine type's row.
fn row(kind: &str) {
    let machine = Machine::heartbeat(HeartbeatGuest::over(2 << 20)).kind(kind);
    let source = machine.start().unwrap();
    source.wait_heartbeats(2).unwrap();
    let found = Found::of(&source);
    let mut last = None;
    for column in COLUMNS {
        for transport in [Transport::Unix, Transport::Tcp] {
            let (folder, file) = place();
            let to = transport.of_limosa(folder.path()).unwrap();
            let how = [&words(column)[..], &["--listen", &to, "--no-sync"]].concat();
            println!("{kind}: save {how:?}");
            limosa(save_arguments(&source, &file, &how)).success();
            assert_beats(&source);
            let from = transport.of_qemu(folder.path()).unwrap();
            let how = [&["--memory", "eager"], &words(column)[..], &["--listen", &from]].concat();
            println!("{kind}: restore {how:?}");
            restore(&machine, &file, &how);
            last = Some((folder, file));
        }
    }
    found.assert_same(&source);
    let (_folder, file) = last.unwrap();
    restore(&machine, &file, &["--memory", "lazy", "--preempt", "off"]);
    restore(&machine, &file, &["--memory", "lazy", "--preempt", "on"]);
    restore(&machine, &file, &["--memory", "eager", "--via", "file"]);
}

#[test]
fn every_cell_of_a_pc_of_7_2() {
    needs_qemu!();
    row("pc-i440fx-7.2");
}

#[test]
fn every_cell_of_a_pc_of_8_0() {
    needs_qemu!();
    row("pc-i440fx-8.0");
}

#[test]
fn every_cell_of_a_pc_of_9_0() {
    needs_qemu!();
    row("pc-i440fx-9.0");
}

#[test]
fn every_cell_of_a_pc_of_10_0() {
    needs_qemu!();
    row("pc-i440fx-10.0");
}

#[test]
fn every_cell_of_a_q35_of_7_2() {
    needs_qemu!();
    row("pc-q35-7.2");
}

#[test]
fn every_cell_of_a_q35_of_8_0() {
    needs_qemu!();
    row("pc-q35-8.0");
}

#[test]
fn every_cell_of_a_q35_of_9_0() {
    needs_qemu!();
    row("pc-q35-9.0");
}

#[test]
fn every_cell_of_a_q35_of_10_0() {
    needs_qemu!();
    row("pc-q35-10.0");
}
