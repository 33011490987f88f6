//! Random requests of guests.

use std::ops::Range;

use limosa_storage::testing::SeededRandom;

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Read,
    /// With content of this number.
    Write(u64),
    /// The same, compressed: of whole clusters.
    WriteCompressed(u64),
    Zeroes {
        unmap: bool,
    },
    Discard,
    Flush,
}

/// Asks.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) chance: SeededRandom,
    /// Bytes of the disk.
    pub(crate) size: u64,
    /// Bytes of a cluster, around whose boundaries it asks most.
    pub(crate) cluster: u64,
    /// The unit of offsets and lengths.
    pub(crate) unit: u64,
    /// The number of the last write.
    pub(crate) written: u64,
    /// Whether some writes are compressed.
    pub(crate) compresses: bool,
}

impl Guest {
    pub(crate) fn new(seed: u64, size: u64, cluster: u64, unit: u64) -> Self {
        Self { chance: SeededRandom::new(seed), size, cluster, unit, written: 1, compresses: false }
    }

    /// A request, and the bytes it is about.
    pub(crate) fn asks(&mut self) -> (RequestKind, Range<u64>) {
        let range = self.range();
        let asked = match self.chance.below(100) {
            0..=29 => RequestKind::Read,
            30..=44 if self.compresses => {
                self.written += 1;
                let (begin, end) = (range.start / self.cluster, range.end.div_ceil(self.cluster));
                let range = begin * self.cluster..(end * self.cluster).min(self.size);
                return (RequestKind::WriteCompressed(self.written), range);
            }
            30..=79 => {
                self.written += 1;
                RequestKind::Write(self.written)
            }
            80..=87 => RequestKind::Zeroes { unmap: self.chance.one_in(2) },
            88..=94 => RequestKind::Discard,
            _ => return (RequestKind::Flush, 0..0),
        };
        (asked, range)
    }

    fn range(&mut self) -> Range<u64> {
        let clusters = self.size.div_ceil(self.cluster);
        // Half of them in a few clusters, where requests meet.
        let cluster =
            if self.chance.one_in(2) { self.chance.below(clusters.min(6)) } else { self.chance.below(clusters) };
        let inside = match self.chance.below(4) {
            0 => 0,
            1 => self.chance.below(self.cluster),
            2 => self.cluster.saturating_sub(self.chance.below(8) * self.unit),
            _ => self.chance.below(self.cluster) / 4096 * 4096,
        };
        let begin = (cluster * self.cluster + inside).min(self.size - self.unit) / self.unit * self.unit;
        let len = match self.chance.below(5) {
            0 => self.unit,
            1 => 4096,
            2 => self.chance.below(self.cluster),
            3 => self.cluster,
            _ => self.chance.below(3 * self.cluster.min(128 << 10)),
        };
        let end = begin + (len / self.unit * self.unit).max(self.unit);
        begin..end.min(self.size / self.unit * self.unit).max(begin)
    }
}

/// The content of write `number` at a place: every eight bytes say which write and where they belong, so that nothing
/// that is mixed up looks right.
pub(crate) fn content(number: u64, range: &Range<u64>) -> Vec<u8> {
    range.clone().map(|at| content_byte(number, at)).collect()
}

/// Every fourth write has nothing in it that can be compressed.
fn word(number: u64, at: u64) -> [u8; 8] {
    let place = if number % 4 == 3 { at / 8 } else { at / 512 };
    (((number << 40) | place).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1).to_le_bytes()
}

fn content_byte(number: u64, at: u64) -> u8 {
    word(number, at)[usize::try_from(at % 8).unwrap_or(0)]
}

/// Whether these whole words, at a multiple of 8, are the content of write `number`.
pub(crate) fn is_content(number: u64, start: u64, found: &[u8]) -> bool {
    (start..).step_by(8).zip(found.as_chunks::<8>().0).all(|(at, found)| word(number, at) == *found)
}
