//! `limosa run --memory`: QEMU's command line is rewritten so that the snapshot is the guest's memory.

use std::os::unix::fs::PermissionsExt as _;

use limosa_testkit::is_alive;
use rustix::process::Signal;
use serde_json::json;

use super::scene::{Scene, text, words_of};
use crate::needs_qemu;
use crate::stage::{limosa, old_qemu, wait_gone};

/// Whether a process maps this file.
fn maps(pid: u32, file: &std::path::Path) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines().any(|line| line.ends_with(text(file)))
}

#[test]
fn a_guest_goes_on_with_the_snapshot_as_its_memory_and_needs_limosa_no_more() {
    needs_qemu!();
    let scene = Scene::new();
    let file = std::fs::read(&scene.snapshot).unwrap();
    for how in [&["--memory", "mapped"][..], &["--memory", "auto"], &[]] {
        let run = scene.start(how, &[]);
        run.assert_goes_on();
        let (qmp, qemu) = (run.qmp(), run.qemu());
        assert!(maps(qemu, &scene.snapshot), "{how:?}");
        run.check_memory(&qmp);
        run.limosa.signal(Signal::KILL);
        wait_gone(run.limosa.pid());
        run.check_memory(&qmp);
        assert!(is_alive(qemu), "{how:?}: QEMU ended with limosa");
        qmp.lock().unwrap().execute("quit", json!({})).unwrap();
        wait_gone(qemu);
        scene.assert_tidy();
    }
    assert!(std::fs::read(&scene.snapshot).unwrap() == file, "the snapshot was written to");
    assert_eq!(scene.snapshot.metadata().unwrap().permissions().mode() & 0o777, 0o400);
}

#[test]
fn what_it_does_is_reported_and_the_other_ways_are_kept() {
    needs_qemu!();
    let scene = Scene::new();
    for (how, report, mapped) in [
        ("mapped", "mapped from the snapshot", true),
        ("lazy", "all memory after", false),
        ("eager", "restored after", false),
    ] {
        let run = scene.start(&["-v", "--memory", how], &[]);
        run.wait_laps(1);
        crate::stage::wait_for(report, || run.limosa.stderr().contains(report).then_some(()));
        assert_eq!(maps(run.qemu(), &scene.snapshot), mapped, "{how}");
        run.limosa.signal(Signal::TERM);
        run.wait();
    }
}

#[test]
fn what_cannot_be_mapped_is_refused_by_name_or_restored_another_way() {
    needs_qemu!();
    let scene = Scene::new();
    let words = [&words_of(&scene.line)[..], &["-overcommit", "mem-lock=on"]].concat();
    let refused = limosa([&["run", "--memory", "mapped", text(&scene.snapshot), "--"], &words[..]].concat());
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        refused.stderr.contains("-overcommit mem-lock=on") && refused.stderr.contains("--memory auto"),
        "{}",
        refused.stderr
    );
    scene.assert_no_process_left();
    let run = scene.start(&["-v"], &["-device", "virtio-mem-pci,memdev=none,id=x"]);
    let ended = run.wait();
    assert!(ended.stderr.contains("not mapped: -device virtio-mem-pci"), "{}", ended.stderr);
}

#[test]
fn a_qemu_that_is_too_old_is_named_by_the_option_it_lacks_or_restored_another_way() {
    needs_qemu!();
    let mut scene = Scene::new();
    scene.line[0] = text(&old_qemu(&scene.path("qemu-old"))).to_owned();
    let refused =
        limosa([&["run", "--memory", "mapped", text(&scene.snapshot), "--"], &words_of(&scene.line)[..]].concat());
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.stderr.contains("no option rom") && refused.stderr.contains("8.2"), "{}", refused.stderr);
    let run = scene.start(&["-v"], &[]);
    run.assert_goes_on();
    assert!(run.limosa.stderr().contains("the memory is not mapped"), "{}", run.limosa.stderr());
    let qmp = run.qmp();
    run.check_memory(&qmp);
}

#[test]
fn what_the_guest_touches_is_recorded_while_it_runs_also_if_it_ends_early() {
    needs_qemu!();
    for memory in ["mapped", "lazy"] {
        let scene = Scene::new();
        let set = scene.path("snapshot.working-set");
        let run = scene.start(&["--memory", memory, "--record-working-set=500ms"], &[]);
        run.assert_goes_on();
        crate::stage::wait_for("the working set", || set.exists().then_some(()));
        assert!(run.limosa.is_running());
        run.limosa.signal(Signal::TERM);
        run.wait();
        std::fs::remove_file(&set).unwrap();
        if memory == "mapped" {
            let run = scene.start(&["--memory", memory, "--record-working-set=5m"], &[]);
            run.wait_laps(20);
            run.limosa.signal(Signal::TERM);
            run.wait();
            assert!(set.exists());
        }
        let run = scene.start(&["--memory", memory], &[]);
        run.assert_goes_on();
        run.limosa.signal(Signal::TERM);
        run.wait();
    }
}
