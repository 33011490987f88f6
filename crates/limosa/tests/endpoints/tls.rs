//! Both ends over TLS, a session for each channel, with stock QEMU's `tls-creds-x509` at the other end.

use std::io::Write as _;
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use limosa_testkit::{Authority, Machine, TlsEnd, Validity, Vm};
use serde_json::json;

use crate::ends::{assert_is_the_instant_of, assert_runs_on, migrate, source, start_receive, start_send};
use crate::needs_qemu;
use crate::scene::{
    Scene, TRICKLE, assert_arrived, assert_ballast, assert_consistent, assert_failed, beat, listen, migration_status,
    release, saved_beat, small_beat, text, wait_guest, wait_said,
};
use crate::stage::channels::free_port;
use crate::stage::{SOON, load_in_stock_qemu, wait_for};

/// An authority, and a folder with what both ends need.
struct Trust {
    authority: Authority,
    folder: PathBuf,
}

impl Trust {
    fn new(scene: &Scene) -> Self {
        let (authority, folder) = (Authority::new().unwrap(), scene.path("pki"));
        authority.equip(&folder).unwrap();
        Self { authority, folder }
    }

    fn folder(&self) -> &str {
        text(&self.folder)
    }
}

/// The machine, with credentials of QEMU's for its migration.
fn with_credentials(machine: Machine, folder: &Path, endpoint: &str, more: &str) -> Machine {
    let object = format!("tls-creds-x509,id=tls0,dir={},endpoint={endpoint}{more}", folder.display());
    machine.argument("-object").argument(&object)
}

/// Tells QEMU to encrypt its migration.
fn encrypts(vm: &Vm, hostname: &str) {
    vm.execute("migrate-set-parameters", json!({ "tls-creds": "tls0", "tls-hostname": hostname })).unwrap();
}

/// Sets QEMU's number of multifd channels.
fn channels(vm: &Vm, count: u8) {
    if count > 0 {
        vm.set_capabilities(&[("multifd", true)]).unwrap();
        vm.execute("migrate-set-parameters", json!({ "multifd-channels": count })).unwrap();
    }
}

#[test]
fn a_vm_migrates_into_a_file_over_tls_on_one_channel_and_on_several() {
    needs_qemu!();
    let scene = Scene::new();
    let trust = Trust::new(&scene);
    let unix = format!("unix:{}", scene.path("in.sock").display());
    for (name, uri, hostname, count, return_path) in [
        ("a", "tcp:127.0.0.1:0", "", 0, true),
        ("b", "tcp:127.0.0.1:0", "", 0, false),
        ("c", &unix, "localhost", 0, true),
        ("d", "tcp:127.0.0.1:0", "", 2, true),
        ("e", "tcp:127.0.0.1:0", "", 4, false),
        ("f", &unix, "localhost", 2, true),
    ] {
        let snapshot = scene.path(name);
        let number = count.to_string();
        let mut more = vec!["--json", "--no-sync", "--tls-creds", trust.folder()];
        if count > 0 {
            more.extend(["--channels", &number]);
        }
        let (limosa, at) = start_receive(&scene, uri, &snapshot, &more);
        let vm = source(&with_credentials(beat(), &trust.folder, "client", ""));
        encrypts(&vm, hostname);
        channels(&vm, count);
        migrate(&vm, &at, return_path);
        vm.wait_migrated().unwrap();
        let ended = limosa.wait();
        assert!(!ended.stderr.contains("turned away"), "{}", ended.stderr);
        let report = ended.json();
        assert_eq!(report["answered"], json!(return_path), "{report}");
        assert_is_the_instant_of(&scene, &snapshot, &vm);
    }
    scene.assert_tidy();
}

/// A destination that takes encrypted connections at `uri`.
fn destination(trust: &Trust, uri: &str, count: u8) -> Vm {
    let machine = with_credentials(beat(), &trust.folder, "server", ",verify-peer=on");
    let vm = machine.start_incoming_stopped().unwrap();
    encrypts(&vm, "");
    channels(&vm, count);
    listen(&vm, uri);
    vm
}

#[test]
fn a_stored_vm_migrates_to_qemu_over_tls_on_one_channel_and_on_several() {
    needs_qemu!();
    let scene = Scene::new();
    let trust = Trust::new(&scene);
    let saved = saved_beat(&scene, &beat(), &[]);
    let unix = format!("unix:{}", scene.path("in.sock").display());
    // With TLS QEMU tells channels apart by their order alone.
    for (uri, count, one_way) in [
        (free_port(), 0, false),
        (unix.clone(), 0, true),
        (free_port(), 2, false),
        (free_port(), 8, false),
        (unix.clone(), 4, false),
        (free_port(), 2, true),
    ] {
        let vm = destination(&trust, &uri, count);
        let number = count.to_string();
        let mut more = vec!["--json", "--tls-creds", trust.folder()];
        if uri == unix {
            more.extend(["--tls-hostname", "localhost"]);
        }
        if count > 0 {
            more.extend(["--channels", &number]);
        }
        if one_way {
            more.push("--one-way");
        }
        let report = start_send(&scene, &saved.snapshot, &uri, &more).wait().json();
        assert_eq!(report["answered"], json!(!one_way), "{report}");
        assert_arrived(&vm, &saved);
    }
    scene.assert_tidy();
}

#[test]
fn channels_come_up_at_qemu_in_their_order_however_often() {
    needs_qemu!();
    let scene = Scene::new();
    let trust = Trust::new(&scene);
    let machine = small_beat();
    let saved = saved_beat(&scene, &machine, &[]);
    for _ in 0..12 {
        let uri = free_port();
        let machine = with_credentials(machine.clone(), &trust.folder, "server", "");
        let vm = machine.start_incoming_stopped().unwrap();
        encrypts(&vm, "");
        channels(&vm, 8);
        listen(&vm, &uri);
        let more = ["--json", "--channels", "8", "--tls-creds", trust.folder()];
        assert_eq!(start_send(&scene, &saved.snapshot, &uri, &more).wait().json()["answered"], true);
        vm.wait_migrated().unwrap();
    }
}

#[test]
fn a_stored_vm_runs_at_once_over_tls_with_and_without_a_channel_for_requests() {
    needs_qemu!();
    let scene = Scene::new();
    let trust = Trust::new(&scene);
    let saved = saved_beat(&scene, &beat(), &[]);
    for preempt in [false, true] {
        let uri = free_port();
        let vm = with_credentials(beat(), &trust.folder, "server", "").start_incoming().unwrap();
        vm.set_capabilities(&[("postcopy-ram", true), ("postcopy-preempt", preempt)]).unwrap();
        encrypts(&vm, "");
        listen(&vm, &uri);
        let preempt = if preempt { "on" } else { "off" };
        let mut more = vec!["--mode", "postcopy", "--json", "--preempt", preempt, "--tls-creds", trust.folder()];
        more.extend(TRICKLE);
        let limosa = start_send(&scene, &saved.snapshot, &uri, &more);
        wait_guest(&limosa);
        vm.wait_run_state("running", SOON).unwrap();
        assert_consistent(&vm);
        let ended = release(limosa);
        vm.wait_migrated().unwrap();
        assert_consistent(&vm);
        assert_ballast(&vm);
        let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        assert!(report["lazy"]["requests"].as_u64().unwrap() > 0, "{report}");
        assert_eq!(report["lazy"]["preempt"].is_object(), preempt == "on", "{report}");
    }
}

#[test]
fn a_snapshot_travels_from_limosa_to_limosa_over_tls() {
    needs_qemu!();
    let scene = Scene::new();
    let trust = Trust::new(&scene);
    let saved = saved_beat(&scene, &beat(), &[]);
    for (name, more) in
        [("a", &[][..]), ("b", &["--channels", "4", "--compression", "zstd"]), ("c", &["--channels", "2", "--one-way"])]
    {
        let copy = scene.path(name);
        let words = [&["--json", "--tls-creds", trust.folder()], more].concat();
        let (receiver, at) = start_receive(&scene, "tcp:127.0.0.1:0", &copy, &words);
        let report = start_send(&scene, &saved.snapshot, &at, &words).wait().json();
        let received = receiver.wait().json();
        assert_eq!(received["pages"]["normal"], report["pages"]["normal"], "{received}");
        load_in_stock_qemu(&beat(), &copy, 0);
    }
    scene.assert_tidy();
}

#[test]
fn a_sender_says_in_one_line_why_it_does_not_trust_a_qemu() {
    needs_qemu!();
    let scene = Scene::new();
    let (trust, another) = (Trust::new(&scene), Authority::new().unwrap());
    let saved = saved_beat(&scene, &small_beat(), &[]);
    for (name, issuer, hosts, validity, said) in [
        ("ca", &another, &["127.0.0.1"][..], Validity::Now, "its certificate is not issued by a CA in"),
        ("over", &trust.authority, &["127.0.0.1"], Validity::Over, "its certificate has expired"),
        ("later", &trust.authority, &["127.0.0.1"], Validity::Later, "its certificate is not valid yet"),
        ("name", &trust.authority, &["other.example"], Validity::Now, "for other.example, not for 127.0.0.1"),
    ] {
        let folder = scene.path(name);
        std::fs::create_dir(&folder).unwrap();
        issuer.trusted_in(&folder).unwrap();
        issuer.issue(&folder, TlsEnd::Server, hosts, validity).unwrap();
        let machine = with_credentials(small_beat(), &folder, "server", ",verify-peer=off,sanity-check=off");
        let vm = machine.start_incoming_stopped().unwrap();
        encrypts(&vm, "");
        let uri = free_port();
        listen(&vm, &uri);
        let ended = start_send(&scene, &saved.snapshot, &uri, &["--tls-creds", trust.folder()]).wait();
        ended.one_line(&["cannot connect to", &uri, "TLS: ", said]);
        assert_ne!(vm.run_state().unwrap(), "running");
    }
    // One that does not encrypt.
    let vm = small_beat().start_incoming_stopped().unwrap();
    let uri = free_port();
    listen(&vm, &uri);
    let ended = start_send(&scene, &saved.snapshot, &uri, &["--tls-creds", trust.folder()]).wait();
    ended.one_line(&[&uri, "it closed the connection during the TLS handshake", "it may not use TLS"]);
}

#[test]
fn a_qemu_that_does_not_trust_a_sender_runs_nothing_and_the_sender_says_where_to_look() {
    needs_qemu!();
    let scene = Scene::new();
    let trust = Trust::new(&scene);
    let saved = saved_beat(&scene, &small_beat(), &[]);
    // Without a certificate.
    let bare = scene.path("bare");
    std::fs::create_dir(&bare).unwrap();
    trust.authority.trusted_in(&bare).unwrap();
    let with = |folder: &Path| {
        let uri = free_port();
        let vm = with_credentials(small_beat(), &trust.folder, "server", "").start_incoming_stopped().unwrap();
        encrypts(&vm, "");
        listen(&vm, &uri);
        let more = ["--tls-creds", text(folder)];
        let ended = start_send(&scene, &saved.snapshot, &uri, &more).wait();
        assert_ne!(vm.run_state().unwrap(), "running");
        ended
    };
    assert_failed(&with(&bare), &["not sent: see the log of the destination"]);
    // Without TLS.
    let uri = free_port();
    let vm = with_credentials(small_beat(), &trust.folder, "server", "").start_incoming_stopped().unwrap();
    encrypts(&vm, "");
    listen(&vm, &uri);
    let ended = start_send(&scene, &saved.snapshot, &uri, &["--timeout", "5s"]).wait();
    assert_failed(&ended, &[]);
    assert_ne!(vm.run_state().unwrap(), "running");
}

#[test]
fn a_receiver_turns_away_whom_it_does_not_trust_says_why_and_goes_on_waiting() {
    needs_qemu!();
    let scene = Scene::new();
    let trust = Trust::new(&scene);
    let snapshot = scene.path("snapshot");
    let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &["--tls-creds", trust.folder(), "--json"]);
    let turned_away = |machine: Machine, encrypted: bool, said: &str| {
        let vm = machine.start_stopped().unwrap();
        if encrypted {
            encrypts(&vm, "");
        }
        vm.execute("migrate", json!({ "uri": at })).unwrap();
        wait_for("QEMU to give up", || (migration_status(&vm) == "failed").then_some(()));
        wait_said(&limosa, said);
    };
    turned_away(small_beat(), false, "TLS: its data is not TLS; enable TLS there as well (tls-creds)");
    let (bare, foreign) = (scene.path("bare"), scene.path("foreign"));
    for folder in [&bare, &foreign] {
        std::fs::create_dir(folder).unwrap();
        trust.authority.trusted_in(folder).unwrap();
    }
    turned_away(with_credentials(small_beat(), &bare, "client", ""), true, "TLS: it presented no certificate");
    let another = Authority::new().unwrap();
    another.issue(&foreign, TlsEnd::Client, &[], Validity::Now).unwrap();
    let machine = with_credentials(small_beat(), &foreign, "client", ",sanity-check=off");
    turned_away(machine, true, "TLS: its certificate is not issued by a CA in");
    trust.authority.issue(&foreign, TlsEnd::Client, &[], Validity::Over).unwrap();
    let machine = with_credentials(small_beat(), &foreign, "client", ",sanity-check=off");
    turned_away(machine, true, "TLS: its certificate has expired");
    // A thousand who say nothing, or noise, and one that is right.
    let (_, port) = at.rsplit_once(':').unwrap();
    let address = format!("127.0.0.1:{port}");
    let mut strangers: Vec<_> = (0..1000).map(|_| TcpStream::connect(&address).unwrap()).collect();
    for stranger in strangers.iter_mut().step_by(3) {
        let _ = stranger.write_all(&[22, 3, 1, 0, 200, 1, 0, 0]);
    }
    let vm = source(&with_credentials(beat(), &trust.folder, "client", ""));
    encrypts(&vm, "");
    migrate(&vm, &at, true);
    vm.wait_migrated().unwrap();
    let ended = limosa.wait();
    // Each reason once, however often.
    assert!(ended.stderr.matches("connection rejected").count() < 10, "{}", ended.stderr);
    assert_eq!(ended.json()["answered"], true);
    assert_is_the_instant_of(&scene, &snapshot, &vm);
}

#[test]
fn a_receiver_that_verifies_no_clients_accepts_one_without_a_certificate() {
    needs_qemu!();
    let scene = Scene::new();
    let trust = Trust::new(&scene);
    let bare = scene.path("bare");
    std::fs::create_dir(&bare).unwrap();
    trust.authority.trusted_in(&bare).unwrap();
    let snapshot = scene.path("snapshot");
    let more = ["--tls-creds", trust.folder(), "--tls-verify-peer", "off", "--json", "--no-sync"];
    let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &more);
    let vm = source(&with_credentials(beat(), &bare, "client", ""));
    encrypts(&vm, "");
    migrate(&vm, &at, true);
    vm.wait_migrated().unwrap();
    assert_eq!(limosa.wait().json()["answered"], true);
    assert_is_the_instant_of(&scene, &snapshot, &vm);
}

#[test]
fn a_receiver_that_does_not_encrypt_says_that_the_sender_does() {
    needs_qemu!();
    let scene = Scene::new();
    let trust = Trust::new(&scene);
    let more = ["--timeout", "5s"];
    let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &scene.path("snapshot"), &more);
    let vm = with_credentials(small_beat(), &trust.folder, "client", "").start_stopped().unwrap();
    encrypts(&vm, "");
    vm.execute("migrate", json!({ "uri": at })).unwrap();
    assert_failed(&limosa.wait(), &["it speaks TLS, and this end does not", "tls-creds"]);
    wait_for("QEMU to give up", || (migration_status(&vm) == "failed").then_some(()));
}

#[test]
fn a_sender_that_does_not_encrypt_says_that_the_receiver_does() {
    needs_qemu!();
    let scene = Scene::new();
    let trust = Trust::new(&scene);
    let saved = saved_beat(&scene, &small_beat(), &[]);
    let more = ["--tls-creds", trust.folder(), "--timeout", "8s"];
    let (receive, at) = start_receive(&scene, "tcp:127.0.0.1:0", &scene.path("received"), &more);
    for beside in [&[][..], &["--channels", "2"]] {
        let send = start_send(&scene, &saved.snapshot, &at, beside);
        assert_failed(&send.wait(), &["it speaks TLS, and this end does not", "tls-creds"]);
    }
    assert!(receive.wait().stderr.contains("its data is not TLS"));
}

#[test]
fn a_migration_that_is_cut_leaves_the_vm_at_its_source_and_no_file() {
    needs_qemu!();
    let scene = Scene::new();
    let trust = Trust::new(&scene);
    let snapshot = scene.path("snapshot");
    for count in [0, 2_u8] {
        let number = count.to_string();
        let mut more = vec!["--tls-creds", trust.folder(), "--max-bandwidth", "1M"];
        if count > 0 {
            more.extend(["--channels", &number]);
        }
        let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, &more);
        let vm = source(&with_credentials(beat(), &trust.folder, "client", ""));
        encrypts(&vm, "");
        channels(&vm, count);
        migrate(&vm, &at, true);
        crate::stage::wait_moving(&vm);
        vm.execute("migrate_cancel", json!({})).unwrap();
        assert_failed(&limosa.wait(), &["nothing was kept"]);
        assert_runs_on(&vm);
        assert!(!snapshot.exists());
    }
}

#[test]
fn what_cannot_be_encrypted_is_refused_before_it_connects() {
    let scene = Scene::new();
    let trust = Trust::new(&scene);
    let (creds, snapshot) = (["--tls-creds", trust.folder()], scene.path("snapshot"));
    let usage = |command: &str, words: &[&str]| {
        let ended = crate::stage::limosa([&[command], words].concat());
        assert_eq!(ended.status.code(), Some(2), "{words:?}: {}", ended.stderr);
        ended.stderr
    };
    for uri in ["-", "fd:0", "exec:cat"] {
        for words in [["send", text(&snapshot), uri], ["receive", uri, text(&snapshot)]] {
            let said = usage(words[0], &[&words[1..], &creds].concat());
            assert!(said.contains("--tls-creds needs tcp:HOST:PORT or unix:PATH"), "{said}");
        }
    }
    let said = usage("send", &[&[text(&snapshot), "unix:/x"], &creds[..]].concat());
    assert!(said.contains("--tls-hostname"), "{said}");
    let splice = ["--channels", "2", "--zero-copy", "splice"];
    let said = usage("send", &[&[text(&snapshot), "tcp:a:1"], &splice[..], &creds].concat());
    assert!(said.contains("--zero-copy splice") && said.contains("--tls-creds"), "{said}");
    usage("send", &[text(&snapshot), "tcp:a:1", "--tls-hostname", "b"]);
    usage("receive", &["tcp:a:1", text(&snapshot), "--tls-verify-peer", "off"]);
    // Credentials are read first, and named.
    let empty = scene.path("empty");
    std::fs::create_dir(&empty).unwrap();
    for words in [["receive", "tcp:127.0.0.1:0", text(&snapshot)], ["send", text(&snapshot), "tcp:127.0.0.1:1"]] {
        let ended = crate::stage::limosa([&words[..], &["--tls-creds", text(&empty)]].concat());
        ended.one_line(&["empty/ca-cert.pem", "must contain a CA certificate: No such file"]);
    }
    assert!(!snapshot.exists());
}
