//! Facts about a stored VM that QEMU's format has no place for.
//!
//! Law of this module: the manifest informs and guards, it never decides whether memory can be restored. Keys that this
//! version does not know are kept at every level and written back, so that an older limosa can seal a newer one's file.
//! Of a number that is not a whole one of 64 bits the nearest 64-bit float is kept.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::disks::{Disk, OverlaidDisk, ProtectedDisk};
use crate::fence_scope::FenceScope;

/// The record in a snapshot's trailer, as JSON.
///
/// Every key but the id may be absent in a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// The identity of this one snapshot: an interrupted restore continues only with the id it began with.
    pub id: Uuid,
    /// The limosa that wrote it.
    #[serde(default)]
    #[serde(rename = "limosa")]
    pub limosa_version: String,
    /// The source QEMU's version, as it states it ("10.0.2").
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "qemu")]
    pub qemu_version: Option<String>,
    /// The machine type, versioned ("pc-q35-10.0").
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// The VM's uuid, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_uuid: Option<Uuid>,
    /// The VM's name, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_name: Option<String>,
    /// When the save began, in seconds since 1970.
    #[serde(default)]
    pub created: u64,
    /// When the VM's state was complete, in seconds since 1970.
    #[serde(default)]
    pub finished: u64,
    /// The VM's run state before the save ("running", "paused"): the one in which it comes back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_state: Option<String>,
    /// Used length of all RAM blocks, in bytes.
    #[serde(default)]
    pub ram_bytes: u64,
    /// Where the pages went.
    #[serde(default)]
    pub pages: PageStatistics,
    /// How the pages reached the file.
    #[serde(rename = "via", default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// The number of the checkpoint in its series, where the file is one: 0 is the base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<u64>,
    /// The protection that the checkpoint is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection: Option<Uuid>,
    /// Whether every page that is not stored reads as zero at its place in the file, so that a RAM block's part of the
    /// file may be mapped as its memory. Absent in files of older versions, which may be so all the same.
    #[serde(default, skip_serializing_if = "is_false")]
    pub mappable: bool,
    /// The RAM blocks that are the guest's memory, by name: those that a command line's memory backends make, and not
    /// those of devices (video memory, firmware, a TPM's). Empty where that is unknown: a stream that was received
    /// or imported, a file that QEMU wrote.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guest_memory: Vec<String>,
    /// The writable disks as they were when the VM stopped; empty if the VM went on or has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<Disk>,
    /// The disks that belong to a checkpoint: each is as of the epoch with its number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub protected_disks: Vec<ProtectedDisk>,
    /// The disks that belong to a checkpoint and have overlays of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overlaid_disks: Vec<OverlaidDisk>,
    /// The parts of a protected VM that a fence has to cover; absent where nobody has looked: the VM's own limosa is
    /// older, or it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence_scope: Option<FenceScope>,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub unknown_keys: Map<String, Value>,
}

impl Manifest {
    /// Returns a manifest with a fresh id and the present time, and nothing else yet.
    pub fn new() -> Self {
        Self {
            id: Uuid::new_v4(),
            limosa_version: env!("CARGO_PKG_VERSION").to_owned(),
            qemu_version: None,
            machine: None,
            vm_uuid: None,
            vm_name: None,
            created: now(),
            finished: 0,
            run_state: None,
            ram_bytes: 0,
            pages: PageStatistics::default(),
            transport: None,
            checkpoint: None,
            protection: None,
            mappable: false,
            guest_memory: Vec::new(),
            disks: Vec::new(),
            protected_disks: Vec::new(),
            overlaid_disks: Vec::new(),
            fence_scope: None,
            unknown_keys: Map::new(),
        }
    }
}

impl Default for Manifest {
    fn default() -> Self {
        Self::new()
    }
}

/// How a VM's pages reached the snapshot file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// QEMU wrote the file itself.
    File,
    /// limosa received a migration stream.
    Socket,
    /// A recorded stream or another program's file was converted.
    Import,
    /// A transport that this version does not know, by its name.
    #[serde(untagged)]
    Unknown(String),
}

/// Where the pages of a save went, in 4 KiB pages.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct PageStatistics {
    /// Pages with contents in the file.
    pub normal: u64,
    /// Pages that are zero, which are not stored; holes are among them, which a source sends as zero pages.
    pub zero: u64,
    /// Pages that the stream never mentioned, as contents or as zero: the guest had hinted that they are free. They
    /// take no room, and come back as zeros. Where they cannot be distinguished this says nothing, and they are in
    /// `zero`: in a file that QEMU has written, beside virtio-mem (what is not plugged is not mentioned either), and in
    /// records of older versions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hinted: Option<u64>,
    /// Those of `zero` whose bit is set nevertheless, over zeros of the file: zeros that a loader must write.
    pub explicit_zero: u64,
    /// Pages that came again after their first time, changed or not.
    pub resent: u64,
    /// Pages whose earlier contents had to be taken out of the file because they ended as zero. In a file that QEMU has
    /// written it is the filesystem's count: it counts whole blocks of its own.
    pub punched: u64,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

/// A file that was published.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Published {
    /// Where it is.
    pub path: PathBuf,
    /// The contents of its trailer.
    pub manifest: Manifest,
    /// Its length in bytes, holes included.
    pub length: u64,
    /// How often write-back was started before the final fsync.
    pub write_behind_requests: u64,
}

impl Published {
    /// The published file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
