//! The layout of a mapped-ram file: what is accepted is inside the file, and no two parts overlap.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_fuzz::{FILE_LENGTH, read_folded};
use limosa_stream::mapped_ram::Layout;

fuzz_target!(|data: &[u8]| {
    let read = |offset: u64, buffer: &mut [u8]| Ok(read_folded(data, offset, buffer));
    let Ok(layout) = Layout::decode(read, 0, FILE_LENGTH) else { return };
    let mut ranges = Vec::new();
    for placed in &layout.blocks {
        assert_eq!(placed.pages * 4096, placed.block.used_length);
        ranges.push(placed.bitmap_range());
        ranges.push(placed.pages_range());
    }
    ranges.retain(|range| !range.is_empty());
    ranges.sort_by_key(|range| range.start);
    for pair in ranges.windows(2) {
        assert!(pair[0].end <= pair[1].start, "{pair:x?}");
    }
    assert!(ranges.iter().all(|range| range.end <= layout.tail_offset && range.end <= FILE_LENGTH));
});
