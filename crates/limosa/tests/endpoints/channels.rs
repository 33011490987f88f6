//! A stored VM is sent on several channels.

use limosa_testkit::{Machine, Vm};
use serde_json::json;

use crate::ends::{start_receive, start_send};
use crate::needs_qemu;
use crate::scene::{Scene, assert_arrived, assert_failed, beat, listen, saved_beat};
use crate::stage::channels::free_port;
use crate::stage::{load_in_stock_qemu, wait_for};

/// A destination that expects `channels` channels at `uri`.
fn destination(machine: &Machine, uri: &str, channels: u8, compression: &str) -> Vm {
    let vm = machine.start_incoming_stopped().unwrap();
    vm.set_capabilities(&[("multifd", true)]).unwrap();
    let parameters = json!({ "multifd-channels": channels, "multifd-compression": compression });
    vm.execute("migrate-set-parameters", parameters).unwrap();
    listen(&vm, uri);
    vm
}

#[test]
fn a_stored_vm_migrates_to_qemu_on_several_channels() {
    needs_qemu!();
    let scene = Scene::new();
    let unix = format!("unix:{}", scene.path("in.sock").display());
    // The UUID that every channel states is in the snapshot; the destination is not asked.
    let known = beat().argument("-uuid").argument("6e8bc430-9c3a-11d9-9669-0800200c9a66");
    for machine in [beat(), known] {
        let saved = saved_beat(&scene, &machine, &["--force"]);
        for (uri, channels, compression, one_way) in
            [(free_port(), 2, "none", false), (unix.clone(), 4, "zstd", false), (unix.clone(), 2, "none", true)]
        {
            let zero_copy = if compression == "none" && !one_way { "splice" } else { "off" };
            let vm = destination(&machine, &uri, channels, compression);
            let count = channels.to_string();
            let mut more = vec!["--json", "--channels", &count, "--compression", compression];
            more.extend(["--zero-copy", zero_copy]);
            if one_way {
                more.push("--one-way");
            }
            let report = start_send(&scene, &saved.snapshot, &uri, &more).wait().json();
            assert_eq!((&report["mode"], &report["answered"]), (&json!("precopy"), &json!(!one_way)), "{report}");
            assert!(report["pages"]["normal"].as_u64().unwrap() > 4096, "{report}");
            assert_arrived(&vm, &saved);
        }
    }
    scene.assert_tidy();
}

#[test]
fn a_snapshot_travels_from_limosa_to_limosa_on_several_channels() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    let unix = format!("unix:{}", scene.path("in.sock").display());
    for (name, uri, channels, compression) in
        [("a", "tcp:127.0.0.1:0", "2", "none"), ("b", unix.as_str(), "4", "zstd"), ("c", unix.as_str(), "1", "zlib")]
    {
        let copy = scene.path(name);
        let words = ["--channels", channels, "--compression", compression, "--json"];
        let (receiver, at) = start_receive(&scene, uri, &copy, &words);
        let sent = start_send(&scene, &saved.snapshot, &at, &words).wait();
        let said = sent.stderr.clone();
        let report = sent.json();
        assert_eq!(report["answered"], true, "{report}");
        // How its pages left is said: what is compressed has to be read.
        let copied = compression != "none" || channels == "0";
        assert_eq!(report["channel"]["spliced"] == 0, copied, "{report}");
        assert!(said.contains(if copied { "read and copied" } else { "spliced from" }), "{said}");
        let received = receiver.wait().json();
        assert_eq!(received["pages"]["normal"], report["pages"]["normal"], "{received}");
        load_in_stock_qemu(&beat(), &copy, 0);
    }
    scene.assert_tidy();
}

#[test]
fn a_zero_copy_method_that_is_unavailable_is_refused_before_it_connects() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    for more in [&["--compression", "zstd"][..], &["--one-way"]] {
        // No process listens there, and the error would say so if it were reached.
        let words = [&["--timeout", "3s", "--channels", "2", "--zero-copy", "splice"], more].concat();
        let ended = start_send(&scene, &saved.snapshot, &free_port(), &words).wait();
        assert_failed(&ended, &["zero-copy is not available: ", "read"]);
    }
}

#[test]
fn a_qemu_that_expects_other_channels_is_named_with_what_it_needs() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    for (theirs, theirs_compressed, ours, ours_compressed) in
        [(4, "none", "2", "none"), (2, "none", "4", "none"), (2, "zstd", "2", "none"), (2, "none", "2", "zlib")]
    {
        let uri = free_port();
        let vm = destination(&beat(), &uri, theirs, theirs_compressed);
        let more = ["--timeout", "3s", "--channels", ours, "--compression", ours_compressed];
        let ended = start_send(&scene, &saved.snapshot, &uri, &more).wait();
        assert_failed(&ended, &["multifd on", &format!("multifd-channels {ours}")]);
        assert_ne!(vm.run_state().unwrap(), "running");
    }
    // One that expects a single channel.
    let uri = free_port();
    let vm = beat().start_incoming_stopped().unwrap();
    listen(&vm, &uri);
    let ended = start_send(&scene, &saved.snapshot, &uri, &["--timeout", "3s", "--channels", "2"]).wait();
    assert_failed(&ended, &["multifd on", "multifd-channels 2"]);
    assert_ne!(vm.run_state().unwrap(), "running");
}

#[test]
fn a_receiver_that_expects_other_channels_and_its_sender_both_say_so() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    for (theirs, ours, word) in [
        (["--channels", "4", "--compression", "none"], ["--channels", "2", "--compression", "none"], "channel"),
        (["--channels", "2", "--compression", "none"], ["--channels", "4", "--compression", "none"], "channel"),
        (["--channels", "2", "--compression", "zstd"], ["--channels", "2", "--compression", "none"], "compression"),
    ] {
        let copy = scene.path("copy");
        let mut words = theirs.to_vec();
        words.extend(["--timeout", "3s"]);
        let (receiver, at) = start_receive(&scene, "tcp:127.0.0.1:0", &copy, &words);
        let mut words = ours.to_vec();
        words.extend(["--timeout", "3s"]);
        let sender = start_send(&scene, &saved.snapshot, &at, &words);
        assert_failed(&sender.wait(), &["multifd on", &format!("multifd-channels {}", ours[1])]);
        assert_failed(&receiver.wait(), &[word]);
        wait_for("no file", || (!copy.exists()).then_some(()));
    }
    scene.assert_tidy();
}
