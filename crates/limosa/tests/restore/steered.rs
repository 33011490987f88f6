//! A lazy restore under way, steered from outside: left in the background, by signals, by `--control`.

use std::path::Path;

use limosa_testkit::{Process, Vm, is_alive};
use rustix::process::Signal;
use serde_json::json;

use crate::needs_qemu;
use crate::scene::{
    Saved, Scene, TRICKLE, assert_ballast, assert_consistent, assert_failed, beat, control, migration_status,
    saved_beat, text, wait_guest, wait_migration_status,
};
use crate::stage::{Found, Program, assert_beats, wait_for, wait_gone};

/// A destination, and a limosa that has the guest running there and the ballast still to send.
fn under_way(scene: &Scene, saved: &Saved, more: &[&str]) -> (Vm, Program) {
    let destination = beat().start_incoming().unwrap();
    let words = [&["--memory", "lazy"], &TRICKLE[..], more].concat();
    let limosa = scene.start_restore(&saved.snapshot, &destination, &words);
    wait_guest(&limosa);
    (destination, limosa)
}

#[test]
fn the_end_of_the_terminal_does_not_end_the_pager() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let (destination, limosa) = under_way(&scene, &saved, &[]);
    for _ in 0..3 {
        limosa.signal(Signal::HUP);
        assert_beats(&destination);
    }
    assert!(limosa.is_running());
    assert_eq!(migration_status(&destination), "postcopy-active");
    limosa.signal(Signal::INT);
    limosa.wait().success();
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
    assert_ballast(&destination);
}

#[test]
fn the_first_interrupt_sends_the_rest_at_full_speed() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    for (signal, preempt) in [(Signal::INT, "on"), (Signal::TERM, "off")] {
        let (destination, limosa) = under_way(&scene, &saved, &["--preempt", preempt]);
        limosa.signal(signal);
        let said = limosa.wait().success();
        assert!(said.stderr.contains("sending the rest at full speed"), "{}", said.stderr);
        assert_eq!(migration_status(&destination), "completed");
        assert_consistent(&destination);
        assert_ballast(&destination);
    }
}

#[test]
fn the_second_interrupt_leaves_a_guest_that_can_be_recovered() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let mut left = 0;
    for preempt in ["on", "off"] {
        let (destination, limosa) = under_way(&scene, &saved, &["--preempt", preempt]);
        assert_beats(&destination);
        // Frozen, it can send nothing between the two.
        limosa.signal(Signal::STOP);
        limosa.signal(Signal::INT);
        limosa.signal(Signal::TERM);
        limosa.signal(Signal::CONT);
        let ended = limosa.wait();
        let again = format!("limosa restore --recover {}", saved.snapshot.display());
        if ended.status.success() {
            // A busy machine may let the rest go out between the two.
            assert_eq!(migration_status(&destination), "completed");
        } else {
            left += 1;
            assert_failed(&ended, &[&again, text(&destination.qmp_socket())]);
            wait_migration_status(&destination, "postcopy-paused");
            scene.recover(&saved.snapshot, &destination).success();
        }
        saved.assert_goes_on(&destination);
        assert_consistent(&destination);
        assert_ballast(&destination);
    }
    assert!(left > 0, "no guest was left without its memory");
}

#[test]
fn a_program_pauses_a_lazy_restore_and_cannot_cancel_it() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let found = Found::of(&beat().start_incoming().unwrap());
    let socket = scene.path("control");
    let (destination, limosa) = under_way(&scene, &saved, &["--control", text(&socket)]);
    let mut programs = control(&socket);
    let mut ask = |command: &str| programs.execute(command, json!({}));
    assert_eq!(ask("query-migrate").unwrap()["status"], "postcopy-active");
    let refused = ask("migrate_cancel").unwrap_err().to_string();
    assert!(refused.contains("the guest runs already"), "{refused}");
    assert!(limosa.is_running());
    assert_beats(&destination);
    ask("migrate-pause").unwrap();
    let ended = limosa.wait();
    assert_failed(&ended, &["recover with: limosa restore --recover"]);
    wait_migration_status(&destination, "postcopy-paused");
    assert!(!socket.exists());
    scene.assert_tidy();

    scene.recover(&saved.snapshot, &destination).success();
    found.assert_same_but(&destination, "running");
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
    assert_ballast(&destination);
}

/// The words of `limosa restore --detach` that leave the ballast to be sent.
fn detach(scene: &Scene, saved: &Saved, destination: &Vm, socket: &Path) -> u32 {
    let words = [&["--detach", "--json", "--control", text(socket)], &TRICKLE[..]].concat();
    let report = scene.start_restore(&saved.snapshot, destination, &words).wait().success();
    let report: serde_json::Value = serde_json::from_str(&report.stdout).unwrap();
    assert_eq!((&report["mode"], &report["detached"]), (&json!("lazy"), &json!(true)), "{report}");
    u32::try_from(report["pager"].as_u64().unwrap()).unwrap()
}

#[test]
fn a_detached_restore_returns_when_the_guest_runs_and_finishes_in_the_background() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let destination = beat().start_incoming().unwrap();
    let found = Found::of(&destination);
    let socket = scene.path("control");
    let pager = detach(&scene, &saved, &destination, &socket);
    // The command is over, the guest runs, and its memory is still coming.
    assert_eq!(destination.run_state().unwrap(), "running");
    assert_eq!(migration_status(&destination), "postcopy-active");
    assert!(is_alive(pager));
    assert_beats(&destination);
    let mut programs = control(&socket);
    programs.execute("migrate-set-parameters", json!({ "max-bandwidth": 0 })).unwrap();
    wait_gone(pager);
    assert_eq!(migration_status(&destination), "completed");
    found.assert_same_but(&destination, "running");
    scene.assert_tidy();
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
    assert_ballast(&destination);
}

#[test]
fn a_detached_pager_outlives_the_session_that_it_was_started_in() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let destination = beat().start_incoming().unwrap();
    let socket = scene.path("control");
    let pager = detach(&scene, &saved, &destination, &socket);
    let session = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<String> = stat.rsplit_once(')').unwrap().1.split_whitespace().map(str::to_owned).collect();
        fields[3].parse::<u32>().unwrap()
    };
    assert_eq!(session(pager), pager);
    assert_ne!(session(pager), session(std::process::id()));
    // What a hang-up, a closed terminal and an impatient user send.
    for signal in ["-HUP", "-HUP", "-INT"] {
        let mut command = std::process::Command::new("kill");
        command.args([signal, &pager.to_string()]);
        Process::spawn("kill", command).unwrap().wait(crate::stage::SOON).unwrap();
    }
    wait_gone(pager);
    wait_for("the last page", || (migration_status(&destination) == "completed").then_some(()));
    assert_consistent(&destination);
    assert_ballast(&destination);
}

#[test]
fn a_detached_restore_that_fails_says_why_and_leaves_no_process_behind() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let other = beat().memory(128 << 20).start_incoming().unwrap();
    scene.restore(&saved.snapshot, &other, &["--detach"]).one_line(&["RAM block mem", "KiB in this QEMU"]);
    scene.restore(&scene.path("no such file"), &other, &["--detach"]).one_line(&["no such file"]);
    scene.assert_tidy();
}

#[test]
fn a_detached_eager_restore_returns_when_all_memory_is_there() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let destination = beat().start_incoming().unwrap();
    scene.restore(&saved.snapshot, &destination, &["--detach", "--memory", "eager"]).success();
    assert_eq!(destination.run_state().unwrap(), "running");
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
    assert_ballast(&destination);
}
