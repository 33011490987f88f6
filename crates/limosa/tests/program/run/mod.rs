//! `limosa run`: a VM comes back in a QEMU that limosa starts, and to its caller limosa looks like that QEMU.

mod mapped;
mod scene;
mod terminal;

use std::os::unix::process::ExitStatusExt as _;

use crate::needs_qemu;
use crate::stage::*;
use rustix::process::Signal;
use scene::*;
use serde_json::json;

#[test]
fn a_beat_guest_goes_on_where_it_was_on_limosas_own_stdout() {
    needs_qemu!();
    for how in [&["--memory", "lazy"][..], &["--memory", "lazy", "--preempt", "on"], &["--memory", "eager"]] {
        let scene = Scene::new();
        let run = scene.start(how, &[]);
        run.assert_goes_on();
        let qmp = run.qmp();
        run.check_memory(&qmp);
        qmp.lock().unwrap().execute("quit", json!({})).unwrap();
        let ended = run.wait();
        assert!(ended.status.success(), "{how:?}: {}: {}", ended.status, ended.stderr);
        assert_eq!(ended.stderr, "", "{how:?}: limosa is silent");
        scene.assert_tidy();
    }
}

#[test]
fn said_so_limosa_tells_what_it_does() {
    needs_qemu!();
    let scene = Scene::new();
    let run = scene.start(&["-v", "--memory", "lazy"], &[]);
    run.wait_laps(1);
    wait_for("the report", || run.limosa.stderr().contains("all memory after").then_some(()));
    run.limosa.signal(Signal::TERM);
    let ended = run.wait();
    assert!(ended.stderr.contains("the guest runs after"), "{}", ended.stderr);
}

#[test]
fn the_exit_status_is_qemus_own() {
    needs_qemu!();
    let scene = Scene::new();
    // The device makes 2n+1 of what is written to its port.
    for (order, status) in [("o /b 0x501 16", 33), ("quit", 0), ("system_reset", 0)] {
        let run = scene.start(&[], &["-device", "isa-debug-exit,iobase=0x501"]);
        run.wait_laps(1);
        let qmp = run.qmp();
        // QEMU may be gone before it has answered.
        let _ = qmp.lock().unwrap().execute("human-monitor-command", json!({ "command-line": order }));
        let ended = run.wait();
        assert_eq!(ended.status.code(), Some(status), "{order}: {}", ended.stderr);
        assert_eq!(ended.stderr, "");
    }
}

#[test]
fn signals_to_limosa_are_handed_on_and_qemu_ends_as_it_does() {
    needs_qemu!();
    let scene = Scene::new();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let run = scene.start(&[], &[]);
        run.wait_laps(1);
        let qemu = run.qemu();
        run.limosa.signal(signal);
        let ended = run.wait();
        assert_eq!(ended.status.code(), Some(0), "{signal:?}: {}", ended.stderr);
        assert!(ended.stderr.contains("terminating on signal"), "{signal:?}: QEMU says so: {}", ended.stderr);
        assert!(!limosa_testkit::is_alive(qemu));
    }
}

#[test]
fn limosa_ends_by_the_signal_that_has_ended_qemu() {
    needs_qemu!();
    let scene = Scene::new();
    for signal in [Signal::KILL, Signal::QUIT, Signal::SEGV] {
        let run = scene.start(&[], &[]);
        run.wait_laps(1);
        send(run.qemu(), signal);
        let ended = run.wait();
        assert_eq!(ended.status.signal(), Some(signal.as_raw()), "{}", ended.stderr);
    }
}

#[test]
fn a_qemu_whose_memory_has_not_arrived_ends_when_signalled() {
    needs_qemu!();
    let scene = Scene::new();
    for signal in [Signal::TERM, Signal::KILL] {
        let run = scene.start(&["--memory", "lazy", "--max-bandwidth", "4K"], &[]);
        run.wait_laps(1);
        let whom = if signal == Signal::TERM { run.limosa.pid() } else { run.qemu() };
        send(whom, signal);
        let ended = run.wait();
        let wanted = if signal == Signal::TERM { (Some(0), None) } else { (None, Some(signal.as_raw())) };
        assert_eq!((ended.status.code(), ended.status.signal()), wanted, "{}", ended.stderr);
        assert!(!ended.stderr.contains("limosa:"), "its end is no failure of the restore: {}", ended.stderr);
    }
}

#[test]
fn qemu_outlives_a_limosa_that_is_killed_and_the_watchdog_brings_the_rest() {
    needs_qemu!();
    let scene = Scene::new();
    let run = scene.start(&["--memory", "lazy", "--max-bandwidth", "512K"], &[]);
    run.wait_laps(1);
    let (qemu, qmp) = (run.qemu(), run.qmp());
    watchdog(&run.limosa);
    run.limosa.signal(Signal::KILL);
    wait_gone(run.limosa.pid());
    let status = || qmp.lock().unwrap().execute("query-migrate", json!({})).unwrap()["status"].clone();
    wait_for("the rest of the memory", || (status() == "completed").then_some(()));
    assert!(limosa_testkit::is_alive(qemu), "QEMU does not end with limosa");
    run.check_memory(&qmp);
}

#[test]
fn a_guest_whose_limosa_and_watchdog_were_killed_is_recovered_over_its_own_monitor() {
    needs_qemu!();
    let scene = Scene::new();
    let run = scene.start(&["--memory", "lazy", "--max-bandwidth", "4K"], &[]);
    run.wait_laps(1);
    let qmp = run.qmp();
    let watchdog = watchdog(&run.limosa).unwrap();
    send(watchdog, Signal::KILL);
    run.limosa.signal(Signal::KILL);
    wait_gone(run.limosa.pid());
    let socket = scene.path("limosa-qmp");
    limosa(["restore", "--recover", text(&scene.snapshot), "--qmp", text(&socket)]).success();
    run.check_memory(&qmp);
}

#[test]
fn a_guest_may_stay_paused_and_minus_s_says_so_too() {
    needs_qemu!();
    let scene = Scene::new();
    for (options, words) in [(&["--paused"][..], &[][..]), (&[], &["-S"])] {
        let run = scene.start(options, words);
        let qmp = run.qmp();
        let state = || qmp.lock().unwrap().execute("query-status", json!({})).unwrap()["status"].clone();
        wait_for("the guest", || (state() == "paused").then_some(()));
        qmp.lock().unwrap().execute("cont", json!({})).unwrap();
        run.assert_goes_on();
        run.limosa.signal(Signal::TERM);
        run.wait();
    }
}

#[test]
fn a_wrapper_before_qemu_and_a_confined_qemu_change_nothing() {
    needs_qemu!();
    let scene = Scene::new();
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    for options in [&["--memory", "lazy", "--preempt", "on"][..], &["--memory", "eager", "--via", "socket"]] {
        let run = scene.start_behind(&["nice", "-n", "1"], options, &["-sandbox", sandbox]);
        run.assert_goes_on();
        run.limosa.signal(Signal::TERM);
        assert_eq!(run.wait().status.code(), Some(0));
    }
}

#[test]
fn command_lines_that_cannot_work_are_refused_before_anything_is_started() {
    needs_qemu!();
    let scene = Scene::new();
    for (words, said) in [
        (&["qemu-system-x86_64", "-incoming", "defer"][..], "-incoming"),
        (&["qemu-system-x86_64", "-daemonize"], "daemonize"),
    ] {
        scene.run_words(words).misused(&[said]);
    }
    scene.run_words(&["/no/such/qemu"]).one_line(&["cannot start /no/such/qemu: No such file"]);
    let none = scene.run_words(&[]);
    assert_eq!(none.status.code(), Some(2), "{}", none.stderr);
}

#[test]
fn a_program_that_is_no_qemu_is_ended_and_named() {
    needs_qemu!();
    let scene = Scene::new();
    let ended = scene.run_in_vain(&["sh", "-c", "trap '' TERM; exec sleep 1000"]);
    ended.one_line(&["sh opened no monitor within 5 s", "--start-within"]);
    scene.assert_no_process_left();
    let ended = scene.run_words(&["true"]);
    ended.one_line(&["true ended", "before its VM was restored"]);
    let ended = scene.run_words(&["sh", "-c", "exit 7"]);
    assert_eq!(ended.status.code(), Some(7), "{}", ended.stderr);
    assert!(ended.stderr.contains("exit status: 7"), "{}", ended.stderr);
}

#[test]
fn a_qemu_that_ends_at_its_start_leaves_its_message_and_its_status() {
    needs_qemu!();
    let scene = Scene::new();
    let ended = scene.run_words(&["qemu-system-x86_64", "-device", "no-such-device", "-display", "none"]);
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    let mut lines = ended.stderr.lines();
    assert!(lines.next().is_some_and(|line| line.contains("no-such-device")), "{}", ended.stderr);
    assert!(lines.last().is_some_and(|line| line.contains("ended (exit status: 1)")), "{}", ended.stderr);
}

#[test]
fn a_vm_that_does_not_fit_ends_its_qemu_with_one_line() {
    needs_qemu!();
    let scene = Scene::new();
    let mut line = scene.line.clone();
    let machine = line.iter().position(|word| word.starts_with("q35")).unwrap();
    line[machine] = line[machine].replace("q35", "pc");
    let words: Vec<&str> = line.iter().map(String::as_str).collect();
    scene.run_words(&words).one_line(&["not restored", "pc-i440fx", "-machine"]);
    // One that is found out only while it is loaded; QEMU may crash over it.
    let ended = scene.run_snapshot(&scene.save_with_balloon(), &words_of(&scene.line));
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(
        ended.stderr.lines().last().is_some_and(|line| line.starts_with("limosa: ") && line.contains("not restored")),
        "{}",
        ended.stderr
    );
    scene.assert_no_process_left();
}

#[test]
fn a_snapshot_that_is_none_starts_no_qemu() {
    needs_qemu!();
    let scene = Scene::new();
    let nothing = scene.path("nothing");
    std::fs::write(&nothing, "no snapshot at all").unwrap();
    let marker = scene.path("started");
    let ended = scene.run_snapshot(&nothing, &["touch", text(&marker)]);
    ended.one_line(&["nothing"]);
    assert!(!marker.exists());
}
