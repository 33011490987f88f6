//! A small VM that comes by postcopy, and what its source sends.

use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};

use limosa_memory::{BlockOptions, GuestMemory};
use limosa_migrate::{IncomingVm, VmError};
use limosa_stream::{
    Command, Configuration, DeviceSections, OpaqueSection, RamBlock, RecordEncoder, RecordKind, postcopy, ram, section,
};

/// The blocks, by name and number of pages.
const BLOCKS: [(&str, u64); 2] = [("ram", 8), ("rom", 2)];

/// A VM that waits for its state, and takes any.
pub struct Vm {
    memory: GuestMemory,
    started: AtomicU32,
}

impl Vm {
    /// A VM whose memory is empty.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new() -> Result<Self, Box<dyn Error>> {
        let blocks = BLOCKS.map(|(name, pages)| BlockOptions::anonymous(name, pages * 4096).map());
        let blocks = blocks.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(Self { memory: GuestMemory::new(blocks)?, started: AtomicU32::new(0) })
    }

    /// How often it was started.
    pub fn started(&self) -> u32 {
        self.started.load(Ordering::SeqCst)
    }

    /// Reads all of its memory, which must have come.
    ///
    /// # Errors
    /// A part cannot be read.
    pub fn read(&self) -> Result<(), Box<dyn Error>> {
        for block in self.memory.blocks() {
            let mut bytes = vec![0; usize::try_from(block.pages().len() * 4096)?];
            block.read(0, &mut bytes)?;
        }
        Ok(())
    }
}

impl IncomingVm for Vm {
    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn load_device(&self, _: OpaqueSection<'_>) -> Result<(), VmError> {
        Ok(())
    }

    fn load_package(&self, _: &[u8]) -> Result<(), VmError> {
        Ok(())
    }

    fn start(&self) -> Result<(), VmError> {
        self.started.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// Returns seeds: a stream that is whole, one that breaks and is recovered, and one without postcopy. The first two
/// bytes say where the first connection breaks.
///
/// # Errors
/// None: what is encoded is well-formed.
pub fn seeds() -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    let blocks = BLOCKS.map(|(name, pages)| RamBlock::new(name, pages * 4096));
    let all: Vec<_> = (0..2_usize).flat_map(|block| (0..BLOCKS[block].1).map(move |page| (block, page))).collect();
    let records = |pages: &[(usize, u64)], out: &mut Vec<u8>| -> Result<(), Box<dyn Error>> {
        let mut encoder = RecordEncoder::new(&blocks)?;
        section::encode_part(2, out);
        for (block, page) in pages {
            let is_zero = page % 4 != 1;
            let kind = if is_zero { RecordKind::Zero } else { RecordKind::Page };
            encoder.append(kind, *block, page * 4096, out)?;
            out.resize(out.len() + if is_zero { 0 } else { 4096 }, 7);
        }
        ram::encode_eos(2, out);
        Ok(())
    };
    let mut devices = DeviceSections::new();
    devices.push("timer", 0, 1, b"tick")?;
    let begins = || -> Result<Vec<u8>, Box<dyn Error>> {
        let mut stream = Vec::new();
        postcopy::encode_postcopy_prologue(&Configuration::new("fuzz"), 2, &blocks, &[], &mut stream)?;
        postcopy::encode_packaged(&postcopy::postcopy_package(devices.bytes(), Some(4))?, &mut stream)?;
        Ok(stream)
    };
    let cut_at = |cut: usize, stream: &[u8]| -> Result<Vec<u8>, Box<dyn Error>> {
        Ok([&u16::try_from(cut)?.to_le_bytes(), stream].concat())
    };
    let mut whole = begins()?;
    records(&all, &mut whole)?;
    section::encode_eof(&mut whole);
    let mut broken = begins()?;
    records(&all[..5], &mut broken)?;
    let cut = broken.len();
    for (name, _) in BLOCKS {
        Command::ReceiveBitmap { block: name.to_owned() }.encode(&mut broken)?;
    }
    Command::PostcopyResume.encode(&mut broken)?;
    records(&all[5..], &mut broken)?;
    section::encode_eof(&mut broken);
    let mut plain = Vec::new();
    Configuration::new("fuzz").encode(&mut plain)?;
    ram::encode_ram_start(2, &blocks, &mut plain)?;
    records(&all, &mut plain)?;
    section::encode_end(2, &mut plain);
    ram::encode_eos(2, &mut plain);
    plain.extend_from_slice(devices.bytes());
    section::encode_eof(&mut plain);
    Ok(vec![cut_at(whole.len(), &whole)?, cut_at(cut, &broken)?, cut_at(plain.len(), &plain)?])
}
