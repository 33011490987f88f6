//! Disks under names.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use limosa_image::{Disk, GuestOffset, ImageError};
use parking_lot::RwLock;

use crate::nbd::protocol::MAX_STRING;

/// Why a disk cannot be exported.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The part of the disk that was asked for is not in it.
    #[error("{disk} of {length} bytes has no {size} bytes at offset {offset}")]
    PastEnd {
        /// The disk's name.
        disk: Arc<str>,
        /// Its length in bytes.
        length: u64,
        /// Offset of the part.
        offset: u64,
        /// Bytes of the part.
        size: u64,
    },
    /// A name or a description is longer than the protocol allows, or has a NUL.
    #[error("the name or description of an export must have at most {MAX_STRING} bytes and no NUL: {0:?}")]
    Text(String),
    /// Another export has the name.
    #[error("two exports have the name {0:?}")]
    Exists(String),
    /// Its disk failed.
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// A disk, or a part of it, that clients may use under a name.
#[derive(Debug)]
pub struct Export {
    name: String,
    description: String,
    disk: Arc<dyn Disk>,
    offset: u64,
    size: u64,
    read_only: bool,
    pub(crate) activity: Activity,
}

impl Export {
    /// Creates an export of a whole disk. The empty name is that of the default export. It is read-only if the disk is.
    ///
    /// # Errors
    /// [`ExportError::Text`].
    pub fn new(name: impl Into<String>, disk: Arc<dyn Disk>) -> Result<Self, ExportError> {
        let (size, read_only) = (disk.len(), disk.is_read_only());
        let export = Self {
            name: checked(name.into())?,
            description: String::new(),
            disk,
            offset: 0,
            size,
            read_only,
            activity: Activity::default(),
        };
        Ok(export)
    }

    /// Limits it to `size` bytes of the disk from `offset` on; `None`: up to its end.
    ///
    /// # Errors
    /// [`ExportError::PastEnd`].
    pub fn part(mut self, offset: u64, size: Option<u64>) -> Result<Self, ExportError> {
        let length = self.disk.len();
        let rest = length.checked_sub(offset).filter(|rest| size.is_none_or(|size| size <= *rest));
        let Some(rest) = rest else {
            let disk = Arc::clone(self.disk.name());
            return Err(ExportError::PastEnd { disk, length, offset, size: size.unwrap_or(0) });
        };
        (self.offset, self.size) = (offset, size.unwrap_or(rest));
        Ok(self)
    }

    /// Refuses writes, if `read_only`.
    #[must_use]
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only |= read_only;
        self
    }

    /// Gives it a description for people.
    ///
    /// # Errors
    /// [`ExportError::Text`].
    pub fn description(mut self, description: impl Into<String>) -> Result<Self, ExportError> {
        self.description = checked(description.into())?;
        Ok(self)
    }

    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its description; empty if it has none.
    #[must_use]
    pub fn description_text(&self) -> &str {
        &self.description
    }

    /// Returns its length in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns whether writes are refused.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the disk.
    #[must_use]
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// Returns the counters of all its clients.
    #[must_use]
    pub fn counters(&self) -> ExportCounters {
        self.activity.counters()
    }

    /// Returns the place of an offset of the export in the disk.
    pub(crate) const fn place(&self, offset: u64) -> GuestOffset {
        GuestOffset(self.offset.saturating_add(offset))
    }
}

fn checked(text: String) -> Result<String, ExportError> {
    if text.len() > MAX_STRING || text.contains('\0') { Err(ExportError::Text(text)) } else { Ok(text) }
}

/// Counters of an export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportCounters {
    /// Reads that succeeded.
    pub reads: u64,
    /// Bytes that they returned.
    pub read_bytes: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Bytes that they wrote.
    pub written_bytes: u64,
    /// Zeroings and trims that succeeded.
    pub zeroes: u64,
    /// Bytes that they covered.
    pub zeroed_bytes: u64,
    /// Flushes that succeeded.
    pub flushes: u64,
    /// Other requests that succeeded.
    pub others: u64,
    /// Requests that failed.
    pub failures: u64,
}

/// The counters in use.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    zeroes: AtomicU64,
    zeroed_bytes: AtomicU64,
    flushes: AtomicU64,
    others: AtomicU64,
    failures: AtomicU64,
}

impl Activity {
    /// Adds the counters of a connection, which counts by itself.
    pub(crate) fn add(&self, counters: &ExportCounters) {
        let ExportCounters { reads, read_bytes, writes, written_bytes, zeroes, zeroed_bytes, .. } = counters;
        let ExportCounters { flushes, others, failures, .. } = counters;
        let pairs = [
            (&self.reads, reads),
            (&self.read_bytes, read_bytes),
            (&self.writes, writes),
            (&self.written_bytes, written_bytes),
            (&self.zeroes, zeroes),
            (&self.zeroed_bytes, zeroed_bytes),
            (&self.flushes, flushes),
            (&self.others, others),
            (&self.failures, failures),
        ];
        for (total, more) in pairs {
            if *more != 0 {
                total.fetch_add(*more, Ordering::Relaxed);
            }
        }
    }

    fn counters(&self) -> ExportCounters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ExportCounters {
            reads: of(&self.reads),
            read_bytes: of(&self.read_bytes),
            writes: of(&self.writes),
            written_bytes: of(&self.written_bytes),
            zeroes: of(&self.zeroes),
            zeroed_bytes: of(&self.zeroed_bytes),
            flushes: of(&self.flushes),
            others: of(&self.others),
            failures: of(&self.failures),
        }
    }
}

/// The exports of a server. A clone is the same set.
#[derive(Debug, Clone, Default)]
pub struct Exports(Arc<RwLock<Vec<Arc<Export>>>>);

impl Exports {
    /// Creates an empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an export.
    ///
    /// # Errors
    /// [`ExportError::Exists`].
    pub fn add(&self, export: Export) -> Result<Arc<Export>, ExportError> {
        let mut exports = self.0.write();
        if exports.iter().any(|other| other.name == export.name) {
            return Err(ExportError::Exists(export.name));
        }
        let export = Arc::new(export);
        exports.push(Arc::clone(&export));
        Ok(export)
    }

    /// Returns the export with a name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<Arc<Export>> {
        self.0.read().iter().find(|export| export.name == name).cloned()
    }

    /// Returns all of them, in the order in which they were added.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Export>> {
        self.0.read().clone()
    }
}

#[cfg(test)]
mod tests {
    use limosa_image::raw::{Raw, RawOptions};
    use limosa_storage::MemoryStorage;

    use super::*;

    fn export(name: &str) -> Result<Export, ExportError> {
        let disk = Raw::open(Arc::new(MemoryStorage::with_contents(vec![0; 4096], 4096)), &RawOptions::default())?;
        Export::new(name, disk)
    }

    #[test]
    fn a_part_is_inside_the_disk() {
        let part = |offset, size| Ok::<_, ExportError>(export("")?.part(offset, size)?.size());
        assert_eq!(part(512, None).unwrap(), 3584);
        assert_eq!(part(512, Some(100)).unwrap(), 100);
        assert_eq!(part(4096, Some(0)).unwrap(), 0);
        for (offset, size) in [(4097, None), (0, Some(4097)), (u64::MAX, Some(2)), (2, Some(u64::MAX))] {
            assert!(matches!(part(offset, size), Err(ExportError::PastEnd { .. })), "{offset} {size:?}");
        }
    }

    #[test]
    fn names_are_unique_and_short() {
        let exports = Exports::new();
        exports.add(export("a").unwrap()).unwrap();
        exports.add(export("").unwrap()).unwrap();
        assert!(matches!(exports.add(export("a").unwrap()), Err(ExportError::Exists(name)) if name == "a"));
        assert!(exports.find("a").is_some() && exports.find("").is_some() && exports.find("b").is_none());
        assert!(export(&"x".repeat(4096)).is_ok());
        assert!(matches!(export(&"x".repeat(4097)), Err(ExportError::Text(_))));
        assert!(matches!(export("a\0b"), Err(ExportError::Text(_))));
    }
}
