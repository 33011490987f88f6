//! `dd`.

use crate::bed::{Answer, Bed, assert_one_line, length};
use crate::convert::images;
use crate::needs_qemu;

const OPERANDS: [&[&str]; 9] = [
    &[],
    &["bs=64k"],
    &["bs=1M", "count=2"],
    &["count=3"],
    &["bs=4k", "skip=1"],
    &["bs=1000", "skip=2", "count=7"],
    &["bs=1", "count=777"],
    &["bs=1k", "count=5", "skip=5"],
    &["bs=1M", "count=0"],
];

/// Has both copy, and expects the same file, or the same contents of a sound image.
#[track_caller]
fn both_copy(bed: &Bed, words: &[&str], format: &str) {
    let all = |of: &'static str| [&["dd"], words, &["-O", format, of]].concat();
    for name in ["ours", "stock"] {
        let _ = std::fs::remove_file(bed.path(name));
    }
    let ours = Answer::from(bed.limosa(&all("of=ours")));
    let stock = bed.qemu_img(&all("of=stock"));
    assert_eq!((ours.status, &ours.stdout), (stock.status, &stock.stdout), "{words:?}: {ours:?} {stock:?}");
    assert_eq!(ours.stderr.is_empty(), stock.stderr.is_empty(), "{words:?}: {ours:?} {stock:?}");
    if format == "raw" {
        let [ours, stock] = ["ours", "stock"].map(|name| std::fs::read(bed.path(name)).unwrap());
        assert_eq!(ours.len(), stock.len(), "{words:?}");
        assert!(ours == stock, "{words:?}");
    } else {
        bed.qemu_img(&["check", "-q", "ours"]).success();
        bed.qemu_img(&["compare", "ours", "stock"]).success();
        let size = |name| bed.qemu_img(&["info", "--output=json", name]).json()["virtual-size"].clone();
        assert_eq!(size("ours"), size("stock"), "{words:?}");
    }
}

#[test]
fn blocks_are_copied_as_stock_does() {
    needs_qemu!();
    let bed = Bed::new();
    for (name, format) in images(&bed) {
        let input = format!("if={name}");
        for operands in OPERANDS {
            both_copy(&bed, &[&["-f", format, &input], operands].concat(), "raw");
        }
        both_copy(&bed, &["-U", "-f", format, &input, "bs=3k", "skip=11"], "qcow2");
    }
    both_copy(&bed, &["--image-opts", "if=driver=qcow2,file.filename=overlay", "bs=64k", "count=9"], "raw");
    // The last one of a name counts.
    both_copy(&bed, &["-f", "qcow2", "if=holes", "if=base", "count=1", "count=5", "bs=2k", "bs=1k"], "raw");
}

#[test]
fn a_beginning_past_the_end_is_warned_about_and_the_output_is_empty() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("small"), vec![7; 2048]).unwrap();
    for operands in [&["skip=5"][..], &["skip=3", "count=2"], &["bs=1G", "skip=8000000000"]] {
        both_copy(&bed, &[&["-f", "raw", "if=small"], operands].concat(), "raw");
        assert_eq!(length(&bed.path("ours")), 0);
    }
    both_copy(&bed, &["-f", "raw", "if=small", "skip=4"], "raw");
}

#[test]
fn an_output_that_was_there_is_overwritten_and_the_input_never_is() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("input"), vec![7; 4096]).unwrap();
    std::fs::write(bed.path("output"), vec![9; 100_000]).unwrap();
    bed.limosa(&["dd", "-f", "raw", "if=input", "of=output"]).success();
    assert_eq!(std::fs::read(bed.path("output")).unwrap(), [7; 4096]);
    let answer = Answer::from(bed.limosa(&["dd", "-f", "raw", "if=input", "of=input", "count=1"]));
    assert_one_line(&answer, &["dd"], "same file");
    assert_eq!(length(&bed.path("input")), 4096);
    let report: serde_json::Value = serde_json::from_str(
        &bed.limosa(&["dd", "--json", "-f", "raw", "if=input", "of=output", "count=2"]).success().stdout,
    )
    .unwrap();
    assert_eq!(report["bytes-written"], 1024);
}

#[test]
fn operands_that_mean_nothing_are_refused() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("input"), vec![7; 4096]).unwrap();
    for (operands, says) in [
        (&["if=input"][..], "of="),
        (&["of=output"], "if="),
        (&["if=input", "of=output", "seek=1"], "seek"),
        (&["if=input", "of=output", "bs"], "bs"),
        (&["if=input", "of=output", "bs=0"], "bs"),
        (&["if=input", "of=output", "bs=4G"], "bs"),
        (&["if=input", "of=output", "count=x"], "count"),
        (&["if=input", "of=output", "skip=-1"], "skip"),
        (&["if=absent", "of=output"], "absent"),
    ] {
        bed.both_refuse(&[&["dd", "-f", "raw"], operands].concat(), says);
        assert!(!bed.path("output").exists(), "{operands:?}");
    }
}
