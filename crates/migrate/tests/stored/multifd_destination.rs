//! A destination of several channels: against streams that keep the order, and against channels that stall, end or lie.

use std::io::Write as _;
use std::thread;
use std::time::{Duration, Instant};

use crate::model::InOneLine;
use crate::model::encrypted::Meeting;
use crate::model::{Kept, Memory, device_tail, pair};
use limosa_channel::{Channel, Listener, Options, Shutdown, Uri};
use limosa_migrate::multifd::{
    MultifdAccept, MultifdAcceptOptions, MultifdChannels, MultifdOptions, MultifdSourceOptions,
};
use limosa_migrate::stored::{Destination, DestinationOptions, PrecopySource, ReceivedStream};
use limosa_migrate::{Handle, MigrateError};
use limosa_page::PAGE_LEN;
use limosa_stream::multifd::{Compression, InitialPacket, PACKET_LEN, Packet};
use limosa_stream::ram::{FLAG_EOS, FLAG_MULTIFD_FLUSH, FLAG_XBZRLE};
use limosa_stream::{Configuration, RecordEncoder, RecordKind, ram, section, xbzrle};

/// The pages of a packet, by number; those of `normal` are full of `fill`.
struct Contents<'a> {
    block: &'a str,
    normal: &'a [u64],
    zero: &'a [u64],
    fill: u8,
}

/// The packets of a multifd channel, in order.
#[derive(Default)]
struct Pages(Vec<u8>);

impl Pages {
    fn packet(mut self, sync: bool, contents: Contents<'_>) -> Self {
        let Contents { block, normal, zero, fill } = contents;
        let [normal, zero] = [normal, zero].map(|pages| pages.iter().map(|page| page * 4096).collect::<Vec<_>>());
        let mut header = [0; PACKET_LEN];
        let payload_len = u32::try_from(normal.len() * PAGE_LEN).unwrap();
        let packet = Packet { sync, block, normal: &normal, zero: &zero, payload_len, ..Packet::sync(0) };
        packet.encode(&mut header).unwrap();
        self.0.extend_from_slice(&header);
        self.0.resize(self.0.len() + normal.len() * PAGE_LEN, fill);
        self
    }

    fn data(self, normal: &[u64], zero: &[u64], fill: u8) -> Self {
        self.packet(false, Contents { block: "block0", normal, zero, fill })
    }

    fn sync(self) -> Self {
        self.packet(true, Contents { block: "", normal: &[], zero: &[], fill: 0 })
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }
}

/// The bytes of the main channel.
struct Main {
    bytes: Vec<u8>,
    records: RecordEncoder,
}

impl Main {
    /// The first section; with a join word or without.
    fn new(memory: &Memory, by_round: bool) -> Self {
        let start = &memory.start;
        let mut bytes = Vec::new();
        start.configuration.encode(&mut bytes).unwrap();
        ram::encode_ram_start(2, &start.blocks, &mut bytes).unwrap();
        if by_round {
            // The join word comes before the EOS and the footer, 13 bytes.
            let at = bytes.len() - 13;
            bytes.splice(at..at, FLAG_MULTIFD_FLUSH.to_be_bytes());
        }
        Self { bytes, records: RecordEncoder::new(&start.blocks).unwrap() }
    }

    fn section(mut self, body: impl FnOnce(&mut Vec<u8>, &mut RecordEncoder)) -> Self {
        section::encode_part(2, &mut self.bytes);
        body(&mut self.bytes, &mut self.records);
        self.bytes.extend_from_slice(&FLAG_EOS.to_be_bytes());
        section::encode_footer(2, &mut self.bytes);
        self
    }

    fn join(self) -> Self {
        self.section(|bytes, _| bytes.extend_from_slice(&FLAG_MULTIFD_FLUSH.to_be_bytes()))
    }

    fn zero(self, page: u64) -> Self {
        self.section(|bytes, records| {
            records.append(RecordKind::Zero, 0, page * 4096, bytes).unwrap();
        })
    }

    fn delta(self, page: u64, delta: &[u8]) -> Self {
        self.section(|bytes, _| {
            bytes.extend_from_slice(&((page * 4096) | FLAG_XBZRLE).to_be_bytes());
            bytes.extend_from_slice(b"\x06block0\x01");
            bytes.extend_from_slice(&u16::try_from(delta.len()).unwrap().to_be_bytes());
            bytes.extend_from_slice(delta);
        })
    }

    fn end(mut self) -> Vec<u8> {
        let (sections, json) = device_tail();
        self.bytes.extend_from_slice(&sections);
        section::encode_eof(&mut self.bytes);
        section::encode_description(&json, &mut self.bytes).unwrap();
        self.bytes
    }
}

fn memory() -> Memory {
    Memory::new(&[64], |_, _| true)
}

/// Receives all of this, which has been sent before that begins: who is waited for is silent for good. The channels in
/// `open` stay open behind their bytes.
fn receive(main: Vec<u8>, pages: Vec<Pages>, open: &[usize], sink: &mut Kept) -> Result<ReceivedStream, MigrateError> {
    receive_with(main, pages, open, sink, Compression::None)
}

fn receive_with(
    main: Vec<u8>,
    pages: Vec<Pages>,
    open: &[usize],
    sink: &mut Kept,
    compression: Compression,
) -> Result<ReceivedStream, MigrateError> {
    let (near, far) = pair();
    let (nears, fars): (Vec<_>, Vec<_>) = pages.iter().map(|_| pair()).unzip();
    let options =
        DestinationOptions { answer_timeout: Some(Duration::from_millis(300)), ..DestinationOptions::default() };
    for (id, (near, pages)) in nears.iter().zip(pages).enumerate() {
        assert!(pages.0.len() < 100_000, "more than a socket takes before it is read");
        near.write_all(&pages.0).unwrap();
        if !open.contains(&id) {
            near.shutdown(Shutdown::Write).unwrap();
        }
    }
    assert!(main.len() < 100_000, "more than a socket takes before it is read");
    near.write_all(&main).unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    let handle = Handle::new();
    Destination::new(sink, far, &handle).options(options).channels(fars, MultifdOptions { compression }).run()
}

fn contents(sink: &Kept, page: usize) -> Option<u8> {
    sink.pages[0][page].as_ref().map(|page| page[7])
}

#[test]
fn the_last_word_about_a_page_counts_across_channels_that_join_once_a_round() {
    let memory = memory();
    let main = Main::new(&memory, true).join().zero(5).join().join().end();
    let first = Pages::default().sync().data(&[9, 3, 5, 4], &[8, 7], 1).sync().sync().data(&[6], &[], 4).sync();
    let second = Pages::default().sync().data(&[6], &[], 2).sync().data(&[3], &[4], 3).sync().sync();
    let mut kept = Kept::default();
    let incoming = receive(main, vec![first, second], &[0, 1], &mut kept).unwrap();
    assert_eq!((contents(&kept, 3), contents(&kept, 4), contents(&kept, 5)), (Some(3), None, None));
    assert_eq!((contents(&kept, 6), contents(&kept, 7), contents(&kept, 9)), (Some(4), None, Some(1)));
    let stats = incoming.stats;
    assert_eq!((stats.normal_pages, stats.zero_pages, stats.resent_pages), (7, 4, 4));
}

#[test]
fn a_source_that_joins_at_every_section_may_put_pages_into_its_sync_packets() {
    let memory = memory();
    let main = Main::new(&memory, false).zero(1).zero(2).end();
    let joined = |normal, zero, fill| Contents { block: "block0", normal, zero, fill };
    let first = Pages::default().sync().packet(true, joined(&[10, 11], &[], 1)).data(&[12], &[], 1).sync();
    let second = Pages::default().sync().sync().packet(true, joined(&[10], &[11], 2));
    let mut kept = Kept::default();
    receive(main, vec![first, second], &[0], &mut kept).unwrap();
    assert_eq!((contents(&kept, 10), contents(&kept, 11), contents(&kept, 12)), (Some(2), None, Some(1)));
}

#[test]
fn what_a_source_of_many_channels_sends_a_destination_of_many_channels_has() {
    for (machine, channels, compression) in [
        ("pc-i440fx-7.2", 1, Compression::None),
        ("pc-q35-7.2", 4, Compression::Zlib),
        ("pc-q35-8.2", 2, Compression::Zstd),
        ("pc-q35-10.0", 16, Compression::None),
        ("pc-q35-10.0", 8, Compression::Zlib),
    ] {
        let mut memory = Memory::new(&[4000, 50, 9000], |_, page| page % 3 != 1);
        memory.start.configuration = Configuration::new(machine);
        let (_folder, listener) = listener();
        let mut kept = Kept::default();
        thread::scope(|scope| {
            let (memory, listener) = (&memory, &listener);
            scope.spawn(move || {
                let connect = || Channel::connect(listener.local_uri(), &Options::default()).unwrap();
                let source = PrecopySource::new(memory, connect(), &Handle::new());
                let multifd = MultifdSourceOptions { compression, ..MultifdSourceOptions::default() };
                let page_channels = (0..channels).map(|_| connect()).collect();
                source.channels(page_channels, multifd).unwrap().run().unwrap()
            });
            let set = gather(gathering(listener, channels, 20_000)).unwrap();
            let handle = Handle::new();
            let incoming = Destination::new(&mut kept, set.main, &handle)
                .channels(set.multifd, MultifdOptions { compression })
                .run()
                .unwrap();
            incoming.acknowledge().unwrap();
        });
        for (block, layout) in memory.start.blocks.iter().enumerate() {
            for page in 0..layout.pages() {
                let wanted = (page % 3 != 1).then(|| memory.page(block, page).to_vec());
                assert!(
                    kept.pages[block][usize::try_from(page).unwrap()] == wanted,
                    "{machine}: page {page} of {block}"
                );
            }
        }
    }
}

#[test]
fn a_packet_that_lies_ends_the_job_with_its_channel_named() {
    let memory = memory();
    let refused = |packet: Pages, compression: Compression| {
        let main = Main::new(&memory, true).join().end();
        let pages = vec![Pages::default().sync().sync(), Pages(packet.0)];
        let error = receive_with(main, pages, &[0], &mut Kept::default(), compression).unwrap_err();
        let said = error.in_one_line();
        assert!(said.starts_with("multifd channel 1: "), "{said}");
        said
    };
    let sync = || Pages::default().sync();
    let none = Compression::None;
    assert!(
        refused(sync().packet(false, Contents { block: "other", normal: &[1], zero: &[], fill: 0 }).sync(), none)
            .contains("\"other\" was not listed")
    );
    assert!(refused(sync().data(&[64], &[], 0).sync(), none).contains("outside RAM block \"block0\""));
    assert!(refused(sync().data(&[], &[1 << 40], 0).sync(), none).contains("outside RAM block"));
    assert!(refused(sync().data(&[1], &[], 0).sync(), Compression::Zlib).contains("multifd-compression"));
    assert!(refused(sync().bytes(&[0x11, 0x22, 0x33, 0x45]), none).contains("11 22 33 44"));
    let mut lying = sync().data(&[1], &[], 0).0;
    lying[PACKET_LEN + 20..PACKET_LEN + 24].copy_from_slice(&u32::MAX.to_be_bytes());
    assert!(refused(Pages(lying), none).contains("a payload of 1 pages"));
    let mut device = sync().data(&[1], &[], 0).0;
    device[PACKET_LEN + 11] = 0x40;
    assert!(refused(Pages(device), none).contains("device state"));
    for compression in [Compression::Zlib, Compression::Zstd] {
        let mut packed = sync().data(&[1], &[], 0x11).0;
        packed[PACKET_LEN + 11] = if compression == Compression::Zlib { 0x02 } else { 0x04 };
        assert!(refused(Pages(packed), compression).contains(compression.name()));
    }
}

#[test]
fn a_channel_that_ends_early_is_named() {
    let memory = memory();
    let whole = Pages::default().sync().data(&[1], &[], 1).sync().0;
    for length in [0, 100, PACKET_LEN, PACKET_LEN + 700, 2 * PACKET_LEN + 2000, 2 * PACKET_LEN + PAGE_LEN] {
        let main = Main::new(&memory, true).join().end();
        let pages = vec![Pages(whole[..length].to_vec()), Pages::default().sync().sync()];
        let error = receive(main, pages, &[1], &mut Kept::default()).unwrap_err().in_one_line();
        assert!(error.starts_with("multifd channel 0: "), "{length}: {error}");
    }
}

#[test]
fn a_channel_that_stalls_while_others_run_is_named() {
    let memory = memory();
    for stalled in [Pages::default(), Pages::default().sync(), Pages::default().sync().bytes(&[0x11, 0x22])] {
        let main = Main::new(&memory, true).join().end();
        let pages = vec![Pages::default().sync().data(&[1], &[], 1).sync(), stalled];
        let error = receive(main, pages, &[0, 1], &mut Kept::default()).unwrap_err().in_one_line();
        assert!(error.starts_with("multifd channel 1: ") && error.contains("nothing moved"), "{error}");
    }
}

#[test]
fn pages_behind_the_last_join_point_are_not_passed_over() {
    let memory = memory();
    let main = Main::new(&memory, true).join().end();
    let pages = vec![Pages::default().sync().sync().data(&[1], &[], 1)];
    let error = receive(main, pages, &[0], &mut Kept::default()).unwrap_err().in_one_line();
    assert!(error.contains("multifd channel 0") && error.contains("after the last synchronization point"), "{error}");
}

/// QEMU before 9.0 may send a packet without pages behind its last SYNC packet, at any time before its migration ends.
#[test]
fn a_source_can_write_to_every_channel_until_its_stream_is_acknowledged() {
    let memory = memory();
    let (near, far) = pair();
    let (page_near, page_far) = pair();
    near.write_all(&Main::new(&memory, true).join().end()).unwrap();
    page_near.write_all(&Pages::default().sync().data(&[1], &[], 1).sync().0).unwrap();
    let (mut kept, handle) = (Kept::default(), Handle::new());
    let destination = Destination::new(&mut kept, far, &handle);
    let received = destination.channels(vec![page_far], MultifdOptions { compression: Compression::None }).run();
    let received = received.unwrap();
    page_near.write_all(&Pages::default().data(&[], &[], 0).0).unwrap();
    received.acknowledge().unwrap();
    drop(near);
    received.confirm_end().unwrap();
}

/// A part of a packet may have been meant to be one of pages.
#[test]
fn half_a_packet_behind_the_last_join_point_is_not_passed_over() {
    let memory = memory();
    let main = Main::new(&memory, true).join().end();
    let mut packet = Pages::default().data(&[1], &[], 1).0;
    packet.truncate(100);
    let pages = vec![Pages::default().sync().sync().bytes(&packet)];
    let error = receive(main, pages, &[0], &mut Kept::default()).unwrap_err().in_one_line();
    assert!(error.contains("after the last synchronization point"), "{error}");
}

#[test]
fn a_sink_that_fails_is_the_reason_and_wakes_every_channel() {
    let memory = memory();
    let main = Main::new(&memory, true).join().end();
    let pages = (0..4).map(|_| Pages::default().sync().data(&[1], &[], 1).sync()).collect();
    let mut kept = Kept { fail_after: Some(1), ..Kept::default() };
    let error = receive(main, pages, &[0, 1, 2, 3], &mut kept).unwrap_err().in_one_line();
    assert!(error.contains("no space left"), "{error}");
}

#[test]
fn a_join_point_without_channels_is_refused_by_name() {
    let memory = memory();
    let main = Main::new(&memory, true).end();
    let error = receive(main, Vec::new(), &[], &mut Kept::default()).unwrap_err().in_one_line();
    assert!(error.contains("multifd channels") && error.contains("none are open here"), "{error}");
}

#[test]
fn deltas_are_applied_to_what_the_page_held_last() {
    let memory = memory();
    let page = |fill: u8, at: usize| {
        let mut page = [fill; PAGE_LEN];
        page[at] = 0xff;
        page
    };
    let delta = |old: &[u8; PAGE_LEN], new: &[u8; PAGE_LEN]| {
        let mut delta = Vec::new();
        xbzrle::encode(old, new, &mut delta);
        delta
    };
    let plain = memory.page(0, 3);
    let mut changed = plain;
    changed[100..300].fill(0xee);
    let mut again = changed;
    again[5] = 0xff;
    let main = Main::new(&memory, false)
        .section(|bytes, records| {
            records.append(RecordKind::Page, 0, 3 * 4096, bytes).unwrap();
            bytes.extend_from_slice(&plain);
        })
        .delta(3, &delta(&plain, &changed))
        .delta(4, &delta(&[0; PAGE_LEN], &page(0, 9)))
        .delta(3, &delta(&changed, &again))
        .zero(4)
        .delta(4, &delta(&[0; PAGE_LEN], &page(0, 7)));
    let mut kept = Kept::default();
    let incoming = receive(main.end(), Vec::new(), &[], &mut kept).unwrap();
    assert_eq!(kept.pages[0][3].as_deref(), Some(&again[..]));
    assert_eq!(kept.pages[0][4].as_deref(), Some(&page(0, 7)[..]));
    assert_eq!(incoming.stats.resent_pages, 4);
    let wrong = Main::new(&memory, false).delta(3, &[0xff, 0x3f, 1, 1]).end();
    let error = receive(wrong, Vec::new(), &[], &mut Kept::default()).unwrap_err().in_one_line();
    assert!(error.contains("xbzrle page delta") && error.contains("offset 0x"), "{error}");
}

/// A listener and where to connect to.
fn listener() -> (tempfile::TempDir, Listener) {
    let folder = tempfile::tempdir().unwrap();
    let listener = Listener::bind(&Uri::Unix(folder.path().join("s")), &Options::default()).unwrap();
    (folder, listener)
}

fn connect(listener: &Listener, bytes: &[u8]) -> Channel {
    let channel = Channel::connect(listener.local_uri(), &Options::default()).unwrap();
    channel.write_all(bytes).unwrap();
    channel
}

fn initial(id: u8) -> [u8; 64] {
    InitialPacket { uuid: [7; 16], id }.encode()
}

fn gathering(listener: &Listener, channels: u8, milliseconds: u64) -> MultifdAccept<'_> {
    let within = Duration::from_millis(milliseconds);
    MultifdAccept::new(listener, MultifdAcceptOptions { channels, timeout: within, main_first: false })
}

fn gather(mut gathering: MultifdAccept<'_>) -> Result<MultifdChannels, MigrateError> {
    loop {
        if let Some(set) = gathering.poll(Duration::from_millis(20))? {
            return Ok(set);
        }
    }
}

#[test]
fn channels_are_distinguished_in_any_order_and_however_slowly_they_say_who_they_are() {
    let (_folder, listener) = listener();
    let slow = connect(&listener, &initial(2)[..5]);
    let (_one, _main, _zero) =
        (connect(&listener, &initial(1)), connect(&listener, b"QEVMrest"), connect(&listener, &initial(0)));
    let mut gathering = gathering(&listener, 3, 20_000);
    assert!(gathering.poll(Duration::from_millis(50)).unwrap().is_none());
    slow.write_all(&initial(2)[5..]).unwrap();
    slow.write_all(b"two").unwrap();
    let set = gather(gathering).unwrap();
    let (mut main, mut two) = ([0; 8], [0; 3]);
    set.main.read_exact(&mut main).unwrap();
    set.multifd[2].read_exact(&mut two).unwrap();
    assert_eq!((&main, &two, set.multifd.len()), (b"QEVMrest", b"two", 3));
}

#[test]
fn thousands_of_strangers_hold_up_no_channel() {
    let (_folder, listener) = listener();
    let listener = &listener;
    thread::scope(|scope| {
        let flood = scope.spawn(move || {
            let mut silent = std::collections::VecDeque::new();
            for number in 0..3000 {
                let bytes = [&b""[..], b"GET / HTTP/1.1\r\n\r\n", b"QE"][number % 3];
                let stranger = Channel::connect(listener.local_uri(), &Options::default()).unwrap();
                let _ = stranger.write_all(bytes);
                silent.push_back(stranger);
                // Descriptors of a process are few.
                if silent.len() > 200 {
                    silent.pop_front();
                }
            }
            (0..4)
                .rev()
                .map(|id| connect(listener, &initial(id)))
                .chain([connect(listener, b"QEVM")])
                .collect::<Vec<_>>()
        });
        let set = gather(gathering(listener, 4, 60_000)).unwrap();
        assert_eq!(set.multifd.len(), 4);
        drop(flood.join().unwrap());
    });
}

#[test]
fn who_has_said_who_it_is_is_not_closed_because_others_came_behind_it() {
    let (_folder, listener) = listener();
    let _right = connect(&listener, b"QEVM");
    // With them the row is full before any connection was looked at.
    let _strangers: Vec<_> = (0..64).map(|_| connect(&listener, b"")).collect();
    gather(gathering(&listener, 0, 20_000)).unwrap();
}

#[test]
fn who_has_shaken_hands_stays_while_strangers_come_and_go() {
    let meeting = Meeting::new();
    let mut gathering = gathering(&meeting.listener, 0, 30_000);
    thread::scope(|scope| {
        let connects = scope.spawn(|| {
            let right = meeting.connect().unwrap();
            right.complete_handshake().unwrap();
            right
        });
        while !connects.is_finished() {
            assert!(gathering.poll(Duration::from_millis(5)).unwrap().is_none());
        }
        let right = connects.join().unwrap();
        let mut strangers = Vec::new();
        for number in 0..150 {
            strangers.push(meeting.stranger());
            if number % 20 == 0 {
                assert!(gathering.poll(Duration::ZERO).unwrap().is_none());
            }
        }
        right.write_all(b"QEVM").unwrap();
        gather(gathering).unwrap();
    });
}

#[test]
fn reasons_are_reported_once_each_and_so_is_a_peer_that_goes_because_it_does_not_trust_this_end() {
    let meeting = Meeting::new();
    let mut report = Vec::new();
    let mut gathering = gathering(&meeting.listener, 0, 30_000).on_refusal(|why| report.push(why.to_string()));
    for number in 0..6 {
        if number % 2 == 0 {
            meeting.stranger().write_all(b"QEVM, and no TLS").unwrap();
        } else {
            // As stock QEMU, which looks at a certificate behind the handshake.
            let client = meeting.connect().unwrap();
            while rustix::io::ioctl_fionread(&client).unwrap() == 0 {
                assert!(gathering.poll(Duration::from_millis(1)).unwrap().is_none());
            }
            client.complete_handshake().unwrap();
            rustix::net::shutdown(&client, rustix::net::Shutdown::Both).unwrap();
        }
        assert!(gathering.poll(Duration::from_millis(50)).unwrap().is_none());
    }
    drop(gathering);
    assert_eq!(report.len(), 2, "{report:?}");
    assert!(report[0].contains("its data is not TLS"), "{report:?}");
    assert!(report[1].contains("it may not trust this end's certificate"), "{report:?}");
}

#[test]
fn channels_that_are_wrong_or_missing_are_named() {
    let refused = |bytes: &[&[u8]], milliseconds: u64| {
        let (_folder, listener) = listener();
        let connected: Vec<_> = bytes.iter().map(|bytes| connect(&listener, bytes)).collect();
        let error = gather(gathering(&listener, 2, milliseconds)).unwrap_err().to_string();
        drop(connected);
        error
    };
    let other = InitialPacket { uuid: [8; 16], id: 1 }.encode();
    assert!(refused(&[&initial(0), &initial(0)], 20_000).contains("multifd channel 0"));
    assert!(refused(&[&initial(2)], 20_000).contains("channel 2, and 2 are expected"));
    assert!(refused(&[&initial(0), &other], 20_000).contains("another VM"));
    let missing = refused(&[&initial(0), b"", b"GET "], 200);
    for word in ["main channel", "channels 1", "1 other connections were turned away", "1 connections say nothing"] {
        assert!(missing.contains(word), "{word}: {missing}");
    }
    assert!(refused(&[&initial(0), b"QEVM"], 200).contains("no multifd channels 1"));
    assert!(refused(&[&initial(0), &initial(1)], 200).contains("no main channel"));
}

#[test]
fn where_nothing_can_be_looked_into_the_first_connection_is_the_main_channel() {
    let (_folder, listener) = listener();
    let _connected = [connect(&listener, b""), connect(&listener, &initial(1)), connect(&listener, &initial(0))];
    let options = MultifdAcceptOptions { channels: 2, timeout: Duration::from_secs(20), main_first: true };
    assert_eq!(gather(MultifdAccept::new(&listener, options)).unwrap().multifd.len(), 2);
}

/// Waits for what takes moments.
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < limit, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn channels_that_must_not_break_yet_are_read_after_a_failure_until_they_may() {
    let memory = memory();
    for lies in [false, true] {
        let (near, far) = pair();
        let (nears, fars): (Vec<_>, Vec<_>) = (0..2).map(|_| pair()).unzip();
        let handle = Handle::new();
        let deferred = handle.control.defer_stop();
        let mut kept = Kept::default();
        thread::scope(|scope| {
            let destination = Destination::new(&mut kept, far, &handle).channels(fars, MultifdOptions::default());
            let receiving = scope.spawn(move || destination.run());
            near.write_all(&Main::new(&memory, true).bytes).unwrap();
            let sync = Pages::default().sync().0;
            nears.iter().for_each(|near| near.write_all(&sync).unwrap());
            if lies {
                nears[0].write_all(&[0xff; PACKET_LEN]).unwrap();
                wait_until("the failure is noticed", || handle.control.has_failed());
            }
            // The source gives up, and its threads still have something to send: more than a socket takes.
            near.shutdown(Shutdown::Both).unwrap();
            wait_until("the failure is noticed", || handle.control.has_failed());
            let pages: Vec<u64> = (0..64).collect();
            let packets = Pages::default().sync().data(&pages, &[], 1).data(&pages, &[], 2).sync();
            for near in &nears {
                near.write_all(&packets.0).unwrap();
            }
            assert!(!receiving.is_finished());
            drop(deferred);
            let error = receiving.join().unwrap().unwrap_err();
            let is_cause = match &error {
                MigrateError::Multifd { id, .. } => lies && *id == 0,
                MigrateError::MainEnded { .. } => !lies,
                _ => false,
            };
            assert!(is_cause, "{lies}: {error:?}");
        });
        let mut breaks = false;
        for _ in 0..10 {
            breaks |= nears[1].write_all(&Pages::default().sync().0).is_err();
        }
        assert!(breaks, "the channel is open");
    }
}
