//! Changes the length of a disk, in an image that is given by name.
//!
//! Law: nothing is cut off unless that is asked for.

use std::sync::Arc;

use crate::chain::{self, ImageFile, OpenOptions};
use crate::disk::Disk as _;
use crate::error::ImageError;
use crate::preallocation::Preallocation;
use crate::probe::Format;
use crate::qcow2;
use crate::raw::{Raw, RawOptions};
use crate::reference::Reference;

/// A length in bytes, or its change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewSize {
    /// This length.
    Exactly(u64),
    /// Longer by this.
    More(u64),
    /// Shorter by this.
    Less(u64),
}

/// How a disk is resized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResizeOptions {
    /// The new length.
    pub size: NewSize,
    /// Whether the disk may become shorter; the contents behind its new end are lost.
    pub shrink: bool,
    /// The part of the added space that is allocated at once.
    pub preallocation: Preallocation,
}

impl ResizeOptions {
    /// A disk that becomes so long, and no shorter than it is.
    #[must_use]
    pub const fn new(size: NewSize) -> Self {
        Self { size, shrink: false, preallocation: Preallocation::Off }
    }
}

/// A disk that was resized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resized {
    /// Its length before, in bytes.
    pub before: u64,
    /// Its length, in bytes.
    pub size: u64,
}

/// Why a disk was not resized.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// The image cannot be opened or changed.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The new length is no length of a disk, or the options do not fit it.
    #[error("{image}: {fault}")]
    Size {
        /// The image: a path.
        image: Arc<str>,
        /// The fault.
        fault: SizeFault,
    },
}

/// Why a disk cannot have a length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SizeFault {
    /// Longer than 2^63 - 1 bytes.
    #[error("larger than a disk can be")]
    TooLarge,
    /// Nothing would be left.
    #[error("cannot shrink {before} bytes to 0 or less: the new size must be more than 0")]
    NothingLeft {
        /// The length so far.
        before: u64,
    },
    /// It would become shorter, which was not asked for.
    #[error("the last {bytes} bytes would be lost")]
    Shrinks {
        /// The bytes that would be lost.
        bytes: u64,
    },
    /// It does not become longer, so there is no added space to preallocate.
    #[error("preallocation applies to added space, but the image does not grow")]
    NothingAdded,
}

/// Resizes the disk of an image, as [`qcow2::resize`](crate::qcow2::resize()) and [`Raw::resize`] do. Calls `on_guess`
/// before the first change if no format was given and the image was probed as raw.
///
/// # Errors
/// [`ResizeError::Size`]: no length of a disk, or shorter without [`ResizeOptions::shrink`]; the image cannot be opened
/// or changed.
pub async fn resize(
    reference: &Reference,
    open: &OpenOptions,
    options: &ResizeOptions,
    on_guess: impl FnOnce(),
) -> Result<Resized, ResizeError> {
    let open = OpenOptions { read_only: false, ..open.clone() };
    let file = ImageFile::open(reference, &open).await?;
    let image = Arc::clone(file.storage.name());
    let length = |before| new_length(before, options).map_err(|fault| ResizeError::Size { image, fault });
    let (before, size) = match file.format {
        Format::Raw => {
            let (offset, size) = (file.reference.offset, file.reference.size);
            let raw = RawOptions { offset, size, read_only: false, guessed: file.guessed };
            let raw = Raw::open(Arc::clone(&file.storage), &raw)?;
            let before = raw.len();
            let size = length(before)?;
            if file.guessed {
                on_guess();
            }
            raw.resize(size, options.preallocation).await?;
            raw.close().await?;
            (before, size)
        }
        Format::Luks => {
            let raw = Raw::open_luks(file.decrypted(&open.secrets).await?, false)?;
            let before = raw.len();
            let size = length(before)?;
            raw.resize(size, options.preallocation).await?;
            raw.close().await?;
            (before, size)
        }
        Format::Qcow2 => {
            // Its locks would be in the way of the same file's, opened with all that it refers to.
            drop(file);
            let parts = chain::open_offline(reference, &open).await?;
            let before = parts.header.size;
            let size = length(before)?;
            let (shrink, preallocation) = (options.shrink, options.preallocation);
            let options = qcow2::ResizeOptions { shrink, preallocation, ..qcow2::ResizeOptions::default() };
            qcow2::resize(parts, size, options).await?;
            (before, size)
        }
    };
    Ok(Resized { before, size })
}

/// The new length of a disk of `before` bytes.
fn new_length(before: u64, options: &ResizeOptions) -> Result<u64, SizeFault> {
    let new = match options.size {
        NewSize::Exactly(size) => Some(size),
        NewSize::More(more) => before.checked_add(more),
        NewSize::Less(less) => Some(before.saturating_sub(less)),
    };
    let new = new.filter(|size| i64::try_from(*size).is_ok()).ok_or(SizeFault::TooLarge)?;
    if new == 0 {
        return Err(SizeFault::NothingLeft { before });
    }
    if new < before && !options.shrink {
        return Err(SizeFault::Shrinks { bytes: before - new });
    }
    if new <= before && options.preallocation != Preallocation::Off {
        return Err(SizeFault::NothingAdded);
    }
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn length(size: NewSize, shrink: bool, preallocation: Preallocation) -> Result<u64, SizeFault> {
        new_length(1000, &ResizeOptions { size, shrink, preallocation })
    }

    #[test]
    fn a_size_is_absolute_or_relative_to_the_length() {
        let off = Preallocation::Off;
        assert_eq!(length(NewSize::Exactly(3000), false, off), Ok(3000));
        assert_eq!(length(NewSize::More(3000), false, off), Ok(4000));
        assert_eq!(length(NewSize::More(0), false, off), Ok(1000));
        assert_eq!(length(NewSize::Less(400), true, off), Ok(600));
        for nothing in [NewSize::Less(1000), NewSize::Less(2000), NewSize::Exactly(0)] {
            assert_eq!(length(nothing, true, off), Err(SizeFault::NothingLeft { before: 1000 }));
        }
        for more in [i64::MAX as u64, u64::MAX] {
            assert_eq!(length(NewSize::More(more), false, off), Err(SizeFault::TooLarge));
        }
    }

    #[test]
    fn nothing_is_cut_off_or_preallocated_by_accident() {
        let (off, full) = (Preallocation::Off, Preallocation::Full);
        assert_eq!(length(NewSize::Exactly(999), false, off), Err(SizeFault::Shrinks { bytes: 1 }));
        assert_eq!(length(NewSize::Less(1), false, off), Err(SizeFault::Shrinks { bytes: 1 }));
        assert_eq!(length(NewSize::More(1), false, full), Ok(1001));
        assert_eq!(length(NewSize::Less(1), true, full), Err(SizeFault::NothingAdded));
    }
}
