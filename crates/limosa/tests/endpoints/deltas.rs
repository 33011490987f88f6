//! Pages that come again as what has changed in them: QEMU's capability `xbzrle`.

use limosa_testkit::{HeartbeatGuest, Machine, MemoryBackend, Vm};
use serde_json::{Value, json};

use crate::ends::{assert_is_the_instant_of, migrate, source, start_receive};
use crate::needs_qemu;
use crate::scene::{Scene, text};
use crate::stage::{start_command, wait_for};

/// Enough deltas for some pages to get a delta on top of a delta, if the guest was quick enough for QEMU to need them
/// rounds.
const MANY: u64 = 3 * 2048;

/// A source, and its migration to `uri` with several rounds; the later ones are deltas.
fn sent_in_deltas(uri: &str, return_path: bool) -> Vm {
    // It never rests, so that there is always something to send again.
    let guest = HeartbeatGuest { rest: 0, ..HeartbeatGuest::over(8 << 20) };
    let vm = source(&Machine::heartbeat(guest).backend(MemoryBackend::Memfd));
    vm.set_capabilities(&[("xbzrle", true)]).unwrap();
    // Slow, so that the guest has written to all of its pages before they are sent again; and little is little enough
    // for QEMU to stop the guest for it.
    vm.execute("migrate-set-parameters", json!({ "max-bandwidth": 16 << 20, "downtime-limit": 1 })).unwrap();
    migrate(&vm, uri, return_path);
    let deltas = |info: &Value| info["xbzrle-cache"]["pages"].as_u64().unwrap_or(0);
    wait_for("deltas", || {
        let info = vm.execute("query-migrate", json!({})).unwrap();
        (info["status"] == "completed" || info["status"] == "failed" || deltas(&info) > MANY).then_some(())
    });
    vm.execute("migrate-set-parameters", json!({ "max-bandwidth": 0, "downtime-limit": 100_000 })).unwrap();
    vm.wait_migrated().unwrap();
    let info = vm.execute("query-migrate", json!({})).unwrap();
    assert!(deltas(&info) > 100 && info["ram"]["dirty-sync-count"].as_u64() > Some(3), "{info}");
    println!("{} pages as deltas in {} bytes", deltas(&info), info["xbzrle-cache"]["bytes"]);
    vm.set_capabilities(&[("xbzrle", false)]).unwrap();
    vm
}

#[test]
fn a_vm_that_sends_what_changed_in_its_pages_is_received() {
    needs_qemu!();
    let scene = Scene::new();
    for (name, more) in [("plain", &["--json", "--no-sync"][..]), ("checked", &["--json", "--no-sync", "--checksum"])] {
        let snapshot = scene.path(name);
        let (limosa, at) = start_receive(&scene, "tcp:127.0.0.1:0", &snapshot, more);
        let vm = sent_in_deltas(&at, true);
        let report = limosa.wait().json();
        assert!(report["pages"]["resent"].as_u64() > Some(100), "{report}");
        assert_is_the_instant_of(&scene, &snapshot, &vm);
    }
}

#[test]
fn a_recorded_stream_of_what_changed_in_pages_is_imported() {
    needs_qemu!();
    let scene = Scene::new();
    let (stream, snapshot) = (scene.path("stream"), scene.path("snapshot"));
    let vm = sent_in_deltas(&format!("exec:cat > {}", stream.display()), false);
    let words = ["import", text(&stream), text(&snapshot), "--json", "--no-sync"];
    start_command(scene.command(&words)).wait().json();
    assert_is_the_instant_of(&scene, &snapshot, &vm);
    let destination = vm.machine().start_incoming().unwrap();
    scene.restore(&snapshot, &destination, &["--memory", "lazy", "--paused"]).success();
    assert_eq!(destination.check_heartbeat().unwrap(), vm.check_heartbeat().unwrap());
}
