//! `limosa bench` from outside, with as little memory as it takes: every cell runs, and every target that it has has a figure.

mod stage;

use serde_json::Value;
use stage::limosa;

/// Runs it and expects these contestants, and a figure for at least so many targets. (CPU seconds of so little work can be
/// less than the clock shows, and nothing is divided by them then.)
#[track_caller]
fn runs(words: &[&str], contestants: usize, targets: usize) -> Value {
    let mut all = vec!["bench"];
    all.extend(words);
    all.extend(["--rounds", "1", "--json"]);
    let report = limosa(all).json();
    assert_eq!(report["cases"].as_array().unwrap().len(), contestants, "{report}");
    let shown = report["targets"].as_array().unwrap().iter().filter(|target| target["met"].is_boolean()).count();
    assert!(shown >= targets, "{report}");
    report
}

#[test]
fn both_senders_of_an_eager_restore_are_measured_on_every_number_of_channels() {
    needs_qemu!();
    let report = runs(&["restore", "--size", "256M", "--only", "64 MiB eagerly"], 8, 4);
    for case in report["cases"].as_array().unwrap() {
        let pages = case["counters"]["pages"].as_u64().unwrap();
        assert!(case["counters"]["sender_cpu_ms"].is_u64(), "{case}");
        assert!((16_000..18_000).contains(&pages), "{case}");
    }
}

#[test]
fn a_save_is_measured_on_several_channels() {
    needs_qemu!();
    let report = runs(&["save", "--size", "64M", "--only", "tmpfs"], 8, 2);
    let with = |word: &str| {
        report["cases"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|case| case["variant"].as_str().unwrap().contains(word))
            .count()
    };
    assert_eq!((with("channels"), with("zstd")), (4, 2), "{report}");
}

#[test]
fn both_pairs_are_measured_on_every_number_of_channels_and_transport() {
    needs_qemu!();
    let report = runs(&["stream", "--size", "64M", "--against", "qemu", "--only", "64 MiB over"], 12, 1);
    for case in report["cases"].as_array().unwrap() {
        let pages = case["counters"]["pages"].as_u64().unwrap();
        // QEMU's VM has firmware besides.
        assert!((16_384..17_500).contains(&pages), "{case}");
    }
}

#[test]
fn limosa_streams_by_itself_where_there_is_no_qemu() {
    let report = runs(&["stream", "--size", "32M"], 11, 4);
    let pages = |case: &str| {
        let cases = report["cases"].as_array().unwrap();
        cases.iter().find(|found| found["case"] == case).unwrap()["counters"]["pages"].as_u64().unwrap()
    };
    assert_eq!((pages("32 MiB over tcp"), pages("512 MiB, one page of 16")), (8192, 8192), "{report}");
}
