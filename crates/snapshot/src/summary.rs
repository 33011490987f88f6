//! The contents of a snapshot file, for people and programs.

use limosa_page::{PAGE_SIZE, PageBitmap};
use limosa_stream::DeviceSection;
use limosa_stream::vmdesc::{self, DeviceVmdesc};
use serde::Serialize;
use uuid::Uuid;

use crate::bytes::PackedSummary;
use crate::foreign::{SaveHeader, SaveImage};
use crate::manifest::Manifest;
use crate::pci::PciIdentity;
use crate::reader::Snapshot;

/// A snapshot's contents without its pages.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// The file.
    pub path: String,
    /// Its length in bytes, holes included.
    pub length: u64,
    /// Bytes that it takes on the disk, or in an object store.
    pub allocated: u64,
    /// Machine type.
    pub machine: String,
    /// Capabilities that both ends of the stream must agree on.
    pub capabilities: Vec<String>,
    /// The VM's uuid, if the stream itself carries it (capability `validate-uuid`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Run state that a destination adopts.
    pub run_state: Option<String>,
    /// RAM blocks in stream order.
    pub blocks: Vec<BlockSummary>,
    /// Device sections in stream order.
    pub devices: Vec<DeviceSummary>,
    /// Fields of the device sections; for comparisons, and too long to print.
    #[serde(skip)]
    pub vmdescs: Vec<DeviceVmdesc>,
    /// limosa's record.
    pub manifest: Option<Manifest>,
    /// The reason for its absence.
    #[serde(rename = "without_manifest")]
    pub missing_manifest_reason: Option<String>,
    /// Whether this is not a snapshot, but a file that can be imported.
    #[serde(skip)]
    pub importable: bool,
    /// Whether checksums of the memory were recorded.
    pub checksums: bool,
    /// The images of a packed snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packed: Option<PackedSummary>,
    /// libvirt's record, if this is its save image.
    pub libvirt: Option<SaveImageSummary>,
    /// Warnings for a person.
    pub warnings: Vec<String>,
}

/// A libvirt save image, but for its stream.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SaveImageSummary {
    /// The header.
    #[serde(flatten)]
    pub header: SaveHeader,
    /// The domain's name.
    pub name: Option<String>,
    /// The domain's uuid.
    pub uuid: Option<Uuid>,
    /// Bytes of the domain's definition.
    pub xml_length: usize,
    /// Where the stream begins in the file.
    pub payload_offset: u64,
}

impl SaveImageSummary {
    pub(crate) fn of(image: &SaveImage) -> Self {
        Self {
            header: image.header,
            name: image.name.clone(),
            uuid: image.uuid,
            xml_length: image.xml.len(),
            payload_offset: image.payload_offset(),
        }
    }
}

/// One RAM block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BlockSummary {
    /// Its name.
    pub name: String,
    /// Used length in bytes.
    pub used: u64,
    /// Pages of 4 KiB.
    pub pages: u64,
    /// Pages whose bit is set.
    pub stored: u64,
    /// Pages whose bit is clear: they are zero.
    pub zero: u64,
    /// Where page 0 is, or would be, in the file; none in a recorded stream, where pages have no place of their own.
    pub pages_offset: Option<u64>,
}

/// One device section.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceSummary {
    /// Its name.
    pub name: String,
    /// Tells apart sections of one name.
    pub instance: u32,
    /// Version of its body.
    pub version: u32,
    /// Length of its body in bytes.
    pub size: u64,
    /// The PCI device it belongs to, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci: Option<PciIdentity>,
}

impl DeviceSummary {
    /// `tail` holds the bytes that the section's ranges refer to.
    pub(crate) fn of(section: &DeviceSection, tail: &[u8]) -> Self {
        Self {
            name: section.name.clone(),
            instance: section.instance,
            version: section.version,
            size: section.body.len() as u64,
            pci: PciIdentity::of(&section.name, &tail[section.body.clone()]),
        }
    }
}

impl Snapshot {
    /// Everything about the file but its pages.
    pub fn summary(&self) -> Summary {
        let layout = self.layout();
        let blocks = layout.blocks.iter().zip(&self.memory().stored).map(|(block, stored)| {
            let set = PageBitmap::count(stored);
            BlockSummary {
                name: block.block.name.clone(),
                used: block.pages * PAGE_SIZE,
                pages: block.pages,
                stored: set,
                zero: block.pages - set,
                pages_offset: Some(block.pages_offset),
            }
        });
        let devices = self.devices().sections.iter().map(|section| DeviceSummary::of(section, self.device_tail()));
        Summary {
            path: self.path().display().to_string(),
            length: self.length(),
            allocated: self.allocated(),
            machine: layout.configuration.machine.clone(),
            capabilities: layout.configuration.capabilities.clone(),
            uuid: layout.configuration.uuid.map(uuid_text),
            run_state: self.run_state(),
            blocks: blocks.collect(),
            devices: devices.collect(),
            vmdescs: vmdescs(limosa_migrate::stored::PageSource::description(self)),
            manifest: self.manifest().cloned(),
            missing_manifest_reason: self.missing_manifest_reason().map(str::to_owned),
            importable: false,
            checksums: self.has_checksums(),
            packed: self.packed_summary(),
            libvirt: None,
            warnings: self.warnings().to_vec(),
        }
    }
}

/// Returns the fields of the sections. The text was proven to describe them when the file was opened; one that is too
/// long to keep all names of leaves a comparison without them.
pub(crate) fn vmdescs(json: &[u8]) -> Vec<DeviceVmdesc> {
    vmdesc::decode(json).unwrap_or_default()
}

pub(crate) fn uuid_text(bytes: [u8; 16]) -> String {
    Uuid::from_bytes(bytes).to_string()
}
