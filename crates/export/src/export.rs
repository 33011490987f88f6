//! A disk under a name.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use limosa_image::epochs::EpochError;
use limosa_image::{BitmapAction, Disk, GuestOffset, ImageError};
use limosa_page::error_with_causes;
use limosa_storage::block_on;
use parking_lot::{Mutex, MutexGuard};

use crate::clients::{Access, Client, Clients, NotQuiesced};
use crate::counters::{ExportCounters, Latencies};
use crate::failure_log::FailureLog;
use crate::medium::{Drive, Medium};
use crate::nbd::context::BITMAPS_MAX;
use crate::peer::Peer;
use crate::protection::Protection;
use limosa_nbd::protocol::MAX_STRING;

/// Interval at which clients that must end are looked at.
const TICK: Duration = Duration::from_secs(1);

/// Why a disk cannot be exported, or an export not be steered.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The part of the disk that was asked for is not in it.
    #[error("{disk} has {length} bytes: {}", past_end(*offset, *size))]
    PastEnd {
        /// The disk's name.
        disk: Arc<str>,
        /// Its length in bytes.
        length: u64,
        /// Offset of the part.
        offset: u64,
        /// Bytes of the part; `None`: up to the disk's end.
        size: Option<u64>,
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
    /// Too many bitmaps.
    #[error("clients can read at most {BITMAPS_MAX} bitmaps of an export")]
    Bitmaps,
    /// A bitmap is named twice.
    #[error("the bitmap {0:?} is named twice")]
    BitmapTwice(String),
    /// A bitmap that clients can read was to be removed.
    #[error("clients of the export {export:?} can read its bitmap {bitmap:?}: it cannot be removed meanwhile")]
    BitmapExported {
        /// The export's name.
        export: String,
        /// The bitmap's name.
        bitmap: String,
    },
    /// It is a part of a disk.
    #[error("the export {0:?} is a part of a disk, and has a fixed length")]
    Part(String),
    /// Its VM is protected.
    #[error("the export {name:?} is protected by {keeper:?}, which must end that first")]
    Protected {
        /// Its name.
        name: String,
        /// The name of its keeper.
        keeper: String,
    },
    /// Its VM is not protected.
    #[error("the export {0:?} is not protected")]
    NotProtected(String),
    /// Another keeper protects its VM.
    #[error("the export {name:?} is protected by another keeper, {keeper:?}")]
    OtherKeeper {
        /// Its name.
        name: String,
        /// The name of its keeper.
        keeper: String,
    },
    /// The VM could come back to its disk.
    #[error(
        "the VM of the export {0:?} could come back: its connection is over TCP on this host, or was not there when \
         protection began"
    )]
    Unrecognized(String),
    /// The name of a keeper is empty or too long.
    #[error("the name of a keeper has 1 to 256 bytes")]
    Keeper,
    /// An epoch cannot be sealed, kept or dropped.
    #[error(transparent)]
    Epochs(#[from] EpochError),
    /// The kernel has no room for a thread.
    #[error("cannot start a thread")]
    Thread(#[source] Arc<std::io::Error>),
    /// Its disk failed.
    #[error(transparent)]
    Image(#[from] ImageError),
}

fn past_end(offset: u64, size: Option<u64>) -> String {
    match size {
        Some(size) => format!("{size} bytes at offset {offset} are not in it"),
        None => format!("offset {offset} is past its end"),
    }
}

/// A disk, or a part of it, that clients may use under a name.
#[derive(Debug)]
pub struct Export {
    name: String,
    description: String,
    drive: Drive,
    is_part: bool,
    read_only: bool,
    bitmaps: Vec<String>,
    clients: Arc<Clients>,
    /// Held by those who have requests wait, until they are done: one of two could let requests begin again while the
    /// other relies on it.
    attempts: Mutex<()>,
    /// Held while the medium changes, is flushed for those who quiesce, or is closed; and by those who resume.
    changing: Mutex<()>,
    /// Its disk was closed, and none has taken its place.
    is_closed: AtomicBool,
    pub(crate) protection: Mutex<Option<Protection>>,
    pub(crate) failures: FailureLog,
}

impl Export {
    /// Creates an export of a whole disk. The empty name is that of the default export. It is read-only if the disk is.
    ///
    /// # Errors
    /// [`ExportError::Text`].
    pub fn new(name: impl Into<String>, disk: Arc<dyn Disk>) -> Result<Self, ExportError> {
        let read_only = disk.is_read_only();
        let export = Self {
            name: checked(name.into())?,
            description: String::new(),
            drive: Drive::new(disk),
            is_part: false,
            read_only,
            bitmaps: Vec::new(),
            clients: Arc::default(),
            attempts: Mutex::new(()),
            changing: Mutex::new(()),
            is_closed: AtomicBool::new(false),
            protection: Mutex::new(None),
            failures: FailureLog::default(),
        };
        Ok(export)
    }

    /// Limits it to `size` bytes of the disk from `offset` on; `None`: up to its end.
    ///
    /// # Errors
    /// [`ExportError::PastEnd`].
    pub fn part(mut self, offset: u64, size: Option<u64>) -> Result<Self, ExportError> {
        let disk = self.disk();
        let length = disk.len();
        let rest = length.checked_sub(offset).filter(|rest| size.is_none_or(|size| size <= *rest));
        let Some(rest) = rest else {
            let disk = Arc::clone(disk.name());
            return Err(ExportError::PastEnd { disk, length, offset, size });
        };
        self.is_part = offset != 0 || size.is_some();
        self.drive.set_part(offset, size.unwrap_or(rest));
        Ok(self)
    }

    /// Refuses writes, if `read_only`.
    #[must_use]
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only |= read_only;
        self
    }

    /// Lets clients read these dirty bitmaps of the disk, as `qemu:dirty-bitmap:NAME`. Blocks until they are read.
    ///
    /// # Errors
    /// [`ExportError::Bitmaps`]: there are too many; [`ExportError::BitmapTwice`]; the disk has no such bitmap, or one
    /// that cannot be relied on.
    pub fn bitmaps(mut self, names: Vec<String>) -> Result<Self, ExportError> {
        if names.len() > BITMAPS_MAX {
            return Err(ExportError::Bitmaps);
        }
        let mut rest = names.iter();
        while let Some(name) = rest.next() {
            // Two contexts of one name: a client could not tell which is which.
            if rest.as_slice().contains(name) {
                return Err(ExportError::BitmapTwice(name.clone()));
            }
        }
        let disk = self.disk();
        if !names.is_empty() {
            block_on(disk.bitmaps())?;
        }
        if !disk.is_empty() {
            names.iter().try_for_each(|name| disk.dirty_run(name, GuestOffset(0), 1).map(drop))?;
        }
        self.bitmaps = names;
        Ok(self)
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

    /// Returns the names of the bitmaps that clients can read.
    #[must_use]
    pub fn bitmap_names(&self) -> &[String] {
        &self.bitmaps
    }

    /// Returns its length in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.medium().size()
    }

    /// Returns whether writes are refused.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the disk that it has now.
    #[must_use]
    pub fn disk(&self) -> Arc<dyn Disk> {
        Arc::clone(self.medium().disk())
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
    /// [`ExportError::Protected`]; the disk's.
    pub fn flush(&self) -> Result<(), ExportError> {
        // A disk that is being replaced is closed.
        let _alone = self.changing.lock();
        self.refuse_protected()?;
        self.flush_disk()
    }

    fn flush_disk(&self) -> Result<(), ExportError> {
        Ok(block_on(self.disk().flush())?)
    }

    /// Has requests wait that have not begun, waits until none is in flight, at most for `within`, and flushes the
    /// disk. From then on nothing is written to it until it is [resumed](Self::resume). The time that requests wait is
    /// not counted as their client's.
    ///
    /// # Errors
    /// [`ExportError::Busy`], or the flush failed: requests continue, unless it was quiesced before.
    /// [`ExportError::Resumed`], [`ExportError::Removed`], [`ExportError::Protected`].
    pub fn quiesce(&self, within: Duration) -> Result<(), ExportError> {
        self.refuse_protected()?;
        let (has_begun, _alone) = self.stop_requests(within)?;
        let flushed = self.flush_disk();
        if flushed.is_err() && has_begun {
            self.clients.resume();
        }
        flushed
    }

    /// Has requests wait until none is in flight. Returns whether it is this call that has them wait, and keeps others
    /// from letting them begin again.
    fn stop_requests(&self, within: Duration) -> Result<(bool, [MutexGuard<'_, ()>; 2]), ExportError> {
        let name = || self.name.clone();
        let begun = Instant::now();
        let attempt = self.attempts.try_lock_for(within).ok_or_else(|| ExportError::Busy { name: name(), within })?;
        let failed = |reason| match reason {
            NotQuiesced::Busy => ExportError::Busy { name: name(), within },
            NotQuiesced::Resumed => ExportError::Resumed(name()),
            NotQuiesced::Ended => ExportError::Removed(name()),
        };
        let has_begun = self.clients.quiesce(within.saturating_sub(begun.elapsed())).map_err(failed)?;
        let alone = self.changing.lock();
        match self.clients.access() {
            Access::Quiesced => Ok((has_begun, [alone, attempt])),
            Access::Open => Err(ExportError::Resumed(name())),
            Access::Ended | Access::Cut => Err(ExportError::Removed(name())),
        }
    }

    /// Carries out a change of the medium while no request is in flight.
    pub(crate) fn change<T, E: From<ExportError>>(
        &self,
        within: Duration,
        change: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let (has_begun, _alone) = self.stop_requests(within)?;
        let changed = change();
        if has_begun {
            self.clients.resume();
        }
        changed
    }

    /// Makes the disk `size` bytes long, durably; added bytes read as zeros. Requests wait meanwhile; those in flight
    /// get `within`. Clients over NBD learn the length when they connect. Drivers are told by
    /// [`VhostUserBlk::notify_resized`](crate::vhost_user_blk::VhostUserBlk::notify_resized).
    ///
    /// # Errors
    /// [`ExportError::Part`]; shorter, or no length that the disk can have; as of [`quiesce`](Self::quiesce).
    pub fn resize(&self, size: u64, within: Duration) -> Result<(), ExportError> {
        let disk = self.disk();
        if self.is_part {
            return Err(ExportError::Part(self.name.clone()));
        }
        if self.read_only {
            return Err(ImageError::ReadOnly { image: Arc::clone(disk.name()) }.into());
        }
        self.change(within, || {
            self.refuse_protected()?;
            let disk = self.disk();
            block_on(disk.grow(size))?;
            self.drive.set_part(0, disk.len());
            Ok(())
        })
    }

    /// Changes dirty bitmaps of the disk, all of it or nothing, while no request is in flight: at one moment for every
    /// client. Requests wait meanwhile; those in flight get `within`.
    ///
    /// # Errors
    /// [`ExportError::BitmapExported`], also if it would be added again: what a client has agreed on would be another
    /// one. A change that cannot be; as of [`quiesce`](Self::quiesce).
    pub fn change_bitmaps(&self, changes: &[(String, BitmapAction)], within: Duration) -> Result<(), ExportError> {
        if self.read_only {
            return Err(ImageError::ReadOnly { image: Arc::clone(self.disk().name()) }.into());
        }
        let removed = changes.iter().filter(|(_, action)| *action == BitmapAction::Remove).map(|(name, _)| name);
        if let Some(bitmap) = removed.into_iter().find(|name| self.bitmaps.contains(name)) {
            return Err(ExportError::BitmapExported { export: self.name.clone(), bitmap: bitmap.clone() });
        }
        self.change(within, || {
            self.refuse_protected()?;
            Ok(block_on(self.disk().change_bitmaps(changes))?)
        })
    }

    /// Closes the disk and puts another one in its place, while no request is in flight: an overlay of it, for example.
    /// Clients notice nothing but a pause. `open` is called when the disk is closed and its files are unlocked. If it
    /// fails, `reopen` opens the old one again; if that fails too, requests fail from then on.
    ///
    /// # Errors
    /// The disk cannot be flushed: nothing changes. It cannot be closed after that: requests fail from then on. The
    /// one that `open` returned; the new disk is too short ([`ExportError::PastEnd`]) or read-only; as of
    /// [`quiesce`](Self::quiesce).
    pub fn replace_disk<E: From<ExportError>>(
        &self,
        within: Duration,
        open: impl FnOnce() -> Result<Arc<dyn Disk>, E>,
        reopen: impl FnOnce() -> Result<Arc<dyn Disk>, E>,
    ) -> Result<(), E> {
        self.change(within, || {
            self.refuse_protected()?;
            let old = self.medium();
            // A disk that was closed is not used again, whether it could write everything or not.
            if !self.is_closed.load(Ordering::SeqCst) {
                self.flush_disk()?;
            }
            self.is_closed.store(true, Ordering::SeqCst);
            match block_on(old.disk().close()) {
                // Its contents are durable, and it says by itself that the bitmaps cannot be relied on.
                Err(error @ ImageError::BitmapsNotStored { .. }) => {
                    let (export, error) = (self.name(), error_with_causes(&error));
                    tracing::warn!(export, error, "the image that is replaced has lost its dirty bitmaps");
                }
                closed => closed.map_err(ExportError::from)?,
            }
            old.disk().unlock();
            match open().and_then(|disk| Ok(self.fitting(&old, disk)?)) {
                Ok(disk) => {
                    self.put(disk);
                    Ok(())
                }
                Err(error) => {
                    match reopen() {
                        Ok(disk) => self.put(disk),
                        Err(_) => {
                            let export = self.name();
                            tracing::error!(export, "its disk cannot be opened again: all requests fail");
                        }
                    }
                    Err(error)
                }
            }
        })
    }

    pub(crate) fn put(&self, disk: Arc<dyn Disk>) {
        self.drive.set_disk(disk);
        self.is_closed.store(false, Ordering::SeqCst);
    }

    /// Returns a disk that can take the place of another one; else closes it.
    fn fitting(&self, old: &Medium, disk: Arc<dyn Disk>) -> Result<Arc<dyn Disk>, ExportError> {
        let (end, length) = (old.place(old.size()).0, disk.len());
        let why = if end > length {
            let (offset, size) = (old.place(0).0, old.size());
            ExportError::PastEnd { disk: Arc::clone(disk.name()), length, offset, size: Some(size) }
        } else if disk.is_read_only() && !self.read_only {
            ImageError::ReadOnly { image: Arc::clone(disk.name()) }.into()
        } else {
            return Ok(disk);
        };
        if let Err(error) = block_on(disk.close()) {
            tracing::warn!(disk = &**disk.name(), error = error_with_causes(&error), "it cannot be closed");
        }
        Err(why)
    }

    /// Lets requests begin again. Nothing happens if they may.
    ///
    /// # Errors
    /// [`ExportError::Removed`].
    pub fn resume(&self) -> Result<(), ExportError> {
        let _alone = self.changing.lock();
        if self.clients.resume() { Ok(()) } else { Err(ExportError::Removed(self.name.clone())) }
    }

    /// Ends all clients, and closes the disk. Requests in flight are carried out and answered, further ones refused.
    /// After `drain` the connections of clients that have not taken their last replies are cut.
    pub(crate) fn close(&self, drain: Duration) -> Result<ExportCounters, ExportError> {
        self.clients.end(Access::Ended);
        if !self.clients.wait_gone(drain) {
            self.clients.end(Access::Cut);
            // Requests in flight are carried out by the kernel, which may take its time.
            while !self.clients.wait_gone(TICK) {}
        }
        self.close_disk()?;
        Ok(self.counters())
    }

    /// Has all clients end.
    pub(crate) fn end_clients(&self, access: Access) {
        self.clients.end(access);
    }

    /// Closes the disk of an export whose clients were cut off, and whose devices have ended.
    pub(crate) fn close_dropped(&self) -> Result<(), ExportError> {
        // Requests in flight are carried out by the kernel, which may take its time.
        while !self.clients.wait_gone_or_idle(TICK) {}
        *self.protection.lock() = None;
        self.close_disk()
    }

    fn close_disk(&self) -> Result<(), ExportError> {
        let _alone = self.changing.lock();
        let disk = self.disk();
        let closed = block_on(disk.close());
        // Handshakes and queries may hold the export, and with it the disk, for a moment.
        disk.unlock();
        Ok(closed?)
    }

    /// Returns whether it is the disk of a device.
    pub(crate) fn has_queues(&self) -> bool {
        self.clients.has_queues()
    }

    /// Returns whether it was removed, and its clients' time is over.
    pub(crate) fn is_cut(&self) -> bool {
        self.clients.access() == Access::Cut
    }

    /// Adds a client at the other end of a connection.
    pub(crate) fn join(&self, peer: Arc<Peer>) -> Client {
        self.clients.join(peer)
    }

    /// Returns its clients.
    pub(crate) const fn clients(&self) -> &Arc<Clients> {
        &self.clients
    }

    /// Adds a queue of a device.
    pub(crate) fn join_queue(&self) -> Client {
        self.clients.join_queue()
    }

    /// Returns the medium that it has now.
    pub(crate) fn medium(&self) -> Arc<Medium> {
        self.drive.medium()
    }

    /// Returns the medium if it is another than `seen`, which a client used for its last requests.
    pub(crate) fn newer_medium(&self, seen: &Medium) -> Option<Arc<Medium>> {
        self.drive.newer(seen)
    }
}

fn checked(text: String) -> Result<String, ExportError> {
    if text.len() > MAX_STRING || text.contains('\0') { Err(ExportError::Text(text)) } else { Ok(text) }
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
}
