//! QEMU writes the mapped-ram file itself, through a descriptor that it is passed; limosa starts the write-back early,
//! checks what came of it, and adds its trailer.

use std::os::fd::AsFd;

use limosa_snapshot::{PendingFile, Via, WriteBehind, adopt};

use super::preflight::record_disks_again;
use super::watcher::Watcher;
use super::{SaveJob, SaveReport, Saved};
use crate::job::JobError;
use crate::marker::JobMarker;

pub(super) fn run(job: &SaveJob<'_>, pending: PendingFile, marker: &mut JobMarker) -> Result<SaveReport, JobError> {
    let descriptor = pending.writer_descriptor(false)?;
    let set = job.monitor.add_fd(descriptor.as_fd(), None, &format!("limosa save {}", job.before.manifest.id))?;
    drop(descriptor);
    marker.descriptor_sets.push(set.set);
    marker.update(job.monitor)?;
    let written = write(job, &pending, &set.path(), marker);
    // QEMU has closed its duplicates when the migration was over; the set itself stays until it is told.
    let removed = job.monitor.remove_fd(set.set);
    let saved = written.map_err(|error| match error {
        JobError::Failed { reason } => JobError::Unwritten { path: pending.target().to_owned(), reason },
        other => other,
    })?;
    removed?;
    job.publishing(marker)?;
    let published = adopt(pending, saved.manifest.clone(), job.write_options())?;
    match job.published(marker, &published) {
        Err(error) if job.options.stop => return Err(error),
        Err(error) => (job.watch.notice)(&error.to_string()),
        Ok(()) => {}
    }
    Ok(job.report(published, Via::File, saved))
}

/// Has QEMU write the file, and the VM go on if it is to.
fn write(job: &SaveJob<'_>, pending: &PendingFile, path: &str, marker: &mut JobMarker) -> Result<Saved, JobError> {
    let write_back = WriteBehind::watching(pending.file()).map_err(|source| JobError::Place {
        what: "start the write-back of",
        path: pending.target().to_owned(),
        source,
    })?;
    let mut watcher = Watcher::new(job, true)?;
    job.monitor.migrate(&format!("file:{path}"), false)?;
    watcher.wait_completed()?;
    let downtime = if job.runs_again(watcher.state(), marker)? { watcher.continue_vm()? } else { None };
    let to_vm_running = job.begun.elapsed();
    let totals = watcher.totals()?;
    drop(write_back);
    let mut manifest = job.before.manifest.clone();
    manifest.via = Some(Via::File);
    manifest.run_state = Some(watcher.state().to_string());
    record_disks_again(&mut manifest)?;
    Ok(Saved { manifest, downtime, rounds: totals.map(|ram| ram.dirty_sync_count), to_vm_running })
}
