//! How much may be on its way that nobody waits for: a pure plan.
//!
//! A block that a reader waits for shares the line with all that was asked for before. So no more is asked for ahead of
//! readers than fills the line: the rate at which bytes came, times the shortest time of a request. Both are measured:
//! the rate of a flight is that of all bytes that came while it lasted.

use std::time::{Duration, Instant};

/// Of what fills the line, so that a line that has become faster is noticed.
const GAIN: f64 = 2.0;

/// The least that may be on its way, in bytes.
const LEAST: u64 = 2 << 20;

/// How long a measurement counts.
const LASTS: Duration = Duration::from_secs(5);

/// The line as it was measured.
#[derive(Debug)]
pub(super) struct Pace {
    /// Bytes that came since the object was opened.
    delivered: u64,
    /// The highest rate, in bytes per second, and when it was measured.
    rate: Option<(f64, Instant)>,
    /// The shortest flight, and when it was measured.
    shortest: Option<(Duration, Instant)>,
}

/// The beginning of a flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Departure {
    at: Instant,
    delivered: u64,
}

impl Pace {
    pub(super) const fn new() -> Self {
        Self { delivered: 0, rate: None, shortest: None }
    }

    pub(super) const fn depart(&self, now: Instant) -> Departure {
        Departure { at: now, delivered: self.delivered }
    }

    /// A flight has brought these bytes.
    pub(super) fn arrive(&mut self, departure: Departure, bytes: u64, now: Instant) {
        self.delivered += bytes;
        let lasted = now.saturating_duration_since(departure.at);
        // What came from the cache on disk says nothing of the line.
        if bytes == 0 || lasted.is_zero() {
            return;
        }
        let is_old = |since: Instant| now.saturating_duration_since(since) > LASTS;
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let rate = (self.delivered - departure.delivered) as f64 / lasted.as_secs_f64();
        if self.rate.is_none_or(|(known, since)| rate >= known || is_old(since)) {
            self.rate = Some((rate, now));
        }
        if self.shortest.is_none_or(|(known, since)| lasted <= known || is_old(since)) {
            self.shortest = Some((lasted, now));
        }
    }

    /// Bytes that may be on their way ahead of readers, at most `most`.
    pub(super) fn window(&self, most: u64) -> u64 {
        let (Some((rate, _)), Some((shortest, _))) = (self.rate, self.shortest) else { return LEAST.min(most) };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an estimate, which is positive")]
        let filled = (rate * shortest.as_secs_f64() * GAIN) as u64;
        filled.clamp(LEAST.min(most), most)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Has flights of 256 KiB over a line of this rate and latency, as many as the plan allows. Returns the bytes in
    /// flight at the end, and the rate.
    fn fly(pace: &mut Pace, begun: Instant, rate: f64, latency: Duration) -> (u64, f64) {
        let bytes = 256 << 10;
        let (mut now, mut line_free, mut came) = (begun, begun, 0_u64);
        let mut flights: VecDeque<(Departure, Instant)> = VecDeque::new();
        while now < begun + Duration::from_secs(2) {
            while (flights.len() as u64 + 1) * bytes <= pace.window(64 << 20) {
                let begins = line_free.max(now + latency);
                line_free = begins + Duration::from_secs_f64(bytes as f64 / rate);
                flights.push_back((pace.depart(now), line_free));
            }
            let (departure, arrives) = flights.pop_front().unwrap();
            now = arrives;
            came += bytes;
            pace.arrive(departure, bytes, now);
        }
        (flights.len() as u64 * bytes, came as f64 / (now - begun).as_secs_f64())
    }

    #[test]
    fn the_line_is_full_and_not_much_more_than_that() {
        for (carried, latency) in [(125_000_000_u64, 20_u64), (125_000_000, 80), (125_000_000, 1), (12_000_000, 50)] {
            let rate = carried as f64;
            let (mut pace, begun) = (Pace::new(), Instant::now());
            let (in_flight, reached) = fly(&mut pace, begun, rate, Duration::from_millis(latency));
            assert!(reached > 0.8 * rate, "{latency} ms: {reached} of {rate}");
            let fills = carried * latency / 1000;
            assert!(
                in_flight <= LEAST.max(3 * fills),
                "{latency} ms: {in_flight} in flight, and {fills} fill the line"
            );
            // It becomes slower.
            let later = begun + Duration::from_secs(60);
            let (in_flight, _) = fly(&mut pace, later, rate / 10.0, Duration::from_millis(latency));
            assert!(in_flight <= LEAST.max(fills), "{latency} ms: {in_flight} in flight later");
        }
    }
}
