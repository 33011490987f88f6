//! Pages that the kernel still reads although the call that named them has returned.
//!
//! **Law: what is lent is not discarded.** A sender that lends pages of a block to the kernel (`MSG_ZEROCOPY`) holds a
//! [`Loan`] of the block until it knows that they have gone; [`MemoryBlock::discard`] waits for all loans of the block, and
//! nothing of it is lent anew before the discard is done: who wants to, copies meanwhile. A sender looks at [`Loan::is_wanted`] now and
//! then, so that a discard waits for what is under way and not for the end of a round.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::block::MemoryBlock;

/// The loans of a block.
#[derive(Debug, Default)]
pub(crate) struct Loans {
    /// Loans that have not ended.
    lent: Mutex<usize>,
    /// Discards that wait or are under way. Changed under the lock.
    discards: AtomicUsize,
    changed: Condvar,
}

/// Pages of a block that the kernel has been lent, until it is dropped.
#[derive(Debug)]
#[must_use = "what is lent is lent only as long as it lives"]
pub struct Loan<'b> {
    block: &'b MemoryBlock,
}

impl MemoryBlock {
    /// Lends the block's pages: none is discarded as long as the loan lives. `None` while a discard is in progress or waits.
    pub fn lend(&self) -> Option<Loan<'_>> {
        let loans = self.loans();
        let mut lent = loans.lock();
        if loans.discards.load(Ordering::Relaxed) != 0 {
            return None;
        }
        *lent += 1;
        Some(Loan { block: self })
    }
}

impl<'b> Loan<'b> {
    /// The block.
    pub fn block(&self) -> &'b MemoryBlock {
        self.block
    }

    /// Whether a discard waits for it to end.
    pub fn is_wanted(&self) -> bool {
        self.block.loans().discards.load(Ordering::Relaxed) != 0
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        let loans = self.block.loans();
        *loans.lock() -= 1;
        loans.changed.notify_all();
    }
}

impl Loans {
    /// Waits until nothing is lent, and keeps it so until what is returned is dropped.
    pub(crate) fn take_back(&self) -> TakenBack<'_> {
        let mut lent = self.lock();
        self.discards.fetch_add(1, Ordering::Relaxed);
        while *lent != 0 {
            lent = self.wait(lent);
        }
        TakenBack(self)
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        // Nothing panics while it is held.
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'l>(&self, lent: MutexGuard<'l, usize>) -> MutexGuard<'l, usize> {
        self.changed.wait(lent).unwrap_or_else(PoisonError::into_inner)
    }
}

/// A discard under way.
pub(crate) struct TakenBack<'l>(&'l Loans);

impl Drop for TakenBack<'_> {
    fn drop(&mut self) {
        let _lent = self.0.lock();
        self.0.discards.fetch_sub(1, Ordering::Relaxed);
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use limosa_page::{PageNumber, PageRange};

    use super::*;
    use crate::BlockOptions;

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
    fn a_discard_waits_for_every_loan_and_wants_them_back() {
        let block = block();
        let page = PageRange::new(PageNumber(0), PageNumber(1));
        let (one, other) = (block.lend().unwrap(), block.lend().unwrap());
        assert!(!one.is_wanted());
        thread::scope(|scope| {
            let discard = scope.spawn(|| block.discard(page).unwrap());
            while !one.is_wanted() {
                thread::yield_now();
            }
            drop(one);
            thread::sleep(Duration::from_millis(20));
            assert_eq!(first_byte(&block), 7, "it was discarded while it was lent");
            drop(other);
            discard.join().unwrap();
        });
        assert_eq!(first_byte(&block), 0);
        assert!(!block.lend().unwrap().is_wanted());
    }

    #[test]
    fn nothing_is_lent_while_a_discard_is_under_way() {
        let block = block();
        let taken = block.loans().take_back();
        assert!(block.lend().is_none());
        drop(taken);
        assert!(block.lend().is_some());
    }
}
