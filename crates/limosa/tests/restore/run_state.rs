//! The run state that a VM comes back in: the saved one unless the user says otherwise, however the destination was
//! started.

use std::path::Path;

use limosa_testkit::Machine;

use crate::needs_qemu;
use crate::scene::{Scene, small_beat};
use crate::stage::assert_beats;

const WAYS: [&[&str]; 3] =
    [&["--memory", "lazy"], &["--memory", "eager", "--via", "file"], &["--memory", "eager", "--via", "socket"]];

/// Restores in every way into a destination that was started with and without `-S`, and expects the same state each
/// time.
fn comes_back(scene: &Scene, snapshot: &Path, words: &[&str], state: &str) {
    let machine = small_beat();
    let starts: [fn(&Machine) -> _; 2] = [Machine::start_incoming, Machine::start_incoming_stopped];
    for way in WAYS {
        for (dash_s, start) in [false, true].into_iter().zip(starts) {
            let destination = start(&machine).unwrap();
            let words: Vec<&str> = [way, words, &["--json"]].concat();
            let report = scene.restore(snapshot, &destination, &words).json();
            let case = format!("{words:?}, -S {dash_s}: {report}");
            assert_eq!(report["vm_state"], state, "{case}");
            assert_eq!(destination.run_state().unwrap(), state, "{case}");
            if state == "running" {
                assert_beats(&destination);
            } else {
                destination.check_heartbeat().unwrap();
                destination.cont().unwrap();
                assert_beats(&destination);
            }
        }
    }
}

/// A snapshot of a VM that ran, or was paused, when it was saved.
fn snapshot(scene: &Scene, paused: bool, via: &str) -> std::path::PathBuf {
    let source = small_beat().start().unwrap();
    source.wait_heartbeats(1).unwrap();
    if paused {
        source.stop().unwrap();
    }
    scene.save(&source, "snapshot", &["--via", via])
}

#[test]
fn a_vm_saved_running_runs_again() {
    needs_qemu!();
    let scene = Scene::new();
    let snapshot = snapshot(&scene, false, "file");
    comes_back(&scene, &snapshot, &[], "running");
    comes_back(&scene, &snapshot, &["--run"], "running");
}

#[test]
fn a_vm_saved_running_stays_paused_if_the_user_says_so() {
    needs_qemu!();
    let scene = Scene::new();
    let snapshot = snapshot(&scene, false, "socket");
    comes_back(&scene, &snapshot, &["--paused"], "paused");
}

#[test]
fn a_vm_saved_paused_comes_back_paused() {
    needs_qemu!();
    for via in ["file", "socket"] {
        let scene = Scene::new();
        let snapshot = snapshot(&scene, true, via);
        comes_back(&scene, &snapshot, &[], "paused");
    }
}

#[test]
fn a_vm_saved_paused_runs_if_the_user_says_so() {
    needs_qemu!();
    let scene = Scene::new();
    let snapshot = snapshot(&scene, true, "socket");
    comes_back(&scene, &snapshot, &["--run"], "running");
}
