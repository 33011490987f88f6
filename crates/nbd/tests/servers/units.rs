//! A server that keeps what is written, in units, and tells which requests it got.

use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use futures_util::future::try_join_all;
use limosa_nbd::protocol::Headers;
use limosa_nbd::protocol::handshake::{OptionCode, OptionReply, greeting, info, push_option_reply, transmission};
use limosa_nbd::protocol::request::{Command, RequestHeader, flag};
use limosa_nbd::{ConnectOptions, NbdStorage};
use limosa_storage::{Buffer, Request, Storage as _, ZeroOptions, block_on};
use parking_lot::Mutex;
use proptest::prelude::*;

use crate::bed::{Liar, SIZE, export, option, subject};

const CHANGES: u16 = transmission::HAS_FLAGS | transmission::SEND_FLUSH | transmission::SEND_TRIM;
const MOST: u32 = 8192;

/// An export in memory.
#[derive(Clone)]
struct Memory {
    /// Requests are multiples of it.
    unit: u32,
    flags: u16,
    flush_time: Duration,
    contents: Arc<Mutex<Vec<u8>>>,
    requests: Arc<Mutex<Vec<RequestHeader>>>,
}

impl Memory {
    fn new(unit: u32, flags: u16) -> Self {
        let contents = (0..SIZE).map(|at| u8::try_from(at / 1024 % 251).unwrap()).collect();
        let contents = Arc::new(Mutex::new(contents));
        Self { unit, flags, flush_time: Duration::ZERO, contents, requests: Arc::default() }
    }

    fn serve(&self) -> Liar {
        let memory = self.clone();
        Liar::new(move |mut stream| {
            let sizes = [memory.unit, 4096, MOST].map(u32::to_be_bytes).concat();
            let sizes = [&info::BLOCK_SIZE.to_be_bytes()[..], &sizes].concat();
            stream.write_all(&greeting()).unwrap();
            stream.read_exact(&mut [0; 4]).unwrap();
            while let Some(number) = option(&mut stream) {
                let mut bytes = Vec::new();
                let go = number == OptionCode::Go as u32;
                if go {
                    push_option_reply(&mut bytes, number, OptionReply::Info, &export(SIZE, memory.flags));
                    push_option_reply(&mut bytes, number, OptionReply::Info, &sizes);
                }
                push_option_reply(
                    &mut bytes,
                    number,
                    if go { OptionReply::Ack } else { OptionReply::Unsupported },
                    b"",
                );
                stream.write_all(&bytes).unwrap();
                if go {
                    break;
                }
            }
            let mut header = [0; 28];
            while stream.read_exact(&mut header).is_ok() {
                let request = RequestHeader::decode(Headers::Simple, &header).unwrap();
                if request.command == Command::Disconnect as u16 {
                    return;
                }
                let data = memory.answer(request, &mut stream);
                let done = subject(Headers::Simple, request.cookie).done();
                stream.write_all(&[done.as_bytes(), &data].concat()).unwrap();
            }
        })
    }

    fn answer(&self, request: RequestHeader, stream: &mut impl std::io::Read) -> Vec<u8> {
        self.requests.lock().push(request);
        let place = usize::try_from(request.offset).unwrap()..usize::try_from(request.offset + request.length).unwrap();
        let unit = usize::try_from(self.unit).unwrap();
        assert!(place.start % unit == 0 && place.end % unit == 0, "{request:?}");
        match Command::from_repr(request.command).unwrap() {
            Command::Read => {
                assert!(place.len() <= usize::try_from(MOST).unwrap(), "{request:?}");
                return self.contents.lock()[place].to_vec();
            }
            Command::Write => {
                let mut payload = vec![0; place.len()];
                stream.read_exact(&mut payload).unwrap();
                self.contents.lock()[place].copy_from_slice(&payload);
            }
            Command::WriteZeroes | Command::Trim => self.contents.lock()[place].fill(0),
            Command::Flush => thread::sleep(self.flush_time),
            other => panic!("{other:?}"),
        }
        Vec::new()
    }

    fn taken(&self) -> Vec<(Command, u16)> {
        let taken = std::mem::take(&mut *self.requests.lock());
        taken.iter().map(|request| (Command::from_repr(request.command).unwrap(), request.flags)).collect()
    }
}

fn of(bytes: &[u8]) -> limosa_storage::IoVector {
    Buffer::from_slice(bytes).into()
}

#[test]
fn long_requests_are_cut_into_what_the_server_takes() {
    let memory = Memory::new(512, CHANGES);
    let server = memory.serve();
    let disk = server.connect().unwrap();
    let found = Buffer::zeroed(60_000);
    block_on(disk.read(1000, found.clone().into())).unwrap();
    assert!(found.to_vec() == memory.contents.lock()[1000..61_000]);
    block_on(disk.write(100, of(&[7; 60_000]))).unwrap();
    let contents = memory.contents.lock();
    assert!(contents[100..60_100].iter().all(|byte| *byte == 7));
    assert_eq!((contents[99], contents[60_100]), (0, 58));
}

/// Each request changes bytes of its own, several of them in one unit, and all are in flight at once.
#[test]
fn parts_of_units_are_written_beside_each_other() {
    for flags in [CHANGES, CHANGES | transmission::SEND_WRITE_ZEROES] {
        let memory = Memory::new(4096, flags);
        let server = memory.serve();
        let disk = server.connect().unwrap();
        let mut expected = memory.contents.lock().clone();
        let mut requests: Vec<Request> = Vec::new();
        for (step, start) in (10..200_000_u64).step_by(700).enumerate() {
            let place = usize::try_from(start).unwrap()..usize::try_from(start).unwrap() + 650;
            if step % 3 == 0 {
                expected[place].fill(0);
                requests.push(disk.write_zeroes(start..start + 650, ZeroOptions::default()));
            } else {
                let byte = u8::try_from(step % 250 + 1).unwrap();
                expected[place.clone()].fill(byte);
                requests.push(disk.write(start, of(&expected[place])));
            }
        }
        block_on(try_join_all(requests)).unwrap();
        block_on(disk.flush()).unwrap();
        assert!(*memory.contents.lock() == expected, "{flags:#x}");
    }
}

#[test]
fn a_flush_carries_out_what_nobody_waited_for() {
    let memory = Memory::new(4096, CHANGES);
    let server = memory.serve();
    let disk = server.connect().unwrap();
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let mut write = disk.write(10, of(&[9; 20]));
    assert!(write.as_mut().poll(&mut context).is_pending());
    drop(write);
    block_on(disk.flush()).unwrap();
    assert_eq!(memory.contents.lock()[10..30], [9; 20]);
}

/// Two whole units do not wait for each other: one that waits for a third request and is dropped must not come later.
#[test]
fn a_write_that_was_dropped_before_its_turn_is_not_carried_out() {
    let memory = Memory::new(4096, CHANGES);
    let server = memory.serve();
    let disk = server.connect().unwrap();
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let mut first = disk.write(10, of(&[1; 20]));
    assert!(first.as_mut().poll(&mut context).is_pending());
    let mut dropped = disk.write(0, of(&[2; 4096]));
    assert!(dropped.as_mut().poll(&mut context).is_pending());
    drop(dropped);
    block_on(disk.write(0, of(&[3; 4096]))).unwrap();
    block_on(first).unwrap();
    block_on(disk.flush()).unwrap();
    assert!(memory.contents.lock()[..4096] == [3; 4096]);
}

#[test]
fn a_request_of_several_steps_outlives_its_storage() {
    let memory = Memory::new(4096, CHANGES);
    let server = memory.serve();
    let disk = server.connect().unwrap();
    let write = disk.write(10, of(&[9; 20]));
    drop(disk);
    block_on(write).unwrap();
    drop(server);
    assert_eq!(memory.contents.lock()[10..30], [9; 20]);
}

#[test]
fn a_synchronous_export_has_each_change_made_durable() {
    let flush = (Command::Flush, 0);
    for (is_synchronous, fua, expected) in [
        (false, true, vec![(Command::Write, 0), (Command::Trim, 0), flush]),
        (true, true, vec![(Command::Write, flag::FUA), (Command::Trim, flag::FUA), flush]),
        (true, false, vec![(Command::Write, 0), flush, (Command::Trim, 0), flush, flush]),
    ] {
        let memory = Memory::new(1, if fua { CHANGES | transmission::SEND_FUA } else { CHANGES });
        let server = memory.serve();
        let disk =
            NbdStorage::connect(&server.address(), &ConnectOptions::default().synchronous(is_synchronous)).unwrap();
        block_on(disk.write(1, of(&[1; 100]))).unwrap();
        block_on(disk.discard(0..512)).unwrap();
        block_on(disk.flush()).unwrap();
        assert_eq!(memory.taken(), expected, "{is_synchronous} {fua}");
    }
}

#[test]
fn a_flush_may_take_longer_than_silence() {
    let memory = Memory { flush_time: Duration::from_secs(3), ..Memory::new(1, CHANGES) };
    let server = memory.serve();
    let disk = server.silent_for(Duration::from_secs(1)).unwrap();
    block_on(disk.flush()).unwrap();
    block_on(disk.write(0, of(&[1; 512]))).unwrap();
}

#[derive(Debug, Clone)]
enum Change {
    Write(u8),
    Zero,
    Discard,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_changes_are_those_of_a_model(
        unit in prop_oneof![Just(1_u32), Just(512), Just(4096)],
        has_zeroes: bool,
        changes in prop::collection::vec(
            (prop_oneof![any::<u8>().prop_map(Change::Write), Just(Change::Zero), Just(Change::Discard)], 0..SIZE, 0..20_000_u64),
            1..30,
        ),
    ) {
        let flags = if has_zeroes { CHANGES | transmission::SEND_WRITE_ZEROES } else { CHANGES };
        let memory = Memory::new(unit, flags);
        let server = memory.serve();
        let disk = server.connect().unwrap();
        let mut model = memory.contents.lock().clone();
        for (change, start, length) in changes {
            let end = (start + length).min(SIZE);
            let place = usize::try_from(start).unwrap()..usize::try_from(end).unwrap();
            match change {
                Change::Write(byte) => {
                    model[place.clone()].fill(byte);
                    block_on(disk.write(start, of(&model[place]))).unwrap();
                }
                Change::Zero => {
                    model[place].fill(0);
                    block_on(disk.write_zeroes(start..end, ZeroOptions::default())).unwrap();
                }
                Change::Discard => {
                    // Whole units.
                    let unit = u64::from(unit);
                    let whole = start.next_multiple_of(unit)..end - end % unit;
                    if !whole.is_empty() {
                        model[usize::try_from(whole.start).unwrap()..usize::try_from(whole.end).unwrap()].fill(0);
                    }
                    block_on(disk.discard(start..end)).unwrap();
                }
            }
        }
        prop_assert!(*memory.contents.lock() == model);
    }
}
