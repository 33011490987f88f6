//! `limosa serve ctl commit`: an overlay is merged into the image below it while stock clients use the disk.

use std::fs;

use limosa_testkit::{Qmp, kill9, qemu_io};
use serde_json::{Value, json};

use crate::bed::{Bed, Serving, asked, ctl, io};
use crate::needs_qemu;

fn serve(bed: &Bed, image: &str) -> Serving {
    bed.serve("nbd", &["--control", "control", "--allow-dir", ".", image])
}

#[test]
fn an_overlay_is_merged_into_the_image_below_it_and_removed() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
    let serving = serve(&bed, "disk");
    let uri = serving.uri("");
    io(&uri, "raw", &["write -P 1 0 2M"]);
    asked(&bed, &["snapshot", "", "one"]);
    io(&uri, "raw", &["write -P 2 1M 2M", "write -z 0 64k"]);
    asked(&bed, &["resize", "", "96M"]);
    asked(&bed, &["snapshot", "", "two"]);
    io(&uri, "raw", &["write -P 3 2M 2M", "discard 1M 64k"]);
    // Not flushed by a client: the server does.
    let answer = asked(&bed, &["commit", ""]);
    assert_eq!((&answer["image"], &answer["committed"]), (&json!(bed.path("one")), &json!(bed.path("two"))));
    assert!(answer["bytes"].as_u64().unwrap() >= 2 << 20, "{answer}");
    assert!(!bed.path("two").exists());
    let contents = ["read -P 0 0 64k", "read -P 1 64k 960k", "read -P 2 1088k 960k", "read -P 3 2M 2M"];
    io(&uri, "raw", &contents);
    let said = ctl(&bed, &["commit", ""]).success().stderr;
    assert!(said.contains(": disk (") && said.contains("one"), "{said}");
    assert!(!bed.path("one").exists());
    io(&uri, "raw", &contents);
    io(&uri, "raw", &["write -P 4 64M 1M", "flush"]);
    let refused = ctl(&bed, &["commit", ""]).stderr;
    assert!(refused.contains("no backing file"), "{refused}");
    serving.stop();
    io(bed.path("disk").to_str().unwrap(), "qcow2", &[&contents[..], &["read -P 4 64M 1M"]].concat());
    bed.qemu_img(&["check", "-q", "@disk"]);
    let info: Value = serde_json::from_str(&bed.qemu_img(&["info", "--output=json", "@disk"])).unwrap();
    assert_eq!(info["virtual-size"], 96 << 20);
}

#[test]
fn an_overlay_of_a_server_before_is_merged_into_a_raw_image() {
    needs_qemu!();
    let bed = Bed::new();
    fs::write(bed.path("base"), vec![7; 4 << 20]).unwrap();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "@top"]);
    let serving = serve(&bed, "top");
    io(&serving.uri(""), "raw", &["write -P 8 1M 64k"]);
    asked(&bed, &["commit", ""]);
    io(&serving.uri(""), "raw", &["read -P 7 0 1M", "read -P 8 1M 64k", "write -P 9 2M 4k", "flush"]);
    serving.stop();
    assert!(!bed.path("top").exists());
    let base = fs::read(bed.path("base")).unwrap();
    assert_eq!([base[(1 << 20) - 1], base[1 << 20], base[2 << 20], base[3 << 20]], [7, 8, 9, 7]);
}

#[test]
fn an_overlay_that_cannot_be_merged_is_served_as_before() {
    needs_qemu!();
    let bed = Bed::new();
    fs::write(bed.path("base"), vec![7; 1 << 20]).unwrap();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "@top"]);
    // Somebody else writes to the base: it is locked.
    let holder = bed.serve("other", &["--read-only", "base"]);
    let serving = serve(&bed, "top");
    let uri = serving.uri("");
    io(&uri, "raw", &["write -P 8 0 64k"]);
    let refused = ctl(&bed, &["commit", ""]).stderr;
    assert!(refused.contains("base"), "{refused}");
    io(&uri, "raw", &["read -P 8 0 64k", "read -P 7 64k 64k", "write -P 9 64k 64k", "flush", "read -P 9 64k 64k"]);
    holder.stop();
    // A raw image has no place for bitmaps.
    ctl(&bed, &["bitmap", "", "--add", "b"]).success();
    let refused = ctl(&bed, &["commit", ""]).stderr;
    assert!(refused.contains("dirty bitmaps"), "{refused}");
    ctl(&bed, &["bitmap", "", "--remove", "b"]).success();
    asked(&bed, &["commit", ""]);
    io(&uri, "raw", &["read -P 8 0 64k", "read -P 9 64k 64k"]);
    serving.stop();
}

#[test]
fn dirty_bitmaps_come_back_from_the_overlay() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
    let serving = serve(&bed, "disk");
    let uri = serving.uri("");
    let bitmap = |words: &[&str]| ctl(&bed, &[&["bitmap", ""], words].concat()).success();
    bitmap(&["--add", "backup", "--add", "off", "--granularity", "64K"]);
    bitmap(&["--disable", "off"]);
    io(&uri, "raw", &["write 0 64k"]);
    asked(&bed, &["snapshot", "", "overlay", "--clear", "backup"]);
    bitmap(&["--enable", "off", "--add", "new", "--granularity", "64K"]);
    io(&uri, "raw", &["write 1M 128k"]);
    bitmap(&["--disable", "new"]);
    asked(&bed, &["commit", ""]);
    io(&uri, "raw", &["write 2M 64k"]);
    let found = asked(&bed, &["bitmap", ""]);
    let of = |name: &str| {
        let list = found["bitmaps"].as_array().unwrap();
        let bitmap = list.iter().find(|bitmap| bitmap["name"] == name).unwrap_or_else(|| panic!("{name}: {found}"));
        (bitmap["dirty-bytes"].as_u64().unwrap() >> 10, bitmap["enabled"].as_bool().unwrap())
    };
    // What came before the snapshot is not in the one that began empty then.
    assert_eq!([of("backup"), of("off"), of("new")], [(192, true), (192, true), (128, false)]);
    serving.stop();
    bed.qemu_img(&["check", "-q", "@disk"]);
    let info: Value = serde_json::from_str(&bed.qemu_img(&["info", "--output=json", "@disk"])).unwrap();
    assert_eq!(info["format-specific"]["data"]["bitmaps"].as_array().unwrap().len(), 3, "{info}");
}

#[test]
fn an_overlay_that_cannot_be_removed_stays_and_is_served() {
    needs_qemu!();
    let bed = Bed::new();
    fs::create_dir(bed.path("elsewhere")).unwrap();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "4M"]);
    let disk = bed.path("disk");
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", disk.to_str().unwrap(), "-F", "qcow2", "@elsewhere/top"]);
    // It is written where the server may create and remove nothing.
    let serving = serve_in(&bed, "elsewhere/top", "images");
    let uri = serving.uri("");
    io(&uri, "raw", &["write -P 1 0 64k", "flush"]);
    let refused = ctl(&bed, &["commit", ""]).stderr;
    assert!(refused.contains("--allow-dir"), "{refused}");
    io(&uri, "raw", &["read -P 1 0 64k", "write -P 2 0 4k", "flush", "read -P 2 0 4k"]);
    assert!(bed.path("elsewhere/top").exists());
    serving.stop();
    io(bed.path("elsewhere/top").to_str().unwrap(), "qcow2", &["read -P 2 0 4k", "read -P 1 4k 60k"]);
    // The name is a link.
    std::os::unix::fs::symlink("elsewhere/top", bed.path("link")).unwrap();
    let serving = serve(&bed, "link");
    let refused = ctl(&bed, &["commit", ""]).stderr;
    assert!(refused.contains("no link"), "{refused}");
    io(&serving.uri(""), "raw", &["read -P 2 0 4k"]);
    let refused = ctl(&bed, &["commit", "", "other"]).stderr;
    assert!(refused.contains("and not") && refused.contains("other"), "{refused}");
    serving.stop();
}

/// A server that may create files in a folder of this name only.
fn serve_in(bed: &Bed, image: &str, folder: &str) -> Serving {
    fs::create_dir(bed.path(folder)).unwrap();
    bed.serve("nbd", &["--control", "control", "--allow-dir", folder, image])
}

#[test]
fn a_guest_cannot_have_its_disk_taken_for_another_format() {
    needs_qemu!();
    let bed = Bed::new();
    fs::write(bed.path("disk"), vec![0; 1 << 20]).unwrap();
    // Its format is probed.
    let serving = serve(&bed, "disk");
    let uri = serving.uri("");
    asked(&bed, &["snapshot", "", "overlay"]);
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "/etc/passwd", "-F", "raw", "-u", "@evil", "1M"]);
    io(&uri, "raw", &[&format!("write -s {} 0 64k", bed.path("evil").display()), "flush"]);
    let refused = ctl(&bed, &["commit", ""]).stderr;
    assert!(refused.contains("look like another format"), "{refused}");
    assert!(fs::read(bed.path("disk")).unwrap().iter().all(|byte| *byte == 0));
    io(&uri, "raw", &["write -P 7 0 64k", "flush"]);
    asked(&bed, &["commit", ""]);
    io(&uri, "raw", &["read -P 7 0 64k"]);
    serving.stop();
}

#[test]
fn a_server_that_is_started_as_before_continues_in_the_overlay() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "4M"]);
    let serving = serve(&bed, "disk");
    io(&serving.uri(""), "raw", &["write -P 1 0 64k"]);
    asked(&bed, &["snapshot", "", "one"]);
    asked(&bed, &["snapshot", "", "two"]);
    io(&serving.uri(""), "raw", &["write -P 2 0 4k", "flush"]);
    kill9(serving.pid()).unwrap();
    drop(serving);
    fs::remove_file(bed.path("control")).unwrap();
    let frozen = fs::read(bed.path("disk")).unwrap();
    let serving = serve(&bed, "disk");
    assert!(serving.said().contains("its disk continues in"), "{}", serving.said());
    io(&serving.uri(""), "raw", &["read -P 2 0 4k", "read -P 1 4k 60k", "write -P 3 4k 4k", "flush"]);
    assert!(fs::read(bed.path("disk")).unwrap() == frozen);
    // To be read it is what it is.
    let reading = bed.serve("reading", &["--read-only", "disk"]);
    let said = qemu_io(["-r", "-f", "raw", "-c", "read -P 1 0 64k", &reading.uri("")]).unwrap();
    assert!(!said.contains("failed"), "{said}");
    reading.stop();
    asked(&bed, &["commit", ""]);
    asked(&bed, &["commit", ""]);
    serving.stop();
    let serving = serve(&bed, "disk");
    assert!(!serving.said().contains("continues"), "{}", serving.said());
    io(&serving.uri(""), "raw", &["read -P 2 0 4k", "read -P 3 4k 4k", "read -P 1 8k 56k"]);
    serving.stop();
    // A file that names something else leads nowhere.
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@other", "4M"]);
    fs::write(bed.path("disk.continued"), bed.path("other").to_str().unwrap()).unwrap();
    let refused = bed.refused(&["disk", "--nbd", "unix:x"]).stderr;
    assert!(refused.contains("disk.continued"), "{refused}");
    fs::write(bed.path("disk.continued"), bed.path("gone").to_str().unwrap()).unwrap();
    serve(&bed, "disk").stop();
}

#[test]
fn requests_for_a_snapshot_that_was_undone_are_refused() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "4M"]);
    let serving = serve(&bed, "disk");
    let mut qmp = Qmp::connect(&bed.path("control"), crate::stage::SOON).unwrap();
    let (disk, overlay) = (bed.path("disk"), bed.path("overlay"));
    let prepare = json!({ "name": "", "overlay": overlay, "image": disk });
    let put = json!({ "name": "", "overlay": overlay, "prepared": true });
    let undo = json!({ "name": "", "overlay": overlay });
    let other = json!({ "name": "", "overlay": bed.path("x"), "image": bed.path("other") });
    assert!(qmp.execute("export-prepare-snapshot", other).is_err() && !bed.path("x").exists());
    qmp.execute("export-prepare-snapshot", prepare.clone()).unwrap();
    assert!(overlay.exists());
    qmp.execute("export-undo-snapshot", undo.clone()).unwrap();
    assert!(!overlay.exists());
    assert!(qmp.execute("export-snapshot", put).is_err());
    assert!(qmp.execute("export-prepare-snapshot", prepare).is_err());
    assert!(!overlay.exists());
    qmp.execute("export-undo-snapshot", undo).unwrap();
    // One that comes too late: the disk continues in another one, and still does after a kill.
    let late = bed.path("late");
    qmp.execute("export-prepare-snapshot", json!({ "name": "", "overlay": late, "image": disk })).unwrap();
    asked(&bed, &["snapshot", "", "sooner"]);
    assert!(qmp.execute("export-snapshot", json!({ "name": "", "overlay": late, "prepared": true })).is_err());
    assert!(!late.exists() && bed.path("disk.continued").exists());
    asked(&bed, &["commit", ""]);
    // One that was put and is not on top any more.
    let second = bed.path("second");
    let prepare = json!({ "name": "", "overlay": second, "image": disk });
    let put = json!({ "name": "", "overlay": second, "prepared": true });
    let undo = json!({ "name": "", "overlay": second });
    qmp.execute("export-prepare-snapshot", prepare).unwrap();
    qmp.execute("export-snapshot", put).unwrap();
    asked(&bed, &["snapshot", "", "third"]);
    let refused = qmp.execute("export-undo-snapshot", undo.clone()).unwrap_err().to_string();
    assert!(refused.contains("another overlay"), "{refused}");
    asked(&bed, &["commit", ""]);
    qmp.execute("export-undo-snapshot", undo).unwrap();
    assert!(!second.exists());
    io(&serving.uri(""), "raw", &["write -P 1 0 64k", "flush"]);
    serving.stop();
    io(disk.to_str().unwrap(), "qcow2", &["read -P 1 0 64k"]);
}

/// The server is killed at any moment of a commit, and started again as it was the first time.
#[test]
fn nothing_is_lost_whenever_the_server_is_killed_in_a_commit() {
    needs_qemu!();
    let rounds = std::env::var("LIMOSA_COMMIT_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(6_u64);
    let (mut committed, mut kept) = (0, 0);
    for round in 0..rounds {
        let bed = Bed::new();
        bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
        let serving = serve(&bed, "disk");
        io(&serving.uri(""), "raw", &["write -P 1 0 12M"]);
        asked(&bed, &["snapshot", "", "overlay"]);
        io(&serving.uri(""), "raw", &["write -P 2 4M 12M", "write -z 1M 1M", "flush"]);
        std::thread::scope(|scope| {
            scope.spawn(|| ctl(&bed, &["commit", ""]));
            std::thread::sleep(std::time::Duration::from_micros(round % 40 * 1_500));
            kill9(serving.pid()).unwrap();
        });
        drop(serving);
        *(if bed.path("overlay").exists() { &mut kept } else { &mut committed }) += 1;
        fs::remove_file(bed.path("control")).unwrap();
        let serving = serve(&bed, "disk");
        let contents =
            ["read -P 1 0 1M", "read -P 0 1M 1M", "read -P 1 2M 2M", "read -P 2 4M 12M", "read -P 0 16M 48M"];
        io(&serving.uri(""), "raw", &contents);
        io(&serving.uri(""), "raw", &["write -P 3 20M 1M", "flush"]);
        if bed.path("overlay").exists() {
            asked(&bed, &["commit", ""]);
        }
        io(&serving.uri(""), "raw", &[&contents[..4], &["read -P 3 20M 1M"]].concat());
        serving.stop();
        bed.assert_sound("disk");
    }
    println!("{kept} overlays kept, {committed} committed");
}
