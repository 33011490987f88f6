//! Where bytes of the main channel arrive and are decoded in place.

use limosa_channel::Channel;

use super::BUFFER_LEN;
use crate::error::MigrateError;

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
        let mut buffer = Self { bytes: Box::default(), start: 0, end: 0 };
        buffer.begin_with(vec![0; BUFFER_LEN].into_boxed_slice(), head.get(..BUFFER_LEN).unwrap_or(head));
        buffer
    }

    pub(super) fn arrived(&self) -> &[u8] {
        self.bytes.get(self.start..self.end).unwrap_or_default()
    }

    pub(super) fn consume(&mut self, count: usize) {
        self.start = self.end.min(self.start + count);
    }

    /// Whether `count` more bytes behind `start` would not fit into this buffer.
    pub(super) fn is_short_of(&self, count: usize) -> bool {
        self.bytes.len() - self.start < count
    }

    /// Goes on in another buffer, whose first bytes are those that have arrived and are not decoded.
    pub(super) fn begin_with(&mut self, bytes: Box<[u8]>, rest: &[u8]) {
        self.bytes = bytes;
        if let Some(begin) = self.bytes.get_mut(..rest.len()) {
            begin.copy_from_slice(rest);
        }
        (self.start, self.end) = (0, rest.len());
    }

    pub(super) fn fill(&mut self, channel: &Channel) -> Result<usize, MigrateError> {
        let room = self.bytes.get_mut(self.end..).unwrap_or_default();
        let got = channel.get_some(room)?;
        self.end += got;
        Ok(got)
    }
}
