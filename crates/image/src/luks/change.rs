//! Key slots that get or lose a passphrase.
//!
//! Law: at any moment one of the passphrases that open the disk now, or the new one, opens it. Key material is durable
//! before its slot is said to be active, and the state of a slot changes with one write of one sector. The material of
//! a slot that is erased is overwritten before the slot is said to be inactive: a slot that is said to be erased is.

use std::sync::Arc;
use std::time::Duration;

use limosa_page::{broken_invariant, to_usize};
use limosa_storage::{Buffer, Storage};

use super::header::{Header, KEY_SLOTS, SLOT_LENGTH, SLOTS};
use super::key_slot::{DEFAULT_ITER_TIME, random};
use super::secret::Passphrase;
use super::unlock::VolumeKey;
use super::volume::{read_header, read_header_at, unlock};
use super::{LuksError, SECTOR};
use crate::error::ImageError;

/// A change of the key slots of an encrypted image.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeySlotChange {
    /// A slot gets a passphrase.
    Activate {
        /// The passphrase.
        passphrase: Passphrase,
        /// The slot; `None`: the first one that is not active.
        slot: Option<usize>,
        /// Time that the key of the slot takes to derive.
        iter_time: Duration,
    },
    /// Slots lose their passphrase.
    Erase {
        /// The slot; `None`: all that `passphrase` opens.
        slot: Option<usize>,
        /// The passphrase of the slot.
        passphrase: Option<Passphrase>,
    },
}

impl KeySlotChange {
    /// A passphrase for the first slot that is not active.
    #[must_use]
    pub const fn activate(passphrase: Passphrase) -> Self {
        Self::Activate { passphrase, slot: None, iter_time: DEFAULT_ITER_TIME }
    }
}

/// A header in a file.
struct Place<'a> {
    file: &'a dyn Storage,
    /// Offset of the header in the file.
    base: u64,
    header: Header,
}

/// Changes the key slots of an image in the format `luks`, durably. `opened_with`: a passphrase that opens it. Without
/// `force` no active slot is overwritten, and one stays active.
///
/// # Errors
/// [`ImageError::Encryption`]: the passphrase is wrong; [`ImageError::Unsupported`]: there is no such slot, or it takes
/// `force`; errors of the storage.
pub async fn change_key_slots(
    file: &dyn Storage,
    opened_with: &Passphrase,
    change: &KeySlotChange,
    force: bool,
) -> Result<(), ImageError> {
    let header = read_header(file).await?;
    Place { file, base: 0, header }.change(opened_with, change, force).await
}

/// Checks that [`change_key_slots`] would be possible. `area`: where a qcow2 image has the header.
pub(crate) async fn check_key_slot_change(
    file: &dyn Storage,
    area: Option<(u64, u64)>,
    opened_with: &Passphrase,
    change: &KeySlotChange,
    force: bool,
) -> Result<(), ImageError> {
    let place = match area {
        Some((at, length)) => Place { file, base: at, header: read_header_at(file, at, length).await? },
        None => Place { file, base: 0, header: read_header(file).await? },
    };
    unlock(file, place.base, &place.header, opened_with).await?;
    match change {
        KeySlotChange::Activate { slot, .. } => place.slot_to_activate(*slot, force).map(drop),
        KeySlotChange::Erase { slot, passphrase } => {
            place.slots_to_erase(*slot, passphrase.as_ref(), force).await.map(drop)
        }
    }
}

/// As [`change_key_slots`], of the header that a qcow2 image has in this area of its file.
pub(crate) async fn change_key_slots_at(
    file: &dyn Storage,
    (at, length): (u64, u64),
    opened_with: &Passphrase,
    change: &KeySlotChange,
    force: bool,
) -> Result<(), ImageError> {
    let header = read_header_at(file, at, length).await?;
    Place { file, base: at, header }.change(opened_with, change, force).await
}

impl Place<'_> {
    fn fault(&self, what: impl Into<String>) -> ImageError {
        ImageError::Unsupported { image: Arc::clone(self.file.name()), what: what.into() }
    }

    async fn change(mut self, opened_with: &Passphrase, change: &KeySlotChange, force: bool) -> Result<(), ImageError> {
        // Also for an erasure: who cannot open the disk does not change who can.
        let unlocked = unlock(self.file, self.base, &self.header, opened_with).await?;
        for slot in 0..self.header.slots.len() {
            // Of a change that was interrupted: its key material is there.
            if self.header.slots.get(slot).is_some_and(|slot| !slot.active && slot.iterations != 0) {
                self.erase(slot).await?;
            }
        }
        match change {
            KeySlotChange::Activate { passphrase, slot, iter_time } => {
                let slot = self.slot_to_activate(*slot, force)?;
                // Its own passphrase may be the only one that is known, and it is gone before the new one is there.
                let spare = (unlocked.slots == [slot]).then(|| self.free()).flatten();
                for slot in spare.into_iter().chain([slot]) {
                    if self.is_active(slot) {
                        self.erase(slot).await?;
                    }
                    self.activate(slot, &unlocked.key, passphrase, *iter_time).await?;
                }
                match spare {
                    Some(spare) => self.erase(spare).await,
                    None => Ok(()),
                }
            }
            KeySlotChange::Erase { slot, passphrase } => {
                for slot in self.slots_to_erase(*slot, passphrase.as_ref(), force).await? {
                    self.erase(slot).await?;
                }
                Ok(())
            }
        }
    }

    fn is_active(&self, slot: usize) -> bool {
        self.header.slots.get(slot).is_some_and(|slot| slot.active)
    }

    fn active(&self) -> usize {
        self.header.slots.iter().filter(|slot| slot.active).count()
    }

    fn free(&self) -> Option<usize> {
        self.header.slots.iter().position(|slot| !slot.active)
    }

    fn admit(&self, slot: usize) -> Result<usize, ImageError> {
        let most = KEY_SLOTS - 1;
        if slot > most { Err(self.fault(format!("key slot {slot}: must be 0 to {most}"))) } else { Ok(slot) }
    }

    fn slot_to_activate(&self, slot: Option<usize>, force: bool) -> Result<usize, ImageError> {
        let Some(slot) = slot else { return self.free().ok_or_else(|| self.fault("all key slots are active")) };
        if self.is_active(self.admit(slot)?) && !force {
            return Err(self.fault(format!("key slot {slot} is active, and is not overwritten; erase it before")));
        }
        Ok(slot)
    }

    async fn slots_to_erase(
        &self,
        slot: Option<usize>,
        passphrase: Option<&Passphrase>,
        force: bool,
    ) -> Result<Vec<usize>, ImageError> {
        let opened = match passphrase {
            Some(passphrase) => match unlock(self.file, self.base, &self.header, passphrase).await {
                Ok(unlocked) => Some(unlocked.slots),
                Err(ImageError::Encryption { source: LuksError::Passphrase, .. }) => Some(Vec::new()),
                Err(error) => return Err(error),
            },
            None => None,
        };
        let slots = match (slot, opened) {
            (None, None) => return Err(self.fault("to erase key slots takes the slot or its passphrase")),
            (Some(slot), Some(opened)) if !opened.contains(&self.admit(slot)?) => {
                return Err(self.fault(format!("key slot {slot} does not open with the old passphrase")));
            }
            (Some(slot), _) => vec![self.admit(slot)?],
            (None, Some(opened)) if opened.is_empty() => {
                return Err(self.fault("no key slot opens with the old passphrase"));
            }
            (None, Some(opened)) => opened,
        };
        if let Some(slot) = slots.iter().find(|slot| !force && !self.is_active(**slot)) {
            return Err(self.fault(format!("key slot {slot} is not active")));
        }
        let left = self.active() - slots.iter().filter(|slot| self.is_active(**slot)).count();
        if left == 0 && !force {
            return Err(self.fault("no key slot would be left, and all data would be lost"));
        }
        Ok(slots)
    }

    /// Gives a slot that is not active a passphrase, durably.
    async fn activate(
        &mut self,
        slot: usize,
        key: &VolumeKey,
        passphrase: &Passphrase,
        iter_time: Duration,
    ) -> Result<(), ImageError> {
        let image = self.file.name();
        let material = self.header.set_slot(slot, key, passphrase.bytes(), iter_time);
        let material = material.map_err(|source| ImageError::Encryption { image: Arc::clone(image), source })?;
        self.write_material(slot, &material).await?;
        // The entry may be in two sectors: first all of it but the state, which is in one.
        self.header.set_active(slot, false);
        self.write_entry(slot).await?;
        self.header.set_active(slot, true);
        self.write_entry(slot).await
    }

    /// Overwrites a slot's key material, and takes its passphrase away, durably.
    async fn erase(&mut self, slot: usize) -> Result<(), ImageError> {
        let place = self.header.slots.get(slot).map(|slot| self.header.key_material(slot));
        let place = place.ok_or_else(|| broken_invariant("a slot that is erased is one of the header's"))?;
        let mut noise = vec![0; to_usize(place.end - place.start)];
        random(&mut noise).map_err(|source| ImageError::Encryption { image: Arc::clone(self.file.name()), source })?;
        // First it does not count any more: whoever counts slots must not count one that opens with nothing.
        if self.is_active(slot) {
            self.header.set_active(slot, false);
            self.write_entry(slot).await?;
        }
        self.write_material(slot, &noise).await?;
        self.header.clear_slot(slot);
        self.write_entry(slot).await
    }

    async fn write_material(&self, slot: usize, material: &[u8]) -> Result<(), ImageError> {
        let place = self.header.slots.get(slot).map(|slot| self.header.key_material(slot));
        let place = place.ok_or_else(|| broken_invariant("a slot that is written is one of the header's"))?;
        self.file.write(self.base + place.start, Buffer::from_slice(material).into()).await?;
        Ok(self.file.flush().await?)
    }

    /// Writes a slot's entry in the header, durably.
    async fn write_entry(&self, slot: usize) -> Result<(), ImageError> {
        let (bytes, start) = (self.header.to_bytes(), SLOTS + slot * SLOT_LENGTH);
        // From the end on: the state is in the entry's first sector.
        let cut = (start / SECTOR + 1) * SECTOR;
        let parts = [cut.min(start + SLOT_LENGTH)..start + SLOT_LENGTH, start..cut.min(start + SLOT_LENGTH)];
        for part in parts.into_iter().filter(|part| !part.is_empty()) {
            let at = self.base + part.start as u64;
            let part = bytes.get(part).ok_or_else(|| broken_invariant("a slot's entry is in the header"))?;
            self.file.write(at, Buffer::from_slice(part).into()).await?;
            self.file.flush().await?;
        }
        Ok(())
    }
}
