//! `limosa serve ctl resize` and `snapshot`: disks that change while stock clients use them.

use std::fs;

use limosa_testkit::{kill9, qemu_io};
use serde_json::{Value, json};

use crate::bed::{Bed, Serving, asked, ctl, io, nbdinfo};
use crate::needs_qemu;

/// A bed with a server of `disk` and a control socket.
fn served() -> (Bed, Serving) {
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
    let serving = bed.serve("nbd", &["--control", "control", "--allow-dir", ".", "disk"]);
    (bed, serving)
}

#[test]
fn a_disk_becomes_longer_for_clients_that_connect_afterwards() {
    needs_qemu!();
    let (bed, serving) = served();
    let uri = serving.uri("");
    assert_eq!(asked(&bed, &["resize", "", "96M"])["size"], 96 << 20);
    assert!(ctl(&bed, &["resize", "", "+32M"]).success().stderr.contains("128 MiB"));
    assert_eq!(nbdinfo(&[&uri])["exports"][0]["export-size"], 128 << 20);
    io(&uri, "raw", &["write -P 5 100M 1M", "flush", "read -P 5 100M 1M", "read -P 0 64M 36M"]);
    let refused = ctl(&bed, &["resize", "", "64M"]).stderr;
    assert!(refused.contains("does not become shorter"), "{refused}");
    assert!(ctl(&bed, &["resize", "", "-1M"]).stderr.contains("does not become shorter"));
    assert!(ctl(&bed, &["resize", "none", "1G"]).stderr.contains("no export has the name"));
    serving.stop();
    bed.qemu_img(&["check", "-q", "@disk"]);
    let info = bed.qemu_img(&["info", "--output=json", "@disk"]);
    assert_eq!(serde_json::from_str::<Value>(&info).unwrap()["virtual-size"], 128 << 20);
}

#[test]
fn a_served_disk_gets_an_overlay_and_the_image_below_stays_as_it_was() {
    needs_qemu!();
    let (bed, serving) = served();
    let (uri, disk) = (serving.uri(""), bed.path("disk"));
    io(&uri, "raw", &["write -P 1 0 1M"]);
    let answer = asked(&bed, &["snapshot", "", "two"]);
    assert_eq!((&answer["image"], &answer["frozen"]), (&json!(bed.path("two")), &json!("disk")));
    // Others can read it, and it has what was acknowledged, without a flush of a client.
    bed.qemu_img(&["check", "-q", "@disk"]);
    let frozen = fs::read(&disk).unwrap();
    let said = qemu_io(["-r", "-f", "qcow2", "-c", "read -P 1 0 1M", disk.to_str().unwrap()]).unwrap();
    assert!(!said.contains("failed"), "{said}");
    io(&uri, "raw", &["read -P 1 0 1M", "write -P 2 512k 1M", "flush"]);
    let said = ctl(&bed, &["snapshot", "", "three"]).success().stderr;
    assert!(said.contains("three") && said.contains("is not written any more"), "{said}");
    io(&uri, "raw", &["write -P 3 1M 1M", "read -P 1 0 512k", "read -P 2 512k 512k", "read -P 3 1M 1M"]);
    assert!(fs::read(&disk).unwrap() == frozen);
    serving.stop();
    io(bed.path("two").to_str().unwrap(), "qcow2", &["read -P 1 0 512k", "read -P 2 512k 1M"]);
    io(bed.path("three").to_str().unwrap(), "qcow2", &["read -P 1 0 512k", "read -P 2 512k 512k", "read -P 3 1M 1M"]);
    for image in ["@disk", "@two", "@three"] {
        bed.qemu_img(&["check", "-q", image]);
    }
}

#[test]
fn what_cannot_get_an_overlay_is_served_as_before() {
    needs_qemu!();
    let (bed, serving) = served();
    let uri = serving.uri("");
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@other", "1M"]);
    fs::create_dir(bed.path("elsewhere")).unwrap();
    asked(&bed, &["add", "other", "--read-only"]);
    let before = fs::read(bed.path("other")).unwrap();
    for (words, why) in [
        (["snapshot", "", "other"], "File exists"),
        (["snapshot", "", "none/overlay"], "No such file"),
        (["snapshot", "", "disk/overlay"], "Not a directory"),
        (["snapshot", "", "/overlay"], "--allow-dir"),
        (["snapshot", "other", "overlay"], "read-only"),
        (["snapshot", "none", "overlay"], "no export has the name"),
    ] {
        let refused = ctl(&bed, &words).stderr;
        assert!(refused.contains(why), "{words:?}: {refused}");
    }
    assert!(fs::read(bed.path("other")).unwrap() == before);
    assert!(!bed.path("overlay").exists() && !bed.path("other.unfinished").exists());
    // As long as no overlay that was not finished can be: somebody's.
    fs::File::create(bed.path("new.unfinished")).unwrap().set_len(41 << 20).unwrap();
    let refused = ctl(&bed, &["snapshot", "", "new"]).stderr;
    assert!(refused.contains("too long") && bed.path("new.unfinished").exists(), "{refused}");
    fs::File::create(bed.path("new.unfinished")).unwrap().set_len(70_000).unwrap();
    asked(&bed, &["snapshot", "", "new"]);
    assert!(!bed.path("new.unfinished").exists());
    io(&uri, "raw", &["write -P 1 0 1M", "flush", "read -P 1 0 1M"]);
    serving.stop();
}

/// The server is killed after some overlays, in the middle of writes.
#[test]
fn an_overlay_that_exists_is_whole_whenever_the_server_is_killed() {
    needs_qemu!();
    let rounds = std::env::var("LIMOSA_OVERLAY_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(4_u64);
    for round in 0..rounds {
        let (bed, serving) = served();
        io(&serving.uri(""), "raw", &["write -P 1 0 1M", "flush"]);
        std::thread::scope(|scope| {
            scope.spawn(|| ctl(&bed, &["snapshot", "", "overlay"]));
            std::thread::sleep(std::time::Duration::from_micros(round % 40 * 250));
            kill9(serving.pid()).unwrap();
        });
        drop(serving);
        let image = if bed.path("overlay").exists() { "overlay" } else { "disk" };
        fs::remove_file(bed.path("control")).unwrap();
        let serving = bed.serve("nbd", &[image]);
        io(&serving.uri(""), "raw", &["read -P 1 0 1M", "write -P 2 0 1M", "flush"]);
        serving.stop();
        bed.assert_sound(image);
    }
}
