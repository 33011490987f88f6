//! The precopy roles: against each other, and against streams that end, stall or lie.

use std::num::NonZeroU64;
use std::os::fd::AsFd as _;
use std::thread;
use std::time::Duration;

use crate::model::InOneLine;
use crate::model::encrypted::Meeting;
use crate::model::{Kept, Memory, device_tail, pair};
use limosa_channel::{Channel, Listener, Options, RateLimit, Shutdown};
use limosa_migrate::control::Stop;
use limosa_migrate::stored::{
    Destination, DestinationOptions, PageSource, PrecopyOptions, PrecopySource, PresentBlock,
};
use limosa_migrate::{Handle, MigrateError};
use limosa_page::{PageNumber, PageRange};
use limosa_stream::{Command, RecordEncoder, RecordKind, ram, section};
use proptest::prelude::*;

fn every_third(_: usize, page: u64) -> bool {
    page % 3 != 1
}

fn receive(far: Channel, sink: &mut Kept) -> Result<limosa_migrate::stored::ReceivedStream, MigrateError> {
    let options = DestinationOptions { answer_timeout: Some(Duration::from_secs(10)), ..DestinationOptions::default() };
    Destination::new(sink, far, &Handle::new()).options(options).run()
}

/// A whole stream of one block: `records` are (page, contents) in the order sent.
fn stream(memory: &Memory, records: &[(u64, bool)], return_path: bool) -> Vec<u8> {
    let start = &memory.start;
    let mut bytes = Vec::new();
    start.configuration.encode(&mut bytes).unwrap();
    if return_path {
        Command::OpenReturnPath.encode(&mut bytes).unwrap();
        Command::Ping(7).encode(&mut bytes).unwrap();
    }
    ram::encode_ram_start(start.section_id, &start.blocks, &mut bytes).unwrap();
    section::encode_part(start.section_id, &mut bytes);
    let mut encoder = RecordEncoder::new(&start.blocks).unwrap();
    for (page, contents) in records {
        let kind = if *contents { RecordKind::Page } else { RecordKind::Zero };
        encoder.append(kind, 0, page * 4096, &mut bytes).unwrap();
        if *contents {
            bytes.extend_from_slice(&memory.page(0, *page));
        }
    }
    ram::encode_eos(start.section_id, &mut bytes);
    let (sections, json) = device_tail();
    bytes.extend_from_slice(&sections);
    section::encode_eof(&mut bytes);
    section::encode_description(&json, &mut bytes).unwrap();
    bytes
}

#[test]
fn what_the_source_sends_the_destination_has() {
    let memory = Memory::new(&[4000, 50, 20_000], every_third);
    let (near, far) = pair();
    let mut kept = Kept::default();
    thread::scope(|scope| {
        let kept = &mut kept;
        let destination = scope.spawn(move || {
            let incoming = receive(far, kept).unwrap();
            assert!(incoming.has_return_path());
            incoming.acknowledge().unwrap();
            incoming
        });
        let handle = Handle::new();
        let stats = PrecopySource::new(&memory, near, &handle).run().unwrap();
        let incoming = destination.join().unwrap();
        assert_eq!(incoming.stats.normal_pages, stats.normal_pages);
        assert_eq!(incoming.devices.sections.len(), 1);
        assert_eq!(&incoming.tail[incoming.devices.sections_range.clone()], memory.device_sections());
    });
    for (block, layout) in memory.start.blocks.iter().enumerate() {
        for page in 0..layout.pages() {
            let expected = every_third(block, page).then(|| memory.page(block, page).to_vec());
            assert_eq!(kept.pages[block][usize::try_from(page).unwrap()], expected, "page {page} of block {block}");
        }
    }
}

#[test]
fn of_a_block_that_is_in_place_no_page_is_sent() {
    let memory = Memory::new(&[400, 50, 2_000], every_third);
    let (near, far) = pair();
    let mut kept = Kept::default();
    let in_place =
        vec![PresentBlock::unchanged("block2"), PresentBlock::unchanged("a block that this VM does not have")];
    let handle = Handle::new();
    let stats = thread::scope(|scope| {
        let kept = &mut kept;
        let destination = scope.spawn(move || receive(far, kept).unwrap().acknowledge().unwrap());
        let options = PrecopyOptions { in_place, ..PrecopyOptions::default() };
        let stats = PrecopySource::new(&memory, near, &handle).options(options).run().unwrap();
        destination.join().unwrap();
        stats
    });
    let stored: u64 = (0..2).map(|block| memory.stored_bitmap(block).count()).sum();
    assert_eq!((stats.normal_pages, stats.zero_pages), (stored, 450 - stored));
    assert_eq!(handle.progress.read().total_pages, stored);
    assert!(kept.pages[2].iter().all(Option::is_none));
    for (block, pages) in [(0, 400), (1, 50)] {
        for page in 0..pages {
            let expected = every_third(block, page).then(|| memory.page(block, page).to_vec());
            assert_eq!(kept.pages[block][usize::try_from(page).unwrap()], expected, "page {page} of block {block}");
        }
    }
}

#[test]
fn pages_that_the_destination_has_changed_of_a_block_in_place_are_sent() {
    let memory = Memory::new(&[100, 2_000], every_third);
    let (near, far) = pair();
    let mut kept = Kept::default();
    let range = |start, end| PageRange::new(PageNumber(start), PageNumber(end));
    // The last one reaches past the block's end.
    let changed = vec![range(0, 1), range(10, 17), range(1_998, 2_005)];
    let is_changed = |page: u64| changed.iter().any(|range| (range.start.0..range.end.0).contains(&page));
    let in_place = vec![PresentBlock { block: "block1".to_owned(), changed: changed.clone() }];
    let handle = Handle::new();
    let stats = thread::scope(|scope| {
        let kept = &mut kept;
        let destination = scope.spawn(move || receive(far, kept).unwrap().acknowledge().unwrap());
        let options = PrecopyOptions { in_place, ..PrecopyOptions::default() };
        let stats = PrecopySource::new(&memory, near, &handle).options(options).run().unwrap();
        destination.join().unwrap();
        stats
    });
    let stored = memory.stored_bitmap(0).count()
        + (0..2_000).filter(|page| is_changed(*page) && every_third(1, *page)).count() as u64;
    assert_eq!(stats.normal_pages, stored);
    assert_eq!(stats.zero_pages, 100 + 10 - stored);
    assert_eq!(handle.progress.read().total_pages, stored);
    for page in 0..2_000 {
        // The kept contents of a zero page are none; that it came at all is counted above.
        let expected = (is_changed(page) && every_third(1, page)).then(|| memory.page(1, page).to_vec());
        assert_eq!(kept.pages[1][usize::try_from(page).unwrap()], expected, "page {page}");
    }
}

#[test]
fn a_destination_that_refuses_is_a_failure_at_the_source() {
    let memory = Memory::new(&[10], every_third);
    let (near, far) = pair();
    thread::scope(|scope| {
        scope.spawn(move || receive(far, &mut Kept::default()).unwrap().refuse().unwrap());
        let handle = Handle::new();
        let result = PrecopySource::new(&memory, near, &handle).run();
        assert!(matches!(result, Err(MigrateError::Refused { status: 1 })));
    });
}

#[test]
fn the_last_word_about_a_page_counts() {
    let memory = Memory::new(&[16], |_, _| true);
    let records = [(0, true), (1, true), (2, false), (1, false), (2, true), (3, true), (3, false), (3, true)];
    let (near, far) = pair();
    near.write_all(&stream(&memory, &records, false)).unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    let mut kept = Kept::default();
    let incoming = receive(far, &mut kept).unwrap();
    let there: Vec<bool> = kept.pages[0].iter().map(Option::is_some).collect();
    assert_eq!(&there[..5], [true, false, true, true, false]);
    assert_eq!((incoming.stats.normal_pages, incoming.stats.zero_pages, incoming.stats.resent_pages), (5, 3, 4));
    assert!(!incoming.has_return_path());
}

#[test]
fn a_ping_is_answered_and_the_end_is_found_while_the_source_keeps_the_channel_open() {
    let memory = Memory::new(&[16], |_, _| true);
    let (near, far) = pair();
    near.write_all(&stream(&memory, &[(0, true)], true)).unwrap();
    let mut kept = Kept::default();
    let incoming = receive(far, &mut kept).unwrap();
    incoming.acknowledge().unwrap();
    let mut answers = [0; 16];
    near.read_exact(&mut answers).unwrap();
    assert_eq!(answers, *b"\0\x02\0\x04\0\0\0\x07\0\x01\0\x04\0\0\0\0");
}

#[test]
fn a_stream_that_ends_at_any_byte_is_an_error_that_says_so() {
    let memory = Memory::new(&[4], |_, _| true);
    let whole = stream(&memory, &[(0, true), (1, false), (3, true)], true);
    for length in (0..whole.len()).filter(|length| length % 509 == 0 || whole.len() - length < 400 || *length < 200) {
        let (near, far) = pair();
        near.write_all(&whole[..length]).unwrap();
        near.shutdown(Shutdown::Write).unwrap();
        let error = receive(far, &mut Kept::default()).map(|_| ()).unwrap_err();
        assert!(matches!(error, MigrateError::Stream(_)), "{length}: {error}");
    }
}

#[test]
fn what_comes_behind_the_end_is_refused() {
    let memory = Memory::new(&[4], |_, _| true);
    let mut bytes = stream(&memory, &[(0, true)], false);
    bytes.push(0);
    let (near, far) = pair();
    near.write_all(&bytes).unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    let error = receive(far, &mut Kept::default()).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("behind the description"), "{error}");
}

#[test]
fn a_sink_that_fails_closes_the_channel_so_that_the_source_goes_on() {
    let memory = Memory::new(&[4000], |_, _| true);
    let (near, far) = pair();
    thread::scope(|scope| {
        let receiving = scope.spawn(move || {
            let mut kept = Kept { fail_after: Some(1000), ..Kept::default() };
            receive(far, &mut kept).map(|_| ()).unwrap_err()
        });
        let handle = Handle::new();
        let sent = PrecopySource::new(&memory, near, &handle).run();
        assert!(sent.is_err());
        let error = receiving.join().unwrap();
        assert!(error.in_one_line().contains("no space left"), "{error}");
    });
}

#[test]
fn a_source_that_stalls_or_a_person_who_cancels_ends_the_wait() {
    let memory = Memory::new(&[4], |_, _| true);
    let bytes = stream(&memory, &[(0, true)], true);
    let (near, far) = pair();
    near.write_all(&bytes[..100]).unwrap();
    let options =
        DestinationOptions { answer_timeout: Some(Duration::from_millis(50)), ..DestinationOptions::default() };
    let stalled = Destination::new(&mut Kept::default(), far, &Handle::new()).options(options).run();
    assert!(matches!(&stalled, Err(MigrateError::Channel(error)) if error.is_timeout()), "{stalled:?}");

    let (near, far) = pair();
    near.write_all(&bytes[..100]).unwrap();
    let handle = Handle::new();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| Destination::new(&mut Kept::default(), far, &handle).run().map(|_| ()));
        handle.control.stop(Stop::Cancel);
        assert!(matches!(waiting.join().unwrap(), Err(MigrateError::Cancelled)));
    });
}

#[test]
fn a_source_over_tcp_that_waits_for_room_learns_at_once_that_reading_has_ended() {
    // More than the kernel keeps at both ends, for a destination that reads next to nothing.
    let memory = Memory::new(&[8000], |_, _| true);
    let bytes = stream(&memory, &(0..8000).map(|page| (page, true)).collect::<Vec<_>>(), true);
    let slow = Options { read_rate_limit: Some(RateLimit::new(NonZeroU64::new(1))), ..Options::default() };
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &slow).unwrap();
    let near = Channel::connect(listener.local_uri(), &Options::default()).unwrap();
    let far = listener.accept(None).unwrap();
    let waiting = far.try_clone().unwrap();
    near.set_timeouts(None, Some(Duration::from_secs(30))).unwrap();
    let handle = Handle::new();
    thread::scope(|scope| {
        let sending = scope.spawn(|| near.write_all(&bytes));
        let receiving = scope.spawn(|| Destination::new(&mut Kept::default(), far, &handle).run().map(|_| ()));
        let mut before = 0;
        loop {
            let now = rustix::io::ioctl_fionread(&waiting).unwrap();
            if now > 1 << 16 && now == before {
                break;
            }
            before = now;
            thread::sleep(Duration::from_millis(50));
        }
        drop(waiting);
        handle.control.stop(Stop::Cancel);
        assert!(matches!(receiving.join().unwrap(), Err(MigrateError::Cancelled)));
        let error = sending.join().unwrap().unwrap_err();
        assert!(error.is_closed(), "{error}");
    });
}

#[test]
fn an_encrypted_stream_that_is_cut_where_it_seems_to_end_has_ended_only_if_no_answer_is_awaited() {
    let memory = Memory::new(&[4], |_, _| true);
    let meeting = Meeting::new();
    let cut = |channel: &Channel| rustix::net::shutdown(channel, rustix::net::Shutdown::Write).unwrap();
    let reset = |channel: &Channel| {
        rustix::net::sockopt::set_socket_linger(channel, Some(Duration::ZERO)).unwrap();
        rustix::net::connect_unspec(channel.as_fd().try_clone_to_owned().unwrap()).unwrap();
    };
    let announce = |channel: &Channel| channel.shutdown(Shutdown::Write).unwrap();
    type End<'a> = &'a dyn Fn(&Channel);
    let ends: [(&str, bool, End<'_>, bool); 5] = [
        ("announced, no answer awaited", false, &announce, true),
        // As stock QEMU does.
        ("cut, no answer awaited", false, &cut, true),
        ("reset, no answer awaited", false, &reset, false),
        ("announced, an answer awaited", true, &announce, true),
        ("cut, an answer awaited", true, &cut, false),
    ];
    for (what, return_path, end, whole) in ends {
        let (near, far) = meeting.pair();
        near.write_all(&stream(&memory, &[(0, true)], return_path)).unwrap();
        end(&near);
        // All of it has come.
        let received = receive(far, &mut Kept::default());
        assert_eq!(received.is_ok(), whole, "{what}: {received:?}");
        if let Err(error) = received {
            assert!(error.in_one_line().contains("without a TLS close notification"), "{what}: {error}");
        }
    }
}

/// Returns a destination's answers to a stream that begins with these commands.
fn refusal(commands: &[Command]) -> String {
    let memory = Memory::new(&[4], |_, _| true);
    let mut bytes = Vec::new();
    memory.start.configuration.encode(&mut bytes).unwrap();
    for command in commands {
        command.encode(&mut bytes).unwrap();
    }
    let (near, far) = pair();
    near.write_all(&bytes).unwrap();
    receive(far, &mut Kept::default()).map(|_| ()).unwrap_err().to_string()
}

#[test]
fn commands_of_other_roles_are_refused_by_name() {
    let said = refusal(&[Command::PostcopyResume]);
    assert!(said.contains("PostcopyResume"), "{said}");
}

#[test]
fn postcopy_may_be_announced_and_is_refused_when_it_begins() {
    let said = refusal(&[Command::PostcopyAdvise(None), Command::PostcopyListen]);
    assert!(said.contains("switched to postcopy") && said.contains("no VM runs here"), "{said}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_contents_and_zeros_in_any_pieces_leaves_the_last_word(
        records in proptest::collection::vec((0u64..600, any::<bool>()), 0..900),
        pieces in proptest::collection::vec(1usize..100_000, 1..20),
    ) {
        let memory = Memory::new(&[600], |_, _| true);
        let bytes = stream(&memory, &records, false);
        let (near, far) = pair();
        let mut kept = Kept::default();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut rest = &bytes[..];
                let mut sizes = pieces.iter().cycle();
                while !rest.is_empty() {
                    let (now, later) = rest.split_at(rest.len().min(*sizes.next().unwrap()));
                    near.write_all(now).unwrap();
                    rest = later;
                }
                near.shutdown(Shutdown::Write).unwrap();
            });
            receive(far, &mut kept).unwrap();
        });
        let mut expected = vec![None; 600];
        for (page, contents) in &records {
            expected[usize::try_from(*page).unwrap()] = contents.then(|| memory.page(0, *page).to_vec());
        }
        prop_assert!(kept.pages[0] == expected);
    }

    #[test]
    fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..4096), whole in any::<bool>()) {
        let memory = Memory::new(&[4], |_, _| true);
        let mut stream = if whole { stream(&memory, &[(0, true), (1, true)], true) } else { Vec::new() };
        if let (true, Some(at)) = (whole, bytes.first()) {
            let at = usize::from(*at) * 7 % stream.len();
            stream.splice(at..at, bytes.iter().copied().take(5));
        } else {
            stream.extend_from_slice(&bytes);
        }
        let (near, far) = pair();
        near.write_all(&stream).unwrap();
        near.shutdown(Shutdown::Write).unwrap();
        let _ = receive(far, &mut Kept::default());
    }
}
