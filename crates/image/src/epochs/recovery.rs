//! Recovery: the next process brings the kept epochs of a log to the image.

use std::sync::Arc;

use limosa_storage::Storage;
use uuid::Uuid;

use super::EpochError;
use super::apply::apply;
use super::extents::Extents;
use super::format::{Entry, Header, Mark, Slot, Stage};
use super::log::{Log, Stored, entries, fault};
use super::protection::{EXTENTS_MAX, EpochOptions};
use crate::disk::Disk;
use crate::error::ImageError;

/// The state in which a log was found. The image is as it says now, durably.
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

/// The epochs that an image can become as of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recoverable {
    /// Identifies the log: that of another time of protection has another one.
    pub log: Uuid,
    /// The last epoch that is known to be kept.
    pub kept: u64,
    /// The last one that was prepared; the same, if all are kept.
    pub last: u64,
}

/// Reads which epochs the image of a log can become as of; `None`: it has all writes, and the log nothing else. Of the
/// options `boot` and `file` are used: those of now.
///
/// # Errors
/// [`EpochError::Log`]; the log cannot be read.
pub async fn examine(storage: Arc<dyn Storage>, options: &EpochOptions) -> Result<Option<Recoverable>, EpochError> {
    let found = Found::read(&storage, options).await?;
    Ok(found.map(|Found { log, kept, last, .. }| Recoverable { log: Uuid::from_bytes(log.id), kept, last }))
}

/// Brings the epochs of a log to the image: those up to `as_of`, or all that are kept. It can be repeated, also after
/// it was cut off. Of the options `boot` and `file` are used: those of now.
///
/// # Errors
/// [`EpochError::Undecided`], without `as_of`; [`EpochError::NotThere`]; [`EpochError::Log`]: the log is of another
/// file, or damaged. Nothing was written then. The image or the log cannot be read, written or flushed.
pub async fn recover(
    image: &Arc<dyn Disk>,
    storage: Arc<dyn Storage>,
    (options, as_of): (&EpochOptions, Option<u64>),
) -> Result<Recovered, EpochError> {
    let Some(found) = Found::read(&storage, options).await? else { return Ok(Recovered::Whole) };
    if found.header.disk != image.len() {
        return Err(other_file(&*storage, image.name()));
    }
    let Found { log, header, mark, slots, kept, last } = found;
    let epoch = match as_of {
        Some(epoch) if (kept..=last).contains(&epoch) => epoch,
        Some(epoch) => return Err(EpochError::NotThere { log: Arc::clone(storage.name()), epoch, kept, last }),
        None if kept == last => kept,
        None => return Err(EpochError::Undecided { log: Arc::clone(storage.name()), kept, prepared: last }),
    };
    let mut newest: Extents<Stored> = Extents::default();
    let mut entries_left = 2 * EXTENTS_MAX;
    let mut merged = mark.merged;
    for slot in slots.iter().filter(|slot| slot.epoch <= epoch) {
        merged = slot.number;
        for Entry { start, length, contents } in log.read_entries(slot, header.disk, entries_left).await? {
            entries_left = entries_left.saturating_sub(1);
            newest.insert(start..start + length, Stored { contents, epoch: slot.epoch, segment: None });
        }
    }
    if mark.stage == Stage::Dropped {
        return Ok(Recovered::Cut { epoch, bytes: 0 });
    }
    // The image gets nothing that a power cut could take from the log, and is as of no other epoch from here on.
    log.write_decision(epoch).await.map_err(ImageError::from)?;
    storage.flush().await.map_err(ImageError::from)?;
    let made_durable = Mark { number: mark.number + 1, durable: mark.durable.max(merged), ..mark };
    log.write_mark(&made_durable).await.map_err(ImageError::from)?;
    storage.flush().await.map_err(ImageError::from)?;
    let bytes = apply(&storage, &**image, &entries(&newest)).await?;
    image.flush().await?;
    // Later ones, and those that were prepared, are gone.
    let dropped = Mark { number: mark.number + 2, merged, epoch, stage: Stage::Dropped, ..made_durable };
    log.write_mark(&dropped).await.map_err(ImageError::from)?;
    storage.flush().await.map_err(ImageError::from)?;
    Ok(Recovered::Cut { epoch, bytes })
}

/// The contents of a log.
struct Found {
    log: Log,
    header: Header,
    mark: Mark,
    /// The slots behind the last one that the image has.
    slots: Vec<Slot>,
    /// The last epoch that is known to be kept.
    kept: u64,
    /// The last one.
    last: u64,
}

impl Found {
    /// Reads a log; `None`: it has nothing that the image has not.
    async fn read(storage: &Arc<dyn Storage>, options: &EpochOptions) -> Result<Option<Self>, EpochError> {
        let Some(header) = Log::read_header(&**storage).await? else { return Ok(None) };
        if header.file != options.file {
            return Err(other_file(&**storage, "image"));
        }
        let log = Log { storage: Arc::clone(storage), id: header.id };
        let mark = log.read_mark().await?;
        let slots = match mark.stage {
            Stage::Open => {
                let is_same_boot = header.boot == options.boot && header.boot != [0; 2];
                read_slots(&log, &mark, is_same_boot).await?
            }
            Stage::Ended => return Ok(None),
            // One that was written later has been dropped.
            Stage::Dropped => Vec::new(),
        };
        let last = slots.last().map_or(mark.epoch, |slot| slot.epoch);
        let decided = log.read_decision().await?.min(last);
        let kept_at_once = slots.iter().rfind(|slot| slot.kept).map_or(0, |slot| slot.epoch);
        let kept = mark.epoch.max(decided).max(kept_at_once);
        Ok(Some(Self { log, header, mark, slots, kept, last }))
    }
}

fn other_file(storage: &dyn Storage, image: &str) -> EpochError {
    fault(storage, format!("it was written for another file than the present {image}"))
}

/// Returns the slots behind the last one that the image has, without those whose contents may be missing.
async fn read_slots(log: &Log, mark: &Mark, is_same_boot: bool) -> Result<Vec<Slot>, EpochError> {
    let mut slots = log.read_slots(mark.merged + 1).await?;
    let durable = slots.iter().filter(|slot| slot.durable).map(|slot| slot.number).chain([mark.durable]).max();
    let durable = durable.unwrap_or(mark.durable);
    if slots.last().map_or(mark.merged, |slot| slot.number) < durable {
        return Err(fault(&*log.storage, "it is damaged: an epoch is missing"));
    }
    if !is_same_boot {
        // Of a later one any part may be missing.
        slots.retain(|slot| slot.number <= durable);
    }
    let mut before = mark.epoch;
    for slot in &slots {
        if slot.epoch <= before {
            return Err(fault(&*log.storage, format!("it is damaged: epoch {} comes after {before}", slot.epoch)));
        }
        before = slot.epoch;
    }
    Ok(slots)
}
