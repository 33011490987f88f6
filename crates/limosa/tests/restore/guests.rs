//! Guests of many kinds: Linux, private files, a balloon, prefilled memory, and one VM saved and restored
//! again and again.

use limosa_testkit::{LinuxGuest, Machine, Prefill};

use crate::needs_qemu;
use crate::scene::{Scene, TRICKLE, assert_consistent, assert_failed, beat, release, saved_beat, text, wait_guest};
use crate::stage::{Found, assert_beats, limosa, save, save_arguments};

#[test]
fn linux_keeps_counting_while_its_memory_comes_and_after() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = Machine::linux(LinuxGuest::default()).balloon();
    let source = machine.start().unwrap();
    source.wait_counts(3).unwrap();
    source.shell("mkdir /big; dd if=/dev/urandom of=/big/file bs=1M count=8 2>/dev/null").unwrap();
    let sum = source.shell("md5sum /big/file").unwrap();
    let snapshot = scene.save(&source, "snapshot", &["--stop"]);
    let there = source.serial().lines();
    let last = there.iter().rev().find_map(|line| line.text.strip_prefix("count ")?.parse::<u64>().ok()).unwrap();
    drop(source);

    let destination = machine.start_incoming().unwrap();
    let words: Vec<&str> = ["--memory", "lazy"].into_iter().chain(TRICKLE).collect();
    let limosa = scene.start_restore(&snapshot, &destination, &words);
    wait_guest(&limosa);
    let first = destination.wait_counts(1).unwrap();
    // A number that was being written when the guest was stopped has its end here, which is no whole line.
    assert!((last + 1..=last + 2).contains(&first), "{last} there, {first} here");
    assert_eq!(destination.shell("md5sum /big/file").unwrap(), sum);
    assert!(limosa.is_running());
    release(limosa);
    destination.wait_counts(3).unwrap();
    assert_eq!(destination.shell("md5sum /big/file").unwrap(), sum);
}

#[test]
fn one_vm_saved_and_restored_twenty_times_in_a_row_never_misses_a_beat() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = beat();
    let mut vm = machine.start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    let mut lap = vm.last_pass().unwrap();
    for round in 0..20 {
        let via = if round % 2 == 0 { "socket" } else { "file" };
        // The VM continues after the save: what comes back is the instant of the save, which may be some laps ago.
        let snapshot = scene.save(&vm, &format!("{round}"), &["--via", via]);
        drop(vm);
        vm = machine.start_incoming().unwrap();
        let how: &[&str] = match round % 4 {
            0 | 3 => &["--memory", "lazy"],
            1 => &["--memory", "eager", "--via", "socket"],
            _ => &["--memory", "eager", "--via", "file"],
        };
        scene.restore(&snapshot, &vm, how).success();
        assert_beats(&vm);
        let now = vm.last_pass().unwrap();
        assert!(now > lap, "round {round}: lap {now} after {lap}");
        lap = now;
        std::fs::remove_file(snapshot).unwrap();
    }
    vm.check_heartbeat().unwrap();
}

#[test]
fn a_guest_with_memory_in_a_private_file_comes_back_eagerly_because_it_cannot_lazily() {
    needs_qemu!();
    const DIMM: u64 = 32 << 20;
    let scene = Scene::new();
    let file = scene.path("dimm");
    std::fs::File::create(&file).unwrap().set_len(DIMM).unwrap();
    let object = format!("memory-backend-file,id=private,size={DIMM},share=off,mem-path={}", file.display());
    let words = ["-m", "slots=1,maxmem=1G", "-object", &object, "-device", "pc-dimm,id=dimm0,memdev=private"];
    let machine = words.into_iter().fold(beat(), |machine, word| machine.argument(word));
    let saved = saved_beat(&scene, &machine, &[]);

    let destination = machine.start_incoming().unwrap();
    let found = Found::of(&destination);
    let why = "memory backend private maps a file privately";
    scene.restore(&saved.snapshot, &destination, &["--memory", "lazy"]).one_line(&["cannot restore lazily", why]);
    found.assert_same(&destination);
    let said = scene.restore(&saved.snapshot, &destination, &[]).success();
    assert!(said.stderr.contains(&format!("restoring eagerly: {why}")), "{}", said.stderr);
    saved.assert_goes_on(&destination);
    assert_consistent(&destination);
}

#[test]
fn a_guest_with_a_balloon_that_hints_free_pages_comes_back() {
    needs_qemu!();
    let scene = Scene::new();
    let machine = Machine::linux(LinuxGuest::default()).balloon();
    for (via, mode) in [("socket", "lazy"), ("file", "eager"), ("socket", "eager")] {
        let source = machine.start().unwrap();
        source.wait_counts(2).unwrap();
        let snapshot = scene.save(&source, via, &["--via", via, "--force"]);
        drop(source);
        let destination = machine.start_incoming().unwrap();
        scene.restore(&snapshot, &destination, &["--memory", mode]).success();
        destination.wait_counts(3).unwrap();
        assert_eq!(destination.shell("echo alive").unwrap(), ["alive"]);
    }
}

/// The list takes the guest a moment, the longer the busier the machine is, and what has been sent before is stored.
const HINTED: &[&str] = &["--no-sync", "--hint-wait", "60s", "--max-bandwidth", "32M"];

#[test]
fn free_pages_that_a_guest_hints_are_not_stored_and_what_it_holds_comes_back() {
    needs_qemu!();
    const HELD: u64 = 8 << 20;
    const TOUCHED: u64 = 144 << 20;
    let scene = Scene::new();
    let machine = Machine::linux(LinuxGuest::default()).memory(384 << 20).balloon();
    let source = machine.start().unwrap();
    source.wait_counts(2).unwrap();
    source.shell(&format!("dd if=/dev/urandom of=/held bs={HELD} count=1 2>/dev/null")).unwrap();
    let sum = source.shell("md5sum /held").unwrap();
    // A line each: none has much to do, however slow the machine is.
    source.shell("mkdir /free").unwrap();
    for number in 0..TOUCHED / HELD {
        source.shell(&format!("cat /held > /free/{number}")).unwrap();
    }
    source.shell("rm -r /free").unwrap();
    // What a user may have set for migrations to elsewhere, and QEMU gives no hints with.
    source.set_capabilities(&[("postcopy-ram", true)]).unwrap();

    let mut snapshots = Vec::new();
    for channels in [&[][..], &["--channels", "2"]] {
        let words = [&["--via", "socket", "--json"], HINTED, channels].concat();
        let snapshot = scene.path(&format!("hinted{}", channels.len()));
        let saved = limosa(save_arguments(&source, &snapshot, &words)).success();
        assert!(saved.stderr.contains(" hinted as free and not sent ("), "{}", saved.stderr);
        let report = saved.json();
        let number = |what: &serde_json::Value| what.as_u64().unwrap_or_else(|| panic!("{report}"));
        let [normal, zero, hinted] = ["normal", "zero", "hinted"].map(|kind| number(&report["pages"][kind]));
        assert_eq!((normal + zero + hinted) * 4096, number(&report["ram_bytes"]));
        assert_eq!(number(&report["bytes"]["hinted"]), hinted * 4096);
        assert!(normal * 4096 < TOUCHED && hinted * 4096 > TOUCHED / 2, "{report}");
        let inspected = limosa(["inspect", text(&snapshot)]).success();
        assert!(inspected.stdout.contains("that were never sent"), "{}", inspected.stdout);
        let answer = limosa(["inspect", "--json", text(&snapshot)]).json();
        assert_eq!(answer["manifest"]["pages"]["hinted"], hinted);
        snapshots.push(snapshot);
    }
    // QEMU says nothing of why it has not written a page.
    let by_file = scene.path("by file");
    let report = save(&source, &by_file, &[&["--via", "file"], HINTED].concat());
    assert!(report["pages"]["hinted"].is_null(), "{report}");
    assert!(report["pages"]["normal"].as_u64().is_some_and(|normal| normal * 4096 < TOUCHED), "{report}");
    snapshots.push(by_file);

    let capabilities = source.execute("query-migrate-capabilities", serde_json::json!({})).unwrap();
    let postcopy = capabilities.as_array().unwrap().iter().find(|one| one["capability"] == "postcopy-ram").unwrap();
    assert_eq!(postcopy["state"], true, "it is as the user had it");
    drop(source);
    for (snapshot, mode) in [(0, "lazy"), (0, "eager"), (1, "lazy"), (2, "eager")] {
        let snapshot = &snapshots[snapshot];
        let destination = machine.start_incoming().unwrap();
        scene.restore(snapshot, &destination, &["--memory", mode]).success();
        // The first line may be the rest of one that the save has cut off.
        destination.wait_counts(2).unwrap();
        assert_eq!(destination.shell("md5sum /held").unwrap(), sum, "{} {mode}", snapshot.display());
    }
}

#[test]
fn memory_of_every_kind_of_page_comes_back_to_the_bit() {
    needs_qemu!();
    const BYTES: u64 = 64 << 20;
    let scene = Scene::new();
    let machine = Machine::paused(BYTES);
    let filling = Prefill::mixed(11);
    let snapshots = ["file", "socket"].map(|via| {
        let source = machine.start().unwrap();
        filling.fill(source.memory_file().unwrap(), BYTES).unwrap();
        scene.save(&source, via, &["--via", via])
    });
    for snapshot in &snapshots {
        for how in [
            &["--memory", "lazy", "--preempt", "on"][..],
            &["--memory", "lazy", "--preempt", "off"],
            &["--memory", "eager"],
            &["--memory", "eager", "--via", "socket"],
        ] {
            let destination = machine.start_incoming_stopped().unwrap();
            // What an earlier VM left in the file: nothing of it may show where the snapshot has zeros.
            Prefill::mixed(12).fill(destination.memory_file().unwrap(), BYTES).unwrap();
            scene.restore(snapshot, &destination, how).success();
            filling.verify(destination.memory_file().unwrap(), BYTES).unwrap_or_else(|error| {
                panic!("{}, {how:?}: {error:#}", snapshot.display());
            });
        }
        // QEMU's own loader would leave it there.
        let destination = machine.start_incoming_stopped().unwrap();
        let refused = scene.restore(snapshot, &destination, &["--memory", "eager", "--via", "file"]);
        assert_failed(&refused, &["memory backend", "old contents", "--via socket"]);
    }
}
