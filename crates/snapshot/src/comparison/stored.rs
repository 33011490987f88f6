//! The other side is a file too: its sections show exactly which devices its VM had.
//!
//! A section that is missing there is not proof: QEMU leaves out state that a device need not save. It is, where
//! nothing of the device's place is there, and for the sections of a vCPU, which are always saved.

use std::collections::{BTreeMap, HashMap, HashSet};

use limosa_stream::vmdesc::{DeviceVmdesc, FieldVmdesc, SubsectionVmdesc};

use super::sections::subject;
use super::{Comparison, Confidence, Finding, LoadTarget, LoadTargetBlock, Presence, Sections, Severity, compare};
use crate::error::SnapshotError;
use crate::pci::PciIdentity;
use crate::reader::Snapshot;
use crate::summary::{DeviceSummary, Summary};
use limosa_page::error_with_causes;

/// Most names that one finding lists.
const NAMES: usize = 3;

/// The sections of a file.
#[derive(Debug)]
pub struct StoredSections {
    /// By name and instance.
    sections: BTreeMap<(String, u32), DeviceSummary>,
}

/// The VM that a file was saved from, as a destination for others.
pub fn load_target_of(file: &Summary) -> LoadTarget<StoredSections> {
    let blocks = file.blocks.iter().map(|block| LoadTargetBlock {
        name: block.name.clone(),
        used: block.used,
        limit: None,
        page_size: None,
    });
    LoadTarget {
        machine: file.machine.clone(),
        machine_advice: None,
        qemu: file.manifest.as_ref().and_then(|manifest| manifest.qemu_version.clone()),
        uuid: file.manifest.as_ref().and_then(|manifest| manifest.vm_uuid),
        blocks: blocks.collect(),
        sections: StoredSections::of(&file.devices),
    }
}

/// Whether `saved` would load where `other` was saved, and what else differs between the two files.
pub fn compare_snapshots(saved: &Summary, other: &Summary) -> Comparison {
    let mut findings = compare(saved, &load_target_of(other)).findings;
    capabilities(saved, other, &mut findings);
    run_states(saved, other, &mut findings);
    disks(saved, other, &mut findings);
    vmdescs(saved, other, &mut findings);
    Comparison::new(findings)
}

/// Returns the damage of the file itself, so that it is not restored anywhere. That shared memory was left out is
/// another finding.
pub fn find_damage(saved: &Snapshot) -> Option<Finding> {
    match saved.check_restorable() {
        Ok(()) | Err(SnapshotError::Unsupported { .. }) => None,
        Err(error) => {
            let finding = Finding::new(Severity::Refuses, Confidence::Certain, "file", error_with_causes(&error));
            Some(finding.advise("use another copy"))
        }
    }
}

/// The PCI address that a section's name begins with.
fn place(name: &str) -> Option<&str> {
    name.split_once('/').map(|(place, _)| place).filter(|place| place.contains(':'))
}

impl StoredSections {
    fn of(devices: &[DeviceSummary]) -> Self {
        let keyed = devices.iter().map(|section| ((section.name.clone(), section.instance), section.clone()));
        Self { sections: keyed.collect() }
    }

    fn find(&self, section: &DeviceSummary) -> Option<&DeviceSummary> {
        self.sections.get(&(section.name.clone(), section.instance))
    }

    /// The sections from this name on, in the order of their names.
    fn from(&self, name: String) -> impl Iterator<Item = &DeviceSummary> {
        self.sections.range((name, 0)..).map(|(_, section)| section)
    }
}

impl Sections for StoredSections {
    fn look_up(&self, section: &DeviceSummary) -> Presence {
        if let Some(here) = self.find(section) {
            // The version that a QEMU writes is the newest that it reads; the oldest does not show.
            return Presence::Present { confidence: Confidence::Certain, versions: (None, Some(here.version)) };
        }
        let Some(place) = place(&section.name) else {
            let other = self.from(section.name.clone()).next().filter(|here| here.name == section.name);
            let confidence = match section.name.as_str() {
                "cpu" | "cpu_common" | "apic" => Confidence::Certain,
                _ => Confidence::Likely,
            };
            let why = match other {
                None => "there is no section of that name".to_owned(),
                Some(_) => "there are only other instances".to_owned(),
            };
            return Presence::Absent { confidence, why };
        };
        let begin = format!("{place}/");
        match self.from(begin.clone()).next().and_then(|here| here.name.strip_prefix(&begin)) {
            None => Presence::Absent { confidence: Confidence::Certain, why: format!("nothing is saved of {place}") },
            Some(other) => {
                Presence::Absent { confidence: Confidence::Likely, why: format!("{place} is saved as {other}") }
            }
        }
    }

    fn pci(&self, section: &DeviceSummary) -> Option<PciIdentity> {
        self.find(section)?.pci
    }

    fn knows_subsection(&self, _section: &str, _subsection: &str) -> Option<bool> {
        // A file shows what was needed, not what is known.
        None
    }

    fn surplus_findings(&self, saved: &[DeviceSummary]) -> Vec<Finding> {
        let known: HashSet<_> = saved.iter().map(|section| (section.name.as_str(), section.instance)).collect();
        let extra = self.sections.values().filter(|here| !known.contains(&(here.name.as_str(), here.instance)));
        extra
            .map(|here| {
                if here.name == "cpu" {
                    let what = "only the destination has it: QEMU refuses further vCPUs if the guest has an operating system \
                                with ACPI, otherwise they never start";
                    let finding = Finding::new(Severity::Refuses, Confidence::Unknown, subject(here), what);
                    return finding.advise("use the saved VM's -smp");
                }
                let what = "only the destination has it: it starts as after a reset";
                Finding::new(Severity::Harmless, Confidence::Likely, subject(here), what)
            })
            .collect()
    }
}

fn capabilities(saved: &Summary, other: &Summary, findings: &mut Vec<Finding>) {
    for (here, there, which) in [(saved, other, "first"), (other, saved, "second")] {
        for capability in here.capabilities.iter().filter(|capability| !there.capabilities.contains(capability)) {
            let what = format!("only the {which} file was written with it; it must be set before the file is loaded");
            let about = format!("capability {capability}");
            findings.push(Finding::new(Severity::Harmless, Confidence::Certain, about, what));
        }
    }
}

fn run_states(saved: &Summary, other: &Summary, findings: &mut Vec<Finding>) {
    if let (Some(a), Some(b)) = (&saved.run_state, &other.run_state)
        && a != b
    {
        let what = format!("saved {a}, the other {b}");
        findings.push(Finding::new(Severity::Harmless, Confidence::Certain, "run state", what));
    }
}

fn disks(saved: &Summary, other: &Summary, findings: &mut Vec<Finding>) {
    let (Some(saved), Some(other)) = (&saved.manifest, &other.manifest) else { return };
    for disk in &saved.disks {
        let about = format!("disk {}", disk.device.as_deref().unwrap_or(&disk.node));
        let same = other.disks.iter().find(|here| here.path == disk.path);
        let what = match same {
            None => format!("{} is recorded in the first file only", disk.path.display()),
            Some(here) if (here.size, here.mtime_ns) != (disk.size, disk.mtime_ns) => {
                format!("{} was written between the two saves", disk.path.display())
            }
            Some(_) => continue,
        };
        findings.push(
            Finding::new(Severity::ChangesVm, Confidence::Certain, about, what)
                .advise("memory belongs to the disks of its own instant: keep them together"),
        );
    }
}

/// Compares the fields of the sections that both have.
fn vmdescs(saved: &Summary, other: &Summary, findings: &mut Vec<Finding>) {
    let there: HashMap<_, _> = other.vmdescs.iter().map(|vmdesc| ((&vmdesc.name, vmdesc.instance), vmdesc)).collect();
    let newer = |summary: &Summary| summary.manifest.as_ref().and_then(|manifest| manifest.qemu_version.clone());
    // The same QEMU and machine knows the state that it did not need to save this time.
    let same_program = newer(saved).is_some() && newer(saved) == newer(other) && saved.machine == other.machine;
    for vmdesc in &saved.vmdescs {
        let Some(there) = there.get(&(&vmdesc.name, vmdesc.instance)) else { continue };
        let differences = Differences::between(vmdesc, there);
        findings.extend(differences.finding(vmdesc, same_program));
    }
}

/// How the vmdescs of one section differ.
#[derive(Debug, Default)]
struct Differences {
    /// Fields and subsections of the first only.
    lost: Vec<String>,
    /// Of the second only.
    gained: Vec<String>,
    /// Of both, with other lengths.
    resized: Vec<String>,
}

impl Differences {
    fn between(a: &DeviceVmdesc, b: &DeviceVmdesc) -> Self {
        let mut all = Self::default();
        all.fields("", &a.fields, &b.fields);
        all.subsections(&a.subsections, &b.subsections);
        all
    }

    fn fields(&mut self, within: &str, a: &[FieldVmdesc], b: &[FieldVmdesc]) {
        let (a, b) = (lengths(a), lengths(b));
        let name = |field: &str| if within.is_empty() { field.to_owned() } else { format!("{within}: {field}") };
        for (field, length) in &a {
            match b.get(field) {
                None => self.lost.push(name(field)),
                Some(other) if other != length => {
                    self.resized.push(format!("{} ({length} and {other} bytes)", name(field)));
                }
                Some(_) => {}
            }
        }
        self.gained.extend(b.keys().filter(|field| !a.contains_key(*field)).map(|field| name(field)));
    }

    fn subsections(&mut self, a: &[SubsectionVmdesc], b: &[SubsectionVmdesc]) {
        let others: HashMap<&str, &SubsectionVmdesc> = b.iter().map(|other| (other.name.as_str(), other)).collect();
        for section in a {
            match others.get(section.name.as_str()) {
                None => self.lost.push(format!("subsection {}", section.name)),
                Some(other) => {
                    self.fields(&section.name, &section.fields, &other.fields);
                    self.subsections(&section.subsections, &other.subsections);
                }
            }
        }
        let known: HashSet<&str> = a.iter().map(|section| section.name.as_str()).collect();
        let gained = b.iter().filter(|other| !known.contains(other.name.as_str()));
        self.gained.extend(gained.map(|section| format!("subsection {}", section.name)));
    }

    fn finding(&self, vmdesc: &DeviceVmdesc, same_program: bool) -> Option<Finding> {
        let parts: Vec<String> = [
            ("only in the first", &self.lost),
            ("only in the second", &self.gained),
            ("of other length", &self.resized),
        ]
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(how, names)| format!("{how}: {}", some(names)))
        .collect();
        if parts.is_empty() {
            return None;
        }
        let about = match vmdesc.instance {
            0 => format!("section {}", vmdesc.name),
            instance => format!("section {} {instance}", vmdesc.name),
        };
        let harmless = same_program || self.lost.is_empty() && self.resized.is_empty();
        let (severity, confidence) =
            if harmless { (Severity::Harmless, Confidence::Likely) } else { (Severity::Refuses, Confidence::Unknown) };
        Some(Finding::new(severity, confidence, about, parts.join("; ")))
    }
}

/// The bytes of each field; elements of an array that are listed one by one are summed.
fn lengths(fields: &[FieldVmdesc]) -> BTreeMap<&str, u64> {
    let mut lengths = BTreeMap::new();
    for field in fields {
        let sum = lengths.entry(field.name.as_str()).or_insert(0_u64);
        *sum = sum.saturating_add(field.bytes());
    }
    lengths
}

/// The first names, and how many more there are.
fn some(names: &[String]) -> String {
    let first = names.get(..NAMES).unwrap_or(names).join(", ");
    match names.len().saturating_sub(NAMES) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vmdesc(json: &str) -> DeviceVmdesc {
        let text = format!(r#"{{"devices":[{json}]}}"#);
        limosa_stream::vmdesc::decode(text.as_bytes()).unwrap().remove(0)
    }

    #[test]
    fn a_subsection_that_the_other_side_never_wrote_may_refuse_unless_it_is_the_same_qemu() {
        let with = vmdesc(
            r#"{"name":"cpu","instance_id":1,"fields":[{"name":"a","size":4}],
                "subsections":[{"vmsd_name":"cpu/msr","fields":[{"name":"m","size":8}]}]}"#,
        );
        let without = vmdesc(r#"{"name":"cpu","instance_id":1,"fields":[{"name":"a","size":4}]}"#);
        let differences = Differences::between(&with, &without);
        let other = differences.finding(&with, false).unwrap();
        assert!(other.may_refuse() && other.what.contains("subsection cpu/msr"), "{other:?}");
        assert_eq!(other.subject, "section cpu 1");
        assert_eq!(differences.finding(&with, true).unwrap().severity, Severity::Harmless);
        let reverse = Differences::between(&without, &with).finding(&with, false).unwrap();
        assert_eq!(reverse.severity, Severity::Harmless);
        assert!(Differences::between(&with, &with).finding(&with, false).is_none());
    }

    #[test]
    fn elements_listed_one_by_one_count_as_one_field_and_long_lists_are_cut() {
        let a = vmdesc(r#"{"name":"d","instance_id":0,"fields":[{"name":"v","size":4},{"name":"v","size":4}]}"#);
        let b = vmdesc(r#"{"name":"d","instance_id":0,"fields":[{"name":"v","size":4,"array_len":3}]}"#);
        let finding = Differences::between(&a, &b).finding(&a, false).unwrap();
        assert!(finding.what.contains("v (8 and 12 bytes)"), "{}", finding.what);
        let names: Vec<String> = (0..5).map(|number| number.to_string()).collect();
        assert_eq!(some(&names), "0, 1, 2 and 2 more");
    }
}
