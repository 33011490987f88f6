//! Lazy restores of a beat guest: consistent while its pages come and afterwards, and nothing is left behind.

use limosa_testkit::Machine;
use serde_json::json;

use crate::needs_qemu;
use crate::scene::{
    Scene, TRICKLE, assert_ballast, assert_consistent, beat, control, load_ballast, migration_status, saved_beat, text,
    wait_guest,
};
use crate::stage::Found;
use crate::stage::channels::free_port;

/// Saves a beat guest and restores it lazily with `how` into `machine`; looks at the guest while most of its memory is
/// missing, and when all is there.
pub(crate) fn comes_back_lazily(scene: &Scene, machine: &Machine, how: &[&str]) {
    let saved = saved_beat(scene, &beat(), &[]);
    let destination = machine.start_incoming().unwrap();
    let found = Found::of(&destination);
    let socket = scene.path("control");
    let mut words = vec!["--memory", "lazy", "--json", "--control", text(&socket)];
    words.extend(TRICKLE);
    words.extend(how);
    let limosa = scene.start_restore(&saved.snapshot, &destination, &words);
    wait_guest(&limosa);

    // Pages still come: the ballast is not asked for, and its rate is next to nothing.
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
    // Memory that was never stored is asked for too, and is zero.
    let empty = destination.read_memory((40 << 20)..(41 << 20)).unwrap();
    assert!(empty.iter().all(|&byte| byte == 0));
    let mut programs = control(&socket);
    let progress = programs.execute("query-migrate", json!({})).unwrap();
    assert_eq!(progress["status"], "postcopy-active", "{progress}");
    assert!(progress["ram"]["remaining"].as_u64().unwrap() > 8 << 20, "{progress}");
    assert!(limosa.is_running());

    programs.execute("migrate-set-parameters", json!({ "max-bandwidth": 0 })).unwrap();
    let report = limosa.wait().json();
    assert_consistent(&destination);
    assert_ballast(&destination);

    // QEMU would have paused its migration at a page that came twice.
    assert_eq!(migration_status(&destination), "completed");
    found.assert_same_but(&destination, "running");
    scene.assert_tidy();
    assert!(!socket.exists());
    assert_eq!((&report["mode"], &report["vm_state"]), (&json!("lazy"), &json!("running")), "{report}");
    assert!(report["lazy"]["requests"].as_u64().unwrap() > 0, "{report}");
    assert!(report["pages"]["normal"].as_u64().unwrap() > 4096, "{report}");
    let second_channel = how.contains(&"on");
    assert_eq!(report["lazy"]["preempt"].is_object(), second_channel, "{report}");
}

#[test]
fn a_beat_guest_comes_back_lazily_with_requests_answered_on_their_own_channel() {
    needs_qemu!();
    comes_back_lazily(&Scene::new(), &beat(), &["--preempt", "on"]);
}

#[test]
fn a_beat_guest_comes_back_lazily_over_one_channel() {
    needs_qemu!();
    comes_back_lazily(&Scene::new(), &beat(), &["--preempt", "off"]);
}

#[test]
fn a_beat_guest_comes_back_lazily_over_a_unix_socket_of_the_users_choice() {
    needs_qemu!();
    let scene = Scene::new();
    let listen = format!("unix:{}", scene.path("incoming").display());
    comes_back_lazily(&scene, &beat(), &["--listen", &listen, "--preempt", "on"]);
}

#[test]
fn a_beat_guest_comes_back_lazily_over_tcp() {
    needs_qemu!();
    comes_back_lazily(&Scene::new(), &beat(), &["--listen", &free_port(), "--preempt", "off"]);
}

#[test]
fn a_lazy_restore_at_full_speed_brings_the_very_instant_back() {
    needs_qemu!();
    for (how, preempt) in [
        (&["--via", "file", "--checksum"][..], "on"),
        (&["--via", "socket", "--checksum"], "off"),
        (&["--via", "socket"], "on"),
    ] {
        let scene = Scene::new();
        let machine = beat();
        let saved = saved_beat(&scene, &machine, how);
        let destination = machine.start_incoming().unwrap();
        let words = ["--memory", "lazy", "--paused", "--preempt", preempt];
        scene.restore(&saved.snapshot, &destination, &words).success();
        assert_eq!(destination.run_state().unwrap(), "paused");
        saved.assert_is_back(&destination);
    }
}

#[test]
fn a_file_that_stock_qemu_wrote_comes_back_lazily() {
    needs_qemu!();
    for threads in [0, 2] {
        let scene = Scene::new();
        let machine = beat();
        let source = machine.start().unwrap();
        source.wait_heartbeats(2).unwrap();
        load_ballast(&source);
        let snapshot = scene.path("written by qemu");
        source.save_file(&snapshot, threads).unwrap();
        let at_save = source.check_heartbeat().unwrap();
        drop(source);
        let destination = machine.start_incoming().unwrap();
        scene.restore(&snapshot, &destination, &["--memory", "lazy", "--paused"]).success();
        assert_eq!(destination.check_heartbeat().unwrap(), at_save);
        assert_ballast(&destination);
        destination.cont().unwrap();
        assert_consistent(&destination);
    }
}
