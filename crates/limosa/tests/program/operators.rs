//! A QEMU that is not limosa's own: another user's, confined, in its own mount namespace. Only root can make one.

use std::fs::File;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use crate::needs_qemu;
use crate::stage::*;
use limosa_testkit::{HeartbeatGuest, Machine, Process, Qmp, check_heartbeat, listens, note_skip, scratch};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;

/// The user `nobody` and its group, on any Linux.
const NOBODY: u32 = 65534;

/// Another user; it may have no name.
const OTHER_USER: &str = "12345";

/// A command that becomes a QEMU of that user, with and without the right to use userfaultfd.
const AS_NOBODY: &[&str] = &["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];
const MAY_FAULT: &[&str] = &["--inh-caps", "+sys_ptrace", "--ambient-caps", "+sys_ptrace"];
const SANDBOX: &[&str] = &["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];

macro_rules! needs_root {
    () => {
        needs_qemu!();
        if !rustix::process::geteuid().is_root() {
            return note_skip("only root can start a QEMU as another user");
        }
    };
}

/// A folder that belongs to `nobody`, one that belongs to root alone, and a machine.
struct Scene {
    theirs: TempDir,
    ours: TempDir,
    machine: Machine,
}

/// A QEMU, and its guest's words in a file.
struct Qemu {
    process: Process,
    name: String,
    folder: PathBuf,
    own: Mutex<Qmp>,
}

impl Scene {
    fn new() -> Self {
        let (theirs, ours) = (scratch().unwrap(), scratch().unwrap());
        chown(theirs.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        std::fs::create_dir(ours.path().join("tmp")).unwrap();
        Self { theirs, ours, machine: Machine::heartbeat(HeartbeatGuest { rest: 2, ..HeartbeatGuest::over(8 << 20) }) }
    }

    fn snapshot(&self) -> PathBuf {
        self.ours.path().join("snapshot")
    }

    /// Starts a QEMU behind these words.
    fn start(&self, name: &str, before: &[&str], more: &[&str]) -> Qemu {
        let folder = self.theirs.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        let line = self.machine.command_line(&folder).unwrap();
        let mut words: Vec<String> = before.iter().map(|&word| word.to_owned()).chain(line).collect();
        for monitor in ["qmp", "limosa-qmp"] {
            words.extend(["-qmp".into(), format!("unix:{},server=on,wait=off", folder.join(monitor).display())]);
        }
        words.extend(more.iter().map(|&word| word.to_owned()));
        chown(&folder, Some(NOBODY), Some(NOBODY)).unwrap();
        let mut command = Command::new(&words[0]);
        let file = |name: &str| Stdio::from(File::create(folder.join(name)).unwrap());
        command.args(&words[1..]).stdin(Stdio::null()).stdout(file("said")).stderr(file("log"));
        let process = Process::spawn("QEMU", command).unwrap();
        let socket = folder.join("limosa-qmp");
        wait_for("QEMU's monitor", || {
            let log = std::fs::read_to_string(folder.join("log")).unwrap();
            assert!(process.try_wait().unwrap().is_none(), "QEMU ended: {log}");
            listens(process.pid(), &socket).then_some(())
        });
        let own = Mutex::new(Qmp::connect(&folder.join("qmp"), SOON).unwrap());
        Qemu { process, name: name.to_owned(), folder, own }
    }

    /// A guest of `nobody`, saved with these options and stopped.
    fn save(&self, options: &[&str]) {
        let source = self.start("source", AS_NOBODY, SANDBOX);
        source.assert_beats(&self.machine);
        let (socket, snapshot) = (source.socket(), self.snapshot());
        limosa([&["save", "--qmp", &socket, "--stop"], options, &[text(&snapshot)]].concat()).success();
        source.process.kill();
        std::fs::remove_dir_all(&source.folder).unwrap();
    }

    /// limosa with its own temporary directory.
    fn limosa(&self, before: &[&str], words: &[&str]) -> Program {
        let words = [before, &[env!("CARGO_BIN_EXE_limosa")], words].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).env("TMPDIR", self.ours.path().join("tmp")).env_remove("XDG_RUNTIME_DIR");
        start_command(command)
    }

    fn restore(&self, vm: &Qemu, options: &[&str]) -> Program {
        let (socket, snapshot) = (vm.socket(), self.snapshot());
        self.limosa(&[], &[&["restore", text(&snapshot), "--qmp", &socket], options].concat())
    }

    #[track_caller]
    fn assert_tidy(&self) {
        assert_eq!(names(&self.ours.path().join("tmp")), Vec::<String>::new());
    }
}

impl Qemu {
    fn socket(&self) -> String {
        text(&self.folder.join("limosa-qmp")).to_owned()
    }

    fn execute(&self, command: &str, arguments: serde_json::Value) {
        self.own.lock().unwrap().execute(command, arguments).unwrap();
    }

    /// Expects laps from now on, and memory of one instant.
    #[track_caller]
    fn assert_beats(&self, machine: &Machine) {
        let said = || std::fs::read_to_string(self.folder.join("said")).unwrap().lines().count();
        let before = said();
        wait_for(&self.name, || (said() > before + 2).then_some(()));
        self.execute("stop", json!({}));
        let picture = self.folder.join("picture");
        let read = |from: u64, size: u64| {
            self.execute("pmemsave", json!({ "val": from, "size": size, "filename": picture }));
            std::fs::read(&picture).unwrap()
        };
        let guest = machine.heartbeat_guest().unwrap();
        let memory = read(guest.span().start, guest.span().end - guest.span().start);
        check_heartbeat(&memory, guest.start).unwrap();
        self.execute("cont", json!({}));
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_confined_qemu_of_another_user_is_saved_into_a_folder_that_it_cannot_enter() {
    needs_root!();
    let scene = Scene::new();
    let vm = scene.start("vm", AS_NOBODY, SANDBOX);
    for via in ["file", "socket"] {
        let (socket, snapshot) = (vm.socket(), scene.snapshot());
        limosa(["save", "--force", "--via", via, "--qmp", &socket, text(&snapshot)]).success();
        vm.assert_beats(&scene.machine);
    }
}

#[test]
fn a_confined_qemu_of_another_user_that_may_use_userfaultfd_restores_lazily() {
    needs_root!();
    let scene = Scene::new();
    scene.save(&["--via", "socket"]);
    for preempt in ["off", "on"] {
        let vm = scene.start(&format!("preempt-{preempt}"), &[AS_NOBODY, MAY_FAULT].concat(), &incoming(SANDBOX));
        scene.restore(&vm, &["--memory", "lazy", "--preempt", preempt]).wait().success();
        vm.assert_beats(&scene.machine);
        scene.assert_tidy();
    }
}

#[test]
fn a_lazy_restore_into_a_qemu_of_another_user_is_recovered() {
    needs_root!();
    let scene = Scene::new();
    scene.save(&[]);
    let vm = scene.start("vm", &[AS_NOBODY, MAY_FAULT].concat(), &incoming(SANDBOX));
    let limosa = scene.restore(&vm, &["--memory", "lazy", "--max-bandwidth", "4K"]);
    // Memory that QEMU's main loop needs comes first; a guest that beats has it.
    wait_for("a lap", || (!std::fs::read_to_string(vm.folder.join("said")).unwrap().is_empty()).then_some(()));
    // With its watchdog, which would go on by itself.
    let watchdog = watchdog(&limosa).and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)).unwrap();
    kill_process(watchdog, Signal::KILL).unwrap();
    limosa.signal(Signal::KILL);
    limosa.wait();
    scene.restore(&vm, &["--recover"]).wait().success();
    vm.assert_beats(&scene.machine);
    scene.assert_tidy();
}

#[test]
fn without_userfaultfd_a_restore_is_eager_and_says_why_and_a_lazy_one_is_refused_with_what_to_do() {
    needs_root!();
    let scene = Scene::new();
    scene.save(&[]);
    if std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|value| value.trim() == "1") {
        return note_skip("every user may use userfaultfd here");
    }
    for route in ["file", "socket"] {
        let vm = scene.start(route, AS_NOBODY, &incoming(SANDBOX));
        scene.restore(&vm, &["--memory", "lazy"]).wait().one_line(&["lazily", "/dev/userfaultfd", "--memory eager"]);
        let ended = scene.restore(&vm, &["--via", route]).wait().success();
        let why: Vec<_> = ended.stderr.lines().filter(|line| line.contains("restoring eagerly: ")).collect();
        assert_eq!(why.len(), 1, "{}", ended.stderr);
        vm.assert_beats(&scene.machine);
        scene.assert_tidy();
    }
}

#[test]
fn limosa_without_the_right_to_give_qemu_a_private_place_says_what_to_do() {
    needs_root!();
    let scene = Scene::new();
    scene.save(&[]);
    let vm = scene.start("vm", &[AS_NOBODY, MAY_FAULT].concat(), &incoming(&[]));
    // A monitor and a snapshot with access for all users.
    for path in [scene.theirs.path(), scene.ours.path(), &vm.folder, Path::new(&vm.socket()), &scene.snapshot()] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    std::fs::set_permissions(scene.ours.path().join("tmp"), std::fs::Permissions::from_mode(0o777)).unwrap();
    let (socket, snapshot) = (vm.socket(), scene.snapshot());
    let words = ["restore", text(&snapshot), "--qmp", &socket, "--memory", "lazy"];
    let as_other_user = ["setpriv", "--reuid", OTHER_USER, "--regid", OTHER_USER, "--clear-groups"];
    let refused = scene.limosa(&as_other_user, &[&words[..], &["--preempt", "on"]].concat()).wait();
    refused.one_line(&["QEMU runs as user 65534 and limosa as user 12345", "as root", "--listen"]);
    // What needs no place works all the same.
    scene.limosa(&as_other_user, &words).wait().success();
    vm.assert_beats(&scene.machine);
    scene.assert_tidy();
}

#[test]
fn a_qemu_that_sees_other_files_needs_none_for_one_channel_and_is_distinguished_for_more() {
    needs_root!();
    let scene = Scene::new();
    scene.save(&[]);
    let script = format!("mount -t tmpfs none {} && exec \"$@\"", scene.ours.path().join("tmp").display());
    let vm = scene.start("vm", &["unshare", "-m", "sh", "-c", &script, "sh"], &incoming(&[]));
    let refused = scene.restore(&vm, &["--memory", "lazy", "--preempt", "on"]).wait();
    refused.one_line(&["container or a chroot", "--listen"]);
    scene.restore(&vm, &["--memory", "lazy"]).wait().success();
    vm.assert_beats(&scene.machine);
    scene.assert_tidy();
}

#[test]
fn a_qemu_whose_process_is_not_seen_is_passed_its_one_channel() {
    needs_root!();
    let scene = Scene::new();
    scene.save(&[]);
    let vm = scene.start("vm", &[], &incoming(&[]));
    let (socket, snapshot) = (vm.socket(), scene.snapshot());
    let words = ["restore", text(&snapshot), "--qmp", &socket, "--memory", "lazy"];
    let contained = ["unshare", "--pid", "--fork", "--mount-proc"];
    let refused = scene.limosa(&contained, &[&words[..], &["--preempt", "on"]].concat()).wait();
    refused.one_line(&["in a container", "--listen"]);
    scene.limosa(&contained, &words).wait().success();
    vm.assert_beats(&scene.machine);
    scene.assert_tidy();
}

#[test]
fn a_watchdog_that_has_no_place_to_meet_qemu_says_so_and_a_recovery_needs_none() {
    needs_root!();
    let scene = Scene::new();
    scene.save(&[]);
    let script = format!("mount -t tmpfs none {} && exec \"$@\"", scene.ours.path().join("tmp").display());
    let vm = scene.start("vm", &["unshare", "-m", "sh", "-c", &script, "sh"], &incoming(&[]));
    let limosa = scene.restore(&vm, &["--memory", "lazy", "--max-bandwidth", "4K"]);
    wait_for("a lap", || (!std::fs::read_to_string(vm.folder.join("said")).unwrap().is_empty()).then_some(()));
    let watchdog = watchdog(&limosa).unwrap();
    limosa.signal(Signal::KILL);
    wait_gone(watchdog);
    let said = limosa.wait().stderr;
    assert!(said.contains("cannot continue it") && said.contains("--listen"), "{said}");
    scene.restore(&vm, &["--recover"]).wait().success();
    vm.assert_beats(&scene.machine);
    scene.assert_tidy();
}

/// QEMU's words for a destination, and these.
fn incoming<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["-incoming", "defer"], more].concat()
}
