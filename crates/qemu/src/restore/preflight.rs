//! Whether a snapshot and a destination fit, and how it is best restored: asked before anything is changed.

use std::collections::BTreeMap;

use limosa_migrate::stored::{PageSource, PresentBlock};
use limosa_page::PAGE_SIZE;
use limosa_snapshot::Snapshot;

use super::disks;
use super::options::{RestoreMode, RestoreOptions};
use crate::conflict::{Conflict, JobOption, MissingPermission, StateConflict};
use crate::job::{JobContext, JobError};
use crate::mapping::{Mapped, recognize, refuse_shared_snapshot};
use crate::monitor::{Device, Monitor, RamBlockInfo, RunState, WaitingQemu};
use crate::qmp::QmpError;
use crate::save::DiskPolicy;

/// How it is done: the decision for a [`RestoreMode`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PlannedMode {
    /// The guest runs when all pages are there.
    Eager,
    /// The same, but that these RAM blocks are there already.
    Mapped(Vec<PresentBlock>),
    /// The guest runs at once; its pages follow.
    Lazy,
}

impl std::fmt::Display for PlannedMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Eager => f.write_str("eagerly"),
            Self::Mapped(blocks) => {
                let names: Vec<_> = blocks.iter().map(|block| block.block.as_str()).collect();
                write!(f, "mapped ({})", names.join(", "))
            }
            Self::Lazy => f.write_str("lazily"),
        }
    }
}

/// A RAM block that is sent where others are mapped is worth a notice from this length on, in bytes.
const MAPPED_FROM: u64 = 64 << 20;

/// The decision.
pub(super) struct Plan {
    /// Mapped, lazy or eager.
    pub(super) mode: PlannedMode,
    /// Whether the guest is to run.
    pub(super) runs: bool,
    /// The result of [`page_sizes`].
    pub(super) page_sizes: BTreeMap<String, u64>,
    /// The QEMU that takes the VM, as it is.
    pub(super) qemu: WaitingQemu,
}

/// Looks at both sides.
pub(super) fn check(
    monitor: &Monitor,
    snapshot: &Snapshot,
    options: &RestoreOptions,
    watch: JobContext<'_>,
) -> Result<Plan, JobError> {
    for warning in snapshot.warnings() {
        (watch.notice)(warning);
    }
    snapshot.check_restorable()?;
    if options.disks != DiskPolicy::Ignore
        && let Some(manifest) = snapshot.manifest()
    {
        disks::check(monitor, manifest, &options.disk_servers, watch)?;
    }
    let qemu = monitor.waiting_qemu()?;
    waits_for_a_vm(&qemu)?;
    refuse_shared_snapshot(monitor, &qemu.file_backends, snapshot)?;
    same_machine(&qemu.machine, snapshot)?;
    same_memory(snapshot, &qemu.ram_blocks)?;
    let runs = options.run.runs(snapshot);
    let page_sizes = page_sizes(snapshot, &qemu.ram_blocks);
    let mode = plan_mode(monitor, snapshot, options, watch, &qemu)?;
    Ok(Plan { mode, runs, page_sizes, qemu })
}

/// Decides how to restore; what the user ruled out is an error, what is merely not possible here a notice.
fn plan_mode(
    monitor: &Monitor,
    snapshot: &Snapshot,
    options: &RestoreOptions,
    watch: JobContext<'_>,
    qemu: &WaitingQemu,
) -> Result<PlannedMode, JobError> {
    let wanted = options.mode;
    if options.channels.is_some() {
        return match wanted {
            RestoreMode::Eager => Ok(PlannedMode::Eager),
            RestoreMode::Auto => {
                (watch.notice)("restoring eagerly: only so can QEMU take memory on several channels");
                Ok(PlannedMode::Eager)
            }
            RestoreMode::Lazy => Err(JobError::conflict(
                "a lazy restore cannot use multifd channels: QEMU's multifd excludes postcopy",
                Conflict::Options(JobOption::LazyMode, JobOption::Channels),
            )),
            RestoreMode::Mapped => Err(JobError::conflict(
                "a mapped restore has no memory to send on multifd channels",
                Conflict::Options(JobOption::MappedMode, JobOption::Channels),
            )),
        };
    }
    if matches!(wanted, RestoreMode::Mapped | RestoreMode::Auto) {
        match recognize(monitor, &qemu.file_backends, &qemu.ram_blocks, snapshot) {
            Mapped::Blocks(blocks) => return Ok(mapped(&qemu.devices, snapshot, blocks, watch)),
            // It was started to map a snapshot: sending all of another one would hide the mistake.
            Mapped::Wrong(why) => {
                return Err(JobError::conflict(
                    format!("cannot restore mapped: {why}"),
                    Conflict::Unsupported(JobOption::MappedMode),
                ));
            }
            Mapped::No(why) if wanted == RestoreMode::Mapped => {
                return Err(JobError::conflict(
                    format!("cannot restore mapped: {why}"),
                    Conflict::Unsupported(JobOption::MappedMode),
                ));
            }
            Mapped::No(why) => tracing::info!("not mapped: {why}"),
        }
    }
    if wanted == RestoreMode::Eager {
        return Ok(PlannedMode::Eager);
    }
    match why_not_lazy(snapshot, qemu) {
        None => Ok(PlannedMode::Lazy),
        Some(reason) => reason.give_way(wanted, watch).map(|()| PlannedMode::Eager),
    }
}

/// Notices about a VM that maps its memory.
fn mapped(devices: &[Device], snapshot: &Snapshot, blocks: Vec<PresentBlock>, watch: JobContext<'_>) -> PlannedMode {
    for device in devices {
        if device.is_assigned() {
            (watch.notice)(&format!(
                "{} is an assigned host device: it pins all memory, so this VM has a copy of it instead of sharing it",
                device.kind
            ));
        }
        if device.is_balloon() {
            (watch.notice)(&format!(
                "{}: memory that is mapped from a snapshot cannot be given back to the host",
                device.kind
            ));
        }
    }
    let is_mapped = |name: &str| blocks.iter().any(|block| block.block == name);
    let large = |block: &&limosa_stream::RamBlock| !is_mapped(&block.name) && block.used_length >= MAPPED_FROM;
    for block in snapshot.setup().blocks.iter().filter(large) {
        (watch.notice)(&format!(
            "RAM block {} ({} MiB) is not mapped: it is sent before the guest runs",
            block.name,
            block.used_length >> 20
        ));
    }
    PlannedMode::Mapped(blocks)
}

fn waits_for_a_vm(qemu: &WaitingQemu) -> Result<(), JobError> {
    let WaitingQemu { status, migration, .. } = qemu;
    let over = matches!(migration.status.as_str(), "none");
    if status.state == RunState::Inmigrate && over {
        return Ok(());
    }
    if migration.status.as_str() == "postcopy-paused" {
        return Err(JobError::conflict(
            "this QEMU is in the middle of an interrupted lazy restore",
            Conflict::State(StateConflict::RestoreInterrupted),
        ));
    }
    if status.state == RunState::Inmigrate {
        return Err(JobError::refused(format!(
            "this QEMU already waits for its VM somewhere else, or has begun to take one ({}); start a new one with -incoming defer, not with an address",
            migration.status
        )));
    }
    Err(JobError::refused(format!(
        "this QEMU does not wait for an incoming VM (it is {}); start it with -incoming defer and the options that the saved VM was started with",
        status.state
    )))
}

fn same_machine(here: &str, snapshot: &Snapshot) -> Result<(), JobError> {
    let saved = &snapshot.setup().configuration.machine;
    if saved == here {
        return Ok(());
    }
    Err(JobError::refused(format!(
        "the snapshot is of a machine {saved}, this QEMU is a {here}; start QEMU with -machine {saved}"
    )))
}

fn same_memory(snapshot: &Snapshot, blocks: &[RamBlockInfo]) -> Result<(), JobError> {
    const ADVICE: &str = "start QEMU with the options that the saved VM was started with";
    for saved in &snapshot.setup().blocks {
        let Some(here) = blocks.iter().find(|block| block.name == saved.name) else {
            return Err(JobError::refused(format!(
                "the snapshot has a RAM block {} of {} KiB, this QEMU has none; {ADVICE}",
                saved.name,
                saved.used_length >> 10
            )));
        };
        // A block whose used length is below its total one can be resized by the stream.
        let resizable = here.total_length > here.used_length;
        if here.used_length != saved.used_length && !(resizable && saved.used_length <= here.total_length) {
            return Err(JobError::refused(format!(
                "RAM block {} has {} KiB in the snapshot and {} KiB in this QEMU; {ADVICE}",
                saved.name,
                saved.used_length >> 10,
                here.used_length >> 10
            )));
        }
    }
    Ok(())
}

/// Bytes of a page of the destination, by RAM block of the snapshot, where they are more than 4096. What the VM was
/// saved from has no say: the snapshot holds 4 KiB pages, also of memory in huge pages.
pub(super) fn page_sizes(snapshot: &Snapshot, blocks: &[RamBlockInfo]) -> BTreeMap<String, u64> {
    let saved = |here: &&RamBlockInfo| snapshot.setup().blocks.iter().any(|saved| saved.name == here.name);
    let large = blocks.iter().filter(|here| here.page_size > PAGE_SIZE).filter(saved);
    large.map(|here| (here.name.clone(), here.page_size)).collect()
}

/// The reason that rules out a lazy restore.
pub(super) struct NotLazy {
    why: String,
    conflict: Conflict,
}

impl NotLazy {
    /// This memory or device cannot be filled lazily.
    fn unsupported(why: String) -> Self {
        Self { why, conflict: Conflict::Unsupported(JobOption::LazyMode) }
    }

    /// QEMU has refused the settings of a lazy restore.
    pub(super) fn of(refusal: &QmpError) -> Self {
        let why = refusal.desc().unwrap_or("QEMU refuses postcopy").to_owned();
        // "Postcopy is not supported" is QEMU's word for a host whose userfaultfd it may not use.
        if why.to_lowercase().contains("postcopy") {
            Self { why, conflict: Conflict::Permission(MissingPermission::Userfaultfd) }
        } else {
            Self::unsupported(why)
        }
    }

    /// An error for a user who wants nothing else, and otherwise a notice that the restore is eager.
    pub(super) fn give_way(self, wanted: RestoreMode, watch: JobContext<'_>) -> Result<(), JobError> {
        let Self { why, conflict } = self;
        if wanted == RestoreMode::Lazy {
            return Err(JobError::conflict(format!("cannot restore lazily: {why}"), conflict));
        }
        (watch.notice)(&format!("restoring eagerly: {why}"));
        Ok(())
    }
}

/// Returns the reason that rules out a lazy restore, if there is one. QEMU may have another.
fn why_not_lazy(snapshot: &Snapshot, qemu: &WaitingQemu) -> Option<NotLazy> {
    let page_sizes = page_sizes(snapshot, &qemu.ram_blocks);
    for saved in &snapshot.setup().blocks {
        // Its last page would never be whole.
        if let Some(size) = page_sizes.get(&saved.name)
            && !saved.used_length.is_multiple_of(*size)
        {
            let (name, length) = (&saved.name, saved.used_length >> 10);
            let why = format!("RAM block {name} of {length} KiB is no multiple of its pages of {} KiB", size >> 10);
            return Some(NotLazy::unsupported(why));
        }
    }
    if let Some(backend) = qemu.file_backends.iter().find(|backend| !backend.share) {
        return Some(NotLazy::unsupported(format!("memory backend {} maps a file privately", backend.id)));
    }
    if let Some(device) = qemu.devices.iter().find(|device| device.is_assigned()) {
        let why = format!("{} is an assigned host device, which needs all memory at once", device.kind);
        return Some(NotLazy::unsupported(why));
    }
    None
}
