//! The header: 592 bytes, and where the key material is.

use std::ops::Range;

use super::LuksError;
use super::algorithm::{CipherAlgorithm, CipherMode, IvGenerator, parse_mode};
use super::cipher::SECTOR;
use super::hash::HashAlgorithm;

/// The first bytes of a header.
pub const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
/// Bytes of a header, without the key material.
pub const HEADER_LENGTH: usize = 592;
/// The number of key slots.
pub const KEY_SLOTS: usize = 8;

/// Bytes of a salt, and of the key's digest.
pub(super) const SALT: usize = 32;
pub(super) const DIGEST: usize = 20;
/// States of a key slot.
const ACTIVE: u32 = 0x00ac_71f3;
const INACTIVE: u32 = 0x0000_dead;
/// Offsets of fields.
const CIPHER: usize = 8;
const MODE: usize = 40;
const HASH: usize = 72;
const PAYLOAD: usize = 104;
const KEY_BYTES: usize = 108;
const KEY_DIGEST: usize = 112;
const KEY_SALT: usize = 132;
const KEY_ITERATIONS: usize = 164;
const UUID: usize = 168;
pub(super) const SLOTS: usize = 208;
pub(super) const SLOT_LENGTH: usize = 48;

/// The most work that a header may ask for. Without limits a header of 592 bytes keeps a processor busy for hours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Iterations of PBKDF2 of a slot, and of the key's digest. The default, 2³⁰ / 10, takes about half a minute on a
    /// fast processor; stock tools choose about two seconds.
    pub iterations: u32,
    /// Stripes of a slot. The default is 4,000, the number of all tools.
    pub stripes: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { iterations: (1 << 30) / 10, stripes: 4000 }
    }
}

impl Limits {
    /// These limits.
    #[must_use]
    pub const fn new(iterations: u32, stripes: u32) -> Self {
        Self { iterations, stripes }
    }
}

/// A key slot.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slot {
    /// Whether it has a passphrase.
    pub active: bool,
    /// Iterations of PBKDF2.
    pub iterations: u32,
    /// The salt of PBKDF2.
    pub salt: [u8; SALT],
    /// Offset of its key material in the file, in sectors of 512 bytes.
    pub key_sector: u32,
    /// Stripes of its key material.
    pub stripes: u32,
}

/// The file that a header was found in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// A file of this many bytes, with the header at its beginning and the disk behind it.
    File(u64),
    /// An area of this many bytes that is the header's alone: in a qcow2 image, or a file of its own. The disk is
    /// elsewhere.
    Detached(u64),
}

impl Layout {
    const fn length(self) -> u64 {
        match self {
            Self::File(length) | Self::Detached(length) => length,
        }
    }
}

/// A header of LUKS version 1.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Header {
    /// The cipher.
    pub cipher: CipherAlgorithm,
    /// Its mode.
    pub mode: CipherMode,
    /// The generator of initialization vectors.
    pub generator: IvGenerator,
    /// The hash of PBKDF2 and of the stripes.
    pub hash: HashAlgorithm,
    /// Offset of the disk, in sectors.
    pub payload_sector: u32,
    /// The digest of the volume key, its salt and its iterations.
    pub key_digest: [u8; DIGEST],
    /// The salt of the digest.
    pub key_salt: [u8; SALT],
    /// The iterations of the digest.
    pub key_iterations: u32,
    /// Its UUID.
    pub uuid: String,
    /// The key slots.
    pub slots: [Slot; KEY_SLOTS],
}

impl Header {
    /// Returns the length of the volume key in bytes.
    #[must_use]
    pub const fn key_length(&self) -> usize {
        self.cipher.key_length() * self.mode.keys()
    }

    /// Returns the offset of the disk in bytes.
    #[must_use]
    pub const fn payload_offset(&self) -> u64 {
        self.payload_sector as u64 * SECTOR as u64
    }

    /// Returns the bytes of a slot's key material in the file, in whole sectors.
    #[must_use]
    pub fn key_material(&self, slot: &Slot) -> Range<u64> {
        let start = u64::from(slot.key_sector) * SECTOR as u64;
        start..start + (self.key_length() as u64 * u64::from(slot.stripes)).next_multiple_of(SECTOR as u64)
    }

    /// Understands the first bytes of a file, and checks them against its length and the limits.
    ///
    /// # Errors
    /// [`LuksError::Header`]: a field is wrong; [`LuksError::Unsupported`].
    pub fn parse(bytes: &[u8], layout: Layout, limits: Limits) -> Result<Self, LuksError> {
        let wrong = |what: String| LuksError::Header(what);
        let bytes: &[u8; HEADER_LENGTH] =
            bytes.first_chunk().ok_or_else(|| wrong(format!("cut off: it has {HEADER_LENGTH} bytes")))?;
        if !bytes.starts_with(&MAGIC) {
            return Err(wrong("the signature is missing".into()));
        }
        let version = u16::from_be_bytes(array(bytes, MAGIC.len()));
        if version != 1 {
            return Err(LuksError::Unsupported(format!("version {version} is not supported; only version 1 is")));
        }
        let number = |at| u32::from_be_bytes(array(bytes, at));
        let (mode, generator) = parse_mode(text::<32>(bytes, MODE, "cipher mode")?)?;
        let (family, key_bytes) = (text::<32>(bytes, CIPHER, "cipher")?, number(KEY_BYTES));
        let key_length = usize::try_from(key_bytes).ok().filter(|length| length % mode.keys() == 0);
        let cipher = key_length.and_then(|length| CipherAlgorithm::of(family, length / mode.keys()));
        let cipher = cipher.ok_or_else(|| {
            LuksError::Unsupported(format!("cipher {family:?} with a key of {key_bytes} bytes is not supported"))
        })?;
        let hash = text::<32>(bytes, HASH, "hash")?;
        let hash = hash.parse().map_err(|_| LuksError::Unsupported(format!("hash {hash:?} is not supported")))?;
        let slots = std::array::from_fn(|index| {
            let at = SLOTS + index * SLOT_LENGTH;
            let slot = Slot {
                active: number(at) == ACTIVE,
                iterations: number(at + 4),
                salt: array(bytes, at + 8),
                key_sector: number(at + 40),
                stripes: number(at + 44),
            };
            (number(at), slot)
        });
        for (index, (state, _)) in slots.iter().enumerate() {
            if ![ACTIVE, INACTIVE].contains(state) {
                return Err(wrong(format!("key slot {index}: unknown state {state:#x}")));
            }
        }
        let header = Self {
            cipher,
            mode,
            generator,
            hash,
            payload_sector: number(PAYLOAD),
            key_digest: array(bytes, KEY_DIGEST),
            key_salt: array(bytes, KEY_SALT),
            key_iterations: number(KEY_ITERATIONS),
            uuid: text::<40>(bytes, UUID, "UUID")?.to_owned(),
            slots: slots.map(|(_, slot)| slot),
        };
        header.check(layout, limits)?;
        Ok(header)
    }

    fn check(&self, layout: Layout, limits: Limits) -> Result<(), LuksError> {
        let wrong = |what: String| Err(LuksError::Header(what));
        let length = layout.length();
        let most = limits.iterations;
        if !(1..=most).contains(&self.key_iterations) {
            return wrong(format!("{} iterations of the key's digest; must be 1 to {most}", self.key_iterations));
        }
        let end = match layout {
            Layout::Detached(_) => length,
            Layout::File(_) if self.payload_offset() > length => {
                return wrong(format!(
                    "the disk is at {:#x}, but the file has {length:#x} bytes",
                    self.payload_offset()
                ));
            }
            // Without this key material would be overwritten by the disk.
            Layout::File(_) => self.payload_offset(),
        };
        let mut taken: Vec<(usize, Range<u64>)> = Vec::new();
        for (index, slot) in self.slots.iter().enumerate() {
            // A slot without a passphrase names the place of its key material, too: it is where one is written.
            if slot.stripes == 0 || slot.stripes > limits.stripes {
                return wrong(format!("key slot {index}: {} stripes; must be 1 to {}", slot.stripes, limits.stripes));
            }
            if slot.active && !(1..=most).contains(&slot.iterations) {
                return wrong(format!("key slot {index}: {} iterations; must be 1 to {most}", slot.iterations));
            }
            let place = self.key_material(slot);
            if place.start < HEADER_LENGTH as u64 {
                return wrong(format!("key slot {index}: its key material at {:#x} is in the header", place.start));
            }
            if place.end > end {
                return wrong(format!(
                    "key slot {index}: its key material ends at {:#x}, past the end of the header at {end:#x}",
                    place.end
                ));
            }
            if let Some((other, _)) = taken.iter().find(|(_, it)| it.start < place.end && place.start < it.end) {
                return wrong(format!("the key material of the key slots {other} and {index} overlaps"));
            }
            taken.push((index, place));
        }
        Ok(())
    }

    /// Returns its bytes in the file.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; HEADER_LENGTH] {
        let mut bytes = [0; HEADER_LENGTH];
        let mut put = |at: usize, field: &[u8]| {
            if let Some(place) = bytes.get_mut(at..at + field.len()) {
                place.copy_from_slice(field);
            }
        };
        put(0, &MAGIC);
        put(MAGIC.len(), &1_u16.to_be_bytes());
        put(CIPHER, self.cipher.family().as_bytes());
        put(MODE, format!("{}-{}", self.mode, self.generator).as_bytes());
        put(HASH, self.hash.to_string().as_bytes());
        put(PAYLOAD, &self.payload_sector.to_be_bytes());
        put(KEY_BYTES, &u32::try_from(self.key_length()).unwrap_or(u32::MAX).to_be_bytes());
        put(KEY_DIGEST, &self.key_digest);
        put(KEY_SALT, &self.key_salt);
        put(KEY_ITERATIONS, &self.key_iterations.to_be_bytes());
        put(UUID, self.uuid.as_bytes());
        for (index, slot) in self.slots.iter().enumerate() {
            let at = SLOTS + index * SLOT_LENGTH;
            put(at, &if slot.active { ACTIVE } else { INACTIVE }.to_be_bytes());
            put(at + 4, &slot.iterations.to_be_bytes());
            put(at + 8, &slot.salt);
            put(at + 40, &slot.key_sector.to_be_bytes());
            put(at + 44, &slot.stripes.to_be_bytes());
        }
        bytes
    }
}

fn array<const N: usize>(bytes: &[u8; HEADER_LENGTH], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|bytes| bytes.first_chunk()).copied().unwrap_or([0; N])
}

/// A text that ends with a zero byte.
fn text<'a, const N: usize>(bytes: &'a [u8; HEADER_LENGTH], at: usize, what: &str) -> Result<&'a str, LuksError> {
    let field = bytes.get(at..at + N).unwrap_or_default();
    let length = field.iter().position(|byte| *byte == 0);
    let text = length.and_then(|length| std::str::from_utf8(field.get(..length)?).ok());
    let text = text.filter(|text| text.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
    text.ok_or_else(|| LuksError::Header(format!("the name of the {what} is not valid")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(in crate::luks) fn usual() -> Header {
        let slot = |index: u32| Slot {
            active: index == 0,
            iterations: 1000,
            salt: [7; SALT],
            key_sector: 8 + index * 504,
            stripes: 4000,
        };
        Header {
            cipher: CipherAlgorithm::Aes256,
            mode: CipherMode::Xts,
            generator: IvGenerator::Plain64,
            hash: HashAlgorithm::Sha256,
            payload_sector: 4040,
            key_digest: [1; DIGEST],
            key_salt: [2; SALT],
            key_iterations: 1000,
            uuid: "724be6f4-c677-4707-b09b-6194933c20f1".into(),
            slots: [0, 1, 2, 3, 4, 5, 6, 7].map(slot),
        }
    }

    fn parse(header: &Header, length: u64) -> Result<Header, String> {
        Header::parse(&header.to_bytes(), Layout::File(length), Limits::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_was_written_is_read() {
        assert_eq!(parse(&usual(), 1 << 30), Ok(usual()));
        let essiv = Header {
            mode: CipherMode::Cbc,
            generator: IvGenerator::Essiv(HashAlgorithm::Sha256),
            cipher: CipherAlgorithm::Twofish256,
            ..usual()
        };
        assert_eq!(parse(&essiv, 1 << 30), Ok(essiv));
    }

    #[test]
    fn absurd_fields_are_refused_by_name() {
        let said = |change: &dyn Fn(&mut Header)| {
            let mut header = usual();
            change(&mut header);
            parse(&header, 4 << 20).unwrap_err()
        };
        assert!(said(&|header| header.slots[0].iterations = u32::MAX).contains("key slot 0: 4294967295 iterations"));
        assert!(said(&|header| header.slots[0].iterations = 0).contains("0 iterations"));
        assert!(said(&|header| header.key_iterations = u32::MAX).contains("iterations of the key's digest"));
        assert!(said(&|header| header.slots[3].stripes = u32::MAX).contains("key slot 3: 4294967295 stripes"));
        assert!(said(&|header| header.slots[3].key_sector = u32::MAX).contains("key slot 3: its key material ends"));
        assert!(said(&|header| header.slots[3].key_sector = 1).contains("key slot 3: its key material at 0x200"));
        assert!(said(&|header| header.slots[3].key_sector = 600).contains("key slots 1 and 3 overlaps"));
        assert!(said(&|header| header.payload_sector = u32::MAX).contains("the disk is at"));
        assert!(said(&|header| header.payload_sector = 8).contains("past the end of the header"));
        assert!(said(&|header| header.uuid = "\u{1}".into()).contains("UUID"));
        let mut bytes = usual().to_bytes();
        bytes[HASH] = b'x';
        let parse = |bytes: &[u8]| Header::parse(bytes, Layout::File(4 << 20), Limits::default()).unwrap_err();
        assert_eq!(parse(&bytes).to_string(), "LUKS header: hash \"xha256\" is not supported");
        bytes[7] = 2;
        assert!(parse(&bytes).to_string().contains("version 2 is not supported"));
        assert!(parse(&bytes[..500]).to_string().contains("cut off"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_header_or_refused(
            changes in prop::collection::vec((0_usize..HEADER_LENGTH, any::<u8>()), 0..8), length: u32
        ) {
            let mut bytes = usual().to_bytes();
            changes.iter().for_each(|(at, byte)| bytes[*at] = *byte);
            if let Ok(header) = Header::parse(&bytes, Layout::File(length.into()), Limits::default()) {
                prop_assert!(header.slots.iter().all(|slot| header.key_material(slot).end <= length.into()));
            }
        }
    }
}
