//! Images with the old encryption: they are read, and nothing else.

use std::fs;

use limosa_testkit::qemu_io;

use crate::bed::Bed;
use crate::needs_qemu;

/// A passphrase that is longer than the key, and one that is shorter.
const SECRETS: [&str; 2] = ["secret,id=s,data=correct horse battery", "secret,id=s,data=short"];

/// An image by the options that open it.
fn opts(name: &str) -> String {
    format!("driver=qcow2,encrypt.key-secret=s,file.filename={name}")
}

/// An image that stock tools encrypted, with contents, holes, zeros and a snapshot.
fn encrypted(bed: &Bed, secret: &str) {
    let create =
        ["create", "-q", "-f", "qcow2", "--object", secret, "-o", "encryption=on,encrypt.key-secret=s", "x", "5M"];
    bed.qemu_img(&create).success();
    let path = opts(bed.path("x").to_str().unwrap());
    let write = |commands: &[&str]| {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        qemu_io(["--object", secret].into_iter().chain(commands).chain(["--image-opts", &path])).unwrap();
    };
    // Later clusters first: offsets in the file are not those in the disk.
    write(&["write -P 9 3M 1M", "write -P 7 0 70k", "write -z 2M 64k", "write -P 3 5242368 512"]);
    bed.qemu_img(&["snapshot", "--object", secret, "-c", "one", "--image-opts", &path]).success();
    write(&["write -P 5 64k 3k"]);
}

#[test]
fn contents_are_read_as_stock_tools_read_them() {
    needs_qemu!();
    for secret in SECRETS {
        let bed = Bed::new();
        encrypted(&bed, secret);
        let image = opts("x");
        for choice in [&[][..], &["-l", "one"]] {
            let convert = |to| {
                let words =
                    [&["convert", "--object", secret, "-O", "raw"], choice, &["--image-opts", &image, to]].concat();
                words.into_iter().map(str::to_owned).collect::<Vec<_>>()
            };
            let (ours, theirs) = (convert("ours"), convert("theirs"));
            bed.qemu_img(&theirs.iter().map(String::as_str).collect::<Vec<_>>()).success();
            let ended = bed.limosa(&ours.iter().map(String::as_str).collect::<Vec<_>>());
            assert_eq!(ended.status.code(), Some(0), "{}", ended.stderr);
            assert!(ended.stderr.contains("the old encryption with AES is weak"), "{}", ended.stderr);
            assert_eq!(fs::read(bed.path("ours")).unwrap(), fs::read(bed.path("theirs")).unwrap());
        }
        bed.both_tell(&["map", "--output", "json", "--object", secret, "--image-opts", &image]);
        bed.both_tell(&["info", "--output", "json", "x"]);
        bed.both_say(&["info", "x"]);
        // An overlay of it is written.
        let below = format!(
            "json:{{\"driver\":\"qcow2\",\"encrypt.key-secret\":\"s\",\"file.filename\":\"{}\"}}",
            bed.path("x").display()
        );
        let overlay = ["create", "--object", secret, "-f", "qcow2", "-b", &below, "-F", "qcow2", "overlay"];
        assert_eq!(bed.limosa(&overlay).status.code(), Some(0));
        let bench = ["bench", "-q", "-w", "-c", "9", "--pattern", "5", "-s", "1000", "--object", secret, "overlay"];
        assert_eq!(bed.limosa(&bench).status.code(), Some(0));
        let check = ["convert", "--object", secret, "-O", "raw", "overlay", "theirs"];
        bed.qemu_img(&check).success();
        let written = fs::read(bed.path("theirs")).unwrap();
        assert_eq!(written[..9000], [5; 9000]);
        assert_eq!(
            written[9000..],
            [&[7; 56536][..], &[5; 3072], &fs::read(bed.path("ours")).unwrap()[68608..]].concat()
        );
    }
}

#[test]
fn nothing_is_written_to_them() {
    needs_qemu!();
    let bed = Bed::new();
    let secret = SECRETS[0];
    encrypted(&bed, secret);
    let before = fs::read(bed.path("x")).unwrap();
    let image = opts("x");
    for words in [
        &["bench", "-w", "-c", "1", "-s", "512", "--object", secret, "--image-opts", &image][..],
        &["resize", "--object", secret, "--image-opts", &image, "+1M"],
        &["snapshot", "-c", "two", "--object", secret, "--image-opts", &image],
        &["snapshot", "-a", "one", "--object", secret, "--image-opts", &image],
        &["bitmap", "--add", "--object", secret, "--image-opts", &image, "b"],
        &["amend", "-o", "lazy_refcounts=on", "--object", secret, "--image-opts", &image],
        &["rebase", "-u", "-b", "", "--object", secret, "--image-opts", &image],
    ] {
        let ended = bed.limosa(words);
        assert_eq!(ended.status.code(), Some(1), "{words:?}: {}", ended.stdout);
        assert!(ended.stderr.contains("it is encrypted with the old AES, and can only be read"), "{}", ended.stderr);
    }
    assert!(fs::read(bed.path("x")).unwrap() == before);
    let other = format!("{image},encrypt.format=luks");
    let ended = bed.limosa(&["map", "--object", secret, "--image-opts", &other]);
    assert!(ended.stderr.contains("it is encrypted with aes, not with luks"), "{}", ended.stderr);
    let none = bed.limosa(&["convert", "-O", "raw", "x", "y"]);
    assert!(none.stderr.contains("no secret was given for it"), "{}", none.stderr);
}
