//! Guest memory that is a snapshot file, mapped: the third way of restoring, beside the lazy and the eager one.
//!
//! A RAM block's part of the file *is* the block's memory (`memory-backend-file`, private, at its offset). The kernel's page
//! cache is the pager: what the guest reads is shared by all VMs of the file, what it writes is its own. Only the device
//! state and the blocks that are not mapped are sent.
//!
//! The law: **no page is left out of the stream unless it is known to be there.** That a QEMU maps the right file at the
//! right place is read off the process itself, not off its command line or the file's name, which may be another's by now.

mod maps;
mod recognize;
mod rewrite;

pub(crate) use recognize::{Mapped, recognize};
pub use rewrite::{BlockPlace, MappedCommandLine, map_memory};
