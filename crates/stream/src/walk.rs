//! A decoder driven over something that can be read at offsets: a mapped-ram file, a recorded stream.

use crate::decoder::{Decoder, DecoderOptions, Event, Step};
use crate::error::StreamError;
use limosa_page::{BrokenInvariant, invariant, to_u64};
use std::io;

/// Reads into the buffer at a file offset; returns the number of bytes, 0 only at the end of the file.
pub trait ReadAt: FnMut(u64, &mut [u8]) -> io::Result<usize> {}

impl<F: FnMut(u64, &mut [u8]) -> io::Result<usize>> ReadAt for F {}

/// The reason why a walk ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WalkError {
    /// The stream is invalid.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// Reading failed.
    #[error("cannot read {wanted} bytes at offset {offset:#x}")]
    Read {
        /// File offset of the read.
        offset: u64,
        /// Bytes that were asked for.
        wanted: usize,
        /// The reader's error.
        source: io::Error,
    },
}

/// A [`Decoder`] and a window over the file it decodes.
///
/// Page payloads and packages are passed over without being read, and the jumps of a mapped-ram file are followed, so
/// walking costs what is between the pages. The reads themselves are the caller's, as a closure.
#[derive(Debug)]
pub struct StreamWalk<R> {
    decoder: Decoder,
    source: R,
    base: u64,
    /// File offset of the next byte to decode.
    position: u64,
    window: Box<[u8]>,
    /// The part of the window that holds the bytes at `position`.
    begin: usize,
    end: usize,
    /// Small while pages are jumped over, so that a jump does not throw much away; doubled while events follow closely.
    ahead: usize,
}

const SMALLEST_READ: usize = 512;

impl<R: ReadAt> StreamWalk<R> {
    /// Walks the stream that begins at `options.base`.
    pub fn new(source: R, options: DecoderOptions) -> Self {
        Self {
            decoder: Decoder::with_options(options),
            source,
            base: options.base,
            position: options.base,
            window: vec![0; Decoder::LARGEST_NEED].into_boxed_slice(),
            begin: 0,
            end: 0,
            ahead: SMALLEST_READ,
        }
    }

    /// File offset of the next event, behind any payload of the last one.
    pub fn offset(&self) -> u64 {
        self.position
    }

    /// The decoder, for what it knows about the RAM blocks.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The next event. The payload of [`Event::Page`] is the 4096 bytes before [`offset`](Self::offset), that of
    /// [`Event::Package`] the `length` bytes before it. After [`Event::DeviceTail`] or [`Event::EndOfStream`] the walk
    /// is over; the next call says the same again.
    ///
    /// # Errors
    /// A read that failed, a stream that is wrong or ends inside something.
    pub fn next_event(&mut self) -> Result<Event, WalkError> {
        loop {
            let input = &self.window[self.begin..self.end];
            let available = input.len();
            match self.decoder.step(input)? {
                Step::Need(wanted) => self.fill(wanted)?,
                Step::Event { consumed, event } => {
                    check_consumed(consumed, available)
                        .map_err(|broken| StreamError::new(self.position, "window of a walk", broken.into()))?;
                    self.begin += consumed;
                    let target = self.base.saturating_add(self.decoder.offset());
                    self.position = self.position.saturating_add(to_u64(consumed));
                    if target != self.position {
                        self.jump(target);
                    }
                    return Ok(event);
                }
            }
        }
    }

    /// Ends the walk; returns the bytes read from [`offset`](Self::offset) on, for a source that can be read only once.
    pub fn into_read_ahead(self) -> Vec<u8> {
        self.window[self.begin..self.end].to_vec()
    }

    /// Continues at file offset `target`, inside the window if possible.
    fn jump(&mut self, target: u64) {
        let distance = target.checked_sub(self.position).and_then(|distance| usize::try_from(distance).ok());
        match distance.and_then(|distance| self.begin.checked_add(distance)).filter(|begin| *begin <= self.end) {
            Some(begin) => self.begin = begin,
            None => {
                (self.begin, self.end) = (0, 0);
                self.ahead = SMALLEST_READ;
            }
        }
        self.position = target;
    }

    /// Makes the window hold at least `wanted` bytes at `position`.
    fn fill(&mut self, wanted: usize) -> Result<(), WalkError> {
        self.window.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        let goal = wanted.max(self.ahead).min(self.window.len());
        self.ahead = self.ahead.saturating_mul(2).min(self.window.len());
        while self.end < wanted {
            let offset = self.position.saturating_add(to_u64(self.end));
            let Some(free) = self.window.get_mut(self.end..goal).filter(|free| !free.is_empty()) else {
                return Err(self.decoder.truncated_error(self.end, wanted).into());
            };
            let asked = free.len();
            match (self.source)(offset, free) {
                Ok(0) => return Err(self.decoder.truncated_error(self.end, wanted).into()),
                Ok(came) => self.end += came.min(asked),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(WalkError::Read { offset, wanted: asked, source }),
            }
        }
        Ok(())
    }
}

/// Asserts that a decoder consumed bytes of the window only.
fn check_consumed(consumed: usize, available: usize) -> Result<(), BrokenInvariant> {
    invariant(consumed <= available, "a decoder consumes no more than it was given")
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "a decoder consumes no more than it was given")]
    fn bytes_consumed_behind_the_window_are_a_broken_invariant() {
        assert_eq!(check_consumed(8, 8), Ok(()));
        let _ = check_consumed(9, 8);
    }
}
