//! `convert --resume`.

use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use limosa_storage::testing::SeededRandom;
use rustix::process::Signal;

use crate::bed::{Answer, Bed, assert_one_line, length, poke};
use crate::needs_qemu;
use crate::stage::wait_for;

/// Files that are beside a target that is not complete.
const PART: &str = "target.limosa-part";
const JOURNAL: &str = "target.limosa-journal";

/// A source with contents of all kinds.
fn source(bed: &Bed) {
    bed.create(&["-f", "qcow2", "base", "48M"]);
    bed.qemu_io("base", &["write -P 1 0 20M", "write -z 22M 1M", "write -P 3 30M 9M", "write -P 0 40M 3M"]);
    bed.create(&["-f", "qcow2", "-b", "base", "-F", "qcow2", "source", "48M"]);
    bed.qemu_io("source", &["write -P 4 5M 7M", "write -P 5 44M 123k"]);
}

/// The kinds of targets, and how they are opened.
const TARGETS: [(&[&str], &str); 5] = [
    (&["-O", "raw"], "driver=raw,file.filename=target"),
    (&["-O", "qcow2"], "driver=qcow2,file.filename=target"),
    (&["-O", "qcow2", "-c", "-o", "cluster_size=4k"], "driver=qcow2,file.filename=target"),
    (&["-O", "qcow2", "-B", "base", "-F", "qcow2"], "driver=qcow2,file.filename=target"),
    (
        &["-O", "luks", "--object", "secret,id=s,file=key", "-o", "key-secret=s,iter-time=10"],
        "driver=luks,key-secret=s,file.filename=target",
    ),
];

#[test]
fn a_copy_that_is_killed_again_and_again_is_complete_in_the_end() {
    needs_qemu!();
    // By hand: hundreds.
    let wanted: usize = std::env::var("LIMOSA_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(20);
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let mut chance = SeededRandom::new(seed);
    let bed = Bed::new();
    source(&bed);
    std::fs::write(bed.path("key"), "secret").unwrap();
    let (mut kills, mut resumed) = (0, 0);
    for (target, opened) in TARGETS.iter().cycle() {
        let words = [&["convert", "--resume", "-r", "24M", "-f", "qcow2"], *target, &["source", "target"]].concat();
        let secret = ["--object", "secret,id=s,file=key"];
        let compare =
            [&["compare"], &secret[..], &["--image-opts", "driver=qcow2,file.filename=source", opened]].concat();
        loop {
            let running = bed.start(&words);
            let patience = Duration::from_millis(20 + chance.below(900));
            std::thread::sleep(patience);
            if running.is_running() {
                running.signal(Signal::KILL);
                kills += 1;
            }
            let ended = Answer::from(running.wait());
            resumed += usize::from(ended.stderr.contains("continuing the interrupted copy at"));
            if ended.status.is_some() {
                ended.success();
                break;
            }
            // Killed when it had its name already: the next run would make another one beside it.
            if bed.path("target").exists() {
                assert!(!bed.path(PART).exists(), "seed {seed}");
                bed.qemu_img(&compare).success();
                std::fs::remove_file(bed.path("target")).unwrap();
            }
        }
        assert!(!bed.path(PART).exists() && !bed.path(JOURNAL).exists(), "seed {seed}");
        bed.qemu_img(&compare).success();
        if opened.contains("qcow2") {
            bed.qemu_img(&["check", "-q", "target"]).success();
        }
        std::fs::remove_file(bed.path("target")).unwrap();
        if kills >= wanted {
            break;
        }
    }
    println!("{kills} kills, {resumed} copies were continued");
    assert!(resumed > 0);
}

/// Begins a copy, and ends it by this signal when a part of it is recorded.
fn interrupted(bed: &Bed, words: &[&str], signal: Signal) -> Answer {
    let running = bed.start(words);
    wait_for("a record of the copy", || {
        let journal = std::fs::read(bed.path(JOURNAL)).unwrap_or_default();
        let text = String::from_utf8_lossy(&journal).into_owned();
        text.split("position=").skip(1).any(|rest| !rest.starts_with("0\n")).then_some(())
    });
    running.signal(signal);
    running.wait().into()
}

#[test]
fn an_interrupted_copy_is_kept_and_has_not_the_targets_name() {
    needs_qemu!();
    let bed = Bed::new();
    source(&bed);
    std::fs::write(bed.path("target"), "former contents").unwrap();
    let words = ["convert", "--resume", "-r", "16M", "-O", "qcow2", "source", "target"];
    let answer = interrupted(&bed, &words, Signal::INT);
    assert_eq!((answer.status, answer.stdout.as_str()), (Some(130), ""), "{answer:?}");
    assert_one_line(&answer, &words, "target: interrupted; run the same command to continue");
    assert_eq!(std::fs::read(bed.path("target")).unwrap(), b"former contents");
    assert!(bed.path(PART).exists() && bed.path(JOURNAL).exists());
    let answer = Answer::from(bed.limosa(&words)).success();
    assert_one_line(&answer, &words, "continuing the interrupted copy at");
    bed.qemu_img(&["compare", "source", "target"]).success();
    assert!(!bed.path(PART).exists() && !bed.path(JOURNAL).exists());
    // Quietly.
    interrupted(&bed, &words, Signal::INT);
    let quiet = [&words[..1], &["-q"], &words[1..]].concat();
    let answer = Answer::from(bed.limosa(&quiet)).success();
    assert_eq!(answer.stderr, "");
    bed.qemu_img(&["compare", "source", "target"]).success();
    assert!(!bed.path(PART).exists() && !bed.path(JOURNAL).exists());
}

#[test]
fn a_copy_is_not_continued_with_another_source_or_other_options() {
    needs_qemu!();
    let bed = Bed::new();
    source(&bed);
    let words = ["convert", "--resume", "-r", "16M", "-O", "qcow2", "source", "target"];
    interrupted(&bed, &words, Signal::KILL);
    bed.wait_unlocked(PART);
    let refused = |words: &[&str], says: &str| {
        let answer = Answer::from(bed.limosa(words));
        assert_eq!(answer.status, Some(1), "{words:?}: {answer:?}");
        assert_one_line(&answer, words, says);
    };
    refused(&["convert", "--resume", "-O", "raw", "source", "target"], "with other options: -O qcow2");
    refused(&["convert", "--resume", "-c", "-O", "qcow2", "source", "target"], "with other options");
    refused(&["convert", "--resume", "-O", "qcow2", "-o", "cluster_size=4k", "source", "target"], "with other options");
    refused(&["convert", "--resume", "-O", "qcow2", "base", "target"], "with other options");
    // A backing file is a part of the source.
    bed.qemu_io("base", &["write -P 9 25M 64k"]);
    refused(&words, "the source has changed");
    refused(&words, "limosa-journal");
    // The journal is damaged in both of its slots.
    poke(&bed.path(JOURNAL), 3, b"x");
    poke(&bed.path(JOURNAL), 4096 + 3, b"x");
    refused(&words, "its journal is damaged");
    std::fs::remove_file(bed.path(JOURNAL)).unwrap();
    refused(&words, "without a journal");
    std::fs::remove_file(bed.path(PART)).unwrap();
    Answer::from(bed.limosa(&words)).success();
    bed.qemu_img(&["compare", "source", "target"]).success();
}

#[test]
fn what_cannot_be_continued_is_refused_by_name() {
    needs_qemu!();
    let bed = Bed::new();
    source(&bed);
    for (words, says) in [
        (&["convert", "--resume", "-t", "unsafe", "source", "target"][..], "-t unsafe cannot be used with --resume"),
        (&["convert", "--resume", "-O", "qcow2", "-o", "data_file=d", "source", "target"], "data file"),
        (&["convert", "--resume", "source", "-"], "--resume: - is a pipe"),
        (&["convert", "--resume", "null-co://", "target"], "no regular file"),
    ] {
        let answer = Answer::from(bed.limosa(words));
        assert_eq!(answer.status, Some(1), "{words:?}: {answer:?}");
        assert_one_line(&answer, words, says);
        assert!(!bed.path(PART).exists() && !bed.path(JOURNAL).exists(), "{words:?}");
    }
    for option in ["-n", "-W", "--salvage", "--bitmaps"] {
        let answer = Answer::from(bed.limosa(&["convert", "--resume", option, "source", "target"]));
        assert_eq!(answer.status, Some(1), "{option}: {answer:?}");
    }
    // A disk that is full: what is there is kept.
    let script = "ulimit -f 20000; trap '' XFSZ; exec \"$0\" img convert --resume -O raw source target";
    let mut full = std::process::Command::new("bash");
    full.args(["-c", script, env!("CARGO_BIN_EXE_limosa")]).current_dir(bed.path(""));
    let answer = Answer::from(crate::stage::start_command(full).wait());
    assert_eq!(answer.status, Some(1), "{answer:?}");
}

#[test]
fn a_copy_that_is_not_interrupted_is_as_without_the_option() {
    needs_qemu!();
    let bed = Bed::new();
    source(&bed);
    for (format, options) in [("raw", &[][..]), ("qcow2", &["-o", "cluster_size=4k"])] {
        for (target, resume) in [("target", &["--resume"][..]), ("other", &["-t", "writeback"])] {
            let words = [&["convert"], resume, &["-O", format], options, &["source", target]].concat();
            Answer::from(bed.limosa(&words)).success();
        }
        bed.qemu_img(&["compare", "-s", "-f", format, "-F", format, "target", "other"]).success();
        assert_eq!(length(&bed.path("target")), length(&bed.path("other")));
    }
}

#[test]
fn a_file_that_is_replaced_is_not_used_meanwhile_and_gives_its_owner_and_mode() {
    needs_qemu!();
    let bed = Bed::new();
    source(&bed);
    bed.create(&["-f", "qcow2", "target", "1M"]);
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(bed.path("target"), private).unwrap();
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        std::os::unix::fs::chown(bed.path("target"), Some(1234), Some(1235)).unwrap();
    }
    let owner = |name: &str| {
        let found = std::fs::metadata(bed.path(name)).unwrap();
        (found.mode() & 0o777, found.uid(), found.gid())
    };
    let before = owner("target");
    let words = ["convert", "--resume", "-r", "24M", "-f", "qcow2", "-O", "qcow2", "source", "target"];
    let running = bed.start(&words);
    wait_for("the copy to begin", || bed.path(PART).exists().then_some(()));
    // Nobody opens the old one while it is about to be replaced.
    let io = bed.qemu_img(&["resize", "target", "2M"]);
    assert!(io.stderr.contains("lock"), "{}", io.stderr);
    assert_eq!(std::fs::metadata(bed.path(PART)).unwrap().mode() & 0o077, 0);
    Answer::from(running.wait()).success();
    assert_eq!(owner("target"), before);
    bed.qemu_img(&["compare", "source", "target"]).success();
    // A file that was made meanwhile is not replaced.
    std::fs::remove_file(bed.path("target")).unwrap();
    let running = bed.start(&words);
    wait_for("the copy to begin", || bed.path(PART).exists().then_some(()));
    std::fs::write(bed.path("target"), "mine").unwrap();
    let ended = Answer::from(running.wait());
    assert_one_line(&ended, &words, "another file has its name since the copy was begun");
    assert_eq!(std::fs::read(bed.path("target")).unwrap(), b"mine");
    std::fs::remove_file(bed.path("target")).unwrap();
    Answer::from(bed.limosa(&words)).success();
    bed.qemu_img(&["compare", "source", "target"]).success();
}

#[test]
fn names_that_nobody_gave_are_not_followed_or_overwritten() {
    needs_qemu!();
    let bed = Bed::new();
    source(&bed);
    let words = ["convert", "--resume", "-f", "qcow2", "-O", "raw", "source", "target"];
    let refused = |says: &str| assert_one_line(&Answer::from(bed.limosa(&words)), &words, says);
    std::fs::write(bed.path("secret"), "hello").unwrap();
    for name in [JOURNAL, "target"] {
        std::os::unix::fs::symlink("secret", bed.path(name)).unwrap();
        refused(if name == JOURNAL { "is not a journal that this user made" } else { "it is a symbolic link" });
        std::fs::remove_file(bed.path(name)).unwrap();
    }
    std::fs::write(bed.path(JOURNAL), "my own notes").unwrap();
    refused("is not a journal");
    assert_eq!(std::fs::read(bed.path(JOURNAL)).unwrap(), b"my own notes");
    std::fs::remove_file(bed.path(JOURNAL)).unwrap();
    std::fs::hard_link(bed.path("secret"), bed.path("target")).unwrap();
    refused("hard links");
    assert_eq!(std::fs::read(bed.path("secret")).unwrap(), b"hello");
    // What could not be begun leaves nothing.
    std::fs::remove_file(bed.path("target")).unwrap();
    let words = ["convert", "--resume", "-f", "qcow2", "-O", "qcow2", "-o", "cluster_size=3k", "source", "target"];
    assert_eq!(Answer::from(bed.limosa(&words)).status, Some(1));
    assert!(!bed.path(JOURNAL).exists() && !bed.path(PART).exists());
}
