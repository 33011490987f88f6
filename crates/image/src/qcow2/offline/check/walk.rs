//! Going through all references of an image.
//!
//! Law: each table is read once a pass, however many snapshots or entries refer to it; what is found in it counts as
//! often as it is referred to. So the work is bounded by the file, not by what its tables claim.

use std::collections::BTreeMap;
use std::ops::Range;

use limosa_storage::Storage;

use super::counts::{Counts, Width};
use super::examine::{self, Bounds, Examined, Fault, Kind};
use super::report::CheckOptions;
use super::report::Findings;
use super::roots::{self, BitmapTable, L1Table, Snapshots};
use super::runs::{Run, runs};
use super::tables::{self, Reader};
use super::taken::Taken;
use crate::error::ImageError;
use crate::qcow2::format::entry::OFFSET;
use crate::qcow2::format::header::Header;

/// Bytes of memory for each L2 table that will be read, rounded up: its place, its uses, and the tree around them.
const TABLE_BYTES: usize = 64;

/// Bits of a sector.
const SECTOR_BITS: usize = 4096;

/// How often an L2 table is referred to.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Uses {
    pub(super) active: u64,
    pub(super) all: u64,
}

/// An entry of a table, with the number of references to the table.
struct Entry<'a> {
    examined: &'a Examined,
    times: u64,
    /// It is seen for the first time: what is wrong with it is noted.
    first: bool,
}

/// References to bytes of the file.
struct Reference {
    at: u64,
    bytes: u64,
    times: u64,
    first: bool,
}

/// An image whose references are followed.
#[derive(Debug)]
pub(super) struct Image<'a> {
    pub(super) storage: &'a dyn Storage,
    pub(super) header: &'a Header,
    pub(super) bounds: Bounds,
    /// The active one first.
    pub(super) l1: Vec<L1Table>,
    /// The parts of the file that they cover, once, by their numbers in `l1`.
    pub(super) l1_runs: Vec<Run>,
    pub(super) snapshots: Snapshots,
    bitmaps: Vec<BitmapTable>,
    /// The parts of the file that their tables cover, once.
    bitmap_runs: Vec<Run>,
    /// Areas where no L2 table can be.
    pub(super) taken: Taken,
    /// The bitmap directory is unreadable: its references are unknown.
    pub(super) bitmaps_fault: Option<String>,
    /// Clusters that the file has room for, the last one perhaps in part.
    pub(super) clusters: u64,
    /// L2 tables that are known at a time.
    tables: usize,
    /// Bytes of memory for what is known about the clusters that are counted at a time.
    memory: usize,
}

/// A run of bytes that the header refers to, at one remove.
#[derive(Debug, Clone)]
pub(super) struct Area {
    kind: AreaKind,
    name: String,
    pub(super) at: u64,
    pub(super) bytes: u64,
}

/// The repair of an area that cannot be used.
#[derive(Debug, Clone, Copy)]
enum AreaKind {
    /// Nothing.
    Fixed,
    /// Snapshots are given up.
    Snapshot,
    /// It is rebuilt.
    Refcounts,
    /// The bitmaps are given up.
    Bitmaps,
}

/// References that are counted besides those that a rebuild keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct What {
    /// The refcount table and its blocks.
    pub(super) refcounts: bool,
    /// The snapshot table.
    pub(super) snapshot_table: bool,
    /// The highest count, if not the largest refcount that the image can keep.
    pub(super) most: u64,
    /// How far counting gets.
    pub(super) width: Width,
}

impl What {
    pub(super) const ALL: Self = Self { refcounts: true, snapshot_table: true, most: 0, width: Width::Wide };
}

/// The result of a pass through the references.
#[derive(Debug)]
pub(super) struct Pass {
    pub(super) counts: Counts,
    /// The cluster behind the file's last one was referred to: it is only begun.
    pub(super) grown: bool,
    /// The refcount table or a block cannot be used as it is.
    pub(super) refcounts_unusable: bool,
    /// Entries of L1 and L2 tables are wrong, not only refcounts.
    pub(super) entries_wrong: bool,
    /// Something of the bitmaps is wrong.
    pub(super) bitmaps_wrong: bool,
    /// Something of the snapshot table's entries is wrong.
    pub(super) snapshots_wrong: bool,
    /// Something that can neither be used nor be given up lies behind the end of the file.
    pub(super) lost: bool,
    /// A cluster has more references than its refcount can say.
    pub(super) overflow: bool,
}

/// The L2 tables of an image, as many at a time as may be known.
pub(super) struct L2Batches<'a> {
    image: &'a Image<'a>,
    /// The last one that was returned.
    after: Option<u64>,
}

impl L2Batches<'_> {
    /// Returns the next ones, and how often they are referred to; `None`: there are no more.
    pub(super) async fn next(&mut self) -> Result<Option<BTreeMap<u64, Uses>>, ImageError> {
        let batch = self.image.l2_tables(self.after).await?;
        let Some(last) = batch.keys().next_back().copied() else { return Ok(None) };
        self.after = Some(last);
        Ok(Some(batch))
    }
}

impl<'a> Image<'a> {
    pub(super) async fn open(
        storage: &'a dyn Storage,
        header: &'a Header,
        options: CheckOptions,
    ) -> Result<Self, ImageError> {
        let file = storage.length()?;
        let geometry = header.geometry();
        let clusters = geometry.clusters(file);
        if i32::try_from(clusters).is_err() {
            let what = format!("it has {clusters} clusters, more than can be checked");
            return Err(ImageError::Unsupported { image: storage.name().clone(), what });
        }
        let bounds = Bounds { geometry, version: header.version, data_file: header.rules().data_file, file };
        let snapshots = roots::snapshots(storage, header).await?;
        let (bitmaps, bitmaps_fault) = match roots::bitmaps(storage, header).await? {
            Ok(bitmaps) => (bitmaps, None),
            Err(why) => (Vec::new(), Some(why)),
        };
        let mut l1 = vec![L1Table { at: header.l1.0.0, entries: header.l1.1, snapshot: None }];
        l1.extend(snapshots.entries.iter().map(|entry| entry.l1).filter(|l1| l1_fault(l1, &bounds).is_none()));
        let memory = options.memory / 4 * 3;
        let tables = (options.memory / 4 / TABLE_BYTES).max(256);
        let l1_runs = runs(l1.iter().map(|l1| (l1.at, l1.bytes())));
        let bitmap_runs = runs(bitmaps.iter().map(|table| (table.at, table.bytes())));
        let taken = Taken::default();
        let mut image = Self {
            storage,
            header,
            bounds,
            l1,
            l1_runs,
            snapshots,
            bitmaps,
            bitmap_runs,
            taken,
            bitmaps_fault,
            clusters,
            tables,
            memory,
        };
        image.taken = Taken::of(image.areas(What::ALL).iter().map(|area| (area.at, area.bytes)), &image.bounds);
        Ok(image)
    }

    /// The windows that are counted one after the other: all clusters, and the one behind them.
    pub(super) fn windows(&self) -> impl Iterator<Item = Range<u64>> + use<'_> {
        std::iter::successors(self.window(0, Width::Wide), |window| self.window(window.end, Width::Wide))
    }

    /// The window that begins with this cluster, of counts of such a width; `None` behind the last one.
    pub(super) fn window(&self, from: u64, width: Width) -> Option<Range<u64>> {
        // Whole sectors of refcounts, even of one bit, so that no two windows write into the same one.
        let clusters = (width.clusters(self.memory).max(SECTOR_BITS) & !(SECTOR_BITS - 1)) as u64;
        let end = self.clusters + 1;
        (from < end).then(|| from..end.min(from.saturating_add(clusters)))
    }

    /// The end of the clusters of a window that the file has; the last one may be incomplete.
    pub(super) fn end(&self, pass: &Pass, window: &Range<u64>) -> u64 {
        window.end.min(if pass.grown { self.clusters + 1 } else { self.clusters })
    }

    /// Counts the references to the clusters of a window. In the `first` one everything is noted that is wrong with
    /// entries.
    pub(super) async fn count(
        &self,
        window: &Range<u64>,
        what: What,
        first: bool,
        findings: &mut Findings,
    ) -> Result<Pass, ImageError> {
        let geometry = &self.bounds.geometry;
        let mut pass = Pass {
            counts: Counts::new(window, what.most.max(geometry.refcount_max()), geometry.cluster_bits, what.width),
            grown: false,
            refcounts_unusable: false,
            entries_wrong: false,
            bitmaps_wrong: false,
            snapshots_wrong: false,
            lost: false,
            overflow: false,
        };
        self.count_roots(what, first, &mut pass, findings);
        for run in &self.l1_runs {
            tables::entries(self.storage, run.at, run.bytes, self.bounds.file, |place, bits| {
                let examined = examine::l1(bits, &self.bounds);
                // What is written as an L2 table would be written over something else.
                let table = bits & OFFSET;
                let over = table != 0 && self.taken.contains(table >> geometry.cluster_bits);
                pass.entries_wrong |= over || examined.faults().next().is_some();
                self.take(Entry { examined: &examined, times: run.times, first }, &mut pass, findings, || {
                    self.l1_entry(run, place)
                });
                Ok::<(), ImageError>(())
            })
            .await?;
        }
        let mut batches = self.l2_batches();
        while let Some(batch) = batches.next().await? {
            self.count_l2(&batch, first, &mut pass, findings).await?;
        }
        for run in &self.bitmap_runs {
            tables::entries(self.storage, run.at, run.bytes, self.bounds.file, |place, bits| {
                let examined = examine::bitmap(bits, &self.bounds);
                pass.bitmaps_wrong |= examined.faults().next().is_some();
                self.take(Entry { examined: &examined, times: run.times, first }, &mut pass, findings, || {
                    let at = self.bitmaps.get(run.owner).map_or(0, |table| table.at);
                    format!("table of bitmap {} at {at:#x}, entry {}", run.owner, (place - at) / 8)
                });
                Ok::<(), ImageError>(())
            })
            .await?;
        }
        if what.refcounts {
            self.count_blocks(window, first, &mut pass, findings).await?;
        }
        Ok(pass)
    }

    /// The runs of bytes that the header refers to, at one remove.
    pub(super) fn areas(&self, what: What) -> Vec<Area> {
        let header = self.header;
        let area = |kind, name: String, at, bytes| Area { kind, name, at, bytes };
        let mut areas = vec![area(AreaKind::Fixed, "header at 0x0".into(), 0, self.bounds.geometry.cluster_size())];
        areas.extend(self.l1.iter().map(|l1| {
            let kind =
                if l1.snapshot.is_some() && l1.at >= self.bounds.file { AreaKind::Snapshot } else { AreaKind::Fixed };
            area(kind, l1.name(), l1.at, l1.bytes())
        }));
        if what.snapshot_table {
            let (at, bytes) = (header.snapshots.0.0, self.snapshots.bytes);
            areas.push(area(AreaKind::Snapshot, format!("snapshot table at {at:#x}"), at, bytes));
        }
        if what.refcounts {
            let (at, bytes) = (header.refcount_table.0.0, header.refcount_table_bytes());
            areas.push(area(AreaKind::Refcounts, format!("refcount table at {at:#x}"), at, bytes));
        }
        if let Some((at, bytes)) = header.extensions.encryption {
            areas.push(area(AreaKind::Fixed, format!("encryption header at {at}"), at.0, bytes));
        }
        if let Some(found) = header.bitmaps() {
            let (at, bytes) = (found.directory.0, found.size);
            areas.push(area(AreaKind::Bitmaps, format!("bitmap directory at {at:#x}"), at, bytes));
        }
        for (number, table) in self.bitmaps.iter().enumerate() {
            let name = format!("table of bitmap {number} at {:#x}", table.at);
            areas.push(area(AreaKind::Bitmaps, name, table.at, table.bytes()));
        }
        areas
    }

    /// Counts the references of the header's tables.
    fn count_roots(&self, what: What, first: bool, pass: &mut Pass, findings: &mut Findings) {
        let (mut areas, bits) = (self.areas(what), self.bounds.geometry.cluster_bits);
        areas.retain(|area| area.bytes != 0);
        let name = |area: &Area| area.name.clone();
        for area in areas.iter().filter(|area| self.bounds.outside(area.at, area.bytes)) {
            match area.kind {
                AreaKind::Fixed => pass.lost = true,
                AreaKind::Snapshot => pass.snapshots_wrong = true,
                AreaKind::Refcounts => pass.refcounts_unusable = true,
                AreaKind::Bitmaps => pass.bitmaps_wrong = true,
            }
            self.refer(Reference { at: area.at, bytes: area.bytes, times: 1, first }, pass, findings, || name(area));
        }
        areas.retain(|area| !self.bounds.outside(area.at, area.bytes));
        // However many of them lie over each other, each cluster is counted once, as often as they are.
        let clusters = |area: &Area| (area.at >> bits, ((area.at + area.bytes - 1) >> bits) + 1 - (area.at >> bits));
        for run in runs(areas.iter().map(clusters)) {
            let place = || areas.get(run.owner).map_or_else(String::new, name);
            self.add(
                &Reference { at: run.at << bits, bytes: run.bytes << bits, times: run.times, first },
                pass,
                findings,
                place,
            );
        }
        if !first {
            return;
        }
        for entry in &self.snapshots.entries {
            let table = || format!("snapshot table, entry at {:#x}", entry.at);
            pass.snapshots_wrong |= l1_gone(&entry.l1, &self.bounds);
            if let Some(fault) = l1_fault(&entry.l1, &self.bounds) {
                findings.corruption(1, || (table(), fault));
            }
            if self.header.version > 2 && entry.extra < roots::SNAPSHOT_EXTRA_LEAST {
                pass.snapshots_wrong = true;
                let (extra, least) = (entry.extra, roots::SNAPSHOT_EXTRA_LEAST);
                findings.corruption(1, || (table(), format!("{extra} bytes of extra data; version 3 has {least}")));
            }
            if entry.extra > roots::SNAPSHOT_EXTRA_MOST {
                pass.snapshots_wrong = true;
                let (extra, most) = (entry.extra, roots::SNAPSHOT_EXTRA_MOST);
                findings.corruption(1, || (table(), format!("{extra} bytes of extra data; {most} is the most")));
            }
        }
        if let Some(why) = &self.bitmaps_fault {
            pass.bitmaps_wrong = true;
            let at = self.header.bitmaps().map_or(0, |bitmaps| bitmaps.directory.0);
            findings.corruption(1, || (format!("bitmap directory at {at:#x}"), why.clone()));
        }
    }

    /// Describes the L1 entry at `place` for people.
    fn l1_entry(&self, run: &Run, place: u64) -> String {
        let Some(l1) = self.l1.get(run.owner) else { return String::new() };
        format!("{}, entry {}", l1.name(), (place - l1.at) / 8)
    }

    /// All L2 tables, in the order of the file.
    pub(super) const fn l2_batches(&self) -> L2Batches<'_> {
        L2Batches { image: self, after: None }
    }

    /// The L2 tables that lie behind `after` in the file, as many as may be known at a time, and how often they are
    /// referred to. Behind the file's end there are none.
    async fn l2_tables(&self, after: Option<u64>) -> Result<BTreeMap<u64, Uses>, ImageError> {
        let mut found = BTreeMap::<u64, Uses>::new();
        for run in &self.l1_runs {
            tables::entries(self.storage, run.at, run.bytes, self.bounds.file, |_, bits| {
                let at = bits & OFFSET;
                if at < self.bounds.file && after.is_none_or(|after| at > after) {
                    let uses = found.entry(at).or_default();
                    uses.all += run.times;
                    // The active table is the first one.
                    uses.active += u64::from(run.owner == 0);
                    if found.len() > self.tables {
                        found.pop_last();
                    }
                }
                Ok::<(), ImageError>(())
            })
            .await?;
        }
        Ok(found)
    }

    async fn count_l2(
        &self,
        batch: &BTreeMap<u64, Uses>,
        first: bool,
        pass: &mut Pass,
        findings: &mut Findings,
    ) -> Result<(), ImageError> {
        let geometry = &self.bounds.geometry;
        let batch: Vec<_> = batch.iter().collect();
        let mut reader = Reader::default();
        for group in batch.chunks(tables::together(geometry.cluster_size())) {
            let places: Vec<_> = group.iter().map(|(at, _)| **at).collect();
            reader.read(self.storage, &places, geometry.cluster_size()).await?;
            for (place, (at, uses)) in group.iter().enumerate() {
                let mut expected = None;
                for (number, bits, bitmap) in l2_entries(reader.table(place)?, geometry.extended_l2) {
                    let examined = examine::l2(bits, bitmap, &self.bounds);
                    pass.entries_wrong |= examined.faults().next().is_some();
                    let table = || format!("L2 table at {at:#x}, entry {number}");
                    self.take(Entry { examined: &examined, times: uses.all, first }, pass, findings, table);
                    if first && uses.active > 0 {
                        let fragmented = match examined.kind {
                            Kind::Nothing => continue,
                            Kind::Compressed if examined.refers.is_none() => continue,
                            Kind::Compressed => true,
                            Kind::Cluster(host) => {
                                let next = Some(host + geometry.cluster_size());
                                std::mem::replace(&mut expected, next).is_some_and(|expected| expected != host)
                            }
                        };
                        let report = &mut findings.report;
                        report.allocated_clusters += uses.active;
                        report.fragmented_clusters += if fragmented { uses.active } else { 0 };
                        report.compressed_clusters += if examined.kind == Kind::Compressed { uses.active } else { 0 };
                    }
                }
            }
        }
        Ok(())
    }

    /// The blocks that the refcount table refers to: each of them must be nothing else.
    async fn count_blocks(
        &self,
        window: &Range<u64>,
        first: bool,
        pass: &mut Pass,
        findings: &mut Findings,
    ) -> Result<(), ImageError> {
        let (at, bytes) = (self.header.refcount_table.0.0, self.header.refcount_table_bytes());
        tables::entries(self.storage, at, bytes, self.bounds.file, |place, bits| {
            let number = (place - at) / 8;
            let table = || format!("refcount table at {at:#x}, entry {number}");
            let examined = examine::refcount_table(bits, &self.bounds);
            pass.refcounts_unusable |= examined.faults().next().is_some();
            // Of a cluster with more references than can be counted, what is counted does not tell.
            let shared = |(at, _): (u64, u64)| {
                pass.counts.get(at >> self.bounds.geometry.cluster_bits).is_some_and(|count| count > 0)
            };
            pass.refcounts_unusable |= examined.refers.is_some_and(shared);
            self.take(Entry { examined: &examined, times: 1, first }, pass, findings, table);
            if let Kind::Cluster(block) = examined.kind {
                let cluster = block >> self.bounds.geometry.cluster_bits;
                let count = if window.contains(&cluster) { pass.counts.get(cluster) } else { None };
                if let Some(count) = count.filter(|count| *count != 1) {
                    pass.refcounts_unusable = true;
                    findings.corruption(1, || (table(), format!("its block is referred to {count} times")));
                }
            }
            Ok::<(), ImageError>(())
        })
        .await?;
        pass.refcounts_unusable |= bytes == 0;
        Ok(())
    }

    /// Counts what an entry refers to, and notes what is wrong with it.
    fn take(
        &self,
        Entry { examined, times, first }: Entry<'_>,
        pass: &mut Pass,
        findings: &mut Findings,
        table: impl Fn() -> String,
    ) {
        if first {
            for fault in examined.faults() {
                // Counted with the reference.
                if fault != Fault::Outside || examined.refers.is_none() {
                    findings.corruption(times, || (table(), fault.why().into()));
                }
            }
        }
        if let Some((at, bytes)) = examined.refers {
            self.refer(Reference { at, bytes, times, first }, pass, findings, table);
        }
    }

    /// Counts references to some bytes, wherever those are.
    fn refer(&self, reference: Reference, pass: &mut Pass, findings: &mut Findings, table: impl Fn() -> String) {
        let Reference { at, bytes, times, first } = reference;
        if bytes == 0 {
            return;
        }
        if self.bounds.outside(at, bytes) {
            if first {
                let why = || format!("the {bytes} bytes at {at:#x} are behind the end of the file");
                findings.corruption(times, || (table(), why()));
            }
            return;
        }
        self.add(&reference, pass, findings, table);
    }

    /// Counts references to clusters of the file.
    fn add(&self, reference: &Reference, pass: &mut Pass, findings: &mut Findings, table: impl Fn() -> String) {
        let Reference { at, bytes, times, .. } = *reference;
        pass.grown |= (at + bytes - 1) >> self.bounds.geometry.cluster_bits >= self.clusters;
        let lost = pass.counts.add(at, bytes, times);
        if lost > 0 {
            pass.overflow = true;
            let most = self.bounds.geometry.refcount_max();
            let why = || {
                format!("the cluster at {at:#x} is referred to more than {most} times, which its refcount cannot say")
            };
            findings.corruption(lost, || (table(), why()));
        }
    }
}

/// The entries of an L2 table that are not zero: number, entry, bitmap of subclusters.
pub(super) fn l2_entries(table: &[u8], extended: bool) -> impl Iterator<Item = (usize, u64, u64)> + '_ {
    let words = table.as_chunks::<8>().0;
    words
        .chunks_exact(if extended { 2 } else { 1 })
        .map(|entry| match entry {
            [bits, bitmap] => (u64::from_be_bytes(*bits), u64::from_be_bytes(*bitmap)),
            [bits] => (u64::from_be_bytes(*bits), 0),
            _ => (0, 0),
        })
        .enumerate()
        .map(|(number, (bits, bitmap))| (number, bits, bitmap))
        .filter(|(_, bits, bitmap)| *bits != 0 || *bitmap != 0)
}

/// Why the L1 table of a snapshot is unreadable.
fn l1_fault(l1: &L1Table, bounds: &Bounds) -> Option<String> {
    let most = crate::qcow2::format::header::L1_MOST;
    if l1.at & (bounds.geometry.cluster_size() - 1) != 0 {
        return Some(format!("its L1 table at {:#x} does not begin at a cluster", l1.at));
    }
    (l1.entries > most).then(|| format!("its L1 table has {} entries; {most} is the most", l1.entries))
}

/// Whether there is nothing of the L1 table of a snapshot.
pub(super) fn l1_gone(l1: &L1Table, bounds: &Bounds) -> bool {
    l1_fault(l1, bounds).is_some() || l1.entries > 0 && (l1.at == 0 || l1.at >= bounds.file)
}
