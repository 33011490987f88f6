//! The error that a client gets for a failure of the disk.

use std::io;

use limosa_image::ImageError;
use limosa_nbd::protocol::error::ErrorCode;

/// Returns the error that a client gets for one of the disk.
pub(super) fn of_image(error: &ImageError) -> ErrorCode {
    match error {
        ImageError::Storage(error) => of_kind(error.kind(), error.source.raw_os_error()),
        ImageError::ReadOnly { .. } => ErrorCode::NotPermitted,
        ImageError::PastEnd { .. } => ErrorCode::Invalid,
        _ => ErrorCode::Io,
    }
}

fn of_kind(kind: io::ErrorKind, number: Option<i32>) -> ErrorCode {
    match kind {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => ErrorCode::NoSpace,
        io::ErrorKind::OutOfMemory => ErrorCode::NoMemory,
        io::ErrorKind::ReadOnlyFilesystem => ErrorCode::NotPermitted,
        _ if number == Some(libc::ENOMEM) => ErrorCode::NoMemory,
        _ => ErrorCode::Io,
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
            of_image(&ImageError::Storage(error))
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
        assert_eq!(of_image(&read_only).number(), 1);
    }
}
