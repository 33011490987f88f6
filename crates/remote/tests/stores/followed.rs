//! Uploads of files that are still written.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use limosa_remote::{Existing, FollowedFile, UploadOptions, follow};
use limosa_storage::{Buffer, MemoryStorage, Storage, block_on};
use limosa_testkit::{HttpFault, ObjectServerKind, stores_skipped, wait_for};

use crate::{Bed, contents, memory, pattern, said, url};

const MIB: usize = 1 << 20;

/// The most bytes of a file here.
const MOST: u64 = 60 << 20;

/// A file that grows, and is uploaded meanwhile.
struct Growing {
    file: Arc<dyn Storage>,
    followed: FollowedFile,
}

impl Growing {
    fn new(options: &UploadOptions) -> Self {
        let file: Arc<dyn Storage> = Arc::new(MemoryStorage::with_contents(Vec::new(), 2 * MOST));
        let followed = follow(Arc::clone(&file), &url("k"), MOST, options).unwrap();
        Self { file, followed }
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        block_on(self.file.write(at as u64, Buffer::from_slice(bytes).into())).unwrap();
    }
}

fn parts_sent(bed: &Bed) -> usize {
    bed.proxy.take_requests().iter().filter(|request| request.target.contains("partNumber=")).count()
}

/// Waits for this number of requests with parts of a file that is not whole.
fn wait_parts(bed: &Bed, count: usize) {
    let mut sent = 0;
    wait_for("parts of a file that is not whole", || {
        sent += parts_sent(bed);
        (sent == count).then_some(())
    });
}

#[test]
fn parts_are_sent_while_the_file_grows_and_again_if_they_are_changed() {
    if stores_skipped() {
        return;
    }
    for kind in ObjectServerKind::ALL {
        let bed = Bed::new(kind);
        let mut bytes = pattern(70, 42 * MIB + 17);
        let growing = Growing::new(&bed.uploading());
        growing.write(0, &bytes[..31 * MIB]);
        wait_parts(&bed, 2);
        growing.write(31 * MIB, &bytes[31 * MIB..]);
        // A table in the third part, and the header.
        for at in [12 * MIB + 5, 0] {
            bytes[at..at + 4].copy_from_slice(b"new!");
            growing.write(at, b"new!");
        }
        let done = growing.followed.finish().unwrap();
        assert_eq!((done.length, done.counters.parts), (bytes.len() as u64, 9));
        // Nine parts; and the third again if it was sent by then.
        let again = done.counters.bytes - bytes.len() as u64;
        assert!([0, 5 << 20].contains(&again), "{again} bytes were sent again");
        assert!(contents(&bed, "k").unwrap() == bytes, "{kind:?}");
    }
}

#[test]
fn a_part_that_was_sent_and_is_changed_is_sent_again() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let mut bytes = pattern(71, 40 * MIB);
    let growing = Growing::new(&bed.uploading());
    growing.write(0, &bytes);
    wait_parts(&bed, 3);
    bytes[6 * MIB] ^= 1;
    growing.write(6 * MIB, &bytes[6 * MIB..=6 * MIB]);
    let done = growing.followed.finish().unwrap();
    assert_eq!((done.counters.parts, done.counters.bytes), (8, (45 * MIB) as u64));
    assert!(contents(&bed, "k").unwrap() == bytes);
}

#[test]
fn a_file_of_any_length_is_whole() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    for length in [0, 1, 5 * MIB, 5 * MIB + 1, 30 * MIB, 61 * MIB] {
        let bytes = pattern(72, length);
        let growing = Growing::new(&bed.uploading().existing(Existing::Replace));
        growing.write(0, &bytes);
        let done = growing.followed.finish().unwrap();
        assert_eq!(done.length, length as u64);
        assert!(contents(&bed, "k").unwrap() == bytes, "{length}");
    }
}

#[test]
fn a_file_that_is_given_up_leaves_nothing() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let records = tempfile::tempdir().unwrap();
    let growing = Growing::new(&bed.uploading().records_in(records.path()));
    growing.write(0, &pattern(73, 40 * MIB));
    wait_for("parts", || (parts_sent(&bed) > 0).then_some(()));
    let error = growing.followed.give_up();
    assert!(said(&error).ends_with("the upload was cancelled"), "{}", said(&error));
    assert_eq!(contents(&bed, "k"), None);
    let aborts = bed.proxy.take_requests().iter().filter(|request| request.method == "DELETE").count();
    assert_eq!((aborts, std::fs::read_dir(records.path().join("uploads")).unwrap().count()), (1, 0));
}

#[test]
fn a_cancelled_one_with_a_record_is_continued() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let records = tempfile::tempdir().unwrap();
    let options = bed.uploading().records_in(records.path());
    let bytes = pattern(74, 40 * MIB);
    let cancelled = Growing::new(&options);
    cancelled.write(0, &bytes);
    wait_parts(&bed, 3);
    options.cancelled.store(true, Ordering::Relaxed);
    let error = cancelled.followed.give_up();
    assert!(said(&error).ends_with("the upload was cancelled; the same one continues it"), "{}", said(&error));
    let growing = Growing::new(&bed.uploading().records_in(records.path()));
    growing.write(0, &bytes);
    let done = growing.followed.finish().unwrap();
    assert_eq!((done.counters.resumed, done.counters.parts), (3, 8));
    assert!(contents(&bed, "k").unwrap() == bytes);
}

#[test]
fn one_that_the_store_has_forgotten_is_begun_again() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let records = tempfile::tempdir().unwrap();
    let bytes = pattern(75, 40 * MIB);
    let options = bed.uploading().records_in(records.path());
    let cancelled = Growing::new(&options);
    cancelled.write(0, &bytes);
    wait_for("parts", || (parts_sent(&bed) > 0).then_some(()));
    options.cancelled.store(true, Ordering::Relaxed);
    let _ = cancelled.followed.give_up();
    let mut has_forgotten = false;
    bed.proxy.set_faults(move |request| {
        let is_part = request.target.contains("partNumber=");
        if is_part && !std::mem::replace(&mut has_forgotten, true) {
            HttpFault::Status(404, "NoSuchUpload")
        } else {
            HttpFault::None
        }
    });
    let growing = Growing::new(&bed.uploading().records_in(records.path()));
    growing.write(0, &pattern(76, 40 * MIB));
    growing.write(0, &bytes);
    let done = growing.followed.finish().unwrap();
    assert_eq!((done.counters.resumed, done.counters.parts), (0, 8));
    assert!(contents(&bed, "k").unwrap() == bytes);
}

#[test]
fn a_file_that_becomes_shorter_has_no_tail_in_the_object() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(77, 40 * MIB);
    for left in [3 * MIB, 11 * MIB, 22 * MIB] {
        let growing = Growing::new(&bed.uploading().existing(Existing::Replace));
        growing.write(0, &bytes);
        wait_parts(&bed, 3);
        block_on(growing.file.set_len(left as u64)).unwrap();
        assert_eq!(growing.followed.finish().unwrap().length, left as u64);
        assert!(contents(&bed, "k").unwrap() == bytes[..left], "{left}");
    }
}

#[test]
fn one_that_was_killed_when_it_was_complete_has_succeeded() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let records = tempfile::tempdir().unwrap();
    let options = bed.uploading().records_in(records.path());
    let mut bytes = pattern(78, 40 * MIB);
    let mut unseen = options.clone();
    unseen.store.budget = Duration::from_secs(2);
    bed.lose_completion();
    let growing = Growing::new(&unseen);
    growing.write(0, &bytes);
    growing.followed.finish().unwrap_err();
    wait_for("the object", || contents(&bed, "k"));
    bed.proxy.set_faults(|_| HttpFault::None);
    // Its tables come last again: until then it is not the object.
    let again = Growing::new(&options);
    again.write(0, &bytes);
    again.write(6 * MIB, &[0; 4096]);
    std::thread::sleep(Duration::from_millis(100));
    again.write(6 * MIB, &bytes[6 * MIB..6 * MIB + 4096]);
    let done = again.followed.finish().unwrap();
    assert_eq!((done.counters.resumed, done.counters.parts, done.counters.bytes), (8, 8, 0));
    // It is anybody's object now, and another one is refused.
    bytes[0] ^= 1;
    let error = follow(memory(&bytes), &url("k"), MOST, &options).unwrap_err();
    assert!(said(&error).ends_with("the object exists already"), "{}", said(&error));
}

#[test]
fn a_store_that_refuses_is_noticed_while_the_file_is_written() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    bed.proxy.set_faults(|request| match request.method.as_str() {
        "POST" => HttpFault::Status(403, "AccessDenied"),
        _ => HttpFault::None,
    });
    let growing = Growing::new(&bed.uploading());
    growing.write(0, &pattern(79, 40 * MIB));
    wait_for("the refusal", || growing.followed.has_failed().then_some(()));
    assert!(said(&growing.followed.finish().unwrap_err()).contains("refuses access"));
}

#[test]
fn one_whose_store_is_silent_is_given_up_at_once() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    bed.proxy.set_faults(|request| match request.method.as_str() {
        "POST" => HttpFault::Delay(Duration::from_secs(100)),
        _ => HttpFault::None,
    });
    for is_cancelled in [false, true] {
        let options = bed.uploading();
        let growing = Growing::new(&options);
        growing.write(0, &pattern(80, 40 * MIB));
        let is_begun = || bed.proxy.take_requests().iter().any(|request| request.method == "POST").then_some(());
        wait_for("its beginning", is_begun);
        let begun = Instant::now();
        options.cancelled.store(is_cancelled, Ordering::Relaxed);
        let error = growing.followed.give_up();
        assert!(said(&error).ends_with("the upload was cancelled"), "{}", said(&error));
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    }
}
