//! Page deltas: any bytes as a delta, and a delta between two pages made of them.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_stream::xbzrle;

fuzz_target!(|data: &[u8]| {
    let mut page = [0x5a; 4096];
    if xbzrle::decode(&mut page, data, 0).is_err() {
        assert_eq!(page, [0x5a; 4096], "a delta is applied as a whole or not at all");
    }
    let (old, new) = data.split_at(data.len() / 2);
    let page = |bytes: &[u8]| {
        let mut page = [0; 4096];
        for (place, byte) in page.iter_mut().zip(bytes) {
            *place = *byte;
        }
        page
    };
    let (mut old, new) = (page(old), page(new));
    let mut delta = Vec::new();
    xbzrle::encode(&old, &new, &mut delta);
    xbzrle::decode(&mut old, &delta, 0).expect("what was encoded can be decoded");
    assert_eq!(old, new);
});
