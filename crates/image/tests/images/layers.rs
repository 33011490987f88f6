//! Overlays over each other, made by chance, in storages that a test has in its hands.

use std::sync::Arc;

use limosa_image::chain::Image;
use limosa_image::qcow2::{CheckOptions, CreateOptions, Qcow2Options, check};
use limosa_image::raw::{Raw, RawOptions};
use limosa_image::{Disk, GuestOffset, ImageError};
use limosa_storage::testing::{Failing, Fault, Loss, PowerCut, SeededRandom};
use limosa_storage::{Buffer, MemoryStorage, Storage, block_on};
use limosa_testkit::image::{TestImage, contents, memory_file, read_all};

/// How long a storage may become.
const MOST: u64 = 64 << 20;

/// `LIMOSA_TIMES` times as often as usual.
pub(crate) fn times(usual: u64) -> u64 {
    usual * std::env::var("LIMOSA_TIMES").ok().and_then(|times| times.parse().ok()).unwrap_or(1)
}

/// An image by its file.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub(crate) raw: bool,
    pub(crate) bytes: Vec<u8>,
}

impl Layer {
    /// A raw image.
    pub(crate) fn raw(chance: &mut SeededRandom) -> Self {
        let mut bytes = Vec::new();
        let length = usize::try_from(size(chance)).unwrap();
        while bytes.len() < length {
            let part = usize::try_from(512 * (1 + chance.below(100))).unwrap();
            let all = if chance.one_in(3) { vec![0; part] } else { chance.bytes(part) };
            bytes.extend(all);
        }
        bytes.truncate(length);
        Self { raw: true, bytes }
    }

    /// A qcow2 image over a backing image, with contents of its own.
    pub(crate) fn qcow2(chance: &mut SeededRandom, below: Option<Arc<dyn Disk>>) -> Self {
        let cluster = *chance.choose(&[512, 4096, 16384, 65536]);
        let extended = cluster == 16384 && chance.one_in(2);
        let version = if !extended && chance.one_in(3) { 2 } else { 3 };
        let options = CreateOptions::default()
            .size(size(chance))
            .cluster_size(cluster)
            .version(version)
            .extended_l2(extended)
            .backing_file(below.is_some().then(|| "below".into()))
            .backing_format(below.is_some().then(|| "raw".into()));
        let image = TestImage::create_in(memory_file("image"), &options);
        let disk = image.open_over(below, Qcow2Options::default());
        for _ in 0..12 {
            let at = chance.below(disk.len() / 512) * 512;
            let length = (512 * (1 + chance.below(160))).min(disk.len() - at);
            let request = match chance.below(6) {
                0 => disk.write_zeroes(GuestOffset(at), length, true),
                1 => disk.discard(GuestOffset(at), length),
                _ => {
                    let bytes = chance.bytes(usize::try_from(length).unwrap());
                    disk.write(GuestOffset(at), Buffer::from_slice(&bytes).into())
                }
            };
            block_on(request).unwrap();
        }
        block_on(disk.close()).unwrap();
        Self { raw: false, bytes: contents(&*image.file) }
    }

    /// A storage with its bytes.
    pub(crate) fn storage(&self) -> Arc<dyn Storage> {
        Arc::new(MemoryStorage::with_contents(self.bytes.clone(), MOST))
    }

    /// The same kind of image, in another storage.
    ///
    /// # Errors
    /// It cannot be opened.
    pub(crate) fn open(
        &self,
        file: Arc<dyn Storage>,
        below: Option<Arc<dyn Disk>>,
        read_only: bool,
    ) -> Result<Image, ImageError> {
        if self.raw {
            return Ok(Image::Raw(Raw::open(file, &RawOptions::default().read_only(read_only))?));
        }
        let options = Qcow2Options::default().read_only(read_only);
        Ok(Image::Qcow2(TestImage::existing(file).try_open(below, options)?))
    }
}

fn size(chance: &mut SeededRandom) -> u64 {
    512 * (200 + chance.below(600))
}

/// Images over each other, the lowest first, and the contents of the topmost.
pub(crate) struct Layers {
    pub(crate) all: Vec<Layer>,
    pub(crate) seen: Vec<u8>,
}

impl Layers {
    /// As many images as that; the lowest may be raw.
    pub(crate) fn new(chance: &mut SeededRandom, count: usize) -> Self {
        let mut all: Vec<Layer> = Vec::new();
        for number in 0..count {
            let below = (number > 0).then(|| open_all(&all, &storages(&all)));
            let raw = number == 0 && chance.one_in(2);
            all.push(if raw { Layer::raw(chance) } else { Layer::qcow2(chance, below) });
        }
        let seen = read_all(&*open_all(&all, &storages(&all)));
        Self { all, seen }
    }

    /// Expects that storages with images of the same kinds are sound, and that the topmost reads as at first.
    #[track_caller]
    pub(crate) fn assert_unchanged(&self, files: &[Arc<dyn Storage>], what: &str) {
        for (layer, file) in self.all.iter().zip(files) {
            assert_sound(layer, &**file, what);
        }
        let found = read_all(&*open_all(&self.all, files));
        let differ = found.iter().zip(&self.seen).position(|(one, other)| one != other);
        assert_eq!((differ, found.len()), (None, self.seen.len()), "{what}");
    }
}

/// Storages with the images' bytes.
pub(crate) fn storages(all: &[Layer]) -> Vec<Arc<dyn Storage>> {
    all.iter().map(Layer::storage).collect()
}

/// The topmost of images over each other, to be read; `None` without any.
///
/// # Errors
/// One of them cannot be opened.
pub(crate) fn try_open_all(all: &[Layer], files: &[Arc<dyn Storage>]) -> Result<Option<Arc<dyn Disk>>, ImageError> {
    let mut disk: Option<Arc<dyn Disk>> = None;
    for (layer, file) in all.iter().zip(files) {
        disk = Some(layer.open(Arc::clone(file), disk, true)?.as_disk());
    }
    Ok(disk)
}

/// The topmost of images over each other, to be read.
#[track_caller]
pub(crate) fn open_all(all: &[Layer], files: &[Arc<dyn Storage>]) -> Arc<dyn Disk> {
    try_open_all(all, files).unwrap().unwrap()
}

/// Expects that an image has nothing worse than leaks.
#[track_caller]
pub(crate) fn assert_sound(layer: &Layer, file: &dyn Storage, what: &str) {
    if !layer.raw {
        let report = block_on(check(file, CheckOptions::default())).unwrap();
        assert_eq!((report.corruptions, report.check_errors), (0, 0), "{what}: {:#?}", report.findings);
    }
}

/// Runs an operation once, cuts the power at its moments (some of them if there are many), and hands over what each cut
/// left, with a text that names it. Returns the number of cuts.
#[track_caller]
pub(crate) fn cut_everywhere(
    all: &[Layer],
    chance: &mut SeededRandom,
    what: &str,
    run: impl FnOnce(&[Arc<dyn Storage>]),
    mut look: impl FnMut(&[Arc<dyn Storage>], &str),
) -> u64 {
    let power = PowerCut::new();
    let files: Vec<_> = all.iter().map(|layer| power.add_storage("image", layer.bytes.clone(), MOST)).collect();
    run(&files);
    let (mut cuts, moments) = (0, power.moments());
    for moment in 0..=moments {
        if moments > 60 && moment + 20 < moments && !chance.one_in(3) {
            continue;
        }
        for loss in [Loss::None, Loss::All, Loss::Some(chance.bits())] {
            let left = power.cut(moment, loss).into_iter();
            let left: Vec<_> = left.map(|bytes| Arc::new(MemoryStorage::with_contents(bytes, MOST)) as _).collect();
            look(&left, &format!("{what}, cut at {moment} of {moments}, {loss:?}"));
            cuts += 1;
        }
    }
    cuts
}

/// Runs an operation once, and then 30 times with a request that fails; hands over what each of those left, with a text
/// that names it. Returns how many of them failed: `run` tells.
#[track_caller]
pub(crate) fn fail_anywhere(
    all: &[Layer],
    chance: &mut SeededRandom,
    what: &str,
    run: impl Fn(&[Arc<dyn Storage>]) -> bool,
    look: impl Fn(&[Arc<dyn Storage>], &str),
) -> u64 {
    let counting = Failing::new();
    let files: Vec<_> = storages(all).into_iter().map(|file| counting.wrap(file)).collect();
    assert!(!run(&files), "{what}");
    let (mut failures, requests) = (0, counting.seen().0);
    for _ in 0..30 {
        let (after, fault) = (chance.below(requests), *chance.choose(&Fault::ALL));
        let failing = Failing::new();
        let plain = storages(all);
        let files: Vec<_> = plain.iter().map(|file| failing.wrap(Arc::clone(file))).collect();
        failing.fail(after, 1, fault);
        failures += u64::from(run(&files));
        failing.mend();
        look(&plain, &format!("{what}, request {after} of {requests}, {fault:?}"));
    }
    failures
}
