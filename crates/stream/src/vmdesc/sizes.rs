//! The JSON description of the device sections, which arrives behind them.

use crate::error::{ErrorKind, StreamError};
use limosa_page::to_u64;
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, SeqAccess, Visitor};
use std::fmt;

/// Longest JSON that is accepted, in bytes: 64 MiB. A VM with 54 device sections has 90 KB.
pub const VMDESC_LIMIT: usize = 64 << 20;
/// Most devices in a description.
pub const DEVICES_LIMIT: usize = 65_536;

/// The contents of the JSON.
///
/// Device sections carry no length; the description names the size of each field, and with it the length of each body:
/// the sum over its fields of `size * (array_len or 1)`, plus for each subsection its header of `1 + 1 + name + 4`
/// bytes and its own body. Sums are made while the JSON is read, so memory is bounded by the number of devices and not
/// by the number of fields. Unknown keys are passed over. Nesting is bounded by the JSON reader (127 levels).
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
#[non_exhaustive]
pub struct Vmdesc {
    /// Bytes of a target page.
    #[serde(default)]
    pub page_size: Option<u64>,
    /// The device sections, early ones included, in the order of the stream.
    #[serde(deserialize_with = "bounded_devices")]
    pub devices: Vec<DeviceSize>,
}

/// One device section.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceSize {
    /// Name of the section.
    pub name: String,
    /// Instance of the section.
    pub instance: u32,
    /// Version, where the description gives one (handlers of the old style have none).
    pub version: Option<u32>,
    /// Name of the state description inside QEMU, if it has one.
    pub state_name: Option<String>,
    /// Bytes of the section's body.
    pub body_length: u64,
}

impl Vmdesc {
    /// Reads the JSON text.
    ///
    /// # Errors
    /// Not JSON, not a description, or beyond the bounds; the error's offset counts from the text's beginning.
    pub fn decode(json: &[u8]) -> Result<Self, StreamError> {
        let fail = |at, error_kind| StreamError::new(at, "device description (JSON)", error_kind);
        if json.len() > VMDESC_LIMIT {
            let (value, limit) = (to_u64(json.len()), to_u64(VMDESC_LIMIT));
            return Err(fail(0, ErrorKind::TooLarge { what: "length of the description", value, limit }));
        }
        serde_json::from_slice(json).map_err(|error| {
            // The text has one line; a column counts from 1.
            let column = if error.line() == 1 { error.column().saturating_sub(1) } else { 0 };
            fail(to_u64(column), ErrorKind::expected("a description of device sections", error))
        })
    }
}

/// The keys of a device, of a subsection and of a field that matter here.
#[derive(serde::Deserialize)]
struct RawDevice {
    name: String,
    instance_id: u32,
    #[serde(default)]
    version: Option<u32>,
    #[serde(default)]
    vmsd_name: Option<String>,
    #[serde(default)]
    size: Option<u64>,
    #[serde(default)]
    fields: Option<Sum<RawField>>,
    #[serde(default)]
    subsections: Option<Sum<RawSubsection>>,
}

impl<'de> Deserialize<'de> for DeviceSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = RawDevice::deserialize(deserializer)?;
        let fields = match (raw.fields, raw.size) {
            (Some(fields), _) => fields.total,
            (None, Some(size)) => size,
            (None, None) => return Err(Error::missing_field("fields")),
        };
        let subsections = raw.subsections.map_or(0, |sum| sum.total);
        let body_length = fields.checked_add(subsections).ok_or_else(|| Error::custom("body length overflows"))?;
        Ok(Self {
            name: raw.name,
            instance: raw.instance_id,
            version: raw.version,
            state_name: raw.vmsd_name,
            body_length,
        })
    }
}

#[derive(serde::Deserialize)]
struct RawField {
    size: u64,
    #[serde(default)]
    array_len: Option<u64>,
}

#[derive(serde::Deserialize)]
struct RawSubsection {
    vmsd_name: String,
    #[serde(default)]
    fields: Option<Sum<RawField>>,
    #[serde(default)]
    subsections: Option<Sum<RawSubsection>>,
}

/// Something that takes bytes in a stream.
trait Length {
    /// Those bytes, or `None` if their number overflows.
    fn length(self) -> Option<u64>;
}

impl Length for RawField {
    fn length(self) -> Option<u64> {
        self.size.checked_mul(self.array_len.unwrap_or(1))
    }
}

impl Length for RawSubsection {
    fn length(self) -> Option<u64> {
        let header = to_u64(self.vmsd_name.len()).checked_add(1 + 1 + 4)?;
        let fields = self.fields.map_or(0, |sum| sum.total);
        let subsections = self.subsections.map_or(0, |sum| sum.total);
        header.checked_add(fields)?.checked_add(subsections)
    }
}

/// The total size of all elements of an array, without keeping them.
struct Sum<T> {
    total: u64,
    element: std::marker::PhantomData<T>,
}

impl<'de, T: Length + Deserialize<'de>> Deserialize<'de> for Sum<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(SumVisitor(std::marker::PhantomData))
    }
}

struct SumVisitor<T>(std::marker::PhantomData<T>);

impl<'de, T: Length + Deserialize<'de>> Visitor<'de> for SumVisitor<T> {
    type Value = Sum<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of things with sizes")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Self::Value, A::Error> {
        let mut total = 0u64;
        while let Some(element) = sequence.next_element::<T>()? {
            let sum = element.length().and_then(|length| total.checked_add(length));
            total = sum.ok_or_else(|| Error::custom("sum of sizes overflows"))?;
        }
        Ok(Sum { total, element: self.0 })
    }
}

fn bounded_devices<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<DeviceSize>, D::Error> {
    struct Devices;
    impl<'de> Visitor<'de> for Devices {
        type Value = Vec<DeviceSize>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an array of devices")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Self::Value, A::Error> {
            let mut devices = Vec::new();
            while devices.len() < DEVICES_LIMIT {
                match sequence.next_element()? {
                    Some(device) => devices.push(device),
                    None => return Ok(devices),
                }
            }
            match sequence.next_element::<IgnoredAny>()? {
                Some(_) => Err(Error::custom("more than 65536 devices")),
                None => Ok(devices),
            }
        }
    }
    deserializer.deserialize_seq(Devices)
}
