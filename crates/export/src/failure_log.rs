//! Failures that repeat, in few lines.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Least time between two lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// Decides which failures of an export are logged. A disk that is full fails every write: a client, which may be
/// hostile, must not fill the log.
#[derive(Debug, Default)]
pub(crate) struct FailureLog(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    logged: Option<Instant>,
    /// Failures since that were not logged.
    silent: u64,
}

impl FailureLog {
    /// Notes a failure. If it should be logged, returns the number of those before it that were not.
    pub(crate) fn note(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        if state.logged.is_some_and(|logged| now.saturating_duration_since(logged) < INTERVAL) {
            state.silent += 1;
            return None;
        }
        state.logged = Some(now);
        Some(std::mem::take(&mut state.silent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_of_a_burst_is_logged_and_the_others_are_counted() {
        let (log, begun) = (FailureLog::default(), Instant::now());
        assert_eq!(log.note(begun), Some(0));
        let soon = (1..=1000).filter_map(|millis| log.note(begun + Duration::from_millis(millis)));
        assert_eq!(soon.count(), 0);
        assert_eq!(log.note(begun + INTERVAL), Some(1000));
        assert_eq!(log.note(begun + INTERVAL * 3), Some(0));
    }
}
