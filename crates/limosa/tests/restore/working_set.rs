//! Working sets: what a guest touches is recorded beside the snapshot, and comes first at the next restore.

use std::path::{Path, PathBuf};

use limosa_page::PageRange;
use limosa_snapshot::{RecordedMode, Snapshot, WorkingSet};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::destination::mapped;
use crate::needs_qemu;
use crate::scene::{
    BALLAST, Saved, Scene, assert_ballast, assert_consistent, assert_failed, beat, control, release, saved_beat,
    small_beat, text, wait_guest, wait_migration_status,
};
use crate::stage::{assert_beats, limosa, names};

/// The working set beside a snapshot.
fn set_of(snapshot: &Path) -> WorkingSet {
    WorkingSet::of(&Snapshot::open(snapshot).unwrap()).unwrap().unwrap()
}

fn path_of(snapshot: &Path) -> PathBuf {
    snapshot.with_file_name("snapshot.working-set")
}

/// Pages of the ballast, which no guest touches, in a working set.
fn ballast_pages(snapshot: &Path, set: &WorkingSet) -> u64 {
    let file = Snapshot::open(snapshot).unwrap();
    let ballast = PageRange::inside_bytes(&BALLAST);
    let of_guest = |block: usize| file.layout().blocks[block].block.name == "mem";
    let ranges = set.ranges.iter().filter(|range| of_guest(range.block));
    ranges.map(|range| range.pages.intersect(ballast).len()).sum()
}

/// Records the first moments of a lazily restored guest.
fn record_lazily(scene: &Scene, saved: &Saved, how: &[&str]) -> Value {
    let destination = beat().start_incoming().unwrap();
    let how = [&["--memory", "lazy", "--json"], how].concat();
    let report = scene.restore(&saved.snapshot, &destination, &how).json();
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
    assert_ballast(&destination);
    report
}

#[test]
fn the_pages_that_a_lazy_guest_requests_are_recorded_and_no_others() {
    needs_qemu!();
    for preempt in ["off", "on"] {
        let scene = Scene::new();
        let saved = saved_beat(&scene, &beat(), &[]);
        let report = record_lazily(&scene, &saved, &["--record-working-set=400ms", "--preempt", preempt]);
        let set = set_of(&saved.snapshot);
        assert_eq!((set.mode, set.duration.as_millis()), (RecordedMode::Lazy, 400));
        assert!(set.pages() > 16, "{report}");
        assert_eq!(ballast_pages(&saved.snapshot, &set), 0, "pages came that the guest had not touched");
        let recorded = &report["recorded_working_set"];
        assert_eq!((&recorded["pages"], &recorded["path"]), (&json!(set.pages()), &json!(path_of(&saved.snapshot))));

        let shown = limosa(["inspect", "--json", text(&saved.snapshot)]).json();
        let shown = &shown["working_set"];
        let wanted = (&json!(set.pages()), &json!("lazy"), &json!(400.0));
        assert_eq!((&shown["pages"], &shown["mode"], &shown["recorded_ms"]), wanted);
        let people = limosa(["inspect", text(&saved.snapshot)]).success();
        assert!(
            people.stdout.contains("working set   ") && people.stdout.contains("a lazy guest"),
            "{}",
            people.stdout
        );

        // The set is sent first, and every page once: QEMU would break off at a second copy.
        let report = record_lazily(&scene, &saved, &["--read-ahead", "on", "--preempt", preempt]);
        assert_eq!(report["recorded_working_set"], Value::Null);
        assert_eq!(set_of(&saved.snapshot), set);
        scene.assert_tidy();
    }
}

#[test]
fn a_lazy_recording_ends_early_when_the_rest_is_wanted() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let destination = beat().start_incoming().unwrap();
    let limosa = scene.start_restore(&saved.snapshot, &destination, &["--memory", "lazy", "--record-working-set=5m"]);
    wait_guest(&limosa);
    destination.wait_heartbeats(2).unwrap();
    let ended = release(limosa);
    assert!(ended.stderr.contains("touched within"), "{}", ended.stderr);
    assert_ballast(&destination);
    assert!(set_of(&saved.snapshot).pages() > 16);
}

#[test]
fn the_pages_that_a_mapped_guest_touches_are_recorded_and_read_ahead() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let file = std::fs::read(&saved.snapshot).unwrap();
    let record = |how: &[&str]| {
        let destination = mapped(&beat(), &saved.snapshot).start_incoming().unwrap();
        let report = scene.restore(&saved.snapshot, &destination, &[&["--memory", "mapped", "--json"], how].concat());
        let report = report.json();
        saved.assert_goes_on(&destination);
        assert_consistent(&destination);
        report
    };
    let report = record(&["--record-working-set=1s"]);
    assert_eq!((&report["read_ahead"], &report["mode"]), (&Value::Null, &json!("mapped")));
    let set = set_of(&saved.snapshot);
    assert_eq!((set.mode, &report["recorded_working_set"]["pages"]), (RecordedMode::Mapped, &json!(set.pages())));
    assert!(set.pages() > 64, "{set:?}");
    // A fault maps its neighbours too, but not megabytes of them.
    assert!(ballast_pages(&saved.snapshot, &set) <= 64, "{set:?}");

    let report = record(&["--read-ahead", "on"]);
    let read = &report["read_ahead"];
    let bytes = read["bytes"].as_u64().unwrap() + read["cached_bytes"].as_u64().unwrap();
    assert!(bytes >= set.pages() * 4096, "{report}");
    assert_eq!(report["recorded_working_set"], Value::Null);
    for how in [&["--read-ahead", "off"][..], &[]] {
        assert_eq!(record(how)["read_ahead"], Value::Null);
    }
    assert_eq!(set_of(&saved.snapshot), set);
    assert!(std::fs::read(&saved.snapshot).unwrap() == file, "the snapshot was written to");
}

#[test]
fn a_detached_mapped_restore_names_the_process_that_records() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    for recorded in [false, true] {
        let destination = mapped(&beat(), &saved.snapshot).start_incoming().unwrap();
        let record: &[&str] = if recorded { &["--record-working-set=5m"] } else { &[] };
        let ended = scene.restore(&saved.snapshot, &destination, &[&["--detach", "--json"], record].concat()).success();
        let report: Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!((&report["mode"], &report["pager"]), (&json!("mapped"), &Value::Null), "{report}");
        assert!(ended.stderr.contains("the snapshot file is its memory"), "{}", ended.stderr);
        saved.assert_goes_on(&destination);
        let Some(recorder) = report["recorder"].as_u64() else {
            assert!(!recorded, "{report}");
            continue;
        };
        assert!(recorded && ended.stderr.contains("records the working set"), "{}", ended.stderr);
        kill_process(Pid::from_raw(i32::try_from(recorder).unwrap()).unwrap(), Signal::INT).unwrap();
        crate::stage::wait_for("the working set", || path_of(&saved.snapshot).exists().then_some(()));
        assert!(set_of(&saved.snapshot).pages() > 64);
    }
}

#[test]
fn a_mapped_recording_ends_with_a_signal_and_leaves_the_monitor_free() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let destination = mapped(&beat(), &saved.snapshot).start_incoming().unwrap();
    let recording = scene.start_restore(&saved.snapshot, &destination, &["--record-working-set=5m"]);
    saved.assert_goes_on(&destination);
    // The monitor is free during the recording: the second command needs it.
    crate::scene::wait_said(&recording, "restored after");
    crate::stage::wait_for("the monitor", || {
        let socket = destination.qmp_socket();
        limosa(["resume", "--qmp", text(&socket)]).status.success().then_some(())
    });
    assert!(recording.is_running());
    recording.signal(Signal::INT);
    let ended = recording.wait().success();
    assert!(ended.stderr.contains("recorded in"), "{}", ended.stderr);
    assert!(set_of(&saved.snapshot).pages() > 64);
}

#[test]
fn an_interrupted_restore_continues_with_the_working_set() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    record_lazily(&scene, &saved, &["--record-working-set=300ms"]);
    let socket = scene.path("control");
    let begin = |rate: &str| {
        let destination = beat().start_incoming().unwrap();
        let how = ["--memory", "lazy", "--read-ahead", "on", "--control", text(&socket), "--max-bandwidth", rate];
        let limosa = scene.start_restore(&saved.snapshot, &destination, &how);
        wait_guest(&limosa);
        assert_beats(&destination);
        (destination, limosa)
    };
    // By a person.
    let (destination, limosa) = begin("4K");
    control(&socket).execute("migrate-pause", json!({})).unwrap();
    assert_failed(&limosa.wait(), &["recover with: limosa restore --recover"]);
    scene.restore(&saved.snapshot, &destination, &["--recover", "--read-ahead", "on"]).success();
    assert_consistent(&destination);
    assert_ballast(&destination);
    // By the watchdog, which is as slow as limosa was.
    let (destination, limosa) = begin("8M");
    limosa.signal(Signal::KILL);
    limosa.wait();
    wait_migration_status(&destination, "completed");
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
    assert_ballast(&destination);
}

#[test]
fn what_is_not_the_snapshots_working_set_is_said_and_not_used() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &small_beat(), &[]);
    let restore = |how: &[&str]| {
        let destination = small_beat().start_incoming().unwrap();
        let ended = scene.restore(&saved.snapshot, &destination, how);
        if ended.status.success() {
            saved.assert_goes_on(&destination);
        }
        ended
    };
    assert_failed(&restore(&["--read-ahead", "on"]), &["no working set", "--record-working-set"]);
    std::fs::write(path_of(&saved.snapshot), "Dear Sir or Madam").unwrap();
    let noticed = restore(&[]).success();
    assert!(noticed.stderr.contains("nothing is read ahead") && noticed.stderr.contains("not a working set"));
    assert_failed(&restore(&["--read-ahead", "on"]), &["cannot be read ahead", "not a working set"]);
    assert!(!restore(&["--read-ahead", "off"]).success().stderr.contains("working set"));
    let shown = limosa(["inspect", "--json", text(&saved.snapshot)]).json();
    assert!(shown["working_set"]["error"].as_str().unwrap().contains("not a working set"), "{shown}");
    for how in [&["--memory", "eager"][..], &["--channels", "2"], &["--read-ahead", "on"], &["--recover"]] {
        assert_eq!(restore(&[&["--record-working-set"], how].concat()).status.code(), Some(2), "{how:?}");
    }
    assert_eq!(restore(&["--record-working-set", "5s"]).status.code(), Some(2), "the time follows an equals sign");
}

#[test]
fn a_save_over_a_snapshot_removes_its_working_set() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    record_lazily(&scene, &saved, &["--record-working-set=300ms"]);
    assert!(path_of(&saved.snapshot).exists());
    let source = small_beat().start().unwrap();
    source.wait_heartbeats(1).unwrap();
    scene.save(&source, "snapshot", &["--force"]);
    let mut left = names(&scene.path(""));
    left.retain(|name| name.starts_with("snapshot"));
    assert_eq!(left, ["snapshot"]);
}
