//! Bringing the changes of a journal to an image, whose process was killed.
//!
//! Law: nothing is written before everything was compared: each entry is one that the journal knows (the image has the
//! journal's first one, or a flush had brought a later one), and nothing else refers to the clusters that the new
//! entries lead to. What is wrong with the journal or was changed in the image by others leaves both as they are.
//!
//! Contents are made durable before entries that lead to them, a new L2 table before the L1 entry that leads to it. The
//! image's dirty bit is set, and its refcounts are repaired afterwards. A replay that is cut short is begun again.

use std::collections::{BTreeMap, BTreeSet};

use limosa_page::{broken_invariant, to_usize};
use limosa_storage::Storage;

use super::check::references::References;
use super::check::tables;
use crate::error::ImageError;
use crate::offset::{ClusterCount, HostCluster, HostOffset};
use crate::qcow2::engine::journal::Journal;
use crate::qcow2::format::entry::{COPIED, L1Entry, L2Entry};
use crate::qcow2::format::geometry::Geometry;
use crate::qcow2::format::header::Header;
use crate::qcow2::format::journal::EntryChange;

/// Why the image is not the one that the journal was kept for.
const CHANGED: &str = "which was changed since, by a program that does not know the journal";

/// Brings the changes that were found in a journal to the image's tables, durably.
///
/// # Errors
/// [`ImageError::Journal`]: they are not of this image; errors of the storage.
pub(in crate::qcow2) async fn replay(
    journal: &Journal,
    file: &dyn Storage,
    data_file: Option<&dyn Storage>,
    header: &Header,
) -> Result<(), ImageError> {
    let replay = Replay { journal, file, header, geometry: header.geometry() };
    if !header.features.dirty() {
        return Err(replay.refused("which was repaired or closed since"));
    }
    let tables = replay.tables()?;
    let (mut clusters, mut packed) = (BTreeSet::new(), BTreeSet::new());
    for (index, changes) in &tables {
        replay.compare(*index, changes, &mut clusters, &mut packed).await?;
    }
    if !packed.is_disjoint(&clusters) {
        return Err(replay.refused(CHANGED));
    }
    let references = replay.unused(&tables, &clusters).await?;
    if let Some(data) = data_file {
        data.flush().await?;
    }
    file.flush().await?;
    replay.write(&tables, &(&clusters | &packed), references.end).await
}

/// The changes of an L2 table's entries, by the numbers of those.
type TableChanges = BTreeMap<u64, Chain>;

/// All that an entry was since the last flush that was complete.
#[derive(Debug)]
struct Chain {
    states: BTreeSet<(u64, u64)>,
    last: (u64, u64),
}

/// An L2 table as the file has it.
struct Table {
    /// Its place, if it may be written there.
    own: Option<HostOffset>,
    bytes: Vec<u8>,
}

struct Replay<'a> {
    journal: &'a Journal,
    file: &'a dyn Storage,
    header: &'a Header,
    geometry: Geometry,
}

impl Replay<'_> {
    fn refused(&self, why: &str) -> ImageError {
        self.journal.refused(self.file.name(), why.to_owned())
    }

    /// The changes, by L1 entry and L2 entry.
    fn tables(&self) -> Result<BTreeMap<u64, TableChanges>, ImageError> {
        let geometry = &self.geometry;
        let (disk, covered) = (geometry.clusters(self.header.size), geometry.l2_covers() >> geometry.cluster_bits);
        let mut tables: BTreeMap<u64, TableChanges> = BTreeMap::new();
        for EntryChange { cluster, old, new } in self.journal.found().iter().copied() {
            let (index, number) = (cluster / covered, cluster % covered);
            if cluster >= disk || index >= u64::from(self.header.l1.1) {
                return Err(self.refused("which was made shorter since"));
            }
            let chain = tables.entry(index).or_default().entry(number);
            let chain = chain.or_insert_with(|| Chain { states: BTreeSet::from([self.comparable(old)]), last: new });
            chain.states.insert(self.comparable(new));
            chain.last = new;
        }
        Ok(tables)
    }

    /// An entry without what a repair of refcounts changes. In a data file the flag says that there is a cluster.
    const fn comparable(&self, (bits, bitmap): (u64, u64)) -> (u64, u64) {
        if self.header.features.data_file() { (bits, bitmap) } else { (bits & !COPIED, bitmap) }
    }

    fn l1_entry_at(&self, index: u64) -> HostOffset {
        self.header.l1.0 + index * 8
    }

    async fn table(&self, index: u64) -> Result<Table, ImageError> {
        let size = self.geometry.cluster_size();
        let entry = tables::number(self.file, self.l1_entry_at(index).0).await?;
        let entry = L1Entry::decode(entry, &self.geometry).map_err(|_| self.refused(CHANGED))?;
        let bytes = match entry.table {
            Some(at) => tables::bytes(self.file, at.0, size).await?,
            None => vec![0; to_usize(size)],
        };
        Ok(Table { own: entry.table.filter(|_| entry.copied), bytes })
    }

    /// The place of an entry in the bytes of its table.
    fn place<'a>(&self, table: &'a mut [u8], number: u64) -> Result<&'a mut [u8], ImageError> {
        let size = to_usize(self.geometry.l2_entry_size());
        let mut entries = table.chunks_exact_mut(size);
        entries.nth(to_usize(number)).ok_or_else(|| broken_invariant("an L2 table has its entries").into())
    }

    fn words(entry: &[u8]) -> (u64, u64) {
        let mut words = entry.as_chunks().0.iter().map(|word| u64::from_be_bytes(*word));
        (words.next().unwrap_or(0), words.next().unwrap_or(0))
    }

    fn decoded(&self, (bits, bitmap): (u64, u64)) -> Result<L2Entry, ImageError> {
        let decoded = L2Entry::decode(bits, bitmap, &self.geometry, self.header.rules());
        decoded.map_err(|_| self.refused("and an entry that no image can have"))
    }

    /// Compares the entries of a table with the changes, and adds the clusters to which nothing may refer so far, and
    /// those that compressed clusters share.
    async fn compare(
        &self,
        index: u64,
        changes: &TableChanges,
        clusters: &mut BTreeSet<HostCluster>,
        packed: &mut BTreeSet<HostCluster>,
    ) -> Result<(), ImageError> {
        let mut table = self.table(index).await?;
        for (number, Chain { states, last }) in changes {
            let now = Self::words(self.place(&mut table.bytes, *number)?);
            if !states.contains(&self.comparable(now)) {
                return Err(self.refused(CHANGED));
            }
            let (old, new) = (self.decoded(now)?, self.decoded(*last)?);
            if self.header.features.data_file() {
                continue;
            }
            let host = |entry| match entry {
                L2Entry::Standard { host, .. } => host,
                L2Entry::Compressed { .. } => None,
            };
            let length = self.file.length()?;
            match (new, host(new)) {
                (L2Entry::Compressed { host, length: bytes }, _) if self.comparable(now) != self.comparable(*last) => {
                    let end = host.saturating_add(u64::from(bytes));
                    if host.0 >= length {
                        return Err(self.refused(CHANGED));
                    }
                    let bits = self.geometry.cluster_bits;
                    packed.extend((host.cluster(bits).0..=HostOffset(end.0 - 1).cluster(bits).0).map(HostCluster));
                }
                (_, Some(host_now)) if host(old) != Some(host_now) => {
                    let cluster = host_now.cluster(self.geometry.cluster_bits);
                    if host_now.0 >= length || !clusters.insert(cluster) {
                        return Err(self.refused(CHANGED));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes sure that nothing refers to the clusters, and that the tables that will be written are nothing else.
    async fn unused(
        &self,
        tables: &BTreeMap<u64, TableChanges>,
        clusters: &BTreeSet<HostCluster>,
    ) -> Result<References, ImageError> {
        let bits = self.geometry.cluster_bits;
        let l1 = self.header.l1.0;
        let l1_end = l1 + u64::from(self.header.l1.1) * 8 + (self.geometry.cluster_size() - 1);
        let mut once: BTreeSet<HostCluster> = (l1.cluster(bits).0..l1_end.cluster(bits).0).map(HostCluster).collect();
        for index in tables.keys() {
            once.extend(self.table(*index).await?.own.map(|own| own.cluster(bits)));
        }
        let references = References::count(self.file, self.header, &once.union(clusters).copied().collect()).await?;
        let fine = clusters.iter().all(|cluster| references.of(*cluster) == Some(0))
            && once.iter().all(|table| references.of(*table) == Some(1));
        if fine { Ok(references) } else { Err(self.refused(CHANGED)) }
    }

    /// Writes the last of each entry's states. `end`: the cluster behind the last one in use.
    async fn write(
        &self,
        tables: &BTreeMap<u64, TableChanges>,
        clusters: &BTreeSet<HostCluster>,
        end: HostCluster,
    ) -> Result<(), ImageError> {
        let last = clusters.last().map_or(HostCluster(0), |last| *last + ClusterCount::ONE);
        let mut free = end.max(last);
        let mut moved: Vec<(u64, L1Entry)> = Vec::new();
        // A table that a snapshot has, too, is left as it is.
        for (index, changes) in tables {
            let mut table = self.table(*index).await?;
            if table.own.is_none() {
                self.change(&mut table.bytes, changes)?;
                let at = free.begin(self.geometry.cluster_bits);
                tables::put(self.file, at.0, &table.bytes).await?;
                moved.push((*index, L1Entry { table: Some(at), copied: true }));
                free += ClusterCount::ONE;
            }
        }
        self.file.flush().await?;
        for (index, changes) in tables {
            let mut table = self.table(*index).await?;
            if let Some(own) = table.own {
                self.change(&mut table.bytes, changes)?;
                tables::put(self.file, own.0, &table.bytes).await?;
            }
        }
        for (index, entry) in moved {
            tables::put(self.file, self.l1_entry_at(index).0, &entry.encode().to_be_bytes()).await?;
        }
        Ok(self.file.flush().await?)
    }

    fn change(&self, table: &mut [u8], changes: &TableChanges) -> Result<(), ImageError> {
        for (number, Chain { last: (bits, bitmap), .. }) in changes {
            let words = [bits.to_be_bytes(), bitmap.to_be_bytes()];
            let place = self.place(table, *number)?.as_chunks_mut().0.iter_mut();
            place.zip(words).for_each(|(place, word)| *place = word);
        }
        Ok(())
    }
}
