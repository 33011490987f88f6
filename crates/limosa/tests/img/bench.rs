//! `bench`.

use crate::bed::Bed;
use crate::needs_qemu;

/// Its output without the time.
fn without_times(text: &str) -> String {
    let lines = text.lines().map(|line| line.split_once("completed in").map_or(line, |(before, _)| before));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_same_load_is_put_on_an_image() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "raw", "disk", "1M"]);
    for words in [
        &["bench", "-f", "raw", "-c", "100", "disk"][..],
        // Quiet, it says the same.
        &["bench", "-q", "-f", "raw", "-c", "5", "disk"],
        &["bench", "-f", "raw", "-c", "20", "-w", "-d", "4", "--flush-interval", "5", "disk"],
        &["bench", "-f", "raw", "-c", "300", "-w", "-s", "8k", "-S", "16k", "-o", "64k", "--pattern", "7", "disk"],
    ] {
        let (ours, stock) = (bed.limosa(words).success(), bed.qemu_img(words).success());
        assert_eq!(without_times(&ours.stdout), without_times(&stock.stdout), "{words:?}");
    }
    let bytes = std::fs::read(bed.path("disk")).unwrap();
    assert!(bytes[65536..73728].iter().all(|&byte| byte == 7) && bytes[73728] != 7);
}

#[test]
fn a_request_behind_the_end_fails() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "raw", "disk", "1M"]);
    bed.both_refuse(&["bench", "-f", "raw", "-c", "10", "-o", "1M", "disk"], "at byte 1048576");
}

#[test]
fn programs_see_figures() {
    let bed = Bed::new();
    bed.create(&["-f", "raw", "disk", "1M"]);
    let report = bed.limosa(&["bench", "--json", "-f", "raw", "-c", "10", "-w", "disk"]).success().stdout;
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!((&report["requests"], &report["bytes"], &report["flushes"]), (&10.into(), &40_960.into(), &0.into()));
    assert!(report["requests-per-second"].as_f64().unwrap() > 0.0);
}

#[test]
fn what_is_kept_of_clusters_is_copied_or_cloned_to_the_same_bytes() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("below"), vec![7; 4 << 20]).unwrap();
    for clone in ["off", "auto", "64K"] {
        bed.create(&["-f", "qcow2", "-o", "cluster_size=1M", "-b", "below", "-F", "raw", "disk"]);
        let words =
            ["bench", "-f", "qcow2", "-w", "-c", "4", "-S", "1M", "-o", "4k", "--pattern", "3", "--clone", clone];
        bed.limosa(&[&words[..], &["disk"]].concat()).success();
        bed.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", "disk", "seen"]).success();
        let seen = std::fs::read(bed.path("seen")).unwrap();
        let is_written = |at: usize| (4096..8192).contains(&(at % (1 << 20)));
        assert!(seen.iter().enumerate().all(|(at, &byte)| byte == if is_written(at) { 3 } else { 7 }), "{clone}");
    }
}
