//! Refusals of a restore: one line that says what, where and what to do, and a QEMU that is as it was.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::net::UnixListener;
use std::path::Path;

use limosa_testkit::{Disk, DiskFormat, LinuxGuest, Machine, PAGE, Qmp};

use crate::needs_qemu;
use crate::scene::{Scene, assert_consistent, assert_failed, migration_status, saved_beat, small_beat, text};
use crate::stage::{Found, SOON, start_command};

/// Restores into a fresh QEMU of `machine`, in every mode, and expects the refusal, and a QEMU that can still be used.
fn refused(scene: &Scene, snapshot: &Path, machine: &Machine, words: &[&str]) {
    let destination = machine.start_incoming().unwrap();
    let found = Found::of(&destination);
    for mode in ["auto", "lazy", "eager"] {
        let line = scene.restore(snapshot, &destination, &["--memory", mode]).one_line(words);
        assert!(line.contains("; "), "it does not say what to do: {line}");
    }
    found.assert_same(&destination);
    assert_eq!(migration_status(&destination), "none");
    scene.assert_tidy();
}

#[test]
fn a_snapshot_of_another_machine_or_of_other_memory_is_refused() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = small_beat();
    let saved = saved_beat(&scene, &machine, &[]);
    refused(&scene, &saved.snapshot, &machine.clone().kind("pc"), &["q35", "this QEMU is a pc-i440fx", "-machine"]);
    let larger = machine.memory_bytes() + (16 << 20);
    let sizes =
        [format!("{} KiB in the snapshot", machine.memory_bytes() >> 10), format!("{} KiB in this", larger >> 10)];
    refused(&scene, &saved.snapshot, &machine.clone().memory(larger), &["RAM block mem", &sizes[0], &sizes[1]]);
    // One that has all of it still takes the guest.
    let destination = machine.start_incoming().unwrap();
    scene.restore(&saved.snapshot, &destination, &[]).success();
    saved.assert_goes_on(&destination);
}

#[test]
fn a_device_that_the_destination_lacks_leaves_no_guest_and_qemus_word_for_it() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &small_beat().balloon(), &[]);
    for how in [
        &["--memory", "lazy", "--preempt", "on"][..],
        &["--memory", "lazy", "--preempt", "off"],
        &["--memory", "eager", "--via", "socket"],
        &["--memory", "eager", "--via", "file"],
    ] {
        let destination = small_beat().start_incoming().unwrap();
        let ended = scene.restore(&saved.snapshot, &destination, how);
        // QEMU names the device in its log alone, and limosa passes on what there is and where to look.
        assert_failed(&ended, &["log", "start a new one", "limosa inspect ", "--against-qmp SOCK"]);
        assert!(ended.stderr.matches("QEMU gave up").count() <= 1, "{}", ended.stderr);
        assert!(destination.log().contains("virtio-balloon"), "{how:?}: {}", destination.log());
        assert!(destination.serial().lines().is_empty());
        scene.assert_tidy();
    }
}

#[test]
fn an_address_at_which_qemu_cannot_listen_is_refused_before_qemu_is_touched() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = small_beat();
    let saved = saved_beat(&scene, &machine, &[]);
    let destination = machine.start_incoming().unwrap();
    let found = Found::of(&destination);
    let unix = |path: &str| format!("unix:{}", text(&scene.path(path)));
    let restore = |address: &str| scene.restore(&saved.snapshot, &destination, &["--listen", address]);
    restore(&unix("absent/in")).one_line(&["absent/in: there is no directory", "make it"]);
    restore(&unix(&"a".repeat(110))).misused(&["at most 107 bytes"]);
    restore("fd:3").misused(&["--listen fd:3", "unix:PATH or tcp:HOST:PORT"]);
    found.assert_same(&destination);
    // Only QEMU can tell that a port is in use.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", taken.local_addr().unwrap());
    restore(&address).one_line(&[&format!("QEMU cannot listen on {address}: choose another --listen")]);
}

#[test]
fn a_qemu_that_does_not_wait_for_a_vm_is_left_alone() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = small_beat();
    let saved = saved_beat(&scene, &machine, &[]);
    let running = machine.start().unwrap();
    running.wait_heartbeats(1).unwrap();
    let found = Found::of(&running);
    scene.restore(&saved.snapshot, &running, &[]).one_line(&[
        "does not wait for an incoming VM",
        "running",
        "-incoming defer",
    ]);
    found.assert_same(&running);
    assert_consistent(&running);

    let restored = machine.start_incoming().unwrap();
    scene.restore(&saved.snapshot, &restored, &[]).success();
    let found = Found::of(&restored);
    scene.restore(&saved.snapshot, &restored, &[]).one_line(&["does not wait for an incoming VM", "-incoming defer"]);
    found.assert_same(&restored);
    assert_consistent(&restored);
}

#[test]
fn a_monitor_that_another_client_holds_is_said_to_be_held() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = small_beat();
    let saved = saved_beat(&scene, &machine, &[]);
    let destination = machine.start_incoming().unwrap();
    let holder = Qmp::connect(&destination.qmp_socket(), SOON).unwrap();
    scene
        .restore(&saved.snapshot, &destination, &[])
        .one_line(&["another client holds", text(&destination.qmp_socket())]);
    drop(holder);
    scene.restore(&saved.snapshot, &destination, &[]).success();
    saved.assert_goes_on(&destination);
}

#[test]
fn a_monitor_that_greets_but_never_answers_is_given_up() {
    let scene = Scene::new();
    let socket = scene.path("monitor");
    let listener = UnixListener::bind(&socket).unwrap();
    // What a QEMU does whose main loop waits for a page that never arrives.
    let greeter = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let version = r#"{"qemu": {"major": 10, "minor": 0, "micro": 2}, "package": ""}"#;
        client
            .write_all(format!("{{\"QMP\": {{\"version\": {version}, \"capabilities\": [\"oob\"]}}}}\r\n").as_bytes())
            .unwrap();
        std::io::copy(&mut client, &mut std::io::sink()).unwrap()
    });
    let snapshot = scene.path("snapshot");
    std::fs::write(&snapshot, b"").unwrap();
    let words = ["resume", "--qmp", text(&socket)];
    let ended = start_command(scene.command(&words)).wait();
    ended.one_line(&["answers nothing", text(&socket), "end this QEMU"]);
    assert!(greeter.join().unwrap() > 0);
}

#[test]
fn what_is_no_snapshot_is_said_to_be_none() {
    needs_qemu!();
    let scene = Scene::new();
    let destination = small_beat().start_incoming().unwrap();
    let found = Found::of(&destination);
    let place = |name: &str, contents: &[u8]| {
        let path = scene.path(name);
        std::fs::write(&path, contents).unwrap();
        path
    };
    let directory = scene.path("tmp");
    let pipe = scene.path("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    for (path, word) in [
        (scene.path("missing"), "No such file"),
        (directory, "is not a regular file"),
        (pipe, "is not a regular file"),
        (
            place("empty", b""),
            "neither a snapshot nor a recorded migration stream nor a libvirt save image: it is empty",
        ),
        (place("text", &b"not a snapshot\n".repeat(1000)), "it does not begin with QEVM"),
        (place("half a header", b"QEVM\0\0"), "the file is cut short"),
    ] {
        scene.restore(&path, &destination, &[]).one_line(&[text(&path), word]);
        scene.restore(&path, &destination, &["--recover"]).one_line(&[text(&path), word]);
    }
    found.assert_same(&destination);
}

#[test]
fn a_snapshot_cut_short_anywhere_is_refused() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = small_beat();
    let saved = saved_beat(&scene, &machine, &[]);
    let destination = machine.start_incoming().unwrap();
    let found = Found::of(&destination);
    let length = std::fs::metadata(&saved.snapshot).unwrap().len();
    let file = File::options().write(true).open(&saved.snapshot).unwrap();
    // Downwards, so that each cut can be made in place. The trailer alone is no loss to the guest, and not cut here.
    let cuts = [length - (128 << 10), length / 2, (1 << 20) + PAGE, 1 << 20, PAGE, 300, 9, 4, 1];
    for cut in cuts {
        file.set_len(cut).unwrap();
        scene.restore(&saved.snapshot, &destination, &[]).one_line(&[text(&saved.snapshot)]);
    }
    found.assert_same(&destination);
}

#[test]
fn memory_is_not_restored_with_a_disk_that_was_written_since() {
    needs_qemu!();
    let scene = Scene::new();
    let path = scene.path("disk");
    let disk = Disk::create(&path, DiskFormat::Qcow2, 16 << 20).unwrap();
    let machine = Machine::linux(LinuxGuest::default()).disk(disk);
    let source = machine.start().unwrap();
    source.wait_counts(1).unwrap();
    let snapshot = scene.save(&source, "snapshot", &["--stop"]);
    drop(source);

    // As it was: taken.
    let kept = scene.path("kept");
    std::fs::copy(&path, &kept).unwrap();
    let saved_at = std::fs::metadata(&path).unwrap().modified().unwrap();
    let destination = machine.start_incoming().unwrap();
    scene.restore(&snapshot, &destination, &["--paused"]).success();
    drop(destination);

    // Written since, by its time alone.
    let destination = machine.start_incoming().unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    file.set_modified(saved_at + std::time::Duration::from_secs(60)).unwrap();
    let words = ["disk0", text(&path), "was written after the VM was saved", "--disks ignore"];
    for mode in ["lazy", "eager"] {
        scene.restore(&snapshot, &destination, &["--memory", mode]).one_line(&words);
    }
    // Its name is gone.
    std::fs::rename(&path, scene.path("elsewhere")).unwrap();
    scene.restore(&snapshot, &destination, &[]).one_line(&["disk0", text(&path), "is missing"]);
    std::fs::rename(scene.path("elsewhere"), &path).unwrap();
    // The user knows better.
    scene.restore(&snapshot, &destination, &["--disks", "ignore"]).success();
    destination.wait_counts(2).unwrap();
}
