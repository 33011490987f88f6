//! The disk of the checkpoints is full.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_snapshot::Snapshot;
use limosa_testkit::{LinuxGuest, Machine, Program, Series, Vm, kill9};
use rustix::process::Signal;

use crate::gate::networked;
use crate::needs_newest_qemu;
use crate::network::{Namespace, network_skipped};
use crate::requests::{Client, GUEST_MAC, guest, prepare};
use crate::running::open_gate;
use crate::scene::{Scene, text};
use crate::stage::{Mounted, start, start_command, wait_for};

/// A guest that answers behind a gate, and a small file system for its checkpoints.
struct Bed {
    client: Client,
    vm: Vm,
    _gate: Program,
    scene: Scene,
    network: Namespace,
    room: Mounted,
}

impl Bed {
    fn new() -> Self {
        let scene = Scene::of(|folder| {
            let guest = LinuxGuest { kernel_words: "no_timer_check".to_owned(), ..guest() };
            let machine = Machine::linux(guest).series(Series::Newest).memory(192 << 20);
            networked(machine, folder)
        });
        let network = Namespace::with_tap(GUEST_MAC);
        let gate = open_gate(&scene, &network, &[]);
        let vm = scene.machine.start().unwrap();
        prepare(&vm, None);
        let client = Client::connect(&network, &Arc::default());
        Self { client, vm, _gate: gate, scene, network, room: Mounted::new("512M") }
    }

    /// The directory of the checkpoints.
    fn kept(&self) -> PathBuf {
        self.room.path().join("kept")
    }

    fn newest(&self) -> Option<u64> {
        Snapshot::open(&self.kept().join("checkpoint.limosa")).ok()?.manifest()?.checkpoint
    }

    /// `limosa protect --gate ... TO`, once a few checkpoints count.
    fn protect(&self, to: &[&str]) -> Program {
        let gate = self.scene.path("gate");
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_limosa"));
        command.args(["protect", "--qmp"]).arg(self.vm.qmp_socket()).args(["--every", "50ms", "--gate", text(&gate)]);
        command.args(to).env("TMPDIR", self.scene.path("tmp")).env_remove("XDG_RUNTIME_DIR");
        let keeper = start_command(command);
        self.wait_kept(&keeper, 5);
        self.client.wait_answered(3);
        keeper
    }

    fn wait_kept(&self, keeper: &Program, number: u64) {
        wait_for("checkpoints", || {
            assert!(keeper.is_running(), "limosa ended: {}", keeper.stderr());
            self.newest().filter(|newest| *newest >= number)
        });
    }

    /// Takes all the room that is left, and has the guest fill memory that it has not used; the file that takes it.
    fn fill(&self) -> PathBuf {
        let path = self.room.path().join("full");
        let mut file = File::create(&path).unwrap();
        let piece = vec![1; 64 << 10];
        loop {
            match file.write(&piece) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => break,
                Err(error) => panic!("{error}"),
            }
        }
        self.vm.shell("dd if=/dev/urandom of=/tmp/more bs=1M count=8 2>/dev/null").unwrap();
        path
    }

    /// Continues the VM from the directory, on which it writes nothing.
    fn survivor(&self) -> Program {
        let line = self.scene.machine.command_line(&self.scene.path("")).unwrap();
        let kept = self.kept();
        start(["protect", "failover", "--fenced", text(&kept), "--"].into_iter().chain(line.iter().map(String::as_str)))
    }
}

fn is_file(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file())
}

#[test]
fn a_vm_whose_checkpoints_find_no_room_continues_and_the_last_whole_one_stays() {
    needs_newest_qemu!();
    if network_skipped() {
        return;
    }
    let bed = Bed::new();
    let keeper = bed.protect(&[text(&bed.kept())]);
    bed.fill();
    let ended = keeper.wait();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("protection ended; checkpoint"), "{}", ended.stderr);
    assert!(ended.stderr.contains("No space left on device"), "{}", ended.stderr);
    assert_eq!(bed.vm.run_state().unwrap(), "running");
    // As if nothing had been, on the same connection.
    bed.client.wait_answered(5);
    bed.client.audit(&bed.network, false);
    assert!(is_file(&bed.kept().join("checkpoint.limosa")));
    kill9(bed.vm.pid()).unwrap();
    let survivor = bed.survivor();
    wait_for("the guest of the last whole checkpoint", || {
        assert!(survivor.is_running(), "limosa ended: {}", survivor.stderr());
        (survivor.stdout().matches("count ").count() >= 5).then_some(())
    });
    survivor.signal(Signal::TERM);
    survivor.wait();
}

#[test]
fn a_vm_whose_keeper_elsewhere_has_no_room_continues_and_is_protected_again_when_there_is_some() {
    needs_newest_qemu!();
    if network_skipped() {
        return;
    }
    let bed = Bed::new();
    let (kept, socket) = (bed.kept(), format!("unix:{}", bed.scene.path("keeper").display()));
    let keeper = start(["keep", &socket, text(&kept), "--lost-after", "1s"]);
    wait_for("the keeper to listen", || keeper.stderr().contains("listening on ").then_some(()));
    let protect = bed.protect(&["--to", &socket, "--lost-after", "1s"]);
    let full = bed.fill();
    wait_for("the loss", || protect.stderr().contains("continues without protection").then_some(()));
    bed.client.wait_answered(5);
    assert!(keeper.stderr().contains("No space left on device"), "{}", keeper.stderr());
    assert!(is_file(&kept.join("checkpoint.limosa")));
    fs::remove_file(full).unwrap();
    let old = bed.newest();
    wait_for("the base of a second series", || (bed.newest() < old).then_some(()));
    assert!(protect.stderr().contains("is back"), "{}", protect.stderr());
    bed.wait_kept(&protect, 3);
    bed.client.wait_answered(3);
    kill9(bed.vm.pid()).unwrap();
    let ended = protect.wait();
    assert!(ended.stderr.contains("QEMU has ended"), "{}", ended.stderr);
    keeper.signal(Signal::INT);
    keeper.wait().success();
    let survivor = bed.survivor();
    bed.client.wait_answered(3);
    bed.client.audit(&bed.network, false);
    survivor.signal(Signal::TERM);
    survivor.wait();
}
