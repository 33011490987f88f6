//! `compare`.

use crate::bed::{Answer, Bed, assert_one_line, poke};
use crate::needs_qemu;

/// A pair of images: their formats and names.
fn pair<'a>(one: &'a str, other: &'a str) -> [&'a str; 6] {
    let format = |name: &str| if name.ends_with(".raw") { "raw" } else { "qcow2" };
    ["-f", format(one), "-F", format(other), one, other]
}

fn images(bed: &Bed) -> Vec<&'static str> {
    bed.create(&["-f", "raw", "hole.raw", "1M"]);
    std::fs::write(bed.path("zeros.raw"), vec![0; 1 << 20]).unwrap();
    for name in ["nothing.qcow2", "zero.qcow2", "data.qcow2", "zeroed.qcow2"] {
        bed.create(&["-f", "qcow2", name, "1M"]);
    }
    bed.qemu_io("zero.qcow2", &["write -z 0 1M"]);
    bed.qemu_io("data.qcow2", &["write -P 0 0 1M"]);
    bed.qemu_io("zeroed.qcow2", &["write -P 0 0 1M", "write -z 0 1M"]);
    bed.create(&["-f", "qcow2", "-b", "zero.qcow2", "-F", "qcow2", "overlay.qcow2"]);
    bed.qemu_img(&["convert", "-c", "-S", "0", "-O", "qcow2", "zeros.raw", "packed.qcow2"]).success();
    bed.create(&["-f", "qcow2", "-o", "preallocation=metadata", "aside.qcow2", "1M"]);
    bed.create(&["-f", "qcow2", "-o", "preallocation=metadata,extended_l2=on", "fine.qcow2", "1M"]);
    vec![
        "aside.qcow2",
        "fine.qcow2",
        "hole.raw",
        "zeros.raw",
        "nothing.qcow2",
        "zero.qcow2",
        "data.qcow2",
        "zeroed.qcow2",
        "overlay.qcow2",
        "packed.qcow2",
    ]
}

#[test]
fn images_are_alike_by_contents_and_strictly_by_allocation() {
    needs_qemu!();
    let bed = Bed::new();
    let images = images(&bed);
    for one in &images {
        for other in &images {
            assert_eq!(bed.both_say(&[&["compare"], &pair(one, other)[..]].concat()).status, Some(0));
            both_judge_strictly(&bed, one, other);
        }
    }
}

/// Asks both whether two images are alike to the letter. Where the first difference is, the stock tool says of the run
/// that it looked at, which is another one if the ends of the files lie elsewhere: only the verdict has to be the same.
#[track_caller]
fn both_judge_strictly(bed: &Bed, one: &str, other: &str) {
    let words = [&["compare", "-s"], &pair(one, other)[..]].concat();
    let [ours, stock] = [bed.limosa(&words).into(), bed.qemu_img(&words)].map(|answer: Answer| answer.status);
    assert_eq!(ours, stock, "{words:?}");
}

#[test]
fn the_first_difference_is_named() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    for (name, at) in [("data.qcow2", "777k"), ("overlay.qcow2", "511"), ("zero.qcow2", "1023k")] {
        bed.qemu_io(name, &[&format!("write -P 1 {at} 1")]);
    }
    poke(&bed.path("zeros.raw"), 70_001, b"x");
    for (one, other) in [
        ("data.qcow2", "hole.raw"),
        ("hole.raw", "data.qcow2"),
        ("overlay.qcow2", "zeros.raw"),
        ("zeros.raw", "zero.qcow2"),
        ("zero.qcow2", "nothing.qcow2"),
    ] {
        assert_eq!(bed.both_say(&[&["compare"], &pair(one, other)[..]].concat()).status, Some(1));
        bed.both_say(&[&["compare", "-q"], &pair(one, other)[..]].concat());
    }
    let report = bed.limosa(&["compare", "--json", "-f", "raw", "hole.raw", "zeros.raw"]);
    let report: serde_json::Value = serde_json::from_str(&report.stdout).unwrap();
    assert_eq!((&report["identical"], &report["differs"]), (&false.into(), &"contents".into()));
    assert_eq!(report["offset"], 70_001 / 512 * 512);
}

#[test]
fn lengths_may_differ_unless_asked_for_strictly() {
    needs_qemu!();
    let bed = Bed::new();
    for (name, length) in [("short.raw", 1000), ("even.raw", 1024), ("long.raw", 5000)] {
        std::fs::write(bed.path(name), vec![0; length]).unwrap();
    }
    for (one, other) in [("short.raw", "even.raw"), ("short.raw", "long.raw"), ("long.raw", "even.raw")] {
        bed.both_say(&[&["compare"], &pair(one, other)[..]].concat());
        both_judge_strictly(&bed, one, other);
    }
    // What differs before the shorter one ends is told without a word of the lengths.
    std::fs::write(bed.path("other.raw"), vec![7; 5000]).unwrap();
    bed.both_say(&[&["compare"], &pair("short.raw", "other.raw")[..]].concat());
    bed.both_say(&[&["compare"], &pair("other.raw", "even.raw")[..]].concat());
    poke(&bed.path("long.raw"), 4000, b"x");
    bed.both_say(&[&["compare"], &pair("short.raw", "long.raw")[..]].concat());
    bed.both_say(&[&["compare"], &pair("long.raw", "even.raw")[..]].concat());
}

#[test]
fn what_cannot_be_opened_or_read_has_its_own_exit_status() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    bed.both_refuse(&["compare", "absent", "hole.raw"], "absent");
    bed.both_refuse(&["compare", "hole.raw", "absent"], "absent");
    bed.both_refuse(&["compare", "-F", "qcow2", "hole.raw", "hole.raw"], "hole.raw");
    let untrusted = ["compare", "--untrusted", "overlay.qcow2", "hole.raw"];
    let answer = bed.limosa(&untrusted).into();
    assert_one_line(&answer, &untrusted, "zero.qcow2");
    assert_eq!(answer.status, Some(2));
}
