//! Any bytes as an image that is checked and repaired: it refuses, or says what is wrong and does what it says. A
//! second repair finds nothing that the first one had not, and the memory that it may have does not change what it
//! finds.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_fuzz::image::Input;
use limosa_image::qcow2::{CheckOptions, Repair, check, repair};
use limosa_storage::{Storage, block_on};

fuzz_target!(|data: &[u8]| {
    let Some(input) = Input::of(data) else { return };
    let storage = &input.storage;
    let before = storage.contents();
    let (much, little) = (CheckOptions::default().memory(16 << 20).max_findings(10), CheckOptions::default().memory(0).max_findings(10));
    let found = block_on(check(storage, much)).ok();
    assert_eq!(storage.contents(), before, "a check wrote");
    assert_eq!(
        block_on(check(storage, little)).ok().map(|report| (report.leaks, report.corruptions, report.check_errors)),
        found.as_ref().map(|report| (report.leaks, report.corruptions, report.check_errors))
    );
    let Ok(report) = block_on(repair(storage, Repair::All, much)) else { return };
    // New refcounts and tables are written behind everything, and no further than they need.
    assert!(storage.length().is_ok_and(|length| length < before.len() as u64 + (48 << 20)));
    let again = block_on(check(storage, much)).expect("what was repaired can be checked");
    assert_eq!(
        (again.leaks, again.corruptions, again.check_errors),
        (report.leaks, report.corruptions, report.check_errors)
    );
});
