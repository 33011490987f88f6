//! Pages of checkpoints on several channels.

use std::thread;
use std::time::Duration;

use limosa_testkit::kill9;
use rustix::process::Signal;

use crate::needs_newest_qemu;
use crate::scene::{Scene, assert_follows};
use crate::stage::{Found, assert_beats, load_in_stock_qemu};

#[test]
fn checkpoints_on_several_channels_are_of_one_instant_and_the_vm_is_left_as_it_was_found() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let found = Found::of(&vm);
    for channels in ["1", "4"] {
        let protect = scene.protect(&vm, &["--every", "20ms", "--json", "--channels", channels]);
        scene.wait_checkpoint(30, &protect);
        protect.signal(Signal::INT);
        let report = protect.wait().json();
        assert_eq!(report["end"], "asked", "{report}");
        assert!(report["pages"]["contents"].as_u64() > Some(10), "{report}");
        found.assert_same(&vm);
        assert_beats(&vm);
        load_in_stock_qemu(&scene.machine, &scene.checkpoint(), 0);
        scene.forget();
    }
}

#[test]
fn beats_continue_from_a_checkpoint_that_came_on_several_channels() {
    needs_newest_qemu!();
    for moment in [0, 17, 41] {
        let scene = Scene::new();
        let vm = scene.guest();
        let protect = scene.protect(&vm, &["--every", "30ms", "--channels", "2"]);
        scene.wait_checkpoint(20, &protect);
        vm.wait_heartbeats(1).unwrap();
        thread::sleep(Duration::from_millis(moment));
        kill9(vm.pid()).unwrap();
        let ended = protect.wait();
        assert!(ended.stderr.contains("QEMU has ended"), "{}", ended.stderr);
        let last = vm.last_pass().unwrap();
        let failover = scene.failover(&["--fenced"]);
        assert_follows(failover.wait_passes(3), last, 2);
        failover.check_and_end();
    }
}
