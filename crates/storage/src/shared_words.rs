//! Words of a file that are written by stores to memory.
//!
//! **Law: a word that was stored is what is read from the file from then on, also if the process is killed right after;
//! a power cut may lose it. A word is touched only where the file has space for it:** a full filesystem is an error of
//! [`SharedWords::allocate`], and not the signal that a store would raise.
#![allow(unsafe_code, reason = "a file is mapped")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes of a word.
const WORD: usize = 8;

/// The words of a file, mapped. Nobody else may make the file shorter: a word behind its end cannot be touched.
#[derive(Debug)]
pub struct SharedWords {
    file: File,
    start: NonNull<AtomicU64>,
    words: usize,
    /// Words that have space.
    room: AtomicUsize,
}

// SAFETY: the memory is accessed as atomics alone, and unmapped by the drop.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Maps a file that is open to be read and written, as `words` words; it is made so long. None of them has space so
    /// far.
    ///
    /// # Errors
    /// The kernel's.
    pub fn map(file: File, words: usize) -> io::Result<Self> {
        let bytes = words.checked_mul(WORD).ok_or(io::ErrorKind::InvalidInput)?;
        file.set_len(bytes as u64)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe { mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { file, start, words, room: AtomicUsize::new(0) })
    }

    /// Gives words space: all those before `end`.
    ///
    /// # Errors
    /// The filesystem has none, or cannot tell beforehand; [`io::ErrorKind::InvalidInput`]: `end` is not in the file.
    pub fn allocate(&self, end: usize) -> io::Result<()> {
        let room = self.room.load(Ordering::Acquire);
        if end > self.words {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if end > room {
            self.allocate_only(room..end)?;
            self.room.fetch_max(end, Ordering::AcqRel);
        }
        Ok(())
    }

    fn allocate_only(&self, words: Range<usize>) -> io::Result<()> {
        let (from, bytes) = ((words.start * WORD) as u64, (words.len() * WORD) as u64);
        loop {
            match fallocate(&self.file, FallocateFlags::KEEP_SIZE, from, bytes) {
                Err(rustix::io::Errno::INTR) => {}
                allocated => return Ok(allocated?),
            }
        }
    }

    /// Returns a word; `None`: it has no space.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&AtomicU64> {
        if index >= self.room.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: `room` is at most `words`, the number of mapped words, which begin at a page and live as `self` does.
        Some(unsafe { self.start.add(index).as_ref() })
    }

    /// Returns how many words have space.
    #[must_use]
    pub fn room(&self) -> usize {
        self.room.load(Ordering::Acquire)
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: the mapping has this length, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.words * WORD) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    #[test]
    fn a_stored_word_is_read_from_the_file() {
        let file = tempfile::tempfile().unwrap();
        let words = SharedWords::map(file.try_clone().unwrap(), 1024).unwrap();
        assert_eq!((file.metadata().unwrap().len(), words.room()), (8192, 0));
        assert!(words.get(0).is_none());
        words.allocate(600).unwrap();
        assert!(words.get(600).is_none());
        words.get(599).unwrap().store(0x0102_0304_0506_0708, Ordering::Release);
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 599 * 8).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), 0x0102_0304_0506_0708);
        drop(words);
        // The next process finds it.
        let again = SharedWords::map(file, 1024).unwrap();
        again.allocate(1024).unwrap();
        assert_eq!(again.get(599).unwrap().load(Ordering::Acquire), 0x0102_0304_0506_0708);
        assert_eq!(again.allocate(1025).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
