//! Disks that belong to a VM's checkpoints: their server keeps what the VM writes apart until its checkpoint counts.
//!
//! The law: **an epoch of a disk counts when its checkpoint does.** So each disk is sealed while the VM stands still,
//! prepared before the checkpoint counts, and its epoch is kept afterwards. When all processes end in between, the
//! checkpoint says which epoch it is, and the disk has both.

use std::path::{Path, PathBuf};
use std::time::Duration;

use limosa_snapshot::ProtectedDisk;
use serde_json::{Value, json};
use uuid::Uuid;

use super::{DiskServer, Remote, Served, find};
use crate::conflict::{Conflict, DiskConflict};
use crate::job::JobError;
use crate::job_record::ServedEpochs;
use crate::monitor::{Device, Monitor};

/// Time for what brings writes to an image.
const MERGED_WITHIN: Duration = Duration::from_secs(120);
/// The epoch that is open behind the base of a series, which is epoch 0.
const FIRST: u64 = 1;

/// The disks of a VM whose writes belong to epochs. The number of an epoch is that of its checkpoint.
#[derive(Debug, Default)]
pub struct EpochDisks {
    disks: Vec<Served>,
    keeper: String,
}

impl EpochDisks {
    /// Finds the VM's writable disks, which these servers must serve. `keeper` names the job to them.
    ///
    /// # Errors
    /// A disk is not served by them, or cannot have epochs; the monitor's and the servers'.
    pub fn find(monitor: &Monitor, controls: &[PathBuf], keeper: Uuid) -> Result<Self, JobError> {
        Self::find_except(monitor, controls, keeper, false)
    }

    /// As [`find`](Self::find), without the disks in files that QEMU opens itself.
    ///
    /// # Errors
    /// The same; none of the disks is served.
    pub fn find_beside_files(monitor: &Monitor, controls: &[PathBuf], keeper: Uuid) -> Result<Self, JobError> {
        let found = Self::find_except(monitor, controls, keeper, true)?;
        if found.is_empty() {
            return Err(JobError::refused("the VM has no writable disk of a server of disks".to_owned()));
        }
        Ok(found)
    }

    fn find_except(
        monitor: &Monitor,
        controls: &[PathBuf],
        keeper: Uuid,
        without_files: bool,
    ) -> Result<Self, JobError> {
        let keeper = format!("limosa-protect-{keeper}");
        let conflict = |name: &str, why: &str| {
            Err(JobError::conflict(
                format!("the disk {name} {why}: after a failover it would be later than the VM's memory"),
                Conflict::Disk(DiskConflict::StillWritten),
            ))
        };
        let mut disks = monitor.disks()?;
        if without_files {
            disks.retain(|disk| disk.path.is_none());
        }
        if let Some(own) = disks.iter().find(|disk| disk.path.is_some()) {
            return conflict(&own.device, "is a file of QEMU's, not of a server of disks");
        }
        let (devices, foreign): (Vec<Device>, Vec<Device>) = monitor
            .devices()?
            .into_iter()
            .filter(Device::is_external_disk)
            .partition(|device| device.kind.starts_with("vhost-user-blk"));
        if let Some(device) = foreign.first() {
            return conflict(&device.kind, "is of another process");
        }
        let mut disks = find(monitor, &Remote { disks, devices }, controls)?;
        disks.retain(|disk| !disk.image.read_only);
        for (number, disk) in disks.iter().enumerate() {
            let is_same =
                |other: &Served| other.export == disk.export && other.server.control() == disk.server.control();
            if disks.iter().take(number).any(is_same) {
                return conflict(&disk.device, &format!("is the export {:?} once more", disk.export));
            }
        }
        Ok(Self { disks, keeper })
    }

    /// Whether the VM has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.disks.is_empty()
    }

    /// The devices of the disks.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.disks.iter().map(|disk| disk.device.as_str())
    }

    /// Returns what has to be undone when the job ends.
    #[must_use]
    pub fn records(&self) -> Vec<ServedEpochs> {
        let record = |disk: &Served| ServedEpochs {
            device: disk.device.clone(),
            control: disk.server.control().to_string_lossy().into_owned(),
            export: disk.export.clone(),
            keeper: self.keeper.clone(),
        };
        self.disks.iter().map(record).collect()
    }

    /// Has what was written so far made durable, so that [`begin`](Self::begin) takes less time.
    ///
    /// # Errors
    /// The servers'.
    pub fn flush(&self) -> Result<(), JobError> {
        self.disks.iter().try_for_each(|disk| disk.server.flush(&disk.export))
    }

    /// Returns the disks for the manifest of the next checkpoints, whose epochs have not begun.
    #[must_use]
    pub fn plan(&self) -> Vec<ProtectedDisk> {
        let plan = |disk: &Served| ProtectedDisk {
            device: disk.device.clone(),
            path: disk.image.files.first().cloned().unwrap_or_default(),
            format: disk.image.format.clone(),
            export: disk.export.clone(),
            control: disk.server.control().to_owned(),
            keeper: self.keeper.clone(),
            log: Uuid::new_v4(),
        };
        self.disks.iter().map(plan).collect()
    }

    /// Begins epochs as they were [planned](Self::plan): what the VM has written until now is the images', and epoch 1
    /// is open. The VM stands still.
    ///
    /// # Errors
    /// The servers'. Disks whose epochs have begun have to be [ended](Self::end).
    pub fn begin(&self, planned: &[ProtectedDisk]) -> Result<(), JobError> {
        let begin = |(disk, planned): (&Served, &ProtectedDisk)| {
            let answer = self.order(disk, "export-protect", json!({ "first": FIRST, "log": planned.log }))?;
            if log_of(&answer, "protection") == Some(planned.log) {
                return Ok(());
            }
            let control = disk.server.control().display();
            Err(JobError::refused(format!("the server of disks at {control} does not name its log as it was told to")))
        };
        self.disks.iter().zip(planned).try_for_each(begin)
    }

    /// Seals an epoch. The VM stands still, before and after it.
    ///
    /// # Errors
    /// The servers': the checkpoint must not count.
    pub fn seal(&self, epoch: u64) -> Result<(), JobError> {
        self.order_all("export-seal", &json!({ "epoch": epoch }))
    }

    /// Prepares a sealed epoch; `durable`: for a power cut, too. Its checkpoint may count from then on.
    ///
    /// # Errors
    /// The servers': the checkpoint must not count.
    pub fn prepare(&self, epoch: u64, durable: bool) -> Result<(), JobError> {
        self.order_all("export-prepare", &json!({ "epoch": epoch, "durable": durable }))
    }

    /// Keeps an epoch, whose checkpoint counts.
    ///
    /// # Errors
    /// The servers'.
    pub fn keep(&self, epoch: u64) -> Result<(), JobError> {
        self.order_all("export-keep", &json!({ "epoch": epoch }))
    }

    /// Ends epochs: all that the VM has written is the images'. For a VM that continues, or has ended by itself.
    ///
    /// # Errors
    /// Those of the first disk that failed; all are tried.
    pub fn end(&self) -> Result<(), JobError> {
        let end = |record: &ServedEpochs| end_epochs(record, MERGED_WITHIN);
        self.records().iter().map(end).fold(Ok(()), Result::and)
    }

    fn order_all(&self, command: &str, arguments: &Value) -> Result<(), JobError> {
        self.disks.iter().try_for_each(|disk| self.order(disk, command, arguments.clone()).map(drop))
    }

    fn order(&self, disk: &Served, command: &str, mut arguments: Value) -> Result<Value, JobError> {
        arguments["name"] = disk.export.as_str().into();
        arguments["keeper"] = self.keeper.as_str().into();
        disk.server.ask(command, arguments)
    }
}

/// Ends the epochs of a disk on a connection of its own, if they have begun and their keeper is still the same.
///
/// # Errors
/// The server does not answer, or its image fails.
pub(crate) fn end_epochs(record: &ServedEpochs, within: Duration) -> Result<(), JobError> {
    let ServedEpochs { control, export, keeper, .. } = record;
    let server = DiskServer::connect(Path::new(control))?;
    if keeper_of(&server, export)?.as_ref() != Some(keeper) {
        return Ok(());
    }
    let arguments = json!({ "name": export, "keeper": keeper });
    server.ask_within("export-unprotect", arguments, within).map(drop)
}

/// Checks that a disk's server answers and still has it.
///
/// # Errors
/// It does not: the disk can only be brought to its newest checkpoint.
pub(crate) fn check_served(record: &ServedEpochs) -> Result<(), JobError> {
    keeper_of(&DiskServer::connect(Path::new(&record.control))?, &record.export).map(drop)
}

/// A disk that was brought to a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DroppedDisk {
    /// The device, for messages.
    pub device: String,
    /// The processes of its VM that its server refuses from now on; empty if they were refused before, or have no
    /// number here.
    pub refused: Vec<u32>,
}

/// Brings the disks of a checkpoint to it, on their servers: what the VM wrote later is dropped, or was when a server
/// that had been killed was started again. The servers refuse the VM from now on if they recognize it; with
/// `fence` it is not known to be off, and they must. `controls`: the servers' control sockets.
///
/// # Errors
/// A disk is served by none of them; it is as of another instant, or was written since; its server would not recognize
/// the VM, with `fence`; a server fails. It can be repeated then.
pub fn drop_after(
    disks: &[ProtectedDisk],
    epoch: u64,
    controls: &[PathBuf],
    fence: bool,
) -> Result<Vec<DroppedDisk>, JobError> {
    disks.iter().map(|disk| drop_one(disk, epoch, controls, fence)).collect()
}

/// Checks that the disks of a checkpoint can be [brought](drop_after) to it, and changes nothing. `controls`: the
/// servers' control sockets.
///
/// # Errors
/// A disk is served by none of them; it is as of another instant, or was written since.
pub fn check_droppable(disks: &[ProtectedDisk], epoch: u64, controls: &[PathBuf]) -> Result<(), JobError> {
    let check = |disk| if protecting(disk, controls).is_some() { Ok(()) } else { check_one(disk, epoch, controls) };
    disks.iter().try_for_each(check)
}

/// Returns the disks of a checkpoint whose servers would not recognize the VM when it comes back, or do not refuse it
/// although they have dropped what it wrote: one that was started since knows nobody. `controls`: the servers' control
/// sockets.
#[must_use]
pub fn find_unfenced_disks(disks: &[ProtectedDisk], controls: &[PathBuf]) -> Vec<String> {
    let is_true = |found: &Value, place: &str| found.pointer(place) == Some(&Value::Bool(true));
    let is_unfenced = |disk: &&ProtectedDisk| match protecting(disk, controls) {
        Some((_, found)) => !is_true(&found, "/protection/vm/recognized"),
        None => {
            let mut answers = controls.iter().filter_map(|control| asked(disk, control).ok());
            let is_dropped = |found: &Value| log_of(found, "recovered") == Some(disk.log);
            !answers.any(|(_, found)| is_dropped(&found) && is_true(&found, "/recovered/vm-refused"))
        }
    };
    disks.iter().filter(is_unfenced).map(|disk| disk.device.clone()).collect()
}

/// Returns the server that has the epochs of a disk, and the disk's export there.
fn protecting(disk: &ProtectedDisk, controls: &[PathBuf]) -> Option<(DiskServer, Value)> {
    let mut answers = controls.iter().filter_map(|control| asked(disk, control).ok());
    answers.find(|(_, found)| log_of(found, "protection") == Some(disk.log))
}

fn drop_one(disk: &ProtectedDisk, epoch: u64, controls: &[PathBuf], fence: bool) -> Result<DroppedDisk, JobError> {
    let ProtectedDisk { device, export, keeper, .. } = disk;
    let device = device.clone();
    let Some((server, _)) = protecting(disk, controls) else {
        check_one(disk, epoch, controls)?;
        return Ok(DroppedDisk { device, refused: Vec::new() });
    };
    let mut arguments = json!({ "name": export, "keeper": keeper, "epoch": epoch, "serve-again": true });
    // Left out if it is off: older servers refuse fields that they do not know.
    if fence {
        arguments["fence"] = true.into();
    }
    let answer = server.ask_within("export-drop", arguments, MERGED_WITHIN)?;
    let pids = answer.pointer("/vm/processes").and_then(Value::as_array).into_iter().flatten();
    let refused = pids.filter_map(|pid| pid.as_u64().and_then(|pid| pid.try_into().ok())).collect();
    Ok(DroppedDisk { device, refused })
}

/// Fails if a server says that a disk can never be [brought](drop_after) to this checkpoint: it has what the VM wrote
/// since. Servers that do not answer say nothing. `controls`: the servers' control sockets.
///
/// # Errors
/// There is such a disk.
pub fn refuse_changed(disks: &[ProtectedDisk], epoch: u64, controls: &[PathBuf]) -> Result<(), JobError> {
    disks.iter().try_for_each(|disk| {
        let answers = controls.iter().filter_map(|control| asked(disk, control).ok());
        let verdicts: Vec<_> = answers.map(|(_, found)| Verdict::on(disk, epoch, &found)).collect();
        let is_later = |verdict: &Verdict| matches!(verdict, Verdict::Later(_));
        if verdicts.iter().all(is_later) && !verdicts.is_empty() {
            Err(changed(disk, epoch, &verdicts))
        } else {
            Ok(())
        }
    })
}

/// Checks that the disks of a checkpoint are as of it on their servers, and that nobody has written to them since.
/// `controls`: the servers' control sockets.
///
/// # Errors
/// One is not, or is served by none of them.
pub(crate) fn check(disks: &[ProtectedDisk], epoch: u64, controls: &[PathBuf]) -> Result<(), JobError> {
    disks.iter().try_for_each(|disk| check_one(disk, epoch, controls))
}

fn check_one(disk: &ProtectedDisk, epoch: u64, controls: &[PathBuf]) -> Result<(), JobError> {
    let mut verdicts = Vec::new();
    for control in controls {
        match asked(disk, control) {
            Ok((_, found)) => verdicts.push(Verdict::on(disk, epoch, &found)),
            Err(error) => verdicts.push(Verdict::Later(error.to_string())),
        }
    }
    if verdicts.contains(&Verdict::AtCheckpoint) {
        return Ok(());
    }
    if controls.is_empty() {
        verdicts.push(Verdict::Later("its server was not named".to_owned()));
    }
    Err(changed(disk, epoch, &verdicts))
}

/// Asks a server for the export of a disk.
fn asked(disk: &ProtectedDisk, control: &Path) -> Result<(DiskServer, Value), JobError> {
    let server = DiskServer::connect(control)?;
    let found = server.ask("query-export", json!({ "name": disk.export }))?;
    Ok((server, found))
}

/// The state of a disk on a server, compared with a checkpoint.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// It is that of the checkpoint, and was not written since.
    AtCheckpoint,
    /// It is protected still: its epochs can be dropped.
    Protected,
    /// It is not, and why.
    Later(String),
}

impl Verdict {
    fn on(disk: &ProtectedDisk, epoch: u64, found: &Value) -> Self {
        let recovered = found.get("recovered").filter(|_| log_of(found, "recovered") == Some(disk.log));
        let is = |key: &str| recovered.and_then(|recovered| recovered.get(key));
        match (is("epoch").and_then(Value::as_u64), is("written").and_then(Value::as_bool)) {
            (Some(found), Some(false)) if found == epoch => Self::AtCheckpoint,
            (Some(found), Some(false)) => Self::Later(format!("it is as of checkpoint {found}")),
            (Some(_), _) => Self::Later("it was written since".to_owned()),
            (None, _) if log_of(found, "protection") == Some(disk.log) => Self::Protected,
            (None, _) => Self::Later("its protection has ended, and it has what the VM wrote since".to_owned()),
        }
    }
}

fn changed(disk: &ProtectedDisk, epoch: u64, verdicts: &[Verdict]) -> JobError {
    let reasons = verdicts.iter().map(|verdict| match verdict {
        Verdict::Later(why) => why,
        Verdict::AtCheckpoint | Verdict::Protected => "it has what the VM wrote since",
    });
    JobError::other_instant(&disk.device, &disk.path, epoch, &reasons.collect::<Vec<_>>().join("; "))
}

fn log_of(export: &Value, part: &str) -> Option<Uuid> {
    export.get(part)?.get("log")?.as_str()?.parse().ok()
}

/// Returns the keeper of an export; `None`: it has no epochs.
fn keeper_of(server: &DiskServer, export: &str) -> Result<Option<String>, JobError> {
    let answer = server.ask("query-export", json!({ "name": export }))?;
    let keeper = answer.get("protection").and_then(|protection| protection.get("keeper"));
    Ok(keeper.and_then(Value::as_str).map(str::to_owned))
}
