//! limosa's side of the guard.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::qmp::{Qmp, send};

/// How long a guard may take to start.
const START: Duration = Duration::from_secs(20);
/// How long it may take to listen.
const TELL: Duration = Duration::from_millis(200);

/// Why there is no guard.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuardError {
    /// It could not be started.
    #[error("cannot start the guard process: {0}")]
    Spawn(#[source] io::Error),
    /// It was started but did not report.
    #[error("the guard process did not come up: {0}")]
    NotReady(#[source] io::Error),
}

/// How a guard ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuardEnd {
    /// It was told that the job is done, and went.
    Told,
    /// It had died before.
    WasGone(ExitStatus),
}

/// A running guard. **Dropping it without [`Guard::finish`] makes it take over**, and waits until it has: an error that
/// left the job undone ends as a kill would. The monitor's connection must not be used after that.
#[derive(Debug)]
pub struct Guard {
    child: Child,
    control: Option<UnixStream>,
}

impl Guard {
    /// Starts `executable` with `arguments` (the hidden subcommand whose implementation calls [`super::run`]) as the
    /// guard of a job of this process on `qmp`, and waits until it stands. Use `/proc/self/exe` for the running
    /// executable: that works even if its file was replaced meanwhile.
    ///
    /// # Errors
    /// [`GuardError`].
    pub fn spawn<S: AsRef<OsStr>>(
        executable: &Path,
        arguments: impl IntoIterator<Item = S>,
        qmp: &Qmp,
    ) -> Result<Self, GuardError> {
        let mut guard = Self::start(executable, arguments, qmp, Stdio::inherit())?;
        let ready = guard.wait_ready();
        if let Err(error) = ready {
            // It has not taken over anything and must not.
            guard.control = None;
            drop(guard.child.kill());
            drop(guard.child.wait());
            return Err(GuardError::NotReady(error));
        }
        Ok(guard)
    }

    /// The same without waiting: what it is told meanwhile is not lost, and a guard that does not come up is found out
    /// by [`Guard::finish`]. What it has to say goes to `stderr`.
    ///
    /// # Errors
    /// [`GuardError::Spawn`].
    pub fn start<S: AsRef<OsStr>>(
        executable: &Path,
        arguments: impl IntoIterator<Item = S>,
        qmp: &Qmp,
        stderr: Stdio,
    ) -> Result<Self, GuardError> {
        let (control, theirs) = UnixStream::pair().map_err(GuardError::Spawn)?;
        let monitor = qmp.descriptor().try_clone_to_owned().map_err(GuardError::Spawn)?;
        let child = Command::new(executable)
            .args(arguments)
            .arg(qmp.monitor())
            .arg(std::process::id().to_string())
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(monitor))
            .stderr(stderr)
            .spawn()
            .map_err(GuardError::Spawn)?;
        Ok(Self { child, control: Some(control) })
    }

    fn wait_ready(&mut self) -> io::Result<()> {
        let control = self.control.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        control.set_read_timeout(Some(START))?;
        let mut word = [0; 6];
        control.read_exact(&mut word)?;
        if &word == b"ready\n" { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// The guard's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Names a file that the guard is to unlink if it takes over: the unfinished snapshot. `None`: nothing (any more).
    ///
    /// # Errors
    /// The kernel's, for example if the guard has died.
    pub fn temporary(&mut self, path: Option<&Path>) -> io::Result<()> {
        let path = path.map(std::path::absolute).transpose()?.unwrap_or_default();
        self.say("temporary", path.as_os_str().as_bytes())
    }

    /// Has the guard hold this connection of QEMU's too.
    pub(crate) fn hold(&mut self, end: BorrowedFd<'_>) -> io::Result<()> {
        match &self.control {
            Some(control) => Ok(send(control.as_fd(), b"hold\n", &[end], Some(Instant::now() + TELL))?),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Has the guard let go of all connections.
    pub(crate) fn let_go(&mut self) -> io::Result<()> {
        self.control.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.write_all(b"let go\n")
    }

    /// Sends the guard what it needs to continue a lazy restore: an `UnfinishedRestore`, which is none of this side's
    /// business.
    pub(crate) fn remember(&mut self, unfinished: &impl Serialize) -> io::Result<()> {
        self.say("restore", &serde_json::to_vec(unfinished)?)
    }

    /// Says a word with an object, which is written in hexadecimal, because it may hold line feeds.
    fn say(&mut self, word: &str, object: &[u8]) -> io::Result<()> {
        let mut line = format!("{word} ");
        for byte in object {
            write!(line, "{byte:02x}").map_err(io::Error::other)?;
        }
        line.push('\n');
        match &mut self.control {
            Some(control) => control.write_all(line.as_bytes()),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Leaves the job to the guard: it takes over at once, and this process does not wait for it. The monitor's
    /// connection must not be used after that.
    pub fn hand_over(mut self) {
        // Without the control channel, dropping the guard waits for nothing.
        drop(self.control.take());
    }

    /// Tells the guard that the job is done, and waits for it to go.
    ///
    /// # Errors
    /// The kernel's.
    pub fn finish(mut self) -> io::Result<GuardEnd> {
        let told = self.control.take().is_some_and(|mut control| control.write_all(b"done\n").is_ok());
        let status = self.child.wait()?;
        Ok(if told && status.success() { GuardEnd::Told } else { GuardEnd::WasGone(status) })
    }

    /// [`finish`](Self::finish), with what is odd about it said to a person.
    pub(crate) fn dismiss(self, notice: &dyn Fn(&str)) {
        match self.finish() {
            Ok(GuardEnd::Told) => {}
            Ok(GuardEnd::WasGone(status)) => notice(&format!("the guard process had died ({status})")),
            Err(error) => notice(&format!("the guard process cannot be waited for: {error}")),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.control.take().is_some() {
            drop(self.child.wait());
        }
    }
}
