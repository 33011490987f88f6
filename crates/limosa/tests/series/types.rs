//! Machine types: each that two series have in common.

use std::collections::BTreeSet;
use std::process::Command;

use limosa_testkit::{HeartbeatGuest, Machine, MemoryBackend, Series};

use crate::scene::{Scene, assert_consistent, text};
use crate::stage::limosa;

/// The versioned machine types of PCs that a series has.
fn types(series: Series) -> BTreeSet<String> {
    let listed = Command::new(series.program().unwrap()).args(["-machine", "help"]).output().unwrap();
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let text = String::from_utf8(listed.stdout).unwrap();
    let names = text.lines().filter_map(|line| line.split_ascii_whitespace().next());
    names
        .filter(|name| ["pc-q35-", "pc-i440fx-"].iter().any(|family| name.starts_with(family)))
        .map(str::to_owned)
        .collect()
}

/// Whether it is a type whose streams QEMU writes in the older form, which limosa refuses: up to 2.3.
fn is_before_configuration(kind: &str) -> bool {
    let (_, version) = kind.rsplit_once('-').unwrap();
    version.starts_with("1.") || ["2.0", "2.1", "2.2", "2.3"].contains(&version)
}

/// Each of the types that both have is saved in one and restored in the other.
pub(crate) fn every_common_type(source: Series, destination: Series) {
    let (have, take) = (types(source), types(destination));
    let common: Vec<&String> = have.intersection(&take).collect();
    assert!(common.len() >= 10, "{source:?} and {destination:?} have {common:?} in common");
    for kind in common {
        println!("{kind}");
        let machine = |series| {
            let guest = HeartbeatGuest { rest: 2, ..HeartbeatGuest::over(64 << 10) };
            Machine::heartbeat(guest).backend(MemoryBackend::Memfd).kind(kind).series(series)
        };
        let scene = Scene::new();
        let vm = machine(source).start().unwrap();
        vm.wait_heartbeats(1).unwrap();
        if is_before_configuration(kind) {
            let (socket, snapshot) = (vm.qmp_socket(), scene.path("snapshot"));
            let words = ["save", "--stop", "--qmp", text(&socket), text(&snapshot)];
            limosa(words).one_line(&[kind, "a newer machine type"]);
            assert_eq!(vm.run_state().unwrap(), "running");
            assert_consistent(&vm);
            continue;
        }
        let snapshot = scene.save(&vm, "snapshot", &["--stop"]);
        drop(vm);
        for memory in ["lazy", "eager"] {
            let vm = machine(destination).start_incoming().unwrap();
            scene.restore(&snapshot, &vm, &["--memory", memory]).success();
            assert_consistent(&vm);
        }
    }
}
