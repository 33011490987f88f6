//! Errors of requests.

use std::io;

use limosa_image::ImageError;

/// An error as a reply has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::Display, strum::FromRepr)]
#[repr(u32)]
pub enum ErrorCode {
    /// The export is read-only.
    #[strum(to_string = "operation not permitted")]
    NotPermitted = 1,
    /// Storage failed.
    #[strum(to_string = "input/output error")]
    Io = 5,
    /// No memory.
    #[strum(to_string = "out of memory")]
    NoMemory = 12,
    /// The request is wrong.
    #[strum(to_string = "invalid request")]
    Invalid = 22,
    /// No space is left, or the request is past the end.
    #[strum(to_string = "no space left")]
    NoSpace = 28,
    /// The request is too long.
    #[strum(to_string = "request too long")]
    Overflow = 75,
    /// It is not supported, or not fast.
    #[strum(to_string = "not supported")]
    NotSupported = 95,
    /// The server is about to end.
    #[strum(to_string = "the server is shutting down")]
    Shutdown = 108,
}

impl ErrorCode {
    /// Returns its number.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// Returns the error that a client gets for one of the disk.
    #[must_use]
    pub fn of_image(error: &ImageError) -> Self {
        match error {
            ImageError::Storage(error) => Self::of_kind(error.kind(), error.source.raw_os_error()),
            ImageError::ReadOnly { .. } => Self::NotPermitted,
            ImageError::PastEnd { .. } => Self::Invalid,
            _ => Self::Io,
        }
    }

    fn of_kind(kind: io::ErrorKind, number: Option<i32>) -> Self {
        match kind {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => Self::NoSpace,
            io::ErrorKind::OutOfMemory => Self::NoMemory,
            io::ErrorKind::ReadOnlyFilesystem => Self::NotPermitted,
            _ if number == Some(libc::ENOMEM) => Self::NoMemory,
            _ => Self::Io,
        }
    }
}

#[cfg(test)]
mod tests {
    use limosa_storage::{Operation, StorageError};

    use super::*;

    #[test]
    fn a_full_disk_is_no_space_and_anything_else_an_input_output_error() {
        let of = |number| {
            let error =
                StorageError::for_storage(Operation::Write, &"disk".into(), io::Error::from_raw_os_error(number));
            ErrorCode::of_image(&ImageError::Storage(error))
        };
        assert_eq!(
            [libc::ENOSPC, libc::EDQUOT, libc::EFBIG, libc::EIO, libc::ENOMEM, libc::EROFS].map(of),
            [
                ErrorCode::NoSpace,
                ErrorCode::NoSpace,
                ErrorCode::NoSpace,
                ErrorCode::Io,
                ErrorCode::NoMemory,
                ErrorCode::NotPermitted
            ]
        );
        let read_only = ImageError::ReadOnly { image: "disk".into() };
        assert_eq!(ErrorCode::of_image(&read_only).number(), 1);
    }
}
