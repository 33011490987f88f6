//! Servers that lie, break off, or say nothing: every request ends, with one reason.

use std::io::{Read as _, Write as _};
use std::thread;
use std::time::{Duration, Instant};

use limosa_nbd::NbdStorage;
use limosa_nbd::protocol::Headers;
use limosa_nbd::protocol::error::ErrorCode;
use limosa_nbd::protocol::handshake::{OptionReply, greeting, push_option_reply};
use limosa_nbd::protocol::reply::Subject;
use limosa_storage::{Buffer, Storage as _, ZeroOptions, block_on};
use proptest::prelude::*;

use crate::bed::{FLAGS, Liar, Replies, SIZE, SOON, agree, export, option, request, subject};

/// Reads 4096 bytes at 0. Returns why it failed.
fn read(disk: &NbdStorage) -> Result<Vec<u8>, String> {
    let found = Buffer::zeroed(4096);
    let outcome = block_on(disk.read(0, found.clone().into()));
    outcome.map(|()| found.to_vec()).map_err(|error| format!("{error}: {}", error.source))
}

#[test]
fn an_honest_server_is_believed_in_every_form() {
    for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
        let server = Liar::agreeing(headers, move |cookie| {
            let head = subject(headers, cookie).data(0, 4096, true);
            [head.as_bytes(), &[7; 4096]].concat()
        });
        let disk = server.connect().unwrap();
        assert_eq!((disk.length().unwrap(), read(&disk)), (SIZE, Ok(vec![7; 4096])), "{headers:?}");
    }
}

#[test]
fn a_reply_that_lies_ends_the_connection_with_its_reason() {
    let structured = |make: fn(&Subject) -> Vec<u8>| move |cookie| make(&subject(Headers::Structured, cookie));
    let data = |at: u64, length: usize, last: bool| {
        move |reply: &Subject| [reply.data(at, length, last).as_bytes(), &vec![1; length]].concat()
    };
    let cases: [(Replies, &str); 9] = [
        (Box::new(|_| vec![0; 64]), "does not begin as one"),
        (
            Box::new(|cookie| subject(Headers::Structured, cookie ^ 1).done().as_bytes().to_vec()),
            "no request in flight",
        ),
        (Box::new(|cookie| subject(Headers::Simple, cookie).done().as_bytes().to_vec()), "without chunks"),
        (Box::new(structured(|reply| reply.done().as_bytes().to_vec())), "without some of its bytes"),
        (
            Box::new(move |cookie| data(8192, 512, true)(&subject(Headers::Structured, cookie))),
            "outside of the request",
        ),
        (Box::new(move |cookie| data(0, 8192, true)(&subject(Headers::Structured, cookie))), "too long"),
        (
            Box::new(move |cookie| {
                let reply = subject(Headers::Structured, cookie);
                [data(0, 4096, false)(&reply), data(4095, 1, true)(&reply)].concat()
            }),
            "bytes twice",
        ),
        (Box::new(structured(|reply| reply.status(9, &[(4096, 0)], true))), "a kind that the request does not expect"),
        (Box::new(structured(|reply| reply.hole(4000, 97, true).as_bytes().to_vec())), "outside of the request"),
    ];
    for (replies, says) in cases {
        let server = Liar::agreeing(Headers::Structured, replies);
        let disk = server.connect().unwrap();
        let first = read(&disk).unwrap_err();
        assert!(first.contains("breaks the protocol") && first.contains(says), "{says}: {first}");
        // The same reason for what comes later, and at once.
        assert_eq!(read(&disk).unwrap_err(), first);
        assert!(block_on(disk.flush()).is_err() && disk.extents(0..SIZE).is_err());
    }
}

#[test]
fn a_request_fails_and_the_connection_continues() {
    for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
        let server = Liar::agreeing(headers, move |cookie| {
            subject(headers, cookie).failed(ErrorCode::NoSpace).as_bytes().to_vec()
        });
        let disk = server.connect().unwrap();
        for _ in 0..2 {
            let how = ZeroOptions { unmap: true, only_fast: false };
            let error = block_on(disk.write_zeroes(0..4096, how)).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{headers:?}");
            assert!(read(&disk).unwrap_err().contains("cannot read"));
        }
    }
}

#[test]
fn extents_are_bounded_by_the_export() {
    let server = Liar::agreeing(Headers::Extended, |cookie| {
        subject(Headers::Extended, cookie).status(9, &[(512, 3), (u64::MAX, 0), (u64::MAX, 3)], true)
    });
    let disk = server.connect().unwrap();
    let extents = disk.extents(256..SIZE + 512).unwrap();
    let ranges: Vec<_> = extents.iter().map(|extent| (extent.range.clone(), extent.kind.is_zero())).collect();
    assert_eq!(ranges, [(256..768, true), (768..SIZE, false), (SIZE..SIZE + 512, true)]);
}

#[test]
fn a_handshake_that_lies_is_refused() {
    let with = |description: Vec<u8>| Liar::new(move |mut stream| agree(&mut stream, Headers::Extended, description));
    let greeted = |bytes: Vec<u8>| {
        Liar::new(move |mut stream| {
            let _ = stream.write_all(&bytes);
            // Until the client is gone.
            let _ = stream.read_to_end(&mut Vec::new());
        })
    };
    let replied = |reply: Vec<u8>| [&greeting()[..], &reply].concat();
    let mut other = Vec::new();
    push_option_reply(&mut other, 7, OptionReply::Ack, b"");
    let long =
        [&0x0003_e889_0455_65a9_u64.to_be_bytes()[..], &[0, 0, 0, 11, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff]].concat();
    let mut many = Vec::new();
    (0..100).for_each(|_| push_option_reply(&mut many, 11, OptionReply::Server, b"x"));
    let mut tls = Vec::new();
    push_option_reply(&mut tls, 11, OptionReply::TlsRequired, b"no\x1b[31m");
    for (server, says) in [
        (with(export(u64::MAX, 1)), "more than files can have"),
        (with(vec![0, 0, 1]), "cut off"),
        (with(vec![]), "does not describe"),
        (greeted(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()), "greeting"),
        (greeted(replied(vec![0; 20])), "does not begin as one"),
        (greeted(replied(other)), "does not begin as one"),
        (greeted(replied(long)), "too long"),
        (greeted(replied(many)), "too many replies"),
        (greeted(replied(tls)), "requires TLS (\"no\\u{1b}[31m\")"),
    ] {
        let error = server.connect().unwrap_err().source.to_string();
        assert!(error.contains(says) && !error.contains('\n'), "{says}: {error}");
    }
}

#[test]
fn a_server_that_says_nothing_is_given_up() {
    let silent = Liar::new(|mut stream| {
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let began = Instant::now();
    assert!(silent.connect_within(Duration::from_millis(100)).is_err());
    let stalled = Liar::agreeing(Headers::Extended, |_| Vec::new());
    let disk = stalled.silent_for(Duration::from_millis(100)).unwrap();
    // An idle connection has no time limit.
    thread::sleep(Duration::from_millis(300));
    assert!(read(&disk).is_err() && began.elapsed() < SOON);
}

#[test]
fn a_handshake_that_drips_has_its_time() {
    let dripping = Liar::new(|mut stream| {
        stream.write_all(&greeting()).unwrap();
        stream.read_exact(&mut [0; 4]).unwrap();
        let number = option(&mut stream).unwrap();
        let mut bytes = Vec::new();
        push_option_reply(&mut bytes, number, OptionReply::Unsupported, &[b'x'; 4000]);
        for byte in bytes {
            if stream.write_all(&[byte]).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    });
    let begun = Instant::now();
    assert!(dripping.connect_within(Duration::from_millis(400)).is_err());
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_bytes_end_every_request(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        plausible: bool,
        kind in prop_oneof![0..7_u16, 0x8000..0x8003_u16],
        length in prop_oneof![0..100_u32, any::<u32>()],
        form in 0..3_usize,
    ) {
        let headers = [Headers::Simple, Headers::Structured, Headers::Extended][form];
        let server = Liar::new(move |mut stream| {
            agree(&mut stream, headers, export(SIZE, FLAGS));
            let Some(cookie) = request(&mut stream, headers) else { return };
            let mut reply = bytes;
            if plausible && headers.has_chunks() {
                let done = subject(headers, cookie).done();
                let mut head = done.as_bytes().to_vec();
                head[6..8].copy_from_slice(&kind.to_be_bytes());
                let end = head.len();
                head[end - 4..].copy_from_slice(&length.to_be_bytes());
                reply = [head, reply].concat();
            }
            let _ = stream.write_all(&reply);
        });
        let disk = server.connect().unwrap();
        let _ = read(&disk);
        prop_assert!(block_on(disk.flush()).is_err(), "it is gone");
    }
}
