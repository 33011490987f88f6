//! Dirty bitmaps of a served disk: read by stock clients, changed through the control socket, and what a backup finds.

use std::fs;

use limosa_testkit::{NbdClient, qemu_io};
use serde_json::{Value, json};

use crate::bed::{Bed, Serving, ctl, tool};
use crate::needs_qemu;

const SERVE: [&str; 7] = ["--control", "control", "--allow-dir", ".", "--name", "disk", "disk"];

/// `limosa serve ctl control bitmap disk WORDS`: the bitmaps that there are then.
#[track_caller]
fn change(bed: &Bed, words: &[&str]) -> Vec<Value> {
    let said = ctl(bed, &[&["bitmap", "disk", "--json"], words].concat()).json();
    said["bitmaps"].as_array().unwrap().clone()
}

/// The names of bitmaps, and the bytes that they say are dirty.
fn dirty(bitmaps: &[Value]) -> Vec<(&str, u64)> {
    bitmaps.iter().map(|it| (it["name"].as_str().unwrap(), it["dirty-bytes"].as_u64().unwrap())).collect()
}

fn write(serving: &Serving, commands: &[&str]) {
    let uri = serving.uri("disk");
    let words = commands.iter().flat_map(|command| ["-c", command]);
    let said = qemu_io(["-f", "raw"].into_iter().chain(words).chain([uri.as_str()])).unwrap();
    assert!(!said.contains("failed"), "{said}");
}

/// The flags of the bitmaps that the stock tool finds.
fn stored(bed: &Bed, image: &str) -> Value {
    let said: Value = serde_json::from_str(&bed.qemu_img(&["info", "--output=json", image])).unwrap();
    said["format-specific"]["data"]["bitmaps"].clone()
}

#[test]
fn stock_clients_read_what_was_written_since_a_bitmap_was_cleared() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "16M"]);
    bed.qemu_img(&["bitmap", "--add", "-g", "64k", "@disk", "b0"]);
    let serving = bed.serve("nbd", &[&SERVE[..], &["--bitmap", "b0"]].concat());
    write(&serving, &["write 1M 100k", "write -z 4M 1M", "write 8M 512"]);
    let expected = [(0, 1 << 20, 0), (1 << 20, 128 << 10, 1), (1152 << 10, 2944 << 10, 0), (4 << 20, 1 << 20, 1)];
    let map: Vec<Value> =
        serde_json::from_str(&tool("nbdinfo", &["--json", "--map=qemu:dirty-bitmap:b0", &serving.uri("disk")]))
            .unwrap();
    let number = |run: &Value, name: &str| run[name].as_u64().unwrap();
    let found: Vec<_> =
        map.iter().map(|run| (number(run, "offset"), number(run, "length"), number(run, "type"))).collect();
    assert_eq!(found[..4], expected);
    // QEMU takes dirty bytes for bytes without data, and says so in its documentation.
    let socket = bed.path("nbd");
    let source = format!(
        "driver=nbd,export=disk,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:b0",
        socket.display()
    );
    let map: Vec<Value> =
        serde_json::from_str(&bed.qemu_img(&["map", "--output=json", "--image-opts", &source])).unwrap();
    let dirty_runs = map.iter().filter(|run| run["data"] == false);
    let found: Vec<_> = dirty_runs.map(|run| (number(run, "start"), number(run, "length"))).collect();
    assert_eq!(found, [(1 << 20, 128 << 10), (4 << 20, 1 << 20), (8 << 20, 64 << 10)]);

    let said = ctl(&bed, &["bitmap", "disk"]).success().stdout;
    assert_eq!(said, "\"b0\": 1.1 MiB dirty, enabled, granularity 64 KiB, read by clients\n");
    assert!(ctl(&bed, &["list"]).success().stdout.contains("  bitmap \"b0\": "));
    let bitmaps = change(&bed, &["--add", "b1", "--disable", "b0", "-g", "4k"]);
    write(&serving, &["write 12M 4k"]);
    assert_eq!(dirty(&bitmaps), [("b0", 1216 << 10), ("b1", 0)]);
    assert_eq!(dirty(&change(&bed, &["--clear", "b0"])), [("b0", 0), ("b1", 4096)]);
    assert_eq!(dirty(&change(&bed, &["--merge", "b1", "b0", "--remove", "b1"])), [("b0", 64 << 10)]);
    ctl(&bed, &["bitmap", "disk", "--clear", "b0", "--remove", "b1"]).one_line(&["it has no bitmap \"b1\""]);
    assert_eq!(dirty(&change(&bed, &[])), [("b0", 64 << 10)]);
    serving.stop();
    assert_eq!(stored(&bed, "@disk"), json!([{ "flags": [], "name": "b0", "granularity": 65536 }]));
    bed.assert_sound("disk");
}

#[test]
fn a_bitmap_of_a_killed_server_is_not_relied_on_and_can_be_removed() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "16M"]);
    bed.qemu_img(&["bitmap", "--add", "@disk", "b0"]);
    let serving = bed.serve("nbd", &SERVE);
    write(&serving, &["write 1M 100k"]);
    drop(serving);
    bed.wait_unlocked("disk");
    assert_eq!(stored(&bed, "@disk")[0]["flags"], json!(["in-use", "auto"]));
    bed.qemu_img(&["check", "-q", "-r", "all", "@disk"]);
    let read_only = ["--read-only", "--bitmap", "b0", "--nbd", "unix:nbd2", "disk"];
    bed.refused(&read_only).one_line(&["bitmap \"b0\" was not stored by who used it"]);
    // Guests come back without the bitmap, but a name that never was is a mistake.
    bed.refused(&[&SERVE[..], &["--bitmap", "b1", "--nbd", "unix:nbd2", "--journal", "off"]].concat())
        .one_line(&["it has no bitmap \"b1\""]);
    let serving = bed.serve("nbd", &[&SERVE[..], &["--bitmap", "b0"]].concat());
    write(&serving, &["read 1M 100k"]);
    let said = serving.said();
    assert!(said.contains("disk: clients cannot read bitmap \"b0\": it was not stored by who used it\n"), "{said}");
    let said = ctl(&bed, &["bitmap", "disk"]).success().stdout;
    assert!(said.starts_with("\"b0\": not stored by who used it, can only be removed, "), "{said}");
    // A backup of changes that begins with it would have a hole.
    ctl(&bed, &["snapshot", "disk", "overlay", "--clear", "b0"])
        .one_line(&["disk: bitmap \"b0\" was not stored by who used it", "add it again, and make a full backup"]);
    assert!(!bed.path("overlay").exists() && !bed.path("disk.continued").exists());
    change(&bed, &["--remove", "b0", "--add", "b0"]);
    write(&serving, &["write 2M 64k"]);
    ctl(&bed, &["snapshot", "disk", "overlay", "--clear", "b0"]).success();
    assert_eq!(dirty(&change(&bed, &[])), [("b0", 0)]);
    serving.stop();
    for image in ["disk", "overlay"] {
        assert_eq!(stored(&bed, &format!("@{image}"))[0]["flags"], json!(["auto"]));
        bed.assert_sound(image);
    }
}

#[test]
fn a_server_starts_again_without_a_bitmap_that_was_added_before_the_kill() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "16M"]);
    let serving = bed.serve("nbd", &SERVE);
    change(&bed, &["--add", "b0"]);
    write(&serving, &["write 1M 100k"]);
    drop(serving);
    bed.wait_unlocked("disk");
    let serving = bed.serve("nbd", &[&SERVE[..], &["--bitmap", "b0"]].concat());
    let said = serving.said();
    let expected = "disk: clients cannot read bitmap \"b0\": it does not exist, and the image was not closed\n";
    assert!(said.contains(expected), "{said}");
    serving.stop();
    bed.refused(&[&SERVE[..], &["--bitmap", "b0", "--nbd", "unix:nbd2"]].concat())
        .one_line(&["it has no bitmap \"b0\""]);
    bed.refused(&["--snapshot", "s", "--bitmap", "b0", "--nbd", "unix:nbd2", "disk"])
        .one_line(&["--bitmap and --snapshot exclude each other"]);
}

/// Copies what a bitmap of a frozen image says was written into a copy of the disk as it was before.
fn back_up(bed: &Bed, image: &str, bitmap: &str, copy: &mut [u8]) -> u64 {
    let socket = format!("backup-{image}");
    let frozen = bed.serve(&socket, &["--read-only", "--bitmap", bitmap, image]);
    let context = format!("qemu:dirty-bitmap:{bitmap}");
    let map: Vec<Value> =
        serde_json::from_str(&tool("nbdinfo", &["--json", &format!("--map={context}"), &frozen.uri("")])).unwrap();
    let mut client: NbdClient = frozen.client();
    let mut copied = 0;
    for run in map.iter().filter(|run| run["type"] == 1) {
        let (mut at, length) = (run["offset"].as_u64().unwrap(), run["length"].as_u64().unwrap());
        let end = at + length;
        while at < end {
            let piece = (end - at).min(1 << 20);
            let place = usize::try_from(at).unwrap();
            let length = usize::try_from(piece).unwrap();
            copy[place..place + length].copy_from_slice(&client.read(at, length).unwrap());
            at += piece;
            copied += piece;
        }
    }
    drop(client);
    frozen.stop();
    copied
}

#[test]
fn incremental_backups_by_overlays_miss_nothing() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "16M"]);
    bed.qemu_img(&["bitmap", "--add", "-g", "64k", "@disk", "b0"]);
    let serving = bed.serve("nbd", &SERVE);
    let mut copy = vec![0; 16 << 20];
    let images = ["disk", "one", "two", "three"];
    let mut copied = Vec::new();
    for (round, pair) in images.windows(2).enumerate() {
        let (image, overlay) = (pair[0], pair[1]);
        write(&serving, &[&format!("write -P {} {round}M 1M", round + 1), "write -P 9 10M 64k", "write -z 11M 64k"]);
        ctl(&bed, &["snapshot", "disk", overlay, "--clear", "b0"]).success();
        // Already there while the frozen image is copied.
        write(&serving, &[&format!("write -P {} {}M 64k", round + 50, round + 5)]);
        copied.push(back_up(&bed, image, "b0", &mut copy));
        let whole = format!("whole-{image}");
        bed.qemu_img(&["convert", "-O", "raw", &format!("@{image}"), &format!("@{whole}")]);
        assert!(copy == fs::read(bed.path(&whole)).unwrap(), "{image}");
    }
    assert_eq!(copied, [(1 << 20) + (128 << 10), (1 << 20) + (192 << 10), (1 << 20) + (192 << 10)]);
    // With a commit after each backup the same image is frozen each time. Its bitmap is the overlay's then, and has
    // what was written since the snapshot: while the image was copied, and after the commit.
    for round in 0..2 {
        ctl(&bed, &["commit", "disk"]).success();
        assert_eq!(dirty(&change(&bed, &[])), [("b0", 64 << 10)]);
        write(&serving, &[&format!("write -P {} 12M 64k", round + 20), "write -z 13M 64k"]);
        ctl(&bed, &["snapshot", "disk", "three", "--clear", "b0"]).success();
        assert_eq!(dirty(&change(&bed, &[])), [("b0", 0)]);
        write(&serving, &[&format!("write -P {} {}M 64k", round + 60, round + 14)]);
        // It is not committed while it is copied.
        let reader = bed.serve("reader", &["--read-only", "two"]);
        ctl(&bed, &["commit", "disk"]).one_line(&["two", "has it open and allows no writing"]);
        reader.stop();
        assert_eq!(back_up(&bed, "two", "b0", &mut copy), 192 << 10);
        bed.qemu_img(&["convert", "-O", "raw", "@two", "@whole"]);
        assert!(copy == fs::read(bed.path("whole")).unwrap(), "{round}");
    }
    ctl(&bed, &["snapshot", "disk", "four", "--clear", "b1"]).one_line(&["it has no bitmap \"b1\""]);
    // Without --clear the overlay begins with all that the image has.
    ctl(&bed, &["snapshot", "disk", "four"]).success();
    assert_eq!(dirty(&change(&bed, &[])), [("b0", 64 << 10)]);
    serving.stop();
    for image in images.iter().chain(&["four"]) {
        bed.assert_sound(image);
        assert_eq!(stored(&bed, &format!("@{image}"))[0]["flags"], json!(["auto"]), "{image}");
    }
}
