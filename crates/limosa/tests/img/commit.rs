//! `commit`.

use rustix::process::Signal;

use crate::bed::{Answer, Bed, assert_one_line, length, poke};
use crate::needs_qemu;

/// Three images over each other, and one that is longer than what is below it.
fn chain(bed: &Bed, base_format: &str) {
    if base_format == "raw" {
        std::fs::write(bed.path("base"), vec![5; 3 << 20]).unwrap();
    } else {
        bed.create(&["-f", "qcow2", "base", "3M"]);
        bed.qemu_io("base", &["write -q -P 1 0 1M", "write -q -P 2 2M 1M"]);
    }
    bed.create(&["-f", "qcow2", "-b", "base", "-F", base_format, "-o", "cluster_size=4k", "middle", "2M"]);
    bed.qemu_io("middle", &["write -q -P 3 100k 300k", "write -q -z 1M 64k"]);
    bed.create(&["-f", "qcow2", "-b", "middle", "-F", "qcow2", "top", "4M"]);
    bed.qemu_io("top", &["write -q -P 4 200k 10k", "write -q -z 600k 128k", "write -q -P 6 3500k 70k"]);
    bed.qemu_img(&["convert", "-O", "raw", "top", "seen"]).success();
}

/// Puts copies of the chain into a folder, and returns them to their names afterwards.
fn copies(bed: &Bed, names: &[&str]) -> Vec<Vec<u8>> {
    names.iter().map(|name| std::fs::read(bed.path(name)).unwrap()).collect()
}

fn restore(bed: &Bed, names: &[&str], bytes: &[Vec<u8>]) {
    for (name, bytes) in names.iter().zip(bytes) {
        std::fs::write(bed.path(name), bytes).unwrap();
    }
}

const NAMES: [&str; 3] = ["base", "middle", "top"];

/// Has both commit, and expects the same output, the same contents of all images, and the same map of the overlay.
#[track_caller]
fn both_commit(bed: &Bed, words: &[&str], formats: &[&str]) {
    let first = copies(bed, &NAMES);
    let words = [&["commit"], words].concat();
    let stock = bed.qemu_img(&words).success();
    // Bytes that the overlay has itself.
    let own = || -> u64 {
        let runs = bed.qemu_img(&["map", "--output=json", "top"]).json();
        let all = runs.as_array().unwrap().iter().filter(|run| run["depth"] == 0 && run["present"] == true);
        all.map(|run| run["length"].as_u64().unwrap()).sum()
    };
    let found = copies(bed, &NAMES);
    let before = own();
    restore(bed, &NAMES, &first);
    let ours = Answer::from(bed.limosa(&words));
    // Lines of progress are one over the other; how many there are depends on the requests.
    let last =
        |stdout: &str| stdout.rsplit_once("\r    ").map_or_else(|| stdout.to_owned(), |(_, last)| last.to_owned());
    assert_eq!((ours.status, last(&ours.stdout)), (stock.status, last(&stock.stdout)), "{words:?}: {ours:?}");
    assert_eq!(ours.stderr, "", "{words:?}");
    assert_eq!(own(), before, "{words:?}");
    for ((name, format), bytes) in NAMES.iter().zip(formats).zip(found) {
        std::fs::write(bed.path("stock"), bytes).unwrap();
        bed.qemu_img(&["compare", "-f", format, "-F", format, name, "stock"]).success();
        if *format == "qcow2" {
            bed.qemu_img(&["check", "-q", "-f", "qcow2", name]).success();
        }
    }
    bed.qemu_img(&["compare", "-f", "qcow2", "-F", "raw", "top", "seen"]).success();
    restore(bed, &NAMES, &first);
}

#[test]
fn contents_go_into_the_base_as_with_stock() {
    needs_qemu!();
    for format in ["raw", "qcow2"] {
        let bed = Bed::new();
        chain(&bed, format);
        let formats = [format, "qcow2", "qcow2"];
        for words in [
            &["top"][..],
            &["-f", "qcow2", "-q", "top"],
            &["-d", "top"],
            &["-b", "base", "top"],
            &["-b", "middle", "-d", "top"],
            &["-t", "none", "-p", "top"],
            &["middle"],
        ] {
            if words == ["middle"] {
                // The overlay of an image that is emptied reads as before.
                let first = copies(&bed, &NAMES);
                bed.limosa(&["commit", "middle"]).success();
                bed.qemu_img(&["compare", "-f", "qcow2", "-F", "raw", "top", "seen"]).success();
                restore(&bed, &NAMES, &first);
                continue;
            }
            both_commit(&bed, words, &formats);
        }
    }
}

#[test]
fn an_emptied_overlay_is_small() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "base", "64M"]);
    for options in ["cluster_size=64k", "lazy_refcounts=on", "compat=0.10", "extended_l2=on"] {
        bed.create(&["-f", "qcow2", "-b", "base", "-F", "qcow2", "-o", options, "top"]);
        bed.qemu_io("top", &["write -q -P 2 512k 30M"]);
        bed.limosa(&["commit", "top"]).success();
        assert!(length(&bed.path("top")) < 1 << 20, "{options}: {}", length(&bed.path("top")));
        bed.qemu_img(&["check", "-q", "top"]).success();
        bed.qemu_io("top", &["read -q -P 2 512k 30M", "write -q -P 3 1M 1M", "read -q -P 2 2M 1M"]);
        bed.qemu_img(&["check", "-q", "top"]).success();
    }
}

#[test]
fn an_emptied_overlay_keeps_its_snapshots_and_bitmaps() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "base", "64M"]);
    bed.create(&["-f", "qcow2", "-b", "base", "-F", "qcow2", "top"]);
    bed.qemu_io("top", &["write -q -P 1 0 1M"]);
    bed.qemu_img(&["snapshot", "-c", "before", "top"]).success();
    bed.qemu_img(&["bitmap", "--add", "top", "since"]).success();
    bed.qemu_io("top", &["write -q -P 2 512k 30M"]);
    bed.qemu_img(&["convert", "-O", "raw", "-l", "before", "top", "then"]).success();
    bed.qemu_img(&["convert", "-O", "raw", "top", "now"]).success();
    let info = || bed.qemu_img(&["info", "--output=json", "top"]).success().json();
    let before = info();
    bed.limosa(&["commit", "top"]).success();
    bed.qemu_img(&["check", "-q", "top"]).success();
    bed.qemu_img(&["compare", "-F", "raw", "top", "now"]).success();
    bed.qemu_img(&["convert", "-O", "raw", "-l", "before", "top", "then-now"]).success();
    let [then, after] = ["then", "then-now"].map(|name| std::fs::read(bed.path(name)).unwrap());
    // What a snapshot does not have itself it reads from the base, as ever.
    assert!(then[..1 << 20] == after[..1 << 20]);
    for path in ["/format-specific/data/bitmaps", "/snapshots"] {
        assert_eq!(info().pointer(path), before.pointer(path), "{path}");
    }
    bed.qemu_io("top", &["write -q -P 3 1M 1M", "read -q -P 2 2M 1M", "read -q -P 3 1M 1M"]);
    bed.qemu_img(&["check", "-q", "top"]).success();
}

#[test]
fn a_commit_that_is_killed_leaves_the_overlay_as_it_was() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "base", "20M"]);
    bed.create(&["-f", "qcow2", "-b", "base", "-F", "qcow2", "-o", "cluster_size=4k", "top", "24M"]);
    let writes: Vec<_> = (0..48).map(|part| format!("write -q -P {} {} 300k", part + 1, part * 512 * 1024)).collect();
    bed.qemu_io("top", &writes.iter().map(String::as_str).collect::<Vec<_>>());
    bed.qemu_img(&["convert", "-O", "raw", "top", "seen"]).success();
    let (mut killed, mut done) = (0_u32, 0_u32);
    for round in 0_u64..20 {
        let running = bed.start(&["commit", "top"]);
        std::thread::sleep(std::time::Duration::from_millis(3 * round));
        running.signal(Signal::KILL);
        let ended = running.wait();
        done += u32::from(ended.status.success());
        killed += u32::from(!ended.status.success());
        for name in ["base", "top"] {
            bed.wait_unlocked(name);
            let status = bed.qemu_img(&["check", "-q", name]).status;
            assert!(matches!(status, Some(0 | 3)), "round {round}: {name}: {status:?}");
        }
        bed.qemu_img(&["compare", "-f", "qcow2", "-F", "raw", "top", "seen"]).success();
        if ended.status.success() {
            bed.qemu_io("top", &writes.iter().map(String::as_str).collect::<Vec<_>>());
        }
    }
    println!("{killed} killed, {done} done");
    assert!(killed > 0);
    bed.limosa(&["commit", "top"]).success();
    bed.qemu_img(&["compare", "-f", "qcow2", "-F", "raw", "top", "seen"]).success();
}

#[test]
fn what_cannot_be_committed_is_refused_and_nothing_is_written() {
    needs_qemu!();
    let bed = Bed::new();
    chain(&bed, "qcow2");
    bed.create(&["-f", "qcow2", "other", "1M"]);
    let first = copies(&bed, &NAMES);
    for (words, says) in [
        (&["base"][..], "no backing file"),
        (&["-f", "raw", "seen"], "no backing file"),
        (&["-b", "other", "top"], "other"),
        (&["-b", "absent", "top"], "absent"),
        (&["-b", "top", "top"], "top"),
        (&["absent"], "absent"),
        (&["-t", "fast", "top"], "fast"),
        (&["-r", "x", "top"], "x"),
    ] {
        if matches!(words, ["-t", ..] | ["-r", ..]) {
            assert_eq!(bed.limosa(&[&["commit"], words].concat()).status.code(), Some(1));
            continue;
        }
        bed.both_refuse(&[&["commit"], words].concat(), says);
    }
    let untrusted = ["commit", "--untrusted", "top"];
    assert_one_line(&bed.limosa(&untrusted).into(), &untrusted, "middle");
    // Marked as corrupt.
    poke(&bed.path("top"), 79, &[2]);
    bed.both_refuse(&["commit", "top"], "repair");
    poke(&bed.path("top"), 79, &[0]);
    assert!(copies(&bed, &NAMES) == first);
}

#[test]
fn figures_and_warnings_are_reported() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("base"), vec![5; 1 << 20]).unwrap();
    bed.create(&["-f", "qcow2", "-b", "base", "-F", "raw", "top", "1M"]);
    bed.qemu_io("top", &["write -q -P 1 64k 64k"]);
    // The format of the backing file becomes an extension that nobody knows.
    poke(&bed.path("top"), 112, &[1, 2, 3, 4]);
    let ended = bed.limosa(&["commit", "--json", "top"]).success();
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&report["bytes-written"], &report["length"]), (&65536.into(), &(1 << 20).into()));
    assert!(ended.stderr.contains("base: the overlay does not say its format"), "{}", ended.stderr);
}
