//! The header of an image in use, and everything that is done one after the other: changes of refcounts and of the
//! header.
//!
//! Law: what the header says in memory it says in the file, durably. After a change that failed the file may say
//! either. If the two lead to different tables, memory says what was before, and the next flush has the file say so,
//! too, before anything else. An image that was found to be corrupt is marked as such, durably, and nothing more is
//! written for the guest, or given back; what was acknowledged before is still flushed, whether the mark can be written
//! or not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::context::Context;
use super::counters::OperationKind;
use super::lengths::CutOff;
use super::locks::{Rank, RankedMutex};
use super::overlap_check::Overlap;
use super::seams;
use super::shared_future::{Serial, SharedFuture};
use crate::error::ImageError;
use crate::offset::HostOffset;
use crate::qcow2::format::header::Header;

/// The consequences of a corrupt image.
pub(super) const REPAIR: &str = "nothing more is written before the image is repaired";

pub(super) struct HeaderOwner {
    context: Arc<Context>,
    header: RankedMutex<Header>,
    /// Bytes of the disk.
    size: AtomicU64,
    serial: Serial,
    begun: AtomicBool,
    marked_corrupt: AtomicBool,
    /// A change failed: the file's header may lead to other tables than that in memory, or say another size.
    uncertain: AtomicBool,
    /// The mark of corruption could not be written.
    unmarked: AtomicBool,
}

impl HeaderOwner {
    pub(super) fn new(context: Arc<Context>, header: Header) -> Self {
        Self {
            context,
            size: AtomicU64::new(header.size),
            header: Rank::Header.mutex(header),
            serial: Serial::new(Rank::Serial),
            begun: AtomicBool::new(false),
            marked_corrupt: AtomicBool::new(false),
            uncertain: AtomicBool::new(false),
            unmarked: AtomicBool::new(false),
        }
    }

    /// As it is now.
    pub(super) fn now(&self) -> Header {
        self.header.lock().clone()
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Whether anything was written for the guest.
    pub(super) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire)
    }

    pub(super) fn is_marked_corrupt(&self) -> bool {
        self.marked_corrupt.load(Ordering::Acquire)
    }

    /// Does something to refcounts or the header after everything else that was begun before; one at a time. A request
    /// that waits for it drives what comes before it, too. Nothing within may wait for it again.
    pub(super) fn exclusively(&self, work: BoxFuture<'static, Result<(), ImageError>>) -> SharedFuture {
        self.serial.run(work)
    }

    /// Cancels all changes in flight.
    pub(super) fn clear(&self) {
        self.serial.clear();
    }

    /// Changes fields of the header, durably; if that fails, memory says what was before. Only within
    /// [`HeaderOwner::exclusively`].
    pub(super) async fn change(&self, change: impl FnOnce(&mut Header)) -> Result<(), ImageError> {
        let mut header = self.now();
        let leads = |header: &Header| (header.l1, header.refcount_table, header.size);
        let before = leads(&header);
        change(&mut header);
        self.context.counters().add(OperationKind::HeaderWrite, header.encode_fields()?.len() as u64);
        if leads(&header) != before {
            self.uncertain.store(true, Ordering::Release);
        }
        header.write_fields(&**self.context.file()).await?;
        self.context.flush_file().await?;
        *self.header.lock() = header;
        self.uncertain.store(false, Ordering::Release);
        Ok(())
    }

    /// Has the file say what memory says, durably: others have changed its header, or may have. Only within
    /// [`HeaderOwner::exclusively`].
    pub(super) async fn say_again(&self) -> Result<(), ImageError> {
        self.uncertain.store(true, Ordering::Release);
        self.change(|_| {}).await
    }

    /// Writes the header again if an earlier write of it failed: the tables that the flush writes next are where the
    /// header in memory says.
    pub(super) async fn ascertain(self: &Arc<Self>) -> Result<(), ImageError> {
        let (uncertain, unmarked) = (self.uncertain.load(Ordering::Acquire), self.unmarked.load(Ordering::Acquire));
        if !uncertain && !unmarked {
            return Ok(());
        }
        let owner = Arc::clone(self);
        let work = async move {
            owner.change(|_| {}).await?;
            owner.unmarked.store(false, Ordering::Release);
            Ok(())
        };
        let written = self.exclusively(work.boxed()).await;
        if uncertain { written } else { Ok(()) }
    }

    /// The file's header was changed by others to lead to this refcount table. Only within
    /// [`HeaderOwner::exclusively`].
    pub(super) fn has_refcount_table(&self, table: (HostOffset, u32)) {
        self.header.lock().refcount_table = table;
    }

    /// Makes the disk so long, durably. Only within [`HeaderOwner::exclusively`].
    pub(super) async fn set_size(&self, size: u64) -> Result<(), ImageError> {
        seams::disk_grows(self.size(), size)?;
        self.change(|header| header.size = size).await?;
        self.size.store(size, Ordering::Release);
        Ok(())
    }

    /// Before refcounts are changed: if they are written late, the image says so. Only within
    /// [`HeaderOwner::exclusively`].
    pub(super) async fn ready_for_refcounts(&self) -> Result<(), ImageError> {
        if self.context.is_lazy() && !self.is_dirty() {
            self.change(|header| header.features.set_dirty(true)).await?;
        }
        Ok(())
    }

    /// The refcounts in the file are right. Only within [`HeaderOwner::exclusively`].
    pub(super) async fn refcounts_are_right(&self) -> Result<(), ImageError> {
        if self.is_dirty() { self.change(|header| header.features.set_dirty(false)).await } else { Ok(()) }
    }

    fn is_dirty(&self) -> bool {
        self.header.lock().features.dirty()
    }

    /// Before a write: an image that must not be written is refused, and before the first one features that others
    /// would have to keep up are taken back. `conflict`: tables that lie on each other.
    pub(super) async fn begin_writing(
        self: &Arc<Self>,
        conflict: Option<(Overlap, Overlap)>,
    ) -> Result<(), ImageError> {
        if self.is_marked_corrupt() {
            let (image, what) =
                (Arc::clone(self.context.name()), "it is corrupt: nothing is written before it is repaired");
            return Err(ImageError::NeedsRepair { image, what: what.to_owned() });
        }
        if self.has_begun() {
            return Ok(());
        }
        if self.context.is_read_only() {
            return Err(ImageError::ReadOnly { image: Arc::clone(self.context.name()) });
        }
        if let Some((one, other)) = conflict {
            let why = format!("the {other} lies there, too; {REPAIR}");
            return Err(self.broken(one.to_string(), why).await);
        }
        let owner = Arc::clone(self);
        let work = async move {
            let mut header = owner.now();
            header.prepare_autoclear(&**owner.context.file(), false).await?;
            *owner.header.lock() = header;
            if owner.context.journal().is_some() && !owner.is_dirty() {
                // Others that write the image clear it, and so say that the journal is of an image that was.
                owner.change(|header| header.features.set_dirty(true)).await?;
            }
            owner.begun.store(true, Ordering::Release);
            Ok(())
        };
        self.exclusively(work.boxed()).await
    }

    /// Marks the image as corrupt, durably, and says why. Nothing more is written.
    pub(super) async fn broken(self: &Arc<Self>, table: String, why: impl Into<String>) -> ImageError {
        let (owner, error) = (Arc::clone(self), self.context.corrupt(table, why));
        let marked = async move {
            owner.mark_corrupt().await;
            Ok(())
        };
        let _ = self.exclusively(marked.boxed()).await;
        error
    }

    /// Does so within [`HeaderOwner::exclusively`].
    pub(super) async fn broken_now(&self, table: String, why: impl Into<String>) -> ImageError {
        self.mark_corrupt().await;
        self.context.corrupt(table, why)
    }

    async fn mark_corrupt(&self) {
        let first = !self.marked_corrupt.swap(true, Ordering::AcqRel);
        let mark = (first || self.unmarked.load(Ordering::Acquire)) && self.context.rules().version > 2;
        if !mark {
            return;
        }
        // The corruption is reported all the same, and the next request tries again to mark the image.
        let failed = self.change(|header| header.features.set_corrupt(true)).await.is_err();
        if failed {
            self.header.lock().features.set_corrupt(true);
        }
        self.unmarked.store(failed, Ordering::Release);
    }
}

/// The table, and why: of a file that was cut off by others.
pub(super) fn cut_off(CutOff { length, before }: CutOff) -> [String; 2] {
    let why = format!("it was cut off there: it ended at {before:#x}; what lay behind is lost; {REPAIR}");
    [format!("file at {length:#x}"), why]
}
