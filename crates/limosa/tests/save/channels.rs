//! A VM is saved over several channels: of every number, compression and transport, and by QEMUs that join by round and
//! by section.

use crate::needs_qemu;
use crate::stage::channels::{Cell, STOPPED_WHERE_SLOW, Transport, saves_over_channels};
use crate::stage::*;
use rustix::process::Signal;
use serde_json::json;

const fn cell(channels: u8, compression: &'static str, transport: Transport) -> Cell {
    Cell { channels, compression, transport }
}

#[test]
fn a_current_pc_is_saved_over_channels() {
    needs_qemu!();
    let cells =
        [cell(1, "none", Transport::Private), cell(4, "zstd", Transport::Tcp), cell(8, "zlib", Transport::Unix)];
    saves_over_channels("pc-i440fx-10.0", &cells);
}

#[test]
fn a_current_q35_is_saved_over_channels() {
    needs_qemu!();
    let cells =
        [cell(2, "none", Transport::Tcp), cell(16, "none", Transport::Unix), cell(2, "zlib", Transport::Private)];
    saves_over_channels("pc-q35-10.0", &cells);
}

#[test]
fn a_pc_that_joins_at_every_section_is_saved_over_channels() {
    needs_qemu!();
    let cells = [cell(2, "none", Transport::Private), cell(4, "zlib", Transport::Tcp)];
    saves_over_channels("pc-i440fx-7.2", &cells);
}

#[test]
fn a_q35_with_zero_pages_on_the_main_channel_is_saved_over_channels() {
    needs_qemu!();
    saves_over_channels("pc-q35-7.2", &[cell(8, "zstd", Transport::Unix)]);
    saves_over_channels("pc-q35-8.2", &[cell(2, "none", Transport::Tcp)]);
}

#[test]
fn channels_without_a_route_write_the_file_and_compression_goes_through_a_socket() {
    needs_qemu!();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    let settings = json!({ "multifd-channels": 7, "multifd-compression": "zlib", "zero-page-detection": "none" });
    vm.execute("migrate-set-parameters", settings).unwrap();
    let found = Found::of(&vm);
    for (more, via) in [
        (&["--channels", "3"][..], "file"),
        (&["--channels", "3", "--compression", "zstd"], "socket"),
        (&["--channels", "3", "--stop"], "file"),
    ] {
        let (_folder, file) = place();
        let report = save(&vm, &file, &[more, &STOPPED_WHERE_SLOW].concat());
        assert_eq!(report["via"], via);
        if more.contains(&"--stop") {
            found.assert_same_but(&vm, "postmigrate");
        } else {
            found.assert_same(&vm);
            assert_beats(&vm);
        }
        drop(load_in_stock_qemu(&small(), &file, 2));
    }
}

#[test]
fn a_stopped_vm_is_saved_over_channels_and_left_stopped() {
    needs_qemu!();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    let found = Found::of(&vm);
    let (_folder, file) = place();
    save(&vm, &file, &[&["--via", "socket", "--channels", "4", "--stop"], &STOPPED_WHERE_SLOW[..]].concat());
    found.assert_same_but(&vm, "postmigrate");
    drop(load_in_stock_qemu(&small(), &file, 2));
}

#[test]
fn a_save_over_channels_that_is_cancelled_leaves_the_vm_as_it_was_found() {
    needs_qemu!();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    let found = Found::of(&vm);
    for _ in 0..6 {
        let (folder, file) = place();
        let more = ["--via", "socket", "--channels", "4", "--max-bandwidth", "1M"];
        let job = start(save_arguments(&vm, &file, &more));
        wait_moving(&vm);
        job.signal(Signal::INT);
        job.wait().one_line(&[]);
        assert!(names(folder.path()).is_empty());
        // At once: what QEMU has not finished with would show now, or when the next save begins.
        found.assert_same(&vm);
        assert_beats(&vm);
    }
    let (_folder, file) = place();
    save(&vm, &file, &[&["--via", "socket", "--channels", "4"], &STOPPED_WHERE_SLOW[..]].concat());
    found.assert_same(&vm);
    assert_beats(&vm);
}

#[test]
fn what_does_not_go_with_channels_is_said() {
    needs_qemu!();
    let vm = small().start().unwrap();
    for (more, words) in [
        (&["--channels", "2", "--compression", "zlib", "--via", "file"][..], "--via socket"),
        (&["--channels", "2", "--background"], "--channels"),
    ] {
        let (_folder, file) = place();
        limosa(save_arguments(&vm, &file, more)).misused(&[words]);
    }
    let (_folder, file) = place();
    for more in [&["--channels", "0"][..], &["--channels", "17"], &["--compression", "zlib"]] {
        assert_eq!(limosa(save_arguments(&vm, &file, more)).status.code(), Some(2), "{more:?}");
    }
}
