//! Bytes that arrive together with the end of the handshake, or in pieces.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use limosa_channel::{Channel, Uri};

use crate::bed::{Bed, SOON, listen};

/// Reads from a client whose every byte behind its first record is held back until it is gone, and passed on in two
/// pieces, the second one when the server has shaken hands, or cannot without it. Returns what the server read.
fn in_two_pieces(bed: &Bed, cut: impl FnOnce(&[u8]) -> usize + Send) -> Vec<u8> {
    let listener = listen(&bed.server());
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
            far.shutdown(Shutdown::Write).unwrap();
            let _ = back.join();
        });
        scope.spawn(move || {
            let client = Channel::connect(&uri, &bed.client()).unwrap();
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
                0 => return got,
                more => got.extend_from_slice(&buffer[..more]),
            }
        }
    })
}

#[test]
fn bytes_that_come_with_the_end_of_the_handshake_are_read_wherever_they_are_cut() {
    const RECORD: usize = 5 + 10 + 1 + 16;
    const CLOSE: usize = 5 + 2 + 1 + 16;
    let bed = Bed::new();
    // Within the handshake, at its end, within a record's header and body, at its end, within the close notification,
    // behind it.
    for behind in [-9, 0, 1, 5, 20, 31, 32, 33, 70, 96, 99, 120] {
        let got = in_two_pieces(&bed, |rest| {
            let handshake = rest.len() - 3 * RECORD - CLOSE;
            handshake.checked_add_signed(behind).unwrap()
        });
        assert_eq!(got, b"0123456789abcdefghijABCDEFGHIJ", "{behind}");
    }
}
