//! The VM description of a checkpoint.
//!
//! Only a base comes with one. It describes a checkpoint, too, as long as each section is as long as it was in the
//! base. A device may send more or less than then: subsections that are needed at times, a list of connections. Its
//! section then becomes one field of bytes in the description, as QEMU itself describes devices whose fields it does
//! not know.
//!
//! Law of this module: the end of such a section is where its footer is followed by the head of a section that the base
//! has behind it, or by the end. The guest controls bytes inside of sections: where two places qualify, neither is
//! believed.

use std::collections::HashMap;

use limosa_page::to_u64;
use limosa_stream::devices::DeviceSection;
use limosa_stream::section::{FOOTER_LENGTH, encode_description, encode_footer};
use serde_json::{Value, json};

use crate::layout::DeviceBytes;

/// Most bytes that are searched for ends of sections, counted each time.
const SEARCH_LIMIT: u64 = 4 << 30;
/// Bytes of a section's head besides its name: type, id, length of the name, instance, version.
const HEAD_LENGTH: usize = 1 + 4 + 1 + 4 + 4;

/// The description of a base, and the heads of its sections.
#[derive(Debug)]
pub(super) struct Description {
    /// The description from its mark on, as it is in the base.
    bytes: Vec<u8>,
    json: Vec<u8>,
    sections: Vec<BaseSection>,
    /// Index in `sections`, by head.
    by_head: HashMap<Vec<u8>, usize>,
}

/// A section of the base.
#[derive(Debug)]
struct BaseSection {
    name: String,
    instance: u32,
    footer: Vec<u8>,
    /// Bytes of its body.
    length: usize,
}

/// A section of a checkpoint: its index among those of the base, and the bytes of its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    section: usize,
    length: usize,
}

impl Description {
    /// That of a base.
    pub(super) fn of(base: &DeviceBytes) -> Self {
        let bytes = base.bytes();
        let head = |section: &DeviceSection| bytes[section.range.start..section.body.start].to_vec();
        let listed = &base.state().sections;
        let by_head = listed.iter().enumerate().map(|(index, section)| (head(section), index)).collect();
        let sections = listed.iter().map(BaseSection::new).collect();
        Self { bytes: base.behind_end_mark().to_vec(), json: base.description().to_vec(), sections, by_head }
    }

    /// The device state of a checkpoint, described.
    ///
    /// # Errors
    /// The reason why the base's description cannot be made that of these sections.
    pub(super) fn complete(&self, devices: &[u8]) -> Result<DeviceBytes, String> {
        let described = DeviceBytes::parse([devices, &self.bytes].concat());
        let Err(why) = described else { return described };
        let found = self.split(devices).ok_or(why)?;
        let json = self.describe(&found)?;
        let mut tail = devices.to_vec();
        encode_description(&json, &mut tail).map_err(|error| error.to_string())?;
        DeviceBytes::parse(tail)
    }

    /// The sections, if there is one way to tell them apart.
    fn split(&self, devices: &[u8]) -> Option<Vec<Found>> {
        let (_, sections) = devices.split_last().filter(|(mark, _)| **mark == 0)?;
        let mut found: Vec<Found> = Vec::new();
        let (mut rest, mut searched) = (sections, 0);
        while !rest.is_empty() {
            let section = self.section_at(rest)?;
            if found.last().is_some_and(|before| before.section >= section) {
                return None;
            }
            let (_, body) = rest.split_at_checked(self.head_length(section)?)?;
            let known = self.sections.get(section)?;
            let length = if self.ends_at(section, body, known.length) {
                known.length
            } else {
                searched += to_u64(body.len());
                if searched > SEARCH_LIMIT {
                    return None;
                }
                self.only_end(section, body)?
            };
            found.push(Found { section, length });
            rest = body.get(length + FOOTER_LENGTH..)?;
        }
        Some(found)
    }

    /// The one place in `body` and what is behind it where the section can end.
    fn only_end(&self, section: usize, body: &[u8]) -> Option<usize> {
        let footer = &self.sections.get(section)?.footer;
        let places = body.windows(FOOTER_LENGTH).enumerate().filter(|(_, window)| window == footer);
        let mut ends = places.map(|(at, _)| at).filter(|at| self.ends_at(section, body, *at));
        let end = ends.next()?;
        ends.next().is_none().then_some(end)
    }

    /// Whether the section can end `at` bytes behind its head.
    fn ends_at(&self, section: usize, body: &[u8], at: usize) -> bool {
        let Some(known) = self.sections.get(section) else { return false };
        let Some(behind) = body.get(at..).and_then(|end| end.strip_prefix(known.footer.as_slice())) else {
            return false;
        };
        behind.is_empty() || self.section_at(behind).is_some_and(|next| next > section)
    }

    /// The section whose head these bytes begin with.
    fn section_at(&self, bytes: &[u8]) -> Option<usize> {
        let name_length = usize::from(*bytes.get(5)?);
        self.by_head.get(bytes.get(..HEAD_LENGTH + name_length)?).copied()
    }

    fn head_length(&self, section: usize) -> Option<usize> {
        Some(HEAD_LENGTH + self.sections.get(section)?.name.len())
    }

    /// The base's description with the lengths that were found.
    fn describe(&self, found: &[Found]) -> Result<Vec<u8>, String> {
        let failed = |e: serde_json::Error| format!("the base's description cannot be changed: {e}");
        let mut lengths = HashMap::new();
        for Found { section, length } in found {
            match self.sections.get(*section) {
                Some(known) if known.length != *length => {
                    lengths.insert((known.name.as_str(), u64::from(known.instance)), *length);
                }
                _ => {}
            }
        }
        let mut description: Value = serde_json::from_slice(&self.json).map_err(failed)?;
        let devices = description.get_mut("devices").and_then(Value::as_array_mut);
        for device in devices.into_iter().flatten().filter_map(Value::as_object_mut) {
            let text = |key: &str| device.get(key).and_then(Value::as_str);
            let instance = device.get("instance_id").and_then(Value::as_u64);
            let length = text("name").zip(instance).and_then(|key| lengths.get(&key));
            if let Some(length) = length {
                device.insert("fields".to_owned(), json!([{"name": "data", "size": length, "type": "buffer"}]));
                device.remove("subsections");
                device.remove("size");
            }
        }
        serde_json::to_vec(&description).map_err(failed)
    }
}

impl BaseSection {
    fn new(section: &DeviceSection) -> Self {
        let mut footer = Vec::with_capacity(FOOTER_LENGTH);
        encode_footer(section.id, &mut footer);
        let (name, instance) = (section.name.clone(), section.instance);
        Self { name, instance, footer, length: section.body.len() }
    }
}

#[cfg(test)]
mod tests {
    use limosa_stream::section::encode_start;

    use super::*;

    /// A section with its head and footer.
    fn section(id: u32, name: &str, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode_start(id, name, 0, 1, &mut bytes).unwrap();
        bytes[0] = 4;
        bytes.extend_from_slice(body);
        encode_footer(id, &mut bytes);
        bytes
    }

    fn devices(sections: &[(u32, &str, &[u8])]) -> Vec<u8> {
        let mut bytes: Vec<u8> = sections.iter().flat_map(|(id, name, body)| section(*id, name, body)).collect();
        bytes.push(0);
        bytes
    }

    /// A base with a timer of 8 bytes, a serial port of 4, a slirp of 3 and a disk of 2.
    fn base() -> Description {
        let list: [(u32, &str, &[u8]); 4] =
            [(7, "timer", b"12345678"), (8, "serial", b"ABCD"), (9, "slirp", b"abc"), (10, "ide", b"xy")];
        let described: Vec<_> = list
            .iter()
            .map(|(_, name, body)| {
                let fields = json!([{"name": "state", "type": "buffer", "size": body.len()}]);
                json!({"name": name, "instance_id": 0, "vmsd_name": name, "version": 1, "fields": fields})
            })
            .collect();
        let json = serde_json::to_vec(&json!({"page_size": 4096, "devices": described})).unwrap();
        let length = u32::try_from(json.len()).unwrap().to_be_bytes();
        let tail = [&devices(&list)[..], &[6], &length, &json].concat();
        Description::of(&DeviceBytes::parse(tail).unwrap())
    }

    fn lengths(devices: &DeviceBytes) -> Vec<(&str, usize)> {
        devices.state().sections.iter().map(|section| (section.name.as_str(), section.body.len())).collect()
    }

    #[test]
    fn sections_of_the_same_lengths_keep_the_description_of_the_base() {
        let base = base();
        let state =
            devices(&[(7, "timer", b"87654321"), (8, "serial", b"DCBA"), (9, "slirp", b"cba"), (10, "ide", b"yx")]);
        let complete = base.complete(&state).unwrap();
        assert_eq!(complete.bytes(), [&state[..], &base.bytes].concat());
    }

    #[test]
    fn sections_that_grew_shrank_or_are_gone_are_described() {
        let long = [0x7e; 1000];
        let state = devices(&[(7, "timer", b"87654321"), (9, "slirp", &long), (10, "ide", b"")]);
        let complete = base().complete(&state).unwrap();
        assert_eq!(lengths(&complete), [("timer", 8), ("slirp", 1000), ("ide", 0)]);
        assert!(complete.bytes().starts_with(&state));
        let described: Value = serde_json::from_slice(complete.description()).unwrap();
        assert_eq!(described["devices"][0]["fields"][0]["name"], "state", "as long as it was");
        assert_eq!(described["devices"][2]["fields"][0], json!({"name": "data", "size": 1000, "type": "buffer"}));
    }

    #[test]
    fn an_end_that_a_guest_may_have_made_is_not_believed() {
        let mut forged = b"guest ".to_vec();
        encode_footer(9, &mut forged);
        forged.extend(section(10, "ide", b"xy"));
        let state =
            devices(&[(7, "timer", b"87654321"), (8, "serial", b"DCBA"), (9, "slirp", &forged), (10, "ide", b"xy")]);
        assert!(base().complete(&state).is_err());
        // A footer alone does not end a section.
        let mut harmless = b"guest ".to_vec();
        encode_footer(9, &mut harmless);
        let state = devices(&[(7, "timer", b"87654321"), (9, "slirp", &harmless), (10, "ide", b"xy")]);
        assert_eq!(lengths(&base().complete(&state).unwrap())[1], ("slirp", 11));
    }

    #[test]
    fn what_is_no_state_of_that_vm_is_refused() {
        let base = base();
        let whole =
            devices(&[(7, "timer", b"87654321"), (8, "serial", b"DCBAE"), (9, "slirp", b"cba"), (10, "ide", b"yx")]);
        assert!(base.complete(&whole).is_ok());
        for cut in 0..whole.len() {
            assert!(base.complete(&whole[..cut]).is_err(), "{cut} bytes");
        }
        for state in [
            devices(&[(8, "serial", b"DCBAE"), (7, "timer", b"87654321")]),
            devices(&[(7, "timer", b"87654321"), (11, "tpm", b"new")]),
            [&whole[..], &[0]].concat(),
        ] {
            assert!(base.complete(&state).is_err());
        }
    }
}
