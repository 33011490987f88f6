//! Requests to a virtio-blk device, as a guest's memory has them.

use limosa_vhost::fuzzing::Script;

/// Features that the driver acknowledges: flush, write-back toggle, discard, write zeroes.
const FEATURES: u64 = 1 << 9 | 1 << 11 | 1 << 13 | 1 << 14;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn descriptor(address: u64, length: u32, flags: u16, next: u16) -> Vec<u8> {
    [&address.to_le_bytes()[..], &length.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
}

/// Every kind of request, one after the other; with a table of their own if `indirect`.
fn all_kinds(indirect: bool) -> Vec<u8> {
    let mut script = Script::with_ring(FEATURES);
    let range = [&4_u64.to_le_bytes()[..], &8_u32.to_le_bytes(), &0_u32.to_le_bytes()].concat();
    for (count, kind) in (1_u16..).zip([1_u32, 0, 8, 13, 11, 4, 7]) {
        let (data, flags) = match kind {
            0 => (4096, WRITE),
            8 => (20, WRITE),
            1 => (4096, 0),
            _ => (16, 0),
        };
        script.write(0x5000, &[&kind.to_le_bytes()[..], &[0; 4], &u64::from(count).to_le_bytes()].concat());
        script.write(0x6000, &range);
        let table = [
            descriptor(0x5000, 16, NEXT, 1),
            descriptor(0x6000, data, flags | NEXT, 2),
            descriptor(0x7000, 1, WRITE, 0),
        ]
        .concat();
        if indirect {
            script.write(0x8000, &table);
            script.write(0x1000, &descriptor(0x8000, 48, INDIRECT, 0));
        } else {
            script.write(0x1000, &table);
        }
        script.write(0x2000, &[&[0; 2][..], &count.to_le_bytes()].concat());
        script.process();
    }
    script.into_bytes()
}

/// Returns seeds.
pub fn seeds() -> Vec<Vec<u8>> {
    vec![all_kinds(false), all_kinds(true)]
}
