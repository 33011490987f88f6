//! Machine type, QEMU's version, uuid, capabilities and RAM blocks.
//!
//! A stream with a RAM block of another length is refused by QEMU, and by limosa. (QEMU loading a mapped-ram file by
//! itself does not compare lengths: it puts a shorter block into a longer one. The guest's reaction is its
//! affair.)

use limosa_stream::configuration::IGNORE_SHARED;
use uuid::Uuid;

use super::{Confidence, Finding, LoadTarget, LoadTargetBlock, Severity, bytes};
use crate::summary::{BlockSummary, Summary};

/// Blocks that QEMU fills from its own tables and lets a stream resize: their names begin so.
const RESIZABLE: &str = "/rom@";

pub(super) fn compare<S>(saved: &Summary, destination: &LoadTarget<S>, findings: &mut Vec<Finding>) {
    machine(saved, destination, findings);
    version(saved, destination, findings);
    configuration(saved, destination, findings);
    for block in &saved.blocks {
        let here = destination.blocks.iter().find(|here| here.name == block.name);
        findings.extend(ram_block(block, here));
    }
    for block in &destination.blocks {
        if !saved.blocks.iter().any(|saved| saved.name == block.name) {
            let what = format!("only the destination has it ({}); it stays as its QEMU made it", bytes(block.used));
            findings.push(Finding::new(Severity::Harmless, Confidence::Certain, subject(&block.name), what));
        }
    }
}

fn subject(block: &str) -> String {
    format!("RAM block {block}")
}

fn machine<S>(saved: &Summary, destination: &LoadTarget<S>, findings: &mut Vec<Finding>) {
    if saved.machine == destination.machine {
        return;
    }
    let same_family = match (saved.machine.rsplit_once('-'), destination.machine.rsplit_once('-')) {
        (Some((saved, _)), Some((here, _))) => saved == here,
        _ => false,
    };
    let kind = if same_family { "another version of the same machine type" } else { "another machine type" };
    let what = format!("saved as {}, the destination is {}, {kind}", saved.machine, destination.machine);
    let advice = destination
        .machine_advice
        .clone()
        .unwrap_or_else(|| format!("start the destination with -machine {}", saved.machine));
    findings.push(Finding::new(Severity::Refuses, Confidence::Certain, "machine", what).advise(advice));
}

/// Returns the major and the minor number of QEMU's version text.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

fn version<S>(saved: &Summary, destination: &LoadTarget<S>, findings: &mut Vec<Finding>) {
    let from = saved.manifest.as_ref().and_then(|manifest| manifest.qemu_version.as_deref());
    let (Some(from), Some(to)) = (from, destination.qemu.as_deref()) else { return };
    match (release(from), release(to)) {
        (Some(old), Some(new)) if old > new => findings.push(
            Finding::new(
                Severity::Refuses,
                Confidence::Unknown,
                "QEMU",
                format!(
                    "saved by {from}, the destination is the older {to}, which may lack state that the newer one wrote"
                ),
            )
            .advise("try the load before you rely on it"),
        ),
        (Some(old), Some(new)) if old < new => findings.push(Finding::new(
            Severity::Harmless,
            Confidence::Likely,
            "QEMU",
            format!(
                "saved by {from}, the destination is {to}: newer ones read what older ones wrote for the same machine"
            ),
        )),
        _ => {}
    }
}

fn configuration<S>(saved: &Summary, destination: &LoadTarget<S>, findings: &mut Vec<Finding>) {
    if saved.capabilities.iter().any(|capability| capability == IGNORE_SHARED) {
        findings.push(
            Finding::new(
                Severity::ChangesVm,
                Confidence::Certain,
                "capability x-ignore-shared",
                "shared memory was left out of the file: it comes from the memory's own file, or not at all",
            )
            .advise("load it by QEMU's own means with x-ignore-shared on; limosa does not restore it"),
        );
    }
    let recorded = saved.uuid.as_deref().and_then(|uuid| Uuid::parse_str(uuid).ok());
    let known = recorded.or_else(|| saved.manifest.as_ref()?.vm_uuid);
    let (Some(known), Some(here)) = (known, destination.uuid) else { return };
    if known == here {
        return;
    }
    let what = format!("saved with {known}, the destination has {here}");
    // QEMU compares what stands in the stream, which is only there if validate-uuid was on.
    let finding = if recorded.is_some() {
        Finding::new(Severity::Refuses, Confidence::Certain, "uuid", format!("{what}, and the stream asks to compare"))
    } else {
        Finding::new(
            Severity::ChangesVm,
            Confidence::Certain,
            "uuid",
            format!("{what}: QEMU does not compare them here"),
        )
    };
    findings.push(finding.advise(format!("start the destination with -uuid {known}")));
}

fn ram_block(saved: &BlockSummary, here: Option<&LoadTargetBlock>) -> Option<Finding> {
    let refuses = |what: String| Finding::new(Severity::Refuses, Confidence::Certain, subject(&saved.name), what);
    let Some(here) = here else {
        let advice = match saved.name.split_once('/') {
            Some((place, _)) if !place.is_empty() => {
                format!("give the destination the device at {place} that it is of")
            }
            _ => "start the destination with the memory that the saved VM was started with".to_owned(),
        };
        return Some(refuses(format!("the destination has none ({} saved)", bytes(saved.used))).advise(advice));
    };
    if here.used != saved.used {
        let resizable = here.limit.map_or(saved.name.starts_with(RESIZABLE), |limit| limit > here.used);
        let fits = here.limit.is_none_or(|limit| saved.used <= limit);
        let what = format!("{} saved, {} at the destination", bytes(saved.used), bytes(here.used));
        if resizable && fits {
            let confidence = if here.limit.is_some() { Confidence::Certain } else { Confidence::Likely };
            let what = format!("{what}: the stream resizes it");
            return Some(Finding::new(Severity::Harmless, confidence, subject(&saved.name), what));
        }
        return Some(refuses(what).advise("start the destination with the sizes that the saved VM was started with"));
    }
    here.page_size.filter(|size| *size > limosa_page::PAGE_SIZE).map(|size| {
        let what = format!("the destination has it in pages of {}", bytes(size));
        Finding::new(Severity::Harmless, Confidence::Certain, subject(&saved.name), what)
    })
}

#[cfg(test)]
mod tests {
    use super::release;

    #[test]
    fn releases_are_read_from_what_qemu_says_of_itself() {
        assert_eq!(release("10.0.2 (Debian 1:10.0.2+ds-2)"), Some((10, 0)));
        assert_eq!(release("9.2.50"), Some((9, 2)));
        assert_eq!(release("unknown"), None);
        assert_eq!(release(""), None);
    }
}
