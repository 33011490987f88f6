//! Writing: in place where the image has the cluster for itself, else by a job.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::{BoxFuture, join, join_all};
use futures_util::{FutureExt, TryFutureExt};
use limosa_storage::{IoVector, Request};

use super::counters::Purpose;
use super::cow::Task;
use super::entry::L2Entry;
use super::epoch::Guard;
use super::image::{Dropped, Inner};
use super::jobs::{Job, State};
use super::locks::{Rank, RankedMutex};
use super::look::{Kind, Look, Piece};
use super::read::part_of;
use super::slices::Flight;
use crate::error::ImageError;

/// What of a part has to be written once more others are done: from this offset on.
type Left = Option<(u64, IoVector)>;

/// How the bytes from some offset on are written.
enum Claim {
    /// Where they are.
    InPlace { host: u64, length: u64 },
    /// Where somebody else has made room, who is not done yet.
    Beside { host: u64, length: u64, flight: Flight },
    /// By this flight, which has them.
    Given { length: u64, flight: Flight },
    /// After somebody else, whatever became of him.
    Wait { length: u64, flight: Flight },
    /// After room has been made for them.
    After { length: u64, flight: Flight },
    /// First a slice has to be read.
    Load(u64),
}

/// What some bytes need to be written.
enum Needed {
    /// Nothing: they have their place.
    InPlace { host: u64, length: u64 },
    /// A job.
    Job { range: Range<u64>, task: Task },
}

/// What an entry means for who wants to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// There is no cluster.
    Bare,
    /// There is one, which nobody else refers to.
    Own(u64),
    /// There is one that others refer to.
    Shared,
    /// There are compressed contents.
    Compressed,
}

const fn class(entry: L2Entry) -> Class {
    match entry {
        L2Entry::Standard { host: None, .. } => Class::Bare,
        L2Entry::Standard { host: Some(host), copied: true, .. } => Class::Own(host.0),
        L2Entry::Standard { .. } => Class::Shared,
        L2Entry::Compressed { .. } => Class::Compressed,
    }
}

impl Inner {
    /// Writes all of `from` at `at`. Borrows nothing: parts of it wait in flights.
    pub(super) async fn write(self: Arc<Self>, at: u64, from: IoVector) -> Result<(), ImageError> {
        self.begin_writing().await?;
        let end = at + from.len() as u64;
        let guard = self.epochs.enter();
        if let Look::Piece(Piece { length, kind: Kind::Own { host, copied: true } }) = self.look(at, end)?
            && length == from.len() as u64
        {
            return self.in_place(host, from, guard).await;
        }
        drop(guard);
        // In rounds, not nested: who waits for others may have to do so as often as there are others.
        let mut left = vec![(at, from)];
        while !left.is_empty() {
            left = self.round(left).await?;
        }
        if self.l2.presses() {
            self.settle().await?;
        }
        Ok(())
    }

    /// Writes what can be written by now, and what has to be written after others are done is left.
    async fn round(self: &Arc<Self>, segments: Vec<(u64, IoVector)>) -> Result<Vec<(u64, IoVector)>, ImageError> {
        self.begin_writing().await?;
        let guard = self.epochs.enter();
        let (mut parts, mut begun) = (Vec::new(), Ok(()));
        for (at, from) in &segments {
            begun = self.begin_parts(*at, from, &guard, &mut parts).await;
            if begun.is_err() {
                break;
            }
        }
        drop(guard);
        // What was begun is carried to its end also if the rest could not be begun.
        let left: Vec<Left> = join_all(parts).await.into_iter().collect::<Result<_, _>>()?;
        begun.map(|()| left.into_iter().flatten().collect())
    }

    async fn begin_parts(
        self: &Arc<Self>,
        at: u64,
        from: &IoVector,
        guard: &Guard<Dropped>,
        parts: &mut Vec<BoxFuture<'static, Result<Left, ImageError>>>,
    ) -> Result<(), ImageError> {
        let end = at + from.len() as u64;
        let mut pos = at;
        while pos < end {
            let rest = part_of(from, pos - at, end - pos);
            pos += match self.claim(pos, end, &rest)? {
                Claim::Load(key) => {
                    self.load(key).await?;
                    0
                }
                Claim::InPlace { host, length } => {
                    parts.push(self.in_place(host, part_of(&rest, 0, length), guard.again()).map_ok(|()| None).boxed());
                    length
                }
                Claim::Beside { host, length, flight } => {
                    let write = self.in_place(host, part_of(&rest, 0, length), guard.again());
                    let both = join(write, flight).map(|(written, noted)| written.and(noted).map(|()| None));
                    parts.push(both.boxed());
                    length
                }
                Claim::Given { length, flight } => {
                    parts.push(flight.map_ok(|()| None).boxed());
                    length
                }
                Claim::Wait { length, flight } => {
                    let part = (pos, part_of(&rest, 0, length));
                    // Whether it failed or not: afterwards the cluster is nobody's.
                    parts.push(flight.map(|_| Ok(Some(part))).boxed());
                    length
                }
                Claim::After { length, flight } => {
                    let part = (pos, part_of(&rest, 0, length));
                    parts.push(flight.map_ok(|()| Some(part)).boxed());
                    length
                }
            };
        }
        Ok(())
    }

    /// One write to a place that the image has for itself.
    fn in_place(
        self: &Arc<Self>,
        host: u64,
        from: IoVector,
        guard: Guard<Dropped>,
    ) -> impl Future<Output = Result<(), ImageError>> + Send + 'static {
        let bytes = host..host + from.len() as u64;
        let inner = Arc::clone(self);
        let overlap = self.overlap(&bytes);
        let request = overlap.is_none().then(|| {
            self.counters.add(Purpose::DataWrite, from.len() as u64);
            InPlace { request: Some((self.data.write(host, from), guard)), orphans: Arc::clone(&self.orphans) }
        });
        async move {
            match (request, overlap) {
                (Some(request), _) => request.await,
                (None, Some(overlap)) => Err(inner.contents_on(overlap, bytes.start).await),
                // Without an overlap there is a request.
                (None, None) => Ok(()),
            }
        }
    }

    /// Decides how the bytes from `pos` on are written, and begins it if that is for others to see.
    fn claim(self: &Arc<Self>, pos: u64, end: u64, bytes: &IoVector) -> Result<Claim, ImageError> {
        // Of this region only: until the claim is noted nobody else makes one there.
        let mut jobs = self.jobs.shard(pos);
        if let Some((job, flight)) = jobs.at(pos) {
            return Ok(self.along(&job, flight, pos, end, bytes));
        }
        let (range, task) = match self.visit_entries(pos, end, |entries| self.needed(pos, end, entries))? {
            Err(key) => return Ok(Claim::Load(key)),
            Ok(Needed::InPlace { host, length }) => return Ok(Claim::InPlace { host, length }),
            Ok(Needed::Job { range, task }) => (range, task),
        };
        if let Some((job, flight)) = jobs.overlapping(&range) {
            let unit = self.geometry.cluster_size();
            let until = job.range.start & !(unit - 1);
            if until <= pos {
                let length = range.end.min(end) - pos;
                return Ok(Claim::Wait { length, flight });
            }
            drop(jobs);
            return self.claim(pos, until.min(end), &part_of(bytes, 0, until.min(end) - pos));
        }
        let length = range.end.min(end) - pos;
        let data = pos..pos + length;
        let fill = self.filled(&range, &data, &task);
        let segment = (pos, part_of(bytes, 0, length));
        let reserve = task == Task::Reserve;
        let state = if reserve { State::Sealed } else { State::Gathering(vec![segment]) };
        let job = Arc::new(Job { range, fill, state: Rank::Job.mutex(state) });
        let flight =
            self.start(Arc::clone(&job), move |inner, job| async move { inner.carry_out(&job, task).await }.boxed());
        jobs.insert(job, flight.clone());
        // Room that was only reserved is written in a second step.
        Ok(if reserve { Claim::After { length, flight } } else { Claim::Given { length, flight } })
    }

    /// A job's flight: it lets go of its claim at the end.
    pub(super) fn start(
        self: &Arc<Self>,
        job: Arc<Job>,
        work: impl FnOnce(Arc<Self>, Arc<Job>) -> BoxFuture<'static, Result<(), ImageError>> + Send + 'static,
    ) -> Flight {
        let inner = Arc::clone(self);
        async move {
            let done = work(Arc::clone(&inner), Arc::clone(&job)).await;
            let entry = inner.jobs.shard(job.range.start).remove(job.range.start);
            drop(entry);
            done
        }
        .boxed()
        .shared()
    }

    /// What becomes of a write to what somebody has claimed.
    fn along(&self, job: &Job, flight: Flight, pos: u64, end: u64, bytes: &IoVector) -> Claim {
        if job.fill.contains(&pos) {
            let length = end.min(job.fill.end) - pos;
            match &mut *job.state.lock() {
                State::Gathering(segments) => {
                    self.counters.joined();
                    segments.push((pos, part_of(bytes, 0, length)));
                    return Claim::Given { length, flight };
                }
                State::Open { places, shared } => {
                    if let Some(place) = places.iter().find(|place| place.guest.contains(&pos)) {
                        self.counters.joined();
                        *shared = true;
                        let length = length.min(place.guest.end - pos);
                        return Claim::Beside { host: place.host + (pos - place.guest.start), length, flight };
                    }
                }
                State::Sealed => {}
            }
        }
        Claim::Wait { length: end.min(job.range.end) - pos, flight }
    }

    /// What the bytes from `pos` on need to be written, by the entries of their clusters; no more of them are looked at than it takes.
    fn needed(
        &self,
        pos: u64,
        end: u64,
        entries: &mut dyn Iterator<Item = Result<L2Entry, ImageError>>,
    ) -> Result<Needed, ImageError> {
        let cluster = self.geometry.cluster_size();
        let start = pos & !(cluster - 1);
        let first = entries.next().unwrap_or(Ok(L2Entry::NONE))?;
        let (mut length, kind) = self.alike(first, pos, (start + cluster).min(end));
        if let Kind::Own { host, copied: true } = kind {
            while pos + length < end && (pos + length) & (cluster - 1) == 0 {
                let Some(entry) = entries.next().transpose()? else { break };
                match self.alike(entry, pos + length, (pos + length + cluster).min(end)) {
                    (more, Kind::Own { host: next, copied: true }) if next == host + length => length += more,
                    _ => break,
                }
            }
            return Ok(Needed::InPlace { host, length });
        }
        let goes_on = |entry: L2Entry, number: u64| match (class(first), class(entry)) {
            (Class::Own(host), next) => next == Class::Own(host + number * cluster),
            (_, Class::Own(_)) => false,
            (before, next) => !self.geometry.extended_l2 || before == next,
        };
        let mut alike = vec![first];
        for entry in entries {
            let entry = entry?;
            if !goes_on(entry, alike.len() as u64) {
                break;
            }
            alike.push(entry);
        }
        let (range, task) = self.extent_of(pos, end, alike);
        Ok(Needed::Job { range, task })
    }

    /// What a job that begins with the byte at `pos` has to claim, and what it does. `entries` are of clusters that one job can be about.
    fn extent_of(&self, pos: u64, end: u64, entries: Vec<L2Entry>) -> (Range<u64>, Task) {
        let cluster = self.geometry.cluster_size();
        let start = pos & !(cluster - 1);
        let first = entries.first().copied().unwrap_or(L2Entry::NONE);
        if let Class::Own(host) = class(first) {
            let unit = self.geometry.subcluster_size();
            let begin = pos & !(unit - 1);
            let mut until = begin;
            while until < end {
                let entry =
                    usize::try_from((until - start) / cluster).ok().and_then(|index| entries.get(index)).copied();
                let Some(L2Entry::Standard { host: Some(there), copied: true, what }) = entry else { break };
                let bit = if self.geometry.extended_l2 { 1 << ((until / unit) & 31) } else { 1 };
                if there.0.wrapping_sub(until & !(cluster - 1)) != host.wrapping_sub(start) || what.allocated & bit != 0
                {
                    break;
                }
                until += unit;
            }
            return (begin..until.max(begin + unit), Task::InOwn { host: host + (begin - start), start, entries });
        }
        let range = start..start + ((entries.len().max(1) as u64) << self.geometry.cluster_bits);
        if self.geometry.extended_l2 && class(first) == Class::Bare {
            return (range, Task::Reserve);
        }
        (range, Task::New { start, entries })
    }

    /// What of a job's range will be right when it is done.
    fn filled(&self, range: &Range<u64>, data: &Range<u64>, task: &Task) -> Range<u64> {
        let unit = self.geometry.subcluster_size();
        match task {
            Task::New { entries, .. }
                if self.geometry.extended_l2 && entries.first().is_some_and(|entry| class(*entry) == Class::Shared) =>
            {
                data.start & !(unit - 1)..data.end.next_multiple_of(unit).min(range.end)
            }
            Task::Reserve => range.end..range.end,
            _ => range.clone(),
        }
    }
}

/// A write in place under way. If it is dropped it goes on elsewhere, and its cluster counts as in use until it is over.
struct InPlace {
    request: Option<(Request, Guard<Dropped>)>,
    orphans: Arc<RankedMutex<Vec<Orphan>>>,
}

/// Something that nobody waits for any more.
pub(super) type Orphan = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Future for InPlace {
    type Output = Result<(), ImageError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some((request, _)) = &mut self.request else { return Poll::Ready(Ok(())) };
        let Poll::Ready(done) = request.as_mut().poll(context) else { return Poll::Pending };
        self.request = None;
        Poll::Ready(Ok(done?))
    }
}

impl Drop for InPlace {
    fn drop(&mut self) {
        if let Some((request, guard)) = self.request.take() {
            let rest = async move {
                let _ = request.await;
                drop(guard);
            };
            self.orphans.lock().push(Box::pin(rest));
        }
    }
}
