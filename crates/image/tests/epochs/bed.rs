//! Images and logs in memory.

use std::sync::Arc;

use limosa_image::epochs::EpochDisk;
use limosa_image::qcow2::{CreateOptions, Header, ImageParts, Qcow2, Qcow2Options, create};
use limosa_image::raw::{Raw, RawOptions};
use limosa_image::{Disk, GuestOffset, ImageError};
use limosa_storage::{Buffer, MemoryStorage, Storage, block_on};

/// Bytes of the disks.
pub(crate) const SIZE: u64 = 64 << 10;
pub(crate) const SECTOR: u64 = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Raw,
    Qcow2,
}

impl Format {
    /// The bytes of an empty image.
    pub(crate) fn empty(self) -> Vec<u8> {
        match self {
            Self::Raw => vec![0; usize::try_from(SIZE).unwrap()],
            Self::Qcow2 => {
                let made = MemoryStorage::growing_to(4 << 20);
                let options = CreateOptions::default().size(SIZE).cluster_size(4096);
                block_on(create(&made, None, &options)).unwrap();
                made.contents()
            }
        }
    }

    pub(crate) fn open(self, file: Arc<dyn Storage>) -> Arc<dyn Disk> {
        match self {
            Self::Raw => Raw::open(file, &RawOptions::default()).unwrap(),
            Self::Qcow2 => {
                let header = block_on(Header::read(&*file)).unwrap();
                block_on(Qcow2::open(ImageParts::new(file, header), Qcow2Options::default())).unwrap()
            }
        }
    }
}

/// A sector of a version; version 0 is zeros.
pub(crate) fn sector(version: u64) -> Vec<u8> {
    version.to_le_bytes().repeat(64)
}

/// Returns the versions of all sectors that a disk has.
pub(crate) fn versions(disk: &dyn Disk) -> Vec<u64> {
    let buffer = Buffer::zeroed(usize::try_from(SIZE).unwrap());
    block_on(disk.read(GuestOffset(0), buffer.clone().into())).unwrap();
    let version = |found: &[u8]| {
        let version = u64::from_le_bytes(found[..8].try_into().unwrap());
        assert_eq!(found, sector(version), "a sector is of one version");
        version
    };
    buffer.to_vec().chunks(512).map(version).collect()
}

pub(crate) fn write(disk: &EpochDisk, at: u64, version: u64) -> Result<(), ImageError> {
    block_on(disk.write(GuestOffset(at * SECTOR), Buffer::from_slice(&sector(version)).into()))
}
