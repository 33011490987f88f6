//! A disk whose writes belong to epochs: they become the image's when an epoch is kept, and not before.
//!
//! A VM that is protected is checkpointed all the while, and when it is lost it continues from the last checkpoint, on
//! a disk of the same instant. [`EpochDisk`] stands on an image while that lasts. Writes go to the *open* epoch; an
//! epoch is *sealed* when a checkpoint is taken, *prepared* when its writes will be found after a kill, and *kept* when
//! the checkpoint counts.
//!
//! ```text
//! write ──▶ open ──seal──▶ sealed ──prepare──▶ prepared ──keep──▶ kept ──merge──▶ the image has it
//!             │               │                    │
//!             └──────drop─────┴────────────────────┴──▶ gone
//! ```
//!
//! A checkpoint counts by a write elsewhere, and several disks can belong to it. So each disk is prepared before that
//! write, and the epoch kept after it. If all processes end in between, the checkpoint says which epoch counts, and
//! every disk can become as of that one.
//!
//! Laws:
//!
//! * Whenever the process is killed or the power is cut, image and log together are as of a kept epoch, or of one that
//!   was prepared after it: after [`recover`] the image has all writes of the epochs up to that one, and none of a
//!   later one. It is at least the last epoch that was kept durably; after a kill the last one that was kept.
//! * An epoch counts by the write of one sector, its slot in the log, when all that this leads to was written before.
//! * The image is written only with epochs that are durable in the log. So a cut while it is written is repaired from
//!   there.
//! * Reads see all writes that were answered, of all epochs.
//!
//! Contents go to a log, a file beside the image, once and without a copy in memory; the index of them is in memory. A
//! kept epoch is copied from there to the image behind the VM's back. This works for images of all formats, and its
//! proof needs nothing of theirs. The alternative, to write to places of a qcow2 image that its tables do not lead to
//! yet, saves that copy; but a raw image has no such places, and tables of many clusters do not change in one moment
//! either, so that it needs a log, too. It can come below the same interface.

mod apply;
mod disk;
mod extents;
mod format;
mod log;
mod protection;
mod recovery;
mod space;

use std::sync::Arc;

use crate::error::ImageError;
pub use disk::EpochDisk;
pub use protection::{EpochOptions, EpochStatus};
pub use recovery::{Recoverable, Recovered, examine, recover};

/// Why an epoch cannot be sealed, kept or dropped.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum EpochError {
    /// The image or the log failed.
    #[error(transparent)]
    Image(#[from] ImageError),

    /// Another epoch is open.
    #[error("{disk}: epoch {epoch} cannot be sealed: epoch {open} is open")]
    NotOpen {
        /// The disk: a path.
        disk: Arc<str>,
        /// The epoch that was to be sealed.
        epoch: u64,
        /// The open one.
        open: u64,
    },

    /// It is neither sealed nor the last one that was kept.
    #[error("{disk}: epoch {epoch} is not sealed: epoch {kept} is kept, and epoch {open} is open")]
    NotSealed {
        /// The disk: a path.
        disk: Arc<str>,
        /// The epoch that was asked for.
        epoch: u64,
        /// The last one that was kept.
        kept: u64,
        /// The open one.
        open: u64,
    },

    /// Writes are not answered yet, and would belong to the next epoch.
    #[error("{disk}: epoch {epoch} cannot be sealed: {writes} writes are in flight, and the VM must be stopped")]
    InFlight {
        /// The disk: a path.
        disk: Arc<str>,
        /// The epoch that was to be sealed.
        epoch: u64,
        /// Writes in flight.
        writes: u64,
    },

    /// An epoch was prepared when the process ended. Its checkpoint alone knows whether it counts.
    #[error("{log}: epoch {kept} is kept and epoch {prepared} is prepared: the checkpoint says which one counts")]
    Undecided {
        /// The log: a path.
        log: Arc<str>,
        /// The last epoch that is known to be kept.
        kept: u64,
        /// The last one that was prepared.
        prepared: u64,
    },

    /// A log does not have the epoch that was asked for.
    #[error("{log}: epoch {epoch} is not there: epoch {kept} is kept, and epoch {last} is the last one")]
    NotThere {
        /// The log: a path.
        log: Arc<str>,
        /// The epoch that was asked for.
        epoch: u64,
        /// The last epoch that is known to be kept.
        kept: u64,
        /// The last one.
        last: u64,
    },

    /// Too many epochs are sealed and not kept.
    #[error("{disk}: epoch {epoch} cannot be sealed: {sealed} epochs are sealed and not kept")]
    TooManySealed {
        /// The disk: a path.
        disk: Arc<str>,
        /// The epoch that was to be sealed.
        epoch: u64,
        /// Sealed epochs.
        sealed: u64,
    },

    /// Writes were dropped, or protection has ended.
    #[error("{disk}: it is not protected any more")]
    Over {
        /// The disk: a path.
        disk: Arc<str>,
    },

    /// A log does not belong to the image, or is damaged.
    #[error("{log}: {why}")]
    Log {
        /// The log: a path.
        log: Arc<str>,
        /// The fault.
        why: String,
    },
}
