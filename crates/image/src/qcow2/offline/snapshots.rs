//! Internal snapshots: taken, applied and deleted.
//!
//! Law: at any moment the disk and every snapshot read as before or as after. New tables and the refcounts for them are
//! durable before the header leads to them ([`admit_header`]), which one write of a sector does; what nothing refers to
//! any more is given back after that. A cut leaves leaked clusters, and flags that a repair puts right.

use std::sync::Arc;

use limosa_page::{to_u64, to_usize};
use limosa_storage::Storage;

use super::check::extend::{extend, release};
use super::check::{CheckOptions, Repair, admit_header, discard_free, repair, tables};
use crate::error::ImageError;
use crate::offset::HostOffset;
use crate::qcow2::format::bitmap_directory;
use crate::qcow2::format::entry::COPIED;
use crate::qcow2::format::header::{Header, SNAPSHOTS_MOST};
use crate::qcow2::format::snapshot_choice::SnapshotChoice;
use crate::qcow2::format::snapshot_table::{Entry, NAME_MOST, Snapshot, TABLE_MOST, read_entries};

/// A change of an image's internal snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SnapshotChange {
    /// A snapshot of the disk is taken.
    Create {
        /// Its name.
        name: String,
        /// The time: seconds since 1970, and nanoseconds.
        taken: (u32, u32),
    },
    /// The disk becomes what it was when this snapshot was taken. The snapshot stays.
    Apply(SnapshotChoice),
    /// The snapshot is removed.
    Delete(SnapshotChoice),
}

/// Changes the internal snapshots of an image, durably. The image is not used by anything else meanwhile, and is not
/// open as a disk. An image that was not closed is repaired first.
///
/// # Errors
/// [`ImageError::NeedsRepair`]: it is damaged; [`ImageError::Unsupported`]: there is no such snapshot, there are too
/// many, the name is too long, its refcounts are too small, its contents are in a data file, or a snapshot is applied
/// while it has bitmaps; what the storage says.
pub async fn change_snapshots(
    storage: &dyn Storage,
    change: &SnapshotChange,
    options: CheckOptions,
) -> Result<(), ImageError> {
    let mut work = Work::begin(storage, options).await?;
    let done = match change {
        SnapshotChange::Create { name, taken } => work.create(name, *taken).await,
        SnapshotChange::Apply(choice) => work.apply(choice).await,
        SnapshotChange::Delete(choice) => work.delete(choice).await,
    };
    if done.is_err() {
        work.undo().await;
    }
    done
}

/// An image whose snapshots change.
pub(super) struct Work<'a> {
    pub(super) storage: &'a dyn Storage,
    pub(super) header: Header,
    entries: Vec<Entry>,
    options: CheckOptions,
    /// Space was taken for new tables.
    pub(super) begun: bool,
}

impl<'a> Work<'a> {
    /// An image that is in order; one that was not closed is repaired.
    pub(super) async fn begin(storage: &'a dyn Storage, options: CheckOptions) -> Result<Self, ImageError> {
        let mut header = Header::read(storage).await?;
        if header.features.dirty() && !header.features.corrupt() {
            repair(storage, Repair::Refcounts, options).await?;
            header = Header::read(storage).await?;
        }
        if header.features.dirty() || header.features.corrupt() {
            let what = "it is damaged: check and repair it before its snapshots change".to_owned();
            return Err(ImageError::NeedsRepair { image: Arc::clone(storage.name()), what });
        }
        let (entries, _) = read_entries(storage, &header).await?;
        Ok(Self { storage, header, entries, options, begun: false })
    }

    /// Gives back what was taken for a change that failed; the first failure is the one that counts.
    pub(super) async fn undo(&self) {
        if self.begun {
            let _ = repair(self.storage, Repair::Leaks, self.options).await;
        }
    }

    /// Before the first change; `keep`: what bitmaps follow stays.
    pub(super) async fn prepare(&mut self, keep: bool) -> Result<(), ImageError> {
        self.header.prepare_autoclear(self.storage, keep).await
    }

    /// Refuses a new snapshot that cannot be.
    pub(super) fn admit_new(&self, name: &str) -> Result<(), ImageError> {
        self.refuse_data_file()?;
        if name.len() > NAME_MOST {
            return Err(self.unsupported(format!("a snapshot's name has at most {NAME_MOST} bytes")));
        }
        if to_u64(self.entries.len()) >= u64::from(SNAPSHOTS_MOST) {
            return Err(self.unsupported(format!("it has {SNAPSHOTS_MOST} snapshots, which are the most")));
        }
        Ok(())
    }

    async fn create(&mut self, name: &str, taken: (u32, u32)) -> Result<(), ImageError> {
        self.admit_new(name)?;
        self.prepare(true).await?;
        let l1 = self.header.l1;
        let copy = self.copy_l1(l1, l1.1).await?;
        self.add(copy, name, taken, 0).await
    }

    /// Has a new snapshot with this L1 table, whose tables are durable.
    pub(super) async fn add(
        &mut self,
        l1: (HostOffset, u32),
        name: &str,
        taken: (u32, u32),
        vm_state_size: u64,
    ) -> Result<(), ImageError> {
        let ids = self.entries.iter().filter_map(|entry| entry.snapshot.id.parse::<u64>().ok());
        let id = ids.max().unwrap_or(0).saturating_add(1).to_string();
        let (name, disk_size) = (name.to_owned(), Some(self.header.size));
        let new = Snapshot { l1, id, name, taken, vm_clock: 0, vm_state_size, disk_size, icount: Some(0) };
        let old = self.header.snapshots.0.0..self.end_of_table();
        self.entries.push(Entry::new(new)?);
        let snapshots = self.put_table().await?;
        self.switch(|header| header.snapshots = snapshots).await?;
        if !old.is_empty() {
            // The snapshot is there: what a failure leaves of the old table is lost space.
            let _ = release(self.storage, &self.header, old.start, old.end - old.start).await;
        }
        Ok(())
    }

    async fn apply(&mut self, choice: &SnapshotChoice) -> Result<(), ImageError> {
        self.refuse_data_file()?;
        self.refuse_bitmaps().await?;
        let snapshot = self.entries.get(self.find(choice)?).map(|entry| entry.snapshot.clone());
        let Some(Snapshot { l1, disk_size, .. }) = snapshot else { return Ok(()) };
        let geometry = self.header.geometry();
        let size = disk_size.unwrap_or(self.header.size);
        let needed = geometry.l1_entries(size);
        let too_long = || self.unsupported(format!("its snapshot with {choice} has {size} bytes, which no disk has"));
        let entries = u32::try_from(needed).map_err(|_| too_long())?.max(l1.1);
        if i64::try_from(size).is_err() || l1.0.0.saturating_add(u64::from(l1.1) * 8) > self.storage.length()? {
            return Err(too_long());
        }
        self.header.prepare_autoclear(self.storage, false).await?;
        let copy = self.copy_l1(l1, entries).await?;
        self.switch(|header| (header.l1, header.size) = (copy, size)).await?;
        self.give_back().await
    }

    async fn delete(&mut self, choice: &SnapshotChoice) -> Result<(), ImageError> {
        let number = self.find(choice)?;
        self.header.prepare_autoclear(self.storage, true).await?;
        self.entries.remove(number);
        let snapshots = self.put_table().await?;
        self.header.snapshots = snapshots;
        self.write_header().await?;
        self.give_back().await
    }

    fn find(&self, choice: &SnapshotChoice) -> Result<usize, ImageError> {
        let all: Vec<_> = self.entries.iter().map(|entry| entry.snapshot.clone()).collect();
        choice.position(&all).ok_or_else(|| self.unsupported(format!("it has no snapshot with {choice}")))
    }

    /// A copy of an L1 table, durable, with as many entries. In none of them a table may be written in place.
    pub(super) async fn copy_l1(
        &mut self,
        (at, had): (HostOffset, u32),
        entries: u32,
    ) -> Result<(HostOffset, u32), ImageError> {
        if entries == 0 {
            return Ok((HostOffset(0), 0));
        }
        let geometry = self.header.geometry();
        let clusters = geometry.clusters(u64::from(entries) * 8);
        let mut table = Vec::new();
        for (from, length) in tables::pieces(at.0, u64::from(had) * 8, self.storage.length()?) {
            let piece = tables::bytes(self.storage, from, length).await?;
            table.extend(tables::numbers(&piece).flat_map(|entry| (entry & !COPIED).to_be_bytes()));
        }
        table.resize(to_usize(clusters << geometry.cluster_bits), 0);
        self.begun = true;
        let place = extend(self.storage, &mut self.header, clusters).await? << geometry.cluster_bits;
        tables::put(self.storage, place, &table).await?;
        self.storage.flush().await?;
        Ok((HostOffset(place), entries))
    }

    /// Writes the snapshot table to a new place, durably.
    async fn put_table(&mut self) -> Result<(HostOffset, u32), ImageError> {
        let table: Vec<u8> = self.entries.iter().flat_map(|entry| entry.bytes.iter().copied()).collect();
        if to_u64(table.len()) > TABLE_MOST {
            return Err(self.unsupported(format!("its snapshot table would be longer than {TABLE_MOST} bytes")));
        }
        if table.is_empty() {
            return Ok((HostOffset(0), 0));
        }
        let geometry = self.header.geometry();
        let clusters = geometry.clusters(to_u64(table.len()));
        self.begun = true;
        let at = extend(self.storage, &mut self.header, clusters).await? << geometry.cluster_bits;
        tables::put(self.storage, at, &table).await?;
        self.storage.flush().await?;
        Ok((HostOffset(at), tables::narrow(to_u64(self.entries.len()))?))
    }

    /// The end of the table in force.
    fn end_of_table(&self) -> u64 {
        self.header.snapshots.0.0 + self.entries.iter().map(|entry| to_u64(entry.bytes.len())).sum::<u64>()
    }

    /// Has another header take effect, after refcounts were raised for what it leads to.
    async fn switch(&mut self, change: impl FnOnce(&mut Header)) -> Result<(), ImageError> {
        let mut next = self.header.clone();
        change(&mut next);
        admit_header(self.storage, &next, self.options).await?;
        self.header = next;
        self.write_header().await
    }

    async fn write_header(&self) -> Result<(), ImageError> {
        self.header.write_fields(self.storage).await?;
        Ok(self.storage.flush().await?)
    }

    /// Gives back what nothing refers to any more, and has flags say which clusters are not shared any more.
    async fn give_back(&self) -> Result<(), ImageError> {
        if repair(self.storage, Repair::Refcounts, self.options).await?.is_clean() {
            discard_free(self.storage, self.options).await?;
        }
        Ok(())
    }

    fn refuse_data_file(&self) -> Result<(), ImageError> {
        if self.header.features.data_file() {
            return Err(self.unsupported("snapshots of an image with a data file are not supported".into()));
        }
        Ok(())
    }

    /// Refuses bitmaps, as QEMU does: none of them would say what differs between the disk before and after.
    async fn refuse_bitmaps(&self) -> Result<(), ImageError> {
        let bitmaps = bitmap_directory::read(self.storage, &self.header).await?;
        if bitmaps.is_empty() {
            return Ok(());
        }
        let names: Vec<_> = bitmaps.iter().map(|bitmap| format!("{:?}", bitmap.name)).collect();
        let noun = if names.len() == 1 { "bitmap" } else { "bitmaps" };
        let (names, it) = (names.join(", "), if names.len() == 1 { "it" } else { "them" });
        Err(self
            .unsupported(format!("a snapshot cannot be applied while the image has {noun} {names}: remove {it} first")))
    }

    pub(super) fn unsupported(&self, what: String) -> ImageError {
        ImageError::Unsupported { image: Arc::clone(self.storage.name()), what }
    }
}
