//! Feature bits.
//!
//! Law: a program that does not know an incompatible bit does not touch the image; one that does not know an autoclear
//! bit clears it before the first write.

use std::fmt;

/// The three sets of feature bits. Version 2 has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Features {
    /// Features that a reader must know.
    pub incompatible: u64,
    /// Features that may be ignored.
    pub compatible: u64,
    /// Features that a writer clears before the first write, unless it maintains them.
    pub autoclear: u64,
}

/// A feature that limosa knows: its bit, and its name.
struct Known {
    kind: FeatureKind,
    bit: u8,
    name: &'static str,
}

/// In the order in which QEMU writes its table of names.
const KNOWN: [Known; 8] = [
    Known { kind: FeatureKind::Incompatible, bit: 0, name: "dirty bit" },
    Known { kind: FeatureKind::Incompatible, bit: 1, name: "corrupt bit" },
    Known { kind: FeatureKind::Incompatible, bit: 2, name: "external data file" },
    Known { kind: FeatureKind::Incompatible, bit: 3, name: "compression type" },
    Known { kind: FeatureKind::Incompatible, bit: 4, name: "extended L2 entries" },
    Known { kind: FeatureKind::Compatible, bit: 0, name: "lazy refcounts" },
    Known { kind: FeatureKind::Autoclear, bit: 0, name: "bitmaps" },
    Known { kind: FeatureKind::Autoclear, bit: 1, name: "raw external data" },
];

impl Features {
    /// Incompatible: refcounts may be wrong; they have to be rebuilt from the tables before anything is written.
    pub const DIRTY: u64 = 1;
    /// Incompatible: anything may be wrong; only repair may write.
    pub const CORRUPT: u64 = 1 << 1;
    /// Incompatible: contents lie in a file of their own.
    pub const DATA_FILE: u64 = 1 << 2;
    /// Incompatible: compressed clusters are not deflated.
    pub const COMPRESSION: u64 = 1 << 3;
    /// Incompatible: L2 entries are of 16 bytes, with subclusters.
    pub const EXTENDED_L2: u64 = 1 << 4;
    /// Compatible: refcounts may be written late, under the dirty bit.
    pub const LAZY_REFCOUNTS: u64 = 1;
    /// Autoclear: the bitmaps are as their directory says.
    pub const BITMAPS: u64 = 1;
    /// Autoclear: the data file is a raw image without the tables, too.
    pub const RAW_DATA_FILE: u64 = 1 << 1;

    const INCOMPATIBLE: u64 = Self::DIRTY | Self::CORRUPT | Self::DATA_FILE | Self::COMPRESSION | Self::EXTENDED_L2;
    const AUTOCLEAR: u64 = Self::BITMAPS | Self::RAW_DATA_FILE;

    /// Refcounts may be wrong.
    #[must_use]
    pub const fn dirty(&self) -> bool {
        self.incompatible & Self::DIRTY != 0
    }

    /// Anything may be wrong.
    #[must_use]
    pub const fn corrupt(&self) -> bool {
        self.incompatible & Self::CORRUPT != 0
    }

    /// Contents lie in a file of their own.
    #[must_use]
    pub const fn data_file(&self) -> bool {
        self.incompatible & Self::DATA_FILE != 0
    }

    /// L2 entries have subclusters.
    #[must_use]
    pub const fn extended_l2(&self) -> bool {
        self.incompatible & Self::EXTENDED_L2 != 0
    }

    /// Refcounts may be written late.
    #[must_use]
    pub const fn lazy_refcounts(&self) -> bool {
        self.compatible & Self::LAZY_REFCOUNTS != 0
    }

    /// The bitmaps are as their directory says.
    #[must_use]
    pub const fn bitmaps(&self) -> bool {
        self.autoclear & Self::BITMAPS != 0
    }

    /// The data file must be readable as a raw image without the tables. Without a data file the bit has no meaning.
    #[must_use]
    pub const fn raw_data_file(&self) -> bool {
        self.data_file() && self.autoclear & Self::RAW_DATA_FILE != 0
    }

    /// Sets or clears [`Features::DIRTY`].
    pub const fn set_dirty(&mut self, dirty: bool) {
        self.incompatible = self.incompatible & !Self::DIRTY | if dirty { Self::DIRTY } else { 0 };
    }

    /// Sets or clears [`Features::CORRUPT`].
    pub const fn set_corrupt(&mut self, corrupt: bool) {
        self.incompatible = self.incompatible & !Self::CORRUPT | if corrupt { Self::CORRUPT } else { 0 };
    }

    /// The incompatible bits that limosa does not know.
    #[must_use]
    pub const fn unknown_incompatible(&self) -> u64 {
        self.incompatible & !Self::INCOMPATIBLE
    }

    /// The autoclear bits that limosa does not know, or that mean nothing here.
    #[must_use]
    pub const fn unknown_autoclear(&self) -> u64 {
        let raw = if self.data_file() { 0 } else { self.autoclear & Self::RAW_DATA_FILE };
        self.autoclear & !Self::AUTOCLEAR | raw
    }
}

/// One of the three sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeatureKind {
    /// [`Features::incompatible`].
    Incompatible,
    /// [`Features::compatible`].
    Compatible,
    /// [`Features::autoclear`].
    Autoclear,
    /// A set that limosa does not know.
    Other(u8),
}

impl FeatureKind {
    const fn from_byte(byte: u8) -> Self {
        match byte {
            0 => Self::Incompatible,
            1 => Self::Compatible,
            2 => Self::Autoclear,
            other => Self::Other(other),
        }
    }

    const fn byte(self) -> u8 {
        match self {
            Self::Incompatible => 0,
            Self::Compatible => 1,
            Self::Autoclear => 2,
            Self::Other(other) => other,
        }
    }
}

/// An entry of the feature name table.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FeatureName {
    /// In which set its bit is.
    pub kind: FeatureKind,
    /// Number of the bit.
    pub bit: u8,
    /// Its name, without trailing zeros: at most 46 bytes.
    pub name: Vec<u8>,
}

impl FeatureName {
    /// Bytes of an entry.
    pub(in crate::qcow2) const SIZE: usize = 48;
    const NAME: usize = Self::SIZE - 2;

    /// The names of all features that limosa knows, as they are written into a new image.
    #[must_use]
    pub fn all_known() -> Vec<Self> {
        KNOWN.iter().map(|known| Self { kind: known.kind, bit: known.bit, name: known.name.into() }).collect()
    }

    /// The entries of a table; what is left over at its end is no entry.
    pub(in crate::qcow2) fn decode(table: &[u8]) -> Vec<Self> {
        let entry = |bytes: &[u8]| {
            let (kind, rest) = bytes.split_first()?;
            let (bit, name) = rest.split_first()?;
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            Some(Self { kind: FeatureKind::from_byte(*kind), bit: *bit, name: name.to_vec() })
        };
        table.chunks_exact(Self::SIZE).filter_map(entry).collect()
    }

    pub(in crate::qcow2) fn encode(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        let (head, name) = bytes.split_at_mut(2);
        head.copy_from_slice(&[self.kind.byte(), self.bit]);
        for (to, from) in name.iter_mut().zip(self.name.iter().take(Self::NAME)) {
            *to = *from;
        }
        bytes
    }
}

/// Incompatible bits by the names that the image itself gives them, or by their numbers.
pub(in crate::qcow2) struct Named<'a> {
    pub(in crate::qcow2) bits: u64,
    pub(in crate::qcow2) names: &'a [FeatureName],
}

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for bit in (0..64_u8).filter(|bit| self.bits >> bit & 1 == 1) {
            let name = self.names.iter().find(|name| name.kind == FeatureKind::Incompatible && name.bit == bit);
            match name {
                Some(name) => write!(f, "{separator}{:?}", String::from_utf8_lossy(&name.name))?,
                None => write!(f, "{separator}bit {bit}")?,
            }
            separator = ", ";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_bits_are_named_by_the_image_s_own_table() {
        let table: Vec<u8> = FeatureName::all_known().iter().flat_map(FeatureName::encode).chain([0, 9]).collect();
        assert_eq!(FeatureName::decode(&table), FeatureName::all_known());
        let names = [FeatureName { kind: FeatureKind::Incompatible, bit: 40, name: b"time\ntravel".to_vec() }];
        assert_eq!(Named { bits: 1 << 40 | 1 << 9, names: &names }.to_string(), r#"bit 9, "time\ntravel""#);
    }

    #[test]
    fn a_raw_data_file_needs_a_data_file() {
        let features = Features { autoclear: Features::RAW_DATA_FILE | Features::BITMAPS | 8, ..Features::default() };
        assert!(!features.raw_data_file());
        assert_eq!(features.unknown_autoclear(), Features::RAW_DATA_FILE | 8);
        let features = Features { incompatible: Features::DATA_FILE, ..features };
        assert!(features.raw_data_file());
        assert_eq!(features.unknown_autoclear(), 8);
    }
}
