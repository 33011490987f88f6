//! The pages in the balloon, for memory in huge pages of the host.
//!
//! A huge page can be given back only when all of it is in the balloon, and the guest puts it there in parts. So there
//! is a bit for each page, which is valid only if the driver notifies the device before it uses a page again. **Law:
//! where a driver has not promised that ([`MUST_TELL_HOST`](crate::Features::MUST_TELL_HOST)), no bits are kept**: only
//! the huge pages that are completely in one array are given back. No bits are kept of ordinary memory, nor of memory
//! that was removed.

use std::ops::Range;

use limosa_page::{PAGE_SIZE, PageBitmap, PageNumber, PageRange};

use crate::reclaim::Reclaim;

/// A bit for each page of a range of RAM, by the range.
#[derive(Debug, Default)]
pub(super) struct Ballooned(Vec<(Range<u64>, PageBitmap)>);

impl Ballooned {
    /// Pages were put into the balloon. Returns the ranges to be given back for them: the runs themselves, or the huge
    /// pages that they complete; ascending and not adjacent, as the runs are.
    pub(super) fn inflate(&mut self, memory: &dyn Reclaim, runs: Vec<Range<u64>>, notifies: bool) -> Vec<Range<u64>> {
        let mut complete: Vec<Range<u64>> = Vec::with_capacity(runs.len());
        for run in runs.into_iter().filter_map(|run| self.complete(memory, run, notifies)) {
            match complete.last_mut() {
                // Two runs in one huge page complete the same one.
                Some(last) if run.start < last.end => last.end = last.end.max(run.end),
                _ => complete.push(run),
            }
        }
        complete
    }

    /// Pages were taken out of the balloon.
    pub(super) fn deflate(&mut self, runs: &[Range<u64>]) {
        for (range, bitmap) in &mut self.0 {
            for run in runs.iter().filter(|run| range.contains(&run.start)) {
                bitmap.clear_range(pages_of(range, run));
            }
        }
    }

    /// RAM outside of these ranges was removed.
    pub(super) fn keep(&mut self, ram: &[Range<u64>]) {
        self.0.retain(|(range, _)| ram.contains(range));
    }

    fn complete(&mut self, memory: &dyn Reclaim, run: Range<u64>, notifies: bool) -> Option<Range<u64>> {
        let (index, range) = memory.ram().iter().enumerate().find(|(_, range)| range.contains(&run.start))?;
        let host = memory.host_page_size(index).max(PAGE_SIZE) / PAGE_SIZE;
        if host == 1 {
            return Some(run);
        }
        let pages = pages_of(range, &run);
        let (first, last) = if notifies {
            let bitmap = self.bitmap(range)?;
            bitmap.set_range(pages);
            let end = bitmap_end(range);
            let complete = |at: u64| {
                let page = PageRange::starting_at(PageNumber(at), host);
                page.end <= end && bitmap.count_in(page) == host
            };
            let (mut first, mut last) = (pages.start.0 / host * host, pages.end.0.div_ceil(host).saturating_mul(host));
            // Only the huge pages at either end can be incomplete.
            while first < last && !complete(first) {
                first += host;
            }
            while first < last && !complete(last - host) {
                last -= host;
            }
            (first, last)
        } else {
            (pages.start.0.div_ceil(host).saturating_mul(host), pages.end.0 / host * host)
        };
        let at = |page: u64| range.start + PageNumber(page).offset();
        (first < last).then(|| at(first)..at(last))
    }

    fn bitmap(&mut self, range: &Range<u64>) -> Option<&mut PageBitmap> {
        let known = self.0.iter().position(|(known, _)| known == range);
        let known = known.unwrap_or_else(|| {
            self.0.push((range.clone(), PageBitmap::new(bitmap_end(range).0)));
            self.0.len() - 1
        });
        self.0.get_mut(known).map(|(_, bitmap)| bitmap)
    }
}

fn bitmap_end(range: &Range<u64>) -> PageNumber {
    PageRange::covering(&(0..range.end - range.start)).end
}

/// The pages of a run in the range's bitmap.
fn pages_of(range: &Range<u64>, run: &Range<u64>) -> PageRange {
    PageRange::inside_bytes(&(run.start - range.start..run.end - range.start))
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

        fn host_page_size(&self, index: usize) -> u64 {
            [4096, 64 << 10][index]
        }

        fn discard(&self, _run: &Range<u64>) -> Result<u64, MemoryError> {
            Ok(0)
        }
    }

    const HUGE: u64 = 2 << 20;
    const KIB: u64 = 1 << 10;

    fn mixed() -> Mixed {
        Mixed([0..1 << 20, HUGE..HUGE + 200 * KIB])
    }

    #[test]
    fn a_huge_page_is_given_back_when_all_of_it_is_in_the_balloon() {
        let memory = mixed();
        let mut ballooned = Ballooned::default();
        let mut inflate = |run: Range<u64>| ballooned.inflate(&memory, vec![run], true);
        assert_eq!(inflate(8 * KIB..12 * KIB), [8 * KIB..12 * KIB], "ordinary memory is given back at once");
        assert_eq!(inflate(HUGE..HUGE + 60 * KIB), []);
        assert_eq!(inflate(HUGE + 60 * KIB..HUGE + 68 * KIB), [HUGE..HUGE + 64 * KIB]);
        assert_eq!(inflate(HUGE + 68 * KIB..HUGE + 196 * KIB), [HUGE + 64 * KIB..HUGE + 192 * KIB]);
        assert_eq!(inflate(HUGE + 192 * KIB..HUGE + 200 * KIB), [], "the last one is not complete");

        ballooned.deflate(&[4 * KIB..8 * KIB, HUGE + 4 * KIB..HUGE + 8 * KIB]);
        let mut inflate = |run: Range<u64>| ballooned.inflate(&memory, vec![run], true);
        assert_eq!(inflate(HUGE..HUGE + 4 * KIB), [], "a page of it was taken out");
        assert_eq!(inflate(HUGE + 4 * KIB..HUGE + 8 * KIB), [HUGE..HUGE + 64 * KIB]);
        assert_eq!(inflate(1 << 40..(1 << 40) + 4096), []);
        let both = vec![HUGE..HUGE + 4 * KIB, HUGE + 8 * KIB..HUGE + 68 * KIB];
        assert_eq!(ballooned.inflate(&memory, both, true), [HUGE..HUGE + 128 * KIB], "each of them once");
    }

    #[test]
    fn no_bits_are_kept_for_a_driver_that_does_not_notify_and_for_memory_that_was_removed() {
        let memory = mixed();
        let mut ballooned = Ballooned::default();
        assert_eq!(ballooned.inflate(&memory, vec![HUGE..HUGE + 60 * KIB], false), []);
        assert_eq!(ballooned.inflate(&memory, vec![HUGE + 60 * KIB..HUGE + 64 * KIB], false), []);
        assert!(ballooned.0.is_empty());
        let run = HUGE + 4 * KIB..HUGE + 196 * KIB;
        assert_eq!(ballooned.inflate(&memory, vec![run], false), [HUGE + 64 * KIB..HUGE + 192 * KIB]);

        ballooned.inflate(&memory, vec![HUGE..HUGE + 60 * KIB], true);
        ballooned.keep(memory.ram());
        assert_eq!(ballooned.0.len(), 1);
        ballooned.keep(&[HUGE..HUGE + 208 * KIB]);
        assert!(ballooned.0.is_empty());
    }
}
