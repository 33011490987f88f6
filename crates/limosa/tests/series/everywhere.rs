//! A part of the table that every run has: snapshots of each series, restored in each by the three ways.

use limosa_testkit::{Series, series_skipped};

use crate::destination::mapped;
use crate::needs_qemu;
use crate::scene::{Scene, assert_failed, saved_beat, small_beat};
use crate::steps::{comes_back, machine, maps};

/// Saves a VM of a series, and restores it in all series in every way.
fn goes_everywhere_from(source: Series) {
    needs_qemu!();
    if series_skipped() {
        return;
    }
    let scene = Scene::new();
    let saved = saved_beat(&scene, &machine(source), &[]);
    for series in Series::ALL {
        let destination = machine(series);
        comes_back(&scene, &saved, &destination, &["--memory", "lazy"]);
        comes_back(&scene, &saved, &destination, &["--memory", "eager", "--via", "socket", "--paused"]);
        if maps(series) {
            comes_back(&scene, &saved, &mapped(&destination, &saved.snapshot), &["--memory", "mapped", "--paused"]);
        }
    }
}

#[test]
fn a_vm_of_the_oldest_series_goes_to_all() {
    goes_everywhere_from(Series::Oldest);
}

#[test]
fn a_vm_of_the_installed_series_goes_to_all() {
    goes_everywhere_from(Series::Installed);
}

#[test]
fn a_vm_of_the_newest_series_goes_to_all() {
    goes_everywhere_from(Series::Newest);
}

/// QEMU 11.1 says nothing about it until its source is gone; with a channel for requests it hangs then.
#[test]
fn a_device_that_a_series_lacks_ends_the_restore() {
    needs_qemu!();
    if series_skipped() {
        return;
    }
    let scene = Scene::new();
    let saved = saved_beat(&scene, &small_beat().kind("pc-q35-7.2").balloon(), &[]);
    for (series, preempt) in Series::ALL.into_iter().flat_map(|series| [(series, "on"), (series, "off")]) {
        let destination = small_beat().kind("pc-q35-7.2").series(series).start_incoming().unwrap();
        let how = ["--memory", "lazy", "--preempt", preempt];
        let ended = scene.restore(&saved.snapshot, &destination, &how);
        assert_failed(&ended, &["start a new one", "limosa inspect ", "--against-qmp SOCK"]);
        assert!(destination.serial().lines().is_empty());
        scene.assert_tidy();
    }
}
