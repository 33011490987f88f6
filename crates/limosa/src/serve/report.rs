//! Exports and counters as JSON.

use std::time::Duration;

use hdrhistogram::Histogram;
use limosa_console::quantity;
use limosa_export::nbd::ServerCounters;
use limosa_export::{Export, ProtectionStatus, RequestKind, VmPeers};
use limosa_image::DirtyBitmap;
use limosa_storage::block_on;
use serde_json::{Map, Value, json};

/// An export as it was opened.
pub(super) fn description(export: &Export) -> Map<String, Value> {
    let disk = export.disk();
    let mut object = Map::new();
    object.insert("name".into(), export.name().into());
    object.insert("image".into(), (&**disk.name()).into());
    object.insert("format".into(), disk.format().into());
    object.insert("size".into(), export.size().into());
    object.insert("read-only".into(), export.is_read_only().into());
    object
}

/// An export as it is used, with its number of clients.
pub(super) fn state(export: &Export, clients: u64) -> Value {
    let mut object = description(export);
    object.insert("description".into(), export.description_text().into());
    object.insert("bitmaps".into(), bitmaps(export).into());
    object.insert("quiesced".into(), export.is_quiesced().into());
    object.insert("clients".into(), clients.into());
    if let Some(protection) = protection(export) {
        object.insert("protection".into(), protection);
    }
    object.insert("counters".into(), counters(export).into());
    object.insert("latency-ms".into(), latencies(export).into());
    object.into()
}

/// The epochs of an export; `None`: it is not protected.
pub(super) fn protection(export: &Export) -> Option<Value> {
    let ProtectionStatus { keeper, epochs, peers, failure, .. } = export.protection()?;
    Some(json!({
        "keeper": keeper,
        "open": epochs.open,
        "log": epochs.log,
        "sealed": epochs.sealed,
        "prepared": epochs.prepared,
        "kept": epochs.kept,
        "merged": epochs.merged,
        "log-bytes": epochs.log_bytes,
        "extents": epochs.extents,
        "vm": vm(&peers),
        "failure": failure,
    }))
}

/// The VM of a protected disk, by its connections.
pub(super) fn vm(peers: &VmPeers) -> Value {
    json!({
        "processes": peers.pids(),
        "other-hosts": peers.has_other_hosts(),
        "recognized": peers.are_recognized(),
    })
}

/// The dirty bitmaps of an export's disk. Those of a disk that is only read are not looked at unless clients can read
/// one of them.
pub(super) fn bitmaps(export: &Export) -> Vec<Value> {
    let disk = export.disk();
    let names = export.bitmap_names();
    if disk.is_read_only() && names.is_empty() {
        return Vec::new();
    }
    let bitmap = |DirtyBitmap { name, granularity, enabled, set, .. }: DirtyBitmap| {
        json!({
            "name": name,
            "granularity": granularity,
            "enabled": enabled,
            "inconsistent": set.is_none(),
            "dirty-bytes": set.map(|bits| bits.saturating_mul(granularity).min(disk.len())),
            "exported": names.contains(&name),
        })
    };
    block_on(disk.bitmaps()).unwrap_or_default().into_iter().map(bitmap).collect()
}

/// How long the requests of each kind took, in milliseconds.
fn latencies(export: &Export) -> Map<String, Value> {
    let millis = |nanos| quantity::millis(Duration::from_nanos(nanos));
    let kind = |(kind, times): (RequestKind, &Histogram<u64>)| {
        let at = |quantile| millis(times.value_at_quantile(quantile));
        let object = json!({
            "median": at(0.5),
            "p90": at(0.9),
            "p99": at(0.99),
            "p99.9": at(0.999),
            "longest": millis(times.max()),
        });
        (kind.name().to_owned(), object)
    };
    export.latencies().iter().map(kind).collect()
}

/// The counters of an export.
pub(super) fn counters(export: &Export) -> Map<String, Value> {
    let counters = export.counters();
    let pairs = [
        ("reads", counters.reads),
        ("read-bytes", counters.read_bytes),
        ("writes", counters.writes),
        ("written-bytes", counters.written_bytes),
        ("zeroes", counters.zeroes),
        ("zeroed-bytes", counters.zeroed_bytes),
        ("flushes", counters.flushes),
        ("others", counters.others),
        ("failures", counters.failures),
    ];
    pairs.into_iter().map(|(name, count)| (name.to_owned(), count.into())).collect()
}

/// An export after its end.
pub(super) fn ended(export: &Export) -> Value {
    let name = std::iter::once(("name".to_owned(), export.name().into()));
    Value::Object(name.chain(counters(export)).collect())
}

/// The counters of a server.
pub(super) fn server_counters(counters: &ServerCounters) -> Value {
    json!({
        "connections": counters.connections,
        "refused": counters.refused,
        "handshake-timeouts": counters.handshake_timeouts,
        "stalled": counters.stalled,
        "protocol-errors": counters.protocol_errors,
        "receives": counters.receives,
        "sends": counters.sends,
    })
}
