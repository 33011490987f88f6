//! From the command line of a saved VM to that of its clones: decided once for all clones, before anything is made.
//!
//! The law: **no two clones write to one file.** Everything writable that a command line names is a disk that the
//! snapshot froze and that gets an overlay, or is another file for each clone, or is read-only, or is refused by name.
//!
//! | what | where |
//! |---|---|
//! | `{n}`, `{name}`, `{dir}` | `template.rs` |
//! | whether a name leads each clone to a file of its own | `own.rs` |
//! | the frozen disk that a name means | `frozen.rs` |
//! | disks, behind overlays | `disks.rs`, nodes of the block layer in `graph.rs`, one at a time in `node.rs` |
//! | other options that name files, sockets and directories | `outputs.rs` |

mod disks;
mod frozen;
mod graph;
mod node;
mod outputs;
mod own;
mod template;

pub(crate) use disks::behind_overlays;
pub(crate) use frozen::{FrozenDisk, Layer, OverlayPlan, plan};
pub(crate) use outputs::check_outputs;
pub(crate) use own::{Claims, Ownership};
pub use template::CommandTemplate;
