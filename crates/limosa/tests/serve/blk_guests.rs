//! Linux on a served disk: in user-mode Linux, and in stock QEMU.

use std::fs;
use std::path::Path;
use std::time::Duration;

use limosa_testkit::{LinuxGuest, Machine, MemoryBackend, UmlGuest, Vm, kill9, on_uml, wait_for};

use crate::bed::Bed;
use crate::needs_qemu;

/// Time for a line in a guest without KVM that writes and reads some megabytes.
const LONG: Duration = Duration::from_secs(300);

/// Bytes that differ from block to block.
fn contents(mib: usize) -> Vec<u8> {
    (0..u32::try_from(mib << 20).unwrap() / 4096).flat_map(|block| block.to_le_bytes().repeat(1024)).collect()
}

/// The first word of a line that `md5sum` prints.
fn sum(lines: &[String]) -> String {
    let sum = lines.iter().find_map(|line| line.split_whitespace().next().filter(|word| word.len() == 32));
    sum.unwrap_or_else(|| panic!("no sum in {lines:?}")).to_owned()
}

fn md5_of(path: &Path) -> String {
    let output = std::process::Command::new("md5sum").arg(path).output().unwrap();
    sum(&[String::from_utf8_lossy(&output.stdout).into_owned()])
}

/// A qcow2 image over a raw one of 32 MiB with contents.
fn overlay(bed: &Bed) {
    fs::write(bed.path("base"), contents(32)).unwrap();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "@disk", "32M"]);
}

#[test]
fn user_mode_linux_has_a_filesystem_on_it() {
    needs_qemu!();
    on_uml(|| {
        let bed = Bed::new();
        overlay(&bed);
        let serving = bed.serve_blk("blk", &["disk", "--queues", "2"]);
        let guest =
            UmlGuest { devices: vec![(bed.path("blk"), 2)], modules: vec!["virtio_blk".into()], ..UmlGuest::default() };
        let guest = guest.start().unwrap();
        guest.shell("mknod /dev/vda b $(tr : ' ' < /sys/block/vda/dev)").unwrap();
        assert_eq!(sum(&guest.shell("md5sum /dev/vda").unwrap()), md5_of(&bed.path("base")));
        assert_eq!(guest.shell("cat /sys/block/vda/serial").unwrap(), ["disk"]);
        guest.shell("mke2fs /dev/vda && mkdir /mnt && mount -t ext4 -o discard /dev/vda /mnt").unwrap();
        for number in 0..4 {
            guest.shell(&format!("dd if=/dev/urandom of=/mnt/file{number} bs=64k count=40 conv=fsync")).unwrap();
        }
        let before = sum(&guest.shell("cat /mnt/file1 /mnt/file3 | md5sum").unwrap());
        guest.shell("rm /mnt/file0 /mnt/file2 && sync && fstrim /mnt && umount /mnt").unwrap();
        guest.shell("echo 3 > /proc/sys/vm/drop_caches && mount -t ext4 /dev/vda /mnt").unwrap();
        assert_eq!(sum(&guest.shell("cat /mnt/file1 /mnt/file3 | md5sum").unwrap()), before);
        guest.shell("umount /mnt").unwrap();
        let whole = sum(&guest.shell("md5sum /dev/vda").unwrap());
        drop(guest);
        let ended = serving.stop();
        assert!(ended.stderr.contains("1 connections served"), "{}", ended.stderr);
        bed.qemu_img(&["check", "-q", "@disk"]);
        bed.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", "@disk", "@out"]);
        assert_eq!(md5_of(&bed.path("out")), whole);
    });
}

/// QEMU with Linux on the disk.
fn start_qemu(bed: &Bed, queues: u32) -> Vm {
    let vm = machine(bed, queues).start().unwrap();
    // It takes commands.
    vm.wait_counts(2).unwrap();
    vm
}

fn machine(bed: &Bed, queues: u32) -> Machine {
    let chardev = format!("socket,id=blk,path={},reconnect-ms=50", bed.path("blk").display());
    let device = format!("vhost-user-blk-pci,chardev=blk,num-queues={queues}");
    let machine = Machine::linux(LinuxGuest::default()).backend(MemoryBackend::Memfd);
    let words = ["-chardev", &chardev, "-device", &device, "-smp", "2"];
    words.iter().fold(machine, |machine, word| machine.argument(word))
}

#[test]
fn linux_in_stock_qemu_reads_and_writes_it() {
    needs_qemu!();
    let bed = Bed::new();
    overlay(&bed);
    let words = ["disk", "--queues", "2", "--threads", "2", "--control", "control", "--allow-dir", "."];
    let serving = bed.serve_blk("blk", &words);
    let vm = start_qemu(&bed, 2);
    let shell = |line: &str| vm.shell_within(line, LONG).unwrap();
    assert_eq!(sum(&shell("md5sum /dev/vda")), md5_of(&bed.path("base")));
    assert_eq!(shell("cat /sys/block/vda/queue/write_cache"), ["write back"]);
    assert_eq!(shell("ls /sys/block/vda/mq | wc -l"), ["2"]);
    shell("dd if=/dev/urandom of=/dev/vda bs=64k count=64 seek=100 conv=fsync");
    // The VM pauses and continues: its rings stop and start.
    vm.execute("stop", serde_json::json!({})).unwrap();
    vm.execute("cont", serde_json::json!({})).unwrap();
    shell(
        "dd if=/dev/urandom of=/dev/vda bs=4k count=100 seek=77 conv=fsync && blkdiscard -o 1048576 -l 1048576 /dev/vda",
    );
    shell("echo 3 > /proc/sys/vm/drop_caches");
    // Its disk gets an overlay and becomes longer while it is written.
    shell(
        "( for i in $(seq 40); do dd if=/dev/urandom of=/dev/vda bs=4k count=64 seek=200 conv=fsync || exit; done; \
         touch /tmp/over ) > /dev/null 2>&1 &",
    );
    let ctl = |words: &[&str]| bed.refused(&[&["ctl", "control"], words].concat()).success();
    ctl(&["snapshot", "", "overlay"]);
    bed.qemu_img(&["check", "-q", "@disk"]);
    ctl(&["resize", "", "+32M"]);
    wait_for("the new size", || (shell("cat /sys/block/vda/size") == ["131072"]).then_some(()));
    wait_for("the writes", || (shell("ls /tmp/over || true") == ["/tmp/over"]).then_some(()));
    shell("dd if=/dev/urandom of=/dev/vda bs=64k count=16 seek=800 conv=fsync");
    shell("echo 3 > /proc/sys/vm/drop_caches");
    let whole = sum(&shell("md5sum /dev/vda"));
    drop(vm);
    serving.stop();
    bed.qemu_img(&["check", "-q", "@disk"]);
    bed.qemu_img(&["check", "-q", "@overlay"]);
    bed.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", "@overlay", "@out"]);
    assert_eq!(md5_of(&bed.path("out")), whole);
}

/// The guest writes to new clusters while its disk's server is killed.
#[test]
fn linux_in_stock_qemu_goes_on_when_its_disks_server_was_killed() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "32M"]);
    let mut serving = bed.serve_blk("blk", &["disk", "--queues", "2"]);
    let vm = start_qemu(&bed, 2);
    let shell = |line: &str| vm.shell_within(line, LONG).unwrap();
    shell("dd if=/dev/urandom of=/tmp/contents bs=1M count=24");
    let wanted = sum(&shell("md5sum /tmp/contents"));
    let kills = std::env::var("LIMOSA_BLK_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(2_u32);
    for _ in 0..kills {
        shell("( dd if=/tmp/contents of=/dev/vda bs=64k conv=fsync; echo $? > /tmp/ended ) > /dev/null 2>&1 &");
        std::thread::sleep(Duration::from_millis(150));
        kill9(serving.pid()).unwrap();
        drop(serving);
        serving = bed.serve_blk("blk", &["disk", "--queues", "2"]);
        wait_for("the guest's write", || {
            let ended = vm.shell_within("cat /tmp/ended 2>/dev/null || true", LONG).unwrap();
            ended.iter().any(|line| line == "0").then_some(())
        });
        shell("rm /tmp/ended && echo 3 > /proc/sys/vm/drop_caches");
        assert_eq!(sum(&shell("head -c 25165824 /dev/vda | md5sum")), wanted);
        shell("dd if=/dev/zero of=/dev/vda bs=1M count=24 conv=fsync");
    }
    drop(vm);
    serving.stop();
    bed.qemu_img(&["check", "-q", "@disk"]);
}

/// The guest reads all the while: what the server writes into its memory must be in the saved file, too.
#[test]
fn a_vm_is_saved_while_it_runs_and_its_memory_has_what_the_disk_wrote_there() {
    needs_qemu!();
    let bed = Bed::new();
    overlay(&bed);
    let serving = bed.serve_blk("blk", &["disk", "--queues", "2"]);
    let machine = machine(&bed, 2);
    let vm = machine.start().unwrap();
    vm.wait_counts(2).unwrap();
    let wanted = md5_of(&bed.path("base"));
    let reads =
        "( while :; do echo 3 > /proc/sys/vm/drop_caches; md5sum /dev/vda >> /tmp/sums; done ) > /dev/null 2>&1 &";
    vm.shell_within(reads, LONG).unwrap();
    wait_for("a sum", || (!vm.shell_within("cat /tmp/sums || true", LONG).unwrap().is_empty()).then_some(()));
    let file = bed.path("state");
    vm.save_file(&file, 0).unwrap();
    drop(vm);
    let vm = machine.start_incoming().unwrap();
    vm.load_file(&file, 0).unwrap();
    let sums = || vm.shell_within("cut -c1-32 /tmp/sums", LONG).unwrap();
    let before = sums().len();
    wait_for("more sums", || (sums().len() > before + 1).then_some(()));
    let sums = sums();
    assert!(sums.iter().all(|sum| *sum == wanted), "{wanted}: {sums:?}");
    drop(vm);
    serving.stop();
}
