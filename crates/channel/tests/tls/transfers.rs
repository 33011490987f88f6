//! Data arrives unchanged, in both directions at once, however it is split.

use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError, Options, RateLimit, Shutdown, Tls, ZeroCopy};
use proptest::prelude::*;

use crate::bed::{Bed, SOON, connected, listen, pattern, with};

/// More than all buffers between the ends hold.
const MUCH: usize = 24 << 20;

/// Both directions at once.
fn exchange(client: &Channel, server: &Channel, much: usize) {
    let data = pattern(much);
    thread::scope(|scope| {
        for (near, far) in [(client, server), (server, client)] {
            scope.spawn(|| data.chunks(1 << 20).for_each(|piece| near.write_all(piece).unwrap()));
            scope.spawn(|| {
                let mut got = vec![0; much];
                far.read_exact(&mut got).unwrap();
                assert!(got == data);
            });
        }
    });
}

#[test]
fn both_directions_carry_much_at_once() {
    let bed = Bed::new();
    let (client, server) = bed.pair();
    exchange(&client, &server, MUCH);
    for channel in [&client, &server] {
        assert!(channel.is_encrypted());
        let counters = channel.counters();
        // Of the payload; the first byte was the bed's.
        assert_eq!(counters.bytes_in + counters.bytes_out, 2 * MUCH as u64 + 1);
    }
}

#[test]
fn both_ends_renew_their_keys_while_they_write_and_read() {
    let bed = Bed::new();
    let often = |tls: Tls| with(tls.key_update_after(20));
    let (at_client, at_server) = (Tls::client(bed.folder(), None), Tls::server(bed.folder(), true));
    let (client, server) = connected(&often(at_server.unwrap()), &often(at_client.unwrap())).unwrap();
    exchange(&client, &server, 4 << 20);
    drop(client);
    assert_eq!(server.read(&mut [0; 10]).unwrap(), 0);
}

#[test]
fn a_write_is_not_delayed_by_a_thread_that_waits_for_the_peer() {
    let bed = Bed::new();
    let (client, server) = bed.pair();
    thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let mut answer = [0; 4];
            client.read_exact(&mut answer).unwrap();
            answer
        });
        while client.counters().calls_in == 0 {
            thread::yield_now();
        }
        for number in 0..1000_u32 {
            client.write_all(&number.to_le_bytes()).unwrap();
            let mut got = [0; 4];
            server.read_exact(&mut got).unwrap();
            assert_eq!(u32::from_le_bytes(got), number);
        }
        server.write_all(b"done").unwrap();
        assert_eq!(&waits.join().unwrap(), b"done");
    });
}

#[test]
fn thousands_of_small_writes_arrive_as_one_stream() {
    let bed = Bed::new();
    let (client, server) = bed.pair();
    let data = pattern(20_000);
    thread::scope(|scope| {
        scope.spawn(|| data.chunks(3).for_each(|piece| client.write_all(piece).unwrap()));
        let mut got = vec![0; data.len()];
        server.read_exact(&mut got).unwrap();
        assert!(got == data);
    });
}

#[test]
#[allow(unsafe_code, reason = "writes memory that is no slice")]
fn memory_that_is_written_meanwhile_is_written_and_read() {
    let bed = Bed::new();
    let (client, server) = bed.pair();
    let memory: Vec<AtomicU8> = (0..1 << 20).map(|_| AtomicU8::new(0)).collect();
    thread::scope(|scope| {
        let write = scope.spawn(|| {
            let list = [libc::iovec { iov_base: memory.as_ptr().cast_mut().cast(), iov_len: memory.len() }];
            // SAFETY: the memory outlives the scope.
            unsafe { client.write_all_raw(&list) }
        });
        memory.iter().for_each(|byte| byte.store(7, Ordering::Relaxed));
        let mut got = vec![1; memory.len()];
        server.read_exact(&mut got).unwrap();
        assert!(got.iter().all(|byte| [0, 7].contains(byte)));
        write.join().unwrap().unwrap();
    });
}

#[test]
fn what_is_peeked_at_is_got_all_the_same() {
    let bed = Bed::new();
    let (client, server) = bed.pair();
    assert_eq!(server.peek(&mut [0; 8]).unwrap(), None);
    // Two records.
    client.write_all(b"QE").unwrap();
    client.write_all(b"VM and more").unwrap();
    let mut first = [0; 4];
    let end = Instant::now() + SOON;
    while server.peek(&mut first).unwrap() != Some(4) {
        assert!(Instant::now() < end);
        thread::yield_now();
    }
    assert_eq!(&first, b"QEVM");
    let mut all = [0; 13];
    server.read_exact(&mut all).unwrap();
    assert_eq!(&all, b"QEVM and more");
    assert_eq!(server.peek(&mut first).unwrap(), None);
}

#[test]
fn a_clone_goes_on_where_the_first_handle_was() {
    let bed = Bed::new();
    let (client, server) = bed.pair();
    let clone = client.try_clone().unwrap();
    client.write_all(b"one").unwrap();
    drop(client);
    clone.write_all(b"two").unwrap();
    let mut got = [0; 6];
    server.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"onetwo");
    drop(clone);
    assert_eq!(server.read(&mut got).unwrap(), 0);
}

#[test]
fn a_rate_limit_and_time_outs_hold() {
    let bed = Bed::new();
    let rate = RateLimit::default();
    let (client, server) =
        connected(&bed.server(), &Options { rate_limit: Some(rate.clone()), ..bed.client() }).unwrap();
    rate.set(NonZeroU64::new(16 << 20));
    let begun = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| client.write_all(&vec![0; 8 << 20]).unwrap());
        server.read_exact(&mut vec![0; 8 << 20]).unwrap();
    });
    // Half a second, less what a limit lets through at once.
    assert!(begun.elapsed() > Duration::from_millis(200), "{:?}", begun.elapsed());
    assert!(client.counters().throttled_ns > 0);
    rate.set(None);

    server.set_timeouts(Some(Duration::from_millis(50)), None).unwrap();
    assert!(server.read_exact(&mut [0]).unwrap_err().is_timeout());
    client.set_timeouts(None, Some(Duration::from_millis(50))).unwrap();
    let error = client.write_all(&vec![7; 64 << 20]).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    // What was begun goes out in front of what comes next: nothing is lost or twice.
    let sent = client.counters().bytes_out;
    client.set_timeouts(None, Some(SOON)).unwrap();
    server.set_timeouts(Some(SOON), None).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| client.write_all(b"end").unwrap());
        let mut got = vec![0; usize::try_from(sent).unwrap() - 1 - (8 << 20)];
        server.read_exact(&mut got).unwrap();
        assert!(got.iter().all(|byte| *byte == 7));
        let mut end = [0; 3];
        server.read_exact(&mut end).unwrap();
        assert_eq!(&end, b"end");
    });
}

#[test]
fn what_leaves_from_where_it_lies_is_refused() {
    let bed = Bed::new();
    let (client, _server) = bed.pair();
    let file = std::fs::File::open(bed.folder().join("ca-cert.pem")).unwrap();
    let refused = client.send_file(&file, 0, 10).unwrap_err();
    assert!(matches!(refused, ChannelError::Unsupported { .. }), "{refused}");
    assert!(!client.passes_descriptors());
    for zero_copy in [ZeroCopy::Msg, ZeroCopy::Splice] {
        let options = Options { zero_copy, ..bed.client() };
        // No process listens; it is refused before that is found out.
        let uri = "tcp:127.0.0.1:1".parse().unwrap();
        for refused in [
            Channel::connect(&uri, &options).unwrap_err(),
            limosa_channel::Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &options).unwrap_err(),
        ] {
            assert!(refused.to_string().ends_with("zero-copy and TLS exclude each other"), "{refused}");
        }
    }
    let auto = Options { zero_copy: ZeroCopy::Auto, ..bed.client() };
    assert_eq!(connected(&bed.server(), &auto).unwrap().0.zero_copy(), ZeroCopy::Off);
}

#[test]
fn a_unix_socket_is_encrypted_if_the_expected_host_name_is_given() {
    let bed = Bed::new();
    let uri = format!("unix:{}", bed.folder().join("socket").display()).parse().unwrap();
    let listener = limosa_channel::Listener::bind(&uri, &bed.server()).unwrap();
    let error = Channel::connect(&uri, &bed.client()).unwrap_err().to_string();
    assert!(error.contains("the expected host name is not given"), "{error}");
    let _nobody = listener.accept(Some(SOON)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let tls = Tls::client(bed.folder(), Some("localhost")).unwrap();
            Channel::connect(&uri, &with(tls)).unwrap().write_all(b"hello").unwrap();
        });
        let mut got = [0; 5];
        listener.accept(Some(SOON)).unwrap().read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
    });
}

#[test]
fn a_client_that_defers_its_handshake_does_not_wait_for_the_server() {
    let bed = Bed::new();
    let listener = listen(&bed.server());
    let deferred = with(Tls::client(bed.folder(), None).unwrap().with_deferred_handshake());
    // It was not accepted.
    let client = Channel::connect(listener.local_uri(), &deferred).unwrap();
    let server = listener.accept(Some(SOON)).unwrap();
    thread::scope(|scope| {
        let established = scope.spawn(|| client.complete_handshake());
        server.complete_handshake().unwrap();
        established.join().unwrap().unwrap();
    });
    client.write_all(b"now").unwrap();
    let mut got = [0; 3];
    server.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"now");
}

#[test]
fn many_channels_come_up_while_strangers_wait() {
    let bed = Bed::new();
    let listener = listen(&bed.server());
    let limosa_channel::Uri::Tcp { port, .. } = *listener.local_uri() else { unreachable!() };
    let strangers: Vec<_> = (0..20).map(|_| std::net::TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    let mut row: Vec<_> = strangers.iter().map(|_| listener.accept(Some(SOON)).unwrap()).collect();
    thread::scope(|scope| {
        for number in 0..10_u8 {
            let (bed, uri) = (&bed, listener.local_uri());
            scope.spawn(move || Channel::connect(uri, &bed.client()).unwrap().write_all(&[number]).unwrap());
        }
        let mut seen = Vec::new();
        let end = Instant::now() + SOON;
        while seen.len() < 10 {
            assert!(Instant::now() < end);
            if let Ok(channel) = listener.accept(Some(Duration::from_millis(1))) {
                row.push(channel);
            }
            row.retain(|channel| {
                let mut byte = [0];
                let Ok(Some(1)) = channel.peek(&mut byte) else { return true };
                seen.push(byte[0]);
                false
            });
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..10).collect::<Vec<_>>());
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn lists_of_any_shape_arrive_whole(
        writes in prop::collection::vec(prop::collection::vec(prop_oneof![0..50_usize, 0..40_000_usize], 0..12), 1..8),
        reads in prop::collection::vec(prop_oneof![1..50_usize, 1..100_000_usize], 1..6),
    ) {
        use std::sync::OnceLock;
        static BED: OnceLock<Bed> = OnceLock::new();
        let (client, server) = BED.get_or_init(Bed::new).pair();
        let total = writes.iter().flatten().sum();
        let data = pattern(total);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut rest = data.as_slice();
                for lengths in &writes {
                    let list: Vec<_> = lengths.iter().map(|&n| IoSlice::new(rest.split_off(..n).unwrap())).collect();
                    client.write_all_vectored(&list).unwrap();
                }
            });
            let mut got = vec![0; total];
            let (mut rest, mut list, mut round) = (got.as_mut_slice(), Vec::new(), 0);
            while !rest.is_empty() {
                let length = reads[round % reads.len()].min(rest.len());
                let (part, more) = rest.split_at_mut(length);
                list.push(IoSliceMut::new(part));
                (rest, round) = (more, round + 1);
            }
            server.read_exact_vectored(&mut list).unwrap();
            drop(list);
            assert!(got == data);
        });
    }
}

/// The client's write is held back by a rate limit, between two of its calls, when a third thread ends its direction.
#[test]
fn a_shutdown_amid_a_write_does_not_announce_the_end() {
    let bed = Bed::new();
    let slow = Options { rate_limit: Some(RateLimit::new(NonZeroU64::new(1_000_000))), ..bed.client() };
    let (client, server) = connected(&bed.server(), &slow).unwrap();
    thread::scope(|scope| {
        let writes = scope.spawn(|| client.write_all(&pattern(10_000_000)));
        let reads = scope.spawn(|| {
            let mut got = vec![0; 1 << 16];
            let mut all = 0;
            loop {
                match server.read(&mut got) {
                    Ok(0) => panic!("taken for the end after {all} bytes"),
                    Ok(more) => all += more,
                    Err(error) => return error,
                }
            }
        });
        thread::sleep(Duration::from_millis(500));
        client.shutdown(Shutdown::Write).unwrap();
        let error = writes.join().unwrap().unwrap_err();
        assert!(error.is_shut_down(), "{error}");
        let error = reads.join().unwrap();
        assert!(error.lacks_close_notify(), "{error}");
    });
}
