//! `create`.

use serde_json::Value;

use crate::bed::{Answer, Bed, length};
use crate::needs_qemu;

/// Stock qemu-img's description of an image, without the parts that differ between any two.
#[track_caller]
fn described(bed: &Bed, name: &str) -> Value {
    let mut said = bed.qemu_img(&["info", "--output", "json", name]).success().json();
    let object = said.as_object_mut().unwrap();
    object.remove("actual-size");
    object.remove("children");
    said
}

/// Lets both create an image of one name, and expects the same line, and the same image in stock qemu-img's
/// description.
#[track_caller]
fn both_make(bed: &Bed, name: &str, words: &[&str]) {
    let make = |answer: Answer| {
        assert_eq!(answer.status, Some(0), "{words:?}: {answer:?}");
        let made = described(bed, name);
        std::fs::remove_file(bed.path(name)).unwrap();
        (answer.stdout, made)
    };
    let stock = make(bed.qemu_img(words));
    let ours = Answer::from(bed.limosa(words));
    if described(bed, name)["format"] == "qcow2" {
        bed.qemu_img(&["check", "-q", name]).success();
    }
    assert_eq!(make(ours), stock, "{words:?}");
}

#[test]
fn images_are_made_as_qemu_img_makes_them() {
    needs_qemu!();
    let bed = Bed::new();
    for options in [
        "",
        "cluster_size=512",
        "cluster_size=2M,extended_l2=on",
        "compat=0.10",
        "compat=v2,cluster_size=4k",
        "compat=v3,refcount_bits=1,lazy_refcounts=on",
        "refcount_bits=64,compression_type=zstd",
        "preallocation=metadata",
        "preallocation=falloc,cluster_size=128k",
        "preallocation=full",
    ] {
        let words = ["create", "-f", "qcow2", "x", "10M", "-o", options];
        both_make(&bed, "x", if options.is_empty() { &words[..5] } else { &words });
    }
    both_make(&bed, "x", &["create", "-f", "qcow2", "-o", "cluster_size=64k,size=1.5G", "-o", "cluster_size=1M", "x"]);
    both_make(&bed, "x", &["create", "-q", "-f", "qcow2", "x", "1000001"]);
    both_make(&bed, "x", &["create", "x", "10M"]);
    both_make(&bed, "x", &["create", "-f", "raw", "-o", "preallocation=full", "x", "1000001"]);
    both_make(&bed, "x", &["create", "x", "0"]);
    both_make(&bed, "x", &["create", "-f", "qcow2", "file:x", "0"]);
}

#[test]
fn a_backing_file_is_written_down_without_being_looked_at_if_asked_so() {
    needs_qemu!();
    let bed = Bed::new();
    // Stock qemu-img looks at it to describe the image, but not to make it.
    for name in ["absent", "a,b"] {
        std::fs::write(bed.path(name), [0; 512]).unwrap();
    }
    both_make(&bed, "x", &["create", "-f", "qcow2", "-u", "-b", "absent", "-F", "raw", "x", "1M"]);
    both_make(&bed, "x", &["create", "-f", "qcow2", "-u", "-o", "backing_file=a,,b,backing_fmt=raw", "x", "1M"]);
}

#[test]
fn a_backing_file_gives_the_size_and_has_to_be_there() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::create_dir(bed.path("sub")).unwrap();
    bed.create(&["-f", "qcow2", "base", "3M"]);
    bed.create(&["-f", "raw", "raw", "1M"]);
    for words in [
        &["-b", "base", "-F", "qcow2", "x"][..],
        &["-b", "raw", "-F", "raw", "x"],
        &["-b", "base", "-F", "raw", "x"],
        &["-b", "base", "-F", "qcow2", "x", "5M"],
        &["-o", "backing_file=base,backing_fmt=qcow2", "x"],
        &["-b", r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"base"}}"#, "-F", "qcow2", "x"],
    ] {
        both_make(&bed, "x", &[&["create", "-f", "qcow2"], words].concat());
    }
    // Named from the folder of the image.
    both_make(&bed, "sub/x", &["create", "-f", "qcow2", "-b", "../base", "-F", "qcow2", "sub/x"]);
    for words in [
        &["-b", "absent", "-F", "qcow2", "x"][..],
        &["-b", "absent", "-F", "qcow2", "x", "1M"],
        &["-b", "raw", "-F", "qcow2", "x", "1M"],
        &["-b", "base", "-F", "foo", "x", "1M"],
    ] {
        bed.both_refuse(&[&["create", "-f", "qcow2"], words].concat(), "x: ");
        assert!(!bed.path("x").exists(), "{words:?}");
    }
}

#[test]
fn what_a_backing_file_refers_to_is_not_opened_if_it_is_not_trusted() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "base", "3M"]);
    bed.create(&["-f", "qcow2", "-b", "base", "-F", "qcow2", "middle"]);
    let create = |below: &str| bed.limosa(&["create", "--untrusted", "-f", "qcow2", "-b", below, "-F", "qcow2", "x"]);
    create("middle").one_line(&["middle", "--untrusted"]);
    assert!(!bed.path("x").exists());
    create("base").success();
}

#[test]
fn contents_may_lie_in_a_file_of_their_own() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("x.data"), b"old contents").unwrap();
    both_make(&bed, "x", &["create", "-f", "qcow2", "-o", "data_file=x.data,data_file_raw=on", "x", "1M"]);
    assert_eq!(std::fs::read(bed.path("x.data")).unwrap(), vec![0; 1 << 20]);
}

#[test]
fn what_is_there_is_overwritten_and_what_fails_leaves_no_file() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("x"), vec![7; 3 << 20]).unwrap();
    bed.limosa(&["create", "-f", "qcow2", "x", "1M"]).success();
    bed.qemu_img(&["check", "x"]).success();
    bed.qemu_img(&["compare", "x", "/dev/null"]).success();
    assert!(length(&bed.path("x")) < 1 << 20);

    bed.both_refuse(&["create", "-f", "qcow2", "absent/x", "1M"], "absent/x");
    bed.both_refuse(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=3k", "new", "1M"], "cluster_size");
    bed.both_refuse(&["create", "-q", "-f", "qcow2", "-o", "refcount_bits=3", "new", "1M"], "refcount_bits");
    bed.both_refuse(
        &["create", "-q", "-f", "qcow2", "-o", "data_file=w,data_file_raw=on,compat=v2", "new", "1M"],
        "compat",
    );
    assert!(!bed.path("new").exists());
}

#[test]
fn what_cannot_be_made_is_refused_as_qemu_img_refuses_it() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "base", "1M"]);
    for (words, says) in [
        (&["-f", "qcow2", "x"][..], "size"),
        (&["-f", "vmdk-or-so", "x", "1M"], "vmdk-or-so"),
        (&["-f", "qcow2", "-o", "foo=1", "x", "1M"], "-o foo"),
        (&["-f", "qcow2", "-o", "size=1M", "x", "1M"], "twice"),
        (&["-f", "qcow2", "-o", "lazy_refcounts=maybe", "x", "1M"], "maybe"),
        (&["-f", "qcow2", "-b", "base", "x"], "-F"),
        (&["-f", "qcow2", "-b", "x", "-F", "qcow2", "x"], "its own backing file"),
        (&["-f", "qcow2", "-b", "", "-F", "qcow2", "x"], "is empty"),
        (&["-f", "raw", "-b", "base", "-F", "qcow2", "x"], "raw"),
        (&["-q", "-f", "qcow2", "-F", "qcow2", "x", "1M"], "-b"),
        (&["-q", "-f", "qcow2", "-o", "encryption=on", "x", "1M"], "encrypt"),
        (&["-q", "-f", "qcow2", "-o", "compat=2", "x", "1M"], "compat"),
        (&["-q", "-f", "qcow2", "-o", "preallocation=foo", "x", "1M"], "preallocation"),
        (&["-q", "-f", "qcow2", "-o", "compression_type=foo", "x", "1M"], "compression_type"),
        (&["-q", "-f", "qcow2", "-o", "data_file_raw=on", "x", "1M"], "data_file"),
        (&["-q", "-f", "qcow2", "-u", "-b", "absent", "-F", "qcow2", "x"], "size"),
        (&["-q", "-f", "qcow2", "nbd://localhost/x", "1M"], "nbd"),
    ] {
        bed.both_refuse(&[&["create"], words].concat(), says);
        assert!(!bed.path("x").exists(), "{words:?}");
    }
}

#[test]
fn options_of_a_format_are_listed_without_an_image() {
    for (format, some) in [("qcow2", "  cluster_size=<size>    - "), ("raw", "  preallocation=<str>    - ")] {
        let list = crate::stage::limosa(["img", "create", "-f", format, "-o", "help"]).success().stdout;
        assert!(list.starts_with(&format!("Supported {format} options:\n")) && list.contains(some), "{list}");
    }
}
