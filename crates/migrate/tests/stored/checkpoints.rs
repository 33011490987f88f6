//! The secondary of COLO, against a primary that speaks the stream by hand.

use std::thread;
use std::time::Duration;

use crate::model::InOneLine;
use crate::model::{Kept, Memory, device_tail, pair};
use limosa_channel::{Channel, Shutdown};
use limosa_migrate::checkpoints::{Aside, Checkpoint, Checkpoints, NextCheckpoint, NextState};
use limosa_migrate::control::{Phase, Stop};
use limosa_migrate::multifd::MultifdOptions;
use limosa_migrate::stored::{Destination, DestinationOptions, PrecopySource};
use limosa_migrate::{Handle, MigrateError};
use limosa_stream::colo::ColoMessage;
use limosa_stream::multifd::{PACKET_LEN, Packet};
use limosa_stream::{Command, Configuration, RamBlock, RecordEncoder, RecordKind, ram, section};
use proptest::prelude::*;

/// The answer to a base: SHUT of the return path, and READY.
const READY: &[u8] = b"\0\x01\0\x04\0\0\0\0\0\0\0\0";
const LONG: Option<Duration> = Some(Duration::from_secs(20));
const RAM: u32 = 2;
const PAGES: [u64; 2] = [40, 12];

/// A write of the guest: block, page, and a value that fills the page; 0 makes it zero.
type Write = (usize, u64, u64);

fn blocks() -> [RamBlock; 2] {
    [RamBlock::new("pc.ram", PAGES[0] * 4096), RamBlock::new("vga", PAGES[1] * 4096)]
}

fn filled(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(512)
}

/// The bytes of a primary: each part is followed by an answer that it waits for.
struct Primary {
    records: RecordEncoder,
    parts: Vec<Vec<u8>>,
}

impl Primary {
    /// With a base of these writes.
    fn new(writes: &[Write]) -> Self {
        let mut primary = Self { records: RecordEncoder::new(&blocks()).unwrap(), parts: Vec::new() };
        let mut base = Vec::new();
        Configuration::new("pc-q35-11.1").encode(&mut base).unwrap();
        Command::OpenReturnPath.encode(&mut base).unwrap();
        Command::EnableColo.encode(&mut base).unwrap();
        ram::encode_ram_start(RAM, &blocks(), &mut base).unwrap();
        Command::SwitchoverStart.encode(&mut base).unwrap();
        primary.pages(writes, &mut base);
        let (sections, json) = device_tail();
        base.extend_from_slice(&sections);
        section::encode_eof(&mut base);
        section::encode_description(&json, &mut base).unwrap();
        primary.parts.push(base);
        primary
    }

    fn pages(&mut self, writes: &[Write], out: &mut Vec<u8>) {
        section::encode_end(RAM, out);
        for (block, page, value) in writes {
            let kind = if *value == 0 { RecordKind::Zero } else { RecordKind::Page };
            self.records.append(kind, *block, page * 4096, out).unwrap();
            if *value != 0 {
                out.extend_from_slice(&filled(*value));
            }
        }
        ram::encode_eos(RAM, out);
    }

    fn message(message: ColoMessage, out: &mut Vec<u8>) {
        message.encode(out);
    }

    /// Adds a checkpoint of these writes, with this body of its device.
    fn checkpoint(&mut self, writes: &[Write], device: &[u8]) {
        let mut request = Vec::new();
        Self::message(ColoMessage::CheckpointRequest, &mut request);
        self.parts.push(request);
        let mut bytes = Vec::new();
        Self::message(ColoMessage::VmstateSend, &mut bytes);
        Command::SwitchoverStart.encode(&mut bytes).unwrap();
        self.pages(writes, &mut bytes);
        section::encode_eof(&mut bytes);
        let mut sections = b"\x04\0\0\0\x03\x05timer\0\0\0\0\0\0\0\x01".to_vec();
        sections.extend_from_slice(device);
        section::encode_footer(3, &mut sections);
        section::encode_eof(&mut sections);
        Self::message(ColoMessage::VmstateSize(u64::try_from(sections.len()).unwrap()), &mut bytes);
        bytes.extend_from_slice(&sections);
        self.parts.push(bytes);
    }

    /// All of its bytes.
    fn bytes(&self) -> Vec<u8> {
        self.parts.concat()
    }

    /// Says these bytes: the base, and once it is answered everything else, in pieces and ahead of its turn.
    fn say(&self, channel: &Channel, bytes: &[u8], pieces: &[usize]) {
        channel.set_timeouts(LONG, LONG).unwrap();
        let (base, rest) = bytes.split_at(bytes.len().min(self.parts[0].len()));
        let mut sizes = pieces.iter().cycle();
        let mut write = |mut rest: &[u8]| {
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(*sizes.next().unwrap()));
                // The other side may have refused the bytes before.
                if channel.write_all(now).is_err() {
                    return;
                }
                rest = later;
            }
        };
        write(base);
        if base.len() == self.parts[0].len() && channel.read_exact(&mut [0; READY.len()]).is_ok() {
            write(rest);
        }
    }

    /// Says each part and waits for each answer, as QEMU does; then closes.
    fn speak(&self, channel: &Channel) {
        channel.set_timeouts(LONG, LONG).unwrap();
        let turns = [&b"\0\0\0\x02"[..], b"\0\0\0\x05\0\0\0\x06"].into_iter().cycle();
        let mut answers = std::iter::once(READY).chain(turns);
        for part in &self.parts {
            channel.write_all(part).unwrap();
            let wanted = answers.next().unwrap();
            let mut answer = vec![0; wanted.len()];
            channel.read_exact(&mut answer).unwrap();
            assert_eq!(answer, wanted);
        }
        channel.shutdown(Shutdown::Write).unwrap();
    }
}

fn options() -> DestinationOptions {
    DestinationOptions {
        answer_timeout: Some(Duration::from_secs(20)),
        colo: true,
        end_of_stream_timeout: Duration::from_millis(1),
        ..DestinationOptions::default()
    }
}

fn base(far: Channel, kept: &mut Kept, handle: &Handle) -> Result<Checkpoints, MigrateError> {
    Destination::new(kept, far, handle).options(options()).run()?.into_checkpoints()
}

/// Receives the base and all checkpoints; those that came whole, and why there are no more.
fn keep(far: Channel, kept: &mut Kept) -> (Vec<Checkpoint>, Result<(), MigrateError>) {
    let mut came = Vec::new();
    let receive = || {
        let mut checkpoints = base(far, kept, &Handle::new())?;
        checkpoints.begin()?;
        while checkpoints.wait_request(LONG)? == NextCheckpoint::Requested {
            checkpoints.reply()?;
            let checkpoint = checkpoints.receive(kept, LONG)?;
            checkpoints.loaded()?;
            came.push(checkpoint);
        }
        Ok(())
    };
    let ended = receive();
    (came, ended)
}

/// Keeps the checkpoints of a primary that says these bytes ahead of their turns, and closes.
fn keep_all(
    primary: &Primary,
    bytes: &[u8],
    pieces: &[usize],
    kept: &mut Kept,
) -> (Vec<Checkpoint>, Result<(), MigrateError>) {
    let (near, far) = pair();
    thread::scope(|scope| {
        scope.spawn(|| {
            primary.say(&near, bytes, pieces);
            let _ = near.shutdown(Shutdown::Write);
        });
        keep(far, kept)
    })
}

const WHOLE: &[usize] = &[usize::MAX];

/// The pages after these writes.
fn written<'a>(writes: impl Iterator<Item = &'a Write>) -> Vec<Vec<Option<Vec<u8>>>> {
    let mut pages = PAGES.map(|pages| vec![None; usize::try_from(pages).unwrap()]).to_vec();
    for (block, page, value) in writes {
        pages[*block][usize::try_from(*page).unwrap()] = (*value != 0).then(|| filled(*value));
    }
    pages
}

/// A base and three checkpoints. The first pages of two of them continue in the block of the last page before, which is
/// the second block.
fn three() -> Primary {
    let mut primary = Primary::new(&[(0, 1, 7), (0, 2, 8), (1, 3, 9)]);
    primary.checkpoint(&[(1, 3, 10), (0, 2, 0)], &[1; 8]);
    primary.checkpoint(&[(0, 5, 11), (1, 0, 12)], &[2; 8]);
    primary.checkpoint(&[(1, 0, 13), (1, 1, 0)], &[3; 8]);
    primary
}

#[test]
fn every_checkpoint_arrives_and_its_turns_are_answered() {
    let primary = three();
    // No block is named in the first record of the first and the last checkpoint: those are the traps.
    let names = |part: &[u8]| part.windows(3).any(|window| window == b"vga");
    assert_eq!([2, 4, 6].map(|part: usize| names(&primary.parts[part])), [false, true, false]);
    let (near, far) = pair();
    let mut kept = Kept::default();
    let handle = Handle::new();
    thread::scope(|scope| {
        scope.spawn(|| primary.speak(&near));
        let mut checkpoints = base(far, &mut kept, &handle).unwrap();
        assert_eq!(checkpoints.base().setup.blocks, blocks());
        assert_eq!(checkpoints.base().devices.sections.len(), 1);
        checkpoints.begin().unwrap();
        assert_eq!(handle.progress.read().phase, Phase::Colo);
        let mut writes = vec![(0, 1, 7), (0, 2, 8), (1, 3, 9)];
        for (number, more) in (1..).zip([[(1, 3, 10), (0, 2, 0)], [(0, 5, 11), (1, 0, 12)], [(1, 0, 13), (1, 1, 0)]]) {
            assert_eq!(checkpoints.wait_request(LONG).unwrap(), NextCheckpoint::Requested);
            checkpoints.reply().unwrap();
            let checkpoint = checkpoints.receive(&mut kept, LONG).unwrap();
            let pause = checkpoints.loaded().unwrap();
            assert_eq!(checkpoint.number, number);
            assert!(pause >= checkpoint.stats.elapsed);
            assert_eq!(
                checkpoint.stats.bytes,
                u64::try_from(primary.parts[usize::try_from(2 * number).unwrap()].len()).unwrap()
            );
            writes.extend(more);
            assert!(kept.pages == written(writes.iter()), "checkpoint {number}");
            let state = [u8::try_from(number).unwrap(); 8];
            assert!(checkpoint.sections.windows(8).any(|window| window == state));
            assert_eq!(checkpoint.sections.last(), Some(&section::EOF));
        }
        assert_eq!(checkpoints.wait_request(LONG).unwrap(), NextCheckpoint::Ended);
        assert_eq!(checkpoints.received(), 3);
    });
}

#[test]
fn a_series_that_is_cut_at_any_byte_ends_between_checkpoints_and_is_an_error_inside_one() {
    let primary = three();
    let whole = primary.bytes();
    let mut ends = vec![primary.parts[0].len()];
    for turn in primary.parts[1..].chunks(2) {
        ends.push(ends.last().unwrap() + turn.concat().len());
    }
    let near_an_end = |length: usize| ends.iter().any(|end| length.abs_diff(*end) < 90);
    for length in (0..=whole.len()).filter(|length| length % 509 == 0 || near_an_end(*length)) {
        let (came, ended) = keep_all(&primary, &whole[..length], WHOLE, &mut Kept::default());
        let full = ends.iter().skip(1).filter(|end| **end <= length).count();
        assert_eq!(came.len(), full, "cut at {length}");
        match ended {
            Ok(()) => assert!(ends.contains(&length), "cut at {length}"),
            Err(error) => {
                assert!(!ends.contains(&length), "cut at {length}: {error}");
                assert!(matches!(error, MigrateError::Stream(_)), "cut at {length}: {}", error.in_one_line());
            }
        }
    }
}

#[test]
fn a_failed_checkpoint_closes_the_channel_so_that_the_primary_learns_of_it() {
    let primary = three();
    let (near, far) = pair();
    thread::scope(|scope| {
        let speaking = scope.spawn(|| {
            primary.say(&near, &primary.bytes(), WHOLE);
            let mut room = [0; 64];
            while near.read(&mut room).is_ok_and(|got| got > 0) {}
        });
        let mut kept = Kept { fail_after: Some(5), ..Kept::default() };
        let (came, ended) = keep(far, &mut kept);
        assert_eq!(came.len(), 1);
        assert!(ended.unwrap_err().in_one_line().contains("no space left"));
        speaking.join().unwrap();
    });
}

/// Returns why a series ends whose primary falls silent so far inside a part.
fn silent_after(part: usize, inside: usize, timeout: Option<Duration>, handle: &Handle) -> MigrateError {
    let primary = three();
    let (near, far) = pair();
    let bytes = [primary.parts[..part].concat(), primary.parts[part][..inside].to_vec()].concat();
    thread::scope(|scope| {
        scope.spawn(|| primary.say(&near, &bytes, WHOLE));
        let mut kept = Kept::default();
        let mut checkpoints = base(far, &mut kept, handle).unwrap();
        let mut series = || {
            checkpoints.begin()?;
            while checkpoints.wait_request(timeout)? == NextCheckpoint::Requested {
                checkpoints.reply()?;
                checkpoints.receive(&mut kept, timeout)?;
                checkpoints.loaded()?;
            }
            panic!("a silent primary ends nothing");
        };
        let ended: Result<(), MigrateError> = series();
        ended.unwrap_err()
    })
}

#[test]
fn a_primary_that_falls_silent_is_waited_for_as_long_as_the_caller_says() {
    // Before a request, inside one, before the pages, inside a page, inside the device sections.
    let last = three().parts[2].len();
    for (turn, inside) in [(1, 0), (1, 2), (2, 0), (2, 4), (2, 2000), (2, last - 3)] {
        let error = silent_after(turn, inside, Some(Duration::from_millis(200)), &Handle::new());
        assert!(matches!(&error, MigrateError::Channel(error) if error.is_timeout()), "{turn}, {inside}: {error}");
    }
}

#[test]
fn a_series_is_cancelled_wherever_it_waits() {
    for (turn, inside) in [(1, 0), (2, 0), (2, 2000)] {
        let handle = Handle::new();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| silent_after(turn, inside, None, &handle));
            // Before that the base would be cancelled.
            while handle.progress.read().phase != Phase::Colo {
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(Duration::from_millis(50));
            handle.control.stop(Stop::Cancel);
            assert!(matches!(waiting.join().unwrap(), MigrateError::Cancelled), "{turn}, {inside}");
        });
    }
}

#[test]
fn a_stop_that_comes_before_the_series_ends_it_at_its_first_turn() {
    let (near, far) = pair();
    near.write_all(&three().parts[0]).unwrap();
    let handle = Handle::new();
    let mut checkpoints = base(far, &mut Kept::default(), &handle).unwrap();
    handle.control.stop(Stop::Cancel);
    assert!(matches!(checkpoints.begin(), Err(MigrateError::Cancelled)));
}

#[test]
fn the_stream_of_a_newer_qemu_does_not_say_that_checkpoints_follow() {
    let mut primary = three();
    let mut enable = Vec::new();
    Command::EnableColo.encode(&mut enable).unwrap();
    let at = primary.parts[0].windows(enable.len()).position(|window| window == enable).unwrap();
    primary.parts[0].drain(at..at + enable.len());
    let (came, ended) = keep_all(&primary, &primary.bytes(), WHOLE, &mut Kept::default());
    ended.unwrap();
    assert_eq!(came.len(), 3);
}

#[test]
fn checkpoints_come_only_where_they_are_expected() {
    let primary = three();
    let plain = DestinationOptions { colo: false, ..options() };
    let (near, far) = pair();
    near.write_all(&primary.parts[0]).unwrap();
    let refused = Destination::new(&mut Kept::default(), far, &Handle::new()).options(plain.clone()).run();
    assert!(refused.unwrap_err().in_one_line().contains("enables COLO"));

    let memory = Memory::new(&[4], |_, _| true);
    let (near, far) = pair();
    let handle = Handle::new();
    let received = thread::scope(|scope| {
        scope.spawn(|| PrecopySource::new(&memory, near, &handle).run());
        let received = Destination::new(&mut Kept::default(), far, &Handle::new()).options(plain).run().unwrap();
        received.acknowledge().unwrap();
        received
    });
    let error = received.into_checkpoints().unwrap_err();
    assert!(error.to_string().contains("no checkpoints were expected"), "{error}");
}

/// The packets of a multifd channel with a page each, and the one at a synchronization point.
fn packets(pages: &[(usize, u64, u64)]) -> Vec<u8> {
    let (names, mut bytes, mut header) = (["pc.ram", "vga"], Vec::new(), [0; PACKET_LEN]);
    for (block, page, value) in pages {
        let packet = Packet { block: names[*block], normal: &[page * 4096], payload_len: 4096, ..Packet::sync(0) };
        Packet { sync: false, ..packet }.encode(&mut header).unwrap();
        bytes.extend_from_slice(&header);
        bytes.extend_from_slice(&filled(*value));
    }
    Packet::sync(0).encode(&mut header).unwrap();
    bytes.extend_from_slice(&header);
    bytes
}

/// A base and two checkpoints whose pages come on two channels, and the bytes of these for each of the three.
fn on_two_channels() -> (Primary, [[Vec<u8>; 2]; 3]) {
    let mut primary = Primary::new(&[(0, 1, 0)]);
    primary.checkpoint(&[], &[1; 8]);
    primary.checkpoint(&[(1, 3, 0)], &[2; 8]);
    // Every one has a synchronization point in front of the end of its RAM section.
    let (mut end, mut flush) = (Vec::new(), Vec::new());
    ram::encode_eos(RAM, &mut end);
    ram::encode_multifd_flush(&mut flush);
    for part in [0, 2, 4] {
        let part = &mut primary.parts[part];
        let at = part.windows(end.len()).position(|window| window == end).unwrap();
        part.splice(at..at, flush.iter().copied());
    }
    let base = [packets(&[(0, 2, 8)]), packets(&[(1, 3, 9), (0, 7, 5)])];
    let first = [packets(&[(0, 2, 10), (0, 3, 11)]), packets(&[])];
    (primary, [base, first, [packets(&[]), packets(&[(0, 7, 12)])]])
}

#[test]
fn checkpoints_come_on_several_channels_and_are_whole_when_all_have_come_to_their_end() {
    let (primary, pages) = on_two_channels();
    let ((near, far), others) = (pair(), [pair(), pair()]);
    let [(one, far_one), (two, far_two)] = others;
    let mut kept = Kept::default();
    thread::scope(|scope| {
        scope.spawn(|| {
            near.set_timeouts(LONG, LONG).unwrap();
            let turns = [&b"\0\0\0\x02"[..], b"\0\0\0\x05\0\0\0\x06"].into_iter().cycle();
            let mut answers = std::iter::once(READY).chain(turns);
            let mut pages = pages.iter();
            for (number, part) in primary.parts.iter().enumerate() {
                near.write_all(part).unwrap();
                if number % 2 == 0 {
                    // Behind the main channel's own part, and the second one late.
                    let [first, second] = pages.next().unwrap();
                    one.write_all(first).unwrap();
                    thread::sleep(Duration::from_millis(20));
                    two.write_all(second).unwrap();
                }
                let wanted = answers.next().unwrap();
                let mut answer = vec![0; wanted.len()];
                near.read_exact(&mut answer).unwrap();
                assert_eq!(answer, wanted);
            }
            near.shutdown(Shutdown::Write).unwrap();
        });
        let handle = Handle::new();
        let received = Destination::new(&mut kept, far, &handle)
            .options(options())
            .channels(vec![far_one, far_two], MultifdOptions::default())
            .run();
        let mut checkpoints = received.unwrap().into_checkpoints().unwrap();
        checkpoints.begin().unwrap();
        let mut writes = vec![(0, 1, 0), (0, 2, 8), (1, 3, 9), (0, 7, 5)];
        assert!(kept.pages == written(writes.iter()), "base");
        for (number, more) in [(2, vec![(0, 2, 10), (0, 3, 11)]), (4, vec![(1, 3, 0), (0, 7, 12)])] {
            assert_eq!(checkpoints.wait_request(LONG).unwrap(), NextCheckpoint::Requested);
            checkpoints.reply().unwrap();
            let mut aside = Aside::new(8 << 20);
            let checkpoint = checkpoints.receive_aside(&mut aside, &mut kept, LONG).unwrap();
            checkpoints.loaded().unwrap();
            aside.store(&mut kept).unwrap();
            let on_channels: usize = pages[number / 2].iter().map(Vec::len).sum();
            assert_eq!(checkpoint.stats.bytes, u64::try_from(primary.parts[number].len() + on_channels).unwrap());
            writes.extend(more);
            assert!(kept.pages == written(writes.iter()), "part {number}");
        }
        assert_eq!(checkpoints.wait_request(LONG).unwrap(), NextCheckpoint::Ended);
    });
}

#[test]
fn a_checkpoint_one_of_whose_channels_ends_or_falls_silent_is_none() {
    for ends in [true, false] {
        let (primary, pages) = on_two_channels();
        let ((near, far), (one, far_one), (two, far_two)) = (pair(), pair(), pair());
        let mut kept = Kept::default();
        near.write_all(&primary.parts[0]).unwrap();
        one.write_all(&pages[0][0]).unwrap();
        two.write_all(&pages[0][1]).unwrap();
        let handle = Handle::new();
        let short = Some(Duration::from_millis(300));
        let received = Destination::new(&mut kept, far, &handle)
            .options(DestinationOptions { answer_timeout: short, ..options() })
            .channels(vec![far_one, far_two], MultifdOptions::default())
            .run();
        let mut checkpoints = received.unwrap().into_checkpoints().unwrap();
        checkpoints.begin().unwrap();
        near.write_all(&primary.parts[1..3].concat()).unwrap();
        one.write_all(&pages[1][0]).unwrap();
        if ends {
            two.shutdown(Shutdown::Both).unwrap();
        }
        assert_eq!(checkpoints.wait_request(LONG).unwrap(), NextCheckpoint::Requested);
        checkpoints.reply().unwrap();
        let error = checkpoints.receive(&mut kept, short).unwrap_err();
        assert!(error.in_one_line().contains("multifd channel 1"), "{}", error.in_one_line());
    }
}

/// Returns why a checkpoint is refused that begins with these bytes, behind the reply.
fn refusal(checkpoint: &[u8]) -> String {
    let primary = three();
    let bytes = [primary.parts[..2].concat(), checkpoint.to_vec()].concat();
    let (came, ended) = keep_all(&primary, &bytes, WHOLE, &mut Kept::default());
    assert!(came.is_empty());
    ended.unwrap_err().in_one_line()
}

#[test]
fn messages_out_of_turn_and_other_commands_are_refused() {
    let said = refusal(b"\0\0\0\x05");
    assert!(said.contains("expected the pages of a checkpoint") && said.contains("VmstateReceived"), "{said}");
    let said = refusal(b"QEVM");
    assert!(said.contains("a COLO message from 0 to 6"), "{said}");
    for command in [Command::Ping(1), Command::OpenReturnPath, Command::EnableColo, Command::PostcopyListen] {
        let mut bytes = b"\0\0\0\x03".to_vec();
        command.encode(&mut bytes).unwrap();
        let said = refusal(&bytes);
        assert!(said.contains(&format!("{command:?}")), "{said}");
    }
    let said = refusal(b"\0\0\0\x03\0\0\0\0\x04\x7f\xff\xff\xff\xff\xff\xff\xff");
    assert!(said.contains("more than the limit"), "{said}");
    // A size that is announced and does not come takes no memory.
    let said = refusal(b"\0\0\0\x03\0\0\0\0\x04\0\0\0\0\x3f\xff\xff\xff");
    assert!(said.contains("ends before the device sections of a checkpoint"), "{said}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_last_contents_of_a_page_win_within_and_between_checkpoints(
        parts in proptest::collection::vec(
            proptest::collection::vec((0..2usize, 0..12u64, 0..4u64), 0..60), 1..9),
        pieces in proptest::collection::vec(1usize..60_000, 1..9),
    ) {
        let mut primary = Primary::new(&parts[0]);
        for writes in &parts[1..] {
            primary.checkpoint(writes, &[5; 8]);
        }
        let mut kept = Kept::default();
        let (came, ended) = keep_all(&primary, &primary.bytes(), &pieces, &mut kept);
        ended.unwrap();
        prop_assert_eq!(came.len(), parts.len() - 1);
        prop_assert!(kept.pages == written(parts.iter().flatten()));
    }

    #[test]
    fn garbage_ends_a_series_and_never_panics(
        noise in proptest::collection::vec(any::<u8>(), 0..40),
        at in any::<prop::sample::Index>(),
        cut in 0..40usize,
    ) {
        let primary = three();
        let mut bytes = primary.bytes();
        let base = primary.parts[0].len();
        let at = base + at.index(bytes.len() - base);
        let end = bytes.len().min(at + cut);
        bytes.splice(at..end, noise);
        let (came, _) = keep_all(&primary, &bytes, WHOLE, &mut Kept::default());
        prop_assert!(came.len() <= 3);
    }
}

#[test]
fn a_primary_may_have_something_to_say_before_a_checkpoint_or_end_instead() {
    let primary = three();
    let (near, far) = pair();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = primary.parts[..2].concat();
            for value in [1, u64::MAX] {
                Primary::message(ColoMessage::Note { kind: 7, value }, &mut bytes);
            }
            bytes.extend(primary.parts[2..4].concat());
            primary.say(&near, &bytes, WHOLE);
            let _ = near.shutdown(Shutdown::Write);
        });
        let mut kept = Kept::default();
        let mut checkpoints = base(far, &mut kept, &Handle::new()).unwrap();
        checkpoints.begin().unwrap();
        checkpoints.wait_request(LONG).unwrap();
        checkpoints.reply().unwrap();
        for value in [1, u64::MAX] {
            assert_eq!(checkpoints.wait_sent(LONG).unwrap(), NextState::Note { kind: 7, value });
        }
        assert_eq!(checkpoints.wait_sent(LONG).unwrap(), NextState::Sent);
        let checkpoint = checkpoints.receive(&mut kept, LONG).unwrap();
        assert_eq!(checkpoint.stats.bytes, u64::try_from(primary.parts[2].len()).unwrap());
        checkpoints.loaded().unwrap();
        checkpoints.wait_request(LONG).unwrap();
        checkpoints.reply().unwrap();
        assert_eq!(checkpoints.wait_sent(LONG).unwrap(), NextState::Ended);
    });
}

#[test]
fn a_series_that_is_given_up_closes_its_channel_also_if_its_handle_lives_on() {
    let (near, far) = pair();
    near.set_timeouts(LONG, LONG).unwrap();
    let (handle, mut kept) = (Handle::new(), Kept::default());
    thread::scope(|scope| {
        let primary = scope.spawn(|| {
            near.write_all(&three().parts[0]).unwrap();
            near.read_exact(&mut [0; READY.len()]).unwrap();
            near.read(&mut [0]).unwrap()
        });
        base(far, &mut kept, &handle).unwrap().begin().unwrap();
        assert_eq!(primary.join().unwrap(), 0);
    });
}
