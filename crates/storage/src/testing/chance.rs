//! Chance that repeats itself: the same seed, the same run.

use limosa_page::to_usize;

/// A generator of numbers (splitmix64, which is public domain).
#[derive(Debug, Clone)]
pub struct SeededRandom(u64);

impl SeededRandom {
    /// From this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.bits() % end.max(1)
    }

    /// Returns true in one case of `times`.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// Returns one of `all`.
    ///
    /// # Panics
    /// If `all` is empty.
    pub fn choose<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        let number = self.below(all.len() as u64);
        &all[to_usize(number)]
    }

    /// Bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len.next_multiple_of(8));
        while bytes.len() < len {
            bytes.extend(self.bits().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_itself_and_another_one_does_not() {
        let run = |seed| SeededRandom::new(seed).bytes(33);
        assert_eq!((run(1), run(1).len()), (run(1), 33));
        assert_ne!(run(1), run(2));
        let mut chance = SeededRandom::new(3);
        assert!((0..1000).all(|_| chance.below(7) < 7));
        assert!((0..1000).filter(|_| chance.one_in(4)).count().abs_diff(250) < 60);
        assert_eq!(chance.below(0), 0);
    }
}
