//! A small VM whose checkpoints are kept, and what its primary sends.

use std::error::Error;
use std::io::IoSlice;

use limosa_migrate::stored::{PageError, PageSink, StreamSetup};
use limosa_page::{PageNumber, PageRange};
use limosa_snapshot::Manifest;
use limosa_stream::colo::ColoMessage;
use limosa_stream::{
    Command, Configuration, RamBlock, RecordEncoder, RecordKind, SectionHeader, SectionKind, ram, section,
};
use uuid::Uuid;

/// The answer to the base: SHUT of the return path, and READY.
pub const ANSWER_LENGTH: usize = 12;

const RAM: u32 = 2;

/// The RAM blocks.
fn blocks() -> [RamBlock; 2] {
    [RamBlock::new("ram", 8 * 4096), RamBlock::new("rom", 2 * 4096)]
}

/// A sink that checks that pages are inside their blocks, and keeps none.
#[derive(Default)]
pub struct Inside(Vec<RamBlock>);

impl Inside {
    fn check(&self, block: usize, pages: PageRange) {
        assert!(!pages.is_empty() && pages.end.0 <= self.0[block].pages());
    }
}

impl PageSink for Inside {
    fn begin(&mut self, start: &StreamSetup) -> Result<(), PageError> {
        self.0.clone_from(&start.blocks);
        Ok(())
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError> {
        self.check(block, PageRange::starting_at(first, pages.len() as u64));
        Ok(())
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<(), PageError> {
        self.check(block, pages);
        Ok(())
    }
}

/// Device sections of these bodies, with the byte that ends them.
fn sections(bodies: [&[u8]; 2]) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut bytes = Vec::new();
    for ((id, name), body) in [(3, "timer"), (4, "disk")].into_iter().zip(bodies) {
        let name = name.to_owned();
        SectionHeader { kind: SectionKind::Full, id, name, instance: 0, version: 1 }.encode(&mut bytes)?;
        bytes.extend_from_slice(body);
        section::encode_footer(id, &mut bytes);
    }
    section::encode_eof(&mut bytes);
    Ok(bytes)
}

/// A RAM section of type END with these pages; those that are a multiple of 4 are zero.
fn pages(records: &mut RecordEncoder, pages: &[(usize, u64)], out: &mut Vec<u8>) -> Result<(), Box<dyn Error>> {
    section::encode_end(RAM, out);
    for (block, page) in pages {
        let is_zero = page % 4 == 0;
        let kind = if is_zero { RecordKind::Zero } else { RecordKind::Page };
        records.append(kind, *block, page * 4096, out)?;
        out.resize(out.len() + if is_zero { 0 } else { 4096 }, 7);
    }
    ram::encode_eos(RAM, out);
    Ok(())
}

/// The base, and the encoder that continues behind it.
fn begun() -> Result<(Vec<u8>, RecordEncoder), Box<dyn Error>> {
    let mut records = RecordEncoder::new(&blocks())?;
    let mut base = Vec::new();
    Configuration::new("fuzz").encode(&mut base)?;
    Command::OpenReturnPath.encode(&mut base)?;
    Command::EnableColo.encode(&mut base)?;
    ram::encode_ram_start(RAM, &blocks(), &mut base)?;
    pages(&mut records, &[(0, 1), (1, 0)], &mut base)?;
    base.extend_from_slice(&sections([b"tick", b""])?);
    let json = br#"{"devices":[{"name":"timer","instance_id":0,"fields":[{"name":"t","type":"b","size":4}]},{"name":"disk","instance_id":0,"fields":[]}]}"#;
    section::encode_description(json, &mut base)?;
    Ok((base, records))
}

/// The base that every input comes behind.
///
/// # Errors
/// None: what is encoded is well-formed.
pub fn base() -> Result<Vec<u8>, Box<dyn Error>> {
    Ok(begun()?.0)
}

/// The greeting of a limosa, whose VM has a disk that belongs to the checkpoints, or none.
#[must_use]
pub fn hello(has_disk: bool) -> Vec<u8> {
    let disk = r#"{"device":"d","path":"/d","format":"raw","export":"d","control":"/c","keeper":"k","log":"00000000-0000-0000-0000-000000000001"}"#;
    let disks = if has_disk { disk } else { "" };
    let mut manifest = serde_json::to_value(Manifest::new()).unwrap_or_default();
    manifest["protected_disks"] = serde_json::from_str(&format!("[{disks}]")).unwrap_or_default();
    let hello = serde_json::json!({ "protection": Uuid::nil(), "manifest": manifest }).to_string();
    let length = u32::try_from(hello.len()).unwrap_or_default();
    [b"LIMOSA-P", &2_u32.to_be_bytes()[..], &length.to_be_bytes(), hello.as_bytes()].concat()
}

/// Returns seeds of what comes to a keeper: a greeting, a bare stream, checkpoints of a limosa with notes.
///
/// # Errors
/// None: what is encoded is well-formed.
pub fn keeper_seeds() -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    let mut seeds = vec![[&[0][..], &hello(true)].concat(), [&[0][..], &base()?].concat()];
    for (kind, checkpoints) in [1, 2, 3].into_iter().zip(self::seeds()?) {
        let mut bytes = vec![kind];
        for value in [(1, 1), (10, 1), (10, 2), (2, 0)] {
            ColoMessage::Note { kind: value.0, value: value.1 }.encode(&mut bytes);
        }
        bytes.extend_from_slice(&checkpoints);
        seeds.push(bytes);
    }
    Ok(seeds)
}

/// Returns seeds: no checkpoint, some, and one with a device that has grown.
///
/// # Errors
/// None: what is encoded is well-formed.
pub fn seeds() -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    let (_, mut records) = begun()?;
    let mut checkpoint = |written: &[(usize, u64)], disk: &[u8]| -> Result<Vec<u8>, Box<dyn Error>> {
        let mut bytes = Vec::new();
        ColoMessage::CheckpointRequest.encode(&mut bytes);
        ColoMessage::VmstateSend.encode(&mut bytes);
        Command::SwitchoverStart.encode(&mut bytes)?;
        pages(&mut records, written, &mut bytes)?;
        section::encode_eof(&mut bytes);
        let sections = sections([b"tock", disk])?;
        ColoMessage::VmstateSize(sections.len() as u64).encode(&mut bytes);
        bytes.extend_from_slice(&sections);
        Ok(bytes)
    };
    let some = [checkpoint(&[(1, 1), (0, 0)], b"")?, checkpoint(&[(0, 0), (0, 3)], b"")?, checkpoint(&[], b"")?];
    Ok(vec![Vec::new(), some.concat(), checkpoint(&[], b"requests")?])
}
