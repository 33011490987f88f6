//! The cost of a first write to a cluster: the exact requests to the storages, and no byte of another cluster.

use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;

use limosa_image::qcow2::{CreateOptions, Qcow2, Qcow2Options};
use limosa_image::{Disk, GuestOffset, Pending};
use limosa_storage::testing::{RequestHolder, RequestRecorder, SeededRandom, SparseMemory};
use limosa_storage::{Buffer, Operation, Storage, block_on};
use limosa_testkit::image::{self, TestImage, leaks, memory_file, poll_once, raw, write};

const K: u64 = 1 << 10;
const CLUSTER: u64 = 64 * K;
/// The same, as an index.
const BYTES: usize = 64 << 10;
const SIZE: u64 = 4 << 20;
const MOST: u64 = 64 << 20;

const READ: Operation = Operation::Read;
const WRITE: Operation = Operation::Write;

/// An image whose storages are watched, or held.
struct Bench {
    counting: RequestRecorder,
    file: Arc<dyn Storage>,
    disk: Arc<Qcow2>,
}

fn options(allocate_ahead: u64) -> Qcow2Options {
    Qcow2Options::default().allocate_ahead(allocate_ahead).discard(false)
}

/// An image in `file`; its tables are there, because its last cluster was written.
fn bench(
    file: Arc<dyn Storage>,
    below: Option<Arc<dyn Storage>>,
    options: Qcow2Options,
    over: impl Fn(Arc<dyn Storage>) -> Arc<dyn Storage>,
) -> Bench {
    let counting = RequestRecorder::new();
    let image = TestImage::create_in(file, &CreateOptions::default().size(SIZE));
    let over = |storage| counting.wrap(over(storage));
    let disk = image.over(over).open_over(below.map(|below| raw(over(below))), options);
    write(&*disk, SIZE - CLUSTER, &[0xee; BYTES]);
    counting.take();
    Bench { counting, file: image.file, disk }
}

fn full() -> (Arc<dyn Storage>, Vec<u8>) {
    let bytes = SeededRandom::new(7).bytes(usize::try_from(SIZE).unwrap());
    (Arc::new(SparseMemory::file_with("below", bytes.clone(), MOST)), bytes)
}

fn read(disk: &dyn Disk, range: Range<u64>) -> Vec<u8> {
    image::read(disk, range.start, range.end - range.start)
}

impl Bench {
    /// All requests to the storages, with offsets in the image's clusters.
    fn asked(&self) -> Vec<(String, Operation, Range<u64>)> {
        let within = |range: Range<u64>, name: &str| {
            let from = if name == "image" { range.start & !(CLUSTER - 1) } else { 0 };
            range.start - from..range.end - from
        };
        let seen = self.counting.take().into_iter();
        seen.map(|seen| (seen.storage.to_string(), seen.operation, within(seen.range, &seen.storage))).collect()
    }
}

fn to_below(operation: Operation, range: Range<u64>) -> (String, Operation, Range<u64>) {
    ("below".into(), operation, range)
}

fn to_image(operation: Operation, range: Range<u64>) -> (String, Operation, Range<u64>) {
    ("image".into(), operation, range)
}

/// The expected contents of a cluster that `data` was written to.
fn around(cluster: &[u8], at: u64, data: &[u8]) -> Vec<u8> {
    let at = usize::try_from(at).unwrap();
    [&cluster[..at], data, &cluster[at + data.len()..]].concat()
}

#[test]
fn over_a_backing_image_it_is_two_operations_and_three_where_more_than_16_kib_would_be_skipped() {
    let (storage, bytes) = full();
    let bench = bench(memory_file("image"), Some(storage), options(1 << 20), |storage| storage);
    let cluster = |number: u64| &bytes[usize::try_from(number * CLUSTER).unwrap()..][..BYTES];
    for (number, data, reads) in [
        (0_u64, 12 * K..16 * K, vec![(0, 64 * K)]),
        (1, 12 * K..28 * K, vec![(0, 64 * K)]),
        (2, 12 * K..28 * K + 512, vec![(0, 12 * K), (28 * K + 512, 64 * K)]),
        (3, 0..4 * K, vec![(4 * K, 64 * K)]),
        (4, 60 * K..64 * K, vec![(0, 60 * K)]),
        (5, 0..64 * K, vec![]),
    ] {
        let new = vec![7; usize::try_from(data.end - data.start).unwrap()];
        write(&*bench.disk, number * CLUSTER + data.start, &new);
        let at = number * CLUSTER;
        let mut expected: Vec<_> = reads.into_iter().map(|(from, to)| to_below(READ, at + from..at + to)).collect();
        expected.push(to_image(WRITE, 0..CLUSTER));
        assert_eq!(bench.asked(), expected, "{data:x?}");
        assert_eq!(read(&*bench.disk, at..at + CLUSTER), around(cluster(number), data.start, &new));
        bench.counting.take();
    }
}

#[test]
fn without_contents_below_it_is_one_write_of_the_guests_bytes_where_the_storage_proves_zeros() {
    // Beyond the end, in a hole, and in space that was never written.
    for (ahead, prepare) in [(0, "end"), (1 << 20, "end"), (0, "hole"), (0, "unwritten")] {
        let file = memory_file("image");
        let bench = bench(Arc::clone(&file), None, options(ahead), |storage| storage);
        let end = file.length().unwrap();
        match prepare {
            "hole" => block_on(file.set_len(end + SIZE)).unwrap(),
            "unwritten" => block_on(file.allocate(end..end + SIZE)).unwrap(),
            _ => {}
        }
        write(&*bench.disk, 12 * K, &[7; 4096]);
        // Without anything taken ahead, the file is made longer for each cluster.
        let longer = ((ahead, prepare) == (0, "end")).then(|| to_image(Operation::Allocate, 0..CLUSTER));
        let expected: Vec<_> = longer.into_iter().chain([to_image(WRITE, 12 * K..16 * K)]).collect();
        assert_eq!(bench.asked(), expected, "{prepare}");
        assert_eq!(read(&*bench.disk, 0..CLUSTER), around(&vec![0; BYTES], 12 * K, &[7; 4096]));
    }
}

#[test]
fn a_cluster_that_is_used_anew_is_written_as_a_whole_and_nothing_of_what_it_was_is_seen() {
    let bench = bench(memory_file("image"), None, options(0), |storage| storage);
    write(&*bench.disk, 0, &[0xaa; BYTES]);
    let old = bench.counting.take().pop().unwrap().range;
    block_on(bench.disk.discard(GuestOffset(0), CLUSTER)).unwrap();
    block_on(bench.disk.flush()).unwrap();
    bench.counting.take();
    write(&*bench.disk, 5 * CLUSTER + 12 * K, &[7; 4096]);
    let seen = bench.counting.take();
    assert_eq!(seen.iter().map(|seen| (seen.operation, seen.range.clone())).collect::<Vec<_>>(), [(WRITE, old)]);
    let found = read(&*bench.disk, 5 * CLUSTER..6 * CLUSTER);
    assert_eq!(found, around(&vec![0; BYTES], 12 * K, &[7; 4096]));
}

#[test]
fn on_a_block_device_a_cluster_is_written_as_a_whole_and_nothing_of_what_lay_there_is_seen() {
    for ahead in [0, 1 << 20] {
        let device: Arc<dyn Storage> = Arc::new(SparseMemory::device("image", 8 << 20, 3));
        let bench = bench(device, None, options(ahead), |storage| storage);
        write(&*bench.disk, 12 * K, &[7; 4096]);
        assert_eq!(bench.asked(), [to_image(WRITE, 0..CLUSTER)]);
        assert_eq!(read(&*bench.disk, 0..CLUSTER), around(&vec![0; BYTES], 12 * K, &[7; 4096]));
    }
}

#[test]
fn nothing_is_read_where_the_backing_image_has_a_hole() {
    let bytes = [vec![5; 8 << 10], vec![0; 56 << 10], vec![0; 64 << 10]].concat();
    let storage: Arc<dyn Storage> = Arc::new(SparseMemory::file_with("below", bytes, MOST));
    let bench = bench(memory_file("image"), Some(storage), options(1 << 20), |storage| storage);
    // A hole all over, and what lies behind the backing image's end.
    for cluster in [1, 2] {
        write(&*bench.disk, cluster * CLUSTER + 12 * K, &[7; 4096]);
        assert_eq!(bench.asked(), [to_image(WRITE, 12 * K..16 * K)]);
    }
    // A hole behind what is there: it is neither read nor written.
    write(&*bench.disk, 12 * K, &[7; 4096]);
    assert_eq!(bench.asked(), [to_below(READ, 0..8 * K), to_image(WRITE, 0..16 * K)]);
    let first = [vec![5; 8 << 10], vec![0; 56 << 10]].concat();
    assert_eq!(read(&*bench.disk, 0..CLUSTER), around(&first, 12 * K, &[7; 4096]));
}

#[test]
fn nothing_is_read_where_the_backing_image_says_zero_or_has_nothing() {
    let counting = RequestRecorder::new();
    let storage = counting.wrap(Arc::new(SparseMemory::file("below", MOST)));
    let how = CreateOptions::default().size(SIZE);
    let below = TestImage::create_in(storage, &how);
    let base = below.open_with(options(0));
    // Zeros where something was, and still lies.
    write(&*base, 0, &[0xaa; BYTES]);
    block_on(base.write_zeroes(GuestOffset(0), CLUSTER, false)).unwrap();
    block_on(base.close()).unwrap();
    let base = below.open_with(options(0).read_only(true));
    let disk = TestImage::create_in(counting.wrap(memory_file("image")), &how).open_over(Some(base), options(1 << 20));
    // The tables of both are in memory from here on.
    write(&*disk, 9 * CLUSTER, &[1; 512]);
    counting.take();
    for cluster in [0, 1] {
        write(&*disk, cluster * CLUSTER + 12 * K, &[7; 4096]);
        let seen = counting.take();
        let what = seen.iter().map(|seen| (&*seen.storage, seen.operation, seen.range.end - seen.range.start));
        assert_eq!(what.collect::<Vec<_>>(), [("image", WRITE, 4 * K)]);
        let found = read(&*disk, cluster * CLUSTER..(cluster + 1) * CLUSTER);
        assert_eq!(found, around(&vec![0; BYTES], 12 * K, &[7; 4096]));
        counting.take();
    }
}

#[test]
fn neighbouring_and_overlapping_requests_to_one_new_cluster_share_one_copy() {
    let held = RequestHolder::only(&[READ]);
    held.release_all();
    let (storage, bytes) = full();
    let bench = bench(memory_file("image"), Some(storage), options(1 << 20), |storage| held.wrap(storage));
    held.hold_again();
    let requests = [(12 * K, 1_u8), (16 * K, 2), (14 * K, 3), (40 * K, 4)];
    let begin = |(at, byte): (u64, u8)| bench.disk.write(GuestOffset(at), Buffer::from_slice(&[byte; 4096]).into());
    let mut writes: Vec<Pending<'_>> = requests.map(begin).into();
    assert!(writes.iter_mut().all(|write| poll_once(write).is_pending()));
    let [copy] = &held.waiting()[..] else { panic!("one read for all") };
    assert!(held.release(copy.number));
    assert!(writes.iter_mut().all(|write| poll_once(write) == Poll::Ready(true)));
    drop(writes);
    assert_eq!(bench.asked(), [to_below(READ, 0..CLUSTER), to_image(WRITE, 0..CLUSTER)]);
    assert_eq!(bench.disk.counts().joined, 3);
    held.release_all();
    let mut expected = bytes[..BYTES].to_vec();
    for (at, byte) in requests {
        expected = around(&expected, at, &[byte; 4096]);
    }
    assert_eq!(read(&*bench.disk, 0..CLUSTER), expected);
}

#[test]
fn requests_to_one_new_cluster_on_proven_zeros_are_written_at_the_same_time() {
    let held = RequestHolder::only(&[WRITE]);
    held.release_all();
    let bench = bench(memory_file("image"), None, options(1 << 20), |storage| held.wrap(storage));
    held.hold_again();
    let begin = |at: u64| bench.disk.write(GuestOffset(at), Buffer::from_slice(&[7; 4096]).into());
    let mut writes: Vec<Pending<'_>> = [12 * K, 16 * K, 40 * K].map(begin).into();
    assert!(writes.iter_mut().all(|write| poll_once(write).is_pending()));
    let [first, second, third] = &held.waiting()[..] else { panic!("three writes at once") };
    assert_eq!((second.range.start, third.range.start), (first.range.start + 4 * K, first.range.start + 28 * K));
    held.release_all();
    assert!(writes.iter_mut().all(|write| poll_once(write) == Poll::Ready(true)));
    drop(writes);
    let written = [12 * K..16 * K, 16 * K..20 * K, 40 * K..44 * K].map(|range| to_image(WRITE, range));
    assert_eq!(bench.asked(), written);
}

#[test]
fn a_dropped_request_settles_with_what_it_had_begun_and_those_who_joined_it_do_not_feel_it() {
    let held = RequestHolder::only(&[READ, WRITE]);
    held.release_all();
    let (storage, bytes) = full();
    let bench = bench(memory_file("image"), Some(storage), options(1 << 20), |storage| held.wrap(storage));
    held.hold_again();
    let mut dropped = bench.disk.write(GuestOffset(12 * K), Buffer::from_slice(&[1; 4096]).into());
    assert!(poll_once(&mut dropped).is_pending());
    let mut joined = bench.disk.write(GuestOffset(16 * K), Buffer::from_slice(&[2; 4096]).into());
    assert!(poll_once(&mut joined).is_pending());
    drop(dropped);
    // Once each is released, the requests that are left continue it.
    held.release_all();
    assert_eq!(poll_once(&mut joined), Poll::Ready(true));
    drop(joined);
    assert_eq!(bench.asked(), [to_below(READ, 0..CLUSTER), to_image(WRITE, 0..CLUSTER)]);
    let first = around(&bytes[..BYTES], 12 * K, &[1; 4096]);
    assert_eq!(read(&*bench.disk, 0..CLUSTER), around(&first, 16 * K, &[2; 4096]));

    // One that no request has joined is completed by the next request to any cluster.
    held.hold_again();
    let mut dropped = bench.disk.write(GuestOffset(CLUSTER), Buffer::from_slice(&[3; 4096]).into());
    assert!(poll_once(&mut dropped).is_pending());
    drop(dropped);
    held.release_all();
    bench.counting.take();
    assert_eq!(read(&*bench.disk, SIZE - 512..SIZE), [0xee; 512]);
    assert_eq!(bench.asked(), [to_image(WRITE, 0..CLUSTER), to_image(READ, CLUSTER - 512..CLUSTER)]);
    assert_eq!(read(&*bench.disk, CLUSTER..CLUSTER + 4096), [3; 4096]);
    block_on(bench.disk.close()).unwrap();
    assert_eq!(leaks(&*bench.file), 0);
}
