//! Where bytes of the main channel arrive and are decoded in place.

use limosa_channel::Channel;
use limosa_page::{BrokenInvariant, broken_invariant, invariant};

use crate::error::MigrateError;

/// Size of the receive buffer. It should stay in a core's second-level cache between the read that fills it and the
/// write that empties it.
pub(super) const BUFFER_LEN: usize = 1 << 20;

/// The receive buffer: `bytes[start..end]` has arrived and is not decoded yet. What lies before `start` stays in place
/// until the buffer is given away, so that slices of it can go to the sink.
pub(super) struct Buffer {
    pub(super) bytes: Box<[u8]>,
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Buffer {
    /// A buffer in which `head` has arrived.
    pub(super) fn new(head: &[u8]) -> Self {
        let mut bytes = head.to_vec();
        bytes.resize(head.len().max(BUFFER_LEN), 0);
        Self { bytes: bytes.into_boxed_slice(), start: 0, end: head.len() }
    }

    /// Returns the bytes that have arrived and are not decoded yet.
    pub(super) fn arrived(&self) -> Result<&[u8], BrokenInvariant> {
        self.bytes
            .get(self.start..self.end)
            .ok_or_else(|| broken_invariant("bytes that have arrived are in the buffer"))
    }

    /// Bytes that have arrived and are not decoded yet.
    pub(super) fn len(&self) -> usize {
        self.end.saturating_sub(self.start)
    }

    pub(super) fn consume(&mut self, count: usize) {
        self.start = self.end.min(self.start + count);
    }

    /// Moves the bytes that have arrived and are not decoded to the front. No slice may be in use: nothing that was
    /// decoded before stays in its place.
    pub(super) fn move_to_front(&mut self) -> Result<(), BrokenInvariant> {
        invariant(self.start <= self.end && self.end <= self.bytes.len(), "bytes that have arrived are in the buffer")?;
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.len());
        Ok(())
    }

    /// Whether `count` more bytes behind `start` would not fit into this buffer.
    pub(super) fn is_short_of(&self, count: usize) -> bool {
        self.bytes.len() - self.start < count
    }

    /// Continues in another buffer, whose first bytes are those that have arrived and are not decoded.
    pub(super) fn begin_with(&mut self, bytes: Box<[u8]>, rest: &[u8]) -> Result<(), BrokenInvariant> {
        self.bytes = bytes;
        let begin = self
            .bytes
            .get_mut(..rest.len())
            .ok_or_else(|| broken_invariant("bytes not decoded yet fit into a buffer"))?;
        begin.copy_from_slice(rest);
        (self.start, self.end) = (0, rest.len());
        Ok(())
    }

    pub(super) fn fill(&mut self, channel: &Channel) -> Result<usize, MigrateError> {
        // A read of no bytes would pass for the end of the stream.
        invariant(self.end < self.bytes.len(), "a buffer that is read into has room")?;
        let room =
            self.bytes.get_mut(self.end..).ok_or_else(|| broken_invariant("a buffer that is read into has room"))?;
        let got = channel.read(room)?;
        self.end += got;
        Ok(got)
    }
}
