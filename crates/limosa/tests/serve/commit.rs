//! `limosa serve ctl commit`: an overlay is merged into the image below it while stock clients use the disk.

use std::fs;

use limosa_testkit::{Ended, qemu_io};
use serde_json::{Value, json};

use crate::bed::{Bed, Serving};
use crate::needs_qemu;

fn ctl(bed: &Bed, words: &[&str]) -> Ended {
    bed.refused(&[&["ctl", "control"], words].concat())
}

#[track_caller]
fn asked(bed: &Bed, words: &[&str]) -> Value {
    ctl(bed, &[words, &["--json"]].concat()).json()
}

#[track_caller]
fn io(disk: &str, format: &str, commands: &[&str]) {
    let words = commands.iter().flat_map(|command| ["-c", command]);
    let said = qemu_io(["-f", format].into_iter().chain(words).chain([disk])).unwrap();
    assert!(!said.contains("failed"), "{said}");
}

fn serve(bed: &Bed, image: &str) -> Serving {
    bed.serve("nbd", &["--control", "control", "--allow-dir", ".", image])
}

#[test]
fn an_overlay_is_merged_into_the_image_below_it_and_removed() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
    let serving = serve(&bed, "disk");
    let uri = serving.uri("");
    io(&uri, "raw", &["write -P 1 0 2M"]);
    asked(&bed, &["snapshot", "", "one"]);
    io(&uri, "raw", &["write -P 2 1M 2M", "write -z 0 64k"]);
    asked(&bed, &["resize", "", "96M"]);
    asked(&bed, &["snapshot", "", "two"]);
    io(&uri, "raw", &["write -P 3 2M 2M", "discard 1M 64k"]);
    // Not flushed by a client: the server does.
    let answer = asked(&bed, &["commit", ""]);
    assert_eq!((&answer["image"], &answer["committed"]), (&json!(bed.path("one")), &json!(bed.path("two"))));
    assert!(answer["bytes"].as_u64().unwrap() >= 2 << 20, "{answer}");
    assert!(!bed.path("two").exists());
    let contents = ["read -P 0 0 64k", "read -P 1 64k 960k", "read -P 2 1088k 960k", "read -P 3 2M 2M"];
    io(&uri, "raw", &contents);
    let said = ctl(&bed, &["commit", ""]).success().stderr;
    assert!(said.contains(": disk (") && said.contains("one"), "{said}");
    assert!(!bed.path("one").exists());
    io(&uri, "raw", &contents);
    io(&uri, "raw", &["write -P 4 64M 1M", "flush"]);
    let refused = ctl(&bed, &["commit", ""]).stderr;
    assert!(refused.contains("no backing file"), "{refused}");
    serving.stop();
    io(bed.path("disk").to_str().unwrap(), "qcow2", &[&contents[..], &["read -P 4 64M 1M"]].concat());
    bed.qemu_img(&["check", "-q", "@disk"]);
    let info: Value = serde_json::from_str(&bed.qemu_img(&["info", "--output=json", "@disk"])).unwrap();
    assert_eq!(info["virtual-size"], 96 << 20);
}

#[test]
fn an_overlay_of_a_server_before_is_merged_into_a_raw_image() {
    needs_qemu!();
    let bed = Bed::new();
    fs::write(bed.path("base"), vec![7; 4 << 20]).unwrap();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "@top"]);
    let serving = serve(&bed, "top");
    io(&serving.uri(""), "raw", &["write -P 8 1M 64k"]);
    asked(&bed, &["commit", ""]);
    io(&serving.uri(""), "raw", &["read -P 7 0 1M", "read -P 8 1M 64k", "write -P 9 2M 4k", "flush"]);
    serving.stop();
    assert!(!bed.path("top").exists());
    let base = fs::read(bed.path("base")).unwrap();
    assert_eq!([base[(1 << 20) - 1], base[1 << 20], base[2 << 20], base[3 << 20]], [7, 8, 9, 7]);
}

#[test]
fn an_overlay_that_cannot_be_merged_is_served_as_before() {
    needs_qemu!();
    let bed = Bed::new();
    fs::write(bed.path("base"), vec![7; 1 << 20]).unwrap();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "@top"]);
    // Somebody else writes to the base: it is locked.
    let holder = bed.serve("other", &["--read-only", "base"]);
    let serving = serve(&bed, "top");
    let uri = serving.uri("");
    io(&uri, "raw", &["write -P 8 0 64k"]);
    let refused = ctl(&bed, &["commit", ""]).stderr;
    assert!(refused.contains("base"), "{refused}");
    io(&uri, "raw", &["read -P 8 0 64k", "read -P 7 64k 64k", "write -P 9 64k 64k", "flush", "read -P 9 64k 64k"]);
    holder.stop();
    // A raw image has no place for bitmaps.
    ctl(&bed, &["bitmap", "", "--add", "b"]).success();
    let refused = ctl(&bed, &["commit", ""]).stderr;
    assert!(refused.contains("dirty bitmaps"), "{refused}");
    ctl(&bed, &["bitmap", "", "--remove", "b"]).success();
    asked(&bed, &["commit", ""]);
    io(&uri, "raw", &["read -P 8 0 64k", "read -P 9 64k 64k"]);
    serving.stop();
}

#[test]
fn dirty_bitmaps_come_back_from_the_overlay() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
    let serving = serve(&bed, "disk");
    let uri = serving.uri("");
    let bitmap = |words: &[&str]| ctl(&bed, &[&["bitmap", ""], words].concat()).success();
    bitmap(&["--add", "backup", "--add", "off", "--granularity", "64K"]);
    bitmap(&["--disable", "off"]);
    io(&uri, "raw", &["write 0 64k"]);
    asked(&bed, &["snapshot", "", "overlay", "--clear", "backup"]);
    bitmap(&["--enable", "off", "--add", "new", "--granularity", "64K"]);
    io(&uri, "raw", &["write 1M 128k"]);
    bitmap(&["--disable", "new"]);
    asked(&bed, &["commit", ""]);
    io(&uri, "raw", &["write 2M 64k"]);
    let found = asked(&bed, &["bitmap", ""]);
    let of = |name: &str| {
        let list = found["bitmaps"].as_array().unwrap();
        let bitmap = list.iter().find(|bitmap| bitmap["name"] == name).unwrap_or_else(|| panic!("{name}: {found}"));
        (bitmap["dirty-bytes"].as_u64().unwrap() >> 10, bitmap["enabled"].as_bool().unwrap())
    };
    // What came before the snapshot is not in the one that began empty then.
    assert_eq!([of("backup"), of("off"), of("new")], [(192, true), (192, true), (128, false)]);
    serving.stop();
    bed.qemu_img(&["check", "-q", "@disk"]);
    let info: Value = serde_json::from_str(&bed.qemu_img(&["info", "--output=json", "@disk"])).unwrap();
    assert_eq!(info["format-specific"]["data"]["bitmaps"].as_array().unwrap().len(), 3, "{info}");
}
