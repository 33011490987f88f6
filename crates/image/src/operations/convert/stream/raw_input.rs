//! Raw bytes of unknown length that come from a pipe.
//!
//! Law: bytes are read in order, at most [`AHEAD`] pieces ahead of those that are written. A disk is whole sectors: the
//! last one is filled with zeros.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::sync::Arc;

use limosa_page::{to_u64, to_usize};
use limosa_storage::{Buffer, Operation, StorageError};

use super::InputStream;
use crate::offset::GuestOffset;
use crate::operations::convert::SECTOR;
use crate::operations::operation::{DiskOperation, OperationError};

/// Bytes of a piece: the largest cluster, so that a piece is whole clusters of every target.
pub(in crate::operations::convert) const PIECE: u64 = 2 << 20;
/// Pieces that are read before the target grows by them: a growth is made durable.
const AHEAD: usize = 8;
/// Bytes that are read at once.
const CHUNK: usize = 256 << 10;

/// Bytes of a disk, read.
#[derive(Debug)]
pub(in crate::operations::convert) struct Piece {
    /// Where they are on the disk: whole sectors.
    pub(in crate::operations::convert) range: Range<u64>,
    pub(in crate::operations::convert) bytes: Buffer,
}

/// The reading end.
pub(in crate::operations::convert) struct RawInput {
    name: Arc<str>,
    reader: Box<dyn Read + Send>,
    chunk: Vec<u8>,
    /// Pieces that were read and not taken.
    ahead: VecDeque<Piece>,
    /// Bytes of the disk that have been read.
    at: u64,
    /// Bytes of the stream before the disk.
    skipped: u64,
    /// Bytes of the disk that are wanted at most.
    most: u64,
    /// Whether the stream ended before its first byte that is wanted.
    begins_past_end: bool,
    ended: bool,
}

impl std::fmt::Debug for RawInput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RawInput").field("name", &self.name).field("at", &self.at).finish_non_exhaustive()
    }
}

impl RawInput {
    /// The disk of these bytes of a stream: all of them, or a `window`. What is before the window is read.
    ///
    /// # Errors
    /// [`OperationError::Failed`]: the stream cannot be read.
    pub(in crate::operations::convert) fn new(
        stream: InputStream,
        window: Option<&Range<u64>>,
    ) -> Result<Self, OperationError> {
        let InputStream { name, reader, .. } = stream;
        let start = window.map_or(0, |window| window.start.min(window.end));
        let most = window.map_or(u64::MAX, |window| window.end - start);
        let mut input = Self {
            name,
            reader,
            chunk: vec![0; CHUNK],
            ahead: VecDeque::new(),
            at: 0,
            skipped: 0,
            most,
            begins_past_end: window.is_some_and(|window| window.start > window.end),
            ended: false,
        };
        while input.skipped < start {
            let wanted = to_usize((start - input.skipped).min(to_u64(CHUNK)));
            let read = input.read(wanted)?;
            if read == 0 {
                (input.ended, input.begins_past_end) = (true, true);
                break;
            }
            input.skipped += to_u64(read);
        }
        Ok(input)
    }

    pub(in crate::operations::convert) const fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(in crate::operations::convert) const fn begins_past_end(&self) -> bool {
        self.begins_past_end
    }

    /// Bytes of the disk that have been read: all of them, once there is no next piece.
    pub(in crate::operations::convert) const fn known_length(&self) -> u64 {
        self.at.next_multiple_of(SECTOR)
    }

    /// The next piece; `None` at the end. `ahead`: more pieces are read together with it.
    ///
    /// # Errors
    /// [`OperationError::Failed`]: the stream cannot be read.
    pub(in crate::operations::convert) fn next(&mut self, ahead: bool) -> Result<Option<Piece>, OperationError> {
        self.fill(if ahead { AHEAD } else { 1 })?;
        Ok(self.ahead.pop_front())
    }

    /// Reads pieces, if none is there.
    ///
    /// # Errors
    /// [`OperationError::Failed`]: the stream cannot be read.
    pub(in crate::operations::convert) fn fill_ahead(&mut self) -> Result<(), OperationError> {
        self.fill(AHEAD)
    }

    fn fill(&mut self, pieces: usize) -> Result<(), OperationError> {
        if !self.ahead.is_empty() {
            return Ok(());
        }
        while self.ahead.len() < pieces && !self.ended {
            let start = self.at;
            let length = PIECE.min(self.most - start);
            // Zeros behind what is read into it.
            let bytes = Buffer::zeroed(to_usize(length.next_multiple_of(SECTOR)));
            let mut filled = 0;
            while filled < to_usize(length) {
                let read = self.read(CHUNK.min(to_usize(length) - filled))?;
                if read == 0 {
                    self.ended = true;
                    break;
                }
                bytes.copy_from(filled, self.chunk.get(..read).unwrap_or_default());
                filled += read;
                self.at += to_u64(read);
            }
            self.ended |= self.at == self.most;
            if filled > 0 {
                let whole = filled.next_multiple_of(to_usize(SECTOR));
                self.ahead.push_back(Piece { range: start..start + to_u64(whole), bytes: bytes.slice(0..whole) });
            }
        }
        Ok(())
    }

    /// Reads at most `most` bytes into the chunk; 0 at the end.
    fn read(&mut self, most: usize) -> Result<usize, OperationError> {
        let into = self.chunk.get_mut(..most).unwrap_or_default();
        loop {
            match self.reader.read(into) {
                Ok(read) => return Ok(read),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    let (at, length) = (self.skipped + self.at, to_u64(most));
                    let source = StorageError::for_request(Operation::Read, &self.name, at, length, error).into();
                    return Err(OperationError::Failed {
                        operation: DiskOperation::Reading,
                        at: GuestOffset(at),
                        source,
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives a few bytes at a time, as a pipe may.
    struct Drops(Vec<u8>, usize);

    impl Read for Drops {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            let read = into.len().min(1000).min(self.0.len() - self.1);
            into[..read].copy_from_slice(&self.0[self.1..self.1 + read]);
            self.1 += read;
            Ok(read)
        }
    }

    fn all(bytes: Vec<u8>, window: Option<Range<u64>>) -> (Vec<u8>, RawInput) {
        let stream = InputStream::new("pipe", Some(crate::probe::Format::Raw), Drops(bytes, 0));
        let mut input = RawInput::new(stream, window.as_ref()).unwrap();
        let mut found = Vec::new();
        while let Some(piece) = input.next(true).unwrap() {
            assert_eq!(
                (piece.range.start, piece.range.end - piece.range.start),
                (found.len() as u64, piece.bytes.len() as u64)
            );
            found.extend(piece.bytes.to_vec());
        }
        (found, input)
    }

    #[test]
    fn a_stream_that_ends_within_a_sector_is_filled_with_zeros() {
        for length in [0, 1, 511, 512, 513, to_usize(PIECE), to_usize(PIECE) + 1, 20 * to_usize(PIECE) + 700] {
            let mut bytes = vec![7; length];
            let (found, input) = all(bytes.clone(), None);
            bytes.resize(length.next_multiple_of(512), 0);
            assert!(found == bytes, "{length}");
            assert_eq!(input.known_length(), bytes.len() as u64);
        }
    }

    #[test]
    fn a_window_of_a_stream_is_the_disk() {
        let bytes: Vec<_> = (0..5_000_u32).map(|byte| (byte % 251) as u8).collect();
        for (window, expected) in
            [(0..700, &bytes[..700]), (300..1000, &bytes[300..1000]), (4000..u64::MAX, &bytes[4000..])]
        {
            let (found, input) = all(bytes.clone(), Some(window));
            assert!(found[..expected.len()] == *expected && found[expected.len()..].iter().all(|byte| *byte == 0));
            assert!(!input.begins_past_end());
        }
        let (found, input) = all(bytes.clone(), Some(5001..6000));
        assert!(found.is_empty() && input.begins_past_end());
        assert!(!all(bytes, Some(5000..6000)).1.begins_past_end());
    }
}
