//! Properties of files in addition to the contract of all storages.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use limosa_storage::{
    Buffer, CacheMode, ContentRun, Create, ExtentKind, FileOptions, FileStorage, Io, IoVector, LockPolicy,
    MemoryStorage, Operation, OperationCount, Storage, ZeroOptions, block_on,
};
use tempfile::TempDir;

fn made(folder: &TempDir, options: FileOptions) -> Arc<FileStorage> {
    FileStorage::open(folder.path().join("disk.raw"), &FileOptions { create: Create::IfMissing, ..options }).unwrap()
}

fn of(cache: CacheMode, io: Io) -> FileOptions {
    FileOptions { cache, io, ..FileOptions::default() }
}

#[test]
fn a_file_is_made_only_if_it_may_be() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("disk.raw");
    let open =
        |create, read_only| FileStorage::open(&path, &FileOptions { create, read_only, ..FileOptions::default() });
    let error = open(Create::No, false).unwrap_err();
    assert_eq!((error.kind(), error.operation), (io::ErrorKind::NotFound, Operation::Open));
    assert!(open(Create::IfMissing, true).is_err() && !path.exists());
    let storage = open(Create::New, false).unwrap();
    block_on(storage.write(0, Buffer::from_slice(b"kept").into())).unwrap();
    drop(storage);
    assert_eq!(open(Create::New, false).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    drop(open(Create::IfMissing, false).unwrap());
    assert_eq!(fs::read(&path).unwrap(), b"kept");
}

#[test]
fn what_is_no_file_and_no_block_device_is_refused() {
    let folder = TempDir::new().unwrap();
    let pipe = folder.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    for (path, kind) in [(folder.path(), "directory"), (Path::new("/dev/null"), "character device"), (&*pipe, "pipe")] {
        let error = FileStorage::open(path, &FileOptions::read_only_default()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        assert_eq!(error.source.to_string(), format!("must be a regular file or a block device, not a {kind}"));
    }
}

#[test]
fn nothing_is_written_to_what_was_opened_for_reading() {
    let folder = TempDir::new().unwrap();
    for io in [Io::Uring, Io::Threads] {
        let path = folder.path().join("disk.raw");
        fs::write(&path, [7; 8192]).unwrap();
        let storage = FileStorage::open(&path, &FileOptions { io, ..FileOptions::read_only_default() }).unwrap();
        assert!(storage.is_read_only());
        let requests = [
            storage.write(0, Buffer::from_slice(b"x").into()),
            storage.write_zeroes(0..512, ZeroOptions::default()),
            storage.discard(0..512),
            storage.set_len(0),
            storage.allocate(0..512),
        ];
        for request in requests {
            let error = block_on(request).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
            assert!(error.source.to_string().contains("open read-only"), "{error}");
        }
        block_on(storage.flush()).unwrap();
        assert_eq!((storage.counters().flushes, fs::read(&path).unwrap()), (0, vec![7; 8192]));
    }
}

#[test]
fn a_descriptor_has_to_allow_what_it_is_for() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let reading = || fs::File::open(file.path()).unwrap();
    FileStorage::from_fd(reading().into(), "disk", &FileOptions::read_only_default()).unwrap();
    let error = FileStorage::from_fd(reading().into(), "disk", &FileOptions::default()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    let writing = fs::File::options().write(true).open(file.path()).unwrap();
    assert!(FileStorage::from_fd(writing.into(), "disk", &FileOptions::default()).is_err());
}

#[test]
fn a_descriptor_is_used_directly_or_not_whatever_it_was_before() {
    let folder = TempDir::new().unwrap();
    let storage = made(&folder, of(CacheMode::None, Io::Auto));
    block_on(storage.write(0, Buffer::from_slice(&[5; 4096]).into())).unwrap();
    assert!(storage.alignment().offset > 1, "{:?}", storage.alignment());
    let file = storage.file().unwrap().try_clone_to_owned().unwrap();
    let options = FileOptions { lock: LockPolicy::None, ..of(CacheMode::Writeback, Io::Auto) };
    let cached = FileStorage::from_fd(file, "disk", &options).unwrap();
    assert_eq!(cached.alignment().offset, 1);
    let found = Buffer::zeroed(3);
    block_on(cached.read(4094, found.clone().into())).unwrap();
    assert_eq!(found.to_vec(), [5, 5, 0]);
}

#[test]
fn two_names_of_one_file_have_one_identity() {
    let folder = TempDir::new().unwrap();
    let storage = made(&folder, FileOptions::default());
    fs::hard_link(folder.path().join("disk.raw"), folder.path().join("other.raw")).unwrap();
    let options = FileOptions { lock: LockPolicy::None, ..FileOptions::read_only_default() };
    let other = FileStorage::open(folder.path().join("other.raw"), &options).unwrap();
    assert_eq!(storage.identity(), other.identity());
    fs::write(folder.path().join("third.raw"), b"").unwrap();
    assert_ne!(FileStorage::open(folder.path().join("third.raw"), &options).unwrap().identity(), other.identity());
}

#[test]
fn what_was_asked_is_counted() {
    let folder = TempDir::new().unwrap();
    for io in [Io::Uring, Io::Threads] {
        let storage = made(&folder, of(CacheMode::None, io));
        assert_eq!(storage.io(), io);
        let vector: IoVector = [4096, 8192].map(Buffer::zeroed).into_iter().collect();
        block_on(storage.write(0, vector)).unwrap();
        block_on(storage.write(100, Buffer::zeroed(10).into())).unwrap();
        block_on(storage.read(0, Buffer::zeroed(4096).into())).unwrap();
        block_on(storage.read(4096, Buffer::zeroed(8192).slice(1..4097).into())).unwrap();
        block_on(storage.write_zeroes(0..4096, ZeroOptions::default())).unwrap();
        block_on(storage.discard(4096..8192)).unwrap();
        block_on(storage.allocate(0..65536)).unwrap();
        block_on(storage.flush()).unwrap();
        let counters = storage.counters();
        let count = |operations, bytes| OperationCount { operations, bytes };
        assert_eq!(counters.writes, count(2, 12298));
        assert_eq!(counters.reads, count(2, 8192));
        assert_eq!(counters.zeroes, count(1, 4096));
        assert_eq!(counters.discards, count(1, 4096));
        assert_eq!(counters.allocations, count(1, 65536));
        assert_eq!(counters.flushes, 1);
        assert_eq!((counters.bounced, counters.read_modify_writes), (count(2, 4106), count(1, 10)));
    }
    let storage = made(&folder, of(CacheMode::Unsafe, Io::Auto));
    block_on(storage.flush()).unwrap();
    assert_eq!(storage.counters().flushes, 0);
}

#[test]
fn unwritten_space_is_distinguished_from_holes_and_from_data() {
    let folder = TempDir::new().unwrap();
    for cache in [CacheMode::Writeback, CacheMode::None] {
        let storage = made(&folder, of(cache, Io::Auto));
        block_on(storage.set_len(0)).unwrap();
        block_on(storage.set_len(4 << 20)).unwrap();
        block_on(storage.allocate((1 << 20)..(2 << 20))).unwrap();
        let data = (1 << 20) + 65536..(1 << 20) + 2 * 65536;
        // Not durable: bytes that are only in the cache are data, too.
        block_on(storage.write(data.start, Buffer::from_slice(&[1; 65536]).into())).unwrap();
        let found: Vec<_> =
            storage.extents(0..8 << 20).unwrap().into_iter().map(|extent| (extent.range, extent.kind)).collect();
        let expected = [
            (0..1 << 20, ExtentKind::Hole),
            (1 << 20..data.start, ExtentKind::Unwritten),
            (data.clone(), ExtentKind::Data),
            (data.end..2 << 20, ExtentKind::Unwritten),
            (2 << 20..8 << 20, ExtentKind::Hole),
        ];
        assert_eq!(found, expected, "{cache}");
        // Given back.
        block_on(storage.write_zeroes(1 << 20..2 << 20, ZeroOptions { unmap: true, only_fast: true })).unwrap();
        assert_eq!(storage.extents(0..4 << 20).unwrap().len(), 1);
        assert_eq!(fs::metadata(folder.path().join("disk.raw")).unwrap().blocks(), 0);
        // Kept.
        block_on(storage.write(0, Buffer::from_slice(&[1; 65536]).into())).unwrap();
        block_on(storage.write_zeroes(0..65536, ZeroOptions { unmap: false, only_fast: true })).unwrap();
        assert_eq!(storage.extents(0..65536).unwrap()[0].kind, ExtentKind::Unwritten);
        block_on(storage.discard(0..65536)).unwrap();
        assert_eq!(storage.extents(0..65536).unwrap()[0].kind, ExtentKind::Hole);
    }
}

#[test]
fn the_first_run_of_a_range_is_what_extents_say() {
    let folder = TempDir::new().unwrap();
    let storage = made(&folder, FileOptions::default());
    block_on(storage.set_len(8 << 20)).unwrap();
    block_on(storage.allocate(1 << 20..2 << 20)).unwrap();
    let piece = Buffer::from_slice(&[7; 65536]);
    for at in [0, 65536, (1 << 20) + 65536, 5 << 20, (8 << 20) - 65536] {
        block_on(storage.write(at, piece.clone().into())).unwrap();
    }
    let is_zero = |at: u64| storage.extents(at..at + 1).unwrap()[0].kind.is_zero();
    let end = 9 << 20;
    let (mut at, mut runs) = (0, Vec::new());
    while at < end {
        let run = storage.first_run(at..end).unwrap();
        assert!(run.length > 0 && at + run.length <= end, "{run:?} at {at}");
        for inside in (at..at + run.length).step_by(4096) {
            assert_eq!(is_zero(inside), run.is_zero, "{inside} in {run:?} at {at}");
        }
        runs.push(run.is_zero);
        at += run.length;
    }
    assert_eq!(runs, [false, true, false, true, false, true, false, true]);
    assert_eq!(storage.first_run(4096..8192).unwrap(), ContentRun::new(4096, false));
    assert_eq!(storage.first_run((3 << 20)..(4 << 20)).unwrap(), ContentRun::new(1 << 20, true));
    assert_eq!(storage.first_run(end..end).unwrap().length, 0);
    // A hole that ends within the range, beside the same by extents.
    let by_extents = MemoryStorage::with_contents([vec![7; 4096], vec![0; 4096]].concat(), 16384);
    assert!(!by_extents.first_run(0..8192).unwrap().is_zero);
    assert_eq!(by_extents.first_run(8192..16384).unwrap(), ContentRun::new(8192, true));
}

#[test]
fn a_clone_shares_extents_or_returns_false_if_the_filesystem_cannot() {
    let folder = TempDir::new().unwrap();
    let storage = made(&folder, FileOptions::default());
    let from = FileStorage::open(
        folder.path().join("from.raw"),
        &FileOptions { create: Create::New, ..FileOptions::default() },
    )
    .unwrap();
    block_on(from.write(0, Buffer::from_slice(&[3; 65536]).into())).unwrap();
    block_on(storage.write(0, Buffer::from_slice(&[4; 131_072]).into())).unwrap();
    let from: Arc<dyn Storage> = from;
    let is_shared = block_on((*storage).clone_range(65536, &from, 0, 65536)).unwrap();
    let found = Buffer::zeroed(65536);
    block_on(storage.read(65536, found.clone().into())).unwrap();
    assert_eq!(found.to_vec(), [if is_shared { 3 } else { 4 }; 65536]);
    // Not a whole block, and nothing: no error either.
    assert!(!block_on((*storage).clone_range(1, &from, 0, 100)).unwrap());
    assert!(block_on((*storage).clone_range(0, &from, 0, 0)).unwrap());
    assert_eq!((storage.counters().clones.operations, storage.counters().clones.bytes), (2, 65636));
    assert!(storage.clone_alignment().is_power_of_two());
    let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::growing_to(4096));
    assert!(!block_on((*storage).clone_range(0, &memory, 0, 512)).unwrap());
}

#[test]
fn a_request_keeps_its_file_open_and_locked_until_it_is_done() {
    let folder = TempDir::new().unwrap();
    let storage = made(&folder, of(CacheMode::Writeback, Io::Threads));
    let request = storage.write(0, Buffer::from_slice(b"late").into());
    drop(storage);
    let options = FileOptions { lock: LockPolicy::Required, ..FileOptions::default() };
    let path = folder.path().join("disk.raw");
    assert_eq!(FileStorage::open(&path, &options).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
    block_on(request).unwrap();
    FileStorage::open(&path, &options).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"late");
}

#[test]
fn writes_of_parts_and_of_whole_blocks_from_several_threads_lose_nothing() {
    const SIZE: u64 = 64 << 10;
    let folder = TempDir::new().unwrap();
    for io in [Io::Uring, Io::Threads] {
        let storage = made(&folder, of(CacheMode::None, io));
        block_on(storage.set_len(0)).unwrap();
        // Each thread has bytes of every block; one has whole blocks between them, and one lengthens the file.
        let threads: Vec<_> = (0..4u8)
            .map(|thread| {
                let storage = Arc::clone(&storage);
                std::thread::spawn(move || {
                    for round in 1..6u8 {
                        let writes = (0..SIZE / 2048).map(|part| {
                            let (at, len) = match thread {
                                0 => (part * 2048 + 512, 512),
                                1 => (part * 2048 + 1024, 100),
                                2 => (part * 2048 + 1124, 412),
                                _ => (SIZE + part * 300, 300),
                            };
                            storage.write(at, Buffer::from_slice(&vec![thread * 16 + round; len]).into())
                        });
                        let writes = futures_util::future::join_all(writes.collect::<Vec<_>>());
                        block_on(writes).into_iter().for_each(Result::unwrap);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let found = fs::read(folder.path().join("disk.raw")).unwrap();
        assert_eq!(found.len() as u64, SIZE + SIZE / 2048 * 300);
        for (at, byte) in found.into_iter().enumerate() {
            let expected = match at % 2048 {
                _ if at as u64 >= SIZE => 3 * 16 + 5,
                512..1024 => 5,
                1024..1124 => 16 + 5,
                1124..1536 => 2 * 16 + 5,
                _ => 0,
            };
            assert_eq!(byte, expected, "{at}, {io:?}");
        }
    }
}

#[test]
fn more_requests_than_a_ring_has_room_for_are_carried_out() {
    const COUNT: u64 = 5000;
    let folder = TempDir::new().unwrap();
    for cache in [CacheMode::None, CacheMode::Writeback] {
        let storage = made(&folder, of(cache, Io::Uring));
        let buffers: Vec<_> = (0..COUNT).map(|number| Buffer::from_slice(&number.to_le_bytes().repeat(64))).collect();
        let writes = buffers.iter().zip(0..).map(|(buffer, number)| storage.write(number * 512, buffer.clone().into()));
        let writes = futures_util::future::join_all(writes.collect::<Vec<_>>());
        block_on(writes).into_iter().for_each(Result::unwrap);
        let found: Vec<_> = (0..COUNT).map(|_| Buffer::zeroed(512)).collect();
        let reads = found.iter().zip(0..).map(|(buffer, number)| storage.read(number * 512, buffer.clone().into()));
        let reads = futures_util::future::join_all(reads.collect::<Vec<_>>());
        block_on(reads).into_iter().for_each(Result::unwrap);
        assert!(found.iter().zip(&buffers).all(|(found, written)| found.to_vec() == written.to_vec()));
    }
}

#[test]
fn a_write_that_is_waited_for_alone_does_not_keep_others_waiting_for_good() {
    let folder = TempDir::new().unwrap();
    let storage = made(&folder, of(CacheMode::None, Io::Uring));
    // A flush and a lone write are calls that block; a job of the pool, and a thread, end meanwhile.
    let (send, receive) = std::sync::mpsc::channel::<std::task::Waker>();
    let other = std::thread::spawn(move || receive.into_iter().for_each(std::task::Waker::wake));
    for round in 0..200u64 {
        let mut polled = false;
        let woken = std::future::poll_fn(|context| {
            if std::mem::replace(&mut polled, true) {
                return std::task::Poll::Ready(());
            }
            send.send(context.waker().clone()).unwrap();
            std::task::Poll::Pending
        });
        let write = storage.write(round * 4096, Buffer::from_slice(&[9; 4096]).into());
        let zero = storage.write_zeroes(0..512, ZeroOptions::default());
        let ((), written, zeroed) = block_on(futures_util::future::join3(woken, write, zero));
        written.and(zeroed).unwrap();
    }
    drop(send);
    other.join().unwrap();
    block_on(storage.flush()).unwrap();
}

#[test]
fn the_kernel_copies_from_file_to_file_or_the_call_returns_false() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, byte: u8, len: usize| {
        let path = folder.path().join(name);
        fs::write(&path, vec![byte; len]).unwrap();
        FileStorage::open(&path, &FileOptions::default()).unwrap()
    };
    let from: Arc<dyn Storage> = file("from", 3, 10_000);
    let into = file("into", 4, 20_000);
    assert!(block_on((*into).copy_range(5000, &from, 1000, 9000)).unwrap());
    let bytes = fs::read(folder.path().join("into")).unwrap();
    assert_eq!(bytes, [&[4; 5000][..], &[3; 9000], &[4; 6000]].concat());
    // Beyond the end of the other one there are zeros, which the caller writes.
    assert!(!block_on((*into).copy_range(0, &from, 9999, 2)).unwrap());
    let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::growing_to(4096));
    assert!(!block_on((*into).copy_range(0, &memory, 0, 512)).unwrap());
}
