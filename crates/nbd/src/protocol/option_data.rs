//! The data of options that have some.

use super::{MAX_STRING, split_string, split_u16, split_u32};

/// Why the data of an option is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DataError {
    /// A length is wrong, or bytes are left.
    #[error("the data of the option has a wrong length")]
    Length,
    /// A string is longer than the protocol allows, or not UTF-8.
    #[error("a name is too long or not UTF-8")]
    Name,
}

/// The data of `INFO` and `GO`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportQuery<'a> {
    /// The export's name.
    pub name: &'a str,
    /// The kinds of information that are asked for.
    pub wanted: Vec<u16>,
}

impl<'a> ExportQuery<'a> {
    /// Encodes it, for clients.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut data = string(self.name.as_bytes());
        data.extend_from_slice(&u16::try_from(self.wanted.len()).unwrap_or(u16::MAX).to_be_bytes());
        self.wanted.iter().for_each(|kind| data.extend_from_slice(&kind.to_be_bytes()));
        data
    }

    /// Decodes it.
    ///
    /// # Errors
    /// A length is wrong, or the name.
    pub fn decode(mut data: &'a [u8]) -> Result<Self, DataError> {
        let data = &mut data;
        let name = split_string(data).ok_or(DataError::Length)?;
        let count = split_u16(data).ok_or(DataError::Length)?;
        if data.len() != usize::from(count) * 2 {
            return Err(DataError::Length);
        }
        let wanted = std::iter::from_fn(|| split_u16(data)).collect();
        Ok(Self { name: export_name(name)?, wanted })
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextQuery<'a> {
    /// The export's name.
    pub name: &'a str,
    /// The queries: names of contexts, or namespaces. Each has at least four bytes in the option's data, which bounds
    /// their number.
    pub queries: Vec<&'a [u8]>,
}

/// A string, with its length before it. Strings of the protocol are bounded.
fn string(text: &[u8]) -> Vec<u8> {
    [&u32::try_from(text.len()).unwrap_or(u32::MAX).to_be_bytes(), text].concat()
}

impl<'a> ContextQuery<'a> {
    /// Encodes it, for clients.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut data = string(self.name.as_bytes());
        data.extend_from_slice(&u32::try_from(self.queries.len()).unwrap_or(u32::MAX).to_be_bytes());
        self.queries.iter().for_each(|query| data.extend_from_slice(&string(query)));
        data
    }

    /// Decodes it.
    ///
    /// # Errors
    /// A length is wrong, or the export's name.
    pub fn decode(mut data: &'a [u8]) -> Result<Self, DataError> {
        let data = &mut data;
        let name = split_string(data).ok_or(DataError::Length)?;
        let count = split_u32(data).ok_or(DataError::Length)?;
        let mut queries = Vec::new();
        // Not allocated by the client's number: the data ends before a lie does.
        for _ in 0..count {
            queries.push(split_string(data).ok_or(DataError::Length)?);
        }
        if !data.is_empty() {
            return Err(DataError::Length);
        }
        Ok(Self { name: export_name(name)?, queries })
    }
}

/// Checks the name of an export.
///
/// # Errors
/// It is too long, or not UTF-8.
pub fn export_name(name: &[u8]) -> Result<&str, DataError> {
    let name = name.get(..).filter(|name| name.len() <= MAX_STRING).ok_or(DataError::Name)?;
    str::from_utf8(name).map_err(|_| DataError::Name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lengths_that_lie_are_refused_without_an_allocation() {
        let huge = [&string(b"")[..], &u32::MAX.to_be_bytes()].concat();
        assert_eq!(ContextQuery::decode(&huge), Err(DataError::Length));
        assert_eq!(ContextQuery::decode(&u32::MAX.to_be_bytes()), Err(DataError::Length));
        assert_eq!(ExportQuery::decode(&[&string(b"a")[..], &[0xff, 0xff]].concat()), Err(DataError::Length));
        assert_eq!(ExportQuery::decode(&[&string(b"a")[..], &[0, 0, 0]].concat()), Err(DataError::Length));
        assert_eq!(ExportQuery::decode(&[&string(b"\xff")[..], &[0, 0]].concat()), Err(DataError::Name));
        assert_eq!(ExportQuery::decode(&[&string(&[b'a'; 4097])[..], &[0, 0]].concat()), Err(DataError::Name));
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            name in "\\PC{0,40}",
            wanted in prop::collection::vec(any::<u16>(), 0..8),
            queries in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..8),
        ) {
            let query = ExportQuery { name: &name, wanted };
            let mut data = query.encode();
            prop_assert_eq!(ExportQuery::decode(&data), Ok(query));
            data.pop();
            prop_assert!(ExportQuery::decode(&data).is_err());

            let query = ContextQuery { name: &name, queries: queries.iter().map(Vec::as_slice).collect() };
            let mut data = query.encode();
            prop_assert_eq!(ContextQuery::decode(&data), Ok(query));
            data.push(0);
            prop_assert!(ContextQuery::decode(&data).is_err());
        }

        #[test]
        fn no_data_makes_it_panic(data in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = (ExportQuery::decode(&data), ContextQuery::decode(&data));
        }
    }
}
