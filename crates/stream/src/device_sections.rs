//! Device sections of a VMM that has formats of its own: written with their description, read without it.
//!
//! QEMU's sections carry no length, so without the description that comes last only QEMU's devices know where one ends;
//! and in a postcopy package there is no description. A VMM that is free to choose puts a length in front: each body is
//! a be32 length and that number of opaque bytes. To stock QEMU's tools this is a section like any other.

use limosa_page::to_u64;
use serde_json::json;

use crate::cursor::{Cursor, Stop};
use crate::error::{EncodeError, ErrorKind, StreamError};
use crate::section::{self, SectionHeader, SectionKind};

/// Device sections, and their description.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceSections {
    bytes: Vec<u8>,
    devices: Vec<serde_json::Value>,
}

/// One device section as it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpaqueSection<'a> {
    /// Name of the section.
    pub name: &'a str,
    /// Instance, telling apart sections of one name.
    pub instance: u32,
    /// Version of what the VMM wrote.
    pub version: u32,
    /// The bytes that the VMM wrote.
    pub state: &'a [u8],
}

impl DeviceSections {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the state of one device.
    ///
    /// # Errors
    /// A name that is empty or longer than 255 bytes, or a state beyond the 32 bits of its length.
    pub fn push(&mut self, name: &str, instance: u32, version: u32, state: &[u8]) -> Result<(), EncodeError> {
        let length = u32::try_from(state.len()).map_err(|_| EncodeError::Number {
            what: "length of a device's state",
            value: to_u64(state.len()),
            rule: "at most 2^32 - 1",
        })?;
        // Section 0 is taken for `ram` by some readers; ids only have to differ.
        let id = u32::try_from(self.devices.len()).ok().and_then(|id| id.checked_add(16));
        let id = id.ok_or_else(|| EncodeError::Number {
            what: "number of device sections",
            value: to_u64(self.devices.len()),
            rule: "at most 2^32 - 17",
        })?;
        SectionHeader { kind: SectionKind::Full, id, name: name.to_owned(), instance, version }
            .encode(&mut self.bytes)?;
        self.bytes.extend_from_slice(&length.to_be_bytes());
        self.bytes.extend_from_slice(state);
        section::encode_footer(id, &mut self.bytes);
        self.devices.push(json!({
            "name": name, "instance_id": instance, "version": version,
            "fields": [
                { "name": "length", "type": "uint32", "size": 4 },
                { "name": "state", "type": "buffer", "size": length },
            ],
        }));
        Ok(())
    }

    /// The sections, from the first type byte to the last footer.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Their description (JSON), as it follows them in a precopy stream.
    pub fn description(&self) -> Vec<u8> {
        json!({ "page_size": crate::ram::PAGE_SIZE, "devices": self.devices }).to_string().into_bytes()
    }
}

impl<'a> OpaqueSection<'a> {
    /// Reads all sections from the front of `input`; returns them and their total length in bytes.
    ///
    /// # Errors
    /// A section that is cut off, or whose footer is not where its length says: it was not written by
    /// [`DeviceSections`].
    pub fn decode_all(input: &'a [u8]) -> Result<(Vec<Self>, usize), StreamError> {
        let (mut sections, mut at) = (Vec::new(), 0);
        while input.get(at) == Some(&SectionKind::Full.byte()) {
            let (found, length) = decode_one(&input[at..], to_u64(at))?;
            sections.push(found);
            at += length;
        }
        Ok((sections, at))
    }
}

fn decode_one(input: &[u8], offset: u64) -> Result<(OpaqueSection<'_>, usize), StreamError> {
    let fail = |error_kind| StreamError::new(offset, "device section with a length", error_kind);
    let cut = ErrorKind::Truncated { what: "it".into(), wanted: input.len().saturating_add(1), available: input.len() };
    match read_one(input) {
        Ok(Some((_, section, length))) => Ok((section, length)),
        Ok(None) => Err(fail(cut)),
        Err(error_kind) => Err(fail(error_kind)),
    }
}

/// The section at the front of `input`: its id, itself, and how many bytes it takes. `None` if it is not there as a
/// whole.
pub(crate) fn read_one(input: &[u8]) -> Result<Option<(u32, OpaqueSection<'_>, usize)>, ErrorKind> {
    let mut cursor = Cursor::new(input);
    let mut read = || {
        cursor.u8()?;
        let id = cursor.be32()?;
        let name = cursor.name("a section name")?;
        let (instance, version, length) = (cursor.be32()?, cursor.be32()?, cursor.be32()?);
        let state = cursor.take(length as usize)?;
        let footer = (cursor.u8()?, cursor.be32()?);
        Ok::<_, Stop>((id, OpaqueSection { name, instance, version, state }, footer))
    };
    let (id, found, footer) = match read() {
        Ok(read) => read,
        Err(Stop::Need(_)) => return Ok(None),
        Err(Stop::Fail { error_kind, .. }) => return Err(error_kind),
    };
    if footer != (section::FOOTER, id) {
        let what = format!("the footer of section {:?} behind {} bytes of state", found.name, found.state.len());
        return Err(ErrorKind::Unexpected { what: what.into(), found: format!("{footer:02x?}") });
    }
    Ok(Some((id, found, cursor.at())))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::devices;

    proptest! {
        #[test]
        fn sections_come_back_with_and_without_their_description(
            states in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..6),
        ) {
            let mut sections = DeviceSections::new();
            for (instance, state) in (0..).zip(&states) {
                sections.push("timer", instance, 3, state).unwrap();
            }
            let (found, length) = OpaqueSection::decode_all(sections.bytes()).unwrap();
            prop_assert_eq!(length, sections.bytes().len());
            prop_assert_eq!(found.iter().map(|one| one.state.to_vec()).collect::<Vec<_>>(), states.clone());

            let mut tail = sections.bytes().to_vec();
            section::encode_eof(&mut tail);
            let json = sections.description();
            tail.push(section::DESCRIPTION);
            tail.extend_from_slice(&u32::try_from(json.len()).unwrap().to_be_bytes());
            tail.extend_from_slice(&json);
            let located = devices::find_tail_end(&tail, 0, 1 << 20).unwrap();
            prop_assert_eq!(located.sections.len(), states.len());
            prop_assert_eq!(located.sections_range, 0..length);
        }

        #[test]
        fn what_is_cut_off_or_changed_is_refused_or_read_but_never_a_panic(
            state in prop::collection::vec(any::<u8>(), 0..40), cut in any::<prop::sample::Index>(), flip in any::<u8>(),
        ) {
            let mut sections = DeviceSections::new();
            sections.push("timer", 0, 1, &state).unwrap();
            let bytes = sections.bytes();
            let at = cut.index(bytes.len());
            prop_assert!(at == 0 || OpaqueSection::decode_all(&bytes[..at]).is_err());
            let mut changed = bytes.to_vec();
            changed[at] ^= flip;
            let _ = OpaqueSection::decode_all(&changed);
        }
    }
}
