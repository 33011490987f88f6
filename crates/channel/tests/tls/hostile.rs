//! Attackers on the path, and peers that do not use TLS.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use limosa_channel::{Channel, ChannelError, Options};
use proptest::prelude::*;

use crate::bed::{Bed, SOON, listen, plain};

/// Passes bytes on from a client to a server, changed; back as they are. What the server got, and how that ended.
fn through(
    bed: &Bed,
    write: &[u8],
    change: impl FnMut(u64, &mut Vec<u8>) -> bool + Send,
) -> (Vec<u8>, Option<ChannelError>) {
    let listener = listen(&bed.server());
    let limosa_channel::Uri::Tcp { port, .. } = *listener.local_uri() else { unreachable!() };
    let between = TcpListener::bind("127.0.0.1:0").unwrap();
    let uri = format!("tcp:{}", between.local_addr().unwrap()).parse().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            relay(between.accept().unwrap().0, TcpStream::connect(("127.0.0.1", port)).unwrap(), change);
        });
        scope.spawn(move || {
            let Ok(client) = Channel::connect(&uri, &bed.client()) else { return };
            for piece in write.chunks(1000) {
                if client.write_all(piece).is_err() {
                    return;
                }
            }
        });
        let server = listener.accept(Some(SOON)).unwrap();
        let (mut got, mut buffer) = (Vec::new(), vec![0; 70_000]);
        loop {
            match server.read(&mut buffer) {
                Ok(0) => return (got, None),
                Ok(count) => got.extend_from_slice(&buffer[..count]),
                Err(error) => return (got, Some(error)),
            }
        }
    })
}

/// Whole records from `client` to `server`, numbered; the connection ends when `change` says so.
fn relay(client: TcpStream, server: TcpStream, mut change: impl FnMut(u64, &mut Vec<u8>) -> bool) {
    let (mut back_from, mut back_to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
    let back = thread::spawn(move || {
        let _ = std::io::copy(&mut back_from, &mut back_to);
        let _ = back_to.shutdown(Shutdown::Both);
    });
    let (mut client, mut server) = (client, server);
    for number in 0.. {
        let mut record = vec![0; 5];
        if client.read_exact(&mut record).is_err() {
            break;
        }
        let length = usize::from(u16::from_be_bytes([record[3], record[4]]));
        record.resize(5 + length, 0);
        if client.read_exact(&mut record[5..]).is_err() || !change(number, &mut record) {
            break;
        }
        if server.write_all(&record).is_err() {
            break;
        }
    }
    let _ = server.shutdown(Shutdown::Both);
    let _ = client.shutdown(Shutdown::Both);
    back.join().unwrap();
}

/// More records than a client's handshake has.
const HANDSHAKE: u64 = 8;

#[test]
fn nothing_that_was_changed_on_its_way_is_taken() {
    let bed = Bed::new();
    let data: Vec<u8> = (0..50_000_u32).map(|at| at.to_le_bytes()[1]).collect();
    // As it is.
    let (got, end) = through(&bed, &data, |_, _| true);
    assert!(end.is_none() && got == data, "{end:?}");
    type Change = fn(u64, &mut Vec<u8>) -> bool;
    let changes: [(&str, Change); 6] = [
        ("one bit", |number, record| {
            if number == HANDSHAKE + 10 {
                record[100] ^= 4;
            }
            true
        }),
        ("left out", |number, record| {
            if number == HANDSHAKE + 10 {
                record.clear();
            }
            true
        }),
        ("twice", |number, record| {
            if number == HANDSHAKE + 10 {
                record.extend(record.clone());
            }
            true
        }),
        ("cut", |number, _| number < HANDSHAKE + 10),
        ("cut within", |number, record| {
            if number == HANDSHAKE + 10 {
                record.truncate(50);
            }
            number <= HANDSHAKE + 10
        }),
        ("not in TLS", |number, record| {
            if number == HANDSHAKE + 10 {
                record[0] = 22;
            }
            true
        }),
    ];
    for (what, change) in changes {
        let (got, error) = through(&bed, &data, change);
        let error = error.unwrap_or_else(|| panic!("{what}: taken for an end"));
        assert!(error.tls_failure().is_some(), "{what}: {error}");
        assert!(got.len() < data.len() && data.starts_with(&got), "{what}: {} bytes", got.len());
        assert!(got.len() > 1000, "{what}: {} bytes", got.len());
    }
}

#[test]
fn a_handshake_that_was_changed_or_cut_anywhere_fails_and_never_hangs() {
    let bed = Bed::new();
    for at in 0..4 {
        for cut in [false, true] {
            let (got, error) = through(&bed, b"secret", move |number, record| {
                if number == at && !cut {
                    let last = record.len() - 1;
                    record[last] ^= 1;
                }
                number != at || !cut
            });
            assert!(got.is_empty() && error.is_some(), "{at} {cut}: {error:?}");
        }
    }
}

#[test]
fn a_stranger_that_sends_a_byte_at_a_time_delays_no_other_peer() {
    let bed = Bed::new();
    let (mut near, far) = plain();
    let server = Channel::from_fd_with(
        far.into(),
        &Options { connect_timeout: Some(Duration::from_millis(300)), ..bed.server() },
    );
    let server = server.unwrap();
    // The beginning of a hello that would go on.
    for byte in [22, 3, 1, 64, 0, 1, 0, 63] {
        near.write_all(&[byte]).unwrap();
        if let Ok(found) = server.peek(&mut [0; 64]) {
            assert_eq!(found, None);
        }
    }
    let error = loop {
        match server.peek(&mut [0; 64]) {
            Ok(found) => assert_eq!(found, None),
            Err(error) => break error,
        }
        thread::sleep(Duration::from_millis(5));
    };
    assert!(error.to_string().contains("no TLS handshake within 300ms"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn noise_is_refused_and_takes_no_memory(noise in prop::collection::vec(any::<u8>(), 1..600), tls in any::<bool>()) {
        use std::sync::OnceLock;
        static BED: OnceLock<Bed> = OnceLock::new();
        let bed = BED.get_or_init(Bed::new);
        let (mut near, far) = plain();
        let mut bytes = noise;
        if tls {
            // A record's header in front of it.
            let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
            bytes.splice(..0, [22, 3, 1, length[0], length[1]]);
        }
        near.write_all(&bytes).unwrap();
        near.shutdown(Shutdown::Write).unwrap();
        let server = Channel::from_fd_with(far.into(), &bed.server()).unwrap();
        let error = server.read_exact(&mut [0]).unwrap_err();
        prop_assert!(error.tls_failure().is_some(), "{}", error);
    }
}
