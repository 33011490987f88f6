//! When a guest's writers may write: running or paused, at which rate, throttled or not.
//!
//! **Law: when [`Gate::pause`] has returned, every writer waits in [`Gate::admit`], between two pages.** A writer asks
//! for leave to write a number of pages, writes these and asks again.

use std::time::{Duration, Instant};

use limosa_page::PAGE_SIZE;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::error::GuestError;
use super::options::{GuestKind, Rate};

/// Pages that a writer is given leave for at once: a pause waits for these.
const BATCH: u64 = 64;

/// A throttled writer works for a part of this and sleeps for the rest.
const PERIOD: Duration = Duration::from_millis(10);

/// A backlog beyond this is forgotten, so that it does not come in one burst.
const BACKLOG: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Run,
    Pause,
    End,
}

#[derive(Debug)]
struct State {
    wanted: Wanted,
    rate: Rate,
    throttle: u8,
    /// Counted up by every change of the three above.
    change: u64,
    /// Writers that run, and those of them that wait because of a pause.
    writers: u64,
    parked: u64,
    /// Why the first writer that failed did.
    failed: Option<String>,
}

#[derive(Debug)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

/// The gate's state of one writer.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Start and change of the present rate, and pages of leave given since.
    since: Option<(Instant, u64)>,
    given: u64,
    /// When the present period of throttling began.
    period: Option<Instant>,
}

/// The permission of a writer.
enum Admission {
    Pages(u64),
    Wait(Option<Duration>),
}

impl Gate {
    pub(super) fn new(rate: Rate) -> Self {
        let state = State { wanted: Wanted::Pause, rate, throttle: 0, change: 0, writers: 0, parked: 0, failed: None };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Counts a writer in, before its thread is made.
    pub(super) fn enter(&self) {
        self.lock().writers += 1;
    }

    /// Counts a writer out, with the reason if it failed.
    pub(super) fn leave(&self, failure: Option<String>) {
        let mut state = self.lock();
        state.writers = state.writers.saturating_sub(1);
        state.failed = state.failed.take().or(failure);
        self.changed.notify_all();
    }

    /// Waits until pages may be written, and says how many; `None`: the guest ends.
    pub(super) fn admit(&self, pace: &mut Pace) -> Option<u64> {
        let mut state = self.lock();
        loop {
            match state.wanted {
                Wanted::End => return None,
                Wanted::Pause => {
                    state.parked += 1;
                    self.changed.notify_all();
                    while state.wanted == Wanted::Pause {
                        self.changed.wait(&mut state);
                    }
                    state.parked -= 1;
                }
                Wanted::Run => match pace.admit(&state, Instant::now()) {
                    Admission::Pages(pages) => return Some(pages),
                    Admission::Wait(Some(time)) => {
                        self.changed.wait_for(&mut state, time);
                    }
                    Admission::Wait(None) => self.changed.wait(&mut state),
                },
            }
        }
    }

    /// As [`admit`](Self::admit), but 0 where that would wait or end.
    pub(super) fn try_admit(&self, pace: &mut Pace) -> u64 {
        let state = self.lock();
        match (state.wanted, Instant::now()) {
            (Wanted::Run, now) => match pace.admit(&state, now) {
                Admission::Pages(pages) => pages,
                Admission::Wait(_) => 0,
            },
            _ => 0,
        }
    }

    pub(super) fn run(&self) {
        self.change(|state| state.wanted = Wanted::Run);
    }

    /// Returns when every writer is paused.
    pub(super) fn pause(&self) {
        self.change(|state| state.wanted = Wanted::Pause);
        let mut state = self.lock();
        while state.wanted == Wanted::Pause && state.parked < state.writers {
            self.changed.wait(&mut state);
        }
    }

    pub(super) fn end(&self) {
        self.change(|state| state.wanted = Wanted::End);
    }

    pub(super) fn set_rate(&self, rate: Rate) {
        self.change(|state| state.rate = rate);
    }

    pub(super) fn rate(&self) -> Rate {
        self.lock().rate
    }

    pub(super) fn throttle(&self, percent: u8) {
        self.change(|state| state.throttle = percent.min(99));
    }

    pub(super) fn is_paused(&self) -> bool {
        let state = self.lock();
        state.wanted == Wanted::Pause && state.parked == state.writers
    }

    /// An error if a writer has failed.
    pub(super) fn all_live(&self, kind: GuestKind) -> Result<(), GuestError> {
        match &self.lock().failed {
            Some(why) => Err(GuestError::Failed { kind, why: why.clone() }),
            None => Ok(()),
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        if state.wanted != Wanted::End {
            change(&mut state);
        }
        state.change += 1;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Pace {
    fn admit(&mut self, state: &State, now: Instant) -> Admission {
        let kept = 100 - u64::from(state.throttle);
        match state.rate {
            Rate::BytesPerSecond(bytes) => {
                let rate = bytes / state.writers.max(1) * kept / 100;
                if rate == 0 {
                    return Admission::Wait(None);
                }
                let since = match self.since {
                    Some((since, change)) if change == state.change => since,
                    _ => self.begin(state, now),
                };
                let due = |time: Duration| {
                    u64::try_from(time.as_nanos() * u128::from(rate) / 1_000_000_000).unwrap_or(u64::MAX) / PAGE_SIZE
                };
                let behind = due(now - since).saturating_sub(self.given);
                if behind > due(BACKLOG).max(BATCH) {
                    self.begin(state, now);
                }
                if behind > 0 {
                    let pages = behind.min(BATCH);
                    self.given += pages;
                    return Admission::Pages(pages);
                }
                // When the next page is due, but not more than a thousand times a second.
                let next = Duration::from_nanos(
                    (self.given + 1).saturating_mul(PAGE_SIZE).saturating_mul(1_000_000_000) / rate,
                );
                Admission::Wait(Some((since + next).saturating_duration_since(now).max(Duration::from_millis(1))))
            }
            Rate::Max if state.throttle == 0 => Admission::Pages(BATCH),
            Rate::Max => {
                let working = PERIOD * u32::from(100 - state.throttle) / 100;
                let began = *self.period.get_or_insert(now);
                let passed = now - began;
                if passed < working {
                    return Admission::Pages(BATCH);
                }
                if passed < PERIOD {
                    return Admission::Wait(Some(PERIOD - passed));
                }
                self.period = Some(now);
                Admission::Pages(BATCH)
            }
        }
    }

    fn begin(&mut self, state: &State, now: Instant) -> Instant {
        self.since = Some((now, state.change));
        self.given = 0;
        now
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn state(rate: Rate, throttle: u8, writers: u64) -> State {
        State { wanted: Wanted::Run, rate, throttle, change: 0, writers, parked: 0, failed: None }
    }

    /// Pages that a writer gets in `time`, if it asks every millisecond, and writes a batch in no time at all.
    fn pages_in(state: &State, time: Duration) -> u64 {
        let (begin, mut pace, mut pages) = (Instant::now(), Pace::default(), 0);
        let mut now = begin;
        while now < begin + time {
            now += match pace.admit(state, now) {
                Admission::Pages(given) => {
                    pages += given;
                    Duration::from_micros(10)
                }
                Admission::Wait(time) => time.unwrap_or(Duration::from_millis(1)),
            };
        }
        pages
    }

    #[test]
    fn a_rate_is_kept_and_shared_among_the_writers() {
        let second = Duration::from_secs(1);
        let mib = Rate::BytesPerSecond(4 << 20);
        assert!((1000..=1025).contains(&pages_in(&state(mib, 0, 1), second)));
        assert!((250..=257).contains(&pages_in(&state(mib, 0, 4), second)));
        assert!((100..=103).contains(&pages_in(&state(mib, 90, 1), second)));
        assert_eq!(pages_in(&state(Rate::BytesPerSecond(0), 0, 1), second), 0);
        // Less than a page in each question.
        assert_eq!(pages_in(&state(Rate::BytesPerSecond(4096), 0, 1), 10 * second), 9);
    }

    #[test]
    fn a_throttle_takes_its_part_of_the_time_of_a_writer_without_a_rate() {
        let second = Duration::from_secs(1);
        let all = pages_in(&state(Rate::Max, 0, 1), second);
        let some = pages_in(&state(Rate::Max, 75, 1), second);
        assert!((all / 5..=all * 3 / 10).contains(&some), "{some} of {all}");
    }

    #[test]
    fn time_without_leave_to_run_is_not_made_up_for() {
        let state = state(Rate::BytesPerSecond(4 << 20), 0, 1);
        let (begin, mut pace) = (Instant::now(), Pace::default());
        let _ = pace.admit(&state, begin);
        let mut given = 0;
        let later = begin + Duration::from_secs(100);
        while let Admission::Pages(pages) = pace.admit(&state, later) {
            given += pages;
        }
        assert!(given <= 128, "{given}");
    }

    #[test]
    fn a_pause_returns_when_all_writers_stand_still_and_they_go_on_after_it() {
        let (gate, writing, writes) = (Gate::new(Rate::Max), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                gate.enter();
                scope.spawn(|| {
                    let mut pace = Pace::default();
                    while gate.admit(&mut pace).is_some() {
                        writing.fetch_add(1, Ordering::SeqCst);
                        writes.fetch_add(1, Ordering::SeqCst);
                        writing.fetch_sub(1, Ordering::SeqCst);
                    }
                    gate.leave(None);
                });
            }
            for _ in 0..100 {
                let before = writes.load(Ordering::SeqCst);
                gate.run();
                while writes.load(Ordering::SeqCst) == before {
                    std::thread::yield_now();
                }
                gate.pause();
                assert!(gate.is_paused());
                assert_eq!(writing.load(Ordering::SeqCst), 0);
            }
            gate.end();
        });
    }
}
