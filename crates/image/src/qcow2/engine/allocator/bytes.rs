//! Room for compressed clusters, by bytes: several of them share a host cluster.
//!
//! Law: a host cluster with compressed contents is counted once for each compressed cluster that has a byte in it.
//! While there is room left in it, it is counted once more, for that room, the *tail*. So it is neither given back nor
//! handed out again while its tail is in use, even if all its contents are dropped. A tail is in use by one request at
//! a time. At the end tails are given back; after a crash their counts are leaks, and nothing else.
//!
//! Where refcounts have few bits a host cluster takes as many as they can count. The packing is computed without I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::FutureExt;
use limosa_page::{broken_invariant, to_u64};

use super::{Allocator, Dropped};
use crate::error::ImageError;
use crate::offset::{ClusterCount, HostCluster, HostOffset};
use crate::qcow2::engine::pool::Run;

/// The most tails that are kept: more than one only comes of requests at the same time.
const TAILS: usize = 4;

/// The least part of a cluster that is worth a tail, once there is more room elsewhere.
const WORTH: u64 = 16;

/// The room that is left in the last host cluster of compressed contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tail {
    /// Its first byte; its last one is its cluster's.
    at: HostOffset,
    /// References to the cluster that were made, without the tail's own.
    references: u64,
}

/// The places of compressed clusters within host clusters.
#[derive(Debug)]
struct Packing {
    cluster_bits: u32,
    /// The largest refcount.
    most: u64,
    spaces: Vec<Space>,
    clusters: BTreeMap<HostCluster, References>,
}

/// Contiguous room, up to the end of a host cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Space {
    at: HostOffset,
    end: HostOffset,
}

/// A host cluster's references.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct References {
    /// Its refcount as it is.
    counted: u64,
    /// References from compressed clusters.
    made: u64,
}

/// The end of a packing.
#[derive(Debug, Default, PartialEq, Eq)]
struct Packed {
    /// Host clusters whose refcounts have to be raised, and by how much.
    raised: Vec<(HostCluster, u64)>,
    /// Host clusters that had a tail, and have none any more: they are counted once too often.
    ended: Vec<HostCluster>,
    tails: Vec<Tail>,
    /// Clusters that nothing was put into.
    unused: Vec<Run>,
}

impl Packing {
    fn new(cluster_bits: u32, refcount_order: u32, tails: Vec<Tail>) -> Self {
        let most = 1_u64.checked_shl(1 << refcount_order).map_or(u64::MAX, |beyond| beyond - 1);
        let mut packing = Self { cluster_bits, most, spaces: Vec::new(), clusters: BTreeMap::new() };
        for Tail { at, references } in tails {
            let cluster = at.cluster(cluster_bits);
            let end = (cluster + ClusterCount::ONE).begin(cluster_bits);
            packing.spaces.push(Space { at, end });
            packing.clusters.insert(cluster, References { counted: references + 1, made: references });
        }
        packing
    }

    /// Bytes that are left.
    fn room(&self) -> u64 {
        self.spaces.iter().map(|space| space.end - space.at).sum()
    }

    /// Clusters that are needed for `left` more compressed clusters of `bytes` together, at least.
    fn needs(&self, left: usize, bytes: u64) -> ClusterCount {
        let whole = bytes.div_ceil(1 << self.cluster_bits);
        ClusterCount(if self.most == 1 { to_u64(left) } else { whole })
    }

    /// Adds new clusters, which are counted once.
    fn add(&mut self, run: Run) {
        let (at, end) = (run.first.begin(self.cluster_bits), (run.first + run.count).begin(self.cluster_bits));
        for cluster in (run.first.0..run.first.0 + run.count.0).map(HostCluster) {
            self.clusters.insert(cluster, References { counted: 1, made: 0 });
        }
        match self.spaces.iter_mut().find(|space| space.end == at) {
            Some(before) => before.end = end,
            None => self.spaces.push(Space { at, end }),
        }
    }

    /// The place of `length` bytes, at most a cluster; `None`: there is no room.
    fn place(&mut self, length: u64) -> Option<HostOffset> {
        let (bits, most) = (self.cluster_bits, self.most);
        for space in &mut self.spaces {
            while space.at < space.end {
                let first = space.at.cluster(bits);
                let last = HostOffset(space.at.0 + length - 1).cluster(bits);
                if space.end - space.at < length {
                    break;
                }
                let touched = || (first.0..=last.0).map(HostCluster);
                let full = |cluster| self.clusters.get(&cluster).is_none_or(|references| references.made >= most);
                if touched().any(full) {
                    space.at = (first + ClusterCount::ONE).begin(bits);
                    continue;
                }
                for cluster in touched() {
                    if let Some(references) = self.clusters.get_mut(&cluster) {
                        references.made += 1;
                    }
                }
                let at = space.at;
                space.at = at + length;
                return Some(at);
            }
        }
        None
    }

    /// The refcounts and the tails that come of it.
    fn finish(self) -> Packed {
        let mut packed = Packed::default();
        let last = self.spaces.last().copied();
        for space in self.spaces {
            let Space { at, end } = space;
            let first = at.cluster(self.cluster_bits);
            let Some(references) = self.clusters.get(&first).filter(|_| at < end) else { continue };
            let worth = Some(space) == last || end - at >= (1 << self.cluster_bits) / WORTH;
            // One that has become full, by its refcount, has no tail any more: what counted it is now a reference's.
            if worth && references.made > 0 && references.made < self.most {
                packed.tails.push(Tail { at, references: references.made });
            }
        }
        let tail = |cluster| packed.tails.iter().any(|tail| tail.at.cluster(self.cluster_bits) == cluster);
        for (cluster, References { counted, made }) in self.clusters {
            let wanted = made + u64::from(tail(cluster));
            if made == 0 && !tail(cluster) {
                packed.unused.push(Run { first: cluster, count: ClusterCount::ONE, zeroed: false });
            } else if wanted > counted {
                packed.raised.push((cluster, wanted - counted));
            } else if wanted < counted {
                packed.ended.push(cluster);
            }
        }
        packed
    }
}

impl Allocator {
    /// Allocates room for compressed clusters of these lengths in bytes, in as few host clusters as possible. Each
    /// refers to all host clusters that its bytes are in, until [`Allocator::drop_bytes`].
    pub(in super::super) async fn allocate_bytes(
        self: &Arc<Self>,
        lengths: &[u64],
    ) -> Result<Vec<HostOffset>, ImageError> {
        if lengths.is_empty() {
            return Ok(Vec::new());
        }
        let geometry = *self.context.geometry();
        let tails = self.tails.take();
        let mut packing = Packing::new(geometry.cluster_bits, geometry.refcount_order, tails.clone());
        let mut fresh: Vec<Run> = Vec::new();
        let mut places = vec![None; lengths.len()];
        let mut left = lengths.len();
        let mut missing = lengths.iter().sum::<u64>().saturating_sub(packing.room());
        while left > 0 {
            match self.allocate(packing.needs(left, missing)).await {
                Ok(runs) => {
                    runs.iter().for_each(|run| packing.add(*run));
                    fresh.extend(runs);
                }
                Err(error) => {
                    // Nothing refers to anything yet.
                    self.put_back(fresh);
                    self.keep_tails(tails);
                    return Err(error);
                }
            }
            for (place, length) in places.iter_mut().zip(lengths).filter(|(place, _)| place.is_none()) {
                *place = packing.place(*length);
            }
            let unplaced = || places.iter().zip(lengths).filter(|(place, _)| place.is_none());
            (left, missing) = (unplaced().count(), unplaced().map(|(_, length)| *length).sum());
        }
        let Packed { raised, ended, tails, unused } = packing.finish();
        self.put_back(unused);
        ended.into_iter().for_each(|cluster| self.drop_clusters(cluster..cluster + ClusterCount::ONE, false));
        // If that fails, all of it stays counted: space is lost until a repair, and nothing else.
        self.raise(raised).await?;
        self.keep_tails(tails);
        let places = places.into_iter().collect::<Option<Vec<_>>>();
        let places = places.ok_or_else(|| broken_invariant("all compressed clusters were placed"))?;
        let limit = geometry.compressed_limit();
        if places.iter().zip(lengths).any(|(at, length)| at.0.saturating_add(*length) > limit) {
            places.iter().zip(lengths).for_each(|(at, length)| self.drop_bytes(*at, *length));
            let what = format!("it is too long for more compressed clusters: they cannot lie past {limit:#x}");
            return Err(self.context.unsupported(what));
        }
        Ok(places)
    }

    /// Raises refcounts.
    async fn raise(self: &Arc<Self>, clusters: Vec<(HostCluster, u64)>) -> Result<(), ImageError> {
        if clusters.is_empty() {
            return Ok(());
        }
        let allocator = Arc::clone(self);
        let raise = async move {
            allocator.header.ready_for_refcounts().await?;
            for (cluster, by) in clusters {
                allocator.refcounts.raise(cluster, by).await?;
            }
            Ok(())
        };
        self.header.exclusively(raise.boxed()).await
    }

    /// Gives back the references of a compressed cluster that the tables do not have.
    pub(in super::super) fn drop_bytes(&self, host: HostOffset, length: u64) {
        self.drop_reference(host, length, false);
    }

    fn keep_tails(&self, more: Vec<Tail>) {
        let mut tails = self.tails.lock();
        tails.extend(more);
        // Those with the most room stay.
        let size = self.context.geometry().cluster_size();
        tails.sort_unstable_by_key(|tail| tail.at.within(size));
        let kept = tails.len().min(TAILS);
        let rest = tails.split_off(kept);
        drop(tails);
        rest.into_iter().for_each(|tail| self.drop_clusters(self.cluster_of(tail).clusters, false));
    }

    /// The counts of all tails, to be given back at the end.
    pub(super) fn take_tails(&self) -> Vec<Dropped> {
        self.tails.take().into_iter().map(|tail| self.cluster_of(tail)).collect()
    }

    fn cluster_of(&self, tail: Tail) -> Dropped {
        let cluster = tail.at.cluster(self.context.geometry().cluster_bits);
        Dropped { clusters: cluster..cluster + ClusterCount::ONE, table: false }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BITS: u32 = 12;

    fn run(first: u64, count: u64) -> Run {
        Run { first: HostCluster(first), count: ClusterCount(count), zeroed: false }
    }

    #[test]
    fn clusters_follow_each_other_without_a_gap_and_leave_a_tail() {
        let mut packing = Packing::new(BITS, 4, Vec::new());
        packing.add(run(5, 2));
        let places: Vec<_> = [1000, 3000, 200].iter().map(|length| packing.place(*length).unwrap().0).collect();
        assert_eq!(places, [0x5000, 0x5000 + 1000, 0x5000 + 4000]);
        assert_eq!(packing.place(4000), None);
        let packed = packing.finish();
        // The last one is in both.
        assert_eq!(packed.raised, [(HostCluster(5), 2), (HostCluster(6), 1)]);
        assert_eq!(packed.tails, [Tail { at: HostOffset(0x5000 + 4200), references: 1 }]);
        assert_eq!(packed.unused, []);
        let mut packing = Packing::new(BITS, 4, packed.tails);
        packing.add(run(7, 3));
        assert_eq!(packing.place(4095), Some(HostOffset(0x5000 + 4200)));
        let packed = packing.finish();
        assert_eq!(packed.raised, [(HostCluster(7), 1)]);
        assert_eq!(packed.unused.iter().map(|run| run.first.0).collect::<Vec<_>>(), [8, 9]);
    }

    #[test]
    fn a_refcount_of_one_bit_gives_each_its_own_clusters() {
        let mut packing = Packing::new(BITS, 0, Vec::new());
        assert_eq!(packing.needs(3, 300), ClusterCount(3));
        packing.add(run(5, 3));
        let places: Vec<_> = [100, 100, 100].iter().map(|length| packing.place(*length).unwrap().0).collect();
        assert_eq!(places, [0x5000, 0x6000, 0x7000]);
        assert_eq!(packing.finish(), Packed::default());
    }

    proptest! {
        #[test]
        fn no_two_overlap_and_every_reference_is_counted(
            lengths in prop::collection::vec(1_u64..4096, 1..60),
            order in 0_u32..=6,
            gaps in prop::collection::vec(0_u64..2, 60),
            batch in 1_usize..8,
        ) {
            let (mut tails, mut next) = (Vec::new(), 10);
            let mut counts = BTreeMap::new();
            let mut bytes: Vec<(u64, u64)> = Vec::new();
            let mut gaps = gaps.into_iter().cycle();
            for lengths in lengths.chunks(batch) {
                let mut packing = Packing::new(BITS, order, tails.clone());
                for length in lengths {
                    let at = loop {
                        if let Some(at) = packing.place(*length) {
                            break at;
                        }
                        next += gaps.next().unwrap();
                        packing.add(run(next, 1));
                        counts.insert(next, 1_u64);
                        next += 1;
                    };
                    bytes.push((at.0, at.0 + length));
                }
                let packed = packing.finish();
                for (cluster, by) in packed.raised {
                    *counts.get_mut(&cluster.0).unwrap() += by;
                }
                for ended in packed.ended {
                    *counts.get_mut(&ended.0).unwrap() -= 1;
                }
                for unused in packed.unused {
                    counts.remove(&unused.first.0);
                }
                tails = packed.tails;
            }
            for tail in tails {
                *counts.get_mut(&tail.at.cluster(BITS).0).unwrap() -= 1;
            }
            let mut references = BTreeMap::new();
            for (start, end) in &bytes {
                (start >> BITS..=(end - 1) >> BITS).for_each(|cluster| *references.entry(cluster).or_insert(0) += 1);
            }
            prop_assert_eq!(&references, &counts);
            let most = 1_u64.checked_shl(1 << order).map_or(u64::MAX, |beyond| beyond - 1);
            prop_assert!(references.values().all(|count| *count <= most));
            bytes.sort_unstable();
            prop_assert!(bytes.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        }
    }
}
