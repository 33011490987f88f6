//! The images that a load is put on.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context, Result};
use futures_util::StreamExt;
use futures_util::stream::{self, TryStreamExt};
use limosa_image::qcow2::{Counts, CreateOptions, Header, ImageParts, Qcow2, Qcow2Options, create};
use limosa_image::{Disk, GuestOffset, ImageError};
use limosa_storage::testing::HardDisk;
use limosa_storage::{Buffer, CacheMode, Create, FileCounters, FileOptions, FileStorage, Io, Storage, block_on};

use super::split::Split;
use crate::content::fill_random;

/// The data below the clusters that are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Under {
    /// Nothing.
    Nothing,
    /// Contents of a backing image.
    Backing,
    /// They are there already.
    Own,
}

/// The layer between the images' files and their users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Through {
    /// Nothing: direct I/O.
    Direct,
    /// The page cache, which has the backing image's contents.
    Warm,
    /// The page cache, which has nothing of it.
    Cold,
}

impl Through {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Warm => "cached, warm",
            Self::Cold => "cached, cold",
        }
    }
}

/// How a new cluster gets the contents around the bytes that are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Copies {
    /// As limosa does it.
    Merged,
    /// In parts, one after the other.
    Split,
}

/// The kind of image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) cluster: u64,
    pub(super) subclusters: bool,
    pub(super) under: Under,
    pub(super) hard_disk: bool,
    pub(super) through: Through,
}

/// The image below the others, full of random bytes.
#[derive(Debug, Clone)]
pub(super) struct Base {
    pub(super) folder: Rc<PathBuf>,
    pub(super) size: u64,
}

/// An open image, and the files under it.
pub(super) struct Image {
    image: Arc<Qcow2>,
    /// The layer that takes the load, if it is not the image.
    split: Option<Split>,
    files: Vec<Arc<FileStorage>>,
}

impl Base {
    pub(super) fn path(&self) -> PathBuf {
        self.folder.join("base.qcow2")
    }

    /// Where a run has its image.
    pub(super) fn overlay(&self) -> PathBuf {
        self.folder.join("overlay.qcow2")
    }

    /// Makes it, with usual clusters.
    pub(super) fn make(folder: &Path, size: u64) -> Result<Self> {
        let base = Self { folder: Rc::new(folder.to_path_buf()), size };
        let path = base.path();
        let file = open(&path, CacheMode::None, false, Create::New)?;
        let options = CreateOptions::default().size(size);
        let mut memory = vec![0; 2 << 20];
        fill_random(&mut memory);
        let buffer = Buffer::from_slice(&memory);
        let filled = block_on(async {
            let header = create(&*file, None, &options).await?;
            let parts = ImageParts::new(file, header);
            let disk = Qcow2::open(parts, Qcow2Options::default()).await?;
            let writes = (0..size).step_by(2 << 20).map(|at| disk.write(GuestOffset(at), buffer.clone().into()));
            stream::iter(writes).buffer_unordered(8).try_collect::<()>().await?;
            disk.close().await
        });
        filled.with_context(|| format!("making {}", path.display()))?;
        Ok(base)
    }

    /// Makes a fresh image of this shape, or returns the base itself where the written clusters must exist; not open.
    pub(super) fn fresh(&self, shape: &Shape) -> Result<PathBuf> {
        if shape.under == Under::Own {
            return Ok(self.path());
        }
        let path = self.overlay();
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let file = open(&path, CacheMode::None, false, Create::New)?;
        let backed = shape.under == Under::Backing;
        let options = CreateOptions::default()
            .size(self.size)
            .cluster_size(shape.cluster)
            .extended_l2(shape.subclusters)
            .backing_file(backed.then(|| self.path().into_os_string()))
            .backing_format(backed.then(|| "qcow2".to_owned()));
        block_on(create(&*file, None, &options)).with_context(|| format!("making {}", path.display()))?;
        Ok(path)
    }

    /// A fresh image of this shape, open.
    pub(super) fn open(&self, shape: &Shape, copies: Copies, options: Qcow2Options) -> Result<Image> {
        let path = self.fresh(shape)?;
        let disk = shape.hard_disk.then(|| HardDisk::new(HardDisk::TYPICAL_LATENCY));
        // The page cache takes no time compared with 8 ms.
        let direct = !shape.hard_disk && shape.through == Through::Direct;
        let cache = if direct { CacheMode::None } else { CacheMode::Writeback };
        let mut files = Vec::new();
        let mut storage = |path: &Path, read_only| -> Result<Arc<dyn Storage>> {
            let file = open(path, cache, read_only, Create::No)?;
            files.push(Arc::clone(&file));
            Ok(match &disk {
                Some(disk) => disk.wrap(file),
                None => file,
            })
        };
        let image = storage(&path, false)?;
        let base = if shape.under == Under::Backing { Some(storage(&self.path(), true)?) } else { None };
        let opened = block_on(async {
            let backing: Option<Arc<dyn Disk>> = match base {
                None => None,
                Some(file) => {
                    let header = Header::read(&*file).await?;
                    let parts = ImageParts::new(file, header);
                    Some(Qcow2::open(parts, options.clone().read_only(true)).await?)
                }
            };
            let header = Header::read(&*image).await?;
            let (backing, apart) = if copies == Copies::Split { (None, backing) } else { (backing, None) };
            let image = Qcow2::open(ImageParts::new(image, header).backing(backing), options).await?;
            let split = (copies == Copies::Split).then(|| Split::new(Arc::clone(&image), apart));
            Ok::<_, ImageError>((image, split))
        });
        let (image, split) = opened.with_context(|| format!("opening {}", path.display()))?;
        Ok(Image { image, split, files })
    }
}

impl Image {
    /// The target of the load.
    pub(super) fn disk(&self) -> &dyn Disk {
        match &self.split {
            Some(split) => split,
            None => &*self.image,
        }
    }

    /// The operations of the image on its files.
    pub(super) fn counts(&self) -> Counts {
        self.image.counts()
    }

    /// The requests to all of its files.
    pub(super) fn counters(&self) -> FileCounters {
        let mut sum = FileCounters::default();
        for file in &self.files {
            let one = file.counters();
            for (sum, one) in [
                (&mut sum.reads, one.reads),
                (&mut sum.writes, one.writes),
                (&mut sum.zeroes, one.zeroes),
                (&mut sum.allocations, one.allocations),
                (&mut sum.clones, one.clones),
            ] {
                sum.operations += one.operations;
                sum.bytes += one.bytes;
            }
            sum.flushes += one.flushes;
        }
        sum
    }
}

/// A file as the contestants open theirs.
pub(super) fn open(path: &Path, cache: CacheMode, read_only: bool, create: Create) -> Result<Arc<FileStorage>> {
    let options = FileOptions { cache, io: Io::Auto, read_only, create, ..FileOptions::default() };
    Ok(FileStorage::open(path, &options)?)
}
