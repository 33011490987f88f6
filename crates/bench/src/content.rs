//! Contents: of memory, bytes that no page detection takes for zeros and that do not compress; of disks, a mixture as
//! they have it.

use std::fs::File;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use limosa_page::to_usize;
use limosa_storage::testing::SeededRandom;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::raw::Mapping;

/// Fills memory with random words.
pub(crate) fn fill_random(memory: &mut [u8]) {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for word in memory.as_chunks_mut::<8>().0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *word = state.to_le_bytes();
    }
}

/// Makes a file in memory of `bytes` bytes of a [`Mixture`].
pub(crate) fn mixed_memory(bytes: u64) -> Result<File> {
    let file = memory_file(bytes)?;
    let len = usize::try_from(bytes).context("--size")?;
    let mut memory = Mapping::of_file(&file, len).with_context(|| format!("mapping {bytes} bytes"))?;
    let mixture = Mixture::new();
    for (number, piece) in (0..).zip(memory.bytes_mut().chunks_mut(PIECE)) {
        mixture.fill(1, number, piece);
    }
    Ok(file)
}

fn memory_file(bytes: u64) -> Result<File> {
    let fd: OwnedFd = memfd_create("limosa-bench", MemfdFlags::CLOEXEC).context("memfd_create")?;
    let file = File::from(fd);
    file.set_len(bytes).with_context(|| format!("a memfd of {bytes} bytes"))?;
    Ok(file)
}

/// Makes a file in memory of `bytes` random bytes. It has no name, so nothing is left of it after this process.
pub(crate) fn random_memory(bytes: u64) -> Result<File> {
    let file = memory_file(bytes)?;
    let len = usize::try_from(bytes).context("--size")?;
    let mut memory = Mapping::of_file(&file, len).with_context(|| format!("mapping {bytes} bytes"))?;
    memory.populate().with_context(|| format!("not enough memory for {bytes} bytes"))?;
    fill_random(memory.bytes_mut());
    Ok(file)
}

/// Bytes that a [`Mixture`] is made of, each piece of one kind. They are shorter than a cluster.
pub(crate) const PIECE: usize = 16 << 10;

/// Pieces of a stretch of a disk that is mostly of one kind.
const STRETCH: u64 = 16;

/// Contents of a disk: text, tables and machine code, files that are compressed already, and zeros. The same number
/// gives the same contents.
#[derive(Debug)]
pub(crate) struct Mixture {
    words: Vec<Vec<u8>>,
}

impl Mixture {
    /// Makes the vocabulary.
    pub(crate) fn new() -> Self {
        const SYLLABLES: [&str; 16] =
            ["an", "ber", "co", "de", "er", "fi", "ing", "ka", "lo", "men", "no", "ra", "st", "ti", "un", "ver"];
        let mut random = SeededRandom::new(0);
        let mut word = |_| {
            let syllables = 1 + random.below(4);
            (0..syllables).flat_map(|_| random.choose(&SYLLABLES).bytes()).collect()
        };
        Self { words: (0..2048).map(&mut word).collect() }
    }

    /// Fills a piece of the disk `seed`, the one with this number.
    pub(crate) fn fill(&self, seed: u64, number: u64, into: &mut [u8]) {
        into.fill(0);
        let mut random = random_of(seed, number);
        // One piece of eight is of another kind than its stretch.
        let which = if random.one_in(8) { random.bits() } else { random_of(seed, u64::MAX - number / STRETCH).bits() };
        match which % 16 {
            0..3 => {}
            3..9 => self.text(&mut random, into),
            9..12 => table(&mut random, into),
            12..14 => code(&mut random, into),
            _ => into.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = random.bits().to_le_bytes()),
        }
    }

    /// Words, frequent ones more often, in lines.
    fn text(&self, random: &mut SeededRandom, into: &mut [u8]) {
        let (mut at, mut column) = (0, 0);
        while at < into.len() {
            let rank = random.below(2048) * random.below(2048) / 2048;
            let word = self.words.get(to_usize(rank)).map_or(&[][..], Vec::as_slice);
            let length = word.len().min(into.len() - at);
            into[at..at + length].copy_from_slice(&word[..length]);
            at += length;
            column += length + 1;
            if let Some(blank) = into.get_mut(at) {
                *blank = if column > 80 { b'\n' } else { b' ' };
                at += 1;
            }
            column = if column > 80 { 0 } else { column };
        }
    }
}

/// Records of 32 bytes: a growing number, a small one, a hash, flags, and nothing.
fn table(random: &mut SeededRandom, into: &mut [u8]) {
    let mut growing = random.bits() >> 32;
    for record in into.as_chunks_mut::<32>().0 {
        growing += random.bits() % 512;
        record[..8].copy_from_slice(&growing.to_le_bytes());
        record[8] = random.bits().to_le_bytes()[0] & 15;
        record[12..16].copy_from_slice(&random.bits().to_le_bytes()[..4]);
        record[16] = 1 << (random.bits() % 4);
    }
}

/// Instructions of 1 to 6 bytes: few codes, and operands that are mostly small.
fn code(random: &mut SeededRandom, into: &mut [u8]) {
    let mut at = 0;
    while at < into.len() {
        let choice = random.bits();
        let [kind, small, operand @ ..] = choice.to_le_bytes();
        let bytes = [kind & 0x3f, kind >> 6, small & 0x1f, operand[0], operand[1] & 3, 0];
        let length = to_usize(1 + random.below(6)).min(into.len() - at);
        into[at..at + length].copy_from_slice(&bytes[..length]);
        at += length;
    }
}

/// The numbers of a piece: those of the next piece are others.
fn random_of(seed: u64, number: u64) -> SeededRandom {
    SeededRandom::new(SeededRandom::new(seed).bits() ^ number)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn no_page_of_random_memory_is_zero() {
        let file = random_memory(1 << 20).expect("fills");
        let mut page = [0; 4096];
        for at in 0..256 {
            file.read_exact_at(&mut page, at * 4096).expect("reads");
            assert_ne!(page, [0; 4096]);
        }
    }

    #[test]
    fn a_mixture_has_zeros_is_the_same_again_and_differs_by_seed() {
        let mixture = Mixture::new();
        let piece = |seed, number| {
            let mut piece = vec![1; PIECE];
            mixture.fill(seed, number, &mut piece);
            piece
        };
        let all: Vec<_> = (0..1024).map(|number| piece(1, number)).collect();
        let zeros = all.iter().filter(|piece| piece.iter().all(|byte| *byte == 0)).count();
        assert!((100..400).contains(&zeros), "{zeros} pieces of 1024");
        assert_eq!(piece(1, 7), all[7]);
        assert!((0..64).any(|number| piece(2, number) != all[usize::try_from(number).expect("small")]));
    }
}
