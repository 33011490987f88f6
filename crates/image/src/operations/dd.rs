//! The part of a disk that is named by blocks.
//!
//! Law: as in `qemu-img dd`, a count of blocks ends at that block of the disk, whether blocks are skipped or not.
//! `dd(1)` counts from the first block after the skipped ones.

use std::ops::Range;

/// Blocks of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Blocks {
    /// Bytes of a block.
    pub size: u64,
    /// Blocks before the first one.
    pub skip: u64,
    /// Blocks up to the end, with the skipped ones; `None`: up to the end of the disk.
    pub count: Option<u64>,
}

impl Blocks {
    /// All blocks of this size.
    #[must_use]
    pub const fn new(size: u64) -> Self {
        Self { size, skip: 0, count: None }
    }

    /// Returns the bytes that they are, in any disk: the beginning may be past the end.
    #[must_use]
    pub fn window(&self) -> Range<u64> {
        let end = self.count.map_or(u64::MAX, |count| count.saturating_mul(self.size));
        self.skip.saturating_mul(self.size)..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_counted_from_the_beginning_of_the_disk() {
        let blocks = |skip, count| Blocks { size: 512, skip, count }.window();
        assert_eq!(blocks(0, None), 0..u64::MAX);
        assert_eq!(blocks(2, Some(3)), 1024..1536);
        assert_eq!(blocks(u64::MAX, Some(u64::MAX)), u64::MAX..u64::MAX);
        let past = blocks(3, Some(1));
        assert_eq!((past.start, past.end), (1536, 512));
    }
}
