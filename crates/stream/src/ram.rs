//! RAM blocks and RAM records, written.
//!
//! The body of a RAM section is a row of 64-bit words, `offset in block | flags`, with payloads; a word with the flag
//! EOS ends it. The block that a record without a name means is a state of the *channel*, not of the section:
//! [`RecordEncoder`] keeps it for one channel, so a name goes out only where the block changes.

use crate::cursor::put_name;
use crate::error::EncodeError;
use crate::section;
use limosa_page::to_u64;
use std::collections::HashSet;

pub use limosa_page::{PAGE_LEN, PAGE_SIZE};

/// Flag: the page is all zero; payload is the name unless CONTINUE, and one byte 0.
pub const FLAG_ZERO: u64 = 0x002;
/// Flag: the block list follows; START only.
pub const FLAG_MEM_SIZE: u64 = 0x004;
/// Flag: a page; payload is the name unless CONTINUE, and 4096 bytes.
pub const FLAG_PAGE: u64 = 0x008;
/// Flag: end of the section body.
pub const FLAG_EOS: u64 = 0x010;
/// Flag: same block as the record before.
pub const FLAG_CONTINUE: u64 = 0x020;
/// Flag: a page delta (capability `xbzrle`).
pub const FLAG_XBZRLE: u64 = 0x040;
/// Flag: RDMA.
pub const FLAG_HOOK: u64 = 0x080;
/// Flag: a compressed page (QEMU before 9.1).
pub const FLAG_COMPRESS_PAGE: u64 = 0x100;
/// Flag: join with the multifd channels.
pub const FLAG_MULTIFD_FLUSH: u64 = 0x200;
/// The bits of a word that are flags; the rest is a byte offset.
pub const FLAGS_MASK: u64 = 0xfff;
/// Name of the RAM section.
pub const RAM: &str = "ram";
/// Version of the RAM section.
pub const RAM_VERSION: u32 = 4;
/// Most RAM blocks in a stream.
pub const BLOCKS_LIMIT: usize = 4096;
/// Longest record without its page: word, name with length byte, fill byte.
pub const RECORD_LIMIT: usize = 8 + 256 + 1;

/// One RAM block as the START section lists it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RamBlock {
    /// QEMU's idstr, e.g. `pc.ram`.
    pub name: String,
    /// Length in bytes, a multiple of 4096.
    pub used_length: u64,
    /// Bytes of a host page, where the stream says it: postcopy with a hugetlb block.
    pub page_size: Option<u64>,
    /// Address inside the containing region, where the stream says it: capability `x-ignore-shared`.
    pub address: Option<u64>,
}

impl RamBlock {
    /// A block of `used_length` bytes without the optional fields.
    pub fn new(name: impl Into<String>, used_length: u64) -> Self {
        Self { name: name.into(), used_length, page_size: None, address: None }
    }

    /// Number of 4 KiB pages.
    pub fn pages(&self) -> u64 {
        self.used_length / PAGE_SIZE
    }

    /// Appends name and length, then what else is given.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        put_name("RAM block", &self.name, out)?;
        out.extend_from_slice(&self.used_length.to_be_bytes());
        for field in [self.page_size, self.address].into_iter().flatten() {
            out.extend_from_slice(&field.to_be_bytes());
        }
        Ok(())
    }
}

/// Checks a block list as a whole: number, names, lengths. The sum of the lengths in bytes.
///
/// # Errors
/// The first rule that the list breaks.
pub fn check_blocks(blocks: &[RamBlock]) -> Result<u64, EncodeError> {
    if blocks.len() > BLOCKS_LIMIT {
        let value = to_u64(blocks.len());
        return Err(EncodeError::Number { what: "number of RAM blocks", value, rule: "at most 4096" });
    }
    let mut names = HashSet::with_capacity(blocks.len());
    let mut total = 0u64;
    for block in blocks {
        if block.name.is_empty() || block.name.len() > 255 {
            return Err(EncodeError::Name { what: "RAM block", name: block.name.clone(), limit: 255 });
        }
        if !names.insert(block.name.as_str()) {
            return Err(EncodeError::DuplicateBlock { name: block.name.clone() });
        }
        let (what, value) = ("length of a RAM block", block.used_length);
        if value % PAGE_SIZE != 0 {
            return Err(EncodeError::Number { what, value, rule: "must be a multiple of 4096" });
        }
        total = total.checked_add(value).filter(|total| *total < 1 << 62).ok_or(EncodeError::Number {
            what: "sum of the RAM block lengths",
            value,
            rule: "must stay below 2^62",
        })?;
    }
    Ok(total)
}

/// Appends a whole START section of RAM: header, block list, EOS, footer.
///
/// # Errors
/// What [`check_blocks`] finds.
pub fn encode_ram_start(section_id: u32, blocks: &[RamBlock], out: &mut Vec<u8>) -> Result<(), EncodeError> {
    encode_ram_layout(section_id, blocks, out)?;
    encode_eos(section_id, out);
    Ok(())
}

/// As [`encode_ram_start`], without the EOS and the footer: the section stays open, for a [join
/// point](encode_multifd_flush).
///
/// # Errors
/// The same.
pub fn encode_ram_layout(section_id: u32, blocks: &[RamBlock], out: &mut Vec<u8>) -> Result<(), EncodeError> {
    let total = check_blocks(blocks)?;
    section::encode_start(section_id, RAM, 0, RAM_VERSION, out)?;
    out.extend_from_slice(&(total | FLAG_MEM_SIZE).to_be_bytes());
    for block in blocks {
        block.encode(out)?;
    }
    Ok(())
}

/// Appends the flag of a sync point: the reader continues when every multifd channel has reached its next SYNC packet.
pub fn encode_multifd_flush(out: &mut Vec<u8>) {
    out.extend_from_slice(&FLAG_MULTIFD_FLUSH.to_be_bytes());
}

/// Appends the end of a RAM section: the EOS flag and the footer.
pub fn encode_eos(section_id: u32, out: &mut Vec<u8>) {
    out.extend_from_slice(&FLAG_EOS.to_be_bytes());
    section::encode_footer(section_id, out);
}

/// The kind of a RAM record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecordKind {
    /// 4096 bytes follow.
    Page,
    /// The page is zero.
    Zero,
}

/// Writes page records of one channel.
///
/// The name of a block is written when the block changes and left out otherwise, so the records must be sent in the
/// order in which they were encoded. Call [`reset`](Self::reset) when the reader may have forgotten the current block.
#[derive(Debug, Clone)]
pub struct RecordEncoder {
    blocks: Vec<(Box<[u8]>, u64)>,
    current: Option<usize>,
}

impl RecordEncoder {
    /// For a channel whose START section listed `blocks`.
    ///
    /// # Errors
    /// What [`check_blocks`] finds.
    pub fn new(blocks: &[RamBlock]) -> Result<Self, EncodeError> {
        check_blocks(blocks)?;
        let mut named = Vec::with_capacity(blocks.len());
        for block in blocks {
            let mut name = Vec::with_capacity(1 + block.name.len());
            put_name("RAM block", &block.name, &mut name)?;
            named.push((name.into_boxed_slice(), block.used_length));
        }
        Ok(Self { blocks: named, current: None })
    }

    /// The next record will carry its block's name: at the start of postcopy and after a recovery.
    pub fn reset(&mut self) {
        self.current = None;
    }

    /// Writes one record without its page into `out`; the number of bytes written. Payload of [`RecordKind::Page`]: the
    /// 4096 bytes that the caller sends behind it.
    ///
    /// # Errors
    /// No such block, or `offset` (bytes in the block) is not the beginning of one of its pages.
    #[inline]
    pub fn encode(
        &mut self,
        kind: RecordKind,
        block: usize,
        offset: u64,
        out: &mut [u8; RECORD_LIMIT],
    ) -> Result<usize, EncodeError> {
        let Some((name, used_length)) = self.blocks.get(block) else {
            let value = to_u64(block);
            return Err(EncodeError::Number { what: "index of a RAM block", value, rule: "no such block" });
        };
        if offset >= *used_length || !offset.is_multiple_of(PAGE_SIZE) {
            let rule = "must be the beginning of a page inside the block";
            return Err(EncodeError::Number { what: "offset in a RAM block", value: offset, rule });
        }
        let flag = match kind {
            RecordKind::Page => FLAG_PAGE,
            RecordKind::Zero => FLAG_ZERO,
        };
        let named = self.current != Some(block);
        let word = offset | flag | if named { 0 } else { FLAG_CONTINUE };
        let mut length = 8;
        out[..8].copy_from_slice(&word.to_be_bytes());
        if named {
            // At most 256 bytes: `new` let only such names in.
            out[8..8 + name.len()].copy_from_slice(name);
            length += name.len();
            self.current = Some(block);
        }
        if kind == RecordKind::Zero {
            out[length] = 0;
            length += 1;
        }
        Ok(length)
    }

    /// As [`encode`](Self::encode), appended to `out`.
    ///
    /// # Errors
    /// The same.
    #[inline]
    pub fn append(
        &mut self,
        kind: RecordKind,
        block: usize,
        offset: u64,
        out: &mut Vec<u8>,
    ) -> Result<usize, EncodeError> {
        let mut record = [0; RECORD_LIMIT];
        let length = self.encode(kind, block, offset, &mut record)?;
        out.extend_from_slice(&record[..length]);
        Ok(length)
    }
}
