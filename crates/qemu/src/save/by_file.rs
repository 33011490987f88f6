//! QEMU writes the mapped-ram file itself, through a descriptor that it is passed; limosa starts the write-back early,
//! checks the file, and adds its trailer.

use std::os::fd::AsFd;
use std::path::Path;
use std::thread;

use limosa_page::error_with_causes;
use limosa_snapshot::{Transport, UnnamedFile, WriteBehind, publish_qemu_file};

use super::job::{SaveJob, SaveReport, Saved};
use super::preflight::record_disks_again;
use super::watcher::Watcher;
use crate::job::JobError;
use crate::job_record::JobRecord;
use crate::monitor::Monitor;

/// Room for the parts of a snapshot beside pages: headers, bitmaps, devices.
const BESIDE_PAGES: u64 = 64 << 20;

/// Channels with which QEMU writes or reads a file in parallel: more than a few only compete for the disk.
pub(crate) fn file_channels() -> usize {
    thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 4))
}

/// On how many channels QEMU writes the file, if on several: only where all of the VM's memory has room. The first that
/// finds the disk full ends, and a QEMU (10.0) that has begun to wait for it by then waits for ever; on one channel it
/// gives up.
pub(super) fn channels(
    monitor: &Monitor,
    pending: &UnnamedFile,
    wanted: Option<u8>,
    notice: &dyn Fn(&str),
) -> Result<Option<usize>, JobError> {
    let needed = monitor.ram_blocks()?.iter().map(|block| block.used_length).fold(BESIDE_PAGES, u64::saturating_add);
    let (folder, free) = free_beside(pending)?;
    if free >= needed {
        return Ok(Some(wanted.map_or_else(file_channels, usize::from)));
    }
    if wanted.is_some() {
        notice(&format!(
            "{} may have no room for all of the VM's memory ({} MiB, {} MiB are free): QEMU writes on one channel, since on \
             several it does not get over a full disk",
            folder.display(),
            needed >> 20,
            free >> 20
        ));
    }
    Ok(None)
}

/// Returns the folder of the file, and the bytes that are free there.
fn free_beside(pending: &UnnamedFile) -> Result<(&Path, u64), JobError> {
    let path = pending.target();
    let stat = rustix::fs::fstatvfs(pending.file()).map_err(|source| JobError::Io {
        what: "determine the free space of",
        path: path.to_owned(),
        source: source.into(),
    })?;
    Ok((path.parent().unwrap_or(path), stat.f_bavail.saturating_mul(stat.f_frsize)))
}

pub(super) fn run(job: &SaveJob<'_>, pending: UnnamedFile, record: &mut JobRecord) -> Result<SaveReport, JobError> {
    let descriptor = pending.writer_descriptor(false)?;
    let set = job.monitor.add_fd(descriptor.as_fd(), None, &format!("limosa save {}", job.before.manifest.id))?;
    drop(descriptor);
    record.descriptor_sets.push(set.id);
    record.update(job.monitor)?;
    let written = write(job, &pending, &set.path(), record);
    // QEMU has closed its duplicates when the migration was over; the set itself stays until `remove-fd`.
    let removed = job.monitor.remove_fd(set.id);
    let saved = written.map_err(|error| match error {
        JobError::Failed { reason } => JobError::FileNotWritten { path: pending.target().to_owned(), reason },
        other => other,
    })?;
    removed?;
    job.publishing(record)?;
    let published = publish_qemu_file(pending, saved.manifest.clone(), job.write_options())?;
    match job.published(record, &published) {
        Err(error) if job.options.stop => return Err(error),
        Err(error) => (job.watch.notice)(&error_with_causes(&error)),
        Ok(()) => {}
    }
    Ok(job.report(published, Transport::File, saved))
}

/// Makes QEMU write the file, and continues the VM if that is wanted.
fn write(job: &SaveJob<'_>, pending: &UnnamedFile, path: &str, record: &mut JobRecord) -> Result<Saved, JobError> {
    let write_back = WriteBehind::for_other_writer(pending.file()).map_err(|source| JobError::Io {
        what: "start the write-back of",
        path: pending.target().to_owned(),
        source,
    })?;
    let mut watcher = Watcher::new(job, true)?;
    job.monitor.migrate(&format!("file:{path}"), false)?;
    watcher.wait_completed()?;
    let downtime = if job.runs_again(watcher.state(), record)? { watcher.continue_vm()? } else { None };
    let to_vm_running = job.begun.elapsed();
    let totals = watcher.totals()?;
    drop(write_back);
    let mut manifest = job.before.manifest.clone();
    manifest.transport = Some(Transport::File);
    manifest.run_state = Some(watcher.state().to_string());
    record_disks_again(&mut manifest)?;
    Ok(Saved { manifest, downtime, rounds: totals.map(|ram| ram.dirty_sync_count), to_vm_running })
}
