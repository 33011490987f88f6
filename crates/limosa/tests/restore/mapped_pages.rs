//! `limosa inspect`: who maps a snapshot, and which of its pages a VM has made its own.

use std::fs::Permissions;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Command;

use limosa_testkit::Vm;
use serde_json::{Value, json};

use crate::destination::mapped;
use crate::mapped::all_memory;
use crate::needs_qemu;
use crate::scene::{Saved, Scene, assert_failed, beat, saved_beat, small_beat, text};
use crate::stage::limosa;

fn inspect(snapshot: &Path, more: &[&str]) -> Value {
    limosa([&["inspect", "--json", text(snapshot)], more].concat()).json()
}

/// A VM that maps the snapshot and stands still after it has run.
fn stopped_twin(scene: &Scene, saved: &Saved) -> Vm {
    let twin = mapped(&beat(), &saved.snapshot).start_incoming().unwrap();
    scene.restore(&saved.snapshot, &twin, &["--memory", "mapped"]).success();
    saved.assert_goes_on(&twin);
    // Between two heartbeats it writes to each of its pages.
    twin.wait_heartbeats(2).unwrap();
    twin.stop().unwrap();
    twin
}

/// The pages of the block `mem` that the report names.
fn changed_pages(report: &Value) -> Vec<u64> {
    let blocks = report["blocks"].as_array().unwrap();
    assert_eq!(blocks.len(), 1, "{report}");
    assert_eq!((&blocks[0]["name"], &blocks[0]["pages"]), (&json!("mem"), &json!(beat().memory_bytes() / 4096)));
    let ranges: Vec<(u64, u64)> = serde_json::from_value(blocks[0]["ranges"].clone()).unwrap();
    assert!(ranges.iter().all(|(start, end)| start < end), "{ranges:?}");
    assert!(ranges.windows(2).all(|pair| pair[0].1 < pair[1].0), "{ranges:?}");
    let pages: Vec<u64> = ranges.into_iter().flat_map(|(start, end)| start..end).collect();
    let count = u64::try_from(pages.len()).unwrap();
    assert_eq!((&blocks[0]["changed"], &report["changed"]), (&json!(count), &json!(count)));
    pages
}

/// Pages of the guest's memory that differ from the snapshot's.
fn differing(twin: &Vm, snapshot: &Path) -> Vec<u64> {
    let blocks = inspect(snapshot, &[])["blocks"].clone();
    let block = blocks.as_array().unwrap().iter().find(|block| block["name"] == "mem").unwrap().clone();
    let memory = all_memory(twin);
    let mut stored = vec![0; memory.len()];
    std::fs::File::open(snapshot).unwrap().read_exact_at(&mut stored, block["pages_offset"].as_u64().unwrap()).unwrap();
    let pages = memory.chunks(4096).zip(stored.chunks(4096)).zip(0..);
    pages.filter(|((now, before), _)| now != before).map(|(_, page)| page).collect()
}

#[test]
fn the_pages_that_a_mapped_vm_has_changed_are_counted_and_listed() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let twin = stopped_twin(&scene, &saved);
    let (socket, pid) = (twin.qmp_socket(), twin.pid().to_string());
    let report = inspect(&saved.snapshot, &["--changed", "--qmp", text(&socket)]);
    let changed = changed_pages(&report);
    assert_eq!(report["pid"], twin.pid());
    // Every page that differs, and none that the guest cannot have written: it leaves the ballast alone.
    let differing = differing(&twin, &saved.snapshot);
    assert!(differing.len() > 100, "{} pages differ", differing.len());
    assert!(differing.iter().all(|page| changed.binary_search(page).is_ok()));
    let ballast = crate::scene::BALLAST.start / 4096..crate::scene::BALLAST.end / 4096;
    assert!(changed.iter().all(|page| !ballast.contains(page)), "the ballast was not written");
    assert_eq!(inspect(&saved.snapshot, &["--changed", "--pid", &pid]), report, "by its process");

    let people = limosa(["inspect", text(&saved.snapshot), "--changed", "--pid", &pid]).success();
    for words in [&format!("(pid {pid}) has made "), "RAM block", "largest ranges"] {
        assert!(people.stdout.contains(words), "{words:?} is not in {}", people.stdout);
    }
    assert_eq!(people.stderr, "");
}

#[test]
fn the_processes_that_map_a_snapshot_are_named_as_long_as_they_do() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    assert_eq!(inspect(&saved.snapshot, &[])["mapped_by"]["processes"], json!([]));
    assert!(!limosa(["inspect", text(&saved.snapshot)]).success().stdout.contains("(pid "));
    let twins = [stopped_twin(&scene, &saved), stopped_twin(&scene, &saved)];
    // One that has its memory from the same file, but does not map it.
    let other = beat().start_incoming().unwrap();
    scene.restore(&saved.snapshot, &other, &["--memory", "eager"]).success();

    let answer = inspect(&saved.snapshot, &[])["mapped_by"].clone();
    let processes = answer["processes"].as_array().unwrap();
    let mut pids = twins.each_ref().map(Vm::pid);
    pids.sort_unstable();
    assert_eq!(processes.iter().map(|process| process["pid"].clone()).collect::<Vec<_>>(), pids);
    for process in processes {
        assert_eq!((&process["blocks"], &process["shared"]), (&json!(["mem"]), &json!(false)));
        assert!(process["name"].as_str().unwrap().starts_with("qemu"), "{process}");
    }
    let people = limosa(["inspect", text(&saved.snapshot)]).success();
    for pid in pids {
        assert!(people.stdout.contains(&format!("(pid {pid}): mem")), "{}", people.stdout);
    }
    // A copy is another file.
    let copy = scene.path("copy");
    assert!(Command::new("cp").arg("--sparse=always").args([&saved.snapshot, &copy]).status().unwrap().success());
    assert_eq!(inspect(&copy, &[])["mapped_by"]["processes"], json!([]));
    drop(twins);
    assert_eq!(inspect(&saved.snapshot, &[])["mapped_by"]["processes"], json!([]));
}

#[test]
fn processes_that_a_user_may_not_look_at_are_counted() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &small_beat(), &[]);
    // The folders above the file are open to root alone, so it is passed open.
    std::fs::set_permissions(&saved.snapshot, Permissions::from_mode(0o444)).unwrap();
    let file = std::fs::File::open(&saved.snapshot).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", env!("CARGO_BIN_EXE_limosa"), "inspect"]);
    command.args(["/dev/stdin", "--json"]).stdin(file);
    let ended = command.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.success(), "{said}");
    let answer: Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert!(answer["mapped_by"]["unseen"].as_u64() > Some(0), "{answer}");
}

#[test]
fn a_process_that_does_not_map_the_snapshot_is_said_not_to() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let other = beat().start_incoming().unwrap();
    let (socket, own) = (other.qmp_socket(), std::process::id().to_string());
    let changed = |how: &[&str]| limosa([&["inspect", text(&saved.snapshot), "--changed"], how].concat());
    assert_failed(&changed(&["--qmp", text(&socket)]), &["does not map", "limosa inspect SNAPSHOT"]);
    assert_failed(&changed(&["--pid", &own]), &["does not map"]);
    assert_failed(&changed(&["--pid", "4294967295"]), &["the mappings of process 4294967295 cannot be read"]);
    for how in [&[][..], &["--pid", "0"], &["--pid", &own, "--qmp", text(&socket)], &["--pid", &own, "--qemu-args"]] {
        assert_eq!(changed(how).status.code(), Some(2), "{how:?}");
    }
    let without = limosa(["inspect", text(&saved.snapshot), "--pid", &own]);
    assert_eq!(without.status.code(), Some(2), "--pid means nothing without --changed");
}
