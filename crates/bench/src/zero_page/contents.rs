//! Contents of pages, and memory full of them.

use limosa_page::PAGE_LEN;

use crate::content::fill_random;

/// The contents of the pages of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Contents {
    /// Zeros.
    Zero,
    /// Random bytes, as pages with contents look to zero detection: their first word differs.
    Random,
    /// Zeros but for one byte in the first cache line, behind the first word.
    Early,
    /// Zeros but for one byte right before the middle.
    Middle,
    /// Zeros but for one byte right before the last word.
    Late,
    /// Half of the pages zero and half random, in an unpredictable order.
    Mixed,
}

impl Contents {
    pub(super) const ALL: [Self; 6] = [Self::Zero, Self::Random, Self::Early, Self::Middle, Self::Late, Self::Mixed];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Zero => "zero",
            Self::Random => "random bytes",
            Self::Early => "differs early",
            Self::Middle => "differs in the middle",
            Self::Late => "differs late",
            Self::Mixed => "mixed",
        }
    }

    /// The byte that alone is not zero. None is in a word that is looked at before the rest of the page is.
    fn odd_byte(self) -> Option<usize> {
        match self {
            Self::Zero | Self::Random | Self::Mixed => None,
            Self::Early => Some(40),
            Self::Middle => Some(PAGE_LEN / 2 - 1),
            Self::Late => Some(PAGE_LEN - 9),
        }
    }

    /// Fills memory, and says how many of its pages are zero.
    pub(super) fn fill(self, memory: &mut [u8]) -> u64 {
        if self == Self::Random {
            fill_random(memory);
            return 0;
        }
        memory.fill(0);
        let mut zeros = 0;
        let mut page = [0; PAGE_LEN];
        fill_random(&mut page);
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        for to in memory.as_chunks_mut::<PAGE_LEN>().0 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            match self.odd_byte() {
                Some(at) => to[at] = 1,
                None if self == Self::Mixed && (random >> 32).is_multiple_of(2) => *to = page,
                None => zeros += 1,
            }
        }
        zeros
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_pages_are_zero_as_was_said() {
        for contents in Contents::ALL {
            let mut memory = vec![0xff; 512 * PAGE_LEN];
            let zeros = contents.fill(&mut memory);
            let found =
                memory.as_chunks::<PAGE_LEN>().0.iter().filter(|page| page.iter().all(|byte| *byte == 0)).count();
            assert_eq!(zeros, found as u64, "{contents:?}");
            match contents {
                Contents::Zero => assert_eq!(zeros, 512),
                Contents::Mixed => assert!((192..320).contains(&zeros), "{zeros} of 512"),
                _ => assert_eq!(zeros, 0, "{contents:?}"),
            }
        }
    }

    #[test]
    fn a_page_that_differs_in_one_byte_is_not_found_by_its_first_middle_or_last_word() {
        for at in Contents::ALL.into_iter().filter_map(Contents::odd_byte) {
            for word in [0, PAGE_LEN / 2, PAGE_LEN - 8] {
                assert!(!(word..word + 8).contains(&at), "byte {at}");
            }
        }
    }
}
