//! Prometheus' text format, version 0.0.4.

use std::fmt::{Display, Write as _};

use hdrhistogram::Histogram;

/// Upper bounds of the buckets of a time, as text in seconds and in nanoseconds.
const BUCKETS: [(&str, u64); 19] = [
    ("0.00001", 10_000),
    ("0.000025", 25_000),
    ("0.00005", 50_000),
    ("0.0001", 100_000),
    ("0.00025", 250_000),
    ("0.0005", 500_000),
    ("0.001", 1_000_000),
    ("0.0025", 2_500_000),
    ("0.005", 5_000_000),
    ("0.01", 10_000_000),
    ("0.025", 25_000_000),
    ("0.05", 50_000_000),
    ("0.1", 100_000_000),
    ("0.25", 250_000_000),
    ("0.5", 500_000_000),
    ("1", 1_000_000_000),
    ("2.5", 2_500_000_000),
    ("5", 5_000_000_000),
    ("10", 10_000_000_000),
];

/// A page of metrics, as it grows. Writing into a string does not fail.
#[derive(Debug)]
pub(crate) struct Page {
    /// The beginning of all names, with its underscore.
    prefix: &'static str,
    text: String,
}

impl Page {
    /// An empty page of metrics whose names begin with `prefix`.
    pub(crate) const fn new(prefix: &'static str) -> Self {
        Self { prefix, text: String::new() }
    }

    /// The page.
    pub(crate) fn into_text(self) -> String {
        self.text
    }

    /// Begins a family: its name, its kind, and a text for people.
    pub(crate) fn family(&mut self, name: &str, kind: &str, help: &str) {
        let prefix = self.prefix;
        let _ = write!(self.text, "# HELP {prefix}{name} {help}\n# TYPE {prefix}{name} {kind}\n");
    }

    /// Adds a sample to a family.
    pub(crate) fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let prefix = self.prefix;
        let _ = if labels.is_empty() {
            writeln!(self.text, "{prefix}{name} {value}")
        } else {
            writeln!(self.text, "{prefix}{name}{{{labels}}} {value}")
        };
    }

    /// Adds a family of one sample.
    pub(crate) fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.sample(name, "", value);
    }

    /// Adds times in nanoseconds to a family of histograms.
    pub(crate) fn histogram(&mut self, name: &str, labels: &str, times: &Histogram<u64>) {
        let mut counts = [0_u64; BUCKETS.len()];
        let mut sum = 0.0;
        for value in times.iter_recorded() {
            let (time, count) = (value.value_iterated_to(), value.count_since_last_iteration());
            // Precise enough: a double is exact up to 104 days of nanoseconds.
            sum += time as f64 * count as f64;
            let fitting = BUCKETS.iter().zip(&mut counts).filter(|((_, bound), _)| time <= *bound);
            fitting.for_each(|(_, total)| *total += count);
        }
        let comma = if labels.is_empty() { "" } else { "," };
        let bucket = format!("{name}_bucket");
        for ((bound, _), count) in BUCKETS.iter().zip(counts) {
            self.sample(&bucket, &format!("{labels}{comma}le=\"{bound}\""), count);
        }
        self.sample(&bucket, &format!("{labels}{comma}le=\"+Inf\""), times.len());
        self.sample(&format!("{name}_sum"), labels, sum / 1e9);
        self.sample(&format!("{name}_count"), labels, times.len());
    }
}

/// A label. Backslashes, quotes and line ends of its value are escaped.
pub(crate) fn label(name: &str, value: &str) -> String {
    format!("{name}=\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_cannot_break_out_of_their_label() {
        assert_eq!(label("export", "a\"} 1\nb\\"), r#"export="a\"} 1\nb\\""#);
    }

    #[test]
    fn buckets_are_cumulative_and_end_with_all() {
        let mut times = Histogram::new(2).unwrap();
        [5_000, 60_000, 61_000, 20_000_000_000].into_iter().for_each(|nanos| times.record(nanos).unwrap());
        for labels in ["kind=\"read\"", ""] {
            let mut page = Page::new("limosa_");
            page.histogram("seconds", labels, &times);
            let text = page.into_text();
            let comma = if labels.is_empty() { "" } else { "," };
            let count = |le: &str| {
                let start = format!("limosa_seconds_bucket{{{labels}{comma}le=\"{le}\"}} ");
                text.lines().find_map(|line| line.strip_prefix(&start)).unwrap().parse().unwrap()
            };
            let counts: Vec<u64> = ["0.00001", "0.00005", "0.0001", "10", "+Inf"].into_iter().map(count).collect();
            assert_eq!(counts, [1, 1, 3, 3, 4]);
            assert!(text.trim_end().ends_with(" 4") && text.contains("limosa_seconds_count"), "{text}");
            let sum = text.lines().find_map(|line| line.strip_prefix("limosa_seconds_sum")).unwrap();
            let sum: f64 = sum.split(' ').next_back().unwrap().parse().unwrap();
            assert!((19.8..20.2).contains(&sum), "{sum}");
        }
    }
}
