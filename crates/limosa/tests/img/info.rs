//! `info`.

use crate::bed::{Bed, poke};
use crate::needs_qemu;

/// Images of many kinds.
fn images(bed: &Bed) -> Vec<&'static str> {
    std::fs::create_dir(bed.path("sub")).unwrap();
    bed.create(&["-f", "raw", "raw", "1000001"]);
    bed.create(&["-f", "qcow2", "base", "1.5G"]);
    bed.qemu_io("base", &["write 0 1M"]);
    bed.create(&["-f", "qcow2", "-b", "base", "-F", "qcow2", "overlay"]);
    bed.create(&["-f", "qcow2", "-b", "../overlay", "-F", "qcow2", "sub/top"]);
    bed.create(&["-f", "qcow2", "-u", "-b", "absent", "-F", "raw", "dangling", "1M"]);
    bed.create(&["-f", "qcow2", "-o", "compat=0.10,cluster_size=4k", "old", "1M"]);
    bed.create(&["-f", "qcow2", "-o", "compression_type=zstd,extended_l2=on,lazy_refcounts=on", "new", "1M"]);
    bed.create(&["-f", "qcow2", "-o", "data_file=outside.data,data_file_raw=on", "outside", "1M"]);
    bed.create(&["-f", "qcow2", "kept", "1M"]);
    for name in ["one", "two words"] {
        bed.qemu_img(&["snapshot", "-c", name, "kept"]).success();
    }
    bed.qemu_img(&["bitmap", "--add", "kept", "b0"]).success();
    bed.qemu_img(&["bitmap", "--add", "--disable", "-g", "128k", "kept", "b1"]).success();
    // The dirty and the corrupt bit.
    for (name, bits) in [("dirty", 1), ("corrupt", 2)] {
        bed.create(&["-f", "qcow2", name, "1M"]);
        poke(&bed.path(name), 79, &[bits]);
    }
    vec!["raw", "base", "overlay", "sub/top", "dangling", "old", "new", "outside", "kept", "dirty", "corrupt"]
}

#[test]
fn people_and_programs_see_what_qemu_img_prints() {
    needs_qemu!();
    let bed = Bed::new();
    for name in images(&bed) {
        bed.both_say(&["info", name]);
        bed.both_tell(&["info", "--output", "json", name]);
    }
    bed.both_say(&["info", "-f", "raw", "base"]);
    bed.both_say(&["info", "--image-opts", "driver=qcow2,file.driver=file,file.filename=overlay"]);
    bed.both_say(&["info", r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"overlay"}}"#]);
    bed.both_say(&["info", "-U", "file:base"]);
    let (output, short) = (["info", "--output", "json", "base"], ["info", "--json", "base"]);
    assert_eq!(bed.limosa(&output).success().stdout, bed.limosa(&short).success().stdout);
}

#[test]
fn a_chain_is_listed_down_to_its_end() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    for name in ["raw", "sub/top", "overlay"] {
        bed.both_say(&["info", "--backing-chain", name]);
        bed.both_tell(&["info", "--backing-chain", "--output", "json", name]);
    }
    bed.both_refuse(&["info", "--backing-chain", "dangling"], "absent");
}

#[test]
fn asking_opens_no_other_file() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    for name in ["base", "overlay", "outside.data"] {
        std::fs::remove_file(bed.path(name)).unwrap();
    }
    for name in ["sub/top", "outside"] {
        bed.limosa(&["info", name]).success();
        bed.limosa(&["info", "--untrusted", name]).success();
    }
    // A chain is more than asking.
    std::fs::write(bed.path("overlay"), b"").unwrap();
    bed.limosa(&["info", "--untrusted", "--backing-chain", "sub/top"]).one_line(&["sub/top", "--untrusted"]);
}

#[test]
fn an_image_that_cannot_be_described_is_refused() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    bed.both_refuse(&["info", "absent"], "absent");
    bed.both_refuse(&["info", "-f", "qcow2", "raw"], "raw: it is not a qcow2 image\n");
    bed.both_refuse(&["info", "."], "not a directory");
    bed.both_refuse(&["info", "-f", "foo", "raw"], "foo");
    bed.both_refuse(&["info", "foo:bar"], "foo");
    bed.both_refuse(&["info", "--image-opts", "base"], "base");
}
