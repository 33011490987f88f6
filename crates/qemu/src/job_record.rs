//! The record of the running job, kept inside the QEMU process.
//!
//! Law: **the record lives exactly as long as what it describes.** A job changes a QEMU process; so the record of what
//! has to be undone is an object in that very process: it is gone when QEMU is, and the monitor's next client finds it.
//!
//! It is an object of type `secret` whose `data` property holds JSON. Facts found with QEMU 10.0.2:
//!
//! * `data` can be read back with `qom-get` and replaced in one step with `qom-set`, also after creation; a megabyte is
//!   fine.
//! * `object-add` refuses an id that exists, which makes placing the record the lock against a second job.
//! * The object is no device: it is in no migration stream or snapshot, and one side having it does not upset the
//!   other.
//!
//! Every client of the monitor can read it, so nothing secret may be in it.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use limosa_image::reference::is_object;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::monitor::{Monitor, Settings};
use crate::process::{Liveness, ProcessIdentity};
use crate::qmp::QmpError;

/// The object's id.
const ID: &str = "limosa-job";
/// Where the object is.
const OBJECT: &str = "/objects/limosa-job";
/// The version of a record without overlays.
const VERSION: u32 = 1;
/// The version of a record with overlays: an older limosa would leave them about.
const VERSION_WITH_OVERLAYS: u32 = 2;
/// The version of a record with overlays of served disks.
const VERSION_WITH_SERVED: u32 = 3;
/// The version of a record of checkpoints: an older limosa would cancel the migration, which QEMU does not come back
/// from in COLO.
const VERSION_OF_PROTECT: u32 = 4;
/// The version of a record of checkpoints with disks or filters: an older limosa would leave the VM's writes in their
/// logs, or the VM without its network.
const VERSION_WITH_HELD: u32 = 5;
/// The version of a record of checkpoints with overlays, and the newest that this limosa reads: an older one would
/// leave the VM on them.
const VERSION_WITH_CHAINS: u32 = 6;

/// Separates a disk's name from the digits of the snapshot's id in an overlay's file name.
pub(crate) const OVERLAY_SUFFIX: &str = ".overlay-";
/// The number of these digits.
pub(crate) const OVERLAY_DIGITS: usize = 16;

/// Returns the digits in the names of this snapshot's overlays.
pub(crate) fn overlay_digits(snapshot: Uuid) -> String {
    snapshot.simple().to_string().chars().take(OVERLAY_DIGITS).collect()
}

/// The kind of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum JobKind {
    /// `limosa save`.
    Save,
    /// `limosa restore`.
    Restore,
    /// `limosa protect`.
    Protect,
}

/// How far a job has come, for the process that takes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobPhase {
    /// Nothing has been handed over: a job that ends here has no effect.
    Working,
    /// The VM may have been handed over; only a person can find out.
    Undecided,
    /// The snapshot is being given its name: the file system shows whether it has it. Only of a save with overlays,
    /// which are undone without a snapshot and not with one.
    Publishing,
    /// The snapshot has its name.
    Published,
}

/// The VM's fate after a job that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmAfterJob {
    /// It continues as it was.
    AsBefore,
    /// It stays stopped.
    Stopped,
}

/// An overlay that a save puts over a disk. Recorded before there is such a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// The disk, for messages.
    pub device: String,
    /// The block node that is frozen.
    pub base: String,
    /// Its file, for messages.
    pub frozen: String,
    /// The overlay's block node.
    pub node: String,
    /// The overlay's file.
    pub file: String,
}

/// An overlay that a save has a server of disks put over a disk. Recorded before there is such a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedOverlay {
    /// The disk, for messages.
    pub device: String,
    /// The path of the server's control socket.
    pub control: String,
    /// The export's name.
    pub export: String,
    /// The file that is frozen, for messages.
    pub frozen: String,
    /// The overlay's file.
    pub file: String,
}

/// A served disk whose writes belong to epochs. Recorded before they begin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedEpochs {
    /// The disk, for messages.
    pub device: String,
    /// The path of the server's control socket.
    pub control: String,
    /// The export's name.
    pub export: String,
    /// The name of the job's keeper: epochs of another one are left alone.
    pub keeper: String,
}

/// A disk that has an overlay for each epoch of a protection. Recorded before there is any.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlayChain {
    /// The disk, for messages.
    pub device: String,
    /// The block node of the image.
    pub base: String,
    /// The image's file, beside which the overlays are.
    pub image: String,
    /// The names of the overlays' block nodes, without the number of the epoch.
    pub nodes: String,
}

/// A job, as recorded inside the QEMU process that it works on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    /// Version of this record.
    pub version: u32,
    /// The kind of the job.
    pub job: JobKind,
    /// How far it is.
    pub phase: JobPhase,
    /// The VM's fate afterwards.
    pub vm_after: VmAfterJob,
    /// The snapshot's id.
    pub snapshot: Uuid,
    /// The snapshot's path, absolute; for messages (not every path is text).
    pub path: String,
    /// The limosa process.
    pub process: ProcessIdentity,
    /// A save: the VM ran when the job began. A restore: the VM is to run when it has been loaded.
    pub was_running: bool,
    /// Migration settings to put back.
    pub undo: Settings,
    /// Descriptor sets to remove.
    #[serde(default)]
    pub descriptor_sets: Vec<u64>,
    /// Named descriptors to close.
    #[serde(default)]
    pub descriptors: Vec<String>,
    /// Overlays that may exist, over their disks or not yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overlays: Vec<Overlay>,
    /// Overlays of served disks that may exist, over their disks or not yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub served_overlays: Vec<ServedOverlay>,
    /// Served disks whose epochs may have begun.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub served_epochs: Vec<ServedEpochs>,
    /// Disks that may have overlays of epochs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chains: Vec<OverlayChain>,
    /// Ids of filters that hold the VM's output, in the order in which they are removed; some may not exist.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub filters: Vec<String>,
    /// When the job began, in seconds since 1970.
    pub begun: u64,
    /// The reason of its failure, if it could still be recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// The failure to place or read a record.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobRecordError {
    /// A job runs.
    #[error("{}", busy(.0))]
    Busy(Box<JobRecord>),
    /// A job runs, or ran, where this process cannot see it.
    #[error(
        "{} of another host or container began a {} of this VM ({})",
        .0.process, .0.job, .0.path
    )]
    Elsewhere(Box<JobRecord>),
    /// A job was killed and has left its traces.
    #[error("a {} of this VM ({}) was interrupted", .0.job, .0.path)]
    LeftOver(Box<JobRecord>),
    /// The record cannot be understood.
    #[error("the record of a job inside QEMU (object {ID}) cannot be read: {reason}; 'object-del' removes it")]
    Unreadable {
        /// Why.
        reason: String,
    },
    /// The monitor's error.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// The message about a job that runs.
fn busy(record: &JobRecord) -> String {
    let JobRecord { process, job, path, .. } = record;
    match job {
        // It does not end by itself.
        JobKind::Protect => format!("{process} protects this VM ({path}): end that first"),
        _ => format!("{process} is in the middle of a {job} of this VM ({path}): wait for it or end it"),
    }
}

/// Returns the name of a snapshot that holds in every directory. The URL of an object does already.
pub(crate) fn absolute_name(name: &Path) -> PathBuf {
    let absolute = if is_object(name) { None } else { std::path::absolute(name).ok() };
    absolute.unwrap_or_else(|| name.to_owned())
}

impl JobRecord {
    /// Returns the record of a job of this process that begins now.
    #[must_use]
    pub fn new(job: JobKind, snapshot: Uuid, path: &Path, was_running: bool, undo: Settings) -> Self {
        let path = absolute_name(path);
        Self {
            version: if job == JobKind::Protect { VERSION_OF_PROTECT } else { VERSION },
            job,
            phase: JobPhase::Working,
            vm_after: VmAfterJob::AsBefore,
            snapshot,
            path: path.to_string_lossy().into_owned(),
            process: ProcessIdentity::own(),
            was_running,
            undo,
            descriptor_sets: Vec::new(),
            descriptors: Vec::new(),
            overlays: Vec::new(),
            served_overlays: Vec::new(),
            served_epochs: Vec::new(),
            chains: Vec::new(),
            filters: Vec::new(),
            failure: None,
            begun: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        }
    }

    /// Names the address at which checkpoints are kept, which have no path here.
    #[must_use]
    pub fn at_address(mut self, address: &str) -> Self {
        address.clone_into(&mut self.path);
        self
    }

    /// Adds overlays: QEMU's own, and those of served disks.
    #[must_use]
    pub fn with_overlays(mut self, own: Vec<Overlay>, served: Vec<ServedOverlay>) -> Self {
        self.version = match (own.is_empty(), served.is_empty()) {
            (_, false) => VERSION_WITH_SERVED,
            (false, true) => VERSION_WITH_OVERLAYS,
            (true, true) => VERSION,
        };
        self.overlays = own;
        self.served_overlays = served;
        self
    }

    /// Adds filters of the VM's output, to checkpoints.
    #[must_use]
    pub fn with_filters(mut self, filters: Vec<String>) -> Self {
        if !filters.is_empty() {
            self.version = self.version.max(VERSION_WITH_HELD);
        }
        self.filters = filters;
        self
    }

    /// Adds disks whose writes belong to epochs.
    #[must_use]
    pub fn with_epochs(mut self, disks: Vec<ServedEpochs>) -> Self {
        if !disks.is_empty() {
            self.version = self.version.max(VERSION_WITH_HELD);
        }
        self.served_epochs = disks;
        self
    }

    /// Adds disks that get overlays of epochs, to checkpoints.
    #[must_use]
    pub fn with_chains(mut self, disks: Vec<OverlayChain>) -> Self {
        if !disks.is_empty() {
            self.version = VERSION_WITH_CHAINS;
        }
        self.chains = disks;
        self
    }

    /// Whether there may be overlays or epochs.
    #[must_use]
    pub const fn has_changed_disks(&self) -> bool {
        !self.overlays.is_empty()
            || !self.served_overlays.is_empty()
            || !self.served_epochs.is_empty()
            || !self.chains.is_empty()
    }

    /// Creates the record in QEMU; from here on, this job owns the VM.
    ///
    /// # Errors
    /// [`JobRecordError::Busy`], [`JobRecordError::Elsewhere`] or [`JobRecordError::LeftOver`] if there is one already.
    pub fn create(&self, monitor: &Monitor) -> Result<(), JobRecordError> {
        let refused = match monitor.object_add("secret", ID, json!({ "data": self.to_json() })) {
            Ok(()) => return Ok(()),
            Err(error) if error.is_refusal() => error,
            Err(other) => return Err(other.into()),
        };
        Self::expect_none(monitor)?;
        Err(refused.into())
    }

    /// Checks that no job has left a record, so that a second job reports the first one and not its traces.
    ///
    /// # Errors
    /// [`JobRecordError::Busy`], [`JobRecordError::Elsewhere`] or [`JobRecordError::LeftOver`] if there is one.
    pub fn expect_none(monitor: &Monitor) -> Result<(), JobRecordError> {
        let Some(other) = Self::read(monitor)?.map(Box::new) else { return Ok(()) };
        Err(match other.process.liveness() {
            Liveness::Alive => JobRecordError::Busy(other),
            Liveness::Elsewhere => JobRecordError::Elsewhere(other),
            Liveness::Dead => JobRecordError::LeftOver(other),
        })
    }

    /// Takes the record of a dead job over for this process, which continues the job (a recovery).
    ///
    /// # Errors
    /// [`JobRecordError::Busy`] or [`JobRecordError::Elsewhere`] if the job's process lives or cannot be seen; then
    /// nothing changes.
    pub fn claim(&mut self, monitor: &Monitor) -> Result<(), JobRecordError> {
        match self.process.liveness() {
            Liveness::Alive => return Err(JobRecordError::Busy(Box::new(self.clone()))),
            Liveness::Elsewhere => return Err(JobRecordError::Elsewhere(Box::new(self.clone()))),
            Liveness::Dead => {}
        }
        self.process = ProcessIdentity::own();
        self.update(monitor)
    }

    /// Replaces the record in one step, for example by a later phase.
    ///
    /// # Errors
    /// The monitor's.
    pub fn update(&self, monitor: &Monitor) -> Result<(), JobRecordError> {
        Ok(monitor.qom_set(OBJECT, "data", self.to_json().into())?)
    }

    /// Replaces the record as soon as QEMU answers again, without waiting.
    ///
    /// # Errors
    /// The monitor's.
    pub(crate) fn update_later(&self, monitor: &Monitor) -> Result<(), JobRecordError> {
        let arguments = json!({ "path": OBJECT, "property": "data", "value": self.to_json() });
        let pending = monitor.qmp().send_command("qom-set", arguments)?;
        monitor.qmp().abandon(pending);
        Ok(())
    }

    /// Returns the record in QEMU, if there is one.
    ///
    /// # Errors
    /// [`JobRecordError::Unreadable`], the monitor's.
    pub fn read(monitor: &Monitor) -> Result<Option<Self>, JobRecordError> {
        match monitor.qom_get(OBJECT, "data")? {
            None => Ok(None),
            Some(Value::String(text)) => Self::from_json(&text).map(Some),
            Some(_) => Err(JobRecordError::Unreadable { reason: "it holds no text".to_owned() }),
        }
    }

    /// Removes the record. Its absence is no error.
    ///
    /// # Errors
    /// The monitor's.
    pub fn remove(monitor: &Monitor) -> Result<(), JobRecordError> {
        match monitor.object_del(ID) {
            Err(error) if error.is_refusal() && monitor.qom_get(OBJECT, "type")?.is_none() => Ok(()),
            other => Ok(other?),
        }
    }

    fn to_json(&self) -> String {
        json!(self).to_string()
    }

    fn from_json(text: &str) -> Result<Self, JobRecordError> {
        let unreadable = |reason: String| JobRecordError::Unreadable { reason };
        let value: Value = serde_json::from_str(text).map_err(|error| unreadable(error.to_string()))?;
        let version = value.get("version").and_then(Value::as_u64).unwrap_or_default();
        if version > u64::from(VERSION_WITH_CHAINS) {
            return Err(unreadable(format!(
                "a newer limosa wrote it (version {version}, this one knows {VERSION_WITH_CHAINS})"
            )));
        }
        serde_json::from_value(value).map_err(|error| unreadable(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_the_way_through_json() {
        let undo = Settings::new().capability("events", false).parameter("max-bandwidth", 1 << 27);
        let mut record = JobRecord::new(JobKind::Save, Uuid::from_u128(7), Path::new("a \"b\" é"), true, undo);
        record.descriptor_sets = vec![3];
        record.descriptors = vec!["limosa".to_owned()];
        let text = |text: &str| text.to_owned();
        let overlay =
            Overlay { device: text("d"), base: text("#b"), frozen: text("/f"), node: text("o"), file: text("/o") };
        assert!(!record.to_json().contains("overlays"), "as older ones read it");
        record = record.with_overlays(vec![overlay], Vec::new());
        assert_eq!(JobRecord::from_json(&record.to_json()).unwrap(), record);
        assert!(record.version == 2 && !record.to_json().contains("served"), "as older ones read it");
        let served = ServedOverlay {
            device: text("d"),
            control: text("/c"),
            export: text(""),
            frozen: text("/f"),
            file: text("/o"),
        };
        record = record.with_overlays(Vec::new(), vec![served]);
        assert_eq!(JobRecord::from_json(&record.to_json()).unwrap(), record);
        assert!(record.path.starts_with('/'));
        let far = JobRecord::new(JobKind::Restore, Uuid::nil(), Path::new("s3://b/vm.qcow2"), true, Settings::new());
        assert_eq!(far.path, "s3://b/vm.qcow2");
        let protect = JobRecord::new(JobKind::Protect, Uuid::nil(), Path::new("/d"), true, Settings::new());
        assert_eq!(JobRecord::from_json(&protect.to_json()).unwrap().version, 4);
        assert!(!protect.to_json().contains("filters"), "as older ones read it");
        let protect = protect.with_filters(vec![text("inner"), text("outer")]);
        assert_eq!(JobRecord::from_json(&protect.to_json()).unwrap(), protect);
        assert_eq!(protect.version, 5);
        let chain = OverlayChain { device: text("d"), base: text("#b"), image: text("/f"), nodes: text("n-") };
        let protect = protect.with_chains(vec![chain]).with_filters(vec![text("outer")]);
        assert_eq!(JobRecord::from_json(&protect.to_json()).unwrap(), protect);
        assert_eq!(protect.version, 6);
    }

    #[test]
    fn newer_and_broken_records_are_refused_with_a_reason() {
        let reason = |text: &str| JobRecord::from_json(text).unwrap_err().to_string();
        assert!(reason(r#"{"version": 7}"#).contains("newer limosa"));
        assert!(reason(r#"{"version": 1}"#).contains("missing field"));
        assert!(reason("").contains("cannot be read"));
    }
}
