//! Guests and memory of every kind are saved: Linux that counts, a balloon that hints free pages, memfd, huge pages.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::needs_qemu;
use crate::stage::*;
use limosa_testkit::{HugePages, LinuxGuest, Machine, MemoryBackend, Prefill, skipped};
use serde_json::json;

const ROUTES: [&str; 2] = ["socket", "file"];

/// Boots Linux, saves it while it counts, and expects the count to go on here and in a stock QEMU that loads the file.
fn counts_on(machine: &Machine) {
    let vm = machine.start().unwrap();
    vm.wait_counts(2).unwrap();
    for via in ROUTES {
        let (_folder, file) = place();
        let found = Found::of(&vm);
        vm.shell("echo kept > /tmp/note").unwrap();
        let before = vm.wait_counts(1).unwrap();
        save(&vm, &file, &["--via", via]);
        found.assert_same(&vm);
        assert!(vm.wait_counts(2).unwrap() > before + 1);
        assert_eq!(vm.shell("cat /tmp/note").unwrap(), ["kept"]);

        let loaded = machine.start_incoming().unwrap();
        loaded.load_file(&file, 0).unwrap();
        loaded.wait_run_state("running", SOON).unwrap();
        let after = loaded.wait_counts(2).unwrap();
        assert!(after > before, "the count goes on: {before}, then {after}");
        assert_eq!(loaded.shell("cat /tmp/note").unwrap(), ["kept"]);
    }
}

#[test]
fn linux_counts_on_after_a_save_and_after_a_load() {
    needs_qemu!();
    counts_on(&Machine::linux(LinuxGuest::default()));
}

#[test]
fn linux_with_a_balloon_that_hints_free_pages_counts_on() {
    needs_qemu!();
    counts_on(&Machine::linux(LinuxGuest::default()).balloon());
}

#[test]
fn free_pages_that_are_waited_for_are_not_stored_however_fast_memory_goes() {
    needs_qemu!();
    let machine = Machine::linux(LinuxGuest::default()).balloon();
    let vm = machine.start().unwrap();
    vm.wait_counts(2).unwrap();
    // 128 MiB, or as much as there is room for, that are full of something and free. A pipe is slow in a translated guest:
    // most of it are copies.
    let fill = "yes limosa | head -c 4194304 > /tmp/block; for i in $(seq 31); do cat /tmp/block; done > /tmp/full";
    vm.shell(&format!("{fill}; rm /tmp/block /tmp/full")).unwrap();
    for options in [&[][..], &["--channels", "2"]] {
        let (_folder, file) = place();
        save(&vm, &file, &[&["--via", "socket", "--hint-wait", "20s"], options].concat());
        let report = limosa(["inspect", "--json", &file.display().to_string()]).json();
        let pages = &report["manifest"]["pages"];
        assert!(pages["hinted"].as_u64().unwrap() > 32_768 * 9 / 10, "{options:?}: {pages}");
        vm.wait_counts(1).unwrap();
    }
}

#[test]
fn a_vm_without_a_balloon_that_hints_is_saved_at_once() {
    needs_qemu!();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    let (_folder, file) = place();
    let begun = Instant::now();
    let saved = limosa(save_arguments(&vm, &file, &["--hint-wait", "10m"])).success();
    assert!(saved.stderr.contains("no balloon of it has free-page-hint=on"), "{saved:?}");
    assert!(begun.elapsed() < Duration::from_mins(5));
    assert_beats(&vm);
}

#[test]
fn a_guest_in_a_memfd_is_saved() {
    needs_qemu!();
    saves_beat(&small().backend(MemoryBackend::Memfd));
}

#[test]
fn a_guest_in_a_file_in_memory_is_saved() {
    needs_qemu!();
    saves_beat(&small().backend(MemoryBackend::File));
}

#[test]
fn a_guest_on_huge_pages_is_saved() {
    needs_qemu!();
    if skipped("LIMOSA_SKIP_HUGETLB") {
        return;
    }
    let machine = small().backend(MemoryBackend::HugeMemfd);
    // For the guest that is saved and the one that is loaded.
    let reserved = HugePages::reserve(2 * machine.memory_bytes())
        .unwrap_or_else(|error| panic!("no huge pages: {error:#}; LIMOSA_SKIP_HUGETLB=1 skips this test"));
    saves_beat(&machine);
    drop(reserved);
}

#[test]
fn a_guest_of_the_older_machine_type_is_saved() {
    needs_qemu!();
    saves_beat(&small().kind("pc"));
}

/// Saves a beat guest on this machine by both routes; QEMU loads what came of it.
fn saves_beat(machine: &Machine) {
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    let found = Found::of(&vm);
    for via in ROUTES {
        let (_folder, file) = place();
        save(&vm, &file, &["--via", via]);
        found.assert_same(&vm);
        assert_beats(&vm);
        for channels in [0, 2] {
            drop(load_in_stock_qemu(machine, &file, channels));
        }
    }
}

#[test]
fn pages_of_every_kind_come_back_as_they_were() {
    needs_qemu!();
    let bytes = 96 << 20;
    let machine = Machine::paused(bytes);
    let prefill = Prefill::mixed(7);
    for via in ROUTES {
        let vm = machine.start().unwrap();
        prefill.fill(vm.memory_file().unwrap(), bytes).unwrap();
        let (_folder, file) = place();
        save(&vm, &file, &["--via", via, "--checksum"]);
        for channels in [0, 2] {
            let loaded = machine.start_incoming_stopped().unwrap();
            loaded.load_file(&file, channels).unwrap();
            prefill.verify(loaded.memory_file().unwrap(), bytes).unwrap();
        }
    }
}

#[test]
fn a_vm_with_name_and_uuid_keeps_them_in_the_record() {
    needs_qemu!();
    let uuid = "8c1e1b5e-9f05-4d34-8d7d-0f4c6f3e5a11";
    let (_folder, file) = place();
    let machine = ["-name", "godwit", "-uuid", uuid].iter().fold(small(), |machine, word| machine.argument(word));
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    vm.set_capabilities(&[("validate-uuid", true)]).unwrap();
    for via in ROUTES {
        save(&vm, &file, &["--via", via, "--force"]);
        let report = limosa(["inspect", "--json", &file.display().to_string()]).json();
        assert_eq!(report["manifest"]["vm_name"], "godwit");
        assert_eq!(report["manifest"]["vm_uuid"], json!(uuid));
    }
    let output =
        Command::new(env!("CARGO_BIN_EXE_limosa")).args(["inspect".as_ref(), file.as_os_str()]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("godwit"));
}
