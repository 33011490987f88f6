//! The reply to a request, put together from its chunks.
//!
//! Law: a pure state. A chunk is checked against the request before its bytes are received; each byte of a read is
//! received once. What is kept is bounded by the request and by constants.

use std::ops::Range;

use limosa_page::to_usize;
use limosa_storage::IoVector;

use crate::protocol::reply::Chunk;
use crate::protocol::{split_u16, split_u32, split_u64};

/// The longest payload of a chunk that is no data, in bytes: the extents that stock QEMU sends at most, with 64 bits.
const LIST_MAX: u64 = 8 + (16 << 17);
/// The longest payload of an error, in bytes: its numbers and a string.
const ERROR_MAX: u64 = 14 + u16::MAX as u64;
/// The most errors of a request.
const ERRORS_MAX: u32 = 1024;
/// The most pieces of a read's bytes that are not beside each other.
const PIECES_MAX: usize = 4096;

/// The reply that a request expects.
#[derive(Debug)]
pub(super) enum Expected {
    /// Success or failure.
    Outcome,
    /// Bytes from an offset on.
    Bytes { offset: u64, into: IoVector, received: Pieces },
    /// The extents of a metadata context.
    Extents { context: u32, found: Vec<(u64, u64)> },
}

impl Expected {
    pub(super) fn bytes(offset: u64, into: IoVector) -> Self {
        Self::Bytes { offset, into, received: Pieces::default() }
    }
}

/// The bytes behind the header of a chunk.
#[derive(Debug)]
pub(super) enum Payload {
    /// These many bytes, to be passed to [`Reply::take`].
    List(usize),
    /// An offset of 8 bytes, to be passed to [`Reply::place`], and bytes behind it.
    Data(usize),
}

/// A reply that is being received.
#[derive(Debug)]
pub(super) struct Reply {
    expected: Expected,
    /// The first error.
    error: Option<u32>,
    errors: u32,
}

/// The result of a complete reply.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// It is done.
    Done,
    /// The extents: lengths and flags.
    Extents(Vec<(u64, u64)>),
    /// The request failed.
    Failed(u32),
}

impl Reply {
    pub(super) const fn new(expected: Expected) -> Self {
        Self { expected, error: None, errors: 0 }
    }

    /// Returns what a simple reply is followed by, if it has no error.
    pub(super) fn simple(&mut self, error: u32, has_chunks: bool) -> Result<Option<IoVector>, &'static str> {
        if error != 0 {
            self.error = Some(error);
            return Ok(None);
        }
        match &mut self.expected {
            Expected::Outcome => Ok(None),
            Expected::Extents { .. } => Err("extents came without a list"),
            Expected::Bytes { .. } if has_chunks => Err("a read came without chunks"),
            Expected::Bytes { into, received, .. } => {
                received.add(0..into.len())?;
                Ok(Some(into.clone()))
            }
        }
    }

    /// Returns what follows the header of a chunk of this kind and length.
    pub(super) fn chunk(&self, kind: u16, length: u64, is_last: bool) -> Result<Payload, &'static str> {
        let list =
            |most: u64| if length <= most { Ok(Payload::List(to_usize(length))) } else { Err("a chunk is too long") };
        match (Chunk::from_repr(kind), &self.expected) {
            (Some(Chunk::None), _) if is_last => list(0),
            (Some(Chunk::None), _) => Err("a chunk without contents is not the last one"),
            (Some(Chunk::OffsetData), Expected::Bytes { into, .. }) => match length.checked_sub(8) {
                None | Some(0) => Err("a chunk is too short"),
                Some(data) if data > into.len() as u64 => Err("a chunk is too long"),
                Some(data) => Ok(Payload::Data(to_usize(data))),
            },
            (Some(Chunk::OffsetHole), Expected::Bytes { .. }) => list(12),
            (Some(Chunk::BlockStatus | Chunk::BlockStatusExtended), Expected::Extents { .. }) => list(LIST_MAX),
            _ if kind >> 15 == 1 => list(ERROR_MAX),
            _ => Err("a chunk is of a kind that the request does not expect"),
        }
    }

    /// Takes the payload of a chunk that is no data.
    pub(super) fn take(&mut self, kind: u16, mut payload: &[u8]) -> Result<(), &'static str> {
        let payload = &mut payload;
        let short = "a chunk is too short";
        match Chunk::from_repr(kind) {
            Some(Chunk::None) => Ok(()),
            Some(Chunk::OffsetHole) => {
                let (at, length) = split_u64(payload).zip(split_u32(payload)).ok_or(short)?;
                self.place(at, to_usize(u64::from(length)))?.buffers().iter().for_each(limosa_storage::Buffer::clear);
                Ok(())
            }
            Some(chunk @ (Chunk::BlockStatus | Chunk::BlockStatusExtended)) => {
                let Expected::Extents { context, found } = &mut self.expected else { return Err("no extents") };
                if split_u32(payload).ok_or(short)? != *context {
                    return Err("extents of another metadata context");
                }
                let long = chunk == Chunk::BlockStatusExtended;
                let count = if long { Some(split_u32(payload).ok_or(short)?) } else { None };
                if !found.is_empty() {
                    return Err("the extents came twice");
                }
                while !payload.is_empty() {
                    let extent = if long {
                        split_u64(payload).zip(split_u64(payload))
                    } else {
                        let extent = split_u32(payload).zip(split_u32(payload));
                        extent.map(|(length, flags)| (length.into(), flags.into()))
                    };
                    found.push(extent.filter(|(length, _)| *length > 0).ok_or("an extent is cut off or empty")?);
                }
                if found.is_empty() || count.is_some_and(|count| u64::from(count) != found.len() as u64) {
                    return Err("the number of extents is wrong");
                }
                Ok(())
            }
            _ => {
                let (error, _) = split_u32(payload).zip(split_u16(payload)).ok_or(short)?;
                if error == 0 {
                    return Err("an error has the number of success");
                }
                self.error.get_or_insert(error);
                self.errors += 1;
                if self.errors > ERRORS_MAX { Err("a request has too many errors") } else { Ok(()) }
            }
        }
    }

    /// Returns where `length` bytes at `at` belong.
    pub(super) fn place(&mut self, at: u64, length: usize) -> Result<IoVector, &'static str> {
        let Expected::Bytes { offset, into, received } = &mut self.expected else { return Err("no bytes") };
        let start = at.checked_sub(*offset).and_then(|start| usize::try_from(start).ok());
        let range = start.and_then(|start| Some(start..start.checked_add(length)?));
        let range = range.filter(|range| !range.is_empty() && range.end <= into.len());
        let range = range.ok_or("a chunk is outside of the request")?;
        received.add(range.clone())?;
        Ok(into.slice(range))
    }

    /// Ends the reply.
    pub(super) fn complete(self) -> Result<Answer, &'static str> {
        if let Some(error) = self.error {
            return Ok(Answer::Failed(error));
        }
        match self.expected {
            Expected::Outcome => Ok(Answer::Done),
            Expected::Bytes { into, received, .. } if received.is_all(into.len()) => Ok(Answer::Done),
            Expected::Bytes { .. } => Err("a read came without some of its bytes"),
            Expected::Extents { found, .. } if found.is_empty() => Err("extents came without a list"),
            Expected::Extents { found, .. } => Ok(Answer::Extents(found)),
        }
    }
}

/// Ranges of a request's bytes: in order, not beside each other.
#[derive(Debug, Default)]
pub(super) struct Pieces(Vec<Range<usize>>);

impl Pieces {
    fn add(&mut self, range: Range<usize>) -> Result<(), &'static str> {
        let next = self.0.partition_point(|piece| piece.start < range.start);
        let before = next.checked_sub(1).and_then(|before| self.0.get(before)).cloned();
        let after = self.0.get(next).cloned();
        if before.as_ref().is_some_and(|piece| piece.end > range.start)
            || after.as_ref().is_some_and(|piece| piece.start < range.end)
        {
            return Err("a read has bytes twice");
        }
        let before = before.filter(|piece| piece.end == range.start);
        let after = after.filter(|piece| piece.start == range.end);
        let joined = before.as_ref().map_or(range.start, |piece| piece.start)
            ..after.as_ref().map_or(range.end, |piece| piece.end);
        let replaced = next - usize::from(before.is_some())..next + usize::from(after.is_some());
        self.0.splice(replaced, [joined]);
        if self.0.len() > PIECES_MAX { Err("a read came in too many pieces") } else { Ok(()) }
    }

    fn is_all(&self, length: usize) -> bool {
        length == 0 || self.0.first().is_some_and(|piece| *piece == (0..length))
    }
}

#[cfg(test)]
mod tests {
    use limosa_storage::Buffer;
    use proptest::prelude::*;

    use super::*;

    const DATA: u16 = Chunk::OffsetData as u16;
    const HOLE: u16 = Chunk::OffsetHole as u16;
    const ERROR: u16 = Chunk::Error as u16;

    fn read(length: usize) -> Reply {
        Reply::new(Expected::bytes(1000, Buffer::zeroed(length).into()))
    }

    fn extents() -> Reply {
        Reply::new(Expected::Extents { context: 1, found: Vec::new() })
    }

    fn hole(at: u64, length: u32) -> Vec<u8> {
        [&at.to_be_bytes()[..], &length.to_be_bytes()].concat()
    }

    #[test]
    fn a_read_is_complete_when_each_byte_came_once() {
        let mut reply = read(100);
        reply.place(1050, 50).unwrap();
        reply.take(HOLE, &hole(1000, 10)).unwrap();
        reply.place(1010, 40).unwrap();
        assert_eq!(reply.complete(), Ok(Answer::Done));

        let mut missing = read(100);
        missing.place(1000, 99).unwrap();
        assert!(missing.complete().unwrap_err().contains("without some"));
        let mut twice = read(100);
        twice.place(1010, 10).unwrap();
        for (at, length) in [(1010, 1), (1019, 1), (1005, 6), (1000, 100)] {
            assert_eq!(twice.place(at, length).unwrap_err(), "a read has bytes twice");
        }
        for (at, length) in [(999, 1), (1000, 101), (1100, 1), (u64::MAX, 1), (0, 0), (1000, usize::MAX), (1000, 0)] {
            assert!(read(100).place(at, length).is_err(), "{at} {length}");
        }
        assert_eq!(read(0).complete(), Ok(Answer::Done));
    }

    #[test]
    fn pieces_of_a_read_are_bounded() {
        let mut reply = read(1 << 20);
        let failed = (0..1 << 19).map(|at| reply.place(1000 + at * 2, 1)).position(|placed| placed.is_err());
        assert_eq!(failed, Some(PIECES_MAX));
    }

    #[test]
    fn chunks_are_checked_before_their_bytes_are_received() {
        assert!(matches!(read(100).chunk(DATA, 108, true), Ok(Payload::Data(100))));
        for length in [0, 8, 109, u64::MAX] {
            assert!(read(100).chunk(DATA, length, true).is_err(), "{length}");
            assert!(extents().chunk(DATA, length, true).is_err());
        }
        assert!(extents().chunk(Chunk::BlockStatus as u16, LIST_MAX + 1, true).is_err());
        assert!(read(100).chunk(Chunk::BlockStatus as u16, 12, true).is_err());
        assert!(read(100).chunk(0x8765, ERROR_MAX, true).is_ok());
        assert!(read(100).chunk(ERROR, ERROR_MAX + 1, true).is_err());
        assert!(read(100).chunk(3, 0, true).is_err());
        assert!(read(100).chunk(Chunk::None as u16, 0, true).is_ok());
        assert!(read(100).chunk(Chunk::None as u16, 0, false).is_err());
    }

    #[test]
    fn an_error_is_the_answer_and_its_number_is_no_success() {
        let mut reply = read(100);
        reply.take(ERROR, &[0, 0, 0, 28, 0, 2, b'n', b'o']).unwrap();
        reply.take(0x8002, &[0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert_eq!(reply.complete(), Ok(Answer::Failed(28)));
        assert!(read(1).take(ERROR, &[0, 0, 0, 0, 0, 0]).is_err());
        assert!(read(1).take(ERROR, &[0, 0, 0, 1]).is_err());
    }

    #[test]
    fn errors_of_a_request_are_bounded() {
        let mut reply = read(100);
        let failed = (0..=ERRORS_MAX).position(|_| reply.take(ERROR, &[0, 0, 0, 28, 0, 0]).is_err());
        assert_eq!(failed, Some(1024));
    }

    #[test]
    fn extents_of_both_forms_are_taken() {
        let mut short = extents();
        short.take(5, &[0, 0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 3]).unwrap();
        assert_eq!(short.complete(), Ok(Answer::Extents(vec![(512, 3)])));
        let mut long = extents();
        let extent = [(1_u64 << 40).to_be_bytes(), 2_u64.to_be_bytes()].concat();
        long.take(6, &[&[0, 0, 0, 1, 0, 0, 0, 1][..], &extent].concat()).unwrap();
        assert_eq!(long.complete(), Ok(Answer::Extents(vec![(1 << 40, 2)])));
        for wrong in [
            &[0, 0, 0, 2, 0, 0, 2, 0, 0, 0, 0, 3][..],
            &[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3],
            &[0, 0, 0, 1, 9],
            &[0, 0, 0, 1],
        ] {
            assert!(extents().take(5, wrong).is_err(), "{wrong:?}");
        }
        assert!(extents().complete().is_err());
        assert!(extents().simple(0, true).is_err());
    }

    proptest! {
        #[test]
        fn no_chunks_make_it_panic_or_write_outside(
            chunks in prop::collection::vec((prop_oneof![0..7_u16, 0x8000..0x8003_u16], prop::collection::vec(any::<u8>(), 0..40), 990..1110_u64, 0..20_usize, any::<bool>()), 0..20),
            of_extents: bool,
        ) {
            let mut reply = if of_extents { extents() } else { read(100) };
            for (kind, payload, at, length, is_last) in chunks {
                match reply.chunk(kind, payload.len() as u64, is_last) {
                    Ok(Payload::List(_)) => {
                        let _ = reply.take(kind, &payload);
                    }
                    Ok(Payload::Data(_)) => {
                        if let Ok(place) = reply.place(at, length) {
                            prop_assert_eq!(place.len(), length);
                        }
                    }
                    Err(_) => {}
                }
            }
            let _ = reply.complete();
        }
    }
}
