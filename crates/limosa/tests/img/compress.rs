//! Compressed targets: `convert -c` and `rebase -c`.

use limosa_storage::testing::SeededRandom;

use crate::bed::{Answer, Bed, assert_one_line};
use crate::convert::images;
use crate::needs_qemu;

/// Contents as disks have them: numbered lines, and parts without order.
fn contents(lines: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut noise = 1_u64;
    for line in 0..lines {
        bytes.extend(format!("{line:08} the quick brown fox jumps over {} lazy dogs\n", line * 7919 % 1000).bytes());
        if line % 3000 > 2700 {
            bytes.extend((0..64).map(|_| {
                noise = noise.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                noise.to_be_bytes()[0]
            }));
        }
    }
    bytes.truncate(bytes.len() / 512 * 512);
    bytes
}

fn compressed_clusters(bed: &Bed, name: &str) -> u64 {
    bed.qemu_img(&["check", "--output=json", name]).success().json()["compressed-clusters"].as_u64().unwrap()
}

#[test]
fn a_compressed_target_reads_as_its_source_and_is_as_small_as_stock_makes_it() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("source"), contents(200_000)).unwrap();
    for more in [
        &[][..],
        &["-o", "compression_type=zstd"],
        &["-W", "-m", "16", "-t", "none", "-o", "cluster_size=128k"],
        &["-m", "1", "-o", "compat=0.10,cluster_size=4k"],
        &["-o", "extended_l2=on,compression_type=zstd", "-S", "0"],
        &["-o", "lazy_refcounts=on,refcount_bits=1"],
    ] {
        let words = |target| [&["convert", "-c", "-f", "raw", "-O", "qcow2"], more, &["source", target]].concat();
        bed.limosa(&words("ours")).success();
        bed.qemu_img(&words("stock")).success();
        bed.qemu_img(&["compare", "-f", "raw", "-F", "qcow2", "source", "ours"]).success();
        assert_eq!(compressed_clusters(&bed, "ours"), compressed_clusters(&bed, "stock"), "{more:?}");
        let size = |name| std::fs::metadata(bed.path(name)).unwrap().len();
        // Besides what compression saves: the room at the end of the last host cluster.
        let (ours, stock) = (size("ours"), size("stock"));
        assert!(ours <= stock + stock / 50 + (64 << 10), "{more:?}: {ours} > {stock}");
        bed.limosa(&["compare", "-f", "raw", "-F", "qcow2", "source", "ours"]).success();
    }
    let report = bed.limosa(&["convert", "-c", "--json", "--compress-level", "1", "-O", "qcow2", "source", "ours"]);
    let report = Answer::from(report).success().json();
    assert!(report["bytes-stored"].as_u64() < report["bytes-written"].as_u64(), "{report}");
    bed.qemu_img(&["compare", "-f", "raw", "-F", "qcow2", "source", "ours"]).success();
}

#[test]
fn images_of_all_kinds_are_compressed_over_a_backing_file_and_into_targets_that_exist() {
    needs_qemu!();
    let bed = Bed::new();
    for (name, format) in images(&bed) {
        bed.limosa(&["convert", "-c", "-f", format, "-O", "qcow2", name, "ours"]).success();
        bed.qemu_img(&["check", "-q", "ours"]).success();
        bed.qemu_img(&["compare", "-f", format, "-F", "qcow2", name, "ours"]).success();
        // Larger, and with contents of its own: a last cluster that is not whole is there.
        bed.create(&["-f", "qcow2", "there", "16M"]);
        bed.qemu_io("there", &["write -q -P 7 0 16M"]);
        bed.limosa(&["convert", "-c", "-n", "-f", format, "-O", "qcow2", name, "there"]).success();
        bed.qemu_img(&["check", "-q", "there"]).success();
        bed.qemu_img(&["convert", "-f", format, "-O", "raw", name, "raw"]).success();
        bed.qemu_img(&["convert", "-O", "raw", "there", "seen"]).success();
        let (expected, seen) = (std::fs::read(bed.path("raw")).unwrap(), std::fs::read(bed.path("seen")).unwrap());
        assert!(seen.starts_with(&expected) && seen[expected.len()..].iter().all(|byte| *byte == 7), "{name}");
    }
    // A cluster of the target is larger than the source's.
    let over =
        ["convert", "-c", "-O", "qcow2", "-o", "cluster_size=2M", "-B", "base", "-F", "qcow2", "overlay", "ours"];
    bed.limosa(&over).success();
    bed.qemu_img(&["check", "-q", "ours"]).success();
    bed.qemu_img(&["compare", "overlay", "ours"]).success();
    let two = ["convert", "-c", "-O", "qcow2", "base", "packed", "ours"];
    bed.limosa(&two).success();
    bed.qemu_img(&[&two[..6], &["stock"]].concat()).success();
    bed.qemu_img(&["compare", "ours", "stock"]).success();
}

#[test]
fn targets_without_compression_and_options_that_do_not_go_with_it_are_refused() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("source"), contents(3000)).unwrap();
    bed.create(&["-f", "raw", "flat", "1M"]);
    for (words, says) in [
        (&["-c", "source", "new"][..], "format raw does not support compressed contents; use -O qcow2"),
        (&["-c", "-O", "qcow2", "-o", "preallocation=metadata", "source", "new"], "exclude each other"),
        (&["-c", "-O", "qcow2", "-o", "data_file=outside", "source", "new"], "data file"),
        (&["-c", "-n", "-O", "raw", "source", "flat"], "format raw does not support compressed contents"),
    ] {
        let words = [&["convert", "-f", "raw"], words].concat();
        bed.both_refuse(&words, says);
        std::fs::remove_file(bed.path("new")).ok();
    }
    for level in ["0", "10"] {
        let words = ["convert", "-c", "--compress-level", level, "-O", "qcow2", "source", "new"];
        let says = format!("--compress-level {level}: zlib takes 1 to 9");
        assert_one_line(&bed.limosa(&words).into(), &words, &says);
        assert!(!bed.path("new").exists());
    }
    for words in [&["-c", "-C", "-O", "qcow2", "source", "new"][..], &["--compress-level", "1", "source", "new"]] {
        let ours = Answer::from(bed.limosa(&[&["convert"], words].concat()));
        assert_eq!(ours.status, Some(1), "{ours:?}");
    }
}

#[test]
fn a_rebase_compresses_what_it_copies() {
    needs_qemu!();
    for options in ["compression_type=zlib", "compression_type=zstd,extended_l2=on", "cluster_size=4k"] {
        let bed = Bed::new();
        std::fs::write(bed.path("old"), contents(40_000)).unwrap();
        bed.create(&["-f", "qcow2", "-o", options, "-b", "old", "-F", "raw", "top"]);
        bed.qemu_io("top", &["write -q -P 4 200k 10k", "write -q -z 900k 128k", "write -q -P 6 1500k 70k"]);
        bed.qemu_img(&["convert", "-O", "raw", "top", "seen"]).success();
        bed.limosa(&["rebase", "-c", "-b", "", "top"]).success();
        bed.qemu_img(&["check", "-q", "top"]).success();
        bed.qemu_img(&["compare", "-f", "qcow2", "-F", "raw", "top", "seen"]).success();
        assert!(compressed_clusters(&bed, "top") > 10, "{options}");
    }
}

#[test]
fn a_compressed_cluster_that_is_cut_off_is_not_made_up() {
    needs_qemu!();
    let bed = Bed::new();
    let mut chance = SeededRandom::new(3);
    let text: Vec<u8> = (0..128 << 10).map(|_| *chance.choose(b"abcdefghijklmnop \n")).collect();
    std::fs::write(bed.path("text"), &text).unwrap();
    for kind in ["zlib", "zstd"] {
        let options = format!("compression_type={kind}");
        bed.qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, "text", "whole"]).success();
        let whole = std::fs::read(bed.path("whole")).unwrap();
        for cut in (520..6000).step_by(548) {
            std::fs::write(bed.path("image"), &whole[..whole.len() - cut]).unwrap();
            let ended = Answer::from(bed.limosa(&["convert", "-f", "qcow2", "-O", "raw", "image", "back"]));
            assert_eq!((ended.status, bed.path("back").exists()), (Some(1), false), "{kind} {cut}: {ended:?}");
        }
    }
}
