//! Runs of pages that are given back a few at a time, so that no buffer keeps the worker for long.

use std::collections::VecDeque;
use std::ops::Range;

use limosa_page::{PageBitmap, PageNumber, PageRange};
use virtio_queue::DescriptorChain;

use super::turn::Turn;
use super::{Balloon, More, Queue};
use crate::reclaim::Reclaim;
use crate::ring::Ring;

/// Buffers that are taken at a time.
pub(super) const BUFFERS: usize = 64;
/// Calls that give memory back, at a time.
const DISCARDS: usize = 128;

/// What is left of a buffer.
pub(super) struct Pending {
    head: u16,
    runs: VecDeque<Range<u64>>,
}

impl Pending {
    pub(super) fn new(head: u16, runs: Vec<Range<u64>>) -> Self {
        Self { head, runs: runs.into() }
    }
}

impl Balloon {
    /// Takes buffers, and gives back what `runs` finds in each before the next one is taken.
    pub(super) fn give_back<R: Ring>(
        &self,
        state: &mut Queue,
        ring: &R,
        runs: impl Fn(DescriptorChain<R::Handle>) -> Vec<Range<u64>>,
    ) -> Result<More, R::Error> {
        let mut left = DISCARDS;
        let mut turn = Turn::default();
        let more = loop {
            if !self.go_on(state, &mut left, ring)? || turn.is_over(BUFFERS) {
                break More::Yes;
            }
            let Some(chain) = ring.pop()? else { break More::No };
            turn.take(&chain);
            state.pending = Some(Pending::new(chain.head_index(), runs(chain)));
        };
        self.leave(state, ring, more)
    }

    /// Goes on with what is left of a buffer, and gives the buffer back when nothing is. `false`: there is still something left,
    /// or it is nobody's any more.
    pub(super) fn go_on<R: Ring>(&self, state: &mut Queue, left: &mut usize, ring: &R) -> Result<bool, R::Error> {
        let epoch = state.epoch;
        let Some(pending) = &mut state.pending else { return Ok(!self.is_reset(epoch)) };
        let memory = self.guest_memory();
        while let Some(run) = pending.runs.front() {
            if *left == 0 || self.is_reset(epoch) {
                return Ok(false);
            }
            *left -= 1;
            if let Some(memory) = &memory {
                self.discard(&**memory, run);
            }
            pending.runs.pop_front();
        }
        if self.is_reset(epoch) {
            return Ok(false);
        }
        // Only then is it done with: a ring that has stopped goes on later, and the driver waits for the buffer.
        ring.add_used(pending.head, 0)?;
        state.pending = None;
        Ok(true)
    }
}

/// Which pages are in the balloon, of memory that the host keeps in huge pages: such a page can be given back only when all of
/// it is in the balloon, and the guest puts it there in pieces. (Nothing is kept of other memory.)
#[derive(Debug, Default)]
pub(super) struct Ballooned {
    epoch: u64,
    /// A bit for each page of a range of RAM, by the range.
    ranges: Vec<(Range<u64>, PageBitmap)>,
}

impl Ballooned {
    /// Pages came or went. What is to be given back for it: the run, or the huge pages that it completes.
    pub(super) fn change(
        &mut self,
        epoch: u64,
        memory: &dyn Reclaim,
        run: Range<u64>,
        inside: bool,
    ) -> Option<Range<u64>> {
        let (index, range) = memory.ram().iter().enumerate().find(|(_, range)| range.contains(&run.start))?;
        let host = memory.host_page(index).max(limosa_page::PAGE_SIZE);
        if host == limosa_page::PAGE_SIZE {
            return inside.then_some(run);
        }
        if self.epoch != epoch {
            *self = Self { epoch, ranges: Vec::new() };
        }
        let known = self.ranges.iter().position(|(known, _)| known == range);
        let known = known.unwrap_or_else(|| {
            let pages = PageRange::covering(&(0..range.end - range.start)).len();
            self.ranges.push((range.clone(), PageBitmap::new(pages)));
            self.ranges.len() - 1
        });
        let (_, bitmap) = self.ranges.get_mut(known)?;
        let pages = PageRange::within(&(run.start - range.start..run.end - range.start));
        if !inside {
            bitmap.clear_range(pages);
            return None;
        }
        bitmap.set_range(pages);
        let host = host / limosa_page::PAGE_SIZE;
        let (mut first, mut last) = (pages.start.0 / host * host, pages.end.0.div_ceil(host).saturating_mul(host));
        // Only the huge pages at either end can be incomplete.
        let complete = |at: u64| {
            let page = PageRange::starting_at(PageNumber(at), host);
            page.end <= PageRange::covering(&(0..range.end - range.start)).end && bitmap.count_in(page) == host
        };
        while first < last && !complete(first) {
            first += host;
        }
        while first < last && !complete(last - host) {
            last -= host;
        }
        let start = range.start + PageNumber(first).offset();
        (first < last).then(|| start..range.start + PageNumber(last).offset())
    }
}

#[cfg(test)]
mod tests {
    use limosa_memory::MemoryError;

    use super::*;

    /// Ordinary memory up to 1 MiB, and huge pages of 64 KiB from 2 MiB to 2 MiB + 200 KiB.
    #[derive(Debug)]
    struct Mixed([Range<u64>; 2]);

    impl Reclaim for Mixed {
        fn ram(&self) -> &[Range<u64>] {
            &self.0
        }

        fn host_page(&self, index: usize) -> u64 {
            [4096, 64 << 10][index]
        }

        fn discard(&self, _run: &Range<u64>) -> Result<u64, MemoryError> {
            Ok(0)
        }
    }

    const HUGE: u64 = 2 << 20;
    const KIB: u64 = 1 << 10;

    #[test]
    fn a_huge_page_is_given_back_when_all_of_it_is_in_the_balloon() {
        let memory = Mixed([0..1 << 20, HUGE..HUGE + 200 * KIB]);
        let mut ballooned = Ballooned::default();
        let mut inflate = |run: Range<u64>| ballooned.change(1, &memory, run, true);
        assert_eq!(inflate(8 * KIB..12 * KIB), Some(8 * KIB..12 * KIB), "ordinary memory goes as it comes");
        assert_eq!(inflate(HUGE..HUGE + 60 * KIB), None);
        assert_eq!(inflate(HUGE + 60 * KIB..HUGE + 68 * KIB), Some(HUGE..HUGE + 64 * KIB));
        assert_eq!(inflate(HUGE + 68 * KIB..HUGE + 196 * KIB), Some(HUGE + 64 * KIB..HUGE + 192 * KIB));
        assert_eq!(inflate(HUGE + 192 * KIB..HUGE + 200 * KIB), None, "the last one is not there as a whole");

        assert_eq!(ballooned.change(1, &memory, HUGE + 4 * KIB..HUGE + 8 * KIB, false), None);
        assert_eq!(ballooned.change(1, &memory, HUGE..HUGE + 4 * KIB, true), None, "a page of it was taken out");
        assert_eq!(ballooned.change(1, &memory, HUGE + 4 * KIB..HUGE + 8 * KIB, true), Some(HUGE..HUGE + 64 * KIB));
        // Another driver begins with an empty balloon.
        assert_eq!(ballooned.change(2, &memory, HUGE..HUGE + 60 * KIB, true), None);
        assert_eq!(ballooned.change(2, &memory, 1 << 40..(1 << 40) + 4096, true), None);
    }
}
