//! Putting right what is wrong with an image.
//!
//! Law: at every write an image is no worse than before, so a repair that is cut short is begun again. First entries
//! that cannot be are taken away, durably; then refcounts say what is left; then the flags say what the refcounts say.
//! Nothing is written into a cluster that something refers to, but the entry, the refcount or the header that is wrong.

use std::collections::BTreeSet;

use limosa_page::{BrokenInvariant, broken_invariant, invariant, to_usize};
use limosa_storage::Storage;

use super::apart::{apart, shared};
use super::copied::copied_fault;
use super::counts::Flags;
use super::examine::{self, Kind};
use super::report::Findings;
use super::report::{CheckOptions, CheckReport, Repair};
use super::stored::{Block, Stored};
use super::unshare::unshare;
use super::walk::{Image, What, l2_entries};
use super::{Outcome, examine_image, rebuild, tables};
use crate::error::ImageError;
use crate::luks::SectorCipher;
use crate::qcow2::format::entry::{COPIED, OFFSET};
use crate::qcow2::format::feature::Features;
use crate::qcow2::format::header::Header;
use crate::qcow2::format::refcount_array;

/// The most passes over an image. Each step can reveal faults that were hidden before.
const TURNS: usize = 12;

/// Checks a qcow2 image, repairs it, and says what is left: the figures are those of a check afterwards, and how many
/// leaks and corruptions there are less. The image is not used by anything else meanwhile.
///
/// An entry that points to where no cluster can be is taken away: the guest reads zeros there, as it does of what is
/// behind the end of a file (in version 2, what is below). Bitmaps whose tables are wrong are given up, and so is a
/// snapshot whose L1 table is not there.
///
/// # Errors
/// As of [`check`](super::check). What could not be repaired is no error: it is in the report.
/// [`ImageError::Unsupported`]: clusters have to be copied that are encrypted: [`repair_encrypted`].
pub async fn repair(storage: &dyn Storage, what: Repair, options: CheckOptions) -> Result<CheckReport, ImageError> {
    repair_with(storage, None, what, options).await
}

/// As [`repair`], of an image with encrypted contents: clusters that are copied are encrypted for their new place.
///
/// # Errors
/// As of [`check`](super::check).
pub async fn repair_encrypted(
    storage: &dyn Storage,
    cipher: &SectorCipher,
    what: Repair,
    options: CheckOptions,
) -> Result<CheckReport, ImageError> {
    repair_with(storage, Some(cipher), what, options).await
}

/// As [`repair`], with the cipher of the contents, if they are encrypted and it is known.
pub(crate) async fn repair_with(
    storage: &dyn Storage,
    cipher: Option<&SectorCipher>,
    what: Repair,
    options: CheckOptions,
) -> Result<CheckReport, ImageError> {
    let mut header = Header::read_to_examine(storage).await?;
    let before = examine_image(storage, &header, options).await?;
    let (leaked, corrupt) = (before.report.leaks, before.report.corruptions);
    let mut outcome = before;
    for _ in 0..TURNS {
        let autoclear = header.features.autoclear;
        let wrote = match what {
            Repair::Leaks => leaks(storage, &mut header, &outcome, options).await?,
            Repair::Refcounts if outcome.takes_away() => false,
            Repair::Refcounts | Repair::All => step(storage, cipher, &mut header, &outcome, (what, options)).await?,
        };
        // Where a table is said to lie over the header, the bits that a writer clears there are entries of it.
        if !wrote && header.features.autoclear == autoclear {
            break;
        }
        outcome = examine_image(storage, &header, options).await?;
    }
    let mut report = outcome.report;
    report.leaks_fixed = leaked.saturating_sub(report.leaks);
    report.corruptions_fixed = corrupt.saturating_sub(report.corruptions);
    if report.corruptions == 0 && report.check_errors == 0 && (header.features.dirty() || header.features.corrupt()) {
        storage.flush().await?;
        header.features.set_dirty(false);
        header.features.set_corrupt(false);
        header.write_fields(storage).await?;
        storage.flush().await?;
    }
    Ok(report)
}

/// Gives leaked clusters back, if it is certain that they are leaked; where that leaves nothing wrong but flags, puts
/// them right.
async fn leaks(
    storage: &dyn Storage,
    header: &mut Header,
    outcome: &Outcome,
    options: CheckOptions,
) -> Result<bool, ImageError> {
    let report = &outcome.report;
    let uncertain = outcome.rebuild || outcome.bitmaps_wrong || outcome.snapshots_wrong || outcome.lost;
    if report.leaks > 0 && !uncertain {
        header.prepare_autoclear(storage, true).await?;
        return refcounts(storage, header, options, Change::Lower).await;
    }
    let flags = outcome.copied_wrong > 0 && report.corruptions == outcome.copied_wrong;
    if !flags || report.leaks > 0 || report.check_errors > 0 {
        return Ok(false);
    }
    header.prepare_autoclear(storage, true).await?;
    copied(storage, header, options).await
}

/// Carries out the first repair that is needed; false if none is.
async fn step(
    storage: &dyn Storage,
    cipher: Option<&SectorCipher>,
    header: &mut Header,
    outcome: &Outcome,
    (what, options): (Repair, CheckOptions),
) -> Result<bool, ImageError> {
    if outcome.report.is_clean() {
        return Ok(false);
    }
    header.prepare_autoclear(storage, true).await?;
    if outcome.bitmaps_wrong && header.features.bitmaps() {
        header.features.autoclear &= !Features::BITMAPS;
        header.write_fields(storage).await?;
        storage.flush().await?;
        return Ok(true);
    }
    if outcome.entries_wrong && l1_entries(storage, header, options).await? {
        return Ok(true);
    }
    if outcome.snapshots_wrong && !outcome.lost {
        rebuild::rebuild(storage, header, options).await?;
        return Ok(true);
    }
    // Before anything is written into what may be no table.
    let shared = match outcome.report.corruptions {
        0 => BTreeSet::new(),
        _ => shared(storage, header, options).await?,
    };
    if outcome.entries_wrong && l2_entries_of(storage, header, options, &shared).await? {
        return Ok(true);
    }
    if !shared.is_empty() {
        if what != Repair::All {
            return Ok(false);
        }
        apart(storage, header, options, &shared).await?;
        return Ok(true);
    }
    if outcome.rebuild && !outcome.entries_wrong && !outcome.lost {
        rebuild::rebuild(storage, header, options).await?;
        return Ok(true);
    }
    // What a table refers to that is lost has no reference that can be found, and is not leaked.
    let change = if outcome.lost { Change::Raise } else { Change::Both };
    if outcome.refcounts_wrong && !outcome.rebuild && refcounts(storage, header, options, change).await? {
        return Ok(true);
    }
    let overflow = outcome.overflow && !outcome.rebuild && !outcome.entries_wrong;
    if overflow && unshare(storage, cipher, header, options).await? {
        return Ok(true);
    }
    // Flags that are still wrong stand in what is no L2 table, but something else.
    Ok(outcome.copied_wrong > 0
        && (copied(storage, header, options).await?
            || what == Repair::All
                && (l1_entries(storage, header, options).await?
                    || l2_entries_of(storage, header, options, &shared).await?)))
}

/// Changes in a piece of a table, which are written as one run from the first to the last of them.
struct Patch {
    at: u64,
    bytes: Vec<u8>,
    changed: Option<(usize, usize)>,
}

impl Patch {
    const fn new(at: u64, bytes: Vec<u8>) -> Self {
        Self { at, bytes, changed: None }
    }

    /// Changes what is `offset` bytes into the piece.
    fn set(&mut self, offset: usize, new: &[u8]) -> Result<(), BrokenInvariant> {
        let end = offset + new.len();
        let place = self.bytes.get_mut(offset..end).ok_or_else(|| broken_invariant("a change is within its piece"))?;
        if place != new {
            place.copy_from_slice(new);
            let (first, last) = self.changed.unwrap_or((offset, end));
            self.changed = Some((first.min(offset), last.max(end)));
        }
        Ok(())
    }

    /// Writes what changed. Never into the header's cluster, wherever a table is said to lie.
    async fn write(&self, image: &Image<'_>) -> Result<bool, ImageError> {
        let Some((first, last)) = self.changed else { return Ok(false) };
        let at = self.at + first as u64;
        let changed = self.bytes.get(first..last).ok_or_else(|| broken_invariant("a change is within its piece"))?;
        if at < image.bounds.geometry.cluster_size() || image.bounds.outside(at, changed.len() as u64) {
            return Ok(false);
        }
        tables::put(image.storage, at, changed).await?;
        Ok(true)
    }
}

/// Takes away what is wrong with entries of L1 tables, durably.
async fn l1_entries(storage: &dyn Storage, header: &Header, options: CheckOptions) -> Result<bool, ImageError> {
    let image = Image::open(storage, header, options).await?;
    let taken = &image.taken;
    let bits = image.bounds.geometry.cluster_bits;
    let mut wrote = false;
    for run in &image.l1_runs {
        for (from, length) in tables::pieces(run.at, run.bytes, image.bounds.file) {
            let piece = tables::bytes(storage, from, length).await?;
            let found: Vec<_> = tables::numbers(&piece).collect();
            let mut patch = Patch::new(from, piece);
            for (number, entry) in found.into_iter().enumerate() {
                let mut repaired = examine::l1(entry, &image.bounds).repaired.0;
                // What is written as an L2 table would be written over something else.
                if repaired & OFFSET != 0 && taken.contains((repaired & OFFSET) >> bits) {
                    repaired = 0;
                }
                patch.set(number * 8, &repaired.to_be_bytes())?;
            }
            wrote |= patch.write(&image).await?;
        }
    }
    storage.flush().await?;
    Ok(wrote)
}

/// Takes away what is wrong with entries of L2 tables, durably, but of these.
async fn l2_entries_of(
    storage: &dyn Storage,
    header: &Header,
    options: CheckOptions,
    but: &BTreeSet<u64>,
) -> Result<bool, ImageError> {
    let image = Image::open(storage, header, options).await?;
    let size = image.bounds.geometry.cluster_size();
    let mut wrote = false;
    let mut batches = image.l2_batches();
    while let Some(batch) = batches.next().await? {
        for at in batch.into_keys().filter(|at| !but.contains(at)) {
            let table = tables::bytes(storage, at, size).await?;
            let mut patch = Patch::new(at, table.clone());
            let extended = image.bounds.geometry.extended_l2;
            for (number, bits, bitmap) in l2_entries(&table, extended) {
                let examined = examine::l2(bits, bitmap, &image.bounds);
                if examined.faults().next().is_some() {
                    let (bits, bitmap) = (examined.repaired.0.to_be_bytes(), examined.repaired.1.to_be_bytes());
                    let repaired = if extended { [bits, bitmap].concat() } else { bits.to_vec() };
                    patch.set(number * repaired.len(), &repaired)?;
                }
            }
            wrote |= patch.write(&image).await?;
        }
    }
    storage.flush().await?;
    Ok(wrote)
}

/// The refcounts that are repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Those that are too high.
    Lower,
    /// Those that are too low.
    Raise,
    Both,
}

/// Has refcounts say how many references there are, in the blocks that there are.
pub(super) async fn refcounts(
    storage: &dyn Storage,
    header: &Header,
    options: CheckOptions,
    change: Change,
) -> Result<bool, ImageError> {
    let image = Image::open(storage, header, options).await?;
    let geometry = image.bounds.geometry;
    let each = geometry.refcounts_per_block();
    let mut stored = Stored::new(storage, header, image.bounds);
    let mut wrote = false;
    for window in image.windows() {
        let pass = image.count(&window, What::ALL, false, &mut Findings::new(0)).await?;
        let end = image.end(&pass, &window);
        for number in window.start / each..end.div_ceil(each) {
            let Block::Here(at, bytes) = stored.block(number).await? else { continue };
            let mut changed = bytes.clone();
            for cluster in window.start.max(number * each)..end.min((number + 1) * each) {
                let counted = pass.counts.of(cluster)?;
                let index = to_usize(cluster % each);
                let kept = refcount_array::get(&changed, geometry.refcount_order, index);
                let kept = kept.ok_or_else(|| broken_invariant("a refcount is within its block"))?;
                if kept > counted && change != Change::Raise || kept < counted && change != Change::Lower {
                    let set = refcount_array::set(&mut changed, geometry.refcount_order, index, counted);
                    invariant(set, "a count fits into its refcount")?;
                }
            }
            let mut patch = Patch::new(*at, bytes.clone());
            for (offset, new) in (0..).step_by(512).zip(changed.chunks(512)) {
                patch.set(offset, new)?;
            }
            wrote |= patch.write(&image).await?;
        }
    }
    storage.flush().await?;
    Ok(wrote)
}

/// Has the entries of the active state say which clusters may be written in place.
pub(super) async fn copied(storage: &dyn Storage, header: &Header, options: CheckOptions) -> Result<bool, ImageError> {
    let image = Image::open(storage, header, options).await?;
    let (geometry, extended) = (image.bounds.geometry, image.bounds.geometry.extended_l2);
    let taken = &image.taken;
    let mut stored = Stored::new(storage, header, image.bounds);
    let mut wrote = false;
    for window in image.windows() {
        let mut flags = Flags::new(&window);
        for cluster in window.clone() {
            let refcount = stored.get(cluster).await?;
            flags.note(cluster, refcount);
        }
        let mut batches = image.l2_batches();
        while let Some(batch) = batches.next().await? {
            let tables = batch.into_iter().filter(|(_, uses)| uses.active > 0);
            for (at, _) in tables.filter(|(at, _)| !taken.contains(at >> geometry.cluster_bits)) {
                let table = tables::bytes(storage, at, geometry.cluster_size()).await?;
                let mut patch = Patch::new(at, table.clone());
                for (number, bits, bitmap) in l2_entries(&table, extended) {
                    let Kind::Cluster(host) = examine::l2(bits, bitmap, &image.bounds).kind else { continue };
                    let one = image.is_one(host, &flags, window.start == 0, &mut stored).await?;
                    if copied_fault(bits, one).is_some() {
                        patch.set(number * if extended { 16 } else { 8 }, &(bits ^ COPIED).to_be_bytes())?;
                    }
                }
                wrote |= patch.write(&image).await?;
            }
        }
    }
    if let Some(l1) = image.l1.first() {
        for (from, length) in tables::pieces(l1.at, l1.bytes(), image.bounds.file) {
            let piece = tables::bytes(storage, from, length).await?;
            let found: Vec<_> = tables::numbers(&piece).collect();
            let mut patch = Patch::new(from, piece);
            for (number, bits) in found.into_iter().enumerate().filter(|(_, bits)| bits & OFFSET != 0) {
                let one = stored.get((bits & OFFSET) >> geometry.cluster_bits).await?.map(|refcount| refcount == 1);
                if copied_fault(bits, one).is_some() {
                    patch.set(number * 8, &(bits ^ COPIED).to_be_bytes())?;
                }
            }
            wrote |= patch.write(&image).await?;
        }
    }
    storage.flush().await?;
    Ok(wrote)
}
