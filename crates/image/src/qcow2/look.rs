//! What stands in the tables about a part of the disk.

use std::ops::Range;
use std::sync::Arc;

use limosa_storage::Buffer;

use super::counters::Purpose;
use super::entry::{L1Entry, L2Entry};
use super::image::Inner;
use super::l1::L1Fault;
use super::slices::{Flight, Full};
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};

/// A run of bytes that are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) length: u64,
    pub(super) kind: Kind,
}

/// What a run of bytes is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Contents, from this offset of the data storage on. `copied`: nobody else refers to them.
    Own { host: u64, copied: bool },
    /// Zeros. If there is a cluster for them: where the bytes would lie. `copied` as above.
    Zero { host: Option<u64>, copied: bool },
    /// What the backing image has. As above.
    Backing { host: Option<u64>, copied: bool },
    /// A part of a cluster that is compressed.
    Compressed { host: HostOffset, packed: u32 },
}

/// What looking found.
#[derive(Debug)]
pub(super) enum Look {
    Piece(Piece),
    /// This slice has to be read first.
    Load(u64),
}

/// Where the entry of an offset stands: in the slice at `key`, from word `word` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) table: u64,
    pub(super) key: u64,
    pub(super) word: usize,
    /// The entry's number in its table.
    pub(super) number: u32,
}

impl Kind {
    /// The same, `by` bytes further on.
    fn advanced(self, by: u64) -> Self {
        match self {
            Self::Own { host, copied } => Self::Own { host: host + by, copied },
            Self::Zero { host, copied } => Self::Zero { host: host.map(|host| host + by), copied },
            Self::Backing { host, copied } => Self::Backing { host: host.map(|host| host + by), copied },
            Self::Compressed { .. } => self,
        }
    }

    /// Whether there is a cluster that nobody else refers to.
    pub(super) const fn is_for_itself(self) -> bool {
        match self {
            Self::Own { copied, .. } => copied,
            Self::Zero { host, copied } | Self::Backing { host, copied } => host.is_some() && copied,
            Self::Compressed { .. } => false,
        }
    }
}

impl Inner {
    pub(super) fn corrupt(&self, table: String, why: impl Into<String>) -> ImageError {
        ImageError::Corrupt { image: Arc::clone(&self.name), table, why: why.into() }
    }

    /// An error if a part of a table does not lie in the file: tables are made whole, and zeros in place of entries would be contents
    /// lost without a word.
    pub(super) fn admit_table(&self, name: &str, at: u64, part: &Range<u64>) -> Result<(), ImageError> {
        let length = self.file.length()?;
        if part.end <= length {
            return Ok(());
        }
        let why = format!(
            "the file of {length:#x} bytes ends before {:#x}, where its entries end: get it back from a copy, or see what \
             `limosa img check` says is left",
            part.end
        );
        Err(self.corrupt(format!("{name} at {at:#x}"), why))
    }

    pub(super) fn l1_entry(&self, index: u64) -> Result<L1Entry, ImageError> {
        self.l1.get(index).map_err(|fault| {
            let (at, entries) = self.l1.place();
            let why = match fault {
                L1Fault::Short => format!("it has {entries} entries, and the disk needs more"),
                L1Fault::Entry(fault) => fault.to_string(),
            };
            self.corrupt(format!("L1 table at {at:#x}, entry {index}"), why)
        })
    }

    /// Where the L2 entry of an offset stands, in a given L2 table.
    pub(super) fn spot(&self, at: u64, table: u64) -> Spot {
        let place = self.geometry.place(GuestOffset(at));
        let byte = u64::from(place.l2) * self.geometry.l2_entry_size();
        let key = table + byte / self.l2.slice_size() * self.l2.slice_size();
        let word = usize::try_from((table + byte - key) / 8).unwrap_or(usize::MAX);
        Spot { table, key, word, number: place.l2 }
    }

    /// The entry at a spot of a slice.
    pub(super) fn entry(&self, words: &[u64], spot: Spot) -> Result<L2Entry, ImageError> {
        let word = |at: usize| words.get(at).copied().unwrap_or(0);
        let bitmap = if self.geometry.extended_l2 { word(spot.word + 1) } else { 0 };
        L2Entry::decode(word(spot.word), bitmap, &self.geometry, self.rules).map_err(|fault| {
            self.corrupt(format!("L2 table at {:#x}, entry {}", spot.table, spot.number), fault.to_string())
        })
    }

    /// What the bytes from `at` on are: as many as are alike and lie together, up to `end`, as far as one slice tells.
    pub(super) fn look(&self, at: u64, end: u64) -> Result<Look, ImageError> {
        let covers = self.geometry.l2_covers();
        let Some(table) = self.l1_entry(at / covers)?.table else {
            let length = end.min((at / covers + 1).saturating_mul(covers)) - at;
            return Ok(Look::Piece(Piece { length, kind: Kind::Backing { host: None, copied: false } }));
        };
        let spot = self.spot(at, table.0);
        match self.l2.get(spot.key, |words| self.look_into(words, spot, at, end)) {
            Some(piece) => Ok(Look::Piece(piece?)),
            None => Ok(Look::Load(spot.key)),
        }
    }

    fn look_into(&self, words: &[u64], mut spot: Spot, at: u64, end: u64) -> Result<Piece, ImageError> {
        let width = self.words_of_entry();
        let cluster = self.geometry.cluster_size();
        let mut piece: Option<Piece> = None;
        let mut pos = at;
        while pos < end && spot.word < words.len() {
            let entry = self.entry(words, spot)?;
            let cluster_end = (pos / cluster + 1).saturating_mul(cluster).min(end);
            while pos < cluster_end {
                let (length, kind) = self.alike(entry, pos, cluster_end);
                match &mut piece {
                    None => piece = Some(Piece { length, kind }),
                    Some(piece)
                        if !matches!(kind, Kind::Compressed { .. }) && piece.kind.advanced(piece.length) == kind =>
                    {
                        piece.length += length;
                    }
                    Some(piece) => return Ok(*piece),
                }
                pos += length;
            }
            spot.word += width;
            spot.number += 1;
        }
        piece.ok_or_else(|| self.corrupt(format!("L2 table at {:#x}", spot.table), "it has no such entry"))
    }

    /// What the bytes from `pos` on are, as many as are alike in one cluster, up to `end`.
    pub(super) fn alike(&self, entry: L2Entry, pos: u64, end: u64) -> (u64, Kind) {
        let cluster = self.geometry.cluster_size();
        let (host, copied, what) = match entry {
            L2Entry::Compressed { host, length } => return (end - pos, Kind::Compressed { host, packed: length }),
            L2Entry::Standard { host, copied, what } => (host, copied, what),
        };
        let inside = pos & (cluster - 1);
        let unit = self.geometry.subcluster_size();
        let bits = |unit: u64| {
            let bit = if self.geometry.extended_l2 { 1_u32 << (unit & 31) } else { 1 };
            (what.allocated & bit != 0, what.zero & bit != 0)
        };
        let first = bits(inside / unit);
        let mut next = inside / unit + 1;
        while next * unit < cluster && pos - inside + next * unit < end && bits(next) == first {
            next += 1;
        }
        let length = (pos - inside + next * unit).min(end) - pos;
        let at = host.map(|host| host.0 + inside);
        let kind = match (first, at) {
            ((true, _), Some(host)) => Kind::Own { host, copied },
            ((_, true), _) => Kind::Zero { host: at, copied },
            _ => Kind::Backing { host: at, copied },
        };
        (length, kind)
    }

    /// 8-byte words of an L2 entry.
    pub(super) const fn words_of_entry(&self) -> usize {
        if self.geometry.extended_l2 { 2 } else { 1 }
    }

    /// Reads a slice. Everybody who wants it waits for one reading.
    pub(super) fn load(self: &Arc<Self>, key: u64) -> Flight {
        use futures_util::FutureExt;

        let mut shard = self.l2.shard(key);
        if let Some(flight) = shard.loading.get(&key) {
            return flight.clone();
        }
        let inner = Arc::clone(self);
        let flight: Flight = async move {
            let loaded = inner.load_now(key).await;
            let flight = inner.l2.shard(key).loading.remove(&key);
            drop(flight);
            loaded
        }
        .boxed()
        .shared();
        shard.loading.insert(key, flight.clone());
        flight
    }

    async fn load_now(self: &Arc<Self>, key: u64) -> Result<(), ImageError> {
        if self.l2.get(key, |_| ()).is_some() {
            return Ok(());
        }
        let size = self.l2.slice_size();
        let table = key & !(self.geometry.cluster_size() - 1);
        let mut words: Box<[u64]> = if self.is_fresh(table) {
            vec![0; usize::try_from(size / 8).unwrap_or(0)].into()
        } else {
            self.admit_table("L2 table", table, &(key..key.saturating_add(size)))?;
            let buffer = Buffer::zeroed(usize::try_from(size).unwrap_or(0));
            self.counters.add(Purpose::L2Read, size);
            self.file.read(key, buffer.clone().into()).await?;
            buffer.to_vec().as_chunks().0.iter().map(|word| u64::from_be_bytes(*word)).collect()
        };
        while let Err(Full(back)) = self.l2.insert(key, words) {
            self.settle().await?;
            words = back;
        }
        Ok(())
    }
}
