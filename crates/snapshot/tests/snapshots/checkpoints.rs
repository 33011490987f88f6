//! Tests that a directory of checkpoints has exactly those pages that a VM had at the last one that counts.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use limosa_migrate::stored::{PageSink, PageSource};
use limosa_page::holes::{data_pages, is_tmpfs};
use limosa_page::{PAGE_LEN, PageNumber, PageRange};
use limosa_snapshot::{
    CHECKPOINT_NAME, CheckpointDirectory, CheckpointOptions, CheckpointPair, Durability, Manifest, Snapshot,
    SnapshotError, SnapshotWriter, UnnamedFile,
};
use limosa_testkit::{on_reflinks, scratch};
use proptest::prelude::*;

use crate::fixture::{CHECKED, LARGE, devices, names, page, put, range, start, tail};

/// A pair whose base has the pages 10..20 of a block of [`LARGE`] pages and 4..6 of the firmware.
pub(crate) fn pair(directory: &Path, options: CheckpointOptions) -> CheckpointPair {
    let mut base = CheckpointDirectory::open(directory).unwrap().receive_base(options).unwrap();
    base.begin(&start(LARGE)).unwrap();
    put(&mut base, 0, 10, &[10, 11, 12, 13, 14, 15, 16, 17, 18, 19]);
    put(&mut base, 1, 4, &[4, 5]);
    let mut pair = base.finish(&tail("running"), Manifest::new()).unwrap();
    catch_up(&mut pair);
    pair
}

pub(crate) fn catch_up(pair: &mut CheckpointPair) {
    while pair.catch_up(1000).unwrap() > 0 {}
}

pub(crate) fn open(directory: &Path) -> Snapshot {
    Snapshot::open(&directory.join(CHECKPOINT_NAME)).unwrap()
}

pub(crate) fn read(snapshot: &Snapshot, block: usize, first: u64) -> [u8; PAGE_LEN] {
    let mut contents = [0xff; PAGE_LEN];
    snapshot.read(block, range(first, first + 1), &mut contents).unwrap();
    contents
}

fn inode(directory: &Path) -> u64 {
    directory.join(CHECKPOINT_NAME).metadata().unwrap().ino()
}

#[test]
fn a_checkpoint_counts_when_it_is_committed_and_has_its_number_and_device_state() {
    let directory = scratch().unwrap();
    let mut pair = pair(directory.path(), CheckpointOptions::default());
    assert_eq!((pair.number(), open(directory.path()).manifest().unwrap().checkpoint), (0, Some(0)));
    put(&mut pair, 0, 12, &[12, 99, 14]);
    put(&mut pair, 0, 500, &[50]);
    pair.put_zero(0, range(18, 25)).unwrap();
    assert_eq!(read(&open(directory.path()), 0, 13), page(13), "not yet");
    let checkpoint = pair.commit(&devices("paused")).unwrap();
    assert_eq!(checkpoint.number, 1);
    let pages = checkpoint.pages;
    assert_eq!((pages.contents, pages.equal, pages.zero), (4, 2, 7));

    let snapshot = open(directory.path());
    assert_eq!(snapshot.warnings(), [] as [&str; 0]);
    assert_eq!((snapshot.manifest(), snapshot.length()), (Some(&pair.newest().manifest), checkpoint.length));
    let manifest = snapshot.manifest().unwrap();
    assert_eq!((manifest.checkpoint, manifest.id), (Some(1), checkpoint.id));
    assert_eq!(manifest.run_state.as_deref(), Some("paused"));
    assert_eq!(snapshot.device_tail(), tail("paused"));
    assert_eq!([12, 13, 14, 500].map(|at| read(&snapshot, 0, at)), [12, 99, 14, 50].map(page));
    assert_eq!((read(&snapshot, 0, 18), snapshot.stored_bitmap(0).count()), ([0; PAGE_LEN], 9));
    assert!(snapshot.is_mappable());
    snapshot.check_restorable().unwrap();

    // A page that became zero gets contents again.
    catch_up(&mut pair);
    put(&mut pair, 0, 18, &[1]);
    assert_eq!(pair.commit(&devices("running")).unwrap().number, 2);
    assert_eq!(read(&open(directory.path()), 0, 18), page(1));
    drop(pair);
    assert_eq!(names(directory.path()), [CHECKPOINT_NAME]);
}

#[test]
fn pages_that_became_zero_are_zero_in_both_files_few_overwritten_and_many_a_hole() {
    let directory = scratch().unwrap();
    let mut pair = pair(directory.path(), CheckpointOptions::default());
    let (few, many, firmware) = (range(128, 191), range(256, 320), range(4, 6));
    for run in [few, many] {
        let seeds: Vec<u64> = (run.start.0..run.end.0).collect();
        put(&mut pair, 0, run.start.0, &seeds);
    }
    pair.commit(&devices("running")).unwrap();
    catch_up(&mut pair);
    for (block, run) in [(0, few), (0, many), (1, firmware)] {
        pair.put_zero(block, run).unwrap();
    }
    // One file is changed when the checkpoint ends, the other one when it catches up.
    for number in [2, 3] {
        assert_eq!(pair.commit(&devices("running")).unwrap().number, number);
        let (snapshot, file) = (open(directory.path()), File::open(directory.path().join(CHECKPOINT_NAME)).unwrap());
        let place = |block: usize| snapshot.layout().blocks[block].pages_offset;
        for (block, run) in [(0, few), (0, many), (1, firmware)] {
            let mut contents = vec![0xff; usize::try_from(run.len()).unwrap() * PAGE_LEN];
            file.read_exact_at(&mut contents, place(block) + run.bytes().start).unwrap();
            assert!(contents.iter().all(|byte| *byte == 0), "pages {run} of block {block}");
        }
        assert_eq!([few, many].map(|run| snapshot.stored_bitmap(0).count_in(run)), [0, 0]);
        assert_eq!(snapshot.stored_bitmap(1).count_in(firmware), 2, "a loader must write these");
        let data = |run: PageRange| -> u64 {
            data_pages(file.as_fd(), place(0), run).unwrap().map(|data| data.unwrap().len()).sum()
        };
        let overwritten = if is_tmpfs(file.as_fd()) { 0 } else { few.len() };
        assert_eq!([few, many].map(data), [overwritten, 0]);
        catch_up(&mut pair);
    }
}

#[test]
fn a_checkpoint_that_was_cut_off_leaves_no_trace() {
    let directory = scratch().unwrap();
    let mut pair = pair(directory.path(), CheckpointOptions::default());
    put(&mut pair, 0, 5, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    pair.put_zero(0, range(15, 100)).unwrap();
    pair.put_zero(1, range(0, 5)).unwrap();
    put(&mut pair, 0, 16, &[1]);
    pair.abort();
    assert!(pair.commit(&devices("running")).is_err(), "it was given up");
    catch_up(&mut pair);
    put(&mut pair, 0, 19, &[7]);
    let checkpoint = pair.commit(&devices("running")).unwrap();
    assert_eq!((checkpoint.number, checkpoint.pages.contents, checkpoint.pages.zero), (1, 1, 0));
    let snapshot = open(directory.path());
    let found: Vec<_> = (0..25).map(|at| read(&snapshot, 0, at)).collect();
    let wanted: Vec<_> = (0..25)
        .map(|at| match at {
            10..19 => page(at),
            19 => page(7),
            _ => [0; PAGE_LEN],
        })
        .collect();
    assert!(found == wanted);
    assert_eq!([0, 4, 5].map(|at| read(&snapshot, 1, at)), [[0; PAGE_LEN], page(4), page(5)]);
    assert!(!snapshot.stored_bitmap(1).get(PageNumber(0)), "its zeros were given up, too");
}

#[test]
fn a_page_that_changes_and_changes_back_within_a_checkpoint_ends_as_it_was() {
    let directory = scratch().unwrap();
    let mut pair = pair(directory.path(), CheckpointOptions::default());
    put(&mut pair, 0, 12, &[1]);
    put(&mut pair, 0, 12, &[12]);
    pair.put_zero(0, range(13, 14)).unwrap();
    put(&mut pair, 0, 13, &[13]);
    let mut contents = [0; PAGE_LEN];
    pair.read_back(0, PageNumber(13), &mut contents).unwrap();
    assert_eq!(contents, page(13));
    assert_eq!(pair.received().equal, 0);
    pair.commit(&devices("running")).unwrap();
    let snapshot = open(directory.path());
    assert_eq!([12, 13].map(|at| read(&snapshot, 0, at)), [12, 13].map(page));
}

#[test]
fn nothing_is_received_before_the_spare_has_caught_up_and_no_second_layout() {
    let directory = scratch().unwrap();
    let mut base = CheckpointDirectory::open(directory.path()).unwrap().receive_base(CheckpointOptions::new()).unwrap();
    assert!(base.put_zero(0, range(0, 1)).is_err(), "no layout yet");
    base.begin(&start(600)).unwrap();
    put(&mut base, 0, 0, &[1, 2, 3]);
    let mut pair = base.finish(&tail("running"), Manifest::new()).unwrap();
    let contents = page(1);
    let refused = |pair: &mut CheckpointPair| {
        let refusals = [
            pair.put_pages(0, PageNumber(0), &[IoSlice::new(&contents)]).is_err(),
            pair.put_zero(0, range(0, 1)).is_err(),
            pair.read_back(0, PageNumber(0), &mut [0; PAGE_LEN]).is_err(),
            pair.commit(&devices("running")).is_err(),
        ];
        refusals == [true; 4]
    };
    assert!(refused(&mut pair));
    assert_eq!(pair.catch_up(2).unwrap(), 1);
    assert!(refused(&mut pair));
    assert_eq!(pair.catch_up(2).unwrap(), 0);
    assert_eq!(pair.catch_up(2).unwrap(), 0, "as often as one likes");
    assert!(!refused(&mut pair));
    assert!(refused(&mut pair), "committed");
    catch_up(&mut pair);
    assert!(pair.begin(&start(600)).is_err());
    assert!(pair.put_early_sections(b"plugged").is_err());
    let two = [IoSlice::new(&contents), IoSlice::new(&contents)];
    for (block, first) in [(0, 599), (2, 0), (0, u64::MAX)] {
        assert!(pair.put_pages(block, PageNumber(first), &two).is_err());
    }
    assert!(pair.put_pages(0, PageNumber(0), &[IoSlice::new(&contents[1..])]).is_err());
    assert!(pair.put_zero(1, range(0, 17)).is_err());
}

#[test]
fn a_device_state_that_is_cut_is_refused_and_the_checkpoint_before_stays() {
    let directory = scratch().unwrap();
    let mut pair = pair(directory.path(), CheckpointOptions::default());
    let whole = devices("running");
    for cut in [0, 1, 40, whole.len() - 1] {
        put(&mut pair, 0, 12, &[1]);
        let refused = pair.commit(&whole[..cut]);
        assert!(matches!(refused, Err(SnapshotError::Structure { .. })), "{refused:?}");
        catch_up(&mut pair);
        assert_eq!(read(&open(directory.path()), 0, 12), page(12));
    }
    assert_eq!(pair.commit(&whole).unwrap().number, 1);
    assert_eq!(read(&open(directory.path()), 0, 12), page(12));
}

#[test]
fn a_file_that_readers_have_is_left_to_them() {
    let directory = scratch().unwrap();
    let mut pair = pair(directory.path(), CheckpointOptions::default());
    for mapped in [false, true] {
        let (before, number) = (open(directory.path()), pair.number());
        let mapping = mapped.then(|| before.mapping_descriptor().unwrap());
        if !mapped {
            before.lock_serving().unwrap();
        }
        for seed in 100..104 {
            put(&mut pair, 0, 12, &[seed]);
            pair.put_zero(0, range(11, 12)).unwrap();
            pair.commit(&devices("running")).unwrap();
            catch_up(&mut pair);
        }
        assert_eq!(before.manifest().unwrap().checkpoint, Some(number));
        let (first, second) = if mapped { ([0; PAGE_LEN], page(103)) } else { (page(11), page(12)) };
        assert_eq!([11, 12].map(|at| read(&before, 0, at)), [first, second], "as it was when it was opened");
        drop((before, mapping));
        assert_eq!(names(directory.path()).len(), 2);
        put(&mut pair, 0, 11, &[11]);
        pair.put_zero(0, range(11, 12)).unwrap();
    }
    pair.commit(&devices("running")).unwrap();
    assert_eq!(read(&open(directory.path()), 0, 12), page(103));
}

#[test]
fn the_checkpoint_can_be_served_and_not_replaced_and_the_spare_cannot_be_served() {
    let directory = scratch().unwrap();
    let mut pair = pair(directory.path(), CheckpointOptions::default());
    let target = directory.path().join(CHECKPOINT_NAME);
    for _ in 0..2 {
        assert!(matches!(UnnamedFile::create(&target, true), Err(SnapshotError::Locked { .. })));
        open(directory.path()).lock_serving().unwrap();
        let stale = open(directory.path());
        pair.commit(&devices("running")).unwrap();
        catch_up(&mut pair);
        let refused = stale.lock_serving().unwrap_err();
        assert!(matches!(refused, SnapshotError::Locked { .. }), "{refused}");
        assert!(stale.mapping_descriptor().is_err());
    }
}

#[test]
fn a_spare_that_another_program_has_removed_is_made_anew() {
    let directory = scratch().unwrap();
    let mut pair = pair(directory.path(), CheckpointOptions::default());
    let spare = |directory: &Path| {
        let name = names(directory).into_iter().find(|name| name != CHECKPOINT_NAME);
        directory.join(name.unwrap())
    };
    std::fs::remove_file(spare(directory.path())).unwrap();
    put(&mut pair, 0, 12, &[1]);
    let error = pair.commit(&devices("running")).unwrap_err();
    assert!(matches!(error, SnapshotError::Target { .. }), "{error}");
    assert_eq!(read(&open(directory.path()), 0, 12), page(12));
    catch_up(&mut pair);
    put(&mut pair, 0, 12, &[1]);
    pair.commit(&devices("running")).unwrap();
    assert_eq!(read(&open(directory.path()), 0, 12), page(1));
}

#[test]
fn another_base_follows_in_the_same_directory() {
    let directory = scratch().unwrap();
    let mut former = pair(directory.path(), CheckpointOptions::default());
    put(&mut former, 0, 12, &[1]);
    former.commit(&devices("running")).unwrap();
    let kept = former.into_directory();
    let mut base = kept.receive_base(CheckpointOptions::default()).unwrap();
    base.begin(&start(600)).unwrap();
    put(&mut base, 0, 12, &[2]);
    assert_eq!(read(&open(directory.path()), 0, 12), page(1), "until the new base is whole");
    assert_eq!(names(directory.path()), [CHECKPOINT_NAME]);
    let mut pair = base.finish(&tail("running"), Manifest::new()).unwrap();
    catch_up(&mut pair);
    assert_eq!((pair.number(), read(&open(directory.path()), 0, 12)), (0, page(2)));
}

#[test]
fn durable_and_checksummed_checkpoints_verify() {
    let directory = scratch().unwrap();
    let mut options = CheckpointOptions::default();
    (options.durability, options.checksum) = (Durability::Synced, true);
    let mut pair = pair(directory.path(), options);
    for seed in 100..103 {
        put(&mut pair, 0, 12, &[seed]);
        pair.commit(&devices("running")).unwrap();
        let snapshot = open(directory.path());
        assert!(snapshot.has_checksums());
        snapshot.verify_all().unwrap();
        catch_up(&mut pair);
    }
}

#[test]
fn on_a_filesystem_that_shares_space_the_spare_costs_none() {
    let ended = on_reflinks(|folder| {
        let directory = folder.path().join("checkpoints");
        let mut base = CheckpointDirectory::open(&directory).unwrap().receive_base(CheckpointOptions::new()).unwrap();
        base.begin(&start(LARGE)).unwrap();
        let seeds: Vec<u64> = (1..500).collect();
        put(&mut base, 0, 0, &seeds);
        let mut pair = base.finish(&tail("running"), Manifest::new()).unwrap();
        assert_eq!(pair.catch_up(0).unwrap(), 0, "nothing is copied");
        put(&mut pair, 0, 400, &[1, 402]);
        assert_eq!(pair.commit(&devices("running")).unwrap().pages.equal, 1);
        catch_up(&mut pair);
        let snapshot = open(&directory);
        assert_eq!([0, 400, 498].map(|at| read(&snapshot, 0, at)), [1, 1, 499].map(page));
    });
    ended.unwrap();
}

/// One thing that happens to a pair.
#[derive(Debug, Clone)]
enum Step {
    Pages { block: usize, first: u64, seeds: Vec<u64> },
    Zero { block: usize, first: u64, count: u64 },
    Commit,
    Abort,
}

fn step() -> impl Strategy<Value = Step> {
    // Few different pages, so that many are equal to those before.
    let pages = (0_usize..2, 0_u64..300, proptest::collection::vec(1_u64..4, 1..150));
    prop_oneof![
        6 => pages.prop_map(|(block, first, seeds)| Step::Pages { block, first, seeds }),
        3 => (0_usize..2, 0_u64..300, 1_u64..100).prop_map(|(block, first, count)| Step::Zero { block, first, count }),
        3 => Just(Step::Commit),
        1 => Just(Step::Abort),
    ]
}

/// Hands a step to a sink, cut off at the end of its block.
fn act(sink: &mut impl PageSink, lengths: [u64; 2], step: &Step) {
    match step {
        Step::Pages { block, first, seeds } => {
            let first = first % lengths[*block];
            let room = usize::try_from(lengths[*block] - first).unwrap();
            put(sink, *block, first, &seeds[..seeds.len().min(room)]);
        }
        Step::Zero { block, first, count } => {
            let first = first % lengths[*block];
            sink.put_zero(*block, range(first, (first + count).min(lengths[*block]))).unwrap();
        }
        Step::Commit | Step::Abort => {}
    }
}

/// Bytes of a file before its trailer.
fn stream(path: &Path) -> Vec<u8> {
    let snapshot = Snapshot::open(path).unwrap();
    let end = snapshot.layout().tail_offset + snapshot.device_tail().len() as u64;
    let mut bytes = vec![0; usize::try_from(end).unwrap()];
    File::open(path).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn each_checkpoint_is_what_one_save_of_all_that_counts_would_be(
        base in proptest::collection::vec(step(), 1..6),
        steps in proptest::collection::vec(step(), 1..40),
        checksum in any::<bool>(),
        large in prop::bool::weighted(0.1),
        limit in 1_u64..200,
    ) {
        let lengths = [if large { LARGE } else { 600 }, 16];
        let directory = scratch().unwrap();
        let kept = directory.path().join("kept");
        let mut options = CheckpointOptions::default();
        options.checksum = checksum;
        let mut sink = CheckpointDirectory::open(&kept).unwrap().receive_base(options).unwrap();
        sink.begin(&start(lengths[0])).unwrap();
        // Something has to come with a base.
        let first = Step::Zero { block: 1, first: 0, count: 3 };
        let mut counted = vec![first];
        counted.extend(base);
        counted.iter().for_each(|step| act(&mut sink, lengths, step));
        let mut pair = sink.finish(&tail("running"), Manifest::new()).unwrap();
        let mut open_ones: Vec<Step> = Vec::new();
        let mut number = 0;
        for step in [Step::Commit].into_iter().chain(steps).chain([Step::Commit]) {
            match &step {
                Step::Commit | Step::Abort => {
                    while pair.catch_up(limit).unwrap() > 0 {}
                    if matches!(step, Step::Abort) {
                        pair.abort();
                        open_ones.clear();
                    } else {
                        let before = inode(&kept);
                        number += 1;
                        let checkpoint = pair.commit(&devices("running")).unwrap();
                        prop_assert_eq!(checkpoint.number, number);
                        prop_assert_ne!(inode(&kept), before);
                        counted.append(&mut open_ones);
                    }
                    let snapshot = open(&kept);
                    prop_assert_eq!(snapshot.manifest().and_then(|manifest| manifest.checkpoint), Some(number));
                    prop_assert!(snapshot.is_mappable());
                    prop_assert_eq!(snapshot.warnings().len(), usize::from(snapshot.stored_pages() == 0));
                    snapshot.verify_all().unwrap();
                    prop_assert_eq!(snapshot.has_checksums(), checksum);
                    let single = directory.path().join("single");
                    let pending = UnnamedFile::create(&single, true).unwrap();
                    let mut writer = SnapshotWriter::new(pending, CHECKED).unwrap();
                    writer.begin(&start(lengths[0])).unwrap();
                    counted.iter().for_each(|step| act(&mut writer, lengths, step));
                    writer.finish(&tail("running"), Manifest::new()).unwrap();
                    let (found, wanted) = (stream(&kept.join(CHECKPOINT_NAME)), stream(&single));
                    prop_assert!(found == wanted, "the files differ");
                    while pair.catch_up(limit).unwrap() > 0 {}
                }
                step => {
                    act(&mut pair, lengths, step);
                    open_ones.push(step.clone());
                }
            }
        }
        drop(pair);
        prop_assert_eq!(names(&kept), [CHECKPOINT_NAME]);
    }
}
