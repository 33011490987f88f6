//! Clusters that more entries refer to than their refcounts can say: each entry too many gets a copy.
//!
//! Law: a copy has a refcount, and is durable, before the entry refers to it. What the guest reads does not change:
//! contents that are encrypted are encrypted for the copy's place.

use std::collections::BTreeMap;
use std::sync::Arc;

use limosa_storage::Storage;

use super::examine::{self, Kind};
use super::extend::extend;
use super::report::CheckOptions;
use super::report::Findings;
use super::tables;
use super::walk::{Image, What, l2_entries};
use crate::error::ImageError;
use crate::luks::{SECTOR, SectorCipher};
use crate::qcow2::format::entry::{COMPRESSED, COPIED, OFFSET};
use crate::qcow2::format::header::{Encryption, Header};

/// The most clusters that are dealt with in one pass.
const MOST: usize = 4096;

/// Gives copies to entries of clusters with too many references: whether there were any.
pub(super) async fn unshare(
    storage: &dyn Storage,
    cipher: Option<&SectorCipher>,
    header: &mut Header,
    options: CheckOptions,
) -> Result<bool, ImageError> {
    let before = header.clone();
    let image = Image::open(storage, &before, options).await?;
    let geometry = image.bounds.geometry;
    let (bits, size) = (geometry.cluster_bits, geometry.cluster_size());
    let taken = &image.taken;
    // How many references each of them can keep.
    let mut room = BTreeMap::new();
    for window in image.windows() {
        let what = What { most: u64::MAX, ..What::ALL };
        let pass = image.count(&window, what, false, &mut Findings::new(0)).await?;
        let many = |cluster: &u64| pass.counts.get(*cluster).is_some_and(|count| count > geometry.refcount_max());
        for cluster in window.clone().filter(many).take(MOST.saturating_sub(room.len())) {
            let kept = if taken.contains(cluster) { 0 } else { geometry.refcount_max() };
            room.insert(cluster, kept);
        }
    }
    let mut keep = |at: u64, bytes: u64, times: u64| {
        let clusters = at >> bits..=(at + bytes - 1) >> bits;
        let fits = clusters.clone().all(|cluster| room.get(&cluster).is_none_or(|room| *room >= times));
        if fits {
            clusters.for_each(|cluster| {
                room.entry(cluster).and_modify(|room| *room -= times);
            });
        }
        fits
    };
    let mut wrote = false;
    for run in image.l1_runs.iter().filter(|run| run.at >= size) {
        for (from, length) in tables::pieces(run.at, run.bytes, image.bounds.file) {
            let piece = tables::bytes(storage, from, length).await?;
            for (place, entry) in (from..).step_by(8).zip(tables::numbers(&piece)) {
                let at = entry & OFFSET;
                if at == 0 || image.bounds.outside(at, size) || keep(at, size, run.times) {
                    continue;
                }
                let copy = copied(storage, None, header, at, size).await?;
                let flag = if run.times == 1 { COPIED } else { 0 };
                tables::put(storage, place, &(copy | flag).to_be_bytes()).await?;
                wrote = true;
            }
        }
    }
    if wrote {
        storage.flush().await?;
        return Ok(true);
    }
    let mut batches = image.l2_batches();
    while let Some(batch) = batches.next().await? {
        for (at, uses) in batch.into_iter().filter(|(at, _)| *at != 0) {
            let table = tables::bytes(storage, at, size).await?;
            for (number, entry, bitmap) in l2_entries(&table, geometry.extended_l2) {
                let examined = examine::l2(entry, bitmap, &image.bounds);
                let Some((host, bytes)) = examined.refers else { continue };
                if image.bounds.outside(host, bytes) || keep(host, bytes, uses.all) {
                    continue;
                }
                let cipher = cipher_of(storage, cipher, &before, examined.kind)?;
                let copy = copied(storage, cipher, header, host, bytes).await?;
                let new = match examined.kind {
                    Kind::Compressed => {
                        let mask = (1 << (62 - (bits - 8))) - 1;
                        entry & !mask | COMPRESSED | copy & mask
                    }
                    _ => entry & !(OFFSET | COPIED) | copy | if uses.all == 1 { COPIED } else { 0 },
                };
                let width = geometry.l2_entry_size();
                tables::put(storage, at + number as u64 * width, &new.to_be_bytes()).await?;
                wrote = true;
            }
        }
    }
    storage.flush().await?;
    Ok(wrote)
}

/// The cipher of a cluster's bytes; `None`: they can be copied as they are.
fn cipher_of<'a>(
    storage: &dyn Storage,
    cipher: Option<&'a SectorCipher>,
    header: &Header,
    kind: Kind,
) -> Result<Option<&'a SectorCipher>, ImageError> {
    // Compressed clusters are never encrypted, and those of the old encryption are the same at every place of the file.
    if header.encryption != Encryption::Luks || kind == Kind::Compressed {
        return Ok(None);
    }
    let what = || "encrypted clusters have to be copied, which needs the passphrase".to_owned();
    let missing = || ImageError::Unsupported { image: Arc::clone(storage.name()), what: what() };
    cipher.map(Some).ok_or_else(missing)
}

/// A durable copy of some bytes in new clusters: where the bytes begin there. With a cipher they are encrypted for
/// their new place.
async fn copied(
    storage: &dyn Storage,
    cipher: Option<&SectorCipher>,
    header: &mut Header,
    at: u64,
    bytes: u64,
) -> Result<u64, ImageError> {
    let geometry = header.geometry();
    let inside = at & (geometry.cluster_size() - 1);
    let clusters = geometry.clusters(inside + bytes);
    let first = extend(storage, header, clusters).await?;
    let mut contents = tables::bytes(storage, at - inside, clusters << geometry.cluster_bits).await?;
    if let Some(cipher) = cipher {
        let sector = |at: u64| at / SECTOR as u64;
        cipher.decrypt(sector(at - inside), &mut contents);
        cipher.encrypt(sector(first << geometry.cluster_bits), &mut contents);
    }
    tables::put(storage, first << geometry.cluster_bits, &contents).await?;
    storage.flush().await?;
    Ok((first << geometry.cluster_bits) + inside)
}
