//! The pages that a guest touches first: those of an earlier guest, which are sent before all others, and those that
//! this one requests, which are recorded.
//!
//! The law: **a request that is recorded is the guest's touch.** While requests are recorded no other page is sent,
//! because a page that has come already is touched without a request.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use limosa_page::{PageNumber, PageRange};
use parking_lot::Mutex;

use super::unsent::UnsentPages;
use crate::control::Control;
use crate::pages::BlockRange;

/// Most requests that are recorded; the first ones matter most.
const REQUESTS_MAX: usize = 1 << 18;

/// Pages that are sent before all others, in this order.
#[derive(Debug)]
pub(crate) struct FirstPages<'a> {
    ranges: &'a [BlockRange],
    /// All pages of the first range before this one are claimed: they are not looked at again.
    from: PageNumber,
}

impl<'a> FirstPages<'a> {
    pub(crate) fn new(ranges: &'a [BlockRange]) -> Self {
        Self { ranges, from: PageNumber(0) }
    }

    /// Claims the next of them, at most `at_most` pages but a whole host page at least; `None` if none is left.
    pub(crate) fn claim(&mut self, unsent: &UnsentPages<'_>, at_most: u64) -> Option<(usize, PageRange)> {
        while let Some((range, rest)) = self.ranges.split_first() {
            let start = range.pages.start.max(self.from).min(range.pages.end);
            let left = BlockRange { block: range.block, pages: PageRange::new(start, range.pages.end) };
            if let Some(pages) = unsent.claim_within(left, at_most) {
                self.from = pages.end;
                return Some((range.block, pages));
            }
            (self.ranges, self.from) = (rest, PageNumber(0));
        }
        None
    }
}

/// Records requests from the guest's start, for a while.
#[derive(Debug)]
pub(crate) struct RequestRecorder {
    length: Option<Duration>,
    begun: Mutex<Option<Instant>>,
    /// How long they were recorded, once other pages are sent.
    ended: OnceLock<Duration>,
    requests: Mutex<Vec<BlockRange>>,
}

impl RequestRecorder {
    /// `length` from the guest's start on; `None`: nothing is recorded.
    pub(crate) fn new(length: Option<Duration>) -> Self {
        Self { length, begun: Mutex::new(None), ended: OnceLock::new(), requests: Mutex::new(Vec::new()) }
    }

    /// The guest starts now.
    pub(crate) fn begin(&self) {
        self.begun.lock().get_or_insert_with(Instant::now);
    }

    /// Whether requests are recorded, so that nothing else is sent.
    pub(crate) fn is_recording(&self, control: &Control) -> bool {
        let Some(length) = self.length else { return false };
        let since = self.elapsed();
        let is_recording = !control.rest_wanted() && since.is_none_or(|since| since < length);
        if !is_recording {
            self.ended.get_or_init(|| since.unwrap_or_default().min(length));
        }
        is_recording
    }

    /// Notes a request whose pages are sent now, while requests are recorded.
    pub(crate) fn note(&self, request: BlockRange) {
        let Some(length) = self.length else { return };
        let is_over = self.ended.get().is_some() || self.elapsed().is_some_and(|since| since >= length);
        let mut requests = self.requests.lock();
        if !is_over && requests.len() < REQUESTS_MAX {
            requests.push(request);
        }
    }

    /// The requests in the order in which they were answered, and how long they were recorded.
    pub(crate) fn finish(self) -> (Vec<BlockRange>, Duration) {
        let until_now = self.elapsed().min(self.length).unwrap_or_default();
        let duration = self.ended.into_inner().unwrap_or(until_now);
        (self.requests.into_inner(), duration)
    }

    /// Time since the guest's start; `None` before.
    fn elapsed(&self) -> Option<Duration> {
        self.begun.lock().map(|begun| begun.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> BlockRange {
        BlockRange { block: 0, pages: PageRange::new(PageNumber(start), PageNumber(end)) }
    }

    #[test]
    fn requests_are_recorded_until_the_time_is_over_or_the_rest_is_wanted() {
        let control = Control::new();
        let recorder = RequestRecorder::new(Some(Duration::from_secs(3600)));
        assert!(recorder.is_recording(&control), "it waits for the guest");
        recorder.note(range(3, 4));
        recorder.begin();
        recorder.note(range(1, 2));
        assert!(recorder.is_recording(&control));
        control.push_rest();
        assert!(!recorder.is_recording(&control));
        recorder.note(range(7, 8));
        let (requests, duration) = recorder.finish();
        assert_eq!(requests, [range(3, 4), range(1, 2)]);
        assert!(duration < Duration::from_secs(3600), "{duration:?}");

        let over = RequestRecorder::new(Some(Duration::ZERO));
        over.begin();
        over.note(range(1, 2));
        assert!(!over.is_recording(&Control::new()));
        assert_eq!(over.finish(), (vec![], Duration::ZERO));
        assert!(!RequestRecorder::new(None).is_recording(&Control::new()));
    }
}
