//! Persistent bitmaps that follow what is written.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;
use std::thread;

use limosa_image::qcow2::{CheckOptions, CreateOptions, Qcow2, Qcow2Options, Repair, check, read_bitmaps, repair};
use limosa_image::{BitmapAction, Disk, GuestOffset, ImageError};
use limosa_storage::testing::{Failing, Fault, Loss, PowerCut, RequestHolder, SeededRandom};
use limosa_storage::{MemoryStorage, Operation, Storage, block_on};
use limosa_testkit::image::{TestImage, contents, filled, number, poll_once, put, raw, raw_filled, read_all};

pub(super) const KB: u64 = 1 << 10;

fn kinds() -> Vec<CreateOptions> {
    let usual = CreateOptions::default().size(256 * KB);
    vec![
        usual.clone().cluster_size(512),
        usual.clone().cluster_size(512).refcount_bits(64).lazy_refcounts(true),
        usual.clone().cluster_size(16 * KB).extended_l2(true),
        usual.cluster_size(4 * KB),
    ]
}

pub(super) fn open(file: Arc<dyn Storage>, below: Option<Arc<dyn Disk>>) -> Arc<Qcow2> {
    TestImage::existing(file).open_over(below, Qcow2Options::default().cache_size(0).allocate_ahead(16 * KB))
}

pub(super) fn change(disk: &dyn Disk, name: &str, actions: &[BitmapAction]) -> Result<(), ImageError> {
    let changes: Vec<_> = actions.iter().map(|action| (name.to_owned(), action.clone())).collect();
    block_on(disk.change_bitmaps(&changes))
}

pub(super) fn add(granularity: u64) -> BitmapAction {
    BitmapAction::Add { granularity: Some(granularity) }
}

/// The runs of a bitmap, each dirty or not, put together where they are the same.
fn runs(disk: &dyn Disk, name: &str) -> Result<Vec<(bool, Range<u64>)>, ImageError> {
    let mut found: Vec<(bool, Range<u64>)> = Vec::new();
    let mut at = 0;
    while at < disk.len() {
        let (dirty, length) = disk.dirty_run(name, GuestOffset(at), disk.len() - at)?;
        match found.last_mut() {
            Some((before, range)) if *before == dirty => range.end += length,
            _ => found.push((dirty, at..at + length)),
        }
        at += length;
    }
    Ok(found)
}

/// Whether the bytes of each 512 are dirty.
fn sectors(disk: &dyn Disk, name: &str) -> Result<Vec<bool>, ImageError> {
    let runs = runs(disk, name)?.into_iter();
    Ok(runs.flat_map(|(dirty, range)| vec![dirty; usize::try_from((range.end - range.start) / 512).unwrap()]).collect())
}

/// A bitmap as it has to be.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Expected {
    granularity: u64,
    enabled: bool,
    sectors: Vec<bool>,
}

impl Expected {
    fn set(&mut self, range: &Range<u64>, size: u64) {
        let begin = range.start / self.granularity * self.granularity;
        let end = range.end.next_multiple_of(self.granularity).min(size);
        (begin / 512..end / 512).for_each(|sector| self.sectors[usize::try_from(sector).unwrap()] = true);
    }
}

type Model = BTreeMap<String, Expected>;

fn matches(disk: &dyn Disk, model: &Model, what: &str) {
    let found = block_on(disk.bitmaps()).unwrap();
    let names: Vec<_> =
        found.iter().map(|bitmap| bitmap.name.clone()).collect::<std::collections::BTreeSet<_>>().into_iter().collect();
    assert_eq!(names, model.keys().cloned().collect::<Vec<_>>(), "{what}");
    for bitmap in found {
        let expected = &model[&bitmap.name];
        let found = Expected {
            granularity: bitmap.granularity,
            enabled: bitmap.enabled,
            sectors: sectors(disk, &bitmap.name).unwrap(),
        };
        assert_eq!(&found, expected, "{what}: {}", bitmap.name);
        let bits = expected.sectors.chunks(usize::try_from(expected.granularity / 512).unwrap()).filter(|bits| bits[0]);
        assert_eq!(bitmap.set, Some(bits.count() as u64), "{what}: {}", bitmap.name);
    }
}

/// A change of bitmaps by chance, and of the model.
fn change_by_chance(disk: &dyn Disk, model: &mut Model, chance: &mut SeededRandom) -> String {
    let name = *chance.choose(&["a", "b", "c"]);
    let size = usize::try_from(disk.len() / 512).unwrap();
    let now = model.get(name).cloned();
    let (action, after) = match (chance.below(6), now) {
        (0 | 1, None) => {
            let granularity = 512 << chance.below(7);
            (add(granularity), Some(Expected { granularity, enabled: true, sectors: vec![false; size] }))
        }
        (2, Some(_)) => (BitmapAction::Remove, None),
        (3, Some(now)) => (BitmapAction::Clear, Some(Expected { sectors: vec![false; size], ..now })),
        (4, Some(now)) if now.enabled => (BitmapAction::Disable, Some(Expected { enabled: false, ..now })),
        (4, Some(now)) => (BitmapAction::Enable, Some(Expected { enabled: true, ..now })),
        (5, Some(mut now)) => {
            let source = *chance.choose(&["a", "b", "c"]);
            let Some(other) = model.get(source) else { return String::new() };
            for (sector, dirty) in (0..).zip(other.sectors.clone()) {
                if dirty {
                    now.set(&(sector * 512..sector * 512 + 512), disk.len());
                }
            }
            (BitmapAction::Merge { source: source.to_owned() }, Some(now))
        }
        _ => return String::new(),
    };
    let said = format!("{name} {action:?}");
    change(disk, name, &[action]).unwrap();
    match after {
        Some(after) => drop(model.insert(name.to_owned(), after)),
        None => drop(model.remove(name)),
    }
    said
}

/// A request by chance, and its bytes; empty: it changes none.
fn request(disk: &dyn Disk, chance: &mut SeededRandom) -> Range<u64> {
    let at = chance.below(disk.len() / 512) * 512;
    let length = ((1 + chance.below(40)) * 512).min(disk.len() - at);
    let range = at..at + length;
    match chance.below(6) {
        0 => block_on(disk.write_zeroes(GuestOffset(at), length, true)),
        1 => block_on(disk.write_zeroes(GuestOffset(at), length, false)),
        2 => block_on(disk.discard(GuestOffset(at), length)),
        3 => {
            let unit = 16 * KB;
            let at = at / unit * unit;
            let from = filled(5, unit);
            let mut compressor = disk.compressor(None).unwrap();
            let compressed = compressor.compress(&from.into());
            block_on(disk.write_compressed(GuestOffset(at), compressed)).unwrap();
            return at..at + unit;
        }
        _ => block_on(disk.write(GuestOffset(at), filled(7, length).into())),
    }
    .unwrap();
    range
}

#[test]
fn bitmaps_are_what_was_written_through_changes_growth_and_closes() {
    for (number, options) in (1..).zip(kinds()) {
        let mut chance = SeededRandom::new(number);
        let TestImage { file, .. } = TestImage::new(&options);
        let mut disk = open(Arc::clone(&file), None);
        let mut model = Model::new();
        for step in 0..400 {
            let said = match chance.below(20) {
                0..12 => {
                    let range = request(&*disk, &mut chance);
                    model.values_mut().filter(|expected| expected.enabled).for_each(|it| it.set(&range, disk.len()));
                    format!("{range:?}")
                }
                12..17 => change_by_chance(&*disk, &mut model, &mut chance),
                17 if disk.len() < 2048 * KB => {
                    block_on(disk.grow(disk.len() + 32 * KB)).unwrap();
                    let sectors = usize::try_from(disk.len() / 512).unwrap();
                    // A bit about bytes on both sides of the old end is about the new ones, too.
                    for expected in model.values_mut() {
                        let old = expected.sectors.len();
                        let each = usize::try_from(expected.granularity / 512).unwrap();
                        let last = expected.sectors.last().copied().unwrap_or(false);
                        expected.sectors.resize(old.next_multiple_of(each).min(sectors), last);
                        expected.sectors.resize(sectors, false);
                    }
                    format!("grown to {}", disk.len())
                }
                18 => {
                    block_on(disk.close()).unwrap();
                    drop(disk);
                    let report = block_on(check(&*file, CheckOptions::default())).unwrap();
                    assert!(report.is_clean() && report.leaks == 0, "{options:?} {step}: {:#?}", report.findings);
                    matches(&*TestImage::existing(Arc::clone(&file)).open_read_only(), &model, "stored");
                    disk = open(Arc::clone(&file), None);
                    "closed".to_owned()
                }
                _ => "nothing".to_owned(),
            };
            matches(&*disk, &model, &format!("{options:?} {step}: {said}"));
        }
    }
}

/// An image over a backing image, with these bitmaps, closed.
pub(super) fn with_bitmaps(options: &CreateOptions, bitmaps: &[(&str, u64)]) -> Arc<dyn Storage> {
    let made = TestImage::new(options);
    let disk = made.open();
    for (name, granularity) in bitmaps {
        change(&*disk, name, &[add(*granularity)]).unwrap();
    }
    block_on(disk.write(GuestOffset(0), filled(1, 256 * KB).into())).unwrap();
    for (name, _) in bitmaps {
        change(&*disk, name, &[BitmapAction::Clear]).unwrap();
    }
    block_on(disk.close()).unwrap();
    made.file
}

#[test]
fn after_a_power_cut_a_bitmap_has_all_that_changed_or_is_not_relied_on() {
    let mut chance = SeededRandom::new(3);
    let (mut relied_on, mut not) = (0, 0);
    for options in kinds() {
        let file = with_bitmaps(&options, &[("fine", 512), ("coarse", 16 * KB), ("off", 512)]);
        let before = read_all(&*open(Arc::clone(&file), None));
        let power = PowerCut::new();
        let storage = power.add_storage("image", contents(&*file), 1 << 30);
        for _ in 0..3 {
            let disk = open(Arc::clone(&storage), None);
            // The first time it is switched off, and stays so.
            change(&*disk, "off", &[BitmapAction::Disable]).unwrap();
            for _ in 0..6 {
                request(&*disk, &mut chance);
                if chance.below(3) == 0 {
                    block_on(disk.flush()).unwrap();
                }
            }
            block_on(disk.close()).unwrap();
        }
        for moment in 0..=power.moments() {
            for loss in [Loss::None, Loss::All, Loss::Some(chance.bits())] {
                let what = format!("{options:?}, cut at {moment} of {}, {loss:?}", power.moments());
                let cut: Arc<dyn Storage> =
                    Arc::new(MemoryStorage::with_contents(power.cut(moment, loss).remove(0), 1 << 30));
                let report = block_on(repair(&*cut, Repair::All, CheckOptions::default())).unwrap();
                assert!(report.is_clean(), "{what}: {:#?}", report.findings);
                let disk = TestImage::existing(cut).open_read_only();
                let after = read_all(&*disk);
                for bitmap in block_on(disk.bitmaps()).unwrap() {
                    if bitmap.set.is_none() {
                        not += 1;
                        continue;
                    }
                    relied_on += 1;
                    let sectors = sectors(&*disk, &bitmap.name).unwrap();
                    if bitmap.name == "off" {
                        assert!(!sectors.contains(&true), "{what}");
                        continue;
                    }
                    let pairs = before.chunks(512).zip(after.chunks(512)).zip(&sectors);
                    let missed = pairs.enumerate().find(|(_, ((old, new), dirty))| old != new && !**dirty);
                    assert!(
                        missed.is_none(),
                        "{what}: {bitmap:?} misses sector {:?}",
                        missed.map(|(number, _)| number)
                    );
                }
            }
        }
    }
    assert!(relied_on > 500 && not > 500, "{relied_on} {not}");
}

#[test]
fn a_bitmap_that_is_stored_again_takes_no_more_space() {
    let file = with_bitmaps(&CreateOptions::default().size(256 * KB).cluster_size(512), &[("a", 512)]);
    let lengths: Vec<u64> = (0..40)
        .map(|round| {
            let disk = open(Arc::clone(&file), None);
            block_on(disk.write(GuestOffset(round % 7 * 512), filled(2, 512).into())).unwrap();
            block_on(disk.close()).unwrap();
            file.length().unwrap()
        })
        .collect();
    assert!(lengths.iter().all(|length| *length == lengths[0]), "{lengths:?}");
}

#[test]
fn requests_that_fail_or_are_dropped_set_their_bits() {
    let made = with_bitmaps(&CreateOptions::default().size(256 * KB).cluster_size(16 * KB), &[("a", 512)]);
    let failing = Failing::only(&[Operation::Write]);
    let disk = open(failing.wrap(made), Some(raw_filled(9, 256 * KB)));
    let of = |range: Range<u64>| {
        let whole = 256 * KB;
        [(false, 0..range.start), (true, range.clone()), (false, range.end..whole)]
            .into_iter()
            .filter(|(_, range)| !range.is_empty())
            .collect::<Vec<_>>()
    };
    failing.fail(0, u64::MAX, Fault::Broken);
    block_on(disk.write(GuestOffset(16 * KB), filled(3, KB).into())).unwrap_err();
    failing.mend();
    assert_eq!(runs(&*disk, "a").unwrap(), of(16 * KB..17 * KB));
    change(&*disk, "a", &[BitmapAction::Clear]).unwrap();
    let mut request = disk.write(GuestOffset(64 * KB), filled(4, KB).into());
    let _ = poll_once(&mut request);
    drop(request);
    assert_eq!(runs(&*disk, "a").unwrap(), of(64 * KB..65 * KB));
}

/// A disk that is written already, with the bitmaps a and b, whose requests to the storage can be held from now on.
fn held_disk(held: &RequestHolder) -> Arc<Qcow2> {
    held.release_all();
    let options = CreateOptions::default().size(256 * KB).cluster_size(16 * KB);
    let disk = open(held.wrap(with_bitmaps(&options, &[("a", 512), ("b", 512)])), None);
    block_on(disk.write(GuestOffset(0), filled(1, 512).into())).unwrap();
    change(&*disk, "a", &[BitmapAction::Clear]).unwrap();
    held.hold_again();
    disk
}

fn clear_of_a() -> [(String, BitmapAction); 1] {
    [("a".to_owned(), BitmapAction::Clear)]
}

/// Whether the 512 bytes at an offset are dirty in a.
fn is_dirty(disk: &dyn Disk, at: u64) -> bool {
    disk.dirty_run("a", GuestOffset(at), 512).unwrap().0
}

/// Carries out the one request of this kind that is held.
fn release(held: &RequestHolder, operation: Operation) {
    let waiting: Vec<_> = held.waiting().into_iter().filter(|request| request.operation == operation).collect();
    let [request] = &waiting[..] else { panic!("{waiting:?}") };
    assert!(held.release(request.number));
}

#[test]
fn a_change_that_is_dropped_takes_no_bits_of_writes_that_are_acknowledged_later() {
    let held = RequestHolder::only(&[Operation::Read, Operation::Write]);
    let disk = held_disk(&held);
    let mut write = disk.write(GuestOffset(4 * KB), filled(2, 512).into());
    assert!(poll_once(&mut write).is_pending());
    let changes = [clear_of_a().to_vec(), vec![("c".to_owned(), add(512))]].concat();
    let mut dropped = disk.change_bitmaps(&changes);
    assert!(poll_once(&mut dropped).is_pending());
    drop(dropped);
    release(&held, Operation::Write);
    assert_eq!(poll_once(&mut write), Poll::Ready(true));
    assert!(is_dirty(&*disk, 4 * KB));
    held.release_all();
    // Both drive what was begun before.
    block_on(disk.read(GuestOffset(0), filled(0, 512).into())).unwrap();
    change(&*disk, "b", &[BitmapAction::Disable]).unwrap();
    assert!(is_dirty(&*disk, 4 * KB));
    assert_eq!(block_on(disk.bitmaps()).unwrap().len(), 2);
    drop(write);
    block_on(disk.close()).unwrap();
}

#[test]
fn bytes_of_a_dropped_request_that_change_after_a_change_of_bitmaps_have_their_bits() {
    // In place, dropped before the change and while it is under way.
    for meanwhile in [false, true] {
        let held = RequestHolder::only(&[Operation::Read, Operation::Write]);
        let disk = held_disk(&held);
        let mut dropped = disk.write(GuestOffset(4 * KB), filled(2, 512).into());
        let changes = clear_of_a();
        let mut clear = disk.change_bitmaps(&changes);
        if meanwhile {
            assert!(poll_once(&mut clear).is_pending());
        }
        assert!(poll_once(&mut dropped).is_pending());
        drop(dropped);
        assert!(poll_once(&mut clear).is_pending());
        release(&held, Operation::Read);
        assert_eq!(poll_once(&mut clear), Poll::Ready(true));
        drop(clear);
        release(&held, Operation::Write);
        held.release_all();
        assert_eq!(read_all(&*disk)[4 << 10], 2);
        let whole = 256 * KB;
        let expected = [(false, 0..4 * KB), (true, 4 * KB..4 * KB + 512), (false, 4 * KB + 512..whole)];
        assert_eq!(runs(&*disk, "a").unwrap(), expected, "{meanwhile}");
        // It is over: its bit is cleared as any other.
        block_on(disk.flush()).unwrap();
        change(&*disk, "a", &clear_of_a().map(|(_, action)| action)).unwrap();
        assert_eq!(runs(&*disk, "a").unwrap(), [(false, 0..whole)]);
        block_on(disk.close()).unwrap();
    }
}

#[test]
fn bytes_of_a_dropped_request_that_another_one_carries_along_have_their_bits() {
    let held = RequestHolder::only(&[Operation::Read]);
    held.release_all();
    let below = raw(held.wrap(Arc::new(MemoryStorage::with_contents(vec![9; 256 << 10], 256 * KB))));
    let TestImage { file, .. } = TestImage::new(&CreateOptions::default().size(256 * KB).cluster_size(16 * KB));
    let disk = open(file, Some(below));
    change(&*disk, "a", &[add(512)]).unwrap();
    held.hold_again();
    let mut dropped = disk.write(GuestOffset(0), filled(2, 512).into());
    assert!(poll_once(&mut dropped).is_pending());
    let mut other = disk.write(GuestOffset(4 * KB), filled(3, 512).into());
    assert!(poll_once(&mut other).is_pending());
    drop(dropped);
    change(&*disk, "a", &[BitmapAction::Clear]).unwrap();
    held.release_all();
    block_on(other).unwrap();
    assert_eq!(read_all(&*disk)[0], 2);
    assert!(is_dirty(&*disk, 0) && is_dirty(&*disk, 4 * KB) && !is_dirty(&*disk, 16 * KB));
    block_on(disk.close()).unwrap();
}

#[test]
fn a_change_of_two_bitmaps_is_one_moment_for_writers() {
    let file = with_bitmaps(&CreateOptions::default().size(256 * KB), &[("even", 512)]);
    let disk = open(file, None);
    thread::scope(|scope| {
        let writers: Vec<_> = (0..3_u64)
            .map(|writer| {
                let disk = &disk;
                scope.spawn(move || {
                    for round in 0..100_u64 {
                        let at = (writer * 128 + round) * 512;
                        block_on(disk.write(GuestOffset(at), filled(5, 512).into())).unwrap();
                    }
                })
            })
            .collect();
        let names = ["even", "odd"];
        for round in 0..50 {
            let (old, new) = (names[round % 2], names[(round + 1) % 2]);
            let changes = [(new.to_owned(), add(512)), (old.to_owned(), BitmapAction::Disable)];
            block_on(disk.change_bitmaps(&changes)).unwrap();
            // What the old one has is kept, as a backup keeps it.
            let changes = if round == 0 {
                vec![("all".to_owned(), add(512)), ("all".to_owned(), BitmapAction::Disable)]
            } else {
                Vec::new()
            };
            let merge = ("all".to_owned(), BitmapAction::Merge { source: old.to_owned() });
            let gone = (old.to_owned(), BitmapAction::Remove);
            block_on(disk.change_bitmaps(&[&changes[..], &[merge, gone]].concat())).unwrap();
        }
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
    change(&*disk, "all", &[BitmapAction::Merge { source: "even".into() }]).unwrap();
    let sectors = sectors(&*disk, "all").unwrap();
    let written: Vec<bool> = (0..512).map(|sector| sector / 128 < 3 && sector % 128 < 100).collect();
    assert_eq!(sectors, written);
}

#[test]
fn changes_are_all_carried_out_or_none_and_say_why_not() {
    let disk = open(with_bitmaps(&CreateOptions::default().size(256 * KB), &[("a", 512)]), None);
    let refused = |name: &str, actions: &[BitmapAction]| change(&*disk, name, actions).unwrap_err().to_string();
    assert_eq!(refused("b", &[BitmapAction::Clear]), "image: it has no bitmap \"b\"");
    assert_eq!(refused("b", &[add(512), add(512)]), "image: bitmap \"b\" already exists");
    assert_eq!(refused("a", &[BitmapAction::Merge { source: "b".into() }]), "image: it has no bitmap \"b\"");
    let said = refused("b", &[add(513)]);
    assert_eq!(said, "image: granularity 513: must be a power of two from 512 bytes to 2 GiB");
    assert_eq!(block_on(disk.bitmaps()).unwrap().len(), 1);
    let missing = disk.dirty_run("b", GuestOffset(0), 512).unwrap_err().to_string();
    assert_eq!(missing, "image: it has no bitmap \"b\"");
    let raw = raw_filled(1, KB);
    assert!(block_on(raw.bitmaps()).unwrap().is_empty());
    assert_eq!(change(&*raw, "a", &[add(512)]).unwrap_err().to_string(), "below: format raw has no bitmaps");
}

/// The cluster that has the first bits of the only bitmap.
fn bits_of(image: &TestImage) -> u64 {
    let directory = image.header().extensions.bitmaps.unwrap().directory.0;
    number(&*image.file, number(&*image.file, directory))
}

/// An image with a bitmap that has bits.
fn with_bits() -> TestImage {
    let file = with_bitmaps(&CreateOptions::default().size(256 * KB).cluster_size(512), &[("a", 512)]);
    let disk = open(Arc::clone(&file), None);
    block_on(disk.write(GuestOffset(0), filled(1, 512).into())).unwrap();
    block_on(disk.close()).unwrap();
    TestImage::existing(file)
}

#[test]
fn a_bitmap_whose_clusters_may_be_something_else_is_left_alone_and_marked() {
    for wrong in 0..3_u8 {
        let image = with_bits();
        let (header, bits) = (image.header(), bits_of(&image));
        match wrong {
            // Its bits lie where the L1 table is.
            0 => {
                let table = number(&*image.file, header.extensions.bitmaps.as_ref().unwrap().directory.0);
                put(&*image.file, table, &header.l1.0.0.to_be_bytes());
            }
            // Nothing, or two, refer to them, as the refcounts say.
            _ => {
                // Blocks of 256 refcounts of two bytes.
                let (block, place) = (bits / 512 / 256, bits / 512 % 256);
                let block = number(&*image.file, header.refcount_table.0.0 + block * 8);
                put(&*image.file, block + place * 2, &[0, wrong * 2 - 2]);
            }
        }
        let disk = open(Arc::clone(&image.file), None);
        assert_eq!(block_on(disk.bitmaps()).unwrap()[0].set, None, "{wrong}");
        let before = contents(&*image.file);
        block_on(disk.write(GuestOffset(0), filled(2, 512).into())).unwrap();
        block_on(disk.close()).unwrap();
        let after = contents(&*image.file);
        let l1 = usize::try_from(header.l1.0.0).unwrap();
        assert_eq!(before[l1..l1 + 512], after[l1..l1 + 512], "{wrong}");
        let bitmaps = block_on(read_bitmaps(&*image.file, &image.header())).unwrap();
        assert!(bitmaps[0].in_use && bitmaps[0].auto, "{wrong}");
    }
}

#[test]
fn contents_are_not_written_over_a_bitmap() {
    let image = with_bits();
    let l2 = number(&*image.file, image.header().l1.0.0) & !(1 << 63);
    put(&*image.file, l2, &(bits_of(&image) | 1 << 63).to_be_bytes());
    let disk = open(Arc::clone(&image.file), None);
    let error = block_on(disk.write(GuestOffset(0), filled(2, 512).into())).unwrap_err();
    assert!(matches!(error, ImageError::Corrupt { .. }) && error.to_string().contains("bitmap"), "{error}");
    assert!(image.header().features.corrupt());
}

#[test]
fn a_close_that_cannot_store_bitmaps_says_so_and_loses_nothing_else() {
    let image = with_bits();
    let failing = Failing::only(&[Operation::Write]);
    let disk = open(failing.wrap(Arc::clone(&image.file)), None);
    block_on(disk.write(GuestOffset(128 * KB), filled(7, KB).into())).unwrap();
    block_on(disk.flush()).unwrap();
    // What is left to do for a close writes refcounts, and then the bitmap.
    let before = failing.seen().0;
    let twin = with_bits();
    let counting = Failing::only(&[Operation::Write]);
    let other = open(counting.wrap(twin.file), None);
    block_on(other.write(GuestOffset(128 * KB), filled(7, KB).into())).unwrap();
    block_on(other.flush()).unwrap();
    assert_eq!(counting.seen().0, before);
    block_on(other.close()).unwrap();
    let writes = counting.seen().0 - before;
    failing.fail(writes - 3, u64::MAX, Fault::NoSpace);
    let error = block_on(disk.close()).unwrap_err();
    assert!(matches!(error, ImageError::BitmapsNotStored { .. }), "{error:?}");
    failing.mend();
    drop(disk);
    let report = block_on(check(&*image.file, CheckOptions::default())).unwrap();
    assert!(report.is_clean(), "{:#?}", report.findings);
    let disk = image.open_read_only();
    assert_eq!(block_on(disk.bitmaps()).unwrap()[0].set, None);
    assert_eq!(read_all(&*disk)[128 << 10..129 << 10], [7; 1024]);
}

#[test]
fn bitmaps_that_would_take_too_much_memory_are_refused_before_they_do() {
    // One with a bit for each 512 bytes of 2 TiB has 512 MiB, which is the most for all of them.
    let image = TestImage::new(&CreateOptions::default().size(2 << 40).cluster_size(2 << 20));
    let disk = image.open();
    change(&*disk, "a", &[add(1 << 20)]).unwrap();
    for error in [change(&*disk, "b", &[add(512)]), block_on(disk.grow(8 << 50))] {
        let said = error.unwrap_err().to_string();
        assert!(said.contains("bytes of memory: take larger granularities"), "{said}");
    }
    assert_eq!((disk.len(), block_on(disk.bitmaps()).unwrap().len()), (2 << 40, 1));
    block_on(disk.grow(4 << 40)).unwrap();
    block_on(disk.close()).unwrap();
}
