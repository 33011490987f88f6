//! The processes of this host that map a snapshot.

use std::fs;
use std::io;

use limosa_snapshot::Snapshot;
use serde::Serialize;

use super::process::{MappingProcess, SnapshotFile};
use crate::process::ProcessIdentity;

/// The processes that map a snapshot as writable memory, and that this one may look at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Mappers {
    /// Those that were found, by pid.
    pub processes: Vec<Mapper>,
    /// Number of processes that this one may not look at.
    pub unseen: u64,
}

/// A process that maps a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Mapper {
    /// Its number.
    pub pid: u32,
    /// The name of its command, which it may have chosen itself.
    pub name: String,
    /// The RAM blocks that it maps, or parts of them.
    pub blocks: Vec<String>,
    /// Whether a part is mapped shared, so that writes reach the file.
    #[serde(rename = "shared")]
    pub writes_reach_file: bool,
}

impl Mappers {
    /// Looks at all processes of this pid namespace, one after another.
    ///
    /// # Errors
    /// The file cannot be mapped, or `/proc` cannot be read.
    pub fn of(snapshot: &Snapshot) -> io::Result<Self> {
        let file = SnapshotFile::of(snapshot)?;
        let mut found = Self { processes: Vec::new(), unseen: 0 };
        for entry in fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            match MappingProcess::look(pid, file) {
                Ok(process) => found.processes.extend(process.map(|process| Mapper::of(&process, snapshot))),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => found.unseen += 1,
                // It has ended since it was listed.
                Err(_) => {}
            }
        }
        found.processes.sort_by_key(|process| process.pid);
        Ok(found)
    }
}

impl Mapper {
    fn of(process: &MappingProcess, snapshot: &Snapshot) -> Self {
        let blocks = snapshot.layout().blocks.iter().filter(|block| process.maps_any(&block.pages_range()));
        let blocks = blocks.map(|block| block.block.name.clone()).collect();
        let name = ProcessIdentity::of(process.pid()).map_or_else(String::new, |identity| identity.name);
        Self { pid: process.pid(), name, blocks, writes_reach_file: process.maps_shared() }
    }
}
