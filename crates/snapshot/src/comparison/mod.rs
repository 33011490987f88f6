//! Whether a stored VM would load on another QEMU, and the reasons against it.
//!
//! Law of this module: **a finding never says more than its source proves.** A difference that QEMU certainly refuses
//! is `Certain`, a conclusion from names and habits is `Likely`, and one that needs loading is `Unknown` and counts for
//! no verdict. Nothing is read or asked here but what the two sides have put into [`Summary`] and [`LoadTarget`].
//!
//! What QEMU 10.0 does, found by loading one stream into altered destinations: another machine type, a RAM block that
//! is missing or of another size, a device section (or instance) that the destination does not have, and a section of a
//! newer version end the load, and so do other PCI identifiers and another number of MSI-X vectors. More RAM blocks,
//! more devices and another CPU model do not. More vCPUs do if the guest has used ACPI's processor hotplug, as
//! operating systems do when they start: its state then has a record for each processor that there can be. Other
//! options of a device (features, for one) can end it, and stand in no description.

mod machine;
mod memory;
mod sections;
mod stored;

use std::fmt;

use serde::Serialize;

use crate::pci::PciIdentity;
use crate::summary::{DeviceSummary, Summary};

pub use memory::{MemoryComparison, compare_memory};
pub use stored::{StoredSections, compare_snapshots, find_damage, load_target_of};

/// The consequence of a finding for the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The load ends with an error.
    Refuses,
    /// The VM loads, and something about it has changed.
    #[serde(rename = "loses")]
    ChangesVm,
    /// Nothing that the guest would miss.
    Harmless,
}

/// How sure a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Confidence {
    /// Both sides report it.
    Certain,
    /// It follows from names, or from QEMU's habits.
    Likely,
    /// It may be so; only loading tells.
    Unknown,
}

/// One thing that a person deciding on a move should know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its consequence for the VM.
    pub severity: Severity,
    /// How sure it is.
    pub confidence: Confidence,
    /// Its subject: `machine`, `RAM block pc.ram`, `section cpu 2`.
    pub subject: String,
    /// The difference, in a sentence without a full stop.
    pub what: String,
    /// The remedy, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Finding {
    /// A finding without a remedy.
    pub fn new(
        severity: Severity,
        confidence: Confidence,
        subject: impl Into<String>,
        what: impl Into<String>,
    ) -> Self {
        Self { severity, confidence, subject: subject.into(), what: what.into(), advice: None }
    }

    /// Adds a remedy.
    #[must_use]
    pub fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    /// Whether this alone lets one expect that the load fails.
    pub fn refuses(&self) -> bool {
        self.severity == Severity::Refuses && self.confidence != Confidence::Unknown
    }

    /// Whether it might make the load fail, which cannot be known before.
    pub fn may_refuse(&self) -> bool {
        self.severity == Severity::Refuses && self.confidence == Confidence::Unknown
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.subject, self.what)?;
        self.advice.as_ref().map_or(Ok(()), |advice| write!(f, "; {advice}"))
    }
}

/// All findings, the gravest first.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Comparison {
    /// The findings.
    pub findings: Vec<Finding>,
}

impl Comparison {
    /// Sorts the findings: refusals first, certain ones before others.
    pub fn new(mut findings: Vec<Finding>) -> Self {
        findings.sort_by_key(|finding| (finding.severity, finding.confidence));
        Self { findings }
    }

    /// Whether nothing was found that ends a load.
    pub fn would_load(&self) -> bool {
        !self.findings.iter().any(Finding::refuses)
    }

    /// How many findings might end a load, which cannot be known before.
    pub fn uncertain_refusals(&self) -> usize {
        self.findings.iter().filter(|finding| finding.may_refuse()).count()
    }
}

/// The properties of a QEMU (or of the VM that another file was saved from) that a load depends on.
#[derive(Debug)]
pub struct LoadTarget<S> {
    /// Machine type.
    pub machine: String,
    /// Returns a remedy for another machine type, where there is a better one than to start QEMU with the right type.
    pub machine_advice: Option<String>,
    /// QEMU's version, as it states it.
    pub qemu: Option<String>,
    /// The VM's uuid.
    pub uuid: Option<uuid::Uuid>,
    /// RAM blocks.
    pub blocks: Vec<LoadTargetBlock>,
    /// Device sections.
    pub sections: S,
}

/// A RAM block of a destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadTargetBlock {
    /// Its name.
    pub name: String,
    /// Bytes in use.
    pub used: u64,
    /// Bytes up to which a stream may resize it; `None` if that is not known.
    pub limit: Option<u64>,
    /// Bytes of a page of its backing; `None` if that is not known.
    pub page_size: Option<u64>,
}

/// The known device sections of a destination.
pub trait Sections {
    /// Whether it takes this section.
    fn look_up(&self, section: &DeviceSummary) -> Presence;

    /// The PCI device at the address that a section's name begins with, if that is known.
    fn pci(&self, section: &DeviceSummary) -> Option<PciIdentity>;

    /// Whether it knows this subsection of a section; `None` if that is unknown.
    fn knows_subsection(&self, section: &str, subsection: &str) -> Option<bool>;

    /// Returns a finding for each section of the destination that the stored VM lacks; `saved` are the stored VM's
    /// sections.
    fn surplus_findings(&self, saved: &[DeviceSummary]) -> Vec<Finding>;
}

/// Whether a destination has a device section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Presence {
    /// It has.
    Present {
        /// How sure that is.
        confidence: Confidence,
        /// The oldest and the newest version that it reads; `None` where it is not known.
        versions: (Option<u32>, Option<u32>),
    },
    /// It has not.
    Absent {
        /// How sure that is.
        confidence: Confidence,
        /// How that shows, in a part of a sentence.
        why: String,
    },
    /// That is unknown.
    Unknown {
        /// Why not, in a part of a sentence.
        why: String,
    },
}

/// Compares a stored VM with a destination that is to load it.
pub fn compare<S: Sections>(saved: &Summary, destination: &LoadTarget<S>) -> Comparison {
    let mut findings = Vec::new();
    machine::compare(saved, destination, &mut findings);
    sections::compare(saved, &destination.sections, &mut findings);
    Comparison::new(findings)
}

/// Bytes for people, exact where that takes few digits.
fn bytes(count: u64) -> String {
    match count {
        count if count >= 1 << 20 && count.is_multiple_of(1 << 20) => format!("{} MiB", count >> 20),
        count if count >= 1 << 10 && count.is_multiple_of(1 << 10) => format!("{} KiB", count >> 10),
        count => format!("{count} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::Severity;

    #[test]
    fn programs_read_the_severities_by_these_names() {
        let names = [Severity::Refuses, Severity::ChangesVm, Severity::Harmless];
        assert_eq!(serde_json::to_string(&names).unwrap(), r#"["refuses","loses","harmless"]"#);
    }
}
