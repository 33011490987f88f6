//! The order in which a lazy restore asks a store for parts of an object: what the guest has touched last comes first.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use limosa_migrate::stored::BlockRange;
use limosa_page::{PAGE_SIZE, PageNumber, PageRange};
use limosa_snapshot::{Snapshot, WorkingSet, WorkingSetFile};
use limosa_testkit::{MemoryBackend, Vm, stores_skipped};

use crate::far::Far;
use crate::needs_qemu;
use crate::scene::{
    BALLAST, TRICKLE, assert_ballast, assert_consistent, ballast, beat, load_ballast, release, small_beat, text,
    wait_guest,
};
use crate::stage::{Program, assert_beats, wait_for};

/// A part of the ballast, which no guest touches: what is asked for of it is asked for ahead.
const CHOSEN: Range<u64> = (24 << 20)..(32 << 20);

/// A part that comes earlier in memory, and in the image.
const EARLIER: Range<u64> = (18 << 20)..(22 << 20);

/// Ranges of bytes of an object that limosa has asked for.
#[derive(Debug, Default)]
struct Asked(Vec<Range<u64>>);

impl Asked {
    /// Adds the requests since this was asked last.
    fn update(&mut self, far: &Far, name: &str) {
        let requests = far.proxy.take_requests();
        let of_object = requests.iter().filter(|request| request.target.ends_with(&format!("/{name}")));
        self.0.extend(of_object.filter_map(|request| {
            let (first, last) = request.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
            Some(first.parse().ok()?..last.parse::<u64>().ok()? + 1)
        }));
    }

    /// How many of these places were asked for.
    fn of(&self, places: &[u64]) -> usize {
        places.iter().filter(|place| self.0.iter().any(|asked| asked.contains(place))).count()
    }
}

/// Leaves out places in the beginning and the end of an image, which are always fetched.
fn inner(mut places: Vec<u64>, image: &Path) -> Vec<u64> {
    let end = std::fs::metadata(image).unwrap().len() - (1 << 20);
    places.retain(|place| (2 << 20..end).contains(place));
    assert!(places.len() > 500, "{} pages are as they are", places.len());
    places
}

/// Places of these pages in a packed file, of those that it stores as they are.
fn places(file: &Path, memory: &[u8]) -> Vec<u64> {
    let page = usize::try_from(PAGE_SIZE).unwrap();
    let bytes = std::fs::read(file).unwrap();
    let known: HashMap<_, _> = bytes.chunks(page).zip((0..).map(|number: u64| number * PAGE_SIZE)).collect();
    memory.chunks(page).filter_map(|page| known.get(page).copied()).collect()
}

/// Starts a lazy restore that sends little but what its guest asks for, and waits until the guest runs.
fn start(far: &Far, url: &str, destination: &Vm, read_ahead: &str) -> Program {
    far.forget_cache();
    far.proxy.take_requests();
    let socket = destination.qmp_socket();
    let words = ["restore", url, "--qmp", text(&socket), "--memory", "lazy", "--run", "--read-ahead", read_ahead];
    let limosa = far.start(&[&words[..], &TRICKLE].concat());
    wait_guest(&limosa);
    limosa
}

#[test]
fn the_working_set_in_an_image_is_asked_for_before_its_guest_runs() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    // A guest that walks through its memory would be a sequential reader, which has more read ahead of it.
    let machine = small_beat().backend(MemoryBackend::Memfd);
    let far = Far::of(&machine);
    // A guest that was recorded has touched nothing of the ballast: the set gets a part of it instead.
    let recorded = machine.start_incoming().unwrap();
    let how = ["--memory", "lazy", "--record-working-set=200ms"];
    far.scene.restore(&far.saved.snapshot, &recorded, &how).success();
    drop(recorded);
    let snapshot = Snapshot::open(&far.saved.snapshot).unwrap();
    let mut set = WorkingSet::of(&snapshot).unwrap().unwrap();
    let block = snapshot.layout().blocks.iter().position(|block| block.block.name == "mem").unwrap();
    let pages = PageRange::new(PageNumber(CHOSEN.start / PAGE_SIZE), PageNumber(CHOSEN.end / PAGE_SIZE));
    set.ranges = vec![BlockRange { block, pages }];
    WorkingSetFile::create(&snapshot).unwrap().publish(&set).unwrap();
    drop(snapshot);
    let url = far.packed("vm.qcow2", &[]);
    let packed = far.scene.path("vm.qcow2");
    let at = |at: u64| usize::try_from(at - BALLAST.start).unwrap();
    let [chosen, earlier] =
        [CHOSEN, EARLIER].map(|part| inner(places(&packed, &ballast()[at(part.start)..at(part.end)]), &packed));
    far.proxy.set_latency(Duration::from_millis(20));
    for read_ahead in ["on", "auto", "off"] {
        let destination = machine.start_incoming().unwrap();
        let limosa = start(&far, &url, &destination, read_ahead);
        let mut asked = Asked::default();
        asked.update(&far, "vm.qcow2");
        let until_it_ran = asked.of(&chosen);
        if read_ahead == "off" {
            assert_beats(&destination);
            asked.update(&far, "vm.qcow2");
            assert_eq!(asked.of(&chosen), 0, "nobody wanted these parts: {asked:?}");
        } else {
            assert!(until_it_ran > 0, "{read_ahead}: {asked:?}");
            wait_for("all of the working set to be asked for", || {
                asked.update(&far, "vm.qcow2");
                (asked.of(&chosen) == chosen.len()).then_some(())
            });
            let requests = asked.0.iter().filter(|asked| chosen.iter().any(|place| asked.contains(place))).count();
            assert!(requests <= 16, "8 MiB in {requests} requests: {asked:?}");
            assert_eq!(asked.of(&earlier), 0, "nobody wanted these parts: {asked:?}");
        }
        release(limosa);
        assert_consistent(&destination);
        assert_ballast(&destination);
    }
}

#[test]
fn what_a_guest_has_written_since_the_base_is_asked_for_first() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let source = beat().start().unwrap();
    source.wait_heartbeats(1).unwrap();
    load_ballast(&source);
    let before = far.scene.save(&source, "before", &[]);
    let written: Vec<u8> = source.read_memory(CHOSEN).unwrap().iter().rev().copied().collect();
    source.tamper(CHOSEN.start, &written).unwrap();
    let after = far.scene.save(&source, "after", &["--stop"]);
    drop(source);
    let at = |name: &str| far.scene.path(name);
    let (base, top) = (at("base.qcow2"), at("top.qcow2"));
    far.run(&["pack", text(&before), text(&base), "--no-sync"]).success();
    far.run(&["pack", text(&after), text(&top), "--no-sync", "--base", text(&base)]).success();
    let url = far.put(&top, "top.qcow2");
    far.put(&base, "base.qcow2");
    let changed = inner(places(&top, &written), &top);
    far.proxy.set_latency(Duration::from_millis(20));
    for read_ahead in ["auto", "off"] {
        let destination = beat().start_incoming().unwrap();
        let limosa = start(&far, &url, &destination, read_ahead);
        let mut asked = Asked::default();
        asked.update(&far, "top.qcow2");
        if read_ahead == "off" {
            assert_beats(&destination);
            asked.update(&far, "top.qcow2");
            // A block of the store that is needed has some of them beside what is needed.
            assert!(asked.of(&changed) < changed.len() / 4, "nobody wanted these parts: {asked:?}");
        } else {
            assert!(asked.of(&changed) > 0, "{asked:?}");
            wait_for("all that the increment has to be asked for", || {
                asked.update(&far, "top.qcow2");
                (asked.of(&changed) == changed.len()).then_some(())
            });
        }
        release(limosa);
        assert_consistent(&destination);
        assert!(destination.read_memory(CHOSEN).unwrap() == written);
    }
}
