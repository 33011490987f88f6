//! limosa-bench from outside, with as little memory as it takes: every cell runs, and every target that it has has a
//! figure.

use std::ffi::OsStr;
use std::process::Command;

use limosa_testkit::{Ended, Program, qemu_skipped, series_skipped, skipped, stores_skipped};
use serde_json::Value;

/// Runs limosa-bench to its end.
fn bench<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Ended {
    let mut command = Command::new(env!("CARGO_BIN_EXE_limosa-bench"));
    command.args(arguments);
    Program::start("limosa-bench", command).wait()
}

/// Whether this is measured between network namespaces, which not every machine lets one make.
fn over_veth(case: &Value) -> bool {
    case["case"].as_str().unwrap().contains("over veth")
}

/// The same of a QEMU in its own network.
fn by_reno(case: &Value) -> bool {
    case["variant"].as_str().unwrap().contains("by Reno")
}

/// Runs it and expects these contestants beside those between network namespaces, and a figure for at least this many
/// targets. (CPU seconds of so little work can be less than the clock shows, and nothing is divided by them then.)
#[track_caller]
fn runs(words: &[&str], contestants: usize, targets: usize) -> Value {
    let mut all = words.to_vec();
    all.extend(["--rounds", "1", "--json"]);
    let report = bench(all).json();
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.iter().filter(|case| !over_veth(case) && !by_reno(case)).count(), contestants, "{report}");
    let shown = report["targets"].as_array().unwrap().iter().filter(|target| target["met"].is_boolean()).count();
    assert!(shown >= targets, "{report}");
    report
}

#[test]
fn both_senders_of_an_eager_restore_are_measured_on_every_number_of_channels() {
    if qemu_skipped() {
        return;
    }
    let report = runs(&["restore", "--size", "256M", "--only", "64 MiB eagerly"], 8, 4);
    for case in report["cases"].as_array().unwrap() {
        let pages = case["counters"]["pages"].as_u64().unwrap();
        assert!(case["counters"]["sender_cpu_ms"].is_u64(), "{case}");
        assert!((16_000..18_000).contains(&pages), "{case}");
    }
}

#[test]
fn vms_of_one_snapshot_are_started_in_every_way_and_clones_share_its_memory() {
    if qemu_skipped() {
        return;
    }
    // Warm: six ways until the first beat, five of them with contents to read.
    let report = runs(&["clone", "--size", "128M", "--count", "2", "--only", "2 x 128 MiB warm"], 6 + 5, 4);
    let cases = report["cases"].as_array().unwrap();
    let kib = |variant: &str, name: &str| {
        let part = if name == "pss_idle_kib" { "first beats" } else { "reading" };
        let case = format!("2 x 128 MiB warm: {part}");
        let found = cases.iter().find(|found| found["case"] == case && found["variant"] == variant);
        found.unwrap()["counters"][name].as_u64().unwrap()
    };
    // Contents of 64 MiB: once for all clones, twice where each has its own.
    let own = kib("QEMU without a snapshot", "pss_idle_kib");
    for variant in ["limosa mapped", "limosa mapped, working set", "limosa mapped, from a pool"] {
        assert!(kib(variant, "pss_idle_kib") < own + (64 << 10), "{report}");
        assert!(kib(variant, "pss_read_kib") < own + (96 << 10), "{report}");
        // What a guest has written is its own, and no longer the file's.
        let written = kib(variant, "pss_written_kib") - kib(variant, "pss_read_kib");
        // 32 MiB, less up to 4 MiB for each of the two QEMUs, which give memory of their own back meanwhile. Measured
        // alone: 24.3, 28.7 or 32.7 MiB.
        assert!(((20 << 10)..(40 << 10)).contains(&written), "{written} KiB: {report}");
    }
    for variant in ["QEMU mapped-ram, multifd", "limosa lazy"] {
        assert!(kib(variant, "pss_read_kib") > own + (96 << 10), "{report}");
    }
}

#[test]
fn a_vm_is_packed_saved_packed_and_restored_from_it() {
    if qemu_skipped() {
        return;
    }
    // Packing, three ways and zstd; saving, three and QEMU; restoring, three.
    let report = runs(&["packed", "--size", "64M"], 4 + 4 + 3, 4);
    for case in report["cases"].as_array().unwrap() {
        let restored = case["case"].as_str().unwrap().ends_with("restored lazily");
        assert_eq!(case["counters"]["file_kib"].is_u64(), !restored, "{case}");
    }
}

#[test]
fn a_vm_in_an_object_store_is_restored_in_every_way() {
    if qemu_skipped() || stores_skipped() {
        return;
    }
    // Three latencies, four ways, three times; two VMs, two times; up and down.
    let report = runs(&["remote", "--size", "64M"], 3 * 4 * 3 + 2 * 2 + 2, 6 + 1 + 2 + 2);
    for case in report["cases"].as_array().unwrap() {
        // The other parts of a restore have no counters.
        let name = case["case"].as_str().unwrap();
        let whole = name.ends_with("all memory there") || name.contains("random bytes");
        assert_eq!(case["counters"]["requests"].as_u64() > Some(0), whole, "{case}");
        let is_warm = case["variant"] == "lazy, warm cache";
        assert!(!is_warm || !whole || case["counters"]["bytes_received"].as_u64() < Some(1 << 20), "{case}");
    }
}

#[test]
fn a_cold_snapshot_is_read_from_disk() {
    if qemu_skipped() {
        return;
    }
    // Not in the temporary directory, which may be in memory.
    let dir = env!("CARGO_TARGET_TMPDIR");
    let words = ["clone", "--size", "128M", "--count", "1", "--only", "1 x 128 MiB cold", "--dir", dir];
    let report = runs(&words, 2 * 5, 1);
    for case in report["cases"].as_array().unwrap() {
        let reads = case["case"].as_str().unwrap().ends_with("reading");
        assert!(!reads || case["counters"]["paged_in_mib"].as_u64().unwrap() >= 64, "{case}");
    }
}

#[test]
fn every_command_on_images_is_measured_beside_qemu_img() {
    if qemu_skipped() {
        return;
    }
    // Direct files are not what every temporary directory has.
    let dir = env!("CARGO_TARGET_TMPDIR");
    let report = runs(&["img", "--size", "4M", "--dir", dir], 2 * (33 + 8) + 2 * 3, 33 + 2 + 8 + 1);
    for case in report["cases"].as_array().unwrap() {
        let variant = case["variant"].as_str().unwrap();
        let peak = case["counters"]["peak_rss_kib"].as_u64().unwrap_or(0);
        assert!(peak > 1000 || variant.starts_with("cipher"), "{case}");
    }
    let result = |case: &str, variant: &str| {
        let mut cases = report["cases"].as_array().unwrap().iter();
        let found = cases.find(|found| found["case"] == case && found["variant"] == variant);
        found.unwrap()["counters"]["result_kib"].as_u64().unwrap()
    };
    for variant in ["limosa", "qemu-img"] {
        assert_eq!(result("convert qcow2 to raw", variant), 4096);
        assert!((500..1800).contains(&result("compress zlib", variant)), "{report}");
    }
}

#[test]
fn checkpoints_are_watched_in_every_way_and_a_vm_is_continued_warm_and_cold() {
    if qemu_skipped() || series_skipped() {
        return;
    }
    let report = runs(&["protect", "--only", "same data"], 3, 1);
    for case in report["cases"].as_array().unwrap() {
        assert!(case["counters"]["checkpoints"].as_u64() > Some(3), "{case}");
    }
    let kept = &report["cases"][0]["counters"];
    assert!(kept["pages"].as_u64() > Some(8192) && kept["kept_permille"].as_u64() < Some(500), "{report}");
    let report = runs(&["protect", "--only", "failover, 1 GiB"], 3, 2);
    for case in report["cases"].as_array().unwrap() {
        assert!(case["counters"]["first_beat_us"].as_u64() > Some(0), "{case}");
        let is_announced = case["variant"] != "QEMU's start alone";
        assert_eq!(case["counters"]["first_frame_us"].is_u64(), is_announced, "{case}");
    }
    let report = runs(&["protect", "--only", "network limosa protect --every event"], 1, 0);
    assert!(report["cases"][0]["counters"]["answer_median_us"].as_u64() > Some(0), "{report}");
}

#[test]
fn a_save_is_measured_on_several_channels() {
    if qemu_skipped() {
        return;
    }
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
fn a_balloon_is_measured_where_no_linux_guest_is_named() {
    let report = runs(&["free-page", "--size", "256M"], 6, 0);
    for case in report["cases"].as_array().unwrap() {
        assert_eq!(case["counters"]["discarded_mib"], 224, "{case}");
    }
    for target in report["targets"].as_array().unwrap() {
        assert!(target["why"].as_str().unwrap().contains("LIMOSA_GUEST"), "{target}");
    }
}

#[test]
fn every_way_of_sending_pages_is_measured_idle_and_under_stress() {
    // tcp has three of them, a unix socket two; over 1, 2, 4 and 8 channels.
    let report = runs(&["zero-copy", "--size", "16M"], 2 * (3 + 2) * 4, 2);
    for case in report["cases"].as_array().unwrap() {
        let (variant, counters) = (case["variant"].as_str().unwrap(), &case["counters"]);
        let count = |name: &str| counters[name].as_u64().unwrap();
        assert_eq!(count("pages"), 4096, "{case}");
        assert_eq!(count("spliced"), if variant.starts_with("splice") { 16 << 20 } else { 0 }, "{case}");
        assert_eq!(count("lent") != 0, variant.starts_with("msg"), "{case}");
        assert_eq!(count("lent"), count("lent_completed"), "{case}");
    }
}

#[test]
fn both_pairs_are_measured_on_every_number_of_channels_and_transport() {
    if qemu_skipped() {
        return;
    }
    let report = runs(&["stream", "--size", "64M", "--against", "qemu", "--only", "64 MiB over"], 18, 2);
    let by_reno = report["cases"].as_array().unwrap().iter().filter(|case| by_reno(case)).count();
    if !skipped("LIMOSA_SKIP_NETNS") {
        assert_eq!(by_reno, 1, "needs root and iproute2, or skip with LIMOSA_SKIP_NETNS=1: {report}");
    }
    for case in report["cases"].as_array().unwrap() {
        let pages = case["counters"]["pages"].as_u64().unwrap();
        // QEMU's VM has firmware besides.
        assert!((16_384..17_500).contains(&pages), "{case}");
    }
}

#[test]
fn limosa_streams_by_itself_where_there_is_no_qemu() {
    let report = runs(&["stream", "--size", "32M"], 41, 24);
    let cases = report["cases"].as_array().unwrap();
    let counter = |case: &str, variant: &str, name: &str| {
        let found = cases.iter().find(|found| found["case"] == case && found["variant"] == variant);
        found.unwrap()["counters"][name].as_u64().unwrap()
    };
    assert_eq!(counter("32 MiB over tcp", "limosa, 2 channels", "pages"), 8192);
    assert_eq!(counter("32 MiB over tcp", "write and read, 2 connections", "bytes"), 32 << 20);
    assert_eq!(counter("512 MiB, one page of 16", "limosa, 2 channels", "pages"), 8192);
    for (case, pages) in
        [("records, 32 MiB, cold, over unix", 8192), ("records, 32 MiB, half zero, cold, over tcp", 4096)]
    {
        for variant in ["copied", "gathered"] {
            assert_eq!(counter(case, variant, "pages"), pages);
            assert_eq!(counter(case, variant, "zero_pages"), 8192 - pages);
        }
        // Batches of 480 to 512 pages with contents, and what goes before and after them.
        let batches = pages / 512..pages / 480 + 11;
        assert!(batches.contains(&counter(case, "gathered", "writes")), "{report}");
        assert!(counter(case, "copied", "writes") >= pages / 4, "{report}");
    }
    for variant in ["1 page, a packet", "64 pages, a packet", "128 pages, a packet"] {
        let packets = 8192 / variant.split(' ').next().unwrap().parse::<u64>().unwrap();
        let writes = counter("headers, 32 MiB, cold, over tcp", variant, "writes");
        assert!((packets..packets + 40).contains(&writes), "{variant}: {writes} writes");
    }
    assert!(counter("neighbour of 32 MiB, cold, over tcp at 1 GbE", "alone", "neighbour_ps_per_step") > 0);
    let apart = cases.iter().filter(|case| over_veth(case)).count();
    if !skipped("LIMOSA_SKIP_NETNS") {
        assert_eq!(apart, 8, "needs root and iproute2, or skip with LIMOSA_SKIP_NETNS=1: {report}");
    }
}

#[test]
fn pages_in_memory_and_in_cache_are_looked_at_in_every_way() {
    for place in ["cold", "hot"] {
        let report = bench(["zero-page", "--size", "4M", "--only", place, "--rounds", "1", "--json"]).json();
        let cases = report["cases"].as_array().unwrap();
        for contents in ["zero", "random bytes", "differs early", "differs in the middle", "differs late", "mixed"] {
            for variant in
                ["the compiler's loop", "16 bytes at a time", "is_zero", "portable, page by page", "portable, in runs"]
            {
                let case = format!("{place}, {contents}");
                let found = cases.iter().find(|found| found["case"] == *case && found["variant"] == variant);
                assert!(found.unwrap()["counters"]["ps_per_page"].as_u64().unwrap() > 0, "{case}, {variant}: {report}");
            }
        }
        let shown = report["targets"].as_array().unwrap().iter().filter(|target| target["met"].is_boolean()).count();
        // Memory that fits into a cache shows nothing of memory that does not.
        assert_eq!(shown, if place == "hot" { 2 } else { 0 }, "{report}");
    }
}

#[test]
fn guests_with_zero_pages_move_in_every_way_and_only_pages_that_are_looked_at_are_found_zero() {
    let report = runs(&["zero-page", "--size", "8M", "--only", "zero-heavy guest"], 8, 2);
    let zeros = |case: &Value| case["counters"]["zero_pages"].as_u64().unwrap();
    for case in report["cases"].as_array().unwrap() {
        assert_eq!(zeros(case), if case["variant"] == "off" { 0 } else { 4096 / 32 * 31 }, "{case}");
    }
    let report = runs(&["zero-page", "--size", "8M", "--only", "guest that"], 16, 0);
    for case in report["cases"].as_array().unwrap() {
        let looked = case["variant"].as_str().unwrap().starts_with("always");
        let zeroes = case["case"].as_str().unwrap().starts_with("guest that zeroes");
        assert_eq!(zeros(case), if looked && zeroes { 3 * 1024 / 4 } else { 0 }, "{case}");
    }
    let report = runs(&["zero-page", "--size", "8M", "--only", "holes"], 6, 0);
    for case in report["cases"].as_array().unwrap() {
        let allocates = case["variant"] == "every page read" && case["case"] != "holes, none";
        assert_eq!(case["counters"]["mib_allocated"].as_u64().unwrap() > 0, allocates, "{case}");
    }
}

#[test]
fn what_cannot_be_measured_without_network_namespaces_is_no_error_and_says_why() {
    let mut command = Command::new("setpriv");
    command.arg("--no-new-privs");
    if rustix::process::geteuid().is_root() {
        // Only root could make them anyway.
        command.args(["--bounding-set", "-sys_admin"]);
    }
    command.arg(env!("CARGO_BIN_EXE_limosa-bench"));
    command.args(["stream", "--size", "32M", "--rounds", "1", "--json"]);
    command.args(["--only", "records, 32 MiB, cold, over veth"]);
    let report = Program::start("limosa-bench", command).wait().json();
    assert_eq!(report["cases"].as_array().unwrap().len(), 0, "{report}");
    let targets = report["targets"].as_array().unwrap().iter();
    let over_veth: Vec<_> = targets.filter(|target| target["name"].as_str().unwrap().contains("over veth")).collect();
    assert!(over_veth.len() >= 4, "{report}");
    for target in over_veth {
        assert!(target["met"].is_null() && target["why"].as_str().unwrap().contains("unshare"), "{target}");
    }
}
