//! The QMP client against servers that behave badly in ways a QEMU only rarely does.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;
use std::time::Duration;

use limosa_qemu::qmp::{MonitorAddress, Options, Qmp, QmpError, Version};
use serde_json::{Value, json};

const GREETING: &str =
    r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": ""}, "capabilities": []}}"#;

/// A server's end: lines in, lines out.
struct Server {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Server {
    fn say(&mut self, text: &str) {
        // In one piece: the client may be gone as soon as it has the last brace.
        self.writer.write_all(format!("{text}\r\n").as_bytes()).unwrap();
    }

    fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or(Value::Null)
    }

    /// Takes the negotiation.
    fn begin(&mut self) {
        self.say(GREETING);
        let command = self.hear();
        assert_eq!(command["execute"], "qmp_capabilities");
        self.say(&json!({ "return": {}, "id": command["id"] }).to_string());
    }
}

/// Runs a script as the server and connects to it.
fn against(
    options: &Options,
    script: impl FnOnce(&mut Server) + Send + 'static,
) -> (Result<Qmp, QmpError>, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || {
        script(&mut Server { reader: BufReader::new(theirs.try_clone().unwrap()), writer: theirs });
    });
    (Qmp::from_socket(ours.into(), "unix:/test", options), server)
}

fn impatient() -> Options {
    Options { greeting_timeout: Duration::from_millis(200), ..Options::default() }
}

#[test]
fn two_commands_sent_as_one_have_both_arrived_before_the_first_is_answered() {
    let (qmp, server) = against(&impatient(), |server| {
        server.begin();
        let (first, second) = (server.hear(), server.hear());
        assert_eq!((&first["execute"], &second["execute"]), (&json!("migrate"), &json!("migrate-start-postcopy")));
        server.say(&json!({ "error": { "class": "GenericError", "desc": "too late" }, "id": first["id"] }).to_string());
        server.say(&json!({ "return": 2, "id": second["id"] }).to_string());
        let (first, second) = (server.hear(), server.hear());
        server.say(&json!({ "return": 3, "id": first["id"] }).to_string());
        server.say(&json!({ "return": 4, "id": second["id"] }).to_string());
    });
    let qmp = qmp.unwrap();
    let both =
        || qmp.execute_all([("migrate", json!({ "uri": "x" })), ("migrate-start-postcopy", Value::Null)]).unwrap();
    let [first, second] = both();
    assert_eq!((first.unwrap_err().desc(), second.unwrap()), (Some("too late"), json!(2)));
    assert_eq!(both().map(Result::unwrap), [json!(3), json!(4)]);
    server.join().unwrap();
}

#[test]
fn an_event_is_found_by_its_data_and_the_others_stay() {
    let (qmp, server) = against(&impatient(), |server| {
        server.begin();
        for status in ["setup", "active", "completed"] {
            server.say(&json!({ "event": "MIGRATION", "data": { "status": status } }).to_string());
        }
    });
    let qmp = qmp.unwrap();
    let found = qmp.wait_event_where(|event| event.data["status"] == "completed", Duration::from_secs(10)).unwrap();
    assert_eq!(found.unwrap().sequence, 2);
    let left: Vec<_> = qmp.take_events().unwrap().into_iter().map(|event| event.sequence).collect();
    assert_eq!(left, [0, 1]);
    server.join().unwrap();
}

#[test]
fn a_monitor_that_does_not_greet_is_held_by_another_client() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let _listener = UnixListener::bind(&path).unwrap();
    let error = Qmp::connect(&MonitorAddress::Unix(path.clone()), &impatient()).unwrap_err();
    assert!(matches!(error, QmpError::Busy { .. }));
    let text = error.to_string();
    assert!(text.contains("another client holds this monitor") && text.contains(path.to_str().unwrap()), "{text}");
}

#[test]
fn a_socket_that_is_not_there_or_not_served_is_distinguished_from_a_busy_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let connect = || Qmp::connect(&MonitorAddress::Unix(path.clone()), &impatient()).unwrap_err();
    assert!(matches!(connect(), QmpError::Connect { .. }));
    drop(UnixListener::bind(&path).unwrap());
    assert!(matches!(connect(), QmpError::Connect { .. }));
}

#[test]
fn a_path_longer_than_a_socket_address_is_reached_all_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let long = directory.path().join("d".repeat(150));
    std::fs::create_dir(&long).unwrap();
    let listener = {
        // Bound under a short name and moved, since binding has the same limit.
        let short = directory.path().join("s");
        let listener = UnixListener::bind(&short).unwrap();
        std::fs::rename(short, long.join("qmp")).unwrap();
        listener
    };
    let server = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        Server { reader: BufReader::new(stream.try_clone().unwrap()), writer: stream }.begin();
    });
    let qmp = Qmp::connect(&MonitorAddress::Unix(long.join("qmp")), &Options::default()).unwrap();
    assert_eq!(qmp.version(), Version::new(10, 0, 2));
    assert_eq!(qmp.process(), Some(std::process::id()));
    server.join().unwrap();
}

#[test]
fn a_human_monitor_is_recognized_as_such() {
    let (result, server) = against(&Options::default(), |server| {
        server.say("QEMU 10.0.2 monitor - type 'help' for more information");
    });
    let error = result.unwrap_err();
    assert!(matches!(error, QmpError::NotQmp { .. }), "{error}");
    server.join().unwrap();
}

#[test]
fn a_server_that_hangs_up_is_closed_and_names_the_command() {
    let (result, server) = against(&Options::default(), |server| {
        server.begin();
        server.hear();
    });
    let error = result.unwrap().execute("query-status", Value::Null).unwrap_err();
    assert!(error.is_gone() && error.to_string().contains("query-status"), "{error}");
    server.join().unwrap();
}

#[test]
fn what_a_server_said_last_is_still_read_when_a_command_finds_it_gone() {
    let (result, server) = against(&Options::default(), |server| {
        server.begin();
        server.say(r#"{"event": "SHUTDOWN"}"#);
    });
    let qmp = result.unwrap();
    server.join().unwrap();
    assert!(qmp.execute("query-status", Value::Null).unwrap_err().is_gone());
    assert_eq!(qmp.wait_event(&["SHUTDOWN"], Duration::ZERO).unwrap().unwrap().name, "SHUTDOWN");
}

#[test]
fn nothing_is_asked_of_a_qemu_that_has_said_that_it_ends() {
    for (reason, asks) in [("host-signal", false), ("host-qmp-quit", false), ("guest-shutdown", true)] {
        let (result, server) = against(&Options::default(), move |server| {
            server.begin();
            server.say(&json!({ "event": "SHUTDOWN", "data": { "guest": asks, "reason": reason } }).to_string());
            let command = server.hear();
            // With -no-shutdown QEMU stays after a guest's shutdown.
            assert_eq!(!command.is_null(), asks, "{reason}: {command}");
            if asks {
                server.say(&json!({ "return": {}, "id": command["id"] }).to_string());
            }
        });
        let qmp = result.unwrap();
        let answer = loop {
            // What has not come yet cannot be heeded.
            if let Some(event) = qmp.wait_event(&["SHUTDOWN"], Duration::from_secs(20)).unwrap() {
                assert_eq!(event.data["reason"], reason);
                break qmp.execute("query-migrate", Value::Null);
            }
        };
        match answer {
            Ok(_) => assert!(asks),
            Err(error) => assert!(!asks && error.is_gone() && error.to_string().contains("query-migrate"), "{error}"),
        }
        drop(qmp);
        server.join().unwrap();
    }
}

#[test]
fn while_a_qemu_is_held_commands_under_way_are_answered_and_new_ones_wait_for_what_becomes_of_it() {
    const SOON: Duration = Duration::from_millis(300);
    for ends in [false, true] {
        let (go, gone) = std::sync::mpsc::channel();
        let (result, server) = against(&Options::default(), move |server| {
            server.begin();
            let first = server.hear();
            gone.recv().unwrap();
            server.say(&json!({ "return": 1, "id": first["id"] }).to_string());
            if ends {
                server.say(r#"{"event": "SHUTDOWN", "data": {"guest": false, "reason": "host-signal"}}"#);
            }
            let second = server.hear();
            assert_eq!(second.is_null(), ends, "{second}");
            if !ends {
                server.say(&json!({ "return": 2, "id": second["id"] }).to_string());
            }
        });
        let qmp = result.unwrap();
        std::thread::scope(|scope| {
            let first = qmp.send_command("query-status", Value::Null).unwrap();
            let begun = std::time::Instant::now();
            // Nothing answers yet, and that is not waited for beyond what is allowed.
            qmp.quiesce(Duration::from_secs(60), Duration::ZERO);
            go.send(()).unwrap();
            let until = if ends { Duration::from_secs(60) } else { SOON };
            qmp.quiesce(until, Duration::from_secs(60));
            assert_eq!(qmp.wait(&first, Duration::ZERO).unwrap(), Some(json!(1)), "it was waited for");
            let second = scope.spawn(|| qmp.execute("query-migrate", Value::Null));
            let second = second.join().unwrap();
            match second {
                Ok(value) => assert!(!ends && value == json!(2) && begun.elapsed() >= SOON),
                Err(error) => assert!(ends && matches!(error, QmpError::Ending { .. }), "{error}"),
            }
        });
        drop(qmp);
        server.join().unwrap();
    }
}

#[test]
fn an_error_carries_class_description_and_command() {
    let (result, server) = against(&Options::default(), |server| {
        server.begin();
        let command = server.hear();
        let error = json!({ "class": "CommandNotFound", "desc": "no such thing", "extra": 1 });
        server.say(&json!({ "id": command["id"], "error": error }).to_string());
    });
    let error = result.unwrap().execute("frobnicate", Value::Null).unwrap_err();
    assert!(error.is_unknown_command() && error.is_refusal());
    assert_eq!(error.desc(), Some("no such thing"));
    assert!(error.to_string().contains("frobnicate"));
    server.join().unwrap();
}

#[test]
fn a_late_answer_is_not_mistaken_for_the_next_one() {
    let (result, server) = against(&Options::default(), |server| {
        server.begin();
        let (first, second) = (server.hear(), server.hear());
        server.say(&json!({ "return": "late", "id": first["id"] }).to_string());
        server.say(&json!({ "return": "right", "id": second["id"] }).to_string());
    });
    let qmp = result.unwrap();
    let error = qmp.execute_within("first", Value::Null, Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, QmpError::NoReply { .. }), "{error}");
    assert_eq!(qmp.execute("second", Value::Null).unwrap(), "right");
    server.join().unwrap();
}

#[test]
fn a_qemu_that_may_not_answer_any_more_is_waited_for_no_longer_than_was_said() {
    let (result, server) = against(&Options::default(), |server| {
        server.begin();
        server.hear();
        server.hear();
    });
    let qmp = result.unwrap();
    qmp.limit_replies(Duration::from_millis(50));
    // A longer one does not lift it.
    qmp.limit_replies(Duration::from_secs(60));
    let error = qmp.execute("first", Value::Null).unwrap_err();
    assert!(matches!(error, QmpError::NoReply { waited, .. } if waited < Duration::from_secs(60)), "{error}");
    qmp.send_command("last", Value::Null).unwrap();
    server.join().unwrap();
}

#[test]
fn answers_in_any_order_find_their_commands() {
    let (result, server) = against(&Options::default(), |server| {
        server.begin();
        let (first, second) = (server.hear(), server.hear());
        server.say(&json!({ "return": 2, "id": second["id"] }).to_string());
        server.say(&json!({ "return": 1, "id": first["id"] }).to_string());
    });
    let qmp = result.unwrap();
    let (first, second) = (qmp.send_command("a", Value::Null).unwrap(), qmp.send_command("b", json!({})).unwrap());
    assert_eq!(qmp.wait(&first, Duration::from_secs(60)).unwrap(), Some(json!(1)));
    assert_eq!(qmp.wait(&second, Duration::ZERO).unwrap(), Some(json!(2)));
    server.join().unwrap();
}

#[test]
fn events_keep_their_order_while_commands_go_on_in_another_thread() {
    const COMMANDS: u64 = 200;
    let (result, server) = against(&Options::default(), |server| {
        server.begin();
        for number in 0..COMMANDS {
            let command = server.hear();
            let event = json!({ "event": "TICK", "data": number, "timestamp": { "seconds": 1, "microseconds": 2 } });
            server.say(&event.to_string());
            server.say(&json!({ "return": number, "id": command["id"] }).to_string());
        }
    });
    let qmp = result.unwrap();
    std::thread::scope(|scope| {
        let events = scope.spawn(|| {
            for number in 0..COMMANDS {
                let event = qmp.wait_event(&["TICK"], Duration::from_secs(60)).unwrap().unwrap();
                assert_eq!((event.sequence, event.data), (number, json!(number)));
            }
        });
        for number in 0..COMMANDS {
            assert_eq!(qmp.execute("count", Value::Null).unwrap(), number);
        }
        events.join().unwrap();
    });
    assert_eq!(qmp.events_lost(), 0);
    server.join().unwrap();
}

#[test]
fn waiting_for_one_event_leaves_the_others_in_place() {
    let (result, server) = against(&Options::default(), |server| {
        server.begin();
        for name in ["A", "B", "C", "B"] {
            server.say(&json!({ "event": name }).to_string());
        }
    });
    let qmp = result.unwrap();
    assert_eq!(qmp.wait_event(&["B"], Duration::from_secs(60)).unwrap().unwrap().sequence, 1);
    server.join().unwrap();
    let names: Vec<String> = qmp.take_events().unwrap().into_iter().map(|event| event.name).collect();
    assert_eq!(names, ["A", "C", "B"]);
    assert!(qmp.take_events().unwrap_err().is_gone(), "nothing is left and the server is gone");
}

#[test]
fn a_message_past_the_limit_ends_the_connection_instead_of_filling_memory() {
    let options = Options { message_limit: 4096, ..Options::default() };
    let (result, server) = against(&options, |server| {
        server.begin();
        server.hear();
        drop(server.writer.write_all(&vec![b'{'; 100_000]));
    });
    let qmp = result.unwrap();
    let error = qmp.execute("query-status", Value::Null).unwrap_err();
    assert!(matches!(error, QmpError::TooLong { limit: 4096, .. }), "{error}");
    drop(qmp);
    server.join().unwrap();
}

#[test]
fn nonsense_in_the_stream_is_reported_with_its_beginning() {
    for nonsense in ["oops", "{\"return\": nonsense}", "{\"a\": \"\u{1}"] {
        let (result, server) = against(&Options::default(), move |server| {
            server.begin();
            server.hear();
            server.say(nonsense);
        });
        let error = result.unwrap().execute("query-status", Value::Null).unwrap_err();
        assert!(matches!(error, QmpError::Garbage { .. }), "{nonsense}: {error}");
        server.join().unwrap();
    }
}

#[test]
fn a_tcp_monitor_refuses_descriptors_with_a_reason() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        writeln!(stream, "{GREETING}").unwrap();
        let mut line = String::new();
        BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
        let command: Value = serde_json::from_str(&line).unwrap();
        writeln!(stream, "{}", json!({ "return": {}, "id": command["id"] })).unwrap();
    });
    let qmp = Qmp::connect(&format!("tcp:127.0.0.1:{port}").parse().unwrap(), &Options::default()).unwrap();
    assert!(!qmp.passes_descriptors());
    let stdin = std::io::stdin();
    let error = qmp.execute_with_descriptors("getfd", json!({ "fdname": "x" }), &[stdin.as_fd()]).unwrap_err();
    assert!(matches!(error, QmpError::NoDescriptors { .. }), "{error}");
    assert!(error.to_string().contains("getfd") && error.to_string().contains("unix socket"));
    server.join().unwrap();
}

#[test]
fn an_adopted_connection_skips_what_was_meant_for_another() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || {
        let mut server = Server { reader: BufReader::new(theirs.try_clone().unwrap()), writer: theirs };
        server.say(r#"status": "running"}, "id": 41}"#);
        server.say(r#"{"event": "STOP", "timestamp": {"seconds": 1, "microseconds": 0}}"#);
        server.say(r#"{"return": "not yours", "id": 42}"#);
        let mut flush = Vec::new();
        server.reader.read_until(b'\n', &mut flush).unwrap();
        assert_eq!(flush, b"\xff\n");
        server.say(r#"{"error": {"class": "GenericError", "desc": "JSON parse error"}}"#);
        let command = server.hear();
        assert_eq!(command["execute"], "query-version");
        let version = json!({ "qemu": { "major": 10, "minor": 0, "micro": 2 }, "package": "p" });
        server.say(&json!({ "return": version, "id": command["id"] }).to_string());
    });
    let qmp = Qmp::adopt(ours.into(), "unix:/test", &Options::default()).unwrap();
    assert_eq!(qmp.version(), Version::new(10, 0, 2));
    assert_eq!(qmp.wait_event(&["STOP"], Duration::ZERO).unwrap().unwrap().name, "STOP");
    server.join().unwrap();
}

#[test]
fn a_guest_agents_socket_at_which_another_process_listens_is_not_written_to() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qga");
    let listener = UnixListener::bind(&path).unwrap();
    let description = format!("disconnected:unix:{},server=on", path.display());
    let clock_of = |process: Option<u32>| {
        let description = description.clone();
        let (qmp, server) = against(&impatient(), move |server| {
            server.begin();
            loop {
                let command = server.hear();
                let arguments = &command["arguments"];
                let answer = match (command["execute"].as_str(), arguments["property"].as_str()) {
                    (Some("qom-list"), _) => json!([{ "name": "port", "type": "child<virtserialport>" }]),
                    (Some("qom-get"), Some("name")) => json!("org.qemu.guest_agent.0"),
                    (Some("qom-get"), _) => json!("agent"),
                    (Some(_), _) => json!([{ "label": "agent", "frontend-open": true, "filename": description }]),
                    (None, _) => break,
                };
                server.say(&json!({ "return": answer, "id": command["id"] }).to_string());
            }
        });
        let qmp = qmp.unwrap();
        let qmp = if let Some(process) = process { qmp.with_process(process) } else { qmp };
        let monitor = limosa_qemu::monitor::Monitor::new(qmp);
        let clock = limosa_qemu::GuestClock::begin(&monitor);
        drop(monitor);
        server.join().unwrap();
        clock
    };
    // This process listens, and process 1 is said to be the QEMU.
    let other = clock_of(Some(1));
    let (mut agent, _) = listener.accept().unwrap();
    assert_eq!(std::io::Read::read(&mut agent, &mut [0; 1]).unwrap(), 0);
    assert!(matches!(other.finish(), Err(limosa_qemu::GuestAgentError::OtherProcess { .. })));
    for process in [Some(std::process::id()), None] {
        let own = clock_of(process);
        let (mut agent, _) = listener.accept().unwrap();
        let mut first = [0; 1];
        std::io::Read::read_exact(&mut agent, &mut first).unwrap();
        assert_eq!(first, [0xff]);
        drop(agent);
        assert!(matches!(own.finish(), Err(limosa_qemu::GuestAgentError::Closed { .. })));
    }
}
