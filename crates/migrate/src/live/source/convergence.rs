//! The decision about another round of a live migration: a pure function of the results of the rounds so far.
//!
//! The promise is the downtime limit: the VM is stopped when what is left of its memory can be sent within it, reckoned
//! with a bandwidth that was *seen*. So the bandwidth is what the kernel took over the time that sending took: time in
//! which nothing was to be sent (memory was looked at, logs were fetched) does not count, time in which a limit held
//! the sender back does, because more than what came through is not known to be there. Who knows better sets
//! `avail-switchover-bandwidth`.

use std::time::Duration;

use crate::live::{MigrationParams, TimeoutStrategy};

/// Bytes that a page with contents takes on the wire: the page, and its record's word.
const PAGE_ON_WIRE: u64 = 4096 + 8;

/// The time whose transfers the bandwidth is calculated from.
const MEMORY: Duration = Duration::from_secs(1);

const SECOND: u128 = 1_000_000_000;

/// The result of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct RoundFigures {
    /// Bytes that the kernel took on all channels.
    pub(super) bytes: u64,
    /// Time that sending them took, on the channel that took longest: in calls of the channel, and held back by the
    /// limit.
    pub(super) busy: Duration,
    /// Pages with contents that were sent.
    pub(super) sent_pages: u64,
    /// Pages to send after it: those that were written meanwhile, and those that it did not get to.
    pub(super) rest_pages: u64,
}

/// The decision after a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Another round. The vCPUs are slowed down to this from now on, if it is given (percent).
    Continue {
        /// The new throttle.
        throttle: Option<u8>,
    },
    /// The rest fits into the downtime.
    SwitchOver,
    /// It does not get better: the treatment by the parameters, and the reason.
    NoConvergence(TimeoutStrategy, Reason),
}

/// Why a migration does not converge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// It has taken so long.
    Time(Duration),
    /// The rest did not get smaller for this number of rounds.
    Stalled(u32),
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Time(time) => write!(f, "it was given {:.1} s until the switchover", time.as_secs_f64()),
            Self::Stalled(rounds) => write!(f, "what is left to be sent has not become less for {rounds} rounds"),
        }
    }
}

/// The course of the migration so far.
#[derive(Debug, Clone)]
pub(super) struct Convergence {
    params: MigrationParams,
    bytes: u64,
    busy: Duration,
    least: Option<u64>,
    stalled: u32,
    /// Rounds in which much was written, since the throttle was changed last.
    high: u32,
    throttle: u8,
}

impl Convergence {
    /// Before the first round.
    pub(super) fn new(params: MigrationParams) -> Self {
        Self { params, bytes: 0, busy: Duration::ZERO, least: None, stalled: 0, high: 0, throttle: 0 }
    }

    /// Takes in the result of a round, `elapsed` after the beginning of the migration, and returns the decision.
    pub(super) fn after_round(&mut self, round: RoundFigures, elapsed: Duration, downtime_limit: Duration) -> Verdict {
        self.learn(round.bytes, round.busy);
        if self.expected_downtime(round.rest_pages).is_some_and(|downtime| downtime <= downtime_limit) {
            return Verdict::SwitchOver;
        }
        if self.least.is_none_or(|least| round.rest_pages < least) {
            (self.least, self.stalled) = (Some(round.rest_pages), 0);
        } else {
            self.stalled = self.stalled.saturating_add(1);
        }
        if let Some(verdict) = self.overdue(elapsed) {
            return verdict;
        }
        if self.params.stalled_rounds.is_some_and(|limit| self.stalled >= limit.max(1)) {
            return Verdict::NoConvergence(self.params.timeout_strategy, Reason::Stalled(self.stalled));
        }
        Verdict::Continue { throttle: self.next_throttle(round) }
    }

    /// Whether the time for all rounds is over, also in the middle of one.
    pub(super) fn overdue(&self, elapsed: Duration) -> Option<Verdict> {
        let limit = self.params.timeout.filter(|limit| elapsed >= *limit)?;
        Some(Verdict::NoConvergence(self.params.timeout_strategy, Reason::Time(limit)))
    }

    /// Bytes per second that are assumed at the switchover; `None` while nothing is known.
    pub(super) fn bandwidth(&self) -> Option<u64> {
        if let Some(known) = self.params.avail_switchover_bandwidth {
            return Some(known.get());
        }
        let busy = self.busy.as_nanos();
        (self.bytes != 0 && busy != 0)
            .then(|| u64::try_from(u128::from(self.bytes) * SECOND / busy).unwrap_or(u64::MAX))
    }

    /// Returns the downtime for this number of pages; `None` while the bandwidth is not known.
    pub(super) fn expected_downtime(&self, rest_pages: u64) -> Option<Duration> {
        if rest_pages == 0 {
            return Some(Duration::ZERO);
        }
        let bytes = u128::from(rest_pages) * u128::from(PAGE_ON_WIRE);
        let nanos = (bytes * SECOND).div_ceil(u128::from(self.bandwidth()?.max(1)));
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }

    /// Percent of the time that the vCPUs stand still at present.
    pub(super) fn throttle(&self) -> u8 {
        self.throttle
    }

    /// Long transfers replace what was known, short ones are added to it.
    fn learn(&mut self, bytes: u64, busy: Duration) {
        let keep = MEMORY.saturating_sub(busy);
        if self.busy > keep {
            let scaled = u128::from(self.bytes) * keep.as_nanos() / self.busy.as_nanos().max(1);
            (self.bytes, self.busy) = (u64::try_from(scaled).unwrap_or(u64::MAX), keep);
        }
        self.bytes = self.bytes.saturating_add(bytes);
        self.busy = self.busy.saturating_add(busy);
    }

    /// As QEMU's auto-converge: twice in a row more than so much of what was sent was written meanwhile.
    fn next_throttle(&mut self, round: RoundFigures) -> Option<u8> {
        let params = &self.params;
        if !params.auto_converge {
            return None;
        }
        let threshold = u128::from(round.sent_pages) * u128::from(params.throttle_trigger_threshold);
        if u128::from(round.rest_pages) * 100 <= threshold {
            self.high = 0;
            return None;
        }
        self.high += 1;
        if self.high < 2 {
            return None;
        }
        self.high = 0;
        let most = params.max_cpu_throttle.min(99);
        let next = match self.throttle {
            0 => params.cpu_throttle_initial.min(most),
            now => now.saturating_add(params.cpu_throttle_increment).min(most),
        };
        (next != self.throttle).then(|| {
            self.throttle = next;
            next
        })
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use proptest::prelude::*;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(300);

    fn second(bytes: u64, rest_pages: u64) -> RoundFigures {
        RoundFigures { bytes, busy: Duration::from_secs(1), sent_pages: bytes / PAGE_ON_WIRE, rest_pages }
    }

    #[test]
    fn the_vm_is_stopped_when_the_rest_fits_into_the_downtime() {
        let mut convergence = Convergence::new(MigrationParams::default());
        let fits = 300 * 1000 / 1000;
        let figures = |rest| second(1000 * PAGE_ON_WIRE, rest);
        assert_eq!(convergence.after_round(figures(fits + 1), LIMIT, LIMIT), Verdict::Continue { throttle: None });
        assert_eq!(convergence.expected_downtime(fits + 1), Some(Duration::from_millis(301)));
        assert_eq!(convergence.after_round(figures(fits), LIMIT, LIMIT), Verdict::SwitchOver);
    }

    #[test]
    fn nothing_left_fits_into_any_downtime_and_something_into_none_before_the_bandwidth_is_known() {
        let mut convergence = Convergence::new(MigrationParams::default());
        let none = RoundFigures { rest_pages: 1, ..RoundFigures::default() };
        assert_eq!(convergence.after_round(none, LIMIT, Duration::MAX), Verdict::Continue { throttle: None });
        assert_eq!(convergence.after_round(RoundFigures::default(), LIMIT, Duration::ZERO), Verdict::SwitchOver);
    }

    #[test]
    fn a_bandwidth_that_is_known_is_believed() {
        let params = MigrationParams {
            avail_switchover_bandwidth: NonZeroU64::new(10 * PAGE_ON_WIRE),
            ..MigrationParams::default()
        };
        let mut convergence = Convergence::new(params);
        assert_eq!(
            convergence.after_round(second(1 << 40, 4), LIMIT, LIMIT),
            Verdict::Continue { throttle: None },
            "4 pages at 10 a second"
        );
        assert_eq!(convergence.after_round(second(1, 3), LIMIT, LIMIT), Verdict::SwitchOver);
    }

    #[test]
    fn a_short_round_hardly_changes_the_bandwidth_and_a_long_one_replaces_it() {
        let mut convergence = Convergence::new(MigrationParams::default());
        convergence.learn(1_000_000, Duration::from_secs(10));
        assert_eq!(convergence.bandwidth(), Some(100_000));
        convergence.learn(0, Duration::from_millis(1));
        assert_eq!(convergence.bandwidth(), Some(99_900));
        convergence.learn(7_000_000, Duration::from_secs(1));
        assert_eq!(convergence.bandwidth(), Some(7_000_000));
    }

    #[test]
    fn vcpus_are_slowed_down_in_steps_when_too_much_is_written_twice() {
        let params = MigrationParams { auto_converge: true, max_cpu_throttle: 35, ..MigrationParams::default() };
        let mut convergence = Convergence::new(params);
        let mut steps = Vec::new();
        for _ in 0..8 {
            if let Verdict::Continue { throttle: Some(throttle) } =
                convergence.after_round(second(1000 * PAGE_ON_WIRE, 501), LIMIT, LIMIT)
            {
                steps.push(throttle);
            }
        }
        assert_eq!((steps, convergence.throttle()), (vec![20, 30, 35], 35));
        let half = second(1000 * PAGE_ON_WIRE, 500);
        assert_eq!(convergence.after_round(half, LIMIT, LIMIT), Verdict::Continue { throttle: None });
    }

    #[test]
    fn a_migration_that_takes_too_long_or_stalls_is_given_up_as_said() {
        let params = MigrationParams {
            timeout: Some(Duration::from_secs(5)),
            stalled_rounds: Some(2),
            timeout_strategy: TimeoutStrategy::Pause,
            ..MigrationParams::default()
        };
        let slow = second(1, 100);
        let mut convergence = Convergence::new(params);
        assert_eq!(
            convergence.after_round(slow, Duration::from_secs(5), LIMIT),
            Verdict::NoConvergence(TimeoutStrategy::Pause, Reason::Time(Duration::from_secs(5)))
        );
        let mut convergence = Convergence::new(params);
        let verdicts: Vec<_> =
            [100, 100, 99, 99, 120].map(|rest| convergence.after_round(second(1, rest), LIMIT, LIMIT)).to_vec();
        let goes_on = Verdict::Continue { throttle: None };
        let stalled = Verdict::NoConvergence(TimeoutStrategy::Pause, Reason::Stalled(2));
        assert_eq!(verdicts, [goes_on, goes_on, goes_on, goes_on, stalled]);
    }

    proptest! {
        #[test]
        fn the_promise_is_kept_for_any_history(
            rounds in prop::collection::vec((any::<u64>(), any::<u32>(), any::<u32>(), any::<u64>()), 1..20),
            limit in 0u64..10_000, auto in any::<bool>(), most in any::<u8>(),
        ) {
            let params = MigrationParams { auto_converge: auto, max_cpu_throttle: most, ..MigrationParams::default() };
            let mut convergence = Convergence::new(params);
            let limit = Duration::from_millis(limit);
            let mut before = 0;
            for (bytes, micros, sent, rest) in rounds {
                let busy = Duration::from_micros(micros.into());
                let figures = RoundFigures { bytes, busy, sent_pages: sent.into(), rest_pages: rest };
                let verdict = convergence.after_round(figures, Duration::ZERO, limit);
                let fits = convergence.expected_downtime(rest).is_some_and(|downtime| downtime <= limit);
                prop_assert_eq!(verdict == Verdict::SwitchOver, fits);
                prop_assert!(convergence.throttle() >= before && convergence.throttle() <= most.min(99));
                before = convergence.throttle();
            }
        }

        #[test]
        fn more_left_never_takes_less_time(a in any::<u64>(), b in any::<u64>(), bytes in 1u64.., nanos in 1u64..1_000_000_000) {
            let mut convergence = Convergence::new(MigrationParams::default());
            convergence.learn(bytes, Duration::from_nanos(nanos));
            prop_assert!(convergence.expected_downtime(a.min(b)) <= convergence.expected_downtime(a.max(b)));
        }
    }
}
