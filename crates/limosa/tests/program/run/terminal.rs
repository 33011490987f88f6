//! The terminal is QEMU's: its keys, its process group, job control.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use limosa_testkit::{Process, Qmp, pass_numbers, scratch};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use super::scene::{Scene, child_of, text, words_of};
use crate::needs_qemu;
use crate::stage::{SOON, limosa, wait_for, wait_gone};

/// A terminal, and a program whose controlling terminal it is.
struct Terminal {
    keyboard: File,
    shown: Arc<Mutex<Vec<u8>>>,
    /// Ends when no process has the terminal open any more, and all that was shown has been read.
    reader: JoinHandle<()>,
    process: Process,
    name: String,
}

impl Terminal {
    /// Starts `command` as the leader of a session with its own terminal.
    fn start(command: &Command) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave: OwnedFd = rustix::fs::open(name.as_str(), flags, Mode::empty()).unwrap();
        let mut leader = Command::new("setsid");
        leader.arg("--ctty").arg(command.get_program()).args(command.get_args());
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => leader.env(key, value),
                None => leader.env_remove(key),
            };
        }
        leader.stdin(Stdio::from(slave.try_clone().unwrap())).stdout(Stdio::from(slave.try_clone().unwrap()));
        leader.stderr(Stdio::from(slave));
        let process = Process::spawn("a program in a terminal", leader).unwrap();
        let keyboard = File::from(master);
        let mut screen = keyboard.try_clone().unwrap();
        let shown = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&shown);
        let reader = std::thread::spawn(move || {
            let mut piece = [0; 4096];
            // Fails when no process has the terminal open any more.
            while let Ok(length @ 1..) = screen.read(&mut piece) {
                kept.lock().unwrap().extend(&piece[..length]);
            }
        });
        Self { keyboard, shown, reader, process, name }
    }

    fn type_keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    #[track_caller]
    fn wait_shown(&self, what: &str) {
        wait_for(what, || {
            let more = !self.reader.is_finished();
            let shown = self.shown();
            assert!(more || shown.contains(what), "it ended without {what:?}: {shown}");
            shown.contains(what).then_some(())
        });
    }

    /// All that was shown, once no process has the terminal open any more.
    #[track_caller]
    fn shown_in_the_end(&self) -> String {
        wait_for("the end of the terminal", || self.reader.is_finished().then(|| self.shown()))
    }

    /// Waits until the guest has said this many more laps.
    fn wait_laps(&self, more: usize) {
        let before = pass_numbers(&self.shown()).len();
        wait_for("the guest's laps", || (pass_numbers(&self.shown()).len() >= before + more).then_some(()));
    }
}

/// A field of /proc/PID/stat, counted as in its manual page.
fn stat(pid: u32, field: usize) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, after) = text.rsplit_once(") ").unwrap();
    after.split_ascii_whitespace().nth(field - 3).unwrap().to_owned()
}

#[test]
fn ctrl_c_reaches_qemu_from_the_terminal_and_only_once() {
    needs_qemu!();
    let scene = Scene::new();
    let mut terminal = Terminal::start(&scene.command(&[], &scene.snapshot, &words_of(&scene.line)));
    terminal.wait_laps(2);
    let limosa = terminal.process.pid();
    let qemu = child_of(limosa).unwrap();
    assert_eq!(stat(qemu, 5), stat(limosa, 5), "QEMU is in limosa's process group");
    assert_eq!(stat(qemu, 8), stat(qemu, 5), "which is the foreground group of the terminal");
    for stream in 0..=2 {
        let open = std::fs::read_link(format!("/proc/{qemu}/fd/{stream}")).unwrap();
        assert_eq!(open.to_str(), Some(&*terminal.name), "stream {stream} is the terminal itself");
    }
    terminal.type_keys("\u{3}");
    let status = terminal.process.wait(SOON).unwrap();
    assert_eq!(status.code(), Some(0), "{}", terminal.shown());
    let shown = terminal.shown_in_the_end();
    assert!(shown.contains("terminating on signal 2"), "{shown}");
    assert_eq!(shown.matches("terminating").count(), 1, "{shown}");
    assert!(!shown.contains("from pid"), "it came from the terminal, not from limosa: {shown}");
    assert!(!shown.contains("limosa:"), "{shown}");
    wait_gone(qemu);
}

#[test]
fn ctrl_z_stops_the_guest_and_its_pager_and_fg_continues_both() {
    needs_qemu!();
    let scene = Scene::new();
    let mut shell = Command::new("bash");
    shell.args(["--norc", "--noprofile", "-i"]).env("TMPDIR", scene.path("tmp")).env("PS1", "ready> ");
    let mut terminal = Terminal::start(&shell);
    terminal.wait_shown("ready> ");
    let command =
        scene.command(&["--memory", "lazy", "--max-bandwidth", "4K"], &scene.snapshot, &words_of(&scene.line));
    let words = [command.get_program()].into_iter().chain(command.get_args());
    let line: Vec<String> = words.map(|word| format!("'{}'", word.to_str().unwrap())).collect();
    // In a file: a terminal takes no line of more than 4096 bytes.
    std::fs::write(scene.path("go"), format!("exec {}\n", line.join(" "))).unwrap();
    terminal.type_keys(&format!("sh {}\n", scene.path("go").display()));
    terminal.wait_laps(2);
    let limosa = child_of(terminal.process.pid()).unwrap();
    let qemu = child_of(limosa).unwrap();
    terminal.type_keys("\u{1a}");
    terminal.wait_shown("Stopped");
    for pid in [limosa, qemu] {
        wait_for("a stopped process", || (stat(pid, 3) == "T").then_some(()));
    }
    terminal.type_keys("fg\n");
    terminal.wait_laps(2);
    terminal.type_keys("\u{3}");
    wait_gone(qemu);
    terminal.type_keys("echo status=$?\n");
    terminal.wait_shown("status=0");
}

#[test]
fn the_monitor_that_qemu_gives_itself_and_its_keys_are_there() {
    needs_qemu!();
    let folder = scratch().unwrap();
    let (socket, snapshot) = (folder.path().join("qmp"), folder.path().join("snapshot"));
    let line = ["qemu-system-x86_64", "-nographic", "-m", "64", "-nic", "none"];
    let mut source = Command::new(line[0]);
    source.args(&line[1..]).arg("-qmp").arg(format!("unix:{},server=on,wait=off", socket.display()));
    source.stdin(Stdio::null()).stdout(Stdio::null());
    let source = Process::spawn("QEMU", source).unwrap();
    // The socket is there a moment before QEMU listens on it.
    drop(Qmp::connect(&socket, SOON).unwrap());
    let disks = ["--disks", "ignore"];
    limosa([&["save", "--stop", "--qmp", text(&socket)], &disks[..], &[text(&snapshot)]].concat()).success();
    source.kill();

    let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
    command.args(["run", text(&snapshot), "--"]).args(line);
    let mut terminal = Terminal::start(&command);
    let qemu = wait_for("QEMU", || child_of(terminal.process.pid()));
    // The keys go to the guest first, and a prompt tells when they go to the monitor. A firmware reads nothing, and
    // QEMU takes no key any more when it has some dozens waiting for the guest: so nothing but the monitor is typed at.
    wait_for("QEMU to take the terminal", || {
        let modes = rustix::termios::tcgetattr(&terminal.keyboard).unwrap().local_modes;
        (!modes.contains(rustix::termios::LocalModes::ICANON)).then_some(())
    });
    terminal.type_keys("\u{1}c");
    terminal.wait_shown("(qemu)");
    let report = |shown: &str| shown.matches("VM status: ").count();
    wait_for("a running guest", || {
        let before = report(&terminal.shown());
        terminal.type_keys("info status\n");
        wait_for("an answer", || (report(&terminal.shown()) > before).then_some(()));
        terminal.shown().contains("VM status: running").then_some(())
    });
    terminal.type_keys("\u{1}x");
    let status = terminal.process.wait(SOON).unwrap();
    assert_eq!(status.code(), Some(0), "{}", terminal.shown());
    wait_gone(qemu);
}
