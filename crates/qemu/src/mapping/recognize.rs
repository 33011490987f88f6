//! Which RAM blocks of a QEMU are a snapshot's already, because it maps them.

use std::os::fd::AsFd as _;

use limosa_snapshot::Snapshot;

use super::maps::{FileId, PrivateMapping, has_open, private_mappings};
use crate::job::JobError;
use crate::monitor::{FileBackend, Monitor};

/// What a QEMU maps of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mapped {
    /// It maps these RAM blocks of it, at their places.
    Blocks(Vec<String>),
    /// It maps none, or not as it must; why not.
    No(String),
}

/// Looks at a QEMU's memory backends and at its process.
///
/// # Errors
/// The monitor's. What cannot be proven is no error, it is a reason not to rely on it.
pub(crate) fn recognize(monitor: &Monitor, snapshot: &Snapshot) -> Result<Mapped, JobError> {
    let backends: Vec<_> = monitor.file_backends()?.into_iter().filter(|backend| !backend.share).collect();
    if backends.is_empty() {
        return Ok(Mapped::No("no memory backend of this QEMU maps a file privately".into()));
    }
    let seen = match Seen::of(monitor, snapshot) {
        Ok(seen) => seen,
        Err(why) => return Ok(Mapped::No(why)),
    };
    let mut blocks = Vec::new();
    for backend in &backends {
        match block_of(backend, snapshot, &seen) {
            Ok(name) => blocks.push(name),
            Err(why) => return Ok(Mapped::No(why)),
        }
    }
    if !snapshot.is_mappable() {
        let why = "the snapshot was not made to be mapped: places of zero pages in it may hold old contents";
        return Ok(Mapped::No(why.into()));
    }
    Ok(Mapped::Blocks(blocks))
}

/// What the kernel says of the process.
struct Seen {
    inode: u64,
    mappings: Vec<PrivateMapping>,
}

impl Seen {
    fn of(monitor: &Monitor, snapshot: &Snapshot) -> Result<Self, String> {
        let Some(pid) = monitor.qmp().process() else {
            return Err("which file this QEMU maps can only be seen on its own host, through a unix socket".into());
        };
        let unseen = |error| format!("the mappings of process {pid} cannot be read: {error}");
        let stat = rustix::fs::fstat(snapshot.as_fd()).map_err(|errno| unseen(errno.into()))?;
        let file = FileId { device: stat.st_dev, inode: stat.st_ino };
        if !has_open(pid, file).map_err(unseen)? {
            return Err(format!(
                "this QEMU maps another file, or one that had the name {} before",
                snapshot.path().display()
            ));
        }
        Ok(Self { inode: file.inode, mappings: private_mappings(pid).map_err(unseen)? })
    }
}

/// The snapshot's RAM block that is this backend's memory, page for page.
fn block_of(backend: &FileBackend, snapshot: &Snapshot, seen: &Seen) -> Result<String, String> {
    let id = &backend.id;
    // Machine types of old name the block by the object's whole path.
    let named = |name: &str| name == id || name.strip_prefix("/objects/") == Some(id);
    let Some(block) = snapshot.layout().blocks.iter().find(|block| named(&block.block.name)) else {
        return Err(format!("memory backend {id} maps a file, and the snapshot has no RAM block of that name"));
    };
    // Discarding such memory (a balloon) would punch holes into a file that is open for writing.
    if !backend.readonly {
        return Err(format!("memory backend {id} opens the file for writing; it must have readonly=on and rom=off"));
    }
    let length = block.pages_range().end - block.pages_offset;
    let holds = |mapping: &&PrivateMapping| {
        let end = mapping.offset.saturating_add(mapping.length);
        mapping.inode == seen.inode
            && mapping.offset == block.pages_offset
            && end >= block.pages_offset.saturating_add(length)
    };
    let offset = backend.offset.unwrap_or(0);
    if offset != block.pages_offset {
        return Err(format!(
            "memory backend {id} maps offset {offset} of its file; RAM block {} is at {}",
            block.block.name, block.pages_offset
        ));
    }
    if backend.size != length || !seen.mappings.iter().any(|mapping| holds(&mapping)) {
        return Err(format!(
            "memory backend {id} does not map the {length} bytes of RAM block {} at offset {} of {}",
            block.block.name,
            block.pages_offset,
            snapshot.path().display()
        ));
    }
    Ok(block.block.name.clone())
}
