//! Parts that the tests of both ends share: a limosa that listens, and QEMU's side of a migration.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};

use limosa_testkit::{Heartbeat, Machine, Vm};
use serde_json::json;

use crate::scene::{Scene, assert_ballast, assert_consistent, load_ballast, text, wait_said};
use crate::stage::{Program, SOON, start_command, wait_for};

/// The real limosa, for shells.
pub(crate) const LIMOSA: &str = env!("CARGO_BIN_EXE_limosa");

/// Starts limosa with a descriptor as its standard input, as a socket that was inherited would be.
pub(crate) fn start_with_input(scene: &Scene, words: &[&str], input: OwnedFd) -> Program {
    let mut command = Command::new(LIMOSA);
    command.args(words).env("TMPDIR", scene.path("tmp")).stdin(Stdio::from(input));
    Program::start_with_input("limosa", command)
}

/// Starts `limosa receive` at `uri` and waits until it listens; returns it and where that is.
pub(crate) fn start_receive(scene: &Scene, uri: &str, snapshot: &Path, more: &[&str]) -> (Program, String) {
    let mut words = vec!["receive", uri, text(snapshot)];
    words.extend(more);
    let limosa = start_command(scene.command(&words));
    wait_said(&limosa, "listening on ");
    // The line is whole when it has an end.
    let at = wait_for("the address", || {
        let said = limosa.stderr();
        let (_, after) = said.split_once("limosa: listening on ")?;
        after.split_once('\n').map(|(at, _)| at.to_owned())
    });
    (limosa, at)
}

/// A source with a beat guest that has begun, and ballast.
pub(crate) fn source(machine: &Machine) -> Vm {
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    load_ballast(&vm);
    vm.execute("migrate-set-parameters", json!({ "max-bandwidth": 0 })).unwrap();
    vm
}

/// Starts QEMU's migration to `uri`, with or without a return path.
pub(crate) fn migrate(vm: &Vm, uri: &str, return_path: bool) {
    vm.set_capabilities(&[("return-path", return_path)]).unwrap();
    vm.execute("migrate", json!({ "uri": uri })).unwrap();
}

/// Expects the snapshot to be `source` at the instant at which that stopped: by stock QEMU, and by limosa.
#[track_caller]
pub(crate) fn assert_is_the_instant_of(scene: &Scene, snapshot: &Path, source: &Vm) {
    let then: Heartbeat = source.check_heartbeat().unwrap();
    for via in ["file", "socket"] {
        let vm = source.machine().start_incoming().unwrap();
        scene.restore(snapshot, &vm, &["--memory", "eager", "--via", via, "--paused"]).success();
        assert_eq!(vm.check_heartbeat().unwrap(), then, "{via}");
        assert_ballast(&vm);
        vm.cont().unwrap();
        assert_consistent(&vm);
    }
}

/// Expects `source` to be stopped here, and to have gone on as if nothing had been when it is continued.
#[track_caller]
pub(crate) fn assert_runs_on(source: &Vm) {
    source.wait_run_state("running", SOON).unwrap();
    assert_consistent(source);
    assert_ballast(source);
}

pub(crate) fn start_send(scene: &Scene, snapshot: &Path, uri: &str, more: &[&str]) -> Program {
    let mut words = vec!["send", text(snapshot), uri];
    words.extend(more);
    start_command(scene.command(&words))
}
