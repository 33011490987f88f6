//! The bytes of a working set's file, little-endian:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 | magic `limosa\x1aw` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | restore mode of the recorded guest: 1 mapped, 2 lazy; 3: not known, it was in an image |
//! | 16 | 16 | id of the snapshot |
//! | 32 | 8 | when the recording began, in seconds since 1970 |
//! | 40 | 8 | how long it took, in milliseconds |
//! | 48 | 8 | number of ranges, at most 262,144 |
//! | 56 | 16 each | ranges: first page (u64), RAM block in the snapshot's order (u32), number of pages (u32) |
//! | at the end | 4 | crc32c of everything before |

use std::time::Duration;

use limosa_migrate::stored::BlockRange;
use limosa_page::{PageBitmap, PageNumber, PageRange, to_millis, to_u64, to_usize};
use uuid::Uuid;

use super::{RecordedMode, WorkingSet, empty_like, note_once};
use crate::error::InvalidWorkingSet;
use crate::sidecar::MAGIC;

const VERSION: u32 = 1;
const HEADER_LEN: usize = 56;
const RANGE_LEN: usize = 16;
/// Most ranges of a working set.
pub(super) const RANGES_MAX: usize = 1 << 18;
/// Longest file that is read.
pub(super) const LENGTH_MAX: u64 = (HEADER_LEN + RANGES_MAX * RANGE_LEN + 4) as u64;

/// Returns the bytes of a working set.
pub(super) fn encode(set: &WorkingSet) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_LEN + set.ranges.len() * RANGE_LEN + 4);
    bytes.extend_from_slice(&MAGIC);
    let mode: u32 = match set.mode {
        RecordedMode::Mapped => 1,
        RecordedMode::Lazy => 2,
        RecordedMode::Image => 3,
    };
    for word in [VERSION, mode] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend_from_slice(set.snapshot.as_bytes());
    let ranges: Vec<_> = set.ranges.iter().flat_map(|range| pieces(*range)).collect();
    for word in [set.begun, to_millis(set.duration), to_u64(ranges.len())] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    for (first, block, pages) in ranges {
        bytes.extend_from_slice(&first.to_le_bytes());
        bytes.extend_from_slice(&block.to_le_bytes());
        bytes.extend_from_slice(&pages.to_le_bytes());
    }
    let crc = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes
}

/// A range as the file has it: first page, block, pages. One of more than 16 TiB is several.
fn pieces(range: BlockRange) -> impl Iterator<Item = (u64, u32, u32)> {
    let block = u32::try_from(range.block).unwrap_or(u32::MAX);
    let chunks = range.pages.chunks(u32::MAX.into());
    chunks.map(move |chunk| (chunk.start.0, block, u32::try_from(chunk.len()).unwrap_or(u32::MAX)))
}

/// Reads fields one after the other.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], InvalidWorkingSet> {
        let cut = InvalidWorkingSet::Damaged("it is cut short");
        let (field, rest) = self.0.split_first_chunk::<N>().ok_or(cut)?;
        self.0 = rest;
        Ok(*field)
    }

    fn u32(&mut self) -> Result<u32, InvalidWorkingSet> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, InvalidWorkingSet> {
        self.take().map(u64::from_le_bytes)
    }
}

/// Decodes the working set of the snapshot with this id and RAM blocks of these lengths.
pub(super) fn decode(bytes: &[u8], snapshot: Uuid, blocks: &[PageBitmap]) -> Result<WorkingSet, InvalidWorkingSet> {
    let damaged = InvalidWorkingSet::Damaged;
    let mut fields = Fields(bytes);
    if fields.take() != Ok(MAGIC) {
        return Err(InvalidWorkingSet::Foreign);
    }
    let version = fields.u32()?;
    if version != VERSION {
        return Err(InvalidWorkingSet::Version(version));
    }
    let (contents, crc) = bytes.split_last_chunk::<4>().ok_or(damaged("it is cut short"))?;
    if crc32c::crc32c(contents) != u32::from_le_bytes(*crc) {
        return Err(damaged("its checksum differs"));
    }
    let mode = match fields.u32()? {
        1 => RecordedMode::Mapped,
        2 => RecordedMode::Lazy,
        3 => RecordedMode::Image,
        _ => return Err(damaged("its restore mode is unknown")),
    };
    let id = Uuid::from_bytes(fields.take()?);
    if id != snapshot {
        return Err(InvalidWorkingSet::OfAnother(id));
    }
    let (begun, duration, count) = (fields.u64()?, Duration::from_millis(fields.u64()?), fields.u64()?);
    // Before anything is allocated.
    if count > to_u64(RANGES_MAX) || to_usize(count) * RANGE_LEN + 4 != fields.0.len() {
        return Err(damaged("its length does not agree with its number of ranges"));
    }
    let mut seen = empty_like(blocks);
    let mut ranges = Vec::with_capacity(to_usize(count));
    for _ in 0..count {
        let (first, block, pages) = (PageNumber(fields.u64()?), fields.u32()?, fields.u32()?);
        let block = to_usize(block.into());
        let end = first.checked_add(pages.into()).filter(|_| pages > 0);
        let (Some(end), Some(seen)) = (end, seen.get_mut(block)) else {
            return Err(damaged("a range is empty, or of no RAM block"));
        };
        let pages = PageRange::new(first, end);
        if end.0 > seen.len() || !note_once(seen, pages) {
            return Err(damaged("a range is outside of its RAM block, or overlaps another"));
        }
        ranges.push(BlockRange { block, pages });
    }
    Ok(WorkingSet { snapshot, mode, begun, duration, ranges })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blocks() -> Vec<PageBitmap> {
        vec![PageBitmap::new(5000), PageBitmap::new(16)]
    }

    fn range(block: usize, first: u64, pages: u64) -> BlockRange {
        BlockRange { block, pages: PageRange::starting_at(PageNumber(first), pages) }
    }

    fn set(ranges: Vec<BlockRange>) -> WorkingSet {
        let duration = Duration::from_millis(10_000);
        WorkingSet { snapshot: Uuid::from_u128(7), mode: RecordedMode::Lazy, begun: 1, duration, ranges }
    }

    /// Makes the checksum right.
    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        let end = bytes.len() - 4;
        let crc = crc32c::crc32c(&bytes[..end]);
        bytes[end..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn decoded(bytes: &[u8]) -> Result<WorkingSet, InvalidWorkingSet> {
        decode(bytes, Uuid::from_u128(7), &blocks())
    }

    #[test]
    fn what_is_encoded_is_decoded_in_its_order() {
        let set = set(vec![range(1, 3, 2), range(0, 4000, 1000), range(0, 0, 1)]);
        assert_eq!(decoded(&encode(&set)), Ok(set));
    }

    #[test]
    fn a_file_of_another_snapshot_version_or_program_is_said_to_be_so() {
        let bytes = encode(&set(vec![range(0, 1, 1)]));
        let other = Uuid::from_u128(8);
        assert_eq!(decode(&bytes, other, &blocks()), Err(InvalidWorkingSet::OfAnother(Uuid::from_u128(7))));
        let mut later = bytes;
        later[8] = 2;
        assert_eq!(decoded(&later), Err(InvalidWorkingSet::Version(2)));
        assert_eq!(decoded(b"Dear Sir or Madam"), Err(InvalidWorkingSet::Foreign));
        assert_eq!(decoded(b""), Err(InvalidWorkingSet::Foreign));
    }

    #[test]
    fn a_bit_that_changed_or_a_byte_that_is_missing_is_noticed() {
        let bytes = encode(&set(vec![range(0, 1, 1), range(1, 2, 3)]));
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            assert!(decoded(&changed).is_err(), "byte {at}");
            assert!(decoded(&bytes[..at]).is_err(), "{at} bytes");
        }
    }

    #[test]
    fn ranges_that_cannot_be_are_refused() {
        for wrong in [
            vec![range(0, 4999, 2)],
            vec![range(2, 0, 1)],
            vec![range(0, 10, 5), range(0, 14, 1)],
            vec![range(0, u64::MAX - 1, 1)],
        ] {
            assert!(matches!(decoded(&encode(&set(wrong))), Err(InvalidWorkingSet::Damaged(_))));
        }
        let mut empty = encode(&set(vec![range(0, 1, 1)]));
        empty[HEADER_LEN + 12] = 0;
        assert!(matches!(decoded(&sealed(empty)), Err(InvalidWorkingSet::Damaged(_))));
        let mut many = encode(&set(vec![]));
        many[48..56].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(decoded(&sealed(many)), Err(InvalidWorkingSet::Damaged(_))));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_and_what_it_takes_has_each_page_once(
            mut bytes in prop::collection::vec(any::<u8>(), 0..300),
            is_framed in any::<bool>(),
            words in prop::collection::vec((0_u64..6000, 0_u32..3, 0_u32..40), 0..12),
        ) {
            if is_framed {
                bytes = encode(&set(vec![]));
                bytes.truncate(HEADER_LEN);
                bytes[48..56].copy_from_slice(&to_u64(words.len()).to_le_bytes());
                for (first, block, pages) in words {
                    bytes.extend_from_slice(&first.to_le_bytes());
                    bytes.extend_from_slice(&block.to_le_bytes());
                    bytes.extend_from_slice(&pages.to_le_bytes());
                }
                bytes.extend_from_slice(&[0; 4]);
                bytes = sealed(bytes);
            }
            if let Ok(set) = decoded(&bytes) {
                let mut seen = blocks();
                for range in &set.ranges {
                    prop_assert!(range.pages.end.0 <= seen[range.block].len() && !range.pages.is_empty());
                    prop_assert!(note_once(&mut seen[range.block], range.pages));
                }
                prop_assert_eq!(encode(&set), bytes);
            }
        }
    }
}
