//! Contents of new clusters that are shared with where they lie, in place of being read and written.
//!
//! Law: whether contents are cloned is decided by a pure plan, which leaves the same bytes as the one that copies them, and has no more
//! operations. A clone is over before anything is written to its place, and the table learns of the place behind both: for the order of
//! things it is a write. Two files that cannot share are not tried again, and the guest's write goes on with a copy.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use futures_util::future::join_all;
use limosa_storage::Storage;

use super::counters::Purpose;
use super::image::{CloneMode, CowMode, Inner};
use super::job::Place;
use super::locks::{Rank, RankedMutex};
use super::plan::{From, Plan, Step, Want};
use crate::disk::{Disk, MapKind};
use crate::offset::GuestOffset;

/// Contents that lie together: from guest offset `range.start` on, in the storage of this number, `delta` further on (wrapping).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) range: Range<u64>,
    /// Which contents: others have their own there.
    pub(super) from: From,
    pub(super) delta: u64,
    pub(super) storage: usize,
}

impl Source {
    fn holds(&self, from: From, range: &Range<u64>) -> bool {
        self.from == from && self.range.start <= range.start && range.end <= self.range.end
    }
}

impl Want {
    /// Whether it is worth it to find out where contents lie: a copy of them would be one of `least` bytes or more.
    pub(super) fn may_clone(&self, least: u64) -> bool {
        let copied: u64 = self.contents.iter().map(|part| part.range.end - part.range.start).sum();
        // Parts of blocks would be filled up by the storage with what it reads.
        let whole = (self.data.start | self.data.end) & (self.align - 1) == 0;
        self.mode == CowMode::Merged && whole && copied > 0 && copied >= least
    }

    /// The plan that clones all contents in whole blocks, and then writes the guest's bytes only; `None`: they do not lie so, something
    /// else would have to be written, or it would take more operations. Guest offset plus `to`, wrapping, is the new place.
    pub(super) fn plan_with(&self, sources: &[Source], block: u64, to: u64) -> Option<Plan> {
        let mut clones: Vec<Source> = Vec::new();
        for part in &self.contents {
            let range = whole_blocks(&part.range, block)?;
            if !self.is_data(&(range.start..part.range.start)) || !self.is_data(&(part.range.end..range.end)) {
                return None;
            }
            let source = sources.iter().find(|source| source.holds(part.from, &range))?;
            match clones.last_mut() {
                // What lies between is written over: to share it, too, costs nothing.
                Some(last)
                    if (last.from, last.storage, last.delta) == (source.from, source.storage, source.delta)
                        && self.is_data(&(last.range.end..range.start)) =>
                {
                    last.range.end = range.end;
                }
                _ => clones.push(Source { range, ..*source }),
            }
        }
        let copying = self.plan();
        let reads = copying.steps.iter().filter(|step| matches!(step, Step::Read(_))).count();
        let aligned = clones.iter().all(|clone| (clone.delta | to) & (block - 1) == 0);
        if clones.is_empty() || clones.len() > reads || !aligned || !(self.zeroed || self.is_filled(&clones)) {
            return None;
        }
        Some(Plan { clones, steps: vec![Step::Write(self.data.clone())], open: false })
    }

    fn is_data(&self, range: &Range<u64>) -> bool {
        range.start >= range.end || (self.data.start <= range.start && range.end <= self.data.end)
    }

    /// Whether the clones and the guest's bytes leave nothing to be filled.
    fn is_filled(&self, clones: &[Source]) -> bool {
        let mut filled: Vec<&Range<u64>> = clones.iter().map(|clone| &clone.range).collect();
        filled.push(&self.data);
        filled.sort_unstable_by_key(|range| range.start);
        let reached =
            filled.iter().fold(
                self.fill.start,
                |reached, range| {
                    if range.start <= reached { reached.max(range.end) } else { reached }
                },
            );
        reached >= self.fill.end
    }
}

/// The blocks that a range touches.
fn whole_blocks(range: &Range<u64>, block: u64) -> Option<Range<u64>> {
    Some(range.start & !(block - 1)..range.end.checked_next_multiple_of(block)?)
}

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

impl Inner {
    /// What is to be done for a new place. Clones, if there are any, are done already.
    pub(super) async fn planned(&self, place: &Place, want: &Want) -> Plan {
        match self.cloned(place, want).await {
            Some(plan) => plan,
            None => want.plan(),
        }
    }

    async fn cloned(&self, place: &Place, want: &Want) -> Option<Plan> {
        let CloneMode::From(least) = self.options.clone else { return None };
        if !want.may_clone(least) {
            return None;
        }
        let block = *self.sharing.block.get_or_init(|| self.data.clone_block().max(1));
        let (sources, storages) = self.sources(want, block).await?;
        let plan = want.plan_with(&sources, block, place.host.wrapping_sub(place.guest.start))?;
        let clones = plan.clones.iter().map(|clone| async {
            let storage = storages.get(clone.storage)?;
            let (at, length) = (clone.range.start, clone.range.end - clone.range.start);
            let to = place.host.wrapping_add(at.wrapping_sub(place.guest.start));
            match (*self.data).clone_from(to, storage, at.wrapping_add(clone.delta), length).await {
                Ok(true) => {
                    self.counters.add(Purpose::Clone, length);
                    Some(())
                }
                // Whatever the reason is: if the copy fails of it, too, that is told.
                Ok(false) | Err(_) => {
                    self.sharing.refuse(storage);
                    None
                }
            }
        });
        // All to their ends: what is left of those that succeeded is written over.
        let done: Option<Vec<()>> = join_all(clones).await.into_iter().collect();
        done.map(|_| plan)
    }

    /// Where the contents lie, as far as they are in files that may share with ours.
    async fn sources(&self, want: &Want, block: u64) -> Option<(Vec<Source>, Vec<Arc<dyn Storage>>)> {
        let (mut sources, mut storages): (Vec<Source>, Vec<Arc<dyn Storage>>) = (Vec::new(), Vec::new());
        let last = whole_blocks(&want.contents.last()?.range, block)?.end;
        for part in &want.contents {
            let range = whole_blocks(&part.range, block)?;
            if sources.iter().any(|source| source.holds(part.from, &range)) {
                continue;
            }
            let (storage, at, length) = match part.from {
                From::Host(delta) if !self.has_data_file => {
                    (Arc::clone(&self.data), range.start.wrapping_add(delta), range.end - range.start)
                }
                From::Backing => {
                    // In one that is written clusters go and are used anew.
                    let backing = self.backing.as_ref().filter(|backing| backing.is_read_only())?;
                    in_backing(&**backing, range.start, last.min(backing.len())).await?
                }
                From::Host(_) | From::Compressed(_) => return None,
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
            sources.push(Source { range: range.start..end, from: part.from, delta, storage: number });
        }
        Some((sources, storages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::plan::Part;

    const K: u64 = 1 << 10;
    const CLUSTER: Range<u64> = 2048 * K..3072 * K;
    /// Whence from a guest offset to the new place.
    const TO: u64 = 512 * K;

    /// A write to a cluster of 1 MiB that has contents all around.
    fn want(data: Range<u64>) -> Want {
        let sides = [CLUSTER.start..data.start, data.end..CLUSTER.end];
        let contents = sides.into_iter().filter(|side| !side.is_empty());
        let contents = contents.map(|range| Part { range, from: From::Backing }).collect();
        Want { fill: CLUSTER, data, contents, zeroed: false, align: 512, mode: CowMode::Merged }
    }

    /// All in one place.
    fn together() -> Vec<Source> {
        vec![Source { range: CLUSTER, from: From::Backing, delta: 64 * K, storage: 0 }]
    }

    fn clones(want: &Want, sources: &[Source]) -> Option<Vec<Range<u64>>> {
        let plan = want.plan_with(sources, 4 * K, TO)?;
        assert_eq!((plan.steps, plan.open), (vec![Step::Write(want.data.clone())], false));
        Some(plan.clones.into_iter().map(|clone| clone.range).collect())
    }

    fn one(range: Range<u64>) -> Option<Vec<Range<u64>>> {
        Some(std::iter::once(range).collect())
    }

    #[test]
    fn a_cluster_is_cloned_as_a_whole_and_the_guests_bytes_are_written_over_it() {
        // However long they are.
        for end in [2052, 2052 + 512] {
            assert_eq!(clones(&want(2048 * K + 4 * K..end * K + 4 * K), &together()), one(CLUSTER));
        }
        assert_eq!(clones(&want(2048 * K..2052 * K), &together()), one(2052 * K..CLUSTER.end));
    }

    #[test]
    fn blocks_are_filled_up_with_what_is_written_over_and_with_nothing_else() {
        let data = 2048 * K..2052 * K + 512;
        assert_eq!(clones(&want(data), &together()), one(2052 * K..CLUSTER.end));
        // The backing image ends within a block: what would come with it is not the guest's.
        let mut short = want(2048 * K..2052 * K);
        short.contents[0].range.end = 2500 * K + 512;
        short.zeroed = true;
        assert_eq!(clones(&short, &together()), None);
        short.contents[0].range.end = 2500 * K;
        assert_eq!(clones(&short, &together()), one(2052 * K..2500 * K));
    }

    #[test]
    fn zeros_beside_what_is_cloned_have_to_be_there_already() {
        let mut want = want(2048 * K..2052 * K);
        want.contents[0].range.end = 2500 * K;
        assert_eq!(clones(&want, &together()), None);
        want.zeroed = true;
        assert!(clones(&want, &together()).is_some());
    }

    #[test]
    fn what_lies_apart_is_cloned_apart_unless_it_takes_more_operations_than_a_copy() {
        let apart = |data: &Range<u64>, storage| {
            let head = Source { range: CLUSTER.start..data.start, ..together().remove(0) };
            [head, Source { range: data.end..CLUSTER.end, storage, ..together().remove(0) }]
        };
        let data = 2100 * K..2200 * K;
        let both = Some(vec![CLUSTER.start..data.start, data.end..CLUSTER.end]);
        assert_eq!(clones(&want(data.clone()), &apart(&data, 1)), both);
        // In one file, and in their order: one.
        assert_eq!(clones(&want(data.clone()), &apart(&data, 0)), one(CLUSTER));
        // Of a part of it nobody knows where it lies.
        assert_eq!(clones(&want(data.clone()), &apart(&data, 0)[..1]), None);
        // Head and tail are one read if little lies between them.
        let data = 2100 * K..2104 * K;
        assert_eq!(clones(&want(data.clone()), &apart(&data, 1)), None);
    }

    #[test]
    fn contents_are_cloned_from_where_they_are_and_not_from_what_lies_below_them() {
        let mut want = want(2100 * K..2200 * K);
        let host = From::Host(8 * K);
        want.contents[1].from = host;
        // The backing image has something behind the head, too, which is not seen there.
        assert_eq!(clones(&want, &together()), None);
        let own = Source { range: 2200 * K..CLUSTER.end, from: host, delta: 8 * K, storage: 0 };
        let both = vec![CLUSTER.start..2100 * K, 2200 * K..CLUSTER.end];
        assert_eq!(clones(&want, &[together(), vec![own]].concat()), Some(both));
    }

    #[test]
    fn what_is_not_in_whole_blocks_on_both_sides_is_copied() {
        let data = 2048 * K..2052 * K;
        let odd = vec![Source { delta: 64 * K + 512, ..together().remove(0) }];
        assert_eq!(clones(&want(data.clone()), &odd), None);
        assert_eq!(want(data.clone()).plan_with(&together(), 4 * K, TO + 512), None);
        assert!(want(data).plan_with(&together(), 512, TO + 512).is_some());
    }

    #[test]
    fn little_is_copied_and_so_is_all_with_split_and_what_is_not_whole_sectors() {
        let usual = want(2048 * K..2052 * K);
        assert!(usual.may_clone(1020 * K) && !usual.may_clone(1021 * K));
        assert!(!Want { mode: CowMode::Split, ..usual.clone() }.may_clone(0));
        assert!(!Want { align: 8 * K, ..usual.clone() }.may_clone(0));
        assert!(!Want { contents: Vec::new(), ..usual }.may_clone(0));
    }
}
