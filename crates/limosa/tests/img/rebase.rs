//! `rebase`.

use rustix::process::Signal;

use crate::bed::{Answer, Bed, assert_one_line};
use crate::needs_qemu;

/// An overlay over an old base, and new ones.
fn images(bed: &Bed) {
    bed.create(&["-f", "qcow2", "old", "3M"]);
    bed.qemu_io("old", &["write -q -P 1 0 1M", "write -q -P 2 2M 512k"]);
    bed.create(&["-f", "qcow2", "-b", "old", "-F", "qcow2", "middle", "3M"]);
    bed.qemu_io("middle", &["write -q -P 3 500k 300k", "write -q -z 2M 128k"]);
    bed.create(&["-f", "qcow2", "-b", "middle", "-F", "qcow2", "top", "4M"]);
    bed.qemu_io("top", &["write -q -P 4 200k 10k", "write -q -z 900k 128k", "write -q -P 6 3500k 70k"]);
    bed.create(&["-f", "qcow2", "new", "5M"]);
    bed.qemu_io("new", &["write -q -P 1 0 600k", "write -q -P 9 2500k 2500k"]);
    std::fs::write(bed.path("flat"), vec![8; 700_000]).unwrap();
    bed.qemu_img(&["convert", "-O", "raw", "top", "seen"]).success();
}

/// The backing file that an image names, and its format.
fn backing(bed: &Bed, name: &str) -> [serde_json::Value; 2] {
    let info = bed.qemu_img(&["info", "--output=json", name]).success().json();
    ["backing-filename", "backing-filename-format"].map(|key| info[key].clone())
}

/// Has both rebase, and expects the same output, backing file and contents.
#[track_caller]
fn both_rebase(bed: &Bed, words: &[&str]) {
    let first = std::fs::read(bed.path("top")).unwrap();
    let words = [&["rebase"], words, &["top"]].concat();
    let stock = bed.qemu_img(&words).success();
    let expected = backing(bed, "top");
    std::fs::write(bed.path("top"), &first).unwrap();
    let ours = Answer::from(bed.limosa(&words));
    // Lines of progress are one over the other; how many there are depends on the requests.
    let last =
        |stdout: &str| stdout.rsplit_once("\r    ").map_or_else(|| stdout.to_owned(), |(_, last)| last.to_owned());
    assert_eq!((ours.status, last(&ours.stdout)), (stock.status, last(&stock.stdout)), "{words:?}: {ours:?}");
    assert_eq!(ours.stderr, "", "{words:?}");
    assert_eq!(backing(bed, "top"), expected, "{words:?}");
    if !words.contains(&"-u") {
        bed.qemu_img(&["check", "-q", "top"]).success();
        bed.qemu_img(&["compare", "-f", "qcow2", "-F", "raw", "top", "seen"]).success();
    }
}

#[test]
fn an_overlay_reads_the_same_over_its_new_backing_file() {
    needs_qemu!();
    for words in [
        &["-b", "old", "-F", "qcow2"][..],
        &["-b", "new", "-F", "qcow2", "-p"],
        &["-b", "flat", "-F", "raw", "-q"],
        &["-b", "", "-t", "none", "-T", "none"],
        &["-f", "qcow2", "-b", "", "-F", "raw", "-p"],
        &["-U", "-b", "middle", "-F", "qcow2"],
    ] {
        let bed = Bed::new();
        images(&bed);
        both_rebase(&bed, words);
        // And back again, from there.
        both_rebase(&bed, &["-b", "old", "-F", "qcow2"]);
        both_rebase(&bed, &["-b", "new", "-F", "qcow2"]);
    }
}

#[test]
fn only_the_name_changes_if_that_is_asked_for() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    let long = format!("some/{}/where", "d".repeat(700));
    for words in [
        &["-u", "-b", "old", "-F", "qcow2"][..],
        &["-u", "-b", "/absent", "-F", "raw"],
        &["-u", "-b", &long, "-F", "raw"],
        &["-u", "-p", "-b", "a", "-F", "qcow2"],
        &["-u", "-b", ""],
        &["-u", "-b", &long, "-F", "raw"],
        &["-u"],
        &["-u", "-F", "raw"],
    ] {
        both_rebase(&bed, words);
    }
}

#[test]
fn contents_of_the_same_file_further_down_are_neither_read_nor_copied() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    let report = |words: &[&str]| -> serde_json::Value {
        let words = [&["rebase", "--json"], words, &["top"]].concat();
        serde_json::from_str(&bed.limosa(&words).success().stdout).unwrap()
    };
    let over_old = report(&["-b", "old", "-F", "qcow2"]);
    assert!(over_old["bytes-read"].as_u64().unwrap() < 2 << 20, "{over_old}");
    assert!(over_old["bytes-written"].as_u64().unwrap() < 512 << 10, "{over_old}");
    bed.qemu_img(&["compare", "-f", "qcow2", "-F", "raw", "top", "seen"]).success();
}

#[test]
fn bitmaps_stay_and_snapshots_are_warned_about() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    bed.qemu_img(&["bitmap", "--add", "top", "since"]).success();
    let bitmaps = || {
        let info = bed.qemu_img(&["info", "--output=json", "top"]).success().json();
        info.pointer("/format-specific/data/bitmaps").cloned()
    };
    let before = bitmaps();
    bed.limosa(&["rebase", "-b", "new", "-F", "qcow2", "top"]).success();
    assert_eq!(bitmaps(), before);
    bed.qemu_img(&["snapshot", "-c", "s", "top"]).success();
    let ended = bed.limosa(&["rebase", "-b", "old", "-F", "qcow2", "top"]).success();
    assert!(ended.stderr.contains("its 1 internal snapshots"), "{}", ended.stderr);
    bed.qemu_img(&["check", "-q", "top"]).success();
    bed.qemu_img(&["compare", "-f", "qcow2", "-F", "raw", "top", "seen"]).success();
}

#[test]
fn a_rebase_that_is_killed_leaves_an_overlay_that_reads_as_before() {
    needs_qemu!();
    let bed = Bed::new();
    for (name, pattern) in [("old", 1), ("new", 2)] {
        bed.create(&["-f", "qcow2", name, "32M"]);
        bed.qemu_io(name, &[&format!("write -q -P {pattern} 0 32M")]);
    }
    let mut killed = 0;
    for round in 0_u64..16 {
        bed.create(&["-f", "qcow2", "-b", "old", "-F", "qcow2", "-o", "cluster_size=4k", "top", "40M"]);
        let running = bed.start(&["rebase", "-b", "new", "-F", "qcow2", "top"]);
        std::thread::sleep(std::time::Duration::from_millis(8 * round));
        running.signal(Signal::KILL);
        killed += u32::from(!running.wait().status.success());
        bed.wait_unlocked("top");
        let status = bed.qemu_img(&["check", "-q", "top"]).status;
        assert!(matches!(status, Some(0 | 3)), "round {round}: {status:?}");
        bed.qemu_io("top", &["read -q -P 1 0 32M", "read -q -P 0 32M 8M"]);
    }
    println!("{killed} killed");
    assert!(killed > 0);
}

#[test]
fn what_cannot_be_rebased_is_refused_and_nothing_is_written() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    let first = std::fs::read(bed.path("top")).unwrap();
    let long = "d".repeat(1024);
    for (words, says) in [
        (&["top"][..], "backing"),
        (&["-b", "new", "top"], "-F"),
        (&["-u", "-b", "new", "top"], "-F"),
        (&["-b", "absent", "-F", "qcow2", "top"], "absent"),
        (&["-b", "new", "-F", "frob", "top"], "frob"),
        (&["-b", "new", "-F", "qcow2", "-f", "raw", "seen"], "qcow2"),
        (&["-b", "new", "-F", "qcow2", "absent"], "absent"),
        (&["-u", "-b", &long, "-F", "raw", "top"], "1024"),
        (&["-b", "top", "-F", "qcow2", "top"], "its own backing chain"),
    ] {
        if words == ["top"] {
            // Bad usage is said in more than one line.
            assert_eq!(bed.limosa(&["rebase", "top"]).status.code(), Some(1));
            continue;
        }
        let words = [&["rebase"], words].concat();
        let ours = Answer::from(bed.limosa(&words));
        assert_one_line(&ours, &words, says);
        assert!(std::fs::read(bed.path("top")).unwrap() == first, "{words:?}");
        assert_eq!(ours.status, bed.qemu_img(&words).status, "{words:?}");
        // Stock finds some of it out when it has copied.
        std::fs::write(bed.path("top"), &first).unwrap();
    }
    let untrusted = ["rebase", "--untrusted", "-b", "new", "-F", "qcow2", "top"];
    assert_one_line(&bed.limosa(&untrusted).into(), &untrusted, "middle");
    assert!(std::fs::read(bed.path("top")).unwrap() == first);
}
