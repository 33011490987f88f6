//! Any peer that connects, and anything that it sends: a clear line, no partial file, and the real source is still
//! served.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;

use crate::ends::{assert_is_the_instant_of, assert_runs_on, migrate, source, start_receive, start_with_input};
use crate::needs_qemu;
use crate::scene::{Scene, assert_failed, beat, migration_status, text, wait_said};
use crate::stage::{Ended, names, start_command, wait_for};

/// A folder that must stay empty.
fn files(scene: &Scene) -> PathBuf {
    let folder = scene.path("files");
    std::fs::create_dir(&folder).unwrap();
    folder
}

fn receive_bytes(scene: &Scene, snapshot: &std::path::Path, bytes: Vec<u8>) -> Ended {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let feeder = std::thread::spawn(move || {
        // It may be hung up on.
        let _ = writer.write_all(&bytes);
    });
    let ended = start_with_input(scene, &["receive", "fd:0", text(snapshot)], reader.into()).wait();
    feeder.join().unwrap();
    ended
}

#[test]
fn what_is_no_stream_and_a_stream_that_ends_anywhere_leave_nothing() {
    needs_qemu!();
    let scene = Scene::new();
    let folder = files(&scene);
    let snapshot = folder.join("snapshot");
    for noise in [vec![], b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0; 1 << 20], b"QEVM\0\0\0\x03".to_vec()] {
        receive_bytes(&scene, &snapshot, noise).one_line(&["nothing was kept"]);
    }
    let vm = source(&beat());
    let stream = scene.path("stream");
    migrate(&vm, &format!("exec:cat > {}", stream.display()), false);
    vm.wait_migrated().unwrap();
    let whole = std::fs::read(&stream).unwrap();
    for cut in [9, 100, 5000, whole.len() / 2, whole.len() - 200_000, whole.len() - 1] {
        receive_bytes(&scene, &snapshot, whole[..cut].to_vec()).one_line(&["nothing was kept"]);
    }
    let mut longer = whole.clone();
    longer.extend_from_slice(b"and more");
    receive_bytes(&scene, &snapshot, longer).one_line(&["nothing was kept"]);
    assert_eq!(names(&folder), Vec::<String>::new());
    let ended = receive_bytes(&scene, &snapshot, whole);
    ended.success();
    assert_is_the_instant_of(&scene, &snapshot, &vm);
}

#[test]
fn strangers_at_the_port_do_not_keep_the_source_out() {
    needs_qemu!();
    let scene = Scene::new();
    let snapshot = scene.path("snapshot");
    let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &["--json", "--no-sync"]);
    let address = at.strip_prefix("tcp:").unwrap().to_owned();
    let connect = || TcpStream::connect(&address).unwrap();
    let mut chatty = connect();
    chatty.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert_eq!(chatty.read(&mut [0; 10]).unwrap_or(0), 0, "it is hung up on");
    drop(connect());
    // Thousands, faster than they are accepted.
    for _ in 0..3000 {
        let mut one = connect();
        let _ = one.write_all(b"x");
    }
    // Silent ones, that stay.
    let silent: Vec<TcpStream> = (0..40).map(|_| connect()).collect();
    let vm = source(&beat());
    migrate(&vm, &at, true);
    crate::stage::wait_moving(&vm);
    // A second source comes too late.
    wait_for("the port to be closed", || TcpStream::connect(&address).is_err().then_some(()));
    vm.wait_migrated().unwrap();
    let ended = limosa.wait();
    assert!(ended.stderr.lines().count() < 10, "{}", ended.stderr);
    ended.json();
    drop(silent);
    assert_is_the_instant_of(&scene, &snapshot, &vm);
}

#[test]
fn a_missing_or_silent_peer_is_waited_for_until_the_timeout() {
    let scene = Scene::new();
    let folder = files(&scene);
    let snapshot = folder.join("snapshot");
    let (limosa, _) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &["--timeout", "300ms"]);
    assert_failed(&limosa.wait(), &["limosa: no migration came", "within 0.3 s", "start it at the source"]);
    let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &["--timeout", "1s"]);
    let mut beginner = TcpStream::connect(at.strip_prefix("tcp:").unwrap()).unwrap();
    beginner.write_all(b"QEVM\0\0\0").unwrap();
    assert_failed(&limosa.wait(), &["nothing moved for 1s"]);
    let words = ["receive", "exec:exec sleep 1000", text(&snapshot), "--timeout", "300ms"];
    start_command(scene.command(&words)).wait().one_line(&["nothing moved for 300ms", "nothing was kept"]);
    // Waiting for a connection can be interrupted at any moment.
    let (limosa, _) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &[]);
    limosa.signal(rustix::process::Signal::INT);
    assert_failed(&limosa.wait(), &["cancelled"]);
    assert_eq!(names(&folder), Vec::<String>::new());
}

#[test]
fn a_command_that_fails_behind_a_whole_stream_is_not_believed() {
    needs_qemu!();
    let scene = Scene::new();
    let folder = files(&scene);
    let snapshot = folder.join("snapshot");
    let vm = source(&beat());
    let stream = scene.path("stream");
    migrate(&vm, &format!("exec:cat > {}", stream.display()), false);
    vm.wait_migrated().unwrap();
    let receive = |command: &str, more: &[&str]| {
        let uri = format!("exec:{}", command.replace("STREAM", text(&stream)));
        let mut words = vec!["receive", &uri, text(&snapshot)];
        words.extend(more);
        start_command(scene.command(&words)).wait()
    };
    receive("cat STREAM; exit 9", &[]).one_line(&["the command failed (exit status: 9)", "nothing was kept"]);
    receive("head -c 1000000 STREAM; exit 9", &[]).one_line(&["exit status: 9", "nothing was kept"]);
    receive("exit 9", &[]).one_line(&["exit status: 9", "nothing was kept"]);
    let lingering = receive("cat STREAM; exec sleep 1000 >&-", &["--timeout", "1s"]);
    lingering.one_line(&["did not end within 1s", "nothing was kept"]);
    assert_eq!(names(&folder), Vec::<String>::new());
    receive("cat STREAM", &["--no-sync"]).success();
    assert_is_the_instant_of(&scene, &snapshot, &vm);
}

#[test]
fn a_source_that_wants_answers_over_a_pipe_is_told_what_to_do() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = crate::scene::saved_beat(&scene, &beat(), &[]);
    let stream = scene.path("stream");
    // A sender that takes the command for a destination that answers: its first bytes are recorded.
    let uri = format!("exec:head -c 300 > {}", stream.display());
    let words = ["send", text(&saved.snapshot), &uri, "--timeout", "1s"];
    assert!(!start_command(scene.command(&words)).wait().status.success());
    let folder = files(&scene);
    let bytes = std::fs::read(&stream).unwrap();
    assert!(!bytes.is_empty());
    receive_bytes(&scene, &folder.join("snapshot"), bytes).one_line(&["return-path off", "--one-way"]);
    assert_eq!(names(&folder), Vec::<String>::new());
}

#[test]
fn a_full_disk_leaves_the_vm_running_and_no_file() {
    needs_qemu!();
    let scene = Scene::new();
    let folder = files(&scene);
    let snapshot = folder.join("snapshot");
    for limit in ["1000", "9000"] {
        // The shell's unit is 512 bytes in some and 1 KiB in others; the beat guest has 24 MiB either way.
        let mut command = Command::new("/bin/bash");
        let script = format!("trap '' XFSZ; ulimit -f {limit}; exec \"$0\" receive unix:$1 $2");
        let socket = scene.path("in.sock");
        command.args(["-c", &script, crate::ends::LIMOSA, text(&socket), text(&snapshot)]);
        let limosa = start_command(command);
        wait_said(&limosa, "listening on ");
        let vm = source(&beat());
        migrate(&vm, &format!("unix:{}", socket.display()), true);
        let ended = limosa.wait();
        assert_failed(&ended, &["snapshot"]);
        wait_for("QEMU to give up", || (migration_status(&vm) == "failed").then_some(()));
        assert_runs_on(&vm);
        assert_eq!(names(&folder), Vec::<String>::new());
        assert!(!socket.exists());
    }
}

#[test]
fn what_is_no_place_for_a_file_is_refused_before_a_connection_is_waited_for() {
    let scene = Scene::new();
    let taken = scene.path("taken");
    std::fs::write(&taken, "precious").unwrap();
    let receive = |uri: &str, file: &std::path::Path, more: &[&str]| {
        let mut words = vec!["receive", uri, text(file)];
        words.extend(more);
        start_command(scene.command(&words)).wait()
    };
    receive("tcp:127.0.0.1:0", &taken, &[]).one_line(&["taken", "exists already", "--force"]);
    receive("tcp:127.0.0.1:0", &scene.path("missing/vm"), &[]).one_line(&["missing", "does not exist"]);
    receive("-", &scene.path("vm"), &[]).one_line(&["standard input", "use --one-way fd:0"]);
    receive("fd:77", &scene.path("vm"), &[]).one_line(&["fd:77", "no such descriptor"]);
    receive("file:/no/such/stream", &scene.path("vm"), &[]).one_line(&["/no/such/stream"]);
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = format!("tcp:{}", busy.local_addr().unwrap());
    receive(&port, &scene.path("vm"), &[]).one_line(&["cannot listen on ", &port, "in use", "choose another"]);
    let (sock, absent) = (scene.path("sock"), scene.path("absent/sock"));
    let _taken = std::os::unix::net::UnixListener::bind(&sock).unwrap();
    for (control, remedy) in [(&sock, "choose another"), (&absent, "the directory must exist")] {
        let ended = receive("tcp:127.0.0.1:0", &scene.path("vm"), &["--control", text(control)]);
        ended.one_line(&["--control: cannot listen on ", text(control), remedy]);
    }
    assert_eq!(receive("-", &scene.path("vm"), &["--json"]).status.code(), Some(2));
    assert_eq!(receive("pigeon:x", &scene.path("vm"), &[]).status.code(), Some(2));
    assert_eq!(receive("exec:", &scene.path("vm"), &[]).status.code(), Some(2));
    assert_eq!(std::fs::read(&taken).unwrap(), b"precious");
    assert!(!scene.path("vm").exists());
}
