//! Writes of the guest's bytes: in place, or by a job that makes room for them.

use std::ops::Range;
use std::sync::Arc;

use futures_util::future::{BoxFuture, join, join_all};
use futures_util::{FutureExt, TryFutureExt};
use limosa_page::{broken_invariant, to_u64};
use limosa_storage::{IoVector, StripedArc};

use super::super::allocator::{Allocator, InUse};
use super::super::cancelled_writes::CancelledWrites;
use super::super::context::Context;
use super::super::counters::OperationKind;
use super::super::flusher::Flusher;
use super::super::guest_data::GuestData;
use super::super::layers::part_of;
use super::super::lookup::{Extent, Kind, Lookup, extent_in_cluster};
use super::super::owners::Owners;
use super::super::seams;
use super::super::shared_future::SharedFuture;
use super::super::tables::Tables;
use super::copy::{CopyJobs, CopyWork};
use super::in_flight::{InFlightAllocation, InFlightAllocations, Segment, State};
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};
use crate::qcow2::format::entry::L2Entry;

/// Writes the guest's bytes. Each stripe of threads has its own, whose references are counted beside it.
#[derive(Clone)]
#[repr(align(128))]
pub(super) struct Copier {
    context: Arc<Context>,
    allocator: Arc<Allocator>,
    tables: Arc<Tables>,
    flusher: Arc<Flusher>,
    guest_data: Arc<GuestData>,
    cancelled_writes: StripedArc<CancelledWrites>,
    in_flight: Arc<InFlightAllocations>,
    jobs: Arc<CopyJobs>,
}

/// The rest of a part, to be written once other jobs are done.
type Left = Option<Segment>;

/// The way in which the bytes from some offset on are written.
enum Claim {
    /// In the place that they have.
    InPlace { host: HostOffset, length: u64 },
    /// In the place that a job has allocated, which is not done yet.
    Along { host: HostOffset, length: u64, job: SharedFuture },
    /// By this job, which has them.
    Given { length: u64, job: SharedFuture },
    /// After this job, even if it fails.
    Wait { length: u64, job: SharedFuture },
    /// After this job has made room for them.
    After { length: u64, job: SharedFuture },
    /// First a slice has to be read.
    Load(HostOffset),
}

/// The need of some bytes that are written.
enum Needed {
    /// Nothing: they have their place.
    InPlace { host: HostOffset, length: u64 },
    /// A job.
    Allocation { range: Range<GuestOffset>, work: CopyWork },
}

/// The meaning of an entry for a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClusterState {
    /// There is no cluster.
    Unallocated,
    /// There is one, which nothing else refers to.
    Exclusive(HostOffset),
    /// There is one that something else refers to, too.
    Shared,
    /// There are compressed contents.
    Compressed,
}

impl ClusterState {
    const fn of(entry: L2Entry) -> Self {
        match entry {
            L2Entry::Standard { host: None, .. } => Self::Unallocated,
            L2Entry::Standard { host: Some(host), copied: true, .. } => Self::Exclusive(host),
            L2Entry::Standard { .. } => Self::Shared,
            L2Entry::Compressed { .. } => Self::Compressed,
        }
    }
}

impl Copier {
    /// The same for another stripe.
    pub(super) fn for_stripe(&self, owners: &Owners) -> Self {
        Self { cancelled_writes: StripedArc::new(Arc::clone(&owners.cancelled_writes)), ..self.clone() }
    }

    pub(super) fn new(owners: &Owners, in_flight: Arc<InFlightAllocations>) -> Self {
        let Owners { context, allocator, tables, flusher, guest_data, cancelled_writes, .. } = owners;
        Self {
            context: Arc::clone(context),
            allocator: Arc::clone(allocator),
            tables: Arc::clone(tables),
            flusher: Arc::clone(flusher),
            guest_data: Arc::clone(guest_data),
            cancelled_writes: StripedArc::new(Arc::clone(cancelled_writes)),
            in_flight,
            jobs: Arc::new(CopyJobs::new(owners)),
        }
    }

    /// Writes all of `from` at `at`. Borrows nothing: parts of it wait in shared futures.
    pub(super) async fn write(self: Arc<Self>, at: GuestOffset, from: IoVector) -> Result<(), ImageError> {
        self.allocator.begin_writing().await?;
        if from.is_empty() {
            // At the end of the disk there is nothing to look up.
            return Ok(());
        }
        let end = at + from.len() as u64;
        let in_use = self.allocator.enter();
        if let Lookup::Found(Extent { length, kind: Kind::Own { host, copied: true } }) = self.tables.look(at, end)?
            && length == from.len() as u64
        {
            return self.in_place(host, (at, from), in_use).await;
        }
        drop(in_use);
        // In rounds, not nested: what waits for others may have to do so as often as there are others.
        let mut left = vec![(at, from)];
        while !left.is_empty() {
            left = self.round(left).await?;
        }
        self.flusher.flush_if_pressed().await
    }

    /// Writes what can be written by now, and what has to be written after others are done is left.
    async fn round(self: &Arc<Self>, segments: Vec<Segment>) -> Result<Vec<Segment>, ImageError> {
        self.allocator.begin_writing().await?;
        let in_use = self.allocator.enter();
        let (mut parts, mut begun) = (Vec::new(), Ok(()));
        for (at, from) in &segments {
            begun = self.begin_parts(*at, from, &in_use, &mut parts).await;
            if begun.is_err() {
                break;
            }
        }
        drop(in_use);
        // Requests already started run to completion even if starting the rest fails.
        let left: Vec<Left> = join_all(parts).await.into_iter().collect::<Result<_, _>>()?;
        begun.map(|()| left.into_iter().flatten().collect())
    }

    async fn begin_parts(
        self: &Arc<Self>,
        at: GuestOffset,
        from: &IoVector,
        in_use: &InUse,
        parts: &mut Vec<BoxFuture<'static, Result<Left, ImageError>>>,
    ) -> Result<(), ImageError> {
        let end = at + from.len() as u64;
        let mut pos = at;
        while pos < end {
            let rest = part_of(from, pos - at, end - pos);
            pos += match self.claim(pos, end, &rest)? {
                Claim::Load(slice) => {
                    self.tables.load(slice).await?;
                    0
                }
                Claim::InPlace { host, length } => {
                    let write = self.in_place(host, (pos, part_of(&rest, 0, length)), in_use.again());
                    parts.push(write.map_ok(|()| None).boxed());
                    length
                }
                Claim::Along { host, length, job } => {
                    let write = self.in_place(host, (pos, part_of(&rest, 0, length)), in_use.again());
                    let both = join(write, job).map(|(written, linked)| written.and(linked).map(|()| None));
                    parts.push(both.boxed());
                    length
                }
                Claim::Given { length, job } => {
                    parts.push(job.map_ok(|()| None).boxed());
                    length
                }
                Claim::Wait { length, job } => {
                    let part = (pos, part_of(&rest, 0, length));
                    // Whether it failed or not: afterwards nothing has claimed the cluster.
                    parts.push(job.map(|_| Ok(Some(part))).boxed());
                    length
                }
                Claim::After { length, job } => {
                    let part = (pos, part_of(&rest, 0, length));
                    parts.push(job.map_ok(|()| Some(part)).boxed());
                    length
                }
            };
        }
        Ok(seams::parts_cover([at..pos], &(at..end))?)
    }

    /// One write to a place that the image has for itself.
    fn in_place(
        self: &Arc<Self>,
        host: HostOffset,
        (at, from): Segment,
        in_use: InUse,
    ) -> impl Future<Output = Result<(), ImageError>> + Send + 'static {
        let length = from.len() as u64;
        let overlap = self.allocator.overlap(&(host..host + length));
        // The request begins here, and not when this is polled first.
        let begun = match overlap {
            Some(overlap) => Err((overlap, Arc::clone(&self.allocator))),
            None => Ok(self
                .guest_data
                .write(OperationKind::DataWrite, host, from)
                .map(|request| CancelledWrites::in_place(&self.cancelled_writes, request, in_use, at..at + length))),
        };
        async move {
            match begun {
                Ok(request) => request?.await,
                Err((overlap, allocator)) => Err(allocator.contents_on(overlap, host).await),
            }
        }
    }

    /// Decides how the bytes from `pos` on are written, and begins it if that is for others to see.
    fn claim(self: &Arc<Self>, pos: GuestOffset, end: GuestOffset, bytes: &IoVector) -> Result<Claim, ImageError> {
        // Of this region only: until the claim is noted no other is made there.
        let mut jobs = self.in_flight.shard(pos);
        if let Some((job, future)) = jobs.at(pos) {
            return Ok(self.along(&job, future, &(pos..end), bytes));
        }
        let (range, work) = match self.tables.visit(pos, end, |entries| self.needed(pos, end, entries))? {
            Lookup::Load(slice) => return Ok(Claim::Load(slice)),
            Lookup::Found(Needed::InPlace { host, length }) => return Ok(Claim::InPlace { host, length }),
            Lookup::Found(Needed::Allocation { range, work }) => (range, work),
        };
        if let Some((job, future)) = jobs.overlapping(&range) {
            let until = job.range.start.align_down(self.context.geometry().cluster_size());
            if until <= pos {
                return Ok(Claim::Wait { length: range.end.min(end) - pos, job: future });
            }
            // Their handles go first: while there is one more, a request that is dropped does not see that its job is
            // left alone.
            drop((job, future));
            drop(jobs);
            return self.claim(pos, until.min(end), &part_of(bytes, 0, until.min(end) - pos));
        }
        let length = range.end.min(end) - pos;
        let fill = self.filled(&range, &(pos..pos + length), &work);
        let reserves = work == CopyWork::Reserve;
        let state = if reserves { State::Sealed } else { State::Gathering(vec![(pos, part_of(bytes, 0, length))]) };
        let job = InFlightAllocation::new(range, fill, state);
        let future = {
            let (copy, job) = (Arc::clone(&self.jobs), Arc::clone(&job));
            self.in_flight.start(&job.range.clone(), async move { copy.carry_out(&job, work).await })?
        };
        jobs.insert(job, future.clone())?;
        // Room that was only reserved is written in a second step.
        Ok(if reserves { Claim::After { length, job: future } } else { Claim::Given { length, job: future } })
    }

    /// How bytes that a job has claimed are written.
    fn along(
        &self,
        job: &InFlightAllocation,
        future: SharedFuture,
        wanted: &Range<GuestOffset>,
        bytes: &IoVector,
    ) -> Claim {
        let Range { start: pos, end } = *wanted;
        if job.fill.contains(&pos) {
            let length = end.min(job.fill.end) - pos;
            match &mut *job.state.lock() {
                State::Gathering(segments) => {
                    self.context.counters().joined();
                    segments.push((pos, part_of(bytes, 0, length)));
                    return Claim::Given { length, job: future };
                }
                State::Open { places, shared } => {
                    if let Some(place) = places.iter().find(|place| place.guest.contains(&pos)) {
                        self.context.counters().joined();
                        *shared = true;
                        let length = length.min(place.guest.end - pos);
                        return Claim::Along { host: place.host_of(pos), length, job: future };
                    }
                }
                State::Sealed => {}
            }
        }
        Claim::Wait { length: end.min(job.range.end) - pos, job: future }
    }

    /// The need of the bytes from `pos` on, by the entries of their clusters; no more of them are examined than
    /// necessary.
    fn needed(
        &self,
        pos: GuestOffset,
        end: GuestOffset,
        entries: &mut dyn Iterator<Item = Result<L2Entry, ImageError>>,
    ) -> Result<Needed, ImageError> {
        let geometry = self.context.geometry();
        let cluster = geometry.cluster_size();
        let first = entries.next().ok_or_else(|| broken_invariant("a slice has the entry that was looked for"))??;
        let Extent { mut length, kind } =
            extent_in_cluster(geometry, first, pos, pos.align_down(cluster).saturating_add(cluster).min(end));
        if let Kind::Own { host, copied: true } = kind {
            while pos + length < end && (pos + length).within(cluster) == 0 {
                let Some(entry) = entries.next().transpose()? else { break };
                let next = pos + length;
                match extent_in_cluster(geometry, entry, next, next.saturating_add(cluster).min(end)) {
                    Extent { length: more, kind: Kind::Own { host: there, copied: true } }
                        if there == host + length =>
                    {
                        length += more;
                    }
                    _ => break,
                }
            }
            return Ok(Needed::InPlace { host, length });
        }
        let goes_on = |entry: L2Entry, number: u64| match (ClusterState::of(first), ClusterState::of(entry)) {
            (ClusterState::Exclusive(host), next) => next == ClusterState::Exclusive(host + number * cluster),
            (_, ClusterState::Exclusive(_)) => false,
            (before, next) => !geometry.extended_l2 || before == next,
        };
        let mut alike = vec![first];
        for entry in entries {
            let entry = entry?;
            if !goes_on(entry, alike.len() as u64) {
                break;
            }
            alike.push(entry);
        }
        let (range, work) = self.extent_of(pos, end, first, alike);
        Ok(Needed::Allocation { range, work })
    }

    /// The claim and the work of a job that begins with the byte at `pos`. `entries` are of clusters that one job can
    /// cover, `first` is the first of them.
    fn extent_of(
        &self,
        pos: GuestOffset,
        end: GuestOffset,
        first: L2Entry,
        entries: Vec<L2Entry>,
    ) -> (Range<GuestOffset>, CopyWork) {
        let geometry = self.context.geometry();
        let cluster = geometry.cluster_size();
        let start = pos.align_down(cluster);
        if let ClusterState::Exclusive(host) = ClusterState::of(first) {
            let unit = geometry.subcluster_size();
            let begin = pos.align_down(unit);
            let mut until = begin;
            while until < end {
                let entry = usize::try_from((until - start) / cluster).ok().and_then(|index| entries.get(index));
                let Some(L2Entry::Standard { what, .. }) = entry else { break };
                let bit = if geometry.extended_l2 { 1 << ((until.0 / unit) & 31) } else { 1 };
                if what.allocated & bit != 0 {
                    break;
                }
                until += unit;
            }
            return (begin..until.max(begin + unit), CopyWork::InOwn { host: host + (begin - start), start, entries });
        }
        let range = start..start + (to_u64(entries.len()) << geometry.cluster_bits);
        if geometry.extended_l2 && ClusterState::of(first) == ClusterState::Unallocated {
            return (range, CopyWork::Reserve);
        }
        (range, CopyWork::New { start, entries })
    }

    /// The part of a job's range that will be right when it is done.
    fn filled(&self, range: &Range<GuestOffset>, data: &Range<GuestOffset>, work: &CopyWork) -> Range<GuestOffset> {
        let geometry = self.context.geometry();
        let unit = geometry.subcluster_size();
        match work {
            CopyWork::New { entries, .. }
                if geometry.extended_l2
                    && entries.first().is_some_and(|entry| ClusterState::of(*entry) == ClusterState::Shared) =>
            {
                data.start.align_down(unit)..data.end.align_up(unit).min(range.end)
            }
            CopyWork::Reserve => range.end..range.end,
            _ => range.clone(),
        }
    }
}
