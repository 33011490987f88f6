//! A VM that was failed over is refused, and its survivor is not. The survivor is another process: this program again.

use std::env;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use limosa_migrate::output::OutputGate as _;
use limosa_protect::gate::{GateClient, GateError, GateFence, GateKeeper, fence_gate, query_gate};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use uuid::Uuid;

use crate::options;
use crate::scene::{Peer, SOON, Scene, framed};

const SOCKET: &str = "LIMOSA_TEST_GATE";

/// The VM of another process: sends a frame, and another one for each that it gets, until it is killed.
#[test]
#[ignore = "started by another test"]
fn a_vm_of_another_process() {
    let Some(socket) = env::var_os(SOCKET) else { return };
    let mut stream = UnixStream::connect(socket).unwrap();
    let mut number = 0_u32;
    loop {
        stream.write_all(&framed(format!("survivor {number}").as_bytes())).unwrap();
        number += 1;
        let mut length = [0; 4];
        if stream.read_exact(&mut length).is_err() {
            return;
        }
        let mut frame = vec![0; usize::try_from(u32::from_be_bytes(length)).unwrap()];
        stream.read_exact(&mut frame).unwrap();
    }
}

struct Other(Child);

impl Other {
    fn start(socket: &Path) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "fences::a_vm_of_another_process"]).env(SOCKET, socket);
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Expects the gate to close a connection.
#[track_caller]
fn expect_end(vm: &mut Peer) {
    match vm.stream.read(&mut [0; 10]) {
        Ok(count) => assert_eq!(count, 0),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

fn fence(scene: &Scene, protection: Uuid, epoch: u64) -> GateFence {
    fence_gate(&scene.keeper_socket(), SOON, protection, epoch).unwrap()
}

fn query(scene: &Scene, protection: Uuid) -> GateFence {
    query_gate(&scene.keeper_socket(), SOON, protection).unwrap()
}

fn own() -> GateFence {
    GateFence::Refused(Some(std::process::id()))
}

#[test]
fn the_frames_of_the_checkpoint_leave_and_its_vm_is_cut_off_and_never_taken_again() {
    let scene = Scene::new();
    let (mut vm, mut network) = scene.connected();
    let id = Uuid::new_v4();
    let keeper = scene.keeper_of(id);
    keeper.seal(0).unwrap();
    vm.send(b"known");
    keeper.seal(1).unwrap();
    vm.send(b"unknown");
    keeper.seal(2).unwrap();
    vm.send(b"unsealed");
    // The keeper hangs: it is still connected, and its checkpoint 1 counts.
    assert_eq!(fence(&scene, id, 1), own());
    assert_eq!(network.frame(), b"known");
    expect_end(&mut vm);
    scene.wait_notice(&format!("process {} is refused", std::process::id()));
    for _ in 0..3 {
        let mut again = scene.vm();
        let _ = again.stream.write_all(&framed(b"it is back"));
        expect_end(&mut again);
    }
    network.expect_silence();
    // The keeper that continues learns it, and neither it nor another one of that VM gets the gate.
    let error = keeper.seal(3).unwrap_err().to_string();
    assert!(error.contains("was failed over"), "{error}");
    for again in [
        GateKeeper { protection: id, vm: None },
        GateKeeper { protection: Uuid::new_v4(), vm: Some(std::process::id()) },
    ] {
        let refused = GateClient::connect(&scene.keeper_socket(), SOON, again).unwrap_err();
        assert!(matches!(refused, GateError::FailedOver { .. }), "{refused:?}");
    }
    // Another process has the network at once, and can be protected.
    let _survivor = Other::start(&scene.vm_socket());
    assert_eq!(network.frame(), b"survivor 0");
    let next = scene.keeper();
    next.seal(0).unwrap();
    network.send(b"more");
    network.expect_silence();
    next.seal(1).unwrap();
    next.commit(1).unwrap();
    assert_eq!(network.frame(), b"survivor 1");
    assert_eq!(fence(&scene, id, 1), own(), "it can be repeated, and touches nobody else");
    next.seal(2).unwrap();
}

#[test]
fn a_survivor_that_has_the_dead_vms_place_already_is_not_taken_for_it() {
    let scene = Scene::new();
    let (vm, mut network) = scene.connected();
    let id = Uuid::new_v4();
    let keeper = scene.keeper_of(id);
    keeper.seal(0).unwrap();
    // A standby waits behind the VM, which is killed.
    let _standby = Other::start(&scene.vm_socket());
    drop(vm);
    scene.wait_notice("the VM is connected");
    keeper.seal(1).unwrap();
    assert_eq!(fence(&scene, id, 0), own());
    network.send(b"more");
    // What it sent before the fence was held with the old protection, and dropped with it.
    let first = network.frame();
    let next = if first == b"survivor 0" { network.frame() } else { first };
    assert_eq!(next, b"survivor 1");
}

#[test]
fn a_gate_that_does_not_know_the_protection_changes_nothing() {
    let scene = Scene::new();
    let (mut vm, mut network) = scene.connected();
    assert_eq!(fence(&scene, Uuid::new_v4(), 0), GateFence::Unknown);
    let id = Uuid::new_v4();
    let keeper = scene.keeper_of(id);
    keeper.seal(0).unwrap();
    assert_eq!(fence(&scene, Uuid::new_v4(), 0), GateFence::Unknown);
    assert_eq!((query(&scene, Uuid::new_v4()), query(&scene, id)), (GateFence::Unknown, own()));
    vm.send(b"held");
    network.expect_silence();
    keeper.seal(1).unwrap();
    keeper.commit(1).unwrap();
    assert_eq!(network.frame(), b"held");
    drop(keeper);
    // Another one has the gate since.
    let other = scene.keeper();
    other.seal(0).unwrap();
    assert_eq!(fence(&scene, id, 1), GateFence::Unknown);
    other.seal(1).unwrap();
}

#[test]
fn a_protection_whose_vm_was_not_connected_for_its_base_cannot_be_fenced_for_certain() {
    let scene = Scene::new();
    let mut network = scene.network();
    let id = Uuid::new_v4();
    let keeper = scene.keeper_of(id);
    keeper.seal(0).unwrap();
    let mut vm = scene.vm();
    vm.send(b"held");
    network.expect_silence();
    assert_eq!(fence(&scene, id, 0), GateFence::Unidentified);
    assert!(keeper.seal(1).is_err());
    vm.send(b"free");
    assert_eq!(network.frame(), b"free");
}

#[test]
fn those_who_say_nothing_keep_no_failover_away() {
    let scene = Scene::new();
    let (mut vm, mut network) = scene.connected();
    let id = Uuid::new_v4();
    let keeper = scene.keeper_of(id);
    keeper.seal(0).unwrap();
    let silent: Vec<_> = (0..20).map(|_| UnixStream::connect(scene.keeper_socket()).unwrap()).collect();
    thread::sleep(Duration::from_millis(50));
    keeper.seal(1).unwrap();
    assert_eq!(fence(&scene, id, 0), own());
    expect_end(&mut vm);
    network.expect_silence();
    drop(silent);
}

#[test]
fn keepers_that_come_and_leave_change_nothing_of_a_grace_and_a_failover_finds_its_protection() {
    let scene = Scene::with(options(1 << 20, SOON));
    let (mut vm, mut network) = scene.connected();
    let id = Uuid::new_v4();
    let keeper = scene.keeper_of(id);
    keeper.seal(0).unwrap();
    vm.send(b"known");
    keeper.seal(1).unwrap();
    drop(keeper);
    scene.wait_notice("the keeper is gone");
    vm.send(b"unknown");
    // Their protections are refused elsewhere, before they have begun.
    for _ in 0..3 {
        scene.keeper().abort(0).unwrap();
    }
    let hasty = scene.keeper();
    hasty.commit(1).unwrap();
    assert!(hasty.seal(2).is_err());
    let next = scene.keeper();
    network.expect_silence();
    assert_eq!(fence(&scene, id, 1), own());
    assert_eq!(network.frame(), b"known");
    expect_end(&mut vm);
    // It may be of the VM that was fenced.
    let error = next.seal(0).unwrap_err().to_string();
    assert!(error.contains("was failed over"), "{error}");
    network.expect_silence();
}

#[test]
fn a_protection_that_begins_in_the_grace_of_another_one_takes_its_place() {
    let scene = Scene::with(options(1 << 20, SOON));
    let (mut vm, mut network) = scene.connected();
    let (first, second) = (Uuid::new_v4(), Uuid::new_v4());
    let keeper = scene.keeper_of(first);
    keeper.seal(0).unwrap();
    drop(keeper);
    scene.wait_notice("the keeper is gone");
    vm.send(b"held");
    let keeper = scene.keeper_of(second);
    keeper.seal(0).unwrap();
    vm.send(b"known");
    keeper.seal(1).unwrap();
    keeper.commit(1).unwrap();
    assert_eq!(network.frame(), b"known");
    assert_eq!((query(&scene, first), query(&scene, second)), (GateFence::Unknown, own()));
}

#[test]
fn sealed_frames_of_a_vm_that_died_with_its_keeper_leave_when_a_failover_has_their_checkpoint() {
    let scene = Scene::with(options(1 << 20, SOON));
    let (mut vm, mut network) = scene.connected();
    let id = Uuid::new_v4();
    let keeper = scene.keeper_of(id);
    keeper.seal(0).unwrap();
    vm.send(b"known");
    keeper.seal(1).unwrap();
    vm.send(b"of the next checkpoint");
    keeper.seal(2).unwrap();
    drop(keeper);
    scene.wait_notice("the keeper is gone");
    vm.send(b"unsealed");
    drop(vm);
    scene.wait_notice("output leaves at once");
    network.expect_silence();
    assert_eq!(fence(&scene, id, 1), own());
    assert_eq!(network.frame(), b"known");
    network.expect_silence();
}

#[test]
fn a_vm_that_cannot_be_identified_is_refused_when_one_was_failed_over() {
    let scene = Scene::new();
    let (mut vm, mut network) = scene.connected();
    let id = Uuid::new_v4();
    let keeper = scene.keeper_of(id);
    keeper.seal(0).unwrap();
    assert_eq!(fence(&scene, id, 0), own());
    expect_end(&mut vm);
    // The next descriptor is the VM's, and the one after it the gate's: none is left for its process.
    let open = || File::open("/dev/null").unwrap();
    let last = [open(), open()].map(|file| file.as_raw_fd())[1];
    let limits = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: u64::try_from(last + 1).ok(), ..limits }).unwrap();
    let mut again = scene.vm();
    let _ = again.stream.write_all(&framed(b"it is back"));
    expect_end(&mut again);
    setrlimit(Resource::Nofile, limits).unwrap();
    scene.wait_notice("a process that cannot be identified is refused");
    network.expect_silence();
}

#[test]
fn a_keeper_of_another_vm_than_the_one_that_is_connected_is_refused() {
    let scene = Scene::new();
    let pid = std::process::id();
    let of = |vm| GateKeeper { protection: Uuid::new_v4(), vm: Some(vm) };
    let connect = |keeper| GateClient::connect(&scene.keeper_socket(), SOON, keeper);
    // No VM is connected when it comes.
    let early = connect(of(pid + 1)).unwrap();
    assert!(!early.has_vm());
    let (mut vm, mut network) = scene.connected();
    let error = early.seal(0).unwrap_err().to_string();
    assert!(error.contains(&format!("of another VM: process {pid}")), "{error}");
    let refused = connect(of(pid + 1)).unwrap_err();
    assert!(matches!(refused, GateError::OtherVm { process, .. } if process == pid), "{refused:?}");
    vm.send(b"free");
    assert_eq!(network.frame(), b"free");
    let keeper = connect(of(pid)).unwrap();
    assert!(keeper.has_vm());
    keeper.seal(0).unwrap();
}
