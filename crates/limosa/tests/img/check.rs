//! `check`.

use std::process::Command;

use serde_json::{Value, json};

use crate::bed::{Answer, Bed, assert_one_line, length, poke};
use crate::needs_qemu;

/// An image of 10 MiB with contents in its first 640 KiB; its refcount block is its cluster 2.
fn image(bed: &Bed, name: &str) {
    bed.create(&["-f", "qcow2", name, "10M"]);
    bed.qemu_io(name, &["write -P 1 0 640k"]);
}

/// Sets the refcount of a cluster.
fn set_refcount(bed: &Bed, name: &str, cluster: u64, refcount: u16) {
    poke(&bed.path(name), 0x2_0000 + 2 * cluster, &refcount.to_be_bytes());
}

#[test]
fn an_image_without_errors_is_reported_as_by_qemu_img() {
    needs_qemu!();
    let bed = Bed::new();
    image(&bed, "full");
    bed.create(&["-f", "qcow2", "empty", "1G"]);
    bed.create(&["-f", "qcow2", "-o", "extended_l2=on,cluster_size=64k", "subclusters", "1M"]);
    bed.qemu_io("subclusters", &["write 0 2k", "write 512k 100k"]);
    bed.qemu_img(&["convert", "-c", "-O", "qcow2", "full", "compressed"]).success();
    bed.create(&["-f", "qcow2", "-b", "full", "-F", "qcow2", "overlay"]);
    bed.qemu_img(&["snapshot", "-c", "one", "full"]).success();
    bed.qemu_io("full", &["write -P 2 0 64k"]);
    for name in ["full", "empty", "subclusters", "compressed", "overlay"] {
        assert_eq!(bed.both_say(&["check", name]).status, Some(0));
        bed.both_tell(&["check", "--output", "json", name]);
        assert_eq!(bed.both_say(&["check", "-q", name]).stdout, "");
    }
    assert_eq!(
        bed.limosa(&["check", "--json", "full"]).success().stdout,
        bed.limosa(&["check", "--output", "json", "full"]).stdout
    );
}

#[test]
fn the_exit_status_says_how_bad_it_is() {
    needs_qemu!();
    let bed = Bed::new();
    for name in ["leaks", "corrupt", "refcount"] {
        image(&bed, name);
    }
    // A cluster behind all others that nothing refers to.
    let behind = length(&bed.path("leaks")).div_ceil(0x1_0000);
    poke(&bed.path("leaks"), (behind << 16) + 0xffff, &[0]);
    set_refcount(&bed, "leaks", behind, 1);
    set_refcount(&bed, "corrupt", 6, 0);
    // The refcount table's first entry points behind the end of the file.
    poke(&bed.path("refcount"), 0x1_0000, &0x7000_0000_u64.to_be_bytes());
    for (name, status) in [("leaks", 3), ("corrupt", 2), ("refcount", 2)] {
        let report = bed.both_tell(&["check", "--output", "json", name]);
        assert!(report.get("leaks").is_some() || report.get("corruptions").is_some(), "{report}");
        let people = Answer::from(bed.limosa(&["check", name]));
        assert_eq!(people.status, Some(status), "{people:?}");
        assert!(!people.stdout.contains("No errors") && !people.stderr.is_empty(), "{people:?}");
    }
}

#[test]
fn leaks_and_corruptions_are_repaired_if_that_is_asked_for() {
    needs_qemu!();
    let bed = Bed::new();
    image(&bed, "leaks");
    let behind = length(&bed.path("leaks")).div_ceil(0x1_0000);
    poke(&bed.path("leaks"), (behind << 16) + 0xffff, &[0]);
    set_refcount(&bed, "leaks", behind, 1);
    image(&bed, "corrupt");
    set_refcount(&bed, "corrupt", 6, 0);
    std::fs::copy(bed.path("leaks"), bed.path("other")).unwrap();

    // Corruptions are not what -r leaks is about.
    assert_eq!(bed.limosa(&["check", "-q", "-r", "leaks", "corrupt"]).status.code(), Some(2));
    let report: Value =
        serde_json::from_str(&bed.limosa(&["check", "--json", "-r", "leaks", "leaks"]).success().stdout).unwrap();
    assert_eq!((&report["leaks-fixed"], report.get("leaks")), (&json!(1), None), "{report}");
    let said = bed.limosa(&["check", "-r", "all", "corrupt"]).success().stdout;
    assert!(said.starts_with("Repaired: ") && said.contains("\nNo errors were found on the image.\n"), "{said}");
    bed.limosa(&["check", "-r", "all", "other"]).success();
    for name in ["leaks", "corrupt", "other"] {
        assert_eq!(bed.both_say(&["check", name]).status, Some(0));
        bed.qemu_io(name, &["read -P 1 0 640k"]);
    }
    bed.both_refuse(&["check", "-r", "all", "absent"], "absent");
}

#[test]
fn a_format_without_anything_to_check_has_its_own_status() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["raw", "1M"]);
    image(&bed, "x");
    bed.both_refuse(&["check", "raw"], "raw have nothing to check");
    bed.both_refuse(&["check", "-f", "raw", "--output", "json", "x"], "raw have nothing to check");
    assert_eq!(bed.limosa(&["check", "raw"]).status.code(), Some(63));
    bed.both_refuse(&["check", "absent"], "absent");
    bed.both_refuse(&["check", "-f", "qcow2", "raw"], "raw");
    bed.both_refuse(&["check", "-f", "foo", "x"], "foo");
}

#[test]
fn a_write_to_an_image_that_was_not_closed_reports_its_repair() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "-o", "lazy_refcounts=on", "x", "1M"]);
    let mut writer = Command::new("qemu-io");
    writer.args(["-c", "write 0 128k", "-c", "flush", "-c", "abort"]).arg(bed.path("x"));
    assert!(!writer.output().unwrap().status.success());
    let words = ["bench", "-w", "-c", "1", "-f", "qcow2", "x"];
    let answer = Answer::from(bed.limosa(&words)).success();
    assert_one_line(&answer, &words, "x: was not closed properly: its refcounts were brought up to date");
    assert_eq!(Answer::from(bed.limosa(&words)).success().stderr, "", "it was closed");
}
