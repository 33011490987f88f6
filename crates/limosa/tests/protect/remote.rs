//! The keeper is on another host.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use limosa_testkit::{Authority, Program, Vm, kill9};
use rustix::process::Signal;
use serde_json::json;

use crate::line::Line;
use crate::needs_newest_qemu;
use crate::scene::{Scene, assert_follows, kill_host, text};
use crate::stage::{Found, assert_beats, load_in_stock_qemu, names, wait_for};

const ANYWHERE: &str = "tcp:127.0.0.1:0";

#[test]
fn beats_continue_at_the_keeper_when_the_vm_and_all_of_its_host_are_killed() {
    needs_newest_qemu!();
    for moment in [0, 13, 38] {
        let scene = Scene::new();
        let (keeper, at) = scene.keep(ANYWHERE, &["--json"]);
        let vm = scene.guest();
        let protect = scene.protect_to(&vm, &at, &["--every", "50ms"]);
        scene.wait_checkpoint(20, &protect);
        vm.wait_heartbeats(1).unwrap();
        thread::sleep(Duration::from_millis(moment));
        kill_host(&vm, &protect);
        wait_for("the keeper to notice", || keeper.stderr().contains("may be lost").then_some(()));
        let last = vm.last_pass().unwrap();
        let failover = scene.failover(&["--fenced"]);
        let first = failover.wait_passes(3);
        assert_follows(first, last, 10);
        failover.check_and_end();
        keeper.signal(Signal::INT);
        let report = keeper.wait().json();
        assert_eq!(report["series"], 1, "{report}");
        assert!(report["checkpoints"].as_u64() >= Some(20), "{report}");
    }
}

#[test]
fn a_protection_that_is_told_to_stop_says_goodbye_and_leaves_the_vm_as_it_was_found() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let (keeper, at) = scene.keep(&format!("unix:{}", scene.path("keeper").display()), &[]);
    let vm = scene.guest();
    let found = Found::of(&vm);
    for times in 1..=3 {
        let protect = scene.protect_to(&vm, &at, &["--every", "20ms", "--json"]);
        let told = || keeper.stderr().matches("its protection has ended; the VM continues there").count();
        scene.wait_checkpoint(10, &protect);
        protect.signal(Signal::INT);
        let report = protect.wait().json();
        assert_eq!((report["end"].as_str(), report["vm_state"].as_str()), (Some("asked"), Some("running")), "{report}");
        assert!(report["checkpoints"].as_u64() >= Some(10), "{report}");
        assert!(report["pages"]["contents"].as_u64() > Some(10), "{report}");
        assert_eq!(report["newest"], json!(at), "{report}");
        wait_for("the keeper to hear it", || (told() == times).then_some(()));
        found.assert_same(&vm);
        assert_beats(&vm);
        assert_eq!(names(&scene.kept()), ["checkpoint.limosa"]);
        load_in_stock_qemu(&scene.machine, &scene.checkpoint(), 0);
        std::fs::remove_file(scene.checkpoint()).unwrap();
    }
    keeper.signal(Signal::TERM);
    keeper.wait().success();
}

#[test]
fn a_vm_that_ends_and_one_that_is_killed_are_told_apart() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let (keeper, at) = scene.keep(ANYWHERE, &[]);
    let vm = scene.guest();
    let protect = scene.protect_to(&vm, &at, &["--json"]);
    scene.wait_checkpoint(3, &protect);
    vm.execute("quit", json!({})).unwrap();
    assert_eq!(protect.wait().json()["end"], "vm-ended");
    wait_for("the keeper to hear it", || keeper.stderr().contains("the VM has ended by itself").then_some(()));
    std::fs::remove_file(scene.checkpoint()).unwrap();
    let vm = scene.guest();
    let protect = scene.protect_to(&vm, &at, &["--every", "500ms"]);
    scene.wait_checkpoint(3, &protect);
    kill9(vm.pid()).unwrap();
    let ended = protect.wait();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("QEMU has ended"), "{}", ended.stderr);
    wait_for("the keeper to hear it", || keeper.stderr().contains("the VM is lost").then_some(()));
}

/// Folders with the certificates of two authorities, which do not trust each other.
fn two_authorities(scene: &Scene) -> [PathBuf; 2] {
    ["pki", "other"].map(|name| {
        let folder = scene.path(name);
        Authority::new().unwrap().equip(&folder).unwrap();
        folder
    })
}

#[test]
fn both_ends_identify_themselves_by_certificates_and_strangers_are_turned_away() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let [ours, theirs] = two_authorities(&scene);
    let (keeper, at) = scene.keep(ANYWHERE, &["--tls-creds", text(&ours)]);
    let vm = scene.guest();
    let found = Found::of(&vm);
    for credentials in [&["--tls-creds", text(&theirs)][..], &[]] {
        let ended = scene.protect_to(&vm, &at, credentials).wait();
        ended.one_line(&["no connection to the keeper at"]);
        found.assert_same(&vm);
    }
    let protect = scene.protect_to(&vm, &at, &["--tls-creds", text(&ours), "--every", "50ms"]);
    scene.wait_checkpoint(10, &protect);
    protect.signal(Signal::INT);
    protect.wait().success();
    load_in_stock_qemu(&scene.machine, &scene.checkpoint(), 0);
    drop(keeper);
}

/// Has a QEMU without limosa send its checkpoints to this keeper, and expects its VM to continue from them.
fn assert_bare_qemu_is_kept(scene: &Scene, vm: &Vm, (keeper, at): (&Program, &str)) {
    vm.set_capabilities(&[("x-colo", true), ("return-path", true)]).unwrap();
    vm.execute("migrate-set-parameters", json!({ "x-checkpoint-delay": 50, "max-bandwidth": 0 })).unwrap();
    vm.execute("migrate", json!({ "uri": at })).unwrap();
    scene.wait_checkpoint(10, keeper);
    vm.wait_heartbeats(1).unwrap();
    kill9(vm.pid()).unwrap();
    wait_for("the keeper to notice", || keeper.stderr().contains("may be lost").then_some(()));
    let last = vm.last_pass().unwrap();
    let failover = scene.failover(&["--fenced"]);
    let first = failover.wait_passes(2);
    assert_follows(first, last, 10);
    failover.check_and_end();
}

#[test]
fn a_bare_qemu_may_be_the_primary() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let (keeper, at) = scene.keep(ANYWHERE, &[]);
    assert_bare_qemu_is_kept(&scene, &scene.guest(), (&keeper, &at));
}

#[test]
fn a_bare_qemu_identifies_itself_by_its_own_credentials() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let [ours, theirs] = two_authorities(&scene);
    let (keeper, at) = scene.keep(ANYWHERE, &["--tls-creds", text(&ours)]);
    let vm = scene.guest();
    for (id, folder) in [("others", &theirs), ("ours", &ours)] {
        let credentials = json!({ "qom-type": "tls-creds-x509", "id": id, "endpoint": "client", "dir": folder });
        vm.execute("object-add", credentials).unwrap();
    }
    vm.set_capabilities(&[("x-colo", true), ("return-path", true)]).unwrap();
    vm.execute("migrate-set-parameters", json!({ "tls-creds": "others" })).unwrap();
    vm.execute("migrate", json!({ "uri": at })).unwrap();
    wait_for("the stranger to be turned away", || {
        (vm.execute("query-migrate", json!({})).unwrap()["status"] == "failed").then_some(())
    });
    assert!(scene.newest().is_none() && vm.run_state().unwrap() == "running");
    vm.execute("migrate-set-parameters", json!({ "tls-creds": "ours" })).unwrap();
    assert_bare_qemu_is_kept(&scene, &vm, (&keeper, &at));
}

#[test]
fn strangers_and_a_second_vm_do_not_disturb_a_keeper() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let (keeper, at) = scene.keep(ANYWHERE, &[]);
    let connect = || TcpStream::connect(at.strip_prefix("tcp:").unwrap()).unwrap();
    let silent: Vec<_> = (0..40).map(|_| connect()).collect();
    connect().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    connect().write_all(b"LIMOSA-P\0\0\0\x01\xff\xff\xff\xff").unwrap();
    connect().write_all(b"QEVM\0\0\0\x03garbage").unwrap();
    wait_for("the garbage to be refused", || keeper.stderr().contains("nothing was kept of it").then_some(()));
    drop(silent);
    let vm = scene.guest();
    let protect = scene.protect_to(&vm, &at, &["--every", "20ms"]);
    scene.wait_checkpoint(3, &protect);
    let other = scene.guest();
    let found = Found::of(&other);
    scene
        .protect_to(&other, &at, &[])
        .wait()
        .one_line(&["does not take this VM", "keeps the checkpoints of a VM already"]);
    found.assert_same(&other);
    scene.failover(&["--fenced"]).limosa.wait().one_line(&["still keeps checkpoints here"]);
    let before = scene.newest().unwrap();
    scene.wait_checkpoint(before + 5, &protect);
    protect.signal(Signal::INT);
    protect.wait().success();
}

#[test]
fn what_answers_at_the_keepers_address_is_not_believed() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let found = Found::of(&vm);
    for answer in [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], b"LIMOSA-K\0\0\0\0\xff\xff\xff\xff", b""] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = format!("tcp:{}", listener.local_addr().unwrap());
        let protect = scene.protect_to(&vm, &at, &["--lost-after", "1s"]);
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 16]).unwrap();
        stream.write_all(answer).unwrap();
        protect.wait().one_line(&["no connection to the keeper at"]);
        found.assert_same(&vm);
    }
}

#[test]
fn a_slow_line_delays_checkpoints_and_the_pause_only_by_a_round_trip() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let (_keeper, at) = scene.keep(ANYWHERE, &[]);
    let line = Line::to(&at);
    let vm = scene.guest();
    let protect = scene.protect_to(&vm, &line.uri(), &["--every", "20ms", "--json"]);
    scene.wait_checkpoint(2, &protect);
    line.delay(Duration::from_millis(3));
    let before = scene.newest().unwrap();
    scene.wait_checkpoint(before + 10, &protect);
    // Its memory is looked at behind the protection: QEMU refuses `cont` in the middle of a checkpoint.
    vm.wait_heartbeats(2).unwrap();
    protect.signal(Signal::INT);
    let report = protect.wait().json();
    assert_eq!(report["end"], "asked", "{report}");
    assert!(report["pause"]["median_ms"].as_f64() > Some(6.0), "{report}");
    assert_beats(&vm);
}
