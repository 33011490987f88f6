//! Eager restores on several channels: QEMU's multifd, with limosa as its source.

use std::os::unix::fs::FileExt;

use limosa_testkit::{Machine, MemoryBackend, Prefill, Vm};
use rustix::process::Signal;

use crate::needs_qemu;
use crate::scene::{Saved, Scene, assert_ballast, assert_failed, beat, load_ballast, migration_status};
use crate::stage::channels::Transport;
use crate::stage::{Found, wait_for};

/// The arguments that make limosa send on `count` channels.
fn words(scene: &Scene, channels: u8, compression: &str, over: Transport) -> Vec<String> {
    let listen = over.of_qemu(&scene.path(""));
    let mut words: Vec<_> =
        ["--memory", "eager", "--via", "socket", "--compression", compression].map(str::to_owned).into();
    words.extend(["--channels".to_owned(), channels.to_string()]);
    words.extend(listen.into_iter().flat_map(|uri| ["--listen".to_owned(), uri]));
    words
}

/// All of a VM's memory, which is paused.
fn memory_of(vm: &Vm) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(vm.machine().memory_bytes()).unwrap()];
    vm.memory_file().unwrap().read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// A beat guest of this machine, saved at a known instant, and its memory then.
fn saved(scene: &Scene, machine: &Machine) -> (Saved, Vec<u8>) {
    let source = machine.start().unwrap();
    source.wait_heartbeats(2).unwrap();
    load_ballast(&source);
    let snapshot = scene.save(&source, "snapshot", &["--stop"]);
    let saved = Saved { snapshot, beat: source.check_heartbeat().unwrap(), lap: source.last_pass().unwrap() };
    let memory = memory_of(&source);
    (saved, memory)
}

/// Restores it in each of these ways and expects the very instant that was saved, byte for byte, and QEMU as it was.
fn comes_back_on_channels(machine: &Machine, ways: &[(u8, &str, Transport)]) {
    let scene = Scene::new();
    let (saved, memory) = saved(&scene, machine);
    for &(channels, compression, over) in ways {
        let way = format!("{channels} {compression} {over:?}");
        let destination = machine.start_incoming().unwrap();
        let found = Found::of(&destination);
        let words = words(&scene, channels, compression, over);
        let words: Vec<&str> = words.iter().map(String::as_str).chain(["--paused", "--json"]).collect();
        let report = scene.restore(&saved.snapshot, &destination, &words).json();
        assert_eq!((report["mode"].as_str(), report["vm_state"].as_str()), (Some("eager"), Some("paused")), "{report}");
        assert!(memory_of(&destination) == memory, "{way}: memory differs");
        assert_eq!(migration_status(&destination), "completed");
        found.assert_same_but(&destination, "paused");
        scene.assert_tidy();
        saved.assert_is_back(&destination);
    }
}

fn machine(kind: &str) -> Machine {
    beat().kind(kind)
}

#[test]
fn a_guest_of_machine_7_2_comes_back_on_channels() {
    needs_qemu!();
    comes_back_on_channels(&machine("pc-i440fx-7.2"), &[(2, "none", Transport::Private), (1, "zstd", Transport::Tcp)]);
    comes_back_on_channels(&machine("pc-q35-7.2"), &[(8, "zlib", Transport::Unix)]);
}

#[test]
fn a_guest_of_machine_8_0_comes_back_on_channels() {
    needs_qemu!();
    comes_back_on_channels(&machine("pc-q35-8.0"), &[(4, "none", Transport::Tcp), (2, "zstd", Transport::Private)]);
    comes_back_on_channels(&machine("pc-i440fx-8.0"), &[(1, "zlib", Transport::Unix)]);
}

#[test]
fn a_guest_of_machine_9_0_comes_back_on_channels() {
    needs_qemu!();
    comes_back_on_channels(&machine("pc-i440fx-9.0"), &[(8, "none", Transport::Unix), (4, "zlib", Transport::Tcp)]);
    comes_back_on_channels(&machine("pc-q35-9.0"), &[(2, "zstd", Transport::Private)]);
}

#[test]
fn a_guest_of_machine_10_0_comes_back_on_channels() {
    needs_qemu!();
    let ways = [
        (1, "none", Transport::Tcp),
        (16, "none", Transport::Private),
        (2, "zlib", Transport::Unix),
        (8, "zstd", Transport::Tcp),
    ];
    comes_back_on_channels(&machine("pc-q35-10.0"), &ways);
    comes_back_on_channels(&machine("pc-i440fx-10.0"), &[(4, "none", Transport::Tcp)]);
}

#[test]
fn channels_state_the_uuid_that_qemu_compares() {
    needs_qemu!();
    let machine = beat().argument("-uuid").argument("6e8bc430-9c3a-11d9-9669-0800200c9a66");
    comes_back_on_channels(&machine, &[(2, "none", Transport::Private)]);
}

#[test]
fn memory_of_every_kind_of_page_comes_back_on_channels_over_what_was_there() {
    needs_qemu!();
    const BYTES: u64 = 24 << 20;
    let scene = Scene::new();
    let filling = Prefill::mixed(21);
    for (kind, backend) in
        [("pc-q35-10.0", MemoryBackend::File), ("pc-i440fx-7.2", MemoryBackend::File), ("q35", MemoryBackend::Memfd)]
    {
        let machine = Machine::paused(BYTES).kind(kind).backend(backend);
        let [snapshot, checked] =
            [("paused", &["--force"][..]), ("checked", &["--force", "--checksum"])].map(|(name, how)| {
                let source = machine.start().unwrap();
                filling.fill(source.memory_file().unwrap(), BYTES).unwrap();
                scene.save(&source, name, how)
            });
        for (snapshot, more) in [
            (&snapshot, &["--channels", "2"][..]),
            (&snapshot, &["--channels", "3", "--zero-page-detection", "multifd"]),
            (&snapshot, &["--channels", "2", "--compression", "zlib"]),
            (&checked, &["--channels", "4"]),
        ] {
            let destination = machine.start_incoming_stopped().unwrap();
            if backend == MemoryBackend::File {
                // What an earlier VM left in the file: nothing of it may show where the snapshot has zeros.
                Prefill::mixed(22).fill(destination.memory_file().unwrap(), BYTES).unwrap();
            }
            let words = [&["--memory", "eager", "--via", "socket"], more].concat();
            scene.restore(snapshot, &destination, &words).success();
            filling.verify(destination.memory_file().unwrap(), BYTES).unwrap_or_else(|error| {
                panic!("{kind}, {more:?}: {error:#}");
            });
        }
    }
}

#[test]
fn qemu_reads_the_file_on_as_many_channels_as_are_set() {
    needs_qemu!();
    let scene = Scene::new();
    let (saved, memory) = saved(&scene, &beat());
    for channels in ["1", "5"] {
        let destination = beat().start_incoming().unwrap();
        let found = Found::of(&destination);
        let words = ["--memory", "eager", "--via", "file", "--paused", "--channels", channels];
        scene.restore(&saved.snapshot, &destination, &words).success();
        assert!(memory_of(&destination) == memory);
        found.assert_same_but(&destination, "paused");
    }
}

#[test]
fn channels_where_they_have_no_place_are_refused_or_explained() {
    needs_qemu!();
    let scene = Scene::new();
    let (saved, _) = saved(&scene, &beat());
    let destination = beat().start_incoming().unwrap();
    let found = Found::of(&destination);
    let refused = |words: &[&str], said: &[&str]| {
        scene.restore(&saved.snapshot, &destination, words).misused(said);
    };
    refused(&["--memory", "lazy", "--channels", "2"], &["lazy", "multifd excludes postcopy", "--memory eager"]);
    let compressed = ["--memory", "eager", "--via", "file", "--channels", "2", "--compression", "zstd"];
    refused(&compressed, &["not compressed", "--via socket"]);
    let looking = ["--memory", "eager", "--via", "file", "--channels", "2", "--zero-page-detection", "multifd"];
    refused(&looking, &["as they are", "--via socket"]);
    for usage in [
        &["--channels", "0"][..],
        &["--channels", "17"],
        &["--compression", "zlib"],
        &["--zero-page-detection", "multifd"],
        &["--recover", "--channels", "2"],
        &["--channels", "2", "--compression", "qpl"],
    ] {
        assert_eq!(scene.restore(&saved.snapshot, &destination, usage).status.code(), Some(2), "{usage:?}");
    }
    found.assert_same(&destination);
    let said = scene.restore(&saved.snapshot, &destination, &["--channels", "2", "--compression", "zstd"]).success();
    assert!(
        said.stderr.contains("restoring eagerly: only so can QEMU take memory on several channels"),
        "{}",
        said.stderr
    );
    saved.assert_goes_on(&destination);
    assert_ballast(&destination);
}

#[test]
fn a_restore_on_channels_that_is_cancelled_puts_qemu_back_and_one_whose_qemu_ends_says_so() {
    needs_qemu!();
    let scene = Scene::new();
    let (saved, _) = saved(&scene, &beat());
    let words =
        ["--memory", "eager", "--via", "socket", "--channels", "3", "--compression", "zlib", "--max-bandwidth", "64K"];
    for kill in [false, true] {
        let destination = beat().start_incoming().unwrap();
        let found = Found::of(&destination);
        let limosa = scene.start_restore(&saved.snapshot, &destination, &words);
        wait_for("pages on their way", || (migration_status(&destination) == "active").then_some(()));
        if kill {
            limosa_testkit::kill9(destination.pid()).unwrap();
            let ended = limosa.wait();
            assert_failed(&ended, &["not restored", "the snapshot is unchanged"]);
        } else {
            limosa.signal(Signal::INT);
            let ended = limosa.wait();
            assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
            found.assert_same(&destination);
        }
        scene.assert_tidy();
    }
}
