//! Whether a disk image holds data of its own, as opposed to the images below it.
//!
//! The image is opened read-only and with the format that QEMU reports; it is never probed, because a guest chooses the
//! first bytes of a raw disk. The images below it are not opened: what a qcow2 image does not have itself is
//! unallocated, even if a lower one has it. A format that limosa-image does not have is an error, not a guess.

use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use limosa_image::chain::{OpenOptions, open};
use limosa_image::reference::{BackingOverride, Reference};
use limosa_image::{BlockStatus, Format, GuestOffset, ImageError, Policy};
use limosa_page::error_with_causes;
use limosa_storage::{LockPolicy, block_on};

/// Time that the metadata of an image may take to read.
const READ_WITHIN: Duration = Duration::from_secs(60);

/// The other processes that may have the image open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Others {
    /// A QEMU may.
    Allowed,
    /// No other process: the file of an image that is being written does not show all writes yet.
    Refused,
}

/// Returns whether an image of this format (QEMU's name) has data of its own.
///
/// # Errors
/// The image cannot be opened or read, or another process has it open and may not; the reason, in words.
pub(crate) fn has_data(image: &Path, format: &str, others: Others) -> Result<bool, String> {
    let format: Format = format.parse().map_err(|error| format!("{}: {error}", image.display()))?;
    let mut reference = Reference::file(image);
    reference.backing = BackingOverride::Nothing;
    let lock = match others {
        Others::Allowed => LockPolicy::None,
        Others::Refused => LockPolicy::Auto,
    };
    let options = OpenOptions::default().format(Some(format)).read_only(true).lock(lock).policy(Policy::Follow);
    // A filesystem that does not answer (NFS, FUSE) must not hold up a VM. The thread is left behind with it.
    let (sender, result) = mpsc::channel();
    thread::spawn(move || sender.send(block_on(has_own_block(&reference, &options))));
    match result.recv_timeout(READ_WITHIN) {
        Ok(found) => found.map_err(|error| error_with_causes(&error)),
        Err(_) => Err(format!("{}: not read within {} s", image.display(), READ_WITHIN.as_secs())),
    }
}

/// Returns whether any block of the image is allocated in the image itself.
async fn has_own_block(reference: &Reference, options: &OpenOptions) -> Result<bool, ImageError> {
    let disk = open(reference, options).await?;
    let mut at = 0;
    while at < disk.len() {
        let run = disk.map(GuestOffset(at), disk.len() - at).await?;
        if run.depth == 0 && run.kind != BlockStatus::Unallocated {
            return Ok(true);
        }
        at += run.length.max(1);
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::process::{Command, Stdio};

    use super::*;

    /// Runs a program of QEMU's; false where it is missing.
    fn ran(program: &str, arguments: &[&str], image: &Path) -> bool {
        let status = Command::new(program).args(arguments).arg(image).stdout(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    }

    #[test]
    fn an_image_that_somebody_writes_to_is_not_judged_by_what_is_written_already() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("overlay");
        let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("1M").status();
        if made.is_err() {
            eprintln!("skipped: there is no qemu-img");
            return;
        }
        assert_eq!(has_data(&image, "qcow2", Others::Refused), Ok(false));
        let mut writer = Command::new("qemu-io");
        writer.args(["-f", "qcow2"]).arg(&image).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut writer = writer.spawn().unwrap();
        let mut commands = writer.stdin.take().unwrap();
        commands.write_all(b"length\n").unwrap();
        let mut answer = String::new();
        BufReader::new(writer.stdout.take().unwrap()).read_line(&mut answer).unwrap();
        assert_eq!(has_data(&image, "qcow2", Others::Allowed), Ok(false));
        assert!(has_data(&image, "qcow2", Others::Refused).unwrap_err().contains("lock"));
        drop(commands);
        writer.wait().unwrap();
        assert_eq!(has_data(&image, "qcow2", Others::Refused), Ok(false));
    }

    #[test]
    fn data_and_zeros_of_an_overlay_are_its_own_and_those_below_it_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let (below, overlay) = (folder.path().join("below"), folder.path().join("overlay"));
        std::fs::write(&below, vec![7; 1 << 20]).unwrap();
        for write in ["write -P 1 0 512", "write -z 64k 64k"] {
            let make = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", below.to_str().unwrap()];
            if !ran("qemu-img", &make, &overlay) {
                eprintln!("skipped: there is no qemu-img");
                return;
            }
            assert_eq!(has_data(&overlay, "qcow2", Others::Allowed), Ok(false));
            assert!(ran("qemu-io", &["-f", "qcow2", "-c", write], &overlay));
            assert_eq!(has_data(&overlay, "qcow2", Others::Allowed), Ok(true), "{write}");
        }
    }

    #[test]
    fn an_image_is_read_as_the_format_it_is_said_to_have_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        std::fs::write(&image, vec![0; 1 << 20]).unwrap();
        assert!(has_data(&image, "qcow2", Others::Allowed).is_err());
        assert!(has_data(&image, "vmdk", Others::Allowed).unwrap_err().contains("vmdk"));
    }
}
