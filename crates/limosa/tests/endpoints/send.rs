//! A stored VM migrates to a stock QEMU that its operator has started.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use limosa_testkit::{Machine, Vm};
use serde_json::{Value, json};

use crate::ends::{LIMOSA, migrate, source, start_send, start_with_input};
use crate::needs_qemu;
use crate::scene::{
    Saved, Scene, TRICKLE, assert_arrived, assert_ballast, assert_consistent, assert_failed, beat, in_huge_pages,
    listen, migration_status, release, saved_beat, text, wait_guest, wait_migration_status,
};
use crate::stage::channels::free_port;
use crate::stage::{SOON, names, wait_for};

/// Expects QEMU to give up waiting for its guest.
#[track_caller]
fn assert_gives_up(vm: &Vm) {
    wait_for("QEMU to give up", || (migration_status(vm) == "failed").then_some(()));
    assert_ne!(vm.run_state().unwrap(), "running");
}

#[test]
fn a_stored_vm_migrates_to_qemu_over_tcp_and_over_a_unix_socket() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let unix = format!("unix:{}", scene.path("in.sock").display());
    for (uri, one_way) in [(free_port(), false), (unix.clone(), false), (unix, true)] {
        let vm = beat().start_incoming_stopped().unwrap();
        listen(&vm, &uri);
        let more: &[&str] = if one_way { &["--json", "--one-way"] } else { &["--json"] };
        let report = start_send(&scene, &saved.snapshot, &uri, more).wait().json();
        assert_eq!((&report["mode"], &report["answered"]), (&json!("precopy"), &json!(!one_way)), "{report}");
        assert!(report["pages"]["normal"].as_u64().unwrap() > 4096, "{report}");
        assert_arrived(&vm, &saved);
    }
    scene.assert_tidy();
}

#[test]
fn a_stored_vm_comes_through_an_inherited_socket_and_out_of_a_command_that_qemu_runs() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &["--checksum"]);
    let vm = beat().start_incoming_stopped().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    vm.qmp().execute_with_descriptor("getfd", json!({ "fdname": "in" }), theirs.as_fd()).unwrap();
    drop(theirs);
    listen(&vm, "fd:in");
    let limosa = start_with_input(&scene, &["send", text(&saved.snapshot), "fd:0", "--json"], ours.into());
    assert_eq!(limosa.wait().json()["answered"], true);
    assert_arrived(&vm, &saved);

    for to in ["-", "fd:1"] {
        let vm = beat().start_incoming_stopped().unwrap();
        listen(&vm, &format!("exec:{LIMOSA} send {} {to}", saved.snapshot.display()));
        assert_arrived(&vm, &saved);
    }
}

#[test]
fn a_sent_vm_is_recorded_by_a_command_and_loads_from_the_recording() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let stream = scene.path("stream");
    let uri = format!("exec:cat > {}", stream.display());
    let report = start_send(&scene, &saved.snapshot, &uri, &["--json", "--one-way"]).wait().json();
    assert_eq!(report["answered"], false);
    let vm = beat().start_incoming_stopped().unwrap();
    listen(&vm, &format!("exec:cat {}", stream.display()));
    assert_arrived(&vm, &saved);
}

/// Postcopy to a QEMU of this machine at `uri`, with most of the memory under way for long.
fn comes_back_lazily(scene: &Scene, saved: &Saved, machine: &Machine, uri: &str, more: &[&str]) -> Value {
    let vm = machine.start_incoming().unwrap();
    let preempt = more.contains(&"--preempt");
    vm.set_capabilities(&[("postcopy-ram", true), ("postcopy-preempt", preempt)]).unwrap();
    listen(&vm, uri);
    let more = [&["--mode", "postcopy", "--json"], more, &TRICKLE].concat();
    let limosa = start_send(scene, &saved.snapshot, uri, &more);
    wait_guest(&limosa);
    vm.wait_run_state("running", SOON).unwrap();
    assert_consistent(&vm);
    assert!(limosa.is_running());
    let ended = release(limosa);
    vm.wait_migrated().unwrap();
    assert_consistent(&vm);
    assert_ballast(&vm);
    serde_json::from_str(&ended.stdout).unwrap()
}

#[test]
fn a_stored_vm_runs_at_once_in_a_qemu_that_its_operator_has_set_for_postcopy() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let report = comes_back_lazily(&scene, &saved, &beat(), &free_port(), &[]);
    assert_eq!((&report["mode"], &report["answered"]), (&json!("postcopy"), &json!(true)), "{report}");
    assert!(report["lazy"]["requests"].as_u64().unwrap() > 0, "{report}");
    assert!(report["to_guest_ms"].as_f64().unwrap() > 0.0, "{report}");
    let unix = format!("unix:{}", scene.path("in.sock").display());
    let report = comes_back_lazily(&scene, &saved, &beat(), &unix, &["--preempt", "on"]);
    assert!(report["lazy"]["preempt"].is_object(), "{report}");
}

#[test]
fn a_stored_vm_runs_at_once_in_huge_pages_that_its_operator_has_named() {
    needs_qemu!();
    let Some((machine, _pages)) = in_huge_pages(beat(), 1) else { return };
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    for more in [&["--page-size", "mem=2M"][..], &["--page-size", "mem=2M", "--preempt", "on"]] {
        let report = comes_back_lazily(&scene, &saved, &machine, &free_port(), more);
        assert!(report["lazy"]["requests"].as_u64().unwrap() > 0, "{report}");
    }
    // Unnamed, they are not what the destination has, and it says so before anything runs.
    let vm = machine.start_incoming().unwrap();
    vm.set_capabilities(&[("postcopy-ram", true)]).unwrap();
    let uri = free_port();
    listen(&vm, &uri);
    let ended = start_send(&scene, &saved.snapshot, &uri, &["--mode", "postcopy"]).wait();
    assert_failed(&ended, &["see the log of the destination"]);
    assert_gives_up(&vm);
}

#[test]
fn a_recorded_stream_is_sent_as_it_is() {
    needs_qemu!();
    let scene = Scene::new();
    let stream = scene.path("stream");
    let source = source(&beat());
    migrate(&source, &format!("exec:cat > {}", stream.display()), false);
    source.wait_migrated().unwrap();
    let before = names(stream.parent().unwrap());
    let vm = beat().start_incoming_stopped().unwrap();
    let uri = free_port();
    listen(&vm, &uri);
    let ended = start_send(&scene, &stream, &uri, &["--json"]).wait();
    assert!(ended.stderr.contains("limosa import"), "{}", ended.stderr);
    assert_eq!(ended.json()["answered"], true);
    vm.wait_migrated().unwrap();
    let (beat, lap) = (source.check_heartbeat().unwrap(), source.last_pass().unwrap());
    assert_arrived(&vm, &Saved { snapshot: stream.clone(), beat, lap });
    assert_eq!(names(stream.parent().unwrap()), before);
    start_send(&scene, &stream, &uri, &["--mode", "postcopy"]).wait().one_line(&["limosa import"]);
    scene.assert_tidy();
}

#[test]
fn an_interrupted_postcopy_is_recovered_from_the_same_file() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let vm = beat().start_incoming().unwrap();
    vm.set_capabilities(&[("postcopy-ram", true)]).unwrap();
    let uri = format!("unix:{}", scene.path("in.sock").display());
    listen(&vm, &uri);
    let mut more = vec!["--mode", "postcopy"];
    more.extend(TRICKLE);
    let limosa = start_send(&scene, &saved.snapshot, &uri, &more);
    wait_guest(&limosa);
    // What QEMU's own devices need has come; its monitor answers.
    assert_consistent(&vm);
    limosa_testkit::kill9(limosa.pid()).unwrap();
    assert!(!limosa.wait().status.success());
    wait_migration_status(&vm, "postcopy-paused");
    let again = format!("unix:{}", scene.path("again.sock").display());
    vm.execute("migrate-recover", json!({ "uri": again })).unwrap();
    let limosa = start_send(&scene, &saved.snapshot, &again, &["--recover", "--json"]);
    assert_eq!(limosa.wait().json()["mode"], "postcopy");
    vm.wait_migrated().unwrap();
    assert_consistent(&vm);
    assert_ballast(&vm);
}

#[test]
fn what_cannot_be_sent_is_refused_before_it_connects() {
    needs_qemu!();
    let scene = Scene::new();
    let port = free_port();
    std::fs::write(scene.path("noise"), vec![7; 100_000]).unwrap();
    start_send(&scene, &scene.path("noise"), &port, &[]).wait().one_line(&["noise"]);
    start_send(&scene, &scene.path("absent"), &port, &[]).wait().one_line(&["absent"]);
    let saved = saved_beat(&scene, &beat(), &[]);
    let refused = start_send(&scene, &saved.snapshot, &port, &[]).wait();
    let line = refused.one_line(&["cannot connect to ", &port, "start the destination first"]);
    assert_eq!(line.to_lowercase().matches("refused").count(), 1, "{line}");
    start_send(&scene, &saved.snapshot, "file:/tmp/x", &[]).wait().misused(&["limosa export"]);
    for words in [
        &["--mode", "postcopy", "--one-way"][..],
        &["--page-size", "mem=2M"],
        &["--preempt", "on"],
        &["--page-size", "mem"],
        &["--mode", "postcopy", "--channels", "2"],
        &["--recover", "--channels", "2"],
        &["--channels", "17"],
        &["--compression", "zstd"],
    ] {
        let ended = start_send(&scene, &saved.snapshot, &port, words).wait();
        assert_eq!(ended.status.code(), Some(2), "{words:?}: {}", ended.stderr);
    }
    assert_eq!(start_send(&scene, &saved.snapshot, "-", &["--json"]).wait().status.code(), Some(2));
    for uri in ["-", "fd:0", "exec:touch absent"] {
        let ended = start_send(&scene, &saved.snapshot, uri, &["--channels", "2"]).wait();
        ended.misused(&["--channels needs several connections", "tcp:HOST:PORT", "Usage: limosa send"]);
    }
    assert!(!std::path::Path::new("absent").exists());
}

#[test]
fn a_command_that_fails_or_does_not_answer_is_named() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let send = |uri: &str, more: &[&str]| start_send(&scene, &saved.snapshot, uri, more).wait();
    // What the command prints itself comes before limosa's line.
    let ended = send("exec:echo no route >&2; exit 7", &[]);
    assert!(ended.stderr.starts_with("no route\n"), "{}", ended.stderr);
    assert_failed(&ended, &["exec:echo no route", "the command failed (exit status: 7)"]);
    assert_failed(&send("exec:cat > /dev/null; exit 3", &["--one-way"]), &["exit status: 3"]);
    assert_failed(&send("exec:exec sleep 1000", &["--timeout", "300ms"]), &["did not answer", "--one-way"]);
    let lingers = send("exec:cat > /dev/null; exec sleep 1000", &["--one-way", "--timeout", "1s"]);
    assert_failed(&lingers, &["did not end within 1s"]);
    scene.assert_tidy();
}

#[test]
fn a_destination_that_is_not_set_for_postcopy_is_reported_and_nothing_runs() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let vm = beat().start_incoming().unwrap();
    let uri = free_port();
    listen(&vm, &uri);
    let ended = start_send(&scene, &saved.snapshot, &uri, &["--mode", "postcopy"]).wait();
    assert_failed(&ended, &["postcopy-ram"]);
    assert_gives_up(&vm);
}

#[test]
fn a_send_that_is_cancelled_before_the_guest_runs_leaves_it_not_running() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let vm = beat().start_incoming().unwrap();
    let uri = free_port();
    listen(&vm, &uri);
    let socket = scene.path("control");
    let limosa = start_send(&scene, &saved.snapshot, &uri, &["--max-bandwidth", "1M", "--control", text(&socket)]);
    wait_for("pages to move", || {
        let info = crate::scene::control(&socket).execute("query-migrate", json!({})).ok()?;
        info["ram"]["normal"].as_u64().filter(|pages| *pages > 0)
    });
    limosa.signal(rustix::process::Signal::INT);
    assert_failed(&limosa.wait(), &["cancelled"]);
    assert_gives_up(&vm);
}
