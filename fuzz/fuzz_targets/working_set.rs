//! A working set's file: any bytes; what is taken asks for each page of a RAM block at most once, and encodes to the
//! same bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_page::PageBitmap;
use limosa_snapshot::WorkingSet;

fuzz_target!(|data: &[u8]| {
    // The id is the one that the bytes name, so that the rest is reached; so is the checksum.
    let mut data = data.to_vec();
    let id = data.get(16..32).and_then(|id| id.try_into().ok()).unwrap_or_default();
    if let Some((contents, crc)) = data.split_last_chunk_mut::<4>() {
        *crc = crc32c::crc32c(contents).to_le_bytes();
    }
    let blocks = [PageBitmap::new(5000), PageBitmap::new(16)];
    let Ok(set) = WorkingSet::decode(&data, uuid::Uuid::from_bytes(id), &blocks) else { return };
    let mut seen = blocks.clone();
    for range in &set.ranges {
        assert_eq!(seen[range.block].count_in(range.pages), 0);
        seen[range.block].set_range(range.pages);
        assert!(range.pages.end.0 <= seen[range.block].len());
    }
    assert_eq!(set.encode(), data);
});
