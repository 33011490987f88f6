//! How encrypted channels end: with the word that it is the end, without it, by this side's will.

use std::os::fd::AsFd as _;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Listener, Options, Shutdown, Tls, TlsFailure};

use crate::bed::{Bed, SOON, listen, look, plain, with};

/// Waits until a call on the channel has begun.
fn begun(calls: impl Fn() -> u64) {
    while calls() == 0 {
        thread::yield_now();
    }
    // It may still be on its way into the kernel; either way it has to wake.
    thread::sleep(Duration::from_millis(20));
}

#[test]
fn an_end_that_was_announced_is_an_end() {
    let bed = Bed::new();
    let (client, server) = bed.pair();
    client.write_all(b"last").unwrap();
    drop(client);
    let mut got = [0; 10];
    assert_eq!(server.read(&mut got).unwrap(), 4);
    assert_eq!(server.read(&mut got).unwrap(), 0);
    assert_eq!(server.peek(&mut got).unwrap(), Some(0));
    let error = server.read_exact(&mut got).unwrap_err();
    assert!(error.is_closed() && !error.lacks_close_notify(), "{error}");

    // One direction at a time.
    let (client, server) = bed.pair();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(server.read(&mut got).unwrap(), 0);
    server.write_all(b"still").unwrap();
    client.read_exact(&mut got[..5]).unwrap();
    assert!(client.write_all(b"no").is_err());
}

#[test]
fn an_end_that_was_not_announced_is_none() {
    let bed = Bed::new();
    let (client, server) = bed.pair();
    client.write_all(b"last").unwrap();
    rustix::net::shutdown(client.as_fd(), rustix::net::Shutdown::Write).unwrap();
    let mut got = [0; 10];
    assert_eq!(server.read(&mut got).unwrap(), 4);
    for _ in 0..2 {
        let error = server.read(&mut got).unwrap_err();
        assert!(error.lacks_close_notify() && error.is_closed(), "{error}");
        assert_eq!(error.tls_failure(), Some(&TlsFailure::Truncated { before_first_byte: false }));
        assert!(
            error.to_string().contains("at byte 5: TLS: the connection ended without a TLS close notification"),
            "{error}"
        );
    }
    assert_eq!(server.peek(&mut got).unwrap(), Some(0));
}

#[test]
fn an_end_that_gave_up_or_failed_sends_no_close_notification() {
    let bed = Bed::new();
    let cut = |server: &Channel| {
        let error = loop {
            match server.read(&mut [0; 100]) {
                Ok(0) => panic!("taken for an end"),
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert!(error.is_closed() && error.tls_failure().is_some(), "{error}");
    };
    // It is shut down in both directions, and dropped.
    let (client, server) = bed.pair();
    client.write_all(b"a part").unwrap();
    client.shutdown(Shutdown::Both).unwrap();
    drop(client);
    cut(&server);
    // What it has read makes no sense.
    let (client, server) = bed.pair();
    client.write_all(b"a part").unwrap();
    rustix::io::write(server.as_fd(), b"no record").unwrap();
    assert!(client.read_exact(&mut [0]).is_err());
    drop(client);
    cut(&server);
    // Its thread panics.
    let (client, server) = bed.pair();
    let panics = thread::spawn(move || {
        client.write_all(b"a part").unwrap();
        std::panic::resume_unwind(Box::new(client.peer().to_owned()));
    });
    assert!(panics.join().is_err());
    cut(&server);
    // That nothing has come for a while is no failure, and neither is that this end does not listen any more.
    let (client, server) = bed.pair();
    client.set_timeouts(Some(Duration::from_millis(1)), None).unwrap();
    assert!(client.read_exact(&mut [0]).unwrap_err().is_timeout());
    client.shutdown(Shutdown::Read).unwrap();
    assert!(client.read_exact(&mut [0]).unwrap_err().is_shut_down());
    client.write_all(b"all").unwrap();
    drop(client);
    server.read_exact(&mut [0; 3]).unwrap();
    assert_eq!(server.read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_shutdown_wakes_reads_and_writes() {
    let bed = Bed::new();
    let (client, _server) = bed.pair();
    thread::scope(|scope| {
        let reads = scope.spawn(|| client.read_exact(&mut [0]));
        let writes = scope.spawn(|| client.write_all(&vec![0; 64 << 20]));
        begun(|| client.counters().calls_in);
        begun(|| client.counters().calls_out.saturating_sub(1));
        client.shutdown(Shutdown::Both).unwrap();
        for ended in [reads.join().unwrap(), writes.join().unwrap()] {
            assert!(ended.unwrap_err().is_shut_down());
        }
    });
}

#[test]
fn a_shutdown_wakes_a_thread_that_waits_for_a_handshake() {
    let bed = Bed::new();
    let (_near, far) = plain();
    let server = Channel::from_fd_with(far.into(), &bed.server()).unwrap();
    thread::scope(|scope| {
        let reads = scope.spawn(|| server.read_exact(&mut [0]));
        let writes = scope.spawn(|| server.write_all(b"?"));
        begun(|| server.counters().calls_in.min(server.counters().calls_out));
        server.shutdown(Shutdown::Both).unwrap();
        for ended in [reads.join().unwrap(), writes.join().unwrap()] {
            assert!(ended.unwrap_err().is_shut_down());
        }
    });
    // One direction is enough: there is no handshake without it.
    let (_near, far) = plain();
    let server = Channel::from_fd_with(far.into(), &bed.server()).unwrap();
    thread::scope(|scope| {
        let writes = scope.spawn(|| server.write_all(b"?"));
        begun(|| server.counters().calls_out);
        server.shutdown(Shutdown::Read).unwrap();
        let error = writes.join().unwrap().unwrap_err();
        assert!(error.is_shut_down(), "{error}");
    });
}

#[test]
fn dropping_a_channel_waits_for_room_for_the_close_notification_but_not_for_long() {
    let bed = Bed::new();
    let (client, server) = bed.pair();
    // Fills what is between the ends, to the last byte.
    client.set_timeouts(None, Some(Duration::from_millis(20))).unwrap();
    while client.write_all(&[0; 16 << 10]).is_ok() {}
    let begun = Instant::now();
    drop(client);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    // A write was interrupted, so this is no end.
    let mut got = vec![0; 1 << 20];
    let error = loop {
        match server.read(&mut got) {
            Ok(0) => panic!("taken for an end"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(error.lacks_close_notify(), "{error}");
}

#[test]
fn a_handshake_that_takes_too_long_is_given_up_by_both_ends() {
    let bed = Bed::new();
    let short = Some(Duration::from_millis(100));
    // A server that says nothing.
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &Options::default()).unwrap();
    let error =
        Channel::connect(listener.local_uri(), &Options { connect_timeout: short, ..bed.client() }).unwrap_err();
    assert_eq!(error.tls_failure(), Some(&TlsFailure::HandshakeTimedOut(Duration::from_millis(100))), "{error}");
    // A client that says nothing.
    let (_near, far) = plain();
    let server = Channel::from_fd_with(far.into(), &Options { connect_timeout: short, ..bed.server() }).unwrap();
    let begun = Instant::now();
    let error = look(&server).unwrap_err();
    assert_eq!(error.tls_failure(), Some(&TlsFailure::HandshakeTimedOut(Duration::from_millis(100))), "{error}");
    assert!(begun.elapsed() < SOON);
}

#[test]
fn the_time_for_a_handshake_runs_from_the_wait_at_a_client_and_from_accept_at_a_server() {
    let bed = Bed::new();
    let short = Duration::from_secs(1);
    let deferred = Options {
        connect_timeout: Some(short),
        ..with(Tls::client(bed.folder(), None).unwrap().with_deferred_handshake())
    };
    let listener = listen(&bed.server());
    let client = Channel::connect(listener.local_uri(), &deferred).unwrap();
    // It has something else to do first.
    thread::sleep(short + short / 5);
    thread::scope(|scope| {
        let write = scope.spawn(|| client.write_all(b"!"));
        listener.accept(Some(SOON)).unwrap().read_exact(&mut [0]).unwrap();
        write.join().unwrap().unwrap();
    });
    // Who has come too late for an end that was looked at too late is not answered.
    let listener = listen(&Options { connect_timeout: Some(short), ..bed.server() });
    let client = Channel::connect(listener.local_uri(), &deferred).unwrap();
    let server = listener.accept(Some(SOON)).unwrap();
    thread::sleep(short + short / 5);
    let error = look(&server).unwrap_err();
    assert_eq!(error.tls_failure(), Some(&TlsFailure::HandshakeTimedOut(short)), "{error}");
    assert_eq!(rustix::io::ioctl_fionread(&client).unwrap(), 0);
}

#[test]
fn a_peer_that_resets_the_connection_has_not_ended_it() {
    let bed = Bed::new();
    let (client, server) = bed.pair();
    client.write_all(b"never read").unwrap();
    look(&server).unwrap();
    rustix::net::sockopt::set_socket_linger(server.as_fd(), Some(Duration::ZERO)).unwrap();
    // Not by dropping the channel, which would say that this is the end.
    let (socket, _kept) = (server.as_fd().try_clone_to_owned().unwrap(), server);
    rustix::net::connect_unspec(socket).unwrap();
    let error = client.read_exact(&mut [0]).unwrap_err();
    assert!(error.is_closed() && !error.lacks_close_notify(), "{error}");
    assert_eq!(error.tls_failure(), Some(&TlsFailure::Reset { before_first_byte: true }), "{error}");
}
