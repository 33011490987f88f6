//! The work of an export: counters, and how long requests took.

use std::time::Duration;

use hdrhistogram::Histogram;
use limosa_page::to_nanos;
use strum::{EnumCount, EnumIter, IntoEnumIterator as _, IntoStaticStr};

/// The shortest time that is told from others, and the longest that is, in nanoseconds.
const TIMES: (u64, u64) = (1000, 1_000_000_000_000);
/// The longest time that a new histogram has room for, in nanoseconds. It grows.
const USUAL: u64 = 16_000_000;
/// Significant digits of a time.
const DIGITS: u8 = 2;

/// The kind of a request, by which it is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumCount, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
#[non_exhaustive]
pub enum RequestKind {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A zeroing or a trim.
    Zero,
    /// A flush.
    Flush,
    /// Another one: block status, prefetching.
    Other,
}

impl RequestKind {
    /// Returns its name: `read`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// A request that is done.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) kind: RequestKind,
    /// Bytes that it covered.
    pub(crate) length: u64,
    pub(crate) failed: bool,
    /// Time from the moment at which it was complete here to its end.
    pub(crate) time: Duration,
}

/// Counters of an export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportCounters {
    /// Reads that succeeded.
    pub reads: u64,
    /// Bytes that they returned.
    pub read_bytes: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Bytes that they wrote.
    pub written_bytes: u64,
    /// Zeroings and trims that succeeded.
    pub zeroes: u64,
    /// Bytes that they covered.
    pub zeroed_bytes: u64,
    /// Flushes that succeeded.
    pub flushes: u64,
    /// Other requests that succeeded.
    pub others: u64,
    /// Requests that failed.
    pub failures: u64,
}

impl ExportCounters {
    fn count(&mut self, done: &Outcome) {
        let pair = match done.kind {
            _ if done.failed => {
                self.failures += 1;
                return;
            }
            RequestKind::Read => (&mut self.reads, &mut self.read_bytes),
            RequestKind::Write => (&mut self.writes, &mut self.written_bytes),
            RequestKind::Zero => (&mut self.zeroes, &mut self.zeroed_bytes),
            RequestKind::Flush => {
                self.flushes += 1;
                return;
            }
            RequestKind::Other => {
                self.others += 1;
                return;
            }
        };
        *pair.0 += 1;
        *pair.1 += done.length;
    }

    fn add(&mut self, more: &Self) {
        let Self { reads, read_bytes, writes, written_bytes, zeroes, zeroed_bytes, flushes, others, failures } = more;
        let pairs = [
            (&mut self.reads, reads),
            (&mut self.read_bytes, read_bytes),
            (&mut self.writes, writes),
            (&mut self.written_bytes, written_bytes),
            (&mut self.zeroes, zeroes),
            (&mut self.zeroed_bytes, zeroed_bytes),
            (&mut self.flushes, flushes),
            (&mut self.others, others),
            (&mut self.failures, failures),
        ];
        for (total, more) in pairs {
            *total = total.saturating_add(*more);
        }
    }
}

/// How long requests took that succeeded, by kind: from the moment at which a request was complete in the server to the
/// moment at which its reply was ready.
#[derive(Debug, Clone, Default)]
pub struct Latencies([Option<Box<Histogram<u64>>>; RequestKind::COUNT]);

impl Latencies {
    /// Returns the times of a kind in nanoseconds; `None` if there was no such request.
    #[must_use]
    pub fn of(&self, kind: RequestKind) -> Option<&Histogram<u64>> {
        self.0.get(kind as usize)?.as_deref()
    }

    /// Returns the times of each kind that has some, in nanoseconds.
    pub fn iter(&self) -> impl Iterator<Item = (RequestKind, &Histogram<u64>)> {
        RequestKind::iter().filter_map(|kind| Some((kind, self.of(kind)?)))
    }

    fn of_mut(&mut self, kind: RequestKind) -> Option<&mut Histogram<u64>> {
        let histogram = self.0.get_mut(kind as usize)?;
        if histogram.is_none() {
            *histogram = new_histogram().map(Box::new);
        }
        histogram.as_deref_mut()
    }

    fn record(&mut self, done: &Outcome) {
        if !done.failed
            && let Some(histogram) = self.of_mut(done.kind)
        {
            // It has room for every time up to the longest.
            let recorded = histogram.record(to_nanos(done.time).clamp(TIMES.0, TIMES.1));
            debug_assert!(recorded.is_ok(), "a histogram grows");
        }
    }

    fn add(&mut self, more: &Self) {
        for (kind, times) in more.iter() {
            if let Some(histogram) = self.of_mut(kind) {
                let added = histogram.add(times);
                debug_assert!(added.is_ok(), "all histograms have the same digits");
            }
        }
    }
}

/// The bounds are constants: it is always there.
fn new_histogram() -> Option<Histogram<u64>> {
    let mut histogram = Histogram::new_with_bounds(TIMES.0, USUAL, DIGITS).ok()?;
    histogram.auto(true);
    Some(histogram)
}

/// The work of a client, or of all clients.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tally {
    pub(crate) counters: ExportCounters,
    pub(crate) latencies: Latencies,
}

impl Tally {
    pub(crate) fn count(&mut self, done: &Outcome) {
        self.counters.count(done);
        self.latencies.record(done);
    }

    pub(crate) fn add(&mut self, more: &Self) {
        self.counters.add(&more.counters);
        self.latencies.add(&more.latencies);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(kind: RequestKind, micros: u64) -> Outcome {
        Outcome { kind, length: 512, failed: false, time: Duration::from_micros(micros) }
    }

    #[test]
    fn requests_are_counted_by_kind_and_failures_apart() {
        let mut tally = Tally::default();
        RequestKind::iter().for_each(|kind| tally.count(&done(kind, 10)));
        tally.count(&Outcome { failed: true, ..done(RequestKind::Read, 10) });
        let counters = tally.counters;
        assert_eq!((counters.reads, counters.read_bytes, counters.writes, counters.written_bytes), (1, 512, 1, 512));
        assert_eq!((counters.zeroes, counters.zeroed_bytes, counters.flushes, counters.others), (1, 512, 1, 1));
        assert_eq!((counters.failures, tally.latencies.iter().count()), (1, RequestKind::COUNT));
        assert_eq!(tally.latencies.of(RequestKind::Read).map(Histogram::len), Some(1));
    }

    #[test]
    fn percentiles_of_a_sum_are_those_of_all_times_however_long() {
        let (mut one, mut two) = (Tally::default(), Tally::default());
        (1..=99).for_each(|micros| one.count(&done(RequestKind::Write, micros * 100)));
        two.count(&done(RequestKind::Write, 30_000_000));
        two.count(&Outcome { time: Duration::from_secs(1 << 20), ..done(RequestKind::Flush, 0) });
        two.count(&Outcome { time: Duration::ZERO, ..done(RequestKind::Read, 0) });
        one.add(&two);
        let times = one.latencies.of(RequestKind::Write).unwrap();
        let near = |nanos: u64, micros: u64| nanos.abs_diff(micros * 1000) <= micros * 20;
        assert_eq!(times.len(), 100);
        assert!(near(times.value_at_quantile(0.5), 5000) && near(times.value_at_quantile(0.99), 9900), "{times:?}");
        assert!(near(times.max(), 30_000_000), "{}", times.max());
        assert!(one.latencies.of(RequestKind::Flush).unwrap().max() >= 990_000_000_000);
        assert!(one.latencies.of(RequestKind::Other).is_none());
    }
}
