use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use limosa_remote::{Existing, Upload, UploadOptions, upload};
use limosa_testkit::{HttpFault, HttpRequest, ObjectServerKind, own_test, stores_skipped};

use crate::{Bed, contents, memory, pattern, said, store, try_contents, url};

const MIB: usize = 1 << 20;

#[test]
fn objects_of_every_length_are_written_whole() {
    if stores_skipped() {
        return;
    }
    for kind in ObjectServerKind::ALL {
        let bed = Bed::new(kind);
        for (length, parts) in [(0, 0), (1, 1), (5 * MIB, 1), (5 * MIB + 1, 2), (11 * MIB + 17, 3)] {
            let bytes = pattern(length as u64, length);
            let key = format!("k{length}");
            let done = upload(&memory(&bytes), &url(&key), &bed.uploading()).unwrap();
            assert_eq!((done.length, done.counters.parts, done.is_conditional), (length as u64, parts, true));
            assert!(contents(&bed, &key).unwrap() == bytes);
        }
    }
}

#[test]
fn what_is_there_is_not_replaced_unless_it_may_be() {
    if stores_skipped() {
        return;
    }
    for kind in ObjectServerKind::ALL {
        let bed = Bed::new(kind);
        for length in [100, 6 * MIB] {
            let (old, new) = (pattern(30, length), pattern(31, length));
            bed.put("k", &old);
            let error = upload(&memory(&new), &url("k"), &bed.uploading()).unwrap_err();
            assert_eq!(said(&error), "cannot create s3://bucket/k: the object exists already");
            assert_eq!(contents(&bed, "k").unwrap(), old);
            upload(&memory(&new), &url("k"), &bed.uploading().existing(Existing::Replace)).unwrap();
            assert_eq!(contents(&bed, "k").unwrap(), new);
        }
    }
}

#[test]
fn what_somebody_else_writes_meanwhile_is_not_replaced() {
    if stores_skipped() {
        return;
    }
    for kind in ObjectServerKind::ALL {
        for length in [100, 6 * MIB] {
            let bed = Bed::new(kind);
            let (mine, theirs) = (pattern(32, length), pattern(33, length));
            let send = |existing| {
                let mut writing = Upload::begin(&url("k"), length as u64, &bed.uploading().existing(existing)).unwrap();
                let size = usize::try_from(writing.part_size()).unwrap();
                mine.chunks(size).for_each(|part| writing.put(part.to_vec()).unwrap());
                writing
            };
            let writing = send(Existing::Refuse);
            bed.put("k", &theirs);
            let error = writing.finish().unwrap_err();
            assert_eq!(said(&error), "cannot write s3://bucket/k: the object exists already", "{kind:?} {length}");
            let writing = send(Existing::Replace);
            bed.put("k", &pattern(34, length));
            let error = writing.finish().unwrap_err();
            assert_eq!(
                said(&error),
                "cannot write s3://bucket/k: the object was changed by somebody else; it was not replaced"
            );
            assert_eq!(contents(&bed, "k").unwrap(), pattern(34, length));
        }
    }
}

#[test]
fn uploads_survive_faults_and_lost_answers() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(35, 31 * MIB);
    // Every third request fails in one of four ways: parts, and the completion, too.
    let mut count = 0;
    bed.proxy.set_faults(move |_| {
        count += 1;
        match count % 12 {
            2 => HttpFault::Drop,
            5 => HttpFault::LoseAnswer,
            8 => HttpFault::Status(503, "SlowDown"),
            11 => HttpFault::Status(500, "InternalError"),
            _ => HttpFault::None,
        }
    });
    let done = upload(&memory(&bytes), &url("k"), &bed.uploading()).unwrap();
    assert!(done.counters.retries > 0 && done.counters.bytes > bytes.len() as u64, "{:?}", done.counters);
    assert!(contents(&bed, "k").unwrap() == bytes);
}

#[test]
fn a_completion_whose_answer_is_lost_is_recognized() {
    if stores_skipped() {
        return;
    }
    for kind in ObjectServerKind::ALL {
        let bed = Bed::new(kind);
        let bytes = pattern(36, 6 * MIB);
        let mut is_lost = false;
        bed.proxy.set_faults(move |request| {
            let is_completion = request.method == "POST" && request.target.contains("uploadId=");
            if is_completion && !std::mem::replace(&mut is_lost, true) {
                HttpFault::LoseAnswer
            } else {
                HttpFault::None
            }
        });
        upload(&memory(&bytes), &url("k"), &bed.uploading()).unwrap();
        assert!(contents(&bed, "k").unwrap() == bytes);
    }
}

#[test]
fn an_upload_that_is_dropped_or_cancelled_leaves_nothing() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let part = || pattern(37, 5 * MIB);
    let mut dropped = Upload::begin(&url("k"), 30 << 20, &bed.uploading()).unwrap();
    dropped.put(part()).unwrap();
    dropped.put(part()).unwrap();
    limosa_testkit::wait_for("parts", || (!leftovers(&bed.server.folder()).is_empty()).then_some(()));
    drop(dropped);
    let options = bed.uploading();
    let mut cancelled = Upload::begin(&url("k"), 30 << 20, &options).unwrap();
    cancelled.put(part()).unwrap();
    options.cancelled.store(true, Ordering::Relaxed);
    assert!(said(&cancelled.put(part()).unwrap_err()).ends_with("the upload was cancelled"));
    drop(cancelled);
    let requests = bed.proxy.take_requests();
    assert_eq!(requests.iter().filter(|request| request.method == "DELETE").count(), 2);
    assert_eq!(contents(&bed, "k"), None);
    assert_eq!(leftovers(&bed.server.folder()), Vec::<PathBuf>::new());
}

/// Files of the server that are no objects: parts of uploads.
fn leftovers(bucket: &Path) -> Vec<PathBuf> {
    let around = bucket.parent().unwrap();
    let files =
        |folder: &Path| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let parts = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.contains("upload") || name.contains("part")
    };
    files(around).into_iter().chain(files(bucket)).filter(parts).collect()
}

/// Run by the next test, in a process of its own, which is killed.
#[test]
#[ignore = "a part of another test"]
fn uploads_a_file_until_it_is_killed() {
    let Some(address) = std::env::var_os("LIMOSA_TEST_STORE") else { return };
    let address = address.to_str().unwrap().parse().unwrap();
    let records = PathBuf::from(std::env::var_os("LIMOSA_TEST_RECORDS").unwrap());
    let mut options = UploadOptions::default().store(store(address)).records_in(records);
    (options.part_size, options.streams, options.existing) = (5 << 20, 2, Existing::Replace);
    let bytes = pattern(39, 26 * MIB);
    upload(&memory(&bytes), &url("k"), &options).unwrap();
}

#[test]
fn an_upload_that_is_killed_leaves_the_old_object_and_is_continued() {
    if stores_skipped() {
        return;
    }
    let trials = std::env::var("LIMOSA_CHAOS_TRIALS").ok().and_then(|trials| trials.parse().ok()).unwrap_or(5);
    let bed = Bed::new(ObjectServerKind::S3s);
    let (old, new) = (pattern(38, 3 * MIB), pattern(39, 26 * MIB));
    let mut resumed = 0;
    for trial in 0..trials {
        let records = tempfile::tempdir().unwrap();
        bed.put("k", &old);
        let mut command = own_test!(uploads_a_file_until_it_is_killed);
        command.env("LIMOSA_TEST_STORE", bed.proxy.address().to_string()).env("LIMOSA_TEST_RECORDS", records.path());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        // It looks, begins, sends six parts, looks, completes. It is killed in one of these requests, which the store
        // sees or does not.
        let (moment, is_seen) = (trial * 9 / (trials - 1).max(1), trial % 2 == 0);
        let requests = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&requests);
        bed.proxy.set_faults(move |_| match counted.fetch_add(1, Ordering::Relaxed) {
            before if before < moment => HttpFault::None,
            now if now == moment && is_seen => HttpFault::LoseAnswer,
            _ => HttpFault::Drop,
        });
        let child = limosa_testkit::Process::spawn("an upload", command).unwrap();
        limosa_testkit::wait_for("requests", || (requests.load(Ordering::Relaxed) > moment).then_some(()));
        if moment == 9 && is_seen {
            // A read that meets the replacement fails.
            let is_new = || try_contents(&bed, "k").is_ok_and(|found| found == new).then_some(());
            limosa_testkit::wait_for("the object", is_new);
        }
        child.kill();
        bed.proxy.set_faults(|_| HttpFault::None);
        let found = contents(&bed, "k").unwrap();
        assert!(found == old || found == new, "half an object is visible");
        // The next one continues it.
        let mut options = bed.uploading().existing(Existing::Replace).records_in(records.path());
        options.streams = 2;
        let done = upload(&memory(&new), &url("k"), &options).unwrap();
        resumed += done.counters.resumed;
        assert!(contents(&bed, "k").unwrap() == new);
        assert_eq!(std::fs::read_dir(records.path().join("uploads")).unwrap().count(), 0, "the record is gone");
    }
    assert!(resumed > 0, "no trial was killed between two parts");
}

#[test]
fn parts_of_another_content_are_not_used() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let records = tempfile::tempdir().unwrap();
    let options = || bed.uploading().records_in(records.path());
    let (first, second) = (pattern(40, 20 * MIB), pattern(41, 20 * MIB));
    let mixed = [&first[..5 * MIB], &second[5 * MIB..]].concat();
    // The store goes away: what was sent stays.
    let mut cut = options();
    // One after the other: so the first is among them.
    (cut.streams, cut.store.budget) = (1, Duration::from_secs(3));
    let mut sent = 0;
    bed.proxy.set_faults(move |request| {
        sent += u64::from(request.method == "PUT");
        if sent > 3 { HttpFault::Drop } else { HttpFault::None }
    });
    upload(&memory(&first), &url("k"), &cut).unwrap_err();
    bed.proxy.set_faults(|_| HttpFault::None);
    let done = upload(&memory(&mixed), &url("k"), &options()).unwrap();
    assert_eq!((done.counters.resumed, done.counters.parts), (1, 4));
    assert!(contents(&bed, "k").unwrap() == mixed);
}

/// The records of uploads in a folder.
fn records_in(folder: &tempfile::TempDir) -> usize {
    std::fs::read_dir(folder.path().join("uploads")).map_or(0, Iterator::count)
}

/// Uploads an object whose completion the store sees, and after which it is gone: the upload does not know that it is
/// complete.
fn complete_unseen(bed: &Bed, bytes: &[u8], options: &UploadOptions) {
    let mut options = options.clone();
    options.store.budget = Duration::from_secs(2);
    bed.lose_completion();
    upload(&memory(bytes), &url("k"), &options).unwrap_err();
    limosa_testkit::wait_for("the object", || contents(bed, "k"));
    bed.proxy.set_faults(|_| HttpFault::None);
    bed.proxy.take_requests();
}

#[test]
fn an_upload_that_was_killed_when_it_was_complete_has_succeeded() {
    if stores_skipped() {
        return;
    }
    for kind in ObjectServerKind::ALL {
        let bed = Bed::new(kind);
        let records = tempfile::tempdir().unwrap();
        let options = bed.uploading().records_in(records.path());
        let bytes = pattern(50, 11 * MIB);
        complete_unseen(&bed, &bytes, &options);
        assert_eq!(records_in(&records), 1);
        limosa_remote::check_target(&url("k"), &options).unwrap();
        let done = upload(&memory(&bytes), &url("k"), &options).unwrap();
        assert_eq!((done.counters.resumed, done.counters.parts, done.counters.bytes), (3, 3, 0));
        assert_eq!(records_in(&records), 0);
        assert!(limosa_remote::check_target(&url("k"), &options).is_err(), "it is anybody's object now");
    }
}

#[test]
fn an_object_of_other_bytes_than_the_killed_uploads_exists_already() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let records = tempfile::tempdir().unwrap();
    let options = bed.uploading().records_in(records.path());
    let (first, second) = (pattern(51, 11 * MIB), pattern(52, 11 * MIB));
    complete_unseen(&bed, &first, &options);
    let error = upload(&memory(&second), &url("k"), &options).unwrap_err();
    assert!(said(&error).ends_with("the object exists already"), "{}", said(&error));
    assert!(contents(&bed, "k").unwrap() == first && records_in(&records) == 0);
}

#[test]
fn parts_are_removed_when_somebody_else_has_written_the_object() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let records = tempfile::tempdir().unwrap();
    let options = bed.uploading().records_in(records.path());
    let mine = pattern(53, 11 * MIB);
    let mut left = options.clone();
    left.store.budget = Duration::from_secs(2);
    let mut sent = 0;
    bed.proxy.set_faults(move |request| {
        sent += u64::from(request.method == "PUT");
        if sent > 1 { HttpFault::Drop } else { HttpFault::None }
    });
    upload(&memory(&mine), &url("k"), &left).unwrap_err();
    assert_eq!(records_in(&records), 1);
    bed.proxy.set_faults(|_| HttpFault::None);
    bed.put("k", b"somebody else's");
    let error = upload(&memory(&mine), &url("k"), &options).unwrap_err();
    assert!(said(&error).ends_with("the object exists already"), "{}", said(&error));
    assert_eq!((records_in(&records), leftovers(&bed.server.folder())), (0, Vec::new()));
}

#[test]
fn a_short_object_whose_answer_is_lost_is_recognized() {
    if stores_skipped() {
        return;
    }
    for kind in ObjectServerKind::ALL {
        let bed = Bed::new(kind);
        let records = tempfile::tempdir().unwrap();
        let bytes = pattern(54, 1000);
        let mut is_lost = false;
        bed.proxy.set_faults(move |request| {
            if request.method == "PUT" && !std::mem::replace(&mut is_lost, true) {
                HttpFault::LoseAnswer
            } else {
                HttpFault::None
            }
        });
        let done = upload(&memory(&bytes), &url("k"), &bed.uploading().records_in(records.path())).unwrap();
        assert!(done.counters.retries > 0 && done.e_tag.is_some(), "{kind:?} {:?}", done.counters);
        assert_eq!((contents(&bed, "k").unwrap(), records_in(&records)), (bytes, 0));
    }
}

#[test]
fn an_upload_whose_credentials_expire_is_continued_with_new_ones() {
    if stores_skipped() {
        return;
    }
    for (status, code) in [(400, "ExpiredToken"), (403, "AccessDenied"), (403, "RequestTimeTooSkewed")] {
        let bed = Bed::new(ObjectServerKind::S3s);
        let records = tempfile::tempdir().unwrap();
        let mut options = bed.uploading().records_in(records.path());
        options.streams = 1;
        let bytes = pattern(55, 16 * MIB);
        let mut sent = 0;
        bed.proxy.set_faults(move |request| {
            sent += u64::from(request.method == "PUT");
            if sent > 2 { HttpFault::Status(status, code) } else { HttpFault::None }
        });
        upload(&memory(&bytes), &url("k"), &options).unwrap_err();
        assert_eq!(records_in(&records), 1, "{code}");
        // Also a look at the old upload that is refused leaves it.
        bed.proxy.set_faults(move |request| match request.method.as_str() {
            "GET" => HttpFault::None,
            _ => HttpFault::Status(status, code),
        });
        upload(&memory(&bytes), &url("k"), &options).unwrap_err();
        upload(&memory(&bytes[..12 * MIB]), &url("k"), &options).unwrap_err();
        assert_eq!(records_in(&records), 1, "{code}");
        bed.proxy.set_faults(|_| HttpFault::None);
        let done = upload(&memory(&bytes), &url("k"), &options).unwrap();
        assert_eq!((done.counters.resumed, done.counters.parts), (2, 4), "{code}");
        assert!(contents(&bed, "k").unwrap() == bytes && records_in(&records) == 0);
    }
}

#[test]
fn a_cancelled_upload_with_a_record_is_continued() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let records = tempfile::tempdir().unwrap();
    let mut options = bed.uploading().records_in(records.path());
    options.streams = 1;
    let bytes = pattern(56, 11 * MIB);
    let mut cancelled = Upload::begin(&url("k"), bytes.len() as u64, &options).unwrap();
    cancelled.put(bytes[..5 * MIB].to_vec()).unwrap();
    cancelled.put(bytes[5 * MIB..10 * MIB].to_vec()).unwrap();
    options.cancelled.store(true, Ordering::Relaxed);
    let error = cancelled.put(bytes[10 * MIB..].to_vec()).unwrap_err();
    assert!(said(&error).ends_with("the upload was cancelled; the same one continues it"), "{}", said(&error));
    drop(cancelled);
    options.cancelled.store(false, Ordering::Relaxed);
    let done = upload(&memory(&bytes), &url("k"), &options).unwrap();
    assert_eq!((done.counters.resumed, records_in(&records)), (2, 0));
}

/// The requests of an upload in parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Looks what is there.
    Look,
    Begin,
    Part,
    Complete,
}

impl Step {
    fn of(request: &HttpRequest) -> Option<Self> {
        match request.method.as_str() {
            "GET" => Some(Self::Look),
            "PUT" => Some(Self::Part),
            "POST" if request.target.contains("uploadId=") => Some(Self::Complete),
            "POST" => Some(Self::Begin),
            _ => None,
        }
    }
}

#[test]
fn every_status_of_an_upload_gives_one_clear_line_and_leaves_nothing() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let mut options = bed.uploading();
    // One part after the other, so that those of a status are counted.
    (options.streams, options.store.budget) = (1, Duration::from_millis(300));
    let bytes = pattern(57, 6 * MIB);
    let conflict = "the object is being changed by another request (409 OperationAborted): try again later";
    // One that the store has forgotten is begun again, once.
    let forgotten = "the store does not know the upload any more: begin it again";
    let busy =
        "the store is overloaded (429 TooManyRequests): try again later, or with fewer requests (retried for 300ms)";
    for (step, status, code, expected) in [
        (Step::Look, 404, "NoSuchBucket", "there is no such object (NoSuchBucket)"),
        (Step::Look, 409, "OperationAborted", conflict),
        (Step::Look, 429, "TooManyRequests", busy),
        (Step::Begin, 404, "NoSuchBucket", "there is no such object (NoSuchBucket)"),
        (Step::Begin, 409, "OperationAborted", conflict),
        (Step::Begin, 429, "TooManyRequests", busy),
        (Step::Part, 404, "NoSuchUpload", forgotten),
        (Step::Part, 409, "OperationAborted", conflict),
        (Step::Part, 429, "TooManyRequests", busy),
        (Step::Complete, 404, "NoSuchUpload", forgotten),
        (Step::Complete, 409, "OperationAborted", conflict),
        (Step::Complete, 412, "PreconditionFailed", "the object exists already"),
        (Step::Complete, 429, "TooManyRequests", busy),
    ] {
        let count = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&count);
        bed.proxy.set_faults(move |request| {
            if Step::of(request) != Some(step) {
                return HttpFault::None;
            }
            counted.fetch_add(1, Ordering::Relaxed);
            HttpFault::Status(status, code)
        });
        let error = upload(&memory(&bytes), &url("k"), &options).unwrap_err();
        assert!(said(&error).ends_with(&format!(" s3://bucket/k: {expected}")), "{step:?} {status}: {}", said(&error));
        let count = count.load(Ordering::Relaxed);
        let expected = 1 + u64::from(expected == forgotten);
        assert!(count == expected || status == 429, "{step:?} {status}: {count} requests");
        assert_eq!((contents(&bed, "k"), leftovers(&bed.server.folder())), (None, Vec::new()), "{step:?} {status}");
    }
    // An object of one request.
    for (status, code, expected) in [
        (404, "NoSuchBucket", "there is no such object (NoSuchBucket)"),
        (409, "OperationAborted", conflict),
        (412, "PreconditionFailed", "the object exists already"),
        (429, "TooManyRequests", busy),
    ] {
        bed.proxy.set_faults(move |request| match Step::of(request) {
            Some(Step::Part) => HttpFault::Status(status, code),
            _ => HttpFault::None,
        });
        let error = upload(&memory(b"short"), &url("k"), &options).unwrap_err();
        assert_eq!(said(&error), format!("cannot write s3://bucket/k: {expected}"));
        assert_eq!(contents(&bed, "k"), None, "{status}");
    }
    // A store that is busy for a moment: each step is made again.
    let mut refused = Vec::new();
    bed.proxy.set_faults(move |request| match Step::of(request) {
        Some(step) if !refused.contains(&step) => {
            refused.push(step);
            HttpFault::Status(429, "TooManyRequests")
        }
        _ => HttpFault::None,
    });
    options.store.budget = Duration::from_secs(60);
    let done = upload(&memory(&bytes), &url("k"), &options).unwrap();
    assert_eq!(done.counters.retries, 4);
    assert!(contents(&bed, "k").unwrap() == bytes);
}

#[test]
fn web_servers_are_only_read() {
    let error = upload(&memory(b"x"), &"http://127.0.0.1:1/k".parse().unwrap(), &UploadOptions::default()).unwrap_err();
    assert_eq!(
        said(&error),
        "cannot create http://127.0.0.1:1/k: the store's settings are wrong: files of web servers are only read"
    );
}
