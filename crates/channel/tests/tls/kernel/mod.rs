//! Records that the kernel seals and opens.
//!
//! A kernel without TLS cannot show that; so the tests run where this one has it, and, all of them, in a Linux guest.

use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError, KernelTls, Listener, Options, Shutdown, Tls, TlsFailure, Uri};
use limosa_testkit::{LinuxGuest, Machine, guest_folder, qemu_skipped};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, SupportedCipherSuite};

use crate::bed::{Bed, SOON, connected, listen, look, pattern, plain, with};
use crate::hostile::{HANDSHAKE, through};
use crate::transfers::peek_and_read;

/// Set where the kernel has TLS for certain.
const HAS: &str = "LIMOSA_KERNEL_HAS_TLS";
/// More than all buffers between the ends hold, and as little as an emulated processor likes.
const MUCH: usize = 12 << 20;

/// The options of one end.
fn client(bed: &Bed, kernel: KernelTls) -> Options {
    with(Tls::client(bed.folder(), None).unwrap().with_kernel_tls(kernel))
}

fn server(bed: &Bed, kernel: KernelTls) -> Options {
    with(Tls::server(bed.folder(), true).unwrap().with_kernel_tls(kernel))
}

fn pair(bed: &Bed, at_client: KernelTls, at_server: KernelTls) -> (Channel, Channel) {
    connected(&server(bed, at_server), &client(bed, at_client)).unwrap()
}

/// Whether this kernel has TLS. If not, these tests run in a guest whose kernel has it.
fn has_tls() -> bool {
    let (near, _far) = plain();
    match attach(&near) {
        Ok(()) => true,
        Err(error) => {
            assert!(std::env::var_os(HAS).is_none(), "{error}");
            false
        }
    }
}

/// By the system's own word, not by the channel's.
#[allow(unsafe_code, reason = "an option that no library sets")]
fn attach(socket: &TcpStream) -> std::io::Result<()> {
    use std::os::fd::AsRawFd as _;
    let name = b"tls";
    // SAFETY: the name lives through the call, and is as long as is said.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_TCP, libc::TCP_ULP, name.as_ptr().cast(), 3) };
    if set == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Whether this kernel can renew keys: from Linux 6.14 on.
fn renews() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap(), numbers.next().unwrap()) >= (6, 14)
}

macro_rules! needs_kernel_tls {
    () => {
        if !has_tls() {
            // The guest runs it; where no guest may be started, this is left out, and says so.
            let _said = qemu_skipped();
            return;
        }
    };
}

mod writes;

/// Both directions at once; the first byte was the bed's.
fn exchange(client: &Channel, server: &Channel, much: usize) {
    let data = pattern(much);
    thread::scope(|scope| {
        for (near, far) in [(client, server), (server, client)] {
            scope.spawn(|| data.chunks(1_000_000).for_each(|piece| near.write_all(piece).unwrap()));
            scope.spawn(|| {
                let mut got = vec![0; much];
                far.read_exact(&mut got).unwrap();
                assert!(got == data);
            });
        }
    });
}

#[test]
fn one_end_or_both_in_the_kernel_carry_the_same_bytes() {
    needs_kernel_tls!();
    let bed = Bed::new();
    let settings = [(KernelTls::On, KernelTls::On), (KernelTls::On, KernelTls::Off), (KernelTls::Off, KernelTls::On)];
    for (at_client, at_server) in settings {
        let (client, server) = pair(&bed, at_client, at_server);
        exchange(&client, &server, MUCH);
        for (channel, wanted) in [(&client, at_client), (&server, at_server)] {
            let counters = channel.counters();
            let by_kernel = wanted == KernelTls::On;
            assert_eq!(channel.is_encrypted_by_kernel(Shutdown::Both), by_kernel);
            assert_eq!(counters.encrypted_by_kernel, if by_kernel { counters.bytes_out } else { 0 });
            // Bytes that came with the handshake were opened before the kernel had the key.
            let opened = if by_kernel { counters.bytes_in - counters.decrypted_by_kernel } else { 1 };
            assert!(opened <= 1, "{counters:?}");
        }
        drop(client);
        assert_eq!(server.read(&mut [0; 10]).unwrap(), 0);
    }
}

#[test]
fn lists_of_many_pieces_arrive_whole() {
    needs_kernel_tls!();
    let bed = Bed::new();
    let (client, server) = pair(&bed, KernelTls::On, KernelTls::On);
    // Headers, pages and other data; more of them than one record of the kernel's has room for.
    for lengths in [&[8, 4096][..], &[1, 2, 0, 3], &[5000, 1, 16_384, 0, 40_000]] {
        let lengths: Vec<usize> = lengths.iter().copied().cycle().take(600).collect();
        let data = pattern(lengths.iter().sum());
        let mut rest = data.as_slice();
        let list: Vec<_> = lengths.iter().map(|&n| IoSlice::new(rest.split_off(..n).unwrap())).collect();
        let mut places: Vec<Vec<u8>> = lengths.iter().rev().map(|&n| vec![0; n]).collect();
        let mut room: Vec<_> = places.iter_mut().map(|place| IoSliceMut::new(place)).collect();
        thread::scope(|scope| {
            scope.spawn(|| client.write_all_vectored(&list).unwrap());
            server.read_exact_vectored(&mut room).unwrap();
        });
        assert!(places.concat() == data);
    }
}

#[test]
fn it_is_taken_by_itself_only_where_it_can_renew_keys() {
    needs_kernel_tls!();
    let bed = Bed::new();
    let (client, server) = pair(&bed, KernelTls::Auto, KernelTls::Auto);
    exchange(&client, &server, 1 << 20);
    for channel in [&client, &server] {
        assert_eq!(channel.is_encrypted_by_kernel(Shutdown::Both), renews());
    }
}

#[test]
fn a_key_is_used_no_longer_than_it_may() {
    needs_kernel_tls!();
    const LIMIT: u64 = 400;
    // Less than a sixteenth, so that each is a record.
    const PIECE: [u8; 20] = [7; 20];
    let bed = Bed::new();
    let tls = Tls::client(bed.folder(), None).unwrap().with_kernel_tls(KernelTls::On).key_update_after(LIMIT);
    let (client, server) = connected(&server(&bed, KernelTls::On), &with(tls)).unwrap();
    let mut write = 0;
    let error = loop {
        match client.write_all(&PIECE) {
            Ok(()) => write += 1,
            Err(error) => break Some(error),
        }
        if write > 10 * LIMIT {
            break None;
        }
    };
    if renews() {
        assert!(error.is_none(), "{error:?}");
    } else {
        let line = error.unwrap().to_string();
        assert!(line.contains("the key has reached its usage limit") && !line.contains('\n'), "{line}");
        // The bed's write is one as well; and the last ones are not begun, because each might be a record for each of
        // its bytes.
        assert!(write + 1 < LIMIT && write + 1 >= LIMIT - 1 - PIECE.len() as u64, "{write}");
    }
    // What was written has arrived, all of it; and it is not taken for the end.
    let mut got = vec![0; usize::try_from(write).unwrap() * PIECE.len()];
    server.read_exact(&mut got).unwrap();
    assert!(got.iter().all(|byte| *byte == 7));
    if !renews() {
        drop(client);
        let error = server.read(&mut got).unwrap_err();
        assert!(error.lacks_close_notify(), "{error}");
    }
}

#[test]
fn both_ends_renew_their_keys_while_they_write_and_read() {
    needs_kernel_tls!();
    if !renews() {
        return;
    }
    let bed = Bed::new();
    let with = |tls: Tls| with(tls.with_kernel_tls(KernelTls::On).key_update_after(2048));
    let (at_client, at_server) = (Tls::client(bed.folder(), None), Tls::server(bed.folder(), true));
    let (client, server) = connected(&with(at_server.unwrap()), &with(at_client.unwrap())).unwrap();
    exchange(&client, &server, 1 << 20);
    drop(client);
    assert_eq!(server.read(&mut [0; 10]).unwrap(), 0);
}

#[test]
fn a_large_write_is_counted_by_what_the_kernel_says() {
    needs_kernel_tls!();
    let bed = Bed::new();
    // A record for each of its bytes it would not be allowed.
    let tls = Tls::client(bed.folder(), None).unwrap().with_kernel_tls(KernelTls::On).key_update_after(1 << 19);
    let (client, server) = connected(&server(&bed, KernelTls::Off), &with(tls)).unwrap();
    let data = pattern(4 << 20);
    thread::scope(|scope| {
        scope.spawn(|| client.write_all(&data).unwrap());
        let mut got = vec![0; data.len()];
        server.read_exact(&mut got).unwrap();
        assert!(got == data);
    });
}

#[test]
fn a_peer_that_renews_its_key_is_followed_or_refused_in_plain_words() {
    needs_kernel_tls!();
    let bed = Bed::new();
    let tls = Tls::client(bed.folder(), None).unwrap().with_kernel_tls(KernelTls::Off).key_update_after(20);
    let (client, server) = connected(&server(&bed, KernelTls::On), &with(tls)).unwrap();
    let data = pattern(100 * 1000);
    for piece in data.chunks(1000) {
        client.write_all(piece).unwrap();
    }
    let mut got = vec![0; data.len()];
    if renews() {
        server.read_exact(&mut got).unwrap();
        assert!(got == data);
        return;
    }
    let mut have = 0;
    let error = loop {
        match server.read(&mut got[have..]) {
            Ok(more) => have += more,
            Err(error) => break error,
        }
    };
    // Nineteen records, one of them the bed's, and the word that the next ones are sealed otherwise.
    assert_eq!(have, 18 * 1000, "{error}");
    assert!(got[..have] == data[..have]);
    let line = error.to_string();
    assert!(line.contains("the peer renewed its key") && !line.contains('\n'), "{line}");
    // And again, asked by either end.
    assert!(server.read_exact(&mut [0]).is_err() && server.peek(&mut [0]).unwrap() == Some(0));
}

#[test]
fn an_end_is_distinguished_from_a_cut() {
    needs_kernel_tls!();
    let bed = Bed::new();
    let mut got = [0; 10];
    for (at_client, at_server) in [(KernelTls::On, KernelTls::On), (KernelTls::Off, KernelTls::On)] {
        // Announced, in one direction.
        let (client, server) = pair(&bed, at_client, at_server);
        client.write_all(b"last").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(server.read(&mut got).unwrap(), 4);
        for _ in 0..2 {
            assert_eq!(server.read(&mut got).unwrap(), 0);
            assert_eq!(server.peek(&mut got).unwrap(), Some(0));
        }
        server.write_all(b"still").unwrap();
        client.read_exact(&mut got[..5]).unwrap();
        assert!(client.write_all(b"no").is_err());
        // Not announced.
        let (client, server) = pair(&bed, at_client, at_server);
        client.write_all(b"last").unwrap();
        rustix::net::shutdown(client.as_fd(), rustix::net::Shutdown::Write).unwrap();
        assert_eq!(server.read(&mut got).unwrap(), 4);
        for _ in 0..2 {
            let error = server.read(&mut got).unwrap_err();
            assert_eq!(error.tls_failure(), Some(&TlsFailure::Truncated { before_first_byte: false }), "{error}");
        }
        assert_eq!(server.peek(&mut got).unwrap(), Some(0));
    }
}

#[test]
fn a_connection_that_is_reset_has_not_ended() {
    needs_kernel_tls!();
    let bed = Bed::new();
    let (client, server) = pair(&bed, KernelTls::Off, KernelTls::On);
    server.write_all(b"never read").unwrap();
    look(&client).unwrap();
    rustix::net::sockopt::set_socket_linger(client.as_fd(), Some(Duration::ZERO)).unwrap();
    // Not by dropping the channel, which would say that this is the end.
    rustix::net::connect_unspec(client.as_fd()).unwrap();
    let error = server.read_exact(&mut [0]).unwrap_err();
    assert_eq!(error.tls_failure(), Some(&TlsFailure::Reset { before_first_byte: false }), "{error}");
    assert!(error.is_closed() && !error.lacks_close_notify(), "{error}");
}

#[test]
fn an_interrupted_write_is_no_end() {
    needs_kernel_tls!();
    let bed = Bed::new();
    let (client, server) = pair(&bed, KernelTls::On, KernelTls::On);
    client.set_timeouts(None, Some(Duration::from_millis(50))).unwrap();
    let data = pattern(1 << 20);
    let error = loop {
        if let Err(error) = client.write_all(&data) {
            break error;
        }
    };
    assert!(error.is_timeout(), "{error}");
    let (mut all, mut got) = (Vec::new(), vec![0; 1 << 20]);
    let error = thread::scope(|scope| {
        // There is room again while the channel is dropped: a last word would come through.
        scope.spawn(|| drop(client));
        loop {
            match server.read(&mut got) {
                Ok(0) => panic!("taken for an end"),
                Ok(more) => all.extend_from_slice(&got[..more]),
                Err(error) => break error,
            }
        }
    });
    assert!(error.lacks_close_notify(), "{error}");
    assert!(all.chunks(data.len()).all(|piece| data.starts_with(piece)));
}

#[test]
fn nothing_that_was_changed_on_its_way_is_taken() {
    needs_kernel_tls!();
    type Change = fn(u64, &mut Vec<u8>) -> bool;
    const AT: u64 = HANDSHAKE + 10;
    // The type that a record has on the outside is not among them: the kernel goes by the one that is sealed.
    let changes: [(&str, Change); 6] = [
        ("one bit", |number, record| {
            if number == AT {
                record[100] ^= 4;
            }
            true
        }),
        ("left out", |number, record| {
            if number == AT {
                record.clear();
            }
            true
        }),
        ("twice", |number, record| {
            if number == AT {
                record.extend(record.clone());
            }
            true
        }),
        ("cut", |number, _| number < AT),
        ("cut within", |number, record| {
            if number == AT {
                record.truncate(50);
            }
            number <= AT
        }),
        ("too long", |number, record| {
            if number == AT {
                record[3] = 0x7f;
            }
            true
        }),
    ];
    let bed = Bed::new();
    let data: Vec<u8> = (0..50_000_u32).map(|at| at.to_le_bytes()[1]).collect();
    let (server, client) = (server(&bed, KernelTls::On), client(&bed, KernelTls::On));
    let (got, end) = through(&server, &client, &data, |_, _| true);
    assert!(end.is_none() && got == data, "{end:?}");
    for (what, change) in changes {
        let (got, error) = through(&server, &client, &data, change);
        let error = error.unwrap_or_else(|| panic!("{what}: taken for an end"));
        let failure = error.tls_failure().unwrap_or_else(|| panic!("{what}: {error}"));
        match what {
            "cut" | "cut within" => assert!(error.lacks_close_notify(), "{what}: {error}"),
            "too long" => assert!(matches!(failure, TlsFailure::Protocol(_)), "{what}: {error}"),
            _ => assert_eq!(failure, &TlsFailure::BadRecord, "{what}"),
        }
        assert!(got.len() < data.len() && data.starts_with(&got) && got.len() > 1000, "{what}: {} bytes", got.len());
    }
}

#[test]
fn what_is_peeked_at_is_got_all_the_same() {
    needs_kernel_tls!();
    let bed = Bed::new();
    let (client, server) = pair(&bed, KernelTls::On, KernelTls::On);
    peek_and_read(&client, &server);
    drop(client);
    look(&server).unwrap();
    assert_eq!(server.peek(&mut [0; 4]).unwrap(), Some(0));
}

#[test]
fn a_shutdown_wakes_reads_and_writes() {
    needs_kernel_tls!();
    let bed = Bed::new();
    let (client, _server) = pair(&bed, KernelTls::On, KernelTls::On);
    thread::scope(|scope| {
        let reads = scope.spawn(|| client.read_exact(&mut [0]));
        let writes = scope.spawn(|| client.write_all(&vec![0; 64 << 20]));
        thread::sleep(Duration::from_millis(500));
        client.shutdown(Shutdown::Both).unwrap();
        for ended in [reads.join().unwrap(), writes.join().unwrap()] {
            let error = ended.unwrap_err();
            assert!(error.is_shut_down(), "{error}");
        }
    });
}

#[test]
fn a_read_without_data_times_out() {
    needs_kernel_tls!();
    let bed = Bed::new();
    let (client, server) = pair(&bed, KernelTls::On, KernelTls::On);
    server.set_timeouts(Some(Duration::from_millis(50)), None).unwrap();
    assert!(server.read_exact(&mut [0]).unwrap_err().is_timeout());
    client.write_all(b"half").unwrap();
    assert!(server.read_exact(&mut [0; 5]).unwrap_err().is_timeout());
    client.write_all(b"more").unwrap();
    let mut got = [0; 4];
    server.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"more");
}

/// A client whose every byte behind its first record is held back until it is gone, and passed on in two pieces, the
/// second one when the server has shaken hands, or cannot without it. What the server got, and how much of that the
/// kernel has opened.
fn in_two_pieces(bed: &Bed, cut: impl FnOnce(&[u8]) -> usize + Send) -> (Vec<u8>, u64) {
    let listener = listen(&server(bed, KernelTls::On));
    let Uri::Tcp { port, .. } = *listener.local_uri() else { unreachable!() };
    let between = TcpListener::bind("127.0.0.1:0").unwrap();
    let uri = format!("tcp:{}", between.local_addr().unwrap()).parse().unwrap();
    let (tell, report) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut near = between.accept().unwrap().0;
            let mut far = TcpStream::connect(("127.0.0.1", port)).unwrap();
            far.set_nodelay(true).unwrap();
            let mut first = vec![0; 5];
            near.read_exact(&mut first).unwrap();
            let length = usize::from(u16::from_be_bytes([first[3], first[4]]));
            first.resize(5 + length, 0);
            near.read_exact(&mut first[5..]).unwrap();
            far.write_all(&first).unwrap();
            let (mut from, mut to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            let back = thread::spawn(move || std::io::copy(&mut from, &mut to));
            let mut rest = Vec::new();
            near.read_to_end(&mut rest).unwrap();
            let at = cut(&rest);
            far.write_all(&rest[..at]).unwrap();
            let _ = report.recv_timeout(Duration::from_secs(2));
            far.write_all(&rest[at..]).unwrap();
            far.shutdown(std::net::Shutdown::Write).unwrap();
            let _ = back.join();
        });
        scope.spawn(move || {
            let client = Channel::connect(&uri, &client(bed, KernelTls::Off)).unwrap();
            for piece in [b"0123456789", b"abcdefghij", b"ABCDEFGHIJ"] {
                client.write_all(piece).unwrap();
            }
        });
        let server = listener.accept(Some(SOON)).unwrap();
        server.complete_handshake().unwrap();
        // It may be too late.
        let _ = tell.send(());
        let (mut got, mut buffer) = (Vec::new(), [0; 64]);
        loop {
            match server.read(&mut buffer).unwrap() {
                0 => break,
                more => got.extend_from_slice(&buffer[..more]),
            }
        }
        (got, server.counters().decrypted_by_kernel)
    })
}

#[test]
fn bytes_that_come_with_the_end_of_the_handshake_are_opened_wherever_they_are_cut() {
    needs_kernel_tls!();
    const RECORD: usize = 5 + 10 + 1 + 16;
    const CLOSE: usize = 5 + 2 + 1 + 16;
    let bed = Bed::new();
    // Within the handshake, at its end, within a record's header and body, at its end, within the last word, behind it.
    let cuts = [(0, 30), (1, 20), (5, 20), (20, 20), (31, 20), (32, 20), (33, 10), (70, 0), (96, 0), (99, 0), (120, 0)];
    for (behind, by_kernel) in [(-9, 0)].into_iter().chain(cuts) {
        let (got, opened) = in_two_pieces(&bed, |rest| {
            let handshake = rest.len() - 3 * RECORD - CLOSE;
            usize::try_from(isize::try_from(handshake).unwrap() + behind).unwrap()
        });
        assert_eq!(got, b"0123456789abcdefghijABCDEFGHIJ", "{behind}");
        // What was read with the handshake, and the rest of a record that began there, are opened by this process.
        assert_eq!(opened, by_kernel, "{behind}");
    }
}

fn provider(suite: SupportedCipherSuite) -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider { cipher_suites: vec![suite], ..ring::default_provider() })
}

fn credentials(bed: &Bed, end: &str) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let path = |what: &str| bed.folder().join(format!("{end}-{what}.pem"));
    let chain = CertificateDer::pem_file_iter(path("cert")).unwrap().map(Result::unwrap).collect();
    (chain, PrivateKeyDer::from_pem_file(path("key")).unwrap())
}

#[test]
fn another_implementation_at_the_other_end_is_understood_in_every_cipher() {
    needs_kernel_tls!();
    use ring::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256};
    let bed = Bed::new();
    let data = pattern(3 << 20);
    for suite in [TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256] {
        let versions = [&rustls::version::TLS13];
        // It listens, sends tickets behind its handshake, and answers.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!("tcp:{}", listener.local_addr().unwrap()).parse().unwrap();
        let (chain, key) = credentials(&bed, "server");
        let config = ServerConfig::builder_with_provider(provider(suite)).with_protocol_versions(&versions).unwrap();
        let config = config.with_no_client_auth().with_single_cert(chain, key).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut session = ServerConnection::new(Arc::new(config)).unwrap();
                let mut socket = listener.accept().unwrap().0;
                let mut stream = rustls::Stream::new(&mut session, &mut socket);
                let mut got = vec![0; data.len()];
                stream.read_exact(&mut got).unwrap();
                assert!(got == data);
                stream.write_all(&got).unwrap();
                stream.conn.send_close_notify();
                stream.flush().unwrap();
                stream.conn.write_tls(stream.sock).ok();
            });
            let channel = Channel::connect(&uri, &client(&bed, KernelTls::On)).unwrap();
            channel.write_all(&data).unwrap();
            let mut got = vec![0; data.len()];
            channel.read_exact(&mut got).unwrap();
            assert!(got == data && channel.is_encrypted_by_kernel(Shutdown::Both), "{suite:?}");
            assert_eq!(channel.read(&mut got).unwrap(), 0, "{suite:?}");
        });
        // It connects.
        let listener = listen(&server(&bed, KernelTls::On));
        let Uri::Tcp { port, .. } = *listener.local_uri() else { unreachable!() };
        let (chain, key) = credentials(&bed, "client");
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(bed.folder().join("ca-cert.pem")).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(provider(suite)).with_protocol_versions(&versions).unwrap();
        let config = config.with_root_certificates(roots).with_client_auth_cert(chain, key).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut session = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
                let mut socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
                let mut stream = rustls::Stream::new(&mut session, &mut socket);
                let (first, second) = data.split_at(data.len() / 2);
                stream.write_all(first).unwrap();
                if renews() {
                    // And asks for the channel's.
                    stream.conn.refresh_traffic_keys().unwrap();
                }
                stream.write_all(second).unwrap();
                let mut got = vec![0; data.len()];
                stream.read_exact(&mut got).unwrap();
                assert!(got == data);
                // The channel's last word.
                assert_eq!(stream.read(&mut got).unwrap(), 0);
            });
            let channel = listener.accept(Some(SOON)).unwrap();
            let mut got = vec![0; data.len()];
            channel.read_exact(&mut got).unwrap();
            channel.write_all(&got).unwrap();
            assert!(got == data && channel.is_encrypted_by_kernel(Shutdown::Both), "{suite:?}");
        });
    }
}

#[test]
fn a_socket_that_does_not_wait_is_sealed_here() {
    needs_kernel_tls!();
    let bed = Bed::new();
    let (near, far) = plain();
    near.set_nonblocking(true).unwrap();
    let named = |kernel| with(Tls::client(bed.folder(), Some("localhost")).unwrap().with_kernel_tls(kernel));
    let again = near.try_clone().unwrap();
    let error = Channel::from_fd_with(again.into(), &named(KernelTls::On)).unwrap_err().to_string();
    assert!(error.contains("non-blocking mode"), "{error}");
    thread::scope(|scope| {
        scope.spawn(|| {
            let server = Channel::from_fd_with(far.into(), &server(&bed, KernelTls::On)).unwrap();
            let mut got = vec![0; 100_000];
            server.read_exact(&mut got).unwrap();
            server.write_all(&got).unwrap();
        });
        let client = Channel::from_fd_with(near.into(), &named(KernelTls::Auto)).unwrap();
        let data = pattern(100_000);
        client.write_all(&data).unwrap();
        let mut got = vec![0; 100_000];
        client.read_exact(&mut got).unwrap();
        assert!(
            got == data
                && !client.is_encrypted_by_kernel(Shutdown::Write)
                && !client.is_encrypted_by_kernel(Shutdown::Read)
        );
    });
}

#[test]
fn kernel_tls_that_is_demanded_and_missing_is_refused_before_connecting() {
    if has_tls() {
        return;
    }
    let bed = Bed::new();
    let refused = |refused: ChannelError| {
        let line = refused.to_string();
        assert!(line.contains("this kernel has no TLS, or its module is not loaded"), "{line}");
        assert!(!line.contains('\n'), "{line}");
    };
    // No process listens there, which would be reported otherwise.
    let unused = "tcp:127.0.0.1:1".parse().unwrap();
    refused(Channel::connect(&unused, &client(&bed, KernelTls::On)).unwrap_err());
    refused(Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &server(&bed, KernelTls::On)).unwrap_err());
    let (near, _far) = plain();
    let named = Tls::client(bed.folder(), Some("localhost")).unwrap().with_kernel_tls(KernelTls::On);
    refused(Channel::from_fd_with(near.into(), &with(named)).unwrap_err());
    // Who does not demand it does without.
    let (client, server) = pair(&bed, KernelTls::Auto, KernelTls::Auto);
    exchange(&client, &server, 1 << 20);
    for channel in [&client, &server] {
        assert!(channel.is_encrypted());
        assert!(!channel.is_encrypted_by_kernel(Shutdown::Read) && !channel.is_encrypted_by_kernel(Shutdown::Write));
        assert_eq!((channel.counters().encrypted_by_kernel, channel.counters().decrypted_by_kernel), (0, 0));
    }
}

#[test]
fn what_is_no_tcp_connection_is_refused_if_the_kernel_is_demanded() {
    needs_kernel_tls!();
    let bed = Bed::new();
    let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
    let named = Tls::client(bed.folder(), Some("localhost")).unwrap().with_kernel_tls(KernelTls::On);
    let line = Channel::from_fd_with(near.into(), &with(named)).unwrap_err().to_string();
    assert!(line.contains("its socket is not a TCP connection") && !line.contains('\n'), "{line}");
}

/// All of the above, where the kernel has TLS for certain.
#[test]
fn in_a_guest_whose_kernel_has_tls() {
    if qemu_skipped() || std::env::var_os(HAS).is_some() {
        return;
    }
    let folder = guest_folder().unwrap();
    let unpacked = folder.join("modules/tls.ko").is_file() || folder.join("contents").is_file();
    assert!(unpacked, "the Linux guest was unpacked without its kernel's TLS: run `cargo xtask setup`");
    let me = std::env::current_exe().unwrap();
    let name = me.file_name().unwrap().to_str().unwrap().to_owned();
    let guest = LinuxGuest { programs: vec![me], tls: true, ..LinuxGuest::default() };
    let vm = Machine::linux(guest).memory(512 << 20).start().unwrap();
    vm.wait_counts(1).unwrap();
    vm.shell(&format!("ip link set lo up && export {HAS}=1 RUST_BACKTRACE=0")).unwrap();
    // Its own status says no more than what it prints.
    // Translated and on a busy host, all of them take minutes.
    let line = format!("host {name} --test-threads 1 kernel:: || true");
    let said = vm.shell_within(&line, Duration::from_mins(10)).unwrap();
    said.iter().for_each(|line| println!("{line}"));
    let result = said.iter().find(|line| line.starts_with("test result: ok")).expect("all is well in the guest");
    // None was left out.
    let count = result.split_whitespace().filter_map(|word| word.parse::<u32>().ok()).next().unwrap();
    assert!(count >= 24, "{result}");
}
