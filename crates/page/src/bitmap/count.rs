//! Counting set bits, by the processor's instruction for it where there is one: the baseline that the crate is compiled
//! for has none on x86-64, and a bitmap of a big guest has millions of words.
#![allow(unsafe_code, reason = "uses an instruction that the processor was asked for")]

/// The number of set bits.
pub(super) fn ones(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("popcnt") {
        // SAFETY: the processor has the instruction.
        return unsafe { ones_by_popcnt(words) };
    }
    plain(words)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "popcnt")]
fn ones_by_popcnt(words: &[u64]) -> u64 {
    plain(words)
}

#[inline(always)]
fn plain(words: &[u64]) -> u64 {
    words.iter().map(|word| u64::from(word.count_ones())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_count_the_same() {
        let words: Vec<u64> = (0..1000_u64).map(|word| word.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
        for length in [0, 1, 7, 1000] {
            assert_eq!(ones(&words[..length]), plain(&words[..length]));
        }
        assert_eq!(ones(&[u64::MAX, 0, 1]), 65);
    }
}
