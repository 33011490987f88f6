//! `snapshot`.

use std::os::unix::fs::MetadataExt as _;

use limosa_storage::testing::SeededRandom;
use rustix::process::Signal;

use crate::bed::{Answer, Bed, assert_one_line};
use crate::needs_qemu;

/// The contents of an image, or of one of its snapshots.
#[track_caller]
fn seen(bed: &Bed, name: &str, snapshot: Option<&str>) -> Vec<u8> {
    let choice = snapshot.map(|snapshot| format!("snapshot.name={snapshot}"));
    let mut words = vec!["convert", "-f", "qcow2", "-O", "raw"];
    words.extend(choice.iter().flat_map(|choice| ["-l", choice]));
    words.extend([name, "seen"]);
    bed.qemu_img(&words).success();
    std::fs::read(bed.path("seen")).unwrap()
}

/// The names of an image's snapshots, as stock lists them.
fn names(bed: &Bed, name: &str) -> Vec<[String; 2]> {
    let info = bed.qemu_img(&["info", "--output=json", name]).success().json();
    let all = info["snapshots"].as_array().cloned().unwrap_or_default();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    all.iter().map(|snapshot| [text(&snapshot["id"]), text(&snapshot["name"])]).collect()
}

const OPTIONS: [&str; 5] = [
    "cluster_size=64k",
    "cluster_size=4k,refcount_bits=8",
    "cluster_size=512,refcount_bits=64",
    "extended_l2=on,cluster_size=16k",
    "compat=0.10",
];

/// Writes somewhere.
fn write(bed: &Bed, chance: &mut SeededRandom, name: &str) {
    let writes: Vec<_> = (0..6)
        .map(|_| {
            let at = 512 * chance.below(4000);
            let how = *chance.choose(&["-P 1", "-P 2", "-P 3", "-z"]);
            format!("write -q {how} {at} {}", 512 * (1 + chance.below(90)))
        })
        .collect();
    bed.qemu_io(name, &writes.iter().map(String::as_str).collect::<Vec<_>>());
}

#[test]
fn snapshots_are_taken_applied_and_deleted_as_by_stock() {
    needs_qemu!();
    for (seed, options) in (0..).zip(OPTIONS) {
        let bed = Bed::new();
        let mut chance = SeededRandom::new(seed);
        bed.create(&["-f", "qcow2", "below", "3M"]);
        bed.qemu_io("below", &["write -q -P 7 0 3M"]);
        bed.create(&["-f", "qcow2", "-b", "below", "-F", "qcow2", "-o", options, "ours", "3M"]);
        write(&bed, &mut chance, "ours");
        std::fs::copy(bed.path("ours"), bed.path("stock")).unwrap();
        let mut number = 0;
        for _ in 0..14 {
            let known = names(&bed, "ours");
            let kind = chance.below(4);
            let name = if kind == 0 || known.is_empty() {
                number += 1;
                format!("s{number}")
            } else {
                chance.choose(&known)[1].clone()
            };
            let action = match kind {
                _ if !known.iter().any(|[_, other]| *other == name) => "-c",
                1 => "-a",
                2 => "-d",
                _ => {
                    let at = chance.bits();
                    for image in ["ours", "stock"] {
                        write(&bed, &mut SeededRandom::new(at), image);
                    }
                    continue;
                }
            };
            let words = |image| ["snapshot", action, &name, image];
            let what = format!("{options}: {action} {name}");
            bed.qemu_img(&words("stock")).success();
            let ours = Answer::from(bed.limosa(&words("ours")));
            assert_eq!((ours.status, ours.stdout.as_str(), ours.stderr.as_str()), (Some(0), "", ""), "{what}");
            bed.qemu_img(&["check", "-q", "-f", "qcow2", "ours"]).success();
            assert_eq!(names(&bed, "ours"), names(&bed, "stock"), "{what}");
            assert!(seen(&bed, "ours", None) == seen(&bed, "stock", None), "{what}");
            for [_, snapshot] in names(&bed, "ours") {
                let both = ["ours", "stock"].map(|image| seen(&bed, image, Some(&snapshot)));
                assert!(both[0] == both[1], "{what}: {snapshot}");
            }
        }
    }
}

#[test]
fn snapshots_are_listed_as_by_stock() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "x", "1M"]);
    bed.create(&["-f", "raw", "flat", "1M"]);
    bed.both_say(&["snapshot", "-l", "x"]);
    bed.both_say(&["snapshot", "-l", "-f", "raw", "flat"]);
    bed.limosa(&["snapshot", "-c", "before the upgrade", "x"]).success();
    bed.qemu_img(&["snapshot", "-c", "after", "x"]).success();
    // Times are in the zone that stock takes from its surroundings.
    bed.both_say(&["snapshot", "-l", "-U", "x"]);
    bed.both_say(&["snapshot", "-l", "--image-opts", "driver=qcow2,file.filename=x"]);
    let list: serde_json::Value =
        serde_json::from_str(&bed.limosa(&["snapshot", "-l", "--json", "x"]).success().stdout).unwrap();
    assert_eq!((&list[0]["name"], &list[1]["id"]), (&"before the upgrade".into(), &"2".into()));
}

#[test]
fn a_disk_has_the_length_of_the_snapshot_that_is_applied() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "x", "1M"]);
    bed.qemu_io("x", &["write -q -P 1 0 1M"]);
    bed.limosa(&["snapshot", "-c", "short", "x"]).success();
    bed.qemu_img(&["resize", "x", "5G"]).success();
    bed.qemu_io("x", &["write -q -P 2 4G 1M"]);
    bed.limosa(&["snapshot", "-c", "long", "x"]).success();
    for (name, size) in [("short", 1_u64 << 20), ("long", 5 << 30)] {
        bed.limosa(&["snapshot", "-a", name, "x"]).success();
        bed.qemu_img(&["check", "-q", "x"]).success();
        assert_eq!(bed.qemu_img(&["info", "--output=json", "x"]).json()["virtual-size"], size);
    }
    bed.qemu_io("x", &["read -q -P 2 4G 1M", "read -q -P 1 0 1M"]);
}

#[test]
fn a_snapshot_is_not_applied_to_an_image_with_bitmaps_as_by_stock() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "x", "1M"]);
    bed.limosa(&["snapshot", "-c", "s", "x"]).success();
    for name in ["a", "off"] {
        bed.limosa(&["bitmap", "--add", "x", name]).success();
    }
    bed.limosa(&["bitmap", "--disable", "x", "off"]).success();
    let before = std::fs::read(bed.path("x")).unwrap();
    let says = "a snapshot cannot be applied while the image has bitmaps \"a\", \"off\": remove them first";
    let words = ["snapshot", "-a", "s", "x"];
    assert_one_line(&bed.limosa(&words).into(), &words, says);
    assert!(std::fs::read(bed.path("x")).unwrap() == before, "it is not written");
    bed.both_refuse(&words, says);
    bed.limosa(&["bitmap", "--remove", "x", "a"]).success();
    bed.both_refuse(&["snapshot", "-a", "s", "x"], "bitmap \"off\": remove it first");
    bed.limosa(&["bitmap", "--remove", "x", "off"]).success();
    bed.limosa(&["snapshot", "-a", "s", "x"]).success();
    bed.qemu_img(&["check", "-q", "x"]).success();
}

#[test]
fn a_change_that_is_killed_leaves_the_disk_and_all_snapshots() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "-o", "cluster_size=512", "x", "8M"]);
    bed.qemu_io("x", &["write -q -P 1 0 8M"]);
    bed.qemu_img(&["snapshot", "-c", "kept", "x"]).success();
    bed.qemu_io("x", &["write -q -P 2 1M 3M"]);
    let [now, kept] = [None, Some("kept")].map(|snapshot| seen(&bed, "x", snapshot));
    let mut killed = 0;
    for round in 0_u64..24 {
        let there = names(&bed, "x").len() > 1;
        let running = bed.start(&["snapshot", if there { "-d" } else { "-c" }, "more", "x"]);
        std::thread::sleep(std::time::Duration::from_millis(2 * round));
        running.signal(Signal::KILL);
        killed += u32::from(!running.wait().status.success());
        bed.wait_unlocked("x");
        let status = bed.qemu_img(&["check", "-q", "x"]).status;
        assert!(matches!(status, Some(0 | 2 | 3)), "round {round}: {status:?}");
        for (snapshot, expected) in [(None, &now), (Some("kept"), &kept)] {
            assert!(seen(&bed, "x", snapshot) == *expected, "round {round}: {snapshot:?}");
        }
        bed.limosa(&["check", "-q", "-r", "all", "x"]).success();
        bed.qemu_img(&["check", "-q", "x"]).success();
        for (snapshot, expected) in [(None, &now), (Some("kept"), &kept)] {
            assert!(seen(&bed, "x", snapshot) == *expected, "repaired in round {round}: {snapshot:?}");
        }
    }
    println!("{killed} killed");
    assert!(killed > 0);
}

#[test]
fn what_cannot_be_is_refused_and_nothing_is_written() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "x", "1M"]);
    bed.create(&["-f", "qcow2", "-o", "refcount_bits=1", "narrow", "1M"]);
    bed.qemu_io("narrow", &["write -q 0 64k"]);
    bed.create(&["-f", "raw", "flat", "1M"]);
    bed.create(&["-f", "qcow2", "-o", "data_file=data", "outside", "1M"]);
    for (words, says) in [
        (&["-d", "absent", "x"][..], "absent"),
        (&["-a", "absent", "x"], "absent"),
        (&["-c", "s", "-f", "raw", "flat"], "raw"),
        (&["-c", "s", "narrow"], "1 bits"),
        (&["-c", "s", "outside"], "data file"),
        (&["-c", "s", "absent"], "absent"),
    ] {
        let before = |name: &str| std::fs::read(bed.path(name)).ok();
        let name = words.last().unwrap();
        let first = before(name);
        bed.both_refuse(&[&["snapshot"], words].concat(), says);
        bed.limosa(&["check", "-q", "-f", if *name == "flat" { "raw" } else { "qcow2" }, name]);
        if *name != "narrow" {
            assert!(before(name) == first, "{words:?}");
        }
    }
    let long = "s".repeat(256);
    let words = ["snapshot", "-c", &long, "x"];
    assert_one_line(&bed.limosa(&words).into(), &words, "255 bytes");
    for words in [
        &["-c", "a", "-d", "b", "x"][..],
        &["-l", "-a", "b", "x"],
        &["-U", "-c", "a", "x"],
        &["-c", "a", "-c", "b", "x"],
    ] {
        assert_eq!(bed.limosa(&[&["snapshot"], words].concat()).status.code(), Some(1), "{words:?}");
    }
}

#[test]
fn space_that_a_snapshot_had_is_given_back() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "image", "16M"]);
    bed.qemu_io("image", &["write -P 1 0 16M"]);
    bed.qemu_img(&["snapshot", "-c", "s", "image"]).success();
    // Behind the snapshot's clusters, which are free afterwards, in the middle of the file.
    bed.qemu_io("image", &["write -P 2 0 16M"]);
    let before = seen(&bed, "image", None);
    let taken = || std::fs::metadata(bed.path("image")).unwrap().blocks() * 512;
    assert!(taken() > 32 << 20);
    Answer::from(bed.limosa(&["snapshot", "-d", "s", "image"])).success();
    assert!(taken() < 20 << 20, "{}", taken());
    assert!(seen(&bed, "image", None) == before);
    bed.qemu_img(&["check", "-q", "image"]).success();
}
