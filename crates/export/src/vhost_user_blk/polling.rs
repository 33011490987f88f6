//! Polling before sleeping: how long a thread looks for buffers before it waits for a kick.
//!
//! A driver that is answered soon has its next request soon. To sleep and be woken costs both sides more than the time
//! in between. Law: a thread polls only after pauses that were short, and never for more than [`MOST`] at a time: one
//! that has little to do sleeps.

use std::time::{Duration, Instant};

/// The longest time.
const MOST: Duration = Duration::from_micros(32);
/// The first time.
const LEAST: Duration = Duration::from_micros(4);

/// The polling of a thread.
#[derive(Debug, Default)]
pub(super) struct Polling {
    time: Duration,
    /// When it began to look for work, if it has not found any yet.
    idle_since: Option<Instant>,
}

impl Polling {
    /// Looks for work, for a time that depends on earlier pauses. Returns whether there is some.
    pub(super) fn find(&mut self, mut find: impl FnMut() -> bool) -> bool {
        let begun = Instant::now();
        self.idle_since = Some(begun);
        if self.time.is_zero() {
            return false;
        }
        loop {
            if find() {
                self.idle_since = None;
                return true;
            }
            if begun.elapsed() >= self.time {
                return false;
            }
            std::hint::spin_loop();
        }
    }

    /// The thread has slept, and there is work again.
    pub(super) fn wake(&mut self) {
        let Some(pause) = self.idle_since.take().map(|since| since.elapsed()) else { return };
        self.time = if pause > MOST {
            Duration::ZERO
        } else if pause > self.time {
            (self.time * 2).clamp(LEAST, MOST)
        } else {
            self.time
        };
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    #[test]
    fn it_polls_only_after_short_pauses() {
        let mut polling = Polling::default();
        assert!(!polling.find(|| unreachable!()), "not before it has woken once");
        polling.time = LEAST;
        polling.idle_since = Some(Instant::now());
        sleep(MOST * 2);
        polling.wake();
        assert_eq!(polling.time, Duration::ZERO);
        // A pause that the next poll would not have covered.
        polling.idle_since = Some(Instant::now());
        polling.time = Duration::from_nanos(1);
        polling.wake();
        assert!(polling.time == LEAST || polling.time == Duration::ZERO, "{:?}", polling.time);
    }

    #[test]
    fn what_is_found_is_no_pause_and_what_is_not_ends_in_time() {
        let mut polling = Polling { time: MOST, ..Polling::default() };
        let mut count = 0;
        assert!(polling.find(|| {
            count += 1;
            count == 3
        }));
        assert!(polling.idle_since.is_none());
        polling.wake();
        assert_eq!(polling.time, MOST);
        let begun = Instant::now();
        assert!(!polling.find(|| false));
        assert!(begun.elapsed() >= MOST);
    }
}
