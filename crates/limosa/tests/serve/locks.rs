//! Images that are in use elsewhere, and parts of images.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use limosa_testkit::{NbdClient, qemu_img_output, qemu_io};
use serde_json::json;

use crate::bed::{Bed, JOURNALS, ctl, nbdinfo};
use crate::needs_qemu;

#[test]
fn an_image_that_is_served_is_locked_as_qemu_locks_it() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "1M"]);
    let path = bed.path("disk");
    let info = |words: &[&str]| {
        let output = qemu_img_output([&["info"], words, &[path.to_str().unwrap()]].concat()).unwrap();
        output.status.success()
    };
    let serving = bed.serve("nbd", &["disk"]);
    assert!(!info(&[]) && info(&["-U"]));
    let said =
        bed.refused(&["disk", "--nbd", "unix:other"]).one_line(&["cannot lock disk: limosa (process ", "has it open"]);
    assert!(said.contains(&format!("limosa (process {})", serving.pid())), "{said}");
    let mut reader = NbdClient::open(&bed.path("nbd"), "", &[]).unwrap();
    assert_eq!(reader.write(0, 0, &[1; 512]).unwrap(), 0);
    assert_eq!(reader.simple(limosa_testkit::NbdCommand::Flush, 0, 0, 0).unwrap(), 0);
    // Without locks it can be read meanwhile.
    let shared = bed.serve("shared", &["--read-only", "--shared", "disk"]);
    assert_eq!(shared.client().read(0, 512).unwrap(), vec![1; 512]);
    shared.stop();
    drop(reader);
    serving.stop();
    // Readers share it, and keep writers out.
    let one = bed.serve("one", &["--read-only", "disk"]);
    let other = bed.serve("other", &["--read-only", "disk"]);
    assert!(info(&[]));
    assert!(qemu_io(["-c", "write 0 512", path.to_str().unwrap()]).is_err());
    bed.refused(&["disk", "--nbd", "unix:writer"]).one_line(&["has it open and allows no writing"]);
    assert_eq!(one.client().write(0, 0, &[2; 512]).unwrap(), 1);
    assert!(nbdinfo(&[&other.uri("")])["exports"][0]["is_read_only"] == true);
    one.stop();
    other.stop();
    let begun = Instant::now();
    bed.refused(&["disk", "disk", "--name", "a", "--name", "b", "--nbd", "unix:x"])
        .one_line(&["disk: this server serves it", "this process has it open"]);
    assert!(begun.elapsed() < Duration::from_secs(4));
    bed.refused(&["--shared", "disk", "--nbd", "unix:x"]).misused(&["--read-only"]);
}

#[test]
fn an_image_whose_last_writes_are_in_overlays_is_not_served() {
    needs_qemu!();
    let bed = Bed::new();
    for name in ["disk", "other"] {
        bed.qemu_img(&["create", "-q", "-f", "qcow2", &format!("@{name}"), "1M"]);
    }
    let ledger = json!({ "version": 1, "overlays": "00000000-0000-0000-0000-000000000007",
        "image": { "state": "merging", "epoch": 3 } });
    fs::write(bed.path("disk.overlays"), ledger.to_string()).unwrap();
    let why = ["disk: ", "are in overlays beside it", "disk.overlays", "`limosa protect failover`"];
    for words in [&["disk"][..], &["--read-only", "disk"]] {
        bed.refused(&[words, &["--nbd", "unix:nbd"]].concat()).one_line(&why);
    }
    // Nor by a server that is confined already.
    let serving = bed.serve("nbd", &["other", "--control", "control", "--allow-dir", "."]);
    ctl(&bed, &["add", "disk", "--name", "disk"]).one_line(&why);
    serving.stop();
}

#[test]
fn parts_snapshots_and_chains_are_served() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@base", "4M"]);
    let io = |name: &str, command: &str| qemu_io(["-c", command, bed.path(name).to_str().unwrap()]).unwrap();
    io("base", "write -P 1 0 4M");
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "@disk"]);
    io("disk", "write -P 2 1M 1M");
    bed.qemu_img(&["snapshot", "-c", "before", "@disk"]);
    io("disk", "write -P 3 1M 512k");

    let disk = bed.serve("nbd", &["disk"]);
    let read = |client: &mut NbdClient, at| client.read(at, 1).unwrap()[0];
    let mut client = disk.client();
    assert_eq!([0, 1 << 20, 3 << 19].map(|at| read(&mut client, at)), [1, 3, 2]);
    drop(client);
    disk.stop();

    let part = bed.serve("nbd", &["disk", "--offset", "1M", "--size", "1M"]);
    let mut client = part.client();
    assert_eq!((client.size, read(&mut client, 0), read(&mut client, 1 << 19)), (1 << 20, 3, 2));
    assert_eq!(client.write(0, (1 << 20) - 1, &[9]).unwrap(), 0);
    assert_eq!(client.write(0, (1 << 20) - 1, &[9; 2]).unwrap(), 28);
    drop(client);
    part.stop();

    let snapshot = bed.serve("nbd", &["disk", "--snapshot", "before"]);
    let mut client = snapshot.client();
    assert_eq!(([0, 1 << 20, (2 << 20) - 1].map(|at| read(&mut client, at))), [1, 2, 2]);
    assert_eq!(client.write(0, 0, &[1]).unwrap(), 1);
    drop(client);
    snapshot.stop();
    bed.qemu_img(&["check", "-q", "@disk"]);

    bed.refused(&["disk", "--snapshot", "after", "--nbd", "unix:x"]).one_line(&["after"]);
    bed.refused(&["disk", "--offset", "5M", "--nbd", "unix:x"])
        .one_line(&["disk has 4194304 bytes: offset 5242880 is past its end"]);
    assert_eq!(fs::read_dir(bed.path(JOURNALS)).unwrap().count(), 0, "a refused image leaves no journal");
    bed.refused(&["--untrusted", "disk", "--nbd", "unix:x"]).one_line(&["--untrusted", "backing.file.filename=FILE"]);
    let named = "driver=qcow2,file.filename=disk,backing.driver=qcow2,backing.file.filename=base";
    bed.serve("named", &["--untrusted", "--image-opts", named]).stop();
}

#[test]
fn several_images_have_names() {
    needs_qemu!();
    let bed = Bed::new();
    fs::write(bed.path("a.raw"), vec![1; 1 << 20]).unwrap();
    fs::write(bed.path("b.raw"), vec![2; 2 << 20]).unwrap();
    // A qcow2 image by its beginning, which is what a mistaken -f looks like.
    fs::write(bed.path("a.raw"), [&b"QFI\xfb\0\0\0\x03"[..], &vec![1; (1 << 20) - 8]].concat()).unwrap();
    let words = ["-f", "raw", "a.raw", "b.raw", "--name", "first", "--socket-mode", "666"];
    let serving = bed.serve("nbd", &words);
    let said = serving.said();
    assert!(said.contains("limosa: a.raw: begins like a qcow2 image, but is served as raw\n"), "{said}");
    assert!(said.contains("limosa: export \"first\" is a.raw (1 MiB)\n") && !said.contains("b.raw: begins"), "{said}");
    assert_eq!(fs::metadata(bed.path("nbd")).unwrap().permissions().mode() & 0o777, 0o666);
    let list = nbdinfo(&["--list", &serving.uri("")]);
    let names: Vec<_> = list["exports"].as_array().unwrap().iter().map(|export| &export["export-name"]).collect();
    assert_eq!(names, ["first", "b.raw"]);
    let mut second = NbdClient::open(&bed.path("nbd"), "b.raw", &[]).unwrap();
    assert_eq!((second.size, second.read(0, 1).unwrap()), (2 << 20, vec![2]));
    assert!(NbdClient::open(&bed.path("nbd"), "", &[]).is_err());
    drop(second);
    serving.stop();
    let said = bed.refused(&["-f", "raw", "--read-only", "b.raw", "./b.raw", "--nbd", "unix:x"]);
    said.one_line(&["two exports have the name \"b.raw\"", "--name"]);
}

#[test]
fn mistakes_are_refused_with_what_helps() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "1M"]);
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-u", "-b", "gone", "-F", "qcow2", "@orphan", "1M"]);
    fs::write(bed.path("l.luks"), [&b"LUKS\xba\xbe\0\x01"[..], &[0; 4088]].concat()).unwrap();
    let refused = |words: &[&str]| bed.refused(&[words, &["--nbd", "unix:x"]].concat());
    refused(&["orphan"]).one_line(&["orphan: it refers to gone", "No such file"]);
    refused(&["l.luks"]).one_line(&["l.luks", "--object secret"]);
    refused(&["disk", "--journal", "no/such/folder"]).one_line(&["--journal no/such/folder", "no folder no/such"]);
    refused(&["disk", "--journal", "disk"]).one_line(&["--journal disk: it is no folder"]);
    bed.refused(&[]).misused(&["limosa serve disk.qcow2 --nbd unix:"]);
    let said = bed.refused(&["disk", "--nbd", "file:x"]).misused(&["--nbd", "unix:PATH"]);
    assert!(!format!("{said:?}").contains("exec:"), "{said:?}");
    let serving = bed.serve("nbd", &["disk", "--name", "a", "--control", "control"]);
    ctl(&bed, &["resize", "", "2M"]).one_line(&["no export has the name \"\"", "\"a\""]);
    ctl(&bed, &["add", "orphan"]).one_line(&["started without --allow-dir"]);
    serving.stop();
    let serving = bed.serve("nbd", &["disk", "--journal", "new"]);
    assert!(serving.said().contains("--journal new: the folder did not exist, and was made\n"));
    serving.stop();
    assert_eq!(fs::read_dir(bed.path("new")).unwrap().count(), 0);
}
