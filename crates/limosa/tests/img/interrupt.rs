//! Signals.

use rustix::process::Signal;

use crate::bed::{Answer, Bed, length};
use crate::needs_qemu;
use crate::stage::wait_for;

#[test]
fn what_a_command_made_and_did_not_finish_is_taken_away_and_what_was_there_stays() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "raw", "source", "64M"]);
    bed.qemu_io("source", &["write -P 7 0 64M"]);
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        for (was_there, more) in [(false, &[][..]), (true, &[]), (true, &["-n"])] {
            if was_there {
                bed.create(&["-f", "qcow2", "target", "64M"]);
            } else {
                let _ = std::fs::remove_file(bed.path("target"));
            }
            let words =
                [&["convert", "-p", "-r", "4M", "-f", "raw", "-O", "qcow2"], more, &["source", "target"]].concat();
            let running = bed.start(&words);
            wait_for("a part of the copy", || {
                (bed.path("target").exists() && length(&bed.path("target")) > 4 << 20).then_some(())
            });
            running.signal(signal);
            let answer = Answer::from(running.wait());
            assert_eq!(answer.status, Some(status), "{words:?}: {answer:?}");
            let says = match was_there {
                true => "limosa: target: interrupted; its contents are not complete\n",
                false => "limosa: interrupted; removed target\n",
            };
            assert!(answer.stdout.ends_with("/100%)\r\n") && answer.stderr == says, "{answer:?}");
            assert_eq!(bed.path("target").exists(), was_there, "{words:?}");
        }
    }
}
