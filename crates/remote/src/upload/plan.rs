//! How an object is divided: pure arithmetic.

use crate::error::RemoteError;

/// The least length of a part but the last (Amazon S3 User Guide, "Multipart upload limits").
pub(super) const PART_MIN: u64 = 5 << 20;

/// The most parts of an upload.
const PARTS_MAX: u64 = 10_000;

/// The longest part.
const PART_MAX: u64 = 5 << 30;

/// The alignment of lengths of parts.
const ALIGN: u64 = 1 << 20;

/// The length of the parts of an object: `wanted`, or more if there would be too many.
pub(super) fn part_size(length: u64, wanted: u64) -> Result<u64, RemoteError> {
    let least = length.div_ceil(PARTS_MAX).max(PART_MIN).max(wanted.min(PART_MAX));
    let size = least.next_multiple_of(ALIGN);
    if size > PART_MAX {
        return Err(RemoteError::Settings("the object is too long: stores take 48 TiB at most".to_owned()));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_object_has_more_parts_than_stores_take() {
        for length in [0, 1, PART_MIN, 1 << 30, 1 << 40, 40 << 40] {
            for wanted in [0, 16 << 20, u64::MAX] {
                let size = part_size(length, wanted).unwrap();
                assert!(length.div_ceil(size) <= PARTS_MAX && (PART_MIN..=PART_MAX).contains(&size));
            }
        }
        assert_eq!(part_size(1 << 30, 16 << 20), Ok(16 << 20));
        assert!(part_size(u64::MAX, 0).is_err());
    }
}
