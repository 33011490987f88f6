//! One of an image's snapshots, read as a disk.

use std::fmt;
use std::sync::Arc;

use limosa_storage::Storage;

use super::header::Header;
use super::snapshot_table::{self, Snapshot};
use crate::error::ImageError;
use crate::offset::GuestOffset;

/// The choice of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotChoice {
    /// The one with this id; otherwise the first one of this name.
    IdOrName(String),
    /// The first one with this id and name; at least one of them is given.
    IdAndName {
        /// Its id.
        id: Option<String>,
        /// Its name.
        name: Option<String>,
    },
}

impl SnapshotChoice {
    /// Returns the snapshot among these.
    #[must_use]
    pub fn find<'a>(&self, snapshots: &'a [Snapshot]) -> Option<&'a Snapshot> {
        snapshots.get(self.position(snapshots)?)
    }

    /// The number of the snapshot among these.
    pub(in crate::qcow2) fn position(&self, snapshots: &[Snapshot]) -> Option<usize> {
        match self {
            Self::IdOrName(word) => {
                let first = snapshots.iter().position(|snapshot| snapshot.id == *word);
                first.or_else(|| snapshots.iter().position(|snapshot| snapshot.name == *word))
            }
            Self::IdAndName { id, name } => snapshots.iter().position(|snapshot| {
                id.as_ref().is_none_or(|id| *id == snapshot.id)
                    && name.as_ref().is_none_or(|name| *name == snapshot.name)
            }),
        }
    }

    /// Returns the header of an image as it was when the snapshot was taken: with its L1 table and length. The image
    /// may only be read.
    pub(crate) async fn apply(&self, storage: &dyn Storage, header: Header) -> Result<Header, ImageError> {
        Ok(self.header_of(storage, header).await?.0)
    }

    /// Returns the header of an image that reaches to the end of the state of the VM that the snapshot has, and where
    /// that begins, and its bytes. The image may only be read.
    pub(crate) async fn vm_state(
        &self,
        storage: &dyn Storage,
        header: Header,
    ) -> Result<(Header, GuestOffset, u64), ImageError> {
        let unsupported = |what: String| ImageError::Unsupported { image: Arc::clone(storage.name()), what };
        let (header, length) = self.header_of(storage, header).await?;
        if length == 0 {
            return Err(unsupported(format!("its snapshot with {self} has no state of a VM")));
        }
        let start = header.size.checked_next_multiple_of(header.geometry().l2_covers());
        let end = start.and_then(|start| start.checked_add(length)).filter(|end| i64::try_from(*end).is_ok());
        let Some((start, size)) = start.zip(end) else {
            return Err(unsupported(format!(
                "its snapshot with {self} has a state of {length} bytes, which no VM has"
            )));
        };
        Ok((Header { size, ..header }, GuestOffset(start), length))
    }

    /// The header of an image as it was when the snapshot was taken, and the bytes of the VM's state.
    async fn header_of(&self, storage: &dyn Storage, header: Header) -> Result<(Header, u64), ImageError> {
        let snapshots = snapshot_table::read(storage, &header).await?;
        let unsupported = |what: String| ImageError::Unsupported { image: Arc::clone(storage.name()), what };
        let Some(Snapshot { l1, disk_size, vm_state_size, .. }) = self.find(&snapshots) else {
            return Err(unsupported(format!("it has no snapshot with {self}")));
        };
        if l1.0.0.saturating_add(u64::from(l1.1) * 8) > storage.length()? {
            let table = format!("L1 table at {} of the snapshot with {self}", l1.0);
            let why = "it goes beyond the end of the file".to_owned();
            return Err(ImageError::Corrupt { image: Arc::clone(storage.name()), table, why });
        }
        let size = disk_size.unwrap_or(header.size);
        if i64::try_from(size).is_err() {
            return Err(unsupported(format!("its snapshot with {self} has {size} bytes, which no disk has")));
        }
        Ok((Header { l1: *l1, size, ..header }, *vm_state_size))
    }
}

impl fmt::Display for SnapshotChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IdOrName(word) => write!(f, "the id or name {word:?}"),
            Self::IdAndName { id: Some(id), name: Some(name) } => write!(f, "the id {id:?} and the name {name:?}"),
            Self::IdAndName { id: Some(id), name: None } => write!(f, "the id {id:?}"),
            Self::IdAndName { id: None, name } => write!(f, "the name {:?}", name.as_deref().unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offset::HostOffset;

    fn snapshot(id: &str, name: &str) -> Snapshot {
        Snapshot {
            l1: (HostOffset(0), 0),
            id: id.into(),
            name: name.into(),
            taken: (0, 0),
            vm_clock: 0,
            vm_state_size: 0,
            disk_size: None,
            icount: None,
        }
    }

    #[test]
    fn an_id_goes_before_a_name() {
        let snapshots = [snapshot("1", "2"), snapshot("2", "old"), snapshot("3", "old")];
        let found = |choice: SnapshotChoice| choice.find(&snapshots).map(|snapshot| snapshot.id.as_str());
        let either = |word: &str| found(SnapshotChoice::IdOrName(word.into()));
        assert_eq!([either("1"), either("2"), either("old"), either("new")], [Some("1"), Some("2"), Some("2"), None]);
        let both = |id: Option<&str>, name: Option<&str>| {
            found(SnapshotChoice::IdAndName { id: id.map(Into::into), name: name.map(Into::into) })
        };
        assert_eq!(
            [both(Some("3"), Some("old")), both(None, Some("2")), both(Some("1"), Some("old"))],
            [Some("3"), Some("1"), None]
        );
    }
}
