//! An image with a snapshot in it: any bytes; what opens has its pages read, or is refused.

#![no_main]

use limosa_migrate::stored::PageSource;
use libfuzzer_sys::fuzz_target;
use limosa_page::{PAGE_LEN, PageRange};

fuzz_target!(|data: &[u8]| {
    let Ok(snapshot) = limosa_pack::fuzz_open(data) else { return };
    let summary = snapshot.summary();
    assert!(summary.packed.is_some_and(|packed| packed.bases.is_empty()));
    let mut page = [0; PAGE_LEN];
    for block in 0..summary.blocks.len() {
        for run in snapshot.stored_bitmap(block).runs().take(64) {
            let _ = snapshot.read(block, PageRange::starting_at(run.start, 1), &mut page);
        }
    }
});
