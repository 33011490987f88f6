//! Emptying an overlay whose contents its backing file has now.
//!
//! Law: what an emptied image reads as is what it read as before, at any moment: the entries of its L1 table become
//! zero in place, in any order, and each of them leads to the same contents with and without its tables. Space is given
//! back only after that is durable; a cut before it leaves leaked clusters.

use std::sync::Arc;

use limosa_page::to_usize;
use limosa_storage::Storage;

use super::check::{CheckOptions, Repair, repair, tables};
use super::resize::cut_off_file;
use crate::error::ImageError;
use crate::qcow2::format::header::Header;

/// Bytes of zeros that are written at once.
const PIECE: u64 = 1 << 20;

/// Has an image refer to none of its contents any more, so that all of its disk comes from its backing file. The image
/// is not used by anything else meanwhile, and is not open as a disk. Its internal snapshots and its bitmaps stay. An
/// image that was not closed is repaired first. The file is cut off behind the last cluster that is in use.
///
/// # Errors
/// [`ImageError::NeedsRepair`]: it is marked as corrupt; what the storage says.
pub async fn empty(
    file: &dyn Storage,
    data_file: Option<&dyn Storage>,
    options: CheckOptions,
) -> Result<(), ImageError> {
    let mut header = Header::read(file).await?;
    if header.features.dirty() && !header.features.corrupt() {
        repair(file, Repair::Refcounts, options).await?;
        header = Header::read(file).await?;
    }
    if header.features.dirty() || header.features.corrupt() {
        let what = "it is damaged: check and repair it before it is emptied".to_owned();
        return Err(ImageError::NeedsRepair { image: Arc::clone(file.name()), what });
    }
    header.prepare_autoclear(file, true).await?;
    let end = header.l1.0.0 + u64::from(header.l1.1) * 8;
    let mut at = header.l1.0.0;
    while at < end {
        let length = (end - at).min(PIECE);
        tables::put(file, at, &vec![0; to_usize(length)]).await?;
        at += length;
    }
    file.flush().await?;
    cut_off_file(file, &header, options).await?;
    if let Some(data_file) = data_file.filter(|_| header.snapshots.1 == 0) {
        // Nothing refers to it any more, and it need not take it back.
        let _ = data_file.discard(0..data_file.length()?).await;
    }
    Ok(())
}
