//! Why a file cannot be opened as the options ask.

use std::{fmt, io};

use crate::error::StorageError;

/// Why a file cannot be opened as the options ask, where the kernel's error does not show it. It is the source of a
/// [`StorageError`]; [`StorageError::open_error`] finds it there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// [`Io::Uring`](crate::Io::Uring) is requested, and the kernel has no `io_uring` or does not allow it.
    #[error("io_uring is not available ({0})")]
    UringUnavailable(
        /// The kernel's error.
        String,
    ),
    /// The cache mode requires direct I/O, which the filesystem does not support.
    #[error("the filesystem does not support direct I/O")]
    DirectIoUnsupported,
    /// Another process, or another storage of this one, holds a conflicting lock.
    #[error("{}", locked(conflict, holders))]
    Locked {
        /// The conflict.
        conflict: String,
        /// The processes that have the file open.
        holders: LockHolders,
        /// Whether the file was to be opened read-only: [`LockPolicy::None`](crate::LockPolicy::None) then reads it in
        /// a state that may be inconsistent.
        read_only: bool,
    },
}

/// The beginning of a conflict with another process.
pub(super) const ANOTHER: &str = "another process";

/// The processes that have a locked file open.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockHolders {
    /// Names and numbers of other processes that are visible; at most four.
    Processes(Vec<String>),
    /// This process.
    ThisProcess,
    /// None of the processes that are visible.
    NoneVisible,
    /// This process may not look at others.
    Unknown,
}

impl fmt::Display for LockHolders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Processes(processes) => write!(f, " (it is open in {})", processes.join(", ")),
            Self::NoneVisible => f.write_str(" (no visible process of this machine has it open)"),
            // The conflict names this process.
            Self::ThisProcess | Self::Unknown => Ok(()),
        }
    }
}

/// Describes a conflict by the one process that has the file open, or by all that have.
fn locked(conflict: &str, holders: &LockHolders) -> String {
    if let LockHolders::Processes(processes) = holders
        && let ([process], Some(done)) = (processes.as_slice(), conflict.strip_prefix(ANOTHER))
    {
        return format!("{process}{done}");
    }
    format!("{conflict}{holders}")
}

impl OpenError {
    /// The kind of the error.
    #[must_use]
    pub const fn kind(&self) -> io::ErrorKind {
        match self {
            Self::UringUnavailable(_) | Self::DirectIoUnsupported => io::ErrorKind::Unsupported,
            Self::Locked { .. } => io::ErrorKind::ResourceBusy,
        }
    }
}

impl From<OpenError> for io::Error {
    fn from(error: OpenError) -> Self {
        Self::new(error.kind(), error)
    }
}

impl StorageError {
    /// Why the file cannot be opened as the options ask; `None` if the error is the kernel's.
    #[must_use]
    pub fn open_error(&self) -> Option<&OpenError> {
        self.source.get_ref()?.downcast_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::error::Operation;

    #[test]
    fn the_reason_is_found_in_the_error_that_a_caller_gets() {
        let conflict = "another process has it open and writes it";
        let locked = |holders| OpenError::Locked { conflict: conflict.into(), holders, read_only: true };
        let qemu = || locked(LockHolders::Processes(vec!["qemu (process 7)".into()]));
        let error = StorageError::for_storage(Operation::Lock, &Arc::from("disk"), qemu());
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        assert_eq!(error.open_error(), Some(&qemu()));
        assert!(error.source.to_string().ends_with("qemu (process 7) has it open and writes it"), "{error}");
        let two = locked(LockHolders::Processes(vec!["qemu (process 7)".into(), "cat (process 8)".into()])).to_string();
        assert_eq!(two, format!("{conflict} (it is open in qemu (process 7), cat (process 8))"));
        let said = locked(LockHolders::NoneVisible).to_string();
        assert_eq!(said, format!("{conflict} (no visible process of this machine has it open)"));
        // Nothing is said of processes that were not looked at.
        assert_eq!(locked(LockHolders::Unknown).to_string(), conflict);
        let error =
            StorageError::for_storage(Operation::Lock, &Arc::from("disk"), io::Error::from_raw_os_error(libc::EIO));
        assert_eq!(error.open_error(), None);
    }
}
