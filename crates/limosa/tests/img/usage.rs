//! Refused commands, and how bad usage ends.

use crate::bed::{Answer, Bed, assert_one_line};
use crate::needs_qemu;
use crate::stage::limosa;

/// The commands that limosa has.
const COMMANDS: [&str; 15] = [
    "amend", "create", "info", "check", "map", "convert", "compare", "dd", "measure", "resize", "commit", "rebase",
    "snapshot", "bitmap", "bench",
];

fn img(words: &[&str]) -> Answer {
    limosa([&["img"], words].concat()).into()
}

#[test]
fn an_unknown_command_is_refused_with_one_line() {
    assert_one_line(&img(&["frob"]), &["frob"], "img \"frob\": unknown command");
}

#[test]
fn secrets_are_taken_and_checked_by_every_command_and_other_objects_refused() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("key"), "YWJj\n").unwrap();
    bed.create(&["-f", "qcow2", "x", "1M"]);
    let good = [
        "secret,id=a,data=abc",
        "secret,id=a,data=,format=raw",
        "secret,id=a,file=key,format=base64",
        "qom-type=secret,id=a.b-1_c,data=x,,y",
        r#"{"qom-type":"secret","id":"a","data":"x"}"#,
    ];
    let bad = [
        ("secret,data=x", "id=NAME"),
        ("secret,id=9,data=x", "id=NAME must begin with a letter"),
        ("secret,id=a", "data=TEXT"),
        ("secret,id=a,data=x,file=key", "exclude"),
        ("secret,id=a,data=x,frob=y", "frob"),
        ("secret,id=a,data=x,format=hex", "format must be raw or base64"),
        ("secret,id=a,data=!,format=base64", "base64"),
        ("secret,id=a,file=absent", "absent"),
        ("secret,id=a,data=x,keyid=b", "keyid"),
        ("iothread,id=a", "iothread"),
        ("frob,id=a", "unknown kind of object"),
        ("", "kind of object not given"),
    ];
    let commands: [&[&str]; 9] = [
        &["create", "-f", "raw", "new", "1M"],
        &["info", "--output", "json", "x"],
        &["check", "x"],
        &["map", "x"],
        &["convert", "x", "copy"],
        &["compare", "x", "x"],
        &["dd", "if=x", "of=copy"],
        &["measure", "x"],
        &["resize", "-f", "qcow2", "x", "1M"],
    ];
    for command in commands {
        let with = |object| [&command[..1], &["--object", object][..], &command[1..]].concat();
        for object in good {
            let words = with(object);
            Answer::from(bed.limosa(&words)).success();
            bed.qemu_img(&words).success();
        }
        let twice = [&with(good[0])[..], &["--object", good[0]]].concat();
        let (ours, stock) = (Answer::from(bed.limosa(&twice)), bed.qemu_img(&twice));
        assert_one_line(&ours, &twice, "duplicate");
        assert!(ours.status != Some(0) && stock.status != Some(0), "{ours:?} {stock:?}");
    }
    for (object, says) in bad {
        for command in [&["info", "--object", object, "x"][..], &["compare", "--object", object, "x", "x"]] {
            let (ours, stock) = (Answer::from(bed.limosa(command)), bed.qemu_img(command));
            assert_ne!(stock.status, Some(0), "{command:?}");
            // Of compare, 1 would say that the images differ.
            assert_eq!(ours.status, Some(if command[0] == "compare" { 2 } else { 1 }), "{ours:?}");
            assert!(ours.stderr.contains(says), "{command:?}: {ours:?}");
        }
    }
}

#[test]
fn no_part_of_a_secret_is_printed_by_bad_usage() {
    let bed = Bed::new();
    std::fs::write(bed.path("disk"), [1; 4096]).unwrap();
    for (object, says) in [
        ("secret,id=s,data=hunter2,bogus=1", "--object: secret s: unknown property \"bogus\""),
        ("secret,id=s,file=k,data=hunter2", "--object: secret s: data and file exclude each other"),
        ("secret,id=s,data=hunter2,format=rot13", "--object: secret s: format must be raw or base64"),
        ("secret,data=hunter2", "--object: secret needs a name: id=NAME"),
        ("secrt,id=s,data=hunter2", "--object: unknown kind of object"),
        ("secret,id=s,data=hunter2,ter2", "--object: item 4 must be NAME=VALUE"),
        (r#"{"qom-type":"secret","id":"s","data":"hunter2","format":7}"#, "--object: property \"format\""),
        ("secret,id=s,data=hunter2,format=base64", "--object: secret s: not valid base64"),
    ] {
        let attached = format!("--object={object}");
        for words in [&["info", "-f", "raw", "--object", object, "disk"][..], &["info", &attached, "disk"]] {
            let ours = Answer::from(bed.limosa(words));
            assert_eq!((ours.status, ours.stdout.as_str()), (Some(1), ""), "{ours:?}");
            assert!(ours.stderr.contains(says), "{ours:?}");
            assert!(!ours.stderr.contains("hunter") && !ours.stderr.contains("ter2"), "{ours:?}");
        }
    }
    for name in [
        "driver=luks,password=hunter2,file.filename=disk",
        "driver=luks,file.filename=disk,password=hun,ter2",
        "driver=https,url=https://hunter2@host/d",
        "filename=https://me:hunter2@host/d",
    ] {
        let ours = Answer::from(bed.limosa(&["info", "--image-opts", name]));
        assert_one_line(&ours, &[name], "");
        assert!(!ours.stderr.contains("hunter") && !ours.stderr.contains("ter2"), "{ours:?}");
    }
    for name in [
        r#"json:{"driver":"luks","password":"hunter2","file":{"filename":"disk"}}"#,
        r#"json:{"driver":"luks","password":"hunter2""#,
        "https://me:hunter2@host/disk",
    ] {
        let ours = Answer::from(bed.limosa(&["info", name]));
        assert_one_line(&ours, &[name], "");
        assert!(!ours.stderr.contains("hunter"), "{ours:?}");
    }
}

#[test]
fn kinds_of_objects_are_listed_wherever_the_option_is() {
    for words in [&["info", "--object", "help"][..], &["compare", "--object", "help", "a"]] {
        let ours = img(words).success();
        assert!(ours.stdout.contains("\n  secret\n  tls-creds-x509\n") && ours.stderr.is_empty(), "{ours:?}");
    }
}

#[test]
fn options_in_front_of_the_command_are_those_of_stock() {
    let bed = Bed::new();
    std::fs::write(bed.path("disk"), [1; 4096]).unwrap();
    let words = ["--trace", "enable=blk*", "info", "-f", "raw", "disk"];
    let ours = Answer::from(bed.limosa(&words)).success();
    assert_one_line(&ours, &words, "--trace: limosa has no trace events");
    assert!(bed.limosa(&["-T", "blk*", "info", "-f", "raw", "disk"]).success().stdout.starts_with("image: disk\n"));
    let version = img(&["--version"]).success().stdout;
    assert!(version.starts_with("limosa-img ") && version.contains("qemu-img 10.0"), "{version}");
}

#[test]
fn the_options_of_a_command_come_before_those_of_all() {
    let help = img(&["map", "--help"]).success().stdout;
    let at = |option: &str| help.find(option).unwrap();
    assert!(at("--start-offset") < at("--untrusted") && at("--force-share") < at("--object"), "{help}");
    assert!(at("--object") < at("--limit-memory") && at("--limit-memory") < at("--limit-time"), "{help}");
}

#[test]
fn a_command_that_reads_no_pipe_names_those_that_do() {
    let bed = Bed::new();
    std::fs::write(bed.path("disk"), [1; 4096]).unwrap();
    for words in [&["info", "-"][..], &["compare", "disk", "-"]] {
        assert_one_line(&bed.limosa(words).into(), words, "-: only convert and dd read pipes");
    }
}

#[test]
fn a_file_that_cannot_be_made_is_not_said_to_be_opened() {
    let bed = Bed::new();
    std::fs::write(bed.path("disk"), [1; 4096]).unwrap();
    for words in [&["create", "absent/new", "1M"][..], &["convert", "-f", "raw", "disk", "absent/new"]] {
        assert_one_line(&bed.limosa(words).into(), words, "cannot create absent/new: No such file or directory");
    }
    let words = ["resize", "-f", "raw", "disk", "8E"];
    assert!(bed.limosa(&words).stderr.contains("8E is too large: at most 9223372036854775807 bytes (8E - 1)"));
    let words = ["measure", "--size", "1M", "disk"];
    assert_one_line(&bed.limosa(&words).into(), &words, "--size and FILE cannot be used together");
}

#[test]
fn bad_usage_does_not_look_like_a_verdict() {
    needs_qemu!();
    let bed = Bed::new();
    // Of check, 2 would say that the image is corrupt.
    for words in [
        &["check"][..],
        &["check", "-x"],
        &["check", "-r", "most", "x"],
        &["check", "-T", "fast", "x"],
        &["info", "--output", "xml", "x"],
        &["info", "a", "b"],
        &["info", "-f", "raw", "--image-opts", "x"],
        &["map", "--start-offset", "x", "y"],
        &["resize", "x"],
        &["resize", "x", "5X"],
        &["create", "-f", "qcow2", "x", "1Q"],
        &["create"],
        &[],
    ] {
        let ended = Answer::from(bed.limosa(words));
        assert_eq!(ended.status, bed.qemu_img(words).status, "{words:?}: {ended:?}");
        assert_eq!((ended.status, ended.stdout.as_str()), (Some(1), ""), "{words:?}: {ended:?}");
    }
    // Of compare, 1 would say that two images differ.
    assert_eq!(bed.limosa(&["compare", "x"]).status.code(), Some(2));
    assert_eq!(limosa(["inspect"]).status.code(), Some(2));
}

#[test]
fn every_option_of_stock_is_known_and_every_command_is_in_the_documentation() {
    needs_qemu!();
    let bed = Bed::new();
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/img.md")).unwrap();
    let mut known = 0;
    for command in COMMANDS {
        assert!(page.contains(&format!("\n| `{command}` | all")), "{command}");
        let help = bed.qemu_img(&[command, "--help"]).stdout;
        // Older ones have one help for all commands.
        let Some((_, arguments)) = help.split_once("Arguments:") else { continue };
        // `-b, --base BASE_IMG`, each on a line of its own.
        let options =
            arguments.lines().flat_map(|line| line.split_whitespace().take_while(|word| word.starts_with('-')));
        for option in options.map(|option| option.trim_end_matches(',')) {
            let said = img(&[command, option]).stderr;
            assert!(!said.contains("unexpected argument"), "{command} {option}: {said}");
            known += 1;
        }
    }
    println!("{known} options");
}

#[test]
fn help_tells_of_every_command() {
    let help = img(&["--help"]).success().stdout;
    for command in COMMANDS {
        assert!(help.contains(&format!("\n  {command} ")), "{command}: {help}");
        let own = img(&[command, "--help"]).success().stdout;
        assert!(own.contains("Usage: limosa img"), "{own}");
        for option in ["--untrusted", "--limit-memory", "--limit-time"] {
            assert!(own.contains(option), "{own}");
        }
    }
}

#[test]
fn the_last_of_an_option_counts() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "x", "1M"]);
    for words in [
        &["map", "-f", "raw", "-f", "qcow2", "x"][..],
        &["map", "--output=json", "--output", "human", "x"],
        &["convert", "-q", "-q", "-O", "qcow2", "-O", "raw", "x", "y"],
    ] {
        bed.both_say(words);
    }
    assert_eq!(std::fs::metadata(bed.path("y")).unwrap().len(), 1 << 20);
}

#[test]
fn a_name_with_a_colon_can_be_used_again() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "./base", "1M"]);
    bed.create(&["-f", "qcow2", "-b", "base", "-F", "qcow2", "file:image:top"]);
    let info = bed.both_say(&["info", "file:image:top"]).stdout;
    assert!(info.starts_with("image: ./image:top\n") && info.contains("(actual path: ./base)"), "{info}");
}

#[test]
fn called_by_the_name_of_qemu_img_it_is_the_command_for_images() {
    needs_qemu!();
    let bed = Bed::new();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_limosa"), bed.path("qemu-img")).unwrap();
    let link = |words: &[&str]| {
        let mut command = std::process::Command::new(bed.path("qemu-img"));
        command.args(words).current_dir(bed.path(""));
        Answer::from(crate::stage::start_command(command).wait())
    };
    link(&["create", "-q", "-f", "qcow2", "x", "1M"]).success();
    assert_eq!(link(&["info", "x"]).success(), bed.qemu_img(&["info", "x"]));
    let version = link(&["--version"]).success().stdout;
    assert!(version.starts_with("qemu-img version 10.0.0 (limosa "), "{version}");
    let help = link(&["--help"]).success().stdout;
    assert!(help.contains("Usage: qemu-img <COMMAND>") && !help.contains("\n  save "), "{help}");
    for (words, status, says) in [
        (&["frob"][..], 1, "qemu-img: img \"frob\": unknown command; see qemu-img --help"),
        (&["info", "absent"], 1, "qemu-img: cannot open absent"),
        (&["resize", "x"], 1, "Usage: qemu-img resize"),
        (&["dd"], 1, "use qemu-img dd if=INPUT of=OUTPUT"),
        (&["compare", "x"], 2, "Usage: qemu-img compare"),
        (&["convert"], 1, "Usage: qemu-img convert [OPTIONS] SOURCE... TARGET"),
    ] {
        let ended = link(words);
        assert_eq!(ended.status, Some(status), "{words:?}: {ended:?}");
        assert!(ended.stderr.contains(says) && !ended.stderr.contains("limosa"), "{words:?}: {ended:?}");
    }
}

#[test]
fn a_file_may_have_any_name() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    needs_qemu!();
    let bed = Bed::new();
    let name = |bytes: &'static [u8]| OsStr::from_bytes(bytes);
    let run = |words: &[&OsStr]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_limosa"));
        command.arg("img").args(words).current_dir(bed.path(""));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
    };
    let (base, disk, copy) = (name(b"b\xfe"), name(b"d\xe9\xff.qcow2"), name(b"c\xff"));
    let word = OsStr::new;
    run(&[word("create"), base, word("1M")]);
    run(&["create", "-f", "qcow2", "-F", "raw", "-b"]
        .map(word)
        .iter()
        .copied()
        .chain([base, disk])
        .collect::<Vec<_>>());
    for command in ["info", "map", "check"] {
        run(&[word(command), disk]);
    }
    run(&[word("resize"), disk, word("2M")]);
    run(&[word("convert"), word("-O"), word("qcow2"), word("-F"), word("raw"), word("-B"), base, disk, copy]);
    run(&[word("compare"), disk, copy]);
    run(&[word("bench"), word("-c"), word("3"), copy]);
    // The name is stored in the image as it is.
    assert!(std::fs::read(bed.path("").join(copy)).unwrap()[..65536].windows(2).any(|bytes| bytes == base.as_bytes()));
}
