//! Internal snapshots: the disk and every snapshot read as before or as after, at any moment.

use std::sync::Arc;

use limosa_image::Disk as _;
use limosa_image::qcow2::{
    CheckOptions, CreateOptions, Finding, FindingKind, Header, ImageParts, Qcow2, Qcow2Options, Repair, SnapshotChange,
    SnapshotChoice, VmStateWriter, change_snapshots, check, read_snapshots, repair,
};
use limosa_image::{GuestOffset, ImageError};
use limosa_storage::testing::{Failing, Fault, Loss, PowerCut, SeededRandom};
use limosa_storage::{Buffer, MemoryStorage, Storage, block_on};
use limosa_testkit::image::{TestImage, contents, memory_file, read, read_all};

use crate::layers::times;

const MOST: u64 = 64 << 20;

/// The contents of the disk and of its snapshots, and the states of VMs in them, by name.
type Views = Vec<(String, Vec<u8>)>;

fn views(file: &Arc<dyn Storage>) -> Views {
    let header = block_on(Header::read(&**file)).unwrap();
    let mut all = vec![(String::new(), view(file, header.clone()))];
    for snapshot in block_on(read_snapshots(&**file, &header)).unwrap() {
        let mut then = header.clone();
        (then.l1, then.size) = (snapshot.l1, snapshot.disk_size.unwrap());
        if snapshot.vm_state_size > 0 {
            let start = then.size.next_multiple_of(then.geometry().l2_covers());
            let mut beyond = then.clone();
            beyond.size = start + snapshot.vm_state_size;
            let state = read(&*disk(file, beyond), start, snapshot.vm_state_size);
            assert!(state == vm_state(&snapshot.name), "the state of {}", snapshot.name);
        }
        all.push((snapshot.name, view(file, then)));
    }
    all
}

fn view(file: &Arc<dyn Storage>, header: Header) -> Vec<u8> {
    read_all(&*disk(file, header))
}

fn disk(file: &Arc<dyn Storage>, header: Header) -> Arc<Qcow2> {
    let parts = ImageParts::new(Arc::clone(file), header);
    block_on(Qcow2::open(parts, Qcow2Options::default().read_only(true))).unwrap()
}

/// The state of the VM that a snapshot of this name has.
fn vm_state(name: &str) -> Vec<u8> {
    let mut chance = SeededRandom::new(name.bytes().map(u64::from).sum());
    let length = 1 + chance.below(2 << 20);
    chance.bytes(usize::try_from(length).unwrap())
}

/// Takes a snapshot with the state of a VM.
fn with_vm_state(file: &dyn Storage, name: &str, taken: (u32, u32)) -> Result<(), ImageError> {
    block_on(async {
        let mut writer = VmStateWriter::begin(file, name, CheckOptions::default()).await?;
        for piece in vm_state(name).chunks(300_001) {
            if let Err(error) = writer.write(piece).await {
                writer.undo().await;
                return Err(error);
            }
        }
        writer.finish(name, taken).await
    })
}

fn change(chance: &mut SeededRandom, names: &[String], number: u64) -> SnapshotChange {
    match (names, chance.below(3)) {
        ([_, ..], 1) => SnapshotChange::Apply(SnapshotChoice::IdOrName(chance.choose(names).clone())),
        ([_, ..], 2) => SnapshotChange::Delete(SnapshotChoice::IdOrName(chance.choose(names).clone())),
        _ => {
            let kind = if chance.one_in(3) { "vm" } else { "s" };
            SnapshotChange::Create { name: format!("{kind}{number}"), taken: (1, 2) }
        }
    }
}

fn apply(file: &dyn Storage, change: &SnapshotChange) -> Result<(), ImageError> {
    if let SnapshotChange::Create { name, taken } = change
        && name.starts_with("vm")
    {
        return with_vm_state(file, name, *taken);
    }
    block_on(change_snapshots(file, change, CheckOptions::default()))
}

fn write(chance: &mut SeededRandom, image: &TestImage) {
    let disk = image.open_with(Qcow2Options::default().allocate_ahead(0));
    for _ in 0..5 {
        let at = chance.below(disk.len() / 512) * 512;
        let length = (512 * (1 + chance.below(40))).min(disk.len() - at);
        let bytes = chance.bytes(usize::try_from(length).unwrap());
        block_on(disk.write(GuestOffset(at), Buffer::from_slice(&bytes).into())).unwrap();
    }
    block_on(disk.close()).unwrap();
}

/// An image with snapshots, made by chance.
fn image(chance: &mut SeededRandom, changes: u64) -> Vec<u8> {
    let cluster = *chance.choose(&[512, 512, 4096, 16384]);
    let options = CreateOptions::default()
        .size(512 * (100 + chance.below(400)))
        .cluster_size(cluster)
        .extended_l2(cluster == 16384)
        .refcount_bits(*chance.choose(&[8, 16, 64]));
    let image = TestImage::create_in(memory_file("image"), &options);
    write(chance, &image);
    for number in 0..changes {
        let names: Vec<_> = views(&image.file).into_iter().skip(1).map(|(name, _)| name).collect();
        apply(&*image.file, &change(chance, &names, number)).unwrap();
        write(chance, &image);
    }
    contents(&*image.file)
}

fn restored(bytes: Vec<u8>) -> Arc<dyn Storage> {
    Arc::new(MemoryStorage::with_contents(bytes, MOST))
}

/// Expects that an image has what it had, or what it was to have; that nothing in it can be overwritten, though it is
/// used on before a repair; and that a repair leaves it so.
#[track_caller]
fn assert_old_or_new(file: &Arc<dyn Storage>, old: &Views, new: &Views, what: &str) {
    let found = views(file);
    assert!(found == *old || found == *new, "{what}");
    let report = block_on(check(&**file, CheckOptions::default())).unwrap();
    // A flag that does not say what a refcount says does no harm where nothing is shared; a refcount that is too low
    // does.
    let harmless = |finding: &Finding| finding.kind == FindingKind::Leak || finding.why.contains("written in place");
    assert!(report.findings.iter().all(harmless), "{what}: {:#?}", report.findings);
    write(&mut SeededRandom::new(7), &TestImage::existing(Arc::clone(file)));
    let written = views(file);
    assert!(written[1..] == found[1..], "{what}: written");
    let report = block_on(repair(&**file, Repair::All, CheckOptions::default())).unwrap();
    assert!(report.is_clean(), "{what}: {report:#?}");
    assert!(views(file) == written, "{what}: repaired");
}

#[test]
fn changes_leave_a_sound_image_and_all_other_snapshots() {
    for seed in 0..times(30) {
        let mut chance = SeededRandom::new(seed);
        let file = restored(image(&mut chance, 0));
        let image = TestImage::existing(Arc::clone(&file));
        for number in 0..12 {
            let before = views(&file);
            let names: Vec<_> = before.iter().skip(1).map(|(name, _)| name.clone()).collect();
            let change = change(&mut chance, &names, number);
            apply(&*file, &change).unwrap();
            let what = format!("seed {seed}, {number}: {change:?}");
            let report = block_on(check(&*file, CheckOptions::default())).unwrap();
            assert!(report.is_clean(), "{what}: {:#?}", report.findings);
            let mut expected = before.clone();
            match &change {
                SnapshotChange::Create { name, .. } => expected.push((name.clone(), before[0].1.clone())),
                SnapshotChange::Delete(SnapshotChoice::IdOrName(word)) => expected.retain(|(name, _)| name != word),
                SnapshotChange::Apply(SnapshotChoice::IdOrName(word)) => {
                    expected[0].1.clone_from(&before.iter().find(|(name, _)| name == word).unwrap().1);
                }
                other => panic!("{other:?}"),
            }
            assert!(views(&file) == expected, "{what}");
            write(&mut chance, &image);
            assert!(views(&file)[1..] == expected[1..], "{what}: written");
        }
    }
}

#[test]
fn a_power_cut_at_any_moment_leaves_everything_as_before_or_as_after() {
    let mut cuts = 0;
    for seed in 0..times(20) {
        let mut chance = SeededRandom::new(seed ^ 0x5a);
        let changes = chance.below(4);
        let bytes = image(&mut chance, changes);
        let old = views(&restored(bytes.clone()));
        let names: Vec<_> = old.iter().skip(1).map(|(name, _)| name.clone()).collect();
        let change = change(&mut chance, &names, 99);
        let power = PowerCut::new();
        let file = power.add_storage("image", bytes, MOST);
        apply(&*file, &change).unwrap();
        let new = views(&file);
        let moments = power.moments();
        for moment in 0..=moments {
            for loss in [Loss::None, Loss::All, Loss::Some(chance.bits())] {
                let what = format!("seed {seed}, {change:?}, cut at {moment} of {moments}, {loss:?}");
                assert_old_or_new(&restored(power.cut(moment, loss).remove(0)), &old, &new, &what);
                cuts += 1;
            }
        }
    }
    println!("{cuts} cuts");
    assert!(cuts > 500, "{cuts}");
}

#[test]
fn a_change_that_fails_leaves_everything_as_before_or_as_after() {
    let mut failures = 0;
    for seed in 0..times(8) {
        let mut chance = SeededRandom::new(seed ^ 0xfa11);
        let changes = chance.below(4);
        let bytes = image(&mut chance, changes);
        let old = views(&restored(bytes.clone()));
        let names: Vec<_> = old.iter().skip(1).map(|(name, _)| name.clone()).collect();
        let change = change(&mut chance, &names, 99);
        let counting = Failing::new();
        let whole = restored(bytes.clone());
        apply(&*counting.wrap(Arc::clone(&whole)), &change).unwrap();
        let (new, requests) = (views(&whole), counting.seen().0);
        for _ in 0..25 {
            let (after, fault) = (chance.below(requests), *chance.choose(&Fault::ALL));
            let (failing, file) = (Failing::new(), restored(bytes.clone()));
            let wrapped = failing.wrap(Arc::clone(&file));
            failing.fail(after, 1, fault);
            failures += u64::from(apply(&*wrapped, &change).is_err());
            assert_old_or_new(&file, &old, &new, &format!("seed {seed}, {change:?}, request {after}, {fault:?}"));
        }
    }
    assert!(failures > 50, "{failures}");
}
