//! A digest of an image's tables: it changes with every write that allocates, so with every write to a compressed
//! cluster, and with none in the place of a cluster that is stored as it is.

use std::sync::Arc;

use limosa_page::to_usize;
use limosa_storage::{Buffer, Storage};
use sha2::{Digest as _, Sha256};

use crate::error::ImageError;
use crate::offset::HostOffset;
use crate::qcow2::format::entry::L1Entry;
use crate::qcow2::format::header::Header;

/// Returns the SHA-256 of an image's size, cluster size, active L1 table and L2 tables. Contents are not read, so a
/// write in place does not change it.
///
/// # Errors
/// Tables that are not in the file, or more of them than it has room for; what the storage says.
pub async fn table_digest(storage: &dyn Storage, header: &Header) -> Result<[u8; 32], ImageError> {
    let cluster = header.geometry().cluster_size();
    let Tables { l1, l2 } = tables(storage, header).await?;
    prefetch(storage, &l2, cluster);
    let mut digest = Sha256::new();
    digest.update(header.size.to_be_bytes());
    digest.update(cluster.to_be_bytes());
    digest.update(&l1);
    for table in l2 {
        digest.update(read(storage, table.0, cluster).await?);
    }
    Ok(digest.finalize().into())
}

/// Has an image's L2 tables fetched, where that takes a connection: a disk that needs them finds them one by one.
///
/// # Errors
/// As [`table_digest`].
pub async fn prefetch_tables(storage: &dyn Storage, header: &Header) -> Result<(), ImageError> {
    let Tables { l2, .. } = tables(storage, header).await?;
    prefetch(storage, &l2, header.geometry().cluster_size());
    Ok(())
}

/// The active tables of an image.
struct Tables {
    l1: Vec<u8>,
    /// Places of the L2 tables.
    l2: Vec<HostOffset>,
}

async fn tables(storage: &dyn Storage, header: &Header) -> Result<Tables, ImageError> {
    let corrupt = |what: &str| ImageError::Corrupt {
        image: Arc::clone(storage.name()),
        table: "L1 table".to_owned(),
        why: what.to_owned(),
    };
    let (geometry, (at, entries)) = (header.geometry(), header.l1);
    let length = storage.length()?;
    let mut room = length.div_ceil(geometry.cluster_size());
    let bytes = u64::from(entries).saturating_mul(8);
    if at.0.checked_add(bytes).is_none_or(|end| end > length) {
        return Err(corrupt("it is not in the file"));
    }
    let l1 = read(storage, at.0, bytes).await?;
    let mut l2 = Vec::new();
    for entry in l1.as_chunks::<8>().0 {
        let entry = L1Entry::decode(u64::from_be_bytes(*entry), &geometry);
        let Some(table) = entry.map_err(|fault| corrupt(&fault.to_string()))?.table else { continue };
        room = room.checked_sub(1).ok_or_else(|| corrupt("it has more L2 tables than the file has room for"))?;
        l2.push(table);
    }
    Ok(Tables { l1, l2 })
}

fn prefetch(storage: &dyn Storage, tables: &[HostOffset], cluster: u64) {
    let ranges: Vec<_> = tables.iter().map(|table| table.0..table.0.saturating_add(cluster)).collect();
    storage.prefetch(&ranges);
}

async fn read(storage: &dyn Storage, at: u64, length: u64) -> Result<Vec<u8>, ImageError> {
    let buffer = Buffer::zeroed(to_usize(length));
    storage.read(at, buffer.clone().into()).await?;
    Ok(buffer.to_vec())
}
