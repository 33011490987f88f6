//! The record of an upload, with which it is continued after a kill: a file of lines, to which one is appended for each
//! part.
//!
//! **Law: a line that is not whole says nothing, and no part is left out that has other bytes than the record's.** The
//! record has no credentials. Who has the lock on it owns the upload.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

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

impl Part {
    /// A part that is not known any more: no bytes have such a digest.
    pub(super) const fn taken_back(index: usize) -> Self {
        Self { index, digest: String::new(), id: String::new() }
    }
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
    /// Opens the record that an earlier upload of an object has left. `None`: it has left nothing, or still runs.
    pub(super) fn find(folder: &Path, identity: &str) -> io::Result<Option<(Self, Resumable)>> {
        // Nothing is made for those that need no record.
        if !folder.try_exists()? {
            return Ok(None);
        }
        let directory = Directory::open(folder)?;
        let name = name_of(identity);
        let Some(file) = directory.open_file(&name)? else { return Ok(None) };
        let Some((mut record, text)) = Self::lock(directory, name, file)? else { return Ok(None) };
        let Some((found, length)) = parse(&text) else {
            // Killed before it was begun.
            record.remove();
            return Ok(None);
        };
        // The next line begins where the last whole one ends.
        rustix::fs::ftruncate(&record.file, length)?;
        record.length = length;
        Ok(Some((record, found)))
    }

    /// Makes the record of an upload. `None`: another process writes this object, or has left a record of it.
    pub(super) fn create(folder: &Path, identity: &str, begun: &Begun) -> io::Result<Option<Self>> {
        let directory = Directory::open(folder)?;
        let name = name_of(identity);
        let Some(file) = directory.create_file(&name, b"")? else { return Ok(None) };
        let Some((mut record, text)) = Self::lock(directory, name, file)? else { return Ok(None) };
        if parse(&text).is_some() {
            return Ok(None);
        }
        rustix::fs::ftruncate(&record.file, 0)?;
        record.append(begun)?;
        Ok(Some(record))
    }

    /// Locks a record, and reads it. `None`: another process has it, or has removed it.
    fn lock(directory: Directory, name: String, file: OwnedFd) -> io::Result<Option<(Self, Vec<u8>)>> {
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
        Ok(Some((Self { directory, name, file, length: 0 }, text)))
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

fn name_of(identity: &str) -> String {
    let hash = Sha256::digest(identity);
    hash.iter().take(20).map(|byte| format!("{byte:02x}")).chain([".upload".to_owned()]).collect()
}

/// Understands a record. Returns its contents, and the length of what is whole. Lines after one that is not whole are
/// of no use.
fn parse(text: &[u8]) -> Option<(Resumable, u64)> {
    let mut lines = text.split_inclusive(|byte| *byte == b'\n').map_while(|line| line.strip_suffix(b"\n"));
    let first = lines.next()?;
    let begun: Begun = serde_json::from_slice(first).ok()?;
    let mut length = first.len() as u64 + 1;
    let mut parts = HashMap::new();
    for line in lines {
        let Ok(part) = serde_json::from_slice::<Part>(line) else { break };
        length += line.len() as u64 + 1;
        if part.digest.is_empty() {
            parts.remove(&part.index);
        } else {
            parts.insert(part.index, part);
        }
    }
    Some(((begun, parts), length))
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
        assert!(Record::find(&path, "a").unwrap().is_none() && !path.exists());
        let mut record = Record::create(&path, "a", &begun()).unwrap().unwrap();
        record.add(&part(0)).unwrap();
        record.add(&part(2)).unwrap();
        assert!(Record::find(&path, "a").unwrap().is_none(), "it is locked");
        assert!(Record::create(&path, "a", &begun()).unwrap().is_none(), "it is locked");
        assert!(Record::create(&path, "b", &begun()).unwrap().is_some());
        drop(record);
        assert!(Record::create(&path, "a", &begun()).unwrap().is_none(), "what it has would be lost");
        let (record, found) = Record::find(&path, "a").unwrap().unwrap();
        assert_eq!(found, (begun(), [0, 2].map(|index| (index, part(index))).into()));
        record.remove();
        drop(record);
        assert!(Record::find(&path, "a").unwrap().is_none());
    }

    #[test]
    fn a_line_after_one_that_was_cut_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = Record::create(folder.path(), "a", &begun()).unwrap().unwrap();
        record.add(&part(0)).unwrap();
        record.add(&part(1)).unwrap();
        rustix::fs::ftruncate(&record.file, record.length - 3).unwrap();
        drop(record);
        let (mut record, (_, parts)) = Record::find(folder.path(), "a").unwrap().unwrap();
        assert_eq!(parts.len(), 1);
        record.add(&part(7)).unwrap();
        drop(record);
        let (_, (_, parts)) = Record::find(folder.path(), "a").unwrap().unwrap();
        assert_eq!(parts, [0, 7].map(|index| (index, part(index))).into());
    }

    #[test]
    fn a_part_that_is_sent_again_is_not_known_until_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = Record::create(folder.path(), "a", &begun()).unwrap().unwrap();
        [part(0), part(1), Part::taken_back(0)].iter().for_each(|part| record.add(part).unwrap());
        drop(record);
        let (_, (_, parts)) = Record::find(folder.path(), "a").unwrap().unwrap();
        assert_eq!(parts, [(1, part(1))].into());
    }

    #[test]
    fn a_record_without_a_whole_beginning_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        drop(Record::create(folder.path(), "a", &begun()).unwrap().unwrap());
        let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        std::fs::write(&file, "{").unwrap();
        assert!(Record::find(folder.path(), "a").unwrap().is_none() && !file.exists());
    }

    proptest! {
        #[test]
        fn a_record_that_is_cut_has_the_parts_before_the_cut(parts in 0..5_usize, cut in 0..1000_usize) {
            let lines = (0..parts).map(|index| serde_json::to_string(&part(index)).unwrap());
            let text: String = [serde_json::to_string(&begun()).unwrap()].into_iter().chain(lines).map(|line| line + "\n").collect();
            let cut = cut.min(text.len());
            let whole = text[..cut].matches('\n').count();
            let found = parse(&text.as_bytes()[..cut]).map(|((_, parts), _)| parts.len());
            prop_assert_eq!(found, whole.checked_sub(1));
        }

        #[test]
        fn no_record_makes_it_panic(text: Vec<u8>) {
            let _ = parse(&text);
        }
    }
}
