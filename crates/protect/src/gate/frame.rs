//! The framing of QEMU's stream network back end: each frame behind its length in four bytes, big-endian.
//!
//! Source: QEMU's documentation of `-netdev stream`, and passt's of its socket.

use std::io;

use limosa_page::{to_u64, to_usize};

/// Bytes of a frame's length.
pub(super) const PREFIX: usize = 4;

/// Most bytes of a frame: QEMU's own limit for one that arrives, 64 KiB and 4 KiB of headers.
pub const FRAME_MAX: usize = (64 << 10) + (4 << 10);

/// Bytes that are read at a time: a few of the longest frames.
const CAPACITY: usize = 256 << 10;

/// A frame whose length cannot be right: the sender does not speak this protocol, or has lost its place in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a frame of {length} bytes is announced; 1 to {FRAME_MAX} are possible")]
pub struct FrameError {
    /// The length.
    pub length: u32,
}

/// Cuts a stream of bytes into frames, in a fixed amount of memory.
#[derive(Debug)]
pub struct FrameReader {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Default for FrameReader {
    fn default() -> Self {
        Self::new()
    }
}

impl FrameReader {
    /// Creates a reader at the beginning of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self { buffer: vec![0; CAPACITY].into_boxed_slice(), start: 0, end: 0 }
    }

    /// The place for the next bytes of the stream. Not empty once [`next_frame`](Self::next_frame) has returned `None`.
    pub fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.buffer.len() - self.end < FRAME_MAX + PREFIX {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        self.buffer.get_mut(self.end..).unwrap_or_default()
    }

    /// Takes the first `count` bytes of the [room](Self::room) as arrived.
    pub fn arrived(&mut self, count: usize) {
        debug_assert!(count <= self.buffer.len() - self.end, "more has arrived than there was room for");
        self.end = self.end.saturating_add(count).min(self.buffer.len());
    }

    /// Returns the next whole frame with its length before it, as it came; `None` if more bytes are needed.
    ///
    /// # Errors
    /// Its length is not possible. The reader is of no use any more.
    pub fn next_frame(&mut self) -> Result<Option<&[u8]>, FrameError> {
        let unread = self.buffer.get(self.start..self.end).unwrap_or_default();
        let Some(length) = unread.first_chunk::<PREFIX>().copied().map(u32::from_be_bytes) else { return Ok(None) };
        let payload = to_usize(length.into());
        if payload == 0 || payload > FRAME_MAX {
            return Err(FrameError { length });
        }
        let whole = PREFIX + payload;
        if unread.len() < whole {
            return Ok(None);
        }
        self.start += whole;
        Ok(self.buffer.get(self.start - whole..self.start))
    }

    /// Takes the first `count` bytes of the [room](Self::room) as arrived, and calls `take` with each frame that is
    /// whole now, with its length.
    ///
    /// # Errors
    /// As of [`next_frame`](Self::next_frame): the stream is of no use any more.
    pub(super) fn take_arrived(&mut self, count: usize, mut take: impl FnMut(&[u8])) -> io::Result<()> {
        self.arrived(count);
        while let Some(frame) = self.next_frame().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))? {
            take(frame);
        }
        Ok(())
    }

    /// Forgets what has come: a new stream begins.
    pub(super) fn restart(&mut self) {
        (self.start, self.end) = (0, 0);
    }
}

/// Writes the length of a frame of `payload` bytes before it: into the first bytes of `frame`, which has room for both.
/// Returns the frame with its length; `None` if there is no such frame.
pub(super) fn with_length(frame: &mut [u8], payload: usize) -> Option<&[u8]> {
    let length = u32::try_from(payload).ok().filter(|_| (1..=FRAME_MAX).contains(&payload))?;
    frame.first_chunk_mut::<PREFIX>()?.copy_from_slice(&length.to_be_bytes());
    frame.get(..PREFIX + payload)
}

/// Bytes that a frame counts for where memory is bounded: small ones cost more than their contents.
pub(super) fn cost(frame: &[u8]) -> u64 {
    to_u64(frame.len()).saturating_add(64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn framed(payload: &[u8]) -> Vec<u8> {
        [&u32::try_from(payload.len()).unwrap().to_be_bytes(), payload].concat()
    }

    /// Reads a stream that comes in pieces of these sizes, again and again.
    fn read(stream: &[u8], pieces: &[usize]) -> (Vec<Vec<u8>>, Result<(), FrameError>) {
        let (mut reader, mut frames, mut rest) = (FrameReader::new(), Vec::new(), stream);
        for piece in pieces.iter().cycle() {
            let room = reader.room();
            let count = room.len().min(*piece).min(rest.len());
            let (now, later) = rest.split_at(count);
            room[..count].copy_from_slice(now);
            reader.arrived(count);
            rest = later;
            loop {
                match reader.next_frame() {
                    Ok(Some(frame)) => frames.push(frame.to_vec()),
                    Ok(None) => break,
                    Err(error) => return (frames, Err(error)),
                }
            }
            if rest.is_empty() {
                break;
            }
        }
        (frames, Ok(()))
    }

    #[test]
    fn lengths_that_are_not_possible_are_refused_after_the_frames_before_them() {
        for length in [0, u32::try_from(FRAME_MAX).unwrap() + 1, u32::MAX] {
            let stream = [framed(b"first"), length.to_be_bytes().to_vec(), vec![7; 100]].concat();
            let (frames, end) = read(&stream, &[3]);
            assert_eq!((frames, end), (vec![framed(b"first")], Err(FrameError { length })));
        }
    }

    #[test]
    fn the_longest_frame_has_room_after_any_other() {
        let longest = framed(&vec![9; FRAME_MAX]);
        for before in [1, 100, 60_000, FRAME_MAX] {
            let stream = [framed(&vec![1; before]), longest.clone(), longest.clone(), longest.clone()].concat();
            let (frames, end) = read(&stream, &[usize::MAX]);
            assert_eq!((frames.len(), end), (4, Ok(())));
            assert!(frames[1..].iter().all(|frame| *frame == longest));
        }
    }

    #[test]
    fn a_length_is_written_before_a_frame_that_came_without() {
        let mut room = vec![5; PREFIX + FRAME_MAX + 1];
        assert_eq!(with_length(&mut room, 3).unwrap(), framed(&[5; 3]));
        assert!(with_length(&mut room, 0).is_none() && with_length(&mut room, FRAME_MAX + 1).is_none());
        assert!(with_length(&mut room[..6], 3).is_none());
    }

    proptest! {
        #[test]
        fn frames_do_not_depend_on_the_pieces_that_they_come_in(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..3000), 0..20),
            pieces in prop::collection::vec(1_usize..5000, 1..8),
            cut in 0_usize..40,
        ) {
            let whole: Vec<Vec<u8>> = payloads.iter().map(|payload| framed(payload)).collect();
            let stream = whole.concat();
            let kept = stream.len().saturating_sub(cut);
            let (frames, end) = read(&stream[..kept], &pieces);
            prop_assert_eq!(end, Ok(()));
            // All frames that are whole, and nothing of one that is cut off.
            let mut length = 0;
            let expected = whole.iter().take_while(|frame| { length += frame.len(); length <= kept }).count();
            prop_assert_eq!(&frames[..], &whole[..expected]);
        }

        #[test]
        fn any_bytes_are_frames_that_were_there_or_an_error(
            stream in prop::collection::vec(prop_oneof![4 => Just(0_u8), 1 => any::<u8>()], 0..600),
            pieces in prop::collection::vec(1_usize..200, 1..4),
        ) {
            let (frames, _) = read(&stream, &pieces);
            prop_assert!(stream.starts_with(&frames.concat()));
        }
    }
}
