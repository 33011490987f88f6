//! `bitmap`.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use limosa_image::qcow2::Header;
use limosa_storage::testing::SeededRandom;
use limosa_storage::{FileOptions, FileStorage, block_on};
use serde_json::Value;

use crate::bed::{Answer, Bed};
use crate::needs_qemu;

/// The bitmaps of an image, as stock lists them.
fn listed(bed: &Bed, name: &str) -> Vec<Value> {
    let info = bed.qemu_img(&["info", "--output=json", name]).success().json();
    info["format-specific"]["data"]["bitmaps"].as_array().cloned().unwrap_or_default()
}

/// The changed parts of the disk, as stock reads them from a bitmap that was stored.
fn bits(bed: &Bed, name: &str, bitmap: &str) -> Value {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    // A server that ends removes its socket, perhaps only after the next one has begun.
    let socket = bed.path(&format!("socket{}", CALLS.fetch_add(1, Ordering::Relaxed)));
    let mut served = Command::new("qemu-nbd");
    served.args(["--fork", "-r", "-f", "qcow2", "-B", bitmap, "-k"]).arg(&socket).arg(bed.path(name));
    assert!(served.status().unwrap().success());
    let options = format!(
        "driver=nbd,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}",
        socket.display()
    );
    bed.qemu_img(&["map", "--output=json", "--image-opts", &options]).success().json()
}

#[test]
fn bitmaps_change_as_by_stock() {
    needs_qemu!();
    for (seed, options) in (0..).zip(["cluster_size=64k", "cluster_size=4k", "cluster_size=512,lazy_refcounts=on"]) {
        let bed = Bed::new();
        let mut chance = SeededRandom::new(seed);
        bed.create(&["-f", "qcow2", "-o", options, "ours", "3M"]);
        bed.create(&["-f", "qcow2", "-o", options, "other", "3M"]);
        bed.qemu_img(&["bitmap", "--add", "-g", "4k", "other", "a"]).success();
        bed.qemu_io("other", &["write -q 100k 5k", "write -q 2M 1k"]);
        std::fs::copy(bed.path("ours"), bed.path("stock")).unwrap();
        for _ in 0..20 {
            let mut words = vec!["bitmap"];
            for _ in 0..=chance.below(2) {
                words.extend(*chance.choose(&[
                    &["--add"][..],
                    &["--add", "-g", "16k"],
                    &["--remove"],
                    &["--clear"],
                    &["--enable"],
                    &["--disable"],
                    &["--merge", "a"],
                    &["--merge", "b"],
                    &["--merge", "a", "-b", "other", "-F", "qcow2"],
                ]));
            }
            if chance.below(2) == 0 {
                let write = format!("write -q {} {}", 512 * chance.below(5000), 512 * (1 + chance.below(60)));
                for image in ["ours", "stock"] {
                    bed.qemu_io(image, &[&write]);
                }
            }
            let bitmap = *chance.choose(&["a", "b", "c"]);
            let with = |image| [&words[..], &[image, bitmap]].concat();
            let (ours, stock) = (Answer::from(bed.limosa(&with("ours"))), bed.qemu_img(&with("stock")));
            assert_eq!((ours.status, &ours.stdout), (stock.status, &stock.stdout), "{words:?}: {ours:?} {stock:?}");
            bed.qemu_img(&["check", "-q", "-f", "qcow2", "ours"]).success();
            assert_eq!(listed(&bed, "ours"), listed(&bed, "stock"), "{words:?} {bitmap}");
            bed.both_tell(&["info", "--output=json", "ours"]);
        }
        for bitmap in listed(&bed, "stock") {
            let name = bitmap["name"].as_str().unwrap();
            assert_eq!(bits(&bed, "ours", name), bits(&bed, "stock", name), "{name}");
        }
    }
}

#[test]
fn a_bitmap_that_cannot_be_changed_is_refused_as_by_stock() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "x", "4M"]);
    bed.create(&["-f", "qcow2", "small", "2M"]);
    bed.create(&["-f", "qcow2", "-o", "compat=0.10", "old", "4M"]);
    bed.create(&["-f", "raw", "flat", "4M"]);
    for name in ["x", "small"] {
        bed.limosa(&["bitmap", "--add", name, "b"]).success();
    }
    let long = "n".repeat(1024);
    for (words, says) in [
        (&["--add", "x", "b"][..], "x: bitmap \"b\" already exists"),
        (&["--add", "-g", "1000", "x", "c"], "x: granularity 1000: must be a power of two"),
        (&["--add", "-g", "256", "x", "c"], "granularity 256"),
        (&["--add", "-g", "4G", "x", "c"], "granularity 4294967296"),
        (&["--remove", "x", "c"], "x: it has no bitmap \"c\""),
        (&["--merge", "c", "x", "b"], "x: it has no bitmap \"c\""),
        (&["--merge", "b", "x", "c"], "x: it has no bitmap \"c\""),
        (&["--merge", "b", "-b", "small", "x", "b"], "of a disk of 2097152 bytes"),
        (&["--merge", "b", "-b", "x", "x", "b"], "x"),
        (&["--add", "old", "b"], "old: images of version 2"),
        (&["--remove", "old", "b"], "old: it has no bitmap"),
        (&["--add", "-f", "raw", "flat", "b"], "flat: format raw has no bitmaps"),
        (&["--add", "x", ""], "a name has 1 to 1023 bytes"),
        (&["--add", "x", &long], "a name has 1 to 1023 bytes"),
        (&["--add", "absent", "b"], "absent"),
    ] {
        bed.both_refuse(&[&["bitmap"], words].concat(), says);
    }
    for words in [
        &["x", "b"][..],
        &["--add", "x"],
        &["--clear", "-g", "64k", "x", "b"],
        &["--add", "-F", "qcow2", "x", "b"],
        &["--add", "-b", "small", "x", "b"],
        &["--add", "x", "b", "more"],
    ] {
        let words = [&["bitmap"], words].concat();
        let (ours, stock) = (Answer::from(bed.limosa(&words)), bed.qemu_img(&words));
        assert_eq!((ours.status, stock.status), (Some(1), Some(1)), "{words:?}");
    }
    bed.create(&["-f", "qcow2", "huge", "400T"]);
    bed.both_refuse(&["bitmap", "--add", "huge", "b"], "take a larger granularity");
    bed.limosa(&["bitmap", "--add", "-g", "2M", "huge", "b"]).success();
    bed.both_tell(&["info", "--output=json", "huge"]);
    bed.qemu_img(&["bitmap", "--clear", "huge", "b"]).success();
}

#[test]
fn bitmaps_are_copied_by_convert_as_by_stock() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "from", "4M"]);
    for (granularity, name) in [("4k", "fine"), ("128k", "coarse"), ("64k", "off"), ("64k", "empty")] {
        bed.qemu_img(&["bitmap", "--add", "-g", granularity, "from", name]).success();
    }
    bed.qemu_io("from", &["write -q 100k 5k", "write -q 2M 1k", "write -q -z 3M 100k"]);
    bed.qemu_img(&["bitmap", "--disable", "from", "off"]).success();
    bed.qemu_img(&["bitmap", "--clear", "from", "empty"]).success();
    for more in [&[][..], &["-c"], &["-o", "cluster_size=4k"]] {
        let words = |target| [&["convert", "-O", "qcow2", "--bitmaps"], more, &["from", target]].concat();
        bed.limosa(&words("ours")).success();
        bed.qemu_img(&words("stock")).success();
        bed.qemu_img(&["check", "-q", "ours"]).success();
        assert_eq!(listed(&bed, "ours"), listed(&bed, "stock"), "{more:?}");
        assert_eq!(listed(&bed, "ours").len(), 4);
        for name in ["fine", "coarse", "off", "empty"] {
            assert_eq!(bits(&bed, "ours", name), bits(&bed, "stock", name), "{more:?}: {name}");
        }
        bed.qemu_img(&["compare", "-q", "from", "ours"]).success();
    }
    // One that a killed writer has left.
    let info = bed.qemu_img(&["info", "--output=json", "from"]).success().json();
    assert_eq!(info["format-specific"]["data"]["bitmaps"][0]["name"], "fine");
    leave_in_use(&bed, "from");
    bed.both_refuse(
        &["convert", "-O", "qcow2", "--bitmaps", "from", "new"],
        "bitmap \"fine\" is inconsistent (it was in use and not stored): remove it, or add --skip-broken-bitmaps",
    );
    assert!(!bed.path("new").exists());
    let words = ["convert", "-O", "qcow2", "--bitmaps", "--skip-broken-bitmaps", "from", "new"];
    let said = bed.limosa(&words).success().stderr;
    assert_eq!(said.matches("it is not copied").count(), 3, "{said}");
    let names: Vec<_> = listed(&bed, "new").iter().map(|bitmap| bitmap["name"].clone()).collect();
    assert_eq!(names, ["off"]);
    let words = ["convert", "-O", "qcow2", "--skip-broken-bitmaps", "from", "new"];
    assert_eq!((bed.qemu_img(&words).status, Answer::from(bed.limosa(&words)).status), (Some(1), Some(1)));
    bed.both_refuse(&["convert", "-O", "qcow2", "--bitmaps", "from", "from", "new"], "exactly one source");
    bed.create(&["-f", "raw", "flat", "4M"]);
    bed.both_refuse(&["convert", "-O", "qcow2", "--bitmaps", "-f", "raw", "flat", "new"], "flat: format raw");
}

/// Has all enabled bitmaps of an image look as if their writer had been killed.
fn leave_in_use(bed: &Bed, name: &str) {
    let file = FileStorage::open(bed.path(name), &FileOptions::default()).unwrap();
    block_on(async {
        let mut header = Header::read(&*file).await.unwrap();
        header.prepare_autoclear(&*file, false).await.unwrap();
    });
}
