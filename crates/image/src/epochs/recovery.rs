//! Recovery: the next process brings the kept epochs of a log to the image.

use std::sync::Arc;

use limosa_storage::Storage;

use super::EpochError;
use super::apply::apply;
use super::extents::Extents;
use super::format::{Entry, Mark, Stage};
use super::log::{Log, Stored, entries, fault};
use super::protection::{EXTENTS_MAX, EpochOptions};
use crate::disk::Disk;
use crate::error::ImageError;

/// The state in which a log was found. The image has all kept epochs now, durably.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Recovered {
    /// Protection had not begun, or had ended: the image has all writes.
    Whole,
    /// The process was killed, or its writes were dropped: the image is as of this epoch, and what the VM wrote later
    /// is gone. If the VM still runs it must not be served.
    Cut {
        /// The epoch.
        epoch: u64,
        /// Bytes that were brought to the image now.
        bytes: u64,
    },
}

/// Brings the kept epochs of a log to the image. It can be repeated, also after it was cut off. Of the options `boot`
/// and `file` are used: those of now.
///
/// # Errors
/// [`EpochError::Log`]: the log is of another file, or damaged: nothing was written. The image or the log cannot be
/// read, written or flushed.
pub async fn recover(
    image: &Arc<dyn Disk>,
    storage: Arc<dyn Storage>,
    options: &EpochOptions,
) -> Result<Recovered, EpochError> {
    let Some(header) = Log::read_header(&*storage).await? else { return Ok(Recovered::Whole) };
    if header.file != options.file || header.disk != image.len() {
        let image = image.name();
        return Err(fault(&*storage, format!("it was written for another file than the present {image}")));
    }
    let log = Log { storage: Arc::clone(&storage), id: header.id };
    let mark = log.read_mark().await?;
    let mut slots = match mark.stage {
        Stage::Open => log.read_slots(mark.merged + 1).await?,
        Stage::Ended => return Ok(Recovered::Whole),
        // One that was written later has been dropped.
        Stage::Dropped => Vec::new(),
    };
    let durable = slots.iter().filter(|slot| slot.durable).map(|slot| slot.number).chain([mark.durable]).max();
    let durable = durable.unwrap_or(mark.durable);
    if slots.last().map_or(mark.merged, |slot| slot.number) < durable {
        return Err(fault(&*storage, "it is damaged: a kept epoch is missing"));
    }
    let is_same_boot = header.boot == options.boot && header.boot != [0; 2];
    if !is_same_boot {
        // Of a later one any part may be missing.
        slots.retain(|slot| slot.number <= durable);
    }
    let mut newest: Extents<Stored> = Extents::default();
    let mut entries_left = 2 * EXTENTS_MAX;
    for slot in &slots {
        for Entry { start, length, contents } in log.read_entries(slot, header.disk, entries_left).await? {
            entries_left = entries_left.saturating_sub(1);
            newest.insert(start..start + length, Stored { contents, epoch: slot.epoch, segment: None });
        }
    }
    let Some(last) = slots.last() else { return Ok(Recovered::Cut { epoch: mark.epoch, bytes: 0 }) };
    // The image gets nothing that a power cut could take from the log.
    let made_durable = Mark { number: mark.number + 1, durable: last.number.max(durable), ..mark };
    storage.flush().await.map_err(ImageError::from)?;
    log.write_mark(&made_durable).await.map_err(ImageError::from)?;
    storage.flush().await.map_err(ImageError::from)?;
    let bytes = apply(&storage, &**image, &entries(&newest)).await?;
    image.flush().await?;
    let merged = Mark { number: mark.number + 2, merged: last.number, epoch: last.epoch, ..made_durable };
    log.write_mark(&merged).await.map_err(ImageError::from)?;
    storage.flush().await.map_err(ImageError::from)?;
    Ok(Recovered::Cut { epoch: last.epoch, bytes })
}
