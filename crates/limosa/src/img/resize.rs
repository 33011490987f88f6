//! `limosa img resize`.
//!
//! Law: nothing is cut off unless that is asked for by its name.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use limosa_image::Format;
use limosa_image::chain::{self, OpenOptions};
use limosa_image::qcow2;
use limosa_image::raw::{Raw, RawOptions};
use limosa_image::{Disk as _, Preallocation};
use limosa_storage::{Storage, block_on};

use super::open;
use super::options::{NewSize, ResizeOptions};
use limosa_console::print_out;

pub(crate) fn run(options: &ResizeOptions) -> anyhow::Result<ExitCode> {
    let source = &options.source;
    let preallocation = options.preallocation.parse().map_err(anyhow::Error::msg).context("--preallocation")?;
    let file = open::file(source, false)?;
    let name = || file.storage.name().to_string();
    match file.format {
        Format::Raw => {
            let (offset, size) = (file.reference.offset, file.reference.size);
            let raw = RawOptions { offset, size, read_only: false, guessed: file.guessed };
            let raw = Raw::open(Arc::clone(&file.storage) as Arc<dyn Storage>, &raw)?;
            let size = new_length(raw.len(), options, preallocation).with_context(name)?;
            if file.guessed {
                open::warn_of_guess(source);
            }
            block_on(raw.resize(size, preallocation))?;
            block_on(raw.close())?;
        }
        Format::Qcow2 => {
            let name = name();
            // Its locks would be in the way of the same file's, opened with all that it refers to.
            drop(file);
            let how = OpenOptions { read_only: false, ..open::how(source)? };
            let parts = block_on(chain::open_parts(&open::reference(source)?, &how))?;
            let size = new_length(parts.header.size, options, preallocation).context(name)?;
            let how = qcow2::ResizeOptions { shrink: options.shrink, preallocation, ..Default::default() };
            block_on(qcow2::resize(parts, size, how))?;
        }
    }
    if !options.quiet {
        print_out!("Image resized.");
    }
    Ok(ExitCode::SUCCESS)
}

/// The length that a disk of `old` bytes is to have.
fn new_length(old: u64, options: &ResizeOptions, preallocation: Preallocation) -> anyhow::Result<u64> {
    let new = match options.size {
        NewSize::Exactly(size) => Some(size),
        NewSize::More(more) => old.checked_add(more),
        NewSize::Less(less) => Some(old.saturating_sub(less)),
    };
    let new = new.filter(|size| i64::try_from(*size).is_ok()).context("larger than a disk can be")?;
    if new == 0 {
        bail!("cannot shrink {old} bytes to 0 or less: the new size must be more than 0");
    }
    if new < old && !options.shrink {
        bail!("the last {} bytes would be lost; use --shrink if they are not needed", old - new);
    }
    if new <= old && preallocation != Preallocation::Off {
        bail!("--preallocation: applies to added space, but the image does not grow");
    }
    Ok(new)
}

#[cfg(test)]
mod tests {
    use limosa_storage::{CacheMode, Io};

    use super::super::options::{Name, Source};
    use super::*;

    fn length(old: u64, size: NewSize, shrink: bool, preallocation: Preallocation) -> Result<u64, String> {
        let source = Source {
            name: Name("x".into()),
            image_opts: false,
            format: None,
            cache: CacheMode::Writeback,
            io: Io::Auto,
            force_share: false,
            untrusted: false,
        };
        let options = ResizeOptions { source, size, shrink, preallocation: "off".into(), quiet: false };
        new_length(old, &options, preallocation).map_err(|error| error.to_string())
    }

    #[test]
    fn a_size_is_absolute_or_relative_to_what_is_there() {
        let off = Preallocation::Off;
        assert_eq!(length(1000, NewSize::Exactly(3000), false, off), Ok(3000));
        assert_eq!(length(1000, NewSize::More(3000), false, off), Ok(4000));
        assert_eq!(length(1000, NewSize::More(0), false, off), Ok(1000));
        assert_eq!(length(1000, NewSize::Less(400), true, off), Ok(600));
        assert!(length(1000, NewSize::Less(1000), true, off).unwrap_err().contains("more than 0"));
        assert!(length(1000, NewSize::Less(2000), true, off).unwrap_err().contains("more than 0"));
        assert!(length(1000, NewSize::Exactly(0), true, off).unwrap_err().contains("more than 0"));
        for more in [i64::MAX as u64, u64::MAX] {
            assert!(length(1000, NewSize::More(more), false, off).unwrap_err().contains("larger than a disk"));
        }
    }

    #[test]
    fn nothing_is_cut_off_or_preallocated_by_accident() {
        let off = Preallocation::Off;
        assert!(length(1000, NewSize::Exactly(999), false, off).unwrap_err().contains("--shrink"));
        assert!(length(1000, NewSize::Less(1), false, off).unwrap_err().starts_with("the last 1 bytes"));
        let full = Preallocation::Full;
        assert_eq!(length(1000, NewSize::More(1), false, full), Ok(1001));
        assert!(length(1000, NewSize::Less(1), true, full).unwrap_err().contains("--preallocation"));
    }
}
