//! The refcounts that the image keeps.
//!
//! Law: what is looked up costs what it is looked for. A refcount block can have 2 MiB, and entries can name clusters
//! in any order: a refcount by itself is read with a piece of its block, not with all of it.

use limosa_page::{broken_invariant, to_usize};
use limosa_storage::Storage;

use super::examine::Bounds;
use super::tables;
use crate::error::ImageError;
use crate::qcow2::format::geometry::Geometry;
use crate::qcow2::format::header::Header;
use crate::qcow2::format::refcount_array;

/// Bits of an entry of the refcount table that are an offset.
const OFFSET: u64 = !0x1ff;

/// Bytes of the refcount table or of a block that are read and kept at once.
const PIECE: u64 = 4096;

/// Refcounts, by cluster. The last block that was asked for is kept, and the last piece of it and of the table.
#[derive(Debug)]
pub(super) struct Stored<'a> {
    storage: &'a dyn Storage,
    bounds: Bounds,
    table: (u64, u64),
    block: Option<(u64, Block)>,
    table_piece: Piece,
    block_piece: Piece,
}

/// A piece of a table, and where it lies.
type Piece = Option<(u64, Vec<u8>)>;

/// The place of a refcount block.
enum BlockAddress {
    None,
    Unusable,
    At(u64),
}

/// A refcount block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Block {
    /// No block: all its refcounts are zero.
    None,
    /// The refcount table's entry is unusable.
    Unusable,
    /// At this offset, with these contents.
    Here(u64, Vec<u8>),
}

impl Block {
    /// The refcount of a cluster that this block is about; `None` if it cannot be read.
    pub(super) fn refcount(&self, cluster: u64, geometry: &Geometry) -> Option<u64> {
        let index = usize::try_from(cluster % geometry.refcounts_per_block()).ok()?;
        match self {
            Self::None => Some(0),
            Self::Unusable => None,
            Self::Here(_, bytes) => refcount_array::get(bytes, geometry.refcount_order, index),
        }
    }

    /// Whether it is in a file of these bytes.
    pub(super) fn is_in(&self, file: u64) -> bool {
        matches!(self, Self::Here(at, bytes) if at.saturating_add(bytes.len() as u64) <= file)
    }
}

impl<'a> Stored<'a> {
    pub(super) fn new(storage: &'a dyn Storage, header: &Header, bounds: Bounds) -> Self {
        let table = (header.refcount_table.0.0, header.refcount_table_bytes() / 8);
        Self { storage, bounds, table, block: None, table_piece: None, block_piece: None }
    }

    /// A block.
    pub(super) async fn block(&mut self, number: u64) -> Result<&Block, ImageError> {
        if self.block.as_ref().is_none_or(|(kept, _)| *kept != number) {
            let block = self.load(number).await?;
            self.block = Some((number, block));
        }
        match &self.block {
            Some((_, block)) => Ok(block),
            None => Err(broken_invariant("a block that was loaded is there").into()),
        }
    }

    async fn place(&mut self, number: u64) -> Result<BlockAddress, ImageError> {
        let (table, entries) = self.table;
        if number >= entries {
            return Ok(BlockAddress::None);
        }
        let (piece, offset) = kept(self.storage, &mut self.table_piece, table, number * 8).await?;
        let at = piece.get(offset..).and_then(<[u8]>::first_chunk).ok_or_else(|| broken_invariant(WHOLE))?;
        let at = u64::from_be_bytes(*at) & OFFSET;
        let size = self.bounds.geometry.cluster_size();
        Ok(if at == 0 {
            BlockAddress::None
        } else if at & (size - 1) != 0 || i64::try_from(at.saturating_add(size)).is_err() {
            BlockAddress::Unusable
        } else {
            BlockAddress::At(at)
        })
    }

    async fn load(&mut self, number: u64) -> Result<Block, ImageError> {
        let size = self.bounds.geometry.cluster_size();
        Ok(match self.place(number).await? {
            BlockAddress::None => Block::None,
            BlockAddress::Unusable => Block::Unusable,
            BlockAddress::At(at) if at >= self.bounds.file => Block::Here(at, vec![0; to_usize(size)]),
            BlockAddress::At(at) => Block::Here(at, tables::bytes(self.storage, at, size).await?),
        })
    }

    /// The refcount of a cluster; `None` if it cannot be read.
    pub(super) async fn get(&mut self, cluster: u64) -> Result<Option<u64>, ImageError> {
        let geometry = self.bounds.geometry;
        let number = cluster / geometry.refcounts_per_block();
        if let Some((_, block)) = self.block.as_ref().filter(|(kept, _)| *kept == number) {
            return Ok(block.refcount(cluster, &geometry));
        }
        let at = match self.place(number).await? {
            BlockAddress::None => return Ok(Some(0)),
            BlockAddress::Unusable => return Ok(None),
            BlockAddress::At(at) if at >= self.bounds.file => return Ok(Some(0)),
            BlockAddress::At(at) => at,
        };
        // The order is at most 6, so the bits of a refcount are at most 64.
        let bit = (cluster % geometry.refcounts_per_block()) << geometry.refcount_order;
        let begin = bit / 64 * 8;
        let (piece, offset) = kept(self.storage, &mut self.block_piece, at, begin).await?;
        let index = to_usize((bit - begin * 8) >> geometry.refcount_order);
        let piece = piece.get(offset..).ok_or_else(|| broken_invariant(WHOLE))?;
        Ok(Some(refcount_array::get(piece, geometry.refcount_order, index).ok_or_else(|| broken_invariant(WHOLE))?))
    }
}

/// Pieces are read whole, and begin where their tables do or a multiple of their length further on.
const WHOLE: &str = "a piece of a table has the entry that it was read for";

/// The piece in which the 8 bytes lie that are `inside` a table at `at`, and where in it.
async fn kept<'p>(
    storage: &dyn Storage,
    piece: &'p mut Piece,
    at: u64,
    inside: u64,
) -> Result<(&'p [u8], usize), ImageError> {
    let begin = at.saturating_add(inside - inside % PIECE);
    if piece.as_ref().is_none_or(|(kept, _)| *kept != begin) {
        *piece = Some((begin, tables::bytes(storage, begin, PIECE).await?));
    }
    let (_, bytes) = piece.as_ref().ok_or_else(|| broken_invariant(WHOLE))?;
    Ok((bytes, to_usize(inside % PIECE)))
}
