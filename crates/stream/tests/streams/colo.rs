//! A base and the checkpoints behind it.

use limosa_stream::colo::{COLO_MESSAGE_LIMIT, ColoMessage};
use limosa_stream::devices::TAIL_LIMIT;
use limosa_stream::{
    Command, Configuration, Decoder, DecoderOptions, ErrorKind, Event, RamBlock, RecordEncoder, RecordKind,
    SectionHeader, SectionKind, Step, StreamError, ram, section,
};
use proptest::collection::vec;
use proptest::prelude::*;

const RAM: u32 = 2;

fn blocks() -> [RamBlock; 2] {
    [RamBlock::new("pc.ram", 64 * 4096), RamBlock::new("vga", 16 * 4096)]
}

fn options() -> DecoderOptions {
    DecoderOptions { colo: true, ..DecoderOptions::default() }
}

fn message() -> impl Strategy<Value = ColoMessage> {
    prop_oneof![
        Just(ColoMessage::CheckpointReady),
        Just(ColoMessage::CheckpointRequest),
        Just(ColoMessage::CheckpointReply),
        Just(ColoMessage::VmstateSend),
        (0..=TAIL_LIMIT).prop_map(ColoMessage::VmstateSize),
        Just(ColoMessage::VmstateReceived),
        Just(ColoMessage::VmstateLoaded),
        (any::<u8>(), any::<u64>()).prop_map(|(kind, value)| ColoMessage::Note { kind, value }),
    ]
}

/// Decodes `input` up to the end of a part, the payloads left out; the events and the bytes taken.
fn part(decoder: &mut Decoder, input: &[u8]) -> Result<(Vec<Event>, usize), StreamError> {
    let (mut at, mut events) = (0, Vec::new());
    loop {
        match decoder.step(&input[at..])? {
            Step::Need(wanted) => return Err(decoder.truncated_error(input.len() - at, wanted)),
            Step::Event { consumed, event } => {
                at += consumed;
                let over = matches!(event, Event::DeviceTail | Event::EndOfStream);
                events.push(event);
                if over {
                    return Ok((events, at));
                }
            }
        }
    }
}

/// A base without pages, up to its first device section.
fn base(out: &mut Vec<u8>) {
    Configuration::new("pc").encode(out).unwrap();
    Command::OpenReturnPath.encode(out).unwrap();
    Command::EnableColo.encode(out).unwrap();
    ram::encode_ram_start(RAM, &blocks(), out).unwrap();
    section::encode_end(RAM, out);
}

/// Device sections by id, name and body, with the byte that ends them.
fn sections(devices: &[(u32, &str, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (id, name, body) in devices {
        let header =
            SectionHeader { kind: SectionKind::Full, id: *id, name: (*name).to_owned(), instance: 0, version: 3 };
        header.encode(&mut bytes).unwrap();
        bytes.extend_from_slice(body);
        section::encode_footer(*id, &mut bytes);
    }
    section::encode_eof(&mut bytes);
    bytes
}

#[test]
fn messages_are_the_bytes_that_qemu_reads_and_writes() {
    let mut bytes = Vec::new();
    ColoMessage::VmstateReceived.encode(&mut bytes);
    ColoMessage::VmstateLoaded.encode(&mut bytes);
    ColoMessage::VmstateSize(13_023).encode(&mut bytes);
    assert_eq!(bytes, b"\0\0\0\x05\0\0\0\x06\0\0\0\x04\0\0\0\0\0\0\x32\xdf");
}

#[test]
fn an_unknown_message_and_one_of_too_many_bytes_are_refused() {
    let unknown = ColoMessage::decode(b"QEVM....", 0x40, 100).unwrap_err();
    assert_eq!(unknown.offset(), 0x40);
    assert!(unknown.to_string().contains("expected a COLO message from 0 to 6, found 0x5145564d"), "{unknown}");
    let mut size = Vec::new();
    ColoMessage::VmstateSize(101).encode(&mut size);
    let large = ColoMessage::decode(&size, 0x40, 100).unwrap_err();
    assert_eq!(large.offset(), 0x44);
    assert!(matches!(large.kind(), ErrorKind::TooLarge { value: 101, limit: 100, .. }), "{large}");
    assert_eq!(ColoMessage::decode(&size, 0, 101).unwrap(), Some((ColoMessage::VmstateSize(101), 12)));
}

#[test]
fn colo_is_enabled_only_where_checkpoints_are_expected() {
    let mut stream = Vec::new();
    base(&mut stream);
    assert!(part(&mut Decoder::new(), &stream).unwrap_err().to_string().contains("fault tolerance"));
    ram::encode_eos(RAM, &mut stream);
    section::encode_eof(&mut stream);
    let (events, _) = part(&mut Decoder::with_options(options()), &stream).unwrap();
    assert!(events.contains(&Event::Command(Command::EnableColo)));
}

#[test]
fn the_first_page_of_a_checkpoint_continues_in_the_block_of_the_last_page_before() {
    let mut stream = Vec::new();
    base(&mut stream);
    RecordEncoder::new(&blocks()).unwrap().append(RecordKind::Zero, 1, 0x3000, &mut stream).unwrap();
    ram::encode_eos(RAM, &mut stream);
    let mut decoder = Decoder::with_options(options());
    let device = sections(&[(3, "timer", vec![1; 8])]);
    part(&mut decoder, &[&stream[..], &device].concat()).unwrap();
    let before = decoder.offset();
    decoder.next_checkpoint(100).unwrap();
    assert_eq!(decoder.offset(), before + 100);
    let mut checkpoint = Vec::new();
    Command::SwitchoverStart.encode(&mut checkpoint).unwrap();
    section::encode_end(RAM, &mut checkpoint);
    checkpoint.extend((0x4000 | ram::FLAG_PAGE | ram::FLAG_CONTINUE).to_be_bytes());
    ram::encode_eos(RAM, &mut checkpoint);
    section::encode_eof(&mut checkpoint);
    let (events, taken) = part(&mut decoder, &checkpoint).unwrap();
    let wanted = [
        Event::Command(Command::SwitchoverStart),
        Event::SectionEnd { id: RAM },
        Event::Page { block: 1, offset: 0x4000 },
        Event::RamEos,
        Event::SectionFooter { id: RAM },
        Event::EndOfStream,
    ];
    assert_eq!((&events[..], taken), (&wanted[..], checkpoint.len()));
}

#[test]
fn a_checkpoint_has_no_device_sections_between_its_pages_and_no_second_start() {
    let mut stream = Vec::new();
    base(&mut stream);
    ram::encode_eos(RAM, &mut stream);
    section::encode_eof(&mut stream);
    let mut decoder = Decoder::with_options(options());
    part(&mut decoder, &stream).unwrap();
    decoder.next_checkpoint(0).unwrap();
    let refused = |more: &[u8]| part(&mut decoder.clone(), more).unwrap_err().to_string();
    assert!(refused(&sections(&[(3, "timer", vec![])])).contains("a checkpoint's pages, found 0x04"));
    assert!(refused(b"\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04").contains("a second one"));
    assert!(refused(b"\x02\0\0\0\x09").contains("expected the id 2 of section \"ram\""));
    assert!(refused(b"\x03\0\0\0\x02").contains("the input ends"));
}

proptest! {
    #[test]
    fn messages_read_back_and_a_missing_byte_is_noticed(messages in vec(message(), 1..12)) {
        for message in messages {
            let mut encoded = Vec::new();
            message.encode(&mut encoded);
            prop_assert!(encoded.len() <= COLO_MESSAGE_LIMIT);
            prop_assert_eq!(ColoMessage::decode(&encoded[..encoded.len() - 1], 0, TAIL_LIMIT).unwrap(), None);
            prop_assert_eq!(ColoMessage::decode(&encoded, 0, TAIL_LIMIT).unwrap(), Some((message, encoded.len())));
        }
    }

    #[test]
    fn the_pages_of_every_checkpoint_read_back(
        parts in vec(vec((any::<bool>(), 0..16u64, any::<bool>()), 0..30), 1..8),
        ends_in_devices in any::<bool>(),
    ) {
        // One encoder for all parts: it names a block only where the block changes, as QEMU does.
        let mut records = RecordEncoder::new(&blocks()).unwrap();
        let mut decoder = Decoder::with_options(options());
        for (number, pages) in parts.iter().enumerate() {
            let mut stream = Vec::new();
            if number == 0 {
                base(&mut stream);
            } else {
                decoder.next_checkpoint(7).unwrap();
                section::encode_end(RAM, &mut stream);
            }
            let mut wanted = Vec::new();
            for (second, page, zero) in pages {
                let (block, offset) = (usize::from(*second), page * 4096);
                let kind = if *zero { RecordKind::Zero } else { RecordKind::Page };
                records.append(kind, block, offset, &mut stream).unwrap();
                wanted.push(if *zero { Event::Zero { block, offset } } else { Event::Page { block, offset } });
            }
            ram::encode_eos(RAM, &mut stream);
            if number == 0 && ends_in_devices {
                stream.extend(sections(&[(3, "timer", vec![1; 8])]));
            } else {
                section::encode_eof(&mut stream);
            }
            let (mut events, _) = part(&mut decoder, &stream).unwrap();
            events.retain(|event| matches!(event, Event::Page { .. } | Event::Zero { .. }));
            prop_assert_eq!(events, wanted);
        }
    }
}
