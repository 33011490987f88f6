//! Listening and connecting, by every form of address.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use limosa_channel::{Channel, ChannelError, Listener, Options, Uri};
use rustix::net::{AddressFamily, SocketType};

fn options() -> Options {
    Options { connect_timeout: Some(Duration::from_secs(60)), ..Options::default() }
}

/// A number as a parent process would hand it down: open and inheritable.
fn inherited(fd: impl AsFd) -> Uri {
    Uri::Fd(rustix::io::dup(fd).unwrap().into_raw_fd())
}

fn greets(uri: &Uri, listener: &Listener) -> (Channel, Channel) {
    thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.accept(Some(Duration::from_secs(60))).unwrap());
        let near = Channel::connect(uri, &options()).unwrap();
        let far = accepted.join().unwrap();
        let mut word = [0; 5];
        near.write_all(b"hello").unwrap();
        far.read_exact(&mut word).unwrap();
        far.write_all(&word).unwrap();
        near.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"hello");
        (near, far)
    })
}

#[test]
fn tcp_connects_to_the_port_that_the_kernel_chose() {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &options()).unwrap();
    let uri = listener.local_uri().clone();
    assert!(matches!(&uri, Uri::Tcp { host, port } if host == "127.0.0.1" && *port != 0), "{uri}");
    let (near, far) = greets(&uri, &listener);
    assert_eq!(near.peer(), uri.to_string());
    for channel in [&near, &far] {
        assert!(rustix::net::sockopt::tcp_nodelay(channel).unwrap(), "no delay");
        assert_eq!(rustix::net::sockopt::tcp_congestion(channel).unwrap(), "reno", "nothing that paces");
    }
}

/// Whether a machine reaches itself is up to its kernel (`vsock_loopback`): if not, that is said in time.
#[test]
fn vsock_listens_at_the_port_that_the_kernel_chose() {
    let any = "vsock:4294967295:4294967295".parse().unwrap();
    let listener = match Listener::bind(&any, &options()) {
        Ok(listener) => listener,
        Err(error) => {
            let is_missing = |source: &std::io::Error| source.raw_os_error() == Some(libc::EAFNOSUPPORT);
            assert!(matches!(&error, ChannelError::Io { source, .. } if is_missing(source)), "{error:?}");
            eprintln!("this machine has no vsock");
            return;
        }
    };
    let Uri::Vsock { cid: u32::MAX, port } = *listener.local_uri() else { panic!("{}", listener.local_uri()) };
    assert_ne!(port, u32::MAX);
    let taken = Listener::bind(listener.local_uri(), &options()).unwrap_err();
    assert!(
        matches!(&taken, ChannelError::Io { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse),
        "{taken:?}"
    );
    let own = Uri::Vsock { cid: 1, port };
    let soon = Options { connect_timeout: Some(Duration::from_millis(200)), ..options() };
    match Channel::connect(&own, &soon) {
        Ok(probe) => {
            drop((probe, listener.accept(Some(Duration::from_secs(60))).unwrap()));
            greets(&own, &listener);
        }
        Err(error) => eprintln!("this machine does not reach itself over vsock: {error}"),
    }
}

#[test]
fn tcp_takes_ipv6_in_brackets() {
    if std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        eprintln!("this machine has no IPv6");
        return;
    }
    let listener = Listener::bind(&"tcp:[::1]:0".parse().unwrap(), &options()).unwrap();
    let uri: Uri = listener.local_uri().to_string().parse().unwrap();
    greets(&uri, &listener);
}

#[test]
fn an_inherited_tcp_connection_has_no_delay_and_a_name() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let stream = std::net::TcpStream::connect(address).unwrap();
    let channel = Channel::from_fd(stream.into()).unwrap();
    assert!(rustix::net::sockopt::tcp_nodelay(&channel).unwrap());
    assert_eq!(channel.peer(), format!("tcp:{address}"));
}

#[test]
fn a_connection_without_a_listener_is_refused() {
    // Bound, so that no other process gets the port, but not listening.
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let address = SocketAddr::try_from(rustix::net::getsockname(&socket).unwrap()).unwrap();
    let uri: Uri = format!("tcp:{address}").parse().unwrap();
    let error = Channel::connect(&uri, &options()).unwrap_err();
    assert!(matches!(error, ChannelError::Refused { .. }), "{error:?}");
    assert_eq!(error.to_string(), format!("cannot connect to {uri}"));

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("dead");
    drop(UnixListener::bind(&path).unwrap());
    let error = Channel::connect(&Uri::Unix(path), &options()).unwrap_err();
    assert!(matches!(error, ChannelError::Refused { .. }), "{error:?}");
    let error = Channel::connect(&Uri::Unix(directory.path().join("none")), &options()).unwrap_err();
    assert_eq!(error.io_kind(), Some(std::io::ErrorKind::NotFound), "{error}");
}

#[test]
fn a_unix_socket_is_private_from_the_first_and_removed_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let uri = Uri::Unix(path.clone());
    let listener = Listener::bind(&uri, &options()).unwrap();
    let metadata = std::fs::symlink_metadata(&path).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.mode() & 0o777, 0o600);
    greets(&uri, &listener);
    drop(listener);
    assert!(!path.exists());
}

#[test]
fn a_socket_in_use_is_left_alone_and_gets_no_stray_connection() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let first = Listener::bind(&Uri::Unix(path.clone()), &options()).unwrap();
    let error = Listener::bind(&Uri::Unix(path.clone()), &options()).unwrap_err();
    assert_eq!(error.io_kind(), Some(std::io::ErrorKind::AddrInUse), "{error}");
    assert!(path.exists());
    assert!(first.accept(Some(Duration::ZERO)).unwrap_err().is_timeout());
    greets(&Uri::Unix(path), &first);
}

#[test]
fn a_stale_socket_is_replaced_but_nothing_else_is() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    drop(UnixListener::bind(&path).unwrap());
    let listener = Listener::bind(&Uri::Unix(path.clone()), &options()).unwrap();
    greets(&Uri::Unix(path), &listener);

    let file = directory.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let error = Listener::bind(&Uri::Unix(file.clone()), &options()).unwrap_err();
    assert_eq!(error.io_kind(), Some(std::io::ErrorKind::AddrInUse), "{error}");
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
}

#[test]
fn what_another_put_in_the_sockets_place_is_not_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = Listener::bind(&Uri::Unix(path.clone()), &options()).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "new").unwrap();
    drop(listener);
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
}

#[test]
fn a_path_that_is_too_long_is_an_error() {
    let uri = Uri::Unix("x".repeat(200).into());
    Channel::connect(&uri, &options()).unwrap_err();
    Listener::bind(&uri, &options()).unwrap_err();
}

#[test]
fn a_listener_without_a_peer_times_out() {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &options()).unwrap();
    let error = listener.accept(Some(Duration::from_millis(30))).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert!(error.to_string().contains("nothing moved for 30ms"), "{error}");
}

#[test]
fn a_full_backlog_is_a_time_out() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let _listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&_listener, 0).unwrap();
    let options = Options { connect_timeout: Some(Duration::from_millis(30)), ..Options::default() };
    let mut connected = Vec::new();
    let error = loop {
        match Channel::connect(&Uri::Unix(path.clone()), &options) {
            Ok(channel) => connected.push(channel),
            Err(error) => break error,
        }
        assert!(connected.len() < 100, "the backlog never fills");
    };
    assert!(error.is_timeout(), "{error}");
}

#[test]
fn the_connect_time_out_does_not_become_the_write_time_out() {
    let directory = tempfile::tempdir().unwrap();
    let uri = Uri::Unix(directory.path().join("socket"));
    let listener = Listener::bind(&uri, &options()).unwrap();
    let options = Options { connect_timeout: Some(Duration::from_millis(100)), ..Options::default() };
    let near = Channel::connect(&uri, &options).unwrap();
    let far = listener.accept(None).unwrap();
    thread::scope(|scope| {
        let write = scope.spawn(|| near.write_all(&vec![0; 4 << 20]));
        thread::sleep(Duration::from_millis(300));
        far.read_exact(&mut vec![0; 4 << 20]).unwrap();
        write.join().unwrap().unwrap();
    });
}

#[test]
fn a_descriptor_is_taken_over_by_number() {
    let (near, far) = UnixStream::pair().unwrap();
    let uri = inherited(&near);
    drop(near);
    let channel = Channel::connect(&uri, &options()).unwrap();
    assert_eq!(uri, Uri::Fd(channel.as_fd().as_raw_fd()), "the number itself, not a copy");
    let far = Channel::from_fd(far.into()).unwrap();
    channel.write_all(b"x").unwrap();
    far.read_exact(&mut [0; 1]).unwrap();
    drop(channel);
    assert_eq!(far.read(&mut [0; 1]).unwrap(), 0, "it was the only one");
}

#[test]
fn a_descriptor_cannot_be_taken_twice_or_from_this_process() {
    let (near, _far) = UnixStream::pair().unwrap();
    let uri = inherited(&near);
    let _channel = Channel::connect(&uri, &options()).unwrap();
    let error = Channel::connect(&uri, &options()).unwrap_err();
    assert!(matches!(error, ChannelError::Unsupported { .. }), "{error}");
    let own = Uri::Fd(near.as_raw_fd());
    let error = Channel::connect(&own, &options()).unwrap_err();
    assert!(error.to_string().contains("not inherited"), "{error}");
    (&near).write_all(b"still open").unwrap();
}

#[test]
fn a_closed_descriptor_is_an_error_that_says_so() {
    for number in [1_000_000, i32::MAX, -1] {
        let error = Channel::connect(&Uri::Fd(number), &options()).unwrap_err();
        assert!(matches!(error, ChannelError::Unsupported { .. }), "{error:?}");
    }
    let error = Channel::connect(&Uri::Fd(1_000_000), &options()).unwrap_err();
    assert_eq!(error.to_string(), "cannot connect to fd:1000000: no such descriptor is open in this process");
}

#[test]
fn a_pipe_is_taken_over_by_number() {
    let (reader, writer) = std::io::pipe().unwrap();
    let (write, read) = (inherited(&writer), inherited(&reader));
    drop((reader, writer));
    let write = Channel::connect(&write, &options()).unwrap();
    let read = Listener::bind(&read, &options()).unwrap().accept(None).unwrap();
    write.write_all(b"through").unwrap();
    drop(write);
    let mut word = [0; 7];
    read.read_exact(&mut word).unwrap();
    assert_eq!((&word, read.read(&mut [0]).unwrap()), (b"through", 0));
}

#[test]
fn an_inherited_listening_socket_listens_and_an_inherited_connection_is_accepted_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listening = UnixListener::bind(&path).unwrap();
    let listener = Listener::bind(&inherited(&listening), &options()).unwrap();
    assert!(listener.socket().is_some());
    greets(&Uri::Unix(path.clone()), &listener);
    greets(&Uri::Unix(path), &listener);

    let (near, _far) = UnixStream::pair().unwrap();
    let listener = Listener::bind(&inherited(&near), &options()).unwrap();
    let channel = listener.accept(None).unwrap();
    assert!(channel.peer().starts_with("fd:"));
    let error = listener.accept(None).unwrap_err();
    assert!(matches!(error, ChannelError::Unsupported { .. }), "{error}");
}

#[test]
fn what_is_no_stream_is_refused_with_a_reason() {
    let refused = |fd: OwnedFd, reason: &str| {
        let error = Channel::from_fd(fd).unwrap_err();
        assert!(matches!(error, ChannelError::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains(reason), "{error}");
    };
    refused(UnixDatagram::unbound().unwrap().into(), "message boundaries");
    refused(std::net::TcpListener::bind("127.0.0.1:0").unwrap().into(), "waits for connections");
    refused(std::fs::File::open("/").unwrap().into(), "directory");
    let file: Uri = "file:x".parse().unwrap();
    assert!(Channel::connect(&file, &options()).unwrap_err().to_string().contains("open it as a file"));
    assert!(Listener::bind(&file, &options()).unwrap_err().to_string().contains("open it as a file"));
}

/// Runs in a child process only: copies standard input to standard output through channels.
#[test]
#[ignore = "run by standard_streams_are_taken_over_entirely, in a process of its own"]
fn child_of_standard_streams() {
    if std::env::var_os("LIMOSA_CHANNEL_CHILD").is_none() {
        return;
    }
    let input = Channel::connect(&Uri::Fd(0), &options()).unwrap();
    let output = Channel::connect(&Uri::Fd(1), &options()).unwrap();
    println!("this must not get between the stream's bytes");
    let mut buffer = [0; 4096];
    loop {
        match input.read(&mut buffer).unwrap() {
            0 => break,
            n => output.write_all(&buffer[..n]).unwrap(),
        }
    }
    drop(output);
    // The parent sees the end of standard output although this process lives on.
    thread::sleep(Duration::from_secs(600));
}

#[test]
fn standard_streams_are_taken_over_entirely() {
    let mut child = limosa_testkit::own_test!(child_of_standard_streams)
        .env("LIMOSA_CHANNEL_CHILD", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let sent = vec![b'~'; 300_000];
    let mut input = child.stdin.take().unwrap();
    let writer = {
        let sent = sent.clone();
        thread::spawn(move || input.write_all(&sent))
    };
    let mut received = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut received).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    writer.join().unwrap().unwrap();
    // The test harness has its say before the stream begins.
    let begin = received.iter().position(|&byte| byte == b'~').unwrap();
    assert!(received[begin..] == sent, "{} bytes of {}", received.len() - begin, sent.len());
}
