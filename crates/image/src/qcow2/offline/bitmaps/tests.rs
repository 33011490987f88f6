//! Bitmaps that change, and power cuts meanwhile.

use limosa_page::{PageBitmap, PageNumber, to_usize};
use limosa_storage::testing::{Loss, PowerCut, SeededRandom};
use limosa_storage::{MemoryStorage, block_on};

use super::*;
use crate::qcow2::offline::check::check;
use crate::qcow2::offline::create::{CreateOptions, create};

/// A bitmap as it is stored: name, in use, enabled, granularity, and its bits if they can be relied on.
type Stored = (String, bool, bool, u8, Option<PageBitmap>);

fn image(cluster: u64, size: u64) -> Vec<u8> {
    let storage = MemoryStorage::growing_to(64 << 20);
    let options = CreateOptions::default().size(size).cluster_size(cluster);
    let options = options.backing_file(Some("base".into())).backing_format(Some("raw".into()));
    block_on(create(&storage, None, &options)).unwrap();
    storage.contents()
}

fn stored(bytes: &[u8]) -> Vec<Stored> {
    let storage = MemoryStorage::with_contents(bytes.to_vec(), 64 << 20);
    block_on(async {
        let header = Header::read(&storage).await.unwrap();
        let mut all = Vec::new();
        for Entry { bitmap, .. } in entries(&storage, &header).await.unwrap() {
            let bits = if bitmap.in_use { None } else { Some(load(&storage, &header, &bitmap).await.unwrap()) };
            all.push((bitmap.name, bitmap.in_use, bitmap.auto, bitmap.granularity_bits, bits));
        }
        all
    })
}

/// Sets bits of a bitmap, as a writer does.
fn set(bytes: &[u8], name: &str, chance: &mut SeededRandom) -> Vec<u8> {
    let storage = MemoryStorage::with_contents(bytes.to_vec(), 64 << 20);
    block_on(async {
        let mut header = Header::read(&storage).await.unwrap();
        let all = entries(&storage, &header).await.unwrap();
        let gone: Vec<_> = all.iter().map(|entry| entry.bitmap.clone()).filter(|bitmap| bitmap.name == name).collect();
        let mut kept: Vec<_> = all.into_iter().map(|entry| Kept { entry, bits: None }).collect();
        for kept in kept.iter_mut().filter(|kept| kept.entry.is_named(name)) {
            let mut bits = load(&storage, &header, &kept.entry.bitmap).await.unwrap();
            for _ in 0..5 {
                bits.set(PageNumber(chance.below(bits.len())));
            }
            kept.bits = Some(bits);
        }
        save(&storage, &mut header, kept, &gone).await.unwrap();
    });
    storage.contents()
}

fn action(chance: &mut SeededRandom) -> BitmapAction {
    match chance.below(8) {
        0..3 => BitmapAction::Add { granularity: Some(512 << chance.below(5)) },
        3 => BitmapAction::Remove,
        4 => BitmapAction::Clear,
        5 => BitmapAction::Enable,
        6 => BitmapAction::Disable,
        _ => BitmapAction::Merge { source: (*chance.choose(&["a", "b", "c"])).to_owned() },
    }
}

#[test]
fn a_cut_at_any_moment_leaves_the_old_bitmaps_or_the_new_ones() {
    let mut chance = SeededRandom::new(7);
    let mut cuts = 0;
    for (cluster, size) in [(512, 6 << 20), (4096, 40 << 20), (65536, 8 << 20)] {
        let mut bytes = image(cluster, size);
        for _ in 0..25 {
            let name = *chance.choose(&["a", "b", "c"]);
            if chance.below(2) == 0 {
                bytes = set(&bytes, name, &mut chance);
            }
            let actions: Vec<_> = (0..=chance.below(2)).map(|_| action(&mut chance)).collect();
            let power = PowerCut::new();
            let storage = power.add_storage("image", bytes.clone(), 64 << 20);
            let done = block_on(change_bitmap(&*storage, name, &actions, None, CheckOptions::default()));
            let last = power.cut(power.moments(), Loss::None).remove(0);
            let (old, new) = (stored(&bytes), stored(&last));
            let step = chance.below(3) + 1;
            for moment in (0..=power.moments()).step_by(to_usize(step)) {
                for loss in [Loss::None, Loss::All, Loss::Some(chance.bits())] {
                    let said =
                        format!("{cluster}: {name} {actions:?}, cut at {moment} of {} {loss:?}", power.moments());
                    let cut = power.cut(moment, loss).remove(0);
                    let found = stored(&cut);
                    // Of several actions, those before one that fails take effect.
                    assert!(found == old || found == new, "{said}: {found:?}");
                    let storage = MemoryStorage::with_contents(cut, 64 << 20);
                    let report = block_on(check(&storage, CheckOptions::default())).unwrap();
                    assert_eq!((report.corruptions, report.check_errors), (0, 0), "{said}: {report:#?}");
                    let report = block_on(repair(&storage, Repair::Leaks, CheckOptions::default())).unwrap();
                    assert!(report.is_clean() && stored(&storage.contents()) == found, "{said}: {report:#?}");
                    cuts += 1;
                }
            }
            let report = block_on(check(&*storage, CheckOptions::default())).unwrap();
            assert!(report.is_clean() && report.leaks == 0, "{name} {actions:?} {done:?}: {report:#?}");
            bytes = last;
        }
    }
    assert!(cuts > 500, "{cuts}");
}

#[test]
fn a_bitmap_that_was_not_stored_can_only_be_removed() {
    let storage = MemoryStorage::with_contents(image(65536, 1 << 20), 64 << 20);
    let change = |name: &str, action| block_on(change_bitmap(&storage, name, &[action], None, CheckOptions::default()));
    change("a", BitmapAction::Add { granularity: None }).unwrap();
    change("b", BitmapAction::Add { granularity: Some(512) }).unwrap();
    block_on(async { Header::read(&storage).await.unwrap().prepare_autoclear(&storage, false).await.unwrap() });
    change("c", BitmapAction::Add { granularity: None }).unwrap();
    let names: Vec<_> = stored(&storage.contents()).into_iter().map(|(name, in_use, ..)| (name, in_use)).collect();
    assert_eq!(names, [("a".into(), true), ("b".into(), true), ("c".into(), false)]);
    let merge = |source: &str| BitmapAction::Merge { source: source.into() };
    for (name, action) in
        [("a", BitmapAction::Clear), ("a", BitmapAction::Enable), ("a", merge("c")), ("c", merge("a"))]
    {
        let said = change(name, action).unwrap_err().to_string();
        assert_eq!(said, "memory: bitmap \"a\" was not stored by who used it: it can only be removed");
    }
    change("a", BitmapAction::Remove).unwrap();
    assert_eq!(stored(&storage.contents()).len(), 2);
}
