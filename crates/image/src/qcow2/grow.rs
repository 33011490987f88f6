//! A disk that becomes longer while it is in use.
//!
//! Law: the header's size changes last, durably, when everything that it needs is there: a cut leaves the old size or the new one. What
//! is new reads as zeros, whatever lies behind the old end in its cluster or in the backing image. Requests go on meanwhile; only
//! flushes wait while the L1 table is moved. Growths are one at a time: what is new to the first is the guest's when the second begins.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use futures_util::FutureExt;
use limosa_storage::Buffer;

use super::allocate::behind;
use super::check::extend;
use super::counters::Purpose;
use super::header::{Header, L1_MOST};
use super::image::{Dropped, Inner, Qcow2};
use super::overlap::Table;
use super::zero::Zeroing;
use crate::disk::Pending;
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};

impl Qcow2 {
    /// Makes the disk `size` bytes long, which is no less than it is: what is new reads as zeros. Requests may be under way, and those
    /// behind the old end are carried out when it is done. Durable in the end. Several at a time are carried out one after the other.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: shorter; no multiple of 512; larger than the image's clusters allow; version 2 with snapshots; a
    /// raw data file, which only [`resize`](super::check::resize) changes; [`ImageError::ReadOnly`]; what the storage says. The size is then the
    /// old one.
    pub fn grow(&self, size: u64) -> Pending<'_> {
        let inner = Arc::clone(self.inner());
        self.inner().whole(async move {
            // Here, and not in what others may have to bring to its end.
            let _inside = inner.admit(GuestOffset(0), 0)?;
            let grower = Arc::clone(&inner);
            behind(&inner.growing, async move { grower.grow(size).await }.boxed()).await
        })
    }
}

/// Why a disk cannot become so long, if it cannot: for people.
pub(super) fn fault(header: &Header, size: u64) -> Option<String> {
    let geometry = header.geometry();
    if !size.is_multiple_of(512) {
        return Some(format!("a size of {size} bytes, which is no multiple of 512"));
    }
    if header.version < 3 && header.snapshots.1 > 0 {
        return Some("it has snapshots and is of version 2, which does not say how large they are".into());
    }
    (geometry.l1_entries(size) > u64::from(L1_MOST) || i64::try_from(size).is_err())
        .then(|| format!("a disk of {size} bytes is too large for clusters of {} bytes", geometry.cluster_size()))
}

impl Inner {
    async fn grow(self: &Arc<Self>, size: u64) -> Result<(), ImageError> {
        let old = self.size.load(Ordering::Acquire);
        let header = self.header.lock().clone();
        let what = if size < old {
            Some(format!("it has {old} bytes; while it is in use it does not become shorter"))
        } else if header.features.raw_data_file() {
            Some("its contents lie in a raw data file: it is resized when it is not in use".into())
        } else {
            fault(&header, size)
        };
        if let Some(what) = what {
            return Err(ImageError::Unsupported { image: Arc::clone(&self.name), what });
        }
        if size == old {
            return Ok(());
        }
        self.begin_writing().await?;
        self.lengthen_l1(size).await?;
        if self.has_data_file && self.data.length()? < size {
            self.data.set_len(size).await?;
        }
        self.hide(old, size).await?;
        self.settle().await?;
        let inner = Arc::clone(self);
        let publish = async move {
            inner.change_header(|header| header.size = size).await?;
            inner.size.store(size, Ordering::Release);
            Ok(())
        };
        self.exclusively(publish.boxed()).await
    }

    /// What a disk that becomes `size` bytes long would show that nobody wrote there becomes zeros: what lies in the cluster of the old
    /// end behind it, and what the backing image has there. None of it is flushed.
    pub(super) async fn hide(self: &Arc<Self>, old: u64, size: u64) -> Result<(), ImageError> {
        let own = old.next_multiple_of(self.geometry.cluster_size()).min(size);
        let below = self.backing.as_ref().map_or(0, |backing| backing.len()).min(size);
        if own > old {
            self.write_zeros(old..own).await?;
        }
        if below <= own {
            return Ok(());
        }
        if self.rules.version > 2 {
            return Arc::clone(self).zero(own, below - own, Zeroing::Unmap).await;
        }
        // Version 2 has no zero clusters.
        self.write_zeros(own..below).await
    }

    /// Makes the L1 table as long as a disk of `size` bytes needs. No flush is under way meanwhile: it would write to where the table
    /// was.
    async fn lengthen_l1(self: &Arc<Self>, size: u64) -> Result<(), ImageError> {
        let entries = self.geometry.l1_entries(size);
        let enough = move |inner: &Self| inner.l1.place().1 as u64 >= entries;
        if enough(self) {
            return Ok(());
        }
        let moved = Arc::new(OnceLock::new());
        let (inner, outcome) = (Arc::clone(self), Arc::clone(&moved));
        let work = async move {
            let flushed = inner.settle_now().await;
            let mover = Arc::clone(&inner);
            let work = async move { if enough(&mover) { Ok(()) } else { mover.move_l1(entries).await } };
            // Whoever waits for a flush is told of the flush.
            let _ = outcome.set(inner.exclusively(work.boxed()).await);
            flushed
        };
        let flushed = self.instead_of_settling(work.boxed()).await;
        moved.get().cloned().unwrap_or(flushed)
    }

    /// Moves the L1 table to where there is room for `entries`: as it is in the file. What differs in memory is written there by the next
    /// flush.
    async fn move_l1(self: &Arc<Self>, entries: u64) -> Result<(), ImageError> {
        self.ready_for_refcounts().await?;
        // If a header could not be written before, it is known from now on to which refcount table it leads.
        self.change_header(|_| {}).await?;
        self.write_refcounts().await?;
        let (old_at, old) = self.l1.place();
        let clusters = self.geometry.clusters(entries * 8);
        let mut header = self.header.lock().clone();
        self.refcounts.lock().forget();
        let first = match extend::extend(&*self.file, &mut header, clusters).await {
            Ok(first) => first,
            Err(error) => {
                // The file may have its old refcount table or a new one: the old one is complete, and is said to be it.
                self.change_header(|_| {}).await?;
                self.pool.lock().forget_free(0);
                return Err(error);
            }
        };
        self.refcounts_anew(&header).await?;
        let bits = self.geometry.cluster_bits;
        self.pool.lock().forget_free(first);
        let at = first << bits;
        let table = Buffer::zeroed(usize::try_from(clusters << bits).unwrap_or(0));
        if old > 0 {
            self.file.read(old_at, table.slice(0..old * 8).into()).await?;
        }
        self.counters.add(Purpose::L1Write, table.len() as u64);
        self.file.write(at, table.into()).await?;
        self.flush_file().await?;
        let length = u32::try_from(entries).unwrap_or(u32::MAX);
        self.change_header(|header| header.l1 = (HostOffset(at), length)).await?;
        self.l1.moved(at, usize::try_from(entries).unwrap_or(usize::MAX));
        self.metadata.move_l1_table(&(at..at + entries * 8));
        if old > 0 {
            let count = self.geometry.clusters(old as u64 * 8);
            self.give_up(Dropped { first: old_at >> bits, count, table: false }).await?;
        }
        Ok(())
    }

    /// Takes the refcounts from the file, after others have changed them there.
    async fn refcounts_anew(&self, header: &Header) -> Result<(), ImageError> {
        let table = Buffer::zeroed(usize::try_from(header.refcount_table_bytes()).unwrap_or(0));
        self.file.read(header.refcount_table.0.0, table.clone().into()).await?;
        self.refcounts.lock().has_table(header.refcount_table.0.0, &table.to_vec());
        let blocks: Vec<u64> = self.refcounts.lock().blocks.iter().copied().filter(|at| *at != 0).collect();
        blocks.into_iter().for_each(|at| self.metadata.add(at, Table::RefcountBlock));
        let end = header.refcount_table.0.0 + header.refcount_table_bytes();
        self.metadata.move_refcount_table(&(header.refcount_table.0.0..end));
        self.header.lock().refcount_table = header.refcount_table;
        Ok(())
    }
}
