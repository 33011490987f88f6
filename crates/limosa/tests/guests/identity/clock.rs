//! The guest's clock, set through its agent.

use std::os::unix::net::UnixStream;
use std::time::{SystemTime, UNIX_EPOCH};

use limosa_testkit::{Machine, Serial, Series, series_skipped};
use serde_json::Value;

use super::*;
use crate::needs_qemu;

/// A moment in 2020, to which guests' clocks are set before they are saved.
const LONG_AGO: i64 = 1_600_000_000;

/// Seconds between the host's clock and the guest's.
fn seconds_off(guest: &Serial) -> i64 {
    let time: i64 = guest.shell("date +%s").unwrap()[0].parse().unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    (i64::try_from(now).unwrap() - time).abs()
}

fn long_ago(source: &Vm) {
    source.shell(&format!("date -s @{LONG_AGO}")).unwrap();
    wait_agent(source);
}

/// Expects that the clock was set, and that limosa has said how far it was behind.
#[track_caller]
fn assert_set(clock: &Value) {
    assert_eq!(clock["set"], true, "{clock}");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let behind = (now - LONG_AGO as f64) * 1000.0;
    let said = clock["behind_ms"].as_f64().unwrap();
    assert!((behind - 600_000.0..=behind).contains(&said), "{clock}, expected {behind} at most");
}

#[test]
fn the_clocks_of_clones_are_set_unless_they_are_to_stay() {
    needs_qemu!();
    let scene = LinuxScene::new(&with_agent(), &agent_port, long_ago);
    let said = scene.clone_with(&["--count", "1"], &[]).wait().success();
    assert!(said.stderr.contains("clocks set to the host's: 1"), "{}", said.stderr);
    for clone in scene.start(2, &[], &[]) {
        assert_set(&clone["clock"]);
        assert!(seconds_off(&console(&clone)) < 60, "{clone}");
        // The agent is free for its next client.
        UnixStream::connect(folder(&clone).join("qga")).unwrap();
    }
    let [off] = scene.start(1, &["--set-clock", "off"], &[]).try_into().unwrap();
    assert_eq!(off["clock"], Value::Null);
    assert!(seconds_off(&console(&off)) > 1_000_000);
    let [paused] = scene.start(1, &["--paused"], &[]).try_into().unwrap();
    assert_eq!(paused["clock"], Value::Null);
    let refused = scene.clone_with(&["--count", "1", "--paused", "--set-clock", "on"], &[]).wait();
    assert_eq!(refused.status.code(), Some(2), "{}", refused.stderr);
}

/// Restores the VM both ways in this series of QEMU, and expects its clock to be set.
fn assert_restored_clock_is_set(scene: &LinuxScene, series: Series) {
    for memory in ["eager", "lazy"] {
        let place = scratch().unwrap();
        let words = agent_port(place.path().to_str().unwrap());
        let machine =
            words.iter().fold(Machine::linux(with_agent()).series(series), |machine, word| machine.argument(word));
        let vm = machine.start_incoming().unwrap();
        let (snapshot, socket) = (scene.snapshot.to_str().unwrap(), vm.qmp_socket());
        let words = ["restore", snapshot, "--qmp", socket.to_str().unwrap(), "--memory", memory, "--json"];
        let report = limosa(words).json();
        assert_eq!(report["mode"], memory);
        assert_set(&report["clock"]);
        assert!(seconds_off(vm.serial()) < 60);
    }
}

#[test]
fn the_clock_of_a_vm_restored_in_another_series_is_set() {
    needs_qemu!();
    if series_skipped() {
        return;
    }
    for series in [Series::Oldest, Series::Newest] {
        let scene = LinuxScene::in_series(series, &with_agent(), &agent_port, long_ago);
        assert_restored_clock_is_set(&scene, series);
    }
}

#[test]
fn the_clock_of_a_restored_vm_is_set_however_its_memory_comes() {
    needs_qemu!();
    let scene = LinuxScene::new(&with_agent(), &agent_port, long_ago);
    assert_restored_clock_is_set(&scene, Series::Installed);
    let folder = scene.folder.path().join("run");
    std::fs::create_dir(&folder).unwrap();
    let at = folder.to_str().unwrap();
    let line: Vec<_> = scene.line.iter().map(|word| word.replace("{dir}", at)).collect();
    let mut words = vec!["run", "-v", "--set-clock", "on", scene.snapshot.to_str().unwrap(), "--"];
    words.extend(line.iter().map(String::as_str));
    let running = start(words);
    wait_for("the serial port", || Serial::connect(&folder.join("serial")).ok());
    wait_for("the clock", || running.stderr().contains("the guest's clock is set; it was").then_some(()));
    assert!(seconds_off(&Serial::connect(&folder.join("serial")).unwrap()) < 60);
}

#[test]
fn a_vm_without_an_agent_that_can_be_reached_is_restored_without_a_word_or_named_if_its_clock_must_be_set() {
    needs_qemu!();
    let guest = LinuxGuest { modules: false, ..LinuxGuest::default() };
    let scene = LinuxScene::new(&guest, &|_| Vec::new(), |_| {});
    let auto = scene.clone_with(&["--count", "1"], &[]).wait().success();
    assert!(!auto.stderr.contains("clock"), "{}", auto.stderr);
    let on = scene.clone_with(&["--count", "2", "--set-clock", "on", "--json"], &[]).wait();
    assert_eq!(on.status.code(), Some(1));
    let report: Value = serde_json::from_str(&on.stdout).unwrap();
    assert_eq!(report["clones"][1]["vm_state"], "running");
    assert_eq!(report["clones"][1]["clock"]["set"], false);
    for said in ["the VM has no port for a guest agent", "the clocks of clones that run are not set: 002, 003"] {
        assert!(on.stderr.contains(said), "{}", on.stderr);
    }
    // One that has a port, and a client.
    let place = scratch().unwrap();
    let ported = LinuxScene::new(&with_agent(), &agent_port, wait_agent);
    let words = agent_port(place.path().to_str().unwrap());
    let vm = words.iter().fold(Machine::linux(with_agent()), |machine, word| machine.argument(word));
    let vm = vm.start_incoming().unwrap();
    let _client = UnixStream::connect(place.path().join("qga")).unwrap();
    let (snapshot, socket) = (ported.snapshot.to_str().unwrap(), vm.qmp_socket());
    let words = ["restore", snapshot, "--qmp", socket.to_str().unwrap(), "--set-clock", "on"];
    let ended = limosa(words);
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    let said = "the VM is restored, but the guest's clock is not set: another program is connected to the guest agent's \
                chardev qga";
    assert!(ended.stderr.contains(said), "{}", ended.stderr);
    vm.wait_counts(2).unwrap();
}

#[test]
fn an_agent_that_does_not_answer_or_floods_its_host_holds_nothing_up() {
    needs_qemu!();
    let stopped = |source: &Vm| {
        wait_agent(source);
        source.shell("kill -STOP $(cat /tmp/qemu-ga.pid)").unwrap();
    };
    // The agent's place is taken by a guest that sends without end.
    let flood = |source: &Vm| {
        wait_agent(source);
        source.shell("kill -9 $(cat /tmp/qemu-ga.pid); sleep 1; cat /dev/zero > /dev/vport0p1 & sleep 1").unwrap();
    };
    let unanswered = "the guest agent did not answer guest-sync-delimited within 10 s";
    let endless = "the guest agent sent more than 1048576 bytes";
    let scenes = [
        (LinuxScene::new(&with_agent(), &agent_port, stopped), unanswered),
        (LinuxScene::new(&with_agent(), &agent_port, flood), endless),
    ];
    for (scene, reason) in scenes {
        let [clone] = scene.start(1, &[], &[]).try_into().unwrap();
        assert_eq!(clone["vm_state"], "running");
        assert_eq!(clone["clock"], json!({ "set": false, "reason": reason }));
        let said = scene.clone_with(&["--count", "1"], &[]).wait().success();
        assert!(
            said.stderr.contains(&format!("limosa: clone 002: the guest's clock is not set: {reason}")),
            "{}",
            said.stderr
        );
    }
}
