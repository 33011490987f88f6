//! Exports and counters as JSON.

use limosa_export::Export;
use limosa_export::nbd::ServerCounters;
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

/// An export as it is used.
pub(super) fn state(export: &Export) -> Value {
    let mut object = description(export);
    object.insert("description".into(), export.description_text().into());
    object.insert("quiesced".into(), export.is_quiesced().into());
    object.insert("clients".into(), export.client_count().into());
    object.insert("counters".into(), counters(export).into());
    object.into()
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
