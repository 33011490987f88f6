//! A VM that is saved packed: it waits no longer than for a plain save, and at every moment a whole snapshot is there.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use limosa_storage::testing::SeededRandom;
use limosa_testkit::{Process, Vm, listens, pass_numbers, qemu_img};
use rustix::process::Signal;
use serde_json::json;

use crate::needs_qemu;
use crate::stage::*;

fn run(words: &[&str]) -> Ended {
    limosa(words)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Has qemu-img make a plain file of a packed snapshot, with this object as its key, and stock QEMU load that.
fn load_by_stock_tools(packed: &Path, secret: Option<&str>) -> Vm {
    let plain = packed.with_extension("plain");
    let file = if secret.is_some() { "file.driver=luks,file.key-secret=s,file.file" } else { "file" };
    let image = format!("driver=qcow2,{file}.filename={}", packed.display());
    let key = secret.into_iter().flat_map(|object| ["--object", object]);
    let words = ["convert", "-O", "raw", "--image-opts", &image, text(&plain)];
    qemu_img(words[..1].iter().copied().chain(key).chain(words[1..].iter().copied())).unwrap();
    load_in_stock_qemu(&small(), &plain, 0)
}

#[test]
fn a_running_vm_is_saved_packed_encrypted_and_on_a_base_and_continues() {
    needs_qemu!();
    let (folder, file) = place();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    let found = Found::of(&vm);
    std::fs::write(folder.path().join("key"), "a long and secret sentence").unwrap();
    let object = format!("secret,id=s,file={}", folder.path().join("key").display());
    let key = ["--object", &object, "--key-secret", "s"];
    let (second, third) = (folder.path().join("second"), folder.path().join("third"));
    for (target, how) in [
        (&file, vec!["--pack", "zstd"]),
        (&second, [&key[..], &["--pack", "zstd:1", "--encrypt", "--iter-time", "1ms"]].concat()),
        (&third, vec!["--pack", "zstd:9", "--base", text(&file), "--via", "socket", "--checksum"]),
    ] {
        let lap = vm.last_pass().unwrap();
        let report = save(&vm, target, &how);
        found.assert_same(&vm);
        assert_beats(&vm);
        assert_eq!(report["snapshot"], json!(text(target)), "{report}");
        assert!(
            report["packed"]["file_length"].as_u64().unwrap() < report["file_length"].as_u64().unwrap(),
            "{report}"
        );
        let loaded = load_by_stock_tools(target, how.contains(&"--encrypt").then_some(object.as_str()));
        assert!(loaded.last_pass() > Some(lap));
        if how.contains(&"--base") {
            assert!(report["packed"]["base_bytes"].as_u64().unwrap() > 0, "{report}");
        }
    }
    let refused = limosa(save_arguments(&vm, &file, &[&["--force"], &key[..]].concat()));
    refused.one_line(&["third stands on it"]);
    let onto_encrypted = ["--pack", "zstd", "--base", text(&second), "--object", &object, "--key-secret", "s"];
    let refused = limosa(save_arguments(&vm, &folder.path().join("fourth"), &onto_encrypted));
    refused.one_line(&["would not be encrypted", "second is; add --encrypt"]);
    let left = names(folder.path());
    assert!(!left.iter().any(|name| name.contains("unpacked")), "{left:?}");
}

#[test]
fn a_save_that_is_killed_while_it_packs_leaves_a_whole_snapshot_and_is_repeated() {
    needs_qemu!();
    let (folder, file) = place();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    let plain = folder.path().join("vm.snapshot.unpacked");
    let saving = start(save_arguments(&vm, &file, &["--stop", "--pack", "zstd:22"]));
    // It is killed before, while or after it packs.
    wait_for("the plain snapshot", || (plain.exists() || !saving.is_running()).then_some(()));
    saving.signal(Signal::KILL);
    watchdog_left_by(saving.pid()).into_iter().for_each(wait_gone);
    saving.wait();
    // Killed before QEMU had acknowledged it, the save is a failed one, and the VM continues.
    let is_stopped = vm.run_state().unwrap() == "postmigrate";
    if plain.exists() {
        let refused = limosa(save_arguments(&vm, &file, &["--pack", "zstd", "--force"]));
        refused.one_line(&["an interrupted save has left this snapshot", "limosa pack"]);
        run(&["pack", text(&plain), text(&file), "--force"]).success();
        limosa(save_arguments(&vm, &file, &["--pack", "zstd"])).one_line(&["exists already"]);
        assert!(plain.exists(), "neither what pack has read nor what a save that is refused has found is removed");
    }
    let loaded = load_by_stock_tools(&file, None);
    loaded.check_heartbeat().unwrap();
    // A plain snapshot that was packed is in nobody's way.
    if is_stopped {
        let monitor = vm.qmp_socket().display().to_string();
        run(&["resume", "--qmp", &monitor, "--force"]).success();
    }
    save(&vm, &file, &["--pack", "zstd", "--force"]);
    assert!(!plain.exists());
}

/// The number of the first pass that a guest has said whole since it was loaded.
fn first_pass(loaded: &Vm) -> u32 {
    let said: Vec<_> = loaded.serial().lines().into_iter().map(|line| line.text + "\n").collect();
    pass_numbers(&said.concat())[0]
}

#[test]
fn a_packed_save_that_is_killed_at_any_moment_leaves_the_old_snapshot_or_the_new_one() {
    needs_qemu!();
    let seed = variable("LIMOSA_CHAOS_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let trials = variable("LIMOSA_CHAOS_TRIALS").unwrap_or(5);
    println!("LIMOSA_CHAOS_SEED={seed} LIMOSA_CHAOS_TRIALS={trials}");
    let mut chance = SeededRandom::new(seed);
    let (folder, file) = place();
    let plain = folder.path().join("vm.snapshot.unpacked");
    let vm = small().start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    save(&vm, &file, &["--pack", "zstd"]);
    let (found, begun) = (Found::of(&vm), Instant::now());
    save(&vm, &file, &["--pack", "zstd", "--force"]);
    // No longer than one that is over before its kill: the machine may have been busier at first.
    let mut lasts = u64::try_from(begun.elapsed().as_micros()).unwrap();
    let mut held = 0;
    for trial in 0..trials {
        let how = ["--pack", "zstd", "--force", "--stop"];
        let saving = start(save_arguments(&vm, &file, if trial % 2 == 0 { &how } else { &how[..3] }));
        let moment = chance.below(lasts);
        std::thread::sleep(Duration::from_micros(moment));
        saving.signal(Signal::KILL);
        watchdog_left_by(saving.pid()).into_iter().for_each(wait_gone);
        let ended = saving.wait();
        lasts = if ended.status.success() { lasts.min(moment.max(1)) } else { lasts };
        // What the older one held is there until the newer one is, packed or plain.
        let mut passes = vec![first_pass(&load_by_stock_tools(&file, None))];
        let is_plain = plain.exists();
        if is_plain {
            passes.push(first_pass(&load_in_stock_qemu(&small(), &plain, 0)));
            run(&["pack", text(&plain), text(&file), "--force"]).success();
            std::fs::remove_file(&plain).unwrap();
        }
        println!("after {moment} of {lasts} us: {}, {passes:?}, plain: {is_plain}", ended.status);
        assert!(passes[0] >= held, "{passes:?} after {held}");
        held = *passes.iter().max().unwrap();
        if vm.run_state().unwrap() == "postmigrate" {
            // It was given up for a snapshot of this very moment.
            let last = vm.last_pass().unwrap();
            assert!((last + 1..=last + 2).contains(&held), "{held} after {last}");
            run(&["resume", "--qmp", &vm.qmp_socket().display().to_string(), "--force"]).success();
        }
        found.assert_same(&vm);
        assert_beats(&vm);
    }
    let known = ["vm.plain", "vm.snapshot"];
    assert!(names(folder.path()).iter().all(|name| known.contains(&name.as_str())), "{:?}", names(folder.path()));
}

/// A packed snapshot as a file of the bytes that it holds: `qemu-nbd` serves it, and libnbd mounts what is served.
struct ServedFile {
    _server: Process,
    _mount: Process,
    path: PathBuf,
}

impl ServedFile {
    fn new(packed: &Path, folder: &Path) -> Self {
        let (socket, path) = (folder.join("nbd"), folder.join("served"));
        let mut server = Command::new("qemu-nbd");
        server.args(["--read-only", "--persistent", "-f", "qcow2", "-k", text(&socket), text(packed)]);
        let server = Process::spawn("qemu-nbd", server).unwrap();
        wait_for("qemu-nbd listens", || listens(server.pid(), &socket).then_some(()));
        std::fs::write(&path, "").unwrap();
        let mut mount = Command::new("nbdfuse");
        mount.args(["--readonly", text(&path), &format!("nbd+unix:///?socket={}", socket.display())]);
        let mount = Process::spawn("nbdfuse", mount).unwrap();
        wait_for("the file", || {
            assert!(mount.try_wait().unwrap().is_none(), "nbdfuse has ended");
            (path.metadata().unwrap().len() > 0).then_some(())
        });
        Self { _server: server, _mount: mount, path }
    }
}

impl Drop for ServedFile {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

#[test]
fn stock_qemu_loads_an_increment_that_qemu_nbd_serves() {
    needs_qemu!();
    let (folder, file) = place();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    save(&vm, &file, &["--pack", "zstd"]);
    let increment = folder.path().join("increment");
    vm.wait_heartbeats(1).unwrap();
    let last = vm.last_pass().unwrap();
    save(&vm, &increment, &["--pack", "zstd", "--base", text(&file)]);
    let served = ServedFile::new(&increment, folder.path());
    let loaded = load_in_stock_qemu(&small(), &served.path, 0);
    assert!(first_pass(&loaded) > last);
}

#[test]
fn what_cannot_be_packed_is_refused_before_the_vm_is_touched() {
    needs_qemu!();
    let (folder, file) = place();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    let found = Found::of(&vm);
    let missing = folder.path().join("missing");
    let refused = |how: &[&str], words: &[&str]| {
        limosa(save_arguments(&vm, &file, how)).one_line(words);
        found.assert_same(&vm);
        assert!(names(folder.path()).is_empty(), "nothing is left");
    };
    refused(&["--pack", "zstd", "--base", text(&missing)], &["missing", "cannot open it"]);
    refused(&["--pack", "zstd", "--encrypt", "--key-secret", "s"], &["no such secret"]);
    let misuse = limosa(save_arguments(&vm, &file, &["--base", text(&missing)]));
    assert_eq!(misuse.status.code(), Some(2), "{}", misuse.stderr);
    for how in [&["--pack", "lz4"][..], &["--pack", "zstd", "--cluster-size", "5K"]] {
        let misuse = limosa(save_arguments(&vm, &file, how));
        assert_eq!(misuse.status.code(), Some(2), "{}", misuse.stderr);
    }
}
