//! `--limit-memory` and `--limit-time`.

use std::time::{Duration, Instant};

use crate::bed::{Answer, Bed, assert_one_line};
use crate::needs_qemu;

#[test]
fn a_command_that_needs_more_memory_than_it_may_have_fails_with_one_line_and_leaves_nothing() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "x", "1G"]);
    let ours = Answer::from(bed.limosa(&["bench", "-c", "4", "-d", "4", "-s", "64M", "--limit-memory", "16M", "x"]));
    assert_eq!((ours.status, ours.stderr.lines().count()), (Some(1), 1), "{ours:?}");
    assert!(ours.stderr.contains("increase --limit-memory"), "{ours:?}");
    bed.limosa(&["check", "-q", "--limit-memory", "64M", "x"]).success();
    // Requests in flight have memory of their own.
    bed.create(&["-f", "raw", "source", "64M"]);
    bed.qemu_io("source", &["write -P 7 0 64M"]);
    let copy = |limit| ["convert", "-m", "16", "-f", "raw", "-O", "qcow2", "--limit-memory", limit, "source", "target"];
    let ours = Answer::from(bed.limosa(&copy("12M")));
    assert_eq!(ours.status, Some(1), "{ours:?}");
    assert!(ours.stderr.lines().count() == 1 && !bed.path("target").exists(), "{ours:?}");
    bed.limosa(&copy("256M")).success();
    bed.qemu_img(&["compare", "-f", "raw", "-F", "qcow2", "source", "target"]).success();
}

#[test]
fn a_command_that_takes_longer_than_it_may_fails_with_one_line_and_leaves_nothing() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "raw", "source", "64M"]);
    bed.qemu_io("source", &["write -P 7 0 64M"]);
    let began = Instant::now();
    let words = ["convert", "-r", "1M", "-f", "raw", "-O", "qcow2", "--limit-time", "500ms", "source", "target"];
    let ours = Answer::from(bed.limosa(&words));
    assert_eq!((ours.status, bed.path("target").exists()), (Some(1), false), "{ours:?}");
    assert_one_line(&ours, &words, "not done within 500 ms: increase --limit-time");
    assert!(began.elapsed() < Duration::from_secs(30));
    bed.limosa(&["convert", "--limit-time", "10m", "-f", "raw", "-O", "qcow2", "source", "target"]).success();
}

#[test]
fn of_compare_a_limit_does_not_look_like_a_verdict() {
    needs_qemu!();
    let bed = Bed::new();
    for name in ["a", "b"] {
        bed.create(&["-f", "raw", "-o", "preallocation=full", name, "8M"]);
    }
    let words = ["compare", "--limit-memory", "3M", "-f", "raw", "-F", "raw", "a", "b"];
    let ours = Answer::from(bed.limosa(&words));
    assert!(ours.status.is_some_and(|status| status > 1), "{ours:?}");
    assert_one_line(&ours, &words, "");
}

#[test]
fn a_limit_that_is_none_is_bad_usage() {
    let bed = Bed::new();
    for (words, says) in [
        (&["info", "--limit-memory", "x", "x"][..], "is not a size"),
        (&["info", "--limit-memory", "0", "x"], "must be at least 1M"),
        (&["info", "--limit-memory", "1000k", "x"], "must be at least 1M"),
        (&["info", "--limit-time", "0", "x"], "0"),
    ] {
        let ours = Answer::from(bed.limosa(words));
        assert_eq!((ours.status, ours.stdout.as_str()), (Some(1), ""), "{ours:?}");
        assert!(ours.stderr.contains(says), "{ours:?}");
    }
    std::fs::write(bed.path("disk"), [1; 4096]).unwrap();
    // A bare number is seconds.
    bed.limosa(&["info", "--limit-time", "100", "--limit-memory", "64M", "-f", "raw", "disk"]).success();
}
