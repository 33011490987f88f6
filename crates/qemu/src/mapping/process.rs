//! A process that maps a snapshot: where RAM blocks are in its memory, and which of their pages it has written.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use limosa_memory::ProcessPages;
use limosa_page::PageRange;
use limosa_snapshot::Snapshot;

use super::maps::{MappedFile, Mapping, has_open, mappings, with_descendants};
use crate::file_identity::FileId;

/// A process that has the file of a snapshot open, and the places where it maps it.
#[derive(Debug)]
pub(super) struct MappingProcess {
    pid: u32,
    /// Its writable mappings of the snapshot's file.
    mappings: Vec<Mapping>,
}

/// The reason why a process cannot be asked about a snapshot's pages.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotMapping {
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
}

impl MappingProcess {
    /// Finds the process that maps a snapshot: this one, or one that it started.
    ///
    /// # Errors
    /// The process cannot be seen, or has another file.
    pub(super) fn find(pid: u32, snapshot: &Snapshot) -> Result<Self, NotMapping> {
        let unseen = |source| NotMapping::Unseen { pid, source };
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
        Err(NotMapping::AnotherFile { pid, path: snapshot.path().to_path_buf() })
    }

    /// Whether it maps a part of the file so that writes reach the file.
    pub(super) fn maps_shared(&self) -> bool {
        self.mappings.iter().any(|mapping| mapping.is_shared)
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
    pub(super) fn copied_pages(&self, address: u64, length: u64) -> io::Result<Vec<PageRange>> {
        let found = ProcessPages::of(self.pid)?.copied(address..address.saturating_add(length))?;
        let run = |run: &Range<u64>| PageRange::covering(&(run.start - address..run.end - address));
        Ok(found.iter().map(run).collect())
    }
}
