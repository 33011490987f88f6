//! Findings against loading a stored VM elsewhere, for sides that no QEMU at hand is.

use limosa_snapshot::{
    BlockSummary, Confidence, DeviceSummary, Finding, LoadTarget, LoadTargetBlock, Manifest, PciIdentity, Presence,
    Sections, Severity, Summary, compare, compare_snapshots,
};
use proptest::prelude::*;

fn section(name: &str, instance: u32, version: u32) -> DeviceSummary {
    DeviceSummary { name: name.to_owned(), instance, version, size: 8, pci: None }
}

fn block(name: &str, used: u64) -> BlockSummary {
    let pages = used / 4096;
    BlockSummary { name: name.to_owned(), used, pages, stored: 0, zero: pages, pages_offset: None }
}

fn saved() -> Summary {
    Summary {
        path: "vm".to_owned(),
        length: 0,
        allocated: 0,
        machine: "pc-q35-9.0".to_owned(),
        capabilities: Vec::new(),
        uuid: None,
        run_state: None,
        blocks: vec![block("pc.ram", 1 << 30), block("/rom@etc/acpi/tables", 1 << 17)],
        devices: vec![section("timer", 0, 2), section("cpu", 0, 12), section("0000:00:02.0/nic", 0, 3)],
        vmdescs: Vec::new(),
        manifest: None,
        missing_manifest_reason: None,
        importable: false,
        checksums: false,
        packed: None,
        libvirt: None,
        warnings: Vec::new(),
    }
}

/// A destination that has everything, in these versions.
#[derive(Debug)]
struct Everything(Option<u32>, Option<u32>);

impl Sections for Everything {
    fn look_up(&self, _section: &DeviceSummary) -> Presence {
        Presence::Present { confidence: Confidence::Certain, versions: (self.0, self.1) }
    }

    fn pci(&self, _section: &DeviceSummary) -> Option<PciIdentity> {
        None
    }

    fn knows_subsection(&self, _section: &str, _subsection: &str) -> Option<bool> {
        None
    }

    fn surplus_findings(&self, _saved: &[DeviceSummary]) -> Vec<Finding> {
        Vec::new()
    }
}

fn destination(versions: Everything) -> LoadTarget<Everything> {
    let here = |name: &str, used: u64, limit| LoadTargetBlock {
        name: name.to_owned(),
        used,
        limit: Some(limit),
        page_size: Some(4096),
    };
    LoadTarget {
        machine: "pc-q35-9.0".to_owned(),
        machine_advice: None,
        qemu: None,
        uuid: None,
        blocks: vec![here("pc.ram", 1 << 30, 1 << 30), here("/rom@etc/acpi/tables", 1 << 17, 1 << 21)],
        sections: versions,
    }
}

#[test]
fn what_fits_has_no_findings_and_versions_are_held_against_both_ends_of_the_range() {
    let comparison = compare(&saved(), &destination(Everything(None, None)));
    assert_eq!((comparison.would_load(), comparison.findings.len()), (true, 0));
    let too_new = compare(&saved(), &destination(Everything(Some(1), Some(2))));
    let subjects: Vec<&str> = too_new.findings.iter().map(|finding| finding.subject.as_str()).collect();
    assert_eq!(subjects, ["section cpu", "section 0000:00:02.0/nic"]);
    let too_old = compare(&saved(), &destination(Everything(Some(3), None)));
    assert!(!too_old.would_load() && too_old.findings[0].what.contains("reads from 3 on"));
}

#[test]
fn blocks_are_resized_only_where_the_destination_has_room() {
    let mut saved = saved();
    saved.blocks[1].used = 1 << 20;
    let fits = compare(&saved, &destination(Everything(None, None)));
    assert!(fits.would_load() && fits.findings[0].what.contains("resizes"), "{fits:?}");
    saved.blocks[1].used = 1 << 22;
    assert!(!compare(&saved, &destination(Everything(None, None))).would_load());
    saved.blocks[1].used = 1 << 17;
    saved.blocks[0].used = 1 << 29;
    let shorter = compare(&saved, &destination(Everything(None, None)));
    assert_eq!(
        shorter.findings[0].to_string(),
        "RAM block pc.ram: 512 MiB saved, 1024 MiB at the destination; start the destination with the sizes that the saved VM was started with"
    );
}

#[test]
fn huge_pages_at_the_destination_are_reported_and_harmless() {
    let mut destination = destination(Everything(None, None));
    destination.blocks[0].page_size = Some(2 << 20);
    let comparison = compare(&saved(), &destination);
    assert!(comparison.would_load());
    assert!(comparison.findings[0].what.contains("pages of 2 MiB"), "{comparison:?}");
}

#[test]
fn an_older_qemu_may_refuse_and_a_newer_one_is_harmless() {
    let mut saved = saved();
    saved.manifest.insert(Manifest::new()).qemu_version = Some("10.0.2 (Debian)".to_owned());
    let mut destination = destination(Everything(None, None));
    destination.qemu = Some("9.2.0".to_owned());
    let older = compare(&saved, &destination);
    assert_eq!((older.would_load(), older.uncertain_refusals()), (true, 1));
    destination.qemu = Some("10.1.0".to_owned());
    let newer = compare(&saved, &destination);
    assert_eq!((newer.uncertain_refusals(), newer.findings[0].severity), (0, Severity::Harmless));
}

#[test]
fn a_uuid_refuses_only_if_the_stream_itself_carries_it() {
    let (mine, other) = (uuid::Uuid::from_u128(1), uuid::Uuid::from_u128(2));
    let mut saved = saved();
    let mut destination = destination(Everything(None, None));
    saved.uuid = Some(mine.to_string());
    assert!(compare(&saved, &destination).would_load(), "a destination without one takes any");
    destination.uuid = Some(other);
    assert!(!compare(&saved, &destination).would_load());
    saved.uuid = None;
    saved.manifest.insert(Manifest::new()).vm_uuid = Some(mine);
    let report = compare(&saved, &destination);
    assert!(report.would_load() && report.findings[0].severity == Severity::ChangesVm, "{report:?}");
}

#[test]
fn a_file_without_its_sections_or_without_shared_memory_is_not_called_fit() {
    let mut saved = saved();
    saved.devices.clear();
    assert_eq!(compare(&saved, &destination(Everything(None, None))).uncertain_refusals(), 1);
    saved.capabilities = vec!["x-ignore-shared".to_owned()];
    let report = compare(&saved, &destination(Everything(None, None)));
    assert!(report.findings.iter().any(|finding| finding.severity == Severity::ChangesVm), "{report:?}");
}

#[test]
fn pci_devices_of_two_files_are_held_against_each_other() {
    let identity = |device, vectors| Some(PciIdentity { vendor: 0x1af4, device, vectors: Some(vectors) });
    let (mut a, mut b) = (saved(), saved());
    (a.devices[2].pci, b.devices[2].pci) = (identity(0x1000, 3), identity(0x1000, 3));
    assert_eq!(compare_snapshots(&a, &b).findings, []);
    b.devices[2].pci = identity(0x1041, 3);
    assert!(compare_snapshots(&a, &b).findings[0].what.contains("1af4:1041"));
    b.devices[2].pci = identity(0x1000, 5);
    assert!(compare_snapshots(&a, &b).findings[0].what.contains("3 MSI-X vectors"));
}

proptest! {
    #[test]
    fn two_files_with_any_contents_are_compared_without_a_panic(
        names in proptest::collection::vec("[0-9a-z:./@-]{0,12}", 0..20),
        numbers in proptest::collection::vec(any::<(u64, u32)>(), 20),
    ) {
        let (mut a, mut b) = (saved(), saved());
        for (at, (name, (long, short))) in names.iter().zip(numbers).enumerate() {
            let side = if at % 2 == 0 { &mut a } else { &mut b };
            side.devices.push(section(name, short, short));
            // QEMU's names of RAM blocks are unique; a file that repeats one is refused when it is read.
            side.blocks.push(BlockSummary { used: long, ..block(&format!("{name}/{at}"), 4096) });
            side.machine.clone_from(name);
        }
        let there = compare_snapshots(&a, &b);
        prop_assert!(there.uncertain_refusals() <= there.findings.len());
        prop_assert!(compare_snapshots(&a, &a).would_load());
    }
}
