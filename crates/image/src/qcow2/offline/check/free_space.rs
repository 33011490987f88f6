//! Space within an image's file to which nothing refers, given back to the filesystem.

use limosa_page::to_usize;
use limosa_storage::Storage;

use super::CheckOptions;
use super::stored::{Block, Stored};
use super::walk::Image;
use crate::error::ImageError;
use crate::qcow2::format::header::Header;
use crate::qcow2::format::refcount_array;

/// Discards the free clusters of an image whose refcounts are right, and durable.
///
/// The header is read again: a repair before may have written the refcounts to another place.
///
/// # Errors
/// Errors of the storage when refcounts are read. One that does not take space back is no error.
pub(in crate::qcow2) async fn discard_free(storage: &dyn Storage, options: CheckOptions) -> Result<(), ImageError> {
    let header = Header::read(storage).await?;
    let image = Image::open(storage, &header, options).await?;
    let (geometry, clusters) = (image.bounds.geometry, image.clusters);
    let each = geometry.refcounts_per_block();
    let mut stored = Stored::new(storage, &header, image.bounds);
    let mut free = 0..0;
    for number in 0..clusters.div_ceil(each) {
        let block = stored.block(number).await?;
        for cluster in number * each..clusters.min((number + 1) * each) {
            let is_free = match block {
                Block::None => true,
                Block::Unusable => false,
                Block::Here(_, bytes) => {
                    refcount_array::get(bytes, geometry.refcount_order, to_usize(cluster % each)) == Some(0)
                }
            };
            if is_free && free.end == cluster {
                free.end = cluster + 1;
            } else if is_free {
                discard(storage, &free, geometry.cluster_bits).await;
                free = cluster..cluster + 1;
            }
        }
    }
    discard(storage, &free, geometry.cluster_bits).await;
    Ok(())
}

async fn discard(storage: &dyn Storage, clusters: &std::ops::Range<u64>, bits: u32) {
    if !clusters.is_empty() {
        let _ = storage.discard(clusters.start << bits..clusters.end << bits).await;
    }
}
