//! L2 tables that may be written: new ones, and copies of those that a snapshot has, too.

use std::sync::Arc;

use futures_util::FutureExt;
use limosa_storage::Buffer;

use super::allocate::Run;
use super::counters::Purpose;
use super::entry::{L1Entry, L2Entry};
use super::image::{Dropped, Inner};
use super::overlap::Table;
use super::slices::Flight;
use crate::error::ImageError;
use crate::offset::HostOffset;

impl Inner {
    /// The L2 table of an L1 entry, which nobody else refers to; made if need be.
    pub(super) async fn table_for(self: &Arc<Self>, index: u64) -> Result<u64, ImageError> {
        loop {
            let entry = self.l1_entry(index)?;
            if let Some(table) = entry.table.filter(|_| entry.copied) {
                return Ok(table.0);
            }
            self.make_table(index).await?;
        }
    }

    fn make_table(self: &Arc<Self>, index: u64) -> Flight {
        let mut tables = self.tables.lock();
        if let Some(flight) = tables.get(&index) {
            return flight.clone();
        }
        let inner = Arc::clone(self);
        let flight: Flight = async move {
            let made = inner.make_table_now(index).await;
            let flight = inner.tables.lock().remove(&index);
            drop(flight);
            made
        }
        .boxed()
        .shared();
        tables.insert(index, flight.clone());
        flight
    }

    async fn make_table_now(self: &Arc<Self>, index: u64) -> Result<(), ImageError> {
        let entry = self.l1_entry(index)?;
        if entry.table.is_some() && entry.copied {
            return Ok(());
        }
        let runs = self.allocate(1).await?;
        let at = self.bytes_of(runs.first().map_or(0, |run| run.first), 1);
        let length = self.geometry.cluster_size();
        // The cluster may have been a table before, and somebody may have begun to read that.
        for flight in self.l2.loading_within(at.start, length) {
            let _ = flight.await;
        }
        self.l2.forget(at.start, length);
        if let Some(old) = entry.table {
            if let Err(error) = self.copy_table(old.0, at.start).await {
                self.put_back(runs);
                return Err(error);
            }
        } else {
            // What is there on disk means nothing: the first flush writes all of it.
            self.fresh.lock().insert(at.start);
        }
        self.metadata.add(at.start, Table::L2);
        self.l1.set(index, L1Entry { table: Some(HostOffset(at.start)), copied: true });
        // Only now: a flush that takes the drop takes the new entry, too.
        if let Some(old) = entry.table {
            self.drop_reference(old.0, length, true);
        }
        Ok(())
    }

    async fn copy_table(&self, from: u64, to: u64) -> Result<(), ImageError> {
        let length = self.geometry.cluster_size();
        self.admit_table("L2 table", from, &(from..from.saturating_add(length)))?;
        let buffer = Buffer::zeroed(usize::try_from(length).unwrap_or(0));
        self.counters.add(Purpose::L2Read, length);
        self.file.read(from, buffer.clone().into()).await?;
        self.counters.add(Purpose::L2Write, length);
        Ok(self.file.write(to, buffer.into()).await?)
    }

    /// Whether a table in the file means nothing yet: what is not in memory of it is zeros.
    pub(super) fn is_fresh(&self, table: u64) -> bool {
        self.fresh.lock().contains(&table)
    }

    /// The tables refer to these bytes, an L2 `table` or contents, once less. They are given back when the file says so, too.
    pub(super) fn drop_reference(&self, host: u64, length: u64, table: bool) {
        let first = host >> self.geometry.cluster_bits;
        let last = (host + length - 1) >> self.geometry.cluster_bits;
        self.drops.lock().push(Dropped { first, count: last - first + 1, table });
    }

    /// What former entries referred to is dropped; an error if that is where a table lies.
    pub(super) async fn drop_entries(self: &Arc<Self>, entries: Vec<L2Entry>) -> Result<(), ImageError> {
        let mut dropped = Ok(());
        for old in entries {
            let (host, length) = match old {
                L2Entry::Standard { host: Some(host), .. } => (host.0, self.geometry.cluster_size()),
                L2Entry::Compressed { host, length } => (host.0, u64::from(length)),
                L2Entry::Standard { host: None, .. } => continue,
            };
            match self.overlap(&(host..host.saturating_add(length))) {
                _ if self.has_data_file => {}
                None => self.drop_reference(host, length, false),
                Some(overlap) => dropped = dropped.and(Err(self.contents_on(overlap, host).await)),
            }
        }
        dropped
    }

    /// What `visit` makes of the entries of the clusters from that of `at` on, up to `end`, as many as one slice has: each is decoded when it
    /// is asked for. `Err` is the slice that has to be read.
    pub(super) fn visit_entries<R>(
        &self,
        at: u64,
        end: u64,
        visit: impl FnOnce(&mut dyn Iterator<Item = Result<L2Entry, ImageError>>) -> Result<R, ImageError>,
    ) -> Result<Result<R, u64>, ImageError> {
        let covers = self.geometry.l2_covers();
        let cluster = self.geometry.cluster_size();
        let table = self.l1_entry(at / covers)?.table;
        let mut spot = self.spot(at, table.map_or(0, |table| table.0));
        let width = self.words_of_entry();
        let in_slice = usize::try_from(self.l2.slice_size() / 8).unwrap_or(0).saturating_sub(spot.word) / width;
        let wanted = usize::try_from((end.div_ceil(cluster)).saturating_sub(at / cluster)).unwrap_or(usize::MAX);
        let count = in_slice.min(wanted);
        if table.is_none() {
            return visit(&mut std::iter::repeat_n(L2Entry::NONE, count).map(Ok)).map(Ok);
        }
        let key = spot.key;
        let visited = self.l2.get(key, |words| {
            let mut entries = (0..count).map(|_| {
                let entry = self.entry(words, spot);
                spot.word += width;
                spot.number += 1;
                entry
            });
            visit(&mut entries)
        });
        visited.map_or(Ok(Err(key)), |visited| visited.map(Ok))
    }

    /// Changes the entries of `count` clusters from that of `at` on, which one slice has: all of them, or, if it fails, none. The table
    /// is one that may be written.
    pub(super) async fn change_entries(
        self: &Arc<Self>,
        at: u64,
        count: usize,
        mut change: impl FnMut(usize, L2Entry) -> L2Entry + Send,
    ) -> Result<(), ImageError> {
        let table = self.table_for(at / self.geometry.l2_covers()).await?;
        let start = self.spot(at, table);
        let width = self.words_of_entry();
        loop {
            let changed = self.l2.change(start.key, |words| {
                let mut spot = start;
                for _ in 0..count {
                    self.entry(words, spot)?;
                    spot.word += width;
                    spot.number += 1;
                }
                spot = start;
                for index in 0..count {
                    let new = change(index, self.entry(words, spot)?);
                    let (entry, bitmap) = new.encode(&self.geometry);
                    let both = [entry, bitmap];
                    for (word, new) in words.iter_mut().skip(spot.word).zip(&both[..width]) {
                        *word = *new;
                    }
                    spot.word += width;
                    spot.number += 1;
                }
                Ok(())
            });
            match changed {
                Some(changed) => return changed,
                None => self.load(start.key).await?,
            }
        }
    }
}

/// Clusters as bytes of guest and host, for runs that follow each other.
pub(super) fn follow(runs: &[Run], start: u64, bits: u32) -> Vec<super::jobs::Place> {
    let mut guest = start;
    let place = |run: &Run| {
        let range = guest..guest + (run.count << bits);
        guest = range.end;
        super::jobs::Place { guest: range, host: run.first << bits, zeroed: run.zeroed }
    };
    runs.iter().map(place).collect()
}
