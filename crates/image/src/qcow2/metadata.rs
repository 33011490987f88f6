//! What happens when something else is found where the image's own tables lie; and what is changed in the header while it is in use.
//!
//! Law: nothing is written over tables, and nothing of them given back. Who finds that it would be marks the image as corrupt,
//! durably, and nothing more is written for the guest, or given back. What was acknowledged before is still flushed.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::FutureExt;

use super::counters::Purpose;
use super::header::Header;
use super::image::{Dropped, Inner};
use super::l1::L1;
use super::overlap::{Overlap, Table, Tables};
use super::snapshot_table::Snapshot;
use crate::error::ImageError;
use crate::offset::HostOffset;

/// What to do about an image that is corrupt.
const REPAIR: &str = "nothing more is written before `limosa img check -r all` has repaired the image";

impl Inner {
    /// An error if the image's own tables lie where its contents are said to lie: the image is marked as corrupt.
    pub(super) async fn admit_contents(self: &Arc<Self>, bytes: &Range<u64>) -> Result<(), ImageError> {
        match self.overlap(bytes) {
            None => Ok(()),
            Some(overlap) => Err(self.contents_on(overlap, bytes.start).await),
        }
    }

    /// The table that lies where contents are said to lie.
    pub(super) fn overlap(&self, bytes: &Range<u64>) -> Option<Overlap> {
        if self.has_data_file { None } else { self.metadata.within(bytes, None) }
    }

    /// Contents are said to lie on a table.
    pub(super) async fn contents_on(self: &Arc<Self>, overlap: Overlap, host: u64) -> ImageError {
        let why = format!("an L2 entry has the disk's contents there, at {host:#x}; {REPAIR}");
        self.broken(overlap.to_string(), why).await
    }

    /// Clusters that are said to be free, and are to be used. Only within [`Inner::exclusively`].
    pub(super) async fn admit_free(&self, bytes: &Range<u64>) -> Result<(), ImageError> {
        match self.metadata.within(bytes, None) {
            None => Ok(()),
            Some(overlap) => {
                let why = format!("its clusters are counted as free, and were about to be used; {REPAIR}");
                Err(self.broken_now(overlap.to_string(), why).await)
            }
        }
    }

    /// References that are in the file no more: refcounts are lowered, and what nobody refers to is free. Nothing is given back in
    /// an image that is corrupt. Only within [`Inner::exclusively`].
    pub(super) async fn give_up(self: &Arc<Self>, dropped: Dropped) -> Result<(), ImageError> {
        if self.marked_corrupt.load(Ordering::Acquire) {
            return Ok(());
        }
        let bytes = self.bytes_of(dropped.first, dropped.count);
        // A table that a snapshot has, too, is known as one until nobody has it.
        let but = dropped.table.then_some(Table::L2);
        if let Some(overlap) = self.metadata.within(&bytes, but) {
            let why = format!("it lies where something else lay that was given up, at {:#x}; {REPAIR}", bytes.start);
            return Err(self.broken_now(overlap.to_string(), why).await);
        }
        let free = self.lower(dropped.first, dropped.count).await?;
        if dropped.table {
            free.iter().flat_map(|(first, count)| *first..first + count).for_each(|at| self.metadata.remove_l2(at));
        }
        self.release(free).await;
        Ok(())
    }

    /// Marks the image as corrupt, durably, and says why. Nothing more is written.
    pub(super) async fn broken(self: &Arc<Self>, table: String, why: impl Into<String>) -> ImageError {
        let (inner, error) = (Arc::clone(self), self.corrupt(table, why));
        let marked = async move {
            inner.mark_corrupt().await;
            Ok(())
        };
        let _ = self.exclusively(marked.boxed()).await;
        error
    }

    /// The same, within [`Inner::exclusively`].
    pub(super) async fn broken_now(&self, table: String, why: impl Into<String>) -> ImageError {
        self.mark_corrupt().await;
        self.corrupt(table, why)
    }

    async fn mark_corrupt(&self) {
        if !self.marked_corrupt.swap(true, Ordering::AcqRel) && self.rules.version > 2 {
            // If it cannot be marked, what it was marked for is said all the same.
            let _ = self.change_header(|header| header.features.set_corrupt(true)).await;
        }
    }

    /// Changes fields of the header, durably. Only within [`Inner::exclusively`].
    pub(super) async fn change_header(&self, change: impl FnOnce(&mut Header)) -> Result<(), ImageError> {
        let mut header = self.header.lock().clone();
        change(&mut header);
        self.counters.add(Purpose::HeaderWrite, header.encode_fields().len() as u64);
        header.write_fields(&*self.file).await?;
        *self.header.lock() = header;
        self.flush_file().await
    }

    /// Makes the file durable: not the data file.
    pub(super) async fn flush_file(&self) -> Result<(), ImageError> {
        self.counters.add(Purpose::Flush, 0);
        Ok(self.file.flush().await?)
    }

    /// How long the file is, in bytes; `Err` says what is broken if it has been longer: somebody else has cut it off. If anything were
    /// written behind what is left of it, what is lost would read as zeros.
    pub(super) fn length_now(&self) -> Result<Result<u64, [String; 2]>, ImageError> {
        // First how long it has been: others may make it longer meanwhile.
        let longest = self.longest.load(Ordering::Acquire);
        let length = self.file.length()?;
        self.longest.fetch_max(length, Ordering::AcqRel);
        Ok(if length >= longest { Ok(length) } else { Err(cut_off(length, longest)) })
    }

    /// Before refcounts are changed: if they are written late, the image says so.
    pub(super) async fn ready_for_refcounts(&self) -> Result<(), ImageError> {
        let dirty = self.header.lock().features.dirty();
        if self.lazy && !dirty {
            self.change_header(|header| header.features.set_dirty(true)).await?;
        }
        Ok(())
    }

    /// Before the first write: features that others would have to keep up are taken back.
    pub(super) async fn begin_writing(self: &Arc<Self>) -> Result<(), ImageError> {
        if self.marked_corrupt.load(Ordering::Acquire) {
            let what = "it is corrupt: nothing is written before `limosa img check -r all` has repaired it".to_owned();
            return Err(ImageError::Unsupported { image: Arc::clone(&self.name), what });
        }
        if self.begun.load(Ordering::Acquire) {
            return Ok(());
        }
        if self.read_only {
            return Err(ImageError::ReadOnly { image: Arc::clone(&self.name) });
        }
        if let Some((one, other)) = self.metadata.conflict() {
            let why = format!("the {other} lies there, too; {REPAIR}");
            return Err(self.broken(one.to_string(), why).await);
        }
        let inner = Arc::clone(self);
        let work = async move {
            let mut header = inner.header.lock().clone();
            header.begin_writing(&*inner.file, false).await?;
            *inner.header.lock() = header;
            inner.begun.store(true, Ordering::Release);
            Ok(())
        };
        self.exclusively(work.boxed()).await
    }
}

/// A file that somebody else has cut off at `length`: the table, and why.
fn cut_off(length: u64, longest: u64) -> [String; 2] {
    let why =
        format!("somebody has cut it off there, at {longest:#x} it ended before; what lay behind is lost; {REPAIR}");
    [format!("file at {length:#x}"), why]
}

/// What is known of where an image's tables lie when it is opened. The snapshot table ends at `snapshots_end`.
pub(super) fn tables_of(
    header: &Header,
    l1: &L1,
    blocks: &[u64],
    snapshots: &[Snapshot],
    snapshots_end: u64,
) -> Tables {
    let of = |table, at: HostOffset, bytes: u64| (table, at.0..at.0.saturating_add(bytes));
    let mut ranges = vec![
        of(Table::Header, HostOffset(0), 1 << header.cluster_bits),
        of(Table::L1, header.l1.0, u64::from(header.l1.1) * 8),
        of(Table::Refcounts, header.refcount_table.0, header.refcount_table_bytes()),
    ];
    if !snapshots.is_empty() {
        ranges.push((Table::Snapshots, header.snapshots.0.0..snapshots_end));
    }
    ranges.extend(snapshots.iter().map(|snapshot| of(Table::Snapshots, snapshot.l1.0, u64::from(snapshot.l1.1) * 8)));
    ranges.extend(header.bitmaps().map(|bitmaps| of(Table::BitmapDirectory, bitmaps.directory, bitmaps.size)));
    let used = blocks.iter().copied().filter(|at| *at != 0);
    let more = header.geometry().l1_entries(header.size).saturating_mul(2);
    Tables::new(header.cluster_bits, ranges, l1.tables(), used, more)
}
