//! `resize`.

use std::os::unix::fs::MetadataExt as _;

use crate::bed::{Answer, Bed, length};
use crate::needs_qemu;

/// Has both resize the same image, and expects the same line, an image of that size, and the same contents.
#[track_caller]
fn both_resize(bed: &Bed, name: &str, words: &[&str], size: u64) {
    let (stock, ours) = (bed.path("stock"), bed.path("ours"));
    for copy in [&stock, &ours] {
        std::fs::copy(bed.path(name), copy).unwrap();
    }
    let words = |name: &'static str| [&["resize", name], words].concat();
    let said = bed.qemu_img(&words("stock")).success().stdout;
    let answer = Answer::from(bed.limosa(&words("ours")));
    assert_eq!((answer.status, &answer.stdout), (Some(0), &said), "{words:?}: {answer:?}", words = words("ours"));
    let report = bed.qemu_img(&["info", "--output", "json", "ours"]).success().json();
    assert_eq!(report["virtual-size"], size);
    bed.qemu_img(&["compare", "stock", "ours"]).success();
    if report["format"] == "qcow2" {
        bed.qemu_img(&["check", "-q", "ours"]).success();
    }
}

#[test]
fn raw_images_become_longer_and_shorter() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("raw"), vec![7; 1 << 20]).unwrap();
    both_resize(&bed, "raw", &["-f", "raw", "3M"], 3 << 20);
    both_resize(&bed, "raw", &["+1M", "-f", "raw"], 2 << 20);
    both_resize(&bed, "raw", &["-f", "raw", "--preallocation", "full", "+1M"], 2 << 20);
    both_resize(&bed, "raw", &["-f", "raw", "--shrink", "--", "-512k"], 512 << 10);
    both_resize(&bed, "raw", &["-f", "raw", "-q", "+0"], 1 << 20);
    // The file has as many bytes as were asked for, the disk whole sectors.
    std::fs::write(bed.path("odd"), vec![7; 700]).unwrap();
    for (name, size, wanted) in [
        ("raw", &["1048577"][..], (1 << 20) + 1),
        ("raw", &["--shrink", "1000"], 1000),
        ("odd", &["+100"], 1124),
        ("odd", &["--preallocation", "full", "2000"], 2000),
        ("odd", &["1024"], 1024),
    ] {
        both_resize(&bed, name, &[&["-f", "raw"], size].concat(), u64::next_multiple_of(wanted, 512));
        assert_eq!([length(&bed.path("ours")), length(&bed.path("stock"))], [wanted; 2], "{name} {size:?}");
    }
}

#[test]
fn qcow2_images_become_longer_and_shorter() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "x", "1M"]);
    bed.qemu_io("x", &["write -P 1 0 1M"]);
    bed.create(&["-f", "qcow2", "-b", "x", "-F", "qcow2", "short", "512k"]);
    for (name, words, size) in [
        ("x", &["3G"][..], 3 << 30),
        ("x", &["+1M", "-f", "qcow2"], 2 << 20),
        ("x", &["--preallocation", "metadata", "+1M"], 2 << 20),
        ("x", &["--preallocation", "full", "+1M"], 2 << 20),
        ("x", &["--shrink", "--", "-512k"], 512 << 10),
        ("x", &["-q", "+0"], 1 << 20),
        // What lay behind the old end below it stays out of sight.
        ("short", &["1M"], 1 << 20),
        ("short", &["2M"], 2 << 20),
    ] {
        both_resize(&bed, name, words, size);
    }
    bed.both_refuse(&["resize", "x", "2000001"], "512");
    let untrusted = bed.limosa(&["resize", "--untrusted", "short", "1M"]);
    untrusted.one_line(&["short", "--untrusted"]);
}

#[test]
fn a_raw_image_without_a_given_format_is_warned_about() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["raw", "1M"]);
    let ended = bed.limosa(&["resize", "raw", "2M"]).success();
    assert!(ended.stderr.contains("-f raw"), "{}", ended.stderr);
    assert_eq!(length(&bed.path("raw")), 2 << 20);
    assert_eq!(bed.limosa(&["resize", "-f", "raw", "raw", "3M"]).success().stderr, "");
}

#[test]
fn what_would_lose_data_or_makes_no_sense_is_refused() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["raw", "1M"]);
    bed.create(&["-f", "qcow2", "x", "1M"]);
    std::fs::write(bed.path("odd"), vec![7; 700]).unwrap();
    for (words, says) in [
        (&["-f", "raw", "raw", "512k"][..], "--shrink"),
        (&["-f", "raw", "raw", "--", "-512k"], "524288 bytes"),
        (&["x", "--", "-512k"], "--shrink"),
        (&["--shrink", "x", "--", "-2M"], "more than 0"),
        (&["--shrink", "x", "0"], "more than 0"),
        (&["--preallocation", "foo", "x", "2M"], "foo"),
        (&["--preallocation", "full", "--shrink", "x", "512k"], "--preallocation"),
        (&["absent", "2M"], "absent"),
        // Its format was not given, which is warned about elsewhere: one line all the same.
        (&["raw", "512k"], "--shrink"),
        (&["-f", "raw", "odd", "700"], "--shrink"),
    ] {
        bed.both_refuse(&[&["resize"], words].concat(), says);
    }
    assert_eq!(length(&bed.path("raw")), 1 << 20);
}

#[test]
fn a_shorter_image_gives_space_back_wherever_it_is() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "image", "16M"]);
    // From its end to its beginning: what is cut off is in front.
    let writes: Vec<_> = (0..16).rev().map(|at| format!("write -P {} {at}M 1M", at + 1)).collect();
    bed.qemu_io("image", &writes.iter().map(String::as_str).collect::<Vec<_>>());
    let taken = || std::fs::metadata(bed.path("image")).unwrap().blocks() * 512;
    assert!(taken() > 16 << 20);
    Answer::from(bed.limosa(&["resize", "--shrink", "image", "8M"])).success();
    assert!(taken() < 10 << 20, "{}", taken());
    bed.qemu_img(&["check", "-q", "image"]).success();
    let reads: Vec<_> = (0..8).map(|at| format!("read -P {} {at}M 1M", at + 1)).collect();
    bed.qemu_io("image", &reads.iter().map(String::as_str).collect::<Vec<_>>());
}
