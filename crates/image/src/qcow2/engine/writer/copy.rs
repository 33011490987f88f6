//! Carrying out a job that writes: room is found, contents are read, everything is written, the tables say so.
//!
//! Law: entries are changed when what they lead to has been written, never before. What fails on the way leaves them as
//! they were.

use std::ops::Range;
use std::sync::Arc;

use futures_util::future::join_all;
use limosa_page::{BrokenInvariant, broken_invariant, to_usize};
use limosa_storage::{Buffer, IoVector};

use super::super::allocator::{Allocator, zero_parts};
use super::super::context::Context;
use super::super::counters::OperationKind;
use super::super::guest_data::GuestData;
use super::super::layers::{Layers, part_of};
use super::super::owners::Owners;
use super::super::pool::Run;
use super::super::seams;
use super::super::shared_future::all;
use super::super::tables::Tables;
use super::clones::Sharing;
use super::in_flight::{InFlightAllocation, NewPlace, Segment, State};
use super::plan::{Origin, Part, Plan, Want};
use crate::disk::BlockStatus;
use crate::error::ImageError;
use crate::offset::{ClusterCount, GuestOffset, HostOffset, Shift, length};
use crate::qcow2::format::entry::{L2Entry, Subclusters};

/// Carries out jobs that write.
pub(super) struct CopyJobs {
    context: Arc<Context>,
    allocator: Arc<Allocator>,
    tables: Arc<Tables>,
    guest_data: Arc<GuestData>,
    sharing: Sharing,
}

/// The work of a job that writes. `entries` are of the clusters from guest offset `start` on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CopyWork {
    /// Makes room: clusters without contents, whose subclusters are written afterwards.
    Reserve,
    /// Writes to new clusters, and leaves the old ones.
    New { start: GuestOffset, entries: Vec<L2Entry> },
    /// Writes clusters or subclusters that the image has for itself, and that mean nothing so far: from this offset on.
    InOwn { host: HostOffset, start: GuestOffset, entries: Vec<L2Entry> },
}

/// The former entries of a job's clusters, from the one of `start` on.
#[derive(Clone, Copy)]
struct Old<'a> {
    start: GuestOffset,
    entries: &'a [L2Entry],
    cluster_bits: u32,
}

/// A part of a cluster.
struct Units {
    range: Range<GuestOffset>,
    /// The place of the cluster, if it has one.
    shift: Option<Shift>,
    /// The state of its subclusters.
    what: Subclusters,
}

impl Old<'_> {
    /// The entry of the cluster that begins at `cluster`.
    fn entry(&self, cluster: GuestOffset) -> Result<L2Entry, BrokenInvariant> {
        let index = to_usize((cluster - self.start) >> self.cluster_bits);
        // Taken for one without contents, they would be lost.
        self.entries.get(index).copied().ok_or_else(|| broken_invariant("a job has the former entries of its clusters"))
    }
}

impl CopyJobs {
    pub(super) fn new(owners: &Owners) -> Self {
        let Owners { context, allocator, tables, guest_data, .. } = owners;
        Self {
            context: Arc::clone(context),
            allocator: Arc::clone(allocator),
            tables: Arc::clone(tables),
            guest_data: Arc::clone(guest_data),
            sharing: Sharing::new(Arc::clone(context)),
        }
    }

    pub(super) async fn carry_out(&self, job: &InFlightAllocation, work: CopyWork) -> Result<(), ImageError> {
        // The table comes first: without it nothing else is of use.
        self.tables.prepare(job.range.start).await?;
        let (start, entries) = match &work {
            CopyWork::Reserve => return self.reserve(job).await,
            CopyWork::New { start, entries } | CopyWork::InOwn { start, entries, .. } => (*start, &entries[..]),
        };
        let old = Old { start, entries, cluster_bits: self.context.geometry().cluster_bits };
        let (places, runs) = match &work {
            CopyWork::InOwn { host, .. } => {
                self.allocator.admit_contents(&(*host..host.saturating_add(length(&job.range)))).await?;
                (vec![NewPlace { guest: job.range.clone(), host: *host, zeroed: false }], Vec::new())
            }
            _ => self.new_places(&job.range).await?,
        };
        seams::parts_cover(places.iter().map(|place| place.guest.clone()), &job.range)?;
        let new = matches!(work, CopyWork::New { .. });
        let linked = match self.fill(job, old, &places).await {
            Ok(()) => self.link(job, start, &places, new).await,
            Err(error) => Err(error),
        };
        if linked.is_err() {
            let state = std::mem::replace(&mut *job.state.lock(), State::Sealed);
            if matches!(state, State::Open { shared: true, .. }) {
                // Others may still be writing there: the clusters are not handed out before they are done.
                self.allocator.drop_runs(runs);
            } else {
                self.allocator.put_back(runs);
            }
        }
        self.allocator.drop_entries(linked?).await
    }

    /// Clusters for a range, which is of whole ones.
    async fn new_places(&self, range: &Range<GuestOffset>) -> Result<(Vec<NewPlace>, Vec<Run>), ImageError> {
        if self.context.has_data_file() {
            let host = range.start.in_data_file();
            let wanted = host..host + length(range);
            let zeros = zero_parts(&self.context, &wanted);
            let zeroed = zeros.iter().any(|zero| zero.start <= wanted.start && wanted.end <= zero.end);
            return Ok((vec![NewPlace { guest: range.clone(), host, zeroed }], Vec::new()));
        }
        let bits = self.context.geometry().cluster_bits;
        let runs = self.allocator.allocate(ClusterCount(length(range) >> bits)).await?;
        let mut guest = range.start;
        let place = |run: &Run| {
            let range = guest..guest + run.count.bytes(bits);
            guest = range.end;
            NewPlace { guest: range, host: run.first.begin(bits), zeroed: run.zeroed }
        };
        Ok((runs.iter().map(place).collect(), runs))
    }

    /// Writes the job's fill, and the other contents of its clusters, to the new places.
    async fn fill(&self, job: &InFlightAllocation, old: Old<'_>, places: &[NewPlace]) -> Result<(), ImageError> {
        let data = match &*job.state.lock() {
            State::Gathering(gathered) => union(gathered),
            State::Open { .. } | State::Sealed => GuestOffset(0)..GuestOffset(0),
        };
        let contents = self.contents_around(job, old, &data).await?;
        let mut plans: Vec<(&NewPlace, Plan)> = Vec::with_capacity(places.len());
        for place in places {
            let want = self.want(job, place, &data, &contents);
            // Where the contents lie is asked first; the plan is a function of the answer.
            let known = self.sharing.shareable(&want).await;
            let mut plan = known.as_ref().map_or_else(|| want.copying(), |known| known.plan(place, &want));
            if let Some(known) = known.filter(|_| !plan.clones.is_empty())
                && !self.sharing.share(place, &plan, &known).await
            {
                plan = want.copying();
            }
            plans.push((place, plan));
        }
        if plans.iter().all(|(_, plan)| plan.open) {
            return self.write_open(job, places).await;
        }
        let mut layers = Layers::default();
        let reads = plans.iter().flat_map(|(_, plan)| &plan.reads).map(|part| self.read_part(part, old));
        for read in join_all(reads).await {
            let (at, buffer) = read?;
            layers.put(at, buffer.into());
        }
        let segments = job.gathered(State::Sealed);
        for (at, bytes) in &segments {
            layers.put(*at, bytes.clone());
        }
        all(plans.iter().flat_map(|(place, plan)| self.writes(place, plan, &segments, &layers)).collect()).await
    }

    /// The parts of the job's fill, of the guest's bytes and of the contents that belong to one new place.
    fn want(&self, job: &InFlightAllocation, place: &NewPlace, data: &Range<GuestOffset>, contents: &[Part]) -> Want {
        let clip = |range: &Range<GuestOffset>| range.start.max(place.guest.start)..range.end.min(place.guest.end);
        let within =
            |part: &Part| Some(Part { range: clip(&part.range), ..*part }).filter(|part| !part.range.is_empty());
        Want {
            fill: clip(&job.fill),
            data: clip(data),
            contents: contents.iter().filter_map(within).collect(),
            zeroed: place.zeroed,
            align: u64::from(self.context.data().alignment().offset.max(1)),
        }
    }

    /// Writes nothing but the guest's bytes: those that come now are written along.
    async fn write_open(&self, job: &InFlightAllocation, places: &[NewPlace]) -> Result<(), ImageError> {
        let segments = job.gathered(State::Open { places: places.to_vec(), shared: false });
        let writes = places.iter().flat_map(|place| {
            segments.iter().filter_map(|(at, bytes)| {
                let (from, to) = ((*at).max(place.guest.start), (*at + bytes.len() as u64).min(place.guest.end));
                (from < to).then(|| self.write_to(place, from, part_of(bytes, from - *at, to - from), true))
            })
        });
        all(writes.collect()).await
    }

    /// The writes of a plan, after its reads.
    fn writes<'a>(
        &'a self,
        place: &'a NewPlace,
        plan: &Plan,
        segments: &[Segment],
        layers: &Layers,
    ) -> Vec<impl Future<Output = Result<(), ImageError>> + use<'a>> {
        let zeros = self.context.zeros();
        if !plan.clones.is_empty() {
            // What is between the guests' bytes is there.
            let runs = runs_of(segments, &place.guest).into_iter();
            return runs.map(|run| self.write_to(place, run.start, layers.run(&run, zeros), true)).collect();
        }
        // Others may have added bytes outside of what was planned.
        let begins = segments.iter().map(|(at, _)| (*at).max(place.guest.start));
        let from = begins.min().unwrap_or(plan.write.start).min(plan.write.start);
        let ends = segments.iter().map(|(at, bytes)| (*at + bytes.len() as u64).min(place.guest.end));
        let to = ends.max().unwrap_or(plan.write.end).max(plan.write.end);
        let whole = union(segments);
        let only_data = whole.start <= from && to <= whole.end;
        vec![self.write_to(place, from, layers.run(&(from..to), zeros), only_data)]
    }

    /// Writes bytes of a guest offset to their new place.
    async fn write_to(
        &self,
        place: &NewPlace,
        at: GuestOffset,
        bytes: IoVector,
        only_data: bool,
    ) -> Result<(), ImageError> {
        let purpose = if only_data { OperationKind::DataWrite } else { OperationKind::CowWrite };
        Ok(self.guest_data.write(purpose, place.host_of(at), bytes)?.await?)
    }

    async fn read_part(&self, part: &Part, old: Old<'_>) -> Result<(GuestOffset, Buffer), ImageError> {
        let (at, length) = (part.range.start, length(&part.range));
        let buffer = Buffer::zeroed(to_usize(length));
        self.context.counters().add(OperationKind::CowRead, length);
        match part.origin {
            Origin::Backing => self.guest_data.read_backing(at, buffer.clone().into()).await?,
            Origin::Host(shift) => self.guest_data.read_own(at, shift.host(at), buffer.clone().into()).await?,
            Origin::Compressed(cluster) => {
                let L2Entry::Compressed { host, length } = old.entry(cluster)? else {
                    return Err(broken_invariant("a part that is read as compressed is of a compressed cluster").into());
                };
                self.guest_data.read_compressed(at, host, length, buffer.clone().into()).await?;
            }
        }
        Ok((at, buffer))
    }

    /// The contents around the guest's bytes in the job's clusters that would be lost if they were not copied.
    async fn contents_around(
        &self,
        job: &InFlightAllocation,
        old: Old<'_>,
        data: &Range<GuestOffset>,
    ) -> Result<Vec<Part>, ImageError> {
        let size = self.context.geometry().cluster_size();
        let mut parts: Vec<Part> = Vec::new();
        for side in [job.range.start..data.start, data.end..job.range.end] {
            let mut pos = side.start;
            while pos < side.end {
                let cluster = pos.align_down(size);
                let end = cluster.saturating_add(size).min(side.end);
                match old.entry(cluster)? {
                    L2Entry::Compressed { .. } => {
                        parts.push(Part { range: pos..end, origin: Origin::Compressed(cluster) });
                    }
                    L2Entry::Standard { host, what, .. } => {
                        let shift = host.map(|host| Shift::between(cluster, host));
                        self.contents_of_units(Units { range: pos..end, shift, what }, job, &mut parts).await?;
                    }
                }
                pos = end;
            }
        }
        Ok(parts)
    }

    /// The contents of a part of a cluster, by its units.
    async fn contents_of_units(
        &self,
        units: Units,
        job: &InFlightAllocation,
        parts: &mut Vec<Part>,
    ) -> Result<(), ImageError> {
        let Units { range, shift, what } = units;
        let geometry = self.context.geometry();
        let unit = geometry.subcluster_size();
        let mut pos = range.start;
        while pos < range.end {
            let end = pos.align_down(unit).saturating_add(unit).min(range.end);
            let bit = if geometry.extended_l2 { 1 << ((pos.0 / unit) & 31) } else { 1 };
            if what.allocated & bit != 0 {
                if let Some(shift) = shift {
                    add(parts, Part { range: pos..end, origin: Origin::Host(shift) });
                }
            } else if what.zero & bit == 0 && job.fill.contains(&pos) {
                self.contents_of_backing(pos..end, parts).await?;
            }
            pos = end;
        }
        Ok(())
    }

    /// The contents of the backing image in a range that are not known to be zeros.
    async fn contents_of_backing(&self, range: Range<GuestOffset>, parts: &mut Vec<Part>) -> Result<(), ImageError> {
        let Some(backing) = self.context.backing() else { return Ok(()) };
        let end = range.end.min(GuestOffset(backing.len()));
        let mut pos = range.start;
        while pos < end {
            let mapped = backing.map(pos, end - pos).await?;
            let until = pos + mapped.length.clamp(1, end - pos);
            if matches!(mapped.kind, BlockStatus::Data | BlockStatus::Compressed) {
                add(parts, Part { range: pos..until, origin: Origin::Backing });
            }
            pos = until;
        }
        Ok(())
    }

    /// Changes the entries to the new places, and returns the replaced ones. If it fails the tables are as they were.
    async fn link(
        &self,
        job: &InFlightAllocation,
        start: GuestOffset,
        places: &[NewPlace],
        new: bool,
    ) -> Result<Vec<L2Entry>, ImageError> {
        seams::entry_after_contents(!matches!(&*job.state.lock(), State::Gathering(_)))?;
        let geometry = self.context.geometry();
        let cluster = geometry.cluster_size();
        let mut dropped = Vec::new();
        let change = |index: usize, old| {
            let at = start + index as u64 * cluster;
            let place = places.iter().find(|place| place.guest.start < at + cluster && at < place.guest.end);
            if new {
                dropped.push(old);
            }
            relinked(old, place.map(|place| place.host_of(at)), geometry.subclusters_in(&job.fill, at))
        };
        self.tables.change(job.range.start, geometry.clusters_touched(&job.range), change).await?;
        Ok(dropped)
    }

    /// Allocates clusters whose subclusters are written one by one.
    async fn reserve(&self, job: &InFlightAllocation) -> Result<(), ImageError> {
        let (places, runs) = self.new_places(&job.range).await?;
        seams::parts_cover(places.iter().map(|place| place.guest.clone()), &job.range)?;
        let geometry = self.context.geometry();
        let cluster = geometry.cluster_size();
        let change = |index: usize, old| {
            let at = job.range.start + index as u64 * cluster;
            let place = places.iter().find(|place| place.guest.contains(&at));
            let what = if let L2Entry::Standard { what, .. } = old { what } else { Subclusters::NONE };
            L2Entry::Standard { host: place.map(|place| place.host_of(at)), copied: true, what }
        };
        let changed = self.tables.change(job.range.start, geometry.clusters_touched(&job.range), change).await;
        if changed.is_err() {
            self.allocator.put_back(runs);
        }
        changed
    }
}

/// An entry whose cluster is now at `host`, with these of its subclusters.
fn relinked(old: L2Entry, host: Option<HostOffset>, bits: u32) -> L2Entry {
    let before = if let L2Entry::Standard { what, .. } = old { what } else { Subclusters::NONE };
    let what = Subclusters { allocated: before.allocated | bits, zero: before.zero & !bits };
    L2Entry::Standard { host, copied: true, what }
}

/// The bytes that a segment covers.
fn range_of((at, bytes): &Segment) -> Range<GuestOffset> {
    *at..*at + bytes.len() as u64
}

/// From the first to the last byte of segments that follow each other without a gap.
fn union(segments: &[Segment]) -> Range<GuestOffset> {
    let mut ranges: Vec<Range<GuestOffset>> = segments.iter().map(range_of).collect();
    let Some(first) = ranges.first().cloned() else { return GuestOffset(0)..GuestOffset(0) };
    ranges.sort_unstable_by_key(|range| range.start);
    let mut union = first;
    // Backwards for what lies before it, forwards for what lies behind it.
    for range in ranges.iter().rev().filter(|range| range.start < union.start).cloned().collect::<Vec<_>>() {
        if range.end >= union.start {
            union = range.start..union.end.max(range.end);
        }
    }
    for range in ranges {
        if range.start <= union.end {
            union.end = union.end.max(range.end);
        }
    }
    union
}

/// The parts of a range that segments cover, in order; neighbours are merged.
fn runs_of(segments: &[Segment], within: &Range<GuestOffset>) -> Vec<Range<GuestOffset>> {
    let clipped = segments.iter().map(range_of).map(|range| range.start.max(within.start)..range.end.min(within.end));
    let mut ranges: Vec<Range<GuestOffset>> = clipped.filter(|range| !range.is_empty()).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, before| {
        let touches = next.start <= before.end;
        if touches {
            before.end = before.end.max(next.end);
        }
        touches
    });
    ranges
}

/// Adds a part; with what it continues it is one.
fn add(parts: &mut Vec<Part>, part: Part) {
    match parts.last_mut() {
        Some(last) if last.origin == part.origin && last.range.end == part.range.start => {
            last.range.end = part.range.end;
        }
        _ => parts.push(part),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(ranges: &[(u64, usize)]) -> Vec<Segment> {
        ranges.iter().map(|(at, len)| (GuestOffset(*at), Buffer::zeroed(*len).into())).collect()
    }

    fn range(range: &Range<u64>) -> Range<GuestOffset> {
        GuestOffset(range.start)..GuestOffset(range.end)
    }

    #[test]
    fn segments_that_touch_are_one() {
        let union = |ranges: &[(u64, usize)]| union(&segments(ranges));
        assert_eq!(union(&[(8, 4)]), range(&(8..12)));
        assert_eq!(union(&[(8, 4), (4, 4), (12, 4), (20, 4)]), range(&(4..16)));
        assert_eq!(union(&[(8, 4), (0, 4), (13, 4)]), range(&(8..12)));
        assert_eq!(union(&[(8, 4), (6, 10), (2, 5)]), range(&(2..16)));
    }

    #[test]
    fn segments_cover_a_range_in_runs() {
        let segments = segments(&[(8, 4), (20, 10), (2, 6), (23, 2), (40, 4)]);
        assert_eq!(runs_of(&segments, &range(&(4..41))), [4..12, 20..30, 40..41].map(|run| range(&run)));
        assert!(runs_of(&segments, &range(&(12..20))).is_empty());
    }
}
