//! Child processes that end with us.
//!
//! Law: a child is killed by its pid when its [`Process`] is dropped, with all that are below it, and alone by the
//! kernel when this process ends in any way (`PR_SET_PDEATHSIG`, see prctl(2)). The kernel sends that signal when the
//! *thread* that forked ends, and a test is a thread: so one thread that lives as long as the process forks all
//! children.
#![allow(unsafe_code)] // prctl(2) between fork and exec has no safe wrapper.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};

use crate::descendants::kill_below;

/// A child process, killed and reaped when dropped. If it has not ended by then, all that it has started end first: a
/// QEMU outlives a limosa that is killed. [`Process::signal`] kills it alone.
#[derive(Debug)]
pub struct Process {
    name: String,
    pid: u32,
    child: Mutex<Child>,
}

impl Process {
    /// Starts `command`; `name` is for messages.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn spawn(name: &str, command: Command) -> Result<Self> {
        let child = fork_from_the_lasting_thread(command).with_context(|| format!("cannot start {name}"))?;
        Ok(Self { name: name.to_owned(), pid: child.id(), child: Mutex::new(child) })
    }

    /// Starts `command`, which outlives this process if that is killed: for who cleans up after it, and ends by
    /// himself.
    ///
    /// # Errors
    /// The program cannot be started.
    pub(crate) fn spawn_lasting(name: &str, mut command: Command) -> Result<Self> {
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Self { name: name.to_owned(), pid: child.id(), child: Mutex::new(child) })
    }

    /// The process id; it stays ours until the value is dropped or [`Process::wait`] has returned.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The exit status if the child has ended.
    ///
    /// # Errors
    /// wait(2) failed.
    pub fn try_wait(&self) -> Result<Option<ExitStatus>> {
        self.lock().try_wait().with_context(|| format!("waiting for {}", self.name))
    }

    /// Waits for the child to end.
    ///
    /// # Errors
    /// It still runs after `limit`.
    pub fn wait(&self, limit: Duration) -> Result<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= end {
                bail!("{} (pid {}) still runs after {limit:?}", self.name, self.pid);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends a signal; does nothing if the child has ended.
    pub fn signal(&self, signal: Signal) {
        let mut child = self.lock();
        // While the lock is held no thread reaps the child, so the pid cannot have been given to another process.
        if matches!(child.try_wait(), Ok(None))
            && let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw)
        {
            // The only failure left is that it ends right now.
            let _ = kill_process(pid, signal);
        }
    }

    /// SIGKILL, then waits until the process is gone.
    pub fn kill(&self) {
        let mut child = self.lock();
        // Both fail only if the child has been reaped already.
        let _ = child.kill();
        let _ = child.wait();
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, Child> {
        self.child.lock()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has been reaped has no children, and its number may be another process's.
        if matches!(self.try_wait(), Ok(None)) {
            kill_below(self.pid);
        }
        self.kill();
    }
}

/// Whether a process of this id exists and is no zombie.
pub fn is_alive(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    !has_state(&stat, &['Z', 'X'])
}

/// Whether a process or a thread is in one of these states, by its file `stat`.
pub(crate) fn has_state(stat: &str, states: &[char]) -> bool {
    // The state follows the name, which is in parentheses and may contain anything (proc_pid_stat(5)).
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(states))
}

/// Whether there is a listener at this socket, by its absolute path, in the network namespace of a process.
///
/// A server is ready only then: the file of a socket is there from `bind` on, and connections are refused until
/// `listen`. Nothing connects here, as some servers end after their first client.
pub fn listens(pid: u32, socket: &Path) -> bool {
    let Ok(sockets) = std::fs::read_to_string(format!("/proc/{pid}/net/unix")) else { return false };
    // "Num RefCount Protocol Flags Type St Inode Path", where 0x10000 in Flags is a listener (`__SO_ACCEPTCON`).
    sockets.lines().any(|line| {
        let mut words = line.split_ascii_whitespace();
        words.nth(3) == Some("00010000") && words.nth(3).is_some_and(|path| Path::new(path) == socket)
    })
}

type Order = (Command, Sender<io::Result<Child>>);

fn fork_from_the_lasting_thread(command: Command) -> Result<Child> {
    static ORDERS: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    let orders = ORDERS.get_or_init(|| {
        let (sender, receiver) = channel::<Order>();
        std::thread::spawn(move || {
            while let Ok((mut command, answer)) = receiver.recv() {
                // If no thread waits for the answer any more the child is dropped, which std leaves running: end it.
                if let Err(unwanted) = answer.send(spawn_bound_to_us(&mut command))
                    && let Ok(mut child) = unwanted.0
                {
                    let _ = child.kill();
                    let _ = child.wait();
                }
            }
        });
        Mutex::new(sender)
    });
    let (answer, child) = channel();
    let send = orders.lock().send((command, answer));
    send.map_err(|_| anyhow::anyhow!("the thread that starts processes is gone"))?;
    Ok(child.recv().context("the thread that starts processes is gone")??)
}

fn spawn_bound_to_us(command: &mut Command) -> io::Result<Child> {
    let parent = std::process::id();
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; prctl and getppid are plain system calls
    // and nothing is allocated, also not on the error paths (an error from errno, or from a kind alone).
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            // If the parent ended before the call above, its signal was missed.
            if u32::try_from(libc::getppid()) != Ok(parent) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            Ok(())
        });
    }
    command.spawn()
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};

    use super::*;

    fn sleeper() -> Process {
        let mut command = Command::new("sleep");
        command.arg("1000");
        Process::spawn("sleep", command).unwrap()
    }

    #[test]
    fn a_child_is_gone_once_its_process_is_dropped() {
        let process = sleeper();
        let pid = process.pid();
        assert!(is_alive(pid));
        drop(process);
        assert!(!is_alive(pid));
    }

    #[test]
    fn a_socket_is_listened_at_after_listen_and_not_after_bind() {
        let folder = crate::scratch().unwrap();
        let path = folder.path().join("s");
        let own = std::process::id();
        assert!(!listens(own, &path));
        let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        assert!(path.exists() && !listens(own, &path));
        listen(&socket, 1).unwrap();
        assert!(listens(own, &path));
        drop(socket);
        assert!(path.exists() && !listens(own, &path));
    }

    #[test]
    fn a_child_outlives_the_thread_that_asked_for_it() {
        let process = std::thread::spawn(sleeper).join().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert!(is_alive(process.pid()));
        assert!(process.wait(Duration::from_millis(10)).is_err());
    }

    #[test]
    fn a_program_that_does_not_exist_is_an_error_with_its_name() {
        let error = Process::spawn("no such thing", Command::new("/no/such/thing")).unwrap_err();
        assert!(format!("{error:#}").contains("no such thing"));
    }

    #[test]
    fn a_signalled_child_reports_its_status() {
        let process = sleeper();
        process.signal(Signal::TERM);
        let status = process.wait(Duration::from_secs(10)).unwrap();
        assert!(!status.success());
    }
}
