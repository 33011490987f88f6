//! Working sets that the bytes of a snapshot have themselves, such as an image with a bitmap, and their use far away.

use std::ops::Range;
use std::time::Duration;

use limosa_migrate::stored::BlockRange;
use limosa_page::{PAGE_SIZE, PageNumber, PageRange};

use super::format::RANGES_MAX;
use super::{RecordedMode, WorkingSet, empty_like};
use crate::error::SnapshotError;
use crate::layout::Memory;
use crate::reader::Snapshot;

impl WorkingSet {
    /// Reads the one that the bytes of a snapshot have.
    pub(super) fn inside(snapshot: &Snapshot) -> Result<Option<Self>, SnapshotError> {
        let Some(bytes) = snapshot.lent_bytes() else { return Ok(None) };
        let failed = |source| SnapshotError::Packed { path: snapshot.path().to_path_buf(), offset: 0, source };
        let touched = bytes.touched().map_err(failed)?;
        Ok(touched.map(|touched| Self {
            snapshot: snapshot.id(),
            mode: RecordedMode::Image,
            begun: 0,
            duration: Duration::ZERO,
            ranges: pages_of(&touched, snapshot.memory()),
        }))
    }

    /// The ranges of the mapped-ram file that its stored pages are in, and what is between near ones.
    #[must_use]
    pub fn places_in(&self, snapshot: &Snapshot) -> Vec<Range<u64>> {
        self.plan(snapshot.memory(), u64::MAX)
    }
}

impl Snapshot {
    /// Has the pages of a working set fetched ahead, in its order, if the snapshot is far away.
    pub fn fetch_ahead(&self, set: &WorkingSet) {
        if let Some(bytes) = self.lent_bytes() {
            bytes.prefetch(&set.places_in(self));
        }
    }

    /// Has the pages fetched ahead that differ from the snapshot that it stands on, if both are far away.
    pub fn fetch_changes_ahead(&self) {
        if let Some(bytes) = self.lent_bytes() {
            bytes.prefetch_changes();
        }
    }
}

/// The stored pages that have bytes in these ranges of the file, in the order of the RAM blocks.
fn pages_of(ranges: &[Range<u64>], memory: &Memory) -> Vec<BlockRange> {
    let mut touched = empty_like(&memory.stored);
    for (place, touched) in memory.places.iter().zip(&mut touched) {
        let start = place.pages_offset;
        let all = start..start.saturating_add(place.pages.saturating_mul(PAGE_SIZE));
        for range in ranges {
            let (start, end) = (range.start.max(all.start), range.end.min(all.end));
            if start < end {
                let first = (start - all.start) / PAGE_SIZE;
                let last = (end - all.start).div_ceil(PAGE_SIZE);
                touched.set_range(PageRange::new(PageNumber(first), PageNumber(last)));
            }
        }
    }
    let blocks = touched.iter().zip(&memory.stored).enumerate();
    let pages = blocks.flat_map(|(block, (touched, stored))| {
        let all = PageRange::new(PageNumber(0), PageNumber(touched.len()));
        let runs = touched.runs_in(all).flat_map(|run| stored.runs_in(run));
        runs.map(move |pages| BlockRange { block, pages })
    });
    pages.take(RANGES_MAX).collect()
}
