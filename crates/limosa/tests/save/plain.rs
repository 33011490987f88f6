//! A running VM is saved by every route: it continues, nothing is left in QEMU, and stock QEMU loads the file.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use crate::needs_qemu;
use crate::stage::channels::free_port;
use crate::stage::*;
use limosa_testkit::{Machine, Vm};
use serde_json::{Value, json};

/// Saves a beating VM with `more` arguments and expects everything that holds for every save of a VM that continues.
fn saves_and_goes_on(more: &[&str], via: &str) {
    let (folder, file) = place();
    let machine = small();
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    let found = Found::of(&vm);
    let lap = vm.last_pass().unwrap();

    let report = save(&vm, &file, more);

    assert_eq!(report["via"], via);
    assert_eq!(report["vm_state"], "running");
    assert!(report["downtime_ms"].as_f64().is_some_and(|downtime| downtime > 0.0), "{report}");
    found.assert_same(&vm);
    assert_eq!(names(folder.path()), ["vm.snapshot"], "nothing but the file");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(report["file_length"], std::fs::metadata(&file).unwrap().len());
    assert_beats(&vm);

    for channels in [0, 2] {
        let loaded = load_in_stock_qemu(&machine, &file, channels);
        assert!(loaded.last_pass() > Some(lap), "the beat goes on from where it was, it does not begin again");
    }
}

#[test]
fn a_beating_vm_is_saved_through_a_socket_pair() {
    needs_qemu!();
    saves_and_goes_on(&["--via", "socket"], "socket");
}

#[test]
fn a_beating_vm_is_saved_over_a_unix_socket() {
    needs_qemu!();
    let folder = limosa_testkit::scratch().unwrap();
    let socket = folder.path().join("listen");
    saves_and_goes_on(&["--via", "socket", "--listen", &format!("unix:{}", socket.display())], "socket");
    assert!(!socket.exists(), "the socket that limosa listened at is gone");
}

#[test]
fn a_beating_vm_is_saved_over_tcp() {
    needs_qemu!();
    saves_and_goes_on(&["--listen", &free_port()], "socket");
}

#[test]
fn a_beating_vm_is_saved_over_tcp_at_a_port_that_the_kernel_chooses() {
    needs_qemu!();
    saves_and_goes_on(&["--via", "socket", "--listen", "tcp:127.0.0.1:0"], "socket");
}

#[test]
fn a_beating_vm_is_saved_by_qemu_itself() {
    needs_qemu!();
    saves_and_goes_on(&["--via", "file"], "file");
}

#[test]
fn a_beating_vm_is_saved_with_checksums() {
    needs_qemu!();
    saves_and_goes_on(&["--via", "socket", "--checksum"], "socket");
    saves_and_goes_on(&["--via", "file", "--checksum"], "file");
}

#[test]
fn left_to_itself_limosa_lets_a_qemu_of_this_host_write_the_file() {
    needs_qemu!();
    saves_and_goes_on(&[], "file");
}

/// A user's own settings of every kind that a save changes.
fn set_unusual(vm: &Vm) {
    vm.set_capabilities(&[("xbzrle", true), ("return-path", true), ("events", false), ("mapped-ram", false)]).unwrap();
    let parameters = json!({
        "max-bandwidth": 5 << 20, "downtime-limit": 77, "multifd-channels": 7, "multifd-compression": "zlib",
        "direct-io": true, "tls-creds": "mine", "mode": "cpr-reboot", "zero-page-detection": "none",
    });
    vm.execute("migrate-set-parameters", parameters).unwrap();
}

#[test]
fn settings_of_the_user_do_not_disturb_a_save_and_are_put_back_after_it() {
    needs_qemu!();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    set_unusual(&vm);
    let found = Found::of(&vm);
    for via in ["socket", "file"] {
        let (_folder, file) = place();
        save(&vm, &file, &["--via", via, "--downtime", "500ms", "--max-bandwidth", "1G"]);
        found.assert_same(&vm);
        assert_beats(&vm);
        load_in_stock_qemu(&small(), &file, 0);
    }
    // mapped-ram can be on neither beside xbzrle nor with compression or TLS; a user who works with it leaves it on.
    let plain = json!({ "multifd-compression": "none", "tls-creds": "" });
    vm.execute("migrate-set-parameters", plain).unwrap();
    vm.set_capabilities(&[("xbzrle", false), ("mapped-ram", true), ("multifd", true)]).unwrap();
    let found = Found::of(&vm);
    for via in ["socket", "file"] {
        let (_folder, file) = place();
        save(&vm, &file, &["--via", via]);
        found.assert_same(&vm);
        load_in_stock_qemu(&small(), &file, 2);
    }
}

#[test]
fn a_vm_is_saved_many_times_in_a_row() {
    needs_qemu!();
    let (folder, file) = place();
    let vm = small().start().unwrap();
    let found = Found::of(&vm);
    let mut ids = std::collections::BTreeSet::new();
    for round in 0..6 {
        let via = if round % 2 == 0 { "socket" } else { "file" };
        let report = save(&vm, &file, &["--via", via, "--force"]);
        ids.insert(report["id"].as_str().unwrap().to_owned());
        found.assert_same(&vm);
        assert_beats(&vm);
    }
    assert_eq!(ids.len(), 6, "every snapshot has an id of its own");
    assert_eq!(names(folder.path()), ["vm.snapshot"]);
    load_in_stock_qemu(&small(), &file, 0);
}

#[test]
fn a_stopped_vm_is_saved_as_stopped_and_stays_so() {
    needs_qemu!();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    for via in ["socket", "file"] {
        vm.stop().unwrap();
        let found = Found::of(&vm);
        let (_folder, file) = place();
        let report = save(&vm, &file, &["--via", via]);
        assert_eq!(report["downtime_ms"], Value::Null, "a VM that stood anyway has no downtime");
        // QEMU calls a stopped VM `postmigrate` once it was migrated; it did not run in between.
        found.assert_same_but(&vm, "postmigrate");
        assert_eq!(report["vm_state"], "postmigrate");
        let loaded = small().start_incoming().unwrap();
        loaded.load_file(&file, 0).unwrap();
        loaded.wait_run_state("paused", SOON).unwrap();
        loaded.check_heartbeat().unwrap();
        loaded.cont().unwrap();
        assert_beats(&loaded);
        vm.cont().unwrap();
        assert_beats(&vm);
    }
}

#[test]
fn people_are_told_on_stderr_and_programs_on_stdout() {
    needs_qemu!();
    let (_folder, file) = place();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    let ended = limosa(save_arguments(&vm, &file, &["--via", "socket"])).success();
    assert_eq!(ended.stdout, "");
    for words in ["saved ", "was stopped for", "system calls"] {
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
    }
    let report = save(&vm, &file, &["--via", "socket", "--force"]);
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("no number in {report}"));
    for key in ["to_vm_running_ms", "elapsed_ms", "gib_per_s", "ram_bytes", "file_length", "rounds", "downtime_ms"] {
        assert!(number(&report[key]) > 0.0, "{key} in {report}");
    }
    assert!(number(&report["to_vm_running_ms"]) <= number(&report["elapsed_ms"]));
    for key in ["normal", "zero", "explicit_zero", "resent", "punched"] {
        assert!(report["pages"][key].is_u64(), "{key} in {report}");
    }
    let pages = number(&report["pages"]["normal"]) + number(&report["pages"]["zero"]);
    assert_eq!(pages * 4096.0, number(&report["ram_bytes"]));
    assert!(number(&report["pages"]["normal"]) >= f64::from(small().heartbeat_guest().unwrap().pages));
    assert!(number(&report["channel"]["bytes_in"]) > 8e6 && number(&report["file"]["bytes_out"]) > 8e6, "{report}");
    assert_eq!(report["snapshot"].as_str().map(Path::new), Some(&*file));
}

#[test]
fn zero_pages_take_no_room_in_the_file() {
    needs_qemu!();
    use std::os::unix::fs::MetadataExt as _;
    let machine = Machine::heartbeat(limosa_testkit::HeartbeatGuest::over(4 << 20)).memory(512 << 20);
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    for via in ["socket", "file"] {
        let (_folder, file) = place();
        let report = save(&vm, &file, &["--via", via]);
        let found = std::fs::metadata(&file).unwrap();
        assert!(found.len() > 512 << 20 && found.blocks() * 512 < 32 << 20, "{} blocks: {report}", found.blocks());
    }
}

#[test]
fn a_save_that_does_not_converge_says_so_once_with_the_remedy_and_goes_on() {
    needs_qemu!();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    let found = Found::of(&vm);
    for (via, channels, background) in [("socket", &[][..], true), ("socket", &["--channels", "2"], false)] {
        let (folder, file) = place();
        // The guest writes 8 MiB in much less than the two seconds that it takes to save them.
        let more = [&["--via", via, "--max-bandwidth", "4M"], channels].concat();
        let saving = start(save_arguments(&vm, &file, &more));
        let line = wait_for("a line about the rounds", || saving.stderr().lines().next().map(str::to_owned));
        assert!(
            line.contains("changes its memory as fast as it is saved (") && line.contains(" MiB to save"),
            "{line}"
        );
        for remedy in ["--timeout", "--on-timeout pause", "--max-bandwidth"] {
            assert!(line.contains(remedy), "{remedy}: {line}");
        }
        assert_eq!(line.contains("--background"), background, "{line}");
        let rounds = || vm.execute("query-migrate", json!({})).unwrap()["ram"]["dirty-sync-count"].as_u64();
        let then = rounds();
        wait_for("two more rounds", || (rounds() > then.map(|rounds| rounds + 1)).then_some(()));
        assert!(saving.is_running());
        saving.signal(rustix::process::Signal::INT);
        let ended = saving.wait();
        let said: Vec<&str> = ended.stderr.lines().collect();
        assert!(said.len() == 2 && said[0] == line && said[1].contains("cancelled"), "{said:#?}");
        assert!(names(folder.path()).is_empty());
        found.assert_same(&vm);
        assert_beats(&vm);
    }
}

#[test]
fn a_save_with_a_time_limit_says_nothing_of_rounds() {
    needs_qemu!();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    let (_folder, file) = place();
    let more = ["--via", "socket", "--max-bandwidth", "4M", "--timeout", "15s"];
    limosa(save_arguments(&vm, &file, &more)).one_line(&["not done within 15 s"]);
    assert_beats(&vm);
}
