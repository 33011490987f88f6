//! Encrypted images in the format `luks`.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use limosa_testkit::{cryptsetup, qemu_io};

use crate::bed::{Answer, Bed, assert_one_line};
use crate::needs_qemu;

const SECRET: [&str; 2] = ["--object", "secret,id=s,data=correct horse"];

/// An image by the options that open it.
fn opts(name: &str) -> &'static str {
    format!("driver=luks,key-secret=s,file.filename={name}").leak()
}

/// A disk with contents, holes and zeros.
fn disk(bed: &Bed) {
    bed.create(&["-f", "qcow2", "disk", "5M"]);
    bed.qemu_io("disk", &["write -P 7 0 70k", "write -P 9 1M 1M", "write -z 3M 64k", "write -P 3 5242368 512"]);
}

/// Expects the same contents, by both programs.
#[track_caller]
fn same(bed: &Bed, image: &str) {
    let words = [&["compare"], &SECRET[..], &["--image-opts", "driver=qcow2,file.filename=disk", opts(image)]].concat();
    assert_eq!(bed.qemu_img(&words).success().stdout, "Images are identical.\n");
    bed.both_say(&words);
}

#[test]
fn images_of_stock_tools_are_described_as_stock_tools_do() {
    needs_qemu!();
    let bed = Bed::new();
    for options in [
        "cipher-alg=aes-256",
        "cipher-alg=aes-256,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256",
        "cipher-alg=twofish-128,cipher-mode=xts,ivgen-alg=plain,hash-alg=ripemd160",
    ] {
        let options = format!("key-secret=s,iter-time=10,{options}");
        bed.create(&[&SECRET[..], &["-f", "luks", "-o", &options, "x", "3M"]].concat());
        bed.both_say(&["info", "x"]);
        bed.both_tell(&["info", "--output", "json", "x"]);
        bed.both_say(&["info", "-f", "luks", "x"]);
        for form in ["human", "json"] {
            let output = format!("--output={form}");
            bed.both_say(&[&["measure", &output], &SECRET[..], &["-O", "raw", "--image-opts", opts("x")]].concat());
            let map = [&["map", &output], &SECRET[..], &["--image-opts", opts("x")]].concat();
            if form == "json" {
                bed.both_tell(&map);
            } else {
                bed.both_refuse(&map, "are encrypted, so they have no plain location; use --output json");
            }
        }
    }
}

#[test]
fn contents_are_converted_from_and_to_encrypted_images() {
    needs_qemu!();
    let bed = Bed::new();
    disk(&bed);
    let to = |name| ["-O", "luks", "-o", "key-secret=s,iter-time=10", "disk", name];
    bed.qemu_img(&[&["convert"], &SECRET[..], &to("theirs")].concat()).success();
    same(&bed, "theirs");
    let ours = [&["convert"], &SECRET[..], &to("ours")].concat();
    assert_eq!(bed.limosa(&ours).status.code(), Some(0));
    same(&bed, "ours");
    for (name, program) in [("theirs", "limosa"), ("ours", "limosa"), ("ours", "qemu-img")] {
        let words = [&["convert"], &SECRET[..], &["-O", "qcow2", "--image-opts", opts(name), "plain"]].concat();
        match program {
            "limosa" => assert_eq!(bed.limosa(&words).status.code(), Some(0)),
            _ => _ = bed.qemu_img(&words).success(),
        }
        assert_eq!(bed.qemu_img(&["compare", "disk", "plain"]).success().stdout, "Images are identical.\n");
    }
    let blocks = [&["dd"], &SECRET[..], &["--image-opts", "bs=512", "count=2049", "skip=2047"]].concat();
    for (name, of) in [("ours", "a"), ("theirs", "b")] {
        let (from, to) = (format!("if={}", opts(name)), format!("of={of}"));
        let words = [&blocks[..], &[&from, &to]].concat();
        assert_eq!(bed.limosa(&words).status.code(), Some(0), "{words:?}");
    }
    assert_eq!(fs::read(bed.path("a")).unwrap(), [vec![0; 512], vec![9; 512]].concat());
    assert_eq!(fs::read(bed.path("b")).unwrap(), fs::read(bed.path("a")).unwrap());
    // An existing target is overwritten, zeros included.
    let again = [&["convert"], &SECRET[..], &["-n", "--target-image-opts", "disk", opts("theirs")]].concat();
    assert_eq!(bed.limosa(&again).status.code(), Some(0));
    same(&bed, "theirs");
}

#[test]
fn new_images_are_opened_by_stock_tools_and_change_their_size() {
    needs_qemu!();
    let bed = Bed::new();
    for options in [
        "cipher-alg=aes-128,cipher-mode=xts,hash-alg=sha1",
        "cipher-alg=aes-256,cipher-mode=cbc,ivgen-alg=essiv",
        "cipher-alg=serpent-256,ivgen-alg=plain,hash-alg=sha512",
        "cipher-alg=twofish-256,hash-alg=ripemd160",
    ] {
        let options = format!("key-secret=s,iter-time=10,{options}");
        let words = [&["create"], &SECRET[..], &["-f", "luks", "-o", &options, "x", "3M"]].concat();
        let printed = bed.limosa(&words);
        assert_eq!(printed.status.code(), Some(0), "{}", printed.stderr);
        assert!(!printed.stdout.contains("horse"));
        bed.both_say(&["info", "x"]);
        let dump = cryptsetup(["luksDump", bed.path("x").to_str().unwrap()]).unwrap();
        assert!(dump.contains("Key Slot 0: ENABLED") && dump.contains("Key Slot 1: DISABLED"), "{dump}");
        // What is behind the old end reads as zeros, with stock tools too.
        let zero = [&["convert"], &SECRET[..], &["-n", "--target-image-opts", "zero", opts("x")]].concat();
        bed.create(&["-f", "qcow2", "zero", "3M"]);
        assert_eq!(bed.limosa(&zero).status.code(), Some(0));
        let resize = |size| [&["resize", "-q"], &SECRET[..], &["--shrink", "--image-opts", opts("x"), size]].concat();
        assert_eq!(bed.limosa(&resize("4M")).status.code(), Some(0));
        bed.qemu_img(&["resize", "-q", "zero", "4M"]).success();
        let compare =
            [&["compare"], &SECRET[..], &["--image-opts", "driver=qcow2,file.filename=zero", opts("x")]].concat();
        bed.qemu_img(&compare).success();
        bed.both_say(&["info", "x"]);
        assert_eq!(bed.limosa(&resize("1M")).status.code(), Some(0));
        bed.both_say(&["info", "x"]);
        bed.create(&["-f", "qcow2", "zero", "1M"]);
        bed.qemu_img(&compare).success();
    }
}

#[test]
fn encrypted_qcow2_images_of_stock_tools_are_read_and_described() {
    needs_qemu!();
    let bed = Bed::new();
    disk(&bed);
    for options in
        ["cluster_size=64k", "cluster_size=4k,extended_l2=off,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv"]
    {
        let options = format!("encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10,{options}");
        let words = [&["convert"], &SECRET[..], &["-O", "qcow2", "-o", &options, "disk", "x"]].concat();
        bed.qemu_img(&words).success();
        bed.both_tell(&["info", "--output", "json", "x"]);
        bed.both_say(&["info", "x"]);
        let image = "driver=qcow2,encrypt.key-secret=s,file.filename=x";
        let compare = [&["compare"], &SECRET[..], &["--image-opts", "driver=qcow2,file.filename=disk", image]].concat();
        assert_eq!(bed.both_say(&compare).stdout, "Images are identical.\n");
        bed.both_tell(&[&["map", "--output", "json"], &SECRET[..], &["--image-opts", image]].concat());
        bed.both_refuse(&[&["map"], &SECRET[..], &["--image-opts", image]].concat(), "are encrypted");
        bed.both_say(&[&["check"], &SECRET[..], &["--image-opts", image]].concat());
        let says =
            "no secret was given for it; give one: --object secret,id=s,file=FILE --image-opts driver=qcow2,encrypt.";
        bed.both_refuse(&["convert", "-O", "raw", "x", "y"], says);
        let wrong = ["convert", "--object", "secret,id=s,data=no", "-O", "raw", "--image-opts", image, "y"];
        bed.both_refuse(&wrong, "does not open any key slot");
    }
}

/// A qcow2 image by the options that open it.
fn qcow2_opts(name: &str) -> &'static str {
    format!("driver=qcow2,encrypt.key-secret=s,file.filename={name}").leak()
}

/// `qemu-img` or `limosa img` with the secret.
fn with_secret<'a>(words: &[&'a str]) -> Vec<&'a str> {
    [&words[..1], &SECRET[..], &words[1..]].concat()
}

/// Has limosa do it, and expects success.
#[track_caller]
fn ours(bed: &Bed, words: &[&str]) {
    let ended = bed.limosa(&with_secret(words));
    assert_eq!(ended.status.code(), Some(0), "{words:?}: {}", ended.stderr);
}

/// Has stock tools do it.
#[track_caller]
fn theirs(bed: &Bed, words: &[&str]) {
    bed.qemu_img(&with_secret(words)).success();
}

/// Has `qemu-io` do this to an encrypted qcow2 image.
#[track_caller]
fn qemu_io_on(image: &str, commands: &[&str]) {
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let said = qemu_io(SECRET.into_iter().chain(commands).chain(["--image-opts", image])).unwrap();
    assert!(!said.contains("failed"), "{said}");
}

const QCOW2: &str = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";

#[test]
fn encrypted_qcow2_images_are_written_as_stock_tools_write_them() {
    needs_qemu!();
    let bed = Bed::new();
    disk(&bed);
    for options in ["", ",cluster_size=4k,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv", ",extended_l2=on"] {
        theirs(&bed, &["create", "-q", "-f", "qcow2", "-o", &format!("{QCOW2}{options}"), "x", "5M"]);
        let (image, path) = (qcow2_opts("x"), bed.path("x"));
        let absolute = qcow2_opts(path.to_str().unwrap());
        // Over contents that are there.
        qemu_io_on(absolute, &["write -P 11 60k 70k", "write -P 12 3M 100k"]);
        ours(&bed, &["convert", "-n", "-f", "qcow2", "--target-image-opts", "disk", image]);
        let compare = with_secret(&["compare", "--image-opts", "driver=qcow2,file.filename=disk", image]);
        assert_eq!(bed.both_say(&compare).stdout, "Images are identical.\n");
        assert!(!fs::read(&path).unwrap().windows(64).any(|bytes| bytes == [9; 64] || bytes == [7; 64]));
        // And on, in turns.
        ours(&bed, &["snapshot", "-c", "one", "--image-opts", image]);
        ours(&bed, &["bench", "-q", "-w", "-c", "9", "--pattern", "5", "-s", "1000", "--image-opts", image]);
        qemu_io_on(
            absolute,
            &["read -P 5 0 9000", "read -P 7 9000 50000", "write -P 6 1000 1000", "read -P 6 1000 1000"],
        );
        theirs(&bed, &["snapshot", "-a", "one", "--image-opts", image]);
        assert_eq!(bed.both_say(&compare).stdout, "Images are identical.\n");
        theirs(&bed, &["check", "--image-opts", image]);
        ours(&bed, &["convert", "-O", "raw", "--image-opts", image, "raw"]);
        assert_eq!(bed.qemu_img(&["compare", "disk", "raw"]).success().stdout, "Images are identical.\n");
        let packed = with_secret(&["convert", "-c", "-n", "-f", "qcow2", "--target-image-opts", "disk", image]);
        bed.both_refuse(&packed, "x: an encrypted image cannot have compressed contents");
    }
}

#[test]
fn encrypted_qcow2_images_are_created_and_measured_as_by_stock_tools() {
    needs_qemu!();
    let bed = Bed::new();
    disk(&bed);
    for options in [
        ",encrypt.cipher-alg=aes-128,encrypt.hash-alg=sha1",
        ",encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256,cluster_size=4k",
        ",encrypt.cipher-alg=twofish-256,encrypt.ivgen-alg=plain,compat=0.10",
    ] {
        let options = format!("{QCOW2}{options}");
        // The same line is printed.
        let create = with_secret(&["create", "-f", "qcow2", "-o", &options, "x", "3M"]);
        bed.both_say(&create);
        ours(&bed, &create[..1].iter().chain(&create[3..]).copied().collect::<Vec<_>>());
        bed.both_say(&["info", "x"]);
        theirs(&bed, &["check", "--image-opts", qcow2_opts("x")]);
        ours(&bed, &["convert", "-O", "qcow2", "-o", &options, "disk", "y"]);
        let compare = ["compare", "--image-opts", "driver=qcow2,file.filename=disk", qcow2_opts("y")];
        assert_eq!(bed.both_say(&with_secret(&compare)).stdout, "Images are identical.\n");
        theirs(&bed, &["check", "--image-opts", qcow2_opts("y")]);
        for size in ["1M", "100G"] {
            bed.both_say(&with_secret(&["measure", "-O", "qcow2", "-o", &options, "--size", size]));
        }
        bed.both_say(&with_secret(&["measure", "-O", "qcow2", "-o", &options, "disk"]));
    }
    for (options, says) in [
        ("encrypt.format=luks", "encrypt.key-secret"),
        ("encrypt.format=luks,encrypt.key-secret=t", "no such secret"),
        ("encrypt.format=rot13,encrypt.key-secret=s", "must be luks"),
        ("encrypt.cipher-alg=aes-128", "needs -o encrypt.format=luks"),
    ] {
        bed.both_refuse(&with_secret(&["create", "-q", "-f", "qcow2", "-o", options, "z", "1M"]), says);
    }
    let packed = with_secret(&["convert", "-c", "-O", "qcow2", "-o", QCOW2, "disk", "z"]);
    bed.both_refuse(&packed, "does not support compressed contents");
}

#[test]
fn what_a_resize_adds_to_an_encrypted_qcow2_image_reads_as_zeros() {
    needs_qemu!();
    let bed = Bed::new();
    for (options, preallocation) in [
        ("", "off"),
        ("", "full"),
        (",compat=0.10", "metadata"),
        (",extended_l2=on", "falloc"),
        (",data_file=data", "metadata"),
        (",data_file=data", "full"),
        (",data_file=data,data_file_raw=on", "falloc"),
    ] {
        theirs(&bed, &["create", "-q", "-f", "qcow2", "-o", &format!("{QCOW2}{options}"), "x", "1000k"]);
        let (image, path) = (qcow2_opts("x"), bed.path("x"));
        let data = bed.path("data");
        let data = if options.contains("data") { format!(",data-file.filename={}", data.display()) } else { "".into() };
        let absolute = format!("{}{data}", qcow2_opts(path.to_str().unwrap()));
        qemu_io_on(&absolute, &["write -P 3 0 1000k"]);
        let preallocation = format!("--preallocation={preallocation}");
        ours(&bed, &["resize", "-q", &preallocation, "--image-opts", image, "3M"]);
        qemu_io_on(&absolute, &["read -P 3 0 1000k", "read -P 0 1000k 2072k", "write -P 4 1500k 100"]);
        ours(&bed, &["resize", "-q", "--shrink", "--image-opts", image, "500k"]);
        ours(&bed, &["resize", "-q", &preallocation, "--image-opts", image, "2M"]);
        qemu_io_on(&absolute, &["read -P 3 0 500k", "read -P 0 500k 1548k"]);
        theirs(&bed, &["check", "--image-opts", image]);
    }
}

#[test]
fn encrypted_overlays_are_committed_and_rebased() {
    needs_qemu!();
    let bed = Bed::new();
    disk(&bed);
    bed.qemu_img(&["convert", "-O", "qcow2", "disk", "plain"]).success();
    let other =
        format!("{},backing.driver=qcow2,backing.encrypt.key-secret=s,backing.file.filename=base", qcow2_opts("top"));
    let create = |name: &str, backing: &str| {
        theirs(&bed, &["create", "-q", "-f", "qcow2", "-u", "-o", QCOW2, "-b", backing, "-F", "qcow2", name, "5M"]);
    };
    let write = |image: &str| {
        let image = image.replace("filename=", &format!("filename={}/", bed.path("").display()));
        qemu_io_on(&image, &["write -P 21 60k 100k", "write -z 1M 64k", "write -P 22 5000k 3k"]);
    };
    // Encrypted over plain, and encrypted over encrypted.
    create("top", "plain");
    write(qcow2_opts("top"));
    ours(&bed, &["convert", "-O", "raw", "--image-opts", qcow2_opts("top"), "expected"]);
    ours(&bed, &["commit", "-q", "--image-opts", qcow2_opts("top")]);
    assert_eq!(bed.qemu_img(&["compare", "plain", "expected"]).success().stdout, "Images are identical.\n");
    theirs(&bed, &["convert", "-O", "qcow2", "-o", QCOW2, "disk", "base"]);
    create("top", "base");
    write(&other);
    ours(&bed, &["commit", "-q", "--image-opts", &other]);
    let same = |image: &str| {
        let compare = ["compare", "--image-opts", "driver=raw,file.filename=expected", image];
        assert_eq!(bed.both_say(&with_secret(&compare)).stdout, "Images are identical.\n");
    };
    same(qcow2_opts("base"));
    // Onto nothing, and onto a plain image that has less.
    create("top", "plain");
    for backing in [&["-b", ""][..], &["-F", "qcow2", "-b", "zero"]] {
        bed.create(&["-f", "qcow2", "zero", "5M"]);
        ours(&bed, &[&["rebase", "-q", "--image-opts"], backing, &[qcow2_opts("top")]].concat());
        same(qcow2_opts("top"));
        theirs(&bed, &["check", "--image-opts", qcow2_opts("top")]);
    }
}

#[test]
fn a_wrong_passphrase_and_bad_options_are_one_line() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&[&SECRET[..], &["-f", "luks", "-o", "key-secret=s,iter-time=10", "x", "1M"]].concat());
    let refused = |secret: &str, image: &str, says: &str| {
        bed.both_refuse(&["convert", "--object", secret, "-O", "raw", "--image-opts", image, "y"], says);
        assert!(!bed.path("y").exists());
    };
    refused("secret,id=s,data=incorrect", opts("x"), "x: cannot be decrypted: the passphrase does not open");
    refused("secret,id=t,data=correct horse", opts("x"), "there is no secret \"s\"");
    refused("secret,id=s,data=correct horse", "driver=luks,file.filename=x", "no secret was given");
    bed.both_refuse(&["convert", "-O", "raw", "x", "y"], "--image-opts driver=luks,key-secret=s,file.filename=IMAGE\n");
    for (options, says) in [
        ("iter-time=10", "key-secret"),
        ("key-secret=t", "no such secret"),
        ("key-secret=s,cipher-alg=rot-13", "cipher-alg"),
        ("key-secret=s,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha512", "essiv:sha512"),
    ] {
        bed.both_refuse(&[&["create", "-q"], &SECRET[..], &["-f", "luks", "-o", options, "y", "1M"]].concat(), says);
        assert!(!bed.path("y").exists(), "{options}");
    }
    // A header that asks for four thousand million iterations.
    let mut bytes = fs::read(bed.path("x")).unwrap();
    bytes[212..216].fill(0xff);
    fs::write(bed.path("x"), bytes).unwrap();
    let words = [&["convert"], &SECRET[..], &["-O", "raw", "--image-opts", opts("x"), "y"]].concat();
    assert_one_line(&bed.limosa(&words).into(), &words, "key slot 0: 4294967295 iterations");
}

#[test]
fn an_overlay_of_an_encrypted_image_is_created_without_its_secret() {
    needs_qemu!();
    let bed = Bed::new();
    fs::write(bed.path("key"), "abc").unwrap();
    let format = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    let base = ["create", "-q", "-f", "qcow2", "--object", "secret,id=s,file=key", "-o", format, "base", "5M"];
    bed.qemu_img(&base).success();
    bed.both_say(&["create", "-f", "qcow2", "-b", "base", "-F", "qcow2", "top"]);
    assert_eq!(bed.both_tell(&["info", "--output=json", "top"])["virtual-size"], 5 << 20);
    // The name that is printed of an image with a secret opens it again.
    let secret = ["--object", "secret,id=s,file=key"];
    let named = [&["info", "--output=json"], &secret[..], &["--image-opts", qcow2_opts("base")]].concat();
    let told = Answer::from(bed.limosa(&named)).success().json();
    let name = told["filename"].as_str().unwrap();
    bed.qemu_img(&[&["map"], &secret[..], &[name]].concat()).success();
}

#[test]
fn space_of_an_encrypted_image_is_reserved() {
    needs_qemu!();
    let bed = Bed::new();
    fs::write(bed.path("key"), "abc").unwrap();
    for (preallocation, reserved) in [("off", false), ("metadata", false), ("falloc", true), ("full", true)] {
        let options = format!("key-secret=s,iter-time=10,preallocation={preallocation},extent_size_hint=1M");
        let words = ["create", "-q", "-f", "luks", "--object", "secret,id=s,file=key", "-o", &options, "x", "5M"];
        Answer::from(bed.limosa(&words)).success();
        let blocks = fs::metadata(bed.path("x")).unwrap().blocks();
        assert_eq!(blocks * 512 >= 5 << 20, reserved, "{preallocation}: {blocks}");
        let resize = [&["resize"], &["--object", "secret,id=s,file=key"][..], &["--image-opts", opts("x"), "6M"]];
        bed.qemu_img(&resize.concat()).success();
    }
}

#[test]
fn secrets_are_the_same_in_all_their_forms() {
    needs_qemu!();
    let bed = Bed::new();
    fs::write(bed.path("key"), "correct horse").unwrap();
    fs::write(bed.path("key64"), "Y29ycmVjdCBob3JzZQ==\n").unwrap();
    bed.create(&[&SECRET[..], &["-f", "luks", "-o", "key-secret=s,iter-time=10", "x", "1M"]].concat());
    let master = ["--object", "secret,id=k,data=a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s=,format=base64"];
    for (secret, more) in [
        ("secret,id=s,file=key", &[][..]),
        ("secret,id=s,file=key64,format=base64", &[]),
        ("secret,id=s,data=Y29ycmVjdCBob3JzZQ==,format=base64", &[]),
        ("{\"qom-type\":\"secret\",\"id\":\"s\",\"data\":\"correct horse\"}", &[]),
        ("secret,id=s,data=bwakVzuEmD/scXdMC3pwKA==,format=base64,keyid=k,iv=AAAAAAAAAAAAAAAAAAAAAQ==", &master[..]),
    ] {
        bed.both_say(&[&["measure"], more, &["--object", secret, "-O", "raw", "--image-opts", opts("x")]].concat());
        let words = [&["measure"], more, &["--object", secret, "-O", "raw", "--image-opts", opts("x")]].concat();
        bed.qemu_img(&words).success();
    }
}

/// A disk whose header is in a file of its own.
fn detached(disk: &str, header: &str) -> String {
    format!("driver=luks,key-secret=s,file.filename={disk},header.driver=file,header.filename={header}")
}

#[test]
fn a_header_may_be_in_a_file_of_its_own() {
    needs_qemu!();
    let bed = Bed::new();
    disk(&bed);
    let create = ["create", "-f", "luks", "-o", "key-secret=s,iter-time=10,detached-header=on", "header"];
    assert_eq!(bed.limosa(&with_secret(&create)).status.code(), Some(0));
    bed.create(&["-f", "raw", "x", "5M"]);
    let image = detached("x", "header");
    let header = fs::read(bed.path("header")).unwrap();
    // Written by each program, read by the other one.
    ours(&bed, &["convert", "-n", "-f", "qcow2", "--target-image-opts", "disk", &image]);
    let plain = "driver=qcow2,file.filename=disk";
    let compare = with_secret(&["compare", "--image-opts", plain, &image]);
    assert_eq!(bed.both_say(&compare).stdout, "Images are identical.\n");
    theirs(&bed, &["convert", "-n", "--target-image-opts", "--image-opts", plain, &image]);
    assert_eq!(bed.both_say(&compare).stdout, "Images are identical.\n");
    let info = with_secret(&["info", "--output", "json", "--image-opts", &image]);
    let described = [Answer::from(bed.limosa(&info)), bed.qemu_img(&info)].map(|answer| {
        let mut described = answer.success().json();
        // Its keys are in another order.
        described.as_object_mut().unwrap().remove("filename");
        described
    });
    assert_eq!(described[0], described[1]);
    bed.both_tell(&with_secret(&["map", "--output", "json", "--image-opts", &image]));
    bed.both_say(&with_secret(&["measure", "--image-opts", &image]));
    assert!(fs::read(bed.path("header")).unwrap() == header);
    ours(&bed, &["resize", "--image-opts", &image, "+1M"]);
    assert_eq!(fs::metadata(bed.path("x")).unwrap().len(), 6 << 20);
    // Key slots are in the header's file.
    let contents = fs::read(bed.path("x")).unwrap();
    let amend =
        ["--object", "secret,id=n,data=new", "-o", "state=active,new-secret=n,iter-time=10", "--image-opts", &image];
    ours(&bed, &[&["amend"], &amend[..]].concat());
    assert!(fs::read(bed.path("x")).unwrap() == contents);
    let new = image.replace("key-secret=s", "key-secret=n");
    bed.qemu_img(&["convert", "--object", "secret,id=n,data=new", "-O", "raw", "--image-opts", &new, "raw"]).success();
    fs::write(bed.path("key"), "new").unwrap();
    let [key, header, payload] = ["key", "header", "x"].map(|name| bed.path(name));
    let open = ["luksOpen".as_ref(), "--test-passphrase".as_ref(), "--key-file".as_ref(), key.as_os_str()];
    cryptsetup(open.into_iter().chain(["--header".as_ref(), header.as_os_str(), payload.as_os_str()])).unwrap();
}

#[test]
fn a_header_of_its_own_is_not_taken_for_a_disk() {
    needs_qemu!();
    let bed = Bed::new();
    let create = ["create", "-q", "-f", "luks", "-o", "key-secret=s,iter-time=10,detached-header=on", "header"];
    assert_eq!(bed.limosa(&with_secret(&create)).status.code(), Some(0));
    bed.create(&["-q", "-f", "raw", "x", "5M"]);
    bed.both_refuse(&with_secret(&["convert", "-O", "raw", "--image-opts", opts("header"), "y"]), "header");
    let sized = [&create[..], &["3M"]].concat();
    let refused = bed.limosa(&with_secret(&sized));
    assert!(refused.stderr.contains("the image is the header alone: omit the size"), "{}", refused.stderr);
    let convert = with_secret(&["convert", "-O", "luks", "-o", "key-secret=s,detached-header=on", "x", "y"]);
    let refused = bed.limosa(&convert);
    assert!(refused.stderr.contains("y: a header in a file of its own has no contents"), "{}", refused.stderr);
    assert!(!bed.path("y").exists());
    // An image may not have one opened that it names itself, if it is not trusted.
    let below = format!(
        "json:{{\"driver\":\"luks\",\"file.filename\":\"{}\",\"header.filename\":\"{}\"}}",
        bed.path("x").display(),
        bed.path("header").display()
    );
    bed.qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-b", &below, "-F", "luks", "overlay", "5M"]).success();
    let refused = bed.limosa(&["map", "--untrusted", "overlay"]);
    assert!(refused.stderr.contains("not trusted to have"), "{}", refused.stderr);
}

#[test]
fn a_header_that_is_in_use_is_not_overwritten() {
    needs_qemu!();
    let bed = Bed::new();
    let create = ["create", "-q", "-f", "luks", "-o", "key-secret=s,iter-time=10,detached-header=on", "header"];
    assert_eq!(bed.limosa(&with_secret(&create)).status.code(), Some(0));
    bed.create(&["-q", "-f", "raw", "x", "3M"]);
    let before = fs::read(bed.path("header")).unwrap();
    let image = detached("x", "header");
    let ended = bed.limosa(&with_secret(&["convert", "--image-opts", "-O", "raw", &image, "header"]));
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    let twice = detached("header", "header");
    assert_eq!(bed.limosa(&with_secret(&["map", "--image-opts", &twice])).status.code(), Some(1));
    assert!(fs::read(bed.path("header")).unwrap() == before);
}
