use limosa_storage::block_on;

use super::*;
use crate::test_disk::{Asked, TestDisk};

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

const READS: BenchOptions =
    BenchOptions { count: 5, depth: 1, size: 512, offset: 1024, step: 1536, write_pattern: None, flush: None };

#[test]
fn requests_go_step_by_step_and_begin_again_at_the_end() {
    let disk = TestDisk::dirty(4096);
    let report = block_on(bench(&disk, &READS, &go_on)).unwrap();
    let places = [1024, 2560, 0, 1536, 3072];
    assert_eq!(disk.asked(), places.map(|at| Asked::Read(at..at + 512)));
    assert_eq!((report.requests, report.bytes, report.flushes), (5, 5 * 512, 0));
}

#[test]
fn so_many_requests_are_under_way() {
    let disk = TestDisk::dirty(1 << 20);
    block_on(bench(&disk, &BenchOptions { count: 1000, depth: 7, ..READS }, &go_on)).unwrap();
    assert_eq!((disk.most_under_way(), disk.asked().len()), (7, 1000));
}

#[test]
fn a_flush_waits_for_what_is_under_way_if_asked_to() {
    let options = BenchOptions { count: 10, depth: 3, write_pattern: Some(0x5a), step: 512, offset: 0, ..READS };
    let with = |drain| BenchOptions { flush: Some(FlushEvery { requests: 4, drain }), ..options.clone() };
    let disk = TestDisk::dirty(1 << 20);
    let report = block_on(bench(&disk, &with(true), &go_on)).unwrap();
    assert_eq!(report.flushes, 2);
    let flushes: Vec<_> =
        disk.asked().iter().enumerate().filter(|(_, asked)| **asked == Asked::Flush).map(|(at, _)| at).collect();
    assert_eq!(flushes, [4, 9]);
    assert!(disk.bytes()[..5120].iter().all(|&byte| byte == 0x5a));
    let disk = TestDisk::dirty(1 << 20);
    assert_eq!(block_on(bench(&disk, &with(false), &go_on)).unwrap().flushes, 2);
    assert_eq!(disk.asked().len(), 12);
}

#[test]
fn a_request_behind_the_end_fails_as_does_one_that_is_stopped() {
    let disk = TestDisk::dirty(4096);
    let error = block_on(bench(&disk, &BenchOptions { offset: 4096, ..READS }, &go_on)).unwrap_err();
    assert_eq!(error.to_string(), "error while reading at byte 4096");
    let stop = |_| ControlFlow::Break(());
    assert!(matches!(block_on(bench(&disk, &READS, &stop)), Err(OperationError::Stopped)));
}
