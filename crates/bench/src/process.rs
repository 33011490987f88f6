//! Processes that end with us.
//!
//! Law: a child is killed when its [`Process`] is dropped, and by the kernel when the thread that started it ends. So
//! it is started on a thread that outlives it: contestants run on the thread that called the bench. A process that a
//! program under test leaves running is no child of ours: it is killed when its [`Detached`] is dropped, and by
//! [`end_detached`] when a signal ends the program and nothing is dropped.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus};

use anyhow::{Context, Result};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::raw;

/// The first core that this process may run on.
pub(crate) fn first_core() -> Result<usize> {
    let cores = sched_getaffinity(None).context("sched_getaffinity")?;
    (0..CpuSet::MAX_CPU).find(|core| cores.is_set(*core)).context("a process without a core")
}

/// Has the calling thread, and the children that it starts, run on one core until it is dropped.
#[derive(Debug)]
pub(crate) struct OneCore {
    before: CpuSet,
}

impl OneCore {
    pub(crate) fn begin() -> Result<Self> {
        let before = sched_getaffinity(None).context("sched_getaffinity")?;
        let mut one = CpuSet::new();
        one.set(first_core()?);
        sched_setaffinity(None, &one).context("sched_setaffinity")?;
        Ok(Self { before })
    }
}

impl Drop for OneCore {
    fn drop(&mut self) {
        // They were its own.
        let _ = sched_setaffinity(None, &self.before);
    }
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

    /// Waits for its end, for the first time, and returns the most memory that it had, in KiB.
    pub(crate) fn wait_for_peak_kib(&self) -> Result<u64> {
        raw::peak_of_child_kib(self.pid()).context("waiting for a child")
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

static DETACHED: Mutex<Vec<(u32, OwnedFd)>> = Mutex::new(Vec::new());

/// A process that is no child of this one; killed, and gone, when dropped.
#[derive(Debug)]
pub(crate) struct Detached {
    pid: u32,
}

impl Detached {
    /// A process that is known to be there.
    pub(crate) fn new(pid: Pid) -> Result<Self> {
        let descriptor = pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
        let pid = pid.as_raw_nonzero().get().unsigned_abs();
        DETACHED.lock().push((pid, descriptor));
        Ok(Self { pid })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }
}

impl Drop for Detached {
    fn drop(&mut self) {
        let mut all = DETACHED.lock();
        let Some(at) = all.iter().position(|(pid, _)| *pid == self.pid) else { return };
        let (_, descriptor) = all.swap_remove(at);
        kill(&descriptor);
        // Its memory is gone before this tells, so that the next run meets none of it.
        let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&limit));
    }
}

/// Kills what programs under test have left running: for a handler that ends this program.
pub(crate) fn end_detached() {
    for (_, descriptor) in DETACHED.lock().iter() {
        kill(descriptor);
    }
}

/// Kills the processes whose command lines name this path: what programs under test had started before they could
/// report it. For a handler that ends this program.
pub(crate) fn end_naming(path: &Path) {
    let name = path.as_os_str().as_bytes();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let number = entry.file_name().to_str().and_then(|number| number.parse().ok());
        let Some(pid) = number.and_then(Pid::from_raw).filter(|pid| *pid != getpid()) else { continue };
        // Opened before its command line is read: its number is not used again meanwhile.
        let Ok(descriptor) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if line.windows(name.len()).any(|part| part == name) {
            kill(&descriptor);
        }
    }
}

fn kill(descriptor: &OwnedFd) {
    // It may have ended by itself.
    let _ = pidfd_send_signal(descriptor, Signal::KILL);
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
    fn a_dropped_process_of_others_has_ended() {
        let mut child = Command::new("sleep").arg("1000").spawn().expect("starts");
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("a pid")).expect("not 0");
        let detached = Detached::new(pid).expect("it is there");
        assert_eq!(detached.pid(), child.id());
        drop(detached);
        assert!(!child.try_wait().expect("waits").expect("has ended").success());
    }

    #[test]
    fn processes_that_name_a_directory_end_and_no_others() {
        let directory = tempfile::tempdir().expect("makes");
        let file = directory.path().join("file");
        std::fs::write(&file, "").expect("writes");
        let mut named = Command::new("tail").arg("-f").arg(&file).spawn().expect("starts");
        let mut other = Command::new("sleep");
        other.arg("1000");
        let mut other = Process::start(other, None).expect("starts");
        end_naming(directory.path());
        assert!(!named.wait().expect("waits").success());
        assert!(other.ended().expect("is asked").is_none());
    }

    #[test]
    fn a_child_has_memory_and_one_core_where_it_is_started_so() {
        let one = OneCore::begin().expect("is allowed");
        let mut command = Command::new("nproc");
        command.stdout(std::process::Stdio::piped()).stdin(std::process::Stdio::piped());
        let mut process = Process::start(command, None).expect("starts");
        drop(one);
        assert!(process.wait_for_peak_kib().expect("ends") > 100);
        let (_, printed) = process.pipes().expect("pipes");
        assert_eq!(std::io::read_to_string(printed).expect("reads"), "1\n");
        assert!(process.wait().expect("is still there").success());
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
