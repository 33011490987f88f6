//! Programs of limosa, run as people run them: their exit status, what they print, and signals.

use std::fs::File;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::{Process, scratch};

/// For what should take moments on any machine: a limit for a program that hangs, not a measure.
const SOON: Duration = Duration::from_secs(120);

/// A running program. Its output goes to files, so that a child that outlives it holds up no pipe. Killed when dropped,
/// with all that it has started; [`signal`](Self::signal) and [`wait`](Self::wait) are for a death that its children
/// survive.
#[derive(Debug)]
pub struct Program {
    name: &'static str,
    process: Process,
    folder: TempDir,
}

/// How a program ended and what it printed.
#[derive(Debug)]
pub struct Ended {
    name: &'static str,
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Program {
    /// Starts a command that is or becomes the program (`setpriv ... limosa ...`), which calls itself `name`, without
    /// input.
    #[must_use]
    pub fn start(name: &'static str, mut command: Command) -> Self {
        command.stdin(Stdio::null());
        Self::start_with_input(name, command)
    }

    /// As [`start`](Self::start), with the standard input that the command was given.
    #[must_use]
    pub fn start_with_input(name: &'static str, mut command: Command) -> Self {
        let folder = scratch().unwrap();
        let file = |name: &str| Stdio::from(File::create(folder.path().join(name)).unwrap());
        command.stdout(file("stdout")).stderr(file("stderr"));
        let process = Process::spawn(name, command).unwrap();
        Self { name, process, folder }
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Whether it has not ended.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.process.try_wait().unwrap().is_none()
    }

    /// Returns its standard error so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("stderr")).unwrap()
    }

    /// Returns the standard output so far, its own and that of the programs it started.
    #[must_use]
    pub fn stdout(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("stdout")).unwrap()
    }

    /// Waits for the end.
    pub fn wait(self) -> Ended {
        let status = self.process.wait(SOON).unwrap_or_else(|error| panic!("{error:#}; it said: {}", self.stderr()));
        let stdout = std::fs::read_to_string(self.folder.path().join("stdout")).unwrap();
        Ended { name: self.name, status, stdout, stderr: self.stderr() }
    }
}

impl Ended {
    /// Expects exit status 0.
    #[track_caller]
    pub fn success(self) -> Self {
        assert!(self.status.success(), "{}: {}: {}", self.name, self.status, self.stderr);
        self
    }

    /// Expects exit status 0 and one JSON object on stdout.
    #[track_caller]
    pub fn json(self) -> Value {
        let this = self.success();
        let value: Value = serde_json::from_str(&this.stdout).unwrap_or_else(|e| panic!("{e}: {:?}", this.stdout));
        assert!(value.is_object() && this.stdout.trim_end().lines().count() == 1, "{:?}", this.stdout);
        value
    }

    /// Expects a refusal of the command line: exit status 2, nothing on stdout, and all of `words` on stderr. Returns
    /// what was said.
    #[track_caller]
    pub fn misused(self, words: &[&str]) -> String {
        assert_eq!(self.status.code(), Some(2), "{}", self.stderr);
        assert_eq!(self.stdout, "");
        for word in words {
            assert!(self.stderr.contains(word), "{word:?} is not in {:?}", self.stderr);
        }
        self.stderr
    }

    /// Expects a failure as users should see it: exit status 1, nothing on stdout, one line on stderr that holds all of
    /// `words`. Returns the line.
    #[track_caller]
    pub fn one_line(self, words: &[&str]) -> String {
        let said = &self.stderr;
        assert_eq!(self.status.signal(), None, "killed instead of failed: {said}");
        assert_eq!(self.status.code(), Some(1), "{said}");
        assert_eq!(self.stdout, "");
        assert!(said.ends_with('\n') && said.lines().count() == 1, "not one line: {said:?}");
        assert!(said.starts_with(&format!("{}: ", self.name)) && !said.contains("panicked"), "{said:?}");
        for word in words {
            assert!(said.contains(word), "{word:?} is not in {said:?}");
        }
        self.stderr.trim_end().to_owned()
    }
}

/// Asks again and again until there is an answer.
#[track_caller]
pub fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let end = std::time::Instant::now() + SOON;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(std::time::Instant::now() < end, "waited {SOON:?} in vain for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until a process is gone.
#[track_caller]
pub fn wait_gone(pid: u32) {
    wait_for("the end of a process", || (!crate::is_alive(pid)).then_some(()));
}
