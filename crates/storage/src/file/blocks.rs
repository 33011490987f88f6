//! Writes of partial blocks.
//!
//! **Law: a write of a partial block never loses the neighbouring bytes.** Direct I/O writes whole blocks. A request
//! for part of a block reads the rest first and writes it back, which would undo a concurrent write to the rest. So a
//! partial write holds its blocks exclusively.
//!
//! While there are no partial writes, writes of whole blocks only increment a counter. A partial write announces
//! itself, so that later writes check the held ranges, and waits until all counted writes are complete. Only threads of
//! the pool wait: writes in flight never wait for them.

use std::ops::Range;
use std::sync::PoisonError;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicUsize, Ordering, fence};
#[cfg(not(loom))]
use std::sync::{Condvar, Mutex, MutexGuard};

#[cfg(loom)]
use loom::sync::atomic::{AtomicUsize, Ordering, fence};
#[cfg(loom)]
use loom::sync::{Condvar, Mutex, MutexGuard};

/// Writes in flight to the blocks of a file.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    /// Writes of whole blocks in flight that hold no range.
    counted: AtomicUsize,
    /// Partial writes, including those that wait.
    parts: AtomicUsize,
    held: Mutex<Vec<Range<u64>>>,
    changed: Condvar,
}

impl Blocks {
    /// Counts a write of whole blocks. False if there are partial writes: then its range must be held.
    pub(crate) fn count(&self) -> bool {
        self.counted.fetch_add(1, Ordering::Relaxed);
        // Either this thread sees the partial write, or the partial write sees this count: both fences are sequentially
        // consistent.
        fence(Ordering::SeqCst);
        if self.parts.load(Ordering::Acquire) == 0 {
            return true;
        }
        self.uncount();
        false
    }

    /// Ends a counted write.
    pub(crate) fn uncount(&self) {
        let was = self.counted.fetch_sub(1, Ordering::Release);
        // As above: the waiting thread sees the new count, or this thread sees that it waits.
        fence(Ordering::SeqCst);
        if was == 1 && self.parts.load(Ordering::Relaxed) > 0 {
            drop(self.lock());
            self.changed.notify_all();
        }
    }

    /// Waits until no held range overlaps this one, and holds it. For changes of whole blocks.
    pub(crate) fn hold(&self, range: Range<u64>) -> HeldRange<'_> {
        let mut held = self.lock();
        while held.iter().any(|other| other.start < range.end && range.start < other.end) {
            held = self.changed.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        held.push(range.clone());
        HeldRange { blocks: self, range, is_part: false }
    }

    /// Holds a range, and waits until no counted write is in flight. For partial writes.
    pub(crate) fn hold_for_parts(&self, range: Range<u64>) -> HeldRange<'_> {
        self.parts.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut hold = self.hold(range);
        hold.is_part = true;
        let mut held = self.lock();
        while self.counted.load(Ordering::Acquire) > 0 {
            held = self.changed.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        drop(held);
        hold
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A range that no other write may change partially.
#[derive(Debug)]
pub(crate) struct HeldRange<'a> {
    blocks: &'a Blocks,
    range: Range<u64>,
    is_part: bool,
}

impl Drop for HeldRange<'_> {
    fn drop(&mut self) {
        let mut held = self.blocks.lock();
        if let Some(index) = held.iter().position(|range| *range == self.range) {
            held.swap_remove(index);
        }
        drop(held);
        if self.is_part {
            self.blocks.parts.fetch_sub(1, Ordering::Release);
        }
        self.blocks.changed.notify_all();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn whole_blocks_only_count_themselves_until_there_are_parts() {
        let blocks = Blocks::default();
        assert!(blocks.count() && blocks.count());
        blocks.uncount();
        blocks.uncount();
        let part = blocks.hold_for_parts(0..512);
        assert!(!blocks.count());
        // Another range does not wait.
        drop(blocks.hold(512..1024));
        drop(part);
        assert!(blocks.count());
        assert_eq!(blocks.counted.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_write_of_parts_waits_for_counted_ones_and_keeps_held_ones_waiting() {
        let blocks = Arc::new(Blocks::default());
        assert!(blocks.count());
        let (begun, changed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let part = {
            let (blocks, begun, changed) = (Arc::clone(&blocks), Arc::clone(&begun), Arc::clone(&changed));
            thread::spawn(move || {
                let _held = blocks.hold_for_parts(0..512);
                begun.store(true, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(20));
                assert!(!changed.load(Ordering::SeqCst), "a whole block was written during a partial write");
            })
        };
        while blocks.count() {
            blocks.uncount();
            thread::yield_now();
        }
        assert!(!begun.load(Ordering::SeqCst), "a partial write began while a counted write was in flight");
        blocks.uncount();
        while !begun.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        let whole = blocks.hold(0..4096);
        changed.store(true, Ordering::SeqCst);
        drop(whole);
        part.join().unwrap();
        assert!(blocks.count());
    }
}

/// Compiled for the model checker loom only; run by `cargo xtask test`.
#[cfg(all(test, loom))]
mod models {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// A block of two bytes; the device writes it byte by byte.
    struct Block([AtomicUsize; 2]);

    impl Block {
        fn write_whole(&self, blocks: &Blocks, contents: usize) {
            let write = || self.0.iter().for_each(|byte| byte.store(contents, Ordering::Relaxed));
            if blocks.count() {
                write();
                blocks.uncount();
            } else {
                let _held = blocks.hold(0..2);
                write();
            }
        }

        fn write_part(&self, blocks: &Blocks, part: usize, contents: usize) {
            let _held = blocks.hold_for_parts(0..2);
            let other = self.0[1 - part].load(Ordering::Relaxed);
            self.0[part].store(contents, Ordering::Relaxed);
            self.0[1 - part].store(other, Ordering::Relaxed);
        }
    }

    fn model(threads: Vec<fn(&Block, &Blocks)>, check: fn([usize; 2])) {
        let mut checker = loom::model::Builder::new();
        checker.preemption_bound = Some(3);
        checker.check(move || {
            let shared = Arc::new((Block([AtomicUsize::new(0), AtomicUsize::new(0)]), Blocks::default()));
            let threads: Vec<_> = threads
                .iter()
                .map(|write| {
                    let (shared, write) = (Arc::clone(&shared), *write);
                    thread::spawn(move || write(&shared.0, &shared.1))
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            check([0, 1].map(|byte| shared.0.0[byte].load(Ordering::Relaxed)));
            assert!(shared.1.count(), "a write is still counted or held");
        });
    }

    #[test]
    fn a_write_of_a_part_never_undoes_a_write_of_the_whole() {
        model(
            vec![|block, blocks| block.write_whole(blocks, 1), |block, blocks| block.write_part(blocks, 1, 2)],
            |bytes| {
                assert_eq!(bytes[0], 1);
                assert!([1, 2].contains(&bytes[1]));
            },
        );
    }

    #[test]
    fn writes_of_parts_leave_each_other_alone() {
        model(
            vec![|block, blocks| block.write_part(blocks, 0, 1), |block, blocks| block.write_part(blocks, 1, 2)],
            |bytes| {
                assert_eq!(bytes, [1, 2]);
            },
        );
    }
}
