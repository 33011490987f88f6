//! The device section that comes before the pages.

use limosa_stream::mapped_ram::Layout;
use limosa_stream::{Configuration, Decoder, Event, RamBlock, Step, StreamError, ram, section};
use proptest::prelude::*;

/// The bytes that a stock QEMU 10.0.2 sent for a virtio-mem device of 256 MiB in blocks of 2 MiB, with nothing plugged.
fn captured() -> Vec<u8> {
    let mut bytes = vec![0x04, 0, 0, 0, 0x25, 36];
    bytes.extend(b"0000:00:01.0/virtio-mem-device-early");
    bytes.extend([0, 0, 0, 0, 0, 0, 0, 1]);
    for word in [0x1_0000_0000_u64, 0x1000_0000, 0x20_0000] {
        bytes.extend(word.to_be_bytes());
    }
    bytes.extend([0; 4 + 8 + 16]);
    bytes.extend([0x7e, 0, 0, 0, 0x25]);
    bytes
}

/// A stream up to the first PART, with `sections` before it.
fn stream(sections: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    Configuration::new("pc-q35-10.0").encode(&mut bytes).unwrap();
    ram::encode_ram_start(1, &[RamBlock::new("pc.ram", 0x1000)], &mut bytes).unwrap();
    bytes.extend(sections);
    section::encode_part(1, &mut bytes);
    bytes
}

fn events(mut input: &[u8]) -> Result<Vec<Event>, StreamError> {
    let mut decoder = Decoder::new();
    let mut events = Vec::new();
    while !input.is_empty() {
        match decoder.step(input)? {
            Step::Need(wanted) => return Err(decoder.truncated_error(input.len(), wanted)),
            Step::Event { consumed, event } => {
                input = &input[consumed..];
                let over = matches!(event, Event::DeviceTail | Event::EndOfStream);
                events.push(event);
                if over {
                    break;
                }
            }
        }
    }
    Ok(events)
}

fn patched(at: usize, bytes: &[u8]) -> String {
    let mut section = captured();
    section[at..at + bytes.len()].copy_from_slice(bytes);
    events(&stream(&section)).expect_err("the section is wrong").to_string()
}

/// Where the body begins.
const BODY: usize = 6 + 36 + 8;

#[test]
fn what_qemu_sends_before_the_pages_is_taken_as_a_whole() {
    let two = [captured(), captured()].concat();
    let found = events(&stream(&two)).unwrap();
    let early: Vec<_> = found.iter().filter(|event| **event == Event::EarlyDevice(captured())).collect();
    assert_eq!(early.len(), 2);
    assert_eq!(found.last(), Some(&Event::SectionPart { id: 1 }));
}

#[test]
fn a_section_that_is_cut_off_anywhere_asks_for_the_rest() {
    let whole = stream(&captured());
    let begin = whole.len() - 5 - captured().len();
    for end in begin + 1..whole.len() - 5 {
        let error = events(&whole[..end]).expect_err("cut off").to_string();
        assert!(error.contains("ends"), "{end}: {error}");
    }
}

#[test]
fn sizes_that_lie_are_refused_before_anything_is_kept() {
    assert!(patched(BODY + 16, &[0; 8]).contains("a block size"));
    assert!(patched(BODY + 8, &[0xff; 8]).contains("bitmap of a virtio-mem device"));
    assert!(patched(BODY - 1, &[2]).contains("version 1"));
    // A bitmap of another length, and the footer is not where it should be.
    assert!(patched(BODY + 8, &0x0800_0000_u64.to_be_bytes()).contains("footer"));
    assert!(patched(captured().len() - 1, &[0x26]).contains("footer"));
}

#[test]
fn it_counts_only_before_the_pages() {
    let mut late = stream(&[]);
    ram::encode_eos(1, &mut late);
    let tail_at = late.len();
    late.extend(captured());
    let mut decoder = Decoder::new();
    let mut input = &late[..];
    loop {
        match decoder.step(input).unwrap() {
            Step::Event { event: Event::DeviceTail, .. } => break,
            Step::Event { consumed, .. } => input = &input[consumed..],
            Step::Need(wanted) => panic!("needs {wanted} of {}", input.len()),
        }
    }
    assert_eq!(input.len(), late.len() - tail_at, "behind the pages it belongs to the tail");
}

#[test]
fn a_mapped_ram_file_holds_it_behind_the_blocks() {
    let mut layout = Layout::plan(&Configuration::new("pc-q35-10.0"), 1, &[RamBlock::new("pc.ram", 0x1000)]).unwrap();
    layout.add_early_sections(&captured());
    layout.add_early_sections(&captured());
    let mut file = Vec::new();
    for chunk in layout.chunks().unwrap() {
        file.resize(usize::try_from(chunk.offset).unwrap(), 0);
        file.extend(chunk.bytes);
    }
    assert_eq!(file.len() as u64, layout.tail_offset);
    file.extend(b"\x04\0\0\0\x01\x05timer\0\0\0\0\0\0\0\x02");
    let read = |offset: u64, buffer: &mut [u8]| {
        let rest = file.get(usize::try_from(offset).unwrap()..).unwrap_or_default();
        let length = rest.len().min(buffer.len());
        buffer[..length].copy_from_slice(&rest[..length]);
        Ok(length)
    };
    let decoded = Layout::decode(read, 0, file.len() as u64).unwrap();
    assert_eq!(decoded, layout);
    assert_eq!(decoded.early_sections.len(), 2 * captured().len());
}

proptest! {
    #[test]
    fn any_bytes_in_its_place_are_taken_whole_or_refused(at in 0..captured().len(), bytes in prop::collection::vec(any::<u8>(), 1..16)) {
        let mut section = captured();
        let end = (at + bytes.len()).min(section.len());
        section[at..end].copy_from_slice(&bytes[..end - at]);
        if let Ok(found) = events(&stream(&section)) {
            let kept: usize = found.iter().map(|event| if let Event::EarlyDevice(section) = event { section.len() } else { 0 }).sum();
            prop_assert!(kept <= section.len());
        }
    }
}
