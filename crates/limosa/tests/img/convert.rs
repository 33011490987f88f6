//! `convert`.

use std::os::unix::fs::MetadataExt as _;

use crate::bed::{Answer, Bed, assert_one_line, length, poke};
use crate::needs_qemu;

/// Images of many kinds, with their formats.
pub(crate) fn images(bed: &Bed) -> Vec<(&'static str, &'static str)> {
    bed.create(&["-f", "qcow2", "base", "10M"]);
    bed.qemu_io("base", &["write -P 1 0 100k", "write -z 1M 1M", "write -P 2 5M 4k", "write -P 0 6M 300k"]);
    bed.create(&["-f", "qcow2", "-b", "base", "-F", "qcow2", "overlay", "12M"]);
    bed.qemu_io("overlay", &["write -P 3 5M 64k", "discard 64k 64k", "write -P 9 11M 1000"]);
    bed.qemu_img(&["convert", "-c", "-O", "qcow2", "base", "packed"]).success();
    bed.create(&["-f", "raw", "holes", "3M"]);
    for at in [0, 4096, 12288, 1_000_000, 2_097_152, 3_145_727] {
        poke(&bed.path("holes"), at, b"x");
    }
    std::fs::write(bed.path("odd"), vec![5; 1000]).unwrap();
    bed.create(&["-f", "qcow2", "-o", "extended_l2=on,cluster_size=128k", "fine", "2M"]);
    bed.qemu_io("fine", &["write -P 1 6k 2k", "write -P 1 1M 100k", "write -z 1500k 10k"]);
    bed.create(&["-f", "qcow2", "-o", "preallocation=metadata", "aside", "3M"]);
    bed.qemu_io("aside", &["write -P 1 100k 10k", "write -z 1M 64k", "write -P 0 2M 100k"]);
    vec![
        ("aside", "qcow2"),
        ("base", "qcow2"),
        ("overlay", "qcow2"),
        ("packed", "qcow2"),
        ("holes", "raw"),
        ("odd", "raw"),
        ("fine", "qcow2"),
    ]
}

#[track_caller]
fn assert_alike(bed: &Bed, formats: [&str; 2], names: [&str; 2]) {
    let words = ["compare", "-s", "-f", formats[0], "-F", formats[1], names[0], names[1]];
    bed.qemu_img(&words).success();
}

#[test]
fn a_raw_target_has_the_contents_and_the_holes_that_stock_gives_it() {
    needs_qemu!();
    let bed = Bed::new();
    for (name, format) in images(&bed) {
        for more in
            [&[][..], &["-W", "-m", "16"], &["-S", "0"], &["-S", "64k"], &["-m", "1", "-t", "none", "-T", "none"]]
        {
            for name in ["ours", "stock"] {
                let _ = std::fs::remove_file(bed.path(name));
            }
            let words = |target| [&["convert", "-f", format, "-O", "raw"], more, &[name, target]].concat();
            bed.limosa(&words("ours")).success();
            bed.qemu_img(&words("stock")).success();
            assert!(std::fs::read(bed.path("ours")).unwrap() == std::fs::read(bed.path("stock")).unwrap(), "{name}");
            // Zeros that are not worth a hole are written, also where the source has a hole.
            if more.contains(&"64k") {
                continue;
            }
            // Where it allocates late, a filesystem counts its own blocks for a file only when that is done.
            let blocks = |name| {
                let file = std::fs::File::open(bed.path(name)).unwrap();
                file.sync_all().unwrap();
                file.metadata().unwrap().blocks()
            };
            assert!(blocks("ours") <= blocks("stock"), "{name} {more:?}: {} > {}", blocks("ours"), blocks("stock"));
        }
    }
}

#[test]
fn a_qcow2_target_is_whole_and_allocates_what_stock_does() {
    needs_qemu!();
    let bed = Bed::new();
    for (name, format) in images(&bed) {
        for options in ["cluster_size=64k", "cluster_size=4k,compat=v2", "extended_l2=on"] {
            let words = |target| ["convert", "-f", format, "-O", "qcow2", "-o", options, name, target];
            bed.limosa(&words("ours")).success();
            bed.qemu_img(&words("stock")).success();
            bed.qemu_img(&["check", "-q", "ours"]).success();
            assert_alike(&bed, ["qcow2"; 2], ["ours", "stock"]);
        }
    }
}

#[test]
fn sources_are_put_one_after_the_other() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    let words = |target| ["convert", "-f", "raw", "odd", "holes", "odd", target];
    bed.limosa(&words("ours")).success();
    bed.qemu_img(&words("stock")).success();
    assert!(std::fs::read(bed.path("ours")).unwrap() == std::fs::read(bed.path("stock")).unwrap());
}

#[test]
fn what_lies_below_is_not_copied_again() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    let words = |target| ["convert", "-f", "qcow2", "-O", "qcow2", "-B", "base", "-F", "qcow2", "overlay", target];
    bed.limosa(&words("ours")).success();
    bed.qemu_img(&words("stock")).success();
    assert_alike(&bed, ["qcow2"; 2], ["ours", "stock"]);
    assert!(length(&bed.path("ours")) <= length(&bed.path("stock")) + (1 << 20));
    bed.both_say(&["map", "--output", "json", "ours"]);
    bed.both_refuse(&["convert", "-O", "qcow2", "-B", "base", "overlay", "other"], "-F");
    bed.both_refuse(&["convert", "-O", "qcow2", "-B", "absent", "-F", "raw", "overlay", "other"], "absent");
    bed.both_refuse(&["convert", "-O", "raw", "-B", "base", "-F", "qcow2", "overlay", "other"], "raw");
    bed.both_refuse(&["convert", "-O", "qcow2", "-B", "base", "-F", "qcow2", "base", "base", "other"], "-B");
}

#[test]
fn a_target_that_is_there_is_overwritten_in_place() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    for (target, format) in [("there.raw", "raw"), ("there.qcow2", "qcow2")] {
        bed.create(&["-f", format, target, "12M"]);
        bed.qemu_io(target, &["write -P 0xdd 0 12M"]);
        bed.limosa(&["convert", "-n", "-f", "qcow2", "-O", format, "base", target]).success();
        // What lies behind the source's end stays.
        let compared = bed.qemu_img(&["compare", "-f", "qcow2", "-F", format, "base", target]);
        assert!(compared.stdout.contains("Content mismatch at offset 10485760"), "{compared:?}");
        bed.qemu_io(target, &["read -P 0xdd 10M 2M", "read -P 0 7M 3M", "read -P 1 0 100k"]);
        bed.both_refuse(&["convert", "-n", "-f", "qcow2", "-O", format, "-o", "size=1", "base", target], "-n");
    }
    bed.create(&["-f", "raw", "small", "1M"]);
    bed.both_refuse(&["convert", "-n", "-f", "qcow2", "-O", "raw", "base", "small"], "smaller");
    bed.both_refuse(&["convert", "-n", "-f", "qcow2", "-O", "raw", "base", "absent"], "absent");
    bed.create(&["-f", "raw", "zero", "10M"]);
    bed.limosa(&["convert", "-n", "--target-is-zero", "-f", "qcow2", "-O", "raw", "base", "zero"]).success();
    bed.qemu_img(&["compare", "-f", "qcow2", "-F", "raw", "base", "zero"]).success();
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_made() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    for (words, says) in [
        (&["convert", "-S", "100", "holes", "new"][..], "-S"),
        (&["convert", "-S", "17M", "holes", "new"], "-S"),
        (&["convert", "-O", "frob", "holes", "new"], "frob"),
        (&["convert", "absent", "new"], "absent"),
        (&["convert", "-O", "qcow2", "-o", "frob=1", "holes", "new"], "frob"),
        (&["convert", "holes", "holes"], "holes"),
    ] {
        bed.both_refuse(words, says);
        assert!(!bed.path("new").exists(), "{words:?}");
    }
    for needs_qcow2 in ["-c", "--bitmaps"] {
        let words = ["convert", needs_qcow2, "holes", "new"];
        assert_one_line(&bed.limosa(&words).into(), &words, needs_qcow2);
    }
    let snapshot = ["convert", "-l", "one", "-O", "qcow2", "--bitmaps", "overlay", "new"];
    assert_one_line(&bed.limosa(&snapshot).into(), &snapshot, "--bitmaps and -l exclude each other");
    let untrusted = ["convert", "--untrusted", "overlay", "new"];
    assert_one_line(&bed.limosa(&untrusted).into(), &untrusted, "base");
}

#[test]
fn a_target_that_is_not_trusted_has_nothing_written_for_it() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    bed.create(&["-f", "qcow2", "-o", "data_file=precious,data_file_raw=on", "target", "10M"]);
    std::fs::write(bed.path("precious"), b"somebody's").unwrap();
    let words = ["convert", "--untrusted", "-n", "-f", "qcow2", "-O", "qcow2", "base", "target"];
    assert_one_line(&bed.limosa(&words).into(), &words, "--untrusted");
    assert_eq!(std::fs::read(bed.path("precious")).unwrap(), b"somebody's");
    // What is named here is opened, and nothing that it refers to.
    bed.limosa(&["convert", "--untrusted", "-O", "qcow2", "-B", "base", "-F", "qcow2", "base", "new"]).success();
    let words = ["convert", "--untrusted", "-O", "qcow2", "-B", "overlay", "-F", "qcow2", "base", "other"];
    assert_one_line(&bed.limosa(&words).into(), &words, "--untrusted");
}

#[test]
fn progress_and_figures_are_reported() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    let report = bed.limosa(&["convert", "-p", "holes", "new"]).success().stdout;
    assert!(report.starts_with("    (0.00/100%)\r") && report.ends_with("    (100.00/100%)\r\n"), "{report:?}");
    let report = bed.limosa(&["convert", "--json", "-f", "qcow2", "base", "new"]).success().stdout;
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!((&report["length"], &report["bytes-zeroed"]), (&(10 << 20).into(), &0.into()));
    let spared = bed.limosa(&["convert", "--json", "-f", "qcow2", "aside", "new"]).success().stdout;
    let spared: serde_json::Value = serde_json::from_str(&spared).unwrap();
    assert!(spared["bytes-read"].as_u64().unwrap() <= 120 << 10, "holes were read: {spared}");
    // 100 KiB, 4 KiB and 300 KiB of zeros, in whole clusters.
    assert_eq!(report["bytes-read"], (128 + 64 + 320) << 10);
    assert!(report["bytes-written"].as_u64().unwrap() <= 128 << 10);
}

#[test]
fn a_snapshot_is_read_as_the_image_was() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "raw", "below", "4M"]);
    bed.qemu_io("below", &["write -P 9 0 4M"]);
    for (name, more) in [
        ("plain", &[][..]),
        ("fine", &["-o", "extended_l2=on"]),
        ("small", &["-o", "cluster_size=512"]),
        ("over", &["-b", "below", "-F", "raw"]),
    ] {
        bed.create(&[&["-f", "qcow2"], more, &[name, "4M"]].concat());
        bed.qemu_io(name, &["write -P 1 0 1M", "write -z 2M 64k"]);
        bed.qemu_img(&["snapshot", "-c", "one", name]).success();
        bed.qemu_io(name, &["write -P 2 0 512k", "write -P 3 2M 100k", "discard 768k 64k"]);
        bed.qemu_img(&["snapshot", "-c", "two", name]).success();
        bed.qemu_io(name, &["write -P 4 0 3M"]);
        for choice in ["one", "1", "two", "snapshot.id=2", "snapshot.name=one", "snapshot.id=2,snapshot.name=two"] {
            for format in ["raw", "qcow2"] {
                let words = |target| ["convert", "-l", choice, "-O", format, name, target];
                bed.limosa(&words("ours")).success();
                bed.qemu_img(&words("stock")).success();
                assert_alike(&bed, [format; 2], ["ours", "stock"]);
            }
        }
        for wrong in ["three", "", "snapshot.id=7", "snapshot.id=1,snapshot.name=two", "snapshot.id="] {
            bed.both_refuse(&["convert", "-l", wrong, name, "new"], "it has no snapshot with");
        }
    }
    let wrong = Answer::from(bed.limosa(&["convert", "-l", "snapshot.frob=1", "plain", "new"]));
    assert!(wrong.status == Some(1) && wrong.stderr.contains("snapshot.frob"), "{wrong:?}");
    bed.both_refuse(&["convert", "-l", "one", "-f", "raw", "plain", "new"], "raw");
    bed.both_refuse(&["convert", "-l", "one", "plain", "plain", "new"], "-l");
    assert!(!bed.path("new").exists());
}

#[test]
fn an_image_is_not_converted_onto_itself() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "raw", "disk", "1M"]);
    bed.qemu_io("disk", &["write -P 7 0 1M"]);
    std::fs::hard_link(bed.path("disk"), bed.path("link")).unwrap();
    for target in ["disk", "./disk", "link"] {
        for new in [&[][..], &["-n"]] {
            let words = [&["convert", "-f", "raw"], new, &["disk", target]].concat();
            bed.limosa(&words).one_line(&[target, "source and target are the same file"]);
        }
    }
    assert_eq!(std::fs::read(bed.path("disk")).unwrap(), vec![7; 1 << 20]);
}

#[test]
fn a_snapshot_is_as_long_as_the_disk_was() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "disk", "2M"]);
    bed.qemu_io("disk", &["write -P 1 1M 1M"]);
    bed.qemu_img(&["snapshot", "-c", "short", "disk"]).success();
    bed.qemu_img(&["resize", "disk", "4M"]).success();
    bed.limosa(&["convert", "-l", "short", "disk", "ours"]).success();
    assert_eq!(length(&bed.path("ours")), 2 << 20);
    // The stock tool makes it as long as the disk is now, with zeros behind.
    bed.qemu_img(&["convert", "-l", "short", "disk", "stock"]).success();
    bed.qemu_img(&["compare", "-f", "raw", "-F", "raw", "ours", "stock"]).success();
}

#[test]
fn a_copy_that_failed_is_not_left_behind() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "broken", "4M"]);
    bed.qemu_io("broken", &["write -P 1 0 4M"]);
    // An entry of the L2 table that points into a cluster.
    poke(&bed.path("broken"), 0x4_0000 + 8 * 40, &[0x80, 0, 0, 0, 0, 5, 2, 0]);
    bed.create(&["-f", "qcow2", "there", "1M"]);
    for format in ["raw", "qcow2"] {
        for target in ["new", "there"] {
            let words = ["convert", "-f", "qcow2", "-O", format, "broken", target];
            assert_one_line(&bed.limosa(&words).into(), &words, "broken");
            assert_eq!(bed.path(target).exists(), target == "there");
        }
    }
    let words = ["convert", "-O", "qcow2", "-o", "data_file=data", "broken", "new"];
    assert_one_line(&bed.limosa(&words).into(), &words, "broken");
    assert!(!bed.path("new").exists() && !bed.path("data").exists());
}

#[test]
fn the_kernel_copies_what_lies_as_it_is() {
    needs_qemu!();
    let bed = Bed::new();
    for (name, format) in images(&bed) {
        for target in ["raw", "qcow2"] {
            for more in [&["-C"][..], &["-C", "-W", "-m", "16"], &["-C", "-T", "none", "-t", "none"]] {
                let words = |new| [&["convert", "-f", format, "-O", target], more, &[name, new]].concat();
                let report = bed.limosa(&[&words("ours")[..], &["--json"]].concat()).success().stdout;
                bed.qemu_img(&words("stock")).success();
                bed.qemu_img(&["compare", "-f", target, "-F", target, "ours", "stock"]).success();
                let report: serde_json::Value = serde_json::from_str(&report).unwrap();
                // What is compressed cannot be copied so, nor, past the page cache, a part of a sector.
                let in_part = name == "odd" && more.contains(&"none");
                let all = target == "raw" && name != "packed" && !in_part;
                assert_eq!(report["bytes-copied"].as_u64().unwrap() > 0, all, "{name} {target} {more:?}: {report}");
                assert_eq!(report["bytes-read"] == 0, all, "{name} {target} {more:?}: {report}");
            }
        }
    }
    for words in [&["convert", "-C", "-S", "4k", "holes", "new"][..], &["convert", "-C", "--salvage", "holes", "new"]] {
        let [ours, stock] = [Answer::from(bed.limosa(words)), bed.qemu_img(words)];
        assert_eq!([ours.status, stock.status], [Some(1); 2], "{words:?}: {ours:?}");
    }
    assert!(!bed.path("new").exists());
}

/// Options of a conversion beside its formats.
const MORE: [&[&str]; 6] = [
    &["-W", "-m", "16"],
    &["-S", "0", "-m", "1"],
    &["-t", "none", "-T", "none"],
    &["--salvage", "-t", "directsync", "-m", "2"],
    &["-r", "300M", "-t", "writethrough", "-W"],
    &["-S", "1M", "-q", "-U"],
];

#[test]
fn options_go_together_on_a_target_that_is_there() {
    needs_qemu!();
    let bed = Bed::new();
    let images = images(&bed);
    for (index, (name, format)) in images.iter().enumerate() {
        for target in ["raw", "qcow2"] {
            for is_zero in [false, true] {
                // Not all with all: it takes its time, and each comes with each format.
                let more = MORE[(index + usize::from(is_zero) * 3 + usize::from(target == "raw")) % MORE.len()];
                let says = if is_zero { &["--target-is-zero"][..] } else { &[] };
                for new in ["ours", "stock"] {
                    let _ = std::fs::remove_file(bed.path(new));
                    bed.create(&["-f", target, new, "13M"]);
                    if !is_zero {
                        bed.qemu_io(new, &["write -P 0xdd 0 13M"]);
                    }
                }
                let words = |new| [&["convert", "-n", "-f", format, "-O", target], says, more, &[name, new]].concat();
                bed.limosa(&words("ours")).success();
                bed.qemu_img(&words("stock")).success();
                let compared = bed.qemu_img(&["compare", "-f", target, "-F", target, "ours", "stock"]);
                assert_eq!(compared.status, Some(0), "{:?}: {compared:?}", words("ours"));
            }
        }
    }
}

#[test]
fn options_go_together_on_what_lies_below() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    for more in MORE {
        let words = |new| {
            [&["convert", "-f", "qcow2", "-O", "qcow2", "-B", "base", "-F", "qcow2"], more, &["overlay", new]].concat()
        };
        bed.limosa(&words("ours")).success();
        bed.qemu_img(&words("stock")).success();
        for other in ["stock", "overlay"] {
            let compared = bed.qemu_img(&["compare", "-f", "qcow2", "-F", "qcow2", "ours", other]);
            assert_eq!(compared.status, Some(0), "{:?}: {compared:?}", words("ours"));
        }
        bed.qemu_img(&["check", "-q", "ours"]).success();
    }
}

#[test]
fn an_overlay_that_exists_gets_what_lies_above_its_backing_file() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    for (own, options) in [("", ""), ("something", ""), ("something", "extended_l2=on,cluster_size=128k")] {
        for more in [&[][..], &["-c"], &["-S", "0"], &["-W", "-t", "none"]] {
            let options = if options.is_empty() { vec![] } else { vec!["-o", options] };
            bed.create(&[&["-f", "qcow2", "-b", "base", "-F", "qcow2"], &options[..], &["there", "14M"]].concat());
            if !own.is_empty() {
                // Where the source has zeros, contents, what lies below, what is behind the backing file's end.
                bed.qemu_io("there", &["write -P 0xdd 60k 80k", "write -P 0xdd 4M 1100k", "write -z 6M 64k"]);
                bed.qemu_io("there", &["write -P 0xdd 9M 2000k", "write -P 0xdd 11400k 700k", "write -P 7 13M 4k"]);
            }
            let first = ["convert", "-n", "-f", "qcow2", "-O", "qcow2", "-B", "base"];
            let words = [&first[..], more, &["overlay", "there"]].concat();
            bed.limosa(&words).success();
            bed.create(&["-f", "qcow2", "-b", "overlay", "-F", "qcow2", "whole", "14M"]);
            if !own.is_empty() {
                // What lies behind the source's end stays.
                bed.qemu_io("whole", &["write -P 7 13M 4k"]);
            }
            let compared = bed.qemu_img(&["compare", "-f", "qcow2", "-F", "qcow2", "whole", "there"]);
            assert_eq!(compared.status, Some(0), "{words:?} {options:?}: {compared:?}");
            bed.qemu_img(&["check", "-q", "there"]).success();
            let map = bed.qemu_img(&["map", "--output", "json", "there"]).success().stdout;
            let map: Vec<serde_json::Value> = serde_json::from_str(&map).unwrap();
            assert!(map.iter().any(|run| run["depth"] == 1 && run["data"] == true), "all was copied: {map:?}");
        }
    }
}

#[test]
fn an_overlay_that_exists_has_the_backing_file_that_is_named() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    bed.create(&["-f", "qcow2", "-b", "base", "-F", "qcow2", "there", "12M"]);
    let before = std::fs::read(bed.path("there")).unwrap();
    let words = |more: &[&'static str]| {
        [&["convert", "-n", "-f", "qcow2", "-O", "qcow2"], more, &["overlay", "there"]].concat()
    };
    for (more, reason) in [
        (&["-B", "packed"][..], "its backing file is"),
        (&["-B", "base", "-F", "raw"], "(qcow2), not"),
        (&["-B", "absent"], "absent"),
        (&["-B", "base", "--target-is-zero"], "--target-is-zero"),
        (&["-F", "qcow2"], "-B"),
    ] {
        let words = words(more);
        assert_one_line(&bed.limosa(&words).into(), &words, reason);
    }
    assert!(std::fs::read(bed.path("there")).unwrap() == before, "a refused target was written");
    for (target, format) in [("plain", "qcow2"), ("plain.raw", "raw")] {
        bed.create(&["-f", format, target, "12M"]);
        let words = ["convert", "-n", "-f", "qcow2", "-O", format, "-B", "base", "overlay", target];
        let reason = if format == "raw" { "use -O qcow2" } else { "no backing file" };
        assert_one_line(&bed.limosa(&words).into(), &words, reason);
    }
    // By another name of the file.
    std::os::unix::fs::symlink("base", bed.path("link")).unwrap();
    bed.limosa(&words(&["-B", "link", "-F", "qcow2"])).success();
    bed.limosa(&[
        "convert",
        "-n",
        "--target-image-opts",
        "-f",
        "qcow2",
        "-B",
        "base",
        "overlay",
        "driver=qcow2,file.filename=there",
    ])
    .success();
    assert_alike(&bed, ["qcow2"; 2], ["overlay", "there"]);
}

#[test]
fn what_cannot_be_read_is_salvaged_as_stock_does() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "broken", "4M"]);
    bed.qemu_io("broken", &["write -P 1 0 4M"]);
    poke(&bed.path("broken"), 0x4_0000 + 8 * 40, &[0x80, 0, 0, 0, 0, 5, 2, 0]);
    let words = |new| ["convert", "--salvage", "-f", "qcow2", "-O", "raw", "broken", new];
    let said = bed.limosa(&words("ours")).success().stderr;
    assert!(said.contains("65536 bytes at 2621440 could not be read"), "{said}");
    bed.qemu_img(&words("stock")).success();
    bed.qemu_img(&["compare", "-f", "raw", "-F", "raw", "ours", "stock"]).success();
}
