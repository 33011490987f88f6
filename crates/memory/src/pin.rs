//! Pages that the kernel still reads after a system call has returned.
//!
//! **Law: pinned pages are not discarded.** A sender whose pages the kernel reads by itself (`MSG_ZEROCOPY`) holds
//! [`PinnedPages`] of the block until the kernel is done with them. [`discard`](crate::MemoryBlock::discard) waits for
//! all pins of the block, and no page of it is pinned again before the discard is complete: senders copy meanwhile. A
//! sender polls [`PinnedPages::blocks_discard`], so that a discard waits for the sends in flight and not for the end of
//! a round.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

/// The pins of a block.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    /// Number of pins.
    pinned: Mutex<usize>,
    /// Discards that wait or are in progress. Changed under the lock.
    discards: AtomicUsize,
    changed: Condvar,
}

/// Pages of a block that the kernel may read, until it is dropped.
#[derive(Debug)]
#[must_use = "pages are pinned only as long as it lives"]
pub struct PinnedPages<'b> {
    pins: &'b Pins,
}

impl PinnedPages<'_> {
    /// Whether these are pages of the block with `pins`.
    pub(crate) fn is_of(&self, pins: &Pins) -> bool {
        std::ptr::eq(self.pins, pins)
    }

    /// Whether a discard waits for this pin.
    pub fn blocks_discard(&self) -> bool {
        self.pins.discards.load(Ordering::Relaxed) != 0
    }
}

impl Drop for PinnedPages<'_> {
    fn drop(&mut self) {
        *self.pins.pinned.lock() -= 1;
        self.pins.changed.notify_all();
    }
}

impl Pins {
    /// Adds a pin, unless a discard is in progress or waits.
    pub(crate) fn pin(&self) -> Option<PinnedPages<'_>> {
        let mut pinned = self.pinned.lock();
        if self.discards.load(Ordering::Relaxed) != 0 {
            return None;
        }
        *pinned += 1;
        Some(PinnedPages { pins: self })
    }

    /// Waits until no page is pinned, and prevents pins until the result is dropped.
    pub(crate) fn wait_unpinned(&self) -> Unpinned<'_> {
        let mut pinned = self.pinned.lock();
        self.discards.fetch_add(1, Ordering::Relaxed);
        while *pinned != 0 {
            self.changed.wait(&mut pinned);
        }
        Unpinned(self)
    }
}

/// A discard in progress.
pub(crate) struct Unpinned<'l>(&'l Pins);

impl Drop for Unpinned<'_> {
    fn drop(&mut self) {
        let _pinned = self.0.pinned.lock();
        self.0.discards.fetch_sub(1, Ordering::Relaxed);
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use limosa_page::{PageNumber, PageRange};

    use crate::{BlockOptions, MemoryBlock};

    fn block() -> MemoryBlock {
        let block = BlockOptions::anonymous("pc.ram", 1 << 20).map().unwrap();
        block.write(0, &[7; 4096]).unwrap();
        block
    }

    fn first_byte(block: &MemoryBlock) -> u8 {
        let mut byte = [0];
        block.read(0, &mut byte).unwrap();
        byte[0]
    }

    #[test]
    fn a_discard_waits_for_every_pin_and_wants_them_back() {
        let block = block();
        let page = PageRange::new(PageNumber(0), PageNumber(1));
        let (one, other) = (block.pin().unwrap(), block.pin().unwrap());
        assert!(!one.blocks_discard());
        thread::scope(|scope| {
            let discard = scope.spawn(|| block.discard(page).unwrap());
            while !one.blocks_discard() {
                thread::yield_now();
            }
            drop(one);
            thread::sleep(Duration::from_millis(20));
            assert_eq!(first_byte(&block), 7, "it was discarded while it was pinned");
            drop(other);
            discard.join().unwrap();
        });
        assert_eq!(first_byte(&block), 0);
        assert!(!block.pin().unwrap().blocks_discard());
    }

    #[test]
    fn nothing_is_pinned_while_a_discard_is_under_way() {
        let block = block();
        let taken = block.pins().wait_unpinned();
        assert!(block.pin().is_none());
        drop(taken);
        assert!(block.pin().is_some());
    }
}
