//! Servers that lie, break off, or say nothing: every request ends, with one reason.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use limosa_channel::Uri;
use limosa_nbd::protocol::error::ErrorCode;
use limosa_nbd::protocol::handshake::{OptionCode, OptionReply, greeting, push_option_reply};
use limosa_nbd::protocol::reply::Subject;
use limosa_nbd::protocol::{Headers, MAX_PAYLOAD};
use limosa_nbd::{ConnectOptions, NbdAddress, NbdStorage};
use limosa_storage::{Buffer, Storage as _, StorageError, ZeroOptions, block_on};
use proptest::prelude::*;
use tempfile::TempDir;

const SIZE: u64 = 1 << 20;
const SOON: Duration = Duration::from_secs(20);
/// Flags, flush, zeros, trim.
const FLAGS: u16 = 0x65;

/// The reply to a request with this cookie.
type Replies = Box<dyn Fn(u64) -> Vec<u8> + Send>;

/// A server of one client.
struct Liar {
    folder: TempDir,
    serving: Option<JoinHandle<()>>,
}

impl Liar {
    fn new(serve: impl FnOnce(UnixStream) + Send + 'static) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("s")).unwrap();
        let serving = thread::spawn(move || serve(listener.accept().unwrap().0));
        Self { folder, serving: Some(serving) }
    }

    /// One that agrees on these headers, and then does this with each request.
    fn agreeing(headers: Headers, replies: impl Fn(u64) -> Vec<u8> + Send + 'static) -> Self {
        Self::new(move |mut stream| {
            agree(&mut stream, headers, export(SIZE, FLAGS));
            while let Some(cookie) = request(&mut stream, headers) {
                if stream.write_all(&replies(cookie)).is_err() {
                    break;
                }
            }
        })
    }

    fn connect(&self) -> Result<Arc<NbdStorage>, StorageError> {
        self.connect_within(Duration::from_secs(5))
    }

    fn connect_within(&self, time: Duration) -> Result<Arc<NbdStorage>, StorageError> {
        let address = NbdAddress::new(Uri::Unix(self.folder.path().join("s")), "disk");
        NbdStorage::connect(&address, &ConnectOptions::default().timeouts(time, time))
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        // One that was never asked still listens.
        let _ = UnixStream::connect(Path::new(&self.folder.path().join("s")));
        if let Some(serving) = self.serving.take() {
            let _ = serving.join();
        }
    }
}

fn export(size: u64, flags: u16) -> Vec<u8> {
    [&0_u16.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
}

/// Receives an option. Returns its number.
fn option(stream: &mut UnixStream) -> Option<u32> {
    let mut header = [0; 16];
    stream.read_exact(&mut header).ok()?;
    let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
    stream.read_exact(&mut vec![0; usize::try_from(number(12)).unwrap()]).ok()?;
    Some(number(8))
}

/// The handshake of an honest server, whose export has this description.
fn agree(stream: &mut UnixStream, headers: Headers, description: Vec<u8>) {
    stream.write_all(&greeting()).unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
    while let Some(number) = option(stream) {
        let mut bytes = Vec::new();
        let has = match OptionCode::from_repr(number) {
            Some(OptionCode::ExtendedHeaders) => headers == Headers::Extended,
            Some(OptionCode::StructuredReply) => headers == Headers::Structured,
            Some(OptionCode::SetMetaContext) => {
                let context = [&9_u32.to_be_bytes()[..], b"base:allocation"].concat();
                push_option_reply(&mut bytes, number, OptionReply::MetaContext, &context);
                true
            }
            _ => true,
        };
        let go = number == OptionCode::Go as u32;
        if go {
            push_option_reply(&mut bytes, number, OptionReply::Info, &description);
        }
        push_option_reply(&mut bytes, number, if has { OptionReply::Ack } else { OptionReply::Unsupported }, b"");
        if stream.write_all(&bytes).is_err() || go {
            return;
        }
    }
}

/// Receives a request without a payload. Returns its cookie; `None`: it is the farewell, or nothing.
fn request(stream: &mut UnixStream, headers: Headers) -> Option<u64> {
    let mut header = vec![0; headers.request_len()];
    stream.read_exact(&mut header).ok()?;
    let is_farewell = header[6..8] == [0, 2];
    (!is_farewell).then(|| u64::from_be_bytes(header[8..16].try_into().unwrap()))
}

fn subject(headers: Headers, cookie: u64) -> Subject {
    Subject { headers, cookie, offset: 0 }
}

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
    let disk = stalled.connect_within(Duration::from_millis(100)).unwrap();
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

#[test]
fn long_requests_are_cut_into_what_the_server_takes() {
    let sizes =
        [&3_u16.to_be_bytes()[..], &512_u32.to_be_bytes(), &4096_u32.to_be_bytes(), &8192_u32.to_be_bytes()].concat();
    let server = Liar::new(move |mut stream| {
        stream.write_all(&greeting()).unwrap();
        stream.read_exact(&mut [0; 4]).unwrap();
        while let Some(number) = option(&mut stream) {
            let mut bytes = Vec::new();
            let go = number == OptionCode::Go as u32;
            if go {
                push_option_reply(&mut bytes, number, OptionReply::Info, &export(SIZE, FLAGS));
                push_option_reply(&mut bytes, number, OptionReply::Info, &sizes);
            }
            push_option_reply(&mut bytes, number, if go { OptionReply::Ack } else { OptionReply::Unsupported }, b"");
            stream.write_all(&bytes).unwrap();
            if go {
                break;
            }
        }
        let mut header = [0; 28];
        while stream.read_exact(&mut header).is_ok() && header[6..8] != [0, 2] {
            let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            let (at, length) = (number(20), usize::try_from(number(24)).unwrap());
            assert!(length <= 8192 && length % 512 == 0 && at % 512 == 0, "{length} at {at}");
            let cookie = u64::from_be_bytes(header[8..16].try_into().unwrap());
            let place = |byte: usize| u8::try_from((usize::try_from(at).unwrap() + byte) / 1024).unwrap();
            let data: Vec<u8> = (0..length).map(place).collect();
            stream.write_all(&[subject(Headers::Simple, cookie).done().as_bytes(), &data].concat()).unwrap();
        }
    });
    let disk = server.connect().unwrap();
    let found = Buffer::zeroed(60_000);
    block_on(disk.read(1000, found.clone().into())).unwrap();
    let expected: Vec<u8> = (1000..61_000_usize).map(|at| u8::try_from(at / 1024).unwrap()).collect();
    assert_eq!(found.to_vec(), expected);
    let unaligned = block_on(disk.write(1000, Buffer::zeroed(512).into())).unwrap_err();
    assert!(unaligned.source.to_string().contains("multiples of 512"), "{}", unaligned.source);
    assert!(u64::from(MAX_PAYLOAD) > 8192);
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
