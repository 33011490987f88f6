//! Network output leaves when its checkpoint counts.
//!
//! A Linux guest numbers the datagrams that it sends; the number is in its memory alone. Each number reaches the world
//! once and in its order, through all failovers: one that came twice or was skipped is one that a survivor did not know
//! of, or that was lost with a checkpoint that counts.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use limosa_testkit::{LinuxGuest, Machine, Program, Series, Vm, kill9};
use rustix::process::Signal;

use crate::needs_newest_qemu;
use crate::outside::Outside;
use crate::scene::{Scene, kill_host, machine as machine_without_network};
use crate::stage::{SOON, wait_for, wait_gone, watchdog};

/// The guest's address and the world's, in 10.9.0.0/24.
const GUEST: [u8; 4] = [10, 9, 0, 2];
const WORLD: [u8; 4] = [10, 9, 0, 1];
const WORLD_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// A scene whose VM has a network card, and its network.
pub(crate) fn scene() -> (Scene, Outside) {
    let machine = Machine::linux(LinuxGuest::default()).series(Series::Newest);
    let scene = Scene::of(|folder| networked(machine, folder));
    let outside = Outside::listen(&scene.path("world.net"));
    (scene, outside)
}

/// The machine with a network card whose back end connects to this socket.
pub(crate) fn connected(machine: Machine, socket: &Path) -> Machine {
    machine
        .argument("-netdev")
        .argument(&format!("stream,id=n0,server=off,addr.type=unix,addr.path={},reconnect-ms=50", socket.display()))
        .argument("-device")
        .argument("virtio-net-pci,netdev=n0,mac=02:00:00:00:00:02,romfile=")
}

/// The machine with a network card whose back end connects to a gate in this folder.
pub(crate) fn networked(machine: Machine, folder: &Path) -> Machine {
    connected(machine, &folder.join("vm.net"))
}

/// Starts the guest, which sends numbers.
pub(crate) fn counting(scene: &Scene) -> Vm {
    let vm = scene.machine.start().unwrap();
    vm.wait_counts(2).unwrap();
    count(&vm);
    vm
}

/// Has the guest send a number about every 20 ms.
pub(crate) fn count(vm: &Vm) {
    let lines = [
        "ip link set eth0 up",
        "ip addr add 10.9.0.2/24 dev eth0",
        "arp -s 10.9.0.1 02:00:00:00:00:01",
        "syslogd -R 10.9.0.1:514",
        "(n=0; while :; do n=$((n+1)); logger count=$n.; usleep 20000; done) </dev/null >/dev/null 2>&1 &",
    ];
    for line in lines {
        vm.shell(line).unwrap();
    }
}

/// `limosa protect` with the gate.
fn protect(scene: &Scene, vm: &Vm, more: &[&str]) -> Program {
    let gate = scene.path("gate").display().to_string();
    scene.protected(vm, &["--gate", &gate, "--json"], more)
}

#[test]
fn without_a_gate_the_world_has_seen_what_the_survivor_does_not_know() {
    needs_newest_qemu!();
    let (scene, outside) = scene();
    let _gate = scene.gate(&[]);
    let vm = counting(&scene);
    let keeper = scene.protect(&vm, &["--every", "3s", "--output", "free"]);
    scene.wait_checkpoint(1, &keeper);
    outside.wait_counts(10);
    kill9(vm.pid()).unwrap();
    assert_eq!(keeper.wait().status.code(), Some(1));
    let last = *outside.counts().last().unwrap();
    let _survivor = survivor(&scene);
    outside.wait_counts(2);
    let counts = outside.counts();
    let repeated = counts.windows(2).find(|pair| pair[1] <= pair[0]).unwrap_or_else(|| panic!("{counts:?}"));
    assert!(repeated[0] >= last && repeated[1] < last, "{repeated:?} after {last}");
}

#[test]
fn a_network_without_a_gate_and_a_gate_without_a_network_are_refused() {
    needs_newest_qemu!();
    let (scene, _outside) = scene();
    let _gate = scene.gate(&[]);
    let gate = scene.path("gate").display().to_string();
    let machine = scene.machine.clone().argument("-nic").argument("user,id=other");
    let vm = machine.start().unwrap();
    scene.protect(&vm, &["--gate", &gate]).wait().one_line(&["the network other of the VM (user) has no gate"]);
    drop(vm);
    let none = machine_without_network().start().unwrap();
    scene.protect(&none, &["--gate", &gate]).wait().one_line(&["the VM has 0 networks, and 1 gates are given"]);
    scene.protect(&none, &["--gate", "/nowhere"]).wait().one_line(&["no gate", "limosa protect gate"]);
    scene.protect(&none, &["--every", "event"]).wait().misused(&["--every event needs --gate"]);
}

/// Loads the newest checkpoint in another QEMU.
pub(crate) fn survivor(scene: &Scene) -> Vm {
    let vm = scene.machine.start_incoming().unwrap();
    vm.load_file(&scene.checkpoint(), 0).unwrap();
    vm.wait_run_state("running", SOON).unwrap();
    vm
}

/// An ARP request for the guest, which its kernel answers.
fn arp_request() -> Vec<u8> {
    let header = [0, 1, 8, 0, 6, 4, 0, 1];
    [&[0xff; 6][..], &WORLD_MAC, &[8, 6], &header, &WORLD_MAC, &WORLD, &[0; 6], &GUEST, &[0; 18]].concat()
}

fn is_arp_answer(frame: &[u8]) -> bool {
    frame.get(12..22) == Some(&[8, 6, 0, 1, 8, 0, 6, 4, 0, 2])
}

#[test]
fn nothing_is_seen_outside_that_the_survivor_does_not_know_whenever_the_vm_is_killed() {
    needs_newest_qemu!();
    let (scene, outside) = scene();
    let gate = scene.gate(&["--json"]);
    let mut vm = counting(&scene);
    outside.wait_counts(3);
    let rounds = [("20ms", 3), ("50ms", 131), ("event", 57), ("event", 210), ("100ms", 88)];
    for (every, moment) in rounds {
        let keeper = protect(&scene, &vm, &["--every", every]);
        outside.wait_counts(5);
        thread::sleep(Duration::from_millis(moment));
        kill9(vm.pid()).unwrap();
        let ended = keeper.wait();
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
        assert!(ended.stderr.contains("QEMU has ended"), "{}", ended.stderr);
        vm = survivor(&scene);
        // What was held of the last checkpoint has left before the survivor's first frame.
        outside.wait_counts(3);
        outside.assert_whole();
        scene.forget();
    }
    // Once more, by limosa's own failover.
    let keeper = protect(&scene, &vm, &["--every", "event"]);
    outside.wait_counts(5);
    kill9(vm.pid()).unwrap();
    keeper.wait();
    let failover = scene.failover(&["--fenced"]);
    outside.wait_counts(3);
    outside.assert_whole();
    failover.limosa.signal(Signal::TERM);
    failover.limosa.wait();
    gate.signal(Signal::TERM);
    let report = gate.wait().json();
    assert_eq!(report["series"].as_u64(), Some(6), "{report}");
    assert_eq!(report["sent"]["undelivered"], 0, "{report}");
}

#[test]
fn output_waits_for_its_checkpoint_and_input_does_not() {
    needs_newest_qemu!();
    let (scene, outside) = scene();
    let gate = scene.gate(&[]);
    let vm = counting(&scene);
    let keeper = protect(&scene, &vm, &["--every", "600ms"]);
    // An answer leaves with the next checkpoint; an epoch later its wait has begun right behind one.
    let mut longest = Duration::ZERO;
    for _ in 0..6 {
        let asked = Instant::now();
        outside.send(&arp_request());
        let answered = wait_for("the guest's answer", || outside.first_since(asked, is_arp_answer));
        longest = longest.max(answered - asked);
    }
    assert!(longest > Duration::from_millis(300), "{longest:?}");
    outside.wait_counts(5);
    keeper.signal(Signal::INT);
    let report = keeper.wait().json();
    let output = &report["output"];
    assert!(output["released_frames"].as_u64() > Some(10), "{report}");
    assert!(output["hold"]["max_ms"].as_f64() > Some(300.0), "{report}");
    assert_eq!(output["overflow_frames"], 0, "{report}");
    // The VM has its network without protection.
    outside.wait_counts(5);
    gate.signal(Signal::INT);
    gate.wait().success();
}

#[test]
fn with_every_event_a_checkpoint_is_made_when_something_wants_to_leave() {
    needs_newest_qemu!();
    let (scene, outside) = scene();
    let _gate = scene.gate(&[]);
    let vm = counting(&scene);
    vm.shell("killall syslogd").unwrap();
    let keeper = protect(&scene, &vm, &["--every", "event:10s"]);
    let before = scene.newest().unwrap();
    for _ in 0..10 {
        let asked = Instant::now();
        outside.send(&arp_request());
        let answered = wait_for("the guest's answer", || outside.first_since(asked, is_arp_answer));
        assert!(answered - asked < Duration::from_secs(5), "a checkpoint was not made for it");
        thread::sleep(Duration::from_millis(100));
    }
    assert!(scene.newest().unwrap() >= before + 10);
    keeper.signal(Signal::INT);
    let report = keeper.wait().json();
    assert!(report["output"]["released_frames"].as_u64() >= Some(10), "{report}");
}

#[test]
fn a_killed_keeper_gives_the_network_back_and_the_next_one_holds_it_again() {
    needs_newest_qemu!();
    let (scene, outside) = scene();
    let gate = scene.gate(&["--grace", "200ms"]);
    let vm = counting(&scene);
    let keeper = protect(&scene, &vm, &["--every", "100ms"]);
    let dog = watchdog(&keeper).unwrap();
    keeper.signal(Signal::KILL);
    keeper.wait();
    wait_gone(dog);
    wait_for("the end of the grace", || gate.stderr().contains("output leaves at once").then_some(()));
    outside.wait_counts(10);
    scene.forget();
    let keeper = protect(&scene, &vm, &["--every", "50ms"]);
    outside.wait_counts(5);
    keeper.signal(Signal::INT);
    let report = keeper.wait().json();
    assert!(report["output"]["released_frames"].as_u64() >= Some(5), "{report}");
}

#[test]
fn a_gate_that_ends_ends_the_protection_and_leaves_the_vm_running() {
    needs_newest_qemu!();
    let (scene, outside) = scene();
    let gate = scene.gate(&[]);
    let vm = counting(&scene);
    let keeper = protect(&scene, &vm, &["--every", "100ms"]);
    gate.signal(Signal::KILL);
    gate.wait();
    let ended = keeper.wait();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("the gate at"), "{}", ended.stderr);
    assert_eq!(vm.run_state().unwrap(), "running");
    // QEMU connects to the next gate by itself.
    let _gate = scene.gate(&[]);
    outside.wait_counts(5);
}

#[test]
fn nothing_is_seen_outside_that_a_keeper_on_another_host_does_not_know() {
    needs_newest_qemu!();
    let (scene, outside) = scene();
    let _gate = scene.gate(&[]);
    let (_keeper, at) = scene.keep("tcp:127.0.0.1:0", &[]);
    let gate = scene.path("gate").display().to_string();
    let mut vm = counting(&scene);
    outside.wait_counts(3);
    for (every, moment) in [("20ms", 3), ("event", 57), ("50ms", 131), ("event", 210)] {
        let protect = scene.protect_to(&vm, &at, &["--gate", &gate, "--every", every]);
        scene.wait_checkpoint(3, &protect);
        outside.wait_counts(5);
        thread::sleep(Duration::from_millis(moment));
        kill9(vm.pid()).unwrap();
        let ended = protect.wait();
        assert!(ended.stderr.contains("QEMU has ended"), "{}", ended.stderr);
        vm = survivor(&scene);
        outside.wait_counts(3);
        outside.assert_whole();
        scene.forget();
    }
    // What was held when the VM's whole host failed is lost, and still nothing comes twice.
    let protect = scene.protect_to(&vm, &at, &["--gate", &gate, "--every", "event"]);
    scene.wait_checkpoint(3, &protect);
    outside.wait_counts(5);
    kill_host(&vm, &protect);
    let _survivor = survivor(&scene);
    outside.wait_counts(5);
    let counts = outside.counts();
    assert!(counts.is_sorted_by(|one, next| one < next), "{counts:?}");
}

#[test]
fn nothing_is_seen_outside_that_a_standby_does_not_know() {
    needs_newest_qemu!();
    for moment in [5, 70] {
        let (scene, outside) = scene();
        let _gate = scene.gate(&[]);
        let gate = scene.path("gate").display().to_string();
        let vm = counting(&scene);
        let options = ["--standby", "--when-lost", "200ms", "--fenced"];
        let (keeper, at) = scene.keep_for_failover("tcp:127.0.0.1:0", &options);
        let protect = scene.protect_to(&vm, &at, &["--gate", &gate, "--every", "event"]);
        scene.wait_checkpoint(3, &protect);
        outside.wait_counts(10);
        thread::sleep(Duration::from_millis(moment));
        kill9(vm.pid()).unwrap();
        wait_for("the failover", || keeper.stderr().contains("the VM continues here").then_some(()));
        outside.wait_counts(10);
        // The survivor's first frames may be dropped with what the protection held, and none comes twice.
        let counts = outside.counts();
        assert!(counts.is_sorted_by(|one, next| one < next), "{counts:?}");
        keeper.signal(Signal::TERM);
        keeper.wait();
    }
}
