//! The record of an image about itself and its base: a header extension of qcow2, which stock tools keep and ignore.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | version, big-endian: 1 |
//! | 4 | 16 | the id of the snapshot |
//! | 20 | 16 | the id of the base's snapshot; zeros without a base |
//! | 36 | 32 | SHA-256 of the base's tables ([`table_digest`](limosa_image::qcow2::table_digest)); zeros without a base |
//! | 68 | 32 | that of the image's own tables; zeros until it is whole |
//! | 100 | 8 | bytes of the image, big-endian: a shorter one was cut |
//! | 108 | 32 each | those of the files that this one has replaced, with the same contents: at most [`REPLACED_MOST`] |
//!
//! Law: **a record is written once, with its image.** A base that is packed again says itself which files it replaces,
//! so nothing that stands on it changes: it stands on the old file and on the new one alike.
//!
//! The base is compared with it before anything is read out of it: its tables say where each cluster is and how long,
//! and they change with every write that allocates. Compressed clusters are never written in place. Those that do not
//! become smaller are stored as they are, and a write in place to one of these does not show; checksums of the memory
//! show it.

use limosa_image::qcow2::Header;
use uuid::Uuid;

/// The type of the extension: "lims".
const KIND: u32 = 0x6c69_6d73;
const VERSION: u32 = 1;
/// The most files that an image says it has replaced. The header is one cluster, and that may have 4 KiB.
pub(crate) const REPLACED_MOST: usize = 32;

/// A SHA-256 of an image's tables.
pub(crate) type TableDigest = [u8; 32];

/// Identity of a packed snapshot, and of its base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) id: Uuid,
    pub(crate) base: Option<BaseRecord>,
    /// The image's own tables as they were when it was made.
    pub(crate) tables: TableDigest,
    /// Bytes of the image; 0 until it is whole.
    pub(crate) length: u64,
    /// Tables of the files that this one has replaced, the newest first.
    pub(crate) replaced: Vec<TableDigest>,
}

/// Identity of a base as it was when it was compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BaseRecord {
    pub(crate) id: Uuid,
    pub(crate) tables: TableDigest,
}

impl Record {
    /// Adds it to a header.
    pub(crate) fn put(&self, header: &mut Header) {
        header.extensions.unknown.retain(|(kind, _)| *kind != KIND);
        header.extensions.unknown.push((KIND, self.encode()));
    }

    /// Returns the record of an image; `None`: it has none, because another program made it.
    ///
    /// # Errors
    /// It has one that cannot be read: the reason.
    pub(crate) fn of(header: &Header) -> Result<Option<Self>, String> {
        let mut found = header.extensions.unknown.iter().filter(|(kind, _)| *kind == KIND);
        match (found.next(), found.next()) {
            (None, _) => Ok(None),
            (Some((_, bytes)), None) => Self::decode(bytes).map(Some),
            (Some(_), Some(_)) => Err("its record is there twice".to_owned()),
        }
    }

    /// Whether the image is this base, or has replaced it.
    pub(crate) fn stands_for(&self, base: &BaseRecord) -> bool {
        self.id == base.id && (self.tables == base.tables || self.replaced.contains(&base.tables))
    }

    fn encode(&self) -> Vec<u8> {
        debug_assert!(self.replaced.len() <= REPLACED_MOST, "cut by its maker");
        let base = self.base.unwrap_or(BaseRecord { id: Uuid::nil(), tables: [0; 32] });
        let length = self.length.to_be_bytes();
        let own =
            [&VERSION.to_be_bytes()[..], self.id.as_bytes(), base.id.as_bytes(), &base.tables, &self.tables, &length];
        [own.concat(), self.replaced.concat()].concat()
    }

    fn decode(bytes: &[u8]) -> Result<Self, String> {
        let version = bytes.first_chunk::<4>().map(|bytes| u32::from_be_bytes(*bytes));
        if version.is_some_and(|version| version != VERSION) {
            return Err(format!("its record is of version {}, and this limosa reads version 1", version.unwrap_or(0)));
        }
        let wrong = || format!("its record has {} bytes", bytes.len());
        let (_, rest) = bytes.split_first_chunk::<4>().ok_or_else(wrong)?;
        let (id, rest) = rest.split_first_chunk::<16>().ok_or_else(wrong)?;
        let (base, rest) = rest.split_first_chunk::<16>().ok_or_else(wrong)?;
        let (base_tables, rest) = rest.split_first_chunk::<32>().ok_or_else(wrong)?;
        let (tables, rest) = rest.split_first_chunk::<32>().ok_or_else(wrong)?;
        let (length, rest) = rest.split_first_chunk::<8>().ok_or_else(wrong)?;
        let (replaced, []) = rest.as_chunks::<32>() else { return Err(wrong()) };
        if replaced.len() > REPLACED_MOST {
            return Err(wrong());
        }
        let base = BaseRecord { id: Uuid::from_bytes(*base), tables: *base_tables };
        let is_none = base.id.is_nil() && base.tables == [0; 32];
        Ok(Self {
            id: Uuid::from_bytes(*id),
            base: (!is_none).then_some(base),
            tables: *tables,
            length: u64::from_be_bytes(*length),
            replaced: replaced.to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_record_comes_back(
            id: u128,
            tables: [u8; 32],
            length: u64,
            base in prop::option::of(any::<(u128, [u8; 32])>()),
            replaced in prop::collection::vec(any::<[u8; 32]>(), 0..=REPLACED_MOST),
        ) {
            let base = base.map(|(id, tables)| BaseRecord { id: Uuid::from_u128(id | 1), tables });
            let record = Record { id: Uuid::from_u128(id), base, tables, length, replaced };
            prop_assert_eq!(Record::decode(&record.encode()), Ok(record));
        }

        #[test]
        fn any_bytes_are_taken_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..1200)) {
            let bytes = [&VERSION.to_be_bytes()[..], &bytes].concat();
            if let Ok(record) = Record::decode(&bytes) {
                prop_assert_eq!(record.encode(), bytes);
            }
        }
    }
}
