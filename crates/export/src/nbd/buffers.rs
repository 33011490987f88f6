//! Long buffers of a connection, used again.
//!
//! Memory that is new to a process costs a page fault for each page, which takes longer than copying the page. A client
//! that reads or writes much asks for the same length again and again. Bytes of one request may be left in a buffer of
//! another one of the same connection; each is filled as a whole before it is used. Buffers that are kept count in the
//! server's budget, and those of a connection that has become idle are freed.

use std::sync::Arc;

use limosa_storage::Buffer;
use parking_lot::Mutex;

use super::budget::Budget;

/// The shortest buffer that is kept: shorter ones come from memory that is there already.
const KEPT_FROM: usize = 64 << 10;
/// The most bytes that are kept.
const KEPT_MAX: usize = 8 << 20;

/// The buffers that are free. A clone is the same set; it is used by one thread.
#[derive(Debug, Clone)]
pub(super) struct Buffers(Arc<Kept>);

#[derive(Debug)]
struct Kept {
    free: Mutex<Free>,
    budget: Arc<Budget>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.budget.release(self.free.get_mut().bytes);
    }
}

#[derive(Debug, Default)]
struct Free {
    buffers: Vec<Buffer>,
    bytes: usize,
}

impl Buffers {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        Self(Arc::new(Kept { free: Mutex::default(), budget }))
    }

    /// Returns a buffer with any contents.
    pub(super) fn take(&self, length: usize) -> Buffer {
        if length >= KEPT_FROM {
            let mut free = self.0.free.lock();
            if let Some(at) = free.buffers.iter().position(|buffer| buffer.len() == length) {
                free.bytes -= length;
                self.0.budget.release(length);
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
        let mut free = self.0.free.lock();
        while free.bytes + length > KEPT_MAX && !free.buffers.is_empty() {
            // The oldest: of another length, or there are enough.
            let dropped = free.buffers.remove(0).len();
            free.bytes -= dropped;
            self.0.budget.release(dropped);
        }
        if self.0.budget.keep(length) {
            free.bytes += length;
            free.buffers.push(buffer);
        }
    }

    /// Frees all.
    pub(super) fn clear(&self) {
        let freed = std::mem::take(&mut *self.0.free.lock());
        self.0.budget.release(freed.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::Limits;

    #[test]
    fn long_buffers_are_used_again_and_not_too_many_are_kept() {
        let budget = Arc::new(Budget::new(&Limits::default()));
        let buffers = Buffers::new(Arc::clone(&budget));
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
        {
            let free = buffers.0.free.lock();
            assert_eq!((free.buffers.len(), free.bytes), (8, (7 << 20) + (64 << 10)));
        }
        let most = Limits::default().total_bytes / 4;
        assert!(!budget.keep(most), "they count");
        buffers.clear();
        assert!(budget.keep(most) && buffers.0.free.lock().buffers.is_empty());
    }
}
