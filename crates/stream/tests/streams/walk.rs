//! A recorded stream is walked without reading its pages.

use limosa_stream::{
    Command, Configuration, DecoderOptions, ErrorKind, Event, RamBlock, RecordEncoder, RecordKind, StreamWalk,
    WalkError, postcopy, ram, section,
};
use std::cell::Cell;
use std::io;

const PAGES: u64 = 300;

/// A precopy stream with its page payloads, then the first bytes of a device section.
fn recorded() -> Vec<u8> {
    let blocks = [RamBlock::new("pc.ram", PAGES * 4096)];
    let mut stream = Vec::new();
    Configuration::new("pc").encode(&mut stream).unwrap();
    ram::encode_ram_start(2, &blocks, &mut stream).unwrap();
    let mut records = RecordEncoder::new(&blocks).unwrap();
    section::encode_part(2, &mut stream);
    for page in 0..PAGES {
        let zero = page % 3 == 0;
        records.append(if zero { RecordKind::Zero } else { RecordKind::Page }, 0, page * 4096, &mut stream).unwrap();
        if !zero {
            // Payloads that would be wrong in every way if they were taken for records.
            stream.extend([0xff; 4096]);
        }
    }
    ram::encode_eos(2, &mut stream);
    stream.extend_from_slice(b"\x04\0\0\0\x01\x05timer");
    stream
}

fn reader<'a>(
    file: &'a [u8],
    bytes_read: &'a Cell<usize>,
) -> impl FnMut(u64, &mut [u8]) -> io::Result<usize> + use<'a> {
    move |offset, buffer| {
        let rest = usize::try_from(offset).ok().and_then(|offset| file.get(offset..)).unwrap_or_default();
        let length = rest.len().min(buffer.len());
        buffer[..length].copy_from_slice(&rest[..length]);
        bytes_read.set(bytes_read.get() + length);
        Ok(length)
    }
}

#[test]
fn pages_are_counted_and_their_payloads_mostly_not_read() {
    for base in [0u64, 777] {
        let mut file = vec![0xee; usize::try_from(base).unwrap()];
        file.extend(recorded());
        let bytes_read = Cell::new(0);
        let mut walk =
            StreamWalk::new(reader(&file, &bytes_read), DecoderOptions { base, ..DecoderOptions::default() });
        let (mut pages, mut zeros) = (0, 0);
        loop {
            match walk.next_event().unwrap() {
                Event::Page { offset, .. } => {
                    pages += 1;
                    let end = usize::try_from(walk.offset()).unwrap();
                    assert!(file[end - 4096..end].iter().all(|byte| *byte == 0xff), "payload of {offset:#x}");
                }
                Event::Zero { .. } => zeros += 1,
                Event::DeviceTail => break,
                _ => {}
            }
        }
        assert_eq!((pages, zeros), (PAGES * 2 / 3, PAGES / 3));
        assert_eq!(walk.next_event().unwrap(), Event::DeviceTail, "it stays there");
        assert_eq!(file[usize::try_from(walk.offset()).unwrap()], 0x04);
        assert!(bytes_read.get() < file.len() / 4, "{} of {} bytes read", bytes_read.get(), file.len());
    }
}

#[test]
fn a_recording_that_ends_early_is_truncated_where_it_ends() {
    let file = recorded();
    for length in [0, 8, 100, 5000, file.len() - 20] {
        let bytes_read = Cell::new(0);
        let mut walk = StreamWalk::new(reader(&file[..length], &bytes_read), DecoderOptions::default());
        let error = loop {
            match walk.next_event() {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        let WalkError::Stream(error) = error else { panic!("{error}") };
        assert!(matches!(error.kind(), ErrorKind::Truncated { .. }), "{error}");
    }
}

#[test]
fn a_recorded_postcopy_stream_is_walked_to_its_end() {
    let blocks = [RamBlock::new("pc.ram", 0x2000)];
    let mut stream = Vec::new();
    postcopy::encode_postcopy_prologue(&Configuration::new("pc"), 2, &blocks, &[], &mut stream).unwrap();
    let package = postcopy::postcopy_package(&[0x04; 100_000], Some(postcopy::PING_LOADED)).unwrap();
    postcopy::encode_packaged(&package, &mut stream).unwrap();
    Command::Ping(postcopy::PING_PACKAGED).encode(&mut stream).unwrap();
    section::encode_end(2, &mut stream);
    let mut records = RecordEncoder::new(&blocks).unwrap();
    records.append(RecordKind::Page, 0, 0x1000, &mut stream).unwrap();
    stream.extend([0xff; 4096]);
    ram::encode_eos(2, &mut stream);
    section::encode_eof(&mut stream);
    let bytes_read = Cell::new(0);
    let mut walk = StreamWalk::new(reader(&stream, &bytes_read), DecoderOptions::default());
    let mut events = Vec::new();
    while events.last() != Some(&Event::EndOfStream) {
        events.push(walk.next_event().unwrap());
    }
    assert_eq!(walk.offset(), stream.len() as u64);
    let length = u32::try_from(package.len()).unwrap();
    assert!(events.contains(&Event::Package { length }));
    assert!(events.contains(&Event::Page { block: 0, offset: 0x1000 }));
    assert!(bytes_read.get() < 80_000, "the package was passed over");
}

#[test]
fn interrupted_reads_are_repeated() {
    let file = recorded();
    let bytes_read = Cell::new(0);
    let mut read = reader(&file, &bytes_read);
    let mut calls = 0;
    let interrupted = |offset: u64, buffer: &mut [u8]| {
        calls += 1;
        if calls % 2 == 1 { Err(io::ErrorKind::Interrupted.into()) } else { read(offset, buffer) }
    };
    let mut walk = StreamWalk::new(interrupted, DecoderOptions::default());
    while walk.next_event().unwrap() != Event::DeviceTail {}
}
