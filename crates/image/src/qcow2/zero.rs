//! Zeroing and discarding: entries change, contents do not, as far as whole clusters or subclusters are concerned.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use limosa_storage::{IoVector, ZeroHow};

use super::counters::Purpose;
use super::entry::{L2Entry, Subclusters};
use super::image::Inner;
use super::jobs::{Job, State};
use super::layers::push_zeros;
use super::locks::Rank;
use super::look::{Kind, Look, Piece};
use super::slices::Flight;
use crate::error::ImageError;

/// The most zeros that are written at once where entries cannot say it.
const PIECE: u64 = 2 << 20;

/// What is to become of a part of the disk: it reads as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Zeroing {
    /// Space stays.
    Keep,
    /// Space is given back.
    Unmap,
    /// As above, but only whole clusters: nothing is written.
    Discard,
}

/// What else decides what a zeroed entry looks like.
#[derive(Debug, Clone, Copy)]
struct Rules {
    /// Something is seen where there is nothing.
    backed: bool,
    /// There are zero clusters.
    zero_flag: bool,
    /// Contents have to be right in the data file itself.
    raw_data: bool,
}

/// How far a zeroing goes.
#[derive(Debug, Clone, Copy)]
struct Reach {
    /// Where it ends.
    end: u64,
    /// The whole clusters, or subclusters, of it end here; the one behind is cut by `end`.
    whole: u64,
    /// The same, with that one, if `end` is the disk's own: what lies behind it is nobody's.
    last: u64,
}

impl Reach {
    /// Up to where whole ones are zeroed in a disk that is now so long: what has come to it is the guest's.
    const fn until(self, size: u64) -> u64 {
        if size > self.end { self.whole } else { self.last }
    }
}

impl Inner {
    fn zero_rules(&self) -> Rules {
        let raw_data = self.has_data_file && self.header.lock().features.raw_data_file();
        Rules { backed: self.backing.is_some(), zero_flag: self.rules.version > 2, raw_data }
    }

    /// Has `length` bytes at `at` read as zeros.
    pub(super) async fn zero(self: Arc<Self>, at: u64, length: u64, zeroing: Zeroing) -> Result<(), ImageError> {
        self.begin_writing().await?;
        let unit =
            if zeroing == Zeroing::Discard { self.geometry.cluster_size() } else { self.geometry.subcluster_size() };
        let size = self.size.load(Ordering::Acquire);
        let end = at + length;
        let first = at.next_multiple_of(unit);
        let whole = end & !(unit - 1);
        // What lies behind the end of the disk in its last cluster is nobody's.
        let last = if end == size { end.next_multiple_of(unit) } else { whole };
        if first >= last {
            return self.zero_bytes(at..end, zeroing).await;
        }
        self.zero_bytes(at..first.min(end), zeroing).await?;
        self.zero_bytes(last.min(end)..end, zeroing).await?;
        let reach = Reach { end, whole, last };
        let mut pos = first;
        while pos < last {
            pos = self.zero_units(pos, reach, zeroing).await?;
        }
        if reach.until(self.size.load(Ordering::Acquire)) < last {
            // The disk has become longer: its last cluster may have been left as it was.
            self.zero_bytes(whole..end, zeroing).await?;
        }
        if self.l2.presses() {
            self.settle().await?;
        }
        Ok(())
    }

    /// Bytes that are not whole clusters.
    async fn zero_bytes(self: &Arc<Self>, range: Range<u64>, zeroing: Zeroing) -> Result<(), ImageError> {
        if zeroing == Zeroing::Discard || range.is_empty() {
            return Ok(());
        }
        self.write_zeros(range).await
    }

    /// Writes zeros where something else is.
    pub(super) fn write_zeros(self: &Arc<Self>, range: Range<u64>) -> BoxFuture<'static, Result<(), ImageError>> {
        let inner = Arc::clone(self);
        async move {
            let mut pos = range.start;
            while pos < range.end {
                let guard = inner.epochs.enter();
                let Piece { length, kind } = inner.piece(pos, range.end).await?;
                drop(guard);
                let length = length.min(PIECE);
                let there = match kind {
                    Kind::Zero { .. } => false,
                    Kind::Backing { .. } => inner.backing_holds(pos) > 0,
                    _ => true,
                };
                // A job may be about to put something there.
                let claimed = inner.jobs.claims(&(pos..pos + length));
                if there || claimed {
                    let mut zeros = IoVector::new();
                    push_zeros(&mut zeros, length, &inner.zeros);
                    Arc::clone(&inner).write(pos, zeros).await?;
                }
                pos += length;
            }
            Ok(())
        }
        .boxed()
    }

    /// Whole clusters or subclusters from `pos` on: how far it came.
    async fn zero_units(self: &Arc<Self>, pos: u64, reach: Reach, zeroing: Zeroing) -> Result<u64, ImageError> {
        let rules = self.zero_rules();
        if !rules.zero_flag && rules.backed {
            let until = (pos + PIECE).min(reach.last);
            self.write_zeros(pos..until.min(reach.end)).await?;
            return Ok(until);
        }
        // While a slice is being read its table is nobody else's.
        let guard = self.epochs.enter();
        let begun = self.begin_zeros(pos, reach, zeroing, rules)?;
        if let Begun::Load(key) = begun {
            self.load(key).await?;
        }
        drop(guard);
        match begun {
            Begun::Nothing(until) => Ok(until),
            Begun::Load(_) => Ok(pos),
            Begun::Wait(flight) => {
                // Its contents come first, whatever becomes of them.
                let _ = flight.await;
                Ok(pos)
            }
            Begun::Write(range) => {
                self.write_zeros(range.start..range.end.min(reach.end)).await?;
                Ok(range.end)
            }
            Begun::Entries(flight, until) => {
                flight.await?;
                Ok(until)
            }
        }
    }

    /// Decides what has to be done from `pos` on, and claims what is changed.
    fn begin_zeros(
        self: &Arc<Self>,
        pos: u64,
        reach: Reach,
        zeroing: Zeroing,
        rules: Rules,
    ) -> Result<Begun, ImageError> {
        let mut jobs = self.jobs.shard(pos);
        if let Some((_, flight)) = jobs.at(pos) {
            return Ok(Begun::Wait(flight));
        }
        let mut range = match self.claim_zeros(pos, reach.last, zeroing, rules)? {
            Err(key) => return Ok(Begun::Load(key)),
            Ok(ZeroClaim::Nothing(until)) => return Ok(Begun::Nothing(until)),
            Ok(ZeroClaim::Write(range)) => return Ok(Begun::Write(range)),
            Ok(ZeroClaim::Entries(range)) => range,
        };
        if let Some((job, _)) = jobs.overlapping(&range) {
            let until = job.range.start & !(self.geometry.cluster_size() - 1);
            range.end = if until > pos { until } else { job.range.start };
        }
        let until = range.end;
        let job = Arc::new(Job { fill: until..until, range, state: Rank::Job.mutex(State::Sealed) });
        let flight = self.start(Arc::clone(&job), move |inner, job| {
            async move { inner.zero_entries(&job.range, reach, zeroing, rules).await }.boxed()
        });
        jobs.insert(job, flight.clone());
        Ok(Begun::Entries(flight, until))
    }

    /// What has to be done from `pos` on; `Err`: a slice has to be read.
    fn claim_zeros(
        &self,
        pos: u64,
        end: u64,
        zeroing: Zeroing,
        rules: Rules,
    ) -> Result<Result<ZeroClaim, u64>, ImageError> {
        let cluster = self.geometry.cluster_size();
        match self.look(pos, end)? {
            Look::Load(key) => return Ok(Err(key)),
            Look::Piece(Piece { length, kind }) => {
                let nothing = match kind {
                    Kind::Zero { .. } => zeroing == Zeroing::Keep || !kind.is_for_itself(),
                    Kind::Backing { .. } => !rules.backed && (zeroing == Zeroing::Keep || !kind.is_for_itself()),
                    _ => false,
                };
                // As far as whole units are alike; a raw data file is right where nothing was ever written.
                let until = if length == end - pos { end } else { pos + length };
                if nothing {
                    return Ok(Ok(ZeroClaim::Nothing(until)));
                }
            }
        }
        let start = pos & !(cluster - 1);
        let whole = |index: u64| pos <= start + index * cluster && start + (index + 1) * cluster <= end;
        // Subclusters of compressed clusters cannot be zeroed on their own: up to the first one that is not zeroed as a whole, and how many
        // clusters that is.
        let count = self.visit_entries(pos, end, |entries| {
            let mut count = 0;
            for entry in entries {
                if matches!(entry?, L2Entry::Compressed { .. }) && !whole(count) {
                    break;
                }
                count += 1;
            }
            Ok(count)
        })?;
        Ok(match count {
            Err(key) => Err(key),
            Ok(0) => Ok(ZeroClaim::Write(pos..(start + cluster).min(end))),
            Ok(count) => Ok(ZeroClaim::Entries(pos..(start + count * cluster).min(end))),
        })
    }

    async fn zero_entries(
        self: &Arc<Self>,
        range: &Range<u64>,
        reach: Reach,
        zeroing: Zeroing,
        rules: Rules,
    ) -> Result<(), ImageError> {
        let cluster = self.geometry.cluster_size();
        if self.has_data_file {
            self.zero_data_file(&(range.start..range.end.min(reach.end)), zeroing, rules).await?;
        }
        let start = range.start & !(cluster - 1);
        let count = usize::try_from(range.end.div_ceil(cluster) - range.start / cluster).unwrap_or(0);
        let (mut dropped, mut kept) = (Vec::new(), false);
        self.change_entries(range.start, count, |index, old| {
            let at = start + index as u64 * cluster;
            // Here, where nobody finds out meanwhile that he may write there in place.
            let until = range.end.min(reach.until(self.size.load(Ordering::Acquire)));
            if at >= until {
                return old;
            }
            let whole = range.start <= at && at + cluster <= until;
            let bits = if whole { u32::MAX } else { self.bits(&(range.start..until), at) };
            let (new, drops) = zeroed(old, bits, zeroing, rules, self.geometry.extended_l2);
            if drops {
                dropped.push(old);
            } else if matches!(old, L2Entry::Standard { host: Some(_), .. }) {
                kept = true;
            }
            new
        })
        .await?;
        // Nobody writes there before this job is over.
        if kept {
            self.zeroings.fetch_add(1, Ordering::AcqRel);
        }
        self.drop_entries(dropped).await
    }

    /// In a data file contents lie where the guest sees them: they are zeroed if somebody may read it raw, else forgotten.
    async fn zero_data_file(&self, range: &Range<u64>, zeroing: Zeroing, rules: Rules) -> Result<(), ImageError> {
        let (range, length) = (range.clone(), range.end.saturating_sub(range.start));
        if rules.raw_data {
            self.counters.add(Purpose::WriteZeroes, length);
            let how = ZeroHow { unmap: zeroing != Zeroing::Keep, only_fast: false };
            self.data.write_zeroes(range, how).await?;
        } else if zeroing != Zeroing::Keep && self.options.discard {
            self.counters.add(Purpose::Discard, length);
            // Whether the storage takes it back is its affair.
            let _ = self.data.discard(range).await;
        }
        Ok(())
    }
}

/// What was begun to have a part of the disk zeroed.
enum Begun {
    /// It is zeros up to here.
    Nothing(u64),
    /// First a slice has to be read.
    Load(u64),
    /// First somebody else has to be done.
    Wait(Flight),
    /// Zeros have to be written.
    Write(Range<u64>),
    /// Entries are changed, up to here.
    Entries(Flight, u64),
}

/// What zeroing takes.
enum ZeroClaim {
    /// It is zeros up to here.
    Nothing(u64),
    /// Zeros have to be written.
    Write(Range<u64>),
    /// Entries have to be changed.
    Entries(Range<u64>),
}

/// An entry with these of its subclusters zeroed (`u32::MAX`: the whole of it), and whether what it referred to is dropped.
fn zeroed(old: L2Entry, bits: u32, zeroing: Zeroing, rules: Rules, extended: bool) -> (L2Entry, bool) {
    let nothing = if rules.backed && rules.zero_flag {
        L2Entry::Standard { host: None, copied: false, what: Subclusters::ZERO }
    } else {
        L2Entry::NONE
    };
    match old {
        L2Entry::Compressed { .. } => (nothing, true),
        L2Entry::Standard { host, copied, what } => {
            if extended && bits != u32::MAX {
                let what = Subclusters { allocated: what.allocated & !bits, zero: what.zero | bits };
                return (L2Entry::Standard { host, copied, what }, false);
            }
            let keep = rules.zero_flag && host.is_some() && copied && (zeroing == Zeroing::Keep || rules.raw_data);
            if keep {
                (L2Entry::Standard { host, copied, what: Subclusters::ZERO }, false)
            } else {
                (nothing, host.is_some())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offset::HostOffset;

    const PLAIN: Rules = Rules { backed: false, zero_flag: true, raw_data: false };

    fn own(what: Subclusters) -> L2Entry {
        L2Entry::Standard { host: Some(HostOffset(0x5_0000)), copied: true, what }
    }

    fn nowhere(what: Subclusters) -> L2Entry {
        L2Entry::Standard { host: None, copied: false, what }
    }

    #[test]
    fn space_is_kept_or_given_back_and_zeros_hide_the_backing_image() {
        let data = own(Subclusters::ALLOCATED);
        let zero = |rules, zeroing| zeroed(data, u32::MAX, zeroing, rules, false);
        let backed = Rules { backed: true, ..PLAIN };
        assert_eq!(zero(PLAIN, Zeroing::Keep), (own(Subclusters::ZERO), false));
        assert_eq!(zero(PLAIN, Zeroing::Unmap), (L2Entry::NONE, true));
        assert_eq!(zero(backed, Zeroing::Discard), (nowhere(Subclusters::ZERO), true));
        assert_eq!(zero(Rules { zero_flag: false, ..PLAIN }, Zeroing::Keep), (L2Entry::NONE, true));
        assert_eq!(zero(Rules { raw_data: true, ..backed }, Zeroing::Unmap), (own(Subclusters::ZERO), false));
        assert_eq!(zeroed(L2Entry::NONE, u32::MAX, Zeroing::Keep, backed, false), (nowhere(Subclusters::ZERO), false));
    }

    #[test]
    fn subclusters_are_zeroed_one_by_one_and_the_cluster_stays() {
        let old = own(Subclusters { allocated: 0xff, zero: 0xf00 });
        let new = own(Subclusters { allocated: 0xf0, zero: 0xf0f });
        assert_eq!(zeroed(old, 0xf, Zeroing::Unmap, PLAIN, true), (new, false));
    }
}
