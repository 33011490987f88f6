//! Refcounts as they are in a refcount block: from 1 to 64 bits each.
//!
//! Law: bits are counted as the format counts them. Refcounts of less than a byte are in it from its lowest bit
//! upwards; wider ones are big-endian.

/// The refcount of number `index` in a block, of `1 << order` bits: `None` behind its end.
#[must_use]
pub(in crate::qcow2) fn get(block: &[u8], order: u32, index: usize) -> Option<u64> {
    if order < 3 {
        let (byte, shift) = inside_byte(order, index);
        return block.get(byte).map(|byte| u64::from(byte >> shift & mask(order)));
    }
    let width = 1_usize << (order - 3);
    let begin = index.checked_mul(width)?;
    let bytes = block.get(begin..begin.checked_add(width)?)?;
    Some(bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

/// Makes the refcount of number `index` in a block `value`. False, and nothing is changed, behind its end or if the
/// value does not fit.
#[must_use]
pub(in crate::qcow2) fn set(block: &mut [u8], order: u32, index: usize, value: u64) -> bool {
    if order < 6 && value >> (1_u32 << order) != 0 {
        return false;
    }
    let bytes = value.to_be_bytes();
    if order < 3 {
        let (byte, shift) = inside_byte(order, index);
        let Some(byte) = block.get_mut(byte) else { return false };
        *byte = *byte & !(mask(order) << shift) | bytes[7] << shift;
        return true;
    }
    let width = 1_usize << (order - 3);
    let place = index.checked_mul(width).and_then(|begin| block.get_mut(begin..begin.checked_add(width)?));
    let Some((place, bytes)) = place.zip(bytes.get(8_usize.saturating_sub(width)..)) else { return false };
    place.copy_from_slice(bytes);
    true
}

/// The byte and the bit in it where a refcount of less than a byte begins.
const fn inside_byte(order: u32, index: usize) -> (usize, usize) {
    let each = 3 - order;
    (index >> each, (index & ((1 << each) - 1)) << order)
}

/// The bits of a refcount of less than a byte.
const fn mask(order: u32) -> u8 {
    u8::MAX >> (8 - (1 << order))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn narrow_refcounts_begin_at_the_lowest_bit_and_wide_ones_at_the_highest_byte() {
        let block = [0b1110_0100, 0x01, 0, 0, 0, 0, 0, 2];
        assert_eq!((0..8).map(|index| get(&block, 0, index).unwrap()).collect::<Vec<_>>(), [0, 0, 1, 0, 0, 1, 1, 1]);
        assert_eq!((0..4).map(|index| get(&block, 1, index).unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!((get(&block, 2, 0), get(&block, 2, 1)), (Some(4), Some(14)));
        assert_eq!((get(&block, 3, 0), get(&block, 4, 0)), (Some(0xe4), Some(0xe401)));
        assert_eq!((get(&block, 5, 1), get(&block, 6, 0)), (Some(2), Some(0xe401_0000_0000_0002)));
    }

    #[test]
    fn what_does_not_fit_changes_nothing() {
        let mut block = [0x55; 8];
        for order in 0..6 {
            assert!(!set(&mut block, order, 0, 1 << (1 << order)), "{order}");
        }
        for order in 0..=6 {
            assert!(!set(&mut block, order, 64 >> order, 0) && get(&block, order, 64 >> order).is_none());
            assert!(!set(&mut block, order, usize::MAX, 0) && get(&block, order, usize::MAX).is_none());
        }
        assert_eq!(block, [0x55; 8]);
    }

    proptest! {
        #[test]
        fn a_refcount_is_found_where_it_was_put_and_its_neighbours_stay(
            before: [u8; 32], order in 0..=6_u32, at: prop::sample::Index, value: u64,
        ) {
            let count = 256 >> order;
            let (index, value) = (at.index(count), value & u64::MAX >> (64 - (1 << order)));
            let mut block = before;
            prop_assert!(set(&mut block, order, index, value));
            for other in 0..count {
                let expected = if other == index { Some(value) } else { get(&before, order, other) };
                prop_assert_eq!(get(&block, order, other), expected);
            }
        }
    }
}
