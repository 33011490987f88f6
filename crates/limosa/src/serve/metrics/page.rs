//! Exports and counters in Prometheus' text format, version 0.0.4.

use std::fmt::{Display, Write as _};
use std::sync::Arc;

use hdrhistogram::Histogram;
use limosa_export::nbd::ServerCounters;
use limosa_export::{Export, ExportCounters};

/// Upper bounds of the buckets of a request's time, as text in seconds and in nanoseconds.
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
#[derive(Debug, Default)]
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP limosa_serve_{name} {help}\n# TYPE limosa_serve_{name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = if labels.is_empty() {
            writeln!(self.0, "limosa_serve_{name} {value}")
        } else {
            writeln!(self.0, "limosa_serve_{name}{{{labels}}} {value}")
        };
    }

    /// A family of one sample.
    fn single(&mut self, name: &str, kind: &str, help: &str, value: u64) {
        self.family(name, kind, help);
        self.sample(name, "", value);
    }

    /// A family with a sample for each export. `family`: its name, its kind, and a text for people.
    fn each(&mut self, family: [&str; 3], exports: &[Seen<'_>], value: impl Fn(&Seen<'_>) -> u64) {
        let [name, kind, help] = family;
        self.family(name, kind, help);
        exports.iter().for_each(|export| self.sample(name, &export.label, value(export)));
    }

    /// A family with a sample for each export and kind of request.
    fn kinds(
        &mut self,
        name: &str,
        help: &str,
        exports: &[Seen<'_>],
        of: impl Fn(&ExportCounters) -> Vec<(&str, u64)>,
    ) {
        self.family(name, "counter", help);
        for export in exports {
            for (kind, value) in of(&export.counters) {
                self.sample(name, &format!("{},kind=\"{kind}\"", export.label), value);
            }
        }
    }

    fn histogram(&mut self, labels: &str, times: &Histogram<u64>) {
        let mut counts = [0_u64; BUCKETS.len()];
        let mut sum = 0.0;
        for value in times.iter_recorded() {
            let (time, count) = (value.value_iterated_to(), value.count_since_last_iteration());
            // Precise enough: a double is exact up to 104 days of nanoseconds.
            sum += time as f64 * count as f64;
            let fitting = BUCKETS.iter().zip(&mut counts).filter(|((_, bound), _)| time <= *bound);
            fitting.for_each(|(_, total)| *total += count);
        }
        for ((bound, _), count) in BUCKETS.iter().zip(counts) {
            self.sample("request_duration_seconds_bucket", &format!("{labels},le=\"{bound}\""), count);
        }
        self.sample("request_duration_seconds_bucket", &format!("{labels},le=\"+Inf\""), times.len());
        self.sample("request_duration_seconds_sum", labels, sum / 1e9);
        self.sample("request_duration_seconds_count", labels, times.len());
    }
}

/// An export, read once for all its metrics.
struct Seen<'a> {
    export: &'a Export,
    label: String,
    clients: u64,
    counters: ExportCounters,
}

/// Returns the metrics of a server, of its exports and their numbers of clients.
pub(super) fn page<'a>(server: &ServerCounters, exports: impl IntoIterator<Item = (&'a Arc<Export>, u64)>) -> String {
    let mut page = Page::default();
    let exports: Vec<_> = exports
        .into_iter()
        .map(|(export, clients)| Seen { export, label: label(export.name()), clients, counters: export.counters() })
        .collect();
    page.single("connections", "gauge", "Connections that exist.", server.active);
    let counters = [
        ("connections_total", "Connections that were accepted.", server.connections),
        ("connections_refused_total", "Connections that were closed because there were too many.", server.refused),
        ("handshake_timeouts_total", "Handshakes that did not end in time.", server.handshake_timeouts),
        ("connections_stalled_total", "Connections that were ended without progress.", server.stalled),
        ("protocol_errors_total", "Connections that were ended because of what was sent.", server.protocol_errors),
        ("receives_total", "Calls that received bytes.", server.receives),
        ("sends_total", "Calls that sent bytes.", server.sends),
    ];
    for (name, help, value) in counters {
        page.single(name, "counter", help, value);
    }
    page.each(["export_size_bytes", "gauge", "Length of an export."], &exports, |seen| seen.export.size());
    page.each(["export_clients", "gauge", "Clients and front ends of an export."], &exports, |seen| seen.clients);
    let quiesced = |seen: &Seen<'_>| u64::from(seen.export.is_quiesced());
    page.each(["export_quiesced", "gauge", "1 if requests wait until the export is resumed."], &exports, quiesced);
    page.kinds("requests_total", "Requests that succeeded.", &exports, |counters| {
        let ExportCounters { reads, writes, zeroes, flushes, others, .. } = *counters;
        vec![("read", reads), ("write", writes), ("zero", zeroes), ("flush", flushes), ("other", others)]
    });
    page.kinds("request_bytes_total", "Bytes of requests that succeeded.", &exports, |counters| {
        vec![("read", counters.read_bytes), ("write", counters.written_bytes), ("zero", counters.zeroed_bytes)]
    });
    let failures = |seen: &Seen<'_>| seen.counters.failures;
    page.each(["requests_failed_total", "counter", "Requests that failed."], &exports, failures);
    let help = "Time from a request that is complete in the server to its reply.";
    page.family("request_duration_seconds", "histogram", help);
    for seen in &exports {
        for (kind, times) in seen.export.latencies().iter() {
            page.histogram(&format!("{},kind=\"{}\"", seen.label, kind.name()), times);
        }
    }
    page.0
}

/// The label that names an export. Backslashes, quotes and line ends are escaped.
fn label(name: &str) -> String {
    format!("export=\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_out_of_their_label() {
        assert_eq!(label("a\"} 1\nb\\"), r#"export="a\"} 1\nb\\""#);
    }

    #[test]
    fn buckets_are_cumulative_and_end_with_all() {
        let mut times = Histogram::new(2).unwrap();
        [5_000, 60_000, 61_000, 20_000_000_000].into_iter().for_each(|nanos| times.record(nanos).unwrap());
        let mut page = Page::default();
        page.histogram("kind=\"read\"", &times);
        let count = |le: &str| {
            let start = format!("limosa_serve_request_duration_seconds_bucket{{kind=\"read\",le=\"{le}\"}} ");
            page.0.lines().find_map(|line| line.strip_prefix(&start)).unwrap().parse().unwrap()
        };
        let counts: Vec<u64> = ["0.00001", "0.00005", "0.0001", "10", "+Inf"].into_iter().map(count).collect();
        assert_eq!(counts, [1, 1, 3, 3, 4]);
        assert!(page.0.contains("_count{kind=\"read\"} 4\n"), "{}", page.0);
        let sum = page.0.lines().find_map(|line| line.strip_prefix("limosa_serve_request_duration_seconds_sum"));
        let sum: f64 = sum.unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        assert!((19.8..20.2).contains(&sum), "{sum}");
    }
}
