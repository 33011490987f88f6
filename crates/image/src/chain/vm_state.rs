//! The state of a virtual machine in an internal snapshot (QEMU's `savevm`).
//!
//! It lies behind the end of the disk, in the snapshot's own tables, where no disk shows it: from the first offset on
//! that an L2 table of the disk does not cover (QEMU's specification, docs/interop/qcow2, "Snapshots").

use std::sync::Arc;

use limosa_storage::IoVector;

use super::{ImageFile, OpenOptions, passphrase};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::offset::GuestOffset;
use crate::probe::Format;
use crate::qcow2::{self, Encryption, Header, ImageParts, Qcow2, Qcow2Options, SnapshotChoice};
use crate::reference::Reference;

/// The state of a virtual machine in an image.
#[derive(Debug)]
pub struct VmState {
    disk: Arc<Qcow2>,
    start: GuestOffset,
    length: u64,
}

impl VmState {
    /// Opens the state that a snapshot of an image has. Files that the image refers to are not opened.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: the image is not qcow2, has no such snapshot, or the snapshot no state of a VM; as
    /// of [`open`](super::open).
    pub async fn open(
        reference: &Reference,
        choice: &SnapshotChoice,
        options: &OpenOptions,
    ) -> Result<Self, ImageError> {
        let options = options.clone().read_only(true);
        let ImageFile { storage, format, reference, .. } = ImageFile::open(reference, &options).await?;
        let unsupported = |what: String| ImageError::Unsupported { image: Arc::clone(storage.name()), what };
        if format != Format::Qcow2 {
            return Err(unsupported("it is no qcow2 image, and has no state of a VM".into()));
        }
        let header = Header::read_for_reading(&*storage).await?;
        if header.features.data_file() {
            return Err(unsupported("it has a data file, and no state of a VM".into()));
        }
        let cipher = match header.encryption {
            Encryption::None => None,
            _ => {
                let passphrase = passphrase(&*storage, &reference, &options.secrets)?;
                Some(qcow2::cipher(&*storage, &header, passphrase).await?)
            }
        };
        let (header, start, length) = choice.vm_state(&*storage, header).await?;
        let parts = ImageParts::new(storage, header).cipher(cipher);
        let disk = Qcow2::open(parts, Qcow2Options { read_only: true, ..options.qcow2 }).await?;
        Ok(Self { disk, start, length })
    }

    /// Returns its length in bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.length
    }

    /// Returns whether it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Reads bytes of it, all of `into`.
    ///
    /// # Errors
    /// [`ImageError::PastEnd`]: it has not as many; what the storage says.
    pub async fn read(&self, at: u64, into: IoVector) -> Result<(), ImageError> {
        let place = self.start.checked_add(at).unwrap_or(GuestOffset(u64::MAX));
        self.disk.read(place, into).await
    }
}
