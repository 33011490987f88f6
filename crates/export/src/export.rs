//! Disks under names.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use limosa_image::{Disk, GuestOffset, ImageError};
use limosa_storage::block_on;
use parking_lot::RwLock;

use crate::clients::{Access, Client, Clients, NotQuiesced};
use crate::counters::{ExportCounters, Latencies};
use crate::failure_log::FailureLog;
use crate::nbd::protocol::MAX_STRING;

/// Interval at which clients that must end are looked at.
const TICK: Duration = Duration::from_secs(1);
/// Time for those who look at an export to let go of it, and the interval at which that is checked.
const LOOK: (Duration, Duration) = (Duration::from_secs(1), Duration::from_millis(1));

/// Why a disk cannot be exported, or an export not be steered.
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
    /// No export has the name.
    #[error("no export has the name {0:?}")]
    NotFound(String),
    /// It is the disk of a device.
    #[error("the export {0:?} is served over vhost-user-blk for as long as the server runs")]
    Attached(String),
    /// Its requests in flight are not done in time.
    #[error("requests to the export {name:?} are still in flight after {within:?}")]
    Busy {
        /// Its name.
        name: String,
        /// The time that they got.
        within: Duration,
    },
    /// It was resumed while its requests were waited for.
    #[error("the export {0:?} was resumed meanwhile")]
    Resumed(String),
    /// It is being removed.
    #[error("the export {0:?} is being removed")]
    Removed(String),
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
    clients: Arc<Clients>,
    pub(crate) failures: FailureLog,
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
            clients: Arc::default(),
            failures: FailureLog::default(),
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
        self.clients.tally().counters
    }

    /// Returns how long the requests of all its clients took.
    #[must_use]
    pub fn latencies(&self) -> Latencies {
        self.clients.tally().latencies
    }

    /// Returns the number of its clients: those that have agreed on it.
    #[must_use]
    pub fn client_count(&self) -> usize {
        self.clients.count()
    }

    /// Returns whether requests wait for [`resume`](Self::resume).
    #[must_use]
    pub fn is_quiesced(&self) -> bool {
        self.clients.access() == Access::Quiesced
    }

    /// Makes acknowledged writes durable. Blocks until it is done.
    ///
    /// # Errors
    /// The disk's.
    pub fn flush(&self) -> Result<(), ExportError> {
        Ok(block_on(self.disk.flush())?)
    }

    /// Has requests wait that have not begun, waits until none is in flight, at most for `within`, and flushes the
    /// disk. From then on nothing is written to it until it is [resumed](Self::resume). The time that requests wait is
    /// not counted as their client's.
    ///
    /// # Errors
    /// [`ExportError::Busy`], or the flush failed: requests continue, unless it was quiesced before.
    /// [`ExportError::Resumed`], [`ExportError::Removed`].
    pub fn quiesce(&self, within: Duration) -> Result<(), ExportError> {
        let was_quiesced = self.is_quiesced();
        let name = || self.name.clone();
        self.clients.quiesce(within).map_err(|reason| match reason {
            NotQuiesced::Busy => ExportError::Busy { name: name(), within },
            NotQuiesced::Resumed => ExportError::Resumed(name()),
            NotQuiesced::Ended => ExportError::Removed(name()),
        })?;
        let flushed = self.flush();
        if flushed.is_err() && !was_quiesced {
            self.clients.resume();
        }
        flushed
    }

    /// Lets requests begin again. Nothing happens if they may.
    ///
    /// # Errors
    /// [`ExportError::Removed`].
    pub fn resume(&self) -> Result<(), ExportError> {
        if self.clients.resume() { Ok(()) } else { Err(ExportError::Removed(self.name.clone())) }
    }

    /// Ends all clients, closes the disk and drops it. Requests in flight are carried out and answered, further ones
    /// refused. After `drain` the connections of clients that have not taken their last replies are cut.
    fn close(mut self: Arc<Self>, drain: Duration) -> Result<ExportCounters, ExportError> {
        self.clients.end(Access::Ended);
        if !self.clients.wait_gone(drain) {
            self.clients.end(Access::Cut);
            // Requests in flight are carried out by the kernel, which may take its time.
            while !self.clients.wait_gone(TICK) {}
        }
        let (closed, counters) = (block_on(self.disk.close()), self.counters());
        // The file of a disk is unlocked when the disk is dropped. Handshakes and queries hold the export for moments.
        let begun = Instant::now();
        while let Err(shared) = Arc::try_unwrap(self) {
            if begun.elapsed() >= LOOK.0 {
                break;
            }
            thread::sleep(LOOK.1);
            self = shared;
        }
        closed?;
        Ok(counters)
    }

    /// Adds a client.
    pub(crate) fn join(&self) -> Client {
        self.clients.join()
    }

    /// Adds a queue of a device.
    pub(crate) fn join_queue(&self) -> Client {
        self.clients.join_queue()
    }

    /// Returns the place of an offset of the export in the disk.
    pub(crate) const fn place(&self, offset: u64) -> GuestOffset {
        GuestOffset(self.offset.saturating_add(offset))
    }
}

fn checked(text: String) -> Result<String, ExportError> {
    if text.len() > MAX_STRING || text.contains('\0') { Err(ExportError::Text(text)) } else { Ok(text) }
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

    /// Removes an export: no client finds it any more, those that it has are ended, and its disk is flushed, closed and
    /// dropped. Requests in flight are carried out and answered, further ones refused. Clients that have not taken
    /// their last replies after `drain` lose them: with no time all do. Blocks until it is done, for a second longer if
    /// the export is kept: its disk is dropped with the last reference to it. Returns what was done with it.
    ///
    /// # Errors
    /// [`ExportError::NotFound`]; [`ExportError::Attached`]; the disk cannot be closed: the export is removed all the
    /// same.
    pub fn remove(&self, name: &str, drain: Duration) -> Result<ExportCounters, ExportError> {
        let removed = {
            let mut exports = self.0.write();
            let at = exports.iter().position(|export| export.name == name);
            let at = at.ok_or_else(|| ExportError::NotFound(name.to_owned()))?;
            if exports.get(at).is_some_and(|export| export.clients.has_queues()) {
                return Err(ExportError::Attached(name.to_owned()));
            }
            exports.remove(at)
        };
        removed.close(drain)
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
