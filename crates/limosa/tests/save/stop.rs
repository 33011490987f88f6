//! A VM that is to stay stopped (`--stop`), and VMs with disks: memory and disks of one instant, or a refusal.

use std::path::Path;
use std::time::UNIX_EPOCH;

use crate::needs_qemu;
use crate::stage::*;
use limosa_testkit::{Disk, DiskFormat, LinuxGuest, Machine, Vm, scratch};
use serde_json::{Value, json};

fn resume(vm: &Vm, more: &[&str]) -> Ended {
    let monitor = vm.qmp_socket().display().to_string();
    limosa(["resume", "--qmp", &monitor].iter().chain(more).copied())
}

fn inspect(file: &Path) -> Value {
    limosa(["inspect", "--json", &file.display().to_string()]).json()
}

/// Expects that the stopped guest here and the one that QEMU loads from the file are the same to the byte.
fn assert_twin(machine: &Machine, vm: &Vm, file: &Path) {
    let twin = machine.start_incoming_stopped().unwrap();
    twin.load_file(file, 0).unwrap();
    let span = machine.heartbeat_guest().unwrap().span();
    assert_eq!(twin.check_heartbeat().unwrap(), vm.check_heartbeat().unwrap());
    assert!(twin.read_memory(span.clone()).unwrap() == vm.read_memory(span).unwrap(), "the memory differs");
    twin.cont().unwrap();
    assert_beats(&twin);
}

#[test]
fn a_vm_saved_with_stop_stays_stopped_and_the_file_holds_its_last_instant() {
    needs_qemu!();
    for via in ["socket", "file"] {
        let (folder, file) = place();
        let vm = small().start().unwrap();
        vm.wait_heartbeats(1).unwrap();
        let found = Found::of(&vm);
        let report = save(&vm, &file, &["--stop", "--via", via]);
        assert_eq!((&report["vm_state"], &report["downtime_ms"]), (&"postmigrate".into(), &Value::Null));
        found.assert_same_but(&vm, "postmigrate");
        assert_eq!(names(folder.path()), ["vm.snapshot"]);
        assert_eq!(inspect(&file)["run_state"], "running", "it comes back running, as it was");
        assert_twin(&small(), &vm, &file);
        assert_eq!(vm.run_state().unwrap(), "postmigrate");
    }
}

#[test]
fn a_vm_saved_with_stop_is_continued_only_on_express_wish() {
    needs_qemu!();
    let (_folder, file) = place();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    let found = Found::of(&vm);
    save(&vm, &file, &["--stop"]);
    // The VM may have been restored elsewhere by now: two must not run.
    resume(&vm, &[]).one_line(&["postmigrate", "may run elsewhere", "--force"]);
    found.assert_same_but(&vm, "postmigrate");
    limosa(save_arguments(&vm, &file, &["--force"])).one_line(&["earlier save or migration", "limosa resume --force"]);
    let resumed = resume(&vm, &["--force", "--json"]).json();
    assert_eq!(resumed["vm_state"], "running");
    found.assert_same(&vm);
    assert_beats(&vm);
    // A second time there is nothing to do.
    let again = resume(&vm, &["--json"]).json();
    assert_eq!(again["vm_state"], "running");
    save(&vm, &file, &["--force"]);
}

/// A file takes the name while memory moves, so that it cannot be given to the snapshot. The save has a rate at which
/// it would never finish; then the limit is lifted.
#[track_caller]
fn take_the_name(vm: &Vm, file: &Path) {
    wait_moving(vm);
    std::fs::write(file, "precious").unwrap();
    vm.execute("migrate-set-parameters", json!({ "max-bandwidth": 0 })).unwrap();
}

#[test]
fn with_stop_the_vm_is_given_up_only_when_the_file_is_in_place() {
    needs_qemu!();
    for via in ["socket", "file"] {
        let (folder, file) = place();
        let vm = small().start().unwrap();
        vm.wait_heartbeats(1).unwrap();
        let found = Found::of(&vm);
        let saving = start(save_arguments(&vm, &file, &["--stop", "--via", via, "--max-bandwidth", "1M"]));
        take_the_name(&vm, &file);
        saving.wait().one_line(&["vm.snapshot", "exists already"]);
        found.assert_same(&vm);
        assert_beats(&vm);
        assert_eq!(std::fs::read(&file).unwrap(), b"precious");
        assert_eq!(names(folder.path()), ["vm.snapshot"]);
    }
}

#[test]
fn a_vm_that_goes_on_outlives_a_file_that_gets_no_name() {
    needs_qemu!();
    for via in ["socket", "file"] {
        let (folder, file) = place();
        let vm = small().start().unwrap();
        vm.wait_heartbeats(1).unwrap();
        let found = Found::of(&vm);
        let saving = start(save_arguments(&vm, &file, &["--via", via, "--max-bandwidth", "1M"]));
        take_the_name(&vm, &file);
        saving.wait().one_line(&["vm.snapshot", "exists already"]);
        found.assert_same(&vm);
        assert_beats(&vm);
        assert_eq!(std::fs::read(&file).unwrap(), b"precious");
        assert_eq!(names(folder.path()), ["vm.snapshot"]);
    }
}

/// When a file was last written to, in nanoseconds since 1970.
fn modified(path: &Path) -> u64 {
    let since = std::fs::metadata(path).unwrap().modified().unwrap().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(since.as_nanos()).unwrap()
}

/// A beat guest with a writable disk of each format, and their images.
fn with_disks(folder: &Path) -> (Machine, Vec<std::path::PathBuf>) {
    let paths = vec![folder.join("a.raw"), folder.join("b.qcow2")];
    let raw = Disk::create(&paths[0], DiskFormat::Raw, 8 << 20).unwrap();
    let qcow2 = Disk::create(&paths[1], DiskFormat::Qcow2, 8 << 20).unwrap();
    (small().disk(raw).disk(qcow2), paths)
}

#[test]
fn a_vm_with_writable_disks_that_would_go_on_is_refused_before_anything_starts() {
    needs_qemu!();
    let disks = scratch().unwrap();
    let (folder, file) = place();
    let vm = with_disks(disks.path()).0.start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    let found = Found::of(&vm);
    for via in ["socket", "file"] {
        let refused = limosa(save_arguments(&vm, &file, &["--via", via]));
        refused.one_line(&["writable disks", "disk0", "disk1", "different instants", "--stop", "--disks ignore"]);
        found.assert_same(&vm);
        assert!(names(folder.path()).is_empty());
    }
    let migration = vm.execute("query-migrate", json!({})).unwrap();
    assert_eq!(migration, json!({}), "no migration was ever begun");
    assert_beats(&vm);
}

#[test]
fn with_stop_the_state_of_each_writable_disk_is_recorded() {
    needs_qemu!();
    for via in ["socket", "file"] {
        let disks = scratch().unwrap();
        let (_folder, file) = place();
        let (machine, paths) = with_disks(disks.path());
        let vm = machine.start().unwrap();
        vm.wait_heartbeats(1).unwrap();
        save(&vm, &file, &["--stop", "--via", via]);
        let summary = inspect(&file);
        let recorded = summary["manifest"]["disks"].as_array().unwrap();
        assert_eq!(recorded.len(), 2, "the read-only boot disk is not among them: {recorded:?}");
        for (index, (disk, path)) in recorded.iter().zip(&paths).enumerate() {
            assert_eq!(disk["path"].as_str().map(Path::new), Some(&**path));
            assert_eq!(disk["node"], format!("disk{index}-format"));
            assert_eq!(disk["format"], ["raw", "qcow2"][index]);
            assert_eq!(disk["size"], std::fs::metadata(path).unwrap().len(), "{disk}");
            assert_eq!(disk["mtime_ns"].as_u64(), Some(modified(path)), "{disk}");
        }
        // The VM gave its disks up, and takes them back.
        resume(&vm, &["--force"]).success();
        assert_beats(&vm);
    }
}

#[test]
fn disks_are_recorded_as_the_guest_left_them_not_as_the_save_found_them() {
    needs_qemu!();
    for via in ["socket", "file"] {
        let disks = scratch().unwrap();
        let (_folder, file) = place();
        let path = disks.path().join("disk.raw");
        let disk = Disk::create(&path, DiskFormat::Raw, 8 << 20).unwrap();
        let vm = Machine::linux(LinuxGuest::default()).disk(disk).start().unwrap();
        vm.wait_counts(1).unwrap();
        let before = modified(&path);
        let saving = start(save_arguments(&vm, &file, &["--stop", "--via", via, "--max-bandwidth", "1M"]));
        wait_moving(&vm);
        vm.shell("dd if=/dev/urandom of=/dev/vda bs=4k count=3 conv=fsync").unwrap();
        assert!(modified(&path) > before && saving.is_running());
        vm.execute("migrate-set-parameters", json!({ "max-bandwidth": 0 })).unwrap();
        saving.wait().success();
        let recorded = &inspect(&file)["manifest"]["disks"][0];
        assert_eq!(recorded["mtime_ns"].as_u64(), Some(modified(&path)), "{recorded}");
    }
}

#[test]
fn a_stopped_vm_with_disks_is_saved_with_their_state() {
    needs_qemu!();
    let disks = scratch().unwrap();
    let (_folder, file) = place();
    let vm = with_disks(disks.path()).0.start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    vm.stop().unwrap();
    save(&vm, &file, &[]);
    assert_eq!(inspect(&file)["manifest"]["disks"].as_array().unwrap().len(), 2);
}

#[test]
fn disks_that_are_kept_consistent_elsewhere_are_ignored_on_demand() {
    needs_qemu!();
    let disks = scratch().unwrap();
    let vm = with_disks(disks.path()).0.start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    let found = Found::of(&vm);
    for via in ["socket", "file"] {
        let (_folder, file) = place();
        save(&vm, &file, &["--disks", "ignore", "--via", via]);
        found.assert_same(&vm);
        assert_beats(&vm);
        assert_eq!(inspect(&file)["manifest"].get("disks"), None);
    }
}
