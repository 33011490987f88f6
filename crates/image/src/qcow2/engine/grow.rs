//! A disk that becomes longer while it is in use.
//!
//! Law: the header's size changes last, durably, when everything that it needs is there: a cut leaves the old size or
//! the new one. Added bytes read as zeros, even if the old last cluster or the backing image has contents there.
//! Requests continue meanwhile; only flushes wait while the L1 table is moved. Growths are one at a time: bytes that
//! the first one adds are the guest's when the second begins.

use std::sync::Arc;

use futures_util::FutureExt;

use super::allocator::Allocator;
use super::context::Context;
use super::dirty_bitmaps::DirtyBitmaps;
use super::flusher::Flusher;
use super::header_owner::HeaderOwner;
use super::locks::Rank;
use super::owners::Owners;
use super::shared_future::Serial;
use super::tables::Tables;
use super::writer::{Writer, Zeroing};
use crate::error::ImageError;
use crate::offset::GuestOffset;
use crate::qcow2::format::header::{Header, L1_MOST};

/// Why a disk cannot become so long, if it cannot: for people.
pub(in crate::qcow2) fn fault(header: &Header, size: u64) -> Option<String> {
    let geometry = header.geometry();
    if !size.is_multiple_of(512) {
        return Some(format!("a size of {size} bytes, which is no multiple of 512"));
    }
    if header.version < 3 && header.snapshots.1 > 0 {
        return Some("it has snapshots and is of version 2, which does not say how large they are".into());
    }
    (geometry.l1_entries(size) > u64::from(L1_MOST) || i64::try_from(size).is_err())
        .then(|| format!("a disk of {size} bytes is too large for clusters of {} bytes", geometry.cluster_size()))
}

pub(super) struct Grower {
    header: Arc<HeaderOwner>,
    context: Arc<Context>,
    allocator: Arc<Allocator>,
    tables: Arc<Tables>,
    flusher: Arc<Flusher>,
    bitmaps: Arc<DirtyBitmaps>,
    writer: Arc<Writer>,
    growths: Serial,
}

impl Grower {
    pub(super) fn new(owners: &Owners, bitmaps: Arc<DirtyBitmaps>, writer: Arc<Writer>) -> Self {
        let Owners { context, header, allocator, tables, flusher, .. } = owners;
        Self {
            header: Arc::clone(header),
            context: Arc::clone(context),
            allocator: Arc::clone(allocator),
            tables: Arc::clone(tables),
            flusher: Arc::clone(flusher),
            bitmaps,
            writer,
            growths: Serial::new(Rank::Growing),
        }
    }

    /// Cancels all growths in flight.
    pub(super) fn clear(&self) {
        self.growths.clear();
    }

    /// Makes the disk `size` bytes long, after those growths that were begun before.
    pub(super) async fn grow(self: &Arc<Self>, size: u64) -> Result<(), ImageError> {
        let grower = Arc::clone(self);
        let growth = self.growths.run(async move { grower.grow_now(size).await }.boxed());
        let _unfinished = self.writer.finish_if_cancelled(&growth);
        growth.await
    }

    async fn grow_now(&self, size: u64) -> Result<(), ImageError> {
        let (context, old) = (&self.context, self.header.size());
        let what = if size < old {
            Some(format!("it has {old} bytes; while it is in use it does not become shorter"))
        } else if context.has_raw_data_file() {
            Some("its contents lie in a raw data file: it is resized when it is not in use".into())
        } else {
            fault(&self.header.now(), size)
        };
        if let Some(what) = what {
            return Err(context.unsupported(what));
        }
        if size == old {
            return Ok(());
        }
        self.allocator.begin_writing().await?;
        self.lengthen_l1(size).await?;
        context.lengthen_data_file(size).await?;
        self.zero_tail(old, size).await?;
        self.flusher.flush().await?;
        let (header, bitmaps) = (Arc::clone(&self.header), Arc::clone(&self.bitmaps));
        let work = async move {
            bitmaps.grow(size).await?;
            header.set_size(size).await
        };
        self.header.exclusively(work.boxed()).await
    }

    /// Zeroes contents that were never written and would be visible in a disk of `size` bytes: the rest of the old last
    /// cluster, and the backing image's contents past the old end. Nothing is flushed.
    pub(super) async fn zero_tail(&self, old: u64, size: u64) -> Result<(), ImageError> {
        let own = old.next_multiple_of(self.context.geometry().cluster_size()).min(size);
        let below = self.context.backing().map_or(0, |backing| backing.len()).min(size);
        if own > old {
            self.writer.write_zeros(GuestOffset(old)..GuestOffset(own)).await?;
        }
        if below <= own {
            return Ok(());
        }
        if self.context.rules().version > 2 {
            return self.writer.zero(GuestOffset(own), below - own, Zeroing::Unmap).await;
        }
        // Version 2 has no zero clusters.
        self.writer.write_zeros(GuestOffset(own)..GuestOffset(below)).await
    }

    /// Makes the L1 table as long as a disk of `size` bytes needs. No flush is under way meanwhile: it would write to
    /// where the table was. What differs in memory is written to the new place by the next flush.
    async fn lengthen_l1(&self, size: u64) -> Result<(), ImageError> {
        let entries = self.context.geometry().l1_entries(size);
        let enough = move |tables: &Tables| tables.l1_place().1 as u64 >= entries;
        if enough(&self.tables) {
            return Ok(());
        }
        let (allocator, tables) = (Arc::clone(&self.allocator), Arc::clone(&self.tables));
        let work = async move {
            if enough(&tables) {
                return Ok(());
            }
            let (at, count) = tables.l1_place();
            let old = at..at + count as u64 * 8;
            let new = allocator.move_l1(old.clone(), entries).await?;
            tables.l1_moved(new, entries)?;
            allocator.give_up_l1(old).await
        };
        self.flusher.flush_and(work.boxed()).await
    }
}
