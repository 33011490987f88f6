//! Areas where no L2 table can be, because the header refers to something else there.

use super::examine::Bounds;

/// Areas in which no L2 table may lie: sorted, and none overlaps the next.
#[derive(Debug, Default)]
pub(super) struct Taken(Vec<(u64, u64)>);

impl Taken {
    /// `areas`: offset and length in bytes.
    pub(super) fn of(areas: impl IntoIterator<Item = (u64, u64)>, bounds: &Bounds) -> Self {
        let bits = bounds.geometry.cluster_bits;
        let mut areas: Vec<_> = areas
            .into_iter()
            .filter(|(at, bytes)| *bytes > 0 && !bounds.outside(*at, *bytes))
            .map(|(at, bytes)| (at >> bits, (at + bytes - 1) >> bits))
            .collect();
        areas.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for (first, last) in areas {
            match merged.last_mut() {
                Some((_, end)) if first <= *end => *end = last.max(*end),
                _ => merged.push((first, last)),
            }
        }
        Self(merged)
    }

    pub(super) fn contains(&self, cluster: u64) -> bool {
        let behind = self.0.partition_point(|(first, _)| *first <= cluster);
        behind.checked_sub(1).and_then(|index| self.0.get(index)).is_some_and(|(_, last)| cluster <= *last)
    }
}
