//! A file on a served disk, exercised in a guest: everything that can be done to it, in random order, against a model.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use limosa_testkit::{UmlGuest, on_uml};
use rustix::fs::{FallocateFlags, fallocate};

use crate::bed::Bed;
use crate::needs_qemu;

/// The file that is exercised by the test that runs in a guest, and how often.
const FILE: &str = "LIMOSA_EXERCISED_FILE";
/// The most bytes of the file.
const MOST: usize = 2 << 20;
/// Operations of one run.
const OPERATIONS: u32 = 1_500;

/// Numbers that look random, the same in every run (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % u64::try_from(end.max(1)).unwrap()).unwrap()
    }
}

/// The file, and the bytes that it must have.
struct Exercised {
    file: File,
    model: Vec<u8>,
    numbers: Numbers,
}

impl Exercised {
    /// A part of the file that exists, or may.
    fn part(&mut self, end: usize) -> (usize, usize) {
        let at = self.numbers.below(end);
        // Most are short, and some begin and end on sectors.
        let most = if self.numbers.below(4) == 0 { 256 << 10 } else { 9_000 };
        let length = 1 + self.numbers.below(most.min(end - at));
        if self.numbers.below(3) == 0 { (at & !511, (length + 511) & !511) } else { (at, length) }
    }

    fn write(&mut self) {
        let (at, length) = self.part(MOST - (256 << 10));
        let value = u8::try_from(1 + self.numbers.below(255)).unwrap();
        let bytes: Vec<u8> = (0..length).map(|index| value ^ u8::try_from(index >> 9 & 0xff).unwrap()).collect();
        self.file.write_all_at(&bytes, at as u64).unwrap();
        self.model.resize(self.model.len().max(at + length), 0);
        self.model[at..at + length].copy_from_slice(&bytes);
    }

    fn read(&mut self) {
        let (at, length) = self.part(self.model.len().max(1));
        let end = self.model.len().min(at + length);
        let mut bytes = vec![0; end.saturating_sub(at)];
        self.file.read_exact_at(&mut bytes, at as u64).unwrap();
        assert!(bytes == self.model[at.min(end)..end], "{length} bytes at {at} are others");
    }

    fn truncate(&mut self) {
        let length = self.numbers.below(MOST);
        self.file.set_len(length as u64).unwrap();
        self.model.resize(length, 0);
    }

    fn zero(&mut self, flags: FallocateFlags) {
        let (at, length) = self.part(self.model.len().max(1));
        fallocate(&self.file, flags | FallocateFlags::KEEP_SIZE, at as u64, length as u64).unwrap();
        let end = self.model.len().min(at + length);
        self.model[at.min(end)..end].fill(0);
    }

    fn run(&mut self, operations: u32) {
        for _ in 0..operations {
            match self.numbers.below(16) {
                0..6 => self.write(),
                6..11 => self.read(),
                11 => self.truncate(),
                12 => self.zero(FallocateFlags::PUNCH_HOLE),
                13 => self.zero(FallocateFlags::ZERO_RANGE),
                14 => self.file.sync_data().unwrap(),
                _ => self.file.sync_all().unwrap(),
            }
        }
        self.file.sync_all().unwrap();
    }
}

#[test]
#[ignore = "run by another test, in a guest"]
fn exercises_a_file_when_asked() {
    let path = std::env::var(FILE).unwrap();
    let file = File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
    let model = fs::read(&path).unwrap();
    let seed = model.len() as u64;
    let mut exercised = Exercised { file, model, numbers: Numbers(seed) };
    exercised.run(OPERATIONS);
    // From the disk, and not from what the guest remembers.
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    assert!(fs::read(Path::new(&path)).unwrap() == exercised.model, "the file has other contents");
}

/// The host's program that makes filesystems: that of busybox knows none that can punch holes.
fn mke2fs() -> PathBuf {
    let found = ["/usr/sbin/mke2fs", "/sbin/mke2fs"].map(PathBuf::from).into_iter().find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("no mke2fs: run `cargo xtask setup`"))
}

#[test]
fn files_on_a_served_disk_are_what_they_must_be() {
    needs_qemu!();
    on_uml(|| {
        let bed = Bed::new();
        fs::write(bed.path("base"), vec![0xaa; 96 << 20]).unwrap();
        bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "@disk", "96M"]);
        let words = ["disk", "--queues", "2", "--control", "control", "--allow-dir", "."];
        let serving = bed.serve_blk("blk", &words);
        let program = std::env::current_exe().unwrap();
        let name = program.file_name().unwrap().to_string_lossy().into_owned();
        let guest = UmlGuest {
            memory: 256,
            devices: vec![(bed.path("blk"), 2)],
            modules: vec!["virtio_blk".into()],
            programs: vec![program, mke2fs()],
            ..UmlGuest::default()
        };
        let guest = guest.start().unwrap();
        let shell = |line: &str| guest.shell(line).unwrap();
        shell("mknod /dev/vda b $(tr : ' ' < /sys/block/vda/dev)");
        shell("host mke2fs -q -t ext4 /dev/vda && mkdir /mnt && mount -t ext4 -o discard /dev/vda /mnt");
        let test = limosa_testkit::own_test_name!(exercises_a_file_when_asked);
        for round in 0..3 {
            // Two at once.
            shell(&format!(
                "for file in a b; do {FILE}=/mnt/$file host {name} --ignored --exact {test} > /tmp/said-$file 2>&1 & \
                 done; wait; cat /tmp/said-*; [ $(grep -c 'test result: ok. 1 passed' /tmp/said-a /tmp/said-b | \
                 grep -c :1) = 2 ]"
            ));
            let ctl = |words: &[&str]| bed.refused(&[&["ctl", "control"], words].concat()).success();
            match round {
                0 => ctl(&["snapshot", "", "overlay"]),
                _ => ctl(&["flush"]),
            };
        }
        shell("umount /mnt");
        drop(guest);
        serving.stop();
        for image in ["@disk", "@overlay"] {
            bed.qemu_img(&["check", "-q", image]);
        }
    });
}
