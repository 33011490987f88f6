//! Guests in huge pages: lazily into them, out of them and back, from a VM with small or huge pages, and with a pager
//! that is killed.

use limosa_testkit::{Machine, Prefill};

use crate::interrupted::{Victims, killed_often, walker};
use crate::lazy::comes_back_lazily;
use crate::needs_qemu;
use crate::scene::{Scene, beat, in_huge_pages, saved_beat};

#[test]
fn a_guest_comes_back_lazily_into_huge_pages_with_requests_answered_on_their_own_channel() {
    needs_qemu!();
    let Some((machine, _pages)) = in_huge_pages(beat(), 1) else { return };
    comes_back_lazily(&Scene::new(), &machine, &["--preempt", "on"]);
}

#[test]
fn a_guest_comes_back_lazily_into_huge_pages_over_one_channel() {
    needs_qemu!();
    let Some((machine, _pages)) = in_huge_pages(beat(), 1) else { return };
    comes_back_lazily(&Scene::new(), &machine, &["--preempt", "off"]);
}

#[test]
fn the_very_instant_comes_back_into_huge_pages_with_checksums_verified() {
    needs_qemu!();
    let Some((machine, _pages)) = in_huge_pages(beat(), 1) else { return };
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &["--checksum"]);
    for preempt in ["on", "off"] {
        let destination = machine.start_incoming().unwrap();
        let words = ["--memory", "lazy", "--paused", "--json", "--preempt", preempt];
        let report = scene.restore(&saved.snapshot, &destination, &words).json();
        assert_eq!(report["mode"], "lazy", "{report}");
        saved.assert_is_back(&destination);
    }
}

#[test]
fn memory_goes_from_small_pages_into_huge_ones_and_back_to_the_bit() {
    needs_qemu!();
    const BYTES: u64 = 64 << 20;
    let small = Machine::paused(BYTES);
    let Some((huge, _pages)) = in_huge_pages(Machine::paused(BYTES), 2) else { return };
    let scene = Scene::new();
    // Pages of every kind side by side, and behind them, from the middle of a huge page on, nothing.
    let (filling, filled) = (Prefill::mixed(21), 41 << 20);
    let verify = |vm: &limosa_testkit::Vm, what: &str| {
        let memory = vm.memory_file().unwrap();
        filling.verify(memory, filled).unwrap_or_else(|error| panic!("{what}: {error:#}"));
        let rest = vm.read_memory(filled..BYTES).unwrap();
        assert!(rest.iter().all(|&byte| byte == 0), "{what}: there are contents where there were none");
    };
    let source = small.start().unwrap();
    filling.fill(source.memory_file().unwrap(), filled).unwrap();
    let from_small = scene.save(&source, "from small pages", &["--via", "file"]);
    drop(source);
    for preempt in ["on", "off"] {
        let vm = huge.start_incoming_stopped().unwrap();
        let words = ["--memory", "lazy", "--preempt", preempt];
        scene.restore(&from_small, &vm, &words).success();
        verify(&vm, "small to huge");
        let from_huge = scene.save(&vm, preempt, &["--via", if preempt == "on" { "socket" } else { "file" }]);
        drop(vm);
        for machine in [&small, &huge] {
            let vm = machine.start_incoming_stopped().unwrap();
            scene.restore(&from_huge, &vm, &words).success();
            verify(&vm, &format!("huge to {machine:?}"));
        }
    }
    // Eagerly too, by both routes.
    for via in ["file", "socket"] {
        let vm = huge.start_incoming_stopped().unwrap();
        scene.restore(&from_small, &vm, &["--memory", "eager", "--via", via]).success();
        verify(&vm, via);
    }
}

#[test]
fn a_pager_of_huge_pages_killed_with_its_watchdog_at_any_moment_loses_no_page_with_requests_on_their_own_channel() {
    needs_qemu!();
    let Some((machine, _pages)) = in_huge_pages(walker(), 2) else { return };
    killed_often(20, &machine, &["--preempt", "on"], Victims::Both, 3);
}

#[test]
fn a_pager_of_huge_pages_killed_with_its_watchdog_at_any_moment_loses_no_page_with_one_channel() {
    needs_qemu!();
    let Some((machine, _pages)) = in_huge_pages(walker(), 2) else { return };
    killed_often(20, &machine, &["--preempt", "off"], Victims::Both, 4);
}

#[test]
fn the_guest_of_a_killed_pager_of_huge_pages_is_brought_back_by_its_watchdog() {
    needs_qemu!();
    let Some((machine, _pages)) = in_huge_pages(walker(), 2) else { return };
    killed_often(10, &machine, &["--preempt", "off"], Victims::Pager, 5);
}
