//! Contents of new clusters that are shared with where they lie, in place of being read and written.
//!
//! Law: where contents lie is found out first; whether they are cloned is then decided by a pure plan, which leaves the same bytes as the
//! one that copies them, and has no more operations. A clone is over before anything is written to its place, and the table learns of the place behind both: for the order of
//! things it is a write. Two files that cannot share are not tried again, and the guest's write goes on with a copy.

use std::sync::{Arc, OnceLock};

use futures_util::future::join_all;
use limosa_storage::Storage;

use super::counters::Purpose;
use super::image::{CloneMode, Inner};
use super::jobs::Place;
use super::locks::{Rank, RankedMutex};
use super::plan::{Origin, Plan, Source, Want, whole_blocks};
use crate::disk::{Disk, MapKind};
use crate::offset::GuestOffset;

/// Where the contents from `at` on lie, and how many of them together, up to `end`.
async fn in_backing(backing: &dyn Disk, at: u64, end: u64) -> Option<(Arc<dyn Storage>, u64, u64)> {
    let (mut length, mut place) = (0, None);
    while at + length < end {
        let found = backing.map(GuestOffset(at + length), end - at - length).await.ok()?;
        let host = found.host.filter(|_| found.kind == MapKind::Data).map(|(_, host)| host.0);
        let Some(host) = host.filter(|_| found.length > 0) else { break };
        match place {
            None => place = Some((found.depth, host)),
            Some((depth, first)) if depth == found.depth && host.checked_sub(length) == Some(first) => {}
            Some(_) => break,
        }
        length += found.length;
    }
    let (depth, host) = place?;
    Some((backing.storage(depth)?, host, length.min(end - at)))
}

/// What is known of who can share with the data storage.
#[derive(Debug)]
pub(super) struct Sharing {
    /// What clones are aligned to, once it was asked.
    block: OnceLock<u64>,
    /// Those that cannot.
    refused: RankedMutex<Vec<Arc<dyn Storage>>>,
}

impl Default for Sharing {
    fn default() -> Self {
        Self { block: OnceLock::new(), refused: Rank::Refused.mutex(Vec::new()) }
    }
}

impl Sharing {
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

/// Where contents lie that may be shared.
pub(super) struct Shareable {
    sources: Vec<Source>,
    storages: Vec<Arc<dyn Storage>>,
    /// What clones are aligned to.
    block: u64,
}

impl Shareable {
    /// The plan that clones what is wanted to a new place, if there is one.
    pub(super) fn plan(&self, place: &Place, want: &Want) -> Option<Plan> {
        want.cloning(&self.sources, self.block, place.host.wrapping_sub(place.guest.start))
    }
}

impl Inner {
    /// Where the contents lie, as far as they are in files that may share with ours; `None`: they are copied.
    pub(super) async fn shareable(&self, want: &Want) -> Option<Shareable> {
        let CloneMode::From(least) = self.options.clone else { return None };
        if !want.may_clone(least) {
            return None;
        }
        let block = *self.sharing.block.get_or_init(|| self.data.clone_block().max(1));
        let (mut sources, mut storages): (Vec<Source>, Vec<Arc<dyn Storage>>) = (Vec::new(), Vec::new());
        let last = whole_blocks(&want.contents.last()?.range, block)?.end;
        for part in &want.contents {
            let range = whole_blocks(&part.range, block)?;
            if sources.iter().any(|source| source.holds(part.origin, &range)) {
                continue;
            }
            let (storage, at, length) = match part.origin {
                Origin::Host(delta) if !self.has_data_file => {
                    (Arc::clone(&self.data), range.start.wrapping_add(delta), range.end - range.start)
                }
                Origin::Backing => {
                    // In one that is written clusters go and are used anew.
                    let backing = self.backing.as_ref().filter(|backing| backing.is_read_only())?;
                    in_backing(&**backing, range.start, last.min(backing.len())).await?
                }
                Origin::Host(_) | Origin::Compressed(_) => return None,
            };
            if self.sharing.is_refused(&storage) {
                return None;
            }
            let length = length.min(storage.length().ok()?.checked_sub(at)?);
            let number = storages.iter().position(|known| is_same(known, &storage)).unwrap_or(storages.len());
            if number == storages.len() {
                storages.push(storage);
            }
            let end = range.start.checked_add(length)?;
            let delta = at.wrapping_sub(range.start);
            sources.push(Source { range: range.start..end, origin: part.origin, delta, storage: number });
        }
        Some(Shareable { sources, storages, block })
    }

    /// Carries out the clones of a plan, all to their ends: what is left of those that succeeded, if one did not, is written over.
    pub(super) async fn share(&self, place: &Place, plan: &Plan, known: &Shareable) -> bool {
        let clones = plan.clones.iter().map(|clone| async {
            let Some(storage) = known.storages.get(clone.storage) else { return false };
            let (at, length) = (clone.range.start, clone.range.end - clone.range.start);
            let to = place.host.wrapping_add(at.wrapping_sub(place.guest.start));
            match (*self.data).clone_range(to, storage, at.wrapping_add(clone.delta), length).await {
                Ok(true) => {
                    self.counters.add(Purpose::Clone, length);
                    true
                }
                // Whatever the reason is: if the copy fails of it, too, that is told.
                Ok(false) | Err(_) => {
                    self.sharing.refuse(storage);
                    false
                }
            }
        });
        join_all(clones).await.into_iter().all(|done| done)
    }
}
