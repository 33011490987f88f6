//! `limosa inspect --diff` and `--against-qmp` say beforehand what a load does: every verdict here is held against
//! stock QEMU, which then loads the same file or does not.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use crate::needs_qemu;
use crate::stage::*;
use limosa_testkit::{Disk, DiskFormat, HugePages, LinuxGuest, Machine, MemoryBackend, Vm, skipped};
use serde_json::{Value, json};
use tempfile::TempDir;

const QEMU: &str = "qemu-system-x86_64";

/// Two vCPUs, a network card, a random number generator, USB with a tablet.
fn rich() -> Machine {
    with(small(), &["-smp", "2"], &["virtio-net-pci,id=net", "virtio-rng-pci,id=rng", "qemu-xhci,id=usb", "usb-tablet"])
}

fn with(machine: Machine, options: &[&str], devices: &[&str]) -> Machine {
    let machine = options.iter().fold(machine, |machine, option| machine.argument(option));
    devices.iter().fold(machine.argument("-nodefaults"), |machine, device| machine.argument("-device").argument(device))
}

/// A snapshot of a VM that has beaten.
fn saved(machine: &Machine) -> (TempDir, PathBuf) {
    let (folder, file) = place();
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    save(&vm, &file, &[]);
    (folder, file)
}

fn against(vm: &Vm, file: &Path, more: &[&str]) -> Ended {
    let mut words = vec!["inspect".to_owned(), file.display().to_string()];
    words.extend(["--against-qmp".to_owned(), vm.qmp_socket().display().to_string()]);
    words.extend(more.iter().map(|&word| word.to_owned()));
    limosa(words)
}

fn diff(first: &Path, second: &Path, more: &[&str]) -> Ended {
    let (first, second) = (first.display().to_string(), second.display().to_string());
    let words = ["inspect", "--diff", &first, &second].into_iter().chain(more.iter().copied());
    limosa(words)
}

/// The verdict with status and `--json` in agreement, and what was found.
#[track_caller]
fn verdict(ended: &Ended) -> (bool, Value) {
    let report: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    let loads = match report["verdict"].as_str() {
        Some("would-load") => true,
        Some("would-not-load") => false,
        other => panic!("{other:?}"),
    };
    assert_eq!(ended.status.code(), Some(i32::from(!loads)), "{ended:?}");
    (loads, report)
}

/// The findings of this severity and confidence, as subjects.
fn subjects(report: &Value, severity: &str, confidence: &str) -> Vec<String> {
    let findings = report["findings"].as_array().unwrap().iter();
    let these = findings.filter(|finding| finding["severity"] == severity && finding["confidence"] == confidence);
    these.map(|finding| finding["subject"].as_str().unwrap().to_owned()).collect()
}

/// A plain migration stream of the same VM, beside the snapshot: loading that, QEMU checks everything itself.
fn saved_with_stream(machine: &Machine) -> (TempDir, PathBuf, PathBuf) {
    let (folder, file) = place();
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    save(&vm, &file, &[]);
    vm.stop().unwrap();
    let stream = folder.path().join("stream");
    vm.execute("migrate", json!({ "uri": format!("exec:cat>{}", stream.display()) })).unwrap();
    vm.wait_migrated().unwrap();
    (folder, file, stream)
}

/// Result of loading the stream in stock QEMU.
fn really_loads(vm: &Vm, stream: &Path) -> bool {
    let uri = format!("exec:cat {}", stream.display());
    vm.execute("migrate-incoming", json!({ "uri": uri, "exit-on-error": false })).unwrap();
    vm.wait_migrated().is_ok()
}

/// An altered destination: what the verdict must name as certain with the program's list, and whether it must be found
/// without it too.
struct Altered {
    name: &'static str,
    machine: Machine,
    refuses: &'static str,
    without_list: bool,
}

#[test]
fn what_is_said_to_refuse_refuses_and_what_is_said_to_load_loads() {
    needs_qemu!();
    let (_folder, file, stream) = saved_with_stream(&rich());
    let net = "virtio-net-pci,id=net";
    let rng = "virtio-rng-pci,id=rng";
    let usb = ["qemu-xhci,id=usb", "usb-tablet"];
    let altered = |name, machine, refuses, without_list| Altered { name, machine, refuses, without_list };
    let cases = [
        altered("the same", rich(), "", true),
        altered("one more device", with(rich(), &[], &["virtio-balloon-pci"]), "", true),
        altered("more vCPUs", rich().argument("-smp").argument("4"), "section 0000:00:01.0/virtio-blk", true),
        altered(
            "more vCPUs, as many queues",
            rich().argument("-smp").argument("4").argument("-global").argument("virtio-blk-pci.num-queues=2"),
            "",
            true,
        ),
        altered(
            "a card without its old face",
            rich().argument("-global").argument("virtio-net-pci.disable-legacy=on"),
            "section 0000:00:02.0/virtio-net",
            true,
        ),
        altered("another CPU model", with(rich(), &["-cpu", "max"], &[]), "", true),
        altered(
            "no random numbers",
            with(small(), &["-smp", "2"], &[net, &format!("{},addr=4", usb[0]), usb[1]]),
            "section 0000:00:03.0/virtio-rng",
            true,
        ),
        altered(
            "another device in its place",
            with(small(), &["-smp", "2"], &[net, "e1000", usb[0], usb[1]]),
            "section 0000:00:03.0/virtio-rng",
            true,
        ),
        altered(
            "no tablet",
            with(small(), &["-smp", "2"], &[net, rng, usb[0]]),
            "section 0000:00:04.0/1/usb-ptr",
            false,
        ),
        altered(
            "fewer vCPUs",
            with(small(), &["-smp", "1"], &[net, rng, usb[0], usb[1]]),
            "section cpu_common 1",
            true,
        ),
        altered("no timer", rich().kind("q35,hpet=off"), "section hpet", false),
        altered("an older machine", rich().kind("pc-q35-9.0"), "machine", true),
        altered("another machine", rich().kind("pc"), "machine", true),
        altered("more memory", rich().memory(rich().memory_bytes() + (16 << 20)), "RAM block mem", true),
        altered("less memory", rich().memory(rich().memory_bytes() - (2 << 20)), "RAM block mem", true),
    ];
    for Altered { name, machine, refuses, without_list } in cases {
        let vm = machine.start_incoming().unwrap();
        let found = Found::of(&vm);
        let (loads, report) = verdict(&against(&vm, &file, &["--json", "--qemu", QEMU]));
        let (guess, guessed) = verdict(&against(&vm, &file, &["--json"]));
        found.assert_same(&vm);
        assert_eq!(loads, refuses.is_empty(), "{name}: {report:#}");
        // A guest without an operating system takes more vCPUs; the file does not say that it lacks one.
        let unknown: &[&str] = if name.starts_with("more vCPUs") { &["vCPUs"] } else { &[] };
        assert_eq!(subjects(&report, "refuses", "unknown"), unknown, "{name}: {report:#}");
        let named = |report: &Value| {
            ["certain", "likely"].iter().any(|how| subjects(report, "refuses", how).contains(&refuses.to_owned()))
        };
        assert!(loads || named(&report), "{name}: {report:#}");
        // Without the list less is sure, but nothing that loads is said to be refused.
        assert!(guess == loads || (guess && !without_list), "{name}: {guessed:#}");
        assert!(!without_list || loads || named(&guessed), "{name}: {guessed:#}");
        assert_eq!(really_loads(&vm, &stream), loads, "{name}: {}", vm.log());
    }
}

#[test]
fn more_vcpus_end_the_load_of_a_guest_that_has_booted_and_may_refuse_is_what_is_said() {
    needs_qemu!();
    let machine = Machine::linux(LinuxGuest::default());
    let (_folder, file) = place();
    let source = machine.start().unwrap();
    source.wait_counts(1).unwrap();
    save(&source, &file, &[]);
    drop(source);
    let vm = machine.argument("-smp").argument("2").start_incoming().unwrap();
    let (loads, report) = verdict(&against(&vm, &file, &["--json", "--qemu", QEMU]));
    assert!(loads, "{report:#}");
    assert_eq!(subjects(&report, "refuses", "unknown"), ["vCPUs"], "{report:#}");
    assert!(vm.load_file(&file, 0).is_err(), "{}", vm.log());
}

#[test]
fn a_section_of_a_newer_version_than_the_program_reads_is_refused_by_both() {
    needs_qemu!();
    let machine = rich();
    let (_folder, file) = saved(&machine);
    // Where the section's header is: its name with a length byte before it, then instance and version.
    let bytes = std::fs::read(&file).unwrap();
    let header = b"\x04hpet\0\0\0\0\0\0\0\x02";
    let places: Vec<usize> = (0..bytes.len() - header.len()).filter(|at| bytes[*at..].starts_with(header)).collect();
    let &[at] = places.as_slice() else { panic!("the section hpet was found at {places:?}") };
    let handle = std::fs::File::options().write(true).open(&file).unwrap();
    handle.write_all_at(&[3], u64::try_from(at + header.len() - 1).unwrap()).unwrap();
    let vm = machine.start_incoming().unwrap();
    let (loads, report) = verdict(&against(&vm, &file, &["--json", "--qemu", QEMU]));
    assert!(!loads && subjects(&report, "refuses", "certain").contains(&"section hpet".to_owned()), "{report:#}");
    assert!(report.to_string().contains("of version 3, the destination reads up to 2"), "{report:#}");
    assert!(vm.load_file(&file, 0).is_err());
}

#[test]
fn pages_of_another_size_are_reported_and_harmless() {
    needs_qemu!();
    if skipped("LIMOSA_SKIP_HUGETLB") {
        return;
    }
    let (_folder, file, stream) = saved_with_stream(&rich());
    let _pages = HugePages::reserve(rich().memory_bytes())
        .unwrap_or_else(|error| panic!("no huge pages: {error:#}; LIMOSA_SKIP_HUGETLB=1 skips this test"));
    let vm = rich().backend(MemoryBackend::HugeMemfd).start_incoming().unwrap();
    let (loads, report) = verdict(&against(&vm, &file, &["--json", "--qemu", QEMU]));
    assert!(loads && report.to_string().contains("in pages of 2 MiB"), "{report:#}");
    assert!(really_loads(&vm, &stream), "{}", vm.log());
}

#[test]
fn people_get_one_line_for_each_finding_and_the_verdict_last() {
    needs_qemu!();
    let (_folder, file) = saved(&rich());
    let vm = rich().kind("pc-q35-9.0").start_incoming().unwrap();
    let ended = against(&vm, &file, &[]);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert!(lines[0].starts_with("refuses         machine: saved as pc-q35-10.0"), "{lines:#?}");
    assert!(lines[0].contains("which this QEMU has"), "{lines:#?}");
    assert!(lines.iter().any(|line| line.starts_with("may lose        CPU model")), "{lines:#?}");
    assert!(lines.last().unwrap().contains("would not load on this QEMU"), "{lines:#?}");
    assert_eq!(ended.stderr, "");
    // A VM that runs can be asked too: only its options count.
    let running = rich().start().unwrap();
    let ended = against(&running, &file, &[]).success();
    assert!(ended.stdout.contains("does not wait for a VM (its state is running"), "{}", ended.stdout);
    assert_beats(&running);
}

#[test]
fn disks_that_are_not_the_saved_ones_are_reported() {
    needs_qemu!();
    let (folder, file) = place();
    let disk = Disk::create(&folder.path().join("disk"), DiskFormat::Raw, 1 << 20).unwrap();
    let machine = small().disk(disk.clone());
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    save(&vm, &file, &["--stop"]);
    drop(vm);
    let destination = machine.start_incoming().unwrap();
    let (loads, report) = verdict(&against(&destination, &file, &["--json"]));
    assert!(loads, "{report:#}");
    drop(destination);
    let other = Disk::create(&folder.path().join("other"), DiskFormat::Raw, 1 << 20).unwrap();
    let destination = small().disk(other).start_incoming().unwrap();
    let (loads, report) = verdict(&against(&destination, &file, &["--json"]));
    assert!(loads && report.to_string().contains("no writable disk on"), "{report:#}");
    std::fs::File::options().write(true).open(&disk.path).unwrap().set_len(2 << 20).unwrap();
    let (loads, report) = verdict(&against(&destination, &file, &["--json"]));
    assert!(!loads && report.to_string().contains("2097152 bytes, 1048576 when"), "{report:#}");
}

#[test]
fn two_files_are_compared_page_by_page_and_section_by_section() {
    needs_qemu!();
    let (_folder, first) = saved(&rich());
    let (_other_folder, second) = saved(&rich());
    let (loads, report) = verdict(&diff(&first, &second, &["--json", "--memory"]));
    assert!(loads && report["unknown"] == 0, "{report:#}");
    // Two guests beat alike, but not to the same instant; most of their memory is the BIOS's and equal.
    let memory = &report["memory"];
    let number = |key: &str| memory[key].as_u64().unwrap_or_else(|| panic!("{key}: {memory}"));
    assert!((1..number("both")).contains(&number("differing")), "{memory}");
    let (_, same) = verdict(&diff(&first, &first, &["--json", "--memory"]));
    assert_eq!(same["memory"]["differing"], 0, "{same:#}");
    assert_eq!((&same["memory"]["only_first"], &same["findings"]), (&json!(0), &json!([])), "{same:#}");
    // Without --memory contents are left alone.
    let (_, quick) = verdict(&diff(&first, &second, &["--json"]));
    assert!(quick["memory"]["differing"].is_null() && quick["memory"]["both"] == memory["both"], "{quick:#}");

    let poorer = with(small(), &["-smp", "1"], &["virtio-net-pci,id=net"]);
    let (_poor_folder, poor, stream) = saved_with_stream(&poorer);
    let (loads, report) = verdict(&diff(&first, &poor, &["--json"]));
    let certain = subjects(&report, "refuses", "certain");
    assert!(!loads, "{report:#}");
    for section in ["section 0000:00:03.0/virtio-rng", "section cpu 1", "section 0000:00:04.0/xhci"] {
        assert!(certain.contains(&section.to_owned()), "{section}: {certain:?}");
    }
    // The other way round only the disk's queues, one for each vCPU, prevent it.
    let (loads, report) = verdict(&diff(&poor, &first, &["--json"]));
    assert!(!loads, "{report:#}");
    assert_eq!(subjects(&report, "refuses", "certain"), ["section 0000:00:01.0/virtio-blk"], "{report:#}");
    assert!(!really_loads(&rich().start_incoming().unwrap(), &stream));
    let richer = with(small(), &["-smp", "1"], &["virtio-net-pci,id=net", "virtio-rng-pci"]);
    let (_richer_folder, more) = saved(&richer);
    let (loads, report) = verdict(&diff(&poor, &more, &["--json"]));
    assert!(loads, "{report:#}");
    assert!(really_loads(&richer.start_incoming().unwrap(), &stream));
}

#[test]
fn a_recorded_stream_is_accepted_on_either_side_but_has_no_pages_to_compare() {
    needs_qemu!();
    let (_folder, file, stream) = saved_with_stream(&rich());
    for (a, b) in [(&stream, &file), (&file, &stream)] {
        let (loads, report) = verdict(&diff(a, b, &["--json"]));
        assert!(loads && report.get("memory").is_none(), "{report:#}");
        assert_eq!(subjects(&report, "harmless", "certain"), ["capability mapped-ram", "run state"], "{report:#}");
    }
    let vm = rich().start_incoming().unwrap();
    assert!(verdict(&against(&vm, &stream, &["--json", "--qemu", QEMU])).0);
    let ended = diff(&stream, &file, &["--memory"]);
    assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(2), ""));
    assert!(ended.stderr.contains("--memory needs two snapshots"), "{}", ended.stderr);
}

/// Expects that there is no verdict: status 2, nothing on stdout, one line that holds the words.
#[track_caller]
fn no_verdict(ended: &Ended, words: &[&str]) {
    assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(2), ""), "{ended:?}");
    assert!(ended.stderr.starts_with("limosa: ") && ended.stderr.lines().count() == 1, "{}", ended.stderr);
    for word in words {
        assert!(ended.stderr.contains(word), "{word:?} is not in {}", ended.stderr);
    }
}

#[test]
fn what_prevents_a_comparison_has_its_own_status() {
    let (folder, nothing) = place();
    let nonsense = folder.path().join("nonsense");
    std::fs::write(&nonsense, b"no stream").unwrap();
    no_verdict(&diff(&nothing, &nothing, &[]), &["vm.snapshot", "No such file"]);
    no_verdict(&diff(&nonsense, &nonsense, &[]), &["nonsense", "QEVM"]);
    let words = |more: &[&str]| {
        let mut words = vec!["inspect".to_owned(), nonsense.display().to_string()];
        words.extend(more.iter().map(|&word| word.to_owned()));
        limosa(words)
    };
    for usage in
        [&["--diff"][..], &["other"], &["--memory"], &["--qemu", "x"], &["--diff", "other", "--against-qmp", "x"]]
    {
        let ended = words(usage);
        assert_eq!(ended.status.code(), Some(2), "{usage:?}: {ended:?}");
        assert!(ended.stderr.contains("Usage:"), "{usage:?}: {}", ended.stderr);
    }
}

#[test]
fn without_a_monitor_or_with_another_program_there_is_no_verdict() {
    needs_qemu!();
    let (folder, file) = saved(&small());
    let vm = small().start_incoming().unwrap();
    no_verdict(&against(&vm, &file, &["--qemu", "true"]), &["--qemu", "is not the QEMU"]);
    no_verdict(&against(&vm, &file, &["--qemu", "/nonexistent"]), &["cannot run /nonexistent"]);
    let absent = folder.path().join("absent");
    let words = ["inspect".as_ref(), file.as_os_str(), "--against-qmp".as_ref(), absent.as_os_str()];
    no_verdict(&limosa(words), &["cannot connect to the monitor", "absent"]);
}
