//! Clusters that were preallocated when the image was created, and never written.
//!
//! The tables count them as contents (`preallocation=metadata`); that they are zeros, only the file below knows. To ask
//! it costs a call for every run of clusters, so it is asked where it can say something: in files that take up much
//! less than the clusters that the refcounts count. So does QEMU, whose map says the same.

use std::sync::Arc;

use async_lock::OnceCell;
use limosa_page::to_usize;

use super::context::Context;
use super::header_owner::HeaderOwner;
use crate::disk::BlockStatus;
use crate::error::ImageError;
use crate::holes::{inside, taken};
use crate::offset::HostOffset;
use crate::qcow2::format::header::Header;
use crate::qcow2::format::refcount_array;

/// Bytes of refcounts that are read at once.
const PIECE: u64 = 64 << 10;
/// Bits of an entry of the refcount table that say where the block lies.
const BLOCK: u64 = !511;

/// How many clusters have to be in use for a file that takes up `taken` of them to be called sparse; `None`: it has not
/// as many.
fn needed(taken: u64, all: u64) -> Option<u64> {
    let needed = taken.saturating_add((taken / 9).max(2));
    (needed <= all).then_some(needed)
}

pub(super) struct Preallocated {
    context: Arc<Context>,
    header: Arc<HeaderOwner>,
    /// Whether clusters that count as contents may be holes in the file, once known.
    known: OnceCell<bool>,
}

impl Preallocated {
    pub(super) const fn new(context: Arc<Context>, header: Arc<HeaderOwner>) -> Self {
        Self { context, header, known: OnceCell::new() }
    }

    /// Returns how many of `length` bytes of contents at `host` are alike: contents, or holes of the file. There are no
    /// holes past the end of the file: a read there fails, since contents are lost.
    pub(super) async fn written(&self, host: HostOffset, length: u64) -> Result<(u64, BlockStatus), ImageError> {
        if !*self.known.get_or_init(|| self.is_preallocated()).await {
            return Ok((length, BlockStatus::Data));
        }
        let run = self.context.data().first_run(host.0..host.0.saturating_add(length))?;
        if !run.is_zero {
            return Ok((run.length, BlockStatus::Data));
        }
        Ok(match inside(&**self.context.data(), host.0, run.length, self.context.geometry().cluster_size())? {
            0 => (length, BlockStatus::Data),
            alike => (alike, BlockStatus::Preallocated),
        })
    }

    /// Whether the file takes up much less than the clusters that are in use. Of refcounts that cannot be read: no.
    async fn is_preallocated(&self) -> bool {
        let Some((taken, length)) = taken(&**self.context.file()).zip(self.context.file().length().ok()) else {
            return false;
        };
        let geometry = self.context.geometry();
        let (taken, all) = (geometry.clusters(taken), geometry.clusters(length));
        let header = self.header.now();
        match needed(taken, all) {
            Some(needed) => self.counts_to(needed, all, &header).await.unwrap_or(false),
            None => false,
        }
    }

    /// Whether at least `needed` of the first `all` clusters are in use.
    async fn counts_to(&self, needed: u64, all: u64, header: &Header) -> Result<bool, ImageError> {
        let per_block = self.context.geometry().refcounts_per_block();
        let (mut found, mut block) = (0, 0);
        let table = all.div_ceil(per_block).min(header.refcount_table_bytes() / 8) * 8;
        for at in (0..table).step_by(to_usize(PIECE)) {
            let entries = self.context.read_file(header.refcount_table.0 + at, PIECE.min(table - at)).await?;
            for entry in entries.as_chunks().0 {
                let place = HostOffset(u64::from_be_bytes(*entry) & BLOCK);
                let clusters = per_block.min(all - block * per_block);
                if place.0 != 0 {
                    found += self.count_block(place, clusters, needed - found).await?;
                }
                if found >= needed {
                    return Ok(true);
                }
                block += 1;
            }
        }
        Ok(false)
    }

    /// Returns how many of the first clusters of a refcount block are in use; counting stops at `needed`.
    async fn count_block(&self, place: HostOffset, clusters: u64, needed: u64) -> Result<u64, ImageError> {
        let order = self.context.geometry().refcount_order;
        let bytes = (clusters << order).div_ceil(8);
        let (mut found, mut left) = (0, clusters);
        for at in (0..bytes).step_by(to_usize(PIECE)) {
            let refcounts = self.context.read_file(place.saturating_add(at), PIECE.min(bytes - at)).await?;
            let here = left.min((PIECE * 8) >> order);
            let counts = (0..to_usize(here)).map(|index| refcount_array::get(&refcounts, order, index));
            found += counts.filter(|count| count.is_some_and(|count| count > 0)).count() as u64;
            left -= here;
            if found >= needed {
                break;
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_sparse_if_a_tenth_of_what_is_counted_is_missing_and_two_clusters() {
        assert_eq!([0, 9, 90].map(|taken| needed(taken, 100)), [Some(2), Some(11), Some(100)]);
        assert_eq!([91, 98, 100, u64::MAX].map(|taken| needed(taken, 100)), [None; 4]);
    }
}
