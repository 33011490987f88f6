//! Zeroing and discarding: entries of whole clusters or subclusters change, contents do not.

use std::ops::Range;
use std::sync::Arc;

use limosa_storage::{IoVector, ZeroOptions};

use super::super::allocator::Allocator;
use super::super::context::Context;
use super::super::counters::OperationKind;
use super::super::flusher::Flusher;
use super::super::guest_data::GuestData;
use super::super::header_owner::HeaderOwner;
use super::super::layers::push_zeros;
use super::super::lookup::{Extent, Kind, Lookup};
use super::super::owners::Owners;
use super::super::shared_future::SharedFuture;
use super::super::tables::Tables;
use super::copier::Copier;
use super::in_flight::{InFlightAllocation, InFlightAllocations, State};
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset, length};
use crate::qcow2::format::entry::{L2Entry, Subclusters};

/// The most zeros that are written at once where entries cannot say it.
const PIECE: u64 = 2 << 20;

/// How a part of the disk comes to read as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Zeroing {
    /// Space stays.
    Keep,
    /// Space is given back.
    Unmap,
    /// As above, but only whole clusters: nothing is written.
    Discard,
}

/// Properties of the image that determine a zeroed entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// Something is seen where there is nothing.
    backed: bool,
    /// There are zero clusters.
    zero_flag: bool,
    /// Contents have to be right in the data file itself.
    raw_data: bool,
}

impl Rules {
    pub(super) fn of(context: &Context) -> Self {
        let (backed, raw_data) = (context.backing().is_some(), context.has_raw_data_file());
        Self { backed, zero_flag: context.rules().version > 2, raw_data }
    }

    /// Whether an entry can say that a cluster is zeros.
    pub(super) const fn entries_can_zero(self) -> bool {
        self.zero_flag || !self.backed
    }
}

/// The ends of a zeroing.
#[derive(Debug, Clone, Copy)]
struct Reach {
    /// The end of the request.
    end: GuestOffset,
    /// The whole clusters, or subclusters, of it end here; the one behind is cut by `end`.
    whole: GuestOffset,
    /// The end of whole units with that one included, if `end` is the disk's own: bytes past it are not the guest's.
    last: GuestOffset,
}

impl Reach {
    /// Up to where whole ones are zeroed in a disk that is now so long: what has come to it is the guest's.
    const fn until(self, size: u64) -> GuestOffset {
        if size > self.end.0 { self.whole } else { self.last }
    }
}

/// Zeroes and discards.
pub(super) struct Zeroer {
    context: Arc<Context>,
    header: Arc<HeaderOwner>,
    allocator: Arc<Allocator>,
    tables: Arc<Tables>,
    flusher: Arc<Flusher>,
    guest_data: Arc<GuestData>,
    in_flight: Arc<InFlightAllocations>,
    /// Writes the zeros that entries cannot express.
    copier: Arc<Copier>,
}

impl Zeroer {
    pub(super) fn new(owners: &Owners, in_flight: Arc<InFlightAllocations>, copier: Arc<Copier>) -> Self {
        let Owners { context, header, allocator, tables, flusher, guest_data, .. } = owners;
        Self {
            context: Arc::clone(context),
            header: Arc::clone(header),
            allocator: Arc::clone(allocator),
            tables: Arc::clone(tables),
            flusher: Arc::clone(flusher),
            guest_data: Arc::clone(guest_data),
            in_flight,
            copier,
        }
    }

    /// Makes `length` bytes at `at` read as zeros.
    pub(super) async fn zero(
        self: Arc<Self>,
        at: GuestOffset,
        length: u64,
        zeroing: Zeroing,
    ) -> Result<(), ImageError> {
        self.allocator.begin_writing().await?;
        let geometry = self.context.geometry();
        let unit = if zeroing == Zeroing::Discard { geometry.cluster_size() } else { geometry.subcluster_size() };
        let end = at + length;
        let first = at.align_up(unit);
        let whole = end.align_down(unit);
        // Bytes past the end of the disk in its last cluster are not the guest's.
        let last = if end.0 == self.header.size() { end.align_up(unit) } else { whole };
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
        if reach.until(self.header.size()) < last {
            // The disk has become longer: its last cluster may have been left as it was.
            self.zero_bytes(whole..end, zeroing).await?;
        }
        self.flusher.flush_if_pressed().await
    }

    /// Bytes that are not whole clusters.
    async fn zero_bytes(&self, range: Range<GuestOffset>, zeroing: Zeroing) -> Result<(), ImageError> {
        if zeroing == Zeroing::Discard || range.is_empty() {
            return Ok(());
        }
        self.write_zeros(range).await
    }

    /// Writes zeros wherever a range has other contents.
    pub(super) async fn write_zeros(&self, range: Range<GuestOffset>) -> Result<(), ImageError> {
        let mut pos = range.start;
        while pos < range.end {
            let in_use = self.allocator.enter();
            let Extent { length, kind } = self.tables.extent(pos, range.end).await?;
            drop(in_use);
            let length = length.min(PIECE);
            let there = match kind {
                Kind::Zero { .. } => false,
                Kind::Backing { .. } => self.guest_data.backing_holds(pos) > 0,
                _ => true,
            };
            // A job may be about to put something there.
            let claimed = self.in_flight.claims(&(pos..pos + length));
            if there || claimed {
                let mut zeros = IoVector::new();
                push_zeros(&mut zeros, length, self.context.zeros());
                Arc::clone(&self.copier).write(pos, zeros).await?;
            }
            pos += length;
        }
        Ok(())
    }

    /// Whole clusters or subclusters from `pos` on: how far it came.
    async fn zero_units(
        self: &Arc<Self>,
        pos: GuestOffset,
        reach: Reach,
        zeroing: Zeroing,
    ) -> Result<GuestOffset, ImageError> {
        let rules = Rules::of(&self.context);
        if !rules.entries_can_zero() {
            let until = (pos + PIECE).min(reach.last);
            self.write_zeros(pos..until.min(reach.end)).await?;
            return Ok(until);
        }
        // While a slice is being read its table is not used for something else.
        let in_use = self.allocator.enter();
        let begun = self.begin_zeros(pos, reach, zeroing, rules)?;
        if let Begun::Load(slice) = begun {
            self.tables.load(slice).await?;
        }
        drop(in_use);
        match begun {
            Begun::Nothing(until) => Ok(until),
            Begun::Load(_) => Ok(pos),
            Begun::Wait(job) => {
                // Its contents come first, even if it fails.
                let _ = job.await;
                Ok(pos)
            }
            Begun::Write(range) => {
                self.write_zeros(range.start..range.end.min(reach.end)).await?;
                Ok(range.end)
            }
            Begun::Entries(job, until) => {
                job.await?;
                Ok(until)
            }
        }
    }

    /// Decides what has to be done from `pos` on, and claims what is changed.
    fn begin_zeros(
        self: &Arc<Self>,
        pos: GuestOffset,
        reach: Reach,
        zeroing: Zeroing,
        rules: Rules,
    ) -> Result<Begun, ImageError> {
        let mut jobs = self.in_flight.shard(pos);
        if let Some((_, job)) = jobs.at(pos) {
            return Ok(Begun::Wait(job));
        }
        let mut range = match self.claim_zeros(pos, reach.last, zeroing, rules)? {
            Lookup::Load(slice) => return Ok(Begun::Load(slice)),
            Lookup::Found(ZeroClaim::Nothing(until)) => return Ok(Begun::Nothing(until)),
            Lookup::Found(ZeroClaim::Write(range)) => return Ok(Begun::Write(range)),
            Lookup::Found(ZeroClaim::Entries(range)) => range,
        };
        if let Some((job, _)) = jobs.overlapping(&range) {
            let until = job.range.start.align_down(self.context.geometry().cluster_size());
            range.end = if until > pos { until } else { job.range.start };
        }
        let until = range.end;
        let zeroer = Arc::clone(self);
        let future = self.in_flight.start(&range.clone(), {
            let range = range.clone();
            async move { zeroer.zero_entries(&range, reach, zeroing, rules).await }
        })?;
        jobs.insert(InFlightAllocation::new(range, until..until, State::Sealed), future.clone())?;
        Ok(Begun::Entries(future, until))
    }

    /// The work from `pos` on.
    fn claim_zeros(
        &self,
        pos: GuestOffset,
        end: GuestOffset,
        zeroing: Zeroing,
        rules: Rules,
    ) -> Result<Lookup<ZeroClaim>, ImageError> {
        let cluster = self.context.geometry().cluster_size();
        match self.tables.look(pos, end)? {
            Lookup::Load(slice) => return Ok(Lookup::Load(slice)),
            Lookup::Found(Extent { length, kind }) => {
                let nothing = match kind {
                    Kind::Zero { .. } => zeroing == Zeroing::Keep || !kind.is_for_itself(),
                    Kind::Backing { .. } => !rules.backed && (zeroing == Zeroing::Keep || !kind.is_for_itself()),
                    _ => false,
                };
                // Up to the next unit of another kind; a raw data file is right where nothing was ever written.
                let until = pos + length;
                if nothing {
                    return Ok(Lookup::Found(ZeroClaim::Nothing(until)));
                }
            }
        }
        let start = pos.align_down(cluster);
        let whole = |index: u64| pos <= start + index * cluster && start + (index + 1) * cluster <= end;
        // Subclusters of compressed clusters cannot be zeroed on their own: up to the first one that is not zeroed as a
        // whole, and how many clusters that is.
        let count = self.tables.visit(pos, end, |entries| {
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
            Lookup::Load(slice) => Lookup::Load(slice),
            Lookup::Found(0) => Lookup::Found(ZeroClaim::Write(pos..(start + cluster).min(end))),
            Lookup::Found(count) => Lookup::Found(ZeroClaim::Entries(pos..(start + count * cluster).min(end))),
        })
    }

    async fn zero_entries(
        &self,
        range: &Range<GuestOffset>,
        reach: Reach,
        zeroing: Zeroing,
        rules: Rules,
    ) -> Result<(), ImageError> {
        let geometry = self.context.geometry();
        let cluster = geometry.cluster_size();
        let bytes = range.start..range.end.min(reach.end);
        if rules.raw_data {
            self.zero_raw_data(&bytes, zeroing).await?;
            if !rules.backed {
                // What the entries lead to are zeros. A write in place meanwhile came before or after them, for those
                // who read the file as well.
                return Ok(());
            }
        }
        let start = range.start.align_down(cluster);
        let (mut dropped, mut kept) = (Vec::new(), false);
        let change = |index: usize, old| {
            let at = start + index as u64 * cluster;
            // Here, where nothing finds out meanwhile that it may write there in place.
            let until = range.end.min(reach.until(self.header.size()));
            if at >= until {
                return old;
            }
            let whole = range.start <= at && at + cluster <= until;
            let bits = if whole { u32::MAX } else { geometry.subclusters_in(&(range.start..until), at) };
            let (new, drops) = zeroed(old, bits, zeroing, rules, geometry.extended_l2);
            // In a data file a cluster that is dropped has its place all the same, and is written there again at once.
            let stays = !drops || self.context.has_data_file();
            kept |= stays && matches!(old, L2Entry::Standard { host: Some(_), .. });
            if drops {
                dropped.push(old);
            }
            new
        };
        self.tables.change(range.start, geometry.clusters_touched(range), change).await?;
        // Nothing writes there before this job is over.
        if kept {
            self.tables.zeroed_in_place();
        }
        self.allocator.drop_entries(dropped).await?;
        if self.context.has_data_file() && !rules.raw_data && zeroing != Zeroing::Keep {
            // Only now: before, a read would see zeros, and a write in place that follows would be lost with the entry.
            self.discard_data(&bytes).await;
        }
        Ok(())
    }

    /// Zeroes contents in a data file that others read raw.
    async fn zero_raw_data(&self, range: &Range<GuestOffset>, zeroing: Zeroing) -> Result<(), ImageError> {
        let bytes = range.start.in_data_file().0..range.end.in_data_file().0;
        self.context.counters().add(OperationKind::WriteZeroes, length(range));
        let how = ZeroOptions { unmap: zeroing != Zeroing::Keep, only_fast: false };
        Ok(self.context.data().write_zeroes(bytes, how).await?)
    }

    /// Discards contents in a data file that nothing refers to any more.
    async fn discard_data(&self, range: &Range<GuestOffset>) {
        if self.context.options().discard {
            let bytes = range.start.in_data_file().0..range.end.in_data_file().0;
            self.context.counters().add(OperationKind::Discard, length(range));
            // A storage need not take it back.
            let _ = self.context.data().discard(bytes).await;
        }
    }
}

/// A step of zeroing that was begun.
enum Begun {
    /// It is zeros up to here.
    Nothing(GuestOffset),
    /// First a slice has to be read.
    Load(HostOffset),
    /// First another job has to be done.
    Wait(SharedFuture),
    /// Zeros have to be written.
    Write(Range<GuestOffset>),
    /// Entries are changed, up to here.
    Entries(SharedFuture, GuestOffset),
}

/// The claim that zeroing needs.
enum ZeroClaim {
    /// It is zeros up to here.
    Nothing(GuestOffset),
    /// Zeros have to be written.
    Write(Range<GuestOffset>),
    /// Entries have to be changed.
    Entries(Range<GuestOffset>),
}

/// An entry with these of its subclusters zeroed (`u32::MAX`: the whole of it), and whether what it referred to is
/// dropped.
pub(super) fn zeroed(old: L2Entry, bits: u32, zeroing: Zeroing, rules: Rules, extended: bool) -> (L2Entry, bool) {
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
