//! A small migration stream, written and decoded: one RAM block with one page of data and one zero page.
//!
//!     cargo run -p limosa-stream --example round_trip

use limosa_stream::{
    Configuration, Decoder, EncodeError, Event, RamBlock, RecordEncoder, RecordKind, Step, ram, section,
};

const PAGE: usize = 4096;
/// The section id that this stream gives to RAM.
const RAM: u32 = 2;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let stream = written()?;
    let mut decoder = Decoder::new();
    let mut at = 0;
    loop {
        match decoder.step(stream.get(at..).unwrap_or_default())? {
            // A stream that comes from a socket would be read further here.
            Step::Need(wanted) => return Err(decoder.truncated_error(stream.len() - at, wanted).into()),
            Step::Event { consumed, event } => {
                println!("{at:6}: {event:?}");
                at += consumed;
                match event {
                    // The contents of a page do not pass through the decoder: its caller reads them to their
                    // destination.
                    Event::Page { .. } => at += PAGE,
                    Event::EndOfStream => break,
                    _ => {}
                }
            }
        }
    }
    assert_eq!(at, stream.len());
    Ok(())
}

fn written() -> Result<Vec<u8>, EncodeError> {
    let blocks = [RamBlock::new("pc.ram", 0x2000)];
    let mut stream = Vec::new();
    Configuration::new("pc-i440fx-10.0").encode(&mut stream)?;
    ram::encode_ram_start(RAM, &blocks, &mut stream)?;
    section::encode_part(RAM, &mut stream);
    let mut records = RecordEncoder::new(&blocks)?;
    records.append(RecordKind::Page, 0, 0, &mut stream)?;
    stream.extend_from_slice(&[0x5a; PAGE]);
    records.append(RecordKind::Zero, 0, 0x1000, &mut stream)?;
    ram::encode_eos(RAM, &mut stream);
    section::encode_eof(&mut stream);
    Ok(stream)
}
