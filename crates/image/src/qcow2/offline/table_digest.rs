//! A digest of an image's tables: it changes with every write that allocates, so with every write to a compressed
//! cluster, and with none in the place of a cluster that is stored as it is.

use std::sync::Arc;

use limosa_page::to_usize;
use limosa_storage::{Buffer, Storage};
use sha2::{Digest as _, Sha256};

use crate::error::ImageError;
use crate::qcow2::format::entry::L1Entry;
use crate::qcow2::format::header::Header;

/// Returns the SHA-256 of an image's size, cluster size, active L1 table and L2 tables. Contents are not read, so a
/// write in place does not change it.
///
/// # Errors
/// Tables that are not in the file, or more of them than it has room for; what the storage says.
pub async fn table_digest(storage: &dyn Storage, header: &Header) -> Result<[u8; 32], ImageError> {
    let corrupt = |what: &str| ImageError::Corrupt {
        image: Arc::clone(storage.name()),
        table: "L1 table".to_owned(),
        why: what.to_owned(),
    };
    let (geometry, (l1, entries)) = (header.geometry(), header.l1);
    let cluster = geometry.cluster_size();
    let length = storage.length()?;
    let mut room = length.div_ceil(cluster);
    let bytes = u64::from(entries).saturating_mul(8);
    if l1.0.checked_add(bytes).is_none_or(|end| end > length) {
        return Err(corrupt("it is not in the file"));
    }
    let mut digest = Sha256::new();
    digest.update(header.size.to_be_bytes());
    digest.update(cluster.to_be_bytes());
    let l1_table = read(storage, l1.0, bytes).await?;
    digest.update(&l1_table);
    for entry in l1_table.as_chunks::<8>().0 {
        let entry = L1Entry::decode(u64::from_be_bytes(*entry), &geometry);
        let Some(table) = entry.map_err(|fault| corrupt(&fault.to_string()))?.table else { continue };
        room = room.checked_sub(1).ok_or_else(|| corrupt("it has more L2 tables than the file has room for"))?;
        digest.update(read(storage, table.0, cluster).await?);
    }
    Ok(digest.finalize().into())
}

async fn read(storage: &dyn Storage, at: u64, length: u64) -> Result<Vec<u8>, ImageError> {
    let buffer = Buffer::zeroed(to_usize(length));
    storage.read(at, buffer.clone().into()).await?;
    Ok(buffer.to_vec())
}
