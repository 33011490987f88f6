//! Messages of a QMP server: greeting, replies, events.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// QEMU's version. Orders as versions do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Version {
    /// 10 in 10.0.2.
    pub major: u32,
    /// 0 in 10.0.2.
    pub minor: u32,
    /// 2 in 10.0.2.
    pub micro: u32,
}

impl Version {
    /// A version.
    #[must_use]
    pub const fn new(major: u32, minor: u32, micro: u32) -> Self {
        Self { major, minor, micro }
    }

    /// Reads the object that greeting and `query-version` share: `{"qemu": {"major", "minor", "micro"}, "package"}`.
    pub(super) fn of(value: &Value) -> Option<Self> {
        let part = |name: &str| u32::try_from(value.get("qemu")?.get(name)?.as_u64()?).ok();
        Some(Self { major: part("major")?, minor: part("minor")?, micro: part("micro")? })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// The greeting that a monitor sends when a client connects.
#[derive(Debug, Clone, PartialEq)]
pub struct Greeting {
    /// QEMU's version.
    pub version: Version,
    /// The distribution's package, for example `Debian 1:10.0.2+ds-2`. May be empty.
    pub package: String,
    /// Protocol capabilities on offer; `oob` is the only one that exists.
    pub capabilities: Vec<String>,
    /// The greeting as it came.
    pub raw: Value,
}

impl Greeting {
    pub(super) fn of(raw: Value) -> Option<Self> {
        let qmp = raw.get("QMP")?;
        let version = qmp.get("version")?;
        let package = version.get("package").and_then(Value::as_str).unwrap_or_default().to_owned();
        let capabilities = qmp
            .get("capabilities")
            .and_then(Value::as_array)
            .map(|list| list.iter().filter_map(|item| item.as_str().map(str::to_owned)).collect())
            .unwrap_or_default();
        Some(Self { version: Version::of(version)?, package, capabilities, raw })
    }
}

/// An asynchronous message of QEMU.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Event {
    /// Position among all events of this connection, counted from 0.
    pub sequence: u64,
    /// Its name, for example `STOP`.
    pub name: String,
    /// Its data; `Null` if it has none.
    pub data: Value,
    /// When it happened by the wall clock of QEMU's host, since 1970. `None` if that host could not tell.
    pub at: Option<Duration>,
    /// Keys that the specification does not name.
    pub extra: Map<String, Value>,
}

impl Event {
    /// The time from an earlier event to this one. `None` if a stamp is missing or the clock was set back in between.
    #[must_use]
    pub fn since(&self, earlier: &Event) -> Option<Duration> {
        self.at?.checked_sub(earlier.at?)
    }
}

/// One message, recognized by its keys.
#[derive(Debug)]
pub(super) enum Message {
    Return {
        id: Option<u64>,
        value: Value,
    },
    Error {
        id: Option<u64>,
        class: String,
        desc: String,
    },
    Event(Event),
    Greeting(Greeting),
    /// Something that this client does not know.
    Other,
}

impl Message {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        let mut value: Value = serde_json::from_slice(bytes)?;
        let id = value.get("id").and_then(Value::as_u64);
        if let Some(returned) = value.get_mut("return") {
            return Ok(Self::Return { id, value: returned.take() });
        }
        if let Some(error) = value.get("error") {
            let text = |name: &str| error.get(name).and_then(Value::as_str).unwrap_or("(none given)").to_owned();
            return Ok(Self::Error { id, class: text("class"), desc: text("desc") });
        }
        if let Some(name) = value.get("event").and_then(Value::as_str).map(str::to_owned) {
            return Ok(Self::Event(event(name, value)));
        }
        if value.get("QMP").is_some() {
            return Ok(Greeting::of(value).map_or(Self::Other, Self::Greeting));
        }
        Ok(Self::Other)
    }
}

fn event(name: String, value: Value) -> Event {
    let mut extra = match value {
        Value::Object(map) => map,
        _ => Map::new(),
    };
    extra.remove("event");
    let data = extra.remove("data").unwrap_or(Value::Null);
    // QEMU sends -1 for both where the host's clock failed.
    let at = extra.remove("timestamp").and_then(|stamp| {
        let seconds = stamp.get("seconds")?.as_u64()?;
        let micros = u32::try_from(stamp.get("microseconds")?.as_u64()?).ok()?;
        Some(Duration::new(seconds, micros.checked_mul(1000).filter(|nanos| *nanos < 1_000_000_000)?))
    });
    Event { sequence: 0, name, data, at, extra }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_gives_version_package_and_what_is_on_offer() {
        let text = r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": "Debian"},
                       "capabilities": ["oob"], "new": 1}, "x": 2}"#;
        let Message::Greeting(greeting) = Message::parse(text.as_bytes()).unwrap() else { panic!() };
        assert_eq!(greeting.version, Version::new(10, 0, 2));
        assert_eq!((greeting.package.as_str(), greeting.capabilities.len()), ("Debian", 1));
        assert_eq!(greeting.raw["QMP"]["new"], 1);
    }

    #[test]
    fn versions_order_by_number_and_not_by_text() {
        assert!(Version::new(10, 0, 2) > Version::new(9, 2, 4));
        assert!(Version::new(9, 1, 0) > Version::new(9, 0, 99));
    }

    #[test]
    fn events_keep_their_time_stamp_and_unknown_keys() {
        let text = r#"{"timestamp": {"seconds": 5, "microseconds": 7}, "event": "STOP", "novel": [1]}"#;
        let Message::Event(stop) = Message::parse(text.as_bytes()).unwrap() else { panic!() };
        assert_eq!(stop.at, Some(Duration::new(5, 7000)));
        assert_eq!((stop.data, stop.extra["novel"].to_string()), (Value::Null, "[1]".to_owned()));
        let text = r#"{"timestamp": {"seconds": -1, "microseconds": -1}, "event": "STOP"}"#;
        let Message::Event(stop) = Message::parse(text.as_bytes()).unwrap() else { panic!() };
        assert_eq!(stop.at, None);
        let text = r#"{"timestamp": {"seconds": 1, "microseconds": 4294967295}, "event": "STOP"}"#;
        let Message::Event(stop) = Message::parse(text.as_bytes()).unwrap() else { panic!() };
        assert_eq!(stop.at, None);
    }

    #[test]
    fn greetings_of_the_wrong_shape_are_no_greetings() {
        for text in [r#"{"QMP": 1}"#, r#"{"QMP": {"version": {"qemu": {"major": -1, "minor": 0, "micro": 0}}}}"#] {
            assert!(matches!(Message::parse(text.as_bytes()).unwrap(), Message::Other), "{text}");
        }
    }
}
