//! The commands of a keeper: beginning protection, sealing, keeping and dropping epochs, and ending it.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use limosa_page::to_u64;
use limosa_storage::{Operation, Storage, StorageError};
use parking_lot::{Mutex, MutexGuard};
use uuid::Uuid;

use super::EpochError;
use super::apply::apply;
use super::disk::EpochDisk;
use super::extents::Extents;
use super::format::{Header, List, Mark, NUMBERS, SECTOR, SLOTS, Slot, Stage, new_id};
use super::log::{Log, Stored, entries};
use super::space::{Segment, Space};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::requests::Requests;
use crate::setters::setters;

/// Epochs that may be sealed and not kept: a keeper that stores one while the next one is taken needs two.
const SEALED_MAX: u64 = 64;
/// Ranges that all epochs have together which are not in the image: some 100 bytes of memory each.
pub(super) const EXTENTS_MAX: usize = 1 << 20;
/// Bytes of a log, if nothing else is asked for.
const LIMIT: u64 = 4 << 30;

/// Options of protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EpochOptions {
    /// The number of the first epoch, at least 1 and less than 2^62. The image is as of the epoch before.
    pub first: u64,
    /// Identifies the time since the machine was booted; 0 if that is unknown. After a power cut only what was kept
    /// durably counts.
    pub boot: [u64; 2],
    /// Identifies the image's file. A log is not brought to another file.
    pub file: [u64; 2],
    /// The most bytes of the log. Writes that find no room fail.
    pub limit: u64,
    /// Identifies the log, and must be new; `None`: it is made up.
    pub log: Option<Uuid>,
}

impl Default for EpochOptions {
    fn default() -> Self {
        Self { first: 1, boot: [0; 2], file: [0; 2], limit: LIMIT, log: None }
    }
}

setters!(EpochOptions { first: u64, boot: [u64; 2], file: [u64; 2], limit: u64, log: Option<Uuid> });

/// The epochs of a disk at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EpochStatus {
    /// Identifies the log: that of another time of protection has another one.
    pub log: Uuid,
    /// The open epoch.
    pub open: u64,
    /// Epochs that are sealed and neither prepared nor kept.
    pub sealed: usize,
    /// The last epoch that was prepared or kept.
    pub prepared: u64,
    /// The last epoch that was kept.
    pub kept: u64,
    /// The last epoch that the image has.
    pub merged: u64,
    /// Bytes of the log in use.
    pub log_bytes: u64,
    /// Ranges in the index.
    pub extents: usize,
}

/// An epoch that takes no more writes.
#[derive(Debug)]
pub(super) struct Epoch {
    number: u64,
    extents: Extents<Stored>,
}

/// A prepared or kept epoch that the image does not have yet.
#[derive(Debug)]
struct Logged {
    slot: u64,
    epoch: Arc<Epoch>,
    /// Keep its lists in the log.
    _lists: Vec<Arc<Segment>>,
}

/// The epochs.
#[derive(Debug)]
pub(super) struct State {
    pub(super) stage: Stage,
    pub(super) open: u64,
    /// Writes of the open epoch.
    pub(super) writes: Extents<Stored>,
    sealed: VecDeque<Arc<Epoch>>,
    /// Those that are kept come first.
    logged: VecDeque<Logged>,
    last_prepared: u64,
    last_kept: u64,
    /// The last decision that was written, and the last one that is durable; 0: none.
    decision: u64,
    durable_decision: u64,
    /// The last slot that is durable with all before it.
    durable: u64,
    merged: u64,
    /// Writes of all epochs that the image does not have yet: the newest of each range.
    pub(super) current: Extents<Stored>,
    /// Ranges of epochs that are sealed or kept.
    pub(super) closed_extents: usize,
    /// Segments to which writes that were given up may still be in flight.
    pub(super) lost: Vec<Arc<Segment>>,
}

/// The parts of an [`EpochDisk`].
#[derive(Debug)]
pub(super) struct Protection {
    pub(super) image: Arc<dyn Disk>,
    pub(super) log: Log,
    pub(super) space: Space,
    pub(super) state: Mutex<State>,
    pub(super) requests: Requests,
    /// Writes in flight.
    pub(super) writing: AtomicU64,
    /// Held by who keeps epochs: the next slot.
    slots: async_lock::Mutex<u64>,
    /// Held by who writes to the image: the last mark.
    marks: async_lock::Mutex<Mark>,
}

impl EpochDisk {
    /// Begins protection of an image: from now on writes belong to epochs. The log is empty, and nobody else uses the
    /// image.
    ///
    /// # Errors
    /// The image is read-only; there is no such first epoch; the image cannot be flushed, or the log not be written.
    pub async fn begin(
        image: Arc<dyn Disk>,
        log: Arc<dyn Storage>,
        options: &EpochOptions,
    ) -> Result<Arc<Self>, EpochError> {
        if image.is_read_only() {
            return Err(ImageError::ReadOnly { image: Arc::clone(image.name()) }.into());
        }
        let EpochOptions { first, boot, file, limit, log: id } = *options;
        if !(1..NUMBERS).contains(&first) {
            let what = format!("its first epoch cannot have the number {first}");
            return Err(ImageError::Unsupported { image: Arc::clone(image.name()), what }.into());
        }
        let (id, kept) = (id.map_or_else(new_id, Uuid::into_bytes), first - 1);
        let log = Log { storage: log, id };
        let mark = Mark { id, number: 1, durable: 0, merged: 0, epoch: kept, stage: Stage::Open };
        // The image is the epoch before the first one.
        image.flush().await?;
        log.write_mark(&mark).await.map_err(ImageError::from)?;
        log.flush().await.map_err(ImageError::from)?;
        // A log without a header has nothing.
        let header = Header { id, boot, file, disk: image.len() };
        log.write(0, &header.encode()).await.map_err(ImageError::from)?;
        log.flush().await.map_err(ImageError::from)?;
        let state = State {
            stage: Stage::Open,
            open: first,
            writes: Extents::default(),
            sealed: VecDeque::new(),
            logged: VecDeque::new(),
            last_prepared: kept,
            last_kept: kept,
            decision: 0,
            durable_decision: 0,
            durable: 0,
            merged: kept,
            current: Extents::default(),
            closed_extents: 0,
            lost: Vec::new(),
        };
        Ok(Arc::new(Self(Protection {
            image,
            log,
            space: Space::new(limit),
            state: Mutex::new(state),
            requests: Requests::default(),
            writing: AtomicU64::new(0),
            slots: async_lock::Mutex::new(1),
            marks: async_lock::Mutex::new(mark),
        })))
    }

    /// Returns the image that it stands on.
    #[must_use]
    pub fn image(&self) -> &Arc<dyn Disk> {
        &self.0.image
    }

    /// Returns the state of its epochs.
    #[must_use]
    pub fn status(&self) -> EpochStatus {
        let state = self.0.state.lock();
        EpochStatus {
            log: Uuid::from_bytes(self.0.log.id),
            open: state.open,
            sealed: state.sealed.len(),
            prepared: state.last_prepared,
            kept: state.last_kept,
            merged: state.merged,
            log_bytes: self.0.space.used(),
            extents: state.extents(),
        }
    }

    /// Seals the open epoch: all writes that were answered before belong to it, and later ones to the next. Writes
    /// nothing and waits for nothing.
    ///
    /// # Errors
    /// [`EpochError::NotOpen`]: another one is open; [`EpochError::InFlight`]; [`EpochError::TooManySealed`];
    /// [`EpochError::Over`]. Nothing has changed then.
    pub fn seal(&self, epoch: u64) -> Result<(), EpochError> {
        let disk = || Arc::clone(self.0.image.name());
        let mut state = self.0.opened()?;
        if state.open != epoch {
            return Err(EpochError::NotOpen { disk: disk(), epoch, open: state.open });
        }
        let writes = self.0.writing.load(Ordering::SeqCst);
        if writes > 0 {
            return Err(EpochError::InFlight { disk: disk(), epoch, writes });
        }
        let sealed = epoch - 1 - state.last_kept;
        if sealed >= SEALED_MAX {
            return Err(EpochError::TooManySealed { disk: disk(), epoch, sealed });
        }
        state.seal();
        Ok(())
    }

    /// Prepares a sealed epoch and those before it: after a kill, and with `durable` after a power cut, too, the image
    /// can become as of it, and as of the last one that was kept as well. One that is prepared or kept already stays
    /// so.
    ///
    /// # Errors
    /// [`EpochError::NotSealed`]; [`EpochError::Over`]; the log cannot be written: the epoch stays sealed.
    pub async fn prepare(&self, epoch: u64, durable: bool) -> Result<(), EpochError> {
        self.log(&mut *self.0.slots.lock().await, epoch, (durable, false)).await
    }

    /// Keeps a sealed or prepared epoch and those before it: their writes are the image's from now on. `durable`: they
    /// are so after a power cut, too; otherwise after a kill. One that is kept already stays so, and may become
    /// durable.
    ///
    /// # Errors
    /// [`EpochError::NotSealed`]; [`EpochError::Over`]; the log cannot be written: the epoch is not kept.
    pub async fn keep(&self, epoch: u64, durable: bool) -> Result<(), EpochError> {
        let mut next = self.0.slots.lock().await;
        self.log(&mut next, epoch, (durable, true)).await?;
        let is_undecided = self.0.opened()?.last_kept < epoch;
        if is_undecided {
            self.0.log.write_decision(epoch).await.map_err(ImageError::from)?;
            let mut state = self.0.state.lock();
            (state.decision, state.last_kept) = (epoch, epoch);
        }
        if durable { self.0.flush_decision().await } else { Ok(()) }
    }

    /// Writes slots for the sealed epochs up to this one.
    async fn log(&self, next: &mut u64, epoch: u64, (durable, kept): (bool, bool)) -> Result<(), EpochError> {
        let sealed = self.0.opened()?.sealed_to(epoch, self.0.image.name())?;
        for (number, epoch) in sealed.iter().enumerate() {
            if self.is_pressed() {
                self.merge().await?;
            }
            let is_last = number + 1 == sealed.len();
            self.0.log_one(next, epoch, (durable && is_last, kept)).await?;
        }
        // Who merges holds the marks for long.
        let is_durable = self.0.state.lock().has_durable_slots();
        if durable && !is_durable {
            self.0.make_durable(&mut *self.0.marks.lock().await).await?;
        }
        Ok(())
    }

    /// Whether kept epochs must be brought to the image before more are kept.
    fn is_pressed(&self) -> bool {
        let state = self.0.state.lock();
        self.0.space.is_scarce() || state.extents() > EXTENTS_MAX / 2 || to_u64(state.logged.len()) + 2 >= SLOTS
    }

    /// Brings kept epochs to the image, durably, and frees their space in the log. Returns the bytes that it wrote.
    /// Requests continue meanwhile.
    ///
    /// # Errors
    /// The image or the log cannot be read, written or flushed: the epochs stay in the log, and can be merged later.
    pub async fn merge(&self) -> Result<u64, EpochError> {
        self.0.merge(&mut *self.0.marks.lock().await).await
    }

    /// Ends protection: seals and keeps the open epoch, and brings all to the image, durably. No request is in flight.
    /// The log is not needed any more then, and this disk fails.
    ///
    /// # Errors
    /// As of [`keep`](Self::keep) and [`merge`](Self::merge): protection continues.
    pub async fn end(&self) -> Result<(), EpochError> {
        let epoch = self.0.opened()?.open;
        self.seal(epoch)?;
        self.keep(epoch, true).await?;
        let mut mark = self.0.marks.lock().await;
        self.0.merge(&mut mark).await?;
        self.0.finish(&mut mark, Stage::Ended).await?;
        self.0.state.lock().stage = Stage::Ended;
        Ok(())
    }

    /// Drops all writes after an epoch, which is kept first if it is sealed or prepared. All requests fail from now on,
    /// and the image is as of that epoch, durably.
    ///
    /// # Errors
    /// [`EpochError::NotSealed`]: it is neither sealed nor the last one that was kept; nothing has changed then. The
    /// image or the log cannot be written: requests fail all the same, and dropping can be tried again.
    pub async fn drop_after(&self, epoch: u64) -> Result<(), EpochError> {
        let is_dropped = {
            let state = self.0.state.lock();
            state.stage == Stage::Dropped && state.last_kept == epoch
        };
        if !is_dropped {
            self.keep(epoch, true).await?;
            // Nobody keeps a later one meanwhile.
            let _keeping = self.0.slots.lock().await;
            let mut state = self.0.opened()?;
            if state.last_kept != epoch {
                return Err(state.not_sealed(epoch, self.0.image.name()));
            }
            state.stage = Stage::Dropped;
            state.sealed.clear();
            state.logged.retain(|logged| logged.epoch.number <= epoch);
            state.writes = Extents::default();
        }
        let mut mark = self.0.marks.lock().await;
        self.0.merge(&mut mark).await?;
        self.0.finish(&mut mark, Stage::Dropped).await
    }
}

impl State {
    pub(super) fn extents(&self) -> usize {
        self.writes.len() + self.closed_extents
    }

    /// The last slot that was written and whose epoch the image does not have; 0: none.
    fn last_slot(&self) -> u64 {
        self.logged.back().map_or(0, |logged| logged.slot)
    }

    fn has_durable_slots(&self) -> bool {
        self.last_slot() <= self.durable
    }

    fn seal(&mut self) {
        let extents = std::mem::take(&mut self.writes);
        self.closed_extents += extents.len();
        self.sealed.push_back(Arc::new(Epoch { number: self.open, extents }));
        self.open += 1;
    }

    /// The sealed epochs up to this one; none: it was prepared, or it is the last one that was kept.
    fn sealed_to(&self, epoch: u64, disk: &Arc<str>) -> Result<Vec<Arc<Epoch>>, EpochError> {
        if !(self.last_kept..self.open).contains(&epoch) {
            return Err(self.not_sealed(epoch, disk));
        }
        Ok(self.sealed.iter().filter(|sealed| sealed.number <= epoch).cloned().collect())
    }

    fn not_sealed(&self, epoch: u64, disk: &Arc<str>) -> EpochError {
        EpochError::NotSealed { disk: Arc::clone(disk), epoch, kept: self.last_kept, open: self.open }
    }
}

impl Protection {
    /// The state, if writes go to an epoch.
    pub(super) fn opened(&self) -> Result<MutexGuard<'_, State>, EpochError> {
        let state = self.state.lock();
        match state.stage {
            Stage::Open => Ok(state),
            Stage::Dropped | Stage::Ended => Err(EpochError::Over { disk: Arc::clone(self.image.name()) }),
        }
    }

    /// A log that has no room.
    pub(super) fn no_room(&self, length: u64) -> ImageError {
        let full = io::Error::from(io::ErrorKind::StorageFull);
        StorageError::for_request(Operation::Allocate, self.log.storage.name(), 0, length, full).into()
    }

    /// Prepares or keeps the first of the sealed epochs.
    async fn log_one(
        &self,
        next: &mut u64,
        sealed: &Arc<Epoch>,
        (durable, kept): (bool, bool),
    ) -> Result<(), EpochError> {
        let mut segments = Vec::new();
        let written = self.write_slot(*next, sealed, (durable, kept), &mut segments).await;
        let mut state = self.state.lock();
        if let Err(error) = written {
            // The slot may be there: what it leads to is not overwritten, until it is written again.
            state.lost.append(&mut segments);
            return Err(error.into());
        }
        state.sealed.pop_front();
        state.logged.push_back(Logged { slot: *next, epoch: Arc::clone(sealed), _lists: segments });
        state.last_prepared = sealed.number;
        if kept {
            state.last_kept = sealed.number;
        }
        if durable {
            state.durable = *next;
        }
        *next += 1;
        Ok(())
    }

    async fn write_slot(
        &self,
        number: u64,
        epoch: &Epoch,
        (durable, kept): (bool, bool),
        segments: &mut Vec<Arc<Segment>>,
    ) -> Result<(), ImageError> {
        let mut list = 0;
        for entries in Log::lists(&epoch.extents) {
            let bytes = List { next: list, entries }.encode(&self.log.id, number);
            let length = to_u64(bytes.len().next_multiple_of(SECTOR));
            let place = self.space.allocate_whole(length).ok_or_else(|| self.no_room(length))?;
            segments.push(place.segment);
            self.log.write(place.at, &bytes).await?;
            list = place.at;
        }
        if durable {
            self.log.flush().await?;
        }
        self.log.write_slot(&Slot { id: self.log.id, number, epoch: epoch.number, durable, kept, list }).await?;
        if durable {
            self.log.flush().await?;
        }
        Ok(())
    }

    /// Makes what was decided durable in the log.
    async fn flush_decision(&self) -> Result<(), EpochError> {
        let (written, durable) = {
            let state = self.state.lock();
            (state.decision, state.durable_decision)
        };
        if written > durable {
            self.log.flush().await.map_err(ImageError::from)?;
            let mut state = self.state.lock();
            state.durable_decision = state.durable_decision.max(written);
        }
        Ok(())
    }

    /// Makes all epochs that have a slot durable in the log.
    async fn make_durable(&self, mark: &mut Mark) -> Result<(), EpochError> {
        let (last, durable) = {
            let state = self.state.lock();
            (state.last_slot(), state.durable)
        };
        if last > durable {
            self.log.flush().await.map_err(ImageError::from)?;
            self.advance(mark, Mark { durable: last, ..*mark }).await?;
            let mut state = self.state.lock();
            state.durable = state.durable.max(last);
        }
        Ok(())
    }

    /// Writes the next mark, durably.
    async fn advance(&self, mark: &mut Mark, next: Mark) -> Result<(), EpochError> {
        let next = Mark { number: mark.number + 1, ..next };
        self.log.write_mark(&next).await.map_err(ImageError::from)?;
        self.log.flush().await.map_err(ImageError::from)?;
        *mark = next;
        Ok(())
    }

    async fn merge(&self, mark: &mut Mark) -> Result<u64, EpochError> {
        let (last, epochs) = {
            let state = self.state.lock();
            let is_kept = |logged: &&Logged| logged.epoch.number <= state.last_kept;
            let kept: Vec<_> = state.logged.iter().take_while(is_kept).collect();
            let last = kept.last().map(|kept| (kept.slot, kept.epoch.number));
            (last, kept.into_iter().map(|kept| Arc::clone(&kept.epoch)).collect::<Vec<_>>())
        };
        let Some((slot, number)) = last else { return Ok(0) };
        // What the image gets must not be forgotten any more: the image could have a part of it.
        self.make_durable(mark).await?;
        self.flush_decision().await?;
        let mut newest = Extents::default();
        for epoch in &epochs {
            epoch.extents.iter().for_each(|(range, stored)| newest.insert(range, stored.clone()));
        }
        let bytes = apply(&self.log.storage, &*self.image, &entries(&newest)).await?;
        self.image.flush().await?;
        let durable = mark.durable.max(slot);
        // Their places in the log are used again only behind this.
        self.advance(mark, Mark { durable, merged: slot, epoch: number, ..*mark }).await?;
        let mut state = self.state.lock();
        while state.logged.front().is_some_and(|logged| logged.slot <= slot) {
            if let Some(merged) = state.logged.pop_front() {
                state.closed_extents = state.closed_extents.saturating_sub(merged.epoch.extents.len());
            }
        }
        state.merged = number;
        state.current.retain(|stored| stored.epoch > number);
        Ok(bytes)
    }

    /// Says durably that no more writes come.
    async fn finish(&self, mark: &mut Mark, stage: Stage) -> Result<(), EpochError> {
        let next = Mark { stage, ..*mark };
        self.advance(mark, next).await
    }
}
