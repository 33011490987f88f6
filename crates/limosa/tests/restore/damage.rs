//! A snapshot that is damaged, before or while it is served: a guest gets the pages that were saved, or stalls. Never
//! zeros, never a crash.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use limosa_testkit::{HeartbeatGuest, Machine, PAGE, Vm};
use serde_json::json;

use crate::needs_qemu;
use crate::scene::{
    BALLAST, Saved, Scene, TRICKLE, assert_ballast, assert_consistent, assert_failed, ballast_page, beat, control,
    saved_beat, small_beat, text, wait_guest, wait_migration_status,
};
use crate::stage::{Program, assert_beats};

/// A lazy restore whose ballast is missing, and that a program allows to continue.
fn under_way(scene: &Scene, saved: &Saved, more: &[&str]) -> (Vm, Program, limosa_testkit::Qmp) {
    let destination = beat().start_incoming().unwrap();
    let socket = scene.path("control");
    let words = [&["--memory", "lazy", "--control", text(&socket)], &TRICKLE[..], more].concat();
    let limosa = scene.start_restore(&saved.snapshot, &destination, &words);
    wait_guest(&limosa);
    assert_beats(&destination);
    (destination, limosa, control(&socket))
}

/// Harms the file under a running restore, lets the rest be sent, and expects a guest that stalls; then puts the file
/// back and expects that the guest is brought back whole. `says`: what limosa may say.
fn survives(harm: impl Fn(&Path), says: &[&str]) {
    for preempt in ["on", "off"] {
        let scene = Scene::new();
        let saved = saved_beat(&scene, &beat(), &[]);
        let kept = scene.path("kept");
        copy(&saved.snapshot, &kept);
        let (destination, limosa, mut programs) = under_way(&scene, &saved, &["--preempt", preempt]);
        harm(&saved.snapshot);
        // It may have noticed, and hung up, already.
        let _ = programs.execute("migrate-set-parameters", json!({ "max-bandwidth": 0 }));
        let ended = limosa.wait();
        assert_failed(&ended, &[text(&saved.snapshot), "recover with: limosa restore --recover"]);
        assert!(says.iter().any(|says| ended.stderr.contains(says)), "none of {says:?}: {}", ended.stderr);
        // No end of the stream: QEMU would have completed, and the ballast would be zero.
        wait_migration_status(&destination, "postcopy-paused");

        std::fs::remove_file(&saved.snapshot).unwrap();
        std::fs::rename(&kept, &saved.snapshot).unwrap();
        scene.recover(&saved.snapshot, &destination).success();
        saved.assert_goes_on(&destination);
        assert_consistent(&destination);
        assert_ballast(&destination);
    }
}

/// Copies the data of a sparse file.
fn copy(from: &Path, to: &Path) {
    let status = std::process::Command::new("cp").args(["--sparse=always", "-p"]).arg(from).arg(to).status().unwrap();
    assert!(status.success());
}

#[test]
fn a_file_that_is_cut_short_while_it_is_served_stalls_the_guest() {
    needs_qemu!();
    survives(|path| File::options().write(true).open(path).unwrap().set_len(3 << 20).unwrap(), &["snapshot: "]);
}

#[test]
fn a_file_that_is_cut_and_filled_up_with_holes_while_it_is_served_stalls_the_guest() {
    needs_qemu!();
    let harm = |path: &Path| {
        let file = File::options().write(true).open(path).unwrap();
        let length = file.metadata().unwrap().len();
        file.set_len(0).unwrap();
        file.set_len(length).unwrap();
    };
    // It may be read while it is cut.
    survives(harm, &["changed while it was open", "it was truncated"]);
}

#[test]
fn a_file_that_is_written_to_while_it_is_served_stalls_the_guest() {
    needs_qemu!();
    let harm = |path: &Path| File::options().write(true).open(path).unwrap().write_all_at(&[7; 4096], 9 << 20).unwrap();
    survives(harm, &["it was written to"]);
}

#[test]
fn a_file_that_another_takes_the_name_of_is_served_to_the_end() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let (destination, limosa, mut programs) = under_way(&scene, &saved, &[]);
    let other = scene.path("other");
    std::fs::write(&other, b"another file").unwrap();
    std::fs::rename(&other, &saved.snapshot).unwrap();
    programs.execute("migrate-set-parameters", json!({ "max-bandwidth": 0 })).unwrap();
    limosa.wait().success();
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
    assert_ballast(&destination);
}

#[test]
fn one_flipped_byte_of_checksummed_memory_is_refused_when_its_chunk_is_served() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &["--checksum"]);
    // In the middle of the ballast, 24 MiB into the block; the snapshot has the pages in the order of their addresses.
    let bytes = std::fs::read(&saved.snapshot).unwrap();
    let page = ballast_page(((24 << 20) - BALLAST.start) / PAGE);
    let at = bytes.chunks(page.len()).position(|found| found == page).unwrap() * page.len() + 1234;
    let file = File::options().write(true).open(&saved.snapshot).unwrap();
    let flip = |file: &File, bit: u8| file.write_all_at(&[bytes[at] ^ bit], u64::try_from(at).unwrap()).unwrap();
    flip(&file, 0x10);

    // Lazily, the guest runs on what is sound and stalls before it gets what is not.
    let destination = beat().start_incoming().unwrap();
    let ended = scene.restore(&saved.snapshot, &destination, &["--memory", "lazy"]);
    let wrong = ["RAM block mem: checksum of the chunk at block offset 0x1800000", "the file is damaged"];
    assert_failed(&ended, &wrong);
    wait_migration_status(&destination, "postcopy-paused");
    assert_failed(&scene.recover(&saved.snapshot, &destination), &wrong);
    wait_migration_status(&destination, "postcopy-paused");

    // Eagerly there is no guest at all.
    for via in ["file", "socket"] {
        let eager = beat().start_incoming().unwrap();
        let ended = scene.restore(&saved.snapshot, &eager, &["--memory", "eager", "--via", via]);
        assert_failed(&ended, &wrong);
        assert!(eager.serial().lines().is_empty());
    }

    flip(&file, 0);
    scene.recover(&saved.snapshot, &destination).success();
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
    assert_ballast(&destination);
}

#[test]
fn damage_that_shows_before_the_guest_runs_leaves_no_guest() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = small_beat();
    let saved = saved_beat(&scene, &machine, &["--checksum"]);
    let mut bytes = std::fs::read(&saved.snapshot).unwrap();
    // Every page of the machine's RAM, which begins at 1 MiB of the file: also those that the devices ask for while
    // they are loaded.
    let ram = usize::try_from(machine.memory_bytes()).unwrap();
    for page in bytes[1 << 20..][..ram].chunks_mut(4096).filter(|page| page.iter().any(|&byte| byte != 0)) {
        page[17] ^= 1;
    }
    std::fs::write(&saved.snapshot, &bytes).unwrap();
    for preempt in ["on", "off"] {
        let destination = machine.start_incoming().unwrap();
        let ended = scene.restore(&saved.snapshot, &destination, &["--memory", "lazy", "--preempt", preempt]);
        assert_failed(&ended, &["checksum of the chunk at block offset", "start a new one"]);
        assert!(destination.serial().lines().is_empty());
        scene.assert_tidy();
    }
}

#[test]
fn a_snapshot_edited_anywhere_outside_its_pages_is_refused_in_one_line_or_comes_back() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = Machine::heartbeat(HeartbeatGuest { rest: 2, ..HeartbeatGuest::over(64 << 10) }).memory(16 << 20);
    let saved = saved_beat(&scene, &machine, &["--checksum"]);
    let intact = std::fs::read(&saved.snapshot).unwrap();
    let edited = scene.path("edited");
    // The head is the machine, the RAM blocks and the first page bitmap; the tail is devices, description and trailer.
    let (head, tail) = (1 << 10, 200 << 10);
    let mut state = 0x5eed_u64;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((state >> 33) % u64::try_from(below).unwrap()).unwrap()
    };
    let (mut refused, mut back) = (0, 0);
    for round in 0..24 {
        let mut bytes = intact.clone();
        for _ in 0..1 + draw(3) {
            let at = if round % 2 == 0 { draw(head) } else { intact.len() - 1 - draw(tail) };
            bytes[at] ^= 1 << draw(8);
        }
        std::fs::write(&edited, &bytes).unwrap();
        let destination = machine.start_incoming().unwrap();
        let ended = scene.restore(&edited, &destination, &["--memory", "lazy"]);
        if ended.status.success() {
            assert_consistent(&destination);
            back += 1;
        } else {
            assert_failed(&ended, &[]);
            refused += 1;
        }
        scene.assert_tidy();
    }
    assert!(refused > 0, "{back} edits made no difference");
}
