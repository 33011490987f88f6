//! Counters of a live migration, round by round.

use std::collections::BTreeMap;
use std::time::Duration;

use limosa_channel::Counters;
use serde::{Serialize, Serializer};

use crate::source::postcopy::PostcopyStats;

/// The kind of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum RoundKind {
    /// The first one, over all memory.
    Bulk,
    /// Over what was written during the one before.
    Dirty,
    /// With the VM stopped.
    Last,
}

/// The result of a round. Times are serialized in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RoundReport {
    /// Counted from 0.
    pub number: u32,
    /// The kind of a round.
    pub kind: RoundKind,
    /// From the beginning of the migration to the beginning of the round.
    #[serde(rename = "begun", serialize_with = "seconds")]
    pub start_time: Duration,
    /// How long it took.
    #[serde(serialize_with = "seconds")]
    pub duration: Duration,
    /// Pages that it was about.
    pub pages: u64,
    /// Pages sent with contents.
    pub normal: u64,
    /// Pages told to be zero.
    pub zero: u64,
    /// Pages that are zero and were left out, because the destination's memory is zeroed.
    pub left_out: u64,
    /// Pages that were left out because the guest has said that they are free.
    pub hinted: u64,
    /// Of the zero pages, told or left out, those that were not populated, and not looked at.
    pub holes: u64,
    /// Bytes that left, on all channels.
    pub bytes: u64,
    /// Pages that were written meanwhile; of the last round, none.
    pub dirty: u64,
    /// Pages left to be sent behind it: those written, and those that a round that was broken off did not get to.
    pub rest: u64,
    /// Bytes per second that are assumed from here on, if that is known.
    pub bandwidth: Option<u64>,
    /// How long the VM would have to stand still for the rest.
    #[serde(serialize_with = "maybe_seconds")]
    pub expected_downtime: Option<Duration>,
    /// Percent of the time that the vCPUs stood still during the round.
    pub throttle: u8,
}

impl RoundReport {
    /// Of a round that did nothing.
    pub(super) fn empty() -> Self {
        let (begun, duration) = (Duration::ZERO, Duration::ZERO);
        Self {
            number: 0,
            kind: RoundKind::Bulk,
            start_time: begun,
            duration,
            pages: 0,
            normal: 0,
            zero: 0,
            left_out: 0,
            hinted: 0,
            holes: 0,
            bytes: 0,
            dirty: 0,
            rest: 0,
            bandwidth: None,
            expected_downtime: None,
            throttle: 0,
        }
    }

    /// Takes the round that followed in.
    fn join(&mut self, next: Self) {
        let begun = self.start_time;
        let sum = |of: fn(&Self) -> u64| of(self).saturating_add(of(&next));
        let [pages, normal, zero] = [sum(|round| round.pages), sum(|round| round.normal), sum(|round| round.zero)];
        let [left_out, holes] = [sum(|round| round.left_out), sum(|round| round.holes)];
        let hinted = sum(|round| round.hinted);
        let [bytes, dirty] = [sum(|round| round.bytes), sum(|round| round.dirty)];
        let duration = (next.start_time + next.duration).saturating_sub(begun);
        let counts = Self { pages, normal, zero, left_out, hinted, holes, bytes, dirty, ..next };
        *self = Self { number: self.number, start_time: begun, duration, ..counts };
    }

    /// Pages written per second of the round.
    pub fn dirty_rate(&self) -> u64 {
        let nanos = self.duration.as_nanos().max(1);
        u64::try_from(u128::from(self.dirty) * 1_000_000_000 / nanos).unwrap_or(u64::MAX)
    }
}

/// Counters of the requests for free pages.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HintStats {
    /// Lists that were asked for.
    pub lists: u32,
    /// Of them, lists that were complete before the round was.
    pub complete: u32,
    /// From the request to the end of the first of these.
    #[serde(serialize_with = "maybe_seconds")]
    pub list_took: Option<Duration>,
    /// Ranges of guest memory that were told in time.
    pub ranges: u64,
    /// Ranges that came too late, and were not believed.
    pub late: u64,
    /// Ranges without a page of guest memory.
    pub outside: u64,
    /// Why the guest could not be asked, if it could not: the migration went on without.
    pub refused: Option<String>,
}

/// Counters of a live migration.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct LiveStats {
    /// The rounds, in order. Of a migration of thousands of them, neighbours are joined.
    pub rounds: Vec<RoundReport>,
    /// From the beginning to the end.
    #[serde(rename = "total", serialize_with = "seconds")]
    pub total_time: Duration,
    /// From the moment the VM was told to stop to the destination's acknowledgement (or to the end of the
    /// attempt); zero if it was not stopped.
    #[serde(serialize_with = "seconds")]
    pub downtime: Duration,
    /// The downtime expected when the VM was stopped.
    #[serde(serialize_with = "maybe_seconds")]
    pub expected_downtime: Option<Duration>,
    /// Counters of the postcopy, if there was one.
    #[serde(serialize_with = "postcopy")]
    pub postcopy: Option<PostcopyStats>,
    /// Counters of the requests for free pages, if the guest was asked.
    pub hints: Option<HintStats>,
    /// Of the main channel.
    #[serde(serialize_with = "counters")]
    pub main: Counters,
    /// Of the multifd channels, by number.
    #[serde(serialize_with = "many_counters")]
    pub channels: Vec<Counters>,
}

/// Reports that are kept at most: a guest that never lets its migration converge must not fill the memory with them.
const REPORTS: usize = 4096;

impl LiveStats {
    /// Adds a round. Of too many, those between the first and the last are joined in pairs from there on.
    pub(super) fn push(&mut self, report: RoundReport) {
        if self.rounds.len() >= REPORTS {
            let mut rounds = std::mem::take(&mut self.rounds).into_iter();
            self.rounds.extend(rounds.next());
            while let Some(mut round) = rounds.next() {
                if let Some(next) = rounds.next() {
                    round.join(next);
                }
                self.rounds.push(round);
            }
        }
        self.rounds.push(report);
    }

    /// The sum of one number over all rounds.
    pub fn sum(&self, of: impl Fn(&RoundReport) -> u64) -> u64 {
        self.rounds.iter().map(of).sum()
    }
}

pub(super) fn seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

fn maybe_seconds<S: Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    time.map(|time| time.as_secs_f64()).serialize(serializer)
}

#[derive(Serialize)]
struct CountersForm {
    calls_out: u64,
    calls_in: u64,
    bytes_out: u64,
    bytes_in: u64,
    partial: u64,
    waits: u64,
    throttled_ns: u64,
}

impl From<&Counters> for CountersForm {
    fn from(counters: &Counters) -> Self {
        let Counters { calls_out, calls_in, bytes_out, bytes_in, partial, waits, throttled_ns, .. } = *counters;
        Self { calls_out, calls_in, bytes_out, bytes_in, partial, waits, throttled_ns }
    }
}

#[derive(Serialize)]
struct PostcopyForm {
    normal_pages: u64,
    zero_pages: u64,
    requests: u64,
    /// Percentiles, nanoseconds.
    request_latency_ns: BTreeMap<&'static str, u64>,
    elapsed: f64,
}

fn postcopy<S: Serializer>(stats: &Option<PostcopyStats>, serializer: S) -> Result<S::Ok, S::Error> {
    let form = stats.as_ref().map(|stats| {
        let latency = &stats.request_latency;
        let at = |name, quantile| (name, latency.value_at_quantile(quantile));
        PostcopyForm {
            normal_pages: stats.normal_pages,
            zero_pages: stats.zero_pages,
            requests: stats.requests,
            request_latency_ns: [at("p50", 0.5), at("p90", 0.9), at("p99", 0.99), at("max", 1.0)].into(),
            elapsed: stats.elapsed.as_secs_f64(),
        }
    });
    form.serialize(serializer)
}

fn counters<S: Serializer>(counters: &Counters, serializer: S) -> Result<S::Ok, S::Error> {
    CountersForm::from(counters).serialize(serializer)
}

fn many_counters<S: Serializer>(all: &[Counters], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(all.iter().map(CountersForm::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_rounds_takes_a_bounded_room_and_adds_up() {
        let mut stats = LiveStats::default();
        for number in 0..100_000_u32 {
            let begun = Duration::from_millis(number.into());
            let kind = if number == 0 { RoundKind::Bulk } else { RoundKind::Dirty };
            let duration = Duration::from_millis(1);
            stats.push(RoundReport {
                number,
                kind,
                start_time: begun,
                duration,
                normal: 2,
                rest: number.into(),
                ..RoundReport::empty()
            });
        }
        assert!(stats.rounds.len() <= REPORTS);
        assert_eq!(stats.sum(|round| round.normal), 200_000);
        assert_eq!((stats.rounds[0].kind, stats.rounds[0].normal), (RoundKind::Bulk, 2));
        assert_eq!(stats.rounds.last().map(|round| round.rest), Some(99_999));
        assert!(stats.rounds.windows(2).all(|two| two[0].start_time + two[0].duration == two[1].start_time));
        assert!(stats.rounds.windows(2).all(|two| two[0].number < two[1].number));
    }
}
