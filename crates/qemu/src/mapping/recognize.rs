//! Proof that a QEMU maps RAM blocks of a snapshot.
//!
//! The law: **a block is proven, or it is sent.** The process must have this very file mapped, privately, at the
//! address that QEMU reports for the block. Pages that QEMU has written there since (by a device `loader`, by a reset)
//! are found and sent.

use std::path::{Path, PathBuf};

use limosa_migrate::stored::PresentBlock;
use limosa_page::error_with_causes;
use limosa_snapshot::Snapshot;

use super::process::{MappingProcess, NotMapping};
use crate::conflict::{Conflict, JobOption};
use crate::file_identity::FileId;
use crate::job::JobError;
use crate::monitor::{FileBackend, Monitor, RamBlockInfo};

/// The answer to whether a QEMU maps a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mapped {
    /// It maps these RAM blocks of it, at their places.
    Blocks(Vec<PresentBlock>),
    /// It maps nothing, or its mappings cannot be seen, for this reason. Everything can be sent to it.
    No(String),
    /// It was started to map a snapshot, and does not map this one as it must, for this reason.
    Wrong(String),
}

/// A memory backend that is meant to map a snapshot and does not map it as it must.
#[derive(Debug, thiserror::Error)]
enum WrongBackend {
    #[error("memory backend {id} maps a file, and the snapshot has no RAM block of that name")]
    NoBlock { id: String },
    #[error("memory backend {id} opens the file for writing; it must have readonly=on and rom=off")]
    Writable { id: String },
    #[error("memory backend {id} maps offset {offset} of its file; RAM block {block} is at {place}")]
    Offset { id: String, offset: u64, block: String, place: u64 },
    #[error(
        "memory backend {id} does not map the {length} bytes of RAM block {block} at offset {place} of {}",
        snapshot.display()
    )]
    NotMapped { id: String, length: u64, block: String, place: u64, snapshot: PathBuf },
    #[error("failed to read which pages of RAM block {block} QEMU has written")]
    Unseen { block: String, source: std::io::Error },
}

/// Examines a QEMU's memory backends ([`Monitor::file_backends`]), RAM blocks ([`Monitor::ram_blocks`]) and process. A
/// block that cannot be proven is a reason not to rely on it.
pub(crate) fn recognize(
    monitor: &Monitor,
    backends: &[FileBackend],
    here: &[RamBlockInfo],
    snapshot: &Snapshot,
) -> Mapped {
    let backends: Vec<_> = backends.iter().filter(|backend| is_meant(backend)).collect();
    if backends.is_empty() {
        return Mapped::No("no memory backend of this QEMU maps a snapshot (private, readonly=on)".into());
    }
    let process = match process_of(monitor, snapshot) {
        Ok(process) => process,
        Err(why) => return why,
    };
    let mut blocks = Vec::new();
    for backend in backends {
        match block_of(backend, snapshot, &process, here) {
            Ok(block) => blocks.push(block),
            Err(why) => return Mapped::Wrong(error_with_causes(&why)),
        }
    }
    if !snapshot.is_mappable() {
        let unsealed = "was not made to be mapped: places of zero pages in it may hold old contents";
        return Mapped::No(format!("the snapshot {}", snapshot.not_plain_reason().unwrap_or(unsealed)));
    }
    Mapped::Blocks(blocks)
}

/// Proves that a QEMU maps these RAM blocks of a snapshot, all of them and as they must be, and nothing of it shared.
/// Without such blocks it proves the latter alone.
///
/// # Errors
/// [`JobError::Refused`] if it does not; the monitor's.
pub fn prove_mapping(
    monitor: &Monitor,
    snapshot: &Snapshot,
    planned: &[String],
) -> Result<Vec<PresentBlock>, JobError> {
    let refused = |why: String| Err(JobError::conflict(why, Conflict::Unsupported(JobOption::MappedMode)));
    let backends = monitor.file_backends()?;
    refuse_shared_snapshot(monitor, &backends, snapshot)?;
    if planned.is_empty() {
        return Ok(Vec::new());
    }
    match recognize(monitor, &backends, &monitor.ram_blocks()?, snapshot) {
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
/// [`JobError::Refused`] if it maps the file shared.
pub(crate) fn refuse_shared_snapshot(
    monitor: &Monitor,
    backends: &[FileBackend],
    snapshot: &Snapshot,
) -> Result<(), JobError> {
    let shared: Vec<_> = backends.iter().filter(|backend| backend.share).collect();
    if shared.is_empty() {
        return Ok(());
    }
    let named = |backend: &&&FileBackend| is_file(snapshot, &backend.path);
    let mapped = process_of(monitor, snapshot).is_ok_and(|process| process.maps_shared());
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
    !backend.share && (backend.readonly && backend.has_rom_off || backend.offset.is_some_and(|offset| offset != 0))
}

/// The process of a QEMU that is meant to map a snapshot.
fn process_of(monitor: &Monitor, snapshot: &Snapshot) -> Result<MappingProcess, Mapped> {
    let pid = monitor.qmp().process().ok_or(NotMapping::Remote);
    pid.and_then(|pid| MappingProcess::find(pid, snapshot)).map_err(|why| match why {
        NotMapping::Remote | NotMapping::Unseen { .. } => Mapped::No(error_with_causes(&why)),
        NotMapping::AnotherFile { .. } | NotMapping::NoBlock { .. } => Mapped::Wrong(format!(
            "this QEMU maps another file, or one that had the name {} before",
            snapshot.path().display()
        )),
    })
}

/// Returns the snapshot's RAM block that is this backend's memory, except for the pages that QEMU has written.
fn block_of(
    backend: &FileBackend,
    snapshot: &Snapshot,
    process: &MappingProcess,
    here: &[RamBlockInfo],
) -> Result<PresentBlock, WrongBackend> {
    let id = || backend.id.clone();
    // Machine types of old name the block by the object's whole path.
    let named = |name: &str| name == backend.id || name.strip_prefix("/objects/") == Some(&backend.id);
    let Some(block) = snapshot.layout().blocks.iter().find(|block| named(&block.block.name)) else {
        return Err(WrongBackend::NoBlock { id: id() });
    };
    let name = &block.block.name;
    // Discarding such memory (a balloon) would punch holes into a file that is open for writing.
    if !backend.readonly {
        return Err(WrongBackend::Writable { id: id() });
    }
    let (place, length) = (block.pages_offset, block.pages_range().end - block.pages_offset);
    let offset = backend.offset.unwrap_or(0);
    if offset != place {
        return Err(WrongBackend::Offset { id: id(), offset, block: name.clone(), place });
    }
    let said = here.iter().find(|here| here.name == *name).and_then(|here| here.host_address);
    let Some(address) = process.address(said, place, length).filter(|_| backend.size == length) else {
        let snapshot = snapshot.path().to_owned();
        return Err(WrongBackend::NotMapped { id: id(), length, block: name.clone(), place, snapshot });
    };
    let unseen = |source| WrongBackend::Unseen { block: name.clone(), source };
    let changed = process.copied_pages(address, length).map_err(unseen)?;
    Ok(PresentBlock { block: name.clone(), changed: changed.runs().collect() })
}
