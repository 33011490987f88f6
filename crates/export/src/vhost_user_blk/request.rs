//! The meaning of a request (virtio 1.2, section 5.2.6).
//!
//! Law: a request that is returned is inside the disk, bounded, and allowed. Everything else gets its status at once.

use super::chain::{Parts, Piece, total};
use super::config::{BYTES_MAX, DISCARD_MAX, RANGES_MAX, SECTOR, ZEROES_MAX};

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// Bytes of a range to be discarded or zeroed: first sector u64, sectors u32, flags u32.
const RANGE: usize = 16;
/// The flag of a range that may be unmapped.
const UNMAP: u32 = 1;

/// Bytes of a disk's name.
pub(super) const ID_LENGTH: usize = 20;

/// The end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// The disk, as requests are checked against it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    /// Sectors of the disk.
    pub(super) sectors: u64,
    pub(super) read_only: bool,
    /// The driver has acknowledged that ranges can be discarded, and zeroed.
    pub(super) discards: bool,
    pub(super) zeroes: bool,
}

/// A range that is discarded or zeroed, in bytes of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ByteRange {
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) unmap: bool,
}

/// A request that can be carried out. Offsets and lengths are bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// Read into the writable pieces.
    Read {
        offset: u64,
    },
    /// Write from the readable pieces.
    Write {
        offset: u64,
    },
    Flush,
    /// Write the name into the writable pieces.
    GetId,
    Discard(Vec<ByteRange>),
    WriteZeroes(Vec<ByteRange>),
}

/// Finds out what a request asks for. `read` copies bytes out of guest memory, and returns false where there
/// is no memory.
///
/// # Errors
/// The status of a request that is not carried out.
pub(super) fn parse(parts: &Parts, facts: &Facts, read: impl FnMut(u64, &mut [u8]) -> bool) -> Result<Action, Status> {
    let [a, b, c, d, _, _, _, _, sector @ ..] = parts.header;
    let sector = u64::from_le_bytes(sector);
    match u32::from_le_bytes([a, b, c, d]) {
        IN => Ok(Action::Read { offset: data(facts, sector, &parts.writable)? }),
        OUT => {
            allowed(facts)?;
            Ok(Action::Write { offset: data(facts, sector, &parts.readable)? })
        }
        FLUSH => Ok(Action::Flush),
        GET_ID => Ok(Action::GetId),
        DISCARD if facts.discards => {
            allowed(facts)?;
            Ok(Action::Discard(ranges(&parts.readable, facts, DISCARD_MAX, 0, read)?))
        }
        WRITE_ZEROES if facts.zeroes => {
            allowed(facts)?;
            Ok(Action::WriteZeroes(ranges(&parts.readable, facts, ZEROES_MAX, UNMAP, read)?))
        }
        _ => Err(Status::Unsupported),
    }
}

fn allowed(facts: &Facts) -> Result<(), Status> {
    if facts.read_only { Err(Status::IoError) } else { Ok(()) }
}

/// The offset of data that are inside the disk.
fn data(facts: &Facts, sector: u64, pieces: &[Piece]) -> Result<u64, Status> {
    let length = total(pieces);
    if !length.is_multiple_of(SECTOR) || length > BYTES_MAX {
        return Err(Status::IoError);
    }
    inside(facts, sector, length / SECTOR)
}

/// The offset in bytes of a range of sectors that is inside the disk.
fn inside(facts: &Facts, sector: u64, count: u64) -> Result<u64, Status> {
    let is_inside = sector.checked_add(count).is_some_and(|end| end <= facts.sectors);
    if is_inside { Ok(sector * SECTOR) } else { Err(Status::IoError) }
}

fn ranges(
    pieces: &[Piece],
    facts: &Facts,
    most: u32,
    flags_known: u32,
    mut read: impl FnMut(u64, &mut [u8]) -> bool,
) -> Result<Vec<ByteRange>, Status> {
    let length = usize::try_from(total(pieces)).map_err(|_| Status::IoError)?;
    let count_max = usize::try_from(RANGES_MAX).map_err(|_| Status::IoError)?;
    if length == 0 || !length.is_multiple_of(RANGE) || length / RANGE > count_max {
        return Err(Status::IoError);
    }
    let mut bytes = vec![0; length];
    let mut rest = bytes.as_mut_slice();
    for piece in pieces {
        let (place, behind) = usize::try_from(piece.length)
            .ok()
            .and_then(|length| std::mem::take(&mut rest).split_at_mut_checked(length))
            .ok_or(Status::IoError)?;
        if !read(piece.address, place) {
            return Err(Status::IoError);
        }
        rest = behind;
    }
    let (ranges, _) = bytes.as_chunks::<RANGE>();
    let range = |&[a, b, c, d, e, f, g, h, count @ ..]: &[u8; RANGE]| {
        let [i, j, k, l, flags @ ..] = count;
        let (count, flags) = (u32::from_le_bytes([i, j, k, l]), u32::from_le_bytes(flags));
        if flags & !flags_known != 0 {
            return Err(Status::Unsupported);
        }
        if count > most {
            return Err(Status::IoError);
        }
        let offset = inside(facts, u64::from_le_bytes([a, b, c, d, e, f, g, h]), count.into())?;
        Ok(ByteRange { offset, length: u64::from(count) * SECTOR, unmap: flags & UNMAP != 0 })
    };
    ranges.iter().map(range).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FACTS: Facts = Facts { sectors: 1 << 24, read_only: false, discards: true, zeroes: true };

    fn header(kind: u32, sector: u64) -> [u8; 16] {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        header
    }

    fn pieces(lengths: &[u32]) -> Vec<Piece> {
        lengths.iter().map(|length| Piece { address: 0, length: *length }).collect()
    }

    fn ask(facts: &Facts, kind: u32, sector: u64, readable: &[u32], writable: &[u32]) -> Result<Action, Status> {
        let (readable, writable) = (pieces(readable), pieces(writable));
        parse(&Parts { header: header(kind, sector), readable, writable, status: 0 }, facts, |_, _| true)
    }

    /// A request with ranges; its payload is cut after `cut` bytes.
    fn with_ranges(facts: &Facts, kind: u32, ranges: &[(u64, u32, u32)], cut: usize) -> Result<Action, Status> {
        let payload: Vec<u8> = ranges
            .iter()
            .flat_map(|(sector, count, flags)| {
                [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
            })
            .collect();
        let readable = [(0, cut), (cut, payload.len() - cut)]
            .map(|(at, length)| Piece { address: at as u64, length: u32::try_from(length).unwrap() });
        let readable = readable.into_iter().filter(|piece| piece.length > 0).collect();
        let parts = Parts { header: header(kind, 0), readable, writable: vec![], status: 0 };
        parse(&parts, facts, |address, bytes| {
            let at = usize::try_from(address).unwrap();
            bytes.copy_from_slice(&payload[at..at + bytes.len()]);
            true
        })
    }

    #[test]
    fn reads_and_writes_are_whole_sectors_inside_the_disk() {
        assert_eq!(ask(&FACTS, IN, 7, &[], &[4096, 512]), Ok(Action::Read { offset: 3584 }));
        assert_eq!(ask(&FACTS, OUT, 7, &[1, 511], &[]), Ok(Action::Write { offset: 3584 }));
        assert_eq!(ask(&FACTS, IN, (1 << 24) - 1, &[], &[512]), Ok(Action::Read { offset: ((1 << 24) - 1) * 512 }));
        assert_eq!(ask(&FACTS, IN, 1 << 24, &[], &[]), Ok(Action::Read { offset: 1 << 33 }));
        for (sector, lengths) in [
            (0, &[511][..]),
            ((1 << 24) - 1, &[1024]),
            (1 << 24, &[512]),
            (u64::MAX, &[512]),
            (u64::MAX / 512, &[512]),
            (0, &[u32::MAX - 511]),
        ] {
            assert_eq!(ask(&FACTS, IN, sector, &[], lengths), Err(Status::IoError), "{sector} {lengths:?}");
            assert_eq!(ask(&FACTS, OUT, sector, lengths, &[]), Err(Status::IoError), "{sector} {lengths:?}");
        }
    }

    #[test]
    fn a_read_only_disk_is_not_changed() {
        let facts = Facts { read_only: true, ..FACTS };
        assert_eq!(ask(&facts, OUT, 0, &[512], &[]), Err(Status::IoError));
        assert_eq!(with_ranges(&facts, DISCARD, &[(0, 1, 0)], 16), Err(Status::IoError));
        assert_eq!(with_ranges(&facts, WRITE_ZEROES, &[(0, 1, 0)], 16), Err(Status::IoError));
        assert_eq!(ask(&facts, IN, 0, &[], &[512]), Ok(Action::Read { offset: 0 }));
        assert_eq!(ask(&facts, FLUSH, 0, &[], &[]), Ok(Action::Flush));
    }

    #[test]
    fn what_is_unknown_or_was_not_agreed_on_is_unsupported() {
        for kind in [2, 3, 5, 9, 10, 12, 14, 16, 0x8000_0000, u32::MAX] {
            assert_eq!(ask(&FACTS, kind, 0, &[512], &[512]), Err(Status::Unsupported), "{kind}");
        }
        let facts = Facts { discards: false, zeroes: false, ..FACTS };
        assert_eq!(with_ranges(&facts, DISCARD, &[(0, 1, 0)], 16), Err(Status::Unsupported));
        assert_eq!(with_ranges(&facts, WRITE_ZEROES, &[(0, 1, 0)], 16), Err(Status::Unsupported));
        assert_eq!(ask(&FACTS, GET_ID, 0, &[], &[20]), Ok(Action::GetId));
    }

    #[test]
    fn ranges_are_read_wherever_they_are_cut() {
        let expected = vec![
            ByteRange { offset: 512, length: 1024, unmap: true },
            ByteRange { offset: 0, length: 512 << 19, unmap: false },
        ];
        for cut in 0..=32 {
            let found = with_ranges(&FACTS, WRITE_ZEROES, &[(1, 2, 1), (0, 1 << 19, 0)], cut);
            assert_eq!(found, Ok(Action::WriteZeroes(expected.clone())), "{cut}");
        }
        let found = with_ranges(&FACTS, DISCARD, &[(1 << 23, 1 << 22, 0)], 3);
        let range = ByteRange { offset: 1 << 32, length: 1 << 31, unmap: false };
        assert_eq!(found, Ok(Action::Discard(vec![range])));
    }

    #[test]
    fn ranges_that_are_wrong_are_refused_before_any_of_them_is_changed() {
        for (kind, range, status) in [
            (DISCARD, (0, 1, 1), Status::Unsupported),
            (DISCARD, (0, 1, 2), Status::Unsupported),
            (WRITE_ZEROES, (0, 1, 2), Status::Unsupported),
            (DISCARD, (0, (1 << 22) + 1, 0), Status::IoError),
            (WRITE_ZEROES, (0, (1 << 19) + 1, 0), Status::IoError),
            (DISCARD, (1 << 24, 1, 0), Status::IoError),
            (DISCARD, (u64::MAX, 1, 0), Status::IoError),
        ] {
            assert_eq!(with_ranges(&FACTS, kind, &[(0, 1, 0), range], 16), Err(status), "{kind} {range:?}");
        }
        assert_eq!(with_ranges(&FACTS, DISCARD, &[], 0), Err(Status::IoError));
        assert_eq!(with_ranges(&FACTS, DISCARD, &[(0, 0, 0); 65], 0), Err(Status::IoError));
        assert!(with_ranges(&FACTS, DISCARD, &[(0, 0, 0); 64], 0).is_ok());
        for length in [1, 15, 17] {
            assert_eq!(ask(&FACTS, DISCARD, 0, &[length], &[]), Err(Status::IoError));
        }
        let parts = Parts { header: header(DISCARD, 0), readable: pieces(&[16]), writable: vec![], status: 0 };
        assert_eq!(parse(&parts, &FACTS, |_, _| false), Err(Status::IoError), "it is not in memory");
    }

    proptest! {
        #[test]
        fn what_is_carried_out_is_inside_the_disk(
            header in any::<[u8; 16]>(),
            kind in prop::sample::select(vec![IN, OUT, DISCARD, WRITE_ZEROES]),
            lengths in prop::collection::vec(prop::sample::select(vec![16, 32, 512, 4096, 1 << 20, u32::MAX]), 0..4),
            sector in prop::option::of(0_u64..2048),
            sectors in 0_u64..4096,
            filling in any::<u8>(),
        ) {
            let mut header = header;
            header[..4].copy_from_slice(&kind.to_le_bytes());
            if let Some(sector) = sector {
                header[8..].copy_from_slice(&sector.to_le_bytes());
            }
            let facts = Facts { sectors, ..FACTS };
            let parts = Parts { header, readable: pieces(&lengths), writable: pieces(&lengths), status: 0 };
            let fill = |_: u64, bytes: &mut [u8]| {
                bytes.fill(filling);
                true
            };
            match parse(&parts, &facts, fill) {
                Ok(Action::Read { offset } | Action::Write { offset }) => {
                    prop_assert!(offset + total(&parts.readable) <= sectors * 512);
                }
                Ok(Action::Discard(ranges) | Action::WriteZeroes(ranges)) => {
                    prop_assert!(ranges.iter().all(|range| range.offset + range.length <= sectors * 512));
                }
                Ok(_) | Err(_) => {}
            }
        }
    }
}
