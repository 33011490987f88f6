//! A qcow2 image in use.
//!
//! # What is where
//!
//! [`Qcow2`] is a [`Disk`]. The L1 table and the refcount table are in memory as a whole; of the L2 tables and the refcount blocks
//! a bounded number of slices of at most 4 KiB. What is in memory is the truth: a request changes it there, and
//! the module `order` brings it to the file.
//!
//! # Requests
//!
//! A **read** looks up what its bytes are, and reads everything at once. A **write** to clusters that the image has for itself is
//! one write to the storage, and takes no lock beyond that of the slice, for the look. What changes where bytes lie claims the
//! clusters (or subclusters) first: a *job*, of which there is one for any cluster at a time.
//!
//! * A write that needs a new cluster is a job: it takes clusters, reads what has to stand around the guest's bytes, writes all of it
//!   with one vectored write, and then notes in the L2 table where it lies. A write to the same clusters that comes while the job is
//!   still reading gives it its bytes; if nothing has to stand around them it writes to the same new cluster itself, at once; otherwise
//!   it waits and then writes in place. Where much would be copied and the filesystem can share it, the job clones it and writes the
//!   guest's bytes over it (the module `clones`).
//! * Zeroing and discarding whole clusters is a job that changes entries only.
//!
//! Of requests that overlap each byte is of one or the other: a write in place that was looked up before a discard is as if it had
//! come before it. A cluster that nothing refers to any more is therefore not used anew before everybody who may have looked it up
//! is done (the module `epoch`), and not before the file says so durably. One that is zeroed and stays may be written anew at once:
//! a read that was under way meanwhile reads again. A failed job's cluster beside whose bytes others write counts as dropped, too.
//!
//! Whoever waits for a job, a slice or a flush drives it: there is no thread behind an image, and a request that is dropped or not polled
//! stops nobody but a close, which waits for those that are polled no more until they are dropped. A job that is dropped is ended by
//! whatever request comes next, before anything else, so that it is either over or never was. A write in place that is dropped settles
//! by itself, and counts as using its cluster until a flush finds it over.
//!
//! # What is not written over
//!
//! An image may lie about where its contents are, what is free, and where its tables lie. Every cluster that is to be written, handed
//! out or given back is looked for among the tables first (the module `overlap`), and tables that lie on each other are found when
//! the image is opened to be written. Whatever is found: the image is marked as corrupt, and nothing more is written or given back.
//!
//! # What a crash leaves
//!
//! At any instant, in the file: every refcount is at least the number of references, except under the dirty bit; every reference leads
//! to something that was written before. So:
//!
//! 1. contents are written when requests are carried out, refcounts taken in memory before that, entries of L2 tables in
//!    memory after it;
//! 2. a flush captures what is dirty, writes refcounts and new L2 tables, flushes; writes L2 slices and L1 blocks, flushes; and
//!    only then lowers, in memory, the refcounts of what was dropped.
//!
//! A crash before the second flush leaves clusters with a refcount and no reference: leaks. One within a write of a slice leaves
//! of each entry the old or the new one, and both are valid. Reading old contents of a reused cluster is excluded, since its entry is
//! written after a flush that follows its contents.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use async_lock::OnceCell;
use futures_util::FutureExt;
use limosa_storage::{Buffer, IoVector, Storage};

use super::abandon::Abandoned;
use super::allocate::Pool;
use super::check::{CheckOptions, CheckReport, Repair, repair};
use super::clones::Sharing;
use super::counters::{Counters, Counts};
use super::entry::EntryRules;
use super::epoch::Epochs;
use super::geometry::Geometry;
use super::header::{Compression, Header};
use super::jobs::Jobs;
use super::l1::L1;
use super::locks::{Rank, RankedMutex};
use super::look::{Kind, Piece};
use super::metadata::tables_of;
use super::order::Settling;
use super::overlap::Tables;
use super::refcounts::Refcounts;
use super::slices::{Flight, Slices};
use super::snapshot_table;
use super::write::Orphan;
use super::zero::Zeroing;
use crate::disk::{Disk, MapKind, Mapped, Pending};
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};
use crate::requests::{Inside, Requests};

/// The logarithm of the largest slice's bytes.
const SLICE_BITS: u32 = 12;

/// What an image consists of.
#[derive(Debug)]
pub struct Parts {
    /// Where the image lies.
    pub file: Arc<dyn Storage>,
    /// Where its contents lie, if they lie in a file of their own.
    pub data_file: Option<Arc<dyn Storage>>,
    /// What is seen where it has nothing. `None`: zeros, whatever the header says.
    pub backing: Option<Arc<dyn Disk>>,
    /// Its header, as it was read.
    pub header: Header,
}

/// Whether contents that a new cluster takes over are shared, where the filesystem can, in place of being copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloneMode {
    /// They are copied.
    Off,
    /// Where at least so many bytes would be copied for a write.
    From(u64),
}

impl CloneMode {
    /// From where on a clone was measured to be the less of the two, on XFS (docs/benchmarks/2026-11-22-clones.md): clusters of
    /// 256 KiB that a small write begins are faster cloned, those of 64 KiB are faster copied, and between them what is gained in time is
    /// lost in CPU. A clone is a change of the filesystem's own tables, which lasts as long whatever its length; and what is then
    /// written over it takes space anew.
    pub const AUTO: Self = Self::From(128 << 10);
}

impl Default for CloneMode {
    fn default() -> Self {
        Self::AUTO
    }
}

/// How an image is used.
#[derive(Debug, Clone)]
pub struct Qcow2Options {
    /// The most memory for L2 slices, in bytes; refcount blocks get a quarter of it on top.
    pub cache_size: u64,
    /// Whether new clusters are filled by sharing.
    pub clone: CloneMode,
    /// Nothing is written, the header included.
    pub read_only: bool,
    /// Whether refcounts are written late; `None`: what the image says.
    pub lazy_refcounts: Option<bool>,
    /// Bytes of clusters that are taken at once, for writes to come, and that the file is made longer by. What is not used is given
    /// back when the image is closed. More than the usual 4 MiB was measured to gain nothing.
    pub allocate_ahead: u64,
    /// Whether space that is given back is given back to the storage, too.
    pub discard: bool,
}

impl Default for Qcow2Options {
    fn default() -> Self {
        Self {
            cache_size: 32 << 20,
            clone: CloneMode::default(),
            read_only: false,
            lazy_refcounts: None,
            allocate_ahead: 4 << 20,
            discard: true,
        }
    }
}

/// A qcow2 image in use; see the [module](self).
pub struct Qcow2 {
    inner: Arc<Inner>,
    repaired: Option<CheckReport>,
}

pub(super) struct Inner {
    pub(super) name: Arc<str>,
    pub(super) file: Arc<dyn Storage>,
    /// Where contents lie: the file, if there is no other.
    pub(super) data: Arc<dyn Storage>,
    pub(super) has_data_file: bool,
    pub(super) backing: Option<Arc<dyn Disk>>,
    pub(super) geometry: Geometry,
    pub(super) rules: EntryRules,
    pub(super) compression: Compression,
    pub(super) options: Qcow2Options,
    pub(super) read_only: bool,
    pub(super) size: AtomicU64,
    pub(super) header: RankedMutex<Header>,
    /// Whether clusters that count as contents may be holes in the file; see the module `preallocated`.
    pub(super) preallocated: OnceCell<bool>,
    pub(super) l1: L1,
    pub(super) l2: Slices,
    pub(super) counters: Counters,
    pub(super) epochs: Arc<Epochs<Dropped>>,
    /// How often clusters were zeroed that stay where they are: who read meanwhile may have read what was written there since.
    pub(super) zeroings: AtomicU64,
    /// Requests that change where bytes lie.
    pub(super) jobs: Jobs,
    /// L2 tables that are being made, by their L1 entries.
    pub(super) tables: RankedMutex<HashMap<u64, Flight>>,
    /// L2 tables whose contents in the file mean nothing yet.
    pub(super) fresh: RankedMutex<HashSet<u64>>,
    /// References that the tables in memory have no more, and those in the file may have.
    pub(super) drops: RankedMutex<Vec<Dropped>>,
    pub(super) refcounts: RankedMutex<Refcounts>,
    pub(super) pool: RankedMutex<Pool>,
    pub(super) sharing: Sharing,
    /// Where the image's own tables lie; empty if it is only read.
    pub(super) metadata: Tables,
    /// The last thing that was begun with refcounts or the header; see [`Inner::exclusively`].
    pub(super) last: RankedMutex<Option<Flight>>,
    /// The last time that the disk was to become longer.
    pub(super) growing: RankedMutex<Option<Flight>>,
    pub(super) settling: RankedMutex<Settling>,
    pub(super) orphans: Arc<RankedMutex<Vec<Orphan>>>,
    pub(super) abandoned: Abandoned,
    /// Refcounts are written late, under the dirty bit.
    pub(super) lazy: bool,
    pub(super) begun: AtomicBool,
    pub(super) marked_corrupt: AtomicBool,
    pub(super) requests: Requests,
    /// Its end, once that was begun.
    pub(super) closing: RankedMutex<Option<Flight>>,
    /// How long the file was when it was opened, in bytes.
    pub(super) length_at_open: u64,
    /// How long it has been since, as far as anybody looked.
    pub(super) longest: AtomicU64,
    /// The same of the storage that contents lie in, if that is another one.
    pub(super) longest_data: AtomicU64,
    /// A cluster of zeros, to be written from.
    pub(super) zeros: Buffer,
}

/// References to clusters that are no longer there: one for each of `count` clusters from number `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dropped {
    pub(super) first: u64,
    pub(super) count: u64,
    /// They led to an L2 table.
    pub(super) table: bool,
}

impl Qcow2 {
    /// Takes an image into use. One that is to be written, and was not closed while its refcounts were written late, is repaired first:
    /// [`Qcow2::repaired`]. Whoever opens it to write it has it alone.
    ///
    /// # Errors
    /// [`ImageError::Corrupt`]: the L1 table does not fit the disk, the image is marked as corrupt and is to be written;
    /// [`ImageError::Unsupported`]: a data file is needed and not there, more has to be repaired before writing than refcounts;
    /// what the storage says.
    pub async fn open(parts: Parts, options: Qcow2Options) -> Result<Arc<Self>, ImageError> {
        let Parts { file, data_file, backing, mut header } = parts;
        let name = Arc::clone(file.name());
        let geometry = header.geometry();
        let read_only = options.read_only || file.is_read_only();
        let unsupported = |what: &str| ImageError::Unsupported { image: Arc::clone(&name), what: what.to_owned() };
        if header.features.data_file() != data_file.is_some() {
            return Err(unsupported("it has to be opened with its data file, or has none and was given one"));
        }
        let (at, entries) = (header.l1.0.0, u64::from(header.l1.1));
        if entries < geometry.l1_entries(header.size) {
            let why = format!("its {entries} entries are too few for a disk of {} bytes", header.size);
            return Err(ImageError::Corrupt { image: name, table: format!("L1 table at {at:#x}"), why });
        }
        if !read_only && header.features.corrupt() {
            return Err(unsupported(
                "it is marked as corrupt: `limosa img check -r all` repairs it; it can be read as it is",
            ));
        }
        let mut repaired = None;
        if !read_only && header.features.dirty() {
            let report = repair(&*file, Repair::Refcounts, CheckOptions::default()).await?;
            header = Header::read(&*file).await?;
            if header.features.dirty() {
                return Err(unsupported(
                    "it was not closed, and more is wrong than refcounts that were written late: \
                     `limosa img check -r all` repairs it; it can be read as it is",
                ));
            }
            let (corruptions, leaks) = (report.corruptions_fixed, report.leaks_fixed);
            tracing::info!(image = &*name, corruptions, leaks, "it was not closed: its refcounts were made anew");
            repaired = Some(report);
        }
        let read = async |at: u64, length: u64| {
            let buffer = Buffer::zeroed(usize::try_from(length).unwrap_or(0));
            file.read(at, buffer.clone().into()).await.map(|()| buffer.to_vec())
        };
        let l1 = L1::new(at, &read(at, entries * 8).await?, geometry);
        // Who only reads needs no refcounts.
        let refcount_table =
            if read_only { Vec::new() } else { read(header.refcount_table.0.0, header.refcount_table_bytes()).await? };
        let slice_bits = geometry.cluster_bits.min(SLICE_BITS);
        let refcounts = Refcounts::new(header.refcount_table.0.0, &refcount_table, options.cache_size / 4, slice_bits);
        let metadata = if read_only {
            Tables::default()
        } else {
            let (snapshots, end) = snapshot_table::read_to_end(&*file, &header).await?;
            tables_of(&header, &l1, &refcounts.blocks, &snapshots, end)
        };
        let lazy = header.version > 2 && options.lazy_refcounts.unwrap_or_else(|| header.features.lazy_refcounts());
        let length_at_open = file.length()?;
        let longest_data = data_file.as_ref().map_or(Ok(0), |data_file| data_file.length())?;
        let inner = Inner {
            data: data_file.unwrap_or_else(|| Arc::clone(&file)),
            name,
            file,
            has_data_file: header.features.data_file(),
            backing,
            geometry,
            rules: header.rules(),
            compression: header.compression,
            read_only,
            size: AtomicU64::new(header.size),
            l1,
            l2: Slices::new(options.cache_size, slice_bits),
            counters: Counters::default(),
            epochs: Epochs::new(),
            zeroings: AtomicU64::new(0),
            jobs: Jobs::new((geometry.l2_entries() << geometry.cluster_bits) >> (geometry.cluster_bits - slice_bits)),
            tables: Rank::Making.mutex(HashMap::new()),
            fresh: Rank::New.mutex(HashSet::new()),
            drops: Rank::Drops.mutex(Vec::new()),
            refcounts: Rank::Refcounts.mutex(refcounts),
            pool: Rank::Pool.mutex(Pool::default()),
            sharing: Sharing::default(),
            metadata,
            last: Rank::Serial.mutex(None),
            growing: Rank::Growing.mutex(None),
            settling: Rank::Flushes.mutex(Settling::default()),
            orphans: Arc::new(Rank::Detached.mutex(Vec::new())),
            abandoned: Abandoned::default(),
            lazy,
            begun: AtomicBool::new(false),
            marked_corrupt: AtomicBool::new(false),
            requests: Requests::default(),
            closing: Rank::Closing.mutex(None),
            length_at_open,
            longest: AtomicU64::new(length_at_open),
            longest_data: AtomicU64::new(longest_data),
            zeros: Buffer::zeroed(usize::try_from(geometry.cluster_size()).unwrap_or(0)),
            header: Rank::Header.mutex(header),
            preallocated: OnceCell::new(),
            options,
        };
        Ok(Arc::new(Self { inner: Arc::new(inner), repaired }))
    }

    /// What the image had its storages do since it was opened.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.inner.counters.counts()
    }

    /// What was repaired when the image was opened; `None`: it had been closed, or is only read. An image whose refcounts are written
    /// late and that was not closed has refcounts that mean nothing: nothing is written before they are made anew, as
    /// [`Repair::Refcounts`] does.
    #[must_use]
    pub const fn repaired(&self) -> Option<&CheckReport> {
        self.repaired.as_ref()
    }

    pub(super) const fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    /// Its header, as it is now.
    #[must_use]
    pub fn header(&self) -> Header {
        self.inner.header.lock().clone()
    }
}

impl Inner {
    /// Refuses what lies outside, and everything after the image was closed, which waits for what is held here.
    pub(super) fn admit(&self, at: GuestOffset, wanted: u64) -> Result<Inside<'_>, ImageError> {
        let length = self.size.load(Ordering::Acquire);
        let Some(inside) = self.requests.enter() else {
            let what = "it has been closed".to_owned();
            return Err(ImageError::Unsupported { image: Arc::clone(&self.name), what });
        };
        match at.0.checked_add(wanted) {
            Some(end) if end <= length => Ok(inside),
            _ => Err(ImageError::Outside { image: Arc::clone(&self.name), length, at, wanted }),
        }
    }

    async fn map(self: &Arc<Self>, at: GuestOffset, length: u64) -> Result<Mapped, ImageError> {
        let _inside = self.admit(at, length)?;
        self.end_abandoned().await;
        let _guard = self.epochs.enter();
        let piece = |length: u64, kind, host| Mapped { length, kind, depth: 0, host };
        let end = at.0 + length;
        let Piece { mut length, kind } = self.piece(at.0, end).await?;
        let place = |host: u64| Some((Arc::clone(self.data.name()), HostOffset(host)));
        Ok(match kind {
            Kind::Own { host, .. } => {
                let (length, kind) = self.written(host, length).await?;
                piece(length, kind, place(host))
            }
            Kind::Zero { host, .. } => piece(length, MapKind::Zero, host.and_then(place)),
            Kind::Compressed { .. } => piece(length, MapKind::Compressed, None),
            Kind::Backing { host, .. } => {
                let holds = self.backing_holds(at.0);
                // A slice tells of a part only: what follows may be alike.
                while at.0 + length < end {
                    match self.piece(at.0 + length, end).await? {
                        Piece { length: more, kind: Kind::Backing { host: next, .. } }
                            if holds > 0 || next == host.map(|host| host + length) =>
                        {
                            length += more;
                        }
                        _ => break,
                    }
                }
                match &self.backing {
                    None => piece(length, MapKind::Unallocated, host.and_then(place)),
                    Some(backing) => match holds {
                        // QEMU counts it as this image's: the backing file ends before it.
                        0 => piece(length, MapKind::Unallocated, host.and_then(place)),
                        holds => {
                            let mapped = backing.map(at, length.min(holds)).await?;
                            Mapped { depth: mapped.depth + 1, ..mapped }
                        }
                    },
                }
            }
        })
    }
}

impl Disk for Qcow2 {
    fn name(&self) -> &Arc<str> {
        &self.inner.name
    }

    fn format(&self) -> &'static str {
        "qcow2"
    }

    fn len(&self) -> u64 {
        self.inner.size.load(Ordering::Acquire)
    }

    fn is_read_only(&self) -> bool {
        self.inner.read_only
    }

    fn granularity(&self) -> u64 {
        self.inner.geometry.subcluster_size().max(512)
    }

    fn read(&self, at: GuestOffset, into: IoVector) -> Pending<'_> {
        Box::pin(async move {
            let _inside = self.inner.admit(at, into.len() as u64)?;
            self.inner.end_abandoned().await;
            self.inner.read(at.0, into).await
        })
    }

    fn write(&self, at: GuestOffset, from: IoVector) -> Pending<'_> {
        let inner = Arc::clone(&self.inner);
        self.inner.whole(async move {
            let _inside = inner.admit(at, from.len() as u64)?;
            Arc::clone(&inner).write(at.0, from).await
        })
    }

    fn write_zeroes(&self, at: GuestOffset, length: u64, unmap: bool) -> Pending<'_> {
        let zeroing = if unmap { Zeroing::Unmap } else { Zeroing::Keep };
        let inner = Arc::clone(&self.inner);
        self.inner.whole(async move {
            let _inside = inner.admit(at, length)?;
            Arc::clone(&inner).zero(at.0, length, zeroing).await
        })
    }

    fn discard(&self, at: GuestOffset, length: u64) -> Pending<'_> {
        let inner = Arc::clone(&self.inner);
        self.inner.whole(async move {
            let _inside = inner.admit(at, length)?;
            Arc::clone(&inner).zero(at.0, length, Zeroing::Discard).await
        })
    }

    fn flush(&self) -> Pending<'_> {
        Box::pin(async move {
            let _inside = self.inner.admit(GuestOffset(0), 0)?;
            if self.inner.read_only { Ok(()) } else { self.inner.settle().await }
        })
    }

    fn map(&self, at: GuestOffset, length: u64) -> Pending<'_, Mapped> {
        Box::pin(self.inner.map(at, length))
    }

    fn storage(&self, depth: u32) -> Option<Arc<dyn Storage>> {
        match depth.checked_sub(1) {
            None => Some(Arc::clone(&self.inner.data)),
            Some(depth) => self.inner.backing.as_ref()?.storage(depth),
        }
    }

    fn close(&self) -> Pending<'_> {
        Box::pin(self.inner.close())
    }
}

impl Inner {
    /// Closes it once: whoever asks again, or after somebody who did not wait for it, is told how that ended.
    fn close(self: &Arc<Self>) -> Flight {
        let inner = Arc::clone(self);
        let close = || async move { inner.close_now().await }.boxed().shared();
        self.closing.lock().get_or_insert_with(close).clone()
    }

    /// Waits for requests, ends what those that were dropped have begun, gives back what was taken ahead, and makes everything durable.
    async fn close_now(self: &Arc<Self>) -> Result<(), ImageError> {
        self.requests.close();
        self.requests.over().await;
        if self.read_only {
            return Ok(());
        }
        loop {
            let flights = self.jobs.flights();
            if flights.is_empty() {
                break;
            }
            // Those who waited for them were told what became of them.
            futures_util::future::join_all(flights).await;
        }
        let orphans = self.orphans.take();
        futures_util::future::join_all(orphans).await;
        if !self.begun.load(Ordering::Acquire) {
            return self.flush_all().await;
        }
        self.settle().await?;
        let ahead = self.all_ahead();
        let inner = Arc::clone(self);
        let give_back = async move {
            let unused = ahead.into_iter().map(|run| Dropped { first: run.first, count: run.count, table: false });
            for dropped in inner.epochs.rest().into_iter().chain(unused) {
                inner.give_up(dropped).await?;
            }
            inner.write_refcounts().await?;
            inner.flush_file().await?;
            inner.cut_back().await;
            let dirty = inner.header.lock().features.dirty();
            if dirty { inner.change_header(|header| header.features.set_dirty(false)).await } else { Ok(()) }
        };
        self.exclusively(give_back.boxed()).await
    }
}

impl Drop for Qcow2 {
    fn drop(&mut self) {
        // What is under way holds the image, and the image holds it.
        self.inner.l2.drop_flights();
        self.inner.drop_settling();
        self.inner.jobs.clear();
        let under_way =
            (self.inner.tables.take(), self.inner.last.take(), self.inner.orphans.take(), self.inner.abandoned.take());
        let whole = (self.inner.growing.take(), self.inner.closing.take());
        drop((under_way, whole));
    }
}

impl fmt::Debug for Qcow2 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qcow2")
            .field("name", &self.inner.name)
            .field("geometry", &self.inner.geometry)
            .finish_non_exhaustive()
    }
}
