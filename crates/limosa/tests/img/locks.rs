//! Images that another process has open.

use std::process::{Command, Stdio};

use limosa_testkit::Process;

use crate::bed::{Answer, Bed};
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
    for words in
        [&["info", "x"][..], &["check", "x"], &["map", "x"], &["check", "-r", "all", "x"], &["resize", "x", "2M"]]
    {
        bed.both_refuse(words, "x");
    }
    // Without a lock it can be read: the program names the option, wherever it prints the error.
    for (words, status) in [(&["info", "x"][..], 1), (&["compare", "x", "x"], 2)] {
        let ours = Answer::from(bed.limosa(words));
        assert!(ours.status == Some(status) && ours.stderr.trim_end().ends_with("use -U"), "{words:?}: {ours:?}");
    }
    let ours = Answer::from(bed.limosa(&["resize", "x", "2M"]));
    assert!(ours.stderr.contains("qemu-io (process ") && !ours.stderr.contains("-U"), "{ours:?}");
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
