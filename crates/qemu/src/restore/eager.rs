//! The eager restore: the guest runs when all pages are there. So does the mapped one, whose large RAM blocks are there
//! before anything is sent.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};

use limosa_channel::ZeroCopy;
use limosa_migrate::control::Phase;
use limosa_migrate::multifd::MultifdSourceOptions;
use limosa_migrate::stats::PrecopyStats;
use limosa_migrate::stored::{PrecopyOptions, PresentBlock};
use limosa_page::error_with_causes;
use limosa_snapshot::ReadAhead;
use limosa_stream::multifd::Compression;
use uuid::Uuid;

use super::incoming::{Channels, Rendezvous};
use super::job::{RestoreJob, RestoreReport};
use super::options::{RestoreChannels, RestoreMode};
use super::serve::complete;
use crate::conflict::{Conflict, JobOption};
use crate::job::JobError;
use crate::job_record::JobRecord;
use crate::load::Loader;
use crate::monitor::{MemoryBackend, Settings, WaitingQemu};
use crate::qmp::Version;
use crate::save::{TransportChoice, file_channels};

/// How the memory comes into QEMU.
enum MemorySource<'a> {
    /// QEMU reads the snapshot file.
    File,
    /// limosa sends a stream, without the pages of the blocks that the destination maps.
    Stream {
        mapped: &'a [PresentBlock],
        /// The result of [`fresh_blocks`].
        fresh: Vec<String>,
    },
}

/// `mapped` are the RAM blocks that the destination maps.
pub(super) fn run(
    job: &RestoreJob<'_>,
    qemu: &WaitingQemu,
    mapped: &[PresentBlock],
) -> Result<RestoreReport, JobError> {
    job.snapshot.lock_serving()?;
    let by_file = mapped.is_empty() && by_file(job, qemu)?;
    if !mapped.is_empty() {
        // Who may not change the mode may not be able to write either, or knows what is written there.
        if let Err(error) = job.snapshot.make_read_only() {
            (job.watch.notice)(&format!(
                "{}; a write to it changes the memory of running VMs",
                error_with_causes(&error)
            ));
        }
        // No page of theirs will be looked at again.
        job.snapshot.verify_all()?;
    }
    let read_ahead = if mapped.is_empty() || !job.options.read_ahead { None } else { read_ahead(job) };
    let wish = settings(by_file, job.options.channels);
    let change = job.monitor.plan_settings(&wish)?;
    let mut record = job.record(change.undo);
    record.create(job.monitor)?;
    let source = if by_file {
        MemorySource::File
    } else {
        MemorySource::Stream { mapped, fresh: fresh_blocks(&qemu.memory_backends) }
    };
    let (load, stats) = match fill(job, &change.set, source, &mut record) {
        Ok(filled) => filled,
        Err(error) => {
            // What was not restored must not run here: it may be restored elsewhere next.
            record.was_running = false;
            return Err(job.give_up(&record, error));
        }
    };
    let started = load.start(job.runs);
    if !matches!(started, Err(JobError::Refused { .. })) {
        job.observer.loaded();
    }
    let vm_state = started?.state.to_string();
    let to_guest = job.begun.elapsed();
    let mode = if mapped.is_empty() { RestoreMode::Eager } else { RestoreMode::Mapped };
    job.observer.guest_ready(to_guest, mode);
    complete(job.monitor, &record)?;
    job.watch.handle.progress.set_phase(Phase::Completed);
    Ok(RestoreReport {
        mode,
        mapped_blocks: mapped.iter().map(|block| block.block.clone()).collect(),
        time_to_guest: to_guest,
        time_to_resident: to_guest,
        normal_pages: stats.map(|stats| stats.normal_pages),
        zero_pages: stats.map(|stats| stats.zero_pages),
        lazy: None,
        channel: stats.map(|stats| stats.channel),
        vm_state,
        read_ahead,
        recorded: None,
    })
}

/// Begins to read the working set ahead, if there is one: the guest's first touches are not far.
fn read_ahead(job: &RestoreJob<'_>) -> Option<ReadAhead> {
    let started = ReadAhead::start(job.snapshot, job.options.working_set.as_ref()?);
    started.inspect_err(|error| (job.watch.notice)(&error_with_causes(error))).ok()
}

/// How QEMU must be set: what it needs is on, and every option that would give the stream another form is off.
fn settings(by_file: bool, channels: Option<RestoreChannels>) -> Settings {
    let multifd = by_file || channels.is_some();
    let mut wish =
        Settings::new().capability("events", true).capability("mapped-ram", by_file).capability("multifd", multifd);
    for other in ["postcopy-ram", "postcopy-preempt", "x-ignore-shared", "x-colo", "switchover-ack"] {
        wish = wish.capability(other, false);
    }
    if multifd {
        let count = channels.map_or_else(file_channels, |channels| channels.count.into());
        let compression = channels.map_or_else(Compression::default, |channels| channels.compression);
        wish = wish
            .capability("xbzrle", false)
            .parameter("multifd-channels", count)
            .parameter("multifd-compression", compression.name());
    }
    if by_file {
        wish = wish.parameter("direct-io", false);
    }
    wish
}

/// Brings the memory in; returns the statistics if limosa sent it.
fn fill<'a>(
    job: &RestoreJob<'a>,
    settings: &Settings,
    source: MemorySource<'_>,
    record: &mut JobRecord,
) -> Result<(Loader<'a>, Option<PrecopyStats>), JobError> {
    job.monitor.apply_settings(settings)?;
    let load = Loader::new(job.monitor, job.watch)?;
    let stats = match source {
        MemorySource::File => read_by_qemu(job, &load, record).map(|()| None),
        MemorySource::Stream { mapped, fresh } => send(job, &load, mapped, fresh).map(Some),
    };
    Ok((load, stats?))
}

/// Whether QEMU should read the file itself.
fn by_file(job: &RestoreJob<'_>, qemu: &WaitingQemu) -> Result<bool, JobError> {
    let unable = if job.monitor.version() < Version::new(9, 0, 0) {
        Some("this QEMU cannot read mapped-ram files; 9.0 and newer can")
    } else if job.snapshot.not_plain_reason().is_some() {
        Some("the snapshot is packed or in an object store, and QEMU reads plain files")
    } else if !job.monitor.qmp().passes_descriptors() {
        Some("a monitor over tcp cannot be passed descriptors")
    } else {
        None
    };
    let limited = job.watch.handle.control.max_bandwidth().is_some();
    let compressed = job.options.channels.is_some_and(|channels| channels.compression != Compression::None);
    let looks = job.options.channels.is_some_and(|channels| channels.detect_zero);
    let named = job.options.channels.is_some_and(|channels| channels.zero_copy != ZeroCopy::Auto);
    // QEMU takes the pages that a file does not store for zero as they are, and never clears them. Only memory backends
    // that map a file of a name can have contents before a VM is loaded.
    let stale = qemu.file_backends.first().map(|backend| &backend.id);
    match (job.options.transport, unable) {
        (TransportChoice::File, _) if limited => Err(JobError::conflict(
            "QEMU reads a file as fast as it can",
            Conflict::Options(JobOption::FileTransport, JobOption::MaxBandwidth),
        )),
        (TransportChoice::File, _) if compressed => Err(JobError::conflict(
            "a snapshot is not compressed, and QEMU reads it as it is",
            Conflict::Options(JobOption::FileTransport, JobOption::Compression),
        )),
        (TransportChoice::File, _) if looks => Err(JobError::conflict(
            "QEMU takes the pages of a file as they are",
            Conflict::Options(JobOption::FileTransport, JobOption::ZeroPageDetection),
        )),
        (TransportChoice::File, _) if named => Err(JobError::conflict(
            "QEMU reads a file in its own way",
            Conflict::Options(JobOption::FileTransport, JobOption::ZeroCopy),
        )),
        (TransportChoice::File, _) if let Some(id) = stale => Err(JobError::conflict(
            format!("memory backend {id} maps a file, whose old contents QEMU would leave in place of zero pages"),
            Conflict::Unsupported(JobOption::FileTransport),
        )),
        (TransportChoice::File, Some(why)) => {
            Err(JobError::conflict(why, Conflict::Unsupported(JobOption::FileTransport)))
        }
        (TransportChoice::File, None) => {
            // QEMU reads them behind limosa's back.
            job.snapshot.verify_all()?;
            Ok(true)
        }
        (TransportChoice::Socket, _) => Ok(false),
        // Checksums are verified as chunks are served, so limosa has to serve them.
        (TransportChoice::Auto, unable) => Ok(unable.is_none()
            && !limited
            && !compressed
            && !looks
            && !named
            && stale.is_none()
            && !job.snapshot.has_checksums()
            && job.options.listen.is_none()),
    }
}

/// The RAM blocks that are zero before the VM is loaded: memory that QEMU has just made. Firmware, option ROMs and
/// video memory have blocks of their own, which are not among them.
fn fresh_blocks(backends: &[MemoryBackend]) -> Vec<String> {
    let fresh = backends.iter().filter(|backend| !backend.maps_file());
    let mut names: Vec<_> = fresh.map(|backend| backend.id.clone()).collect();
    if backends.is_empty() {
        // Without backends of its own, a PC has one block of RAM, of this name.
        names.push("pc.ram".to_owned());
    }
    names
}

/// QEMU reads the file through a descriptor.
fn read_by_qemu(job: &RestoreJob<'_>, load: &Loader<'_>, record: &mut JobRecord) -> Result<(), JobError> {
    let place = |source| JobError::Io { what: "open", path: job.path.to_owned(), source };
    // A description of its own, at offset 0; through /proc, so that it is the file that was checked, even if another
    // file has its name.
    let file = File::open(format!("/proc/self/fd/{}", job.snapshot.file().as_raw_fd())).map_err(place)?;
    let set = job.monitor.add_fd(file.as_fd(), None, &format!("limosa restore {}", job.snapshot.id()))?;
    drop(file);
    record.descriptor_sets.push(set.id);
    record.update(job.monitor)?;
    job.watch.handle.progress.set_phase(Phase::Active);
    let loaded = job
        .monitor
        .migrate_incoming(&format!("file:{}", set.path()))
        .map_err(JobError::from)
        .and_then(|()| load.wait(None));
    let removed = job.monitor.remove_fd(set.id);
    loaded?;
    Ok(removed?)
}

/// limosa sends a precopy stream, with no page of the RAM blocks that the destination maps.
fn send(
    job: &RestoreJob<'_>,
    load: &Loader<'_>,
    mapped: &[PresentBlock],
    fresh: Vec<String>,
) -> Result<PrecopyStats, JobError> {
    let channels = job.options.channels;
    // Multifd channels name the VM. Asked before QEMU waits for the first bytes of a connection: then it answers
    // nothing.
    let uuid = channels.map(|_| job.monitor.uuid()).transpose()?.flatten().map(Uuid::into_bytes);
    let multifd = channels.map(|RestoreChannels { compression, detect_zero, zero_copy, .. }| MultifdSourceOptions {
        compression,
        uuid,
        detect_zero,
        zero_copy,
        ..MultifdSourceOptions::default()
    });
    let options = PrecopyOptions { zeroed_blocks: fresh, in_place: mapped.to_vec(), ..PrecopyOptions::default() };
    multifd.iter().try_for_each(|multifd| multifd.check_zero_copy(job.snapshot, options.return_path))?;
    let wanted = if channels.is_some() { Channels::Several } else { Channels::One };
    let rendezvous = Rendezvous::new(job.monitor, job.options.listen.as_ref(), wanted)?;
    job.monitor.migrate_incoming(&rendezvous.uri())?;
    let channel = rendezvous.connect()?;
    let beside = rendezvous.connect_beside(channels.map_or(0, |channels| channels.count))?;
    drop(rendezvous);
    load.send(job.snapshot, channel, multifd.map(|options| (beside, options)), options)
}
