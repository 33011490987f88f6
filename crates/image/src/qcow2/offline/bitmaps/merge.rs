//! One bitmap's bits in another one of the same disk.

use limosa_page::{PageBitmap, PageNumber, PageRange};

/// Sets the bits of `into` about what a bit of `from` is about. Each has the logarithm of the bytes that a bit is
/// about. A bit about a part of what a bit of `into` is about sets it; one about more sets all within.
pub(in crate::qcow2) fn merge(into: (&mut PageBitmap, u8), from: (&PageBitmap, u8)) {
    let ((into, coarse), (from, fine)) = (into, from);
    if coarse == fine {
        into.union_with(from);
        return;
    }
    for run in from.runs() {
        let (start, end) = (run.start.0 << fine, run.end.0 << fine);
        into.set_range(PageRange::new(PageNumber(start >> coarse), PageNumber(end.div_ceil(1 << coarse))));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_bit_is_set_if_any_of_what_it_is_about_was(
            size in 1_u64..200_000,
            granularities in (9_u8..14, 9_u8..14),
            set in prop::collection::vec((any::<bool>(), 0_u64..400), 0..20),
        ) {
            let (coarse, fine) = granularities;
            let bits = |granularity: u8| size.div_ceil(1 << granularity);
            let (mut into, mut from) = (PageBitmap::new(bits(coarse)), PageBitmap::new(bits(fine)));
            for (other, at) in set {
                let bitmap = if other { &mut from } else { &mut into };
                bitmap.set(PageNumber(at));
            }
            let before = into.clone();
            merge((&mut into, coarse), (&from, fine));
            for bit in 0..bits(coarse) {
                let (start, end) = (bit << coarse, ((bit + 1) << coarse).min(size));
                let any = (start..end).step_by(512).any(|at| from.get(PageNumber(at >> fine)));
                prop_assert_eq!(into.get(PageNumber(bit)), before.get(PageNumber(bit)) || any, "{}", bit);
            }
        }
    }
}
