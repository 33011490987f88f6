//! Everything that can be written reads back as the same, however it arrives.

use limosa_stream::mapped_ram::Layout;
use limosa_stream::{
    Command, Configuration, Decoder, DecoderOptions, Event, GlobalState, PageSizes, RamBlock, RecordEncoder,
    RecordKind, ReturnDecoder, ReturnMessage, Step, ram, section,
};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use std::ops::Range;

fn name() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z]{1,3}", "[ -~]{1,255}", "\\PC{1,60}"]
}

fn configuration() -> impl Strategy<Value = Configuration> {
    let capabilities = vec(name(), 0..4);
    (name(), capabilities, any::<Option<[u8; 16]>>(), prop_oneof![Just(None), Just(Some(12))]).prop_map(
        |(machine, capabilities, uuid, target_page_bits)| Configuration {
            machine,
            capabilities,
            uuid,
            target_page_bits,
        },
    )
}

/// Block lists with distinct names, at least one page in all.
fn blocks() -> impl Strategy<Value = Vec<RamBlock>> {
    let pages = prop_oneof![1..4u64, 60..70u64, Just(1u64 << 30)];
    btree_map(name(), pages, 1..8)
        .prop_map(|blocks| blocks.into_iter().map(|(name, pages)| RamBlock::new(name, pages * 4096)).collect())
}

fn ranges() -> impl Strategy<Value = Vec<Range<u64>>> {
    vec((0..1u64 << 40, 1..1u64 << 20), 1..20)
        .prop_map(|ranges| ranges.into_iter().map(|(start, pages)| start * 4096..(start + pages) * 4096).collect())
}

fn command() -> impl Strategy<Value = Command> {
    prop_oneof![
        Just(Command::OpenReturnPath),
        any::<u32>().prop_map(Command::Ping),
        Just(Command::PostcopyAdvise(None)),
        any::<(u64, u64)>().prop_map(|(summary, target)| Command::PostcopyAdvise(Some(PageSizes { summary, target }))),
        Just(Command::PostcopyListen),
        Just(Command::PostcopyRun),
        (name(), ranges()).prop_map(|(block, ranges)| Command::RamDiscard { block, ranges }),
        any::<u32>().prop_map(|length| Command::Packaged { length }),
        Just(Command::EnableColo),
        Just(Command::PostcopyResume),
        name().prop_map(|block| Command::ReceiveBitmap { block }),
        Just(Command::SwitchoverStart),
    ]
}

fn message() -> impl Strategy<Value = ReturnMessage> {
    prop_oneof![
        any::<u32>().prop_map(ReturnMessage::Shut),
        any::<u32>().prop_map(ReturnMessage::Pong),
        (name(), 0..1u64 << 60, 1..u32::MAX).prop_map(|(block, start, length)| ReturnMessage::RequestPages {
            block: Some(block),
            start,
            length
        }),
        (name(), vec(any::<u64>(), 0..40)).prop_map(|(block, words)| ReturnMessage::ReceivedBitmap {
            block,
            bitmap: words.into_iter().flat_map(u64::to_le_bytes).collect(),
        }),
        any::<u32>().prop_map(ReturnMessage::ResumeAck),
        Just(ReturnMessage::SwitchoverAck),
    ]
}

/// Drives a decoder with inputs of the given lengths over and over, following the jumps of a mapped-ram file in
/// `file`, and gives the events until the stream or the input ends.
fn drive(file: &[u8], options: DecoderOptions, pieces: &[usize]) -> Vec<Event> {
    let mut decoder = Decoder::with_options(options);
    let mut pieces = pieces.iter().copied().cycle();
    let mut at = usize::try_from(options.base).unwrap();
    // The streams of these tests leave page payloads out, as the decoder never sees them.
    let mut payloads = 0;
    let (mut shown, mut events) = (0usize, Vec::new());
    loop {
        let end = file.len().min(at + shown);
        match decoder.step(&file[at..end]).unwrap() {
            Step::Need(wanted) => {
                assert!(wanted > end - at && wanted <= Decoder::LARGEST_NEED);
                assert!(end < file.len(), "{}", decoder.truncated_error(end - at, wanted));
                shown = (end - at) + pieces.next().unwrap_or(1);
            }
            Step::Event { consumed, event } => {
                at += consumed;
                shown = shown.saturating_sub(consumed);
                match &event {
                    Event::MappedRamBlock(placed) => at = usize::try_from(placed.end()).unwrap(),
                    Event::DeviceTail | Event::EndOfStream => {
                        events.push(event);
                        return events;
                    }
                    Event::Page { .. } => payloads += 4096,
                    _ => {}
                }
                assert_eq!(options.base + decoder.offset() - payloads, at as u64);
                events.push(event);
            }
        }
    }
}

proptest! {
    #[test]
    fn configurations_read_back(configuration in configuration()) {
        let mut encoded = Vec::new();
        configuration.encode(&mut encoded).unwrap();
        let length = encoded.len();
        prop_assert_eq!(Configuration::decode(&encoded).unwrap(), None);
        encoded.push(1);
        prop_assert_eq!(Configuration::decode(&encoded).unwrap(), Some((configuration, length)));
    }

    #[test]
    fn commands_read_back_and_a_missing_byte_is_noticed(command in command()) {
        let mut encoded = Vec::new();
        command.encode(&mut encoded).unwrap();
        prop_assert_eq!(Command::decode(&encoded[..encoded.len() - 1]).unwrap(), None);
        prop_assert_eq!(Command::decode(&encoded).unwrap(), Some((command, encoded.len())));
    }

    #[test]
    fn return_messages_read_back_in_any_pieces(messages in vec(message(), 1..12), piece in 1..50usize) {
        let mut encoded = Vec::new();
        for message in &messages {
            message.encode(&mut encoded).unwrap();
        }
        let mut decoder = ReturnDecoder::new(1 << 20);
        let mut decoded = Vec::new();
        for bytes in encoded.chunks(piece) {
            decoder.push(bytes);
            while let Some(message) = decoder.next_message().unwrap() {
                decoded.push(message);
            }
        }
        prop_assert_eq!(decoded, messages);
        prop_assert!(decoder.is_between_messages());
        prop_assert_eq!(decoder.offset(), encoded.len() as u64);
    }

    #[test]
    fn page_records_read_back_in_any_pieces(
        blocks in blocks(),
        picks in vec((any::<prop::sample::Index>(), any::<u64>(), any::<bool>(), 0..10u8), 0..60),
        pieces in vec(1..40usize, 1..6),
    ) {
        let mut stream = Vec::new();
        Configuration::new("m").encode(&mut stream).unwrap();
        ram::encode_ram_start(7, &blocks, &mut stream).unwrap();
        let mut records = RecordEncoder::new(&blocks).unwrap();
        let mut wanted = Vec::new();
        section::encode_part(7, &mut stream);
        for (block, page, zero, cut) in picks {
            let block = block.index(blocks.len());
            let offset = page % blocks[block].pages() * 4096;
            let kind = if zero { RecordKind::Zero } else { RecordKind::Page };
            records.append(kind, block, offset, &mut stream).unwrap();
            wanted.push(if zero { Event::Zero { block, offset } } else { Event::Page { block, offset } });
            if cut == 0 {
                // The current block survives the end of a section.
                ram::encode_eos(7, &mut stream);
                section::encode_part(7, &mut stream);
            }
        }
        ram::encode_eos(7, &mut stream);
        section::encode_end(7, &mut stream);
        ram::encode_eos(7, &mut stream);
        section::encode_eof(&mut stream);
        let events = drive(&stream, DecoderOptions::default(), &pieces);
        let lists = |event: &Event| matches!(event, Event::RamStart(listed) if *listed == blocks);
        prop_assert_eq!(events.iter().filter(|event| lists(event)).count(), 1);
        let pages = |event: &Event| matches!(event, Event::Page { .. } | Event::Zero { .. });
        prop_assert_eq!(events.into_iter().filter(pages).collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn planned_layouts_read_back(
        machine in name(),
        blocks in blocks(),
        base in prop_oneof![Just(0u64), 0..10_000u64, Just(1u64 << 40)],
        empty_parts in 0..4u8,
        short_reads in any::<bool>(),
    ) {
        let layout = Layout::plan_at(base, &Configuration::new(machine), 7, &blocks).unwrap();
        let mut chunks = layout.chunks().unwrap();
        let last = chunks.last_mut().unwrap();
        prop_assert_eq!(last.offset + last.bytes.len() as u64, layout.tail_offset);
        for _ in 0..empty_parts {
            section::encode_part(7, &mut last.bytes);
            ram::encode_eos(7, &mut last.bytes);
        }
        Command::SwitchoverStart.encode(&mut last.bytes).unwrap();
        section::encode_end(7, &mut last.bytes);
        ram::encode_eos(7, &mut last.bytes);
        let tail_offset = last.offset + last.bytes.len() as u64;
        last.bytes.extend_from_slice(b"\x04\0\0\0\x01\x05timer\0\0\0\0\0\0\0\x02");
        let file_length = last.offset + last.bytes.len() as u64;
        let read = |offset: u64, buffer: &mut [u8]| {
            let length = if short_reads { buffer.len().min(7) } else { buffer.len() };
            let mut came = 0;
            for (at, byte) in (offset..file_length).zip(&mut buffer[..length]) {
                let chunk = chunks.iter().rev().find(|chunk| chunk.offset <= at);
                let inside = chunk.and_then(|chunk| chunk.bytes.get(usize::try_from(at - chunk.offset).unwrap()));
                *byte = inside.copied().unwrap_or(0);
                came += 1;
            }
            Ok(came)
        };
        let decoded = Layout::decode(read, base, file_length).unwrap();
        prop_assert_eq!(decoded, Layout { tail_offset, ..layout });
    }

    #[test]
    fn run_states_read_back(run_state in "[a-z-]{1,31}", was_suspended in any::<Option<bool>>()) {
        let state = GlobalState { run_state, was_suspended };
        prop_assert_eq!(GlobalState::decode(&state.encode().unwrap()).unwrap(), state);
    }
}
