//! A guest that is mostly zero goes into less memory than it has: what is zero takes none, whichever way it comes back.

use limosa_testkit::{HeartbeatGuest, Machine, MemoryBackend, MemoryGroup, PAGE, Vm, skipped};

use crate::needs_qemu;
use crate::scene::{Scene, text};
use crate::stage::save;

const GUEST: u64 = 8 << 30;
const CONTENTS: u64 = 300 << 20;
const LIMIT: u64 = 600 << 20;

/// A machine with [`GUEST`] bytes of memory; a beat guest walks through a part of it.
fn machine(walk: u64, memory: MemoryBackend) -> Machine {
    let guest = HeartbeatGuest { rest: 2, ..HeartbeatGuest::over(walk) };
    Machine::heartbeat(guest).memory(GUEST).backend(memory)
}

/// The snapshot of a guest that walks `walk` bytes, and the bytes of its pages that are not zero.
fn saved(scene: &Scene, walk: u64) -> (std::path::PathBuf, u64) {
    // Private memory: QEMU looks at every page when it saves, and only there a hole stays one.
    let source = machine(walk, MemoryBackend::Anonymous).start().unwrap();
    source.wait_heartbeats(2).unwrap();
    let snapshot = scene.path(&format!("{walk}"));
    save(&source, &snapshot, &["--via", "file", "--stop"]);
    let found = crate::stage::limosa(["inspect", "--json", text(&snapshot)]).json();
    let stored = found["blocks"].as_array().unwrap().iter().map(|block| block["stored"].as_u64().unwrap());
    let contents = stored.sum::<u64>() * PAGE;
    (snapshot, contents)
}

/// A line of a process's status, in bytes.
fn status(vm: &Vm, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", vm.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// The memory of a QEMU while a guest was restored into it.
#[derive(Debug)]
struct Came {
    /// The most memory of its own that it had at a time.
    resident: u64,
    /// The most that was counted for its group.
    peak: u64,
}

/// Restores into a QEMU that may have [`LIMIT`] bytes.
fn restored(scene: &Scene, snapshot: &std::path::Path, machine: &Machine, how: &[&str]) -> Came {
    let group = MemoryGroup::create(how.last().unwrap_or(&""), LIMIT)
        .unwrap_or_else(|error| panic!("{error:#}; LIMOSA_SKIP_CGROUP=1 skips this test"));
    let vm = machine.start_incoming_stopped().unwrap();
    group.add(vm.pid()).unwrap();
    let words: Vec<&str> = ["--paused", "--json"].iter().chain(how).copied().collect();
    scene.restore(snapshot, &vm, &words).json();
    let came = Came { resident: status(&vm, "VmHWM"), peak: group.peak().unwrap() };
    assert_eq!((group.killed().unwrap(), status(&vm, "VmSwap")), (0, 0), "{how:?}: {came:?}");
    vm.check_heartbeat().unwrap();
    came
}

#[test]
fn a_guest_that_is_mostly_zero_fits_into_a_twelfth_of_its_memory() {
    needs_qemu!();
    if skipped("LIMOSA_SKIP_CGROUP") {
        return;
    }
    let scene = Scene::new();
    let (full, contents) = saved(&scene, CONTENTS);
    let (empty, little) = saved(&scene, 64 << 10);
    assert!(contents > CONTENTS && contents < CONTENTS + (16 << 20), "{contents}");
    for memory in [MemoryBackend::Anonymous, MemoryBackend::Memfd] {
        for how in [
            &["--memory", "lazy"][..],
            &["--memory", "eager", "--via", "socket"],
            &["--memory", "eager", "--via", "file"],
        ] {
            // What QEMU itself takes, its firmware and its buffers: measured where the same machine has next to no
            // contents.
            let own = restored(&scene, &empty, &machine(64 << 10, memory), how);
            let came = restored(&scene, &full, &machine(CONTENTS, memory), how);
            eprintln!("{memory:?}, {how:?}: {came:?}, of QEMU's own {own:?}, of contents {contents}");
            let most = own.resident + (contents - little) / 100 * 105;
            assert!(
                came.resident <= most,
                "{memory:?}, {how:?}: {came:?}, of QEMU's own {own:?}, of contents {contents}"
            );
            // QEMU reads a file through the cache, which counts too and goes when memory is short.
            if !how.contains(&"file") {
                let most = own.peak + (contents - little) / 100 * 105;
                assert!(
                    came.peak <= most,
                    "{memory:?}, {how:?}: {came:?}, of QEMU's own {own:?}, of contents {contents}"
                );
            }
        }
    }
}
