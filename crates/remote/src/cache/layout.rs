//! A file of the cache: the blocks of one version of one object.
//!
//! | bytes | what |
//! |---|---|
//! | 0 | header: magic, block size, length of the object, SHA-256 of its identity, CRC-32C of these |
//! | 4096 | a table with an entry of 16 bytes for each block: CRC-32C of the block, CRC-32C of identity, number and that, minute of its last use, zeros |
//! | the next multiple of 4096 | the blocks, each at its place; those that are not there are holes |
//!
//! All numbers are little-endian. The file is the cache's own, and no one else reads it: it is no format of an image.

use std::ops::Range;

use sha2::{Digest as _, Sha256};

/// The beginning of each file; the last byte is the version of this layout.
const MAGIC: [u8; 16] = *b"limosa-blocks\0\0\x01";

/// The length of the header with its checksum.
const HEADER: usize = 16 + 8 + 8 + 32 + 4;

/// Alignment of table and blocks.
const ALIGN: u64 = 4096;

/// The length of an entry.
pub(super) const ENTRY: u64 = 16;

/// The place of the minute of the last use in an entry.
pub(super) const USED: u64 = 8;

/// The most blocks of a file: those of 64 TiB in blocks of the usual size. A table of more, which a store that lies
/// about a length could ask for, would take too long to look through.
const BLOCKS_MAX: u64 = 1 << 28;

/// The shape of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    identity: [u8; 32],
    length: u64,
    block_size: u64,
}

impl Layout {
    /// The shape of the file of an object. `None`: it has no blocks, or too many.
    pub(super) fn new(identity: &str, length: u64, block_size: u64) -> Option<Self> {
        let most = BLOCKS_MAX.checked_mul(block_size)?;
        let layout = Self { identity: Sha256::digest(identity).into(), length, block_size };
        (length > 0 && length <= most).then_some(layout)
    }

    /// The file's name.
    pub(super) fn name(&self) -> String {
        let numbers = [self.length.to_le_bytes(), self.block_size.to_le_bytes()].concat();
        let hash = Sha256::digest([&self.identity[..], &numbers].concat());
        hash.iter().take(20).map(|byte| format!("{byte:02x}")).collect()
    }

    /// The file's beginning.
    pub(super) fn header(&self) -> Vec<u8> {
        let mut header = MAGIC.to_vec();
        header.extend(self.block_size.to_le_bytes());
        header.extend(self.length.to_le_bytes());
        header.extend(self.identity);
        header.extend(crc32c::crc32c(&header).to_le_bytes());
        debug_assert_eq!(header.len(), HEADER);
        header
    }

    /// The shape of the file with this beginning. `None`: it is not a file's.
    pub(super) fn parse(header: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(u64::from_le_bytes(header.get(at..at + 8)?.try_into().ok()?));
        let (block_size, length) = (number(16)?, number(24)?);
        let layout = Self { identity: header.get(32..64)?.try_into().ok()?, length, block_size };
        let most = BLOCKS_MAX.checked_mul(block_size)?;
        (layout.header() == header && (1..=most).contains(&length)).then_some(layout)
    }

    /// The number of blocks.
    pub(super) fn blocks(&self) -> u64 {
        self.length.div_ceil(self.block_size)
    }

    /// The place of a block's entry.
    pub(super) fn entry(&self, block: u64) -> u64 {
        ALIGN + block * ENTRY
    }

    /// The place of a block.
    pub(super) fn data(&self, block: u64) -> Range<u64> {
        let start = (ALIGN + self.blocks() * ENTRY).next_multiple_of(ALIGN) + block * self.block_size;
        start..start + self.block_size.min(self.length.saturating_sub(block * self.block_size))
    }

    /// The entry of a block with these bytes.
    pub(super) fn entry_of(&self, block: u64, bytes: &[u8], minute: u32) -> [u8; 16] {
        let sum = crc32c::crc32c(bytes);
        let mut entry = [0; 16];
        for (place, value) in entry.chunks_exact_mut(4).zip([sum, self.check(block, sum), minute]) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        entry
    }

    /// The checksum of a block and the minute of its last use, out of its entry; `None`: it is not there.
    pub(super) fn parse_entry(&self, block: u64, entry: &[u8]) -> Option<(u32, u32)> {
        let word = |index: usize| Some(u32::from_le_bytes(entry.get(index * 4..index * 4 + 4)?.try_into().ok()?));
        let (sum, check, minute) = (word(0)?, word(1)?, word(2)?);
        (block < self.blocks() && check == self.check(block, sum)).then_some((sum, minute))
    }

    /// The checksum of an entry: never that of an entry of zeros, which is a hole.
    fn check(&self, block: u64, sum: u32) -> u32 {
        let check = crc32c::crc32c_append(crc32c::crc32c(&self.identity), &block.to_le_bytes());
        crc32c::crc32c_append(check, &sum.to_le_bytes()).max(1)
    }
}

/// The length of a file's beginning.
pub(super) const fn header_length() -> usize {
    HEADER
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_do_not_overlap_and_hold_what_they_must() {
        let layout = Layout::new("a", 1_000_000, 4096).unwrap();
        assert_eq!((layout.blocks(), layout.entry(0), layout.data(0)), (245, 4096, 8192..12288));
        assert_eq!(layout.data(244), 8192 + 244 * 4096..8192 + 1_000_000);
        assert!(layout.entry(245) <= layout.data(0).start);
        assert!(header_length() < 4096 && layout.header().len() == header_length());
        assert!(Layout::new("a", u64::MAX, 4096).is_none() && Layout::new("a", 0, 4096).is_none());
        assert!(Layout::new("a", 4096 << 28, 4096).is_some() && Layout::new("a", (4096 << 28) + 1, 4096).is_none());
        assert_ne!(layout.name(), Layout::new("a", 1_000_000, 8192).unwrap().name());
        assert_eq!(Layout::parse(&layout.header()), Some(layout));
        let mut header = layout.header();
        header[17] ^= 1;
        assert_eq!((Layout::parse(&header), Layout::parse(&[])), (None, None));
    }

    #[test]
    fn an_entry_is_that_of_one_block_of_one_object() {
        let layout = Layout::new("a", 1_000_000, 4096).unwrap();
        let entry = layout.entry_of(3, b"contents", 7);
        assert_eq!(layout.parse_entry(3, &entry), Some((crc32c::crc32c(b"contents"), 7)));
        assert_eq!(layout.parse_entry(4, &entry), None);
        assert_eq!(Layout::new("b", 1_000_000, 4096).unwrap().parse_entry(3, &entry), None);
        assert_eq!(layout.parse_entry(3, &[0; 16]), None);
        assert_eq!(layout.parse_entry(3, &entry[..7]), None);
        assert_eq!(layout.parse_entry(u64::MAX, &entry), None);
    }
}
