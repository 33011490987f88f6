//! Steps of the table: a VM is saved in one series of QEMU and brought back in another.

use std::path::Path;

use limosa_testkit::{Disk, DiskFormat, HeartbeatGuest, Machine, Series, kill9};
use rustix::process::Signal;
use serde_json::json;

use crate::destination::mapped;
use crate::overlays::{
    assert_never_torn, first_written, fresh_overlay, linux_on, sectors_written, start_writer, wait_writes,
};
use crate::scene::{
    Saved, Scene, TRICKLE, assert_ballast, assert_consistent, assert_failed, beat, load_ballast, migration_status,
    saved_beat, text, wait_guest, wait_migration_status,
};
use crate::stage::channels::free_port;
use crate::stage::{Found, assert_beats, limosa, save, save_arguments, wait_for, wait_gone, watchdog};
use crate::{clone_scene, run_scene};

/// The machine type that all series know.
const KIND: &str = "pc-q35-7.2";

/// A VM that all series know.
pub(crate) fn machine(series: Series) -> Machine {
    beat().kind(KIND).series(series)
}

/// Whether this QEMU maps a file that is not written as memory that is (`rom=off`, from 8.2 on).
pub(crate) fn maps(series: Series) -> bool {
    series != Series::Oldest
}

/// Whether this QEMU writes and reads mapped-ram files (from 9.0 on).
fn has_mapped_ram(series: Series) -> bool {
    series != Series::Oldest
}

/// Expects a VM in this QEMU to be the one that was saved, after a restore with `how`, and QEMU as it was found.
pub(crate) fn comes_back(scene: &Scene, saved: &Saved, destination: &Machine, how: &[&str]) {
    let vm = destination.start_incoming().unwrap();
    let found = Found::of(&vm);
    let report = scene.restore(&saved.snapshot, &vm, &[how, &["--json"]].concat()).json();
    assert_eq!(migration_status(&vm), "completed", "{report}");
    if how.contains(&"--paused") {
        saved.assert_is_back(&vm);
    } else {
        saved.assert_goes_on(&vm);
        assert_consistent(&vm);
        assert_ballast(&vm);
    }
    found.assert_same_but(&vm, "running");
    scene.assert_tidy();
}

/// Saved by QEMU itself where it can, over several channels, and compressed: each snapshot is restored both ways.
pub(crate) fn saved_in_every_way(source: Series, destination: Series) {
    let by_file: &[&str] = if has_mapped_ram(source) { &["--via", "file"] } else { &[] };
    let ways: [&[&str]; 3] = [
        by_file,
        &["--via", "socket", "--channels", "2"],
        &["--via", "socket", "--channels", "4", "--compression", "zstd"],
    ];
    for how in ways {
        println!("{how:?}");
        let scene = Scene::new();
        let saved = saved_beat(&scene, &machine(source), how);
        comes_back(&scene, &saved, &machine(destination), &["--memory", "lazy"]);
        comes_back(&scene, &saved, &machine(destination), &["--memory", "eager", "--via", "socket", "--paused"]);
    }
}

/// Saved while it runs and writes: in one moment, though the VM continues. Refused where that could cost the VM.
pub(crate) fn saved_in_the_background(source: Series, destination: Series) {
    let scene = Scene::new();
    let vm = machine(source).start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    load_ballast(&vm);
    let found = Found::of(&vm);
    let before = vm.last_pass().unwrap();
    let snapshot = scene.path("snapshot");
    if source == Series::Oldest {
        let refused = limosa(save_arguments(&vm, &snapshot, &["--background"]));
        return assert_failed(&refused, &["leaves the VM hanging", "leave --background out"]);
    }
    let report = save(&vm, &snapshot, &["--background", "--no-sync"]);
    assert_eq!(report["pages"]["resent"], 0, "each page comes once: {report}");
    found.assert_same(&vm);
    assert_beats(&vm);
    let after = vm.last_pass().unwrap();
    drop(vm);
    for memory in ["lazy", "eager"] {
        let vm = machine(destination).start_incoming().unwrap();
        scene.restore(&snapshot, &vm, &["--memory", memory]).success();
        vm.wait_heartbeats(1).unwrap();
        let first = vm.serial().lines().into_iter().find_map(|line| u32::from_str_radix(&line.text, 16).ok()).unwrap();
        assert!((before..=after + 1).contains(&first), "lap {first} after one between {before} and {after}");
        assert_consistent(&vm);
        assert_ballast(&vm);
    }
}

/// Saved live, while memory changes: pages are sent again.
pub(crate) fn saved_live(source: Series, destination: Series) {
    let scene = Scene::new();
    let vm = machine(source).start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    load_ballast(&vm);
    let found = Found::of(&vm);
    for channels in [&[][..], &["--channels", "2"]] {
        let snapshot = scene.path("snapshot");
        save(&vm, &snapshot, &[&["--force", "--no-sync", "--via", "socket"], channels].concat());
        found.assert_same(&vm);
        assert_beats(&vm);
        let vm = machine(destination).start_incoming().unwrap();
        scene.restore(&snapshot, &vm, &["--memory", "lazy"]).success();
        assert_consistent(&vm);
        assert_ballast(&vm);
    }
}

/// Lazily, with pages that are asked for on their own channel where QEMU has one.
pub(crate) fn restored_lazily(source: Series, destination: Series) {
    let scene = Scene::new();
    let saved = saved_beat(&scene, &machine(source), &[]);
    for preempt in ["off", "on"] {
        comes_back(&scene, &saved, &machine(destination), &["--memory", "lazy", "--preempt", preempt]);
    }
}

/// Before the guest runs: over one channel, over several, and from the file by QEMU itself where it can.
pub(crate) fn restored_eagerly(source: Series, destination: Series) {
    let scene = Scene::new();
    let saved = saved_beat(&scene, &machine(source), &[]);
    let port = free_port();
    let channels = ["--via", "socket", "--channels", "2", "--listen", &port];
    let ways: [&[&str]; 3] = [&["--via", "socket"], &channels, &["--via", "file"]];
    for how in ways.into_iter().filter(|how| has_mapped_ram(destination) || !how.contains(&"file")) {
        comes_back(&scene, &saved, &machine(destination), &[&["--memory", "eager", "--paused"], how].concat());
    }
    if has_mapped_ram(destination) {
        // Without limosa.
        let vm = machine(destination).start_incoming().unwrap();
        vm.load_file(&saved.snapshot, 0).unwrap();
        saved.assert_goes_on(&vm);
        assert_consistent(&vm);
    }
}

/// By mapping the snapshot; where QEMU cannot, that is said, and the VM is not touched.
pub(crate) fn restored_mapped(source: Series, destination: Series) {
    let scene = Scene::new();
    let saved = saved_beat(&scene, &machine(source), &[]);
    if maps(destination) {
        let machine = mapped(&machine(destination), &saved.snapshot);
        comes_back(&scene, &saved, &machine, &["--memory", "mapped", "--paused"]);
    } else {
        let vm = machine(destination).start_incoming().unwrap();
        let refused = scene.restore(&saved.snapshot, &vm, &["--memory", "mapped"]);
        assert_failed(&refused, &["cannot restore mapped", "--memory eager"]);
        scene.restore(&saved.snapshot, &vm, &["--memory", "lazy"]).success();
        saved.assert_goes_on(&vm);
    }
}

/// After limosa and its watchdog were killed while pages were missing.
pub(crate) fn recovered(source: Series, destination: Series) {
    for preempt in ["off", "on"] {
        let scene = Scene::new();
        let saved = saved_beat(&scene, &machine(source), &[]);
        let vm = machine(destination).start_incoming().unwrap();
        let found = Found::of(&vm);
        let how = [&["--memory", "lazy", "--preempt", preempt], &TRICKLE[..]].concat();
        let restore = scene.start_restore(&saved.snapshot, &vm, &how);
        wait_guest(&restore);
        assert_beats(&vm);
        let watchdog = watchdog(&restore).unwrap();
        kill9(watchdog).unwrap();
        restore.signal(Signal::KILL);
        restore.wait();
        wait_gone(watchdog);
        wait_migration_status(&vm, "postcopy-paused");
        scene.recover(&saved.snapshot, &vm).success();
        found.assert_same_but(&vm, "running");
        saved.assert_goes_on(&vm);
        assert_consistent(&vm);
        assert_ballast(&vm);
    }
}

/// By `limosa run`, in every way.
pub(crate) fn run(source: Series, destination: Series) {
    let machine = |series| {
        Machine::heartbeat(HeartbeatGuest { rest: 2, ..HeartbeatGuest::over(64 << 10) }).kind(KIND).series(series)
    };
    let scene = run_scene::Scene::between(&machine(source), &machine(destination));
    for how in [&[][..], &["--memory", "lazy"], &["--memory", "eager"]] {
        let run = scene.start(how, &[]);
        run.assert_goes_on();
        let qmp = run.qmp();
        // A newer QEMU does not write memory to a file while a migration is under way.
        wait_for("all memory", || {
            let info = qmp.lock().unwrap().execute("query-migrate", json!({})).unwrap();
            (info["status"] == "completed").then_some(())
        });
        run.check_memory(&qmp);
        qmp.lock().unwrap().execute("quit", json!({})).unwrap();
        let ended = run.wait();
        assert!(ended.status.success(), "{how:?}: {}: {}", ended.status, ended.stderr);
        // QEMU says of its own that a machine type is old, or that it does not know an option.
        let said: Vec<_> = ended.stderr.lines().filter(|line| !line.contains("qemu-system-x86_64: ")).collect();
        match said.as_slice() {
            [] => {}
            [line] if how.is_empty() && !maps(destination) => {
                assert!(line.contains("the memory is not mapped") && line.contains("--memory lazy"), "{line}");
            }
            more => panic!("{how:?}: {more:?}"),
        }
        scene.assert_tidy();
    }
}

/// As several VMs of one snapshot.
pub(crate) fn cloned(source: Series, destination: Series) {
    let machine = |series| {
        Machine::heartbeat(HeartbeatGuest { rest: 5, ..HeartbeatGuest::over(1 << 20) }).kind(KIND).series(series)
    };
    let scene = clone_scene::Scene::between(&machine(source), &machine(destination), |vm, snapshot| {
        save(vm, snapshot, &["--stop"]);
    });
    let report = scene.start(3, &["--json"], &[]).wait().json();
    let clones = report["clones"].as_array().unwrap();
    assert_eq!((clones.len(), report["failed"].as_array().unwrap().len()), (3, 0), "{report}");
    for clone in clones {
        let mapped = clone["mapped_blocks"].as_array().is_some_and(|blocks| !blocks.is_empty());
        assert_eq!(mapped, maps(destination), "{clone}");
        scene.assert_goes_on(clone);
    }
    limosa(["clone", "rm", "--force", scene.clones().to_str().unwrap()]).success();
    assert_eq!(scene.processes(), Vec::<u32>::new());
}

/// With the disks of that moment, below overlays.
pub(crate) fn saved_with_overlays(source: Series, destination: Series) {
    let folder = limosa_testkit::scratch().unwrap();
    let image = folder.path().join("disk.raw");
    Disk::create(&image, DiskFormat::Raw, 16 << 20).unwrap();
    let linux = |path: &Path, format, series| linux_on(path, format).kind(KIND).series(series);
    let vm = start_writer(&linux(&image, DiskFormat::Raw, source));
    let found = Found::of(&vm);
    let snapshot = folder.path().join("snapshot");
    let before = wait_writes(vm.serial(), 2);
    save(&vm, &snapshot, &["--disks", "overlay"]);
    found.assert_same(&vm);
    let after = wait_writes(vm.serial(), 3);
    let frozen = sectors_written(&image, "raw");
    assert!((before..after).contains(&frozen), "{frozen} writes are in the frozen file, {before} and {after} around");
    drop(vm);
    for memory in ["lazy", "eager"] {
        let own = fresh_overlay(folder.path(), memory, &image, "raw");
        let restored = linux(&own, DiskFormat::Qcow2, destination).start_incoming().unwrap();
        let monitor = restored.qmp_socket();
        let words = ["restore", "--qmp", text(&monitor), "--memory", memory, text(&snapshot)];
        limosa(words).success();
        wait_writes(restored.serial(), 3);
        let first = first_written(&restored);
        // The line that was cut off by the save may have its end here, which is no whole line.
        assert!((frozen..=frozen + 2).contains(&first), "{frozen} on the disk, and the guest's first is {first}");
        assert_never_torn(&restored);
    }
}
