//! Guest memory that is a snapshot file, mapped: the third way of restoring, beside the lazy and the eager one.
//!
//! A RAM block's part of the file *is* the block's memory (`memory-backend-file`, private, at its offset). The kernel's
//! page cache is the pager: what the guest reads is shared by all VMs of the file, what it writes is its own. Only the
//! device state and the blocks that are not mapped are sent.
//!
//! The law: **no page is left out of the stream unless it is known to be there.** That a QEMU maps the right file at
//! the right place is read from the process itself, not from its command line or the file's name, which may be
//! another's by now.

mod machine;
mod mappers;
mod maps;
mod place;
mod process;
mod recognize;
mod recording;
mod rewrite;
mod vm;

pub use mappers::{Mapper, Mappers};
pub use place::BlockPlace;
pub use process::NotMapping;
pub use recognize::prove_mapping;
pub(crate) use recognize::{Mapped, recognize, refuse_shared_snapshot};
pub use recording::MappedRecording;
pub use rewrite::{MappedCommandLine, check_snapshot_not_shared, name_memory_backend, rewrite_for_mapping};
pub use vm::{BlockPages, MappedVm, MappedVmError};

/// The reason why a snapshot cannot be the memory of a command line's VM: an option or a RAM block.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct MemoryConflict {
    why: String,
}

impl From<String> for MemoryConflict {
    fn from(why: String) -> Self {
        Self { why }
    }
}
