//! The control socket as a program sees it while a job runs.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use limosa_control::{BoundControlSocket, CommandError, Commands, ControlSocket, JobKind};
use limosa_migrate::Handle;
use limosa_migrate::control::{MovedPages, Phase, Stop};
use serde_json::{Value, json};

struct Client {
    lines: BufReader<UnixStream>,
}

impl Client {
    fn connect(path: &std::path::Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Self { lines: BufReader::new(stream) }
    }

    fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or(Value::Null)
    }

    fn say(&mut self, command: &Value) -> Value {
        self.lines.get_mut().write_all(format!("{command}\n").as_bytes()).unwrap();
        loop {
            let heard = self.hear();
            if heard.get("event").is_none() {
                return heard;
            }
        }
    }
}

fn socket(job: JobKind) -> (tempfile::TempDir, ControlSocket, Handle, Client) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let handle = Handle::new();
    let socket = ControlSocket::listen(&path, job, &handle).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let mut client = Client::connect(&path);
    assert!(client.hear().get("QMP").is_some());
    assert_eq!(client.say(&json!({ "execute": "qmp_capabilities", "id": 1 })), json!({ "return": {}, "id": 1 }));
    (directory, socket, handle, client)
}

#[test]
fn progress_is_told_in_qemus_words() {
    let (_directory, _socket, handle, mut client) = socket(JobKind::Save);
    handle.progress.expect_pages(100);
    handle.progress.set_phase(Phase::Active);
    handle.progress.add_moved(MovedPages { normal: 30, zero: 20, resent: 10 });
    handle.progress.add_hinted(15);
    let report = client.say(&json!({ "execute": "query-migrate" }));
    assert_eq!(report["return"]["status"], "active");
    assert_eq!(report["return"]["ram"]["normal"], 30);
    assert_eq!(report["return"]["ram"]["hinted"], 15);
    assert_eq!(report["return"]["ram"]["remaining"], 45 * 4096);
}

#[test]
fn the_rate_changes_and_unknown_parameters_change_nothing() {
    let (_directory, _socket, handle, mut client) = socket(JobKind::Save);
    let set = |arguments: Value| json!({ "execute": "migrate-set-parameters", "arguments": arguments });
    assert_eq!(client.say(&set(json!({ "max-bandwidth": 1 << 20 }))), json!({ "return": {} }));
    assert_eq!(handle.control.max_bandwidth().map(|rate| rate.get()), Some(1 << 20));
    assert!(client.say(&set(json!({ "max-bandwidth": 0, "shoe-size": 43 }))).get("error").is_some());
    assert_eq!(handle.control.max_bandwidth().map(|rate| rate.get()), Some(1 << 20));
    client.say(&set(json!({ "max-bandwidth": 0 })));
    assert_eq!(handle.control.max_bandwidth(), None);
}

#[test]
fn the_downtime_of_a_live_migration_and_of_nothing_else_has_a_limit_that_changes() {
    let set = |limit: Value| json!({ "execute": "migrate-set-parameters", "arguments": { "downtime-limit": limit } });
    for job in [JobKind::Save, JobKind::Restore] {
        let (_directory, _socket, handle, mut client) = socket(job);
        assert!(client.say(&set(json!(40))).get("error").is_some());
        assert_eq!(handle.control.downtime_limit(), None);
    }
    let (_directory, _socket, handle, mut client) = socket(JobKind::Live);
    for wrong in [json!("soon"), json!(-1), json!(2_000_001)] {
        assert!(client.say(&set(wrong)).get("error").is_some());
    }
    assert_eq!(client.say(&set(json!(40))), json!({ "return": {} }));
    assert_eq!(handle.control.downtime_limit(), Some(Duration::from_millis(40)));
    let parameters = client.say(&json!({ "execute": "query-migrate-parameters" }));
    assert_eq!(parameters["return"], json!({ "max-bandwidth": 0, "downtime-limit": 40 }));
}

#[test]
fn a_job_can_be_cancelled_until_its_guest_runs_and_paused_from_then_on() {
    let (_directory, _socket, handle, mut client) = socket(JobKind::Restore);
    assert!(client.say(&json!({ "execute": "migrate-pause" })).get("error").is_some());
    handle.progress.set_phase(Phase::PostcopyActive);
    assert!(client.say(&json!({ "execute": "migrate_cancel" })).get("error").is_some());
    assert_eq!(handle.control.stop_requested(), None);
    client.say(&json!({ "execute": "migrate-pause" }));
    assert_eq!(handle.control.stop_requested(), Some(Stop::Pause));

    let (_directory, _socket, handle, mut client) = socket(JobKind::Save);
    client.say(&json!({ "execute": "migrate_cancel" }));
    assert_eq!(handle.control.stop_requested(), Some(Stop::Cancel));
}

#[test]
fn phases_are_announced_and_the_end_of_the_job_ends_the_conversation() {
    let (directory, socket, handle, mut client) = socket(JobKind::Save);
    handle.progress.set_phase(Phase::Active);
    let event = client.hear();
    assert_eq!((&event["event"], &event["data"]["status"]), (&json!("MIGRATION"), &json!("active")));
    handle.progress.set_phase(Phase::Completed);
    drop(socket);
    assert_eq!(client.hear()["data"]["status"], "completed");
    assert_eq!(client.hear(), Value::Null);
    assert!(!directory.path().join("control").exists());
}

#[test]
fn nothing_is_announced_to_a_client_before_it_has_negotiated() {
    let (directory, _socket, handle, mut listener) = socket(JobKind::Save);
    let mut newcomers: Vec<Client> = (0..4).map(|_| Client::connect(&directory.path().join("control"))).collect();
    handle.progress.set_phase(Phase::Active);
    assert_eq!(listener.hear()["data"]["status"], "active");
    for newcomer in &mut newcomers {
        assert!(newcomer.hear().get("QMP").is_some());
        newcomer.lines.get_mut().write_all(b"{\"execute\": \"qmp_capabilities\"}\n").unwrap();
        assert_eq!(newcomer.hear(), json!({ "return": {} }));
    }
    handle.progress.set_phase(Phase::Completing);
    assert!(newcomers.iter_mut().all(|newcomer| newcomer.hear()["data"]["status"] == "device"));
}

#[test]
fn nonsense_is_answered_and_too_much_of_it_hung_up_on() {
    let (directory, _socket, _handle, mut client) = socket(JobKind::Save);
    for nonsense in [json!({}), json!([]), json!("x"), json!({ "execute": 3 })] {
        assert!(client.say(&nonsense).get("error").is_some());
    }
    assert_eq!(client.say(&json!({ "execute": "no-such", "id": "a" }))["error"]["class"], "CommandNotFound");
    let mut long = Client::connect(&directory.path().join("control"));
    long.hear();
    let line = vec![b'x'; 100 << 10];
    let _ = long.lines.get_mut().write_all(&line);
    assert!(long.hear().get("error").is_some());
    let crowd: Vec<_> = (0..20).map(|_| UnixStream::connect(directory.path().join("control")).unwrap()).collect();
    assert!(client.say(&json!({ "execute": "query-migrate" })).get("return").is_some());
    drop(crowd);
}

/// A VMM with one command of its own, and a word about how its last job ended.
struct Vmm;

impl Commands for Vmm {
    fn execute(&self, name: &str, arguments: &Value) -> Option<Result<Value, CommandError>> {
        match name {
            "query-status" => Some(Ok(json!({ "status": "running", "heard": arguments["word"] }))),
            "cont" => Some(Err("it runs".into())),
            _ => None,
        }
    }

    fn amend_query_migrate(&self, answer: &mut serde_json::Map<String, Value>) {
        answer.insert("error-desc".into(), "the network was cut".into());
    }
}

#[test]
fn a_vmm_adds_commands_and_has_one_job_after_another() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let socket = ControlSocket::listen_without_job(&path, Arc::new(Vmm)).unwrap();
    let mut client = Client::connect(&path);
    client.hear();
    client.say(&json!({ "execute": "qmp_capabilities" }));
    let report = client.say(&json!({ "execute": "query-status", "arguments": { "word": 3 } }));
    assert_eq!(report, json!({ "return": { "status": "running", "heard": 3 } }));
    assert_eq!(client.say(&json!({ "execute": "cont" }))["error"]["desc"], "it runs");
    let report = client.say(&json!({ "execute": "query-migrate" }));
    assert_eq!(report, json!({ "return": { "error-desc": "the network was cut" } }));
    assert!(client.say(&json!({ "execute": "migrate-pause" })).get("error").is_some());
    assert_eq!(client.say(&json!({ "execute": "no-such" }))["error"]["class"], "CommandNotFound");

    for phase in [Phase::Active, Phase::Device] {
        let handle = Handle::new();
        handle.progress.set_phase(phase);
        socket.set_job(JobKind::Restore, &handle);
        let status = if phase == Phase::Active { "active" } else { "device" };
        assert_eq!(client.say(&json!({ "execute": "query-migrate" }))["return"]["status"], status);
        client.say(&json!({ "execute": "migrate_cancel" }));
        assert_eq!(handle.control.stop_requested(), Some(Stop::Cancel));
    }
    socket.emit("STOP", &json!({}));
    let stopped = std::iter::repeat_with(|| client.hear()).find(|heard| heard["event"] != "MIGRATION").unwrap();
    assert_eq!(stopped["event"], "STOP");
}

#[test]
fn a_client_that_connects_before_the_socket_is_served_is_answered_then() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let bound = BoundControlSocket::bind(&path).unwrap();
    let mut client = Client::connect(&path);
    let socket = bound.serve(Arc::new(Vmm)).unwrap();
    assert!(client.hear().get("QMP").is_some());
    assert_eq!(client.say(&json!({ "execute": "query-status" }))["return"]["status"], "running");
    drop(socket);
    assert!(!path.exists());
}

#[test]
fn the_socket_of_another_job_that_took_its_place_is_left_alone() {
    let (directory, first, handle, _client) = socket(JobKind::Save);
    let path = directory.path().join("control");
    std::fs::rename(&path, directory.path().join("away")).unwrap();
    let _second = ControlSocket::listen(&path, JobKind::Save, &handle).unwrap();
    drop(first);
    assert!(Client::connect(&path).hear().get("QMP").is_some());
}

/// A VMM that quits on request.
struct Quits(mpsc::Sender<()>);

impl Commands for Quits {
    fn execute(&self, name: &str, _: &Value) -> Option<Result<Value, CommandError>> {
        (name == "quit").then(|| {
            self.0.send(()).unwrap();
            // The VMM is faster.
            std::thread::sleep(Duration::from_millis(100));
            Ok(json!({}))
        })
    }
}

#[test]
fn a_command_that_ends_the_vmm_is_answered() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let (quit, quits) = mpsc::channel();
    let socket = ControlSocket::listen_without_job(&path, Arc::new(Quits(quit))).unwrap();
    let (mut client, mut idle) = (Client::connect(&path), Client::connect(&path));
    assert!(client.hear().get("QMP").is_some() && idle.hear().get("QMP").is_some());
    let ends = std::thread::spawn(move || {
        quits.recv().unwrap();
        drop(socket);
    });
    assert_eq!(client.say(&json!({ "execute": "quit" })), json!({ "return": {} }));
    assert_eq!((client.hear(), idle.hear()), (Value::Null, Value::Null), "both are hung up on");
    ends.join().unwrap();
}
