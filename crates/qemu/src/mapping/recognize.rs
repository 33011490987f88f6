//! Proof that a QEMU maps RAM blocks of a snapshot.
//!
//! The law: **a block is proven, or it is sent.** The process must have this very file mapped, privately, at the
//! address that QEMU reports for the block. Pages that QEMU has written there since (by a device `loader`, by a reset)
//! are found and sent.

use std::os::fd::AsFd as _;
use std::path::Path;

use limosa_migrate::stored::InPlace;
use limosa_page::PageRange;
use limosa_snapshot::Snapshot;

use super::maps::{MappedFile, Mapping, has_open, mappings, with_descendants};
use crate::conflict::{Conflict, JobOption};
use crate::file_identity::FileId;
use crate::job::JobError;
use crate::monitor::{FileBackend, Monitor, RamBlockInfo};

/// The answer to whether a QEMU maps a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mapped {
    /// It maps these RAM blocks of it, at their places.
    Blocks(Vec<InPlace>),
    /// It maps nothing, or its mappings cannot be seen, for this reason. Everything can be sent to it.
    No(String),
    /// It was started to map a snapshot, and does not map this one as it must, for this reason.
    Wrong(String),
}

/// Examines a QEMU's memory backends and its process.
///
/// # Errors
/// The monitor's. A block that cannot be proven is no error, but a reason not to rely on it.
pub(crate) fn recognize(monitor: &Monitor, snapshot: &Snapshot) -> Result<Mapped, JobError> {
    let backends: Vec<_> = monitor.file_backends()?.into_iter().filter(is_meant).collect();
    if backends.is_empty() {
        return Ok(Mapped::No("no memory backend of this QEMU maps a snapshot (private, readonly=on)".into()));
    }
    let seen = match Seen::of(monitor, snapshot) {
        Ok(seen) => seen,
        Err(why) => return Ok(why),
    };
    let here = monitor.ram_blocks()?;
    let mut blocks = Vec::new();
    for backend in &backends {
        match block_of(backend, snapshot, &seen, &here) {
            Ok(block) => blocks.push(block),
            Err(why) => return Ok(Mapped::Wrong(why)),
        }
    }
    if !snapshot.is_mappable() {
        let why = "the snapshot was not made to be mapped: places of zero pages in it may hold old contents";
        return Ok(Mapped::No(why.into()));
    }
    Ok(Mapped::Blocks(blocks))
}

/// Proves that a QEMU maps these RAM blocks of a snapshot, all of them and as they must be.
///
/// # Errors
/// [`JobError::Refused`] if it does not; the monitor's.
pub fn prove_mapping(monitor: &Monitor, snapshot: &Snapshot, planned: &[String]) -> Result<Vec<InPlace>, JobError> {
    let refused = |why: String| Err(JobError::conflict(why, Conflict::Unsupported(JobOption::MappedMode)));
    match recognize(monitor, snapshot)? {
        Mapped::Blocks(blocks) => match planned.iter().find(|name| blocks.iter().all(|block| block.block != **name)) {
            Some(name) => refused(format!("this QEMU does not map RAM block {name}, as its command line says")),
            None => Ok(blocks),
        },
        Mapped::No(why) | Mapped::Wrong(why) => refused(why),
    }
}

/// Refuses a QEMU that would write what its guest writes into the snapshot.
///
/// # Errors
/// [`JobError::Refused`] if it maps the file shared; the monitor's.
pub fn refuse_shared_snapshot(monitor: &Monitor, snapshot: &Snapshot) -> Result<(), JobError> {
    let shared: Vec<_> = monitor.file_backends()?.into_iter().filter(|backend| backend.share).collect();
    if shared.is_empty() {
        return Ok(());
    }
    let named = |backend: &&FileBackend| is_file(snapshot, &backend.path);
    let mapped = Seen::of(monitor, snapshot).is_ok_and(|seen| seen.maps_shared());
    match shared.iter().find(named).or_else(|| shared.first().filter(|_| mapped)) {
        None => Ok(()),
        Some(backend) => Err(JobError::conflict(
            format!(
                "memory backend {} maps the snapshot {} with share=on: the guest would write into it",
                backend.id,
                snapshot.path().display()
            ),
            Conflict::Unsupported(JobOption::MappedMode),
        )),
    }
}

/// Whether a name is that of the snapshot's file, here and now.
fn is_file(snapshot: &Snapshot, name: &str) -> bool {
    FileId::of_descriptor(snapshot).is_ok_and(|own| FileId::of_path(Path::new(name)).is_ok_and(|named| named == own))
}

/// Whether a backend is meant to map a snapshot: other memory is neither writable over a read-only file nor does it
/// begin in the middle of a file.
fn is_meant(backend: &FileBackend) -> bool {
    !backend.share && (backend.readonly && backend.is_ram || backend.offset.is_some_and(|offset| offset != 0))
}

/// The kernel's view of the process.
struct Seen {
    pid: u32,
    /// Its mappings of the snapshot's file.
    mappings: Vec<Mapping>,
}

impl Seen {
    fn of(monitor: &Monitor, snapshot: &Snapshot) -> Result<Self, Mapped> {
        let Some(pid) = monitor.qmp().process() else {
            let why = "which file this QEMU maps can only be seen on its own host, through a unix socket";
            return Err(Mapped::No(why.into()));
        };
        let unseen = |error| Mapped::No(format!("the mappings of process {pid} cannot be read: {error}"));
        let file = FileId::of_descriptor(snapshot).map_err(unseen)?;
        let mapped = MappedFile::of(snapshot.as_fd()).map_err(unseen)?;
        let mut is_open = false;
        for (index, pid) in with_descendants(pid).into_iter().enumerate() {
            let seen = has_open(pid, file).and_then(|open| Ok((open, mappings(pid)?)));
            let (open, mut mappings) = match seen {
                // It has ended since it was listed.
                Err(_) if index > 0 => continue,
                seen => seen.map_err(unseen)?,
            };
            is_open |= open;
            mappings.retain(|mapping| mapping.file == mapped);
            if is_open && !mappings.is_empty() {
                return Ok(Self { pid, mappings });
            }
        }
        if is_open {
            return Ok(Self { pid, mappings: Vec::new() });
        }
        Err(Mapped::Wrong(format!(
            "this QEMU maps another file, or one that had the name {} before",
            snapshot.path().display()
        )))
    }

    fn maps_shared(&self) -> bool {
        self.mappings.iter().any(|mapping| mapping.is_shared)
    }

    /// Returns the address at which the process has these bytes of the file as private memory: the one that QEMU
    /// reports for the block, or, for a QEMU that reports none, the only one where they are mapped.
    fn address(&self, said: Option<u64>, offset: u64, length: u64) -> Option<u64> {
        let mut private = self.mappings.iter().filter(|mapping| !mapping.is_shared);
        match said {
            Some(address) => private.any(|mapping| mapping.holds(address, offset, length)).then_some(address),
            None => {
                let place = |mapping: &Mapping| {
                    let address = mapping.address.checked_add(offset.checked_sub(mapping.offset)?)?;
                    mapping.holds(address, offset, length).then_some(address)
                };
                let mut places = private.filter_map(place);
                places.next().filter(|_| places.next().is_none())
            }
        }
    }
}

/// Returns the snapshot's RAM block that is this backend's memory, except for the pages that QEMU has written.
fn block_of(backend: &FileBackend, snapshot: &Snapshot, seen: &Seen, here: &[RamBlockInfo]) -> Result<InPlace, String> {
    let id = &backend.id;
    // Machine types of old name the block by the object's whole path.
    let named = |name: &str| name == id || name.strip_prefix("/objects/") == Some(id);
    let Some(block) = snapshot.layout().blocks.iter().find(|block| named(&block.block.name)) else {
        return Err(format!("memory backend {id} maps a file, and the snapshot has no RAM block of that name"));
    };
    let name = &block.block.name;
    // Discarding such memory (a balloon) would punch holes into a file that is open for writing.
    if !backend.readonly {
        return Err(format!("memory backend {id} opens the file for writing; it must have readonly=on and rom=off"));
    }
    let (place, length) = (block.pages_offset, block.pages_range().end - block.pages_offset);
    let offset = backend.offset.unwrap_or(0);
    if offset != place {
        return Err(format!("memory backend {id} maps offset {offset} of its file; RAM block {name} is at {place}"));
    }
    let said = here.iter().find(|here| here.name == *name).and_then(|here| here.host_address);
    let Some(address) = seen.address(said, place, length).filter(|_| backend.size == length) else {
        return Err(format!(
            "memory backend {id} does not map the {length} bytes of RAM block {name} at offset {place} of {}",
            snapshot.path().display()
        ));
    };
    let unseen = |error| format!("which pages of RAM block {name} QEMU has written cannot be read: {error}");
    let copied = limosa_memory::copied_pages(seen.pid, address..address + length).map_err(unseen)?;
    let page = |run: &std::ops::Range<u64>| PageRange::covering(&(run.start - address..run.end - address));
    Ok(InPlace { block: name.clone(), changed: copied.iter().map(page).collect() })
}
