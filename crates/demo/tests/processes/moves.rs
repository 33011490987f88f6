//! `limosa-demo live`, run as people run it.

use std::ffi::OsStr;
use std::process::Command;
use std::time::Duration;

use limosa_testkit::{Authority, Ended, Program, Qmp, kill9, scratch, wait_for, wait_gone};
use serde_json::{Value, json};

/// For what should take moments on any machine: a limit for the stuck, not a measure.
const SOON: Duration = Duration::from_secs(120);

/// Starts limosa-demo with these arguments.
fn start<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Program {
    let mut command = Command::new(env!("CARGO_BIN_EXE_limosa-demo"));
    command.args(arguments);
    Program::start("limosa-demo", command)
}

/// Runs limosa-demo to its end.
fn demo<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Ended {
    start(arguments).wait()
}

/// Runs a demonstration of a small guest: what it prints for programs.
#[track_caller]
fn live(more: &[&str]) -> (Value, Ended) {
    let arguments = [&["live", "--memory", "16M", "--json"], more].concat();
    let ended = demo(arguments).success();
    let report = serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    (report, ended)
}

#[track_caller]
fn assert_moved(report: &Value, writes: bool) {
    assert_eq!(report["runs_at"], "destination", "{report}");
    assert_eq!(report["source"]["outcome"], "completed");
    assert_eq!(report["memory"]["error"], Value::Null);
    let pages = report["settings"]["memory"].as_u64().map(|bytes| bytes / 4096);
    assert_eq!(report["memory"]["pages"].as_u64(), pages);
    assert_eq!(report["writes"][1].as_u64() > report["writes"][0].as_u64(), writes, "it goes on: {report}");
    assert!(report["stood_ms"].as_f64().is_some_and(|stood| stood > 0.0));
}

#[test]
fn a_guest_moves_while_it_runs_over_tcp_and_unix_sockets_with_either_log() {
    for more in [
        &[][..],
        &["--transport", "unix", "--channels", "2"],
        &["--channels", "3", "--compression", "zstd", "--log", "wp-thread"],
        &["--dirty-rate", "0", "--zero-method", "plain"],
        &["--transport", "unix", "--same-host", "--populate", "off"],
    ] {
        let (report, ended) = live(more);
        assert_moved(&report, !more.contains(&"0"));
        assert!(ended.stderr.contains("downtime: ") && ended.stderr.contains("paused"), "{}", ended.stderr);
    }
}

#[test]
fn a_guest_that_tells_its_free_pages_moves_without_them() {
    for more in [&[][..], &["--hint-wait", "1s"], &["--channels", "2"], &["--postcopy", "after-rounds=1"]] {
        let (report, ended) = live(&[&["--hints", "on", "--max-bandwidth", "50M"], more].concat());
        assert_eq!(report["runs_at"], "destination", "{report}");
        let source = &report["source"];
        assert_eq!((&source["outcome"], &report["memory"]["error"]), (&json!("completed"), &Value::Null));
        let count = |value: &Value| value.as_u64().unwrap();
        let hinted: u64 = source["rounds"].as_array().unwrap().iter().map(|round| count(&round["hinted"])).sum();
        let ranges = count(&source["hints"]["ranges"]);
        assert!(hinted > 0 && source["hints"]["refused"].is_null(), "{report}");
        // Pieces of 64 pages: none of them was sent before the list came, if that was waited for.
        assert!(hinted <= 64 * ranges && (hinted == 64 * ranges || !more.contains(&"1s")), "{report}");
        let memory = &report["memory"];
        assert_eq!(count(&memory["pages"]) + count(&memory["free_pages"]), 4096, "nothing is held back: {memory}");
        assert!(ended.stderr.contains("pages were free, and not sent"), "{}", ended.stderr);
    }
    for (wrong, said) in [
        (&["--hint-wait", "1s", "--hints", "off"][..], "--hint-wait needs --hints on"),
        (&["--hints", "on", "--postcopy", "at-once"], "the guest stops before it can list its free pages"),
        (&["--hints", "on", "--same-host", "--transport", "unix"], "--same-host cannot be combined with --hints"),
    ] {
        let ended = demo([&["live"][..], wrong].concat());
        assert_eq!(ended.status.code(), Some(2), "{}", ended.stderr);
        assert!(ended.stderr.contains(said), "{}", ended.stderr);
    }
}

#[test]
fn pages_leave_in_the_way_that_is_named_and_the_guest_is_whole() {
    for (way, transport, figure) in [
        ("off", "tcp", None),
        ("auto", "unix", Some("spliced")),
        ("splice", "tcp", Some("spliced")),
        ("msg", "tcp", Some("lent")),
    ] {
        let (report, ended) = live(&["--zero-copy", way, "--transport", transport, "--channels", "2"]);
        assert_moved(&report, true);
        for name in ["spliced", "lent"] {
            let counted = report["source"]["channels"][name].as_u64().unwrap();
            assert_eq!(counted != 0, figure == Some(name), "{way} over {transport}: {}", ended.stderr);
        }
    }
}

#[test]
fn pages_gathered_and_copied_are_the_same_guest_for_fewer_calls() {
    let [gathered, copied] = ["on", "off"].map(|vectors| {
        let (report, _) = live(&["--vectors", vectors, "--dirty-rate", "0"]);
        assert_moved(&report, false);
        report["source"]["channels"]["calls_out"].as_u64().unwrap()
    });
    assert!(copied > 10 * gathered, "{copied} calls, {gathered} gathered");
}

#[test]
fn a_guest_runs_ahead_of_its_pages_and_gets_them_all() {
    for more in [
        &["--postcopy", "at-once"][..],
        &["--postcopy", "after-rounds=1", "--preempt"],
        &["--dirty-rate", "200M", "--max-bandwidth", "8M", "--timeout", "300ms", "--give-up", "postcopy"],
    ] {
        let (report, ended) = live(more);
        assert_moved(&report, true);
        assert!(report["source"]["postcopy"]["pages"].as_u64().is_some_and(|pages| pages > 0), "{report}");
        assert!(ended.stderr.contains("pages followed while it ran there"), "{}", ended.stderr);
    }
}

#[test]
fn a_guest_moves_over_tls_on_every_kind_of_channel() {
    let folder = scratch().unwrap();
    Authority::new().unwrap().equip(folder.path()).unwrap();
    let creds = ["--tls-creds", folder.path().to_str().unwrap()];
    for more in [
        &[][..],
        &["--channels", "3", "--compression", "zstd"],
        &["--transport", "unix", "--tls-hostname", "localhost", "--channels", "2", "--zero-copy", "auto"],
        &["--postcopy", "at-once"],
        &["--postcopy", "after-rounds=1", "--preempt"],
    ] {
        let (report, _) = live(&[&creds, more].concat());
        assert_moved(&report, true);
        // Encrypted bytes are other ones, in another buffer.
        let channels = &report["source"]["channels"];
        assert_eq!((&channels["lent"], &channels["spliced"]), (&json!(0), &json!(0)), "{channels}");
    }
    for (wrong, said) in [
        (&["--transport", "unix", "--same-host"][..], "--same-host cannot be combined with --tls-creds"),
        (&["--transport", "unix"], "--tls-hostname"),
        (
            &["--channels", "2", "--zero-copy", "msg"],
            "cannot be combined with --tls-creds: they send pages unencrypted",
        ),
        (
            &["--channels", "2", "--zero-copy", "splice"],
            "cannot be combined with --tls-creds: they send pages unencrypted",
        ),
    ] {
        let ended = demo([&["live"][..], &creds, wrong].concat());
        assert_eq!(ended.status.code(), Some(2), "{}", ended.stderr);
        assert!(ended.stderr.contains(said), "{}", ended.stderr);
    }
    // The guest stays where it is, and the reason is reported.
    let ended = demo([&["live", "--memory", "16M", "--tls-hostname", "other.example"][..], &creds].concat());
    assert!(!ended.status.success());
    let said = "its certificate is for localhost, 127.0.0.1, 0::1, not for other.example";
    assert!(
        ended.stderr.contains("the guest continues at the source") && ended.stderr.contains(said),
        "{}",
        ended.stderr
    );
    std::fs::remove_file(folder.path().join("server-key.pem")).unwrap();
    demo([&["live"][..], &creds].concat()).one_line(&["server-key.pem"]);
}

#[test]
fn a_guest_under_kvm_moves_with_either_of_its_logs() {
    if limosa_testkit::skipped("LIMOSA_SKIP_KVM") {
        return;
    }
    for log in ["kvm-log", "kvm-ring"] {
        let (report, _) = live(&["--guest", "kvm", "--log", log, "--dirty-rate", "10M"]);
        assert_moved(&report, true);
    }
}

#[test]
fn what_this_machine_cannot_do_is_said_once() {
    // More than any process has addresses for.
    demo(["live", "--memory", "1000T"]).one_line(&["RAM block", "Cannot allocate memory"]);
}

#[test]
fn the_rounds_are_drawn() {
    let folder = scratch().unwrap();
    let path = folder.path().join("rounds.svg");
    let (report, _) = live(&["--write-trace", path.to_str().unwrap()]);
    let svg = std::fs::read_to_string(path).unwrap();
    assert!(svg.starts_with("<svg ") && svg.contains("paused for"), "{svg}");
    let rounds = report["source"]["rounds"].as_array().unwrap().len();
    let areas = svg.matches(r##"<polygon opacity="0.2" fill="#2F83C5""##).count();
    assert_eq!(areas, rounds, "an area for each round: {svg}");
}

#[test]
fn a_guest_that_writes_faster_than_it_is_sent_goes_on_at_the_source_and_the_exit_status_tells() {
    let fast = ["--dirty-rate", "200M", "--max-bandwidth", "4M", "--downtime-limit", "1ms", "--timeout", "500ms"];
    let ended = demo([&["live", "--memory", "16M", "--json"][..], &fast].concat());
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&report["runs_at"], &report["memory"]["error"]), (&"source".into(), &Value::Null), "{report}");
    assert!(ended.stderr.contains("continues at the source") && ended.stderr.contains("converge"), "{}", ended.stderr);
}

/// A demonstration that can never end by itself, and the monitor of its source once it sends.
fn endless() -> (tempfile::TempDir, Program, Qmp) {
    let folder = scratch().unwrap();
    let control = folder.path().join("source");
    let slow = ["--memory", "64M", "--dirty-rate", "40M", "--max-bandwidth", "8M", "--downtime-limit", "1ms"];
    let socket = control.display().to_string();
    let running = start([&["live", "--json", "--control", &socket][..], &slow].concat());
    let mut source = wait_for("the source", || Qmp::connect(&control, SOON).ok());
    wait_for("pages", || {
        let output = source.execute("query-migrate", json!({})).unwrap();
        (output["ram"]["transferred"].as_u64() > Some(0)).then_some(())
    });
    (folder, running, source)
}

#[test]
fn a_migration_is_watched_and_steered_by_its_control_sockets() {
    let (folder, running, mut source) = endless();
    let status = source.execute("query-status", json!({})).unwrap();
    assert_eq!((&status["status"], &status["state"]), (&json!("running"), &json!("sending")), "{status}");
    let socket = folder.path().join("source.destination").display().to_string();
    let there = demo(["status", "--control", &socket, "--json"]).success();
    assert!(there.stderr.contains("the guest does not run here (inmigrate)"), "{}", there.stderr);
    assert!(source.execute("cont", json!({})).is_err(), "it is being sent");
    // Without the limits it completes.
    let limits = json!({ "max-bandwidth": 0, "downtime-limit": 2000 });
    source.execute("migrate-set-parameters", limits).unwrap();
    let report: Value = serde_json::from_str(&running.wait().success().stdout).unwrap();
    assert_moved(&report, true);
}

#[test]
fn a_cancelled_migration_leaves_the_guest_where_it_is() {
    let (_folder, running, mut source) = endless();
    source.execute("migrate_cancel", json!({})).unwrap();
    let ended = running.wait();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&report["runs_at"], &report["memory"]["error"]), (&json!("source"), &Value::Null), "{report}");
}

#[test]
fn a_guest_that_ends_with_its_process_ends_the_demonstration_in_one_line() {
    let (_folder, running, mut source) = endless();
    let children = format!("/proc/{0}/task/{0}/children", running.pid());
    let children = std::fs::read_to_string(children).unwrap();
    let first = children.split_whitespace().next().expect("the source is started first");
    let first = first.parse().unwrap();
    kill9(first).unwrap();
    // Until then one of its threads may still answer.
    wait_gone(first);
    assert!(source.execute("query-status", json!({})).is_err());
    let ended = running.wait();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(ended.stderr.contains("it ended with the process of the source"), "{}", ended.stderr);
}

#[test]
fn what_does_not_go_together_is_bad_usage() {
    for wrong in [
        &["--log", "kvm-ring"][..],
        &["--memory", "5000"],
        &["--preempt"],
        &["--same-host"],
        &["--zero-copy", "splice"],
        &["--zero-method", "sse3"],
        &["--zero-copy", "msg", "--channels", "2", "--compression", "zlib"],
        &["--zero-copy", "msg", "--channels", "2", "--transport", "unix"],
    ] {
        let ended = demo([&["live"][..], wrong].concat());
        assert_eq!(ended.status.code(), Some(2), "{wrong:?}: {ended:?}");
    }
}

#[test]
fn deciding_about_an_end_that_is_not_there_fails_in_one_line() {
    for verb in ["resume", "start", "discard", "status"] {
        let ended = demo([verb, "--control", "/nonexistent/socket"]);
        ended.one_line(&["/nonexistent/socket"]);
    }
}
