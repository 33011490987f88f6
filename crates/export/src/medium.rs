//! The disk that an export has at the moment.
//!
//! Law: it changes only while no request is in flight. Each client has a reference of its own, and looks for a newer
//! medium before it begins requests after a pause: on the way of a request nothing is written that clients share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use limosa_image::{Disk, GuestOffset};
use parking_lot::RwLock;

/// A disk, and the part of it that is exported.
#[derive(Debug)]
pub(crate) struct Medium {
    /// Media of an export are numbered in their order.
    number: u64,
    disk: Arc<dyn Disk>,
    offset: u64,
    size: u64,
}

impl Medium {
    pub(crate) const fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// Its length in bytes.
    pub(crate) const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the place of an offset of the export in the disk.
    pub(crate) const fn place(&self, offset: u64) -> GuestOffset {
        GuestOffset(self.offset.saturating_add(offset))
    }
}

/// The place for an export's medium.
#[derive(Debug)]
pub(crate) struct Drive {
    medium: RwLock<Arc<Medium>>,
    /// The number of the medium.
    number: AtomicU64,
}

impl Drive {
    /// A drive with a whole disk in it.
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Self {
        let medium = Medium { number: 0, size: disk.len(), disk, offset: 0 };
        Self { medium: RwLock::new(Arc::new(medium)), number: AtomicU64::new(0) }
    }

    /// Returns the medium.
    pub(crate) fn medium(&self) -> Arc<Medium> {
        Arc::clone(&self.medium.read())
    }

    /// Returns the medium if it is another than `seen`.
    pub(crate) fn newer(&self, seen: &Medium) -> Option<Arc<Medium>> {
        (self.number.load(Ordering::Acquire) != seen.number).then(|| self.medium())
    }

    /// Changes the part of the disk that is exported.
    pub(crate) fn set_part(&self, offset: u64, size: u64) {
        let disk = Arc::clone(self.medium().disk());
        self.set(disk, offset, size);
    }

    /// Puts the same part of another disk in.
    pub(crate) fn set_disk(&self, disk: Arc<dyn Disk>) {
        let medium = self.medium();
        self.set(disk, medium.offset, medium.size);
    }

    fn set(&self, disk: Arc<dyn Disk>, offset: u64, size: u64) {
        let mut medium = self.medium.write();
        let number = medium.number.wrapping_add(1);
        *medium = Arc::new(Medium { number, disk, offset, size });
        self.number.store(number, Ordering::Release);
    }
}
