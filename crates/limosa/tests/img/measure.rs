//! `measure`.

use limosa_storage::testing::SeededRandom;

use crate::bed::Bed;
use crate::convert::images;
use crate::needs_qemu;

/// Options of a qcow2 target that change the figures.
const OPTIONS: [&str; 10] = [
    "cluster_size=64k",
    "cluster_size=512",
    "cluster_size=2M",
    "refcount_bits=1",
    "cluster_size=4k,refcount_bits=64",
    "compat=0.10",
    "extended_l2=on,cluster_size=32k",
    "preallocation=metadata",
    "preallocation=falloc",
    "preallocation=full,lazy_refcounts=on",
];

/// Asks both for people and for programs, and expects the same to the letter.
#[track_caller]
fn both_measure(bed: &Bed, words: &[&str]) {
    bed.both_say(&[&["measure"], words].concat());
    bed.both_say(&[&["measure", "--output=json"], words].concat());
}

#[test]
fn a_new_image_needs_what_stock_says() {
    needs_qemu!();
    let bed = Bed::new();
    for size in ["0", "1", "700", "64k", "1025k", "1G", "63G"] {
        both_measure(&bed, &["--size", size]);
        both_measure(&bed, &["-O", "raw", "-o", "preallocation=full", "--size", size]);
        for options in OPTIONS {
            both_measure(&bed, &["-O", "qcow2", "-o", options, "--size", size]);
        }
    }
    both_measure(&bed, &["-O", "qcow2", "-o", "backing_file=x,backing_fmt=raw", "--size", "1G"]);
    both_measure(&bed, &["-O", "qcow2", "--size", "100T"]);
}

#[test]
fn a_converted_image_needs_what_stock_says() {
    needs_qemu!();
    let bed = Bed::new();
    for (name, format) in images(&bed) {
        both_measure(&bed, &["-f", format, name]);
        for options in OPTIONS {
            both_measure(&bed, &["-f", format, "-O", "qcow2", "-o", options, name]);
        }
        both_measure(&bed, &["-f", format, "-O", "qcow2", "-o", "backing_file=base,backing_fmt=qcow2", name]);
    }
    bed.both_say(&["measure", "base"]);
    bed.both_say(&["measure", "-U", "-O", "qcow2", "--image-opts", "driver=qcow2,file.filename=overlay"]);
}

#[test]
fn generated_images_need_what_stock_says() {
    needs_qemu!();
    let bed = Bed::new();
    for seed in 0_u64..12 {
        let mut chance = SeededRandom::new(seed);
        let cluster = *chance.choose(&["512", "4k", "64k", "1M"]);
        let size = 512 * (1 + chance.below(20_000));
        let below = format!("below{}", seed.saturating_sub(1));
        let mut create = vec!["-f", "qcow2"];
        if chance.one_in(2) && seed > 0 {
            create.extend(["-b", &below, "-F", "qcow2"]);
        }
        let (options, length) = (format!("cluster_size={cluster}"), size.to_string());
        bed.create(&[&create[..], &["-o", &options, "image", &length]].concat());
        let writes: Vec<_> = (0..chance.below(20))
            .map(|_| {
                let at = 512 * chance.below(size / 512);
                let most = (512 * (1 + chance.below(600))).min(size - at);
                let how = *chance.choose(&["-P 1", "-P 2", "-z", "-z -u"]);
                format!("write -q {how} {at} {most}")
            })
            .collect();
        bed.qemu_io("image", &writes.iter().map(String::as_str).chain(["flush"]).collect::<Vec<_>>());
        for _ in 0..3 {
            let options = *chance.choose(&OPTIONS);
            both_measure(&bed, &["-O", "qcow2", "-o", options, "image"]);
        }
        std::fs::rename(bed.path("image"), bed.path(&format!("below{seed}"))).unwrap();
    }
}

#[test]
fn bitmaps_need_space_and_snapshots_are_measured_as_they_were() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "x", "1G"]);
    bed.qemu_io("x", &["write 0 1M"]);
    bed.qemu_img(&["snapshot", "-c", "before", "x"]).success();
    bed.qemu_io("x", &["write 10M 3M"]);
    for words in
        [&["--add", "-g", "512", "x", "fine"][..], &["--add", "x", "usual"], &["--add", "--disable", "x", "off"]]
    {
        bed.qemu_img(&[&["bitmap"], words].concat()).success();
    }
    for options in ["cluster_size=64k", "cluster_size=512", "cluster_size=2M", "compat=0.10"] {
        both_measure(&bed, &["-O", "qcow2", "-o", options, "x"]);
    }
    both_measure(&bed, &["-O", "raw", "x"]);
    both_measure(&bed, &["-O", "qcow2", "-l", "before", "x"]);
    both_measure(&bed, &["-O", "qcow2", "-l", "snapshot.name=before", "x"]);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "x", "1M"]);
    for (words, says) in [
        (&[][..], "--size"),
        (&["--size", "1G", "x"], "--size"),
        (&["--size", "1G", "-f", "qcow2"], "--size"),
        (&["--size", "1G", "-l", "s"], "--size"),
        (&["--size", "1G", "-O", "vmdk"], "vmdk"),
        (&["--size", "1G", "-O", "qcow2", "-o", "cluster_size=3000"], "cluster_size"),
        (&["--size", "1T", "-O", "qcow2", "-o", "cluster_size=512"], "larger"),
        (&["absent"], "absent"),
        (&["-l", "none", "x"], "none"),
    ] {
        if words == ["--size", "1G", "-O", "vmdk"] {
            let ours = bed.limosa(&[&["measure"], words].concat());
            ours.one_line(&[says]);
            continue;
        }
        bed.both_refuse(&[&["measure"], words].concat(), says);
    }
}
