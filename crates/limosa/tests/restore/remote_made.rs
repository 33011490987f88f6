//! Snapshots that are made in object stores: packed, saved, on bases there.

use std::time::Duration;

use limosa_testkit::{HttpFault, HttpRequest, Machine, Prefill, stores_skipped, wait_for};
use rustix::process::Signal;

use crate::far::{Far, cost};
use crate::needs_qemu;
use crate::scene::{assert_failed, beat, text};
use crate::stage::{assert_beats, names};

/// Names of the objects in the store.
fn objects(far: &Far) -> Vec<String> {
    names(&far.server.folder())
}

#[test]
fn a_vm_is_saved_into_a_store_and_comes_back_from_there() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let source = beat().start().unwrap();
    source.wait_heartbeats(1).unwrap();
    let socket = source.qmp_socket();
    let save = |url: &str, how: &[&str]| {
        far.run(&[&["save", "--pack", "zstd", "--json", "--qmp", text(&socket)], how, &[url]].concat())
    };
    let (monday, tuesday) = ("s3://bucket/vm/mon.qcow2", "s3://bucket/vm/tue.qcow2");
    let first = save(monday, &[]).json();
    assert_eq!(first["snapshot"], monday);
    assert!(cost(&first, "bytes-sent") > 0, "{first}");
    assert_beats(&source);
    let second = save(tuesday, &["--stop", "--base", monday]).json();
    let length = |report: &serde_json::Value| report["packed"]["file_length"].as_u64().unwrap();
    assert!(second["packed"]["base_bytes"].as_u64() > Some(0) && length(&second) < length(&first), "{second}");
    let beat_then = source.check_heartbeat().unwrap();
    drop(source);
    let destination = beat().start_incoming().unwrap();
    let socket = destination.qmp_socket();
    far.run(&["restore", tuesday, "--qmp", text(&socket), "--paused"]).success();
    assert_eq!(destination.check_heartbeat().unwrap(), beat_then);
    // Nothing is left here.
    far.scene.assert_tidy();
}

#[test]
fn what_cannot_be_made_is_refused_before_the_vm_is_touched() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let there = far.packed("vm.qcow2", &[]);
    let source = beat().start().unwrap();
    source.wait_heartbeats(1).unwrap();
    let socket = source.qmp_socket();
    let says = |words: &[&str], what: &[&str]| assert_failed(&far.run(words), what);
    let qmp = ["--qmp", text(&socket)];
    let save = |more: &[&str], what: &[&str]| says(&[&["save"], &qmp[..], more].concat(), what);
    save(&[&there], &["is an object of a store", "--pack zstd"]);
    save(&["--pack", "zstd", &there], &["the object exists already"]);
    save(&["--pack", "zstd", "--force", &there], &["an object is not replaced"]);
    save(&["--pack", "zstd", "https://host/vm.qcow2"], &["https://host/vm.qcow2"]);
    let base = far.scene.path("vm.qcow2");
    save(&["--pack", "zstd", "--base", text(&base), "s3://bucket/new"], &["is in another directory"]);
    save(&["--pack", "zstd", "--base", &there, "s3://bucket/other/new"], &["is in another directory"]);
    far.proxy.set_faults(|_| HttpFault::Status(403, "AccessDenied"));
    save(&["--pack", "zstd", "s3://bucket/new"], &["AccessDenied"]);
    far.proxy.set_faults(|_| HttpFault::None);
    let snapshot = text(&far.saved.snapshot);
    says(&["unpack", snapshot, "s3://bucket/new"], &["is an object of a store"]);
    says(&["import", snapshot, "s3://bucket/new"], &["is an object of a store"]);
    says(&["snapshot", "seal", &there], &["is in an object store", "limosa unpack"]);
    assert_beats(&source);
    assert_eq!(objects(&far), ["vm.qcow2"]);
    far.scene.assert_tidy();
}

#[test]
fn an_upload_of_a_snapshot_ends_by_a_signal_and_leaves_nothing_half() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    far.proxy.set_faults(|request| match request.method.as_str() {
        "PUT" => HttpFault::Delay(Duration::from_secs(5)),
        _ => HttpFault::None,
    });
    let packing = far.start(&["pack", text(&far.saved.snapshot), "s3://bucket/vm.qcow2"]);
    let is_sending = || far.proxy.take_requests().iter().any(|request| request.method == "PUT").then_some(());
    wait_for("the upload", is_sending);
    packing.signal(Signal::TERM);
    let ended = packing.wait();
    assert!(!ended.status.success(), "{ended:?}");
    assert_eq!(objects(&far), [""; 0]);
    far.scene.assert_tidy();
}

#[test]
fn a_snapshot_is_uploaded_while_it_is_packed_and_a_killed_pack_is_continued() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    const BYTES: u64 = 96 << 20;
    let far = Far::new();
    let source = Machine::paused(BYTES).start().unwrap();
    Prefill::random(19).fill(source.memory_file().unwrap(), BYTES).unwrap();
    let snapshot = far.scene.save(&source, "filled", &["--stop"]);
    drop(source);
    let (image, url) = (far.scene.path("image"), "s3://bucket/filled.qcow2");
    far.run(&["pack", text(&snapshot), text(&image), "--no-sync"]).success();
    let is_part = |request: &HttpRequest| request.method == "PUT" && request.target.contains("partNumber=");
    let mut sent = 0;
    far.proxy.set_faults(move |request| {
        sent += u32::from(is_part(request));
        if sent > 2 { HttpFault::Drop } else { HttpFault::None }
    });
    let packing = far.start(&["pack", text(&snapshot), url]);
    // The record has a line for the upload, and one for each part.
    wait_for("a part in the record", || {
        let records = std::fs::read_dir(far.scene.path("cache").join("uploads")).ok()?;
        let texts = records.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok());
        texts.into_iter().any(|text| text.lines().count() > 1).then_some(())
    });
    packing.signal(Signal::KILL);
    packing.wait();
    assert_eq!(objects(&far), [""; 0]);
    far.proxy.set_faults(|_| HttpFault::None);
    let again = far.run(&["pack", "--json", text(&snapshot), url]).json();
    assert!(cost(&again, "parts-resumed") > 0, "{again}");
    assert!(cost(&again, "bytes-sent") < image.metadata().unwrap().len(), "{again}");
    // The same snapshot gives the same image.
    assert!(std::fs::read(far.server.folder().join("filled.qcow2")).unwrap() == std::fs::read(&image).unwrap());
    far.scene.assert_tidy();
}

#[test]
fn a_save_that_is_killed_while_it_uploads_leaves_the_vm_here_or_there() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let source = beat().start().unwrap();
    source.wait_heartbeats(1).unwrap();
    far.proxy.set_faults(|request| match request.method.as_str() {
        "PUT" => HttpFault::Delay(Duration::from_secs(60)),
        _ => HttpFault::None,
    });
    let (socket, url) = (source.qmp_socket(), "s3://bucket/vm.qcow2");
    let words = ["save", "--stop", "--pack", "zstd", "--qmp", text(&socket), url];
    let saving = far.start(&words);
    let is_sending = || far.proxy.take_requests().iter().any(|request| request.method == "PUT").then_some(());
    wait_for("the upload", is_sending);
    saving.signal(Signal::KILL);
    saving.wait();
    let beat_then = source.check_heartbeat().unwrap();
    drop(source);
    far.proxy.set_faults(|_| HttpFault::None);
    let left: Vec<_> = names(&far.scene.path("tmp")).into_iter().filter(|name| name.ends_with(".unpacked")).collect();
    let [plain] = left.as_slice() else { panic!("{left:?}") };
    let plain = far.scene.path("tmp").join(plain);
    far.run(&["pack", text(&plain), url]).success();
    let destination = beat().start_incoming().unwrap();
    let socket = destination.qmp_socket();
    far.run(&["restore", url, "--qmp", text(&socket), "--paused"]).success();
    assert_eq!(destination.check_heartbeat().unwrap(), beat_then);
}

#[test]
fn snapshots_of_a_folder_are_listed_and_removed_and_what_is_needed_stays() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let snapshot = text(&far.saved.snapshot);
    let (base, top) = ("s3://bucket/vm/base.qcow2", "s3://bucket/vm/top.qcow2");
    far.run(&["pack", snapshot, base]).success();
    let packed = far.run(&["pack", "--json", snapshot, top, "--base", base]).json();
    assert!(packed["base_bytes"].as_u64() > Some(0), "{packed}");
    let listed = far.run(&["snapshot", "list", "--json", "s3://bucket/vm/"]).json();
    let names: Vec<_> = listed["snapshots"].as_array().unwrap().iter().map(|entry| entry["name"].clone()).collect();
    assert!(names.len() == 2 && names.contains(&"top.qcow2".into()), "{listed}");
    assert!(cost(&listed, "requests") > 2, "{listed}");
    let people = far.run(&["snapshot", "list", "s3://bucket/vm"]).success();
    assert!(people.stdout.contains("top.qcow2 on base.qcow2"), "{}", people.stdout);
    let says = |words: &[&str], what: &[&str]| assert_failed(&far.run(words), what);
    let refused = far.run(&["snapshot", "rm", base]);
    assert_failed(&refused, &["top.qcow2 stands on it"]);
    assert!(!refused.stderr.contains("limosa snapshot merge"), "objects are not merged: {}", refused.stderr);
    says(&["snapshot", "merge", base], &["an object is not packed again"]);
    says(&["snapshot", "rebase", "--whole", top], &["an object is not packed again"]);
    says(&["snapshot", "rm", "s3://bucket/vm/none"], &["s3://bucket/vm/none"]);
    says(&["snapshot", "list", "https://host/vm"], &["a web server has no list of its files"]);
    let pruned = far.run(&["snapshot", "prune", "--keep-last", "1", "--json", "s3://bucket/vm"]).json();
    assert_eq!(pruned["rebased"].as_array().map(Vec::len), Some(0), "{pruned}");
    far.run(&["inspect", top]).success();
    far.run(&["snapshot", "rm", base, top]).success();
    assert_eq!(far.run(&["snapshot", "list", "--json", "s3://bucket/vm"]).json()["snapshots"], serde_json::json!([]));
}
