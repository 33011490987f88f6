//! The order of writes.
//!
//! Law: at any instant the file's refcounts are at least the number of references in it, and every reference leads to
//! what was written before. A flush therefore has two halves, with a flush of the storage behind each:
//!
//! 1. refcounts, and L2 tables that nothing refers to yet: behind the flush they are there, and so are the contents of
//!    all clusters whose entries were captured;
//! 2. slices of L2 tables, blocks of the L1 table: behind the flush nothing refers to what was dropped any more, and
//!    its refcounts are lowered, in memory.
//!
//! With refcounts that are written late the first half leaves them out, and the dirty bit says so. Everything that
//! differs is captured at once, at the beginning; what is changed meanwhile waits for the next flush. Flushes are one
//! at a time, and all that are asked for while one is under way are one.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join};
use limosa_page::BrokenInvariant;
use limosa_storage::{Buffer, IoVector};

use super::allocator::Allocator;
use super::cancelled_writes::CancelledWrites;
use super::context::Context;
use super::counters::OperationKind;
use super::header_owner::{HeaderOwner, cut_off};
use super::layers::push_zeros;
use super::lengths::Lengths;
use super::locks::{Rank, RankedMutex};
use super::seams;
use super::shared_future::SharedFuture;
use super::slices::CapturedSlice;
use super::tables::{CapturedTables, MakeRoom, Tables};
use crate::error::ImageError;
use crate::offset::HostOffset;

pub(super) struct Flusher {
    context: Arc<Context>,
    header: Arc<HeaderOwner>,
    allocator: Arc<Allocator>,
    tables: Arc<Tables>,
    cancelled_writes: Arc<CancelledWrites>,
    lengths: Arc<Lengths>,
    turns: RankedMutex<Turns>,
}

/// The owners that a flusher works with.
pub(super) struct FlusherParts {
    pub(super) context: Arc<Context>,
    pub(super) header: Arc<HeaderOwner>,
    pub(super) allocator: Arc<Allocator>,
    pub(super) tables: Arc<Tables>,
    pub(super) cancelled_writes: Arc<CancelledWrites>,
    pub(super) lengths: Arc<Lengths>,
}

/// One flush may be under way, and one wait for it.
#[derive(Default)]
struct Turns {
    running: Option<SharedFuture>,
    next: Option<SharedFuture>,
}

impl Flusher {
    pub(super) fn new(parts: FlusherParts) -> Self {
        let FlusherParts { context, header, allocator, tables, cancelled_writes, lengths } = parts;
        let turns = Rank::Flushes.mutex(Turns::default());
        Self { context, header, allocator, tables, cancelled_writes, lengths, turns }
    }

    pub(super) const fn tables(&self) -> &Arc<Tables> {
        &self.tables
    }

    /// Makes durable all writes that were acknowledged before.
    pub(super) fn flush(self: &Arc<Self>) -> SharedFuture {
        let mut turns = self.turns.lock();
        if let Some(next) = &turns.next {
            return next.clone();
        }
        let before = turns.running.clone();
        let flusher = Arc::clone(self);
        let future: SharedFuture = {
            let before = before.clone();
            async move {
                if let Some(before) = before {
                    // Its failure goes to those that wait for it, and what it did not write is captured again.
                    let _ = before.await;
                }
                let flushed = flusher.flush_now().await;
                flusher.next_turn();
                flushed
            }
            .boxed()
            .shared()
        };
        if before.is_some() {
            turns.next = Some(future.clone());
        } else {
            turns.running = Some(future.clone());
        }
        future
    }

    /// Flushes if so much differs from the file that it is time to.
    pub(super) async fn flush_if_pressed(self: &Arc<Self>) -> Result<(), ImageError> {
        if self.tables.needs_flush() { self.flush().await } else { Ok(()) }
    }

    /// Flushes and then does something within [`HeaderOwner::exclusively`], while no other flush is under way; those
    /// that are asked for meanwhile come after it. Requests that wait for this as for a flush are told of the flush.
    pub(super) async fn flush_and(
        self: &Arc<Self>,
        work: BoxFuture<'static, Result<(), ImageError>>,
    ) -> Result<(), ImageError> {
        let done = Arc::new(std::sync::OnceLock::new());
        let (flusher, outcome) = (Arc::clone(self), Arc::clone(&done));
        let future: SharedFuture = async move {
            let flushed = flusher.flush_now().await;
            let _ = outcome.set(flusher.header.exclusively(work).await);
            flusher.next_turn();
            flushed
        }
        .boxed()
        .shared();
        while let Some(running) = self.runs_now(&future) {
            // Its failure goes to those that asked for it.
            let _ = running.await;
        }
        let flushed = future.await;
        done.get().cloned().unwrap_or(flushed)
    }

    /// Has this be the one that is under way, unless there is one.
    fn runs_now(&self, future: &SharedFuture) -> Option<SharedFuture> {
        let mut turns = self.turns.lock();
        if turns.running.is_none() {
            turns.running = Some(future.clone());
            return None;
        }
        turns.running.clone()
    }

    fn next_turn(&self) {
        let mut turns = self.turns.lock();
        let done = turns.running.take();
        turns.running = turns.next.take();
        drop(turns);
        drop(done);
    }

    /// Cancels all flushes in flight.
    pub(super) fn clear(&self) {
        drop(self.turns.take());
    }

    async fn flush_now(self: &Arc<Self>) -> Result<(), ImageError> {
        self.cancelled_writes.poll().await;
        // First of all: every change that is recorded in the half that this ends is captured after.
        self.context.journal().map_or(Ok(()), |journal| journal.flush_begins())?;
        // Then drops: their entries were changed before, and are captured after.
        let drops = self.allocator.take_drops();
        let captured = match self.tables.capture() {
            Ok(captured) => captured,
            Err(broken) => {
                self.allocator.drop_again(drops);
                return Err(broken.into());
            }
        };
        let result = self.write(&captured).await;
        self.tables.written(&captured, result.is_ok());
        if let Err(error) = result {
            self.allocator.drop_again(drops);
            return Err(error);
        }
        self.context.journal().map_or(Ok(()), |journal| journal.flushed())?;
        self.allocator.are_gone(drops).await
    }

    async fn write(&self, captured: &CapturedTables) -> Result<(), ImageError> {
        if let Err(fault) = self.lengths.now(&**self.context.file())? {
            let [table, why] = cut_off(fault);
            return Err(self.header.broken(table, why).await);
        }
        self.header.ascertain().await?;
        self.allocator.write_out().await?;
        let CapturedTables { l1, slices, new } = captured;
        self.allocator.check_counted(new)?;
        let cluster = self.context.geometry().cluster_size();
        let mut tables: BTreeMap<HostOffset, Vec<&CapturedSlice>> = new.iter().map(|at| (*at, Vec::new())).collect();
        let mut linked: Vec<&CapturedSlice> = Vec::new();
        for slice in slices {
            match tables.get_mut(&slice.at.align_down(cluster)) {
                Some(table) => table.push(slice),
                None => linked.push(slice),
            }
        }
        let whole = tables.iter().map(|(at, slices)| Ok((*at, self.whole_table(*at, slices)?)));
        let whole = whole.collect::<Result<_, BrokenInvariant>>()?;
        self.context.write_tables(OperationKind::L2Write, whole).await?;
        self.context.flush_all().await?;
        self.tables.are_there(new);
        if linked.is_empty() && l1.is_empty() {
            return Ok(());
        }
        let blocks = l1.iter().map(|block| (block.at, Buffer::from_slice(&block.bytes).into())).collect();
        let (l2, l1) = join(
            self.context.write_tables(OperationKind::L2Write, neighbours(&linked)),
            self.context.write_tables(OperationKind::L1Write, blocks),
        )
        .await;
        l2.and(l1)?;
        self.context.flush_file().await
    }

    /// A new table: the slices that were captured, and zeros.
    fn whole_table(&self, at: HostOffset, slices: &[&CapturedSlice]) -> Result<IoVector, BrokenInvariant> {
        let mut run = IoVector::new();
        for slice in slices {
            let before = slice.at - at - run.len() as u64;
            push_zeros(&mut run, before, self.context.zeros());
            run.push(Buffer::from_slice(&slice.bytes));
        }
        let rest = self.context.geometry().cluster_size() - run.len() as u64;
        push_zeros(&mut run, rest, self.context.zeros());
        seams::table_is_whole(run.len(), self.context.geometry().cluster_size())?;
        Ok(run)
    }
}

impl MakeRoom for Flusher {
    fn make_room(self: Arc<Self>) -> SharedFuture {
        self.flush()
    }
}

/// Slices that lie next to each other are one write.
fn neighbours(slices: &[&CapturedSlice]) -> Vec<(HostOffset, IoVector)> {
    let mut writes: Vec<(HostOffset, IoVector)> = Vec::new();
    for slice in slices {
        match writes.last_mut() {
            Some((at, bytes)) if *at + bytes.len() as u64 == slice.at => bytes.push(Buffer::from_slice(&slice.bytes)),
            _ => writes.push((slice.at, Buffer::from_slice(&slice.bytes).into())),
        }
    }
    writes
}
