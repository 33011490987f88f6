//! Snapshots in object stores, restored from there: over a slow line, with a store that stops, by a limosa that is
//! killed.

use std::path::Path;
use std::time::Duration;

use limosa_console::quantity;
use limosa_testkit::{CREDENTIALS, FileServer, HttpFault, LinuxGuest, Machine, stores_skipped};
use rustix::process::Signal;
use serde_json::json;

use crate::far::{Far, cost};
use crate::needs_qemu;
use crate::scene::{
    ENCRYPTED, PASSPHRASE, TRICKLE, assert_ballast, assert_consistent, assert_failed, beat, control, text, wait_guest,
    wait_migration_status,
};
use crate::stage::{Found, SOON, assert_beats, start_command, wait_gone, watchdog_left_by, watchdog_of};

/// The line of the tests: 1 Gbit/s, 20 ms.
const RATE: u64 = 125_000_000;
const LATENCY: Duration = Duration::from_millis(20);

#[test]
fn a_guest_comes_back_from_a_store_lazily_and_eagerly() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let key = far.scene.key();
    let key = key.each_ref().map(String::as_str);
    let base = far.scene.path("base.qcow2");
    let packed = far.packed("base.qcow2", &[]);
    let encrypted = far.packed("secret.qcow2", &[&key[..], &ENCRYPTED].concat());
    let increment = far.packed("increment.qcow2", &["--base", text(&base)]);
    let plain = far.put(&far.saved.snapshot, "plain");
    let all = [&["--memory", "lazy"][..], &["--memory", "eager"], &["--channels", "2"], &[]];
    // The store computes a digest of all of an object for each request, and a plain one is large.
    for (url, key, ways) in
        [(&packed, &[][..], &all[..]), (&encrypted, &key, &all), (&increment, &[], &all), (&plain, &[], &all[..2])]
    {
        for memory in ways.iter().copied() {
            far.forget_cache();
            let destination = beat().start_incoming().unwrap();
            let socket = destination.qmp_socket();
            let words = [&["restore", url, "--qmp", text(&socket), "--paused", "--json"], key, memory].concat();
            let report = far.run(&words).json();
            let mode = if memory.contains(&"eager") || memory.contains(&"2") { "eager" } else { "lazy" };
            assert_eq!(report["mode"], json!(mode), "{report}");
            assert!(cost(&report, "requests") > 0 && cost(&report, "bytes-received") > 0, "{report}");
            far.saved.assert_is_back(&destination);
        }
    }
    // What was fetched once is read from the cache.
    let destination = beat().start_incoming().unwrap();
    let socket = destination.qmp_socket();
    let words = ["restore", &plain, "--qmp", text(&socket), "--paused", "--json", "--memory", "eager"];
    let report = far.run(&words).json();
    assert!(cost(&report, "blocks-in-cache") > 0 && cost(&report, "bytes-received") < 1 << 20, "{report}");
    far.saved.assert_is_back(&destination);
    far.scene.assert_tidy();
}

#[test]
fn a_snapshot_in_a_store_is_shown_compared_exported_and_unpacked() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let snapshot = text(&far.saved.snapshot).to_owned();
    let packed = far.packed("vm.qcow2", &[]);
    let plain = far.put(&far.saved.snapshot, "vm");
    let here = far.run(&["inspect", "--json", &snapshot]).json();
    let at = |name: &str| text(&far.scene.path(name)).to_owned();
    far.run(&["export", &snapshot, &at("stream")]).success();
    for url in [&packed, &plain] {
        let shown = far.run(&["inspect", "--json", url]).json();
        assert_eq!((&shown["id"], &shown["pages"]), (&here["id"], &here["pages"]), "{shown}");
        let people = far.run(&["inspect", url]).success();
        assert!(people.stdout.contains(url.as_str()), "{}", people.stdout);
        // What a plain object has to be fetched of is its length, which is in the first line.
        let length = quantity::bytes(std::fs::metadata(far.server.folder().join(&url[12..])).unwrap().len());
        let line = if *url == packed {
            format!("\nfetched       at most {length} for all of it\n")
        } else {
            format!("{url}: {length} (")
        };
        assert!(people.stdout.contains(&line), "{line:?} is not in {}", people.stdout);
        let same = far.run(&["inspect", "--diff", "--memory", "--json", url, &snapshot]).json();
        assert_eq!(same["memory"]["differing"], json!(0), "{same}");
        let (stream, back) = (at("stream-of-object"), at("unpacked"));
        far.run(&["export", "--force", url, &stream]).success();
        assert!(std::fs::read(at("stream")).unwrap() == std::fs::read(&stream).unwrap());
        far.run(&["unpack", "--force", url, &back]).success();
        assert!(std::fs::read(&snapshot).unwrap() == std::fs::read(&back).unwrap());
    }
}

#[test]
fn what_two_objects_have_from_one_is_not_fetched_to_compare_them() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let file = far.scene.path("base.qcow2");
    let base = far.packed("base.qcow2", &[]);
    let increment = far.packed("increment.qcow2", &["--base", text(&file)]);
    let copy = far.put(&file, "copy.qcow2");
    // Returns the bytes that are asked for.
    let compared = |first: &str| {
        far.forget_cache();
        far.proxy.take_requests();
        let found = far.run(&["inspect", "--diff", "--memory", "--json", first, &increment]).json();
        assert_eq!(found["memory"]["differing"], json!(0), "{found}");
        let length = |range: &str| {
            let (start, end) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some(end.parse::<u64>().ok()? + 1 - start.parse::<u64>().ok()?)
        };
        let requests = far.proxy.take_requests();
        requests.iter().filter_map(|request| length(request.header("range")?)).sum::<u64>()
    };
    let (shared, all) = (compared(&base), compared(&copy));
    assert!(shared > 0 && shared < all / 2, "{shared} of {all} bytes");
}

#[test]
fn a_guest_over_a_slow_line_goes_on_when_its_store_was_gone() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let url = far.packed("vm.qcow2", &[]);
    far.proxy.set_latency(LATENCY);
    // So slow at first that most of it is still to come when the store goes.
    far.proxy.set_rate(Some(1 << 20));
    let destination = beat().start_incoming().unwrap();
    let (socket, control) = (destination.qmp_socket(), far.scene.path("control"));
    let words = ["restore", &url, "--qmp", text(&socket), "--memory", "lazy", "--run", "--control", text(&control)];
    let limosa = far.start(&[&words[..], &TRICKLE].concat());
    wait_guest(&limosa);
    assert_beats(&destination);
    far.server.stop();
    far.forget_cache();
    // The rest is wanted at once, and cannot be had.
    limosa.signal(Signal::INT);
    std::thread::sleep(Duration::from_secs(30));
    assert!(limosa.is_running(), "{}", limosa.stderr());
    far.proxy.set_rate(Some(RATE));
    far.server.resume().unwrap();
    limosa.wait().success();
    assert_consistent(&destination);
    assert_ballast(&destination);
}

/// How long a store is gone: `LIMOSA_OUTAGE_SECONDS`.
fn outage() -> Duration {
    let seconds = std::env::var("LIMOSA_OUTAGE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5);
    Duration::from_secs(seconds)
}

#[test]
fn linux_that_needs_its_memory_while_its_store_is_gone_waits_and_misses_nothing() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let machine = Machine::linux(LinuxGuest::default()).balloon();
    let source = machine.start().unwrap();
    source.wait_counts(3).unwrap();
    // More than what is fetched ahead while the guest begins.
    source.shell("mkdir /big; dd if=/dev/urandom of=/big/file bs=1M count=64 2>/dev/null").unwrap();
    let sum = source.shell("md5sum /big/file").unwrap();
    let url = "s3://bucket/linux.qcow2";
    let socket = source.qmp_socket();
    far.run(&["save", "--stop", "--pack", "zstd", "--qmp", text(&socket), url]).success();
    let there = source.serial().lines();
    let last = there.iter().rev().find_map(|line| line.text.strip_prefix("count ")?.parse::<u64>().ok()).unwrap();
    drop(source);

    far.proxy.set_latency(LATENCY);
    far.proxy.set_rate(Some(RATE));
    let destination = machine.start_incoming().unwrap();
    let socket = destination.qmp_socket();
    let words = ["restore", url, "--qmp", text(&socket), "--memory", "lazy", "--run"];
    let limosa = far.start(&[&words[..], &TRICKLE].concat());
    wait_guest(&limosa);
    let first = destination.wait_counts(1).unwrap();
    // A number that was being written when the guest was stopped has its end here, which is no whole line.
    assert!((last + 1..=last + 2).contains(&first), "{last} there, {first} here");
    far.server.stop();
    far.forget_cache();
    std::thread::scope(|scope| {
        // Most of the file is in the store alone.
        let reading = scope.spawn(|| destination.shell_within("md5sum /big/file", SOON).unwrap());
        std::thread::sleep(outage());
        assert!(!reading.is_finished() && limosa.is_running(), "{}", limosa.stderr());
        far.server.resume().unwrap();
        assert_eq!(reading.join().unwrap(), sum);
    });
    limosa.signal(Signal::INT);
    limosa.wait().success();
    destination.wait_counts(3).unwrap();
    assert_eq!(destination.shell("md5sum /big/file").unwrap(), sum);
}

#[test]
fn a_guest_survives_the_limosa_that_fetches_its_pages() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let url = far.packed("vm.qcow2", &[]);
    for by_watchdog in [true, false] {
        far.forget_cache();
        let destination = beat().start_incoming().unwrap();
        let (socket, steering) = (destination.qmp_socket(), far.scene.path("control"));
        let words =
            ["restore", &url, "--qmp", text(&socket), "--memory", "lazy", "--run", "--control", text(&steering)];
        // The watchdog keeps to the rate.
        let rate = if by_watchdog { ["--max-bandwidth", "8M"] } else { TRICKLE };
        let limosa = far.start(&[&words[..], &rate].concat());
        wait_guest(&limosa);
        assert_beats(&destination);
        if by_watchdog {
            limosa.signal(Signal::KILL);
            wait_gone(watchdog_left_by(limosa.pid()).expect("somebody looks after the guest"));
            limosa.wait();
        } else {
            control(&steering).execute("migrate-pause", json!({})).unwrap();
            assert_failed(&limosa.wait(), &["recover with: limosa restore --recover s3://"]);
            far.run(&["restore", "--recover", &url, "--qmp", text(&socket)]).success();
        }
        assert_consistent(&destination);
        assert_ballast(&destination);
    }
}

#[test]
fn an_encrypted_guest_whose_limosa_was_killed_waits_for_the_user_who_has_the_key() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let key = far.scene.key();
    let key = key.each_ref().map(String::as_str);
    let url = far.packed("vm.qcow2", &[&key[..], &ENCRYPTED].concat());
    let file = far.scene.path("vm.qcow2");
    for snapshot in [&url, text(&file)] {
        far.forget_cache();
        let destination = beat().start_incoming().unwrap();
        let socket = destination.qmp_socket();
        let restore = ["restore", snapshot, "--qmp", text(&socket)];
        let limosa = far.start(&[&restore[..], &key, &["--memory", "lazy", "--run"], &TRICKLE].concat());
        wait_guest(&limosa);
        assert_beats(&destination);
        let watchdog = watchdog_of(limosa.pid()).expect("somebody looks after the guest");
        limosa.signal(Signal::KILL);
        wait_gone(watchdog);
        let said = limosa.wait().stderr;
        let last = said.lines().last().unwrap_or_default();
        let words = ["limosa watchdog: ", "vm.qcow2: is encrypted", "limosa restore --recover"];
        assert!(words.iter().all(|word| last.contains(word)), "{said}");
        wait_migration_status(&destination, "postcopy-paused");
        let recover = [&restore[..], &["--recover"]].concat();
        assert_failed(&far.run(&recover), &["is encrypted", "--key-secret"]);
        far.run(&[&recover[..], &key].concat()).success();
        assert_consistent(&destination);
        assert_ballast(&destination);
    }
    far.scene.assert_tidy();
}

#[test]
fn an_object_that_is_replaced_is_never_mixed_with_the_one_that_was_restored() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let (url, other) = (far.packed("vm.qcow2", &[]), far.packed("other.qcow2", &["--level", "1"]));
    let destination = beat().start_incoming().unwrap();
    let socket = destination.qmp_socket();
    let words = ["restore", &url, "--qmp", text(&socket), "--memory", "lazy", "--run"];
    let mut command = far.command(&[&words[..], &TRICKLE].concat());
    // Nothing of it is kept anywhere.
    command.env("LIMOSA_CACHE_DIR", "");
    let limosa = start_command(command);
    wait_guest(&limosa);
    let folder = far.server.folder();
    std::fs::rename(folder.join("other.qcow2"), folder.join("vm.qcow2")).unwrap();
    limosa.signal(Signal::INT);
    assert_failed(&limosa.wait(), &["recover with: limosa restore --recover s3://"]);
    assert!(other.ends_with("other.qcow2"));
    // The same snapshot, packed otherwise: what it has is what the guest lacks.
    far.run(&["restore", "--recover", &url, "--qmp", text(&socket)]).success();
    assert_consistent(&destination);
    assert_ballast(&destination);
}

#[test]
fn what_cannot_be_restored_is_refused_before_a_vm_is_touched() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let url = far.packed("vm.qcow2", &[]);
    let destination = beat().start_incoming().unwrap();
    let socket = destination.qmp_socket();
    let restore = |url: &str, more: &[&str]| far.run(&[&["restore", url, "--qmp", text(&socket)], more].concat());
    assert_failed(&restore("s3://bucket/none", &[]), &["s3://bucket/none", "NoSuchKey"]);
    assert_failed(&restore(&url, &["--memory", "mapped"]), &["cannot restore mapped"]);
    far.proxy.set_faults(|_| HttpFault::Status(403, "AccessDenied"));
    assert_failed(&restore(&url, &[]), &[&url, "AccessDenied"]);
    far.proxy.set_faults(|_| HttpFault::None);
    let stream = far.put(Path::new("/proc/self/exe"), "stream");
    assert_failed(&restore(&stream, &[]), &[&stream]);
    // It is as it was.
    let report = restore(&url, &["--paused", "--json"]).json();
    assert_eq!(report["vm_state"], json!("paused"));
    far.saved.assert_is_back(&destination);
}

#[test]
fn an_increment_without_its_base_is_refused_before_a_vm_is_touched() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let base = far.scene.path("base.qcow2");
    far.packed("base.qcow2", &[]);
    let url = far.packed("top.qcow2", &["--base", text(&base)]);
    let (file, object) = (far.scene.path("top.qcow2"), far.server.folder().join("base.qcow2"));
    let destination = beat().start_incoming().unwrap();
    let (found, socket) = (Found::of(&destination), destination.qmp_socket());
    for (name, base) in [(&*url, &object), (text(&file), &base)] {
        let aside = base.with_extension("aside");
        std::fs::rename(base, &aside).unwrap();
        for memory in ["lazy", "eager", "auto"] {
            let refused = far.run(&["restore", name, "--qmp", text(&socket), "--memory", memory]);
            refused.one_line(&["top.qcow2: its base base.qcow2: "]);
            found.assert_same(&destination);
        }
        std::fs::rename(&aside, base).unwrap();
    }
    far.run(&["restore", &url, "--qmp", text(&socket), "--paused"]).success();
    far.saved.assert_is_back(&destination);
}

#[test]
fn a_guest_comes_back_from_files_of_a_web_server() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let base = far.scene.path("base.qcow2");
    far.packed("base.qcow2", &[]);
    far.packed("top.qcow2", &["--base", text(&base)]);
    far.put(&far.saved.snapshot, "plain");
    far.server.stop();
    let web = FileServer::start(&far.server.folder()).unwrap();
    for name in ["top.qcow2", "plain"] {
        let url = format!("http://{}/{name}", web.address());
        for memory in ["lazy", "eager"] {
            far.forget_cache();
            let destination = beat().start_incoming().unwrap();
            let socket = destination.qmp_socket();
            let words = ["restore", &url, "--qmp", text(&socket), "--paused", "--json", "--memory", memory];
            let report = far.run(&words).json();
            assert!(cost(&report, "bytes-received") > 16 << 20, "{report}");
            far.saved.assert_is_back(&destination);
        }
    }
}

#[test]
fn the_most_talkative_log_of_what_succeeds_has_no_secret() {
    const TOKEN: &str = "a-token-for-tests";
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let key = far.scene.key();
    let key = key.each_ref().map(String::as_str);
    let url = "s3://bucket/vm.qcow2";
    let destination = beat().start_incoming().unwrap();
    let socket = destination.qmp_socket();
    let pack = [&["-vvv", "pack", text(&far.saved.snapshot), url], &key[..], &ENCRYPTED].concat();
    let restore =
        [&["-vvv", "restore", url, "--qmp", text(&socket), "--paused", "--memory", "lazy"], &key[..]].concat();
    for words in [pack, restore] {
        let mut command = far.command(&words);
        command.env("AWS_SESSION_TOKEN", TOKEN);
        let ended = start_command(command).wait().success();
        let sent = far.proxy.take_requests();
        assert!(sent.iter().any(|request| request.header("x-amz-security-token") == Some(TOKEN)), "{sent:?}");
        assert!(ended.stderr.contains("TRACE"), "{}", ended.stderr);
        for secret in [CREDENTIALS.1, TOKEN, PASSPHRASE, "Signature="] {
            for said in [&ended.stdout, &ended.stderr] {
                let line = said.lines().find(|line| line.contains(secret));
                assert_eq!(line, None, "{secret:?} was said");
            }
        }
    }
    far.saved.assert_is_back(&destination);
}
