//! Layouts of mapped-ram files of other writers, or damaged.

use limosa_stream::mapped_ram::Layout;
use limosa_stream::{Configuration, RamBlock, WalkError, ram, section};
use std::io;

const TAIL: &[u8] = b"\x04\0\0\0\x01\x05timer\0\0\0\0\0\0\0\x02";
/// Where the offsets of the first block are in the file of `file`: 28 bytes of header and the name before.
const FIRST_BITMAP_OFFSET: usize = 0x4a + 17 + 8 + 7 + 8 + 12;

/// A whole file of two blocks, its layout, and the length of what comes before the tail.
fn file() -> (Vec<u8>, Layout) {
    let blocks = [RamBlock::new("pc.ram", 0x4000), RamBlock::new("vga", 0x1000)];
    let layout = Layout::plan(&Configuration::new("pc-i440fx-10.0"), 2, &blocks).unwrap();
    let mut file = Vec::new();
    for chunk in layout.chunks().unwrap() {
        let begin = usize::try_from(chunk.offset).unwrap();
        file.resize(begin, 0);
        file.extend(chunk.bytes);
    }
    file.extend_from_slice(TAIL);
    (file, layout)
}

fn decode(file: &[u8]) -> Result<Layout, WalkError> {
    let read = |offset: u64, buffer: &mut [u8]| {
        let rest = usize::try_from(offset).ok().and_then(|offset| file.get(offset..)).unwrap_or_default();
        let length = rest.len().min(buffer.len());
        buffer[..length].copy_from_slice(&rest[..length]);
        Ok(length)
    };
    Layout::decode(read, 0, file.len() as u64)
}

fn patched(at: usize, bytes: &[u8]) -> String {
    let (mut file, _) = file();
    file[at..at + bytes.len()].copy_from_slice(bytes);
    decode(&file).expect_err("the file is damaged").to_string()
}

#[test]
fn the_plan_reads_back() {
    let (file, layout) = file();
    assert_eq!(decode(&file).unwrap(), layout);
    assert_eq!(file[FIRST_BITMAP_OFFSET..FIRST_BITMAP_OFFSET + 8], 0x8eu64.to_be_bytes());
}

#[test]
fn a_file_cut_off_at_any_byte_is_refused() {
    let (file, layout) = file();
    let begins = layout.blocks.iter().map(|placed| usize::try_from(placed.header_offset).unwrap());
    let mut cuts: Vec<usize> = (0..0x100).chain(begins.flat_map(|at| at.saturating_sub(40)..at + 60)).collect();
    cuts.extend(file.len() - 60..file.len() - TAIL.len());
    for length in cuts {
        assert!(decode(&file[..length]).is_err(), "cut off at {length:#x}");
    }
}

#[test]
fn pages_and_bitmaps_beyond_the_end_of_the_file_are_refused() {
    let message = patched(FIRST_BITMAP_OFFSET, &0x1000_0000u64.to_be_bytes());
    assert!(message.contains("bitmap of RAM block \"pc.ram\" should end at 0x10000008"), "{message}");
    assert!(message.contains("but the file ends at "), "{message}");
    let message = patched(FIRST_BITMAP_OFFSET + 8, &0x1000_0000u64.to_be_bytes());
    assert!(message.contains("pages of RAM block \"pc.ram\""), "{message}");
    let message = patched(FIRST_BITMAP_OFFSET + 8, &(u64::MAX - 0xfff).to_be_bytes());
    assert!(message.contains("lies beyond any file"), "{message}");
}

#[test]
fn parts_upon_one_another_are_refused() {
    // The bitmap inside the file header, inside its own block's header, inside the pages.
    for (at, upon) in [
        (4u64, "file header"),
        (0x80, "header of RAM block"),
        (0x8d, "header of RAM block"),
        (0x10_1000, "pages of RAM block"),
    ] {
        let message = patched(FIRST_BITMAP_OFFSET, &at.to_be_bytes());
        assert!(message.contains("overlaps") && message.contains(upon), "{message}");
    }
    // Inside the end of the RAM section or the device sections.
    let (_, layout) = file();
    let message = patched(FIRST_BITMAP_OFFSET, &(layout.tail_offset - 4).to_be_bytes());
    assert!(message.contains("reaches behind the last block's pages"), "{message}");
}

#[test]
fn a_chain_that_runs_in_a_circle_is_refused() {
    let blocks = ["a", "b", "c"].map(|name| RamBlock::new(name, 0x1000));
    let mut layout = Layout::plan(&Configuration::new("pc"), 2, &blocks).unwrap();
    // The pages of "b" end where "b" itself is listed.
    layout.blocks[1].pages_offset = layout.blocks[0].pages_offset;
    assert_eq!(layout.blocks[1].end(), layout.blocks[1].header_offset);
    let mut file = vec![0; 0x40_0000];
    for chunk in &layout.chunks().unwrap()[..2] {
        let begin = usize::try_from(chunk.offset).unwrap();
        file[begin..begin + chunk.bytes.len()].copy_from_slice(&chunk.bytes);
    }
    assert!(decode(&file).unwrap_err().to_string().contains("RAM block \"b\" is listed twice"));
}

#[test]
fn header_fields_are_checked() {
    let version = FIRST_BITMAP_OFFSET - 12;
    assert!(patched(version, &2u32.to_be_bytes()).contains("version 1 of the mapped-ram block header"));
    assert!(patched(version + 4, &0x2000u64.to_be_bytes()).contains("page size 4096"));
    assert!(patched(FIRST_BITMAP_OFFSET + 8, &0x10_0800u64.to_be_bytes()).contains("multiple of 4096"));
    assert!(patched(version - 8, &0x4001u64.to_be_bytes()).contains("a multiple of 4096"));
    assert!(patched(version - 8, &0x6000u64.to_be_bytes()).contains("at most the 0x5000 bytes left"));
}

#[test]
fn page_records_in_a_mapped_ram_file_are_refused() {
    let (mut file, layout) = file();
    file.truncate(usize::try_from(layout.tail_offset).unwrap());
    section::encode_part(2, &mut file);
    file.extend(ram::FLAG_PAGE.to_be_bytes());
    file.extend(b"\x06pc.ram");
    let message = decode(&file).unwrap_err().to_string();
    assert!(message.contains("only EOS in the RAM sections of a mapped-ram file"), "{message}");
}

#[test]
fn an_ordinary_stream_is_no_mapped_ram_file() {
    let mut stream = Vec::new();
    Configuration::new("pc").encode(&mut stream).unwrap();
    ram::encode_ram_start(2, &[RamBlock::new("a", 0x1000)], &mut stream).unwrap();
    assert!(decode(&stream).unwrap_err().to_string().contains("expected the capability mapped-ram"));
}

#[test]
fn an_end_without_device_sections_is_refused() {
    let (mut file, layout) = file();
    file.truncate(usize::try_from(layout.tail_offset).unwrap());
    section::encode_eof(&mut file);
    assert!(decode(&file).unwrap_err().to_string().contains("expected device sections"));
}

#[test]
fn a_failing_read_is_passed_on_with_its_offset() {
    let failing = |_: u64, _: &mut [u8]| Err(io::Error::other("medium error"));
    let error = Layout::decode(failing, 0x1000, 0x2000).unwrap_err();
    assert!(matches!(error, WalkError::Read { offset: 0x1000, .. }));
    assert!(std::error::Error::source(&error).unwrap().to_string().contains("medium error"));
}

#[test]
fn the_bitmap_of_a_block_is_whole_words() {
    let (_, layout) = file();
    assert_eq!(layout.blocks[0].bitmap_length(), 8);
    assert_eq!(layout.blocks[0].file_offset(0x3000), Some(0x10_3000));
    assert_eq!(layout.blocks[0].file_offset(0x4000), None);
    let one_more = Layout::plan(&Configuration::new("pc"), 2, &[RamBlock::new("a", 65 * 4096)]).unwrap();
    assert_eq!(one_more.blocks[0].bitmap_length(), 16);
}
