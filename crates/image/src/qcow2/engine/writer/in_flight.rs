//! In-flight allocations, "jobs" for short: requests that change where bytes are, one for any cluster at a time.
//!
//! Law: the entries of claimed clusters are changed by the job that claimed them, and by nothing else. A request that
//! wants them waits for that job, and drives it; or has its bytes written along.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use futures_util::FutureExt;
use limosa_page::{BrokenInvariant, to_usize};
use limosa_storage::IoVector;
use parking_lot::MutexGuard;

use super::super::locks::{Rank, RankedGuard, RankedMutex};
use super::super::seams;
use super::super::shared_future::SharedFuture;
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset, Shift};
use crate::qcow2::format::geometry::Geometry;

/// The guest's bytes, and their offset on the disk.
pub(super) type Segment = (GuestOffset, IoVector);

/// A job: a part of the disk that is claimed until its bytes have their place.
#[derive(Debug)]
pub(super) struct InFlightAllocation {
    /// Whole clusters or subclusters.
    pub(super) range: Range<GuestOffset>,
    /// The part of it that will be right when the job is done: others may write along there.
    pub(super) fill: Range<GuestOffset>,
    pub(super) state: RankedMutex<State>,
}

#[derive(Debug)]
pub(super) enum State {
    /// Nothing is written yet: these bytes will be, and more may be added.
    Gathering(Vec<Segment>),
    /// Nothing but guests' bytes is written, and here is where; `shared`: others have begun to, along with the job.
    Open { places: Vec<NewPlace>, shared: bool },
    /// All others wait.
    Sealed,
}

/// The new place of a part of a job's range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NewPlace {
    pub(super) guest: Range<GuestOffset>,
    /// In the data storage.
    pub(super) host: HostOffset,
    /// The storage proves that it reads as zeros.
    pub(super) zeroed: bool,
}

impl NewPlace {
    /// The new place of a byte of the range; for a byte before it, the place that it would have if there were room.
    pub(super) const fn host_of(&self, at: GuestOffset) -> HostOffset {
        self.shift().host(at)
    }

    pub(super) const fn shift(&self) -> Shift {
        Shift::between(self.guest.start, self.host)
    }
}

impl InFlightAllocation {
    pub(super) fn new(range: Range<GuestOffset>, fill: Range<GuestOffset>, state: State) -> Arc<Self> {
        Arc::new(Self { range, fill, state: Rank::InFlightAllocation.mutex(state) })
    }

    /// The bytes that were gathered; from now on it is in another state.
    pub(super) fn gathered(&self, next: State) -> Vec<Segment> {
        match std::mem::replace(&mut *self.state.lock(), next) {
            State::Gathering(segments) => segments,
            State::Open { .. } | State::Sealed => Vec::new(),
        }
    }
}

/// All jobs under way, in shards.
///
/// A job claims clusters whose L2 entries are in one slice, so the bytes that such entries are about are a region, and
/// all jobs of a region are in one shard. A request that wants to change entries holds the shard of their region from
/// the look at them until its claim is noted: jobs that are under way may change entries of that region meanwhile, but
/// they release their claims only under the same lock, so clusters whose old entries were seen are still found to be
/// claimed.
#[derive(Debug)]
pub(super) struct InFlightAllocations {
    shards: [RankedMutex<Shard>; SHARDS],
    /// Bytes of a cluster or subcluster.
    unit: u64,
    /// The logarithm of a region's bytes.
    region_bits: u32,
}

/// Few requests at a time meet in one shard.
const SHARDS: usize = 16;

/// The jobs of some regions, by where they begin. They do not overlap.
#[derive(Debug, Default)]
pub(super) struct Shard {
    map: BTreeMap<GuestOffset, (Arc<InFlightAllocation>, SharedFuture)>,
}

impl InFlightAllocations {
    /// `region`: bytes of the disk whose L2 entries are in one slice, a power of two.
    pub(super) fn new(geometry: Geometry, region: u64) -> Self {
        let shards = std::array::from_fn(|_| Rank::InFlight.mutex(Shard::default()));
        Self { shards, unit: geometry.subcluster_size(), region_bits: region.trailing_zeros() }
    }

    /// Returns the future of a job that claims `range`: it carries out `work` and then releases the claim.
    pub(super) fn start(
        self: &Arc<Self>,
        range: &Range<GuestOffset>,
        work: impl Future<Output = Result<(), ImageError>> + Send + 'static,
    ) -> Result<SharedFuture, BrokenInvariant> {
        seams::claim_is_whole(range, self.unit)?;
        seams::claim_is_of_one_region(self.is_of_one_region(range))?;
        let (jobs, start) = (Arc::clone(self), range.start);
        let job = async move {
            let done = work.await;
            let entry = jobs.shard(start).remove(start);
            // After the lock: the last handle of a job may drop what takes other locks.
            drop(entry);
            done
        };
        Ok(job.boxed().shared())
    }

    fn number(region: u64) -> usize {
        to_usize(region % SHARDS as u64)
    }

    /// The jobs of a byte's region.
    pub(super) fn shard(&self, at: GuestOffset) -> RankedGuard<MutexGuard<'_, Shard>> {
        let [first, ..] = &self.shards;
        self.shards.get(Self::number(at.0 >> self.region_bits)).unwrap_or(first).lock()
    }

    /// Whether all of a range is of one region, as a claim has to be.
    fn is_of_one_region(&self, range: &Range<GuestOffset>) -> bool {
        range.start.0 >> self.region_bits == range.end.0.saturating_sub(1) >> self.region_bits
    }

    /// Whether any job has claimed a part of a range, which may be of several regions.
    pub(super) fn claims(&self, range: &Range<GuestOffset>) -> bool {
        let regions = range.start.0 >> self.region_bits..=range.end.0.saturating_sub(1) >> self.region_bits;
        if range.is_empty() {
            return false;
        }
        // After this many regions all shards were examined.
        regions
            .take(SHARDS)
            .any(|region| self.shard(GuestOffset(region << self.region_bits)).overlapping(range).is_some())
    }

    /// All jobs in flight.
    pub(super) fn all(&self) -> Vec<SharedFuture> {
        let all = |shard: &RankedMutex<Shard>| shard.lock().futures().cloned().collect::<Vec<_>>();
        self.shards.iter().flat_map(all).collect()
    }

    /// The ranges that jobs in flight have claimed.
    pub(super) fn ranges(&self) -> Vec<Range<GuestOffset>> {
        let ranges = |shard: &RankedMutex<Shard>| shard.lock().ranges().collect::<Vec<_>>();
        self.shards.iter().flat_map(ranges).collect()
    }

    /// Jobs that nothing waits for: the only handle is the list's.
    pub(super) fn alone(&self) -> Vec<SharedFuture> {
        let alone = |shard: &RankedMutex<Shard>| {
            let shard = shard.lock();
            shard.futures().filter(|future| future.strong_count().is_some_and(|count| count <= 1)).cloned().collect()
        };
        self.shards.iter().flat_map(|shard| -> Vec<SharedFuture> { alone(shard) }).collect()
    }

    /// Cancels all jobs.
    pub(super) fn clear(&self) {
        for shard in &self.shards {
            drop(shard.take());
        }
    }
}

impl Shard {
    /// The job that has claimed this byte.
    pub(super) fn at(&self, at: GuestOffset) -> Option<(Arc<InFlightAllocation>, SharedFuture)> {
        self.overlapping(&(at..at.saturating_add(1)))
    }

    /// The first job that has claimed a part of a range.
    pub(super) fn overlapping(&self, range: &Range<GuestOffset>) -> Option<(Arc<InFlightAllocation>, SharedFuture)> {
        let before = self.map.range(..=range.start).next_back().map(|(_, entry)| entry);
        let entry = before.filter(|(job, _)| job.range.end > range.start);
        entry.or_else(|| self.map.range(range.start..range.end).next().map(|(_, entry)| entry)).cloned()
    }

    /// Notes a claim, which touches no other and is of one region.
    pub(super) fn insert(&mut self, job: Arc<InFlightAllocation>, future: SharedFuture) -> Result<(), BrokenInvariant> {
        seams::claimed_once(self.overlapping(&job.range).is_some())?;
        self.map.insert(job.range.start, (job, future));
        Ok(())
    }

    pub(super) fn remove(&mut self, start: GuestOffset) -> Option<(Arc<InFlightAllocation>, SharedFuture)> {
        self.map.remove(&start)
    }

    fn ranges(&self) -> impl Iterator<Item = Range<GuestOffset>> {
        self.map.values().map(|(job, _)| job.range.clone())
    }

    fn futures(&self) -> impl Iterator<Item = &SharedFuture> {
        self.map.values().map(|(_, future)| future)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { cluster_bits: 9, refcount_order: 4, extended_l2: false };

    fn range(range: Range<u64>) -> Range<GuestOffset> {
        GuestOffset(range.start)..GuestOffset(range.end)
    }

    fn claimed(jobs: &InFlightAllocations, claim: Range<u64>) -> SharedFuture {
        let future: SharedFuture = std::future::pending().boxed().shared();
        let job = InFlightAllocation::new(range(claim.clone()), range(claim), State::Sealed);
        jobs.shard(job.range.start).insert(job, future.clone()).unwrap();
        future
    }

    #[test]
    fn a_claim_is_found_by_what_touches_it_and_from_other_regions_too() {
        const REGION: u64 = 1 << 20;
        let jobs = InFlightAllocations::new(GEOMETRY, REGION);
        // The last region of a round of shards, and the first of the next one.
        let last = (SHARDS as u64 - 1) * REGION;
        let next = last + REGION;
        let _futures = [claimed(&jobs, last + 4096..last + 8192), claimed(&jobs, next..next + 512)];
        let at = |at| jobs.shard(GuestOffset(last)).at(GuestOffset(at)).is_some();
        assert!(at(last + 8191) && !at(last + 8192));
        let claims = |claim| jobs.claims(&range(claim));
        assert!(claims(last + 8191..last + 9000) && !claims(last + 8192..next));
        assert!(claims(0..u64::MAX) && claims(last + 8192..next + 1));
        assert!(!claims(last + 5000..last + 5000) && !claims(0..4096));
        drop(jobs.shard(GuestOffset(last)).remove(GuestOffset(last + 4096)));
        assert!(!claims(0..next));
    }

    #[test]
    fn a_job_is_alone_when_nothing_else_has_a_handle_of_it() {
        let jobs = InFlightAllocations::new(GEOMETRY, 1 << 20);
        let (first, _second) = (claimed(&jobs, 0..512), claimed(&jobs, 1 << 30..(1 << 30) + 512));
        assert!(jobs.alone().is_empty());
        drop(first);
        assert_eq!((jobs.alone().len(), jobs.all().len()), (1, 2));
        jobs.clear();
        assert!(jobs.all().is_empty());
    }
}
