//! The lengths of an image's files, and their truncation by others.
//!
//! Law: nothing is written past the end of a truncated file, and lost contents are not read as zeros.

use std::sync::atomic::{AtomicU64, Ordering};

use limosa_storage::{Storage, StorageError};

/// The greatest observed lengths of an image's files.
#[derive(Debug)]
pub(super) struct Lengths {
    /// Length of the file when it was opened, in bytes.
    at_open: u64,
    /// The greatest length that was observed since.
    longest: AtomicU64,
    /// The greatest observed length of the data file, if there is one.
    longest_data: Option<AtomicU64>,
}

/// A file that was truncated: its length, and its length before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CutOff {
    pub(super) length: u64,
    pub(super) before: u64,
}

impl Lengths {
    pub(super) fn new(file: &dyn Storage, data_file: Option<&dyn Storage>) -> Result<Self, StorageError> {
        let at_open = file.length()?;
        let longest_data = data_file.map(|data_file| data_file.length()).transpose()?.map(AtomicU64::new);
        Ok(Self { at_open, longest: AtomicU64::new(at_open), longest_data })
    }

    pub(super) const fn at_open(&self) -> u64 {
        self.at_open
    }

    /// Returns the length of the file in bytes, or an error if it has been longer.
    pub(super) fn now(&self, file: &dyn Storage) -> Result<Result<u64, CutOff>, StorageError> {
        // First how long it has been: others may make it longer meanwhile.
        let before = self.longest.load(Ordering::Acquire);
        let length = file.length()?;
        self.longest.fetch_max(length, Ordering::AcqRel);
        Ok(if length >= before { Ok(length) } else { Err(CutOff { length, before }) })
    }

    /// Notes a length of the file.
    pub(super) fn is_at_least(&self, length: u64) {
        self.longest.fetch_max(length, Ordering::AcqRel);
    }

    fn of_data(&self) -> &AtomicU64 {
        self.longest_data.as_ref().unwrap_or(&self.longest)
    }

    /// Returns the greatest observed length of the storage of contents: read it before the length itself.
    pub(super) fn data_before(&self) -> u64 {
        self.of_data().load(Ordering::Acquire)
    }

    /// Notes a length of the storage of contents.
    pub(super) fn data_is_at_least(&self, length: u64) {
        self.of_data().fetch_max(length, Ordering::AcqRel);
    }
}
