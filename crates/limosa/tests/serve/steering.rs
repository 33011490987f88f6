//! `limosa serve ctl`: exports are listed, added, removed and quiesced while stock clients use them.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use limosa_testkit::{NbdCommand, qemu_img_output, qemu_io, wait_for};
use serde_json::{Value, json};

use crate::bed::{Bed, Serving, asked, ctl, nbdinfo, tool};
use crate::needs_qemu;

/// A bed with a server of `disk` and a control socket.
fn served(words: &[&str]) -> (Bed, Serving) {
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@other", "32M"]);
    let serving =
        bed.serve("nbd", &[words, &["--control", "control", "--allow-dir", ".", "--name", "disk", "disk"]].concat());
    (bed, serving)
}

/// The exports that `nbdinfo` finds, in order.
fn names(serving: &Serving) -> Vec<String> {
    let list = nbdinfo(&["--list", &serving.uri("")]);
    list["exports"].as_array().unwrap().iter().map(|e| e["export-name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_server_without_images_gets_some_and_loses_them_again() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@a b.qcow2", "64M"]);
    bed.qemu_img(&["create", "-q", "-f", "raw", "@raw", "1M"]);
    let serving = bed.serve("nbd", &["--control", "control", "--allow-dir", "."]);
    let mode = fs::metadata(bed.path("control")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(asked(&bed, &["list"])["exports"], json!([]));
    let added = asked(&bed, &["add", "a b.qcow2"]);
    assert_eq!(
        (&added["name"], &added["format"], &added["size"], &added["read-only"]),
        (&json!("a b.qcow2"), &json!("qcow2"), &json!(64 << 20), &json!(false))
    );
    let words = ["add", "raw", "-f", "raw", "-r", "--name", "part", "--offset", "64k", "--size", "128k"];
    assert_eq!(asked(&bed, &words)["size"], 128 << 10);
    assert_eq!(names(&serving), ["a b.qcow2", "part"]);
    let info = nbdinfo(&[&serving.uri("part")]);
    assert_eq!(
        (&info["exports"][0]["export-size"], &info["exports"][0]["is_read_only"]),
        (&json!(131_072), &json!(true))
    );
    let said = ctl(&bed, &["list"]).success().stdout;
    assert!(said.contains("\"part\"") && said.contains("128 KiB, raw, read-only"), "{said}");
    let begun = Instant::now();
    let said = ctl(&bed, &["add", "a b.qcow2", "--name", "again"])
        .one_line(&["this server serves it", "this process has it open"]);
    assert!(!said.contains("another process") && begun.elapsed() < Duration::from_secs(4), "{said}");
    assert!(ctl(&bed, &["remove", "part"]).success().stderr.contains("removed"));
    assert_eq!(names(&serving), ["a b.qcow2"]);
    ctl(&bed, &["quit"]).success();
    let ended = serving.wait();
    assert!(ended.stderr.contains("connections served"), "{}", ended.stderr);
    assert!(!bed.path("control").exists());
    bed.qemu_img(&["check", "-q", "@a b.qcow2"]);
}

#[test]
fn exports_come_and_go_while_others_are_copied() {
    needs_qemu!();
    let (bed, serving) = served(&[]);
    let contents: Vec<u8> = (0..16_u32 << 20).flat_map(|number| (number / 1024).to_le_bytes()).collect();
    fs::write(bed.path("in.raw"), &contents).unwrap();
    let [input, output] = ["in.raw", "out.raw"].map(|name| bed.path(name).to_str().unwrap().to_owned());
    let uri = serving.uri("disk");
    let copying = thread::spawn({
        let (input, uri) = (input, uri.clone());
        move || tool("nbdcopy", &["--connections=4", "--flush", &input, &uri])
    });
    let mut rounds = 0;
    while rounds < 5 || !copying.is_finished() {
        asked(&bed, &["add", "other"]);
        let words = ["-f", "raw", "-c", "write -P 5 0 1M", "-c", "flush", "-c", "read -P 5 0 1M"];
        let said = qemu_io(words.into_iter().chain([serving.uri("other").as_str()])).unwrap();
        assert!(!said.contains("failed"), "{said}");
        asked(&bed, &["remove", "other"]);
        bed.qemu_img(&["check", "-q", "@other"]);
        rounds += 1;
    }
    copying.join().unwrap();
    tool("nbdcopy", &["--connections=4", &uri, &output]);
    assert!(fs::read(&output).unwrap() == contents);
    let list = asked(&bed, &["list"]);
    let counters = &list["exports"][0]["counters"];
    let times = &list["exports"][0]["latency-ms"]["read"];
    let times = ["median", "p90", "p99", "p99.9", "longest"].map(|name| times[name].as_f64().unwrap());
    assert!(times[0] > 0.0 && times.is_sorted(), "{times:?}");
    assert!(ctl(&bed, &["list"]).success().stdout.contains("  read: median "));
    assert_eq!((&list["exports"][0]["clients"], &counters["failures"]), (&json!(0), &json!(0)));
    assert_eq!(counters["written-bytes"].as_u64().unwrap() + counters["zeroed-bytes"].as_u64().unwrap(), 64 << 20);
    serving.stop();
    bed.qemu_img(&["check", "-q", "@disk"]);
}

#[test]
fn an_export_is_removed_under_its_clients_and_its_image_is_whole() {
    needs_qemu!();
    for force in [false, true] {
        let (bed, serving) = served(&[]);
        let uri = serving.uri("disk");
        // It writes until it is cut off.
        let script = format!(
            "
import nbd
h = nbd.NBD()
h.connect_uri({uri:?})
print('connected', flush=True)
block = b'x' * 65536
try:
    for at in range(0, 1 << 40, 65536):
        h.pwrite(block, at % (64 << 20))
    assert False
except nbd.Error as error:
    assert error.errno in ('ESHUTDOWN', 'ENOTCONN', 'EPIPE', 'ECONNRESET', None), error
"
        );
        let writing = thread::spawn(move || tool("/usr/bin/python3", &["-c", &script]));
        wait_for("writes", || {
            let list = asked(&bed, &["list"]);
            (list["exports"][0]["counters"]["writes"].as_u64() > Some(100)).then_some(())
        });
        let words: &[&str] = if force { &["remove", "disk", "--force"] } else { &["remove", "disk"] };
        asked(&bed, words);
        writing.join().unwrap();
        assert!(names(&serving).is_empty());
        // It is closed: others may open it, and it is complete.
        bed.qemu_img(&["check", "-q", "@disk"]);
        asked(&bed, &["add", "disk"]);
        assert_eq!(nbdinfo(&[&serving.uri("disk")])["exports"][0]["export-size"], 64 << 20);
        serving.stop();
    }
}

#[test]
fn a_quiesced_image_is_complete_and_its_clients_wait() {
    needs_qemu!();
    let (bed, serving) = served(&[]);
    let contents: Vec<u8> = (0..16_u32 << 20).flat_map(|number| (number / 1024).to_le_bytes()).collect();
    fs::write(bed.path("in.raw"), &contents).unwrap();
    let (input, uri) = (bed.path("in.raw").to_str().unwrap().to_owned(), serving.uri("disk"));
    let copying = thread::spawn(move || tool("nbdcopy", &["--connections=4", &input, &uri]));
    let (mut rounds, mut waits) = (0, false);
    while rounds < 3 || !copying.is_finished() {
        ctl(&bed, &["quiesce"]).success();
        assert_eq!(asked(&bed, &["list"])["exports"][0]["quiesced"], true);
        let before = fs::read(bed.path("disk")).unwrap();
        fs::write(bed.path("copy"), &before).unwrap();
        // Clusters that were allocated ahead are leaks, which are no errors.
        let copy = bed.path("copy");
        let check = qemu_img_output(["check", "-q", "-f", "qcow2", copy.to_str().unwrap()]).unwrap();
        assert!([Some(0), Some(3)].contains(&check.status.code()), "{check:?}");
        assert!(fs::read(bed.path("disk")).unwrap() == before, "nothing is written");
        waits |= !copying.is_finished();
        ctl(&bed, &["resume", "disk"]).success();
        rounds += 1;
    }
    copying.join().unwrap();
    assert!(waits, "the copy was complete before the first round");
    assert_eq!(asked(&bed, &["flush"]), json!({}));
    serving.stop();
    bed.qemu_img(&["check", "-q", "@disk"]);
    bed.qemu_img(&["compare", "-q", "-F", "raw", "-f", "qcow2", "@disk", "@in.raw"]);
}

#[test]
fn a_server_whose_exports_are_quiesced_ends_by_its_signal() {
    needs_qemu!();
    let (bed, serving) = served(&[]);
    let mut client = limosa_testkit::NbdClient::open(&bed.path("nbd"), "disk", &[]).unwrap();
    asked(&bed, &["quiesce", "disk", "--timeout", "5s"]);
    client.send(NbdCommand::Read, 0, 0, 512).unwrap();
    thread::sleep(Duration::from_millis(50));
    serving.stop();
    assert_eq!(client.receive().unwrap().error, 108);
}

#[test]
fn mistakes_are_refused_in_one_line_and_change_nothing() {
    needs_qemu!();
    let (bed, serving) = served(&["--untrusted"]);
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "other", "-F", "qcow2", "@overlay"]);
    ctl(&bed, &["add", "absent"]).one_line(&["absent", "No such file"]);
    ctl(&bed, &["add", "disk", "--name", "again"]).one_line(&["lock"]);
    ctl(&bed, &["add", "other", "--name", "disk"]).one_line(&["two exports have the name \"disk\""]);
    ctl(&bed, &["add", "other", "--offset", "1G"]).one_line(&["offset 1073741824 is past its end"]);
    ctl(&bed, &["add", "overlay"]).one_line(&["overlay", "backing file"]);
    ctl(&bed, &["add", "other", "-U"]).misused(&["--read-only"]);
    for command in ["remove", "flush", "quiesce", "resume"] {
        ctl(&bed, &[command, "absent"]).one_line(&["no export has the name \"absent\""]);
    }
    ctl(&bed, &["remove"]).misused(&["NAME"]);
    bed.refused(&["ctl", "nowhere", "list"]).one_line(&["nowhere", "--control"]);
    assert_eq!(names(&serving), ["disk"]);
    let mut lines = BufReader::new(UnixStream::connect(bed.path("control")).unwrap());
    let mut say = |command: &Value| {
        lines.get_mut().write_all(format!("{command}\n").as_bytes()).unwrap();
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        serde_json::from_str::<Value>(&line).unwrap()
    };
    assert!(say(&json!({ "execute": "qmp_capabilities" })).get("QMP").is_some());
    let add = json!({ "execute": "export-add", "arguments": { "image": "other", "shoe-size": 43 } });
    let answers = [say(&add), say(&json!({ "execute": "export-add" })), say(&json!({ "execute": "no-such" }))];
    assert_eq!(answers[0], json!({ "return": {} }), "the answer to qmp_capabilities");
    assert!(answers[1]["error"]["desc"].as_str().unwrap().contains("shoe-size"), "{answers:?}");
    assert!(answers[2]["error"]["desc"].as_str().unwrap().contains("image"), "{answers:?}");
    let last = say(&json!({ "execute": "query-exports" }));
    assert_eq!(last["error"]["class"], "CommandNotFound");
    serving.stop();
}

#[test]
fn an_image_may_be_called_ctl() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@ctl", "1M"]);
    let serving = bed.serve("nbd", &["./ctl"]);
    assert_eq!(nbdinfo(&[&serving.uri("")])["exports"][0]["export-size"], 1 << 20);
    serving.stop();
    assert!(Path::new(&bed.path("ctl")).exists());
}
