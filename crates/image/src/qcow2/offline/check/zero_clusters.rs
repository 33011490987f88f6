//! Clusters whose entries say that they are zeros: version 2 does not have any.
//!
//! Law: the guest reads zeros there before, meanwhile and afterwards. The image has the dirty bit while refcounts of
//! new clusters are not yet those of its entries, so that the next open of an interrupted one rebuilds them.

use limosa_storage::{Storage, ZeroOptions};

use super::extend::extend;
use super::repair::repair;
use super::report::{CheckOptions, Repair};
use super::tables;
use super::walk::{Image, l2_entries};
use crate::error::ImageError;
use crate::qcow2::format::entry::{COMPRESSED, COPIED, OFFSET, ZERO};
use crate::qcow2::format::feature::Features;
use crate::qcow2::format::header::Header;

/// Whether an entry says that its cluster is zeros.
const fn is_zero(entry: u64) -> bool {
    entry & (COMPRESSED | ZERO) == ZERO
}

/// Returns whether an entry of the disk or of a snapshot says that its cluster is zeros.
pub(in crate::qcow2) async fn has_zero_clusters(
    storage: &dyn Storage,
    header: &Header,
    options: CheckOptions,
) -> Result<bool, ImageError> {
    let image = Image::open(storage, header, options).await?;
    let geometry = image.bounds.geometry;
    let mut batches = image.l2_batches();
    while let Some(batch) = batches.next().await? {
        for at in batch.into_keys().filter(|at| *at != 0) {
            let table = tables::bytes(storage, at, geometry.cluster_size()).await?;
            if l2_entries(&table, geometry.extended_l2).any(|(_, entry, _)| is_zero(entry)) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Gives clusters that are said to be zeros contents that are zeros, durably; without a backing file, none. Nothing is
/// wrong in the image; it has entries without subclusters, and is not encrypted.
pub(in crate::qcow2) async fn expand_zero_clusters(
    storage: &dyn Storage,
    header: &mut Header,
    options: CheckOptions,
) -> Result<(), ImageError> {
    header.features.incompatible |= Features::DIRTY;
    header.write_fields(storage).await?;
    storage.flush().await?;
    let before = header.clone();
    let image = Image::open(storage, &before, options).await?;
    let mut batches = image.l2_batches();
    while let Some(batch) = batches.next().await? {
        for (at, uses) in batch.into_iter().filter(|(at, _)| *at != 0) {
            expand_table(storage, header, at, uses.all).await?;
        }
    }
    repair(storage, Repair::Refcounts, options).await?;
    *header = Header::read(storage).await?;
    Ok(())
}

/// Expands the entries of the L2 table at `at`; `uses`: how many entries of L1 tables refer to it.
async fn expand_table(storage: &dyn Storage, header: &mut Header, at: u64, uses: u64) -> Result<(), ImageError> {
    let (bits, size) = (header.cluster_bits, header.geometry().cluster_size());
    let mut table = tables::bytes(storage, at, size).await?;
    let zeros: Vec<_> = l2_entries(&table, false)
        .filter(|(_, entry, _)| is_zero(*entry))
        .map(|(number, entry, _)| (number, entry))
        .collect();
    if zeros.is_empty() {
        return Ok(());
    }
    let has_backing = header.backing.is_some();
    // A cluster that is kept for the entry alone is its own; any other one may have other contents.
    let is_own = |entry: u64| entry & COPIED != 0 && entry & OFFSET != 0;
    let missing = zeros.iter().filter(|(_, entry)| has_backing && !is_own(*entry)).count() as u64;
    let mut next = 0;
    if missing > 0 {
        next = extend(storage, header, missing).await? << bits;
        storage.write_zeroes(next..next + (missing << bits), ZeroOptions::default()).await?;
    }
    for (number, entry) in zeros {
        let new = if is_own(entry) {
            let host = entry & OFFSET;
            storage.write_zeroes(host..host + size, ZeroOptions::default()).await?;
            entry & !ZERO
        } else if has_backing {
            let host = next;
            next += size;
            host | if uses == 1 { COPIED } else { 0 }
        } else {
            0
        };
        tables::set_number(&mut table, number, new)?;
    }
    storage.flush().await?;
    Ok(tables::put(storage, at, &table).await?)
}
