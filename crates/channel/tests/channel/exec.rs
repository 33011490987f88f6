//! Commands at the other end: both directions, and how they end.

use std::fs::File;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use limosa_channel::{Channel, ChannelError, Exec, Options, Shutdown, Uri};

/// For what should take moments on any machine: a limit for the stuck, not a measure.
const SOON: Duration = Duration::from_secs(60);

fn start(command: &str) -> (Channel, Exec) {
    Exec::start(command, &Options::default()).unwrap()
}

fn is_there(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn bytes_go_through_a_command_and_come_back() {
    let (channel, mut command) = start("cat");
    assert!(channel.has_direction(Shutdown::Both));
    let sent: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let mut received = vec![0; sent.len()];
    thread::scope(|scope| {
        scope.spawn(|| {
            channel.write_all(&sent).unwrap();
            channel.shutdown(Shutdown::Write).unwrap();
        });
        channel.read_exact(&mut received).unwrap();
    });
    assert!(sent == received);
    assert_eq!(channel.read(&mut [0; 1]).unwrap(), 0, "the command sees the end and ends");
    command.finish(SOON).unwrap();
    assert!(!is_there(command.pid()), "it is reaped");
}

#[test]
fn a_command_that_fails_is_reported_with_its_status() {
    let (channel, mut command) = start("exit 3");
    let error = command.finish(SOON).unwrap_err();
    assert!(matches!(error, ChannelError::CommandFailed { .. }), "{error:?}");
    assert_eq!(error.to_string(), "exec:exit 3: the command failed (exit status: 3)");
    assert_eq!(channel.read(&mut [0; 1]).unwrap(), 0);

    let (_channel, mut command) = start("kill -9 $$");
    assert!(command.finish(SOON).unwrap_err().to_string().contains("signal: 9"));
    let (_channel, mut command) = start("/no/such/program");
    assert!(command.finish(SOON).unwrap_err().to_string().ends_with("(exit status: 127)"));
}

#[test]
fn a_command_that_does_not_end_is_ended_and_reaped() {
    let (_channel, mut command) = start("exec sleep 1000");
    let error = command.finish(Duration::from_millis(10)).unwrap_err();
    assert!(matches!(error, ChannelError::CommandTimedOut { .. }), "{error:?}");
    assert!(!is_there(command.pid()));
    // One that will not listen.
    let (channel, command) = start("trap '' TERM; echo; while read x; do :; done");
    channel.read_exact(&mut [0; 1]).unwrap();
    let pid = command.pid();
    drop(command);
    assert!(!is_there(pid));
}

#[test]
fn a_command_is_neither_connected_to_nor_listened_for() {
    let uri: Uri = "exec:cat".parse().unwrap();
    let error = Channel::connect(&uri, &Options::default()).unwrap_err();
    assert!(error.to_string().contains("must be started"), "{error}");
    let error = limosa_channel::Listener::bind(&uri, &Options::default()).unwrap_err();
    assert!(matches!(error, ChannelError::Unsupported { .. }), "{error}");
}

#[test]
fn a_pipe_carries_one_direction_and_a_file_no_answer() {
    let (reader, writer) = std::io::pipe().unwrap();
    let (reader, writer) = (Channel::from_fd(reader.into()).unwrap(), Channel::from_fd(writer.into()).unwrap());
    assert_eq!(
        [Shutdown::Read, Shutdown::Write, Shutdown::Both].map(|how| reader.has_direction(how)),
        [true, false, false]
    );
    assert_eq!(
        [Shutdown::Read, Shutdown::Write, Shutdown::Both].map(|how| writer.has_direction(how)),
        [false, true, false]
    );
    let file = File::options().read(true).write(true).open(tempfile::NamedTempFile::new().unwrap().path()).unwrap();
    let file = Channel::from_fd(file.into()).unwrap();
    assert_eq!(
        [Shutdown::Read, Shutdown::Write, Shutdown::Both].map(|how| file.has_direction(how)),
        [true, true, false]
    );
}

/// The two tests below run this in a process of their own: standard input and output have no other user there.
#[test]
fn as_a_child_it_echoes_what_it_gets() {
    if std::env::var_os("LIMOSA_TEST_CHILD").is_none() {
        return;
    }
    let channel = match Channel::connect(&Uri::Stdio, &Options::default()) {
        Ok(channel) => channel,
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    };
    assert!(channel.has_direction(Shutdown::Both));
    let mut bytes = [0; 1000];
    channel.write_all(b">").unwrap();
    loop {
        let got = channel.read(&mut bytes).unwrap();
        channel.write_all(&bytes[..got]).unwrap();
        if got == 0 {
            std::process::exit(0);
        }
    }
}

fn child() -> Command {
    let mut command = limosa_testkit::own_test!(as_a_child_it_echoes_what_it_gets);
    command.env("LIMOSA_TEST_CHILD", "1");
    command
}

#[test]
fn standard_input_and_output_are_one_channel() {
    let mut child = child().stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let input = Channel::from_fd(child.stdin.take().unwrap().into()).unwrap();
    let output = Channel::from_fd(child.stdout.take().unwrap().into()).unwrap();
    input.write_all(b"hello").unwrap();
    drop(input);
    let mut all = Vec::new();
    let mut bytes = [0; 1000];
    loop {
        match output.read(&mut bytes).unwrap() {
            0 => break,
            got => all.extend_from_slice(&bytes[..got]),
        }
    }
    // The test program says a line of its own before.
    let all = String::from_utf8(all).unwrap();
    assert!(all.ends_with(">hello"), "{all:?}");
    assert!(child.wait().unwrap().success());
}

#[test]
fn standard_input_and_output_that_lead_nowhere_are_refused() {
    let ended = child().stdin(Stdio::null()).stdout(Stdio::piped()).output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(!ended.status.success() && said.contains("standard input is not a pipe"), "{said}");
    let mut process = child();
    process.stdin(Stdio::piped()).stdout(File::create("/dev/null").unwrap()).stderr(Stdio::piped());
    let ended = process.output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(!ended.status.success() && said.contains("standard output is not a pipe"), "{said}");
}
