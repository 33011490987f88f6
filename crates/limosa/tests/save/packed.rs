//! A VM that is saved packed: it waits no longer than for a plain save, and at every moment a whole snapshot is there.

use std::path::Path;

use limosa_testkit::Vm;
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

/// Unpacks a snapshot and has stock QEMU load it.
fn load_unpacked(packed: &Path, key: &[&str]) -> Vm {
    let plain = packed.with_extension("plain");
    run(&[&["unpack", text(packed), text(&plain), "--force"], key].concat()).success();
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
        let loaded = load_unpacked(target, if how.contains(&"--encrypt") { &key } else { &[] });
        assert!(loaded.last_pass() > Some(lap));
        if how.contains(&"--base") {
            assert!(report["packed"]["base_bytes"].as_u64().unwrap() > 0, "{report}");
        }
    }
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
        assert!(plain.exists(), "what pack reads stays");
    }
    let loaded = load_unpacked(&file, &[]);
    loaded.check_heartbeat().unwrap();
    // A plain snapshot that was packed is in nobody's way.
    if is_stopped {
        let monitor = vm.qmp_socket().display().to_string();
        run(&["resume", "--qmp", &monitor, "--force"]).success();
    }
    save(&vm, &file, &["--pack", "zstd", "--force"]);
    assert!(!plain.exists());
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
    refused(&["--pack", "zstd", "--cluster-size", "5K"], &["--cluster-size"]);
    refused(&["--pack", "zstd", "--encrypt", "--key-secret", "s"], &["no such secret"]);
    let misuse = limosa(save_arguments(&vm, &file, &["--base", text(&missing)]));
    assert_eq!(misuse.status.code(), Some(2), "{}", misuse.stderr);
    let misuse = limosa(save_arguments(&vm, &file, &["--pack", "lz4"]));
    assert_eq!(misuse.status.code(), Some(2), "{}", misuse.stderr);
}
