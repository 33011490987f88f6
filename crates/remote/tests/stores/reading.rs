use std::sync::Arc;

use limosa_remote::{BlockCache, CacheOptions, Pin, RemoteObject, StoreOptions, list, remove};
use limosa_storage::{Buffer, Storage as _, block_on};
use limosa_testkit::{HttpFault, ObjectServerKind, stores_skipped};

use crate::{Bed, counted, pattern, read, said, store, url};

#[test]
fn an_object_reads_as_it_was_written_from_every_server() {
    if stores_skipped() {
        return;
    }
    for kind in ObjectServerKind::ALL {
        let bed = Bed::new(kind);
        let bytes = pattern(1, (3 << 20) + 77);
        bed.put("a/b c", &bytes);
        let object = RemoteObject::open(&url("a/b c"), &bed.options()).unwrap();
        assert_eq!(object.length().unwrap(), bytes.len() as u64);
        assert!(matches!(object.pin(), Pin::ETag(_)) && object.is_read_only());
        assert_eq!(read(&*object, 0, bytes.len()).unwrap(), bytes);
        for (offset, length) in [(0, 1), (262_143, 2), (1_000_000, 700_000), (bytes.len() - 5, 5)] {
            assert_eq!(read(&*object, offset as u64, length).unwrap(), bytes[offset..offset + length]);
        }
        // Behind the end are zeros.
        let end = read(&*object, bytes.len() as u64 - 3, 8).unwrap();
        assert_eq!(end, [&bytes[bytes.len() - 3..], &[0; 5]].concat());
        assert_eq!(read(&*object, 1 << 40, 4).unwrap(), [0; 4]);
        let error = block_on(object.write(0, Buffer::zeroed(4).into())).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    }
}

#[test]
fn an_empty_object_has_no_bytes() {
    if stores_skipped() {
        return;
    }
    for kind in ObjectServerKind::ALL {
        let bed = Bed::new(kind);
        bed.put("empty", &[]);
        let object = RemoteObject::open(&url("empty"), &bed.options()).unwrap();
        assert_eq!((object.length().unwrap(), read(&*object, 0, 3).unwrap()), (0, vec![0; 3]));
    }
}

#[test]
fn neighbouring_blocks_come_in_one_request_and_each_only_once() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(2, 8 << 20);
    bed.put("k", &bytes);
    let object = RemoteObject::open(&url("k"), &bed.options()).unwrap();
    bed.proxy.take_requests();
    // Four blocks each, and the first is there since the object was opened.
    let mut reads: Vec<_> = (0..4_u64)
        .map(|part| {
            let buffer = Buffer::zeroed(1 << 20);
            (buffer.clone(), object.read(part << 20, buffer.into()))
        })
        .collect();
    for (part, (buffer, request)) in reads.drain(..).enumerate() {
        block_on(request).unwrap();
        assert_eq!(buffer.to_vec(), bytes[part << 20..(part + 1) << 20]);
    }
    let requests = bed.proxy.take_requests();
    assert!((4..=5).contains(&requests.len()), "{requests:?}");
    let counters = counted(&object, |counters| counters.demanded >= 15);
    assert_eq!((counters.requests, counters.demanded), (requests.len() as u64 + 1, 15));
    assert_eq!(counters.bytes, 4 << 20);
    read(&*object, 0, 4 << 20).unwrap();
    assert!(bed.proxy.take_requests().is_empty(), "all is in memory");
}

#[test]
fn what_is_prefetched_is_not_waited_for_and_demand_goes_first() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(3, 40 << 20);
    bed.put("k", &bytes);
    bed.proxy.set_latency(std::time::Duration::from_millis(100));
    let mut options = bed.options();
    options.memory = 16 << 20;
    options.hedge = false;
    let object = RemoteObject::open(&url("k"), &options).unwrap();
    bed.proxy.take_requests();
    object.prefetch(std::slice::from_ref(&(0..bytes.len() as u64)));
    assert_eq!(read(&*object, 39 << 20, 4096).unwrap(), bytes[39 << 20..(39 << 20) + 4096]);
    // A half of the memory is for what nobody has read: two pieces. So at most four were begun before.
    let range = format!("bytes={}-", 39 << 20);
    let requests = bed.proxy.take_requests();
    let at = requests.iter().position(|it| it.header("range").is_some_and(|header| header.starts_with(&range)));
    assert!(at.is_some_and(|at| at <= 4), "{requests:?}");
    limosa_testkit::wait_for("the prefetch", || (object.counters().prefetched >= 31).then_some(()));
    assert_eq!(read(&*object, 1 << 20, 4 << 20).unwrap(), bytes[1 << 20..5 << 20]);
    let counters = object.counters();
    assert!(counters.demanded < 8, "{counters:?}");
}

#[test]
fn whoever_asks_if_bytes_are_near_has_them_brought_once_and_need_not_wait() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(5, 4 << 20);
    bed.put("k", &bytes);
    bed.proxy.set_latency(std::time::Duration::from_secs(1));
    let folder = tempfile::tempdir().unwrap();
    let cache = BlockCache::open(&CacheOptions::new(folder.path())).unwrap();
    // The second time from the disk: what is only prefetched would stay there.
    for is_cached in [false, true] {
        let object = RemoteObject::open(&url("k"), &bed.options().cache(Some(Arc::clone(&cache)))).unwrap();
        let before = object.counters();
        // Up to its end, and not beyond.
        let range = (3 << 20) + 5..5 << 20;
        assert!(object.is_near(&(0..1)) && object.is_near(&(4 << 20..5 << 20)));
        let began = std::time::Instant::now();
        assert!(!object.is_near(&range));
        // The disk may be faster than a second question.
        assert!(is_cached || !object.is_near(&range));
        assert!(began.elapsed() < std::time::Duration::from_millis(900));
        limosa_testkit::wait_for("the bytes", || object.is_near(&range).then_some(()));
        assert_eq!(read(&*object, 3 << 20, 1 << 20).unwrap(), bytes[3 << 20..]);
        let (counters, hits) = (object.counters(), object.counters().cache_hits > 0);
        assert_eq!((counters.requests - before.requests, hits), (u64::from(!is_cached), is_cached), "{counters:?}");
        // It is in the cache before the second turn.
        limosa_testkit::wait_for("the cache", || (cache.counters().written >= 5).then_some(()));
    }
}

#[test]
fn files_of_a_web_server_are_read_without_credentials() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::Open);
    let bytes = pattern(4, 1 << 20);
    std::fs::create_dir(bed.server.folder().join("x")).unwrap();
    std::fs::write(bed.server.folder().join("x/file.img"), &bytes).unwrap();
    let name = format!("http://{}/bucket/x/file.img", bed.proxy.address());
    let object = RemoteObject::open(&name.parse().unwrap(), &bed.options()).unwrap();
    assert_eq!(read(&*object, 0, bytes.len()).unwrap(), bytes);
    let requests = bed.proxy.take_requests();
    assert!(!requests.is_empty() && requests.iter().all(|request| request.header("authorization").is_none()));
    let missing = format!("http://{}/bucket/none", bed.proxy.address());
    let error = RemoteObject::open(&missing.parse().unwrap(), &bed.options()).unwrap_err();
    assert!(said(&error).ends_with("there is no such object (NoSuchKey)"), "{}", said(&error));
}

#[test]
fn a_weak_tag_of_a_web_server_is_no_strong_pin_and_a_change_is_noticed_all_the_same() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::Open);
    // Of nginx: the time of change, which is not over yet, and the length.
    let of_time = r#""7ddcb400-80000""#;
    for (tag, is_compared_by_the_server) in [(of_time, true), (r#"W/"a""#, false)] {
        let served = Arc::new(std::sync::Mutex::new(tag.to_owned()));
        let serving = Arc::clone(&served);
        bed.proxy.set_faults(move |request| {
            let range = request.header("range").and_then(|range| range.strip_prefix("bytes=")).unwrap_or_default();
            let head = "206 Partial\r\nLast-Modified: Sun, 30 Nov 2036 00:00:00 GMT";
            let tag = serving.lock().unwrap();
            HttpFault::Answer(format!("{head}\r\nETag: {tag}\r\nContent-Range: bytes {range}/524288"), vec![7; 1 << 18])
        });
        let name = format!("http://{}/bucket/k", bed.proxy.address());
        let object = RemoteObject::open(&name.parse().unwrap(), &bed.options()).unwrap();
        assert!(!object.pin().is_strong() && object.content_id().is_none(), "{tag}");
        bed.proxy.take_requests();
        *served.lock().unwrap() = r#"W/"b""#.to_owned();
        let error = read(&*object, 1 << 18, 10).unwrap_err();
        assert!(said(&error).contains("was replaced"), "{}", said(&error));
        let requests = bed.proxy.take_requests();
        let condition = requests.first().unwrap().header("if-match");
        assert_eq!(condition, is_compared_by_the_server.then_some(tag));
    }
}

#[test]
fn blocks_ahead_of_a_sequential_reader_come_in_time() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(3, 24 << 20);
    bed.put("k", &bytes);
    let mut options = bed.options();
    options.read_ahead = 8 << 20;
    let object = RemoteObject::open(&url("k"), &options).unwrap();
    let piece = 256 << 10;
    for start in (0..bytes.len()).step_by(piece) {
        assert_eq!(read(&*object, start as u64, piece).unwrap(), bytes[start..start + piece]);
    }
    let counters = counted(&object, |counters| counters.prefetched > 0);
    assert_eq!(counters.bytes, bytes.len() as u64, "nothing comes twice, and nothing in vain");
    assert!(counters.prefetched >= 48 && counters.requests < 60, "{counters:?}");
}

#[test]
fn a_folder_is_listed_and_its_objects_are_removed() {
    if stores_skipped() {
        return;
    }
    for kind in ObjectServerKind::ALL {
        let bed = Bed::new(kind);
        for key in ["a/one", "a/two 2%", "a/below/three", "ab", "top"] {
            bed.put(key, &pattern(1, 100));
        }
        let options = store(bed.proxy.address());
        let listed = |folder: &str| {
            let found = list(folder, &options).unwrap();
            assert!(found.requests > 0 && found.objects.iter().all(|object| object.length == 100));
            found.objects.into_iter().map(|object| object.url).collect::<Vec<_>>()
        };
        let folder = ["s3://bucket/a/one", "s3://bucket/a/two 2%"];
        assert_eq!([listed("s3://bucket/a"), listed("s3://bucket/a/")], [folder, folder], "{kind:?}");
        assert_eq!(
            [listed("s3://bucket"), listed("s3://bucket/")],
            [["s3://bucket/ab", "s3://bucket/top"]; 2],
            "{kind:?}"
        );
        assert!(listed("s3://bucket/none").is_empty());
        // A failure of a moment costs a request.
        let mut failures = 2;
        bed.proxy.set_faults(move |_| {
            failures -= i32::from(failures > 0);
            if failures > 0 { HttpFault::Status(503, "SlowDown") } else { HttpFault::None }
        });
        remove(&url("a/two 2%"), &options).unwrap();
        remove(&url("a/two 2%"), &options).unwrap();
        assert_eq!(listed("s3://bucket/a"), ["s3://bucket/a/one"], "{kind:?}");
        bed.proxy.set_faults(|_| HttpFault::Status(403, "AccessDenied"));
        assert!(said(&list("s3://bucket/a", &options).unwrap_err()).contains("AccessDenied"));
        assert!(said(&remove(&url("top"), &options).unwrap_err()).contains("AccessDenied"));
    }
    let none = StoreOptions::default();
    for folder in ["http://host/folder", "s3://", "s3://b/../c"] {
        assert!(list(folder, &none).is_err(), "{folder}");
    }
}
