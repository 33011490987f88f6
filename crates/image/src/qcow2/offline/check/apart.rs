//! Clusters that are an L2 table to one and something else to another: the table gets a copy.
//!
//! Law: a cluster that is repaired as a table is nothing but a table. A wrong L1 entry can lead into the guest's data,
//! and a repair there would change them; a wrong L2 entry can lead into a table. The two cases cannot be distinguished,
//! so both keep the contents that they see.

use std::collections::{BTreeMap, BTreeSet};

use limosa_storage::Storage;

use super::report::CheckOptions;
use super::report::Findings;
use super::tables;
use super::walk::{Image, What};
use crate::error::ImageError;
use crate::qcow2::format::entry::OFFSET;
use crate::qcow2::format::header::Header;

/// The most tables that are dealt with in one pass.
const MOST: usize = 4096;

/// L2 tables whose clusters are referred to by others than L1 entries, too: some of them, if there are many.
pub(super) async fn shared(
    storage: &dyn Storage,
    header: &Header,
    options: CheckOptions,
) -> Result<BTreeSet<u64>, ImageError> {
    let image = Image::open(storage, header, options).await?;
    let (size, bits) = (image.bounds.geometry.cluster_size(), image.bounds.geometry.cluster_bits);
    let mut found = BTreeSet::new();
    for window in image.windows() {
        let pass = image.count(&window, What { most: u64::MAX, ..What::ALL }, false, &mut Findings::new(0)).await?;
        let mut batches = image.l2_batches();
        while let Some(batch) = batches.next().await? {
            let shared = batch.into_iter().filter(|(at, uses)| {
                let others = pass.counts.get(at >> bits).is_some_and(|count| count > uses.all);
                *at != 0 && at & (size - 1) == 0 && others && !image.taken.contains(at >> bits)
            });
            found.extend(shared.take(MOST.saturating_sub(found.len())).map(|(at, _)| at));
        }
    }
    Ok(found)
}

/// Copies these tables to the end of the file. The copies' refcounts are repaired later, with all others.
///
/// Entries that lead behind the end of the file have been taken away before: they would lead to the copies.
pub(super) async fn apart(
    storage: &dyn Storage,
    header: &Header,
    options: CheckOptions,
    shared: &BTreeSet<u64>,
) -> Result<(), ImageError> {
    let image = Image::open(storage, header, options).await?;
    let (size, bits) = (image.bounds.geometry.cluster_size(), image.bounds.geometry.cluster_bits);
    // The last cluster may only be begun. A table that is lost behind the end must not be found there all of a sudden.
    let mut start = (image.clusters + 1) << bits;
    let mut areas = image.areas(What::ALL);
    areas.retain(|area| area.at.saturating_add(area.bytes) > image.bounds.file);
    areas.sort_unstable_by_key(|area| area.at);
    for area in areas {
        let end = area.at.saturating_add(area.bytes);
        if area.at < start + ((shared.len() as u64) << bits) && end > start {
            start = end.checked_next_multiple_of(size).unwrap_or(u64::MAX);
        }
    }
    let moved: BTreeMap<u64, u64> =
        shared.iter().zip(0_u64..).map(|(at, number)| (*at, start.saturating_add(number << bits))).collect();
    for (from, to) in &moved {
        tables::put(storage, *to, &tables::bytes(storage, *from, size).await?).await?;
    }
    storage.flush().await?;
    for run in image.l1_runs.iter().filter(|run| run.at >= size) {
        for (from, length) in tables::pieces(run.at, run.bytes, image.bounds.file) {
            let piece = tables::bytes(storage, from, length).await?;
            for (place, entry) in (from..).step_by(8).zip(tables::numbers(&piece)) {
                if let Some(to) = moved.get(&(entry & OFFSET)) {
                    // Whether it may be written in place is said when its refcount is known.
                    tables::put(storage, place, &to.to_be_bytes()).await?;
                }
            }
        }
    }
    Ok(storage.flush().await?)
}
