//! Files of other programs: recorded migration streams are imported and restored lazily, or restored as they are; and
//! what is exported is loaded by stock QEMU.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use limosa_testkit::{Machine, Vm, note_skip, qemu_img, qemu_io, wait_for};
use serde_json::json;

use crate::needs_qemu;
use crate::scene::{Saved, Scene, assert_ballast, assert_consistent, assert_failed, beat, load_ballast, text};
use crate::stage::{Ended, SOON, names, start_command};

/// Runs limosa in the scene.
fn limosa(scene: &Scene, words: &[&str]) -> Ended {
    start_command(scene.command(words)).wait()
}

/// Runs `machine`'s guest, and has QEMU migrate it, running, to `uri`.
fn recorded(machine: &Machine, stream: PathBuf, uri: &str, prepare: impl FnOnce(&Vm)) -> Saved {
    let source = machine.start().unwrap();
    source.wait_heartbeats(2).unwrap();
    load_ballast(&source);
    prepare(&source);
    source.execute("migrate", json!({ "uri": uri })).unwrap();
    source.wait_migrated().unwrap();
    Saved { snapshot: stream, beat: source.check_heartbeat().unwrap(), lap: source.last_pass().unwrap() }
}

/// Imports, restores lazily and expects the guest to go on from the recorded instant.
fn comes_back_lazily(scene: &Scene, machine: &Machine, saved: &Saved) -> PathBuf {
    let snapshot = scene.path("imported");
    let answer =
        limosa(scene, &["import", text(&saved.snapshot), text(&snapshot), "--json", "--force", "--no-sync"]).json();
    assert!(answer["pages"]["normal"].as_u64() > Some(0), "{answer}");
    let destination = machine.start_incoming().unwrap();
    let report = scene.restore(&snapshot, &destination, &["--memory", "lazy", "--json"]).json();
    assert_eq!(report["mode"], "lazy");
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
    assert_ballast(&destination);
    scene.assert_tidy();
    snapshot
}

/// Loads a stream by stock QEMU's own means and expects the same.
fn loads_in_stock_qemu(machine: &Machine, saved: &Saved, uri: &str) {
    let destination = machine.start_incoming().unwrap();
    destination.execute("migrate-incoming", json!({ "uri": uri, "exit-on-error": false })).unwrap();
    destination.wait_migrated().unwrap();
    destination.wait_run_state("running", SOON).unwrap();
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
    assert_ballast(&destination);
}

#[test]
fn recorded_streams_of_all_machine_types_are_imported_restored_lazily_and_exported() {
    needs_qemu!();
    for (kind, how) in
        [("pc-i440fx-7.2", "exec:cat>"), ("pc-q35-8.0", "file:"), ("pc-q35-9.0", "exec:cat>"), ("pc-q35-10.0", "file:")]
    {
        let scene = Scene::new();
        let machine = beat().kind(kind);
        let stream = scene.path("stream");
        let saved = recorded(&machine, stream.clone(), &format!("{how}{}", stream.display()), |_| {});
        let snapshot = comes_back_lazily(&scene, &machine, &saved);
        let exported = scene.path("exported");
        let answer = limosa(&scene, &["export", text(&snapshot), text(&exported), "--json"]).json();
        let onto_itself = ["export", text(&snapshot), text(&snapshot), "--force"];
        limosa(&scene, &onto_itself).one_line(&[text(&snapshot), "must be different files"]);
        assert_eq!(answer["length"], std::fs::metadata(&exported).unwrap().len());
        let uri =
            if how == "file:" { format!("exec:cat {}", text(&exported)) } else { format!("file:{}", text(&exported)) };
        loads_in_stock_qemu(&machine, &saved, &uri);
    }
}

#[test]
fn a_stream_that_begins_later_or_is_packed_is_imported_too() {
    needs_qemu!();
    let scene = Scene::new();
    let stream = scene.path("later");
    let saved = recorded(&beat(), stream.clone(), &format!("file:{},offset=8192", stream.display()), |_| {});
    comes_back_lazily(&scene, &beat(), &saved);
    // Where it begins can also be said.
    let (named, target) = (format!("file:{},offset=8192", stream.display()), scene.path("named"));
    limosa(&scene, &["import", &named, text(&target)]).success();
    let wrong = format!("file:{},offset=8191", stream.display());
    limosa(&scene, &["import", &wrong, text(&scene.path("none"))]).one_line(&["later"]);

    let stream = scene.path("packed");
    let saved = recorded(&beat(), stream.clone(), &format!("exec:gzip -1 -c >{}", stream.display()), |_| {});
    comes_back_lazily(&scene, &beat(), &saved);
}

#[test]
fn a_background_snapshot_which_has_no_end_of_memory_is_imported() {
    needs_qemu!();
    let scene = Scene::new();
    let probe = beat().start().unwrap();
    if let Err(error) = probe.set_capabilities(&[("background-snapshot", true)]) {
        note_skip(&format!("no background snapshots on this host: {error:#}"));
        return;
    }
    drop(probe);
    let stream = scene.path("stream");
    let source = beat().start().unwrap();
    source.wait_heartbeats(2).unwrap();
    load_ballast(&source);
    source.set_capabilities(&[("background-snapshot", true)]).unwrap();
    source.execute("migrate", json!({ "uri": format!("exec:cat>{}", stream.display()) })).unwrap();
    source.wait_migrated().unwrap();
    drop(source);
    let snapshot = scene.path("imported");
    limosa(&scene, &["import", text(&stream), text(&snapshot), "--checksum"]).success();
    let destination = beat().start_incoming().unwrap();
    scene.restore(&snapshot, &destination, &["--memory", "lazy"]).success();
    assert_ballast(&destination);
    assert_consistent(&destination);
}

#[test]
fn a_mapped_ram_file_inside_another_file_is_imported_as_libvirt_writes_it() {
    needs_qemu!();
    let scene = Scene::new();
    let stream = scene.path("sparse");
    // The length that libvirt's header and XML would have: no multiple of anything.
    let data = 70_001_u32;
    let uri = format!("file:{},offset={}", stream.display(), 92 + data);
    let saved = recorded(&beat(), stream.clone(), &uri, |vm| {
        vm.set_capabilities(&[("mapped-ram", true)]).unwrap();
    });
    comes_back_lazily(&scene, &beat(), &saved);
    // Now with what libvirt puts there (format 6).
    let mut header = b"LibvirtQemudSave".to_vec();
    header.extend([2, data, 1, 6, 0].into_iter().flat_map(u32::to_le_bytes));
    header.resize(92, 0);
    header.extend_from_slice(b"<domain><name>sparse one</name></domain>\0");
    File::options().write(true).open(&stream).unwrap().write_all_at(&header, 0).unwrap();
    let answer = limosa(&scene, &["inspect", text(&stream), "--json"]).json();
    assert_eq!((&answer["libvirt"]["format"], &answer["libvirt"]["name"]), (&json!("sparse"), &json!("sparse one")));
    comes_back_lazily(&scene, &beat(), &saved);
    let piped = format!("{} import - {} <{}", env!("CARGO_BIN_EXE_limosa"), text(&scene.path("a")), text(&stream));
    assert!(Command::new("sh").args(["-c", &piped]).status().unwrap().success());
    let piped = format!("cat {} | {} import - {}", text(&stream), env!("CARGO_BIN_EXE_limosa"), text(&scene.path("b")));
    assert!(!Command::new("sh").args(["-c", &piped]).status().unwrap().success());
    assert!(!scene.path("b").exists());
}

#[test]
fn a_recorded_stream_is_restored_eagerly_as_it_is_and_leaves_nothing() {
    needs_qemu!();
    let scene = Scene::new();
    let stream = scene.path("stream");
    let saved = recorded(&beat(), stream.clone(), &format!("exec:cat>{}", stream.display()), |_| {});
    let before = names(stream.parent().unwrap());
    for via in ["file", "socket"] {
        let destination = beat().start_incoming().unwrap();
        let ended = scene.restore(&stream, &destination, &["--via", via]).success();
        assert!(ended.stderr.contains("limosa import"), "{}", ended.stderr);
        saved.assert_goes_on(&destination);
        assert_consistent(&destination);
        assert_ballast(&destination);
    }
    let destination = beat().start_incoming().unwrap();
    scene.restore(&stream, &destination, &["--memory", "lazy"]).one_line(&["limosa import", "stream"]);
    scene.recover(&stream, &destination).one_line(&["limosa import", "stream"]);
    let file = File::options().write(true).open(&stream).unwrap();
    file.set_len(file.metadata().unwrap().len() - 10).unwrap();
    assert_failed(&scene.restore(&stream, &destination, &[]), &["stream"]);
    assert_eq!(names(stream.parent().unwrap()), before);
    scene.assert_tidy();
}

#[test]
fn bad_words_and_bad_files_are_refused_in_one_line_and_leave_nothing() {
    let scene = Scene::new();
    let at = |name: &str| scene.path(name);
    std::fs::write(at("text"), "Dear Sir or Madam,\n").unwrap();
    std::fs::write(at("header"), b"QEVM\0\0\0\x03\x07\0\0\0\x0bpc-q35-10.0").unwrap();
    std::fs::write(at("part"), [b"LibvirtQemudPart".as_slice(), &[0; 200]].concat()).unwrap();
    let before = names(at("text").parent().unwrap());
    for name in ["text", "header", "part", "absent", "tmp"] {
        limosa(&scene, &["import", text(&at(name)), text(&at("new"))]).one_line(&[name]);
    }
    limosa(&scene, &["import", "/dev/zero", text(&at("new"))]).one_line(&["/dev/zero"]);
    limosa(&scene, &["import", "-", text(&at("new"))]).one_line(&["standard input"]);
    limosa(&scene, &["import", text(&at("header")), text(&at("text"))]).one_line(&["text", "--force"]);
    let cut = ["header", "it ends inside the header of a migration stream"];
    limosa(&scene, &["import", text(&at("header")), text(&at("new")), "--xml", text(&at("xml"))]).one_line(&cut);
    limosa(&scene, &["export", text(&at("text")), text(&at("new"))]).one_line(&["text"]);
    assert_eq!(names(at("text").parent().unwrap()), before);
    let status = Command::new(env!("CARGO_BIN_EXE_limosa")).args(["import", "only one"]).output().unwrap().status;
    assert_eq!(status.code(), Some(2));
}

/// A VM with a disk that can have snapshots.
fn with_disk(machine: Machine, disk: &str) -> Machine {
    let node = json!({ "driver": "qcow2", "node-name": "disk", "file": { "driver": "file", "filename": disk } });
    machine.argument("-blockdev").argument(&node.to_string())
}

/// Has QEMU save the VM inside its disk.
fn save_inside(vm: &Vm, tag: &str) {
    let words = json!({ "job-id": tag, "tag": tag, "vmstate": "disk", "devices": ["disk"] });
    vm.execute("snapshot-save", words).unwrap();
    let job = || {
        let jobs = vm.execute("query-jobs", json!({})).unwrap();
        let job = jobs.as_array().unwrap().iter().find(|job| job["id"] == tag).cloned().unwrap();
        assert!(job["error"].is_null(), "{job}");
        (job["status"] == "concluded").then_some(())
    };
    wait_for("the VM inside the disk", job);
}

/// Puts a snapshot into images of several layouts, from where stock QEMU loads it.
fn goes_back_into_a_disk(scene: &Scene, machine: &Machine, saved: &Saved, snapshot: &Path) {
    let disk = scene.path("other");
    let (disk, export) = (text(&disk), ["export", text(snapshot), "--into"]);
    for options in ["cluster_size=512", "extended_l2=on", "compat=0.10", "cluster_size=2M,lazy_refcounts=on"] {
        qemu_img(["create", "-q", "-f", "qcow2", "-o", options, disk, "24M"]).unwrap();
        qemu_io(["-f", "qcow2", "-c", "write -P 7 1M 1M", disk]).unwrap();
        let report = limosa(scene, &[&export[..], &[disk, "--tag", "back", "--json"]].concat()).json();
        assert_eq!(report["tag"], "back");
        qemu_img(["check", "-q", disk]).unwrap();
        qemu_io(["-f", "qcow2", "-c", "write -P 8 1M 1M", disk]).unwrap();
        let loaded = with_disk(machine.clone(), disk).argument("-loadvm").argument("back").start().unwrap();
        saved.assert_goes_on(&loaded);
        assert_consistent(&loaded);
        assert_ballast(&loaded);
        drop(loaded);
        let read = qemu_io(["-f", "qcow2", "-c", "read -P 7 1M 1M", disk]).unwrap();
        assert!(!read.contains("failed"), "the disk is what it was: {read}");
        qemu_img(["snapshot", "-d", "back", disk]).unwrap();
        qemu_img(["check", "-q", disk]).unwrap();
    }
    let raw = scene.path("raw");
    std::fs::write(&raw, vec![0; 1 << 20]).unwrap();
    limosa(scene, &[&export[..], &[text(&raw), "--tag", "back"]].concat()).one_line(&["no internal snapshots"]);
}

#[test]
fn a_vm_that_was_saved_inside_its_disk_comes_back_lazily() {
    needs_qemu!();
    for (options, kind) in [("compat=1.1", "pc-q35-10.0"), ("compat=0.10,cluster_size=4k", "pc-i440fx-7.2")] {
        let scene = Scene::new();
        let disk = scene.path("disk");
        qemu_img(["create", "-q", "-f", "qcow2", "-o", options, text(&disk), "16M"]).unwrap();
        let machine = beat().kind(kind);
        let source = with_disk(machine.clone(), text(&disk)).start().unwrap();
        source.wait_heartbeats(2).unwrap();
        load_ballast(&source);
        source.stop().unwrap();
        save_inside(&source, "before");
        let saved =
            Saved { snapshot: disk.clone(), beat: source.check_heartbeat().unwrap(), lap: source.last_pass().unwrap() };
        source.cont().unwrap();
        source.wait_heartbeats(2).unwrap();
        save_inside(&source, "later");
        let snapshot = scene.path("imported");
        let import = ["import", text(&disk), text(&snapshot), "--force", "--no-sync", "--tag"];
        limosa(&scene, &[&import[..], &["before"]].concat()).one_line(&[text(&disk), "has it open"]);
        limosa(&scene, &[&import[..], &["none", "-U"]].concat())
            .one_line(&["no snapshot with the id or name \"none\""]);
        let report = limosa(&scene, &[&import[..], &["before", "-U", "--json"]].concat()).json();
        assert!(report["pages"]["normal"].as_u64() > Some(0), "{report}");
        drop(source);
        let inside = limosa(&scene, &["inspect", text(&disk), "--tag", "later", "--json"]).json();
        assert_eq!(inside["machine"], kind);
        assert_eq!(inside["run_state"], "running");
        limosa(&scene, &[&import[..], &["snapshot.name=before"]].concat()).success();
        let destination = machine.start_incoming().unwrap();
        scene.restore(&snapshot, &destination, &["--memory", "lazy"]).success();
        destination.cont().unwrap();
        saved.assert_goes_on(&destination);
        assert_consistent(&destination);
        assert_ballast(&destination);
        drop(destination);
        goes_back_into_a_disk(&scene, &machine, &saved, &snapshot);
        qemu_img(["snapshot", "-c", "disk only", text(&disk)]).unwrap();
        limosa(&scene, &[&import[..], &["disk only"]].concat()).one_line(&["has no state of a VM"]);
    }
}

#[test]
fn all_disks_of_a_vm_have_its_snapshot_or_it_is_refused() {
    needs_qemu!();
    let scene = Scene::new();
    let [first, second, third] = ["first", "second", "third"].map(|name| scene.path(name));
    for disk in [&first, &second, &third] {
        qemu_img(["create", "-q", "-f", "qcow2", text(disk), "16M"]).unwrap();
    }
    let machine = |disks: [&Path; 2]| {
        let other =
            json!({ "driver": "qcow2", "node-name": "other", "file": { "driver": "file", "filename": disks[1] } });
        with_disk(beat(), text(disks[0])).argument("-blockdev").argument(&other.to_string())
    };
    let source = machine([&first, &second]).start().unwrap();
    source.wait_heartbeats(2).unwrap();
    load_ballast(&source);
    source.stop().unwrap();
    let words = json!({ "job-id": "all", "tag": "all", "vmstate": "disk", "devices": ["disk", "other"] });
    source.execute("snapshot-save", words).unwrap();
    wait_for("the VM inside its disks", || {
        let jobs = source.execute("query-jobs", json!({})).unwrap();
        (jobs[0]["status"] == "concluded" && jobs[0]["error"].is_null()).then_some(())
    });
    let saved =
        Saved { snapshot: first.clone(), beat: source.check_heartbeat().unwrap(), lap: source.last_pass().unwrap() };
    drop(source);
    let snapshot = scene.path("imported");
    let import = |disks: &[&Path]| {
        let disks: Vec<_> = disks.iter().flat_map(|disk| ["--disk", text(disk)]).collect();
        let words = ["import", text(&first), text(&snapshot), "--force", "--no-sync", "--tag", "all"];
        limosa(&scene, &[&words[..], &disks].concat())
    };
    import(&[&third]).one_line(&["third", "no snapshot with the name \"all\"", "first"]);
    qemu_img(["snapshot", "-c", "all", text(&third)]).unwrap();
    import(&[&second, &third]).one_line(&["third", "not of the moment"]);
    assert!(!snapshot.exists());
    import(&[&second]).success();
    // Into a set: all of it, or nothing.
    let [fourth, fifth] = ["fourth", "fifth"].map(|name| scene.path(name));
    for disk in [&fourth, &fifth] {
        qemu_img(["create", "-q", "-f", "qcow2", text(disk), "16M"]).unwrap();
    }
    let export = |other: &Path| {
        limosa(&scene, &["export", text(&snapshot), "--into", text(&fourth), "--tag", "all", "--disk", text(other)])
    };
    export(&third).one_line(&["third", "has a snapshot with the name \"all\" already"]);
    export(&fourth).one_line(&["fourth"]);
    let has_snapshots = |disk: &Path| qemu_img(["snapshot", "-l", text(disk)]).unwrap().contains("all");
    assert!(!has_snapshots(&fourth) && !has_snapshots(&fifth));
    export(&fifth).success();
    assert!(has_snapshots(&fourth) && has_snapshots(&fifth));
    let loaded = machine([&fourth, &fifth]).argument("-loadvm").argument("all").start().unwrap();
    saved.assert_goes_on(&loaded);
    assert_ballast(&loaded);
}
