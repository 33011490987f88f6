//! Who is taken for a peer where nothing is said at first.

use std::io::Write as _;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Acceptor, Channel, Options, RefusalLog, Tls, Uri};

use crate::bed::{Bed, SOON, listen, with};

#[test]
fn strangers_are_not_taken_for_a_silent_peer_and_delay_no_other() {
    let bed = Bed::new();
    let listener = listen(&bed.server());
    let Uri::Tcp { port, .. } = *listener.local_uri() else { unreachable!() };
    // More than are kept, silent ones and noisy ones, and one without a certificate.
    let mut strangers: Vec<_> = (0..100).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    for (number, stranger) in strangers.iter_mut().enumerate() {
        let noise = [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[22, 3, 1, 0, 200, 1, 0, 0]][number % 3];
        stranger.write_all(noise).unwrap();
    }
    let bare = with(Tls::client(bed.another("bare"), None).unwrap());
    thread::scope(|scope| {
        let uri = listener.local_uri();
        let refused = scope.spawn(|| Channel::connect(uri, &bare).and_then(|channel| channel.read_exact(&mut [0])));
        let right = scope.spawn(|| {
            assert!(refused.join().unwrap().is_err());
            Channel::connect(uri, &bed.client()).unwrap()
        });
        let mut refusals = Vec::new();
        let mut acceptor = Acceptor::new(&listener).on_refusal(|why| refusals.push(why.to_owned()));
        let end = Instant::now() + SOON;
        let far = loop {
            assert!(Instant::now() < end);
            if let Some(channel) = acceptor.poll(Duration::from_millis(10)).unwrap() {
                break channel;
            }
        };
        drop(acceptor);
        let near = right.join().unwrap();
        near.write_all(b"me").unwrap();
        let mut got = [0; 2];
        far.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"me");
        // Each reason once.
        assert_eq!(refusals.len(), 2, "{refusals:?}");
        assert!(refusals.iter().any(|why| why.contains("it presented no certificate")), "{refusals:?}");
        assert!(refusals.iter().any(|why| why.contains("its data is not TLS")), "{refusals:?}");
    });
}

#[test]
fn no_trusted_peer_in_time_is_a_time_out() {
    let bed = Bed::new();
    let listener = listen(&bed.server());
    let Uri::Tcp { port, .. } = *listener.local_uri() else { unreachable!() };
    let _silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let error = Acceptor::new(&listener).accept_within(Duration::from_millis(50)).unwrap_err();
    assert!(error.is_timeout(), "{error}");
}

#[test]
fn a_peer_that_closes_after_the_handshake_is_not_taken() {
    let bed = Bed::new();
    let listener = listen(&bed.server());
    let deferred = with(Tls::client(bed.folder(), None).unwrap().with_deferred_handshake());
    let client = Channel::connect(listener.local_uri(), &deferred).unwrap();
    let mut refusals = Vec::new();
    let mut acceptor = Acceptor::new(&listener).on_refusal(|why| refusals.push(why.to_owned()));
    // It is answered, and has the last word.
    while rustix::io::ioctl_fionread(&client).unwrap() == 0 {
        assert!(acceptor.poll(Duration::from_millis(1)).unwrap().is_none());
    }
    client.complete_handshake().unwrap();
    rustix::net::shutdown(&client, rustix::net::Shutdown::Both).unwrap();
    assert!(acceptor.poll(Duration::from_millis(50)).unwrap().is_none());
    drop(acceptor);
    assert!(refusals.len() == 1 && refusals[0].contains("it may not trust this end's certificate"), "{refusals:?}");
}

#[test]
fn without_tls_the_first_to_come_is_taken() {
    let listener = listen(&Options::default());
    let near = Channel::connect(listener.local_uri(), &Options::default()).unwrap();
    let far = Acceptor::new(&listener).accept_within(SOON).unwrap();
    near.write_all(b"!").unwrap();
    far.read_exact(&mut [0]).unwrap();
}

#[test]
fn reasons_are_reported_once_and_in_a_bounded_number() {
    let mut reasons = RefusalLog::default();
    let refusals = (0..1000).filter(|number| reasons.is_new(&format!("reason {}", number % 100))).count();
    assert!((2..100).contains(&refusals), "{refusals}");
}
