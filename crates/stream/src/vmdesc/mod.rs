//! The JSON description in full: which fields and subsections each device section is made of.
//!
//! [`Vmdesc`] keeps sums only, which is all that finding the end of a stream takes.
//! Telling two streams apart takes the names; they are read here, from a text of limited length, and memory is bounded
//! by that length. Facts: a field's `size` is that of one element, nested structures included; `array_len` says how
//! many.

use crate::error::{ErrorKind, StreamError};
use limosa_page::to_u64;

mod sizes;

pub use sizes::{DEVICES_LIMIT, DeviceSize, VMDESC_LIMIT, Vmdesc};

/// Longest JSON whose names are kept, in bytes: 16 MiB. A VM with 54 device sections has 90 KB.
pub const VMDESC_NAMES_LIMIT: usize = 16 << 20;

/// The parts of one device section.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
#[non_exhaustive]
pub struct DeviceVmdesc {
    /// Name of the section.
    pub name: String,
    /// Instance of the section.
    #[serde(rename = "instance_id")]
    pub instance: u32,
    /// Version, where the description gives one.
    #[serde(default)]
    pub version: Option<u32>,
    /// Fields in stream order.
    #[serde(default)]
    pub fields: Vec<FieldVmdesc>,
    /// Subsections in stream order.
    #[serde(default)]
    pub subsections: Vec<SubsectionVmdesc>,
}

/// A field.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
#[non_exhaustive]
pub struct FieldVmdesc {
    /// Its name; elements of an array that is listed one by one share it.
    #[serde(default)]
    pub name: String,
    /// Bytes of one element.
    pub size: u64,
    /// Number of elements, where they are not listed one by one.
    #[serde(default)]
    pub array_len: Option<u64>,
}

/// A subsection: state that is only there when the device needs it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
#[non_exhaustive]
pub struct SubsectionVmdesc {
    /// Its name.
    #[serde(rename = "vmsd_name")]
    pub name: String,
    /// Its version.
    #[serde(default)]
    pub version: Option<u32>,
    /// Fields in stream order.
    #[serde(default)]
    pub fields: Vec<FieldVmdesc>,
    /// Subsections of its own.
    #[serde(default)]
    pub subsections: Vec<SubsectionVmdesc>,
}

impl FieldVmdesc {
    /// Bytes that the field takes in the stream; as many as can be counted.
    pub fn bytes(&self) -> u64 {
        self.size.saturating_mul(self.array_len.unwrap_or(1))
    }
}

#[derive(serde::Deserialize)]
struct Devices {
    devices: Vec<DeviceVmdesc>,
}

/// Reads the JSON text.
///
/// # Errors
/// Not JSON, not a description, or beyond the bounds; the error's offset counts from the text's beginning.
pub fn decode(json: &[u8]) -> Result<Vec<DeviceVmdesc>, StreamError> {
    let fail = |at, error_kind| StreamError::new(at, "device description (JSON)", error_kind);
    let too_large = |what, value: usize, limit: usize| {
        let (value, limit) = (to_u64(value), to_u64(limit));
        fail(0, ErrorKind::TooLarge { what, value, limit })
    };
    if json.len() > VMDESC_NAMES_LIMIT {
        return Err(too_large("length of the description", json.len(), VMDESC_NAMES_LIMIT));
    }
    let parsed: Devices = serde_json::from_slice(json).map_err(|error| {
        // The text has one line; a column counts from 1.
        let column = if error.line() == 1 { error.column().saturating_sub(1) } else { 0 };
        fail(to_u64(column), ErrorKind::expected("a description of device sections", error))
    })?;
    if parsed.devices.len() > DEVICES_LIMIT {
        return Err(too_large("number of devices", parsed.devices.len(), DEVICES_LIMIT));
    }
    Ok(parsed.devices)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_and_subsections_are_kept_by_name() {
        let json = br#"{"page_size":4096,"devices":[
            {"name":"0000:00:02.0/nic","instance_id":1,"vmsd_name":"nic","version":7,"fields":[
                {"name":"queues","array_len":3,"type":"struct","struct":{"vmsd_name":"q","fields":[]},"size":8}],
             "subsections":[{"vmsd_name":"nic/more","version":2,"fields":[{"name":"x","type":"u8","size":1}]}]},
            {"name":"timer","instance_id":0,"size":24,"fields":[]}]}"#;
        let parsed = decode(json).unwrap();
        assert_eq!((parsed[0].instance, parsed[0].version), (1, Some(7)));
        assert_eq!((parsed[0].fields[0].name.as_str(), parsed[0].fields[0].bytes()), ("queues", 24));
        assert_eq!(parsed[0].subsections[0].name, "nic/more");
        assert_eq!(parsed[0].subsections[0].fields[0].bytes(), 1);
        assert_eq!(parsed[1].version, None);
    }

    #[test]
    fn what_is_too_long_or_too_deep_is_refused() {
        assert!(decode(&vec![b' '; VMDESC_NAMES_LIMIT + 1]).is_err());
        let deep = r#"{"vmsd_name":"s","subsections":["#.repeat(200) + &"]}".repeat(200);
        let json = format!(r#"{{"devices":[{{"name":"d","instance_id":0,"subsections":[{deep}]}}]}}"#);
        assert!(decode(json.as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_an_outline_or_an_error(text in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode(&text);
        }

        #[test]
        fn any_numbers_are_counted_without_overflow(size: u64, array_len: u64) {
            let field = FieldVmdesc { name: String::new(), size, array_len: Some(array_len) };
            prop_assert!(field.bytes() >= size.min(array_len) || size == 0 || array_len == 0);
        }
    }
}
