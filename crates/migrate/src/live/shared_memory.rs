//! A move on one host: memory that both ends have is not sent (`x-ignore-shared`).
//!
//! **Law: both ends leave out the same blocks, and only the VM writes them.** Which those are is decided by what the
//! blocks are, at both ends alike: shared memory with a file. The capability in the stream's configuration says whether
//! they are left out at all, and a destination that sees it otherwise refuses. A page that comes for such a block all
//! the same is refused too: it would be written over memory that the source's VM is running in.

use std::os::fd::OwnedFd;

use limosa_memory::{GuestMemory, MemoryBlock, MemoryError, PassedBlock};
use limosa_stream::configuration::IGNORE_SHARED;

use crate::error::MigrateError;
use crate::pages::StreamSetup;

/// The treatment of memory that both ends can have: blocks of shared memory with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum SharedMemoryMode {
    /// It is sent like any other: the ends are strangers.
    #[default]
    Sent,
    /// Both ends have mapped the same files; the stream leaves the blocks out. Also with stock QEMU as the other end,
    /// whose memory is a `memory-backend-file` with `share=on`, and whose capability `x-ignore-shared` is on.
    Mapped,
    /// As `Mapped`, and the files are passed from the source to the destination with the stream, through a unix socket.
    Passed,
}

impl SharedMemoryMode {
    /// Whether a block is left out of the stream.
    pub(crate) fn leaves_out(self, block: &MemoryBlock) -> bool {
        self != Self::Sent && block.is_passable()
    }

    /// Returns the descriptors to pass with the first byte of the stream, one for each block.
    pub(crate) fn to_pass(self, memory: &GuestMemory) -> Result<Vec<OwnedFd>, MemoryError> {
        if self == Self::Passed {
            memory.blocks().iter().map(MemoryBlock::descriptor_to_pass).collect()
        } else {
            Ok(Vec::new())
        }
    }

    /// Whether a stream leaves out what this end does.
    pub(crate) fn check(self, start: &StreamSetup, postcopy: bool) -> Result<(), MigrateError> {
        let refused = |why: &str| Err(MigrateError::Protocol(why.into()));
        match (start.configuration.has_capability(IGNORE_SHARED), self) {
            (true, Self::Sent) => {
                refused("the source leaves out shared memory (x-ignore-shared), which is not shared here")
            }
            (false, Self::Mapped | Self::Passed) => refused(
                "the source sends shared memory (x-ignore-shared is off there), which would be written while its VM runs",
            ),
            (true, _) if postcopy => refused("x-ignore-shared and postcopy exclude each other"),
            _ => Ok(()),
        }
    }
}

/// Returns the memory that was passed, by block of the stream. Blocks that are sent are not among them.
pub(crate) fn passed_blocks(start: &StreamSetup, passed: Vec<OwnedFd>) -> Result<Vec<PassedBlock>, MigrateError> {
    if passed.len() != start.blocks.len() {
        let (count, blocks) = (passed.len(), start.blocks.len());
        let why = format!(
            "{count} descriptors came with a stream of {blocks} RAM blocks: the source does not pass its memory"
        );
        return Err(MigrateError::Protocol(why));
    }
    let block = |(block, fd): (&limosa_stream::RamBlock, OwnedFd)| {
        PassedBlock::from_fd(&block.name, block.used_length, fd).map_err(|error| MigrateError::Sink(error.into()))
    };
    Ok(start.blocks.iter().zip(passed).map(block).collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
}
