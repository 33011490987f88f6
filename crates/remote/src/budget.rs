//! One budget of time for all attempts of a request.
//!
//! **Law: nothing below retries by itself.** A retry inside a retry multiplies both. Who makes a request calls
//! [`Budget::attempt`], and [`Budget::pause`] with its error, until one of the two ends it.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::time::{sleep, timeout};

use crate::counters::Count;
use crate::error::RemoteError;

/// The pause before the first retry. Each further one doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause, unless the store asks for a longer one.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The time since a first failure after which it is said that a store is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// The time after which it is said once more.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// When a wait was last said, by any request of this process and for any store: many that wait say it once.
static LAST_SAID: Said = Said(Mutex::new(None));

/// The time that is left for a request, its next pause, and the last error.
#[derive(Debug)]
pub(crate) struct Budget {
    total: Duration,
    until: Instant,
    pause: Duration,
    seed: u64,
    last: Option<RemoteError>,
    /// Since when nothing came: the first failure since the last progress.
    failing: Option<Instant>,
}

impl Budget {
    pub(crate) fn new(total: Duration, seed: u64) -> Self {
        Self { total, until: Instant::now() + total, pause: FIRST_PAUSE, seed, last: None, failing: None }
    }

    /// Makes one attempt. It may take as long as the budget lasts, and `most` if that is given; a `most` that is longer
    /// than the whole budget is not cut by it.
    ///
    /// # Errors
    /// Its own; if it had no time, that of the attempt before, which says more.
    pub(crate) async fn attempt<T>(
        &mut self,
        most: Option<Duration>,
        request: impl Future<Output = Result<T, RemoteError>>,
    ) -> Result<T, RemoteError> {
        let within = match most {
            Some(most) if most > self.total => most,
            Some(most) => most.min(self.for_attempt()),
            None => self.for_attempt(),
        };
        let error = match timeout(within, request).await {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(error)) => error,
            Err(_) => self.last.take().unwrap_or(RemoteError::Silent(most.unwrap_or(self.total))),
        };
        self.last = Some(error.clone());
        Err(error)
    }

    /// Waits before the next attempt, which is counted.
    ///
    /// # Errors
    /// The error, if another attempt would be of no use or the budget is spent.
    pub(crate) async fn pause(&mut self, error: RemoteError, retries: &Count) -> Result<(), RemoteError> {
        if !error.is_transient() {
            return Err(error);
        }
        let Some(pause) = self.next_pause(error.retry_after()) else { return Err(error.after(self.total)) };
        if self.waited(&error) + pause >= PATIENCE && LAST_SAID.is_due(Instant::now()) {
            tracing::warn!(%error, "an object store is waited for, at most {:?} without progress", self.total);
        } else {
            tracing::debug!(?pause, %error, "an object store's request is made again");
        }
        retries.add(1);
        sleep(pause).await;
        Ok(())
    }

    /// Restarts after progress: a long transfer over a slow line has the time that it needs.
    pub(crate) fn renew(&mut self) {
        self.until = Instant::now() + self.total;
        self.pause = FIRST_PAUSE;
        self.failing = None;
    }

    /// How long the next attempt may take: the last one has a second, although the budget ends before.
    fn for_attempt(&self) -> Duration {
        self.left().max(Duration::from_secs(1))
    }

    /// The time that is left.
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// The time since the first failure, which this error may be. The time of an attempt counts only if the store was
    /// silent: one that broke off may have brought something.
    fn waited(&mut self, error: &RemoteError) -> Duration {
        let silent = if let RemoteError::Silent(time) = error { *time } else { Duration::ZERO };
        let begun = *self.failing.get_or_insert_with(|| {
            let now = Instant::now();
            now.checked_sub(silent).unwrap_or(now)
        });
        begun.elapsed()
    }

    /// The pause before the next attempt; `None` if the budget is spent. `asked` is what the store asks for.
    fn next_pause(&mut self, asked: Option<Duration>) -> Option<Duration> {
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

/// When something was said last.
struct Said(Mutex<Option<Instant>>);

impl Said {
    /// Whether it may be said `now`; then it counts as said.
    fn is_due(&self, now: Instant) -> bool {
        let mut last = self.0.lock();
        let is_due = last.is_none_or(|last| now.saturating_duration_since(last) >= SAY_AGAIN);
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_said_once_a_minute() {
        let (said, begin) = (Said(Mutex::new(None)), Instant::now());
        let due = |second| said.is_due(begin + Duration::from_secs(second));
        assert_eq!([due(0), due(1), due(59), due(60), due(61)], [true, false, false, true, false]);
        let mut budget = Budget::new(Duration::from_secs(100), 1);
        let broken = RemoteError::Broken("here".to_owned());
        budget.until -= Duration::from_secs(60);
        assert!(budget.waited(&broken) < PATIENCE, "a transfer that took a minute, and broke off");
        budget.failing = budget.failing.map(|begun| begun - PATIENCE);
        assert!(budget.waited(&broken) >= PATIENCE);
        budget.renew();
        assert!(budget.waited(&broken) < PATIENCE);
        budget.renew();
        assert!(budget.waited(&RemoteError::Silent(PATIENCE)) >= PATIENCE);
    }

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

    /// Attempts until one ends a request.
    async fn persist(
        budget: &mut Budget,
        most: Option<Duration>,
        mut answers: Vec<Option<RemoteError>>,
    ) -> (RemoteError, u64) {
        let retries = Count::default();
        loop {
            let answer = answers.pop();
            let request = async {
                match answer {
                    Some(Some(error)) => Err::<(), _>(error),
                    // It says nothing.
                    _ => std::future::pending().await,
                }
            };
            let error = budget.attempt(most, request).await.unwrap_err();
            if let Err(error) = budget.pause(error, &retries).await {
                return (error, retries.get());
            }
        }
    }

    #[test]
    fn attempts_end_with_an_error_that_stays_or_with_the_budget_and_name_what_was_said_last() {
        let (brief, long) = (Duration::from_millis(30), Duration::from_secs(60));
        let broken = || RemoteError::Broken("here".to_owned());
        let ended = |total, most, answers| {
            crate::runtime::block_on(async move { persist(&mut Budget::new(total, 3), most, answers).await }).unwrap()
        };
        let answers = vec![Some(RemoteError::Exists), Some(broken()), Some(broken())];
        assert_eq!(ended(long, None, answers), (RemoteError::Exists, 2));
        // The one that says nothing has a second, although the budget is spent.
        assert_eq!(ended(brief, None, vec![None, Some(broken())]), (broken().after(brief), 1));
        assert_eq!(ended(brief, Some(brief), Vec::new()).0, RemoteError::Silent(brief).after(brief));
        // An attempt that may take longer than the budget takes as long as it may.
        let began = Instant::now();
        assert_eq!(
            ended(Duration::ZERO, Some(brief), Vec::new()),
            (RemoteError::Silent(brief).after(Duration::ZERO), 0)
        );
        assert!(began.elapsed() >= brief);
    }
}
