//! The copying alternative to gathering: everything is copied into a buffer, and one call writes the buffer whenever it
//! is full. This is how a stream buffer works, and what [gathering](super::gather) is measured against.

use std::io::IoSlice;

use limosa_channel::Channel;
use limosa_memory::MemoryBlock;
use limosa_page::{PAGE_LEN, PageNumber, broken_invariant};

use crate::error::MigrateError;

/// Bytes of the buffer.
pub(crate) const BUFFER_LEN: usize = 16 << 10;

/// Bytes on their way to a channel.
#[derive(Debug)]
pub(crate) struct StreamBuffer {
    bytes: Box<[u8]>,
    filled: usize,
}

impl StreamBuffer {
    /// An empty one.
    pub(crate) fn new() -> Self {
        Self { bytes: vec![0; BUFFER_LEN].into_boxed_slice(), filled: 0 }
    }

    /// Adds bytes of this process alone.
    pub(crate) fn bytes(&mut self, channel: &Channel, mut bytes: &[u8]) -> Result<(), MigrateError> {
        while !bytes.is_empty() {
            let room = self.room(channel, bytes.len())?;
            let (now, later) = bytes.split_at(room.len());
            room.copy_from_slice(now);
            bytes = later;
        }
        Ok(())
    }

    /// Adds a page of a block.
    pub(crate) fn page(
        &mut self,
        channel: &Channel,
        block: &MemoryBlock,
        page: PageNumber,
    ) -> Result<(), MigrateError> {
        let mut copied = 0;
        while copied < PAGE_LEN {
            let room = self.room(channel, PAGE_LEN - copied)?;
            block.read(page.offset() + copied as u64, room).map_err(|error| MigrateError::Source(error.into()))?;
            copied += room.len();
        }
        Ok(())
    }

    /// Writes what is in it.
    pub(crate) fn flush(&mut self, channel: &Channel) -> Result<(), MigrateError> {
        let filled = self.bytes.get(..std::mem::take(&mut self.filled));
        let filled = filled.ok_or_else(|| broken_invariant("a buffer is filled up to its end at most"))?;
        Ok(channel.write_all_vectored(&[IoSlice::new(filled)])?)
    }

    /// Room for at least one and at most `wanted` of the bytes that come next, which count as filled.
    fn room(&mut self, channel: &Channel, wanted: usize) -> Result<&mut [u8], MigrateError> {
        if self.filled == self.bytes.len() {
            self.flush(channel)?;
        }
        let begin = self.filled;
        self.filled = self.bytes.len().min(begin.saturating_add(wanted));
        let room = self.bytes.get_mut(begin..self.filled);
        Ok(room.ok_or_else(|| broken_invariant("a buffer is filled up to its end at most"))?)
    }
}
