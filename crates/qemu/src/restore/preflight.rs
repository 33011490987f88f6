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
use crate::monitor::{FileBackend, Monitor, RamBlockInfo, RunState, Settings};
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
}

/// The memory of the QEMU that takes the VM.
struct Memory {
    backends: Vec<FileBackend>,
    blocks: Vec<RamBlockInfo>,
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
    waits_for_a_vm(monitor)?;
    let memory = Memory { backends: monitor.file_backends()?, blocks: monitor.ram_blocks()? };
    refuse_shared_snapshot(monitor, &memory.backends, snapshot)?;
    same_machine(monitor, snapshot)?;
    same_memory(snapshot, &memory.blocks)?;
    let runs = options.run.runs(snapshot);
    let page_sizes = page_sizes(snapshot, &memory.blocks);
    let mode = plan_mode(monitor, snapshot, options, watch, &memory)?;
    Ok(Plan { mode, runs, page_sizes })
}

/// Decides how to restore; what the user ruled out is an error, what is merely not possible here a notice.
fn plan_mode(
    monitor: &Monitor,
    snapshot: &Snapshot,
    options: &RestoreOptions,
    watch: JobContext<'_>,
    memory: &Memory,
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
        match recognize(monitor, &memory.backends, &memory.blocks, snapshot) {
            Mapped::Blocks(blocks) => return mapped(monitor, snapshot, blocks, watch),
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
    match why_not_lazy(monitor, snapshot, memory)? {
        None => Ok(PlannedMode::Lazy),
        Some(NotLazy { why, conflict }) if wanted == RestoreMode::Lazy => {
            Err(JobError::conflict(format!("cannot restore lazily: {why}"), conflict))
        }
        Some(NotLazy { why, .. }) => {
            (watch.notice)(&format!("restoring eagerly: {why}"));
            Ok(PlannedMode::Eager)
        }
    }
}

/// Notices about a VM that maps its memory.
fn mapped(
    monitor: &Monitor,
    snapshot: &Snapshot,
    blocks: Vec<PresentBlock>,
    watch: JobContext<'_>,
) -> Result<PlannedMode, JobError> {
    for device in monitor.devices()? {
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
    Ok(PlannedMode::Mapped(blocks))
}

fn waits_for_a_vm(monitor: &Monitor) -> Result<(), JobError> {
    let (status, migration) = monitor.status_and_migration()?;
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

fn same_machine(monitor: &Monitor, snapshot: &Snapshot) -> Result<(), JobError> {
    let (saved, here) = (&snapshot.setup().configuration.machine, monitor.machine()?);
    if *saved == here {
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
struct NotLazy {
    why: String,
    conflict: Conflict,
}

impl NotLazy {
    /// This memory or device cannot be filled lazily.
    fn unsupported(why: String) -> Self {
        Self { why, conflict: Conflict::Unsupported(JobOption::LazyMode) }
    }
}

/// Returns the reason that rules out a lazy restore, if there is one.
fn why_not_lazy(monitor: &Monitor, snapshot: &Snapshot, memory: &Memory) -> Result<Option<NotLazy>, JobError> {
    let page_sizes = page_sizes(snapshot, &memory.blocks);
    for saved in &snapshot.setup().blocks {
        // Its last page would never be whole.
        if let Some(size) = page_sizes.get(&saved.name)
            && !saved.used_length.is_multiple_of(*size)
        {
            let (name, length) = (&saved.name, saved.used_length >> 10);
            let why = format!("RAM block {name} of {length} KiB is no multiple of its pages of {} KiB", size >> 10);
            return Ok(Some(NotLazy::unsupported(why)));
        }
    }
    if let Some(backend) = memory.backends.iter().find(|backend| !backend.share) {
        return Ok(Some(NotLazy::unsupported(format!("memory backend {} maps a file privately", backend.id))));
    }
    if let Some(device) = monitor.devices()?.into_iter().find(crate::monitor::Device::is_assigned) {
        let why = format!("{} is an assigned host device, which needs all memory at once", device.kind);
        return Ok(Some(NotLazy::unsupported(why)));
    }
    // QEMU itself looks whether it may use userfaultfd when the capability is set; what excludes it is off first.
    let change = monitor.plan_settings(
        &Settings::new()
            .capability("multifd", false)
            .capability("mapped-ram", false)
            .capability("x-ignore-shared", false)
            .capability("postcopy-ram", true),
    )?;
    let tried = monitor.apply_settings(&change.set);
    monitor.restore_settings(&change.undo)?;
    match tried {
        Ok(()) => Ok(None),
        Err(refusal) if refusal.is_refusal() => {
            let why = refusal.desc().unwrap_or("QEMU refuses postcopy").to_owned();
            // "Postcopy is not supported" is QEMU's word for a host whose userfaultfd it may not use.
            Ok(Some(if why.to_lowercase().contains("postcopy") {
                NotLazy { why, conflict: Conflict::Permission(MissingPermission::Userfaultfd) }
            } else {
                NotLazy::unsupported(why)
            }))
        }
        Err(other) => Err(other.into()),
    }
}
