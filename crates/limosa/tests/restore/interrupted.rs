//! A lazy restore whose limosa is killed, at any moment: the guest is not there at all, or it is brought back whole.

use std::time::{Duration, Instant};

use limosa_testkit::{HeartbeatGuest, Machine, MemoryBackend, Vm, is_alive, kill9};
use rustix::process::Signal;
use serde_json::json;

use crate::needs_qemu;
use crate::scene::{
    Saved, Scene, TRICKLE, assert_ballast, assert_consistent, assert_failed, beat, control, migration_status, release,
    saved_beat, text, wait_guest, wait_migration_status,
};
use crate::stage::{
    Found, Program, SOON, assert_beats, kill_watchdog_left_by, start_command, wait_for, wait_gone, watchdog,
    watchdog_left_by, watchdog_of,
};

/// A walk that is long enough to fault all the time while the rest comes: 16 MiB without rest.
pub(crate) fn walker() -> Machine {
    Machine::heartbeat(HeartbeatGuest { rest: 0, ..HeartbeatGuest::over(12 << 20) }).backend(MemoryBackend::Memfd)
}

/// Who is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Victims {
    /// limosa; its watchdog has to go on.
    Pager,
    /// Both: a person has to go on.
    Both,
}

/// The state after a kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Left {
    /// QEMU never got the guest: the user ends it.
    Nothing,
    /// The guest was there and had to be recovered.
    Half,
    /// The guest was there and the watchdog brought the rest.
    Healed,
    /// The guest was there with all its pages; at most QEMU's settings were left.
    Whole,
    /// QEMU has every page, has read the end, and waits for an answer to a page that was never stored, which no process
    /// can give any more. Possible with `--preempt on` alone, and what its help warns of.
    Unended,
    /// QEMU ended itself: it lost its source between the last device and the start of the guest, took that for a failed
    /// load, and had started the guest by the time it ended. As if the power had failed then.
    Ended,
    /// QEMU's main loop waits for a page, so that it accepts no new connection. Possible if the watchdog is killed too.
    HeldUp,
}

/// Restores with `how`, kills after `delay`, and brings the guest back by the command that limosa recommends.
fn kill_and_bring_back(
    scene: &Scene,
    saved: &Saved,
    machine: &Machine,
    how: &[&str],
    (delay, victims): (Duration, Victims),
) -> Left {
    let destination = machine.start_incoming().unwrap();
    let limosa = scene.start_restore(&saved.snapshot, &destination, how);
    let end = Instant::now() + delay;
    while Instant::now() < end && limosa.is_running() {
        std::thread::sleep(Duration::from_micros(200));
    }
    if let (Victims::Both, Some(watchdog)) = (victims, watchdog_of(limosa.pid())) {
        // It is not our child, but limosa does not reap it before its own end.
        let _ = kill9(watchdog);
    }
    limosa.signal(Signal::KILL);
    match victims {
        Victims::Pager => watchdog_left_by(limosa.pid()).into_iter().for_each(wait_gone),
        Victims::Both => kill_watchdog_left_by(limosa.pid()),
    }
    let ended = limosa.wait();
    if ended.status.success() {
        assert_consistent(&destination);
        return Left::Whole;
    }
    if how.contains(&"on") && is_unended(&destination) {
        return Left::Unended;
    }
    match found(&destination) {
        Left::Nothing => {
            drop(destination);
            let fresh = machine.start_incoming().unwrap();
            scene.restore(&saved.snapshot, &fresh, &["--memory", "lazy"]).success();
            saved.assert_goes_on(&fresh);
            assert_beats(&fresh);
            return Left::Nothing;
        }
        Left::Ended => return Left::Ended,
        Left::HeldUp => {
            assert_eq!(victims, Victims::Both, "the watchdog did nothing: {}", ended.stderr);
            return Left::HeldUp;
        }
        _ => {}
    }
    let whole = migration_status(&destination) == "completed";
    let healed = ended.stderr.contains("its watchdog has brought the rest of the memory");
    if victims == Victims::Pager {
        assert!(whole, "{}: {}", migration_status(&destination), ended.stderr);
    } else {
        let recovered = scene.recover(&saved.snapshot, &destination);
        if whole && !recovered.status.success() {
            // It was killed after it had put QEMU's settings back.
            assert_failed(&recovered, &["no lazy restore by limosa was interrupted"]);
        } else {
            recovered.success();
        }
    }
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
    match (healed, whole) {
        (true, _) => Left::Healed,
        (false, true) => Left::Whole,
        (false, false) => Left::Half,
    }
}

/// Whether the destination's guest was not started, because its QEMU has ended, still waits, has failed, or is stuck;
/// or whether it can be asked ([`Left::Half`]), or not. Waits until that is decided.
///
/// QEMU 10.0 ends if it loses its source while it loads the devices, or, if it has a channel for requests, waits for
/// ever for the page that it has asked for there: its main loop then answers nothing.
fn found(destination: &Vm) -> Left {
    let stack = format!("/proc/{pid}/task/{pid}/wchan", pid = destination.pid());
    let (mut waits, end) = (0, Instant::now() + Duration::from_secs(20));
    loop {
        if !is_alive(destination.pid()) {
            return if destination.serial().lines().is_empty() { Left::Nothing } else { Left::Ended };
        }
        // Its memory is not served any more, so a main thread that waits for a page waits for good.
        waits = if std::fs::read_to_string(&stack).unwrap_or_default() == "handle_userfault" { waits + 1 } else { 0 };
        if waits > 100 {
            return if destination.serial().lines().is_empty() { Left::Nothing } else { Left::HeldUp };
        }
        // It may end between these two.
        if waits == 0
            && let Ok(info) = destination.execute("query-migrate", json!({}))
        {
            match info["status"].as_str().unwrap_or("none") {
                "none" | "setup" | "failed" if destination.serial().lines().is_empty() => return Left::Nothing,
                // QEMU 10.0 reads the stream in one thread and loads the devices in another. If the stream breaks
                // before the devices are loaded, the first thread fails and ends QEMU, and until then the other one
                // may have started the guest. With huge pages the clean-up between the two takes longest.
                "none" | "setup" | "failed" => {
                    assert!(Instant::now() < end, "the guest ran, and its failed QEMU does not end: {info}");
                }
                "postcopy-paused" | "completed" => return Left::Half,
                // It was killed after QEMU was given the end of the channel that it is to keep, and before the end was
                // sent: QEMU does not notice. A recovery tells it.
                "postcopy-active" if Instant::now() > end => return Left::Half,
                other => assert!(Instant::now() < end + SOON, "QEMU still says {other}"),
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether QEMU still waits for a transfer whose other end has ended: it notices a channel that breaks within moments,
/// but not when it has read the end of the stream.
fn is_unended(destination: &Vm) -> bool {
    let end = Instant::now() + Duration::from_secs(20);
    let stack = format!("/proc/{pid}/task/{pid}/wchan", pid = destination.pid());
    while Instant::now() < end && is_alive(destination.pid()) {
        // Its main thread waits for memory itself: it would not answer.
        if std::fs::read_to_string(&stack).unwrap_or_default() == "handle_userfault" {
            return false;
        }
        match destination.execute("query-migrate", json!({})) {
            Ok(info) if info["status"] == "postcopy-active" => std::thread::sleep(Duration::from_millis(20)),
            _ => return false,
        }
    }
    is_alive(destination.pid())
}

/// Kills at `times` moments spread evenly, shifted by what `seed` decides, from the start to the end of a restore of
/// [`walker`] into `machine`.
pub(crate) fn killed_often(times: u32, machine: &Machine, how: &[&str], victims: Victims, seed: u32) {
    let scene = Scene::new();
    let saved = saved_beat(&scene, &walker(), &[]);
    // How long a whole restore takes here and now: the moments are spread over that.
    let how: Vec<&str> = ["--memory", "lazy", "--max-bandwidth", "64M"].iter().chain(how).copied().collect();
    let whole = {
        let destination = machine.start_incoming().unwrap();
        let begun = Instant::now();
        scene.restore(&saved.snapshot, &destination, &how).success();
        begun.elapsed()
    };
    let mut found = std::collections::BTreeMap::<Left, u32>::new();
    for time in 0..times {
        let shift = f64::from(seed.wrapping_add(time).wrapping_mul(0x9e37_79b9)) / f64::from(u32::MAX);
        let delay = whole.mul_f64((f64::from(time) + shift) / f64::from(times));
        let left = kill_and_bring_back(&scene, &saved, machine, &how, (delay, victims));
        *found.entry(left).or_default() += 1;
    }
    eprintln!("killed {times} times within {whole:?}: {found:?}");
    for rare in [Left::Unended, Left::Ended, Left::HeldUp] {
        assert!(found.get(&rare).is_none_or(|times| *times <= 2), "more than a moment: {found:?}");
    }
    let missing = if victims == Victims::Pager { Left::Healed } else { Left::Half };
    assert!(found.contains_key(&missing), "no kill came while pages were missing: {found:?}");
}

#[test]
fn the_guest_of_a_pager_killed_at_any_of_fifty_moments_is_brought_back_by_its_watchdog_with_requests_on_their_own_channel()
 {
    needs_qemu!();
    killed_often(50, &walker(), &["--preempt", "on"], Victims::Pager, 1);
}

#[test]
fn the_guest_of_a_pager_killed_at_any_of_fifty_moments_is_brought_back_by_its_watchdog_with_one_channel() {
    needs_qemu!();
    killed_often(50, &walker(), &["--preempt", "off"], Victims::Pager, 2);
}

#[test]
fn a_pager_killed_with_its_watchdog_at_any_moment_loses_no_page_with_requests_on_their_own_channel() {
    needs_qemu!();
    killed_often(25, &walker(), &["--preempt", "on"], Victims::Both, 3);
}

#[test]
fn a_pager_killed_with_its_watchdog_at_any_moment_loses_no_page_with_one_channel() {
    needs_qemu!();
    killed_often(25, &walker(), &["--preempt", "off"], Victims::Both, 4);
}

#[test]
fn a_watchdog_goes_on_even_while_qemus_main_loop_waits_for_a_page() {
    needs_qemu!();
    for preempt in ["on", "off"] {
        let scene = Scene::new();
        let saved = saved_beat(&scene, &beat(), &[]);
        let found = Found::of(&beat().start_incoming().unwrap());
        let destination = beat().start_incoming().unwrap();
        let words = [&["--memory", "lazy", "--preempt", preempt], &TRICKLE[..]].concat();
        let limosa = scene.start_restore(&saved.snapshot, &destination, &words);
        wait_guest(&limosa);
        // A processor that waits for a page in the middle of an interrupt keeps the main loop from coming to the
        // ballast. A guest that beats has what it needs.
        assert_beats(&destination);
        let watchdog = watchdog(&limosa).unwrap();
        limosa.signal(Signal::STOP);
        std::thread::scope(|scope| {
            // QEMU reads the ballast in its main loop, and limosa does not answer.
            let reading = scope.spawn(|| assert_ballast(&destination));
            let stack = format!("/proc/{pid}/task/{pid}/wchan", pid = destination.pid());
            wait_for("QEMU's main loop to wait", || {
                (std::fs::read_to_string(&stack).unwrap() == "handle_userfault").then_some(())
            });
            limosa.signal(Signal::KILL);
            reading.join().unwrap();
        });
        // The rate is still the one that was asked for, so the rest would take its time.
        kill9(watchdog).unwrap();
        wait_gone(watchdog);
        let said = limosa.wait().stderr;
        wait_migration_status(&destination, "postcopy-paused");
        scene.recover(&saved.snapshot, &destination).success();
        found.assert_same_but(&destination, "running");
        saved.assert_goes_on(&destination);
        assert_consistent(&destination);
        assert!(!said.contains("watchdog"), "{said}");
    }
}

/// Kills limosa with its watchdog, so that no process continues the restore.
fn kill_both(limosa: Program) {
    let watchdog = watchdog(&limosa);
    if let Some(watchdog) = watchdog {
        kill9(watchdog).unwrap();
    }
    limosa.signal(Signal::KILL);
    limosa.wait();
    watchdog.into_iter().for_each(wait_gone);
}

/// A guest whose pager was killed while the ballast was missing.
fn interrupted(scene: &Scene, saved: &Saved, more: &[&str]) -> Vm {
    let destination = beat().start_incoming().unwrap();
    let words = [&["--memory", "lazy"], &TRICKLE[..], more].concat();
    let limosa = scene.start_restore(&saved.snapshot, &destination, &words);
    wait_guest(&limosa);
    assert_beats(&destination);
    kill_both(limosa);
    wait_migration_status(&destination, "postcopy-paused");
    destination
}

#[test]
fn a_recovery_puts_back_what_the_dead_restore_had_changed() {
    needs_qemu!();
    for preempt in ["on", "off"] {
        let scene = Scene::new();
        let saved = saved_beat(&scene, &beat(), &[]);
        let found = Found::of(&beat().start_incoming().unwrap());
        let destination = interrupted(&scene, &saved, &["--preempt", preempt]);
        let said = scene.recover(&saved.snapshot, &destination).success();
        assert!(said.stderr.contains("all memory after"), "{}", said.stderr);
        found.assert_same_but(&destination, "running");
        assert_consistent(&destination);
        assert_ballast(&destination);
        saved.assert_goes_on(&destination);
    }
}

#[test]
fn a_recovery_that_is_killed_too_is_recovered_from() {
    needs_qemu!();
    for preempt in ["on", "off"] {
        let scene = Scene::new();
        let saved = saved_beat(&scene, &beat(), &[]);
        let destination = interrupted(&scene, &saved, &["--preempt", preempt]);
        for round in 0..3 {
            let socket = scene.path(&format!("control{round}"));
            let words: Vec<&str> = ["--recover", "--control", text(&socket)].into_iter().chain(TRICKLE).collect();
            let recovery = scene.start_restore(&saved.snapshot, &destination, &words);
            // The status of QEMU may still be that of the recovery before.
            let mut monitor = control(&socket);
            wait_for("progress", || {
                let progress = monitor.execute("query-migrate", json!({})).unwrap();
                (progress["ram"]["total"].as_u64() > Some(0)).then_some(())
            });
            wait_migration_status(&destination, "postcopy-active");
            assert_beats(&destination);
            kill_both(recovery);
        }
        scene.recover(&saved.snapshot, &destination).success();
        saved.assert_goes_on(&destination);
        assert_consistent(&destination);
        assert_ballast(&destination);
    }
}

#[test]
fn a_recovery_killed_at_any_moment_can_be_tried_again() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let destination = interrupted(&scene, &saved, &[]);
    for step in 0..20_u32 {
        let words: Vec<&str> = ["--recover"].into_iter().chain(TRICKLE).collect();
        let recovery = scene.start_restore(&saved.snapshot, &destination, &words);
        let end = Instant::now() + Duration::from_millis(2) * step;
        while Instant::now() < end && recovery.is_running() {
            std::thread::sleep(Duration::from_micros(200));
        }
        if let Some(watchdog) = watchdog_of(recovery.pid()) {
            let _ = kill9(watchdog);
        }
        recovery.signal(Signal::KILL);
        kill_watchdog_left_by(recovery.pid());
        recovery.wait();
    }
    scene.recover(&saved.snapshot, &destination).success();
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
    assert_ballast(&destination);
}

#[test]
fn a_recovery_from_another_snapshot_is_refused() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let other = Scene::new();
    // The same machine a moment earlier or later: any page of it would fit, and none may come.
    let wrong = saved_beat(&other, &beat(), &[]);
    let destination = interrupted(&scene, &saved, &[]);
    let line = scene.recover(&wrong.snapshot, &destination).one_line(&["stands on another snapshot"]);
    assert!(line.contains(text(&saved.snapshot)), "the right file is named: {line}");
    assert_eq!(migration_status(&destination), "postcopy-paused");
    scene.recover(&saved.snapshot, &destination).success();
    assert_consistent(&destination);
    assert_ballast(&destination);
}

#[test]
fn a_recovery_of_what_needs_none_is_refused() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    // A QEMU that waits for a VM. limosa holds its monitor, so another limosa needs another one.
    let second = scene.path("second");
    let monitor = format!("unix:{},server=on,wait=off", second.display());
    let destination = beat().argument("-qmp").argument(&monitor).start_incoming().unwrap();
    let recover = || {
        start_command(scene.command(&["restore", text(&saved.snapshot), "--recover", "--qmp", text(&second)])).wait()
    };
    let none = "no lazy restore by limosa was interrupted in this QEMU";
    recover().one_line(&[none, "without --recover"]);

    // One whose pager lives.
    let words: Vec<&str> = ["--memory", "lazy"].into_iter().chain(TRICKLE).collect();
    let limosa = scene.start_restore(&saved.snapshot, &destination, &words);
    wait_guest(&limosa);
    let line = recover().one_line(&["in the middle of a restore"]);
    assert!(line.contains(&limosa.pid().to_string()), "{line}");
    assert!(limosa.is_running());
    assert_eq!(migration_status(&destination), "postcopy-active");

    // One that has got everything.
    release(limosa);
    recover().one_line(&[none]);
    assert_eq!(destination.run_state().unwrap(), "running");
    assert_consistent(&destination);
}
