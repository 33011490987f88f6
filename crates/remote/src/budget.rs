//! One budget of time for all attempts of a request.
//!
//! **Law: nothing below retries by itself.** A retry inside a retry multiplies both.

use std::time::{Duration, Instant};

/// The pause before the first retry. Each further one doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause, unless the store asks for a longer one.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The time that is left for a request, and its next pause.
#[derive(Debug)]
pub(crate) struct Budget {
    total: Duration,
    until: Instant,
    pause: Duration,
    seed: u64,
}

impl Budget {
    pub(crate) fn new(total: Duration, seed: u64) -> Self {
        Self { total, until: Instant::now() + total, pause: FIRST_PAUSE, seed }
    }

    /// The time from the beginning, or the last progress, to the end.
    pub(crate) fn total(&self) -> Duration {
        self.total
    }

    /// Restarts after progress: a long transfer over a slow line has the time that it needs.
    pub(crate) fn renew(&mut self) {
        self.until = Instant::now() + self.total;
        self.pause = FIRST_PAUSE;
    }

    /// How long the next attempt may take: the last one has a second, although the budget ends before.
    pub(crate) fn for_attempt(&self) -> Duration {
        self.left().max(Duration::from_secs(1))
    }

    /// The time that is left.
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// The pause before the next attempt; `None` if the budget is spent. `asked` is what the store asks for.
    pub(crate) fn next_pause(&mut self, asked: Option<Duration>) -> Option<Duration> {
        let pause = asked.unwrap_or_default().max(self.jittered(self.pause));
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        let left = self.left();
        // The last attempt is made when the budget ends, not a long pause before.
        if left.is_zero() { None } else { Some(pause.min(left)) }
    }

    /// Between a half and all of it, so that requests that failed together do not come again together.
    fn jittered(&mut self, pause: Duration) -> Duration {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let share = u32::try_from(self.seed >> 54).unwrap_or(0);
        pause / 2 + pause / 2 * share / 1024
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_end_with_the_budget() {
        let mut budget = Budget::new(Duration::from_secs(100), 1);
        let pauses: Vec<_> = (0..12).map(|_| budget.next_pause(None).unwrap()).collect();
        assert!(pauses[0] >= FIRST_PAUSE / 2 && pauses[0] <= FIRST_PAUSE);
        assert!(pauses[8] > pauses[0] && pauses.iter().all(|pause| *pause <= LONGEST_PAUSE));
        assert_eq!(budget.next_pause(Some(Duration::from_secs(7))), Some(Duration::from_secs(7)));
        let asked = budget.next_pause(Some(Duration::from_secs(1000))).unwrap();
        assert!(asked <= Duration::from_secs(100), "never longer than the budget");
        let mut spent = Budget::new(Duration::ZERO, 2);
        assert_eq!(spent.next_pause(None), None);
    }
}
