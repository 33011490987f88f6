//! The plan of reads and writes for a write that needs new space.
//!
//! Law: a plan is data, and a pure function of what is wanted and what is known: nothing is read, written or asked for
//! it. Contents that have to be around the guest's bytes are read at once, with what lies between them if that is no
//! more than 16 KiB; then everything is written by one operation. What is known to be zeros is not read, and not
//! written where the storage proves zeros already. Contents that lie where they can be shared are cloned instead
//! ([`Want::cloning`]), which leaves the same bytes, and takes no more operations.

use std::ops::Range;

use crate::offset::{GuestOffset, Shift, length};

/// The most bytes that are read in vain to save an operation.
const WASTE: u64 = 16 << 10;

/// The origin of contents. Two parts with the same origin are neighbours there, too, if they are here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// The backing image.
    Backing,
    /// The data storage.
    Host(Shift),
    /// The compressed cluster whose guest offset this is.
    Compressed(GuestOffset),
}

/// Contents that have to be around the guest's bytes, at guest offsets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) range: Range<GuestOffset>,
    pub(super) origin: Origin,
}

/// Contents that lie together in the storage of this number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) range: Range<GuestOffset>,
    /// The origin: contents of others have their own place there.
    pub(super) origin: Origin,
    pub(super) shift: Shift,
    pub(super) storage: usize,
}

impl Source {
    pub(super) fn holds(&self, origin: Origin, range: &Range<GuestOffset>) -> bool {
        self.origin == origin && self.range.start <= range.start && range.end <= self.range.end
    }
}

/// The goal of a plan. All offsets are the guest's.
#[derive(Debug, Clone)]
pub(super) struct Want {
    /// The range that must be right afterwards, the guest's bytes included.
    pub(super) fill: Range<GuestOffset>,
    /// The guest's bytes.
    pub(super) data: Range<GuestOffset>,
    /// Contents around them; all the rest is zeros. In order, outside `data`.
    pub(super) contents: Vec<Part>,
    /// The storage proves that the new place reads as zeros.
    pub(super) zeroed: bool,
    /// Alignment of writes; a power of two.
    pub(super) align: u64,
}

/// The operations: all clones or all reads at once, and the write when they are over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// Contents that are cloned: then nothing is read, and only the guest's bytes are written.
    pub(super) clones: Vec<Source>,
    pub(super) reads: Vec<Part>,
    pub(super) write: Range<GuestOffset>,
    /// Nothing but the guest's bytes is written: others may write theirs along.
    pub(super) open: bool,
}

impl Want {
    /// The plan that copies contents.
    pub(super) fn copying(&self) -> Plan {
        let mut reads: Vec<Part> = Vec::new();
        for part in &self.contents {
            match reads.last_mut() {
                Some(last) if last.origin == part.origin && part.range.start <= last.range.end + WASTE => {
                    last.range.end = part.range.end;
                }
                _ => reads.push(part.clone()),
            }
        }
        let write = self.written();
        let open = reads.is_empty() && write == self.data && self.zeroed;
        Plan { clones: Vec::new(), reads, write, open }
    }

    /// The range that is written.
    fn written(&self) -> Range<GuestOffset> {
        let mut all = if self.zeroed { self.data.clone() } else { self.fill.clone() };
        for part in &self.contents {
            all = all.start.min(part.range.start)..all.end.max(part.range.end);
        }
        // Zeros may be written all over the fill: a storage with blocks would otherwise have to read around the ends.
        let start = all.start.align_down(self.align).max(self.fill.start.min(all.start));
        let end = all.end.checked_align_up(self.align).unwrap_or(all.end).min(self.fill.end.max(all.end));
        start..end
    }

    /// Whether it is worth it to find out where contents lie: a copy of them would be one of `least` bytes or more.
    pub(super) fn may_clone(&self, least: u64) -> bool {
        let copied: u64 = self.contents.iter().map(|part| length(&part.range)).sum();
        // Parts of blocks would be filled up by the storage with what it reads.
        let whole = self.data.start.within(self.align) == 0 && self.data.end.within(self.align) == 0;
        whole && copied > 0 && copied >= least
    }

    /// The plan that clones all contents in whole blocks, and then writes the guest's bytes only; `None`: they do not
    /// lie so, something else would have to be written, or it would take more operations. `to`: the new place.
    pub(super) fn cloning(&self, sources: &[Source], block: u64, to: Shift) -> Option<Plan> {
        let mut clones: Vec<Source> = Vec::new();
        for part in &self.contents {
            let range = whole_blocks(&part.range, block)?;
            if !self.is_data(&(range.start..part.range.start)) || !self.is_data(&(part.range.end..range.end)) {
                return None;
            }
            let source = sources.iter().find(|source| source.holds(part.origin, &range))?;
            match clones.last_mut() {
                // What lies between is written over: to share it, too, costs nothing.
                Some(last)
                    if (last.origin, last.storage, last.shift) == (source.origin, source.storage, source.shift)
                        && self.is_data(&(last.range.end..range.start)) =>
                {
                    last.range.end = range.end;
                }
                _ => clones.push(Source { range, ..*source }),
            }
        }
        let reads = self.copying().reads.len();
        let aligned = to.is_aligned(block) && clones.iter().all(|clone| clone.shift.is_aligned(block));
        if clones.is_empty() || clones.len() > reads || !aligned || !(self.zeroed || self.is_filled(&clones)) {
            return None;
        }
        Some(Plan { clones, reads: Vec::new(), write: self.data.clone(), open: false })
    }

    fn is_data(&self, range: &Range<GuestOffset>) -> bool {
        range.start >= range.end || (self.data.start <= range.start && range.end <= self.data.end)
    }

    /// Whether the clones and the guest's bytes leave nothing to be filled.
    fn is_filled(&self, clones: &[Source]) -> bool {
        let mut filled: Vec<&Range<GuestOffset>> = clones.iter().map(|clone| &clone.range).collect();
        filled.push(&self.data);
        filled.sort_unstable_by_key(|range| range.start);
        let reached =
            filled.iter().fold(
                self.fill.start,
                |reached, range| {
                    if range.start <= reached { reached.max(range.end) } else { reached }
                },
            );
        reached >= self.fill.end
    }
}

/// The blocks that a range touches.
pub(super) fn whole_blocks(range: &Range<GuestOffset>, block: u64) -> Option<Range<GuestOffset>> {
    Some(range.start.align_down(block)..range.end.checked_align_up(block)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offset::HostOffset;

    const CLUSTER: Range<GuestOffset> = GuestOffset(640 << 10)..GuestOffset(704 << 10);

    /// KiB from the beginning of the disk.
    struct K;

    impl std::ops::Mul<K> for u64 {
        type Output = GuestOffset;

        fn mul(self, _: K) -> GuestOffset {
            GuestOffset(self * 1024)
        }
    }

    /// A distance in bytes.
    const fn by(bytes: u64) -> Shift {
        Shift::between(GuestOffset(0), HostOffset(bytes))
    }

    /// 4 KiB at 16 KiB of a cluster of 64 KiB.
    fn want() -> Want {
        let data = 656 * K..660 * K;
        Want { fill: CLUSTER, data, contents: Vec::new(), zeroed: false, align: 512 }
    }

    fn backed(range: Range<GuestOffset>) -> Part {
        Part { range, origin: Origin::Backing }
    }

    fn around(want: &Want) -> Vec<Part> {
        let sides = [want.fill.start..want.data.start, want.data.end..want.fill.end];
        sides.into_iter().filter(|side| !side.is_empty()).map(backed).collect()
    }

    /// A plan of one write.
    fn written(range: Range<GuestOffset>, open: bool) -> Plan {
        Plan { clones: Vec::new(), reads: Vec::new(), write: range, open }
    }

    /// The reads and the write.
    fn steps(want: &Want) -> (Vec<Part>, Range<GuestOffset>) {
        let plan = want.copying();
        (plan.reads, plan.write)
    }

    #[test]
    fn head_and_tail_are_read_at_once_and_everything_is_written_at_once() {
        let want = Want { contents: around(&want()), ..want() };
        assert_eq!(steps(&want), (vec![backed(CLUSTER)], CLUSTER));
        // Space that proves zeros changes nothing about it.
        assert_eq!(Want { zeroed: true, ..want.clone() }.copying(), want.copying());
    }

    #[test]
    fn a_middle_of_up_to_16_kib_is_read_in_vain_and_a_longer_one_is_skipped() {
        let with = |data: Range<GuestOffset>| {
            let want = Want { data, ..want() };
            Want { contents: around(&want), ..want }
        };
        assert_eq!(steps(&with(656 * K..672 * K)), (vec![backed(CLUSTER)], CLUSTER));
        assert_eq!(
            steps(&with(656 * K..672 * K + 512)),
            (vec![backed(640 * K..656 * K), backed(672 * K + 512..704 * K)], CLUSTER)
        );
    }

    #[test]
    fn only_a_head_or_only_a_tail_is_one_read() {
        let with = |data: Range<GuestOffset>| {
            let want = Want { data, ..want() };
            steps(&Want { contents: around(&want), ..want })
        };
        assert_eq!(with(640 * K..644 * K), (vec![backed(644 * K..704 * K)], CLUSTER));
        assert_eq!(with(700 * K..704 * K), (vec![backed(640 * K..700 * K)], CLUSTER));
        assert_eq!(with(CLUSTER), (vec![], CLUSTER));
    }

    #[test]
    fn without_contents_around_it_is_one_write_and_proven_zeros_are_not_written() {
        assert_eq!(want().copying(), written(CLUSTER, false));
        let data = want().data;
        assert_eq!(Want { zeroed: true, ..want() }.copying(), written(data, true));
    }

    #[test]
    fn what_the_backing_image_has_not_is_not_read() {
        // The backing image has something in front only, and not up to the data.
        let contents = vec![backed(644 * K..648 * K)];
        let want = Want { contents: contents.clone(), ..want() };
        assert_eq!(steps(&want), (vec![contents[0].clone()], CLUSTER));
        let proven = Want { zeroed: true, ..want };
        assert_eq!(steps(&proven), (vec![contents[0].clone()], 644 * K..660 * K));
    }

    #[test]
    fn contents_from_different_places_are_read_each_on_its_own() {
        let host = Part { range: 640 * K..656 * K, origin: Origin::Host(by(0x5_0000)) };
        let tail = backed(660 * K..704 * K);
        let want = Want { contents: vec![host.clone(), tail.clone()], ..want() };
        assert_eq!(steps(&want), (vec![host, tail], CLUSTER));
    }

    #[test]
    fn zeros_are_written_up_to_whole_blocks_and_others_may_not_write_along() {
        let data = 656 * K + 512..657 * K;
        let want = Want { data: data.clone(), zeroed: true, align: 4096, ..want() };
        assert_eq!(want.copying(), written(656 * K..660 * K, false));
        assert_eq!(Want { align: 512, ..want.clone() }.copying(), written(data.clone(), true));
        // Never beyond the fill: small clusters on large blocks.
        assert_eq!(steps(&Want { fill: data.clone(), ..want }), (vec![], data));
    }

    const LARGE: Range<GuestOffset> = GuestOffset(2 << 20)..GuestOffset(3 << 20);
    /// The new place.
    const TO: Shift = by(512 << 10);

    /// A write to a cluster of 1 MiB that has contents all around.
    fn large(data: Range<GuestOffset>) -> Want {
        let sides = [LARGE.start..data.start, data.end..LARGE.end];
        let contents = sides.into_iter().filter(|side| !side.is_empty());
        let contents = contents.map(|range| Part { range, origin: Origin::Backing }).collect();
        Want { fill: LARGE, data, contents, zeroed: false, align: 512 }
    }

    /// All in one place.
    fn together() -> Vec<Source> {
        vec![Source { range: LARGE, origin: Origin::Backing, shift: by(64 << 10), storage: 0 }]
    }

    fn clones(want: &Want, sources: &[Source]) -> Option<Vec<Range<GuestOffset>>> {
        let plan = want.cloning(sources, 4096, TO)?;
        assert_eq!((plan.reads, &plan.write, plan.open), (Vec::new(), &want.data, false));
        Some(plan.clones.into_iter().map(|clone| clone.range).collect())
    }

    fn one(range: Range<GuestOffset>) -> Option<Vec<Range<GuestOffset>>> {
        Some(std::iter::once(range).collect())
    }

    #[test]
    fn a_cluster_is_cloned_as_a_whole_and_the_guests_bytes_are_written_over_it() {
        // However long they are.
        for end in [2052, 2052 + 512] {
            assert_eq!(clones(&large(2048 * K + 4096..end * K + 4096), &together()), one(LARGE));
        }
        assert_eq!(clones(&large(2048 * K..2052 * K), &together()), one(2052 * K..LARGE.end));
    }

    #[test]
    fn blocks_are_filled_up_with_what_is_written_over_and_with_nothing_else() {
        let data = 2048 * K..2052 * K + 512;
        assert_eq!(clones(&large(data), &together()), one(2052 * K..LARGE.end));
        // The backing image ends within a block: what would come with it is not the guest's.
        let mut short = large(2048 * K..2052 * K);
        short.contents[0].range.end = 2500 * K + 512;
        short.zeroed = true;
        assert_eq!(clones(&short, &together()), None);
        short.contents[0].range.end = 2500 * K;
        assert_eq!(clones(&short, &together()), one(2052 * K..2500 * K));
    }

    #[test]
    fn zeros_beside_what_is_cloned_have_to_be_there_already() {
        let mut want = large(2048 * K..2052 * K);
        want.contents[0].range.end = 2500 * K;
        assert_eq!(clones(&want, &together()), None);
        want.zeroed = true;
        assert!(clones(&want, &together()).is_some());
    }

    #[test]
    fn what_lies_apart_is_cloned_apart_unless_it_takes_more_operations_than_a_copy() {
        let apart = |data: &Range<GuestOffset>, storage| {
            let head = Source { range: LARGE.start..data.start, ..together().remove(0) };
            [head, Source { range: data.end..LARGE.end, storage, ..together().remove(0) }]
        };
        let data = 2100 * K..2200 * K;
        let both = Some(vec![LARGE.start..data.start, data.end..LARGE.end]);
        assert_eq!(clones(&large(data.clone()), &apart(&data, 1)), both);
        // In one file, and in their order: one.
        assert_eq!(clones(&large(data.clone()), &apart(&data, 0)), one(LARGE));
        // Of a part of it is not known where it lies.
        assert_eq!(clones(&large(data.clone()), &apart(&data, 0)[..1]), None);
        // Head and tail are one read if little lies between them.
        let data = 2100 * K..2104 * K;
        assert_eq!(clones(&large(data.clone()), &apart(&data, 1)), None);
    }

    #[test]
    fn contents_are_cloned_from_where_they_are_and_not_from_what_lies_below_them() {
        let mut want = large(2100 * K..2200 * K);
        let host = Origin::Host(by(8 << 10));
        want.contents[1].origin = host;
        // The backing image has something behind the head, too, which is not seen there.
        assert_eq!(clones(&want, &together()), None);
        let own = Source { range: 2200 * K..LARGE.end, origin: host, shift: by(8 << 10), storage: 0 };
        let both = vec![LARGE.start..2100 * K, 2200 * K..LARGE.end];
        assert_eq!(clones(&want, &[together(), vec![own]].concat()), Some(both));
    }

    #[test]
    fn what_is_not_in_whole_blocks_on_both_sides_is_copied() {
        let data = 2048 * K..2052 * K;
        let odd = vec![Source { shift: by((64 << 10) + 512), ..together().remove(0) }];
        assert_eq!(clones(&large(data.clone()), &odd), None);
        assert_eq!(large(data.clone()).cloning(&together(), 4096, by((512 << 10) + 512)), None);
        assert!(large(data).cloning(&together(), 512, by((512 << 10) + 512)).is_some());
    }

    #[test]
    fn little_is_copied_and_so_is_what_is_not_whole_blocks() {
        let usual = large(2048 * K..2052 * K);
        assert!(usual.may_clone(1020 << 10) && !usual.may_clone(1021 << 10));
        assert!(!Want { align: 8 << 10, ..usual.clone() }.may_clone(0));
        assert!(!Want { contents: Vec::new(), ..usual }.may_clone(0));
    }
}
