//! A command at the other end of a channel, run by the shell.
//!
//! The laws of this module: a command's standard input and output are one socket, so that both directions exist; its
//! standard error is this process's own; in every case it is terminated and reaped, within a bounded time, and only by
//! its own process id.

use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::channel::{Channel, socket_pair};
use crate::error::{ChannelError, Operation};
use crate::options::Options;

/// Time between SIGTERM and SIGKILL.
const END_WITHIN: Duration = Duration::from_secs(2);

/// A running command. Dropping it terminates it.
///
/// It stays in this process's group, so that it may ask for a password on the terminal, and Ctrl-C reaches it too. Only
/// the shell itself is signalled; processes that it started see the end of their input.
///
/// ```
/// use std::time::Duration;
/// use limosa_channel::{Exec, Options, Shutdown};
///
/// let (channel, mut command) = Exec::start("tr a-z A-Z", &Options::default())?;
/// channel.write_all(b"page")?;
/// channel.shutdown(Shutdown::Write)?;
/// let mut answer = [0; 4];
/// channel.read_exact(&mut answer)?;
/// assert_eq!(&answer, b"PAGE");
/// command.finish(Duration::from_secs(10))?;
/// # Ok::<(), limosa_channel::ChannelError>(())
/// ```
#[derive(Debug)]
pub struct Exec {
    child: Child,
    peer: Arc<str>,
}

impl Exec {
    /// Starts `/bin/sh -c command`, and returns the channel to it.
    ///
    /// # Errors
    /// If there is no shell, or the kernel has no process or descriptor left. An error in the command itself is
    /// reported by [`finish`](Self::finish).
    pub fn start(command: &str, options: &Options) -> Result<(Channel, Self), ChannelError> {
        let peer: Arc<str> = format!("exec:{command}").into();
        let failed = |source: io::Error| ChannelError::setup(Operation::Connect, Arc::clone(&peer), source);
        let (near, far) = socket_pair().map_err(failed)?;
        let output = far.try_clone().map_err(failed)?;
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(command).stdin(Stdio::from(far)).stdout(Stdio::from(output));
        let child = shell.spawn().map_err(failed)?;
        // Closes this process's copies of the far end: otherwise the end of the data would not be seen when the command
        // ends.
        drop(shell);
        // From here on the child is terminated if anything fails.
        let this = Self { child, peer: Arc::clone(&peer) };
        Ok((Channel::over(near, peer, options)?, this))
    }

    /// Returns the shell's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits at most `within` for the command to end by itself.
    ///
    /// # Errors
    /// [`ChannelError::CommandFailed`] if it failed; [`ChannelError::CommandTimedOut`] if it did not end: it is
    /// terminated then.
    pub fn finish(&mut self, within: Duration) -> Result<(), ChannelError> {
        let peer = Arc::clone(&self.peer);
        match self.status_within(within) {
            Ok(Some(status)) if status.success() => Ok(()),
            Ok(Some(status)) => Err(ChannelError::CommandFailed { peer, status }),
            Ok(None) => {
                self.end();
                Err(ChannelError::CommandTimedOut { peer, after: within })
            }
            Err(source) => Err(ChannelError::setup(Operation::Read, peer, source)),
        }
    }

    /// Waits at most `within` for the exit status.
    fn status_within(&mut self, within: Duration) -> io::Result<Option<ExitStatus>> {
        let end = Instant::now().checked_add(within);
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            let rest = end.map(|end| end.saturating_duration_since(Instant::now()));
            if rest == Some(Duration::ZERO) {
                return Ok(None);
            }
            let handle = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty())?;
            let rest = rest.and_then(|rest| Timespec::try_from(rest).ok());
            match poll(&mut [PollFd::new(&handle, PollFlags::IN)], rest.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Terminates the command, by SIGKILL if it ignores SIGTERM, and reaps it.
    fn end(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // It is not reaped yet, so its process id cannot have been reused.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        if !matches!(self.status_within(END_WITHIN), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        self.end();
    }
}
