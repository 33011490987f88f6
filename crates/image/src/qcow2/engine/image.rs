//! A qcow2 image in use.
//!
//! # What is where
//!
//! [`Qcow2`] is a [`Disk`]: it opens and closes an image, and hands requests to its owners. Each of them keeps what it
//! owns to itself, and knows those before it in this list only:
//!
//! * `header_owner`: the header, and what is done one after the other (changes of refcounts and of the header);
//! * `allocator`: refcounts, free clusters, references that were dropped, and where the image's own tables lie;
//! * `tables`: the L1 table and slices of the L2 tables;
//! * `flusher`: the order in which all of that reaches the file;
//! * `guest_data`: the guest's bytes, where they lie;
//! * `dirty_bitmaps`: which bytes were written since when;
//! * `reader`, `writer`: requests; `grow`: a disk that becomes longer.
//!
//! What does not change is in the `context`, which all of them have. The order of their locks is in `locks`.
//!
//! The L1 table and the refcount table are in memory as a whole; of the L2 tables and the refcount blocks a bounded
//! number of slices of at most 4 KiB. What is in memory is the truth: a request changes it there, and the flusher
//! brings it to the file.
//!
//! # Requests
//!
//! A **read** looks up its clusters, and reads everything at once. A **write** to clusters that the image has
//! exclusively is one write to the storage, and takes no lock that threads of other stripes take ([`Striped`]). A
//! request that changes where bytes are claims the clusters (or subclusters) first: a *job*, one for any cluster at a
//! time. Requests to different parts of the disk take different locks.
//!
//! * A write that needs a new cluster is a job: it takes clusters, reads what has to be around the guest's bytes,
//!   writes all of it with one vectored write, and then notes in the L2 table where it lies. A write to the same
//!   clusters that comes while the job is still reading gives it its bytes; if nothing has to be around them it writes
//!   to the same new cluster itself, at once; otherwise it waits and then writes in place. Where much would be copied
//!   and the filesystem can share it, the job clones it and writes the guest's bytes over it.
//! * Zeroing and discarding whole clusters is a job that changes entries only.
//! * A write of compressed clusters is a job that replaces whole clusters, and needs no former contents. Several
//!   compressed clusters share a host cluster, which is counted once for each (the module `allocator::bytes`).
//!
//! Where requests overlap, each byte is of one or the other: a write in place that was looked up before a discard
//! counts as one that came before it. A cluster that nothing refers to any more is therefore not reused before all
//! requests that may have looked it up are done (the module `epoch`), and not before the file has no reference to it,
//! durably. A cluster that is zeroed and stays may be written again at once: a read that was in flight meanwhile reads
//! again. The cluster of a failed job counts as dropped, too, if other requests wrote to it.
//!
//! A request that waits for a job, a slice or a flush drives it: there is no thread behind an image, and a request that
//! is dropped or not polled stops nothing but a close, which waits for requests that are no longer polled until they
//! are dropped. A job that is dropped is completed by the next request, before anything else, so that it either took
//! effect or never existed. A write in place that is dropped continues by itself, and counts as using its cluster until
//! a flush finds it over.
//!
//! # Protection of tables
//!
//! A hostile image may lie about the places of its contents, free clusters and tables. Every cluster is compared with
//! the tables before it is written, handed out or given back (the module `overlap_check`), and tables that overlap each
//! other are found when the image is opened to be written. If there is an overlap, the image is marked as corrupt, and
//! nothing more is written or given back.
//!
//! # Crash consistency
//!
//! At any instant, in the file: every refcount is at least the number of references, except under the dirty bit; every
//! reference leads to something that was written before. So:
//!
//! 1. contents are written when requests are carried out, refcounts taken in memory before that, entries of L2 tables
//!    in memory after it;
//! 2. a flush captures what is dirty, writes refcounts and new L2 tables, flushes; writes L2 slices and L1 blocks,
//!    flushes; and only then lowers, in memory, the refcounts of what was dropped.
//!
//! A crash before the second flush leaves clusters with a refcount and no reference: leaks. One within a write of a
//! slice leaves of each entry the old or the new one, and both are valid. Reading old contents of a reused cluster is
//! excluded, since its entry is written after a flush that follows its contents.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Weak};

use futures_util::FutureExt;
use limosa_storage::{IoVector, Storage, Striped, StripedArc};

use super::allocator::Allocator;
use super::cancelled_writes::CancelledWrites;
use super::compressed_writes::{CompressedWrites, compressor};
use super::context::Context;
use super::counters::Counts;
use super::dirty_bitmaps::DirtyBitmaps;
use super::flusher::{Flusher, FlusherParts};
use super::grow::Grower;
use super::guest_data::GuestData;
use super::header_owner::HeaderOwner;
use super::journal::Journal;
use super::l1::L1;
use super::lengths::Lengths;
use super::locks::{Rank, RankedMutex};
use super::options::Qcow2Options;
use super::overlap_check::OverlapCheck;
use super::owners::Owners;
use super::preallocated::Preallocated;
use super::reader::Reader;
use super::refcounts::Refcounts;
use super::seams;
use super::shared_future::SharedFuture;
use super::tables::{MakeRoom, Tables};
use super::writer::{Writer, Zeroing};
use crate::bitmap::{BitmapAction, BitmapBits, DirtyBitmap};
use crate::compression::{CompressedClusters, Compressor};
use crate::disk::{Disk, MapEntry, Pending};
use crate::error::ImageError;
use crate::luks::SectorCipher;
use crate::offset::{GuestOffset, HostOffset};
use crate::qcow2::format::header::{AES_IS_READ_ONLY, Encryption, Header};
use crate::qcow2::format::snapshot_table;
use crate::qcow2::offline::check::{CheckOptions, CheckReport, Repair, repair_with};
use crate::qcow2::offline::replay::replay;
use crate::requests::{Inside, Requests};
use crate::setters::setters;

/// The parts of an image.
#[derive(Debug)]
#[non_exhaustive]
pub struct ImageParts {
    /// The image's file.
    pub file: Arc<dyn Storage>,
    /// Its external data file, if it has one.
    pub data_file: Option<Arc<dyn Storage>>,
    /// The backing image. `None`: zeros, even if the header names one.
    pub backing: Option<Arc<dyn Disk>>,
    /// Its header, as it was read.
    pub header: Header,
    /// Its journal, if acknowledged writes are to survive that the process is killed, and clients continue with the
    /// next one. Of version 3; an image that is only read has none.
    pub journal: Option<Journal>,
    /// The cipher of its contents, if they are encrypted: [`cipher`](crate::qcow2::cipher()).
    pub cipher: Option<Arc<SectorCipher>>,
}

impl ImageParts {
    /// An image without an external data file and a backing image.
    #[must_use]
    pub fn new(file: Arc<dyn Storage>, header: Header) -> Self {
        Self { file, data_file: None, backing: None, header, journal: None, cipher: None }
    }
}

setters!(ImageParts {
    data_file: Option<Arc<dyn Storage>>,
    backing: Option<Arc<dyn Disk>>,
    journal: Option<Journal>,
    cipher: Option<Arc<SectorCipher>>,
});

/// A qcow2 image in use: a [`Disk`].
///
/// Any number of requests may be in flight, from any number of threads; there is no thread behind it, the requests that
/// wait drive the work. What was flushed survives a kill or a power cut, and at any moment the file is a valid image,
/// apart from leaked clusters. Contents that would be written over the image's own tables mark it as corrupt, and
/// nothing more is written.
pub struct Qcow2 {
    inner: Striped<StripedArc<Inner>>,
    repaired: Option<CheckReport>,
    replayed: usize,
}

/// The owners of an open image.
struct Inner {
    context: Arc<Context>,
    header: Arc<HeaderOwner>,
    allocator: Arc<Allocator>,
    tables: Arc<Tables>,
    flusher: Arc<Flusher>,
    reader: Reader,
    writer: Striped<Arc<Writer>>,
    /// Compresses what is written, if that was asked for.
    compressed_writes: Option<CompressedWrites>,
    grower: Arc<Grower>,
    bitmaps: Arc<DirtyBitmaps>,
    requests: Requests,
    /// Its end, once that was begun.
    closing: RankedMutex<Option<SharedFuture>>,
}

impl Qcow2 {
    /// Opens an image. If it is opened to be written, and its lazy refcounts were not written because it was not
    /// closed, it is repaired first: [`Qcow2::repair_report`]. Before that it gets the changes of its journal:
    /// [`Qcow2::replayed`]. The caller makes sure that an image opened to be written
    /// is not open elsewhere.
    ///
    /// # Errors
    /// [`ImageError::Corrupt`]: the L1 table does not fit the disk; [`ImageError::NeedsRepair`]: it is opened to be
    /// written, and is marked as corrupt or needs more repair than of refcounts; [`ImageError::Unsupported`]: a data
    /// file is needed and not there; [`ImageError::Journal`]; errors of the storage.
    pub async fn open(parts: ImageParts, options: Qcow2Options) -> Result<Arc<Self>, ImageError> {
        let ImageParts { file, data_file, backing, mut header, journal, cipher } = parts;
        let name = Arc::clone(file.name());
        let geometry = header.geometry();
        let read_only = options.read_only || file.is_read_only();
        let unsupported = |what: &str| ImageError::Unsupported { image: Arc::clone(&name), what: what.to_owned() };
        let damaged = |why: &str| {
            let what = format!("{why}: it has to be repaired before it is written; it can be read as it is");
            ImageError::NeedsRepair { image: Arc::clone(&name), what }
        };
        if header.features.data_file() != data_file.is_some() {
            return Err(unsupported("it has to be opened with its data file, or has none and was given one"));
        }
        if (header.encryption != Encryption::None) != cipher.is_some() {
            return Err(unsupported("it has to be opened with the cipher of its contents, or they are not encrypted"));
        }
        if header.encryption == Encryption::Aes && !read_only {
            return Err(unsupported(AES_IS_READ_ONLY));
        }
        let (l1_at, entries) = (header.l1.0, u64::from(header.l1.1));
        if entries < geometry.l1_entries(header.size) {
            let why = format!("its {entries} entries are too few for a disk of {} bytes", header.size);
            return Err(ImageError::Corrupt { image: name, table: format!("L1 table at {l1_at}"), why });
        }
        if !read_only && header.features.corrupt() {
            return Err(damaged("it is marked as corrupt"));
        }
        let journal = journal.filter(|_| !read_only && header.version > 2);
        let replayed = match &journal {
            Some(journal) if !journal.found().is_empty() => {
                replay(journal, &*file, data_file.as_deref(), &header).await?;
                // Before the repair clears the dirty bit, which says that they belong together.
                journal.replayed()?;
                journal.found().len()
            }
            _ => 0,
        };
        let mut repaired = None;
        if !read_only && header.features.dirty() {
            let report = repair_with(&*file, cipher.as_deref(), Repair::Refcounts, CheckOptions::default()).await?;
            header = Header::read(&*file).await?;
            if header.features.dirty() {
                return Err(damaged("it was not closed, and more is wrong than refcounts that were written late"));
            }
            let (corruptions, leaks) = (report.corruptions_fixed, report.leaks_fixed);
            tracing::info!(image = &*name, corruptions, leaks, "it was not closed: its refcounts were rebuilt");
            repaired = Some(report);
        }
        let inner = Inner::new(ImageParts { file, data_file, backing, header, journal, cipher }, options).await?;
        Ok(Arc::new(Self { inner: StripedArc::striped(inner), repaired, replayed }))
    }

    /// Returns the storage operations since the image was opened.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.inner().context.counters().counts()
    }

    /// Returns what was repaired when the image was opened; `None`: it had been closed, or is only read. The refcounts
    /// of an image with lazy refcounts that was not closed are wrong: nothing is written before they are rebuilt, as
    /// [`Repair::Refcounts`] does.
    #[must_use]
    pub const fn repair_report(&self) -> Option<&CheckReport> {
        self.repaired.as_ref()
    }

    /// Returns how many changes were brought to the image from its journal when it was opened: a process that had it
    /// open was killed.
    #[must_use]
    pub const fn replayed(&self) -> usize {
        self.replayed
    }

    /// Returns the current header.
    #[must_use]
    pub fn header(&self) -> Header {
        self.inner().header.now()
    }

    /// Zeroes the rest of the last cluster up to `size`, so that it reads as zeros when the disk grows.
    pub(in crate::qcow2) async fn zero_tail(&self, size: u64) -> Result<(), ImageError> {
        self.inner().allocator.begin_writing().await?;
        self.inner().grower.zero_tail(self.inner().header.size(), size).await
    }

    fn inner(&self) -> &StripedArc<Inner> {
        self.inner.own()
    }
}

impl Inner {
    async fn new(parts: ImageParts, options: Qcow2Options) -> Result<Self, ImageError> {
        let ImageParts { file, data_file, backing, header, journal, cipher } = parts;
        let lengths = Arc::new(Lengths::new(&*file, data_file.as_deref())?);
        let recorder = journal.map(Journal::begin).transpose()?;
        let compress = options.compress;
        let context = Arc::new(Context::new(file, data_file, backing, recorder, (&header, cipher, options)));
        let compressed_writes =
            compress.filter(|_| !context.is_read_only()).and_then(|compress| CompressedWrites::new(&context, compress));
        let l1 = context.read_file(header.l1.0, u64::from(header.l1.1) * 8).await?;
        let l1 = L1::new(header.l1.0, &l1, *context.geometry());
        let (refcounts, metadata) = Self::metadata(&context, &header, &l1).await?;
        let owner = Arc::new(HeaderOwner::new(Arc::clone(&context), header));
        let allocator =
            Allocator::new(Arc::clone(&context), Arc::clone(&owner), refcounts, metadata, Arc::clone(&lengths));
        let (header, allocator, cancelled_writes) = (owner, Arc::new(allocator), CancelledWrites::new());
        let flusher = Arc::new_cyclic(|flusher: &Weak<Flusher>| {
            let room: Weak<dyn MakeRoom> = flusher.clone();
            let tables = Arc::new(Tables::new(Arc::clone(&context), Arc::clone(&allocator), l1, room));
            Flusher::new(FlusherParts {
                context: Arc::clone(&context),
                header: Arc::clone(&header),
                allocator: Arc::clone(&allocator),
                tables,
                cancelled_writes: Arc::clone(&cancelled_writes),
                lengths: Arc::clone(&lengths),
            })
        });
        let tables = Arc::clone(flusher.tables());
        let guest_data = Arc::new(GuestData::new(Arc::clone(&context), lengths));
        let reader = Reader::new(
            Arc::clone(&context),
            Arc::clone(&allocator),
            Arc::clone(&tables),
            Arc::clone(&guest_data),
            Preallocated::new(Arc::clone(&context), Arc::clone(&header)),
        );
        let owners = Owners {
            context: Arc::clone(&context),
            header: Arc::clone(&header),
            allocator: Arc::clone(&allocator),
            tables: Arc::clone(&tables),
            flusher: Arc::clone(&flusher),
            guest_data,
            cancelled_writes,
        };
        let writer = Writer::striped(&owners);
        let bitmaps = Arc::new(DirtyBitmaps::new(Arc::clone(&context), Arc::clone(&header), Arc::clone(&allocator)));
        let grower = Grower::new(&owners, Arc::clone(&bitmaps), Arc::clone(writer.own()));
        let (grower, requests, closing) = (Arc::new(grower), Requests::default(), Rank::Closing.mutex(None));
        let inner = Self {
            context,
            header,
            allocator,
            tables,
            flusher,
            reader,
            writer,
            compressed_writes,
            grower,
            bitmaps,
            requests,
            closing,
        };
        if !inner.context.is_read_only() {
            match inner.bitmaps.load().await {
                Ok(()) => {}
                // The first write says that nothing relies on them.
                Err(error @ ImageError::Corrupt { .. }) => tracing::warn!(%error, "its bitmaps are left alone"),
                Err(error) => return Err(error),
            }
        }
        Ok(inner)
    }

    /// Refcounts, and where the image's own tables lie. An image that is only read needs neither.
    async fn metadata(
        context: &Arc<Context>,
        header: &Header,
        l1: &L1,
    ) -> Result<(Refcounts, OverlapCheck), ImageError> {
        let at = header.refcount_table.0;
        if context.is_read_only() {
            return Ok((Refcounts::new(Arc::clone(context), at, &[]), OverlapCheck::default()));
        }
        let table = context.read_file(at, header.refcount_table_bytes()).await?;
        let refcounts = Refcounts::new(Arc::clone(context), at, &table);
        let (snapshots, end) = snapshot_table::read_to_end(&**context.file(), header).await?;
        let metadata = OverlapCheck::of(header, l1.tables(), refcounts.blocks(), &snapshots, HostOffset(end));
        Ok((refcounts, metadata))
    }

    /// Refuses what lies outside, and everything after the image was closed, which waits for what is held here.
    fn admit(&self, at: GuestOffset, wanted: u64) -> Result<Inside<'_>, ImageError> {
        let length = self.header.size();
        let Some(inside) = self.requests.enter() else { return Err(self.context.unsupported("it has been closed")) };
        match at.0.checked_add(wanted) {
            Some(end) if end <= length => Ok(inside),
            _ => Err(ImageError::PastEnd { image: Arc::clone(self.context.name()), length, at, wanted }),
        }
    }
}

impl Disk for Qcow2 {
    fn name(&self) -> &Arc<str> {
        self.inner().context.name()
    }

    fn format(&self) -> &'static str {
        "qcow2"
    }

    fn len(&self) -> u64 {
        self.inner().header.size()
    }

    fn is_read_only(&self) -> bool {
        self.inner().context.is_read_only()
    }

    fn allocation_unit(&self) -> u64 {
        self.inner().context.geometry().subcluster_size().max(512)
    }

    fn read(&self, at: GuestOffset, into: IoVector) -> Pending<'_> {
        Box::pin(async move {
            let _inside = self.inner().admit(at, into.len() as u64)?;
            self.inner().writer.own().finish_cancelled().await;
            self.inner().reader.read(at, into).await
        })
    }

    fn prefetch(&self, at: GuestOffset, length: u64) -> Pending<'_> {
        Box::pin(async move {
            let length = length.min(self.len().saturating_sub(at.0));
            let _inside = self.inner().admit(GuestOffset(at.0.min(self.len())), length)?;
            self.inner().reader.prefetch(at, length).await
        })
    }

    fn write(&self, at: GuestOffset, from: IoVector) -> Pending<'_> {
        let inner = self.inner().clone();
        Box::pin(self.inner().writer.own().finish_when_cancelled(async move {
            let length = from.len() as u64;
            let _inside = inner.admit(at, length)?;
            let _marking = inner.bitmaps.marking(at, length);
            match &inner.compressed_writes {
                Some(compressed) => compressed.write(&inner.context, inner.writer.own(), at, from).await,
                None => inner.writer.own().write(at, from).await,
            }
        }))
    }

    /// Refused besides: an image with an external data file, or with encrypted contents.
    fn compressor(&self, level: Option<u8>) -> Result<Compressor, ImageError> {
        compressor(&self.inner().context, level)
    }

    fn write_compressed(&self, at: GuestOffset, from: CompressedClusters) -> Pending<'_> {
        let inner = self.inner().clone();
        Box::pin(self.inner().writer.own().finish_when_cancelled(async move {
            let length = from.len();
            let _inside = inner.admit(at, length)?;
            let _marking = inner.bitmaps.marking(at, length);
            inner.writer.own().write_compressed(at, from).await
        }))
    }

    fn write_zeroes(&self, at: GuestOffset, length: u64, unmap: bool) -> Pending<'_> {
        let zeroing = if unmap { Zeroing::Unmap } else { Zeroing::Keep };
        let inner = self.inner().clone();
        Box::pin(self.inner().writer.own().finish_when_cancelled(async move {
            let _inside = inner.admit(at, length)?;
            let _marking = inner.bitmaps.marking(at, length);
            inner.writer.own().zero(at, length, zeroing).await
        }))
    }

    fn write_zeroes_fast(&self, at: GuestOffset, length: u64, unmap: bool) -> Pending<'_, bool> {
        Box::pin(async move {
            let inside = self.inner().admit(at, length)?;
            if !self.inner().zeroes_by_entries(at, length) {
                return Ok(false);
            }
            drop(inside);
            self.write_zeroes(at, length, unmap).await?;
            Ok(true)
        })
    }

    fn discard(&self, at: GuestOffset, length: u64) -> Pending<'_> {
        let inner = self.inner().clone();
        Box::pin(self.inner().writer.own().finish_when_cancelled(async move {
            let _inside = inner.admit(at, length)?;
            let _marking = inner.bitmaps.marking(at, length);
            inner.writer.own().zero(at, length, Zeroing::Discard).await
        }))
    }

    fn flush(&self) -> Pending<'_> {
        Box::pin(async move {
            let _inside = self.inner().admit(GuestOffset(0), 0)?;
            if self.inner().context.is_read_only() { Ok(()) } else { self.inner().flusher.flush().await }
        })
    }

    fn map(&self, at: GuestOffset, length: u64) -> Pending<'_, MapEntry> {
        let length = length.max(1);
        Box::pin(async move {
            let _inside = self.inner().admit(at, length)?;
            self.inner().writer.own().finish_cancelled().await;
            self.inner().reader.map(at, length).await
        })
    }

    fn storage(&self, depth: u32) -> Option<Arc<dyn Storage>> {
        match depth.checked_sub(1) {
            // What is encrypted is in no storage as it is read.
            None if self.inner().context.is_encrypted() => None,
            None => Some(Arc::clone(self.inner().context.data())),
            Some(depth) => self.inner().context.backing()?.storage(depth),
        }
    }

    /// As of all disks. Refused besides: larger than the image's clusters allow; version 2 with snapshots; a raw data
    /// file, which only [`resize`](crate::qcow2::resize()) changes. If it fails, the size is the old one.
    fn grow(&self, size: u64) -> Pending<'_> {
        let inner = self.inner().clone();
        Box::pin(self.inner().writer.own().finish_when_cancelled(async move {
            // Here, and not in what others may have to bring to its end.
            let _inside = inner.admit(GuestOffset(0), 0)?;
            inner.grower.grow(size).await
        }))
    }

    fn bitmaps(&self) -> Pending<'_, Vec<DirtyBitmap>> {
        Box::pin(async move {
            let _inside = self.inner().admit(GuestOffset(0), 0)?;
            if self.inner().context.is_read_only() && !self.inner().bitmaps.are_loaded() {
                self.inner().bitmaps.load().await?;
            }
            Ok(self.inner().bitmaps.all())
        })
    }

    fn dirty_run(&self, bitmap: &str, at: GuestOffset, length: u64) -> Result<(bool, u64), ImageError> {
        let _inside = self.inner().admit(at, length.max(1))?;
        self.inner().bitmaps.run(bitmap, at, length)
    }

    fn bitmap_bits(&self, bitmap: &str) -> Result<BitmapBits, ImageError> {
        let _inside = self.inner().admit(GuestOffset(0), 0)?;
        self.inner().bitmaps.bits(bitmap)
    }

    fn change_bitmaps(&self, changes: &[(String, BitmapAction)]) -> Pending<'_> {
        let (inner, changes) = (self.inner().clone(), changes.to_vec());
        Box::pin(async move {
            let _inside = inner.admit(GuestOffset(0), 0)?;
            inner.writer.own().finish_cancelled().await;
            inner.allocator.begin_writing().await?;
            // Lives as long as this request: its changes take effect before it is dropped, or never.
            let asked = Arc::new(());
            let (bitmaps, writer, asked_for) =
                (Arc::clone(&inner.bitmaps), Arc::clone(inner.writer.own()), Arc::downgrade(&asked));
            let work = async move {
                bitmaps.change(&changes, &asked_for).await?;
                // Requests that were dropped have set their bits, which may be gone now, and their bytes may change yet.
                for Range { start, end } in writer.may_still_change() {
                    drop(bitmaps.marking(start, end - start));
                }
                Ok(())
            };
            let work = inner.header.exclusively(work.boxed());
            let _unfinished = inner.writer.own().finish_if_cancelled(&work);
            work.await
        })
    }

    fn close(&self) -> Pending<'_> {
        Box::pin(Inner::close(self.inner()))
    }

    fn unlock(&self) {
        let context = &self.inner().context;
        context.file().unlock();
        context.data().unlock();
        if let Some(backing) = context.backing() {
            backing.unlock();
        }
    }
}

impl Inner {
    /// Whether zeroing a range changes entries alone: it is of whole clusters, and the image can say that they are
    /// zeros without the data file saying so, too.
    fn zeroes_by_entries(&self, at: GuestOffset, length: u64) -> bool {
        let cluster = self.context.geometry().cluster_size();
        let (end, size) = (at + length, self.header.size());
        let whole = at.0.is_multiple_of(cluster) && (end.0.is_multiple_of(cluster) || end.0 == size);
        let backed = self.context.backing().is_some();
        whole && (self.context.rules().version > 2 || !backed) && !self.context.has_raw_data_file()
    }

    /// Closes it once: a second close, or one after a close that was not waited for, ends as that one did.
    fn close(this: &StripedArc<Self>) -> SharedFuture {
        let inner = this.clone();
        let close = || async move { inner.close_now().await }.boxed().shared();
        this.closing.lock().get_or_insert_with(close).clone()
    }

    /// Waits for requests, ends what those that were dropped have begun, gives back what was taken ahead, and makes
    /// everything durable. Then the journal is not needed any more, and bitmaps are stored.
    async fn close_now(&self) -> Result<(), ImageError> {
        self.requests.close();
        self.requests.over().await;
        if self.context.is_read_only() {
            return Ok(());
        }
        self.make_durable().await?;
        self.context.journal().map_or(Ok(()), |journal| journal.end())?;
        if !self.header.has_begun() || self.header.is_marked_corrupt() {
            return Ok(());
        }
        let stored = self.bitmaps.store().await;
        let image = || Arc::clone(self.context.name());
        stored.map_err(|error| ImageError::BitmapsNotStored { image: image(), source: Box::new(error) })
    }

    async fn make_durable(&self) -> Result<(), ImageError> {
        // Work that is more than jobs, which may begin others: a growth.
        self.writer.own().finish_cancelled().await;
        self.writer.own().wait_for_jobs().await;
        self.writer.own().check_idle()?;
        if !self.header.has_begun() {
            return self.context.flush_all().await;
        }
        self.flusher.flush().await?;
        seams::nothing_dirty(self.tables.differ() || self.allocator.has_drops())?;
        self.allocator.give_all_back().await
    }
}

impl Drop for Qcow2 {
    fn drop(&mut self) {
        // What is under way holds its owners, and its owners hold it.
        let Inner { header, tables, flusher, writer, grower, closing, .. } = &**self.inner();
        tables.clear();
        flusher.clear();
        writer.own().clear();
        header.clear();
        grower.clear();
        drop(closing.take());
    }
}

impl fmt::Debug for Qcow2 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qcow2")
            .field("name", self.inner().context.name())
            .field("geometry", self.inner().context.geometry())
            .finish_non_exhaustive()
    }
}
