//! Packed snapshots where a snapshot is wanted: brought back lazily and eagerly, shown, compared, sent, exported.

use std::path::{Path, PathBuf};

use limosa_testkit::Vm;
use rustix::process::Signal;
use serde_json::json;

use crate::destination::mapped;
use crate::needs_qemu;
use crate::scene::{
    ENCRYPTED, Saved, Scene, TRICKLE, assert_arrived, assert_ballast, assert_consistent, assert_failed, beat, control,
    listen, load_ballast_part, release, saved_beat, text, wait_guest,
};
use crate::stage::{Ended, assert_beats, start_command, wait_gone, watchdog_left_by};

fn run(scene: &Scene, words: &[&str]) -> Ended {
    start_command(scene.command(words)).wait()
}

/// Packs a snapshot into a file of this name.
fn pack(scene: &Scene, snapshot: &Path, name: &str, how: &[&str]) -> PathBuf {
    let target = scene.path(name);
    let words = [&["pack", text(snapshot), text(&target), "--no-sync"], how].concat();
    run(scene, &words).success();
    target
}

/// A saved guest, and it packed in every way: plain, encrypted, on a base, encrypted on a base.
fn packed_in_all_ways(scene: &Scene) -> (Saved, Vec<(PathBuf, Vec<String>)>) {
    let (machine, key) = (beat(), scene.key());
    let key = key.each_ref().map(String::as_str);
    let source = machine.start().unwrap();
    source.wait_heartbeats(1).unwrap();
    let first = scene.save(&source, "first", &[]);
    drop(source);
    let saved = saved_beat(scene, &machine, &[]);
    let secret = [&key[..], &ENCRYPTED].concat();
    pack(scene, &first, "base.qcow2", &[]);
    pack(scene, &first, "secret-base.qcow2", &secret);
    let (base, secret_base) = (scene.path("base.qcow2"), scene.path("secret-base.qcow2"));
    let none = Vec::new();
    let words: Vec<String> = key.iter().map(|word| (*word).to_owned()).collect();
    let all = vec![
        (pack(scene, &saved.snapshot, "plain.qcow2", &[]), none.clone()),
        (pack(scene, &saved.snapshot, "secret.qcow2", &secret), words.clone()),
        (pack(scene, &saved.snapshot, "increment.qcow2", &["--base", text(&base)]), none),
        (
            pack(
                scene,
                &saved.snapshot,
                "secret-increment.qcow2",
                &[&secret[..], &["--base", text(&secret_base)]].concat(),
            ),
            words,
        ),
    ];
    (saved, all)
}

#[test]
fn a_guest_comes_back_from_a_packed_snapshot_of_every_kind_lazily_and_eagerly() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = beat();
    let (saved, packed) = packed_in_all_ways(&scene);
    for (snapshot, key) in &packed {
        for memory in [&["--memory", "lazy"][..], &["--memory", "eager"], &["--channels", "2"], &[]] {
            let destination = machine.start_incoming().unwrap();
            let mut words: Vec<&str> = key.iter().map(String::as_str).collect();
            words.extend(memory);
            words.extend(["--paused", "--json"]);
            let report = scene.restore(snapshot, &destination, &words).json();
            let mode = if memory.contains(&"eager") || memory.contains(&"2") { "eager" } else { "lazy" };
            assert_eq!(report["mode"], json!(mode), "{report}");
            saved.assert_is_back(&destination);
        }
    }
    scene.assert_tidy();
}

#[test]
fn an_unpacked_snapshot_is_the_saved_one_and_vms_map_it() {
    needs_qemu!();
    let scene = Scene::new();
    let (saved, packed) = packed_in_all_ways(&scene);
    for (index, (snapshot, key)) in packed.iter().enumerate() {
        let target = scene.path(&format!("unpacked-{index}"));
        let mut words = vec!["unpack", text(snapshot), text(&target), "--json"];
        words.extend(key.iter().map(String::as_str));
        let report = run(&scene, &words).json();
        assert_eq!(report["file_length"], json!(std::fs::metadata(&saved.snapshot).unwrap().len()));
        assert!(std::fs::read(&target).unwrap() == std::fs::read(&saved.snapshot).unwrap());
    }
    let destination = beat().start_incoming().unwrap();
    scene
        .restore(&scene.path("unpacked-0"), &destination, &["--memory", "eager", "--via", "file", "--paused"])
        .success();
    saved.assert_is_back(&destination);
    for index in 0..packed.len() {
        let unpacked = scene.path(&format!("unpacked-{index}"));
        let destination = mapped(&beat(), &unpacked).start_incoming().unwrap();
        let report = scene.restore(&unpacked, &destination, &["--memory", "mapped", "--paused", "--json"]).json();
        assert_eq!(report["mapped_blocks"], json!(["mem"]), "{report}");
        saved.assert_is_back(&destination);
    }
}

/// A guest that was saved eight times, each time packed on the one before: three plain images, and encrypted ones on
/// them. Each holds an eighth of the ballast.
fn chain_of_eight(scene: &Scene, key: &[&str]) -> (Saved, PathBuf) {
    let source = beat().start().unwrap();
    let secret = [key, &["--encrypt", "--iter-time", "1ms"]].concat();
    let mut base = None;
    for number in 0..8 {
        source.wait_heartbeats(1).unwrap();
        load_ballast_part(&source, number, 8);
        let snapshot = scene.save(&source, &format!("{number}"), if number == 7 { &["--stop"] } else { &[] });
        let mut how = if number < 3 { Vec::new() } else { secret.clone() };
        how.extend(base.as_deref().into_iter().flat_map(|base| ["--base", text(base)]));
        base = Some(pack(scene, &snapshot, &format!("{number}.qcow2"), &how));
    }
    let (beat, lap) = (source.check_heartbeat().unwrap(), source.last_pass().unwrap());
    (Saved { snapshot: scene.path("7"), beat, lap }, base.unwrap())
}

#[test]
fn a_guest_comes_back_from_eight_images_lazily_and_eagerly() {
    needs_qemu!();
    let scene = Scene::new();
    let key = scene.key();
    let key: Vec<&str> = key.iter().map(String::as_str).collect();
    let (saved, top) = chain_of_eight(&scene, &key);
    let shown = run(&scene, &[&["inspect", "--json", text(&top)], &key[..]].concat()).json();
    let images = shown["images"].as_array().unwrap();
    // Each has its part of what is restored.
    let is_needed = |image: &serde_json::Value| image["contents"].as_u64() >= Some(2 << 20);
    assert!(images.len() == 8 && images.iter().all(is_needed), "{shown}");
    for memory in ["lazy", "eager"] {
        let destination = beat().start_incoming().unwrap();
        let words = [&key[..], &["--memory", memory, "--paused", "--json"]].concat();
        let report = scene.restore(&top, &destination, &words).json();
        assert_eq!(report["mode"], json!(memory), "{report}");
        saved.assert_is_back(&destination);
    }
}

#[test]
fn a_guest_that_waits_for_pages_of_a_packed_snapshot_survives_its_pager() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = beat();
    let (_, packed) = packed_in_all_ways(&scene);
    for (snapshot, key) in [&packed[2], &packed[3]] {
        let destination = machine.start_incoming().unwrap();
        let key: Vec<&str> = key.iter().map(String::as_str).collect();
        // The watchdog keeps to the rate.
        let rate = if key.is_empty() { ["--max-bandwidth", "8M"] } else { TRICKLE };
        let socket = scene.path("control");
        let words = [&key[..], &["--memory", "lazy", "--run", "--control", text(&socket)], &rate].concat();
        let limosa = scene.start_restore(snapshot, &destination, &words);
        wait_guest(&limosa);
        assert_beats(&destination);
        if key.is_empty() {
            // The watchdog brings the rest.
            limosa.signal(Signal::KILL);
            watchdog_left_by(limosa.pid()).into_iter().for_each(wait_gone);
            limosa.wait();
        } else {
            // Nobody but the user has the key.
            control(&socket).execute("migrate-pause", json!({})).unwrap();
            assert_failed(&limosa.wait(), &["recover with: limosa restore --recover"]);
            let recovered = scene.restore(snapshot, &destination, &[&key[..], &["--recover"]].concat());
            recovered.success();
        }
        assert_consistent(&destination);
        assert_ballast(&destination);
    }
}

#[test]
fn a_packed_snapshot_is_shown_compared_exported_and_sent() {
    needs_qemu!();
    let scene = Scene::new();
    let (saved, packed) = packed_in_all_ways(&scene);
    let (increment, key) = &packed[3];
    let key: Vec<&str> = key.iter().map(String::as_str).collect();
    let with_key = |words: &[&str]| run(&scene, &[words, &key].concat());
    let shown = with_key(&["inspect", "--json", text(increment)]).json();
    assert_eq!(shown["packed"]["encrypted"], json!(true), "{shown}");
    assert!(shown["packed"]["bases"][0].as_str().unwrap().ends_with("secret-base.qcow2"), "{shown}");
    let people = with_key(&["inspect", text(increment)]).success();
    assert!(people.stdout.contains("packed        zstd") && people.stdout.contains("encrypted"), "{}", people.stdout);
    let lines = ["images        ", "              on ", "secret-base.qcow2: ", "ratio         "];
    assert!(lines.iter().all(|line| people.stdout.contains(line)), "{}", people.stdout);
    let images = shown["images"].as_array().unwrap();
    assert!(images.len() == 2 && images.iter().all(|image| image["contents"].as_u64() > Some(0)), "{shown}");
    let same = with_key(&["inspect", "--diff", "--memory", "--json", text(increment), text(&saved.snapshot)]).json();
    assert_eq!(same["memory"]["differing"], json!(0), "{same}");
    let (packed_stream, plain_stream) = (scene.path("packed.stream"), scene.path("plain.stream"));
    with_key(&["export", text(increment), text(&packed_stream)]).success();
    run(&scene, &["export", text(&saved.snapshot), text(&plain_stream)]).success();
    assert!(std::fs::read(packed_stream).unwrap() == std::fs::read(plain_stream).unwrap());
    let sent = scene.path("sent.stream");
    let target = format!("exec:cat > {}", text(&sent));
    with_key(&["send", "--one-way", text(increment), &target]).success();
    let destination = beat().start_incoming_stopped().unwrap();
    listen(&destination, &format!("exec:cat {}", text(&sent)));
    assert_arrived(&destination, &saved);
}

#[test]
fn what_a_packed_snapshot_cannot_do_is_refused_with_the_way_out() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let key = scene.key();
    let key = key.each_ref().map(String::as_str);
    let plain = pack(&scene, &saved.snapshot, "plain.qcow2", &[]);
    let secret = pack(&scene, &saved.snapshot, "secret.qcow2", &[&key[..], &ENCRYPTED].concat());
    let says = |words: &[&str], what: &[&str]| assert_failed(&run(&scene, words), what);
    says(&["snapshot", "seal", text(&plain)], &["is packed", "limosa unpack"]);
    says(&["inspect", "--qemu-args", text(&plain)], &["is packed", "limosa unpack"]);
    says(&["send", "--memory", "mapped", text(&plain), "exec:cat"], &["is packed", "limosa unpack"]);
    says(&["inspect", text(&secret)], &["is encrypted", "--key-secret"]);
    let wrong = scene.path("wrong");
    std::fs::write(&wrong, "guess").unwrap();
    let object = format!("secret,id=w,file={}", text(&wrong));
    says(&["inspect", text(&secret), "--object", &object, "--key-secret", "w"], &["does not open", "--key-secret"]);
    says(&["pack", text(&plain), text(&plain), "--force"], &["must be different files"]);
    says(&["pack", text(&saved.snapshot), text(&plain)], &["exists already", "--force"]);
    says(&["pack", text(&saved.snapshot), text(&scene.path("x")), "--base", text(&saved.snapshot)], &["pack it first"]);
    let elsewhere = scene.path("tmp/x.qcow2");
    says(&["pack", text(&saved.snapshot), text(&elsewhere), "--base", text(&plain)], &["another directory"]);
    let destination = beat().start_incoming().unwrap();
    let refused = scene.restore(&plain, &destination, &["--memory", "eager", "--via", "file"]);
    assert_failed(&refused, &["packed", "--via socket"]);
    runs_after_all(&scene, &plain, &destination);
}

/// A refused restore has left the QEMU as it was.
fn runs_after_all(scene: &Scene, snapshot: &Path, destination: &Vm) {
    let limosa = scene.start_restore(snapshot, destination, &[&["--memory", "lazy", "--run"][..], &TRICKLE].concat());
    wait_guest(&limosa);
    release(limosa);
    assert_consistent(destination);
}
