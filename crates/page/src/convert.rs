//! Conversions between `usize`, `u64` and durations that cannot fail.
//!
//! limosa is for 64-bit targets, which this module says once for all crates: lengths and offsets of files and of guest
//! memory are `u64`, those of slices `usize`, and each fits into the other.

use std::time::Duration;

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

/// Returns a duration in nanoseconds, or `u64::MAX` if it is longer than 584 years.
#[must_use]
#[inline]
pub fn to_nanos(duration: Duration) -> u64 {
    saturated(duration.as_nanos())
}

/// Returns a duration in microseconds, as [`to_nanos`] does.
#[must_use]
#[inline]
pub fn to_micros(duration: Duration) -> u64 {
    saturated(duration.as_micros())
}

/// Returns a duration in milliseconds, as [`to_nanos`] does.
#[must_use]
#[inline]
pub fn to_millis(duration: Duration) -> u64 {
    saturated(duration.as_millis())
}

fn saturated(count: u128) -> u64 {
    count.try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_without_end_is_the_longest_that_can_be_said() {
        assert_eq!([to_nanos, to_micros, to_millis].map(|to| to(Duration::MAX))[..2], [u64::MAX; 2]);
        let second = Duration::from_secs(1);
        assert_eq!([to_nanos, to_micros, to_millis].map(|to| to(second)), [1_000_000_000, 1_000_000, 1000]);
    }

    #[test]
    fn every_value_comes_back() {
        for value in [0, 1, u64::from(u32::MAX) + 1, u64::MAX] {
            assert_eq!(to_u64(to_usize(value)), value);
        }
    }
}
