//! Child processes that end with us.
//!
//! Law: a child is killed when its [`Process`] is dropped, and by the kernel when the thread that started it ends. So
//! it is started on a thread that outlives it: contestants run on the thread that called the bench.

use std::os::fd::BorrowedFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus};

use anyhow::{Context, Result};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::raw;

/// The first core that this process may run on.
pub(crate) fn first_core() -> Result<usize> {
    let cores = sched_getaffinity(None).context("sched_getaffinity")?;
    (0..CpuSet::MAX_CPU).find(|core| cores.is_set(*core)).context("a process without a core")
}

/// A child process, killed and waited for when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
}

impl Process {
    /// Starts `command`, with a descriptor that it gets under the same number.
    pub(crate) fn start(mut command: Command, hand: Option<BorrowedFd<'_>>) -> Result<Self> {
        raw::bind_child(&mut command, hand);
        let child = command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Self { child })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Has it, and the threads that it starts from now on, run on one core, or wherever this process may.
    pub(crate) fn pin(&self, core: Option<usize>) -> Result<()> {
        let mut cores = sched_getaffinity(None).context("sched_getaffinity")?;
        if let Some(core) = core {
            cores = CpuSet::new();
            cores.set(core);
        }
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        sched_setaffinity(pid, &cores).context("sched_setaffinity")
    }

    /// The pipes to its standard input and from its standard output, if it has such; once.
    pub(crate) fn pipes(&mut self) -> Option<(ChildStdin, ChildStdout)> {
        self.child.stdin.take().zip(self.child.stdout.take())
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("waiting for a child")
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> Result<ExitStatus> {
        self.child.wait().context("waiting for a child")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail if it has been waited for already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn a_dropped_process_is_gone() {
        let mut command = Command::new("sleep");
        command.arg("1000");
        let process = Process::start(command, None).expect("starts");
        let entry = PathBuf::from(format!("/proc/{}", process.pid()));
        assert!(entry.exists());
        drop(process);
        assert!(!entry.exists());
    }

    #[test]
    fn a_handed_descriptor_can_be_opened_by_the_child() {
        use std::os::fd::{AsFd, AsRawFd};
        let file = tempfile::tempfile().expect("a file");
        let mut command = Command::new("test");
        command.arg("-e").arg(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let mut process = Process::start(command, Some(file.as_fd())).expect("starts");
        assert!(process.wait().expect("ends").success());
    }
}
