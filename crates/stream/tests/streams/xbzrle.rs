//! Page deltas: what was encoded decodes, on the page that it was encoded against.

use limosa_stream::xbzrle::{decode, encode};
use proptest::collection::vec;
use proptest::prelude::*;

fn page(seed: u8, changes: &[(usize, Vec<u8>)]) -> [u8; 4096] {
    let mut page = [seed; 4096];
    for (at, bytes) in changes {
        let end = (at + bytes.len()).min(4096);
        page[*at..end].copy_from_slice(&bytes[..end - at]);
    }
    page
}

fn changes() -> impl Strategy<Value = Vec<(usize, Vec<u8>)>> {
    vec((0..4096usize, vec(any::<u8>(), 0..300)), 0..20)
}

proptest! {
    #[test]
    fn a_delta_turns_the_old_page_into_the_new_one(
        (old_seed, new_seed) in (0..2u8, 0..2u8), old in changes(), new in changes(),
    ) {
        let (mut old, new) = (page(old_seed, &old), page(new_seed, &new));
        let mut delta = Vec::new();
        encode(&old, &new, &mut delta);
        decode(&mut old, &delta, 0).unwrap();
        prop_assert_eq!(old, new);
    }

    #[test]
    fn a_delta_that_is_wrong_leaves_the_page_as_it_was(delta in vec(prop_oneof![0..8u8, any::<u8>()], 0..600)) {
        let mut page = [9; 4096];
        if decode(&mut page, &delta, 0).is_err() {
            prop_assert_eq!(page, [9; 4096]);
        }
    }
}

#[test]
fn a_delta_is_runs_of_unchanged_and_changed_bytes() {
    let old = [0; 4096];
    let mut new = old;
    new[0] = 1;
    new[3..303].fill(2);
    let mut delta = Vec::new();
    encode(&old, &new, &mut delta);
    // 0 unchanged, 1 changed; 2 unchanged, 300 = 0x2c + (2 << 7) changed; nothing about the rest.
    assert_eq!(delta[..6], [0, 1, 1, 2, 0xac, 0x02]);
    assert_eq!(delta.len(), 6 + 300);
    delta.clear();
    encode(&new, &new, &mut delta);
    assert!(delta.is_empty());
    encode(&old, &[7; 4096], &mut delta);
    assert_eq!((delta.len(), &delta[..3]), (4099, &[0, 0x80, 0x20][..]));
}

#[test]
fn counts_beyond_the_page_are_refused_at_their_offset() {
    let refused = |delta: &[u8]| decode(&mut [0; 4096], delta, 100).expect_err("the delta is wrong");
    assert!(refused(&[5]).to_string().contains("the input ends"));
    assert!(refused(&[5, 0]).to_string().contains("expected a count of changed bytes, found 0"));
    assert_eq!(refused(&[5, 1, 1, 0, 1, 1]).offset(), 103, "only the first unchanged run may be empty");
    assert!(refused(&[5, 2, 1]).to_string().contains("the input ends"));
    assert!(refused(&[0x80, 0x20, 1, 1]).to_string().contains("inside the page"));
    assert!(refused(&[0xff, 0x1f, 2, 1, 1]).to_string().contains("inside the page"));
    assert!(refused(&[0x80, 0x80, 1]).to_string().contains("more than two bytes"));
    assert!(refused(&[0x80]).to_string().contains("the input ends"));
}
