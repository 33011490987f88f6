//! Parts that the restore tests share: limosa with a temporary directory that can be looked into, and guests that were
//! saved at an instant that is known to the page and the beat.
//!
//! Law: waits are for conditions; a limit only ends a test that would hang.

use std::path::{Path, PathBuf};
use std::process::Command;

use limosa_testkit::{Heartbeat, HeartbeatGuest, HugePages, Machine, MemoryBackend, PAGE, Qmp, Vm, scratch, skipped};
use rustix::process::Signal;
use serde_json::json;
use tempfile::TempDir;

use crate::stage::{Ended, Program, SOON, assert_beats, names, save, start_command, wait_for};

/// A rate so low that pages that were not requested do not arrive before the test allows them.
pub(crate) const TRICKLE: [&str; 2] = ["--max-bandwidth", "4K"];

/// The passphrase of encrypted snapshots.
pub(crate) const PASSPHRASE: &str = "a long and secret sentence";

/// The options that encrypt a snapshot, in a short time.
pub(crate) const ENCRYPTED: [&str; 3] = ["--encrypt", "--iter-time", "1ms"];

/// The folder of one test; limosa's temporary directory is in it, so that leftovers are seen.
#[derive(Debug)]
pub(crate) struct Scene {
    folder: TempDir,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let folder = scratch().unwrap();
        std::fs::create_dir(folder.path().join("tmp")).unwrap();
        Self { folder }
    }

    /// A path in the test's folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `limosa` with these words.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
        command.args(words).env("TMPDIR", self.path("tmp")).env_remove("XDG_RUNTIME_DIR");
        command
    }

    /// Starts `limosa restore SNAPSHOT --qmp SOCK MORE` for `vm`.
    pub(crate) fn start_restore(&self, snapshot: &Path, vm: &Vm, more: &[&str]) -> Program {
        let socket = vm.qmp_socket();
        let mut words = vec!["restore", text(snapshot), "--qmp", text(&socket)];
        words.extend(more);
        start_command(self.command(&words))
    }

    /// Runs `limosa restore` to its end.
    pub(crate) fn restore(&self, snapshot: &Path, vm: &Vm, more: &[&str]) -> Ended {
        self.start_restore(snapshot, vm, more).wait()
    }

    /// Finishes a lazy restore that was broken off.
    pub(crate) fn recover(&self, snapshot: &Path, vm: &Vm) -> Ended {
        self.restore(snapshot, vm, &["--recover"])
    }

    /// Saves `vm` into a file of this name.
    pub(crate) fn save(&self, vm: &Vm, name: &str, more: &[&str]) -> PathBuf {
        let snapshot = self.path(name);
        // A save that stops the VM is always durable; another need not be, here.
        let durability: &[&str] = if more.contains(&"--stop") { &[] } else { &["--no-sync"] };
        save(vm, &snapshot, &[durability, more].concat());
        snapshot
    }

    /// The options that open an encrypted snapshot; its key is in a file of the scene.
    pub(crate) fn key(&self) -> [String; 4] {
        let file = self.path("key");
        std::fs::write(&file, PASSPHRASE).unwrap();
        ["--object".into(), format!("secret,id=s,file={}", text(&file)), "--key-secret".into(), "s".into()]
    }

    /// Expects that limosa has left nothing in its temporary directory.
    #[track_caller]
    pub(crate) fn assert_tidy(&self) {
        assert_eq!(names(&self.path("tmp")), Vec::<String>::new());
    }
}

/// A path as text; the tests' own paths are.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Waits until limosa has said this on stderr.
#[track_caller]
pub(crate) fn wait_said(limosa: &Program, what: &str) {
    wait_for(what, || {
        let running = limosa.is_running();
        let said = limosa.stderr();
        assert!(running || said.contains(what), "it ended without {what:?}: {said}");
        said.contains(what).then_some(())
    });
}

/// Waits until limosa says that the guest runs.
#[track_caller]
pub(crate) fn wait_guest(limosa: &Program) {
    wait_said(limosa, "the guest runs");
}

/// Lets limosa send the rest at full speed, as the first Ctrl-C does, and waits for its end.
#[track_caller]
pub(crate) fn release(limosa: Program) -> Ended {
    limosa.signal(Signal::INT);
    limosa.wait().success()
}

/// Expects exit status 1, and as the last line on stderr one that holds all of `words`; lines before it told of the
/// progress until then.
#[track_caller]
pub(crate) fn assert_failed(ended: &Ended, words: &[&str]) {
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    let line = ended.stderr.lines().last().unwrap_or_default();
    assert!(line.starts_with("limosa: ") && !ended.stderr.contains("panicked"), "{}", ended.stderr);
    for word in words {
        assert!(line.contains(word), "{word:?} is not in the last line of {}", ended.stderr);
    }
}

/// A beat guest of 8 MiB that rests between its laps, so that several VMs can share a core.
pub(crate) fn beat() -> Machine {
    Machine::heartbeat(HeartbeatGuest { rest: 2, ..HeartbeatGuest::over(8 << 20) }).backend(MemoryBackend::Memfd)
}

/// This machine in huge pages, enough for `vms` at a time; `None` if the user does without.
pub(crate) fn in_huge_pages(machine: Machine, vms: u64) -> Option<(Machine, HugePages)> {
    if skipped("LIMOSA_SKIP_HUGETLB") {
        return None;
    }
    let pages = HugePages::reserve(vms * machine.memory_bytes())
        .unwrap_or_else(|error| panic!("no huge pages: {error:#}; LIMOSA_SKIP_HUGETLB=1 skips this test"));
    Some((machine.backend(MemoryBackend::HugeMemfd), pages))
}

/// A beat guest of 64 KiB, for tests that are about something else than memory.
pub(crate) fn small_beat() -> Machine {
    Machine::heartbeat(HeartbeatGuest { rest: 2, ..HeartbeatGuest::over(64 << 10) })
}

/// Where the ballast lies: above the walk of [`beat`], below what the BIOS uses.
pub(crate) const BALLAST: std::ops::Range<u64> = (16 << 20)..(32 << 20);

/// Fills memory that no guest asks for: it keeps a lazy restore under way until the test lets it end.
pub(crate) fn load_ballast(vm: &Vm) {
    load_ballast_part(vm, 0, 1);
}

/// Fills one of `parts` equal parts of the ballast.
pub(crate) fn load_ballast_part(vm: &Vm, part: u64, parts: u64) {
    let length = (BALLAST.end - BALLAST.start) / parts;
    let contents = ballast().into_iter().skip(usize::try_from(part * length).unwrap());
    let contents: Vec<u8> = contents.take(usize::try_from(length).unwrap()).collect();
    vm.tamper(BALLAST.start + part * length, &contents).unwrap();
}

/// Expects the ballast to be what [`load_ballast`] wrote. Pages that are not there yet are asked for by this.
#[track_caller]
pub(crate) fn assert_ballast(vm: &Vm) {
    let (found, wanted) = (vm.read_memory(BALLAST).unwrap(), ballast());
    let page = usize::try_from(PAGE).unwrap();
    for (index, (found, wanted)) in found.chunks(page).zip(wanted.chunks(page)).enumerate() {
        assert!(found == wanted, "page {index} of the ballast differs");
    }
}

/// All of the ballast.
pub(crate) fn ballast() -> Vec<u8> {
    let words = (1_u64..).map(|number| number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) | 1);
    words.take(usize::try_from((BALLAST.end - BALLAST.start) / 8).unwrap()).flat_map(u64::to_le_bytes).collect()
}

/// One page of the ballast.
pub(crate) fn ballast_page(index: u64) -> Vec<u8> {
    let page = usize::try_from(PAGE).unwrap();
    ballast().chunks(page).nth(usize::try_from(index).unwrap()).unwrap().to_vec()
}

/// A guest saved at one instant, and what it was then.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(crate) snapshot: PathBuf,
    pub(crate) beat: Heartbeat,
    pub(crate) lap: u32,
}

/// Runs `machine`'s beat guest, with ballast where its memory can be reached, and saves it at an instant that is known
/// because the guest stays stopped. The source is gone afterwards.
pub(crate) fn saved_beat(scene: &Scene, machine: &Machine, how: &[&str]) -> Saved {
    let source = machine.start().unwrap();
    source.wait_heartbeats(2).unwrap();
    if source.memory_file().is_ok() {
        load_ballast(&source);
    }
    let how: Vec<&str> = ["--stop"].iter().chain(how).copied().collect();
    let snapshot = scene.save(&source, "snapshot", &how);
    let beat = source.check_heartbeat().unwrap();
    Saved { snapshot, beat, lap: source.last_pass().unwrap() }
}

impl Saved {
    /// Expects the very instant that was saved, still paused, and the guest to go on from there.
    #[track_caller]
    pub(crate) fn assert_is_back(&self, vm: &Vm) {
        assert_eq!(vm.check_heartbeat().unwrap(), self.beat);
        assert_ballast(vm);
        vm.cont().unwrap();
        self.assert_goes_on(vm);
        assert_consistent(vm);
    }

    /// Expects the guest to go on where it was when it was saved: no beat is lost and none comes twice.
    #[track_caller]
    pub(crate) fn assert_goes_on(&self, vm: &Vm) {
        let (_, line) = vm.serial().wait_from(0, SOON, |line| line.len() == 8).unwrap();
        let first = u32::from_str_radix(&line.text, 16).unwrap();
        // A guest that was saved while it said its number says the rest of it here: that is no full line.
        let whole = vm.serial().lines()[0].text.len() == 8;
        assert_eq!(first, self.lap + if whole { 1 } else { 2 }, "{:?}", vm.serial().lines());
    }
}

/// Makes a destination listen at `uri`.
pub(crate) fn listen(vm: &Vm, uri: &str) {
    vm.execute("migrate-incoming", json!({ "uri": uri, "exit-on-error": false })).unwrap();
}

/// Expects a destination that listened to have the very instant that was saved, running on.
#[track_caller]
pub(crate) fn assert_arrived(vm: &Vm, saved: &Saved) {
    vm.wait_migrated().unwrap();
    vm.wait_run_state("paused", SOON).unwrap();
    saved.assert_is_back(vm);
}

/// Expects memory of one instant now, beats, and memory of one instant again.
#[track_caller]
pub(crate) fn assert_consistent(vm: &Vm) {
    vm.check_heartbeat().unwrap();
    assert_beats(vm);
}

/// QEMU's word on its migration.
pub(crate) fn migration_status(vm: &Vm) -> String {
    let info = vm.execute("query-migrate", json!({})).unwrap();
    info["status"].as_str().unwrap_or("none").to_owned()
}

/// Waits for QEMU's word on its migration.
#[track_caller]
pub(crate) fn wait_migration_status(vm: &Vm, wanted: &str) {
    wait_for(wanted, || (migration_status(vm) == wanted).then_some(()));
}

/// A client of `--control`.
pub(crate) fn control(path: &Path) -> Qmp {
    Qmp::connect(path, SOON).unwrap()
}
