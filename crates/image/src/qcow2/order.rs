//! What is written in which order.
//!
//! Law: at any instant the file's refcounts are at least the number of references in it, and every reference leads to what was
//! written before. A settling therefore has two halves with a flush behind each:
//!
//! 1. refcounts, and L2 tables that nothing refers to yet: behind the flush they are there, and so are the contents of all
//!    clusters whose entries were captured;
//! 2. slices of L2 tables, blocks of the L1 table: behind the flush nothing refers to what was dropped any more, and its refcounts
//!    are lowered, in memory.
//!
//! With refcounts that are written late the first half leaves them out, and the dirty bit says so. Everything that differs is
//! captured at once, at the beginning; what is changed meanwhile waits for the next settling. Settlings are one at a time, and all
//! who ask while one is under way get the next one together.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Poll;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join, join_all};
use limosa_storage::{Buffer, IoVector};

use super::counters::Purpose;
use super::image::Inner;
use super::layers::push_zeros;
use super::slices::{Captured, Flight};
use crate::error::ImageError;

/// One settling may be under way, and one wait for it.
#[derive(Default)]
pub(super) struct Settling {
    running: Option<Flight>,
    next: Option<Flight>,
}

impl Inner {
    /// Makes durable whatever was acknowledged before.
    pub(super) fn settle(self: &Arc<Self>) -> Flight {
        let mut settling = self.settling.lock();
        if let Some(next) = &settling.next {
            return next.clone();
        }
        let before = settling.running.clone();
        let inner = Arc::clone(self);
        let flight: Flight = {
            let before = before.clone();
            async move {
                if let Some(before) = before {
                    // Its failure is told to those who wait for it, and what it did not write is captured again.
                    let _ = before.await;
                }
                let settled = inner.settle_now().await;
                inner.settled();
                settled
            }
            .boxed()
            .shared()
        };
        if before.is_some() {
            settling.next = Some(flight.clone());
        } else {
            settling.running = Some(flight.clone());
        }
        flight
    }

    /// Does something while no flush is under way; those that are asked for meanwhile come after it.
    pub(super) async fn instead_of_settling(
        self: &Arc<Self>,
        work: BoxFuture<'static, Result<(), ImageError>>,
    ) -> Result<(), ImageError> {
        let inner = Arc::clone(self);
        let flight: Flight = async move {
            let done = work.await;
            inner.settled();
            done
        }
        .boxed()
        .shared();
        while let Some(running) = self.runs_now(&flight) {
            // What it fails with is told to those who asked for it.
            let _ = running.await;
        }
        flight.await
    }

    /// Has this be the one that is under way, unless there is one.
    fn runs_now(&self, flight: &Flight) -> Option<Flight> {
        let mut settling = self.settling.lock();
        if settling.running.is_none() {
            settling.running = Some(flight.clone());
            return None;
        }
        settling.running.clone()
    }

    /// The next one's turn.
    fn settled(&self) {
        let mut settling = self.settling.lock();
        let done = settling.running.take();
        settling.running = settling.next.take();
        drop(settling);
        drop(done);
    }

    pub(super) fn drop_settling(&self) {
        let settling = self.settling.take();
        drop(settling);
    }

    pub(super) async fn settle_now(self: &Arc<Self>) -> Result<(), ImageError> {
        self.poll_orphans().await;
        // Drops first: their entries were changed before, and are captured after.
        let drops = self.drops.take();
        let l1 = self.l1.capture();
        let slices = self.l2.capture();
        // After the slices: a table of which one was captured has to be among them, or it would be written as zeros the next time.
        let fresh: Vec<u64> = self.fresh.lock().iter().copied().collect();
        let result = self.write_out(&l1, &fresh, &slices).await;
        self.l2.written(slices.iter().map(|slice| slice.at), result.is_ok());
        if let Err(error) = result {
            self.l1.not_written(l1.iter().map(|(block, ..)| *block));
            self.drops.lock().extend(drops);
            return Err(error);
        }
        let free = self.epochs.pass(drops);
        if free.is_empty() {
            return Ok(());
        }
        let inner = Arc::clone(self);
        let lowered = async move {
            for dropped in free {
                inner.give_up(dropped).await?;
            }
            Ok(())
        };
        self.exclusively(lowered.boxed()).await
    }

    /// Refcounts that differ, unless they are written late.
    pub(super) async fn refcounts_out(self: &Arc<Self>) -> Result<(), ImageError> {
        let inner = Arc::clone(self);
        self.exclusively(async move { inner.write_refcounts().await }.boxed()).await
    }

    async fn write_out(
        self: &Arc<Self>,
        l1: &[(u64, u64, Vec<u8>)],
        fresh: &[u64],
        slices: &[Captured],
    ) -> Result<(), ImageError> {
        if let Err([table, why]) = self.length_now()? {
            return Err(self.broken(table, why).await);
        }
        if !self.lazy && self.refcounts_differ() {
            self.refcounts_out().await?;
        }
        let cluster = self.geometry.cluster_size();
        let mut tables: BTreeMap<u64, Vec<&Captured>> = fresh.iter().map(|at| (*at, Vec::new())).collect();
        let mut linked: Vec<&Captured> = Vec::new();
        for slice in slices {
            match tables.get_mut(&(slice.at & !(cluster - 1))) {
                Some(table) => table.push(slice),
                None => linked.push(slice),
            }
        }
        let writes: Vec<(u64, IoVector)> =
            tables.iter().map(|(at, slices)| (*at, self.whole_table(*at, slices))).collect();
        self.write_all(Purpose::L2Write, writes).await?;
        self.flush_all().await?;
        for table in fresh {
            self.fresh.lock().remove(table);
        }
        if linked.is_empty() && l1.is_empty() {
            return Ok(());
        }
        let writes = (
            self.write_all(Purpose::L2Write, neighbours(&linked)),
            self.write_all(
                Purpose::L1Write,
                l1.iter().map(|(_, at, bytes)| (*at, Buffer::copied(bytes).into())).collect(),
            ),
        );
        let (l2, l1) = join(writes.0, writes.1).await;
        l2.and(l1)?;
        self.flush_file().await
    }

    /// A new table: the slices that were captured, and zeros.
    fn whole_table(&self, at: u64, slices: &[&Captured]) -> IoVector {
        let mut run = IoVector::new();
        for slice in slices {
            let before = slice.at - at - run.len() as u64;
            push_zeros(&mut run, before, &self.zeros);
            run.push(Buffer::copied(&slice.bytes));
        }
        let rest = self.geometry.cluster_size() - run.len() as u64;
        push_zeros(&mut run, rest, &self.zeros);
        run
    }

    async fn write_all(&self, purpose: Purpose, writes: Vec<(u64, IoVector)>) -> Result<(), ImageError> {
        let writes = writes.into_iter().map(|(at, bytes)| {
            self.counters.add(purpose, bytes.len() as u64);
            self.file.write(at, bytes)
        });
        Ok(join_all(writes).await.into_iter().collect::<Result<(), _>>()?)
    }

    /// Makes both files durable.
    pub(super) async fn flush_all(&self) -> Result<(), ImageError> {
        if !self.has_data_file {
            return self.flush_file().await;
        }
        self.counters.add(Purpose::Flush, 0);
        let (data, file) = join(self.data.flush(), self.flush_file()).await;
        data?;
        file
    }

    /// Goes on with what was dropped while it was under way, as far as that is possible without waiting.
    async fn poll_orphans(&self) {
        let mut orphans = self.orphans.take();
        std::future::poll_fn(|context| {
            orphans.retain_mut(|orphan| orphan.poll_unpin(context).is_pending());
            Poll::Ready(())
        })
        .await;
        self.orphans.lock().append(&mut orphans);
    }
}

/// Slices that lie next to each other are one write.
fn neighbours(slices: &[&Captured]) -> Vec<(u64, IoVector)> {
    let mut writes: Vec<(u64, IoVector)> = Vec::new();
    for slice in slices {
        match writes.last_mut() {
            Some((at, bytes)) if *at + bytes.len() as u64 == slice.at => bytes.push(Buffer::copied(&slice.bytes)),
            _ => writes.push((slice.at, Buffer::copied(&slice.bytes).into())),
        }
    }
    writes
}
