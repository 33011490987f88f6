//! Why a file cannot be opened as the options ask.

use std::io;

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
    /// Another process holds a conflicting lock.
    #[error("{conflict} ({})", holders(processes))]
    Locked {
        /// The conflict.
        conflict: String,
        /// Names and numbers of visible processes that have the file open; at most four.
        processes: Vec<String>,
        /// Whether the file was to be opened read-only: [`LockPolicy::None`](crate::LockPolicy::None) then reads it in
        /// a state that may be inconsistent.
        read_only: bool,
    },
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

fn holders(processes: &[String]) -> String {
    if processes.is_empty() {
        return "no visible process of this machine has it open".into();
    }
    format!("it is open in {}", processes.join(", "))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::error::Operation;

    #[test]
    fn the_reason_is_found_in_the_error_that_a_caller_gets() {
        let locked = |processes: &[&str]| OpenError::Locked {
            conflict: "another process has it open and writes it".into(),
            processes: processes.iter().map(ToString::to_string).collect(),
            read_only: true,
        };
        let error = StorageError::for_storage(Operation::Lock, &Arc::from("disk"), locked(&["qemu (process 7)"]));
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        assert_eq!(error.open_error(), Some(&locked(&["qemu (process 7)"])));
        assert!(error.source.to_string().ends_with("writes it (it is open in qemu (process 7))"), "{error}");
        assert!(locked(&[]).to_string().ends_with("(no visible process of this machine has it open)"));
        let error =
            StorageError::for_storage(Operation::Lock, &Arc::from("disk"), io::Error::from_raw_os_error(libc::EIO));
        assert_eq!(error.open_error(), None);
    }
}
