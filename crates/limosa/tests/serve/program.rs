//! The program: its lines, its signals, its addresses.

use std::process::Stdio;

use limosa_testkit::{NbdClient, NbdCommand, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::bed::{Bed, nbdinfo, tool};
use crate::needs_qemu;

#[test]
fn programs_get_an_object_when_clients_can_connect_and_one_at_the_end() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "1M"]);
    let serving = bed.serve("nbd", &["--json", "disk"]);
    let lines = |text: &str| text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>();
    let ready = lines(&serving.printed());
    assert_eq!((ready.len(), &ready[0]["event"]), (1, &"ready".into()));
    assert_eq!(ready[0]["nbd"][0], serving.uri(""));
    assert_eq!(
        (&ready[0]["exports"][0]["format"], &ready[0]["exports"][0]["size"]),
        (&"qcow2".into(), &(1 << 20).into())
    );
    let mut client = serving.client();
    assert_eq!(client.write(0, 0, &[1; 4096]).unwrap(), 0);
    assert_eq!(client.read(0, 4096).unwrap(), vec![1; 4096]);
    client.disconnect().unwrap();
    let ended = serving.stop();
    let ended = lines(&ended.stdout);
    assert_eq!((ended.len(), &ended[1]["event"]), (2, &"ended".into()));
    assert_eq!(
        (&ended[1]["counters"]["connections"], &ended[1]["exports"][0]["written-bytes"]),
        (&1.into(), &4096.into())
    );
}

#[test]
fn a_signal_ends_it_after_the_requests_in_flight_and_the_image_is_closed() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-o", "lazy_refcounts=on", "@disk", "64M"]);
    let serving = bed.serve("nbd", &["disk"]);
    let mut client = serving.client();
    for number in 0..200 {
        client.send_write(0, number * 65536, &[7; 4096]).unwrap();
    }
    assert_eq!(client.receive().unwrap().error, 0);
    serving.stop();
    let mut answered = 1;
    while let Ok(reply) = client.receive() {
        assert!([0, 108].contains(&reply.error));
        answered += u32::from(reply.error == 0);
    }
    // No repair is needed, although refcounts were written late.
    let check = bed.qemu_img(&["check", "--output=json", "@disk"]);
    let check: Value = serde_json::from_str(&check).unwrap();
    assert!(check["allocated-clusters"].as_u64() >= Some(answered.into()), "{check}");
}

#[test]
fn a_client_on_standard_input_and_output_is_served_and_ends_it() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "1M"]);
    // A socket as both, as inetd passes it.
    let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut command = bed.command(&["disk", "--nbd", "-"]);
    command.stdin(std::os::fd::OwnedFd::from(far.try_clone().unwrap()));
    command.stdout(std::os::fd::OwnedFd::from(far)).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    drop(command);
    let mut client = NbdClient::over(near).unwrap();
    client.go("").unwrap();
    assert_eq!(client.write(0, 512, &[5; 512]).unwrap(), 0);
    client.disconnect().unwrap();
    assert!(child.wait().unwrap().success());
    // Two pipes.
    let mut command = bed.command(&["disk", "--nbd", "-"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let pipes = Pipes(child.stdout.take().unwrap(), child.stdin.take().unwrap());
    let mut client = NbdClient::over(pipes).unwrap();
    client.use_extended().unwrap();
    client.go("").unwrap();
    assert_eq!(client.read(512, 512).unwrap(), vec![5; 512]);
    client.disconnect().unwrap();
    assert!(child.wait().unwrap().success());
    bed.qemu_img(&["check", "-q", "@disk"]);
    bed.refused(&["disk", "--json", "--nbd", "-"]).misused(&["--json"]);
    bed.refused(&["disk", "--nbd", "-", "--nbd", "unix:x"]).misused(&["--nbd -"]);
}

#[test]
fn a_server_over_pipes_ends_by_its_signal_although_its_client_is_silent() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "1M"]);
    for has_agreed in [false, true] {
        let mut command = bed.command(&["disk", "--nbd", "-"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let pipes = Pipes(child.stdout.take().unwrap(), child.stdin.take().unwrap());
        let mut client = NbdClient::over(pipes).unwrap();
        if has_agreed {
            client.go("").unwrap();
            // It reads none of what it asks for.
            for _ in 0..4 {
                client.send(NbdCommand::Read, 0, 0, 1 << 20).unwrap();
            }
        }
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        let ended = wait_for("the server's end", || child.try_wait().unwrap());
        assert!(ended.success(), "{has_agreed}: {ended}");
        drop(client);
    }
}

/// The output and the input of a child.
struct Pipes(std::process::ChildStdout, std::process::ChildStdin);

impl std::io::Read for Pipes {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(bytes)
    }
}

impl std::io::Write for Pipes {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.1.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.1.flush()
    }
}

#[test]
fn sockets_that_systemd_passes_are_used() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "1M"]);
    // libnbd starts a server as systemd does.
    let (limosa, disk) = (env!("CARGO_BIN_EXE_limosa"), bed.path("disk"));
    let words = ["--size", "--", "[", limosa, "serve", disk.to_str().unwrap(), "]"];
    assert_eq!(tool("nbdinfo", &words).trim(), "1048576");
}

#[test]
fn it_listens_at_several_addresses() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "1M"]);
    let serving = bed.serve("nbd", &["disk", "--nbd", "tcp:127.0.0.1:0"]);
    let port = serving.port();
    assert_eq!(nbdinfo(&[&format!("nbd://127.0.0.1:{port}")])["exports"][0]["export-size"], 1 << 20);
    let mut tcp = NbdClient::tcp(port).unwrap();
    tcp.go("").unwrap();
    let mut unix = serving.client();
    assert_eq!(tcp.write(0, 0, &[3; 512]).unwrap(), 0);
    assert_eq!(unix.simple(NbdCommand::Flush, 0, 0, 0).unwrap(), 0);
    assert_eq!(unix.read(0, 512).unwrap(), vec![3; 512]);
    drop((tcp, unix));
    serving.stop();
}

#[test]
fn mistakes_are_refused_in_one_line() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "1M"]);
    bed.refused(&["disk"]).misused(&["--nbd URI", "LISTEN_FDS"]);
    bed.refused(&["--nbd", "unix:x"]).misused(&["no image", "IMAGE"]);
    bed.refused(&["disk", "--nbd", "unix:x", "--name", "a", "--name", "b"]).misused(&["--name"]);
    bed.refused(&["disk", "--nbd", "unix:x", "--max-memory", "127M"]).misused(&["--max-memory"]);
    bed.refused(&["absent", "--nbd", "unix:x"]).one_line(&["absent", "No such file"]);
    bed.refused(&["disk", "--nbd", "unix:no/such/folder"]).one_line(&["--nbd", "no/such/folder"]);
    bed.refused(&["disk", "--nbd", "file:x"]).misused(&["--nbd", "file:x", "unix:PATH"]);
}
