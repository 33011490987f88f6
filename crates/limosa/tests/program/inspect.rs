//! `limosa inspect` tells what is in a snapshot or a recorded stream, and takes what is damaged for what it is.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

use crate::needs_qemu;
use crate::stage::*;
use limosa_testkit::{Machine, Vm, scratch};
use serde_json::{Value, json};

fn inspect(file: &Path, more: &[&str]) -> Ended {
    let mut words = vec!["inspect"];
    words.extend(more);
    let file = file.display().to_string();
    words.push(&file);
    limosa(words)
}

/// A VM that has beaten and is paused.
fn stopped() -> (Machine, Vm) {
    let machine = small();
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    vm.stop().unwrap();
    (machine, vm)
}

/// Records a plain migration stream, as people do without limosa.
fn record(vm: &Vm, file: &Path) {
    vm.execute("migrate", json!({ "uri": format!("exec:cat>{}", file.display()) })).unwrap();
    vm.wait_migrated().unwrap();
}

/// Expects what is true of every description of such a VM, be the file limosa's or QEMU's.
#[track_caller]
fn assert_describes(machine: &Machine, report: &Value) {
    assert!(report["machine"].as_str().unwrap().starts_with("pc-q35-"), "{report}");
    assert_eq!(report["run_state"], "paused");
    let blocks = report["blocks"].as_array().unwrap();
    let memory = blocks.iter().find(|block| block["name"] == "mem").expect("the guest's RAM");
    assert_eq!(memory["used"], machine.memory_bytes());
    assert_eq!(memory["pages"], machine.memory_bytes() / 4096);
    for block in blocks {
        let number = |key: &str| block[key].as_u64().unwrap_or_else(|| panic!("{key} in {block}"));
        assert_eq!(number("stored") + number("zero"), number("pages"), "{block}");
    }
    assert!(memory["stored"].as_u64() >= Some(machine.heartbeat_guest().unwrap().pages.into()), "{memory}");
    let devices = report["devices"].as_array().unwrap();
    for name in ["cpu", "timer", "serial", "globalstate"] {
        let device =
            devices.iter().find(|device| device["name"] == name).unwrap_or_else(|| panic!("{name}: {devices:?}"));
        assert!(
            device["instance"].is_u64() && device["version"].is_u64() && device["size"].as_u64() > Some(0),
            "{device}"
        );
    }
}

#[test]
fn a_snapshot_of_limosa_is_shown_with_its_record() {
    needs_qemu!();
    for via in ["socket", "file"] {
        let (_folder, file) = place();
        let (machine, vm) = stopped();
        let saved = save(&vm, &file, &["--via", via, "--checksum"]);
        let report = inspect(&file, &["--json"]).json();
        assert_describes(&machine, &report);
        assert_eq!(report["capabilities"], json!(["mapped-ram"]));
        assert_eq!(report["length"], std::fs::metadata(&file).unwrap().len());
        assert_eq!(report["checksums"], true);
        assert_eq!((&report["warnings"], &report["without_manifest"]), (&json!([]), &Value::Null));
        let manifest = &report["manifest"];
        assert_eq!((&manifest["id"], &manifest["via"]), (&saved["id"], &json!(via)));
        assert_eq!((&manifest["pages"], &manifest["ram_bytes"]), (&saved["pages"], &saved["ram_bytes"]));
        assert_eq!(manifest["machine"], report["machine"]);
        let version = vm.execute("query-version", json!({})).unwrap();
        let version = format!("{}.{}.{}", version["qemu"]["major"], version["qemu"]["minor"], version["qemu"]["micro"]);
        assert!(manifest["qemu"].as_str().unwrap().starts_with(&version), "{manifest}");
        for block in report["blocks"].as_array().unwrap() {
            assert_eq!(block["pages_offset"].as_u64().unwrap() % 4096, 0);
        }

        let people = inspect(&file, &[]).success();
        let id = saved["id"].as_str().unwrap();
        for words in ["machine", "run state     paused", id, "mem", "globalstate", "checksums recorded"] {
            assert!(people.stdout.contains(words), "{words:?} is not in {}", people.stdout);
        }
        assert_eq!(people.stderr, "");
    }
}

#[test]
fn a_snapshot_that_qemu_wrote_is_shown_without_a_record() {
    needs_qemu!();
    for channels in [0, 2] {
        let (_folder, file) = place();
        let (machine, vm) = stopped();
        vm.save_file(&file, channels).unwrap();
        let report = inspect(&file, &["--json"]).json();
        assert_describes(&machine, &report);
        assert_eq!((&report["manifest"], &report["checksums"]), (&Value::Null, &json!(false)));
        assert!(report["without_manifest"].is_string(), "{report}");
        assert!(inspect(&file, &[]).success().stdout.contains("globalstate"));
    }
}

#[test]
fn a_description_that_cannot_be_printed_is_a_failure() {
    needs_qemu!();
    let (_folder, file) = place();
    let (_machine, vm) = stopped();
    save(&vm, &file, &[]);
    for more in [&["--json"][..], &[]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
        command.arg("inspect").arg(&file).args(more);
        let ended = command.stdout(File::options().write(true).open("/dev/full").unwrap()).output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(1), "{said}");
        assert!(said.contains("standard output: No space left"), "{said}");
    }
}

#[test]
fn a_recorded_stream_is_shown_too() {
    needs_qemu!();
    let (_folder, file) = place();
    let (machine, vm) = stopped();
    record(&vm, &file);
    let report = inspect(&file, &["--json"]).json();
    assert_describes(&machine, &report);
    assert!(report["without_manifest"].as_str().unwrap().contains("recorded"), "{report}");
    assert!(report["blocks"][0]["pages_offset"].is_null());
    inspect(&file, &[]).success();
}

/// Cuts the file shorter and shorter; below `whole` bytes every cut must be an error, and from there on none.
fn cut(file: &Path, whole: u64, mut lengths: Vec<u64>) {
    lengths.sort_unstable();
    lengths.dedup();
    for &length in lengths.iter().rev() {
        File::options().write(true).open(file).unwrap().set_len(length).unwrap();
        let ended = inspect(file, &["--json"]);
        if length >= whole {
            ended.json();
        } else {
            let line = ended.one_line(&[&file.display().to_string()]);
            assert!(line.len() < 1000, "cut to {length}: {line}");
        }
    }
}

/// Numbers below `limit` without a pattern, the same in every run.
fn scattered(limit: u64, count: u64) -> impl Iterator<Item = u64> {
    (1..=count).map(move |n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) % limit)
}

/// Where QEMU's stream ends in a snapshot of limosa's: the footer, 64 bytes at the end of the file, says so at its byte
/// 16.
fn stream_end(file: &Path) -> u64 {
    let length = std::fs::metadata(file).unwrap().len();
    let mut footer = [0; 64];
    File::open(file).unwrap().read_exact_at(&mut footer, length - 64).unwrap();
    assert_eq!(footer[..8], *b"limosa\x1a\n");
    u64::from_le_bytes(footer[16..24].try_into().unwrap())
}

#[test]
fn a_snapshot_cut_anywhere_is_refused_unless_only_the_record_is_gone() {
    needs_qemu!();
    let folder = scratch().unwrap();
    let (_machine, vm) = stopped();
    let (ours, theirs) = (folder.path().join("ours"), folder.path().join("theirs"));
    save(&vm, &ours, &["--via", "file"]);
    vm.cont().unwrap();
    vm.wait_heartbeats(1).unwrap();
    vm.stop().unwrap();
    vm.save_file(&theirs, 0).unwrap();

    let report = inspect(&theirs, &["--json"]).json();
    let length = report["length"].as_u64().unwrap();
    let places = report["blocks"].as_array().unwrap().iter().map(|block| block["pages_offset"].as_u64().unwrap());
    let mut lengths: Vec<u64> = places.flat_map(|place| [place - 1, place, place + 1, place + 4096]).collect();
    lengths.extend([0, 1, 3, 4, 7, 8, 9, 12, 13, 40, 64, 100, 4095, 4096, length - 1, length - 2, length - 100]);
    lengths.extend(scattered(length, 25));
    cut(&theirs, length, lengths.clone());

    // limosa's own: what is cut off the record costs the record, and nothing else.
    let length = std::fs::metadata(&ours).unwrap().len();
    let whole = stream_end(&ours);
    let record = length - whole;
    lengths.extend([
        whole - 1,
        whole,
        whole + 1,
        whole + record / 2,
        length - 65,
        length - 64,
        length - 63,
        length - 1,
    ]);
    lengths.retain(|&cut| cut < length);
    cut(&ours, whole, lengths);
}

#[test]
fn a_recorded_stream_cut_anywhere_is_refused() {
    needs_qemu!();
    let (_folder, file) = place();
    let (_machine, vm) = stopped();
    record(&vm, &file);
    let length = std::fs::metadata(&file).unwrap().len();
    let mut lengths = vec![0, 1, 4, 8, 9, 13, 64, 200, length - 1, length - 2, length - 1000, length - 20_000];
    lengths.extend(scattered(length, 30));
    cut(&file, length, lengths);
}

#[test]
fn bytes_changed_anywhere_never_break_inspect() {
    needs_qemu!();
    let folder = scratch().unwrap();
    let (_machine, vm) = stopped();
    let (snapshot, stream) = (folder.path().join("snapshot"), folder.path().join("stream"));
    save(&vm, &snapshot, &["--via", "socket"]);
    vm.cont().unwrap();
    vm.stop().unwrap();
    record(&vm, &stream);
    for file in [&snapshot, &stream] {
        let length = std::fs::metadata(file).unwrap().len();
        let open = File::options().read(true).write(true).open(file).unwrap();
        // Where the structure is: the beginning and the end.
        let places = scattered(400, 25).chain(scattered(60_000, 25).map(|back| length - 1 - back));
        for place in places {
            let mut byte = [0];
            open.read_exact_at(&mut byte, place).unwrap();
            for changed in [byte[0] ^ 0x80, byte[0].wrapping_add(1)] {
                open.write_all_at(&[changed], place).unwrap();
                let ended = inspect(file, &["--json"]);
                if ended.status.success() {
                    ended.json();
                } else {
                    ended.one_line(&[&file.display().to_string()]);
                }
            }
            open.write_all_at(&byte, place).unwrap();
        }
        inspect(file, &["--json"]).json();
    }
}

#[test]
fn what_is_neither_snapshot_nor_stream_is_said_to_be_so() {
    let folder = scratch().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("empty"), "").unwrap();
    std::fs::write(at("text"), "Dear Sir or Madam,\n").unwrap();
    std::fs::write(at("image"), [b"QFI\xfb".as_slice(), &[0; 70_000]].concat()).unwrap();
    std::fs::write(at("header"), b"QEVM\0\0\0\x03").unwrap();
    std::fs::write(at("old"), b"QEVM\0\0\0\x02and so on").unwrap();
    std::fs::create_dir(at("folder")).unwrap();
    for name in ["empty", "text", "image", "header", "old", "folder", "absent"] {
        inspect(&at(name), &[]).one_line(&[&at(name).display().to_string()]);
    }
    inspect(Path::new("/dev/zero"), &[]).one_line(&["/dev/zero"]);
}
