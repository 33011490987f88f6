//! An axis of a picture: from values to places, with ticks at round numbers.

/// An axis.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Axis {
    values: (f64, f64),
    places: (f64, f64),
    step: f64,
}

impl Axis {
    /// From `low` to `high` at least, over these places, with about `wanted` ticks. Values that are no numbers are taken for
    /// an axis of length 1.
    pub(crate) fn new(low: f64, high: f64, places: (f64, f64), wanted: u8) -> Self {
        let span = if (high - low).is_finite() && high > low { high - low } else { 1.0 };
        let step = round_step(span / f64::from(wanted.max(1)));
        Self { values: (low, low + span), places, step }
    }

    /// Where a value is; what is outside is at the end it is beyond.
    pub(crate) fn place(&self, value: f64) -> f64 {
        let part = ((value - self.values.0) / (self.values.1 - self.values.0)).clamp(0.0, 1.0);
        self.places.0 + part * (self.places.1 - self.places.0)
    }

    /// The last value.
    pub(crate) fn end(&self) -> f64 {
        self.values.1
    }

    /// Round numbers on it.
    pub(crate) fn ticks(&self) -> Vec<f64> {
        let first = (self.values.0 / self.step).ceil();
        (0..64u32).map(|n| (first + f64::from(n)) * self.step).take_while(|v| *v <= self.values.1 * 1.000_001).collect()
    }

    /// How a tick is written.
    pub(crate) fn label(&self, value: f64) -> String {
        number(value)
    }
}

/// The smallest of 1, 2, 5, 10, 20, ... that is not below.
fn round_step(least: f64) -> f64 {
    let decade = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|one| one * decade).find(|step| *step >= least * 0.999_999).unwrap_or(10.0 * decade)
}

/// A number with as many digits as it needs.
pub(crate) fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    let (whole, rest) = text.split_once('.').map_or((text, None), |(whole, rest)| (whole, Some(rest)));
    let mut grouped = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) && whole.len() > 4 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    rest.map_or(grouped.clone(), |rest| format!("{grouped}.{rest}"))
}

/// `0.42 ms`, `6.5 ms`, `120 ms`, `1.42 s`.
pub(crate) fn duration(millis: f64) -> String {
    match millis {
        short if short < 1.0 => format!("{short:.2} ms"),
        short if short < 10.0 => format!("{short:.1} ms"),
        middle if middle < 1000.0 => format!("{middle:.0} ms"),
        long => format!("{:.2} s", long / 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_within_the_axis() {
        for (high, first, last) in [(256.0, 0.0, 200.0), (1.0, 0.0, 1.0), (0.037, 0.0, 0.03), (12_345.0, 0.0, 10_000.0)]
        {
            let ticks = Axis::new(0.0, high, (0.0, 100.0), 4).ticks();
            assert_eq!((ticks[0], number(*ticks.last().unwrap())), (first, number(last)), "{high}: {ticks:?}");
            assert!((3..=6).contains(&ticks.len()), "{high}: {ticks:?}");
        }
    }

    #[test]
    fn no_value_leaves_the_picture() {
        for axis in [
            Axis::new(0.0, 10.0, (5.0, 15.0), 4),
            Axis::new(0.0, 0.0, (5.0, 15.0), 4),
            Axis::new(0.0, f64::NAN, (5.0, 15.0), 4),
        ] {
            for value in [-1.0, 0.0, 0.5, 99.0] {
                assert!((5.0..=15.0).contains(&axis.place(value)));
            }
        }
    }

    #[test]
    fn numbers_and_times_have_the_digits_that_people_read() {
        assert_eq!(["0", "0.25", "200", "12,000"].map(str::to_owned), [0.0, 0.25, 200.0, 12000.0].map(number));
        assert_eq!(
            ["0.42 ms", "6.5 ms", "120 ms", "1.42 s"].map(str::to_owned),
            [0.42, 6.5, 120.0, 1420.0].map(duration)
        );
    }
}
