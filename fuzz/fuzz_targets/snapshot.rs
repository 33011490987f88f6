//! A snapshot file: any bytes; what opens can be summarized and every page of it read, or is refused.

#![no_main]

use limosa_migrate::stored::PageSource;
use libfuzzer_sys::fuzz_target;
use limosa_page::{PAGE_LEN, PageRange};

fuzz_target!(|data: &[u8]| {
    let Ok(snapshot) = limosa_snapshot::fuzz_open(data) else { return };
    let summary = snapshot.summary();
    let _ = (snapshot.check_restorable(), snapshot.run_state(), snapshot.manifest());
    let mut page = [0; PAGE_LEN];
    for (block, described) in summary.blocks.iter().enumerate() {
        assert_eq!(described.stored + described.zero, described.pages);
        for run in snapshot.stored_bitmap(block).runs().take(64) {
            let _ = snapshot.read(block, PageRange::starting_at(run.start, 1), &mut page);
        }
    }
});
