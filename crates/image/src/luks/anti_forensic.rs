//! Key material spread over stripes, so that a part of it that is erased makes all of it useless.

use zeroize::{Zeroize as _, Zeroizing};

use super::LuksError;
use super::hash::HashAlgorithm;

/// Spreads a key over `stripes` stripes. All but the last one are random.
pub(super) fn split(key: &[u8], stripes: usize, hash: HashAlgorithm) -> Result<Zeroizing<Vec<u8>>, LuksError> {
    let mut material = Zeroizing::new(vec![0; key.len() * stripes]);
    let last = material.len().saturating_sub(key.len());
    let (random, rest) = material.split_at_mut(last);
    super::key_slot::random(random)?;
    let mixed = mix(random, key.len(), hash);
    rest.iter_mut().zip(mixed.iter().zip(key)).for_each(|(byte, (mixed, key))| *byte = mixed ^ key);
    Ok(material)
}

/// Joins the stripes: returns a key of `length` bytes, at least one.
pub(super) fn merge(material: &[u8], length: usize, hash: HashAlgorithm) -> Zeroizing<Vec<u8>> {
    let (random, last) = material.split_at(material.len().saturating_sub(length));
    let mut key = mix(random, length, hash);
    key.iter_mut().zip(last).for_each(|(byte, last)| *byte ^= last);
    key
}

/// Mixes all stripes but the last one.
fn mix(stripes: &[u8], length: usize, hash: HashAlgorithm) -> Zeroizing<Vec<u8>> {
    let mut mixed = Zeroizing::new(vec![0; length]);
    for stripe in stripes.chunks_exact(length) {
        mixed.iter_mut().zip(stripe).for_each(|(byte, stripe)| *byte ^= stripe);
        diffuse(&mut mixed, hash);
    }
    mixed
}

/// Replaces each piece of a digest's length by the digest of its number and itself.
fn diffuse(block: &mut [u8], hash: HashAlgorithm) {
    for (number, piece) in (0_u32..).zip(block.chunks_mut(hash.length())) {
        let mut digest = hash.digest(&[&number.to_be_bytes(), piece]);
        piece.iter_mut().zip(&digest).for_each(|(byte, digest)| *byte = *digest);
        digest.zeroize();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Keys of the lengths that there are. With a length that is just above that of a digest, the last piece would be
    /// of a byte or two, and many values of it have the same digest there: that a bit has changed is then not seen.
    fn key() -> impl Strategy<Value = Vec<u8>> {
        prop::sample::select(&[16, 24, 32, 48, 64][..])
            .prop_flat_map(|length| prop::collection::vec(any::<u8>(), length))
    }

    proptest! {
        #[test]
        fn what_is_split_is_merged_and_a_changed_bit_anywhere_loses_it(
            key in key(),
            stripes in 1_usize..50,
            which in 0_usize..6,
            at: prop::sample::Index,
        ) {
            let hash = HashAlgorithm::ALL[which];
            let mut material = split(&key, stripes, hash).unwrap();
            prop_assert_eq!(material.len(), key.len() * stripes);
            prop_assert_eq!(&*merge(&material, key.len(), hash), &key);
            let at = at.index(material.len());
            material[at] ^= 1;
            prop_assert_ne!(&*merge(&material, key.len(), hash), &key);
        }
    }
}
