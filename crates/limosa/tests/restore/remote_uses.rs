//! Snapshots in object stores where other commands than `restore` take them: they are run, cloned, and sent.

use limosa_testkit::{FileServer, MemoryBackend, scratch, stores_skipped};
use rustix::process::Signal;
use serde_json::json;

use crate::clone_scene;
use crate::far::{Far, cost};
use crate::needs_qemu;
use crate::scene::{ENCRYPTED, assert_arrived, assert_ballast, assert_consistent, beat, listen, text, wait_said};
use crate::stage::names;

/// The saved guest of a store, with the command line of a QEMU for it.
fn clones_of(far: &Far) -> clone_scene::Scene {
    let machine = beat().backend(MemoryBackend::Anonymous);
    let folder = scratch().unwrap();
    clone_scene::Scene {
        snapshot: far.saved.snapshot.clone(),
        line: clone_scene::Scene::line(&machine, folder.path()),
        lap: far.saved.lap,
        guest: machine.heartbeat_guest().unwrap(),
        folder,
    }
}

/// The saved guest as it is, on a web server: the store computes a digest of all of an object for each request.
fn plain_of(far: &Far) -> (FileServer, String) {
    far.put(&far.saved.snapshot, "plain");
    let web = FileServer::start(&far.server.folder()).unwrap();
    let url = format!("http://{}/plain", web.address());
    (web, url)
}

/// Runs a snapshot by `limosa run -v`, and expects its guest to go on where it was. Returns what limosa has said.
fn assert_runs(far: &Far, scene: &clone_scene::Scene, number: u64, snapshot: &[&str]) -> String {
    // A name that begins as the directory of the clones: the scene ends what is left of either.
    let monitor = scene.clones().with_extension(format!("{number}.qmp"));
    let serial = format!("serial-{number}");
    let line: Vec<_> = scene.line.iter().map(|word| word.replace("serial-{n}", &serial)).collect();
    let line: Vec<_> = line.iter().map(String::as_str).collect();
    let qmp = format!("unix:{},server=on,wait=off", text(&monitor));
    let limosa = far.start(&[&["run", "-v"], snapshot, &["--"], &line, &["-qmp", &qmp]].concat());
    wait_said(&limosa, "all memory after");
    scene.assert_goes_on(&json!({ "number": number, "monitor": monitor }));
    limosa.signal(Signal::TERM);
    limosa.wait().success().stderr
}

#[test]
fn a_packed_snapshot_is_run_from_a_file_and_from_a_store() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let scene = clones_of(&far);
    let key = far.scene.key();
    let key = key.each_ref().map(String::as_str);
    let base = far.scene.path("base.qcow2");
    far.packed("base.qcow2", &[&key[..], &ENCRYPTED].concat());
    let increment = far.packed("increment.qcow2", &[&key[..], &ENCRYPTED, &["--base", text(&base)]].concat());
    let file = far.scene.path("increment.qcow2");
    for (number, name) in [text(&file), &increment].into_iter().enumerate() {
        let said = assert_runs(&far, &scene, number as u64, &[&key[..], &[name]].concat());
        assert_eq!(said.contains("  object store: "), name == increment, "{said}");
    }
    let (_web, plain) = plain_of(&far);
    assert_runs(&far, &scene, 2, &[&plain]);
    far.scene.assert_tidy();
}

#[test]
fn clones_of_an_object_share_one_copy_of_it() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let scene = clones_of(&far);
    let key = far.scene.key();
    let key = key.each_ref().map(String::as_str);
    let packed = far.packed("vm.qcow2", &[]);
    let encrypted = far.packed("secret.qcow2", &[&key[..], &ENCRYPTED].concat());
    let (clones, line) = (scene.clones(), scene.line.iter().map(String::as_str).collect::<Vec<_>>());
    let count = |suffix: &str| names(&clones).iter().filter(|name| name.ends_with(suffix)).count();
    for (url, key, memory, mapped) in [
        (&packed, &[][..], "eager", json!([])),
        (&packed, &[], "mapped", json!(["mem"])),
        (&encrypted, &key, "auto", json!(["mem"])),
    ] {
        let how = ["--count", "2", "--dir", text(&clones), "--memory", memory, "--json"];
        let report = far.run(&[&["clone", url], key, &how, &["--"], &line].concat()).json();
        assert!(cost(&report, "requests") > 0, "{report}");
        assert_eq!(report["clones"].as_array().map(Vec::len), Some(2), "{report}");
        for clone in report["clones"].as_array().unwrap() {
            assert_eq!(clone["mapped_blocks"], mapped, "{report}");
            scene.assert_goes_on(clone);
        }
        // Both objects hold one snapshot: its copy serves the clones of either.
        assert_eq!(count(".unpacked"), usize::from(memory != "eager"));
    }
    far.run(&["clone", "rm", "--force", text(&clones)]).success();
    assert_eq!((scene.processes(), names(&clones)), (Vec::new(), Vec::new()));
}

#[test]
fn a_vm_in_a_store_is_sent_to_a_qemu_that_waits_for_it() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let packed = far.packed("vm.qcow2", &[]);
    let (_web, plain) = plain_of(&far);
    let socket = format!("unix:{}", text(&far.scene.path("in.sock")));
    for url in [&packed, &plain] {
        far.forget_cache();
        let stopped = beat().start_incoming_stopped().unwrap();
        listen(&stopped, &socket);
        let report = far.run(&["send", url, &socket, "--json"]).json();
        assert_eq!((&report["mode"], &report["answered"]), (&json!("precopy"), &json!(true)), "{report}");
        assert!(cost(&report, "bytes-received") > 16 << 20, "{report}");
        assert_arrived(&stopped, &far.saved);

        let lazy = beat().start_incoming().unwrap();
        lazy.set_capabilities(&[("postcopy-ram", true)]).unwrap();
        listen(&lazy, &socket);
        let report = far.run(&["send", url, &socket, "--mode", "postcopy", "--json"]).json();
        assert_eq!(report["mode"], "postcopy", "{report}");
        lazy.wait_migrated().unwrap();
        assert_consistent(&lazy);
        assert_ballast(&lazy);
    }
    far.scene.assert_tidy();
}
