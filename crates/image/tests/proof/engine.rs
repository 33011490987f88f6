//! qcow2 images on the bed: every sort of image, every property.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use limosa_image::qcow2::{Header, ImageParts, Qcow2Options, ReflinkMode, ResizeOptions, resize};
use limosa_image::{Compress, Disk};
use limosa_storage::testing::{Delayed, Fault, PowerCut, RequestHolder, SeededRandom, SparseMemory};
use limosa_storage::{Storage, block_on};
use limosa_testkit::image::TestImage;

use crate::bed::{Bed, Make, Over, Storages, differs};
use crate::linear::Watched;
use crate::model::{Model, Plan, read_all};
use crate::recipe::{Data, Recipe};
use crate::{Verdict, faults, kill, power, runs, threads};

/// How long a storage may become.
const MOST: u64 = 256 << 20;
/// Stock tools look at every eighth fault or power cut, because they take their time; limosa's own check at each.
const STOCK_EVERY: u64 = 8;

/// Puts nothing over a storage.
fn as_it_is(storage: Arc<dyn Storage>) -> Arc<dyn Storage> {
    storage
}

/// Opens an image, with options that chance decides.
pub(crate) fn open(storages: Storages, chance: &mut SeededRandom) -> Verdict<Arc<dyn Disk>> {
    let options = Qcow2Options::default()
        .cache_size(*chance.choose(&[0, 64 << 10, 32 << 20]))
        .reflink_mode(*chance.choose(&[
            ReflinkMode::Off,
            ReflinkMode::AtLeast(0),
            ReflinkMode::AtLeast(0),
            ReflinkMode::AUTO,
        ]))
        .allocate_ahead(*chance.choose(&[0, 64 << 10, 4 << 20]))
        .discard(chance.one_in(2));
    let compresses = storages.data.is_none() && storages.cipher.is_none() && chance.one_in(3);
    open_as(storages, options.compress(compresses.then(Compress::default)))
}

pub(crate) fn open_as(storages: Storages, options: Qcow2Options) -> Verdict<Arc<dyn Disk>> {
    let Storages { image, data, below, cipher } = storages;
    match (TestImage { file: image, data_file: data, cipher }).try_open(below, options) {
        Ok(disk) => Ok(disk),
        Err(error) => Err(format!("open: {error}")),
    }
}

/// Has every image of one sort looked at, with its own seed.
fn each(sort: impl Fn(&Recipe) -> bool, look: impl Fn(&Recipe, u64) -> Verdict) {
    for (number, recipe) in Recipe::matrix().iter().enumerate().filter(|(_, recipe)| sort(recipe)) {
        for run in 0..runs(1) {
            let seed = number as u64 + 1000 * run;
            look(recipe, seed).unwrap_or_else(|error| panic!("{recipe:?}, seed {seed}: {error}"));
        }
    }
}

/// A test of a property for each sort of images.
macro_rules! for_every_sort_of_image {
    ($($property:ident: $look:path;)+) => {$(
        mod $property {
            use super::*;

            #[test]
            fn with_usual_clusters() {
                needs_qemu!();
                each(|recipe| recipe.cluster == 65536 && !recipe.subclusters && recipe.data == Data::Inside, $look);
            }

            #[test]
            fn with_small_clusters() {
                needs_qemu!();
                each(|recipe| recipe.cluster < 16384 && recipe.data == Data::Inside, $look);
            }

            #[test]
            fn with_subclusters() {
                needs_qemu!();
                each(|recipe| recipe.subclusters && recipe.cluster < 2 << 20 && recipe.data == Data::Inside, $look);
            }

            #[test]
            fn with_large_clusters() {
                needs_qemu!();
                each(|recipe| recipe.cluster == 2 << 20, $look);
            }

            #[test]
            fn with_a_data_file() {
                needs_qemu!();
                each(|recipe| recipe.data != Data::Inside, $look);
            }
        }
    )+};
}

for_every_sort_of_image! {
    images_made_by_qemu_read_back_identically: reads_back;
    random_requests_leave_what_a_model_says: model;
    a_disk_made_longer_and_shorter_is_what_a_model_says: resized;
    nothing_that_lay_on_a_device_is_seen: on_devices;
    overlapping_requests_are_linearizable: linear;
    threads_do_not_disturb_each_other: many_threads;
    overlapping_requests_of_threads_are_linearizable: meeting_threads;
    faults_do_no_harm: faults;
    a_power_cut_loses_nothing_that_was_flushed: power_cuts;
    a_kill_loses_nothing_that_was_flushed: kills;
    a_kill_loses_nothing_that_was_acknowledged_with_a_journal: kills_with_journals;
}

/// The storages of an image, kept to look into.
struct Kept {
    all: Mutex<Vec<SparseMemory>>,
    /// Bytes of each, if they are devices: full of former contents, without a way to tell that any of them are zero.
    device: Option<usize>,
}

impl Kept {
    fn new() -> Self {
        Self { all: Mutex::default(), device: None }
    }

    /// Runs on devices of these bytes.
    fn on_devices(bytes: u64) -> Self {
        Self { device: usize::try_from(bytes).ok(), ..Self::new() }
    }

    fn make(&self, name: &str, bytes: Vec<u8>) -> Arc<dyn Storage> {
        let memory = match self.device {
            Some(len) => SparseMemory::device_with(name, bytes, len, len as u64),
            None => SparseMemory::file_with(name, bytes, MOST),
        };
        let memory = memory.with_cloning();
        self.all.lock().unwrap().push(memory.clone());
        Arc::new(memory)
    }

    fn contents(&self) -> Vec<Vec<u8>> {
        self.all.lock().unwrap().iter().map(SparseMemory::contents).collect()
    }

    /// The same storages again, through `over`.
    fn again(&self, bed: &Bed, over: &Over<'_>) -> Storages {
        let all = self.all.lock().unwrap();
        let storage = |number: usize| all.get(number).map(|memory| over(Arc::new(memory.clone())));
        let (below, cipher) = (bed.below(over), bed.cipher.clone());
        Storages { image: storage(0).unwrap(), data: storage(1), below, cipher }
    }
}

pub(crate) fn plan(recipe: &Recipe, seed: u64, steps: u64) -> Plan {
    let steps = if recipe.cluster == 2 << 20 { steps / 4 } else { steps };
    Plan {
        seed,
        cluster: recipe.cluster,
        steps,
        depth: 8,
        drops: false,
        discards_may_stay: recipe.version2,
        compresses: recipe.data == Data::Inside && recipe.luks.is_none(),
    }
}

fn reads_back(recipe: &Recipe, seed: u64) -> Verdict {
    let bed = Bed::new(recipe, seed);
    let kept = Kept::new();
    let disk = open(bed.storages(&|name, bytes| kept.make(name, bytes), &as_it_is), &mut SeededRandom::new(seed))?;
    let found = read_all(&*disk)?;
    if let Some(at) = differs(&found, &bed.first) {
        return Err(format!("read something else at {at:#x}"));
    }
    block_on(disk.close()).map_err(|error| error.to_string())?;
    bed.judge(&kept.contents(), &bed.first, false)
}

fn model(recipe: &Recipe, seed: u64) -> Verdict {
    model_on(recipe, seed, false, Kept::new)
}

/// The same, with the disk made longer and shorter whenever it is closed.
fn resized(recipe: &Recipe, seed: u64) -> Verdict {
    // Images with snapshots have a bitmap, too, which was in use: it has to be removed before.
    if recipe.snapshots > 0 {
        return Ok(());
    }
    model_on(recipe, seed, true, Kept::new)
}

/// Runs on devices: bytes that were never written read as the device's former contents.
fn on_devices(recipe: &Recipe, seed: u64) -> Verdict {
    // What a raw data file has is what the guest sees.
    if recipe.data == Data::Raw {
        return Ok(());
    }
    model_on(recipe, seed, false, || Kept::on_devices(6 * recipe.size + (8 << 20)))
}

fn model_on(recipe: &Recipe, seed: u64, resizes: bool, make: impl Fn() -> Kept) -> Verdict {
    let bed = Bed::new(recipe, seed);
    for drops in [false, true] {
        let (kept, held) = (make(), RequestHolder::new().lazily());
        let _ = bed.storages(&|name, bytes| kept.make(name, bytes), &as_it_is);
        let chance = Mutex::new(SeededRandom::new(seed));
        let open = || open(kept.again(&bed, &|storage| held.wrap(storage)), &mut chance.lock().unwrap());
        let resize = |size| {
            let Storages { image, data, below, cipher } = kept.again(&bed, &as_it_is);
            let header = block_on(Header::read(&*image)).map_err(|error| error.to_string())?;
            let parts = ImageParts::new(image, header).data_file(data).backing(below).cipher(cipher);
            let options = ResizeOptions::default().shrink(true);
            block_on(resize(parts, size, options)).map_err(|error| error.to_string())
        };
        let plan = Plan { drops, ..plan(recipe, seed, 400) };
        let model = Model::new(bed.first.clone(), plan);
        let model = if resizes { model.resized(&resize) } else { model };
        let expected = model.run(&held, &open).map_err(|error| format!("drops: {drops}: {error}"))?;
        Bed::judge(&bed, &kept.contents(), &expected, drops).map_err(|error| format!("drops: {drops}: {error}"))?;
        bed.nothing_plain(&kept.contents(), &expected)?;
        if recipe.data == Data::Raw && recipe.luks.is_none() && !drops {
            let found = kept.contents().remove(1);
            let at = expected.iter().enumerate().position(|(at, byte)| found.get(at).unwrap_or(&0) != byte);
            at.map_or(Ok(()), |at| Err(format!("the raw data file is another at {at:#x}")))?;
        }
        bed.restore();
    }
    Ok(())
}

fn linear(recipe: &Recipe, seed: u64) -> Verdict {
    let bed = Bed::new(recipe, seed);
    let (kept, held) = (Kept::new(), RequestHolder::new().lazily());
    held.release_all();
    let storages = bed.storages(&|name, bytes| held.wrap(kept.make(name, bytes)), &|storage| held.wrap(storage));
    let disk = open(storages, &mut SeededRandom::new(seed))?;
    held.hold_again();
    let plan = Plan { depth: 12, ..plan(recipe, seed, 500) };
    let mut watched = Watched::new(disk, bed.first.clone(), plan, &held, PowerCut::new());
    watched.run()?;
    let found = watched.look(&held)?;
    watched.driver.close().map_err(|error| format!("close: {error}"))?;
    bed.judge(&kept.contents(), &found, false)
}

fn many_threads(recipe: &Recipe, seed: u64) -> Verdict {
    let bed = Bed::new(recipe, seed);
    let (kept, delayed) = (Kept::new(), Delayed::new(seed, Duration::from_micros(60)));
    let storages = bed.storages(&|name, bytes| delayed.wrap(kept.make(name, bytes)), &|storage| delayed.wrap(storage));
    let disk = open(storages, &mut SeededRandom::new(seed))?;
    let expected = threads::run(&disk, &bed.first, 4, 150, seed)?;
    block_on(disk.close()).map_err(|error| format!("close: {error}"))?;
    bed.judge(&kept.contents(), &expected, false)
}

fn meeting_threads(recipe: &Recipe, seed: u64) -> Verdict {
    let bed = Bed::new(recipe, seed);
    let (kept, delayed) = (Kept::new(), Delayed::new(seed, Duration::from_micros(60)));
    let storages = bed.storages(&|name, bytes| delayed.wrap(kept.make(name, bytes)), &|storage| delayed.wrap(storage));
    let disk = open(storages, &mut SeededRandom::new(seed))?;
    let expected = threads::overlapping(&disk, &bed.first, 4, plan(recipe, seed, 100))?;
    block_on(disk.close()).map_err(|error| format!("close: {error}"))?;
    bed.judge(&kept.contents(), &expected, false)
}

/// Whether the image is sound, in stock's or in limosa's own eyes. Clusters may be lost.
fn check(bed: &Bed, contents: &[Vec<u8>], is_stocks_turn: bool) -> Verdict {
    if is_stocks_turn { bed.check(contents, true) } else { bed.check_own(contents, true) }
}

/// Runs on a storage that fails. `faults`: of each kind, at the first requests and at some later ones.
fn faults(recipe: &Recipe, seed: u64) -> Verdict {
    let bed = Bed::new(recipe, seed);
    let plan = plan(recipe, seed, 80);
    let mut chance = SeededRandom::new(seed);
    let mut most = 1 << 20;
    for number in 0..if recipe.cluster == 2 << 20 { 12 } else { 48 } {
        let (fault, times) = (*chance.choose(&Fault::ALL), if chance.one_in(3) { u64::MAX } else { 1 });
        let after = if number == 0 { most } else { chance.below(most) };
        let kept = Kept::new();
        let _ = bed.storages(&|name, bytes| kept.make(name, bytes), &as_it_is);
        let open_over = |over: &Over<'_>| open(kept.again(&bed, over), &mut SeededRandom::new(seed));
        let found =
            faults::run(&bed.first, plan, faults::Failure { after, times, fault }, &open_over).and_then(|ended| {
                most = most.min(ended.requests.0);
                let is_stocks_turn = number % STOCK_EVERY == 0;
                check(&bed, &kept.contents(), is_stocks_turn)?;
                if let (Some(seen), true) = (&ended.seen, is_stocks_turn) {
                    return bed.judge_seen(seen);
                }
                let options = Qcow2Options::default().read_only(true);
                let found = read_all(&*open_as(kept.again(&bed, &as_it_is), options)?)?;
                match ended.seen {
                    Some(seen) => {
                        differs(&found, &seen).map_or(Ok(()), |at| Err(format!("read something else at {at:#x}")))
                    }
                    None => ended.watched.history.survived(&found, usize::MAX),
                }
            });
        found.map_err(|error| format!("{fault:?} {times} times after {after} requests: {error}"))?;
        bed.restore();
    }
    Ok(())
}

fn power_cuts(recipe: &Recipe, seed: u64) -> Verdict {
    let bed = Bed::new(recipe, seed);
    let number = std::cell::Cell::new(0_u64);
    let open_under_power = |make: &Make<'_>| open(bed.storages(make, &as_it_is), &mut SeededRandom::new(seed));
    let look = |contents: Vec<Vec<u8>>| {
        number.set(number.get() + 1);
        check(&bed, &contents, number.get().is_multiple_of(STOCK_EVERY))?;
        let mut all = contents.into_iter();
        let mut next =
            |name| all.next().map(|bytes| Arc::new(SparseMemory::file_with(name, bytes, MOST)) as Arc<dyn Storage>);
        let (image, data) = (next("image").unwrap(), next("data"));
        let storages = Storages { image, data, below: bed.below(&as_it_is), cipher: bed.cipher.clone() };
        read_all(&*open_as(storages, Qcow2Options::default().read_only(true))?)
    };
    let plan = plan(recipe, seed, 200);
    power::run(bed.first.clone(), plan, if recipe.cluster == 2 << 20 { 40 } else { 160 }, &open_under_power, &look)
}

/// Of a process that writes to a real file.
fn kills(recipe: &Recipe, seed: u64) -> Verdict {
    kill::run(recipe, seed, 3)
}

/// The same, of images with journals. Those of version 2 have none.
fn kills_with_journals(recipe: &Recipe, seed: u64) -> Verdict {
    if recipe.version2 { Ok(()) } else { kill::run_with_journal(recipe, seed, 3) }
}
