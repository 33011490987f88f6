//! `map`.

use crate::bed::{Bed, assert_one_line};
use crate::needs_qemu;

/// Images of many kinds, one on the other.
fn images(bed: &Bed) -> Vec<&'static str> {
    bed.create(&["-f", "qcow2", "base", "10M"]);
    bed.qemu_io("base", &["write -P 1 0 100k", "write -z 1M 1M", "write -P 2 5M 4k"]);
    bed.create(&["-f", "qcow2", "-b", "base", "-F", "qcow2", "overlay", "12M"]);
    bed.qemu_io("overlay", &["write -P 3 5M 64k", "discard 64k 64k"]);
    bed.qemu_img(&["convert", "-c", "-O", "qcow2", "base", "compressed"]).success();
    bed.create(&["-f", "raw", "raw", "1M"]);
    bed.qemu_img(&["dd", "-O", "raw", "bs=4k", "count=1", "if=base", "of=start"]).success();
    bed.create(&["-f", "qcow2", "-b", "raw", "-F", "raw", "-o", "extended_l2=on", "fine", "2M"]);
    bed.qemu_io("fine", &["write -P 1 6k 2k", "write -P 1 1M 128k", "write -z 1500k 10k"]);
    bed.create(&["-f", "qcow2", "-o", "data_file=outside.data", "outside", "1M"]);
    bed.qemu_io("outside", &["write -P 1 0 128k", "write -z 64k 64k", "write 512k 64k"]);
    vec!["base", "overlay", "compressed", "raw", "start", "fine", "outside"]
}

/// Images with space that was set aside, and written in part; with what lies below nothing and something.
fn set_aside(bed: &Bed) -> Vec<String> {
    let mut names = Vec::new();
    for how in ["metadata", "falloc", "full"] {
        for (more, options) in [
            ("64k", "cluster_size=64k"),
            ("4k", "cluster_size=4k"),
            ("fine", "extended_l2=on"),
            ("outside", "data_file=outside"),
            ("bits", "refcount_bits=1"),
        ] {
            let name = format!("{how}-{more}");
            let options = format!("preallocation={how},{options}");
            bed.create(&["-f", "qcow2", "-o", &options.replace("=outside", &format!("={name}.data")), &name, "3M"]);
            bed.qemu_io(&name, &["write -P 1 100k 10k", "write -z 1M 64k", "discard 2M 128k", "write -P 2 3000k 7k"]);
            names.push(name);
        }
    }
    // A name that means nothing else is below these.
    bed.create(&["-f", "qcow2", "-b", "metadata-64k", "-F", "qcow2", "above", "5M"]);
    bed.qemu_io("above", &["write -P 7 1000 3000", "write -P 8 4M 1000"]);
    names.push("above".to_owned());
    names
}

#[test]
fn space_that_was_never_written_is_mapped_as_zeros_where_stock_asks_the_file_below() {
    needs_qemu!();
    let bed = Bed::new();
    for name in set_aside(&bed) {
        bed.both_say(&["map", "--output", "json", &name]);
        bed.both_say(&["map", &name]);
    }
    assert!(bed.limosa(&["map", "metadata-64k"]).success().stdout.lines().count() == 3);
}

#[test]
fn places_are_shown_of_clusters_that_are_kept_for_what_is_zero_or_below() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "shared", "1M"]);
    bed.qemu_io("shared", &["write -P 1 0 128k", "write -z 64k 64k"]);
    bed.create(&["-f", "qcow2", "-o", "extended_l2=on", "fine", "1M"]);
    bed.qemu_io("fine", &["write -P 1 0 10k", "write -z 64k 6k", "write -P 2 200k 1k", "write -z 204k 2k"]);
    std::fs::write(bed.path("odd.raw"), vec![5; 70_000]).unwrap();
    bed.create(&["-f", "qcow2", "-b", "odd.raw", "-F", "raw", "-o", "extended_l2=on", "over", "1M"]);
    bed.qemu_io("over", &["write -P 1 0 2k", "write -P 1 66k 1k", "write -z 128k 2k", "write -P 3 200k 1k"]);
    bed.create(&["-f", "qcow2", "-b", "over", "-F", "qcow2", "-o", "extended_l2=on", "twice", "2M"]);
    bed.qemu_io("twice", &["write -P 1 4k 2k", "write -P 1 1500k 1k"]);
    bed.create(&["-f", "qcow2", "-o", "data_file=d,data_file_raw=on", "raw-outside", "1M"]);
    bed.qemu_io("raw-outside", &["write -P 1 0 128k", "write -z 64k 64k", "discard 0 64k"]);
    bed.create(&["-f", "qcow2", "-o", "data_file=e,extended_l2=on", "fine-outside", "1M"]);
    bed.qemu_io("fine-outside", &["write -P 1 0 10k", "write -z 70k 6k"]);
    for name in ["shared", "fine"] {
        bed.both_say(&["map", "--output", "json", name]);
        bed.qemu_img(&["snapshot", "-c", "one", name]).success();
    }
    for name in ["shared", "fine", "over", "twice", "raw-outside", "fine-outside"] {
        bed.both_say(&["map", "--output", "json", name]);
        bed.both_say(&["map", name]);
    }
}

#[test]
fn programs_see_where_everything_lies() {
    needs_qemu!();
    let bed = Bed::new();
    for name in images(&bed) {
        bed.both_say(&["map", "--output", "json", name]);
    }
    bed.both_say(&["map", "--output", "json", "-f", "raw", "overlay"]);
}

#[test]
fn people_see_where_contents_lie() {
    needs_qemu!();
    let bed = Bed::new();
    for name in images(&bed) {
        let report = bed.both_say(&["map", name]);
        if name == "compressed" {
            assert_one_line(&report, &["map", name], "compressed");
        }
    }
}

#[test]
fn a_part_of_an_image_is_mapped_as_far_as_it_goes() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    for more in [
        &["-s", "64k"][..],
        &["--start-offset", "1M", "--max-length", "64k"],
        &["-s", "1", "-l", "7"],
        &["-s", "11M", "-l", "100M"],
        &["-s", "100M"],
    ] {
        bed.both_say(&[&["map", "overlay"], more].concat());
        bed.both_say(&[&["map", "overlay", "--output", "json"], more].concat());
    }
}

#[test]
fn an_image_is_named_as_qemu_img_takes_names() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    bed.both_say(&["map", "--image-opts", "driver=qcow2,file.driver=file,file.filename=overlay"]);
    bed.both_say(&["map", r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"overlay"}}"#]);
    bed.both_say(&["map", "file:overlay"]);
    bed.both_refuse(&["map", "nbd://localhost:1/x"], "nbd");
    bed.both_refuse(&["map", "absent"], "absent");
    bed.both_refuse(&["map", "-f", "qcow2", "raw"], "raw");
}

#[test]
fn an_image_that_is_not_trusted_opens_no_other_file() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    for name in ["overlay", "fine", "outside"] {
        let ended = bed.limosa(&["map", "--untrusted", name]);
        ended.one_line(&[name, "--untrusted"]);
    }
    bed.limosa(&["map", "--untrusted", "base"]).success();
}

#[test]
fn of_nothing_the_map_is_that_of_stock() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "raw", "raw", "1M"]);
    bed.create(&["-f", "raw", "empty", "0"]);
    bed.create(&["-f", "qcow2", "without", "0"]);
    for json in [&[][..], &["--output=json"]] {
        for words in [&["-f", "raw", "empty"][..], &["without"], &["-s", "1M", "raw"], &["-s", "512", "-l", "0", "raw"]]
        {
            bed.both_say(&[&["map"], json, words].concat());
        }
    }
}
