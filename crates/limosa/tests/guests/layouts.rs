//! Clones of VMs whose memory is laid out in every way that QEMU has, each compared byte for byte with the VM that was
//! saved; and of snapshots that were made in every way.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use limosa_testkit::{Qmp, Vm, listens, scratch};
use serde_json::json;
use tempfile::TempDir;

use crate::clone_scene::Scene;
use crate::devices::firmware;
use crate::needs_qemu;
use crate::stage::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Memory is compared in pieces of this many bytes.
const PIECE: u64 = 64 * MIB;

/// A VM started by its command line alone. Its guest is the firmware, which finds nothing to boot.
struct Plain {
    child: Child,
    socket: PathBuf,
}

impl Plain {
    /// Starts it, with `contents` of a file at each of these addresses of the guest.
    fn start(line: &[String], folder: &Path, contents: &Path, places: &[u64]) -> Self {
        let socket = folder.join("qmp");
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).arg("-qmp").arg(format!("unix:{},server=on,wait=off", socket.display()));
        for place in places {
            let loader = format!("loader,file={},addr={place:#x},force-raw=on", contents.display());
            command.arg("-device").arg(loader);
        }
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let this = Self { child, socket };
        // There is a moment in which the socket exists and refuses.
        Qmp::connect(&this.socket, SOON).unwrap();
        this
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The ranges of guest addresses at which a VM has writable memory, as QEMU itself lists them.
fn memory_ranges(qmp: &mut Qmp) -> Vec<(u64, u64)> {
    let tree = qmp.execute("human-monitor-command", json!({ "command-line": "info mtree -f" })).unwrap();
    let tree = tree.as_str().unwrap();
    let system = tree.split("FlatView").find(|view| view.contains("AS \"memory\"")).unwrap();
    let range = |line: &str| {
        let (range, what) = line.trim().split_once(' ')?;
        let (first, last) = range.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        what.contains(", ram)").then_some((hex(first)?, hex(last)?.checked_add(1)?))
    };
    system.lines().filter_map(range).collect()
}

/// Reads a piece of a VM's memory by QEMU's own means.
fn read(qmp: &mut Qmp, file: &Path, at: u64, length: u64) -> Vec<u8> {
    qmp.execute("pmemsave", json!({ "val": at, "size": length, "filename": file })).unwrap();
    std::fs::read(file).unwrap()
}

/// Expects two VMs that do not run to have the same memory in the same places; its length in bytes.
#[track_caller]
fn assert_same_memory(folder: &Path, one: &mut Qmp, other: &mut Qmp) -> u64 {
    let ranges = memory_ranges(one);
    assert_eq!(ranges, memory_ranges(other));
    let mut compared = 0;
    for (start, end) in ranges {
        for at in (start..end).step_by(usize::try_from(PIECE).unwrap()) {
            let length = PIECE.min(end - at);
            let [one, other] =
                [read(one, &folder.join("one"), at, length), read(other, &folder.join("other"), at, length)];
            let differs = one.chunks(4096).zip(other.chunks(4096)).position(|(one, other)| one != other);
            assert_eq!(differs, None, "the page of that number from {at:#x} on differs");
            compared += length;
        }
    }
    compared
}

/// Bytes of every kind of page: random ones, one value, zeros.
fn contents(folder: &Path) -> PathBuf {
    let path = folder.join("contents");
    let file = File::create_new(&path).unwrap();
    for page in 0..2048_u64 {
        let byte = |at: u64| match page % 4 {
            0 => 0,
            1 => 7,
            _ => (page + 1).wrapping_mul(at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[7],
        };
        file.write_all_at(&(0..4096).map(byte).collect::<Vec<_>>(), page * 4096).unwrap();
    }
    path
}

/// How a layout's clones get their memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expected {
    Mapped,
    Copied,
}

/// Saves a VM of this layout, clones it, and compares the two.
fn clone_and_compare(words: &[&str], places: &[u64], bytes: u64, expected: Expected) {
    let folder: TempDir = scratch().unwrap();
    let line = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg"];
    let line: Vec<String> = line.iter().chain(words).map(|word| (*word).to_owned()).collect();
    let source = Plain::start(&line, folder.path(), &contents(folder.path()), places);
    let (snapshot, clones) = (folder.path().join("snapshot"), folder.path().join("clones"));
    limosa(["save", "--stop", "--qmp", text(&source.socket), text(&snapshot)]).success();
    let memory = if expected == Expected::Mapped { "mapped" } else { "auto" };
    let how =
        ["clone", text(&snapshot), "--count", "1", "--paused", "--json", "--memory", memory, "--dir", text(&clones)];
    let command = how.iter().chain(&["--"]).copied().chain(line.iter().map(String::as_str));
    let report = limosa(command).json();
    assert_eq!(report["clones"].as_array().unwrap().len(), 1, "{words:?}: {report}");
    let mut source_monitor = Qmp::connect(&source.socket, SOON).unwrap();
    for clone in report["clones"].as_array().unwrap() {
        let is_mapped = !clone["mapped_blocks"].as_array().unwrap().is_empty();
        assert_eq!(is_mapped, expected == Expected::Mapped, "{words:?}: {report}");
        let mut monitor = Qmp::connect(Path::new(clone["monitor"].as_str().unwrap()), SOON).unwrap();
        let compared = assert_same_memory(folder.path(), &mut source_monitor, &mut monitor);
        assert!(compared >= bytes, "{words:?}: {compared} bytes");
    }
    limosa(["clone", "rm", "--force", text(&clones)]).success();
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn small_memory_and_memory_on_both_sides_of_4_gib_is_the_snapshots() {
    needs_qemu!();
    clone_and_compare(&["-machine", "pc", "-m", "128M"], &[16 * MIB, 100 * MIB], 120 * MIB, Expected::Mapped);
    clone_and_compare(&["-machine", "q35", "-m", "1G"], &[16 * MIB, 1000 * MIB], 1000 * MIB, Expected::Mapped);
    // A q35 has 2 GiB of them below 4 GiB.
    let places = [16 * MIB, 2 * GIB - 8 * MIB, 4 * GIB, 4 * GIB + 500 * MIB];
    clone_and_compare(&["-machine", "q35", "-m", "3G"], &places, 3000 * MIB, Expected::Mapped);
    let places = [16 * MIB, 3 * GIB - 8 * MIB, 4 * GIB, 5 * GIB];
    clone_and_compare(&["-machine", "pc", "-m", "4608M"], &places, 4600 * MIB, Expected::Mapped);
}

#[test]
fn dimms_and_numa_nodes_are_the_snapshots() {
    needs_qemu!();
    let dimm = ["-machine", "q35", "-m", "256M,slots=2,maxmem=1G", "-object", "memory-backend-ram,id=d0,size=256M"];
    let dimm = [&dimm[..], &["-device", "pc-dimm,id=dimm0,memdev=d0"]].concat();
    clone_and_compare(&dimm, &[16 * MIB, 200 * MIB, 4 * GIB + 16 * MIB], 500 * MIB, Expected::Mapped);
    let nodes = ["-machine", "pc", "-m", "512M", "-object", "memory-backend-ram,id=n0,size=256M", "-object"];
    let nodes = [&nodes[..], &["memory-backend-ram,id=n1,size=256M"]].concat();
    let nodes = [&nodes[..], &["-numa", "node,memdev=n0", "-numa", "node,memdev=n1"]].concat();
    clone_and_compare(&nodes, &[16 * MIB, 250 * MIB, 400 * MIB], 500 * MIB, Expected::Mapped);
}

#[test]
fn memory_backends_of_all_forms_are_the_snapshots() {
    needs_qemu!();
    let folder = scratch().unwrap();
    let file =
        format!("memory-backend-file,id=mem,size=192M,share=off,mem-path={}", folder.path().join("ram").display());
    for (object, expected) in [
        ("memory-backend-ram,id=mem,size=192M", Expected::Mapped),
        ("memory-backend-memfd,id=mem,size=192M,share=off", Expected::Mapped),
        // It has a file already, perhaps one of huge pages.
        (&*file, Expected::Copied),
        // Shared by default; here no other process has it.
        ("memory-backend-memfd,id=mem,size=192M", Expected::Mapped),
        ("memory-backend-ram,id=mem,size=192M,prealloc=on", Expected::Copied),
        (r#"{"qom-type":"memory-backend-ram","id":"mem","size":201326592}"#, Expected::Mapped),
    ] {
        let words = ["-machine", "q35,memory-backend=mem", "-m", "192M", "-object", object];
        clone_and_compare(&words, &[16 * MIB, 100 * MIB], 180 * MIB, expected);
    }
}

#[test]
fn a_vm_with_uefi_firmware_is_the_snapshots() {
    needs_qemu!();
    let folder = scratch().unwrap();
    let (code, store) = firmware(folder.path());
    let flash = |unit: u8, read_only: &str, path: &Path| {
        format!("if=pflash,format=raw,unit={unit},readonly={read_only},file={}", path.display())
    };
    let (code, store) = (flash(0, "on", &code), flash(1, "off", &store));
    let words = ["-machine", "q35", "-m", "256M", "-drive", &code, "-drive", &store];
    clone_and_compare(&words, &[16 * MIB, 100 * MIB], 250 * MIB, Expected::Mapped);
}

#[test]
fn memory_that_comes_and_goes_is_refused() {
    needs_qemu!();
    let folder = scratch().unwrap();
    let virtio_mem = ["-machine", "q35", "-m", "256M,maxmem=1G", "-object", "memory-backend-ram,id=vm0,size=512M"];
    let words = [&virtio_mem[..], &["-device", "virtio-mem-pci,id=vmem0,memdev=vm0,requested-size=128M"]].concat();
    let line = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg"];
    let line: Vec<String> = line.iter().chain(&words).map(|word| (*word).to_owned()).collect();
    let source = Plain::start(&line, folder.path(), &contents(folder.path()), &[16 * MIB]);
    let (snapshot, clones) = (folder.path().join("snapshot"), folder.path().join("clones"));
    limosa(["save", "--stop", "--qmp", text(&source.socket), text(&snapshot)]).success();
    let how = ["clone", text(&snapshot), "--count", "1", "--memory", "mapped", "--dir", text(&clones), "--"];
    limosa(how.into_iter().chain(line.iter().map(String::as_str))).one_line(&["virtio-mem"]);
    assert!(!clones.exists());
}

#[test]
fn snapshots_that_were_made_in_every_way_are_mapped() {
    needs_qemu!();
    let saved_with = |how: &[&str]| {
        Scene::saved_by(|source, snapshot| {
            source.execute("stop", json!({})).unwrap();
            save(source, snapshot, how);
        })
    };
    let migrated = |uri: &str, source: &Vm| {
        source.execute("stop", json!({})).unwrap();
        source.execute("migrate", json!({ "uri": uri })).unwrap();
        source.wait_migrated().unwrap();
    };
    let received = Scene::saved_by(|source, snapshot| {
        let socket = snapshot.with_extension("socket");
        let uri = format!("unix:{}", socket.display());
        let receive = start(["receive", &uri, text(snapshot)]);
        wait_for("a listener", || listens(receive.pid(), &socket).then_some(()));
        migrated(&uri, source);
        receive.wait().success();
    });
    let imported = Scene::saved_by(|source, snapshot| {
        let stream = snapshot.with_extension("stream");
        migrated(&format!("exec:cat > {}", stream.display()), source);
        limosa(["import", text(&stream), text(snapshot)]).success();
    });
    let written_by_qemu = Scene::saved_by(|source, snapshot| {
        source.save_file(snapshot, 2).unwrap();
        limosa(["snapshot", "seal", text(snapshot)]).success();
    });
    for scene in [
        saved_with(&["--via", "file"]),
        saved_with(&["--via", "socket"]),
        saved_with(&["--via", "socket", "--channels", "2"]),
        saved_with(&["--checksum"]),
        saved_with(&["--background"]),
        received,
        imported,
        written_by_qemu,
    ] {
        let report = scene.start(2, &["--json", "--run", "--memory", "mapped"], &[]).wait().json();
        let clones = report["clones"].as_array().unwrap();
        assert_eq!(clones.len(), 2, "{report}");
        clones.iter().for_each(|clone| scene.assert_goes_on(clone));
        limosa(["clone", "rm", "--force", text(&scene.clones())]).success();
    }
}
