//! The meaning of L2 entries for a part of the disk.
//!
//! Law: nothing here reads or waits: what entries mean is a pure function of them.

use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};
use crate::qcow2::format::entry::L2Entry;
use crate::qcow2::format::geometry::Geometry;

/// A run of bytes that are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) length: u64,
    pub(super) kind: Kind,
}

/// The kind of a run of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Contents, from this offset of the data storage on. `copied`: nothing else refers to them.
    Own { host: HostOffset, copied: bool },
    /// Zeros. If there is a cluster for them: where the bytes would lie. `copied` as above.
    Zero { host: Option<HostOffset>, copied: bool },
    /// Contents of the backing image. As above.
    Backing { host: Option<HostOffset>, copied: bool },
    /// A part of a cluster that is compressed.
    Compressed { host: HostOffset, packed: u32 },
}

/// The result of a lookup.
#[derive(Debug)]
pub(super) enum Lookup<T> {
    Found(T),
    /// This slice has to be read first.
    Load(HostOffset),
}

impl Extent {
    /// Bytes that no table has an entry for.
    pub(super) const fn nothing(length: u64) -> Self {
        Self { length, kind: Kind::Backing { host: None, copied: false } }
    }
}

impl Kind {
    /// Returns the kind of the bytes `by` further on in the same run.
    fn advanced(self, by: u64) -> Self {
        match self {
            Self::Own { host, copied } => Self::Own { host: host + by, copied },
            Self::Zero { host, copied } => Self::Zero { host: host.map(|host| host + by), copied },
            Self::Backing { host, copied } => Self::Backing { host: host.map(|host| host + by), copied },
            Self::Compressed { .. } => self,
        }
    }

    /// Whether there is a cluster that nothing else refers to.
    pub(super) const fn is_for_itself(self) -> bool {
        match self {
            Self::Own { copied, .. } => copied,
            Self::Zero { host, copied } | Self::Backing { host, copied } => host.is_some() && copied,
            Self::Compressed { .. } => false,
        }
    }
}

/// Entries of clusters that follow each other.
pub(super) trait Entries: Iterator<Item = Result<L2Entry, ImageError>> {
    /// Skips those that continue the last one, at most `most`: the same, but for their place, which is a cluster
    /// further each time. Returns how many.
    fn skip_continued(&mut self, most: u64) -> u64;
}

/// Returns the extent that begins at `at`: bytes up to `end` of one kind that are contiguous, by the entries of their
/// clusters; `None` without entries.
pub(super) fn extent(
    geometry: &Geometry,
    at: GuestOffset,
    end: GuestOffset,
    mut entries: impl Entries,
) -> Result<Option<Extent>, ImageError> {
    let cluster = geometry.cluster_size();
    let mut found: Option<Extent> = None;
    let mut pos = at;
    while pos < end {
        let Some(entry) = entries.next().transpose()? else { break };
        let cluster_end = (pos.align_down(cluster).saturating_add(cluster)).min(end);
        while pos < cluster_end {
            let next = extent_in_cluster(geometry, entry, pos, cluster_end);
            match &mut found {
                None => found = Some(next),
                Some(extent)
                    if !matches!(next.kind, Kind::Compressed { .. })
                        && extent.kind.advanced(extent.length) == next.kind =>
                {
                    extent.length += next.length;
                }
                Some(_) => return Ok(found),
            }
            pos += next.length;
            // The usual image: long runs of clusters that need not be understood one by one.
            if let (true, Some(extent)) = (next.length == cluster, &mut found)
                && !matches!(next.kind, Kind::Compressed { .. })
            {
                let more = entries.skip_continued((end - pos) / cluster) * cluster;
                extent.length += more;
                pos += more;
            }
        }
    }
    Ok(found)
}

/// Returns the extent that begins at `pos` and ends at `end` or before, in one cluster with this entry.
pub(super) fn extent_in_cluster(geometry: &Geometry, entry: L2Entry, pos: GuestOffset, end: GuestOffset) -> Extent {
    let cluster = geometry.cluster_size();
    let (host, copied, what) = match entry {
        L2Entry::Compressed { host, length } => {
            return Extent { length: end - pos, kind: Kind::Compressed { host, packed: length } };
        }
        L2Entry::Standard { host, copied, what } => (host, copied, what),
    };
    let inside = pos.within(cluster);
    let unit = geometry.subcluster_size();
    let bits = |unit: u64| {
        let bit = if geometry.extended_l2 { 1_u32 << (unit & 31) } else { 1 };
        (what.allocated & bit != 0, what.zero & bit != 0)
    };
    let first = bits(inside / unit);
    let mut next = inside / unit + 1;
    while next * unit < cluster && next * unit - inside < end - pos && bits(next) == first {
        next += 1;
    }
    let length = (next * unit - inside).min(end - pos);
    let at = host.map(|host| host + inside);
    let kind = match (first, at) {
        ((true, _), Some(host)) => Kind::Own { host, copied },
        ((_, true), _) => Kind::Zero { host: at, copied },
        _ => Kind::Backing { host: at, copied },
    };
    Extent { length, kind }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::format::entry::Subclusters;

    const CLUSTER: u64 = 64 << 10;
    const PLAIN: Geometry = Geometry { cluster_bits: 16, refcount_order: 4, extended_l2: false };
    const FINE: Geometry = Geometry { extended_l2: true, ..PLAIN };

    fn at(host: u64, what: Subclusters) -> L2Entry {
        L2Entry::Standard { host: Some(HostOffset(host)), copied: true, what }
    }

    /// Entries that are understood one by one.
    struct EachOne<I>(I);

    impl<'a, I: Iterator<Item = &'a L2Entry>> Iterator for EachOne<I> {
        type Item = Result<L2Entry, ImageError>;

        fn next(&mut self) -> Option<Self::Item> {
            self.0.next().copied().map(Ok)
        }
    }

    impl<'a, I: Iterator<Item = &'a L2Entry>> Entries for EachOne<I> {
        fn skip_continued(&mut self, _most: u64) -> u64 {
            0
        }
    }

    fn found(geometry: &Geometry, entries: &[L2Entry], bytes: std::ops::Range<u64>) -> Extent {
        let first = usize::try_from(bytes.start / CLUSTER).unwrap();
        let entries = EachOne(entries.iter().skip(first));
        extent(geometry, GuestOffset(bytes.start), GuestOffset(bytes.end), entries).unwrap().unwrap()
    }

    #[test]
    fn clusters_that_lie_together_are_one_extent() {
        let own = |host| at(host, Subclusters::ALLOCATED);
        let entries = [own(0x5_0000), own(0x6_0000), own(0x8_0000)];
        let kind = Kind::Own { host: HostOffset(0x5_1000), copied: true };
        assert_eq!(found(&PLAIN, &entries, 4096..3 * CLUSTER), Extent { length: 2 * CLUSTER - 4096, kind });
        assert_eq!(found(&PLAIN, &entries, 4096..8192), Extent { length: 4096, kind });
        assert_eq!(found(&PLAIN, &[L2Entry::NONE; 3], 0..3 * CLUSTER), Extent::nothing(3 * CLUSTER));
    }

    #[test]
    fn subclusters_that_are_alike_are_one_extent_also_over_the_end_of_a_cluster() {
        let entries = [
            at(0x5_0000, Subclusters { allocated: 0xffff_0000, zero: 0xff }),
            at(0x6_0000, Subclusters { allocated: 1, zero: 0 }),
        ];
        let half = CLUSTER / 2;
        let zero = Kind::Zero { host: Some(HostOffset(0x5_0000)), copied: true };
        assert_eq!(found(&FINE, &entries, 0..2 * CLUSTER), Extent { length: half / 2, kind: zero });
        let own = Kind::Own { host: HostOffset(0x5_8000), copied: true };
        assert_eq!(found(&FINE, &entries, half..2 * CLUSTER), Extent { length: half + 2048, kind: own });
        let backing = Kind::Backing { host: Some(HostOffset(0x6_0800)), copied: true };
        assert_eq!(
            found(&FINE, &entries, CLUSTER + 2048..2 * CLUSTER),
            Extent { length: CLUSTER - 2048, kind: backing }
        );
    }

    #[test]
    fn each_compressed_cluster_is_an_extent() {
        let entry = L2Entry::Compressed { host: HostOffset(0x5_0000), length: 512 };
        let kind = Kind::Compressed { host: HostOffset(0x5_0000), packed: 512 };
        assert_eq!(found(&PLAIN, &[entry; 2], 0..2 * CLUSTER), Extent { length: CLUSTER, kind });
    }
}
