//! Streams that the decoders refuse, with the offset and the reason.

use limosa_stream::{
    Command, Configuration, Decoder, DecoderOptions, ErrorKind, Event, PageSizes, RamBlock, RecordEncoder, RecordKind,
    ReturnDecoder, ReturnMessage, SectionHeader, SectionKind, Step, StreamError, UnsupportedFeature, ram, section,
};

fn start() -> Vec<u8> {
    let mut stream = Vec::new();
    Configuration::new("pc").encode(&mut stream).unwrap();
    let blocks = [RamBlock::new("pc.ram", 0x4000), RamBlock::new("vga", 0x1000)];
    ram::encode_ram_start(2, &blocks, &mut stream).unwrap();
    stream
}

/// A stream in the middle of a PART section.
fn part() -> Vec<u8> {
    let mut stream = start();
    section::encode_part(2, &mut stream);
    stream
}

fn with(mut stream: Vec<u8>, more: &[u8]) -> Vec<u8> {
    stream.extend_from_slice(more);
    stream
}

fn word(word: u64) -> [u8; 8] {
    word.to_be_bytes()
}

/// Decodes until an error (page payloads are left out of these streams); panics without one.
fn error_of(stream: &[u8]) -> StreamError {
    run(stream).expect_err("the stream is wrong")
}

fn run(stream: &[u8]) -> Result<(), StreamError> {
    let mut decoder = Decoder::with_options(DecoderOptions { tail_limit: 1000, ..DecoderOptions::default() });
    let mut at = 0;
    loop {
        match decoder.step(&stream[at..])? {
            Step::Need(wanted) => return Err(decoder.truncated_error(stream.len() - at, wanted)),
            Step::Event { event: Event::DeviceTail | Event::EndOfStream, .. } => return Ok(()),
            Step::Event { consumed, .. } => at += consumed,
        }
    }
}

fn unsupported(stream: &[u8]) -> UnsupportedFeature {
    match error_of(stream).kind() {
        ErrorKind::Unsupported(feature) => feature.clone(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_stream_cut_off_at_any_byte_is_truncated_and_nothing_else() {
    let mut stream = part();
    let blocks = [RamBlock::new("pc.ram", 0x4000), RamBlock::new("vga", 0x1000)];
    let mut records = RecordEncoder::new(&blocks).unwrap();
    records.append(RecordKind::Page, 0, 0, &mut stream).unwrap();
    records.append(RecordKind::Zero, 0, 0x1000, &mut stream).unwrap();
    records.append(RecordKind::Page, 1, 0, &mut stream).unwrap();
    ram::encode_eos(2, &mut stream);
    Command::Ping(1).encode(&mut stream).unwrap();
    section::encode_end(2, &mut stream);
    ram::encode_eos(2, &mut stream);
    section::encode_eof(&mut stream);
    assert!(run(&stream).is_ok());
    for length in 0..stream.len() {
        let error = error_of(&stream[..length]);
        assert!(matches!(error.kind(), ErrorKind::Truncated { .. }), "at {length}: {error}");
    }
}

#[test]
fn a_foreign_file_is_named_as_such() {
    let error = error_of(b"QFI\xfb\0\0\0\x03\0\0\0\0\0");
    assert_eq!(error.offset(), 0);
    assert!(error.to_string().contains("expected the magic \"QEVM\""), "{error}");
    assert_eq!(error_of(b"QEVM\0\0\0\x02\x07\0\0\0\0").offset(), 4);
    assert_eq!(error_of(b"QEVM\0\0\0\x03\x01\0\0\0\0").offset(), 8);
    let huge = error_of(b"QEVM\0\0\0\x03\x07\xff\xff\xff\xff");
    assert!(matches!(huge.kind(), ErrorKind::TooLarge { value: 0xffff_ffff, .. }), "{huge}");
}

#[test]
fn a_block_listed_twice_is_refused_by_name() {
    let mut stream = Vec::new();
    Configuration::new("pc").encode(&mut stream).unwrap();
    section::encode_start(2, "ram", 0, 4, &mut stream).unwrap();
    stream.extend(word(0x2000 | ram::FLAG_MEM_SIZE));
    for _ in 0..2 {
        stream.extend(b"\x06pc.ram");
        stream.extend(word(0x1000));
    }
    let error = error_of(&stream);
    assert_eq!(*error.kind(), ErrorKind::DuplicateBlock { name: "pc.ram".into() });
    assert_eq!(error.offset(), stream.len() as u64 - 15);
    assert_eq!(error.context(), "section \"ram\" (id 2)");
}

#[test]
fn block_lengths_must_be_whole_pages_and_add_up() {
    let listed = |total: u64, length: u64| {
        let mut stream = Vec::new();
        Configuration::new("pc").encode(&mut stream).unwrap();
        section::encode_start(2, "ram", 0, 4, &mut stream).unwrap();
        stream.extend(word(total | ram::FLAG_MEM_SIZE));
        stream.extend(b"\x06pc.ram");
        stream.extend(word(length));
        error_of(&stream).to_string()
    };
    assert!(listed(0x1000, 0x1001).contains("a multiple of 4096"));
    assert!(listed(0x1000, 0x2000).contains("at most the 0x1000 bytes left"));
    assert!(listed(0x1000, !0xfff).contains("at most the 0x1000 bytes left"));
    assert!(listed(!0xfff, 0x1000).contains("total RAM size"));
    assert!(listed(0, 0x1000).contains("a total RAM size of 0"));
}

#[test]
fn more_than_4096_blocks_are_refused() {
    let mut stream = Vec::new();
    Configuration::new("pc").encode(&mut stream).unwrap();
    section::encode_start(2, "ram", 0, 4, &mut stream).unwrap();
    stream.extend(word(0x1000 | ram::FLAG_MEM_SIZE));
    for block in 0..5000 {
        let name = format!("{block:04}");
        stream.push(4);
        stream.extend(name.as_bytes());
        stream.extend(word(0));
    }
    assert!(matches!(error_of(&stream).kind(), ErrorKind::TooLarge { limit: 4096, .. }));
}

#[test]
fn pages_outside_their_block_are_refused_with_both_numbers() {
    let named = with(part(), &[&word(0x4000 | ram::FLAG_PAGE)[..], b"\x06pc.ram"].concat());
    let error = error_of(&named);
    let fault = ErrorKind::OutsideBlock { block: "pc.ram".into(), offset: 0x4000, used_length: 0x4000 };
    assert_eq!(*error.kind(), fault);
    assert_eq!(error.offset(), named.len() as u64 - 15);
    let mut again = with(part(), &[&word(0x3000 | ram::FLAG_ZERO)[..], b"\x06pc.ram\0"].concat());
    again.extend(word(0x4000 | ram::FLAG_PAGE | ram::FLAG_CONTINUE));
    assert_eq!(*error_of(&again).kind(), fault);
    again.truncate(again.len() - 8);
    again.extend(word(!0xfff | ram::FLAG_ZERO | ram::FLAG_CONTINUE));
    assert!(matches!(error_of(&again).kind(), ErrorKind::OutsideBlock { .. }));
}

#[test]
fn a_page_that_continues_in_a_smaller_block_is_checked_against_that_one() {
    let mut stream = with(part(), &[&word(0x3000 | ram::FLAG_ZERO)[..], b"\x06pc.ram\0"].concat());
    stream.extend([&word(ram::FLAG_ZERO)[..], b"\x03vga\0"].concat());
    stream.extend(word(0x1000 | ram::FLAG_PAGE | ram::FLAG_CONTINUE));
    let fault = ErrorKind::OutsideBlock { block: "vga".into(), offset: 0x1000, used_length: 0x1000 };
    assert_eq!(*error_of(&stream).kind(), fault);
}

#[test]
fn a_host_page_size_that_was_not_announced_is_no_page_size() {
    let mut stream = Vec::new();
    Configuration::new("pc").encode(&mut stream).unwrap();
    let sizes = PageSizes { summary: 0x20_1000, target: 0x1000 };
    Command::PostcopyAdvise(Some(sizes)).encode(&mut stream).unwrap();
    let huge = |size| RamBlock { page_size: Some(size), ..RamBlock::new("pc.ram", 0x4000_0000) };
    let mut announced = stream.clone();
    ram::encode_ram_start(2, &[huge(0x20_0000)], &mut announced).unwrap();
    section::encode_eof(&mut announced);
    assert!(run(&announced).is_ok());
    ram::encode_ram_start(2, &[huge(0x4000_0000)], &mut stream).unwrap();
    assert!(error_of(&stream).to_string().contains("expected EOS (0x010) behind the RAM block list"));
}

#[test]
fn records_without_a_known_block_are_refused() {
    let nameless = with(part(), &word(ram::FLAG_PAGE | ram::FLAG_CONTINUE));
    assert!(error_of(&nameless).to_string().contains("a block name in the first page record"));
    let unknown = with(part(), &[&word(ram::FLAG_PAGE)[..], b"\x03rom"].concat());
    assert_eq!(*error_of(&unknown).kind(), ErrorKind::UnknownBlock { name: "rom".into() });
    let empty = with(part(), &[&word(ram::FLAG_PAGE)[..], b"\0"].concat());
    assert!(error_of(&empty).to_string().contains("an empty name"));
    let binary = with(part(), &[&word(ram::FLAG_PAGE)[..], b"\x02\xff\n"].concat());
    assert!(error_of(&binary).to_string().contains("not UTF-8"));
}

#[test]
fn a_zero_page_of_another_fill_is_refused() {
    let error = error_of(&with(part(), &[&word(ram::FLAG_ZERO)[..], b"\x06pc.ram\x55"].concat()));
    assert!(error.to_string().contains("expected fill byte 0 of a zero page, found 0x55"), "{error}");
}

#[test]
fn footers_and_section_ids_must_match() {
    let footer = with(part(), &[&word(ram::FLAG_EOS)[..], &[0x7e, 0, 0, 0, 3]].concat());
    assert!(error_of(&footer).to_string().contains("expected section id 2 in the footer, found 3"));
    let no_footer = with(part(), &[&word(ram::FLAG_EOS)[..], &[2]].concat());
    assert!(error_of(&no_footer).to_string().contains("expected a section footer (0x7e), found 0x02"));
    let other = with(start(), &[2, 0, 0, 0, 9]);
    assert!(error_of(&other).to_string().contains("expected the id 2 of section \"ram\", found section id 9"));
    let mut early = Vec::new();
    Configuration::new("pc").encode(&mut early).unwrap();
    assert!(error_of(&with(early.clone(), &[3, 0, 0, 0, 2])).to_string().contains("before any PART"));
    assert!(error_of(&with(early, &[0])).to_string().contains("the START of section \"ram\""));
    assert!(error_of(&with(start(), &[6])).to_string().contains("found 0x06"));
}

#[test]
fn a_page_delta_is_inside_its_block_of_method_1_and_no_longer_than_a_page() {
    let delta = |offset: u64, method: u8, length: u16| {
        let record = [&word(offset | ram::FLAG_XBZRLE)[..], b"\x06pc.ram", &[method], &length.to_be_bytes()].concat();
        error_of(&with(part(), &record)).to_string()
    };
    assert!(delta(0x1000, 1, 4096).contains("the input ends"), "the delta itself is the caller's");
    assert!(delta(0x1000, 2, 10).contains("expected the method byte 0x01 of a page delta, found 0x02"));
    assert!(delta(0x1000, 1, 4097).contains("length of a page delta is 4097"));
    assert!(delta(0x4000, 1, 10).contains("outside RAM block"));
    let nameless = with(part(), &word(ram::FLAG_XBZRLE | ram::FLAG_CONTINUE));
    assert!(error_of(&nameless).to_string().contains("a block name in the first page record"));
}

#[test]
fn other_features_are_named() {
    let flagged = |flag: u64| unsupported(&with(part(), &word(0x1000 | flag)));
    assert_eq!(flagged(ram::FLAG_HOOK), UnsupportedFeature::RdmaHook);
    assert_eq!(flagged(ram::FLAG_COMPRESS_PAGE), UnsupportedFeature::CompressedPage);
    assert_eq!(flagged(ram::FLAG_MULTIFD_FLUSH), UnsupportedFeature::Multifd, "the join word has no address");
    assert!(error_of(&with(part(), &word(0x400))).to_string().contains("expected a RAM record"));
    assert!(error_of(&with(part(), &word(ram::FLAG_PAGE | ram::FLAG_ZERO))).to_string().contains("a RAM record"));
    let section = |name: &str, kind| {
        let mut header = Vec::new();
        let name = name.to_owned();
        SectionHeader { kind, id: 5, name, instance: 0, version: 1 }.encode(&mut header).unwrap();
        unsupported(&with(start(), &header))
    };
    assert_eq!(section("dirty-bitmap", SectionKind::Start), UnsupportedFeature::DirtyBitmaps);
    let name = "0000:00:02.0/vfio".to_owned();
    assert_eq!(section(&name, SectionKind::Start), UnsupportedFeature::IterableSection { name });
    let mut colo = Vec::new();
    Command::EnableColo.encode(&mut colo).unwrap();
    assert_eq!(unsupported(&with(start(), &colo)), UnsupportedFeature::Colo);
    let mut bits = Vec::new();
    Configuration { target_page_bits: Some(16), ..Configuration::new("virt") }.encode(&mut bits).unwrap();
    assert_eq!(unsupported(&with(bits, &[1])), UnsupportedFeature::TargetPageBits { bits: 16 });
}

#[test]
fn device_sections_right_behind_start_are_a_tail() {
    let mut stream = start();
    SectionHeader { kind: SectionKind::Full, id: 0, name: "timer".into(), instance: 0, version: 2 }
        .encode(&mut stream)
        .unwrap();
    assert!(run(&stream).is_ok());
}

#[test]
fn the_list_of_blocks_is_followed_by_eos_and_comes_once() {
    let mut stream = start();
    let end = stream.len() - 13;
    stream.truncate(end);
    stream.extend(word(ram::FLAG_PAGE));
    stream.extend(b"\x06pc.ram");
    assert!(error_of(&stream).to_string().contains("expected EOS (0x010) behind the RAM block list"));
    let mut twice = start();
    ram::encode_ram_start(2, &[RamBlock::new("x", 0x1000)], &mut twice).unwrap();
    assert!(error_of(&twice).to_string().contains("one START"));
    let mut version = Vec::new();
    Configuration::new("pc").encode(&mut version).unwrap();
    section::encode_start(2, "ram", 0, 5, &mut version).unwrap();
    assert!(error_of(&version).to_string().contains("expected version 4 of section \"ram\", found 5"));
}

#[test]
fn commands_are_checked_against_the_block_list_and_the_limits() {
    let command = |command: Command| {
        let mut encoded = Vec::new();
        command.encode(&mut encoded).unwrap();
        error_of(&with(start(), &encoded))
    };
    let whole =
        |block: &str, end| Command::RamDiscard { block: block.into(), ranges: std::iter::once(0..end).collect() };
    assert_eq!(*command(whole("rom", 0x1000)).kind(), ErrorKind::UnknownBlock { name: "rom".into() });
    assert!(matches!(command(whole("vga", 0x2000)).kind(), ErrorKind::OutsideBlock { .. }));
    assert!(matches!(command(Command::Packaged { length: 1001 }).kind(), ErrorKind::TooLarge { limit: 1000, .. }));
    assert!(matches!(command(Command::ReceiveBitmap { block: "x".into() }).kind(), ErrorKind::UnknownBlock { .. }));
    for wrong in [
        &b"\x08\0\x0c\0\0"[..],
        b"\x08\0\0\0\0",
        b"\x08\0\x02\0\x05\0\0\0\0\0",
        b"\x08\0\x06\0\x02\0\x01",
        b"\x08\0\x0a\0\x03\x01ab",
    ] {
        assert!(Command::decode(wrong).is_err(), "{wrong:x?}");
    }
    let unaligned = b"\x08\0\x06\0\x14\0\x01a\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\x10\0";
    assert!(Command::decode(unaligned).unwrap_err().to_string().contains("a range of whole pages"));
    assert!(whole("a", 0x1001).encode(&mut Vec::new()).is_err());
    assert!(Command::RamDiscard { block: "a".into(), ranges: vec![] }.encode(&mut Vec::new()).is_err());
}

#[test]
fn a_failed_encoding_leaves_the_output_as_it_was() {
    let mut out = vec![1, 2, 3];
    assert!(Command::ReceiveBitmap { block: "x".repeat(256) }.encode(&mut out).is_err());
    assert!(ReturnMessage::RequestPages { block: Some(String::new()), start: 0, length: 1 }.encode(&mut out).is_err());
    assert_eq!(out, [1, 2, 3]);
}

#[test]
fn record_encoders_refuse_what_no_stream_may_hold() {
    let block = RamBlock::new("a", 0x2000);
    assert!(RecordEncoder::new(&[block.clone(), block.clone()]).is_err());
    assert!(RecordEncoder::new(&[RamBlock::new("", 0x1000)]).is_err());
    assert!(RecordEncoder::new(&[RamBlock::new("a", 0x1001)]).is_err());
    let mut records = RecordEncoder::new(&[block]).unwrap();
    let mut out = Vec::new();
    assert!(records.append(RecordKind::Page, 1, 0, &mut out).is_err());
    assert!(records.append(RecordKind::Page, 0, 0x2000, &mut out).is_err());
    assert!(records.append(RecordKind::Page, 0, 0x800, &mut out).is_err());
    assert!(out.is_empty());
}

#[test]
fn the_preempt_channel_is_bare_records() {
    let blocks = [RamBlock::new("a", 0x2000)];
    let mut wire = Vec::new();
    let mut records = RecordEncoder::new(&blocks).unwrap();
    records.append(RecordKind::Page, 0, 0x1000, &mut wire).unwrap();
    records.append(RecordKind::Zero, 0, 0, &mut wire).unwrap();
    wire.extend(word(ram::FLAG_EOS));
    let mut decoder = Decoder::for_preempt_channel(&blocks).unwrap();
    let mut at = 0;
    for wanted in [Event::Page { block: 0, offset: 0x1000 }, Event::Zero { block: 0, offset: 0 }, Event::EndOfStream] {
        let Step::Event { consumed, event } = decoder.step(&wire[at..]).unwrap() else { panic!("incomplete") };
        assert_eq!(event, wanted);
        at += consumed;
    }
    assert_eq!(at, wire.len());
    assert!(Decoder::for_preempt_channel(&[blocks[0].clone(), blocks[0].clone()]).is_err());
}

#[test]
fn return_messages_are_checked_against_type_and_length() {
    let error = |wire: &[u8]| {
        let mut decoder = ReturnDecoder::new(64);
        decoder.push(wire);
        decoder.next_message().expect_err("the message is wrong")
    };
    assert!(error(b"\0\x09\0\0").to_string().contains("a message type from 1 to 7"));
    assert!(error(b"\0\x01\0\x05").to_string().contains("found message 1 of 5 bytes"));
    assert!(error(b"\0\x03\x02\x01").to_string().contains("the length that its type asks for"));
    let nameless = b"\0\x04\0\x0c\0\0\0\0\0\0\0\0\0\0\x10\0";
    assert!(error(nameless).to_string().contains("before one without"));
    let mut resuming = ReturnDecoder::for_recovery(64);
    resuming.push(nameless);
    assert!(matches!(resuming.next_message(), Ok(Some(ReturnMessage::RequestPages { block: None, .. }))));
    let short = b"\0\x03\0\x0e\0\0\0\0\0\0\0\0\0\0\x10\0\x05a";
    assert!(error(short).to_string().contains("as long as it says"));
    let long = b"\0\x03\0\x0f\0\0\0\0\0\0\0\0\0\0\x10\0\x01ab";
    assert!(error(long).to_string().contains("as long as it says"));
    let bitmap = b"\0\x05\0\x02\x01a\0\0\0\0\0\0\0\x48";
    assert!(matches!(error(bitmap).kind(), ErrorKind::TooLarge { value: 72, limit: 64, .. }));
    let odd = b"\0\x05\0\x02\x01a\0\0\0\0\0\0\0\x07";
    assert!(error(odd).to_string().contains("whole 8-byte words"));
    let end = b"\0\x05\0\x02\x01a\0\0\0\0\0\0\0\0\x01\x23\x45\x67\x89\xab\xcd\xee";
    assert!(error(end).to_string().contains("0x0123456789abcdef"));
}
