//! What is read and written for a write that needs space of its own.
//!
//! Law: a plan is a pure function of what is wanted and what is known. Merged: contents that have to stand around the guest's
//! bytes are read at once, with what lies between them if that is no more than 16 KiB; then everything is written by one operation.
//! What is known to be zeros is not read, and not written where the storage proves zeros already.

use std::ops::Range;

use super::clones::Source;
use super::image::CowMode;

/// The most bytes that are read in vain to save an operation.
const WASTE: u64 = 16 << 10;

/// Where contents come from. Two parts with the same are neighbours there, too, if they are here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum From {
    /// The backing image.
    Backing,
    /// The data storage; guest offset plus this, wrapping, is where.
    Host(u64),
    /// The compressed cluster whose guest offset this is.
    Compressed(u64),
}

/// Contents that have to stand beside the guest's bytes, at guest offsets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) range: Range<u64>,
    pub(super) from: From,
}

/// What is wanted. All offsets are the guest's.
#[derive(Debug, Clone)]
pub(super) struct Want {
    /// What has to be right afterwards, the guest's bytes among it.
    pub(super) fill: Range<u64>,
    /// The guest's bytes.
    pub(super) data: Range<u64>,
    /// Contents beside them; all the rest is zeros. In order, outside `data`.
    pub(super) contents: Vec<Part>,
    /// The storage proves that the new place reads as zeros.
    pub(super) zeroed: bool,
    /// What writes should be aligned to; a power of two.
    pub(super) align: u64,
    pub(super) mode: CowMode,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    Read(Part),
    Write(Range<u64>),
}

/// The operations: clones are carried out at once and before everything else, reads that stand together at once, a write after what
/// stands before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// What is shared: then nothing but the guest's bytes is written.
    pub(super) clones: Vec<Source>,
    pub(super) steps: Vec<Step>,
    /// Nothing but the guest's bytes is written: others may write theirs beside them.
    pub(super) open: bool,
}

impl Plan {
    /// What is read at once, and then written at once; `None` if it is not done so.
    pub(super) fn merged(&self) -> Option<(Vec<Part>, Range<u64>)> {
        let (Step::Write(range), reads) = self.steps.split_last()? else { return None };
        let parts = reads.iter().map(|step| match step {
            Step::Read(part) => Some(part.clone()),
            Step::Write(_) => None,
        });
        Some((parts.collect::<Option<_>>()?, range.clone()))
    }
}

impl Want {
    pub(super) fn plan(&self) -> Plan {
        let all = self.written();
        if self.mode == CowMode::Split {
            return self.split(&all);
        }
        let mut steps: Vec<Step> = Vec::new();
        for part in &self.contents {
            match steps.last_mut() {
                Some(Step::Read(last)) if last.from == part.from && part.range.start <= last.range.end + WASTE => {
                    last.range.end = part.range.end;
                }
                _ => steps.push(Step::Read(part.clone())),
            }
        }
        let open = steps.is_empty() && all == self.data && self.zeroed;
        steps.push(Step::Write(all));
        Plan { clones: Vec::new(), steps, open }
    }

    /// What is written, all in all.
    fn written(&self) -> Range<u64> {
        let mut all = if self.zeroed { self.data.clone() } else { self.fill.clone() };
        for part in &self.contents {
            all = all.start.min(part.range.start)..all.end.max(part.range.end);
        }
        // Zeros may be written all over the fill: a storage with blocks would otherwise have to read around the ends.
        let start = (all.start & !(self.align - 1)).max(self.fill.start.min(all.start));
        let end = all.end.checked_next_multiple_of(self.align).unwrap_or(all.end).min(self.fill.end.max(all.end));
        start..end
    }

    fn split(&self, all: &Range<u64>) -> Plan {
        let mut steps = vec![Step::Write(self.data.clone())];
        for side in [all.start..self.data.start, self.data.end..all.end] {
            let parts =
                self.contents.iter().filter(|part| side.start <= part.range.start && part.range.end <= side.end);
            steps.extend(parts.cloned().map(Step::Read));
            if !side.is_empty() {
                steps.push(Step::Write(side));
            }
        }
        Plan { clones: Vec::new(), steps, open: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const K: u64 = 1 << 10;
    const CLUSTER: Range<u64> = 640 * K..704 * K;

    /// 4 KiB at 16 KiB of a cluster of 64 KiB.
    fn want() -> Want {
        let data = 656 * K..660 * K;
        Want { fill: CLUSTER, data, contents: Vec::new(), zeroed: false, align: 512, mode: CowMode::Merged }
    }

    fn backed(range: Range<u64>) -> Part {
        Part { range, from: From::Backing }
    }

    fn around(want: &Want) -> Vec<Part> {
        let sides = [want.fill.start..want.data.start, want.data.end..want.fill.end];
        sides.into_iter().filter(|side| !side.is_empty()).map(backed).collect()
    }

    /// A plan of one write.
    fn written(range: Range<u64>, open: bool) -> Plan {
        Plan { clones: Vec::new(), steps: vec![Step::Write(range)], open }
    }

    fn steps(want: &Want) -> Vec<Step> {
        want.plan().steps
    }

    #[test]
    fn head_and_tail_are_read_at_once_and_everything_is_written_at_once() {
        let want = Want { contents: around(&want()), ..want() };
        assert_eq!(steps(&want), [Step::Read(backed(CLUSTER)), Step::Write(CLUSTER)]);
        // Space that proves zeros changes nothing about it.
        assert_eq!(Want { zeroed: true, ..want.clone() }.plan(), want.plan());
    }

    #[test]
    fn a_middle_of_up_to_16_kib_is_read_in_vain_and_a_longer_one_is_skipped() {
        let with = |data: Range<u64>| {
            let want = Want { data, ..want() };
            Want { contents: around(&want), ..want }
        };
        assert_eq!(steps(&with(656 * K..672 * K)), [Step::Read(backed(CLUSTER)), Step::Write(CLUSTER)]);
        assert_eq!(
            steps(&with(656 * K..672 * K + 512)),
            [Step::Read(backed(640 * K..656 * K)), Step::Read(backed(672 * K + 512..704 * K)), Step::Write(CLUSTER)]
        );
    }

    #[test]
    fn only_a_head_or_only_a_tail_is_one_read() {
        let with = |data: Range<u64>| {
            let want = Want { data, ..want() };
            steps(&Want { contents: around(&want), ..want })
        };
        assert_eq!(with(640 * K..644 * K), [Step::Read(backed(644 * K..704 * K)), Step::Write(CLUSTER)]);
        assert_eq!(with(700 * K..704 * K), [Step::Read(backed(640 * K..700 * K)), Step::Write(CLUSTER)]);
        assert_eq!(with(CLUSTER), [Step::Write(CLUSTER)]);
    }

    #[test]
    fn without_contents_around_it_is_one_write_and_proven_zeros_are_not_written() {
        assert_eq!(want().plan(), written(CLUSTER, false));
        let data = want().data;
        assert_eq!(Want { zeroed: true, ..want() }.plan(), written(data, true));
    }

    #[test]
    fn what_the_backing_image_has_not_is_not_read() {
        // The backing image has something in front only, and not up to the data.
        let contents = vec![backed(644 * K..648 * K)];
        let want = Want { contents: contents.clone(), ..want() };
        assert_eq!(steps(&want), [Step::Read(contents[0].clone()), Step::Write(CLUSTER)]);
        let proven = Want { zeroed: true, ..want };
        assert_eq!(steps(&proven), [Step::Read(contents[0].clone()), Step::Write(644 * K..660 * K)]);
    }

    #[test]
    fn contents_from_different_places_are_read_each_on_its_own() {
        let host = Part { range: 640 * K..656 * K, from: From::Host(0x5_0000) };
        let tail = backed(660 * K..704 * K);
        let want = Want { contents: vec![host.clone(), tail.clone()], ..want() };
        assert_eq!(steps(&want), [Step::Read(host), Step::Read(tail), Step::Write(CLUSTER)]);
    }

    #[test]
    fn zeros_are_written_up_to_whole_blocks_and_nobody_may_write_beside_them() {
        let data = 656 * K + 512..657 * K;
        let want = Want { data: data.clone(), zeroed: true, align: 4096, ..want() };
        assert_eq!(want.plan(), written(656 * K..660 * K, false));
        assert_eq!(Want { align: 512, ..want.clone() }.plan(), written(data.clone(), true));
        // Never beyond what is to be filled: small clusters on large blocks.
        assert_eq!(steps(&Want { fill: data.clone(), ..want }), [Step::Write(data)]);
    }

    #[test]
    fn split_is_five_operations() {
        let want = Want { contents: around(&want()), mode: CowMode::Split, ..want() };
        let (head, data, tail) = (640 * K..656 * K, 656 * K..660 * K, 660 * K..704 * K);
        let expected = [
            Step::Write(data),
            Step::Read(backed(head.clone())),
            Step::Write(head),
            Step::Read(backed(tail.clone())),
            Step::Write(tail),
        ];
        assert_eq!(want.plan(), Plan { clones: Vec::new(), steps: expected.into(), open: false });
    }
}
