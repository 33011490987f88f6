//! Carrying out a job that writes: room is found, contents are read, everything is written, the tables say so.
//!
//! Law: entries are changed when what they lead to has been written, never before. What fails on the way leaves them as they were.

use std::ops::Range;
use std::sync::Arc;

use futures_util::future::join_all;
use limosa_storage::{Buffer, IoVector};

use super::allocate::{Run, zero_parts};
use super::counters::Purpose;
use super::entry::{L2Entry, Subclusters};
use super::image::Inner;
use super::jobs::{Job, Place, State};
use super::layers::Layers;
use super::plan::{Origin, Part, Plan, Want};
use super::read::{all, part_of};
use super::table::follow;
use crate::disk::MapKind;
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};

/// What a job does. `entries` are of the clusters from guest offset `start` on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Task {
    /// Makes room: clusters without contents, whose subclusters are written afterwards.
    Reserve,
    /// Writes to new clusters, and leaves the old ones.
    New { start: u64, entries: Vec<L2Entry> },
    /// Writes clusters or subclusters that the image has for itself, and that mean nothing so far: from this offset on.
    InOwn { host: u64, start: u64, entries: Vec<L2Entry> },
}

impl Inner {
    pub(super) async fn carry_out(self: &Arc<Self>, job: &Job, task: Task) -> Result<(), ImageError> {
        // The table comes first: without it nothing else is of use.
        self.table_for(job.range.start / self.geometry.l2_covers()).await?;
        let (start, entries) = match &task {
            Task::Reserve => return self.reserve(job).await,
            Task::New { start, entries } | Task::InOwn { start, entries, .. } => (*start, &entries[..]),
        };
        let (places, runs) = match &task {
            Task::InOwn { host, .. } => {
                self.admit_contents(&(*host..host.saturating_add(job.range.end - job.range.start))).await?;
                (vec![Place { guest: job.range.clone(), host: *host, zeroed: false }], Vec::new())
            }
            _ => self.new_places(&job.range).await?,
        };
        let new = matches!(task, Task::New { .. });
        let linked = match self.fill(job, start, entries, &places).await {
            Ok(()) => self.link(job, start, &places, new).await,
            Err(error) => Err(error),
        };
        if linked.is_err() {
            let state = std::mem::replace(&mut *job.state.lock(), State::Sealed);
            if matches!(state, State::Open { shared: true, .. }) {
                // Others may still be writing there: nobody gets these clusters before they are done.
                for run in runs {
                    let bytes = self.bytes_of(run.first, run.count);
                    self.drop_reference(bytes.start, bytes.end - bytes.start, false);
                }
            } else {
                self.put_back(runs);
            }
        }
        self.drop_entries(linked?).await
    }

    /// Clusters for a range, which is of whole ones.
    async fn new_places(self: &Arc<Self>, range: &Range<u64>) -> Result<(Vec<Place>, Vec<Run>), ImageError> {
        if self.has_data_file {
            // There, everything lies where the guest sees it.
            let zeros = zero_parts(&*self.data, range.clone());
            let zeroed = zeros.iter().any(|zero| zero.start <= range.start && range.end <= zero.end);
            return Ok((vec![Place { guest: range.clone(), host: range.start, zeroed }], Vec::new()));
        }
        let bits = self.geometry.cluster_bits;
        let runs = self.allocate((range.end - range.start) >> bits).await?;
        Ok((follow(&runs, range.start, bits), runs))
    }

    /// Has all of the job's fill, and what else of its clusters has contents, written to its new places.
    async fn fill(&self, job: &Job, start: u64, entries: &[L2Entry], places: &[Place]) -> Result<(), ImageError> {
        let data = match &*job.state.lock() {
            State::Gathering(gathered) => union(gathered),
            _ => 0..0,
        };
        let contents = self.contents(job, start, entries, &data).await?;
        let mut plans: Vec<(&Place, Plan)> = Vec::with_capacity(places.len());
        for place in places {
            let clip = |range: &Range<u64>| range.start.max(place.guest.start)..range.end.min(place.guest.end);
            let within =
                |part: &Part| Some(Part { range: clip(&part.range), ..*part }).filter(|part| !part.range.is_empty());
            let want = Want {
                fill: clip(&job.fill),
                data: clip(&data),
                contents: contents.iter().filter_map(within).collect(),
                zeroed: place.zeroed,
                align: u64::from(self.data.alignment().offset.max(1)),
            };
            plans.push((place, self.planned(place, &want).await));
        }
        if plans.iter().all(|(_, plan)| plan.open) {
            // Whoever comes now writes beside us.
            let segments = job.gathered(State::Open { places: places.to_vec(), shared: false });
            let writes = places.iter().flat_map(|place| {
                segments.iter().filter_map(|(at, bytes)| {
                    let (from, to) = ((*at).max(place.guest.start), (at + bytes.len() as u64).min(place.guest.end));
                    (from < to).then(|| self.write_place(place, from, part_of(bytes, from - at, to - from), true))
                })
            });
            return all(writes.collect()).await;
        }
        let mut layers = Layers::default();
        let reads = plans.iter().flat_map(|(_, plan)| &plan.reads).map(|part| self.read_part(part, entries, start));
        for read in join_all(reads).await {
            let (at, buffer) = read?;
            layers.put(at, buffer.into());
        }
        let segments = job.gathered(State::Sealed);
        for (at, bytes) in &segments {
            layers.put(*at, bytes.clone());
        }
        let whole = union(&segments);
        let writes = plans.iter().flat_map(|(place, plan)| {
            let write = &plan.write;
            if !plan.clones.is_empty() {
                // What is between the guests' bytes is there.
                let runs = runs_of(&segments, &place.guest).into_iter();
                let writes = runs.map(|run| self.write_place(place, run.start, layers.run(&run, &self.zeros), true));
                return writes.collect::<Vec<_>>();
            }
            // Others may have added bytes outside of what was planned.
            let from = segments
                .iter()
                .map(|(at, _)| (*at).max(place.guest.start))
                .min()
                .unwrap_or(write.start)
                .min(write.start);
            let ends = segments.iter().map(|(at, bytes)| (at + bytes.len() as u64).min(place.guest.end));
            let to = ends.max().unwrap_or(write.end).max(write.end);
            let only = whole.start <= from && to <= whole.end;
            vec![self.write_place(place, from, layers.run(&(from..to), &self.zeros), only)]
        });
        all(writes.collect()).await
    }

    /// What is to be done for a new place; clones are done already.
    async fn planned(&self, place: &Place, want: &Want) -> Plan {
        if let Some(known) = self.shareable(want).await
            && let Some(plan) = known.plan(place, want)
            && self.share(place, &plan, &known).await
        {
            return plan;
        }
        want.copying()
    }

    /// Writes what belongs at a guest offset to its new place.
    async fn write_place(&self, place: &Place, at: u64, bytes: IoVector, only_data: bool) -> Result<(), ImageError> {
        let purpose = if only_data { Purpose::DataWrite } else { Purpose::CowWrite };
        self.counters.add(purpose, bytes.len() as u64);
        Ok(self.data.write(place.host + (at - place.guest.start), bytes).await?)
    }

    async fn read_part(&self, part: &Part, entries: &[L2Entry], start: u64) -> Result<(u64, Buffer), ImageError> {
        let Range { start: at, end } = part.range;
        let buffer = Buffer::zeroed(usize::try_from(end - at).unwrap_or(0));
        self.counters.add(Purpose::CowRead, end - at);
        match part.origin {
            Origin::Backing => self.read_backing(at, buffer.clone().into()).await?,
            Origin::Host(delta) => self.read_own(at, at.wrapping_add(delta), buffer.clone().into()).await?,
            Origin::Compressed(cluster) => {
                let index = (cluster - start) >> self.geometry.cluster_bits;
                if let Some(L2Entry::Compressed { host, length }) =
                    usize::try_from(index).ok().and_then(|index| entries.get(index))
                {
                    self.read_compressed(at, *host, *length, buffer.clone().into()).await?;
                }
            }
        }
        Ok((at, buffer))
    }

    /// The contents that the job's clusters have beside the guest's bytes, as far as they are lost if nobody copies them.
    async fn contents(
        &self,
        job: &Job,
        start: u64,
        entries: &[L2Entry],
        data: &Range<u64>,
    ) -> Result<Vec<Part>, ImageError> {
        let mut parts: Vec<Part> = Vec::new();
        for side in [job.range.start..data.start, data.end..job.range.end] {
            let mut pos = side.start;
            while pos < side.end {
                let cluster = pos & !(self.geometry.cluster_size() - 1);
                let end = (cluster + self.geometry.cluster_size()).min(side.end);
                let index = usize::try_from((cluster - start) >> self.geometry.cluster_bits).unwrap_or(usize::MAX);
                match entries.get(index).copied().unwrap_or(L2Entry::NONE) {
                    L2Entry::Compressed { .. } => {
                        parts.push(Part { range: pos..end, origin: Origin::Compressed(cluster) });
                    }
                    L2Entry::Standard { host, what, .. } => {
                        self.contents_of_units(
                            pos..end,
                            host.map(|host| host.0.wrapping_sub(cluster)),
                            what,
                            job,
                            &mut parts,
                        )
                        .await?;
                    }
                }
                pos = end;
            }
        }
        Ok(parts)
    }

    async fn contents_of_units(
        &self,
        range: Range<u64>,
        delta: Option<u64>,
        what: Subclusters,
        job: &Job,
        parts: &mut Vec<Part>,
    ) -> Result<(), ImageError> {
        let unit = self.geometry.subcluster_size();
        let mut pos = range.start;
        while pos < range.end {
            let end = (pos / unit + 1).saturating_mul(unit).min(range.end);
            let bit = if self.geometry.extended_l2 { 1 << ((pos / unit) & 31) } else { 1 };
            if what.allocated & bit != 0 {
                if let Some(delta) = delta {
                    add(parts, Part { range: pos..end, origin: Origin::Host(delta) });
                }
            } else if what.zero & bit == 0 && job.fill.contains(&pos) {
                self.contents_of_backing(pos..end, parts).await?;
            }
            pos = end;
        }
        Ok(())
    }

    /// What the backing image has in a range, and is not known to be zeros.
    async fn contents_of_backing(&self, range: Range<u64>, parts: &mut Vec<Part>) -> Result<(), ImageError> {
        let Some(backing) = &self.backing else { return Ok(()) };
        let end = range.end.min(backing.len());
        let mut pos = range.start;
        while pos < end {
            let mapped = backing.map(GuestOffset(pos), end - pos).await?;
            let until = pos + mapped.length.clamp(1, end - pos);
            if matches!(mapped.kind, MapKind::Data | MapKind::Compressed) {
                add(parts, Part { range: pos..until, origin: Origin::Backing });
            }
            pos = until;
        }
        Ok(())
    }

    /// Has the tables say where everything is: the entries that are no longer there. If it fails they are as they were.
    async fn link(
        self: &Arc<Self>,
        job: &Job,
        start: u64,
        places: &[Place],
        new: bool,
    ) -> Result<Vec<L2Entry>, ImageError> {
        let cluster = self.geometry.cluster_size();
        let count = usize::try_from((job.range.end.div_ceil(cluster)) - job.range.start / cluster).unwrap_or(0);
        let mut dropped = Vec::new();
        self.change_entries(job.range.start, count, |index, old| {
            let at = start + index as u64 * cluster;
            let host = places
                .iter()
                .find(|place| place.guest.start < at + cluster && at < place.guest.end)
                .map(|place| HostOffset(place.host.wrapping_add(at.wrapping_sub(place.guest.start))));
            if new {
                dropped.push(old);
            }
            relinked(old, host, self.bits(&job.fill, at))
        })
        .await?;
        Ok(dropped)
    }

    /// The bits of the subclusters of the cluster at `at` that begin in a range; all of them if there are none.
    pub(super) fn bits(&self, range: &Range<u64>, at: u64) -> u32 {
        if !self.geometry.extended_l2 {
            return u32::MAX;
        }
        let unit = self.geometry.subcluster_size();
        (0..32_u32).filter(|bit| range.contains(&(at + u64::from(*bit) * unit))).fold(0, |bits, bit| bits | 1 << bit)
    }

    /// Room for clusters whose subclusters are written one by one.
    async fn reserve(self: &Arc<Self>, job: &Job) -> Result<(), ImageError> {
        let (places, runs) = self.new_places(&job.range).await?;
        let cluster = self.geometry.cluster_size();
        let count = usize::try_from((job.range.end - job.range.start) / cluster).unwrap_or(0);
        let changed = self
            .change_entries(job.range.start, count, |index, old| {
                let at = job.range.start + index as u64 * cluster;
                let place = places.iter().find(|place| place.guest.contains(&at));
                let what = if let L2Entry::Standard { what, .. } = old { what } else { Subclusters::NONE };
                let host = place.map(|place| HostOffset(place.host + (at - place.guest.start)));
                L2Entry::Standard { host, copied: true, what }
            })
            .await;
        if changed.is_err() {
            self.put_back(runs);
        }
        changed
    }
}

/// An entry whose cluster now lies at `host`, with these of its subclusters.
fn relinked(old: L2Entry, host: Option<HostOffset>, bits: u32) -> L2Entry {
    let before = if let L2Entry::Standard { what, .. } = old { what } else { Subclusters::NONE };
    let what = Subclusters { allocated: before.allocated | bits, zero: before.zero & !bits };
    L2Entry::Standard { host, copied: true, what }
}

/// From the first to the last byte of segments, as far as nothing is between them.
fn union(segments: &[(u64, IoVector)]) -> Range<u64> {
    let mut ranges: Vec<Range<u64>> = segments.iter().map(|(at, bytes)| *at..at + bytes.len() as u64).collect();
    let Some(first) = ranges.first().cloned() else { return 0..0 };
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

/// What segments cover of a range, in order; what touches is one.
fn runs_of(segments: &[(u64, IoVector)], within: &Range<u64>) -> Vec<Range<u64>> {
    let clipped = segments.iter().map(|(at, bytes)| {
        let end = at + bytes.len() as u64;
        (*at).max(within.start)..end.min(within.end)
    });
    let mut ranges: Vec<Range<u64>> = clipped.filter(|range| !range.is_empty()).collect();
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

    #[test]
    fn segments_that_touch_are_one() {
        let segments = |ranges: &[(u64, usize)]| -> Vec<(u64, IoVector)> {
            ranges.iter().map(|(at, len)| (*at, Buffer::zeroed(*len).into())).collect()
        };
        assert_eq!(union(&segments(&[(8, 4)])), 8..12);
        assert_eq!(union(&segments(&[(8, 4), (4, 4), (12, 4), (20, 4)])), 4..16);
        assert_eq!(union(&segments(&[(8, 4), (0, 4), (13, 4)])), 8..12);
        assert_eq!(union(&segments(&[(8, 4), (6, 10), (2, 5)])), 2..16);
    }

    #[test]
    fn segments_cover_a_range_in_runs() {
        let segments: Vec<(u64, IoVector)> =
            [(8, 4), (20, 10), (2, 6), (23, 2), (40, 4)].map(|(at, len)| (at, Buffer::zeroed(len).into())).into();
        assert_eq!(runs_of(&segments, &(4..41)), [4..12, 20..30, 40..41]);
        assert!(runs_of(&segments, &(12..20)).is_empty());
    }
}
