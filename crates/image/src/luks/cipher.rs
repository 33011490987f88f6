//! Sectors, encrypted and decrypted.
//!
//! XTS is written over calls that take many blocks: the tweaks of a run of sectors are computed first, and the cipher
//! works on all blocks of the run at once, as the processor's instructions want it. CBC is decrypted in the same way;
//! it is encrypted with the blocks of eight sectors side by side, because each block depends on the one before it.

use aes::{Aes128, Aes192, Aes256};
use cipher::array::Array;
use cipher::consts::U16;
use cipher::{BlockCipherDecrypt, BlockCipherEncrypt, BlockSizeUser, KeyInit};
use serpent::Serpent;
use twofish::Twofish;
use zeroize::Zeroizing;

use super::LuksError;
use super::algorithm::{CipherAlgorithm, CipherMode, IvGenerator};

/// Bytes that are encrypted together.
pub const SECTOR: usize = 512;
/// Bytes of a block of all ciphers.
const BLOCK: usize = 16;
/// Blocks of a sector.
const BLOCKS: usize = SECTOR / BLOCK;
/// Sectors that are worked on at once.
const RUN: usize = 8;

type Block = Array<u8, U16>;

/// A block cipher with its key.
trait BlockCipher: Send + Sync {
    fn encrypt(&self, blocks: &mut [Block]);
    fn decrypt(&self, blocks: &mut [Block]);
}

impl<C> BlockCipher for C
where
    C: BlockCipherEncrypt + BlockCipherDecrypt + BlockSizeUser<BlockSize = U16> + Send + Sync,
{
    fn encrypt(&self, blocks: &mut [Block]) {
        self.encrypt_blocks(blocks);
    }

    fn decrypt(&self, blocks: &mut [Block]) {
        self.decrypt_blocks(blocks);
    }
}

/// Encrypts and decrypts sectors. Its keys are wiped when it is dropped.
pub struct SectorCipher {
    data: Box<dyn BlockCipher>,
    mode: Mode,
    generator: Generator,
}

enum Mode {
    Xts(Box<dyn BlockCipher>),
    Cbc,
    Ecb,
}

enum Generator {
    Plain,
    Plain64,
    Essiv(Box<dyn BlockCipher>),
}

impl std::fmt::Debug for SectorCipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SectorCipher")
    }
}

impl SectorCipher {
    /// The cipher with this key: of XTS both keys, one after the other.
    ///
    /// # Errors
    /// [`LuksError::Unsupported`]: the key's length is not that of the cipher, or `essiv` has no cipher for the length
    /// of its hash.
    pub fn new(
        algorithm: CipherAlgorithm,
        mode: CipherMode,
        generator: IvGenerator,
        key: &[u8],
    ) -> Result<Self, LuksError> {
        let length = algorithm.key_length();
        if key.len() != length * mode.keys() {
            let what = format!("a key of {} bytes is not one of {algorithm} in mode {mode}", key.len());
            return Err(LuksError::Unsupported(what));
        }
        let (first, second) = key.split_at(length);
        let generator = match generator {
            IvGenerator::Plain => Generator::Plain,
            IvGenerator::Plain64 => Generator::Plain64,
            IvGenerator::Essiv(hash) => {
                let digest = Zeroizing::new(hash.digest(&[key]));
                let cipher = CipherAlgorithm::of(algorithm.family(), digest.len()).ok_or_else(|| {
                    LuksError::Unsupported(format!("essiv:{hash}: {} has no key of that length", algorithm.family()))
                })?;
                Generator::Essiv(block_cipher(cipher, &digest)?)
            }
        };
        let mode = match mode {
            CipherMode::Xts => Mode::Xts(block_cipher(algorithm, second)?),
            CipherMode::Cbc => Mode::Cbc,
            CipherMode::Ecb => Mode::Ecb,
        };
        Ok(Self { data: block_cipher(algorithm, first)?, mode, generator })
    }

    /// Encrypts whole sectors in place, the first one with the number `sector`. Bytes beyond the last whole sector stay
    /// as they are.
    pub fn encrypt(&self, sector: u64, bytes: &mut [u8]) {
        self.each_run(sector, bytes, |number, blocks| self.encrypt_run(number, blocks));
    }

    /// Decrypts whole sectors in place, as [`encrypt`](Self::encrypt).
    pub fn decrypt(&self, sector: u64, bytes: &mut [u8]) {
        self.each_run(sector, bytes, |number, blocks| self.decrypt_run(number, blocks));
    }

    fn each_run(&self, mut sector: u64, bytes: &mut [u8], run: impl Fn(u64, &mut [Block])) {
        let whole = bytes.len() - bytes.len() % SECTOR;
        let bytes = bytes.get_mut(..whole).unwrap_or_default();
        for part in bytes.chunks_mut(RUN * SECTOR) {
            let (blocks, _) = Block::slice_as_chunks_mut(part);
            run(sector, blocks);
            sector = sector.wrapping_add(RUN as u64);
        }
    }

    /// The initialization vectors of sectors that follow each other; as many as are asked for count.
    fn vectors(&self, sector: u64, count: usize) -> [Block; RUN] {
        let mut vectors = [Block::default(); RUN];
        for (number, vector) in (0..).zip(vectors.iter_mut().take(count)) {
            let number = sector.wrapping_add(number);
            let number = if matches!(self.generator, Generator::Plain) { number & 0xffff_ffff } else { number };
            *vector = u128::from(number).to_le_bytes().into();
        }
        if let Generator::Essiv(cipher) = &self.generator {
            cipher.encrypt(&mut vectors[..count]);
        }
        vectors
    }

    fn encrypt_run(&self, sector: u64, blocks: &mut [Block]) {
        let count = blocks.len() / BLOCKS;
        match &self.mode {
            Mode::Ecb => self.data.encrypt(blocks),
            Mode::Xts(tweak) => self.xts(&**tweak, sector, blocks, |blocks| self.data.encrypt(blocks)),
            Mode::Cbc => {
                let mut last = self.vectors(sector, count);
                for at in 0..BLOCKS {
                    for (last, sector) in last.iter_mut().zip(blocks.chunks_exact(BLOCKS)) {
                        add(last, &sector[at]);
                    }
                    self.data.encrypt(&mut last[..count]);
                    for (last, sector) in last.iter().zip(blocks.chunks_exact_mut(BLOCKS)) {
                        sector[at] = *last;
                    }
                }
            }
        }
    }

    fn decrypt_run(&self, sector: u64, blocks: &mut [Block]) {
        let count = blocks.len() / BLOCKS;
        match &self.mode {
            Mode::Ecb => self.data.decrypt(blocks),
            Mode::Xts(tweak) => self.xts(&**tweak, sector, blocks, |blocks| self.data.decrypt(blocks)),
            Mode::Cbc => {
                let vectors = self.vectors(sector, count);
                let mut encrypted = [Block::default(); RUN * BLOCKS];
                let encrypted = &mut encrypted[..blocks.len()];
                encrypted.copy_from_slice(blocks);
                self.data.decrypt(blocks);
                let sectors = blocks.chunks_exact_mut(BLOCKS).zip(encrypted.chunks_exact(BLOCKS));
                for ((plain, encrypted), vector) in sectors.zip(&vectors) {
                    let before = std::iter::once(vector).chain(encrypted);
                    plain.iter_mut().zip(before).for_each(|(block, before)| add(block, before));
                }
            }
        }
    }

    fn xts(&self, tweak: &dyn BlockCipher, sector: u64, blocks: &mut [Block], cipher: impl Fn(&mut [Block])) {
        let count = blocks.len() / BLOCKS;
        let mut first = self.vectors(sector, count);
        tweak.encrypt(&mut first[..count]);
        let mut tweaks = [Block::default(); RUN * BLOCKS];
        for (sector, first) in tweaks.chunks_exact_mut(BLOCKS).zip(&first[..count]) {
            let mut value = u128::from_le_bytes((*first).into());
            for tweak in sector {
                *tweak = value.to_le_bytes().into();
                // Multiplication by x in the field of IEEE 1619.
                value = (value << 1) ^ (0x87 * (value >> 127));
            }
        }
        blocks.iter_mut().zip(&tweaks).for_each(|(block, tweak)| add(block, tweak));
        cipher(blocks);
        blocks.iter_mut().zip(&tweaks).for_each(|(block, tweak)| add(block, tweak));
    }
}

/// Adds a block to another, bit by bit.
fn add(block: &mut Block, other: &Block) {
    let sum = u128::from_ne_bytes((*block).into()) ^ u128::from_ne_bytes((*other).into());
    *block = sum.to_ne_bytes().into();
}

fn block_cipher(algorithm: CipherAlgorithm, key: &[u8]) -> Result<Box<dyn BlockCipher>, LuksError> {
    fn boxed<C: KeyInit + BlockCipher + 'static>(key: &[u8]) -> Result<Box<dyn BlockCipher>, LuksError> {
        let cipher = C::new_from_slice(key);
        let cipher = cipher.map_err(|_| LuksError::Unsupported(format!("a key of {} bytes", key.len())))?;
        Ok(Box::new(cipher))
    }
    match algorithm {
        CipherAlgorithm::Aes128 => boxed::<Aes128>(key),
        CipherAlgorithm::Aes192 => boxed::<Aes192>(key),
        CipherAlgorithm::Aes256 => boxed::<Aes256>(key),
        CipherAlgorithm::Serpent128 | CipherAlgorithm::Serpent192 | CipherAlgorithm::Serpent256 => {
            boxed::<Serpent>(key)
        }
        CipherAlgorithm::Twofish128 | CipherAlgorithm::Twofish192 | CipherAlgorithm::Twofish256 => {
            boxed::<Twofish>(key)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::hash::HashAlgorithm;
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect()
    }

    #[test]
    fn xts_is_that_of_the_standards_vector() {
        // IEEE 1619, vector 4: 512 bytes, data unit 0.
        let key = bytes("2718281828459045235360287471352631415926535897932384626433832795");
        let cipher = SectorCipher::new(CipherAlgorithm::Aes128, CipherMode::Xts, IvGenerator::Plain64, &key).unwrap();
        let plain: Vec<u8> = (0..=255).chain(0..=255).collect();
        let mut found = plain.clone();
        cipher.encrypt(0, &mut found);
        assert_eq!(found[..16], bytes("27a7479befa1d476489f308cd4cfa6e2"));
        cipher.decrypt(0, &mut found);
        assert_eq!(found, plain);
    }

    proptest! {
        #[test]
        fn sectors_are_encrypted_alike_alone_and_in_runs(
            which in 0_usize..9,
            mode in prop::sample::select(vec![CipherMode::Xts, CipherMode::Cbc, CipherMode::Ecb]),
            generator in prop::sample::select(vec![
                IvGenerator::Plain, IvGenerator::Plain64, IvGenerator::Essiv(HashAlgorithm::Sha256)
            ]),
            key: [u8; 32],
            plain in prop::collection::vec(any::<u8>(), 0..20 * SECTOR),
            sector in prop::sample::select(vec![0, 7, (1 << 32) - 3, u64::MAX - 2]),
        ) {
            let algorithm = CipherAlgorithm::ALL[which];
            let key = [key, key].concat();
            let cipher =
                SectorCipher::new(algorithm, mode, generator, &key[..algorithm.key_length() * mode.keys()]).unwrap();
            let (mut whole, mut single) = (plain.clone(), plain.clone());
            cipher.encrypt(sector, &mut whole);
            for (number, part) in (0..).zip(single.chunks_mut(SECTOR)) {
                cipher.encrypt(sector.wrapping_add(number), part);
            }
            prop_assert_eq!(&whole, &single);
            if plain.len() >= SECTOR {
                prop_assert_ne!(&whole, &plain);
            }
            cipher.decrypt(sector, &mut whole);
            prop_assert_eq!(&whole, &plain);
        }
    }

    #[test]
    fn a_key_of_another_length_is_refused() {
        let new = |generator, key: &[u8]| {
            SectorCipher::new(CipherAlgorithm::Aes256, CipherMode::Cbc, generator, key).map(|_| ())
        };
        assert!(new(IvGenerator::Plain, &[0; 16]).is_err());
        assert!(new(IvGenerator::Essiv(HashAlgorithm::Sha512), &[0; 32]).is_err());
        assert!(new(IvGenerator::Essiv(HashAlgorithm::Sha256), &[0; 32]).is_ok());
    }
}
