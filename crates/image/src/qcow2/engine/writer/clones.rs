//! Contents of new clusters that are shared with where they lie, in place of being read and written.
//!
//! Law: the places of contents are looked up first. A pure plan then decides whether they are cloned; a clone leaves
//! the same bytes as the one that copies them, and has no more operations. A clone is over before anything is written
//! to its place, and the table learns of the place after both: in the order of writes it is a write. Two files that
//! cannot share are not tried again; the write then copies.

use std::sync::{Arc, OnceLock};

use futures_util::future::join_all;
use limosa_storage::Storage;

use super::super::context::Context;
use super::super::counters::OperationKind;
use super::super::locks::{Rank, RankedMutex};
use super::super::options::ReflinkMode;
use super::in_flight::NewPlace;
use super::plan::{Origin, Plan, Source, Want, whole_blocks};
use crate::disk::{BlockStatus, Disk};
use crate::offset::{GuestOffset, HostOffset, Shift, length};

/// The place of the contents from `at` on, and how many of them are contiguous, up to `end`.
async fn in_backing(
    backing: &dyn Disk,
    at: GuestOffset,
    end: GuestOffset,
) -> Option<(Arc<dyn Storage>, HostOffset, u64)> {
    let (mut length, mut place): (u64, Option<(u32, HostOffset)>) = (0, None);
    while at + length < end {
        let found = backing.map(at + length, end - at - length).await.ok()?;
        let host = found.host.filter(|_| found.kind == BlockStatus::Data).map(|(_, host)| host);
        let Some(host) = host.filter(|_| found.length > 0) else { break };
        match place {
            None => place = Some((found.depth, host)),
            Some((depth, first)) if depth == found.depth && first.checked_add(length) == Some(host) => {}
            Some(_) => break,
        }
        length += found.length;
    }
    let (depth, host) = place?;
    Some((backing.storage(depth)?, host, length.min(end - at)))
}

/// Shares contents with the data storage, where it can.
pub(super) struct Sharing {
    context: Arc<Context>,
    /// Alignment of clones, once known.
    block: OnceLock<u64>,
    /// Storages that cannot.
    refused: RankedMutex<Vec<Arc<dyn Storage>>>,
}

impl Sharing {
    pub(super) const fn new(context: Arc<Context>) -> Self {
        Self { context, block: OnceLock::new(), refused: Rank::Refused.mutex(Vec::new()) }
    }

    fn is_refused(&self, storage: &Arc<dyn Storage>) -> bool {
        self.refused.lock().iter().any(|refused| is_same(refused, storage))
    }

    fn refuse(&self, storage: &Arc<dyn Storage>) {
        let mut refused = self.refused.lock();
        if !refused.iter().any(|refused| is_same(refused, storage)) {
            refused.push(Arc::clone(storage));
        }
    }
}

fn is_same(one: &Arc<dyn Storage>, other: &Arc<dyn Storage>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
}

/// Places of contents that may be shared.
pub(super) struct Shareable {
    sources: Vec<Source>,
    storages: Vec<Arc<dyn Storage>>,
    /// Alignment of clones.
    block: u64,
}

impl Shareable {
    /// The plan for a new place: to clone what is wanted if that can be, to copy it otherwise.
    pub(super) fn plan(&self, place: &NewPlace, want: &Want) -> Plan {
        want.cloning(&self.sources, self.block, place.shift()).unwrap_or_else(|| want.copying())
    }
}

impl Sharing {
    /// Finds contents in files that may share with ours; `None`: they are copied.
    pub(super) async fn shareable(&self, want: &Want) -> Option<Shareable> {
        let ReflinkMode::AtLeast(least) = self.context.options().reflink_mode else { return None };
        // The same bytes at another place would be decrypted to something else.
        if self.context.is_encrypted() || !want.may_clone(least) {
            return None;
        }
        let block = *self.block.get_or_init(|| self.context.data().clone_alignment().max(1));
        let (mut sources, mut storages): (Vec<Source>, Vec<Arc<dyn Storage>>) = (Vec::new(), Vec::new());
        let last = whole_blocks(&want.contents.last()?.range, block)?.end;
        for part in &want.contents {
            let range = whole_blocks(&part.range, block)?;
            if sources.iter().any(|source| source.holds(part.origin, &range)) {
                continue;
            }
            let (storage, at, found) = match part.origin {
                Origin::Host(shift) if !self.context.has_data_file() => {
                    (Arc::clone(self.context.data()), shift.host(range.start), length(&range))
                }
                Origin::Backing => {
                    // Clusters of an image that is written may be reused.
                    let backing = self.context.backing().filter(|backing| backing.is_read_only())?;
                    in_backing(&**backing, range.start, last.min(GuestOffset(backing.len()))).await?
                }
                Origin::Host(_) | Origin::Compressed(_) => return None,
            };
            if self.is_refused(&storage) {
                return None;
            }
            let found = found.min(storage.length().ok()?.checked_sub(at.0)?);
            let number = storages.iter().position(|known| is_same(known, &storage)).unwrap_or(storages.len());
            if number == storages.len() {
                storages.push(storage);
            }
            let end = range.start.checked_add(found)?;
            let shift = Shift::between(range.start, at);
            sources.push(Source { range: range.start..end, origin: part.origin, shift, storage: number });
        }
        Some(Shareable { sources, storages, block })
    }

    /// Carries out the clones of a plan, all to their ends: what is left of those that succeeded, if one did not, is
    /// written over.
    pub(super) async fn share(&self, place: &NewPlace, plan: &Plan, known: &Shareable) -> bool {
        let clones = plan.clones.iter().map(|clone| async {
            let Some(storage) = known.storages.get(clone.storage) else { return false };
            let (at, length) = (clone.range.start, length(&clone.range));
            let (from, to) = (clone.shift.host(at), place.host_of(at));
            match (**self.context.data()).clone_range(to.0, storage, from.0, length).await {
                Ok(true) => {
                    self.context.counters().add(OperationKind::Clone, length);
                    true
                }
                // For any reason: if the copy fails for the same one, the request fails.
                Ok(false) | Err(_) => {
                    self.refuse(storage);
                    false
                }
            }
        });
        join_all(clones).await.into_iter().all(|done| done)
    }
}
