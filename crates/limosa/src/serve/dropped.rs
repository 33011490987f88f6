//! The record of a drop: a file beside an image that says which epoch of a protected VM it is as of.
//!
//! Law: **a record proves nothing about an image that was written since.** It has the image's file, size and times as
//! they were left. It counts until the machine is started again: a power cut may keep a write and lose its time.

use std::fs::{self, File};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use limosa_storage::sync_folder;
use rustix::fs::{OFlags, unlink};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use super::beside::beside;
use super::epochs::Boot;
use super::wanted::Recovery;

/// Most bytes of a record.
const LENGTH_MAX: u64 = 4096;
/// Interval at which the clock of files is read, and how often.
const TICK: Duration = Duration::from_millis(1);
const TICKS: u32 = 100;

/// Returns the place of an image's record.
fn path(image: &Path) -> PathBuf {
    beside(image, ".dropped")
}

/// An image as it was left.
fn stamp(image: &Path) -> std::io::Result<Value> {
    let found = fs::metadata(image)?;
    let (modified, changed) = ([found.mtime(), found.mtime_nsec()], [found.ctime(), found.ctime_nsec()]);
    Ok(json!({ "inode": found.ino(), "size": found.len(), "modified": modified, "changed": changed }))
}

/// Waits until a write to an image gives it another time than it has: the clock of files does not tell apart what
/// happens between two of its ticks.
fn wait_for_next_tick(image: &Path) -> anyhow::Result<()> {
    for _ in 0..TICKS {
        let found = fs::metadata(image)?;
        let now = clock_gettime(ClockId::RealtimeCoarse);
        if (now.tv_sec, now.tv_nsec) > (found.ctime(), found.ctime_nsec()) {
            return Ok(());
        }
        thread::sleep(TICK);
    }
    anyhow::bail!("{}: its file system has another time", image.display())
}

/// Reads the record of an image; `None`: it has none, or was written since.
pub(super) fn read(image: &Path, boot: Boot) -> Option<Recovery> {
    let mut file = File::options();
    // A pipe would be waited for.
    file.read(true).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    let file = file.open(path(image)).ok()?;
    let mut text = String::new();
    file.take(LENGTH_MAX).read_to_string(&mut text).ok()?;
    let record: Value = serde_json::from_str(&text).ok()?;
    let is_as_left = boot.is_known() && record.get("boot") == Some(&boot.value());
    if !is_as_left || record.get("image") != Some(&stamp(image).ok()?) {
        return None;
    }
    let log = record.get("log")?.as_str()?.parse().ok()?;
    Some(Recovery { log, epoch: record.get("epoch")?.as_u64()? })
}

/// Records the epoch that an image is as of, durably. The image is not written meanwhile.
///
/// # Errors
/// The kernel's; it has no record then.
pub(super) fn write(image: &Path, Recovery { log, epoch }: Recovery, boot: Boot) -> anyhow::Result<()> {
    remove(image)?;
    wait_for_next_tick(image)?;
    let record = json!({ "log": log, "epoch": epoch, "boot": boot.value(), "image": stamp(image)? });
    let path = path(image);
    let mut file = File::options();
    let mut file =
        file.write(true).create_new(true).mode(0o600).open(&path).with_context(|| path.display().to_string())?;
    file.write_all(record.to_string().as_bytes())?;
    file.sync_all()?;
    sync_folder(&path).context("its folder")
}

/// Removes the record of an image, if it has one.
///
/// # Errors
/// The kernel's.
pub(super) fn remove(image: &Path) -> anyhow::Result<()> {
    let path = path(image);
    // A server that is confined to its images may not remove files.
    if path.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return Ok(());
    }
    unlink(&path).with_context(|| format!("cannot remove {}", path.display()))
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_record_counts_until_the_image_is_written_or_another_one_or_the_machine_is_started_again() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk");
        fs::write(&image, "contents").unwrap();
        let (boot, recovery) = (Boot::of_now(), Recovery { log: Uuid::new_v4(), epoch: 7 });
        let found = |boot| read(&image, boot).map(|found| (found.log, found.epoch));
        assert_eq!(found(boot), None);
        write(&image, recovery, boot).unwrap();
        assert_eq!(found(boot), Some((recovery.log, 7)));
        assert_eq!(found(Boot::default()), None);
        for _ in 0..20 {
            write(&image, recovery, boot).unwrap();
            let mut file = File::options().write(true).open(&image).unwrap();
            file.write_all(b"contents").unwrap();
            assert_eq!(found(boot), None, "it was written at once");
        }
        write(&image, recovery, boot).unwrap();
        let copy = folder.path().join("copy");
        fs::copy(&image, &copy).unwrap();
        fs::rename(copy, &image).unwrap();
        assert_eq!(found(boot), None);
        for text in ["", "{}", "[1]"] {
            fs::write(path(&image), text).unwrap();
            assert_eq!(found(boot), None);
        }
        remove(&image).unwrap();
        remove(&image).unwrap();
    }
}
