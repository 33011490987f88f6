//! Reading: clusters are looked up, and everything is read at once.

use std::sync::Arc;

use limosa_storage::IoVector;

use super::allocator::Allocator;
use super::context::Context;
use super::guest_data::GuestData;
use super::layers::part_of;
use super::lookup::{Extent, Kind};
use super::preallocated::Preallocated;
use super::seams;
use super::shared_future::all;
use super::tables::Tables;
use crate::disk::{BlockStatus, MapEntry};
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};

pub(super) struct Reader {
    context: Arc<Context>,
    allocator: Arc<Allocator>,
    tables: Arc<Tables>,
    guest_data: Arc<GuestData>,
    preallocated: Preallocated,
}

impl Reader {
    pub(super) const fn new(
        context: Arc<Context>,
        allocator: Arc<Allocator>,
        tables: Arc<Tables>,
        guest_data: Arc<GuestData>,
        preallocated: Preallocated,
    ) -> Self {
        Self { context, allocator, tables, guest_data, preallocated }
    }

    /// Reads `into.len()` bytes at `at`.
    pub(super) async fn read(&self, at: GuestOffset, into: IoVector) -> Result<(), ImageError> {
        loop {
            let zeroings = self.tables.zeroings();
            self.read_once(at, into.clone()).await?;
            // A cluster that was zeroed and kept may have been written again meanwhile, and those bytes must not be
            // seen before the table has them: otherwise a later read would see the zeros again.
            if self.tables.zeroings() == zeroings {
                return Ok(());
            }
        }
    }

    async fn read_once(&self, at: GuestOffset, into: IoVector) -> Result<(), ImageError> {
        let _in_use = self.allocator.enter();
        if into.is_empty() {
            return Ok(());
        }
        let end = at + into.len() as u64;
        let mut parts = Vec::new();
        let mut pos = at;
        while pos < end {
            let Extent { length, kind } = self.tables.extent(pos, end).await?;
            if pos == at && length == into.len() as u64 {
                return self.guest_data.read(pos, kind, into).await;
            }
            let part = part_of(&into, pos - at, length);
            match kind {
                Kind::Zero { .. } => part.clear(),
                Kind::Backing { .. } if self.context.backing().is_none() => part.clear(),
                _ => parts.push(self.guest_data.read(pos, kind, part)),
            }
            pos += length;
        }
        seams::parts_cover([at..pos], &(at..end))?;
        all(parts).await
    }

    /// Has `length` bytes at `at` fetched; see [`Disk::prefetch`](crate::disk::Disk::prefetch).
    pub(super) async fn prefetch(&self, at: GuestOffset, length: u64) -> Result<(), ImageError> {
        let _in_use = self.allocator.enter();
        let (end, mut pos, mut ranges) = (at + length, at, Vec::new());
        while pos < end {
            let Extent { length, kind } = self.tables.extent(pos, end).await?;
            match (kind, self.context.backing()) {
                (Kind::Own { host, .. }, _) => ranges.push(host.0..host.0.saturating_add(length)),
                (Kind::Compressed { host, packed }, _) => ranges.push(host.0..host.0.saturating_add(packed.into())),
                (Kind::Backing { .. }, Some(backing)) => backing.prefetch(pos, length).await?,
                (Kind::Backing { .. }, None) | (Kind::Zero { .. }, _) => {}
            }
            pos += length;
        }
        self.context.data().prefetch(&ranges);
        Ok(())
    }

    /// Returns where the bytes from `at` on come from; see [`Disk::map`](crate::disk::Disk::map).
    pub(super) async fn map(&self, at: GuestOffset, length: u64) -> Result<MapEntry, ImageError> {
        let _in_use = self.allocator.enter();
        let mapped = |length: u64, kind, host| MapEntry { length, kind, depth: 0, host };
        let end = at + length;
        let Extent { mut length, kind } = self.tables.extent(at, end).await?;
        let unchanged = !self.context.is_encrypted();
        let place = |host: HostOffset| unchanged.then(|| (Arc::clone(self.context.data().name()), host));
        Ok(match kind {
            Kind::Own { host, .. } => {
                let (length, kind) = self.preallocated.written(host, length).await?;
                mapped(length, kind, place(host))
            }
            Kind::Zero { host, .. } => mapped(length, BlockStatus::Zero, host.and_then(place)),
            Kind::Compressed { .. } => mapped(length, BlockStatus::Compressed, None),
            Kind::Backing { host, .. } => {
                let holds = self.guest_data.backing_holds(at);
                // A slice tells of a part only: what follows may be alike.
                while at + length < end {
                    match self.tables.extent(at + length, end).await? {
                        Extent { length: more, kind: Kind::Backing { host: next, .. } }
                            if holds > 0 || next == host.map(|host| host + length) =>
                        {
                            length += more;
                        }
                        _ => break,
                    }
                }
                match self.context.backing() {
                    None => mapped(length, BlockStatus::Unallocated, host.and_then(place)),
                    Some(backing) => match holds {
                        // QEMU counts it as this image's: the backing file ends before it.
                        0 => mapped(length, BlockStatus::Unallocated, host.and_then(place)),
                        holds => {
                            let below = backing.map(at, length.min(holds)).await?;
                            MapEntry { depth: below.depth + 1, ..below }
                        }
                    },
                }
            }
        })
    }
}
