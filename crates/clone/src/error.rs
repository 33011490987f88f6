//! Why a clone was not started, ended or removed.

use std::io;
use std::path::PathBuf;

use limosa_image::ImageError;
use limosa_page::{BrokenInvariant, error_with_causes};
use limosa_qemu::JobError;
use limosa_snapshot::SnapshotError;
use thiserror::Error;

/// An operation on clones that failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CloneError {
    /// The snapshot.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),

    /// QEMU, or the monitor.
    #[error(transparent)]
    Job(#[from] JobError),

    /// The snapshot cannot be the memory of this command line's VM.
    #[error("the memory cannot be mapped: {why}")]
    Memory {
        /// The option or the RAM block that is in the way.
        why: String,
    },

    /// The snapshot was not sealed for mapping.
    #[error("{}: not made to be mapped", path.display())]
    NotMappable {
        /// The snapshot.
        path: PathBuf,
    },

    /// A disk of the command line cannot be given an overlay, or would be shared by the clones.
    #[error("{why}")]
    Disk {
        /// The disk, and the reason.
        why: String,
    },

    /// The command line names something that clones cannot share, or cannot be read.
    #[error("{why}")]
    CommandLine {
        /// The option, and the reason.
        why: String,
    },

    /// The QEMU that was started does not match its command line.
    #[error("this QEMU is not what its command line says: {why}")]
    CommandLineMismatch {
        /// The difference.
        why: String,
    },

    /// A disk that the snapshot froze cannot be read.
    #[error("cannot read the frozen disk {}", path.display())]
    FrozenDisk {
        /// Its uppermost image.
        path: PathBuf,
        /// The image library's reason.
        source: ImageError,
    },

    /// An overlay cannot be made.
    #[error("cannot make an overlay ({})", path.display())]
    Overlay {
        /// The overlay.
        path: PathBuf,
        /// The image library's reason.
        source: ImageError,
    },

    /// An operation on a file or directory failed.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },

    /// The name of a clone is taken.
    #[error("{}: is there already", path.display())]
    Exists {
        /// The clone's directory.
        path: PathBuf,
    },

    /// There is no clone of that name.
    #[error("{}: is no clone", path.display())]
    NotFound {
        /// Where it would be.
        path: PathBuf,
    },

    /// Another limosa is starting or removing the clone.
    #[error("{}: another limosa is starting or removing it", path.display())]
    Busy {
        /// The clone's directory.
        path: PathBuf,
    },

    /// The clone's process was started under another boot, on another host or in another container.
    #[error("{}: process {pid} was started under another boot, on another host or in another container", path.display())]
    Unreachable {
        /// The clone's directory.
        path: PathBuf,
        /// Its QEMU, by the number that it had there.
        pid: u32,
    },

    /// A bug of limosa.
    #[error("internal error of limosa")]
    Internal(#[from] BrokenInvariant),

    /// It runs.
    #[error("{}: runs (process {pid})", path.display())]
    Running {
        /// The clone's directory.
        path: PathBuf,
        /// Its QEMU.
        pid: u32,
    },

    /// QEMU opened no monitor.
    #[error("QEMU opened no monitor{}", said_or(log, error))]
    NoMonitor {
        /// The last failure to connect: it follows from what QEMU said, if that said anything.
        error: JobError,
        /// The end of QEMU's log.
        log: String,
    },

    /// QEMU did not take the VM.
    #[error("QEMU did not take the VM{}", said_or(log, error))]
    LoadFailed {
        /// The failure: it follows from what QEMU said, if that said anything.
        error: JobError,
        /// The end of QEMU's log.
        log: String,
    },

    /// QEMU has the VM and does not start it.
    #[error("QEMU does not start the VM{}", said(log))]
    NotStarted {
        /// QEMU's reason.
        source: JobError,
        /// The end of QEMU's log.
        log: String,
    },
}

impl CloneError {
    pub(crate) fn path(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { what, path, source }
    }
}

/// Shows QEMU's own words, which are the cause of the failure, or the failure if it said nothing.
fn said_or(log: &str, failure: &(dyn std::error::Error + 'static)) -> String {
    if log.is_empty() { format!(": {}", error_with_causes(failure)) } else { said(log) }
}

fn said(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!("; it said: {log}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_from_qemus_own_words_is_not_given_as_their_cause() {
        let ended = |log: &str| {
            let (error, log) = (JobError::Failed { reason: "no socket".into() }, log.into());
            error_with_causes(&CloneError::NoMonitor { error, log })
        };
        assert_eq!(ended("no such device"), "QEMU opened no monitor; it said: no such device");
        assert_eq!(ended(""), "QEMU opened no monitor: QEMU gave up: no socket");
    }
}
