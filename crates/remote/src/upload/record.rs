//! The record of an upload, with which it is continued after a kill: a file of lines, to which one is appended for each
//! part.
//!
//! **Law: a line that is not whole says nothing, and no part is left out that has other bytes than the record's.** The
//! record has no credentials. Who has the lock on it owns the upload.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::cache::Directory;

/// The longest record, in bytes.
const RECORD_MAX: u64 = 8 << 20;

/// The beginning of a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Begun {
    /// The store's name of the upload.
    pub(super) id: String,
    /// Our own, which the object has as an attribute.
    pub(super) mark: String,
    pub(super) part_size: u64,
    pub(super) length: u64,
}

/// A part that the store has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) index: usize,
    /// SHA-256 of its bytes.
    pub(super) digest: String,
    /// The store's name of it.
    pub(super) id: String,
}

/// The record of an upload, locked.
#[derive(Debug)]
pub(super) struct Record {
    directory: Directory,
    name: String,
    file: OwnedFd,
    length: u64,
}

/// The contents of a record.
pub(super) type Resumable = (Begun, HashMap<usize, Part>);

impl Record {
    /// Opens the record of an object, and returns what an earlier upload has left in it. `None`: another process writes
    /// this object.
    pub(super) fn open(folder: &std::path::Path, identity: &str) -> io::Result<Option<(Self, Option<Resumable>)>> {
        let directory = Directory::open(folder)?;
        let hash = Sha256::digest(identity);
        let name: String =
            hash.iter().take(20).map(|byte| format!("{byte:02x}")).chain([".upload".to_owned()]).collect();
        let file = match directory.open_file(&name)? {
            Some(file) => Some(file),
            None => directory.create_file(&name, b"")?,
        };
        let Some(file) = file else { return Ok(None) };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        if rustix::fs::fstat(&file)?.st_nlink == 0 {
            // Its owner has removed it between both calls: that upload has ended.
            return Ok(None);
        }
        let mut text = vec![0; limosa_page::to_usize(RECORD_MAX)];
        let length = crate::cache::read_all(&file, &mut text, 0)?;
        text.truncate(length);
        let record = Self { directory, name, file, length: length as u64 };
        Ok(Some((record, parse(&text))))
    }

    /// Empties it, and writes its beginning.
    pub(super) fn begin(&mut self, begun: &Begun) -> io::Result<()> {
        rustix::fs::ftruncate(&self.file, 0)?;
        self.length = 0;
        self.append(begun)
    }

    /// Adds a part.
    pub(super) fn add(&mut self, part: &Part) -> io::Result<()> {
        self.append(part)
    }

    /// Removes it: the upload has ended.
    pub(super) fn remove(&self) {
        self.directory.remove(self.name.as_bytes());
    }

    fn append(&mut self, line: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        crate::cache::write_all(&self.file, &text, self.length)?;
        self.length += text.len() as u64;
        Ok(())
    }
}

/// Returns the digest of a part.
pub(super) fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Understands a record. Lines after one that is not whole are of no use.
fn parse(text: &[u8]) -> Option<Resumable> {
    let mut lines = text.split_inclusive(|byte| *byte == b'\n').map_while(|line| line.strip_suffix(b"\n"));
    let begun: Begun = serde_json::from_slice(lines.next()?).ok()?;
    let parts = lines.map_while(|line| serde_json::from_slice::<Part>(line).ok());
    Some((begun, parts.map(|part| (part.index, part)).collect()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn begun() -> Begun {
        Begun { id: "i\n".into(), mark: "m".into(), part_size: 5, length: 12 }
    }

    fn part(index: usize) -> Part {
        Part { index, digest: digest(b"x"), id: format!("\"{index}\"") }
    }

    #[test]
    fn a_record_is_continued_and_belongs_to_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("uploads");
        let (mut record, found) = Record::open(&path, "a").unwrap().unwrap();
        assert_eq!(found, None);
        record.begin(&begun()).unwrap();
        record.add(&part(0)).unwrap();
        record.add(&part(2)).unwrap();
        assert!(Record::open(&path, "a").unwrap().is_none(), "it is locked");
        assert!(Record::open(&path, "b").unwrap().is_some());
        drop(record);
        let (mut record, found) = Record::open(&path, "a").unwrap().unwrap();
        assert_eq!(found, Some((begun(), [0, 2].map(|index| (index, part(index))).into())));
        record.begin(&begun()).unwrap();
        drop(record);
        let (record, found) = Record::open(&path, "a").unwrap().unwrap();
        assert_eq!(found, Some((begun(), HashMap::new())));
        record.remove();
        drop(record);
        assert_eq!(Record::open(&path, "a").unwrap().unwrap().1, None);
    }

    proptest! {
        #[test]
        fn a_record_that_is_cut_has_the_parts_before_the_cut(parts in 0..5_usize, cut in 0..1000_usize) {
            let lines = (0..parts).map(|index| serde_json::to_string(&part(index)).unwrap());
            let text: String = [serde_json::to_string(&begun()).unwrap()].into_iter().chain(lines).map(|line| line + "\n").collect();
            let cut = cut.min(text.len());
            let whole = text[..cut].matches('\n').count();
            let found = parse(&text.as_bytes()[..cut]).map(|(_, parts)| parts.len());
            prop_assert_eq!(found, whole.checked_sub(1));
        }

        #[test]
        fn no_record_makes_it_panic(text: Vec<u8>) {
            let _ = parse(&text);
        }
    }
}
