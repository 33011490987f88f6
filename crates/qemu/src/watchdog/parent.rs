//! limosa's side of the watchdog.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::net::SendFlags;
use serde::Serialize;

use super::UNKNOWN_PROCESS;
use crate::process::ProcessIdentity;
use crate::qmp::{Qmp, send};

/// How long a watchdog may take to start.
const START: Duration = Duration::from_secs(20);
/// How long it may take to listen.
const TELL: Duration = Duration::from_millis(200);

/// The reason why there is no watchdog.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WatchdogError {
    /// It could not be started.
    #[error("cannot start the watchdog process: {0}")]
    Spawn(#[source] io::Error),
    /// It was started but did not report.
    #[error("the watchdog process did not come up: {0}")]
    NotReady(#[source] io::Error),
}

/// How a watchdog ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchdogEnd {
    /// It ended at the message that the job is done.
    Dismissed,
    /// It had died before.
    Died(ExitStatus),
}

/// A running watchdog. **Dropping it without [`Watchdog::finish`] makes it take over**, and waits for that: an
/// error that left the job undone ends as a kill would. The monitor's connection must not be used after that.
#[derive(Debug)]
pub struct Watchdog {
    child: Child,
    control: Option<UnixStream>,
}

impl Watchdog {
    /// Starts `executable` with `arguments` (the hidden subcommand whose implementation calls [`super::run`]) as the
    /// watchdog of a job of this process on `qmp`, and waits until it is ready. Use `/proc/self/exe` for the running
    /// executable: that works even if its file was replaced meanwhile.
    ///
    /// # Errors
    /// [`WatchdogError`].
    pub fn spawn<S: AsRef<OsStr>>(
        executable: &Path,
        arguments: impl IntoIterator<Item = S>,
        qmp: &Qmp,
    ) -> Result<Self, WatchdogError> {
        let mut watchdog = Self::spawn_without_waiting(executable, arguments, qmp, Stdio::inherit())?;
        let ready = watchdog.wait_ready();
        if let Err(error) = ready {
            // It has not taken over anything and must not.
            watchdog.control = None;
            drop(watchdog.child.kill());
            drop(watchdog.child.wait());
            return Err(WatchdogError::NotReady(error));
        }
        Ok(watchdog)
    }

    /// The same without waiting: messages to it meanwhile are not lost, and a watchdog that does not come up is found
    /// out by [`Watchdog::finish`]. Its messages go to `stderr`.
    ///
    /// # Errors
    /// [`WatchdogError::Spawn`].
    pub fn spawn_without_waiting<S: AsRef<OsStr>>(
        executable: &Path,
        arguments: impl IntoIterator<Item = S>,
        qmp: &Qmp,
        stderr: Stdio,
    ) -> Result<Self, WatchdogError> {
        let (control, peer) = UnixStream::pair().map_err(WatchdogError::Spawn)?;
        let monitor = qmp.descriptor().try_clone_to_owned().map_err(WatchdogError::Spawn)?;
        let own = ProcessIdentity::own();
        let child = Command::new(executable)
            .args(arguments)
            .arg(qmp.monitor())
            .arg(qmp.process().map_or_else(|| UNKNOWN_PROCESS.to_owned(), |pid| pid.to_string()))
            .arg(own.started.to_string())
            .arg(own.pid.to_string())
            .stdin(Stdio::from(OwnedFd::from(peer)))
            .stdout(Stdio::from(monitor))
            .stderr(stderr)
            .spawn()
            .map_err(WatchdogError::Spawn)?;
        Ok(Self { child, control: Some(control) })
    }

    fn wait_ready(&mut self) -> io::Result<()> {
        let control = self.control.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        control.set_read_timeout(Some(START))?;
        let mut word = [0; 6];
        control.read_exact(&mut word)?;
        if &word == b"ready\n" { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// The watchdog's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Names a file that the watchdog is to unlink if it takes over: the unfinished snapshot. `None`: nothing (any
    /// more).
    ///
    /// # Errors
    /// The kernel's, for example if the watchdog has died.
    pub fn set_temporary_file(&mut self, path: Option<&Path>) -> io::Result<()> {
        let path = path.map(std::path::absolute).transpose()?.unwrap_or_default();
        self.say("temporary", path.as_os_str().as_bytes())
    }

    /// Names the control socket of a server of disks, which the watchdog may have undo overlays.
    ///
    /// # Errors
    /// As [`set_temporary_file`](Self::set_temporary_file).
    pub fn add_disk_server(&mut self, control: &Path) -> io::Result<()> {
        self.say("disk-server", std::path::absolute(control)?.as_os_str().as_bytes())
    }

    /// Has the watchdog end this process if it says nothing for `limit`, for example because it was stopped by a
    /// signal, and take over: until the heartbeat is dropped, it has to [beat](Heartbeat::beat).
    ///
    /// # Errors
    /// As [`set_temporary_file`](Self::set_temporary_file).
    pub fn heartbeat(&mut self, limit: Duration) -> io::Result<Heartbeat> {
        let control = self.control.as_ref().ok_or(io::ErrorKind::BrokenPipe)?.try_clone()?;
        let heartbeat = Heartbeat { control, limit };
        heartbeat.say(limit)?;
        Ok(heartbeat)
    }

    /// Makes the watchdog hold this connection of QEMU's too.
    pub(crate) fn hold(&mut self, end: BorrowedFd<'_>) -> io::Result<()> {
        match &self.control {
            Some(control) => Ok(send(control.as_fd(), b"hold\n", &[end], Some(Instant::now() + TELL))?),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Makes the watchdog close all connections that it holds.
    pub(crate) fn release(&mut self) -> io::Result<()> {
        self.control.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.write_all(b"release\n")
    }

    /// Sends the watchdog what it needs to continue a lazy restore: an `UnfinishedRestore`, which does not belong to
    /// this side's business.
    pub(crate) fn remember(&mut self, unfinished: &impl Serialize) -> io::Result<()> {
        self.say("restore", &serde_json::to_vec(unfinished)?)
    }

    /// Sends a message with an object, which is written in hexadecimal, because it may hold line feeds.
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

    /// Leaves the job to the watchdog: it takes over at once, and this process does not wait for it. The monitor's
    /// connection must not be used after that.
    pub fn hand_over(mut self) {
        // Without the control channel, dropping the watchdog waits for nothing.
        drop(self.control.take());
    }

    /// Reports to the watchdog that the job is done, and waits for its end.
    ///
    /// # Errors
    /// The kernel's.
    pub fn finish(mut self) -> io::Result<WatchdogEnd> {
        let sent = self.control.take().is_some_and(|mut control| control.write_all(b"done\n").is_ok());
        let status = self.child.wait()?;
        Ok(if sent && status.success() { WatchdogEnd::Dismissed } else { WatchdogEnd::Died(status) })
    }

    /// [`finish`](Self::finish), with a notice for a person if something is odd.
    pub(crate) fn dismiss(self, notice: &dyn Fn(&str)) {
        match self.finish() {
            Ok(WatchdogEnd::Dismissed) => {}
            Ok(WatchdogEnd::Died(status)) => notice(&format!("the watchdog process had died ({status})")),
            Err(error) => notice(&format!("the watchdog process cannot be waited for: {error}")),
        }
    }
}

/// The signs of life of a process that its watchdog ends if there are none.
#[derive(Debug)]
pub struct Heartbeat {
    control: UnixStream,
    limit: Duration,
}

impl Heartbeat {
    /// Says that this process lives. Does not wait.
    pub fn beat(&self) {
        // A watchdog that is dead, or does not read, ends nothing.
        let _ = self.say(self.limit);
    }

    fn say(&self, limit: Duration) -> io::Result<()> {
        let line = format!("alive {}\n", limit.as_millis());
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        Ok(rustix::net::send(&self.control, line.as_bytes(), flags).map(drop)?)
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        let _ = self.say(Duration::ZERO);
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        if self.control.take().is_some() {
            drop(self.child.wait());
        }
    }
}
