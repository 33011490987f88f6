//! A running save is watched, steered and cancelled: time-outs, `--control`, signals.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::needs_qemu;
use crate::stage::*;
use limosa_testkit::{HeartbeatGuest, Machine, Qmp, QmpFailure, Vm, listens};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

const ROUTES: [&str; 2] = ["socket", "file"];

/// A VM that changes 32 MiB again and again, and a place to save it to.
struct Busy {
    vm: Vm,
    found: Found,
    folder: TempDir,
    file: PathBuf,
    machine: Machine,
}

impl Busy {
    fn new() -> Self {
        let machine = Machine::heartbeat(HeartbeatGuest::over(32 << 20));
        let vm = machine.start().unwrap();
        vm.wait_heartbeats(2).unwrap();
        let (folder, file) = place();
        Self { found: Found::of(&vm), vm, folder, file, machine }
    }

    /// Starts a save that can never end by itself: at 4 MiB per second, and less than a third of a second's worth may
    /// be left for the end.
    fn endless(&self, more: &[&str]) -> Program {
        let slow = ["--max-bandwidth", "4M"];
        let saving = start(save_arguments(&self.vm, &self.file, &[&slow, more].concat()));
        wait_moving_or_end(&self.vm, &saving);
        saving
    }

    /// Expects that the save has not happened.
    #[track_caller]
    fn assert_untouched(&self) {
        assert!(names(self.folder.path()).is_empty(), "{:?}", names(self.folder.path()));
        self.found.assert_same(&self.vm);
        assert_beats(&self.vm);
    }

    fn control(&self) -> PathBuf {
        self.vm.folder().join("control")
    }

    /// Connects to the control socket of a save that has begun.
    fn steer(&self) -> Qmp {
        Qmp::connect(&self.control(), SOON).unwrap()
    }
}

/// The bytes per second that QEMU is set to.
fn limit(vm: &Vm) -> u64 {
    vm.execute("query-migrate-parameters", json!({})).unwrap()["max-bandwidth"].as_u64().unwrap()
}

#[test]
fn a_save_that_takes_too_long_is_cancelled_and_says_so() {
    needs_qemu!();
    let busy = Busy::new();
    for via in ROUTES {
        for more in [&["--timeout", "1"][..], &["--timeout", "700ms", "--on-timeout", "cancel"]] {
            let saving = busy.endless(&[&["--via", via], more].concat());
            saving.wait().one_line(&["not done within", "faster than it is saved", "--on-timeout pause"]);
            busy.assert_untouched();
        }
    }
}

#[test]
fn the_control_socket_of_a_job_is_not_taken_for_a_qemu() {
    needs_qemu!();
    let busy = Busy::new();
    let control = busy.control().display().to_string();
    let saving = busy.endless(&["--control", &control]);
    wait_for("a control socket", || listens(saving.pid(), &busy.control()).then_some(()));
    limosa(["resume", "--qmp", &control]).one_line(&["is a control socket of limosa", "not the monitor of a QEMU"]);
    busy.steer().execute("migrate_cancel", json!({})).unwrap();
    saving.wait().one_line(&["cancelled"]);
    busy.assert_untouched();
}

#[test]
fn a_save_that_takes_too_long_can_pause_the_vm_and_complete() {
    needs_qemu!();
    for via in ROUTES {
        let busy = Busy::new();
        let saving = busy.endless(&["--via", via, "--timeout", "1", "--on-timeout", "pause", "--json"]);
        let ended = saving.wait();
        assert!(ended.stderr.contains("not done after 1 s: stopping the VM"), "{}", ended.stderr);
        let report = ended.json();
        assert_eq!(report["vm_state"], "running");
        assert!(report["downtime_ms"].as_f64() > Some(0.0), "the whole pause counts: {report}");
        busy.found.assert_same(&busy.vm);
        assert_beats(&busy.vm);
        // It was running when it was saved, even though the save stopped it.
        load_in_stock_qemu(&busy.machine, &busy.file, 0);
        let summary = limosa(["inspect", "--json", &busy.file.display().to_string()]).json();
        assert_eq!(summary["run_state"], "running");
    }
}

#[test]
fn the_limits_given_are_set_in_qemu_while_it_saves() {
    needs_qemu!();
    let busy = Busy::new();
    for via in ROUTES {
        let saving = busy.endless(&["--via", via, "--downtime", "40ms"]);
        let parameters = busy.vm.execute("query-migrate-parameters", json!({})).unwrap();
        assert_eq!((&parameters["max-bandwidth"], &parameters["downtime-limit"]), (&json!(4 << 20), &json!(40)));
        saving.signal(Signal::INT);
        saving.wait().one_line(&["cancelled"]);
        busy.assert_untouched();
    }
}

#[test]
fn every_signal_that_ends_programs_cancels() {
    needs_qemu!();
    let busy = Busy::new();
    for via in ROUTES {
        for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
            let saving = busy.endless(&["--via", via]);
            let watchdog = watchdog(&saving).unwrap();
            saving.signal(signal);
            saving.wait().one_line(&["cancelled"]);
            wait_gone(watchdog);
            busy.assert_untouched();
        }
    }
}

#[test]
fn a_signal_at_any_moment_leaves_either_a_whole_file_or_none() {
    needs_qemu!();
    let busy = Busy::new();
    let lasts = {
        let begun = std::time::Instant::now();
        save(&busy.vm, &busy.file, &[]);
        begun.elapsed()
    };
    std::fs::remove_file(&busy.file).unwrap();
    let mut cancelled = 0;
    for (n, stop) in (0..20).zip([false, true].into_iter().cycle()) {
        let more: &[&str] = &["--via", ROUTES[n as usize / 2 % 2], "--stop"];
        let saving = start(save_arguments(&busy.vm, &busy.file, &more[..if stop { 3 } else { 2 }]));
        std::thread::sleep(lasts * n / 16);
        saving.signal(Signal::TERM);
        let ended = saving.wait();
        if ended.status.success() {
            let loaded = load_in_stock_qemu(&busy.machine, &busy.file, 0);
            drop(loaded);
            std::fs::remove_file(&busy.file).unwrap();
            if stop {
                assert_eq!(busy.vm.run_state().unwrap(), "postmigrate");
                busy.vm.cont().unwrap();
            }
        } else if ended.status.code() == Some(1) {
            ended.one_line(&["cancelled"]);
            cancelled += 1;
        } // else it came before limosa listened to signals, and so before it did anything.
        busy.assert_untouched();
    }
    assert!(cancelled > 0, "no signal came in the middle");
}

#[test]
fn the_control_socket_tells_how_far_the_save_is_and_steers_it() {
    needs_qemu!();
    for via in ROUTES {
        let busy = Busy::new();
        let control = busy.control().display().to_string();
        let saving = busy.endless(&["--via", via, "--control", &control, "--json"]);
        assert_eq!(std::fs::metadata(busy.control()).unwrap().permissions().mode() & 0o777, 0o600);
        let mut steer = busy.steer();

        let mut transferred = 0;
        wait_for("progress", || {
            let output = steer.execute("query-migrate", json!({})).unwrap();
            assert!(["setup", "active"].contains(&output["status"].as_str().unwrap()), "{output}");
            let now = output["ram"]["transferred"].as_u64().unwrap();
            assert!(now >= transferred && output["ram"]["total"].is_u64() && output["total-time"].is_u64(), "{output}");
            transferred = now;
            (transferred > 1 << 20).then_some(())
        });
        let parameters = steer.execute("query-migrate-parameters", json!({})).unwrap();
        assert_eq!(parameters["max-bandwidth"], 4 << 20);
        // A changed rate is QEMU's rate, and is put back all the same in the end.
        steer.execute("migrate-set-parameters", json!({ "max-bandwidth": 3 << 20 })).unwrap();
        wait_for("the new rate in QEMU", || (limit(&busy.vm) == 3 << 20).then_some(()));
        assert!(saving.is_running());
        steer.execute("migrate-set-parameters", json!({ "max-bandwidth": 0 })).unwrap();
        // What could not end at 3 MiB per second ends without a limit.
        saving.wait().json();
        steer.wait_event("MIGRATION", SOON).unwrap();
        assert!(!busy.control().exists(), "the socket goes with the save");
        busy.found.assert_same(&busy.vm);
        assert_beats(&busy.vm);
        load_in_stock_qemu(&busy.machine, &busy.file, 0);
    }
}

#[test]
fn the_control_socket_cancels() {
    needs_qemu!();
    let busy = Busy::new();
    for via in ROUTES {
        let control = busy.control().display().to_string();
        let saving = busy.endless(&["--via", via, "--control", &control]);
        busy.steer().execute("migrate_cancel", json!({})).unwrap();
        saving.wait().one_line(&["cancelled"]);
        assert!(!busy.control().exists());
        busy.assert_untouched();
    }
}

/// Says something to the control socket and returns all that it answers until it hangs up.
fn talk(control: &Path, words: &[u8]) -> String {
    let mut stream = UnixStream::connect(control).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    // It may hang up in the middle of a line that is too long.
    let _ = stream.write_all(words);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

#[test]
fn nonsense_on_the_control_socket_does_not_hurt_the_save() {
    needs_qemu!();
    let busy = Busy::new();
    let control = busy.control();
    let saving = busy.endless(&["--control", &control.display().to_string()]);
    drop(busy.steer());
    let deep = "[".repeat(50_000) + "\n";
    for words in [
        &b"hello\n"[..],
        b"\xff\xfe\0\0\n",
        b"{\"execute\": 7}\n[]\nnull\n\"\"\n",
        b"{\"execute\": \"quit\"}\n{\"execute\": \"migrate-set-parameters\"}\n",
        b"{\"execute\": \"migrate-set-parameters\", \"arguments\": {\"max-bandwidth\": -1}}\n",
        b"{\"execute\": \"migrate-set-parameters\", \"arguments\": {\"downtime-limit\": 1}}\n",
        b"{\"execute\": \"migrate-pause\"}\n",
        deep.as_bytes(),
    ] {
        let answer = talk(&control, words);
        let answers: Vec<Value> = answer.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(answers[0]["QMP"]["version"].is_object(), "{answer}");
        // Nothing of this is a command: every answer is an error (there may be events among them).
        let replies: Vec<_> = answers[1..].iter().filter(|answer| answer.get("event").is_none()).collect();
        let lines = words.iter().filter(|&&byte| byte == b'\n').count();
        assert_eq!(replies.len(), lines, "{answer}");
        assert!(replies.iter().all(|reply| reply["error"]["desc"].is_string()), "{answer}");
    }
    // Too long a line is refused without being kept.
    let answer = talk(&control, &vec![b'x'; 100 << 10]);
    assert!(answer.contains("64 KiB") || answer.lines().count() == 1, "{answer}");
    // A client that says nothing, one that never reads, and many at once.
    let silent = UnixStream::connect(&control).unwrap();
    let mut deaf = UnixStream::connect(&control).unwrap();
    deaf.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    while deaf.write_all(&b"{\"execute\": \"query-migrate\"}\n".repeat(1000)).is_ok() {}
    let crowd: Vec<_> = (0..20).map(|_| UnixStream::connect(&control).unwrap()).collect();
    let greeted = crowd.iter().filter(|stream| {
        stream.set_read_timeout(Some(SOON)).unwrap();
        let mut line = String::new();
        BufReader::new(*stream).read_line(&mut line).unwrap_or(0) > 0
    });
    assert!(greeted.count() >= 1);
    drop(crowd);
    // And still it answers, and the save can be ended.
    let mut steer = wait_for("a place on the control socket", || Qmp::connect(&control, SOON).ok());
    let refused = steer.execute("cont", json!({})).unwrap_err();
    assert_eq!(refused.downcast_ref::<QmpFailure>().unwrap().class, "CommandNotFound");
    assert!(saving.is_running(), "{}", saving.stderr());
    steer.execute("migrate_cancel", json!({})).unwrap();
    saving.wait().one_line(&["cancelled"]);
    drop((silent, deaf));
    busy.assert_untouched();
}

#[test]
fn a_control_socket_that_cannot_be_made_is_an_error_before_anything_starts() {
    needs_qemu!();
    let busy = Busy::new();
    std::fs::write(busy.control(), "precious").unwrap();
    let control = busy.control().display().to_string();
    limosa(save_arguments(&busy.vm, &busy.file, &["--control", &control])).one_line(&[&control, "--control"]);
    limosa(save_arguments(&busy.vm, &busy.file, &["--control", "/nowhere/x"])).one_line(&["/nowhere/x", "--control"]);
    assert_eq!(std::fs::read(busy.control()).unwrap(), b"precious");
    busy.assert_untouched();
}

#[test]
fn the_sockets_of_a_killed_save_do_not_stand_in_the_way_of_the_next() {
    needs_qemu!();
    let busy = Busy::new();
    let listen = busy.vm.folder().join("listen");
    let control = busy.control().display().to_string();
    let listen = format!("unix:{}", listen.display());
    let more = ["--via", "socket", "--listen", &listen, "--control", &control];
    let saving = busy.endless(&more);
    let watchdog = watchdog(&saving).unwrap();
    saving.signal(Signal::KILL);
    saving.wait();
    wait_gone(watchdog);
    busy.assert_untouched();
    save(&busy.vm, &busy.file, &more);
    assert_beats(&busy.vm);
}
