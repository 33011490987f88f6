//! Long buffers of a connection, used again.
//!
//! Memory that is new to a process costs a page fault for each page, which takes longer than copying the page. A client
//! that reads or writes much asks for the same length again and again. Bytes of one request may be left in a buffer of
//! another one of the same connection; each is filled as a whole before it is used.

use std::sync::Arc;

use limosa_storage::Buffer;
use parking_lot::Mutex;

/// The shortest buffer that is kept: shorter ones come from memory that is there already.
const KEPT_FROM: usize = 64 << 10;
/// The most bytes that are kept.
const KEPT_MAX: usize = 8 << 20;

/// The buffers that are free. A clone is the same set; it is used by one thread.
#[derive(Debug, Clone, Default)]
pub(super) struct Buffers(Arc<Mutex<Free>>);

#[derive(Debug, Default)]
struct Free {
    buffers: Vec<Buffer>,
    bytes: usize,
}

impl Buffers {
    /// Returns a buffer with any contents.
    pub(super) fn take(&self, length: usize) -> Buffer {
        if length >= KEPT_FROM {
            let mut free = self.0.lock();
            if let Some(at) = free.buffers.iter().position(|buffer| buffer.len() == length) {
                free.bytes -= length;
                return free.buffers.swap_remove(at);
            }
        }
        Buffer::zeroed(length)
    }

    /// Takes a buffer back that nothing uses any more, as a whole.
    pub(super) fn give_back(&self, buffer: Buffer) {
        let length = buffer.len();
        if !(KEPT_FROM..=KEPT_MAX).contains(&length) {
            return;
        }
        let mut free = self.0.lock();
        while free.bytes + length > KEPT_MAX && !free.buffers.is_empty() {
            // The oldest: of another length, or there are enough.
            free.bytes -= free.buffers.remove(0).len();
        }
        free.bytes += length;
        free.buffers.push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_buffers_are_used_again_and_not_too_many_are_kept() {
        let buffers = Buffers::default();
        let first = buffers.take(1 << 20);
        let address = first.address();
        buffers.give_back(first);
        assert!(buffers.take(1 << 20).address() == address);
        for _ in 0..20 {
            buffers.give_back(Buffer::zeroed(1 << 20));
        }
        buffers.give_back(Buffer::zeroed(64 << 10));
        buffers.give_back(Buffer::zeroed(4096));
        buffers.give_back(Buffer::zeroed(16 << 20));
        let free = buffers.0.lock();
        assert_eq!((free.buffers.len(), free.bytes), (8, (7 << 20) + (64 << 10)));
    }
}
