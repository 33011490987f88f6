//! A guest of 256 GiB that is all but empty: limosa's own memory does not grow with it.

use std::time::Duration;

use limosa_testkit::{Machine, MemoryBackend, PAGE};
use rustix::process::Signal;

use crate::needs_qemu;
use crate::scene::{Scene, TRICKLE, assert_consistent, beat, wait_guest};
use crate::stage::Program;

/// The guest's memory, in GiB: mapped, but not there.
const GIB: u64 = 256;

/// A beat guest in the first megabytes. Its memory is private, because QEMU looks at every page when it saves, and that
/// would allocate the holes of shared memory; and the kernel is not asked to keep room for it, which it has not got.
fn machine() -> Machine {
    let object = format!("memory-backend-ram,id=large,size={GIB}G,reserve=off");
    // The file that the testkit makes for the same purpose stays empty.
    let machine = beat().memory(GIB << 30).backend(MemoryBackend::File);
    ["-object", &object, "-machine", "memory-backend=large"]
        .into_iter()
        .fold(machine, |machine, word| machine.argument(word))
}

/// The most memory that a process has had at a time, in bytes; `None` once it has ended.
fn peak(limosa: &Program) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", limosa.pid())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

#[test]
fn a_sparse_guest_of_256_gib_comes_back_lazily_in_bounded_memory() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = machine();
    let source = machine.start().unwrap();
    source.wait_heartbeats(2).unwrap();
    source.stop().unwrap();
    let snapshot = scene.save(&source, "snapshot", &["--via", "file"]);
    let at_save = source.check_heartbeat().unwrap();
    drop(source);

    let destination = machine.start_incoming().unwrap();
    let words = [&["--memory", "lazy", "--run"], &TRICKLE[..]].concat();
    let limosa = scene.start_restore(&snapshot, &destination, &words);
    wait_guest(&limosa);
    assert_consistent(&destination);
    let mut most = peak(&limosa).unwrap();
    limosa.signal(Signal::INT);
    while limosa.is_running() {
        most = most.max(peak(&limosa).unwrap_or(0));
        std::thread::sleep(Duration::from_millis(1));
    }
    limosa.wait().success();
    assert_consistent(&destination);
    assert_ne!(destination.check_heartbeat().unwrap(), at_save);
    // One bit a page is 8 MiB here, and a few such bitmaps are needed; the pages themselves are never all in memory.
    let bitmap = (GIB << 30) / PAGE / 8;
    assert!(most < (64 << 20) + 4 * bitmap, "limosa had {} MiB", most >> 20);
}
