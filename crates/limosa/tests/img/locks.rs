//! Images that another process has open.

use std::process::{Command, Stdio};

use limosa_testkit::{Process, listens};

use crate::bed::{Answer, Bed, assert_one_line, poke};
use crate::needs_qemu;
use crate::stage::wait_for;

#[test]
fn what_another_process_writes_is_left_alone_unless_that_is_asked_for() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "x", "1M"]);
    let mut writer = Command::new("qemu-io");
    writer.args(["-c", "write 0 64k", "-c", "flush", "-c", "sleep 600000"]).arg(bed.path("x")).stdout(Stdio::null());
    let writer = Process::spawn("qemu-io", writer).unwrap();
    // Asked without a lock, which would keep the writer itself out; and once it has written, the image stays as it is.
    wait_for("qemu-io to write to the image", || {
        bed.qemu_img(&["map", "-U", "--output=json", "x"]).stdout.contains("\"data\": true").then_some(())
    });
    for words in [
        &["measure", "x"][..],
        &["convert", "x", "y"],
        &["check", "-r", "all", "x"],
        &["resize", "x", "2M"],
        &["snapshot", "-c", "s", "x"],
    ] {
        bed.both_refuse(words, "x");
    }
    // Without a lock it can be read: the program names the option, wherever it prints the error.
    for (words, status) in [(&["measure", "x"][..], 1), (&["compare", "x", "x"], 2)] {
        let ours = Answer::from(bed.limosa(words));
        assert!(
            ours.status == Some(status)
                && ours.stderr.contains("; use -U to read it anyway; contents may be inconsistent"),
            "{words:?}: {ours:?}"
        );
    }
    let ours = Answer::from(bed.limosa(&["resize", "x", "2M"]));
    assert!(ours.stderr.contains("cannot lock x: qemu-io (process ") && !ours.stderr.contains("-U"), "{ours:?}");
    assert!(ours.stderr.contains(") has it open and ") && !ours.stderr.contains("it is open in"), "{ours:?}");
    for words in [&["create", "-q", "-f", "qcow2", "x", "1M"][..], &["create", "-q", "x", "1M"]] {
        bed.both_refuse(words, "x");
    }
    // To lie on it, its length is enough.
    bed.both_say(&["create", "-q", "-f", "qcow2", "-b", "x", "-F", "qcow2", "above"]);
    for words in [&["info", "-U", "x"][..], &["map", "-U", "x"]] {
        bed.both_say(words);
    }
    // Without a lock no command may write, with any options.
    for words in [&["bench", "-w", "-c", "1", "x"][..], &["bench", "-U", "-w", "-c", "1", "x"]] {
        let (ours, stock) = (Answer::from(bed.limosa(words)), bed.qemu_img(words));
        assert_eq!((ours.status, stock.status), (Some(1), Some(1)), "{words:?}: {ours:?}");
    }
    drop(writer);
    bed.limosa(&["check", "-q", "x"]).success();
    bed.both_say(&["map", "x"]);
}

/// QEMU, writing to the image `x`: it holds its lock, and has more of the image in memory than in the file.
fn writer(bed: &Bed) -> Process {
    let mut daemon = Command::new("qemu-storage-daemon");
    daemon.args(["--blockdev", "file,node-name=f,filename=x", "--blockdev", "qcow2,node-name=q,file=f"]);
    daemon.args(["--nbd-server", &format!("addr.type=unix,addr.path={}", bed.path("s").display())]);
    daemon.args(["--export", "nbd,id=e,node-name=q,name=q,writable=on"]);
    daemon.current_dir(bed.path("")).stdout(Stdio::null());
    let daemon = Process::spawn("qemu-storage-daemon", daemon).unwrap();
    wait_for("the server of the writer", || listens(daemon.pid(), &bed.path("s")).then_some(()));
    daemon
}

#[test]
fn a_look_needs_no_lock_of_an_image_that_qemu_writes_and_says_so() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "x", "64M"]);
    bed.qemu_io("x", &["write -P 1 0 1M"]);
    bed.qemu_img(&["snapshot", "-c", "s", "x"]).success();
    bed.create(&["-f", "qcow2", "-b", "x", "-F", "qcow2", "above"]);
    let _writer = writer(&bed);
    for words in [
        &["info", "x"][..],
        &["info", "--output", "json", "x"],
        &["info", "--backing-chain", "above"],
        &["map", "x"],
        &["map", "--output", "json", "above"],
        &["snapshot", "-l", "x"],
        &["check", "--output", "json", "x"],
    ] {
        assert_eq!(bed.qemu_img(words).status, Some(1), "{words:?}");
        let ours = Answer::from(bed.limosa(words)).success();
        assert_one_line(&ours, words, "another process writes to it (it is open in qemu-storage-da");
        // Asked for, it is as with stock, and not commented on.
        let stock = bed.qemu_img(&[words, &["-U"]].concat());
        let shared = Answer::from(bed.limosa(&[words, &["-U"]].concat())).success();
        assert_eq!((shared.stderr.as_str(), &ours.stdout), ("", &shared.stdout), "{words:?}");
        if !words.contains(&"json") {
            assert_eq!(ours.stdout, stock.stdout, "{words:?}");
        }
    }
    for words in [&["check", "-r", "leaks", "x"][..], &["snapshot", "-d", "s", "x"]] {
        bed.both_refuse(words, "x");
    }
}

#[test]
fn damage_in_an_image_that_is_in_use_is_not_certain() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "x", "64M"]);
    bed.qemu_io("x", &["write -P 1 0 1M"]);
    let writer = writer(&bed);
    // A cluster whose refcount is not written yet, and then a table that is not: as a writer's changes may be seen.
    let layout = std::fs::read(bed.path("x")).unwrap();
    let field = |at: usize| u64::from_be_bytes(layout[at..at + 8].try_into().unwrap());
    let table = usize::try_from(field(48)).unwrap();
    let block = field(table);
    poke(&bed.path("x"), block + 2 * 6, &[0, 0]);
    let words = ["check", "x"];
    let ours = Answer::from(bed.limosa(&words));
    let stock = bed.qemu_img(&["check", "-U", "x"]);
    assert_eq!((ours.status, stock.status), (Some(2), Some(2)), "{ours:?} {stock:?}");
    assert!(ours.stdout.contains("it is in use") && !ours.stdout.contains("data may be lost"), "{ours:?}");
    let l1 = field(40);
    poke(&bed.path("x"), l1, &[0xff]);
    for words in [&["map", "x"][..], &["map", "--output", "json", "x"]] {
        let ours = Answer::from(bed.limosa(words));
        assert_eq!(ours.status, Some(1), "{ours:?}");
        assert!(ours.stderr.contains("look again") && !ours.stderr.contains("-r all"), "{ours:?}");
    }
    drop(writer);
}

#[test]
fn a_source_is_no_target_even_without_locks() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "raw", "base", "1M"]);
    bed.create(&["-f", "qcow2", "-b", "base", "-F", "raw", "overlay", "1M"]);
    bed.create(&["-f", "qcow2", "-o", "data_file=data", "apart", "1M"]);
    std::fs::write(bed.path("base"), vec![7; 1 << 20]).unwrap();
    std::fs::write(bed.path("data"), vec![7; 1 << 20]).unwrap();
    for (source, target) in [("overlay", "base"), ("apart", "data")] {
        for format in ["raw", "qcow2"] {
            let words = ["convert", "-U", "-f", "qcow2", "-O", format, source, target];
            assert_one_line(&Answer::from(bed.limosa(&words)), &words, target);
            assert!(std::fs::read(bed.path(target)).unwrap() == vec![7; 1 << 20], "{words:?}");
        }
    }
}
