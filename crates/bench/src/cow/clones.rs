//! From where on a clone pays: writes of 4 KiB into clusters of all sizes, what is kept of each copied by one, cloned
//! by the other.
//!
//! Law: the clock ends when all is durable. So what a copy leaves in the page cache for later, or a clone in the
//! filesystem's log, is part of its own time.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use limosa_image::qcow2::ReflinkMode;
use limosa_storage::{Buffer, CacheMode, Create, Storage, block_on};
use rustix::fs::{Advice, fadvise};

use super::image::{Base, Shape, Through, Under, open};
use super::load::{Cell, Load, size_name};

pub(super) const COPIED: &str = "copied";
pub(super) const CLONED: &str = "cloned";

/// The contestants.
pub(super) const VARIANTS: [(&str, ReflinkMode); 2] = [(COPIED, ReflinkMode::Off), (CLONED, ReflinkMode::AtLeast(0))];

/// Whether files of a folder can share space.
pub(super) fn can_share(folder: &Path) -> Result<bool> {
    let paths = ["shared", "sharing"].map(|name| folder.join(name));
    let make = |path: &Path| open(path, CacheMode::None, false, Create::New);
    let (from, to) = (make(&paths[0])?, make(&paths[1])?);
    let shared = block_on(async {
        from.write(0, Buffer::zeroed(64 << 10).into()).await?;
        let from: Arc<dyn Storage> = from;
        (*to).clone_range(0, &from, 0, 64 << 10).await
    })?;
    for path in &paths {
        std::fs::remove_file(path)?;
    }
    Ok(shared)
}

/// The cells that are measured on a disk of `size` bytes.
pub(super) fn cells(size: u64) -> Vec<Cell> {
    let mut cells = Vec::new();
    for through in [Through::Direct, Through::Warm, Through::Cold] {
        for cluster in (16..=21).map(|bits| 1_u64 << bits) {
            let step = cluster + 4096;
            let count = ((size / 2) / step).min(500);
            let load = Load { count, depth: 4, size: 4096, offset: 4096, step: Some(step), durable: true, queues: 1 };
            let shape = Shape { cluster, subclusters: false, under: Under::Backing, hard_disk: false, through };
            let case = format!("clones: 4K in {} clusters, {}", size_name(cluster), through.name());
            cells.push(Cell { case, shape, load, stock: false });
        }
    }
    cells
}

/// Brings the contents of the backing image into the page cache, or out of it.
pub(super) fn prepare(base: &Base, through: Through) -> Result<()> {
    let mut file = File::open(base.path())?;
    match through {
        Through::Direct => {}
        Through::Warm => drop(std::io::copy(&mut file, &mut std::io::sink())?),
        Through::Cold => fadvise(&file, 0, None, Advice::DontNeed)?,
    }
    Ok(())
}
