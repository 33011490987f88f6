//! A gate between a VM that is a socket, a network that is one, and the keeper's end.

mod fences;
mod scene;

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use limosa_migrate::output::{CheckpointCause, OutputGate, OutputSignal};
use limosa_protect::gate::{FRAME_MAX, GateClient, GateError, GateKeeper, GateOptions};
use uuid::Uuid;

use scene::{SOON, Scene, framed};

fn options(limit: u64, grace: Duration) -> GateOptions {
    let mut options = GateOptions::default();
    (options.limit, options.grace) = (limit, grace);
    options
}

#[test]
fn frames_pass_both_ways_without_a_keeper() {
    let scene = Scene::new();
    let (mut vm, mut network) = scene.connected();
    for length in [1, 60, 1514, FRAME_MAX] {
        vm.send(&vec![1; length]);
        assert_eq!(network.frame(), vec![1; length]);
        network.send(&vec![2; length]);
        assert_eq!(vm.frame(), vec![2; length]);
    }
    let report = scene.stop();
    assert_eq!((report.sent_frames, report.received_frames, report.series), (4, 4, 0));
    assert_eq!(report.sent_bytes, report.received_bytes);
    assert_eq!((report.undelivered_frames, report.unreceived_frames), (0, 0));
}

#[test]
fn frames_leave_with_their_checkpoint_in_order_and_those_for_the_vm_at_once() {
    let scene = Scene::new();
    let (mut vm, mut network) = scene.connected();
    let keeper = scene.keeper();
    let signal = OutputSignal::new();
    keeper.watch(&signal).unwrap();
    vm.send(b"before");
    assert_eq!(network.frame(), b"before");
    keeper.seal(0).unwrap();
    keeper.commit(0).unwrap();
    for epoch in 1..20_u64 {
        for number in 0..7 {
            vm.send(format!("{epoch}.{number}").as_bytes());
        }
        assert_eq!(signal.wait(Some(Instant::now() + SOON), true), CheckpointCause::Output);
        network.send(b"inbound");
        assert_eq!(vm.frame(), b"inbound");
        // All that was written is in the socket, and a seal takes all of it.
        keeper.seal(epoch).unwrap();
        signal.sealed();
        vm.send(format!("{epoch} is over").as_bytes());
        network.expect_silence();
        keeper.commit(epoch).unwrap();
        if epoch > 1 {
            assert_eq!(network.frame(), format!("{} is over", epoch - 1).as_bytes());
        }
        for number in 0..7 {
            assert_eq!(network.frame(), format!("{epoch}.{number}").as_bytes());
        }
        network.expect_silence();
    }
    keeper.abort(20).unwrap();
    vm.send(b"after");
    assert_eq!(network.frame(), b"after", "the frame of the open epoch was dropped, and later ones pass");
    let counters = keeper.counters();
    assert_eq!((counters.held_packets, counters.released_packets), (19 * 8, 19 * 8 - 1));
    assert_eq!((counters.aborted_packets, counters.overflow_packets), (1, 0));
    assert!(counters.longest_hold >= counters.median_hold && counters.median_hold > Duration::ZERO, "{counters:?}");
}

#[test]
fn a_seal_takes_a_burst_that_the_gate_has_not_read_and_leaves_a_half_frame_to_the_next_epoch() {
    let scene = Scene::new();
    let (mut vm, mut network) = scene.connected();
    let keeper = scene.keeper();
    keeper.seal(0).unwrap();
    let burst: Vec<u8> = (0..500_u16).flat_map(|number| framed(&number.to_be_bytes().repeat(100))).collect();
    let whole = framed(b"half of it comes later");
    vm.raw(&[&burst[..], &whole[..9]].concat());
    keeper.seal(1).unwrap();
    vm.raw(&whole[9..]);
    keeper.commit(1).unwrap();
    for number in 0..500_u16 {
        assert_eq!(network.frame(), number.to_be_bytes().repeat(100));
    }
    network.expect_silence();
    keeper.seal(2).unwrap();
    keeper.commit(2).unwrap();
    assert_eq!(network.frame(), b"half of it comes later");
}

#[test]
fn a_vm_that_dies_leaves_what_its_last_checkpoint_knows_and_nothing_else() {
    let scene = Scene::new();
    let (mut vm, mut network) = scene.connected();
    let keeper = scene.keeper();
    keeper.seal(0).unwrap();
    vm.send(b"known");
    keeper.seal(1).unwrap();
    vm.send(b"unknown");
    drop(vm);
    scene.wait_notice("the VM is not connected any more");
    keeper.commit(1).unwrap();
    assert_eq!(network.frame(), b"known");
    keeper.abort(2).unwrap();
    assert_eq!(keeper.counters().aborted_packets, 1);
    drop(keeper);
    // The survivor connects to the same gate.
    let mut survivor = scene.vm();
    survivor.send(b"the survivor");
    assert_eq!(network.frame(), b"the survivor");
    network.send(b"welcome");
    assert_eq!(survivor.frame(), b"welcome");
}

#[test]
fn frames_that_a_dead_vm_has_left_in_its_socket_are_dropped_with_its_last_epoch() {
    let scene = Scene::new();
    let mut network = scene.network();
    let burst: Vec<u8> = (0..100_u8).flat_map(|number| framed(&[number; 1000])).collect();
    for _ in 0..20 {
        let mut vm = scene.vm();
        scene.wait_notice("the VM is connected");
        let keeper = scene.keeper();
        keeper.seal(0).unwrap();
        vm.raw(&burst);
        drop(vm);
        keeper.abort(1).unwrap();
        drop(keeper);
        network.expect_silence();
    }
}

#[test]
fn a_vm_that_dies_with_its_keeper_leaves_nothing_more() {
    let scene = Scene::with(options(1 << 20, SOON));
    let (mut vm, mut network) = scene.connected();
    let keeper = scene.keeper();
    keeper.seal(0).unwrap();
    vm.send(b"sealed");
    keeper.seal(1).unwrap();
    drop(keeper);
    scene.wait_notice("the keeper is gone");
    vm.send(b"sent without a keeper");
    drop(vm);
    scene.wait_notice("output leaves at once");
    scene.vm().send(b"the survivor");
    assert_eq!(network.frame(), b"the survivor");
}

#[test]
fn a_vm_whose_keeper_dies_has_its_network_again_after_the_grace() {
    let scene = Scene::with(options(1 << 20, Duration::from_millis(300)));
    let (mut vm, mut network) = scene.connected();
    let keeper = scene.keeper();
    keeper.seal(0).unwrap();
    vm.send(b"held");
    let begun = Instant::now();
    drop(keeper);
    scene.wait_notice("output leaves at once");
    assert!(begun.elapsed() >= Duration::from_millis(300));
    vm.send(b"free");
    assert_eq!(network.frame(), b"free");
    // The next keeper can begin at once.
    let next = scene.keeper();
    next.seal(0).unwrap();
    vm.send(b"held again");
    network.expect_silence();
    assert_eq!(scene.stop().series, 2);
}

#[test]
fn a_keeper_has_output_held_longer_when_the_vm_may_continue_elsewhere() {
    let scene = Scene::with(options(1 << 20, Duration::from_millis(50)));
    let (mut vm, mut network) = scene.connected();
    let keeper = scene.keeper();
    keeper.seal(0).unwrap();
    keeper.hold_when_lost(Duration::from_millis(700)).unwrap();
    keeper.hold_when_lost(Duration::from_millis(20)).unwrap();
    keeper.commit(0).unwrap();
    vm.send(b"held");
    let begun = Instant::now();
    drop(keeper);
    scene.wait_notice("output leaves at once");
    assert!(begun.elapsed() >= Duration::from_millis(700));
    // The next keeper has not asked for it.
    let next = scene.keeper();
    next.seal(0).unwrap();
    drop(next);
    // One that is held is dropped when its time is over.
    thread::sleep(Duration::from_millis(300));
    vm.send(b"free");
    assert_eq!(network.frame(), b"free");
}

#[test]
fn memory_is_bounded_and_a_checkpoint_is_asked_for_before_frames_are_dropped() {
    let scene = Scene::with(options(100_000, SOON));
    let (mut vm, mut network) = scene.connected();
    let keeper = scene.keeper();
    let signal = OutputSignal::new();
    keeper.watch(&signal).unwrap();
    keeper.seal(0).unwrap();
    for number in 0..40_u8 {
        vm.send(&[number; 936]);
    }
    keeper.seal(1).unwrap();
    assert_eq!(signal.wait(Some(Instant::now()), false), CheckpointCause::Time, "there is room");
    signal.sealed();
    for number in 40..200 {
        vm.send(&[number; 936]);
    }
    assert_eq!(signal.wait(Some(Instant::now() + SOON), false), CheckpointCause::Full);
    keeper.seal(2).unwrap();
    keeper.commit(2).unwrap();
    // 1004 bytes each: the first 99 fit.
    for number in 0..99 {
        assert_eq!(network.frame(), [number; 936]);
    }
    network.expect_silence();
    keeper.abort(3).unwrap();
    assert_eq!(keeper.counters().overflow_packets, 101);
}

#[test]
fn a_vm_that_loses_its_place_is_cut_off_and_can_connect_again() {
    let scene = Scene::new();
    let (mut vm, mut network) = scene.connected();
    vm.raw(&[framed(b"good"), vec![0xff; 100]].concat());
    assert_eq!(network.frame(), b"good");
    assert_eq!(vm.stream.read(&mut [0; 10]).unwrap(), 0);
    let mut again = scene.vm();
    again.send(b"again");
    assert_eq!(network.frame(), b"again");
}

#[test]
fn a_second_vm_waits_until_the_first_is_gone() {
    let scene = Scene::new();
    let (mut first, mut network) = scene.connected();
    let mut second = scene.vm();
    second.send(b"second");
    network.expect_silence();
    first.send(b"first");
    assert_eq!(network.frame(), b"first");
    drop(first);
    assert_eq!(network.frame(), b"second");
}

#[test]
fn a_network_that_ends_and_comes_back_gets_later_frames_whole() {
    let scene = Scene::new();
    let (mut vm, network) = scene.connected();
    vm.send(b"one");
    drop(network);
    scene.wait_notice("lost");
    vm.send(b"nobody gets it");
    let mut network = scene.network();
    vm.send(b"two");
    assert_eq!(network.frame(), b"two");
    network.send(b"three");
    assert_eq!(vm.frame(), b"three");
    let report = scene.stop();
    assert!((1..=2).contains(&report.undelivered_frames), "{report:?}");
}

#[test]
fn a_network_that_is_not_there_yet_is_waited_for() {
    let scene = Scene::new();
    let mut vm = scene.vm();
    vm.send(b"nobody gets it");
    scene.wait_notice("trying again");
    let mut network = scene.network();
    vm.send(b"now");
    assert_eq!(network.frame(), b"now");
}

#[test]
fn a_network_that_sends_nonsense_is_connected_to_again() {
    let scene = Scene::new();
    let (mut vm, mut network) = scene.connected();
    network.raw(&[framed(b"good"), vec![0; 100]].concat());
    assert_eq!(vm.frame(), b"good");
    scene.wait_notice("lost");
    let mut network = scene.network();
    network.send(b"better");
    assert_eq!(vm.frame(), b"better");
}

#[test]
fn a_vm_that_reads_nothing_costs_bounded_memory_and_still_sends() {
    let scene = Scene::new();
    let (mut vm, mut network) = scene.connected();
    network.stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    // The gate stops reading from a network whose frames the VM does not take.
    let frame = framed(&[7; 60_000]);
    let written = (0..200).take_while(|_| network.stream.write_all(&frame).is_ok()).count();
    assert!((10..100).contains(&written), "{written} frames");
    vm.send(b"still here");
    assert_eq!(network.frame(), b"still here");
}

#[test]
fn a_gate_has_one_keeper_and_what_is_none_is_sent_away() {
    let scene = Scene::new();
    let (mut vm, mut network) = scene.connected();
    let keeper = scene.keeper();
    keeper.seal(0).unwrap();
    let other = GateKeeper { protection: Uuid::new_v4(), vm: None };
    let busy = GateClient::connect(&scene.keeper_socket(), SOON, other).unwrap_err();
    assert!(matches!(busy, GateError::Busy { .. }), "{busy:?}");
    keeper.commit(0).unwrap();
    keeper.abort(1).unwrap();
    drop(keeper);
    let mut nonsense = UnixStream::connect(scene.keeper_socket()).unwrap();
    nonsense.write_all(&[0xff; 64]).unwrap();
    assert_eq!(nonsense.read(&mut [0; 10]).unwrap(), 0);
    vm.send(b"no harm done");
    assert_eq!(network.frame(), b"no harm done");
}

#[test]
fn orders_out_of_turn_end_the_keeper_and_not_the_network() {
    let scene = Scene::with(options(1 << 20, Duration::from_millis(1)));
    let (mut vm, mut network) = scene.connected();
    let keeper = scene.keeper();
    keeper.seal(5).unwrap();
    let error = keeper.seal(5).unwrap_err();
    assert!(error.to_string().contains("has ended"), "{error}");
    scene.wait_notice("output leaves at once");
    vm.send(b"free");
    assert_eq!(network.frame(), b"free");
}

#[test]
fn a_keeper_learns_that_its_gate_has_ended() {
    let scene = Scene::new();
    let keeper = scene.keeper();
    let signal = OutputSignal::new();
    keeper.watch(&signal).unwrap();
    keeper.seal(0).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            scene.stop();
        });
        assert_eq!(signal.wait(Some(Instant::now() + SOON), false), CheckpointCause::Full);
    });
    let error = keeper.seal(1).unwrap_err().to_string();
    assert!(error.contains("has ended"), "{error}");
}
