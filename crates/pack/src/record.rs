//! The record of an image about itself and its base: a header extension of qcow2, which stock tools keep and ignore.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | version, big-endian: 1 |
//! | 4 | 16 | the id of the snapshot |
//! | 20 | 16 | the id of the base's snapshot; zeros without a base |
//! | 36 | 32 | SHA-256 of the base's tables ([`table_digest`](limosa_image::qcow2::table_digest)); zeros without a base |
//! | 68 | 32 | that of the file which is about to replace the base, with the same contents; else zeros |
//! | 100 | 8 | bytes of the image, big-endian: a shorter one was cut |
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
const LENGTH: usize = 108;

/// Identity of a packed snapshot, and of its base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) id: Uuid,
    pub(crate) base: Option<BaseRecord>,
    /// Bytes of the image; 0 until it is whole.
    pub(crate) length: u64,
}

/// Identity of a base as it was when it was compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BaseRecord {
    pub(crate) id: Uuid,
    pub(crate) tables: [u8; 32],
    /// The tables of its replacement, from before it gets the base's name until after that.
    pub(crate) next_tables: Option<[u8; 32]>,
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

    fn encode(&self) -> Vec<u8> {
        let base = self.base.unwrap_or(BaseRecord { id: Uuid::nil(), tables: [0; 32], next_tables: None });
        let next = base.next_tables.unwrap_or_default();
        [
            &VERSION.to_be_bytes()[..],
            self.id.as_bytes(),
            base.id.as_bytes(),
            &base.tables,
            &next,
            &self.length.to_be_bytes(),
        ]
        .concat()
    }

    fn decode(bytes: &[u8]) -> Result<Self, String> {
        let version = bytes.first_chunk::<4>().map(|bytes| u32::from_be_bytes(*bytes));
        if version.is_some_and(|version| version != VERSION) {
            return Err(format!("its record is of version {}, and this limosa reads version 1", version.unwrap_or(0)));
        }
        let record: &[u8; LENGTH] =
            bytes.try_into().map_err(|_| format!("its record has {} bytes in place of {LENGTH}", bytes.len()))?;
        let (_, rest) = record.split_at(4);
        let (id, rest) = rest.split_at(16);
        let (base, tables) = rest.split_at(16);
        let uuid = |bytes: &[u8]| Uuid::from_slice(bytes).map_err(|error| error.to_string());
        let (tables, next) = tables.split_first_chunk::<32>().ok_or("its record is cut")?;
        let (next, length) = next.split_first_chunk::<32>().ok_or("its record is cut")?;
        let length: [u8; 8] = length.try_into().map_err(|_| "its record is cut".to_owned())?;
        let next = *next;
        let next_tables = (next != [0; 32]).then_some(next);
        let base = BaseRecord { id: uuid(base)?, tables: *tables, next_tables };
        let is_none = base.id.is_nil() && base.tables == [0; 32] && next_tables.is_none();
        Ok(Self { id: uuid(id)?, base: (!is_none).then_some(base), length: u64::from_be_bytes(length) })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_record_comes_back(id: u128, length: u64, base in prop::option::of(any::<(u128, [u8; 32], [u8; 32])>())) {
            let base = base.map(|(id, tables, next)| BaseRecord {
                id: Uuid::from_u128(id | 1),
                tables,
                next_tables: (next != [0; 32]).then_some(next),
            });
            let record = Record { id: Uuid::from_u128(id), base, length };
            prop_assert_eq!(Record::decode(&record.encode()), Ok(record));
        }

        #[test]
        fn any_bytes_are_taken_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            if let Ok(record) = Record::decode(&bytes) {
                prop_assert_eq!(record.encode(), bytes);
            }
        }
    }
}
