//! Reports about a migration while it runs.

use std::time::Duration;

use super::round::RoundResult;
use super::stats::{LiveStats, RoundReport};
use crate::source::records::Sent;

/// Is called after every round.
pub(super) type Observer<'o> = Box<dyn Fn(&RoundReport) + Send + Sync + 'o>;

/// Reports about a migration while it runs.
pub(super) struct Reports<'o> {
    observer: &'o Observer<'o>,
    /// The reports so far.
    pub(super) stats: LiveStats,
    reported: u32,
}

impl<'o> Reports<'o> {
    pub(super) fn new(observer: &'o Observer<'o>) -> Self {
        Self { observer, stats: LiveStats::default(), reported: 0 }
    }

    /// Adds a round. `report` has the values that `result` does not have.
    pub(super) fn add(&mut self, result: &RoundResult, report: RoundReport) {
        let Sent { normal, zero, left_out } = result.sent;
        let number = self.reported;
        self.reported = number.saturating_add(1);
        let report = RoundReport { number, normal, zero, left_out, holes: result.holes, ..report };
        (self.observer)(&report);
        self.stats.push(report);
    }

    /// Notes how long the VM is expected to stand still.
    pub(super) fn expect_downtime(&mut self, downtime: Option<Duration>) {
        self.stats.expected_downtime = downtime;
    }
}
