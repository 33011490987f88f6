//! Bytes as stock QEMU 10.0 writes them, made by hand, against both directions.

use limosa_stream::mapped_ram::Layout;
use limosa_stream::{
    Command, Configuration, Decoder, Event, PageSizes, RamBlock, RecordEncoder, RecordKind, ReturnDecoder,
    ReturnMessage, SectionHeader, SectionKind, Step, ram, section,
};

/// Hexadecimal digits and quoted text, separated by blanks.
fn bytes(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for word in text.split_whitespace() {
        match word.strip_prefix('"').and_then(|word| word.strip_suffix('"')) {
            Some(quoted) => out.extend_from_slice(quoted.as_bytes()),
            None => {
                assert_eq!(word.len() % 2, 0, "half a byte in {word}");
                let digits = (0..word.len()).step_by(2);
                out.extend(digits.map(|at| u8::from_str_radix(&word[at..at + 2], 16).expect("hexadecimal digits")));
            }
        }
    }
    out
}

const HEADER: &str = "51 45 56 4d 00 00 00 03  07  00 00 00 0e  70 63 2d 69 34 34 30 66 78 2d 31 30 2e 30";

/// All events of `stream` up to its end or its device tail, page payloads passed over.
fn events(stream: &[u8]) -> Vec<Event> {
    let mut decoder = Decoder::new();
    let (mut at, mut events) = (0, Vec::new());
    loop {
        match decoder.step(&stream[at..]).expect("a stream that QEMU would write") {
            Step::Need(_) if at == stream.len() => return events,
            Step::Need(wanted) => panic!("{} after {events:?}", decoder.truncated_error(stream.len() - at, wanted)),
            Step::Event { consumed, event } => {
                at += consumed;
                match event {
                    Event::Page { .. } => at += 4096,
                    Event::Package { length } => at += usize::try_from(length).unwrap(),
                    Event::DeviceTail | Event::EndOfStream => {
                        events.push(event);
                        return events;
                    }
                    _ => {}
                }
                assert_eq!(decoder.offset(), at as u64);
                events.push(event);
            }
        }
    }
}

#[test]
fn header_and_configuration_of_a_default_machine_are_28_bytes() {
    let mut encoded = Vec::new();
    Configuration::new("pc-i440fx-10.0").encode(&mut encoded).unwrap();
    assert_eq!(encoded, bytes(HEADER));
    assert_eq!(encoded.len(), 0x1b);
    assert_eq!(Configuration::decode(&encoded).unwrap(), None, "only the next byte shows that no subsection follows");
    encoded.push(0x01);
    assert_eq!(Configuration::decode(&encoded).unwrap(), Some((Configuration::new("pc-i440fx-10.0"), 0x1b)));
}

#[test]
fn mapped_ram_adds_the_capabilities_subsection() {
    let wanted = bytes(&format!("{HEADER} 05 1a \"configuration/capabilities\" 00000001 00000001 0a \"mapped-ram\""));
    let mut encoded = Vec::new();
    let configuration = Configuration::new("pc-i440fx-10.0").with_mapped_ram();
    configuration.encode(&mut encoded).unwrap();
    assert_eq!(encoded, wanted);
    assert_eq!(encoded.len(), 0x4a);
    encoded.push(0x01);
    assert_eq!(Configuration::decode(&encoded).unwrap(), Some((configuration, 0x4a)));
}

#[test]
fn precopy_of_a_stopped_vm_is_decoded_record_by_record() {
    let mut stream = bytes(&format!(
        "{HEADER}
         01 00 00 00 02  03 72 61 6d 00 00 00 00 00 00 00 04
         00 00 00 00 09 00 00 04
         06 70 63 2e 72 61 6d 00 00 00 00 08 00 00 00
         15 \"0000:00:02.0/vga.vram\" 00 00 00 00 01 00 00 00
         00 00 00 00 00 00 00 10  7e 00 00 00 02
         02 00 00 00 02  00 00 00 00 00 00 00 08 06 70 63 2e 72 61 6d"
    ));
    stream.extend_from_slice(&[0x53; 4096]);
    stream.extend(bytes(
        "00 00 00 00 00 00 10 22 00  00 00 00 00 00 00 20 22 00
         00 00 00 00 00 00 00 10 7e 00 00 00 02
         02 00 00 00 02  00 00 00 00 00 dc 30 28",
    ));
    stream.extend_from_slice(&[0x28; 4096]);
    stream.extend(bytes(
        "00 00 00 00 00 00 00 10 7e 00 00 00 02
         08 00 0b 00 00
         03 00 00 00 02
         00 00 00 00 00 ff f0 02 15 \"0000:00:02.0/vga.vram\" 00
         00 00 00 00 00 00 00 10 7e 00 00 00 02
         04 00 00 00 00 05 74 69 6d 65 72 00 00 00 00 00 00 00 02",
    ));
    let ram = SectionHeader { kind: SectionKind::Start, id: 2, name: "ram".into(), instance: 0, version: 4 };
    let blocks = vec![RamBlock::new("pc.ram", 0x800_0000), RamBlock::new("0000:00:02.0/vga.vram", 0x100_0000)];
    let wanted = vec![
        Event::Configuration(Configuration::new("pc-i440fx-10.0")),
        Event::SectionStart(ram),
        Event::RamBlock { block: 0 },
        Event::RamBlock { block: 1 },
        Event::RamStart(blocks),
        Event::RamEos,
        Event::SectionFooter { id: 2 },
        Event::SectionPart { id: 2 },
        Event::Page { block: 0, offset: 0 },
        Event::Zero { block: 0, offset: 0x1000 },
        Event::Zero { block: 0, offset: 0x2000 },
        Event::RamEos,
        Event::SectionFooter { id: 2 },
        Event::SectionPart { id: 2 },
        Event::Page { block: 0, offset: 0xdc_3000 },
        Event::RamEos,
        Event::SectionFooter { id: 2 },
        Event::Command(Command::SwitchoverStart),
        Event::SectionEnd { id: 2 },
        Event::Zero { block: 1, offset: 0xff_f000 },
        Event::RamEos,
        Event::SectionFooter { id: 2 },
        Event::DeviceTail,
    ];
    assert_eq!(events(&stream), wanted);
}

#[test]
fn ram_start_is_encoded_as_qemu_writes_it() {
    let mut encoded = Vec::new();
    let blocks = [RamBlock::new("pc.ram", 0x800_0000), RamBlock::new("0000:00:02.0/vga.vram", 0x100_0000)];
    ram::encode_ram_start(2, &blocks, &mut encoded).unwrap();
    let wanted = bytes(
        "01 00000002 03 \"ram\" 00000000 00000004
         00 00 00 00 09 00 00 04
         06 \"pc.ram\" 0000000008000000
         15 \"0000:00:02.0/vga.vram\" 0000000001000000
         0000000000000010 7e 00000002",
    );
    assert_eq!(encoded, wanted);
}

#[test]
fn records_carry_the_name_once_and_continue_across_sections() {
    let blocks = [RamBlock::new("pc.ram", 0x800_0000), RamBlock::new("vga", 0x1000)];
    let mut records = RecordEncoder::new(&blocks).unwrap();
    let mut encoded = Vec::new();
    section::encode_part(2, &mut encoded);
    records.append(RecordKind::Page, 0, 0, &mut encoded).unwrap();
    records.append(RecordKind::Zero, 0, 0x1000, &mut encoded).unwrap();
    ram::encode_eos(2, &mut encoded);
    section::encode_end(2, &mut encoded);
    records.append(RecordKind::Page, 0, 0xdc_3000, &mut encoded).unwrap();
    records.append(RecordKind::Zero, 1, 0, &mut encoded).unwrap();
    records.reset();
    records.append(RecordKind::Zero, 1, 0, &mut encoded).unwrap();
    section::encode_eof(&mut encoded);
    let wanted = bytes(
        "02 00000002
         00 00 00 00 00 00 00 08 06 70 63 2e 72 61 6d
         00 00 00 00 00 00 10 22 00
         00 00 00 00 00 00 00 10 7e 00 00 00 02
         03 00000002
         00 00 00 00 00 dc 30 28
         00 00 00 00 00 00 00 02 03 \"vga\" 00
         00 00 00 00 00 00 00 02 03 \"vga\" 00
         00",
    );
    assert_eq!(encoded, wanted);
}

#[test]
fn postcopy_prologue_has_qemus_bytes() {
    let mut encoded = Vec::new();
    let configuration = Configuration::new("pc-i440fx-10.0").with_mapped_ram();
    limosa_stream::postcopy::encode_postcopy_prologue(
        &configuration,
        2,
        &[RamBlock::new("pc.ram", 0x800_0000)],
        &[],
        &mut encoded,
    )
    .unwrap();
    let wanted = bytes(&format!(
        "{HEADER}
         08 00 01 00 00
         08 00 02 00 04 00 00 00 01
         08 00 03 00 10 00 00 00 00 00 00 10 00 00 00 00 00 00 00 10 00
         01 00 00 00 02 03 72 61 6d 00000000 00000004 0000000008000004
         06 \"pc.ram\" 0000000008000000 0000000000000010 7e 00000002
         08 00 06 00 19 00 06 70 63 2e 72 61 6d 00 0000000000000000 0000000008000000"
    ));
    assert_eq!(encoded, wanted);
    let events = events(&encoded);
    let sizes = PageSizes { summary: 0x1000, target: 0x1000 };
    assert!(events.contains(&Event::Command(Command::PostcopyAdvise(Some(sizes)))));
    let discard = Command::RamDiscard { block: "pc.ram".into(), ranges: std::iter::once(0..0x800_0000).collect() };
    assert_eq!(events.last(), Some(&Event::Command(discard)));
}

#[test]
fn postcopy_package_wraps_the_device_sections() {
    let package = limosa_stream::postcopy::postcopy_package(b"DEVICES", Some(3)).unwrap();
    assert_eq!(package, bytes("08 00 04 00 00 \"DEVICES\" 08 00 02 00 04 00 00 00 03 08 00 05 00 00"));
    let mut encoded = Vec::new();
    limosa_stream::postcopy::encode_packaged(&package, &mut encoded).unwrap();
    assert_eq!(encoded[..9], bytes("08 00 07 00 04 00 00 00 1a"));
    assert_eq!(encoded[9..], package);
    assert_eq!(Command::decode(&encoded).unwrap(), Some((Command::Packaged { length: 26 }, 9)));
}

#[test]
fn a_huge_page_block_names_its_page_size_in_postcopy_only() {
    let huge = RamBlock { page_size: Some(0x20_0000), ..RamBlock::new("pc.ram", 0x800_0000) };
    let small = RamBlock { page_size: Some(0x1000), ..RamBlock::new("vga", 0x1000) };
    let mut encoded = Vec::new();
    let blocks = [huge.clone(), small, RamBlock { page_size: Some(0x20_0000), ..RamBlock::new("x", 0x20_0000) }];
    let configuration = Configuration::new("q35");
    limosa_stream::postcopy::encode_postcopy_prologue(&configuration, 2, &blocks, &[], &mut encoded).unwrap();
    let listed = events(&encoded).into_iter().find_map(|event| match event {
        Event::RamStart(blocks) => Some(blocks),
        _ => None,
    });
    let last = RamBlock { page_size: Some(0x20_0000), ..RamBlock::new("x", 0x20_0000) };
    assert_eq!(listed, Some(vec![huge, RamBlock::new("vga", 0x1000), last]));
}

#[test]
fn first_answers_of_a_postcopy_destination_are_decoded() {
    let wire = bytes(
        "0002 0004 00000001
         0002 0004 00000004
         0003 0013 00000000000cb000 00001000 06 \"pc.ram\"
         0004 000c 00000000000cc000 00001000
         0007 0000
         0001 0004 00000000",
    );
    let request = |block: Option<&str>, start| ReturnMessage::RequestPages {
        block: block.map(str::to_owned),
        start,
        length: 0x1000,
    };
    let wanted = [
        ReturnMessage::Pong(1),
        ReturnMessage::Pong(4),
        request(Some("pc.ram"), 0xcb000),
        request(None, 0xcc000),
        ReturnMessage::SwitchoverAck,
        ReturnMessage::Shut(0),
    ];
    let mut decoder = ReturnDecoder::new(0);
    let mut messages = Vec::new();
    for byte in &wire {
        decoder.push(std::slice::from_ref(byte));
        while let Some(message) = decoder.next_message().unwrap() {
            messages.push(message);
        }
    }
    assert_eq!(messages, wanted);
    assert!(decoder.is_between_messages());
    let mut encoded = Vec::new();
    for message in &wanted {
        message.encode(&mut encoded).unwrap();
    }
    assert_eq!(encoded, wire);
}

#[test]
fn mapped_ram_prologue_lies_where_qemu_puts_it() {
    let blocks = [RamBlock::new("pc.ram", 0x800_0000), RamBlock::new("0000:00:02.0/vga.vram", 0x100_0000)];
    let layout = Layout::plan(&Configuration::new("pc-i440fx-10.0"), 2, &blocks).unwrap();
    assert_eq!(layout.blocks[0].bitmap_offset, 0x8e);
    assert_eq!(layout.blocks[0].pages_offset, 0x10_0000);
    assert_eq!(layout.blocks[1].header_offset, 0x810_0000);
    let chunks = layout.chunks().unwrap();
    assert_eq!(chunks[0].offset, 0);
    let wanted = bytes(
        "01 00000002 03 \"ram\" 00000000 00000004
         00 00 00 00 09 00 00 04
         06 \"pc.ram\" 0000000008000000
         00000001 0000000000001000 000000000000008e 0000000000100000",
    );
    assert_eq!(chunks[0].bytes[0x4a..], wanted);
    assert_eq!(chunks[0].bytes.len(), 0x8e);
    assert_eq!(chunks[1].offset, 0x810_0000);
    assert!(chunks[1].bytes.starts_with(&bytes("15 \"0000:00:02.0/vga.vram\"")));
    assert_eq!(chunks[2].bytes, bytes("0000000000000010 7e 00000002"));
    assert_eq!(layout.tail_offset, chunks[2].offset + 13);
}
