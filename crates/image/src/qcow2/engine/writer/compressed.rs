//! Writes of compressed clusters.
//!
//! Law: as of all jobs, entries are changed when what they lead to has been written, and room is counted before that.
//! A write replaces whole clusters, so nothing is read; what they were is dropped. Clusters that did not become smaller
//! are written as they are, and zeros are entries without contents.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use limosa_page::{broken_invariant, to_u64};
use limosa_storage::{Buffer, IoVector};

use super::super::allocator::Allocator;
use super::super::context::{Context, ENCRYPTED_AND_COMPRESSED};
use super::super::counters::OperationKind;
use super::super::flusher::Flusher;
use super::super::guest_data::GuestData;
use super::super::header_owner::HeaderOwner;
use super::super::owners::Owners;
use super::super::pool::Run;
use super::super::shared_future::{SharedFuture, all};
use super::super::tables::Tables;
use super::in_flight::{InFlightAllocation, InFlightAllocations, State};
use super::zeroer::{Rules, Zeroing, zeroed};
use crate::compression::{CompressedClusters, PackedCluster};
use crate::error::ImageError;
use crate::offset::{ClusterCount, GuestOffset, HostOffset};
use crate::qcow2::format::entry::{L2Entry, Subclusters};

/// Writes compressed clusters.
pub(super) struct CompressedWriter {
    context: Arc<Context>,
    header: Arc<HeaderOwner>,
    allocator: Arc<Allocator>,
    tables: Arc<Tables>,
    flusher: Arc<Flusher>,
    guest_data: Arc<GuestData>,
    in_flight: Arc<InFlightAllocations>,
}

/// A step that was begun.
enum Begun {
    /// First another job has to be done.
    Wait(SharedFuture),
    /// Clusters are written, up to here.
    Job(SharedFuture, GuestOffset),
}

/// The place of a new cluster.
enum Place {
    /// Nowhere: it is zeros.
    Zero,
    /// Compressed, with this many bytes.
    Compressed(HostOffset, u32),
    /// As it is.
    Plain(HostOffset),
}

/// Room that was allocated for a job, and belongs to no entry yet.
#[derive(Default)]
struct Room {
    compressed: Vec<(HostOffset, u64)>,
    plain: Vec<Run>,
}

impl CompressedWriter {
    pub(super) fn new(owners: &Owners, in_flight: Arc<InFlightAllocations>) -> Self {
        let Owners { context, header, allocator, tables, flusher, guest_data, .. } = owners;
        Self {
            context: Arc::clone(context),
            header: Arc::clone(header),
            allocator: Arc::clone(allocator),
            tables: Arc::clone(tables),
            flusher: Arc::clone(flusher),
            guest_data: Arc::clone(guest_data),
            in_flight,
        }
    }

    /// Writes all of `from` at `at`. Borrows nothing.
    pub(super) async fn write(self: Arc<Self>, at: GuestOffset, from: CompressedClusters) -> Result<(), ImageError> {
        self.allocator.begin_writing().await?;
        let cluster = self.context.geometry().cluster_size();
        let end = at + from.len;
        if to_u64(from.cluster) != cluster || from.compression != self.context.compression() {
            return Err(self.context.unsupported("these clusters were compressed for another image"));
        }
        if self.context.is_encrypted() {
            return Err(self.context.unsupported(ENCRYPTED_AND_COMPRESSED));
        }
        if at.within(cluster) != 0 || !self.is_whole(end) {
            return Err(self.not_whole());
        }
        let mut clusters = VecDeque::from(from.clusters);
        let mut pos = at;
        while pos < end {
            match self.begin(pos, end, &mut clusters)? {
                // Its contents come first, even if it fails.
                Begun::Wait(job) => drop(job.await),
                Begun::Job(job, until) => {
                    job.await?;
                    pos = until;
                }
            }
        }
        self.flusher.flush_if_pressed().await
    }

    /// Whether clusters that end here are whole: the last one ends with the disk.
    fn is_whole(&self, end: GuestOffset) -> bool {
        end.within(self.context.geometry().cluster_size()) == 0 || end.0 == self.header.size()
    }

    fn not_whole(&self) -> ImageError {
        let cluster = self.context.geometry().cluster_size();
        self.context.unsupported(format!("compressed writes must be of whole clusters of {cluster} bytes"))
    }

    /// Begins a job for as many clusters from `pos` on as one can be for, and takes them out of `clusters`.
    fn begin(
        self: &Arc<Self>,
        pos: GuestOffset,
        end: GuestOffset,
        clusters: &mut VecDeque<PackedCluster>,
    ) -> Result<Begun, ImageError> {
        let (cluster, region) = (self.context.geometry().cluster_size(), self.context.region());
        let mut jobs = self.in_flight.shard(pos);
        let mut range = pos..end.align_up(cluster).min(pos.align_down(region).saturating_add(region));
        if let Some((job, future)) = jobs.overlapping(&range) {
            range.end = job.range.start.align_down(cluster);
            if range.end <= pos {
                return Ok(Begun::Wait(future));
            }
        }
        // Here: once it is claimed, nobody writes to the last cluster of a disk that has become longer.
        if range.end > end && !self.is_whole(end) {
            return Err(self.not_whole());
        }
        let count = self.context.geometry().clusters_touched(&range);
        let parts: Vec<PackedCluster> = clusters.drain(..count.min(clusters.len())).collect();
        if parts.len() != count {
            return Err(broken_invariant("a compressed write has as many clusters as its bytes").into());
        }
        let until = range.end;
        let writer = Arc::clone(self);
        let future = self.in_flight.start(&range.clone(), {
            let range = range.clone();
            async move { writer.carry_out(&range, &parts).await }
        })?;
        jobs.insert(InFlightAllocation::new(range, until..until, State::Sealed), future.clone())?;
        Ok(Begun::Job(future, until))
    }

    async fn carry_out(&self, range: &Range<GuestOffset>, parts: &[PackedCluster]) -> Result<(), ImageError> {
        // The table comes first: without it nothing else is of use.
        self.tables.prepare(range.start).await?;
        let mut room = Room::default();
        let written = match self.place(parts, &mut room).await {
            Ok((places, writes)) => match self.write_all(writes).await {
                Ok(()) => self.link(range, &places).await,
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        };
        if written.is_err() {
            self.give_back(room);
        }
        self.allocator.drop_entries(written?).await
    }

    /// Finds room for the clusters: their places, and the bytes to be written.
    async fn place(
        &self,
        parts: &[PackedCluster],
        room: &mut Room,
    ) -> Result<(Vec<Place>, Vec<(HostOffset, IoVector)>), ImageError> {
        let geometry = self.context.geometry();
        // Where no entry can say zeros, they are contents.
        let zeros = (!Rules::of(&self.context).entries_can_zero()).then(|| self.context.zeros().clone());
        let plain = |part: &PackedCluster| match part {
            PackedCluster::Plain(bytes) => Some(bytes.clone()),
            PackedCluster::Zero => zeros.clone(),
            PackedCluster::Compressed(_) => None,
        };
        let packed = |part: &PackedCluster| match part {
            PackedCluster::Compressed(bytes) => Some(to_u64(bytes.len())),
            PackedCluster::Plain(_) | PackedCluster::Zero => None,
        };
        let lengths: Vec<u64> = parts.iter().filter_map(packed).collect();
        let found = self.allocator.allocate_bytes(&lengths).await?;
        room.compressed = found.iter().copied().zip(lengths).collect();
        let count = parts.iter().filter_map(plain).count();
        room.plain = self.allocator.allocate(ClusterCount(to_u64(count))).await?;
        let whole = |run: &Run| (run.first.0..run.first.0 + run.count.0).map(|number| number << geometry.cluster_bits);
        let (mut found, mut whole) = (found.into_iter(), room.plain.iter().flat_map(whole).map(HostOffset));
        let short = || broken_invariant("every compressed cluster has a place");
        let (mut places, mut writes) = (Vec::with_capacity(parts.len()), Vec::new());
        for part in parts {
            if let PackedCluster::Compressed(bytes) = part {
                let host = found.next().ok_or_else(short)?;
                let length = u32::try_from(bytes.len()).map_err(|_| short())?;
                add(&mut writes, host, bytes.clone());
                places.push(Place::Compressed(host, length));
            } else if let Some(bytes) = plain(part) {
                let host = whole.next().ok_or_else(short)?;
                add(&mut writes, host, bytes);
                places.push(Place::Plain(host));
            } else {
                places.push(Place::Zero);
            }
        }
        Ok((places, writes))
    }

    async fn write_all(&self, writes: Vec<(HostOffset, IoVector)>) -> Result<(), ImageError> {
        let write =
            |(host, bytes)| async move { Ok(self.guest_data.write(OperationKind::DataWrite, host, bytes)?.await?) };
        all(writes.into_iter().map(write).collect()).await
    }

    /// Has the entries lead to the new places, and returns the former ones.
    async fn link(&self, range: &Range<GuestOffset>, places: &[Place]) -> Result<Vec<L2Entry>, ImageError> {
        let (rules, extended) = (Rules::of(&self.context), self.context.geometry().extended_l2);
        let mut dropped = Vec::with_capacity(places.len());
        let change = |index: usize, old| match places.get(index) {
            Some(Place::Compressed(host, length)) => {
                dropped.push(old);
                L2Entry::Compressed { host: *host, length: *length }
            }
            Some(Place::Plain(host)) => {
                dropped.push(old);
                L2Entry::Standard { host: Some(*host), copied: true, what: Subclusters::ALLOCATED }
            }
            Some(Place::Zero) => {
                let (new, drops) = zeroed(old, u32::MAX, Zeroing::Unmap, rules, extended);
                if drops {
                    dropped.push(old);
                }
                new
            }
            None => old,
        };
        self.tables.change(range.start, places.len(), change).await?;
        Ok(dropped)
    }

    /// Takes back the room of a job that failed.
    fn give_back(&self, room: Room) {
        room.compressed.iter().for_each(|(host, length)| self.allocator.drop_bytes(*host, *length));
        self.allocator.put_back(room.plain);
    }
}

/// Adds bytes to be written; with what they follow they are one write.
fn add(writes: &mut Vec<(HostOffset, IoVector)>, host: HostOffset, bytes: Buffer) {
    match writes.last_mut() {
        Some((at, before)) if *at + to_u64(before.len()) == host => before.push(bytes),
        _ => writes.push((host, bytes.into())),
    }
}
