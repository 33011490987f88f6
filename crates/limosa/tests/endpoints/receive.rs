//! A running VM migrates into a file, as stock QEMU does it.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;

use limosa_testkit::Machine;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::ends::{LIMOSA, assert_is_the_instant_of, assert_runs_on, migrate, source, start_receive, start_with_input};
use crate::needs_qemu;
use crate::scene::{Scene, beat, control, migration_status, small_beat, text, wait_migration_status};
use crate::stage::{load_in_stock_qemu, names, start_command, wait_for};

/// Expects what `--json` says of a whole reception.
#[track_caller]
fn assert_report(report: &Value, answered: bool) {
    assert_eq!(report["answered"], json!(answered), "{report}");
    assert!(report["pages"]["normal"].as_u64().unwrap() > 4096, "{report}");
    assert!(report["machine"].as_str().unwrap().starts_with("pc-"), "{report}");
}

#[test]
fn a_vm_migrates_into_a_file_over_tcp_and_over_a_unix_socket() {
    needs_qemu!();
    let scene = Scene::new();
    let socket = scene.path("in.sock");
    let unix = format!("unix:{}", socket.display());
    for (name, uri, return_path) in
        [("a", "tcp:127.0.0.1:0", true), ("b", "tcp:127.0.0.1:0", false), ("c", &unix, true), ("d", &unix, false)]
    {
        let snapshot = scene.path(name);
        let (limosa, at) = start_receive(&scene, uri, &snapshot, &["--json", "--no-sync"]);
        assert!(!at.ends_with(":0"), "{at}");
        if uri == unix {
            assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
        }
        let vm = source(&beat());
        migrate(&vm, &at, return_path);
        vm.wait_migrated().unwrap();
        assert_report(&limosa.wait().json(), return_path);
        assert!(!socket.exists());
        assert_is_the_instant_of(&scene, &snapshot, &vm);
        // What the source's operator decides to do with it is another matter: it can still run.
        vm.cont().unwrap();
        assert_runs_on(&vm);
    }
    scene.assert_tidy();
}

#[test]
fn programs_learn_over_the_control_socket_where_it_listens() {
    needs_qemu!();
    let scene = Scene::new();
    let (snapshot, steering) = (scene.path("snapshot"), scene.path("control"));
    let more = ["--control", text(&steering), "--json", "--checksum"];
    let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &more);
    let mut programs = control(&steering);
    let answer = programs.execute("query-migrate", json!({})).unwrap();
    let (_, port) = at.rsplit_once(':').unwrap();
    assert_eq!(answer["socket-address"], json!([{ "type": "inet", "host": "127.0.0.1", "port": port }]), "{answer}");
    let vm = source(&beat());
    migrate(&vm, &at, true);
    vm.wait_migrated().unwrap();
    assert_report(&limosa.wait().json(), true);
    assert_is_the_instant_of(&scene, &snapshot, &vm);
}

#[test]
fn qemu_starts_limosa_by_itself_and_gets_its_answer_through_the_pipe() {
    needs_qemu!();
    let scene = Scene::new();
    for (name, from, return_path) in [("a", "-", true), ("b", "fd:0", false)] {
        let snapshot = scene.path(name);
        let vm = source(&beat());
        migrate(&vm, &format!("exec:{LIMOSA} receive {from} {} --no-sync", snapshot.display()), return_path);
        vm.wait_migrated().unwrap();
        wait_for("the file", || snapshot.exists().then_some(()));
        assert_is_the_instant_of(&scene, &snapshot, &vm);
    }
}

#[test]
fn a_vm_migrates_through_an_inherited_socket() {
    needs_qemu!();
    let scene = Scene::new();
    let snapshot = scene.path("snapshot");
    let (ours, theirs) = UnixStream::pair().unwrap();
    let limosa = start_with_input(&scene, &["receive", "fd:0", text(&snapshot), "--json"], ours.into());
    let vm = source(&beat());
    vm.qmp().execute_with_descriptor("getfd", json!({ "fdname": "out" }), theirs.as_fd()).unwrap();
    drop(theirs);
    migrate(&vm, "fd:out", true);
    vm.wait_migrated().unwrap();
    assert_report(&limosa.wait().json(), true);
    assert_is_the_instant_of(&scene, &snapshot, &vm);
}

#[test]
fn a_recorded_stream_is_received_from_a_file_a_command_and_a_pipe() {
    needs_qemu!();
    let scene = Scene::new();
    let vm = source(&beat());
    let stream = text(&scene.path("stream")).to_owned();
    migrate(&vm, &format!("exec:cat > {stream}"), false);
    vm.wait_migrated().unwrap();
    let (file, exec) = (format!("file:{stream}"), format!("exec:cat {stream}"));
    for (name, uri) in [("a", file.as_str()), ("b", exec.as_str())] {
        let snapshot = scene.path(name);
        let words = ["receive", uri, text(&snapshot), "--json", "--no-sync"];
        assert_report(&start_command(scene.command(&words)).wait().json(), false);
        assert_is_the_instant_of(&scene, &snapshot, &vm);
    }
    for (name, input) in [("c", std::fs::File::open(&stream).unwrap().into()), ("d", piped(&stream))] {
        let snapshot = scene.path(name);
        let limosa = start_with_input(&scene, &["receive", "fd:0", text(&snapshot), "--json", "--no-sync"], input);
        assert_report(&limosa.wait().json(), false);
        assert_is_the_instant_of(&scene, &snapshot, &vm);
    }
}

/// A pipe that the file comes out of.
fn piped(path: &str) -> std::os::fd::OwnedFd {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let mut file = std::fs::File::open(path).unwrap();
    std::thread::spawn(move || std::io::copy(&mut file, &mut writer));
    reader.into()
}

#[test]
fn every_machine_type_of_the_last_years_is_received() {
    needs_qemu!();
    for kind in ["pc-i440fx-7.2", "pc-q35-8.0", "pc-i440fx-9.0", "pc-q35-10.0"] {
        let scene = Scene::new();
        let snapshot = scene.path("snapshot");
        let machine = small_beat().kind(kind);
        let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &["--json", "--no-sync"]);
        let vm = machine.start().unwrap();
        vm.wait_heartbeats(2).unwrap();
        migrate(&vm, &at, true);
        vm.wait_migrated().unwrap();
        assert_eq!(limosa.wait().json()["machine"], kind);
        load_in_stock_qemu(&machine, &snapshot, 0);
    }
}

#[test]
fn a_source_that_could_switch_to_postcopy_and_does_not_is_received() {
    needs_qemu!();
    let scene = Scene::new();
    let snapshot = scene.path("snapshot");
    let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &["--json", "--no-sync"]);
    let vm = source(&beat());
    vm.set_capabilities(&[("postcopy-ram", true)]).unwrap();
    migrate(&vm, &at, true);
    vm.wait_migrated().unwrap();
    assert_report(&limosa.wait().json(), true);
    vm.set_capabilities(&[("postcopy-ram", false)]).unwrap();
    assert_is_the_instant_of(&scene, &snapshot, &vm);
}

#[test]
fn a_source_that_switches_to_postcopy_is_refused_with_what_to_do() {
    needs_qemu!();
    let scene = Scene::new();
    let snapshot = scene.path("snapshot");
    let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &["--no-sync"]);
    let vm = source(&beat());
    vm.set_capabilities(&[("postcopy-ram", true)]).unwrap();
    vm.execute("migrate-set-parameters", json!({ "max-bandwidth": 1 << 20 })).unwrap();
    migrate(&vm, &at, true);
    wait_migration_status(&vm, "active");
    vm.execute("migrate-start-postcopy", json!({})).unwrap();
    let ended = limosa.wait();
    crate::scene::assert_failed(&ended, &["switched to postcopy", "postcopy-ram off", "nothing was kept"]);
    assert!(!snapshot.exists());
}

#[test]
fn a_background_snapshot_is_received_with_the_instant_at_which_it_began() {
    needs_qemu!();
    let scene = Scene::new();
    let snapshot = scene.path("snapshot");
    let machine = Machine::heartbeat(beat().heartbeat_guest().unwrap());
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &["--json", "--no-sync"]);
    vm.execute("migrate-set-parameters", json!({ "max-bandwidth": 0 })).unwrap();
    if let Err(why) = vm.set_capabilities(&[("background-snapshot", true)]) {
        return limosa_testkit::note_skip(&format!("background snapshots need write-protection: {why:#}"));
    }
    vm.execute("migrate", json!({ "uri": at })).unwrap();
    vm.wait_migrated().unwrap();
    assert_eq!(limosa.wait().json()["answered"], false);
    load_in_stock_qemu(&machine, &snapshot, 0);
    // The guest has gone on meanwhile.
    assert_eq!(vm.run_state().unwrap(), "running");
}

#[test]
fn a_reception_that_is_cancelled_leaves_the_vm_running_and_no_file() {
    needs_qemu!();
    let scene = Scene::new();
    let folder = scene.path("files");
    std::fs::create_dir(&folder).unwrap();
    for how in ["signal", "control", "kill", "limit"] {
        let snapshot = folder.join("snapshot");
        let steering = scene.path("control");
        let mut more = vec!["--control", text(&steering), "--max-bandwidth", "1M"];
        if how == "limit" {
            more.extend(["--timeout", "5s"]);
        }
        // limosa does not wait for a machine that is slow to start.
        let vm = source(&beat());
        let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &more);
        migrate(&vm, &at, true);
        crate::stage::wait_moving(&vm);
        match how {
            "signal" => limosa.signal(Signal::INT),
            "control" => drop(control(&steering).execute("migrate_cancel", json!({})).unwrap()),
            "kill" => limosa_testkit::kill9(limosa.pid()).unwrap(),
            _ => vm.process().signal(Signal::STOP),
        }
        let ended = limosa.wait();
        vm.process().signal(Signal::CONT);
        assert!(!ended.status.success());
        if how != "kill" {
            let word = if how == "limit" { "nothing moved for 5s" } else { "cancelled" };
            crate::scene::assert_failed(&ended, &[word, "nothing was kept"]);
        }
        wait_for("QEMU to give up", || (migration_status(&vm) == "failed").then_some(()));
        assert_runs_on(&vm);
        assert_eq!(names(&folder), Vec::<String>::new(), "{how}");
        let _ = std::fs::remove_file(&steering);
    }
}

#[test]
fn vms_of_new_and_old_machine_types_migrate_into_a_file_on_several_channels() {
    needs_qemu!();
    let scene = Scene::new();
    // Machines of 7.2 join at every section and send zero pages on the main channel.
    for (kind, compression) in [
        ("pc-q35-10.0", "none"),
        ("pc-i440fx-10.0", "zlib"),
        ("pc-q35-10.0", "zstd"),
        ("pc-q35-7.2", "none"),
        ("pc-i440fx-7.2", "zlib"),
    ] {
        let snapshot = scene.path(&format!("{kind}-{compression}"));
        let more = ["--json", "--no-sync", "--channels", "4", "--compression", compression];
        let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &more);
        let vm = source(&beat().kind(kind));
        vm.set_capabilities(&[("multifd", true)]).unwrap();
        let parameters = json!({ "multifd-channels": 4, "multifd-compression": compression });
        vm.execute("migrate-set-parameters", parameters).unwrap();
        migrate(&vm, &at, true);
        vm.wait_migrated().unwrap();
        let report = limosa.wait().json();
        assert_report(&report, true);
        assert_eq!(report["machine"], kind);
        assert_is_the_instant_of(&scene, &snapshot, &vm);
    }
}
