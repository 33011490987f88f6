//! Writes that fail while others are under way: the others, and what comes after them, do not feel it.

use std::sync::Arc;
use std::task::Poll;
use std::thread;

use limosa_image::qcow2::{CreateOptions, Qcow2, Qcow2Options};
use limosa_image::{Disk, GuestOffset, Pending};
use limosa_storage::testing::{Failing, Fault, RequestHolder};
use limosa_storage::{Operation, Storage, block_on};
use limosa_testkit::image::{TestImage, filled, leaks, poll_once, read};

const CLUSTER: u64 = 64 << 10;

/// An empty image, and what it is opened over.
fn image(extended_l2: bool, over: impl Fn(Arc<dyn Storage>) -> Arc<dyn Storage>) -> (Arc<dyn Storage>, Arc<Qcow2>) {
    let image = TestImage::new(&CreateOptions::default().size(64 << 20).extended_l2(extended_l2));
    let disk = image.over(over).open();
    (image.file, disk)
}

/// Carries a request to its end, and of what is held everything but one.
fn ends(mut request: Pending<'_>, held: &RequestHolder, but: Option<u64>) -> bool {
    loop {
        if let Poll::Ready(fine) = poll_once(&mut request) {
            return fine;
        }
        let waiting = held.waiting().into_iter().find(|waiting| Some(waiting.number) != but);
        assert!(waiting.is_some_and(|waiting| held.release(waiting.number)), "no request is held, and none completes");
    }
}

#[test]
fn the_cluster_of_a_failed_write_stays_allocated_during_other_writes_to_it_and_is_free_afterwards() {
    let (held, failing) = (RequestHolder::only(&[Operation::Write]), Failing::only(&[Operation::Write]));
    let (file, disk) = image(false, |storage| held.wrap(failing.wrap(storage)));
    assert!(ends(disk.write(GuestOffset(32 << 20), filled(1, 512).into()), &held, None));
    let mut first = disk.write(GuestOffset(0), filled(2, 512).into());
    assert!(poll_once(&mut first).is_pending());
    let mut other_write = disk.write(GuestOffset(4096), filled(3, 512).into());
    assert!(poll_once(&mut other_write).is_pending());
    let [one, other] = &held.waiting()[..] else { panic!("both are written to the new cluster at once") };
    assert_eq!(other.range.start, one.range.start + 4096);
    failing.fail(0, 1, Fault::NoSpace);
    assert!(held.release(one.number));
    assert_eq!(poll_once(&mut first), Poll::Ready(false));
    // The next writes get other clusters, even if there is a flush meanwhile.
    for cluster in 1..4 {
        let from = filled(0x10 + cluster, CLUSTER).into();
        assert!(ends(disk.write(GuestOffset(u64::from(cluster) * CLUSTER), from), &held, Some(other.number)));
        assert!(ends(disk.flush(), &held, Some(other.number)));
    }
    assert!(held.release(other.number));
    assert_eq!(poll_once(&mut other_write), Poll::Ready(false), "its cluster is not the disk's");
    for cluster in 1..4 {
        assert_eq!(read(&*disk, u64::from(cluster) * CLUSTER, CLUSTER), vec![0x10 + cluster; 64 << 10]);
    }
    drop((first, other_write));
    assert!(ends(disk.close(), &held, None));
    assert_eq!(leaks(&*file), 0);
}

#[test]
fn a_storage_that_is_full_costs_no_clusters_however_often_it_is_tried() {
    for extended_l2 in [false, true] {
        let failing = Failing::only(&[Operation::Write, Operation::Allocate]);
        let (file, disk) = image(extended_l2, |storage| failing.wrap(storage));
        block_on(disk.write(GuestOffset(32 << 20), filled(1, 512).into())).unwrap();
        failing.fail(0, u64::MAX, Fault::NoSpace);
        for _ in 0..100 {
            block_on(disk.write(GuestOffset(0), filled(2, 16 << 20).into())).unwrap_err();
        }
        failing.mend();
        block_on(disk.write(GuestOffset(0), filled(3, 16 << 20).into())).unwrap();
        block_on(disk.close()).unwrap();
        assert_eq!(leaks(&*file), 0);
        let length = file.length().unwrap();
        assert!(length < 64 << 20, "{length:#x} bytes, extended_l2: {extended_l2}");
    }
}

#[test]
fn clusters_that_no_table_could_be_told_of_are_free_again() {
    let (held, failing) = (RequestHolder::only(&[Operation::Write]), Failing::only(&[Operation::Read]));
    held.release_all();
    let image = TestImage::new(&CreateOptions::default().size(2 << 30));
    let options = Qcow2Options::default().cache_size(0).allocate_ahead(0);
    let disk = image.over(|storage| held.wrap(failing.wrap(storage))).open_with(options);
    for table in 0..4 {
        block_on(disk.write(GuestOffset(table << 29), filled(1, 512).into())).unwrap();
    }
    block_on(disk.flush()).unwrap();
    held.hold_again();
    let mut write = disk.write(GuestOffset(8 << 20), filled(2, CLUSTER).into());
    assert!(poll_once(&mut write).is_pending());
    // So much is read meanwhile that the slice that the write has looked at is not in memory any more.
    for slice in 0..250 {
        let _ = read(&*disk, (slice % 126 + 2) << 24, 512);
    }
    failing.fail(0, u64::MAX, Fault::Broken);
    assert!(!ends(write, &held, None), "the slice was still there");
    failing.mend();
    held.release_all();
    block_on(disk.close()).unwrap();
    assert_eq!(leaks(&*image.file), 0);
}

#[test]
fn a_refcount_table_that_could_not_be_put_in_place_is_not_relied_on() {
    // A table of one cluster is about 4096 clusters of 512 bytes: the disk needs a longer one.
    const FULL: u64 = 4000 * 512;
    for fault in [Fault::Broken, Fault::AfterCompletion] {
        for after in 0.. {
            let failing = Failing::only(&[Operation::Write, Operation::Flush]);
            let options = CreateOptions::default().size(4 << 20).cluster_size(512).refcount_bits(64);
            let image = TestImage::new(&options);
            let table = image.header().refcount_table;
            let options = Qcow2Options::default().allocate_ahead(0);
            let disk = image.over(|storage| failing.wrap(storage)).open_with(options);
            let mut end = 0;
            while image.file.length().unwrap() < FULL {
                block_on(disk.write(GuestOffset(end), filled(1, 4096).into())).unwrap();
                end += 4096;
            }
            block_on(disk.flush()).unwrap();
            failing.fail(after, 1, fault);
            let mut failed = false;
            for at in (end..end + (256 << 10)).step_by(4096) {
                failed |= block_on(disk.write(GuestOffset(at), filled(2, 4096).into())).is_err();
            }
            failing.mend();
            // After any failure: flushed contents exist and are counted, although the image is not closed.
            for at in (end..end + (256 << 10)).step_by(4096) {
                block_on(disk.write(GuestOffset(at), filled(3, 4096).into())).unwrap();
            }
            block_on(disk.flush()).unwrap();
            let _ = leaks(&*image.file);
            block_on(disk.close()).unwrap();
            assert_eq!(leaks(&*image.file), 0);
            assert_ne!(disk.header().refcount_table, table, "it is the same");
            assert_eq!(read(&*image.open_read_only(), end, 512), [3; 512]);
            if !failed {
                break;
            }
        }
    }
}

#[test]
fn writes_that_wait_for_many_that_fail_need_no_deep_stack() {
    const WRITES: u64 = 300;
    let work = || {
        let longer = [Operation::Allocate, Operation::Write];
        let (held, failing) = (RequestHolder::only(&longer), Failing::only(&longer));
        let (_, disk) = image(true, |storage| held.wrap(failing.wrap(storage)));
        failing.fail(0, u64::MAX, Fault::NoSpace);
        let mut writes: Vec<Pending<'_>> =
            (0..WRITES).map(|number| disk.write(GuestOffset(number % 128 * 512), filled(4, 512).into())).collect();
        let mut rounds = 0;
        while !writes.is_empty() {
            // Each of them tries for itself, after those before it.
            writes.retain_mut(|write| poll_once(write).is_pending());
            held.waiting().iter().for_each(|waiting| assert!(held.release(waiting.number)));
            rounds += 1;
        }
        assert!(rounds > WRITES, "{rounds}");
    };
    thread::Builder::new().stack_size(128 << 10).spawn(work).unwrap().join().unwrap();
}

#[test]
fn what_others_wrote_behind_the_end_meanwhile_is_not_cut_off_where_there_is_no_space_ahead() {
    let (held, failing) = (RequestHolder::only(&[Operation::Allocate]), Failing::only(&[Operation::Allocate]));
    let (file, disk) = image(true, |storage| held.wrap(failing.wrap(storage)));
    failing.fail(0, u64::MAX, Fault::NoSpace);
    let mut write = disk.write(GuestOffset(0), filled(4, CLUSTER).into());
    assert!(poll_once(&mut write).is_pending());
    let [waiting] = &held.waiting()[..] else { panic!("the file is made longer first") };
    let behind = waiting.range.end + (1 << 20);
    block_on(file.write(behind, filled(5, 512).into())).unwrap();
    held.release_all();
    block_on(write).unwrap();
    assert_eq!(file.length().unwrap(), behind + 512);
    assert_eq!(read(&*disk, 0, CLUSTER), filled(4, CLUSTER).to_vec());
}
