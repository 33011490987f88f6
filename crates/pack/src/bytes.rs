//! The bytes of a packed snapshot whose images are files here.

use std::error::Error;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use limosa_channel::Counters;
use limosa_image::qcow2::Qcow2;
use limosa_image::{BlockStatus, Disk, GuestOffset};
use limosa_snapshot::{Origin, PackedImage, PackedSummary, SnapshotBytes};
use limosa_storage::block_on;

use crate::chain::Chain;
use crate::error::PackError;
use crate::image::Image;
use crate::touched;
use crate::unpacked_disk::UnpackedDisk;

/// Bytes of the images of a chain.
#[derive(Debug)]
pub(crate) struct UnpackedBytes {
    disk: UnpackedDisk,
    chain: Chain,
}

impl UnpackedBytes {
    pub(crate) fn new(chain: Chain) -> Self {
        let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let disk = Arc::clone(&chain.disk) as Arc<dyn Disk>;
        Self { disk: UnpackedDisk::new(disk, unit(chain.levels.iter().map(AsRef::as_ref)), threads), chain }
    }

    pub(crate) const fn chain(&self) -> &Chain {
        &self.chain
    }
}

/// Returns the largest cluster of these images.
pub(crate) fn unit<'a>(images: impl Iterator<Item = &'a Image>) -> u64 {
    images.map(Image::cluster_size).max().unwrap_or(1 << 16)
}

/// Describes images that stand on each other, the topmost one first.
pub(crate) fn summary<'a>(images: impl Iterator<Item = &'a Image>) -> Option<PackedSummary> {
    let images: Vec<_> = images.collect();
    let (top, bases) = images.split_first()?;
    let mut summary = PackedSummary::new(top.compression().to_owned(), top.cluster_size());
    summary.encrypted = images.iter().all(|image| image.is_encrypted());
    summary.bases = bases.iter().map(|image| image.path.display().to_string()).collect();
    Some(summary)
}

/// The most parts of a disk that are looked through, more than 512 GiB of compressed memory have.
const PARTS_MOST: u64 = 1 << 22;

/// Says what of a disk is read from each of its images, the topmost one first.
pub(crate) fn shares<'a>(disk: &Qcow2, images: impl Iterator<Item = &'a Image>) -> Result<Vec<PackedImage>, PackError> {
    let image = |image: &Image| {
        let length = image.head.contents.length().map_err(PackError::storage)?;
        Ok(PackedImage { name: image.path.display().to_string(), length, contents: 0 })
    };
    let mut shares: Vec<_> = images.map(image).collect::<Result<_, PackError>>()?;
    let (mut at, mut parts) = (0, 0_u64);
    while at < disk.len() {
        parts += 1;
        if parts > PARTS_MOST {
            let (path, what) = (Path::new(&**disk.name()).to_path_buf(), "it has too many parts to be looked through");
            return Err(PackError::Refused { path, what: what.to_owned() });
        }
        let found = block_on(disk.map(GuestOffset(at), disk.len() - at))?;
        if matches!(found.kind, BlockStatus::Data | BlockStatus::Compressed)
            && let Some(share) = shares.get_mut(usize::try_from(found.depth).unwrap_or(usize::MAX))
        {
            share.contents = share.contents.saturating_add(found.length);
        }
        at = at.saturating_add(found.length.max(1));
    }
    Ok(shares)
}

/// Returns what holds a byte of a disk; `identity` is that of the image at this depth.
pub(crate) fn origin(
    disk: &Qcow2,
    (at, length): (u64, u64),
    identity: impl FnOnce(usize) -> Option<String>,
) -> Option<(Origin, u64)> {
    let found = block_on(disk.map(GuestOffset(at), length)).ok()?;
    let of = match found.kind {
        BlockStatus::Data | BlockStatus::Compressed => Origin::new(identity(usize::try_from(found.depth).ok()?)?),
        BlockStatus::Zero | BlockStatus::Preallocated | BlockStatus::Unallocated => Origin::ZEROS,
    };
    Some((of, found.length.min(length)))
}

impl SnapshotBytes for UnpackedBytes {
    fn length(&self) -> u64 {
        self.disk.length()
    }

    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.disk.read_exact_at(into, offset)
    }

    fn touched(&self) -> Result<Option<Vec<Range<u64>>>, Box<dyn Error + Send + Sync>> {
        Ok(touched::of(&self.chain.disk)?)
    }

    fn find_change(&self) -> Option<String> {
        let changed = self.chain.levels.iter().find(|level| level.has_changed());
        changed.map(|level| format!("{} was written to", level.path.display()))
    }

    fn bases(&self) -> Vec<(BorrowedFd<'_>, &Path)> {
        self.chain.levels.iter().skip(1).map(|level| (level.file.as_fd(), level.path.as_path())).collect()
    }

    fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        for level in &self.chain.levels {
            let counted = level.storage().counters().reads;
            sum.calls_in = sum.calls_in.saturating_add(counted.operations);
            sum.bytes_in = sum.bytes_in.saturating_add(counted.bytes);
        }
        sum
    }

    fn origin(&self, at: u64, length: u64) -> Option<(Origin, u64)> {
        origin(&self.chain.disk, (at, length), |depth| Some(self.chain.levels.get(depth)?.origin()))
    }

    fn images(&self) -> Result<Vec<PackedImage>, Box<dyn Error + Send + Sync>> {
        Ok(shares(&self.chain.disk, self.chain.levels.iter().map(AsRef::as_ref))?)
    }

    fn packed(&self) -> Option<PackedSummary> {
        summary(self.chain.levels.iter().map(AsRef::as_ref))
    }
}
