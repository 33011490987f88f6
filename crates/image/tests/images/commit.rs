//! `commit`: the overlay reads the same at any moment.

use std::ops::ControlFlow;
use std::sync::Arc;

use limosa_image::chain::{ChainWithBase, Image};
use limosa_image::commit::{Commit, CommitOptions};
use limosa_image::convert::ConvertCounters;
use limosa_image::qcow2::{Header, ImageParts};
use limosa_image::{Disk, GuestOffset, OperationError};
use limosa_storage::testing::SeededRandom;
use limosa_storage::{Storage, block_on};
use limosa_testkit::image::read_all;

use crate::layers::{Layers, assert_sound, cut_everywhere, fail_anywhere, open_all, storages, times, try_open_all};

/// Commits the topmost image into the one of this number.
fn commit(
    layers: &Layers,
    files: &[Arc<dyn Storage>],
    base: usize,
    requests: usize,
) -> Result<ConvertCounters, OperationError> {
    let top = layers.all.len() - 1;
    let (mut below, mut target): (Option<Arc<dyn Disk>>, Option<Image>) = (None, None);
    for (number, (layer, file)) in layers.all.iter().zip(files).take(top).enumerate() {
        let image = layer.open(Arc::clone(file), below, number != base)?;
        below = Some(image.as_disk());
        if number == base {
            target = Some(image);
        }
    }
    let header = block_on(Header::read(&*files[top]))?;
    let parts = ImageParts::new(Arc::clone(&files[top]), header).backing(below);
    let chain = ChainWithBase::new(parts, target.unwrap(), u32::try_from(top - base).unwrap());
    let options = CommitOptions::default().keep_overlay(top - base > 1).max_in_flight(requests);
    block_on(Commit::new(chain, options))?.run(&|_| ControlFlow::Continue(()))
}

#[test]
fn after_a_commit_the_base_has_the_contents_and_the_overlay_has_none() {
    for seed in 0..times(40) {
        let mut chance = SeededRandom::new(seed);
        let count = 2 + usize::try_from(chance.below(2)).unwrap();
        let layers = Layers::new(&mut chance, count);
        let base = usize::try_from(chance.below(count as u64 - 1)).unwrap();
        let files = storages(&layers.all);
        commit(&layers, &files, base, 3).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let kept = count - base > 2;
        // Images between them read as something else, and so would the overlay if it had lost its contents.
        layers.assert_unchanged(&files, &format!("seed {seed}"));
        let below = try_open_all(&layers.all[..base], &files[..base]).unwrap();
        let target = layers.all[base].open(Arc::clone(&files[base]), below, true).unwrap().as_disk();
        assert_sound(&layers.all[base], &*files[base], &format!("seed {seed}"));
        let length = layers.seen.len();
        assert!(read_all(&*target)[..length] == layers.seen, "seed {seed}");
        let top = open_all(&layers.all, &files);
        let whole = block_on(top.map(GuestOffset(0), top.len())).unwrap();
        assert!(kept || whole.depth > 0, "seed {seed}: {whole:?}");
    }
}

#[test]
fn a_power_cut_at_any_moment_of_a_commit_leaves_the_overlay_as_it_was() {
    let mut cuts = 0;
    for seed in 0..times(12) {
        let mut chance = SeededRandom::new(seed ^ 0xc0);
        let count = 2 + usize::try_from(chance.below(2)).unwrap();
        let layers = Layers::new(&mut chance, count);
        let base = usize::try_from(chance.below(count as u64 - 1)).unwrap();
        cuts += cut_everywhere(
            &layers.all,
            &mut chance,
            &format!("seed {seed}"),
            |files| assert!(commit(&layers, files, base, 2).is_ok()),
            |left, what| layers.assert_unchanged(left, what),
        );
    }
    println!("{cuts} cuts");
    assert!(cuts > 500, "{cuts}");
}

#[test]
fn a_commit_that_fails_leaves_the_overlay_as_it_was() {
    let mut failures = 0;
    for seed in 0..times(6) {
        let mut chance = SeededRandom::new(seed ^ 0xfa);
        let layers = Layers::new(&mut chance, 2);
        failures += fail_anywhere(
            &layers.all,
            &mut chance,
            &format!("seed {seed}"),
            |files| commit(&layers, files, 0, 1).is_err(),
            |left, what| layers.assert_unchanged(left, what),
        );
    }
    assert!(failures > 50, "{failures}");
}
