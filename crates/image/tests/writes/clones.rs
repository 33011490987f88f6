//! Contents that a new cluster takes over are shared in place of being copied: the exact operations, and the bytes.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::task::Poll;

use limosa_image::qcow2::{CreateOptions, Qcow2, Qcow2Options, ReflinkMode};
use limosa_image::{Disk, GuestOffset, Pending};
use limosa_storage::testing::{Failing, Fault, RequestHolder, RequestRecorder, SeededRandom, SparseMemory};
use limosa_storage::{Buffer, CacheMode, Create, FileOptions, FileStorage, Operation, Storage, block_on};
use limosa_testkit::image::{TestImage, poll_once, raw, read_all, write};
use limosa_testkit::{on_reflinks, qemu_img, qemu_io, scratch};

const M: u64 = 1 << 20;
const SIZE: u64 = 8 * M;

/// A request to a storage, by the name of the storage.
type LoggedRequest = (String, Operation, Range<u64>);

/// The requests, without those of tables.
fn asked(counting: &RequestRecorder) -> Vec<LoggedRequest> {
    let seen = counting.take().into_iter().map(|seen| (seen.storage.to_string(), seen.operation, seen.range));
    seen.filter(|(_, operation, range)| *operation == Operation::Clone || range.end - range.start < 2 * M).collect()
}

fn random(len: u64) -> Vec<u8> {
    SeededRandom::new(len).bytes(usize::try_from(len).unwrap())
}

fn memory(name: &str, bytes: Vec<u8>) -> Arc<dyn Storage> {
    Arc::new(SparseMemory::file_with(name, bytes, 256 * M).with_cloning())
}

/// An image with clusters of 1 MiB in `file`, which has not been made yet.
fn image(file: Arc<dyn Storage>, backing: Option<Arc<dyn Disk>>, options: &Qcow2Options) -> Arc<Qcow2> {
    let how = CreateOptions::default().size(SIZE).cluster_size(M);
    TestImage::create_in(file, &how).open_over(backing, options.clone())
}

/// The same bytes with others over them.
fn with(bytes: &[u8], at: u64, new: &[u8]) -> Vec<u8> {
    let at = usize::try_from(at).unwrap();
    [&bytes[..at], new, &bytes[at + new.len()..]].concat()
}

fn cloned_and_written(host: u64, at: u64, length: u64) -> [LoggedRequest; 2] {
    let image = || "image".to_owned();
    let written = host + at..host + at + length;
    [(image(), Operation::Clone, host..host + M), (image(), Operation::Write, written)]
}

/// The image's file, watched, and what watches it.
fn watched() -> (RequestRecorder, Arc<dyn Storage>) {
    let counting = RequestRecorder::new();
    let file = counting.wrap(memory("image", Vec::new()));
    (counting, file)
}

/// Where the new cluster lies that was written last.
fn host(asked: &[LoggedRequest]) -> u64 {
    asked.last().map(|(.., range)| range.start & !(M - 1)).unwrap()
}

#[test]
fn a_write_over_a_raw_image_is_one_clone_and_one_write_and_reads_nothing() {
    let (counting, file) = watched();
    let below = random(SIZE);
    let backing = raw(counting.wrap(memory("below", below.clone())));
    let disk = image(file, Some(backing), &Qcow2Options::default());
    write(&*disk, 5 * M, &[1; 512]);
    counting.take();
    write(&*disk, 2 * M + 12288, &[7; 4096]);
    let seen = asked(&counting);
    assert_eq!(seen, cloned_and_written(host(&seen), 12288, 4096));
    let counts = disk.counts();
    assert_eq!((counts.clones.operations, counts.clones.bytes), (2, 2 * M));
    assert_eq!((counts.data_writes.operations, counts.cow_reads.operations, counts.cow_writes.operations), (2, 0, 0));
    assert_eq!(read_all(&*disk), with(&with(&below, 5 * M, &[1; 512]), 2 * M + 12288, &[7; 4096]));
    block_on(disk.close()).unwrap();
}

#[test]
fn a_cluster_of_a_backing_qcow2_image_that_lies_together_is_cloned_from_where_it_lies() {
    let (counting, file) = watched();
    let below = counting.wrap(memory("below", Vec::new()));
    let base = image(Arc::clone(&below), None, &Qcow2Options::default());
    let contents = random(4 * M);
    write(&*base, 0, &contents);
    block_on(base.close()).unwrap();
    let base = TestImage::existing(below).open_read_only();
    let disk = image(file, Some(base), &Qcow2Options::default());
    write(&*disk, 0, &[1; 512]);
    counting.take();
    // Where it reads anything it is to know the tables.
    write(&*disk, 3 * M, &[7; 4096]);
    let seen = asked(&counting);
    let host = host(&seen);
    // The first block is written over as a whole.
    let image = || "image".to_owned();
    let cloned = (image(), Operation::Clone, host + 4096..host + M);
    assert_eq!(seen, [cloned, (image(), Operation::Write, host..host + 4096)]);
    // Where the backing image has nothing there is nothing to clone.
    write(&*disk, 6 * M + 4096, &[8; 4096]);
    assert!(asked(&counting).iter().all(|(_, operation, _)| *operation == Operation::Write));
    let all = [&contents[..], &vec![0; 4 << 20]].concat();
    let expected = with(&with(&with(&all, 0, &[1; 512]), 3 * M, &[7; 4096]), 6 * M + 4096, &[8; 4096]);
    assert_eq!(read_all(&*disk), expected);
    block_on(disk.close()).unwrap();
}

#[test]
fn a_cluster_that_a_snapshot_shares_is_cloned_within_the_image() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let path = folder.path().join("image");
    let path = path.to_str().unwrap();
    qemu_img(["create", "-q", "-f", "qcow2", "-o", "cluster_size=1M", path, "8M"]).unwrap();
    qemu_io(["-f", "qcow2", "-c", "write -q -P 3 0 8M", path]).unwrap();
    qemu_img(["snapshot", "-c", "before", path]).unwrap();
    let counting = RequestRecorder::new();
    let kept = SparseMemory::file_with("image", std::fs::read(path).unwrap(), 256 * M).with_cloning();
    let file = counting.wrap(Arc::new(kept.clone()));
    let disk = TestImage::existing(file).open();
    write(&*disk, 7 * M, &[4; 512]);
    counting.take();
    write(&*disk, M + 65536, &[7; 65536]);
    let seen = asked(&counting);
    assert_eq!(seen, cloned_and_written(host(&seen), 65536, 65536));
    let expected = with(&with(&vec![3; 8 << 20], M + 65536, &[7; 65536]), 7 * M, &[4; 512]);
    assert_eq!(read_all(&*disk), expected);
    block_on(disk.close()).unwrap();
    std::fs::write(path, kept.contents()).unwrap();
    qemu_img(["check", "-q", path]).unwrap();
    // The snapshot is as it was, and stock QEMU reads what was written.
    qemu_io(["-f", "qcow2", "-r", "-c", "read -q -P 7 1114112 65536", "-c", "read -q -P 3 1M 65536", path]).unwrap();
    qemu_img(["snapshot", "-a", "before", path]).unwrap();
    qemu_io(["-f", "qcow2", "-r", "-c", "read -q -P 3 0 8M", path]).unwrap();
}

#[test]
fn what_a_snapshot_shares_is_not_cloned_from_the_backing_image_below_it() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let [path, below] = ["image", "below"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    let contents = random(SIZE);
    std::fs::write(&below, &contents).unwrap();
    qemu_img(["create", "-q", "-f", "qcow2", "-o", "cluster_size=1M", "-b", &below, "-F", "raw", &path]).unwrap();
    qemu_io(["-f", "qcow2", "-c", "write -q -P 3 1M 1M", &path]).unwrap();
    qemu_img(["snapshot", "-c", "before", &path]).unwrap();
    let file = memory("image", std::fs::read(&path).unwrap());
    let backing = Some(raw(memory("below", contents.clone())));
    let disk = TestImage::existing(file).open_over(backing, Qcow2Options::default());
    // From the end of what only the backing image has into what the snapshot shares.
    write(&*disk, M - 65536, &[7; 131_072]);
    assert_eq!(disk.counts().clones.operations, 2);
    let expected = with(&contents, M, &[3; 1 << 20]);
    assert_eq!(read_all(&*disk), with(&expected, M - 65536, &[7; 131_072]));
}

#[test]
fn a_storage_that_cannot_clone_is_asked_once_and_then_everything_is_copied() {
    let counting = RequestRecorder::new();
    let file = counting.wrap(Arc::new(SparseMemory::file("image", 256 * M)));
    let below = random(SIZE);
    let backing = raw(counting.wrap(memory("below", below.clone())));
    let disk = image(file, Some(backing), &Qcow2Options::default());
    counting.take();
    let mut expected = below;
    for number in 0..3 {
        let at = number * M + 8192;
        write(&*disk, at, &[7; 4096]);
        expected = with(&expected, at, &[7; 4096]);
    }
    let seen = asked(&counting);
    let count = |name: &str, kind| seen.iter().filter(|(on, did, _)| on == name && *did == kind).count();
    assert_eq!((count("image", Operation::Clone), count("below", Operation::Read)), (1, 3));
    let counts = disk.counts();
    assert_eq!((counts.clones.operations, counts.cow_reads.operations, counts.cow_writes.operations), (0, 3, 3));
    assert_eq!(read_all(&*disk), expected);
}

#[test]
fn a_clone_that_fails_does_not_fail_the_guests_write() {
    for fault in Fault::ALL {
        let failing = Failing::only(&[Operation::Clone]);
        let below = random(SIZE);
        let backing = raw(memory("below", below.clone()));
        let file = failing.wrap(memory("image", Vec::new()));
        let disk = image(file, Some(backing), &Qcow2Options::default());
        failing.fail(0, u64::MAX, fault);
        write(&*disk, M + 4096, &[7; 512]);
        assert_eq!(failing.seen(), (1, 1));
        assert_eq!(read_all(&*disk), with(&below, M + 4096, &[7; 512]), "{fault:?}");
    }
}

#[test]
fn little_is_copied_and_so_is_everything_with_clones_off() {
    for (options, data) in [
        (Qcow2Options::default().reflink_mode(ReflinkMode::Off), 4096),
        // Of the cluster's 1 MiB less than 128 KiB have to be kept.
        (Qcow2Options::default(), 920 << 10),
    ] {
        let (counting, file) = watched();
        let below = random(SIZE);
        let disk = image(file, Some(raw(counting.wrap(memory("below", below.clone())))), &options);
        counting.take();
        let data = vec![7; data];
        write(&*disk, M + 4096, &data);
        assert!(counting.take().iter().all(|seen| seen.operation != Operation::Clone), "{options:?}");
        assert_eq!((disk.counts().clones.operations, read_all(&*disk)), (0, with(&below, M + 4096, &data)));
    }
}

#[test]
fn zeros_behind_a_short_backing_image_are_not_cloned_and_what_is_before_them_is() {
    let (counting, file) = watched();
    // It ends in the middle of the second cluster.
    let below = random(M + 512 * 1024);
    let disk = image(file, Some(raw(counting.wrap(memory("below", below.clone())))), &Qcow2Options::default());
    counting.take();
    write(&*disk, M, &[7; 4096]);
    let seen = asked(&counting);
    let host = host(&seen);
    let image = || "image".to_owned();
    let cloned = (image(), Operation::Clone, host + 4096..host + 512 * 1024);
    assert_eq!(seen[seen.len() - 2..], [cloned, (image(), Operation::Write, host..host + 4096)]);
    let whole = [&below[..], &vec![0; (SIZE - M - 512 * 1024).try_into().unwrap()]].concat();
    assert_eq!(read_all(&*disk), with(&whole, M, &[7; 4096]));
}

#[test]
fn nothing_is_written_before_the_clone_is_there_and_writes_that_come_meanwhile_share_it() {
    let held = RequestHolder::only(&[Operation::Clone]);
    let (counting, file) = watched();
    let below = random(SIZE);
    let disk = image(held.wrap(file), Some(raw(memory("below", below.clone()))), &Qcow2Options::default());
    let mut first = disk.write(GuestOffset(M + 65536), Buffer::from_slice(&[1; 4096]).into());
    assert!(poll_once(&mut first).is_pending());
    counting.take();
    let mut others: Vec<Pending<'_>> = [(M, 2), (M + 66560, 3), (M + 900_096, 4)]
        .into_iter()
        .map(|(at, byte)| disk.write(GuestOffset(at), Buffer::from_slice(&[byte; 4096]).into()))
        .collect();
    assert!(others.iter_mut().all(|write| poll_once(write).is_pending()));
    assert!(counting.take().is_empty(), "nothing is written before");
    let [clone] = &held.waiting()[..] else { panic!("one clone for all") };
    let host = clone.range.start;
    assert!(held.release(clone.number));
    assert_eq!(poll_once(&mut first), Poll::Ready(true));
    assert!(others.iter_mut().all(|write| poll_once(write) == Poll::Ready(true)));
    let mut seen = asked(&counting);
    seen.sort_by_key(|(.., range)| (range.start, range.end));
    let write = |range: Range<u64>| ("image".to_owned(), Operation::Write, host + range.start..host + range.end);
    let cloned = ("image".to_owned(), Operation::Clone, host..host + M);
    // Two that overlap are one write; what is between the others is not written.
    assert_eq!(seen, [write(0..4096), cloned, write(65536..70656), write(900_096..904_192)]);
    assert_eq!(disk.counts().joined, 3);
    let mut expected = below;
    for (at, byte) in [(M + 65536, 1), (M, 2), (M + 66560, 3), (M + 900_096, 4)] {
        expected = with(&expected, at, &[byte; 4096]);
    }
    drop((first, others));
    assert_eq!(read_all(&*disk), expected);
}

/// Writes over a raw image in files of a folder: how often space was shared. The bytes are right, whether or not.
fn on_files(folder: &Path, cache: CacheMode) -> u64 {
    let make = |name: &str| {
        let options = FileOptions { cache, create: Create::New, ..FileOptions::default() };
        FileStorage::open(folder.join(name), &options).unwrap()
    };
    let below = random(SIZE);
    let file = make("below");
    block_on(file.write(0, Buffer::from_slice(&below).into())).unwrap();
    let target = make("image");
    let disk = image(target.clone(), Some(raw(file)), &Qcow2Options::default());
    let mut expected = below;
    for number in 0..3 {
        let at = number * M + 8192;
        write(&*disk, at, &[7; 4096]);
        expected = with(&expected, at, &[7; 4096]);
    }
    assert_eq!(read_all(&*disk), expected);
    block_on(disk.close()).unwrap();
    let (asked, counts) = (target.counters().clones.operations, disk.counts());
    // Either every time, or it was tried once.
    let expected = if counts.clones.operations == 0 { (1, 3) } else { (3, 0) };
    assert_eq!((asked, counts.cow_reads.operations), expected);
    for name in ["image", "below"] {
        std::fs::remove_file(folder.join(name)).unwrap();
    }
    counts.clones.operations
}

#[test]
fn on_files_of_one_filesystem_that_can_share_space_is_shared() {
    let run = on_reflinks(|folder| {
        for cache in [CacheMode::Writeback, CacheMode::None] {
            assert_eq!(on_files(folder.path(), cache), 3, "{cache:?}");
        }
    });
    run.unwrap();
}

#[test]
fn on_files_space_is_shared_where_the_filesystem_can_and_copied_where_it_cannot() {
    let folder = scratch().unwrap();
    for cache in [CacheMode::Writeback, CacheMode::None] {
        on_files(folder.path(), cache);
    }
}
