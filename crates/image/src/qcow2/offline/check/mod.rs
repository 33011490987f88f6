//! Checking and repairing an image.
//!
//! Law: every reference in the image is counted, and the counts are compared with those that the image keeps. What is
//! counted as a leak, a corruption or an error of the check is what `qemu-img check` counts, so the figures can be
//! compared.
//!
//! The image is examined in its file, without being opened as a disk: a broken one would not open. Memory is
//! bounded by [`CheckOptions::memory`].

use limosa_storage::Storage;

use crate::error::ImageError;
use crate::qcow2::format::header::Header;
use counts::{Flags, Width};
use report::Findings;
use stored::Stored;
use walk::{Image, Pass, What};

mod ahead;
mod apart;
mod copied;
mod counts;
mod examine;
pub(in crate::qcow2) mod extend;
pub(in crate::qcow2) mod fit_bitmaps;
mod free_space;
mod rebuild;
pub(in crate::qcow2) mod references;
mod repair;
mod report;
mod roots;
mod runs;
mod stored;
pub(in crate::qcow2) mod tables;
mod taken;
mod unshare;
mod walk;
mod zero_clusters;

pub(in crate::qcow2) use ahead::admit_header;
pub(in crate::qcow2) use free_space::discard_free;
pub(in crate::qcow2) use rebuild::rebuild_as;
pub(crate) use repair::repair_with;
pub use repair::{repair, repair_encrypted};
pub use report::{CheckOptions, CheckReport, Finding, FindingKind, Repair};
pub(in crate::qcow2) use zero_clusters::{expand_zero_clusters, has_zero_clusters};

/// Checks a qcow2 image, and changes nothing.
///
/// # Errors
/// [`ImageError::Corrupt`] and [`ImageError::Unsupported`] where what is wrong leaves nothing to check: the header,
/// lengths in the snapshot table. What the storage says.
pub async fn check(storage: &dyn Storage, options: CheckOptions) -> Result<CheckReport, ImageError> {
    let header = Header::read_to_examine(storage).await?;
    Ok(examine_image(storage, &header, options).await?.report)
}

/// The result of a check.
#[derive(Debug, Default)]
struct Outcome {
    report: CheckReport,
    /// Refcounts cannot be repaired in place.
    rebuild: bool,
    /// Refcounts are wrong.
    refcounts_wrong: bool,
    /// Number of entries with a wrong COPIED flag.
    copied_wrong: u64,
    /// Entries of L1 and L2 tables are wrong.
    entries_wrong: bool,
    /// Something of the bitmaps is wrong.
    bitmaps_wrong: bool,
    /// Something of the snapshot table's entries is wrong.
    snapshots_wrong: bool,
    /// A structure past the end of the file can neither be used nor be given up.
    lost: bool,
    /// A cluster has more references than its refcount can say.
    overflow: bool,
}

impl Outcome {
    /// Whether a repair is impossible, or removes something that was referred to.
    const fn takes_away(&self) -> bool {
        self.entries_wrong || self.bitmaps_wrong || self.snapshots_wrong || self.lost
    }
}

async fn examine_image(storage: &dyn Storage, header: &Header, options: CheckOptions) -> Result<Outcome, ImageError> {
    let image = Image::open(storage, header, options).await?;
    let mut findings = Findings::new(options.max_findings);
    let mut stored = Stored::new(storage, header, image.bounds);
    let mut outcome = Outcome::default();
    let mut highest = 0;
    let (mut from, mut width) = (0, Width::Narrow);
    while let Some(window) = image.window(from, width) {
        let first = window.start == 0;
        let before = findings.clone();
        let pass = image.count(&window, What { width, ..What::ALL }, first, &mut findings).await?;
        if pass.counts.is_too_narrow() {
            (findings, width) = (before, Width::Wide);
            continue;
        }
        from = window.end;
        outcome.rebuild |= pass.refcounts_unusable;
        outcome.entries_wrong |= pass.entries_wrong;
        outcome.bitmaps_wrong |= pass.bitmaps_wrong;
        outcome.snapshots_wrong |= pass.snapshots_wrong;
        outcome.lost |= pass.lost;
        outcome.overflow |= pass.overflow;
        let mut flags = Flags::new(&window);
        let compared = compare(&image, &pass, &mut flags, &mut stored, &mut findings).await?;
        outcome.rebuild |= compared.rebuild;
        outcome.refcounts_wrong |= compared.wrong;
        highest = highest.max(compared.highest);
        let before = findings.report.corruptions;
        image.check_copied(&flags, first, &mut stored, &mut findings).await?;
        outcome.copied_wrong += findings.report.corruptions - before;
    }
    outcome.report = findings.report;
    outcome.report.total_clusters = image.bounds.geometry.clusters(header.size);
    outcome.report.image_end_offset = (highest + 1) << image.bounds.geometry.cluster_bits;
    Ok(outcome)
}

/// The result of a comparison.
#[derive(Debug, Default)]
struct Compared {
    /// A reference has no block for its refcount.
    rebuild: bool,
    wrong: bool,
    highest: u64,
}

/// `1 reference`, `2 references`.
fn references(count: u64) -> String {
    if count == 1 { "1 reference".into() } else { format!("{count} references") }
}

/// Compares the refcounts of a window with what was counted.
async fn compare(
    image: &Image<'_>,
    pass: &Pass,
    flags: &mut Flags,
    stored: &mut Stored<'_>,
    findings: &mut Findings,
) -> Result<Compared, ImageError> {
    let geometry = image.bounds.geometry;
    let each = geometry.refcounts_per_block();
    let window = flags.window();
    let end = image.end(pass, &window);
    let mut compared = Compared::default();
    for number in window.start / each..end.div_ceil(each) {
        let block = stored.block(number).await?;
        for cluster in window.start.max(number * each)..end.min((number + 1) * each) {
            let counted = pass.counts.of(cluster)?;
            let kept = block.refcount(cluster, &geometry);
            flags.note(cluster, kept);
            let place = || format!("cluster at {:#x}", cluster << geometry.cluster_bits);
            let Some(kept) = kept else {
                compared.rebuild = true;
                findings.note(FindingKind::Error, 1, || (place(), "its refcount cannot be read".into()));
                continue;
            };
            if kept > 0 || counted > 0 {
                compared.highest = compared.highest.max(cluster);
            }
            if kept != counted {
                compared.wrong = true;
                compared.rebuild |= !block.is_in(image.bounds.file);
                let kind = if kept > counted { FindingKind::Leak } else { FindingKind::Corruption };
                findings.note(kind, 1, || (place(), format!("has {}, but a refcount of {kept}", references(counted))));
            }
        }
    }
    // What lies behind the last cluster has refcounts too, which entries that point there are compared with.
    for cluster in end..window.end {
        let kept = stored.get(cluster).await?;
        flags.note(cluster, kept);
    }
    Ok(compared)
}
