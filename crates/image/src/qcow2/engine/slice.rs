//! A slice of an L2 table, which is looked at while it is changed.
//!
//! Law: it is changed under the lock of its shard, by one thread at a time, and looked at without a lock. Its version
//! is odd while it is changed, and is the same before and after a look that found nothing half-way changed (a seqlock:
//! H. Boehm, *Can seqlocks get along with programming language memory models?*, 2012). A slice that is no longer kept
//! has a version that no look accepts, so nobody finds in it what has changed since.

#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// A word of a slice, changed under the lock of its shard.
pub(super) type SharedWord = AtomicU64;

/// The version of a slice that is no longer kept.
const GONE: u64 = u64::MAX;

/// Aligned: whoever counts references to it does not write to a line that others look at.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Slice {
    version: AtomicU64,
    /// Looked at since it was last passed over.
    recent: AtomicBool,
    words: Box<[SharedWord]>,
}

/// Why a look found nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoLook {
    /// It is being changed.
    Changing,
    /// It is no longer kept.
    Gone,
}

impl Slice {
    pub(super) fn new(words: &[u64]) -> Self {
        let words = words.iter().map(|word| SharedWord::new(*word)).collect();
        Self { version: AtomicU64::new(0), recent: AtomicBool::new(true), words }
    }

    /// Its words, which do not change as long as the shard is locked.
    pub(super) fn words(&self) -> &[SharedWord] {
        &self.words
    }

    /// Copies words from `at` on as they are at one moment: as many as there are, and as fit. Returns how many.
    pub(super) fn copy(&self, at: usize, into: &mut [u64]) -> Result<usize, NoLook> {
        let before = self.version.load(Ordering::Acquire);
        if before % 2 == 1 {
            return Err(if before == GONE { NoLook::Gone } else { NoLook::Changing });
        }
        let count = self.copy_unchanged(at, into);
        fence(Ordering::Acquire);
        if self.version.load(Ordering::Relaxed) == before { Ok(count) } else { Err(NoLook::Changing) }
    }

    /// The same with the shard locked, so that nothing changes.
    pub(super) fn copy_unchanged(&self, at: usize, into: &mut [u64]) -> usize {
        self.touch();
        let mut count = 0;
        for (to, word) in into.iter_mut().zip(self.words.get(at..).unwrap_or_default()) {
            *to = word.load(Ordering::Relaxed);
            count += 1;
        }
        count
    }

    /// Changes words. Only with the shard locked. From before `change` is called no look succeeds until it is over.
    pub(super) fn change<R>(&self, change: impl FnOnce(&[SharedWord]) -> R) -> R {
        self.touch();
        // Odd already, if a change before has panicked.
        let version = self.version.load(Ordering::Relaxed) | 1;
        self.version.store(version, Ordering::Relaxed);
        // Not of stores alone: what `change` reads is not older than the version either (see the zeroer, which reads
        // the disk's size).
        fence(Ordering::SeqCst);
        let changed = change(&self.words);
        self.version.store(version.wrapping_add(1), Ordering::Release);
        changed
    }

    /// It is no longer kept. Only with the shard locked.
    pub(super) fn gone(&self) {
        self.version.store(GONE, Ordering::Relaxed);
    }

    /// Returns whether it was looked at since this was last called. Only with the shard locked.
    pub(super) fn pass_over(&self) -> bool {
        let recent = self.recent.load(Ordering::Relaxed);
        self.recent.store(false, Ordering::Relaxed);
        recent
    }

    /// Notes that it was looked at. Most were before: their cache line is not written to.
    pub(super) fn touch(&self) {
        if !self.recent.load(Ordering::Relaxed) {
            self.recent.store(true, Ordering::Relaxed);
        }
    }
}

/// Compiled for the model checker loom only; run by `cargo xtask test`.
#[cfg(all(test, loom))]
mod models {
    use std::sync::Arc;

    use loom::thread;

    use super::*;

    #[test]
    fn a_look_beside_changes_sees_all_of_one_or_nothing() {
        let mut checker = loom::model::Builder::new();
        checker.preemption_bound = Some(3);
        checker.check(|| {
            let slice = Arc::new(Slice::new(&[1, 1]));
            let changing = Arc::clone(&slice);
            let writer = thread::spawn(move || {
                for value in [2, 3] {
                    changing.change(|words| words.iter().for_each(|word| word.store(value, Ordering::Relaxed)));
                }
                changing.gone();
            });
            let mut seen = [0; 2];
            match slice.copy(0, &mut seen) {
                Ok(count) => assert!(count == 2 && seen[0] == seen[1], "{seen:?}"),
                Err(NoLook::Changing | NoLook::Gone) => {}
            }
            writer.join().unwrap();
            assert_eq!(slice.copy(0, &mut seen), Err(NoLook::Gone));
        });
    }

    #[test]
    fn what_was_changed_before_is_seen() {
        loom::model(|| {
            let slice = Arc::new(Slice::new(&[1]));
            let done = Arc::new(AtomicBool::new(false));
            let (changing, says) = (Arc::clone(&slice), Arc::clone(&done));
            let writer = thread::spawn(move || {
                changing.change(|words| words[0].store(2, Ordering::Relaxed));
                says.store(true, Ordering::Release);
            });
            let was_done = done.load(Ordering::Acquire);
            let mut seen = [0];
            if slice.copy(0, &mut seen).is_ok() && was_done {
                assert_eq!(seen, [2]);
            }
            writer.join().unwrap();
        });
    }
}
