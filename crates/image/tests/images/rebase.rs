//! `rebase`: the overlay reads the same at any moment, over the old backing file or over the new one.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::sync::Arc;

use limosa_image::qcow2::{Header, ImageParts};
use limosa_image::rebase::{BackingName, Rebase, RebaseImages, RebaseOptions, Rebased};
use limosa_image::{Disk, OperationError};
use limosa_storage::testing::SeededRandom;
use limosa_storage::{Storage, block_on};
use limosa_testkit::image::read_all;

use crate::layers::{
    Layer, Layers, assert_sound, cut_everywhere, fail_anywhere, open_all, storages, times, try_open_all,
};

/// An overlay over nothing or over an image, and a new backing image or none.
struct Scene {
    layers: Layers,
    new: Option<Layer>,
}

impl Scene {
    fn new(seed: u64) -> Self {
        let mut chance = SeededRandom::new(seed);
        let layers = if chance.one_in(4) {
            let mut layers = Layers::new(&mut chance, 1);
            layers.all = vec![Layer::qcow2(&mut chance, None)];
            layers.seen = read_all(&*open_all(&layers.all, &storages(&layers.all)));
            layers
        } else {
            Layers::new(&mut chance, 2)
        };
        let new = match chance.below(4) {
            0 => None,
            1 => Some(Layer::raw(&mut chance)),
            // Much of it is the same.
            2 if layers.all.len() > 1 && layers.all[0].raw => {
                let mut same = layers.all[0].clone();
                let at = usize::try_from(chance.below(same.bytes.len() as u64)).unwrap();
                same.bytes[at] ^= 1;
                Some(same)
            }
            _ => Some(Layer::qcow2(&mut chance, None)),
        };
        Self { layers, new }
    }

    /// The storages: the images, the lowest first, and the new backing image.
    fn all(&self) -> Vec<Layer> {
        self.layers.all.iter().chain(&self.new).cloned().collect()
    }

    fn rebase(&self, files: &[Arc<dyn Storage>]) -> Result<Rebased, OperationError> {
        let top = self.layers.all.len() - 1;
        let old = try_open_all(&self.layers.all[..top], &files[..top])?;
        let new = try_open_all(self.new.as_slice(), &files[top + 1..])?;
        let header = block_on(Header::read(&*files[top]))?;
        let overlay = ImageParts::new(Arc::clone(&files[top]), header).backing(old);
        let name = self.new.as_ref().map(|_| BackingName::new("new", "raw"));
        let options = RebaseOptions::default().max_in_flight(2).chunk_size(32 << 10);
        Rebase::new(RebaseImages::new(overlay, new), name, options).run(&|_| ControlFlow::Continue(()))
    }

    /// Expects that the overlay is sound and reads as at first, over the backing image that it names. Whether that is
    /// the new one.
    #[track_caller]
    fn assert_unchanged(&self, files: &[Arc<dyn Storage>], what: &str) -> bool {
        let top = self.layers.all.len() - 1;
        assert_sound(&self.layers.all[top], &*files[top], what);
        let header = block_on(Header::read(&*files[top])).unwrap_or_else(|error| panic!("{what}: {error}"));
        let name = header.backing.as_ref().map(|backing| backing.name.as_os_str());
        let old = (top > 0).then(|| OsStr::new("below"));
        let below: Option<Arc<dyn Disk>> = match name {
            None => None,
            name if name == old => Some(open_all(&self.layers.all[..top], &files[..top])),
            Some(_) => Some(open_all(self.new.as_slice(), &files[top + 1..])),
        };
        let overlay = self.layers.all[top].open(Arc::clone(&files[top]), below, true).unwrap();
        let found = read_all(&*overlay.as_disk());
        let differ = found.iter().zip(&self.layers.seen).position(|(one, other)| one != other);
        assert_eq!((differ, found.len()), (None, self.layers.seen.len()), "{what}");
        name != old
    }
}

#[test]
fn a_rebased_overlay_reads_as_before() {
    for seed in 0..times(60) {
        let scene = Scene::new(seed);
        let files = storages(&scene.all());
        scene.rebase(&files).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let is_new = scene.assert_unchanged(&files, &format!("seed {seed}"));
        assert!(is_new || (scene.layers.all.len() == 1 && scene.new.is_none()), "seed {seed}");
    }
}

#[test]
fn a_power_cut_at_any_moment_of_a_rebase_leaves_an_overlay_that_reads_as_before() {
    let (mut old, mut new) = (0_u64, 0_u64);
    for seed in 0..times(16) {
        let scene = Scene::new(seed ^ 0x4eba);
        let mut chance = SeededRandom::new(seed);
        cut_everywhere(
            &scene.all(),
            &mut chance,
            &format!("seed {seed}"),
            |files| assert!(scene.rebase(files).is_ok()),
            |left, what| *if scene.assert_unchanged(left, what) { &mut new } else { &mut old } += 1,
        );
    }
    println!("{old} cuts before, {new} after");
    assert!(old > 300 && new > 10, "{old} {new}");
}

#[test]
fn a_rebase_that_fails_leaves_an_overlay_that_reads_as_before() {
    let mut failures = 0;
    for seed in 0..times(6) {
        let scene = Scene::new(seed ^ 0xbad);
        let mut chance = SeededRandom::new(seed);
        failures += fail_anywhere(
            &scene.all(),
            &mut chance,
            &format!("seed {seed}"),
            |files| scene.rebase(files).is_err(),
            |left, what| _ = scene.assert_unchanged(left, what),
        );
    }
    assert!(failures > 50, "{failures}");
}
