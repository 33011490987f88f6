//! Both ends are limosa: a snapshot that has travelled is the snapshot that was sent.

use std::path::Path;
use std::process::Command;

use limosa_migrate::stored::PageSource as _;
use limosa_page::PageRange;
use limosa_snapshot::Snapshot;

use crate::ends::LIMOSA;
use crate::needs_qemu;
use crate::scene::{Saved, Scene, beat, saved_beat, text};
use crate::stage::{Ended, load_in_stock_qemu, names, start_command};

/// Expects two snapshots of one VM at one instant: layout, memory, device state.
#[track_caller]
fn assert_same(a: &Path, b: &Path) {
    let (a, b) = (Snapshot::open(a).unwrap(), Snapshot::open(b).unwrap());
    assert_eq!(a.setup().configuration.machine, b.setup().configuration.machine);
    let blocks = |snapshot: &Snapshot| -> Vec<(String, u64)> {
        snapshot.setup().blocks.iter().map(|block| (block.name.clone(), block.used_length)).collect()
    };
    assert_eq!(blocks(&a), blocks(&b));
    for (index, (name, length)) in blocks(&a).into_iter().enumerate() {
        let length = usize::try_from(length).unwrap();
        let read = |snapshot: &Snapshot| {
            let mut bytes = vec![0; length];
            for run in snapshot.stored_bitmap(index).runs() {
                let (from, to) = (run.start.offset(), run.end.offset());
                let place = usize::try_from(from).unwrap()..usize::try_from(to).unwrap();
                snapshot.read(index, PageRange::new(run.start, run.end), &mut bytes[place]).unwrap();
            }
            bytes
        };
        assert!(read(&a) == read(&b), "RAM block {name}");
    }
    assert!(a.device_tail() == b.device_tail());
}

fn shell(scene: &Scene, script: &str) -> Ended {
    let mut command = Command::new("/bin/bash");
    command.args(["-o", "pipefail", "-c", script]).env("TMPDIR", scene.path("tmp"));
    start_command(command).wait()
}

fn travels(scene: &Scene, saved: &Saved, script: &str) {
    let copy = scene.path("copy");
    let script = script
        .replace("LIMOSA", LIMOSA)
        .replace("SNAPSHOT", text(&saved.snapshot))
        .replace("COPY", text(&copy))
        .replace("SOCKET", text(&scene.path("socket")))
        .replace("WORDS", text(&scene.path("words")));
    shell(scene, &script).success();
    assert_same(&saved.snapshot, &copy);
    std::fs::remove_file(copy).unwrap();
}

#[test]
fn a_snapshot_travels_through_pipes_commands_and_sockets_unchanged() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    for script in [
        "LIMOSA send SNAPSHOT fd:1 | LIMOSA receive fd:0 COPY",
        "LIMOSA send SNAPSHOT 'exec:LIMOSA receive - COPY'",
        "LIMOSA receive 'exec:LIMOSA send SNAPSHOT -' COPY",
        "LIMOSA send SNAPSHOT --one-way 'exec:gzip -1 | gunzip | LIMOSA receive fd:0 COPY'",
        // Both ends at the same descriptors, as behind ssh.
        "LIMOSA send SNAPSHOT 'exec:cat | LIMOSA receive - COPY'",
        "LIMOSA receive unix:SOCKET COPY 2>WORDS & until grep -q 'listening on' WORDS; do sleep 0.05; done; \
         LIMOSA send SNAPSHOT unix:SOCKET && wait $!",
    ] {
        travels(&scene, &saved, script);
    }
    scene.assert_tidy();
}

#[test]
fn a_snapshot_that_has_travelled_runs() {
    needs_qemu!();
    let scene = Scene::new();
    let source = beat().start().unwrap();
    source.wait_heartbeats(2).unwrap();
    let snapshot = scene.save(&source, "snapshot", &[]);
    let copy = scene.path("copy");
    let script = format!("{LIMOSA} send {} 'exec:{LIMOSA} receive - {} --checksum'", text(&snapshot), text(&copy));
    shell(&scene, &script).success();
    load_in_stock_qemu(&beat(), &copy, 0);
}

#[test]
fn a_receiver_behind_a_command_that_fails_makes_the_sender_fail() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let folder = scene.path("files");
    std::fs::create_dir(&folder).unwrap();
    let taken = folder.join("taken");
    std::fs::write(&taken, "precious").unwrap();
    let ended =
        shell(&scene, &format!("{LIMOSA} send {} 'exec:{LIMOSA} receive - {}'", text(&saved.snapshot), text(&taken)));
    crate::scene::assert_failed(&ended, &["the command failed (exit status: 1)"]);
    assert!(ended.stderr.contains("--force"), "{}", ended.stderr);
    assert_eq!(std::fs::read(&taken).unwrap(), b"precious");

    // Postcopy has no meaning for a file.
    let file = folder.join("file");
    let script =
        format!("{LIMOSA} send {} --mode postcopy 'exec:{LIMOSA} receive - {}'", text(&saved.snapshot), text(&file));
    let ended = shell(&scene, &script);
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.stderr.contains("switched to postcopy"), "{}", ended.stderr);

    // A sender that is killed leaves the receiver nothing to publish.
    let script = format!(
        "{LIMOSA} receive 'exec:{LIMOSA} send {} fd:1 | head -c 5000000' {}",
        text(&saved.snapshot),
        text(&file)
    );
    crate::scene::assert_failed(&shell(&scene, &script), &["nothing was kept"]);
    assert_eq!(names(&folder), ["taken"]);
}
