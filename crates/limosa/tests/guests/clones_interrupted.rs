//! limosa is killed at any moment of starting, filling a pool, stopping and removing clones; the disk gets full; two
//! limosas work in one directory. What is left is listed, and goes with one `rm --force`.
//!
//! `LIMOSA_CHAOS_TRIALS` and `LIMOSA_CHAOS_SEED` choose how many moments, and which.

use std::path::Path;
use std::time::Duration;

use limosa_storage::testing::SeededRandom;
use limosa_testkit::Qmp;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::clone_scene::{Scene, pids, processes_of};
use crate::needs_qemu;
use crate::stage::*;

/// Waits until every QEMU of the directory is listed, and no other; the list.
fn settled(scene: &Scene) -> Vec<Value> {
    wait_for("every QEMU to be listed, or to end", || {
        let listed = if scene.clones().exists() { scene.list() } else { Vec::new() };
        let (mut found, mut known) = (scene.processes(), pids(&listed));
        found.sort_unstable();
        known.sort_unstable();
        (found == known).then_some(listed)
    })
}

fn remove_all(scene: &Scene) {
    if scene.clones().exists() {
        limosa(["clone", "rm", "--force", scene.clones().to_str().unwrap()]).success();
        assert_eq!((scene.processes(), names(&scene.clones())), (Vec::new(), Vec::<String>::new()));
    }
    for entry in std::fs::read_dir(scene.folder.path()).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with("serial-") {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
}

#[test]
fn killed_at_any_moment_limosa_leaves_qemus_that_are_listed_and_one_rm_takes_all() {
    needs_qemu!();
    let scene = Scene::new();
    let file = std::fs::read(&scene.snapshot).unwrap();
    let seed = variable("LIMOSA_CHAOS_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let trials = variable("LIMOSA_CHAOS_TRIALS").unwrap_or(15);
    println!("LIMOSA_CHAOS_SEED={seed} LIMOSA_CHAOS_TRIALS={trials}");
    let mut chance = SeededRandom::new(seed);
    let clones = scene.clones();
    let clones = clones.to_str().unwrap();
    for trial in 0..trials {
        let kind = chance.below(6);
        let limosa_at_work = match kind {
            0 => scene.start(3, &["--jobs", "2"], &[]),
            1 => scene.clone_with(&["--pool", "3"], &[]),
            2 => scene.clone_with(&["--pool", "2", "--count", "2"], &[]),
            3 => {
                // The QEMUs of a pool are taken.
                scene.clone_with(&["--pool", "2"], &[]).wait().success();
                scene.start(3, &[], &[])
            }
            4 => {
                scene.start(2, &[], &[]).wait().success();
                start(["clone", "stop", clones])
            }
            _ => {
                scene.clone_with(&["--pool", "1", "--count", "2"], &[]).wait().success();
                start(["clone", "rm", "--force", clones])
            }
        };
        // Each of them takes some 100 to 300 ms on two cores that are idle.
        std::thread::sleep(Duration::from_micros(chance.below(if kind < 4 { 300_000 } else { 120_000 })));
        limosa_at_work.signal(Signal::KILL);
        wait_gone(limosa_at_work.pid());
        let listed = settled(&scene);
        // One that was told to end before the kill still ends, perhaps after it was listed.
        let is_whole = |clone: &&Value| kind < 4 && ["loaded", "running"].contains(&clone["state"].as_str().unwrap());
        for clone in listed.iter().filter(is_whole) {
            let monitor = Path::new(clone["monitor"].as_str().unwrap());
            let mut qmp = Qmp::connect(monitor, SOON).unwrap();
            qmp.execute("cont", json!({})).unwrap();
            drop(qmp);
            scene.assert_goes_on(clone);
        }
        println!("trial {trial}, kind {kind}: {} listed", listed.len());
        remove_all(&scene);
    }
    assert!(std::fs::read(&scene.snapshot).unwrap() == file, "the snapshot was written to");
}

#[test]
fn two_limosas_in_one_directory_share_its_numbers() {
    needs_qemu!();
    let scene = Scene::new();
    let both = [scene.start(4, &["--json"], &[]), scene.start(4, &["--json"], &[])];
    let reports = both.map(|limosa| limosa.wait().json());
    let clones: Vec<_> = reports.iter().flat_map(|report| report["clones"].as_array().unwrap()).collect();
    let mut numbers: Vec<_> = clones.iter().map(|clone| clone["number"].as_u64().unwrap()).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 8, "{reports:?}");
    clones.iter().for_each(|clone| scene.assert_goes_on(clone));
    // Each takes what the other leaves; one may find that the other has removed a clone.
    let rm = || start(["clone", "rm", "--force", scene.clones().to_str().unwrap()]);
    let both = [rm(), rm()];
    both.into_iter().for_each(|limosa| drop(limosa.wait()));
    assert_eq!((scene.processes(), names(&scene.clones())), (Vec::new(), Vec::<String>::new()));
}

#[test]
fn a_disk_that_gets_full_at_any_file_of_a_clone_is_named_and_nothing_of_that_clone_is_left() {
    needs_qemu!();
    let scene = Scene::new();
    let (mut failed, mut partial) = (0, 0);
    // From hardly any room to enough: records and logs need a page each.
    for pages in 1..40 {
        let place = Mounted::new(&(pages * 4096).to_string());
        let clones = place.path().join("clones");
        let dir = clones.to_str().unwrap();
        let options = ["clone", scene.snapshot.to_str().unwrap(), "--count", "2", "--pool", "1", "--dir", dir, "--"];
        let ended = limosa(options.into_iter().chain(scene.line.iter().map(String::as_str)));
        let is_there = ended.status.success();
        if !is_there {
            failed += 1;
            assert!(ended.stderr.contains("No space left on device"), "{pages} pages: {}", ended.stderr);
            assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
        }
        // Those that were started before it got full are there whole; of those that failed there is nothing.
        let listed =
            if clones.exists() { limosa(["clone", "list", "--json", dir]).json()["clones"].take() } else { json!([]) };
        let listed = listed.as_array().unwrap();
        let mut found = processes_of(&clones);
        let mut known = pids(listed);
        found.sort_unstable();
        known.sort_unstable();
        assert_eq!(found, known, "{pages} pages");
        let visible = if clones.exists() { names(&clones) } else { Vec::new() };
        assert_eq!(visible.len(), known.len(), "{pages} pages: {visible:?}");
        partial += usize::from(!is_there && !known.is_empty());
        if clones.exists() {
            limosa(["clone", "rm", "--force", dir]).success();
            assert_eq!(names(&clones), Vec::<String>::new());
        }
        for number in 1..=3 {
            let _ = std::fs::remove_file(scene.folder.path().join(format!("serial-{number}")));
        }
        if is_there {
            break;
        }
    }
    println!("{failed} times too little room, {partial} times enough for some");
    assert!(failed > 0);
}
