//! Requests that change where bytes lie, one for any cluster at a time.
//!
//! Law: entries of claimed clusters are changed by the one who claimed them, and by nobody else. Whoever wants them waits for his
//! flight, and drives it; or has his bytes written along.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use limosa_storage::IoVector;

use super::locks::RankedMutex;
use super::slices::Flight;

/// A claimed part of the disk.
#[derive(Debug)]
pub(super) struct Job {
    /// Guest offsets, of whole clusters or subclusters.
    pub(super) range: Range<u64>,
    /// What of it will be right when the job is done: others may write along there.
    pub(super) fill: Range<u64>,
    pub(super) state: RankedMutex<State>,
}

#[derive(Debug)]
pub(super) enum State {
    /// Nothing is written yet: these bytes will be, and more may be added.
    Gathering(Vec<(u64, IoVector)>),
    /// Nothing but guests' bytes is written, and here is where; `shared`: others have begun to, beside the job.
    Open { places: Vec<Place>, shared: bool },
    /// Everybody else waits.
    Sealed,
}

/// Where a part of a job's range comes to lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) guest: Range<u64>,
    /// In the data storage.
    pub(super) host: u64,
    /// The storage proves that it reads as zeros.
    pub(super) zeroed: bool,
}

impl Job {
    /// The bytes that were gathered; from now on it is in another state.
    pub(super) fn gathered(&self, next: State) -> Vec<(u64, IoVector)> {
        match std::mem::replace(&mut *self.state.lock(), next) {
            State::Gathering(segments) => segments,
            State::Open { .. } | State::Sealed => Vec::new(),
        }
    }
}

/// All jobs under way, by where they begin. They do not overlap.
#[derive(Default)]
pub(super) struct Jobs {
    map: BTreeMap<u64, (Arc<Job>, Flight)>,
}

impl Jobs {
    /// The job that has claimed this byte.
    pub(super) fn at(&self, at: u64) -> Option<(Arc<Job>, Flight)> {
        self.overlapping(&(at..at.saturating_add(1)))
    }

    /// The first job that has claimed a part of a range.
    pub(super) fn overlapping(&self, range: &Range<u64>) -> Option<(Arc<Job>, Flight)> {
        let before = self.map.range(..=range.start).next_back().map(|(_, entry)| entry);
        let entry = before.filter(|(job, _)| job.range.end > range.start);
        entry.or_else(|| self.map.range(range.start..range.end).next().map(|(_, entry)| entry)).cloned()
    }

    pub(super) fn insert(&mut self, job: Arc<Job>, flight: Flight) {
        self.map.insert(job.range.start, (job, flight));
    }

    pub(super) fn remove(&mut self, start: u64) -> Option<(Arc<Job>, Flight)> {
        self.map.remove(&start)
    }

    /// All flights.
    pub(super) fn flights(&self) -> Vec<Flight> {
        self.map.values().map(|(_, flight)| flight.clone()).collect()
    }
}
