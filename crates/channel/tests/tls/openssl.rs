//! Another implementation at the other end: OpenSSL's, which sends tickets behind its handshake and renews keys when
//! asked to.

use std::io::Write as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Options, Tls};

use crate::bed::{Bed, SOON, listen, with};

fn openssl(bed: &Bed, words: &[&str]) -> Command {
    let mut command = Command::new("openssl");
    command.args(words).current_dir(bed.folder()).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Writes to a program, and waits until it has read that: it takes what it reads at once for one word.
fn say(input: &mut ChildStdin, word: &str) {
    input.write_all(word.as_bytes()).unwrap();
    let end = Instant::now() + SOON;
    while rustix::io::ioctl_fionread(&*input).unwrap() != 0 {
        assert!(Instant::now() < end);
        thread::sleep(Duration::from_millis(1));
    }
}

/// Ends a process that was started, in every case.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_client_of_openssl_renews_its_keys_and_ours() {
    let bed = Bed::new();
    let listener = listen(&bed.server());
    let limosa_channel::Uri::Tcp { port, .. } = *listener.local_uri() else { unreachable!() };
    for cipher in ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"] {
        let at = format!("127.0.0.1:{port}");
        let words = [
            "s_client",
            "-connect",
            &at,
            "-CAfile",
            "ca-cert.pem",
            "-cert",
            "client-cert.pem",
            "-key",
            "client-key.pem",
            "-ciphersuites",
            cipher,
            "-tls1_3",
            "-verify_return_error",
            "-verify_ip",
            "127.0.0.1",
        ];
        let printed = bed.folder().join("printed");
        let mut client = openssl(&bed, &words);
        client.stdout(std::fs::File::create(&printed).unwrap());
        let mut client = Ended(client.spawn().unwrap());
        let mut input = client.0.stdin.take().unwrap();
        let server = listener.accept(Some(SOON)).unwrap();
        // A server shakes hands when it is used.
        server.write_all(b"hello").unwrap();
        let mut got = [0; 6];
        for round in 0..5 {
            say(&mut input, &format!("round{round}"));
            server.read_exact(&mut got).unwrap();
            assert_eq!(got, *format!("round{round}").as_bytes());
            server.write_all(&vec![7; 40_000]).unwrap();
            // It sends new keys, and asks for ours.
            say(&mut input, "K\n");
        }
        say(&mut input, "after\n");
        server.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"after\n");
        server.write_all(&[7; 10]).unwrap();
        // Everything of ours has opened there, and it ends because it received the close notification.
        drop(server);
        let end = Instant::now() + SOON;
        while client.0.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end);
            thread::sleep(Duration::from_millis(1));
        }
        let printed = std::fs::read(&printed).unwrap();
        assert_eq!(printed.iter().filter(|byte| **byte == 7).count(), 5 * 40_000 + 10, "{cipher}");
    }
}

#[test]
fn a_server_of_openssl_sends_tickets_which_are_no_data() {
    let bed = Bed::new();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let port = port.to_string();
    let words = [
        "s_server",
        "-accept",
        &port,
        "-cert",
        "server-cert.pem",
        "-key",
        "server-key.pem",
        "-CAfile",
        "ca-cert.pem",
        "-Verify",
        "1",
        "-verify_return_error",
        "-tls1_3",
        "-rev",
    ];
    let _server = Ended(openssl(&bed, &words).spawn().unwrap());
    let uri = format!("tcp:127.0.0.1:{port}").parse().unwrap();
    let options = Options { read_timeout: Some(SOON), ..with(Tls::client(bed.folder(), None).unwrap()) };
    let end = Instant::now() + SOON;
    let client = loop {
        match Channel::connect(&uri, &options) {
            Ok(client) => break client,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        thread::sleep(Duration::from_millis(10));
    };
    for word in ["abc\n", "0123456789\n"] {
        // What has come so far, two tickets, is nothing.
        assert_eq!(client.peek(&mut [0; 4]).unwrap(), None);
        client.write_all(word.as_bytes()).unwrap();
        let mut got = vec![0; word.len()];
        client.read_exact(&mut got).unwrap();
        let reversed: Vec<u8> = word.trim_end().bytes().rev().chain(*b"\n").collect();
        assert_eq!(got, reversed);
    }
}
