//! The pages that a guest touches, collected while it runs.

use std::time::Instant;

use limosa_migrate::stored::BlockRange;
use limosa_page::{PageBitmap, PageNumber, PageRange};
use uuid::Uuid;

use super::format::RANGES_MAX;
use super::{RecordedMode, WorkingSet, empty_like};
use crate::manifest;
use crate::reader::Snapshot;

/// Collects the pages that a guest touches. Each counts once, when it is first noted, and only if it is stored: zero
/// pages are not read.
#[derive(Debug)]
pub struct WorkingSetRecorder {
    snapshot: Uuid,
    mode: RecordedMode,
    stored: Vec<PageBitmap>,
    seen: Vec<PageBitmap>,
    ranges: Vec<BlockRange>,
    begun: (u64, Instant),
}

impl WorkingSetRecorder {
    /// Begins a recording of a guest of `snapshot`.
    #[must_use]
    pub fn new(snapshot: &Snapshot, mode: RecordedMode) -> Self {
        let stored = snapshot.memory().stored.clone();
        let seen = empty_like(&stored);
        let begun = (manifest::now(), Instant::now());
        Self { snapshot: snapshot.id(), mode, stored, seen, ranges: Vec::new(), begun }
    }

    /// Notes pages that were touched. Past 262,144 ranges nothing more is noted: the first touches matter most.
    pub fn note(&mut self, BlockRange { block, pages }: BlockRange) {
        let (Some(stored), Some(seen)) = (self.stored.get(block), self.seen.get_mut(block)) else { return };
        let pages = PageRange::new(pages.start, pages.end.min(PageNumber(stored.len())));
        for stored in stored.runs_in(pages) {
            let new: Vec<PageRange> = seen.gaps_in(stored).collect();
            seen.set_range(stored);
            for pages in new {
                let is_full = self.ranges.len() >= RANGES_MAX;
                match self.ranges.last_mut() {
                    Some(last) if last.block == block && last.pages.end == pages.start => last.pages.end = pages.end,
                    _ if is_full => return,
                    _ => self.ranges.push(BlockRange { block, pages }),
                }
            }
        }
    }

    /// Ends the recording.
    #[must_use]
    pub fn finish(self) -> WorkingSet {
        let (begun, since) = self.begun;
        let Self { snapshot, mode, ranges, .. } = self;
        WorkingSet { snapshot, mode, begun, duration: since.elapsed(), ranges }
    }
}
