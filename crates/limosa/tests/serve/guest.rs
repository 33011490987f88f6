//! A Linux guest in stock QEMU on a served image: what it wrote is whole, although its server was killed meanwhile.

use std::thread;
use std::time::Duration;

use limosa_storage::testing::SeededRandom;
use limosa_testkit::{LinuxGuest, Machine, kill9};
use serde_json::json;

use crate::bed::Bed;
use crate::needs_qemu;

/// Kills of the server.
const KILLS: u64 = 3;
const MIB: usize = 1 << 20;

#[test]
fn a_linux_guest_goes_on_with_its_disk_when_its_server_was_killed_and_started_again() {
    needs_qemu!();
    let bed = Bed::new();
    let base: Vec<u8> = (0..8 * MIB).map(|at| u8::try_from((at / 512 * 31 + at) % 256).unwrap()).collect();
    std::fs::write(bed.path("base"), &base).unwrap();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "@disk", "32M"]);
    let mut serving = bed.serve("nbd", &["disk"]);
    let server = json!({ "type": "unix", "path": bed.path("nbd") });
    // Seconds that a request waits for a server.
    let disk = json!({ "driver": "nbd", "node-name": "disk", "server": server, "reconnect-delay": 60 });
    let machine = ["-blockdev", &disk.to_string(), "-device", "virtio-blk-pci,drive=disk"]
        .into_iter()
        .fold(Machine::linux(LinuxGuest::default()), Machine::argument);
    let vm = machine.start().unwrap();
    vm.wait_counts(1).unwrap();
    let sum = |command: &str| vm.shell_within(&format!("{command} | md5sum"), Duration::from_secs(120)).unwrap();
    vm.shell("dd if=/dev/urandom of=/data bs=1M count=16").unwrap();
    let data = sum("cat /data");
    let mut chance = SeededRandom::new(1);
    for kill in 0..KILLS {
        thread::scope(|scope| {
            // Half over the backing file, and half behind it.
            let write = "dd if=/data of=/dev/vda bs=64k seek=64 conv=notrunc,fsync";
            let writer = scope.spawn(|| vm.shell_within(write, Duration::from_secs(120)));
            // Not a measure: any moment will do.
            thread::sleep(Duration::from_millis(chance.below(400)));
            kill9(serving.pid()).unwrap();
            bed.wait_unlocked("disk");
            serving = bed.serve("nbd", &["disk"]);
            writer.join().unwrap().unwrap_or_else(|error| panic!("kill {kill}: {error:#}"));
        });
        vm.shell("echo 3 > /proc/sys/vm/drop_caches").unwrap();
        assert_eq!(sum("dd if=/dev/vda bs=64k skip=64 count=256 2>/dev/null"), data, "kill {kill}");
    }
    drop(vm);
    serving.stop();
    bed.assert_sound("disk");
    bed.qemu_img(&["convert", "-O", "raw", "@disk", "@flat"]);
    let flat = std::fs::read(bed.path("flat")).unwrap();
    assert!(flat[..4 * MIB] == base[..4 * MIB], "what was not written is the backing file's");
    assert!(flat[20 * MIB..].iter().all(|byte| *byte == 0), "and zeros behind it");
    assert!(std::fs::read(bed.path("base")).unwrap() == base, "the backing file was not written");
}
