//! When a second request is made for what a first one is slow to bring.

use std::collections::VecDeque;
use std::time::Duration;

/// Times that are remembered.
const REMEMBERED: usize = 128;

/// Times that must be known before one counts as slow.
const NEEDED: usize = 20;

/// The shortest time that counts as slow.
const LEAST: Duration = Duration::from_millis(10);

/// Of this many requests at most one is a hedge.
const SHARE: u64 = 20;

/// How long recent requests have taken.
#[derive(Debug, Default)]
pub(super) struct Hedging {
    recent: VecDeque<Duration>,
    requests: u64,
    hedges: u64,
}

impl Hedging {
    /// Records a small request that succeeded.
    pub(super) fn record(&mut self, took: Duration) {
        self.requests += 1;
        if self.recent.len() == REMEMBERED {
            self.recent.pop_front();
        }
        self.recent.push_back(took);
    }

    /// The time after which a request is slower than 95 of 100 recent ones; `None`: too few are known.
    pub(super) fn slow_after(&self) -> Option<Duration> {
        if self.recent.len() < NEEDED {
            return None;
        }
        let mut sorted: Vec<_> = self.recent.iter().copied().collect();
        sorted.sort_unstable();
        let slow = sorted.get(sorted.len() * 95 / 100).or(sorted.last())?;
        // A bit more: if all take the same time none is slow.
        Some((*slow + *slow / 4).max(LEAST))
    }

    /// Takes a hedge out of the share that is allowed. False if it is used up.
    pub(super) fn take(&mut self) -> bool {
        let is_allowed = (self.hedges + 1) * SHARE <= self.requests + SHARE;
        if is_allowed {
            self.hedges += 1;
        }
        is_allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_slower_than_most_is_hedged_and_only_a_share() {
        let mut hedging = Hedging::default();
        assert_eq!(hedging.slow_after(), None);
        (1..=100).for_each(|time| hedging.record(Duration::from_millis(time)));
        assert_eq!(hedging.slow_after(), Some(Duration::from_millis(120)));
        assert_eq!((0..100).filter(|_| hedging.take()).count(), 6);
        (0..200).for_each(|_| hedging.record(Duration::from_micros(1)));
        assert_eq!(hedging.slow_after(), Some(LEAST));
    }
}
