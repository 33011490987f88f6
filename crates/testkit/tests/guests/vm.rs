//! Processes, monitors, memory: what every other test of limosa leans on.

use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use limosa_testkit::{
    Direction, HeartbeatGuest, HugePages, Machine, MemoryBackend, Prefill, Proxy, Qmp, QmpFailure, is_alive, note_skip,
    qemu_skipped, scratch,
};
use serde_json::json;

/// For what should take moments on any machine: a limit for the stuck, not a measure.
const SOON: Duration = Duration::from_secs(120);

fn small() -> Machine {
    Machine::heartbeat(HeartbeatGuest::over(4 << 20))
}

#[test]
fn qemu_and_its_folder_are_gone_once_the_vm_is_dropped() {
    if qemu_skipped() {
        return;
    }
    let vm = small().start().unwrap();
    let (pid, folder) = (vm.pid(), vm.folder().to_path_buf());
    assert!(is_alive(pid));
    assert_eq!(std::fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
    drop(vm);
    assert!(!is_alive(pid) && !folder.exists());
}

#[test]
fn a_killed_owner_leaves_no_qemu_behind() {
    if qemu_skipped() {
        return;
    }
    use std::io::{BufRead as _, BufReader};
    let folder = scratch().unwrap();
    let mut owner = Command::new(env!("CARGO_BIN_EXE_limosa-guest"))
        .env("TMPDIR", folder.path())
        .arg("heartbeat")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(owner.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let pid = line.strip_prefix("pid=").and_then(|rest| rest.split(' ').next()).expect("the guest prints its pid");
    let pid: u32 = pid.parse().unwrap();
    assert!(is_alive(pid));
    owner.kill().unwrap();
    owner.wait().unwrap();
    let begun = Instant::now();
    while begun.elapsed() < SOON {
        if !is_alive(pid) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("QEMU {pid} outlives the process that started it");
}

#[test]
fn the_second_monitor_is_free_and_takes_descriptors() {
    if qemu_skipped() {
        return;
    }
    let vm = small().start().unwrap();
    let mut other = Qmp::connect(&vm.qmp_socket(), SOON).unwrap();
    let file = tempfile::tempfile().unwrap();
    other.execute_with_descriptor("getfd", json!({ "fdname": "x" }), file.as_fd()).unwrap();
    other.execute("closefd", json!({ "fdname": "x" })).unwrap();
    let error = other.execute("closefd", json!({ "fdname": "x" })).unwrap_err();
    assert!(error.downcast_ref::<QmpFailure>().is_some_and(|failure| failure.command == "closefd"), "{error:#}");
    vm.stop().unwrap();
    other.wait_event("STOP", SOON).unwrap();
    assert!(other.wait_event("RESUME", Duration::from_millis(20)).is_err());
    vm.cont().unwrap();
    other.wait_event("RESUME", SOON).unwrap();
    let third = Qmp::connect(&vm.qmp_socket(), Duration::from_millis(300)).unwrap_err();
    assert!(format!("{third:#}").contains("another client"), "{third:#}");
}

#[test]
fn a_vm_that_qemu_refuses_fails_with_qemus_own_words() {
    if qemu_skipped() {
        return;
    }
    let error = small().argument("-device").argument("no-such-device").start().unwrap_err();
    assert!(format!("{error:#}").contains("no-such-device"), "{error:#}");
}

#[test]
fn memory_filled_from_outside_reaches_another_qemu_unchanged() {
    if qemu_skipped() {
        return;
    }
    let bytes = 96 << 20;
    let pair = Machine::paused(bytes).pair().unwrap();
    let prefill = Prefill::mixed(42);
    prefill.fill(pair.source.memory_file().unwrap(), bytes).unwrap();
    pair.source.migrate_to(&pair.destination).unwrap();
    prefill.verify(pair.destination.memory_file().unwrap(), bytes).unwrap();
    // QEMU carries over that the guest has never run, and keeps it from running.
    assert_eq!(pair.destination.run_state().unwrap(), "prelaunch");
    let page = pair.destination.read_memory(8192..12288).unwrap();
    let mut expected = [0; 4096];
    prefill.write_page(2, &mut expected);
    assert!(page == expected, "QEMU and the memory file disagree about page 2");
    pair.destination.tamper(50 << 20, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    assert!(prefill.verify(pair.destination.memory_file().unwrap(), bytes).is_err());
}

#[test]
fn memory_above_the_pci_hole_is_read_at_its_offset_in_the_ram_block() {
    if qemu_skipped() {
        return;
    }
    // Sparse: nothing but the pages written below is allocated.
    let bytes = 5 << 30;
    for kind in ["q35", "pc"] {
        let vm = Machine::paused(bytes).kind(kind).start().unwrap();
        for offset in [0x7fff_f000_u64, 0x8000_0000, 0xbfff_f000, 0xc000_0000, bytes - 4096] {
            vm.tamper(offset, &offset.to_le_bytes()).unwrap();
            assert_eq!(vm.read_memory(offset..offset + 8).unwrap(), offset.to_le_bytes(), "{kind} {offset:#x}");
        }
        let across = vm.read_memory(0x7fff_f000..0x8000_0008).unwrap();
        assert_eq!(across.len(), 4104);
        assert_eq!(across[4096..], 0x8000_0000_u64.to_le_bytes());
    }
}

#[test]
fn a_guest_on_huge_pages_migrates_and_beats_on() {
    if qemu_skipped() {
        return;
    }
    let machine = small().backend(MemoryBackend::HugeMemfd);
    let reserved = match HugePages::reserve(2 * machine.memory_bytes()) {
        Ok(reserved) => reserved,
        Err(error) => {
            return note_skip(&format!("no huge pages: {error:#}"));
        }
    };
    let pair = machine.pair().unwrap();
    pair.source.wait_heartbeats(1).unwrap();
    pair.source.migrate_to(&pair.destination).unwrap();
    pair.destination.wait_heartbeats(1).unwrap();
    pair.destination.check_heartbeat().unwrap();
    drop(pair);
    drop(reserved);
}

#[test]
fn a_migration_through_a_proxy_that_cuts_fails_and_the_source_can_go_on() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let pair = small().pair().unwrap();
    pair.source.wait_heartbeats(1).unwrap();
    let target = folder.path().join("target");
    let proxy = Proxy::start(&folder.path().join("proxy"), &target).unwrap();
    proxy.cut_at(Direction::Forward, 1_000_000);
    let incoming = json!({ "uri": format!("unix:{}", target.display()), "exit-on-error": false });
    pair.destination.execute("migrate-incoming", incoming).unwrap();
    pair.source.execute("migrate", json!({ "uri": format!("unix:{}", proxy.path().display()) })).unwrap();
    pair.source.wait_migrated().unwrap_err();
    pair.destination.wait_migrated().unwrap_err();
    assert_eq!(proxy.passed(Direction::Forward), 1_000_000);
    pair.source.wait_run_state("running", SOON).unwrap();
    pair.source.wait_heartbeats(2).unwrap();
    pair.source.check_heartbeat().unwrap();
}
