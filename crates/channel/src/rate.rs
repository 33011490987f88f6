//! A rate limit that can change while threads wait for it.
//!
//! A token bucket that may be overdrawn: a thread waits until the bucket is not in debt and then takes its bytes, so a
//! request of any size passes once and pays afterwards. Idle time fills the bucket with a tenth of a second's worth at
//! most. A change of the rate wakes every waiter, and the remaining debt is paid at the new rate.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use limosa_page::to_usize;
use parking_lot::{Condvar, Mutex, MutexGuard};

const SECOND: u128 = 1_000_000_000;

/// The bytes of one call under a limit: a twentieth of a second's worth between these bounds.
const CHUNK: (u64, u64) = (4096, 4 << 20);

/// The lower bound for a list: 512 pages with a header each, the most that the kernel takes in one call, unless that is
/// more than a second's worth. A batch goes out in one call, and its debt is paid before the next one.
const BATCH_LEAST: u64 = 512 * (4096 + 128);

/// The longest single wait; a longer one is waited for in pieces.
const PAUSE_MAX: Duration = Duration::from_secs(3600);

/// A shared limit in bytes per second; clones are handles to the same bucket, also across channels.
///
/// ```
/// use std::num::NonZeroU64;
/// use limosa_channel::RateLimit;
///
/// let limit = RateLimit::new(NonZeroU64::new(100 << 20));
/// limit.take(4096);
/// limit.set(None);
/// assert_eq!(limit.get(), None);
/// ```
#[derive(Clone, Debug, Default)]
pub struct RateLimit {
    limiter: Arc<Limiter>,
}

#[derive(Debug, Default)]
struct Limiter {
    /// Bytes per second; 0 is no limit. Written under the bucket's lock, read without it where there is no limit.
    rate: AtomicU64,
    bucket: Mutex<Bucket>,
    changed: Condvar,
}

impl RateLimit {
    /// Creates a limit in bytes per second, or an unlimited one.
    pub fn new(bytes_per_second: Option<NonZeroU64>) -> Self {
        let limit = Self::default();
        limit.set(bytes_per_second);
        limit
    }

    /// Changes the limit. Waiting threads are woken and continue at the new rate; lifting the limit forgives the debt.
    pub fn set(&self, bytes_per_second: Option<NonZeroU64>) {
        let rate = bytes_per_second.map_or(0, NonZeroU64::get);
        let mut bucket = self.bucket();
        let now = Instant::now();
        match self.limiter.rate.load(Ordering::Relaxed) {
            0 => *bucket = Bucket { tokens: 0, filled: Some(now) },
            old => bucket.fill(old, now),
        }
        self.limiter.rate.store(rate, Ordering::Relaxed);
        drop(bucket);
        self.limiter.changed.notify_all();
    }

    /// Returns the limit in bytes per second.
    pub fn get(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.limiter.rate.load(Ordering::Relaxed))
    }

    /// Waits until `bytes` may pass, and returns how long that took. Without a limit this is one relaxed load.
    pub fn take(&self, bytes: u64) -> Duration {
        self.take_unless(bytes, &AtomicBool::new(false)).unwrap_or_default()
    }

    /// Returns how long [`take`](Self::take) would wait now. A caller with other work polls this, and calls
    /// [`spend`](Self::spend) once it is zero.
    pub fn delay(&self) -> Duration {
        let Some(rate) = self.get() else { return Duration::ZERO };
        let mut bucket = self.bucket();
        bucket.fill(rate.get(), Instant::now());
        bucket.pause(rate.get())
    }

    /// Takes `bytes` without waiting, into debt if need be.
    pub fn spend(&self, bytes: u64) {
        if self.get().is_some() {
            let mut bucket = self.bucket();
            bucket.tokens = bucket.tokens.saturating_sub_unsigned(bytes);
        }
    }

    /// As `take`, but returns `None` when `cancelled` is set and [`wake`](Self::wake) is called.
    pub(crate) fn take_unless(&self, bytes: u64, cancelled: &AtomicBool) -> Option<Duration> {
        if self.limiter.rate.load(Ordering::Relaxed) == 0 {
            return Some(Duration::ZERO);
        }
        let mut began = None;
        let mut bucket = self.bucket();
        loop {
            if cancelled.load(Ordering::Acquire) {
                return None;
            }
            let rate = self.limiter.rate.load(Ordering::Relaxed);
            let now = Instant::now();
            let waited = now - *began.get_or_insert(now);
            if rate == 0 {
                return Some(waited);
            }
            bucket.fill(rate, now);
            if bucket.take(bytes) {
                return Some(waited);
            }
            let pause = bucket.pause(rate).min(PAUSE_MAX);
            self.limiter.changed.wait_for(&mut bucket, pause);
        }
    }

    /// Makes every waiter check again whether it is cancelled.
    pub(crate) fn wake(&self) {
        // Under the lock, or a waiter between its check and its wait would miss it.
        drop(self.bucket());
        self.limiter.changed.notify_all();
    }

    /// Returns the maximum number of bytes of one call that keeps the rate even; unbounded without a limit.
    pub(crate) fn chunk(&self) -> usize {
        self.get().map_or(usize::MAX, |rate| to_usize((rate.get() / 20).clamp(CHUNK.0, CHUNK.1)))
    }

    /// As [`chunk`](Self::chunk), for a list that is written.
    pub(crate) fn batch(&self) -> usize {
        self.get().map_or(usize::MAX, |rate| self.chunk().max(to_usize(rate.get().min(BATCH_LEAST))))
    }

    fn bucket(&self) -> MutexGuard<'_, Bucket> {
        self.limiter.bucket.lock()
    }
}

/// The arithmetic of the bucket, without a clock.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    /// Bytes that may pass now; negative while there is debt.
    tokens: i64,
    /// Up to when tokens were earned.
    filled: Option<Instant>,
}

impl Bucket {
    fn fill(&mut self, rate: u64, now: Instant) {
        let filled = *self.filled.get_or_insert(now);
        let earned = now.saturating_duration_since(filled).as_nanos() * u128::from(rate) / SECOND;
        let capacity = (rate / 10).cast_signed();
        let tokens = self.tokens.saturating_add(i64::try_from(earned).unwrap_or(i64::MAX));
        if tokens >= capacity {
            (self.tokens, self.filled) = (capacity, Some(now));
        } else {
            // Only the time that earned whole bytes is spent: otherwise frequent calls at a low rate would lose the
            // fractions.
            let spent = duration(earned.saturating_mul(SECOND) / u128::from(rate));
            (self.tokens, self.filled) = (tokens, Some(filled.checked_add(spent).unwrap_or(now)));
        }
    }

    fn take(&mut self, bytes: u64) -> bool {
        let free = self.tokens >= 0;
        if free {
            self.tokens = self.tokens.saturating_sub_unsigned(bytes);
        }
        free
    }

    /// Returns the time until the debt is paid.
    fn pause(&self, rate: u64) -> Duration {
        let debt = if self.tokens < 0 { self.tokens.unsigned_abs() } else { 0 };
        duration((u128::from(debt) * SECOND).div_ceil(u128::from(rate.max(1))))
    }
}

/// The longest pause: 584 years.
const LONGEST: Duration = Duration::from_nanos(u64::MAX);

/// Returns a duration of `nanos` nanoseconds, or the longest one if they are more than 584 years.
fn duration(nanos: u128) -> Duration {
    u64::try_from(nanos).map_or(LONGEST, Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(start: Instant, milliseconds: u64) -> Instant {
        start + Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_request_of_any_size_passes_once_and_pays_afterwards() {
        let start = Instant::now();
        let mut bucket = Bucket::default();
        bucket.fill(1000, start);
        assert!(bucket.take(5000));
        assert!(!bucket.take(1));
        assert_eq!(bucket.pause(1000), Duration::from_secs(5));
        bucket.fill(1000, after(start, 4999));
        assert!(!bucket.take(1));
        bucket.fill(1000, after(start, 5000));
        assert!(bucket.take(1));
    }

    #[test]
    fn idle_time_is_worth_a_tenth_of_a_second() {
        let start = Instant::now();
        let mut bucket = Bucket::default();
        bucket.fill(1000, start);
        bucket.fill(1000, after(start, 3_600_000));
        assert_eq!(bucket.tokens, 100);
    }

    #[test]
    fn fractions_of_a_byte_are_not_lost_by_looking_often() {
        let start = Instant::now();
        let mut bucket = Bucket::default();
        bucket.fill(3, start);
        assert!(bucket.take(30));
        for step in 0..=10_000 {
            bucket.fill(3, after(start, step));
        }
        assert_eq!(bucket.tokens, 0);
    }

    #[test]
    fn debt_shrinks_at_the_rate_of_the_moment() {
        let start = Instant::now();
        let mut bucket = Bucket::default();
        bucket.fill(10, start);
        assert!(bucket.take(1_000_000));
        assert_eq!(bucket.pause(10), Duration::from_secs(100_000));
        assert_eq!(bucket.pause(1_000_000), Duration::from_secs(1));
    }

    #[test]
    fn extreme_rates_and_sizes_do_not_overflow() {
        let start = Instant::now();
        let mut bucket = Bucket::default();
        for (rate, milliseconds) in [(u64::MAX, 0), (1, 1_000_000_000), (u64::MAX, u64::MAX / 2_000_000), (1, 0)] {
            bucket.fill(rate, after(start, milliseconds));
            bucket.take(u64::MAX);
            bucket.take(u64::MAX);
            assert!(bucket.pause(rate) <= Duration::from_nanos(u64::MAX));
        }
    }

    #[test]
    fn the_chunk_is_bounded_on_both_sides() {
        let chunk = |rate| RateLimit::new(NonZeroU64::new(rate)).chunk() as u64;
        assert_eq!([chunk(1), chunk(20 << 20), chunk(u64::MAX)], [CHUNK.0, 1 << 20, CHUNK.1]);
        assert_eq!(RateLimit::default().chunk(), usize::MAX);
        let batch = |rate| RateLimit::new(NonZeroU64::new(rate)).batch() as u64;
        assert_eq!([batch(1), batch(1 << 20), batch(3 << 20)], [CHUNK.0, 1 << 20, BATCH_LEAST]);
        assert_eq!([batch(60 << 20), batch(u64::MAX)], [3 << 20, CHUNK.1]);
        assert_eq!(RateLimit::default().batch(), usize::MAX);
    }
}
