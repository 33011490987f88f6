//! The memory that limosa takes for packing does not grow with the snapshot.

use std::path::Path;

use limosa_snapshot::Manifest;

use crate::snapshot_fixture as fixture;
use crate::stage::start;

/// A guest of 1 GiB, and how much of it is stored.
const PAGES: u64 = 1 << 18;
const STORED: u64 = 320 << 20;

/// Runs limosa to its end. Returns the most memory that it had, in bytes.
fn peak_of(words: &[&str]) -> u64 {
    let limosa = start(words);
    let status = format!("/proc/{}/status", limosa.pid());
    let mut peak = 0;
    while limosa.is_running() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        // One that has ended has no memory.
        peak = peak.max(kibibytes.unwrap_or(0) << 10);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    limosa.wait().success();
    peak
}

#[test]
fn packing_and_unpacking_take_a_part_of_the_memory_that_the_snapshot_holds() {
    let folder = limosa_testkit::scratch().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    for (name, changed) in [("first", 0), ("second", 1)] {
        let mut writer = fixture::writer(Path::new(&path(name)), PAGES, fixture::QUICK);
        for first in (0..PAGES).step_by(512) {
            // Of each 2 MiB so much that it is STORED in all. One page of them differs.
            let seeds: Vec<_> = (0..STORED / 4096 / (PAGES / 512)).map(|page| first + page.max(changed)).collect();
            fixture::put(&mut writer, 0, first, &seeds);
        }
        writer.finish(&fixture::tail("running"), Manifest::new()).unwrap();
    }
    let cores = u64::try_from(std::thread::available_parallelism().unwrap().get()).unwrap();
    // Generous: 32 MiB of unpacked clusters, a few MiB for each core, and the program.
    let bound = (128 << 20) + cores * (8 << 20);
    let (first, second, base, top, back) = (path("first"), path("second"), path("1"), path("2"), path("back"));
    for words in [
        &["pack", "--no-sync", "--level", "1", &first, &base][..],
        &["pack", "--no-sync", "--level", "1", &second, &top, "--base", &base],
        &["unpack", &top, &back],
    ] {
        let peak = peak_of(words);
        println!("{}: {} MiB", words[0], peak >> 20);
        assert!(peak > 1 << 20 && peak < bound.min(STORED / 2), "{words:?}: {peak} bytes; {cores} cores");
    }
}
