//! Clusters whose entries say that they are zeros: version 2 does not have any.

use limosa_storage::Storage;

use super::report::CheckOptions;
use super::tables;
use super::walk::{Image, l2_entries};
use crate::error::ImageError;
use crate::qcow2::format::entry::{COMPRESSED, ZERO};
use crate::qcow2::format::header::Header;

/// Returns whether an entry of the disk or of a snapshot says that its cluster is zeros.
pub(in crate::qcow2) async fn has_zero_clusters(
    storage: &dyn Storage,
    header: &Header,
    options: CheckOptions,
) -> Result<bool, ImageError> {
    let image = Image::open(storage, header, options).await?;
    let geometry = image.bounds.geometry;
    let mut after = None;
    loop {
        let batch = image.l2_tables(after).await?;
        let Some(last) = batch.keys().next_back().copied() else { return Ok(false) };
        after = Some(last);
        for at in batch.into_keys().filter(|at| *at != 0) {
            let table = tables::bytes(storage, at, geometry.cluster_size()).await?;
            if l2_entries(&table, geometry.extended_l2).any(|(_, entry, _)| entry & (COMPRESSED | ZERO) == ZERO) {
                return Ok(true);
            }
        }
    }
}
