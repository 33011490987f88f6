//! A process that maps a snapshot: where RAM blocks are in its memory, and which of their pages it has.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use limosa_memory::ProcessPagemap;
use limosa_page::{PAGE_SIZE, PageBitmap, PageRange};
use limosa_snapshot::Snapshot;
use rustix::io::Errno;

use super::maps::{MappedFile, Mapping, has_open, mappings, with_descendants};
use crate::file_identity::FileId;
use crate::process::{Liveness, ProcessIdentity};

/// A process that has the file of a snapshot open, and the places where it maps it.
#[derive(Debug)]
pub(super) struct MappingProcess {
    /// Noted before its mappings were read.
    identity: ProcessIdentity,
    /// Its writable mappings of the snapshot's file.
    mappings: Vec<Mapping>,
}

/// The reason why a process cannot be asked about a snapshot's pages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotMapping {
    /// The process is not known: its monitor is no unix socket of this host.
    #[error("QEMU's process can only be found on its own host, through a unix socket")]
    Remote,
    /// The kernel does not show the process.
    #[error("the mappings of process {pid} cannot be read")]
    Unseen {
        /// The process.
        pid: u32,
        /// The kernel's reason.
        source: io::Error,
    },
    /// Neither the process nor its descendants have the file open.
    #[error("process {pid} does not map {}, but perhaps a file that had this name before", path.display())]
    AnotherFile {
        /// The process.
        pid: u32,
        /// The snapshot.
        path: PathBuf,
    },
    /// It has the file open, and none of the snapshot's RAM blocks is its private memory.
    #[error("process {pid} has {} open, and maps no RAM block of it as its own memory", path.display())]
    NoBlock {
        /// The process.
        pid: u32,
        /// The snapshot.
        path: PathBuf,
    },
}

/// The file of a snapshot by its numbers, those of descriptors and those of mappings.
#[derive(Debug, Clone, Copy)]
pub(super) struct SnapshotFile {
    id: FileId,
    mapped: MappedFile,
}

impl SnapshotFile {
    /// # Errors
    /// The kernel's.
    pub(super) fn of(snapshot: &Snapshot) -> io::Result<Self> {
        Ok(Self { id: FileId::of_descriptor(snapshot)?, mapped: MappedFile::of(snapshot.as_fd())? })
    }
}

impl MappingProcess {
    /// Finds the process that maps a snapshot: this one, or one that it started.
    ///
    /// # Errors
    /// The process cannot be seen, or has another file.
    pub(super) fn find(pid: u32, snapshot: &Snapshot) -> Result<Self, NotMapping> {
        let unseen = |source| NotMapping::Unseen { pid, source };
        let file = SnapshotFile::of(snapshot).map_err(unseen)?;
        let mut is_open = false;
        // This process, which has the file open, may have been started by that one.
        let own = std::process::id();
        for (index, pid) in with_descendants(pid).into_iter().filter(|pid| *pid != own).enumerate() {
            let seen = identity(pid).and_then(|identity| {
                Ok((has_open(pid, file.id)?, Self { identity, mappings: mappings(pid, file.mapped)? }))
            });
            let (open, process) = match seen {
                // It has ended since it was listed.
                Err(_) if index > 0 => continue,
                seen => seen.map_err(unseen)?,
            };
            is_open |= open;
            if is_open && !process.mappings.is_empty() {
                return Ok(process);
            }
        }
        if is_open {
            return Ok(Self { identity: identity(pid).map_err(unseen)?, mappings: Vec::new() });
        }
        Err(NotMapping::AnotherFile { pid, path: snapshot.path().to_path_buf() })
    }

    /// Looks at one process; `None` if it does not map the file.
    ///
    /// # Errors
    /// The process has ended, or is another user's.
    pub(super) fn look(pid: u32, file: SnapshotFile) -> io::Result<Option<Self>> {
        let process = Self { identity: identity(pid)?, mappings: mappings(pid, file.mapped)? };
        let maps = !process.mappings.is_empty() && has_open(pid, file.id)?;
        Ok(maps.then_some(process))
    }

    /// Its number.
    pub(super) fn pid(&self) -> u32 {
        self.identity.pid
    }

    /// Whether it maps a part of the file so that writes reach the file.
    pub(super) fn maps_shared(&self) -> bool {
        self.mappings.iter().any(|mapping| mapping.is_shared)
    }

    /// Whether it maps any of these bytes of the file.
    pub(super) fn maps_any(&self, bytes: &Range<u64>) -> bool {
        let overlaps = |mapping: &Mapping| {
            mapping.offset < bytes.end && mapping.offset.saturating_add(mapping.length) > bytes.start
        };
        self.mappings.iter().any(overlaps)
    }

    /// Returns the address at which the process has these bytes of the file as private memory: the one that QEMU
    /// reports for the block, or, for a QEMU that reports none, the only one where they are mapped.
    pub(super) fn address(&self, said: Option<u64>, offset: u64, length: u64) -> Option<u64> {
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

    /// Returns the pages that the process has written to, and so copied, among `length` bytes of memory; they are
    /// numbered from `address`.
    pub(super) fn copied_pages(&self, address: u64, length: u64) -> io::Result<PageBitmap> {
        let mut pages = PageBitmap::new(length.div_ceil(PAGE_SIZE));
        let note = |run: Range<u64>| pages.set_range(numbered_from(address, &run));
        self.pagemap()?.copied_ranges(address..address.saturating_add(length), note)?;
        Ok(pages)
    }

    /// Returns the pages that the kernel has mapped for the process among `length` bytes of memory, numbered from
    /// `address`: those that it has touched, and their neighbours that were in the page cache.
    pub(super) fn present_pages(&self, address: u64, length: u64) -> io::Result<PageBitmap> {
        let mut pages = PageBitmap::new(length.div_ceil(PAGE_SIZE));
        let note = |run: Range<u64>| pages.set_range(numbered_from(address, &run));
        self.pagemap()?.present(address..address.saturating_add(length), note)?;
        Ok(pages)
    }

    /// Opens the list of the process's pages.
    ///
    /// # Errors
    /// The process has ended. Its number may be another's by now.
    fn pagemap(&self) -> io::Result<ProcessPagemap> {
        let pagemap = ProcessPagemap::of(self.identity.pid)?;
        // After the list was opened: a process that lives on had its number at that time, too.
        match self.identity.liveness() {
            Liveness::Alive => Ok(pagemap),
            Liveness::Dead | Liveness::Elsewhere => Err(Errno::SRCH.into()),
        }
    }
}

fn identity(pid: u32) -> io::Result<ProcessIdentity> {
    ProcessIdentity::of(pid).ok_or_else(|| Errno::SRCH.into())
}

/// Returns the pages at these addresses, numbered from `address`.
fn numbered_from(address: u64, run: &Range<u64>) -> PageRange {
    PageRange::covering(&(run.start.saturating_sub(address)..run.end.saturating_sub(address)))
}
