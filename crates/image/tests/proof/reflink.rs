//! Images in files of a filesystem that shares space: new clusters are filled by real clones, under the same models as
//! everywhere.
//!
//! The power cut is as real as software can make it: the filesystem stops, bytes that it had not written are lost, and
//! it is recovered from its log. A clone is a change of the filesystem's tables, a table of the image is
//! bytes of a file; that the one is durable when the other refers to it is what a flush has to bring about.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::Arc;

use limosa_image::qcow2::{Qcow2Options, ReflinkMode};
use limosa_image::{Disk, GuestOffset};
use limosa_storage::testing::SeededRandom;
use limosa_storage::{Buffer, CacheMode, FileOptions, FileStorage, Storage, block_on};
use limosa_testkit::image::{TestImage, raw};
use limosa_testkit::{ReflinkFolder, note_skip, on_reflinks};
use tempfile::TempDir;

use crate::bed::{Bed, Storages, differs};
use crate::engine::{open_as, plan};
use crate::model::read_all;
use crate::recipe::{BackingOverride, Data, Recipe};
use crate::{Verdict, kill, runs, threads};

/// Images that have something to clone: below them, or in a snapshot.
fn recipes() -> impl Iterator<Item = Recipe> {
    let all = Recipe::matrix().into_iter();
    // Of what is not larger than a block of the filesystem nothing is left to be cloned.
    // Encrypted contents are not cloned.
    all.filter(|recipe| recipe.cluster > 4096 && recipe.data == Data::Inside && recipe.luks.is_none())
        .filter(|recipe| recipe.below != BackingOverride::Nothing || recipe.snapshots > 0)
}

fn folder_in(folder: &ReflinkFolder) -> TempDir {
    tempfile::tempdir_in(folder.path()).unwrap()
}

fn file(path: &Path, cache: CacheMode, read_only: bool) -> Arc<FileStorage> {
    FileStorage::open(path, &FileOptions { cache, read_only, ..FileOptions::default() }).unwrap()
}

/// The backing image in the folder.
fn below(bed: &Bed, cache: CacheMode) -> Option<Arc<dyn Disk>> {
    let open = || file(&bed.folder.path().join("below"), cache, true);
    match bed.recipe.below {
        BackingOverride::Nothing => None,
        BackingOverride::Raw | BackingOverride::Shorter => Some(raw(open())),
        BackingOverride::Longer => Some(TestImage::existing(open()).open_read_only()),
    }
}

/// Writes whole blocks of the filesystem, anywhere; what the guest sees then.
fn blocks(disk: &dyn Disk, mut seen: Vec<u8>, seed: u64) -> Verdict<Vec<u8>> {
    const BLOCK: u64 = 4096;
    let mut chance = SeededRandom::new(seed ^ 0xb10c);
    for step in 0..40 {
        let at = chance.below(disk.len() / BLOCK) * BLOCK;
        let length = (BLOCK << chance.below(5)).min(disk.len() / BLOCK * BLOCK - at);
        let (bytes, place) = (chance.bytes(usize::try_from(length).unwrap()), usize::try_from(at).unwrap());
        seen[place..place + bytes.len()].copy_from_slice(&bytes);
        let write = block_on(disk.write(GuestOffset(at), Buffer::from_slice(&bytes).into()));
        write.map_err(|error| format!("step {step}, at {at:#x}: {error}"))?;
    }
    let found = read_all(disk)?;
    differs(&found, &seen).map_or(Ok(seen), |at| Err(format!("whole blocks: it reads something else at {at:#x}")))
}

/// Has threads write to an image in a file of the folder; how many clones there were.
fn threads_on_files(folder: &ReflinkFolder, recipe: &Recipe, cache: CacheMode, seed: u64) -> Verdict<u64> {
    let bed = Bed::new_in(folder_in(folder), recipe, seed);
    let image = file(&bed.folder.path().join("image"), cache, false);
    let below = below(&bed, cache);
    let storages = Storages { image: Arc::clone(&image) as Arc<dyn Storage>, data: None, below, cipher: None };
    let options = Qcow2Options::default().reflink_mode(ReflinkMode::AtLeast(0)).discard(seed.is_multiple_of(2));
    let disk = open_as(storages, options)?;
    let cloned = blocks(&*disk, bed.first.clone(), seed)?;
    // Parts of blocks, too, which are shared by now.
    let between = threads::run(&disk, &cloned, 4, 100, seed)?;
    let expected = threads::overlapping(&disk, &between, 4, plan(recipe, seed, 60))?;
    block_on(disk.close()).map_err(|error| format!("close: {error}"))?;
    let clones = image.counters().clones.operations;
    drop((disk, image));
    bed.check_files(false)?;
    bed.judge_seen(&expected)?;
    Ok(clones)
}

#[test]
fn requests_that_clone_leave_what_a_model_says() {
    needs_qemu!();
    let run = on_reflinks(|folder| {
        for (number, recipe) in (0..).zip(recipes()) {
            for cache in [CacheMode::Writeback, CacheMode::None] {
                for seed in (0..runs(1)).map(|run| number + 1000 * run) {
                    let clones = threads_on_files(folder, &recipe, cache, seed)
                        .unwrap_or_else(|error| panic!("{recipe:?}, {cache:?}, seed {seed}: {error}"));
                    // A file that cannot share is asked once. What is filled up by subclusters of 2 KiB is less than a
                    // block.
                    let few = recipe.subclusters && recipe.cluster / 32 < 4096;
                    assert!(clones > 3 || few, "{recipe:?}, {cache:?}, seed {seed}: asked for {clones} clones");
                }
            }
        }
    });
    run.unwrap();
}

#[test]
fn a_power_cut_of_the_filesystem_loses_nothing_that_was_flushed() {
    needs_qemu!();
    let run = on_reflinks(|folder| {
        if !folder.is_own() {
            return note_skip("LIMOSA_REFLINK_DIR: only a filesystem of the test's own can lose its power");
        }
        let shared = Cell::new(0);
        for (number, recipe) in (0..).zip(recipes()) {
            for seed in (0..runs(1)).map(|run| number + 1000 * run) {
                let bed = Bed::new_in(folder_in(folder), &recipe, seed);
                let files = std::fs::read_dir(bed.folder.path()).unwrap();
                files.for_each(|found| std::fs::File::open(found.unwrap().path()).unwrap().sync_all().unwrap());
                std::fs::File::open(bed.folder.path()).unwrap().sync_all().unwrap();
                let image = bed.folder.path().join("image");
                let chance = RefCell::new(SeededRandom::new(seed ^ 0x3e1));
                let cut = kill::run_on(&bed, seed, 3, &|child| {
                    kill::by_a_kill(child)?;
                    let report = |error| format!("{error:#}");
                    if chance.borrow_mut().one_in(2) {
                        folder.write_back(&image).map_err(report)?;
                    }
                    folder.cut_power().map_err(report)?;
                    shared.set(shared.get() + folder.shared_extents(&image).map_err(report)?);
                    Ok(())
                });
                cut.unwrap_or_else(|error| panic!("{recipe:?}, seed {seed}: {error}"));
            }
        }
        assert!(shared.get() > 0, "nothing was ever cloned and flushed");
    });
    run.unwrap();
}
