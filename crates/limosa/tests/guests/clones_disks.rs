//! The disks of clones: each clone has its own, on the whole chain that the snapshot froze, whichever file of the chain
//! the command line names.

use std::path::{Path, PathBuf};

use limosa_testkit::{Disk, DiskFormat, HeartbeatGuest, Machine, Qmp, Vm, kill9, scratch};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::clone_scene::Scene;
use crate::needs_qemu;
use crate::overlays::*;
use crate::stage::*;

/// A Linux that writes to its disk, and a scene without a snapshot yet.
fn writing_vm(format: DiskFormat) -> (Scene, Vm, PathBuf) {
    let folder = scratch().unwrap();
    let disk = folder.path().join("disk");
    Disk::create(&disk, format, 16 << 20).unwrap();
    let machine = linux_on(&disk, format);
    let source = start_writer(&machine);
    let (line, snapshot) = (Scene::line(&machine, folder.path()), folder.path().join("snapshot"));
    (Scene { line, snapshot, lap: 0, guest: HeartbeatGuest::default(), folder }, source, disk)
}

/// Expects a clone to go on writing to a disk of the instant of its memory, on which `frozen` sectors were written.
#[track_caller]
fn assert_writes_on(scene: &Scene, clone: &Value, frozen: u64) {
    let said = wait_for("writes of a clone", || {
        let said = scene.serial(clone["number"].as_u64().unwrap());
        assert!(!said.contains("torn"), "memory and disk are of different instants: {said}");
        (said.matches("disk ").count() >= 5).then_some(said)
    });
    let first: u64 = said.lines().find_map(|line| line.trim().strip_prefix("disk ")?.parse().ok()).unwrap();
    // The line that was cut off by the save may have its end here, which is no whole line.
    assert!((frozen..=frozen + 2).contains(&first), "{frozen} on the disk, and the clone's first is {first}");
}

fn overlay_of(clone: &Value) -> PathBuf {
    clone["overlays"][0]["path"].as_str().unwrap().into()
}

fn clones_of(report: &Value, count: usize) -> Vec<Value> {
    let clones = report["clones"].as_array().unwrap().clone();
    assert_eq!(clones.len(), count, "{report}");
    clones
}

/// The file in which the VM went on after this save.
fn overlay_in(report: &Value) -> PathBuf {
    report["overlays"][0]["overlay"].as_str().unwrap().into()
}

#[test]
fn clones_of_a_vm_saved_twice_have_its_last_disk_by_the_command_line_of_its_start() {
    needs_qemu!();
    let (mut scene, source, disk) = writing_vm(DiskFormat::Qcow2);
    let first = overlay_in(&save(&source, &scene.folder.path().join("first"), &["--disks", "overlay"]));
    wait_writes(source.serial(), 3);
    save(&source, &scene.snapshot, &["--disks", "overlay"]);
    wait_writes(source.serial(), 2);
    let frozen = sectors_written(&first, "qcow2");
    assert!(frozen > sectors_written(&disk, "qcow2"));
    let contents = || [&disk, &first].map(|path| std::fs::read(path).unwrap());
    let before = contents();
    let given = scene.line.clone();
    for line in [described_by_drive(&given, &disk), described_by_libvirt(&given, &disk), given] {
        scene.line = line;
        let clones = clones_of(&scene.start(2, &["--json"], &[]).wait().json(), 2);
        clones.iter().for_each(|clone| assert_writes_on(&scene, clone, frozen));
        let clones_dir = scene.clones();
        limosa(["clone", "stop", clones_dir.to_str().unwrap()]).success();
        for clone in &clones {
            assert!(sectors_written(&overlay_of(clone), "qcow2") > frozen);
            let chain = qemu_img(&["info", "--backing-chain", overlay_of(clone).to_str().unwrap()]);
            assert_eq!(chain.matches("\nfile format:").count(), 3, "{chain}");
        }
        limosa(["clone", "rm", clones_dir.to_str().unwrap()]).success();
        assert_eq!(names(&clones_dir), Vec::<String>::new());
    }
    assert!(contents() == before, "a frozen disk was written to");
    wait_writes(source.serial(), 2);
    assert_never_torn(&source);
}

#[test]
fn clones_of_a_clone_see_its_writes_by_the_first_command_line_and_by_its_own() {
    needs_qemu!();
    let (mut scene, source, _) = writing_vm(DiskFormat::Raw);
    save(&source, &scene.snapshot, &["--disks", "overlay"]);
    drop(source);
    let parent = clones_of(&scene.start(1, &["--json"], &[]).wait().json(), 1).remove(0);
    wait_for("writes of the parent", || (scene.serial(1).matches("disk ").count() >= 5).then_some(()));
    let branch = scene.folder.path().join("branch");
    let monitor = parent["monitor"].as_str().unwrap();
    let saved = limosa(["save", "--json", "--disks", "overlay", "--qmp", monitor, branch.to_str().unwrap()]).json();
    let frozen = sectors_written(&overlay_of(&parent), "qcow2");
    assert_eq!(saved["overlays"][0]["frozen"], parent["overlays"][0]["path"]);
    let contents = std::fs::read(overlay_of(&parent)).unwrap();
    let own_line = own_line(&parent);
    scene.snapshot = branch;
    for line in [scene.line.clone(), own_line] {
        scene.line = line;
        for clone in clones_of(&scene.start(2, &["--json"], &[]).wait().json(), 2) {
            assert_eq!(clone["overlays"][0]["backing"], parent["overlays"][0]["path"]);
            assert_writes_on(&scene, &clone, frozen);
        }
    }
    assert!(std::fs::read(overlay_of(&parent)).unwrap() == contents, "the parent's frozen disk was written to");
    limosa(["clone", "rm", "--force", scene.clones().to_str().unwrap()]).success();
    assert!(overlay_of(&parent).exists(), "a snapshot stands on it");
}

/// The command line of a clone's QEMU, without what limosa has added for this one clone.
fn own_line(clone: &Value) -> Vec<String> {
    let words = std::fs::read(format!("/proc/{}/cmdline", clone["pid"])).unwrap();
    let words = String::from_utf8(words).unwrap();
    let serial = format!("serial-{}", clone["number"]);
    let mut line: Vec<_> =
        words.trim_end_matches('\0').split('\0').map(|word| word.replace(&serial, "serial-{n}")).collect();
    for added in ["-incoming", "-qmp"] {
        let at = line.iter().rposition(|word| word == added).unwrap();
        line.drain(at..=at + 1);
    }
    assert!(line.iter().any(|word| word.contains("limosa-frozen0")), "{line:?}");
    line
}

#[test]
fn names_that_mean_no_disk_or_several_are_refused_once_and_before_anything_is_made() {
    needs_qemu!();
    let folder = scratch().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (golden, other) = (path("golden"), path("other"));
    for disk in [&golden, &other] {
        Disk::create(disk, DiskFormat::Raw, 1 << 20).unwrap();
    }
    let mut machine = small();
    for name in ["a", "b"] {
        let path = fresh_overlay(folder.path(), name, &golden, "raw");
        machine = machine.disk(Disk { path, format: DiskFormat::Qcow2, writable: true });
    }
    let mut scene = frozen_scene(&machine, folder);
    let given = scene.line.clone();
    let instead = |name: &Path, format: &str| {
        let a = format!("filename={}", scene.folder.path().join("a").display());
        let format = format!("driver={format},node-name=disk0");
        let put = |word: &String| match word {
            word if word.ends_with(&a) => word.replace(&a, &format!("filename={}", name.display())),
            word => word.replace("driver=qcow2,node-name=disk0", &format),
        };
        given.iter().map(put).collect::<Vec<_>>()
    };
    let lines = [
        (instead(&golden, "raw"), "is below the frozen disks"),
        (instead(&other, "raw"), "the snapshot did not freeze it"),
        (instead(&scene.folder.path().join("a"), "raw"), "whose format is qcow2"),
        (instead(&scene.folder.path().join("b"), "qcow2"), "is named twice"),
    ];
    for (line, said) in lines {
        scene.line = line;
        scene.start(4, &[], &[]).wait().one_line(&[said]);
        assert!(!scene.clones().exists());
    }
    scene.line = given;
    clones_of(&scene.start(1, &["--json"], &[]).wait().json(), 1);
}

#[test]
fn clones_of_a_linux_that_writes_to_its_disk_have_their_own_disks() {
    needs_qemu!();
    let folder = scratch().unwrap();
    let disk = folder.path().join("disk.qcow2");
    Disk::create(&disk, DiskFormat::Qcow2, 16 << 20).unwrap();
    let machine = linux_on(&disk, DiskFormat::Qcow2);
    let source = start_writer(&machine);
    let snapshot = folder.path().join("snapshot");
    // Memory and disk of one instant; the VM continues on its overlay.
    save(&source, &snapshot, &["--disks", "overlay"]);
    wait_writes(source.serial(), 2);
    let frozen = std::fs::read(&disk).unwrap();
    let before = sectors_written(&disk, "qcow2");
    let mut scene = Scene {
        line: Scene::line(&machine, folder.path()),
        snapshot,
        lap: 0,
        guest: HeartbeatGuest::default(),
        folder,
    };
    for (backing, as_libvirt) in [("absolute", false), ("relative", true)] {
        if as_libvirt {
            scene.line = described_by_libvirt(&scene.line, &disk);
        }
        let report = scene.start(2, &["--json", "--backing", backing], &[]).wait().json();
        let clones = report["clones"].as_array().unwrap().clone();
        assert_eq!(clones.len(), 2, "{report}");
        for clone in &clones {
            let number = clone["number"].as_u64().unwrap();
            wait_for("writes of a clone", || {
                let said = scene.serial(number);
                assert!(!said.contains("torn"), "memory and disk are of different instants: {said}");
                (said.matches("disk ").count() >= 5).then_some(())
            });
        }
        let clones_dir = scene.clones();
        let branch = scene.folder.path().join("branch");
        if as_libvirt {
            let monitor = clones[0]["monitor"].as_str().unwrap();
            let words = ["save", "--disks", "overlay", "--overlay-dir", scene.folder.path().to_str().unwrap()];
            limosa(words.into_iter().chain(["--qmp", monitor, branch.to_str().unwrap()])).success();
        }
        limosa(["clone", "stop", clones_dir.to_str().unwrap()]).success();
        if as_libvirt {
            assert_disk_stays_below(&scene, &clones[0], &branch);
            continue;
        }
        for clone in &clones {
            let overlay = PathBuf::from(clone["overlays"][0]["path"].as_str().unwrap());
            assert!(sectors_written(&overlay, "qcow2") > before, "{}", overlay.display());
        }
        limosa(["clone", "rm", clones_dir.to_str().unwrap()]).success();
        assert_eq!(names(&clones_dir), Vec::<String>::new());
    }
    assert!(std::fs::read(&disk).unwrap() == frozen, "the frozen disk was written to");
    // The source was no clone's business.
    wait_writes(source.serial(), 2);
}

/// Also by hand, with many: `LIMOSA_CLONES=200`.
#[test]
fn clones_that_are_killed_disturb_no_others_and_not_what_they_share() {
    needs_qemu!();
    let count = std::env::var("LIMOSA_CLONES").map_or(5, |count| count.parse().unwrap());
    let (scene, source, disk) = writing_vm(DiskFormat::Qcow2);
    save(&source, &scene.snapshot, &["--disks", "overlay"]);
    drop(source);
    let shared = || [&disk, &scene.snapshot].map(|path| std::fs::read(path).unwrap());
    let (before, frozen) = (shared(), sectors_written(&disk, "qcow2"));
    let report = scene.start(count, &["--json", "--paused"], &[]).wait().json();
    let clones = clones_of(&report, usize::try_from(count).unwrap());
    let is_killed = |place: usize| place % 10 == 3;
    // Ten run at once, so that each gets its share of the processors.
    for group in clones.chunks(10) {
        let monitor = |clone: &Value| Qmp::connect(Path::new(clone["monitor"].as_str().unwrap()), SOON).unwrap();
        let mut monitors: Vec<_> = group.iter().map(monitor).collect();
        monitors.iter_mut().for_each(|qmp| _ = qmp.execute("cont", json!({})).unwrap());
        for (_, clone) in group.iter().enumerate().filter(|(place, _)| is_killed(*place)) {
            kill9(u32::try_from(clone["pid"].as_u64().unwrap()).unwrap()).unwrap();
        }
        for (place, (clone, qmp)) in group.iter().zip(&mut monitors).enumerate() {
            if !is_killed(place) {
                // Its guest reads back what it has written, and compares it with its memory.
                assert_writes_on(&scene, clone, frozen);
                qmp.execute("stop", json!({})).unwrap();
            }
        }
    }
    let (killed, alive): (Vec<_>, Vec<_>) = clones.iter().enumerate().partition(|(place, _)| is_killed(*place));
    let folder = scene.clones().display().to_string();
    let ended = limosa(["clone", "list", &folder, "--json"]).json();
    let ended = ended["clones"].as_array().unwrap().iter().filter(|clone| clone["state"] == "ended").count();
    assert_eq!(ended, killed.len());
    limosa(["clone", "stop", &folder]).success();
    for (_, clone) in &alive {
        let overlay = overlay_of(clone).display().to_string();
        assert!(sectors_written(Path::new(&overlay), "qcow2") > frozen, "{overlay}");
        qemu_img(&["check", "-f", "qcow2", &overlay]);
    }
    assert!(shared() == before, "the frozen disk or the snapshot was written to");
    limosa(["clone", "rm", &folder]).success();
    assert_eq!(names(&scene.clones()), Vec::<String>::new());
}

/// A VM that was saved with overlays, and has ended.
fn frozen_scene(machine: &Machine, folder: TempDir) -> Scene {
    let source = machine.start().unwrap();
    source.wait_heartbeats(1).unwrap();
    let snapshot = folder.path().join("snapshot");
    save(&source, &snapshot, &["--disks", "overlay"]);
    let line = Scene::line(machine, folder.path());
    Scene { line, snapshot, lap: 0, guest: HeartbeatGuest::default(), folder }
}

#[test]
fn a_lower_file_that_was_written_since_the_save_is_refused_before_anything_is_made() {
    needs_qemu!();
    let folder = scratch().unwrap();
    let base = folder.path().join("base");
    Disk::create(&base, DiskFormat::Raw, 1 << 20).unwrap();
    let path = fresh_overlay(folder.path(), "top", &base, "raw");
    let scene = frozen_scene(&small().disk(Disk { path, format: DiskFormat::Qcow2, writable: true }), folder);
    clones_of(&scene.start(1, &["--json"], &[]).wait().json(), 1);
    limosa(["clone", "rm", "--force", scene.clones().to_str().unwrap()]).success();
    std::fs::remove_dir(scene.clones()).unwrap();
    let file = std::fs::File::options().write(true).open(&base).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"x", 0).unwrap();
    let written = format!("stands on {}, which was written after the VM was saved", base.display());
    scene.start(4, &[], &[]).wait().one_line(&[&written]);
    assert!(!scene.clones().exists());
}

#[test]
fn a_clone_gets_its_vm_only_on_the_images_that_the_saved_vm_had_below_its_disk() {
    needs_qemu!();
    let folder = scratch().unwrap();
    let [named, used] = ["named", "used"].map(|name| folder.path().join(name));
    for disk in [&named, &used] {
        Disk::create(disk, DiskFormat::Raw, 1 << 20).unwrap();
    }
    let middle = fresh_overlay(folder.path(), "middle", &named, "raw");
    let top = fresh_overlay(folder.path(), "top", &middle, "qcow2");
    let node = |options: &str, path: &Path| format!("{options},file.driver=file,file.filename={}", path.display());
    let nodes = [
        node("raw,node-name=u,read-only=on", &used),
        node("qcow2,node-name=m,read-only=on,backing=u", &middle),
        node("qcow2,node-name=t,backing=m", &top),
    ];
    let mut machine = small();
    for node in &nodes {
        machine = machine.argument("-blockdev").argument(node);
    }
    let mut scene = frozen_scene(&machine.argument("-device").argument("virtio-blk-pci,drive=t"), folder);
    clones_of(&scene.start(1, &["--json"], &[]).wait().json(), 1);
    // By the files alone, another image is at the bottom.
    for node in &nodes {
        let at = scene.line.iter().position(|word| word == node).unwrap();
        scene.line.drain(at - 1..=at);
    }
    let drive = format!("file={},format=qcow2,if=none,id=t", top.display());
    let refused = scene.start(1, &[], &["-drive", &drive]).wait();
    assert_eq!(refused.status.code(), Some(1), "{}", refused.stderr);
    let was = format!("when the VM was saved it was {}, {}", middle.display(), used.display());
    assert!(refused.stderr.contains(&was), "{}", refused.stderr);
}

/// Removes the clones, one of them saved: the disk that its snapshot stands on stays, and no other.
fn assert_disk_stays_below(scene: &Scene, saved: &Value, branch: &Path) {
    let disk = PathBuf::from(saved["overlays"][0]["path"].as_str().unwrap());
    let contents = std::fs::read(&disk).unwrap();
    let removed = limosa(["clone", "rm", scene.clones().to_str().unwrap()]);
    let said = removed.stderr.clone();
    removed.success();
    assert!(said.contains(&format!("{} stays: {} needs it", disk.display(), branch.display())), "{said}");
    assert_eq!(names(&scene.clones()), [saved["name"].as_str().unwrap()]);
    assert!(std::fs::read(&disk).unwrap() == contents);
}

/// The disk in a `-drive`.
fn described_by_drive(line: &[String], disk: &Path) -> Vec<String> {
    let mut line = line.to_vec();
    for node in ["node-name=disk0-file", "node-name=disk0-format"] {
        let at = line.iter().position(|word| word.contains(node)).unwrap();
        line.drain(at - 1..=at);
    }
    let drive = format!("file={},format=qcow2,if=none,id=disk0-format", disk.display());
    // Before the device that uses it.
    line.splice(1..1, ["-drive".to_owned(), drive]);
    line
}

/// The disk in one JSON object that says that nothing is below it, as libvirt writes an image without a backing file.
fn described_by_libvirt(line: &[String], disk: &Path) -> Vec<String> {
    let file = format!("filename={}", disk.display());
    let at = line.iter().position(|word| word.ends_with(&file)).unwrap();
    let mut line = line.to_vec();
    line.drain(at - 1..=at);
    let node = json!({
        "driver": "qcow2", "node-name": "disk0-format", "backing": null, "discard": "unmap",
        "file": { "driver": "file", "filename": disk }
    });
    let format = line.iter_mut().find(|word| word.contains("node-name=disk0-format")).unwrap();
    *format = node.to_string();
    line
}

#[test]
fn a_vm_that_runs_is_forked_again_and_again_and_continues() {
    needs_qemu!();
    let (mut scene, source, _disk) = writing_vm(DiskFormat::Qcow2);
    let socket = source.qmp_socket();
    for time in 1..=2 {
        // The second fork freezes the overlay of the first: the command line names the lowest file of the chain.
        scene.snapshot = scene.folder.path().join(format!("fork-{time}"));
        let report = scene.start(2, &["--json", "--qmp", socket.to_str().unwrap()], &[]).wait().json();
        assert!(report["saved"]["downtime_ms"].is_number(), "{report}");
        assert_eq!(report["saved"]["overlays"].as_array().unwrap().len(), 1, "{report}");
        let clones = report["clones"].as_array().unwrap();
        assert_eq!(clones.len(), 2, "{report}");
        for clone in clones {
            let number = clone["number"].as_u64().unwrap();
            wait_for("writes of a clone", || {
                let said = scene.serial(number);
                assert!(!said.contains("torn"), "memory and disk are of different instants: {said}");
                (said.matches("disk ").count() >= 5).then_some(())
            });
        }
        wait_writes(source.serial(), 2);
    }
    assert_never_torn(&source);
    // A snapshot that exists is not replaced unasked, and nothing is started.
    scene.start(1, &["--qmp", socket.to_str().unwrap()], &[]).wait().one_line(&["fork-2", "--force"]);
    assert_eq!(scene.list().len(), 4);
    limosa(["clone", "rm", "--force", scene.clones().to_str().unwrap()]).success();
}
