//! The layout of a mapped-ram file.
//!
//! Fact (QEMU docs: migration/mapped-ram): a mapped-ram file is a stream whose RAM START section has holes. Behind the
//! name and length of each block follows a header that says where the block's bitmap and its pages are; the next block
//! follows behind the pages, so the blocks form a chain. [`Layout::plan`] makes such a chain the way QEMU does,
//! [`Layout::decode`] follows that of any writer, and both end at [`tail_offset`](Layout::tail_offset), where the
//! device sections begin. All offsets are absolute in the file.
//!
//! The law: after a successful `decode` no part of the file is two things at once, and every page and bitmap byte that
//! the layout names lies inside the file.

use crate::configuration::Configuration;
use crate::cursor::{Cursor, Stop};
use crate::decoder::{DecoderOptions, Event};
use crate::error::{EncodeError, ErrorKind, StreamError};
use crate::ram::{self, FLAG_MEM_SIZE, PAGE_SIZE, RAM, RAM_VERSION, RamBlock};
use crate::section;
use crate::walk::{ReadAt, StreamWalk, WalkError};
use limosa_page::{BrokenInvariant, invariant, to_u64};
use std::ops::Range;

/// QEMU puts the pages of a block at a multiple of this.
pub const PAGES_ALIGNMENT: u64 = 1 << 20;
/// Bytes of the header behind a block's name and length.
pub const HEADER_LENGTH: usize = 28;
/// The version of that header.
pub const HEADER_VERSION: u32 = 1;

/// Bytes of early device sections after which no more are read: far more than all virtio-mem devices of a VM have.
pub const EARLY_SECTIONS_LIMIT: usize = 16 << 20;

/// The 28 bytes behind a block's name and length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MappedHeader {
    bitmap_offset: u64,
    pages_offset: u64,
}

impl MappedHeader {
    pub(crate) fn read(cursor: &mut Cursor<'_>) -> Result<Self, Stop> {
        let begin = cursor.at();
        let version = cursor.be32()?;
        let page_size = cursor.be64()?;
        let header = Self { bitmap_offset: cursor.be64()?, pages_offset: cursor.be64()? };
        if version != HEADER_VERSION {
            let error_kind = ErrorKind::expected("version 1 of the mapped-ram block header", version);
            return Err(Stop::Fail { at: begin, error_kind });
        }
        if page_size != PAGE_SIZE {
            let error_kind = ErrorKind::expected("page size 4096 in the mapped-ram block header", page_size);
            return Err(Stop::Fail { at: begin, error_kind });
        }
        Ok(header)
    }

    /// The block with its places: whole numbers of pages, no overflow, nothing before the stream's beginning.
    pub(crate) fn place(self, block: &RamBlock, header_offset: u64, base: u64) -> Result<MappedBlock, ErrorKind> {
        let placed = MappedBlock {
            block: block.clone(),
            header_offset,
            bitmap_offset: self.bitmap_offset,
            pages_offset: self.pages_offset,
            pages: block.pages(),
        };
        let bad = |what: String, start: u64, length: u64, problem: &str| ErrorKind::LayoutConflict {
            what,
            start,
            end: start.saturating_add(length),
            problem: problem.to_owned(),
        };
        let (bitmap, pages) = (placed.bitmap_length(), block.used_length);
        for (what, start, length) in
            [(placed.bitmap_name(), self.bitmap_offset, bitmap), (placed.pages_name(), self.pages_offset, pages)]
        {
            if start < base {
                return Err(bad(what, start, length, "begins before the stream"));
            }
            if start.checked_add(length).is_none_or(|end| end >= 1 << 63) {
                return Err(bad(what, start, length, "lies beyond any file"));
            }
        }
        if !self.pages_offset.is_multiple_of(PAGE_SIZE) {
            return Err(bad(placed.pages_name(), self.pages_offset, pages, "do not begin at a multiple of 4096"));
        }
        Ok(placed)
    }
}

/// One RAM block and its places in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MappedBlock {
    /// Name and length.
    pub block: RamBlock,
    /// Where the block's name (its length byte) is.
    pub header_offset: u64,
    /// Where its bitmap begins: bit i % 8 of byte i / 8 is set if page i is stored.
    pub bitmap_offset: u64,
    /// Where page 0 lies or would lie, a multiple of 4096.
    pub pages_offset: u64,
    /// Number of pages.
    pub pages: u64,
}

impl MappedBlock {
    /// Bytes of the bitmap: whole 64-bit words.
    pub fn bitmap_length(&self) -> u64 {
        self.pages.div_ceil(64) * 8
    }

    /// The bitmap's place.
    pub fn bitmap_range(&self) -> Range<u64> {
        self.bitmap_offset..self.bitmap_offset + self.bitmap_length()
    }

    /// The pages' place, holes included.
    pub fn pages_range(&self) -> Range<u64> {
        self.pages_offset..self.end()
    }

    /// Where the page at byte `offset` of the block lies, if the block has it.
    pub fn file_offset(&self, offset: u64) -> Option<u64> {
        (offset < self.block.used_length).then(|| self.pages_offset + offset)
    }

    /// Returns the offset behind the pages, where the chain continues.
    pub fn end(&self) -> u64 {
        self.pages_offset + self.block.used_length
    }

    /// Bytes of name, length and header.
    fn header_range(&self) -> Range<u64> {
        let length = 1 + self.block.name.len() + 8 + 8 * usize::from(self.block.address.is_some()) + HEADER_LENGTH;
        self.header_offset..self.header_offset + to_u64(length)
    }

    fn bitmap_name(&self) -> String {
        format!("bitmap of RAM block {:?}", self.block.name)
    }

    fn pages_name(&self) -> String {
        format!("pages of RAM block {:?}", self.block.name)
    }
}

/// Bytes and the file offset they belong at.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Chunk {
    /// Absolute file offset.
    pub offset: u64,
    /// The bytes to write there.
    pub bytes: Vec<u8>,
}

/// The layout of a mapped-ram file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Where the stream begins in the file.
    pub base: u64,
    /// The configuration record, with the capability `mapped-ram`.
    pub configuration: Configuration,
    /// The source's number of the RAM section.
    pub section_id: u32,
    /// The RAM blocks in the order of the file.
    pub blocks: Vec<MappedBlock>,
    /// Device sections between the RAM blocks and the rest: see [`Event::EarlyDevice`].
    pub early_sections: Vec<u8>,
    /// Where the device sections begin (the byte 0x04 of the first one, once it is written).
    pub tail_offset: u64,
}

impl Layout {
    /// Plans a file that begins with the stream: offsets as QEMU chooses them, bitmap behind the block's header, pages
    /// at the next multiple of 1 MiB.
    ///
    /// The capability `mapped-ram` is added to `configuration`; page sizes and addresses of `blocks` are dropped.
    ///
    /// # Errors
    /// Blocks or a configuration that the format cannot hold.
    pub fn plan(configuration: &Configuration, section_id: u32, blocks: &[RamBlock]) -> Result<Self, EncodeError> {
        Self::plan_at(0, configuration, section_id, blocks)
    }

    /// As [`plan`](Self::plan), for a stream that begins at file offset `base`.
    ///
    /// # Errors
    /// The same.
    pub fn plan_at(
        base: u64,
        configuration: &Configuration,
        section_id: u32,
        blocks: &[RamBlock],
    ) -> Result<Self, EncodeError> {
        ram::check_blocks(blocks)?;
        if base >= 1 << 61 {
            return Err(EncodeError::Number { what: "file offset of the stream", value: base, rule: "below 2^61" });
        }
        let mut configuration = configuration.clone().with_mapped_ram();
        // Addresses belong to a capability that the file does not have: its loader would not expect them.
        configuration.capabilities.retain(|capability| capability != crate::configuration::IGNORE_SHARED);
        let mut layout =
            Self { base, configuration, section_id, blocks: Vec::new(), early_sections: Vec::new(), tail_offset: 0 };
        let mut prologue = Vec::new();
        layout.encode_prologue(blocks, &mut prologue)?;
        let mut at = base + to_u64(prologue.len());
        for block in blocks {
            let block = RamBlock::new(block.name.clone(), block.used_length);
            let mut placed =
                MappedBlock { pages: block.pages(), block, header_offset: at, bitmap_offset: 0, pages_offset: 0 };
            placed.bitmap_offset = placed.header_range().end;
            placed.pages_offset = placed.bitmap_range().end.next_multiple_of(PAGES_ALIGNMENT);
            at = placed.end();
            layout.blocks.push(placed);
        }
        let mut epilogue = Vec::new();
        ram::encode_eos(section_id, &mut epilogue);
        layout.tail_offset = at + to_u64(epilogue.len());
        layout.check_order()?;
        Ok(layout)
    }

    /// Asserts that the parts of a planned file follow each other without overlaps.
    fn check_order(&self) -> Result<(), BrokenInvariant> {
        let mut end = self.base;
        for placed in &self.blocks {
            for part in [placed.header_range(), placed.bitmap_range(), placed.pages_range()] {
                invariant(end <= part.start && part.start <= part.end, "parts of a planned file are in order")?;
                end = part.end;
            }
        }
        invariant(end < self.tail_offset, "the device sections of a planned file are behind its RAM blocks")
    }

    /// Puts device sections behind the RAM blocks, before the rest of them.
    pub fn add_early_sections(&mut self, sections: &[u8]) {
        self.early_sections.extend_from_slice(sections);
        self.tail_offset += to_u64(sections.len());
    }

    /// The bytes that make the file a stream, besides pages, bitmaps and device sections: the beginning with the first
    /// block's header, each further block's header, the end of the RAM section, and early device sections.
    ///
    /// # Errors
    /// Blocks or a configuration that the format cannot hold; none for a layout that came from `plan`.
    pub fn chunks(&self) -> Result<Vec<Chunk>, EncodeError> {
        let blocks: Vec<RamBlock> = self.blocks.iter().map(|placed| placed.block.clone()).collect();
        let mut chunk = Chunk { offset: self.base, bytes: Vec::new() };
        self.encode_prologue(&blocks, &mut chunk.bytes)?;
        let mut chunks = Vec::with_capacity(self.blocks.len() + 1);
        for placed in &self.blocks {
            placed.block.encode(&mut chunk.bytes)?;
            chunk.bytes.extend_from_slice(&HEADER_VERSION.to_be_bytes());
            chunk.bytes.extend_from_slice(&PAGE_SIZE.to_be_bytes());
            chunk.bytes.extend_from_slice(&placed.bitmap_offset.to_be_bytes());
            chunk.bytes.extend_from_slice(&placed.pages_offset.to_be_bytes());
            chunks.push(std::mem::replace(&mut chunk, Chunk { offset: placed.end(), bytes: Vec::new() }));
        }
        ram::encode_eos(self.section_id, &mut chunk.bytes);
        chunk.bytes.extend_from_slice(&self.early_sections);
        chunks.push(chunk);
        Ok(chunks)
    }

    /// From the file header to the total RAM size.
    fn encode_prologue(&self, blocks: &[RamBlock], out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let total = ram::check_blocks(blocks)?;
        self.configuration.encode(out)?;
        section::encode_start(self.section_id, RAM, 0, RAM_VERSION, out)?;
        out.extend_from_slice(&(total | FLAG_MEM_SIZE).to_be_bytes());
        Ok(())
    }

    /// Reads the layout of a file of `file_length` bytes whose stream begins at `base`: follows the chain of blocks and
    /// passes over what may be between them and the first device section (sections without records, the switchover
    /// command).
    ///
    /// # Errors
    /// A read that failed; anything that is not a mapped-ram file; parts outside the file or upon one another.
    pub fn decode<R: ReadAt>(source: R, base: u64, file_length: u64) -> Result<Self, WalkError> {
        let mut walk = StreamWalk::new(source, DecoderOptions { base, ..DecoderOptions::default() });
        let mut layout = Self {
            base,
            configuration: Configuration::default(),
            section_id: 0,
            blocks: Vec::new(),
            early_sections: Vec::new(),
            tail_offset: 0,
        };
        let mut chain_end = base;
        loop {
            match walk.next_event()? {
                Event::Configuration(configuration) => {
                    if !configuration.has_capability(crate::configuration::MAPPED_RAM) {
                        let what = "the capability mapped-ram in the configuration";
                        let found =
                            format_args!("a stream of machine {:?} without it", configuration.machine).to_string();
                        return Err(StreamError::new(0, "configuration", ErrorKind::expected(what, found)).into());
                    }
                    layout.configuration = configuration;
                }
                Event::SectionStart(header) => layout.section_id = header.id,
                Event::MappedRamBlock(placed) => {
                    // Before the walk continues there: a chain that leaves the file must not be reported as a truncated
                    // read.
                    inside(&placed, file_length)?;
                    chain_end = placed.end();
                    layout.blocks.push(placed);
                }
                Event::Command(command @ (crate::Command::PostcopyAdvise(_) | crate::Command::RamDiscard { .. })) => {
                    let error_kind =
                        ErrorKind::expected("no postcopy command in a mapped-ram file", format_args!("{command:?}"));
                    return Err(StreamError::new(walk.offset(), "between sections", error_kind).into());
                }
                Event::EarlyDevice(section) if layout.early_sections.len() <= EARLY_SECTIONS_LIMIT => {
                    layout.early_sections.extend(section);
                }
                Event::EarlyDevice(_) => {
                    let error_kind = ErrorKind::TooLarge {
                        what: "early device sections",
                        value: to_u64(layout.early_sections.len()),
                        limit: to_u64(EARLY_SECTIONS_LIMIT),
                    };
                    return Err(StreamError::new(walk.offset(), "between sections", error_kind).into());
                }
                Event::DeviceTail => {
                    layout.tail_offset = walk.offset();
                    layout.check_overlaps(chain_end)?;
                    return Ok(layout);
                }
                Event::EndOfStream => {
                    let error_kind = ErrorKind::expected("device sections", "the end of the sections");
                    return Err(StreamError::new(walk.offset(), "between sections", error_kind).into());
                }
                _ => {}
            }
        }
    }

    /// Checks that no two parts share a byte, and that no part is behind the end of the chain, where the device
    /// sections are.
    fn check_overlaps(&self, chain_end: u64) -> Result<(), StreamError> {
        let prologue_end = self.blocks.first().map_or(chain_end, |placed| placed.header_offset);
        let mut parts: Vec<(Range<u64>, String)> = vec![(self.base..prologue_end, "file header".to_owned())];
        for placed in &self.blocks {
            parts.push((placed.header_range(), format!("header of RAM block {:?}", placed.block.name)));
            parts.push((placed.bitmap_range(), placed.bitmap_name()));
            parts.push((placed.pages_range(), placed.pages_name()));
        }
        parts.retain(|(range, _)| !range.is_empty());
        parts.sort_by_key(|(range, _)| range.start);
        let mut before: Option<&(Range<u64>, String)> = None;
        for part in &parts {
            let (range, what) = part;
            let problem = match before {
                Some((other, name)) if range.start < other.end => {
                    Some(format!("overlaps {name} at {:#x}..{:#x}", other.start, other.end))
                }
                _ if range.end > chain_end => Some(format!("reaches behind the last block's pages at {chain_end:#x}")),
                _ => None,
            };
            if let Some(problem) = problem {
                let error_kind =
                    ErrorKind::LayoutConflict { what: what.clone(), start: range.start, end: range.end, problem };
                return Err(StreamError::new(range.start, "mapped-ram layout", error_kind));
            }
            before = Some(part);
        }
        Ok(())
    }
}

fn inside(placed: &MappedBlock, file_length: u64) -> Result<(), StreamError> {
    for (range, what) in [(placed.bitmap_range(), placed.bitmap_name()), (placed.pages_range(), placed.pages_name())] {
        if range.end > file_length {
            let error_kind = ErrorKind::BeyondFile { what, end: range.end, file_length };
            return Err(StreamError::new(placed.header_offset, "mapped-ram block header", error_kind));
        }
    }
    Ok(())
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    fn planned() -> Layout {
        let blocks = [RamBlock::new("pc.ram", 1 << 20), RamBlock::new("vga.vram", 1 << 16)];
        Layout::plan(&Configuration::new("pc-i440fx-10.0"), 2, &blocks).unwrap()
    }

    #[test]
    #[should_panic(expected = "parts of a planned file are in order")]
    fn blocks_that_overlap_in_a_plan_are_a_broken_invariant() {
        let mut layout = planned();
        layout.blocks[1].pages_offset = layout.blocks[0].pages_offset;
        let _ = layout.check_order();
    }

    #[test]
    #[should_panic(expected = "the device sections of a planned file are behind its RAM blocks")]
    fn device_sections_among_the_blocks_of_a_plan_are_a_broken_invariant() {
        let mut layout = planned();
        layout.tail_offset = layout.blocks[1].pages_offset;
        let _ = layout.check_order();
    }
}
