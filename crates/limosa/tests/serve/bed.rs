//! A folder with images, and servers of them.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::process::Command;

use limosa_testkit::{Ended, NbdClient, Program, nbd_tool, qemu_img, qemu_img_output, qemu_io, scratch, wait_for};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

/// The folder.
#[derive(Debug)]
pub(crate) struct Bed {
    folder: TempDir,
}

/// A running server.
#[derive(Debug)]
pub(crate) struct Serving {
    program: Program,
    socket: PathBuf,
}

/// The folder of journals.
pub(crate) const JOURNALS: &str = "journals";

impl Bed {
    pub(crate) fn new() -> Self {
        // Asked once, so that a program that is missing is said with the line that installs it.
        nbd_tool("nbdinfo", ["--version"]).unwrap();
        qemu_img(["--version"]).unwrap();
        let folder = scratch().unwrap();
        // It exists, so that a server does not print that it has created it: refused commands print one line.
        DirBuilder::new().mode(0o700).create(folder.path().join(JOURNALS)).unwrap();
        Self { folder }
    }

    /// A file in it.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `qemu-img WORDS`, run there; `@NAME` is a file in it.
    #[track_caller]
    pub(crate) fn qemu_img(&self, words: &[&str]) -> String {
        let words = words.iter().map(|word| match word.strip_prefix('@') {
            Some(name) => self.path(name).to_str().unwrap().to_owned(),
            None => (*word).to_owned(),
        });
        qemu_img(words).unwrap()
    }

    /// Waits until an image can be opened whose server was killed: the kernel ends what a ring has in flight, and only
    /// then unlocks the file.
    #[track_caller]
    pub(crate) fn wait_unlocked(&self, image: &str) {
        let path = self.path(image);
        // To be written to, which the killed server's locks forbid; as a raw file, so that nothing is repaired.
        wait_for("the image's locks", || qemu_io(["-f", "raw", "-c", "quit", path.to_str().unwrap()]).ok());
    }

    /// Expects an image whose server was killed to be sound. Leaked clusters are allowed: they cost space and nothing
    /// else.
    #[track_caller]
    pub(crate) fn assert_sound(&self, image: &str) {
        let check = qemu_img_output(["check", self.path(image).to_str().unwrap()]).unwrap();
        assert!([Some(0), Some(3)].contains(&check.status.code()), "{check:?}");
    }

    /// The command `limosa serve WORDS`, run there. Journals are there, too.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
        command.arg("serve").args(words).current_dir(self.folder.path());
        if !words.contains(&"ctl") && !words.contains(&"--journal") {
            command.args(["--journal", JOURNALS]);
        }
        command
    }

    /// `limosa serve WORDS`, run there to its end.
    pub(crate) fn refused(&self, words: &[&str]) -> Ended {
        crate::stage::start_command(self.command(words)).wait()
    }

    /// Starts `limosa serve WORDS --nbd unix:SOCKET`, and waits until clients can connect.
    #[track_caller]
    pub(crate) fn serve(&self, socket: &str, words: &[&str]) -> Serving {
        self.serve_at(socket, &["--nbd", &format!("unix:{}", self.path(socket).display())], words)
    }

    /// Starts `limosa serve WORDS --vhost-user-blk SOCKET`, and waits until front ends can connect.
    #[track_caller]
    pub(crate) fn serve_blk(&self, socket: &str, words: &[&str]) -> Serving {
        self.serve_at(socket, &["--vhost-user-blk", self.path(socket).to_str().unwrap()], words)
    }

    #[track_caller]
    fn serve_at(&self, socket: &str, address: &[&str], words: &[&str]) -> Serving {
        // Without the kernel's help it fails: every test shows that what it uses is allowed.
        let confined = ["--sandbox", "on"];
        let program = crate::stage::start_command(self.command(&[words, &confined, address].concat()));
        let serving = Serving { program, socket: self.path(socket) };
        wait_for("the server", || {
            let said = serving.program.stderr();
            assert!(serving.program.is_running(), "{said}");
            said.contains("limosa: serving ").then_some(())
        });
        serving
    }
}

impl Serving {
    /// The address for stock clients.
    pub(crate) fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    /// The port of 127.0.0.1 that it listens at.
    #[track_caller]
    pub(crate) fn port(&self) -> u16 {
        let said = self.said();
        let port = said.split_once("//127.0.0.1:").and_then(|(_, rest)| rest.split_once('/')?.0.parse().ok());
        port.unwrap_or_else(|| panic!("no port in {said:?}"))
    }

    /// A client of the testkit.
    #[track_caller]
    pub(crate) fn client(&self) -> NbdClient {
        NbdClient::open(&self.socket, "", &[]).unwrap()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.program.pid()
    }

    /// Its messages so far.
    pub(crate) fn said(&self) -> String {
        self.program.stderr()
    }

    /// Its standard output so far.
    pub(crate) fn printed(&self) -> String {
        self.program.stdout()
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn wait(self) -> Ended {
        let ended = self.program.wait().success();
        assert!(!self.socket.exists(), "the socket is gone");
        ended
    }

    /// Ends it by SIGTERM.
    #[track_caller]
    pub(crate) fn stop(self) -> Ended {
        self.program.signal(Signal::TERM);
        self.wait()
    }
}

/// `limosa serve ctl control WORDS`, run in the bed's folder to its end.
pub(crate) fn ctl(bed: &Bed, words: &[&str]) -> Ended {
    bed.refused(&[&["ctl", "control"], words].concat())
}

/// The same with `--json`.
#[track_caller]
pub(crate) fn asked(bed: &Bed, words: &[&str]) -> Value {
    ctl(bed, &[words, &["--json"]].concat()).json()
}

/// Has `qemu-io` carry out commands on a disk.
#[track_caller]
pub(crate) fn io(disk: &str, format: &str, commands: &[&str]) {
    let words = commands.iter().flat_map(|command| ["-c", command]);
    let said = qemu_io(["-f", format].into_iter().chain(words).chain([disk])).unwrap();
    assert!(!said.contains("failed"), "{said}");
}

/// Runs a client of libnbd's.
#[track_caller]
pub(crate) fn tool(name: &str, words: &[&str]) -> String {
    nbd_tool(name, words).unwrap()
}

/// Runs `nbdinfo --json`.
#[track_caller]
pub(crate) fn nbdinfo(words: &[&str]) -> Value {
    serde_json::from_str(&tool("nbdinfo", &[&["--json"], words].concat())).unwrap()
}
