//! A primary that hangs, and continues after the failover: it reaches neither its network nor its disk, without a fence
//! of the user's.

use std::thread;
use std::time::Duration;

use limosa_testkit::{DiskFormat, Program, Vm, wait_gone};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::disks::{Bed, Transport};
use crate::gate::{count, counting, networked, scene as network_scene};
use crate::needs_newest_qemu;
use crate::outside::Outside;
use crate::overlays::{sectors_written, start_writer, wait_writes};
use crate::scene::{Failover, text, wait_said};
use crate::stage::{limosa, wait_for};

/// How long a primary that has continued may try to do harm.
const HARM: Duration = Duration::from_secs(3);

fn send(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), signal).unwrap();
}

/// Expects the numbers that have been seen outside to be those of one VM: none twice, and none out of order.
#[track_caller]
fn assert_of_one(outside: &Outside) {
    let counts = outside.counts();
    assert!(counts.is_sorted_by(|one, next| one < next), "{counts:?}");
}

/// The turns of the writer of a VM that continues.
fn turns(limosa: &Program) -> usize {
    let said = limosa.stdout();
    assert!(!said.contains("torn"), "the disk is not what the memory knows: {said}");
    said.matches("disk ").count()
}

#[track_caller]
fn wait_turns(failover: &Failover<'_>, more: usize) {
    let before = turns(&failover.limosa);
    wait_for("writes of the survivor", || {
        let (running, count) = (failover.limosa.is_running(), turns(&failover.limosa));
        assert!(running || count >= before + more, "limosa ended: {}", failover.limosa.stderr());
        (count >= before + more).then_some(())
    });
}

/// Has a VM that hung in the middle of its checkpoint run, against its limosa too.
fn run_again(vm: &Vm) {
    wait_for("the VM that hung to run", || {
        if vm.run_state().unwrap() == "running" {
            return Some(());
        }
        let _ = vm.execute("x-colo-lost-heartbeat", json!({}));
        let _ = vm.cont();
        None
    });
}

/// Protects a VM with a network and a disk, stops it with or without its limosa, fails over, and lets it continue.
fn hang(bed: &Bed, limosa_hangs: bool) {
    let outside = Outside::listen(&bed.path("world.net"));
    let gate = bed.scene.gate(&[]);
    let server = bed.serve(&[]);
    let vm = start_writer(&bed.scene.machine);
    count(&vm);
    let (gate_socket, control) = (bed.path("gate").display().to_string(), bed.control());
    let fences = ["--gate", &gate_socket, "--disk-server", &control];
    let keeper = bed.scene.protect(&vm, &[&fences[..], &["--every", "50ms"]].concat());
    bed.scene.wait_checkpoint(5, &keeper);
    outside.wait_counts(5);
    wait_writes(vm.serial(), 5);
    if limosa_hangs {
        keeper.signal(Signal::STOP);
    }
    send(vm.pid(), Signal::STOP);
    if !limosa_hangs {
        // It waits for QEMU.
        keeper.signal(Signal::KILL);
    }
    let failover = bed.scene.failover(&[&fences[..], &["-v"]].concat());
    outside.wait_counts(5);
    wait_turns(&failover, 5);
    let said = failover.limosa.stderr();
    assert!(said.contains(&format!("the gate at {gate_socket} (process {} is refused)", vm.pid())), "{said}");
    assert!(said.contains("the server of the disk"), "{said}");
    assert_of_one(&outside);
    send(vm.pid(), Signal::CONT);
    run_again(&vm);
    thread::sleep(HARM);
    assert_of_one(&outside);
    outside.wait_counts(3);
    wait_turns(&failover, 5);
    let last = failover.limosa.stdout().lines().rev().find_map(|line| line.trim().strip_prefix("disk ")?.parse().ok());
    failover.end();
    // The VM that hung has waited for its turn at the gate.
    let refused = format!("process {} is refused: its VM was failed over", vm.pid());
    wait_for("the gate to refuse the VM that continues", || gate.stderr().contains(&refused).then_some(()));
    assert_of_one(&outside);
    server.signal(Signal::TERM);
    server.wait().success();
    // What was kept of it, and all that the survivor has written, in a row.
    let found = sectors_written(&bed.path("disk"), bed.format());
    let last: u64 = last.unwrap();
    assert!((last..=last + 2).contains(&found), "{found} writes, and {last} were announced");
    drop((vm, keeper));
}

#[test]
fn a_disk_server_that_was_started_since_a_failover_refuses_nobody_and_says_so() {
    needs_newest_qemu!();
    let bed = Bed::over(Transport::Nbd, DiskFormat::Qcow2, networked);
    let _outside = Outside::listen(&bed.path("world.net"));
    let _gate = bed.scene.gate(&[]);
    let server = bed.serve(&[]);
    let vm = start_writer(&bed.scene.machine);
    let (gate_socket, control) = (bed.path("gate").display().to_string(), bed.control());
    let fences = ["--gate", &gate_socket, "--disk-server", &control];
    let keeper = bed.scene.protect(&vm, &[&fences[..], &["--every", "50ms"]].concat());
    bed.scene.wait_checkpoint(5, &keeper);
    send(vm.pid(), Signal::STOP);
    keeper.signal(Signal::KILL);
    keeper.wait();
    let (kept, line) = (bed.scene.kept(), bed.scene.survivor_line());
    let failover = |more: &str| {
        let words = ["protect", "failover"].into_iter().chain(fences).chain([text(&kept), "--"]);
        limosa(words.chain(line.iter().map(String::as_str)).chain([more]))
    };
    assert_ne!(failover("-no-such-option").status.code(), Some(0));
    // The server knows whom it refuses, so the failover may be repeated.
    let failed = failover("-no-such-option");
    assert!(!failed.stderr.contains("may still run"), "{}", failed.stderr);
    server.signal(Signal::TERM);
    server.wait().success();
    let _server = bed.serve(&[]);
    failover("-S").one_line(&["the protected VM may still run", "could not tell it from its survivor", "--fenced"]);
    drop(vm);
    let failover = bed.scene.failover(&[&fences[..], &["--fenced"]].concat());
    wait_turns(&failover, 5);
    failover.end();
}

#[test]
fn a_hung_primary_that_continues_after_the_failover_reaches_neither_network_nor_disk() {
    needs_newest_qemu!();
    hang(&Bed::over(Transport::Nbd, DiskFormat::Qcow2, networked), true);
}

#[test]
fn a_hung_primary_whose_limosa_was_killed_reaches_neither_network_nor_disk() {
    needs_newest_qemu!();
    hang(&Bed::over(Transport::Nbd, DiskFormat::Raw, networked), false);
}

#[test]
fn a_hung_primary_reaches_no_vhost_user_disk_when_it_continues_after_the_failover() {
    needs_newest_qemu!();
    hang(&Bed::over(Transport::VhostUser, DiskFormat::Qcow2, networked), true);
}

#[test]
fn a_hung_primary_is_refused_by_its_gate_when_a_standby_continues_its_vm() {
    needs_newest_qemu!();
    let (scene, outside) = network_scene();
    let gate = scene.gate(&[]);
    let gate_socket = scene.path("gate").display().to_string();
    let vm = counting(&scene);
    let options = ["--standby", "--when-lost", "200ms", "--lost-after", "1s", "--gate", &gate_socket];
    let (keeper, at) = scene.keep_for_failover("tcp:127.0.0.1:0", &options);
    let protect = scene.protect_to(&vm, &at, &["--gate", &gate_socket, "--every", "event", "--lost-after", "1s"]);
    scene.wait_checkpoint(3, &protect);
    outside.wait_counts(10);
    for pid in [protect.pid(), vm.pid()] {
        send(pid, Signal::STOP);
    }
    wait_said(&keeper, "the VM continues here");
    wait_said(&keeper, &format!("(process {} is refused)", vm.pid()));
    // The survivor has the network at once, although the limosa of the old one is still there.
    outside.wait_counts(10);
    assert_of_one(&outside);
    let seen = outside.counts().len();
    send(vm.pid(), Signal::CONT);
    send(protect.pid(), Signal::CONT);
    wait_gone(protect.pid());
    thread::sleep(HARM);
    assert_of_one(&outside);
    assert!(outside.counts().len() > seen, "the survivor stands still");
    assert!(gate.is_running());
    keeper.signal(Signal::TERM);
    keeper.wait();
}
