//! A disk that was to become longer, and could not: what is written and flushed afterwards is there.

use std::sync::Arc;

use limosa_image::qcow2::{CheckOptions, CreateOptions, Qcow2Options, check};
use limosa_image::{Disk, GuestOffset, ImageError};
use limosa_storage::testing::{Failing, Fault};
use limosa_storage::{Operation, block_on};
use limosa_testkit::image::{TestImage, filled, read_all};

const K: u64 = 1 << 10;

#[test]
fn what_is_flushed_after_a_growth_that_failed_at_any_request_is_there() {
    let faults = [
        (Operation::Flush, Fault::Broken),
        (Operation::Flush, Fault::AfterCompletion),
        (Operation::Write, Fault::Broken),
        (Operation::Write, Fault::AfterCompletion),
        (Operation::Write, Fault::HalfWay),
    ];
    for (kind, fault) in faults {
        let mut failed = 0;
        for number in 0..20 {
            let image = TestImage::new(&CreateOptions::default().size(64 * K).cluster_size(512));
            let failing = Failing::only(&[kind]);
            let over = image.over(|storage| failing.wrap(storage));
            let options = Qcow2Options::default().cache_size(0).allocate_ahead(16 * K);
            let disk = over.open_with(options);
            block_on(disk.write(GuestOffset(0), filled(1, 32 * K).into())).unwrap();
            block_on(disk.flush()).unwrap();
            // The L1 table moves: it becomes longer than a cluster.
            failing.fail(number, 1, fault);
            failed += u64::from(block_on(disk.grow(8 << 20)).is_err());
            failing.mend();
            // A new L2 table, which the L1 table has to lead to.
            block_on(disk.write(GuestOffset(32 * K), filled(2, 32 * K).into())).unwrap();
            block_on(disk.flush()).unwrap();
            block_on(disk.close()).unwrap();
            drop(disk);
            let report = block_on(check(&*image.file, CheckOptions::default())).unwrap();
            assert_eq!(report.corruptions, 0, "{kind:?} {number}, {fault:?}");
            let found = read_all(&*TestImage::existing(Arc::clone(&image.file)).open());
            let expected = [vec![1; 32 << 10], vec![2; 32 << 10]].concat();
            assert!(found[..64 << 10] == expected, "{kind:?} {number}, {fault:?}");
        }
        assert!(failed > 0, "{kind:?}, {fault:?}");
    }
}

#[test]
fn writing_nothing_at_the_end_of_the_disk_is_no_damage() {
    // The L1 table is full: it has no entry for what lies behind the end.
    let image = TestImage::new(&CreateOptions::default().size(512 << 20));
    let disk = image.open();
    block_on(disk.write(GuestOffset(disk.len()), filled(1, 0).into())).unwrap();
    let end = block_on(disk.map(GuestOffset(disk.len()), 0));
    assert!(matches!(end, Err(ImageError::PastEnd { .. })), "{end:?}");
    assert_eq!(block_on(disk.map(GuestOffset(0), 0)).unwrap().length, 1);
    block_on(disk.close()).unwrap();
}
