//! `limosa serve --metrics`, asked by programs and by what is no program.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use limosa_testkit::NbdClient;
use serde_json::Value;

use crate::bed::{Bed, Serving};
use crate::needs_qemu;

const LONG: Duration = Duration::from_secs(60);

fn served() -> (Bed, Serving) {
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
    let metrics = format!("unix:{}", bed.path("metrics").display());
    let serving = bed.serve("nbd", &["--metrics", &metrics, "--name", "a \"disk\"", "disk"]);
    (bed, serving)
}

/// Sends bytes and returns what comes until the server closes the connection.
fn ask(bed: &Bed, bytes: &[u8]) -> String {
    let mut socket = UnixStream::connect(bed.path("metrics")).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket.write_all(bytes).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

/// The value of a sample.
#[track_caller]
fn sample(page: &str, name: &str) -> f64 {
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} is not in {page}")).parse().unwrap()
}

#[test]
fn requests_are_counted_and_timed() {
    needs_qemu!();
    let (bed, serving) = served();
    assert_eq!(std::fs::metadata(bed.path("metrics")).unwrap().permissions().mode() & 0o777, 0o600);
    let mut client = NbdClient::open(&bed.path("nbd"), "a \"disk\"", &[]).unwrap();
    for number in 0..10 {
        assert_eq!(client.write(0, number * 4096, &[1; 4096]).unwrap(), 0);
    }
    client.read(0, 512).unwrap();
    let answer = ask(&bed, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
    let (head, page) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("text/plain; version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", page.len())), "{head}");
    assert_eq!(sample(page, "limosa_serve_connections"), 1.0);
    let label = r#"export="a \"disk\"""#;
    assert_eq!(sample(page, &format!("limosa_serve_export_clients{{{label}}}")), 1.0);
    assert_eq!(sample(page, &format!("limosa_serve_export_size_bytes{{{label}}}")), f64::from(64 << 20));
    assert_eq!(sample(page, &format!("limosa_serve_requests_total{{{label},kind=\"write\"}}")), 10.0);
    assert_eq!(sample(page, &format!("limosa_serve_request_bytes_total{{{label},kind=\"write\"}}")), 40960.0);
    let times = |what: &str| sample(page, &format!("limosa_serve_request_duration_seconds_{what}"));
    assert_eq!(times(&format!("count{{{label},kind=\"write\"}}")), 10.0);
    assert_eq!(times(&format!("bucket{{{label},kind=\"write\",le=\"+Inf\"}}")), 10.0);
    assert!(times(&format!("sum{{{label},kind=\"write\"}}")) > 0.0);
    let known = |line: &str| line.starts_with("# ") || line.starts_with("limosa_serve_");
    assert!(page.ends_with('\n') && page.lines().all(known), "{page}");
    drop(client);
    serving.stop();
    assert!(!bed.path("metrics").exists());
}

#[test]
fn other_requests_are_refused_by_their_status() {
    needs_qemu!();
    let (bed, serving) = served();
    let status = |bytes: &[u8]| ask(&bed, bytes).split(' ').nth(1).unwrap().to_owned();
    assert_eq!(status(b"HEAD /metrics HTTP/1.0\r\n\r\n"), "200");
    assert!(ask(&bed, b"HEAD /metrics HTTP/1.0\r\n\r\n").ends_with("\r\n\r\n"));
    assert_eq!(status(b"GET /../../etc/passwd HTTP/1.1\r\n\r\n"), "404");
    assert_eq!(status(b"DELETE /metrics HTTP/1.1\r\n\r\n"), "405");
    assert_eq!(status(b"\0\xff\n\n"), "400");
    assert_eq!(status(&vec![b'x'; 8 << 10]), "431");
    // A body is not read as another request, and its sender gets the answer.
    let body = [&b"POST /metrics HTTP/1.1\r\nContent-Length: 4000\r\n\r\n"[..], &[b'y'; 4000]].concat();
    assert_eq!(status(&body), "405");
    serving.stop();
}

#[test]
fn those_who_ask_slowly_or_never_hold_up_neither_others_nor_clients() {
    needs_qemu!();
    let (bed, serving) = served();
    let mut client = NbdClient::open(&bed.path("nbd"), "a \"disk\"", &[]).unwrap();
    let connect = || UnixStream::connect(bed.path("metrics")).unwrap();
    let mut silent: Vec<_> = (0..10).map(|_| connect()).collect();
    silent.iter_mut().skip(5).for_each(|socket| socket.write_all(b"GET /met").unwrap());
    assert!(ask(&bed, b"GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
    // More than are served at once: their time ends, and others have their turn.
    silent.extend((0..30).map(|_| connect()));
    assert_eq!(client.read(0, 4096).unwrap(), vec![0; 4096]);
    assert!(ask(&bed, b"GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
    for mut socket in silent {
        socket.set_read_timeout(Some(LONG)).unwrap();
        assert_eq!(socket.read(&mut [0]).unwrap(), 0);
    }
    let _late = connect();
    serving.stop();
}

#[test]
fn they_are_served_over_tcp_as_well() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "1M"]);
    let serving = bed.serve("nbd", &["--json", "--metrics", "tcp:127.0.0.1:0", "disk"]);
    let ready: Value = serde_json::from_str(serving.printed().lines().next().unwrap()).unwrap();
    let port = ready["metrics"].as_str().unwrap().rsplit(':').next().unwrap().parse::<u16>().unwrap();
    let mut socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("limosa_serve_connections 0\n"), "{answer}");
    serving.stop();
    bed.refused(&["disk", "--nbd", "unix:x", "--metrics", "file:x"]).one_line(&["--metrics", "file:x"]);
    bed.refused(&["disk", "--nbd", "unix:x", "--metrics", "unix:no/such/x"]).one_line(&["--metrics", "no/such/x"]);
}
