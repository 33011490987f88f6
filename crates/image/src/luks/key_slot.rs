//! New headers and new key slots.

use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use super::algorithm::{CipherAlgorithm, CipherMode, IvGenerator};
use super::cipher::{SECTOR, SectorCipher};
use super::hash::HashAlgorithm;
use super::header::{DIGEST, Header, KEY_SLOTS, Limits, SALT, Slot};
use super::unlock::{VolumeKey, key_digest};
use super::{LuksError, anti_forensic};

/// Stripes of new key slots, as all tools have them.
pub const STRIPES: u32 = 4000;
/// Time that the key of a new slot takes to derive.
pub const DEFAULT_ITER_TIME: Duration = Duration::from_secs(2);
/// The fewest iterations of new slots.
const FEWEST: u32 = 1000;
/// Offsets of key material are multiples of this, in sectors: 4 KiB.
const ALIGNMENT: u64 = 8;

/// The choices of a new header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewHeader {
    /// The cipher.
    pub cipher: CipherAlgorithm,
    /// Its mode.
    pub mode: CipherMode,
    /// The generator of initialization vectors.
    pub generator: IvGenerator,
    /// The hash of PBKDF2 and of the stripes.
    pub hash: HashAlgorithm,
    /// Time that the key of the first slot takes to derive.
    pub iter_time: Duration,
}

impl Default for NewHeader {
    fn default() -> Self {
        Self {
            cipher: CipherAlgorithm::Aes256,
            mode: CipherMode::Xts,
            generator: IvGenerator::Plain64,
            hash: HashAlgorithm::Sha256,
            iter_time: DEFAULT_ITER_TIME,
        }
    }
}

crate::setters::setters!(NewHeader {
    cipher: CipherAlgorithm,
    mode: CipherMode,
    generator: IvGenerator,
    hash: HashAlgorithm,
    iter_time: Duration,
});

impl NewHeader {
    /// Returns the length of the header with all key material in bytes: the offset of the disk.
    #[must_use]
    pub const fn length(&self) -> u64 {
        (ALIGNMENT + KEY_SLOTS as u64 * self.slot_sectors()) * SECTOR as u64
    }

    const fn slot_sectors(&self) -> u64 {
        let bytes = (self.cipher.key_length() * self.mode.keys()) as u64 * STRIPES as u64;
        bytes.div_ceil(SECTOR as u64).next_multiple_of(ALIGNMENT)
    }

    /// Makes a header and a random volume key. No slot has a passphrase yet.
    ///
    /// # Errors
    /// [`LuksError::Unsupported`]: the choices exclude each other; [`LuksError::Random`].
    pub fn make(&self) -> Result<(Header, VolumeKey), LuksError> {
        let mut key = Zeroizing::new(vec![0; self.cipher.key_length() * self.mode.keys()]);
        random(&mut key)?;
        // Whether there is such a cipher.
        SectorCipher::new(self.cipher, self.mode, self.generator, &key)?;
        let mut key_salt = [0; SALT];
        random(&mut key_salt)?;
        let sectors = |sectors: u64| u32::try_from(sectors).map_err(|_| LuksError::Options("header too long".into()));
        let mut slots = Vec::new();
        for index in 0..KEY_SLOTS as u64 {
            slots.push(Slot {
                active: false,
                iterations: 0,
                salt: [0; SALT],
                key_sector: sectors(ALIGNMENT + index * self.slot_sectors())?,
                stripes: STRIPES,
            });
        }
        let slots: [Slot; KEY_SLOTS] =
            slots.try_into().map_err(|_| LuksError::Options("a header has eight key slots".into()))?;
        let mut header = Header {
            cipher: self.cipher,
            mode: self.mode,
            generator: self.generator,
            hash: self.hash,
            payload_sector: sectors(self.length() / SECTOR as u64)?,
            key_digest: [0; DIGEST],
            key_salt,
            // An eighth: it is checked for each slot, and adds no strength to a random key.
            key_iterations: iterations_for(self.hash, self.iter_time / 8, DIGEST),
            uuid: uuid::Uuid::new_v4().to_string(),
            slots,
        };
        header.key_digest = key_digest(&header, &key);
        Ok((header, VolumeKey::new(key)))
    }
}

impl Header {
    /// Gives a slot a passphrase. Returns the key material, which belongs at [`key_material`](Self::key_material):
    /// it has to be durable before the header is written.
    ///
    /// # Errors
    /// [`LuksError::Options`]: there is no such slot; [`LuksError::Random`].
    pub fn set_slot(
        &mut self,
        index: usize,
        key: &VolumeKey,
        passphrase: &[u8],
        iter_time: Duration,
    ) -> Result<Vec<u8>, LuksError> {
        let (hash, length) = (self.hash, self.key_length());
        let mut salt = [0; SALT];
        random(&mut salt)?;
        let slot = self.slots.get_mut(index).ok_or_else(|| LuksError::Options(format!("no key slot {index}")))?;
        slot.salt = salt;
        slot.iterations = iterations_for(hash, iter_time, length);
        slot.active = true;
        let (iterations, stripes) = (slot.iterations, usize::try_from(slot.stripes).unwrap_or(usize::MAX));
        let mut derived = Zeroizing::new(vec![0; length]);
        hash.derive(passphrase, &salt, iterations, &mut derived);
        let split = anti_forensic::split(key.bytes(), stripes, hash)?;
        // Made longer in place, it would leave a copy that is not wiped.
        let mut material = vec![0; split.len().next_multiple_of(SECTOR)];
        material.iter_mut().zip(split.iter()).for_each(|(byte, split)| *byte = *split);
        SectorCipher::new(self.cipher, self.mode, self.generator, &derived)?.encrypt(0, &mut material);
        Ok(material)
    }

    /// Has a slot count as active or not.
    pub(super) fn set_active(&mut self, index: usize, active: bool) {
        if let Some(slot) = self.slots.get_mut(index) {
            slot.active = active;
        }
    }

    /// Takes a slot's passphrase away. Its key material has to be overwritten, too.
    pub fn clear_slot(&mut self, index: usize) {
        if let Some(slot) = self.slots.get_mut(index) {
            slot.active = false;
            slot.iterations = 0;
            slot.salt = [0; SALT];
        }
    }
}

/// Fills all of it with random bytes of the kernel.
pub(super) fn random(bytes: &mut [u8]) -> Result<(), LuksError> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let flags = rustix::rand::GetRandomFlags::empty();
        let done = rustix::rand::getrandom(&mut *rest, flags).map_err(|error| LuksError::Random(error.to_string()))?;
        rest = rest.get_mut(done..).unwrap_or_default();
    }
    Ok(())
}

/// Returns how many iterations of PBKDF2 take this long here, for a key of this length: at least 1,000.
#[must_use]
pub fn iterations_for(hash: HashAlgorithm, time: Duration, key_length: usize) -> u32 {
    let mut key = Zeroizing::new(vec![0; key_length]);
    let mut tried = FEWEST;
    loop {
        let start = Instant::now();
        hash.derive(b"passphrase", &[0; SALT], tried, &mut key);
        let taken = start.elapsed();
        // Long enough to be measured.
        if taken >= Duration::from_millis(20).min(time) || tried >= 1 << 24 {
            let per = taken.as_secs_f64() / f64::from(tried);
            let count = time.as_secs_f64() / per.max(1e-9);
            let most = f64::from(Limits::default().iterations);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to what fits")]
            return count.clamp(f64::from(FEWEST), most) as u32;
        }
        tried = tried.saturating_mul(4);
    }
}
