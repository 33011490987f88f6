use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use limosa_remote::{RemoteObject, RemoteOptions, UploadOptions, upload};
use limosa_storage::Storage as _;
use limosa_testkit::{HttpFault, HttpRequest, ObjectServerKind, stores_skipped};

use crate::{Bed, counted, pattern, read, said, url};

/// Numbers at random, which follow from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn seed() -> u64 {
    let seed = std::env::var("LIMOSA_CHAOS_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("LIMOSA_CHAOS_SEED={seed}");
    seed
}

#[test]
fn bytes_are_right_under_faults_at_random() {
    if stores_skipped() {
        return;
    }
    let seed = seed();
    for kind in ObjectServerKind::ALL {
        let bed = Bed::new(kind);
        let bytes = pattern(5, (6 << 20) + 1234);
        bed.put("k", &bytes);
        let mut random = Random(seed);
        bed.proxy.set_faults(move |_| match random.below(10) {
            0 => HttpFault::Drop,
            1 => HttpFault::LoseAnswer,
            2 => HttpFault::Cut(random.below(300_000)),
            3 => HttpFault::Status(503, "SlowDown"),
            4 => HttpFault::Status(500, "InternalError"),
            5 => HttpFault::Status(429, "TooManyRequests"),
            6 => HttpFault::Delay(Duration::from_millis(random.below(100))),
            _ => HttpFault::None,
        });
        let mut options = bed.options();
        options.memory = 1 << 20;
        let object = RemoteObject::open(&url("k"), &options).unwrap();
        let mut random = Random(seed ^ 1);
        for _ in 0..25 {
            let offset = random.below(bytes.len() as u64 - 1);
            let length = 1 + random.below((bytes.len() as u64 - offset).min(2 << 20));
            let (from, to) = (usize::try_from(offset).unwrap(), usize::try_from(offset + length).unwrap());
            assert_eq!(read(&*object, offset, to - from).unwrap(), bytes[from..to], "seed {seed}");
        }
        let counters = object.counters();
        assert!(counters.retries > 0 && counters.requests > counters.retries, "{counters:?}");
    }
}

#[test]
fn a_body_that_always_breaks_off_is_resumed_where_it_ended() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(6, 1 << 20);
    bed.put("k", &bytes);
    let object = RemoteObject::open(&url("k"), &bed.options()).unwrap();
    bed.proxy.set_faults(|_| HttpFault::Cut(100_000));
    assert_eq!(read(&*object, 0, bytes.len()).unwrap(), bytes);
    // Three blocks of 262144 bytes, 100000 with each request, and none of them twice.
    assert_eq!(object.counters().bytes, 1 << 20);
}

#[test]
fn an_object_that_is_replaced_while_it_is_read_is_an_error_and_never_a_mixture() {
    if stores_skipped() {
        return;
    }
    for kind in ObjectServerKind::ALL {
        let bed = Bed::new(kind);
        let (old, new) = (pattern(7, 4 << 20), pattern(8, 4 << 20));
        bed.put("k", &old);
        let object = RemoteObject::open(&url("k"), &bed.options()).unwrap();
        assert_eq!(read(&*object, 0, 1 << 20).unwrap(), old[..1 << 20]);
        bed.put("k", &new);
        let error = read(&*object, 2 << 20, 4096).unwrap_err();
        let expected = "cannot read s3://bucket/k at 0x200000 (4096 bytes): the object was replaced since it was opened: open it again";
        assert_eq!(said(&error), expected);
        assert_eq!(read(&*object, 0, 1 << 20).unwrap(), old[..1 << 20], "what came before is still the old one");
        let again = RemoteObject::open(&url("k"), &bed.options()).unwrap();
        assert_eq!(read(&*again, 0, new.len()).unwrap(), new);
    }
}

#[test]
fn a_server_that_ignores_conditions_cannot_mix_objects_either() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    bed.put("k", &pattern(7, 1 << 20));
    let object = RemoteObject::open(&url("k"), &bed.options()).unwrap();
    for (head, expected) in [
        (
            "206 Partial\r\nETag: \"other\"\r\nLast-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\nContent-Range: bytes 262144-524287/1048576",
            "was replaced",
        ),
        (
            "206 Partial\r\nETag: ETAG\r\nLast-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\nContent-Range: bytes 262144-524287/1048577",
            "was replaced",
        ),
        (
            "206 Partial\r\nETag: ETAG\r\nLast-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\nContent-Range: bytes 0-262143/1048576",
            "breaks the protocol",
        ),
        (
            "206 Partial\r\nETag: ETAG\r\nLast-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\nContent-Range: bytes 0-18446744073709551615/1",
            "breaks the protocol",
        ),
        ("200 OK\r\nETag: ETAG\r\nLast-Modified: Mon, 30 Nov 2026 00:00:00 GMT", "ignores `Range`"),
    ] {
        let tag = object.pin().to_string().replace("ETag ", "");
        let head = head.replace("ETAG", &tag);
        bed.proxy.set_faults(move |_| HttpFault::Answer(head.clone(), vec![0; 262_144]));
        let error = read(&*object, 262_144, 10).unwrap_err();
        assert!(said(&error).contains(expected), "{}", said(&error));
    }
}

#[test]
fn a_length_that_no_object_has_is_refused() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    bed.put("k", &pattern(7, 1 << 20));
    let longest = u64::try_from(i64::MAX).unwrap();
    for (length, is_refused) in [(u64::MAX, true), (longest + 1, true), (longest, false)] {
        let head = "206 Partial\r\nETag: \"x\"\r\nLast-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\nContent-Range: bytes 0-262143/";
        bed.proxy.set_faults(move |_| HttpFault::Answer(format!("{head}{length}"), vec![7; 262_144]));
        match RemoteObject::open(&url("k"), &bed.options()) {
            Ok(object) => {
                assert!(!is_refused && object.length().unwrap() == length);
                assert_eq!(read(&*object, 0, 3).unwrap(), [7; 3]);
                let error = read(&*object, length - 4, 4).unwrap_err();
                assert!(said(&error).contains("breaks the protocol"), "{}", said(&error));
            }
            Err(error) => {
                assert!(
                    is_refused && said(&error).contains(&format!("said to have {length} bytes")),
                    "{}",
                    said(&error)
                );
            }
        }
    }
}

#[test]
fn every_status_gives_one_clear_line() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    bed.put("k", &pattern(9, 1 << 20));
    let mut options = bed.options();
    options.store.budget = Duration::from_millis(600);
    let object = RemoteObject::open(&url("k"), &options).unwrap();
    for (status, code, expected) in [
        (
            403,
            "AccessDenied",
            "the store refuses access (403 AccessDenied): check the credentials and what they may do",
        ),
        (
            403,
            "RequestTimeTooSkewed",
            "the store refuses the time of the request: set this machine's clock (the store's says )",
        ),
        (404, "NoSuchKey", "the object was removed since it was opened"),
        (
            409,
            "OperationAborted",
            "the object is being changed by another request (409 OperationAborted): try again later",
        ),
        (412, "PreconditionFailed", "the object was replaced since it was opened: open it again"),
        (416, "InvalidRange", "the object is shorter than when it was opened (416): it was replaced, open it again"),
        (
            429,
            "TooManyRequests",
            "the store is overloaded (429 TooManyRequests): try again later, or with fewer requests (retried for 600ms)",
        ),
        (500, "InternalError", "the store failed (500 InternalError): try again later (retried for 600ms)"),
        (
            503,
            "SlowDown",
            "the store is overloaded (503 SlowDown): try again later, or with fewer requests (retried for 600ms)",
        ),
        (400, "InvalidRequest", "the store does not accept the request (400 InvalidRequest)"),
        (301, "PermanentRedirect", "the bucket is in another region (PermanentRedirect): set AWS_REGION"),
    ] {
        bed.proxy.set_faults(move |_| HttpFault::Status(status, code));
        let error = read(&*object, 1 << 19, 10).unwrap_err();
        assert_eq!(said(&error), format!("cannot read s3://bucket/k at 0x80000 (10 bytes): {expected}"));
    }
    bed.proxy.set_faults(|_| HttpFault::None);
    read(&*object, 1 << 19, 10).unwrap();
}

#[test]
fn wrong_credentials_are_refused_and_shown_nowhere() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    bed.put("k", &pattern(9, 10));
    let mut options = bed.options();
    options.store.environment = options.store.environment.with("AWS_SECRET_ACCESS_KEY", "wrong-and-secret");
    let error = RemoteObject::open(&url("k"), &options).unwrap_err();
    let expected = "cannot open s3://bucket/k: the store refuses access (403 SignatureDoesNotMatch): check the credentials and what they may do";
    assert_eq!(said(&error), expected);
    let shown = format!("{options:?} {error:?}");
    assert!(!shown.contains("wrong-and-secret"), "{shown}");
    let object = RemoteObject::open(&url("k"), &bed.options()).unwrap();
    assert!(!format!("{object:?}").contains(limosa_testkit::CREDENTIALS.1));
}

#[test]
fn a_redirect_to_another_host_is_not_followed_unless_allowed() {
    if stores_skipped() {
        return;
    }
    let (bed, other) = (Bed::new(ObjectServerKind::Open), Bed::new(ObjectServerKind::Open));
    let bytes = pattern(10, 1000);
    std::fs::write(other.server.folder().join("k"), &bytes).unwrap();
    let target = format!("http://{}/bucket/k", other.proxy.address());
    bed.proxy.set_faults(move |_| HttpFault::Answer(format!("302 Found\r\nLocation: {target}"), Vec::new()));
    let name = format!("http://{}/bucket/k", bed.proxy.address()).parse().unwrap();
    let error = RemoteObject::open(&name, &bed.options()).unwrap_err();
    assert!(
        said(&error).ends_with("the server redirects to http://127.0.0.1, which is not followed"),
        "{}",
        said(&error)
    );
    assert!(other.proxy.take_requests().is_empty());
    let mut options = bed.options();
    options.store.allow_redirects = true;
    let object = RemoteObject::open(&name, &options).unwrap();
    assert_eq!(read(&*object, 0, 1000).unwrap(), bytes);
}

#[test]
fn a_server_that_is_started_again_within_the_budget_is_only_slow() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(11, 4 << 20);
    bed.put("k", &bytes);
    let object = RemoteObject::open(&url("k"), &bed.options()).unwrap();
    bed.server.stop();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| read(&*object, 0, bytes.len()));
        std::thread::sleep(Duration::from_secs(3));
        bed.server.resume().unwrap();
        assert!(reading.join().unwrap().unwrap() == bytes);
    });
    assert!(object.counters().retries > 0);
}

#[test]
fn a_store_that_is_gone_is_an_error_when_the_budget_ends_and_not_before() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    bed.put("k", &pattern(12, 2 << 20));
    let mut options = bed.options();
    options.store.budget = Duration::from_secs(2);
    let object = RemoteObject::open(&url("k"), &options).unwrap();
    bed.proxy.set_faults(|_| HttpFault::Drop);
    let began = Instant::now();
    let error = read(&*object, 1 << 20, 10).unwrap_err();
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(1900) && took < Duration::from_secs(30), "{took:?}");
    assert!(
        said(&error).contains("the connection broke off") && said(&error).ends_with("(retried for 2s)"),
        "{}",
        said(&error)
    );
    // Nobody listens at all.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut store = crate::store(closed);
    store.budget = Duration::from_millis(300);
    let error = RemoteObject::open(&url("k"), &RemoteOptions::default().store(store)).unwrap_err();
    assert!(said(&error).contains(&format!("cannot connect to {closed}: Connection refused")), "{}", said(&error));
}

#[test]
fn a_store_that_takes_connections_and_is_silent_is_an_error_within_the_budget() {
    if stores_skipped() {
        return;
    }
    let (silence, budget) = (Duration::from_millis(100), Duration::from_millis(400));
    let silent = "the store was silent for 100ms (retried for 400ms)";
    let began = Instant::now();
    // The kernel takes connections for it, and nobody reads what they bring.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut store = crate::store(listener.local_addr().unwrap());
    (store.silence, store.budget) = (silence, budget);
    let options = RemoteOptions::default().store(store.clone());
    let error = RemoteObject::open(&url("k"), &options).unwrap_err();
    assert_eq!(said(&error), format!("cannot open s3://bucket/k: {silent}"));
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    let options = UploadOptions::default().store(store.clone());
    let error = upload(&crate::memory(b"x"), &url("k"), &options).unwrap_err();
    assert_eq!(said(&error), format!("cannot create s3://bucket/k: {silent}"));
    let error = limosa_remote::list("s3://bucket", &store).unwrap_err();
    assert!(said(&error).contains("the store was silent for "), "{}", said(&error));
    // One that becomes silent.
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(16, 1 << 20);
    bed.put("k", &bytes);
    let mut options = bed.options();
    // Enough for the server on a busy machine.
    (options.store.silence, options.store.budget) = (Duration::from_secs(1), Duration::from_secs(1));
    let object = RemoteObject::open(&url("k"), &options).unwrap();
    bed.proxy.set_faults(|_| HttpFault::Delay(Duration::from_secs(600)));
    let error = read(&*object, 1 << 19, 10).unwrap_err();
    let silent = "the store was silent for 1s (retried for 1s)";
    assert_eq!(said(&error), format!("cannot read s3://bucket/k at 0x80000 (10 bytes): {silent}"));
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    bed.proxy.set_faults(|_| HttpFault::None);
    assert_eq!(read(&*object, 1 << 19, 10).unwrap(), bytes[1 << 19..][..10]);
}

#[test]
fn answers_that_overtake_each_other_bring_the_right_bytes() {
    if stores_skipped() {
        return;
    }
    let seed = seed();
    for kind in ObjectServerKind::ALL {
        let bed = Bed::new(kind);
        let bytes = pattern(17, 5 << 20);
        bed.put("k", &bytes);
        let object = RemoteObject::open(&url("k"), &bed.options()).unwrap();
        let mut random = Random(seed);
        // The first moment at which each request is answered, in the order of their coming.
        let answered = Arc::new(Mutex::new(Vec::new()));
        let answers = Arc::clone(&answered);
        bed.proxy.set_faults(move |_| {
            let mut answers = answers.lock().unwrap();
            // Every other one is so late that the next one overtakes it.
            let late = if answers.len() % 2 == 0 { 300 } else { 0 };
            let delay = Duration::from_millis(late + random.below(150));
            answers.push(Instant::now() + delay);
            HttpFault::Delay(delay)
        });
        std::thread::scope(|scope| {
            // Half of what each reads is the next one's, too.
            for part in 0..4_usize {
                let (object, bytes) = (&object, &bytes);
                scope.spawn(move || {
                    let (from, to) = (part << 20, (part + 2) << 20);
                    assert!(read(&**object, from as u64, to - from).unwrap() == bytes[from..to], "seed {seed}");
                });
            }
        });
        let answered = answered.lock().unwrap();
        assert!(!answered.is_sorted(), "no request was answered before an earlier one; seed {seed}");
        assert_eq!(object.counters().retries, 0);
    }
}

#[test]
fn a_slow_request_is_overtaken_by_a_second_one_and_those_are_few() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(13, 32 << 20);
    bed.put("k", &bytes);
    let mut options = bed.options();
    options.memory = 0;
    let object = RemoteObject::open(&url("k"), &options).unwrap();
    let is_slow = Arc::new(AtomicBool::new(false));
    let (slow, count) = (Arc::clone(&is_slow), Arc::new(AtomicU64::new(0)));
    let delayed = Arc::clone(&count);
    bed.proxy.set_faults(move |_: &HttpRequest| {
        // The first request of each read hangs; a second one for the same does not.
        if slow.swap(false, Ordering::Relaxed) {
            delayed.fetch_add(1, Ordering::Relaxed);
            HttpFault::Delay(Duration::from_secs(12))
        } else {
            HttpFault::None
        }
    });
    for block in 0..40_u64 {
        read(&*object, block << 18, 1000).unwrap();
    }
    for block in 40..42_u64 {
        // A busy machine makes fast requests slow, and those use the share of second ones up.
        for _ in 0..400 {
            let counters = object.counters();
            if counters.demanded >= counters.hedges * 20 {
                break;
            }
            read(&*object, 0, 1000).unwrap();
        }
        is_slow.store(true, Ordering::Relaxed);
        let began = Instant::now();
        let (from, to) = (usize::try_from(block << 18).unwrap(), usize::try_from((block << 18) + 1000).unwrap());
        assert_eq!(read(&*object, block << 18, 1000).unwrap(), bytes[from..to]);
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    }
    assert_eq!(count.load(Ordering::Relaxed), 2);
    let counters = counted(&object, |counters| counters.hedges_won >= 2);
    assert!(counters.hedges >= 2 && counters.hedges * 10 <= counters.requests, "{counters:?}");
    assert_eq!(counters.retries, 0);
}

#[test]
fn more_bytes_than_were_asked_for_are_not_used() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(14, 1 << 20);
    bed.put("k", &bytes);
    let mut options = bed.options();
    options.block_size = 4096;
    let object = RemoteObject::open(&url("k"), &options).unwrap();
    let tag = object.pin().to_string().replace("ETag ", "");
    let length = bytes.len();
    bed.proxy.set_faults(move |_| {
        let range = format!("Content-Range: bytes 8192-12287/{length}");
        let head = format!("206 Partial\r\nETag: {tag}\r\nLast-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\n{range}");
        HttpFault::Answer(head, vec![0xee; 4096 + 100])
    });
    let error = read(&*object, 8192, 4096).unwrap_err();
    assert!(said(&error).contains("more bytes than were asked for"), "{}", said(&error));
    bed.proxy.set_faults(|_| HttpFault::None);
    assert_eq!(read(&*object, 8192, 4096).unwrap(), bytes[8192..12288]);
}

/// Answers a request for a part of an object that has versions.
fn versioned(bytes: &[u8], request: &HttpRequest) -> HttpFault {
    let range = request.header("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let (first, last) = range.unwrap();
    let (first, last) = (first.parse::<usize>().unwrap(), last.parse::<usize>().unwrap().min(bytes.len() - 1));
    let head = format!(
        "206 Partial\r\nETag: \"tag\"\r\nx-amz-version-id: v1\r\nLast-Modified: Mon, 30 Nov 2026 00:00:00 \
         GMT\r\nContent-Range: bytes {first}-{last}/{}",
        bytes.len()
    );
    HttpFault::Answer(head, bytes[first..=last].to_vec())
}

#[test]
fn versions_that_may_not_be_named_are_left_out_by_all_reads_at_once() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(15, 8 << 20);
    let served = bytes.clone();
    let denied = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&denied);
    bed.proxy.set_latency(Duration::from_millis(50));
    bed.proxy.set_faults(move |request| {
        if request.target.contains("versionId=") {
            count.fetch_add(1, Ordering::Relaxed);
            return HttpFault::Status(403, "AccessDenied");
        }
        versioned(&served, request)
    });
    let object = RemoteObject::open(&url("k"), &bed.options()).unwrap();
    assert!(matches!(object.pin(), limosa_remote::Pin::Version(_)));
    // Eight pieces at the same time: each names the version, because none knows yet that it must not.
    assert!(read(&*object, 0, bytes.len()).unwrap() == bytes);
    assert!(denied.load(Ordering::Relaxed) > 1, "the pieces did not run at once");
    // All refused: credentials, and not the version, are the cause.
    bed.proxy.set_faults(|_| HttpFault::Status(403, "AccessDenied"));
    let mut options = bed.options();
    options.memory = 0;
    let error = RemoteObject::open(&url("k"), &options).unwrap_err();
    assert!(said(&error).contains("refuses access (403 AccessDenied)"), "{}", said(&error));
}
