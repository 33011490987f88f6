//! Mapped restores: the snapshot file is the guest's memory, and no page is sent.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use limosa_testkit::{HeartbeatGuest, Machine, MemoryBackend, Vm};
use serde_json::Value;

use crate::destination::{mapped, object};
use crate::needs_qemu;
use crate::scene::{
    Saved, Scene, assert_consistent, assert_failed, beat, load_ballast, migration_status, saved_beat, small_beat, text,
};
use crate::stage::{Found, limosa, names};

pub(crate) fn all_memory(vm: &Vm) -> Vec<u8> {
    vm.read_memory(0..vm.machine().memory_bytes()).unwrap()
}

/// Expects the guests' memories to be the same, page for page.
#[track_caller]
fn assert_same_memory(found: &[u8], wanted: &[u8]) {
    assert_eq!(found.len(), wanted.len());
    for (page, (found, wanted)) in found.chunks(4096).zip(wanted.chunks(4096)).enumerate() {
        assert!(found == wanted, "page {page} differs");
    }
}

/// How many kilobytes of its memory a process has for itself alone, and how many it maps of this file.
fn private_and_shared(vm: &Vm, file: &Path) -> (u64, u64) {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", vm.pid())).unwrap();
    let (mut inside, mut anonymous, mut resident) = (false, 0, 0);
    for line in smaps.lines() {
        let number = |line: &str| line.split_ascii_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
        if line.split('-').next().is_some_and(|start| u64::from_str_radix(start, 16).is_ok()) {
            inside = line.ends_with(text(file));
        } else if inside && line.starts_with("Anonymous:") {
            anonymous += number(line);
        } else if inside && line.starts_with("Rss:") {
            resident += number(line);
        }
    }
    (anonymous, resident - anonymous)
}

#[test]
fn every_byte_of_a_mapped_guest_is_the_snapshots() {
    needs_qemu!();
    for kind in ["pc", "q35"] {
        let scene = Scene::new();
        let machine = beat().kind(kind);
        let source = machine.start().unwrap();
        source.wait_heartbeats(2).unwrap();
        load_ballast(&source);
        let snapshot = scene.save(&source, "snapshot", &["--stop"]);
        let (memory, lap, beat) = (all_memory(&source), source.last_pass().unwrap(), source.check_heartbeat().unwrap());
        drop(source);
        let file = std::fs::read(&snapshot).unwrap();
        let destination = mapped(&machine, &snapshot).start_incoming().unwrap();
        let found = Found::of(&destination);
        let report = scene.restore(&snapshot, &destination, &["--memory", "mapped", "--paused", "--json"]).json();
        assert_eq!((&report["mode"], &report["mapped_blocks"]), (&"mapped".into(), &Value::from(vec!["mem"])));
        assert_eq!(migration_status(&destination), "completed");
        found.assert_same_but(&destination, "paused");
        assert_same_memory(&all_memory(&destination), &memory);
        let saved = Saved { snapshot: snapshot.clone(), beat, lap };
        saved.assert_is_back(&destination);
        let (private, shared) = private_and_shared(&destination, &snapshot);
        assert!(private > 0 && shared > 16 << 10, "{kind}: {private} KiB of its own, {shared} KiB shared");
        drop(destination);
        assert!(std::fs::read(&snapshot).unwrap() == file, "the snapshot was written to");
        assert_eq!(snapshot.metadata().unwrap().permissions().mode() & 0o777, 0o400);
        scene.assert_tidy();
    }
}

#[test]
fn twins_of_one_snapshot_never_see_each_others_writes() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let file = std::fs::read(&saved.snapshot).unwrap();
    let machine = mapped(&beat(), &saved.snapshot);
    let twins: Vec<Vm> = (0..4).map(|_| machine.start_incoming().unwrap()).collect();
    for twin in &twins {
        // What is chosen by itself is the mapped way.
        let report = scene.restore(&saved.snapshot, twin, &["--json"]).json();
        assert_eq!(report["mode"], "mapped");
    }
    for twin in &twins {
        saved.assert_goes_on(twin);
    }
    twins.iter().for_each(assert_consistent);
    drop(twins);
    assert!(std::fs::read(&saved.snapshot).unwrap() == file, "the snapshot was written to");
}

#[test]
fn a_qemu_that_maps_something_else_is_refused_before_anything_is_sent() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &small_beat(), &[]);
    let object = object(&saved.snapshot, "mem");
    let (begin, offset) = object.split_once("offset=").unwrap();
    let offset: u64 = offset.split(',').next().unwrap().parse().unwrap();
    let copy = scene.path("copy");
    assert!(Command::new("cp").arg("--sparse=always").args([&saved.snapshot, &copy]).status().unwrap().success());
    for (object, why) in [
        (format!("{begin}offset={},share=off,readonly=on,rom=off", offset + 4096), "offset"),
        (format!("{begin}offset={offset},share=off"), "readonly=on"),
        (object.replace(text(&saved.snapshot), text(&copy)), "another file"),
        (format!("memory-backend-ram,id=mem,size={}", small_beat().memory_bytes()), "no memory backend"),
    ] {
        let destination = small_beat().memory_object(&object).start_incoming().unwrap();
        // One that was started to map a snapshot is not sent all of another one by itself.
        let is_meant = !object.starts_with("memory-backend-ram");
        for memory in ["mapped", "auto"].iter().take(if is_meant { 2 } else { 1 }) {
            let refused = scene.restore(&saved.snapshot, &destination, &["--memory", memory]);
            assert_failed(&refused, &["cannot restore mapped", why, "--qemu-args"]);
            assert_eq!(migration_status(&destination), "none", "{why}");
        }
        // The QEMU is as it was: it takes the VM eagerly.
        scene.restore(&saved.snapshot, &destination, &["--memory", "eager"]).success();
        saved.assert_goes_on(&destination);
    }
    scene.assert_tidy();
}

#[test]
fn a_qemu_that_would_write_into_the_snapshot_is_refused_in_every_mode() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &small_beat(), &[]);
    let file = std::fs::read(&saved.snapshot).unwrap();
    let shared = object(&saved.snapshot, "mem").replace("share=off,readonly=on,rom=off", "share=on");
    for memory in ["auto", "mapped", "lazy", "eager"] {
        let destination = small_beat().memory_object(&shared).start_incoming().unwrap();
        let refused = scene.restore(&saved.snapshot, &destination, &["--memory", memory]);
        assert_failed(&refused, &["memory backend mem", "share=on", "would write into it"]);
        assert_eq!(migration_status(&destination), "none", "{memory}");
    }
    assert!(std::fs::read(&saved.snapshot).unwrap() == file, "the snapshot was written to");
}

#[test]
fn memory_that_qemu_writes_before_the_restore_is_the_snapshots_all_the_same() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = small_beat();
    let source = machine.start().unwrap();
    source.wait_heartbeats(2).unwrap();
    let snapshot = scene.save(&source, "snapshot", &["--stop"]);
    let memory = all_memory(&source);
    drop(source);
    let destination = mapped(&machine, &snapshot)
        .argument("-device")
        .argument("loader,addr=0x600000,data=0xdeadbeef,data-len=4")
        .argument("-device")
        .argument("loader,addr=0x7c00,data=0xdeadbeef,data-len=4")
        .start_incoming()
        .unwrap();
    scene.restore(&snapshot, &destination, &["--memory", "mapped", "--paused"]).success();
    assert_same_memory(&all_memory(&destination), &memory);
}

#[test]
fn a_file_that_was_replaced_since_qemu_mapped_it_is_another_file() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &small_beat(), &[]);
    let destination = mapped(&small_beat(), &saved.snapshot).start_incoming().unwrap();
    let copy = scene.path("copy");
    assert!(Command::new("cp").arg("--sparse=always").args([&saved.snapshot, &copy]).status().unwrap().success());
    std::fs::rename(&copy, &saved.snapshot).unwrap();
    let refused = scene.restore(&saved.snapshot, &destination, &["--memory", "mapped"]);
    assert_failed(&refused, &["cannot restore mapped", "another file"]);
    assert_eq!(migration_status(&destination), "none");
}

#[test]
fn a_file_that_qemu_wrote_is_mapped_once_it_is_sealed() {
    needs_qemu!();
    let scene = Scene::new();
    let source = beat().start().unwrap();
    source.wait_heartbeats(2).unwrap();
    load_ballast(&source);
    let snapshot = scene.path("snapshot");
    source.save_file(&snapshot, 0).unwrap();
    let saved =
        Saved { snapshot: snapshot.clone(), beat: source.check_heartbeat().unwrap(), lap: source.last_pass().unwrap() };
    let memory = all_memory(&source);
    drop(source);
    let refused = limosa(["inspect", "--qemu-args", text(&snapshot)]);
    assert_failed(&refused, &["limosa snapshot seal"]);
    limosa(["snapshot", "seal", text(&snapshot)]).success();
    let again = limosa(["snapshot", "seal", "--json", text(&snapshot)]).json();
    assert_eq!(again["was_mappable"], true);
    let destination = mapped(&beat(), &snapshot).start_incoming().unwrap();
    scene.restore(&snapshot, &destination, &["--memory", "mapped", "--paused"]).success();
    assert_same_memory(&all_memory(&destination), &memory);
    saved.assert_is_back(&destination);
    // Stock QEMU still reads it.
    let destination = beat().start_incoming().unwrap();
    scene.restore(&snapshot, &destination, &["--memory", "eager", "--via", "file", "--paused"]).success();
    saved.assert_is_back(&destination);
}

#[test]
fn checksums_are_verified_before_a_mapped_guest_runs() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &["--checksum"]);
    let machine = mapped(&beat(), &saved.snapshot);
    let destination = machine.start_incoming().unwrap();
    scene.restore(&saved.snapshot, &destination, &["--memory", "mapped", "--paused"]).success();
    saved.assert_is_back(&destination);
    drop(destination);
    // One bit of the ballast.
    std::fs::set_permissions(&saved.snapshot, Permissions::from_mode(0o600)).unwrap();
    let object = object(&saved.snapshot, "mem");
    let offset: u64 = object.split_once("offset=").unwrap().1.split(',').next().unwrap().parse().unwrap();
    let mut bytes = std::fs::read(&saved.snapshot).unwrap();
    bytes[usize::try_from(offset + crate::scene::BALLAST.start).unwrap()] ^= 1;
    std::fs::write(&saved.snapshot, bytes).unwrap();
    let destination = machine.start_incoming().unwrap();
    let refused = scene.restore(&saved.snapshot, &destination, &["--memory", "mapped"]);
    assert_failed(&refused, &["checksum", "mem"]);
    assert_eq!(migration_status(&destination), "none");
}

#[test]
fn without_a_monitor_only_the_devices_are_sent() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let destination = mapped(&beat(), &saved.snapshot).start_incoming_stopped().unwrap();
    let uri = format!("unix:{}", scene.path("incoming").display());
    destination.execute("migrate-incoming", serde_json::json!({ "uri": uri })).unwrap();
    let report = limosa(["send", "--json", "--memory", "mapped", text(&saved.snapshot), &uri]).json();
    let pages = report["pages"]["normal"].as_u64().unwrap();
    assert!(pages < 1024, "{pages} pages were sent");
    crate::scene::wait_migration_status(&destination, "completed");
    saved.assert_is_back(&destination);
    let wrong = limosa(["send", "--memory", "mapped", "--mode", "postcopy", text(&saved.snapshot), &uri]);
    assert_eq!(wrong.status.code(), Some(2), "{}", wrong.stderr);
}

#[test]
fn the_printed_options_start_a_machine_of_its_own_memory() {
    needs_qemu!();
    let scene = Scene::new();
    // Its RAM is the machine's own: QEMU calls it pc.ram.
    let machine = Machine::heartbeat(HeartbeatGuest { rest: 2, ..HeartbeatGuest::over(64 << 10) });
    let own = machine.clone().backend(MemoryBackend::Anonymous);
    let source =
        own.memory_object(&format!("memory-backend-ram,id=mem,size={}", machine.memory_bytes())).start().unwrap();
    source.wait_heartbeats(1).unwrap();
    let snapshot = scene.save(&source, "with, a comma", &["--stop"]);
    let printed = limosa(["inspect", "--qemu-args", text(&snapshot)]).success();
    assert!(
        printed.stdout.contains("memory-backend=mem") && printed.stdout.contains("with,, a comma"),
        "{}",
        printed.stdout
    );
    let destination = mapped(&machine, &snapshot).start_incoming().unwrap();
    scene.restore(&snapshot, &destination, &["--memory", "mapped"]).success();
    assert_consistent(&destination);
    assert!(names(&scene.path("tmp")).is_empty());
}
