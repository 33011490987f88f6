//! The promises of every storage.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use futures_util::future::join_all;
use limosa_storage::{Buffer, ExtentKind, IoVector, Request, Storage, StorageError, ZeroOptions, block_on};

type Make<'a> = &'a dyn Fn() -> Arc<dyn Storage>;

const KIB: u64 = 1024;

/// Bytes that encode their offset and their writer.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let seed = seed.to_le_bytes()[0];
    (0..len).map(|at| seed.wrapping_add(u8::try_from(at % 251).unwrap()) | 1).collect()
}

fn write(storage: &dyn Storage, offset: u64, bytes: &[u8]) {
    block_on(storage.write(offset, Buffer::from_slice(bytes).into())).unwrap();
}

fn read(storage: &dyn Storage, range: Range<u64>) -> Vec<u8> {
    let into = Buffer::from_slice(&vec![0xee; usize::try_from(range.end - range.start).unwrap()]);
    block_on(storage.read(range.start, into.clone().into())).unwrap();
    into.to_vec()
}

pub(crate) fn what_is_written_is_read_and_the_rest_is_zeros(make: Make<'_>) {
    let storage = make();
    let bytes = pattern(3, 8192);
    write(&*storage, 4096, &bytes);
    assert_eq!(storage.length().unwrap(), 12288);
    assert_eq!(read(&*storage, 4096..12288), bytes);
    assert_eq!(read(&*storage, 0..4096), [0; 4096]);
    block_on(storage.flush()).unwrap();
    assert_eq!(read(&*storage, 4096..12288), bytes);
}

pub(crate) fn what_is_behind_the_end_is_zeros_and_writing_there_lengthens(make: Make<'_>) {
    let storage = make();
    assert_eq!(storage.length().unwrap(), 0);
    assert_eq!(read(&*storage, 0..10000), [0; 10000]);
    assert_eq!(storage.length().unwrap(), 0);
    write(&*storage, 10, b"abc");
    assert_eq!(storage.length().unwrap(), 13);
    assert_eq!(read(&*storage, 8..16), b"\0\0abc\0\0\0");
    assert_eq!(read(&*storage, 12..20000)[..2], *b"c\0");
    assert_eq!(read(&*storage, 16384..16400), [0; 16]);
    // Behind a gap.
    write(&*storage, 100_001, b"z");
    assert_eq!(storage.length().unwrap(), 100_002);
    assert_eq!(read(&*storage, 13..100_001), vec![0; 100_001 - 13]);
    assert_eq!(read(&*storage, 100_000..100_003), b"\0z\0");
}

pub(crate) fn parts_of_blocks_leave_their_neighbours_alone(make: Make<'_>) {
    let storage = make();
    let mut model = pattern(9, 32 << 10);
    write(&*storage, 0, &model);
    for (offset, len) in
        &[(0, 1), (1, 510), (511, 2), (100, 5000), (4095, 4098), (12288, 100), (20000, 11000), (32700, 68)]
    {
        let bytes = pattern(offset + 16, *len);
        write(&*storage, *offset, &bytes);
        let at = usize::try_from(*offset).unwrap();
        model[at..at + len].copy_from_slice(&bytes);
        assert_eq!(read(&*storage, 0..32 << 10), model, "{offset} {len}");
        assert_eq!(read(&*storage, *offset..*offset + *len as u64), bytes);
    }
    // At the same time, each in the same block.
    let requests = (0..64).map(|part| storage.write(4096 + part * 8, Buffer::from_slice(&pattern(part, 8)).into()));
    join_all(requests.collect::<Vec<_>>()).now().into_iter().collect::<Result<(), _>>().unwrap();
    for part in 0..64 {
        let at = 4096 + part * 8;
        model[at..at + 8].copy_from_slice(&pattern(part as u64, 8));
    }
    assert_eq!(read(&*storage, 0..32 << 10), model);
    assert_eq!(storage.length().unwrap(), 32 << 10);
}

/// Waiting in the middle of an expression.
trait Now: Future + Sized {
    fn now(self) -> Self::Output {
        block_on(self)
    }
}

impl<F: Future> Now for F {}

pub(crate) fn a_vector_is_scattered_and_gathered_however_many_its_parts(make: Make<'_>) {
    let storage = make();
    let parts: Vec<_> = [512, 4096, 1, 511, 8192, 3, 1021].map(|len| Buffer::from_slice(&pattern(7, len))).into();
    let vector: IoVector = parts.into_iter().collect();
    block_on(storage.write(512, vector.clone())).unwrap();
    assert_eq!(read(&*storage, 512..512 + vector.len() as u64), vector.to_vec());
    // More than the kernel takes at a time.
    let many: IoVector = (0..3000).map(|part| Buffer::from_slice(&pattern(part, 16))).collect();
    block_on(storage.write(1 << 20, many.clone())).unwrap();
    let into: IoVector = (0..6000).map(|_| Buffer::zeroed(8)).collect();
    block_on(storage.read(1 << 20, into.clone())).unwrap();
    assert!(into.to_vec() == many.to_vec());
    // More than is done in one go.
    let large = Buffer::from_slice(&pattern(6, 3 << 20));
    block_on(storage.write(1 << 20, large.clone().into())).unwrap();
    let into = Buffer::zeroed(3 << 20);
    block_on(storage.read(1 << 20, into.clone().into())).unwrap();
    assert!(into.to_vec() == large.to_vec());
    // Memory that is aligned to nothing.
    let odd = Buffer::from_slice(&pattern(5, 5000)).slice(13..13 + 4096);
    block_on(storage.write(8192, odd.clone().into())).unwrap();
    let into = Buffer::zeroed(5000).slice(77..77 + 4096);
    block_on(storage.read(8192, into.clone().into())).unwrap();
    assert_eq!(into.to_vec(), odd.to_vec());
}

pub(crate) fn empty_requests_change_nothing(make: Make<'_>) {
    let storage = make();
    block_on(storage.write(4096, IoVector::new())).unwrap();
    block_on(storage.read(4096, IoVector::new())).unwrap();
    block_on(storage.write_zeroes(4096..4096, ZeroOptions::default())).unwrap();
    block_on(storage.discard(4096..4096)).unwrap();
    block_on(storage.allocate(4096..4096)).unwrap();
    block_on(storage.flush()).unwrap();
    assert_eq!((storage.length().unwrap(), storage.extents(7..7).unwrap()), (0, vec![]));
}

pub(crate) fn zeroes_are_read_where_they_were_asked_for_and_nowhere_else(make: Make<'_>) {
    for unmap in [false, true] {
        for (start, end) in
            [(0, 65536), (4096, 8192), (1, 2), (100, 60001), (511, 4097), (65000, 70000), (200_000, 200_001)]
        {
            let storage = make();
            let mut model = pattern(1, 64 << 10);
            write(&*storage, 0, &model);
            block_on(storage.write_zeroes(start..end, ZeroOptions { unmap, only_fast: false })).unwrap();
            let length = end.max(64 << 10);
            assert_eq!(storage.length().unwrap(), length);
            model.resize(usize::try_from(length).unwrap(), 0);
            model[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()].fill(0);
            assert!(read(&*storage, 0..length) == model, "{start}..{end} unmap {unmap}");
        }
    }
    let storage = make();
    write(&*storage, 0, &pattern(1, 8192));
    match block_on(storage.write_zeroes(0..4096, ZeroOptions { unmap: false, only_fast: true })) {
        Ok(()) => assert_eq!(read(&*storage, 0..4096), [0; 4096]),
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::Unsupported);
            assert_eq!(read(&*storage, 0..8192), pattern(1, 8192));
        }
    }
    #[expect(clippy::reversed_empty_ranges, reason = "what a caller could get wrong")]
    block_on(storage.write_zeroes(4096..0, ZeroOptions::default())).unwrap();
}

pub(crate) fn a_discard_leaves_zeros_or_what_was_there(make: Make<'_>) {
    let storage = make();
    let bytes = pattern(4, 256 << 10);
    write(&*storage, 0, &bytes);
    for (start, end) in [(64 << 10, 128 << 10), (10, 20), (200_000, 1_000_000), (2_000_000, 3_000_000)] {
        block_on(storage.discard(start..end)).unwrap();
        assert_eq!(storage.length().unwrap(), 256 << 10);
        let found = read(&*storage, 0..256 << 10);
        for (at, (found, written)) in found.into_iter().zip(&bytes).enumerate() {
            let discarded =
                [(64 << 10)..(128 << 10), 10..20, 200_000..1_000_000].iter().any(|range| range.contains(&at));
            assert!(found == *written || discarded && found == 0, "{at}");
        }
    }
}

pub(crate) fn the_length_is_as_it_was_set(make: Make<'_>) {
    let storage = make();
    write(&*storage, 0, &pattern(4, 10000));
    block_on(storage.set_len(5001)).unwrap();
    assert_eq!(storage.length().unwrap(), 5001);
    assert_eq!(read(&*storage, 4999..5003)[2..], [0, 0]);
    block_on(storage.set_len(1 << 20)).unwrap();
    assert_eq!(storage.length().unwrap(), 1 << 20);
    let found = read(&*storage, 0..1 << 20);
    assert!(found[..5001] == pattern(4, 10000)[..5001] && found[5001..].iter().all(|byte| *byte == 0));
    block_on(storage.set_len(0)).unwrap();
    assert_eq!(storage.length().unwrap(), 0);
}

pub(crate) fn space_is_there_and_what_was_in_it_stays(make: Make<'_>) {
    let storage = make();
    let bytes = pattern(4, 8192);
    write(&*storage, 0, &bytes);
    block_on(storage.allocate(4096..1 << 20)).unwrap();
    assert_eq!(storage.length().unwrap(), 1 << 20);
    assert_eq!(read(&*storage, 0..8192), bytes);
    assert!(read(&*storage, 8192..1 << 20).iter().all(|byte| *byte == 0));
    block_on(storage.allocate(0..4096)).unwrap();
    assert_eq!(storage.length().unwrap(), 1 << 20);
}

pub(crate) fn extents_cover_what_was_asked_and_promise_only_zeros(make: Make<'_>) {
    let storage = make();
    write(&*storage, 1 << 20, &pattern(1, 64 << 10));
    write(&*storage, 3 << 20, &pattern(1, 64 << 10));
    block_on(storage.allocate((4 << 20)..(5 << 20))).unwrap();
    write(&*storage, (4 << 20) + 4096, &pattern(1, 4096));
    block_on(storage.write_zeroes((3 << 20)..(3 << 20) + 4096, ZeroOptions { unmap: true, only_fast: false })).unwrap();
    for range in [0..6 << 20, 5000..(5 << 20) + 1, (1 << 20)..(1 << 20) + 1, (9 << 20)..(10 << 20)] {
        let extents = storage.extents(range.clone()).unwrap();
        let (first, last) = (extents.first().unwrap(), extents.last().unwrap());
        assert!(first.range.start == range.start && last.range.end >= range.end, "{extents:?}");
        for pair in extents.windows(2) {
            assert!(pair[0].range.end == pair[1].range.start && pair[0].kind != pair[1].kind, "{extents:?}");
        }
        for extent in extents {
            let is_zero = read(&*storage, extent.range.clone()).iter().all(|byte| *byte == 0);
            assert!(is_zero || extent.kind == ExtentKind::Data, "{extent:?}");
        }
    }
}

pub(crate) fn many_requests_at_once_leave_each_byte_one_or_the_other(make: Make<'_>) {
    let storage = make();
    write(&*storage, 0, &[1; 64 << 10]);
    let place = |number: u64| (number * 1777 % 48000, 3000 + number * 211 % 9000);
    let requests = (0..64u64).map(|number| {
        let (offset, len) = place(number);
        let byte = 2 + u8::try_from(number).unwrap();
        let buffer = Buffer::from_slice(&vec![byte; usize::try_from(len).unwrap()]);
        storage.write(offset, buffer.into())
    });
    let results = block_on(join_all(requests.collect::<Vec<_>>()));
    results.into_iter().collect::<Result<(), StorageError>>().unwrap();
    for (at, byte) in read(&*storage, 0..64 << 10).into_iter().enumerate() {
        let writers: Vec<_> = (0..64u64)
            .filter(|number| {
                let (offset, len) = place(*number);
                (offset..offset + len).contains(&(at as u64))
            })
            .map(|number| 2 + u8::try_from(number).unwrap())
            .collect();
        assert!(writers.contains(&byte) || writers.is_empty() && byte == 1, "{at}: {byte} of {writers:?}");
    }
}

/// Polls once.
fn begin(request: &mut Request, waker: &Waker) -> Poll<Result<(), StorageError>> {
    request.as_mut().poll(&mut Context::from_waker(waker))
}

pub(crate) fn dropped_requests_complete(make: Make<'_>) {
    let storage = make();
    write(&*storage, 0, &[1; 64 << 10]);
    block_on(async {
        for round in 0..4u64 {
            for part in 0..16u64 {
                let into = Buffer::zeroed(4096);
                let mut reading = storage.read(part * 4096 + round * 100, into.into());
                _ = begin(&mut reading, Waker::noop());
                let byte = u8::try_from(2 + round).unwrap();
                let mut writing = storage.write(part * 4096 + round * 7, Buffer::from_slice(&[byte; 2048]).into());
                _ = begin(&mut writing, Waker::noop());
            }
        }
        let mut zeroing = storage.write_zeroes((60 << 10)..(64 << 10), ZeroOptions::default());
        _ = begin(&mut zeroing, Waker::noop());
        // Never begun, or begun by the call.
        drop(storage.write(0, Buffer::from_slice(&[1]).into()));
    });
    for (at, byte) in read(&*storage, 0..64 << 10).into_iter().enumerate() {
        assert!((1..=5).contains(&byte) || byte == 0 && at >= 60 << 10, "{at}: {byte}");
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A runtime that knows nothing of this crate.
fn foreign_block_on<F: Future>(future: F) -> F::Output {
    let mut future: Pin<Box<F>> = Box::pin(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

pub(crate) fn a_request_may_be_polled_by_whoever_has_a_waker(make: Make<'_>) {
    let storage = make();
    let bytes = pattern(8, 10000);
    foreign_block_on(storage.write(5000, Buffer::from_slice(&bytes).into())).unwrap();
    foreign_block_on(storage.flush()).unwrap();
    let into = Buffer::zeroed(10000);
    foreign_block_on(storage.read(5000, into.clone().into())).unwrap();
    assert_eq!(into.to_vec(), bytes);
}

pub(crate) fn a_request_may_be_begun_on_one_thread_and_finished_on_another(make: Make<'_>) {
    let storage = make();
    for round in 0..8 {
        let mut request = storage.write(4096, Buffer::from_slice(&pattern(round, 8192)).into());
        // The first thread leaves at once, or stays.
        let begun = block_on(async { begin(&mut request, Waker::noop()) });
        match begun {
            Poll::Ready(result) => result.unwrap(),
            Poll::Pending if round % 2 == 0 => thread::spawn(move || block_on(request)).join().unwrap().unwrap(),
            Poll::Pending => thread::spawn(move || foreign_block_on(request)).join().unwrap().unwrap(),
        }
        assert_eq!(read(&*storage, 4096..12288), pattern(round, 8192));
    }
    let (send, receive) = std::sync::mpsc::channel::<Request>();
    let other = thread::spawn(move || receive.into_iter().map(block_on).collect::<Result<Vec<()>, _>>());
    block_on(async {
        for part in 0..32u64 {
            let mut request = storage.write(part * 4096, Buffer::from_slice(&pattern(77, 4096)).into());
            if begin(&mut request, Waker::noop()).is_pending() {
                send.send(request).unwrap();
            }
        }
    });
    drop(send);
    other.join().unwrap().unwrap();
    for part in 0..32 {
        assert_eq!(read(&*storage, part * 4096..(part + 1) * 4096), pattern(77, 4096));
    }
}

pub(crate) fn several_threads_have_requests_under_way(make: Make<'_>) {
    let storage = make();
    let threads: Vec<_> = (0..4u64)
        .map(|thread| {
            let storage = Arc::clone(&storage);
            thread::spawn(move || {
                for round in 0..8u64 {
                    let place = move |part: u64| (round * 64 + part * 4 + thread) * 2048;
                    let requests = (0..16).map(|part| {
                        storage.write(place(part), Buffer::from_slice(&pattern(part ^ thread, 2048)).into())
                    });
                    block_on(join_all(requests.collect::<Vec<_>>())).into_iter().for_each(Result::unwrap);
                    for part in 0..16 {
                        let found = read(&*storage, place(part)..place(part) + 2048);
                        assert_eq!(found, pattern(part ^ thread, 2048));
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

pub(crate) fn offsets_that_no_file_has_are_errors_or_zeros(make: Make<'_>) {
    let storage = make();
    write(&*storage, 0, b"there");
    for offset in [u64::MAX, u64::MAX - 4096, 1 << 63, (1 << 63) - 1] {
        block_on(storage.write(offset, Buffer::from_slice(&[1; 4096]).into())).unwrap_err();
        let into = Buffer::from_slice(&[1; 4096]);
        if block_on(storage.read(offset, into.clone().into())).is_ok() {
            assert!(into.is_zero());
        }
        block_on(storage.write_zeroes(offset - 1..u64::MAX, ZeroOptions::default())).unwrap_err();
        block_on(storage.discard(offset..u64::MAX)).unwrap();
        block_on(storage.allocate(offset - 1..u64::MAX)).unwrap_err();
    }
    assert_eq!(storage.length().unwrap(), 5);
}

pub(crate) fn random_requests_are_as_in_memory(make: Make<'_>) {
    const SIZE: u64 = 256 * KIB;
    let storage = make();
    let mut model: Vec<u8> = Vec::new();
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for step in 0..600u64 {
        let unit = [1, 512, 4096][usize::try_from(random(3)).unwrap()];
        let start = random(SIZE / unit) * unit;
        let end = start + (random(40) * unit).min(SIZE - start);
        let range = usize::try_from(start).unwrap()..usize::try_from(end).unwrap();
        let room = |model: &mut Vec<u8>| model.resize(model.len().max(range.end), 0);
        match random(8) {
            0..3 if start < end => {
                let bytes = pattern(step, range.len());
                write(&*storage, start, &bytes);
                room(&mut model);
                model[range].copy_from_slice(&bytes);
            }
            3 if start < end => {
                let how = ZeroOptions { unmap: random(2) == 0, only_fast: false };
                block_on(storage.write_zeroes(start..end, how)).unwrap();
                room(&mut model);
                model[range].fill(0);
            }
            4 if start < end => {
                block_on(storage.allocate(start..end)).unwrap();
                room(&mut model);
            }
            5 if random(4) == 0 => {
                block_on(storage.set_len(start)).unwrap();
                model.resize(usize::try_from(start).unwrap(), 0);
            }
            6 => block_on(storage.flush()).unwrap(),
            _ => {
                let mut expected = model.get(range.start.min(model.len())..).unwrap_or_default().to_vec();
                expected.resize(range.len(), 0);
                assert!(read(&*storage, start..end) == expected, "step {step}: {start}..{end}");
            }
        }
        assert_eq!(storage.length().unwrap(), model.len() as u64, "step {step}");
    }
    assert!(read(&*storage, 0..SIZE)[..model.len()] == model);
}
