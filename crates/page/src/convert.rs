//! Conversions between `usize` and `u64` that cannot fail.
//!
//! limosa is for 64-bit targets, which this module says once for all crates: lengths and offsets of files and of guest
//! memory are `u64`, those of slices `usize`, and each fits into the other.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("limosa is for 64-bit targets: lengths and offsets of guest memory must fit into usize");

/// Returns `count` as an index or length of a slice.
#[must_use]
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "usize has 64 bits: other targets do not compile")]
pub const fn to_usize(count: u64) -> usize {
    count as usize
}

/// Returns `count` as a length or offset in bytes of a file or of guest memory.
#[must_use]
#[inline]
pub const fn to_u64(count: usize) -> u64 {
    count as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_comes_back() {
        for value in [0, 1, u64::from(u32::MAX) + 1, u64::MAX] {
            assert_eq!(to_u64(to_usize(value)), value);
        }
    }
}
