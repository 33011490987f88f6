//! The volume key, found with a passphrase.
//!
//! Law: every active slot is tried, also after one has opened, and digests are compared in constant time. So the time
//! does not tell which slot a passphrase belongs to. Slots are tried in parallel, on as many threads as there are
//! processors.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fmt, thread};

use limosa_page::to_usize;
use parking_lot::Mutex;
use subtle::ConstantTimeEq as _;
use zeroize::Zeroizing;

use super::cipher::SectorCipher;
use super::header::{DIGEST, Header, Slot};
use super::{LuksError, anti_forensic};

/// The key of a disk. It is wiped when the last clone is dropped, and never printed.
#[derive(Clone)]
pub struct VolumeKey(Arc<Zeroizing<Vec<u8>>>);

impl VolumeKey {
    pub(super) fn new(key: Zeroizing<Vec<u8>>) -> Self {
        Self(Arc::new(key))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for VolumeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VolumeKey")
    }
}

/// The volume key that a passphrase opens, and its slots.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Unlocked {
    /// The volume key.
    pub key: VolumeKey,
    /// The slots that the passphrase opens: at least one.
    pub slots: Vec<usize>,
}

impl Header {
    /// Finds the volume key. `material` has the key material of each slot: empty for slots that are not active.
    ///
    /// # Errors
    /// [`LuksError::Passphrase`]: it opens no slot; [`LuksError::Header`]: key material is cut off.
    pub fn unlock(&self, material: &[Vec<u8>], passphrase: &[u8]) -> Result<Unlocked, LuksError> {
        let active: Vec<(usize, &Slot)> = self.slots.iter().enumerate().filter(|(_, slot)| slot.active).collect();
        for (index, slot) in &active {
            let place = self.key_material(slot);
            if material.get(*index).is_none_or(|bytes| bytes.len() as u64 != place.end - place.start) {
                return Err(LuksError::Header(format!("key slot {index}: its key material is cut off")));
            }
        }
        let found: Mutex<Vec<(usize, VolumeKey)>> = Mutex::new(Vec::new());
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let work = || {
            while let Some((index, slot)) = active.get(next.fetch_add(1, Ordering::Relaxed)) {
                let bytes = material.get(*index).map(Vec::as_slice).unwrap_or_default();
                match self.open(slot, bytes, passphrase) {
                    Ok(Some(key)) => found.lock().push((*index, key)),
                    Ok(None) => {}
                    Err(error) => *failed.lock() = Some(error),
                }
            }
        };
        let helpers = thread::available_parallelism().map_or(1, usize::from).min(active.len()).saturating_sub(1);
        thread::scope(|scope| {
            for _ in 0..helpers {
                // Without a helper it takes longer.
                let _ = thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        if let Some(error) = failed.into_inner() {
            return Err(error);
        }
        let mut found = found.into_inner();
        found.sort_by_key(|(index, _)| *index);
        let slots = found.iter().map(|(index, _)| *index).collect();
        let (_, key) = found.into_iter().next().ok_or(LuksError::Passphrase)?;
        Ok(Unlocked { key, slots })
    }

    /// The volume key of one slot, if the passphrase opens it.
    fn open(&self, slot: &Slot, material: &[u8], passphrase: &[u8]) -> Result<Option<VolumeKey>, LuksError> {
        let length = self.key_length();
        let mut derived = Zeroizing::new(vec![0; length]);
        self.hash.derive(passphrase, &slot.salt, slot.iterations, &mut derived);
        let mut material = Zeroizing::new(material.to_vec());
        SectorCipher::new(self.cipher, self.mode, self.generator, &derived)?.decrypt(0, &mut material);
        let stripes = material.get(..length * to_usize(slot.stripes.into())).unwrap_or_default();
        let key = anti_forensic::merge(stripes, length, self.hash);
        let is_it: bool = key_digest(self, &key).ct_eq(&self.key_digest).into();
        Ok(is_it.then(|| VolumeKey::new(key)))
    }

    /// Returns the cipher of the disk.
    ///
    /// # Errors
    /// [`LuksError::Unsupported`]: there is no such cipher.
    pub fn sector_cipher(&self, key: &VolumeKey) -> Result<SectorCipher, LuksError> {
        SectorCipher::new(self.cipher, self.mode, self.generator, key.bytes())
    }
}

/// The digest that tells whether a key is the right one.
pub(super) fn key_digest(header: &Header, key: &[u8]) -> [u8; DIGEST] {
    let mut digest = [0; DIGEST];
    header.hash.derive(key, &header.key_salt, header.key_iterations, &mut digest);
    digest
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::header::{KEY_SLOTS, Layout, Limits};
    use super::super::key_slot::NewHeader;
    use super::super::{CipherMode, HashAlgorithm};
    use super::*;

    #[test]
    fn every_passphrase_opens_its_slots_and_no_other_does() {
        let options = NewHeader::default().iter_time(Duration::from_millis(1)).hash(HashAlgorithm::Ripemd160);
        let (mut header, key) = options.mode(CipherMode::Cbc).make().unwrap();
        let mut material = vec![Vec::new(); KEY_SLOTS];
        for (slot, passphrase) in [(0, "one"), (3, "two"), (7, "one")] {
            material[slot] = header.set_slot(slot, &key, passphrase.as_bytes(), Duration::ZERO).unwrap();
        }
        let bytes = header.to_bytes();
        assert_eq!(
            Header::parse(&bytes, Layout::Detached(options.length() * 2), Limits::default()),
            Ok(header.clone())
        );
        let opened = |header: &Header, passphrase: &str| {
            header.unlock(&material, passphrase.as_bytes()).map(|found| (found.slots, found.key.bytes().to_vec()))
        };
        assert_eq!(opened(&header, "one"), Ok((vec![0, 7], key.bytes().to_vec())));
        assert_eq!(opened(&header, "two"), Ok((vec![3], key.bytes().to_vec())));
        assert_eq!(opened(&header, "three"), Err(LuksError::Passphrase));
        header.clear_slot(3);
        assert_eq!(opened(&header, "two"), Err(LuksError::Passphrase));
        let mut cut = material.clone();
        cut[7].pop();
        assert!(matches!(header.unlock(&cut, b"one"), Err(LuksError::Header(_))));
        assert_eq!(format!("{key:?}"), "VolumeKey");
    }
}
