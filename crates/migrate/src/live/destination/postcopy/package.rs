//! The package: the device sections of a VM that runs before its memory is there, between LISTEN and RUN.

use limosa_page::broken_invariant;
use limosa_stream::{Command, OpaqueSection, StreamError, section};

use crate::error::MigrateError;

/// Room in front of the sections for LISTEN, behind them for a PING and RUN.
const RUN: &[u8] = &[section::COMMAND, 0, 5, 0, 0];
const PING_LEN: usize = 9;

/// A package, taken apart.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Package<'a> {
    /// The sections as they came.
    pub(super) bytes: &'a [u8],
    /// One by one, if they carry their lengths; those of stock QEMU do not.
    pub(super) sections: Option<Vec<OpaqueSection<'a>>>,
    /// The token of the PING to answer when they have been loaded.
    pub(super) ping: Option<u32>,
}

/// Takes a package apart. Only what ends with RUN lets a VM run.
pub(super) fn read(package: &[u8]) -> Result<Package<'_>, MigrateError> {
    let wrong = |what: &str| MigrateError::Protocol(format!("the package of device sections {what}"));
    let Some((Command::PostcopyListen, listen)) = decode(package)? else {
        return Err(wrong("does not begin with LISTEN"));
    };
    let rest =
        package.get(listen..).ok_or_else(|| broken_invariant("a command that was decoded is part of the package"))?;
    if let Ok((sections, length)) = OpaqueSection::decode_all(rest) {
        let parts = rest.split_at_checked(length);
        let (bytes, last) =
            parts.ok_or_else(|| broken_invariant("sections that were decoded are part of the package"))?;
        if let Some(ping) = end(last) {
            return Ok(Package { bytes, sections: Some(sections), ping });
        }
    }
    // Nothing says where sections without lengths end, but what follows them has a known form.
    let sections = rest.strip_suffix(RUN).ok_or_else(|| wrong("does not end with RUN"))?;
    let at = sections.len().saturating_sub(PING_LEN);
    let (before, last) = sections.split_at_checked(at).unwrap_or((sections, &[]));
    match decode(last) {
        Ok(Some((Command::Ping(token), _))) => Ok(Package { bytes: before, sections: None, ping: Some(token) }),
        _ => Ok(Package { bytes: sections, sections: None, ping: None }),
    }
}

fn decode(bytes: &[u8]) -> Result<Option<(Command, usize)>, StreamError> {
    Command::decode(bytes)
}

/// Returns the PING behind the last section, if only an optional PING and RUN follow it.
fn end(rest: &[u8]) -> Option<Option<u32>> {
    if rest == RUN {
        return Some(None);
    }
    match decode(rest.strip_suffix(RUN)?) {
        Ok(Some((Command::Ping(token), PING_LEN))) if rest.len() == PING_LEN + RUN.len() => Some(Some(token)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use limosa_stream::{DeviceSections, postcopy};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sections_with_lengths_come_out_one_by_one_and_others_whole() {
        let mut sections = DeviceSections::new();
        sections.push("timer", 0, 1, b"tick").unwrap();
        sections.push("serial", 0, 1, RUN).unwrap();
        for ping in [None, Some(3)] {
            let package = postcopy::postcopy_package(sections.bytes(), ping).unwrap();
            let found = read(&package).unwrap();
            assert_eq!((found.bytes, found.ping), (sections.bytes(), ping));
            assert_eq!(found.sections.unwrap()[1].state, RUN);

            let stock = b"\x04\0\0\0\x03\x05timer\0\0\0\0\0\0\0\x0112345678\x7e\0\0\0\x03";
            let package = postcopy::postcopy_package(stock, ping).unwrap();
            assert_eq!(read(&package).unwrap(), Package { bytes: stock, sections: None, ping });
        }
    }

    #[test]
    fn a_package_without_its_last_word_is_refused() {
        let mut sections = DeviceSections::new();
        sections.push("timer", 0, 1, b"tick").unwrap();
        let package = postcopy::postcopy_package(sections.bytes(), Some(3)).unwrap();
        for cut in 0..package.len() {
            assert!(read(&package[..cut]).is_err(), "{cut}");
        }
    }

    proptest! {
        #[test]
        fn garbage_is_refused_or_read_but_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let mut package = vec![8, 0, 4, 0, 0];
            package.extend_from_slice(&bytes);
            let _ = read(&package);
            package.extend_from_slice(RUN);
            let _ = read(&package);
        }
    }
}
