//! Header extensions: what is between the header and the end of its cluster.
//!
//! Law: what is not known is kept, byte by byte, and written back with the rest.

use std::borrow::Cow;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use limosa_page::{BrokenInvariant, broken_invariant, to_usize};

use super::feature::FeatureName;
use crate::offset::HostOffset;

const END: u32 = 0;
const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const BITMAPS: u32 = 0x2385_2875;
const ENCRYPTION: u32 = 0x0537_be77;
const DATA_FILE: u32 = 0x4441_5441;
/// Ours: QEMU keeps it, as it does with all that it does not know.
const BACKING_CONTENT: u32 = u32::from_be_bytes(*b"limb");

/// The longest name of a format, in bytes: QEMU's limit.
const BACKING_FORMAT_MOST: usize = 15;

/// The header extensions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Extensions {
    /// The format of the backing file.
    pub backing_format: Option<String>,
    /// The file that the contents lie in.
    pub data_file: Option<OsString>,
    /// The place of the bitmap directory.
    pub bitmaps: Option<BitmapsExtension>,
    /// Offset of the encryption header, and its length in bytes.
    pub encryption: Option<(HostOffset, u64)>,
    /// A line about the contents that the backing file had when the image was made on top of it.
    pub backing_content: Option<String>,
    /// Names of features.
    pub feature_names: Vec<FeatureName>,
    /// All others: their type and their bytes.
    pub unknown: Vec<(u32, Vec<u8>)>,
}

/// The place of the bitmap directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BitmapsExtension {
    /// The number of bitmaps.
    pub count: u32,
    /// Offset of the directory.
    pub directory: HostOffset,
    /// Its length in bytes.
    pub size: u64,
}

impl BitmapsExtension {
    const LENGTH: usize = 24;

    fn decode(data: &[u8]) -> Option<Self> {
        let data: &[u8; Self::LENGTH] = data.try_into().ok()?;
        let [c0, c1, c2, c3, r0, r1, r2, r3, size @ .., o0, o1, o2, o3, o4, o5, o6, o7] = *data;
        (u32::from_be_bytes([r0, r1, r2, r3]) == 0).then_some(Self {
            count: u32::from_be_bytes([c0, c1, c2, c3]),
            directory: HostOffset(u64::from_be_bytes([o0, o1, o2, o3, o4, o5, o6, o7])),
            size: u64::from_be_bytes(size),
        })
    }

    fn encode(self) -> Vec<u8> {
        let count = u64::from(self.count) << 32;
        [count, self.size, self.directory.0].into_iter().flat_map(u64::to_be_bytes).collect()
    }
}

impl Extensions {
    /// From the bytes between the header and the backing file's name or the end of the cluster; `at`: where they are,
    /// for what an error says.
    ///
    /// # Errors
    /// Which extension is wrong, with its offset, and what is wrong with it.
    pub(in crate::qcow2) fn decode(mut area: &[u8], mut at: usize) -> Result<Self, (String, String)> {
        let mut found = Self::default();
        let mut seen = Vec::new();
        while let Some((head, rest)) = area.split_first_chunk::<8>() {
            let [k0, k1, k2, k3, l0, l1, l2, l3] = *head;
            let kind = u32::from_be_bytes([k0, k1, k2, k3]);
            if kind == END {
                break;
            }
            let fault = |why: String| (format!("header extension {kind:#010x} at {at:#x}"), why);
            let length = to_usize(u64::from(u32::from_be_bytes([l0, l1, l2, l3])));
            let Some(data) = rest.get(..length) else {
                return Err(fault(format!("it is {length} bytes long, and {} are left for it", rest.len())));
            };
            if found.take(kind, data).map_err(fault)? {
                // QEMU adds a format behind an older one, and reads the last.
                if seen.contains(&kind) && kind != BACKING_FORMAT {
                    return Err(fault("it is there twice".into()));
                }
                seen.push(kind);
            }
            let padded = length.next_multiple_of(8);
            at += 8 + padded;
            // The area may end before the last one is filled up.
            let Some(next) = rest.get(padded..) else { break };
            area = next;
        }
        Ok(found)
    }

    /// Takes one extension in: whether it is known, and so may be there only once.
    fn take(&mut self, kind: u32, data: &[u8]) -> Result<bool, String> {
        match kind {
            BACKING_FORMAT => {
                let name = until_zero(data);
                if name.len() > BACKING_FORMAT_MOST {
                    return Err(format!("the name of a format has {} bytes", name.len()));
                }
                let name = std::str::from_utf8(name).map_err(|_| "the name of a format is not text".to_owned())?;
                self.backing_format = Some(name.to_owned());
            }
            DATA_FILE => self.data_file = Some(OsString::from_vec(until_zero(data).to_vec())),
            FEATURE_NAMES => self.feature_names = FeatureName::decode(data),
            BITMAPS => match BitmapsExtension::decode(data) {
                Some(bitmaps) => self.bitmaps = Some(bitmaps),
                None => return Err("it is not 24 bytes with a reserved field of zeros".into()),
            },
            ENCRYPTION => {
                let data: &[u8; 16] = data.try_into().map_err(|_| format!("it has {} bytes, not 16", data.len()))?;
                let [o0, o1, o2, o3, o4, o5, o6, o7, length @ ..] = *data;
                let offset = u64::from_be_bytes([o0, o1, o2, o3, o4, o5, o6, o7]);
                self.encryption = Some((HostOffset(offset), u64::from_be_bytes(length)));
            }
            BACKING_CONTENT if std::str::from_utf8(data).is_ok() => {
                self.backing_content = Some(String::from_utf8_lossy(data).into_owned());
            }
            _ => {
                self.unknown.push((kind, data.to_vec()));
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// As they are behind the header, in QEMU's order, with the end marker.
    ///
    /// # Errors
    /// [`BrokenInvariant`] if one is longer than 32 bits can say.
    pub(in crate::qcow2) fn encode(&self) -> Result<Vec<u8>, BrokenInvariant> {
        let mut area = Vec::new();
        for (kind, data) in self.parts() {
            let length =
                u32::try_from(data.len()).map_err(|_| broken_invariant("a header extension's length has 32 bits"))?;
            area.extend_from_slice(&kind.to_be_bytes());
            area.extend_from_slice(&length.to_be_bytes());
            area.extend_from_slice(&data);
            area.resize(area.len().next_multiple_of(8), 0);
        }
        Ok(area)
    }

    /// Returns the length in bytes that [`Self::encode`] makes.
    pub(in crate::qcow2) fn len(&self) -> usize {
        self.parts().iter().fold(0, |length, (_, data)| length.saturating_add(8 + data.len().next_multiple_of(8)))
    }

    /// The extensions, each with its kind and its data.
    fn parts(&self) -> Vec<(u32, Cow<'_, [u8]>)> {
        let mut parts: Vec<(u32, Cow<'_, [u8]>)> = Vec::new();
        if let Some(format) = &self.backing_format {
            parts.push((BACKING_FORMAT, format.as_bytes().into()));
        }
        if let Some(name) = &self.data_file {
            parts.push((DATA_FILE, name.as_bytes().into()));
        }
        if let Some((offset, length)) = self.encryption {
            parts.push((ENCRYPTION, [offset.0.to_be_bytes(), length.to_be_bytes()].concat().into()));
        }
        if !self.feature_names.is_empty() {
            let table: Vec<u8> = self.feature_names.iter().flat_map(FeatureName::encode).collect();
            parts.push((FEATURE_NAMES, table.into()));
        }
        if let Some(bitmaps) = self.bitmaps {
            parts.push((BITMAPS, bitmaps.encode().to_vec().into()));
        }
        if let Some(content) = &self.backing_content {
            parts.push((BACKING_CONTENT, content.as_bytes().into()));
        }
        parts.extend(self.unknown.iter().map(|(kind, data)| (*kind, Cow::from(&data[..]))));
        parts.push((END, Cow::Borrowed(&[])));
        parts
    }
}

/// Names end at a zero byte, as they do where QEMU reads them.
pub(in crate::qcow2) fn until_zero(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn extensions() -> impl Strategy<Value = Extensions> {
        let unknown = (1_u32..100, prop::collection::vec(any::<u8>(), 0..30));
        (
            prop::option::of(("[a-z0-9]{0,15}", prop::option::of("[a-z/é]{0,40}"))),
            prop::option::of("[a-z/é]{0,40}"),
            prop::option::of(any::<(u32, u64, u64)>()),
            prop::option::of(any::<(u64, u64)>()),
            any::<bool>(),
            prop::collection::vec(unknown, 0..4),
        )
            .prop_map(|(backing, data_file, bitmaps, encryption, names, unknown)| Extensions {
                backing_format: backing.clone().map(|(format, _)| format),
                backing_content: backing.and_then(|(_, content)| content),
                data_file: data_file.map(OsString::from),
                bitmaps: bitmaps.map(|(count, directory, size)| BitmapsExtension {
                    count,
                    directory: HostOffset(directory),
                    size,
                }),
                encryption: encryption.map(|(offset, length)| (HostOffset(offset), length)),
                feature_names: if names { FeatureName::all_known() } else { Vec::new() },
                unknown,
            })
    }

    #[test]
    fn an_extension_that_is_longer_than_the_rest_is_refused_with_its_place() {
        let area = [&BACKING_FORMAT.to_be_bytes()[..], &9_u32.to_be_bytes(), b"too long"].concat();
        let (table, why) = Extensions::decode(&area, 104).unwrap_err();
        assert_eq!(table, "header extension 0xe2792aca at 0x68");
        assert_eq!(why, "it is 9 bytes long, and 8 are left for it");
    }

    #[test]
    fn a_known_extension_stands_once_and_an_unknown_one_as_often_as_it_likes() {
        let twice = |kind: u32| [kind.to_be_bytes(), [0; 4], kind.to_be_bytes(), [0; 4]].concat();
        assert_eq!(Extensions::decode(&twice(DATA_FILE), 0).unwrap_err().1, "it is there twice");
        let format = |name: &[u8; 8]| [&BACKING_FORMAT.to_be_bytes()[..], &8_u32.to_be_bytes(), name].concat();
        let formats = [format(b"raw-raw-"), format(b"qcow2---")].concat();
        let last = Extensions::decode(&formats, 0).unwrap().backing_format;
        assert_eq!(last.as_deref(), Some("qcow2---"));
        assert_eq!(Extensions::decode(&twice(77), 0).unwrap().unknown.len(), 2);
    }

    proptest! {
        #[test]
        fn extensions_survive_a_round_trip(extensions in extensions()) {
            prop_assert_eq!(Extensions::decode(&extensions.encode().unwrap(), 0), Ok(extensions));
        }

        #[test]
        fn any_bytes_are_taken_or_refused(area in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(extensions) = Extensions::decode(&area, 0) {
                prop_assert_eq!(Extensions::decode(&extensions.encode().unwrap(), 0), Ok(extensions));
            }
        }
    }
}
