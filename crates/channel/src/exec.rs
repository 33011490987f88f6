//! A command at the other end of a channel, run by the shell.
//!
//! The laws of this module: a command's standard input and output are one socket, so that both directions exist; its
//! standard error is this process's own; in every case it is ended and reaped, within a bounded time, and only by its
//! own process id.

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

/// How long a command may take to end when it was asked to, before it is killed.
const END_WITHIN: Duration = Duration::from_secs(2);

/// A running command. Dropping it ends it.
///
/// It stays in this process's group, so that a program that asks for a password on the terminal can, and Ctrl-C reaches
/// it too. Only the shell itself is signalled; what it has started sees its input end.
///
/// ```
/// use std::time::Duration;
/// use limosa_channel::{Exec, Options, Shutdown};
///
/// let (channel, mut command) = Exec::start("tr a-z A-Z", &Options::default())?;
/// channel.put(b"page")?;
/// channel.shutdown(Shutdown::Write)?;
/// let mut answer = [0; 4];
/// channel.get(&mut answer)?;
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
    /// If there is no shell, or the kernel has no process or descriptor left. What the shell finds wrong with the
    /// command is reported by [`finish`](Self::finish).
    pub fn start(command: &str, options: &Options) -> Result<(Channel, Self), ChannelError> {
        let peer: Arc<str> = format!("exec:{command}").into();
        let failed = |source: io::Error| ChannelError::setup(Operation::Connect, Arc::clone(&peer), source);
        let (near, far) = socket_pair().map_err(failed)?;
        let output = far.try_clone().map_err(failed)?;
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(command).stdin(Stdio::from(far)).stdout(Stdio::from(output));
        let child = shell.spawn().map_err(failed)?;
        // This process's copies of the far end go with it: the end of the data must be seen when the command ends.
        drop(shell);
        // From here on the child is ended if anything fails.
        let this = Self { child, peer: Arc::clone(&peer) };
        Ok((Channel::over(near, peer, options)?, this))
    }

    /// The shell's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the command to end by itself, for at most so long.
    ///
    /// # Errors
    /// [`ChannelError::Command`] if it failed; [`ChannelError::Lingering`] if it did not end: then it is ended.
    pub fn finish(&mut self, within: Duration) -> Result<(), ChannelError> {
        let peer = Arc::clone(&self.peer);
        match self.status_within(within) {
            Ok(Some(status)) if status.success() => Ok(()),
            Ok(Some(status)) => Err(ChannelError::Command { peer, status }),
            Ok(None) => {
                self.end();
                Err(ChannelError::Lingering { peer, after: within })
            }
            Err(source) => Err(ChannelError::setup(Operation::Get, peer, source)),
        }
    }

    /// How it has ended, if it does so within the time.
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

    /// Ends it, by force if it must be, and reaps it.
    fn end(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // It is not reaped yet, so that its id is still its own.
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
