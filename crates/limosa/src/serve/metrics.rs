//! Exports and counters of a server, for Prometheus.

use std::sync::Arc;

use limosa_export::nbd::ServerCounters;
use limosa_export::{Export, ExportCounters};

use crate::metrics::text::{Page, label};

/// An export, read once for all its metrics.
struct Seen<'a> {
    export: &'a Export,
    label: String,
    clients: u64,
    counters: ExportCounters,
}

/// Adds a family with a sample for each export. `family`: its name, its kind, and a text for people.
fn each(page: &mut Page, family: [&str; 3], exports: &[Seen<'_>], value: impl Fn(&Seen<'_>) -> u64) {
    let [name, kind, help] = family;
    page.family(name, kind, help);
    exports.iter().for_each(|export| page.sample(name, &export.label, value(export)));
}

/// Adds a family with a sample for each export and kind of request.
fn kinds(
    page: &mut Page,
    (name, help): (&str, &str),
    exports: &[Seen<'_>],
    of: impl Fn(&ExportCounters) -> Vec<(&'static str, u64)>,
) {
    page.family(name, "counter", help);
    for export in exports {
        for (kind, value) in of(&export.counters) {
            page.sample(name, &format!("{},kind=\"{kind}\"", export.label), value);
        }
    }
}

/// Returns the metrics of a server, of its exports and their numbers of clients.
pub(super) fn page<'a>(server: &ServerCounters, exports: impl IntoIterator<Item = (&'a Arc<Export>, u64)>) -> String {
    let mut page = Page::new("limosa_serve_");
    let exports: Vec<_> = exports
        .into_iter()
        .map(|(export, clients)| Seen {
            export,
            label: label("export", export.name()),
            clients,
            counters: export.counters(),
        })
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
    each(&mut page, ["export_size_bytes", "gauge", "Length of an export."], &exports, |seen| seen.export.size());
    each(&mut page, ["export_clients", "gauge", "Clients and front ends of an export."], &exports, |seen| seen.clients);
    let quiesced = |seen: &Seen<'_>| u64::from(seen.export.is_quiesced());
    each(
        &mut page,
        ["export_quiesced", "gauge", "1 if requests wait until the export is resumed."],
        &exports,
        quiesced,
    );
    kinds(&mut page, ("requests_total", "Requests that succeeded."), &exports, |counters| {
        let ExportCounters { reads, writes, zeroes, flushes, others, .. } = *counters;
        vec![("read", reads), ("write", writes), ("zero", zeroes), ("flush", flushes), ("other", others)]
    });
    kinds(&mut page, ("request_bytes_total", "Bytes of requests that succeeded."), &exports, |counters| {
        vec![("read", counters.read_bytes), ("write", counters.written_bytes), ("zero", counters.zeroed_bytes)]
    });
    let failures = |seen: &Seen<'_>| seen.counters.failures;
    each(&mut page, ["requests_failed_total", "counter", "Requests that failed."], &exports, failures);
    let help = "Time from a request that is complete in the server to its reply.";
    page.family("request_duration_seconds", "histogram", help);
    for seen in &exports {
        for (kind, times) in seen.export.latencies().iter() {
            let labels = format!("{},kind=\"{}\"", seen.label, kind.name());
            page.histogram("request_duration_seconds", &labels, times);
        }
    }
    page.into_text()
}
