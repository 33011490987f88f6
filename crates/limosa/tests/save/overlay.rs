//! `save --disks overlay`: the VM continues, and the snapshot's memory and disks are of one instant.

use std::path::Path;

use crate::needs_qemu;
use crate::overlays::*;
use crate::stage::*;
use limosa_testkit::{Disk, DiskFormat, Vm};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

fn restore_arguments(vm: &Vm, snapshot: &Path, more: &[&str]) -> Vec<String> {
    let mut words = vec!["restore".to_owned(), "--qmp".to_owned(), vm.qmp_socket().display().to_string()];
    words.extend(more.iter().map(|&word| word.to_owned()));
    words.push(snapshot.display().to_string());
    words
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no {key} in {value}"))
}

/// Waits until the VM is being saved; what QEMU says of an earlier save does not count.
fn wait_active(vm: &Vm) {
    wait_for("a migration", || (vm.execute("query-migrate", json!({})).unwrap()["status"] == "active").then_some(()));
}

#[test]
fn memory_and_disk_of_a_writing_guest_are_of_one_instant_and_both_vms_go_on() {
    needs_qemu!();
    let folder = limosa_testkit::scratch().unwrap();
    let image = folder.path().join("disk.raw");
    Disk::create(&image, DiskFormat::Raw, 16 * MIB).unwrap();
    let vm = start_writer(&linux_on(&image, DiskFormat::Raw));
    let found = Found::of(&vm);
    let mut below = (image, "raw");
    let ways = [
        (&["--via", "file"][..], "lazy"),
        (&["--via", "socket"], "eager"),
        (&["--via", "socket", "--channels", "2"], "lazy"),
    ];
    for (round, (via, mode)) in ways.into_iter().enumerate() {
        let snapshot = folder.path().join(format!("snapshot{round}"));
        let before = wait_writes(vm.serial(), 2);
        let report = save(&vm, &snapshot, &[&["--disks", "overlay"], via].concat());
        found.assert_same(&vm);
        let overlay = report["overlays"][0].clone();
        assert_eq!(text(&overlay, "frozen"), below.0.to_str().unwrap());
        assert_eq!(text(&overlay, "format"), below.1);
        assert_eq!(top_file(&vm, "disk0"), Path::new(text(&overlay, "overlay")));
        let after = wait_writes(vm.serial(), 5);
        let frozen = sectors_written(&below.0, below.1);
        assert!(
            (before..after).contains(&frozen),
            "{frozen} writes are in the frozen file, {before} and {after} around"
        );

        // The restored VM uses its own overlay, and neither disturbs the other.
        let own = fresh_overlay(folder.path(), &format!("own-{round}"), &below.0, below.1);
        let restored = linux_on(&own, DiskFormat::Qcow2).start_incoming().unwrap();
        limosa(restore_arguments(&restored, &snapshot, &["--memory", mode])).success();
        wait_writes(restored.serial(), 4);
        let first = first_written(&restored);
        // The line that was cut off by the save may have its end here, which is no whole line.
        assert!((frozen..=frozen + 2).contains(&first), "{frozen} on the disk, and the guest's first is {first}");
        assert_never_torn(&restored);
        restored.stop().unwrap();
        assert!(sectors_written(&own, "qcow2") >= last_written(&restored));
        drop(restored);
        qemu_img(&["check", "-q", own.to_str().unwrap()]);
        assert_eq!(sectors_written(&below.0, below.1), frozen, "the frozen file was written to");
        wait_writes(vm.serial(), 2);
        assert_never_torn(&vm);
        below = (text(&overlay, "overlay").into(), "qcow2");
    }
    vm.stop().unwrap();
    assert!(sectors_written(&below.0, below.1) >= last_written(&vm));
    drop(vm);
    qemu_img(&["check", "-q", below.0.to_str().unwrap()]);
    let chain = qemu_img(&["info", "--backing-chain", below.0.to_str().unwrap()]);
    assert_eq!(chain.matches("\nfile format:").count(), ways.len() + 1, "{chain}");
}

#[test]
fn a_restore_refuses_disks_that_would_ruin_what_others_stand_on() {
    needs_qemu!();
    let folder = limosa_testkit::scratch().unwrap();
    let image = folder.path().join("disk.raw");
    Disk::create(&image, DiskFormat::Raw, 16 * MIB).unwrap();
    let on = |path: &Path, format| small().disk(Disk { path: path.to_owned(), format, writable: true });
    let snapshot = folder.path().join("snapshot");
    let vm = on(&image, DiskFormat::Raw).start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    let overlay = text(&save(&vm, &snapshot, &["--disks", "overlay"])["overlays"][0], "overlay").to_owned();
    assert_beats(&vm);
    drop(vm);
    let advice = format!("qemu-img create -f qcow2 -F raw -b {}", image.display());
    let refused = |path: &Path, format, words: &[&str]| {
        let destination = on(path, format).start_incoming().unwrap();
        let found = Found::of(&destination);
        let line = limosa(restore_arguments(&destination, &snapshot, &[])).one_line(words);
        assert!(line.contains(&advice), "{line}");
        found.assert_same(&destination);
    };
    refused(&image, DiskFormat::Raw, &["would write to", &overlay]);
    refused(Path::new(&overlay), DiskFormat::Qcow2, &["newer than the memory"]);
    let other = folder.path().join("other.qcow2");
    Disk::create(&other, DiskFormat::Qcow2, 16 * MIB).unwrap();
    refused(&other, DiskFormat::Qcow2, &["does not stand directly on"]);
    let used = fresh_overlay(folder.path(), "used", &image, "raw");
    let done = std::process::Command::new("qemu-io").args(["-c", "write 64k 512"]).arg(&used).output().unwrap();
    assert!(done.status.success());
    refused(&used, DiskFormat::Qcow2, &["has been written to"]);

    let fresh = fresh_overlay(folder.path(), "fresh", &image, "raw");
    let destination = on(&fresh, DiskFormat::Qcow2).start_incoming().unwrap();
    limosa(restore_arguments(&destination, &snapshot, &[])).success();
    assert_beats(&destination);
    drop(destination);
    // As after a merge of the overlay: the frozen file has changed.
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    file.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(5)).unwrap();
    let destination =
        on(&fresh_overlay(folder.path(), "late", &image, "raw"), DiskFormat::Qcow2).start_incoming().unwrap();
    limosa(restore_arguments(&destination, &snapshot, &[])).one_line(&["was written after the VM was saved"]);
}

#[test]
fn disks_of_every_configuration_get_their_overlays() {
    needs_qemu!();
    let folder = limosa_testkit::scratch().unwrap();
    let at = |name: &str| folder.path().join(name);
    let raw = Disk::create(&at("a.raw"), DiskFormat::Raw, MIB).unwrap();
    Disk::create(&at("drive.qcow2"), DiskFormat::Qcow2, MIB).unwrap();
    Disk::create(&at("base.qcow2"), DiskFormat::Qcow2, MIB).unwrap();
    let chained = fresh_overlay(folder.path(), "chained.qcow2", &at("base.qcow2"), "qcow2");
    Disk::create(&at("cd.iso"), DiskFormat::Raw, MIB).unwrap();
    Disk::create(&at("code.fd"), DiskFormat::Raw, 128 << 10).unwrap();
    Disk::create(&at("vars.fd"), DiskFormat::Raw, 128 << 10).unwrap();
    Disk::create(&at("twice.raw"), DiskFormat::Raw, MIB).unwrap();
    let path = |name: &str| at(name).display().to_string();
    let mut machine = small().disk(raw).disk(Disk { path: chained, format: DiskFormat::Qcow2, writable: true });
    for words in [
        ["-object", "iothread,id=io7"],
        ["-drive", &format!("if=none,id=drive,format=qcow2,cache=none,file={}", path("drive.qcow2"))],
        ["-device", "virtio-blk-pci,drive=drive,iothread=io7,id=threaded"],
        ["-blockdev", &format!("driver=file,node-name=bare,filename={}", path("twice.raw"))],
        ["-device", "virtio-scsi-pci,id=scsi"],
        ["-device", "scsi-hd,drive=bare,share-rw=on,id=one"],
        ["-device", "scsi-hd,drive=bare,share-rw=on,id=two"],
        ["-drive", &format!("if=none,id=cd,format=raw,media=cdrom,file={}", path("cd.iso"))],
        ["-device", "ide-cd,drive=cd"],
    ] {
        machine = words.into_iter().fold(machine, |machine, word| machine.argument(word));
    }
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    let found = Found::of(&vm);
    let before = vm.execute("query-block", json!({})).unwrap();
    let snapshot = at("snapshot");
    let elsewhere = at("overlays");
    std::fs::create_dir(&elsewhere).unwrap();
    let words = ["--disks", "overlay", "--overlay-dir", elsewhere.to_str().unwrap()];
    let report = save(&vm, &snapshot, &words);
    found.assert_same(&vm);
    let overlays = report["overlays"].as_array().unwrap();
    // Five devices on four images: one overlay serves both devices of one node.
    assert_eq!((overlays.len(), names(&elsewhere).len()), (5, 4), "{report}");
    for overlay in overlays {
        let info = qemu_img(&["info", "-U", "--output=json", text(overlay, "overlay")]);
        let info: Value = serde_json::from_str(&info).unwrap();
        let format = match text(overlay, "format") {
            "file" => "raw",
            other => other,
        };
        assert_eq!(text(&info, "backing-filename"), text(overlay, "frozen"));
        assert_eq!(text(&info, "backing-filename-format"), format);
    }
    let after = vm.execute("query-block", json!({})).unwrap();
    for (before, after) in before.as_array().unwrap().iter().zip(after.as_array().unwrap()) {
        let (was, is) = (&before["inserted"], &after["inserted"]);
        assert_eq!(was["ro"], is["ro"]);
        assert_eq!(was["node-name"] == is["node-name"], was["ro"] == true, "read-only disks are left alone: {after}");
        assert_eq!(was["cache"], is["cache"]);
        assert_eq!(was["image"]["virtual-size"], is["image"]["virtual-size"]);
    }
    // And again, over the overlays.
    save(&vm, &at("second"), &words);
    found.assert_same(&vm);
    assert_beats(&vm);
    assert_eq!(names(&elsewhere).len(), 8);
}

#[test]
fn the_variables_of_firmware_are_a_disk_too() {
    needs_qemu!();
    let folder = limosa_testkit::scratch().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    for name in ["code.fd", "vars.fd"] {
        Disk::create(Path::new(&at(name)), DiskFormat::Raw, 128 << 10).unwrap();
    }
    // Firmware without code: the CPU is never started, which is not what this is about.
    let machine = limosa_testkit::Machine::paused(64 * MIB)
        .argument("-drive")
        .argument(&format!("if=pflash,format=raw,readonly=on,file={}", at("code.fd")))
        .argument("-blockdev")
        .argument(&format!("driver=raw,node-name=vars,file.driver=file,file.filename={}", at("vars.fd")))
        .argument("-machine")
        .argument("pflash1=vars");
    let vm = machine.start().unwrap();
    let report = save(&vm, Path::new(&at("snapshot")), &["--disks", "overlay"]);
    let overlays = report["overlays"].as_array().unwrap();
    assert_eq!(overlays.len(), 1, "{report}");
    assert_eq!(text(&overlays[0], "frozen"), at("vars.fd"));
    assert_eq!(top_file(&vm, "system.flash1"), Path::new(text(&overlays[0], "overlay")));
}

#[test]
fn what_cannot_be_frozen_is_refused_with_the_vm_untouched() {
    needs_qemu!();
    let folder = limosa_testkit::scratch().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    Disk::create(Path::new(&at("d.raw")), DiskFormat::Raw, 16 * MIB).unwrap();
    let file = format!("driver=file,node-name=f,locking=off,filename={}", at("d.raw"));
    let again = format!("driver=file,node-name=g,locking=off,filename={}", at("d.raw"));
    let refused = |arguments: &[&str], more: &[&str], words: &[&str]| {
        let vm = arguments.iter().fold(small(), |machine, word| machine.argument(word)).start().unwrap();
        vm.wait_heartbeats(1).unwrap();
        let found = Found::of(&vm);
        let more: Vec<&str> = ["--disks", "overlay"].iter().chain(more).copied().collect();
        let ended = limosa(save_arguments(&vm, Path::new(&at("s")), &more));
        // Options that exclude each other are bad usage.
        if more.iter().any(|option| matches!(*option, "--stop" | "--background")) {
            ended.misused(words);
        } else {
            ended.one_line(words);
        }
        found.assert_same(&vm);
        assert_beats(&vm);
        assert_eq!(names(folder.path()), ["d.raw"]);
        vm
    };
    let plain = ["-blockdev", &file, "-device", "virtio-blk-pci,drive=f"];
    refused(&plain, &["--stop"], &["--disks overlay or --stop"]);
    refused(&plain, &["--background"], &["--disks overlay or --background"]);
    refused(&plain, &["--overlay-dir", "/nowhere/to/be/found"], &["/nowhere/to/be/found"]);
    let throttled = ["-object", "throttle-group,id=slow", "-blockdev", &file, "-blockdev"];
    let throttled = [&throttled[..], &["driver=throttle,node-name=t,throttle-group=slow,file=f"]].concat();
    refused(&[&throttled[..], &["-device", "virtio-blk-pci,drive=t"]].concat(), &[], &["'throttle'", "--disks ignore"]);
    let offset = ["-blockdev", &file, "-blockdev", "driver=raw,node-name=r,offset=512,file=f", "-device"];
    refused(&[&offset[..], &["virtio-blk-pci,drive=r"]].concat(), &[], &["'offset'"]);
    let both = ["-blockdev", &file, "-blockdev", &again, "-device", "virtio-blk-pci,drive=f,share-rw=on", "-device"];
    refused(&[&both[..], &["virtio-blk-pci,drive=g,share-rw=on"]].concat(), &[], &["write to the same file"]);
    refused(&["-drive", "if=virtio,driver=null-co,size=1M"], &[], &["no file of this host"]);

    let vm = plain.iter().fold(small(), |machine, word| machine.argument(word)).start().unwrap();
    let target = json!({ "driver": "null-co", "node-name": "target", "size": 16 * MIB, "read-zeroes": true });
    vm.execute("blockdev-add", target).unwrap();
    vm.execute("blockdev-mirror", json!({ "job-id": "copy", "device": "f", "target": "target", "sync": "full" }))
        .unwrap();
    limosa(save_arguments(&vm, Path::new(&at("s")), &["--disks", "overlay"])).one_line(&["mirror job (copy)"]);
    limosa(save_arguments(&vm, Path::new(&at("s")), &["--disks", "ignore", "--overlay-dir", "/tmp"]))
        .misused(&["add --disks overlay"]);
    assert_beats(&vm);
}

#[test]
fn when_qemu_ends_the_empty_overlays_are_removed() {
    needs_qemu!();
    let folder = limosa_testkit::scratch().unwrap();
    let disk = Disk::create(&folder.path().join("disk.raw"), DiskFormat::Raw, 16 * MIB).unwrap();
    for via in ["file", "socket"] {
        let vm = small().disk(disk.clone()).start().unwrap();
        vm.wait_heartbeats(1).unwrap();
        let more = ["--disks", "overlay", "--via", via, "--max-bandwidth", "1M"];
        let saving = start(save_arguments(&vm, &folder.path().join("snapshot"), &more));
        wait_active(&vm);
        assert!(names(folder.path()).iter().any(|name| name.contains(".overlay-")));
        limosa_testkit::kill9(vm.pid()).unwrap();
        saving.wait().one_line(&[]);
        assert_eq!(names(folder.path()), ["disk.raw"]);
    }
}

#[test]
fn a_save_that_fails_after_the_disks_were_frozen_puts_them_back() {
    needs_qemu!();
    let folder = limosa_testkit::scratch().unwrap();
    let image = folder.path().join("disk.raw");
    Disk::create(&image, DiskFormat::Raw, 16 * MIB).unwrap();
    let vm = start_writer(&linux_on(&image, DiskFormat::Raw));
    let found = Found::of(&vm);
    // The name is taken while the save runs, which it finds out when it publishes: after the VM has gone on with its
    // overlays.
    for via in ["file", "socket"] {
        let snapshot = folder.path().join("snapshot");
        let more = ["--disks", "overlay", "--via", via, "--max-bandwidth", "1M"];
        let saving = start(save_arguments(&vm, &snapshot, &more));
        wait_active(&vm);
        std::fs::write(&snapshot, "theirs").unwrap();
        vm.execute("migrate-set-parameters", json!({ "max-bandwidth": 0 })).unwrap();
        saving.wait().one_line(&["exists already"]);
        found.assert_same(&vm);
        assert_eq!(top_file(&vm, "disk0"), image);
        assert_eq!(names(folder.path()), ["disk.raw", "snapshot"]);
        std::fs::remove_file(&snapshot).unwrap();
        wait_writes(vm.serial(), 2);
        assert_never_torn(&vm);
    }
    // One that is interrupted while the memory moves never comes to freeze them.
    for via in ["file", "socket"] {
        let more = ["--disks", "overlay", "--via", via, "--max-bandwidth", "8M"];
        let saving = start(save_arguments(&vm, &folder.path().join("snapshot"), &more));
        wait_active(&vm);
        saving.signal(rustix::process::Signal::INT);
        saving.wait().one_line(&["cancelled"]);
        found.assert_same(&vm);
        assert_eq!(names(folder.path()), ["disk.raw"]);
    }
    wait_writes(vm.serial(), 2);
    vm.stop().unwrap();
    assert!(sectors_written(&image, "raw") >= last_written(&vm));
}
