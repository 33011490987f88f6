//! A VM whose memory is a mapped snapshot: which pages it has made its own.

use std::io;

use limosa_page::PageBitmap;
use limosa_snapshot::Snapshot;

use super::process::{MappingProcess, NotMapping};
use crate::monitor::{Monitor, RamBlockInfo};
use crate::qmp::QmpError;

/// A process that has RAM blocks of a snapshot as its private memory.
#[derive(Debug)]
pub struct MappedVm {
    process: MappingProcess,
    blocks: Vec<Placed>,
}

/// A RAM block in the memory of a process.
#[derive(Debug)]
struct Placed {
    index: usize,
    name: String,
    address: u64,
    length: u64,
}

/// Pages of a RAM block of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockPages {
    /// The block's index in the snapshot's layout.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// The pages, out of all that the block has.
    pub pages: PageBitmap,
}

/// The failure to find a VM that maps a snapshot by its monitor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MappedVmError {
    /// The monitor's.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Its process is not known, or does not map the snapshot.
    #[error(transparent)]
    NotMapping(#[from] NotMapping),
}

impl MappedVm {
    /// Finds the VM of a process, or of one that it started. RAM blocks that it maps more than once are left out.
    ///
    /// # Errors
    /// The process cannot be seen, or maps no RAM block of the snapshot.
    pub fn of_process(pid: u32, snapshot: &Snapshot) -> Result<Self, NotMapping> {
        Self::find(pid, snapshot, &[])
    }

    /// Finds the VM of a monitor. Its RAM blocks are where QEMU reports them.
    ///
    /// # Errors
    /// As [`of_process`](Self::of_process), and the monitor's.
    pub fn of_monitor(monitor: &Monitor, snapshot: &Snapshot) -> Result<Self, MappedVmError> {
        let pid = monitor.qmp().process().ok_or(NotMapping::Remote)?;
        Ok(Self::find(pid, snapshot, &monitor.ram_blocks()?)?)
    }

    fn find(pid: u32, snapshot: &Snapshot, here: &[RamBlockInfo]) -> Result<Self, NotMapping> {
        let process = MappingProcess::find(pid, snapshot)?;
        let placed = |(index, block): (usize, &limosa_stream::mapped_ram::MappedBlock)| {
            let (name, length) = (&block.block.name, block.pages_range().end - block.pages_offset);
            let said = here.iter().find(|here| here.name == *name).and_then(|here| here.host_address);
            let address = process.address(said, block.pages_offset, length)?;
            Some(Placed { index, name: name.clone(), address, length })
        };
        let blocks: Vec<_> = snapshot.layout().blocks.iter().enumerate().filter_map(placed).collect();
        if blocks.is_empty() {
            return Err(NotMapping::NoBlock { pid: process.pid(), path: snapshot.path().to_path_buf() });
        }
        Ok(Self { process, blocks })
    }

    /// The number of the process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Returns the pages that are no longer the snapshot's, because the guest or QEMU has written to them. All others
    /// are shared with every VM that maps the file.
    ///
    /// # Errors
    /// The kernel's, for example because the process has ended.
    pub fn changed(&self) -> io::Result<Vec<BlockPages>> {
        self.pages(MappingProcess::copied_pages)
    }

    /// Returns the pages that the kernel has mapped for the VM: those that the guest, or QEMU, has touched. A fault
    /// also maps neighbours that are in the page cache, usually up to 64 KiB around it.
    ///
    /// # Errors
    /// As [`changed`](Self::changed).
    pub fn present(&self) -> io::Result<Vec<BlockPages>> {
        self.pages(MappingProcess::present_pages)
    }

    fn pages(&self, find: impl Fn(&MappingProcess, u64, u64) -> io::Result<PageBitmap>) -> io::Result<Vec<BlockPages>> {
        let pages = |block: &Placed| {
            let pages = find(&self.process, block.address, block.length)?;
            Ok(BlockPages { index: block.index, name: block.name.clone(), pages })
        };
        self.blocks.iter().map(pages).collect()
    }
}
