//! `limosa img amend`.

use std::fs;

use crate::bed::{Answer, Bed, assert_one_line};
use crate::needs_qemu;

const SECRETS: [&str; 6] = [
    "--object",
    "secret,id=one,data=the first",
    "--object",
    "secret,id=two,data=the second",
    "--object",
    "secret,id=three,data=the third",
];

/// `amend` with the secrets.
fn amend<'a>(words: &[&'a str]) -> Vec<&'a str> {
    [&["amend"], &SECRETS[..], words].concat()
}

#[test]
fn key_slots_are_changed_as_by_stock_tools() {
    needs_qemu!();
    for (format, prefix) in [("luks", ""), ("qcow2", "encrypt.")] {
        let bed = Bed::new();
        let create = format!("{prefix}key-secret=one,{prefix}iter-time=10");
        let create = if format == "qcow2" { format!("encrypt.format=luks,{create}") } else { create };
        bed.create(&[&SECRETS[..], &["-f", format, "-o", &create, "x", "1M"]].concat());
        let image = |secret: &str| format!("driver={format},{prefix}key-secret={secret},file.filename=x");
        let (one, two) = (image("one"), image("two"));
        let words = |options: &str| {
            let named = options.split(',').map(|option| format!("{prefix}{option}"));
            named.collect::<Vec<_>>().join(",")
        };
        let add = words("state=active,new-secret=two,iter-time=10");
        for (options, says) in [
            ("state=inactive,old-secret=one", "no key slot would be left"),
            ("state=inactive,keyslot=0", "no key slot would be left"),
            ("state=active,new-secret=two,keyslot=0", "is active"),
            ("state=active,new-secret=two,keyslot=9", "0 to 7"),
            ("state=active", "new-secret"),
            ("state=inactive", "the slot or its passphrase"),
            ("state=inactive,old-secret=two", "no key slot opens"),
            ("state=inactive,new-secret=two", "new-secret"),
            ("state=active,new-secret=two,old-secret=one", "old-secret"),
            ("state=inactive,keyslot=3", "not active"),
            ("new-secret=two", "state"),
            ("state=odd", "active or inactive"),
            ("state=active,new-secret=four", "no such secret"),
        ] {
            bed.both_refuse(&amend(&["--image-opts", "-o", &words(options), &one]), says);
        }
        assert_eq!(bed.limosa(&amend(&["-q", "--image-opts", "-o", &add, &one])).status.code(), Some(0));
        bed.both_say(&["info", "x"]);
        // Both passphrases open it, with both programs.
        for image in [&one, &two] {
            let words = [&["measure"], &SECRETS[..], &["-O", "raw", "--image-opts", image]].concat();
            bed.both_say(&words);
            bed.qemu_img(&words).success();
        }
        let gone = words("state=inactive,old-secret=one");
        let before = fs::read(bed.path("x")).unwrap();
        bed.qemu_img(&amend(&["--image-opts", "-o", &gone, &two])).success();
        // But for the space that the file takes up.
        let slots = |info: String| info.split_once("slots:").unwrap().1.split("Child node").next().unwrap().to_owned();
        let theirs = slots(bed.qemu_img(&["info", "x"]).success().stdout);
        fs::write(bed.path("x"), before).unwrap();
        assert_eq!(bed.limosa(&amend(&["-p", "--image-opts", "-o", &gone, &two])).status.code(), Some(0));
        assert_eq!(slots(bed.both_say(&["info", "x"]).stdout), theirs);
        let over = words("state=active,new-secret=three,keyslot=1,iter-time=10");
        let over = amend(&["--force", "-t", "none", "--image-opts", "-o", &over, &two]);
        assert_eq!(bed.limosa(&over).status.code(), Some(0));
        let three = image("three");
        bed.qemu_img(&[&["check"], &SECRETS[..], &["--image-opts", &three]].concat());
        bed.qemu_img(&[&["measure"], &SECRETS[..], &["-O", "raw", "--image-opts", &three]].concat()).success();
    }
}

#[test]
fn several_options_are_all_checked_before_the_first_one_changes() {
    needs_qemu!();
    let bed = Bed::new();
    let create = "encrypt.format=luks,encrypt.key-secret=one,encrypt.iter-time=10";
    bed.create(&[&SECRETS[..], &["-f", "qcow2", "-o", create, "x", "1M"]].concat());
    let one = "driver=qcow2,encrypt.key-secret=one,file.filename=x";
    let amend_one = |options: &str| bed.limosa(&amend(&["-q", "--image-opts", "-o", options, one]));
    let before = fs::read(bed.path("x")).unwrap();
    for options in [
        "size=2M,encrypt.state=inactive,encrypt.keyslot=0",
        "size=512k,compat=1.1,encrypt.state=active,encrypt.new-secret=two,encrypt.keyslot=0",
    ] {
        assert_eq!(amend_one(options).status.code(), Some(1), "{options}");
        assert!(fs::read(bed.path("x")).unwrap() == before, "{options}");
    }
    // The passphrase that is taken away opens the image for the rest.
    assert_eq!(amend_one("encrypt.state=active,encrypt.new-secret=two,encrypt.iter-time=10").status.code(), Some(0));
    let ended = amend_one("size=2M,encrypt.state=inactive,encrypt.old-secret=one");
    assert_eq!(ended.status.code(), Some(0), "{}", ended.stderr);
    assert_eq!(bed.qemu_img(&["info", "--output", "json", "x"]).success().json()["virtual-size"], 2 << 20);
    assert_eq!(amend_one("size=3M").status.code(), Some(1), "it does not open the image any more");
    // A target is not overwritten for options that cannot be.
    let wrong = "encrypt.format=luks,encrypt.key-secret=one,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,\
                 encrypt.ivgen-hash-alg=sha1";
    let before = fs::read(bed.path("x")).unwrap();
    let ended = bed.limosa(&[&["create", "-q"], &SECRETS[..], &["-f", "qcow2", "-o", wrong, "x", "1M"]].concat());
    assert_eq!(ended.status.code(), Some(1));
    assert!(fs::read(bed.path("x")).unwrap() == before, "{}", ended.stderr);
    // A data file that becomes longer stays sparse.
    let create = "encrypt.format=luks,encrypt.key-secret=one,encrypt.iter-time=10,data_file=data";
    bed.create(&[&SECRETS[..], &["-f", "qcow2", "-o", create, "y", "1M"]].concat());
    let y = "driver=qcow2,encrypt.key-secret=one,file.filename=y";
    let resize = [&["resize", "-q"], &SECRETS[..], &["--image-opts", y, "64G"]].concat();
    assert_eq!(bed.limosa(&resize).status.code(), Some(0));
    let data = fs::metadata(bed.path("data")).unwrap();
    assert!(data.len() == 64 << 30 && std::os::unix::fs::MetadataExt::blocks(&data) < 8192, "{data:?}");
}

#[test]
fn contents_stay_when_refcounts_and_zero_clusters_are_written_anew() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "raw", "base", "3M"]);
    bed.qemu_io("base", &["write -q -P 5 0 3M"]);
    for below in [&[][..], &["-b", "base", "-F", "raw"]] {
        for options in ["refcount_bits=8", "refcount_bits=64", "refcount_bits=2,lazy_refcounts=on", "compat=0.10"] {
            bed.create(&[&["-f", "qcow2"], below, &["x", "3M"]].concat());
            bed.qemu_io("x", &["write -q -P 7 100k 700k", "write -q -z 300k 200k", "write -q -z 2M 300k"]);
            bed.qemu_img(&["snapshot", "-c", "one", "x"]).success();
            bed.qemu_io("x", &["write -q -z 0 64k", "write -q -z -u 400k 200k", "write -q -P 9 2100k 5k"]);
            bed.qemu_img(&["convert", "-O", "raw", "x", "disk"]).success();
            bed.qemu_img(&["convert", "-O", "raw", "-l", "one", "x", "snapshot"]).success();
            let ended = bed.limosa(&["amend", "-q", "-f", "qcow2", "-o", options, "x"]);
            assert_eq!(ended.status.code(), Some(0), "{options}: {}", ended.stderr);
            bed.qemu_img(&["check", "x"]).success();
            bed.qemu_img(&["compare", "x", "disk"]).success();
            bed.qemu_img(&["convert", "-O", "raw", "-l", "one", "x", "again"]).success();
            bed.qemu_img(&["compare", "snapshot", "again"]).success();
            let info = bed.qemu_img(&["info", "--output", "json", "x"]).success().json();
            let specific = &info["format-specific"]["data"];
            match options.split_once('=').unwrap() {
                ("compat", version) => assert_eq!(specific["compat"], version),
                (_, bits) => assert_eq!(specific["refcount-bits"].to_string(), bits.split(',').next().unwrap()),
            }
            bed.both_refuse(&["amend", "-q", "-f", "qcow2", "-o", "refcount_bits=1", "x"], "refcount");
        }
    }
}

#[test]
fn options_of_qcow2_images_are_amended_as_by_stock_tools() {
    needs_qemu!();
    let bed = Bed::new();
    for made in ["compat=1.1", "compat=0.10", "compat=1.1,lazy_refcounts=on"] {
        for options in [
            "compat=0.10",
            "compat=v3",
            "compat=1.1,lazy_refcounts=on",
            "lazy_refcounts=off",
            "size=3M",
            "size=512k",
            "lazy_refcounts=off,compat=v2,size=2M",
            "refcount_bits=16",
        ] {
            for name in ["ours", "theirs"] {
                bed.create(&["-f", "qcow2", "-o", made, name, "1M"]);
                bed.qemu_io(name, &["write -q -P 7 100k 300k"]);
            }
            let words = |name| ["amend", "-q", "-f", "qcow2", "-o", options, name];
            let ended = bed.limosa(&words("ours"));
            assert_eq!(ended.status.code(), Some(0), "{made} {options}: {}", ended.stderr);
            bed.qemu_img(&words("theirs")).success();
            let info = |name| {
                let mut info = bed.qemu_img(&["info", "--output", "json", name]).success().json();
                for differs in ["filename", "children", "actual-size"] {
                    info.as_object_mut().unwrap().remove(differs);
                }
                info
            };
            assert_eq!(info("ours"), info("theirs"), "{made} {options}");
            bed.qemu_img(&["check", "ours"]).success();
            bed.qemu_img(&["compare", "ours", "theirs"]).success();
        }
    }
    bed.create(&["-f", "qcow2", "-o", "compat=0.10", "x", "1M"]);
    bed.create(&["-f", "raw", "raw", "1M"]);
    for (options, says) in [
        ("lazy_refcounts=on", "compat=1.1"),
        ("compat=3", "v2 (0.10) or v3 (1.1)"),
        ("size=1000", "512"),
        ("backing_file=y,backing_fmt=raw", "rebase"),
        ("cluster_size=4k", "when an image is created"),
        ("encrypt.state=active,encrypt.new-secret=one", "not encrypted"),
        ("data_file=y", "data file"),
        ("data_file_raw=on", "data file"),
        ("frob=1", "unknown option"),
    ] {
        bed.both_refuse(&amend(&["-o", options, "x"]), says);
    }
    bed.both_refuse(&["amend", "-f", "raw", "-o", "size=2M", "raw"], "format raw");
    bed.both_refuse(&["amend", "x"], "-o");
    assert_eq!(
        bed.limosa(&["amend", "-o", "help", "x"]).stdout,
        bed.limosa(&["amend", "-f", "qcow2", "-o", "?"]).stdout
    );
    let help = bed.limosa(&["amend", "-f", "qcow2", "-o", "help"]);
    assert!(help.stdout.starts_with("Amend qcow2 options:") && help.stdout.contains("encrypt.new-secret=<str>"));
    assert!(!help.stdout.contains("backing_f") && help.stdout.contains("data_file_raw=<bool"), "{help:?}");
}

#[test]
fn a_data_file_gets_another_name_as_by_stock_tools() {
    needs_qemu!();
    let bed = Bed::new();
    for (made, options) in [
        ("data_file=one", "data_file=two"),
        ("data_file=one,data_file_raw=on", "data_file=two"),
        ("data_file=one,data_file_raw=on", "data_file_raw=on,size=2M"),
        ("data_file=one,data_file_raw=on", "data_file=two,data_file_raw=off,lazy_refcounts=on"),
        ("data_file=one", "data_file="),
        ("data_file=one", "data_file_raw=off"),
    ] {
        let after = ["ours", "theirs"].map(|name| {
            bed.create(&["-f", "qcow2", "-o", made, name, "1M"]);
            bed.qemu_io(name, &["write -q -P 7 100k 300k"]);
            let words = ["amend", "-q", "-f", "qcow2", "-o", options, name];
            let ended = if name == "ours" { Answer::from(bed.limosa(&words)) } else { bed.qemu_img(&words) };
            assert_eq!(ended.status, Some(0), "{made} {options}: {ended:?}");
            fs::rename(bed.path("one"), bed.path("two")).unwrap();
            let image = format!("driver=qcow2,file.filename={name},data-file.filename=two");
            bed.qemu_img(&["convert", "-O", "raw", "--image-opts", &image, "contents"]).success();
            let info = bed.qemu_img(&["info", "--output", "json", "--image-opts", &image]).success().json();
            let size = info["virtual-size"].clone();
            (info["format-specific"]["data"].clone(), size, fs::read(bed.path("contents")).unwrap())
        });
        assert!(after[0] == after[1], "{made} {options}: {:?} {:?}", after[0].0, after[1].0);
        let length = usize::try_from(after[0].1.as_u64().unwrap()).unwrap();
        assert!(after[0].2.len() == length && after[0].2[200 << 10] == 7, "{made} {options}");
    }
    bed.create(&["-f", "qcow2", "-o", "data_file=one", "x", "1M"]);
    let before = fs::read(bed.path("x")).unwrap();
    for (options, says) in
        [("data_file_raw=on", "raw"), ("size=2M,data_file_raw=on", "raw"), ("compat=v2,data_file=", "data file")]
    {
        let words = amend(&["-q", "-f", "qcow2", "-o", options, "x"]);
        assert_one_line(&bed.limosa(&words).into(), &words, says);
        assert!(fs::read(bed.path("x")).unwrap() == before, "{options}");
    }
}
