//! Percentiles of times.

use std::time::Duration;

use hdrhistogram::Histogram;
use limosa_page::to_micros;

/// Longest time; longer ones count as this.
const LONGEST: Duration = Duration::from_secs(3600);

/// Percentiles of a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Percentiles {
    /// Half are shorter.
    pub median: Duration,
    /// 95 of 100 are shorter.
    pub p95: Duration,
    /// The longest.
    pub max: Duration,
}

/// Times in microseconds, in a fixed amount of memory.
#[derive(Debug)]
pub(crate) struct Times(Option<Histogram<u64>>);

impl Times {
    pub(crate) fn new() -> Self {
        let longest = to_micros(LONGEST);
        // Fails for senseless bounds only.
        Self(Histogram::new_with_bounds(1, longest, 3).ok())
    }

    /// Adds a time, `count` times.
    pub(crate) fn add(&mut self, time: Duration, count: u64) {
        if let Some(times) = &mut self.0 {
            times.saturating_record_n(to_micros(time).max(1), count);
        }
    }

    /// Adds all times of another.
    pub(crate) fn add_all(&mut self, other: &Self) {
        if let (Some(times), Some(others)) = (&mut self.0, &other.0) {
            // Both have the same bounds.
            let _ = times.add(others);
        }
    }

    /// Forgets all times.
    pub(crate) fn reset(&mut self) {
        if let Some(times) = &mut self.0 {
            times.reset();
        }
    }

    pub(crate) fn percentiles(&self) -> Percentiles {
        let Some(times) = self.0.as_ref().filter(|times| !times.is_empty()) else { return Percentiles::default() };
        let at = |quantile| Duration::from_micros(times.value_at_quantile(quantile));
        Percentiles { median: at(0.5), p95: at(0.95), max: Duration::from_micros(times.max()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_times_that_were_added() {
        let mut times = Times::new();
        assert_eq!(times.percentiles(), Percentiles::default());
        for millis in 1..=100 {
            times.add(Duration::from_millis(millis), 1);
        }
        let Percentiles { median, p95, max } = times.percentiles();
        let near =
            |time: Duration, millis: u64| time.abs_diff(Duration::from_millis(millis)) < Duration::from_millis(1);
        assert!(near(median, 50) && near(p95, 95) && near(max, 100), "{median:?} {p95:?} {max:?}");
    }
}
